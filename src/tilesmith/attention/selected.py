"""Attention to blocks of keys that were chosen for each query by itself, as models with a trained selection do it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine import cdiv
from tilesmith.engine.argument_checks import attributed_to, one_device, readable, size, tensor
from tilesmith.ops.attn.checks import check_shapes
from tilesmith.ops.attn.mask import Blocks, Mask, Score


@attributed_to("attention", "Score")
def selected_block_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int = 128, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention of each query to its own blocks of keys: (out [B, H, T, Dv], lse [B, H, T]).

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv], aligned at the last token; S - T must be a multiple of block_size,
    or T be 1. block_indices int [B, G, T, n]: the blocks that the query heads of a kv head see at each token, in any
    order, none twice; -1 stands for none. A block after the query is not seen, and of its own block only the keys up to
    itself. Differentiable in q, k and v; nothing of T x S is made.

    The whole blocks before a query's own need no causality: the H / G queries of a token that share them lie one after
    another as one block of queries, whose list they are. The own blocks are a second call with causality, and the two
    results are merged by their lse.
    Raises ValueError or TypeError, naming the argument, for what does not fit; on a CPU also for blocks that do not
    exist or are named twice.
    """
    tokens, keys, shift = _check(q, k, v, block_indices, block_size)
    group = q.shape[1] // k.shape[1]
    score = Score(scale=scale)

    columns = cdiv(keys, block_size)
    own = (torch.arange(tokens, device=q.device) + shift) // block_size
    chosen = block_indices.long()
    if tokens == 1:
        before = (chosen >= 0) & (chosen <= own)
        return _packed(q, k, v, chosen, before, columns, block_size, score, group)
    before = (chosen >= 0) & (chosen < own[:, None])
    out, lse = _packed(q, k, v, chosen, before, columns, block_size, score, group)
    has_own = (chosen == own[:, None]).any(-1)
    diagonal, its_lse = _diagonal(q, k, v, has_own, shift, block_size, score)
    return ops.merge_attention(out, lse, diagonal, its_lse)


def _check(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int) -> tuple[int, int, int]:
    """Tokens, keys, and how many keys come before the first query."""
    of = "selected_block_attention"
    for name, x in (("q", q), ("k", k), ("v", v), ("block_indices", block_indices)):
        tensor(of, name, x, ("batch", "heads", "tokens", "head dim" if name != "block_indices" else "blocks"))
    check_shapes(of, q, k, v)
    one_device(of, "block_indices", block_indices, "q", q)
    size(of, "block_size", block_size)
    if block_indices.is_floating_point() or block_indices.is_complex() or block_indices.dtype == torch.bool:
        raise TypeError(f"{of}: block_indices must be integers, got {block_indices.dtype}")
    wanted = (q.shape[0], k.shape[1], q.shape[2])
    if tuple(block_indices.shape[:3]) != wanted:
        raise ValueError(f"{of}: block_indices must be {list(wanted)} and a dim, got {list(block_indices.shape)}")
    tokens, keys = q.shape[2], k.shape[2]
    shift = keys - tokens
    if shift < 0 or (tokens > 1 and shift % block_size):
        raise ValueError(
            f"{of}: k has {keys} tokens and q {tokens}; the difference must be a multiple of block_size, {block_size}, "
            "or q have one token"
        )
    _check_blocks(of, block_indices.long(), cdiv(keys, block_size))  # -1 or their number may be none of its dtype
    return tokens, keys, shift


def _check_blocks(of: str, block_indices: Tensor, columns: int) -> None:
    """ValueError for blocks that are not there or named twice by a token, where `readable`."""
    if not readable(block_indices):
        return
    wrong = block_indices[(block_indices < -1) | (block_indices >= columns)]
    if wrong.numel():
        raise ValueError(
            f"{of}: block_indices holds {int(wrong[0])}; there are {columns} blocks, so it must be 0 to {columns - 1}, "
            "or -1 for none"
        )
    ordered = block_indices.sort(-1).values
    twice = ordered[..., 1:][(ordered.diff() == 0) & (ordered[..., 1:] >= 0)]
    if twice.numel():
        raise ValueError(f"{of}: block_indices names block {int(twice[0])} twice; give each once, and -1 for the rest")


def _packed(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, seen: Tensor, columns: int, block_size: int, score: Score,
    group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention without causality to the chosen blocks that are `seen`."""
    batch, kv_heads, tokens, most = chosen.shape
    rows = q.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(2, 3)
    # ascending and without gaps, as lists are: what is not seen goes behind everything
    ordered = torch.where(seen, chosen, columns).sort(-1).values
    counts = seen.sum(-1).flatten().cumsum(0)
    ends = torch.nn.functional.pad(counts, (1, 0))
    starts = torch.arange(batch * kv_heads, device=q.device)[:, None] * tokens
    offsets = ends[starts + torch.arange(tokens + 1, device=q.device)].view(batch, kv_heads, tokens + 1).int()
    held = ordered < columns
    place = torch.where(held.flatten(), held.flatten().cumsum(0) - 1, batch * kv_heads * tokens * most)
    indices = torch.zeros(batch * kv_heads * tokens * most + 1, dtype=torch.int32, device=q.device)
    indices = indices.scatter_(0, place, ordered.flatten().int())[:-1]
    out, lse = ops.attention(rows, k, v, Mask(blocks=Blocks(offsets, indices, group, block_size)), score)
    out = out.unflatten(2, (tokens, group)).transpose(2, 3).flatten(1, 2)
    return out, lse.unflatten(2, (tokens, group)).transpose(2, 3).flatten(1, 2).contiguous()


def _diagonal(
    q: Tensor, k: Tensor, v: Tensor, has_own: Tensor, shift: int, block_size: int, score: Score
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query to its own block; nothing where it did not choose that."""
    rows = cdiv(q.shape[2], block_size)
    offsets = torch.arange(rows + 1, device=q.device, dtype=torch.int32)[None, None]
    indices = torch.arange(rows, device=q.device, dtype=torch.int32) + shift // block_size
    mask = Mask(causal=True, blocks=Blocks(offsets, indices, block_size, block_size))
    out, lse = ops.attention(q, k, v, mask, score)
    has_own = has_own.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out, torch.where(has_own, lse, float("-inf"))
