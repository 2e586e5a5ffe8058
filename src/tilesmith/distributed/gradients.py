"""Gradients of context-parallel attention on the ranks of this process, within what each of them holds of a sequence.

A rank's gradients of keys are a sum of what it and others computed, in the order of the stages: its own first, then
each stage's as they have come back, while the next stage's are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.distributed.kernels import Terms
from tilesmith.distributed.schedule import Moves, Stage
from tilesmith.distributed.sums import NO_KEYS, Sum, run
from tilesmith.distributed.travel import (
    Shards,
    Work,
    by_head,
    cut,
    of_part,
    of_rank,
    post_back,
    through,
    to_begin,
)

Results = Mapping[int, Sequence[Tensor | None]]  # out, lse, dout and dlse of each rank


def gradients(
    work: Work, shards: Shards, results: Results, shared: Mapping[int, bool]
) -> dict[int, Sequence[Tensor | None]]:  # fmt: skip
    """dq, dk, dv and dsinks, or None, of each rank. shared: whether dk and dv will be added to those of other ranks."""
    terms, index = to_begin(work, shards)
    kinds = _partial(work, shards, shared)
    parts = work.parts[1]
    dsinks = {r: _to_sum_of_sinks(work, r, results[r][1]) for r in shards}
    if len(parts) < 2:
        dkv = _sums_of_keys(work, shards, kinds, 1)
        dq = _part(work, shards, results, terms, index, kinds, dkv, dsinks)
        found = {r: [dq.pop(r).total(shards[r][0].dtype), *_rounded(dkv.pop(r), kinds[r], shared[r])] for r in shards}
        return {r: [*found[r], _sinks(work, r, results[r], dsinks[r])] for r in shards}
    whole = {r: [torch.empty_like(x) for x in tensors] for r, tensors in shards.items()}
    for part in parts:
        mine, some = of_part(shards, part), {r: terms[r].of_heads(part.q) for r in shards}
        theirs = {r: [None if x is None else x[:, slice(*part.q)] for x in each] for r, each in results.items()}
        alike = [one for one in parts if one.kv == part.kv]
        if part == alike[0]:
            dkv = _sums_of_keys(work, mine, kinds, len(alike))
        sinks = {r: None if x is None else x[slice(*part.q)] for r, x in dsinks.items()}
        dq = _part(work, mine, theirs, some, index, kinds, dkv, sinks)
        for r in shards:
            dq.pop(r).write(whole[r][0][:, slice(*part.q)])
            if part == alike[-1]:
                _write(dkv.pop(r), whole[r][1:], slice(*part.kv))
    return {r: [*whole[r], _sinks(work, r, results[r], dsinks[r])] for r in shards}


def _write(sums: Sequence[Sum], whole: Sequence[Tensor], heads: slice) -> None:
    for x, into in zip(sums, whole):
        x.write(into[:, heads])


class _Kind(NamedTuple):
    """Of a rank's gradients, whether they are parts of sums, and the dtype of these parts."""

    adds: bool
    dtype: torch.dtype


def _partial(work: Work, shards: Shards, shared: Mapping[int, bool]) -> dict[int, _Kind]:
    """What is rounded once needs no more than its dtype; ranks agree about what travels."""
    several = len(work.schedule.stages) > 1
    found = {}
    for r, (q, _, _) in shards.items():
        adds = several or work.schedule.sums(r).parts > 1 or shared[r]
        found[r] = _Kind(adds, work.kernel.summand(q) if adds else q.dtype)
    return found


def _sums_of_keys(work: Work, shards: Shards, kinds: Mapping[int, _Kind], times: int) -> dict[int, list[Sum]]:
    """Those of dk and dv, to which each stage adds so many times."""
    return {
        r: [Sum(x, times * work.schedule.sums(r).parts, kinds[r].dtype) for x in tensors[1:]]
        for r, tensors in shards.items()
    }


def _rounded(dkv: Sequence[Sum], kind: _Kind, shared: bool) -> list[Tensor]:
    return [x.total(kind.dtype if shared else x.like.dtype) for x in dkv]


