"""The first step of a model: its calls of ops are found before they are made, by a run of a copy on fake tensors, and
the kernels of all of them are compiled side by side.

Without it threads know of an op when it is first called (`engine.ahead`), and the large kernels of a step, those of
attention and of the loss, begin one after another. The run comes once a launch of the forward has had to compile its
kernel, so there is none where kernels are in Triton's cache. It has a thread of its own, where no hook or mode of the
caller's sees it, and a copy of the model with fake parameters and buffers, so that the model stays as it is. Where it
fails, as where a model asks for values, kernels are compiled as they are without it.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith.engine import ahead, launcher, torch_private
from tilesmith.engine.model_state import random_numbers_kept
from tilesmith.engine.registry import DECLARED
from tilesmith.engine.threads import compilers
from tilesmith.models.blocks import BlockForm, observer, stateful_argument
from tilesmith.rewrite import forms, observed, original_class

log = logging.getLogger("tilesmith")

# libraries whose forwards have no effects but on their modules
_KNOWN = ("torch", "transformers", "tilesmith", "peft", "accelerate")
_NOTHING = contextlib.nullcontext()
# model -> the kinds of call, (training, with gradients), that were looked at
_looked: weakref.WeakKeyDictionary[nn.Module, set[tuple[bool, bool]]] = weakref.WeakKeyDictionary()


def foreseen(
    whole: Callable[..., Any],
    model: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any],
    known: Callable[[], contextlib.AbstractContextManager[None]],
) -> contextlib.AbstractContextManager[None]:
    """A context for whole(model, *args, **kwargs), a model's forward: its first launch that compiles has the kernels of
    all others, and of their gradients, compiled by threads. Only the first call in training and in evaluation, with
    gradients and without, is looked at.

    known: reads what the model would read of this call's tensors, and gives a context in which a run on fake tensors,
    which have no values, knows it.
    """
    kind = (model.training, torch.is_grad_enabled())
    if kind in _looked.get(model, ()) or compilers() is None:
        return _NOTHING
    device = _device(model)
    if device is None:
        return _NOTHING
    _looked.setdefault(model, set()).add(kind)
    if _obstacle(model, args, kwargs):
        return _NOTHING
    return launcher.after_compiling(partial(_look, _Call(whole, model, args, kwargs, known, device, kind[1])))


class _Call(NamedTuple):
    """A call of a model. grad: whether gradients are recorded."""

    whole: Callable[..., Any]
    model: nn.Module
    args: tuple
    kwargs: Mapping[str, Any]
    known: Callable[[], contextlib.AbstractContextManager[None]]
    device: torch.device
    grad: bool


def _device(model: nn.Module) -> torch.device | None:
    """The CUDA device of a model's first parameter; None where it is on another kind, from which it may yet move."""
    first = next(model.parameters(), None)
    return first.device if first is not None and first.device.type == "cuda" else None


