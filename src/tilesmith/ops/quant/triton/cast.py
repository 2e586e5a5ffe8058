"""Casts in Triton: tiles in both layouts, rows, blocks of 128, and the largest element."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.device.triton.rounding import (
    factor_of,
    largest_of,
    load_factor,
    magnitude,
    raise_to,
    round8,
    store_turned,
    word_of,
)
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.quant.op import blocks_like, like8, rounded_up
from tilesmith.ops.quant.reference import BLOCK, FORMATS


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, elements, BLOCK_SIZE: tl.constexpr):
    """The largest |x| of every num_programs-th block."""
    top = tl.zeros([BLOCK_SIZE], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_SIZE
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_SIZE, elements, step):
        at = first + tl.arange(0, BLOCK_SIZE)
        top = tl.maximum(top, magnitude(tl.load(x_ptr + at, mask=at < elements, other=0.0)))
    raise_to(amax_ptr, tl.max(top, 0))


@triton.jit
def _cast_kernel(
    x_ptr, bound_ptr, amax_ptr, x8_ptr, factor_ptr, num_rows, num_cols, x_row,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile a program, by the factor of *bound_ptr. x8_ptr: None where only the factor and *amax_ptr are wanted."""
    blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0).to(tl.int64)
    row = (program // blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (program % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < num_rows) & (col < num_cols)
    x = tl.load(x_ptr + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    factor, inverse = load_factor(bound_ptr, E5M2)
    if program == 0:
        tl.store(factor_ptr, factor)
    if x8_ptr is not None:
        tl.store(x8_ptr + row * num_cols + col, round8(x, inverse, x8_ptr, E5M2, SATURATES), mask=inside)
    raise_to(amax_ptr, tl.max(tl.max(magnitude(x), 1), 0))


@triton.jit
def _cast_turned_kernel(
    x_ptr, bound_ptr, amax_ptr, x8_ptr, like_ptr, words_ptr, factor_ptr, num_rows, num_cols, x_row, room,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile a program, transposed to words_ptr and, unless that is None, as it is to x8_ptr. like_ptr: the format.

    All four loads come first: none may pass a store.
    """
    blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0).to(tl.int64)
    quad = (program // blocks) * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = (program % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside, row = col < num_cols, 4 * quad
    at = x_ptr + row * x_row + col
    x0 = tl.load(at, mask=inside & (row < num_rows), other=0.0).to(tl.float32)
    x1 = tl.load(at + x_row, mask=inside & (row + 1 < num_rows), other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * x_row, mask=inside & (row + 2 < num_rows), other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * x_row, mask=inside & (row + 3 < num_rows), other=0.0).to(tl.float32)
    top = largest_of(x0, x1, x2, x3)  # before x is rounded, so that x need not be kept
    factor, inverse = load_factor(bound_ptr, E5M2)
    if program == 0:
        tl.store(factor_ptr, factor)
    y0, y1 = round8(x0, inverse, like_ptr, E5M2, SATURATES), round8(x1, inverse, like_ptr, E5M2, SATURATES)
    y2, y3 = round8(x2, inverse, like_ptr, E5M2, SATURATES), round8(x3, inverse, like_ptr, E5M2, SATURATES)
    if x8_ptr is not None:
        store_rows(x8_ptr + row * num_cols + col, y0, y1, y2, y3, inside, row, num_rows, num_cols)
    store_turned(words_ptr, word_of(y0, y1, y2, y3), quad, col, room, num_cols)
    raise_to(amax_ptr, tl.max(tl.max(magnitude(top), 1), 0))


@triton.jit
def store_rows(at, y0, y1, y2, y3, inside, row, num_rows, stride):
    """Write four tiles that hold every fourth row, at the pointers of the first."""
    tl.store(at, y0, mask=inside & (row < num_rows))
    tl.store(at + stride, y1, mask=inside & (row + 1 < num_rows))
    tl.store(at + 2 * stride, y2, mask=inside & (row + 2 < num_rows))
    tl.store(at + 3 * stride, y3, mask=inside & (row + 3 < num_rows))


@triton.jit
def _transpose_kernel(
    x8_ptr, words_ptr, num_rows, num_cols, x_row, room, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """A tile a program, of numbers in 8 bits taken as integers."""
    blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0).to(tl.int64)
    quad = (program // blocks) * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = (program % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside, row = col < num_cols, 4 * quad
    at = x8_ptr + row * x_row + col
    x0 = tl.load(at, mask=inside & (row < num_rows), other=0)
    x1 = tl.load(at + x_row, mask=inside & (row + 1 < num_rows), other=0)
    x2 = tl.load(at + 2 * x_row, mask=inside & (row + 2 < num_rows), other=0)
    x3 = tl.load(at + 3 * x_row, mask=inside & (row + 3 < num_rows), other=0)
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
        x = tl.load(x_ptr + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
        factor, inverse = factor_of(tl.max(magnitude(x), 1, keep_dims=True).to(tl.float32, bitcast=True), E5M2)
        tl.store(x8_ptr + row * num_cols + lane, round8(x, inverse, x8_ptr, E5M2, SATURATES), mask=inside)
    else:
        top = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.int32)
        for first in range(0, num_cols, BLOCK_COLS):
            inside = (row < num_rows) & (first + lane < num_cols)
            x = tl.load(x_ptr + row * x_row + first + lane, mask=inside, other=0.0, eviction_policy="evict_last")
            top = tl.maximum(top, magnitude(x))
        factor, inverse = factor_of(tl.max(top, 1, keep_dims=True).to(tl.float32, bitcast=True), E5M2)
        for first in range(0, num_cols, BLOCK_COLS):
            inside = (row < num_rows) & (first + lane < num_cols)
            x = tl.load(x_ptr + row * x_row + first + lane, mask=inside, other=0.0, eviction_policy="evict_first")
            x8 = round8(x.to(tl.float32), inverse, x8_ptr, E5M2, SATURATES)
            tl.store(x8_ptr + row * num_cols + first + lane, x8, mask=inside)
    tl.store(factor_ptr + row, factor, mask=row < num_rows)


@triton.jit
def _cast_blocks_kernel(
    x_ptr, x8_ptr, factor_ptr, words_ptr, factor_t_ptr, like_ptr, num_rows, num_cols, x_row, x_col, room,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, SQUARE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_SIZE x BLOCK_SIZE a program: factors along its rows, its columns, or one for all of it.

    x8_ptr, words_ptr: None for a layout that is not wanted. like_ptr: the format.
    """
    blocks = tl.cdiv(num_cols, BLOCK_SIZE)
    program = tl.program_id(0).to(tl.int64)
    block_row, block_col = program // blocks, program % blocks
    quad = block_row * (BLOCK_SIZE // 4) + tl.arange(0, BLOCK_SIZE // 4)[:, None]
    col = block_col * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    inside, row = col < num_cols, 4 * quad
    at = x_ptr + row * x_row + col * x_col
    x0 = tl.load(at, mask=inside & (row < num_rows), other=0.0).to(tl.float32)
    x1 = tl.load(at + x_row, mask=inside & (row + 1 < num_rows), other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * x_row, mask=inside & (row + 2 < num_rows), other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * x_row, mask=inside & (row + 3 < num_rows), other=0.0).to(tl.float32)
    if SQUARE:
        top = tl.max(tl.max(magnitude(largest_of(x0, x1, x2, x3)), 1), 0)
        factor, inverse = factor_of(top.to(tl.float32, bitcast=True), E5M2)
        y0, y1 = round8(x0, inverse, like_ptr, E5M2, SATURATES), round8(x1, inverse, like_ptr, E5M2, SATURATES)
        y2, y3 = round8(x2, inverse, like_ptr, E5M2, SATURATES), round8(x3, inverse, like_ptr, E5M2, SATURATES)
        if x8_ptr is not None:
            store_rows(x8_ptr + row * num_cols + col, y0, y1, y2, y3, inside, row, num_rows, num_cols)
            tl.store(factor_ptr + block_row * blocks + block_col, factor)
        if words_ptr is not None:
            store_turned(words_ptr, word_of(y0, y1, y2, y3), quad, col, room, num_cols)
            tl.store(factor_t_ptr + block_col * tl.cdiv(room, BLOCK_SIZE) + block_row, factor)
    else:
        if x8_ptr is not None:
            to, factors = x8_ptr + row * num_cols + col, factor_ptr + block_col * num_rows
            _store_scaled_row(to, factors, x0, inside, row, num_rows, like_ptr, E5M2, SATURATES)
            _store_scaled_row(to + num_cols, factors, x1, inside, row + 1, num_rows, like_ptr, E5M2, SATURATES)
            _store_scaled_row(to + 2 * num_cols, factors, x2, inside, row + 2, num_rows, like_ptr, E5M2, SATURATES)
            _store_scaled_row(to + 3 * num_cols, factors, x3, inside, row + 3, num_rows, like_ptr, E5M2, SATURATES)
        if words_ptr is not None:
            top = tl.max(magnitude(largest_of(x0, x1, x2, x3)), 0, keep_dims=True)
            factor, inverse = factor_of(top.to(tl.float32, bitcast=True), E5M2)
            y0, y1 = round8(x0, inverse, like_ptr, E5M2, SATURATES), round8(x1, inverse, like_ptr, E5M2, SATURATES)
            y2, y3 = round8(x2, inverse, like_ptr, E5M2, SATURATES), round8(x3, inverse, like_ptr, E5M2, SATURATES)
            store_turned(words_ptr, word_of(y0, y1, y2, y3), quad, col, room, num_cols)
            tl.store(factor_t_ptr + block_row * num_cols + col, factor, mask=inside)


@triton.jit
def _store_scaled_row(at, factor_ptr, x, inside, row, num_rows, like_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """Cast rows by the factors of their largest elements, and write both."""
    factor, inverse = factor_of(tl.max(magnitude(x), 1, keep_dims=True).to(tl.float32, bitcast=True), E5M2)
    tl.store(at, round8(x, inverse, like_ptr, E5M2, SATURATES), mask=inside & (row < num_rows))
    tl.store(factor_ptr + row, factor, mask=row < num_rows)


class CastConfig(NamedTuple):
    """block_rows, block_cols: a tile. num_warps: of a program."""

    block_rows: int
    block_cols: int
    num_warps: int


class AmaxConfig(NamedTuple):
    """block: elements that a program asks for at once. programs: how many at most."""

    block: int
    num_warps: int
    programs: int


def rejects(call) -> list[str]:
    """Why a cast is not for this device or dtype."""
    reasons = []
    x = next(getattr(call, name) for name in ("x", "x8", "gate", "weight") if hasattr(call, name))
    if x.dtype == torch.float64:
        reasons.append("the tensors are float64; this kernel computes in float32")
    if call.arch.kind == "cuda" and call.arch.capability < (8, 9):
        reasons.append(f"{call.arch.name} does not convert to 8-bit floats; compute capability 8.9 and up does")
    if call.arch.kind == "hip":
        reasons.append(f"{call.arch.name} does not convert to float8_e4m3fn")
    return reasons


def _tile_dims(x, *rest) -> dict[str, int]:
    return {"rows": x.numel() // max(1, x.shape[-1]), "cols": x.shape[-1]}


def _tile_default(dims, arch, dtype) -> CastConfig:
    # 128 rows are a line of 128 bytes of the transposed tensor; 64 columns keep six CTAs on a multiprocessor
    return CastConfig(128, 64, 4)


def _row_default(dims, arch, dtype) -> CastConfig:
    width = min(8192, next_power_of_2(dims["cols"]))
    return CastConfig(max(1, 4096 // width), width, 4 if width <= 4096 else 8)


TILE_SPACE = Space(
    default=_tile_default,
    dims=_tile_dims,
    choices={"block_rows": (32, 64, 128), "block_cols": (64, 128, 256), "num_warps": (4, 8)},
)
ROW_SPACE = Space(
    default=_row_default,
    dims=_tile_dims,
    choices={"block_rows": (1, 2, 4), "block_cols": (2048, 4096, 8192), "num_warps": (4, 8)},
)
AMAX_SPACE = Space(
    default=lambda dims, arch, dtype: AmaxConfig(8192 // dtype.itemsize * 2, 8, 4 * max(1, arch.sms)),
    dims=lambda x, *_: {"elements": x.numel()},
    choices={"block": (4096, 8192, 16384), "num_warps": (4, 8)},
)


def tile_rejects(call) -> list[str]:
    """Why a cast by two-dimensional tiles is not for this device or dtype."""
    reasons = rejects(call)
    x = next(getattr(call, name) for name in ("x", "gate", "weight") if hasattr(call, name))
    if x.dtype == torch.float32 and call.arch.kind != "cpu":
        # H200, Triton 3.6: some elements of float32 tiles are not their rounded values; the cause is not known
        reasons.append("the tensors are float32; on a GPU this kernel is right for 16-bit tensors only")
    return reasons


@register_kernel("fp8_amax", backend="triton", rank=20, rejects=rejects)
@optimize_kernel(space=AMAX_SPACE)
def fp8_amax(x: Tensor, *, config: AmaxConfig) -> Tensor:
    amax = x.new_zeros(1, dtype=torch.float32)
    if x.numel():
        programs = min(config.programs, cdiv(x.numel(), config.block))
        launch(
            _amax_kernel, (programs,), x.contiguous(), amax, x.numel(),
            BLOCK_SIZE=config.block, num_warps=config.num_warps,
        )  # fmt: skip
    return amax


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
    config: CastConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    x8, x8_t = like8(x, format, rows, columns)
    factor = x.new_empty(1, dtype=torch.float32)
    flat = _flat(x, columns)
    count, cols = flat.shape
    room = rounded_up(count) if columns else count
    block_rows, block_cols, num_warps = _tile(count, cols, config, columns)
    # a grid of one where there is nothing to cast: the factor is an output nevertheless
    grid = (max(1, cdiv(room, block_rows) * cdiv(cols, block_cols)),)
    sizes = count if cols else 0, max(1, cols), flat.stride(0)
    how = {"E5M2": format == "e5m2", "SATURATES": saturates(x), "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
    if columns:
        launch(
            _cast_turned_kernel, grid, flat, bound, amax, x8 if rows else None, x8_t, words(x8_t), factor,
            *sizes, room if cols else 0, num_warps=num_warps, **how,
        )  # fmt: skip
    else:
        launch(_cast_kernel, grid, flat, bound, amax, x8 if rows else None, factor, *sizes, num_warps=num_warps, **how)
    return x8, x8_t, factor


def words(x8_t: Tensor) -> Tensor:
    """x8_t [N, M16] as words of four neighbours."""
    return x8_t.view(torch.int32) if x8_t.numel() else x8_t.new_empty(0, dtype=torch.int32)


def registers(x: Tensor) -> dict[str, int]:
    """Launch options that leave room for two CTAs of 8 warps on a multiprocessor of NVIDIA: kernels that would take up
    to 168 registers a thread compile to 128 without spills."""
    return {"maxnreg": 128} if saturates(x) else {}


def saturates(x: Tensor) -> bool:
    """Whether a conversion to 8 bits saturates where x is, as NVIDIA's instruction does."""
    return arch_of(x.device).kind == "cuda"


def _flat(x: Tensor, columns: bool) -> Tensor:
    """x as rows; as one row of all elements where it is contiguous and only rows are wanted."""
    if not columns and x.is_contiguous():
        return x.view(1, -1)
    return rows(x)


def _tile(count: int, cols: int, config: CastConfig, columns: bool) -> tuple[int, int, int]:
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
def fp8_transpose(x8: Tensor, *, config: CastConfig) -> Tensor:
    flat = rows(x8).view(torch.uint8)
    count, cols = flat.shape
    room = rounded_up(count)
    x8_t = x8.new_empty(cols, room)
    if x8_t.numel():
        block_rows, block_cols, num_warps = _tile(count, cols, config, True)
        launch(
            _transpose_kernel, (cdiv(room, block_rows) * cdiv(cols, block_cols),),
            flat, words(x8_t), count, cols, flat.stride(0), room,
            BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=num_warps,
        )  # fmt: skip
    return x8_t


@register_kernel("fp8_cast_rows", backend="triton", rank=20, rejects=rejects)
@optimize_kernel(space=ROW_SPACE)
def fp8_cast_rows(x: Tensor, format: str = "e4m3", *, config: CastConfig) -> tuple[Tensor, Tensor]:
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


@register_kernel("fp8_cast_blocks", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(num_warps=8)
def fp8_cast_blocks(
    x: Tensor,
    format: str = "e4m3",
    rows: bool = True,
    columns: bool = False,
    square: bool = False,
    *,
    config: dict[str, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, cols = x.shape
    room = rounded_up(count)
    none8, none = (x.new_empty(0, dtype=dtype) for dtype in (FORMATS[format], torch.float32))
    x8, factor = blocks_like(x, format, square) if rows else (none8, none)
    x8_t, factor_t = blocks_like(x.new_empty(cols, room), format, square) if columns else (none8.clone(), none.clone())
    if x.numel() and (rows or columns):
        launch(
            _cast_blocks_kernel, (cdiv(room if columns else count, BLOCK) * cdiv(cols, BLOCK),), x,
            x8 if rows else None, factor if rows else None, words(x8_t) if columns else None,
            factor_t if columns else None, x8, count, cols, x.stride(0), x.stride(1), room, E5M2=format == "e5m2",
            SATURATES=saturates(x), SQUARE=square, BLOCK_SIZE=BLOCK, num_warps=config["num_warps"],
            **registers(x),
        )  # fmt: skip
    return x8, factor, x8_t, factor_t
