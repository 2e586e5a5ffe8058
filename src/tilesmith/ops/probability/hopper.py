"""Softmax of wide rows on Hopper, in Gluon: parts of rows in shared memory, each read from memory once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, wait
from tilesmith.ops.rows import empty_rows, row_order, rows
from tilesmith.ops.rows_gluon import (
    LINE,
    MAILS_OF_PART,
    MOST_PARTS,
    PARTS_LANES,
    PartsConfig,
    add_up,
    added_up,
    collect,
    feed,
    fitted,
    flat,
    leave,
    mailbox,
    no_room,
    parted,
    parts_flags,
    parts_grid,
    peek,
    post,
    release,
    ring,
    scratch,
)

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4028234663852886e38)

# Outputs are packed: the stride of their rows is `cols`. A program has one part of WIDTH columns of every
# num_groups-th row.


@gluon.jit
def by_warp(x, WIDTH: gl.constexpr):
    """A part, 8 neighbours a thread, as [., warps, 256]: what is summed over the first and the last dim stays in a
    warp."""
    WARPS: gl.constexpr = gl.num_warps()
    return gl.reshape(x, [WIDTH // (256 * WARPS), WARPS, 256])


@gluon.jit
def warp_values(found, which: gl.constexpr):
    """What each warp has stored in `found`. Between the two is one barrier, where gl.sum of a part has four."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return found.index(which).load(WARP)


@gluon.jit
def _top(z, step, FUSED: gl.constexpr):
    """What `_weight` measures z, a maximum, from: never -inf, from which -inf cannot be subtracted."""
    return gl.maximum(z * step if FUSED else z, LOWEST)


@gluon.jit
def _weight(z, top, step, FUSED: gl.constexpr):
    """2 ** (step · z), relative to a top. FUSED: by one product and sum, off by a factor near 1 that a row shares."""
    return gl.exp2(z * step - top) if FUSED else gl.exp2((z - top) * step)


@gluon.jit
def _between(top, higher, step, FUSED: gl.constexpr):
    """The factor that brings what is relative to one top to a higher one."""
    return gl.exp2(top - higher) if FUSED else gl.exp2((top - higher) * step)


