"""Products of a few rows with packed weights of mixed widths, by tensor cores, in Gluon.

The CTAs of a cluster divide the inputs among them. Each copies its range of x, of up to 32 rows, to shared memory, and
each of its warps takes a strip: from the strip's order it finds which tiles are in the range. It loads a batch of them
into registers while it multiplies the one before. A tile is unpacked once and multiplied by all rows, eight at a time.
In the end the cluster's CTAs read each other's sums from shared memory and add them in a fixed order.

Threads hold their registers by name, as in packed_row. `packed_plan` chooses the form.
"""

from torch import Tensor

from tilesmith.device.gluon.shim import gl, gluon, grid_dependency_wait, launch_dependents
from tilesmith.engine import launch
from tilesmith.ops.quant.hopper.packed import WIDTHS, magic
from tilesmith.ops.quant.hopper.packed_plan import BATCH_OF, HEAD, LINE, REGISTERS, RowsShape, room_of
from tilesmith.ops.quant.hopper.packed_ptx import (
    copy_async,
    load_4,
    load_int,
    mma_of_warp,
    of_lane,
    room_of_cta,
    store_2,
    store_float,
    two_halves,
    wait_for_copies,
    warp_number,
    warp_sync,
)
from tilesmith.ops.quant.hopper.packed_row import load_tile, operand_of, planes_of, words_before

SEARCHED = 8  # times 32 slots of a strip are searched at once

_SEARCHED, _HEAD, _LINE = gl.constexpr(SEARCHED), gl.constexpr(HEAD), gl.constexpr(LINE)


@gluon.constexpr_function
def batch_of(batch, width):
    """Tiles of a width that a warp loads at once, where it loads `batch` of up to 4 bits: half as many of more."""
    return batch if width <= 4 else batch // 2


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
def _load_half(at):
    """16 bits as a word; not packed with others, which would wait for them."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a; ld.global.b16 a, [$1]; cvt.u32.u16 $0, a; }",
        "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_of(at, cta):
    """fp32 at the address of another CTA of the cluster that is `at` in this one."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; ld.shared::cluster.b32 $0, [there]; }",
        "=f,r,r", [at, at * 0 + cta], dtype=gl.float32, is_pure=False, pack=1,
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


@gluon.jit
def _find_tiles(found, order_ptr, first, span, num_groups, ends, lane):
    """Write to shared memory which slots of a strip have groups from `first` to `first` + span, in their order: the
    slot, and the group less `first` times 2^16. ends: of the slots of up to 2, 3, 4 and 6 bits."""
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
    for k in gl.static_range(5):
        up_to = count
        if k < 4:
            up_to = _warp_sum(before[k])
        _store_int(found + 4 * k, up_to, lane == 0)
        slot = gl.to_tensor(0)
        if k > 0:
            slot = ends[k - 1]
        # of slot 0 if it had this width
        _store_int(found + 20 + 4 * k, lane * 0 + (words_before(ends, slot) * 4 - slot * (128 * WIDTHS[k])), lane == 0)
    warp_sync(found)


@gluon.jit
def _copy_inputs(base, x_ptr, x_row, first_token, num_tokens, first, span, thread, N: gl.constexpr):
    """Copy `span` groups of x of N rows to shared memory: [group, row, 64], where two rows' halves of 32 bytes do not
    fall on the same banks."""
    for piece in range(0, span * (8 * N), 32 * gl.num_warps()):
        i = piece + thread
        part, token, group = i & 7, i // 8 % N, i // (8 * N)
        row = gl.minimum(first_token + token, num_tokens - 1).to(gl.int64)
        source = x_ptr.to(gl.int64) + row * (x_row * 16) + ((first + group) * 128 + part * 16)
        copy_async(base + group * (128 * N) + token * 128 + (part ^ (token & 1)) * 16, source, group < span)


@gluon.jit
def _inputs(at, J: gl.constexpr):
    """What the four products of a tile take of the J-th eight rows of x. at: of the two parts of a thread."""
    return load_4(at[0] + J * 1024) + load_4(at[1] + J * 1024)


