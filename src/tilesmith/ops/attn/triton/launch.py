"""What the launchers of attention's Triton kernels share: refusals, what kernels are given of a call, descriptors."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilesmith.device.alignment import tma_strides
from tilesmith.device.dropout import kernel_numbers, kernel_seed
from tilesmith.device.rows import dense
from tilesmith.engine.launcher import cdiv
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.plan.model import Step, Tile
from tilesmith.ops.attn.plan.triton import padded
from tilesmith.ops.attn.triton.tiles import FAR, LOG2E

ASKED = "q", "k", "v", "bias"


def call_tensors(call) -> dict[str, Any]:
    """What forward and gradients of a call are given of it, by the kernels' parameter names."""
    q, k, mask = call.q, call.k, call.mask
    batch, heads = q.shape[:2]
    whole = (*q.shape[:3], k.shape[2])
    scale = reference.scale_of(q, call.scale)
    capped = call.softcap > 0.0
    mask = None if mask is None else mask.view(torch.uint8).expand(whole)
    below, keep = kernel_numbers(call.dropout_p) if call.dropout_p > 0.0 else (0, 1.0)
    bias_strides = None if call.bias is None else call.bias.expand(whole).stride()
    alibi, alibi_strides = call.alibi, None
    if alibi is not None and reference.slopes_of_documents(alibi, call.cu_seqlens_q):
        alibi = reference.slopes_of_tokens(alibi, call.cu_seqlens_q, q.shape[2])
        alibi_strides = (0, alibi.stride(1), alibi.stride(0))
    elif alibi is not None:
        alibi_strides = alibi.expand(batch, heads).stride()
    return {
        **{f"{name}_ptr": getattr(call, name) for name in ASKED}, "alibi_ptr": alibi, "mask_ptr": mask,
        "seed_ptr": kernel_seed(call.seed, call.dropout_p), "cu_q_ptr": dense(call.cu_seqlens_q),
        "cu_k_ptr": dense(call.cu_seqlens_k), "lengths_ptr": dense(call.kv_lengths),
        "prefix_ptr": dense(call.prefix_lengths), "q_documents_ptr": dense(call.q_documents),
        "k_documents_ptr": dense(call.k_documents), "q_strides": q.stride(), "k_strides": k.stride(),
        "v_strides": call.v.stride(), "bias_strides": bias_strides,
        "mask_strides": None if mask is None else mask.stride(), "alibi_strides": alibi_strides,
        "inner": scale / call.softcap if capped else 0.0,
        "outer": (call.softcap if capped else scale) * (1.0 if q.dtype == torch.float32 else LOG2E.value),
        "drop_below": below, "keep_scale": keep, "q": q, "k": k, "v": call.v, "sinks": dense(call.sinks),
        **block_lists(call.block_offsets, call.block_indices, batch),
    }  # fmt: skip


def block_lists(offsets: Tensor | None, indices: Tensor | None, batch: int, end: str = "") -> dict[str, Any]:
    """Block lists by the kernels' parameter names, with `end` behind each."""
    if offsets is None:
        return {f"offsets_ptr{end}": None, f"indices_ptr{end}": None, f"list_strides{end}": None}
    return {
        f"offsets_ptr{end}": offsets, f"indices_ptr{end}": indices.contiguous(),
        f"list_strides{end}": offsets.expand(batch, -1, -1).stride(),
    }  # fmt: skip


def tma_of(*tensors: Tensor) -> tuple[bool, ...]:
    """Which of the tensors [B, H, T, D] TMA reads as they lie."""
    return tuple(tma_strides(x) is not None and x.numel() > 0 for x in tensors)


def describe(x: Tensor, tile: Tile) -> TensorDescriptor:
    """A TMA descriptor of x [B, H, T, D] in the plan's tiles."""
    return TensorDescriptor(x, list(x.shape), tma_strides(x), [1, 1, tile.rows, padded(x.shape[3])])


def bounds_of(step: Step | None, own: Tensor | None, other: Tensor | None, by_keys: bool = False) -> Tensor | None:
    """`document_bounds` for the tiles of a step, which walks `other` for each tile of `own`; by_keys: of keys."""
    if step is None or own is None or own.numel() == 0 or other.numel() == 0:
        return None
    blocks = step.constants["BLOCK_M"], step.constants["BLOCK_N"]
    return document_bounds(own, other, *(reversed(blocks) if by_keys else blocks))


