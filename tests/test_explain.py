"""`explain` asked as users call: through the door of an op, in their context, with nothing run or drawn."""

import pytest
import torch

import tilesmith
from tilesmith import ops
from tilesmith.engine import Op, optimize_kernel, register_kernel

DOORS = {
    "attention": lambda x: ((x, x, x, ops.Mask(causal=True)), {"dropout_p": 0.1}),
    "softmax_dropout": lambda x: ((x, 0.1), {}),
    "dropout_add_norm": lambda x: ((x, x), {"p": 0.1}),
    "bias_dropout": lambda x: ((x,), {}),
    "bias_dropout_residual": lambda x: ((x, x), {}),
}


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("name", DOORS)
def test_a_door_s_own_arguments(name):
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    args, kwargs = DOORS[name](x)
    state = torch.get_rng_state()
    choice = tilesmith.explain(name, *args, **kwargs)
    assert choice.kernel.op == name
    assert choice.kernel.backend == "reference"
    assert torch.equal(torch.get_rng_state(), state)
    with tilesmith.use(**{name: "reference"}):
        assert tilesmith.explain(name, *args, **kwargs).because == "pinned"
    getattr(ops, name)(*args, **kwargs)  # being asked leaves nothing behind


def test_a_door_s_own_errors():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match="causal"):
        tilesmith.explain("attention", x, x, x, causal=True)
    with pytest.raises(ValueError, match="p must be in"):
        tilesmith.explain("bias_dropout", x, p=2.0)


def test_the_kernels_below_are_named():
    op = Op(_double, name="explain_double", fake=torch.empty_like)
    for backend, rank, reasons in (("first", 40, []), ("second", 30, ["it is Tuesday"]), ("third", 20, [])):
        register_kernel("explain_double", backend=backend, rank=rank, rejects=lambda call, why=reasons: why)(_double)
    choice = tilesmith.explain(op, torch.ones(3))
    assert [kernel.backend for kernel in choice.lower] == ["third", "reference"]
    assert str(choice).splitlines()[-1] == "  could too: third (rank 20), reference (rank 0)"
    with tilesmith.use(explain_double="third"):
        assert tilesmith.explain(op, torch.ones(3)).lower == ()


def test_the_error_that_a_kernel_declares_is_told():
    op = Op(_double, name="explain_declared", fake=torch.empty_like, outputs=("doubled",))
    register_kernel("explain_declared", backend="rough", rank=20, errors={"doubled": 0.02})(_double)
    told = str(tilesmith.explain(op, torch.ones(3))).splitlines()
    assert told[1] == "  doubled: off by up to 0.02 beyond rounding"
    with tilesmith.use(explain_declared="reference"):
        assert "beyond rounding" not in str(tilesmith.explain(op, torch.ones(3)))


def test_a_configuration_above_the_registration_keeps_the_declared_error():
    op = Op(_double, name="explain_decorated", outputs=("doubled",), fake=torch.empty_like)

    @optimize_kernel(num_warps=4)
    @register_kernel("explain_decorated", backend="rough", rank=20, errors={"doubled": 0.02})
    def rough(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert op.kernel("rough").errors == {"doubled": 0.02}
    assert tilesmith.explain(op, torch.ones(3)).kernel.backend == "rough"
