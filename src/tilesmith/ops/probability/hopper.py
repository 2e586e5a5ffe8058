"""Softmax of wide rows on Hopper, in Gluon: parts of rows in registers, each read from memory once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, wait
from tilesmith.ops.rows import empty_rows, row_order, rows
from tilesmith.ops.rows_gluon import (
    PartsConfig,
    add_up,
    added_up,
    bring,
    fitted,
    no_room,
    of_warps,
    open_mail,
    part_numbers,
    parted,
    parts_flags,
    parts_grid,
    raw,
    received,
    ring,
    scratch,
    send,
    widened,
    width_refused,
)

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4028234663852886e38)

# Outputs are packed: the stride of their rows is `cols`. A program has one part of WIDTH columns of every
# num_groups-th row.


@gluon.jit
def _power(top, power):
    """What values relative to `top` are multiplied by, before 2 is raised to them: `power`, unless its product with the
    top overflows, as that with bf16's lowest number does, of which masks are made. Beside such a top any other number
    is nothing, whatever the power."""
    return gl.where(gl.abs(top * power) > 2e38, 1e-30, power)


@gluon.jit
def _base(top, power):
    """top · power, rounded, whatever it enters."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [top, power], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _weight(z, top, power, FUSED: gl.constexpr):
    """2 ** (power · z), relative to a top. FUSED: by one product and sum, off by a factor near 1 that `_between` has,
    too, so that all of a row share it."""
    if FUSED:
        power = _power(top, power)
        return gl.exp2(z * power - _base(top, power))
    else:
        return gl.exp2((z - top) * power)


@gluon.jit
def _between(top, higher, power, FUSED: gl.constexpr):
    """The factor that brings what is relative to one top to a higher one."""
    if FUSED:
        power = _power(higher, power)
        return gl.exp2(_base(top, power) - _base(higher, power))
    else:
        return gl.exp2((top - higher) * power)


