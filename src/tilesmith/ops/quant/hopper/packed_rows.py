"""Products of a few rows with packed weights of mixed widths, by tensor cores, in Gluon.

A CTA multiplies some strips by a range of the inputs. x of that range lies in shared memory, and a warp takes one strip
at a time: which of the strip's tiles are in the range it finds out from their order. It loads BATCH tiles of one width
at once into registers, unpacks each once, and multiplies it by all rows of x, eight at a time. The sums of the ranges
are added by a second kernel.

Threads hold their registers by name, as in packed_row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.gluon.shim import gl, gluon, grid_dependency_wait, launch_dependents
from tilesmith.engine import launch
from tilesmith.ops.quant.hopper.packed import WIDTHS, magic
from tilesmith.ops.quant.hopper.packed_row import (
    _copy,
    _halves,
    _load_4,
    _load_pair,
    _load_tile,
    _mma,
    _of_lane,
    _operand,
    _planes,
    _store_2,
    _warp,
    _warp_sync,
    _words_before,
)

SEARCHED = 8  # times 32 slots of a strip are searched at once
HEAD = 32  # bytes before the tiles that a warp found: how many have up to 2, 3, 4 and 6 bits, and how many there are

_SEARCHED, _HEAD = gl.constexpr(SEARCHED), gl.constexpr(HEAD)


@gluon.constexpr_function
def batch_of(batch, width):
    """Tiles of a width that take as many registers as `batch` of 4 bits."""
    return batch if width <= 4 else max(1, batch * 4 // 8)


@gluon.jit
def _room(BYTES: gl.constexpr):
    """The address of BYTES of shared memory, Gluon's only allocation, of which static declarations could hold 48 KB."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    THREADS: gl.constexpr = 32 * gl.num_warps()
    lines = gl.allocate_shared_memory(
        gl.int32, [(BYTES + 4 * THREADS - 1) // (4 * THREADS), THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    lines.index(0).store(gl.zeros([THREADS], gl.int32, LINE))
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; // $1", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_int(at):
    return gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_2(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=f,=f,r", [at], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def _store_int(at, x, where):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, $1; }",
        "=r,r,r,r", [at, x, where.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ballot(where):
    """The lanes of the warp where it holds."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        "=r,r", [where.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _count(bits):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _warp_sum(x):
    return gl.inline_asm_elementwise(
        "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _barrier_of(threads):
    return f"cp.async.wait_all; barrier.sync 1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def _wait(at):
    """Wait until what all threads of the CTA have copied is there."""
    ASM: gl.constexpr = _barrier_of(32 * gl.num_warps())
    gl.inline_asm_elementwise(ASM, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _find_tiles(found, order_ptr, first, span, num_groups, ends, lane):
    """Write to shared memory which slots of a strip have groups from `first` to `first` + span, in their order: the
    slot, and the group less `first` times 2^16. The head counts them."""
    count = gl.full_like(lane, 0)
    before = (count, count, count, count)
    lower = (gl.full_like(lane, 1) << lane) - 1
    for start in range(0, num_groups, 32 * _SEARCHED):
        groups = ()
        for i in gl.static_range(_SEARCHED):
            slot = start + 32 * i + lane
            groups += (gl.load(order_ptr + slot, mask=slot < num_groups, other=-1).to(gl.int32) - first,)
        for i in gl.static_range(_SEARCHED):
            slot = start + 32 * i + lane
            inside = (groups[i] >= 0) & (groups[i] < span)
            votes = _ballot(inside)
            _store_int(found + _HEAD + (count + _count(votes & lower)) * 4, slot | (groups[i] << 16), inside)
            count += _count(votes)
            updated = ()
            for k in gl.static_range(4):
                updated += (before[k] + (inside & (slot < ends[k])).to(gl.int32),)
            before = updated
    for k in gl.static_range(4):
        _store_int(found + 4 * k, _warp_sum(before[k]), lane == 0)
    _store_int(found + 16, count, lane == 0)
    _warp_sync(found)


@gluon.jit
def _copy_inputs(base, x_ptr, x_row, first_token, num_tokens, first, span, thread, N: gl.constexpr):
    """Copy `span` groups of x of N rows to shared memory: [group, row, 64], where two rows' halves of 32 bytes do not
    fall on the same banks."""
    for piece in range(0, span * (8 * N), 32 * gl.num_warps()):
        i = piece + thread
        part, token, group = i & 7, i // 8 % N, i // (8 * N)
        row = gl.minimum(first_token + token, num_tokens - 1).to(gl.int64)
        source = x_ptr.to(gl.int64) + row * (x_row * 16) + ((first + group) * 128 + part * 16)
        _copy(base + group * (128 * N) + token * 128 + (part ^ (token & 1)) * 16, source, group < span)


@gluon.jit
def _inputs(places, at):
    """What the four products of a tile take of eight rows of x."""
    return _load_4(places[0] + at) + _load_4(places[1] + at)


@gluon.jit
def _add_inputs(places, totals, span, lane, N: gl.constexpr, dtype: gl.constexpr):
    """The sum of 64 inputs for each group and row: [group, row]. A warp takes every so many groups."""
    one = gl.full_like(lane, 0x3F803F80 if dtype == gl.bfloat16 else 0x3C003C00)
    none = gl.full_like(lane, 0).to(gl.float32)
    for group in range(_warp(), span, gl.num_warps()):
        for j in gl.static_range(N // 8):
            x = _inputs(places, group * (128 * N) + j * 1024)
            total = (none, none, none, none)
            for step in gl.static_range(4):
                total = _mma((one, one, one, one), x[2 * step], x[2 * step + 1], total, dtype)
            _store_2(totals + group * (4 * N) + j * 32 + lane * 8, total[0], total[1], lane < 4)


@gluon.jit
def _add_tile(
    sums, tile, pairs, group, places, totals, lane,
    WHICH: gl.constexpr, WIDTH: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """sums + x times a tile, of four whose scales and zeros are in `pairs` the one that is WHICH."""
    LOWEST: gl.constexpr = 4 if WIDTH >= 4 else 2
    FIELD: gl.constexpr = 3 if WIDTH == 3 else LOWEST
    APART: gl.constexpr = 2 if WIDTH == 2 else 4
    BESIDE: gl.constexpr = 2 if WIDTH == 6 else 0
    ONE: gl.constexpr = magic(dtype)[0]
    MAGIC: gl.constexpr = magic(dtype)[1]
    MAGIC_16: gl.constexpr = magic(dtype)[2]
    OFFSET: gl.constexpr = ONE * 17 if WIDTH == 8 else ONE
    none = gl.full_like(lane, 0).to(gl.float32)
    low, high = _planes(tile, lane, WIDTH)
    codes = ()
    for step in gl.static_range(4):
        codes += (_operand(low, high, step, APART, FIELD, BESIDE, MAGIC),)
        if WIDTH == 8:
            codes += (_operand(high, high, step, 4, 4, 0, MAGIC_16),)
    from_lane = (lane & 28) + WHICH
    scale_0, scale_8 = _halves(_of_lane(pairs[0], from_lane))
    zero_0, zero_8 = _halves(_of_lane(pairs[1], from_lane))
    zero_0, zero_8 = zero_0 + OFFSET, zero_8 + OFFSET
    added = ()
    for j in gl.static_range(N // 8):
        x = _inputs(places, group * (128 * N) + j * 1024)
        total_0, total_1 = _load_2(totals + (lane & 3) * 8 + group * (4 * N) + j * 32)
        part = (none, none, none, none)
        for step in gl.static_range(4):
            b0, b1 = x[2 * step], x[2 * step + 1]
            if WIDTH == 8:
                part = _mma(codes[2 * step], b0, b1, part, dtype)
                part = _mma(codes[2 * step + 1], b0, b1, part, dtype)
            else:
                part = _mma(codes[step], b0, b1, part, dtype)
        added += (
            sums[4 * j] + (part[0] - total_0 * zero_0) * scale_0,
            sums[4 * j + 1] + (part[1] - total_1 * zero_0) * scale_0,
            sums[4 * j + 2] + (part[2] - total_0 * zero_8) * scale_8,
            sums[4 * j + 3] + (part[3] - total_1 * zero_8) * scale_8,
        )
    return added


@gluon.jit
def _begin(fresh, places, totals, span, lane, N: gl.constexpr, dtype: gl.constexpr):
    """The first time, wait for x and add its groups up."""
    if fresh != 0:
        _wait(totals)
        _add_inputs(places, totals, span, lane, N, dtype)
        _wait(totals)


@gluon.jit
def _add_width(
    sums, fresh, at, tables, found, first, end, places, totals, span, lane,
    WIDTH: gl.constexpr, BATCH: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """sums + x times the tiles of one width, found from `first` to `end`. at: address of the codes if slots from 0 on
    had this width."""
    scale_at, zero_at = tables
    for i in range(first, end, BATCH):
        tiles, pairs = (), ()
        for b in gl.static_range(BATCH):
            slot = _load_int(found + _HEAD + gl.minimum(i + b, end - 1) * 4) & 0xFFFF
            tiles += (_load_tile(at + slot * (128 * WIDTH), lane, WIDTH),)
        for b in gl.static_range((BATCH + 3) // 4):
            which = gl.minimum(i + 4 * b + (lane & 3), end - 1)
            slot = (_load_int(found + _HEAD + which * 4) & 0xFFFF) * 32
            pairs += ((_load_pair(scale_at + slot), _load_pair(zero_at + slot)),)
        _begin(fresh, places, totals, span, lane, N, dtype)
        fresh = fresh * 0
        for b in gl.static_range(BATCH):
            if i + b < end:
                group = _load_int(found + _HEAD + (i + b) * 4) >> 16
                sums = _add_tile(sums, tiles[b], pairs[b // 4], group, places, totals, lane, b % 4, WIDTH, N, dtype)
    return sums, fresh


@gluon.jit
def _store(y_ptr, sums, strip, first_token, num_tokens, num_rows, lane, N: gl.constexpr):
    row = strip * 16 + (lane >> 2)
    for j in gl.static_range(N // 8):
        for i in gl.static_range(4):
            token = first_token + 8 * j + (lane & 3) * 2 + i % 2
            inside = (token < num_tokens) & (row + i // 2 * 8 < num_rows)
            at = token.to(gl.int64) * num_rows + (row + i // 2 * 8)
            gl.store(y_ptr + at, sums[4 * j + i].to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _strip_sums(
    fresh, codes_ptr, scale_ptr, zero_ptr, order_ptr, table, found, slots, num_groups, places, totals, first, span, lane,
    BATCH: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The product of N rows and a strip's tiles of `span` groups from `first` on. table: pointer to the strip's row;
    slots: of all strips before."""
    codes_at = (codes_ptr + gl.load(table)).to(gl.int64)
    ends = gl.load(table + 1), gl.load(table + 2), gl.load(table + 3), gl.load(table + 4)
    _warp_sync(found)
    _find_tiles(found, order_ptr + slots, first, span, num_groups, ends, lane)
    place = slots * 32 + (lane >> 2) * 2
    tables = scale_ptr.to(gl.int64) + place, zero_ptr.to(gl.int64) + place
    none = gl.full_like(lane, 0).to(gl.float32)
    sums = ()
    for _ in gl.static_range(N // 2):
        sums += (none,)
    low = fresh * 0
    for i in gl.static_range(5):
        high = _load_int(found + 4 * i)
        slot = fresh * 0
        if i > 0:
            slot = ends[i - 1]
        at = codes_at + (_words_before(ends, slot) * 4 - slot * (128 * WIDTHS[i]))
        sums, fresh = _add_width(
            sums, fresh, at, tables, found, low, high, places, totals, span, lane,
            WIDTHS[i], batch_of(BATCH, WIDTHS[i]), N, dtype,
        )  # fmt: skip
        low = high
    return sums, fresh


@gluon.jit(do_not_specialize=["num_tokens", "num_rows", "num_groups", "num_strips", "x_row", "each", "span"])
def packed_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr,
    num_tokens, num_rows, num_groups, num_strips, x_row, each, span,
    N: gl.constexpr, BATCH: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """y of N rows of x, of `each` strips, and of `span` groups of inputs, at most SPAN: y [parts, tokens, outputs].
    x_row: distance of x's rows in units of 16 bytes."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    W: gl.constexpr = gl.num_warps()
    X: gl.constexpr = SPAN * 128 * N
    TOTALS: gl.constexpr = SPAN * 4 * N
    FOUND: gl.constexpr = _HEAD + (SPAN + 8) * 4
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    base = _room(X + TOTALS + W * FOUND)
    warp = _warp()
    thread = gl.arange(0, 32 * W, LANES)
    lane = thread & 31
    first_token = gl.program_id(0) * N
    first = gl.program_id(1) * span
    span = gl.minimum(span, num_groups - first)
    launch_dependents()
    grid_dependency_wait()
    _wait(base)  # the zeros that Gluon stored
    _copy_inputs(base, x_ptr, x_row, first_token, num_tokens, first, span, thread, N)
    y_ptr += gl.program_id(1).to(gl.int64) * num_tokens * num_rows
    place = base + (lane >> 2) * 128
    part = ((lane & 3) * 2 ^ (lane >> 2 & 1)) * 16
    places = place + part, place + (part ^ 16)
    totals = base + X
    found = base + (X + TOTALS) + warp * FOUND
    fresh = warp * 0 + 1
    begin = gl.program_id(2) * each
    for strip in range(begin + warp, gl.minimum(begin + each, num_strips), W):
        sums, fresh = _strip_sums(
            fresh, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr + strip * 5, found, strip.to(gl.int64) * num_groups,
            num_groups, places, totals, first, span, lane, BATCH, N, dtype,
        )  # fmt: skip
        _store(y_ptr, sums, strip, first_token, num_tokens, num_rows, lane, N)
    _begin(fresh, places, totals, span, lane, N, dtype)


@gluon.jit(do_not_specialize=["count"])
def add_parts_kernel(parts_ptr, y_ptr, count, PARTS: gl.constexpr, BLOCK: gl.constexpr):
    """y [count], the sums of parts [PARTS, count]."""
    LINE: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    launch_dependents()
    grid_dependency_wait()
    at = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, LINE)
    parts = ()
    for p in gl.static_range(PARTS):
        parts += (gl.load(parts_ptr + p * count.to(gl.int64) + at, mask=at < count, other=0.0),)
    y = parts[0]
    for p in gl.static_range(1, PARTS):
        y += parts[p]
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


class RowsShape(NamedTuple):
    """How the product lies on the device. rows: of x that a CTA multiplies; strips: of a CTA; span: groups of a CTA;
    batch: tiles that a warp loads at once."""

    rows: int
    strips: int
    span: int
    num_warps: int = 16
    batch: int = 4
    registers: int = 128


def rows_product(x: Tensor, x_row: int, packed: tuple[Tensor, ...], y: Tensor, shape: RowsShape) -> None:
    """x: rows [M, K] at distances of x_row units of 16 bytes, aligned to 16 bytes. packed: codes, scale, zero, order,
    strips, contiguous. y: [..., N], contiguous."""
    (tokens, outputs), (strips, groups) = (x.shape[0], y.shape[-1]), packed[3].shape
    parts = -(-groups // shape.span)
    to = y if parts == 1 else y.new_empty(parts, tokens, outputs, dtype=torch.float32)
    launch(
        packed_rows_kernel, (-(-tokens // shape.rows), parts, -(-strips // shape.strips)), x, *packed, to,
        tokens, outputs, groups, strips, x_row, shape.strips, shape.span,
        N=shape.rows, BATCH=shape.batch, SPAN=shape.span, num_warps=shape.num_warps, maxnreg=shape.registers,
        launch_pdl=True,
    )  # fmt: skip
    if parts > 1:
        count = tokens * outputs
        launch(
            add_parts_kernel, (-(-count // 512),), to, y, count, PARTS=parts, BLOCK=512, num_warps=4, launch_pdl=True
        )
