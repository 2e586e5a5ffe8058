"""Norms of wide rows on Hopper by persistent clusters, which keep their part of weight and bias and fetch rows
dynamically."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.counters import work_counter
from tilesmith.device.gluon.dropout import dropout_part, random_part_here
from tilesmith.device.gluon.rows import (
    MOST_PARTS,
    PLAIN,
    PartsConfig,
    fitted,
    load_packed,
    open_mailbox,
    pack,
    parts_flags,
    parts_grid,
    parts_tells,
    prefetch_row,
    smem_ring,
    store_warp_sums,
    sum_of_warps,
    tma_parts,
    unpack_fp32,
    warp_scratch,
)
from tilesmith.device.gluon.rows_dynamic import (
    next_tile,
    parts_of_row,
    receive_with_tile,
    received_tile,
    send_with_tile,
)
from tilesmith.device.gluon.shim import fence_async, gl, gluon, mbarrier_wait, mbarriers, reinterpret
from tilesmith.device.rows import dense
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.arguments import (
    Norm,
    add_layer_norm_arguments,
    add_rms_norm_arguments,
    dropout_add_norm_arguments,
    layer_norm_arguments,
    norm_of,
    rms_norm_arguments,
)
from tilesmith.ops.norm.hopper import norm as norms
from tilesmith.ops.norm.hopper.norm import rounded

# Tried without gain: docs/log/norms.md.


@gluon.jit
def _pivot(slots, slot, WIDTH: gl.constexpr):
    """The mean of the first 256 values of a part. Sums of differences from it lose no precision where the mean is far
    from 0, nor, since it is a mean of many values, where one value is."""
    WARP: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    values = reinterpret(slots.index(slot), slots.dtype, [WIDTH], PLAIN).slice(0, 256).load(WARP)
    return gl.sum(values.to(gl.float32), 0) * (1.0 / 256)


@gluon.jit
def _vector(ptr, col, inside):
    return gl.load(ptr + col, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def persistent_norm_fwd_kernel(
    x_desc, residual_desc, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, work_counter,
    num_rows, cols, num_groups, eps, offset,
    PARTS: gl.constexpr, CENTER: gl.constexpr, LLAMA: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
    SLOTS: gl.constexpr, seed_ptr=None, drop_below=None, keep_scale=None, SHORT: gl.constexpr = True,
    RARE: gl.constexpr = True,
):  # fmt: skip
    """y (and s) of a CTA's parts of rows, once it has the partial sums of the rest of its cluster. A persistent CTA
    keeps its part of weight and bias in registers; loaded again for each row, the two would be as much traffic as x.
    The first SLOTS rows of each cluster are assigned statically, the others fetched from the work counter. With
    seed_ptr, x is dropped out before the residual is added."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    X: gl.constexpr = x_desc.dtype
    NORMED: gl.constexpr = X if residual_desc is None else s_ptr.dtype.element_ty
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs = smem_ring(SLOTS, WIDTH, X)
    residuals = xs
    if residual_desc is not None:
        residuals = smem_ring(SLOTS, WIDTH, residual_desc.dtype)
    full = mbarriers((SLOTS, 1))
    found, also_found = warp_scratch(), warp_scratch()
    fence_async()
    mail = open_mailbox()
    rows = ()
    for turn in gl.static_range(SLOTS):
        dealt = group + turn * num_groups
        if dealt < num_rows:
            prefetch_row(x_desc, residual_desc, None, xs, residuals, xs, full, turn, dealt, part, WIDTH)
        rows += (dealt,)
    # one number for each row, and one for each cluster that is not used
    last = num_rows + num_groups - 1
    number = next_tile(work_counter, part, last)
    # in fp32, which takes registers that 64 columns a thread leave: two instructions fewer for each value
    if weight_ptr is not None:
        weight = _vector(weight_ptr, col, inside)
        if offset is not None:
            weight += offset
        if LLAMA and weight_ptr.dtype == y_ptr.dtype:
            weight = rounded(weight, weight_ptr)
    if bias_ptr is not None:
        bias = _vector(bias_ptr, col, inside)
    each_col = 1.0 / cols
    widths = gl.minimum(gl.maximum(cols - parts_of_row(PARTS) * WIDTH, 0), WIDTH).to(gl.float32)
    each_of_own = 1.0 / gl.minimum(cols - part * WIDTH, WIDTH).to(gl.float32)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    i = 0
    while rows[0] < num_rows:
        slot = i % SLOTS
        row = rows[0].to(gl.int64)
        if seed_ptr is not None:
            words = random_part_here(key, row * cols + part * WIDTH, WIDTH, SHORT)
        mbarrier_wait(full.index(slot), i // SLOTS % 2)
        x = load_packed(xs, slot, WIDTH)
        if residual_desc is not None:
            if seed_ptr is not None:
                x = dropout_part(x, words, drop_below, X, WIDTH, RARE)
            s = unpack_fp32(x, X, WIDTH)
            if seed_ptr is not None:
                s *= keep_scale
            s += unpack_fp32(load_packed(residuals, slot, WIDTH), residual_desc.dtype, WIDTH)
            s = s.to(NORMED)
            gl.store(s_ptr + row * cols + col, s, mask=inside)
            x = pack(s, WIDTH)
        value = unpack_fp32(x, NORMED, WIDTH)
        if CENTER:
            pivot = _pivot(xs, slot, WIDTH)
            if residual_desc is not None:
                pivot += _pivot(residuals, slot, WIDTH)
            value -= pivot
            if not EVEN:
                value = gl.where(inside, value, 0.0)
            store_warp_sums(value, found, WIDTH)
        store_warp_sums(value * value, also_found, WIDTH)
        squares = sum_of_warps(also_found)
        if CENTER:
            total = sum_of_warps(found)
            excess = total * each_of_own
            send_with_tile(mail, i, part, pivot + excess, squares - total * excess, number, PARTS)
        else:
            send_with_tile(mail, i, part, squares, squares, number, PARTS)
        number = next_tile(work_counter, part, last)
        means, spreads = receive_with_tile(mail, i, PARTS)
        to_come = received_tile(mail, i) + SLOTS * num_groups
        if to_come < num_rows:  # all warps have read the slot: their sums are in
            prefetch_row(x_desc, residual_desc, None, xs, residuals, xs, full, slot, to_come, part, WIDTH)
        if CENTER:
            mean = gl.sum(means * widths, 0) * each_col
            spreads += widths * (means - mean) * (means - mean)
        rstd = gl.rsqrt(gl.maximum(gl.sum(spreads, 0) * each_col, 0.0) + eps)
        if CENTER:
            value = value * rstd + (pivot - mean) * rstd
        else:
            value *= rstd
        if LLAMA:
            value = rounded(value, y_ptr)
        if weight_ptr is not None:
            value *= weight
        if bias_ptr is not None:
            value += bias
        gl.store(y_ptr + row * cols + col, value.to(y_ptr.dtype.element_ty), mask=inside)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            if CENTER:
                gl.store(mean_ptr + row, mean)
        rows = rows[1:] + (to_come,)
        i += 1


def _forward(norm: Norm, config: PartsConfig) -> tuple[Tensor | None, ...]:
    """(y, s, mean, rstd); s is None without a residual, mean is None for RMS norm."""
    (x, residual), outputs = norms.rows_and_outputs(norm.x, norm.residual, norm.center)
    count, cols = x.shape
    if count:
        groups, parts = parts_grid(x, config)
        dropout = norms.dropout_arguments(norm.seed, norm.p, count, cols)
        launch(
            persistent_norm_fwd_kernel, (groups * parts,),
            tma_parts(x, config.width), None if residual is None else tma_parts(residual, config.width),
            dense(norm.weight), dense(norm.bias), *outputs, work_counter(x.device),
            count, cols, groups, norm.eps, norm.offset or None, CENTER=norm.center, LLAMA=norm.llama,
            **parts_flags(cols, parts, config), **dropout,
        )  # fmt: skip
    return outputs


def _tells(call, *, config: PartsConfig) -> list[str]:
    """How a forward divides its rows, and how they are scheduled."""
    return [
        *parts_tells(call.x.shape[-1], config),
        "clusters fetch their next row from a work counter",
    ]


def _reasons(call: Any) -> list[str]:
    return norms.rows_refused(call, call.x.cols, ABOVE[hasattr(call, "residual"), hasattr(call, "bias")])


# Columns, by whether there is a residual and a bias. Up to there memory is as busy with non-persistent CTAs.
# H200, bf16, 2**28 values, of the copy rate (theirs): layer norm at 16,384 columns 0.96 (0.97), RMS norm at 32,768 0.98
# (1.00), with a residual layer norm at 32,768 0.96 (0.98), RMS norm at 65,536 0.97 (0.99).
ABOVE = {(False, False): 32_768, (False, True): 16_384, (True, False): 65_536, (True, True): 32_768}


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """A default: 64 columns per thread. With 32, half of layer norm's instructions are what a warp does once per row.
    H200, bf16: layer norm of 65,536 columns reaches 0.97 of the copy rate, and 0.89 by non-persistent CTAs. More
    figures: docs/log/norms.md."""
    cols = dims["cols"]
    one = cols > 65_536 and -cols % 16_384 * 16 <= cols
    return fitted(dims, arch, PartsConfig(16_384, 0, 8, 1, 255) if one else PartsConfig(8192, 0, 4, 2, 255))


def _fit(config: PartsConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """`config` with parts so wide that a cluster can hold a row, and no more slots than shared memory has room for."""
    config = config._replace(width=max(config.width, next_power_of_2(cdiv(dims["cols"], MOST_PARTS))))
    return config._replace(slots=min(config.slots, fitted(dims, arch, config).slots))


@register_kernel(
    "rms_norm",
    backend="hopper_persistent",
    rank=27,
    rejects=_reasons,
    tells=rms_norm_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, eps, offset, casting: norms.row_dims(x, x),
        default=_default,
        choices=norms.CHOICES,
        fit=_fit,
    )
)
@rms_norm_arguments
def rms_norm(call, *, config: PartsConfig) -> tuple[Tensor, Tensor]:
    """y and rstd of `rms_norm`."""
    y, _, _, rstd = _forward(norm_of(call), config)
    return y, rstd


@register_kernel(
    "layer_norm",
    backend="hopper_persistent",
    rank=27,
    rejects=_reasons,
    tells=layer_norm_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: norms.row_dims(x, x), default=_default, choices=norms.CHOICES, fit=_fit
    )
)
@layer_norm_arguments
def layer_norm(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    y, _, mean, rstd = _forward(norm_of(call), config)
    return y, mean, rstd


@register_kernel(
    "add_rms_norm",
    backend="hopper_persistent",
    rank=27,
    rejects=_reasons,
    tells=add_rms_norm_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, eps, offset, casting: norms.row_dims(x, x, residual),
        default=_default,
        choices=norms.CHOICES,
        fit=_fit,
    )
)
@add_rms_norm_arguments
def add_rms_norm(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and rstd of `add_rms_norm`."""
    y, s, _, rstd = _forward(norm_of(call), config)
    return y, s, rstd


@register_kernel(
    "add_layer_norm",
    backend="hopper_persistent",
    rank=27,
    rejects=_reasons,
    tells=add_layer_norm_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, eps: norms.row_dims(x, x, residual),
        default=_default,
        choices=norms.CHOICES,
        fit=_fit,
    )
)
@add_layer_norm_arguments
def add_layer_norm(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `add_layer_norm`."""
    return _forward(norm_of(call), config)


def _dropout_reasons(call: Any) -> list[str]:
    reasons = norms.rows_refused(call._replace(seed=None), call.x.cols, DROPOUT_ABOVE)
    if call.kind == "layer" and call.x.dtype == torch.float32:
        reasons.append("layer norm of float32; parts in registers, by non-persistent CTAs, are faster")
    return reasons


DROPOUT_ABOVE = 65_536  # columns; up to there non-persistent CTAs are as fast


def _dropout_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """A default: 64 columns per thread of 16-bit values, 32 of fp32. H200, bf16: layer norm of 66,560 columns reaches
    0.96 of the copy rate, and 0.81 by non-persistent CTAs. More figures: docs/log/norms.md."""
    halves = PartsConfig(8192, 0, 4, 2, 255)
    return fitted(dims, arch, halves if dims["size"] == 2 else PartsConfig(8192, 0, 8, 1, 255))


@register_kernel(
    "dropout_add_norm",
    backend="hopper_persistent",
    rank=27,
    rejects=_dropout_reasons,
    tells=dropout_add_norm_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, seed, p, kind, eps: norms.row_dims(x, x, residual),
        default=_dropout_default,
        choices=norms.CHOICES,
        fit=_fit,
    )
)
@dropout_add_norm_arguments
def dropout_add_norm(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `dropout_add_norm`."""
    y, s, mean, rstd = _forward(norm_of(call), config)
    return y, s, rstd.new_empty(0) if mean is None else mean, rstd
