"""Peers of kv_cache_append: what serving code in plain PyTorch does, an indexed write and a rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.bench.missing import Missing, absent, only

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
    position = _positions(k, lengths)
    page, slot = _places(k_cache, position, page_table)
    if cos is not None:
        angles = [(x[position] if x.ndim == 2 else x).to(k.dtype)[:, None] for x in (cos, sin)]
        k, q = (None if x is None else _turn(x, *angles) for x in (k, q))
    k_cache[page, :, slot] = k.transpose(1, 2)
    v_cache[page, :, slot] = v.transpose(1, 2)
    return q


def _positions(k: Tensor, lengths: Tensor) -> Tensor:
    return lengths[:, None].long() + torch.arange(k.shape[2], device=k.device)


def _places(k_cache: Tensor, position: Tensor, page_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The row or page of the cache, and the slot in it, of each token."""
    if page_table is None:
        return torch.arange(len(position), device=position.device)[:, None], position
    size = k_cache.shape[2]
    return page_table.gather(1, position // size).long(), position % size


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right, rest = x.split((cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


def _served(args: Mapping[str, Any], peer: str) -> dict[str, Any]:
    absent(args, peer, "k_scale", "v_scale")
    only(args, peer, interleaved=False)
    k_cache, k, cos, table = args["k_cache"], args["k"], args.get("cos"), args.get("page_table")
    position, slots = _positions(k, args["lengths"]), k_cache.shape[2] * (1 if table is None else table.shape[1])
    slots = min(slots, cos.shape[0]) if cos is not None and cos.ndim == 2 else slots
    if ((position < 0) | (position >= slots)).any():  # on a GPU such an index ends the process
        raise Missing(f"{peer} has no tokens beyond the cache or the angles")
    pages = _places(k_cache, position, table)[0]
    if ((pages < 0) | (pages >= len(k_cache))).any():
        raise Missing(f"{peer} has no pages that are not there")
    if args.get("q") is not None and args["q"].shape[2] != k.shape[2]:
        raise Missing(f"{peer} rotates as many queries as keys")
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
