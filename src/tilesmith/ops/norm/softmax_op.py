"""softmax and softmax_dropout: what they are, what they accept, their kernels; the door with a seed.

Legend: N columns, the last dim, over which a row sums to 1; the other dims are rows. With `causal`: T tokens, S keys.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.device.dropout import check_dropout, draws_seed
from tilesmith.device.rows import empty_rows, row_order
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating, positive, probability
from tilesmith.engine.arguments import shown, suggestion
from tilesmith.engine.backends import declare_backend
from tilesmith.engine.sharding import spread
from tilesmith.ops.norm import softmax_reference as reference

TRITON = {"triton": "tilesmith.ops.norm.triton.softmax"}
SOFTMAX = {**TRITON, "hopper": "tilesmith.ops.norm.hopper.softmax"}
declare_backend("hopper_causal", like="hopper")
CAUSAL = {"hopper_causal": "tilesmith.ops.norm.hopper.softmax_causal"}
DROPOUT = {**TRITON, "hopper": "tilesmith.ops.norm.hopper.softmax_dropout", **CAUSAL}
PORTABLE = {portable.NAME: "tilesmith.ops.norm.portable.softmax"}


def _fake_softmax(x: Tensor, *_: object) -> Tensor:
    return empty_rows(x, row_order(x))


def _fake_softmax_vjp(dy: Tensor, y: Tensor, *_: object) -> Tensor:
    return empty_rows(y, row_order(y))


def _fake_softmax_dropout(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    top, total = (x.new_empty(x.shape[:-1], dtype=wide) for _ in range(2))
    return x.new_empty(x.shape), top, total


def _fake_softmax_dropout_vjp(dout: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _check(op: str, x: Tensor, causal: bool) -> None:
    floating(op, "x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; it must be [..., N] with N of at least 1")
    if causal and x.ndim < 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; with causal it must be [..., T, S]")


def _check_softmax(x: Tensor, scale: float, causal: bool) -> None:
    _check("softmax", x, causal)


def _check_softmax_dropout(x: Tensor, seed: Tensor | None, p: float, scale: float, causal: bool) -> None:
    _check("softmax_dropout", x, causal)
    check_dropout("softmax_dropout", x, seed, p)


def _spread(op: Op, args: tuple) -> Tensor:
    """A causal row looks at where it is, along the last two dims."""
    rows = "*TN" if args[-1] else "*N"
    return spread(op, args, f"{rows} @ -> {rows}" if op is softmax_dropout_op else f"{rows} -> {rows}")


softmax_vjp = Op(
    reference.softmax_vjp,
    fake=_fake_softmax_vjp,
    outputs=("dx",),
    kernels=SOFTMAX,
    fold=("dy", "y", "x"),
)
softmax_op = Op(
    reference.softmax,
    fake=_fake_softmax,
    vjp=softmax_vjp,
    outputs=("y",),
    check=_check_softmax,
    kernels={**SOFTMAX, **CAUSAL, **PORTABLE},
    fold=("x",),
    sharding=_spread,
)

# No fold: which elements are dropped depends on the place of a row in the whole tensor.
softmax_dropout_vjp = Op(
    reference.softmax_dropout_vjp,
    fake=_fake_softmax_dropout_vjp,
    outputs=("dx",),
    kernels=DROPOUT,
)
softmax_dropout_op = Op(
    reference.softmax_dropout,
    fake=_fake_softmax_dropout,
    vjp=softmax_dropout_vjp,
    outputs=("out", "top", "total"),
    public=1,
    check=_check_softmax_dropout,
    draw=draws_seed(reference.softmax_dropout),
    kernels={**DROPOUT, **PORTABLE},
    sharding=_spread,
)


@softmax_op.door
def softmax(x: Tensor, *dim: NoReturn, scale: float = 1.0, causal: bool = False, **misplaced: NoReturn) -> Tensor:
    """Softmax of the last dim: y = exp(scale · x) / sum(exp(scale · x)).

    Computed in fp32 (fp64 for fp64 x) around each row's maximum, and rounded once, to x's dtype.

    x: [..., N], floating; with `causal` [..., T, S]. scale: a factor of x above 0, applied in fp32. causal: row t sees
    the columns j <= t + S - T (the last row sees all, as in attention); y is 0 in the others, whatever x holds there,
    and a row that sees none is 0. A row of -inf alone, or one that holds NaN or +inf, is NaN, as in torch.softmax.

    Returns y, of x's shape and dtype. Rows keep the order they have in x's memory and are packed; so y has x's strides
    where x is dense with a last stride of 1, and is contiguous where x is contiguous. dx likewise. The backward keeps y
    alone.

    Raises TypeError for a dtype that is not floating, ValueError for an empty or missing last dim, for `causal` with
    fewer than two dims and for a scale that is not above 0, and TypeError for torch.softmax's dim and dtype, which say
    what to write. The meaning in full: `tilesmith.ops.norm.softmax_reference.softmax`.
    """
    if dim or misplaced:
        raise TypeError(_spelled({**({"dim": dim[0]} if dim else {}), **misplaced}))
    return softmax_op(x, positive("softmax", "scale", scale), causal)


def _spelled(misplaced: dict[str, Any]) -> str:
    """What to write in place of arguments that `softmax` does not have: a second one by position is torch's dim."""
    name, value = next(iter(misplaced.items()))
    if name in ("dim", "axis"):
        turned = f"softmax(x.transpose({value}, -1)).transpose({value}, -1)"
        write = f"write {turned}" if isinstance(value, int) and value != -1 else "leave it out"
        keywords = f", or write scale={value} for a factor" if isinstance(value, float) else ""
        return f"softmax: {name} is {shown(value)}; softmax is over the last dim and takes no dim: {write}{keywords}"
    if name == "dtype":
        return f"softmax has no argument dtype (got {value}): write softmax(x.to({value}))"
    return f"softmax has no argument {name}. {suggestion(name, ('x', 'scale', 'causal'))}"


@softmax_dropout_op.door
def softmax_dropout(
    x: Tensor, p: float, *, scale: float = 1.0, causal: bool = False, seed: Tensor | None = None
) -> Tensor:
    """dropout(softmax(scale · x)) over the last dim: an element is 0 with probability p, else divided by 1 - p.

    x: [..., N], floating; with `causal` [..., T, S], where row t sees the columns j <= t + S - T and the others get 0.
    p: rounded to a multiple of 2⁻¹⁶. seed: int64 [2] = (seed, offset) fixes what is dropped; None draws one from the
    default generator of x's device, as `torch.manual_seed` sets it. The same seed drops the same elements on every
    device and in every kernel. There is no training flag: pass p = 0 at inference. scale: a factor of x above 0.

    Returns a contiguous tensor of x's shape and dtype. The backward keeps x, the seed and two fp32 values a row.
    Raises ValueError or TypeError, naming the argument, for shapes, dtypes, devices and numbers that do not fit.
    The meaning in full: `tilesmith.ops.norm.softmax_reference.softmax_dropout`.
    """
    p, scale = probability("softmax_dropout", "p", p), positive("softmax_dropout", "scale", scale)
    return softmax_dropout_op(x, seed, p, scale, causal)
