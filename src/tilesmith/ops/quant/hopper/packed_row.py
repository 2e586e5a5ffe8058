"""Products of one row with packed weights of mixed widths, by tensor cores, in Gluon.

The tiles of a strip are divided among the warps of a CTA in the order of their slots. A warp loads BATCH tiles of one
width at once into registers, 16 bytes a thread, and then multiplies them. It loads nothing ahead: the other warps of
the multiprocessor, 28 to 32 of them, keep memory busy meanwhile. Where the strips are few enough, all CTAs run at once,
evenly spread (`row_shape`). docs/log/adaptive-precision.md has what was slower.

Threads hold their registers by name: a tensor here has one number a thread. Threads g and t are those of mma: 4 g + t
in a warp. What a warp decides for itself (`_warp`) is a scalar to the compiler, which then branches by it.
"""

from functools import cache
from typing import NamedTuple

from torch import Tensor

from tilesmith.device.gluon.shim import gl, gluon, grid_dependency_wait, launch_dependents, reserve_smem, syncthreads
from tilesmith.engine import launch
from tilesmith.ops.quant.hopper.packed import WIDTHS, among, magic
from tilesmith.ops.quant.hopper.packed_ptx import (
    copy_async,
    load_4,
    mma_of_warp,
    of_lane,
    store_2,
    two_halves,
    warp_number,
    warp_sync,
)

BATCH = 4  # tiles that a warp loads at once; each of the four threads of a row loads the scale and zero of one
CHUNK = 16  # tiles of a warp whose part of x is in shared memory at a time
RESIDENT = 32  # warps of a multiprocessor with 64 registers a thread
MOST_STATIC = 48 * 1024  # bytes of shared memory that a kernel can declare
WHOLE_SMEM = 228 * 1024  # of a multiprocessor
SYSTEM_SMEM = 1024  # that the driver adds to each CTA


@gluon.jit
def _wait(at):
    """Wait until all that the warp's threads have copied is there, for all of them. ptxas moves no load across the
    first barrier: those before it are under way when the warp begins to wait."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; cp.async.wait_all; bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_1(at):
    return gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _selected(first, second):
    """Of each four bits the lower two of the first word and the upper two of the second."""
    mask = gl.full_like(first, 0x33333333)
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xca;", "=r,r,r,r", [mask, first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _joined(low, high):
    """The planes of 2 and 1 bits as one whose fields of 3 bits lie 4 apart, as those of a plane of 4 bits do."""
    first, second = _selected(low[0], high[0] << 2), _selected(low[1], high[1] << 2)
    return first, second, _selected(low[0] >> 2, high[0]), _selected(low[1] >> 2, high[1])


@gluon.jit
def _load_plane(at, lane, PLANE: gl.constexpr):
    """A thread's words of a plane at an address. Not ld.global.nc, which ptxas would move to where they are used."""
    if PLANE == 4:
        words = gl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [at + lane * 16],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:  # of 1 bit two threads have the same words
        place = lane * 8 if PLANE == 2 else (lane & 28) * 4 + (lane & 1) * 8
        words = gl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at + place],
            dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@gluon.jit
def load_tile(at, lane, WIDTH: gl.constexpr):
    """A thread's words of the planes of a tile at an address."""
    LOWEST: gl.constexpr = 4 if WIDTH >= 4 else 2
    tile = (_load_plane(at, lane, LOWEST),)
    if WIDTH > LOWEST:
        tile += (_load_plane(at + 128 * LOWEST, lane, WIDTH - LOWEST),)
    return tile


