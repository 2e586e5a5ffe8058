"""`optimize` on the model families of transformers: the same numbers, everything taken back."""

import contextvars
import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

from optimize_models import (  # noqa: F401
    CAUSAL,
    FAMILIES,
    OTHERS,
    Calls,
    assert_within_budget,
    batch,
    build,
    checkpoint_layers,
    ops_everywhere,
    train,
)
from tilesmith.models import optimize, undo
from tilesmith.models.layers.logits import LazyLogits
from tilesmith.validate.budget import compare

# calls of one training step; a gated product is computed again in the backward instead of being kept
EXPECTED = {
    "llama": {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "swiglu": 4},
    "qwen3": {"rms_norm": 3, "add_rms_norm": 2, "rms_norm_rope": 2, "swiglu": 4},
    "gemma2": {"rms_norm": 7, "add_rms_norm": 2, "rope": 2, "geglu": 4},
    "gpt2": {"layer_norm": 3, "add_layer_norm": 2, "gelu": 2},
    "bert": {"layer_norm": 2, "add_layer_norm": 4, "gelu": 3},
}


# The rules that are for each column of the table in docs/models.md
COLUMNS = (
    {"norm", "add_norm"},
    {"rope"},
    {"mlp", "activation", "experts", "router"},
    {"attention", "latent", "selection"},
    {"loss"},
)


def _assert_as_documented(family: str, model: torch.nn.Module) -> None:
    """Each op that docs/models.md names for a family replaces something; where it has "–" or nothing, none does."""
    lines = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| `{family}` |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    assert len(cells) == len(COLUMNS)
    for cell, rules in zip(cells, COLUMNS):
        found = {op for row in model.tilesmith_report.replaced if row.rule in rules for op in row.ops}
        named = set(re.findall(r"`(\w+)`", cell))
        if cell in ("–", ""):
            assert not found, f"docs/models.md has {cell!r} where {', '.join(sorted(rules))} replace by {found}"
        assert named <= found, f"docs/models.md names {named - found}, which replace nothing"


