"""Peers of experts: sort, gather, grouped products, scatter and sum, as transformers computes them, and Liger's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.bench.missing import Missing, absent, only
from tilesmith.ops.moe import reference

Call = Callable[[], Any]


def _gate(z: Tensor, activation: str, interleaved: bool, limit: float, alpha: float, up_offset: float) -> Tensor:
    """The activation as models write it, in z's dtype."""
    if activation in reference.UNGATED:
        return reference.activate(z, activation, False, 0.0, 1.0, 0.0)
    gate, up = reference.gate_and_up(z, interleaved)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation != "swiglu":
        return F.gelu(gate, approximate="tanh" if activation == "geglu" else "none") * (up + up_offset)
    value = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return value * (up + up_offset if up_offset else up)


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows · weight[e]ᵀ of each expert's rows; float64, which grouped_mm has not, one by one."""
    if rows.dtype != torch.float64:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    parts = rows.tensor_split(ends.tolist()[:-1])
    return torch.cat([part @ w.t() for part, w in zip(parts, weight)])


def _adapted(weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    """The weight with its adapter, as PEFT adds it at each call."""
    if a is None or b is None:
        return weight
    return torch.baddbmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def _grouped(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_up_lora_a: Tensor | None = None,
    gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    gate_up_lora_scale: float = 1.0,
    down_lora_scale: float = 1.0,
) -> Tensor:
    """Without synchronisation; every index must be one of an expert. Raises Missing on a CPU where one is not."""
    gate_up = _adapted(gate_up, gate_up_lora_a, gate_up_lora_b, gate_up_lora_scale)
    down = _adapted(down, down_lora_a, down_lora_b, down_lora_scale)
    if indices.device.type == "cpu" and ((indices < 0) | (indices >= gate_up.shape[0])).any():
        raise Missing("grouped products take no pair without an expert")
    chosen, order = indices.reshape(-1).sort()
    tokens = order // indices.shape[-1]
    every = torch.arange(gate_up.shape[0], device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, every, right=True).int()
    z = _product(reference.flat(x)[tokens], gate_up, ends)
    z = z if gate_up_bias is None else z + gate_up_bias[chosen]
    hidden = _gate(z, activation, interleaved, limit, alpha, up_offset)
    rows = _product(hidden, down, ends)
    rows = rows if down_bias is None else rows + down_bias[chosen]
    rows = rows * weights.reshape(-1)[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return rows[back].view(x.shape[:-1].numel(), indices.shape[-1], x.shape[-1]).sum(1).to(x.dtype).view(x.shape)


def _liger(args: Mapping[str, Any]) -> Call:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    only(args, "liger", activation="swiglu")
    absent(
        args, "liger", "gate_up_bias", "down_bias", "interleaved", "limit", "up_offset", "gate_up_lora_a", "down_lora_a"
    )
    if not (args["gate_up"].is_contiguous() and args["down"].is_contiguous()):
        raise Missing("liger has no transposed weights")
    operands = (args["x"], args["gate_up"], args["down"], args["indices"].int(), args["weights"])
    return lambda: LigerFusedMoEFunction.apply(*operands)


EAGER: dict[str, Callable[..., Any]] = {"experts": _grouped}

PEERS: dict[str, dict[str, Callable[[Mapping[str, Any]], Call]]] = {"experts": {"liger": _liger}}
