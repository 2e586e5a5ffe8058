"""Arithmetic of the interpreter: values are arrays over threads, of length 1 where all threads agree.

Vectors have their lanes on a second axis. bf16 values are float32 numbers that bf16 can represent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilesmith.codegen.interpreter.faults import Undefined
from tilesmith.codegen.types import Type

VALUES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.float32,
    "u32": np.uint32,
    "i32": np.int32,
    "bool": np.bool_,
}
MEMORY = {**VALUES, "bf16": np.uint16}


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """The bits of bf16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_memory(type_: Type, x: np.ndarray) -> np.ndarray:
    """A value as it lies in memory."""
    return round_bf16(x) if type_.dtype == "bf16" else x


def from_memory(type_: Type, x: np.ndarray) -> np.ndarray:
    """What lies in memory, as a value."""
    return widen_bf16(x) if type_.dtype == "bf16" else x


def cast(source: Type, target: Type, x: np.ndarray, active: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`x` converted; Undefined where an active thread's float lies outside the integer type."""
    if target.is_int and source.is_float:
        low, high = (0, 2.0**32) if target.dtype == "u32" else (-(2.0**31), 2.0**31)
        whole = np.trunc(x.astype(np.float64))
        bad = active(~((whole >= low) & (whole < high)))
        if bad.any():
            raise Undefined(f"{np.broadcast_to(x, bad.shape)[bad][0]} does not fit {target}")
        return np.where((whole >= low) & (whole < high), whole, 0).astype(VALUES[target.dtype])
    if target.dtype == "bf16":
        return widen_bf16(round_bf16(x.astype(np.float32)))
    return x.astype(VALUES[target.dtype])


def bitcast(source: Type, target: Type, x: np.ndarray) -> np.ndarray:
    """The bits of `x` as `target`, which has as many."""
    bits = np.ascontiguousarray(to_memory(source, x).reshape(len(x), source.lanes)).view(MEMORY[target.dtype])
    return from_memory(target, bits if target.lanes > 1 else bits[:, 0])


def _i32(exact: np.ndarray, active: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    wrapped = exact.astype(np.int32)
    if active(wrapped != exact).any():
        raise Undefined("i32 overflow")
    return wrapped


_PLAIN = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "<<": np.left_shift,
    ">>": np.right_shift,
}


def binary(
    op: str, type_: Type, a: np.ndarray, b: np.ndarray, active: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """`a op b`, operands of `type_`."""
    if op in ("//", "%"):
        if active(b == 0).any():
            raise Undefined(f"{op} by zero")
        safe = np.where(b == 0, np.uint32(1), b)
        return a // safe if op == "//" else a % safe
    if op == "/":
        return np.divide(a, b)
    if op in ("<<", ">>"):
        if active(b > 31).any():
            raise Undefined(f"{op} by more than 31")
        b = (b & np.uint32(31)).astype(a.dtype)
    elif type_.dtype == "i32" and op in ("+", "-", "*"):
        return _i32(_PLAIN[op](a.astype(np.int64), b.astype(np.int64)), active)
    return _PLAIN[op](a, b)


def unary(op: str, type_: Type, x: np.ndarray, active: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`op x`."""
    if op == "-":
        return _i32(-x.astype(np.int64), active) if type_.dtype == "i32" else np.negative(x)
    return np.logical_not(x) if op == "not" else np.bitwise_not(x)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


def _pack(x: np.ndarray) -> np.ndarray:
    halves = np.ascontiguousarray(x.astype(np.float16)).view(np.uint16).astype(np.uint32)
    return halves[:, 0] | (halves[:, 1] << np.uint32(16))


def _unpack(x: np.ndarray) -> np.ndarray:
    halves = np.stack((x & np.uint32(0xFFFF), x >> np.uint32(16)), -1).astype(np.uint16)
    return halves.view(np.float16).astype(np.float32)


def _mulhi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return ((a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def call(function: str, type_: Type, args: list[np.ndarray], active: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """A function of operands of `type_`."""
    if function == "abs" and type_.dtype == "i32":
        return _i32(np.abs(args[0].astype(np.int64)), active)
    return FUNCTIONS[function](*args)


FUNCTIONS: dict[str, Callable] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "abs": np.abs,
    "min": np.fmin,  # of NaN and a number the number, as devices have it
    "max": np.fmax,
    "fma": _fma,
    "dot": lambda a, b: (a * b).sum(-1, dtype=a.dtype),
    "mulhi": _mulhi,
    "pack_f16": _pack,
    "unpack_f16": _unpack,
}
REDUCTIONS: dict[str, Callable] = {"add": np.add.reduce, "max": np.fmax.reduce, "min": np.fmin.reduce}
