"""Distances between distributions in Triton: element by element, and for a row of two models' logits at once."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import row_values, rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.loss import distill_chunks as chunks
from tilesmith.ops.loss.distill_arguments import linear_distillation_arguments, linear_distillation_vjp_arguments
from tilesmith.ops.loss.distill_chunks import Distance, DistanceSteps
from tilesmith.ops.loss.distill_reference import SIGNS, divisor_of

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.925962989e-08)  # what fp32 leaves of it
LN2 = tl.constexpr(0.6931471805599453)
_SIGNS = tl.constexpr(SIGNS)
SPAN = 8  # blocks of a row that one program of an elementwise forward sums


@triton.jit
def _expm1(x, exp_x):
    """exp(x) − 1 for x <= 0; near 0 the series, since the difference would cancel."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))))
    return tl.where(x > -0.25, series, exp_x - 1)


@triton.jit
def _log1p(x):
    """log(1 + x) for −1 < x <= 0; near 0 the series, since the sum would round x away."""
    tail = 1 / 5 + x * (-1 / 6 + x * (1 / 7 + x * (-1 / 8 + x * (1 / 9 + x * (-1 / 10)))))
    series = x * (1 + x * (-1 / 2 + x * (1 / 3 + x * (-1 / 4 + x * tail))))
    return tl.where(x > -0.125, series, tl.log(1 + x))


@triton.jit
def _times(probability, log_ratio):
    """probability · log_ratio, 0 where the probability is: its logarithm is then −∞."""
    return tl.where(probability == 0, 0.0, probability * log_ratio)


@triton.jit
def _jsd(a, b, beta):
    """As `_distance`, by the distance to the larger of the two logarithms: nothing cancels where they are close."""
    top = tl.maximum(a, b)
    gap = tl.where(top == float("-inf"), 0.0, -tl.abs(a - b))
    first = a >= b
    ratio = tl.exp(gap)
    larger = tl.exp(top)
    # log(M) − top, where the smaller has this weight in M
    rise = _log1p(tl.where(first, beta, 1 - beta) * _expm1(gap, ratio))
    of_larger = larger * -rise
    of_smaller = _times(larger * ratio, gap - rise)
    da = (1 - beta) * tl.where(first, of_larger, of_smaller)
    db = beta * tl.where(first, of_smaller, of_larger)
    return da + db, da, db


@triton.jit
def _jsd_half(a, b):
    """`_jsd` for beta 1/2, by the log-cosh of half the distance: the same precision without a logarithm."""
    top = tl.maximum(a, b)
    gap = tl.where(top == float("-inf"), 0.0, -tl.abs(a - b))
    first = a >= b
    ratio = tl.exp(gap)
    larger = tl.exp(top)
    # top − log(M): near 0 the series of its distance from gap / 2, else log(2) − log(1 + ratio)
    half = gap * -0.5
    square = half * half
    near = half - square * (1 / 2 + square * (-1 / 12 + square * (1 / 45 + square * (-17 / 2520))))
    part = ratio / (2.0 + ratio)
    square = part * part
    far = 0.6931471805599453 - 2.0 * part * (
        1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square * (1 / 11)))))
    )
    fall = tl.where(half < 0.25, near, far)
    of_larger = 0.5 * larger * fall
    of_smaller = 0.5 * larger * tl.where(ratio == 0, 0.0, ratio * (fall + gap))
    return of_larger + of_smaller, tl.where(first, of_larger, of_smaller), tl.where(first, of_smaller, of_larger)


