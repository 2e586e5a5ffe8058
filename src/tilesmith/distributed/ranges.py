"""Ranges of tokens, as pairs of the first token and the one behind the last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Range = tuple[int, int]


def joined(spans: Iterable[Range]) -> tuple[Range, ...]:
    """Ascending spans, with those that touch or overlap made one and empty ones left out."""
    found: list[Range] = []
    for start, stop in spans:
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def length(ranges: Iterable[Range]) -> int:
    """Tokens in all ranges."""
    return sum(stop - start for start, stop in ranges)


def offsets(ranges: Sequence[Range]) -> list[int]:
    """Where each range begins when they lie one after another."""
    return list(accumulate((stop - start for start, stop in ranges), initial=0))[:-1]


def causal_pairs(starts: Sequence[int], span: Range) -> int:
    """Pairs of a query in `span` and a key that it sees, where each document sees itself causally."""
    found = 0
    for i in range(max(0, bisect_right(starts, span[0]) - 1), len(starts) - 1):
        begin, end = starts[i], starts[i + 1]
        if begin >= span[1]:
            break
        first, last = max(begin, span[0]), min(end, span[1])
        if first < last:
            found += (last - first) * (first - begin + last - begin + 1) // 2
    return found
