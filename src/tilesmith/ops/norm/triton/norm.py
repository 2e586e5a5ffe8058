"""The norms in Triton: two forward kernels (rows held in registers, or swept twice), a backward, its companions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import dense, empty_row_values, empty_rows, row_order, row_values, rows
from tilesmith.device.triton.column_sums import add_partials, partial_rows
from tilesmith.device.triton.dropout import keep_block, keep_or_0, keep_tile
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel

# Pointers that are None stand for tensors that a call does not have; Triton compiles a variant without them.
# Outputs are packed: the stride of their rows is `cols`. With seed_ptr x is dropped out before the residual is added.


@triton.jit
def _round(value, like_ptr):
    """fp32 `value` as it reads back after a store through `like_ptr`."""
    return value.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _load_vector(ptr, col, inside):
    """weight or bias as a [1, cols] fp32 tile. Loaded in one dim: a tile of one row would get a layout of its own, and
    the rows it meets would be moved through shared memory to match it."""
    return tl.load(ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _mean(total, cols):
    """total / cols; exact for one column, where rstd would multiply the error that Triton's `/` leaves."""
    return total * (1.0 / cols)


@triton.jit
def _factor(weight_ptr, y_ptr, lane, inside, offset, LLAMA: tl.constexpr):
    """weight + offset for a row of lanes, rounded as the reference's casting="llama" does; 1 without a weight."""
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
    """bias as a row; 0 without one."""
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
def _norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps, offset,
    CENTER: tl.constexpr, LLAMA: tl.constexpr, EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    seed_ptr=None, drop_below=None, keep_scale=None, LANES: tl.constexpr = 1, SHORT: tl.constexpr = True,
):  # fmt: skip
    """A tile of whole rows, read once, held in registers. CENTER: layer norm, else RMS. EVEN: cols == BLOCK_COLS."""
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
    rstd = tl.rsqrt(_mean(tl.sum(x * x, 1, keep_dims=True), cols) + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + first + row, rstd, mask=row_inside)
    # only now: asked for before the reductions, they cost the registers of a program (layer norm 8,192 wide: +40 %)
    weight = _factor(weight_ptr, y_ptr, lane, lane_inside, offset, LLAMA)
    bias = _shift(bias_ptr, lane, lane_inside)
    y = _scale(x * rstd, weight, bias, y_ptr, LLAMA)
    tl.store(y_ptr + first * cols + (row * cols + col), y, mask=inside)


@triton.jit
def _add(total, lost, value):
    """total + value and what rounding has lost so far (Kahan): a thread adds up hundreds of values of a wide row."""
    value -= lost
    new = total + value
    return new, (new - total) - value


