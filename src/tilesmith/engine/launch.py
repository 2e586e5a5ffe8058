"""Launch a Triton kernel, or, offline, compile it for a GPU that is not here."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tilesmith.engine import recording

_offline: Callable[..., None] | None = None
_compiled: dict[tuple, _Compiled] = {}
_runtime: Any = None  # triton.knobs.runtime, once Triton is there


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, cluster: int = 1, **named: Any) -> None:
    """kernel[grid](*args, **named), without binding and specialising every argument again at each call.

    What Triton specialises on (types, 16-byte alignment, integers that are 1 or multiples of 16, constexprs, options)
    is the key to the kernel that it compiled; the driver's launcher is called directly.

    cluster: neighbours along the grid's first dim, whose size it divides, that the device starts together or not at
    all (sm_90), so that they may wait for each other. Each is compiled as a program by itself, unlike with Triton's
    num_ctas.
    """
    if _offline is not None:
        _offline(kernel, args, named)
        return
    key, values = _key(kernel, args, named) if torch.cuda.is_initialized() else (None, ())
    if cluster > 1:
        _launch_cluster(kernel, grid, args, named, cluster, key, values)
        return
    found = _compiled.get(key) if key is not None else None
    x, y, z = (*grid, 1, 1)[:3]
    if found is None or hooked():
        compiled = kernel[grid](*args, **named)
        if key is not None and found is None:
            found = _remember(key, compiled)
    else:
        found.run(x, y, z, torch._C._cuda_getCurrentRawStream(key[1]), found.function, *found.head, *values)
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
        compiled = kernel[(0,)](*args, **named)  # compiled and loaded; a grid of none is not launched
        found = _compiled[(*key, cluster)] = _Compiled(compiled, cluster)
    x, y, z = (*grid, 1, 1)[:3]
    x //= cluster  # the launcher multiplies it
    found.run(x, y, z, torch._C._cuda_getCurrentRawStream(key[1]), found.function, *found.head, *values)
    recorder = recording.recorder()
    if recorder is not None:
        recorder.launched(found, key[1], (x, y, z), values)


def hooked() -> bool:
    """Whether a profiler listens to launches through Triton's hooks; then Triton's own launch tells it."""
    if _runtime is None:
        return False
    return bool(_runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls)


def refusals() -> tuple[type[Exception], ...]:
    """What a launch raises where a configuration does not compile or does not fit the device."""
    try:
        from triton import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return ()
    return (CompilationError, OutOfResources, PTXASError)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; triton.cdiv on plain integers costs ten times as much."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


class _Compiled:
    """A compiled kernel with everything of a launch that does not change between calls of one specialisation."""

    def __init__(self, compiled: Any, cluster: int = 1):
        launcher = compiled.run
        self.function = compiled.function
        packed = compiled.packed_metadata
        if cluster > 1:
            warps, _, shared = packed
            packed = (warps, cluster, shared)
            if cluster > 8:  # not portable: the driver wants to be told, which this question for its occupancy does
                from triton.runtime import driver

                driver.active.utils.cuOccupancyMaxActiveClusters(self.function, shared, cluster)
        constant = (packed, None, None, None)  # launch metadata and hooks: only while profiling
        scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
        if scratch == [0, 0] and hasattr(launcher, "launch"):
            self.run, self.head = (
                launcher.launch,
                (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *constant),
            )
            self.encoded = _Encoded.of(self.run, compiled)
        else:
            self.run, self.head, self.encoded = launcher, constant, None


class _Encoded(NamedTuple):
    """A launch whose tensor descriptors are encoded beforehand: Triton's wrapper does that for each by a few Python
    functions that look up what never changes, 2.5 us a descriptor.

    run: the launcher below that wrapper; it takes the encoded descriptor, then its shape and strides. encode: the
    driver's function. formats: what Triton says of each descriptor, in the order of the kernel's parameters.
    """

    run: Callable[..., None]
    encode: Callable[..., Any]
    formats: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, wrapper: Callable[..., None], compiled: Any) -> _Encoded | None:
        """None where there is no descriptor, or a Triton that is not known to do it so."""
        from triton import __version__
        from triton.runtime import driver

        formats = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        if not formats or any(f["fp4_padded"] for f in formats) or not __version__.startswith("3.6."):
            return None
        run = inspect.getclosurevars(wrapper).nonlocals.get("launcher")
        return run and cls(run, driver.active.utils.fill_tma_descriptor, formats)

    def arguments(self, position: int, descriptor: Any) -> tuple:
        """All of `encode`'s arguments but the address, for the descriptor at a position among the descriptors."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        form = self.formats[position]
        kind = TMA_DTYPE_DEVICE_TO_HOST[form["elem_type"]]
        sizes = form["block_size"], descriptor.shape, descriptor.strides
        return form["swizzle"], form["elem_size"], kind, *sizes, int(descriptor.padding == "nan")


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
    key: list[Any] = [plan, torch._C._cuda_getDevice()]
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


def _remember(key: tuple, compiled: Any) -> _Compiled | None:
    global _runtime
    from triton import knobs
    from triton.compiler import CompiledKernel

    _runtime = knobs.runtime
    if not isinstance(compiled, CompiledKernel):
        return None
    found = _compiled[key] = _Compiled(compiled)
    return found


@contextlib.contextmanager
def compiling_for(target: Any, compiled: list[Any]) -> Iterator[None]:
    """Inside, `launch` compiles each kernel once for `target` (a triton GPUTarget) and appends (its name, result);
    nothing runs.

    Kernel launchers called with CPU tensors then say which kernels, types and constants they would launch.
    """
    global _offline
    previous = _offline

    def compile_once(kernel: Any, args: tuple, named: dict[str, Any]) -> None:
        if all(name != kernel.__name__ for name, _ in compiled):
            compiled.append((kernel.__name__, _compile(kernel, args, named, target)))

    _offline = compile_once
    try:
        yield
    finally:
        _offline = previous


def _compile(kernel: Any, args: tuple, named: dict[str, Any], target: Any) -> Any:
    """What Triton's own launch would compile for these arguments, if `target` were the device."""
    import triton
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **named)
    options, signature, constexprs, attributes = kernel._pack_args(backend, named, bound, specialization, options)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=options.__dict__)
