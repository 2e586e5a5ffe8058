"""How packed documents are divided between ranks so that few of them are cut.

A whole document needs no key of another rank. So documents go whole to ranks, the longest first, and only those are cut
that have more pairs than a rank has left, or that fill ranks to equal numbers of tokens. A cut document is peeled: a
rank takes some of both its ends, the next some of the ends of what is left, the last what lies between, as in zigzag.
How a rank's tokens are shared out to the two ends decides how many pairs they have. So cuts even the work out, too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

from tilesmith.distributed.ranges import Range, joined

# What other work is worth in pairs of a query and a key of a head, both passes, in bf16 on an H200. A pair takes
# 3.5 * 4 * D FLOPs at 6.2e14 FLOP/s. A token that travels has gradients of k and v in fp32, 8 * D bytes of a kv head at
# 3.4e11 bytes/s, which nothing hides (its keys come while a rank works on its own), and copies and additions of some
# 32 * D bytes at 4.8e12: 1,040 and 290 pairs. A layout knows no heads: this is for two of them to a kv head.
MOVED = 665
# A call on others' keys takes 6 ramps of 12 us (`cost.RAMPS`), here of 32 heads of dim 128. A range of tokens takes
# the host some 2 us where it cuts and joins tensors, once for tens of layers.
CALL = 780_000
PIECE = 2_000
EVEN = 0.01  # of the mean pairs of a rank: what one may have above it before documents are cut
# A rank keeps pairs for its free tokens: these parts of what shorter documents have a token, one after another. It is
# less than all, since the shortest go to ranks that lack few pairs.
_KEPT = (0.0, 0.4, 0.55, 0.7)
_SPARE = 8  # a rank's shortest documents, which may change place to fill ranks to equal numbers of tokens
_OFFERED = 64  # documents of which some are to fill a rank: twice as many take twice the time
_ATTEMPTS = 2  # to fill ranks so


class Work(NamedTuple):
    """Of the busiest rank, each for itself: causal pairs; tokens that it receives or that are read of it, whichever are
    more; calls of the kernel; ranges."""

    pairs: int
    moved: int
    calls: int
    pieces: int

    @property
    def total(self) -> int:
        """All of it in pairs."""
        return self.pairs + MOVED * self.moved + CALL * self.calls + PIECE * self.pieces


class _Cut(NamedTuple):
    """A document of `tokens` from token `start`. shares: rank, tokens, pairs of each part, and where it lies."""

    start: int
    tokens: int
    shares: list[_Share]


class _Share(NamedTuple):
    """What a rank has of a document: tokens, about so many pairs, and where they lie in it once that is known."""

    rank: int
    tokens: int
    pairs: float
    spans: tuple[Range, ...] = ()


def triangle(n: int) -> int:
    """Causal pairs of n tokens."""
    return n * (n + 1) // 2


def work(starts: Sequence[int], ranges: Sequence[Sequence[Range]]) -> Work:
    """Of documents at `starts`, where each rank holds its ranges, ascending."""
    size = len(ranges)
    pairs, calls = [0] * size, [1] * size
    cut: dict[int, list[tuple[int, int, int]]] = {}
    for r, spans in enumerate(ranges):
        for begin, end in spans:
            i = bisect_right(starts, begin) - 1
            while i < len(starts) - 1 and starts[i] < end:
                first, last = max(begin - starts[i], 0), min(end, starts[i + 1]) - starts[i]
                pairs[r] += (last - first) * (first + last + 1) // 2
                if first < last < starts[i + 1] - starts[i] or 0 < first < last:
                    cut.setdefault(i, []).append((first, last, r))
                i += 1
    arrive, leave = [0] * size, [0] * size
    for parts in cut.values():
        _travel(sorted(parts), arrive, leave, calls)
    return Work(max(pairs), max(map(max, arrive, leave)), max(calls), max(map(len, ranges)))


def _travel(parts: Sequence[tuple[int, int, int]], arrive: list[int], leave: list[int], calls: list[int]) -> None:
    """Add what ranks read of each other of one document. parts: (first, last, rank), ascending."""
    own: dict[int, int] = {}
    fetched: dict[int, int] = {}  # others' keys that a rank reads
    reads: dict[int, int] = {}  # up to where
    many: dict[int, int] = {}  # parts of a rank that see more of others' keys than those before: each needs a call
    for first, last, r in parts:
        held = own.get(r, 0)
        if first - held > fetched.get(r, 0):
            fetched[r], reads[r], many[r] = first - held, first, many.get(r, 0) + 1
        own[r] = held + last - first
    ends = sorted(reads.values())
    for first, last, r in parts:
        readers = len(ends) - bisect_left(ends, last) - (reads.get(r, 0) >= last)
        leave[r] += readers * (last - first)
    for r, keys in fetched.items():
        arrive[r] += keys
        calls[r] = max(calls[r], 1 + many[r])


def by_documents(starts: Sequence[int], size: int, tokens: int) -> Iterator[tuple[tuple[Range, ...], ...]]:
    """Some ways to divide documents between `size` ranks of as many tokens, each: of each rank, its ranges.

    starts: of the documents, and the end of the last. tokens: of the sequence; behind the documents is padding, which
    fills what ranks have left.
    """
    documents = sorted(((b - a, -a) for a, b in pairwise(starts) if a < b), reverse=True)
    for kept in _KEPT:
        yield _Dealer(documents, size, -(-tokens // size), kept).deal(starts[-1], tokens)


class _Dealer:
    """Deals documents, (length, -start) each, longest first. kept: of the pairs a token of shorter documents, what a
    rank keeps for each free token.

    load, room, held: of each rank its pairs, free tokens and whole documents. cuts: the others. filler: pairs kept for
    each free token. queue: (-pairs that a rank lacks, a free token; rank) of those with free tokens, a heap.
    """

    def __init__(self, documents: Sequence[tuple[int, int]], size: int, local: int, kept: float):
        self.documents, self.kept, self.filler = documents, kept, 0.0
        self.mean = sum(triangle(n) for n, _ in documents) / size
        self.load, self.room = [0.0] * size, [local] * size
        self.held: list[list[Range]] = [[] for _ in range(size)]
        self.cuts: list[_Cut] = []
        self.queue = [self._lack(r) for r in range(size)]  # equal, so a heap
        self.fills = 0

    def deal(self, end: int, tokens: int) -> tuple[tuple[Range, ...], ...]:
        """The ranges of each rank. end: of the last document."""
        left, pairs = sum(n for n, _ in self.documents), sum(triangle(n) for n, _ in self.documents)
        for i, (n, negative) in enumerate(self.documents):
            left, pairs = left - n, pairs - triangle(n)
            self.filler = self.kept * pairs / left if left else 0.0
            if not self._place(-negative, n):
                if self._fill(self.documents[i:]):
                    break
                self._cut_for_tokens(-negative, n)
        self.cuts = [self._evened(cut) for cut in self.cuts]
        for start, _, shares in self.cuts:
            for share in shares:
                self.held[share.rank] += [(start + first, start + last) for first, last in share.spans]
        at = end
        for r, room in enumerate(self.room):
            taken = min(room, tokens - at)
            self.held[r].append((at, at + taken))
            at += taken
        return tuple(joined(sorted(spans)) for spans in self.held)

    def _left(self, r: int) -> float:
        """Pairs that a rank may still have beside those of its filler."""
        return self.mean - self.load[r] - self.filler * self.room[r]

    def _place(self, start: int, n: int) -> bool:
        """Give a document to the rank that lacks most pairs a free token, or cut it if that has not so many left; False
        if no rank has room for it."""
        best = self._neediest(n)
        above, much = triangle(n) - self.filler * n, EVEN * self.mean
        if above > 2 * much and (best is None or above > self._left(best) + much):
            self._cut_for_pairs(start, n)
            return True
        if best is not None:
            self._take(best, start, n)
            heapq.heappush(self.queue, self._lack(best))
            return True
        best = self._shifted(n)
        if best is not None:
            self._take(best, start, n)
            self._rank()
        return best is not None

    def _neediest(self, n: int) -> int | None:
        """The rank that lacks most pairs a free token of those with n free tokens, taken out of the queue."""
        if max(self.room) < n:
            return None
        full = []
        while self.room[self.queue[0][1]] < n:
            full.append(heapq.heappop(self.queue))
        found = heapq.heappop(self.queue)[1]
        for entry in full:
            heapq.heappush(self.queue, entry)
        return found

    def _lack(self, r: int) -> tuple[float, int]:
        """A rank's entry in the queue; one without free tokens is never asked for."""
        return (self.load[r] - self.mean) / max(self.room[r], 1), r

    def _rank(self) -> None:
        """Order the ranks anew."""
        self.queue = [self._lack(r) for r, room in enumerate(self.room) if room]
        heapq.heapify(self.queue)

    def _take(self, r: int, start: int, n: int) -> None:
        self.held[r].append((start, start + n))
        self.load[r] += triangle(n)
        self.room[r] -= n

    def _shifted(self, n: int) -> int | None:
        """A rank that has room for n tokens once another one has more of a document that they share; None if there is
        none."""
        if sum(sorted(self.room)[-2:]) < n:
            return None
        for place, cut in enumerate(self.cuts):
            for i, here in enumerate(cut.shares):
                missing = n - self.room[here.rank]
                for j, there in enumerate(cut.shares):
                    if i != j and missing <= min(self.room[there.rank], here.tokens // 2):
                        shares = list(cut.shares)
                        shares[i] = _Share(here.rank, here.tokens - missing, here.pairs)
                        shares[j] = _Share(there.rank, there.tokens + missing, there.pairs)
                        self.cuts[place] = _Cut(cut.start, cut.tokens, shares)
                        self.room[here.rank] += missing
                        self.room[there.rank] -= missing
                        return here.rank
        return None

    def _fill(self, rest: Sequence[tuple[int, int]]) -> bool:
        """Give the last documents, which do not fit one by one, whole to ranks together with the shortest that these
        have, if some sums of lengths fill them; whether they do."""
        if self.fills == _ATTEMPTS or len(self.held) * triangle(rest[0][0]) > self.mean:
            return False
        self.fills += 1
        rooms, pool = list(self.room), [(n, -negative, -1) for n, negative in rest]
        for r, held in enumerate(self.held):
            for start, stop in held[-_SPARE:]:
                pool.append((stop - start, start, r))
                rooms[r] += stop - start
        pool.sort(key=lambda one: (-one[0], one[1]))
        ranks = _fitted([n for n, _, _ in pool], rooms)
        if ranks is None:
            return False
        for (n, start, owner), r in zip(pool, ranks):
            if owner >= 0:
                self.held[owner].remove((start, start + n))
                self.load[owner] -= triangle(n)
                self.room[owner] += n
            self._take(r, start, n)
        return True

    def _cut_for_pairs(self, start: int, n: int) -> None:
        """Share a document between the fewest ranks that have the pairs and the tokens for it."""
        wanted, pairs, tokens = triangle(n) - self.filler * n, 0.0, 0
        among: list[tuple[int, float]] = []
        for r in sorted(range(len(self.room)), key=lambda r: (-self._left(r), r)):
            if pairs >= wanted - EVEN * self.mean and tokens >= n and len(among) > 1:
                break
            if self.room[r]:
                share = max(0.0, min(self._left(r), wanted - pairs))
                among.append((r, share))
                pairs, tokens = pairs + share, tokens + self.room[r]
        r, share = among[-1]
        among[-1] = r, share + max(0.0, wanted - pairs)
        total = sum(share for _, share in among) or 1.0
        parts = [share / total for _, share in among]
        # of two ranks the inner one reads as much as is read of it where its tokens are this part of the document
        inner = min(0.5, sqrt(min(parts) / 3))
        by_tokens = parts if len(parts) != 2 else [inner if part == min(parts) else 1 - inner for part in parts]
        self._share(start, n, [r for r, _ in among], [round(part * n) for part in by_tokens], parts)

    def _cut_for_tokens(self, start: int, n: int) -> None:
        """Share a document between the fewest ranks that have room."""
        ranks, counts = [], []
        for r in sorted(range(len(self.room)), key=lambda r: (-self.room[r], r)):
            if sum(counts) == n:
                break
            ranks.append(r)
            counts.append(min(n - sum(counts), self.room[r]))
        self._share(start, n, ranks, counts, [count / n for count in counts])

    def _share(self, start: int, n: int, ranks: list[int], counts: list[int], parts: list[float]) -> None:
        """Note a cut document. counts: tokens of each rank, brought to what it has room for. parts: of its pairs."""
        counts = [min(count, self.room[r]) for r, count in zip(ranks, counts)]
        for i, r in enumerate(ranks):
            counts[i] += min(max(n - sum(counts), -counts[i]), self.room[r] - counts[i])
        shares = []
        for r, count, part in zip(ranks, counts, parts):
            if count:
                shares.append(_Share(r, count, part * triangle(n)))
                self.load[r] += part * triangle(n)
                self.room[r] -= count
        self.cuts.append(_Cut(start, n, shares))
        self._rank()

    def _evened(self, cut: _Cut) -> _Cut:
        """The cut whose shares bring its ranks to the same pairs, as far as their tokens can."""
        for share in cut.shares:
            self.load[share.rank] -= share.pairs
        wanted = _levelled(triangle(cut.tokens), [self.load[share.rank] for share in cut.shares])
        order = sorted(zip(wanted, cut.shares), key=lambda pair: (-pair[0], pair[1].rank))
        shares = _peeled(cut.tokens, [_Share(share.rank, share.tokens, pairs) for pairs, share in order])
        for share in shares:
            self.load[share.rank] += share.pairs
        return _Cut(cut.start, cut.tokens, shares)


def _fitted(lengths: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """A rank for each length so that none has more than its room, where ranks are filled one after another by sums that
    leave no more than there is to spare; None where no sum does."""
    found, left, spare = [-1] * len(lengths), list(range(len(lengths))), sum(rooms) - sum(lengths)
    for r in sorted(range(len(rooms)), key=lambda r: (rooms[r], r)):
        offered = left[-_OFFERED:]
        taken = _sum_of([lengths[i] for i in offered], rooms[r] - spare, rooms[r])
        if taken is None:
            return None
        for place in taken:
            found[offered[place]] = r
            spare += lengths[offered[place]]
        spare -= rooms[r]
        left = [i for i in left if found[i] < 0]
    return found if not left else None


def _sum_of(lengths: Sequence[int], least: int, most: int) -> list[int] | None:
    """Places of lengths whose sum is the largest from `least` to `most`; None if there are none. Bit n of a number says
    whether a sum of the lengths so far is n."""
    sums, mask = [1], (1 << most + 1) - 1
    for n in lengths:
        sums.append((sums[-1] | sums[-1] << n) & mask)
    rest = sums[-1].bit_length() - 1
    if rest < least:
        return None
    found = []
    for place in reversed(range(len(lengths))):
        if not sums[place] >> rest & 1:
            found.append(place)
            rest -= lengths[place]
    return found


def _levelled(total: float, loads: Sequence[float]) -> list[float]:
    """What brings the least loads to one level, `total` altogether."""
    level, below = 0.0, 0.0
    ordered = sorted(loads)
    for count, load in enumerate(ordered, 1):
        below += load
        level = (total + below) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return [max(0.0, level - load) for load in loads]


def _peeled(n: int, shares: Sequence[_Share]) -> list[_Share]:
    """The shares with their places in a document of n tokens and the pairs that they have there, which are about those
    that they asked for; the last has what the others leave."""
    first, last, found = 0, n, []
    for share in shares[:-1]:
        count = share.tokens
        # with so many of `count` tokens at the end, their pairs are half of least + at_end * more
        least, more = count * (2 * first + count + 1), 2 * (last - first - count)
        at_end = min(count, max(0, round((2 * share.pairs - least) / more))) if more else 0
        begin, end = first + count - at_end, last - at_end
        spans = tuple(span for span in ((first, begin), (end, last)) if span[0] < span[1])
        found.append(_Share(share.rank, count, _pairs(spans), spans))
        first, last = begin, end
    span = ((first, last),)
    return [*found, _Share(shares[-1].rank, last - first, _pairs(span), span)]


def _pairs(spans: Sequence[Range]) -> int:
    """Causal pairs of the queries of spans of a document."""
    return sum((last - first) * (first + last + 1) // 2 for first, last in spans)
