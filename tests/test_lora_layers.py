"""Linear layers with adapters of PEFT by `ops.lora_linear`: which are served, what they compute, who stays PEFT's."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilesmith
from optimize_models import Calls, assert_within_budget, batch, build, train
from tilesmith import ops, use
from tilesmith.models import optimize, undo
from tilesmith.validate.budget import compare

peft = pytest.importorskip("peft")
FEATURES, OUTPUTS, RANK = 24, 16, 4


@pytest.fixture(autouse=True)
def op_everywhere():
    """The op runs on a CPU too, by its reference."""
    with use(lora_linear="reference"):
        yield


class Layers(nn.Module):
    """Two layers."""

    def __init__(self, dtype=torch.float32, bias=True):
        super().__init__()
        self.first = nn.Linear(FEATURES, OUTPUTS, bias=bias, dtype=dtype)
        self.second = nn.Linear(OUTPUTS, FEATURES, bias=False, dtype=dtype)

    def forward(self, x):
        """One behind the other."""
        return self.second(torch.tanh(self.first(x)))


def adapted(model=None, **config):
    """The model with an adapter on each layer."""
    torch.manual_seed(0)
    config = {"r": RANK, "target_modules": ["first", "second"], "init_lora_weights": False, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model or Layers(), peft.LoraConfig(**config))


def inputs(dtype=torch.float32):
    return torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)


def stepped(model, x, dtype=None):
    """The output, and the gradients of x and of everything that trains."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def served(model, x=None):
    """How often a call of the model runs the op, and what it gives."""
    with Calls() as calls:
        y = model(inputs() if x is None else x)
    return calls.get("lora_linear", 0), y


def rows(model):
    """What the report says of layers with adapters."""
    return [row for row in model.tilesmith_report.rows if row.rule == "lora"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_what_pefts_do(dtype):
    theirs = adapted(Layers(dtype))
    ours = optimize(copy.deepcopy(theirs))
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    x = inputs(dtype)
    wanted, exact = stepped(theirs, x), stepped(copy.deepcopy(theirs).double(), x.double())
    with Calls() as calls:
        found = stepped(ours, x)
    assert calls == {"lora_linear": 2, "lora_linear_vjp": 2}
    for name, value in found.items():
        judged = compare(value, wanted[name], exact[name], computed=dtype)
        assert judged.passed, (name, judged)


def test_a_model_of_transformers_trains_as_before():
    inputs = batch("llama")
    plain = adapted(build("llama"), target_modules="all-linear").train()
    oracle, original = train(copy.deepcopy(plain).double(), inputs), train(copy.deepcopy(plain), inputs)
    model = optimize(plain)
    assert_within_budget(train(model, inputs), original, oracle)
    assert [row.action for row in rows(model)] == ["replaced"] * 14 and model.tilesmith_report.calls()[
        "lora_linear"
    ] == 14
    undo(model)
    back = train(model, inputs)
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())
    assert not any("tilesmith" in name for m in model.modules() for name in vars(m))


def test_only_x_and_its_projection_are_kept():
    model, kept = optimize(adapted()).base_model.model.first, []
    x = inputs().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    held = {p.data_ptr() for p in model.parameters()} | {x.data_ptr()}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in held] == [(2, 5, RANK)]


def test_an_adapter_that_has_a_mind_of_its_own_stays_pefts():
    model = optimize(adapted())
    count, y = served(model)
    assert count == 2
    with model.disable_adapter():
        assert served(model)[0] == 0
    model.merge_adapter()
    count, merged = served(model)
    assert count == 0
    torch.testing.assert_close(merged, y)
    model.unmerge_adapter()
    assert served(model)[0] == 2
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False))
    model.set_adapter("other")
    assert served(model)[0] == 1  # the other layer has no such adapter
    model.base_model.set_adapter(["default", "other"])
    assert served(model)[0] == 1


@pytest.mark.parametrize(("of", "calls"), [("base_layer", 2), ("lora_A", 1), ("lora_B", 1)])
def test_whoever_observes_a_layer_within_goes_on_doing_so(of, calls):
    model, seen = optimize(adapted()), []
    layer = getattr(model.base_model.model.first, of)
    (layer if of == "base_layer" else layer["default"]).register_forward_hook(lambda *_: seen.append(of))
    assert served(model)[0] == calls and seen == [of]


