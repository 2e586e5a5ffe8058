"""A schedule of one context-parallel attention: which tokens travel between which ranks, and what each rank computes.

The sequence is shared out over groups of ranks, and within a group over heads. A group of one rank is a ring or an
all-gather, one group of all ranks is Ulysses, what lies between is a hybrid of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from tilesmith.distributed.layout import Layout, Range, joined, length, offsets
from tilesmith.distributed.pieces import (
    COPIED,
    FAR,
    Call,
    Overlap,
    Sight,
    Span,
    apart,
    calls,
    pieces,
    seen,
    several,
    spans,
    within,
)

HeadRange = tuple[int, int]
# One token in so many may have its gradient rounded twice. Were a gradient's error that of rounding alone, a rank's
# would be sqrt(1 + 1/4) = 1.12 times that of one process.
_ROUNDED_TWICE = 4


@dataclass(frozen=True)
class Transfer:
    """`tokens` tokens of rank `source`, from its place `at`, into place `to` of a buffer of rank `target`.

    heads: those of the source's tensor that travel; all if None.
    """

    source: int
    target: int
    at: int
    to: int
    tokens: int
    heads: HeadRange | None = None


class Share(NamedTuple):
    """A part of a rank's tensors that others read. reader: None for all of them; heads: None for all. runs: (first
    token in the tensor, first one in the memory, tokens) of each run, one after another."""

    reader: int | None
    heads: HeadRange | None
    runs: tuple[int, ...]


class Moves(tuple[Transfer, ...]):
    """Transfers that are posted together; every rank knows all of them."""

    @cached_property
    def spans(self) -> dict[int, Range]:
        """Of each rank that others read, the places from the first to the last that any of them does."""
        found: dict[int, Range] = {}
        for move in self:
            if move.source != move.target:
                low, high = found.get(move.source, (move.at, move.at + move.tokens))
                found[move.source] = min(low, move.at), max(high, move.at + move.tokens)
        return found

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], tuple[Transfer, ...]]:
        found: dict[tuple[int, int], list[Transfer]] = {}
        for move in self:
            found.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in found.items()}

    def own(self, rank: int) -> tuple[Transfer, ...]:
        """What a rank copies from its own tensors."""
        return self._pairs.get((rank, rank), ())

    @cached_property
    def own_runs(self) -> dict[int, tuple[tuple[HeadRange | None, tuple[int, ...]], ...]]:
        """What each rank copies from its own tensors: heads, and (from, to, tokens) of each run, one after another."""
        own = {source: self.own(source) for source, target in self._pairs if source == target}
        return {r: _by_heads([(m.heads, m.at, m.to, m.tokens) for m in moves]) for r, moves in own.items()}

    @cached_property
    def shares(self) -> dict[int, tuple[Share, ...]]:
        """What lies apart in the memory of each rank that others read: the heads that each reader reads where these are
        some, else all of it for all of them."""
        found = {}
        for source, (low, _) in self.spans.items():
            read = {reader: self._pairs[source, reader] for reader in self.readers(source)}
            everything = [move for moves in read.values() for move in moves]
            if all(move.heads is None for move in everything):
                found[source] = (Share(None, None, _runs(everything, low)),)
                continue
            apart = {}
            for reader, moves in read.items():
                for move in moves:
                    apart.setdefault((reader, move.heads), []).append(move)
            found[source] = tuple(Share(*which, _runs(moves, low)) for which, moves in apart.items())
        return found

    def readers(self, rank: int) -> tuple[int, ...]:
        """The ranks that read a rank's tensors."""
        return tuple(target for source, target in self._pairs if source == rank != target)

    def reads(self, rank: int) -> list[tuple[int, tuple[Transfer, ...]]]:
        """What a rank reads of each other one: first of the next one before it, so that no rank is read by all."""
        found = [(source, moves) for (source, target), moves in self._pairs.items() if target == rank != source]
        return sorted(found, key=lambda read: (read[0] >= rank, -read[0]))

    @cached_property
    def back(self) -> Moves:
        """The same tokens from targets to sources, into buffers that hold one transfer after another."""
        landed: dict[int, int] = {}
        found = []
        for move in self:
            to = landed.get(move.source, 0)
            found.append(Transfer(move.target, move.source, move.to, to, move.tokens))
            landed[move.source] = to + move.tokens
        return Moves(found)

    @cached_property
    def returning(self) -> dict[int, tuple[tuple[int, int, int], ...]]:
        """Of each source, the runs that come back to it: (from, to) in the buffer of `back`, and their first place."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for move, way in zip(self, self.back):
            found.setdefault(move.source, []).append((way.to, way.to + way.tokens, move.at))
        return {source: tuple(runs) for source, runs in found.items()}

    @cached_property
    def placed(self) -> dict[int, tuple[tuple[HeadRange | None, tuple[int, ...]], ...]]:
        """Of each source, what comes back to it: the heads that had gone, and (first token in the buffer of `back`, its
        own first token, tokens) of each run, one after another."""
        found: dict[int, list[tuple[HeadRange | None, int, int, int]]] = {}
        for move, way in zip(self, self.back):
            found.setdefault(move.source, []).append((move.heads, way.to, move.at, move.tokens))
        return {source: _by_heads(runs) for source, runs in found.items()}

    @cached_property
    def lent(self) -> dict[int, int]:
        """How many tokens other ranks get of each, together."""
        found: dict[int, int] = {}
        for move in self:
            if move.source != move.target:
                found[move.source] = found.get(move.source, 0) + move.tokens
        return found

    @cached_property
    def landed(self) -> dict[int, int]:
        """How many tokens come to each rank."""
        found: dict[int, int] = {}
        for move in self:
            found[move.target] = found.get(move.target, 0) + move.tokens
        return found


def _by_heads(
    runs: Sequence[tuple[HeadRange | None, int, int, int]],
) -> tuple[tuple[HeadRange | None, tuple[int, ...]], ...]:
    """(heads, from, to, tokens) of each run as ops take them: the runs of the same heads one after another."""
    found: dict[HeadRange | None, list[int]] = {}
    for heads, *run in runs:
        found.setdefault(heads, []).extend(run)
    return tuple((heads, tuple(some)) for heads, some in found.items())


def _runs(moves: Sequence[Transfer], first: int) -> tuple[int, ...]:
    """The tokens of these moves, in memory that begins with token `first`."""
    read = joined(sorted((move.at, move.at + move.tokens) for move in moves))
    return tuple(n for low, high in read for n in (low, low - first, high - low))


@dataclass(frozen=True)
class Stage:
    """Keys that arrive together and the calls that use them; one entry for each rank.

    transfers: what brings the keys, none for a rank's own. held: the ranges of the sequence in each rank's buffer.
    whole: whether the calls have all keys that their queries see, so that their results stand in place of those of
    stages before.
    """

    transfers: Moves
    held: tuple[tuple[Range, ...], ...]
    calls: tuple[tuple[Call, ...], ...]
    whole: tuple[bool, ...]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Keys in each rank's buffer."""
        return tuple(map(length, self.held))

    @cached_property
    def tiled(self) -> tuple[bool, ...]:
        """Whether the keys of a rank's calls, one after another, are its buffer."""
        return tuple(
            length(keys) == tokens and joined(keys) == ((0, tokens),)
            for keys, tokens in zip((sorted((c.k, c.k + c.keys) for c in calls) for calls in self.calls), self.tokens)
        )


