"""Work counters in global memory, from which the CTAs of a persistent kernel fetch their next tile."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from tilesmith.engine.recording import each_time

_COUNTERS = 1024  # how many launches may be in flight on a device at once
_rings: dict[tuple[int, int], tuple[Tensor, ...]] = {}
_turn = itertools.count()


def work_counter(device: torch.device, numbers: int = 4) -> Tensor:
    """Zeros, `numbers` of them in int32: the work counters of one launch of a persistent kernel, which resets them
    before it ends. Each launch gets other ones."""
    return each_time(partial(_counter, device, numbers))


def _counter(device: torch.device, numbers: int) -> Tensor:
    """Launches on different streams must not share a counter, and neither may a launch captured in a CUDA graph, which
    may run at any time."""
    # on a CPU kernels are interpreted or only compiled, one launch at a time, and on meta nothing runs
    if device.type in ("cpu", "meta") or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.zeros(numbers, dtype=torch.int32, device=device)
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    ring = _rings.get((index, numbers))
    if ring is None:
        zeros = torch.zeros(_COUNTERS, numbers, dtype=torch.int32, device=device)
        ring = _rings[index, numbers] = zeros.unbind()
        module.synchronize(device)  # once per process: another stream may use the counters first
    return ring[next(_turn) % _COUNTERS]
