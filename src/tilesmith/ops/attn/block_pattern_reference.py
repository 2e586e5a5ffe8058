"""Block lists of patterns in closed form, in plain PyTorch, and the budget of their rows in integers.

Legend: R = ceil(T / block) blocks of queries (rows), C = ceil(S / block) blocks of keys (columns), L lists.
"""

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.ops.attn import block_lists

PATTERNS = ("random", "block_sparse", "strided", "local_global")
RUN = 4  # neighbouring blocks of block_sparse
GOLDEN = 0x9E3779B9
LOW = 0xFFFFFFFF
LARGEST_SPARSITY = 0.95


class RowBudget(NamedTuple):
    """Row r sees the first clamp(r + shift, 0, columns) columns. seen: the sum of these, least: rows that see any. Of
    every others - row counts all but its first one there - a row keeps its share of rest."""

    rows: int
    columns: int
    shift: int
    seen: int
    least: int
    rest: int

    @property
    def total(self) -> int:
        """Entries of a list."""
        return self.least + (self.rest if self.seen > self.least else 0)


def row_budget(tokens: int, keys: int, block: int, causal: bool, sparsity_ratio: float) -> RowBudget:
    """The budget of `block_pattern`, without a loop over rows."""
    tokens, keys, block = map(operator.index, (tokens, keys, block))  # torch.compile(dynamic=True) has symbols for them
    rows, columns = -(-tokens // block), -(-keys // block)
    shift = (keys - tokens - 1) // block + 2 if causal else columns
    blind = min(max(1 - shift, 0), rows)
    full = max(blind, min(rows, columns - shift))  # the first row that sees all columns
    seen = (blind + full - 1 + 2 * shift) * (full - blind) // 2 + (rows - full) * columns
    least = rows - blind
    # 1 - 0.9 is a little less than 0.1, and 10 % of 20 blocks are two
    rest = max(math.floor((1.0 - sparsity_ratio) * seen + 1e-6) - least, 0)
    return RowBudget(rows, columns, shift, seen, least, rest)


def row_ends(b: RowBudget, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [R]: columns that each row sees, and entries of all rows up to and including it."""
    visible = (torch.arange(b.rows, device=device) + b.shift).clamp(0, b.columns)
    others = (visible - 1).clamp(min=0).cumsum(0)
    return visible, (visible > 0).cumsum(0) + others * b.rest // max(b.seen - b.least, 1)


def block_pattern(
    seed: Tensor,
    pattern: str,
    tokens: int,
    keys: int,
    sparsity_ratio: float = 0.9,
    lists: int = 1,
    block: int = 128,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists of a pattern that does not depend on queries and keys, and their transpose, on seed's device.

    Row r keeps counts[r] of the v[r] columns that it sees: one, if it sees any, and of the n other columns of all rows
    up to it floor(n * rest / all others) together, where rest is floor((1 - sparsity_ratio) * seen columns) less one a
    row. A run of them lies around the column of its own tokens (the last one it sees, if causal); the others are taken
    from the columns outside the run, which are numbered consecutively.

        random: a run of 1. One from each of as many equal stretches, another one in each list.
        block_sparse: a run of 4, and runs of 4 at equal distances.
        strided: a run of half of them, the others at equal distances.
        local_global: a quarter of them from the first column on, the others in the run.

    Entry p of a row's n stretches of w columns is column low + (h * (high - low) >> 32) with low = p * w // n and
    high = (p + 1) * w // n, where h = mix(mix(mix(mix(lo + g) ^ hi) + list + g) + e) modulo 2**32: lo and hi are the
    words of the seed, g is 0x9E3779B9, e the number of entries of a list before the row, plus p, and mix the finaliser
    of MurmurHash3 (A. Appleby).

    Args:
        seed: int64 [1]; only random reads it.
        pattern: "random", "block_sparse", "strided" or "local_global".
        tokens, keys: T and S; with causal they are aligned at the last token.
        sparsity_ratio: from 0 to 0.95.
        lists: L. block: tokens of a block.

    Returns offsets int32 [1, L, R + 1], indices int32 [entries], ascending within a row, and the same by columns:
    offsets_t [1, L, C + 1], indices_t [entries]; contiguous. Not differentiable. Raises ValueError or TypeError, naming
    the argument, for what does not fit, and where the lists have 2**31 entries or more.
    """
    device = seed.device
    b = row_budget(tokens, keys, block, causal, sparsity_ratio)
    visible, ends = row_ends(b, device)
    begins = torch.nn.functional.pad(ends, (1, 0))
    row = torch.repeat_interleave(torch.arange(b.rows, device=device), begins.diff(), output_size=b.total)
    entry = torch.arange(b.total, device=device)
    place, count, seen = entry - begins[row], begins.diff()[row], visible[row]
    own = seen - 1 if causal else (row + (keys - tokens) // block).clamp(0, b.columns - 1)

    near = _near(pattern, count)
    others = count - near
    start = torch.minimum((own - near // 2).clamp(min=0), seen - near)
    if pattern == "local_global":
        start = torch.maximum(start, others)
    drawn = _drawn(seed, lists, entry) if pattern == "random" else None
    outside = _outside(pattern, place, others, seen - near, drawn)
    column = torch.where(outside < start, outside, outside + near)
    column = torch.where(place < others, column, start + place - others)
    column = (row * b.columns + column).sort(-1).values % b.columns
    first = b.total * torch.arange(lists, device=device)[:, None]
    offsets = (first + begins)[None].int()
    indices = column.expand(lists, -1).flatten().int()
    return offsets, indices, *block_lists.transposed(offsets, indices, b.columns)


def _near(pattern: str, count: Tensor) -> Tensor:
    """How many of a row's columns are in the run around its own."""
    if pattern == "random":
        return count.clamp(max=1)
    if pattern == "block_sparse":
        return count.clamp(max=RUN)
    if pattern == "strided":
        return (count + 1) // 2
    return count - torch.where(count > 1, (count // 4).clamp(min=1), 0)


def _outside(pattern: str, place: Tensor, others: Tensor, width: Tensor, drawn: Tensor | None) -> Tensor:
    """Which of `width` columns the entry `place` of `others` takes, ascending: [entries], or a row for each list."""
    many = others.clamp(min=1)
    if pattern == "local_global":
        return place
    if pattern == "strided":
        return place * width // many
    if drawn is None:
        runs = ((others + RUN - 1) // RUN).clamp(min=1)
        return place + place // RUN * (width - others) // runs
    low, high = place * width // many, (place + 1) * width // many
    return low + (drawn * (high - low) >> 32)


def _drawn(seed: Tensor, lists: int, entry: Tensor) -> Tensor:
    """32 random bits of each entry, a row for each list."""
    word = _mixed(_mixed((seed & LOW) + GOLDEN) ^ (seed >> 32 & LOW))
    of_list = _mixed(word + torch.arange(lists, device=seed.device) + GOLDEN)
    return _mixed(of_list[:, None] + entry)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 for 32 bits, of integers modulo 2**32, in int64."""
    x = x & LOW
    x = _times(x ^ x >> 16, 0x85EBCA6B)
    x = _times(x ^ x >> 13, 0xC2B2AE35)
    return x ^ x >> 16


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2**32, without leaving 63 bits."""
    return ((x >> 16) * (factor & 0xFFFF) + (x & 0xFFFF) * (factor >> 16) << 16) + (x & 0xFFFF) * (
        factor & 0xFFFF
    ) & LOW
