"""Products of few rows with packed weights of mixed widths, by tensor cores, in Gluon; of one row by packed_row.

A warp takes a tile at a time: 16 outputs by 64 inputs are four products of 16 x 8 x 16. Its codes are operands as they
are unpacked: a field is the mantissa of a 16-bit number, a shift and one logic operation for two of them. So a product
is of x and the codes plus a constant, which is subtracted, with the zeros, times the sum of x, itself a product with
ones. Scales are multiplied in fp32, once for 64 inputs.
"""

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned, is_16_byte_aligned
from tilesmith.device.gluon.shim import gl, gluon, mma_sync
from tilesmith.device.rows import rows as as_rows
from tilesmith.engine import Space, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.quant.hopper.packed import (
    REGISTERS,
    WAVE,
    WIDTHS,
    StripConfig,
    codes_of,
    load_tiles,
    magic,
    scale_refused,
    strip_tables,
    tables_of,
    unpacked,
    warps_of_strip,
)
from tilesmith.ops.quant.hopper.packed_row import row_product, warps_of_row
from tilesmith.ops.quant.packed_reference import row_count

MOST_ROWS = 32
"""Rows of x that this kernel serves: the sums of 64 and their x would take more registers than a thread has here."""
AHEAD_OF = {8: WAVE, 16: WAVE - 1, 32: 1}  # tiles by the rows of a product: x takes the registers


@gluon.jit
def _operand(words, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, 16, 8] words as [W, 16, 16] numbers, which their halves are."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [words.shape[0], 16, 16]), LAYOUT)


@gluon.jit
def _inputs(words, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, 8, N] words as [W, 16, N] numbers."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.permute(gl.join(low, high), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(x, [words.shape[0], 16, words.shape[2]]), LAYOUT)


@gluon.jit
def _load_inputs(x_ptr, x_row, group, num_tokens, N: gl.constexpr):
    """64 inputs of each warp's tile, as words of what each of the four products takes, each [W, 8, N]."""
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    token = gl.minimum(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), num_tokens - 1)
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    group = gl.convert_layout(group, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    at = group[:, None, None] * 32 + (token * x_row)[None, :, None] + word[None, None, :]
    x = gl.permute(gl.reshape(gl.load(x_ptr + at), [W, N, 4, 2, 2, 2]), (0, 5, 2, 1, 3, 4))
    even, odd = gl.split(x)
    zero, two = gl.split(even)
    one, three = gl.split(odd)
    SHAPE: gl.constexpr = [W, 8, N]
    return gl.reshape(zero, SHAPE), gl.reshape(one, SHAPE), gl.reshape(two, SHAPE), gl.reshape(three, SHAPE)


@gluon.jit
def _load_inputs_of(x_ptr, x_row, groups, num_tokens, N: gl.constexpr, AHEAD: gl.constexpr):
    """What the AHEAD tiles of each warp are multiplied with."""
    found = ()
    for ahead in gl.static_range(AHEAD):
        found += (_load_inputs(x_ptr, x_row, groups[ahead], num_tokens, N),)
    return found


@gluon.jit
def _multiply(acc, tiles, inputs, WIDTH: gl.constexpr, LOWEST: gl.constexpr, AHEAD: gl.constexpr, dtype: gl.constexpr):
    """acc [W, 16, N] + x times the AHEAD tiles of each warp that `load_tiles` loaded."""
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = acc.shape[2]
    SUMS: gl.constexpr = acc.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    MORE: gl.constexpr = WIDTH - LOWEST
    BESIDE: gl.constexpr = 0 if WIDTH == 8 else MORE  # bits of the second plane in one number with those of the first
    ONE: gl.constexpr = magic(dtype)[0]
    MAGIC: gl.constexpr = magic(dtype)[1]
    MAGIC_16: gl.constexpr = magic(dtype)[2]
    OFFSET: gl.constexpr = ONE * 17 if WIDTH == 8 else ONE
    ones = gl.full([W, 16, 16], 1.0, dtype, A)
    low, high, scales, zeros, _ = tiles
    for ahead in gl.static_range(AHEAD):
        part = gl.zeros([W, 16, N], gl.float32, SUMS)
        total = gl.zeros([W, 16, N], gl.float32, SUMS)
        if MORE > 0:
            second = high[ahead]
        else:
            second = low[ahead]
        for step in gl.static_range(4):
            x = _inputs(inputs[ahead][step], dtype, B)
            code = codes_of(low[ahead], second, step, LOWEST, BESIDE, MAGIC)
            part = mma_sync(_operand(code, dtype, A), x, part)
            if WIDTH == 8:
                code = codes_of(second, second, step, MORE, 0, MAGIC_16)
                part = mma_sync(_operand(code, dtype, A), x, part)
            total = mma_sync(ones, x, total)
        scale = scales[ahead].to(gl.float32)
        zero = zeros[ahead].to(gl.float32) + OFFSET
        acc += (part - total * gl.expand_dims(zero, 2)) * gl.expand_dims(scale, 2)
    return acc


@gluon.jit
def _width(
    acc, x_ptr, x_row, num_tokens, tables, count,
    WIDTH: gl.constexpr, AHEAD: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """acc [W, 16, N] + x times the tiles of a strip that have this width (`tables_of`). While AHEAD tiles of a warp are
    multiplied, the next are loaded."""
    ROWS: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    LOWEST: gl.constexpr = 4 if WIDTH >= 4 else 2  # bits of the first plane
    TURN: gl.constexpr = gl.num_warps() * AHEAD
    slot = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, ROWS))
    lane = gl.arange(0, 16, gl.SliceLayout(0, ROWS))
    tiles = load_tiles(tables, slot, lane, count, WIDTH, LOWEST, AHEAD)
    for first in range(0, count, TURN):
        inputs = _load_inputs_of(x_ptr, x_row, tiles[4], num_tokens, acc.shape[2], AHEAD)
        following = load_tiles(tables, first + TURN + slot, lane, count, WIDTH, LOWEST, AHEAD)
        acc = _multiply(acc, tiles, inputs, WIDTH, LOWEST, AHEAD, dtype)
        tiles = following
    return acc


