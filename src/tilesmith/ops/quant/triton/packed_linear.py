"""Products with packed weights of mixed widths in Triton: one row by multiplications, up to 64 by tensor cores.

Tiles of one width lie side by side in a strip, so that the loop over them has no branch. The planes of a width are
loaded apart and their sums added: a code is the sum of its planes' fields times powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows as as_rows
from tilesmith.engine import Space, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.quant.packed_reference import row_count
from tilesmith.ops.quant.triton.packed import PackedConfig, field_column, unpacked, word_place

MOST_ROWS = 64  # beyond, the weight is dequantised once and the product is the device library's
MAGIC = tl.constexpr(0x4B000000)  # fp32 2^23: its low 20 bits hold fields as integers
BASE = tl.constexpr(8388608.0)


@triton.jit
def _field(word, MOVED: tl.constexpr, AT: tl.constexpr, PLANE: tl.constexpr):
    """2^AT times the field of a word at bit MOVED + AT, which is at most 20 - PLANE + MOVED."""
    return (((word >> MOVED) & (((1 << PLANE) - 1) << AT)) | MAGIC).to(tl.float32, bitcast=True) - BASE


@triton.jit
def _segment(strip_ptr, num_groups, index):
    """Tiles of a strip that share a plane: (first slot, how many, first word, words from tile to tile, what a field
    counts, what one of the width's upper plane counts or 2^30 where it has none).

    index: planes of 4 bits: 0 of width 4, 1 of 6, 2 and 3 of 8; of 2 bits: 4 of width 2, 5 of 3, 6 of 6; of 1 bit: 7.
    """
    two, three = tl.load(strip_ptr + 1), tl.load(strip_ptr + 2)
    four, six = tl.load(strip_ptr + 3), tl.load(strip_ptr + 4)
    first3 = 64 * two
    first4 = first3 + 96 * (three - two)
    first6 = first4 + 128 * (four - three)
    first8 = first6 + 192 * (six - four)
    of3, of6, of8 = (index == 5) | (index == 7), (index == 1) | (index == 6), (index == 2) | (index == 3)
    slot = tl.where(index == 0, three, tl.where(of3, two, tl.where(of6, four, tl.where(of8, six, 0))))
    stop = tl.where(index == 0, four, tl.where(of3, three, tl.where(of6, six, tl.where(of8, num_groups, two))))
    word = tl.where(index == 0, first4, tl.where(of3, first3, tl.where(of6, first6, tl.where(of8, first8, 0))))
    step = tl.where(index == 0, 128, tl.where(of3, 96, tl.where(of6, 192, tl.where(of8, 256, 64))))
    upper = (index == 3) | (index == 6)
    word += tl.where(upper, 128, tl.where(index == 7, 64, 0)) + tl.load(strip_ptr)
    factor = tl.where(upper, 16.0, tl.where(index == 7, 4.0, 1.0))
    unit = tl.where(of3, 4.0, tl.where(of6 | of8, 16.0, 1073741824.0))
    return slot, stop - slot, word, step, factor, unit


@triton.jit
def _planes_row(
    x_ptr, codes_ptr, scale_ptr, order_ptr, strip_ptr, num_groups,
    PLANE: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """[16]: x times the fields of the segments BEGIN to END, which have planes of PLANE bits, times their scales."""
    NEAR: tl.constexpr = 20 // PLANE  # fields that are numbers where they are, in the mantissa of 2^23
    tile = tl.arange(0, BLOCK_TILES)[:, None, None]
    j, lane = tl.arange(0, 2 * PLANE)[None, :, None], tl.arange(0, 16)[None, None, :]
    acc = tl.zeros([BLOCK_TILES, 2 * PLANE, 16], tl.float32)
    for index in range(BEGIN, END):
        begin, count, word_first, words_step, factor, _ = _segment(strip_ptr, num_groups, index)
        for first in range(0, count, BLOCK_TILES):
            slot = first + tile
            inside = slot < count
            group = tl.load(order_ptr + begin + slot, mask=inside, other=0).to(tl.int32)
            word_at = word_first + slot * words_step + word_place(lane, j, PLANE)
            word = tl.load(codes_ptr + word_at, mask=inside, other=0)
            scale = tl.load(scale_ptr + (begin + slot) * 16 + lane, mask=inside, other=0.0).to(tl.float32)
            part = tl.zeros([BLOCK_TILES, 2 * PLANE, 16], tl.float32)
            for i in tl.static_range(32 // PLANE):
                x = tl.load(x_ptr + group * 64 + field_column(i, j, PLANE), mask=inside, other=0.0).to(tl.float32)
                field = _field(word, i // NEAR * NEAR * PLANE, i % NEAR * PLANE, PLANE)
                part += field * (x * (1.0 / (1 << i % NEAR * PLANE)))
            acc += part * (scale * factor)
    return tl.sum(tl.sum(acc, 1), 0)


@triton.jit(do_not_specialize=["num_groups"])
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
    y += _planes_row(x_ptr, codes_ptr, scale_ptr, order_ptr, table, num_groups, 4, 0, 4, BLOCK_TILES)
    y += _planes_row(x_ptr, codes_ptr, scale_ptr, order_ptr, table, num_groups, 2, 4, 7, BLOCK_TILES)
    y += _planes_row(x_ptr, codes_ptr, scale_ptr, order_ptr, table, num_groups, 1, 7, 8, BLOCK_TILES)
    row = strip * 16 + lane
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _planes_rows(
    acc, x_ptr, token, num_tokens, x_row, codes_ptr, scale_ptr, zero_ptr, order_ptr, strip_ptr, num_groups,
    PLANE: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """acc [tokens, 16] + x times the numbers of the segments BEGIN to END, which have planes of PLANE bits; numbers are
    rounded to x's dtype.

    Planes share the zero: the upper one takes the next multiple of what its fields count, the lower one the rest, so
    that neither sums numbers far larger than the weights. Each step has a sum of its own, and in fp32 each product in
    it: fused multiply-adds add one number after the other, and one sum all along K = 128 was off by 9.4e-6 of 19, where
    sums of 16 are off by 2.5e-6.
    """
    inner = tl.arange(0, BLOCK_TILES * 2 * PLANE)
    tile, j, lane = inner // (2 * PLANE), inner % (2 * PLANE), tl.arange(0, 16)[None, :]
    for index in range(BEGIN, END):
        begin, count, word_first, words_step, factor, unit = _segment(strip_ptr, num_groups, index)
        for first in range(0, count, BLOCK_TILES):
            slot = first + tile
            inside = slot < count
            group = tl.load(order_ptr + begin + slot, mask=inside, other=0).to(tl.int32)
            word_at = (word_first + slot * words_step)[:, None] + word_place(lane, j[:, None], PLANE)
            word = tl.load(codes_ptr + word_at, mask=inside[:, None], other=0)
            place = (begin + slot)[:, None] * 16 + lane
            scale = tl.load(scale_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
            zero = tl.load(zero_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
            whole = tl.floor(zero / unit + 0.5) * unit
            zero = tl.where(factor == 1.0, zero - whole, whole)
            part = tl.zeros_like(acc)
            for i in tl.static_range(32 // PLANE):
                field = ((word >> (i * PLANE)) & ((1 << PLANE) - 1)).to(tl.float32)
                weight = (field * factor - zero) * scale
                x = tl.load(
                    x_ptr + token[:, None] * x_row + (group * 64 + field_column(i, j, PLANE))[None, :],
                    mask=(token < num_tokens)[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                if x_ptr.dtype.element_ty == tl.float32:
                    # a fused multiply-add by 1: of a plain sum Triton makes the product's first summand
                    part = tl.fma(tl.dot(x, weight, input_precision="ieee"), tl.full((), 1.0, tl.float32), part)
                else:
                    part = tl.dot(x, weight.to(x_ptr.dtype.element_ty), part)
            acc += part
    return acc


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def _rows_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr, num_tokens, num_rows, num_groups, x_row,
    BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """y of up to BLOCK_M rows of x and one strip a program."""
    strip = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK_M).to(tl.int64)
    scale_ptr += strip * num_groups * 16
    zero_ptr += strip * num_groups * 16
    order_ptr += strip * num_groups
    table = strips_ptr + strip * 5
    acc = tl.zeros([BLOCK_M, 16], tl.float32)
    acc = _planes_rows(
        acc, x_ptr, token, num_tokens, x_row, codes_ptr, scale_ptr, zero_ptr, order_ptr, table, num_groups,
        4, 0, 4, BLOCK_TILES,
    )  # fmt: skip
    acc = _planes_rows(
        acc, x_ptr, token, num_tokens, x_row, codes_ptr, scale_ptr, zero_ptr, order_ptr, table, num_groups,
        2, 4, 7, BLOCK_TILES,
    )  # fmt: skip
    acc = _planes_rows(
        acc, x_ptr, token, num_tokens, x_row, codes_ptr, scale_ptr, zero_ptr, order_ptr, table, num_groups,
        1, 7, 8, BLOCK_TILES,
    )  # fmt: skip
    row = strip * 16 + tl.arange(0, 16)
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    tl.store(y_ptr + token[:, None] * num_rows + row[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


class LinearConfig(NamedTuple):
    """block_tiles: tiles that a program works on at once."""

    block_tiles: int
    num_warps: int
    num_stages: int


def _rejects(call) -> list[str]:
    exact = [name for name in ("x", "scale") if getattr(call, name).dtype == torch.float64]
    reasons = [f"{name} is float64; this kernel computes in float32" for name in exact]
    if call.arch.kind == "hip":
        reasons.append(f"{call.arch.name} was not tried: this kernel was compiled for NVIDIA's GPUs only")
    return reasons


def _tells(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> list[str]:
    tokens = row_count(x)
    if tokens == 1:
        return ["_row_kernel: one row, multiplied where the codes are unpacked"]
    if tokens <= MOST_ROWS:
        return [f"_rows_kernel: {tokens} rows on tensor cores, 16 outputs a program"]
    return [f"{tokens} rows: the weight is dequantised, the product is the device library's"]


def _default(dims, arch, dtype) -> LinearConfig:
    if dims["tokens"] == 1:
        # one strip a program: as many warps as its tiles keep busy
        tiles = min(32, max(8, next_power_of_2(dims["groups"]) // 4))
        return LinearConfig(tiles, max(4, tiles // 2), 3)
    return LinearConfig(8, 4, 2 if dims["tokens"] > 16 else 3)  # in 3 stages 64 rows of x take 210 KiB


LINEAR_SPACE = Space(
    default=_default,
    dims=lambda x, codes, scale, *rest: {
        "tokens": row_count(x),
        "strips": scale.shape[0],
        "groups": scale.shape[1],
    },
    choices={"block_tiles": (8, 16, 32), "num_warps": (4, 8, 16), "num_stages": (2, 3, 4)},
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
    tokens, (count, groups) = row_count(x), order.shape
    tables = scale, zero, order, strips
    if tokens > MOST_ROWS:
        weight = unpacked(codes, tables, rows, x.dtype, PackedConfig(4, 4))
        return torch.mm(as_rows(x), weight.t()).view(*x.shape[:-1], rows)
    y, flat = x.new_empty((*x.shape[:-1], rows)), as_rows(x)
    if not y.numel():
        return y
    packed = [t.contiguous() for t in (codes, *tables)]
    block = max(8, min(config.block_tiles, next_power_of_2(groups)))  # 8 tiles of a plane of 1 bit are a product's 16
    if tokens == 1:
        launch(
            _row_kernel, (count,), flat, *packed, y, rows, groups,
            BLOCK_TILES=block, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    else:
        block_m = max(16, next_power_of_2(tokens))
        launch(
            _rows_kernel, (count,), flat, *packed, y, tokens, rows, groups, flat.stride(0),
            BLOCK_M=block_m, BLOCK_TILES=block, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return y
