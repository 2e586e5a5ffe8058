"""Rows wider than one CTA holds, in Gluon: a cluster of CTAs reads each row from global memory once and exchanges
partial sums through distributed shared memory (DSMEM).

Each CTA works on its own columns of the same rows. TMA loads of later rows fill a ring buffer in shared memory while
the current part is in registers. A CTA sends the two numbers that it found of its part to every other CTA of the
cluster; while it waits for theirs, other CTAs of its multiprocessor have work.

The device starts all CTAs of a cluster or none, and a cluster never waits for another one. A CTA ends only when
everything sent to it has arrived, because its shared memory must exist until then.

Written for the Gluon of Triton 3.6.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.alignment import tma_view
from tilesmith.device.gluon.cluster import resident_clusters
from tilesmith.device.gluon.shim import (
    TensorDescriptor,
    gl,
    gluon,
    mbarrier_expect,
    reinterpret,
    reserve_smem,
    tma_copy,
)
from tilesmith.engine import cdiv

LINE = 256  # columns of a line of a TMA box: the most that TMA takes, and what a warp loads at once
MOST_PARTS = 16  # of a row: the CTAs of the largest (non-portable) cluster
NARROWEST = 1024  # columns of a part
MAILBOX_ROWS = 4  # rows for which a mailbox has entries; a CTA is at most one row ahead of another
_LINE, _MAILS, _MOST_PARTS = gl.constexpr(LINE), gl.constexpr(MAILBOX_ROWS), gl.constexpr(MOST_PARTS)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def smem_ring(SLOTS: gl.constexpr, WIDTH: gl.constexpr, dtype: gl.constexpr):
    """A ring buffer in shared memory: SLOTS pipeline stages of WIDTH columns."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=BITS, rank=3)
    return gl.allocate_shared_memory(dtype, [SLOTS, 1, WIDTH // _LINE, _LINE], BOX)


@gluon.jit
def prefetch_next(a_desc, b_desc, c_desc, a, b, c, full, i, first, step, mine, part, WIDTH: gl.constexpr):
    """If i < mine, start TMA loads of a part of row first + i · step into slot i % SLOTS of up to three ring buffers.
    Descriptors may be None."""
    if i < mine:
        prefetch_row(a_desc, b_desc, c_desc, a, b, c, full, i % full.shape[0], first + i * step, part, WIDTH)


@gluon.jit
def prefetch_row(a_desc, b_desc, c_desc, a, b, c, full, slot, row, part, WIDTH: gl.constexpr):
    """Start TMA loads of a part of a row into a slot of up to three ring buffers."""
    BYTES: gl.constexpr = (
        a_desc.block_type.nbytes
        + (0 if b_desc is None else b_desc.block_type.nbytes)
        + (0 if c_desc is None else c_desc.block_type.nbytes)
    )
    at = [row, part * (WIDTH // _LINE), 0]
    mbarrier_expect(full.index(slot), BYTES)
    tma_copy(a_desc, at, full.index(slot), a.index(slot))
    if b_desc is not None:
        tma_copy(b_desc, at, full.index(slot), b.index(slot))
    if c_desc is not None:
        tma_copy(c_desc, at, full.index(slot), c.index(slot))


@gluon.jit
def load_packed(slots, slot, WIDTH: gl.constexpr):
    """Load a slot from shared memory into registers, 8 neighbours per thread. 16-bit values stay packed, two per 32-bit
    word, until `unpack_fp32`."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if slots.dtype.primitive_bitwidth == 16:
        words = reinterpret(slots.index(slot), gl.int32, [WIDTH // 2], PLAIN).load(WORDS)
    else:
        words = reinterpret(slots.index(slot), slots.dtype, [WIDTH], PLAIN).load(LANES)
    return words


@gluon.jit
def pack(values, WIDTH: gl.constexpr):
    """Values of a part, 8 neighbours per thread, packed as `load_packed` returns them."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    if values.dtype.primitive_bitwidth == 16:
        low, high = gl.split(gl.reshape(values.to(gl.int16, bitcast=True), [WIDTH // 2, 2]))
        # written with shifts, ptxas would unpack the converted pairs and pack them again
        words = gl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
        values = gl.convert_layout(words, WORDS, assert_trivial=True)
    return values


@gluon.jit
def unpack(words, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """What `load_packed` returned, in `dtype` [WIDTH]."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if dtype.primitive_bitwidth == 16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        values = gl.reshape(gl.join(low, high), [WIDTH]).to(dtype, bitcast=True)
        words = gl.convert_layout(values, LANES, assert_trivial=True)
    return words


@gluon.jit
def split_fp32(words, dtype: gl.constexpr):
    """The two 16-bit values of each 32-bit word, in fp32. Those of bf16 by a shift and a mask: the compiler's own
    conversion takes three instructions for the two."""
    if dtype == gl.bfloat16:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = (words & 65535).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def optimization_barrier(words):
    """The same words, as values that the compiler knows nothing about (an empty asm statement). Without it a second use
    of packed words would make the compiler keep the unpacked values of the first use, which take twice the registers.
    It also keeps pure computations at this place of the kernel."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=words.dtype, is_pure=False, pack=1)


@gluon.jit
def unpack_fp32(words, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """What `load_packed` returned, in fp32 [WIDTH]."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if dtype.primitive_bitwidth == 16:
        low, high = split_fp32(words, dtype)
        words = gl.convert_layout(gl.reshape(gl.join(low, high), [WIDTH]), LANES, assert_trivial=True)
    return words


@gluon.jit
def warp_scratch():
    """Shared memory for one number per warp, such as a partial sum."""
    return gl.allocate_shared_memory(gl.float32, [gl.num_warps()], PLAIN)


@gluon.jit
def store_warp_sums(x, found, WIDTH: gl.constexpr):
    """Store the sum of each warp's values of a part in `found`, for `sum_of_warps`. The two take one barrier; gl.sum of
    a part takes four."""
    WARPS: gl.constexpr = gl.num_warps()
    by_warp = gl.reshape(x, [WIDTH // (256 * WARPS), WARPS, 256])
    found.store(gl.sum(gl.sum(by_warp, 0), 1))


@gluon.jit
def load_warp_values(found):
    """What each warp has stored in `warp_scratch`."""
    return found.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def sum_of_warps(found):
    """The sum over the warps of what `store_warp_sums` stored."""
    return gl.sum(load_warp_values(found), 0)


@gluon.jit
def part_ids():
    """0 to 31, in the layout of what `receive_from_cluster` returns."""
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def open_mailbox():
    """The address of an empty mailbox in this CTA's shared memory, returned once every CTA of the cluster has one: 2
    words for each of MAILBOX_ROWS rows and MOST_PARTS CTAs."""
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
    return reserve_smem(8 * WORDS, 128, EMPTY)


@gluon.jit
def mailbox_entry(mail, i, part):
    """The address of the mailbox entry for what CTA `part` of the cluster sends about its i-th row."""
    return mail + ((i % _MAILS) * _MOST_PARTS + part) * 16


@gluon.jit
def tagged_word(value, row):
    """fp32 `value` and the number of its row in one 64-bit word, which is stored atomically."""
    return (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | ((row + 1).to(gl.int64) << 32)


@gluon.jit
def send_to_cluster(mail, i, part, a, b, PARTS: gl.constexpr):
    """Send what this CTA found of its i-th row to all CTAs of the cluster (DSMEM); thread t stores to CTA t."""
    gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 to;
        .reg .pred p;
        mov.u32 $0, %tid.x;
        setp.lt.u32 p, $0, {PARTS};
        @p mapa.shared::cluster.u32 to, $1, $0;
        @p st.relaxed.cluster.shared::cluster.v2.b64 [to], {{$2, $3}};
        }}""",
        "=&r,r,l,l", [mailbox_entry(mail, i, part), tagged_word(a, i), tagged_word(b, i)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_mailbox(mail, i, part, PARTS: gl.constexpr, OLD: gl.constexpr):
    """What the CTAs `part` of the cluster sent in their i-th turn, when all of it is there: two fp32, 0 beyond
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
        "=&r,=&r,r,r,r", [mailbox_entry(mail, i, part), part, part * 0 + (i + 1)],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a.to(gl.float32, bitcast=True), b.to(gl.float32, bitcast=True)


_OF_OTHER_ROWS = gl.constexpr("setp.ne.u32 q, tag, $4; setp.ne.or.u32 q, its_tag, $4, q;")


@gluon.jit
def receive_from_cluster(mail, i, PARTS: gl.constexpr):
    """What all CTAs of the cluster found of their i-th row, once all of it has arrived: two fp32 [32], 0 beyond PARTS,
    the same in every warp."""
    return read_mailbox(mail, i, part_ids(), PARTS, _OF_OTHER_ROWS)


def tma_parts(x: Tensor, width: int) -> TensorDescriptor:
    """A TMA descriptor of x [M, N], N a multiple of LINE, for boxes of `width` columns; of a copy where TMA cannot take
    x itself."""
    x, (stride, last) = tma_view(x)
    count, cols = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=3)
    return TensorDescriptor(x, [count, cols // LINE, LINE], [stride, LINE, last], [1, width // LINE, LINE], layout)


def cluster_refused(device: torch.device, cols: int) -> list[str]:
    """Why `device` cannot run a cluster as large as rows of `cols` columns may need; empty where it can, and where it
    is not present to be asked."""
    parts = min(MOST_PARTS, cdiv(cols, NARROWEST))
    if device.type != "cuda" or resident_clusters(device, parts, 1):
        return []
    return [f"a row of {cols} columns takes a cluster of {parts} CTAs, and this device cannot run one so large"]


WIDEST = MOST_PARTS * 8192


def width_refused(cols: int, more_than: int, unit: int = LINE) -> list[str]:
    """Why kernels that split rows over a cluster do not serve rows of `cols` columns, multiples of `unit`. Triton's
    kernels are as fast up to `more_than` columns."""
    if more_than < cols <= WIDEST and cols % unit == 0:
        return []
    return [
        f"rows have {cols} columns; multiples of {unit} above {more_than}, where Triton's kernels are slower, and up "
        f"to {WIDEST} are supported"
    ]


class PartsConfig(NamedTuple):
    """width: columns of a CTA's part of a row. slots: pipeline stages in shared memory. per_sm: CTAs per
    multiprocessor. max_registers: per thread, so that so many CTAs fit; 0 leaves it to the compiler."""

    width: int
    slots: int
    num_warps: int
    per_sm: int
    max_registers: int


def ctas_of_row(parts: int, cols: int) -> str:
    """In words: how a row of `cols` columns is held by `parts` CTAs."""
    held = "one CTA holds" if parts == 1 else f"a cluster of {parts} CTAs holds"
    return f"{held} a row of {cols} columns"


def parts_of(cols: int, config: PartsConfig) -> int:
    """How many CTAs work on a row of `cols` columns."""
    return cdiv(cols, config.width)


def parts_tells(cols: int, config: PartsConfig) -> list[str]:
    """What `explain` says of a persistent kernel whose rows arrive by TMA in a ring buffer."""
    ring = f"{config.slots} pipeline stage{'s' * (config.slots > 1)}"
    return [f"{ctas_of_row(parts_of(cols, config), cols)}; persistent CTAs, rows arrive by TMA in {ring}"]


def parts_grid(x: Tensor, config: PartsConfig) -> tuple[int, int]:
    """(groups, parts) for the rows of x [M, N]: how many rows are worked on at once, and by how many CTAs each."""
    parts = parts_of(x.shape[1], config)
    return max(1, min(x.shape[0], resident_clusters(x.device, parts, config.per_sm))), parts


def parts_flags(cols: int, parts: int, config: PartsConfig) -> dict[str, Any]:
    """The constexpr and launch arguments of a kernel for rows of `cols` columns in `parts` parts. The CTAs of a row
    wait for each other, so they form a cluster, which the device starts as a whole whatever else runs on it."""
    flags = {"PARTS": parts, "EVEN": cols % config.width == 0, "WIDTH": config.width, "SLOTS": config.slots}
    flags |= {"num_warps": config.num_warps, "cluster": parts}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


def fitted(dims: Mapping[str, int], arch: Any, config: PartsConfig) -> PartsConfig:
    """`config` with as many slots as shared memory holds; one CTA per multiprocessor where fewer than two slots would
    fit."""
    mailbox = 16 * MAILBOX_ROWS * MOST_PARTS
    slots = (arch.shared_memory // config.per_sm - 1024 - mailbox - 512) // (config.width * dims["bytes"])
    if slots < 2 and config.per_sm > 1:
        return fitted(dims, arch, config._replace(max_registers=0, per_sm=1))
    return config._replace(slots=max(1, min(6, slots)))
