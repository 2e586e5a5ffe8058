"""What a rank computes, as calls of attention on ranges of its queries and of keys: functions of a layout and a mask.

A span is a run of tokens of one document with its place in a buffer. A piece is a span of queries with a span of keys,
cut to what can see each other. Pieces that one call of the kernel can serve are made one call: those whose queries and
keys ascend together become its packed documents, and what lies between them documents without keys or without queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from tilesmith.distributed.layout import Range, joined, length

FAR = 1 << 62  # an unlimited side of a window
TILE = 128  # queries that kernels work on together
FEW = 8  # queries are few where they are at most this part of all
# Pairs of a query and a key of a head in whose time its row of results is set to zero and copied: 6 bytes an element, 4
# FLOPs, and 6.2e14 FLOP/s by 4.8e12 bytes/s of an H200; 150 and 225 on an A100 and a B200.
COPIED = 194


@dataclass(frozen=True)
class Sight:
    """What of its document a query sees: `left` keys before it and `right` keys behind it; FAR is unlimited."""

    left: int = FAR
    right: int = FAR


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of the sequence, of document `document`, at `at` in a buffer."""

    start: int
    stop: int
    at: int
    document: int = 0


@dataclass(frozen=True)
class Piece:
    """Queries [q, q + tokens) of a buffer with keys [k, k + keys) of another.

    left, right: the window, aligned bottom right as attention aligns it: the last query and the last key meet.
    """

    q: int
    tokens: int
    k: int
    keys: int
    left: int
    right: int

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.left >= self.keys - 1 and self.right >= self.tokens - 1