def _part(
    work: Work, shards: Shards, results: Results, terms: Mapping[int, Terms], index: dict[int, int],
    kinds: Mapping[int, _Kind], dkv: Mapping[int, Sequence[Sum]], dsinks: Mapping[int, Tensor | None],
) -> dict[int, Sum]:  # fmt: skip
    """The sum of dq of each rank, for some of the heads; dk and dv are added to `dkv`, those of sinks to `dsinks`."""
    sums = {r: Sum(q, work.schedule.sums(r).parts, kinds[r].dtype) for r, (q, _, _) in shards.items()}
    returning: list[tuple[Any, Moves, Shards]] = []  # gradients of one stage's keys, on their way to their owners

    def land() -> None:
        for posted, moves, arrived in returning:
            work.ring.wait(posted)
            for r, tensors in arrived.items():
                for total, x in zip(dkv[r], map(by_head, tensors)):
                    for low, high, at in moves.returning.get(r, ()):
                        total.add(run(x, low, high), at)
        returning.clear()

    def compute(stage: Stage, keys: Shards) -> None:
        theirs = {}
        for r, (q, _, _) in shards.items():
            out, lse, dout, dlse = results[r]
            into = dkv[r]
            if stage.transfers:
                into = [Sum(x, len(stage.calls[r]), kinds[r].dtype, stage.tiled[r]) for x in keys[r]]
            counts = dsinks[r] is not None and not stage.transfers
            sinks = terms[r].sinks.to(lse.dtype) if counts else None
            for call in stage.calls[r]:
                some = terms[r].of(call, stage.held[r], index[r], sinks)
                index[r] += 1
                slope = None if dlse is None else run(dlse, *call.span).contiguous()
                found = work.kernel.backward(
                    run(dout, *call.span), slope, *cut(call, q, *keys[r]), run(out, *call.span),
                    run(lse, *call.span).contiguous(), call, some, kinds[r].adds,
                )  # fmt: skip
                for low, high in call.runs:  # of the queries between them dq is zeros
                    sums[r].add(run(found[0], low - call.q, high - call.q), low)
                for total, x in zip(into, found[1:]):
                    total.add(x, call.k)
                if counts:
                    dsinks[r].add_(found[3])
                del found, x  # not held beside those of the next call
            theirs[r] = [x.total(kinds[r].dtype) for x in into] if stage.transfers else []
        if stage.transfers:
            land()  # those of the stage before, which have travelled beside these calls
            posted, arriving = post_back(work, stage.transfers, theirs, "gradients of keys")
            returning.append((posted, stage.transfers, arriving))

    through(work, shards, compute, "keys for gradients")
    land()
    return sums


def _to_sum_of_sinks(work: Work, rank: int, lse: Tensor) -> Tensor | None:
    """Zeros for the sinks of a rank's heads, to which its calls on its own keys add; None where there are no sinks, or
    these calls do not have each of its queries once with a key that it sees, its own."""
    terms = of_rank(work, rank)
    hidden = any(x is not None for x in (terms.mask, terms.bias, terms.q_documents))
    if terms.sinks is None or hidden or not work.kernel.sinks:
        return None
    return torch.zeros_like(terms.sinks, dtype=lse.dtype) if work.schedule.sums(rank).once else None


def _sinks(work: Work, rank: int, result: Sequence[Tensor | None], found: Tensor | None) -> Tensor | None:
    """The gradient of all sinks by a rank's rows, zero for heads that it does not have. found: of its heads, if its
    calls made it; a sink's share of a row needs no keys otherwise."""
    whole = work.terms[rank].sinks
    if whole is None:
        return None
    out, lse, dout, dlse = result
    if found is None:
        sinks = of_rank(work, rank).sinks.to(lse.dtype)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        found = -(torch.where(lse > NO_KEYS, torch.exp(sinks[None, :, None] - lse), 0.0) * delta).sum((0, 2))
    if work.schedule.degree == 1:
        return found.to(whole.dtype)
    made = torch.zeros_like(whole)
    made[slice(*work.schedule.q_heads[rank])] = found
    return made