@gluon.jit
def _probabilities(
    slots, full, empty, found, y_ptr, mail_ptr, first, step, mine, part, cols, scale,
    PARTS: gl.constexpr, POSITIVE: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Maximum and sum of a part, of each warp first; then y, of those of all parts."""
    SLOTS: gl.constexpr = full.shape[0]
    FUSED: gl.constexpr = slots.dtype == gl.float16  # not bf16, whose lowest number times `power` would overflow
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    others = gl.arange(0, PARTS_LANES, WARP) < PARTS
    power = LOG2E
    if POSITIVE:  # the maximum of x is then that of scale · x
        power = scale * LOG2E
    for i in range(mine + LAG):
        top_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 0)
        total_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 1)
        if i < mine:
            slot = i % SLOTS
            wait(full.index(slot), (i // SLOTS) & 1)
            z = flat(slots, slot, WIDTH).load(LANES).to(gl.float32)
            if not POSITIVE:
                z *= scale
            if not EVEN:
                z = gl.where(inside, z, float("-inf"))
            z = by_warp(z, WIDTH)
            tops = _top(gl.max(gl.max(z, 0), 1), power, FUSED)
            above = gl.expand_dims(gl.expand_dims(tops, 1), 0)
            totals = gl.sum(gl.sum(_weight(z, above, power, FUSED), 0), 1)
            found.index(0).store(tops)
            found.index(1).store(totals)
            tops = warp_values(found, 0)
            top = gl.max(tops, 0)
            total = gl.sum(warp_values(found, 1) * _between(tops, top, power, FUSED), 0)
            post(mail_ptr, i, PARTS, part, 0, top)
            post(mail_ptr, i, PARTS, part, 1, total)
        if i >= LAG:
            j = i - LAG
            z = flat(slots, j % SLOTS, WIDTH).load(LANES).to(gl.float32)
            release(empty, j % SLOTS)
            if not POSITIVE:
                z *= scale
            every_top = gl.where(others, collect(top_words, mail_ptr, j, PARTS, 0), LOWEST)
            row_top = gl.max(every_top, 0)
            every_total = collect(total_words, mail_ptr, j, PARTS, 1)
            total = gl.sum(every_total * _between(every_top, row_top, power, FUSED), 0)
            y = _weight(z, row_top, power, FUSED) * (1.0 / total)
            row = (first + j * step).to(gl.int64)
            gl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def softmax_fwd_parts_kernel(
    x_desc, y_ptr, mail_ptr, num_rows, cols, num_groups, scale,
    PARTS: gl.constexpr, POSITIVE: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
    LAG: gl.constexpr,
):  # fmt: skip
    """y of a program's parts of rows, LAG rows after their sums were posted."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    slots = ring(SLOTS, WIDTH, x_desc.dtype)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    fence()
    mine = (num_rows - group + num_groups - 1) // num_groups
    box_ptr = mail_ptr + group * (PARTS * MAILS_OF_PART)
    gl.warp_specialize(
        [
            (_probabilities, (slots, full, empty, scratch(2), y_ptr, box_ptr, group, num_groups, mine, part, cols,
                              scale, PARTS, POSITIVE, EVEN, WIDTH, LAG)),
            (feed, (x_desc, None, None, slots, slots, slots, full, empty, group, num_groups, mine, part, WIDTH)),
        ],
        [1],
        [24],
    )  # fmt: skip
    leave(box_ptr, mail_ptr + num_groups * (PARTS * MAILS_OF_PART) + group, PARTS)


@gluon.jit
def _gradients(
    ys, dys, full, empty, found, dx_ptr, mail_ptr, first, step, mine, part, cols, scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """The sums of y and of y · dy, then dx. Beyond the last column y and dy arrive as 0."""
    FUSED: gl.constexpr = dys.dtype.primitive_bitwidth == 16
    SLOTS: gl.constexpr = full.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    for i in range(mine + LAG):
        dot_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 0)
        total_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 1)
        if i < mine:
            slot = i % SLOTS
            wait(full.index(slot), (i // SLOTS) & 1)
            y = flat(ys, slot, WIDTH).load(LANES).to(gl.float32)
            dy = flat(dys, slot, WIDTH).load(LANES).to(gl.float32)
            add_up(y * dy, found, 0, WIDTH)
            add_up(y, found, 1, WIDTH)
            post(mail_ptr, i, PARTS, part, 0, added_up(found, 0))
            post(mail_ptr, i, PARTS, part, 1, added_up(found, 1))
        if i >= LAG:
            j = i - LAG
            y = flat(ys, j % SLOTS, WIDTH).load(LANES).to(gl.float32)
            dy = flat(dys, j % SLOTS, WIDTH).load(LANES).to(gl.float32)
            release(empty, j % SLOTS)
            dot = gl.sum(collect(dot_words, mail_ptr, j, PARTS, 0), 0)
            mean = dot * (1.0 / gl.sum(collect(total_words, mail_ptr, j, PARTS, 1), 0))
            if FUSED:
                dx = y * (dy * scale - mean * scale)
            else:
                dx = y * (dy - mean) * scale
            row = (first + j * step).to(gl.int64)
            gl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def softmax_bwd_parts_kernel(
    y_desc, dy_desc, dx_ptr, mail_ptr, num_rows, cols, num_groups, scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """dx of a program's parts of rows, as the forward."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    ys, dys = ring(SLOTS, WIDTH, y_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    fence()
    mine = (num_rows - group + num_groups - 1) // num_groups
    box_ptr = mail_ptr + group * (PARTS * MAILS_OF_PART)
    gl.warp_specialize(
        [
            (_gradients, (ys, dys, full, empty, scratch(2), dx_ptr, box_ptr, group, num_groups, mine, part, cols, scale,
                          PARTS, EVEN, WIDTH, LAG)),
            (feed, (y_desc, dy_desc, None, ys, dys, ys, full, empty, group, num_groups, mine, part, WIDTH)),
        ],
        [1],
        [24],
    )  # fmt: skip
    leave(box_ptr, mail_ptr + num_groups * (PARTS * MAILS_OF_PART) + group, PARTS)


def _reasons(call: Any) -> list[str]:
    return _common_reasons(call, call.x, FORWARD_ABOVE)


def _vjp_reasons(call: Any) -> list[str]:
    return _common_reasons(call, call.y, BACKWARD_ABOVE)


def _common_reasons(call: Any, read: Any, more_than: int) -> list[str]:
    reasons = []
    if read.dtype == torch.float64:
        reasons.append("the tensors are float64; these kernels compute in float32")
    if not more_than < read.cols <= WIDEST or read.cols % LINE:
        reasons.append(
            f"rows have {read.cols} columns; more than {more_than}, where Triton's kernels are slower, up to {WIDEST} "
            f"and multiples of {LINE} are served"
        )
    if call.causal:
        reasons.append("causal: whole rows are read")
    return reasons or no_room(read.device, read.cols)


WIDEST = MOST_PARTS * 8192
FORWARD_ABOVE, BACKWARD_ABOVE = 65_536, 32_768  # columns; up to there Triton's sweeps are as fast


def _dims(*read: Tensor) -> dict[str, int]:
    cols = read[0].shape[-1]
    return {"rows": read[0].numel() // cols, "cols": cols, "bytes": sum(t.element_size() for t in read)}


def _forward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, 131,072 columns: 0.83 of the copy rate; swept twice by Triton's 0.75 (both when bf16 was FUSED)."""
    return fitted(dims, arch, PartsConfig(8192, 0, 3, 4, 0, 128), 2)


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, of the copy rate at 65,536 and 131,072 columns: 0.94 and 0.94; Triton's 0.80 and 0.66."""
    return fitted(dims, arch, PartsConfig(8192, 0, 2, 8, 0, 80), 2)


CHOICES = {"slots": (2, 3, 4, 6), "lag": (1, 2, 3), "num_warps": (4, 8)}


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
            parted(x, config.width), y, mailbox(x.device, groups, parts), count, cols, groups, scale,
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
            parted(y, config.width), parted(dy, config.width), dx, mailbox(y.device, groups, parts),
            count, cols, groups, scale, **parts_flags(cols, parts, config),
        )  # fmt: skip
    return dx
