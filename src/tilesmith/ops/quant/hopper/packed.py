"""Packed weights of mixed widths on Hopper, in Gluon: how a warp loads a tile, and the weight that codes stand for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.gluon.shim import gl, gluon
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.quant import packed_reference as reference
from tilesmith.ops.quant.packed_reference import GROUP, OUTPUTS

WARPS = 12  # of a multiprocessor that keep memory busy
REGISTERS = 128  # of a thread, so that a multiprocessor holds 16 warps
WAVE = 3  # tiles of a warp that are under way

WIDTHS = gl.constexpr(reference.WIDTHS)


@gluon.constexpr_function
def magic(dtype):
    """(ONE, MAGIC, MAGIC_16): with the bits of MAGIC around it a field of 7 bits (fp16: 10) is a number of dtype, ONE
    plus the field's value; with those of MAGIC_16 it is 16 times that."""
    return (128.0, 0x43004300, 0x45004500) if dtype == gl.bfloat16 else (1024.0, 0x64006400, 0x74007400)


@gluon.jit
def load_plane(codes_ptr, at, inside, PLANE: gl.constexpr):
    """The words of a plane of a tile of each warp, int32 [W, 16, 8]; words that a plane of 1 or 2 bits lacks are others
    again. at: [W], of the plane's first word; inside: [W], whether there is a tile."""
    W: gl.constexpr = gl.num_warps()
    H: gl.constexpr = 2 if PLANE == 4 else 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2 * H], [1, 32], [W, 1], [1, 0])
    place = gl.arange(0, 64 * H, gl.SliceLayout(0, LAYOUT))
    if PLANE == 1:
        place = place // 8 * 4 + place % 4  # two threads have the same words
    at = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT))
    inside = gl.convert_layout(inside, gl.SliceLayout(1, LAYOUT))
    words = gl.load(codes_ptr + (at[:, None] + place[None, :]), mask=inside[:, None], other=0)
    words = gl.permute(gl.reshape(words, [W, 8, 4, H, 2]), (0, 4, 1, 3, 2))
    if H == 1:
        words = gl.permute(gl.join(words, words), (0, 1, 2, 5, 4, 3))
    return gl.reshape(words, [W, 16, 8])


@gluon.jit
def load_tiles(tables, slot, lane, count, WIDTH: gl.constexpr, LOWEST: gl.constexpr, AHEAD: gl.constexpr):
    """AHEAD tiles of each warp, num_warps slots apart: planes, scales, zeros and groups. tables: pointers to those of
    the tiles of this width. slot: [W], of the first; from `count` on there are none, and scales are 0."""
    codes_ptr, scale_ptr, zero_ptr, order_ptr = tables
    low, high, scales, zeros, groups = (), (), (), (), ()
    for ahead in gl.static_range(AHEAD):
        inside = slot < count
        at = slot * (32 * WIDTH)
        low += (load_plane(codes_ptr, at, inside, LOWEST),)
        if WIDTH > LOWEST:
            high += (load_plane(codes_ptr, at + 32 * LOWEST, inside, WIDTH - LOWEST),)
        place = slot[:, None] * 16 + lane[None, :]
        scales += (gl.load(scale_ptr + place, mask=inside[:, None], other=0.0),)
        zeros += (gl.load(zero_ptr + place, mask=inside[:, None], other=0.0),)
        groups += (gl.load(order_ptr + slot, mask=inside, other=0).to(gl.int32),)
        slot += gl.num_warps()
    return low, high, scales, zeros, groups


@gluon.jit
def strip_tables(codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, strip, num_groups):
    """Pointers to what a strip's tiles have, and where those of each width end, from 0 on."""
    slots = strip.to(gl.int64) * num_groups
    table = strips_ptr + strip * 5
    word = gl.load(table) // 32 * 32  # as it is; the compiler learns that it is a multiple
    ends = (0, gl.load(table + 1), gl.load(table + 2), gl.load(table + 3), gl.load(table + 4), num_groups)
    return (codes_ptr + word, scale_ptr + slots * 16, zero_ptr + slots * 16, order_ptr + slots), ends


