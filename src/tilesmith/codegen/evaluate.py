"""Expressions of a kernel's Python text: each becomes a compile-time Python value or a typed expression."""

from __future__ import annotations

import ast
import builtins
import contextlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilesmith.codegen import typed
from tilesmith.codegen.ir import Array, Buffer, Fragment
from tilesmith.codegen.language import Inline
from tilesmith.codegen.nodes import Assign, Barrier, Element, Expr, For, If, Load, Stmt, Var, While, expressions, walk
from tilesmith.codegen.typed import Misuse
from tilesmith.codegen.types import KernelError, Type, bool_
from tilesmith.codegen.words import call_word, element, signature
from tilesmith.codegen.writer import Slot, Writer

_OPERATORS: dict[type, tuple[str, Callable]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.LShift: ("<<", operator.lshift),
    ast.RShift: (">>", operator.rshift),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
}
_COMPARISONS: dict[type, tuple[str, Callable]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Is: ("is", operator.is_),
    ast.IsNot: ("is not", operator.is_not),
    ast.In: ("in", lambda a, b: a in b),
    ast.NotIn: ("not in", lambda a, b: a not in b),
}
_UNARY: dict[type, tuple[str, Callable]] = {
    ast.USub: ("-", operator.neg),
    ast.Not: ("not", operator.not_),
    ast.Invert: ("~", operator.invert),
    ast.UAdd: ("+", operator.pos),
}
MEMORY = (Load, Element)
"""What reads memory; what changes also reads variables."""
CHANGING = (*MEMORY, Var)
_WRITE_NOTHING = (Assign, If, For, While, Barrier)
_CONTAINERS = (zip, enumerate, len, range, list, tuple, reversed)
_ALLOWED = "arithmetic, comparisons, and/or/not, a if c else b, x[i], and calls of kernel words and @inline functions"


@dataclass
class Frame:
    """The names that one function's body sees; `own` are those that it assigns to somewhere, never meant by `outer`."""

    function: Callable
    path: str
    outer: dict[str, Any]
    own: frozenset[str]
    locals: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable, constants: dict[str, Any], own: frozenset[str]) -> Frame:
        outer = {**vars(builtins), **function.__globals__}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # a cell that the enclosing function has not filled yet
                outer[name] = cell.cell_contents
        outer.update(constants)
        return cls(function, function.__code__.co_filename, outer, own)


def is_runtime(value: object) -> bool:
    """Whether a value, or part of it, is known only when the kernel runs."""
    if isinstance(value, (tuple, list)):
        return any(map(is_runtime, value))
    return isinstance(value, Expr)


