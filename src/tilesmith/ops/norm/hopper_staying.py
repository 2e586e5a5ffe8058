"""Layer norm of the widest rows on Hopper, by programs that stay and keep their part of weight and bias."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, reinterpret, wait
from tilesmith.ops.norm import hopper as norms
from tilesmith.ops.norm.hopper import vector_again, vector_of
from tilesmith.ops.rows import dense
from tilesmith.ops.rows_gluon import (
    MOST_PARTS,
    PLAIN,
    PartsConfig,
    add_up,
    added_up,
    bring,
    fitted,
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
)


@gluon.jit
def _pivot(slots, slot, WIDTH: gl.constexpr):
    """The mean of the first 256 values of a part. Sums of differences from it lose nothing where the mean is far from
    0, nor, being a mean of many, where one value is."""
    WARP: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    values = reinterpret(slots.index(slot), slots.dtype, [WIDTH], PLAIN).slice(0, 256).load(WARP)
    return gl.sum(values.to(gl.float32), 0) * (1.0 / 256)


@gluon.jit
def staying_norm_fwd_parts_kernel(
    x_desc, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, num_rows, cols, num_groups, eps,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """y of a program's parts of rows, when it knows what the others of its cluster found of theirs. It stays, and keeps
    its part of weight and bias: read anew for each row, the two are as much as x is."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
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
    if weight_ptr is not None:
        weight = vector_of(weight_ptr, part, cols, WIDTH)
    if bias_ptr is not None:
        bias = vector_of(bias_ptr, part, cols, WIDTH)
    each_col = 1.0 / cols
    widths = gl.minimum(gl.maximum(cols - part_numbers() * WIDTH, 0), WIDTH).to(gl.float32)
    own_width = gl.minimum(cols - part * WIDTH, WIDTH).to(gl.float32)
    for i in range(mine):
        slot = i % SLOTS
        row = (group + i * num_groups).to(gl.int64)
        wait(full.index(slot), i // SLOTS % 2)
        x = raw(xs, slot, WIDTH)
        value = widened(x, x_desc.dtype, WIDTH)
        pivot = _pivot(xs, slot, WIDTH)
        value -= pivot
        if not EVEN:
            value = gl.where(inside, value, 0.0)
        add_up(value, found, WIDTH)
        add_up(value * value, also_found, WIDTH)
        total = added_up(found)
        excess = total * (1.0 / own_width)
        send(mail, i, part, pivot + excess, added_up(also_found) - total * excess, PARTS)
        # all warps have read the slot: their sums are in
        bring(x_desc, None, None, xs, xs, xs, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        means, spreads = received(mail, i, PARTS)
        value = widened(x, x_desc.dtype, WIDTH)
        mean = gl.sum(means * widths, 0) * each_col
        spreads += widths * (means - mean) * (means - mean)
        value -= mean
        rstd = gl.rsqrt(gl.maximum(gl.sum(spreads, 0) * each_col, 0.0) + eps)
        value *= rstd
        if weight_ptr is not None:
            value *= vector_again(weight, weight_ptr, WIDTH)
        if bias_ptr is not None:
            value += vector_again(bias, bias_ptr, WIDTH)
        gl.store(y_ptr + row * cols + col, value.to(y_ptr.dtype.element_ty), mask=inside)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            gl.store(mean_ptr + row, mean)


ABOVE = 32_768  # columns; up to there programs that read weight and bias for each row are faster


def _reasons(call: Any) -> list[str]:
    return norms.rows_refused(call, call.x.cols, ABOVE)


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, 2**27 values, of the copy rate at 65,536 and 131,072 columns: 0.93 and 0.94; rows started one by one
    0.89 and 0.85. A row ahead of itself, so that what others found is there when it is asked for, 0.90 and 0.90, so by
    two programs a multiprocessor, of 8,192 columns, 0.85 and 0.87."""
    return fitted(dims, arch, PartsConfig(16_384, 0, 16, 1, 128))


def _fit(config: PartsConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """`config` with parts so wide that a cluster can hold a row, and no more slots than shared memory has room for."""
    config = config._replace(width=max(config.width, next_power_of_2(cdiv(dims["cols"], MOST_PARTS))))
    return config._replace(slots=min(config.slots, fitted(dims, arch, config).slots))


@register_kernel("layer_norm", backend="hopper_staying", rank=27, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: norms.row_dims(x, x), default=_default, choices=norms.CHOICES, fit=_fit
    )
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, config: PartsConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    (x, _), (y, _, mean, rstd) = norms.rows_and_outputs(x, None, True)
    count, cols = x.shape
    if count:
        groups, parts = parts_grid(x, config)
        launch(
            staying_norm_fwd_parts_kernel, (groups * parts,),
            parted(x, config.width), dense(weight), dense(bias), y, mean, rstd, count, cols, groups, eps,
            **parts_flags(cols, parts, config),
        )  # fmt: skip
    return y, mean, rstd
