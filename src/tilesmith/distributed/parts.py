"""Parts of the heads, which a ring processes one after another, and what a rank holds of each: arithmetic alone.

What others' keys, sums and gradients take is that of a part, so parts bound a ring's memory. A part is some kv heads
with all query heads that read them, or one kv head with some of them: then its keys travel once for each of its parts,
and its gradients are added up over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilesmith.distributed.pieces import TILE, Call
from tilesmith.distributed.schedule import HeadRange, Schedule, Transfer
from tilesmith.engine.launcher import cdiv

ROOM = 2.2  # shards of keys and values that a ring may hold beside its inputs and results
LOSS = 0.15  # of a pass's time by the model, which holding no more than ROOM may cost
LITTLE = 0.05  # what a rank may lose to hold less where ROOM would cost more than LOSS
TILES = 4  # in fp32, which kernels that divide their last tiles keep for each multiprocessor
LONG = 1 << 16  # tokens of a rank beside which the choice of parts counts these tiles


class HeadPart(NamedTuple):
    """Some of the kv heads, and query heads that read them."""

    q: HeadRange
    kv: HeadRange


class Split(NamedTuple):
    """Into how many parts the kv heads are divided, and into how many the query heads of a part of one kv head."""

    kv: int = 1
    q: int = 1

    @property
    def parts(self) -> int:
        return self.kv * self.q


class Splits(NamedTuple):
    """Of both passes."""

    forward: Split = Split()
    backward: Split = Split()


@dataclass(frozen=True)
class Heads:
    """What the heads of a rank are: dim is of keys and values, their mean where these differ."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    itemsize: int = 2

    @property
    def shard(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.batch * self.kv_heads * self.dim * self.itemsize

    @property
    def query(self) -> int:
        """Bytes of a token's queries."""
        return self.batch * self.heads * self.dim * self.itemsize


def splits(heads: int, kv_heads: int) -> list[Split]:
    """Everything that heads can be divided into, the fewest parts first; of those whose largest parts are alike, the
    one of the fewest."""
    found = [Split(n) for n in _counts(kv_heads)]
    return found + [Split(kv_heads, n) for n in _counts(heads // kv_heads) if n > 1]


def _counts(total: int) -> list[int]:
    return [n for n in range(1, total + 1) if n == 1 or cdiv(total, n) < cdiv(total, n - 1)]


def head_parts(heads: int, kv_heads: int, split: Split) -> tuple[HeadPart, ...]:
    """The parts in the order in which they are worked on: those of one kv head follow each other. Their numbers of
    heads differ by at most one head of those that are divided."""
    group, found = heads // kv_heads, []
    for first, last in _ranges(kv_heads, split.kv):
        for begin, end in _ranges((last - first) * group, split.q):
            found.append(HeadPart((first * group + begin, first * group + end), (first, last)))
    return tuple(found)


def _ranges(total: int, count: int) -> list[HeadRange]:
    return [(i * total // count, (i + 1) * total // count) for i in range(count)]


class _Stage(NamedTuple):
    """Tokens of one rank in one stage: of others' keys that it uses, and, of the same stage, those that it sends.
    rows: the most queries of a call, and of one for results. keys: the most keys of a call; calls: how many."""

    used: int
    sent: int
    rows: int
    answered: int
    keys: int
    calls: int


class Held(NamedTuple):
    """Bytes that a rank holds at most in each pass, beside q, k, v, out and lse, and in the backward dout and the
    gradients; without what kernels keep for each multiprocessor."""

    forward: int
    backward: int


class Holding:
    """What the ranks of a ring hold, for each way to divide the heads.

    kept: bytes that kernels keep at most for all multiprocessors, whatever a call's size: for gradients, and half of
    that for results.
    """

    def __init__(self, plan: Schedule, heads: Heads, multiprocessors: int = 0):
        self.heads, self.tokens = heads, plan.layout.local
        self.kept = multiprocessors * TILES * TILE * heads.dim * 4
        self._ranks = {tuple(stages) for stages in _by_rank(plan)}  # many ranks' are the same

    def held(self, split: Split) -> Held:
        """Of the rank that holds the most."""
        each = [(self._forward(stages, split), self._backward(stages, split)) for stages in self._ranks]
        return Held(*(max(x) for x in zip(*each)))

    def shards(self, split: Split, tokens: int = 0) -> tuple[float, float]:
        """`held` in shards of keys and values, with what kernels keep; tokens: with the part of a shard of so many
        tokens that this is, whatever the shard has."""
        shard, kept = self.heads.shard * self.tokens, self.kept / self.heads.shard / (tokens or self.tokens)
        forward, backward = self.held(split)
        return forward / shard + kept / 2, backward / shard + kept

    def _forward(self, stages: Sequence[_Stage], split: Split) -> int:
        h, sizes = self.heads, _Bytes(self.heads, split)
        most = 0
        for i, (here, next_) in enumerate(zip(stages, (*stages[1:], None))):
            total = sizes.keys * _travelling(here, next_, i) + sizes.result * here.answered
            most = max(most, total + (sizes.result * self.tokens if i else 0))
        if split.parts == 1:  # out is made of the sum when all is over
            most = max(most - h.query * self.tokens, sizes.result * self.tokens)
        return most

    def _backward(self, stages: Sequence[_Stage], split: Split) -> int:
        """dq of a call in the kernel's order and in that of q, beside the sum; gradients of keys are the sum of a
        rank's own, those of this stage, and those of the stage before as sent and as received."""
        h, sizes, most = self.heads, _Bytes(self.heads, split), 0
        for i, (here, next_) in enumerate(zip(stages, (*stages[1:], None))):
            total = sizes.keys * _travelling(here, next_, i) + sizes.statistics * self.tokens
            total += 2 * sizes.dq * here.rows + sizes.dkv * here.keys
            if i:
                total += sizes.dq * self.tokens + sizes.dkv * self.tokens
                total += sizes.dkv * here.used if here.calls > 1 else 0
            elif here.calls > 1 or split.q > 1:
                total += sizes.dkv * self.tokens + (sizes.dq * self.tokens if here.calls > 1 else 0)
            if i > 1:
                total += sizes.dkv * (stages[i - 1].used + stages[i - 1].sent)
            most = max(most, total)
        if split.parts == 1:
            sums = (sizes.dq + sizes.dkv) * self.tokens
            most = max(most - (h.query + h.shard) * self.tokens, sums)
        return most


class _Bytes:
    """Bytes of a token of the largest part: its keys and values, their gradients in fp32, a result in fp32 with its
    lse, a gradient of queries in fp32, and statistics of rows, four numbers in fp32 each."""

    def __init__(self, heads: Heads, split: Split):
        wide, one = max(4, heads.itemsize), heads.batch * heads.dim
        kv_heads = cdiv(heads.kv_heads, split.kv)
        queries = cdiv(kv_heads * (heads.heads // heads.kv_heads), split.q)
        self.keys = 2 * one * kv_heads * heads.itemsize
        self.dkv = self.keys // heads.itemsize * wide
        self.dq = one * queries * wide
        self.statistics = 4 * heads.batch * queries * wide
        self.result = self.dq + heads.batch * queries * wide


def _travelling(here: _Stage, next_: _Stage | None, i: int) -> int:
    """Tokens of keys in use, those that arrive for the next stage, and a copy of those that are sent."""
    return (here.used if i else 0) + (next_.used + next_.sent if next_ else 0)


def _by_rank(plan: Schedule) -> list[list[_Stage]]:
    found: list[list[_Stage]] = [[] for _ in range(plan.layout.size)]
    for stage, answers in zip(plan.stages, plan.answers):
        used, sent = [0] * plan.layout.size, [0] * plan.layout.size
        for move in answers.transfers:
            _count(move, used, sent)
        for r, each in enumerate(found):
            calls = stage.calls[r]
            each.append(
                _Stage(
                    used[r], sent[r], _most(calls, "tokens"), _most(answers.calls[r], "tokens"), _most(calls, "keys"),
                    len(calls),
                )
            )  # fmt: skip
    return found


def _count(move: Transfer, used: list[int], sent: list[int]) -> None:
    used[move.target] += move.tokens
    sent[move.source] += move.tokens


def _most(calls: Sequence[Call], name: str) -> int:
    return max((getattr(call, name) for call in calls), default=0)
