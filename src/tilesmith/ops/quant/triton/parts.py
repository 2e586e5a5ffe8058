"""Casts of several tensors into one in Triton: on top of each other as weights are, side by side as gradients are."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows as as_rows
from tilesmith.device.triton.rounding import (
    largest_of,
    load_factor,
    magnitude,
    raise_to,
    seen_at,
    store_turned,
    word8,
)
from tilesmith.engine import cdiv, launch, optimize_kernel, register_kernel
from tilesmith.ops.quant.op import beside_like, rounded_up, stack_like
from tilesmith.ops.quant.reference import given
from tilesmith.ops.quant.triton.cast import (
    TILE_SPACE,
    TileConfig,
    largest_element,
    load_rows,
    saturates,
    scaled_rows,
    store_rows,
    tile_among,
    tile_rejects,
    tile_sizes,
    words,
)


@triton.jit
def _cast_parts_kernel(
    first_ptr, second_ptr, third_ptr, bound_ptr, amax_ptr, x8_ptr, like_ptr, words_ptr, factor_ptr,
    first_size, second_size, third_size, first_row, second_row, third_row, whole, across, room,
    STACKED: tl.constexpr, E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """A tile of one of three tensors a program, by the factor of *bound_ptr, to where it belongs in one of `whole` rows
    (STACKED) or columns: as it is to x8_ptr, transposed to words_ptr; either may be None. like_ptr: the format.

    sizes: how many rows or columns of the whole are a tensor's, a multiple of 16; 0 for one that is not there. across:
    the other size. room: rows of x8_t side by side. amax_ptr: None where the bound is known to hold.
    """
    # a stack was just read for its largest element: from the end, since the last tiles are still in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0) if STACKED else tl.program_id(0)
    along: tl.constexpr = BLOCK_ROWS if STACKED else BLOCK_COLS
    first_tiles, second_tiles = tl.cdiv(first_size, along), tl.cdiv(second_size, along)
    tiles = first_tiles + second_tiles + tl.cdiv(third_size, along)
    others = tl.cdiv(across, BLOCK_COLS) if STACKED else tl.cdiv(room, BLOCK_ROWS)
    block_row, block_col = tile_among(
        program, tiles if STACKED else others, tl.maximum(others if STACKED else tiles, 1), BANDS
    )
    tile = block_row if STACKED else block_col
    in_first, in_second = tile < first_tiles, tile < first_tiles + second_tiles
    x_ptr = tl.where(in_first, first_ptr, tl.where(in_second, second_ptr, third_ptr))
    x_row = tl.where(in_first, first_row, tl.where(in_second, second_row, third_row))
    size = tl.where(in_first, first_size, tl.where(in_second, second_size, third_size)) // 16 * 16
    start = tl.where(in_first, 0, tl.where(in_second, first_size, first_size + second_size)) // 16 * 16
    tile -= tl.where(in_first, 0, tl.where(in_second, first_tiles, first_tiles + second_tiles))
    quad = (tile if STACKED else block_row) * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = (block_col if STACKED else tile) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    num_rows, num_cols = (size, across) if STACKED else (across, size)
    inside, row = col < num_cols, 4 * quad
    x0, x1, x2, x3 = load_rows(x_ptr + row * x_row + col, x_row, row, num_rows, inside)
    factor, inverse = load_factor(bound_ptr, E5M2)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr, factor)
    if amax_ptr is not None:
        seen = seen_at(amax_ptr)
        top = magnitude(largest_of(x0, x1, x2, x3, SATURATES))
    y0, y1, y2, y3 = scaled_rows(x0, x1, x2, x3, inverse, E5M2, SATURATES)
    if x8_ptr is not None:
        wide = across if STACKED else whole
        to = x8_ptr + (start.to(tl.int64) * wide if STACKED else start)
        store_rows(to + row * wide + col, y0, y1, y2, y3, inside, row, num_rows, wide)
    if words_ptr is not None:
        to = words_ptr + (start // 4 if STACKED else start.to(tl.int64) * (room // 16 * 4))
        word = word8(y0, y1, y2, y3, like_ptr, E5M2, SATURATES)
        store_turned(to, word, quad, col, size if STACKED else room, num_cols, room)
    if amax_ptr is not None:
        raise_to(amax_ptr, tl.max(tl.max(top, 1), 0), seen)


ROWS_ONLY = 4, 1024, 4  # rows, columns and warps of a tile that is written as it is: lines of 1 KiB


@register_kernel("fp8_cast_stack", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(space=TILE_SPACE)
def fp8_cast_stack(
    first: Tensor, second: Tensor, third: Tensor | None = None, format: str = "e4m3", *, config: TileConfig
) -> tuple[Tensor, Tensor, Tensor]:
    parts = given(first, second, third)
    made = stack_like(parts, format)
    if not made[0].numel():
        return *made, first.new_ones(1, dtype=torch.float32)
    bound, factor = largest_element(parts), first.new_empty(1, dtype=torch.float32)
    _launch(parts, bound, None, made, factor, format, config, True)
    return *made, factor


@register_kernel("fp8_cast_beside", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(space=TILE_SPACE)
def fp8_cast_beside(
    first: Tensor, second: Tensor, third: Tensor | None, bound: Tensor, amax: Tensor, format: str = "e4m3",
    rows: bool = True, columns: bool = False, *, config: TileConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = given(first, second, third)
    x8, x8_t = beside_like(parts, format, rows, columns)
    factor = first.new_empty(1, dtype=torch.float32)
    made = x8 if rows else None, x8_t if columns else None
    _launch(parts, bound, amax, made, factor, format, config, False)
    return x8, x8_t, factor


def _launch(
    parts: Sequence[Tensor], bound: Tensor, amax: Tensor | None, made: Sequence[Tensor | None], factor: Tensor,
    format: str, config: TileConfig, stacked: bool,
) -> None:  # fmt: skip
    """Cast matrices into x8 and x8_t (`made`), of which None is not wanted."""
    parts = [as_rows(x) for x in parts]
    dim = 0 if stacked else 1
    sizes, strides, across = [x.shape[dim] for x in parts], [x.stride(0) for x in parts], parts[0].shape[1 - dim]
    more = [0] * (3 - len(parts))
    whole = sum(sizes)
    room = whole if stacked else rounded_up(across)
    count, cols = (max(sizes), across) if stacked else (across, max(sizes))
    if made[1] is None:
        config = TileConfig(*ROWS_ONLY, config.bands)
    block_rows, block_cols, num_warps = tile_sizes(count, cols, config, True)
    # two numbers of every fourth row a thread, as many as one conversion takes: of one, its other half is undefined
    num_warps = min(num_warps, max(1, block_rows * block_cols // 256))
    along, others = (block_rows, cdiv(cols, block_cols)) if stacked else (block_cols, cdiv(room, block_rows))
    x8, x8_t = made
    launch(
        _cast_parts_kernel, (max(1, sum(cdiv(size, along) for size in sizes) * others),),
        *parts, *parts[:1] * len(more), bound, amax, x8, x8_t, None if x8_t is None else words(x8_t), factor,
        *sizes, *more, *strides, *more, whole, across, room, STACKED=stacked, E5M2=format == "e5m2",
        SATURATES=saturates(parts[0]), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, BANDS=config.bands,
        num_warps=num_warps,
    )  # fmt: skip
