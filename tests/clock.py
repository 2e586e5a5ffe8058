"""Time in tests: a clock that only sleeping advances, and the processor's time at a known core's pace.

No test may fail because its machine was busy: a clock on a wall also counts what others do.
"""

import time
from collections.abc import Callable


class Clock:
    """Stands in for the module `time` where something is timed: each reading is what was slept so far, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


IDLE = 0.0045  # seconds that _count_up takes where the costs were promised: a server's core with nothing beside it
ATTEMPTS = 25


def cheapest(cost: Callable[[], float], enough: float) -> float:
    """The lowest of several costs in processor seconds, at the pace of that core; the first up to `enough` will do.

    cost: does the work once and returns the seconds that it took. The core's pace is the better of before and after.
    """
    found = float("inf")
    for _ in range(ATTEMPTS):
        before = _pace()
        spent = cost()
        found = min(found, spent / min(before, _pace()))
        if found <= enough:
            break
    return found


def cpu_seconds(work: Callable[[], object]) -> float:
    """The processor's time for work(), not the wall clock's: other tests run beside this one."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _pace() -> float:
    """How much slower than that core this one is just now, at least 1: an older one, or one that others share."""
    return max(1.0, cpu_seconds(_count_up) / IDLE)


def _count_up() -> None:
    total = 0
    for i in range(100_000):
        total += i * i