class Sums(NamedTuple):
    """What a rank adds up.

    answers, calls: results, of the schedule's answers and of its stages. parts: how many parts a gradient of its tokens
    may have. once: whether the calls on its own keys have each of its queries once. nearly_whole: whether these calls'
    gradients are the whole ones but for few tokens, to whose gradients one more part is added.
    """

    answers: Overlap
    calls: Overlap
    parts: int
    once: bool
    nearly_whole: bool


@dataclass(frozen=True)
class Schedule:
    """layout: how callers hold the sequence. groups: how groups of `degree` ranks hold it together. q_moves, kv_moves:
    how tokens and heads come to be exchanged within groups, none if degree is 1. kv_heads: of each rank, which kv heads
    it works on, and q_heads likewise. stages: the first has each rank's own keys. answers: stages for results alone,
    where few queries that see others' keys have calls of their own on all their keys, which come with a copy of the
    rank's own; the same where there are none.
    """

    layout: Layout
    groups: Layout
    degree: int
    q_moves: Moves
    kv_moves: Moves
    q_heads: tuple[HeadRange, ...]
    kv_heads: tuple[HeadRange, ...]
    stages: tuple[Stage, ...]
    answers: tuple[Stage, ...]

    def tokens(self, rank: int) -> int:
        """Tokens in a rank's buffers while it computes."""
        return self.layout.local if self.degree == 1 else length(self.groups.ranges[rank // self.degree])

    def sums(self, rank: int) -> Sums:
        """What a rank adds up; found out once."""
        found = self._sums.get(rank)
        if found is None:
            calls = [call for stage in self.stages for call in stage.calls[rank]]
            whole = any(stage.whole[rank] for stage in self.answers)
            returned = sum(move.source == rank for stage in self.stages for move in stage.transfers)
            own = [call.span for call in self.stages[0].calls[rank]]
            once = length(own) == self.tokens(rank) and not several(own)
            parts = max(len(calls), 1 + returned)
            nearly_whole = once and parts <= 2 and self._nearly_whole(rank)
            found = Sums(Overlap(() if whole else calls), Overlap(calls), parts, once, nearly_whole)
            self._sums[rank] = found
        return found

    def _nearly_whole(self, rank: int) -> bool:
        """Whether at most one in `_ROUNDED_TWICE` of a rank's queries sees others' keys, at most one in as many of its
        keys is seen by others' queries, and no two of its calls share keys of its own."""
        keys = [(call.k, call.k + call.keys) for call in self.stages[0].calls[rank]]
        others = [run for stage in self.stages[1:] for call in stage.calls[rank] for run in call.runs]
        moves = [move for stage in self.stages for move in stage.transfers if move.source == rank]
        lent = [(move.at, move.at + move.tokens) for move in moves]
        most = max(length(joined(sorted(runs))) for runs in (others, lent))
        return not several(keys) and _ROUNDED_TWICE * most <= self.tokens(rank)

    @cached_property
    def _sums(self) -> dict[int, Sums]:
        return {}

    @cached_property
    def all_heads(self) -> tuple[int, int]:
        """Query heads and kv heads of the whole."""
        return max(last for _, last in self.q_heads), max(last for _, last in self.kv_heads)

    @cached_property
    def replicates(self) -> bool:
        """Whether several ranks of a group work on one kv head."""
        return sum(last - first for first, last in self.kv_heads[: self.degree]) > self.all_heads[1]

    @cached_property
    def alike(self) -> bool:
        """Whether queries, keys and values are exchanged alike."""
        return self.q_heads == self.kv_heads

    def pairs(self, rank: int) -> int:
        """Pairs of a query and a key that a rank computes, of each of its heads."""
        return sum(call.pairs for stage in self.stages for call in stage.calls[rank])


@lru_cache(maxsize=256)
def schedule(
    layout: Layout,
    starts: tuple[int, ...],
    sight: Sight,
    degree: int,
    steps: bool,
    heads: int,
    kv_heads: int,
    pack: bool = True,
    gap: int = FAR,
) -> Schedule:
    """The schedule of one call.

    starts: boundaries of the documents. degree: ranks of a group, which share heads. steps: whether keys come from one
    group at a time, so that memory does not grow with the number of groups, or from all at once. pack: whether a call
    may hold several documents, as calls of one batch row can. gap: how many queries without keys, and keys without
    queries, may lie between two documents of a call.
    Raises ValueError where heads cannot be shared out (`shared_heads`).
    """
    groups = [range(first, first + degree) for first in range(0, layout.size, degree)]
    held = layout.grouped(groups) if degree > 1 else layout
    shared = [shared_heads(heads, kv_heads, degree, rank % degree) for rank in range(layout.size)]
    q_moves, kv_moves = (
        _head_moves(layout, held, groups, [each[i] for each in shared]) if degree > 1 else Moves() for i in (0, 1)
    )
    q_heads, kv_shared = (tuple(each[i] for each in shared) for i in (0, 1))
    plan = _Plan(held, starts, sight, degree, pack, gap)
    arriving = plan.arriving(steps)
    stages = plan.stages(arriving)
    answers = plan.answers(arriving, stages)
    return Schedule(layout, held, degree, q_moves, kv_moves, q_heads, kv_shared, stages, answers)


def shared_heads(heads: int, kv_heads: int, degree: int, slot: int) -> tuple[HeadRange, HeadRange]:
    """Query heads and kv heads of rank `slot` of a group of `degree`; kv heads are replicated where there are fewer.

    Raises ValueError where the query heads do not divide, or a rank's would read parts of several kv heads.
    """
    mine, group = heads // degree, heads // kv_heads
    if heads % degree or (mine % group and group % mine):
        raise ValueError(
            f"{heads} query heads over {kv_heads} kv heads cannot be shared out over {degree} ranks: each needs as "
            "many query heads, whole groups of them or parts of one; choose mode 'allgather' or 'ring', or another "
            "degree for 'hybrid'"
        )
    first = slot * mine
    return (first, first + mine), (first // group, (first + mine - 1) // group + 1)


def _head_moves(layout: Layout, held: Layout, groups: Sequence[range], heads: Sequence[HeadRange]) -> Moves:
    moves = []
    for group, ranges in zip(groups, held.ranges):
        place = dict(zip(ranges, offsets(ranges)))
        for source in group:
            own = layout.ranges[source]
            for (start, stop), at in zip(own, offsets(own)):
                begin, to = next((r[0], o) for r, o in place.items() if r[0] <= start and stop <= r[1])
                for target in group:
                    moves.append(Transfer(source, target, at, to + start - begin, stop - start, heads[target]))
    return Moves(moves)


Arriving = list[list[tuple[int, int, int]]]  # of each group, the runs of keys that come to it, and whose they are


class _Plan:
    """What makes the stages of a schedule.

    held: the ranges of groups. own: their spans. Others: the arguments of `schedule`.
    """

    def __init__(
        self, held: Layout, starts: tuple[int, ...], sight: Sight, degree: int, pack: bool, gap: int
    ):  # fmt: skip
        self.held, self.starts, self.sight, self.degree, self.pack, self.gap = held, starts, sight, degree, pack, gap
        self.own = [spans(ranges, starts) for ranges in held.ranges]

    def arriving(self, steps: bool) -> list[Arriving]:
        """What comes together."""
        size = self.held.size
        sources = [[[(r - t) % size] for r in range(size)] for t in range(1, size)]
        if not steps and size > 1:
            sources = [[[s for s in range(size) if s != r] for r in range(size)]]
        found = [[self._runs(self.own[r], asked[r]) for r in range(size)] for asked in sources]
        return [each for each in found if any(each)]

    def stages(self, arriving: Sequence[Arriving]) -> tuple[Stage, ...]:
        made = [self._calls(x, x) for x in self.own]
        size, degree = self.held.size, self.degree
        first = Stage(Moves(), _each(self.held.ranges, degree), _each(made, degree), (False,) * (size * degree))
        return first, *(self._stage(each, self.own, [False] * size) for each in arriving)

    def answers(self, arriving: Sequence[Arriving], stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """The stages for results, of which few queries that see others' keys see their own in the same stage."""
        size = self.held.size
        tiles = [self._tiles([stage.calls[r * self.degree] for stage in stages]) for r in range(size)]
        if not any(tiles):
            return stages
        made = [self._on_own(r, joined(sorted(t for some in tiles[r].values() for t in some))) for r in range(size)]
        found = [replace(stages[0], calls=_each(made, self.degree))]
        for i, each in enumerate(arriving, 1):
            some, queries = [], []
            for r, runs in enumerate(each):
                queries.append(within(self.own[r], tiles[r].get(i, ())) if tiles[r] else self.own[r])
                some.append(sorted([*runs, *(self._runs(queries[r], [r]) if tiles[r] else ())]))
            found.append(self._stage(some, queries, [bool(tiles[r]) and bool(queries[r]) for r in range(size)]))
        return tuple(found)

    def _on_own(self, r: int, tiles: Sequence[Range]) -> tuple[Call, ...]:
        """Calls on a group's own keys, where tiles of queries will have other results: without these queries, if they
        see more here than takes as long as to copy the others' results to their place."""
        whole = self._calls(self.own[r], self.own[r])
        again = sum(call.pairs for call in self._calls(within(self.own[r], tiles), self.own[r]))
        bounds = [0, *(at for tile in tiles for at in tile), length(self.held.ranges[r])]
        others = list(joined(zip(bounds[::2], bounds[1::2])))
        return whole if again <= COPIED * length(others) else self._calls(within(self.own[r], others), self.own[r])

    def _tiles(self, made: Sequence[Sequence[Call]]) -> dict[int, list[Range]]:
        """By stage, tiles of few queries whose keys of others come in this stage alone; none where some come in
        several. made: the calls of each stage."""
        found: dict[int, list[Range]] = {}
        for low, high in apart(made):
            stages = [
                i for i, some in enumerate(made[1:], 1)
                if any(begin < high and low < end for call in some for begin, end in call.runs)
            ]  # fmt: skip
            if len(stages) != 1:
                return {}
            found.setdefault(stages[0], []).append((low, high))
        return found

    def _runs(self, queries: Sequence[Span], sources: Sequence[int]) -> list[tuple[int, int, int]]:
        """The keys of some groups that some queries see, and whose they are."""
        found = ((s, joined(sorted(seen(queries, self.own[s], self.sight)))) for s in sources)
        return sorted((*run, s) for s, runs in found for run in runs)

    def _stage(self, arriving: Arriving, queries: Sequence[Sequence[Span]], whole: Sequence[bool]) -> Stage:
        moves = [move for r, runs in enumerate(arriving) for move in _fetches(self.held, r, runs, self.degree)]
        buffers = [joined((start, stop) for start, stop, _ in runs) for runs in arriving]
        made = [self._calls(q, spans(buffer, self.starts)) for q, buffer in zip(queries, buffers)]
        each = (_each(x, self.degree) for x in (buffers, made, whole))
        return Stage(Moves(_joined(moves)), *each)

    def _calls(self, queries: Sequence[Span], keys: Sequence[Span]) -> tuple[Call, ...]:
        return calls(pieces(queries, keys, self.sight), self.pack, self.gap)


def _fetches(held: Layout, target: int, arriving: Sequence[tuple[int, int, int]], degree: int) -> list[Transfer]:
    moves, to = [], 0
    for start, stop, source in arriving:
        ranges = held.ranges[source]
        for at, (begin, end) in zip(offsets(ranges), ranges):
            if begin <= start and stop <= end:
                for slot in range(degree):
                    places = at + start - begin, to, stop - start
                    moves.append(Transfer(source * degree + slot, target * degree + slot, *places))
        to += stop - start
    return moves


def _joined(moves: Sequence[Transfer]) -> list[Transfer]:
    """The same, pair of ranks by pair, with those made one that follow each other in both buffers."""
    found: dict[tuple[int, int], list[Transfer]] = {}
    for move in moves:
        runs = found.setdefault((move.source, move.target), [])
        if runs and (runs[-1].at + runs[-1].tokens, runs[-1].to + runs[-1].tokens) == (move.at, move.to):
            runs[-1] = replace(runs[-1], tokens=runs[-1].tokens + move.tokens)
        else:
            runs.append(move)
    return [move for runs in found.values() for move in runs]


def _each(of_groups: Sequence, degree: int) -> tuple:
    """What groups have, for each of their ranks."""
    return tuple(value for value in of_groups for _ in range(degree))
