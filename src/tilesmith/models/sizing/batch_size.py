"""The batch at the knee of a model's throughput: what fits, from a fit of its memory; how fast, from few real steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tilesmith.engine.memory import human_size
from tilesmith.models.sizing.memory_estimate import MemoryEstimate
from tilesmith.models.sizing.moments import peak_of
from tilesmith.models.sizing.probes import Probe, agreed

MOST_PROBES = 3
NEAR = 0.95  # of the best throughput: more rows are not worth their memory
SPARE = 0.5  # of what is free: how much the calibrating run may be expected to take
BACKWARD = 2  # so many times what its forward takes does a step at most, gradients of parameters aside
LONGEST = 20.0  # seconds that a probe's step may be expected to take
FAKE = (4, 8)  # batches of the fit; gradients, which do not grow, hide the activations of fewer rows


@dataclass
class Costs:
    """What batches of one model cost.

    traced: batch -> bytes of a step beyond parameters, by fake tensors; None where these fail. run: batch -> a real
    step; with apart=True it also says what the rows take without gradients, with growth=True what is held at its
    moments. here: whether the model is where it can be run. probes: real runs so far. allocated_state: of
    optimizer_state, what is allocated already. update: seconds of the optimizer's step, which takes as long for any
    batch and which probes do not make. The rest: bytes.
    """

    traced: Callable[[int], int | None]
    run: Callable[..., Probe]
    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_step: int
    allocated_state: int
    here: bool
    probes: list[Probe] = field(default_factory=list)
    update: float = 0.0
    _known: dict[int, int | None] = field(default_factory=dict)

    def fake(self, batch: int) -> int | None:
        """`traced`, each batch once; of one row that of two where one is refused, as by a batch norm in training."""
        if batch not in self._known:
            self._known[batch] = self.traced(batch)
        found = self._known[batch]
        return self.fake(2) if found is None and batch == 1 else found

    def least(self) -> int:
        """The fewest rows that a step takes: 2 where fake tensors get through two and not through one."""
        return 2 if self.fake(1) is not None and self._known[1] is None else 1

    def scale(self) -> float:
        """What real steps take over what fake tensors say, by the largest real step."""
        ran = max((p for p in self.probes if p.fits and p.peak), key=lambda p: p.batch, default=None)
        expected = self.fake(ran.batch) if ran is not None else None
        return ran.peak / expected if ran is not None and expected else 1.0

    def step(self, batch: int) -> int:
        """Bytes of a step beyond parameters. Raises ValueError where neither fake tensors nor two real runs tell."""
        exact = next((p.peak for p in self.probes if p.fits and p.batch == batch), 0)
        if exact:
            return exact
        grown = max((p for p in self.probes if p.moments and p.batch < batch), key=lambda p: p.batch, default=None)
        if grown is not None:
            return peak_of(grown.moments, batch)
        expected = self.fake(batch)
        if expected is not None:
            return int(self.scale() * expected)
        return self._from_runs(batch)

    def _from_runs(self, batch: int) -> int:
        """Between two runs their chord, which the peak is not above: it is the highest of the levels of a step's
        moments, each of which grows evenly with the rows. Beyond them, see `_beyond`."""
        fitting = sorted((p for p in self.probes if p.fits and p.peak), key=lambda p: p.batch)
        if len(fitting) < 2 and not any(p.rows for p in fitting):
            raise ValueError(
                "the model does not run on fake tensors, and it was not run at two batch sizes: move it to the device "
                "and pass calibrate=True"
            )
        for low, high in pairwise(fitting):
            if low.batch < batch < high.batch:
                return math.ceil(low.peak + (high.peak - low.peak) * (batch - low.batch) / (high.batch - low.batch))
        return _beyond(fitting[-2:], batch)

    def at(self, batch: int) -> MemoryEstimate:
        """The estimate of a batch."""
        return MemoryEstimate(
            batch, self.parameters, self.gradients, self.optimizer_state, self.step(batch), self.optimizer_step,
            max((p.kept for p in self.probes), default=0), bool(self.probes), len(self.probes),
        )  # fmt: skip

    def needs(self, batch: int) -> int:
        """Bytes that a training run of so many rows still has to allocate."""
        found = self.at(batch)
        return found.total - found.parameters - found.workspace - self.allocated_state

    def calibrate(self, batch: int, free: int) -> None:
        """Run fewer rows than `batch`, or as many where that is cheap. Where fake tensors fail, run one row, two, and
        half of `batch` if that fits even should all memory grow with the rows."""
        if self.fake(1) is None:
            for rows in (1, 2):
                self.probes.append(self.run(rows, apart=True))
            two, half = self.probes[-1], batch // 2
            if half > 2 and two.fits and two.peak * half // 2 <= SPARE * min(agreed(free)):
                self.probes.append(self.run(half, apart=True))
            return
        least = self.least()
        rows = max(least, batch)
        while rows > least and (self.needs(rows) > SPARE * free or rows > max(least, batch // 2)):
            rows = max(least, rows // 2)
        self.probes.append(self.run(rows, growth=True))

    def largest(self, room: int, most: int) -> int:
        """The largest batch of at most `most` whose needs are within `room` bytes; 0 if none."""
        if self.needs(1) > room:
            return 0
        low, high = FAKE
        low_need, high_need = self.needs(low), self.needs(high)
        slope = (high_need - low_need) / (high - low)
        batch = most if slope <= 0 else min(most, max(1, math.floor(high + (room - high_need) / slope)))
        while batch > 1 and self.needs(batch) > room:  # the fit may be off where peaks move to another place
            batch = min(batch - 1, int(batch * 0.95))
        return batch


def _beyond(ran: list[Probe], batch: int) -> int:
    """Bytes of a step of more rows than were run, by the last one or two runs.

    A step holds what the rows take when its forward is over, and the gradients when its backward is: at its peak
    whichever is more, or some of both.
    """
    low, high = ran[0], ran[-1]
    if len(ran) < 2:  # all that one row took without gradients may grow with the rows
        return high.peak + min(high.rows, BACKWARD * high.forward) * (batch - high.batch)
    more, rows, slope = high.batch - low.batch, high.peak, (high.peak - low.peak) / (high.batch - low.batch)
    if low.forward and high.forward:
        rows, slope = high.rows, _slope(low, high)
    # a peak that grows as fast as the rows do has gradients beside them, one that does not grow is of gradients alone
    grown = (high.peak - low.peak) / max(1.0, slope * more)
    beside = max(0, high.peak - rows) * min(1.0, grown)
    return max(high.peak, math.ceil(rows + beside + slope * (batch - high.batch)))


def _slope(low: Probe, high: Probe) -> float:
    """Bytes that a row takes in a step, gradients aside.

    In a forward's fixed + row · batch nothing hides. In the rest of the step few rows may hide behind the gradient that
    is being added: where they mostly do, what they take is bounded by all that is not fixed, and by `BACKWARD`.
    """
    row, seen = ((b - a) / (high.batch - low.batch) for a, b in ((low.forward, high.forward), (low.rows, high.rows)))
    if 2 * seen >= row:
        return max(row, seen)
    fixed = max(0.0, high.forward - row * high.batch)
    return max(row, min((high.rows - fixed) / high.batch, BACKWARD * row))


@dataclass(frozen=True)
class Knee:
    """The batch that was chosen, and the runs that led there."""

    batch: int
    probes: tuple[Probe, ...]


def best_batch(costs: Costs, room: int, most: int) -> Knee:
    """The smallest batch near the throughput of the largest that fits into `room` bytes, by at most three real runs.

    All ranks give the same `most`; each has its own room, of which the least counts. Raises MemoryError.
    """
    costs.probes = []
    tracing = costs.fake(1) is not None
    first = _start(costs, room, most) if tracing else 1
    probes = costs.probes
    if not _ran(costs, first, apart=not tracing).fits:
        raise MemoryError(f"a step of batch {first} ran out of memory, with {human_size(room)} expected to be free")
    if not tracing:
        most = _hop(costs, room, most)
    limit = min(agreed(costs.largest(room, most)))
    if limit < 1:
        raise MemoryError(_too_large(costs, room))
    top = _top(probes, limit)
    if top > _last(probes).batch:
        if not _ran(costs, top).fits:
            top = limit = _last(probes).batch if len(probes) == MOST_PROBES else max(first, top // 2)
        elif not tracing and max(agreed(costs.needs(top) > room)):  # more was held than was expected
            top = limit = min(agreed(costs.largest(room, top)))
    chosen = min(max(costs.least(), _knee(_updated(costs), top)), top)
    if len(probes) < MOST_PROBES and chosen not in [p.batch for p in probes]:
        _ran(costs, chosen)
    return Knee(_settled(_updated(costs), chosen, limit), tuple(probes))


def _updated(costs: Costs) -> list[Probe]:
    """The runs, with the optimizer's step in their times."""
    return [replace(p, seconds=p.seconds + costs.update) for p in costs.probes]