@gluon.jit
def _add_inputs(place, totals, span, lane, N: gl.constexpr, dtype: gl.constexpr):
    """The sum of 64 inputs for each group and row: [group, row]. A warp takes every so many groups."""
    one = gl.full_like(lane, 0x3F803F80 if dtype == gl.bfloat16 else 0x3C003C00)
    none = gl.full_like(lane, 0).to(gl.float32)
    for group in range(warp_number(), span, gl.num_warps()):
        at = place + group * (128 * N)
        for j in gl.static_range(N // 8):
            x = _inputs((at, at ^ 16), j)
            total = (none, none, none, none)
            for step in gl.static_range(4):
                total = mma_of_warp((one, one, one, one), x[2 * step], x[2 * step + 1], total, dtype)
            store_2(totals + group * (4 * N) + j * 32 + lane * 8, total[0], total[1], lane < 4)


@gluon.jit
def _add_tile(
    sums, tile, pairs, group, place, totals, lane,
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
    low, high = planes_of(tile, lane, WIDTH)
    codes = ()
    for step in gl.static_range(4):
        codes += (operand_of(low, high, step, APART, FIELD, BESIDE, MAGIC),)
        if WIDTH == 8:
            codes += (operand_of(high, high, step, 4, 4, 0, MAGIC_16),)
    from_lane = (lane & 28) + WHICH
    scale_0, scale_8 = two_halves(of_lane(pairs[0], from_lane))
    zero_0, zero_8 = two_halves(of_lane(pairs[1], from_lane))
    zero_0, zero_8 = zero_0 + OFFSET, zero_8 + OFFSET
    added = ()
    at = place + group * (128 * N)
    total_at = totals + (lane & 3) * 8 + group * (4 * N)
    for j in gl.static_range(N // 8):
        x = _inputs((at, at ^ 16), j)
        total_0, total_1 = _load_2(total_at + j * 32)
        part = (none, none, none, none)
        for step in gl.static_range(4):
            b0, b1 = x[2 * step], x[2 * step + 1]
            if WIDTH == 8:
                part = mma_of_warp(codes[2 * step], b0, b1, part, dtype)
                part = mma_of_warp(codes[2 * step + 1], b0, b1, part, dtype)
            else:
                part = mma_of_warp(codes[step], b0, b1, part, dtype)
        added += (
            sums[4 * j] + (part[0] - total_0 * zero_0) * scale_0,
            sums[4 * j + 1] + (part[1] - total_1 * zero_0) * scale_0,
            sums[4 * j + 2] + (part[2] - total_0 * zero_8) * scale_8,
            sums[4 * j + 3] + (part[3] - total_1 * zero_8) * scale_8,
        )
    return added


@gluon.jit
def _begin(fresh, place, totals, span, lane, N: gl.constexpr, dtype: gl.constexpr):
    """The first time, wait for x and add its groups up."""
    if fresh != 0:
        wait_for_copies(totals)
        _add_inputs(place, totals, span, lane, N, dtype)
        wait_for_copies(totals)


@gluon.jit
def _load_batch(at, tables, found, first, end, lane, WIDTH: gl.constexpr, BATCH: gl.constexpr):
    """BATCH tiles of one width, found from `first` to `end`, on their way to registers: words, and the scales and
    zeros of rows g and g + 8 of tile t, with thread t. From `end` on the last is loaded again."""
    tiles = ()
    for b in gl.static_range(BATCH):
        entry = load_int(found + _HEAD + gl.minimum(first + b, end - 1) * 4)
        tiles += (load_tile(at + (entry & 0xFFFF) * (128 * WIDTH), lane, WIDTH),)
    which = gl.minimum(first + (lane & 3), end - 1)
    place = tables[2] + (load_int(found + _HEAD + which * 4) & 0xFFFF) * 32
    scale_at, zero_at = tables[0] + place, tables[1] + place
    halves = _load_half(scale_at), _load_half(scale_at + 16), _load_half(zero_at), _load_half(zero_at + 16)
    warp_sync(found)  # ptxas moves no load across it
    return tiles, halves


@gluon.jit
def _add_batch(
    sums, batch, found, first, end, place, totals, lane,
    WIDTH: gl.constexpr, BATCH: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """sums + x times what `_load_batch` loaded, two tiles at a time; those from `end` on have the scale 0."""
    tiles, halves = batch
    inside = first + (lane & 3) < end
    scales = gl.where(inside, halves[0] | (halves[1] << 16), 0)
    pairs = scales, halves[2] | (halves[3] << 16)
    for b in gl.static_range(BATCH):
        group = load_int(found + _HEAD + gl.minimum(first + b, end - 1) * 4) >> 16
        sums = _add_tile(sums, tiles[b], pairs, group, place, totals, lane, b, WIDTH, N, dtype)
    return sums


@gluon.jit
def _add_width(
    sums, fresh, at, tables, found, first, end, place, totals, span, lane,
    WIDTH: gl.constexpr, BATCH: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """sums + x times the tiles of one width, found from `first` to `end`. at: address of the codes if slots from 0 on
    had this width. While a batch is multiplied the next is on its way; two of them take turns by name, since a register
    that a load is on its way to cannot be moved."""
    if first < end:
        one = _load_batch(at, tables, found, first, end, lane, WIDTH, BATCH)
        _begin(fresh, place, totals, span, lane, N, dtype)
        fresh = fresh * 0
        for i in range(first, end, 2 * BATCH):
            other = _load_batch(at, tables, found, i + BATCH, end, lane, WIDTH, BATCH)
            sums = _add_batch(sums, one, found, i, end, place, totals, lane, WIDTH, BATCH, N, dtype)
            one = _load_batch(at, tables, found, i + 2 * BATCH, end, lane, WIDTH, BATCH)
            sums = _add_batch(sums, other, found, i + BATCH, end, place, totals, lane, WIDTH, BATCH, N, dtype)
    return sums, fresh


@gluon.jit
def _strip_sums(
    fresh, codes_ptr, scale_ptr, zero_ptr, order_ptr, table, found, slots, num_groups, place, totals, first, span, lane,
    BATCH: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The product of N rows and a strip's tiles of `span` groups from `first` on. table: pointer to the strip's row;
    slots: of all strips before."""
    codes_at = (codes_ptr + gl.load(table)).to(gl.int64)
    ends = gl.load(table + 1), gl.load(table + 2), gl.load(table + 3), gl.load(table + 4)
    warp_sync(found)
    _find_tiles(found, order_ptr + slots, first, span, num_groups, ends, lane)
    # int32: codes have fewer than 2^31 words, 64 and more for each 32 bytes of a table
    tables = scale_ptr.to(gl.int64), zero_ptr.to(gl.int64), slots.to(gl.int32) * 32 + (lane >> 2) * 2
    none = gl.full_like(lane, 0).to(gl.float32)
    sums = ()
    for _ in gl.static_range(N // 2):
        sums += (none,)
    low = fresh * 0
    for i in gl.static_range(5):
        high = load_int(found + 4 * i)
        sums, fresh = _add_width(
            sums, fresh, codes_at + load_int(found + 20 + 4 * i), tables, found, low, high, place, totals, span, lane,
            WIDTHS[i], batch_of(BATCH, WIDTHS[i]), N, dtype,
        )  # fmt: skip
        low = high
    return sums, fresh


@gluon.jit
def store_sums(to, sums, lane, N: gl.constexpr):
    """Store a warp's sums in shared memory, [N, 16], rows 80 bytes apart, so that no two threads meet in a bank."""
    for j in gl.static_range(N // 8):
        for i in gl.static_range(4):
            token = 8 * j + (lane & 3) * 2 + i % 2
            store_float(to + token * _LINE + ((lane >> 2) + i // 2 * 8) * 4, sums[4 * j + i])


@gluon.jit
def add_parts(
    y_ptr, base, part, first_strip, strips, first_token, num_tokens, num_rows, thread,
    N: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Add what the CTAs of the cluster have in shared memory, in their order, each CTA its share of the outputs."""
    W: gl.constexpr = gl.num_warps()
    AT_ONCE: gl.constexpr = max(1, 8 // PARTS)
    outputs = strips * 16
    count = gl.minimum(N, num_tokens - first_token) * outputs
    share = (count + PARTS - 1) // PARTS
    end = gl.minimum((part + 1) * share, count)
    for begin in range(part * share, end, 32 * W * AT_ONCE):
        found = ()
        for k in gl.static_range(AT_ONCE):
            i = gl.minimum(begin + 32 * W * k + thread, end - 1)
            at = base + i % outputs // 16 * (N * _LINE) + i // outputs * _LINE + (i & 15) * 4
            for p in gl.static_range(PARTS):
                found += (_load_of(at, p),)
        for k in gl.static_range(AT_ONCE):
            i = begin + 32 * W * k + thread
            total = found[PARTS * k]
            for p in gl.static_range(1, PARTS):
                total += found[PARTS * k + p]
            row = first_strip * 16 + i % outputs
            place = (first_token + i // outputs).to(gl.int64) * num_rows + row
            gl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=(i < end) & (row < num_rows))


@gluon.constexpr_function
def _together_of(parts, threads):
    if parts == 1:
        return f"barrier.sync 1, {threads}; mov.b32 $0, $1;"
    return "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;"


@gluon.jit
def together(at, PARTS: gl.constexpr):
    """Wait until all threads of the cluster are here, and see what they have stored."""
    ASM: gl.constexpr = _together_of(PARTS, 32 * gl.num_warps())
    gl.inline_asm_elementwise(ASM, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["num_tokens", "num_rows", "num_groups", "num_strips", "x_row", "strips", "each", "span"])
def packed_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr,
    num_tokens, num_rows, num_groups, num_strips, x_row, strips, each, span,
    N: gl.constexpr, BATCH: gl.constexpr, SPAN: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """y of N rows of x and of `each` times `strips` strips, one at a time for each warp, of which there are as many or
    more. A cluster has PARTS CTAs, each of which takes `span` groups of inputs, at most SPAN. x_row: distance of x's
    rows in units of 16 bytes."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    W: gl.constexpr = gl.num_warps()
    X: gl.constexpr = SPAN * 128 * N
    TOTALS: gl.constexpr = SPAN * 4 * N
    SUMS: gl.constexpr = N * _LINE
    FOUND: gl.constexpr = _HEAD + SPAN * 4
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    base = room_of_cta(X + TOTALS + W * (SUMS + FOUND))
    warp = warp_number()
    thread = gl.arange(0, 32 * W, LANES)
    lane = thread & 31
    part = gl.program_id(0) % PARTS
    row_blocks = (num_tokens + N - 1) // N
    block = gl.program_id(0) // PARTS
    first_token = block % row_blocks * N
    first = part * span
    span = gl.maximum(gl.minimum(span, num_groups - first), 0)
    launch_dependents()
    grid_dependency_wait()
    wait_for_copies(base)  # the zeros that Gluon stored
    _copy_inputs(base, x_ptr, x_row, first_token, num_tokens, first, span, thread, N)
    place = base + (lane >> 2) * 128 + ((lane & 3) * 2 ^ (lane >> 2 & 1)) * 16
    totals = base + X
    all_sums = base + (X + TOTALS)
    found = base + (X + TOTALS + W * SUMS) + warp * FOUND
    fresh = warp * 0 + 1
    begin = block // row_blocks * (each * strips)
    for first_strip in range(begin, gl.minimum(begin + each * strips, num_strips), strips):
        strip = first_strip + warp
        groups = gl.where((warp < strips) & (strip < num_strips), num_groups, 0)
        strip = gl.minimum(strip, num_strips - 1)
        sums, fresh = _strip_sums(
            fresh, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr + strip * 5, found,
            strip.to(gl.int64) * num_groups, groups, place, totals, first, span, lane, BATCH, N, dtype,
        )  # fmt: skip
        _begin(fresh, place, totals, span, lane, N, dtype)
        fresh = fresh * 0
        store_sums(all_sums + warp * SUMS, sums, lane, N)
        together(all_sums, PARTS)
        add_parts(y_ptr, all_sums, part, first_strip, strips, first_token, num_tokens, num_rows, thread, N, PARTS)
        together(all_sums, PARTS)


def rows_product(x: Tensor, x_row: int, packed: tuple[Tensor, ...], y: Tensor, shape: RowsShape) -> None:
    """x: rows [M, K] at distances of x_row units of 16 bytes, aligned to 16 bytes. packed: codes, scale, zero, order,
    strips, contiguous. y: [..., N], contiguous."""
    (tokens, outputs), (strips, groups) = (x.shape[0], y.shape[-1]), packed[3].shape
    blocks = -(-strips // (shape.strips * shape.each)) * -(-tokens // shape.rows)
    launch(
        packed_rows_kernel, (blocks * shape.parts,), x, *packed, y,
        tokens, outputs, groups, strips, x_row, shape.strips, shape.each, -(-groups // shape.parts),
        N=shape.rows, BATCH=BATCH_OF[shape.rows], SPAN=room_of(groups, shape.parts), PARTS=shape.parts,
        num_warps=shape.num_warps, maxnreg=REGISTERS, launch_pdl=True, cluster=shape.parts,
    )  # fmt: skip
