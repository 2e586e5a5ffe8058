"""Timing: device time, host time, peak memory and kernel launches of callables, several measured side by side.

Variants take turns round by round in one process, in an order that changes, so that clocks, temperature, power and
other tenants of the machine reach all of them alike. A figure is the median over the rounds, with its spread.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilesmith.engine import torch_private
from tilesmith.engine.threads import settle
from tilesmith.hardware.detect import arch_of

EVENTS = ("cuda", "xpu")  # device types whose streams time themselves
LONG = 5e-4  # seconds of a call from which on what ran before it matters
MAX_CALLS = 20  # in one batch: a CUDA stream queues about a thousand launches before the host has to wait
LONGEST_SLEEP = 0.1  # seconds
SLEEP_CLOCK = 2.0e9  # cycles a second; a slower clock only sleeps longer


@dataclass(frozen=True)
class Timing:
    """Time of one call in µs: the median over rounds, the interquartile range over that median, each round's figure."""

    median_us: float
    spread: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, rounds: list[float]) -> Timing:
        """The timing of a list of µs, one a round."""
        middle = statistics.median(rounds)
        low, _, high = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else (middle,) * 3
        return cls(middle, (high - low) / middle if middle else 0.0, tuple(rounds))


def measure(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device | str,
    *,
    rounds: int = 5,
    budget_ms: float = 20.0,
    warmup: int = 3,
    cold: bool = True,
) -> dict[str, Timing]:
    """The time that `device` spends in one call of each variant.

    On cuda and xpu: device events around each call, recorded behind a sleeping kernel that keeps the device busy while
    the host queues the calls, so that launch gaps of the host are not counted (a variant that waits for the device
    itself, as `.item()` does, still shows its waits). With `cold` the L2 cache is read full of something else before
    each call. A variant whose calls are long runs untimed first, in each round, as often as it is timed and at least
    twice, to find the clocks that it leaves itself: what ran before decides how much power a device has left. On an
    H200 three products took 32.1 ms after a rest, 34.7 after a peer that needs less and 35.4 after themselves; a loss
    took 1.03 times as long as they where both had rested, 1.05 times where each followed itself, and from 1.00 to 1.12
    times by the order of turns. Elsewhere: the wall clock around each call, caches as they are.

    budget_ms: roughly how long a variant is run in each round. Whatever a variant raises propagates; fewer than one
    round raises ValueError.
    """
    device = torch.device(device)
    with _quiet(device):
        flush = _flusher(device) if cold else _nothing
        plans = {name: _plan(fn, device, flush, warmup, budget_ms) for name, fn in variants.items()}
        one_round = _device_round if device.type in EVENTS else _wall_round
        return interleave(rounds, {n: (lambda p=p: one_round(p, device, flush)) for n, p in plans.items()})


def interleave(
    rounds: int,
    variants: Mapping[str, Callable[[], float]],
    so_far: Callable[[dict[str, Timing]], None] = lambda timings: None,
) -> dict[str, Timing]:
    """Call each variant once a round; a variant returns the µs that it measured itself.

    Each round another begins, and others follow one another: what is left of one, as heat, is not always the same's.

    so_far: is given the timings after each round, for measurements that take so long that they may be stopped.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in _turns(names, i):
            found[name].append(variants[name]())
        so_far({name: Timing.of(times) for name, times in found.items()})
    return {name: Timing.of(times) for name, times in found.items()}


def _turns(names: list[str], which: int) -> list[str]:
    """The order of one round: every so many names on, from another one each round."""
    count = len(names)
    steps = [step for step in range(1, count) if math.gcd(step, count) == 1] or [1]
    step = steps[which % len(steps)]
    return [names[(which + turn * step) % count] for turn in range(count)]


def host_time(
    variants: Mapping[str, Callable[[], object]], device: torch.device | str, *, rounds: int = 5, calls: int = 25
) -> dict[str, Timing]:
    """The time that the host needs to issue one call of each variant, the device's own time excluded: of each round the
    median of so many calls, one after another, with all threads of the process on one core (`_one_core`). Of the rounds
    only the half counts in which all variants together took the least: what others do to that core lasts longer.

    Meaningful for inputs so small that the device keeps up; `calls` launches must fit the device's queue. On a CPU
    there is nothing to exclude, and kernels want their threads.
    """
    device = torch.device(device)

    def issue(fn):
        synchronize(device)
        marks = [time.perf_counter()]
        for _ in range(calls):
            fn()
            marks.append(time.perf_counter())
        synchronize(device)
        return statistics.median(end - start for start, end in itertools.pairwise(marks)) * 1e6

    with _quiet(device), _one_core() if device.type in EVENTS else contextlib.nullcontext():
        for fn in variants.values():
            for _ in range(10):
                fn()
        settle()
        found = interleave(rounds, {name: (lambda fn=fn: issue(fn)) for name, fn in variants.items()})
    together = [sum(times) for times in zip(*(timing.rounds for timing in found.values()))]
    calm = sorted(range(len(together)), key=together.__getitem__)[: (len(together) + 1) // 2]
    return {name: Timing.of([timing.rounds[i] for i in calm]) for name, timing in found.items()}


def wall_time(fn: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """µs of one of `calls` calls in a row, from an idle device until it has finished the last: the host counts, too."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    synchronize(device)
    return (time.perf_counter() - start) / calls * 1e6


