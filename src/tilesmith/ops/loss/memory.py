"""What linear_cross_entropy and its backward hold in memory, in bytes, and which mode follows from that."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine.memory import FEWEST_ROWS, GB, TILED, Need, active, computed_in, held, workspaces
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.loss.arguments import linear_cross_entropy_arguments
from tilesmith.ops.loss.chunk_sizes import (
    budget,
    classes_per_block,
    recomputed_tokens,
    swept_elements,
    tokens_per_chunk,
    tokens_per_step,
    whole,
)
from tilesmith.ops.loss.pitch import row_pitch
from tilesmith.ops.loss.reference import summed_dtype

PER_TOKEN = 16  # numbers that plain PyTorch holds for each token of a block


@linear_cross_entropy_arguments
def linear_cross_entropy_need(call) -> Need:
    """The need of a call with its backward, if autograd will ask for one. For N tokens in chunks of C, K features, V
    classes, e bytes an element of x, w of weight, s of the sum of its gradient (4, or for accumulate_fp32=False w, but
    4 for fp16), 24·N always for losses, lse and what reduces them, and where x and weight require gradients:

    mode "keep": N·V·e for the logits and their gradient; the backward adds V·K·w and N·K·e (the scaled x, then dx).
    mode "chunks": N·K·e + V·K·s, in the forward C·V·e, in the backward the results N·K·e + V·K·w, also where they
        take the place of what was kept.
    mode "recompute": C·V·e; in the backward also V·K·w and, for dx, 4·N·K in blocks of classes, whose logits are gone
        before dx, N·K·e, is there. In chunks of tokens N·K·e, 4·V·K in place of 4·N·K, and V·K·w in place of N·K·e.
    Without gradients C·V·e. Hopper's kernel may sum exp2 of bf16 logits over tiles: C·V/64 more, counted on any GPU.

    A weight of another dtype than x, or whose classes take no multiple of 16 bytes on an accelerator, or an x that is
    not contiguous, costs a copy. Where no kernel serves, each chunk is swept in blocks (`_swept`), and so are the sums
    of products and what multiplies gradients by the loss's (`_scratch`).
    """
    x, weight = call.x, call.weight
    tokens, classes = call.target.numel(), weight.shape[0]
    dtype = computed_in(x)
    acc = torch.promote_types(dtype, torch.float32)
    copies = 0 if x.is_contiguous() and x.dtype == dtype else x.numel() * dtype.itemsize
    copies += 0 if weight.dtype == dtype else weight.numel() * dtype.itemsize
    pitch = row_pitch(classes, dtype, x.device)
    copies += 0 if pitch == classes else pitch * weight.shape[1] * dtype.itemsize
    fixed = workspaces(x.device) + copies + 6 * acc.itemsize * tokens + 3 * acc.itemsize * classes
    row = pitch * dtype.itemsize
    if dtype == torch.bfloat16 and arch_of(x.device).kind == "cuda":
        row += -(-classes // 256) * acc.itemsize
    wanted = _wanted(call.grad_mask, x, weight, call.bias)
    swept, block = _swept(x, dtype, acc, classes, call.softcap)
    if wanted[2] and dtype != acc and x.device.type == "cpu":
        row += classes * acc.itemsize  # the bias's gradient is a sum of fp32 copies
    in_one_piece = min(tokens, block) * swept
    if not any(wanted):
        return Need(tokens, fixed + tokens * row + in_one_piece, fixed, row, swept=swept, block=block)
    fixed += _scratch(x, weight, dtype, acc)
    dx = x.numel() * dtype.itemsize if wanted[0] else 0
    dweight = held(weight) if wanted[1] else 0
    if call.reduction != "none" and call.mode == "keep":
        need = fixed + tokens * row + max(in_one_piece, dweight + x.numel() * dtype.itemsize)
        return Need(tokens, need, need)
    if call.reduction != "none" and call.mode != "recompute":
        kept = dx + (weight.numel() * summed_dtype(weight, call.accumulate_fp32).itemsize if wanted[1] else 0)
        backward = fixed + kept + dx + dweight
        forward = fixed + kept + tokens * row + in_one_piece
        return Need(tokens, max(forward, backward), fixed + kept, row, backward, swept, block)
    result, other = (dx, dweight) if tokens <= classes and wanted[1] else (dweight, dx)
    summed = x.numel() if result is dx else weight.numel()
    if wanted[0 if result is dx else 1] and result < summed * acc.itemsize and (result is dx or call.accumulate_fp32):
        base, least = summed * acc.itemsize, summed * acc.itemsize + result
    else:
        base = least = result
    base, least = fixed + other + base, fixed + other + least
    whole_need = fixed + dx + dweight + tokens * row + in_one_piece
    return Need(tokens, whole_need, base, row, least, swept, block)


def _swept(x: Tensor, dtype: torch.dtype, acc: torch.dtype, classes: int, softcap: float) -> tuple[int, int]:
    """(bytes for a token, tokens) of a block of logits that plain PyTorch sweeps at a time: a copy of them where they
    are narrower than `acc`, two for the derivative of a soft cap, and a few numbers a token. (0, 0) where kernels keep
    these in registers."""
    if x.device.type in TILED and dtype != torch.float64:
        return 0, 0
    copies = (dtype != acc) + 2 * (softcap > 0)
    return (copies * classes + PER_TOKEN) * acc.itemsize, max(1, swept_elements(x.device) // max(1, classes))


def _scratch(x: Tensor, weight: Tensor, dtype: torch.dtype, acc: torch.dtype) -> int:
    """Bytes of a block of x's or weight's size that plain PyTorch scales, or adds to a sum in `acc`."""
    if x.device.type in TILED and dtype != torch.float64:
        return 0
    narrow = dtype.itemsize if dtype != acc else 0
    return (2 * acc.itemsize + narrow) * min(max(x.numel(), weight.numel()), swept_elements(x.device))


def chosen_mode(*args: object) -> str:
    """The mode of a call of linear_cross_entropy that names none; args: all of its arguments, not yet checked."""
    x, weight, target, bias, *_, reduction, chunk_tokens, accumulate_fp32, _, grad_mask = args
    if chunk_tokens or reduction == "none" or weight.ndim != 2 or not _wanted(grad_mask, x, weight, bias)[1]:
        return "chunks"
    dtype, bounds = computed_in(x), active()
    modes = ("chunks", "recompute") if dtype == torch.float16 else ("keep", "chunks", "recompute")
    if bounds is not None:
        needs = [linear_cross_entropy_need(*args[:-2], mode, grad_mask).chunked(FEWEST_ROWS) for mode in modes]
        fitting = [mode for mode, need in zip(modes, needs) if need <= bounds.target]
        return fitting[0] if fitting else modes[needs.index(min(needs))]
    known = bool
    if torch.compiler.is_compiling():  # no guard on a size that may change
        known = torch.fx.experimental.symbolic_shapes.statically_known_true
    summed = accumulate_fp32 and weight.dtype.itemsize < 4
    fits = whole(target.numel(), *weight.shape, dtype.itemsize, x.device, summed, known)
    return modes[0] if fits else "chunks"


def described_mode(asked: str, *args: object, compiled: bool = False) -> str:
    """For `explain`: what the mode of a call does, why it is this one, and what it needs. asked: the mode it named;
    compiled: the call is traced by torch.compile."""
    x, weight, target, bias, *_, reduction, chunk_tokens, accumulate_fp32, mode, grad_mask = args
    wanted, tokens, size = _wanted(grad_mask, x, weight, bias), target.numel(), computed_in(x).itemsize
    if not any(wanted):
        return "no gradients: a chunk of logits is held at a time"
    need = linear_cross_entropy_need(*args)
    logits = f"all logits take {tokens * weight.shape[0] * size / GB:.3f} GB"
    if reduction == "none" or mode == "recompute":
        classes = weight.shape[0]
        rows = chunk_tokens or tokens_per_chunk(tokens, classes, size, budget(x.device, mode == "recompute"))
        if rows < tokens <= classes and wanted[1]:
            rows = chunk_tokens or recomputed_tokens(x, classes, mode, wanted[0])
            rows = -(-classes_per_block(tokens, classes, rows) * tokens // classes)
        why = 'only the backward knows the weights of reduction "none"' if reduction == "none" else "for a MemoryConfig"
        what = "recompute: the backward computes the logits again"
    elif mode == "keep":
        rows, why, what = tokens, logits, "keep: the logits' gradient is kept for the backward's products"
        if compiled and active() is None:
            why += "; of a size that may change from call to call: mode chunks"
    else:
        summed = wanted[1] and accumulate_fp32 and weight.dtype.itemsize < 4
        rows = chunk_tokens or tokens_per_step(tokens, *weight.shape, size, x.device, summed)
        why = f"chunk_tokens is {chunk_tokens}" if chunk_tokens else logits
        what = f"chunks: gradients along with the loss, {-(-tokens // max(1, rows))} times {rows} tokens"
    results = sum(held(t) for t, w in zip((x, weight), wanted) if w)
    beside = max(0, need.chunked(rows) - results - workspaces(x.device)) / GB
    return f"mode {what} ({'as asked' if asked else why}); {beside:.3f} GB beside inputs and gradients"


def _wanted(
    grad_mask: Sequence[bool] | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[bool, bool, bool]:
    """Which gradients autograd will ask for."""
    if grad_mask is not None:
        return tuple(grad_mask)
    grads = torch.is_grad_enabled()
    return tuple(grads and t is not None and t.requires_grad for t in (x, weight, bias))
