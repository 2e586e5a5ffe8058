"""What the arguments of functions and layers must be, where no op's check sees them: errors that name the argument."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilesmith.engine import torch_private
from tilesmith.engine.arguments import as_tensor, dense, no_argument, shown
from tilesmith.engine.written import written
from tilesmith.hardware.detect import detect_available_devices

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = (torch.int32, torch.int64)  # of indices, labels and lengths

_T = TypeVar("_T")


def suggesting(kind: type[_T]) -> type[_T]:
    """Decorate a dataclass: the TypeError for a name that it has no field of says which field was likely meant.

    The constructor is generated anew with the same parameters, since a catch-all of all arguments would cost a mask a
    fifth of the time that it takes to make, and one that calls the former would cost compiled models guards.
    `inspect.signature`, pickling and comparison stay what they were.
    """
    made = kind.__init__
    parameters = list(inspect.signature(made).parameters.values())[1:]
    names = [p.name for p in parameters]
    if [f.name for f in fields(kind) if f.default_factory is MISSING] != names:
        raise TypeError(f"{kind.__name__}: fields that are no arguments, or are made anew, are not supported")

    def refuse(misplaced: dict[str, Any]) -> None:
        raise TypeError(no_argument(kind.__name__, misplaced, names))

    given = ", ".join(n if p.default is p.empty else f"{n}=defaults[{n!r}]" for n, p in zip(names, parameters))
    lines = [f"def __init__(self, {given}, **misplaced):", "    if misplaced:", "        refuse(misplaced)"]
    lines += [f"    of.__setattr__(self, {n!r}, {n})" for n in names]  # as a frozen dataclass does it
    lines += ["    self.__post_init__()"] if hasattr(kind, "__post_init__") else []
    make = written("make(of, defaults, refuse)", [*lines, "return __init__"], f"arguments of {kind.__name__}", {})
    init = make(object, {p.name: p.default for p in parameters}, refuse)
    kind.__init__ = functools.wraps(made)(init)
    return kind


def attributed_to(*inner: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that calls ops with what it was given: their errors begin with its name, not with theirs."""
    heads = tuple(f"{name}: " for name in inner)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, NotImplementedError) as problem:
                told = str(problem)
                head = next((h for h in heads if told.startswith(h)), None)
                if head is None:
                    raise
                raise type(problem)(f"{function.__name__}: {told[len(head) :]}") from problem

        return call

    return decorate


def tensor(op: str, name: str, x: Any, dims: tuple[str, ...] | None = None) -> None:
    """Raise TypeError unless x is a dense tensor; ValueError unless it has `dims`, which only name them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {_came(x)}{as_tensor(x)}")
    dense(op, name, x)
    if dims is not None and x.ndim != len(dims):
        raise ValueError(f"{op}: {name} must be [{', '.join(dims)}], got {list(x.shape)}")


def floating(op: str, name: str, x: Tensor) -> None:
    """TypeError unless x has one of `FLOATS`."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} has dtype {x.dtype}; float16, bfloat16, float32 and float64 are supported: cast it, for "
            "example with .float()"
        )


def one_device(op: str, name: str, x: Tensor, other: str, y: Tensor) -> None:
    """ValueError unless x is where y is."""
    if x.device != y.device:
        raise ValueError(f"{op}: {name} is on {x.device}, {other} on {y.device}; move them to one device")


def alike(op: str, first: str, x: Tensor, name: str, y: Tensor) -> None:
    """Raise unless the tensor y has the dtype (of those that kernels serve) and the device of the tensor x."""
    floating(op, first, x)
    floating(op, name, y)
    if y.dtype != x.dtype:
        raise TypeError(f"{op}: {name} has dtype {y.dtype}, {first} has {x.dtype}; they must match: cast one of them")
    one_device(op, name, y, first, x)


def shaped(op: str, name: str, x: Any, *shapes: tuple[int, ...], device: torch.device | None = None) -> None:
    """Raise unless x is None or a tensor of one of `shapes`, on `device` if given."""
    if x is None:
        return
    tensor(op, name, x)
    if all(tuple(x.shape) != shape for shape in shapes):
        raise ValueError(f"{op}: {name} must be {' or '.join(str(list(s)) for s in shapes)}, got {list(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}; it must be on {device}, like the other tensors")


