"""Device kernels of the norms in Triton: two forwards (a row in registers, or read twice) and two backwards."""

import triton
import triton.language as tl

from tilesmith.device.triton.dropout import keep_block, keep_or_0, keep_tile
from tilesmith.device.triton.philox import load_key

# Pointers that are None stand for tensors that a call does not have; Triton compiles a variant without them.
# Outputs are packed: the stride of their rows is `cols`. With seed_ptr x is dropped out before the residual is added.


@triton.jit
def _round(value, like_ptr):
    """fp32 `value` as it reads back after a store through `like_ptr`."""
    return value.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _load_vector(ptr, col, inside):
    """weight or bias as a [1, cols] fp32 tile. It is loaded in one dim: a tile of one row would get a layout of its
    own, and the rows it meets would go through shared memory to match that."""
    return tl.load(ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _mean(total, cols):
    """total / cols; exact for one column, where rstd would multiply the error that Triton's `/` leaves."""
    return total * (1.0 / cols)


@triton.jit
def _row_of_head(row, head, HEADS: tl.constexpr, INNER: tl.constexpr):
    """Which of all rows is the so many-th of a head's; INNER: rows between those of two neighbouring heads."""
    return (row // INNER * HEADS + head) * INNER + row % INNER


@triton.jit
def _rounded_rstd(mean_square, eps, y_ptr):
    """1 / sqrt(mean_square + eps), after each operation rounded to y's dtype, the mean and eps too."""
    return _round(
        tl.rsqrt(_round(_round(mean_square, y_ptr) + _round(tl.full((), eps, tl.float32), y_ptr), y_ptr)), y_ptr
    )


@triton.jit
def _factor(weight_ptr, y_ptr, lane, inside, offset, LLAMA: tl.constexpr):
    """weight + offset for a row of lanes, rounded as casting="llama" of the reference rounds it; 1 without a weight."""
    if weight_ptr is None:
        return 1.0
    else:
        weight = (
            tl.load(weight_ptr + lane, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32) + offset
        )
        if LLAMA and weight_ptr.dtype == y_ptr.dtype:
            weight = _round(weight, weight_ptr)
        return weight[None, :] if len(lane.shape) == 1 else weight


@triton.jit
def _shift(bias_ptr, lane, inside):
    """bias for a row of lanes; 0 without one."""
    if bias_ptr is None:
        return 0.0
    else:
        bias = tl.load(bias_ptr + lane, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        return bias[None, :] if len(lane.shape) == 1 else bias


@triton.jit
def _scale(xhat, weight, bias, y_ptr, LLAMA: tl.constexpr):
    """xhat · weight + bias; LLAMA rounds xhat first."""
    if LLAMA:
        xhat = _round(xhat, y_ptr)
    return xhat * weight + bias


@triton.jit
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps, offset,
    CENTER: tl.constexpr, LLAMA: tl.constexpr, EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    seed_ptr=None, drop_below=None, keep_scale=None, LANES: tl.constexpr = 1, SHORT: tl.constexpr = True,
    HEADS: tl.constexpr = None, INNER: tl.constexpr = 1, ROUNDED: tl.constexpr = False,
):  # fmt: skip
    """A tile of whole rows, read once and held in registers. CENTER: layer norm, else RMS norm. EVEN: cols ==
    BLOCK_COLS. HEADS: each has a weight of its own, [HEADS, cols]; INNER: rows between two neighbouring heads. ROUNDED:
    casting="none", with LLAMA."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    lane = tl.arange(0, BLOCK_COLS)
    lane_inside = tl.full([BLOCK_COLS], True, tl.int1) if EVEN else lane < cols
    col, col_inside = lane[None, :], lane_inside[None, :]
    row_inside = first + row < rows
    inside = row_inside & col_inside
    x = tl.load(x_ptr + first * x_stride + (row * x_stride + col), mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + first * residual_stride + (row * residual_stride + col), mask=inside, other=0.0
        )
        if seed_ptr is not None:
            key = load_key(seed_ptr)
            keep = keep_tile(key, (first + row) * cols, drop_below, BLOCK_COLS, LANES, SHORT)
            x = tl.where(keep, x * keep_scale, 0.0)
        x = _round(x + residual.to(tl.float32), s_ptr)
        tl.store(s_ptr + first * cols + (row * cols + col), x, mask=inside)
    if CENTER:
        mean = _mean(tl.sum(x, 1, keep_dims=True), cols)
        if mean_ptr is not None:
            tl.store(mean_ptr + first + row, mean, mask=row_inside)
        x = tl.where(col_inside, x - mean, 0.0)
    if ROUNDED:
        x = _round(x, y_ptr)
        rstd = _rounded_rstd(_mean(tl.sum(_round(x * x, y_ptr), 1, keep_dims=True), cols), eps, y_ptr)
    else:
        rstd = tl.rsqrt(_mean(tl.sum(x * x, 1, keep_dims=True), cols) + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + first + row, rstd, mask=row_inside)
    # loaded only now: before the reductions they would take registers (layer norm of 8,192 columns: 40 % slower)
    if HEADS is None:
        weight = _factor(weight_ptr, y_ptr, lane, lane_inside, offset, LLAMA)
    else:
        head = (first + row) // INNER % HEADS
        weight = _factor(weight_ptr, y_ptr, head * cols + col, inside, offset, LLAMA)
    bias = _shift(bias_ptr, lane, lane_inside)
    y = _scale(x * rstd, weight, bias, y_ptr, LLAMA)
    tl.store(y_ptr + first * cols + (row * cols + col), y, mask=inside)


@triton.jit
def _add(total, lost, value):
    """Kahan summation: total + value, and what rounding has lost so far. A thread adds up hundreds of values of a wide
    row."""
    value -= lost
    new = total + value
    return new, (new - total) - value


@triton.jit
def _sample_mean(x_ptr, residual_ptr, s_ptr, cols):
    """The mean of 256 values of a row. Sums of differences from it lose no precision where the mean is far from 0, nor,
    since it is a mean of many values, where one value is. A tile of a warp's width is reduced without a barrier."""
    lane = tl.arange(0, 32)
    total = tl.zeros([32], tl.float32)
    for part in tl.static_range(8):
        col = part * (cols // 8) + lane
        x = tl.load(x_ptr + col).to(tl.float32)
        if residual_ptr is not None:
            x = _round(x + tl.load(residual_ptr + col).to(tl.float32), s_ptr)
        total += x
    return tl.sum(total, 0) * (1.0 / 256)


@triton.jit
def _first_sweep(
    x_ptr, residual_ptr, s_ptr, col, inside, key, first, drop_below, keep_scale,
    LANES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """A block of x, or of its sum with the residual, which is also stored. What is read again is loaded with
    evict_last."""
    if residual_ptr is None:
        return tl.load(x_ptr + col, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        x = tl.load(x_ptr + col, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        residual = tl.load(residual_ptr + col, mask=inside, other=0.0, eviction_policy="evict_first")
        if key is not None:
            keep = keep_block(key, first, drop_below, col.shape[0], col.shape[1], LANES, SHORT)
            x = tl.where(keep, x * keep_scale, 0.0)
        s = _round(x + residual.to(tl.float32), s_ptr)
        tl.store(s_ptr + col, s, mask=inside)
        return s


@triton.jit
def norm_fwd_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps, offset,
    CENTER: tl.constexpr, LLAMA: tl.constexpr, EVEN: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
    seed_ptr=None, drop_below=None, keep_scale=None, LANES: tl.constexpr = 1, SHORT: tl.constexpr = True,
    HEADS: tl.constexpr = None, INNER: tl.constexpr = 1, ROUNDED: tl.constexpr = False,
):  # fmt: skip
    """One row per program, read twice in blocks: first the statistics, then y from what the caches still hold of the
    row.

    The second pass goes backwards, to meet the youngest cache lines first. The eviction hints are worth 3 to 8 % (H200,
    bf16, 4,096 to 32,768 columns): the first pass loads with evict_last, the second with evict_first. Wider rows
    outgrow L2: 0.83 of the copy rate at 65,536 columns, 0.71 at 131,072; the Hopper kernels read them once. EVEN: cols
    is a multiple of BLOCK_COLS.
    """
    row = tl.program_id(0).to(tl.int64)
    if HEADS is not None:
        weight_ptr += row // INNER % HEADS * cols
    x_ptr += row * x_stride
    y_ptr += row * cols
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        s_ptr += row * cols
    # 8 values per thread, added up before they are added to the sums: sums as wide as the block would take so many
    # registers that half as many programs run at once
    lane = tl.arange(0, BLOCK_COLS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    whole = tl.full([BLOCK_COLS // 8, 8], True, tl.int1)
    total = tl.zeros([BLOCK_COLS // 8], tl.float32)
    squares = tl.zeros([BLOCK_COLS // 8], tl.float32)
    lost_total = tl.zeros([BLOCK_COLS // 8], tl.float32)
    lost_squares = tl.zeros([BLOCK_COLS // 8], tl.float32)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    pivot = 0.0
    if CENTER:
        pivot = _sample_mean(x_ptr, residual_ptr, s_ptr, cols)
    # Layer norm waits for each load unless it is told to unroll (ptxas does it only to the shorter loop of rms norm):
    # 0.78 -> 0.93 of the copy rate at 16,384 columns. With a residual the registers would cost a program.
    UNROLL: tl.constexpr = 4 if CENTER and residual_ptr is None else 1
    for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        col = start + lane
        inside = whole if EVEN else col < cols
        x = _first_sweep(
            x_ptr, residual_ptr, s_ptr, col, inside, key, row * cols + start, drop_below, keep_scale, LANES, SHORT
        )
        if CENTER:
            x = tl.where(inside, x - pivot, 0.0)
            total, lost_total = _add(total, lost_total, tl.sum(x, 1))
        if ROUNDED:
            x = _round(x, y_ptr)
            squares, lost_squares = _add(squares, lost_squares, tl.sum(_round(x * x, y_ptr), 1))
        else:
            squares, lost_squares = _add(squares, lost_squares, tl.sum(x * x, 1))
    excess = 0.0
    if CENTER:
        excess = _mean(tl.sum(total, 0), cols)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, pivot + excess)
    if ROUNDED:
        rstd = _rounded_rstd(_mean(tl.sum(squares, 0), cols), eps, y_ptr)
    else:
        rstd = tl.rsqrt(tl.maximum(_mean(tl.sum(squares, 0), cols) - excess * excess, 0.0) + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    if residual_ptr is not None:
        tl.debug_barrier()  # the second sweep reads s, which other threads of this program stored
        x_ptr = s_ptr
    last = (tl.cdiv(cols, BLOCK_COLS) - 1) * BLOCK_COLS
    for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        col = last - start + lane
        inside = whole if EVEN else col < cols
        x = tl.load(x_ptr + col, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if ROUNDED:
            x = _round(x, y_ptr)
        xhat = ((x - pivot) - excess) * rstd
        weight = _factor(weight_ptr, y_ptr, col, inside, offset, LLAMA)
        y = _scale(xhat, weight, _shift(bias_ptr, col, inside), y_ptr, LLAMA)
        tl.store(y_ptr + col, y, mask=inside)


@triton.jit
def norm_bwd_rows_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dot_ptr, sum_ptr,
    cols, dy_stride, x_stride, offset,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr = None, INNER: tl.constexpr = 1,
):  # fmt: skip
    """One wide row per program: the means of dxhat · xhat and, for layer norm, of dxhat."""
    row = tl.program_id(0).to(tl.int64)
    if HEADS is not None:
        weight_ptr += row // INNER % HEADS * cols
    x_ptr += row * x_stride
    dy_ptr += row * dy_stride
    lane = tl.arange(0, BLOCK_COLS)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    dot = tl.zeros([BLOCK_COLS], tl.float32)
    total = tl.zeros([BLOCK_COLS], tl.float32)
    for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
        col = start + lane
        inside = col < cols
        x = tl.load(x_ptr + col, mask=inside, other=0.0).to(tl.float32)
        dxhat = tl.load(dy_ptr + col, mask=inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            dxhat *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32) + offset
        dot += dxhat * (x - mean)
        total += dxhat
    tl.store(dot_ptr + row, _mean(tl.sum(dot, 0), cols) * tl.load(rstd_ptr + row))
    if mean_ptr is not None:
        tl.store(sum_ptr + row, _mean(tl.sum(total, 0), cols))


@triton.jit
def norm_bwd_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dot_ptr, sum_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, cols, dy_stride, ds_stride, x_stride, offset,
    EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
    dropped_ptr=None, seed_ptr=None, drop_below=None, keep_scale=None,
    LANES: tl.constexpr = 1, SHORT: tl.constexpr = True,
    HEADS: tl.constexpr = None, INNER: tl.constexpr = 1,
):  # fmt: skip
    """A block of columns per program, which walks over every num_programs(1)-th tile of rows, from the last to the
    first.

    Sums for dweight and dbias stay in registers; each program writes one partial row of them. The loop is
    software-pipelined: later tiles are loaded while this one is worked on. Without dot_ptr a block has whole rows and
    computes their means itself. With it (and sum_ptr for layer norm) they come from a first pass over the rows in
    ascending order, and the descending order here meets what that pass left in L2. EVEN: cols is a multiple of
    BLOCK_COLS. dropped_ptr: a second gradient, that of what was dropped out before the addition: dx where the dropout
    kept an element, scaled. HEADS: program_id(2) is one, whose rows alone a program walks over and sums.
    """
    lane = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    lane_inside = tl.full([BLOCK_COLS], True, tl.int1) if EVEN else lane < cols
    col, col_inside = lane[None, :], lane_inside[None, :]
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    x_at = row * x_stride + col
    dy_at = row * dy_stride + col
    ds_at = row * ds_stride + col
    dx_at = row * cols + col
    # 64 bytes of weight a thread would spill beside the sums at 16,384 columns; there it is read again for each tile
    hold_weight: tl.constexpr = BLOCK_COLS <= 8192
    if HEADS is not None:
        head = tl.program_id(2)
        rows = rows // HEADS
        if weight_ptr is not None:
            weight_ptr += head * cols
    if weight_ptr is not None and hold_weight:
        weight = _load_vector(weight_ptr, lane, lane_inside) + offset
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    tiles = tl.cdiv(rows, BLOCK_ROWS)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    for step in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        first = (tiles - 1 - step).to(tl.int64) * BLOCK_ROWS
        row_inside = first + row < rows
        inside = col_inside if BLOCK_ROWS == 1 else row_inside & col_inside
        if HEADS is None:
            x = tl.load(x_ptr + first * x_stride + x_at, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + first * dy_stride + dy_at, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + first + row, mask=row_inside, other=0.0)
        else:
            at = _row_of_head(first + row, head, HEADS, INNER)
            x = tl.load(x_ptr + (at * x_stride + col), mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + (at * dy_stride + col), mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + at, mask=row_inside, other=0.0)
        if mean_ptr is not None:
            x = tl.where(col_inside, x - tl.load(mean_ptr + first + row, mask=row_inside, other=0.0), 0.0)
        xhat = x * rstd
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None:
            dxhat = dy
            if weight_ptr is not None:
                if not hold_weight:
                    weight = _load_vector(weight_ptr, lane, lane_inside) + offset
                dxhat = dy * weight
            if dot_ptr is not None:
                if HEADS is None:
                    dot = tl.load(dot_ptr + first + row, mask=row_inside, other=0.0)
                else:
                    dot = tl.load(dot_ptr + at, mask=row_inside, other=0.0)
            else:
                dot = _mean(tl.sum(dxhat * xhat, 1, keep_dims=True), cols)
            dx = dxhat - xhat * dot
            if mean_ptr is not None:
                if sum_ptr is not None:
                    dx -= tl.load(sum_ptr + first + row, mask=row_inside, other=0.0)
                else:
                    dx -= _mean(tl.sum(dxhat, 1, keep_dims=True), cols)
            dx *= rstd
            if ds_ptr is not None:
                dx += tl.load(ds_ptr + first * ds_stride + ds_at, mask=inside, other=0.0).to(tl.float32)
            if HEADS is None:
                tl.store(dx_ptr + first * cols + dx_at, dx, mask=inside)
            else:
                tl.store(dx_ptr + (at * cols + col), dx, mask=inside)
            if dropped_ptr is not None:
                if seed_ptr is not None:
                    index = (first + row) * cols + tl.program_id(0) * BLOCK_COLS
                    keep = keep_tile(key, index, drop_below, BLOCK_COLS, LANES, SHORT)
                    dx = keep_or_0(dx * keep_scale, keep, keep_scale)
                tl.store(dropped_ptr + first * cols + dx_at, dx, mask=inside)
    if HEADS is None:
        partial = tl.program_id(1).to(tl.int64) * cols + col
    else:
        partial = (tl.program_id(1).to(tl.int64) * HEADS + head) * cols + col
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0, keep_dims=True), mask=col_inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0, keep_dims=True), mask=col_inside)
