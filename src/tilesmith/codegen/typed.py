"""Typed constructors of expressions: they convert literals, fold constants and refuse what languages disagree on."""

from __future__ import annotations

import math
import operator
import struct

from tilesmith.codegen.ir import Array, Buffer
from tilesmith.codegen.nodes import (
    FUNCTIONS,
    Binary,
    Bitcast,
    Call,
    Cast,
    Component,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Vector,
)
from tilesmith.codegen.types import RANGES, Type, bool_, f32, f32x2, i32, u32, vector


class Misuse(Exception):
    """What is wrong with an expression and what is allowed; the front-end adds where."""


COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_FOLDS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
_FLOAT_FOLDS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
LARGEST = {
    "f32": struct.unpack("<f", b"\xff\xff\x7f\x7f")[0],
    "f16": 65504.0,
    "bf16": struct.unpack("<f", b"\0\0\x7f\x7f")[0],
}
"""The largest number of each floating type."""


def constant(value: bool | int | float, type_: Type | None = None) -> Const:
    """`value` as a literal: of `type_`, or, without one, bool, u32 (i32 below zero) or f32."""
    if type_ is None:
        if isinstance(value, bool):
            type_ = bool_
        elif isinstance(value, int):
            type_ = u32 if value >= 0 else i32
        else:
            type_ = f32
    if isinstance(value, bool) != (type_ is bool_):
        raise Misuse(f"{value!r} is not of type {type_}")
    if type_.is_int:
        if not isinstance(value, int):
            raise Misuse(f"{value!r} is not of type {type_}")
        low, high = RANGES[type_.dtype]
        if not low <= value <= high:
            raise Misuse(f"{value} is outside {type_}: {low} to {high}")
    if type_.is_float:
        value = float(value)
        if not math.isfinite(value) or abs(value) > LARGEST[type_.dtype]:
            raise Misuse(f"{value} is not a finite {type_}; WebGPU assumes there is neither infinity nor NaN")
    return Const(type_, value)


def lift(value: object, type_: Type | None = None) -> Expr:
    """An expression stays; a Python number becomes a literal, of `type_` if given."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, float)):
        return constant(value, type_)
    raise Misuse(f"{value!r} is not a value of a kernel; allowed: numbers, bools and what the kernel computes")


def same_type(left: object, right: object) -> tuple[Expr, Expr]:
    """Both as expressions of one type: literals take the other's, a scalar beside a vector of it is repeated."""
    if (
        not isinstance(left, Expr)
        and not isinstance(right, Expr)
        and isinstance(left, float) != isinstance(right, float)
    ):
        left, right = float(left), float(right)
    a = lift(left, right.type if isinstance(right, Expr) else None)
    b = lift(right, a.type)
    if a.type is b.type:
        return a, b
    if a.type.dtype == b.type.dtype and 1 in (a.type.lanes, b.type.lanes):
        wide = a.type if b.type.lanes == 1 else b.type
        return splat(a, wide), splat(b, wide)
    raise Misuse(f"{a.type} beside {b.type}; convert one of them, as in {b.type}(...)")


def splat(x: Expr, type_: Type) -> Expr:
    """`x` in every lane of the vector type; a vector stays."""
    if x.type is type_:
        return x
    return Const(type_, x.value) if isinstance(x, Const) else Vector(type_, (x,))


def binary(op: str, left: object, right: object) -> Expr:
    """`left op right`, with op as Python spells it."""
    if op in ("<<", ">>"):
        return _shift(op, left, right)
    a, b = same_type(left, right)
    t = a.type
    if op in ("and", "or") or (t is bool_ and op in ("&", "|")):
        return logical("and" if op in ("and", "&") else "or", a, b)
    if op in COMPARISONS:
        return _comparison(op, a, b)
    if t is bool_:
        raise Misuse(f"{op} of bool; allowed: and, or, not, ==, !=")
    if t.dtype == "bf16":
        raise Misuse(f"{op} of {t}: bf16 is for memory; compute in f32, as in f32(x)")
    if op == "/" and t.is_int:
        raise Misuse(f"/ of {t} gives a fraction; write // for the quotient, or convert with f32(...)")
    if t.is_float and op not in ("+", "-", "*", "/"):
        raise Misuse(f"{op} of {t}; allowed: + - * /")
    if op == "**":
        raise Misuse("** of a run-time value; write the product")
    if op not in _FOLDS and op not in _FLOAT_FOLDS:
        raise Misuse(f"{op} of {t}; allowed: + - * // % << >> & | ^")
    if op in ("//", "%") and t.dtype == "i32":
        return _signed_division(op, a, b)
    return _fold(op, a, b)


def logical(op: str, a: Expr, b: Expr) -> Expr:
    """`and` or `or` of two bools; literals disappear."""
    for x in (a, b):
        if x.type is not bool_:
            raise Misuse(f"{op} of {x.type}; compare first, as in x != 0")
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Const):
            return other if x.value == (op == "and") else x
    return Binary(bool_, op, a, b)


