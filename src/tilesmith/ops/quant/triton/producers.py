"""Norms and SwiGLU in Triton that cast what they make."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import dense, rows
from tilesmith.device.triton.activations import activate
from tilesmith.device.triton.rounding import (
    largest_of,
    load_factor,
    magnitude,
    narrowed,
    raise_to,
    round8,
    seen_at,
    store_turned,
    widened,
    word8,
)
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.quant.op import rounded_up
from tilesmith.ops.quant.reference import FORMATS
from tilesmith.ops.quant.triton.cast import (
    RowConfig,
    load_rows,
    registers,
    rejects,
    saturates,
    scaled_rows,
    store_rows,
    tile_of,
    tile_rejects,
    words,
)

MAX_COLS = 16_384


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bound_ptr, amax_ptr, y_ptr, s_ptr, y8_ptr, factor_ptr, rstd_ptr,
    num_rows, num_cols, x_row, residual_row, eps, offset,
    LLAMA: tl.constexpr, E5M2: tl.constexpr, SATURATES: tl.constexpr, EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Whole rows a program, in registers. residual_ptr, s_ptr: None without an addition. EVEN: num_cols == BLOCK_COLS.

    WEIGHT_FIRST: the weight is asked for with the row, since no load passes the barriers of the sum; else behind the
    sum, which leaves its registers to more CTAs.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)
    lane_inside = tl.full([BLOCK_COLS], True, tl.int1) if EVEN else lane < num_cols
    inside = (row < num_rows) & lane_inside[None, :]
    x = tl.load(x_ptr + row * x_row + lane[None, :], mask=inside, other=0.0)
    if weight_ptr is not None and WEIGHT_FIRST:
        weight = tl.load(weight_ptr + lane, mask=lane_inside, other=0.0)
    factor, inverse = load_factor(bound_ptr, E5M2)
    seen = seen_at(amax_ptr)
    x = widened(x, SATURATES)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_row + lane[None, :], mask=inside, other=0.0).to(tl.float32)
        s = narrowed(x, s_ptr, SATURATES)
        tl.store(s_ptr + row * num_cols + lane[None, :], s, mask=inside)
        x = widened(s, SATURATES)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * (1.0 / num_cols) + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr, factor)
    y = x * rstd
    if LLAMA:
        y = widened(narrowed(y, y_ptr, SATURATES), SATURATES)
    if weight_ptr is not None:
        if not WEIGHT_FIRST:
            weight = tl.load(weight_ptr + lane, mask=lane_inside, other=0.0)
        weight = widened(weight, SATURATES) + offset
        if LLAMA and weight_ptr.dtype == y_ptr.dtype:
            weight = weight.to(weight_ptr.dtype.element_ty).to(tl.float32)
        y *= weight[None, :]
    y = narrowed(y, y_ptr, SATURATES)
    tl.store(y_ptr + row * num_cols + lane[None, :], y, mask=inside)
    y = widened(y, SATURATES)
    # 8 numbers a thread, as it has them: 16, one store, would be sent through shared memory first
    lane8 = tl.max_contiguous(tl.arange(0, BLOCK_COLS), 8)[None, :]
    tl.store(y8_ptr + row * num_cols + lane8, round8(y, inverse, y8_ptr, E5M2, SATURATES), mask=inside)
    # 0 where there is no column; where there is no row, perhaps 0 / 0
    top = tl.where(row < num_rows, tl.max(magnitude(y), 1, keep_dims=True), 0)
    raise_to(amax_ptr, tl.max(tl.max(top, 1), 0), seen)


@triton.jit
def _silu(x, SATURATES: tl.constexpr):
    """silu(x) and its derivative. SATURATES stands for NVIDIA's instructions, as in `round8`: a reciprocal that may be
    off by an ulp and exponentials without subnormal numbers are four instructions for what Triton makes of fourteen,
    and the kernels here are bound by them."""
    if SATURATES:
        sigmoid = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        value = x * sigmoid
        return value, sigmoid + value * (1 - sigmoid)
    else:
        return activate(x, "silu")


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, bound_ptr, amax_ptr, h8_ptr, factor_ptr, num_rows, num_cols, gate_row, up_row,
    E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (program % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < num_rows) & (col < num_cols)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_row + col, mask=inside, other=0.0)
    value, _ = _silu(widened(gate, SATURATES), SATURATES)
    h = narrowed(value * widened(up, SATURATES), gate_ptr, SATURATES)
    h = widened(h, SATURATES)
    factor, inverse = load_factor(bound_ptr, E5M2)
    seen = seen_at(amax_ptr)
    if program == 0:
        tl.store(factor_ptr, factor)
    tl.store(h8_ptr + row * num_cols + col, round8(h, inverse, h8_ptr, E5M2, SATURATES), mask=inside)
    raise_to(amax_ptr, tl.max(tl.max(magnitude(h), 1), 0), seen)


@triton.jit
def _swiglu_gradients(dh, gate, up, like_ptr, SATURATES: tl.constexpr):
    """(h, gradient of gate, gradient of up) of a tile, each rounded to the type of like_ptr."""
    dh, up = widened(dh, SATURATES), widened(up, SATURATES)
    value, slope = _silu(widened(gate, SATURATES), SATURATES)
    h, dgate = narrowed(value * up, like_ptr, SATURATES), narrowed(dh * up * slope, like_ptr, SATURATES)
    return h, dgate, narrowed(dh * value, like_ptr, SATURATES)


@triton.jit
def _swiglu_vjp_kernel(
    dh_ptr, gate_ptr, up_ptr, bound_ptr, amax_ptr, h_factor_ptr, d8_ptr, like_h_ptr, d_words_ptr, h_words_ptr,
    factor_ptr, num_rows, num_cols, dh_row, gate_row, up_row, room,
    E5M2: tl.constexpr, H_E5M2: tl.constexpr, SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """A tile a program: the gradients of gate and of up side by side, them transposed, and h again, transposed.

    like_h_ptr: the format of h. Every fourth row of the tile is a tile of its own, see `word_of`.
    """
    block_row, block_col = tile_of(room, num_cols, BLOCK_ROWS, BLOCK_COLS, BANDS)
    quad = block_row * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = block_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row, inside = 4 * quad, col < num_cols
    d0, d1, d2, d3 = load_rows(dh_ptr + row * dh_row + col, dh_row, row, num_rows, inside)
    g0, g1, g2, g3 = load_rows(gate_ptr + row * gate_row + col, gate_row, row, num_rows, inside)
    u0, u1, u2, u3 = load_rows(up_ptr + row * up_row + col, up_row, row, num_rows, inside)
    factor, inverse = load_factor(bound_ptr, E5M2)
    h_inverse = 1.0 / tl.load(h_factor_ptr)  # a power of two: exact
    seen = seen_at(amax_ptr)
    h0, g0, u0 = _swiglu_gradients(d0, g0, u0, gate_ptr, SATURATES)
    h1, g1, u1 = _swiglu_gradients(d1, g1, u1, gate_ptr, SATURATES)
    h2, g2, u2 = _swiglu_gradients(d2, g2, u2, gate_ptr, SATURATES)
    h3, g3, u3 = _swiglu_gradients(d3, g3, u3, gate_ptr, SATURATES)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr, factor)
    top = tl.maximum(magnitude(largest_of(g0, g1, g2, g3, SATURATES)), magnitude(largest_of(u0, u1, u2, u3, SATURATES)))
    to, stride = d8_ptr + row * (2 * num_cols) + col, 2 * num_cols
    y0, y1, y2, y3 = scaled_rows(g0, g1, g2, g3, inverse, E5M2, SATURATES)
    store_rows(to, y0, y1, y2, y3, inside, row, num_rows, stride)
    store_turned(d_words_ptr, word8(y0, y1, y2, y3, d8_ptr, E5M2, SATURATES), quad, col, room, num_cols)
    y0, y1, y2, y3 = scaled_rows(u0, u1, u2, u3, inverse, E5M2, SATURATES)
    store_rows(to + num_cols, y0, y1, y2, y3, inside, row, num_rows, stride)
    half = tl.cast(num_cols, tl.int64) * (room // 16 * 4)
    store_turned(d_words_ptr + half, word8(y0, y1, y2, y3, d8_ptr, E5M2, SATURATES), quad, col, room, num_cols)
    y0, y1, y2, y3 = scaled_rows(h0, h1, h2, h3, h_inverse, H_E5M2, SATURATES)
    store_turned(h_words_ptr, word8(y0, y1, y2, y3, like_h_ptr, H_E5M2, SATURATES), quad, col, room, num_cols)
    raise_to(amax_ptr, tl.max(tl.max(top, 1), 0), seen)


class GradientConfig(NamedTuple):
    """block_rows, block_cols, num_warps, bands: as of `TileConfig`. max_registers: of a thread, see `registers`."""

    block_rows: int
    block_cols: int
    num_warps: int
    bands: int
    max_registers: int


class NormConfig(NamedTuple):
    """tile: elements that a program holds, in whole rows (at least one). max_registers: of a thread, see `registers`.
    weight_first: the weight is loaded with the row, not behind its sum."""

    tile: int
    num_warps: int
    max_registers: int
    weight_first: bool


def _norm_rejects(call) -> list[str]:
    reasons = rejects(call)
    if call.x.cols > MAX_COLS:
        reasons.append(f"x has {call.x.cols} columns; up to {MAX_COLS} are held in registers")
    return reasons


def _norm_dims(x, *rest) -> dict[str, int]:
    return {"rows": x.numel() // max(1, x.shape[-1]), "cols": x.shape[-1]}


def _norm_default(dims, arch, dtype) -> NormConfig:
    """Up to 4,096 columns a thread has 16 numbers, and without the weight 32 registers: 64 warps are resident on a
    multiprocessor, and one row's weight arrives while others are summed. Beyond, two to four rows are, which wait for
    whatever is loaded behind the sum; 64 registers hold row and weight of 16-bit numbers."""
    width = next_power_of_2(dims["cols"])
    if width <= 4096:
        return NormConfig(2048, 4 if width <= 2048 else 8, 0, False)
    return NormConfig(2048, 8 if width <= 8192 else 16, 64 if dtype.itemsize == 2 else 0, True)


NORM_SPACE = Space(
    default=_norm_default,
    dims=_norm_dims,
    choices={
        "tile": (2048, 4096, 8192), "num_warps": (4, 8, 16), "max_registers": (0, 40, 64),
        "weight_first": (False, True),
    },
)  # fmt: skip
GATE_SPACE = Space(
    default=lambda dims, arch, dtype: RowConfig(1, 4096, 4),
    dims=_norm_dims,
    choices={"block_rows": (1, 2), "block_cols": (1024, 2048, 4096), "num_warps": (4, 8)},
)
VJP_SPACE = Space(
    # 112 registers, two CTAs; a limit of 96 allows no third and spills
    default=lambda dims, arch, dtype: GradientConfig(128, 64, 8, 8, 0),
    dims=_norm_dims,
    choices={
        "block_rows": (64, 128), "block_cols": (32, 64, 128), "num_warps": (4, 8), "bands": (1, 8),
        "max_registers": (0, 64, 96),
    },
)  # fmt: skip


def _norm(x, residual, weight, bound, amax, eps, offset, casting, format, config: NormConfig):
    y, y8 = (torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (x.dtype, FORMATS[format]))
    s = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    factor = x.new_empty(1, dtype=torch.float32)
    x2, residual2 = rows(x), None if residual is None else rows(residual)
    count, cols = x2.shape
    width = next_power_of_2(cols)
    block_rows = max(1, config.tile // width)
    launch(
        _norm_kernel, (max(1, cdiv(count, block_rows)),), x2, residual2, dense(weight), bound, amax, y, s, y8, factor,
        rstd, count, cols, x2.stride(0), 0 if residual2 is None else residual2.stride(0), eps, offset,
        LLAMA=casting == "llama", E5M2=format == "e5m2", SATURATES=saturates(x), EVEN=cols == width,
        WEIGHT_FIRST=config.weight_first, BLOCK_ROWS=block_rows, BLOCK_COLS=width, num_warps=config.num_warps,
        **registers(x, config.max_registers),
    )  # fmt: skip
    return y, s, y8, factor, rstd


@register_kernel("rms_norm_fp8", backend="triton", rank=20, rejects=_norm_rejects)
@optimize_kernel(space=NORM_SPACE)
def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    format: str = "e4m3",
    *,
    config: NormConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, _, y8, factor, rstd = _norm(x, None, weight, bound, amax, eps, offset, casting, format, config)
    return y, y8, factor, rstd


@register_kernel("add_rms_norm_fp8", backend="triton", rank=20, rejects=_norm_rejects)
@optimize_kernel(space=NORM_SPACE)
def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    format: str = "e4m3",
    *,
    config: NormConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _norm(x, residual, weight, bound, amax, eps, offset, casting, format, config)


@register_kernel("swiglu_fp8", backend="triton", rank=20, rejects=rejects)
@optimize_kernel(space=GATE_SPACE)
def swiglu_fp8(
    gate: Tensor, up: Tensor, bound: Tensor, amax: Tensor, format: str = "e4m3", *, config: RowConfig
) -> tuple[Tensor, Tensor]:
    h8 = torch.empty(gate.shape, dtype=FORMATS[format], device=gate.device)
    factor = gate.new_empty(1, dtype=torch.float32)
    gate2, up2 = rows(gate), rows(up)
    count, cols = gate2.shape
    width = min(config.block_cols, next_power_of_2(cols))
    block_rows = min(max(1, config.block_rows * config.block_cols // width), next_power_of_2(count))
    launch(
        _swiglu_kernel, (max(1, cdiv(count, block_rows) * cdiv(cols, width)),), gate2, up2, bound, amax, h8, factor,
        count if cols else 0, max(1, cols), gate2.stride(0), up2.stride(0),
        E5M2=format == "e5m2", SATURATES=saturates(gate), BLOCK_ROWS=block_rows, BLOCK_COLS=width,
        num_warps=config.num_warps,
    )  # fmt: skip
    return h8, factor


@register_kernel("swiglu_vjp_fp8", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(space=VJP_SPACE)
def swiglu_vjp_fp8(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    bound: Tensor,
    amax: Tensor,
    h_factor: Tensor,
    format: str = "e5m2",
    h_format: str = "e4m3",
    *,
    config: GradientConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh2, gate2, up2 = rows(dh), rows(gate), rows(up)
    count, cols = gate2.shape
    room = rounded_up(count)
    d8, d8_t = (gate.new_empty(shape, dtype=FORMATS[format]) for shape in ((count, 2 * cols), (2 * cols, room)))
    h8_t = gate.new_empty(cols, room, dtype=FORMATS[h_format])
    factor = gate.new_empty(1, dtype=torch.float32)
    block_rows = min(config.block_rows, max(16, next_power_of_2(count)))
    block_cols = min(config.block_cols, next_power_of_2(cols))
    launch(
        _swiglu_vjp_kernel, (max(1, cdiv(room, block_rows) * cdiv(cols, block_cols)),),
        dh2, gate2, up2, bound, amax, h_factor, d8, h8_t, words(d8_t), words(h8_t), factor,
        count if cols else 0, max(1, cols), dh2.stride(0), gate2.stride(0), up2.stride(0), room if cols else 0,
        E5M2=format == "e5m2", H_E5M2=h_format == "e5m2", SATURATES=saturates(gate), BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols, BANDS=config.bands, num_warps=config.num_warps,
        **registers(gate, config.max_registers),
    )  # fmt: skip
    return d8, d8_t, h8_t, factor
