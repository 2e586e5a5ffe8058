"""Peers of softmax, softmax_dropout and dropout_add_norm. What a dropout drops differs from peer to peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.bench.missing import only

Call = Callable[[], Any]


def _softmax(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    z = x * scale if scale != 1.0 else x
    if causal:
        tokens, keys = x.shape[-2:]
        hidden = torch.ones(tokens, keys, dtype=torch.bool, device=x.device).triu(keys - tokens + 1)
        z = z.masked_fill(hidden, float("-inf"))
    return F.softmax(z, -1)


def _softmax_dropout(
    x: Tensor, seed: Tensor | None = None, p: float = 0.0, scale: float = 1.0, causal: bool = False
) -> Tensor:
    return F.dropout(_softmax(x, scale, causal), p)


def _dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    kind: str = "layer",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    s = F.dropout(x, p) + residual
    if kind == "rms":
        return F.rms_norm(s, s.shape[-1:], weight, eps).to(x.dtype), s
    return F.layer_norm(s, s.shape[-1:], weight, bias, eps).to(x.dtype), s


def _liger_softmax(args: Mapping[str, Any]) -> Call:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    only(args, "Liger", scale=1.0, causal=False)
    return lambda: LigerSoftmaxFunction.apply(args["x"])


def _quack_softmax(args: Mapping[str, Any]) -> Call:
    from quack import softmax

    only(args, "Quack", scale=1.0, causal=False)
    x = args["x"]
    return lambda: softmax(x.reshape(-1, x.shape[-1])).view(x.shape)


EAGER: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "softmax_dropout": _softmax_dropout,
    "dropout_add_norm": _dropout_add_norm,
}
PEERS: dict[str, dict[str, Callable[[Mapping[str, Any]], Call]]] = {
    "softmax": {"liger": _liger_softmax, "quack": _quack_softmax},
}
