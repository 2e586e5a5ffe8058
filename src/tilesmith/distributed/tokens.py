"""Views of a rank's tokens, memory where they land, and copies of runs of them.

Tensors are [B, heads, T, D]; what travels is their view [T, B, heads, D], of which a run of tokens is one block of
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith import ops


def by_token(x: Tensor) -> Tensor:
    """[B, heads, T, D] as [T, B, heads, D]."""
    return x.permute(2, 0, 1, 3)


def by_head(x: Tensor) -> Tensor:
    """[T, B, heads, D] as [B, heads, T, D]."""
    return x.permute(1, 2, 0, 3)


def landing(x: Tensor, tokens: int, heads: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for tokens that arrive: [B, heads, tokens, D] with the batch, the last dim, and, where None is given, the
    heads and the dtype of x [B, heads, T, D]. It lies as [tokens, B, heads, D]."""
    batch, own, _, dim = x.shape
    heads = own if heads is None else heads
    head = max(1, dim)  # as PyTorch has strides of what is empty
    row = max(1, heads) * head
    strides = row, head, max(1, batch) * row, 1
    return x.new_empty_strided((batch, heads, tokens, dim), strides, dtype=x.dtype if dtype is None else dtype)


def run(x: Tensor, low: int, high: int) -> Tensor:
    """Tokens from `low` to `high` of x [B, heads, T, ...]: x itself where these are all, which costs the host less."""
    return x if high - low == x.shape[2] else x.narrow(2, low, high - low)


def pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One tensor or two, as ops of two take them: beside one alone one like it with 0 columns."""
    if len(tensors) == 2:
        return tensors[0], tensors[1]
    (x,) = tensors
    return x, x.new_empty_strided((*x.shape[:3], 0), (1, 1, 1, 1))  # which takes half as long as a view


def copy_runs(
    sent: Sequence[Tensor], heads: tuple[int, int] | None, into: Sequence[Tensor], runs: Sequence[int]
) -> None:  # fmt: skip
    """Copy runs of some heads of tensors into others, all [B, heads, T, D], two tensors at a time, behind what the
    current stream does. heads: None: all. runs: as `ops.copy_runs` takes them."""
    some = sent if heads is None else [x[:, slice(*heads)] for x in sent]
    for i in range(0, len(some), 2):
        ops.copy_runs(*pair(some[i : i + 2]), *pair(into[i : i + 2]), runs)


def add_runs(totals: Sequence[Tensor], more: Sequence[Tensor], runs: Sequence[int]) -> None:
    """Add runs of tokens to sums, both [B, heads, T, D], in place, two sums at a time. runs: as `ops.add_runs` takes
    them."""
    for i in range(0, len(totals), 2):
        sums = pair(totals[i : i + 2])
        ops.add_runs(*sums, *pair(more[i : i + 2]), *sums, runs)