@triton.jit
def _jsd_coarse(a, b, beta, HALF: tl.constexpr):
    """`_jsd` for logarithms of 8 or 11 bits, whose formula is so long that it, not memory, would take the time.

    With HALF, beta is 1/2 and 1 − log2(1 + ratio) is 1 − ratio times a polynomial, a minimax fit by Lawson's algorithm,
    of relative error 2.3e-8; so is its product with 1 + ratio, of which the sum of both parts is made, of 2.1e-8. `top`
    is multiplied by log2(e) in two parts, since what fp32 loses of it would show in a sum over many rows. The clamp
    stands for what else two logarithms of −∞ would need; a NaN stays one in `top`.
    """
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    gap = tl.maximum(tl.abs(a - b) * -LOG2E, -126.0)
    first = a >= b
    ratio = tl.exp2(gap)
    probability = tl.exp2(top * LOG2E + top * LOG2E_REST)
    larger = probability * (0.5 * LN2 if HALF else LN2)
    rise = 1.0 - ratio
    if HALF:  # top − log(M), in base 2
        fall = 0.00406064788 * ratio - 0.0229286029
        fall = fall * ratio + 0.0609769963
        fall = fall * ratio - 0.107169695
        fall = fall * ratio + 0.151604425
        fall = fall * ratio - 0.201049243
        fall = fall * ratio + 0.27854423
        fall = fall * ratio - 0.442691199
        fall = (fall * ratio + 0.999999977) * rise
        both = 0.00150142168 * ratio - 0.00801877128
        both = both * ratio + 0.0212179492
        both = both * ratio - 0.0411728894
        both = both * ratio + 0.0758500495
        both = both * ratio - 0.163985667
        both = both * ratio + 0.557302979
        loss = probability * ((both * ratio + 1.0) * rise + ratio * gap)
    else:
        rise *= tl.where(first, beta, 1 - beta)
        rest = 1.0 - rise
        lost = (1.0 - rest) - rise  # by rounding `rest`, which the logarithm takes up again
        fall = -tl.log2(rest) - lost * (LOG2E / rest)
    of_larger = larger * fall
    of_smaller = larger * ratio * (fall + gap)
    da, db = tl.where(first, of_larger, of_smaller), tl.where(first, of_smaller, of_larger)
    if not HALF:
        da *= 1 - beta
        db *= beta
        loss = da + db
    return loss, da, db


@triton.jit
def _log_coarse(x):
    """(log(x) − whole · log(2), whole) for x > 0 of 8 or 11 bits, where `tl.log`, not memory, would take the time.

    The mantissa, from √½ to √2, apart from the exponent `whole`; its logarithm a minimax fit by Lawson's algorithm, off
    by 4e-8 at most. A subnormal x gives something finite. H200, bf16, 8192 x 32000, kl_div of softmaxes of normal
    logits: 278 µs for 371, and off by 3.0e-8 of its value, 4.5e-8 by `tl.log`.
    """
    bits = x.to(tl.int32, bitcast=True)
    whole = (bits - 0x3F3504F3) >> 23
    x = (bits - (whole << 23)).to(tl.float32, bitcast=True) - 1.0
    fit = -0.10102291405200958 * x + 0.16420067846775055
    fit = fit * x - 0.17333479225635529
    fit = fit * x + 0.19873036444187164
    fit = fit * x - 0.24959342181682587
    fit = fit * x + 0.33336183428764343
    fit = fit * x - 0.5000066757202148
    fit = fit * x + 0.9999998211860657
    return fit * x, whole.to(tl.float32)


@triton.jit
def _distance(a, b, beta, eps, KIND: tl.constexpr):
    """An element of the distance of a from b, in multiples of `_unit`, and its derivatives; what a caller does not use
    costs nothing.

    "kl_target" and its coarse form: b holds probabilities; "total": both do; else both hold logarithms.
    """
    if KIND == "kl_target":
        log_b = tl.log(tl.maximum(b, eps))
        slope = log_b + tl.where(b >= eps, 1.0, 0.0) - a
        return _times(b, log_b - a), -b, tl.where(b == 0, 0.0, slope)
    elif KIND == "kl_target_coarse":
        part, whole = _log_coarse(tl.maximum(b, eps))
        log_ratio = part + (whole * LN2 - a)
        slope = log_ratio + tl.where(b >= eps, 1.0, 0.0)
        return _times(b, log_ratio), -b, tl.where(b == 0, 0.0, slope)
    elif KIND == "kl":
        p = tl.exp(b)
        return _times(p, b - a), -p, _times(p, b - a + 1)
    elif KIND == "reverse_kl":
        q = tl.exp(a)
        return _times(q, a - b), _times(q, a - b + 1), -q
    elif KIND == "total":
        sign = tl.where(a > b, 0.5, tl.where(a < b, -0.5, 0.0))
        return 0.5 * tl.abs(a - b), sign, -sign
    elif KIND == "jsd_half":
        return _jsd_half(a, b)
    elif KIND == "jsd_half_coarse":
        return _jsd_coarse(a, b, 0.5, True)
    elif KIND == "jsd_coarse":
        return _jsd_coarse(a, b, beta, False)
    else:
        return _jsd(a, b, beta)