@triton.jit
def _sample_mean(x_ptr, residual_ptr, s_ptr, cols):
    """The mean of 256 values of a row. Sums of differences from it lose nothing where the mean is far from 0, nor,
    being a mean of many, where one value is. A tile of a warp's width is reduced without a barrier."""
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
    """A block of x, or of the sum with the residual, which is also stored. What is read again asks to stay cached."""
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
def _norm_fwd_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps, offset,
    CENTER: tl.constexpr, LLAMA: tl.constexpr, EVEN: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
    seed_ptr=None, drop_below=None, keep_scale=None, LANES: tl.constexpr = 1, SHORT: tl.constexpr = True,
):  # fmt: skip
    """One row a program, swept twice in blocks: statistics, then y from what the caches still hold of the row.

    The second sweep goes backwards, to meet the youngest lines first. The eviction hints are worth 3-8 % (H200, bf16,
    4,096 to 32,768 columns): the first sweep asks to keep the row, the second to let it go. Beyond that the rows in
    flight outgrow the L2 cache: 0.83 of the copy rate at 65,536 columns, 0.71 at 131,072; hopper.py reads them once.
    EVEN: as below.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        s_ptr += row * cols
    # 8 values a thread, added up before they meet the sums: sums as wide as the block cost layer norm the registers of
    # every other program
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
        squares, lost_squares = _add(squares, lost_squares, tl.sum(x * x, 1))
    excess = 0.0
    if CENTER:
        excess = _mean(tl.sum(total, 0), cols)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, pivot + excess)
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
        xhat = ((x - pivot) - excess) * rstd
        weight = _factor(weight_ptr, y_ptr, col, inside, offset, LLAMA)
        y = _scale(xhat, weight, _shift(bias_ptr, col, inside), y_ptr, LLAMA)
        tl.store(y_ptr + col, y, mask=inside)


@triton.jit
def _norm_bwd_rows_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dot_ptr, sum_ptr,
    cols, dy_stride, x_stride, offset,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One wide row a program: the means of dxhat · xhat and, for layer norm, of dxhat."""
    row = tl.program_id(0).to(tl.int64)
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
def _norm_bwd_kernel(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dot_ptr, sum_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, cols, dy_stride, ds_stride, x_stride, offset,
    EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
    dropped_ptr=None, seed_ptr=None, drop_below=None, keep_scale=None,
    LANES: tl.constexpr = 1, SHORT: tl.constexpr = True,
):  # fmt: skip
    """A block of columns a program; it walks every num_programs(1)-th tile of rows, from the last to the first.

    Sums for dweight and dbias stay in registers; each program writes one partial row of them. The loop is pipelined:
    tiles to come are copied while this one is worked on. Without dot_ptr the block holds whole rows and takes its means
    itself; with it (and sum_ptr for layer norm) they were found by a first pass over the rows in ascending order, so
    the descending order meets what that pass left in the L2 cache. EVEN: cols is a multiple of BLOCK_COLS. dropped_ptr:
    a second gradient, that of what was dropped out before the addition: dx where the dropout kept, scaled.
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
        x = tl.load(x_ptr + first * x_stride + x_at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + first * dy_stride + dy_at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + first + row, mask=row_inside, other=0.0)
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
                dot = tl.load(dot_ptr + first + row, mask=row_inside, other=0.0)
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
            tl.store(dx_ptr + first * cols + dx_at, dx, mask=inside)
            if dropped_ptr is not None:
                if seed_ptr is not None:
                    index = (first + row) * cols + tl.program_id(0) * BLOCK_COLS
                    keep = keep_tile(key, index, drop_below, BLOCK_COLS, LANES, SHORT)
                    dx = keep_or_0(dx * keep_scale, keep, keep_scale)
                tl.store(dropped_ptr + first * cols + dx_at, dx, mask=inside)
    partial = tl.program_id(1).to(tl.int64) * cols + col
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0, keep_dims=True), mask=col_inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0, keep_dims=True), mask=col_inside)


class ForwardConfig(NamedTuple):
    """tile: elements a program works on at once, in whole rows (at least one). block_cols: 0 holds rows in registers
    (up to MAX_HELD columns), else they are swept in blocks of so many columns by `num_stages` deep pipelines."""

    tile: int
    block_cols: int
    num_warps: int
    num_stages: int


class BackwardConfig(NamedTuple):
    """As ForwardConfig, where `tile` also counts the elements of a block of a wide row; programs: how many at most.
    max_registers: of a thread, so that `programs` are resident at once; 0 leaves it to the compiler."""

    tile: int
    block_cols: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int


MAX_HELD = 32_768  # columns; registers spill before that, and compiling wider tiles takes minutes
SWEEP = 4_096  # columns of a block of the pass that finds the means of wide rows, by 8 warps of 32 lanes


def _blocks(cols: int, config: ForwardConfig | BackwardConfig) -> tuple[int, int]:
    """(block_rows, block_cols); block_cols < cols: the wide kernels."""
    width = config.block_cols
    if not width or width >= cols:
        width = next_power_of_2(cols) if cols <= MAX_HELD else 8192
    return max(1, config.tile // width), width


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    center: bool,
    llama: bool,
    config: ForwardConfig,
    statistics: bool = True,
    **dropout: Any,
) -> tuple[Tensor | None, ...]:
    """(y, s, mean, rstd); s is None without a residual, mean is None unless `center`, both are without `statistics`:
    stored, they take 3 % of the time at 64 columns. dropout: its kernel arguments."""
    order = row_order(x)
    y = empty_rows(x, order)
    s = None if residual is None else empty_rows(x, order, residual.dtype)
    mean = empty_row_values(x, order, torch.float32) if center and statistics else None
    rstd = empty_row_values(x, order, torch.float32) if statistics else None
    x2, residual2 = rows(x, order), None if residual is None else rows(residual, order)
    count, cols = x2.shape
    block_rows, block_cols = _blocks(cols, config)
    if count:
        tensors = (x2, residual2, dense(weight), dense(bias), y, s, mean, rstd)
        numbers = (count, cols, x2.stride(0), 0 if residual2 is None else residual2.stride(0), eps, offset)
        flags = {"CENTER": center, "LLAMA": llama, "EVEN": cols % block_cols == 0, "BLOCK_COLS": block_cols}
        flags |= {"num_warps": config.num_warps, **dropout}
        if block_cols < cols:
            launch(_norm_fwd_wide_kernel, (count,), *tensors, *numbers, STAGES=config.num_stages, **flags)
        else:
            launch(_norm_fwd_kernel, (cdiv(count, block_rows),), *tensors, *numbers, BLOCK_ROWS=block_rows, **flags)
    return y, s, mean, rstd


def _backward(
    dy: Tensor | None,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
    config: BackwardConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each empty where `output_mask` says it is not needed. With mean: of layer norm."""
    order = row_order(x)
    dx = empty_rows(x, order) if output_mask[0] else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if output_mask[1] else None
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if output_mask[2] else None
    if dy is None:
        for sums in (dweight, dbias):
            if sums is not None:
                sums.zero_()
        if dx is not None:
            dx.zero_() if ds is None else dx.copy_(ds)
    else:
        _launch_backward(dy, ds, x, weight, mean, rstd, offset, dx, dweight, dbias, order, config)
    return tuple(x.new_empty(0) if t is None else t for t in (dx, dweight, dbias))


