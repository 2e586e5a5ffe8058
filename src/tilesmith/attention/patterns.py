"""Sparse patterns as functions to block lists: what needs no look at queries and keys is in closed form."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from tilesmith.attention.budget import budget, checked_sparsity
from tilesmith.engine.argument_checks import flag, size
from tilesmith.ops.attn import block_lists
from tilesmith.ops.attn.mask import Blocks

RUN = 4  # neighbouring blocks of BLOCK_SPARSE


class SparsePattern(Enum):
    """Which blocks of keys a block of queries keeps, beside its own (the one on the diagonal).

    RANDOM: drawn once, other ones for each kv head, one from each of as many equal stretches.
    BLOCK_SPARSE: runs of four neighbouring blocks at equal distances; its own run holds the diagonal.
    STRIDED: half of them around the diagonal, the others at equal distances (Child et al., arXiv:1904.10509).
    LOCAL_GLOBAL: the first quarter of them at the beginning of the sequence, the others around the diagonal
        (Beltagy et al., arXiv:2004.05150).
    DYNAMIC_THRESHOLD: those with the largest share of the attention, estimated from means of short stretches of queries
        and keys; `tilesmith.attention.estimated_shares`.
    LEARNED: those with the largest scores of a trained indexer; `tilesmith.attention.BlockIndexer`.
    """

    RANDOM = "random"
    BLOCK_SPARSE = "block_sparse"
    STRIDED = "strided"
    LOCAL_GLOBAL = "local_global"
    DYNAMIC_THRESHOLD = "dynamic_threshold"
    LEARNED = "learned"


CLOSED = (SparsePattern.RANDOM, SparsePattern.BLOCK_SPARSE, SparsePattern.STRIDED, SparsePattern.LOCAL_GLOBAL)


def pattern_blocks(
    pattern: SparsePattern,
    tokens: int,
    keys: int,
    sparsity_ratio: float = 0.9,
    *,
    heads: int = 1,
    block_size: int = 128,
    causal: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Blocks:
    """Block lists of one of the patterns in closed form, and their transpose, for blocks of `block_size` tokens.

    Of the blocks that the queries see, floor((1 - sparsity_ratio) * their number) are kept, but one a row at least. The
    lists are made on `device`, without waiting for it, and kept for the next call. heads: kv heads, for each of which
    RANDOM draws other blocks from `seed`; the others have one list for all. causal: positions are aligned at the last
    token.
    Raises ValueError or TypeError for other patterns, sizes below 1 and a sparsity_ratio outside [0, 0.95].
    """
    of = "pattern_blocks"
    if pattern not in CLOSED:
        known = ", ".join(p.name for p in CLOSED)
        raise ValueError(f"{of}: pattern must be one of {known}, got {pattern}; others look at queries and keys")
    for name, value in (("tokens", tokens), ("keys", keys), ("heads", heads), ("block_size", block_size)):
        size(of, name, value)
    size(of, "seed", seed, 0)
    flag(of, "causal", causal)
    sparsity = checked_sparsity(of, sparsity_ratio)
    with torch.inference_mode(False):  # they are kept, and a later call may save them for its backward
        return _blocks(pattern, tokens, keys, sparsity, heads, block_size, causal, seed, torch.device(device))


@lru_cache(maxsize=32)
def _blocks(
    pattern: SparsePattern, tokens: int, keys: int, sparsity: float, heads: int, block: int, causal: bool, seed: int,
    device: torch.device,
) -> Blocks:  # fmt: skip
    plan = budget(tokens, keys, block, block, causal, sparsity, device)
    lists = heads if pattern is SparsePattern.RANDOM else 1
    rows, columns = len(plan.counts), -(-keys // block)
    number = torch.arange(rows, device=device)
    row = torch.repeat_interleave(number, plan.counts, output_size=plan.total)
    place = torch.arange(plan.total, device=device) - plan.offsets[row]
    count, seen = plan.counts[row].long(), plan.visible[row].long()
    own = _diagonal(number, tokens, keys, block, causal)[row].clamp(max=seen - 1)

    near = _near(pattern, count)
    others = count - near
    start = torch.minimum((own - near // 2).clamp(min=0), seen - near)
    if pattern is SparsePattern.LOCAL_GLOBAL:
        start = torch.maximum(start, others)
    # the columns outside [start, start + near) are numbered through; an entry takes one of these numbers
    outside = _outside(pattern, place, others, seen - near, lists, seed)
    column = torch.where(outside < start, outside, outside + near)
    column = torch.where(place < others, column, start + place - others)
    key = (row * columns + column).sort(-1).values.flatten()
    first = plan.total * torch.arange(lists, device=device)[:, None]
    offsets = (first + plan.offsets)[None].int()
    indices = (key % columns).int()
    return Blocks(offsets, indices, block, block, *block_lists.transposed(offsets, indices, columns))


def _diagonal(row: Tensor, tokens: int, keys: int, block: int, causal: bool) -> Tensor:
    """The block of keys that lies where a block of queries ends, or, without causality, where it begins."""
    at = ((row + 1) * block).clamp(max=tokens) - 1 if causal else row * block
    return ((at + keys - tokens).clamp(min=0)) // block


def _near(pattern: SparsePattern, count: Tensor) -> Tensor:
    """How many of a row's blocks lie around the diagonal."""
    if pattern is SparsePattern.RANDOM:
        return count.clamp(max=1)
    if pattern is SparsePattern.BLOCK_SPARSE:
        return count.clamp(max=RUN)
    if pattern is SparsePattern.STRIDED:
        return (count + 1) // 2
    return count - torch.where(count > 1, (count // 4).clamp(min=1), 0)


def _outside(pattern: SparsePattern, place: Tensor, others: Tensor, width: Tensor, lists: int, seed: int) -> Tensor:
    """Which of `width` columns the entry `place` of `others` takes: distinct ones, [1 | lists, entries]."""
    many = others.clamp(min=1)
    if pattern is SparsePattern.LOCAL_GLOBAL:
        return place[None]
    if pattern is SparsePattern.STRIDED:
        return (place * width // many)[None]
    if pattern is SparsePattern.BLOCK_SPARSE:
        runs = ((others + RUN - 1) // RUN).clamp(min=1)
        return (place + place // RUN * (width - others) // runs)[None]
    generator = torch.Generator(place.device).manual_seed(seed)
    drawn = torch.rand(lists, len(place), generator=generator, device=place.device)
    low, high = place * width // many, (place + 1) * width // many
    return torch.minimum(low + (drawn * (high - low)).long(), high - 1)
