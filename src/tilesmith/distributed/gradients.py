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
from tilesmith.distributed.schedule import Stage
from tilesmith.distributed.sums import NO_KEYS, Sum
from tilesmith.distributed.travel import (
    Landing,
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
) -> dict[int, Sequence[Tensor]]:  # fmt: skip
    """dq, dk and dv of each rank. shared: whether dk and dv will be added to those of other ranks."""
    terms, index = to_begin(work, shards)
    kinds = _partial(work, shards, shared)
    parts = work.parts[1]
    if len(parts) < 2:
        dkv = _sums_of_keys(work, shards, kinds, 1)
        dq = _part(work, shards, results, terms, index, kinds, dkv)
        return {r: [dq.pop(r).total(shards[r][0].dtype), *_rounded(dkv.pop(r), kinds[r], shared[r])] for r in shards}
    whole = {r: [torch.empty_like(x) for x in tensors] for r, tensors in shards.items()}
    for part in parts:
        mine, some = of_part(shards, part), {r: terms[r].of_heads(part.q) for r in shards}
        theirs = {r: [None if x is None else x[:, slice(*part.q)] for x in each] for r, each in results.items()}
        alike = [one for one in parts if one.kv == part.kv]
        if part == alike[0]:
            dkv = _sums_of_keys(work, mine, kinds, len(alike))
        dq = _part(work, mine, theirs, some, index, kinds, dkv)
        for r in shards:
            dq.pop(r).write(whole[r][0][:, slice(*part.q)])
            if part == alike[-1]:
                _write(dkv.pop(r), whole[r][1:], slice(*part.kv))
    return whole


def _write(sums: Sequence[Sum], whole: Sequence[Tensor], heads: slice) -> None:
    for x, into in zip(sums, whole):
        x.write(into[:, heads])


class _Kind(NamedTuple):
    """Of a rank's gradients, whether they are parts of sums, and the dtype of these parts."""

    adds: bool
    dtype: torch.dtype


def _partial(work: Work, shards: Shards, shared: Mapping[int, bool]) -> dict[int, _Kind]:
    """What is rounded once needs no more than its dtype; ranks agree about what travels."""
    stages = work.schedule.stages
    several = any(stage.transfers for stage in stages)
    found = {}
    for r, (q, _, _) in shards.items():
        adds = several or _adds(stages, r) > 1 or shared[r]
        found[r] = _Kind(adds, work.kernel.summand(q) if adds else q.dtype)
    return found


def _sums_of_keys(work: Work, shards: Shards, kinds: Mapping[int, _Kind], times: int) -> dict[int, list[Sum]]:
    """Those of dk and dv, to which each stage adds so many times."""
    return {
        r: [Sum(x, times * _adds(work.schedule.stages, r), kinds[r].dtype) for x in tensors[1:]]
        for r, tensors in shards.items()
    }


def _rounded(dkv: Sequence[Sum], kind: _Kind, shared: bool) -> list[Tensor]:
    return [x.total(kind.dtype if shared else x.like.dtype) for x in dkv]


def _part(
    work: Work, shards: Shards, results: Results, terms: Mapping[int, Terms], index: dict[int, int],
    kinds: Mapping[int, _Kind], dkv: Mapping[int, Sequence[Sum]],
) -> dict[int, Sum]:  # fmt: skip
    """The sum of dq of each rank, for some of the heads; dk and dv are added to `dkv`."""
    sums = {r: Sum(q, _adds(work.schedule.stages, r), kinds[r].dtype) for r, (q, _, _) in shards.items()}
    returning: list[tuple[Any, Landing]] = []  # gradients of one stage's keys, on their way to their owners

    def land() -> None:
        for posted, arrived in returning:
            work.ring.wait(posted)
            for move, tensors in arrived:
                for total, x in zip(dkv[move.source], tensors):
                    total.add(by_head(x), move.at)
        returning.clear()

    def compute(stage: Stage, keys: Shards) -> None:
        theirs = {}
        for r, (q, _, _) in shards.items():
            out, lse, dout, dlse = results[r]
            into = dkv[r]
            if stage.transfers:
                into = [Sum(x, len(stage.calls[r]), kinds[r].dtype) for x in keys[r]]
            for call in stage.calls[r]:
                some = terms[r].of(call, stage.held[r], index[r])
                index[r] += 1
                rows = slice(call.q, call.q + call.tokens)
                slope = None if dlse is None else dlse[:, :, rows].contiguous()
                found = work.kernel.backward(
                    dout[:, :, rows], slope, *cut(call, q, *keys[r]), out[:, :, rows], lse[:, :, rows].contiguous(),
                    call, some, kinds[r].adds,
                )  # fmt: skip
                for total, x, at in zip((sums[r], *into), found, (call.q, call.k, call.k)):
                    total.add(x, at)
                del found, x  # not held beside those of the next call
            theirs[r] = [x.total(kinds[r].dtype) for x in into] if stage.transfers else []
        if stage.transfers:
            land()  # those of the stage before, which have travelled beside these calls
            returning.append(post_back(work, stage.transfers, theirs, "gradients of keys"))

    through(work, shards, compute, "keys for gradients")
    land()
    return sums


def _adds(stages: Sequence[Stage], rank: int) -> int:
    """How many parts the gradients of a rank may have."""
    mine = sum(len(stage.calls[rank]) for stage in stages)
    return max(mine, 1 + sum(move.source == rank for stage in stages for move in stage.transfers))


def sinks_gradient(work: Work, rank: int, result: Sequence[Tensor | None]) -> Tensor:
    """The gradient of all sinks by a rank's rows, zero for heads that it does not have."""
    out, lse, dout, dlse = result
    whole = work.terms[rank].sinks
    sinks = of_rank(work, rank).sinks.to(lse.dtype)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    share = torch.where(lse > NO_KEYS, torch.exp(sinks[None, :, None] - lse), 0.0)
    found = torch.zeros_like(whole, dtype=lse.dtype)
    first, last = (0, len(whole)) if work.schedule.degree == 1 else work.schedule.q_heads[rank]
    found[first:last] = -(share * delta).sum((0, 2))
    return found.to(whole.dtype)
