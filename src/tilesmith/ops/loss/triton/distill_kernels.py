"""Device kernels of the distances between distributions in Triton: the formulas, elementwise and row kernels."""

import triton
import triton.language as tl

from tilesmith.ops.loss.distill_reference import SIGNS

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
def distance_fwd_kernel(
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
def distance_bwd_kernel(
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
def total_variation_bwd_kernel(
    dloss_ptr, count_ptr, signs_ptr, labels_ptr, dx_ptr, dtarget_ptr,
    dloss_row, dloss_col, num_rows, num_cols, blocks, ignore_index, scale,
    WANTS_DX: tl.constexpr, WANTS_DTARGET: tl.constexpr, SCALAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `distance_bwd_kernel` for "total", from the signs alone, 8 of a word to a thread."""
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
def distill_kernel(
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
def scale_kernel(grad_ptr, out_ptr, dloss_ptr, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + at, mask=at < elements, other=0.0).to(tl.float32) * tl.load(dloss_ptr).to(tl.float32)
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=at < elements)
