"""Routing in Triton: scores, choice and weights of tokens in one pass, and their gradient in another."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.engine import cdiv, launch, next_power_of_2, register_kernel, rehearsed

TILE = 2048  # scores of a program
LEAST = tl.constexpr(-(2**63))


@triton.jit
def _scores(logits, SIGMOID: tl.constexpr):
    """The scores of logits [BLOCK_M, EXPERTS], which are -inf beyond the last expert."""
    if SIGMOID:
        return 1 / (1 + tl.exp(-logits))
    else:
        # tl.max passes over a NaN; the sum does not
        powers = tl.exp(logits - tl.max(logits, 1, keep_dims=True))
        return powers / tl.sum(powers, 1, keep_dims=True)


@triton.jit
def _key(x, lane):
    """An int64 that grows with fp32 x, a NaN above all, and, where x is equal, falls with the lane."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    bits = tl.where(x == x, bits, 0x7FC00000)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (0x7FFFFFFF - lane)


@triton.jit
def _lane(key):
    """The lane of a key."""
    return (0x7FFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _of_kept_groups(
    ranked, kept, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP2: tl.constexpr
):  # fmt: skip
    """ranked [BLOCK_M, GROUPS · SIZE], -inf outside of the `kept` best groups."""
    parts = tl.reshape(ranked, (BLOCK_M, GROUPS, SIZE))
    best = tl.max(parts, 2)
    if TOP2 and SIZE > 1:
        lane = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(parts == best[:, :, None], lane, SIZE), 2)
        best += tl.max(tl.where(lane == first[:, :, None], float("-inf"), parts), 2)
    group = tl.arange(0, GROUPS)[None, :]
    key, there = _key(best, group), tl.zeros((BLOCK_M, GROUPS), tl.int32)
    for _ in range(kept):
        chosen = group == _lane(tl.max(key, 1, keep_dims=True))
        there, key = tl.where(chosen, 1, there), tl.where(chosen, LEAST, key)
    return tl.reshape(tl.where(there[:, :, None] != 0, parts, float("-inf")), (BLOCK_M, GROUPS * SIZE))


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, indices_ptr, tokens, experts, top_k, kept, logits_row, scale,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP2: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """weights, indices [tokens, top_k]: the best experts of each token by falling score."""
    token, expert = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    place = token.to(tl.int64)[:, None] * logits_row + expert[None, :]
    logits = tl.load(logits_ptr + place, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _scores(tl.where((token < tokens)[:, None], logits, 0.0), SIGMOID)
    ranked = scores if HAS_BIAS or GROUPS > 1 else logits
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    if GROUPS > 1:
        ranked = tl.where(ranked == ranked, ranked, float("inf"))  # tl.max passes over a NaN
        ranked = _of_kept_groups(ranked, kept, BLOCK_M, GROUPS, EXPERTS // GROUPS, TOP2)
    key = tl.where((expert < experts)[None, :], _key(ranked, expert[None, :]), LEAST)
    lane = tl.arange(0, CHOSEN)[None, :]
    weights, indices = tl.zeros((BLOCK_M, CHOSEN), tl.float32), tl.zeros((BLOCK_M, CHOSEN), tl.int32)
    for k in range(top_k):
        best = _lane(tl.max(key, 1, keep_dims=True))
        chosen = expert[None, :] == best
        score = tl.sum(tl.where(chosen, scores, 0.0), 1, keep_dims=True)
        weights, indices = tl.where(lane == k, score, weights), tl.where(lane == k, best, indices)
        key = tl.where(chosen, LEAST, key)
    if NORMALISE:
        weights /= tl.sum(weights, 1, keep_dims=True) + 1e-20
    out = token.to(tl.int64)[:, None] * top_k + lane
    there = (token < tokens)[:, None] & (lane < top_k)
    tl.store(weights_ptr + out, weights * scale, mask=there)
    tl.store(indices_ptr + out, indices.to(tl.int64), mask=there)


@triton.jit
def route_gradient_kernel(
    dweights_ptr, logits_ptr, indices_ptr, dlogits_ptr, tokens, experts, top_k, logits_row, scale,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """dlogits [tokens, experts] of the weights of the chosen experts."""
    token, expert = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, EXPERTS)
    rows_there = (token < tokens)[:, None]
    inside = rows_there & (expert < experts)[None, :]
    place = token.to(tl.int64)[:, None] * logits_row + expert[None, :]
    logits = tl.load(logits_ptr + place, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _scores(tl.where(rows_there, logits, 0.0), SIGMOID)
    dscores, there = tl.zeros((BLOCK_M, EXPERTS), tl.float32), tl.zeros((BLOCK_M, EXPERTS), tl.int32)
    for k in range(top_k):
        pair = token.to(tl.int64)[:, None] * top_k + k
        chosen = expert[None, :] == tl.load(indices_ptr + pair, mask=rows_there, other=-1)
        dweight = tl.load(dweights_ptr + pair, mask=rows_there, other=0.0).to(tl.float32)
        dscores += tl.where(chosen, dweight * scale, 0.0)
        there = tl.where(chosen, 1, there)
    if NORMALISE:
        total = tl.sum(tl.where(there != 0, scores, 0.0), 1, keep_dims=True) + 1e-20
        inner = tl.sum(tl.where(there != 0, dscores * scores, 0.0), 1, keep_dims=True) / total
        dscores = tl.where(there != 0, (dscores - inner) / total, 0.0)
    if SIGMOID:
        dlogits = dscores * scores * (1 - scores)
    else:
        dlogits = scores * (dscores - tl.sum(tl.where(there != 0, dscores * scores, 0.0), 1, keep_dims=True))
    out = token.to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(dlogits_ptr + out, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


def _power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


def _reasons(call: Any) -> list[str]:
    found = [f"logits is {call.logits.dtype}; this kernel computes in float32"] * (call.logits.dtype == torch.float64)
    experts = call.logits.cols
    if experts > TILE:
        found.append(f"logits has {experts} experts; a program holds {TILE}")
    groups = getattr(call, "groups", 1)
    if groups > 1 and not (_power_of_2(groups) and _power_of_2(experts)):
        found.append(f"{groups} groups of {experts} experts are not powers of 2")
    return found


def _sizes(logits: Tensor) -> dict[str, int]:
    wide = next_power_of_2(logits.shape[1])
    return {"EXPERTS": wide, "BLOCK_M": max(1, min(TILE // wide, next_power_of_2(logits.shape[0])))}


@register_kernel("route", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scores: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = "top2",
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One launch."""
    flat = rows(logits)
    weights = logits.new_empty((*logits.shape[:-1], top_k), dtype=torch.float32)
    indices = torch.empty_like(weights, dtype=torch.int64)
    if flat.shape[0] == 0:
        return weights, indices
    sizes = _sizes(flat)
    launch(
        route_kernel, (cdiv(flat.shape[0], sizes["BLOCK_M"]),),
        flat, bias if bias is None else bias.contiguous(), weights, indices, *flat.shape, top_k, kept_groups,
        flat.stride(0), float(scale), SIGMOID=scores == "sigmoid", HAS_BIAS=bias is not None,
        GROUPS=groups if kept_groups < groups else 1, TOP2=group_score == "top2", NORMALISE=normalise,
        CHOSEN=next_power_of_2(top_k), **sizes, num_warps=4,
    )  # fmt: skip
    return weights, indices


@register_kernel("route_vjp", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
def route_vjp(
    dweights: Tensor, logits: Tensor, indices: Tensor, scores: str, normalise: bool, scale: float
) -> Tensor:  # fmt: skip
    """One launch."""
    flat, dlogits = rows(logits), logits.new_empty(logits.shape)
    if flat.shape[0] == 0:
        return dlogits
    sizes = _sizes(flat)
    launch(
        route_gradient_kernel, (cdiv(flat.shape[0], sizes["BLOCK_M"]),),
        dweights.contiguous(), flat, indices.contiguous(), dlogits, *flat.shape, indices.shape[-1], flat.stride(0),
        float(scale), SIGMOID=scores == "sigmoid", NORMALISE=normalise, **sizes, num_warps=4,
    )  # fmt: skip
    return dlogits
