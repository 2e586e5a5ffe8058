"""Activations and gated activations in Triton: one elementwise kernel forward, one backward."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.rows import rows

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL_PEAK = tl.constexpr(1 / math.sqrt(2 * math.pi))
TANH_SLOPE = tl.constexpr(math.sqrt(8 / math.pi))
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """The value and its derivative; what a caller does not use costs nothing."""
    if ACTIVATION == "gelu":
        cdf = 0.5 + 0.5 * tl.math.erf(x * SQRT_HALF)
        return x * cdf, cdf + x * (NORMAL_PEAK * tl.exp(-0.5 * x * x))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel where tanh(z) is near -1.
        cdf = 1 / (1 + tl.exp(-TANH_SLOPE * (x + TANH_CUBIC * x * x * x)))
        value = x * cdf
        return value, cdf + value * (1 - cdf) * (TANH_SLOPE + 3 * TANH_CUBIC * TANH_SLOPE * x * x)
    else:
        sigmoid = 1 / (1 + tl.exp(-x))
        value = x * sigmoid
        return value, sigmoid + value * (1 - sigmoid)


@triton.jit
def _tile(num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """int64 rows and columns of this program's tile, and which of them exist."""
    col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0).to(tl.int64)
    row = (program // col_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (program % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return row, col, (row < num_rows) & (col < num_cols)


@triton.jit
def _gate_fwd_kernel(
    x_ptr, up_ptr, out_ptr, x_row, up_row, num_rows, num_cols,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = activation(x), times up where GATED."""
    row, col, mask = _tile(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    out, _ = _activate(x, ACTIVATION)
    if GATED:
        out *= tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_cols + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_bwd_kernel(
    dout_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, dout_row, x_row, up_row, num_rows, num_cols,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, WANTS_DX: tl.constexpr, WANTS_DUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = dout activation'(x), times up where GATED; dup = dout activation(x)."""
    row, col, mask = _tile(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * dout_row + col, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activate(x, ACTIVATION)
    if WANTS_DUP:
        tl.store(dup_ptr + row * num_cols + col, (dout * value).to(dup_ptr.dtype.element_ty), mask=mask)
    if WANTS_DX:
        if GATED:
            dout *= tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * num_cols + col, (dout * slope).to(dx_ptr.dtype.element_ty), mask=mask)


class GateConfig(NamedTuple):
    """block: elements of one program."""

    block: int
    num_warps: int


def _lay_flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape as [M, N] rows: one row of all elements where every one is contiguous."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, -1) for x in tensors)
    return tuple(rows(x) for x in tensors)


def _blocks(num_rows: int, num_cols: int, config: GateConfig) -> tuple[int, int, int]:
    """Number of programs, rows and columns of a tile."""
    block_cols = min(config.block, next_power_of_2(num_cols))
    block_rows = min(config.block // block_cols, next_power_of_2(num_rows))
    return cdiv(num_rows, block_rows) * cdiv(num_cols, block_cols), block_rows, block_cols


def _forward(x: Tensor, up: Tensor | None, activation: str, config: GateConfig) -> Tensor:
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    x, up_or_x = _lay_flat(x, x if up is None else up)
    programs, block_rows, block_cols = _blocks(*x.shape, config)
    launch(
        _gate_fwd_kernel, (programs,),
        x, up_or_x, out, x.stride(0), up_or_x.stride(0), *x.shape,
        ACTIVATION=activation, GATED=up is not None, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out


def _backward(
    dout: Tensor, x: Tensor, up: Tensor | None, activation: str, output_mask: Sequence[bool], config: GateConfig
) -> tuple[Tensor, Tensor]:
    wants_dx, wants_dup = output_mask
    dx, dup = x.new_empty(x.shape if wants_dx else 0), x.new_empty(x.shape if wants_dup else 0)
    if x.numel() == 0 or not (wants_dx or wants_dup):
        return dx, dup
    dout, x, up_or_x = _lay_flat(dout, x, x if up is None else up)
    programs, block_rows, block_cols = _blocks(*x.shape, config)
    launch(
        _gate_bwd_kernel, (programs,),
        dout, x, up_or_x, dx, dup, dout.stride(0), x.stride(0), up_or_x.stride(0), *x.shape,
        ACTIVATION=activation, GATED=up is not None, WANTS_DX=wants_dx, WANTS_DUP=wants_dup,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dup


def _gelu_name(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _reasons(call) -> list[str]:
    x = call.gate if hasattr(call, "gate") else call.x
    return ["the tensors are float64; this kernel computes in float32"] if x.dtype == torch.float64 else []


def _dims(x: Tensor, *_: object) -> dict[str, int]:
    return {"elements": x.numel()}


def _default(dims, arch, dtype) -> GateConfig:
    # Two 16-byte accesses a thread for every tensor, all asked for before the first is used.
    return GateConfig(block=128 * 32 // dtype.itemsize, num_warps=4)


GATE_SPACE = Space(
    default=_default, dims=_dims, choices={"block": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)}
)


@register_kernel("silu", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def silu(x: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(x, None, "silu", config)


@register_kernel("silu_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def silu_vjp(dout: Tensor, x: Tensor, *, config: GateConfig) -> Tensor:
    return _backward(dout, x, None, "silu", (True, False), config)[0]


@register_kernel("gelu", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def gelu(x: Tensor, approximate: str = "none", *, config: GateConfig) -> Tensor:
    return _forward(x, None, _gelu_name(approximate), config)


@register_kernel("gelu_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def gelu_vjp(dout: Tensor, x: Tensor, approximate: str, *, config: GateConfig) -> Tensor:
    return _backward(dout, x, None, _gelu_name(approximate), (True, False), config)[0]


@register_kernel("swiglu", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def swiglu(gate: Tensor, up: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(gate, up, "silu", config)


@register_kernel("swiglu_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def swiglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, output_mask: Sequence[bool], *, config: GateConfig
) -> tuple[Tensor, Tensor]:
    return _backward(dout, gate, up, "silu", output_mask, config)


@register_kernel("geglu", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh", *, config: GateConfig) -> Tensor:
    return _forward(gate, up, _gelu_name(approximate), config)


@register_kernel("geglu_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=GATE_SPACE)
def geglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, approximate: str, output_mask: Sequence[bool], *, config: GateConfig
) -> tuple[Tensor, Tensor]:
    return _backward(dout, gate, up, _gelu_name(approximate), output_mask, config)
