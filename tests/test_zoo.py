"""Shapes of published models: every one is a legal call, a seed gives the same calls, the summary is what rows say."""

import json

import pytest
import torch

from tilesmith.bench import run, zoo
from tilesmith.bench.document import merged
from tilesmith.engine import ops


@pytest.fixture
def tiny(monkeypatch):
    """Calls that a test can run: one small model, few rows."""
    monkeypatch.setattr(zoo, "TOKENS", 64)
    monkeypatch.setattr(zoo, "SHORTEST", 8)
    monkeypatch.setattr(zoo, "models", lambda: (zoo.Model("tiny", 2, 1, 16, 32, 64, 100),))


def test_the_table_has_models_that_exist():
    models = zoo.models()
    assert len(models) >= 40 and len({m.name for m in models}) == len(models)
    for m in models:
        assert m.heads % m.kv_heads == 0 and m.head_dim % 8 == 0 and m.longest >= 512 and m.intermediate > 0
        assert m.windows in ("some", "all") and m.sides in (1, 2) and m.value_dim % 8 == 0
        assert m.hidden % 8 == 0 and m.value_dim != m.head_dim and (m.windows == "some" or m.window)


def test_latent_attention_has_a_rank_and_a_rotated_part():
    latent = [m for m in zoo.models() if m.kv_lora_rank or m.q_lora_rank or m.rope_dim]
    assert {"DeepSeek-V3", "Kimi-K2", "GLM-5"} <= {m.name for m in latent}
    for m in latent:
        assert m.kv_lora_rank and 0 < m.rope_dim < m.head_dim and m.heads == m.kv_heads and not m.output_gate
        assert m.kv_lora_rank % 8 == m.q_lora_rank % 8 == m.rope_dim % 8 == 0


def test_layers_of_other_heads_are_rows_of_the_same_model():
    by_name = {m.name: m for m in zoo.models()}
    others = [name for name in by_name if name.endswith(" global")]
    assert "Gemma-4-31B global" in others
    for name in others:
        local, whole = by_name[name.removesuffix(" global")], by_name[name]
        assert local.windows == "all" and not whole.window and whole.head_dim == 2 * local.head_dim
        for field in ("heads", "hidden", "intermediate", "vocabulary"):
            assert getattr(local, field) == getattr(whole, field)


def test_the_products_of_a_model_are_those_of_its_layers():
    by_name = {m.name: m for m in zoo.models()}
    assert by_name["Llama-3.1-8B"].products() == {
        "q": (4096, 4096), "k and v": (4096, 1024), "o": (4096, 4096),
        "up": (4096, 14336), "down": (14336, 4096), "head": (4096, 128256),
    }  # fmt: skip
    assert by_name["DeepSeek-V3"].products() == {
        "q down": (7168, 1536), "q up": (1536, 24576), "kv down": (7168, 576), "kv up": (512, 32768),
        "o": (16384, 7168), "up": (7168, 18432), "down": (18432, 7168), "head": (7168, 129280),
    }  # fmt: skip
    assert by_name["Qwen3.5-27B"].products()["q"] == (5120, 2 * 24 * 256)  # with its gate
    assert "head" not in by_name["FLUX.1"].products()
    assert all(name in zoo.LAYERS for m in zoo.models() for name in m.products())


@pytest.mark.parametrize("op", ["attention", "rms_norm", "swiglu", "linear_cross_entropy", *zoo.PRODUCTS])
def test_a_seed_draws_the_same_calls_that_an_op_takes(op):
    drawn = zoo.sample(op, 3, 60)
    assert [c.name for c in drawn] == [c.name for c in zoo.sample(op, 3, 60)]
    assert [c.name for c in drawn] != [c.name for c in zoo.sample(op, 4, 60)]
    assert len({c.name for c in drawn}) == 60
    for case in drawn[:6]:
        device = torch.device("meta")
        args = {n: torch.empty(v.shape, device=device, dtype=v.dtype or torch.bfloat16) if hasattr(v, "shape") else v
                for n, v in case.args.items()}  # fmt: skip
        ops()[op](**args)


