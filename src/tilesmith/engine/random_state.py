"""Random numbers that are drawn and given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def random_numbers_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards the random numbers of the CPU and of these devices are what they were."""
    by_kind: dict[str, set[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            by_kind.setdefault(device.type, set()).add(device.index or 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in by_kind.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        yield
