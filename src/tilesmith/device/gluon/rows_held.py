"""Rows held in registers by one CTA, or by a cluster of CTAs that exchange partial sums through DSMEM, in Gluon.

A CTA loads its part of one row at once and ends when the result is stored. The device then starts the next CTA: some
load while others store, and no multiprocessor is tied to a number of rows. Persistent CTAs (`device.gluon.rows`) pay
off where they keep what all rows need, such as sums over rows. (H200, 65,536 columns, ncu: multiprocessors are active
in 0.91 of the cycles here, for softmax, and in 0.82 there, for RMS norm.)

Written for the Gluon of Triton 3.6.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.gluon import cluster as cluster_gluon
from tilesmith.device.gluon.rows import LINE, MOST_PARTS, ctas_of_row, optimization_barrier, pack, unpack_fp32
from tilesmith.device.gluon.shim import gl, gluon, reserve_smem
from tilesmith.device.rows import more_warps
from tilesmith.engine import cdiv, next_power_of_2

UNIT = 16  # columns of which rows have multiples: 16-byte loads of any dtype then end where a row does
_LINE, _HEAD = gl.constexpr(LINE), gl.constexpr(cluster_gluon.HEAD)


@gluon.jit
def columns(part, chunk: gl.constexpr, CHUNKS: gl.constexpr):
    """The columns of a chunk of a part: one line of LINE neighbours per warp."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    return (part * CHUNKS + chunk) * WIDTH + gl.arange(0, WIDTH, LANES)


@gluon.jit
def load_part(row_ptr, part, cols, CHUNKS: gl.constexpr, WHOLE: gl.constexpr, BEYOND: gl.constexpr = 0):
    """Load all chunks of a part of a row."""
    return load_chunks((), row_ptr, part, cols, CHUNKS, CHUNKS, WHOLE, BEYOND)


@gluon.jit
def load_chunks(
    chunks, row_ptr, part, cols, NUMBER: gl.constexpr, CHUNKS: gl.constexpr, WHOLE: gl.constexpr,
    BEYOND: gl.constexpr = 0,
):  # fmt: skip
    """Load further chunks of a part of a row until there are NUMBER of them, or all, as `chunk_fp32` takes them: 16-bit
    values packed two per word, and the word BEYOND past the last column. The first WHOLE chunks of each part lie before
    it. The loads are issued here, in this order."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    PER_WORD: gl.constexpr = 32 // row_ptr.dtype.element_ty.primitive_bitwidth
    WORDS: gl.constexpr = gl.BlockedLayout([8 // PER_WORD], [32], [gl.num_warps()], [0])
    if PER_WORD == 2:
        row_ptr = row_ptr.to(gl.pointer_type(gl.int32))
    for c in gl.static_range(len(chunks), NUMBER if NUMBER < CHUNKS else CHUNKS):
        word = (part * CHUNKS + c) * (WIDTH // PER_WORD) + gl.arange(0, WIDTH // PER_WORD, WORDS)
        if c < WHOLE:
            chunks += (gl.load(row_ptr + word),)
        else:
            chunks += (gl.load(row_ptr + word, mask=word < cols // PER_WORD, other=BEYOND),)
    return chunks


@gluon.jit
def chunk_fp32(words, dtype: gl.constexpr):
    """A chunk in fp32, one line per warp."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    return gl.reshape(unpack_fp32(words, dtype, WIDTH), [gl.num_warps(), _LINE])


@gluon.jit
def chunk_fp32_again(words, dtype: gl.constexpr):
    """`chunk_fp32` for a second use of the same words (`optimization_barrier`)."""
    if dtype.primitive_bitwidth == 16:
        words = optimization_barrier(words)
    return chunk_fp32(words, dtype)


@gluon.jit
def flatten_lines(lines):
    """Lines of warps, in the layout of `columns`."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    return gl.convert_layout(gl.reshape(lines, [WIDTH]), LANES, assert_trivial=True)


@gluon.jit
def pack_lines(lines, dtype: gl.constexpr):
    """fp32 lines, rounded to `dtype` and packed as `load_part` returns them."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    return pack(flatten_lines(lines).to(dtype), WIDTH)


