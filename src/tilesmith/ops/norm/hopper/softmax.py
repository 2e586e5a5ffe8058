"""Softmax of wide rows on Hopper, in Gluon: a cluster of CTAs holds a row in registers and reads it once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned
from tilesmith.device.gluon.rows import LINE, cluster_refused, width_refused
from tilesmith.device.gluon.rows_held import (
    HELD_CHOICES,
    UNIT,
    HeldConfig,
    before_end,
    chunk_fp32,
    chunk_fp32_again,
    columns,
    exchange,
    fewer_lines,
    flatten_lines,
    held_config,
    held_fit,
    held_flags,
    held_grid,
    held_tells,
    load_part,
    one_cta_config,
    open_exchange,
    row_pointer,
    warps_of_row,
)
from tilesmith.device.gluon.shim import gl, gluon
from tilesmith.device.rows import empty_rows, row_order, rows
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel, rehearsed

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4028234663852886e38)
# -inf, as `load_part` takes it: two of 16 bits a word
_BF16_HIDDEN, _FP16_HIDDEN = gl.constexpr(-0x7F0080), gl.constexpr(-0x3FF0400)
_FP32_HIDDEN = gl.constexpr(float("-inf"))

# Outputs are packed: the stride of their rows is `cols`. A CTA has one part of WIDTH columns of every
# num_groups-th row.


@gluon.jit
def power_beside(top, power):
    """The factor of values relative to `top` before exp2: `power`, unless its product with the top would be rounded by
    more than exp2 can hold, or overflow; then one by which that is 2**20 to 2**21. Another number of 16 bits is at
    least 2**-11 of the top away: its weight is 0, whatever the factor."""
    exponent = top.to(gl.int32, bitcast=True) & 0x7F800000  # in its place, so that nothing is divided
    return gl.minimum((0x7F000000 - gl.maximum(exponent - (20 << 23), 0)).to(gl.float32, bitcast=True), power)


@gluon.jit
def _base(top, power):
    """top · power, rounded in the same way wherever it is used."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [top, power], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def slope_and_base(top, power):
    """(slope, base), of which slope · z - base is the exponent of `relative_weight`."""
    power = power_beside(top, power)
    return power, _base(top, power)


@gluon.jit
def relative_weight(z, top, power, FUSED: gl.constexpr):
    """2 ** (power · z), relative to a top. FUSED: by one fma, which is off by a factor near 1; `between_tops` has the
    same factor, so that all of a row share it."""
    if FUSED:
        power = power_beside(top, power)
        return gl.exp2(z * power - _base(top, power))
    else:
        return gl.exp2((z - top) * power)


@gluon.jit
def between_tops(top, higher, power, FUSED: gl.constexpr):
    """The factor by which exponentials relative to one top are rescaled to a higher top."""
    if FUSED:
        power = power_beside(higher, power)
        return gl.exp2(_base(top, power) - _base(higher, power))
    else:
        return gl.exp2((top - higher) * power)