def document_bounds(own: Tensor, other: Tensor, block: int, other_block: int) -> Tensor:
    """For each block of `own` [B, X], the first and last (exclusive) token of `other` [B, Y] whose id can be in it.

    int32 [B, blocks, 2]; exact to the block where ids ascend, else only a bound.
    """
    while other.shape[1] > 4096 * other_block:  # the table below has blocks x other blocks entries
        other_block *= 2
    low, high = _extremes(own, block)
    other_low, other_high = _extremes(other, other_block)
    meets = (low[:, :, None] <= other_high[:, None, :]) & (high[:, :, None] >= other_low[:, None, :])
    begin = torch.arange(0, other.shape[1], other_block, dtype=torch.int32, device=own.device)
    first = torch.where(meets, begin, FAR.value).amin(-1)
    last = torch.where(meets, begin + other_block, 0).amax(-1)
    return torch.stack((first, last.clamp(max=other.shape[1])), -1)


def _extremes(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(cdiv(ids.shape[1], block) * block, device=ids.device).clamp(max=ids.shape[1] - 1)
    blocks = ids[:, places].unflatten(1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def sizes(call) -> dict[str, int]:
    """Sizes on which the best tiles depend. causal and drawn are 8 or 1: far apart, since tuning rows are looked up by
    ratio."""
    q, k, v = call.q, call.k, call.v
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3],
        "value_dim": v.shape[3], "causal": 8 if call.causal else 1, "drawn": 8 if call.dropout_p > 0.0 else 1,
    }  # fmt: skip


def rejects(call) -> list[str]:
    """Why these kernels cannot serve a call of attention."""
    reasons = []
    if call.page_table is not None:
        reasons.append("page_table: paged keys and values are not read")
    if call.q_scale is not None or call.k_scale is not None or call.v_scale is not None:
        reasons.append("q_scale, k_scale, v_scale: quantised values are not read")
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float32, float16 and bfloat16 are supported")
    for name, x in (("q", call.q), ("v", call.v)):
        if x.cols % 8 or not 16 <= x.cols <= 512:
            reasons.append(f"{name} has head dim {x.cols}; multiples of 8 from 16 to 512 are supported")
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not x.unit:
            reasons.append(f"{name} has a last stride other than 1")
    if max(call.q.cols, call.v.cols) > 256 and call.arch.kind != "cpu":
        reasons += _wide_reasons(call)
    return reasons


_LEAST_OF_WIDE = {"cuda": 98 * 1024, "hip": 64 * 1024}
"""Shared memory for rows of 512 columns of 16 bits by kind of device, as compiled for sm89 and gfx942: dq keeps 32
queries beside 16 keys, twice; on AMD's they wait in registers."""
_LEAST_OF_MORE, _LEAST_OF_FP32 = 160 * 1024, 200 * 1024
"""The same for 32 queries in each step of dk and dv, and for rows of 32 bits."""


def _wide_reasons(call) -> list[str]:
    """Why a GPU cannot serve head dims above 256."""
    arch, reasons = call.arch, []
    least = _LEAST_OF_WIDE.get(arch.kind, _LEAST_OF_MORE)
    if call.q.dtype == torch.float32:
        least = _LEAST_OF_FP32
    if arch.shared_memory < least:
        has = f"{arch.name} has {arch.shared_memory // 1024}"
        reasons.append(f"head dims above 256 need {least // 1024} KB of shared memory, {has}")
    return reasons + few_registers(arch)


def few_registers(arch: Any) -> list[str]:
    """Why a GPU's threads cannot hold rows of head dims above 256: as compiled for gfx1100, 147 registers and more
    spill."""
    if arch.kind == "hip" and arch.warp == 32:
        return [f"head dims above 256 need 512 registers a thread, {arch.name} has 256"]
    return []


def rejects_vjp(call) -> list[str]:
    """Why these kernels cannot serve a call of attention_vjp."""
    reasons, arch = rejects(call), call.arch
    wide, dropped = max(call.q.cols, call.v.cols) > 256, call.mask is not None and call.seed is not None
    # `plan.triton.summed`: their tiles have at least 32 queries
    if wide and dropped and arch.kind == "cuda" and arch.shared_memory < _LEAST_OF_MORE:
        least, has = _LEAST_OF_MORE // 1024, f"{arch.name} has {arch.shared_memory // 1024}"
        reasons.append(f"mask and seed: with head dims above 256 they need {least} KB of shared memory, {has}")
    return reasons
