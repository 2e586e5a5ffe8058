"""Packing and unpacking of weights of mixed widths in Triton. The layout is that of packed_reference.py."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.quant.packed_reference import GROUP, OUTPUTS


@triton.jit
def slot_width(strip_ptr, slot):
    """(width, first word) of slots of the strip whose table row is at strip_ptr."""
    two, three = tl.load(strip_ptr + 1), tl.load(strip_ptr + 2)
    four, six = tl.load(strip_ptr + 3), tl.load(strip_ptr + 4)
    width = tl.where(slot < two, 2, tl.where(slot < three, 3, tl.where(slot < four, 4, tl.where(slot < six, 6, 8))))
    bits = 2 * slot + tl.maximum(slot - two, 0) + tl.maximum(slot - three, 0)
    bits += 2 * (tl.maximum(slot - four, 0) + tl.maximum(slot - six, 0))
    return width, tl.load(strip_ptr) + 32 * bits


@triton.jit
def word_place(row, word, PLANE: tl.constexpr):
    """Where a word of a row of a plane lies (`packed_reference.word_places`)."""
    THREADS: tl.constexpr = min(2 * PLANE, 4)
    place = (row % 8 * THREADS + word % THREADS) * (2 * PLANE // THREADS) + word // THREADS
    return place * 2 + row % 16 // 8


@triton.jit
def field_column(field, word, PLANE: tl.constexpr):
    """The column that a field of a word belongs to (`packed_reference.field_columns`)."""
    place = field % (16 // PLANE) * (2 * PLANE) + word
    return 16 * (place % 4) + 4 * (place // 8) + 2 * (place // 4 % 2) + field // (16 // PLANE)


@triton.jit
def _pack_plane(
    weight_ptr, codes_ptr, words, scale, zero, top, first, group, row, num_rows, weight_row, weight_col, chosen,
    PLANE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write the plane that holds PLANE bits of the codes from bit SHIFT on, of the slots that are chosen, where `words`
    words have room for it: how many the strips have is known to the device alone."""
    j = tl.arange(0, 2 * PLANE)[None, :, None]
    word = tl.zeros([chosen.shape[0], 2 * PLANE, row.shape[2]], tl.int32)
    inside = chosen & (row < num_rows) & (j >= 0)
    for i in tl.static_range(32 // PLANE):
        col = group * 64 + field_column(i, j, PLANE)
        w = tl.load(weight_ptr + row * weight_row + col * weight_col, mask=inside, other=0.0).to(tl.float32)
        value = tl.div_rn(w, scale) + zero
        value = tl.where(value == value, tl.minimum(tl.maximum(value, 0.0), top), 0.0)
        code = ((value + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: rounds ties to even
        word |= ((code >> SHIFT) & ((1 << PLANE) - 1)) << (i * PLANE)
    at = first + word_place(row, j, PLANE)
    tl.store(codes_ptr + at, word, mask=chosen & (at < words) & (row >= 0))


@triton.jit
def _quantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, codes_ptr, words, num_rows, num_groups, weight_row,
    weight_col, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """BLOCK_TILES slots of a strip a program."""
    strip = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)[:, None, None]
    inside = slot < num_groups
    width, first = slot_width(strips_ptr + strip * 5, slot)
    group = tl.load(order_ptr + strip * num_groups + slot, mask=inside, other=0).to(tl.int64)
    lane = tl.arange(0, 16)[None, None, :]
    row = strip * 16 + lane
    place = (strip * num_groups + slot) * 16 + lane
    scale = tl.load(scale_ptr + place, mask=inside, other=1.0).to(tl.float32)
    scale = tl.where(scale == 0.0, 1.0, scale)
    zero = tl.load(zero_ptr + place, mask=inside, other=0.0).to(tl.float32)
    top = ((1 << width) - 1).to(tl.float32)
    narrow, wide = inside & (width < 4), inside & (width >= 4)
    _pack_plane(
        weight_ptr,
        codes_ptr,
        words,
        scale,
        zero,
        top,
        first,
        group,
        row,
        num_rows,
        weight_row,
        weight_col,
        narrow,
        2,
        0,
    )
    _pack_plane(
        weight_ptr, codes_ptr, words, scale, zero, top, first + 64, group, row, num_rows, weight_row, weight_col,
        inside & (width == 3), 1, 2,
    )  # fmt: skip
    _pack_plane(
        weight_ptr, codes_ptr, words, scale, zero, top, first, group, row, num_rows, weight_row, weight_col, wide, 4, 0
    )
    _pack_plane(
        weight_ptr, codes_ptr, words, scale, zero, top, first + 128, group, row, num_rows, weight_row, weight_col,
        inside & (width == 6), 2, 4,
    )  # fmt: skip
    _pack_plane(
        weight_ptr, codes_ptr, words, scale, zero, top, first + 128, group, row, num_rows, weight_row, weight_col,
        inside & (width == 8), 4, 4,
    )  # fmt: skip


@triton.jit
def _unpack_plane(codes_ptr, first, k, lane, chosen, PLANE: tl.constexpr):
    """The PLANE bits of the codes of columns k of the slots that are chosen, 0 for others."""
    pair = k // 4 % 4 * 8 + k // 2 % 2 * 4 + k // 16  # `field_column` the other way round
    word = tl.load(codes_ptr + first + word_place(lane, pair % (2 * PLANE), PLANE), mask=chosen, other=0)
    field = pair // (2 * PLANE) + k % 2 * (16 // PLANE)
    return (word >> (field * PLANE)) & ((1 << PLANE) - 1)


@triton.jit
def _dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, out_ptr, num_rows, num_groups, BLOCK_TILES: tl.constexpr
):
    """BLOCK_TILES slots of a strip a program."""
    strip = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)[:, None, None]
    width, first = slot_width(strips_ptr + strip * 5, slot)
    lane, k = tl.arange(0, 16)[None, :, None], tl.arange(0, 64)[None, None, :]
    inside = (slot < num_groups) & (lane >= 0) & (k >= 0)
    group = tl.load(order_ptr + strip * num_groups + slot, mask=slot < num_groups, other=0).to(tl.int64)
    place = (strip * num_groups + slot) * 16 + lane
    scale = tl.load(scale_ptr + place, mask=slot < num_groups, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + place, mask=slot < num_groups, other=0.0).to(tl.float32)
    code = _unpack_plane(codes_ptr, first, k, lane, inside & (width < 4), 2)
    code |= _unpack_plane(codes_ptr, first + 64, k, lane, inside & (width == 3), 1) << 2
    code |= _unpack_plane(codes_ptr, first, k, lane, inside & (width >= 4), 4)
    code |= _unpack_plane(codes_ptr, first + 128, k, lane, inside & (width == 6), 2) << 4
    code |= _unpack_plane(codes_ptr, first + 128, k, lane, inside & (width == 8), 4) << 4
    value = (code.to(tl.float32) - zero) * scale
    row = strip * 16 + lane
    places = row * (num_groups * 64) + group * 64 + k
    tl.store(out_ptr + places, value.to(out_ptr.dtype.element_ty), mask=inside & (row < num_rows))


