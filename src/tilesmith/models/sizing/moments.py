"""What a step holds at each of its operators, by runs of two sizes, and so what it holds at its peak with more rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from tilesmith.engine import torch_private
from tilesmith.engine.timing import EVENTS
from tilesmith.models.sizing.sample_inputs import Sample

NEAR = 0.02  # of a step's peak: how far off that of a step may be that runs under a dispatch mode


class Moments(NamedTuple):
    """A step of `batch` rows. operators: in the order in which they ran. levels: of each, the most bytes that were held
    since the end of the one before it, its scratch memory included, beyond what was held before the step."""

    batch: int
    operators: tuple[str, ...]
    levels: tuple[int, ...]


class _Levels(torch_private.DispatchMode or object):
    """Reads the allocator's peak after each operator, and starts it anew."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.module, self.device = torch.get_device_module(device), device
        self.operators: list[str] = []
        self.levels: list[int] = []
        self.module.reset_peak_memory_stats(device)
        self.before = self.module.memory_allocated(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.append(str(func))
        self.levels.append(self.module.max_memory_allocated(self.device) - self.before)
        self.module.reset_peak_memory_stats(self.device)
        return out


def moments(
    model: nn.Module, sample: Sample, batch: int, *, backward: bool, device: torch.device, peak: int
) -> tuple[Moments, ...]:
    """The moments of steps of half as many rows and of so many, whose peak is known; gradients are None afterwards.

    () where they do not tell: without TorchDispatchMode, on a device whose allocator does not say its peak, of a single
    row, and for a model that runs under a dispatch mode otherwise, or not at all.
    """
    if batch < 2 or device.type not in EVENTS or torch_private.DispatchMode is None:
        return ()
    try:
        found = tuple(_step(model, sample, rows, backward, device) for rows in (batch // 2, batch))
    except Exception:  # foreign code: whatever it raises, its step is estimated without this
        return ()
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    known = all(one.levels for one in found) and abs(max(found[-1].levels) - peak) <= NEAR * peak
    return found if known and found[0].operators == found[1].operators else ()


def _step(model: nn.Module, sample: Sample, batch: int, backward: bool, device: torch.device) -> Moments:
    _watched(model, sample, batch, backward, device)  # may compile, and take what libraries keep
    return _watched(model, sample, batch, backward, device)


def _watched(model: nn.Module, sample: Sample, batch: int, backward: bool, device: torch.device) -> Moments:
    for parameter in model.parameters():
        parameter.grad = None
    levels = _Levels(device)
    with levels:
        sample.step(model, batch, backward=backward)
    return Moments(batch, tuple(levels.operators), tuple(levels.levels))


def peak_of(found: tuple[Moments, ...], batch: int) -> int:
    """Bytes that a step of `batch` rows holds at its peak, by the moments of two steps of the same operators.

    What is held at one operator grows evenly with the rows, or does not grow, as gradients of weights and the scratch
    memory of a sum over rows. Which of them has the most changes with the rows, so the two peaks do not tell.
    """
    few, many = found
    times = (batch - many.batch) / (many.batch - few.batch)
    return max(math.ceil(high + max(0, high - low) * times) for low, high in zip(few.levels, many.levels))
