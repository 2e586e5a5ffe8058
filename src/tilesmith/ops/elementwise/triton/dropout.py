"""Dropout of a biased tensor in Triton: one kernel forward and for dx alone, one that also sums dx for dbias."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.dropout import dropout_flags, kernel_numbers, kernel_seed
from tilesmith.device.rows import dense, rows
from tilesmith.device.triton.column_sums import partial_rows, sum_partials
from tilesmith.device.triton.dropout import keep_or_0, keep_tile
from tilesmith.device.triton.philox import load_key
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel

# Pointers that are None stand for tensors that a call does not have; Triton compiles a variant without them.


@triton.jit
def _bias_dropout_kernel(
    x_ptr, bias_ptr, residual_ptr, seed_ptr, out_ptr,
    x_row, residual_row, num_rows, num_cols, drop_below, keep_scale,
    LANES: tl.constexpr, SHORT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = residual + dropout(x + bias) of one tile."""
    col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    program = tl.program_id(0).to(tl.int64)
    row = (program // col_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    start = (program % col_blocks) * BLOCK_COLS
    lane = start + tl.arange(0, BLOCK_COLS)
    col = lane[None, :]
    mask = (row < num_rows) & (col < num_cols)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_row + col, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:  # one dim: a tile of one row would get a layout of its own, and the tile be moved to it
        bias = tl.load(bias_ptr + lane, mask=lane < num_cols, other=0.0).to(tl.float32)[None, :]
    key = load_key(seed_ptr) if seed_ptr is not None else None
    if seed_ptr is not None:
        x *= keep_scale
    if bias_ptr is not None:
        x += bias * keep_scale if seed_ptr is not None else bias  # one fused product and sum an element
    out = x
    if seed_ptr is not None:
        keep = keep_tile(key, row * num_cols + start, drop_below, BLOCK_COLS, LANES, SHORT)
        out = keep_or_0(x, keep, keep_scale)
    if residual_ptr is not None:
        out += residual
    tl.store(out_ptr + row * num_cols + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bias_dropout_bwd_kernel(
    dout_ptr, seed_ptr, dx_ptr, partial_ptr, dout_row, num_rows, num_cols, strips, drop_below, keep_scale,
    LANES: tl.constexpr, SHORT: tl.constexpr, WANTS_DX: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A block of columns per program, and every strips-th tile of rows: dx, and one partial row of sums of dx for
    dbias. A tile is loaded while the one before it is worked on. APART: how many neighbouring rows lie in different
    threads; a thread adds up its own rows of a tile before adding them to the sums, which therefore take few registers.
    """
    col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    strip = tl.program_id(0) // col_blocks
    start = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_COLS
    col = start + tl.arange(0, BLOCK_COLS)[None, :]
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    dout_at, dx_at, index = row * dout_row + col, row * num_cols + col, row * num_cols + start
    total = tl.zeros([APART, BLOCK_COLS], tl.float32)
    first = tl.cast(strip, tl.int64) * BLOCK_ROWS
    mask = (first + row < num_rows) & (col < num_cols)
    ahead = tl.load(dout_ptr + first * dout_row + dout_at, mask=mask, other=0.0)
    key = load_key(seed_ptr) if seed_ptr is not None else None
    for tile in range(strip, tl.cdiv(num_rows, BLOCK_ROWS), strips):
        first = tl.cast(tile, tl.int64) * BLOCK_ROWS
        mask = (first + row < num_rows) & (col < num_cols)
        dout = ahead.to(tl.float32)
        after = first + strips * BLOCK_ROWS
        mask_after = (after + row < num_rows) & (col < num_cols)
        ahead = tl.load(dout_ptr + after * dout_row + dout_at, mask=mask_after, other=0.0)
        dx = dout
        if seed_ptr is not None:
            keep = keep_tile(key, first * num_cols + index, drop_below, BLOCK_COLS, LANES, SHORT)
            dx = keep_or_0(dout * keep_scale, keep, keep_scale)
        total += tl.sum(tl.reshape(dx, (BLOCK_ROWS // APART, APART, BLOCK_COLS)), 0)
        if WANTS_DX:
            tl.store(dx_ptr + first * num_cols + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + strip.to(tl.int64) * num_cols + col, tl.sum(total, 0, keep_dims=True), mask=col < num_cols)


class DropConfig(NamedTuple):
    """block_rows, block_cols: a tile. programs: of the backward that sums: at most so many programs, each of which
    walks over at least `LEAST` rows of its columns. max_registers: per thread, so that they are resident at once; 0
    leaves it to the compiler."""

    block_rows: int
    block_cols: int
    num_warps: int
    programs: int = 0
    max_registers: int = 0


LEAST = 64  # rows; the partial sums are then a thirtieth of the traffic


def _forward(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, seed: Tensor | None, p: float, config: DropConfig
) -> Tensor:
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    read = x if residual is None else residual
    if bias is None and x.is_contiguous() and read.is_contiguous():
        # as rows of a block's width, where they fill such: H200, bf16, of the copy rate 0.99, as a single row 0.95
        width = config.block_cols if x.numel() % config.block_cols == 0 else x.numel()
        x, read = x.view(-1, width), read.view(-1, width)
    else:
        x, read = rows(x), rows(read)
    num_rows, num_cols = x.shape
    block_rows, block_cols = _blocks(num_rows, num_cols, config)
    launch(
        _bias_dropout_kernel, (cdiv(num_rows, block_rows) * cdiv(num_cols, block_cols),),
        x, dense(bias), None if residual is None else read,
        kernel_seed(seed, p), out, x.stride(0), read.stride(0), num_rows, num_cols, *kernel_numbers(p),
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=config.num_warps,
        **dropout_flags(num_rows, num_cols, out.element_size()),
    )  # fmt: skip
    return out


def _backward(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool], config: DropConfig
) -> tuple[Tensor, Tensor]:
    wants_dx, wants_dbias = output_mask
    if not wants_dbias:
        dx = _forward(dout, None, None, seed, p, config) if wants_dx else dout.new_empty(0)
        return dx, dout.new_empty(0)
    dx = dout.new_empty(dout.shape if wants_dx else 0)
    dout = rows(dout)
    num_rows, num_cols = dout.shape
    block_rows, block_cols = _blocks(num_rows, num_cols, config)
    tiles, col_blocks = cdiv(num_rows, block_rows), cdiv(num_cols, block_cols)
    strips = partial_rows(tiles, col_blocks, config.programs, cdiv(LEAST, block_rows)) if num_cols else 0
    partial = dout.new_empty(strips, num_cols, dtype=torch.float32)
    if partial.numel():
        launch(
            _bias_dropout_bwd_kernel, (strips * col_blocks,),
            dout, kernel_seed(seed, p), dx, partial, dout.stride(0), num_rows, num_cols, strips,
            *kernel_numbers(p),
            WANTS_DX=wants_dx, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
            APART=min(block_rows, max(1, 512 // dx.element_size() * config.num_warps // block_cols)),
            num_warps=config.num_warps, **dropout_flags(num_rows, num_cols, dx.element_size()),
            **({"maxnreg": config.max_registers} if config.max_registers else {}),
        )  # fmt: skip
    return dx, sum_partials(partial, bias.dtype)


def _blocks(num_rows: int, num_cols: int, config: DropConfig) -> tuple[int, int]:
    """A tile of `config`'s size, no wider than the rows (but two Philox calls wide), no taller than the columns."""
    block_cols = min(config.block_cols, max(8, next_power_of_2(num_cols)))
    if num_rows == 1:
        block_cols = min(config.block_rows * config.block_cols, max(8, next_power_of_2(num_cols)))
    block_rows = max(1, config.block_rows * config.block_cols // block_cols)
    return min(block_rows, next_power_of_2(num_rows)), block_cols


def _reasons(call: Any) -> list[str]:
    return [
        f"{name} is float64; this kernel computes in float32"
        for name in ("x", "dout", "bias")
        if getattr(getattr(call, name, None), "dtype", None) == torch.float64
    ]


def _dims(x: Tensor, *_: object) -> dict[str, int]:
    cols = x.shape[-1]
    return {"rows": x.numel() // max(1, cols), "cols": cols}


def _forward_default(dims, arch, dtype) -> DropConfig:
    # Four 16-byte accesses a thread for every tensor, in rows as wide as the program's threads, which then all hold the
    # same columns of each row and load their bias once. H200, bf16, of the copy rate: 0.90 from 256 columns on; 256 and
    # 512 by programs of 128 threads 0.80.
    each = 16 // dtype.itemsize
    threads = min(128, max(32, next_power_of_2(dims["cols"]) // each))
    return DropConfig(4, threads * each, num_warps=threads // 32)


def _residual_default(dims, arch, dtype) -> DropConfig:
    # In wide rows two accesses of narrower ones: the third tensor leaves time for the bias to change threads (H200,
    # bf16, 4,096 columns: 0.98 of the copy rate, and 0.91 with four; 1,024 columns: 0.97, and 1.02 with four).
    if dims["cols"] * dtype.itemsize > 2048:
        return DropConfig(4, 128 * 8 // dtype.itemsize, num_warps=4)
    return _forward_default(dims, arch, dtype)


def _backward_default(dims, arch, dtype) -> DropConfig:
    # H200, bf16, 1,024 to 65,536 columns: 0.88 to 0.92 of the copy rate. Narrow rows take narrow blocks, which leave
    # fewer partial rows: at 1,024 columns 0.93, and 0.88 in wide ones. Generating the mask again costs less than
    # storing and loading it as bits would. What was tried without gain: docs/log/elementwise.md.
    each, per_sm = 16 // dtype.itemsize, 4
    registers = arch.registers // (per_sm * 128) // 8 * 8 if arch.kind == "cuda" else 0
    rows = 4 if dims["cols"] * dtype.itemsize > 4096 else 16
    return DropConfig(rows, 512 // rows * each, 4, per_sm * max(1, arch.sms), registers)


FORWARD_CHOICES = {"block_rows": (2, 4, 8, 16), "block_cols": (256, 512, 1024), "num_warps": (1, 2, 4, 8)}
BACKWARD_CHOICES = {
    "block_rows": (2, 4, 8),
    "block_cols": (256, 512, 1024),
    "num_warps": (2, 4, 8),
    "programs": (528, 792, 1056, 1584),
    "max_registers": (0,),
}
FORWARD_SPACE = Space(default=_forward_default, dims=_dims, choices=FORWARD_CHOICES)
RESIDUAL_SPACE = Space(default=_residual_default, dims=_dims, choices=FORWARD_CHOICES)
BACKWARD_SPACE = Space(default=_backward_default, dims=_dims, choices=BACKWARD_CHOICES)


def _vjp_tells(call_mask: Sequence[bool]) -> list[str]:
    """Which kernel serves a backward, by whether the bias wants a gradient."""
    wants_dx, wants_dbias = call_mask
    if wants_dbias:
        return ["_bias_dropout_bwd_kernel: the bias's gradient is summed in partial rows, in the same pass"]
    return ["_bias_dropout_kernel: the same dropout of the gradient"] if wants_dx else ["no kernel: nothing is wanted"]


@register_kernel("bias_dropout", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=FORWARD_SPACE)
def bias_dropout(
    x: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0, *, config: DropConfig
) -> Tensor:
    return _forward(x, None, bias, seed, p, config)


@register_kernel(
    "bias_dropout_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dout, bias, seed, p, output_mask: _vjp_tells(output_mask),
)
@optimize_kernel(space=BACKWARD_SPACE)
def bias_dropout_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool], *, config: DropConfig
) -> tuple[Tensor, Tensor]:
    return _backward(dout, bias, seed, p, output_mask, config)


@register_kernel("bias_dropout_residual", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=RESIDUAL_SPACE)
def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    *,
    config: DropConfig,
) -> Tensor:
    return _forward(x, residual, bias, seed, p, config)


@register_kernel(
    "bias_dropout_residual_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dout, bias, seed, p, output_mask: _vjp_tells(output_mask),
)
@optimize_kernel(space=BACKWARD_SPACE)
def bias_dropout_residual_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool], *, config: DropConfig
) -> tuple[Tensor, Tensor]:
    return _backward(dout, bias, seed, p, output_mask, config)
