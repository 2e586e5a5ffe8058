"""Triton kernels of merge_attention and its gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.reference import out_like
from tilesmith.ops.attn.triton.tiles import LN2, LOG2E


@triton.jit
def _row_offsets(row, inner, middle, strides):
    """Offsets of rows of a tensor with three leading dims, the last two of sizes middle and inner."""
    i = row % inner
    j = (row // inner) % middle
    return (row // (inner * middle)) * strides[0] + j * strides[1] + i * strides[2]


@triton.jit
def _merge_shares(lse_a, lse_b):
    top = tl.maximum(lse_a, lse_b)
    top = tl.where(top == float("-inf"), 0.0, top)
    a = tl.exp2((lse_a - top) * LOG2E)
    b = tl.exp2((lse_b - top) * LOG2E)
    total = a + b
    dead = total == 0.0
    total = tl.where(dead, 1.0, total)
    lse = tl.where(dead, float("-inf"), top + tl.log2(total) * LN2)
    return lse, a / total, b / total


@triton.jit
def _merge_attention_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr,
    out_a_strides, lse_a_strides, out_b_strides, lse_b_strides, out_strides,
    rows, middle, inner, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """IN_PLACE: out lies where out_a does, so that rows to which b adds nothing are neither read nor written."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_D)[None, :]
    held = row < rows
    lse_a = tl.load(lse_a_ptr + _row_offsets(row, inner, middle, lse_a_strides), mask=held, other=0.0)
    lse_b = tl.load(lse_b_ptr + _row_offsets(row, inner, middle, lse_b_strides), mask=held, other=0.0)
    lse, share_a, share_b = _merge_shares(lse_a, lse_b)
    tl.store(lse_ptr + row, lse, mask=held)
    if IN_PLACE:  # where a counts for nothing either, or for NaN, out is another than out_a
        held &= (lse_b != float("-inf")) | (share_a != 1.0)
    held = held[:, None] & (cols < DIM)
    a_ptr = out_a_ptr + _row_offsets(row, inner, middle, out_a_strides)[:, None] + cols
    b_ptr = out_b_ptr + _row_offsets(row, inner, middle, out_b_strides)[:, None] + cols
    # a side that counts for nothing is not read: it may hold NaN
    a = tl.load(a_ptr, mask=held & (share_a > 0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr, mask=held & (share_b > 0)[:, None], other=0.0).to(tl.float32)
    out = share_a[:, None] * a + share_b[:, None] * b
    out_ptr += _row_offsets(row, inner, middle, out_strides)[:, None] + cols
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _merge_attention_vjp_kernel(
    dout_ptr, dlse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, dout_a_ptr, dlse_a_ptr, dout_b_ptr, dlse_b_ptr,
    dout_strides, dlse_strides, out_a_strides, lse_a_strides, out_b_strides, lse_b_strides,
    dout_a_strides, dlse_a_strides, dout_b_strides, dlse_b_strides,
    rows, middle, inner, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_D)[None, :]
    held_row = row < rows
    held = held_row[:, None] & (cols < DIM)
    lse_a = tl.load(lse_a_ptr + _row_offsets(row, inner, middle, lse_a_strides), mask=held_row, other=0.0)
    lse_b = tl.load(lse_b_ptr + _row_offsets(row, inner, middle, lse_b_strides), mask=held_row, other=0.0)
    _, share_a, share_b = _merge_shares(lse_a, lse_b)
    pull = tl.zeros((BLOCK_R,), tl.float32)
    dout = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if dout_ptr is not None:
        dout_ptr += _row_offsets(row, inner, middle, dout_strides)[:, None] + cols
        dout = tl.load(dout_ptr, mask=held, other=0.0).to(tl.float32)
        a_ptr = out_a_ptr + _row_offsets(row, inner, middle, out_a_strides)[:, None] + cols
        b_ptr = out_b_ptr + _row_offsets(row, inner, middle, out_b_strides)[:, None] + cols
        a = tl.load(a_ptr, mask=held & (share_a > 0)[:, None], other=0.0).to(tl.float32)
        b = tl.load(b_ptr, mask=held & (share_b > 0)[:, None], other=0.0).to(tl.float32)
        pull = share_a * share_b * tl.sum(dout * (a - b), 1)
    dlse = tl.zeros((BLOCK_R,), tl.float32)
    if dlse_ptr is not None:
        dlse_ptr += _row_offsets(row, inner, middle, dlse_strides)
        dlse = tl.load(dlse_ptr, mask=held_row, other=0.0).to(tl.float32)
    if dout_a_ptr is not None:
        dout_a_ptr += _row_offsets(row, inner, middle, dout_a_strides)[:, None] + cols
        tl.store(dout_a_ptr, (dout * share_a[:, None]).to(dout_a_ptr.dtype.element_ty), mask=held)
    if dlse_a_ptr is not None:
        dlse_a_ptr += _row_offsets(row, inner, middle, dlse_a_strides)
        tl.store(dlse_a_ptr, share_a * dlse + pull, mask=held_row)
    if dout_b_ptr is not None:
        dout_b_ptr += _row_offsets(row, inner, middle, dout_b_strides)[:, None] + cols
        tl.store(dout_b_ptr, (dout * share_b[:, None]).to(dout_b_ptr.dtype.element_ty), mask=held)
    if dlse_b_ptr is not None:
        dlse_b_ptr += _row_offsets(row, inner, middle, dlse_b_strides)
        tl.store(dlse_b_ptr, share_b * dlse - pull, mask=held_row)


def _rejects(call) -> list[str]:
    reasons = []
    if call.out_a.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"out_a is {call.out_a.dtype}; float32, float16 and bfloat16 are supported")
    if not 2 <= call.out_a.ndim <= 4:
        reasons.append(f"out_a has {call.out_a.ndim} dims; 2 to 4 are supported")
    if call.out_a.cols > 1024:
        reasons.append(f"out_a has head dim {call.out_a.cols}; at most 1024 is supported")
    if not (call.out_a.unit and call.out_b.unit):
        reasons.append("out_a or out_b has a last stride other than 1")
    return reasons


