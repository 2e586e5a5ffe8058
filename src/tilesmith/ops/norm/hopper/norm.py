"""Norms of wide rows on Hopper, in Gluon: a cluster of CTAs holds a row in registers and reads it from memory once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned, aligned_vector
from tilesmith.device.dropout import kernel_numbers, kernel_seed, parts_dropout_flags
from tilesmith.device.gluon.dropout import dropout_part, random_part, random_part_here
from tilesmith.device.gluon.rows import (
    MOST_PARTS,
    NARROWEST,
    PartsConfig,
    cluster_refused,
    fitted,
    load_packed,
    open_mailbox,
    optimization_barrier,
    pack,
    parts_flags,
    parts_grid,
    parts_tells,
    prefetch_next,
    receive_from_cluster,
    send_to_cluster,
    smem_ring,
    store_warp_sums,
    sum_of_warps,
    tma_parts,
    unpack,
    unpack_fp32,
    warp_scratch,
    width_refused,
)
from tilesmith.device.gluon.rows_held import (
    HELD_CHOICES,
    LINE,
    UNIT,
    HeldConfig,
    before_end,
    chunk_fp32,
    chunk_fp32_again,
    columns,
    columns_of_warps,
    exchange,
    fewer_lines,
    flatten_lines,
    held_config,
    held_fit,
    held_flags,
    held_grid,
    held_tells,
    load_chunks,
    load_part,
    one_cta_config,
    open_exchange,
    own_columns,
    pack_lines,
    row_pointer,
)
from tilesmith.device.gluon.shim import fence_async, gl, gluon, mbarrier_wait, mbarriers
from tilesmith.device.rows import dense, empty_row_values, empty_rows, row_order, row_values, rows
from tilesmith.device.triton.column_sums import add_partials
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.arguments import (
    Norm,
    NormGradient,
    add_layer_norm_arguments,
    add_layer_norm_vjp_arguments,
    add_rms_norm_arguments,
    add_rms_norm_vjp_arguments,
    gradient_of,
    layer_norm_arguments,
    layer_norm_vjp_arguments,
    norm_of,
    rms_norm_arguments,
    rms_norm_vjp_arguments,
    unserved,
)

LINES = gl.constexpr(LINE)

# Pointers that are None stand for tensors that a call does not have. Outputs are packed: the stride of their rows is
# `cols`. A CTA of a kernel with WIDTH has one part of so many columns of every num_groups-th row.


@gluon.jit
def rounded(value, like_ptr):
    return value.to(like_ptr.dtype.element_ty).to(gl.float32)


@gluon.jit
def vector_of(ptr, part, cols, WIDTH: gl.constexpr):
    """Load a part of weight or bias, 0 beyond the last column, for `vector_again`: 16-bit values stay packed."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    return pack(gl.load(ptr + col, mask=col < cols, other=0.0), WIDTH)


@gluon.jit
def vector_again(vector, ptr, WIDTH: gl.constexpr):
    """A part that `vector_of` loaded, in fp32. The `optimization_barrier` keeps the compiler from converting it once
    and holding twice the registers throughout the loop over rows."""
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    if DTYPE.primitive_bitwidth == 16:
        vector = optimization_barrier(vector)
    return unpack_fp32(vector, DTYPE, WIDTH)