@dataclass(frozen=True)
class Call:
    """One call of attention: its ranges of queries and keys, its window (-1 is unlimited), and boundaries if packed.

    cu_q, cu_k: starts of the packed pieces within the ranges, and the end; empty for one piece. Pieces without keys
    have the queries between others, and pieces without queries the keys.
    """

    q: int
    tokens: int
    k: int
    keys: int
    left: int = -1
    right: int = -1
    cu_q: tuple[int, ...] = ()
    cu_k: tuple[int, ...] = ()

    @cached_property
    def span(self) -> Range:
        """Its queries."""
        return self.q, self.q + self.tokens

    @cached_property
    def runs(self) -> tuple[Range, ...]:
        """Those of its queries that have keys, ascending."""
        if not self.cu_q:
            return (self.span,)
        sizes = zip(pairwise(self.cu_q), pairwise(self.cu_k))
        return joined((self.q + start, self.q + stop) for (start, stop), (first, end) in sizes if first < end)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a packed piece, 0 if there are none."""
        queries, keys = (max((b - a for a, b in pairwise(cu)), default=0) for cu in (self.cu_q, self.cu_k))
        return queries, keys

    @property
    def rows(self) -> int:
        """How many of its queries have keys."""
        return length(self.runs)

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        if not self.cu_q:
            return _pairs(self.tokens, self.keys, self.left, self.right)
        sizes = zip(self.cu_q, self.cu_q[1:], self.cu_k, self.cu_k[1:])
        return sum(_pairs(b - a, d - c, self.left, self.right) for a, b, c, d in sizes)


def spans(ranges: Sequence[Range], starts: Sequence[int], at: int = 0) -> list[Span]:
    """The ranges cut at the documents' boundaries, one after another in a buffer from `at`; tokens behind the last
    document are left out but have their place."""
    found, document = [], 0
    for begin, end in ranges:
        document = 0 if document and starts[document] > begin else document
        while document + 1 < len(starts) - 1 and starts[document + 1] <= begin:
            document += 1
        here = document
        while here < len(starts) - 1 and starts[here] < end:
            start, stop = max(begin, starts[here]), min(end, starts[here + 1])
            if start < stop:
                found.append(Span(start, stop, at + start - begin, here))
            here += 1
        at += end - begin
    return found


def pieces(queries: Iterable[Span], keys: Iterable[Span], sight: Sight) -> list[Piece]:
    """The pieces of all queries with all keys, in the order of the queries."""
    of_document: dict[int, list[Span]] = {}
    for span in keys:
        of_document.setdefault(span.document, []).append(span)
    found = []
    for query in queries:
        for key in of_document.get(query.document, ()):
            piece = _piece(query, key, sight)
            if piece is not None:
                found.append(piece)
    return found


def seen(queries: Iterable[Span], keys: Iterable[Span], sight: Sight) -> list[Range]:
    """The ranges of tokens among `keys` that some query sees, in any order."""
    found = []
    keys = list(keys)
    for query in queries:
        for key in keys:
            if key.document == query.document:
                _, _, start, stop = _cut(query, key, sight)
                if start < stop:
                    found.append((start, stop))
    return found


def calls(found: Sequence[Piece], pack: bool = True, gap: int = FAR) -> tuple[Call, ...]:
    """The pieces as few calls: pieces that are one rectangle or one triangle together become one piece, and pieces
    whose queries and keys ascend become documents of one packed call, if `pack`: it has one batch row.

    gap: the most queries, and the most keys, between two pieces of a call. In the order of their queries, each piece
    goes to the call that has used the most keys before its own, which leaves the others to pieces that need more. With
    any gap, and where no window keeps pieces apart, no fewer calls can have them (so trapezoid graphs are coloured:
    Felsner, Müller, Wernisch, 1997).
    """
    groups: list[_Group] = []
    for piece in _merged(sorted(found, key=lambda piece: (piece.q, piece.k))):
        ready = sorted(groups, key=lambda group: group.ends, reverse=True) if pack else ()
        if not any(group.takes(piece, gap) for group in ready):
            groups.append(_Group(piece))
    return tuple(group.call() for group in groups)


def several(spans: Iterable[Range]) -> list[Range]:
    """What more than one of the spans covers, ascending."""
    found, here, begin = [], 0, 0
    spans = list(spans)
    for at, change in sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans]):
        if here == 1 and change == 1:
            begin = at
        elif here == 2 and change == -1 and begin < at:
            found.append((begin, at))
        here += change
    return list(joined(found))


class Overlap:
    """Which queries several of some calls have, so that results of these calls are parts of sums.

    ranges: of queries, one for each sum. place: of a call's queries, which sum its result is part of; none where it is
    not. most: the most calls that one query is in.
    """

    def __init__(self, calls: Sequence[Call]):
        spans = [call.span for call in calls]
        shared = several(spans)
        summed = {(low, high) for low, high in spans if any(low < end and begin < high for begin, end in shared)}
        self.ranges = joined(sorted(summed))
        self.place = {
            (low, high): next(i for i, (begin, end) in enumerate(self.ranges) if begin <= low and high <= end)
            for low, high in summed
        }
        self.most = _most(spans)


def _most(spans: Sequence[Range]) -> int:
    """The most spans that one token lies in."""
    ends = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    return max(accumulate((change for _, change in ends), initial=0))


def apart(made: Sequence[Sequence[Call]]) -> tuple[Range, ...]:
    """The tiles of queries that several calls share, if they are few among all and the first calls, on keys that are
    here, share none: such queries can be answered by one call on all the keys that they see. Else none."""
    runs = [[run for call in some for run in call.runs] for some in made]
    last = max((stop for some in runs for _, stop in some), default=0)
    shared = several(run for some in runs for run in some)
    tiles = joined((start // TILE * TILE, min(-(-stop // TILE) * TILE, last)) for start, stop in shared)
    return tiles if FEW * length(tiles) <= last and not several(runs[0]) else ()


def within(spans: Iterable[Span], ranges: Sequence[Range]) -> list[Span]:
    """What of the spans has its place in some ranges of their buffer."""
    found = []
    for span in spans:
        for begin, end in ranges:
            low, high = max(begin, span.at), min(end, span.at + span.stop - span.start)
            if low < high:
                start = span.start + low - span.at
                found.append(Span(start, start + high - low, low, span.document))
    return found


def _cut(query: Span, key: Span, sight: Sight) -> tuple[int, int, int, int]:
    """First and last query and key that see something of the other."""
    q_start, q_stop, k_start, k_stop = query.start, query.stop, key.start, key.stop
    k_start, k_stop = max(k_start, q_start - sight.left), min(k_stop, q_stop + sight.right)
    q_start, q_stop = max(q_start, k_start - sight.right), min(q_stop, k_stop + sight.left)
    return (q_start, q_stop, k_start, k_stop) if q_start < q_stop else (0, 0, 0, 0)


def _piece(query: Span, key: Span, sight: Sight) -> Piece | None:
    q_start, q_stop, k_start, k_stop = _cut(query, key, sight)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    # attention lets the last query and the last key meet, which stand q_stop - k_stop apart
    behind = q_stop - k_stop
    left = FAR if sight.left >= FAR else sight.left - behind
    right = FAR if sight.right >= FAR else sight.right + behind
    q, k = query.at + q_start - query.start, key.at + k_start - key.start
    return Piece(q, q_stop - q_start, k, k_stop - k_start, left, right)


def _merged(ordered: Sequence[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for piece in ordered:
        found.append(piece)
        while len(found) > 1:
            one = _joined(found[-2], found[-1])
            if one is None:
                break
            found[-2:] = [one]
    return found


def _joined(a: Piece, b: Piece) -> Piece | None:
    """One piece that says the same as a and b, if there is one."""
    if (a.q, a.tokens) == (b.q, b.tokens) and b.k == a.k + a.keys and a.full:
        if b.full:
            return replace(a, keys=a.keys + b.keys, left=FAR, right=FAR)
        if b.left >= b.keys - 1:  # the keys of b end the row, and only they are cut
            return replace(b, k=a.k, keys=a.keys + b.keys, left=FAR)
    if b.q != a.q + a.tokens or b.k != a.k:
        return None
    if a.keys == b.keys and a.full and b.full:
        return replace(a, tokens=a.tokens + b.tokens, left=FAR, right=FAR)
    # a triangle that goes on: b sees the keys of a and its own, which no query of a sees
    unlimited = a.left >= a.keys - 1 and b.left >= b.keys - 1
    if unlimited and b.keys > a.keys and a.right == b.right == 0 and b.keys - a.keys == b.tokens:
        return Piece(a.q, a.tokens + b.tokens, a.k, b.keys, FAR, 0)
    return None


class _Group:
    """Pieces that one call serves, and the window that suits all of them."""

    def __init__(self, piece: Piece):
        self.pieces = [piece]
        self.left = None if piece.left >= piece.keys - 1 else piece.left
        self.right = None if piece.right >= piece.tokens - 1 else piece.right

    @property
    def ends(self) -> Range:
        """Where its keys end, and its queries."""
        last = self.pieces[-1]
        return last.k + last.keys, last.q + last.tokens

    def takes(self, piece: Piece, gap: int) -> bool:
        """Add a piece, if its queries and keys follow those that are here, with no more than `gap` between, and it fits
        their window."""
        k, q = self.ends
        if not (0 <= piece.q - q <= gap and 0 <= piece.k - k <= gap):
            return False
        left = _agreed(self.left, piece.left, piece.keys, [p.keys for p in self.pieces])
        right = _agreed(self.right, piece.right, piece.tokens, [p.tokens for p in self.pieces])
        if left is False or right is False:
            return False
        self.left, self.right = left, right
        self.pieces.append(piece)
        return True

    def call(self) -> Call:
        first, last = self.pieces[0], self.pieces[-1]
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        cu_q = cu_k = ()
        if len(self.pieces) > 1:
            cu_q, cu_k = zip(*self._boundaries())
        tokens, keys = last.q + last.tokens - first.q, last.k + last.keys - first.k
        return Call(first.q, tokens, first.k, keys, left, right, cu_q, cu_k)

    def _boundaries(self) -> list[tuple[int, int]]:
        """Queries and keys before each document of the call, and all of them."""
        first, found = self.pieces[0], [(0, 0)]
        for piece in self.pieces:
            q, k = piece.q - first.q, piece.k - first.k
            if q > found[-1][0]:
                found.append((q, found[-1][1]))  # queries without keys
            if k > found[-1][1]:
                found.append((q, k))  # keys without queries
            found.append((q + piece.tokens, k + piece.keys))
        return found


def _agreed(side: int | None, asked: int, length: int, lengths: Sequence[int]) -> int | bool | None:
    """The limit that serves those that have `side` and one more piece; None is no limit, False that there is none."""
    if asked >= length - 1:  # the piece is not limited: any limit that reaches across it will do
        return side if side is None or side >= length - 1 else False
    if side is None:
        return asked if all(asked >= n - 1 for n in lengths) else False
    return side if side == asked else False


def _pairs(tokens: int, keys: int, left: int, right: int) -> int:
    ahead = keys - tokens  # query i stands beside key i + ahead
    ends = tokens * keys if right < 0 else _clipped(tokens, ahead + right + 1, keys)
    return ends - (0 if left < 0 else _clipped(tokens, ahead - left, keys))


def _clipped(count: int, first: int, most: int) -> int:
    """The sum of so many numbers that follow each other, each brought to between 0 and `most`."""
    above = min(count, max(0, -first))  # from here on above 0
    full = min(count, max(above, most - first))  # from here on `most`
    between = full - above
    return between * (first + above) + between * (between - 1) // 2 + (count - full) * most
