"""bias_dropout and bias_dropout_residual: what they are, what they accept, their kernels; the doors draw a seed.

Legend: F features, the last dim; the other dims are rows.
"""

from torch import Tensor

from tilesmith.device.dropout import check_dropout, draws_seed
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import flag, probability
from tilesmith.ops.elementwise import dropout_reference as reference
from tilesmith.ops.elementwise.op import check_bias, fake_like

TRITON = {"triton": "tilesmith.ops.elementwise.triton.dropout"}


def _fake_vjp(dout: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
    wants_x, wants_bias = rest[-1]
    dbias = bias.new_empty(bias.shape) if wants_bias else dout.new_empty(0)
    return dout.new_empty(dout.shape if wants_x else 0), dbias


def _check_bias_dropout(x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> None:
    check_bias("bias_dropout", x, bias)
    check_dropout("bias_dropout", x, seed, p)


def _check_bias_dropout_residual(
    x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, p: float
) -> None:
    name = "bias_dropout_residual"
    check_bias(name, x, bias)
    if residual.shape != x.shape:
        raise ValueError(f"{name}: residual has shape {tuple(residual.shape)}; it must equal x's, {tuple(x.shape)}")
    if residual.dtype != x.dtype:
        raise TypeError(f"{name}: residual has dtype {residual.dtype}, x has {x.dtype}; they must match")
    if residual.device != x.device:
        raise ValueError(f"{name}: residual is on {residual.device}, x on {x.device}; move them to one device")
    check_dropout(name, x, seed, p)


# No fold: which elements are dropped depends on their place in the whole tensor.
bias_dropout_vjp = Op(reference.bias_dropout_vjp, fake=_fake_vjp, outputs=("dx", "dbias"), kernels=TRITON)
bias_dropout_op = Op(
    reference.bias_dropout,
    fake=fake_like,
    vjp=bias_dropout_vjp,
    outputs=("out",),
    check=_check_bias_dropout,
    draw=draws_seed(reference.bias_dropout),
    kernels=TRITON,
    sharding="*n n @ -> *n",
)

bias_dropout_residual_vjp = Op(
    reference.bias_dropout_residual_vjp,
    fake=_fake_vjp,
    outputs=("dx", "dbias"),
    kernels=TRITON,
)
bias_dropout_residual_op = Op(
    reference.bias_dropout_residual,
    fake=fake_like,
    vjp=bias_dropout_residual_vjp,
    outputs=("out",),
    check=_check_bias_dropout_residual,
    draw=draws_seed(reference.bias_dropout_residual),
    kernels=TRITON,
    alias={"residual": "dout"},
    sharding="*n *n n @ -> *n",
)


@bias_dropout_op.door
def bias_dropout(
    x: Tensor, bias: Tensor | None = None, p: float = 0.5, training: bool = True, *, seed: Tensor | None = None
) -> Tensor:
    """dropout(x + bias): an element is zeroed with probability p, else divided by 1 - p.

    x: [..., F], floating. bias: [F] or None. p: rounded to a multiple of 2^-16, since each element draws 16 random
    bits; kept elements are divided by the exact probability of keeping them. training: False drops nothing. seed: int64
    [2] = (seed, offset) fixes what is dropped; None draws one from the default generator of x's device, as
    `torch.manual_seed` sets it.

    Returns a contiguous tensor of x's shape and dtype; saves nothing of x's size for the gradient. Raises ValueError or
    TypeError, naming the argument, for p outside [0, 1) and for shapes, dtypes and devices that do not fit. The
    meaning in full: `tilesmith.ops.elementwise.dropout_reference.bias_dropout`.
    """
    p = probability("bias_dropout", "p", p) if flag("bias_dropout", "training", training) else 0.0
    return bias_dropout_op(x, bias, seed, p)


@bias_dropout_residual_op.door
def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
    *,
    seed: Tensor | None = None,
) -> Tensor:
    """residual + dropout(x + bias), in one pass.

    residual: x's shape and dtype. The other arguments, the result and what raises: `bias_dropout`.
    """
    name = "bias_dropout_residual"
    p = probability(name, "p", p) if flag(name, "training", training) else 0.0
    return bias_dropout_residual_op(x, residual, bias, seed, p)