def readable(x: Tensor) -> bool:
    """Whether a check may look at the numbers in x: on a CPU, in eager mode. Elsewhere asking waits for the device, or
    has no answer."""
    known = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return known and torch_private.functorch() is None


def packed(name: str, x: Tensor, tokens: int | None = None) -> None:
    """ValueError unless the starts of packed documents [N + 1] ascend from 0, to `tokens` at most; where `readable`."""
    if not readable(x):
        return
    values = x.tolist()
    if values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise ValueError(
            f"{name} holds {values[:8]}; it must ascend from 0: the start of each document, then the end of the "
            "last; make it of a 0 and lengths.cumsum(0)"
        )
    if tokens is not None and values[-1] > tokens:
        raise ValueError(
            f"{name} ends at {values[-1]}; there are {tokens} tokens, and it must end at {tokens} or before: give the "
            "document boundaries of this row"
        )


def integer(op: str, name: str, value: Any) -> int:
    """value, or TypeError unless it is an int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {_came(value)}")
    return value


def size(op: str, name: str, value: Any, least: int = 1) -> int:
    """value, an int of at least `least`, or an error."""
    integer(op, name, value)
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return value


def number(op: str, name: str, value: Any, least: float | None = None) -> float:
    """value, a finite number of at least `least`, or an error."""
    if isinstance(value, float) and (-_LARGEST if least is None else least) <= value <= _LARGEST:  # the usual case
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{op}: {name} must be a number, got {_came(value)}")
    if not float("-inf") < value < float("inf"):
        raise ValueError(f"{op}: {name} must be finite, got {value}")
    if least is not None and value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return value


def positive(op: str, name: str, value: Any) -> float:
    """value, a finite number above 0, or an error."""
    if type(value) is float and 0.0 < value < float("inf"):  # the usual case, on the way of every call
        return value
    if number(op, name, value) <= 0:
        raise ValueError(f"{op}: {name} must be above 0, got {value}")
    return value


def probability(op: str, name: str, p: Any) -> float:
    """p as a float, or an error unless it is a number in [0, 1)."""
    if type(p) is not float and (isinstance(p, bool) or not isinstance(p, numbers.Real | torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number in [0, 1), got {_came(p)}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: {name} must be in [0, 1), got {p}; give the fraction to drop")
    return float(p)


def flag(op: str, name: str, value: Any) -> bool:
    """value, or TypeError unless it is True or False."""
    if value is True or value is False:  # the usual case, on the way of every call
        return value
    if not isinstance(value, bool | torch.SymBool):
        raise TypeError(f"{op}: {name} must be True or False, got {_came(value)}")
    return value


def divides(op: str, name: str, value: int, whole_name: str, whole: int) -> None:
    """ValueError unless value, a number of heads or groups, divides whole."""
    if whole % value:
        raise ValueError(f"{op}: {name} is {value}, which does not divide {whole_name}, {whole}; choose a divisor")


def located(op: str, name: str, value: Any) -> torch.device:
    """value as a device, or ValueError where torch knows none of that name."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{op}: {name} must be a torch.device or its name, got {_came(value)}; write 'cuda', 'cuda:0' or 'cpu'"
        ) from None


def present(op: str, name: str, value: Any, *, meta: bool = False) -> torch.device:
    """value as a device, or ValueError for one that is not here. meta: whether that one is allowed, too."""
    device = located(op, name, value)
    if device.type == "meta":
        if not meta:
            raise ValueError(
                f"{op}: {name} is meta, where tensors have no values; give a real one, such as 'cpu' or 'cuda'"
            )
        return device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        known = ", ".join(str(d) for kind in detect_available_devices().values() for d in kind)
        raise ValueError(f"{op}: {name} is {device}, which is not available; there are {known}") from problem
    return device


def choice(op: str, name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """value, or an error unless it is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {_came(value)}")
    return value


_LARGEST = sys.float_info.max


def _came(value: Any) -> str:
    if isinstance(value, Tensor):
        return shown(value)
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 40):
        return repr(value)
    return type(value).__name__