@gluon.jit
def softmax_fwd_parts_kernel(
    x_ptr, y_ptr, cols, x_stride, scale,
    PARTS: gl.constexpr, POSITIVE: gl.constexpr, WHOLE: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """y of a part of a row. Each thread's exponentials are relative to its own maximum until that of the row is known,
    so that each value takes one exp2."""
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    FUSED: gl.constexpr = DTYPE.primitive_bitwidth == 16
    room = open_exchange(PARTS)
    HIDDEN: gl.constexpr = (
        _FP32_HIDDEN if DTYPE == gl.float32 else _BF16_HIDDEN if DTYPE == gl.bfloat16 else _FP16_HIDDEN
    )
    words = load_part(row_pointer(x_ptr, row, x_stride), part, cols, CHUNKS, WHOLE, HIDDEN)
    power = LOG2E
    if POSITIVE:  # the maximum of x is then that of scale · x
        power = scale * LOG2E
    zs = ()
    for c in gl.static_range(CHUNKS):
        z = chunk_fp32(words[c], DTYPE)
        if not POSITIVE:
            z *= scale
            if c >= WHOLE:
                z = gl.where(before_end(part, c, cols, CHUNKS), z, float("-inf"))
        zs += (gl.reshape(z, [gl.num_warps(), 32, 8]),)
    most = zs[0]
    for c in gl.static_range(1, CHUNKS):
        most = gl.maximum(most, zs[c])
    tops = gl.maximum(gl.max(most, 2), LOWEST)  # not -inf, from which -inf cannot be subtracted
    weights = ()
    total = gl.zeros_like(most)
    for c in gl.static_range(CHUNKS):
        weight = relative_weight(zs[c], gl.expand_dims(tops, 2), power, FUSED)
        total += weight
        weights += (weight,)
    top = gl.max(tops, 1)
    found = gl.sum(gl.sum(total, 2) * between_tops(tops, gl.expand_dims(top, 1), power, FUSED), 1)
    every_top, totals = exchange(room, part, top, found, PARTS)
    every_top = gl.where(warps_of_row(PARTS) < PARTS * gl.num_warps(), every_top, LOWEST)
    row_top = gl.max(every_top, 0)
    over_total = 1.0 / gl.sum(totals * between_tops(every_top, row_top, power, FUSED), 0)
    factors = gl.expand_dims(between_tops(tops, row_top, power, FUSED) * over_total, 2)
    for c in gl.static_range(CHUNKS):
        col = columns(part, c, CHUNKS)
        y = flatten_lines(weights[c] * factors).to(y_ptr.dtype.element_ty)
        gl.store(y_ptr + row.to(gl.int64) * cols + col, y, mask=None if c < WHOLE else col < cols)


@gluon.jit
def softmax_bwd_parts_kernel(
    y_ptr, dy_ptr, dx_ptr, cols, y_stride, dy_stride, scale,
    PARTS: gl.constexpr, WHOLE: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """dx of a part of a row, from the sums of y and of y · dy. Beyond the last column both are 0."""
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    Y: gl.constexpr = y_ptr.dtype.element_ty
    DY: gl.constexpr = dy_ptr.dtype.element_ty
    FUSED: gl.constexpr = DY.primitive_bitwidth == 16
    room = open_exchange(PARTS)
    ys = load_part(row_pointer(y_ptr, row, y_stride), part, cols, CHUNKS, WHOLE)
    dys = load_part(row_pointer(dy_ptr, row, dy_stride), part, cols, CHUNKS, WHOLE)
    total = chunk_fp32(ys[0], Y)
    dot = total * chunk_fp32(dys[0], DY)
    for c in gl.static_range(1, CHUNKS):
        y = chunk_fp32(ys[c], Y)
        total += y
        dot += y * chunk_fp32(dys[c], DY)
    dots, totals = exchange(room, part, gl.sum(dot, 1), gl.sum(total, 1), PARTS)
    mean = gl.sum(dots, 0) * (1.0 / gl.sum(totals, 0))
    for c in gl.static_range(CHUNKS):
        col = columns(part, c, CHUNKS)
        y, dy = chunk_fp32_again(ys[c], Y), chunk_fp32_again(dys[c], DY)
        dx = y * (dy * scale - mean * scale) if FUSED else y * (dy - mean) * scale
        dx = flatten_lines(dx).to(dx_ptr.dtype.element_ty)
        gl.store(dx_ptr + row.to(gl.int64) * cols + col, dx, mask=None if c < WHOLE else col < cols)


def _reasons(call: Any) -> list[str]:
    return _rows_refused(call, call.x, FORWARD_ABOVE)


def _vjp_reasons(call: Any) -> list[str]:
    return _rows_refused(call, call.y, BACKWARD_ABOVE)


def _rows_refused(call: Any, read: Any, more_than: int) -> list[str]:
    if fewer_lines(read.cols):
        return rows_refused(call, read, 512, UNIT)
    return rows_refused(call, read, more_than)


def rows_refused(call: Any, read: Any, more_than: int, unit: int = LINE) -> list[str]:
    reasons = []
    if read.dtype == torch.float64:
        reasons.append("the tensors are float64; these kernels compute in float32")
    reasons += width_refused(read.cols, more_than, unit)
    if call.causal:
        reasons.append("causal: whole rows are read")
    return reasons or cluster_refused(read.device, read.cols)


# columns; up to there Triton's kernels are as fast, unless their tiles leave lanes idle
FORWARD_ABOVE, BACKWARD_ABOVE = 4096, 4096


def row_dims(*read: Tensor) -> dict[str, int]:
    cols = read[0].shape[-1]
    return {"rows": read[0].numel() // cols, "cols": cols, "bytes": sum(t.element_size() for t in read)}


def _forward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """A default for the forward. H200, bf16, 5,120 to 131,072 columns: 0.98 to 0.99 of the copy rate; Triton's kernel
    0.99 at 8,192 and 0.71 at 131,072."""
    if fewer_lines(dims["cols"]):
        return one_cta_config(dims, arch, dims["bytes"])
    warps, chunks = (4, 8) if dims["cols"] <= 8192 else (16, 4) if dims["cols"] <= 16_384 else (8, 8)
    return held_config(dims["cols"], dims["bytes"], chunks, warps, 0)


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """A default for the backward. H200, bf16, 8,192 to 131,072 columns: 1.03 to 1.05 of the copy rate, as two of its
    three tensors are read; Triton's kernel 1.05 to 0.69."""
    if fewer_lines(dims["cols"]):
        return one_cta_config(dims, arch, dims["bytes"] // 2)
    return held_config(dims["cols"], dims["bytes"] // 2, 4, 8, 0)


@register_kernel(
    "softmax",
    backend="hopper",
    rank=25,
    rejects=_reasons,
    tells=lambda x, scale, causal, *, config: held_tells(x.shape[-1], config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(dims=lambda x, scale, causal: row_dims(x), default=_forward_default, choices=HELD_CHOICES, fit=held_fit)
)
def softmax(x: Tensor, scale: float = 1.0, causal: bool = False, *, config: HeldConfig) -> Tensor:
    """y of `softmax`."""
    order = row_order(x)
    y = empty_rows(x, order)
    x = rows(x, order)
    count, cols = x.shape
    if count:
        ctas, parts = held_grid(x, config)
        x, x_stride = aligned(x)
        flags = held_flags(cols, parts, config)
        launch(softmax_fwd_parts_kernel, (ctas,), x, y, cols, x_stride, scale, POSITIVE=scale > 0.0, **flags)
    return y


@register_kernel(
    "softmax_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=lambda dy, y, scale, causal, *, config: held_tells(y.shape[-1], config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(dims=lambda dy, y, *_: row_dims(y, dy), default=_backward_default, choices=HELD_CHOICES, fit=held_fit)
)
def softmax_vjp(dy: Tensor, y: Tensor, scale: float, causal: bool, *, config: HeldConfig) -> Tensor:
    """dx of `softmax`."""
    order = row_order(y)
    dx = empty_rows(y, order)
    dy, y = rows(dy, order), rows(y, order)
    count, cols = y.shape
    if count:
        ctas, parts = held_grid(y, config)
        (y, y_stride), (dy, dy_stride) = aligned(y), aligned(dy)
        flags = held_flags(cols, parts, config)
        launch(softmax_bwd_parts_kernel, (ctas,), y, dy, dx, cols, y_stride, dy_stride, scale, **flags)
    return dx
