"""The losses in Triton: rows held in registers or swept in blocks, their backwards, and the sums over tokens.

Scores are kept in base 2, z · log2(e), so that an exponential is one instruction. A forward kernel with GRAD turns the
logits into gradients in place, reading them a second time from the L2 cache at best; so linear_cross_entropy needs one
kernel a chunk. Rows whose target is ignored are not read.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.reference import Terms

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """Below 1/4 the series, since 1 − exp(−2|x|) would cancel; its first dropped term is below fp32's rounding."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2E))
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    value = tl.where(size < 0.25, size * series, (1.0 - decay) / (1.0 + decay))
    return tl.where(x < 0, -value, value)


@triton.jit
def _score(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled and capped logits in base 2, and the cap's derivative."""
    if SOFTCAP:
        capped = _tanh(logits * (scale / softcap))
        return capped * (softcap * LOG2E), 1.0 - capped * capped
    else:
        return logits * (scale * LOG2E), logits


@triton.jit
def _row_start(row, stride, outer_stride, inner_rows, GROUPED: tl.constexpr):
    """Offset of a row; GROUPED: rows lie in groups of `inner_rows`, as those of logits[:, :-1] do."""
    if GROUPED:
        return (row // inner_rows) * outer_stride + (row % inner_rows) * stride
    else:
        return row * stride


@triton.jit
def _label_weight(weight_ptr, label, found):
    if weight_ptr is not None:
        return tl.load(weight_ptr + label, mask=found, other=0.0).to(tl.float32)
    else:
        return tl.where(found, 1.0, 0.0)


@triton.jit
def _sum_of_weights(weight_ptr, weight_sum_ptr, cols):
    if weight_ptr is not None and weight_sum_ptr is not None:
        return tl.load(weight_sum_ptr).to(tl.float32)
    else:
        return cols * 1.0


@triton.jit
def _loss(lse, chosen, total, label_weight, all_weights, cols, smoothing, counted, valid, SMOOTH: tl.constexpr):
    """A token's cross-entropy without its z term; total: Σ w[c] · z[c]. All scores in base 2: taken apart only after
    the subtraction, so that a certain label costs exactly nothing."""
    loss = label_weight * (lse - chosen)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / cols * (all_weights * lse - total)
    loss = loss * LN2
    return tl.where(counted, tl.where(valid, loss, float("nan")), 0.0)


@triton.jit
def _coefficients(
    token_grad, z_grad, lse, label_weight, all_weights, cols, smoothing, z_loss, scale, counted, valid,
    SMOOTH: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """(a, b, c) of the gradient a · softmax − b · [class is the label] − c · w[class], before the cap's derivative."""
    factor = tl.where(valid, scale, float("nan"))
    token_grad = tl.where(counted, token_grad * factor, 0.0)
    hit = token_grad * label_weight
    every = token_grad
    if SMOOTH:
        hit = hit * (1.0 - smoothing)
        every = token_grad * (smoothing / cols)
        probability = hit + every * all_weights
    else:
        probability = hit
    if Z:
        probability += tl.where(counted, 2.0 * z_loss * lse * z_grad * factor, 0.0)
    return probability, hit, every


@triton.jit
def _undivided(divisors_ptr, Z: tl.constexpr):
    """Weight of the z term in the loss times its first divisor."""
    if Z and divisors_ptr is not None:
        return tl.load(divisors_ptr) / tl.load(divisors_ptr + 1)
    else:
        return 1.0


@triton.jit
def _upstream(dloss_ptr, dloss_stride, divisors_ptr, row, inside):
    """The loss's gradient with respect to the token's cross-entropy and to its z term."""
    dloss = tl.load(dloss_ptr + row * dloss_stride, mask=inside, other=0.0).to(tl.float32)
    if divisors_ptr is not None:
        return dloss / tl.load(divisors_ptr), dloss / tl.load(divisors_ptr + 1)
    else:
        return dloss, dloss


@triton.jit
def _sweep(
    row_ptr, weight_ptr, at, shift, end, peak, sums, total, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take one block of a row into the running maximum, the running sums of exponentials and those of scores."""
    inside = (at >= shift) & (at < end)
    if MASKED:
        z, _ = _score(tl.load(row_ptr + at, mask=inside, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
    else:
        z, _ = _score(tl.load(row_ptr + at).to(tl.float32), scale, softcap, SOFTCAP)
    if SMOOTH:
        part = z
        if weight_ptr is not None:
            part = z * tl.load(weight_ptr + (at - shift), mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, part, 0.0) if MASKED else part
    if MASKED:
        z = tl.where(inside, z, float("-inf"))
    top = tl.maximum(peak, tl.max(z, 0))
    finite = tl.where(top == float("-inf"), 0.0, top)
    sums = sums * tl.exp2(peak - finite) + tl.exp2(z - finite)
    return top, sums, total


@triton.jit
def _gradient(
    in_ptr, out_ptr, weight_ptr, at, shift, end, label_at, lse2, probability, hit, every, scale, softcap, counted,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write one block of a row's gradient."""
    inside = (at >= shift) & (at < end)
    if MASKED:
        x = tl.load(in_ptr + at, mask=inside & counted, other=0.0)
    else:
        x = tl.load(in_ptr + at, mask=counted, other=0.0)
    z, slope = _score(x.to(tl.float32), scale, softcap, SOFTCAP)
    grad = tl.exp2(z - lse2) * probability
    if SMOOTH:
        if weight_ptr is not None:
            grad -= every * tl.load(weight_ptr + (at - shift), mask=inside, other=0.0).to(tl.float32)
        else:
            grad -= every
    grad = tl.where(at == label_at, grad - hit, grad)
    if SOFTCAP:
        grad *= slope
    grad = grad.to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + at, grad, mask=inside)
    else:
        tl.store(out_ptr + at, grad)


@triton.jit
def _swept_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, divisors_ptr, losses_ptr, lse_ptr,
    cols, stride, outer_stride, inner_rows, ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, ADD_Z: tl.constexpr, GRAD: tl.constexpr,
    GROUPED: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row a program. ALIGN > 1: rows start anywhere, so blocks start at the multiple of ALIGN elements before, and
    only the first and the last one are masked: the others keep 16-byte accesses."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    counted = target != ignore_index
    valid = (target >= 0) & (target < cols)
    label = tl.where(valid, target, 0)
    start = _row_start(row, stride, outer_stride, inner_rows, GROUPED)
    base = start // ALIGN * ALIGN
    shift = (start - base).to(tl.int32)
    end = shift + cols
    row_ptr = logits_ptr + base
    lane = tl.arange(0, BLOCK)
    chosen = tl.load(logits_ptr + start + label, mask=counted & valid, other=0.0).to(tl.float32)

    peak = float("-inf")
    sums = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    stop = tl.where(counted, end, 0)
    if ALIGN > 1:
        full = stop // BLOCK * BLOCK
        for first in tl.range(0, tl.minimum(stop, BLOCK), BLOCK, num_stages=1):
            peak, sums, total = _sweep(
                row_ptr, weight_ptr, first + lane, shift, end, peak, sums, total, scale, softcap, SMOOTH, SOFTCAP, True
            )
        for first in tl.range(BLOCK, full, BLOCK, num_stages=STAGES):
            peak, sums, total = _sweep(
                row_ptr, weight_ptr, first + lane, shift, end, peak, sums, total, scale, softcap, SMOOTH, SOFTCAP, False
            )
        for first in tl.range(tl.maximum(full, BLOCK), stop, BLOCK, num_stages=1):
            peak, sums, total = _sweep(
                row_ptr, weight_ptr, first + lane, shift, end, peak, sums, total, scale, softcap, SMOOTH, SOFTCAP, True
            )
    else:
        for first in tl.range(0, stop, BLOCK, num_stages=STAGES):
            peak, sums, total = _sweep(
                row_ptr, weight_ptr, first + lane, 0, end, peak, sums, total, scale, softcap, SMOOTH, SOFTCAP, True
            )

    lse2 = tl.where(counted, peak + tl.log2(tl.sum(sums, 0)), 0.0)
    lse = lse2 * LN2
    chosen, _ = _score(chosen, scale, softcap, SOFTCAP)
    label_weight = _label_weight(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, cols)
    loss = _loss(lse2, chosen, tl.sum(total, 0), label_weight, all_weights, cols, smoothing, counted, valid, SMOOTH)
    if ADD_Z:
        loss += z_loss * lse * lse
    tl.store(losses_ptr + row, loss)
    tl.store(lse_ptr + row, lse)

    if GRAD:
        probability, hit, every = _coefficients(
            1.0, _undivided(divisors_ptr, Z), lse, label_weight, all_weights, cols, smoothing, z_loss, scale,
            counted, valid, SMOOTH, Z,
        )  # fmt: skip
        label_at = label + shift
        if ALIGN > 1:
            full = end // BLOCK * BLOCK
            for first in tl.range(0, tl.minimum(end, BLOCK), BLOCK, num_stages=1):
                _gradient(
                    row_ptr, row_ptr, weight_ptr, first + lane, shift, end, label_at, lse2, probability, hit, every,
                    scale, softcap, counted, SMOOTH, SOFTCAP, True,
                )  # fmt: skip
            for first in tl.range(BLOCK, full, BLOCK, num_stages=STAGES):
                _gradient(
                    row_ptr, row_ptr, weight_ptr, first + lane, shift, end, label_at, lse2, probability, hit, every,
                    scale, softcap, counted, SMOOTH, SOFTCAP, False,
                )  # fmt: skip
            for first in tl.range(tl.maximum(full, BLOCK), end, BLOCK, num_stages=1):
                _gradient(
                    row_ptr, row_ptr, weight_ptr, first + lane, shift, end, label_at, lse2, probability, hit, every,
                    scale, softcap, counted, SMOOTH, SOFTCAP, True,
                )  # fmt: skip
        else:
            for first in tl.range(0, end, BLOCK, num_stages=STAGES):
                _gradient(
                    row_ptr, row_ptr, weight_ptr, first + lane, 0, end, label_at, lse2, probability, hit, every,
                    scale, softcap, counted, SMOOTH, SOFTCAP, True,
                )  # fmt: skip


@triton.jit
def _held_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, divisors_ptr, losses_ptr, lse_ptr,
    rows, cols, stride, outer_stride, inner_rows, ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, ADD_Z: tl.constexpr, GRAD: tl.constexpr,
    GROUPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows, read once and held in registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (target != ignore_index)
    valid = (target >= 0) & (target < cols)
    label = tl.where(valid, target, 0)
    at = _row_start(row, stride, outer_stride, inner_rows, GROUPED)[:, None] + col
    read = counted[:, None] & (col < cols)
    z, slope = _score(tl.load(logits_ptr + at, mask=read, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
    chosen = tl.sum(tl.where(col == label[:, None], z, 0.0), 1)
    total = chosen
    if SMOOTH:
        part = z
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
            part = z * weight
        total = tl.sum(tl.where(read, part, 0.0), 1)
    z = tl.where(read, z, float("-inf"))
    peak = tl.max(z, 1)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    sums = tl.sum(tl.exp2(z - finite[:, None]), 1)
    lse2 = tl.where(counted, finite + tl.log2(sums), 0.0)
    lse = lse2 * LN2

    label_weight = _label_weight(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, cols)
    loss = _loss(lse2, chosen, total, label_weight, all_weights, cols, smoothing, counted, valid, SMOOTH)
    if ADD_Z:
        loss += z_loss * lse * lse
    tl.store(losses_ptr + row, loss, mask=exists)
    tl.store(lse_ptr + row, lse, mask=exists)

    if GRAD:
        probability, hit, every = _coefficients(
            tl.full([ROWS], 1.0, tl.float32), _undivided(divisors_ptr, Z), lse, label_weight, all_weights, cols,
            smoothing, z_loss, scale, counted, valid, SMOOTH, Z,
        )  # fmt: skip
        grad = tl.exp2(z - lse2[:, None]) * probability[:, None]
        if SMOOTH:
            if weight_ptr is not None:
                grad -= every[:, None] * weight
            else:
                grad -= every[:, None]
        grad = tl.where(col == label[:, None], grad - hit[:, None], grad)
        if SOFTCAP:
            grad *= slope
        tl.store(logits_ptr + at, grad.to(logits_ptr.dtype.element_ty), mask=exists[:, None] & (col < cols))


@triton.jit
def _swept_vjp_kernel(
    logits_ptr, out_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, dloss_ptr, divisors_ptr,
    cols, blocks, stride, outer_stride, inner_rows, dloss_stride,
    ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, GROUPED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row a program. ALIGN > 1, as in `_swept_kernel`, only where out has the strides of logits."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row).to(tl.int64)
    counted = target != ignore_index
    valid = (target >= 0) & (target < cols)
    label = tl.where(valid, target, 0)
    lse = tl.load(lse_ptr + row)
    token_grad, z_grad = _upstream(dloss_ptr, dloss_stride, divisors_ptr, row, counted)
    label_weight = _label_weight(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, cols)
    probability, hit, every = _coefficients(
        token_grad, z_grad, lse, label_weight, all_weights, cols, smoothing, z_loss, scale, counted, valid, SMOOTH, Z
    )
    start = _row_start(row, stride, outer_stride, inner_rows, GROUPED)
    base = start // ALIGN * ALIGN
    shift = (start - base).to(tl.int32)
    end = shift + cols
    in_ptr = logits_ptr + base
    lse2 = lse * LOG2E
    if ALIGN > 1:
        first = (program % blocks) * BLOCK
        if (first >= shift) & (first + BLOCK <= end):
            _gradient(
                in_ptr, out_ptr + base, weight_ptr, at, shift, end, label + shift, lse2, probability, hit, every,
                scale, softcap, counted, SMOOTH, SOFTCAP, False,
            )  # fmt: skip
        else:
            _gradient(
                in_ptr, out_ptr + base, weight_ptr, at, shift, end, label + shift, lse2, probability, hit, every,
                scale, softcap, counted, SMOOTH, SOFTCAP, True,
            )  # fmt: skip
    else:
        _gradient(
            in_ptr, out_ptr + row * cols, weight_ptr, at, 0, end, label, lse2, probability, hit, every,
            scale, softcap, counted, SMOOTH, SOFTCAP, True,
        )  # fmt: skip


@triton.jit
def _held_vjp_kernel(
    logits_ptr, out_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, dloss_ptr, divisors_ptr,
    rows, cols, stride, outer_stride, inner_rows, dloss_stride,
    ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (target != ignore_index)
    valid = (target >= 0) & (target < cols)
    label = tl.where(valid, target, 0)
    lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
    token_grad, z_grad = _upstream(dloss_ptr, dloss_stride, divisors_ptr, row, counted)
    label_weight = _label_weight(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, cols)
    probability, hit, every = _coefficients(
        token_grad, z_grad, lse, label_weight, all_weights, cols, smoothing, z_loss, scale, counted, valid, SMOOTH, Z
    )
    at = _row_start(row, stride, outer_stride, inner_rows, GROUPED)[:, None] + col
    x = tl.load(logits_ptr + at, mask=counted[:, None] & (col < cols), other=0.0).to(tl.float32)
    z, slope = _score(x, scale, softcap, SOFTCAP)
    grad = tl.exp2(z - (lse * LOG2E)[:, None]) * probability[:, None]
    if SMOOTH:
        if weight_ptr is not None:
            grad -= every[:, None] * tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        else:
            grad -= every[:, None]
    grad = tl.where(col == label[:, None], grad - hit[:, None], grad)
    if SOFTCAP:
        grad *= slope
    out_at = (row * cols)[:, None] + col
    tl.store(out_ptr + out_at, grad.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (col < cols))


@triton.jit
def _finish(losses, squares, weights, number, loss_ptr, divisors_ptr, z_loss):
    """Write the loss, and for "mean" (divisors_ptr given) what it was divided by."""
    if divisors_ptr is not None:
        tl.store(divisors_ptr, weights)
        tl.store(divisors_ptr + 1, number)
        loss = losses / weights
        tl.store(loss_ptr, tl.where(z_loss == 0, loss, loss + z_loss * squares / number))
    else:
        tl.store(loss_ptr, losses + z_loss * squares)


@triton.jit
def _sum_kernel(
    losses_ptr, lse_ptr, target_ptr, weight_ptr, partials_ptr, loss_ptr, divisors_ptr,
    rows, span, cols, ignore_index, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over `span` tokens a program, in a fixed order; with partials_ptr None the one program finishes."""
    first = tl.program_id(0).to(tl.int64) * span
    losses = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    for start in range(0, span, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        exists = row < rows
        losses += tl.load(losses_ptr + row, mask=exists, other=0.0)
        lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
        squares += lse * lse
        target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
        counted = exists & (target != ignore_index)
        number += tl.where(counted, 1.0, 0.0)
        weights += _label_weight(weight_ptr, target, counted & (target >= 0) & (target < cols))
    losses, squares = tl.sum(losses, 0), tl.sum(squares, 0)
    weights, number = tl.sum(weights, 0), tl.sum(number, 0)
    if partials_ptr is None:
        _finish(losses, squares, weights, number, loss_ptr, divisors_ptr, z_loss)
    else:
        out = partials_ptr + tl.program_id(0) * 4
        tl.store(out, losses)
        tl.store(out + 1, squares)
        tl.store(out + 2, weights)
        tl.store(out + 3, number)


@triton.jit
def _finish_kernel(partials_ptr, loss_ptr, divisors_ptr, programs, z_loss, BLOCK: tl.constexpr):
    """The loss from the partial sums of `_sum_kernel`."""
    program = tl.arange(0, BLOCK)
    exists = program < programs
    losses = tl.sum(tl.load(partials_ptr + program * 4, mask=exists, other=0.0), 0)
    squares = tl.sum(tl.load(partials_ptr + program * 4 + 1, mask=exists, other=0.0), 0)
    weights = tl.sum(tl.load(partials_ptr + program * 4 + 2, mask=exists, other=0.0), 0)
    number = tl.sum(tl.load(partials_ptr + program * 4 + 3, mask=exists, other=0.0), 0)
    _finish(losses, squares, weights, number, loss_ptr, divisors_ptr, z_loss)


@triton.jit
def _scale_kernel(grad_ptr, out_ptr, dloss_ptr, divisors_ptr, elements, BLOCK: tl.constexpr):
    """grad · dloss, over the first divisor where there are divisors; 0 where no token counted."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss_ptr).to(tl.float32)
    if divisors_ptr is not None:
        factor = tl.where(tl.load(divisors_ptr + 1) > 0, factor / tl.load(divisors_ptr), 0.0)
    grad = tl.load(grad_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (grad * factor).to(out_ptr.dtype.element_ty), mask=at < elements)


class LossConfig(NamedTuple):
    """block: classes a program holds at a time; rows: rows of a tile, where a whole row fits in a block; num_stages:
    how deep the loads of a swept row are pipelined."""

    block: int
    rows: int
    num_warps: int
    num_stages: int


SUM_SPAN, MOST_SUMS, SUM_BLOCK = 16384, 1024, 2048


class _Rows(NamedTuple):
    """How the rows of logits lie in memory: `inner` of them at `stride`, such groups at `outer`; inner 0: one group."""

    logits: Tensor
    count: int
    cols: int
    stride: int
    outer: int
    inner: int

    def align(self, out_like_in: bool) -> int:
        """Elements of 16 bytes where rows do not start and end at multiples of them, and peeling can help; else 1."""
        lanes = 16 // self.logits.element_size()
        if self.cols % lanes == 0 and self.stride % lanes == 0 and self.outer % lanes == 0:
            return 1
        return lanes if out_like_in else 1


def _rows(logits: Tensor) -> _Rows:
    """Rows of [..., V] in place if they lie at one stride or at two, else those of a contiguous copy."""
    cols = logits.shape[-1]
    if cols > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    dims = _merged(logits)
    if len(dims) > 2:
        logits = logits.contiguous()
        dims = _merged(logits)
    count = logits.numel() // cols
    stride = dims[-1][1] if dims else cols
    if len(dims) == 2:
        return _Rows(logits, count, cols, stride, dims[0][1], dims[1][0])
    return _Rows(logits, count, cols, stride, 0, 0)


def _merged(logits: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dims, neighbours joined where they are one."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1]):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def _weight_sum(weight: Tensor | None, terms: Terms) -> Tensor | None:
    return weight.sum(dtype=torch.float32) if weight is not None and terms.label_smoothing else None


def _forward(
    config: LossConfig,
    rows: _Rows,
    target: Tensor,
    weight: Tensor | None,
    losses: Tensor,
    lse: Tensor,
    divisors: Tensor | None,
    terms: Terms,
    add_z: bool,
    grad: bool,
) -> None:
    """Losses and lse of all rows, and with `grad` the gradient of their undivided sum in place of the logits."""
    if rows.count == 0:
        return
    options = {
        "SMOOTH": terms.label_smoothing != 0, "SOFTCAP": terms.softcap != 0, "Z": terms.z_loss != 0,
        "ADD_Z": add_z and terms.z_loss != 0, "GRAD": grad, "GROUPED": rows.inner > 0,
        "BLOCK": config.block, "num_warps": config.num_warps,
    }  # fmt: skip
    tensors = (rows.logits, target, weight, _weight_sum(weight, terms), divisors, losses, lse)
    numbers = (rows.cols, rows.stride, rows.outer, rows.inner, *terms)
    if config.block >= rows.cols:
        grid = (triton.cdiv(rows.count, config.rows),)
        launch(_held_kernel, grid, *tensors, rows.count, *numbers, ROWS=config.rows, **options)
    else:
        # With smoothing, class weights are loaded beside logits; pipelined too, they would not fit in shared memory.
        stages = 1 if weight is not None and terms.label_smoothing else config.num_stages
        options |= {"ALIGN": rows.align(True), "STAGES": stages}
        launch(_swept_kernel, (rows.count,), *tensors, *numbers, **options)


def _backward(
    config: LossConfig,
    rows: _Rows,
    out: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    divisors: Tensor | None,
    terms: Terms,
) -> None:
    """The gradient of all rows into `out`, which is contiguous; dloss is a scalar or has one value a row."""
    if rows.count == 0:
        return
    options = {
        "SMOOTH": terms.label_smoothing != 0, "SOFTCAP": terms.softcap != 0, "Z": terms.z_loss != 0,
        "GROUPED": rows.inner > 0, "BLOCK": config.block, "num_warps": config.num_warps,
    }  # fmt: skip
    tensors = (rows.logits, out, target, weight, _weight_sum(weight, terms), lse, dloss, divisors)
    numbers = (rows.stride, rows.outer, rows.inner, dloss.stride(0) if dloss.ndim else 0, *terms)
    if config.block >= rows.cols:
        grid = (triton.cdiv(rows.count, config.rows),)
        launch(_held_vjp_kernel, grid, *tensors, rows.count, rows.cols, *numbers, ROWS=config.rows, **options)
    else:
        align = rows.align(rows.inner == 0 and rows.stride == rows.cols)
        blocks = triton.cdiv(rows.cols + align - 1, config.block)
        launch(_swept_vjp_kernel, (rows.count * blocks,), *tensors, rows.cols, blocks, *numbers, ALIGN=align, **options)


def _reduce(
    losses: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, cols: int, terms: Terms, mean: bool
) -> tuple[Tensor, Tensor]:
    """The loss and its divisors from the tokens' cross-entropies: one launch, or two above 16,384 tokens."""
    loss, divisors = losses.new_empty(()), losses.new_empty(2 if mean else 0)
    divided = divisors if mean else None
    count = losses.numel()
    span = max(SUM_SPAN, triton.next_power_of_2(triton.cdiv(count, MOST_SUMS)))
    programs = max(1, triton.cdiv(count, span))
    span = span if programs > 1 else triton.cdiv(count, SUM_BLOCK) * SUM_BLOCK
    partials = None if programs == 1 else losses.new_empty(programs * 4)
    launch(
        _sum_kernel, (programs,), losses, lse, target, weight, partials, loss, divided,
        count, span, cols, terms.ignore_index, terms.z_loss, BLOCK=SUM_BLOCK, num_warps=8,
    )  # fmt: skip
    if partials is not None:
        launch(_finish_kernel, (1,), partials, loss, divided, programs, terms.z_loss, BLOCK=MOST_SUMS, num_warps=4)
    return loss, divisors


def _scaled(grad: Tensor, dloss: Tensor, divisors: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(grad, dtype=dtype)
    if out.numel():
        given = divisors if divisors.numel() else None
        grid = (triton.cdiv(out.numel(), 4096),)
        launch(_scale_kernel, grid, grad, out, dloss, given, out.numel(), BLOCK=4096, num_warps=8)
    return out


def _chunk_forward(config, logits, target, class_weight, losses, lse, divisors, terms, grad) -> None:
    given = divisors if divisors.numel() else None
    _forward(config, _rows(logits), target, class_weight, losses, lse, given, terms, False, grad)


def _chunk_backward(config, logits, target, class_weight, lse, dloss, divisors, terms) -> None:
    given = divisors if divisors.numel() else None
    _backward(config, _rows(logits), logits, target, class_weight, lse, dloss, given, terms)


def steps(config: LossConfig) -> chunks.LogitSteps:
    """What is done to a chunk of logits, with this configuration."""
    return chunks.LogitSteps(partial(_chunk_forward, config), partial(_chunk_backward, config), _scaled)


def _reasons(call) -> list[str]:
    return ["logits are float64; this kernel computes in float32"] if call.logits.dtype == torch.float64 else []


def _linear_reasons(call) -> list[str]:
    return ["x is float64; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _tile(dims, arch, elements: int) -> LossConfig:
    """Whole rows, `elements` of them a program as long as that leaves a program for each multiprocessor."""
    block = triton.next_power_of_2(dims["cols"])
    rows = max(1, elements // block)
    while rows > 1 and dims["rows"] < rows * max(1, arch.sms):
        rows //= 2
    return LossConfig(block, rows, min(8, max(1, rows * block // 512)), 1)


def _warps(wanted: int, arch) -> int:
    """A program has at most 1,024 threads; AMD's warps have 64."""
    return min(wanted, 1024 // max(32, arch.warp))


def _stages(block: int, arch, dtype: torch.dtype) -> int:
    """Blocks in flight: three through shared memory, of which the programs of a multiprocessor leave one half free."""
    if arch.kind != "cuda" or arch.capability < (8, 0):  # without asynchronous copies they would cost registers
        return 1
    return 1 + min(2, arch.shared_memory // (2 * block * dtype.itemsize))


def _default(dims, arch, dtype) -> LossConfig:
    if dims["cols"] <= 4096:
        return _tile(dims, arch, 4096)
    if dims["rows"] <= arch.sms and dims["cols"] > 16384:  # too few rows to fill the device: longer blocks of each
        return LossConfig(16384, 1, _warps(32, arch), _stages(16384, arch, dtype))
    return LossConfig(4096, 1, 8, _stages(4096, arch, dtype))


def _default_vjp(dims, arch, dtype) -> LossConfig:
    return _tile(dims, arch, 4096) if dims["cols"] <= 4096 else LossConfig(4096, 1, 8, 1)


def _default_chunk(dims, arch, dtype) -> LossConfig:
    """The second sweep should find its row in the L2 cache, so the longer the row, the fewer of them at a time."""
    if dims["cols"] <= 4096:
        return _tile(dims, arch, 4096)
    warps = _warps(8 if dims["cols"] <= 32768 else 16 if dims["cols"] <= 65536 else 32, arch)
    return LossConfig(512 * warps, 1, warps, _stages(512 * warps, arch, dtype))


def _dims(logits, *_) -> dict[str, int]:
    return {"rows": logits.numel() // logits.shape[-1], "cols": logits.shape[-1]}


def _dims_vjp(dloss, logits, *_) -> dict[str, int]:
    return _dims(logits)


def _dims_linear(x, weight, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_linear_vjp(dloss, x, weight, *_) -> dict[str, int]:
    return _dims_linear(x, weight)


SWEEPS = {"block": (2048, 4096, 8192, 16384, 32768), "rows": (1, 2, 4, 8, 16, 32), "num_warps": (4, 8, 16, 32)}
CROSS_ENTROPY_SPACE = Space(dims=_dims, default=_default, choices={**SWEEPS, "num_stages": (1, 2, 3, 4)})
CROSS_ENTROPY_VJP_SPACE = Space(dims=_dims_vjp, default=_default_vjp, choices=SWEEPS)
LINEAR_SPACE = Space(dims=_dims_linear, default=_default_chunk, choices={**SWEEPS, "num_stages": (1, 2, 3, 4)})
LINEAR_VJP_SPACE = Space(dims=_dims_linear_vjp, default=_default_vjp, choices=SWEEPS)


@register_kernel("cross_entropy", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=CROSS_ENTROPY_SPACE)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    *,
    config: LossConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One program a row or a tile of rows, then one launch for the sums."""
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    weight, labels = None if weight is None else weight.contiguous(), target.reshape(-1)
    losses = logits.new_empty(target.shape, dtype=torch.float32)
    lse = torch.empty_like(losses)
    whole = reduction != "none"
    _forward(config, _rows(logits), labels, weight, losses, lse, None, terms, not whole, False)
    if not whole:
        return losses, lse, losses.new_empty(0)
    loss, divisors = _reduce(losses, lse, labels, weight, logits.shape[-1], terms, reduction == "mean")
    return loss, lse, divisors


@register_kernel("cross_entropy_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=CROSS_ENTROPY_VJP_SPACE)
def cross_entropy_vjp(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    output_mask: Sequence[bool],
    *,
    config: LossConfig,
) -> Tensor:
    """One program a block of a row, or a tile of rows: logits are read once, their gradient written once."""
    if not output_mask[0]:
        return logits.new_empty(0)
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    dlogits = logits.new_empty(logits.shape)
    _backward(
        config, _rows(logits), dlogits, target.reshape(-1), None if weight is None else weight.contiguous(),
        lse.reshape(-1), dloss.reshape(-1) if dloss.ndim else dloss, divisors if reduction == "mean" else None, terms,
    )  # fmt: skip
    return dlogits


@register_kernel("linear_cross_entropy", backend="triton", rank=20, rejects=_linear_reasons)
@optimize_kernel(space=LINEAR_SPACE)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
    grad_mask: Sequence[bool] | None = None,
    *,
    config: LossConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each chunk a product, one launch over its logits, and the products of the gradients."""
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    class_weight = None if class_weight is None else class_weight.contiguous()
    return chunks.linear_cross_entropy(
        steps(config), x, weight, target, bias, class_weight,
        terms, reduction, chunk_tokens, accumulate_fp32, grad_mask,
    )  # fmt: skip


@register_kernel("linear_cross_entropy_vjp", backend="triton", rank=20, rejects=_linear_reasons)
@optimize_kernel(space=LINEAR_VJP_SPACE)
def linear_cross_entropy_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
    *,
    config: LossConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again with their lse known."""
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    class_weight = None if class_weight is None else class_weight.contiguous()
    return chunks.linear_cross_entropy_vjp(
        steps(config), dloss, x, weight, target, bias, class_weight, lse, divisors, (x_grad, weight_grad, bias_grad),
        terms, reduction, chunk_tokens, accumulate_fp32, output_mask,
    )  # fmt: skip
