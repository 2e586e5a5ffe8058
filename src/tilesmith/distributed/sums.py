"""Sums of what several calls found: results of attention over other keys, merged by their lse, and gradients.

A part of a sum is fp32 where the kernel gives it so, and the sum is rounded once, when it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed.layout import joined
from tilesmith.distributed.pieces import Call

NO_KEYS = float("-inf")  # lse of a row that sees no key
SMALL = (torch.float16, torch.bfloat16)
Span = tuple[int, int]


class Rows:
    """The results of some of a rank's keys after another's, row by row.

    Rows that one call answers keep its result; others are merged in place. calls: of the rank; summand: the dtype of
    results that are parts. whole: one call answers all rows, and has the sinks; partial: results are parts of sums,
    or of a sum with a sink.
    """

    def __init__(self, q: Tensor, value_dim: int, calls: Sequence[Call], summand: torch.dtype, sinks: Tensor | None):
        self.q, self.value_dim, self.sinks = q, value_dim, sinks
        self.whole = len(calls) == 1 and _covers(calls[0], q)
        most = _most([(call.q, call.q + call.tokens) for call in calls])
        self.partial = not self.whole and (most > 1 or sinks is not None)
        # what kernels round is still added in fp32 where there is more than one addition
        self.dtype = torch.float32 if self.partial and most > 2 and summand in SMALL else summand
        self.dtype = self.dtype if self.partial else q.dtype
        self.filled: list[Span] = []
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def take(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Add the result of a call, which is not read again."""
        if self.out is None:
            if _covers(call, self.q) and out.dtype == self.dtype:
                self.out, self.lse, self.filled = out, lse, [(0, call.tokens)]
                return
            self._make(out)
        for start, stop, new in _split(call.q, call.q + call.tokens, self.filled):
            rows, part = slice(start, stop), slice(start - call.q, stop - call.q)
            mine, theirs = out[:, :, part], lse[:, :, part]
            if new:
                self.out[:, :, rows] = mine
            else:
                theirs = ops.accumulate_attention(self.out[:, :, rows], self.lse[:, :, rows], mine, theirs)
            self.lse[:, :, rows] = theirs
        self.filled = _with(self.filled, (call.q, call.q + call.tokens))

    def result(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype and lse, with the sinks in them, if no call had these."""
        if self.out is None:
            self._make(None)
        if self.sinks is not None and not self.whole:
            total = torch.logaddexp(self.lse, self.sinks.to(self.lse.dtype)[None, :, None])
            share = torch.where(total > NO_KEYS, torch.exp(self.lse - total), 0.0)
            self.out.mul_(share.unsqueeze(-1))
            self.lse = total
        return self.out.to(self.q.dtype), self.lse

    def _make(self, like: Tensor | None) -> None:
        """Rows that no call answers are 0, their lse -inf."""
        q = self.q
        shape = (*q.shape[:3], self.value_dim)
        tokens_first = q.stride(1) < q.stride(2) if like is None else like.stride(1) < like.stride(2)
        if tokens_first:
            out = q.new_zeros(shape[0], shape[2], shape[1], shape[3], dtype=self.dtype).transpose(1, 2)
        else:
            out = q.new_zeros(shape, dtype=self.dtype)
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out, self.lse = out, q.new_full(shape[:3], NO_KEYS, dtype=accumulator)


class Sum:
    """A gradient from several calls: in fp32 if it has more than two parts, else rounded once, by their addition."""

    def __init__(self, like: Tensor, parts: int, partial: torch.dtype):
        self.like, self.partial, self.value = like, partial, None
        self.dtype = torch.float32 if partial in SMALL and parts > 2 else partial

    def add(self, x: Tensor, at: int) -> None:
        """Add x [B, heads, T, D] to the tokens from `at`."""
        whole = (at, x.shape[2]) == (0, self.like.shape[2])
        if self.value is None and whole:
            self.value = x.to(self.dtype)
        else:
            if self.value is None:
                self.value = torch.zeros_like(self.like, dtype=self.dtype)
            self.value[:, :, at : at + x.shape[2]].add_(x)

    def total(self, dtype: torch.dtype) -> Tensor:
        """The sum, zeros where nothing was added."""
        return torch.zeros_like(self.like, dtype=dtype) if self.value is None else self.value.to(dtype)


def _covers(call: Call, q: Tensor) -> bool:
    return (call.q, call.tokens) == (0, q.shape[2])


def _most(spans: Sequence[Span]) -> int:
    """The most spans that one token lies in."""
    ends = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    most = here = 0
    for _, change in ends:
        here += change
        most = max(most, here)
    return most


def _split(start: int, stop: int, filled: Sequence[Span]) -> list[tuple[int, int, bool]]:
    """[start, stop) in parts that lie within `filled` (ascending) or outside of it; True for outside."""
    found = []
    for begin, end in filled:
        low, high = max(start, begin), min(stop, end)
        if low < high:
            if start < low:
                found.append((start, low, True))
            found.append((low, high, False))
            start = high
    return found + ([(start, stop, True)] if start < stop else [])


def _with(filled: Sequence[Span], span: Span) -> list[Span]:
    return list(joined(sorted([*filled, span])))
