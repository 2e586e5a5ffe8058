"""The device kernels of cross-entropy in Triton: whole rows in registers, or an online softmax over blocks of a row.

Logits are kept in base 2, z · log2(e), so that an exponential is one instruction. A forward kernel with GRAD turns the
logits into gradients in place, and reads them a second time, from the L2 cache at best; linear_cross_entropy therefore
needs one kernel for each chunk. Rows whose target is ignored are not read.
"""

import triton
import triton.language as tl

from tilesmith.ops.loss.token_sums import weight_of_label

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh. Below 1/4 by its series, since 1 − exp(−2|x|) would cancel; the first term left out is below fp32's
    rounding."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2E))
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    value = tl.where(size < 0.25, size * series, (1.0 - decay) / (1.0 + decay))
    return tl.where(x < 0, -value, value)


@triton.jit
def score(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled and capped logits in base 2, and the cap's derivative."""
    if SOFTCAP:
        capped = tanh(logits * (scale / softcap))
        return capped * (softcap * LOG2E), 1.0 - capped * capped
    else:
        return logits * (scale * LOG2E), logits


@triton.jit
def _row_start(row, stride, outer_stride, inner_rows, GROUPED: tl.constexpr, UNIT: tl.constexpr):
    """The offset of a row. GROUPED: rows lie in groups of `inner_rows`, as those of logits[:, :-1] do. All strides are
    multiples of UNIT, which Triton can only infer for multiples of 16."""
    stride = stride // UNIT * UNIT
    if GROUPED:
        outer_stride = outer_stride // UNIT * UNIT
        return (row // inner_rows) * outer_stride + (row % inner_rows) * stride
    else:
        return row * stride


@triton.jit
def _sum_of_weights(weight_ptr, weight_sum_ptr, cols):
    if weight_ptr is not None and weight_sum_ptr is not None:
        return tl.load(weight_sum_ptr).to(tl.float32)
    else:
        return cols * 1.0


@triton.jit
def _loss(lse, chosen, total, label_weight, all_weights, cols, smoothing, counted, valid, SMOOTH: tl.constexpr):
    """A token's cross-entropy without its z term; total: Σ w[c] · z[c]. All scores are in base 2 and converted only
    after the subtraction, so that the loss of a certain label is exactly 0."""
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
    label_coef = token_grad * label_weight
    class_coef = token_grad
    if SMOOTH:
        label_coef = label_coef * (1.0 - smoothing)
        class_coef = token_grad * (smoothing / cols)
        softmax_coef = label_coef + class_coef * all_weights
    else:
        softmax_coef = label_coef
    if Z:
        softmax_coef += tl.where(counted, 2.0 * z_loss * lse * z_grad * factor, 0.0)
    return softmax_coef, label_coef, class_coef


@triton.jit
def _own_grads(divisors_ptr, Z: tl.constexpr, MEAN: tl.constexpr):
    """The gradient of a loss with respect to a token's cross-entropy and to its z term: of the mean, or of the mean
    times its first divisor."""
    if MEAN:
        return 1.0 / tl.load(divisors_ptr), 1.0 / tl.load(divisors_ptr + 1)
    elif Z and divisors_ptr is not None:
        return 1.0, tl.load(divisors_ptr) / tl.load(divisors_ptr + 1)
    else:
        return 1.0, 1.0


@triton.jit
def _upstream(dloss_ptr, dloss_stride, divisors_ptr, row, inside):
    """The loss's gradient with respect to the token's cross-entropy and to its z term."""
    dloss = tl.load(dloss_ptr + row * dloss_stride, mask=inside, other=0.0).to(tl.float32)
    if divisors_ptr is not None:
        return dloss / tl.load(divisors_ptr), dloss / tl.load(divisors_ptr + 1)
    else:
        return dloss, dloss


@triton.jit
def _tile(BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The positions of a block, as [BLOCK / LANES, LANES]: a thread loads LANES neighbours at once."""
    return tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _sweep(
    row_ptr, weight_ptr, at, shift, end, peak, sums, total, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of a row to the running maxima, the running sums of exponentials and the sums of scores. Each
    thread has its own of them, so that threads exchange them once per row and not once per block."""
    inside = (at >= shift) & (at < end)
    if MASKED:
        z, _ = score(tl.load(row_ptr + at, mask=inside, other=0.0).to(tl.float32), scale, softcap, SOFTCAP)
    else:
        z, _ = score(tl.load(row_ptr + at).to(tl.float32), scale, softcap, SOFTCAP)
    if SMOOTH:
        part = z
        if weight_ptr is not None:
            part = z * tl.load(weight_ptr + (at - shift), mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(inside, part, 0.0), 1) if MASKED else tl.sum(part, 1)
    if MASKED:
        z = tl.where(inside, z, float("-inf"))
    top = tl.maximum(peak, tl.max(z, 1))
    finite = tl.where(top == float("-inf"), 0.0, top)
    sums = sums * tl.exp2(peak - finite) + tl.sum(tl.exp2(z - finite[:, None]), 1)
    return top, sums, total


@triton.jit
def _gradient(
    in_ptr, out_ptr, weight_ptr, at, mask, shift, label_at, lse2, softmax_coef, label_coef,
    class_coef, scale, softcap, counted,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write one block of a row's gradient."""
    if MASKED:
        x = tl.load(in_ptr + at, mask=mask & counted, other=0.0)
    else:
        x = tl.load(in_ptr + at, mask=counted, other=0.0)
    z, slope = score(x.to(tl.float32), scale, softcap, SOFTCAP)
    grad = tl.exp2(z - lse2) * softmax_coef
    if SMOOTH:
        if weight_ptr is not None:
            grad -= class_coef * tl.load(weight_ptr + (at - shift), mask=mask, other=0.0).to(tl.float32)
        else:
            grad -= class_coef
    grad = tl.where(at == label_at, grad - label_coef, grad)
    if SOFTCAP:
        grad *= slope
    grad = grad.to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + at, grad, mask=mask)
    else:
        tl.store(out_ptr + at, grad)


@triton.jit
def cross_entropy_online_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, divisors_ptr, losses_ptr, lse_ptr,
    rows, cols, stride, outer_stride, inner_rows, ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, ADD_Z: tl.constexpr, GRAD: tl.constexpr,
    MEAN: tl.constexpr, GROUPED: tl.constexpr, UNIT: tl.constexpr, COLS_UNIT: tl.constexpr, ALIGN: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """An online softmax over a row at a time. ALIGN > 1: rows start at any address, and blocks start at the multiple of
    ALIGN elements before it. Only the first block (where ALIGN > 1) and the last one are masked; the others keep
    16-byte accesses. The pass for the gradient goes backwards, so that it starts with what is still in L2."""
    cols = cols // COLS_UNIT * COLS_UNIT
    place = _tile(BLOCK, LANES)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        target = tl.load(target_ptr + row).to(tl.int64)
        counted = target != ignore_index
        valid = (target >= 0) & (target < cols)
        label = tl.where(valid, target, 0)
        start = _row_start(row, stride, outer_stride, inner_rows, GROUPED, UNIT)
        base = start // ALIGN * ALIGN
        shift = (start - base).to(tl.int32)
        end = shift + cols
        row_ptr = logits_ptr + base
        chosen = tl.load(logits_ptr + start + label, mask=counted & valid, other=0.0).to(tl.float32)

        peak = tl.full([BLOCK // LANES], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK // LANES], tl.float32)
        total = tl.zeros([BLOCK // LANES], tl.float32)
        stop = tl.where(counted, end, 0)
        full = stop // BLOCK * BLOCK
        begin = 0
        if ALIGN > 1:
            begin = BLOCK
            if counted:
                peak, sums, total = _sweep(
                    row_ptr, weight_ptr, place, shift, end, peak, sums, total, scale, softcap, SMOOTH, SOFTCAP, True
                )
        for first in tl.range(begin, full, BLOCK, num_stages=STAGES):
            peak, sums, total = _sweep(
                row_ptr, weight_ptr, first + place, shift, end, peak, sums, total, scale, softcap,
                SMOOTH, SOFTCAP, False,
            )  # fmt: skip
        last = tl.maximum(full, begin)
        if last < stop:
            peak, sums, total = _sweep(
                row_ptr, weight_ptr, last + place, shift, end, peak, sums, total, scale, softcap, SMOOTH, SOFTCAP, True
            )

        top = tl.max(peak, 0)
        finite = tl.where(top == float("-inf"), 0.0, top)
        lse2 = tl.where(counted, top + tl.log2(tl.sum(sums * tl.exp2(peak - finite), 0)), 0.0)
        lse = lse2 * LN2
        chosen, _ = score(chosen, scale, softcap, SOFTCAP)
        label_weight = weight_of_label(weight_ptr, label, counted & valid)
        all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, cols)
        loss = _loss(lse2, chosen, tl.sum(total, 0), label_weight, all_weights, cols, smoothing, counted, valid, SMOOTH)
        if ADD_Z:
            loss += z_loss * lse * lse
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, lse)

        if GRAD:
            token_grad, z_grad = _own_grads(divisors_ptr, Z, MEAN)
            softmax_coef, label_coef, class_coef = _coefficients(
                token_grad, z_grad, lse, label_weight, all_weights, cols, smoothing, z_loss, scale,
                counted, valid, SMOOTH, Z,
            )  # fmt: skip
            label_at = label.to(tl.int32) + shift
            full = end // BLOCK * BLOCK
            last = tl.maximum(full, begin)
            if last < end:
                at = last + place
                _gradient(
                    row_ptr, row_ptr, weight_ptr, at, at < end, shift, label_at, lse2,
                    softmax_coef, label_coef, class_coef,
                    scale, softcap, counted, SMOOTH, SOFTCAP, True,
                )  # fmt: skip
            for back in tl.range(begin, full, BLOCK, num_stages=STAGES):
                at = full - BLOCK + begin - back + place
                _gradient(
                    row_ptr, row_ptr, weight_ptr, at, at < end, shift, label_at, lse2,
                    softmax_coef, label_coef, class_coef,
                    scale, softcap, counted, SMOOTH, SOFTCAP, False,
                )  # fmt: skip
            if ALIGN > 1:
                _gradient(
                    row_ptr, row_ptr, weight_ptr, place, (place >= shift) & (place < end), shift, label_at, lse2,
                    softmax_coef, label_coef, class_coef, scale, softcap, counted, SMOOTH, SOFTCAP, True,
                )  # fmt: skip


@triton.jit
def cross_entropy_row_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, divisors_ptr, losses_ptr, lse_ptr,
    rows, cols, stride, outer_stride, inner_rows, ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, ADD_Z: tl.constexpr, GRAD: tl.constexpr,
    MEAN: tl.constexpr, GROUPED: tl.constexpr, UNIT: tl.constexpr, COLS_UNIT: tl.constexpr, PLAIN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows, read once and held in registers. PLAIN: scores are the logits, so that −∞ can be loaded
    outside a row."""
    cols = cols // COLS_UNIT * COLS_UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (target != ignore_index)
    valid = (target >= 0) & (target < cols)
    label = tl.where(valid, target, 0)
    start = _row_start(row, stride, outer_stride, inner_rows, GROUPED, UNIT)
    at = start[:, None] + col
    read = counted[:, None] & (col < cols)
    outside = float("-inf") if PLAIN else 0.0
    z, slope = score(tl.load(logits_ptr + at, mask=read, other=outside).to(tl.float32), scale, softcap, SOFTCAP)
    chosen = tl.load(logits_ptr + start + label, mask=counted & valid, other=0.0).to(tl.float32)
    chosen, _ = score(chosen, scale, softcap, SOFTCAP)
    total = chosen
    if SMOOTH:
        part = z
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
            part = z * weight
        total = tl.sum(tl.where(read, part, 0.0), 1)
    if not PLAIN:
        z = tl.where(read, z, float("-inf"))
    peak = tl.max(z, 1)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    sums = tl.sum(tl.exp2(z - finite[:, None]), 1)
    lse2 = tl.where(counted, finite + tl.log2(sums), 0.0)
    lse = lse2 * LN2

    label_weight = weight_of_label(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, cols)
    loss = _loss(lse2, chosen, total, label_weight, all_weights, cols, smoothing, counted, valid, SMOOTH)
    if ADD_Z:
        loss += z_loss * lse * lse
    tl.store(losses_ptr + row, loss, mask=exists)
    tl.store(lse_ptr + row, lse, mask=exists)

    if GRAD:
        token_grad, z_grad = _own_grads(divisors_ptr, Z, MEAN)
        softmax_coef, label_coef, class_coef = _coefficients(
            token_grad + tl.zeros([ROWS], tl.float32), z_grad, lse, label_weight, all_weights, cols,
            smoothing, z_loss, scale, counted, valid, SMOOTH, Z,
        )  # fmt: skip
        grad = tl.exp2(z - lse2[:, None]) * softmax_coef[:, None]
        if SMOOTH:
            if weight_ptr is not None:
                grad -= class_coef[:, None] * weight
            else:
                grad -= class_coef[:, None]
        grad = tl.where(col == label.to(tl.int32)[:, None], grad - label_coef[:, None], grad)
        if SOFTCAP:
            grad *= slope
        tl.store(logits_ptr + at, grad.to(logits_ptr.dtype.element_ty), mask=exists[:, None] & (col < cols))


@triton.jit
def cross_entropy_online_vjp_kernel(
    logits_ptr, out_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, dloss_ptr, divisors_ptr,
    cols, first_class, classes, blocks, stride, outer_stride, inner_rows, dloss_stride,
    ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, GROUPED: tl.constexpr, UNIT: tl.constexpr,
    COLS_UNIT: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
    PITCHED: tl.constexpr = False,
):  # fmt: skip
    """One block of one row a program. The columns are the classes from first_class on, of `classes`. The last rows come
    first: the L2 cache may still have what the forward read last. CHAINED: it may have started before the kernel that
    comes before it is over. PITCHED: out has the stride of logits, which is not the number of columns.

    ALIGN > 1, as in `cross_entropy_online_kernel`, only where out has the strides of logits. Then a block's mask covers
    whole groups of LANES, which begin at multiples of 16 bytes. The columns that a row shares with its neighbours are
    written by the row's first program, in a tile of their own, so that there is one path of 16-byte accesses. A second
    path with a mask of elements, for the blocks at both ends, took 60 registers in place of 31 and left half the loads
    in flight: 464 µs in place of 394 (H200, bf16, 8192 x 50257). Out may be logits, so no element is written twice.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    cols = cols // COLS_UNIT * COLS_UNIT
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks) * BLOCK
    place = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row).to(tl.int64)
    counted = target != ignore_index
    valid = (target >= 0) & (target < classes)
    label = tl.where(valid, target, 0)
    lse = tl.load(lse_ptr + row)
    token_grad, z_grad = _upstream(dloss_ptr, dloss_stride, divisors_ptr, row, counted)
    label_weight = weight_of_label(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, classes)
    softmax_coef, label_coef, class_coef = _coefficients(
        token_grad, z_grad, lse, label_weight, all_weights, classes, smoothing, z_loss, scale, counted, valid, SMOOTH, Z
    )
    start = _row_start(row, stride, outer_stride, inner_rows, GROUPED, UNIT)
    base = start // ALIGN * ALIGN
    shift = (start - base).to(tl.int32)
    end = shift + cols
    in_ptr = logits_ptr + base
    to_ptr = out_ptr + (base if ALIGN > 1 or PITCHED else row * cols)
    lse2 = lse * LOG2E
    label_at = (label - first_class).to(tl.int32) + shift
    if weight_ptr is not None:
        weight_ptr += first_class
    mask = first + place < end
    if ALIGN > 1:
        lanes = first + place // LANES * LANES
        mask = (lanes >= shift) & (lanes + LANES <= end)
    _gradient(
        in_ptr, to_ptr, weight_ptr, first + place, mask, shift, label_at, lse2, softmax_coef, label_coef, class_coef,
        scale, softcap, counted, SMOOTH, SOFTCAP, True,
    )  # fmt: skip
    if ALIGN > 1:
        if first == 0:
            lane = tl.arange(0, 2 * LANES)
            edge = tl.where(lane < LANES, shift // LANES * LANES, end // LANES * LANES - LANES) + lane
            until = tl.where(lane < LANES, (shift + LANES - 1) // LANES * LANES, end)
            _gradient(
                in_ptr, to_ptr, weight_ptr, edge, (edge >= shift) & (edge < until), shift, label_at, lse2,
                softmax_coef, label_coef, class_coef, scale, softcap, counted, SMOOTH, SOFTCAP, True,
            )  # fmt: skip


@triton.jit
def cross_entropy_row_vjp_kernel(
    logits_ptr, out_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, dloss_ptr, divisors_ptr,
    rows, cols, first_class, classes, stride, outer_stride, inner_rows, dloss_stride,
    ignore_index, smoothing, z_loss, scale, softcap,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, Z: tl.constexpr, GROUPED: tl.constexpr, UNIT: tl.constexpr,
    COLS_UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
    PITCHED: tl.constexpr = False,
):  # fmt: skip
    """A tile of whole rows, or of all the columns that this device has: the classes from first_class on. The last rows
    come first; CHAINED, PITCHED: as in `cross_entropy_online_vjp_kernel`."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    cols = cols // COLS_UNIT * COLS_UNIT
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (target != ignore_index)
    valid = (target >= 0) & (target < classes)
    label = tl.where(valid, target, 0)
    lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
    token_grad, z_grad = _upstream(dloss_ptr, dloss_stride, divisors_ptr, row, counted)
    label_weight = weight_of_label(weight_ptr, label, counted & valid)
    all_weights = _sum_of_weights(weight_ptr, weight_sum_ptr, classes)
    softmax_coef, label_coef, class_coef = _coefficients(
        token_grad, z_grad, lse, label_weight, all_weights, classes, smoothing, z_loss, scale, counted, valid, SMOOTH, Z
    )
    start = _row_start(row, stride, outer_stride, inner_rows, GROUPED, UNIT)
    at = start[:, None] + col
    x = tl.load(logits_ptr + at, mask=counted[:, None] & (col < cols), other=0.0).to(tl.float32)
    z, slope = score(x, scale, softcap, SOFTCAP)
    grad = tl.exp2(z - (lse * LOG2E)[:, None]) * softmax_coef[:, None]
    if SMOOTH:
        if weight_ptr is not None:
            grad -= class_coef[:, None] * tl.load(weight_ptr + first_class + col, mask=col < cols, other=0.0).to(
                tl.float32
            )
        else:
            grad -= class_coef[:, None]
    grad = tl.where(col == (label - first_class).to(tl.int32)[:, None], grad - label_coef[:, None], grad)
    if SOFTCAP:
        grad *= slope
    out_at = (start if PITCHED else row * cols)[:, None] + col
    tl.store(out_ptr + out_at, grad.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (col < cols))
