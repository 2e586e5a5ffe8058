"""softmax_dropout of wide rows on Hopper, in Gluon: as hopper/softmax.py; the backward generates the forward's mask
again."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned
from tilesmith.device.dropout import kernel_numbers, kernel_seed, parts_dropout_flags
from tilesmith.device.gluon.dropout import dropout_part, random_part, random_part_here, random_part_in_loop
from tilesmith.device.gluon.rows import (
    LINE,
    MOST_PARTS,
    PLAIN,
    PartsConfig,
    ctas_of_row,
    fitted,
    load_packed,
    load_warp_values,
    open_mailbox,
    pack,
    part_ids,
    parts_flags,
    parts_grid,
    parts_of,
    parts_tells,
    prefetch_next,
    receive_from_cluster,
    send_to_cluster,
    smem_ring,
    split_fp32,
    tma_parts,
    unpack,
    unpack_fp32,
    warp_scratch,
)
from tilesmith.device.gluon.rows_held import (
    HELD_CHOICES,
    HeldConfig,
    chunk_fp32,
    chunk_fp32_again,
    columns,
    exchange,
    flatten_lines,
    held_config,
    held_fit,
    held_flags,
    held_grid,
    held_tells,
    lines_after,
    load_part,
    open_exchange,
    pack_lines,
    row_pointer,
    warps_of_row,
)
from tilesmith.device.gluon.shim import fence_async, gl, gluon, mbarrier_wait, mbarriers, reinterpret, tma_load
from tilesmith.device.rows import rows
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.hopper.softmax import (
    LOG2E,
    LOWEST,
    between_tops,
    power_beside,
    relative_weight,
    row_dims,
    rows_refused,
    slope_and_base,
)

_LINE = gl.constexpr(LINE)
_HIDDEN = gl.constexpr(-0x7F0080)  # two values of bf16: -inf


@gluon.jit
def higher(x, y):
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def softmax_dropout_fwd_parts_kernel(
    x_desc, y_ptr, top_ptr, total_ptr, seed_ptr, num_rows, cols, num_groups, scale, drop_below, keep_scale,
    PARTS: gl.constexpr, POSITIVE: gl.constexpr, SHORT: gl.constexpr, RARE: gl.constexpr, EVEN: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """y of a CTA's parts of rows. Each thread's exponentials are relative to its own maximum until that of the row is
    known, so that each value takes one exp2. The row's maximum and sum are stored, too. With seed_ptr y is dropped out.
    """
    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    FUSED: gl.constexpr = x_desc.dtype.primitive_bitwidth == 16
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = part * WIDTH + gl.arange(0, WIDTH, LANES)
    inside = gl.full([WIDTH], True, gl.int1, LANES) if EVEN else col < cols
    xs = smem_ring(SLOTS, WIDTH, x_desc.dtype)
    full = mbarriers((SLOTS, 1))
    found, also_found = warp_scratch(), warp_scratch()
    fence_async()
    mail = open_mailbox()
    key = load_key(seed_ptr) if seed_ptr is not None else None
    mine = (num_rows - group + num_groups - 1) // num_groups
    for i in range(SLOTS):
        prefetch_next(x_desc, None, None, xs, xs, xs, full, i, group, num_groups, mine, part, WIDTH)
    power = LOG2E
    if POSITIVE:  # the maximum of x is then that of scale · x
        power = scale * LOG2E
    for i in range(mine):
        slot = i % SLOTS
        mbarrier_wait(full.index(slot), i // SLOTS % 2)
        x = load_packed(xs, slot, WIDTH)
        z = unpack_fp32(x, x_desc.dtype, WIDTH)
        if not POSITIVE:
            z *= scale
        if not EVEN:
            z = gl.where(inside, z, float("-inf"))
        z = gl.reshape(z, [WIDTH // (256 * WARPS), WARPS, 32, 8])
        if POSITIVE and EVEN and x_desc.dtype == gl.bfloat16:  # two values at once
            x = gl.reshape(x, [WIDTH // (256 * WARPS), WARPS, 32, 4])
            pairs = gl.reduce(gl.reduce(x, 3, higher), 0, higher)
            low, high = split_fp32(pairs, gl.bfloat16)
            tops = gl.maximum(low, high)
            tops = gl.convert_layout(tops, gl.SliceLayout(0, gl.SliceLayout(3, z.type.layout)), assert_trivial=True)
        else:
            tops = gl.max(gl.max(z, 3), 0)
        tops = gl.maximum(tops, LOWEST)  # not -inf, from which -inf cannot be subtracted
        weights = relative_weight(z, gl.expand_dims(gl.expand_dims(tops, 0), 3), power, FUSED)
        top = gl.max(tops, 1)
        factors = between_tops(tops, gl.expand_dims(top, 1), power, FUSED)
        found.store(top)
        also_found.store(gl.sum(gl.sum(gl.sum(weights, 3), 0) * factors, 1))
        warp_tops = load_warp_values(found)
        top = gl.max(warp_tops, 0)
        send_to_cluster(
            mail,
            i,
            part,
            top,
            gl.sum(load_warp_values(also_found) * between_tops(warp_tops, top, power, FUSED), 0),
            PARTS,
        )
        # all warps have read the slot: their sums are in
        prefetch_next(x_desc, None, None, xs, xs, xs, full, i + SLOTS, group, num_groups, mine, part, WIDTH)
        row = (group + i * num_groups).to(gl.int64)
        if seed_ptr is not None:  # while the others' messages are in flight
            words = random_part(key, row * cols + part * WIDTH, WIDTH, SHORT)
        every_top, totals = receive_from_cluster(mail, i, PARTS)
        every_top = gl.where(part_ids() < PARTS, every_top, LOWEST)
        row_top = gl.max(every_top, 0)
        total = gl.sum(totals * between_tops(every_top, row_top, power, FUSED), 0)
        if part == 0:
            gl.store(top_ptr + row, row_top * scale if POSITIVE else row_top)
            gl.store(total_ptr + row, total)
        over_total = 1.0 / total
        if seed_ptr is not None:
            over_total *= keep_scale
        factors = between_tops(tops, row_top, power, FUSED) * over_total
        y = weights * gl.expand_dims(gl.expand_dims(factors, 0), 3)
        y = gl.convert_layout(gl.reshape(y, [WIDTH]), LANES, assert_trivial=True).to(y_ptr.dtype.element_ty)
        if seed_ptr is not None:
            y = dropout_part(pack(y, WIDTH), words, drop_below, y_ptr.dtype.element_ty, WIDTH, RARE)
            y = unpack(y, y_ptr.dtype.element_ty, WIDTH)
        gl.store(y_ptr + row * cols + col, y, mask=inside)


@gluon.jit
def _tile(slots, c, CHUNKS: gl.constexpr):
    """A chunk of a part in shared memory, two bf16 per word: one line of LINE neighbours per warp."""
    return reinterpret(slots.index(0), gl.int32, [CHUNKS, gl.num_warps() * (_LINE // 2)], PLAIN).index(c)


@gluon.jit
def _scores(slots, c, CHUNKS: gl.constexpr):
    """A chunk in fp32 [warps, 32, 8]."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    return gl.reshape(chunk_fp32(_tile(slots, c, CHUNKS).load(WORDS), gl.bfloat16), [gl.num_warps(), 32, 8])