@gluon.jit
def tables_of(tables, ends, i: gl.constexpr):
    """`strip_tables` from the first tile of the i-th width on, and how many there are."""
    codes_ptr, scale_ptr, zero_ptr, order_ptr = tables
    for j in gl.static_range(i):
        codes_ptr += 32 * WIDTHS[j] * (ends[j + 1] - ends[j])
    begin = ends[i]
    return (codes_ptr, scale_ptr + begin * 16, zero_ptr + begin * 16, order_ptr + begin), ends[i + 1] - begin


@gluon.jit
def fields(words, STEP: gl.constexpr, PLANE: gl.constexpr):
    """Words whose halves begin with the fields of columns 4 STEP to 4 STEP + 3 of each 16."""
    word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, words.type.layout)))[None, None, :]
    return words >> ((8 * STEP + word) // (2 * PLANE) * PLANE)


@gluon.jit
def among(words, bits, SHIFT: gl.constexpr, PLANE: gl.constexpr, AT: gl.constexpr):
    """The PLANE bits of both halves of words that begin at bit SHIFT, moved to bit AT, with `bits` around them. The
    last step, (words & mask) | bits, is one instruction where the mask is in a register; ptxas makes two of
    constants."""
    if SHIFT > AT:
        words = words >> (SHIFT - AT)
    if SHIFT < AT:
        words = words << (AT - SHIFT)
    mask = gl.full_like(words, (((1 << PLANE) - 1) << AT) * 0x10001)
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,r,r", [words, mask, bits], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def codes_of(low, high, STEP: gl.constexpr, LOWEST: gl.constexpr, MORE: gl.constexpr, BITS: gl.constexpr):
    """The codes that product STEP of a tile takes, two of each word, with BITS around them. high: the second plane, of
    MORE bits; not read where there is none."""
    code = fields(low, STEP, LOWEST)
    around = gl.full_like(code, BITS)
    if MORE > 0:
        # the same threads have them, in registers of another order
        around = among(gl.convert_layout(fields(high, STEP, MORE), code.type.layout), around, 0, MORE, LOWEST)
    return among(code, around, 0, LOWEST, 0)


@gluon.jit
def _columns(low, high, STEP: gl.constexpr, LOWEST: gl.constexpr, MORE: gl.constexpr):
    """Codes as fp32 [W, 16, 8, 2]."""
    code = codes_of(low, high, STEP, LOWEST, MORE, 0)
    both = gl.join(code & 0xFFFF, code >> 16) | 0x4B000000  # 2^23 and the code
    return both.to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def _weight(low, high, scale, zero, LOWEST: gl.constexpr, MORE: gl.constexpr):
    """Numbers of a tile of each warp, fp32 [W, 16, 64]."""
    W: gl.constexpr = gl.num_warps()
    even = gl.join(_columns(low, high, 0, LOWEST, MORE), _columns(low, high, 2, LOWEST, MORE))
    odd = gl.join(_columns(low, high, 1, LOWEST, MORE), _columns(low, high, 3, LOWEST, MORE))
    # [W, 16, half of a product, thread, of a pair, step // 2, step % 2]
    code = gl.reshape(gl.join(even, odd), [W, 16, 2, 4, 2, 2, 2])
    code = gl.reshape(gl.permute(code, (0, 1, 3, 5, 6, 2, 4)), [W, 16, 64])
    # a thread has 16 neighbouring columns: in registers of their order they are stored 16 bytes at a time
    ORDERED: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    code = gl.convert_layout(code, ORDERED)
    HERE: gl.constexpr = gl.SliceLayout(2, ORDERED)
    zero = gl.convert_layout(zero.to(gl.float32), HERE)
    scale = gl.convert_layout(scale.to(gl.float32), HERE)
    return (code - gl.expand_dims(zero, 2)) * gl.expand_dims(scale, 2)


@gluon.jit
def _store(out_ptr, value, strip, group, inside, num_rows, columns):
    """A tile of each warp. group, inside: [W], of the tile, and whether there is one."""
    HERE: gl.constexpr = gl.SliceLayout(2, value.type.layout)
    WARP: gl.constexpr = gl.SliceLayout(1, HERE)
    row = strip * 16 + gl.arange(0, 16, gl.SliceLayout(0, HERE))[None, :]
    at = row.to(gl.int64) * columns + gl.convert_layout(group, WARP)[:, None] * 64
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, value.type.layout)))[None, None, :]
    inside = gl.convert_layout(inside, WARP)[:, None] & (row < num_rows)
    at = gl.expand_dims(at, 2) + column
    gl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(inside, 2))