def _leading(x: Tensor | None, dims: int) -> tuple[int, int, int] | None:
    """Strides of the leading dims, as three of them."""
    return None if x is None else (0,) * (3 - dims) + tuple(x.stride()[:dims])


class MergeConfig(NamedTuple):
    """block_rows: rows of a CTA."""

    block_rows: int
    num_warps: int


def _dims(out: Tensor) -> dict[str, int]:
    return {"rows": out.numel() // max(out.shape[-1], 1), "dim": out.shape[-1]}


def _default(dims, arch, dtype) -> MergeConfig:
    return MergeConfig(max(1, 4096 // next_power_of_2(dims["dim"])), 4)


CHOICES = {"block_rows": (4, 8, 16, 32, 64), "num_warps": (2, 4, 8)}
SPACE = Space(default=_default, dims=lambda out_a, *_: _dims(out_a), choices=CHOICES)
VJP_SPACE = Space(default=_default, dims=lambda dout, dlse, out_a, *_: _dims(out_a), choices=CHOICES)


def _launch(
    kernel, config: MergeConfig, dims: int, like: Tensor, tensors: tuple, rows_of: tuple, **more: bool
) -> None:  # fmt: skip
    rows = like.numel() // max(like.shape[-1], 1)
    if rows == 0:
        return
    shape = (1,) * (3 - dims) + tuple(like.shape[:dims])
    launch(
        kernel, (cdiv(rows, config.block_rows),), *tensors, *(_leading(x, dims) for x in rows_of),
        rows, shape[1], shape[2], DIM=like.shape[-1], BLOCK_R=config.block_rows,
        BLOCK_D=next_power_of_2(like.shape[-1]), **more, num_warps=config.num_warps,
    )  # fmt: skip


@register_kernel("merge_attention", backend="triton", rank=20, rejects=_rejects)
@optimize_kernel(space=SPACE)
def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, config: MergeConfig
) -> tuple[Tensor, Tensor]:
    """One pass over rows."""
    out = out_like(out_a, out_a.shape[-1])
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    strided = (out_a, lse_a, out_b, lse_b, out)
    _launch(_merge_attention_kernel, config, lse.ndim, out_a, (*strided, lse), strided, IN_PLACE=False)
    return out, lse


@register_kernel("accumulate_attention", backend="triton", rank=20, rejects=_rejects)
@optimize_kernel(space=SPACE)
def accumulate_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, config: MergeConfig) -> Tensor:
    """The same, whose result lies where out_a did: a thread writes what it has read."""
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    strided = (out_a, lse_a, out_b, lse_b, out_a)
    _launch(_merge_attention_kernel, config, lse.ndim, out_a, (*strided, lse), strided, IN_PLACE=True)
    return lse


@register_kernel("merge_attention_vjp", backend="triton", rank=20, rejects=_rejects)
@optimize_kernel(space=VJP_SPACE)
def merge_attention_vjp(
    dout: Tensor | None,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    output_mask: Sequence[bool],
    *,
    config: MergeConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pass over rows, all wanted gradients at once."""
    if dout is not None and dout.stride(-1) != 1:
        dout = dout.contiguous()
    inputs = (out_a, lse_a, out_b, lse_b)
    gradients = tuple(torch.empty_like(x) if wanted else None for x, wanted in zip(inputs, output_mask))
    tensors = (dout, dlse, *inputs, *gradients)
    _launch(_merge_attention_vjp_kernel, config, lse_a.ndim, out_a, tensors, tensors)
    return tuple(x.new_empty(0) if dx is None else dx for x, dx in zip(inputs, gradients))
