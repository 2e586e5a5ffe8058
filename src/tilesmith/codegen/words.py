"""What each word of the language builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tilesmith.codegen import layout, typed
from tilesmith.codegen.ir import Array, Buffer, Fragment, packed
from tilesmith.codegen.nodes import (
    FUNCTIONS,
    Barrier,
    Builtin,
    Const,
    Convert,
    Expr,
    Fill,
    LoadFragment,
    Mma,
    RowReduce,
    StoreFragment,
    Subgroup,
    SubgroupBarrier,
)
from tilesmith.codegen.typed import Misuse
from tilesmith.codegen.types import LONGEST, TYPES, Type, bf16, bool_, f16, f32, u32
from tilesmith.codegen.writer import Writer

signature = lru_cache(maxsize=None)(inspect.signature)
"""How a word is called."""


def call_word(writer: Writer, word: Callable, bound: inspect.BoundArguments) -> Any:
    """The value of `word(...)`, a statement written to the current block, or both."""
    bound.apply_defaults()
    name = word.word
    if name in FUNCTIONS:
        return typed.call(name, *bound.args)
    return _WORDS[name](writer, *bound.args)


def _builtin(name: str) -> Callable:
    def coordinate(writer: Writer, axis: int = 0) -> Expr:
        if axis not in (0, 1, 2):
            raise Misuse(f"axis {axis!r}; allowed: 0, 1, 2")
        return Builtin(u32, name, axis)

    return coordinate


def _subgroup_size(writer: Writer) -> Expr:
    if writer.subgroup_size is not None:
        return Const(u32, writer.subgroup_size)
    return Builtin(u32, "subgroup_size")


def _array(space: str) -> Callable:
    def declare(writer: Writer, type_: Any, length: Any) -> Array:
        type_ = bool_ if type_ is bool else type_
        if not isinstance(type_, Type):
            raise Misuse(f"{type_!r} is not a type; allowed: {', '.join(TYPES)}")
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST:
            raise Misuse(f"the length must be a compile-time int of 1 to {LONGEST:,}, got {length!r}")
        array = Array(writer.unique(writer.target), type_, length, space)
        writer.arrays.append(array)
        return array

    return declare


def _unroll(writer: Writer, start: Any, stop: Any, step: Any) -> range:
    bounds = (start, stop, step) if stop is not None else (0, start, step)
    if not all(isinstance(b, int) for b in bounds):
        raise Misuse("unroll needs compile-time bounds; use range")
    return range(*bounds)


def _bitcast(writer: Writer, type_: Any, x: Any) -> Expr:
    if not isinstance(type_, Type):
        raise Misuse(f"{type_!r} is not a type; allowed: f32, u32, i32 and their vectors; f16x2, bf16x2 and u32")
    return typed.bitcast(type_, x)


def _reduce(op: str) -> Callable:
    def reduce(writer: Writer, x: Any) -> Expr:
        e = _exchangeable(x)
        return writer.temporary("reduced", Subgroup(e.type, op, e))

    return reduce


def _shuffle(writer: Writer, x: Any, lane: Any) -> Expr:
    e, source = _exchangeable(x), typed.as_index(lane)
    return writer.temporary("shuffled", Subgroup(e.type, "shuffle", e, source))


def _shuffle_xor(writer: Writer, x: Any, mask: Any) -> Expr:
    e = _exchangeable(x)
    if not isinstance(mask, int) or not 0 < mask < 128:
        raise Misuse(f"the mask must be a compile-time int of 1 to 127, got {mask!r}")
    return writer.temporary("shuffled", Subgroup(e.type, "shuffle_xor", e, Const(u32, mask)))


def _exchangeable(x: Any) -> Expr:
    e = typed.lift(x)
    if e.type not in (f32, u32, TYPES["i32"]):
        raise Misuse(f"{e.type} between threads; allowed: f32, u32, i32")
    return e


def _fragment(writer: Writer, role: Any, type_: Any, tile: Any, placed: Any) -> Fragment:
    if role not in ("a", "b", "c"):
        raise Misuse(f"role {role!r}; allowed: 'a', 'b', 'c'")
    allowed = (f32,) if role == "c" else (f16, bf16)
    if type_ not in allowed:
        raise Misuse(f"a fragment {role!r} of {type_}; allowed: {', '.join(t.name for t in allowed)}")
    if tile not in layout.ELEMENTS:
        raise Misuse(f"tile {tile!r}; allowed: {', '.join(map(str, layout.ELEMENTS))}")
    if not isinstance(placed, bool):
        raise Misuse(f"placed {placed!r}; allowed: True, False")
    if writer.subgroup_size not in (None, 32):
        raise Misuse(f"fragments belong to subgroups of 32; the kernel is built for {writer.subgroup_size}")
    writer.subgroup_size = 32
    fragment = Fragment(writer.unique(writer.target), role, type_, tile, placed)
    writer.fragments.append(fragment)
    return fragment


def _the_fragment(value: Any, roles: str) -> Fragment:
    if not isinstance(value, Fragment) or value.role not in roles:
        wanted = " or ".join(repr(r) for r in roles)
        raise Misuse(f"{getattr(value, 'name', value)} is not a fragment of role {wanted}")
    return value


def _fill(writer: Writer, fragment: Any, value: Any) -> None:
    f = _the_fragment(fragment, "abc")
    x = typed.lift(value, f.type)
    if x.type is not f.type:
        raise Misuse(f"{f.name} holds {f.type}, got {x.type}")
    writer.emit(Fill(writer.line, f.name, x))


def _memory(fragment: Fragment, array: Any, stride: Any, repeats: bool = False) -> None:
    if not isinstance(array, (Array, Buffer)) or getattr(array, "space", "") == "local":
        raise Misuse(f"{getattr(array, 'name', array)} is not a shared array or buffer")
    if not packed(array, fragment):
        raise Misuse(f"{array.name} holds {array.type}, {fragment.name} {fragment.type}")
    unit = 4 if fragment.type is f32 else 8
    if not isinstance(stride, int) or (stride < fragment.tile and not (repeats and stride == 0)) or stride % unit:
        also = " and 0" if repeats else ""
        raise Misuse(f"stride {stride!r}; allowed: compile-time multiples of {unit} from {fragment.tile}{also}")


def _load_fragment(writer: Writer, fragment: Any, array: Any, offset: Any, stride: Any, transposed: Any) -> None:
    f = _the_fragment(fragment, "abc")
    _memory(f, array, stride, f.role == "c")
    if f.role == "c" and array.type.scalar is not f32:
        raise Misuse(f"{array.name} holds {array.type}; {f.name} is loaded from f32")
    if isinstance(array, Buffer) and array.access == "write":
        raise Misuse(f"{array.name} is Out, so it is not read; annotate it InOut[{array.type}]")
    if not isinstance(transposed, bool):
        raise Misuse("transposed must be a compile-time bool")
    writer.emit(LoadFragment(writer.line, f.name, array.name, typed.as_index(offset), stride, transposed))


def _store_fragment(writer: Writer, fragment: Any, array: Any, offset: Any, stride: Any) -> None:
    f = _the_fragment(fragment, "c")
    _memory(f, array, stride)
    if isinstance(array, Buffer) and array.access == "read":
        raise Misuse(f"{array.name} is In, so it is not written; annotate it Out[{array.type}]")
    writer.emit(StoreFragment(writer.line, f.name, array.name, typed.as_index(offset), stride))


def _mma(writer: Writer, c: Any, a: Any, b: Any) -> None:
    c, a, b = _the_fragment(c, "c"), _the_fragment(a, "a"), _the_fragment(b, "b")
    if a.type is not b.type or len({c.tile, a.tile, b.tile}) > 1:
        raise Misuse(f"{a.name} is {a.type} {a.tile}, {b.name} {b.type} {b.tile}, {c.name} {c.tile}: they must match")
    writer.emit(Mma(writer.line, c.name, a.name, b.name))


def _convert(writer: Writer, a: Any, c: Any) -> None:
    a, c = _the_fragment(a, "a"), _the_fragment(c, "c")
    if a.tile != c.tile:
        raise Misuse(f"{a.name} has tile {a.tile}, {c.name} {c.tile}")
    writer.emit(Convert(writer.line, a.name, c.name))


def _reduce_rows(writer: Writer, target: Any, source: Any, op: Any) -> None:
    target, source = _the_fragment(target, "c"), _the_fragment(source, "c")
    if target.tile != source.tile:
        raise Misuse(f"{target.name} has tile {target.tile}, {source.name} {source.tile}")
    if op not in ("add", "max"):
        raise Misuse(f"op {op!r}; allowed: 'add', 'max'")
    writer.emit(RowReduce(writer.line, target.name, source.name, op))


def element(fragment: Fragment, index: Any) -> int:
    """A checked element index of an accumulator."""
    if fragment.role != "c":
        raise Misuse(f"{fragment.name} is an operand; only accumulators have elements")
    if not isinstance(index, int) or not 0 <= index < layout.ELEMENTS[fragment.tile]:
        raise Misuse(f"element {index!r}; allowed: compile-time 0 to {layout.ELEMENTS[fragment.tile] - 1}")
    return index


def _the_placed(value: Any) -> Fragment:
    f = _the_fragment(value, "c")
    if not f.placed:
        raise Misuse(f"{f.name} is a fragment with placed=False: where its elements lie is not known")
    return f


class _Lane:
    """The operators of an int that layout.position uses, building expressions."""

    def __init__(self, e: Expr):
        self.e = e

    def __floordiv__(self, n: int) -> _Lane:
        return _Lane(typed.binary("//", self.e, n))

    def __mod__(self, n: int) -> _Lane:
        return _Lane(typed.binary("%", self.e, n))

    def __mul__(self, n: int) -> _Lane:
        return _Lane(typed.binary("*", self.e, n))

    def __add__(self, other: _Lane | int) -> _Lane:
        return _Lane(typed.binary("+", self.e, other.e if isinstance(other, _Lane) else other))


def _position(axis: int) -> Callable:
    def position(writer: Writer, c: Any, index: Any) -> Expr:
        f = _the_placed(c)
        element(f, index)
        return layout.position(f.tile, _Lane(Builtin(u32, "lane")), index)[axis].e

    return position


def _across_row(op: str) -> Callable:
    def reduce(writer: Writer, c: Any, x: Any) -> Expr:
        f, e = _the_placed(c), _exchangeable(x)
        for mask in layout.ROW_LANES[f.tile]:
            own = writer.temporary("own", e)
            other = _shuffle_xor(writer, own, mask)
            e = typed.call("max", own, other) if op == "max" else typed.binary("+", own, other)
        return e

    return reduce


_WORDS: dict[str, Callable] = {
    "tid": _builtin("tid"),
    "gid": _builtin("gid"),
    "groups": _builtin("groups"),
    "lane": _builtin("lane"),
    "subgroup": _builtin("subgroup"),
    "subgroup_size": _subgroup_size,
    "shared": _array("shared"),
    "local": _array("local"),
    "barrier": lambda writer: writer.emit(Barrier(writer.line)),
    "subgroup_barrier": lambda writer: writer.emit(SubgroupBarrier(writer.line)),
    "unroll": _unroll,
    "select": lambda writer, condition, yes, no: typed.select(condition, yes, no),
    "bitcast": _bitcast,
    "subgroup_add": _reduce("add"),
    "subgroup_max": _reduce("max"),
    "subgroup_min": _reduce("min"),
    "shuffle": _shuffle,
    "shuffle_xor": _shuffle_xor,
    "fragment": _fragment,
    "fill": _fill,
    "load_fragment": _load_fragment,
    "store_fragment": _store_fragment,
    "mma": _mma,
    "convert": _convert,
    "reduce_rows": _reduce_rows,
    "elements": lambda writer, c: layout.ELEMENTS[_the_fragment(c, "c").tile],
    "row": _position(0),
    "column": _position(1),
    "row_add": _across_row("add"),
    "row_max": _across_row("max"),
}
