"""Runs a schedule: the forward and the gradients of context-parallel attention on the ranks of this process.

Tensors are [B, heads, T, D]; what travels is their view [T, B, heads, D], of which a run of tokens is one block of
memory. All functions take and return a tensor for each rank of this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilesmith.distributed.kernels import Kernel, Terms
from tilesmith.distributed.pieces import Call
from tilesmith.distributed.ring import Answer, Parcel, Ring
from tilesmith.distributed.schedule import HeadPart, Schedule, Stage, Transfer
from tilesmith.distributed.sums import NO_KEYS, Rows, Sum
from tilesmith.ops.attn.reference import out_like

Shards = Mapping[int, Sequence[Tensor]]  # tensors of each rank


@dataclass(frozen=True, eq=False)
class Work:
    """One call of context-parallel attention on the ranks of this process; terms: of each of them. parts: heads that
    are worked on one part after another, so that keys of others and sums are those of a part; one part: all at once.
    number: of the call among those of its group. answer: whether all ranks make this call; None: they do. early: own
    keys are so few that ranks may work on them while they compare."""

    ring: Ring
    schedule: Schedule
    kernel: Kernel
    terms: Mapping[int, Terms]
    parts: Sequence[HeadPart] = ()
    number: int = 0
    answer: Answer | None = None
    early: bool = False

    def post(self, parcels: Sequence[Parcel], step: str) -> Any:
        """Begin to move parcels, when all ranks agree.

        Not before: what a rank of another shape or call receives or sends has another size or order, on which gloo
        closes the connection, and for which NCCL's kernels wait on the device, where nothing can call them back.
        """
        if self.answer is not None:
            self.answer()
        return self.ring.post(parcels, step)

    @property
    def comparing(self) -> bool:
        """Whether ranks have yet to hear if they agree."""
        return self.answer is not None and self.answer.pending


def forward(work: Work, shards: Shards) -> dict[int, tuple[Tensor, Tensor]]:
    """out [B, H, T, Dv] and lse [B, H, T] of each rank's q, k and v."""
    within = _regrouped(work, shards)
    found = _attend(work, within)
    if work.schedule.degree == 1:
        return found
    moved = {r: (out, lse.unsqueeze(-1)) for r, (out, lse) in found.items()}
    heads = {r: shards[r][0].shape[1] for r in shards}
    back = _returned(work, work.schedule.q_moves, moved, heads, "heads of the results", (0.0, NO_KEYS))
    return {r: (out, lse.squeeze(-1)) for r, (out, lse) in back.items()}


def backward(work: Work, shards: Shards, results: Shards, slopes: Mapping[int, Sequence[Tensor | None]]) -> Any:
    """(dq, dk, dv, dsinks or None) of each rank. shards: its q, k and v; results: out and lse; slopes: dout and dlse,
    None for one without a gradient."""
    schedule, asks = work.schedule, {r: work.terms[r].sinks is not None for r in shards}
    tensors = {r: (*results[r], *slopes[r]) for r in shards}
    if schedule.degree > 1:
        with_lse = {}
        for r, (out, lse, dout, dlse) in tensors.items():
            moved = [out, lse.unsqueeze(-1), dout]
            with_lse[r] = moved + ([] if dlse is None else [dlse.unsqueeze(-1)])
        arrived = _gathered(work, schedule.q_moves, with_lse, "heads of the gradients")
        tensors = {
            r: (x[0], x[1].squeeze(-1), x[2], x[3].squeeze(-1) if len(x) > 3 else None) for r, x in arrived.items()
        }
    within = _regrouped(work, shards)
    # kv heads that several ranks of a group have get the sum of what each of them computes
    shared = {r: schedule.degree * within[r][1].shape[1] > shards[r][1].shape[1] for r in shards}
    gradients = _gradients(work, within, tensors, shared)
    dsinks = {r: _dsinks(work, r, tensors[r]) if asks[r] else None for r in shards}
    if schedule.degree > 1:
        heads = {r: shards[r][0].shape[1] for r in shards}
        kv_heads = {r: shards[r][1].shape[1] for r in shards}
        dq = _returned(work, schedule.q_moves, {r: g[:1] for r, g in gradients.items()}, heads, "heads of dq")
        dkv = _returned(work, schedule.kv_moves, {r: g[1:] for r, g in gradients.items()}, kv_heads, "heads of dk, dv")
        gradients = {r: [g.to(x.dtype) for g, x in zip((*dq[r], *dkv[r]), shards[r])] for r in shards}
    return {r: (*gradients[r], dsinks[r]) for r in shards}


