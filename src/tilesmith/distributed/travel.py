"""Transfers that overlap computation: the work of one call on a rank, what it sends and receives, and its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.distributed.comparison import Answer
from tilesmith.distributed.kernels import Kernel, Terms
from tilesmith.distributed.parts import HeadPart
from tilesmith.distributed.pieces import Call
from tilesmith.distributed.protocol import Parcel, Ring
from tilesmith.distributed.schedule import Moves, Schedule, Stage, Transfer
from tilesmith.distributed.tokens import by_token, landing, run

Shards = Mapping[int, Sequence[Tensor]]  # tensors of each rank


class Work(NamedTuple):
    """One call of context-parallel attention on the ranks of this process; terms: of each of them. parts: of the
    forward and of the backward, heads that are worked on one part after another, so that keys of others and sums are
    those of a part; one part or none: all at once.
    number: of the call among those of its group. answer: whether all ranks make this call; None: they do. early: own
    keys are so few that ranks may work on them while they compare."""

    ring: Ring
    schedule: Schedule
    kernel: Kernel
    terms: Mapping[int, Terms]
    parts: tuple[Sequence[HeadPart], Sequence[HeadPart]] = ((), ())
    number: int = 0
    answer: Answer | None = None
    early: bool = False

    def move(self, moves: Moves, sent: Shards, into: Shards, step: str) -> Any:
        """Begin to move tokens, when all ranks agree. sent, into: [B, heads, T, D], `into` of `tokens.landing`.

        Not before: what a rank of another shape or call receives or sends has another size or order, on which gloo
        closes the connection, and for which NCCL's kernels wait on the device, where nothing can call them back.
        """
        return self.begin(moves, sent, into, step)()

    def begin(self, moves: Moves, sent: Shards, into: Shards, step: str) -> Callable[[], Any]:
        """As `move`; where the ring has a way, it begins when what this gives back is called, beside what a device is
        given before: that need not wait for the host to post transfers. No other may begin before."""
        if self.answer is not None:
            self.answer()
        through_memory = getattr(self.ring, "begin", None)
        begun = None if through_memory is None else through_memory(moves, sent, into, step)
        if begun is not None:
            return begun
        each = ({r: [by_token(x) for x in tensors] for r, tensors in shards.items()} for shards in (sent, into))
        posted = self.ring.post(parcels(self.ring, moves, *each), step)
        return lambda: posted

    def reserve(self, moves: Moves, rank: int, like: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor] | None:
        """Memory like tensors [B, heads, T, D] of a rank, in which what `post_back` of these moves sends next need not
        be copied once more; nothing else may travel before. None where there is none."""
        reserve = getattr(self.ring, "reserve", None)
        if reserve is None:
            return None
        return reserve(moves.back, [(x.shape, dtype) for x in like])

    @property
    def comparing(self) -> bool:
        """Whether ranks have yet to hear if they agree."""
        return self.answer is not None and self.answer.pending


def parcels(ring: Ring, moves: Sequence[Transfer], sent: Shards, into: Shards) -> list[Parcel]:
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


def post_back(work: Work, moves: Moves, given: Shards, step: str) -> tuple[Any, Shards]:
    """Begin to send what ranks computed for others' tokens back to them; where it comes, one of the moves after the
    other, [B, heads, tokens, D]."""
    back = moves.back
    into = {r: [landing(x, back.landed.get(r, 0)) for x in tensors] for r, tensors in given.items()}
    return work.move(back, given, into, step), into


def through(
    work: Work, shards: Shards, compute: Callable[[Stage, Shards], None], what: str = "keys",
    stages: Sequence[Stage] = (),
) -> None:  # fmt: skip
    """Run `compute` on each stage's keys while those of the next travel. stages: those of the schedule, if none are
    given.

    While ranks compare their calls, only local work may be done: on few own keys. Many are worked on while the first
    transfer is under way, which hides more than the comparison takes; what computes of them is launched before the host
    posts that transfer.
    """
    stages = stages or work.schedule.stages
    own = {r: tensors[1:3] for r, tensors in shards.items()}
    keys, pending = own, None
    for i, stage in enumerate(stages):
        if pending is not None:
            work.ring.wait(pending[0])
            keys, pending = pending[1], None
        following = stages[i + 1] if i + 1 < len(stages) else None
        step = f"{what}, step {i + 1} of {len(stages) - 1}" if following else ""
        late = i == 0 and work.early and work.comparing
        begun = fetch(work, following, own, step) if following and not late else None
        if begun and i:  # what is computed of others' keys posts transfers of its own
            pending, begun = begun(), None  # which holds what is sent
        try:
            compute(stage, keys)
        except BaseException:  # the other ranks' transfers end, and so do ours, before their memory is given up
            with contextlib.suppress(Exception):
                if following:
                    work.ring.wait((pending or (begun or fetch(work, following, own, step))())[0])
            raise
        if following and pending is None:
            pending, begun = (begun or fetch(work, following, own, step))(), None


def fetch(work: Work, stage: Stage, sent: Shards, step: str) -> Callable[[], tuple[Any, dict[int, list[Tensor]]]]:
    """What begins to bring the keys of a stage, and gives back what to wait for and where they come."""
    into = {r: [landing(x, stage.tokens[r]) for x in tensors] for r, tensors in sent.items()}
    begun = work.begin(stage.transfers, sent, into, step)
    return lambda: (begun(), into)


def to_begin(work: Work, shards: Shards) -> tuple[dict[int, Terms], dict[int, int]]:
    """The terms of each rank, and the number of its next call, of all parts."""
    return {r: of_rank(work, r) for r in shards}, dict.fromkeys(shards, 0)


def of_part(shards: Shards, part: HeadPart) -> Shards:
    q_heads, kv_heads = slice(*part.q), slice(*part.kv)
    return {r: (q[:, q_heads], k[:, kv_heads], v[:, kv_heads]) for r, (q, k, v) in shards.items()}


def of_rank(work: Work, rank: int) -> Terms:
    terms = work.terms[rank]
    return terms if work.schedule.degree == 1 else terms.of_heads(work.schedule.q_heads[rank])


def cut(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, last = call.k, call.k + call.keys
    return run(q, *call.span), run(k, first, last), run(v, first, last)
