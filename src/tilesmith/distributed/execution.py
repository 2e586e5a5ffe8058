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
from tilesmith.distributed.layout import length
from tilesmith.distributed.pieces import Overlap
from tilesmith.distributed.schedule import HeadRange, Moves, Stage
from tilesmith.distributed.sums import NO_KEYS, Rows
from tilesmith.distributed.tokens import add_runs, copy_runs, landing
from tilesmith.distributed.travel import Shards, Work, cut, of_part, post_back, through, to_begin
from tilesmith.ops.attn.reference import out_like


def forward(work: Work, shards: Shards) -> tuple[dict[int, tuple[Tensor, Tensor]], Shards]:
    """out [B, H, T, Dv] and lse [B, H, T] of each rank's q, k and v; and q, k, v, out and lse as `backward` takes them:
    with a group's tokens and a rank's heads where heads are exchanged, so that they need not travel again."""
    within = _regrouped(work, shards)
    found = _attend(work, within)
    if work.schedule.degree == 1:
        return found, {r: (*shards[r], *found[r]) for r in shards}
    kept = {r: (within[r][0], *(shards if work.schedule.replicates else within)[r][1:3], *found[r]) for r in shards}
    moved = {r: (out, lse.unsqueeze(-1)) for r, (out, lse) in found.items()}
    heads, _ = work.schedule.all_heads
    back = _returned(work, work.schedule.q_moves, moved, heads, "heads of the results", fill=(0.0, NO_KEYS))
    return {r: (out, lse.squeeze(-1)) for r, (out, lse) in back.items()}, kept


def backward(work: Work, kept: Shards, slopes: Mapping[int, Sequence[Tensor | None]]) -> Any:
    """(dq, dk, dv, dsinks or None) of each rank. kept: what `forward` gave; slopes: dout and dlse of each rank's own
    tokens, None for one without a gradient."""
    schedule = work.schedule
    within = {r: x[:3] for r, x in kept.items()}
    if schedule.degree > 1:
        slopes = _slopes_of_heads(work, slopes)
        if schedule.replicates:
            kv = _gathered_keys(work, within)
            within = {r: (x[0], *kv[r]) for r, x in within.items()}
    results = {r: (*x[3:], *slopes[r]) for r, x in kept.items()}
    # kv heads that several ranks of a group have get the sum of what each of them computes
    found = gradients(work, within, results, dict.fromkeys(kept, schedule.replicates))
    if schedule.degree == 1:
        return found
    heads, kv_heads = schedule.all_heads
    if schedule.alike:
        given = {r: x[:3] for r, x in found.items()}
        back = _returned(work, schedule.q_moves, given, heads, "heads of dq, dk, dv")
    else:
        dq = _returned(work, schedule.q_moves, {r: x[:1] for r, x in found.items()}, heads, "heads of dq")
        dkv = {r: x[1:3] for r, x in found.items()}
        dkv = _returned(work, schedule.kv_moves, dkv, kv_heads, "heads of dk, dv", several=schedule.replicates)
        back = {r: (*dq[r], *dkv[r]) for r in kept}
    return {r: (*(g.to(x.dtype) for g, x in zip(back[r], kept[r])), found[r][3]) for r in kept}


def _slopes_of_heads(work: Work, slopes: Mapping[int, Sequence[Tensor | None]]) -> dict[int, Sequence[Tensor | None]]:
    """dout and dlse with a group's tokens and a rank's heads."""
    sent = {r: [dout] + ([] if dlse is None else [dlse.unsqueeze(-1)]) for r, (dout, dlse) in slopes.items()}
    arrived = _gathered(work, work.schedule.q_moves, work.schedule.q_heads, sent, "heads of the gradients")
    return {r: (x[0], x[1].squeeze(-1) if len(x) > 1 else None) for r, x in arrived.items()}


def _regrouped(work: Work, shards: Shards) -> Shards:
    """q, k and v with a group's tokens and a rank's heads."""
    schedule = work.schedule
    if schedule.degree == 1:
        return shards
    if schedule.alike:
        return _gathered(work, schedule.q_moves, schedule.q_heads, shards, "heads of q, k and v")
    q = _gathered(work, schedule.q_moves, schedule.q_heads, {r: x[:1] for r, x in shards.items()}, "heads of q")
    kv = _gathered_keys(work, shards)
    return {r: (*q[r], *kv[r]) for r in shards}


def _gathered_keys(work: Work, shards: Shards) -> dict[int, list[Tensor]]:
    """k and v of q, k and v likewise."""
    kv = {r: x[1:] for r, x in shards.items()}
    return _gathered(work, work.schedule.kv_moves, work.schedule.kv_heads, kv, "heads of k and v")


def _gathered(
    work: Work, moves: Moves, heads: Sequence[HeadRange], shards: Shards, step: str
) -> dict[int, list[Tensor]]:  # fmt: skip
    """What the moves bring each rank, as [B, heads, tokens of the group, D]. heads: those of each rank, which it has
    also where its group has no tokens."""
    into = {}
    for r, tensors in shards.items():
        (first, last), tokens = heads[r], work.schedule.tokens(r)
        into[r] = [landing(x, tokens, last - first) for x in tensors]
    work.ring.wait(work.move(moves, shards, into, step))
    return into


def _returned(
    work: Work, moves: Moves, tensors: Shards, heads: int, step: str, *, several: bool = False,
    fill: Sequence[float] = (0.0, 0.0, 0.0),
) -> dict[int, list[Tensor]]:  # fmt: skip
    """The reverse of `_gathered`, of so many heads. several: ranks hold the same heads, which get their sum, in fp32.
    fill: of padding."""
    posted, landed = post_back(work, moves, tensors, step)
    work.ring.wait(posted)
    found = {}
    for r, mine in tensors.items():
        padded = length(work.schedule.layout.ranges[r]) < work.schedule.layout.local
        found[r] = []
        for i, x in enumerate(mine):
            dtype = torch.float32 if several and x.dtype.itemsize < 4 else x.dtype
            made = landing(x, work.schedule.layout.local, heads, dtype)
            found[r].append(made.fill_(0.0 if several else fill[i]) if several or padded else made)
        for some, runs in moves.placed.get(r, ()):
            places = [total[:, slice(*some)] for total in found[r]]
            if several:
                add_runs(places, landed[r], runs)
            else:
                copy_runs(landed[r], None, places, runs)
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
            length(work.schedule.groups.ranges[r // work.schedule.degree]), None if into is None else into[r],
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
