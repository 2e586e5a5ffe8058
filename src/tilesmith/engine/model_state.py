"""What a trial run of a model changes and how it is restored: random numbers, gradients, buffers, training flags."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_TRIAL: ContextVar[bool] = ContextVar("tilesmith_trial", default=False)


def in_trial() -> bool:
    """Whether a model is being run for its costs (`state_preserved`), not by its user."""
    return _TRIAL.get()


def host_numbers() -> tuple[object, bytes]:
    """The states of Python's and of NumPy's global generator, from which models of transformers draw; b"" where nobody
    has imported NumPy's."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), b"" if numpy is None else pickle.dumps(numpy.get_state(legacy=False))


def restore_host_numbers(state: tuple[object, bytes]) -> None:
    """Give the generators the states that `host_numbers` returned."""
    python, numpy = state
    random.setstate(python)  # type: ignore[arg-type]
    if numpy:
        sys.modules["numpy.random"].set_state(pickle.loads(numpy))


@contextlib.contextmanager
def random_numbers_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards the random numbers of the CPU, Python's and NumPy's included, and of these devices are what they
    were."""
    by_kind: dict[str, set[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            by_kind.setdefault(device.type, set()).add(device.index or 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in by_kind.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        stack.callback(restore_host_numbers, host_numbers())
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


def obstacle_to_probes(model: nn.Module) -> str | None:
    """Why a backward of `model` would do more than fill gradients, in words; None if it would not."""
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            return f"{name} is on meta and has no values; load the model first"
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return (
                f"{name} has a hook that runs after its gradient is accumulated (an optimizer inside the backward?), "
                "which a probe would set off"
            )
    return None


@contextlib.contextmanager
def state_preserved(model: nn.Module, *, backward: bool = True) -> Iterator[None]:
    """Inside, the model may be run forward and backward; afterwards its gradients, its buffers, its training flags and
    the random numbers of the CPU and of its devices are what they were. Gradients are absent inside.

    Raises RuntimeError for a model whose backward would do more than fill gradients, if it is to have a `backward`.
    """
    why = obstacle_to_probes(model) if backward else None
    if why is not None:
        raise RuntimeError(f"the model cannot be probed: {why}")
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    training = [(module, module.training) for module in model.modules()]
    before = _TRIAL.set(True)
    try:
        with buffers_kept(model), random_numbers_kept(p.device for p in parameters):
            for p in parameters:
                p.grad = None
            yield
    finally:
        _TRIAL.reset(before)
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient
        for module, flag in training:
            module.training = flag