def test_dropout_drops_what_it_did():
    theirs = adapted(Layers(torch.bfloat16), lora_dropout=0.5)
    ours, x = optimize(copy.deepcopy(theirs)), inputs(torch.bfloat16)
    results = []
    for model in (theirs, ours, copy.deepcopy(theirs).double()):
        torch.manual_seed(3)
        results.append(stepped(model.train(), x.double() if len(results) == 2 else x))
    for name, value in results[1].items():
        judged = compare(value, results[0][name], results[2][name], computed=torch.bfloat16)
        assert judged.passed, (name, judged)
    torch.manual_seed(4)
    assert served(ours, x)[0] == 2 and not torch.equal(ours(x), ours.eval()(x))
    assert served(ours, x)[0] == 2 and torch.equal(ours(x), ours(x))


class Quantised(nn.Linear):
    """A layer whose forward is its own."""

    def forward(self, x):
        """A product of rounded weights."""
        return nn.functional.linear(x, self.weight.round(decimals=1), self.bias)


def test_an_adapter_is_added_to_what_another_layer_computes():
    model = Layers()
    model.first, model.second = Quantised(FEATURES, OUTPUTS), nn.Linear(OUTPUTS, FEATURES, dtype=torch.float32)
    theirs = adapted(model)
    ours = optimize(copy.deepcopy(theirs))
    assert rows(ours)[0].reason == "one active adapter, beside what its base layer (Quantised) computes"
    with Calls() as calls:
        found = stepped(ours, inputs())
    assert calls == {"lora_linear": 2, "lora_linear_vjp": 2}
    wanted, exact = stepped(theirs, inputs()), stepped(copy.deepcopy(theirs).double(), inputs().double())
    for name, value in found.items():
        judged = compare(value, wanted[name], exact[name])
        assert judged.passed, (name, judged)


class Widening(nn.Linear):
    """A layer that returns fp32."""

    def forward(self, x):
        """A product in fp32."""
        return nn.functional.linear(x.float(), self.weight.float(), self.bias.float())


def test_the_adapter_of_a_layer_that_returns_fp32_is_not_rounded():
    model = Layers()
    model.first = Widening(FEATURES, OUTPUTS, dtype=torch.bfloat16)
    theirs = adapted(model, target_modules=["first"]).base_model.model.first
    ours, x = optimize(copy.deepcopy(theirs)), inputs(torch.bfloat16)
    count, y = served(ours, x)
    assert count == 1 and y.dtype is torch.float32
    judged = compare(y, theirs(x), copy.deepcopy(theirs).double()(x.double()))
    assert judged.passed, judged


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "adapter default: it is a variant of LoRA"),
        ({"lora_bias": True}, "adapter default: it has a bias"),
    ],
)
def test_others_are_left_alone_with_a_reason(config, reason):
    theirs = adapted(**config)
    ours = optimize(copy.deepcopy(theirs))
    assert [(r.action, r.reason) for r in rows(ours)] == [("skipped", reason)] * 2 and not ours.tilesmith_report.wanted
    assert torch.equal(ours(inputs()), theirs(inputs()))


def test_a_class_that_computes_something_else_is_refused():
    theirs = adapted()

    class Twice(type(theirs.base_model.model.first)):
        def forward(self, x):
            return 2 * super().forward(x)

    theirs.base_model.model.first.__class__ = Twice
    found = rows(optimize(theirs))
    assert [r.action for r in found] == ["skipped", "replaced"]
    assert found[0].reason.startswith("on small inputs it differs from its base layer")


def test_under_autocast_the_input_is_cast_and_factors_are_not():
    ours = optimize(adapted(Layers(torch.bfloat16)))
    with torch.autocast("cpu", torch.bfloat16):
        count, y = served(ours, inputs())
    assert count == 2 and y.dtype is torch.bfloat16
    wide = optimize(adapted())  # autocast keeps a cast base weight, so the layer computes it by itself
    with torch.autocast("cpu", torch.bfloat16):
        assert served(wide)[1].dtype is torch.bfloat16


def test_copies_pickles_and_checkpoints():
    model = optimize(adapted())
    x = inputs()
    wanted = stepped(model, x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(value, wanted[name]) for name, value in stepped(again, x).items())

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    found = stepped(Checkpointed(), x)
    assert all(torch.equal(value, wanted[name.removeprefix("model.")]) for name, value in found.items())


def test_compiled_it_is_one_call_in_one_graph():
    model = optimize(adapted())
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs()), model(inputs()))


def test_adapters_may_come_after():
    model = adapted(optimize(Layers()))
    count, y = served(model)
    assert count == 0
    tilesmith.optimize(model)
    count, again = served(model)
    assert count == 2
    torch.testing.assert_close(y, again)


def test_double_backward():
    x, w, a, b = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 6), (5, 6), (2, 6), (5, 2))
    )
    assert torch.autograd.gradgradcheck(lambda *args: ops.lora_linear(*args, scale=0.5), (x, w, a, b))