@gluon.jit
def _write_width(
    tables, count, out_ptr, strip, num_rows, columns, WIDTH: gl.constexpr, AHEAD: gl.constexpr, ROWS: gl.constexpr
):
    """The weight of a strip's tiles of one width."""
    W: gl.constexpr = gl.num_warps()
    LOWEST: gl.constexpr = 4 if WIDTH >= 4 else 2
    MORE: gl.constexpr = WIDTH - LOWEST
    warp = gl.arange(0, W, gl.SliceLayout(1, ROWS))
    lane = gl.arange(0, 16, gl.SliceLayout(0, ROWS))
    for first in range(0, count, W * AHEAD):
        low, high, scales, zeros, groups = load_tiles(tables, first + warp, lane, count, WIDTH, LOWEST, AHEAD)
        for ahead in gl.static_range(AHEAD):
            if MORE > 0:
                value = _weight(low[ahead], high[ahead], scales[ahead], zeros[ahead], LOWEST, MORE)
            else:
                value = _weight(low[ahead], low[ahead], scales[ahead], zeros[ahead], LOWEST, MORE)
            inside = first + ahead * W + warp < count
            _store(out_ptr, value, strip, groups[ahead], inside, num_rows, columns)


@gluon.jit
def packed_weight_kernel(
    codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, out_ptr, num_rows, num_groups, AHEAD: gl.constexpr
):
    """The weight of a strip; a warp takes every so many of its tiles."""
    W: gl.constexpr = gl.num_warps()
    # the rows of a tile as the threads have them that load its words
    ROWS: gl.constexpr = gl.SliceLayout(2, gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8]))
    strip = gl.program_id(0)
    whole, ends = strip_tables(codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, strip, num_groups)
    for i in gl.static_range(5):
        tables, count = tables_of(whole, ends, i)
        _write_width(tables, count, out_ptr, strip, num_rows, num_groups * 64, WIDTHS[i], AHEAD, ROWS)


class StripConfig(NamedTuple):
    """num_warps: of a program, which divide the tiles of a strip among them."""

    num_warps: int


def warps_of_strip(dims: dict[str, int], arch: Any, dtype: Any) -> StripConfig:
    """As many warps as a multiprocessor needs for the loads that are under way, where a strip has tiles for them."""
    able = [n for n in (4, 8, 16) if n == 4 or dims["groups"] >= n * WAVE]
    return StripConfig(next((n for n in able if dims["strips"] * n >= WARPS * arch.sms), able[-1]))


def scale_refused(scale: Any) -> list[str]:
    """Why these kernels do not read such scales."""
    return [] if scale.dtype == torch.float16 else [f"scale is {scale.dtype}; this kernel reads float16"]


WEIGHT_SPACE = Space(
    default=warps_of_strip,
    dims=lambda codes, scale, *rest: {"strips": scale.shape[0], "groups": scale.shape[1]},
    choices={"num_warps": (4, 8, 16)},
)


@register_kernel(
    "dequantize_packed", backend="hopper", rank=30, rejects=lambda call: scale_refused(call.scale), plans=rehearsed
)
@optimize_kernel(space=WEIGHT_SPACE)
def dequantize_packed(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor,
    strips: Tensor,
    rows: int,
    dtype: str = "float16",
    *,
    config: StripConfig,
) -> Tensor:
    return unpacked(codes, (scale, zero, order, strips), rows, OUTPUTS[dtype], config)


def unpacked(codes: Tensor, tables: tuple[Tensor, ...], rows: int, dtype: torch.dtype, config: StripConfig) -> Tensor:
    """The weight [rows, K] in dtype. tables: scale, zero, order and strips."""
    count, groups = tables[2].shape
    weight = codes.new_empty(rows, groups * GROUP, dtype=dtype)
    if weight.numel():
        launch(
            packed_weight_kernel, (count,), *(t.contiguous() for t in (codes, *tables)), weight, rows, groups,
            AHEAD=WAVE - 1, num_warps=config.num_warps, maxnreg=REGISTERS,
        )  # fmt: skip
    return weight
