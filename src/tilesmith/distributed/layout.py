"""Which rank holds which tokens of a sequence."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import index

import torch
from torch import Tensor

from tilesmith.distributed import documents
from tilesmith.distributed.ranges import Range, causal_pairs, joined, length, offsets
from tilesmith.engine.argument_checks import size as checked_size

_LOADS = (1, 2, 4, 8, 16, 32)  # blocks of a rank that `Layout.balanced` tries
_EVEN = 1.03  # load of the busiest rank over the mean at which it looks no further
_MOST = 1.1  # the most that it may be, whatever is spared: with more heads calls and transfers weigh less


@dataclass(frozen=True)
class Layout:
    """The tokens of each rank, as ranges of the whole sequence.

    tokens: real tokens of the sequence. ranges: of each rank, ascending and disjoint; a rank's local tensor holds them
    one after another. Those that touch become one, and empty ones are left out. local: tokens of every rank's local
    tensor; what the ranges leave is padding, at the end. Raises ValueError unless each token is in one range.
    """

    tokens: int
    ranges: tuple[tuple[Range, ...], ...]
    local: int

    def __post_init__(self) -> None:
        at = 0
        for start, stop in sorted(span for ranges in self.ranges for span in ranges):
            if start != at or stop < start:
                raise ValueError(
                    f"Layout: ranges must hold each of the {self.tokens} tokens once, got [{start}, {stop}) behind {at}"
                )
            at = stop
        if at != self.tokens:
            raise ValueError(f"Layout: ranges must hold each of the {self.tokens} tokens once, they end at {at}")
        longest = max(map(length, self.ranges), default=0)
        if any(list(ranges) != sorted(ranges) for ranges in self.ranges) or self.local < longest:
            raise ValueError(
                f"Layout: the ranges of a rank must ascend and hold at most local tokens, {self.local}; the longest "
                f"hold {longest}"
            )
        # one form for one layout: keys travel by runs, and a run lies within a range
        object.__setattr__(self, "ranges", tuple(map(joined, self.ranges)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.tokens, self.ranges, self.local))  # a call looks up what is kept for its layout

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    @classmethod
    def contiguous(cls, tokens: int, size: int) -> Layout:
        """Rank r holds the r-th of `size` equal parts: for attention without causality, and for windows."""
        return cls._dealt(tokens, size, [[r] for r in range(size)])

    @classmethod
    def zigzag(cls, tokens: int, size: int) -> Layout:
        """Rank r holds parts r and 2 * size - 1 - r of 2 * size equal ones, so that causal attention is as much work on
        each rank. torch's context parallel calls it head-tail and has the same order."""
        return cls._dealt(tokens, size, [[r, 2 * size - 1 - r] for r in range(size)])

    @classmethod
    def balanced(cls, cu_seqlens: Sequence[int] | Tensor, size: int, tokens: int | None = None) -> Layout:
        """Equal numbers of tokens and about equal causal work on each rank, for documents that lie one after another.

        cu_seqlens: [N + 1] starts of the documents and the end of the last. tokens: of the sequence, the end of the
        last document if None. Documents stay whole where they can, since what is cut must travel between ranks
        (`documents`). Where blocks of the sequence are less work, `documents.Work`, each rank has some of these. The
        busiest rank has at most 10 % above the mean, or no more than with blocks.
        """
        starts = boundaries(cu_seqlens)
        tokens = starts[-1] if tokens is None else checked_size("Layout.balanced", "tokens", tokens, starts[-1])
        checked_size("Layout.balanced", "size", size)
        blocks = cls._blocks(starts, size, tokens)
        best, least = None, documents.work(starts, blocks.ranges)
        mean = causal_pairs(starts, (0, tokens)) / size
        even, most = (1 + documents.EVEN) * mean, max(_MOST * mean, least.pairs)
        able = documents.by_documents(starts, size, tokens)
        while (least.moved or least.pairs > even) and (ranges := next(able, None)) is not None:
            found = documents.work(starts, ranges)
            if found.total < least.total and found.pairs <= most:
                best, least = ranges, found
        return blocks if best is None else cls(tokens, best, -(-tokens // size))

    @classmethod
    def _blocks(cls, starts: Sequence[int], size: int, tokens: int) -> Layout:
        """The sequence cut into blocks of one width, which go in descending order of work to the rank with the least so
        far (longest processing time first): as few blocks as leave the busiest rank within 3 % of the mean."""
        best = None
        for count in _LOADS:
            if best is not None and count * size > max(tokens, 1):
                break
            width = max(1, -(-tokens // (size * count)))
            loads = [causal_pairs(starts, (i * width, (i + 1) * width)) for i in range(size * count)]
            dealt = _longest_first(loads, size)
            worst = max(sum(loads[i] for i in blocks) for blocks in dealt)
            if best is None or worst < best[0]:
                best = worst, dealt
            if worst * size <= _EVEN * sum(loads):
                break
        return cls._dealt(tokens, size, best[1])

    @classmethod
    def _dealt(cls, tokens: int, size: int, dealt: Sequence[Sequence[int]]) -> Layout:
        """Rank r holds the blocks dealt[r], all of one width."""
        checked_size("Layout", "tokens", tokens)
        checked_size("Layout", "size", size)
        width = -(-tokens // sum(map(len, dealt)))
        held = [[(min(i * width, tokens), min((i + 1) * width, tokens)) for i in sorted(blocks)] for blocks in dealt]
        ranges = tuple(joined(each) for each in held)
        return cls(tokens, ranges, width * max(map(len, dealt)))

    def grouped(self, members: Sequence[Sequence[int]]) -> Layout:
        """The layout whose rank i holds what `members[i]` hold together."""
        ranges = tuple(joined(sorted(span for r in group for span in self.ranges[r])) for group in members)
        return Layout(self.tokens, ranges, max((length(each) for each in ranges), default=0))

    def _check_rank(self, method: str, rank: int) -> None:
        if checked_size(f"Layout.{method}", "rank", rank, 0) >= self.size:
            raise ValueError(
                f"Layout.{method}: rank is {rank}; the layout has {self.size} ranks, so give one from 0 to "
                f"{self.size - 1}"
            )

    def positions(self, rank: int, fill: int = 0) -> Tensor:
        """The place in the sequence of each local token, int64 [local]; `fill` for padding."""
        self._check_rank("positions", rank)
        found = torch.full((self.local,), fill, dtype=torch.int64)
        at = 0
        for start, stop in self.ranges[rank]:
            found[at : at + stop - start] = torch.arange(start, stop)
            at += stop - start
        return found

    def shard(self, x: Tensor, rank: int, dim: int = 1, fill: float = 0) -> Tensor:
        """What `rank` holds of x, whose `dim` are the tokens of the sequence; padding is `fill`.

        Differentiable. Raises ValueError where x has another number of tokens, and for a rank that there is not.
        """
        self._check_rank("shard", rank)
        if x.shape[dim] != self.tokens:
            raise ValueError(
                f"Layout.shard: x has {x.shape[dim]} tokens in dim {dim}, the layout {self.tokens}; give the whole "
                "sequence, and its dim of tokens"
            )
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        missing = self.local - length(self.ranges[rank])
        if missing or not parts:
            shape = list(x.shape)
            shape[dim] = missing
            parts.append(x.new_full(shape, fill))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence from the local tensors of all ranks, without padding."""
        if len(shards) != self.size or any(x.shape[dim] != self.local for x in shards):
            raise ValueError(
                f"Layout.unshard: shards must be {self.size} tensors of {self.local} tokens in dim {dim}, got "
                f"{[list(x.shape) for x in shards]}"
            )
        parts = []
        for x, ranges in zip(shards, self.ranges):
            for at, (start, stop) in zip(offsets(ranges), ranges):
                parts.append((start, x.narrow(dim, at, stop - start).to(shards[0].device)))
        if not parts:
            return shards[0].narrow(dim, 0, 0)
        return torch.cat([x for _, x in sorted(parts, key=lambda part: part[0])], dim)


def boundaries(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    """cu_seqlens as Python ints. Raises TypeError for other numbers, ValueError unless they ascend from 0."""
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    try:
        values = [index(value) for value in given]
    except TypeError:
        raise TypeError(f"cu_seqlens must hold ints, starts of documents and the last end, got {given!r}") from None
    if len(values) < 2 or values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise ValueError(f"cu_seqlens must hold documents + 1 >= 2 ascending numbers from 0, got {values[:8]}")
    return tuple(values)


def _longest_first(loads: Sequence[int], size: int) -> list[list[int]]:
    """Equally many blocks for each of `size` ranks, each block in descending order to the least busy one with room."""
    room = len(loads) // size
    dealt: list[list[int]] = [[] for _ in range(size)]
    ranks = [(0, r) for r in range(size)]
    for block in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        load, r = heapq.heappop(ranks)
        dealt[r].append(block)
        if len(dealt[r]) < room:
            heapq.heappush(ranks, (load + loads[block], r))
    return dealt
