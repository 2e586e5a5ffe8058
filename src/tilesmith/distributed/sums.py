"""Sums over several calls: results of attention over different keys, merged by their lse, and gradients.

A part of a sum is fp32 where the kernel gives it so, and the sum is rounded once, when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed.layout import Range, joined
from tilesmith.distributed.pieces import Call, Overlap
from tilesmith.distributed.tokens import add_runs, pair, run
from tilesmith.ops.attn.reference import out_like

NO_KEYS = float("-inf")  # lse of a row that sees no key
SMALL = (torch.float16, torch.bfloat16)


class Rows:
    """out and lse of a rank's rows from the results of several calls.

    Rows that one call answers keep its result, which has the sinks in it, or that of a later call in its place. Those
    that several answer are sums, and so are all rows of these calls. summand: the dtype of results that are parts of
    sums. tokens: how many rows there are before the padding. into: out and lse that are to be written; else they are
    made.
    """

    def __init__(
        self, q: Tensor, value_dim: int, overlap: Overlap, summand: torch.dtype, sinks: Tensor | None, tokens: int,
        into: Sequence[Tensor] | None = None,
    ):  # fmt: skip
        self.q, self.value_dim, self.sinks, self._tokens, self._into = q, value_dim, sinks, tokens, into
        self._whole, self._place = (0, q.shape[2]), overlap.place
        # what kernels round is still added in fp32 where there is more than one addition
        dtype = torch.float32 if summand in SMALL and overlap.most > 2 else summand
        self._sums = [_Merged(q, value_dim, span, dtype) for span in overlap.ranges]
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def adds(self, call: Call) -> bool:
        """Whether the result of a call is part of a sum."""
        return call.span in self._place

    def take(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Put in the result of a call, which is not read again."""
        place = self._place.get(call.span)
        if place is not None:
            self._sums[place].take(call.q, out, lse)
        elif call.runs == (self._whole,):
            self._is(out, lse)
        else:
            for low, high in call.runs:
                self._put(low, high, *(run(x, low - call.q, high - call.q) for x in (out, lse)))

    def result(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype and lse, of rows that no call answers 0 and that of the sinks, or -inf; so of padding."""
        while self._sums:
            one = self._sums.pop()
            out, lse = one.total(self.sinks)
            if (one.low, one.high) == self._whole:
                self._is(out, lse)
                return self.out, self.lse
            self._put(one.low, one.high, out, lse)
        self._make()
        return self.out, self.lse

    def _is(self, out: Tensor, lse: Tensor) -> None:
        """All rows have these results."""
        if self._into is None:
            self.out, self.lse = out if out.dtype == self.q.dtype else out.to(self.q.dtype), lse
        else:
            self.out, self.lse = (x.copy_(y) for x, y in zip(self._into, (out, lse)))

    def _put(self, low: int, high: int, out: Tensor, lse: Tensor) -> None:
        self._make()
        run(self.out, low, high).copy_(out)
        run(self.lse, low, high).copy_(lse)

    def _make(self) -> None:
        if self.out is None:
            self.out, self.lse = self._into or (out_like(self.q, self.value_dim), _no_keys(self.q))
            self.out.zero_()
            self.lse.fill_(NO_KEYS)
            if self.sinks is not None:
                run(self.lse, 0, self._tokens).copy_(self.sinks[:, None])


class _Merged:
    """Results of other keys for rows from `low` to `high`, merged in place as they come."""

    def __init__(self, q: Tensor, value_dim: int, span: Range, dtype: torch.dtype):
        self.low, self.high = span
        self.q, self.value_dim, self.dtype = run(q, *span), value_dim, dtype
        self.filled: Sequence[Range] = []
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def take(self, first: int, out: Tensor, lse: Tensor) -> None:
        """Add a result of rows from `first` on."""
        start = first - self.low
        stop = start + out.shape[2]
        if self.out is None and (start, stop) == (0, self.high - self.low) and out.dtype == self.dtype:
            self.out, self.lse, self.filled = out, lse, [(start, stop)]
            return
        if self.out is None:  # all of it will be written
            self.out = out_like(self.q, self.value_dim, fp32=self.dtype != self.q.dtype)
            self.lse = _no_keys(self.q)
        for begin, end, new in _split(start, stop, self.filled):
            mine, theirs = (run(x, begin - start, end - start) for x in (out, lse))
            sum_, sum_lse = (run(x, begin, end) for x in (self.out, self.lse))
            if new:
                sum_.copy_(mine)
            else:
                theirs = ops.accumulate_attention(sum_, sum_lse, mine, theirs)
            sum_lse.copy_(theirs)
        if not (self.filled and self.filled[0][0] <= start and stop <= self.filled[0][1]):
            self.filled = joined(sorted([*self.filled, (start, stop)]))

    def total(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out and lse; sinks: one more logit of each head, which no call had."""
        if sinks is None:
            return self.out, self.lse
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[None, :, None])
        share = torch.where(total > NO_KEYS, torch.exp(self.lse - total), 0.0)
        return self.out.mul_(share.unsqueeze(-1)), total