def _hop(costs: Costs, room: int, most: int) -> int:
    """Run as many rows as fit even if all that one row took grows with the rows, at least two, to see what does.
    Returns the most that a batch may have from then on: of one that did not fit, a quarter."""
    sure = min(agreed(costs.largest(room, most)))
    if sure < 1:
        raise MemoryError(_too_large(costs, room))
    rows = min(most, max(2, _top(costs.probes, sure)))
    if rows < 2 or _ran(costs, rows, apart=True).fits:
        return most
    return max(1, rows // 4)


def _last(probes: list[Probe]) -> Probe:
    """The largest batch that ran."""
    return max((p for p in probes if p.fits), key=lambda p: p.batch)


def _top(probes: list[Probe], limit: int) -> int:
    """At most `limit` rows, and as many as are expected to take no longer than a probe may."""
    last = _last(probes)
    return min(limit, max(last.batch, int(last.batch * LONGEST / max(last.seconds, 1e-9))))


def _ran(costs: Costs, batch: int, apart: bool = False) -> Probe:
    found = costs.run(batch, apart=True) if apart else costs.run(batch)
    costs.probes.append(found)
    return found


def _start(costs: Costs, room: int, most: int) -> int:
    """The first batch to run: an eighth of what is expected to fit, the same on all ranks."""
    expected = min(agreed(costs.largest(room, most)))
    if expected < 1:
        raise MemoryError(_too_large(costs, room))
    return max(costs.least(), expected // 8)


def _too_large(costs: Costs, room: int) -> str:
    return (
        f"not even one row fits: a step needs {human_size(costs.needs(1))} besides the parameters, and "
        f"{human_size(room)} may be taken; {costs.at(1)}"
    )


def _knee(probes: list[Probe], top: int) -> int:
    """The smallest batch near the throughput at `top`, by a time of t0 + t1 · batch through the runs."""
    ran = sorted((p for p in probes if p.fits), key=lambda p: p.batch)
    if len(ran) < 2:
        return ran[-1].batch
    low, high = ran[0], ran[-1]
    slope = (high.seconds - low.seconds) / (high.batch - low.batch)
    start = low.seconds - slope * low.batch
    if slope <= 0:
        return high.batch
    if start <= 0:  # more rows bring nothing: perhaps fewer do as well
        return max(1, low.batch // 8)
    best = top / (start + slope * top)
    # b / (t0 + t1 b) >= NEAR · best
    share = 1.0 - NEAR * best * slope
    batch = NEAR * best * start / share if share > 0 else top
    return rounded(max(1, math.ceil(batch)), top)


def rounded(batch: int, top: int) -> int:
    """The next multiple of 8, or power of two below 8, that is not above `top`."""
    grain = 8 if batch > 8 else 1 << max(0, (batch - 1).bit_length())
    return min(-(-batch // grain) * grain, top)


def _settled(probes: list[Probe], chosen: int, limit: int) -> int:
    """`chosen` if it ran near the best that was seen, else the smallest batch that did. A `limit` between two runs was
    seen by their chord."""
    seen = {p.batch: p.throughput for p in probes if p.fits and p.batch <= limit}
    for low, high in pairwise(sorted((p for p in probes if p.fits), key=lambda p: p.batch)):
        if low.batch < limit < high.batch:
            share = (limit - low.batch) / (high.batch - low.batch)
            seen[limit] = limit / (low.seconds + share * (high.seconds - low.seconds))
    near = [batch for batch, rate in seen.items() if rate >= NEAR * max(seen.values())]
    return chosen if chosen in near else min(near)