@gluon.jit
def before_end(part, chunk: gl.constexpr, cols, CHUNKS: gl.constexpr):
    """Which values of a chunk lie before the last column, int1 [warps, LINE]. cols is a multiple of 8: the neighbours
    of a thread share one comparison."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    group = gl.arange(0, WIDTH, LANES) // 8
    return gl.reshape(group < cols // 8 - (part * CHUNKS + chunk) * (WIDTH // 8), [gl.num_warps(), _LINE])


@gluon.jit
def warps_of_row(PARTS: gl.constexpr):
    """The numbers of a row's warps, over all CTAs, and perhaps others beyond them: in the layout of what `exchange`
    returns."""
    MOST: gl.constexpr = 1 if PARTS == 1 else 2 if PARTS == 2 else 4 if PARTS <= 4 else 8 if PARTS <= 8 else 16
    NUMBER: gl.constexpr = max(2, MOST * gl.num_warps())
    return gl.arange(0, NUMBER, gl.BlockedLayout([max(1, NUMBER // 32)], [32], [gl.num_warps()], [0]))


@gluon.jit
def _columns_from(lines, cols, CHUNKS: gl.constexpr):
    """How many columns a warp holds, behind whose first line's beginning `lines` whole lines of the row follow."""
    WARPS: gl.constexpr = gl.num_warps()
    whole = gl.minimum(gl.maximum((lines + (WARPS - 1)) // WARPS, 0), CHUNKS)
    last = (lines >= 0) & (lines < CHUNKS * WARPS) & (lines % WARPS == 0)  # the line that is no whole one
    return whole * _LINE + gl.where(last, cols % _LINE, 0)


@gluon.jit
def columns_of_warps(cols, PARTS: gl.constexpr, CHUNKS: gl.constexpr):
    """How many columns each warp of a row holds, fp32."""
    WARPS: gl.constexpr = gl.num_warps()
    warp = warps_of_row(PARTS)
    lines = cols // _LINE - (warp // WARPS) * (CHUNKS * WARPS) - warp % WARPS
    return gl.where(warp < PARTS * WARPS, _columns_from(lines, cols, CHUNKS), 0).to(gl.float32)


@gluon.jit
def own_columns(part, cols, CHUNKS: gl.constexpr):
    """How many columns each warp of a part holds, and how many in its first chunk: two int32 [warps, 1]."""
    lines = lines_after(part, cols, CHUNKS)
    first = gl.minimum(gl.maximum(lines * _LINE + cols % _LINE, 0), _LINE)
    return _columns_from(lines, cols, CHUNKS), first


@gluon.jit
def warp_ids():
    """The number of each warp, int32 [warps]."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    return gl.arange(0, gl.num_warps(), gl.SliceLayout(1, LINES))


@gluon.jit
def lines_after(part, cols, CHUNKS: gl.constexpr):
    """How many whole lines of a row begin at or after each warp's first line of a part, int32 [warps, 1]; may be below
    1."""
    return cols // _LINE - part * (CHUNKS * gl.num_warps()) - gl.expand_dims(warp_ids(), 1)


@gluon.jit
def open_exchange(PARTS: gl.constexpr):
    """The address of shared memory for two numbers from each warp of a row, behind an mbarrier that completes when they
    have arrived; a row of one CTA needs no mbarrier."""
    BYTES: gl.constexpr = 8 * PARTS * gl.num_warps()
    if PARTS > 1:
        room = cluster_gluon.open_dsmem(BYTES, 128)
    else:
        room = reserve_smem(_HEAD + BYTES, 128, "")
    return room


@gluon.jit
def exchange(room, part, a, b, PARTS: gl.constexpr):
    """Send two numbers of each warp, fp32 [warps], to all CTAs of the row; returns those of all of the row's warps, 0
    beyond them, the same in every warp. Once in a kernel, by all of its warps."""
    WARPS: gl.constexpr = gl.num_warps()
    TELL: gl.constexpr = (
        f"""barrier.cluster.wait.acquire.aligned;
        setp.lt.u32 p, lane, {PARTS};
        @p mapa.shared::cluster.u32 to, to, lane;
        @p mapa.shared::cluster.u32 lane, $4, lane;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [to], {{$2, $3}}, [lane];
        again:
        mbarrier.try_wait.parity.shared::cta.b64 p, [$4], 0;
        @!p bra again;"""
        if PARTS > 1
        else """setp.eq.u32 p, lane, 0;
        @p st.shared.v2.b32 [to], {$2, $3};
        barrier.sync 0;"""
    )
    gl.inline_asm_elementwise(
        f"""{{
        .reg .b32 lane, to;
        .reg .pred p;
        mov.u32 to, %tid.x;
        and.b32 lane, to, 31;
        shr.u32 to, to, 5;
        mad.lo.u32 to, to, 8, $1;
        {TELL}
        mov.b32 $0, to;
        }}""",
        "=r,r,r,r,r",
        [room + _HEAD + part * (8 * WARPS), a.to(gl.int32, bitcast=True), b.to(gl.int32, bitcast=True), room],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    warp = warps_of_row(PARTS)
    a, b = gl.inline_asm_elementwise(
        f"""{{
        .reg .pred p;
        setp.lt.u32 p, $3, {PARTS * WARPS};
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        @p ld.shared.v2.b32 {{$0, $1}}, [$2];
        }}""",
        "=&r,=&r,r,r", [room + _HEAD + warp * 8, warp], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a.to(gl.float32, bitcast=True), b.to(gl.float32, bitcast=True)


class HeldConfig(NamedTuple):
    """chunks: how many times 8 neighbours of a part a thread holds. max_registers: per thread; 0 leaves it to the
    compiler."""

    chunks: int
    num_warps: int
    max_registers: int


def held_config(cols: int, size: int, chunks: int, num_warps: int, max_registers: int) -> HeldConfig:
    """A configuration for rows of `cols` columns of `size` bytes: up to `chunks` chunks of 16-bit values, half as many
    of 32-bit ones. There are enough chunks that 8 CTAs hold a row, since larger clusters fit fewer multiprocessors, and
    no more than equal parts need."""
    line = num_warps * LINE
    chunks = max(1, chunks * 2 // size, cdiv(cols, 8 * line))
    chunks = cdiv(cols, cdiv(cols, chunks * line) * line)
    return HeldConfig(chunks, num_warps, max_registers if size <= 2 else 0)


# of 16-bit values that a thread holds: 64. With more, layer norm takes so many registers that few CTAs fit.
MOST_CHUNKS = 8


def fewer_lines(cols: int) -> bool:
    """Whether lines of LINE columns leave fewer lanes idle than a tile whose width is a power of two; up to 8,192
    columns, which one CTA holds."""
    return cols < 8192 and cdiv(cols, LINE) * LINE < next_power_of_2(cols)


def one_cta_config(dims: Mapping[str, int], arch: Any, size: int) -> HeldConfig:
    """A configuration by which one CTA holds a row, of values of `size` bytes.

    Of as few warps as hold it by MOST_CHUNKS chunks of 16-bit values each, half as many of 32-bit ones: fewer warps
    leave no more lanes idle, and repeat what each does once for a row less often. Where rows are few, of more warps
    with fewer chunks (`device.rows.more_warps`). Figures: docs/log/norms.md, docs/log/softmax.md."""
    lines, warps = cdiv(dims["cols"], LINE), 1
    while cdiv(lines, warps) > MOST_CHUNKS * 2 // size:
        warps *= 2
    while warps < 16 and lines > warps:
        saved = 8 * (cdiv(lines, warps) - cdiv(lines, 2 * warps))
        if not more_warps(dims["rows"], arch.sms, warps, saved, fixed=16):
            break
        warps *= 2
    return HeldConfig(cdiv(lines, warps), warps, 0)


def held_parts(cols: int, config: HeldConfig) -> int:
    """How many CTAs hold a row of `cols` columns."""
    return cdiv(cols, config.chunks * config.num_warps * LINE)


def held_grid(x: Tensor, config: HeldConfig) -> tuple[int, int]:
    """(CTAs, parts) for the rows of x [M, N]."""
    parts = held_parts(x.shape[1], config)
    return x.shape[0] * parts, parts


def held_tells(cols: int, config: HeldConfig) -> list[str]:
    """What `explain` says of a kernel that holds rows in registers."""
    return [f"{ctas_of_row(held_parts(cols, config), cols)} in registers, read once"]


def held_fit(config: HeldConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """`config` with enough chunks that a cluster can hold a row."""
    least = cdiv(dims["cols"], MOST_PARTS * config.num_warps * LINE)
    return config._replace(chunks=max(config.chunks, least))


HELD_CHOICES = {"chunks": (2, 4, 8), "num_warps": (4, 8, 16), "max_registers": (0, 64, 80)}


def held_flags(cols: int, parts: int, config: HeldConfig) -> dict[str, Any]:
    """The constexpr and launch arguments of a kernel for rows of `cols` columns in `parts` parts."""
    line = config.num_warps * LINE
    whole = min(config.chunks, max(0, cols // line - (parts - 1) * config.chunks))  # of the last part, in all parts
    flags = {"PARTS": parts, "CHUNKS": config.chunks, "WHOLE": whole, "num_warps": config.num_warps, "cluster": parts}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


@gluon.jit
def row_pointer(ptr, row, stride):
    """The address of a row; stride: between rows, in units of 16 bytes."""
    UNIT: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return ptr + row.to(gl.int64) * stride * UNIT
