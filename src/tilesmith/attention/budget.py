"""How many blocks of keys each block of queries may keep, so that the total is exactly what a sparsity asks for."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import cdiv
from tilesmith.engine.argument_checks import number
from tilesmith.ops.attn.block_pattern_reference import LARGEST_SPARSITY

BLOCK_SIZES = (128, 64, 32, 16)


class Budget(NamedTuple):
    """counts, visible int32 [R]: blocks that a row keeps and sees. total, seen: their sums."""

    counts: Tensor
    visible: Tensor
    total: int
    seen: int


def checked_sparsity(of: str, sparsity: float) -> float:
    """sparsity, or an error unless it is a number from 0 to 0.95."""
    if not 0.0 <= number(of, "sparsity_ratio", sparsity) <= LARGEST_SPARSITY:
        raise ValueError(f"{of}: sparsity_ratio must be from 0 to {LARGEST_SPARSITY}, got {sparsity}")
    return float(sparsity)


@lru_cache(maxsize=128)
def budget(
    tokens: int,
    keys: int,
    block_q: int,
    block_k: int,
    causal: bool,
    sparsity: float,
    device: torch.device,
    top: int | None = None,
) -> Budget:
    """The budget of a call. Each row that sees a block keeps one; the rest of floor((1 - sparsity) * seen blocks) is
    shared out in proportion to what the rows see besides. Where that is less than one a row, one a row it is. top: as
    many blocks for every row that sees them, in place of all that."""
    visible = _visible(tokens, keys, block_q, block_k, causal)  # numbers, not tensors: torch.compile reads them
    seen, least = sum(visible), sum(n > 0 for n in visible)
    # 1 - 0.9 is a little less than 0.1, and 10 % of 20 blocks are two
    rest = max(math.floor((1.0 - sparsity) * seen + 1e-6) - least, 0)
    offsets, own, others = [0], 0, 0
    for count in visible:
        others += max(count - 1, 0)
        own += count > 0
        offsets.append(own + others * rest // max(seen - least, 1))
    if top is not None:
        offsets = [0, *accumulate(min(count, top) for count in visible)]
    counts = [end - start for start, end in pairwise(offsets)]
    with torch.inference_mode(False):  # they are kept, and a later call may save them for its backward
        numbers = torch.tensor([counts, visible], dtype=torch.int32, device=device)
    return Budget(numbers[0], numbers[1], offsets[-1], seen)


@lru_cache(maxsize=128)
def fitting_block(tokens: int, keys: int, causal: bool, sparsity: float) -> int:
    """The largest block size of which a row keeps three on average, else the smallest."""
    for size in BLOCK_SIZES:
        seen = sum(_visible(tokens, keys, size, size, causal))
        if (1.0 - sparsity) * seen >= 3 * cdiv(tokens, size):
            return size
    return BLOCK_SIZES[-1]


def _visible(tokens: int, keys: int, block_q: int, block_k: int, causal: bool) -> list[int]:
    """How many blocks of keys, from the first on, each block of queries sees any key of."""
    rows, columns = cdiv(tokens, block_q), cdiv(keys, block_k)
    if not causal:
        return [columns] * rows
    last = (min((row + 1) * block_q, tokens) - 1 + keys - tokens for row in range(rows))
    return [min(max(n // block_k + 1, 0), columns) for n in last]
