"""Causal softmax and softmax_dropout on Hopper, in Gluon: a row lies in shared memory, and only its visible part is
loaded."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned
from tilesmith.device.dropout import kernel_numbers, kernel_seed, parts_dropout_flags
from tilesmith.device.gluon.cluster import dsmem_wait
from tilesmith.device.gluon.dropout import dropout_part, random_part_in_loop
from tilesmith.device.gluon.rows import LINE
from tilesmith.device.gluon.rows_bulk import (
    MOST_BYTES,
    bulk_load_rows,
    bulk_store_row,
    bulk_store_wait,
    fill_beyond,
    load_chunk,
    open_smem_rows,
    store_chunk,
    store_zeros,
)
from tilesmith.device.gluon.rows_held import chunk_fp32, exchange, pack_lines, row_pointer, warps_of_row
from tilesmith.device.gluon.shim import gl, gluon
from tilesmith.device.rows import empty_rows, row_order, row_steps, rows
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.hopper.softmax import LOG2E, LOWEST, between_tops, relative_weight, row_dims
from tilesmith.ops.norm.hopper.softmax_dropout import exponentials, higher, top_of_pairs

# Causal softmax of [2, 16, 4096, 4096] bf16 on an H200 reaches 0.93 of the copy rate, as does a kernel that only copies
# as much by bulk copies. What was tried without gain: docs/log/softmax.md.

_LINE = gl.constexpr(LINE)
_HIDDEN = gl.constexpr(-0x7F0080)  # two values of bf16: -inf


@gluon.jit
def _end(row, cols, tokens, inner):
    """How many columns a row sees; may be below 1. inner: the number of rows between two neighbours in tokens."""
    return gl.minimum((row // inner) % tokens + (cols - tokens + 1), cols)


@gluon.jit
def _no_words():
    """Words of a chunk, all 0."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    return gl.full([gl.num_warps() * (_LINE // 2)], 0, gl.int32, WORDS)


@gluon.jit
def _shown(value, chunk, end, other):
    """`value` for the columns that a row sees, of a chunk in lines; `other` for the rest."""
    WIDTH: gl.constexpr = gl.num_warps() * _LINE
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    col = gl.reshape(chunk * WIDTH + gl.arange(0, WIDTH, LANES), [gl.num_warps(), _LINE])
    return gl.where(gl.convert_layout(col, value.type.layout, assert_trivial=True) < end, value, other)


@gluon.jit
def _scores(at, chunk, end, scale, X: gl.constexpr, POSITIVE: gl.constexpr):
    """A chunk of x, fp32 [warps, 32, 8], that `fill_beyond` has made -inf from `end` on; or of scale · x."""
    z = chunk_fp32(load_chunk(at, chunk), X)
    if not POSITIVE:
        z = _shown(z * scale, chunk, end, float("-inf"))
    return gl.reshape(z, [gl.num_warps(), 32, 8])


