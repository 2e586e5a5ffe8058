"""The gradients of biases by our op: whose are, what they are, and who still computes his own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilesmith
from optimize_models import Calls, rows_of
from tilesmith import use
from tilesmith.models import optimize, undo
from tilesmith.models.layers import biases

GELU_AND_BIASES = ("activation", "bias", "functional")


class Turned(nn.Module):
    """transformers' Conv1D."""

    def __init__(self, features, outputs):
        super().__init__()
        self.outputs = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(features, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        """x weight + bias."""
        shape = x.size()[:-1] + (self.outputs,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Doubled(Turned):
    """Looks like it."""

    def forward(self, x):
        """Twice that."""
        return 2 * super().forward(x)


class Named(nn.Linear):
    """Another name for the same."""


class Scaled(nn.Linear):
    """Another linear layer."""

    def forward(self, input):
        """Twice the product."""
        return super().forward(2 * input)


@pytest.fixture
def op_everywhere():
    with use(column_sums="reference"):
        yield


pinned = pytest.mark.usefixtures("op_everywhere")


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), Turned(12, 12), Named(12, 5)).to(dtype)


def _step(model, x, run=lambda model, x: model(x)):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(model, x)
    y.square().sum().backward()
    return y, x.grad, {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def _check(model, x, run=lambda model, x: model(x), sums=3):
    """All as before to the bit, but for the sums: those are more exact, or equal."""
    y, dx, before = _step(model, x, run)
    _, _, exact = _step(copy.deepcopy(model).double(), x.double())
    optimize(model, only="bias")
    with Calls() as calls:
        again, dx_again, found = _step(model, x, run)
    assert calls.get("column_sums", 0) == sums
    assert torch.equal(y, again) and torch.equal(dx, dx_again)
    for name, gradient in before.items():
        if gradient is None or "weight" in name:
            assert gradient is None if found[name] is None else torch.equal(found[name], gradient)
        else:
            off, was = ((g - exact[name]).abs().max().item() for g in (found[name], gradient))
            rounded = torch.finfo(gradient.dtype).eps * exact[name].abs().max().item()
            assert off <= 2 * (was + rounded), name
    undo(model)
    assert all(torch.equal(g, before[n]) for n, g in _step(model, x, run)[2].items() if g is not None)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, Turned, Named]


@pinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_sums_change(dtype):
    _check(_model(dtype), torch.randn(3, 40, 8, dtype=dtype))


@pinned
def test_a_checkpointed_model_and_one_row():
    _check(_model(), torch.randn(40, 8), lambda model, x: checkpoint(model, x, use_reentrant=False))
    _check(_model(), torch.randn(40, 8), lambda model, x: checkpoint(model, x, use_reentrant=True))
    model = nn.Sequential(nn.Linear(8, 5))
    optimize(model, only="bias")(torch.randn(8)).sum().backward()
    assert torch.equal(model[0].bias.grad, torch.ones(5))


@pinned
def test_frozen_weights_biases_and_inputs():
    model = _model()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    _check(model, torch.randn(40, 8), sums=2)
    optimize(model, only="bias")
    assert rows_of(model)["2", "bias"].reason == "its bias is frozen and has no gradient"
    model.requires_grad_(False)[0].bias.requires_grad_()  # BitFit
    with Calls() as calls:
        model(torch.randn(40, 8)).sum().backward()
        model[3].bias.requires_grad_(False)
        with torch.no_grad():
            model(torch.randn(40, 8))
    assert calls == {"column_sums": 1} and model[0].weight.grad is None


@pinned
def test_autocast_sums_into_the_dtype_of_the_bias():
    model, x = _model(), torch.randn(3, 40, 8)

    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model[0](x)

    y, dx, before = _step(model, x, run)
    optimize(model, only="bias")
    again, dx_again, found = _step(model, x, run)
    assert y.dtype == again.dtype == torch.bfloat16 and torch.equal(y, again) and torch.equal(dx, dx_again)
    assert torch.equal(found["0.weight"], before["0.weight"]) and found["0.bias"].dtype == torch.float32
    exact = (2 * y.detach().double()).bfloat16().double().sum((0, 1))
    torch.testing.assert_close(found["0.bias"].double(), exact, rtol=1e-6, atol=1e-6)


@pinned
def test_hooks_double_backward_and_transforms():
    model, x = nn.Sequential(nn.Linear(8, 5)), torch.randn(7, 8, requires_grad=True)
    seen = []
    optimize(model, only="bias")
    model[0].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    model[0].register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].shape))
    model(x).sum().backward()
    assert seen == [(7, 5), (7, 5)]
    (dbias,) = torch.autograd.grad(model(x).pow(3).sum(), model[0].bias, create_graph=True)
    (dx,) = torch.autograd.grad(dbias.sum(), x)
    torch.testing.assert_close(dx, 6 * model(x).detach() @ model[0].weight.detach())
    parameters = dict(model[0].named_parameters())
    layer = undo(copy.deepcopy(model))[0]
    layer._forward_hooks.clear(), layer._backward_hooks.clear()
    optimize(layer, only="bias")
    loss = lambda p: torch.func.functional_call(layer, p, (x,)).square().sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(parameters)["bias"], 2 * layer(x).detach().sum(0))


