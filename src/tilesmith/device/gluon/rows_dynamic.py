"""Dynamic scheduling of rows over persistent clusters of CTAs, in Gluon: each cluster fetches its next row from a work
counter.

With a static schedule all clusters end together only if they are equally fast. They are not: some are farther from
memory, and the CTAs of a cluster wait for the slowest at each row. (H200, RMS norm of 65,536 and 131,072 columns, share
of the copy rate: 0.90 and 0.93 with a static schedule, 0.97 and 0.98 with a dynamic one.)

The first CTA of a cluster fetches the number ahead of time and sends it to the others together with what it found of a
row: in the tags of the messages of `device.gluon.rows`, 16 bits in each tag, beside 16 bits that identify the turn.

Written for the Gluon of Triton 3.6.
"""

from tilesmith.device.gluon.rows import mailbox_entry, read_mailbox
from tilesmith.device.gluon.shim import gl, gluon


@gluon.jit
def next_tile(counter, part, last):
    """The next number from the work counter `counter` (a pointer), in the first thread of the cluster's first CTA;
    undefined in others. Whoever gets `last` resets the counter."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 thread;
        .reg .pred p, q;
        mov.u32 thread, %tid.x;
        or.b32 thread, thread, $2;
        setp.eq.u32 p, thread, 0;
        mov.b32 $0, 0;
        @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        setp.eq.and.u32 q, $0, $3, p;
        @q st.relaxed.gpu.global.u32 [$1], 0;
        }""",
        "=&r,l,r,r", [counter.to(gl.int64), part, last], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_with_tile(mail, i, part, a, b, number, PARTS: gl.constexpr):
    """Send what this CTA found in its i-th turn, two fp32, to all CTAs of the cluster; the first CTA's message also
    carries the number that `next_tile` returned."""
    gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 to, number, low, high;
        .reg .b64 one, other;
        .reg .pred p;
        mov.u32 $0, %tid.x;
        setp.lt.u32 p, $0, {PARTS};
        shfl.sync.idx.b32 number, $5, 0, 31, 0xffffffff;
        prmt.b32 low, $4, number, 0x5410;
        prmt.b32 high, $4, number, 0x7610;
        mov.b64 one, {{$2, low}};
        mov.b64 other, {{$3, high}};
        @p mapa.shared::cluster.u32 to, $1, $0;
        @p st.relaxed.cluster.shared::cluster.v2.b64 [to], {{one, other}};
        }}""",
        "=&r,r,r,r,r,r",
        [
            mailbox_entry(mail, i, part),
            a.to(gl.int32, bitcast=True), b.to(gl.int32, bitcast=True), i + 1, number,
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def parts_of_row(PARTS: gl.constexpr):
    """The numbers of a row's parts, and others beyond them, in the layout of what `receive_with_tile` returns. For few
    parts these are fewer than the threads of a warp, so that reductions take fewer steps."""
    MOST: gl.constexpr = 1 if PARTS == 1 else 2 if PARTS == 2 else 4 if PARTS <= 4 else 8 if PARTS <= 8 else 16
    return gl.arange(0, MOST, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


_OF_OTHER_TURNS = gl.constexpr(
    """xor.b32 tag, tag, $4;
        xor.b32 its_tag, its_tag, $4;
        or.b32 tag, tag, its_tag;
        and.b32 tag, tag, 65535;
        setp.ne.u32 q, tag, 0;"""
)


@gluon.jit
def receive_with_tile(mail, i, PARTS: gl.constexpr):
    """What all CTAs of the cluster found in their i-th turn, once it has arrived: two fp32, 0 beyond PARTS, the same in
    every warp."""
    return read_mailbox(mail, i, parts_of_row(PARTS), PARTS, _OF_OTHER_TURNS)


@gluon.jit
def received_tile(mail, i):
    """The number that arrived with the messages of the i-th turn. Each thread checks for itself: that other threads of
    the warp have seen the message does not make it visible to this one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b64 one, other;
        .reg .b32 value, low, high;
        .reg .pred p;
        again:
        ld.relaxed.cluster.shared::cta.v2.b64 {one, other}, [$1];
        mov.b64 {value, low}, one;
        mov.b64 {value, high}, other;
        prmt.b32 $0, low, high, 0x7632;
        prmt.b32 low, low, high, 0x5410;
        setp.ne.u32 p, low, $2;
        @p bra again;
        }""",
        "=&r,r,r", [mailbox_entry(mail, i, 0), ((i + 1) & 65535) * 65537],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