def _regrouped(work: Work, shards: Shards) -> Shards:
    """q, k and v with a group's tokens and a rank's heads."""
    if work.schedule.degree == 1:
        return shards
    q = _gathered(work, work.schedule.q_moves, {r: x[:1] for r, x in shards.items()}, "heads of q")
    kv = _gathered(work, work.schedule.kv_moves, {r: x[1:] for r, x in shards.items()}, "heads of k and v")
    return {r: (*q[r], *kv[r]) for r in shards}


def _gathered(work: Work, moves: Sequence[Transfer], shards: Shards, step: str) -> dict[int, list[Tensor]]:
    """What the moves bring each rank, as [B, heads, tokens of the group, D]."""
    heads = {move.target: move.heads[1] - move.heads[0] for move in moves}
    into = {}
    for r, tensors in shards.items():
        count, tokens = heads.get(r, 0), work.schedule.tokens(r)
        into[r] = [x.new_empty(tokens, x.shape[0], count, x.shape[3]) for x in tensors]
    sent = {r: [_by_token(x) for x in tensors] for r, tensors in shards.items()}
    work.ring.wait(work.post(_parcels(work.ring, moves, sent, into), step))
    return {r: [_by_head(x) for x in tensors] for r, tensors in into.items()}


def _returned(
    work: Work, moves: Sequence[Transfer], tensors: Shards, heads: Mapping[int, int], step: str,
    fill: Sequence[float] = (0.0, 0.0),
) -> dict[int, list[Tensor]]:  # fmt: skip
    """The reverse of `_gathered`; a head that several ranks held gets their sum, in fp32. fill: of padding."""
    posted, landing = _post_back(work, moves, tensors, step)
    work.ring.wait(posted)
    replicas = {move.target: move.heads[1] - move.heads[0] for move in moves}
    found = {}
    for r, held in tensors.items():
        several = work.schedule.degree * replicas.get(r, 0) > heads[r]
        dtypes = [torch.float32 if several and x.dtype.itemsize < 4 else x.dtype for x in held]
        value = [0.0] * len(held) if several else fill
        found[r] = [
            x.new_full((work.schedule.layout.local, x.shape[0], heads[r], x.shape[3]), value[i], dtype=dtypes[i])
            for i, x in enumerate(held)
        ]
        for move, arrived in landing:
            if move.source == r:
                for total, x in zip(found[r], arrived):
                    place = total[move.at : move.at + move.tokens, :, slice(*move.heads)]
                    place.add_(x) if several else place.copy_(x)
        found[r] = [_by_head(total) for total in found[r]]
    return found


def _parcels(ring: Ring, moves: Sequence[Transfer], sent: Shards, into: Shards) -> list[Parcel]:
    """Parcels of the moves that begin or end in this process; tensors by token."""
    parcels = []
    for move in moves:
        here, there = move.source in ring.ranks, move.target in ring.ranks
        if not (here or there):
            continue
        many = len(sent[move.source] if here else into[move.target])
        for i in range(many):
            give = take = None
            if here:
                give = sent[move.source][i][move.at : move.at + move.tokens]
                give = give if move.heads is None else give[:, :, move.heads[0] : move.heads[1]]
            if there:
                take = into[move.target][i][move.to : move.to + move.tokens]
            parcels.append(Parcel(move.source, move.target, give, take))
    return parcels


Landing = list[tuple[Transfer, list[Tensor]]]


def _post_back(work: Work, moves: Sequence[Transfer], given: Shards, step: str) -> tuple[Any, Landing]:
    """Begin to send what ranks computed for others' tokens back to them."""
    ring, parcels, landing = work.ring, [], []
    sent = {r: [_by_token(x) for x in tensors] for r, tensors in given.items()}
    for move in moves:
        here, there = move.target in ring.ranks, move.source in ring.ranks
        if not (here or there):
            continue
        arriving = []
        for i, like in enumerate(sent[move.source if there else move.target]):
            give = sent[move.target][i][move.to : move.to + move.tokens] if here else None
            take = None
            if there:
                many = like.shape[2] if move.heads is None else move.heads[1] - move.heads[0]
                take = like.new_empty(move.tokens, like.shape[1], many, like.shape[3])
                arriving.append(take)
            parcels.append(Parcel(move.target, move.source, give, take))
        if there:
            landing.append((move, arriving))
    return work.post(parcels, step), landing


