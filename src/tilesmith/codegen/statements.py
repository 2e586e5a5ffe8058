"""Statements of a kernel's Python text: each writes to the current block what it does when the kernel runs."""

from __future__ import annotations

import ast
from typing import Any

from tilesmith.codegen import language, typed, words
from tilesmith.codegen.evaluate import CHANGING, Evaluator, is_runtime
from tilesmith.codegen.ir import Array, Buffer, Fragment
from tilesmith.codegen.nodes import (
    Assign,
    Binary,
    Const,
    Expr,
    For,
    If,
    Load,
    Param,
    SetElement,
    Stmt,
    Store,
    Var,
    While,
    expressions,
    walk,
)
from tilesmith.codegen.typed import Misuse
from tilesmith.codegen.types import Type, bool_, i32, u32
from tilesmith.codegen.writer import Slot

_ALLOWED = "assignments, if, for ... in range(...) or unroll(...), while, calls of words and @inline functions, pass"


class Statements(Evaluator):
    """Turns the statements of one function after another into those of a kernel.

    fixed: the compile-time names that were there when the innermost if or loop began. repeated: all names that were
    there when the innermost loop did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fixed: set[str] = set()
        self.repeated: set[str] = set()

    def statements(self, nodes: list[ast.stmt]) -> tuple[Stmt, ...]:
        """The statements of a block."""
        outer, self.block = self.block, []
        try:
            for node in nodes:
                self.statement(node)
            return tuple(self.block)
        finally:
            self.block = outer

    def statement(self, node: ast.stmt) -> None:
        """Write one statement to the current block."""
        if self.frames[-1].path == self.frames[0].path:
            self.line = node.lineno
        handle = getattr(self, "_" + type(node).__name__.lower() + "_statement", None)
        if handle is None:
            raise self.error(node, f"{type(node).__name__} is not a statement of a kernel; allowed: {_ALLOWED}")
        try:
            handle(node)
        except Misuse as misuse:
            raise self.error(node, str(misuse)) from None

    def _pass_statement(self, node: ast.Pass) -> None:
        pass

    def _expr_statement(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return
        if isinstance(node.value, ast.Call):
            function = self.value(node.value.func)
            if not hasattr(function, "word") and not isinstance(function, language.Inline):
                raise Misuse("a call of Python that does nothing in the kernel")
        if self.value(node.value) is not None:
            raise Misuse("the value is not used; assign it")

    def _return_statement(self, node: ast.Return) -> None:
        raise Misuse("return is allowed only as the last statement of an @inline function")

    def _assign_statement(self, node: ast.Assign) -> None:
        if len(node.targets) != 1:
            raise Misuse("one target at a time")
        self.assign(node.targets[0], node.value)

    def _annassign_statement(self, node: ast.AnnAssign) -> None:
        declared = self.value(node.annotation)
        if node.value is None or not isinstance(node.target, ast.Name):
            raise Misuse("allowed: name: type = value")
        value = self.value(node.value)
        if declared is language.const:
            if is_runtime(value):
                raise Misuse("a const is known at compile time; this is not")
            self.name_constant(node.target.id, value)
            return
        declared = bool_ if declared is bool else declared
        if not isinstance(declared, Type):
            raise Misuse("allowed annotations of a variable: a type, or const")
        value = typed.lift(value, declared)
        if value.type is not declared:
            raise Misuse(f"{value.type} for a {declared}; convert it with {declared}(...)")
        self.bind(node.target, value)

    def _augassign_statement(self, node: ast.AugAssign) -> None:
        target = node.target
        if isinstance(target, ast.Name):
            self.assign(
                target, ast.copy_location(ast.BinOp(ast.Name(target.id, ast.Load()), node.op, node.value), node)
            )
            return
        if not isinstance(target, ast.Subscript):
            raise self.error(target, "allowed on the left: a name or x[i]")
        base, index = self.values([target.value, target.slice])
        held = [self.element_of(target, base, index), index]
        mark = len(self.block)
        value = self.value(node.value)
        self.read_before(mark, held)
        self.store(base, held[1], self.operation(node, held[0], value))

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """`target = value`."""
        if not isinstance(target, (ast.Tuple, ast.List)):
            self.target = target.id if isinstance(target, ast.Name) else "x"
            self.bind(target, self.value(value))
            return
        self.target = "x"
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            values = []
            for name, one in zip(target.elts, value.elts):
                self.target = name.id if isinstance(name, ast.Name) else "x"
                mark = len(self.block)
                v = self.value(one)
                self.read_before(mark, values)
                values.append(v)
        else:
            values = self.value(value)
        if not isinstance(values, (tuple, list)) or len(values) != len(target.elts):
            raise Misuse(f"{len(target.elts)} names on the left, another number of values on the right")
        # All of the right side is read before any name on the left changes.
        values = [self.temporary("was", v) if isinstance(v, Expr) and _reads(v) else v for v in values]
        for one, v in zip(target.elts, values):
            self.bind(one, v)

    def bind(self, target: ast.expr, value: Any) -> None:
        """Give `target` its new value."""
        if isinstance(target, ast.Subscript):
            mark = len(self.block)
            base, index = self.values([target.value, target.slice])
            self.read_before(mark, held := [value])
            self.store(base, index, held[0])
        elif not isinstance(target, ast.Name):
            raise self.error(target, "allowed on the left: a name, x[i], or several of them")
        elif isinstance(value, (bool, int, float, Expr)):
            self.set_variable(target.id, value)
        else:
            self.name_constant(target.id, self.held(value, CHANGING))

    def name_constant(self, name: str, value: Any) -> None:
        """Bind a name at compile time."""
        if isinstance(self.frames[-1].locals.get(name), (Slot, Param, Buffer)):
            raise Misuse(f"{name} already is an argument or a variable")
        if name in self.fixed:
            raise Misuse(f"{name} is known at compile time before this if or loop, which may not run; use another name")
        self.frames[-1].locals[name] = value

    def sometimes(self, nodes: list[ast.stmt], loop: tuple[str, ...] | None = None) -> tuple[Stmt, ...]:
        """The statements of a block that may not run: its compile-time names end with it. `loop`: a loop's, which has
        these names of its own."""
        names, fixed, repeated = self.frames[-1].locals, self.fixed, self.repeated
        if loop is not None:
            self.repeated = set(names).difference(loop)
        self.fixed = {n for n, value in names.items() if not isinstance(value, Slot)}
        try:
            body = self.statements(nodes)
            for name in [n for n, value in names.items() if not isinstance(value, Slot) and n not in self.fixed]:
                del names[name]
            return body
        finally:
            self.fixed, self.repeated = fixed, repeated

    def set_variable(self, name: str, value: Any) -> None:
        """Assign a run-time value to a name, declaring it on first sight."""
        names = self.frames[-1].locals
        slot = names.get(name)
        if slot is not None and (not isinstance(slot, Slot) or slot.loop):
            kind = "a loop's variable" if isinstance(slot, Slot) else "an argument or a compile-time name"
            raise Misuse(f"{name} is {kind} and cannot be assigned to")
        e = typed.lift(value, slot.type if slot else None)
        if slot is None:
            slot = names[name] = self.variable(name, e.type)
        if e.type is not slot.type:
            raise Misuse(f"{name} holds {slot.type}, got {e.type}; convert it with {slot.type}(...)")
        self.emit(Assign(self.line, slot.name, e))
        self.assigned.add(slot.name)

    def store(self, base: Any, index: Any, value: Any) -> None:
        """`base[index] = value`, of an array or a fragment."""
        if isinstance(base, Fragment):
            e = typed.lift(value, base.type)
            if e.type is not base.type:
                raise Misuse(f"{base.name} holds {base.type}, got {e.type}")
            self.emit(SetElement(self.line, base.name, words.element(base, index), e))
            return
        if not isinstance(base, (Buffer, Array)):
            raise Misuse("only arrays, buffers and accumulators have elements to assign to")
        if isinstance(base, Buffer) and base.access == "read":
            raise Misuse(f"{base.name} is In, so it is not written; annotate it Out[{base.type}] or InOut[{base.type}]")
        e = typed.lift(value, base.type)
        if e.type is not base.type:
            raise Misuse(f"{base.name} holds {base.type}, got {e.type}; convert it with {base.type}(...)")
        self.emit(Store(self.line, base.name, typed.as_index(index), e))

    def _if_statement(self, node: ast.If) -> None:
        condition = self.value(node.test)
        if not isinstance(condition, Expr):
            for statement in node.body if condition else node.orelse:
                self.statement(statement)
            return
        self.want_bool(condition)
        line, before = self.line, set(self.assigned)
        then, after_then = self.sometimes(node.body), self.assigned
        self.assigned = set(before)
        orelse = self.sometimes(node.orelse)
        self.assigned &= after_then
        self.emit(If(line, condition, then, orelse))

    def want_bool(self, condition: Expr) -> None:
        """Refuse a condition that is not bool."""
        if condition.type is not bool_:
            raise Misuse(f"the condition is {condition.type}, not bool; compare first, as in x != 0")

    def _while_statement(self, node: ast.While) -> None:
        line, assigned = self.line, set(self.assigned)
        before, condition = self.captured(node.test)
        if node.orelse or not isinstance(condition, Expr):
            raise Misuse("allowed: while with a run-time condition, without else")
        self.want_bool(condition)
        body = self.sometimes(node.body, loop=())
        self.assigned = assigned
        self.emit(While(line, before, condition, body))

    def _for_statement(self, node: ast.For) -> None:
        call = node.iter
        if node.orelse:
            raise Misuse("for ... else")
        if isinstance(call, ast.Call) and self.value(call.func) is range and isinstance(node.target, ast.Name):
            self.loop(node, node.target.id, self.values(call.args))
        else:
            self.written_out(node)

    def written_out(self, node: ast.For) -> None:
        """A loop over compile-time items."""
        names = self.frames[-1].locals
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        if not all(isinstance(t, ast.Name) for t in targets):
            raise Misuse("the loop's target must be a name or several")
        for t in targets:
            self.free_for_loop(t.id)
        for item in self.held(self.iterate(node.iter), CHANGING):
            items = item if isinstance(node.target, ast.Tuple) else [item]
            names.update(zip((t.id for t in targets), items))
            for statement in node.body:
                self.statement(statement)
        for t in targets:
            names.pop(t.id, None)

    def free_for_loop(self, name: str) -> None:
        """Forget what a loop's variable meant before, which in Python the loop changes."""
        if name in self.repeated:
            raise Misuse(
                f"{name} has a value before an outer loop, and may be another in its next turn; use another name"
            )
        self.frames[-1].locals.pop(name, None)

    def loop(self, node: ast.For, name: str, bounds: list) -> None:
        """A loop that runs on the device."""
        line = self.line
        if not 1 <= len(bounds) <= 3:
            raise Misuse("allowed: range(stop), range(start, stop), range(start, stop, step)")
        start, stop, step = ((0, *bounds, 1), (*bounds, 1), tuple(bounds))[len(bounds) - 1]
        if isinstance(step, int) and step <= 0:
            raise Misuse(f"a step of {step}; allowed: positive steps; count up and subtract")
        known = next((b for b in (start, stop, step) if isinstance(b, Expr)), None)
        counter = known.type if known is not None else (i32 if min(start, stop) < 0 else u32)
        low, high, by = (typed.lift(b, counter) for b in (start, stop, step))
        if counter not in (u32, i32) or low.type is not counter or high.type is not counter or by.type is not counter:
            raise Misuse(f"range over {low.type}, {high.type}, {by.type}; allowed: all u32 or all i32")
        names = self.frames[-1].locals
        self.free_for_loop(name)
        slot = names[name] = self.variable(name, counter, loop=True)
        before = set(self.assigned)
        self.assigned.add(slot.name)
        body = self.sometimes(node.body, loop=(name,))
        self.line = line
        always = isinstance(low, Const) and isinstance(high, Const) and low.value < high.value
        self.assigned = self.assigned - {slot.name} if always else before
        names.pop(name, None)
        changed = {s.name for s in walk(body) if isinstance(s, (Assign, For))}
        high, by = (self.steady(e, wanted, changed) for e, wanted in ((high, "stop"), (by, "step")))
        self.emit(For(line, slot.name, low, high, by, body))

    def steady(self, e: Expr, wanted: str, changed: set[str]) -> Expr:
        """`e`, kept in a variable of its own if the loop's body could change it."""
        inside = (e, *expressions(e))
        if any(isinstance(x, Load) or (isinstance(x, Var) and x.name in changed) for x in inside):
            return self.temporary(wanted, e)
        return e


def _reads(e: Expr) -> bool:
    return any(isinstance(x, (Var, Load, Binary)) for x in (e, *expressions(e)))
