"""Launch a Triton kernel, or, offline, compile it for a GPU that is not here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_offline: Callable[..., None] | None = None
_compiled: dict[tuple, _Compiled] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants): run-time arguments by position, constexprs and options by keyword."""
    if _offline is not None:
        _offline(kernel, args, constants)
        return
    key = _key(kernel, args, constants) if torch.cuda.is_initialized() else None
    found = _compiled.get(key) if key is not None else None
    if found is None or found.hooked():
        compiled = kernel[grid](*args, **constants)
        if key is not None and found is None:
            _remember(key, kernel, compiled, len(args), constants)
        return
    # Triton's own launch binds and specialises every argument again, which costs more than the driver's launch
    x, y, z = (*grid, 1, 1)[:3]
    found.run(x, y, z, torch._C._cuda_getCurrentRawStream(key[1]), found.function, *found.head, *args, *found.rest)


class _Compiled:
    """A compiled kernel with everything of a launch that does not change between calls of one specialisation."""

    def __init__(self, compiled: Any, rest: tuple):
        from triton import knobs

        launcher = compiled.run
        self.function, self.rest, self.runtime = compiled.function, rest, knobs.runtime
        constant = (compiled.packed_metadata, None, None, None)  # launch metadata and hooks: only while profiling
        scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
        if scratch == [0, 0] and hasattr(launcher, "launch"):
            self.run, self.head = launcher.launch, (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *constant)
        else:
            self.run, self.head = launcher, constant

    def hooked(self) -> bool:
        """Whether a profiler listens to launches; then Triton's own launch tells it."""
        return bool(self.runtime.launch_enter_hook.calls or self.runtime.launch_exit_hook.calls)


def _key(kernel: Any, args: tuple, constants: dict[str, Any]) -> tuple | None:
    """What Triton specialises a kernel on (types, alignment, 1 and multiples of 16), or None if it is not covered."""
    key: list[Any] = [kernel, torch._C._cuda_getDevice()]
    for a in args:
        if isinstance(a, torch.Tensor):
            key.append(a.dtype if a.data_ptr() & 15 == 0 else (a.dtype,))
        elif type(a) is int:
            fits = -0x80000000 <= a <= 0x7FFFFFFF
            key.append(1 if a == 1 else (2 if a & 15 == 0 else 3) + (0 if fits else 4))
        elif type(a) in (float, bool) or a is None:
            key.append(type(a))
        else:
            return None
    key.extend(constants.items())
    return tuple(key)


def _remember(key: tuple, kernel: Any, compiled: Any, given: int, constants: dict[str, Any]) -> None:
    from triton.compiler import CompiledKernel

    if isinstance(compiled, CompiledKernel):
        parameters = kernel.signature.parameters
        rest = tuple(constants[n] if n in constants else parameters[n].default for n in kernel.arg_names[given:])
        _compiled[key] = _Compiled(compiled, rest)


@contextlib.contextmanager
def compiling_for(target: Any, compiled: list[Any]) -> Iterator[None]:
    """Inside, `launch` compiles for `target` (a triton GPUTarget) and appends (kernel name, result); nothing runs.

    Kernel launchers called with CPU tensors then say which kernels, types and constants they would launch.
    """
    global _offline
    previous = _offline
    _offline = lambda kernel, args, constants: compiled.append((kernel.__name__, _compile(kernel, args, constants, target)))
    try:
        yield
    finally:
        _offline = previous


def _compile(kernel: Any, args: tuple, constants: dict[str, Any], target: Any) -> Any:
    import triton
    from triton.compiler import ASTSource

    names = kernel.arg_names
    given = dict(zip(names, args))
    constexprs = {n: v for n, v in constants.items() if n in names}
    options = {n: v for n, v in constants.items() if n not in names}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        value = given.get(name)
        if name in constexprs or (name in given and value is None):
            signature[name] = "constexpr"
            constexprs.setdefault(name, value)
        elif name in given and isinstance(value, int) and not isinstance(value, bool) and value == 1:
            signature[name], constexprs[name] = "constexpr", 1
        elif name in given:
            signature[name] = _type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constexprs[name] = kernel.signature.parameters[name].default
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constexprs.items()}, attrs=attributes)
    return triton.compile(source, target=target, options=options)


_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"cannot tell the Triton type of {type(value).__name__}")
