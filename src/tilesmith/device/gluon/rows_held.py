"""Rows in the registers of a program, or of a cluster of programs that swap what they find of their parts, in Gluon.

A program reads its part of one row, all of it at once, and ends when that is written. The device starts the next one
where there is room: some read while others write, and no multiprocessor is bound to a number of rows. Programs that
stay for every so-many-th row (rows_gluon) pay where they keep what all rows need, as sums. (H200, 65,536 columns, ncu:
multiprocessors are active in 0.91 of the cycles here, of softmax, and were in 0.82 there, of RMS norm.)

Written for the Gluon of Triton 3.6.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.gluon import cluster as cluster_gluon
from tilesmith.device.gluon.rows import LINE, MOST_PARTS, opaque, packed, widened
from tilesmith.device.gluon.shim import gl, gluon, reserve
from tilesmith.engine import cdiv

_LINE, _HEAD = gl.constexpr(LINE), gl.constexpr(cluster_gluon.HEAD)


@gluon.jit
def columns(part, chunk: gl.constexpr, CHUNKS: gl.constexpr):
    """Of a chunk of a part: a line of LINE neighbours a warp."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    return (part * CHUNKS + chunk) * WIDTH + gl.arange(0, WIDTH, LANES)


@gluon.jit
def part_of(row_ptr, part, cols, CHUNKS: gl.constexpr, EVEN: gl.constexpr):
    """All chunks of a part of a row."""
    return further((), row_ptr, part, cols, CHUNKS, CHUNKS, EVEN)


@gluon.jit
def further(
    chunks, row_ptr, part, cols, NUMBER: gl.constexpr, CHUNKS: gl.constexpr, EVEN: gl.constexpr,
    BEYOND: gl.constexpr = 0,
):  # fmt: skip
    """The first chunks of a part of a row and the next ones, until they are NUMBER, or all, for `values`; of 16 bits
    two values a word, and the word BEYOND the last column. They are on their way from here, in this order."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    PER_WORD: gl.constexpr = 32 // row_ptr.dtype.element_ty.primitive_bitwidth
    WORDS: gl.constexpr = gl.BlockedLayout([8 // PER_WORD], [32], [gl.num_warps()], [0])
    if PER_WORD == 2:
        row_ptr = row_ptr.to(gl.pointer_type(gl.int32))
    for c in gl.static_range(len(chunks), NUMBER if NUMBER < CHUNKS else CHUNKS):
        word = (part * CHUNKS + c) * (WIDTH // PER_WORD) + gl.arange(0, WIDTH // PER_WORD, WORDS)
        if EVEN:
            chunks += (gl.load(row_ptr + word),)
        else:
            chunks += (gl.load(row_ptr + word, mask=word < cols // PER_WORD, other=BEYOND),)
    return chunks


@gluon.jit
def values(words, dtype: gl.constexpr):
    """A chunk in fp32, a line a warp."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    return gl.reshape(widened(words, dtype, WIDTH), [gl.num_warps(), _LINE])


@gluon.jit
def values_again(words, dtype: gl.constexpr):
    """`values` for a second use of words (`opaque`)."""
    if dtype.primitive_bitwidth == 16:
        words = opaque(words)
    return values(words, dtype)


@gluon.jit
def flat(lines):
    """Lines of warps as they lie in `columns`."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    return gl.convert_layout(gl.reshape(lines, [WIDTH]), LANES, assert_trivial=True)


@gluon.jit
def words_of(lines, dtype: gl.constexpr):
    """fp32 lines, rounded, as `part_of` returns them."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    return packed(flat(lines).to(dtype), WIDTH)


@gluon.jit
def warps_of_row(PARTS: gl.constexpr):
    """The numbers of a row's warps, and others beyond them: in the layout of what `swap` returns."""
    MOST: gl.constexpr = 1 if PARTS == 1 else 2 if PARTS == 2 else 4 if PARTS <= 4 else 8 if PARTS <= 8 else 16
    EACH: gl.constexpr = max(1, MOST * gl.num_warps() // 32)
    return gl.arange(0, 32 * EACH, gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))