@gluon.jit
def _load_pair(at):
    """Two fp16 numbers, 8 apart, as a word."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; ld.global.b16 a, [$1]; ld.global.b16 b, [$1 + 16]; mov.b32 $0, {a, b}; }",
        "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_pairs(scale_ptr, zero_ptr, place, first, end, lane):
    """Scales and zeros of rows g and g + 8 of four tiles, those of slot first + t with thread t. place: bytes before
    those of slot 0."""
    at = place + gl.minimum(first + (lane & 3), end - 1) * 32
    return _load_pair(scale_ptr.to(gl.int64) + at), _load_pair(zero_ptr.to(gl.int64) + at)


@gluon.jit
def planes_of(tile, lane, WIDTH: gl.constexpr):
    """Words of both planes of a tile: of rows g and g + 8, first and second half of a product. WIDTH 3: fields of 3
    bits; without a second plane the first again."""
    low, high = tile[0], tile[len(tile) - 1]
    if WIDTH < 4:
        low = (low[0], low[1], low[0], low[1])
    if WIDTH == 6:
        high = (high[0], high[1], high[0], high[1])
    if WIDTH == 3:  # in the words of threads 2 and 3 of four fields lie one bit higher
        low = _joined(low, (high[0] >> (lane >> 1 & 1), high[1] >> (lane >> 1 & 1)))
        high = low
    return low, high


@gluon.jit
def operand_of(
    low, high, STEP: gl.constexpr, APART: gl.constexpr, LOWEST: gl.constexpr, BESIDE: gl.constexpr, BITS: gl.constexpr
):
    """The four registers of codes of product STEP of a tile, with BITS around each. APART: bits from one field of the
    first plane to that of the next product or half of it."""
    found = ()
    for i in gl.static_range(4):
        around = gl.full_like(low[i], BITS)
        if BESIDE > 0:
            around = among(high[i], around, 4 * STEP + i // 2 * 2, BESIDE, LOWEST)
        found += (among(low[i], around, 4 * STEP + (0 if APART == 4 else i // 2 * 2), LOWEST, 0),)
    return found


@gluon.jit
def _add_tile(sums, tile, pairs, x_at, lane, WHICH: gl.constexpr, WIDTH: gl.constexpr, dtype: gl.constexpr):
    """sums + x times a tile, of four whose scales and zeros are in `pairs` the one that is WHICH. sums: of rows g and
    g + 8. x_at: address of a thread's 8 words of x. All columns of a product are the same row."""
    LOWEST: gl.constexpr = 4 if WIDTH >= 4 else 2
    FIELD: gl.constexpr = 3 if WIDTH == 3 else LOWEST
    APART: gl.constexpr = 2 if WIDTH == 2 else 4
    BESIDE: gl.constexpr = 2 if WIDTH == 6 else 0  # bits of the second plane in one number with those of the first
    ONE: gl.constexpr = magic(dtype)[0]
    MAGIC: gl.constexpr = magic(dtype)[1]
    MAGIC_16: gl.constexpr = magic(dtype)[2]
    OFFSET: gl.constexpr = ONE * 17 if WIDTH == 8 else ONE
    one = gl.full_like(lane, 0x3F803F80 if dtype == gl.bfloat16 else 0x3C003C00)
    none = gl.full_like(sums[0], 0.0)
    part, total = (none, none, none, none), (none, none, none, none)
    x = load_4(x_at) + load_4(x_at + 16)
    low, high = planes_of(tile, lane, WIDTH)
    for step in gl.static_range(4):
        b0, b1 = x[2 * step], x[2 * step + 1]
        part = mma_of_warp(operand_of(low, high, step, APART, FIELD, BESIDE, MAGIC), b0, b1, part, dtype)
        if WIDTH == 8:
            part = mma_of_warp(operand_of(high, high, step, 4, 4, 0, MAGIC_16), b0, b1, part, dtype)
        total = mma_of_warp((one, one, one, one), b0, b1, total, dtype)
    from_lane = (lane & 28) + WHICH
    scale_0, scale_8 = two_halves(of_lane(pairs[0], from_lane))
    zero_0, zero_8 = two_halves(of_lane(pairs[1], from_lane))
    first = sums[0] + (part[0] - total[0] * (zero_0 + OFFSET)) * scale_0
    second = sums[1] + (part[2] - total[0] * (zero_8 + OFFSET)) * scale_8
    return first, second