def _obstacle(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Why a call is not run on a copy, which may have effects outside of the model; "" where nothing is in the way."""
    if stateful_argument(args, dict(kwargs)):
        return "an argument holds state"
    if observer() or torch_private.hooks_of_all_modules() or torch.cuda.is_current_stream_capturing():
        return "somebody watches"
    if len({p.device for p in model.parameters()}) > 1:
        return "it is on several devices"
    for module in model.modules():
        if not _known(original_class(type(module))) or not all(_known(f) for f in _functions(module)):
            return "code of others may have effects"
        held = (*module._parameters.values(), *module._buffers.values())
        if any(x is not None and type(x) not in (Tensor, nn.Parameter) for x in held):
            return "parameters are of a kind of their own"
        if isinstance(next(iter(forms(module)), None), BlockForm) or (module is not model and observed(module)):
            return "modules have hooks or are recorded"  # hooks of the model itself are above what is run
        if getattr(module, "_compiled_call_impl", None) is not None:
            return "modules are compiled"
    return ""


def _known(made: Any) -> bool:
    return str(made.__module__).partition(".")[0] in _KNOWN


def _functions(module: nn.Module) -> list[Any]:
    """Functions that were put on the instance, such as a loss."""
    return [value for value in module.__dict__.values() if isinstance(value, FunctionType)]


def _look(call: _Call) -> None:
    """Run the call on fake tensors, on another thread, and wait for it."""
    try:
        known = call.known()
    except Exception:  # whatever it is, the call itself is still to come
        log.debug("what the first step reads is not known", exc_info=True)
        known = _NOTHING
    kinds = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    def run() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(call.device))
            for kind, dtype in kinds.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(call.grad))
            stack.enter_context(known)
            _run_copy(call)

    with _silent(), random_numbers_kept([call.device]):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="tilesmith-first-step")
        thread.start()
        thread.join()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, no warnings, nor what PyTorch logs of operations that fake tensors do not have."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    before, told.disabled = told.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        told.disabled = before


def _run_copy(call: _Call) -> None:
    watching: _Watching | None = None
    try:
        mode = torch_private.fake_tensor_mode()
        mode.allow_non_fake_inputs = True  # a module may make tensors of numbers
        made: dict[int, Any] = {}
        for x in (x for module in call.model.modules() for x in _tensors(module.__dict__)):
            made.setdefault(id(x), _fake(x, mode))
        for module in call.model.modules():
            report = module.__dict__.get("tilesmith_report")
            made[id(report)] = report
        model = copy.deepcopy(call.model, made)
        args, kwargs = _faked(call.args, mode), _faked(dict(call.kwargs), mode)
        with mode, _Watching(call.device, call.grad) as watching:
            call.whole(model, *args, **kwargs)
    except BaseException:  # foreign code: whatever it raises, the call itself is still to come
        log.debug("the calls of the first step are not all known", exc_info=True)
    if watching is not None:
        log.debug("the first step: %d calls of ops whose kernels are compiled ahead", len(watching.seen))


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in the attributes of a module, which are parameters and buffers and what it holds besides."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one, depth - 1)


def _fake(x: Tensor, mode: Any) -> Tensor:
    made = mode.from_tensor(x.detach())
    if isinstance(x, nn.Parameter):
        return nn.Parameter(made, requires_grad=x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def _faked(value: Any, mode: Any) -> Any:
    if isinstance(value, Tensor):
        return _fake(value, mode)
    if isinstance(value, dict):
        return {name: _faked(v, mode) for name, v in value.items()}
    return type(value)(_faked(v, mode) for v in value) if type(value) in (tuple, list) else value


class _Watching(torch_private.DispatchMode or object):
    """Has the kernels of each call of an op that it sees compiled, and, with `grad`, those of its gradient."""

    def __init__(self, device: torch.device, grad: bool):
        super().__init__()
        self.device, self.grad = device, grad
        self.seen: set[tuple] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "tilesmith":
            for op in [op for op in DECLARED.values() if op.handle is func]:
                self._see(op, op.complete(args), (kwargs or {}).get("pin", ""))
        return func(*args, **(kwargs or {}))

    def _see(self, op: Any, args: tuple, pin: str) -> None:
        call = (op.name, pin, *map(_facts, args))
        if call in self.seen:  # of another layer
            return
        self.seen.add(call)
        with torch_private.without_modes(), torch.no_grad():
            given = tuple(map(_stand_in, args))
        asked = any(a.requires_grad for a in given if isinstance(a, Tensor))
        ahead.compile_call(op, pin, given, self.device, self.grad and asked)


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), _shift(value), value.requires_grad
    return tuple(map(_facts, value)) if isinstance(value, tuple | list) else repr(value)


def _stand_in(value: Any) -> Any:
    """What stands for an argument: tensors on meta, as far behind a multiple of 16 bytes as the real ones will be."""
    if isinstance(value, tuple | list):
        return type(value)(map(_stand_in, value))
    if not isinstance(value, Tensor):
        return value
    size = _shift(value) + 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride()) if n > 0)
    whole = torch.empty(size, dtype=value.dtype, device="meta")
    return whole.as_strided(value.shape, value.stride(), _shift(value)).requires_grad_(value.requires_grad)


def _shift(x: Tensor) -> int:
    """How many elements behind a multiple of 16 bytes a tensor begins, where its memory begins at one."""
    return x.storage_offset() * x.element_size() % 16 // x.element_size()
