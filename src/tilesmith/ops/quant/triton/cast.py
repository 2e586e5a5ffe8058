"""Casts in Triton: tiles in both layouts, rows, blocks of 128, and the largest element."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.device.triton.rounding import (
    factor_of,
    factors_of_rows,
    larger_pair,
    largest_of,
    largest_pair,
    load_factor,
    magnitude,
    pair8,
    pair_without_infinity,
    raise_to,
    round8,
    scaled,
    seen_at,
    store_turned,
    unpack_pair,
    widened,
    without_infinity,
    word8,
    word_of,
)
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.quant.op import blocks_like, like8, rounded_up
from tilesmith.ops.quant.reference import BLOCK, FORMATS, given


@triton.jit
def _amax_kernel(
    x_ptr, second_ptr, third_ptr, like_ptr, amax_ptr, elements, second_elements, third_elements,
    PAIRS: tl.constexpr, PACKED: tl.constexpr, LOADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The largest |x| of every num_programs-th block of up to three tensors; None for one that is not there.

    PAIRS: elements are words of two 16-bit numbers of like_ptr's type, whose magnitudes stay so. A block is read by
    LOADS loads, all of which a thread asks for before it needs the first.
    """
    seen = seen_at(amax_ptr)
    program, programs = tl.program_id(0), tl.num_programs(0)
    top = tl.zeros([1, BLOCK_SIZE // LOADS], tl.int32)
    top = larger_in(x_ptr, elements, program, programs, top, PAIRS, PACKED, LOADS, BLOCK_SIZE)
    # programs go on in turn where the tensor before ended, so that none gets a block more of each
    if second_ptr is not None:
        before = tl.cdiv(elements, BLOCK_SIZE)
        begin = (program + programs - before % programs) % programs
        top = larger_in(second_ptr, second_elements, begin, programs, top, PAIRS, PACKED, LOADS, BLOCK_SIZE)
        if third_ptr is not None:
            before += tl.cdiv(second_elements, BLOCK_SIZE)
            begin = (program + programs - before % programs) % programs
            top = larger_in(third_ptr, third_elements, begin, programs, top, PAIRS, PACKED, LOADS, BLOCK_SIZE)
    raise_to(amax_ptr, largest_bits(top, like_ptr, PAIRS), seen)


@triton.jit
def larger_in(
    x_ptr, elements, begin, programs, top, PAIRS: tl.constexpr, PACKED: tl.constexpr, LOADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The larger of top [1, BLOCK_SIZE // LOADS] and of the |x| in every programs-th block from block `begin` on."""
    part: tl.constexpr = BLOCK_SIZE // LOADS
    step = tl.cast(programs, tl.int64) * BLOCK_SIZE
    for first in range(begin.to(tl.int64) * BLOCK_SIZE, elements, step):
        at = first + tl.arange(0, LOADS)[:, None] * part + tl.arange(0, part)[None, :]
        x = tl.load(x_ptr + at, mask=at < elements, other=0)
        if PAIRS:
            top = larger_pair(top, largest_pair(x & 0x7FFF7FFF, 0, PACKED), PACKED)
        else:
            top = tl.maximum(top, tl.max(magnitude(x), 0, keep_dims=True))
    return top


@triton.jit
def largest_bits(top, like_ptr, PAIRS: tl.constexpr):
    """The `magnitude` of the largest of what `larger_in` found."""
    if PAIRS:
        low, high = unpack_pair(top, like_ptr)
        top = tl.maximum(magnitude(low), magnitude(high))
    return tl.max(tl.max(top, 1), 0)


@triton.jit
def _cast_kernel(
    x_ptr, bound_ptr, amax_ptr, x8_ptr, factor_ptr, num_rows, num_cols, x_row,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile a program, by the factor of *bound_ptr. x8_ptr: None where only the factor and *amax_ptr are wanted."""
    blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (program % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < num_rows) & (col < num_cols)
    x = widened(tl.load(x_ptr + row * x_row + col, mask=inside, other=0.0), SATURATES)
    factor, inverse = load_factor(bound_ptr, E5M2)
    seen = seen_at(amax_ptr)
    if program == 0:
        tl.store(factor_ptr, factor)
    if x8_ptr is not None:
        tl.store(x8_ptr + row * num_cols + col, round8(x, inverse, x8_ptr, E5M2, SATURATES), mask=inside)
    raise_to(amax_ptr, tl.max(tl.max(magnitude(x), 1), 0), seen)


@triton.jit
def tile_of(room, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BANDS: tl.constexpr):
    """(row, column) of the program's tile among tiles, see `tile_among`."""
    return tile_among(tl.program_id(0), tl.cdiv(room, BLOCK_ROWS), tl.cdiv(num_cols, BLOCK_COLS), BANDS)


@triton.jit
def tile_among(program, tall, wide, BANDS: tl.constexpr):
    """(row, column) of a program's tile among tall x wide tiles. BANDS rows of tiles are gone through together, column
    by column, so that programs of one time write neighbours of a transposed tensor."""
    first = program // (BANDS * wide) * BANDS
    height = tl.maximum(tl.minimum(tall - first, BANDS), 1)  # of nothing, too
    place = program - first * wide
    return (first + place % height).to(tl.int64), (place // height).to(tl.int64)


@triton.jit
def _cast_turned_kernel(
    x_ptr, bound_ptr, amax_ptr, x8_ptr, like_ptr, words_ptr, factor_ptr, num_rows, num_cols, x_row, room,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    BANDS: tl.constexpr,
):  # fmt: skip
    """A tile a program, transposed to words_ptr and, unless that is None, as it is to x8_ptr. like_ptr: the
    format."""
    block_row, block_col = tile_of(room, num_cols, BLOCK_ROWS, BLOCK_COLS, BANDS)
    quad = block_row * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = block_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside, row = col < num_cols, 4 * quad
    x0, x1, x2, x3 = load_rows(x_ptr + row * x_row + col, x_row, row, num_rows, inside)
    factor, inverse = load_factor(bound_ptr, E5M2)
    seen = seen_at(amax_ptr)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr, factor)
    top = magnitude(largest_of(x0, x1, x2, x3, SATURATES))
    y0, y1, y2, y3 = scaled_rows(x0, x1, x2, x3, inverse, E5M2, SATURATES)
    if x8_ptr is not None:
        store_rows(x8_ptr + row * num_cols + col, y0, y1, y2, y3, inside, row, num_rows, num_cols)
    store_turned(words_ptr, word8(y0, y1, y2, y3, like_ptr, E5M2, SATURATES), quad, col, room, num_cols)
    raise_to(amax_ptr, tl.max(tl.max(top, 1), 0), seen)


@triton.jit
def load_rows(at, stride, row, num_rows, inside):
    """Four tiles that hold every fourth row; `at` points to the first's."""
    x0 = tl.load(at, mask=inside & (row < num_rows), other=0.0)
    x1 = tl.load(at + stride, mask=inside & (row + 1 < num_rows), other=0.0)
    x2 = tl.load(at + 2 * stride, mask=inside & (row + 2 < num_rows), other=0.0)
    x3 = tl.load(at + 3 * stride, mask=inside & (row + 3 < num_rows), other=0.0)
    return x0, x1, x2, x3


@triton.jit
def scaled_rows(x0, x1, x2, x3, inverse, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """Four tiles `scaled`."""
    x0, x1 = without_infinity(x0, SATURATES), without_infinity(x1, SATURATES)
    x2, x3 = without_infinity(x2, SATURATES), without_infinity(x3, SATURATES)
    x0, x1 = scaled(x0, inverse, E5M2, SATURATES, True), scaled(x1, inverse, E5M2, SATURATES, True)
    x2, x3 = scaled(x2, inverse, E5M2, SATURATES, True), scaled(x3, inverse, E5M2, SATURATES, True)
    return x0, x1, x2, x3


@triton.jit
def store_rows(at, y0, y1, y2, y3, inside, row, num_rows, stride):
    """Convert and write four tiles that hold every fourth row, at the pointers of the first."""
    to = at.dtype.element_ty
    tl.store(at, y0.to(to), mask=inside & (row < num_rows))
    tl.store(at + stride, y1.to(to), mask=inside & (row + 1 < num_rows))
    tl.store(at + 2 * stride, y2.to(to), mask=inside & (row + 2 < num_rows))
    tl.store(at + 3 * stride, y3.to(to), mask=inside & (row + 3 < num_rows))


@triton.jit
def _transpose_kernel(
    x8_ptr, words_ptr, num_rows, num_cols, x_row, room, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    BANDS: tl.constexpr,
):  # fmt: skip
    """A tile a program, of numbers in 8 bits taken as integers."""
    block_row, block_col = tile_of(room, num_cols, BLOCK_ROWS, BLOCK_COLS, BANDS)
    quad = block_row * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = block_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside, row = col < num_cols, 4 * quad
    x0, x1, x2, x3 = load_rows(x8_ptr + row * x_row + col, x_row, row, num_rows, inside)
    store_turned(words_ptr, word_of(x0, x1, x2, x3), quad, col, room, num_cols)


@triton.jit
def _cast_rows_kernel(
    x_ptr, x8_ptr, factor_ptr, num_rows, num_cols, x_row,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Whole rows a program: HELD in registers, else read twice, the second time from what the caches kept."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    if HELD:
        inside = (row < num_rows) & (lane < num_cols)
        x = widened(tl.load(x_ptr + row * x_row + lane, mask=inside, other=0.0), SATURATES)
        factor, inverse = factors_of_rows(magnitude(x), E5M2)
        tl.store(x8_ptr + row * num_cols + lane, round8(x, inverse, x8_ptr, E5M2, SATURATES), mask=inside)
    else:
        top = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.int32)
        for first in range(0, num_cols, BLOCK_COLS):
            inside = (row < num_rows) & (first + lane < num_cols)
            x = tl.load(x_ptr + row * x_row + first + lane, mask=inside, other=0.0, eviction_policy="evict_last")
            top = tl.maximum(top, magnitude(widened(x, SATURATES)))
        factor, inverse = factors_of_rows(top, E5M2)
        for first in range(0, num_cols, BLOCK_COLS):
            inside = (row < num_rows) & (first + lane < num_cols)
            x = tl.load(x_ptr + row * x_row + first + lane, mask=inside, other=0.0, eviction_policy="evict_first")
            x8 = round8(x, inverse, x8_ptr, E5M2, SATURATES)
            tl.store(x8_ptr + row * num_cols + first + lane, x8, mask=inside)
    tl.store(factor_ptr + row, factor, mask=row < num_rows)


@triton.jit
def _cast_blocks_kernel(
    x_ptr, x8_ptr, factor_ptr, words_ptr, factor_t_ptr, like_ptr, num_rows, num_cols, x_row, x_col, room,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, SQUARE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BANDS: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_SIZE x BLOCK_SIZE a program: factors along its rows, its columns, or one for all of it.

    x8_ptr, words_ptr: None for a layout that is not wanted. like_ptr: the format.
    """
    blocks = tl.cdiv(num_cols, BLOCK_SIZE)
    block_row, block_col = tile_of(room, num_cols, BLOCK_SIZE, BLOCK_SIZE, BANDS)
    quad = block_row * (BLOCK_SIZE // 4) + tl.arange(0, BLOCK_SIZE // 4)[:, None]
    col = block_col * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    inside, row = col < num_cols, 4 * quad
    x0, x1, x2, x3 = load_rows(x_ptr + row * x_row + col * x_col, x_row, row, num_rows, inside)
    if SQUARE:
        top = tl.max(tl.max(magnitude(largest_of(x0, x1, x2, x3, SATURATES)), 1), 0)
        factor, inverse = factor_of(top.to(tl.float32, bitcast=True), E5M2)
        y0, y1, y2, y3 = scaled_rows(x0, x1, x2, x3, inverse, E5M2, SATURATES)
        if x8_ptr is not None:
            store_rows(x8_ptr + row * num_cols + col, y0, y1, y2, y3, inside, row, num_rows, num_cols)
            tl.store(factor_ptr + block_row * blocks + block_col, factor)
        if words_ptr is not None:
            store_turned(words_ptr, word8(y0, y1, y2, y3, like_ptr, E5M2, SATURATES), quad, col, room, num_cols)
            tl.store(factor_t_ptr + block_col * tl.cdiv(room, BLOCK_SIZE) + block_row, factor)
    else:
        if x8_ptr is not None:
            factor0, inverse0 = _row_factor(x0, E5M2)
            factor1, inverse1 = _row_factor(x1, E5M2)
            factor2, inverse2 = _row_factor(x2, E5M2)
            factor3, inverse3 = _row_factor(x3, E5M2)
            y0, y1 = scaled(x0, inverse0, E5M2, SATURATES), scaled(x1, inverse1, E5M2, SATURATES)
            y2, y3 = scaled(x2, inverse2, E5M2, SATURATES), scaled(x3, inverse3, E5M2, SATURATES)
            store_rows(x8_ptr + row * num_cols + col, y0, y1, y2, y3, inside, row, num_rows, num_cols)
            factors = factor_ptr + block_col * num_rows
            store_rows(factors + row, factor0, factor1, factor2, factor3, True, row, num_rows, 1)
        if words_ptr is not None:
            top = tl.max(magnitude(largest_of(x0, x1, x2, x3, SATURATES)), 0, keep_dims=True)
            factor, inverse = factor_of(top.to(tl.float32, bitcast=True), E5M2)
            y0, y1, y2, y3 = scaled_rows(x0, x1, x2, x3, inverse, E5M2, SATURATES)
            store_turned(words_ptr, word8(y0, y1, y2, y3, like_ptr, E5M2, SATURATES), quad, col, room, num_cols)
            tl.store(factor_t_ptr + block_row * num_cols + col, factor, mask=inside)


@triton.jit
def _row_factor(x, E5M2: tl.constexpr):
    """`factor_of` the largest |x| of each row."""
    return factor_of(tl.max(magnitude(x), 1, keep_dims=True).to(tl.float32, bitcast=True), E5M2)


@triton.jit
def _cast_blocks_pairs_kernel(
    words16_ptr, x8_pairs_ptr, factor_ptr, words_ptr, factor_t_ptr, like_x_ptr, like_ptr, num_rows, num_pairs, x_row,
    room, E5M2: tl.constexpr, SATURATES: tl.constexpr, PACKED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BANDS: tl.constexpr,
):  # fmt: skip
    """`_cast_blocks_kernel` for factors along rows and columns, of 16-bit numbers taken as words of two columns.

    A word is one register and, with PACKED, one maximum until it is cast. like_x_ptr: the numbers' type.
    """
    block_row, block_col = tile_of(room, num_pairs, BLOCK_SIZE, BLOCK_SIZE // 2, BANDS)
    quad = block_row * (BLOCK_SIZE // 4) + tl.arange(0, BLOCK_SIZE // 4)[:, None]
    pair = block_col * (BLOCK_SIZE // 2) + tl.arange(0, BLOCK_SIZE // 2)[None, :]
    inside, row = pair < num_pairs, 4 * quad
    w0, w1, w2, w3 = load_rows(words16_ptr + row * x_row + pair, x_row, row, num_rows, inside)
    w0, w1 = pair_without_infinity(w0, like_x_ptr, SATURATES), pair_without_infinity(w1, like_x_ptr, SATURATES)
    w2, w3 = pair_without_infinity(w2, like_x_ptr, SATURATES), pair_without_infinity(w3, like_x_ptr, SATURATES)
    m0, m1, m2, m3 = w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF, w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF
    if x8_pairs_ptr is not None:
        factor0, y0 = _row_of_pairs(w0, m0, like_x_ptr, like_ptr, E5M2, SATURATES, PACKED)
        factor1, y1 = _row_of_pairs(w1, m1, like_x_ptr, like_ptr, E5M2, SATURATES, PACKED)
        factor2, y2 = _row_of_pairs(w2, m2, like_x_ptr, like_ptr, E5M2, SATURATES, PACKED)
        factor3, y3 = _row_of_pairs(w3, m3, like_x_ptr, like_ptr, E5M2, SATURATES, PACKED)
        store_rows(x8_pairs_ptr + row * num_pairs + pair, y0, y1, y2, y3, inside, row, num_rows, num_pairs)
        # as one store: each moves its factors through shared memory, between two barriers
        factors = tl.join(tl.join(factor0, factor2), tl.join(factor1, factor3)).reshape(BLOCK_SIZE // 4, 4)
        rows = row + tl.arange(0, 4)[None, :]
        tl.store(factor_ptr + block_col * num_rows + rows, factors, mask=rows < num_rows)
    if words_ptr is not None:
        top = larger_pair(larger_pair(m0, m1, PACKED), larger_pair(m2, m3, PACKED), PACKED)
        low, high = unpack_pair(largest_pair(top, 0, PACKED), like_x_ptr)
        factor_low, low = factor_of(low, E5M2)
        factor_high, high = factor_of(high, E5M2)
        a0, b0 = _scaled_pair(w0, low, high, like_x_ptr, E5M2, SATURATES)
        a1, b1 = _scaled_pair(w1, low, high, like_x_ptr, E5M2, SATURATES)
        a2, b2 = _scaled_pair(w2, low, high, like_x_ptr, E5M2, SATURATES)
        a3, b3 = _scaled_pair(w3, low, high, like_x_ptr, E5M2, SATURATES)
        a = word8(a0, a1, a2, a3, like_ptr, E5M2, SATURATES)
        b = word8(b0, b1, b2, b3, like_ptr, E5M2, SATURATES)
        col = block_col * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
        word = tl.join(a, b).reshape(BLOCK_SIZE // 4, BLOCK_SIZE)
        store_turned(words_ptr, word, quad, col, room, 2 * num_pairs)
        factor = tl.join(factor_low, factor_high).reshape(1, BLOCK_SIZE)
        tl.store(factor_t_ptr + block_row * (2 * num_pairs) + col, factor, mask=col < 2 * num_pairs)


@triton.jit
def _scaled_pair(word, low, high, like_x_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """The numbers of a word times low and high, see `scaled`."""
    a, b = unpack_pair(word, like_x_ptr)
    return scaled(a, low, E5M2, SATURATES, True), scaled(b, high, E5M2, SATURATES, True)


@triton.jit
def _row_of_pairs(word, size, like_x_ptr, like_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr, PACKED: tl.constexpr):
    """(factors [rows, 1], numbers) of rows of pairs, cast by the factors of their largest. size: the words' |x|."""
    low, high = unpack_pair(largest_pair(size, 1, PACKED), like_x_ptr)
    top = tl.maximum(magnitude(low), magnitude(high))
    factor, inverse = factor_of(top.to(tl.float32, bitcast=True), E5M2)
    low, high = _scaled_pair(word, inverse, inverse, like_x_ptr, E5M2, SATURATES)
    return factor, pair8(low, high, like_ptr, E5M2, SATURATES)


class RowConfig(NamedTuple):
    """block_rows, block_cols: a tile. num_warps: of a program."""

    block_rows: int
    block_cols: int
    num_warps: int


class TileConfig(NamedTuple):
    """block_rows, block_cols: a tile. num_warps: of a program. bands: rows of tiles that are gone through together."""

    block_rows: int
    block_cols: int
    num_warps: int
    bands: int


class BlockConfig(NamedTuple):
    """num_warps: of a program. max_registers: of a thread, see `registers`; 0 is 128 where factors run along rows and
    along columns, which keeps two CTAs on a multiprocessor. bands: as of `TileConfig`."""

    num_warps: int
    max_registers: int
    bands: int


class AmaxConfig(NamedTuple):
    """block: elements that a program asks for at once. programs: how many at most."""

    block: int
    num_warps: int
    programs: int


def rejects(call) -> list[str]:
    """Why a cast is not for this device or dtype."""
    reasons = []
    x = next(getattr(call, name) for name in ("x", "x8", "gate", "weight", "first") if hasattr(call, name))
    if x.dtype == torch.float64:
        reasons.append("the tensors are float64; this kernel computes in float32")
    if call.arch.kind == "cuda" and call.arch.capability < (8, 9):
        reasons.append(f"{call.arch.name} does not convert to 8-bit floats; compute capability 8.9 and up does")
    if call.arch.kind == "hip":
        reasons.append(f"{call.arch.name} does not convert to float8_e4m3fn")
    return reasons


def _tile_dims(x, *rest) -> dict[str, int]:
    return {"rows": x.numel() // max(1, x.shape[-1]), "cols": x.shape[-1]}


def _tile_default(dims, arch, dtype) -> TileConfig:
    # 128 rows are a line of 128 bytes of the transposed tensor; 64 columns of 16 bits or 128 of 8 are a line of x
    return TileConfig(128, 64 if dtype.itemsize > 1 else 128, 4, 1)


def _row_default(dims, arch, dtype) -> RowConfig:
    width = min(8192, next_power_of_2(dims["cols"]))
    return RowConfig(max(1, 4096 // width), width, 4 if width <= 4096 else 8)


def _block_default(dims, arch, dtype) -> BlockConfig:
    return BlockConfig(8, 0, 8)  # three CTAs of both layouts, at 80 registers, are slower than two


TILE_SPACE = Space(
    default=_tile_default,
    dims=_tile_dims,
    choices={
        "block_rows": (32, 64, 128), "block_cols": (64, 128, 256), "num_warps": (4, 8), "bands": (1, 4, 8),
    },
)  # fmt: skip
ROW_SPACE = Space(
    default=_row_default,
    dims=_tile_dims,
    choices={
        "block_rows": (1, 2, 4), "block_cols": (2048, 4096, 8192, 16_384, 32_768), "num_warps": (4, 8, 16, 32),
    },
)  # fmt: skip
BLOCK_SPACE = Space(
    default=_block_default,
    dims=_tile_dims,
    choices={"num_warps": (8, 16), "max_registers": (0, 64, 80, 128), "bands": (1, 8)},
)
AMAX_SPACE = Space(
    # four loads of 16 bytes a thread, in 32 registers, and 64 warps: 128 KB asked for at once on a multiprocessor
    default=lambda dims, arch, dtype: AmaxConfig(16_384 // dtype.itemsize, 8, 8 * max(1, arch.sms)),
    dims=lambda x, *_: {"elements": x.numel()},
    choices={"block": (4096, 8192, 16384), "num_warps": (4, 8)},
)


def tile_rejects(call) -> list[str]:
    """Why a cast by two-dimensional tiles is not for this device or dtype."""
    reasons = rejects(call)
    x = next(getattr(call, name) for name in ("x", "gate", "weight", "first") if hasattr(call, name))
    if x.dtype == torch.float32 and call.arch.kind != "cpu":
        # H200, Triton 3.6: some elements of float32 tiles are not their rounded values; the cause is not known
        reasons.append("the tensors are float32; on a GPU this kernel is right for 16-bit tensors only")
    return reasons


@register_kernel("fp8_amax", backend="triton", rank=20, rejects=rejects)
@optimize_kernel(space=AMAX_SPACE)
def fp8_amax(x: Tensor, second: Tensor | None = None, third: Tensor | None = None, *, config: AmaxConfig) -> Tensor:
    return largest_element(given(x, second, third), config)


def largest_element(tensors: Sequence[Tensor], config: AmaxConfig | None = None) -> Tensor:
    """max |x| over up to three tensors as fp32 [1]. config: None: the default of where they are."""
    first = tensors[0]
    amax = first.new_zeros(1, dtype=torch.float32)
    config = config or amax_default(first)
    parts = [t.contiguous().view(-1) for t in tensors if t.numel()]
    if parts:
        parts, how = searched(parts, config)
        missing = [None] * (3 - len(parts))
        sizes = [x.numel() for x in parts] + [0] * len(missing)
        launch(
            _amax_kernel, (min(config.programs, sum(cdiv(size, how["BLOCK_SIZE"]) for size in sizes)),),
            *parts, *missing, first, amax, *sizes, **how,
        )  # fmt: skip
    return amax


def amax_default(x: Tensor) -> AmaxConfig:
    """The configuration by which the largest elements of x are found where it is."""
    return AMAX_SPACE.default({}, arch_of(x.device), x.dtype)


def searched(tensors: list[Tensor], config: AmaxConfig) -> tuple[list[Tensor], dict[str, Any]]:
    """Contiguous tensors [..., N] as `larger_in` reads them, in words of two 16-bit numbers where all can be, and the
    flags and options of a kernel that does."""
    pairs, first = all(map(_in_pairs, tensors)), tensors[0]
    block = config.block // 2 if pairs else config.block
    size = 4 if pairs else first.element_size()
    loads = max(1, block * size // (32 * config.num_warps * 16))
    how = {"PAIRS": pairs, "PACKED": _packs(first), "LOADS": loads, "BLOCK_SIZE": block, "num_warps": config.num_warps}
    return [x.view(torch.int32) for x in tensors] if pairs else tensors, {**how, **registers(first, 32)}


@register_kernel("fp8_cast", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(space=TILE_SPACE)
def fp8_cast(
    x: Tensor,
    bound: Tensor,
    amax: Tensor,
    format: str = "e4m3",
    rows: bool = True,
    columns: bool = False,
    *,
    config: TileConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    x8, x8_t = like8(x, format, rows, columns)
    factor = x.new_empty(1, dtype=torch.float32)
    flat = _flat(x, columns)
    count, cols = flat.shape
    room = rounded_up(count) if columns else count
    block_rows, block_cols, num_warps = tile_sizes(count, cols, config, columns)
    # a grid of one where there is nothing to cast: the factor is an output nevertheless
    grid = (max(1, cdiv(room, block_rows) * cdiv(cols, block_cols)),)
    sizes = count if cols else 0, max(1, cols), flat.stride(0)
    how = {"E5M2": format == "e5m2", "SATURATES": saturates(x), "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
    if columns:
        launch(
            _cast_turned_kernel, grid, flat, bound, amax, x8 if rows else None, x8_t, words(x8_t), factor,
            *sizes, room if cols else 0, BANDS=config.bands, num_warps=num_warps, **how,
        )  # fmt: skip
    else:
        launch(_cast_kernel, grid, flat, bound, amax, x8 if rows else None, factor, *sizes, num_warps=num_warps, **how)
    return x8, x8_t, factor


def words(x8_t: Tensor) -> Tensor:
    """x8_t [N, M16] as words of four neighbours."""
    return x8_t.view(torch.int32) if x8_t.numel() else x8_t.new_empty(0, dtype=torch.int32)


def registers(x: Tensor, most: int) -> dict[str, int]:
    """Launch options that hold a kernel to `most` registers a thread on NVIDIA, so that more than one CTA is resident
    on a multiprocessor while another loads or stores. 0 leaves it to ptxas: a limit above what it would take makes it
    take more."""
    return {"maxnreg": most} if most and saturates(x) else {}


def saturates(x: Tensor) -> bool:
    """Whether a conversion to 8 bits saturates where x is, as NVIDIA's instruction does."""
    return arch_of(x.device).kind == "cuda"


def _flat(x: Tensor, columns: bool) -> Tensor:
    """x as rows; as one row of all elements where it is contiguous and only rows are wanted."""
    if not columns and x.is_contiguous():
        return x.view(1, -1)
    return rows(x)


def tile_sizes(count: int, cols: int, config: TileConfig, columns: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps."""
    if not columns:
        block_cols = min(4096, next_power_of_2(cols))
        return min(4096 // block_cols, next_power_of_2(count)), block_cols, 4
    return (
        min(config.block_rows, max(16, next_power_of_2(count))),
        min(config.block_cols, next_power_of_2(cols)),
        config.num_warps,
    )


@register_kernel("fp8_transpose", backend="triton", rank=20, rejects=rejects)
@optimize_kernel(space=TILE_SPACE)
def fp8_transpose(x8: Tensor, *, config: TileConfig) -> Tensor:
    flat = rows(x8).view(torch.uint8)
    count, cols = flat.shape
    room = rounded_up(count)
    x8_t = x8.new_empty(cols, room)
    if x8_t.numel():
        block_rows, block_cols, num_warps = tile_sizes(count, cols, config, True)
        launch(
            _transpose_kernel, (cdiv(room, block_rows) * cdiv(cols, block_cols),),
            flat, words(x8_t), count, cols, flat.stride(0), room,
            BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, BANDS=config.bands, num_warps=num_warps,
        )  # fmt: skip
    return x8_t


@register_kernel("fp8_cast_rows", backend="triton", rank=20, rejects=rejects)
@optimize_kernel(space=ROW_SPACE)
def fp8_cast_rows(x: Tensor, format: str = "e4m3", *, config: RowConfig) -> tuple[Tensor, Tensor]:
    x8 = like8(x, format, True, False)[0]
    flat = rows(x)
    count, cols = flat.shape
    factor = x.new_empty(count, 1, dtype=torch.float32)
    width = min(config.block_cols, next_power_of_2(cols))
    block_rows = min(config.block_rows, next_power_of_2(count))
    if count:
        launch(
            _cast_rows_kernel, (cdiv(count, block_rows),), flat, x8, factor, count, cols, flat.stride(0),
            E5M2=format == "e5m2", SATURATES=saturates(x), BLOCK_ROWS=block_rows, BLOCK_COLS=width, HELD=width >= cols,
            num_warps=config.num_warps,
        )  # fmt: skip
    return x8, factor


def _in_pairs(x: Tensor) -> bool:
    """Whether x [..., N] can be read as words of two 16-bit numbers."""
    sizes = x.shape[-1] | x.storage_offset() | (x.stride(0) if x.ndim > 1 else 0)
    return x.element_size() == 2 and x.stride(-1) == 1 and not sizes % 2


def _packs(x: Tensor) -> bool:
    """Whether an instruction takes the maxima of two numbers in 16 bits where x is."""
    arch = arch_of(x.device)
    return arch.kind == "cuda" and arch.capability >= (9, 0)


@register_kernel("fp8_cast_blocks", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(space=BLOCK_SPACE)
def fp8_cast_blocks(
    x: Tensor,
    format: str = "e4m3",
    rows: bool = True,
    columns: bool = False,
    square: bool = False,
    *,
    config: BlockConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, cols = x.shape
    room = rounded_up(count)
    none8, none = (x.new_empty(0, dtype=dtype) for dtype in (FORMATS[format], torch.float32))
    x8, factor = blocks_like(x, format, square) if rows else (none8, none)
    x8_t, factor_t = blocks_like(x.new_empty(cols, room), format, square) if columns else (none8.clone(), none.clone())
    if x.numel() and (rows or columns):
        grid = (cdiv(room if columns else count, BLOCK) * cdiv(cols, BLOCK),)
        turned = (words(x8_t), factor_t) if columns else (None, None)
        how = {
            "E5M2": format == "e5m2", "SATURATES": saturates(x), "BLOCK_SIZE": BLOCK, "BANDS": config.bands,
            "num_warps": config.num_warps,
            **registers(x, config.max_registers or (128 if rows and columns and not square else 0)),
        }  # fmt: skip
        if not square and _in_pairs(x):
            plain = (x8.view(torch.int16), factor) if rows else (None, None)
            launch(
                _cast_blocks_pairs_kernel, grid, x.view(torch.int32), *plain, *turned, x, x8, count, cols // 2,
                x.stride(0) // 2, room, PACKED=_packs(x), **how,
            )  # fmt: skip
        else:
            plain = (x8, factor) if rows else (None, None)
            launch(
                _cast_blocks_kernel, grid, x, *plain, *turned, x8, count, cols, *x.stride(), room, SQUARE=square, **how
            )
    return x8, factor, x8_t, factor_t
