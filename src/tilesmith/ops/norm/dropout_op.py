"""dropout_add_norm: what it is, what it accepts, its kernels, and the door that draws a seed. Legend: see op.py."""

import torch
from torch import Tensor

from tilesmith.device.dropout import check_dropout, draws_seed
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import choice, probability
from tilesmith.ops.norm import dropout_reference, op
from tilesmith.ops.norm.arguments import dropout_add_norm_arguments

KERNELS = {"triton": "tilesmith.ops.norm.triton.dropout", "hopper": "tilesmith.ops.norm.hopper.dropout"}
FORWARD = {**KERNELS, "hopper_persistent": "tilesmith.ops.norm.hopper.persistent"}
KINDS = ("layer", "rms")


@dropout_add_norm_arguments
def _fake(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = call.x
    rstd = x.new_empty(x.shape[:-1], dtype=torch.promote_types(call.residual.dtype, torch.float32))
    mean = torch.empty_like(rstd) if call.kind == "layer" else rstd.new_empty(0)
    return x.new_empty(x.shape), call.residual.new_empty(x.shape), mean, rstd


def _fake_vjp(
    dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wants_dx, wants_dresidual, *wanted = rest[-1]
    dx = s.new_empty(s.shape if wants_dx else 0, dtype=s.dtype if dy is None or not wants_dx else dy.dtype)
    dresidual = s.new_empty(s.shape if wants_dresidual else 0)
    vectors = (v.new_empty(v.shape) if wants else s.new_empty(0) for v, wants in zip((weight, bias), wanted))
    return dx, dresidual, *vectors


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    kind: str,
    eps: float,
) -> None:
    name = "dropout_add_norm"
    op.check_rows(name, x, eps)
    op.check_residual(name, x, residual)
    op.check_vector(name, "weight", weight, x)
    op.check_vector(name, "bias", bias, x)
    if kind not in KINDS:
        raise ValueError(f"{name}: kind is {kind!r}; it must be 'layer' or 'rms'")
    if kind == "rms" and bias is not None:
        raise ValueError(f"{name}: bias is given with kind='rms', which has none; pass None, or kind='layer'")
    check_dropout(name, x, seed, p)


# x is not kept, so dx takes its dtype from dy; where y had no gradient, dx has that of s and autograd casts it.
dropout_add_norm_vjp = Op(
    dropout_reference.dropout_add_norm_vjp,
    fake=_fake_vjp,
    outputs=("dx", "dresidual", "dweight", "dbias"),
    kernels=KERNELS,
)
# No fold: which elements are dropped depends on the place of a row in the whole tensor.
dropout_add_norm_op = Op(
    dropout_reference.dropout_add_norm,
    fake=_fake,
    vjp=dropout_add_norm_vjp,
    outputs=("y", "s", "mean", "rstd"),
    public=2,
    check=_check,
    draw=draws_seed(dropout_reference.dropout_add_norm),
    kernels=FORWARD,
    sharding="*N *N N N @ -> *N *N",
)


@dropout_add_norm_op.door
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float,
    kind: str = "layer",
    eps: float | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, s): s = dropout(x, p) + residual and y = norm(s), in one pass.

    x: [..., N], floating; residual: x's shape, in x's dtype or fp32. kind: "layer" or "rms" (which takes no bias).
    p: rounded to a multiple of 2^-16. eps: None is 1e-5 for "layer", 1e-6 for "rms". seed: int64 [2] = (seed, offset)
    fixes what is dropped; None draws one from the default generator of x's device, as `torch.manual_seed` sets it.
    There is no training flag: pass p = 0 at inference. With p = 0 it is `add_layer_norm` or `add_rms_norm`, whose
    backward writes one gradient, not two.

    Returns y in x's dtype and s in residual's, both contiguous. Raises ValueError or TypeError, naming the argument,
    for shapes, dtypes, devices and numbers that do not fit. The meaning in full:
    `tilesmith.ops.norm.dropout_reference.dropout_add_norm`.
    """
    if eps is None:
        eps = 1e-6 if choice("dropout_add_norm", "kind", kind, KINDS) == "rms" else 1e-5
    p = probability("dropout_add_norm", "p", p)
    return dropout_add_norm_op(x, residual, weight, bias, seed, p, kind, eps)
