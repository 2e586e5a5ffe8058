"""Softmax and its dropout in Triton: forward and backward, each for rows held in registers and for rows that are read
twice."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.dropout import dropout_flags, kernel_numbers, kernel_seed
from tilesmith.device.rows import empty_rows, row_order, row_steps, rows
from tilesmith.device.triton.dropout import keep_block, keep_or_0, keep_tile
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed, releases

LOG2E = tl.constexpr(1.4426950408889634)
# `_weights` may be off by 2**-24 of the exponent, unseen in 16 bits; not in rows of few columns, of whose dx nothing is
# left but what does not cancel.
LEAST_FUSED = tl.constexpr(64)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# From Triton 3.9 on, LLVM's SLP vectorizer ends the process (signal 11) where a loop adds up both y and y · dy of the
# same groups of columns: the sums of y then take a register for each column of a thread.
APART = tl.constexpr(releases.numbers() >= (3, 9))

# Pointers that are None stand for tensors that a call does not have; Triton compiles a variant without them.
# Outputs are packed: the stride of their rows is `cols`.


@triton.jit
def _end(row, cols, tokens, inner):
    """How many columns a row sees if row t of `tokens` sees the columns up to t + cols - tokens; may be below 1. inner:
    the number of rows between two neighbours in t."""
    return ((row // inner) % tokens).to(tl.int32) + (cols - tokens + 1)


@triton.jit
def _aligned(end):
    """`end` rounded up, so that loads masked by it stay whole vectors. The columns that are loaded in excess are masked
    again."""
    return (end + 15) // 16 * 16


@triton.jit
def _block(BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr):
    """The columns of a block, [BLOCK_COLS // GROUP, GROUP]: a thread adds up each group before adding it to the row's
    sums."""
    return tl.arange(0, BLOCK_COLS // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _loaded(col, cols, end, CAUSAL: tl.constexpr, EVEN: tl.constexpr):
    """Which columns of a block are read. EVEN: cols is a multiple of the block."""
    if CAUSAL:
        return (col < cols) & (col < _aligned(end))
    elif EVEN:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def _load_first(ptr, col, inside):
    """Load a block in the first pass, with evict_last. With `_aligned`, values from `end` on are undefined."""
    return tl.load(ptr + col, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _load_last(ptr, col, inside):
    """Load a block in the second pass, with evict_first: nothing reads it afterwards."""
    return tl.load(ptr + col, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _hide(ptr, lane, cols, end, EVEN: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Store 0 in the fully masked blocks of a row; returns where the last other block starts."""
    shown = tl.cdiv(tl.maximum(end, 0), BLOCK_COLS) * BLOCK_COLS
    for start in tl.range(shown, cols, BLOCK_COLS):
        col = start + lane
        tl.store(ptr + col, tl.zeros(lane.shape, ptr.dtype.element_ty), mask=col < cols if not EVEN else None)
    return shown - BLOCK_COLS


@triton.jit
def _log2_base(top):
    """The base of `_weights`, as its log2: e, unless the products of a vast top would be rounded by more than exp2 can
    hold, or overflow; then they are 2**20 to 2**21. Another number of 16 bits is at least 2**-11 of the top away: its
    weight is 0, whatever the base."""
    exponent = top.to(tl.int32, bitcast=True) & 0x7F800000  # in its place, so that nothing is divided
    return tl.minimum((0x7F000000 - tl.maximum(exponent - (20 << 23), 0)).to(tl.float32, bitcast=True), LOG2E)


@triton.jit
def _weights(x, top, scale, FUSED: tl.constexpr):
    """exp(scale · x - top). FUSED: by one fma, which is off by a factor near 1 that all of a row shares, so that the
    result must be divided by a sum computed in the same way."""
    if FUSED:
        log2_base = _log2_base(top)
        return tl.exp2(x * (scale * log2_base) - top * log2_base)
    else:
        return tl.exp2((x * scale - top) * LOG2E)


@triton.jit
def _softmax_fwd_kernel(
    x_ptr, y_ptr, top_ptr, total_ptr, seed_ptr,
    rows, cols, x_stride, scale, tokens, inner, drop_below, keep_scale,
    CAUSAL: tl.constexpr, POSITIVE: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr,
    SHORT: tl.constexpr, NEAR: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows, read once and held in registers. EVEN: cols == BLOCK_COLS. POSITIVE: scale > 0. NEAR: the
    rows of a tile lie within 2**31 elements of each other."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    if not NEAR:
        row = row.to(tl.int64)
    if EVEN:
        cols = BLOCK_COLS
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = first + row < rows
    if not EVEN:
        inside = inside & (col < cols)
    seen, loaded = inside, inside
    if CAUSAL:
        end = _end(first + row, cols, tokens, inner)
        seen, loaded = inside & (col < end), inside & (col < _aligned(end))
    x = tl.load(x_ptr + first * x_stride + (row * x_stride + col), mask=loaded, other=0.0).to(tl.float32)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    FUSED: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16 and BLOCK_COLS >= LEAST_FUSED
    # with a positive scale the maximum of x is that of scale · x: a product less
    z = x if POSITIVE else x * scale
    if CAUSAL or not EVEN:
        z = tl.where(seen, z, float("-inf"))
    top = tl.max(z, 1, keep_dims=True)
    if POSITIVE:
        top *= scale
        y = _weights(z, top, scale, FUSED)
    else:
        y = tl.exp2((z - top) * LOG2E)
    if CAUSAL:  # a row that sees nothing has top = -inf
        y = tl.where(seen, y, 0.0)
    total = tl.sum(y, 1, keep_dims=True)
    factor = 1.0 / total
    if top_ptr is not None:
        tl.store(top_ptr + first + row, top, mask=first + row < rows)
        tl.store(total_ptr + first + row, total, mask=first + row < rows)
    if seed_ptr is not None:
        keep = keep_tile(key, (first + row) * cols, drop_below, BLOCK_COLS, LANES, SHORT)
        y = keep_or_0(y * (factor * keep_scale), keep, keep_scale)
    else:
        y *= factor
    if CAUSAL:
        y = tl.where(seen, y, 0.0)
    tl.store(y_ptr + first * cols + (row * cols + col), y, mask=inside)


@triton.jit
def _softmax_fwd_wide_kernel(
    x_ptr, y_ptr, top_ptr, total_ptr, seed_ptr,
    rows, cols, x_stride, scale, tokens, inner, drop_below, keep_scale,
    CAUSAL: tl.constexpr, POSITIVE: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """An online softmax: each program takes every num_programs(0)-th row and reads it twice. In the first pass each
    group of columns has a maximum and a sum of its own. The second pass goes backwards, to meet the youngest lines of
    the L1 cache first. The loads are plain, because the asynchronous copies of a pipelined loop bypass L1. Eviction
    hints: as in `norm_fwd_wide_kernel`."""
    lane = _block(BLOCK_COLS, GROUP)
    last = (tl.cdiv(cols, BLOCK_COLS) - 1) * BLOCK_COLS
    key = load_key(seed_ptr) if seed_ptr is not None else None
    # `tops` are then multiples of `step`; not of bf16, whose lowest number, of which masks are made, has no such. What
    # is told below of bf16 was measured when it did so, too: an instruction an element less.
    FUSED: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    step = LOG2E
    if POSITIVE:
        step = scale * LOG2E
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_row = x_ptr + row * x_stride
        end = cols
        if CAUSAL:
            end = tl.minimum(_end(row, cols, tokens, inner), cols)
        tops = tl.full([BLOCK_COLS // GROUP], LOWEST, tl.float32)  # not -inf, from which -inf cannot be subtracted
        totals = tl.zeros([BLOCK_COLS // GROUP], tl.float32)
        for start in tl.range(0, end, BLOCK_COLS):
            col = start + lane
            z = _load_first(x_row, col, _loaded(col, cols, end, CAUSAL, EVEN))
            if not POSITIVE:
                z *= scale
            if CAUSAL or not EVEN:
                z = tl.where(col < end, z, float("-inf"))
            if FUSED:
                risen = tl.maximum(tops, tl.max(z, 1) * step)
                totals = totals * tl.exp2(tops - risen) + tl.sum(tl.exp2(z * step - risen[:, None]), 1)
            else:
                risen = tl.maximum(tops, tl.max(z, 1))
                totals = totals * tl.exp2((tops - risen) * step) + tl.sum(tl.exp2((z - risen[:, None]) * step), 1)
            tops = risen
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp2((tops - top) if FUSED else (tops - top) * step), 0)
        factor = 1.0 / total
        if top_ptr is not None:
            tl.store(top_ptr + row, top * (1.0 / LOG2E) if FUSED else top * scale if POSITIVE else top)
            tl.store(total_ptr + row, total)
        if seed_ptr is not None:
            factor *= keep_scale
        if CAUSAL:
            last = _hide(y_ptr + row * cols, lane, cols, end, EVEN, BLOCK_COLS)
        for start in tl.range(0, last + BLOCK_COLS, BLOCK_COLS):
            col = last - start + lane
            z = _load_last(x_row, col, _loaded(col, cols, end, CAUSAL, EVEN))
            if not POSITIVE:
                z *= scale
            y = tl.exp2(z * step - top if FUSED else (z - top) * step) * factor
            if seed_ptr is not None:
                first = row * cols + last - start
                keep = keep_block(key, first, drop_below, BLOCK_COLS // GROUP, GROUP, LANES, SHORT)
                y = keep_or_0(y, keep, keep_scale)
            if CAUSAL:
                y = tl.where(col < end, y, 0.0)
            tl.store(y_ptr + row * cols + col, y, mask=col < cols if not EVEN else None)


@triton.jit
def _softmax_bwd_kernel(
    dy_ptr, x_ptr, top_ptr, seed_ptr, dx_ptr,
    rows, cols, dy_stride, x_stride, scale, tokens, inner, drop_below, keep_scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr, NEAR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows: dx from dy and y, where x_ptr holds y. With top_ptr it holds x, from which y is computed up
    to the factor that makes its sum 1."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    if not NEAR:
        row = row.to(tl.int64)
    if EVEN:
        cols = BLOCK_COLS
    col = tl.arange(0, BLOCK_COLS)[None, :]
    row_inside = first + row < rows
    inside = row_inside if EVEN else row_inside & (col < cols)
    seen, loaded = inside, inside
    if CAUSAL:
        end = _end(first + row, cols, tokens, inner)
        seen, loaded = inside & (col < end), inside & (col < _aligned(end))
    y = tl.load(x_ptr + first * x_stride + (row * x_stride + col), mask=loaded, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + first * dy_stride + (row * dy_stride + col), mask=loaded, other=0.0).to(tl.float32)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    FUSED: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16 and BLOCK_COLS >= LEAST_FUSED
    if top_ptr is not None:
        y = _weights(y, tl.load(top_ptr + first + row, mask=row_inside, other=0.0), scale, FUSED)
        if not EVEN and not CAUSAL:
            y = tl.where(seen, y, 0.0)
    if seed_ptr is not None:
        keep = keep_tile(key, (first + row) * cols, drop_below, BLOCK_COLS, LANES, SHORT)
        dy = tl.where(keep, dy, 0.0)
        scale *= keep_scale
    if CAUSAL:
        y, dy = tl.where(seen, y, 0.0), tl.where(seen, dy, 0.0)
    # not `/`, whose rounding would be all of dx in a row of one column
    over_total = 1.0 / tl.sum(y, 1, keep_dims=True)
    mean = tl.sum(y * dy, 1, keep_dims=True) * over_total
    factor = scale * over_total if top_ptr is not None else scale
    dx = y * (dy * factor - mean * factor) if FUSED else y * (dy - mean) * factor
    if CAUSAL:  # a row that sees nothing has a sum of 0
        dx = tl.where(seen, dx, 0.0)
    tl.store(dx_ptr + first * cols + (row * cols + col), dx, mask=inside)


@triton.jit
def _softmax_bwd_wide_kernel(
    dy_ptr, x_ptr, top_ptr, seed_ptr, dx_ptr,
    rows, cols, dy_stride, x_stride, scale, tokens, inner, drop_below, keep_scale,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr, BLOCK_COLS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Rows are read twice, as in the forward: first the sums of y and of y · dy, then dx."""
    FUSED: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    lane = _block(BLOCK_COLS, GROUP)
    last = (tl.cdiv(cols, BLOCK_COLS) - 1) * BLOCK_COLS
    key = load_key(seed_ptr) if seed_ptr is not None else None
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_row = x_ptr + row * x_stride
        dy_row = dy_ptr + row * dy_stride
        end = cols
        if CAUSAL:
            end = tl.minimum(_end(row, cols, tokens, inner), cols)
        top = 0.0
        if top_ptr is not None:
            top = tl.load(top_ptr + row)
        dots = tl.zeros([BLOCK_COLS // GROUP], tl.float32)
        sums = tl.zeros([BLOCK_COLS // GROUP, GROUP] if APART else [BLOCK_COLS // GROUP], tl.float32)
        for start in tl.range(0, end, BLOCK_COLS):
            col = start + lane
            inside = _loaded(col, cols, end, CAUSAL, EVEN)
            y = _load_first(x_row, col, inside)
            dy = _load_first(dy_row, col, inside)
            if top_ptr is not None:
                y = _weights(y, top, scale, FUSED)
            if seed_ptr is not None:
                first = row * cols + start
                keep = keep_block(key, first, drop_below, BLOCK_COLS // GROUP, GROUP, LANES, SHORT)
                dy = tl.where(keep, dy, 0.0)
            if CAUSAL:
                dy = tl.where(col < end, dy, 0.0)
            if CAUSAL or (top_ptr is not None and not EVEN):
                y = tl.where(col < end, y, 0.0)
            dots += tl.sum(y * dy, 1)
            sums += y if APART else tl.sum(y, 1)
        over_total = 1.0 / tl.sum(tl.sum(sums, 1) if APART else sums, 0)
        mean = tl.sum(dots, 0) * over_total
        factor = scale
        if top_ptr is not None:
            factor *= over_total
        if seed_ptr is not None:
            factor *= keep_scale
        if CAUSAL:
            last = _hide(dx_ptr + row * cols, lane, cols, end, EVEN, BLOCK_COLS)
        for start in tl.range(0, last + BLOCK_COLS, BLOCK_COLS):
            col = last - start + lane
            inside = _loaded(col, cols, end, CAUSAL, EVEN)
            y = _load_last(x_row, col, inside)
            dy = _load_last(dy_row, col, inside)
            if top_ptr is not None:
                y = _weights(y, top, scale, FUSED)
            if seed_ptr is not None:
                first = row * cols + last - start
                keep = keep_block(key, first, drop_below, BLOCK_COLS // GROUP, GROUP, LANES, SHORT)
                dy = tl.where(keep, dy, 0.0)
            dx = y * (dy * factor - mean * factor) if FUSED else y * (dy - mean) * factor
            if CAUSAL:
                dx = tl.where(col < end, dx, 0.0)
            tl.store(dx_ptr + row * cols + col, dx, mask=col < cols if not EVEN else None)


class SoftmaxConfig(NamedTuple):
    """tile: elements that a program works on at once, in whole rows (at least one). block_cols: 0 holds rows in
    registers (up to MAX_HELD columns), else they are read twice in blocks of so many columns. programs: at most so many
    CTAs for rows that are read twice; 0: one per row. max_registers: per thread; 0 leaves it to the compiler."""

    tile: int
    block_cols: int
    num_warps: int
    programs: int
    max_registers: int = 0


ONLINE, SUMS = "an online softmax", "the sums"
MAX_HELD = 32_768  # columns; compiling wider tiles takes minutes, and they spill


def _block_cols(cols: int, config: SoftmaxConfig) -> int:
    """Columns of a block. As many as a row has, or more: rows are held in registers; fewer: they are read twice."""
    if not config.block_cols or config.block_cols >= cols:
        return next_power_of_2(cols) if cols <= MAX_HELD else 8192
    return config.block_cols


def _tells(first: str, x: Tensor, causal: bool, config: SoftmaxConfig) -> list[str]:
    """How the rows of x are read. first: what is computed of rows that are read twice before the output."""
    cols = x.shape[-1]
    width = _block_cols(cols, config)
    if width >= cols:
        block_rows = max(1, config.tile // width)
        return [f"blocks of {block_rows} x {cols} are held in registers and read once"]
    told = f"rows of {cols} columns are read twice, in blocks of {width}: {first} first, then the output"
    return [told + ("; blocks beyond the diagonal are not read" if causal else "")]


def _launch(
    kernels: tuple[Any, Any], tensors: tuple, numbers: tuple, causal: bool, config: SoftmaxConfig, **flags: bool
) -> None:
    """Launch the kernel for rows held in registers or for rows that are read twice. numbers: rows, cols and what
    follows them in the kernels' signature."""
    count, cols = numbers[:2]
    if not count:
        return
    held, wide = kernels
    width = _block_cols(cols, config)
    flags |= {"CAUSAL": causal, "BLOCK_COLS": width, "num_warps": config.num_warps}
    if config.max_registers:
        flags["maxnreg"] = config.max_registers
    flags |= dropout_flags(count, cols, tensors[0].element_size())
    if width < cols:
        group = min(8, 16 // tensors[0].element_size())
        programs = min(count, config.programs or count)
        launch(wide, (programs,), *tensors, *numbers, EVEN=cols % width == 0, GROUP=group, **flags)
    else:
        block_rows = max(1, config.tile // width)
        reach = max(t.stride(0) for t in tensors[:2] if t.ndim == 2)
        flags |= {"EVEN": width == cols, "NEAR": block_rows * reach < 2**31, "BLOCK_ROWS": block_rows}
        launch(held, (cdiv(count, block_rows),), *tensors, *numbers, **flags)


def _steps(x: Tensor, order: tuple[int, ...] | None, causal: bool) -> tuple[int, int]:
    """(tokens, inner) for `_end`."""
    return row_steps(x, order) if causal else (1, 1)


def _dropout_numbers(p: float) -> tuple[int | None, float | None]:
    return kernel_numbers(p) if p > 0.0 else (None, None)


def _reasons(call: Any) -> list[str]:
    return ["the tensors are float64; these kernels compute in float32"] if call.x.dtype == torch.float64 else []


def _vjp_reasons(call: Any) -> list[str]:
    return ["the tensors are float64; these kernels compute in float32"] if call.y.dtype == torch.float64 else []


def _dims(x: Tensor, causal: bool = False) -> dict[str, int]:
    cols = x.shape[-1]
    return {"rows": x.numel() // cols, "cols": cols, "bytes": x.element_size(), **({"causal": 1} if causal else {})}


def _default(dims: Mapping[str, int], arch: Any, tensors: int) -> SoftmaxConfig:
    """A default without dropout; tensors: how many are read.

    Rows of up to 8,192 columns are held in registers, 16 elements per thread (32 where one wide tensor is read), unless
    a quarter of the lanes would be idle. Wider ones are read twice, in blocks that leave few lanes idle: by CTAs of 512
    threads while a few of their rows fit in L1, by CTAs of 1,024 threads from 64 KiB per row on, and one such CTA per
    SM above 512 KiB, since more rows in flight would not fit in L2.

    Causal rows of up to 16,384 columns are read twice, in blocks of a quarter of the row: blocks beyond the diagonal
    then cost nothing (H200, bf16, 4,096 columns: 429 µs in place of 637). More figures: docs/log/softmax.md.
    """
    lanes, cols, each = max(arch.warp, 16), dims["cols"], min(8, 16 // dims["bytes"])
    width, tile = next_power_of_2(cols), 2048
    if "causal" in dims and 1024 < cols <= 16_384:
        block_cols = max(512, width // 4)
        return SoftmaxConfig(block_cols, block_cols, max(1, block_cols * tensors // (2 * each) // lanes), 0)
    if cols <= 2048 or (cols <= 8192 and 4 * cols > 3 * width):
        while tile > 1024 and dims["rows"] * cols < tile * max(arch.sms, 1):
            tile //= 2
        tile = max(width, tile)
        return SoftmaxConfig(tile, 0, max(1, tile // (32 if tile > 4096 and tensors == 1 else 16) // lanes), 0)
    row = tensors * cols * dims["bytes"]
    if row >= 2**16:
        block_cols = 1024 * each * (4 if row > 2**17 else 2 // tensors)
        return SoftmaxConfig(block_cols, block_cols, 1024 // lanes, arch.sms if row > 2**19 else 0)
    # 32 bytes a thread of one tensor: at 16,384 columns 0.99 of the copy rate, and 0.90 with 16 (H200, bf16)
    if tensors == 1 and -cols % (1024 * each) * 16 <= cols:
        return SoftmaxConfig(1024 * each, 1024 * each, 512 // lanes, 0)
    fits = [b for b in (512 * each, 256 * each, 128 * each) if 2 * b <= cols and -cols % b * 16 <= cols]
    block_cols = fits[0] if fits else 128 * each
    return SoftmaxConfig(block_cols, block_cols, max(1, block_cols // each // lanes), 0)


def _drawing_default(dims: Mapping[str, int], arch: Any, tensors: int) -> SoftmaxConfig:
    """A default with dropout, where generating random bits takes the time: CTAs of few warps, which wait least at their
    own barriers, and 32 elements per thread, which share what is computed from the seed. Causal rows of up to 16,384
    columns are read twice, in blocks of an eighth (H200, bf16, 4,096 columns: 447 µs, in registers 828). More figures:
    docs/log/softmax.md."""
    lanes, cols, each = max(arch.warp, 16), dims["cols"], min(8, 16 // dims["bytes"])
    width = next_power_of_2(cols)
    if "causal" in dims and 1024 < cols <= 16_384:
        block_cols = max(512, width // 8)
        return SoftmaxConfig(block_cols, block_cols, max(1, block_cols // (2 * each) // lanes), 0)
    if cols <= 2048 or (cols <= 8192 and 4 * cols > 3 * width):
        tile, registers = max(width, 1024), 0
        if arch.kind == "cuda" and dims["bytes"] == 2:
            registers = (64 if tile < 8192 else 56) if tensors == 1 else (96 if tile > width else 0)
        return SoftmaxConfig(tile, 0, max(1, tile // 32 // lanes), 0, registers)
    return SoftmaxConfig(512 * each, 512 * each, 256 // lanes, 0)


CHOICES = {
    "tile": (2048, 4096, 8192),
    "block_cols": (0, 2048, 4096, 8192, 16_384, 32_768),
    "num_warps": (4, 8, 16, 32),
    "programs": (0, 132, 264),
}
FORWARD, BACKWARD = (_softmax_fwd_kernel, _softmax_fwd_wide_kernel), (_softmax_bwd_kernel, _softmax_bwd_wide_kernel)


@register_kernel(
    "softmax",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda x, scale, causal, *, config: _tells(ONLINE, x, causal, config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, scale, causal: _dims(x, causal),
        default=lambda dims, arch, dtype: _default(dims, arch, 1),
        choices=CHOICES,
    )
)
def softmax(x: Tensor, scale: float = 1.0, causal: bool = False, *, config: SoftmaxConfig) -> Tensor:
    """y of `softmax`."""
    order = row_order(x)
    y = empty_rows(x, order)
    x2 = rows(x, order)
    numbers = (*x2.shape, x2.stride(0), scale, *_steps(x, order, causal), None, None)
    _launch(FORWARD, (x2, y, None, None, None), numbers, causal, config, POSITIVE=scale > 0.0)
    return y


@register_kernel(
    "softmax_vjp",
    backend="triton",
    rank=20,
    rejects=_vjp_reasons,
    tells=lambda dy, y, scale, causal, *, config: _tells(SUMS, y, causal, config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, y, scale, causal: _dims(y, causal),
        default=lambda dims, arch, dtype: _default(dims, arch, 2),
        choices=CHOICES,
    )
)
def softmax_vjp(dy: Tensor, y: Tensor, scale: float, causal: bool, *, config: SoftmaxConfig) -> Tensor:
    """dx of `softmax`."""
    order = row_order(y)
    dx = empty_rows(y, order)
    dy2, y2 = rows(dy, order), rows(y, order)
    numbers = (*y2.shape, dy2.stride(0), y2.stride(0), scale, *_steps(y, order, causal), None, None)
    _launch(BACKWARD, (dy2, y2, None, None, dx), numbers, causal, config)
    return dx


@register_kernel(
    "softmax_dropout",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda x, seed, p, scale, causal, *, config: _tells(ONLINE, x, causal, config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, seed, p, scale, causal: _dims(x, causal),
        default=lambda dims, arch, dtype: _drawing_default(dims, arch, 1),
        choices=CHOICES,
    )
)
def softmax_dropout(
    x: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
    scale: float = 1.0,
    causal: bool = False,
    *,
    config: SoftmaxConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, top and total of `softmax_dropout`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    top, total = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    x2 = rows(x)
    numbers = (*x2.shape, x2.stride(0), scale, *_steps(x, None, causal), *_dropout_numbers(p))
    _launch(FORWARD, (x2, out, top, total, kernel_seed(seed, p)), numbers, causal, config, POSITIVE=scale > 0.0)
    return out, top, total


@register_kernel(
    "softmax_dropout_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dout, x, seed, top, total, p, scale, causal, *, config: _tells(SUMS, x, causal, config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dout, x, seed, top, total, p, scale, causal: _dims(x, causal),
        default=lambda dims, arch, dtype: _drawing_default(dims, arch, 2),
        choices=CHOICES,
    )
)
def softmax_dropout_vjp(
    dout: Tensor,
    x: Tensor,
    seed: Tensor | None,
    top: Tensor,
    total: Tensor,
    p: float,
    scale: float,
    causal: bool,
    *,
    config: SoftmaxConfig,
) -> Tensor:
    """dx of `softmax_dropout`."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dout2, x2 = rows(dout), rows(x)
    numbers = (*x2.shape, dout2.stride(0), x2.stride(0), scale, *_steps(x, None, causal), *_dropout_numbers(p))
    tensors = (dout2, x2, top.contiguous(), kernel_seed(seed, p), dx)
    _launch(BACKWARD, tensors, numbers, causal, config)
    return dx
