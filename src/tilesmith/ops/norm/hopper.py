"""Norms of wide rows on Hopper, in Gluon: parts of rows in shared memory, each read from memory once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.column_sums_triton import add_partials
from tilesmith.ops.dropout_gluon import kept_part
from tilesmith.ops.gluon_shim import barriers, fence, gl, gluon, wait
from tilesmith.ops.rows import empty_row_values, empty_rows, row_order, row_values, rows
from tilesmith.ops.rows_gluon import (
    LINE,
    MAILS_OF_PART,
    MOST_PARTS,
    PARTS_LANES,
    PLAIN,
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
    widened,
)

# Pointers that are None stand for tensors that a call does not have. Outputs are packed: the stride of their rows is
# `cols`. A program has one part of WIDTH columns of every num_groups-th row.


@gluon.jit
def _round(value, like_ptr):
    return value.to(like_ptr.dtype.element_ty).to(gl.float32)


@gluon.jit
def _vector(ptr, col, inside):
    return gl.load(ptr + col, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _part(slots, added, slot, s_ptr, WIDTH: gl.constexpr, LANES: gl.constexpr):
    """A part of x, or of the sum with the residual as it is stored."""
    x = flat(slots, slot, WIDTH).load(LANES).to(gl.float32)
    if s_ptr is not None:
        x = _round(x + flat(added, slot, WIDTH).load(LANES).to(gl.float32), s_ptr)
    return x


@gluon.jit
def _pivot(slots, added, slot, s_ptr, WIDTH: gl.constexpr):
    """The mean of the first 256 values of a part. Sums of differences from it lose nothing where the mean is far from
    0, nor, being a mean of many, where one value is."""
    WARP: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    x = flat(slots, slot, WIDTH).slice(0, 256).load(WARP).to(gl.float32)
    if s_ptr is not None:
        x = _round(x + flat(added, slot, WIDTH).slice(0, 256).load(WARP).to(gl.float32), s_ptr)
    return gl.sum(x, 0) * (1.0 / 256)


@gluon.jit
def _norm(
    slots, added, full, empty, found, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, mail_ptr,
    first, step, mine, part, cols, eps, offset,
    PARTS: gl.constexpr, CENTER: gl.constexpr, LLAMA: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
    LAG: gl.constexpr,
):  # fmt: skip
    """What a program does with the parts that `feed` brings it: posts their statistics, later stores y."""
    SLOTS: gl.constexpr = full.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, WIDTH, LANES)
    col = part * WIDTH + lane
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    widths = gl.minimum(gl.maximum(cols - gl.arange(0, PARTS_LANES, WARP) * WIDTH, 0), WIDTH).to(gl.float32)
    width = gl.minimum(cols - part * WIDTH, WIDTH).to(gl.float32)
    each_col = 1.0 / cols
    weight = 1.0
    bias = 0.0
    if weight_ptr is not None:
        weight = _vector(weight_ptr, col, inside) + offset
        if LLAMA and weight_ptr.dtype == y_ptr.dtype:
            weight = _round(weight, weight_ptr)
    if bias_ptr is not None:
        bias = _vector(bias_ptr, col, inside)
    for i in range(mine + LAG):
        words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 1)
        if CENTER:
            mean_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 0)
        if i < mine:
            slot = i % SLOTS
            wait(full.index(slot), (i // SLOTS) & 1)
            x = _part(slots, added, slot, s_ptr, WIDTH, LANES)
            if CENTER:
                pivot = _pivot(slots, added, slot, s_ptr, WIDTH)
                x -= pivot
                if not EVEN:
                    x = gl.where(inside, x, 0.0)
                add_up(x, found, 0, WIDTH)
                add_up(x * x, found, 1, WIDTH)
                total = added_up(found, 0)
                excess = total * (1.0 / width)
                post(mail_ptr, i, PARTS, part, 0, pivot + excess)
                post(mail_ptr, i, PARTS, part, 1, added_up(found, 1) - total * excess)
            else:
                add_up(x * x, found, 1, WIDTH)
                post(mail_ptr, i, PARTS, part, 1, added_up(found, 1))
        if i >= LAG:
            j = i - LAG
            row = (first + j * step).to(gl.int64)
            spreads = collect(words, mail_ptr, j, PARTS, 1)
            if CENTER:
                means = collect(mean_words, mail_ptr, j, PARTS, 0)
                mean = gl.sum(means * widths, 0) * each_col
                spreads += widths * (means - mean) * (means - mean)
            spread = gl.sum(spreads, 0)
            rstd = gl.rsqrt(gl.maximum(spread * each_col, 0.0) + eps)
            x = _part(slots, added, j % SLOTS, s_ptr, WIDTH, LANES)
            release(empty, j % SLOTS)
            if s_ptr is not None:
                gl.store(s_ptr + row * cols + col, x.to(s_ptr.dtype.element_ty), mask=inside)
            if CENTER:
                x -= mean
            x *= rstd
            if LLAMA:
                x = _round(x, y_ptr)
            gl.store(y_ptr + row * cols + col, (x * weight + bias).to(y_ptr.dtype.element_ty), mask=inside)
            if part == 0:
                gl.store(rstd_ptr + row, rstd)
                if CENTER:
                    gl.store(mean_ptr + row, mean)


@gluon.jit
def norm_fwd_parts_kernel(
    x_desc, residual_desc, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, mail_ptr,
    num_rows, cols, num_groups, eps, offset,
    PARTS: gl.constexpr, CENTER: gl.constexpr, LLAMA: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
    SLOTS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """y (and s) of a program's parts of rows: statistics of a row LAG rows before its y."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    slots = ring(SLOTS, WIDTH, x_desc.dtype)
    added = slots
    if residual_desc is not None:
        added = ring(SLOTS, WIDTH, residual_desc.dtype)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    fence()
    mine = (num_rows - group + num_groups - 1) // num_groups
    box_ptr = mail_ptr + group * (PARTS * MAILS_OF_PART)
    gl.warp_specialize(
        [
            (_norm, (slots, added, full, empty, scratch(2), weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
                     box_ptr, group, num_groups, mine, part, cols, eps, offset,
                     PARTS, CENTER, LLAMA, EVEN, WIDTH, LAG)),
            (feed, (x_desc, residual_desc, None, slots, added, slots, full, empty, group, num_groups, mine, part,
                    WIDTH)),
        ],
        [1],
        [24],
    )  # fmt: skip
    leave(box_ptr, mail_ptr + num_groups * (PARTS * MAILS_OF_PART) + group, PARTS)


