"""Products with packed weights of mixed widths in Triton: one row by multiplications, up to 64 by tensor cores.

Tiles of one width lie side by side in a strip, so that each width has a loop of its own without a branch. The planes of a
width are loaded apart and their sums added: a code is the sum of its planes' fields times powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows as as_rows
from tilesmith.engine import Space, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.quant.triton.packed import PackedConfig, unpacked

MOST_ROWS = 64  # beyond, the weight is dequantised once and the product is the device library's
MAGIC = tl.constexpr(0x4B000000)  # fp32 2^23: its low 20 bits hold fields as integers
BASE = tl.constexpr(8388608.0)


@triton.jit
def _plane_row(
    x_ptr, words_ptr, scale_ptr, order_ptr, count, words_step,
    PLANE: tl.constexpr, SHIFT: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """[16]: x times the fields of one plane, times scale and 2^SHIFT, summed over `count` tiles `words_step` apart."""
    FIELDS: tl.constexpr = 32 // PLANE
    NEAR: tl.constexpr = 20 // PLANE  # fields that are numbers where they are, in the mantissa of 2^23
    tile = tl.arange(0, BLOCK_TILES)[:, None, None]
    j, lane = tl.arange(0, 2 * PLANE)[None, :, None], tl.arange(0, 16)[None, None, :]
    acc = tl.zeros([BLOCK_TILES, 2 * PLANE, 16], tl.float32)
    for first in range(0, count, BLOCK_TILES):
        slot = first + tile
        inside = slot < count
        group = tl.load(order_ptr + slot, mask=inside, other=0).to(tl.int32)
        word = tl.load(words_ptr + slot.to(tl.int64) * words_step + j * 16 + lane, mask=inside, other=0)
        scale = tl.load(scale_ptr + slot * 16 + lane, mask=inside, other=0.0).to(tl.float32)
        part = tl.zeros([BLOCK_TILES, 2 * PLANE, 16], tl.float32)
        for i in tl.static_range(FIELDS):
            x = tl.load(x_ptr + group * 64 + i * (2 * PLANE) + j, mask=inside, other=0.0).to(tl.float32)
            at: tl.constexpr = (i % NEAR) * PLANE
            moved = word >> (i // NEAR * NEAR * PLANE)
            field = ((moved & (((1 << PLANE) - 1) << at)) | MAGIC).to(tl.float32, bitcast=True) - BASE
            part += field * (x * (1.0 / (1 << at)))
        acc += part * (scale * (1 << SHIFT))
    return tl.sum(tl.sum(acc, 1), 0)


@triton.jit
def _row_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr, num_rows, num_groups,
    BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """y of one row of x and one strip a program."""
    strip = tl.program_id(0).to(tl.int64)
    scale_ptr += strip * num_groups * 16
    zero_ptr += strip * num_groups * 16
    order_ptr += strip * num_groups
    table = strips_ptr + strip * 5
    two, three, four, six = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3), tl.load(table + 4)
    words = codes_ptr + tl.load(table)
    lane = tl.arange(0, 16)
    y = tl.zeros([16], tl.float32)
    tile, k = tl.arange(0, BLOCK_TILES), tl.arange(0, 64)[None, :]
    for first in range(0, num_groups, BLOCK_TILES):
        slot = first + tile
        inside = slot < num_groups
        group = tl.load(order_ptr + slot, mask=inside, other=0).to(tl.int32)
        x = tl.load(x_ptr + group[:, None] * 64 + k, mask=inside[:, None], other=0.0).to(tl.float32)
        place = slot[:, None] * 16 + lane[None, :]
        scale = tl.load(scale_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
        y -= tl.sum(tl.sum(x, 1)[:, None] * (scale * zero), 0)
    y += _plane_row(x_ptr, words, scale_ptr, order_ptr, two, 64, 2, 0, BLOCK_TILES)
    words += 64 * two
    scale_ptr += two * 16
    order_ptr += two
    count = three - two
    y += _plane_row(x_ptr, words, scale_ptr, order_ptr, count, 96, 2, 0, BLOCK_TILES)
    y += _plane_row(x_ptr, words + 64, scale_ptr, order_ptr, count, 96, 1, 2, BLOCK_TILES)
    words += 96 * count
    scale_ptr += count * 16
    order_ptr += count
    count = four - three
    y += _plane_row(x_ptr, words, scale_ptr, order_ptr, count, 128, 4, 0, BLOCK_TILES)
    words += 128 * count
    scale_ptr += count * 16
    order_ptr += count
    count = six - four
    y += _plane_row(x_ptr, words, scale_ptr, order_ptr, count, 192, 4, 0, BLOCK_TILES)
    y += _plane_row(x_ptr, words + 128, scale_ptr, order_ptr, count, 192, 2, 4, BLOCK_TILES)
    words += 192 * count
    scale_ptr += count * 16
    order_ptr += count
    count = num_groups - six
    y += _plane_row(x_ptr, words, scale_ptr, order_ptr, count, 256, 4, 0, BLOCK_TILES)
    y += _plane_row(x_ptr, words + 128, scale_ptr, order_ptr, count, 256, 4, 4, BLOCK_TILES)
    row = strip * 16 + lane
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _plane_rows(
    acc, x_ptr, token, num_tokens, x_row, words_ptr, scale_ptr, zero_ptr, order_ptr, count, words_step,
    PLANE: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """acc [tokens, 16] + x times the numbers of one plane, rounded to x's dtype; the FIRST plane also takes the zero."""
    inner = tl.arange(0, BLOCK_TILES * 2 * PLANE)
    tile, j, lane = inner // (2 * PLANE), inner % (2 * PLANE), tl.arange(0, 16)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for first in range(0, count, BLOCK_TILES):
        slot = first + tile
        inside = slot < count
        group = tl.load(order_ptr + slot, mask=inside, other=0).to(tl.int32)
        place = slot.to(tl.int64)[:, None] * words_step + j[:, None] * 16 + lane
        word = tl.load(words_ptr + place, mask=inside[:, None], other=0)
        scale = tl.load(scale_ptr + slot[:, None] * 16 + lane, mask=inside[:, None], other=0.0).to(tl.float32)
        if FIRST:
            zero = tl.load(zero_ptr + slot[:, None] * 16 + lane, mask=inside[:, None], other=0.0).to(tl.float32)
        for i in tl.static_range(32 // PLANE):
            field = ((word >> (i * PLANE)) & ((1 << PLANE) - 1)).to(tl.float32)
            weight = ((field - zero) if FIRST else (field * (1 << SHIFT))) * scale
            col = group * 64 + i * (2 * PLANE) + j
            x = tl.load(
                x_ptr + token[:, None] * x_row + col[None, :],
                mask=(token < num_tokens)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(x, weight.to(dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _rows_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr, num_tokens, num_rows, num_groups, x_row,
    BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """y of up to BLOCK_M rows of x and one strip a program."""
    strip = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK_M)
    scale_ptr += strip * num_groups * 16
    zero_ptr += strip * num_groups * 16
    order_ptr += strip * num_groups
    table = strips_ptr + strip * 5
    two, three, four, six = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3), tl.load(table + 4)
    words = codes_ptr + tl.load(table)
    acc = tl.zeros([BLOCK_M, 16], tl.float32)
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words, scale_ptr, zero_ptr, order_ptr, two, 64, 2, 0, True, BLOCK_TILES
    )
    words += 64 * two
    scale_ptr += two * 16
    zero_ptr += two * 16
    order_ptr += two
    count = three - two
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words, scale_ptr, zero_ptr, order_ptr, count, 96, 2, 0, True, BLOCK_TILES
    )
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words + 64, scale_ptr, zero_ptr, order_ptr, count, 96,
        1, 2, False, BLOCK_TILES,
    )  # fmt: skip
    words += 96 * count
    scale_ptr += count * 16
    zero_ptr += count * 16
    order_ptr += count
    count = four - three
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words, scale_ptr, zero_ptr, order_ptr, count, 128, 4, 0, True, BLOCK_TILES
    )
    words += 128 * count
    scale_ptr += count * 16
    zero_ptr += count * 16
    order_ptr += count
    count = six - four
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words, scale_ptr, zero_ptr, order_ptr, count, 192, 4, 0, True, BLOCK_TILES
    )
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words + 128, scale_ptr, zero_ptr, order_ptr, count, 192,
        2, 4, False, BLOCK_TILES,
    )  # fmt: skip
    words += 192 * count
    scale_ptr += count * 16
    zero_ptr += count * 16
    order_ptr += count
    count = num_groups - six
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words, scale_ptr, zero_ptr, order_ptr, count, 256, 4, 0, True, BLOCK_TILES
    )
    acc = _plane_rows(
        acc, x_ptr, token, num_tokens, x_row, words + 128, scale_ptr, zero_ptr, order_ptr, count, 256,
        4, 4, False, BLOCK_TILES,
    )  # fmt: skip
    row = strip * 16 + tl.arange(0, 16)
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    tl.store(y_ptr + token[:, None] * num_rows + row[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


class LinearConfig(NamedTuple):
    """block_tiles: tiles that a program works on at once."""

    block_tiles: int
    num_warps: int


def _rejects(call) -> list[str]:
    exact = [name for name in ("x", "scale") if getattr(call, name).dtype == torch.float64]
    return [f"{name} is float64; this kernel computes in float32" for name in exact]


def _tells(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int) -> list[str]:
    tokens = _tokens(x)
    if tokens == 1:
        return ["_row_kernel: one row, multiplied where the codes are unpacked"]
    if tokens <= MOST_ROWS:
        return [f"_rows_kernel: {tokens} rows on tensor cores, 16 outputs a program"]
    return [f"{tokens} rows: the weight is dequantised, the product is the device library's"]


def _tokens(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _default(dims, arch, dtype) -> LinearConfig:
    if dims["tokens"] == 1:
        # one strip a program: as many warps as its tiles keep busy
        tiles = min(32, max(8, next_power_of_2(dims["groups"]) // 4))
        return LinearConfig(tiles, max(4, tiles // 2))
    return LinearConfig(8, 4)


LINEAR_SPACE = Space(
    default=_default,
    dims=lambda x, codes, scale, *rest: {
        "tokens": _tokens(x),
        "strips": scale.shape[0],
        "groups": scale.shape[1],
    },
    choices={"block_tiles": (8, 16, 32), "num_warps": (4, 8, 16)},
)


@register_kernel("dequant_linear", backend="triton", rank=20, rejects=_rejects, tells=_tells)
@optimize_kernel(space=LINEAR_SPACE)
def dequant_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor,
    strips: Tensor,
    rows: int,
    *,
    config: LinearConfig,
) -> Tensor:
    tokens, (count, groups) = _tokens(x), order.shape
    tables = scale, zero, order, strips
    if tokens > MOST_ROWS:
        weight = unpacked(codes, tables, rows, x.dtype, PackedConfig(4, 4))
        return torch.mm(as_rows(x), weight.t()).view(*x.shape[:-1], rows)
    y, flat = x.new_empty((*x.shape[:-1], rows)), as_rows(x)
    if not y.numel():
        return y
    packed = [codes, *(t.contiguous() for t in tables)]
    block = max(8, min(config.block_tiles, next_power_of_2(groups)))  # 8 tiles of a plane of 1 bit are a product's 16
    if tokens == 1:
        launch(
            _row_kernel, (count,), flat, *packed, y, rows, groups, BLOCK_TILES=block, num_warps=config.num_warps
        )
    else:
        block_m = max(16, next_power_of_2(tokens))
        launch(
            _rows_kernel, (count,), flat, *packed, y, tokens, rows, groups, flat.stride(0),
            BLOCK_M=block_m, BLOCK_TILES=block, num_warps=config.num_warps,
        )  # fmt: skip
    return y
