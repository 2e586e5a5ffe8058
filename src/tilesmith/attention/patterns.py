"""Sparse patterns as functions to block lists: what needs no look at queries and keys is in closed form."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.attention.budget import checked_sparsity
from tilesmith.engine.argument_checks import flag, located, number, present, size
from tilesmith.engine.tracing import kept
from tilesmith.ops.attn.mask import Blocks


class SparsePattern(Enum):
    """Which blocks of keys a block of queries keeps, in addition to its own (the one on the diagonal).

    RANDOM: drawn once, separately for each kv head, one from each of as many equal stretches.
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


RANKING = (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED)
CLOSED = (SparsePattern.RANDOM, SparsePattern.BLOCK_SPARSE, SparsePattern.STRIDED, SparsePattern.LOCAL_GLOBAL)


def refuse_softcap(of: str, softcap: float, pattern: SparsePattern) -> None:
    """Raise ValueError for a softcap beside a pattern whose shares know none."""
    if number(of, "softcap", softcap, 0.0) and pattern in RANKING:
        raise ValueError(f"{of}: softcap is not supported with {pattern.name}, whose estimate ignores it")


def checked_seed(of: str, seed: int) -> int:
    """seed, or an error unless it is an int from 0 that int64 holds."""
    if size(of, "seed", seed, 0) >= 1 << 63:
        raise ValueError(f"{of}: seed must be below 2**63, got {seed}")
    return seed


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

    Of the blocks that the queries see, floor((1 - sparsity_ratio) * their number) are kept, but at least one a row. The
    lists are made on `device`, without waiting for it, and kept for the next call. heads: kv heads, for each of which
    RANDOM draws other blocks from `seed`; the others have one list for all. causal: positions are aligned at the last
    token. Which columns a row takes: `ops.block_pattern`.
    Raises ValueError or TypeError for other patterns, sizes below 1 and a sparsity_ratio outside [0, 0.95].
    """
    of = "pattern_blocks"
    if pattern not in CLOSED:
        known = ", ".join(p.name for p in CLOSED)
        raise ValueError(f"{of}: pattern must be one of {known}, got {pattern}; others look at queries and keys")
    for name, value in (("tokens", tokens), ("keys", keys), ("heads", heads), ("block_size", block_size)):
        size(of, name, value)
    checked_seed(of, seed)
    flag(of, "causal", causal)
    sparsity = checked_sparsity(of, sparsity_ratio)
    where = located(of, "device", device)
    if where.type == "cuda" and not torch.cuda.is_initialized():
        present(of, "device", where)
    with torch.inference_mode(False):  # they are kept, and a later call may save them for its backward
        return _blocks(pattern, tokens, keys, sparsity, heads, block_size, causal, seed, where)


@kept(32)
def _blocks(
    pattern: SparsePattern, tokens: int, keys: int, sparsity: float, heads: int, block: int, causal: bool, seed: int,
    device: torch.device,
) -> Blocks:  # fmt: skip
    lists = heads if pattern is SparsePattern.RANDOM else 1
    offsets, indices, offsets_t, indices_t = ops.block_pattern(
        _seed(seed, device), pattern.value, tokens, keys, sparsity, lists, block, causal
    )
    return Blocks(offsets, indices, block, block, offsets_t, indices_t)


@kept(32)
def _seed(seed: int, device: torch.device) -> Tensor:
    """The seed where kernels read it: writing it would be a launch of its own."""
    return torch.full((1,), seed, dtype=torch.int64, device=device)
