"""Which kernels each of many calls launches, by one session of PyTorch's profiler: to begin and to end one takes longer
than most calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity


def sleep() -> None:
    """A kernel that is no op's: `spin_kernel`."""
    torch.cuda._sleep(1)


class KernelsOfCalls:
    """Inside, `call` runs what it is given between two marks; afterwards `names` has the kernels of each call.

    activity: CUDA, or CPU, where operators stand for kernels. mark: launches a kernel with `marked` in its name, on the
    stream of the calls, so that time tells whose a kernel is.
    """

    def __init__(
        self,
        activity: ProfilerActivity = ProfilerActivity.CUDA,
        mark: Callable[[], object] = sleep,
        marked: str = "spin_kernel",
    ):
        self.mark, self.marked, self.calls, self.host = mark, marked, 0, activity is ProfilerActivity.CPU
        self.names: list[list[str]] = []
        self._profile = torch.profiler.profile(activities=[activity])

    def __enter__(self) -> KernelsOfCalls:
        self._profile.__enter__()
        return self

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args)."""
        self.calls += 1
        self.mark()
        out = fn(*args)
        self.mark()
        return out

    def __exit__(self, *problem: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(*problem)
        if problem[0] is not None:
            return
        parts: list[list[str]] = [[]]
        events = [event for event in self._profile.events() if self.host or event.device_type is not DeviceType.CPU]
        for event in sorted(events, key=lambda event: event.time_range.start):
            if self.marked in event.name:
                parts.append([])
            else:
                parts[-1].append(event.name)
        if len(parts) != 2 * self.calls + 1:
            raise RuntimeError(f"the profiler saw {len(parts) - 1} marks of {2 * self.calls}")
        self.names = parts[1::2]
