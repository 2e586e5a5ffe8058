"""Products of some tens of rows with packed weights of mixed widths, by the tensor cores' products of a warpgroup
(WGMMA), in Gluon.

A warp has a strip, so a warpgroup has 64 outputs. A warp's weights, scaled as they are unpacked, are its part of a
product's first operand, which WGMMA takes from registers. The second is x of N rows in shared memory, which no thread
reads. Sums stay in registers over all groups: what a tile costs to unpack does not depend on N.

All warps walk the CTA's groups in their order, though a strip's tiles lie in that of their widths; a table in shared
memory says where the tile of each group lies. x comes four groups at a time, codes a tile at a time, both ahead, by
cp.async. The CTAs of a cluster divide the groups and add their sums as those of packed_rows do.

Weights are (code - zero) scale, rounded to x's dtype about once: see `_constants`.
"""

from torch import Tensor

from tilesmith.device.gluon.shim import gl, gluon, grid_dependency_wait, launch_dependents
from tilesmith.engine import launch
from tilesmith.ops.quant.hopper.packed import WIDTHS, magic
from tilesmith.ops.quant.hopper.packed_plan import (
    AHEAD,
    LINE,
    TILE_ROOM,
    RowsShape,
    per_multiprocessor,
    room_of,
    wide_ring,
)
from tilesmith.ops.quant.hopper.packed_ptx import (
    kind_of,
    load_4,
    load_int,
    load_pair,
    room_of_cta,
    store_pair,
    wait_for_copies,
    warp_number,
    warp_sync,
)
from tilesmith.ops.quant.hopper.packed_row import operand_of, planes_of, words_before
from tilesmith.ops.quant.hopper.packed_rows import SEARCHED, add_parts, store_sums, together

_SEARCHED = gl.constexpr(SEARCHED)
_AHEAD, _LINE, _TILE = gl.constexpr(AHEAD), gl.constexpr(LINE), gl.constexpr(TILE_ROOM)
_RAW = gl.constexpr(64 * AHEAD)  # bytes of a warp's scales and zeros as they come
_MADE = gl.constexpr(256 * AHEAD)  # and as they are used


