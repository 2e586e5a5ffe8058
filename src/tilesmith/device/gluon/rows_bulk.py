"""Rows in shared memory, brought and taken away by bulk copies of as many bytes as are asked for, in Gluon.

A program has one row, as those of rows_held_gluon, in chunks of 8 neighbours a thread. Loops over chunks are not
unrolled: what a thread holds does not grow with the row, and a row of which only a part is seen costs that part.

Written for the Gluon of Triton 3.6, which copies only tiles of one size and has no name for an address in shared
memory: the row's own is reserved here, beside what Gluon allocates, and read and written by these functions alone.
"""

from tilesmith.device.gluon.cluster import HEAD
from tilesmith.device.gluon.rows import LINE
from tilesmith.device.gluon.shim import gl, gluon, reserve

_LINE, _HEAD = gl.constexpr(LINE), gl.constexpr(HEAD)
MOST_BYTES = 48 * 1024 - 512  # of rows in what PTX lets a program reserve


@gluon.jit
def open_rows(BYTES: gl.constexpr):
    """(the address of a barrier and, HEAD bytes on, of room for `rows_held_gluon.swap` without a cluster; that of BYTES
    for rows). The barrier completes when the bytes that `bring_rows` asks for are there."""
    ROWS: gl.constexpr = (_HEAD + 8 * gl.num_warps() + 127) // 128 * 128
    BEGIN: gl.constexpr = """{
        .reg .pred p;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 p, thread, 0;
        @p mbarrier.init.shared::cta.b64 [$0], 1;
        @p fence.mbarrier_init.release.cluster;
        }"""
    room = reserve(ROWS + BYTES, 128, BEGIN)
    return room, room + ROWS


@gluon.jit
def bring_rows(room, at, ptr, other_at, other_ptr, size):
    """Start to copy `size` bytes, a multiple of 16 and not 0, from ptr to the address `at`, and from other_ptr, if it
    is one, to other_at. All threads meet: they may wait for it from here."""
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
def take_row(at, ptr, size):
    """Start to copy `size` bytes, a multiple of 16, from the address `at` to ptr, when all threads have written theirs;
    nothing if it is below 1."""
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
def finish_rows(room):
    """Wait until all that `take_row` copies has been read: only then may a program end."""
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
def words_at(at, chunk):
    """A chunk of the row at an address, two values of 16 bits a word, as `rows_held_gluon.part_of` returns them."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    a, b, c, d = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [_own(at, chunk)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    words = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [gl.num_warps() * (_LINE // 2)])
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def put_words(at, chunk, words):
    """Write a chunk of the row at an address."""
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
def put_zeros(at, chunk):
    """Write zeros."""
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {0, 0, 0, 0}; mov.b32 $0, $1;", "=r,r", [_own(at, chunk)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def hide(at, chunk, end, PAIR: gl.constexpr):
    """Write the two values of 16 bits that are PAIR, again and again, in a chunk of a row, from column `end` on."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    words = words_at(at, chunk)
    col = chunk * WIDTH + 2 * gl.arange(0, WIDTH // 2, WORDS)
    half = gl.where(col < end, (words & 0xFFFF) | (PAIR & -65536), PAIR)
    put_words(at, chunk, gl.where(col + 1 < end, words, half))
