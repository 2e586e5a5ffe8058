"""Rows wider than a program, in Gluon: each is read from memory once, by programs that swap what they find of it.

The programs of a cluster work on the same rows, each on its own columns. Parts of rows to come are copied to a ring of
slots in shared memory by the tensor memory accelerator; the part that is worked on stays in registers. A program sends
the two numbers that it found of its part to the shared memory of each; until the others' have come, other programs of
its multiprocessor have work.

The device starts a cluster as a whole or not at all, and a cluster never waits for another one. A program ends when it
has received all that is sent to it: nobody writes to the memory of one that is gone.

Written for the Gluon of Triton 3.6.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.alignment import for_bulk
from tilesmith.device.gluon.cluster import clusters_of
from tilesmith.device.gluon.shim import TensorDescriptor, expect, fetch, gl, gluon, reinterpret, reserve
from tilesmith.engine import cdiv

LINE = 256  # columns of a line of a box: the most that the accelerator takes, and what a warp reads at once
MOST_PARTS = 16  # of a row: the programs of the largest cluster
NARROWEST = 1024  # columns of a part
MAILS = 4  # rows of which a program has room for mail; it is at most one row ahead of another
_LINE, _MAILS, _MOST_PARTS = gl.constexpr(LINE), gl.constexpr(MAILS), gl.constexpr(MOST_PARTS)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def ring(SLOTS: gl.constexpr, WIDTH: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for SLOTS parts of WIDTH columns."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=BITS, rank=3)
    return gl.allocate_shared_memory(dtype, [SLOTS, 1, WIDTH // _LINE, _LINE], BOX)


@gluon.jit
def bring(a_desc, b_desc, c_desc, a, b, c, full, i, first, step, mine, part, WIDTH: gl.constexpr):
    """Start to copy a part of row first + i · step, if i < mine, to the i-th slot, turn by turn, of up to three rings.
    Descriptors may be None."""
    if i < mine:
        bring_row(a_desc, b_desc, c_desc, a, b, c, full, i % full.shape[0], first + i * step, part, WIDTH)


@gluon.jit
def bring_row(a_desc, b_desc, c_desc, a, b, c, full, slot, row, part, WIDTH: gl.constexpr):
    """Start to copy a part of a row to a slot of up to three rings."""
    BYTES: gl.constexpr = (
        a_desc.block_type.nbytes
        + (0 if b_desc is None else b_desc.block_type.nbytes)
        + (0 if c_desc is None else c_desc.block_type.nbytes)
    )
    at = [row, part * (WIDTH // _LINE), 0]
    expect(full.index(slot), BYTES)
    fetch(a_desc, at, full.index(slot), a.index(slot))
    if b_desc is not None:
        fetch(b_desc, at, full.index(slot), b.index(slot))
    if c_desc is not None:
        fetch(c_desc, at, full.index(slot), c.index(slot))


@gluon.jit
def raw(slots, slot, WIDTH: gl.constexpr):
    """A slot in registers, 8 neighbours a thread: of 16 bits, two values a word, to be taken apart by `widened`."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if slots.dtype.primitive_bitwidth == 16:
        words = reinterpret(slots.index(slot), gl.int32, [WIDTH // 2], PLAIN).load(WORDS)
    else:
        words = reinterpret(slots.index(slot), slots.dtype, [WIDTH], PLAIN).load(LANES)
    return words


@gluon.jit
def packed(values, WIDTH: gl.constexpr):
    """Values of a part, 8 neighbours a thread, as `raw` returns them."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    if values.dtype.primitive_bitwidth == 16:
        low, high = gl.split(gl.reshape(values.to(gl.int16, bitcast=True), [WIDTH // 2, 2]))
        # by shifts ptxas takes words of rounded values apart and puts them together again
        words = gl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
        values = gl.convert_layout(words, WORDS, assert_trivial=True)
    return values


@gluon.jit
def unpacked(words, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """What `raw` read, in `dtype` [WIDTH]."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if dtype.primitive_bitwidth == 16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        values = gl.reshape(gl.join(low, high), [WIDTH]).to(dtype, bitcast=True)
        words = gl.convert_layout(values, LANES, assert_trivial=True)
    return words


@gluon.jit
def apart(words, dtype: gl.constexpr):
    """The two values of 16 bits of each word, in fp32. Those of bf16 by a shift and a mask: the compiler takes three
    instructions for the two."""
    if dtype == gl.bfloat16:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = (words & 65535).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def opaque(words):
    """The same words, which the compiler does not see. For a second use of them: it would keep the values of the first
    in twice the registers. What makes words with no effect that it sees stays at this place of the program."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=words.dtype, is_pure=False, pack=1)


@gluon.jit
def widened(words, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """What `raw` read, in fp32 [WIDTH]."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if dtype.primitive_bitwidth == 16:
        low, high = apart(words, dtype)
        words = gl.convert_layout(gl.reshape(gl.join(low, high), [WIDTH]), LANES, assert_trivial=True)
    return words


@gluon.jit
def scratch():
    """Shared memory for what each warp found: a sum, or the like."""
    return gl.allocate_shared_memory(gl.float32, [gl.num_warps()], PLAIN)


@gluon.jit
def add_up(x, found, WIDTH: gl.constexpr):
    """Store the sum of each warp's values of a part, 8 neighbours a thread, in `found`, for `added_up`. Between the two
    is one barrier, where gl.sum of a part has four."""
    WARPS: gl.constexpr = gl.num_warps()
    by_warp = gl.reshape(x, [WIDTH // (256 * WARPS), WARPS, 256])
    found.store(gl.sum(gl.sum(by_warp, 0), 1))


@gluon.jit
def of_warps(found):
    """What each warp has stored."""
    return found.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def added_up(found):
    """The sum over the warps."""
    return gl.sum(of_warps(found), 0)


@gluon.jit
def part_numbers():
    """0 to 31, in the layout of what `received` returns."""
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def open_mail():
    """The address of a mailbox in this program's shared memory, when all programs of the cluster have an empty one:
    room for MAILS rows of 2 words from each of MOST_PARTS programs."""
    WORDS: gl.constexpr = _MAILS * _MOST_PARTS * 2
    EMPTY: gl.constexpr = f"""{{
        .reg .b32 lane, at;
        .reg .b64 nothing;
        .reg .pred p;
        mov.u32 lane, %tid.x;
        mov.u64 nothing, 0;
        more:
        mad.lo.u32 at, lane, 8, $0;
        setp.lt.u32 p, lane, {WORDS};
        @p st.shared::cta.u64 [at], nothing;
        add.u32 lane, lane, {32 * gl.num_warps()};
        @p bra.uni more;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        }}"""
    return reserve(8 * WORDS, 128, EMPTY)


@gluon.jit
def letter(mail, i, part):
    """The address of what program `part` of the cluster sends in its i-th turn."""
    return mail + ((i % _MAILS) * _MOST_PARTS + part) * 16


@gluon.jit
def word(value, row):
    """fp32 `value` and the number of the row that it is of, in one word that is written at once."""
    return (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | ((row + 1).to(gl.int64) << 32)


@gluon.jit
def send(mail, i, part, a, b, PARTS: gl.constexpr):
    """Tell all programs of the cluster what this one found of its i-th row: a thread tells one of them."""
    gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 to;
        .reg .pred p;
        mov.u32 $0, %tid.x;
        setp.lt.u32 p, $0, {PARTS};
        @p mapa.shared::cluster.u32 to, $1, $0;
        @p st.relaxed.cluster.shared::cluster.v2.b64 [to], {{$2, $3}};
        }}""",
        "=&r,r,l,l", [letter(mail, i, part), word(a, i), word(b, i)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_mail(mail, i, part, PARTS: gl.constexpr, OLD: gl.constexpr):
    """What the programs `part` of the cluster sent in their i-th turn, when all of it is there: two fp32, 0 beyond
    PARTS. OLD: PTX that sets q where tag or its_tag, which came with them, is not that of turn $4 - 1."""
    a, b = gl.inline_asm_elementwise(
        f"""{{
        .reg .b64 one, other;
        .reg .b32 tag, its_tag;
        .reg .pred p, q;
        setp.lt.u32 p, $3, {PARTS};
        mov.b64 one, {{0, $4}};
        mov.b64 other, one;
        again:
        @p ld.relaxed.cluster.shared::cta.v2.b64 {{one, other}}, [$2];
        mov.b64 {{$0, tag}}, one;
        mov.b64 {{$1, its_tag}}, other;
        {OLD}
        vote.sync.any.pred q, q, 0xffffffff;
        @q bra.uni again;
        }}""",
        "=&r,=&r,r,r,r", [letter(mail, i, part), part, part * 0 + (i + 1)],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a.to(gl.float32, bitcast=True), b.to(gl.float32, bitcast=True)


_OF_OTHER_ROWS = gl.constexpr("setp.ne.u32 q, tag, $4; setp.ne.or.u32 q, its_tag, $4, q;")


@gluon.jit
def received(mail, i, PARTS: gl.constexpr):
    """What all programs of the cluster found of their i-th row, when it is there: two fp32 [32], 0 beyond PARTS, the
    same in every warp."""
    return read_mail(mail, i, part_numbers(), PARTS, _OF_OTHER_ROWS)


def parted(x: Tensor, width: int) -> TensorDescriptor:
    """x [M, N], N a multiple of LINE, for the tensor memory accelerator in parts of `width` columns; of a copy, where
    its place or strides do not suit it."""
    x, (stride, last) = for_bulk(x)
    count, cols = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=3)
    return TensorDescriptor(x, [count, cols // LINE, LINE], [stride, LINE, last], [1, width // LINE, LINE], layout)


def no_room(device: torch.device, cols: int) -> list[str]:
    """Why `device` cannot start the programs that rows of `cols` columns may take, one to a multiprocessor, together;
    empty where it can, as where it is not here to be asked."""
    parts = min(MOST_PARTS, cdiv(cols, NARROWEST))
    if device.type != "cuda" or clusters_of(device, parts, 1):
        return []
    return [f"{parts} programs share a row of {cols} columns, and this device has no room for a cluster of so many"]


WIDEST = MOST_PARTS * 8192


def width_refused(cols: int, more_than: int) -> list[str]:
    """Why rows of `cols` columns are not for kernels of parts, where Triton's are as fast up to `more_than`."""
    if more_than < cols <= WIDEST and cols % LINE == 0:
        return []
    return [
        f"rows have {cols} columns; more than {more_than}, where Triton's kernels are slower, up to {WIDEST} "
        f"and multiples of {LINE} are served"
    ]


class PartsConfig(NamedTuple):
    """width: columns of a part. slots: how many a program has in shared memory. per_sm: programs of a multiprocessor.
    max_registers: of a thread, so that so many fit; 0 leaves it to the compiler."""

    width: int
    slots: int
    num_warps: int
    per_sm: int
    max_registers: int


def parts_grid(x: Tensor, config: PartsConfig) -> tuple[int, int]:
    """(groups, parts) for the rows of x [M, N]: how many are worked on at once, by how many programs each."""
    parts = cdiv(x.shape[1], config.width)
    return max(1, min(x.shape[0], clusters_of(x.device, parts, config.per_sm))), parts


def parts_flags(cols: int, parts: int, config: PartsConfig) -> dict[str, Any]:
    """What a kernel for rows of `cols` columns in so many parts is compiled and launched with. The programs of a group,
    which wait for each other, are a cluster: the device starts all of them or none, whatever else runs on it."""
    flags = {"PARTS": parts, "EVEN": cols % config.width == 0, "WIDTH": config.width, "SLOTS": config.slots}
    flags |= {"num_warps": config.num_warps, "cluster": parts}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


def fitted(dims: Mapping[str, int], arch: Any, config: PartsConfig) -> PartsConfig:
    """`config` with as many slots as fit beside each other; one program a multiprocessor where fewer than two would."""
    mailbox = 16 * MAILS * MOST_PARTS
    slots = (arch.shared_memory // config.per_sm - 1024 - mailbox - 512) // (config.width * dims["bytes"])
    if slots < 2 and config.per_sm > 1:
        return fitted(dims, arch, config._replace(max_registers=0, per_sm=1))
    return config._replace(slots=max(1, min(6, slots)))
