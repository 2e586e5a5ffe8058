"""Runs a schedule: the forward and the gradients of context-parallel attention on the ranks of this process.

All functions take and return tensors [B, heads, T, D] for each rank of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.distributed.gradients import gradients
from tilesmith.distributed.kernels import Terms
from tilesmith.distributed.pieces import Overlap
from tilesmith.distributed.schedule import Moves, Stage
from tilesmith.distributed.sums import NO_KEYS, Rows
from tilesmith.distributed.travel import (
    Shards,
    Work,
    by_head,
    by_token,
    cut,
    of_part,
    post_back,
    through,
    to_begin,
)
from tilesmith.ops.attn.reference import out_like


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
    schedule = work.schedule
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
    found = gradients(work, within, tensors, shared)
    dsinks = {r: each[3] for r, each in found.items()}
    if schedule.degree > 1:
        heads = {r: shards[r][0].shape[1] for r in shards}
        kv_heads = {r: shards[r][1].shape[1] for r in shards}
        dq = _returned(work, schedule.q_moves, {r: g[:1] for r, g in found.items()}, heads, "heads of dq")
        dkv = _returned(work, schedule.kv_moves, {r: g[1:3] for r, g in found.items()}, kv_heads, "heads of dk, dv")
        found = {r: [g.to(x.dtype) for g, x in zip((*dq[r], *dkv[r]), shards[r])] for r in shards}
    return {r: (*found[r][:3], dsinks[r]) for r in shards}


def _regrouped(work: Work, shards: Shards) -> Shards:
    """q, k and v with a group's tokens and a rank's heads."""
    if work.schedule.degree == 1:
        return shards
    q = _gathered(work, work.schedule.q_moves, {r: x[:1] for r, x in shards.items()}, "heads of q")
    kv = _gathered(work, work.schedule.kv_moves, {r: x[1:] for r, x in shards.items()}, "heads of k and v")
    return {r: (*q[r], *kv[r]) for r in shards}


def _gathered(work: Work, moves: Moves, shards: Shards, step: str) -> dict[int, list[Tensor]]:
    """What the moves bring each rank, as [B, heads, tokens of the group, D]."""
    heads = {move.target: move.heads[1] - move.heads[0] for move in moves}
    into = {}
    for r, tensors in shards.items():
        count, tokens = heads.get(r, 0), work.schedule.tokens(r)
        into[r] = [x.new_empty(tokens, x.shape[0], count, x.shape[3]) for x in tensors]
    sent = {r: [by_token(x) for x in tensors] for r, tensors in shards.items()}
    work.ring.wait(work.move(moves, sent, into, step))
    return {r: [by_head(x) for x in tensors] for r, tensors in into.items()}


def _returned(
    work: Work, moves: Moves, tensors: Shards, heads: Mapping[int, int], step: str,
    fill: Sequence[float] = (0.0, 0.0),
) -> dict[int, list[Tensor]]:  # fmt: skip
    """The reverse of `_gathered`; a head that several ranks held gets their sum, in fp32. fill: of padding."""
    posted, landed = post_back(work, moves, tensors, step)
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
        for move, way in zip(moves, moves.back):
            if move.source == r:
                for total, x in zip(found[r], landed[r]):
                    place = total[move.at : move.at + move.tokens, :, slice(*move.heads)]
                    arrived = x[way.to : way.to + way.tokens]
                    place.add_(arrived) if several else place.copy_(arrived)
        found[r] = [by_head(total) for total in found[r]]
    return found


def _attend(work: Work, shards: Shards) -> dict[int, tuple[Tensor, Tensor]]:
    """out and lse of each rank."""
    terms, index = to_begin(work, shards)
    parts = work.parts[0]
    if len(parts) < 2:
        return _attend_part(work, shards, terms, index)
    whole = {}
    for r, (q, _, v) in shards.items():
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        whole[r] = out_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)
    for part in parts:
        some = {r: terms[r].of_heads(part.q) for r in shards}
        into = {r: [x[:, slice(*part.q)] for x in found] for r, found in whole.items()}
        _attend_part(work, of_part(shards, part), some, index, into)
    return whole


def _attend_part(
    work: Work, shards: Shards, terms: Mapping[int, Terms], index: dict[int, int], into: Shards | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """into: out and lse of each rank that are to be written."""
    # dropout's seeds are those of the gradients' calls
    drops = any(x.seed is not None for x in terms.values())
    rows = {
        r: Rows(
            q, v.shape[3], _overlap(work, r, drops), work.kernel.summand(q), terms[r].sinks,
            None if into is None else into[r],
        )
        for r, (q, _, v) in shards.items()
    }  # fmt: skip

    def compute(stage: Stage, keys: Shards) -> None:
        for r, (q, _, _) in shards.items():
            for call in stage.calls[r]:
                adds = rows[r].adds(call)
                some = terms[r].of(call, stage.held[r], index[r], None if adds else terms[r].sinks)
                index[r] += 1
                rows[r].take(call, *work.kernel.forward(*cut(call, q, *keys[r]), call, some, adds))

    through(work, shards, compute, stages=work.schedule.stages if drops else work.schedule.answers)
    return {r: rows.pop(r).result() for r in shards}


def _overlap(work: Work, rank: int, drops: bool) -> Overlap:
    sums = work.schedule.sums(rank)
    return sums.calls if drops else sums.answers