@gluon.jit
def softmax_fwd_parts_kernel(
    x_desc, y_ptr, num_rows, cols, num_groups, scale,
    PARTS: gl.constexpr, POSITIVE: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """y of a program's parts of rows. What a thread has of a row is relative to its own maximum until the row's is
    known: one power of two for each value."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    FUSED: gl.constexpr = x_desc.dtype.primitive_bitwidth == 16
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs = ring(SLOTS, WIDTH, x_desc.dtype)
    full = barriers(SLOTS, 1)
    found, also_found = scratch(), scratch()
    fence()
    mail = open_mail()
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        bring(x_desc, None, None, xs, xs, xs, full, i, group, num_groups, mine, part, WIDTH)
    power = LOG2E
    if POSITIVE:  # the maximum of x is then that of scale · x
        power = scale * LOG2E
    for i in range(mine):
        slot = i % SLOTS
        wait(full.index(slot), i // SLOTS % 2)
        z = widened(raw(xs, slot, WIDTH), x_desc.dtype, WIDTH)
        if not POSITIVE:
            z *= scale
        if not EVEN:
            z = gl.where(inside, z, float("-inf"))
        z = gl.reshape(z, [WIDTH // (256 * WARPS), WARPS, 32, 8])
        tops = gl.maximum(gl.max(gl.max(z, 3), 0), LOWEST)  # not -inf, from which -inf cannot be subtracted
        weights = _weight(z, gl.expand_dims(gl.expand_dims(tops, 0), 3), power, FUSED)
        top = gl.max(tops, 1)
        factors = _between(tops, gl.expand_dims(top, 1), power, FUSED)
        found.store(top)
        also_found.store(gl.sum(gl.sum(gl.sum(weights, 3), 0) * factors, 1))
        warp_tops = of_warps(found)
        top = gl.max(warp_tops, 0)
        send(mail, i, part, top, gl.sum(of_warps(also_found) * _between(warp_tops, top, power, FUSED), 0), PARTS)
        # all warps have read the slot: their sums are in
        bring(x_desc, None, None, xs, xs, xs, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        every_top, totals = received(mail, i, PARTS)
        every_top = gl.where(part_numbers() < PARTS, every_top, LOWEST)
        row_top = gl.max(every_top, 0)
        over_total = 1.0 / gl.sum(totals * _between(every_top, row_top, power, FUSED), 0)
        factors = _between(tops, row_top, power, FUSED) * over_total
        y = weights * gl.expand_dims(gl.expand_dims(factors, 0), 3)
        y = gl.convert_layout(gl.reshape(y, [WIDTH]), LANES, assert_trivial=True)
        row = (group + i * num_groups).to(gl.int64)
        gl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def softmax_bwd_parts_kernel(
    y_desc, dy_desc, dx_ptr, num_rows, cols, num_groups, scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dx of a program's parts of rows, by the sums of y and of y · dy. Beyond the last column both arrive as 0."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    FUSED: gl.constexpr = dy_desc.dtype.primitive_bitwidth == 16
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    ys, dys = ring(SLOTS, WIDTH, y_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    full = barriers(SLOTS, 1)
    found, also_found = scratch(), scratch()
    fence()
    mail = open_mail()
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        bring(y_desc, dy_desc, None, ys, dys, ys, full, i, group, num_groups, mine, part, WIDTH)
    for i in range(mine):
        slot = i % SLOTS
        wait(full.index(slot), i // SLOTS % 2)
        y = widened(raw(ys, slot, WIDTH), y_desc.dtype, WIDTH)
        dy = widened(raw(dys, slot, WIDTH), dy_desc.dtype, WIDTH)
        add_up(y * dy, found, WIDTH)
        add_up(y, also_found, WIDTH)
        send(mail, i, part, added_up(found), added_up(also_found), PARTS)
        # all warps have read the slot: their sums are in
        bring(y_desc, dy_desc, None, ys, dys, ys, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        dots, totals = received(mail, i, PARTS)
        mean = gl.sum(dots, 0) * (1.0 / gl.sum(totals, 0))
        if FUSED:
            dx = y * (dy * scale - mean * scale)
        else:
            dx = y * (dy - mean) * scale
        row = (group + i * num_groups).to(gl.int64)
        gl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _reasons(call: Any) -> list[str]:
    return _common_reasons(call, call.x, FORWARD_ABOVE)


def _vjp_reasons(call: Any) -> list[str]:
    return _common_reasons(call, call.y, BACKWARD_ABOVE)


def _common_reasons(call: Any, read: Any, more_than: int) -> list[str]:
    reasons = []
    if read.dtype == torch.float64:
        reasons.append("the tensors are float64; these kernels compute in float32")
    reasons += width_refused(read.cols, more_than)
    if call.causal:
        reasons.append("causal: whole rows are read")
    return reasons or no_room(read.device, read.cols)


FORWARD_ABOVE, BACKWARD_ABOVE = 32_768, 16_384  # columns; up to there Triton's sweeps are as fast


def _dims(*read: Tensor) -> dict[str, int]:
    cols = read[0].shape[-1]
    return {"rows": read[0].numel() // cols, "cols": cols, "bytes": sum(t.element_size() for t in read)}


def _forward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, 2**27 values, of the copy rate at 65,536 and 131,072 columns: 0.89 and 0.89; swept twice by Triton's
    0.88 and 0.75, at 32,768 0.90 and 0.94."""
    return fitted(dims, arch, PartsConfig(16_384, 0, 16, 1, 128))


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, 2**27 values, of the copy rate at 32,768, 65,536 and 131,072 columns: 0.98, 0.98 and 0.97; Triton's
    0.95, 0.79 and 0.66."""
    return fitted(dims, arch, PartsConfig(8192, 0, 8, 2, 128))


CHOICES = {"width": (8192, 16_384), "slots": (2, 3, 4, 6), "num_warps": (4, 8, 16)}


@register_kernel("softmax", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(space=Space(dims=lambda x, scale, causal: _dims(x), default=_forward_default, choices=CHOICES))
def softmax(x: Tensor, scale: float = 1.0, causal: bool = False, *, config: PartsConfig) -> Tensor:
    """y of `softmax`."""
    order = row_order(x)
    y = empty_rows(x, order)
    x = rows(x, order)
    count, cols = x.shape
    if count:
        groups, parts = parts_grid(x, config)
        launch(
            softmax_fwd_parts_kernel, (groups * parts,),
            parted(x, config.width), y, count, cols, groups, scale,
            POSITIVE=scale > 0.0, **parts_flags(cols, parts, config),
        )  # fmt: skip
    return y


@register_kernel("softmax_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(space=Space(dims=lambda dy, y, *_: _dims(y, dy), default=_backward_default, choices=CHOICES))
def softmax_vjp(dy: Tensor, y: Tensor, scale: float, causal: bool, *, config: PartsConfig) -> Tensor:
    """dx of `softmax`."""
    order = row_order(y)
    dx = empty_rows(y, order)
    dy, y = rows(dy, order), rows(y, order)
    count, cols = y.shape
    if count:
        groups, parts = parts_grid(y, config)
        launch(
            softmax_bwd_parts_kernel, (groups * parts,),
            parted(y, config.width), parted(dy, config.width), dx,
            count, cols, groups, scale, **parts_flags(cols, parts, config),
        )  # fmt: skip
    return dx
