"""Gradients of context-parallel attention on the ranks of this process, within what each of them holds of a sequence.

A rank's gradients of keys are a sum of what it and others computed, in the order of the stages: its own first, then
each stage's as they have come back, while the next stage's are computed. Those of others' keys are put where they
travel from, where the ring has memory for that.

Parts of sums are fp32. Where what a rank computes of its own keys is all there is but for few tokens, as under a
window, it is rounded at once: only these tokens' gradients, to which a part is added in fp32, are rounded twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.distributed.kernels import Terms
from tilesmith.distributed.schedule import Moves, Stage
from tilesmith.distributed.sums import NO_KEYS, Sum
from tilesmith.distributed.tokens import run
from tilesmith.distributed.travel import Shards, Work, cut, of_part, of_rank, post_back, through, to_begin

Results = Mapping[int, Sequence[Tensor | None]]  # out, lse, dout and dlse of each rank


def gradients(
    work: Work, shards: Shards, results: Results, shared: Mapping[int, bool]
) -> dict[int, Sequence[Tensor | None]]:  # fmt: skip
    """dq, dk, dv and dsinks, or None, of each rank. shared: whether dk and dv will be added to those of other ranks."""
    terms, index = to_begin(work, shards)
    parts = work.parts[1]
    kinds = _partial(work, shards, shared, any(a.kv == b.kv for a, b in pairwise(parts)))
    dsinks: dict[int, list[Tensor] | None] = {r: [] if _gives_sinks(work, r) else None for r in shards}
    if len(parts) < 2:
        dkv = _sums_of_keys(work, shards, kinds, 1)
        dq = _Part(work, shards, results, terms, index, kinds, dkv, dsinks).run()
        found = {}
        for r, (_, k, _) in shards.items():
            found[r] = [dq.pop(r), *dkv.pop(r).total(kinds[r].dtype if shared[r] else k.dtype)]
        return {r: [*found[r], _sinks(work, r, results[r], dsinks[r])] for r in shards}
    whole = {r: [torch.empty_like(x) for x in tensors] for r, tensors in shards.items()}
    for part in parts:
        mine, some = of_part(shards, part), {r: terms[r].of_heads(part.q) for r in shards}
        theirs = {r: [None if x is None else x[:, slice(*part.q)] for x in each] for r, each in results.items()}
        alike = [one for one in parts if one.kv == part.kv]
        if part == alike[0]:
            dkv = _sums_of_keys(work, mine, kinds, len(alike))
        sinks = {r: None if x is None else [] for r, x in dsinks.items()}
        dq = {r: x[0][:, slice(*part.q)] for r, x in whole.items()}
        _Part(work, mine, theirs, some, index, kinds, dkv, sinks, dq).run(part == alike[-1])
        for r, found in sinks.items():
            if found:
                dsinks[r].append(F.pad(reduce(torch.add, found), (part.q[0], whole[r][0].shape[1] - part.q[1])))
        for r in shards if part == alike[-1] else ():
            dkv.pop(r).write([x[:, slice(*part.kv)] for x in whole[r][1:]])
    return {r: [*whole[r], _sinks(work, r, results[r], dsinks[r])] for r in shards}


class _Kind(NamedTuple):
    """Of a rank's gradients, whether they are parts of sums, and the dtype of these parts; own: of what it computes of
    its own keys, and of the sums that this begins."""

    adds: bool
    dtype: torch.dtype
    own: torch.dtype


def _partial(work: Work, shards: Shards, shared: Mapping[int, bool], in_turns: bool) -> dict[int, _Kind]:
    """What is rounded once needs no more than its dtype; ranks agree about what travels. in_turns: whether query heads
    of one kv head are worked on one part after another."""
    several = len(work.schedule.stages) > 1
    found = {}
    for r, (q, _, _) in shards.items():
        sums = work.schedule.sums(r)
        adds = several or sums.parts > 1 or shared[r]
        dtype = work.kernel.summand(q) if adds else q.dtype
        found[r] = _Kind(adds, dtype, q.dtype if sums.nearly_whole and not shared[r] and not in_turns else dtype)
    return found


def _sums_of_keys(work: Work, shards: Shards, kinds: Mapping[int, _Kind], times: int) -> dict[int, Sum]:
    """Those of dk and dv, to which each stage adds so many times."""
    return {r: Sum(tensors[1:], times * work.schedule.sums(r).parts, kinds[r].own) for r, tensors in shards.items()}


class _Part:
    """The gradients of some of the heads, of the ranks of this process.

    dkv: the sums of dk and dv, to which theirs are added; dsinks: of sinks, what calls on a rank's own keys give; None
    for a rank whose calls give none. into: where dq is to be written; None: it is made.
    """

    def __init__(
        self, work: Work, shards: Shards, results: Results, terms: Mapping[int, Terms], index: dict[int, int],
        kinds: Mapping[int, _Kind], dkv: Mapping[int, Sum], dsinks: Mapping[int, list[Tensor] | None],
        into: Mapping[int, Tensor] | None = None,
    ):  # fmt: skip
        self.work, self.shards, self.results, self.terms, self.index = work, shards, results, terms, index
        self.kinds, self.dkv, self.dsinks, self.into = kinds, dkv, dsinks, into
        schedule = work.schedule
        self.sums = {r: Sum([q], schedule.sums(r).parts, kinds[r].own) for r, (q, _, _) in shards.items()}
        self.left = {r: sum(len(stage.calls[r]) for stage in schedule.stages) for r in shards}
        self.dq: dict[int, Tensor] = {}
        # gradients of one stage's keys, on their way to their owners
        self.returning: list[tuple[Any, Moves, Shards]] = []

    def run(self, last: bool = True) -> dict[int, Tensor]:
        """dq of each rank. last: nothing is added to `dkv` after this."""
        through(self.work, self.shards, self._compute, "keys for gradients")
        self._finish(list(self.sums))
        self._land(last)
        return self.dq

    def _compute(self, stage: Stage, keys: Shards) -> None:
        sums = {r: self._calls(stage, r, keys[r]) for r in self.shards}
        ended = [r for r in self.sums if not self.left[r]]
        # what travels from memory of PyTorch is held until it has arrived, beside what comes
        self._finish([r for r in ended if not sums[r].given])
        if stage.transfers:
            self._land()  # those of the stage before, which have travelled beside these calls
            theirs = {r: x.total(self.kinds[r].dtype) for r, x in sums.items()}
            del sums
            posted, arriving = post_back(self.work, stage.transfers, theirs, "gradients of keys")
            self.returning.append((posted, stage.transfers, arriving))
        self._finish([r for r in ended if r in self.sums])  # while these travel

    def _calls(self, stage: Stage, r: int, keys: Sequence[Tensor]) -> Sum:
        """Add what a rank's calls of a stage give; the sum of dk and dv."""
        work, (q, _, _), kind = self.work, self.shards[r], self.kinds[r]
        out, lse, dout, dlse = self.results[r]
        into, terms = self.dkv[r], self.terms[r]
        adds = kind.adds and (bool(stage.transfers) or kind.own == kind.dtype)
        if stage.transfers:
            memory = partial(work.reserve, stage.transfers, r, keys, kind.dtype)
            into = Sum(keys, len(stage.calls[r]), kind.dtype, stage.tiled[r], memory)
        counts = self.dsinks[r] is not None and not stage.transfers
        sinks = terms.sinks.to(lse.dtype) if counts else None
        for call in stage.calls[r]:
            some = terms.of(call, stage.held[r], self.index[r], sinks)
            self.index[r] += 1
            self.left[r] -= 1
            slope = None if dlse is None else run(dlse, *call.span).contiguous()
            found = work.kernel.backward(
                run(dout, *call.span), slope, *cut(call, q, *keys), run(out, *call.span),
                run(lse, *call.span).contiguous(), call, some, adds,
            )  # fmt: skip
            if len(call.runs) == 1:
                self.sums[r].add(found[:1], call.q, not self.left[r])
            else:  # of the queries between them dq is zeros
                runs = [n for low, high in call.runs for n in (low - call.q, low, high - low)]
                self.sums[r].add_runs(found[:1], runs, not self.left[r])
            into.add(found[1:3], call.k)
            if counts:
                self.dsinks[r].append(found[3])
            del found  # not held beside those of the next call
        return into

    def _land(self, last: bool = False) -> None:
        """Add what has come back. last: nothing is added after it."""
        for posted, moves, arrived in self.returning:
            self.work.ring.wait(posted)
            for r, tensors in arrived.items():
                runs = [n for low, high, at in moves.returning.get(r, ()) for n in (low, at, high - low)]
                if runs:
                    self.dkv[r].add_runs(tensors, runs, last)
        self.returning.clear()

    def _finish(self, ranks: Sequence[int]) -> None:
        """Round dq, to which nothing is added any longer."""
        for r in ranks:
            total = self.sums.pop(r)
            if self.into is None:
                self.dq[r] = total.total(self.shards[r][0].dtype)[0]
            else:
                self.dq[r] = self.into[r]
                total.write([self.into[r]])