@gluon.jit(do_not_specialize=["num_tokens"])
def packed_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr, num_tokens, num_rows, num_groups, x_row,
    N: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """y of up to N rows of x and the 16 outputs of a strip. x: words of two numbers of y's dtype, as x_row counts. A
    warp takes every so many of the strip's tiles."""
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    W: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    strip = gl.program_id(0)
    whole, ends = strip_tables(codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, strip, num_groups)
    acc = gl.zeros([W, 16, N], gl.float32, SUMS)
    for i in gl.static_range(5):
        tables, count = tables_of(whole, ends, i)
        acc = _width(acc, x_ptr, x_row, num_tokens, tables, count, WIDTHS[i], AHEAD, dtype)
    y = gl.sum(acc, 0)
    row = strip * 16 + gl.arange(0, 16, gl.SliceLayout(1, y.type.layout))[:, None]
    token = gl.arange(0, N, gl.SliceLayout(0, y.type.layout))[None, :]
    at = token.to(gl.int64) * num_rows + row
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(row < num_rows) & (token < num_tokens))


def _rejects(call) -> list[str]:
    reasons = []
    if call.x.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"x is {call.x.dtype}; this kernel takes bfloat16 and float16")
    return reasons + scale_refused(call.scale)


def _tells(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> list[str]:
    tokens = row_count(x)
    if _by_row(tokens, codes):
        return ["packed_row_kernel: one row on tensor cores, tiles from memory to registers four at a time"]
    if tokens <= MOST_ROWS:
        return [f"packed_rows_kernel: {tokens} rows on tensor cores, which take codes as they are unpacked"]
    return [f"{tokens} rows: the weight is dequantised, the product is the device library's"]


def _by_row(tokens: int, codes: Tensor) -> bool:
    """Whether packed_row computes a call; it loads codes 16 bytes at a time."""
    return tokens == 1 and is_16_byte_aligned(codes)


def _warps(dims: dict[str, int], arch: Any, dtype: Any) -> StripConfig:
    if dims["tokens"] == 1:
        return StripConfig(warps_of_row(dims["strips"], dims["groups"], arch.sms))
    return warps_of_strip(dims, arch, dtype)


ROWS_SPACE = Space(
    default=_warps,
    dims=lambda x, codes, scale, *rest: {"tokens": row_count(x), "strips": scale.shape[0], "groups": scale.shape[1]},
    choices={"num_warps": (4, 8, 16)},
)


@register_kernel("dequant_linear", backend="hopper", rank=30, rejects=_rejects, tells=_tells, plans=rehearsed)
@optimize_kernel(space=ROWS_SPACE)
def dequant_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor,
    strips: Tensor,
    rows: int,
    *,
    config: StripConfig,
) -> Tensor:
    tokens, (count, groups) = row_count(x), order.shape
    tables = scale, zero, order, strips
    if tokens > MOST_ROWS:
        weight = unpacked(codes, tables, rows, x.dtype, config)
        return torch.mm(as_rows(x), weight.t()).view(*x.shape[:-1], rows)
    y = x.new_empty((*x.shape[:-1], rows))
    if not y.numel():
        return y
    flat, _ = aligned(as_rows(x))
    flat = flat.view(torch.int32)
    packed = tuple(t.contiguous() for t in (codes, *tables))
    if _by_row(tokens, codes):
        row_product(flat, packed, y, config.num_warps, arch_of(x.device).sms)
        return y
    columns = max(8, next_power_of_2(tokens))
    launch(
        packed_rows_kernel, (count,), flat, *packed, y, tokens, rows, groups,
        flat.stride(0), N=columns, AHEAD=AHEAD_OF[columns], num_warps=config.num_warps,
        maxnreg=REGISTERS,
    )  # fmt: skip
    return y