@pytest.mark.parametrize("op", ["kl_div", "linear_distillation", "linear_preference", "softmax"])
def test_a_call_is_named_by_the_tokens_that_it_has(op):
    for case in zoo.sample(op, 5, 12):
        tokens = next(v for v in case.args.values() if hasattr(v, "shape")).shape[:-1]
        assert f" {' x '.join(map(str, tokens))} x " in case.name


@pytest.mark.parametrize("op", zoo.PRODUCTS)
def test_a_product_is_a_layer_of_a_model(op):
    by_name = {m.name: m for m in zoo.models()}
    seen = set()
    for case in zoo.sample(op, 2, 500):
        whole, *sizes = case.name.rsplit(" x ", 2)
        whole, rows = whole.rsplit(" ", 1)
        name, layer = next((n, k) for n in by_name for k in zoo.PRODUCTS[op] if whole == f"{n} {k}")
        inputs, outputs = map(int, sizes)
        assert by_name[name].products()[layer] == (inputs, outputs)
        x, weight = (case.args[n].shape for n in (("a", "b") if op == "matmul" else ("x", "weight")))
        assert x == (int(rows), inputs) and (int(rows) - 1) * max(inputs, outputs) <= zoo.ELEMENTS
        assert weight == ((inputs, outputs) if op == "matmul" else (outputs, inputs))
        assert "bias" not in case.args or case.args["bias"].shape == (outputs,)
        seen.add(layer)
    assert seen == set(zoo.PRODUCTS[op])


def test_a_matmul_has_the_weight_as_a_layer_stores_it(tiny):
    (case,) = zoo.sample("matmul", 1, 1)
    built = case.build(torch.device("cpu"), torch.float32, case.generator())
    assert built["b"].mT.is_contiguous() and built["a"].is_contiguous()


def test_a_decode_has_few_queries_and_a_cache():
    for case in zoo.sample("attention", 1, 30, decode=True):
        q, k = case.args["q"].shape, case.args["k"].shape
        assert q[2] <= 16 < k[2] and k[0] * k[2] <= 2**20


def test_a_decode_of_latent_attention_is_the_absorbed_form():
    latent = {m.name: m for m in zoo.models() if m.kv_lora_rank}
    drawn = [c for c in zoo.sample("attention", 1, 300, decode=True) if c.name.split(" decode ")[0] in latent]
    assert {c.name.split(" decode ")[0] for c in drawn} == set(latent)
    for case in drawn:
        model = latent[case.name.split(" decode ")[0]]
        q, k, v = (case.args[n].shape for n in "qkv")
        assert q[1] == model.heads and q[3] == k[3] == model.kv_lora_rank + model.rope_dim
        assert k[1] == 1 and v == (*k[:3], model.kv_lora_rank) and case.args["v"].columns_of == "k"
        assert case.args["scale"] == model.head_dim**-0.5


def test_a_latent_decode_runs(monkeypatch):
    model = zoo.Model("tiny", 4, 4, 24, 32, 64, 100, value_dim=16, kv_lora_rank=32, rope_dim=8)
    monkeypatch.setattr(zoo, "models", lambda: (model,))
    monkeypatch.setattr(zoo, "CACHES", (64,))
    monkeypatch.setattr(zoo, "DRAFTS", (4,))
    (case,) = zoo.sample("attention", 1, 1, decode=True)
    args = case.build(torch.device("cpu"), torch.float64, case.generator())
    assert args["v"].data_ptr() == args["k"].data_ptr()
    scores = args["q"] @ args["k"].mT * 24**-0.5
    scores = scores.masked_fill(torch.ones(4, 64).tril(60) == 0, float("-inf"))
    out = ops()["attention"](**args)
    torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, scores.softmax(-1) @ args["v"])
    asked = {"seed": 1, "count": 1, "command": "x", "decode": True, "only": ("tilesmith", "pytorch")}
    for module in (zoo, run):
        monkeypatch.setattr(module, "ceilings", lambda device: run.Ceilings(1.0, 1.0))
    found = zoo.run("attention", torch.device("cpu"), torch.float32, **asked)
    assert found["subject"] == "attention-decode-zoo" and found["summary"]["forward"]["calls"] == 1