def synchronize(device: torch.device) -> None:
    """Wait until the current device of this type has finished what was queued; a CPU always has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def peak_memory(fn: Callable[[], object], device: torch.device | str) -> int:
    """The most bytes that tensors held during one call above what they held before it.

    On cuda and xpu what the caching allocator handed out. On a CPU what went through torch's allocator, as its profiler
    saw it; scratch memory that a library allocates for itself is not in it.
    """
    device = torch.device(device)
    if device.type in EVENTS:
        module = torch.get_device_module(device)
        synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        fn()
        synchronize(device)
        return module.max_memory_allocated(device) - before
    held = peak = 0
    with _profiled(device, memory=True) as run:
        kept = fn()
        synchronize(device)
    del kept
    changes = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def launches(fn: Callable[[], object], device: torch.device | str) -> int:
    """Kernels that one call launches on `device`; on a CPU, ATen operators that ran and called no other operator."""
    device = torch.device(device)
    fn()
    with _profiled(device) as run:
        fn()
        synchronize(device)
    events = run.events()
    if device.type == "cpu":
        return sum(e.name.startswith(("aten::", "tilesmith::")) and not e.cpu_children for e in events)
    copies = ("Memcpy", "Memset")
    on_device = (e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation)
    return sum(not e.name.startswith(copies) for e in on_device)


@dataclass(frozen=True)
class _Plan:
    fn: Callable[[], object]
    calls: int
    untimed: int  # calls before them
    host: float  # seconds the host needs to issue one call and the flush before it


def _plan(fn, device: torch.device, flush, warmup: int, budget_ms: float) -> _Plan:
    for _ in range(max(warmup, 1)):
        flush()
        fn()
    settle()
    synchronize(device)
    start = time.perf_counter()
    flush()
    fn()
    host = time.perf_counter() - start
    synchronize(device)
    spent = time.perf_counter() - start
    calls = max(1, min(MAX_CALLS, int(budget_ms / 1e3 / max(spent, 1e-7))))
    return _Plan(fn, calls, max(calls, 2) if spent >= LONG else 0, host)


def _device_round(plan: _Plan, device: torch.device, flush) -> float:
    module = torch.get_device_module(device)
    marks = [(module.Event(enable_timing=True), module.Event(enable_timing=True)) for _ in range(plan.calls)]
    _burn(device, 1.5 * plan.host * (plan.untimed + plan.calls) + 1e-4, flush)
    for _ in range(plan.untimed):
        flush()
        plan.fn()
    for start, end in marks:
        flush()
        start.record()
        plan.fn()
        end.record()
    synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e3


def _wall_round(plan: _Plan, device: torch.device, flush) -> float:
    times = []
    for _ in range(plan.calls):
        flush()
        times.append(wall_time(plan.fn, device))
    return statistics.median(times)


def _burn(device: torch.device, seconds: float, flush) -> None:
    """Keep the device busy for about `seconds` without the host waiting for it."""
    seconds = min(seconds, LONGEST_SLEEP)
    if device.type == "cuda" and torch_private.sleep is not None:
        torch_private.sleep(int(seconds * SLEEP_CLOCK))
    else:
        for _ in range(max(1, int(seconds / 1e-4))):
            flush()


def _flusher(device: torch.device) -> Callable[[], object]:
    """A function that fills the L2 cache by reading, since lines left dirty would be written back at others' cost."""
    if device.type not in EVENTS:
        return _nothing
    other = torch.zeros(max(4 * arch_of(device).l2, 2**27) // 4, dtype=torch.int32, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    return lambda: torch.sum(other, 0, out=total)


def _nothing() -> None:
    return None


@contextlib.contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """The device made current and Python's collector off."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.get_device_module(device).device(device) if device.type in EVENTS else contextlib.nullcontext():
            yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """All threads of the process on one core, on Linux. A backward runs in a thread of its own, and to wake that on
    another core costs as much as a small op does, or several times as much where others use the machine."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before: dict[int, set[int]] = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            before[thread] = os.sched_getaffinity(thread)
    core = _calm_core(before[threading.get_native_id()])
    try:
        _place({thread: {core} for thread in before})
        yield
    finally:
        _place(before)


def _place(threads: Mapping[int, set[int]]) -> None:
    for thread, cores in threads.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def _calm_core(cores: set[int]) -> int:
    """The core on which this thread counts fastest: others are at work on some."""

    def count(core: int) -> float:
        os.sched_setaffinity(0, {core})
        start = time.perf_counter()
        for _ in range(50_000):
            pass
        return time.perf_counter() - start

    return min(cores, key=count)


def _profiled(device: torch.device, memory: bool = False):
    activities = [ProfilerActivity.CPU]
    if device.type in EVENTS:
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    return profile(activities=activities, profile_memory=memory)
