"""Time and memory of steps that ranks take together: those of the slowest rank, the same numbers on all of them."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tilesmith.bench.run import reason
from tilesmith.engine.threads import settle
from tilesmith.engine.timing import synchronize, wall_time

ALONE = "one GPU"  # begins the names of steps that no provider takes
KEEP = 1.15  # a provider this much slower than the best is timed twice, not five times
SINGLE = 0.4  # seconds from which one run is a measurement
LONG = 2.0  # seconds from which three rounds are enough


@dataclass(frozen=True)
class Step:
    """What is timed, and what it runs in: entered once for all runs of a round."""

    run: Callable[[], Any]
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """The default group that torchrun describes, for as long as the block runs; the rank."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # or attention's programs come before NCCL's; for everyone
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def current_device() -> torch.device:
    """This rank's."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def slowest(seconds: float, device: torch.device) -> float:
    """The same number on all ranks, so that all decide alike."""
    x = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


def memory_in_use(device: torch.device) -> int:
    """Bytes; from here on the most are counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """The most bytes in use since `memory_in_use`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def first(make: Callable[[], Step], device: torch.device) -> tuple[Step | None, str]:
    """A step that has run once on all ranks, or why it has not on one of them."""
    step, why = None, ""
    try:
        step = make()
        with step.within():
            step.run()
        settle()
        synchronize(device)
    except Exception as problem:  # whatever a peer throws is its row
        why = reason(problem)
    whys: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(whys, why)
    failed = [f"rank {r}: {text}" for r, text in enumerate(whys) if text]
    return (None, "; ".join(failed)) if failed else (step, "")


def seconds(step: Step, device: torch.device) -> float:
    """Of one run, the mean of some where it is short."""
    with step.within():
        once = _timed(step, device, 1)  # also finds the clocks that the step causes, and fills the allocator
        return once if once > SINGLE else _timed(step, device, max(1, min(10, int(0.05 / once))))


def _timed(step: Step, device: torch.device, times: int) -> float:
    synchronize(device)
    dist.barrier()
    return slowest(wall_time(step.run, device, times) / 1e6, device)


def rounds(steps: dict[str, Step], device: torch.device, count: int) -> dict[str, list[float]]:
    """Seconds round by round, in turns. What is far behind after two rounds stops there. A round before them counts
    only for long steps: in a new process the first runs of short ones have taken the host half as long again."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for which in range(-1, count):
        names = list(steps)
        done = {name: statistics.median(t) for name, t in times.items() if t}
        best = min((median for name, median in done.items() if not name.startswith(ALONE)), default=0.0)
        for name in names[which % len(names) :] + names[: which % len(names)] if names else []:
            timed = len(times[name])
            if timed == count or (timed >= 3 and done[name] > LONG):
                continue
            if timed >= 2 and not name.startswith(ALONE) and done[name] > KEEP * best:
                continue
            took = seconds(steps[name], device)
            if which >= 0 or took > SINGLE:
                times[name].append(took)
    return times
