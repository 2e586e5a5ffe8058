"""What a step of a model will allocate, from a pass over fake tensors, which have shapes and no memory."""

from __future__ import annotations

import contextlib
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
from tilesmith.engine.model_state import random_numbers_kept
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
        self._places: set[int] = set()  # where ignored storages begin: one of packed products spans several of them

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor) and _place(value) not in self._places:
                self._add(value.untyped_storage())
        return out

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Do not count these, which were there before."""
        for x in tensors:
            self._known[id(x.untyped_storage())] = x.untyped_storage()
            self._places.add(_place(x))
        self._places.discard(0)

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


def _place(x: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for one without."""
    real = type(x) in (Tensor, nn.Parameter) and x.device.type != "meta"
    return x.untyped_storage().data_ptr() if real else 0


def traced_peak(model: nn.Module, sample: Sample, batch: int, *, backward: bool, device: torch.device) -> int:
    """The most bytes that a step of so many rows holds beyond parameters and buffers: inputs, activations, gradients.

    Outputs besides the loss are dropped before the backward, as by a trainer. Nothing is computed, and the model is
    left as it was. Raises CannotTrace.
    """
    if torch_private.DispatchMode is None:
        raise CannotTrace(f"PyTorch {torch.__version__} has no TorchDispatchMode to count with")
    grain = 1 if device.type == "cpu" else GRAIN
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True  # it prints what is reported here
    try:
        mode = torch_private.fake_tensor_mode()
        mode.allow_non_fake_inputs = True  # a module may hold tensors that are neither parameters nor buffers
        with random_numbers_kept(()), torch.inference_mode(False), _fakes_in(model, mode) as fake, mode:
            live = LiveBytes(grain)
            live.ignore(iter(fake))
            with live, torch.set_grad_enabled(backward):
                args, kwargs = _inputs(sample, batch)
                out = model(*args, **kwargs)
                if backward:
                    out = loss_of(out)  # and nothing else, as in `Sample.step`
                    out.backward()
            return live.peak
    except Exception as problem:  # foreign code: whatever it raises says that it wants values
        raise CannotTrace(
            f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        ) from problem
    finally:
        log.disabled = silent


@contextlib.contextmanager
def _fakes_in(model: nn.Module, mode: Any) -> Iterator[list[Tensor]]:
    """Inside, a model has fake parameters and buffers, which are given. `torch.func.functional_call` would leave them
    in a module that stands in two places."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    before = [(table, dict(table)) for table in tables]
    fake: dict[int, Tensor] = {}
    try:
        for table, values in before:
            for name, value in values.items():
                if value is not None:
                    if id(value) not in fake:
                        fake[id(value)] = _faked(value, mode)
                    table[name] = fake[id(value)]
        yield list(fake.values())
    finally:
        for table, values in before:
            table.clear()
            table.update(values)


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

    optimizer: one that was made, which holds some of the model's parameters, a class, or a function from parameters to
    one; it is not stepped: what it keeps is seen on a small parameter of each dtype. None: (0, 0). Raises ValueError
    for one that cannot step like that.
    """
    if optimizer is None:
        return 0, 0
    trained = [p for p in model.parameters() if p.requires_grad]
    made = isinstance(optimizer, torch.optim.Optimizer)
    if made:
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [p for p in trained if id(p) in theirs]
    found = {dtype: _tried(optimizer, dtype) for dtype in {p.dtype for p in trained}}
    state = sum(int(found[p.dtype][0] * local(p).numel()) for p in trained)
    if made and optimizer.state:
        state = sum(local(x).nbytes for one in optimizer.state.values() for x in one.values() if isinstance(x, Tensor))
    if device.type == "cpu":  # one parameter after the other
        return state, max((int(found[p.dtype][1] * local(p).numel()) for p in trained), default=0)
    # torch's foreach implementations, the default on accelerators, hold one more tensor of each parameter's size
    return state, sum(local(p).nbytes for p in trained) if state else 0


def update_seconds(gradients: int, state: int, bandwidth: float | None) -> float:
    """Seconds that an optimizer's step takes, by the bytes that it moves; 0.0 where the bandwidth is not known.

    torch's foreach AdamW, whose state is twice the gradients, reads or writes a tensor of a parameter's size 20 times;
    one without state does so 3 times.
    """
    return (3 * gradients + 8.5 * state) / bandwidth if bandwidth else 0.0


def _tried(optimizer: Optimizer, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes that an optimizer keeps, bytes that a step needs besides) for each element of a small parameter."""
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
    try:
        made.step()
        counted = LiveBytes() if torch_private.DispatchMode is not None else None
        if counted is not None:
            kept = [x for x in made.state[small].values() if isinstance(x, Tensor)]
            counted.ignore(iter([small, small.grad, *kept]))
        with counted or contextlib.nullcontext():
            made.step()
    except Exception as problem:  # foreign code: one that wants a closure, or other gradients
        raise ValueError(
            f"optimizer: a step of {type(made).__name__} on a small parameter raises {type(problem).__name__}: "
            f"{problem}; give optimizer=None and add what it keeps"
        ) from problem
    kept = sum(x.nbytes for x in made.state[small].values() if isinstance(x, Tensor) and x.numel() > 1)
    return kept / small.numel(), (counted.peak if counted else 0) / small.numel()


def _accepted(optimizer: torch.optim.Optimizer) -> set[str]:

    return set(inspect.signature(type(optimizer).__init__).parameters)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a step of `batch_size` rows.

    parameters (with buffers), gradients, optimizer_state: of the whole model. step: what forward and backward hold at
    their peak besides parameters and optimizer state: activations, inputs, and gradients as far as they exist by then.
    optimizer_step: what the optimizer's step needs besides, when activations are gone. workspace: what libraries keep
    on the device. calibrated: whether fewer rows were really run; probes: real runs so far.
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
