"""Norms of wide rows on Hopper, in Gluon: parts of rows in shared memory, each read from global memory once."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.gluon_shim import barriers, bulk_load, fence, gl, gluon, reinterpret, tiles_of, wait
from tilesmith.ops.norm import hopper as norms
from tilesmith.ops.norm.hopper import LINES, rounded, rows_and_outputs
from tilesmith.ops.rows_gluon import LINE, MOST_PARTS, PLAIN, parted
from tilesmith.ops.rows_held_gluon import (
    aligned_vector,
    columns,
    columns_of_warps,
    flat,
    further,
    lines_after,
    open_room,
    swap,
    values,
)

# A program of norm_fwd_parts_kernel holds its part in registers, and as many programs as find room in those of a
# multiprocessor have 96 KB of parts on their way or at work. Where a row takes a cluster, whose programs begin together
# and wait for one another, that is too little to keep memory busy. Shared memory has room for twice as much.
#
# H200, bf16, 2**27 values, of the copy rate, and that kernel's: RMS norm at 16,384, 32,768, 65,536 and 131,072 columns
# 0.95 (0.97), 0.96 (0.98), 0.96 (0.96) and 0.96 (0.93), layer norm 0.94 (0.96), 0.96 (0.91), 0.90 and 0.89 (staying
# programs: 0.92 and 0.94). Two rows a program, which read weight and bias once, are as fast at 32,768 (0.96) and gain
# nothing at 65,536 and 131,072 (0.91). With a residual, at 32,768, 65,536 and 131,072, layer norm 0.96 (0.97), 0.91
# (0.95) and 0.93 (0.92), RMS norm at 131,072 0.95 (0.95).
#
# These are of an earlier text; as it stands the kernel has not run on a GPU. Until its cases have, it ranks below
# `hopper` and serves only where it is pinned.


@gluon.jit
def _chunk(tile, chunk: gl.constexpr, CHUNKS: gl.constexpr):
    """A chunk of a part in shared memory, as `part_of` returns them."""
    PER_WORD: gl.constexpr = 32 // tile.dtype.primitive_bitwidth
    WIDTH: gl.constexpr = gl.num_warps() * LINES // PER_WORD
    WORDS: gl.constexpr = gl.BlockedLayout([8 // PER_WORD], [32], [gl.num_warps()], [0])
    TYPE: gl.constexpr = gl.int32 if PER_WORD == 2 else tile.dtype
    return reinterpret(tile, TYPE, [CHUNKS * WIDTH], PLAIN).slice(chunk * WIDTH, WIDTH).load(WORDS)


@gluon.jit
def norm_fwd_shared_parts_kernel(
    x_desc, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, cols, eps, offset,
    PARTS: gl.constexpr, CENTER: gl.constexpr, LLAMA: gl.constexpr, EVEN: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """y of a part of a row, when its program knows what the others of its cluster found of theirs; sums as in
    norm_fwd_parts_kernel."""
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    WARPS: gl.constexpr = gl.num_warps()
    X: gl.constexpr = x_desc.dtype
    tiles = tiles_of(1, x_desc)
    full = barriers(1, 1)
    fence()
    bulk_load(x_desc, [row, part * (CHUNKS * WARPS), 0], full.index(0), tiles.index(0))
    room = open_room(PARTS)
    x = tiles.index(0)
    row = row.to(gl.int64)
    after = lines_after(part, cols, CHUNKS)
    wait(full.index(0), 0)
    squares = gl.zeros_like(values(_chunk(x, 0, CHUNKS), X))
    total = squares
    pivot = gl.expand_dims(gl.sum(values(_chunk(x, 0, CHUNKS), X), 1) * (1.0 / LINES), 1)
    for c in gl.static_range(CHUNKS):
        value = values(_chunk(x, c, CHUNKS), X)
        if CENTER:
            value -= pivot
            if not EVEN:
                value = gl.where(after > c * WARPS, value, 0.0)
            total += value
        squares += value * value
    weights, biases = (), ()
    if weight_ptr is not None:
        weights = further(weights, weight_ptr, part, cols, 1, CHUNKS, EVEN)
    if bias_ptr is not None:
        biases = further(biases, bias_ptr, part, cols, 1, CHUNKS, EVEN)
    found = gl.sum(squares, 1)
    each_col = 1.0 / cols
    if CENTER:
        own_columns = gl.minimum(gl.maximum((after + (WARPS - 1)) // WARPS, 1), CHUNKS) * LINES
        summed = gl.sum(total, 1)
        excess = summed / gl.sum(own_columns, 1).to(gl.float32)
        means, spreads = swap(room, part, gl.sum(pivot, 1) + excess, found - summed * excess, PARTS)
        widths = columns_of_warps(cols, PARTS, CHUNKS)
        mean = gl.sum(means * widths, 0) * each_col
        spreads += widths * (means - mean) * (means - mean)
    else:
        spreads, _ = swap(room, part, found, found, PARTS)
    rstd = gl.rsqrt(gl.maximum(gl.sum(spreads, 0) * each_col, 0.0) + eps)
    if part == 0:
        gl.store(rstd_ptr + row, rstd)
        if CENTER:
            gl.store(mean_ptr + row, mean)
    for c in gl.static_range(CHUNKS):
        if weight_ptr is not None:
            weights = further(weights, weight_ptr, part, cols, c + 2, CHUNKS, EVEN)
        if bias_ptr is not None:
            biases = further(biases, bias_ptr, part, cols, c + 2, CHUNKS, EVEN)
        value = values(_chunk(x, c, CHUNKS), X)
        if CENTER:
            value -= mean
        value *= rstd
        if LLAMA:
            value = rounded(value, y_ptr)
        if weight_ptr is not None:
            factor = values(weights[c], weight_ptr.dtype.element_ty)
            if offset is not None:
                factor += offset
            if LLAMA and weight_ptr.dtype == y_ptr.dtype:
                factor = rounded(factor, weight_ptr)
            value *= factor
        if bias_ptr is not None:
            value += values(biases[c], bias_ptr.dtype.element_ty)
        col = columns(part, c, CHUNKS)
        gl.store(y_ptr + row * cols + col, flat(value).to(y_ptr.dtype.element_ty), mask=None if EVEN else col < cols)


class SharedConfig(NamedTuple):
    """chunks: how often a thread has 8 neighbours of a part, a power of two. max_registers: of a thread; 0 leaves it to
    the compiler."""

    chunks: int
    num_warps: int
    max_registers: int


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    center: bool,
    llama: bool,
    config: SharedConfig,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd); mean is None unless `center`."""
    (x, _), (y, _, mean, rstd) = rows_and_outputs(x, None, center)
    count, cols = x.shape
    if count:
        width = config.chunks * config.num_warps * LINE
        parts = cdiv(cols, width)
        launch(
            norm_fwd_shared_parts_kernel, (count * parts,),
            parted(x, width), aligned_vector(weight), aligned_vector(bias), y, mean, rstd, cols, eps, offset or None,
            PARTS=parts, CENTER=center, LLAMA=llama, EVEN=cols == parts * width, CHUNKS=config.chunks,
            num_warps=config.num_warps, cluster=parts,
            **({"maxnreg": config.max_registers} if config.max_registers else {}),
        )  # fmt: skip
    return y, mean, rstd


