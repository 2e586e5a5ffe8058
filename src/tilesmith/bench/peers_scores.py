"""Plain PyTorch for attention's weights and row statistics. No other library offers them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Scaled scores in q's dtype, -inf where hidden."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if not causal:
        return scores
    tokens, keys = scores.shape[-2:]
    hidden = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu(keys - tokens + 1)
    return scores.masked_fill(hidden, float("-inf"))


def _weights(q: Tensor, k: Tensor, lse: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    return torch.exp(_scores(q, k, scale, causal).float() - lse.unsqueeze(-1)).to(q.dtype)


def _stats(q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, causal).float()
    top = scores.amax(-1)
    return top, torch.exp(scores - top.unsqueeze(-1)).sum(-1)


EAGER: dict[str, Callable[..., Any]] = {"attention_weights": _weights, "attention_stats": _stats}
PEERS: dict[str, dict[str, Callable[..., Any]]] = {}
