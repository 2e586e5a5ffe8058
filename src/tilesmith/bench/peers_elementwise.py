"""Peers of activations of a sum or with a bias, and of dropout with a bias. What is dropped differs among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Call = Callable[[], Any]


def _sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6) -> Tensor:
    n = beta + F.softplus(alpha_n)
    return torch.where(
        x > 0, F.softplus(alpha_p) * x * x + beta * x, (torch.expm1(x.clamp(max=eps)) - x) * n + beta * x
    )


def _add_relu(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def _bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(x if bias is None else x + bias.to(x.dtype), approximate=approximate)


def _bias_dropout(x: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0) -> Tensor:
    return F.dropout(x if bias is None else x + bias.to(x.dtype), p)


def _bias_dropout_residual(
    x: Tensor, residual: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0
) -> Tensor:
    return residual + _bias_dropout(x, bias, seed, p)


def _liger_relu_squared(args: Mapping[str, Any]) -> Call:
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

    return lambda: LigerReLUSquaredFunction.apply(args["x"])


EAGER: dict[str, Callable[..., Any]] = {
    "sigmoid": _sigmoid,
    "relu_squared": _relu_squared,
    "xielu": _xielu,
    "add_relu": _add_relu,
    "bias_gelu": _bias_gelu,
    "bias_dropout": _bias_dropout,
    "bias_dropout_residual": _bias_dropout_residual,
}

PEERS: dict[str, dict[str, Callable[[Mapping[str, Any]], Call]]] = {"relu_squared": {"liger": _liger_relu_squared}}