class Evaluator(Writer):
    """Evaluates expressions within the current frame, and writes what they need beforehand to the current block."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    def error(self, node: ast.AST, message: str) -> KernelError:
        """The error of `node`, with its place and text."""
        text = ast.unparse(node).split("\n")[0]
        return KernelError(f"{self.frames[-1].path}:{getattr(node, 'lineno', 0)}: {message}: `{text}`")

    def value(self, node: ast.AST) -> Any:
        """What `node` is worth. Raises KernelError with its place."""
        evaluate = getattr(self, "_" + type(node).__name__.lower(), None)
        if evaluate is None:
            raise self.error(node, f"{type(node).__name__} is not an expression of a kernel; allowed: {_ALLOWED}")
        try:
            return evaluate(node)
        except Misuse as misuse:
            raise self.error(node, str(misuse)) from None

    def python(self, node: ast.AST, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """A compile-time call, whose exceptions become errors of `node`."""
        try:
            return function(*args, **kwargs)
        except KernelError as problem:
            raise self.error(node, str(problem)) from None
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as problem:
            raise self.error(node, f"at compile time: {type(problem).__name__}: {problem}") from None

    def values(self, nodes: list[ast.expr]) -> list:
        """What `nodes` are worth, from left to right: each reads before a later one, an inline function, writes."""
        found: list = []
        for node in nodes:
            mark = len(self.block)
            value = self.value(node)
            self.read_before(mark, found)
            found.append(value)
        return found

    def read_before(self, mark: int, values: list) -> None:
        """Have `values` read memory before what the block got since `mark`, if that writes to any."""
        if self.wrote(mark):
            later = self.block[mark:]
            del self.block[mark:]
            values[:] = [self.held(v, MEMORY) for v in values]
            self.block += later

    def wrote(self, mark: int) -> bool:
        """Whether what the block got since `mark` writes to memory."""
        return not all(isinstance(s, _WRITE_NOTHING) for s in walk(tuple(self.block[mark:])))

    def held(self, value: Any, kinds: tuple[type, ...]) -> Any:
        """`value`, which stays what it is now: what reads one of `kinds` is in a variable of its own."""
        if type(value) in (tuple, list):
            return type(value)(self.held(v, kinds) for v in value)
        if isinstance(value, Expr) and any(isinstance(x, kinds) for x in (value, *expressions(value))):
            return self.temporary("was", value)
        return value

    def captured(self, node: ast.AST) -> tuple[tuple[Stmt, ...], Any]:
        """The value of `node`, and what it wants to run before, kept out of the current block."""
        outer, self.block = self.block, []
        try:
            value = self.value(node)
            return tuple(self.block), value
        finally:
            self.block = outer

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        frame = self.frames[-1]
        value = frame.locals.get(node.id, self)
        if value is self and node.id not in frame.own:
            value = frame.outer.get(node.id, self)
        if value is self:
            raise Misuse("unknown name; a loop's variable ends with its loop, a compile-time name with its if or loop")
        if not isinstance(value, Slot):
            return value
        if value.name not in self.assigned:
            raise Misuse("may have no value yet: it is assigned only inside an if or a loop that may not run")
        return Var(value.type, value.name)

    def _tuple(self, node: ast.Tuple) -> tuple:
        return tuple(self.values(node.elts))

    def _list(self, node: ast.List) -> list:
        return self.values(node.elts)

    def _listcomp(self, node: ast.ListComp) -> list:
        if len(node.generators) != 1 or not isinstance(node.generators[0].target, ast.Name):
            raise Misuse("allowed: one `for name in` over compile-time values")
        generator, frame, out = node.generators[0], self.frames[-1], []
        hidden = dict(frame.locals)
        for item in self.iterate(generator.iter):
            frame.locals[generator.target.id] = item
            if all(self.value(test) for test in generator.ifs):
                out.append(self.value(node.elt))
        frame.locals.clear()
        frame.locals.update(hidden)
        return out

    _generatorexp = _listcomp

    def iterate(self, node: ast.AST) -> list:
        """The items of a compile-time iterable."""
        value = self.value(node)
        if isinstance(value, Expr) or not hasattr(value, "__iter__"):
            raise self.error(node, "not known at compile time; allowed: range(...), unroll(...), lists and tuples")
        return list(value)

    def _attribute(self, node: ast.Attribute) -> Any:
        base = self.value(node.value)
        if not isinstance(base, Expr):
            return self.python(node, getattr, base, node.attr)
        if len(node.attr) != 1 or node.attr not in "xyzw":
            raise Misuse(f"{base.type} has no {node.attr}; allowed: x y z w, one at a time")
        return typed.component(base, "xyzw".index(node.attr))

    def _subscript(self, node: ast.Subscript) -> Any:
        base, index = self.values([node.value, node.slice])
        return self.element_of(node, base, index)

    def element_of(self, node: ast.Subscript, base: Any, index: Any) -> Any:
        """`base[index]`, where `node` says so."""
        if isinstance(base, (Buffer, Array)):
            return typed.load(base, index)
        if isinstance(base, Fragment):
            return Element(base.type, base.name, element(base, index))
        if isinstance(base, Expr):
            return typed.component(base, index)
        if is_runtime(index):
            raise Misuse("the index of a list must be known at compile time; use local(...) for one that is not")
        return self.python(node, operator.getitem, base, index)

    def _binop(self, node: ast.BinOp) -> Any:
        return self.operation(node, *self.values([node.left, node.right]))

    def operation(self, node: ast.BinOp | ast.AugAssign, left: Any, right: Any) -> Any:
        """`left` and `right` under the operator of `node`."""
        name, compute = _OPERATORS.get(type(node.op), (type(node.op).__name__, None))
        if isinstance(left, Expr) or isinstance(right, Expr):
            return typed.binary(name, left, right)
        if compute is None:
            raise Misuse(f"{name}; allowed: + - * / // % << >> & | ^")
        return self.python(node, compute, left, right)

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        name, compute = _UNARY[type(node.op)]
        x = self.value(node.operand)
        if not isinstance(x, Expr):
            return self.python(node, compute, x)
        return x if name == "+" else typed.unary(name, x)

    def _compare(self, node: ast.Compare) -> Any:
        values = self.values([node.left, node.comparators[0]])
        mark = len(self.block)
        values += self.values(node.comparators[1:])
        if self.wrote(mark):
            raise Misuse("a chain whose last part writes; join two comparisons by `and`")
        result: Any = True
        for op, left, right in zip(node.ops, values, values[1:]):
            name, compute = _COMPARISONS[type(op)]
            if not isinstance(left, Expr) and not isinstance(right, Expr):
                part = bool(self.python(node, compute, left, right))
            elif name in typed.COMPARISONS:
                part = typed.binary(name, left, right)
            elif name in ("is", "is not") and (left is None or right is None):
                part = name == "is not"
            else:
                raise Misuse(f"{name} of run-time values; allowed: {' '.join(typed.COMPARISONS)}")
            result = part if result is True else typed.logical("and", typed.lift(result), typed.lift(part))
        return result

    def _boolop(self, node: ast.BoolOp) -> Any:
        op = "and" if isinstance(node.op, ast.And) else "or"
        result = self.value(node.values[0])
        for right in node.values[1:]:
            if not isinstance(result, Expr):
                result = self.value(right) if bool(result) == (op == "and") else result
                continue
            before, part = self.captured(right)
            part = typed.lift(part)
            if not before and not _loads(part):
                result = typed.logical(op, result, part)
                continue
            test = self.temporary("both" if op == "and" else "either", result)
            then = (*before, Assign(self.line, test.name, part))
            if part.type is not bool_:
                raise Misuse(f"{op} of {part.type}; compare first, as in x != 0")
            self.emit(If(self.line, test if op == "and" else typed.unary("not", test), then, ()))
            result = test
        return result

    def _ifexp(self, node: ast.IfExp) -> Any:
        condition = self.value(node.test)
        if not isinstance(condition, Expr):
            return self.value(node.body if condition else node.orelse)
        before_yes, yes = self.captured(node.body)
        before_no, no = self.captured(node.orelse)
        chosen = typed.select(condition, yes, no)
        a, b = typed.same_type(yes, no)
        if not (before_yes or before_no or _loads(a) or _loads(b)):
            return chosen
        slot = self.variable("picked", a.type)
        then = (*before_yes, Assign(self.line, slot.name, a))
        self.emit(If(self.line, condition, then, (*before_no, Assign(self.line, slot.name, b))))
        self.assigned.add(slot.name)
        return Var(slot.type, slot.name)

    def _call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise Misuse("* and ** are not allowed in a call")
        args = self.values([*node.args, *(k.value for k in node.keywords)])
        args, named = args[: len(node.args)], args[len(node.args) :]
        keywords = {k.arg: value for k, value in zip(node.keywords, named)}
        if hasattr(function, "word"):
            bound = self.python(node, signature(function).bind, *args, **keywords)
            return call_word(self, function, bound)
        if isinstance(function, Inline):
            return self.inline(node, function.function, args, keywords)
        if isinstance(function, Type):
            if keywords or not args:
                raise Misuse(f"allowed: {function}(value)" + (f" or {function.lanes} values" * (function.lanes > 1)))
            return typed.cast(function, args[0]) if len(args) == 1 else typed.collect(function, args)
        if not is_runtime(args) and not is_runtime(list(keywords.values())):
            return self.python(node, function, *args, **keywords)
        if function in (min, max, abs) and not keywords:
            return self._extreme(function.__name__, args)
        if function in _CONTAINERS:
            return self.python(node, function, *args, **keywords)
        raise Misuse(
            f"{getattr(function, '__name__', function)} takes compile-time values only; on run-time values allowed: "
            "kernel words, types, @inline functions, min, max, abs"
        )

    def _extreme(self, name: str, args: list) -> Expr:
        if name == "abs" or len(args) == 1:
            return typed.call(name, *args)
        result = args[0]
        for x in args[1:]:
            result = typed.call(name, result, x)
        return result

    def inline(self, node: ast.Call, function: Callable, args: list, keywords: dict) -> Any:
        """A call of an @inline function."""
        raise NotImplementedError


def _loads(e: Expr) -> bool:
    return isinstance(e, Load) or any(isinstance(x, Load) for x in expressions(e))
