"""The batch at the knee of a model's throughput: what fits, from a fit of its memory; how fast, from few real steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tilesmith.engine.memory import human_size
from tilesmith.models.sizing.memory_estimate import MemoryEstimate
from tilesmith.models.sizing.probes import Probe, agreed

MOST_PROBES = 3
NEAR = 0.95  # of the best throughput: more rows are not worth their memory
SPARE = 0.5  # of what is free: how much the calibrating run may be expected to take
LONGEST = 20.0  # seconds that a probe's step may be expected to take
FAKE = (4, 8)  # batches of the fit; gradients, which do not grow, hide the activations of fewer rows


@dataclass
class Costs:
    """What batches of one model cost.

    traced: batch -> bytes of a step beyond parameters, by fake tensors; None where these fail. run: batch -> a real
    step. here: whether the model is where it can be run. probes: real runs so far. allocated_state: of optimizer_state,
    what is allocated already. The rest: bytes.
    """

    traced: Callable[[int], int | None]
    run: Callable[[int], Probe]
    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_step: int
    allocated_state: int
    here: bool
    probes: list[Probe] = field(default_factory=list)
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
        expected = self.fake(batch)
        if expected is not None:
            return int(self.scale() * expected)
        return self._from_runs(batch)

    def _from_runs(self, batch: int) -> int:
        fitting = sorted((p for p in self.probes if p.fits and p.peak), key=lambda p: p.batch)
        if len(fitting) < 2:
            raise ValueError(
                "the model does not run on fake tensors, and it was not run at two batch sizes: move it to the device "
                "and pass calibrate=True"
            )
        low, high = fitting[-2:]  # not the first, whose activations gradients may hide
        slope = (high.peak - low.peak) / (high.batch - low.batch)
        return max(0, int(high.peak + slope * (batch - high.batch)))

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
                self.probes.append(self.run(rows))
            two, half = self.probes[-1], batch // 2
            if half > 2 and two.fits and two.peak * half // 2 <= SPARE * min(agreed(free)):
                self.probes.append(self.run(half))
            return
        least = self.least()
        rows = max(least, batch)
        while rows > least and (self.needs(rows) > SPARE * free or rows > max(least, batch // 2)):
            rows = max(least, rows // 2)
        self.probes.append(self.run(rows))

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
    probes = [_ran(costs, first)]
    if not probes[0].fits:
        raise MemoryError(f"a step of batch {first} ran out of memory, with {human_size(room)} expected to be free")
    if not tracing:
        probes.append(_ran(costs, 2))
        if not probes[-1].fits:
            return Knee(1, tuple(probes))
    limit = min(agreed(costs.largest(room, most)))
    if limit < 1:
        raise MemoryError(_too_large(costs, room))
    top = min(limit, max(first, int(first * LONGEST / max(probes[0].seconds, 1e-9))))
    if top > max(p.batch for p in probes):
        probes.append(_ran(costs, top))
        if not probes[-1].fits:
            top = max(first, top // 2)
    chosen = min(max(costs.least(), _knee(probes, top)), top)
    if len(probes) < MOST_PROBES and chosen not in [p.batch for p in probes]:
        probes.append(_ran(costs, chosen))
    return Knee(_settled(probes, chosen, limit), tuple(probes))


def _ran(costs: Costs, batch: int) -> Probe:
    found = costs.run(batch)
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
    """`chosen` if it ran near the best that was seen, else the smallest batch that did."""
    fitting = [p for p in probes if p.fits and p.batch <= limit]
    best = max(p.throughput for p in fitting)
    near = [p.batch for p in fitting if p.throughput >= NEAR * best]
    return chosen if chosen in near else min(near)