@pinned
def test_compiled_layers_copies_and_pickles():
    model, x = _model(), torch.randn(40, 8)
    _, _, before = _step(model, x)
    optimize(model, only="bias")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for made in (compiled, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, _, found = _step(made, x)
        torch.testing.assert_close([*found.values()], [*before.values()])
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_who_is_left_alone_and_why():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Scaled(8, 8), Doubled(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1))
    model.append(nn.Linear(1, biases.MOST + 1))
    optimize(model, only="bias", strict=True)
    rows = rows_of(model)
    assert {key: row.reason for key, row in rows.items() if key[1] == "bias"} == {
        ("1", "bias"): "test_biases's Scaled has a forward of its own",
        ("5", "bias"): "it has more than 16,384 outputs, of which PyTorch's sum is as fast",
    }
    assert not model.tilesmith_report.replaced


def test_small_outputs_and_other_devices_keep_pytorch_s_sum(monkeypatch):
    model, x = optimize(_model(), only="bias"), torch.randn(40, 8)
    with Calls() as calls:
        model(x).sum().backward()
        assert not calls  # no kernel on a CPU
        monkeypatch.setattr(biases, "reaches", lambda op, x: True)
        model(x).sum().backward()
        assert not calls  # too small
        monkeypatch.setattr(biases, "LEAST", 40 * 12)
        model(x).sum().backward()
    assert calls == {"column_sums": 2}
    assert model.tilesmith_report.calls() == {"column_sums": 2}


def test_the_report_says_so():
    text = str(optimize(_model(), only="bias").tilesmith_report)
    assert "bias:       column_sums in Linear, Turned, Named" in text
    assert "On cpu no kernel serves column_sums: these modules compute as before" in text


@pinned
def test_an_output_layer_without_logits_stays_lazy():
    pytest.importorskip("transformers")
    from optimize_models import batch, build

    model = optimize(build("bert"), graphs=True)
    assert ("cls.predictions.decoder", "bias") not in rows_of(model)
    output = model(**batch("bert"))
    assert type(output.logits) is tilesmith.models.layers.logits.LazyLogits


class Feeding(nn.Module):
    """A layer and its GELU, as models write them."""

    def __init__(self, act=None):
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(8, 12), act or nn.GELU(), nn.Linear(12, 8)


class Stepwise(Feeding):
    def forward(self, x):
        x = self.fc(x)
        x = self.act(x)
        return self.out(x)


class Annotated(Feeding):
    def forward(self, x):
        h: torch.Tensor = self.fc(x)
        h = self.act(h)
        return self.out(h)


class Nested(Feeding):
    def forward(self, x):
        return self.out(self.act(self.fc(x)))


class Reread(Feeding):
    """The layer's output is used again."""

    def forward(self, x):
        h = self.fc(x)
        y = self.act(h)
        return self.out(y + h)


@pytest.fixture
def gelu_everywhere(op_everywhere):
    with use(gelu="reference", bias_gelu_vjp="reference"):
        yield


@pytest.mark.usefixtures("gelu_everywhere")
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("cls", [Stepwise, Annotated, Nested, Reread])
def test_the_pass_of_gelu_sums(cls, approximate):
    torch.manual_seed(0)
    plain, x = cls(act=nn.GELU(approximate)).double(), torch.randn(3, 40, 8, dtype=torch.float64)
    model = optimize(copy.deepcopy(plain), only=GELU_AND_BIASES, strict=True)
    with Calls() as calls:
        found = _step(model, x)
    fused = {"gelu": 1, "column_sums": 1, "bias_gelu_vjp": 1}
    assert calls == ({"gelu": 1, "column_sums": 2, "gelu_vjp": 1} if cls is Reread else fused)
    assert calls == model.tilesmith_report.calls() | ({"gelu_vjp": 1} if cls is Reread else {})
    torch.testing.assert_close(found, _step(plain, x))
    undo(model)
    assert type(model) is cls
    assert all(torch.equal(a, b) for a, b in zip(_step(model, x)[2].values(), _step(plain, x)[2].values()))


@pytest.mark.usefixtures("gelu_everywhere")
def test_who_watches_a_layer_or_freezes_it_gets_what_he_got():
    torch.manual_seed(0)
    plain, x = Stepwise().double(), torch.randn(40, 8, dtype=torch.float64)
    wanted = _step(plain, x)
    for change in (
        lambda m: m.fc.register_forward_hook(lambda *_: None),
        lambda m: m.act.register_full_backward_hook(lambda *_: None),
        lambda m: setattr(m, "act", nn.GELU()),
        lambda m: m.fc.bias.requires_grad_(False),
    ):
        model = optimize(copy.deepcopy(plain), only=GELU_AND_BIASES)
        change(model)
        with Calls() as calls:
            y, dx, grads = _step(model, x)
        assert "bias_gelu_vjp" not in calls
        torch.testing.assert_close((y, dx), wanted[:2])
        torch.testing.assert_close(
            {n: g for n, g in grads.items() if g is not None},
            {n: wanted[2][n] for n, g in grads.items() if g is not None},
        )
    model = optimize(copy.deepcopy(plain), only=GELU_AND_BIASES)
    model.fc.weight.requires_grad_(False)
    found = _step(model, x, lambda model, x: checkpoint(model, x.detach(), use_reentrant=False))
    torch.testing.assert_close(found[2]["fc.bias"], wanted[2]["fc.bias"])
    torch.testing.assert_close(_step(copy.deepcopy(model), x)[2]["out.weight"], wanted[2]["out.weight"])
    compiled = torch.compile(optimize(copy.deepcopy(plain), only=GELU_AND_BIASES), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_step(compiled, x)[:2], wanted[:2])