def _reasons(call: Any) -> list[str]:
    return norms.rows_refused(call, call.x.cols, 16_384 if hasattr(call, "bias") else 65_536)


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> SharedConfig:
    """32 KB of shared memory a program, so that six find room; of 32-bit values four, which take more registers."""
    size = dims["size"]
    return _fit(SharedConfig(16 // size, 8, 40 if size == 2 else 64), dims, arch, dtype)


def _fit(config: SharedConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> SharedConfig:
    """`config` with so many chunks, a power of two, that a cluster can hold a row, and no more than shared memory has
    room for."""
    line = config.num_warps * LINE
    most = 1
    while 2 * most * line * dims["size"] <= arch.shared_memory - 8192:
        most *= 2
    least = next_power_of_2(cdiv(dims["cols"], MOST_PARTS * line))
    return config._replace(chunks=max(least, min(next_power_of_2(config.chunks), most)))


CHOICES = {"chunks": (2, 4, 8, 16), "num_warps": (4, 8, 16), "max_registers": (0, 40, 48, 64, 80)}


@register_kernel("rms_norm", backend="hopper_shared", rank=24, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, eps, offset, casting: norms.row_dims(x, x), default=_default, choices=CHOICES, fit=_fit
    )
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    *,
    config: SharedConfig,
) -> tuple[Tensor, Tensor]:
    """y and rstd of `rms_norm`."""
    y, _, rstd = _forward(x, weight, None, eps, offset, False, casting == "llama", config)
    return y, rstd


@register_kernel("layer_norm", backend="hopper_shared", rank=24, rejects=_reasons)
@optimize_kernel(
    space=Space(dims=lambda x, weight, bias, eps: norms.row_dims(x, x), default=_default, choices=CHOICES, fit=_fit)
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, config: SharedConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    return _forward(x, weight, bias, eps, 0.0, True, False, config)
