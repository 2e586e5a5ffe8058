"""Norms of wide rows on Hopper, in Gluon: parts of rows in registers, each read from memory once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.column_sums_triton import add_partials
from tilesmith.ops.dropout_gluon import kept_part
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, reinterpret, wait
from tilesmith.ops.rows import empty_row_values, empty_rows, row_order, row_values, rows
from tilesmith.ops.rows_gluon import (
    MOST_PARTS,
    NARROWEST,
    PLAIN,
    PartsConfig,
    add_up,
    added_up,
    bring,
    fitted,
    no_room,
    open_mail,
    packed,
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

# Pointers that are None stand for tensors that a call does not have. Outputs are packed: the stride of their rows is
# `cols`. A program has one part of WIDTH columns of every num_groups-th row.


@gluon.jit
def _round(value, like_ptr):
    return value.to(like_ptr.dtype.element_ty).to(gl.float32)


@gluon.jit
def _vector(ptr, part, cols, WIDTH: gl.constexpr):
    """A part of weight or bias, 0 beyond the last column, for `_widened_again`: of 16 bits two values a word."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    return packed(gl.load(ptr + col, mask=col < cols, other=0.0), WIDTH)


@gluon.jit
def _widened_again(vector, ptr, WIDTH: gl.constexpr):
    """A part that `_vector` read, in fp32. The compiler, which would do it once and hold twice the registers through
    the loop over rows, does not see that it is the same in each."""
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    if DTYPE.primitive_bitwidth == 16:
        vector = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [vector], dtype=gl.int32, is_pure=False, pack=1)
    return widened(vector, DTYPE, WIDTH)


@gluon.jit
def _pivot(slots, slot, WIDTH: gl.constexpr):
    """The mean of the first 256 values of a part. Sums of differences from it lose nothing where the mean is far from
    0, nor, being a mean of many, where one value is."""
    WARP: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    values = reinterpret(slots.index(slot), slots.dtype, [WIDTH], PLAIN).slice(0, 256).load(WARP)
    return gl.sum(values.to(gl.float32), 0) * (1.0 / 256)