@gluon.jit
def norm_fwd_parts_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    cols, x_stride, residual_stride, eps, offset,
    PARTS: gl.constexpr, CENTER: gl.constexpr, LLAMA: gl.constexpr, WHOLE: gl.constexpr, CHUNKS: gl.constexpr,
    AHEAD: gl.constexpr, seed_ptr=None, drop_below=None, keep_scale=None, SHORT: gl.constexpr = True,
    RARE: gl.constexpr = True,
):  # fmt: skip
    """y (and s) of a part of a row, once the CTA has the partial sums of the rest of its cluster. With seed_ptr, x is
    dropped out before the residual is added; the random bits do not depend on x and are generated while it is in
    flight.

    CENTER: the sums are of differences from the mean of a warp's first columns. They lose no precision where the mean
    is far from 0, nor, since that is a mean of many values, where one value is. AHEAD: how many chunks of weight and
    bias are loaded ahead.
    """
    row, part = (gl.program_id(0) // PARTS).to(gl.int64), gl.program_id(0) % PARTS
    NORMED: gl.constexpr = x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    room = open_exchange(PARTS)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    parts = load_part(row_pointer(x_ptr, row, x_stride), part, cols, CHUNKS, WHOLE)
    if s_ptr is not None:
        residual = load_part(row_pointer(residual_ptr, row, residual_stride), part, cols, CHUNKS, WHOLE)
        sums, drawn = (), ()
        if seed_ptr is not None:
            for c in gl.static_range(CHUNKS):
                first = row * cols + (part * CHUNKS + c) * (WARPS * LINES)
                drawn += (random_part_here(key, first, WARPS * LINES, SHORT),)
        for c in gl.static_range(CHUNKS):
            x = parts[c]
            if seed_ptr is not None:
                x = dropout_part(x, drawn[c], drop_below, x_ptr.dtype.element_ty, WARPS * LINES, RARE)
            s = chunk_fp32(x, x_ptr.dtype.element_ty)
            if seed_ptr is not None:
                s *= keep_scale
            s += chunk_fp32(residual[c], residual_ptr.dtype.element_ty)
            col = columns(part, c, CHUNKS)
            gl.store(s_ptr + row * cols + col, flatten_lines(s).to(NORMED), mask=None if c < WHOLE else col < cols)
            sums += (pack_lines(s, NORMED),)
        parts = sums
    squares = gl.zeros_like(chunk_fp32(parts[0], NORMED))
    total = squares
    own, first_own = own_columns(part, cols, CHUNKS)
    each_first = 1.0 / LINES if WHOLE > 0 else 1.0 / gl.maximum(first_own, 1).to(gl.float32)
    pivot = gl.expand_dims(gl.sum(chunk_fp32(parts[0], NORMED), 1), 1) * each_first
    for c in gl.static_range(CHUNKS):
        value = chunk_fp32(parts[c], NORMED)
        if CENTER:
            value -= pivot
            if c >= WHOLE:
                value = gl.where(before_end(part, c, cols, CHUNKS), value, 0.0)
            total += value
        squares += value * value
    weights, biases = (), ()
    if weight_ptr is not None:
        weights = load_chunks(weights, weight_ptr, part, cols, AHEAD, CHUNKS, WHOLE)
    if bias_ptr is not None:
        biases = load_chunks(biases, bias_ptr, part, cols, AHEAD, CHUNKS, WHOLE)
    found = gl.sum(squares, 1)
    each_col = 1.0 / cols
    if CENTER:
        summed = gl.sum(total, 1)
        excess = summed / gl.sum(gl.maximum(own, 1), 1).to(gl.float32)
        means, spreads = exchange(room, part, gl.sum(pivot, 1) + excess, found - summed * excess, PARTS)
        widths = columns_of_warps(cols, PARTS, CHUNKS)
        mean = gl.sum(means * widths, 0) * each_col
        spreads += widths * (means - mean) * (means - mean)
    else:
        spreads, _ = exchange(room, part, found, found, PARTS)
    rstd = gl.rsqrt(gl.maximum(gl.sum(spreads, 0) * each_col, 0.0) + eps)
    if part == 0:
        gl.store(rstd_ptr + row, rstd)
        if CENTER:
            gl.store(mean_ptr + row, mean)
    for c in gl.static_range(CHUNKS):
        if weight_ptr is not None:
            weights = load_chunks(weights, weight_ptr, part, cols, c + 1 + AHEAD, CHUNKS, WHOLE)
        if bias_ptr is not None:
            biases = load_chunks(biases, bias_ptr, part, cols, c + 1 + AHEAD, CHUNKS, WHOLE)
        value = chunk_fp32_again(parts[c], NORMED)
        if CENTER:
            value -= mean
        value *= rstd
        if LLAMA:
            value = rounded(value, y_ptr)
        if weight_ptr is not None:
            factor = chunk_fp32(weights[c], weight_ptr.dtype.element_ty)
            if offset is not None:
                factor += offset
            if LLAMA and weight_ptr.dtype == y_ptr.dtype:
                factor = rounded(factor, weight_ptr)
            value *= factor
        if bias_ptr is not None:
            value += chunk_fp32(biases[c], bias_ptr.dtype.element_ty)
        col = columns(part, c, CHUNKS)
        gl.store(
            y_ptr + row * cols + col,
            flatten_lines(value).to(y_ptr.dtype.element_ty),
            mask=None if c < WHOLE else col < cols,
        )


@gluon.jit
def norm_bwd_parts_kernel(
    x_desc, dy_desc, ds_desc, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    num_rows, cols, num_groups, offset, dropped_ptr, seed_ptr, drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, SHORT: gl.constexpr,
    RARE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """dx of a CTA's parts of rows, and sums over these rows for dweight and dbias, in the order of the rows; a cluster
    writes one partial row of each. dropped_ptr: a second gradient, that of what was dropped out before the addition: dx
    where the dropout kept an element, scaled. EARLY: random bits are generated while the partial sums of the cluster
    are in flight, and take registers until these arrive."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    CENTER: gl.constexpr = mean_ptr is not None
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs, dys = smem_ring(SLOTS, WIDTH, x_desc.dtype), smem_ring(SLOTS, WIDTH, dy_desc.dtype)
    dss = xs
    DS_TYPE: gl.constexpr = x_desc.dtype if ds_desc is None else ds_desc.dtype
    if ds_desc is not None:
        dss = smem_ring(SLOTS, WIDTH, DS_TYPE)
    full = mbarriers((SLOTS, 1))
    found, also_found = warp_scratch(), warp_scratch()
    fence_async()
    if PARTS > 1:
        mail = open_mailbox()
    key = load_key(seed_ptr) if seed_ptr is not None else None
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        prefetch_next(x_desc, dy_desc, ds_desc, xs, dys, dss, full, i, group, num_groups, mine, part, WIDTH)
    if weight_ptr is not None:
        weight = vector_of(weight_ptr, part, cols, WIDTH)
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
        mbarrier_wait(full.index(slot), i // SLOTS % 2)
        x, dy = load_packed(xs, slot, WIDTH), load_packed(dys, slot, WIDTH)
        if ds_desc is not None:
            ds = load_packed(dss, slot, WIDTH)
        xhat, grad = unpack_fp32(x, x_desc.dtype, WIDTH), unpack_fp32(dy, dy_desc.dtype, WIDTH)
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
            factor = vector_again(weight, weight_ptr, WIDTH)
            if offset is not None:
                factor += offset
            grad *= factor
        store_warp_sums(grad * xhat, found, WIDTH)
        if CENTER:
            store_warp_sums(grad, also_found, WIDTH)
        if ds_desc is not None:
            fence_async()  # no sum waits for ds
        dot = sum_of_warps(found)
        total = dot
        if CENTER:
            total = sum_of_warps(also_found)
        if PARTS > 1:
            send_to_cluster(mail, i, part, dot, total, PARTS)
        # all warps have read the slot: their sums are in
        prefetch_next(x_desc, dy_desc, ds_desc, xs, dys, dss, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        if CENTER:
            # no sooner: ptxas moves it to a uniform register where it likes, and waited for it before sums were sent
            mean = gl.load(mean_ptr + next_row)
        if EARLY and seed_ptr is not None:
            words = random_part_here(key, row * cols + part * WIDTH, WIDTH, SHORT)
        if PARTS > 1:
            dots, totals = receive_from_cluster(mail, i, PARTS)
            dot, total = gl.sum(dots, 0), gl.sum(totals, 0)
        grad -= xhat * (dot * each_col)
        if CENTER:
            grad -= total * each_col
        grad *= own_rstd
        if ds_desc is not None:
            grad += unpack_fp32(ds, DS_TYPE, WIDTH)
        gl.store(dx_ptr + row * cols + col, grad.to(dx_ptr.dtype.element_ty), mask=inside)
        if dropped_ptr is not None:
            DROPPED: gl.constexpr = dropped_ptr.dtype.element_ty
            if seed_ptr is not None:
                if not EARLY:
                    words = random_part(key, row * cols + part * WIDTH, WIDTH, SHORT)
                dropped = pack((grad * keep_scale).to(DROPPED), WIDTH)
                dropped = unpack(dropout_part(dropped, words, drop_below, DROPPED, WIDTH, RARE), DROPPED, WIDTH)
            else:
                dropped = grad.to(DROPPED)
            gl.store(dropped_ptr + row * cols + col, dropped, mask=inside)
    if dweight_ptr is not None:
        gl.store(dweight_ptr + group.to(gl.int64) * cols + col, dweight, mask=inside)
    if dbias_ptr is not None:
        gl.store(dbias_ptr + group.to(gl.int64) * cols + col, dbias, mask=inside)


def forward(norm: Norm, config: HeldConfig) -> tuple[Tensor | None, ...]:
    """(y, s, mean, rstd); s is None without a residual, mean is None for RMS norm."""
    (x, residual), outputs = rows_and_outputs(norm.x, norm.residual, norm.center)
    y, s, mean, rstd = outputs
    count, cols = x.shape
    if count:
        ctas, parts = held_grid(x, config)
        x, x_stride = aligned(x)
        residual, residual_stride = (None, 0) if residual is None else aligned(residual)
        weight, bias = aligned_vector(norm.weight), aligned_vector(norm.bias)
        dropout = dropout_arguments(norm.seed, norm.p, count, cols)
        launch(
            norm_fwd_parts_kernel, (ctas,), x, residual, weight, bias, y, s, mean, rstd,
            cols, x_stride, residual_stride, norm.eps, norm.offset or None,
            CENTER=norm.center, LLAMA=norm.llama, AHEAD=1 if config.num_warps >= 16 else 2,
            **held_flags(cols, parts, config), **dropout,
        )  # fmt: skip
    return outputs


def dropout_arguments(seed: Tensor | None, p: float, count: int, cols: int) -> dict[str, Any]:
    """The arguments of a forward kernel for the dropout of x [count, cols] by seed and p; none where nothing is
    dropped."""
    seed = kernel_seed(seed, p)
    if seed is None:
        return {}
    drop_below, keep_scale = kernel_numbers(p)
    numbers = {"seed_ptr": seed, "drop_below": drop_below, "keep_scale": keep_scale}
    return numbers | parts_dropout_flags(count, cols, p)


def rows_and_outputs(
    x: Tensor, residual: Tensor | None, center: bool
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor | None, ...]]:
    """x and residual as [M, N]; uninitialised y, s, mean (of a norm that centers) and rstd."""
    order = row_order(x)
    y = empty_rows(x, order)
    s = None if residual is None else empty_rows(x, order, residual.dtype)
    mean = empty_row_values(x, order, torch.float32) if center else None
    rstd = empty_row_values(x, order, torch.float32)
    return (rows(x, order), None if residual is None else rows(residual, order)), (y, s, mean, rstd)


def backward(
    norm: NormGradient,
    config: PartsConfig,
    dropped: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    early: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the last two empty where they are not wanted; dx always is, and dy is given. dropped: where
    the gradient of what was dropped out by `seed` and `p` goes; early: as the kernel's EARLY."""
    dy, ds, x, weight, bias, mean, rstd, offset, output_mask = norm
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
            tma_parts(x, config.width), tma_parts(dy, config.width),
            None if ds is None else tma_parts(ds, config.width),
            dense(weight), mean, row_values(rstd, order), dx, *sums,
            count, cols, groups, offset or None, dropped, kernel_seed(seed, p), *kernel_numbers(p),
            **parts_dropout_flags(count, cols, p), EARLY=early and parts > 1, **parts_flags(cols, parts, config),
        )  # fmt: skip
    vectors = [None if s is None else v.new_empty(cols) for s, v in zip(sums, (weight, bias))]
    add_partials(tuple(s if s is None or count else s[:0] for s in sums), tuple(vectors))
    return dx, *(x.new_empty(0) if v is None else v for v in vectors)


def rows_refused(call: Any, cols: int, more_than: int, unit: int = LINE) -> list[str]:
    """Why kernels that split rows over a cluster do not serve rows of `cols` columns, multiples of `unit`; Triton's are
    as fast up to `more_than` columns."""
    reasons = [
        f"{name} has dtype {facts.dtype}; these kernels serve float16, bfloat16 and float32"
        for name, facts in call._asdict().items()
        if getattr(facts, "dtype", None) not in (None, torch.float16, torch.bfloat16, torch.float32)
    ]
    reasons += width_refused(cols, more_than, unit) + unserved(call)
    return reasons or cluster_refused(call.rstd.device if hasattr(call, "rstd") else call.x.device, cols)


def forward_tells(call, *, config: HeldConfig) -> list[str]:
    """How a forward divides its rows."""
    return held_tells(call.x.shape[-1], config)


def backward_tells(call, *, config: PartsConfig) -> list[str]:
    """How a backward divides its rows."""
    return parts_tells(gradient_of(call).x.shape[-1], config)


def _reasons(call: Any) -> list[str]:
    cols, added = call.x.cols, hasattr(call, "residual")
    center = hasattr(call, "bias")
    if not added and fewer_lines(cols):
        return rows_refused(call, cols, 512 if center else 1024, UNIT)
    return rows_refused(call, cols, 2048 if center else 16_384 if added else 32_768)


def _vjp_reasons(call: Any) -> list[str]:
    x = call.s if hasattr(call, "s") else call.x
    three = hasattr(call, "ds") and not hasattr(call, "mean")
    uneven = x.cols < 4096 and x.dtype != torch.float32
    reasons = rows_refused(call, x.cols, 2048 if uneven else 8192 if three else 4096)
    if call.dy is None or not call.output_mask[0]:
        reasons.append("there is no dy, or dx is not wanted; dx is always made here, of dy")
    return reasons


# Triton's tiles are a power of two wide, and with a residual it works on at least 8,192 columns, so lanes are idle at
# other widths: layer norm of 2,304 columns reaches 0.82 of the copy rate here and 0.70 there (H200, bf16). More
# figures: docs/log/norms.md.


def row_dims(like: Tensor, *read: Tensor | None) -> dict[str, int]:
    """rows and cols of `like`; bytes: how many each column takes in shared memory; size: of an element of `like`."""
    cols = like.shape[-1]
    taken = sum(t.element_size() for t in read if t is not None)
    return {"rows": like.numel() // cols, "cols": cols, "bytes": taken, "size": like.element_size()}


def _forward_default(dims: Mapping[str, int], arch: Any, center: bool) -> HeldConfig:
    """A default for the forward: chunks, warps and registers by the width of a row; by `one_cta_config` where Triton's
    tiles leave more lanes idle. H200, bf16: 0.93 to 0.99 of the copy rate up to 32,768 columns. Wider rows are for
    hopper_persistent. More figures: docs/log/norms.md."""
    cols, size = dims["cols"], dims["size"]
    added = dims["bytes"] > size
    if not added and fewer_lines(cols):
        return one_cta_config(dims, arch, size)
    if cols <= 4096:
        chunks, warps, registers = (4, 4, 0) if added else (4, 4, 64) if cols > 3072 else (6, 2, 80)
    elif cols <= 8192:
        chunks, warps, registers = (8, 4, 0) if added or cols <= 6144 else (4, 8, 0)
    elif added or (center and cols <= 16_384):
        chunks, warps, registers = 4, 16, 64
    else:
        chunks, warps, registers = (8, 8, 80) if center or cols > 65_536 else (8, 4, 80)
    return held_config(cols, size, chunks, warps, registers)


def backward_default(
    dims: Mapping[str, int], arch: Any, dtype: torch.dtype, most_idle: int = 8, alone: bool = False, added: bool = False
) -> PartsConfig:
    """A default for the backward: parts so wide that the last one is nearly full. Of parts of 8,192 and 4,096 columns
    at most an eighth of a row may be missing, of parts of 2,048 one part in `most_idle`, or a third of a row of up to
    4,096 columns. With 32 columns per thread it takes few slots: with more of them stores wait behind loads of later
    rows. alone: layer norm without a residual; added: with one. Figures: docs/log/norms.md."""
    cols = dims["cols"]
    if cols <= 4096:
        short = PartsConfig(NARROWEST, 0, 2, 8, 128)
        if not alone and -cols % 2048 * 3 <= cols:
            short = PartsConfig(2048, 0, 2, 4, 255) if added else PartsConfig(2048, 0, 4, 4, 128)
        return slotted(fitted(dims, arch, short), 2)
    halves = dims["size"] == 2 and not alone
    wide = cols > MOST_PARTS * 4096 or (halves and cols >= 16_384 and -cols % 8192 * 8 <= cols)
    narrow = cols <= 16_384 if alone else halves and added and 8192 < cols < 16_384
    if wide or (cols == 8192 and not alone):
        width = 8192
    else:
        shares = {2048: most_idle, NARROWEST: 1} if narrow else {4096: 8, 2048: most_idle, NARROWEST: 1}
        width = next(w for w, share in shares.items() if cols <= MOST_PARTS * w and -cols % w * share <= cols)
    if wide or (width > NARROWEST and (alone or narrow)):
        config = fitted(dims, arch, PartsConfig(width, 0, width // 1024, 8192 // width, 255))
        return slotted(config, 2 if added else 3 if alone else 4)
    return fitted(dims, arch, PartsConfig(width, 0, width // 512, 8192 // width, 128))


def slotted(config: PartsConfig, slots: int) -> PartsConfig:
    """`config` with at most so many slots."""
    return config._replace(slots=min(config.slots, slots))


CHOICES = {"width": (4096, 8192, 16_384), "slots": (2, 3, 4, 6), "num_warps": (4, 8, 16)}


@register_kernel(
    "rms_norm", backend="hopper", rank=25, rejects=_reasons, tells=rms_norm_arguments(forward_tells), plans=rehearsed
)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, eps, offset, casting: row_dims(x, x),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=False),
        choices=HELD_CHOICES,
        fit=held_fit,
    )
)
@rms_norm_arguments
def rms_norm(call, *, config: HeldConfig) -> tuple[Tensor, Tensor]:
    """y and rstd of `rms_norm`."""
    y, _, _, rstd = forward(norm_of(call), config)
    return y, rstd


@register_kernel(
    "rms_norm_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=rms_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, rstd, offset, output_mask: row_dims(x, dy, x),
        default=lambda dims, arch, dtype: backward_default(dims, arch, dtype, most_idle=5),
        choices=CHOICES,
    )
)
@rms_norm_vjp_arguments
def rms_norm_vjp(call, *, config: PartsConfig) -> tuple[Tensor, Tensor]:
    """dx and dweight of `rms_norm`."""
    return backward(gradient_of(call), config)[:2]


@register_kernel(
    "layer_norm",
    backend="hopper",
    rank=25,
    rejects=_reasons,
    tells=layer_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: row_dims(x, x),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=True),
        choices=HELD_CHOICES,
        fit=held_fit,
    )
)
@layer_norm_arguments
def layer_norm(call, *, config: HeldConfig) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    y, _, mean, rstd = forward(norm_of(call), config)
    return y, mean, rstd


