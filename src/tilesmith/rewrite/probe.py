"""Find out what a module computes by running its class on small inputs, on the CPU, without copying its weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tilesmith.nn.norm import CASTER
from tilesmith.rewrite.variants import original_class

DTYPES = (torch.float32, torch.bfloat16)

T = TypeVar("T")


class Unlike(Exception):
    """The module does not compute what a rule looks for; the message says why."""


def shell(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """An instance of the module's own class with its plain attributes, but only the tensors and children given here.

    Hooks are left behind, and so are a child that casts to 8 bits and a forward that was put on the instance: it would
    run the module itself, with its weights. Others that are not given raise `Unlike` when they are called.
    """
    twin = object.__new__(original_class(type(module)))
    nn.Module.__init__(twin)
    blank = {*twin.__dict__, "forward"}
    twin.__dict__.update({name: value for name, value in module.__dict__.items() if name not in blank})
    twin.training = module.training
    for name, old in module._parameters.items():
        given = (parameters or {}).get(name)
        twin._parameters[name] = None if old is None or given is None else nn.Parameter(given, requires_grad=False)
    twin._buffers.update(buffers or {})
    for name in (n for n in module._modules if n != CASTER):
        twin._modules[name] = (children or {}).get(name) or _Unexpected(name)
    return twin


class _Unexpected(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise Unlike(f"it also calls its child {self.name}")


def linear(rows: int, columns: int, dtype: torch.dtype, *, scale: float, phase: float) -> nn.Linear:
    """A small linear layer with fixed weights, to stand in for a large one. Draws no random numbers."""
    made = nn.Linear(columns, rows, bias=True, device="meta", dtype=dtype)
    made.weight = nn.Parameter(wave(rows, columns, phase=phase, scale=scale).to(dtype), requires_grad=False)
    made.bias = nn.Parameter(wave(rows, phase=phase + 0.5, scale=0.1 * scale).to(dtype), requires_grad=False)
    return made


def wave(*shape: int, phase: float = 0.0, scale: float = 1.0) -> Tensor:
    """Fixed values of irregular sign and size, fp32, on the CPU."""
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.float32, device="cpu")
    return (torch.sin(steps * 1.7 + phase) * (1 + torch.cos(steps * 0.31 + phase)) * scale).view(shape)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run foreign code on probe inputs; whatever it raises becomes `Unlike`."""
    try:
        with isolated():
            return function(*args, **kwargs)
    except Unlike:
        raise
    except Exception as error:  # foreign code: any exception means that the module wants other inputs than these
        raise Unlike(f"it raised {type(error).__name__} on small inputs") from error


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """No gradients, no autocast, tensors on the CPU, random numbers that nobody misses: where probes run."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def only_input(cls: type) -> str:
    """The name of the one tensor that `forward` takes. Raises `Unlike` when it requires or offers more."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Unlike(f"its forward takes ({', '.join(str(p.name) for p in parameters)})")
    return parameters[0].name


def disagreement(found: Any, wanted: Tensor) -> float:
    """How much two results differ: the share of elements in bf16, the worst relative deviation in fp32.

    Rounding twice instead of once changes about a fifth of the elements in bf16, another order of summation hardly any,
    so the share tells apart forms that differ only in where they round. Infinite where shape or dtype differ.
    """
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if wanted.dtype is torch.bfloat16:
        return (found != wanted).double().mean().item()
    scale = wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)
    return ((found - wanted).abs().max() / scale).item()


class Verdicts:
    """Answers of one rewrite, asked once per class and configuration of its instances."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, str | None]] = {}

    def of(self, module: nn.Module, answer: Callable[[], T], *more: Hashable) -> T:
        """`answer()`, or what it was for a module like this one; `Unlike` is remembered and raised again."""
        key = (_likeness(module), *more)
        if key not in self._known:
            try:
                self._known[key] = (answer(), None)
            except Unlike as verdict:
                self._known[key] = (None, str(verdict))
        found, reason = self._known[key]
        if reason is not None:
            raise Unlike(reason)
        return found


def _likeness(module: nn.Module) -> Hashable:
    """Equal for two instances of one class that can only differ in the values of their tensors.

    Attributes that are not plain values count as equal only when they are one object; all of them are alive while the
    model is rewritten, so ids are safe to compare.
    """
    attributes = tuple(
        (name, _identity(value))
        for name, value in module.__dict__.items()
        if name not in _OWN and not name.startswith("_")
    )
    tensors = tuple((name, None if p is None else p.shape) for name, p in module._parameters.items())
    buffers = tuple((name, None if b is None else b.shape) for name, b in module._buffers.items())
    children = tuple((name, _kind(child)) for name, child in module.named_children())
    return original_class(type(module)), attributes, tensors, buffers, children


def _identity(value: Any) -> Hashable:
    """Equal for two plain values of one type, since 1 == 1.0 == True, and for one object."""
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _kind(child: nn.Module) -> Hashable:
    """Equal for two children of one class that have the same settings, such as a GELU's `approximate`."""
    settings = tuple((name, _identity(value)) for name, value in settings_of(child))
    return original_class(type(child)), settings, tuple((name, _kind(c)) for name, c in child.named_children())


def number_of(module: nn.Module) -> int | None:
    """The index of the layer of a module whose methods read it, so that layers may compute something else."""
    return module.__dict__.get("layer_idx") if "layer_idx" in names_read(original_class(type(module))) else None


@functools.cache
def names_read(cls: type) -> frozenset[str]:
    """The attributes and globals that the methods of a class name, but for `__init__` and what every module has."""
    own = (base for base in cls.__mro__ if base not in (nn.Module, object))
    methods = (method for base in own for name, method in vars(base).items() if name != "__init__")
    return frozenset(n for m in methods if inspect.isfunction(m) for n in inspect.unwrap(m).__code__.co_names)


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The numbers, strings, flags and functions among a module's attributes, by name; not what layers differ in."""
    kinds = (*_PLAIN, types.FunctionType, types.BuiltinFunctionType)
    own = ((n, value) for n, value in vars(module).items() if n not in _OWN and not n.startswith("_"))
    return tuple(sorted(((n, value) for n, value in own if isinstance(value, kinds)), key=lambda one: one[0]))


_PLAIN = (bool, int, float, str, type(None))
# Attributes in which the layers of one model differ, as a rule without computing anything else (`number_of`).
_OWN = frozenset({"training", "layer_idx"})