@pytest.mark.parametrize("padded", ["right", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_computes_the_same_and_comes_back(family, padded):
    model, inputs = build(family), batch(family, padded)
    oracle = train(copy.deepcopy(model).double(), inputs)
    original = train(model, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    state, attributes = model.state_dict(), {n: set(m.__dict__) for n, m in model.named_modules()}
    classes = [type(m) for m in model.modules()]

    assert optimize(model, strict=True) is model
    _assert_as_documented(family, model)
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    assert list(model.state_dict()) == list(state)
    with Calls() as calls:
        found = train(model, inputs)
    forward = {name: n for name, n in calls.items() if not name.endswith("_vjp")}
    assert forward == {**EXPECTED[family], "attention": 2, "linear_cross_entropy": 1}
    assert_within_budget(found, original, oracle)

    undo(model)
    assert [type(m) for m in model.modules()] == classes
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == attributes
    back = train(model, inputs)
    assert torch.equal(back[0], original[0]) and torch.equal(back[1], original[1])
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())

    optimize(model)
    train(model, inputs)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_family_in_bfloat16(family):
    model, inputs = build(family), batch(family)
    half = copy.deepcopy(model).bfloat16()
    oracle = train(copy.deepcopy(half).float(), inputs)
    original = train(half, inputs)
    assert_within_budget(train(optimize(half, strict=True), inputs), original, oracle)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_compute_the_same(family):
    try:
        model = build(family)
    except AttributeError:
        pytest.skip(f"this transformers has no {family}")
    inputs = batch(family)
    oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    assert_within_budget(train(optimize(model), inputs), original, oracle)
    _assert_as_documented(family, model)
    assert len(model.tilesmith_report.replaced) >= 5
    back = train(undo(model), inputs)
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_under_every_mask(family):
    for padded in ("left", "right", None):
        if padded == "left" and family == "gemma2":
            continue  # its own attention is NaN in such rows, in float64
        attention_before = "sdpa" if family != "gemma2" else "eager"
        model, inputs = build(family, layers=1, attention=attention_before), batch(family, padded)
        oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
        optimize(model, only="attention")
        with Calls() as calls:
            found = train(model, inputs)
        assert calls["attention"] == 1
        assert_within_budget(found, original, oracle)


@pytest.mark.parametrize("family", CAUSAL)
def test_generate(family):
    model = build(family).eval()
    inputs = {k: v for k, v in batch(family, "left").items() if k != "labels"}

    def tokens():
        options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
        return [model.generate(**inputs, **options, cache_implementation=kind) for kind in ("dynamic", "static")]

    wanted = tokens()
    optimize(model)
    for found in (tokens(), contextvars.Context().run(tokens)):
        assert all(torch.equal(f, w) for f, w in zip(found, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_kernel_the_own_forward_runs(family):
    def check():
        for padding in ("left", "right", None):
            model = build(family, attention="sdpa" if family != "gemma2" else "eager")
            inputs = batch(family, padding)
            original = train(model, inputs)
            optimize(model)
            with Calls() as calls:
                found = train(model, inputs)
            assert set(calls) <= {"linear_cross_entropy", "linear_cross_entropy_vjp"}
            assert torch.equal(found[1], original[1])

    contextvars.Context().run(check)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_copies_and_pickles(family):
    model, inputs = optimize(build(family)), batch(family)
    loss, _, gradients = train(model, inputs)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    checkpoint_layers(model)
    with Calls() as calls:
        again = train(model, inputs)
    assert calls.get("swiglu", calls.get("geglu", calls.get("gelu"))) > 2
    checkpoint_layers(model, on=False)
    for other in (again, *(train(twin, inputs) for twin in twins)):
        torch.testing.assert_close(other[0], loss)
        torch.testing.assert_close(other[2], gradients)
    plain = build(family)
    wanted = train(plain, inputs)
    for twin in twins:
        assert twin.tilesmith_report == model.tilesmith_report
        torch.testing.assert_close(train(undo(twin), inputs)[2], wanted[2])
        assert [type(m) for m in twin.modules()] == [type(m) for m in plain.modules()]
        assert twin.config._attn_implementation == "eager" and model.config._attn_implementation == "tilesmith"


def test_unpickling_registers_attention():
    transformers = pytest.importorskip("transformers")
    from tilesmith.rewrite.variants import variant

    data = pickle.dumps(optimize(build("llama", layers=1)))
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop("tilesmith")
    variant.cache_clear()
    loss, _, _ = train(pickle.loads(data), batch("llama"))
    assert loss.isfinite()


@pytest.mark.parametrize("family", FAMILIES)
def test_compile_without_graph_breaks(family):
    torch._dynamo.reset()
    model, inputs = build(family, layers=1), batch(family)
    oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    out = compiled(**inputs)
    assert isinstance(out.logits, torch.Tensor if family == "bert" else LazyLogits)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    logits = out.logits.detach()[inputs["attention_mask"].bool()]
    assert_within_budget((out.loss.detach(), logits, gradients), original, oracle)


@pytest.mark.parametrize("family", FAMILIES)
def test_export(family):
    model = optimize(build(family, layers=1)).eval()
    inputs = {k: v for k, v in batch(family).items() if k != "labels"}
    if family in CAUSAL:
        inputs["use_cache"] = False
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False)
        found, expected = program.module()(**inputs).logits, model(**inputs).logits
    if "attention_mask" in inputs and found.shape[:2] == inputs["attention_mask"].shape:
        # a traced model cannot know where the padding is, so that padding attends to other keys
        found, expected = (logits[inputs["attention_mask"].bool()] for logits in (found, expected))
    torch.testing.assert_close(found, expected)
    assert any("tilesmith" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family):
    model, inputs = build(family), batch(family)
    oracle = train(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        original = train(model, inputs)
        found = train(optimize(model), inputs)
    for results in zip(found[:2], original[:2], oracle[:2]):
        assert compare(*results, computed=torch.bfloat16).passed


def test_the_values_of_a_mask_are_read_once(monkeypatch):
    """Reading waits for the GPU: a bool mask is read once, also by layers of two kinds and in the next step."""
    from tilesmith.models.attention import masks

    def check():
        model, inputs = build("gemma3", attention="sdpa"), batch("gemma3", "left")
        inputs["attention_mask"] = inputs["attention_mask"].bool()
        reads, read = [], masks._read
        monkeypatch.setattr(masks, "reaches_device", lambda *args: True)
        monkeypatch.setattr(masks, "_read", lambda padding: reads.append(padding.shape) or read(padding))
        optimize(model)
        first = model(**inputs).logits
        assert len(reads) == 1
        assert torch.equal(model(**inputs).logits, first) and len(reads) == 1
        inputs["attention_mask"][:, :2] = ~inputs["attention_mask"][:, :2]
        model(**inputs)
        assert len(reads) == 2, "its values have changed"

    contextvars.Context().run(check)
