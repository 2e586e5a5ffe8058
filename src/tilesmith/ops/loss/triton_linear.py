"""linear_cross_entropy in Triton: the cross-entropy kernels on chunks of logits, and the scaling of gradients."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel
from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.arguments import linear_cross_entropy_arguments, linear_cross_entropy_vjp_arguments
from tilesmith.ops.loss.reduction import reduce_losses
from tilesmith.ops.loss.triton import (
    SWEEPS,
    LossConfig,
    backward,
    default_vjp,
    forward,
    held,
    reduce_tokens,
    rows_of,
    stages_of,
    warps_of,
)


@triton.jit
def _scale_kernel(grad_ptr, out_ptr, dloss_ptr, divisors_ptr, elements, OVER: tl.constexpr, BLOCK: tl.constexpr):
    """grad · dloss, over the first divisor where there are divisors; 0 where no token counted. OVER: out is grad, so
    that nothing moves for a factor of 1, as of a loss whose backward starts there."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss_ptr).to(tl.float32)
    if divisors_ptr is not None:
        factor = tl.where(tl.load(divisors_ptr + 1) > 0, factor / tl.load(divisors_ptr), 0.0)
    moved = at < (tl.where(factor == 1, 0, elements) if OVER else elements)
    grad = tl.load(grad_ptr + at, mask=moved, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (grad * factor).to(out_ptr.dtype.element_ty), mask=moved)


def _scaled(grad: Tensor, dloss: Tensor, divisors: Tensor, dtype: torch.dtype, over: bool = False) -> Tensor:
    over = over and grad.dtype == dtype
    out = grad if over else torch.empty_like(grad, dtype=dtype)
    if out.numel():
        given = divisors if divisors.numel() else None
        grid = (cdiv(out.numel(), 4096),)
        launch(_scale_kernel, grid, grad, out, dloss, given, out.numel(), OVER=over, BLOCK=4096, num_warps=8)
    return out


def _chunk_forward(config, logits, target, class_weight, losses, lse, divisors, terms, grad) -> None:
    given = divisors if divisors.numel() else None
    forward(config, rows_of(logits), target, class_weight, losses, lse, given, terms, False, grad)


def _chunk_divisors(target, class_weight, terms, classes, dtype, reduction) -> Tensor:
    if reduction != "mean":
        return target.new_empty(0, dtype=dtype)
    return reduce_tokens(None, None, target, class_weight, classes, terms._replace(z_loss=0.0), True)[1]


def _chunk_reduce(losses, lse, target, class_weight, classes, divisors, terms, reduction) -> Tensor:
    if reduction == "none":
        return reduce_losses(losses, lse, divisors, terms.z_loss, reduction)
    return reduce_tokens(losses, lse, target, class_weight, classes, terms, reduction == "mean")[0]


def _chunk_backward(config, logits, target, class_weight, lse, dloss, divisors, terms, first_class, classes) -> None:
    given = divisors if divisors.numel() else None
    backward(config, rows_of(logits), logits, target, class_weight, lse, dloss, given, terms, first_class, classes)


def steps(config: LossConfig) -> chunks.LogitSteps:
    """What is done to a chunk of logits, with this configuration."""
    return chunks.LogitSteps(
        partial(_chunk_forward, config), partial(_chunk_backward, config), _chunk_divisors, _chunk_reduce, _scaled
    )


def _reasons(call) -> list[str]:
    return ["x is float64; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _default(dims, arch, dtype) -> LossConfig:
    """The second sweep should find its row in the L2 cache, so the longer the row, the fewer of them at a time."""
    cols, odd = dims["cols"], dims["cols"] * dtype.itemsize % 16 != 0
    if cols <= 4096:
        return held(dims, arch)
    if cols * dtype.itemsize <= 2**17:
        block, warps, programs = 2048 if odd else 4096, 8, 8
    else:
        block, warps, programs = 16384, 16, 2
    stages = stages_of(block, arch, dtype, most=4 if odd or programs == 2 else 3)
    return LossConfig(block, 1, warps_of(warps, arch), stages, programs * max(1, arch.sms))


def _dims(x, weight, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_vjp(dloss, x, weight, *_) -> dict[str, int]:
    return _dims(x, weight)


SPACE = Space(dims=_dims, default=_default, choices={**SWEEPS, "num_stages": (1, 2, 3, 4)})
VJP_SPACE = Space(dims=_dims_vjp, default=default_vjp, choices=SWEEPS)


@register_kernel("linear_cross_entropy", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
@linear_cross_entropy_arguments
def linear_cross_entropy(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each chunk a product, one launch over its logits, and the products of the gradients."""
    return chunks.linear_cross_entropy(steps(config), call)


@register_kernel("linear_cross_entropy_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=VJP_SPACE)
@linear_cross_entropy_vjp_arguments
def linear_cross_entropy_vjp(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, products of the logits', or the logits again with their lse known."""
    return chunks.linear_cross_entropy_vjp(steps(config), call)
