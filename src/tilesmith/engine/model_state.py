"""What a run of a model changes beside its gradients: buffers and random numbers, and how they are given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


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


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers of a model are the same objects with the same values."""
    # through the modules, as a buffer may be replaced as well as written to
    kept = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    versions = [None if buffer is None or buffer.is_inference() else buffer._version for _, _, buffer, _ in kept]
    try:
        yield
    finally:
        for (module, name, buffer, values), version in zip(kept, versions):
            module._buffers[name] = buffer
            if buffer is None or (version is not None and buffer._version == version and _same(buffer, values)):
                continue  # not written, so that what was saved for a backward stays valid
            with torch.no_grad(), torch.inference_mode(buffer.is_inference()):  # elsewhere its tensors refuse writes
                buffer.copy_(values)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether plain tensors have the same values: a write to `.data` does not show in the version."""
    return type(x) is Tensor and x.device.type != "meta" and torch.equal(x, y)
