"""Launch a Triton kernel, or, offline, compile it for a GPU that is not here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_offline: Callable[..., None] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants): run-time arguments by position, constexprs and options by keyword."""
    if _offline is not None:
        _offline(kernel, args, constants)
        return
    kernel[grid](*args, **constants)


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