@register_kernel(
    "layer_norm_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=layer_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, bias, mean, rstd, output_mask: row_dims(x, dy, x),
        default=lambda dims, arch, dtype: backward_default(dims, arch, dtype, alone=True),
        choices=CHOICES,
    )
)
@layer_norm_vjp_arguments
def layer_norm_vjp(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of `layer_norm`."""
    return backward(gradient_of(call), config)


@register_kernel(
    "add_rms_norm",
    backend="hopper",
    rank=25,
    rejects=_reasons,
    tells=add_rms_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, eps, offset, casting: row_dims(x, x, residual),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=False),
        choices=HELD_CHOICES,
        fit=held_fit,
    )
)
@add_rms_norm_arguments
def add_rms_norm(call, *, config: HeldConfig) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and rstd of `add_rms_norm`."""
    y, s, _, rstd = forward(norm_of(call), config)
    return y, s, rstd


@register_kernel(
    "add_rms_norm_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=add_rms_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, rstd, offset, output_mask: row_dims(s, dy, ds, s),
        default=lambda dims, arch, dtype: backward_default(dims, arch, dtype, added=True),
        choices=CHOICES,
    )
)
@add_rms_norm_vjp_arguments
def add_rms_norm_vjp(call, *, config: PartsConfig) -> tuple[Tensor, Tensor]:
    """dresidual and dweight of `add_rms_norm`."""
    return backward(gradient_of(call), config)[:2]


@register_kernel(
    "add_layer_norm",
    backend="hopper",
    rank=25,
    rejects=_reasons,
    tells=add_layer_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, eps: row_dims(x, x, residual),
        default=lambda dims, arch, dtype: _forward_default(dims, arch, center=True),
        choices=HELD_CHOICES,
        fit=held_fit,
    )
)
@add_layer_norm_arguments
def add_layer_norm(call, *, config: HeldConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `add_layer_norm`."""
    return forward(norm_of(call), config)


@register_kernel(
    "add_layer_norm_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=add_layer_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, mean, rstd, output_mask: row_dims(s, dy, ds, s),
        default=lambda dims, arch, dtype: backward_default(dims, arch, dtype, most_idle=5, added=True),
        choices=CHOICES,
    )
)
@add_layer_norm_vjp_arguments
def add_layer_norm_vjp(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor]:
    """dresidual, dweight and dbias of `add_layer_norm`."""
    return backward(gradient_of(call), config)