@gluon.jit
def norm_fwd_parts_kernel(
    x_desc, residual_desc, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    num_rows, cols, num_groups, eps, offset,
    PARTS: gl.constexpr, CENTER: gl.constexpr, LLAMA: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """y (and s) of a program's parts of rows, when it knows what the others of its cluster found of theirs."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs = ring(SLOTS, WIDTH, x_desc.dtype)
    residuals = xs
    NORMED: gl.constexpr = x_desc.dtype if s_ptr is None else s_ptr.dtype.element_ty
    if residual_desc is not None:
        residuals = ring(SLOTS, WIDTH, residual_desc.dtype)
    full = barriers(SLOTS, 1)
    found, also_found = scratch(), scratch()
    fence()
    mail = open_mail()
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        bring(x_desc, residual_desc, None, xs, residuals, xs, full, i, group, num_groups, mine, part, WIDTH)
    if weight_ptr is not None:
        weight = _vector(weight_ptr, part, cols, WIDTH)
    if bias_ptr is not None:
        bias = _vector(bias_ptr, part, cols, WIDTH)
    each_col = 1.0 / cols
    widths = gl.minimum(gl.maximum(cols - part_numbers() * WIDTH, 0), WIDTH).to(gl.float32)
    own_width = gl.minimum(cols - part * WIDTH, WIDTH).to(gl.float32)
    for i in range(mine):
        slot = i % SLOTS
        row = (group + i * num_groups).to(gl.int64)
        wait(full.index(slot), i // SLOTS % 2)
        x = raw(xs, slot, WIDTH)
        if s_ptr is not None:
            value = widened(x, x_desc.dtype, WIDTH)
            value += widened(raw(residuals, slot, WIDTH), residual_desc.dtype, WIDTH)
            value = value.to(NORMED)
            gl.store(s_ptr + row * cols + col, value, mask=inside)
            x = packed(value, WIDTH)
        value = widened(x, NORMED, WIDTH)
        if CENTER:
            pivot = _pivot(xs, slot, WIDTH)
            if s_ptr is not None:
                pivot += _pivot(residuals, slot, WIDTH)
            value -= pivot
            if not EVEN:
                value = gl.where(inside, value, 0.0)
            add_up(value, found, WIDTH)
            add_up(value * value, also_found, WIDTH)
            total = added_up(found)
            excess = total * (1.0 / own_width)
            send(mail, i, part, pivot + excess, added_up(also_found) - total * excess, PARTS)
        else:
            add_up(value * value, found, WIDTH)
            squares = added_up(found)
            send(mail, i, part, squares, squares, PARTS)
        # all warps have read the slot: their sums are in
        bring(
            x_desc, residual_desc, None, xs, residuals, xs, full, i + SLOTS, group, num_groups, mine, part, WIDTH
        )  # fmt: skip
        means, spreads = received(mail, i, PARTS)
        value = widened(x, NORMED, WIDTH)
        if CENTER:
            mean = gl.sum(means * widths, 0) * each_col
            spreads += widths * (means - mean) * (means - mean)
            value -= mean
        rstd = gl.rsqrt(gl.maximum(gl.sum(spreads, 0) * each_col, 0.0) + eps)
        value *= rstd
        if LLAMA:
            value = _round(value, y_ptr)
        if weight_ptr is not None:
            factor = _widened_again(weight, weight_ptr, WIDTH)
            if offset is not None:
                factor += offset
            if LLAMA and weight_ptr.dtype == y_ptr.dtype:
                factor = _round(factor, weight_ptr)
            value *= factor
        if bias_ptr is not None:
            value += _widened_again(bias, bias_ptr, WIDTH)
        gl.store(y_ptr + row * cols + col, value.to(y_ptr.dtype.element_ty), mask=inside)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            if CENTER:
                gl.store(mean_ptr + row, mean)


@gluon.jit
def norm_bwd_parts_kernel(
    x_desc, dy_desc, ds_desc, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    num_rows, cols, num_groups, offset, dropped_ptr, seed_ptr, drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dx of a program's parts of rows, and sums over them for dweight and dbias, in the order of the rows; a group
    writes one partial row of each. dropped_ptr: a second gradient, that of what was dropped out before the addition: dx
    where the dropout kept, scaled."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    CENTER: gl.constexpr = mean_ptr is not None
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs, dys = ring(SLOTS, WIDTH, x_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    dss = xs
    DS_TYPE: gl.constexpr = x_desc.dtype if ds_desc is None else ds_desc.dtype
    if ds_desc is not None:
        dss = ring(SLOTS, WIDTH, DS_TYPE)
    full = barriers(SLOTS, 1)
    found, also_found = scratch(), scratch()
    fence()
    if PARTS > 1:
        mail = open_mail()
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        bring(x_desc, dy_desc, ds_desc, xs, dys, dss, full, i, group, num_groups, mine, part, WIDTH)
    if weight_ptr is not None:
        weight = _vector(weight_ptr, part, cols, WIDTH)
    each_col = 1.0 / cols
    dweight = gl.full([WIDTH], 0.0, gl.float32, LANES)
    dbias = gl.full([WIDTH], 0.0, gl.float32, LANES)
    mean = 0.0
    rstd = gl.load(rstd_ptr + group)
    if CENTER:
        mean = gl.load(mean_ptr + group)
    for i in range(mine):
        slot = i % SLOTS
        row = (group + i * num_groups).to(gl.int64)
        wait(full.index(slot), i // SLOTS % 2)
        x, dy = raw(xs, slot, WIDTH), raw(dys, slot, WIDTH)
        if ds_desc is not None:
            ds = raw(dss, slot, WIDTH)
        xhat, grad = widened(x, x_desc.dtype, WIDTH), widened(dy, dy_desc.dtype, WIDTH)
        if CENTER:
            xhat -= mean
            if not EVEN:
                xhat = gl.where(inside, xhat, 0.0)
        xhat *= rstd
        own_rstd = rstd
        next_row = group + gl.minimum(i + 1, mine - 1) * num_groups
        rstd = gl.load(rstd_ptr + next_row)
        if dweight_ptr is not None:
            dweight += grad * xhat
        if dbias_ptr is not None:
            dbias += grad
        if weight_ptr is not None:
            factor = _widened_again(weight, weight_ptr, WIDTH)
            if offset is not None:
                factor += offset
            grad *= factor
        add_up(grad * xhat, found, WIDTH)
        if CENTER:
            add_up(grad, also_found, WIDTH)
        if ds_desc is not None:
            fence()  # no sum waits for ds
        dot = added_up(found)
        total = dot
        if CENTER:
            total = added_up(also_found)
        if PARTS > 1:
            send(mail, i, part, dot, total, PARTS)
        # all warps have read the slot: their sums are in
        bring(x_desc, dy_desc, ds_desc, xs, dys, dss, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        if CENTER:
            # no sooner: ptxas moves it to a uniform register where it likes, and waited for it before sums were sent
            mean = gl.load(mean_ptr + next_row)
        if PARTS > 1:
            dots, totals = received(mail, i, PARTS)
            dot, total = gl.sum(dots, 0), gl.sum(totals, 0)
        grad -= xhat * (dot * each_col)
        if CENTER:
            grad -= total * each_col
        grad *= own_rstd
        if ds_desc is not None:
            grad += widened(ds, DS_TYPE, WIDTH)
        gl.store(dx_ptr + row * cols + col, grad.to(dx_ptr.dtype.element_ty), mask=inside)
        if dropped_ptr is not None:
            if seed_ptr is not None:
                keep = kept_part(seed_ptr, row * cols + part * WIDTH, drop_below, WIDTH)
                grad = gl.where(keep, grad * keep_scale, keep_scale * 0.0)
            gl.store(dropped_ptr + row * cols + col, grad.to(dropped_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        gl.store(dweight_ptr + group.to(gl.int64) * cols + col, dweight, mask=inside)
    if dbias_ptr is not None:
        gl.store(dbias_ptr + group.to(gl.int64) * cols + col, dbias, mask=inside)


def _packed(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    center: bool,
    llama: bool,
    config: PartsConfig,
) -> tuple[Tensor | None, ...]:
    """(y, s, mean, rstd); s is None without a residual, mean is None unless `center`."""
    order = row_order(x)
    y = empty_rows(x, order)
    s = None if residual is None else empty_rows(x, order, residual.dtype)
    mean = empty_row_values(x, order, torch.float32) if center else None
    rstd = empty_row_values(x, order, torch.float32)
    x, residual = rows(x, order), None if residual is None else rows(residual, order)
    count, cols = x.shape
    if count:
        groups, parts = parts_grid(x, config)
        launch(
            norm_fwd_parts_kernel, (groups * parts,),
            parted(x, config.width), None if residual is None else parted(residual, config.width),
            _packed(weight), _packed(bias), y, s, mean, rstd,
            count, cols, groups, eps, offset or None, CENTER=center, LLAMA=llama, **parts_flags(cols, parts, config),
        )  # fmt: skip
    return y, s, mean, rstd


def _backward(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
    config: PartsConfig,
    dropped: Tensor | None = None,
    dropout: tuple[Tensor | None, int, float] = (None, 0, 1.0),
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the last two empty where `output_mask` says they are not needed. dropped: room for the
    gradient of what `dropout` (seed, drop_below, keep_scale) dropped."""
    order = row_order(x)
    dx = empty_rows(x, order)
    x, dy = rows(x, order), rows(dy, order)
    ds = None if ds is None else rows(ds, order)
    mean = None if mean is None else row_values(mean, order)
    count, cols = x.shape
    groups, parts = parts_grid(x, config)
    sums = [torch.empty(groups, cols, dtype=torch.float32, device=x.device) if w else None for w in output_mask[1:]]
    if count:
        launch(
            norm_bwd_parts_kernel, (groups * parts,),
            parted(x, config.width), parted(dy, config.width), None if ds is None else parted(ds, config.width),
            _packed(weight), mean, row_values(rstd, order), dx, *sums,
            count, cols, groups, offset or None, dropped, *dropout, **parts_flags(cols, parts, config),
        )  # fmt: skip
    vectors = [None if s is None else v.new_empty(cols) for s, v in zip(sums, (weight, bias))]
    add_partials(tuple(s if s is None or count else s[:0] for s in sums), tuple(vectors))
    return dx, *(x.new_empty(0) if v is None else v for v in vectors)


def _common_reasons(call: Any, cols: int, more_than: int) -> list[str]:
    reasons = [
        f"{name} has dtype {facts.dtype}; these kernels serve float16, bfloat16 and float32"
        for name, facts in call._asdict().items()
        if getattr(facts, "dtype", None) not in (None, torch.float16, torch.bfloat16, torch.float32)
    ]
    reasons += width_refused(cols, more_than)
    return reasons or no_room(call.rstd.device if hasattr(call, "rstd") else call.x.device, cols)


def _reasons(call: Any) -> list[str]:
    alone = hasattr(call, "bias") and not hasattr(call, "residual")
    return _common_reasons(call, call.x.cols, LAYER_NORM_ABOVE if alone else FORWARD_ABOVE)


def _vjp_reasons(call: Any) -> list[str]:
    x = call.s if hasattr(call, "s") else call.x
    reasons = _common_reasons(call, x.cols, BACKWARD_ABOVE[3 if hasattr(call, "ds") else 2])
    if call.dy is None or not call.output_mask[0]:
        reasons.append("there is no dy, or dx is not wanted; dx is always made here, of dy")
    return reasons


FORWARD_ABOVE = 32_768  # columns
LAYER_NORM_ABOVE = 16_384  # up to there Triton's sweeps of one tensor are as fast
BACKWARD_ABOVE = {2: 4096, 3: 8192}  # by the number of rows' tensors that are read: what one program can hold


def _dims(like: Tensor, *read: Tensor | None) -> dict[str, int]:
    """rows and cols of `like`, and bytes: how many a column of a row takes in shared memory."""
    cols = like.shape[-1]
    held = sum(t.element_size() for t in read if t is not None)
    return {"rows": like.numel() // cols, "cols": cols, "bytes": held}


def _forward_default(dims: Mapping[str, int], arch: Any, center: bool) -> PartsConfig:
    """H200, bf16, 2**27 values, of the copy rate at 65,536 and 131,072 columns: RMS norm 0.91 and 0.91, with a residual
    0.92 and 0.91; layer norm 0.89 and 0.92, with a residual 0.91 and 0.90. Swept twice by Triton's: 0.83 and 0.72, 0.86
    and 0.80; 0.83 and 0.71, 0.86 and 0.78."""
    if dims["bytes"] > 2:
        return fitted(dims, arch, PartsConfig(8192, 0, 8, 2, 128))
    return fitted(dims, arch, PartsConfig(16_384, 0, 16, 1, 128) if center else PartsConfig(16_384, 0, 8, 2, 128))


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """16 columns a thread, in parts that leave at most an eighth of the threads idle, if there are such. H200, bf16,
    2**27 values, of the copy rate at 8,192, 16,384, 32,768, 65,536 and 131,072 columns: RMS norm 0.99, 0.98, 0.98, 0.94
    and 0.93, layer norm 0.97, 0.95, 0.94, 0.93 and 0.82, at 5,120 0.95. Triton's one pass up to 8,192: 0.95, 0.97 and
    0.73, its two passes 0.6."""
    cols = dims["cols"]
    if cols == 8192 or cols > MOST_PARTS * 4096:
        return fitted(dims, arch, PartsConfig(8192, 0, 16, 1, 128))
    widths = [w for w in (4096, 2048, NARROWEST) if cols <= MOST_PARTS * w]
    width = next((w for w in widths if -cols % w * 8 <= cols), widths[-1])
    return fitted(dims, arch, PartsConfig(width, 0, width // 512, 8192 // width, 128))


CHOICES = {"width": (4096, 8192, 16_384), "slots": (2, 3, 4, 6), "num_warps": (4, 8, 16)}


@register_kernel("rms_norm", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, eps, offset, casting: _dims(x, x),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=False),
        choices=CHOICES,
    )
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor]:
    """y and rstd of `rms_norm`."""
    y, _, _, rstd = _forward(x, None, weight, None, eps, offset, False, casting == "llama", config)
    return y, rstd


@register_kernel("rms_norm_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, rstd, offset, output_mask: _dims(x, dy, x),
        default=_backward_default,
        choices=CHOICES,
    )
)
def rms_norm_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor]:
    """dx and dweight of `rms_norm`."""
    return _backward(dy, None, x, weight, None, None, rstd, offset, (*output_mask, False), config)[:2]


