"""Choices of blocks that look at queries and keys: an estimate of each block's share, and the best of them as lists."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.attention.budget import Budget
from tilesmith.engine.argument_checks import attributed_to, flag, size, tensor
from tilesmith.ops.attn.mask import Blocks

SUB_BLOCKS = 8  # stretches of a block of keys, each with one mean
QUERY_SUB_BLOCKS, QUERIES = 2, 16  # stretches of a block of queries, and of how many of its queries they are the means


@attributed_to("block_shares")
def estimated_shares(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int = 128,
    causal: bool = True,
    scale: float | None = None,
    key_samples: int | None = None,
) -> Tensor:
    """Estimated share of each block of keys in the attention of each block of queries: fp32 [B, G, R, C].

    Keys are averaged over stretches of block_size / 8 tokens, queries over stretches of block_size / 2, of which 16 a
    block are read, evenly spaced, or all where there are no more. The softmax of the means is summed over the 2 x 8
    pairs of a pair of blocks, and averaged over the query heads of a kv head. A row's shares add up to 1. Nothing of
    T x S is made: 1 / 1,024 of the products of attention at block_size 128. No gradient.

    q [B, H, T, D], k [B, G, S, D]; causal: needs T == S. scale: 1 / sqrt(D) if None. block_size: a multiple of 8.
    key_samples: keys of a block that are read, evenly spaced: a multiple of 8 that divides block_size; all if None or
    not fewer than those, since one that is not read cannot be found.
    Raises ValueError or TypeError, naming the argument, for what does not fit.
    Source: the block score of SpargeAttn (arXiv:2502.18137) with a log-sum-exp over sub-blocks in place of one mean.
    """
    of = "estimated_shares"
    for name, x in (("q", q), ("k", k)):
        tensor(of, name, x, ("batch", "heads", "tokens", "head dim"))
    flag(of, "causal", causal)
    if size(of, "block_size", block_size) % SUB_BLOCKS:
        raise ValueError(f"{of}: block_size must be a multiple of {SUB_BLOCKS}, got {block_size}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{of}: causal needs as many keys as queries, got {k.shape[2]} and {q.shape[2]}")
    keys = block_size if key_samples is None else min(size(of, "key_samples", key_samples), block_size)
    if keys % SUB_BLOCKS or block_size % keys:
        raise ValueError(
            f"{of}: key_samples must be a multiple of {SUB_BLOCKS} that divides block_size, {block_size}, or None for "
            f"all keys, got {key_samples}"
        )
    strides = (
        math.gcd(block_size // stretches, max(1, block_size // samples))
        for stretches, samples in ((QUERY_SUB_BLOCKS, QUERIES), (SUB_BLOCKS, keys))
    )
    with torch.no_grad():
        return ops.block_shares(q, k, scale, causal, block_size, SUB_BLOCKS, QUERY_SUB_BLOCKS, *strides)


def chosen_blocks(
    scores: Tensor, plan: Budget, block_size: int, *, mass: float = 1.0, first: int = 0, last: int = 1
) -> tuple[Tensor, Blocks]:
    """The best blocks of each row as a table bool [B, G, R, C] and as lists, within the budget.

    mass, first, last: see `ops.block_select`. The host waits for nothing.
    """
    first, last = (min(n, scores.shape[3]) for n in (first, last))  # none but those that there are
    keep = ops.block_select(scores, plan.counts, plan.visible, mass, first, last, plan.ends)
    room = scores.shape[0] * scores.shape[1] * plan.total
    counts = plan.counts if mass == 1.0 else None  # a row may stop before
    offsets, indices, offsets_t, indices_t = ops.block_lists(keep, room, counts)
    return keep, Blocks(offsets, indices, block_size, block_size, offsets_t, indices_t)
