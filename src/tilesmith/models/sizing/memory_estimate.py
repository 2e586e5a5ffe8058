"""What a step of a model will allocate, from a pass over fake tensors, which have shapes and no memory."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.memory import human_size
from tilesmith.models.sizing.sample_inputs import Sample, loss_of

GRAIN = 512  # bytes that the allocators of accelerators round up to


class CannotTrace(RuntimeError):
    """A model that fake tensors do not get through, as one whose shapes depend on values."""


class LiveBytes(torch_private.DispatchMode or object):
    """Counts the storages that operators make while it is entered: `now` and at its highest, `peak`, in bytes."""

    def __init__(self, grain: int = 1):
        super().__init__()
        self.grain, self.now, self.peak = grain, 0, 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return out

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Do not count these, which were there before."""
        for x in tensors:
            self._known[id(x.untyped_storage())] = x.untyped_storage()

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // self.grain) * self.grain
        self._known[key] = weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def traced_peak(model: nn.Module, sample: Sample, batch: int, *, backward: bool, device: torch.device) -> int:
    """The most bytes that a step of so many rows holds beyond parameters and buffers: inputs, activations, gradients.

    Nothing is computed, and the model is not touched. Raises CannotTrace.
    """
    if torch_private.DispatchMode is None:
        raise CannotTrace(f"PyTorch {torch.__version__} has no TorchDispatchMode to count with")
    grain = 1 if device.type == "cpu" else GRAIN
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    random = torch.random.get_rng_state()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True  # it prints what is reported here
    try:
        mode = torch_private.fake_tensor_mode()
        mode.allow_non_fake_inputs = True  # a module may hold tensors that are neither parameters nor buffers
        fake = {name: _faked(value, mode) for name, value in state.items()}
        with mode:
            live = LiveBytes(grain)
            live.ignore(iter(fake.values()))
            with live, torch.set_grad_enabled(backward):
                args, kwargs = _inputs(sample, batch)
                out = torch.func.functional_call(model, fake, args, kwargs)
                if backward:
                    loss_of(out).backward()
            return live.peak
    except Exception as problem:  # foreign code: whatever it raises says that it wants values
        raise CannotTrace(
            f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        ) from problem
    finally:
        log.disabled = silent
        torch.random.set_rng_state(random)


def _faked(value: Tensor, mode: Any) -> Tensor:
    made = mode.from_tensor(value.detach())
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


def _inputs(sample: Sample, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fake tensors of the shapes of `sample.batched(batch)`."""
    dims = iter(sample.dims)

    def made(value: Any) -> Any:
        dim = next(dims)
        if not isinstance(value, Tensor):
            return value
        shape = [batch if i == dim else n for i, n in enumerate(value.shape)]
        return torch.zeros(shape, dtype=value.dtype, device=value.device)

    return tuple(made(v) for v in sample.args), {name: made(v) for name, v in sample.kwargs.items()}


def held(tensors: Iterator[Tensor]) -> int:
    """Bytes of these tensors on this rank, each storage once."""
    storages = [local(x).untyped_storage() for x in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def local(x: Tensor) -> Tensor:
    """What this rank has of a DTensor; other tensors as they are."""
    return getattr(x, "_local_tensor", x)


Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[list[Tensor]], torch.optim.Optimizer]


def check_optimizer(who: str, optimizer: object) -> None:
    """Raise TypeError for what is no `Optimizer` and not None."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise TypeError(
            f"{who}: optimizer must be a torch.optim.Optimizer, a class of one such as torch.optim.AdamW, a function "
            f"from parameters to one, or None, got {optimizer!r}"
        )


def optimizer_bytes(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> tuple[int, int]:
    """(bytes that an optimizer keeps for the model once it has stepped, bytes that a step needs besides).

    optimizer: one that was made, a class, or a function from parameters to one; it is not stepped: what it keeps is
    seen on a small parameter of each dtype. None: (0, 0).
    """
    if optimizer is None:
        return 0, 0
    trained = [p for p in model.parameters() if p.requires_grad]
    kept: dict[torch.dtype, float] = {}
    for dtype in {p.dtype for p in trained}:
        kept[dtype] = _kept_per_element(optimizer, dtype)
    state = sum(int(kept[p.dtype] * local(p).numel()) for p in trained)
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        state = sum(local(x).nbytes for one in optimizer.state.values() for x in one.values() if isinstance(x, Tensor))
    # torch's foreach implementations, the default on accelerators, hold one more tensor of each parameter's size
    step = 0 if device.type == "cpu" or not state else sum(local(p).nbytes for p in trained)
    return state, step


def _kept_per_element(optimizer: Optimizer, dtype: torch.dtype) -> float:
    small = nn.Parameter(torch.zeros(16, 16, dtype=dtype))
    small.grad = torch.zeros_like(small)
    if isinstance(optimizer, torch.optim.Optimizer):
        made = type(optimizer)([small], **{k: v for k, v in optimizer.defaults.items() if k in _accepted(optimizer)})
    else:
        made = optimizer([small])
        if not (hasattr(made, "step") and hasattr(made, "state")):
            raise TypeError(
                f"optimizer must make a torch.optim.Optimizer of a list of parameters, it made {type(made).__name__}"
            )
    made.step()
    return sum(x.nbytes for x in made.state[small].values() if isinstance(x, Tensor) and x.numel() > 1) / small.numel()


def _accepted(optimizer: torch.optim.Optimizer) -> set[str]:

    return set(inspect.signature(type(optimizer).__init__).parameters)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a step of `batch_size` rows.

    parameters (with buffers), gradients, optimizer_state: of the whole model. step: what forward and backward hold at
    their peak besides parameters and optimizer state: activations, inputs, and gradients as far as they exist by then.
    optimizer_step: what the optimizer's step needs besides, when activations are gone. workspace: what libraries keep
    on the device. calibrated: whether a real run of fewer rows has set the scale; probes: real runs so far.
    """

    batch_size: int
    parameters: int
    gradients: int
    optimizer_state: int
    step: int
    optimizer_step: int
    workspace: int
    calibrated: bool
    probes: int

    @property
    def total(self) -> int:
        """The peak: the larger of the step's and of the optimizer's."""
        fixed = self.parameters + self.optimizer_state + self.workspace
        return fixed + max(self.step, self.gradients + self.optimizer_step)

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer_state", "step", "optimizer_step", "workspace")
        told = ", ".join(f"{name} {human_size(getattr(self, name))}" for name in parts)
        how = "calibrated by a run" if self.calibrated else "not calibrated"
        return f"{human_size(self.total)} at batch {self.batch_size} ({how}): {told}"