@gluon.jit
def columns_of_warps(cols, PARTS: gl.constexpr, CHUNKS: gl.constexpr):
    """How many columns each warp of a row has, fp32."""
    WARPS: gl.constexpr = gl.num_warps()
    warp = warps_of_row(PARTS)
    after_first = cols // _LINE - (warp // WARPS) * (CHUNKS * WARPS) - warp % WARPS
    lines = gl.minimum(gl.maximum((after_first + WARPS - 1) // WARPS, 0), CHUNKS)
    return gl.where(warp < PARTS * WARPS, lines * _LINE, 0).to(gl.float32)


@gluon.jit
def own_warp():
    """The number of each warp, int32 [warps]."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    return gl.arange(0, gl.num_warps(), gl.SliceLayout(1, LINES))


@gluon.jit
def lines_after(part, cols, CHUNKS: gl.constexpr):
    """How many lines of a row begin with a part's first line of each warp, int32 [warps, 1]; may be below 1."""
    return cols // _LINE - part * (CHUNKS * gl.num_warps()) - gl.expand_dims(own_warp(), 1)


@gluon.jit
def open_room(PARTS: gl.constexpr):
    """The address of shared memory for two numbers of each warp of a row, behind room for a barrier, which completes
    when they are there; one program needs none."""
    BYTES: gl.constexpr = 8 * PARTS * gl.num_warps()
    if PARTS > 1:
        room = cluster_gluon.open_room(BYTES, 128)
    else:
        room = reserve(_HEAD + BYTES, 128, "")
    return room


@gluon.jit
def swap(room, part, a, b, PARTS: gl.constexpr):
    """Two numbers of each warp, fp32 [warps], told to all programs of the row: those of all of the row's warps, 0
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
    """chunks: how often a thread has 8 neighbours of a part. max_registers: of a thread; 0 leaves it to the
    compiler."""

    chunks: int
    num_warps: int
    max_registers: int


def held(cols: int, size: int, chunks: int, num_warps: int, max_registers: int) -> HeldConfig:
    """A configuration for rows of `cols` columns of `size` bytes: up to `chunks` of 16 bits, half of 32, but so many
    that 8 programs hold a row (more find room in fewer multiprocessors), and no more than parts of one size need."""
    line = num_warps * LINE
    chunks = max(1, chunks * 2 // size, cdiv(cols, 8 * line))
    chunks = cdiv(cols, cdiv(cols, chunks * line) * line)
    return HeldConfig(chunks, num_warps, max_registers if size <= 2 else 0)


def held_grid(x: Tensor, config: HeldConfig) -> tuple[int, int]:
    """(programs, parts) for the rows of x [M, N]."""
    parts = cdiv(x.shape[1], config.chunks * config.num_warps * LINE)
    return x.shape[0] * parts, parts


def held_fit(config: HeldConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """`config` with so many chunks that a cluster can hold a row."""
    least = cdiv(dims["cols"], MOST_PARTS * config.num_warps * LINE)
    return config._replace(chunks=max(config.chunks, least))


HELD_CHOICES = {"chunks": (2, 4, 8), "num_warps": (4, 8, 16), "max_registers": (0, 64, 80)}


def held_flags(cols: int, parts: int, config: HeldConfig) -> dict[str, Any]:
    """What a kernel for rows of `cols` columns in so many parts is compiled and launched with."""
    even = cols == parts * config.chunks * config.num_warps * LINE
    flags = {"PARTS": parts, "CHUNKS": config.chunks, "EVEN": even, "num_warps": config.num_warps, "cluster": parts}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


@gluon.jit
def row_of(ptr, row, stride):
    """Where a row begins; stride: of rows, in 16 bytes."""
    UNIT: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return ptr + row.to(gl.int64) * stride * UNIT
