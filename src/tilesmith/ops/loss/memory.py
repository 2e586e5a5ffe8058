"""What linear_cross_entropy and its backward hold in memory, in bytes, by the number of tokens in a chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.ops.loss.reference import gradients_now, saved_dtype
from tilesmith.ops.memory import Need, computed_in, held, workspaces


def linear_cross_entropy_need(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    grad_mask: Sequence[bool] | None,
) -> Need:
    """The need of a call with its backward, if autograd will ask for one. For N tokens in chunks of C, K features, V
    classes, e bytes an element of x, s of the saved weight gradient (weight's, 4 for fp16), w of weight:

    the forward takes 24·N (losses, lse and what reduces them) and C·V·e (logits); with gradients also N·K·e + V·K·s,
    and V·K·4 to sum in where s < 4 and C < N, in which case C <= K logits lie in the memory of the result. The backward
    takes the saved N·K·e + V·K·s and the results N·K·e + V·K·w; for reduction "none", where nothing is saved, what the
    forward takes otherwise. A weight of another dtype than x, or an x that is not contiguous, costs a copy. On a CPU
    each chunk is swept in fp32, in blocks that are not counted.
    """
    tokens, classes, hidden = target.numel(), *weight.shape
    dtype = computed_in(x)
    wanted = _wanted(grad_mask, x, weight, bias)
    acc = torch.promote_types(dtype, torch.float32)
    saved = saved_dtype(weight) if any(gradients_now(wanted, reduction)) else weight.dtype
    copies = 0 if x.is_contiguous() and x.dtype == dtype else x.numel() * dtype.itemsize
    copies += 0 if weight.dtype == dtype else weight.numel() * dtype.itemsize
    fixed = workspaces(x.device) + copies + 6 * acc.itemsize * tokens + 3 * acc.itemsize * classes
    dx = x.numel() * dtype.itemsize if wanted[0] else 0
    dweight = weight.numel() * saved.itemsize if wanted[1] else 0
    beside = weight.numel() * acc.itemsize if wanted[1] and accumulate_fp32 and saved.itemsize < acc.itemsize else 0
    row = classes * dtype.itemsize
    forward, backward = fixed + dx + dweight, 0
    if reduction != "none" and any(wanted):
        backward = forward + dx + (held(weight) if wanted[1] else 0)
    return Need(
        rows=tokens,
        whole=max(forward + tokens * row, backward),
        base=forward + beside,
        row=row,
        free=hidden if beside and saved == dtype else 0,
        least=backward,
    )


def _wanted(
    grad_mask: Sequence[bool] | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[bool, bool, bool]:
    """Which gradients autograd will ask for."""
    if grad_mask is not None:
        return tuple(grad_mask)
    grads = torch.is_grad_enabled()
    return tuple(grads and t is not None and t.requires_grad for t in (x, weight, bias))