@gluon.jit
def _store_4(at, x):
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, $1;",
        "=r,r,r,r,r,r", [at, x[0], x[1], x[2], x[3]], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_half_of(at):
    """fp16 in shared memory, as fp32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a; ld.shared.b16 a, [$1]; cvt.f32.f16 $0, a; }",
        "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy_16(to, source, place, end):
    """Copy 16 bytes a thread to shared memory where place < end."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.lt.s32 p, $3, $4;
        @p cp.async.cg.shared.global [$1], [$2], 16;
        mov.b32 $0, $1;
        }""",
        "=r,r,l,r,r", [to, source, place, end], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _copying(groups, stride):
    """PTX that copies 4 bytes of each of `groups` groups of x, as many of them as there are; stride: bytes from one to
    the next in shared memory."""
    each = " ".join(
        f"setp.gt.s32 p, $3, {k}; @p cp.async.ca.shared.global [$1 + {k * stride}], [$2 + {k * 128}], 4;"
        for k in range(groups)
    )
    return f"{{ .reg .pred p; {each} mov.b32 $0, $1; }}"


@gluon.jit
def _copy_inputs(to, source, x_row, first_token, num_tokens, groups, warp, lane, N: gl.constexpr):
    """Copy N rows of up to four groups of x, [group, row, 64], as WGMMA reads them: each row is 128 bytes, the k-th
    product takes the k-th 32 of them, and pieces of 16 bytes are swizzled by the row. Of the numbers that a product
    takes in, thread t of a row of the weights holds the columns 16 t and following. source: of the lane's columns."""
    W: gl.constexpr = gl.num_warps()
    ASM: gl.constexpr = _copying(_AHEAD, 128 * N)
    place = to + ((lane & 7) ^ (warp & 7)) * 16 + (lane >> 3) * 4
    for i in gl.static_range(N // W):
        row = i * W + warp
        token = gl.minimum(first_token + row, num_tokens - 1).to(gl.int64)
        gl.inline_asm_elementwise(
            ASM, "=r,r,l,r", [place + row * 128, source + token * (x_row * 16), lane * 0 + groups],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _commit(at):
    gl.inline_asm_elementwise(
        "cp.async.commit_group; mov.b32 $0, $1;", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _waiting(pending, threads):
    wait = f"cp.async.wait_group {pending};"
    if not threads:
        return f"{wait} bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    return f"{wait} fence.proxy.async.shared::cta; barrier.sync 1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def _wait_for_tile(at):
    """Wait until all but the youngest copies, those of three tiles, are there, for the threads of the warp."""
    ASM: gl.constexpr = _waiting(_AHEAD - 1, 0)
    gl.inline_asm_elementwise(ASM, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for_inputs(at):
    """The same for the threads of the CTA and for WGMMA, which all have finished with the groups before."""
    ASM: gl.constexpr = _waiting(_AHEAD - 1, 32 * gl.num_warps())
    gl.inline_asm_elementwise(ASM, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _find_tiles(found, order_ptr, first, span, num_groups, ends, lane):
    """Write to shared memory, for each group from `first` to `first` + span and AHEAD more, where its tile begins in
    the strip's codes, in bytes, and these bytes' number and 2^16 times its slot; zeros where there is none. ends: of
    the slots of up to 2, 3, 4 and 6 bits."""
    none = lane * 0
    for begin in range(0, span + _AHEAD, 32):
        store_pair(found + (begin + lane) * 8, none, none, begin + lane < span + _AHEAD)
    warp_sync(found)
    for begin in range(0, num_groups, 32 * _SEARCHED):
        groups = ()
        for i in gl.static_range(_SEARCHED):
            slot = begin + 32 * i + lane
            groups += (gl.load(order_ptr + slot, mask=slot < num_groups, other=-1).to(gl.int32) - first,)
        for i in gl.static_range(_SEARCHED):
            slot = begin + 32 * i + lane
            width = none + WIDTHS[4]
            for k in gl.static_range(4):
                width = gl.where(slot < ends[3 - k], WIDTHS[3 - k], width)
            inside = (groups[i] >= 0) & (groups[i] < span)
            store_pair(found + groups[i] * 8, words_before(ends, slot) * 4, width * 128 | (slot << 16), inside)
    warp_sync(found)


@gluon.jit
def _copy_tile(to, codes_at, found, group, lane):
    """Copy the codes of a group's tile. to, codes_at: of the lane's first 16 bytes, in the strip's codes."""
    begin, entry = load_pair(found + group * 8)
    there = entry & 0xFFFF
    source = codes_at + begin
    _copy_16(to, source, lane * 16, there)
    _copy_16(to + 512, source + 512, lane * 16 + 512, there)


@gluon.jit
def _copy_constants(to, tables_at, found, first_group, lane):
    """Copy scales and zeros of AHEAD tiles: each 32 bytes of scales, then 32 of zeros. tables_at: of the lane's 16
    bytes of slot 0."""
    entry = load_int(found + (first_group + (lane >> 2 & 3)) * 8 + 4)
    _copy_16(to + (lane & 15) * 16, tables_at + (entry >> 16) * 32, lane >> 4 << 16, entry & 0xFFFF)


@gluon.constexpr_function
def _packing(dtype):
    return f"cvt.rn.{kind_of(dtype)}x2.f32 $0, $1, $1;"


@gluon.jit
def _twice(x, dtype: gl.constexpr):
    """A word of two numbers of dtype that are x."""
    ASM: gl.constexpr = _packing(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _of_halves(name, dtype):
    return f"{name}.rn.{kind_of(dtype)}x2 $0, $1, $2;"


@gluon.jit
def _two_at_once(NAME: gl.constexpr, a, b, dtype: gl.constexpr):
    """The sum (add) or difference (sub) of words of two numbers of dtype."""
    ASM: gl.constexpr = _of_halves(NAME, dtype)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _fusing(dtype):
    return f"fma.rn.{kind_of(dtype)}x2 $0, $1, $2, $3;"


@gluon.jit
def _fma(a, b, c, dtype: gl.constexpr):
    ASM: gl.constexpr = _fusing(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [a, b, c], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _constants_of_row(at, there, eight, dtype: gl.constexpr):
    """Four words, each twice a number of dtype. at: address of the row's scale; its zero is 32 bytes on."""
    ONE: gl.constexpr = magic(dtype)[0]
    scale = gl.where(there, _load_half_of(at), 0.0)
    zero = gl.where(there, _load_half_of(at + 32), 0.0)
    whole = (zero + 12582912.0) - 12582912.0  # the nearest integer: 1.5 2^23
    whole = gl.minimum(gl.maximum(whole, 0.0), gl.where(eight, 255.0, 127.0))
    scales = _twice(scale, dtype)
    rest = scales * 0
    if dtype == gl.bfloat16:
        rest = _twice(scale - (scales << 16).to(gl.float32, bitcast=True), dtype)
    subtracted = _twice(whole + gl.where(eight, 0.0, ONE), dtype)
    return subtracted, scales, rest, _twice((whole - zero) * scale, dtype)


@gluon.jit
def _constants(to, raw, found, first_group, lane, dtype: gl.constexpr):
    """What four tiles' weights are made from, for each row: [tile, row % 8, row // 8, 4]. A weight is d scale + c: with
    zero split into an integer and a rest of at most 1/2, d = code - integer is exact and c = -rest scale small, so that
    its own rounding is less than that of weights. The integer is not less than 0 nor more than codes can be; a zero
    beyond them makes weights at least as large as c. bf16 has 3 bits less than a scale: those are multiplied too."""
    entry = load_int(found + (first_group + (lane & 3)) * 8 + 4)
    there, eight = entry & 0xFFFF > 0, entry & 0xFFFF == 1024
    at = raw + (lane & 3) * 64 + (lane >> 2) * 2
    place = to + (lane & 3) * 256 + (lane >> 2) * 32
    _store_4(place, _constants_of_row(at, there, eight, dtype))
    _store_4(place + 16, _constants_of_row(at + 16, there, eight, dtype))
    warp_sync(to)


@gluon.jit
def _tile_of(at, lane, WIDTH: gl.constexpr):
    """A thread's words of the planes of a tile in shared memory."""
    HIGH: gl.constexpr = 512 if WIDTH >= 4 else 256
    if WIDTH >= 4:
        tile = (load_4(at + lane * 16),)
    else:
        tile = (load_pair(at + lane * 8),)
    if WIDTH == 8:
        tile += (load_4(at + HIGH + lane * 16),)
    if WIDTH == 6:
        tile += (load_pair(at + HIGH + lane * 8),)
    if WIDTH == 3:  # two threads have the same words
        tile += (load_pair(at + HIGH + (lane & 28) * 4 + (lane & 1) * 8),)
    return tile


@gluon.jit
def _weights(at, constants, lane, WIDTH: gl.constexpr, dtype: gl.constexpr):
    """The sixteen registers of a tile's weights, four for each product. constants: of rows g and g + 8."""
    LOWEST: gl.constexpr = 4 if WIDTH >= 4 else 2
    FIELD: gl.constexpr = 3 if WIDTH == 3 else LOWEST
    APART: gl.constexpr = 2 if WIDTH == 2 else 4
    BESIDE: gl.constexpr = 2 if WIDTH == 6 else 0
    MAGIC: gl.constexpr = magic(dtype)[1]
    MAGIC_16: gl.constexpr = magic(dtype)[2]
    BOTH: gl.constexpr = 0x45084508 if dtype == gl.bfloat16 else 0x74407440  # 17 ONE
    low, high = planes_of(_tile_of(at, lane, WIDTH), lane, WIDTH)
    found = ()
    for step in gl.static_range(4):
        codes = operand_of(low, high, step, APART, FIELD, BESIDE, MAGIC)
        if WIDTH == 8:
            upper = operand_of(high, high, step, 4, 4, 0, MAGIC_16)
        for i in gl.static_range(4):
            subtracted, scale, rest, c = constants[i % 2]
            code = codes[i]
            if WIDTH == 8:
                upper_part = _two_at_once("sub", upper[i], gl.full_like(code, BOTH), dtype)
                code = _two_at_once("add", upper_part, code, dtype)
            d = _two_at_once("sub", code, subtracted, dtype)
            if dtype == gl.bfloat16:
                c = _fma(d, rest, c, dtype)
            found += (_fma(d, scale, c, dtype),)
    return found


@gluon.jit
def _has(size, WIDTH: gl.constexpr):
    """Whether a tile has so many bits a code. The compiler does not see what is compared: of comparisons it would make
    a jump by a table, whose loads a warp waits for."""
    ASM: gl.constexpr = _comparing(WIDTH)
    return gl.inline_asm_elementwise(ASM, "=r,r", [size], dtype=gl.int32, is_pure=True, pack=1) != 0


@gluon.constexpr_function
def _comparing(width):
    return f"{{ .reg .pred p; setp.eq.s32 p, $1, {128 * width}; selp.b32 $0, 1, 0, p; }}"


@gluon.jit
def _weights_of(at, place, size, lane, dtype: gl.constexpr):
    """`_weights` of a tile of any width; of one that is not there, zeros. place: of its constants; size: its bytes."""
    place += (lane >> 2) * 32
    constants = load_4(place), load_4(place + 16)
    if _has(size, 4):
        found = _weights(at, constants, lane, 4, dtype)
    else:
        if _has(size, 3):
            found = _weights(at, constants, lane, 3, dtype)
        else:
            if _has(size, 6):
                found = _weights(at, constants, lane, 6, dtype)
            else:
                if _has(size, 8):
                    found = _weights(at, constants, lane, 8, dtype)
                else:
                    found = _weights(at, constants, lane, 2, dtype)
    return found


@gluon.constexpr_function
def _products_of(n, kind):
    """PTX of the four products of a tile. Operands: n / 2 results, sixteen registers of weights, the lower half of the
    descriptor of x, and the sums before, which are the results' registers. The upper half: swizzled by 128 bytes, eight
    rows 1,024 bytes from the next."""
    half = n // 2
    sums = ", ".join(f"${i}" for i in range(half))
    lines = [
        "{ .reg .pred p; .reg .b32 upper; .reg .b64 at0, at1, at2, at3;",
        f"setp.eq.u32 p, 0, 0; mov.b32 upper, 0x40000040; mov.b64 at0, {{${half + 16}, upper}};",
        *(f"add.s64 at{k}, at0, {2 * k};" for k in range(1, 4)),
        "wgmma.fence.sync.aligned;",
    ]
    for k in range(4):
        weights = ", ".join(f"${half + 4 * k + i}" for i in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, {{{weights}}}, at{k}, p, 1, 1, 0;"
        )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"])


@gluon.constexpr_function
def _registers_of(n):
    half = n // 2
    return ",".join(["=f"] * half + ["r"] * 17 + [str(i) for i in range(half)])


@gluon.constexpr_function
def _floats(n):
    return (gl.float32,) * n


@gluon.jit
def _add_products(sums, weights, at, N: gl.constexpr, dtype: gl.constexpr):
    """sums + weights x of a group: of the warpgroup's 64 outputs and N rows. at: address of x's group."""
    ASM: gl.constexpr = _products_of(N, kind_of(dtype))
    REGISTERS_OF: gl.constexpr = _registers_of(N)
    FLOATS: gl.constexpr = _floats(N // 2)
    return gl.inline_asm_elementwise(
        ASM, REGISTERS_OF, weights + (weights[0] * 0 + (at >> 4 | 0x10000),) + sums, dtype=FLOATS, is_pure=False, pack=1
    )


@gluon.jit
def _strip_sums(
    ring, tiles, raw, made, found, x_source, x_row, first_token, num_tokens, codes_at, tables_at, span, warp, lane,
    N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The product of N rows and each warp's tiles of `span` groups, of which the first AHEAD of x are on their way.
    ring, tiles, raw, made: addresses of two times AHEAD groups of x, of a warp's AHEAD tiles, of two times AHEAD tiles'
    scales and zeros, and of what is made from these."""
    STAGE: gl.constexpr = _AHEAD * 128 * N
    none = gl.full_like(lane, 0).to(gl.float32)
    sums = ()
    for j in gl.static_range(N // 2):
        sums += (none,)
    _copy_constants(raw, tables_at, found, 0, lane)
    for i in gl.static_range(_AHEAD):
        _copy_tile(tiles + i * _TILE + lane * 16, codes_at, found, i, lane)
        _commit(tiles)
    for begin in range(0, span, _AHEAD):
        odd = begin // _AHEAD & 1
        here = ring + odd * STAGE
        _wait_for_inputs(tiles)
        following = begin + _AHEAD
        _copy_inputs(
            ring + (STAGE - odd * STAGE), x_source + following * 128, x_row, first_token, num_tokens, span - following,
            warp, lane, N,
        )  # fmt: skip
        if following < span:
            _copy_constants(raw + (_RAW - odd * _RAW), tables_at, found, following, lane)
        _constants(made, raw + odd * _RAW, found, begin, lane, dtype)
        for group in range(begin, gl.minimum(following, span)):
            which = group - begin
            _wait_for_tile(tiles)
            size = load_int(found + group * 8 + 4) & 0xFFFF
            weights = _weights_of(tiles + which * _TILE, made + which * 256, size, lane, dtype)
            warp_sync(tiles)  # all threads have read it
            _copy_tile(tiles + which * _TILE + lane * 16, codes_at, found, group + _AHEAD, lane)
            _commit(tiles)
            sums = _add_products(sums, weights, here + which * (128 * N), N, dtype)
    return sums


@gluon.jit(do_not_specialize=["num_tokens", "num_rows", "num_groups", "num_strips", "x_row", "strips", "each", "span"])
def packed_wide_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, order_ptr, strips_ptr, y_ptr,
    num_tokens, num_rows, num_groups, num_strips, x_row, strips, each, span,
    N: gl.constexpr, SPAN: gl.constexpr, PARTS: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """y of N rows of x and of `each` times `strips` strips, one at a time for each warp, of which there are as many or
    more. A cluster has PARTS CTAs, each of which takes `span` groups of inputs, at most SPAN. x_row: distance of x's
    rows in units of 16 bytes. ROOM: bytes of shared memory for x and tiles under way, and afterwards for sums."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    W: gl.constexpr = gl.num_warps()
    RING: gl.constexpr = 2 * _AHEAD * 128 * N
    TILES: gl.constexpr = _AHEAD * _TILE
    OTHER: gl.constexpr = 2 * _RAW + _MADE + (SPAN + _AHEAD) * 8  # of a warp
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    base = (room_of_cta(1024 + ROOM + W * OTHER) + 1023) & -1024
    warp = warp_number()
    lane = gl.arange(0, 32 * W, LANES) & 31
    part = gl.program_id(0) % PARTS
    row_blocks = (num_tokens + N - 1) // N
    block = gl.program_id(0) // PARTS
    first_token = block % row_blocks * N
    first = part * span
    span = gl.maximum(gl.minimum(span, num_groups - first), 0)
    launch_dependents()
    grid_dependency_wait()
    wait_for_copies(base)  # the zeros that Gluon stored
    raw = base + ROOM + warp * OTHER
    made = raw + 2 * _RAW
    found = made + _MADE
    x_source = x_ptr.to(gl.int64) + first * 128 + lane * 4
    begin = block // row_blocks * (each * strips)
    for first_strip in range(begin, gl.minimum(begin + each * strips, num_strips), strips):
        strip = first_strip + warp
        groups = gl.where((warp < strips) & (strip < num_strips), num_groups, 0)
        strip = gl.minimum(strip, num_strips - 1)
        _copy_inputs(base, x_source, x_row, first_token, num_tokens, span, warp, lane, N)
        table = strips_ptr + strip * 5
        slots = strip.to(gl.int64) * num_groups
        ends = gl.load(table + 1), gl.load(table + 2), gl.load(table + 3), gl.load(table + 4)
        codes_at = (codes_ptr + gl.load(table)).to(gl.int64) + lane * 16
        _find_tiles(found, order_ptr + slots, first, span, groups, ends, lane)
        tables_at = gl.where(lane & 2 == 0, scale_ptr.to(gl.int64), zero_ptr.to(gl.int64))
        tables_at += slots * 32 + (lane & 1) * 16
        sums = _strip_sums(
            base, base + RING + warp * TILES, raw, made, found, x_source, x_row, first_token, num_tokens,
            codes_at, tables_at, span, warp, lane, N, dtype,
        )  # fmt: skip
        wait_for_copies(base)  # no warp reads x or its tiles, nor is a copy under way
        store_sums(base + warp * (N * _LINE), sums, lane, N)
        together(base, PARTS)
        thread = warp_number() * 32 + lane
        add_parts(y_ptr, base, part, first_strip, strips, first_token, num_tokens, num_rows, thread, N, PARTS)
        together(base, PARTS)


def wide_product(x: Tensor, x_row: int, packed: tuple[Tensor, ...], y: Tensor, shape: RowsShape) -> None:
    """x: rows [M, K] at distances of x_row units of 16 bytes, aligned to 16 bytes. packed: codes, scale, zero, order,
    strips, contiguous. y: [..., N], contiguous."""
    (tokens, outputs), (strips, groups) = (x.shape[0], y.shape[-1]), packed[3].shape
    blocks = -(-strips // (shape.strips * shape.each)) * -(-tokens // shape.rows)
    span = room_of(groups, shape.parts)
    on_one = max(1, per_multiprocessor(shape.rows, span, shape.num_warps, True))
    launch(
        packed_wide_kernel, (blocks * shape.parts,), x, *packed, y,
        tokens, outputs, groups, strips, x_row, shape.strips, shape.each, -(-groups // shape.parts),
        N=shape.rows, SPAN=span, PARTS=shape.parts, ROOM=wide_ring(shape.rows, shape.num_warps),
        num_warps=shape.num_warps, maxnreg=min(255, 2048 // (shape.num_warps * on_one)), launch_pdl=True,
        cluster=shape.parts,
    )  # fmt: skip