def test_what_cannot_be_drawn_is_refused(tiny):
    with pytest.raises(ValueError, match="merge_attention cannot be drawn from models; ops that can: "):
        zoo.sample("merge_attention", 1, 1)
    with pytest.raises(ValueError, match="decode is a call of attention, not of rms_norm"):
        zoo.sample("rms_norm", 1, 1, decode=True)
    with pytest.raises(ValueError, match=r"rms_norm: only \d+ calls that differ could be drawn, not 500"):
        zoo.sample("rms_norm", 1, 500)


def test_a_run_has_rows_and_a_summary(monkeypatch, tiny):
    for module in (zoo, run):
        monkeypatch.setattr(module, "ceilings", lambda device: run.Ceilings(1.0, 1.0))
    seen = []
    ours_and = {"only": ("tilesmith", "pytorch"), "so_far": seen.append}
    found = zoo.run("rms_norm", torch.device("cpu"), torch.float32, seed=1, count=2, command="x", **ours_and)
    assert found["subject"] == "rms_norm-zoo" and found["seed"] == 1 and len(seen) == 2
    assert set(found["summary"]) == {"forward", "backward"} and found["summary"]["forward"]["calls"] == 2
    json.dumps(found)


def test_a_summary_tells_the_mean_and_the_worst():
    rows = [{"pass": "forward", "case": str(n), "times_best_peer": n} for n in (4.0, 1.0, 0.5, 2.0, 1.0, 8.0)]
    found = zoo.summary([*rows, {"pass": "forward", "case": "peer", "us": 1.0}])["forward"]
    assert found["calls"] == 6 and found["minimum"] == 0.5 and found["geometric_mean"] == round(32 ** (1 / 6), 4)
    assert [row["case"] for row in found["worst"]] == ["0.5", "1.0", "1.0", "2.0", "4.0"]


def test_a_summary_of_products_tells_how_much_longer_ours_takes():
    rows = [
        {"pass": "forward", "case": str(n), "provider": name, "us": us}
        for n in (1.5, 1.0)
        for name, us in (("tilesmith", 2.0 * n), ("products", 2.0))
    ]
    found = zoo.summary(rows)["forward"]
    assert found["calls"] == 2 and found["maximum"] == 1.5 and found["geometric_mean"] == round(1.5**0.5, 4)
    assert found["worst"] == [{"case": "1.5", "times_products": 1.5}, {"case": "1.0", "times_products": 1.0}]


def test_rows_of_two_seeds_in_one_file_are_summed_up_together():
    hardware = {"name": "x", "arch": "y"}

    def made(case, ratio):
        rows = [{"pass": "forward", "case": case, "provider": "tilesmith", "times_best_peer": ratio}]
        return {"hardware": hardware, "command": case, "summary": zoo.summary(rows), "rows": rows}

    both = merged(made("old", 0.5), made("new", 2.0))
    assert both["summary"]["forward"] | {"worst": 0} == {
        "calls": 2, "geometric_mean": 1.0, "minimum": 0.5, "worst": 0,
    }  # fmt: skip


def test_all_ops_of_a_zoo_are_those_that_can_be_drawn():
    pytest.importorskip("typer")
    from tilesmith.cli import bench

    assert bench._subjects(["all"], "bench", None, 3, False) == zoo.served()
    assert bench._subjects(["all"], "bench", None, 3, True) == ["attention"]
