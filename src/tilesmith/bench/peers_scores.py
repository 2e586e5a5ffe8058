"""What plain PyTorch computes for attention's weights, its row statistics, and the merge of two attentions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.bench.missing import Missing


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if k.shape[1] != q.shape[1] else k
    scores = q @ keys.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        tokens, seen = scores.shape[-2:]
        hidden = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).triu(seen - tokens + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _attention_weights(q: Tensor, k: Tensor, lse: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    lse = lse[..., None]
    weights = torch.exp(_scores(q, k, scale, causal) - lse).to(q.dtype)
    return weights.masked_fill(lse == float("-inf"), 0.0)


def _attention_stats(q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    if not k.shape[2]:
        raise Missing("PyTorch has no largest of nothing")
    scores = _scores(q, k, scale, causal).float() if q.dtype.itemsize < 4 else _scores(q, k, scale, causal)
    top = scores.amax(-1)
    base = top.masked_fill(top == float("-inf"), 0.0)[..., None]
    return top, torch.exp(scores - base).sum(-1)


def _merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    shares = (torch.exp(side - lse).nan_to_num(0.0)[..., None] for side in (lse_a, lse_b))
    a, b = (torch.where(share > 0, out * share, 0.0) for out, share in zip((out_a, out_b), shares))
    return (a + b).to(out_a.dtype), lse


EAGER: dict[str, Callable[..., Any]] = {
    "attention_weights": _attention_weights,
    "attention_stats": _attention_stats,
    "merge_attention": _merge_attention,
}
PEERS: dict[str, dict[str, Callable[[Mapping[str, Any]], Callable[[], Any]]]] = {}
