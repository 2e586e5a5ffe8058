"""Rows that clusters of programs draw, in Gluon: one that stays works on the next row that nobody has.

Rows dealt out beforehand end together only if all programs are equally fast, and they are not: memory is farther from
some, and those of a cluster wait for the slowest at each row. (H200, RMS norm of 65,536 and 131,072 columns, of the
copy rate: 0.90 and 0.93 dealt out, 0.97 and 0.98 drawn.)

The first program of a cluster draws, ahead of time, and tells the others the number along with what it found of a row:
in the tags of the mail of rows_gluon, 16 bits in each, where another 16 tell the turn that the mail is of.

Written for the Gluon of Triton 3.6.
"""

from tilesmith.device.gluon.rows import letter, read_mail
from tilesmith.device.gluon.shim import gl, gluon


@gluon.jit
def draw(counter, part, last):
    """The next number of `counter`, a pointer, in the first thread of the cluster's first program; anything in others.
    Who draws `last` sets the counter back."""
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
def tell(mail, i, part, a, b, number, PARTS: gl.constexpr):
    """Tell all programs of the cluster what this one found in its i-th turn, two fp32, and, from the first, the number
    that `draw` gave."""
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
            letter(mail, i, part),
            a.to(gl.int32, bitcast=True), b.to(gl.int32, bitcast=True), i + 1, number,
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def parts_of_row(PARTS: gl.constexpr):
    """The numbers of a row's parts, and others beyond them, in the layout of what `told` returns: of few parts fewer
    than a warp has threads, so that sums take fewer steps."""
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
def told(mail, i, PARTS: gl.constexpr):
    """What all programs of the cluster found in their i-th turn, when it is there: two fp32, 0 beyond PARTS, the same
    in every warp."""
    return read_mail(mail, i, parts_of_row(PARTS), PARTS, _OF_OTHER_TURNS)


@gluon.jit
def told_number(mail, i):
    """The number that came with the mail of the i-th turn. Each thread looks for itself: that others of its warp have
    seen the mail says nothing of what it will read."""
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
        "=&r,r,r", [letter(mail, i, 0), ((i + 1) & 65535) * 65537],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