def _attend(work: Work, shards: Shards) -> dict[int, tuple[Tensor, Tensor]]:
    """out and lse of each rank."""
    terms, index = _to_begin(work, shards)
    if len(work.parts) < 2:
        return _attend_part(work, shards, terms, index)
    whole = {}
    for r, (q, _, v) in shards.items():
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        whole[r] = out_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)
    for part in work.parts:
        found = _attend_part(work, _of_part(shards, part), {r: terms[r].of_heads(part.q) for r in shards}, index)
        for r in shards:
            for x, piece in zip(whole[r], found.pop(r)):
                x[:, slice(*part.q)] = piece
    return whole


def _to_begin(work: Work, shards: Shards) -> tuple[dict[int, Terms], dict[int, int]]:
    """The terms of each rank, and the number of its next call, of all parts."""
    return {r: _of_rank(work, r) for r in shards}, dict.fromkeys(shards, 0)


def _of_part(shards: Shards, part: HeadPart) -> Shards:
    q_heads, kv_heads = slice(*part.q), slice(*part.kv)
    return {r: (q[:, q_heads], k[:, kv_heads], v[:, kv_heads]) for r, (q, k, v) in shards.items()}


def _attend_part(
    work: Work, shards: Shards, terms: Mapping[int, Terms], index: dict[int, int]
) -> dict[int, tuple[Tensor, Tensor]]:
    # dropout's seeds are those of the gradients' calls
    drops = any(x.seed is not None for x in terms.values())
    rows = {
        r: Rows(
            q, v.shape[3], [c for s in work.schedule.stages for c in _calls(s, r, drops)], work.kernel.summand(q),
            terms[r].sinks,
        )
        for r, (q, _, v) in shards.items()
    }  # fmt: skip

    def compute(stage: Stage, keys: Shards) -> None:
        for r, (q, _, _) in shards.items():
            for call in _calls(stage, r, drops):
                some, adds = terms[r].of(call, stage.held[r], index[r]), rows[r].adds(call)
                if not adds:
                    some = replace(some, sinks=terms[r].sinks)
                index[r] += 1
                rows[r].take(call, *work.kernel.forward(*_cut(call, q, *keys[r]), call, some, adds))

    _through(work, shards, compute)
    return {r: rows.pop(r).result() for r in shards}


def _calls(stage: Stage, rank: int, drops: bool) -> Sequence[Call]:
    """A rank's calls for results."""
    return (stage.calls if drops else stage.answers)[rank]


def _through(work: Work, shards: Shards, compute: Callable[[Stage, Shards], None], what: str = "keys") -> None:
    """Run `compute` on each stage's keys while those of the next travel.

    While ranks compare their calls, only local work may be done: on few own keys. Many are worked on while the first
    transfer is under way, which hides more than the comparison takes.
    """
    stages = work.schedule.stages
    own = {r: tensors[1:3] for r, tensors in shards.items()}
    sent = {r: [_by_token(x) for x in tensors] for r, tensors in own.items()}
    keys, pending = own, None
    for i, stage in enumerate(stages):
        if pending is not None:
            work.ring.wait(pending[0])
            keys = {r: [_by_head(x) for x in tensors] for r, tensors in pending[1].items()}
            pending = None
        following = stages[i + 1 : i + 2]
        step, late = f"{what}, step {i + 1} of {len(stages) - 1}", i == 0 and work.early and work.comparing
        if following and not late:
            pending = _fetch(work, following[0], sent, step)
        try:
            compute(stage, keys)
        except BaseException:  # the other ranks' transfers end, and so do ours, before their memory is given up
            with contextlib.suppress(Exception):
                if following:
                    work.ring.wait((pending or _fetch(work, following[0], sent, step))[0])
            raise
        if following and late:
            pending = _fetch(work, following[0], sent, step)


def _fetch(work: Work, stage: Stage, sent: Shards, step: str) -> tuple[Any, dict[int, list[Tensor]]]:
    into = {}
    for r, tensors in sent.items():
        tokens = sum(stop - start for start, stop in stage.held[r])
        into[r] = [x.new_empty(tokens, *x.shape[1:]) for x in tensors]
    return work.post(_parcels(work.ring, stage.transfers, sent, into), step), into


def _gradients(
    work: Work, shards: Shards, results: Mapping[int, Sequence[Tensor | None]], shared: Mapping[int, bool]
) -> dict[int, Sequence[Tensor]]:
    """dq, dk and dv of each rank. results: its out, lse, dout and dlse. shared: whether dk and dv will be added to
    those of other ranks."""
    terms, index = _to_begin(work, shards)
    if len(work.parts) < 2:
        return _gradients_part(work, shards, results, shared, terms, index)
    whole = {r: [torch.empty_like(x) for x in tensors] for r, tensors in shards.items()}
    for part in work.parts:
        q_heads, kv_heads = slice(*part.q), slice(*part.kv)
        theirs = {r: [None if x is None else x[:, q_heads] for x in tensors] for r, tensors in results.items()}
        mine = {r: terms[r].of_heads(part.q) for r in shards}
        found = _gradients_part(work, _of_part(shards, part), theirs, shared, mine, index)
        for r in shards:
            for x, piece, heads in zip(whole[r], found.pop(r), (q_heads, kv_heads, kv_heads)):
                x[:, heads] = piece
    return whole


