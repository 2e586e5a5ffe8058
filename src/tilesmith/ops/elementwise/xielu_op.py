"""xielu: what it is, what it accepts, its kernel."""

from collections.abc import Sequence

from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.ops.elementwise import xielu_reference
from tilesmith.ops.elementwise.op import fake_like

KERNELS = {"triton": "tilesmith.ops.elementwise.triton.xielu"}


def _fake_vjp(
    dout: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float, output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    inputs = zip((x, alpha_p, alpha_n), output_mask)
    dx, dalpha_p, dalpha_n = (t.new_empty(t.shape) if wanted else x.new_empty(0) for t, wanted in inputs)
    return dx, dalpha_p, dalpha_n


def _check(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float) -> None:
    floating("xielu", "x", x)
    for name, alpha in (("alpha_p", alpha_p), ("alpha_n", alpha_n)):
        floating("xielu", name, alpha)
        if alpha.shape != (1,):
            raise ValueError(f"xielu: {name} has shape {tuple(alpha.shape)}; it must be [1]")
        if alpha.device != x.device:
            raise ValueError(f"xielu: {name} is on {alpha.device}, x on {x.device}; move them to one device")
    if not eps <= 0:
        raise ValueError(f"xielu: eps is {eps}; it must be 0 or less")


xielu_vjp = Op(
    xielu_reference.xielu_vjp,
    fake=_fake_vjp,
    outputs=("dx", "dalpha_p", "dalpha_n"),
    kernels=KERNELS,
    fold=("dout", "x"),
)
xielu = Op(
    xielu_reference.xielu,
    fake=fake_like,
    vjp=xielu_vjp,
    outputs=("out",),
    check=_check,
    kernels=KERNELS,
    fold=("x",),
    sharding="* S S -> *",
)