class Sum:
    """Gradients of one tensor or of two, from several calls: in fp32 if they have more than two parts, else rounded
    once, by their addition.

    like: these tensors, [B, heads, T, D]. parts: how many there may be; partial: their dtype. tiled: the parts lie one
    after another and leave nothing out, so that none is added to another. memory: gives memory of the partial dtype in
    which the sum is to be, asked for when the first part has come; None, or where it gives None: PyTorch's.
    """

    def __init__(
        self, like: Sequence[Tensor], parts: int, partial: torch.dtype, tiled: bool = False,
        memory: Callable[[], Sequence[Tensor] | None] | None = None,
    ):  # fmt: skip
        self.like, self.partial, self.tiled, self._memory = like, partial, tiled, memory
        self.dtype = torch.float32 if partial in SMALL and parts > 2 else partial
        self.values: Sequence[Tensor] | None = None
        self.given = False  # whether the sum is in memory that was given
        self._last: tuple[Sequence[Tensor], Sequence[int]] | None = None

    def add(self, found: Sequence[Tensor], at: int, last: bool = False) -> None:
        """Add the gradients of a call [B, heads, T, D] to the tokens from `at`. last: nothing is added after them."""
        tokens = found[0].shape[2]
        if self.values is None and self._begins(found, tokens):
            return
        if self.tiled:
            _copy(found, self.values, at)
        else:
            self.add_runs(found, (0, at, tokens), last)

    def add_runs(self, more: Sequence[Tensor], runs: Sequence[int], last: bool = False) -> None:
        """Add runs of tokens, (from, to, tokens) of each. last: nothing is added after them; they are then kept until
        the sum is rounded, in the same pass."""
        if self.values is None:
            self.values = [torch.zeros_like(x, dtype=self.dtype) for x in self.like]
        if last:
            self._last = more, runs
            return
        add_runs(self.values, more, runs)

    def total(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """The sums, zeros where nothing was added. Called once."""
        if self.values is None:
            return [torch.zeros_like(x, dtype=dtype) for x in self.like]
        if self._last is None:
            return [x if x.dtype == dtype else x.to(dtype) for x in self.values]
        if dtype == self.dtype:
            self.add_runs(*self._last)
            return self.values
        into = [torch.empty_like(x, dtype=dtype) for x in self.values]
        self._round(into)
        return into

    def write(self, into: Sequence[Tensor]) -> None:
        """Round the sums into `into`."""
        if self._last is not None:
            self._round(into)
            return
        for i, x in enumerate(into):
            x.zero_() if self.values is None else x.copy_(self.values[i])

    def _begins(self, found: Sequence[Tensor], tokens: int) -> bool:
        """Make memory for the first part to come; whether that part is in it already."""
        whole = tokens == self.like[0].shape[2]
        # a sum that is rounded before it travels cannot be where it travels from
        made = None if self._memory is None or self.dtype != self.partial else self._memory()
        self.given = made is not None
        if made is None and whole:
            self.values = [x if x.dtype == self.dtype else x.to(self.dtype) for x in found]
            return True
        self.values = [torch.empty_like(x, dtype=self.dtype) for x in self.like] if made is None else made
        if whole:
            _copy(found, self.values, 0)
        elif not self.tiled:
            for x in self.values:
                x.zero_()
        return whole

    def _round(self, into: Sequence[Tensor]) -> None:
        more, runs = self._last
        self._last = None
        ops.add_runs(*pair(self.values), *pair(more), *pair(into), runs)


def _copy(found: Sequence[Tensor], into: Sequence[Tensor], at: int) -> None:
    found = [x if x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(found, into)]
    ops.copy_runs(*pair(found), *pair(into), (0, at, found[0].shape[2]))


def _no_keys(q: Tensor) -> Tensor:
    return q.new_full(q.shape[:3], NO_KEYS, dtype=torch.promote_types(q.dtype, torch.float32))


def _split(start: int, stop: int, filled: Sequence[Range]) -> list[tuple[int, int, bool]]:
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