@register_kernel("layer_norm", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: _dims(x, x),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=True),
        choices=CHOICES,
    )
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, config: PartsConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    y, _, mean, rstd = _forward(x, None, weight, bias, eps, 0.0, True, False, config)
    return y, mean, rstd


@register_kernel("layer_norm_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, bias, mean, rstd, output_mask: _dims(x, dy, x),
        default=_backward_default,
        choices=CHOICES,
    )
)
def layer_norm_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of `layer_norm`."""
    return _backward(dy, None, x, weight, bias, mean, rstd, 0.0, output_mask, config)


@register_kernel("add_rms_norm", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, eps, offset, casting: _dims(x, x, residual),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=False),
        choices=CHOICES,
    )
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and rstd of `add_rms_norm`."""
    y, s, _, rstd = _forward(x, residual, weight, None, eps, offset, False, casting == "llama", config)
    return y, s, rstd


@register_kernel("add_rms_norm_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, rstd, offset, output_mask: _dims(s, dy, ds, s),
        default=_backward_default,
        choices=CHOICES,
    )
)
def add_rms_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor]:
    """dresidual and dweight of `add_rms_norm`."""
    return _backward(dy, ds, s, weight, None, None, rstd, offset, (*output_mask, False), config)[:2]


@register_kernel("add_layer_norm", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, eps: _dims(x, x, residual),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=True),
        choices=CHOICES,
    )
)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `add_layer_norm`."""
    return _forward(x, residual, weight, bias, eps, 0.0, True, False, config)


@register_kernel("add_layer_norm_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, mean, rstd, output_mask: _dims(s, dy, ds, s),
        default=_backward_default,
        choices=CHOICES,
    )
)
def add_layer_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dresidual, dweight and dbias of `add_layer_norm`."""
    return _backward(dy, ds, s, weight, bias, mean, rstd, 0.0, output_mask, config)