@gluon.jit
def top_of_pairs(most):
    """The maximum of each thread's values, fp32 [warps, 32], from words of two bf16."""
    most = gl.reduce(gl.reshape(most, [gl.num_warps(), 32, 4]), 2, higher)
    low, high = split_fp32(most, gl.bfloat16)
    return gl.maximum(low, high)


@gluon.jit
def _store_chunks(
    slots, y_ptr, key, first, shown, left, slope, base, factor, drop_below,
    CHUNKS: gl.constexpr, GRAIN: gl.constexpr, FOLDED: gl.constexpr, DROPS: gl.constexpr, SHORT: gl.constexpr,
    RARE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Store y of the first chunks of a part. FOLDED: `base` includes the factor."""
    Y: gl.constexpr = y_ptr.dtype.element_ty
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    col = columns(0, 0, 1)
    for start in range(0, shown, GRAIN):
        for grain in gl.static_range(GRAIN):
            c = start + grain
            weights = gl.exp2(_scores(slots, c, CHUNKS) * slope - base)
            if not FOLDED:
                weights *= factor
            y = pack_lines(weights, Y)
            if DROPS:
                y = dropout_part(y, random_part_in_loop(key, first, c, WIDTH, SHORT), drop_below, Y, WIDTH, RARE)
            mask = None if EVEN else c * WIDTH + col < left
            gl.store(y_ptr + first + c * WIDTH + col, unpack(y, Y, WIDTH), mask=mask)


@gluon.jit
def softmax_dropout_fwd_whole_parts_kernel(
    x_desc, y_ptr, top_ptr, total_ptr, seed_ptr, cols, scale, drop_below, keep_scale,
    PARTS: gl.constexpr, SHORT: gl.constexpr, RARE: gl.constexpr, EVEN: gl.constexpr, CHUNKS: gl.constexpr,
    GRAIN: gl.constexpr,
):  # fmt: skip
    """y of a part of a row of bf16, with a positive scale; a CTA ends with its row, as in device.gluon.rows_held.

    While one CTA generates random bits, others of its multiprocessor must have loads in flight. So that many fit, the
    row stays in shared memory and is read three times, and its exponentials are computed twice, GRAIN chunks at a time.
    H200, 65,536 columns: 0.95 of the copy rate, and 0.85 with the weights in registers. More figures:
    docs/log/softmax.md.
    """
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = WARPS * _LINE
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    slots = smem_ring(1, CHUNKS * WIDTH, x_desc.dtype)
    full = mbarriers((1, 1))
    fence_async()
    tma_load(x_desc, [row, part * (CHUNKS * WARPS), 0], full.index(0), slots.index(0))
    room = open_exchange(PARTS)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    power = scale * LOG2E
    left = cols - part * (CHUNKS * WIDTH)
    shown = CHUNKS
    if not EVEN:
        shown = gl.minimum((left + (GRAIN * WIDTH - 1)) // (GRAIN * WIDTH) * GRAIN, CHUNKS)
    mbarrier_wait(full.index(0), 0)
    if not EVEN:  # -inf beyond the last column
        word = 2 * gl.arange(0, WIDTH // 2, WORDS)
        for c in range(shown - GRAIN, shown):
            tile = _tile(slots, c, CHUNKS)
            tile.store(gl.where(c * WIDTH + word < left, tile.load(WORDS), _HIDDEN))
    most = gl.full([WIDTH // 2], _HIDDEN, gl.int32, WORDS)
    for start in range(0, shown, GRAIN):
        for grain in gl.static_range(GRAIN):
            most = higher(most, _tile(slots, start + grain, CHUNKS).load(WORDS))
    total = gl.reshape(chunk_fp32(gl.full([WIDTH // 2], 0, gl.int32, WORDS), gl.bfloat16), [WARPS, 32, 8])
    tops = gl.convert_layout(top_of_pairs(most), gl.SliceLayout(2, total.type.layout), assert_trivial=True)
    tops = gl.maximum(tops, LOWEST)  # not -inf, from which -inf cannot be subtracted
    for start in range(0, shown, GRAIN):
        for grain in gl.static_range(GRAIN):
            total += relative_weight(_scores(slots, start + grain, CHUNKS), gl.expand_dims(tops, 2), power, True)
    top = gl.max(tops, 1)
    found = gl.sum(gl.sum(total, 2) * between_tops(tops, gl.expand_dims(top, 1), power, True), 1)
    every_top, totals = exchange(room, part, top, found, PARTS)
    every_top = gl.where(warps_of_row(PARTS) < PARTS * WARPS, every_top, LOWEST)
    row_top = gl.max(every_top, 0)
    row_total = gl.sum(totals * between_tops(every_top, row_top, power, True), 0)
    if part == 0:
        gl.store(top_ptr + row, row_top * scale)
        gl.store(total_ptr + row, row_total)
    factor = keep_scale * (1.0 / row_total)
    first = row.to(gl.int64) * cols + part * (CHUNKS * WIDTH)
    slope, base = slope_and_base(row_top, power)
    DROPS: gl.constexpr = seed_ptr is not None
    if gl.abs(base) < 256.0:  # a product less: the factor joins a number whose rounding is nothing in 16 bits
        _store_chunks(
            slots, y_ptr, key, first, shown, left, slope, base - gl.log2(factor), factor, drop_below,
            CHUNKS, GRAIN, True, DROPS, SHORT, RARE, EVEN,
        )  # fmt: skip
    else:
        _store_chunks(
            slots, y_ptr, key, first, shown, left, slope, base, factor, drop_below,
            CHUNKS, GRAIN, False, DROPS, SHORT, RARE, EVEN,
        )  # fmt: skip


@gluon.jit
def exponentials(x, top, scale, FUSED: gl.constexpr):
    """exp(scale · x - top). FUSED: by one fma, as `_weights` in triton/softmax.py explains."""
    if FUSED:
        base = power_beside(top, LOG2E)
        weights = gl.exp2(x * (scale * base) - top * base)
    else:
        weights = gl.exp2((x * scale - top) * LOG2E)
    return weights


@gluon.jit
def softmax_dropout_bwd_parts_kernel(
    x_ptr, dy_ptr, top_ptr, seed_ptr, dx_ptr, cols, x_stride, dy_stride, scale, drop_below, keep_scale,
    PARTS: gl.constexpr, WHOLE: gl.constexpr, CHUNKS: gl.constexpr, SHORT: gl.constexpr, RARE: gl.constexpr,
):  # fmt: skip
    """dx of a part of a row, from the sums of y and of y · dy; y is computed from x up to the factor that makes its sum
    1. Random bits are generated while x and dy are in flight."""
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    X: gl.constexpr = x_ptr.dtype.element_ty
    DY: gl.constexpr = dy_ptr.dtype.element_ty
    FUSED: gl.constexpr = X.primitive_bitwidth == 16
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    xs = load_part(row_pointer(x_ptr, row, x_stride), part, cols, CHUNKS, WHOLE)
    dys = load_part(row_pointer(dy_ptr, row, dy_stride), part, cols, CHUNKS, WHOLE)
    room = open_exchange(PARTS)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    top = gl.load(top_ptr + row)
    first = row.to(gl.int64) * cols + part * (CHUNKS * WIDTH)
    draws = ()
    if seed_ptr is not None:
        for c in gl.static_range(CHUNKS):
            draws += (random_part_here(key, first + c * WIDTH, WIDTH, SHORT),)
    ys, kept = (), ()
    total = gl.zeros_like(chunk_fp32(xs[0], X))
    dot = gl.zeros_like(total)
    for c in gl.static_range(CHUNKS):
        y = exponentials(chunk_fp32(xs[c], X), top, scale, FUSED)
        if c >= WHOLE:
            y = gl.where(lines_after(part, cols, CHUNKS) > c * gl.num_warps(), y, 0.0)
        dy = dys[c]
        if seed_ptr is not None:
            dy = dropout_part(dy, draws[c], drop_below, DY, WIDTH, RARE)
        total += y
        dot += y * chunk_fp32(dy, DY)
        ys += (y,)
        kept += (dy,)
    dots, totals = exchange(room, part, gl.sum(dot, 1), gl.sum(total, 1), PARTS)
    over_total = 1.0 / gl.sum(totals, 0)
    mean = gl.sum(dots, 0) * over_total
    factor = over_total * scale * keep_scale
    for c in gl.static_range(CHUNKS):
        dy = chunk_fp32_again(kept[c], DY)
        dx = ys[c] * (dy * factor - mean * factor) if FUSED else ys[c] * (dy - mean) * factor
        dx = flatten_lines(dx).to(dx_ptr.dtype.element_ty)
        col = columns(part, c, CHUNKS)
        gl.store(dx_ptr + row.to(gl.int64) * cols + col, dx, mask=None if c < WHOLE else col < cols)


def _reasons(call: Any) -> list[str]:
    return rows_refused(call, call.x, LEAST_HELD - 1 if call.x.dtype == torch.bfloat16 else ABOVE)


def _vjp_reasons(call: Any) -> list[str]:
    return rows_refused(call, call.x, ABOVE)


def _held(dtype: torch.dtype, scale: float) -> bool:
    """Whether `softmax_dropout_fwd_whole_parts_kernel` serves such rows."""
    return dtype == torch.bfloat16 and scale > 0.0


def _forward_dims(x: Tensor, scale: float) -> dict[str, int]:
    return row_dims(x) | ({"held": 1} if _held(x.dtype, scale) else {})


ABOVE = 8192  # columns: what one CTA of Triton's can hold
LEAST_HELD = 4096
CHOICES = {"width": (8192, 16_384), "slots": (2, 3, 4, 6), "num_warps": (4, 8, 16)}


def _forward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """A default for the forward. Rows that `softmax_dropout_fwd_whole_parts_kernel` serves: 64 columns per thread,
    unrolled, where parts are full and registers leave room for as many CTAs as shared memory does; else a loop over
    chunks, which leaves out those beyond the last column. Others: few warps, which wait little for each other, with 64
    or 128 columns per thread. H200, bf16, 4,096 to 131,072 columns: 0.94 to 0.96 of the copy rate. More figures:
    docs/log/softmax.md."""
    cols = dims["cols"]
    if "held" in dims:
        width = next_power_of_2(cols) if cols < 16_384 else 16_384 if -cols % 16_384 * 8 <= cols else 8192
        if cols % width == 0 and cols <= 65_536:
            config = PartsConfig(width, 1, width // 2048, 5, 48 if width > 8192 else 0)
        else:
            config = PartsConfig(width, 1, 2 if cols < 8192 else 4, 6, 0)
        return _forward_fit(config, dims, arch, dtype)
    if dims["bytes"] > 2:
        return fitted(dims, arch, PartsConfig(8192, 0, 8, 2, 128))
    if cols <= MOST_PARTS * 2048:
        return fitted(dims, arch, PartsConfig(2048, 0, 1, 16, 128))
    if cols <= MOST_PARTS * 4096:
        return fitted(dims, arch, PartsConfig(8192, 0, 4, 4, 128))
    return fitted(dims, arch, PartsConfig(16_384, 0, 4, 2, 255))


def _forward_fit(config: PartsConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """`config`; for rows that are held, with parts of an even number of chunks and so wide that a cluster can hold a
    row."""
    if "held" in dims:
        least = max(2 * config.num_warps * LINE, cdiv(dims["cols"], MOST_PARTS))
        config = config._replace(width=next_power_of_2(max(config.width, least)))
    return config


def _held_flags(cols: int, parts: int, chunks: int, config: PartsConfig) -> dict[str, Any]:
    """Compile-time flags: how many chunks are worked on at once, all or so many that few lie beyond the last column."""
    even = cols == parts * config.width
    grain = 4 if parts <= 2 and cols % (4 * config.num_warps * LINE) == 0 else 2
    grain = chunks if even and chunks <= 8 else min(chunks, grain)
    flags = {"PARTS": parts, "EVEN": even, "CHUNKS": chunks, "GRAIN": grain}
    flags |= {"num_warps": config.num_warps, "cluster": parts}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """A default for the backward. H200, bf16, 16,384 to 131,072 columns: 0.97 to 1.02 of the copy rate; by persistent
    CTAs 0.93 to 0.96, by Triton's kernel, which reads rows twice, 0.50 to 0.79."""
    return held_config(dims["cols"], dims["bytes"] // 2, 4, 8, 0)


def _tells(x: Tensor, scale: float, config: PartsConfig) -> list[str]:
    """How a forward divides its rows."""
    cols = x.shape[-1]
    if _held(x.dtype, scale):
        parts = ctas_of_row(parts_of(cols, config), cols)
        return [f"{parts} in shared memory, loaded by TMA"]
    return parts_tells(cols, config)


@register_kernel(
    "softmax_dropout",
    backend="hopper",
    rank=25,
    rejects=_reasons,
    tells=lambda x, seed, p, scale, causal, *, config: _tells(x, scale, config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, seed, p, scale, causal: _forward_dims(x, scale),
        default=_forward_default,
        choices=CHOICES,
        fit=_forward_fit,
    )
)
def softmax_dropout(
    x: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
    scale: float = 1.0,
    causal: bool = False,
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, top and total of `softmax_dropout`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    top, total = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    x = rows(x)
    count, cols = x.shape
    if count and _held(x.dtype, scale):
        parts, chunks = parts_of(cols, config), config.width // (config.num_warps * LINE)
        launch(
            softmax_dropout_fwd_whole_parts_kernel, (count * parts,),
            tma_parts(x, config.width), out, top, total, kernel_seed(seed, p), cols, scale, *kernel_numbers(p),
            **parts_dropout_flags(count, cols, p), **_held_flags(cols, parts, chunks, config),
        )  # fmt: skip
    elif count:
        groups, parts = parts_grid(x, config)
        launch(
            softmax_dropout_fwd_parts_kernel, (groups * parts,),
            tma_parts(x, config.width), out, top, total, kernel_seed(seed, p), count, cols, groups, scale,
            *kernel_numbers(p), POSITIVE=scale > 0.0, **parts_dropout_flags(count, cols, p),
            **parts_flags(cols, parts, config),
        )  # fmt: skip
    return out, top, total


@register_kernel(
    "softmax_dropout_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=lambda dout, x, *_, config: held_tells(x.shape[-1], config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dout, x, seed, top, total, p, scale, causal: row_dims(x, dout),
        default=_backward_default,
        choices=HELD_CHOICES,
        fit=held_fit,
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
    config: HeldConfig,
) -> Tensor:
    """dx of `softmax_dropout`."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dout, x = rows(dout), rows(x)
    count, cols = x.shape
    if count:
        ctas, parts = held_grid(x, config)
        (x, x_stride), (dout, dout_stride) = aligned(x), aligned(dout)
        launch(
            softmax_dropout_bwd_parts_kernel, (ctas,),
            x, dout, top.contiguous(), kernel_seed(seed, p), dx, cols, x_stride, dout_stride, scale, *kernel_numbers(p),
            **parts_dropout_flags(count, cols, p), **held_flags(cols, parts, config),
        )  # fmt: skip
    return dx
