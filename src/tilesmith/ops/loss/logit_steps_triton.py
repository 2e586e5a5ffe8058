"""What is done to chunks of logits, in Triton: the cross-entropy kernels on them, and the scaling of gradients."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import cdiv, launch
from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.reduction import reduce_losses
from tilesmith.ops.loss.triton import LossConfig, backward, forward, reduce_tokens, rows_of


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
