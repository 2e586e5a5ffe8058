"""Counters that programs of a launch draw their work from."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from tilesmith.engine.recording import each_time

_COUNTERS = 1024  # launches of one device that may be in flight at once
_rings: dict[tuple[int, int], tuple[Tensor, ...]] = {}
_turn = itertools.count()


def counter(device: torch.device, numbers: int = 4) -> Tensor:
    """Zeros (so many, int32) that a launch counts up and sets back, others at each launch."""
    return each_time(partial(_counter, device, numbers))


def _counter(device: torch.device, numbers: int) -> Tensor:
    """Launches on several streams have each their own; so has one in a CUDA graph, which may run at any time."""
    # on a CPU kernels are interpreted or only compiled
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.zeros(numbers, dtype=torch.int32, device=device)
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    ring = _rings.get((index, numbers))
    if ring is None:
        zeros = torch.zeros(_COUNTERS, numbers, dtype=torch.int32, device=device)
        ring = _rings[index, numbers] = zeros.unbind()
        module.synchronize(device)  # once in a process: other streams may be the first to use their zeros
    return ring[next(_turn) % _COUNTERS]
