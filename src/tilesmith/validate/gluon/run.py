"""Runs launches of Gluon kernels on a CPU, in place of launches on a GPU."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tilesmith.device.gluon import shim
from tilesmith.engine.launcher import ANY_THREAD, in_place_of_launches
from tilesmith.validate.gluon import language
from tilesmith.validate.gluon.cluster import Cluster, Cta
from tilesmith.validate.gluon.fibers import Fibers, at_work
from tilesmith.validate.gluon.language import SHIM, Partition
from tilesmith.validate.gluon.memory import Descriptor
from tilesmith.validate.gluon.substitutes import HELPERS, inline_asm_elementwise
from tilesmith.validate.gluon.values import Pointer, plain, value

GL, TL = (
    types.SimpleNamespace(**vars(names), inline_asm_elementwise=inline_asm_elementwise)
    for names in (language.GL, language.TL)
)
RESIDENT = 6  # programs that run at a time, unless a cluster has more


class _Globals(dict):
    """A module's names as a kernel sees them."""

    def __init__(self, module: dict[str, Any]):
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        found = self[name] = converted(self.module[name]) if name in self.module else _builtin(name)
        return found


def _builtin(name: str) -> Any:
    if not hasattr(builtins, name):
        raise KeyError(name)
    return getattr(builtins, name)


class _Module:
    """A module of ours whose members kernels name."""

    def __init__(self, module: types.ModuleType):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return converted(getattr(self.module, name))


_SHIM = {id(getattr(shim, name)): found for name, found in SHIM.items() if hasattr(shim, name)}
_known: dict[int, Any] = {}
_kept: list[Any] = []  # what `_known` names by its id


def converted(x: Any) -> Any:
    """What a kernel's name stands for: helpers as functions that run here, classes with such methods."""
    x = plain(x)
    if x is shim.gl:
        return GL
    if x is tl:
        return TL
    if id(x) in _SHIM:
        return _SHIM[id(x)]
    if id(x) in _known:
        return _known[id(x)]
    _kept.append(x)
    inner = getattr(x, "fn", None)
    if isinstance(x, (JITFunction, InterpretedFunction)) or type(x).__name__ == "ConstexprFunction":
        _known[id(x)] = found = _function(inner)
    elif isinstance(x, type) and hasattr(x, "written"):
        _known[id(x)] = found = _class(x.written)
    elif isinstance(x, types.FunctionType) and f"{x.__module__}.{x.__name__}" in HELPERS:
        _known[id(x)] = found = _function(x)
    elif isinstance(x, types.ModuleType) and x.__name__.startswith("tilesmith."):
        _known[id(x)] = found = _Module(x)
    elif isinstance(x, tuple):
        found = tuple(converted(one) for one in x)
    else:
        found = x
    return found


def _function(fn: Any) -> Callable[..., Any]:
    name = f"{fn.__module__}.{fn.__name__}"
    if name in HELPERS:
        return HELPERS[name]
    names = _Globals(fn.__globals__)
    defaults = tuple(converted(d) for d in fn.__defaults__ or ())
    made = types.FunctionType(fn.__code__, names, fn.__name__, defaults, fn.__closure__)
    made.__kwdefaults__ = {k: converted(d) for k, d in (fn.__kwdefaults__ or {}).items()}
    made.__qualname__, made.__module__ = fn.__qualname__, fn.__module__
    return made


def _class(cls: type) -> type:
    """A class of fields whose methods run here."""
    members = {}
    for name, member in vars(cls).items():
        if isinstance(member, (JITFunction, InterpretedFunction)) or type(member).__name__ == "ConstexprFunction":
            members[name] = _function(member.fn)
        elif isinstance(member, types.FunctionType):
            members[name] = _function(member)
    return type(cls.__name__, (), members)


def _argument(x: Any) -> Any:
    """A launch's argument as the kernel sees it."""
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if type(x).__name__ == "TensorDescriptor":
        return Descriptor(x)
    if isinstance(x, tuple):
        return tuple(_argument(one) for one in x)
    return value(x) if isinstance(x, (bool, int, float)) else x


def run(
    kernel: Any, grid: tuple[int, ...], args: tuple, named: dict[str, Any], cluster: int = 1, seed: int = 0
) -> None:
    """One launch. cluster: how many neighbours along the grid's first dim start together."""
    parameters = list(inspect.signature(kernel.fn).parameters.values())
    given = dict(zip((p.name for p in parameters), args)) | named
    bound = {}
    for p in parameters:
        x = given.get(p.name, p.default)
        bound[p.name] = converted(x) if "constexpr" in str(p.annotation) else _argument(x)
    body = _function(kernel.fn)
    fibers = Fibers(seed)
    x, y, z = (*grid, 1, 1)[:3]
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    places.reverse()
    warps = int(named.get("num_warps", 4))

    def program(cta: Cta) -> None:
        body(**bound)
        cta.ended = True

    def more() -> None:
        running = len({f.context.cta.place for f in fibers.alive})
        while places and (not running or running + cluster <= RESIDENT):
            together = Cluster(cluster)
            for rank in range(cluster):
                place = places.pop()
                cta = Cta(place, (x, y, z), warps, fibers, together, rank)
                together.ctas.append(cta)
                name = f"{kernel.__name__}{place[: len(grid)]}"
                fibers.start(lambda cta=cta: program(cta), name, Partition(cta, warps, name))
            running += cluster

    with at_work(fibers):
        fibers.run(more)


@contextlib.contextmanager
def interpreted(seed: int = 0) -> Iterator[list[str]]:
    """Inside, launches run here, on CPU tensors, in an order drawn by `seed`. Gives the names of the kernels that ran.

    Raises, from the call that launches: Deadlock; IndexError for an address outside of a tensor or of shared memory;
    RuntimeError for too many arrivals at a barrier and for TMA or WGMMA of what was stored without a fence behind it;
    TypeError or AttributeError for a product that was used before it was waited for.
    """
    draw, ran = random.Random(seed), []

    def do(kernel: Any, grid: tuple, args: tuple, named: dict[str, Any], cluster: int) -> None:
        ran.append(kernel.__name__)
        run(kernel, grid, args, named, cluster, draw.randrange(2**32))

    with in_place_of_launches(do, ANY_THREAD):
        yield ran