@gluon.jit
def softmax_dropout_fwd_causal_parts_kernel(
    x_ptr, y_ptr, top_ptr, total_ptr, seed_ptr, cols, x_stride, scale, tokens, inner, drop_below, keep_scale,
    POSITIVE: gl.constexpr, CHUNKS: gl.constexpr, SHORT: gl.constexpr, RARE: gl.constexpr,
):  # fmt: skip
    """y of a row of bf16, of which only the visible part is loaded. y replaces it in shared memory, followed by zeros,
    and one bulk copy stores the row. With top_ptr the row's maximum and sum are stored, too."""
    row = gl.program_id(0)
    X: gl.constexpr = x_ptr.dtype.element_ty
    Y: gl.constexpr = y_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = WARPS * _LINE
    room, at = open_smem_rows(CHUNKS * WIDTH * 2)
    end = _end(row, cols, tokens, inner)
    seen = (gl.maximum(end, 0) + WIDTH - 1) // WIDTH
    if end > 0:
        bulk_load_rows(room, at, row_pointer(x_ptr, row, x_stride), None, None, (end + 7) // 8 * 16)
    for c in range(seen, CHUNKS):
        store_zeros(at, c)
    first = row.to(gl.int64) * cols
    if end > 0:
        key = load_key(seed_ptr) if seed_ptr is not None else None
        dsmem_wait(room)
        total = gl.reshape(chunk_fp32(_no_words(), X), [WARPS, 32, 8])
        tops = gl.full([WARPS, 32], LOWEST, gl.float32, gl.SliceLayout(2, total.type.layout))
        power = LOG2E
        if POSITIVE:  # the maximum of x is then that of scale · x, of two values at once
            power = scale * LOG2E
            fill_beyond(at, seen - 1, end, _HIDDEN)
            most = _no_words() + _HIDDEN
            for c in range(seen):
                most = higher(most, load_chunk(at, c))
            tops = gl.maximum(gl.convert_layout(top_of_pairs(most), tops.type.layout, assert_trivial=True), tops)
        else:
            for c in range(seen):
                tops = gl.maximum(tops, gl.max(_scores(at, c, end, scale, X, POSITIVE), 2))
        for c in range(seen):
            z = _scores(at, c, end, scale, X, POSITIVE)
            total += relative_weight(z, gl.expand_dims(tops, 2), power, True)
        top = gl.max(tops, 1)
        found = gl.sum(gl.sum(total, 2) * between_tops(tops, gl.expand_dims(top, 1), power, True), 1)
        if WARPS > 1:
            top, found = exchange(room, 0, top, found, 1)
            top = gl.where(warps_of_row(1) < WARPS, top, LOWEST)
        row_top = gl.max(top, 0)
        row_total = gl.sum(found * between_tops(top, row_top, power, True), 0)
        if top_ptr is not None:
            gl.store(top_ptr + row, row_top * scale if POSITIVE else row_top)
            gl.store(total_ptr + row, row_total)
        factor = 1.0 / row_total
        if seed_ptr is not None:
            factor *= keep_scale
        for c in range(seen):
            z = _scores(at, c, end, scale, X, POSITIVE)
            y = pack_lines(relative_weight(z, row_top, power, True) * factor, Y)
            if seed_ptr is not None:
                y = dropout_part(y, random_part_in_loop(key, first, c, WIDTH, SHORT), drop_below, Y, WIDTH, RARE)
            store_chunk(at, c, y)
        fill_beyond(at, seen - 1, end, 0)  # a row of -inf has a sum of 0
    elif top_ptr is not None:
        gl.store(top_ptr + row, float("-inf"))
        gl.store(total_ptr + row, 0.0)
    bulk_store_row(at, y_ptr + first, cols * 2)
    bulk_store_wait(room)


@gluon.jit
def softmax_dropout_bwd_causal_parts_kernel(
    x_ptr, dy_ptr, top_ptr, seed_ptr, dx_ptr, cols, x_stride, dy_stride, scale, tokens, drop_below, keep_scale,
    POSITIVE: gl.constexpr, CHUNKS: gl.constexpr, SHORT: gl.constexpr, RARE: gl.constexpr,
):  # fmt: skip
    """dx of a row of bf16. It replaces x in shared memory; the zeros behind it are stored at once. y is computed from x
    twice, up to the factor that makes its sum 1."""
    row = gl.program_id(0)
    X: gl.constexpr = x_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = WARPS * _LINE
    room, at = open_smem_rows(CHUNKS * WIDTH * 4)
    dy_at = at + CHUNKS * WIDTH * 2
    end = _end(row, cols, tokens, 1)
    seen = (gl.maximum(end, 0) + WIDTH - 1) // WIDTH
    if end > 0:
        x_row, dy_row = row_pointer(x_ptr, row, x_stride), row_pointer(dy_ptr, row, dy_stride)
        bulk_load_rows(room, at, x_row, dy_at, dy_row, (end + 7) // 8 * 16)
    for c in range(seen, CHUNKS):
        store_zeros(at, c)
    first = row.to(gl.int64) * cols
    bulk_store_row(at + seen * (2 * WIDTH), dx_ptr + first + seen * WIDTH, (cols - seen * WIDTH) * 2)
    if end > 0:
        key = load_key(seed_ptr) if seed_ptr is not None else None
        top = gl.load(top_ptr + row)
        dsmem_wait(room)
        if POSITIVE:
            fill_beyond(at, seen - 1, end, _HIDDEN)
        fill_beyond(dy_at, seen - 1, end, 0)
        total = chunk_fp32(_no_words(), X)
        dot = total
        for c in range(seen):
            y = exponentials(chunk_fp32(load_chunk(at, c), X), top, scale, True)
            dy = load_chunk(dy_at, c)
            if seed_ptr is not None:
                dy = dropout_part(dy, random_part_in_loop(key, first, c, WIDTH, SHORT), drop_below, X, WIDTH, RARE)
                store_chunk(dy_at, c, dy)
            if not POSITIVE:
                y = _shown(y, c, end, 0.0)
            total += y
            dot += y * chunk_fp32(dy, X)
        dot, total = gl.sum(dot, 1), gl.sum(total, 1)
        if WARPS > 1:
            dot, total = exchange(room, 0, dot, total, 1)
        over_total = 1.0 / gl.sum(total, 0)
        mean = gl.sum(dot, 0) * over_total
        factor = over_total * scale * keep_scale
        for c in range(seen):
            y = exponentials(chunk_fp32(load_chunk(at, c), X), top, scale, True)
            store_chunk(at, c, pack_lines(y * (chunk_fp32(load_chunk(dy_at, c), X) * factor - mean * factor), X))
        fill_beyond(at, seen - 1, end, 0)
    bulk_store_row(at, dx_ptr + first, gl.minimum(seen * WIDTH, cols) * 2)
    bulk_store_wait(room)


ABOVE = 1024  # columns


def _reasons(call: Any) -> list[str]:
    return _refused(call, 2)


def _vjp_reasons(call: Any) -> list[str]:
    return _refused(call, 4, call.dout)


def _refused(call: Any, size: int, *others: Any) -> list[str]:
    reasons = []
    if not call.causal:
        reasons.append("not causal: whole rows are read as fast by the other kernels")
    if any(t.dtype != torch.bfloat16 for t in (call.x, *others)):
        reasons.append("x or its gradient is not bfloat16")
    most = MOST_BYTES // size // 1024 * 1024
    if not ABOVE < call.x.cols <= most or call.x.cols % 8:
        reasons.append(f"rows have {call.x.cols} columns; multiples of 8 above {ABOVE} and up to {most} are supported")
    return reasons


class CausalConfig(NamedTuple):
    """max_registers: of a thread; 0 leaves it to the compiler."""

    num_warps: int
    max_registers: int


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> CausalConfig:
    """A default for softmax. H200, bf16, 1,536 to 16,384 columns: 0.90 to 0.94 of the copy rate, and 0.88 to 0.93 by
    Triton's kernel, which reads rows twice."""
    return CausalConfig(1 if dims["cols"] <= 2048 else 4 if dims["cols"] <= 8192 else 8, 0)


def _dropout_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> CausalConfig:
    """A default with dropout: few warps, since each executes some 300 instructions per row beside those for its
    columns. H200, bf16, 1,536 to 16,384 columns: 0.90 to 0.93 of the copy rate, and 0.69 to 0.85 by Triton's kernel,
    which reads rows twice."""
    cols = dims["cols"]
    return CausalConfig(1 if cols <= 4096 else 2 if cols <= 8192 else 8, 0)


def _vjp_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> CausalConfig:
    """A default for the backward. H200, bf16, 1,536 to 8,192 columns: 0.94 to 0.96 of the copy rate, and 0.69 to 0.84
    by Triton."""
    return CausalConfig(1 if dims["cols"] <= 4096 else 4, 0)


def _tells(*args: Any) -> list[str]:
    """How rows are read."""
    return ["a CTA has one row in shared memory, and loads of it what lies before the diagonal"]


CHOICES = {"num_warps": (1, 2, 4, 8), "max_registers": (0, 32, 40, 48)}


def _flags(x: Tensor, p: float, scale: float, config: CausalConfig) -> dict[str, Any]:
    count, cols = x.shape
    flags = {"CHUNKS": cdiv(cols, config.num_warps * LINE), "num_warps": config.num_warps}
    flags["POSITIVE"] = scale > 0.0
    flags |= parts_dropout_flags(count, cols, p)
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


def _forward(
    x: Tensor,
    y: Tensor,
    top: Tensor | None,
    total: Tensor | None,
    seed: Tensor | None,
    p: float,
    scale: float,
    steps: tuple[int, int],
    config: CausalConfig,
) -> None:
    """y of x [M, N]. steps: from `row_steps`."""
    x, x_stride = aligned(x)
    count, cols = x.shape
    if count:
        launch(
            softmax_dropout_fwd_causal_parts_kernel, (count,),
            x, y, top, total, kernel_seed(seed, p), cols, x_stride, scale, *steps, *kernel_numbers(p),
            **_flags(x, p, scale, config),
        )  # fmt: skip


@register_kernel("softmax", backend="hopper_causal", rank=26, rejects=_reasons, tells=_tells, plans=rehearsed)
@optimize_kernel(space=Space(dims=lambda x, scale, causal: row_dims(x), default=_default, choices=CHOICES))
def softmax(x: Tensor, scale: float = 1.0, causal: bool = False, *, config: CausalConfig) -> Tensor:
    """y of `softmax`."""
    order = row_order(x)
    y = empty_rows(x, order)
    _forward(rows(x, order), y, None, None, None, 0.0, scale, row_steps(x, order), config)
    return y


@register_kernel("softmax_dropout", backend="hopper_causal", rank=26, rejects=_reasons, tells=_tells, plans=rehearsed)
@optimize_kernel(
    space=Space(dims=lambda x, seed, p, scale, causal: row_dims(x), default=_dropout_default, choices=CHOICES)
)
def softmax_dropout(
    x: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
    scale: float = 1.0,
    causal: bool = False,
    *,
    config: CausalConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, top and total of `softmax_dropout`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    top, total = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    _forward(rows(x), out, top, total, seed, p, scale, row_steps(x, None), config)
    return out, top, total


@register_kernel(
    "softmax_dropout_vjp", backend="hopper_causal", rank=26, rejects=_vjp_reasons, tells=_tells, plans=rehearsed
)
@optimize_kernel(
    space=Space(
        dims=lambda dout, x, seed, top, total, p, scale, causal: row_dims(x, dout),
        default=_vjp_default,
        choices=CHOICES,
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
    config: CausalConfig,
) -> Tensor:
    """dx of `softmax_dropout`."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens = x.shape[-2]
    (dout, dout_stride), (x, x_stride) = aligned(rows(dout)), aligned(rows(x))
    count, cols = x.shape
    if count:
        launch(
            softmax_dropout_bwd_causal_parts_kernel, (count,),
            x, dout, top.contiguous(), kernel_seed(seed, p), dx, cols, x_stride, dout_stride, scale, tokens,
            *kernel_numbers(p), **_flags(x, p, scale, config),
        )  # fmt: skip
    return dx