def _comparison(op: str, a: Expr, b: Expr) -> Expr:
    t = a.type
    if t.lanes > 1 or t.dtype == "bf16" or (t is bool_ and op not in ("==", "!=")):
        raise Misuse(f"{op} of {t}; allowed: numbers of one lane other than bf16, and == and != of bool")
    if isinstance(a, Const) and isinstance(b, Const):
        return constant(COMPARISONS[op](a.value, b.value))
    return Binary(bool_, op, a, b)


def _shift(op: str, left: object, right: object) -> Expr:
    a, b = lift(left), lift(right, u32)
    if not a.type.is_int or b.type.dtype != "u32":
        raise Misuse(f"{a.type} {op} {b.type}; allowed: integers, shifted by a u32")
    b = splat(b, vector(u32, a.type.lanes))
    if isinstance(b, Const):
        if b.value > 31:
            raise Misuse(f"{op} by {b.value}; allowed: 0 to 31")
        if b.value == 0:
            return a
    return _fold(op, a, b)


def _signed_division(op: str, a: Expr, b: Expr) -> Expr:
    power = isinstance(b, Const) and b.value > 0 and b.value & (b.value - 1) == 0
    if not power:
        raise Misuse(f"{op} of i32: languages round it differently; use u32, or a literal power of two on the right")
    if op == "%":
        return _fold("&", a, constant(b.value - 1, a.type))
    return binary(">>", a, b.value.bit_length() - 1)


def _fold(op: str, a: Expr, b: Expr) -> Expr:
    """The operation; done here where both are literals, for WGSL refuses literals whose result overflows."""
    t = a.type
    if t.is_float and isinstance(a, Const) and isinstance(b, Const) and not (op == "/" and b.value == 0):
        value = constant(_FLOAT_FOLDS[op](a.value, b.value), t).value
        code = "e" if t.dtype == "f16" else "f"
        return Const(t, struct.unpack(code, struct.pack(code, value))[0])
    if t.is_int and isinstance(b, Const):
        if b.value == 0 and op in ("//", "%"):
            raise Misuse(f"{op} by zero")
        if isinstance(a, Const):
            return Const(t, _wrapped(t, _FOLDS[op](a.value, b.value)))
        if (op in ("+", "-", "|", "^") and b.value == 0) or (op in ("*", "//") and b.value == 1):
            return a
        if op == "*" and b.value == 0:
            return b
        if op == "%" and b.value == 1:
            return Const(t, 0)
    if t.is_int and isinstance(a, Const) and ((op == "+" and a.value == 0) or (op == "*" and a.value == 1)):
        return b
    if t.is_int and isinstance(a, Const) and op == "*" and a.value == 0:
        return a
    return Binary(t, op, a, b)


def _wrapped(t: Type, value: int) -> int:
    """`value` modulo 2**32, as `t` reads it."""
    low = RANGES[t.dtype][0]
    return (value - low) % 2**32 + low


def unary(op: str, x: object) -> Expr:
    """`-x`, `not x` or `~x`."""
    e = lift(x)
    allowed = {"-": "floats and i32", "not": "bool", "~": "integers"}
    t = e.type
    right = {"-": (t.is_float and t.dtype != "bf16") or t.dtype == "i32", "not": t is bool_, "~": t.is_int}
    if not right.get(op):
        raise Misuse(f"{op} of {t}; allowed: {allowed.get(op, '- not ~')}")
    if isinstance(e, Const):
        if op == "not":
            return constant(not e.value)
        value = ~e.value if op == "~" else -e.value
        return Const(t, _wrapped(t, value) if t.is_int else value)
    return Unary(t, op, e)


def select(condition: object, yes: object, no: object) -> Expr:
    """`yes` where `condition`, else `no`; both are evaluated."""
    c = lift(condition)
    if c.type is not bool_:
        raise Misuse(f"the condition is {c.type}, not bool; compare first, as in x != 0")
    a, b = same_type(yes, no)
    if isinstance(c, Const):
        return a if c.value else b
    return Select(a.type, c, a, b)


def cast(type_: Type, x: object) -> Expr:
    """`x` converted to `type_`; vectors lane by lane, a scalar to a vector by repeating it."""
    if not isinstance(x, Expr):
        if type_.is_int and isinstance(x, float):
            if not math.isfinite(x):
                raise Misuse(f"{x} to {type_}: it is no whole number")
            x = int(x)
        return constant(x, type_)
    if x.type is type_:
        return x
    if type_ is bool_:
        raise Misuse(f"{x.type} to bool; compare, as in x != 0")
    if x.type.lanes == 1 and type_.lanes > 1:
        return splat(cast(type_.scalar, x), type_)
    if x.type.lanes != type_.lanes:
        raise Misuse(f"{x.type} to {type_}: the lanes differ")
    if isinstance(x, Const) and x.type.is_int:
        return constant(_wrapped(type_, x.value) if type_.is_int else x.value, type_)
    return Cast(type_, x)


