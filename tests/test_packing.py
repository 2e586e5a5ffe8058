"""Packed products: what moved weights are for autograd, for `to()`, for code that saves them, and which stay."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import tilesmith
from tilesmith.models.layers.packing import PackedForm, PackRule
from tilesmith.models.sizing.memory_estimate import LiveBytes
from tilesmith.rewrite import forms, rewrite

FEATURES = 8


class Layers(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(FEATURES, n, bias=bias) for n in (8, 4, 4))

    def forward(self, x):
        """Something of all three."""
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        return q.sigmoid() + torch.cat((k, v), -1)


def packed(module):
    """The module with one product for its layers."""
    report = rewrite(module, [PackRule()])
    assert [row.action for row in report.rows if row.rule == "pack"] == ["replaced"], report
    return module


def refusal(module):
    """Why a module is not packed."""
    rows = [row for row in rewrite(module, [PackRule()]).rows if row.rule == "pack"]
    assert [row.action for row in rows] == ["skipped"]
    return rows[0].reason


def inputs():
    return torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(1))


def test_a_part_without_a_gradient_leaves_its_parameters_without_one():
    class Detached(Layers):
        def forward(self, x):
            q = self.q(x)
            k = self.k(x)
            v = self.v(x)
            return q + torch.cat((k.detach(), v), -1)

    plain = Detached()
    module = packed(copy.deepcopy(plain))
    for other in (plain, module):
        other(inputs()).sum().backward()
    for mine, wanted in zip(module.parameters(), plain.parameters()):
        assert (mine.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(mine.grad, wanted.grad)
    assert module.k.weight.grad is None and module.k.bias.grad is None


@pytest.mark.parametrize("frozen", [True, False])
def test_a_weight_written_to_before_the_gradient_of_the_input_is_told(frozen):
    module = packed(Layers().requires_grad_(not frozen))
    x = inputs().requires_grad_()
    y = module(x).sum()
    with torch.no_grad():
        module.k.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


def test_what_no_gradient_reads_may_be_written_to():
    module = packed(Layers())
    y = module(inputs()).sum()  # of an input without a gradient, which would need the weights
    with torch.no_grad():
        module.k.weight.mul_(2)
        module.k.bias.mul_(2)
    y.backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_tensor_that_is_handed_on_between_two_layers_ends_the_group():
    class Written(Layers):
        def forward(self, x):
            x = x * 1
            q = self.q(x)
            x.add_(1)
            k = self.k(x)
            v = self.v(x)
            return q + torch.cat((k, v), -1)

    plain = Written()
    module = packed(copy.deepcopy(plain))
    assert next(f.names for f in forms(module) if isinstance(f, PackedForm)) == ("k", "v")
    with torch.inference_mode():
        torch.testing.assert_close(module(inputs()), plain(inputs()))


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_gradients(grad):
    plain = Layers()
    module, found = packed(copy.deepcopy(plain)), []
    with torch.set_grad_enabled(grad):
        for other in (module, plain):
            with forward_ad.dual_level():
                found.append(forward_ad.unpack_dual(other(forward_ad.make_dual(inputs(), inputs().cos()))))
    torch.testing.assert_close(found[0].primal, found[1].primal)
    torch.testing.assert_close(found[0].tangent, found[1].tangent)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_model_computes_of_its_input():
    module = packed(Layers())
    traced = torch.jit.trace(module, (inputs(),))
    x = torch.randn(5, FEATURES)
    torch.testing.assert_close(traced(x), module(x))


def test_a_scalar_gets_pytorchs_error():
    with pytest.raises(RuntimeError, match="at least 1D"):
        packed(Layers())(torch.tensor(1.0))


@pytest.mark.parametrize("bias", [True, False])
def test_each_parameter_has_a_storage_of_its_own(bias, tmp_path):
    """accelerate and safetensors take tensors of one storage for one tensor, and save one of them."""
    module = packed(Layers(bias))
    for p in module.parameters():
        assert p.untyped_storage().data_ptr() == p.data_ptr() and p.untyped_storage().nbytes() == p.nbytes
    accelerate = pytest.importorskip("accelerate")
    kept = accelerate.utils.other.clean_state_dict_for_safetensors(module.state_dict())
    assert kept.keys() == Layers(bias).state_dict().keys()
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(module, str(tmp_path / "model.safetensors"))
    fresh = Layers(bias)
    safetensors.load_model(fresh, str(tmp_path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters()))


REPLACED = {
    "of another dtype": lambda m: setattr(m, "k", nn.Linear(FEATURES, 4, dtype=torch.bfloat16)),
    "of another size": lambda m: setattr(m, "k", nn.Linear(FEATURES + 1, 4)),
    "without a weight": lambda m: setattr(m, "q", nn.Identity()),
    "its data": lambda m: setattr(m.k.weight, "data", m.k.weight.data.bfloat16()),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_to_moves_what_has_taken_a_layers_place_as_pytorch_does(kind):
    module = packed(Layers())
    REPLACED[kind](module)
    plain = tilesmith.undo(copy.deepcopy(module))
    for other in (module, plain):
        other.to("cpu")
    dtypes = [[p.dtype for p in other.parameters()] for other in (module, plain)]
    assert dtypes[0] == dtypes[1]
    module.double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}


def test_weights_that_were_given_other_memory_stay_there():
    """As after load_state_dict(assign=True), which lets models share weights."""
    module, weights = packed(Layers()), {k: v.clone() for k, v in Layers().state_dict().items()}
    module.load_state_dict(weights, assign=True)
    module.to("cpu")
    module.share_memory()
    for name, value in module.state_dict().items():
        assert value.data_ptr() == weights[name].data_ptr() and value.is_shared()
    copied = copy.deepcopy(packed(Layers())).share_memory().to("cpu")
    assert all(p.is_shared() for p in copied.parameters())


def test_memory_that_the_weights_have_left_is_let_go():
    module = packed(Layers())
    group = module._tilesmith_group
    assert group.served(inputs())
    kept = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    torch.func.functional_call(module, kept, (inputs(),))
    assert group.served(inputs())  # they were replaced for a while
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    module(inputs())
    assert not group.wholes


def test_undo_gives_each_weight_that_is_left_a_storage_of_its_own():
    module = packed(Layers())
    module.v.weight = nn.Parameter(module.v.weight.detach().clone())
    taken = module.k.weight.data_ptr()
    tilesmith.undo(module)
    assert module.k.weight.data_ptr() != taken
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


def _overlap(module):
    module.v.weight = nn.Parameter(module.k.weight.data)


def _view(module):
    module.k.weight = nn.Parameter(torch.randn(16, FEATURES)[:4])


def _transpose(module):
    module.q.weight.data = module.q.weight.data.t().contiguous().t()


REFUSED = {
    "overlap": (_overlap, "is a part of memory that others may hold"),
    "view": (_view, "k.weight is a part of memory that others may hold"),
    "transposed": (_transpose, "q.weight is not contiguous"),
    "shared": (nn.Module.share_memory, "q.weight is in memory that processes share"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_whose_memory_others_may_hold_stay(kind):
    spoil, reason = REFUSED[kind]
    module = Layers()
    spoil(module)
    where = [(p.data_ptr(), p.stride()) for p in module.parameters()]
    assert reason in refusal(module)
    assert where == [(p.data_ptr(), p.stride()) for p in module.parameters()]


def test_weights_that_fill_one_memory_are_moved():
    """Such as those that a checkpoint with one weight for all was split into."""
    module = Layers(bias=False)
    whole = torch.randn(16, FEATURES)
    for layer, part in zip((module.q, module.k, module.v), whole.split((8, 4, 4))):
        layer.weight = nn.Parameter(part)
    found = packed(module)(inputs())
    q, k, v = (inputs() @ whole.t()).split((8, 4, 4), -1)
    torch.testing.assert_close(found, q.sigmoid() + torch.cat((k, v), -1))


def test_moved_weights_are_not_counted_as_made_by_a_step():
    found = []
    for module in (packed(Layers()), Layers()):
        x = inputs()
        with LiveBytes() as live:
            live.ignore(iter([x, *module.parameters()]))
            y = module(x)
            found.append(live.now)
        y.sum().backward()
    assert found[0] == found[1]
