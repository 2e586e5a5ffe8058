"""The gradient of softmax_dropout for wide rows on Hopper, in Gluon: parts of rows in registers, each read once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.dropout import kernel_numbers, kernel_seed, parts_dropout_flags
from tilesmith.ops.dropout_gluon import drawn_part, dropped_part
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, wait
from tilesmith.ops.philox_triton import load_key
from tilesmith.ops.probability import hopper
from tilesmith.ops.rows import rows
from tilesmith.ops.rows_gluon import (
    MOST_PARTS,
    PartsConfig,
    add_up,
    added_up,
    bring,
    fitted,
    open_mail,
    parted,
    parts_flags,
    parts_grid,
    raw,
    received,
    ring,
    scratch,
    send,
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
def softmax_dropout_bwd_parts_kernel(
    x_desc, dy_desc, top_ptr, seed_ptr, dx_ptr, num_rows, cols, num_groups, scale, drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, SHORT: gl.constexpr,
    RARE: gl.constexpr,
):  # fmt: skip
    """dx of a program's parts of rows, by the sums of y and of y · dy; y is made of x but for the factor that makes its
    sum 1."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    FUSED: gl.constexpr = x_desc.dtype.primitive_bitwidth == 16
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs, dys = ring(SLOTS, WIDTH, x_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    full = barriers(SLOTS, 1)
    found, also_found = scratch(), scratch()
    fence()
    mail = open_mail()
    key = load_key(seed_ptr) if seed_ptr is not None else None
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        bring(x_desc, dy_desc, None, xs, dys, xs, full, i, group, num_groups, mine, part, WIDTH)
    top = gl.load(top_ptr + group)
    for i in range(mine):
        slot = i % SLOTS
        row = (group + i * num_groups).to(gl.int64)
        wait(full.index(slot), i // SLOTS % 2)
        y = _weights(widened(raw(xs, slot, WIDTH), x_desc.dtype, WIDTH), top, scale, FUSED)
        if not EVEN:
            y = gl.where(inside, y, 0.0)
        dy = raw(dys, slot, WIDTH)
        if seed_ptr is not None:
            words = drawn_part(key, row * cols + part * WIDTH, WIDTH, SHORT)
            dy = dropped_part(dy, words, drop_below, dy_desc.dtype, WIDTH, RARE)
        dy = widened(dy, dy_desc.dtype, WIDTH)
        add_up(y * dy, found, WIDTH)
        add_up(y, also_found, WIDTH)
        fence()  # no sum waits for what was dropped
        send(mail, i, part, added_up(found), added_up(also_found), PARTS)
        bring(x_desc, dy_desc, None, xs, dys, xs, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        top = gl.load(top_ptr + group + gl.minimum(i + 1, mine - 1) * num_groups)
        dots, totals = received(mail, i, PARTS)
        over_total = 1.0 / gl.sum(totals, 0)
        mean = gl.sum(dots, 0) * over_total
        factor = over_total * scale * keep_scale
        dx = y * (dy * factor - mean * factor) if FUSED else y * (dy - mean) * factor
        gl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _reasons(call: Any) -> list[str]:
    return hopper._common_reasons(call, call.x, ABOVE)


ABOVE = 8192  # columns: what one program can hold


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    if dims["bytes"] > 4 and dims["cols"] <= MOST_PARTS * 4096:
        return fitted(dims, arch, PartsConfig(4096, 0, 8, 3, 80))
    return fitted(dims, arch, PartsConfig(8192, 0, 8, 2, 128))


@register_kernel("softmax_dropout_vjp", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dout, x, seed, top, total, p, scale, causal: hopper._dims(x, dout),
        default=_default,
        choices=hopper.CHOICES,
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
            count, cols, groups, scale, *kernel_numbers(p),
            **parts_dropout_flags(count, cols, p), **parts_flags(cols, parts, config),
        )  # fmt: skip
    return dx