def bitcast(type_: Type, x: object) -> Expr:
    """The bits of a 32-bit number as another one, or two halves of them as a u32 and the other way."""
    e = lift(x)
    if halves_beside_word(type_, e.type):
        return Bitcast(type_, e)
    for t in (type_, e.type):
        if t.dtype not in ("f32", "u32", "i32"):
            raise Misuse(
                f"bitcast of {e.type} to {type_}; allowed: f32, u32, i32 and their vectors; f16x2, bf16x2 and u32"
            )
    if e.type.lanes != type_.lanes:
        raise Misuse(f"bitcast of {e.type} to {type_}: the lanes differ")
    return e if e.type is type_ else Bitcast(type_, e)


def halves_beside_word(a: Type, b: Type) -> bool:
    """Whether one is u32, and the other two floats of 16 bits."""
    return u32 in (a, b) and any(t.lanes == 2 and t.dtype in ("f16", "bf16") for t in (a, b))


def collect(type_: Type, parts: list) -> Expr:
    """A vector of one scalar a lane."""
    if len(parts) != type_.lanes:
        raise Misuse(f"{type_}(...) of {len(parts)} values; allowed: 1 or {type_.lanes}")
    lanes = tuple(lift(p, type_.scalar) for p in parts)
    for p in lanes:
        if p.type is not type_.scalar:
            raise Misuse(f"{p.type} as a lane of {type_}; convert it with {type_.scalar}(...)")
    return Vector(type_, lanes)


def component(x: Expr, index: int) -> Expr:
    """Lane `index`; lane 0 of a scalar is the scalar."""
    if not isinstance(index, int) or not 0 <= index < x.type.lanes:
        raise Misuse(f"lane {index!r} of {x.type}; allowed: compile-time 0 to {x.type.lanes - 1}")
    if x.type.lanes == 1:
        return x
    if isinstance(x, Vector):
        return x.parts[index if len(x.parts) > 1 else 0]
    return Const(x.type.scalar, x.value) if isinstance(x, Const) else Component(x.type.scalar, x, index)


def load(memory: Buffer | Array, index: object) -> Expr:
    """`memory[index]`."""
    if isinstance(memory, Buffer) and memory.access == "write":
        raise Misuse(f"{memory.name} is Out, so it is not read; annotate it InOut[{memory.type}]")
    return Load(memory.type, memory.name, as_index(index))


def as_index(index: object) -> Expr:
    """An index: u32."""
    i = lift(index, u32)
    if i.type is not u32:
        raise Misuse(f"an index of type {i.type}; allowed: u32")
    return i


ARITY = {name: {"min": 2, "max": 2, "fma": 3, "dot": 2, "mulhi": 2}.get(name, 1) for name in FUNCTIONS}


def call(function: str, *args: object) -> Expr:
    """One of `FUNCTIONS`."""
    kind = FUNCTIONS[function]
    if kind == "unpack":
        (x,) = (lift(a, u32) for a in args)
        _want(function, x, x.type is u32, "u32")
        return Call(f32x2, function, (x,))
    if kind == "pack":
        (x,) = (lift(a) for a in args)
        _want(function, x, x.type is f32x2, "f32x2")
        return Call(u32, function, (x,))
    if kind == "f32":
        (x,) = (lift(a, f32) for a in args)
        _want(function, x, x.type.dtype == "f32", "f32 and its vectors; convert with f32(...)")
        return Call(x.type, function, (x,))
    exprs = tuple(lift(a) for a in args) if len(args) == 1 else _unify(args)
    x = exprs[0]
    t = x.type
    if kind == "vectors":
        _want(function, x, t.lanes > 1 and t.dtype in ("f32", "f16"), "vectors of f32 or f16")
        return Call(t.scalar, function, exprs)
    if kind == "u32":
        _want(function, x, t is u32, "u32")
    elif kind == "float":
        _want(function, x, t.dtype in ("f32", "f16"), "f32, f16 and their vectors")
    else:
        _want(function, x, t is not bool_ and t.dtype != "bf16", "f32, f16, u32, i32 and their vectors")
        if function == "abs" and t.dtype == "u32":
            return x
    return Call(t, function, exprs)


def _unify(args: tuple) -> tuple[Expr, ...]:
    """All arguments in one type."""
    known = next((a for a in args if isinstance(a, Expr)), None)
    out = []
    for a in args:
        known, b = same_type(known, a) if known is not None else (None, lift(a, f32))
        out.append(b)
    return tuple(out if known is None else (same_type(known, b)[1] for b in out))


def _want(function: str, x: Expr, right: bool, allowed: str) -> None:
    if not right:
        raise Misuse(f"{function} of {x.type}; allowed: {allowed}")
