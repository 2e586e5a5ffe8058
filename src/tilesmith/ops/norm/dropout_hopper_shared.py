"""dropout_add_norm of the widest rows on Hopper, in Gluon, for RMS norm: parts of x and residual in shared memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.dropout import kernel_numbers, kernel_seed, parts_dropout_flags
from tilesmith.ops.dropout_gluon import drawn_here
from tilesmith.ops.gluon_shim import barriers, bulk_load, fence, gl, gluon, reinterpret, tiles_of, wait
from tilesmith.ops.norm import hopper as norms
from tilesmith.ops.norm.hopper import LINES, rows_and_outputs
from tilesmith.ops.philox_triton import load_key
from tilesmith.ops.rows import row_order
from tilesmith.ops.rows_gluon import LINE, MOST_PARTS, PLAIN, parted
from tilesmith.ops.rows_held_gluon import (
    aligned_vector,
    columns,
    flat,
    further,
    open_room,
    swap,
    values,
    words_of,
)


@gluon.jit
def _chunks(tile, CHUNKS: gl.constexpr):
    """The chunks of a part in shared memory; of 16 bits two values a word."""
    PER_WORD: gl.constexpr = 32 // tile.dtype.primitive_bitwidth
    TYPE: gl.constexpr = gl.int32 if PER_WORD == 2 else tile.dtype
    return reinterpret(tile, TYPE, [CHUNKS, gl.num_warps() * LINES // PER_WORD], PLAIN)


@gluon.jit
def _words(chunks, c: gl.constexpr, PER_WORD: gl.constexpr):
    """A chunk, as `part_of` returns them."""
    return chunks.index(c).load(gl.BlockedLayout([8 // PER_WORD], [32], [gl.num_warps()], [0]))


@gluon.jit
def _noted(kept, words, drop_below, c: gl.constexpr):
    """`kept` with bits c and c + 16 set where the two halves of the random `words` keep."""
    least = drop_below.to(gl.uint32, bitcast=True)
    low = gl.where((words << 16).to(gl.uint32, bitcast=True) >= least, 1 << c, 0)
    return kept | low | gl.where(words.to(gl.uint32, bitcast=True) >= least, 65536 << c, 0)


@gluon.jit
def _dropped(words, kept, c: gl.constexpr, PER_WORD: gl.constexpr):
    """A chunk with 0 where `kept` has no bit of c."""
    WORDS: gl.constexpr = gl.num_warps() * LINES
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if PER_WORD == 2:
        words &= ((kept >> c) & 0x00010001) * 0xFFFF
    else:
        both = gl.reshape(gl.join((kept >> c) & 1, (kept >> (c + 16)) & 1), [WORDS])
        words = gl.where(gl.convert_layout(both, LANES, assert_trivial=True) != 0, words, 0.0)
    return words


@gluon.jit
def dropout_add_norm_shared_parts_kernel(
    x_desc, residual_desc, weight_ptr, seed_ptr, y_ptr, s_ptr, rstd_ptr, cols, eps, drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, CHUNKS: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """y and s of a part of a row, when its program knows what the others of its cluster found of theirs. What is kept,
    a bit an element, is drawn while they are on their way; s takes the residual's place."""
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = x_desc.dtype
    PER_WORD: gl.constexpr = 32 // TYPE.primitive_bitwidth
    xs, residuals = tiles_of(1, x_desc), tiles_of(1, residual_desc)
    full = barriers(2, 1)
    fence()
    bulk_load(x_desc, [row, part * (CHUNKS * WARPS), 0], full.index(0), xs.index(0))
    bulk_load(residual_desc, [row, part * (CHUNKS * WARPS), 0], full.index(1), residuals.index(0))
    room = open_room(PARTS)
    x, residual = _chunks(xs.index(0), CHUNKS), _chunks(residuals.index(0), CHUNKS)
    row = row.to(gl.int64)
    kept = gl.full([WARPS * LINES // 2], 0, gl.int32, gl.BlockedLayout([4], [32], [WARPS], [0]))
    if seed_ptr is not None:
        key = load_key(seed_ptr)
        for c in gl.static_range(CHUNKS):
            first = row * cols + (part * CHUNKS + c) * (WARPS * LINES)
            kept = _noted(kept, drawn_here(key, first, WARPS * LINES, SHORT), drop_below, c)
    wait(full.index(0), 0)
    wait(full.index(1), 0)
    squares = gl.zeros_like(values(_words(x, 0, PER_WORD), TYPE))
    for c in gl.static_range(CHUNKS):
        words = _words(x, c, PER_WORD)
        if seed_ptr is not None:
            words = _dropped(words, kept, c, PER_WORD)
        s = values(words, TYPE)
        if seed_ptr is not None:
            s *= keep_scale
        s += values(_words(residual, c, PER_WORD), TYPE)
        words = words_of(s, TYPE)
        residual.index(c).store(words)
        col = columns(part, c, CHUNKS)
        gl.store(s_ptr + row * cols + col, flat(s).to(TYPE), mask=None if EVEN else col < cols)
        value = values(words, TYPE)
        squares += value * value
    weights = ()
    if weight_ptr is not None:
        weights = further(weights, weight_ptr, part, cols, 1, CHUNKS, EVEN)
    found = gl.sum(squares, 1)
    each_col = 1.0 / cols
    spreads, _ = swap(room, part, found, found, PARTS)
    rstd = gl.rsqrt(gl.maximum(gl.sum(spreads, 0) * each_col, 0.0) + eps)
    if part == 0:
        gl.store(rstd_ptr + row, rstd)
    for c in gl.static_range(CHUNKS):
        if weight_ptr is not None:
            weights = further(weights, weight_ptr, part, cols, c + 2, CHUNKS, EVEN)
        value = values(_words(residual, c, PER_WORD), TYPE) * rstd
        if weight_ptr is not None:
            value *= values(weights[c], weight_ptr.dtype.element_ty)
        col = columns(part, c, CHUNKS)
        gl.store(y_ptr + row * cols + col, flat(value).to(y_ptr.dtype.element_ty), mask=None if EVEN else col < cols)


class SharedConfig(NamedTuple):
    """chunks: how often a thread has 8 neighbours of a part, a power of two. max_registers: of a thread; 0 leaves it to
    the compiler."""

    chunks: int
    num_warps: int
    max_registers: int


def _reasons(call: Any) -> list[str]:
    reasons = norms.rows_refused(call._replace(seed=None), call.x.cols, ABOVE)
    if call.kind != "rms":
        reasons.append(f"kind is {call.kind!r}; RMS norm is served, layer norm's parts are as fast in registers")
    if call.residual.dtype != call.x.dtype:
        reasons.append(f"residual has dtype {call.residual.dtype}, x has {call.x.dtype}; one dtype is served")
    return reasons


ABOVE = 65_536  # columns; up to there parts held in registers are as fast


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> SharedConfig:
    """32 KB of shared memory a program, so that six find room. H200, of the copy rate, and held in registers: bf16 at
    65,536, 98,304 and 131,072 columns 0.96 (0.98), 0.94 (0.93) and 0.95 (0.94), fp32 at 131,072 0.76 (0.65). Layer norm
    so: bf16 0.96 (0.96), 0.90 (0.91) and 0.92 (0.92), fp32 0.69 (0.73). Not faster, bf16 at 131,072: s found again from
    x and the residual in place of kept 0.81 to 0.92, s in registers 0.93, parts of 16,384 columns 0.94; with 48
    registers, so that five programs find room, 0.92, with 32, which spill, 0.85."""
    return _fit(SharedConfig(4, 8, 36 if dims["size"] == 2 else 64), dims, arch, dtype)


def _fit(config: SharedConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> SharedConfig:
    """`config` with so many chunks, a power of two, that a cluster can hold a row, at most eight, for which there are
    bits, and no more than shared memory has room for; so also with four warps or more."""
    config = config._replace(num_warps=max(4, config.num_warps))
    line = config.num_warps * LINE
    most = 1
    while most < 8 and 2 * most * line * dims["bytes"] <= arch.shared_memory - 8192:
        most *= 2
    least = next_power_of_2(cdiv(dims["cols"], MOST_PARTS * line))
    return config._replace(chunks=max(least, min(next_power_of_2(config.chunks), most)))


@register_kernel("dropout_add_norm", backend="hopper_shared", rank=26, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, seed, p, kind, eps: norms.row_dims(x, x, residual),
        default=_default,
        choices={"chunks": (2, 4, 8), "num_warps": (4, 8, 16), "max_registers": (0, 36, 40, 64)},
        fit=_fit,
    )
)
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    kind: str = "layer",
    eps: float = 1e-5,
    *,
    config: SharedConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, no mean, and rstd of `dropout_add_norm`."""
    if row_order(x) is not None:  # the index that the mask counts by is that of a contiguous tensor
        x = x.contiguous()
    (x, residual), (y, s, _, rstd) = rows_and_outputs(x, residual, False)
    count, cols = x.shape
    if count:
        width = config.chunks * config.num_warps * LINE
        parts = cdiv(cols, width)
        short = parts_dropout_flags(count, cols, p)["SHORT"]
        launch(
            dropout_add_norm_shared_parts_kernel, (count * parts,),
            parted(x, width), parted(residual, width), aligned_vector(weight), kernel_seed(seed, p), y, s, rstd,
            cols, eps, *kernel_numbers(p),
            PARTS=parts, EVEN=cols == parts * width, CHUNKS=config.chunks, SHORT=short,
            num_warps=config.num_warps, cluster=parts,
            **({"maxnreg": config.max_registers} if config.max_registers else {}),
        )  # fmt: skip
    return y, s, rstd.new_empty(0), rstd