def _launch_backward(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    order: tuple[int, ...] | None,
    config: BackwardConfig,
    **dropout: Any,
) -> None:
    x, dy = rows(x, order), rows(dy, order)
    ds = None if ds is None or dx is None else rows(ds, order)
    weight, rstd = dense(weight), row_values(rstd, order)
    mean = None if mean is None else row_values(mean, order)
    count, cols = x.shape
    block_rows, block_cols = _blocks(cols, config)
    dot = total = None
    if block_cols < cols and dx is not None and count:
        dot = x.new_empty(count, dtype=torch.float32)
        total = None if mean is None else torch.empty_like(dot)
        launch(
            _norm_bwd_rows_kernel, (count,), dy, x, weight, mean, rstd, dot, total,
            cols, dy.stride(0), x.stride(0), offset, BLOCK_COLS=SWEEP, STAGES=config.num_stages, num_warps=8,
        )  # fmt: skip
    blocks = cdiv(cols, block_cols)
    # 4 rows each at least, so that partial sums stay a small part of the traffic
    partials = partial_rows(cdiv(count, block_rows), blocks, config.programs, cdiv(4, block_rows))
    sums = [None if t is None else t.new_empty(partials, cols, dtype=torch.float32) for t in (dweight, dbias)]
    if count and (dx is not None or dweight is not None or dbias is not None):
        launch(
            _norm_bwd_kernel, (blocks, partials), dy, ds, x, weight, mean, rstd, dot, total, dx, *sums,
            count, cols, dy.stride(0), 0 if ds is None else ds.stride(0), x.stride(0), offset,
            EVEN=cols % block_cols == 0, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, STAGES=config.num_stages,
            num_warps=config.num_warps, **({"maxnreg": config.max_registers} if config.max_registers else {}),
            # a product fused into the difference it enters is not what its mean was taken of: with one column or few,
            # where the gradient is 0 or nearly, rstd multiplies what is left of it
            enable_fp_fusion=mean is None or cols >= 64, **dropout,
        )  # fmt: skip
    add_partials(tuple(sums), (dweight, dbias))


def _reasons(call: Any) -> list[str]:
    return [
        f"{name} has dtype {facts.dtype}; these kernels serve float16, bfloat16 and float32"
        for name, facts in call._asdict().items()
        if getattr(facts, "dtype", None) not in (None, torch.float16, torch.bfloat16, torch.float32)
    ]


def _dims(like: Tensor, *read: Tensor | None) -> dict[str, int]:
    """rows and cols of `like`, and bytes: how many each column needs of the tensors read."""
    cols = like.shape[-1]
    return {
        "rows": like.numel() // cols,
        "cols": cols,
        "bytes": sum(t.element_size() for t in read if t is not None),
    }


