"""Activations and gated activations in Triton: one elementwise kernel forward, one backward; both again with a bias."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import flat_rows, rows
from tilesmith.device.triton.activations import activate, gradient
from tilesmith.device.triton.column_sums import partial_rows, sum_partials
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed


@triton.jit
def _tile(num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FLAT: tl.constexpr = False):
    """int64 rows and columns of this program's tile, and which of them exist. FLAT: there is one row, so that nothing
    is divided before the first load."""
    block = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    if not FLAT:
        col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
        row += (block // col_blocks).to(tl.int64) * BLOCK_ROWS
        block = block % col_blocks
    col = block.to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return row, col, (row < num_rows) & (col < num_cols)


@triton.jit
def _gate_fwd_kernel(
    x_ptr, up_ptr, out_ptr, x_row, up_row, num_rows, num_cols,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = activation(x), times up where GATED; activation(x + up) where ADDED."""
    row, col, mask = _tile(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS, FLAT)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    out, _ = activate(x, ACTIVATION)
    if GATED:
        out *= tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_cols + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_bwd_kernel(
    dout_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, dout_row, x_row, up_row, num_rows, num_cols,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, WANTS_DX: tl.constexpr, WANTS_DUP: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = dout activation'(x), times up where GATED; dup = dout activation(x). Everything is loaded before dup is
    stored: what may be the same memory is not loaded ahead of a store, and a program would wait for memory twice."""
    row, col, mask = _tile(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS, FLAT)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * dout_row + col, mask=mask, other=0.0).to(tl.float32)
    if GATED and WANTS_DX:
        up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0)
    if WANTS_DUP:
        value, _ = activate(x, ACTIVATION)
        tl.store(dup_ptr + row * num_cols + col, (dout * value).to(dup_ptr.dtype.element_ty), mask=mask)
    if WANTS_DX:
        if GATED:
            dout *= up.to(tl.float32)
        dx = gradient(dout, x, ACTIVATION)
        tl.store(dx_ptr + row * num_cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _biased_fwd_kernel(
    x_ptr, bias_ptr, out_ptr, x_row, num_rows, num_cols,
    ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = activation(x + bias), bias along the columns."""
    row, col, mask = _tile(num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    out, _ = activate(x + _bias_tile(bias_ptr, num_cols, BLOCK_COLS), ACTIVATION)
    tl.store(out_ptr + row * num_cols + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bias_tile(bias_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    """The bias of this program's columns as one fp32 row. It is loaded in one dim: a tile of one row would get a layout
    of its own, and the rows it meets would go through shared memory to match that."""
    lane = (tl.program_id(0) % tl.cdiv(num_cols, BLOCK_COLS)).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    return tl.load(bias_ptr + lane, mask=lane < num_cols, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _biased_bwd_kernel(
    dout_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, dout_row, x_row, num_rows, num_cols, strips,
    ACTIVATION: tl.constexpr, WANTS_DX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """A block of columns per program, and every strips-th tile of rows: dx, and one partial row of sums of dx for
    dbias. A tile is loaded while the one before it is worked on. APART: how many neighbouring rows lie in different
    threads; a thread adds up its own rows of a tile before adding them to the sums, which therefore take few registers.
    """
    col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    strip = tl.program_id(0) // col_blocks
    col = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    bias = _bias_tile(bias_ptr, num_cols, BLOCK_COLS)
    x_at, dout_at, dx_at = row * x_row + col, row * dout_row + col, row * num_cols + col
    total = tl.zeros([APART, BLOCK_COLS], tl.float32)
    first = tl.cast(strip, tl.int64) * BLOCK_ROWS
    mask = (first + row < num_rows) & (col < num_cols)
    x_ahead = tl.load(x_ptr + first * x_row + x_at, mask=mask, other=0.0)
    dout_ahead = tl.load(dout_ptr + first * dout_row + dout_at, mask=mask, other=0.0)
    for tile in range(strip, tl.cdiv(num_rows, BLOCK_ROWS), strips):
        first = tl.cast(tile, tl.int64) * BLOCK_ROWS
        mask = (first + row < num_rows) & (col < num_cols)
        x, dout = x_ahead.to(tl.float32), dout_ahead.to(tl.float32)
        after = first + strips * BLOCK_ROWS
        mask_after = (after + row < num_rows) & (col < num_cols)
        x_ahead = tl.load(x_ptr + after * x_row + x_at, mask=mask_after, other=0.0)
        dout_ahead = tl.load(dout_ptr + after * dout_row + dout_at, mask=mask_after, other=0.0)
        dx = gradient(dout, x + bias, ACTIVATION)
        total += tl.sum(tl.reshape(dx, (BLOCK_ROWS // APART, APART, BLOCK_COLS)), 0)
        if WANTS_DX:
            tl.store(dx_ptr + first * num_cols + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + strip.to(tl.int64) * num_cols + col, tl.sum(total, 0, keep_dims=True), mask=col < num_cols)


class GateConfig(NamedTuple):
    """block: elements of one program."""

    block: int
    num_warps: int


def _blocks(num_rows: int, num_cols: int, config: GateConfig) -> tuple[int, int, int]:
    """Number of programs, rows and columns of a tile."""
    block_cols = min(config.block, next_power_of_2(num_cols))
    block_rows = min(config.block // block_cols, next_power_of_2(num_rows))
    return cdiv(num_rows, block_rows) * cdiv(num_cols, block_cols), block_rows, block_cols


class StripConfig(NamedTuple):
    """block_rows, block_cols: a tile. programs: of the backward: at most so many programs walk over the tiles of their
    columns, each over at least `LEAST` rows. max_registers: per thread, so that they are resident at once; 0 leaves it
    to the compiler."""

    block_rows: int
    block_cols: int
    num_warps: int
    programs: int = 0
    max_registers: int = 0


LEAST = 64  # rows of a strip: its partial sums are then a fiftieth of the traffic


def _forward(x: Tensor, up: Tensor | None, activation: str, config: GateConfig, added: bool = False) -> Tensor:
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    x, up_or_x = flat_rows(x, x if up is None else up)
    programs, block_rows, block_cols = _blocks(*x.shape, config)
    launch(
        _gate_fwd_kernel, (programs,),
        x, up_or_x, out, x.stride(0), up_or_x.stride(0), *x.shape,
        ACTIVATION=activation, GATED=up is not None and not added, ADDED=added, FLAT=len(x) == 1,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=config.num_warps,
    )  # fmt: skip
    return out


def _backward(
    dout: Tensor, x: Tensor, up: Tensor | None, activation: str, output_mask: Sequence[bool], config: GateConfig
) -> tuple[Tensor, Tensor]:
    wants_dx, wants_dup = output_mask
    dx, dup = x.new_empty(x.shape if wants_dx else 0), x.new_empty(x.shape if wants_dup else 0)
    if x.numel() == 0 or not (wants_dx or wants_dup):
        return dx, dup
    dout, x, up_or_x = flat_rows(dout, x, x if up is None else up)
    programs, block_rows, block_cols = _blocks(*x.shape, config)
    launch(
        _gate_bwd_kernel, (programs,),
        dout, x, up_or_x, dx, dup, dout.stride(0), x.stride(0), up_or_x.stride(0), *x.shape,
        ACTIVATION=activation, GATED=up is not None, WANTS_DX=wants_dx, WANTS_DUP=wants_dup, FLAT=len(x) == 1,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dup


def _biased_backward(
    dout: Tensor, x: Tensor, bias: Tensor, activation: str, output_mask: Sequence[bool], config: StripConfig
) -> tuple[Tensor, Tensor]:
    """dx and dbias; with dbias alone, dx is computed but not stored."""
    wants_dx, _ = output_mask
    dx = x.new_empty(x.shape if wants_dx else 0)
    dout, x = rows(dout), rows(x)
    num_rows, num_cols = x.shape
    block_rows, block_cols = _strip_blocks(num_rows, num_cols, config)
    tiles, col_blocks = cdiv(num_rows, block_rows), cdiv(num_cols, block_cols)
    strips = partial_rows(tiles, col_blocks, config.programs, cdiv(LEAST, block_rows)) if num_cols else 0
    partial = x.new_empty(strips, num_cols, dtype=torch.float32)
    if partial.numel():
        launch(
            _biased_bwd_kernel, (strips * col_blocks,),
            dout, x, bias.contiguous(), dx, partial, dout.stride(0), x.stride(0), num_rows, num_cols, strips,
            ACTIVATION=activation, WANTS_DX=wants_dx, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
            APART=min(block_rows, max(1, 512 // x.element_size() * config.num_warps // block_cols)),
            num_warps=config.num_warps, **({"maxnreg": config.max_registers} if config.max_registers else {}),
        )  # fmt: skip
    return dx, sum_partials(partial, bias.dtype)


def _strip_blocks(num_rows: int, num_cols: int, config: StripConfig) -> tuple[int, int]:
    """A tile of `config`'s size that is no wider than the rows and no taller than the columns."""
    block_cols = min(config.block_cols, next_power_of_2(num_cols))
    block_rows = config.block_rows * config.block_cols // block_cols
    return min(block_rows, next_power_of_2(num_rows)), block_cols


def _gelu_name(approximate: str, *tensors: Tensor | None) -> str:
    """The cheapest gelu that is exact enough for all of the tensors."""
    if approximate == "tanh":
        return "gelu_tanh"
    return "gelu_16_bit" if all(x is None or x.element_size() == 2 for x in tensors) else "gelu"


def _reasons(call) -> list[str]:
    x = next(getattr(call, name) for name in ("gate", "x", "out") if hasattr(call, name))
    return ["the tensors are float64; this kernel computes in float32"] if x.dtype == torch.float64 else []


def _bias_reasons(call) -> list[str]:
    if call.bias is not None and call.bias.dtype == torch.float64:
        return [*_reasons(call), "bias is float64; this kernel computes in float32"]
    return _reasons(call)


def _flat(config: StripConfig) -> GateConfig:
    """The same tile for tensors without a bias, which are one long row."""
    return GateConfig(config.block_rows * config.block_cols, config.num_warps)


def _dims(x: Tensor, *_: object) -> dict[str, int]:
    return {"elements": x.numel()}


def _default(dims, arch, dtype) -> GateConfig:
    # Two 16-byte accesses a thread for every tensor, all asked for before the first is used.
    return GateConfig(block=128 * 32 // dtype.itemsize, num_warps=4)


def _gradient_default(dims, arch, dtype) -> GateConfig:
    # Four elements a thread: each is worked on for long, and few registers let more warps hide that (23 and 2,048
    # threads of a multiprocessor for swiglu's; by 16 elements 46 and 1,280). Figures: docs/log/elementwise.md.
    return GateConfig(block=4 * 4 * max(arch.warp, 16), num_warps=4)


GATE_CHOICES = {"block": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)}
GATE_SPACE = Space(default=_default, dims=_dims, choices=GATE_CHOICES)
GRADIENT_SPACE = Space(default=_gradient_default, dims=_dims, choices=GATE_CHOICES)


def _strip_default(dims, arch, dtype) -> StripConfig:
    # Wide tiles of two rows: H200, bf16, 0.95 to 0.97 of the copy rate. Narrow tiles cost time at a CTA's end, where
    # threads that share columns exchange sums; but where wide ones would leave half of the CTAs without work (8,192 x
    # 1,024: 27 µs, narrow 21), they work on more columns at once. What was tried without gain: docs/log/elementwise.md.
    per_sm, each = 5, 16 // dtype.itemsize
    programs = per_sm * max(1, arch.sms)
    wide = cdiv(dims["rows"], LEAST) * cdiv(dims["cols"], 128 * each)
    registers = arch.registers // (per_sm * 128) // 8 * 8 if arch.kind == "cuda" else 0
    return StripConfig(*((2, 128 * each) if 2 * wide >= programs else (16, 16 * each)), 4, programs, registers)


def _biased_default(dims, arch, dtype) -> StripConfig:
    # Four 16-byte accesses a thread, on columns wide enough for whole lines and rows enough to share their bias.
    return StripConfig(block_rows=8, block_cols=128 * 8 // dtype.itemsize, num_warps=4)


BIASED_SPACE = Space(
    default=_biased_default,
    dims=lambda x, *_: _row_dims(x),
    choices={"block_rows": (2, 4, 8, 16), "block_cols": (256, 512, 1024), "num_warps": (4, 8)},
)
STRIP_SPACE = Space(
    default=_strip_default,
    dims=lambda dout, x, *_: _row_dims(x),
    choices={
        "block_rows": (2, 4, 16),
        "block_cols": (128, 512, 1024),
        "num_warps": (4, 8),
        "programs": (528, 660, 792, 1056),
        "max_registers": (0,),
    },
)


def _row_dims(x: Tensor) -> dict[str, int]:
    cols = x.shape[-1]
    return {"rows": x.numel() // max(1, cols), "cols": cols}


@register_kernel("silu", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def silu(x: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(x, None, "silu", config)


@register_kernel("silu_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def silu_vjp(dout: Tensor, x: Tensor, *, config: GateConfig) -> Tensor:
    return _backward(dout, x, None, "silu", (True, False), config)[0]


@register_kernel("gelu", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def gelu(x: Tensor, approximate: str = "none", *, config: GateConfig) -> Tensor:
    return _forward(x, None, _gelu_name(approximate, x), config)


@register_kernel("gelu_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def gelu_vjp(dout: Tensor, x: Tensor, approximate: str, *, config: GateConfig) -> Tensor:
    return _backward(dout, x, None, _gelu_name(approximate, x), (True, False), config)[0]


@register_kernel("swiglu", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def swiglu(gate: Tensor, up: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(gate, up, "silu", config)


@register_kernel("swiglu_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def swiglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, output_mask: Sequence[bool], *, config: GateConfig
) -> tuple[Tensor, Tensor]:
    return _backward(dout, gate, up, "silu", output_mask, config)


@register_kernel("geglu", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh", *, config: GateConfig) -> Tensor:
    return _forward(gate, up, _gelu_name(approximate, gate), config)


@register_kernel("geglu_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def geglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, approximate: str, output_mask: Sequence[bool], *, config: GateConfig
) -> tuple[Tensor, Tensor]:
    return _backward(dout, gate, up, _gelu_name(approximate, gate), output_mask, config)


@register_kernel("sigmoid", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def sigmoid(x: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(x, None, "sigmoid", config)


@register_kernel("sigmoid_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def sigmoid_vjp(dout: Tensor, out: Tensor, *, config: GateConfig) -> Tensor:
    return _backward(dout, out, None, "of_sigmoid", (True, False), config)[0]


@register_kernel("relu_squared", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def relu_squared(x: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(x, None, "relu_squared", config)


@register_kernel("relu_squared_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def relu_squared_vjp(dout: Tensor, x: Tensor, *, config: GateConfig) -> Tensor:
    return _backward(dout, x, None, "relu_squared", (True, False), config)[0]


@register_kernel("add_relu", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GATE_SPACE)
def add_relu(x: Tensor, y: Tensor, *, config: GateConfig) -> Tensor:
    return _forward(x, y, "relu", config, added=True)


@register_kernel("add_relu_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=GRADIENT_SPACE)
def add_relu_vjp(dout: Tensor, out: Tensor, *, config: GateConfig) -> Tensor:
    return _backward(dout, out, None, "of_relu", (True, False), config)[0]


def _bias_gelu_tells(bias: Tensor | None, backward: bool) -> list[str]:
    """Which kernel serves a call, by whether there is a bias."""
    way = "bwd" if backward else "fwd"
    if bias is None:
        return [f"_gate_{way}_kernel: without a bias the elements are one flat vector"]
    told = "its gradient is summed in partial rows" if backward else "tiles of rows share it"
    return [f"_biased_{way}_kernel: with a bias; {told}"]


@register_kernel(
    "bias_gelu",
    backend="triton",
    rank=20,
    rejects=_bias_reasons,
    tells=lambda x, bias, approximate: _bias_gelu_tells(bias, False),
)
@optimize_kernel(space=BIASED_SPACE)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none", *, config: StripConfig) -> Tensor:
    activation = _gelu_name(approximate, x)
    if bias is None:
        return _forward(x, None, activation, _flat(config))
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    x = rows(x)
    block_rows, block_cols = _strip_blocks(*x.shape, config)
    launch(
        _biased_fwd_kernel, (cdiv(x.shape[0], block_rows) * cdiv(x.shape[1], block_cols),),
        x, bias.contiguous(), out, x.stride(0), *x.shape,
        ACTIVATION=activation, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=config.num_warps,
    )  # fmt: skip
    return out


@register_kernel(
    "bias_gelu_vjp",
    backend="triton",
    rank=20,
    rejects=_bias_reasons,
    tells=lambda dout, x, bias, *_: _bias_gelu_tells(bias, True),
)
@optimize_kernel(space=STRIP_SPACE)
def bias_gelu_vjp(
    dout: Tensor,
    x: Tensor,
    bias: Tensor | None,
    approximate: str,
    output_mask: Sequence[bool],
    *,
    config: StripConfig,
) -> tuple[Tensor, Tensor]:
    activation = _gelu_name(approximate, x, bias)
    if bias is None:
        return _backward(dout, x, None, activation, output_mask, _flat(config))
    return _biased_backward(dout, x, bias, activation, output_mask, config)