class PackedConfig(NamedTuple):
    """block_tiles: tiles that a program works on at once."""

    block_tiles: int
    num_warps: int


def _rejects(call) -> list[str]:
    exact = [name for name in ("weight", "scale") if hasattr(call, name) and getattr(call, name).dtype == torch.float64]
    return [f"{name} is float64; this kernel computes in float32" for name in exact]


PACKED_SPACE = Space(
    default=lambda dims, arch, dtype: PackedConfig(4, 4),
    dims=lambda first, scale, *rest: {"tiles": scale.shape[0] * scale.shape[1]},
    choices={"block_tiles": (2, 4, 8), "num_warps": (4, 8)},
)


@register_kernel("quantize_packed", backend="triton", rank=20, rejects=_rejects)
@optimize_kernel(space=PACKED_SPACE)
def quantize_packed(
    weight: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, words: int, *, config: PackedConfig
) -> Tensor:
    codes = weight.new_empty(words, dtype=torch.int32)
    count, groups = order.shape
    if order.numel():
        block = min(config.block_tiles, next_power_of_2(groups))
        launch(
            _quantize_kernel, (count, cdiv(groups, block)), weight, scale.contiguous(), zero.contiguous(),
            order.contiguous(), strips.contiguous(), codes, words, weight.shape[0], groups, weight.stride(0),
            weight.stride(1), BLOCK_TILES=block, num_warps=config.num_warps,
        )  # fmt: skip
    return codes


@register_kernel("dequantize_packed", backend="triton", rank=20, rejects=_rejects)
@optimize_kernel(space=PACKED_SPACE)
def dequantize_packed(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor,
    strips: Tensor,
    rows: int,
    dtype: str = "float16",
    *,
    config: PackedConfig,
) -> Tensor:
    return unpacked(codes, (scale, zero, order, strips), rows, OUTPUTS[dtype], config)


def unpacked(codes: Tensor, tables: tuple[Tensor, ...], rows: int, dtype: torch.dtype, config: PackedConfig) -> Tensor:
    """The weight [rows, K] in dtype. tables: scale, zero, order and strips."""
    count, groups = tables[2].shape
    weight = codes.new_empty(rows, groups * GROUP, dtype=dtype)
    if weight.numel():
        block = min(config.block_tiles, next_power_of_2(groups))
        launch(
            _dequantize_kernel, (count, cdiv(groups, block)), *(t.contiguous() for t in (codes, *tables)), weight, rows,
            groups, BLOCK_TILES=block, num_warps=config.num_warps,
        )  # fmt: skip
    return weight