def _gives_sinks(work: Work, rank: int) -> bool:
    """Whether a rank's calls on its own keys give the gradients of its heads' sinks: there are sinks, and these calls
    have each of its queries once with a key that it sees, its own."""
    terms = of_rank(work, rank)
    hidden = any(x is not None for x in (terms.mask, terms.bias, terms.q_documents))
    return terms.sinks is not None and not hidden and work.kernel.sinks and work.schedule.sums(rank).once


def _sinks(work: Work, rank: int, result: Sequence[Tensor | None], given: Sequence[Tensor] | None) -> Tensor | None:
    """The gradient of all sinks by a rank's rows in at least fp32, zero for heads that it does not have. given: of its
    heads, what is to be added, if its calls made it; a sink's share of a row needs no keys otherwise."""
    whole = work.terms[rank].sinks
    if whole is None:
        return None
    out, lse, dout, dlse = result
    if given:
        found = reduce(torch.add, given)
    else:
        sinks = of_rank(work, rank).sinks.to(lse.dtype)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        found = -torch.where(lse > NO_KEYS, torch.exp(sinks[None, :, None] - lse) * delta, 0.0).sum((0, 2))
    if work.schedule.degree == 1:
        return found
    made = torch.zeros_like(whole, dtype=found.dtype)
    made[slice(*work.schedule.q_heads[rank])] = found
    return made
