"""Launch a Triton kernel, or, offline, compile it for a GPU that is not here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch

from tilesmith.engine import recording, torch_private, triton_private
from tilesmith.engine.triton_private import Compiled

ANY_THREAD = 0  # in place of a thread's id, which is never 0
# id of a thread, or ANY_THREAD -> what is done there in place of a launch
_instead: dict[int, Callable[..., None]] = {}
_compiled: dict[tuple, Compiled] = {}
_runtime: Any = None  # whom to ask who listens to launches, once Triton is there
_after_compiling: dict[int, Callable[[], None]] = {}  # id of a thread -> what its next launch calls that compiles
awaited: dict[tuple, Callable[[], None]] = {}
"""Key of a launch whose kernel `engine.ahead` compiles -> what returns once that is done, or left to the caller."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, cluster: int = 1, **named: Any) -> None:
    """kernel[grid](*args, **named), without binding and specialising every argument again at each call.

    What Triton specialises on (types, 16-byte alignment, integers that are 1 or multiples of 16, constexprs, options)
    is the key to the kernel that it compiled; the driver's launcher is called directly.

    cluster: neighbours along the grid's first dim, whose size it divides, that the device starts together or not at
    all (sm_90), so that they may wait for each other. Each is compiled as a program by itself, unlike with Triton's
    num_ctas.
    """
    if _instead:
        do = _instead.get(get_ident()) or _instead.get(ANY_THREAD)
        if do is not None:
            do(kernel, grid, args, named, cluster)
            return
    key, values = _key(kernel, args, named) if torch.cuda.is_initialized() else (None, ())
    if cluster > 1:
        _launch_cluster(kernel, grid, args, named, cluster, key, values)
        return
    found = _compiled.get(key) if key is not None else None
    if found is None and key in awaited:
        awaited[key]()
    x, y, z = (*grid, 1, 1)[:3]
    if found is None or hooked():
        begun = time.time() if _after_compiling else 0.0
        compiled = triton_private.run(kernel, grid, args, named, found is None)
        if begun and triton_private.was_compiled_since(compiled, begun):
            _after_compiling.pop(get_ident(), _nothing)()
        if key is not None and found is None:
            found = _remember(key, compiled)
    else:
        _run(found, (x, y, z), key[1], values)
    recorder = recording.recorder()
    if recorder is not None:
        recorder.launched(found, key and key[1], (x, y, z), values)


def _launch_cluster(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple,
    named: dict[str, Any],
    cluster: int,
    key: tuple | None,
    values: list,
) -> None:
    if key is None:
        raise TypeError(f"a launch of {kernel.__name__} by clusters has an argument that `launch` does not know")
    found = _compiled.get((*key, cluster))
    if found is None:
        if key in awaited:
            awaited[key]()
        compiled = triton_private.run(kernel, (0,), args, named)  # loaded; a grid of none is not launched
        found = _compiled[(*key, cluster)] = Compiled(compiled, cluster)
    x, y, z = (*grid, 1, 1)[:3]
    x //= cluster  # the launcher multiplies it
    _run(found, (x, y, z), key[1], values)
    recorder = recording.recorder()
    if recorder is not None:
        recorder.launched(found, key[1], (x, y, z), values)


def _run(found: Compiled, grid: tuple[int, int, int], device: int, values: list[Any]) -> None:
    stream = torch_private.raw_stream(device)
    if found.together:
        found.run(*grid, stream, found.function, *found.head, values)
    else:
        found.run(*grid, stream, found.function, *found.head, *values)


def hooked() -> bool:
    """Whether a profiler listens to launches through Triton's hooks; then Triton's own launch tells it."""
    return _runtime is not None and triton_private.listened(_runtime)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; triton.cdiv on plain integers costs ten times as much."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def uncompiled(kernel: Any, args: tuple, named: dict[str, Any], cluster: int) -> tuple | None:
    """The key of a launch whose kernel is not compiled yet; None where it is, and where it is not kept by a key."""
    key, _ = _key(kernel, args, named)
    return None if key is None or (key if cluster == 1 else (*key, cluster)) in _compiled else key