def _gradients_part(
    work: Work, shards: Shards, results: Mapping[int, Sequence[Tensor | None]], shared: Mapping[int, bool],
    terms: Mapping[int, Terms], index: dict[int, int],
) -> dict[int, Sequence[Tensor]]:  # fmt: skip
    stages = work.schedule.stages
    several = any(stage.transfers for stage in stages)
    parts = {r: _adds(stages, r) for r in shards}
    # what is rounded once needs no more than its dtype; ranks agree about what travels
    summand = {r: several or parts[r] > 1 or shared[r] for r in shards}
    partial = {r: work.kernel.summand(q) if summand[r] else q.dtype for r, (q, _, _) in shards.items()}
    sums = {r: [Sum(x, parts[r], partial[r]) for x in tensors] for r, tensors in shards.items()}
    returning: list[tuple[Any, Landing]] = []  # gradients of one stage's keys, on their way to their owners

    def land() -> None:
        for posted, arrived in returning:
            work.ring.wait(posted)
            for move, tensors in arrived:
                for total, x in zip(sums[move.source][1:], tensors):
                    total.add(_by_head(x), move.at)
        returning.clear()

    def compute(stage: Stage, keys: Shards) -> None:
        theirs = {}
        for r, (q, _, _) in shards.items():
            out, lse, dout, dlse = results[r]
            dkv = sums[r][1:]
            if stage.transfers:
                dkv = [Sum(x, len(stage.calls[r]), partial[r]) for x in keys[r]]
            for call in stage.calls[r]:
                some = terms[r].of(call, stage.held[r], index[r])
                index[r] += 1
                rows = slice(call.q, call.q + call.tokens)
                slope = None if dlse is None else dlse[:, :, rows].contiguous()
                dq, dk, dv = work.kernel.backward(
                    dout[:, :, rows], slope, *_cut(call, q, *keys[r]), out[:, :, rows], lse[:, :, rows].contiguous(),
                    call, some, summand[r],
                )  # fmt: skip
                sums[r][0].add(dq, call.q)
                dkv[0].add(dk, call.k)
                dkv[1].add(dv, call.k)
            theirs[r] = [x.total(partial[r]) for x in dkv] if stage.transfers else []
        if stage.transfers:
            land()  # those of the stage before, which have travelled beside these calls
            returning.append(_post_back(work, stage.transfers, theirs, "gradients of keys"))

    _through(work, shards, compute, "keys for gradients")
    land()
    found = {}
    for r in shards:
        dq, *dkv = sums.pop(r)
        found[r] = [dq.total(dq.like.dtype), *(x.total(partial[r] if shared[r] else x.like.dtype) for x in dkv)]
    return found


def _adds(stages: Sequence[Stage], rank: int) -> int:
    """How many parts the gradients of a rank may have."""
    mine = sum(len(stage.calls[rank]) for stage in stages)
    return max(mine, 1 + sum(move.source == rank for stage in stages for move in stage.transfers))


def _dsinks(work: Work, rank: int, result: Sequence[Tensor | None]) -> Tensor:
    """The gradient of all sinks by a rank's rows, zero for heads that it does not have."""
    out, lse, dout, dlse = result
    whole = work.terms[rank].sinks
    sinks = _of_rank(work, rank).sinks.to(lse.dtype)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    share = torch.where(lse > NO_KEYS, torch.exp(sinks[None, :, None] - lse), 0.0)
    found = torch.zeros_like(whole, dtype=lse.dtype)
    first, last = (0, len(whole)) if work.schedule.degree == 1 else work.schedule.q_heads[rank]
    found[first:last] = -(share * delta).sum((0, 2))
    return found.to(whole.dtype)


def _of_rank(work: Work, rank: int) -> Terms:
    terms = work.terms[rank]
    return terms if work.schedule.degree == 1 else terms.of_heads(work.schedule.q_heads[rank])


def _cut(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = slice(call.q, call.q + call.tokens), slice(call.k, call.k + call.keys)
    return q[:, :, rows], k[:, :, keys], v[:, :, keys]


def _by_token(x: Tensor) -> Tensor:
    """[B, heads, T, D] as [T, B, heads, D]."""
    return x.permute(2, 0, 1, 3)


def _by_head(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)
