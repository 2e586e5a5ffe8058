"""Peers of kv_cache_append: what serving code in plain PyTorch does, an indexed write and a rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.bench.missing import absent, only

Call = Callable[[], Any]


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Tensor | None:
    """Trusts that every token has a slot in the cache, as our op does not."""
    position = lengths[:, None].long() + torch.arange(k.shape[2], device=k.device)
    if page_table is None:
        page, slot = torch.arange(len(k), device=k.device)[:, None], position
    else:
        size = k_cache.shape[2]
        page, slot = page_table.gather(1, position // size).long(), position % size
    if cos is not None:
        angles = [x[position].to(k.dtype)[:, None] for x in (cos, sin)]
        k, q = (None if x is None else _turn(x, *angles) for x in (k, q))
    k_cache[page, :, slot] = k.transpose(1, 2)
    v_cache[page, :, slot] = v.transpose(1, 2)
    return q


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right, rest = x.split((cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


def _served(args: Mapping[str, Any], peer: str) -> dict[str, Any]:
    absent(args, peer, "k_scale", "v_scale")
    only(args, peer, interleaved=False)
    return {name: value for name, value in args.items() if name not in ("k_scale", "v_scale", "interleaved")}


def _eager(args: Mapping[str, Any]) -> Call:
    given = _served(args, "the indexed write")
    return lambda: _append(**given)


def _compiled(args: Mapping[str, Any]) -> Call:
    given = _served(args, "the indexed write")
    torch._dynamo.reset()
    compiled = torch.compile(_append, dynamic=False)
    return lambda: compiled(**given)


PEERS = {"kv_cache_append": {"pytorch": _eager, "compile": _compiled}}
EAGER: dict[str, Callable[..., Any]] = {}
