"""Peers of rms_norm_rope: nobody fuses the two, so each one's norm followed by its rope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.bench.missing import Missing, only

Call = Callable[[], Any]


def _rms_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    norm_dim: str = "head",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "fp32",
) -> tuple[Tensor, Tensor | None]:
    if any(x is not None for x in (positions, offsets, cu_seqlens)) or offset or interleaved or weight_offset:
        raise Missing("the composition has no positions, interleaved pairs or weight offsets")
    half = cos.shape[-1]
    cos, sin = (torch.cat((a, a), -1)[..., : q.shape[-2], :].to(q.dtype) for a in (cos, sin))
    cos, sin = (a[:, None] if a.ndim == 3 else a for a in (cos, sin))

    def turn(x: Tensor, weight: Tensor | None) -> Tensor:
        x = _norm(x, weight, norm_dim, eps)
        head, rest = x[..., : 2 * half], x[..., 2 * half :]
        turned = head * cos + torch.cat((-head[..., half:], head[..., :half]), -1) * sin
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    return turn(q, q_weight), None if k is None else turn(k, k_weight)


def _norm(x: Tensor, weight: Tensor | None, norm_dim: str, eps: float) -> Tensor:
    """rms_norm of heads, or of a token's row of heads: where the model has them, [B, T, H, D]."""
    rows = x.transpose(1, 2)
    if norm_dim == "head":
        return F.rms_norm(rows, rows.shape[-1:], weight, eps).transpose(1, 2)
    flat = rows.flatten(2)
    return F.rms_norm(flat, flat.shape[-1:], weight, eps).view(rows.shape).transpose(1, 2)


def _liger_rms_norm_rope(args: Mapping[str, Any]) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    only(args, "Liger", interleaved=False, offset=0, norm_dim="head")
    if any(args.get(name) is not None for name in ("positions", "offsets", "cu_seqlens")) or args["k"] is None:
        raise Missing("Liger's RoPE has no positions, offsets or packed rows, and takes q and k")
    casting = {"llama": "llama", "fp32": "gemma"}[args.get("casting", "fp32")]
    eps, weight_offset = args.get("eps", 1e-6), args.get("weight_offset", 0.0)
    cos, sin = (torch.cat((args[n], args[n]), -1)[..., : args["q"].shape[2], :] for n in ("cos", "sin"))
    cos, sin = (a if a.ndim == 3 else a[None] for a in (cos, sin))

    def norm(name: str) -> Tensor:
        x, weight = args[name].transpose(1, 2), args[f"{name}_weight"]
        return LigerRMSNormFunction.apply(x, weight, eps, weight_offset, casting, False).transpose(1, 2)

    return lambda: LigerRopeFunction.apply(norm("q"), norm("k"), cos, sin)


def _quack_rms_norm_rope(args: Mapping[str, Any]) -> Call:
    from quack import rmsnorm
    from quack.rotary import apply_rotary_emb

    only(args, "Quack", offset=0, norm_dim="head")
    if any(args.get(name) is not None for name in ("positions", "cu_seqlens")) or args["cos"].ndim != 2:
        raise Missing("Quack's rotary takes no positions or packed rows, and one table for all rows")
    eps, weight_offset = args.get("eps", 1e-6), args.get("weight_offset", 0.0)
    named = {"interleaved": args.get("interleaved", False), "seqlen_offsets": args.get("offsets")}

    def turned(name: str) -> Tensor | None:
        if args[name] is None:
            return None
        x, weight = args[name].transpose(1, 2), args[f"{name}_weight"]
        y = rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps=eps, weight_offset=weight_offset).view(x.shape)
        return apply_rotary_emb(y, args["cos"], args["sin"], **named).transpose(1, 2)

    return lambda: (turned("q"), turned("k"))


EAGER: dict[str, Callable[..., Any]] = {"rms_norm_rope": _rms_norm_rope}

PEERS: dict[str, dict[str, Callable[[Mapping[str, Any]], Call]]] = {
    "rms_norm_rope": {"liger": _liger_rms_norm_rope, "quack": _quack_rms_norm_rope}
}
