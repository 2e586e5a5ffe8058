"""Rows in shared memory, loaded and stored by bulk copies (cp.async.bulk) of any size, in Gluon.

A CTA has one row, as in `rows_held`, in chunks of 8 neighbours per thread. Loops over chunks are not unrolled, so that
register use does not grow with the row, and a row of which only a part is needed costs only that part.

Written for the Gluon of Triton 3.6, which copies only tiles of one size and cannot express an address in shared memory.
The memory of the row is therefore reserved here, beside Gluon's own allocations, and only these functions access it.
"""

from tilesmith.device.gluon.cluster import HEAD
from tilesmith.device.gluon.rows import LINE
from tilesmith.device.gluon.shim import gl, gluon, reserve_smem

_LINE, _HEAD = gl.constexpr(LINE), gl.constexpr(HEAD)
MOST_BYTES = 48 * 1024 - 512  # of rows: what PTX lets a CTA declare statically, less the head


@gluon.jit
def open_smem_rows(BYTES: gl.constexpr):
    """(the address of an mbarrier, followed HEAD bytes later by the memory of `rows_held.exchange` without a cluster;
    the address of BYTES for rows). The mbarrier completes when the bytes that `bulk_load_rows` copies have arrived."""
    ROWS: gl.constexpr = (_HEAD + 8 * gl.num_warps() + 127) // 128 * 128
    BEGIN: gl.constexpr = """{
        .reg .pred p;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 p, thread, 0;
        @p mbarrier.init.shared::cta.b64 [$0], 1;
        @p fence.mbarrier_init.release.cluster;
        }"""
    room = reserve_smem(ROWS + BYTES, 128, BEGIN)
    return room, room + ROWS


@gluon.jit
def bulk_load_rows(room, at, ptr, other_at, other_ptr, size):
    """Start bulk copies of `size` bytes, a positive multiple of 16, from ptr to the smem address `at`, and, if
    other_ptr is given, from there to other_at. Includes a CTA-wide barrier, after which any thread may wait for the
    copies."""
    if other_ptr is None:
        gl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 p, thread, 0;
            @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $3;
            @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$2], [$4], $3, [$1];
            barrier.sync 0;
            mov.b32 $0, $1;
            }""",
            "=&r,r,r,r,l", [room, at, size, ptr], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 p, thread, 0;
            add.u32 thread, $3, $3;
            @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], thread;
            @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$2], [$4], $3, [$1];
            @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$5], [$6], $3, [$1];
            barrier.sync 0;
            mov.b32 $0, $1;
            }""",
            "=&r,r,r,r,l,r,l", [room, at, size, ptr, other_at, other_ptr], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def bulk_store_row(at, ptr, size):
    """After all threads have written their part of the row at the smem address `at`, start a bulk copy of `size` bytes,
    a multiple of 16, from there to ptr; none if size is below 1."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 thread;
        fence.proxy.async.shared::cta;
        barrier.sync 0;
        mov.u32 thread, %tid.x;
        setp.eq.u32 p, thread, 0;
        setp.gt.and.s32 p, $2, 0, p;
        @p cp.async.bulk.global.shared::cta.bulk_group [$3], [$1], $2;
        @p cp.async.bulk.commit_group;
        mov.b32 $0, $1;
        }""",
        "=&r,r,r,l", [at, size, ptr], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def bulk_store_wait(room):
    """Wait until everything that `bulk_store_row` copies has been read from shared memory; a CTA must not end before
    that."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.b32 $0, $1;", "=r,r", [room], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _own(at, chunk):
    """The address of each thread's 16 bytes of a chunk."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return at + (chunk * THREADS + gl.arange(0, THREADS, LANES)) * 16


@gluon.jit
def load_chunk(at, chunk):
    """A chunk of the row at an address, two 16-bit values per word, as `rows_held.load_part` returns them."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    a, b, c, d = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [_own(at, chunk)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    words = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [gl.num_warps() * (_LINE // 2)])
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def store_chunk(at, chunk, words):
    """Store a chunk of the row at an address."""
    own = _own(at, chunk)
    even, odd = gl.split(gl.reshape(words, [32 * gl.num_warps(), 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    LANES: gl.constexpr = own.type.layout
    a, b = gl.convert_layout(a, LANES, assert_trivial=True), gl.convert_layout(b, LANES, assert_trivial=True)
    c, d = gl.convert_layout(c, LANES, assert_trivial=True), gl.convert_layout(d, LANES, assert_trivial=True)
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, $1;", "=r,r,r,r,r,r", [own, a, b, c, d],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_zeros(at, chunk):
    """Store a chunk of zeros."""
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {0, 0, 0, 0}; mov.b32 $0, $1;", "=r,r", [_own(at, chunk)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fill_beyond(at, chunk, end, PAIR: gl.constexpr):
    """Overwrite a chunk of a row from column `end` on with PAIR, a word of two 16-bit values."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    words = load_chunk(at, chunk)
    col = chunk * WIDTH + 2 * gl.arange(0, WIDTH // 2, WORDS)
    half = gl.where(col < end, (words & 0xFFFF) | (PAIR & -65536), PAIR)
    store_chunk(at, chunk, gl.where(col + 1 < end, words, half))