@gluon.jit
def _width_sums(
    sums, at, scale_ptr, zero_ptr, place, x_at, first, end, lane,
    WIDTH: gl.constexpr, BATCH: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """sums + x times the tiles of one width from slot `first` to `end`. at: address of the codes if slots from 0 on had
    this width; x_at: of a thread's x of slot 0."""
    for slot in range(first, end, BATCH):
        tiles = ()
        for b in gl.static_range(BATCH):
            tiles += (load_tile(at + gl.minimum(slot + b, end - 1) * (128 * WIDTH), lane, WIDTH),)
        pairs = _load_pairs(scale_ptr, zero_ptr, place, slot, end, lane)
        _wait(x_at)  # for x, in the first turn
        for b in gl.static_range(BATCH):
            if slot + b < end:
                sums = _add_tile(sums, tiles[b], pairs, x_at + (slot + b) * 128, lane, b, WIDTH, dtype)
    return sums


@gluon.jit
def _copy_inputs(room, x_ptr, order_ptr, begin, end, lane, CHUNK: gl.constexpr):
    """Copy the 64 inputs of each slot from `begin` to `end`, at most CHUNK, eight threads one's."""
    part = (lane & 7) * 16
    for i in gl.static_range(CHUNK // 4):
        slot = begin + 4 * i + (lane >> 3)
        group = gl.load(order_ptr + gl.minimum(slot, end - 1)).to(gl.int64)
        copy_async(room + (slot - begin) * 128 + part, x_ptr.to(gl.int64) + group * 128 + part, slot < end)


@gluon.jit
def words_before(ends, slot):
    """Words of a strip before a slot; ends: of the slots of up to 2, 3, 4 and 6 bits."""
    fewer = gl.minimum(slot, ends[0]) + gl.minimum(slot, ends[1])
    return 32 * (8 * slot - fewer - 2 * (gl.minimum(slot, ends[2]) + gl.minimum(slot, ends[3])))


@gluon.jit
def _store(y_ptr, sums, base, strip, num_rows, thread):
    """Add the sums of the warps and store them; those of rows g and g + 8 lie side by side in shared memory."""
    W: gl.constexpr = gl.num_warps()
    warp = warp_number()
    lane = thread & 31
    syncthreads()  # no warp reads its x any more
    store_2(base + (warp * 16 + (lane >> 2) * 2) * 4, sums[0], sums[1], lane & 3 == 0)
    syncthreads()
    if warp == 0:
        element = gl.minimum(thread, 15)
        y = _load_1(base + element * 4)
        for i in gl.static_range(1, W):
            y += _load_1(base + element * 4 + i * 64)
        row = strip * 16 + (element >> 1) + ((element & 1) << 3)
        gl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=(thread < 16) & (row < num_rows))


@gluon.jit(do_not_specialize=["num_rows", "num_groups", "each"])
def packed_row_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr, num_rows, num_groups, each,
    BATCH: gl.constexpr, CHUNK: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """y of one row of x and the 16 outputs of a strip. Each warp takes `each` of its tiles, CHUNK at a time. ROOM:
    bytes of shared memory, at least 128 for each of a chunk."""
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    base = reserve_smem(ROOM, 128, "")
    strip = gl.program_id(0)
    warp = warp_number()
    thread = gl.arange(0, 32 * gl.num_warps(), LANES)
    lane = thread & 31
    room = base + warp * (CHUNK * 128)
    first, last = warp * each, gl.minimum((warp + 1) * each, num_groups)
    launch_dependents()
    grid_dependency_wait()
    slots = strip.to(gl.int64) * num_groups
    place = slots * 32 + (lane >> 2) * 2
    table = strips_ptr + strip * 5
    codes_at = (codes_ptr + gl.load(table)).to(gl.int64)
    ends = gl.load(table + 1), gl.load(table + 2), gl.load(table + 3), gl.load(table + 4)
    none = gl.full_like(lane, 0).to(gl.float32)
    sums = none, none
    for begin in range(first, last, CHUNK):
        end = gl.minimum(begin + CHUNK, last)
        warp_sync(room)  # no thread reads x of the chunk before
        _copy_inputs(room, x_ptr, order_ptr + slots, begin, end, lane, CHUNK)
        x_at = room - begin * 128 + (lane & 3) * 32
        low = begin
        for i in gl.static_range(5):
            high = end
            if i < 4:
                high = gl.minimum(ends[i], end)
            at = codes_at + (words_before(ends, low) * 4 - low * (128 * WIDTHS[i]))
            sums = _width_sums(
                sums, at, scale_ptr, zero_ptr, place, x_at, low, high, lane, WIDTHS[i],
                BATCH // 2 if WIDTHS[i] == 8 else BATCH, dtype,
            )  # fmt: skip
            low = gl.maximum(low, high)
    _store(y_ptr, sums, room - warp_number() * (CHUNK * 128), strip, num_rows, thread)


class RowShape(NamedTuple):
    """How CTAs of this kernel lie on the device. registers: at most, of a thread. room: bytes of shared memory."""

    registers: int
    room: int


@cache
def row_shape(strips: int, num_warps: int, sms: int) -> RowShape:
    """Registers and shared memory of CTAs of `num_warps` warps, with which a multiprocessor holds its share of the
    strips and no more: else some hold many and others none."""
    share = -(-strips // max(1, sms))
    most = max(1, min(share, RESIDENT // num_warps))
    registers = min(128, 2048 // (num_warps * most) // 8 * 8)
    room = num_warps * CHUNK * 128
    reserved = WHOLE_SMEM // (share + 1) - SYSTEM_SMEM + 128  # a share and one more do not fit
    if most == share and room < reserved <= MOST_STATIC:
        room = reserved // 128 * 128
    return RowShape(registers, room)


def warps_of_row(strips: int, groups: int, sms: int) -> int:
    """Warps of a CTA: so many that all strips' run at once, if they can, and that each has tiles enough to load."""
    share = -(-strips // max(1, sms))
    return next((n for n in (16, 8) if n * share <= RESIDENT and groups >= n * BATCH), 4)


def row_product(x: Tensor, packed: tuple[Tensor, ...], y: Tensor, num_warps: int, sms: int) -> None:
    """x: the row, contiguous and aligned to 16 bytes. packed: codes, scale, zero, order, strips, contiguous. y: the
    result's row."""
    strips, groups = packed[3].shape
    shape = row_shape(strips, num_warps, sms)
    launch(
        packed_row_kernel, (strips,), x, *packed, y, y.shape[-1], groups, -(-groups // num_warps),
        BATCH=BATCH, CHUNK=CHUNK, ROOM=shape.room, num_warps=num_warps, maxnreg=shape.registers, launch_pdl=True,
    )  # fmt: skip