def _stages(tile: int, dims: Mapping[str, int], arch: Any, per_sm: int, most: int) -> int:
    """Stages whose buffers (one fewer than stages) fit shared memory beside what reductions need. On AMD's GPUs, where
    tiles to come wait in registers, two."""
    if arch.kind == "hip":
        return 2
    return max(1, min(most, 1 + (arch.shared_memory // per_sm - 12_288) // (tile * dims["bytes"])))


def _narrowed(tile: int, dims: Mapping[str, int], programs: int) -> int:
    """`tile`, halved while it leaves programs without work."""
    while tile > 1024 and dims["rows"] * dims["cols"] < tile * programs:
        tile //= 2
    return tile


def _forward_default(
    dims: Mapping[str, int], arch: Any, swept_from: int, most_idle: float = 1.0, each: int = 16
) -> ForwardConfig:
    """16 elements a thread (`each` up to 1,024 columns), 32 of wide rows, whole rows in registers: 0.96 to 0.99 of the
    copy rate (H200, bf16, 256 MB). Rows of `swept_from` columns, and those that leave more than `most_idle` of the
    lanes idle, are swept twice, 8 elements a thread, in blocks that leave few lanes idle: rms norm then reaches 0.98 to
    1.00 up to 32,768 columns."""
    lanes, cols = max(arch.warp, 16), dims["cols"]
    width = next_power_of_2(cols)
    if cols <= 2048 or (cols < swept_from and cols >= (1 - most_idle) * width):
        tile = max(width, _narrowed(2048, dims, max(arch.sms, 1)))
        each = each if cols <= 1024 else 16 if tile <= 4096 else 32
        return ForwardConfig(tile, 0, max(1, tile // each // lanes), 1)
    widest = min(8192 if cols > 16_384 else 4096, cols // 2)
    fits = [b for b in (8192, 4096, 2048) if b <= widest and -cols % b * 16 <= cols]
    block_cols = fits[0] if fits else 1024
    return ForwardConfig(block_cols, block_cols, block_cols // 8 // lanes, 1)


def _backward_default(dims: Mapping[str, int], arch: Any, center: bool, three: bool = False) -> BackwardConfig:
    """16 elements a thread: the sums, a tile of x and one of dy then stay in registers without spilling (ptxas, sm_90,
    16-bit inputs), up to 8,192 columns for the two sums of layer norm and 16,384 for the one of RMS norm.

    three: tensors are read, of which tiles of 8 elements a thread keep more on their way. H200, bf16, of the copy rate
    at 1,024, 2,048 and 4,096 columns, before: with a residual layer norm 0.98 (0.96), 0.99 (0.98), 1.00 (0.97), after
    dropout 0.92 (0.76), 0.94 (0.80), 0.90 (0.90). RMS norm gains from it to 1,024 columns, 0.99 (0.96) there, layer
    norm loses: alone it takes tiles of half the size by half as many warps, at 512, 1,024 and 2,048 columns 0.90
    (0.87), 0.94 (0.90) and 0.93 (0.93).
    """
    lanes, sms, small = max(arch.warp, 16), max(arch.sms, 1), False
    halved = False
    if dims["cols"] > (8192 if center else 16_384):
        tile, block_cols = 4096, 1024
    else:
        width, block_cols = next_power_of_2(dims["cols"]), 0
        small = three or (not center and width <= 1024)
        halved = center and not three and width <= 2048 and dims["cols"] % 16 == 0
        # columns that no vector load divides need more registers for addresses
        most = 2048 if halved or dims["cols"] % 16 else 4096
        tile = max(width, 1024 if small else _narrowed(most, dims, 2 * sms))
    threads = max(min(512 if three and not block_cols else 256, tile // 8), tile // 16)
    if halved and tile == 2048:
        threads = 128
    per_sm = max(1, 512 // threads)
    return BackwardConfig(
        tile=tile,
        block_cols=block_cols,
        num_warps=max(1, threads // lanes),
        num_stages=_stages(tile, dims, arch, per_sm, 4 if small or per_sm == 1 else 3),
        programs=per_sm * sms,
        max_registers=min(255, arch.registers // (threads * per_sm)) if arch.kind == "cuda" else 0,
    )


FORWARD_CHOICES = {
    "tile": (2048, 4096, 8192),
    "block_cols": (0, 1024, 2048, 4096, 8192),
    "num_warps": (4, 8, 16, 32),
    "num_stages": (1, 2),
}
BACKWARD_CHOICES = {
    "tile": (2048, 4096, 8192),
    "block_cols": (0, 512, 1024),
    "num_warps": (4, 8, 16, 32),
    "num_stages": (2, 3, 4),
    "programs": (132, 264, 396, 528),
    "max_registers": (0,),
}


@register_kernel("rms_norm", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, eps, offset, casting: _dims(x, x, weight),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, swept_from=4096),
        choices=FORWARD_CHOICES,
    )
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    *,
    config: ForwardConfig,
    hidden: bool = True,
) -> tuple[Tensor, Tensor]:
    """y and rstd of `rms_norm`."""
    y, _, _, rstd = _forward(x, None, weight, None, eps, offset, False, casting == "llama", config, hidden)
    return y, rstd


@register_kernel("rms_norm_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, rstd, offset, output_mask: _dims(x, dy, x, weight),
        default=lambda dims, arch, dtype: _backward_default(dims, arch, center=False),
        choices=BACKWARD_CHOICES,
    )
)
def rms_norm_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
    *,
    config: BackwardConfig,
) -> tuple[Tensor, Tensor]:
    """dx and dweight of `rms_norm`."""
    mask = (*output_mask, False)
    return _backward(dy, None, x, weight, None, None, rstd, offset, mask, config)[:2]


@register_kernel("layer_norm", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: _dims(x, x, weight, bias),
        # fewer warps, which wait for each other twice: 128 columns 131 us (16 elements a thread: 136), 512 67 (70); not
        # at 2,048, 67.5 (65.9)
        default=lambda dims, arch, dtype: _forward_default(dims, arch, swept_from=16_384, most_idle=0.25, each=32),
        choices=FORWARD_CHOICES,
    )
)
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    config: ForwardConfig,
    hidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    y, _, mean, rstd = _forward(x, None, weight, bias, eps, 0.0, True, False, config, hidden)
    return y, mean, rstd


@register_kernel("layer_norm_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, bias, mean, rstd, output_mask: _dims(x, dy, x, weight),
        default=lambda dims, arch, dtype: _backward_default(dims, arch, center=True),
        choices=BACKWARD_CHOICES,
    )
)
def layer_norm_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *,
    config: BackwardConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of `layer_norm`."""
    return _backward(dy, None, x, weight, bias, mean, rstd, 0.0, output_mask, config)


@register_kernel("add_rms_norm", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, eps, offset, casting: _dims(x, x, residual, weight),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, swept_from=MAX_HELD),
        choices=FORWARD_CHOICES,
    )
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    *,
    config: ForwardConfig,
    hidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and rstd of `add_rms_norm`."""
    y, s, _, rstd = _forward(x, residual, weight, None, eps, offset, False, casting == "llama", config, hidden)
    return y, s, rstd


@register_kernel("add_rms_norm_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, rstd, offset, output_mask: _dims(s, dy, ds, s, weight),
        default=lambda dims, arch, dtype: _backward_default(dims, arch, center=False, three=True),
        choices=BACKWARD_CHOICES,
    )
)
def add_rms_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
    *,
    config: BackwardConfig,
) -> tuple[Tensor, Tensor]:
    """dresidual and dweight of `add_rms_norm`."""
    mask = (*output_mask, False)
    return _backward(dy, ds, s, weight, None, None, rstd, offset, mask, config)[:2]


@register_kernel("add_layer_norm", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, eps: _dims(x, x, residual, weight, bias),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, swept_from=MAX_HELD),
        choices=FORWARD_CHOICES,
    )
)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    config: ForwardConfig,
    hidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `add_layer_norm`."""
    return _forward(x, residual, weight, bias, eps, 0.0, True, False, config, hidden)


@register_kernel("add_layer_norm_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, mean, rstd, output_mask: _dims(s, dy, ds, s, weight),
        default=lambda dims, arch, dtype: _backward_default(dims, arch, center=True, three=True),
        choices=BACKWARD_CHOICES,
    )
)
def add_layer_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *,
    config: BackwardConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dresidual, dweight and dbias of `add_layer_norm`."""
    return _backward(dy, ds, s, weight, bias, mean, rstd, 0.0, output_mask, config)