@gluon.jit
def _norm_gradients(
    xs, dys, dss, full, empty, found, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, mail_ptr,
    first, step, mine, part, cols, offset, dropped_ptr, seed_ptr, drop_below, keep_scale,
    PARTS: gl.constexpr, DS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """As `_norm`: dweight and dbias are summed in registers, and a group writes one partial row of each. dropped_ptr:
    a second gradient, that of what was dropped out before the addition: dx where the dropout kept, scaled."""
    SLOTS: gl.constexpr = full.shape[0]
    CENTER: gl.constexpr = mean_ptr is not None
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    each_col = 1.0 / cols
    weight = 1.0
    if weight_ptr is not None:
        weight = _vector(weight_ptr, col, inside) + offset
    dweight = gl.full([WIDTH], 0.0, gl.float32, LANES)
    dbias = gl.full([WIDTH], 0.0, gl.float32, LANES)
    mean = 0.0
    rstd = gl.load(rstd_ptr + first)
    if CENTER:
        mean = gl.load(mean_ptr + first)
    for i in range(mine + LAG):
        words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 1)
        if CENTER:
            total_words = peek(mail_ptr, gl.maximum(i - LAG, 0), PARTS, 0)
        row = (first + gl.maximum(i - LAG, 0) * step).to(gl.int64)
        later_rstd = gl.load(rstd_ptr + row)
        if CENTER:
            later_mean = gl.load(mean_ptr + row)
        if i < mine:
            slot = i % SLOTS
            wait(full.index(slot), (i // SLOTS) & 1)
            xhat = flat(xs, slot, WIDTH).load(LANES).to(gl.float32)
            dy = flat(dys, slot, WIDTH).load(LANES).to(gl.float32)
            if CENTER:
                xhat -= mean
                if not EVEN:
                    xhat = gl.where(inside, xhat, 0.0)
            xhat *= rstd
            next_row = first + gl.minimum(i + 1, mine - 1) * step
            rstd = gl.load(rstd_ptr + next_row)
            if CENTER:
                mean = gl.load(mean_ptr + next_row)
            if dweight_ptr is not None:
                dweight += dy * xhat
            if dbias_ptr is not None:
                dbias += dy
            dy *= weight
            add_up(dy * xhat, found, 1, WIDTH)
            if CENTER:
                add_up(dy, found, 0, WIDTH)
                post(mail_ptr, i, PARTS, part, 0, added_up(found, 0))
            post(mail_ptr, i, PARTS, part, 1, added_up(found, 1))
        if i >= LAG:
            j = i - LAG
            slot = j % SLOTS
            xhat = flat(xs, slot, WIDTH).load(LANES).to(gl.float32)
            dx = flat(dys, slot, WIDTH).load(LANES).to(gl.float32) * weight
            if DS:
                ds = flat(dss, slot, WIDTH).load(LANES).to(gl.float32)
            release(empty, slot)
            dot = gl.sum(collect(words, mail_ptr, j, PARTS, 1), 0)
            if CENTER:
                xhat -= later_mean
                dx -= gl.sum(collect(total_words, mail_ptr, j, PARTS, 0), 0) * each_col
            dx = (dx - xhat * (later_rstd * (dot * each_col))) * later_rstd
            if DS:
                dx += ds
            gl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            if dropped_ptr is not None:
                if seed_ptr is not None:
                    keep = kept_part(seed_ptr, row * cols + part * WIDTH, drop_below, WIDTH)
                    dx = gl.where(keep, dx * keep_scale, keep_scale * 0.0)
                gl.store(dropped_ptr + row * cols + col, dx.to(dropped_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        gl.store(dweight_ptr + first.to(gl.int64) * cols + col, dweight, mask=inside)
    if dbias_ptr is not None:
        gl.store(dbias_ptr + first.to(gl.int64) * cols + col, dbias, mask=inside)


@gluon.jit
def norm_bwd_parts_kernel(
    x_desc, dy_desc, ds_desc, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, mail_ptr,
    num_rows, cols, num_groups, offset, dropped_ptr, seed_ptr, drop_below, keep_scale,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """dx of a program's parts of rows, and sums over them for dweight and dbias, in the order of the rows."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    xs, dys = ring(SLOTS, WIDTH, x_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    dss = xs
    if ds_desc is not None:
        dss = ring(SLOTS, WIDTH, ds_desc.dtype)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    fence()
    mine = (num_rows - group + num_groups - 1) // num_groups
    box_ptr = mail_ptr + group * (PARTS * MAILS_OF_PART)
    DS: gl.constexpr = ds_desc is not None
    gl.warp_specialize(
        [
            (_norm_gradients, (xs, dys, dss, full, empty, scratch(2), weight_ptr, mean_ptr, rstd_ptr, dx_ptr,
                               dweight_ptr, dbias_ptr, box_ptr, group, num_groups, mine, part, cols, offset,
                               dropped_ptr, seed_ptr, drop_below, keep_scale, PARTS, DS, EVEN, WIDTH, LAG)),
            (feed, (x_desc, dy_desc, ds_desc, xs, dys, dss, full, empty, group, num_groups, mine, part, WIDTH)),
        ],
        [1],
        [24],
    )  # fmt: skip
    leave(box_ptr, mail_ptr + num_groups * (PARTS * MAILS_OF_PART) + group, PARTS)


@gluon.jit
def _layer_norm_sums(
    xs, dys, full, found, weight, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, mail_ptr, first, step, mine, part, cols,
    WEIGHT: gl.constexpr, PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Posts the sums of each part that dx of its row takes; dweight and dbias are summed in registers."""
    SLOTS: gl.constexpr = full.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    dweight = gl.full([WIDTH], 0.0, gl.float32, LANES)
    dbias = gl.full([WIDTH], 0.0, gl.float32, LANES)
    rstd = gl.load(rstd_ptr + first)
    mean = gl.load(mean_ptr + first)
    for i in range(mine):
        slot = i % SLOTS
        wait(full.index(slot), (i // SLOTS) & 1)
        xhat = widened(flat(xs, slot, WIDTH), WIDTH)
        dy = widened(flat(dys, slot, WIDTH), WIDTH)
        xhat -= mean
        if not EVEN:
            xhat = gl.where(inside, xhat, 0.0)
        xhat *= rstd
        next_row = first + gl.minimum(i + 1, mine - 1) * step
        rstd = gl.load(rstd_ptr + next_row)
        mean = gl.load(mean_ptr + next_row)
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        if WEIGHT:
            dy *= widened(weight, WIDTH)
        add_up(dy * xhat, found, 1, WIDTH)
        add_up(dy, found, 0, WIDTH)
        post(mail_ptr, i, PARTS, part, 0, added_up(found, 0))
        post(mail_ptr, i, PARTS, part, 1, added_up(found, 1))
    at = first.to(gl.int64) * cols + col
    if dweight_ptr is not None:
        gl.store(dweight_ptr + at, dweight, mask=inside)
    if dbias_ptr is not None:
        gl.store(dbias_ptr + at, dbias, mask=inside)


@gluon.jit
def _layer_norm_gradient(
    xs, dys, full, empty, weight, mean_ptr, rstd_ptr, dx_ptr, mail_ptr, first, step, mine, part, cols,
    WEIGHT: gl.constexpr, PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """dx of each part, when all programs of the group have posted their sums of its row; only then has this one's other
    half read the slot, too."""
    SLOTS: gl.constexpr = full.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    each_col = 1.0 / cols
    words = peek(mail_ptr, 0, PARTS, 1)
    next_rstd = gl.load(rstd_ptr + first)
    total_words = peek(mail_ptr, 0, PARTS, 0)
    next_mean = gl.load(mean_ptr + first)
    for i in range(mine):
        slot = i % SLOTS
        row = (first + i * step).to(gl.int64)
        next_row = first + gl.minimum(i + 1, mine - 1) * step
        wait(full.index(slot), (i // SLOTS) & 1)
        rstd = next_rstd
        slope = gl.sum(collect(words, mail_ptr, i, PARTS, 1), 0) * each_col * rstd
        words = peek(mail_ptr, i + 1, PARTS, 1)
        next_rstd = gl.load(rstd_ptr + next_row)
        xhat = widened(flat(xs, slot, WIDTH), WIDTH)
        dx = widened(flat(dys, slot, WIDTH), WIDTH)
        if WEIGHT:
            dx *= widened(weight, WIDTH)
        xhat -= next_mean
        dx -= gl.sum(collect(total_words, mail_ptr, i, PARTS, 0), 0) * each_col
        total_words = peek(mail_ptr, i + 1, PARTS, 0)
        next_mean = gl.load(mean_ptr + next_row)
        release(empty, slot)
        dx = (dx - xhat * slope) * rstd
        gl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def layer_norm_bwd_parts_kernel(
    x_desc, dy_desc, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, mail_ptr,
    num_rows, cols, num_groups,
    PARTS: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `norm_bwd_parts_kernel`, but sums are found by some warps, and dx of earlier rows made by as many others: two
    sums of a row and two over rows take so long that waits for the group and for barriers have to be filled. The
    weight is in shared memory."""
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    xs, dys = ring(SLOTS, WIDTH, x_desc.dtype), ring(SLOTS, WIDTH, dy_desc.dtype)
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    WEIGHT: gl.constexpr = weight_ptr is not None
    weight = xs  # stands for none
    if WEIGHT:
        value = gl.load(weight_ptr + col, mask=col < cols, other=0.0)
        weight = gl.allocate_shared_memory(value.dtype, [WIDTH], PLAIN, value)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    fence()
    mine = (num_rows - group + num_groups - 1) // num_groups
    box_ptr = mail_ptr + group * (PARTS * MAILS_OF_PART)
    gl.warp_specialize(
        [
            (_layer_norm_sums, (xs, dys, full, scratch(2), weight, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, box_ptr,
                                group, num_groups, mine, part, cols, WEIGHT, PARTS, EVEN, WIDTH)),
            (_layer_norm_gradient, (xs, dys, full, empty, weight, mean_ptr, rstd_ptr, dx_ptr, box_ptr,
                                    group, num_groups, mine, part, cols, WEIGHT, PARTS, EVEN, WIDTH)),
            (feed, (x_desc, dy_desc, None, xs, dys, xs, full, empty, group, num_groups, mine, part, WIDTH)),
        ],
        [gl.num_warps(), 1],
        [REGISTERS, 24],
    )  # fmt: skip
    leave(box_ptr, mail_ptr + num_groups * (PARTS * MAILS_OF_PART) + group, PARTS)


class SplitConfig(NamedTuple):
    """As PartsConfig, where `num_warps` find sums and as many make dx. registers: of a thread of the latter; those of
    the former have what is left."""

    width: int
    slots: int
    num_warps: int
    per_sm: int
    registers: int


def _split_flags(cols: int, parts: int, config: SplitConfig) -> dict[str, Any]:
    threads = 32 * (2 * config.num_warps + 4)  # warps come in fours, so that the one which feeds takes as many
    return {
        "PARTS": parts,
        "EVEN": cols % config.width == 0,
        "WIDTH": config.width,
        "SLOTS": config.slots,
        "REGISTERS": config.registers,
        "num_warps": config.num_warps,
        "maxnreg": 65_536 // (threads * config.per_sm) // 8 * 8,
        "cluster": parts,
    }


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
            _packed(weight), _packed(bias), y, s, mean, rstd, mailbox(x.device, groups, parts),
            count, cols, groups, eps, offset, CENTER=center, LLAMA=llama, **parts_flags(cols, parts, config),
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
    config: PartsConfig | SplitConfig,
    dropped: Tensor | None = None,
    dropout: tuple[Tensor | None, int, float] = (None, 0, 1.0),
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the last two empty where `output_mask` says they are not needed. With a SplitConfig: of
    layer norm without ds. dropped: room for the gradient of what `dropout` (seed, drop_below, keep_scale) dropped."""
    order = row_order(x)
    dx = empty_rows(x, order)
    x, dy = rows(x, order), rows(dy, order)
    ds = None if ds is None else rows(ds, order)
    mean = None if mean is None else row_values(mean, order)
    count, cols = x.shape
    groups, parts = parts_grid(x, config)
    sums = [torch.empty(groups, cols, dtype=torch.float32, device=x.device) if w else None for w in output_mask[1:]]
    if count and isinstance(config, SplitConfig):
        launch(
            layer_norm_bwd_parts_kernel, (groups * parts,),
            parted(x, config.width), parted(dy, config.width), _packed(weight), mean, row_values(rstd, order), dx,
            *sums, mailbox(x.device, groups, parts), count, cols, groups, **_split_flags(cols, parts, config),
        )  # fmt: skip
    elif count:
        launch(
            norm_bwd_parts_kernel, (groups * parts,),
            parted(x, config.width), parted(dy, config.width), None if ds is None else parted(ds, config.width),
            _packed(weight), mean, row_values(rstd, order), dx, *sums, mailbox(x.device, groups, parts),
            count, cols, groups, offset, dropped, *dropout, **parts_flags(cols, parts, config),
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
    if not more_than < cols <= WIDEST or cols % LINE:
        reasons.append(
            f"rows have {cols} columns; more than {more_than}, where Triton's kernels are slower, up to {WIDEST} "
            f"and multiples of {LINE} are served"
        )
    return reasons or no_room(call.rstd.device if hasattr(call, "rstd") else call.x.device, cols)


def _reasons(call: Any) -> list[str]:
    alone = hasattr(call, "bias") and not hasattr(call, "residual")
    return _common_reasons(call, call.x.cols, LAYER_NORM_ABOVE if alone else FORWARD_ABOVE)


def _vjp_reasons(call: Any) -> list[str]:
    center = hasattr(call, "mean")
    x = call.s if hasattr(call, "s") else call.x
    reasons = _common_reasons(call, x.cols, BACKWARD_ABOVE[center])
    if call.dy is None or not call.output_mask[0]:
        reasons.append("there is no dy, or dx is not wanted; dx is always made here, of dy")
    return reasons


WIDEST = MOST_PARTS * 8192
FORWARD_ABOVE = 32_768  # columns
LAYER_NORM_ABOVE = 65_536  # up to there Triton's sweeps of one tensor are as fast
BACKWARD_ABOVE = {False: 16_384, True: 8192}  # of RMS norm and layer norm: what one program can hold


def _dims(like: Tensor, *read: Tensor | None) -> dict[str, int]:
    """rows and cols of `like`, and bytes: how many a column of a row takes in shared memory."""
    cols = like.shape[-1]
    held = sum(t.element_size() for t in read if t is not None)
    return {"rows": like.numel() // cols, "cols": cols, "bytes": held}


def _forward_default(dims: Mapping[str, int], arch: Any, center: bool) -> PartsConfig:
    """H200, bf16, of the copy rate at 65,536 and 131,072 columns: RMS norm 0.87 and 0.86, with a residual 0.90 and
    0.89; layer norm 0.82 at 131,072, with a residual 0.91 and 0.91 (by 8 warps 0.87 and 0.89). Swept twice by Triton's:
    0.84 and 0.72, 0.86 and 0.79; 0.71, 0.86 and 0.77."""
    if dims["bytes"] > 2 and center:
        return fitted(dims, arch, PartsConfig(8192, 0, 2, 4, 0, 128), 2)
    if dims["bytes"] > 2:
        return fitted(dims, arch, PartsConfig(8192, 0, 2, 8, 0, 80), 2)
    if center:
        return fitted(dims, arch, PartsConfig(8192, 0, 3, 4, 0, 128), 2)
    return fitted(dims, arch, PartsConfig(8192, 0, 2, 4, 0, 80), 3)


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """32 columns a thread. H200, bf16, of the copy rate at 32,768, 65,536 and 131,072 columns: RMS norm 0.94, 0.89 and
    0.87; with Triton's two passes 0.60 each."""
    if dims["cols"] <= MOST_PARTS * 4096:
        return fitted(dims, arch, PartsConfig(4096, 0, 2, 4, 0, 128), 2)
    return fitted(dims, arch, PartsConfig(8192, 0, 2, 8, 0, 0), 1)


def _layer_norm_backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> SplitConfig | PartsConfig:
    """H200, bf16, of the copy rate at 16,384, 32,768, 65,536 and 131,072 columns: 0.87, 0.89, 0.87 and 0.85; where the
    same warps find sums and dx 0.79, 0.80, 0.80 and 0.78. A slot less costs 0.05. These do in 32 bits, whose values
    would spill."""
    if dims["bytes"] > 4:
        return _backward_default(dims, arch, dtype)
    config = SplitConfig(8192, 0, 8, 1, 80) if dims["cols"] > 32_768 else SplitConfig(4096, 0, 4, 2, 80)
    room = arch.shared_memory // config.per_sm - 2048 - config.width * dims["held"]
    return config._replace(slots=max(1, min(6, room // (config.width * dims["bytes"]))))


CHOICES = {"slots": (2, 3, 4, 6), "lag": (1, 2, 3), "num_warps": (4, 8)}


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
        dims=lambda dy, x, weight, bias, mean, rstd, output_mask: {
            **_dims(x, dy, x),
            "held": 0 if weight is None else weight.element_size(),
        },
        default=_layer_norm_backward_default,
        choices={"slots": (3, 4, 6)},
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
    config: SplitConfig | PartsConfig,
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