def _key(kernel: Any, args: tuple, named: dict[str, Any]) -> tuple[tuple | None, list[Any]]:
    """The key of a launch and all arguments in the order of the kernel's signature; None where it is not covered."""
    shape = (kernel, len(args), *named)
    plan = _plans.get(shape)
    if plan is None:
        plan = _plans[shape] = _Plan(kernel, len(args), tuple(named))
    if plan.names is None:
        return None, []
    values = list(args)
    for name, default in plan.names:
        values.append(named.get(name, default))
    key: list[Any] = [plan, torch_private.current_device()]
    add = key.append
    for i in plan.constants:
        add(values[i])
    for name in plan.options:
        add(named[name])
    for i in plan.variables:
        value = values[i]
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            add(value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,))
        elif kind is int and -0x80000000 <= value <= 0x7FFFFFFF:
            add(1 if value == 1 else 16 if value & 15 == 0 else 0)
        else:
            kind = _kind(value)
            if kind is _UNKNOWN:
                return None, values
            add(kind)
    return tuple(key), values


class _Plan:
    """How the arguments of one form of call (so many by position, these by name) fill a kernel's signature.

    names: parameters to append to the positional ones, with their defaults; None if one is missing. constants,
    variables: indices of constexprs and of run-time arguments. options: names that are no parameters.
    """

    def __init__(self, kernel: Any, given: int, named: tuple[str, ...]):
        parameters = list(kernel.signature.parameters.values())
        rest = parameters[given:]
        complete = all(p.name in named or p.default is not p.empty for p in rest)
        self.names = [(p.name, p.default) for p in rest] if complete else None
        self.constants = [i for i, p in enumerate(kernel.params) if p.is_constexpr]
        self.variables = [i for i, p in enumerate(kernel.params) if not p.is_constexpr]
        self.options = [n for n in named if n not in kernel.signature.parameters]


_plans: dict[tuple, _Plan] = {}
_UNKNOWN = object()


def _kind(value: Any) -> Any:
    """What Triton specialises one run-time argument on."""
    kind = type(value)
    if kind is int:
        return 1 if value == 1 else (16 if value & 15 == 0 else 0, -0x80000000 <= value <= 0x7FFFFFFF)
    if kind is float or kind is bool or value is None:
        return kind
    if isinstance(value, torch.Tensor):
        return value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,)
    if isinstance(value, tuple):
        kinds = tuple(_kind(v) for v in value)
        return _UNKNOWN if _UNKNOWN in kinds else kinds
    if kind.__name__ == "TensorDescriptor":
        aligned = value.base.data_ptr() & 15 == 0
        return (kind, value.base.dtype, aligned, tuple(value.block_shape), value.padding)
    return _UNKNOWN


def _remember(key: tuple, compiled: Any) -> Compiled | None:
    global _runtime
    _runtime = triton_private.runtime()
    if not triton_private.was_compiled(compiled):
        return None
    found = _compiled[key] = Compiled(compiled)
    return found


@contextlib.contextmanager
def in_place_of_launches(do: Callable[..., None], thread: int | None = None) -> Iterator[None]:
    """Inside, `launch` calls do(kernel, grid, positional arguments, named ones, cluster) and launches nothing. thread:
    where; None: in this one, `ANY_THREAD`: in all."""
    thread = get_ident() if thread is None else thread
    before = _instead.get(thread)
    _instead[thread] = do
    try:
        yield
    finally:
        if before is None:
            del _instead[thread]
        else:
            _instead[thread] = before


@contextlib.contextmanager
def after_compiling(do: Callable[[], None]) -> Iterator[None]:
    """Inside, do() is called once: after the first launch of this thread whose kernel was in no cache, in memory or on
    disk. Within another such context there is nothing to do."""
    thread = get_ident()
    if thread in _after_compiling:
        yield
        return
    _after_compiling[thread] = do
    try:
        yield
    finally:
        _after_compiling.pop(thread, None)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def compiling_for(target: Any, compiled: list[Any]) -> Iterator[None]:
    """Inside, `launch` compiles each kernel once for `target` (a triton GPUTarget) and appends (its name, result);
    nothing runs.

    Kernel launchers called with CPU tensors then say which kernels, types and constants they would launch.
    """

    def compile_once(kernel: Any, grid: tuple, args: tuple, named: dict[str, Any], cluster: int) -> None:
        if all(name != kernel.__name__ for name, _ in compiled):
            compiled.append((kernel.__name__, triton_private.compile_for(kernel, args, named, target)))

    with in_place_of_launches(compile_once, ANY_THREAD):
        yield
