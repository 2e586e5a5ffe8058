"""The gradient of softmax_dropout for wide rows on Hopper, in Gluon: parts of rows in shared memory, each read once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.dropout import kernel_numbers, kernel_seed
from tilesmith.ops.dropout_gluon import kept_part
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, wait
from tilesmith.ops.probability import hopper
from tilesmith.ops.rows import rows
from tilesmith.ops.rows_gluon import add_up, added_up, parted, parts_grid, ring
from tilesmith.ops.rows_posted_gluon import (
    MAILS_OF_PART,
    PartsConfig,
    collect,
    feed,
    fitted,
    flat,
    leave,
    mailbox,
    parts_flags,
    peek,
    post,
    release,
    scratch,
    widened,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _weights(x, top, scale, FUSED: gl.constexpr):
    """exp(scale · x - top). FUSED: by one product and sum, as `_weights` of triton.py, which says why it may be."""
    if FUSED:
        base = gl.where(gl.abs(top) > 2e38, 1e-30, LOG2E)
        weights = gl.exp2(x * (scale * base) - top * base)
    else:
        weights = gl.exp2((x * scale - top) * LOG2E)
    return weights


@gluon.jit
def _gradients(
    xs, dys, full, empty, found, top_ptr, seed_ptr, dx_ptr, mail_ptr, first, step, mine, part, cols, scale,
    drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """The sums of y and of y · dy, then dx; y is made of x but for the factor that makes its sum 1. What the dropout
    leaves of dy takes its place in the slot, so that numbers are drawn once."""
    FUSED: gl.constexpr = xs.dtype.primitive_bitwidth == 16
    SLOTS: gl.constexpr = full.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    for i in range(mine + LAG):
        dot_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 0)
        total_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 1)
        row = (first + gl.maximum(i - LAG, 0) * step).to(gl.int64)
        later_top = gl.load(top_ptr + row)
        if i < mine:
            slot = i % SLOTS
            new_row = (first + i * step).to(gl.int64)
            top = gl.load(top_ptr + new_row)
            wait(full.index(slot), (i // SLOTS) & 1)
            y = _weights(widened(flat(xs, slot, WIDTH), WIDTH), top, scale, FUSED)
            if not EVEN:
                y = gl.where(inside, y, 0.0)
            dy = flat(dys, slot, WIDTH).load(LANES)
            if seed_ptr is not None:
                keep = kept_part(seed_ptr, new_row * cols + part * WIDTH, drop_below, WIDTH)
                dy = gl.where(keep, dy, gl.full([WIDTH], 0.0, dy.dtype, LANES))
                flat(dys, slot, WIDTH).store(dy)
            add_up(y * dy.to(gl.float32), found.index(0), WIDTH)
            add_up(y, found.index(1), WIDTH)
            post(mail_ptr, i, PARTS, part, 0, added_up(found.index(0)))
            post(mail_ptr, i, PARTS, part, 1, added_up(found.index(1)))
        if i >= LAG:
            j = i - LAG
            y = _weights(widened(flat(xs, j % SLOTS, WIDTH), WIDTH), later_top, scale, FUSED)
            dy = widened(flat(dys, j % SLOTS, WIDTH), WIDTH)
            release(empty, j % SLOTS)
            over_total = 1.0 / gl.sum(collect(total_words, mail_ptr, j, PARTS, 1), 0)
            mean = gl.sum(collect(dot_words, mail_ptr, j, PARTS, 0), 0) * over_total
            factor = over_total * scale * keep_scale
            dx = y * (dy * factor - mean * factor) if FUSED else y * (dy - mean) * factor
            gl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def softmax_dropout_bwd_parts_kernel(
    x_desc, dy_desc, top_ptr, seed_ptr, dx_ptr, mail_ptr, num_rows, cols, num_groups, scale, drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """dx of a program's parts of rows, LAG rows after their sums were posted."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    xs, dys = ring(SLOTS, WIDTH, x_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    fence()
    mine = (num_rows - group + num_groups - 1) // num_groups
    box_ptr = mail_ptr + group * (PARTS * MAILS_OF_PART)
    gl.warp_specialize(
        [
            (_gradients, (xs, dys, full, empty, scratch(2), top_ptr, seed_ptr, dx_ptr, box_ptr, group, num_groups,
                          mine, part, cols, scale, drop_below, keep_scale, PARTS, EVEN, WIDTH, LAG)),
            (feed, (x_desc, dy_desc, xs, dys, full, empty, group, num_groups, mine, part, WIDTH)),
        ],
        [1],
        [24],
    )  # fmt: skip
    leave(box_ptr, mail_ptr + num_groups * (PARTS * MAILS_OF_PART) + group, PARTS)


def _reasons(call: Any) -> list[str]:
    return hopper._common_reasons(call, call.x, ABOVE)


ABOVE = 8192  # columns: what one program can hold


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, of the copy rate at 16,384 and 65,536 columns: 0.82 and 0.77, by parts of 8,192 columns 0.80 and
    0.75; swept twice by Triton's 0.76 and 0.61."""
    if dims["cols"] <= 16 * 4096:
        return fitted(dims, arch, PartsConfig(4096, 0, 2, 4, 0, 80), 3)
    return fitted(dims, arch, PartsConfig(8192, 0, 2, 8, 0, 80), 2)


@register_kernel("softmax_dropout_vjp", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dout, x, seed, top, total, p, scale, causal: hopper._dims(x, dout),
        default=_default,
        choices={"slots": (2, 3, 4, 6), "lag": (1, 2, 3), "num_warps": (4, 8)},
    )
)
def softmax_dropout_vjp(
    dout: Tensor,
    x: Tensor,
    seed: Tensor | None,
    top: Tensor,
    total: Tensor,
    p: float,
    scale: float,
    causal: bool,
    *,
    config: PartsConfig,
) -> Tensor:
    """dx of `softmax_dropout`."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dout, x = rows(dout), rows(x)
    count, cols = x.shape
    if count:
        groups, parts = parts_grid(x, config)
        launch(
            softmax_dropout_bwd_parts_kernel, (groups * parts,),
            parted(x, config.width), parted(dout, config.width), top.contiguous(), kernel_seed(seed, p), dx,
            mailbox(x.device, groups, parts), count, cols, groups, scale, *kernel_numbers(p),
            **parts_flags(cols, parts, config),
        )  # fmt: skip
    return dx
