"""How many blocks of keys each block of queries may keep, so that the total is exactly what a sparsity asks for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import integer, number
from tilesmith.engine.tracing import kept
from tilesmith.ops.attn.block_pattern_reference import LARGEST_SPARSITY, row_budget, row_ends

BLOCK_SIZES = (128, 64, 32, 16)


class Budget(NamedTuple):
    """counts, visible int32 [R]: blocks that a row keeps and sees. total, seen: their sums. ends int32 [R]: the block
    behind a row's own one; None where that is the last one that it sees."""

    counts: Tensor
    visible: Tensor
    total: int
    seen: int
    ends: Tensor | None = None


def checked_sparsity(of: str, sparsity: float) -> float:
    """sparsity, or an error unless it is a number from 0 to 0.95."""
    if not 0.0 <= number(of, "sparsity_ratio", sparsity) <= LARGEST_SPARSITY:
        raise ValueError(f"{of}: sparsity_ratio must be from 0 to {LARGEST_SPARSITY}, got {sparsity}")
    return float(sparsity)


def checked_block(of: str, block_size: int | None) -> int | None:
    """block_size, or an error unless it is None or an int of `BLOCK_SIZES`."""
    if block_size is not None and integer(of, "block_size", block_size) not in BLOCK_SIZES:
        raise ValueError(f"{of}: block_size must be None or one of {BLOCK_SIZES}, got {block_size!r}")
    return block_size


@kept(128)
def budget(
    tokens: int,
    keys: int,
    block: int,
    causal: bool,
    sparsity: float,
    device: torch.device,
    top: int | None = None,
) -> Budget:
    """The budget of a call, that of `ops.block_pattern`. top: as many blocks for every row that sees them, in place of
    a share of all."""
    b = row_budget(tokens, keys, block, causal, sparsity)
    total = b.total
    with torch.inference_mode(False):  # they are kept, and a later call may save them for its backward
        visible, ends = row_ends(b, device)
        counts = ends.diff(prepend=ends.new_zeros(1))
        if top is not None:  # torch.compile reads no tensors, so the total is of numbers
            counts = visible.clamp(max=top)
            total = sum(max(min(row + b.shift, b.columns, top), 0) for row in range(b.rows))
        own = torch.arange(b.rows, device=device) + (keys - tokens) // block
        ends = None if causal else own.clamp(0, b.columns - 1).int() + 1
        return Budget(counts.int(), visible.int(), total, b.seen, ends)


@kept(128)
def fitting_block(tokens: int, keys: int, causal: bool, sparsity: float) -> int:
    """The largest block size of which a row keeps three on average, else the smallest."""
    for size in BLOCK_SIZES:
        b = row_budget(tokens, keys, size, causal, sparsity)
        if (1.0 - sparsity) * b.seen >= 3 * b.rows:
            return size
    return BLOCK_SIZES[-1]
