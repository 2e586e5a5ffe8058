"""A model of how the work of an attention call is spread over a device: which tile comes when, and how long it takes.

Pure functions of sizes. The order of tiles and the split of their steps are those of the device kernels, which do the
same arithmetic; `makespan` predicts how many steps the slowest SM makes. Today it ranks splits of the keys
(`splits_of`), runs of narrow windows (`run_of`), sections of heads of a backward (`section_of`), and tiles of a forward
by their kind and by the heads whose queries they hold (`tiles_time`); the thresholds of `plan.tables` are what it has
yet to replace.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilesmith.engine.launcher import cdiv


@functools.lru_cache(maxsize=4096)
def splits_of(tiles: int, blocks: int, ctas: int, traffic: float) -> int:
    """The number of splits with the shortest schedule, counted in steps of one block of keys.

    tiles: over all batch rows and kv heads. blocks: of keys, for each tile. ctas: how many run at a time. traffic:
    what writing and reading back one tile's partial result costs, in steps.
    """
    return min(
        range(1, max(1, min(128, blocks)) + 1), key=lambda splits: split_cost(tiles, blocks, ctas, traffic, splits)
    )


def split_cost(tiles: int, blocks: int, ctas: int, traffic: float, splits: int) -> float:
    """The predicted time of a pass over the keys in so many splits, in steps."""
    walk = -(-tiles * splits // ctas) * (-(-blocks // splits) + 1)  # + 1: a CTA's start and end
    return walk if splits == 1 else walk + 2 + tiles * splits / ctas * traffic  # + 2: the second launch


class CtaTile(NamedTuple):
    """A tile of keys of a decode whose CTAs share nothing. stages: tiles in flight. per_sm: CTAs that share an SM.
    bandwidth: GB/s that one CTA reads at most."""

    block_n: int
    stages: int
    per_sm: int
    bandwidth: float


def read_time(ctas: int, size: float, tile: CtaTile, sms: int, share: float) -> float:
    """The predicted µs of so many CTAs that read keys and values. size: KB of a CTA. share: GB/s of an SM when all are
    busy."""
    slots = sms * tile.per_sm
    waves, rest = divmod(ctas, slots)
    last = max(rest / (sms * share), 1 / tile.bandwidth, cdiv(rest, sms) / SM_BANDWIDTH) if rest else 0.0
    walk = (waves * tile.per_sm / share + last) * size * (IMBALANCE if tile.per_sm > 1 else 1.0)
    return walk + START * (waves + (rest > 0))


SM_BANDWIDTH = 85.0
"""GB/s that an SM reads at most. These four, and those of tiles, are fitted to 77 calls of an H200, where a share is 35
GB/s: what is chosen by them takes .7 % longer than the best measured on average, 5.5 % at most."""
IMBALANCE = 1.05  # times what one CTA an SM takes: the SMs' loads differ
START = 1.8  # µs of a CTA
COMBINE = 2.6  # µs of a second launch


def run_of(choices: Sequence[int], more: int, blocks: int, rows: int, sms: int) -> int:
    """How many of a head's `blocks`, one of `choices`, a CTA does one after another where windows are narrow: with
    few runs of many blocks little is loaded twice, which costs as much as `more` blocks a run, with many runs none
    idles at the end. rows: batch * heads."""
    return min(choices, key=lambda run: cdiv(cdiv(blocks, run) * rows, sms) * (run + more))


def stream_k_ctas(tiles: int, work: int, longest: int, least: int, sms: int, own: bool = False) -> int:
    """Into how many equal runs `work` steps of so many tiles are divided, of which the longest has so many: as many
    as there are SMs, but no more than four a tile, and 0 where that spares the last CTAs fewer than `least` steps.
    own: where there are enough SMs, each tile has runs of its own, as many as the others.
    """
    ctas = min(sms, 4 * tiles, work)
    if own and 0 < 2 * tiles <= sms:
        ctas -= ctas % tiles
    return ctas if longest * ctas - work >= least * ctas > 0 and work * (ctas + 1) < 2**31 else 0


def run_bounds(cta: int, ctas: int, total: int) -> tuple[int, int]:
    """The first and last (exclusive) step of one of `ctas` equal runs of `total` steps."""
    return cta * total // ctas, (cta + 1) * total // ctas


def numbered(number: int, blocks: int, section: int, rows: int) -> tuple[int, int]:
    """Tile and head that a number stands for: sections of `section` heads one after another, in each the first tiles of
    all its heads first. blocks: tiles of a head; rows: heads."""
    behind, inside = divmod(number, section * blocks)
    width = min(section, rows - behind * section)
    return inside // width, behind * section + inside % width


def makespan(steps: Iterable[float], ctas: int, each: float = 1.0) -> float:
    """How many steps the busiest of `ctas` CTAs makes that take the next tile when they are free; each: what a tile
    costs beside its steps. steps: of the tiles, in the order in which they are taken."""
    free = [0.0] * max(1, ctas)
    for size in steps:
        heapq.heapreplace(free, free[0] + size + each)
    return max(free)


def even_makespan(tiles: int, steps: float, ctas: int, each: float = 1.0) -> float:
    """`makespan` of so many tiles that have the same work."""
    return cdiv(tiles, max(1, ctas)) * (steps + each)


def seen_steps(tokens: int, keys: int, block_m: int, block_n: int, left: int | None, right: int | None) -> list[int]:
    """The steps of each tile of queries of a head, from the first on: the blocks of keys that it meets, at least one.
    left, right: of the window; None where that edge hides nothing."""
    found = []
    for start in range(0, tokens, block_m):
        last = min(start + block_m, tokens) - 1
        end = keys if right is None else min(keys, last + keys - tokens + right + 1)
        begin = 0 if left is None else max(min(start + keys - tokens - left, keys - 1), 0)
        found.append(max(cdiv(end - begin, block_n), 1))
    return found


def placed_steps(
    tokens: int, keys: int, consumers: int, positions: int, block_n: int, right: int, skip: bool, half: bool
) -> list[float]:
    """The steps of each tile of a forward without a window under a causal mask, of which consumers make different
    numbers: between those of the busiest one, which the tile waits for, and their mean, since they share the tensor
    cores. Half blocks on the diagonal are taken from the mean: they spare the masks of all other blocks, too.

    Tiles end where the queries do, to the `positions` of a consumer (`Walk.placed`), so that the tile with fewer
    queries is one of the first. skip: consumers leave out blocks that only others see (SKIP). half: only the
    last block that a consumer sees has a mask (ONE_MASK). Where it sees at most the first half of that, the first of
    two makes that half alone (HALF); of three the masks that are spared count as much.
    """
    block_m, shift, found = consumers * positions, keys - tokens, []
    blocks = cdiv(tokens, block_m)
    behind = (blocks * block_m - tokens) // positions * positions
    for tile in range(blocks):
        start = max(tile * block_m - behind, 0)
        lasts = [min(start + (c + 1) * positions, tokens) - 1 for c in range(consumers)]
        ends = [max(min(keys, last + shift + right + 1), 1) for last in lasts]
        made = [cdiv(end if skip else ends[-1], block_n) for end in ends]
        able = ends if consumers == 3 else ends[:1]
        halves = sum((end - 1) % block_n < block_n // 2 for end in able) / 2 if half else 0
        found.append((max(made) + (sum(made) - 2 * halves) / consumers) / 2)
    return found


def window_steps(
    tokens: int, keys: int, block_m: int, block_n: int, left: int, right: int | None, consumers: int, stages: int
) -> list[int]:
    """`seen_steps` of a window. Consumers leave out blocks that only others see (SKIP of `Walk`) and so are some blocks
    apart: where the `stages` tiles of keys hold these and one on its way, a tile's steps are those of its busiest
    consumer."""
    shift, part = keys - tokens, block_m // consumers
    apart = (block_m - part) // block_n
    if apart == 0 or stages < apart + 2:
        return seen_steps(tokens, keys, block_m, block_n, left, right)
    found = []
    for tile in range(0, tokens, block_m):
        begin = max(min(tile + shift - left, keys - 1), 0)
        made = [1]
        for start in range(tile, min(tile + block_m, tokens), part):
            last = min(start + part, tokens) - 1
            end = keys if right is None else min(keys, last + shift + right + 1)
            first = max(min(start + shift - left, keys - 1), 0)
            made.append(cdiv(end - begin, block_n) - (first - begin) // block_n)
        found.append(max(made))
    return found


def key_steps(
    tokens: int, keys: int, block_m: int, block_n: int, q_begin: int, k_begin: int, left: int | None, right: int | None
) -> list[int]:
    """The steps of each tile of keys of a head, from key k_begin on: the blocks of queries, counted from q_begin, that
    see any of its keys, at least one (`KeyWalk.span`). left, right: of the window; None where that edge hides nothing.
    """
    blocks, shift, found = cdiv(tokens - q_begin, block_m), keys - tokens, []
    for start in range(k_begin, keys, block_n):
        first = 0 if right is None else min(max(start - shift - right - q_begin, 0) // block_m, blocks - 1)
        end = blocks if left is None else min(blocks, cdiv(max(start + block_n - shift + left - q_begin, 0), block_m))
        found.append(max(end - first, 1))
    return found


NEAR = 1.02  # a schedule that much longer than the shortest one is as good
TILE = 1.5  # what a tile of keys costs beside its steps, in steps
READ = 1.5  # what a step costs more that no other CTA shares, in steps: its queries come from memory, not from L2


def part_sizes(group: int, parts: int) -> tuple[int, ...]:
    """Query heads of each part of a group, as even as can be, the larger parts first (`backward_walk.first_head`)."""
    least, more = divmod(group, parts)
    return (least + 1,) * more + (least,) * (parts - more)


@functools.lru_cache(maxsize=1024)
def section_of(
    least: int, heads: int, steps: tuple[int, ...], ctas: int, members: tuple[int, ...] = (1,), kept: float = math.inf
) -> int:
    """How many heads a backward works on together: the fewest of least, 2 · least, 4 · least, … or all heads whose
    predicted time is within 2 % of the shortest.

    Few heads at a time share what they stream in L2. But the longest tile of the last section starts late, and where a
    head has few more tiles than there are CTAs, nothing is left to fill the time in which it runs alone.

    steps: of the tiles of a head, in the order in which they are taken (`numbered`), for each of its query heads.
    members: how many of these one head after another has, over and over. kept: see `read_share`. Measured on an H200,
    head dim 128 causal: 1 x 11000 tokens of 28/4 heads in sections of 2 for 1, 1.20 times; 2 x 6008, 24/8, 8 for 2,
    1.08; 2 x 3000, 24/8, 16 for 5, 1.09; 9 x 1656, 12/2, 18 for 10, .93.
    """
    if least >= heads or _evens_out(heads, steps, ctas, members):
        return min(least, heads)
    times = _section_times(least, heads, steps, ctas, members, kept)
    return next(section for section, time in times.items() if time <= NEAR * min(times.values()))


def _evens_out(heads: int, steps: tuple[int, ...], ctas: int, members: tuple[int, ...]) -> bool:
    """Whether no order of the tiles is longer than the shortest one by more than NEAR (list scheduling's bound)."""
    longest, work = max(steps) * max(members), heads * sum(steps) * sum(members) / len(members)
    return (longest + TILE) * ctas <= (NEAR - 1) * work


def _section_times(
    least: int, heads: int, steps: tuple[int, ...], ctas: int, members: tuple[int, ...], kept: float
) -> dict[int, float]:
    """The predicted time of sections of least, 2 · least, 4 · least, … heads, up to one that is as good as can be."""
    share = functools.partial(read_share, steps=steps, ctas=ctas, members=members, kept=kept)
    work = sum(steps) * sum(members) / len(members)
    even = heads * (work + TILE * len(steps)) / ctas  # no schedule is shorter
    times: dict[int, float] = {}
    section = least = min(least, heads)
    if _evens_out(heads, steps, ctas, members):
        return {section: even * share(section)}
    while not times or min(times.values()) > NEAR * even * share(section):
        span = makespan(in_sections(steps, heads, section, members), ctas, TILE)
        times[section] = span * share(section)
        if section == heads:
            break
        section = min(2 * section, heads)
    return times


MANY = 16  # rounds of tiles, of which the order no longer matters


def tiles_time(steps: Sequence[float], heads: int, ctas: int, start: float, tile: float, step: float) -> float:
    """The predicted time of persistent CTAs that take the longest tiles first. steps: of the tiles of each of `heads`.
    start, tile, step: what the launch, a tile and a step take."""
    total = heads * (len(steps) * tile + sum(steps) * step)
    if heads * len(steps) > MANY * ctas:
        return start + total / ctas + tile + min(steps) * step
    longest_first = sorted(steps, reverse=True)
    return start + makespan((n * step for n in longest_first for _ in range(heads)), ctas, tile)


TILE_HEADS = 8  # at most: a tile of 64 queries has at least the 8 positions that are a box of the swizzle


def tile_heads(group: int) -> list[int]:
    """Of how many of a group's query heads a tile may hold the queries."""
    return [heads for heads in range(1, TILE_HEADS + 1) if group % heads == 0]


@functools.lru_cache(maxsize=1024)
def tile_heads_times(
    rows: int, group: int, tokens: int, keys: int, left: int, right: int | None, tile: tuple[int, int, int], ctas: int
) -> dict[int, float]:
    """The predicted time of a windowed forward, in steps, by the query heads that share keys whose queries one tile
    holds. A tile of many heads has few positions, whose windows reach over fewer keys; and the last tile of few
    positions is cut less.

    rows: batch * heads. group: query heads that share keys. tile: its consumers, its keys, and how many tiles of keys
    are in flight.
    """
    consumers, block_n, stages = tile
    times = {}
    for heads in tile_heads(group):
        steps = window_steps(tokens, keys, 64 // heads * consumers, block_n, left, right, consumers, stages)
        times[heads] = tiles_time(steps, rows // heads, ctas, 0.0, TILE, 1.0)
    return times


def tile_heads_of(times: dict[int, float]) -> int:
    """One head unless several are predicted to take more than 2 % less time; then the most that are within 2 % of the
    shortest: rows that share a position share the words of their masks, which steps do not count."""
    near = NEAR * min(times.values())
    return 1 if times[1] <= near else max(heads for heads, time in times.items() if time <= near)


LAUNCH = 2.0  # what one more launch costs, in steps
# The time of a woven step in parts of two sizes beside that in parts of one: the walk divides by both. On an H200 at
# head dim 128 parts of 4 and 3 query heads took 1.04 to 1.08, of 3 and 2 1.00 to 1.09, of 6 and 5 1.11, and of 2 and 1,
# by which it divides for nothing, 1.00.
UNEVEN = 1.05
BALANCE = 140  # operations of a backward in the time in which the device's memory moves a byte


@functools.lru_cache(maxsize=1024)
def group_parts_of(
    heads: int, group: int, steps: tuple[int, ...], ctas: int, traffic: float, kept: float = math.inf,
    woven: bool = False,
) -> int:  # fmt: skip
    """Into how many parts (`part_sizes`) the query heads that share keys are divided, each with tiles of keys of its
    own: the fewest whose predicted time is within 2 % of the shortest.

    One tile for all of them walks each head's queries: with few kv heads there are few tiles, and the longest one runs
    alone at the end; and tiles that walk many heads one after another drift apart (`read_share`). But each part has a
    dk and a dv, which are written, read and added.

    heads: kv heads of all batch rows. group: query heads of one. steps: of a kv head's tiles, for each query head, in
    the order in which they are taken. traffic: what writing and reading one part's dk and dv takes all CTAs, in steps.
    kept: see `read_share`. woven: whether tiles meet a block of queries of all their heads before the next block.
    """
    share = read_share(1, steps, ctas)
    times: dict[int, float] = {}
    found = 1
    # of those whose largest part has the same size the fewest
    for parts in sorted({cdiv(group, largest) for largest in range(1, group + 1)}):
        added = 0 if parts == 1 else LAUNCH + heads * parts * traffic
        even = heads * (group * sum(steps) + TILE * len(steps) * parts) / ctas * share + added
        if times and times[found] <= NEAR * even:  # neither these parts nor more take less
            break
        section, members = max(1, ctas // len(steps)), part_sizes(group, parts)
        spans = _section_times(section, heads * parts, steps, ctas, members, kept)
        times[parts] = min(spans.values()) * (UNEVEN if woven and group % parts and members[0] > 2 else 1) + added
        found = next(n for n, time in times.items() if time <= NEAR * min(times.values()))
    return found


@functools.lru_cache(maxsize=1024)
def list_parts_of(heads: int, group: int, work: float, longest: float, ctas: int, traffic: float) -> int:
    """As `group_parts_of`, of block lists, of which only the number of entries is known when a call is planned: 1, 2, 4
    or 8 parts, as even as can be.

    The time is that of the worst case of list scheduling: the longest tile, which one that every block of queries chose
    may be, begins when the CTAs have done all others.

    work: steps of all tiles of all heads. longest: steps that one tile may have. heads, traffic: see `group_parts_of`.
    """
    times = {}
    for parts in (n for n in (1, 2, 4, 8) if n <= group):
        alone = longest * cdiv(group, parts) / group
        times[parts] = work / ctas + alone + (0 if parts == 1 else LAUNCH + heads * parts * traffic)
    return next(parts for parts, time in times.items() if time <= NEAR * min(times.values()))


def list_tile(number: int, tiles: int, section: int, rows: int) -> tuple[int, int]:
    """Tile and head of block lists that a number stands for (`KeyWalk.tile`): the first keys of all heads, which the
    most queries may have chosen, then the rest as `numbered` has it."""
    if number < rows:
        return 0, number
    tile, head = numbered(number - rows, tiles - 1, section, rows)
    return tile + 1, head


def read_share(
    section: int, steps: Sequence[int], ctas: int, members: Sequence[int] = (1,), kept: float = math.inf
) -> float:
    """The time of a step beside that of one whose reads from memory all CTAs share: those that work on one head do,
    while they meet its queries at about the same time.

    Tiles that walk the query heads of a group one after another start together, and those whose steps a head differ by
    `apart` are j · apart steps apart at head j. The L2 cache holds what all CTAs load in `kept` steps if none shares,
    in x · kept if x do; so at head j as many share as are that near: x = 1 + x · kept / (j · apart).

    steps, members: as of `section_of`. kept: infinite where tiles meet a block of queries of all heads before the next
    block (WOVEN). Measured on an H200, head dim 128, 2 x 4096 causal tokens, times of such walks: 64/8 heads 1.18,
    32/8 1.03; predicted 1.20 and 1.00.
    """
    alone = 1 / min(len(steps), max(1.0, ctas / section))
    apart = (max(steps) - min(steps)) / max(len(steps) - 1, 1)
    heads = max(members)
    if apart == 0:
        return 1 + READ * alone
    return 1 + READ * sum(max(alone, 1 - kept / (j * apart)) if j else alone for j in range(heads)) / heads


def in_sections(steps: Sequence[float], heads: int, section: int, members: Sequence[int] = (1,)) -> Iterable[float]:
    """The steps of every tile in the order of `numbered`. steps: of a head's tiles, for each of its query heads.
    members: how many of these one head after another has, over and over."""
    for start in range(0, heads, section):
        mine = [members[head % len(members)] for head in range(start, min(start + section, heads))]
        for size in steps:
            yield from (size * many for many in mine)


class KeyTile(NamedTuple):
    """A tile of keys of an ordered backward: its place among those of its head, and its head."""

    place: int
    head: int


def key_tile(number: int, tiles: int, section: int, rows: int) -> KeyTile:
    """The tile that a number of the counter stands for (`KeyWalk.tile`): the last keys come first."""
    block, head = numbered(number, tiles, section, rows)
    return KeyTile(tiles - 1 - block, head)


class Addition(NamedTuple):
    """A tile adds to the dq of a block of queries, to the first or second sum, behind the tile `after`, or first."""

    block: int
    which: int
    after: int | None


def additions(tile: KeyTile, tiles: int, blocks: int, first: Sequence[int], ring: bool) -> list[Addition]:
    """What a tile of keys adds, in order, and whom it waits for each time. first: of each tile of a head the first
    block of queries that sees it. ring: tiles start each at a block of its own and come round (`around`)."""
    place = tile.place
    if ring:
        found = []
        start = place * blocks // tiles
        for step in range(start, start + blocks):
            block, again = step % blocks, step >= blocks
            near = ((block + 1) * tiles - 1) // blocks + 1
            found.append(Addition(block, int(again), place + 1 if place + 1 < (tiles if again else near) else None))
        return found
    behind = first[place + 1] if place + 1 < tiles else blocks
    return [Addition(i, 0, place + 1 if i >= behind else None) for i in range(first[place], blocks)]
