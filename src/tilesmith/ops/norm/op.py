"""The norm family: what the norms are, what they accept and which kernels they have.

Legend: N columns, the last dim, over which a row is normalised; the other dims are rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.device.rows import empty_row_values, empty_rows, row_order
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating, one_device
from tilesmith.engine.backends import declare_backend
from tilesmith.engine.sharding import spread
from tilesmith.engine.tracing import small
from tilesmith.ops.norm import reference
from tilesmith.ops.norm.arguments import (
    add_layer_norm_vjp_arguments,
    add_rms_norm_vjp_arguments,
    layer_norm_vjp_arguments,
    rms_norm_vjp_arguments,
)

TRITON = {"triton": "tilesmith.ops.norm.triton.norm", "hopper": "tilesmith.ops.norm.hopper.norm"}
EVERYWHERE = {**TRITON, portable.NAME: "tilesmith.ops.norm.portable.norm"}
declare_backend("hopper_persistent", like="hopper")
FORWARD = {**EVERYWHERE, "hopper_persistent": "tilesmith.ops.norm.hopper.persistent"}
CASTINGS = ("fp32", "llama", "none")


def _fake_rms_norm(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    order = row_order(x)
    return empty_rows(x, order), _fake_statistic(x, order, x.dtype)


def _fake_layer_norm(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    order = row_order(x)
    return empty_rows(x, order), _fake_statistic(x, order, x.dtype), _fake_statistic(x, order, x.dtype)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    order = row_order(x)
    return empty_rows(x, order), empty_rows(x, order, residual.dtype), _fake_statistic(x, order, residual.dtype)


def _fake_add_layer_norm(x: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order, dtype = row_order(x), residual.dtype
    statistics = _fake_statistic(x, order, dtype), _fake_statistic(x, order, dtype)
    return empty_rows(x, order), empty_rows(x, order, dtype), *statistics


def _fake_statistic(x: Tensor, order: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    return empty_row_values(x, order, torch.promote_types(dtype, torch.float32))


def _fake_gradients(x: Tensor, vectors: Sequence[Tensor | None], output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
    wants_rows, *wanted = output_mask
    dx = empty_rows(x, row_order(x)) if wants_rows else x.new_empty(0)
    return dx, *(v.new_empty(v.shape) if wants else x.new_empty(0) for v, wants in zip(vectors, wanted))


@rms_norm_vjp_arguments
def _fake_rms_norm_vjp(call) -> tuple[Tensor, ...]:
    return _fake_gradients(call.x, (call.weight,), call.output_mask)


@layer_norm_vjp_arguments
def _fake_layer_norm_vjp(call) -> tuple[Tensor, ...]:
    return _fake_gradients(call.x, (call.weight, call.bias), call.output_mask)


@add_rms_norm_vjp_arguments
def _fake_add_rms_norm_vjp(call) -> tuple[Tensor, ...]:
    return _fake_gradients(call.s, (call.weight,), call.output_mask)


@add_layer_norm_vjp_arguments
def _fake_add_layer_norm_vjp(call) -> tuple[Tensor, ...]:
    return _fake_gradients(call.s, (call.weight, call.bias), call.output_mask)


def check_rows(op: str, x: Tensor, eps: float) -> None:
    floating(op, "x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; it must be [..., N] with N of at least 1")
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; it must be 0 or more")


def _check_weight(op: str, weight: Tensor | None, x: Tensor) -> None:
    """A weight for all rows, or one for each head."""
    if weight is None or weight.ndim != 2 or x.ndim < 2:
        check_vector(op, "weight", weight, x)
    elif weight.shape != x.shape[-2:]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}; for this x it must be [{x.shape[-1]}], or "
            f"[{x.shape[-2]}, {x.shape[-1]}] for one a head"
        )
    else:
        floating(op, "weight", weight)
        one_device(op, "weight", weight, "x", x)


def check_vector(op: str, name: str, vector: Tensor | None, x: Tensor) -> None:
    if vector is None:
        return
    floating(op, name, vector)
    if vector.ndim != 1 or vector.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: {name} has shape {tuple(vector.shape)}; for this x it must be [{x.shape[-1]}], one number "
            "for each column"
        )
    one_device(op, name, vector, "x", x)


def check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual has shape {tuple(residual.shape)}; it must equal x's, {tuple(x.shape)}: expand "
            "what would broadcast"
        )
    if residual.dtype != x.dtype and (residual.dtype is not torch.float32 or x.dtype is torch.float64):
        raise TypeError(f"{op}: residual has dtype {residual.dtype}; for x of {x.dtype} it must be that or float32")
    if residual.device != x.device:
        raise ValueError(f"{op}: residual is on {residual.device}, x on {x.device}; move them to one device")


def _check_casting(op: str, casting: str) -> None:
    if casting not in CASTINGS:
        raise ValueError(f"{op}: casting is {casting!r}; it must be 'fp32', 'llama' or 'none'")


def _check_rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> None:
    check_rows("rms_norm", x, eps)
    _check_weight("rms_norm", weight, x)
    _check_casting("rms_norm", casting)


def _check_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    check_rows("layer_norm", x, eps)
    check_vector("layer_norm", "weight", weight, x)
    check_vector("layer_norm", "bias", bias, x)


def _check_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> None:
    check_rows("add_rms_norm", x, eps)
    check_residual("add_rms_norm", x, residual)
    check_vector("add_rms_norm", "weight", weight, x)
    _check_casting("add_rms_norm", casting)


def _check_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    check_rows("add_layer_norm", x, eps)
    check_residual("add_layer_norm", x, residual)
    check_vector("add_layer_norm", "weight", weight, x)
    check_vector("add_layer_norm", "bias", bias, x)


def _sharded(op: Op, args: tuple) -> Tensor:
    weight = args[1]
    by_head = weight is not None and weight.ndim == 2
    return spread(op, args, "*hN hN -> *hN" if by_head else "*N N -> *N")


rms_norm_vjp = Op(
    reference.rms_norm_vjp,
    fake=_fake_rms_norm_vjp,
    outputs=("dx", "dweight"),
    kernels=EVERYWHERE,
    fold=("dy", "x", "rstd"),
)
rms_norm = Op(
    reference.rms_norm,
    fake=_fake_rms_norm,
    vjp=rms_norm_vjp,
    outputs=("y", "rstd"),
    public=1,
    check=_check_rms_norm,
    kernels=FORWARD,
    decompose=reference.rms_norm,
    when=small,
    fold=("x",),
    sharding=_sharded,
)

layer_norm_vjp = Op(
    reference.layer_norm_vjp,
    fake=_fake_layer_norm_vjp,
    outputs=("dx", "dweight", "dbias"),
    kernels=EVERYWHERE,
    fold=("dy", "x", "mean", "rstd"),
)
layer_norm = Op(
    reference.layer_norm,
    fake=_fake_layer_norm,
    vjp=layer_norm_vjp,
    outputs=("y", "mean", "rstd"),
    public=1,
    check=_check_layer_norm,
    kernels=FORWARD,
    decompose=reference.layer_norm,
    when=small,
    fold=("x",),
    sharding="*N N N -> *N",
)

# The gradient of x is that of residual: the vjp gives it in residual's dtype, the wider of the two, and the engine
# casts it for x. The other way round an fp32 residual stream would get gradients rounded to 16 bits at every layer.
add_rms_norm_vjp = Op(
    reference.add_rms_norm_vjp,
    fake=_fake_add_rms_norm_vjp,
    outputs=("dresidual", "dweight"),
    kernels=EVERYWHERE,
    fold=("dy", "ds", "s", "rstd", "residual"),
)
add_rms_norm = Op(
    reference.add_rms_norm,
    fake=_fake_add_rms_norm,
    vjp=add_rms_norm_vjp,
    outputs=("y", "s", "rstd"),
    public=2,
    check=_check_add_rms_norm,
    kernels=FORWARD,
    decompose=reference.add_rms_norm,
    when=small,
    alias={"x": "residual"},
    fold=("x", "residual"),
    sharding="*N *N N -> *N *N",
)

add_layer_norm_vjp = Op(
    reference.add_layer_norm_vjp,
    fake=_fake_add_layer_norm_vjp,
    outputs=("dresidual", "dweight", "dbias"),
    kernels=EVERYWHERE,
    fold=("dy", "ds", "s", "mean", "rstd", "residual"),
)
add_layer_norm = Op(
    reference.add_layer_norm,
    fake=_fake_add_layer_norm,
    vjp=add_layer_norm_vjp,
    outputs=("y", "s", "mean", "rstd"),
    public=2,
    check=_check_add_layer_norm,
    kernels=FORWARD,
    decompose=reference.add_layer_norm,
    when=small,
    alias={"x": "residual"},
    fold=("x", "residual"),
    sharding="*N *N N N -> *N *N",
)