@triton.jit
def _unit(KIND: tl.constexpr):
    """A factor that is left to sums: a product less for each element where the formula takes the time."""
    return 0.5 * LN2 if KIND == "jsd_half_coarse" else 1.0


@triton.jit
def _rows_of(labels_ptr, row, num_rows, ignore_index):
    """Which of these rows exist and count."""
    exists = row < num_rows
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row, mask=exists, other=0).to(tl.int64)
        return exists, exists & (label != ignore_index)
    else:
        return exists, exists


@triton.jit
def _forward_kernel(
    x_ptr, target_ptr, labels_ptr, out_ptr, signs_ptr, x_row, target_row, num_rows, num_cols, spans, ignore_index,
    beta, eps,
    KIND: tl.constexpr, NONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """SPAN blocks of a few rows a program: their sum, or with NONE the elements; and where signs_ptr is given, of each
    row the words of `reference.packed_signs`."""
    program = tl.program_id(0)
    row = (program // spans).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    exists, counted = _rows_of(labels_ptr, row, num_rows, ignore_index)
    begin = (program % spans) * (SPAN * BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + SPAN * BLOCK, num_cols), BLOCK, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK)[None, :]
        read = counted & (col < num_cols)
        a = tl.load(x_ptr + row * x_row + col, mask=read, other=0.0).to(tl.float32)
        b = tl.load(target_ptr + row * target_row + col, mask=read, other=0.0).to(tl.float32)
        element, _, _ = _distance(a, b, beta, eps, KIND)  # 0 where nothing was read
        if NONE:
            tl.store(out_ptr + row * num_cols + col, element * _unit(KIND), mask=exists & (col < num_cols))
        else:
            total += element
        if signs_ptr is not None:
            place = tl.arange(0, BLOCK)[None, :] % _SIGNS * 2
            codes = tl.where(a > b, 1 << place, 0) | tl.where(a < b, 3 << place, 0)  # 0 where nothing was read
            words = tl.sum(tl.reshape(codes, [ROWS, BLOCK // _SIGNS, _SIGNS]), 2)
            word = first // _SIGNS + tl.arange(0, BLOCK // _SIGNS)[None, :]
            num_words = tl.cdiv(num_cols, _SIGNS)
            tl.store(signs_ptr + row * num_words + word, words.to(tl.int16), mask=exists & (word < num_words))
    if not NONE:
        tl.store(out_ptr + program, tl.sum(tl.sum(total, 1), 0) * _unit(KIND))


@triton.jit
def _backward_kernel(
    dloss_ptr, count_ptr, x_ptr, target_ptr, labels_ptr, dx_ptr, dtarget_ptr,
    dloss_row, dloss_col, x_row, target_row, num_rows, num_cols, blocks, ignore_index, beta, eps, scale,
    KIND: tl.constexpr, WANTS_DX: tl.constexpr, WANTS_DTARGET: tl.constexpr, READS_X: tl.constexpr,
    READS_TARGET: tl.constexpr, SCALAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of elements a program: the upstream gradient, over the count, times the derivatives."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (program % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists, counted = _rows_of(labels_ptr, row, num_rows, ignore_index)
    exists, read = exists & (col < num_cols), counted & (col < num_cols)
    a = tl.zeros([ROWS, BLOCK], tl.float32)
    b = tl.zeros([ROWS, BLOCK], tl.float32)
    if READS_X:
        a = tl.load(x_ptr + row * x_row + col, mask=read, other=0.0).to(tl.float32)
    if READS_TARGET:
        b = tl.load(target_ptr + row * target_row + col, mask=read, other=0.0).to(tl.float32)
    if SCALAR:
        factor = tl.load(dloss_ptr).to(tl.float32) * scale
    else:
        factor = tl.load(dloss_ptr + row * dloss_row + col * dloss_col, mask=read, other=0.0).to(tl.float32) * scale
    if count_ptr is not None:
        factor = factor / tl.load(count_ptr)
    _, by_x, by_target = _distance(a, b, beta, eps, KIND)
    at = row * num_cols + col
    if WANTS_DX:
        tl.store(dx_ptr + at, tl.where(read, factor * by_x, 0.0).to(dx_ptr.dtype.element_ty), mask=exists)
    if WANTS_DTARGET:
        dtarget = tl.where(read, factor * by_target, 0.0)
        tl.store(dtarget_ptr + at, dtarget.to(dtarget_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _signed_kernel(
    dloss_ptr, count_ptr, signs_ptr, labels_ptr, dx_ptr, dtarget_ptr,
    dloss_row, dloss_col, num_rows, num_cols, blocks, ignore_index, scale,
    WANTS_DX: tl.constexpr, WANTS_DTARGET: tl.constexpr, SCALAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_backward_kernel` for "total", from the signs alone, 8 of a word to a thread."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    word = (program % blocks) * (BLOCK // _SIGNS) + tl.arange(0, BLOCK // _SIGNS)[None, :, None]
    lane = tl.arange(0, _SIGNS)[None, None, :]
    col, num_words = word * _SIGNS + lane, tl.cdiv(num_cols, _SIGNS)
    exists, counted = _rows_of(labels_ptr, row, num_rows, ignore_index)
    exists, read = exists & (col < num_cols), counted & (col < num_cols)
    words = tl.load(signs_ptr + row * num_words + word, mask=counted & (word < num_words), other=0).to(tl.int32)
    if SCALAR:
        factor = tl.load(dloss_ptr).to(tl.float32) * scale
    else:
        factor = tl.load(dloss_ptr + row * dloss_row + col * dloss_col, mask=read, other=0.0).to(tl.float32) * scale
    if count_ptr is not None:
        factor = factor / tl.load(count_ptr)
    factor = tl.where(counted, factor, 0.0)
    # two bits, of which the upper one is the sign, as the highest of an fp32: 2, -2 or 0
    by_x = ((words << (30 - 2 * lane)) & -0x40000000).to(tl.float32, bitcast=True) * (factor * 0.25)
    at = row * num_cols + col
    if WANTS_DX:
        tl.store(dx_ptr + at, by_x.to(dx_ptr.dtype.element_ty), mask=exists)
    if WANTS_DTARGET:
        tl.store(dtarget_ptr + at, (0.0 - by_x).to(dtarget_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _token_distance(a, b, beta, KIND: tl.constexpr):
    """As `_distance` of two log-probabilities, without the derivative by the second."""
    if KIND == "tvd":
        q = tl.exp(a)
        loss, slope, _ = _distance(q, tl.exp(b), beta, 0.0, "total")
        return loss, slope * q
    else:
        loss, slope, _ = _distance(a, b, beta, 0.0, KIND)
        return loss * _unit(KIND), slope


@triton.jit
def _sum_exp(z, peak, sums):
    """Take a block of scores into the running maximum and the running sums of exponentials."""
    top = tl.maximum(peak, tl.max(z, 0))
    finite = tl.where(top == float("-inf"), 0.0, top)
    return top, sums * tl.exp(peak - finite) + tl.exp(z - finite)


@triton.jit
def _teacher_log_prob(y, coldness, lse, PROBS: tl.constexpr):
    """From its logit, or from its probability."""
    if PROBS:
        return tl.log(y.to(tl.float32))
    else:
        return y.to(tl.float32) * coldness - lse


@triton.jit
def _distill_kernel(
    student_ptr, teacher_ptr, target_ptr, upstream_ptr, losses_ptr, student_row, teacher_row, num_rows, num_cols,
    beta, coldness, soft_weight, hard_weight, ignore_index,
    KIND: tl.constexpr, PROBS: tl.constexpr, HARD: tl.constexpr, WARM: tl.constexpr, GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, in three sweeps: both sums of exponentials, the distance with its derivatives' sum, gradient.

    coldness: 1 / temperature; WARM: it is not 1, so that the hard loss has a sum of exponentials of its own.
    """
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_row
    teacher_ptr += row * teacher_row
    lane = tl.arange(0, BLOCK)
    counted = True
    label = 0
    if target_ptr is not None:
        target = tl.load(target_ptr + row).to(tl.int64)
        counted = target != ignore_index
        valid = (target >= 0) & (target < num_cols)
        label = tl.where(valid, target, 0)
        chosen = tl.load(student_ptr + label, mask=counted & valid, other=0.0).to(tl.float32)
    stop = tl.where(counted, num_cols, 0)

    z_peak, y_peak, raw_peak = float("-inf"), float("-inf"), float("-inf")
    z_sums = tl.zeros([BLOCK], tl.float32)
    y_sums = tl.zeros([BLOCK], tl.float32)
    raw_sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, stop, BLOCK):
        at = first + lane
        raw = tl.load(student_ptr + at, mask=at < num_cols, other=float("-inf")).to(tl.float32)
        z_peak, z_sums = _sum_exp(raw * coldness, z_peak, z_sums)
        if not PROBS:
            y = tl.load(teacher_ptr + at, mask=at < num_cols, other=float("-inf")).to(tl.float32)
            y_peak, y_sums = _sum_exp(y * coldness, y_peak, y_sums)
        if HARD and WARM:
            raw_peak, raw_sums = _sum_exp(raw, raw_peak, raw_sums)
    z_lse = z_peak + tl.log(tl.sum(z_sums, 0))
    y_lse = y_peak + tl.log(tl.sum(y_sums, 0))
    raw_lse = z_lse
    if HARD and WARM:
        raw_lse = raw_peak + tl.log(tl.sum(raw_sums, 0))

    soft = tl.zeros([BLOCK], tl.float32)
    slopes = tl.zeros([BLOCK], tl.float32)
    for first in range(0, stop, BLOCK):
        at = first + lane
        inside = at < num_cols
        a = tl.load(student_ptr + at, mask=inside, other=0.0).to(tl.float32) * coldness - z_lse
        b = _teacher_log_prob(tl.load(teacher_ptr + at, mask=inside, other=0.0), coldness, y_lse, PROBS)
        loss, slope = _token_distance(a, b, beta, KIND)
        soft += tl.where(inside, loss, 0.0)
        slopes += tl.where(inside, slope, 0.0)
    tl.store(losses_ptr + row, tl.where(counted, tl.sum(soft, 0), 0.0))
    hard = 0.0
    if HARD:
        hard = tl.where(counted, tl.where(valid, raw_lse - chosen, float("nan")), 0.0)
    tl.store(losses_ptr + num_rows + row, hard)

    if GRAD:
        if upstream_ptr is not None:
            soft_weight = tl.load(upstream_ptr)
            hard_weight = tl.load(upstream_ptr + 1)
        total = tl.sum(slopes, 0)
        if HARD:
            hard_weight = tl.where(valid, hard_weight, float("nan"))
        for first in range(0, num_cols, BLOCK):
            at = first + lane
            inside = (at < num_cols) & counted
            raw = tl.load(student_ptr + at, mask=inside, other=0.0).to(tl.float32)
            a = raw * coldness - z_lse
            b = _teacher_log_prob(tl.load(teacher_ptr + at, mask=inside, other=0.0), coldness, y_lse, PROBS)
            _, slope = _token_distance(a, b, beta, KIND)
            grad = (soft_weight * coldness) * (slope - tl.exp(a) * total)
            if HARD:
                grad += hard_weight * (tl.exp(raw - raw_lse) - tl.where(at == label, 1.0, 0.0))
            grad = tl.where(inside, grad, 0.0)
            tl.store(student_ptr + at, grad.to(student_ptr.dtype.element_ty), mask=at < num_cols)


@triton.jit
def _scale_kernel(grad_ptr, out_ptr, dloss_ptr, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + at, mask=at < elements, other=0.0).to(tl.float32) * tl.load(dloss_ptr).to(tl.float32)
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=at < elements)


class DistanceConfig(NamedTuple):
    """block: elements that a program holds of each tensor at a time; num_stages: how deep the loads of an elementwise
    forward are pipelined."""

    block: int
    num_warps: int
    num_stages: int = 1


def _tile(num_rows: int, num_cols: int, config: DistanceConfig) -> tuple[int, int]:
    """Rows and columns of a tile."""
    block = min(config.block, next_power_of_2(num_cols))
    return min(config.block // block, next_power_of_2(num_rows)), block


def _forward(
    x: Tensor, target: Tensor, labels: Tensor | None, reduction: str, kind: str, beta: float, eps: float,
    ignore_index: int, config: DistanceConfig, signs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The elements' sum, or for "none" the elements; signs: where those of the differences go."""
    none, shape = reduction == "none", x.shape
    if x.numel() == 0:
        return x.new_zeros(shape if none else (), dtype=torch.float32)
    x, target = rows(x), rows(target)
    tile_rows, block = _tile(*x.shape, config)
    block = block if signs is None else max(block, SIGNS)
    spans = cdiv(x.shape[1], SPAN * block)
    programs = cdiv(x.shape[0], tile_rows) * spans
    out = x.new_empty(shape if none else programs, dtype=torch.float32)
    launch(
        _forward_kernel, (programs,),
        x, target, labels, out, signs, x.stride(0), target.stride(0), *x.shape, spans, ignore_index, beta, eps,
        KIND=kind, NONE=none, ROWS=tile_rows, BLOCK=block, SPAN=SPAN, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out if none else out.sum()


def _backward(
    dloss: Tensor, x: Tensor, target: Tensor, labels: Tensor | None, count: Tensor | None, kind: str, beta: float,
    eps: float, ignore_index: int, divisor: float, output_mask: Sequence[bool], config: DistanceConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both gradients; the upstream one is divided by `divisor`, and by `count` where there is one."""
    dx, dtarget = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, target), output_mask))
    if x.numel() == 0 or not any(output_mask):
        return dx, dtarget
    if dloss.ndim:
        dloss = rows(dloss)
    x, target = rows(x), rows(target)
    tile_rows, block = _tile(*x.shape, config)
    blocks = cdiv(x.shape[1], block)
    only_p = kind in ("kl", "kl_target", "kl_target_coarse") and not output_mask[1]
    only_q = kind == "reverse_kl" and not output_mask[0]
    launch(
        _backward_kernel, (cdiv(x.shape[0], tile_rows) * blocks,),
        dloss, count, x, target, labels, dx, dtarget, *(dloss.stride() or (0, 0)), x.stride(0), target.stride(0),
        *x.shape, blocks, ignore_index, beta, eps, 1 / divisor,
        KIND=kind, WANTS_DX=output_mask[0], WANTS_DTARGET=output_mask[1], READS_X=not only_p, READS_TARGET=not only_q,
        SCALAR=dloss.ndim == 0, ROWS=tile_rows, BLOCK=block, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dtarget


def _signed(
    dloss: Tensor, x: Tensor, target: Tensor, labels: Tensor | None, count: Tensor | None, signs: Tensor,
    ignore_index: int, divisor: float, output_mask: Sequence[bool], config: DistanceConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `_backward`, of the total variation distance from its signs."""
    dx, dtarget = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, target), output_mask))
    if x.numel() == 0 or not any(output_mask):
        return dx, dtarget
    if dloss.ndim:
        dloss = rows(dloss)
    num_rows, num_cols = x.numel() // x.shape[-1], x.shape[-1]
    tile_rows, block = _tile(num_rows, num_cols, config)
    block = max(block, SIGNS)
    blocks = cdiv(num_cols, block)
    launch(
        _signed_kernel, (cdiv(num_rows, tile_rows) * blocks,),
        dloss, count, signs, labels, dx, dtarget, *(dloss.stride() or (0, 0)), num_rows, num_cols, blocks,
        ignore_index, 1 / divisor,
        WANTS_DX=output_mask[0], WANTS_DTARGET=output_mask[1], SCALAR=dloss.ndim == 0, ROWS=tile_rows, BLOCK=block,
        num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dtarget


def _jsd_kind(beta: float, *inputs: Tensor) -> str:
    """Which formula serves; inputs: the logarithms, where nothing has been added to them yet."""
    if beta in (0, 1):
        return "reverse_kl" if beta else "kl"
    return ("jsd_half" if beta == 0.5 else "jsd") + _coarse(*inputs)


def _kl_kind(log_target: bool, x: Tensor, target: Tensor) -> str:
    return "kl" if log_target else "kl_target" + _coarse(x, target)


def _coarse(*inputs: Tensor) -> str:
    return "_coarse" if inputs and all(t.element_size() == 2 for t in inputs) else ""


def _mean(total: Tensor, x: Tensor, labels: Tensor | None, reduction: str, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(the reduced loss, the number of rows that count), from the sum."""
    count = total.new_empty(0) if labels is None else (labels != ignore_index).sum().clamp(min=1).to(total.dtype)
    if reduction in ("batchmean", "mean"):
        total = total / (_rows_or_one(x) if labels is None else count)
    return total / x.shape[-1] if reduction == "mean" else total, count


def _rows_or_one(x: Tensor) -> int:
    return max(1, x.numel() // x.shape[-1])


def _divisor(x: Tensor, labels: Tensor | None, reduction: str) -> int:
    """What divides the sum besides the count of rows."""
    divisor = _rows_or_one(x) if labels is None and reduction in ("batchmean", "mean") else 1
    return divisor * x.shape[-1] if reduction == "mean" else divisor


def _counted(count: Tensor, labels: Tensor | None, reduction: str) -> Tensor | None:
    return count if labels is not None and reduction in ("batchmean", "mean") else None


def _step(
    config: DistanceConfig,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    losses: Tensor,
    distance: Distance,
    upstream: Tensor | None,
    grad: bool,
) -> None:
    """`DistanceSteps.step`; losses are [2, C] with a unit last stride."""
    if student.shape[0] == 0:
        return
    kind = _jsd_kind(distance.beta) if distance.kind == "jsd" else distance.kind
    launch(
        _distill_kernel, (student.shape[0],),
        student, teacher, target, upstream, losses, student.stride(0), teacher.stride(0),
        losses.stride(0), student.shape[1],
        distance.beta, 1 / distance.temperature, distance.soft, distance.hard, distance.ignore_index,
        KIND=kind, PROBS=distance.probs, HARD=target is not None, WARM=distance.temperature != 1, GRAD=grad,
        BLOCK=min(config.block, next_power_of_2(student.shape[1])), num_warps=config.num_warps,
    )  # fmt: skip


def _scale(grad: Tensor, dloss: Tensor, dtype: torch.dtype, over: bool) -> Tensor:
    out = grad if over and grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    if out.numel():
        launch(_scale_kernel, (cdiv(out.numel(), 4096),), grad, out, dloss, out.numel(), BLOCK=4096, num_warps=8)
    return out


def _steps(config: DistanceConfig) -> DistanceSteps:
    return DistanceSteps(partial(_step, config), _scale)


def _reasons(call) -> list[str]:
    wide = torch.float64 in (call.x.dtype, call.target.dtype)
    return ["x or target is float64; this kernel computes in float32"] if wide else []


def _linear_reasons(call) -> list[str]:
    wide = torch.float64 in (call.x.dtype, call.teacher.dtype)
    return ["x or teacher is float64; this kernel computes in float32"] if wide else []


def _default(dims, arch, dtype) -> DistanceConfig:
    # Two 16-byte accesses a thread for each of the two tensors, all asked for before the first is used.
    return DistanceConfig(128 * 32 // dtype.itemsize, 4, 2 if arch.kind == "cuda" and arch.capability >= (8, 0) else 1)


def _default_jsd(dims, arch, dtype) -> DistanceConfig:
    # Of 16 bits the formula takes as long as memory. H200, bf16, 8192 x 32000: 267 µs, as the others 275.
    return DistanceConfig(4096, 8) if dtype.itemsize == 2 else _default(dims, arch, dtype)


def _default_vjp(dims, arch, dtype) -> DistanceConfig:
    # Whatever the dtype, which is the upstream gradient's: half the block makes jsd of bf16 take 419 µs in place of 369
    # (H200, 8192 x 32000); twice the block spills in fp32.
    return DistanceConfig(2048, 4)


def _default_signed(dims, arch, dtype) -> DistanceConfig:
    # H200, bf16, 8192 x 32000: 152 µs for the gradient, 149 with half the block; to fill as much with zeros takes 159.
    return DistanceConfig(4096, 4)


def _default_linear(dims, arch, dtype) -> DistanceConfig:
    # 8 elements a thread: with 16, "jsd" spills on sm90.
    return DistanceConfig(2048, min(8, 1024 // max(32, arch.warp)))


def _dims(x, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": x.shape[-1]}


def _dims_vjp(dloss, x, *_) -> dict[str, int]:
    return _dims(x)


def _dims_linear(x, weight, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_linear_vjp(dloss, dparts, x, weight, *_) -> dict[str, int]:
    return _dims_linear(x, weight)


CHOICES = {"block": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)}
SPACE = Space(dims=_dims, default=_default, choices=CHOICES)
JSD_SPACE = Space(dims=_dims, default=_default_jsd, choices=CHOICES)
VJP_SPACE = Space(dims=_dims_vjp, default=_default_vjp, choices=CHOICES)
SIGNED_SPACE = Space(dims=_dims_vjp, default=_default_signed, choices=CHOICES)
LINEAR_SPACE = Space(dims=_dims_linear, default=_default_linear, choices=CHOICES)
LINEAR_VJP_SPACE = Space(dims=_dims_linear_vjp, default=_default_linear, choices=CHOICES)


@register_kernel("kl_div", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
def kl_div(
    x: Tensor,
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
    *,
    config: DistanceConfig,
) -> Tensor:
    """One launch for the elements or their partial sums."""
    out = _forward(x, target, None, reduction, _kl_kind(log_target, x, target), 0.0, eps, 0, config)
    return out if reduction in ("none", "sum") else out / divisor_of(x, reduction)


@register_kernel("kl_div_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=VJP_SPACE)
def kl_div_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: str,
    log_target: bool,
    eps: float,
    output_mask: Sequence[bool],
    *,
    config: DistanceConfig,
) -> tuple[Tensor, Tensor]:
    """One launch; x is read only for the target's gradient."""
    divisor = 1 if reduction == "none" else max(1, divisor_of(x, reduction))
    kind = _kl_kind(log_target, x, target)
    return _backward(dloss, x, target, None, None, kind, 0.0, eps, 0, divisor, output_mask, config)


@register_kernel("jsd", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=JSD_SPACE)
def jsd(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    *,
    config: DistanceConfig,
) -> tuple[Tensor, Tensor]:
    """One launch for the elements or their partial sums; rows that do not count are not read."""
    flat = None if labels is None else row_values(labels)
    out = _forward(x, target, flat, reduction, _jsd_kind(beta, x, target), beta, 0.0, ignore_index, config)
    return _mean(out, x, labels, reduction, ignore_index)


@register_kernel("jsd_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=VJP_SPACE)
def jsd_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    count: Tensor,
    beta: float,
    ignore_index: int,
    reduction: str,
    output_mask: Sequence[bool],
    *,
    config: DistanceConfig,
) -> tuple[Tensor, Tensor]:
    """One launch, from the inputs alone."""
    flat, divisor = None if labels is None else row_values(labels), _divisor(x, labels, reduction)
    counted, kind = _counted(count, labels, reduction), _jsd_kind(beta, x, target)
    return _backward(dloss, x, target, flat, counted, kind, beta, 0.0, ignore_index, divisor, output_mask, config)


@register_kernel("tvd", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
def tvd(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    grad_mask: Sequence[bool] | None = None,
    *,
    config: DistanceConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `jsd`; where a gradient will be asked for, with the signs of the differences."""
    flat, wanted = None if labels is None else row_values(labels), any(grad_mask or ())
    signs = x.new_empty((*x.shape[:-1], cdiv(x.shape[-1], SIGNS)) if wanted else 0, dtype=torch.int16)
    out = _forward(x, target, flat, reduction, "total", 0.0, 0.0, ignore_index, config, signs if wanted else None)
    return *_mean(out, x, labels, reduction, ignore_index), signs


@register_kernel("tvd_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SIGNED_SPACE)
def tvd_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    count: Tensor,
    signs: Tensor,
    reduction: str,
    ignore_index: int,
    output_mask: Sequence[bool],
    *,
    config: DistanceConfig,
) -> tuple[Tensor, Tensor]:
    """One launch, from the signs where they were saved, else from the inputs."""
    flat, divisor = None if labels is None else row_values(labels), _divisor(x, labels, reduction)
    counted = _counted(count, labels, reduction)
    if signs.numel():
        return _signed(dloss, x, target, flat, counted, signs, ignore_index, divisor, output_mask, config)
    return _backward(dloss, x, target, flat, counted, "total", 0.0, 0.0, ignore_index, divisor, output_mask, config)


@register_kernel("linear_distillation", backend="triton", rank=20, rejects=_linear_reasons)
@optimize_kernel(space=LINEAR_SPACE)
@linear_distillation_arguments
def linear_distillation(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each chunk two products, one launch over both logits, and the products of the gradients."""
    return chunks.linear_distillation(_steps(config), call)


@register_kernel("linear_distillation_vjp", backend="triton", rank=20, rejects=_linear_reasons)
@optimize_kernel(space=LINEAR_VJP_SPACE)
@linear_distillation_vjp_arguments
def linear_distillation_vjp(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again."""
    return chunks.linear_distillation_vjp(_steps(config), call)
