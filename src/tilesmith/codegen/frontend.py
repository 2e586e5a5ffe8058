"""Statements of a kernel's Python text, and `build`: from a Python function to KernelIR."""

from __future__ import annotations

import ast
import inspect
import os.path
import textwrap
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from tilesmith.codegen import language, typed
from tilesmith.codegen.evaluate import CHANGING, MEMORY, Evaluator, Frame, Slot, is_runtime
from tilesmith.codegen.ir import Array, Buffer, Fragment, KernelIR, Scalar
from tilesmith.codegen.nodes import (
    Assign,
    Binary,
    Builtin,
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
from tilesmith.codegen.types import KernelError, Type, bool_, i32, u32
from tilesmith.codegen.verify import verify

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

_ALLOWED = "assignments, if, for ... in range(...) or unroll(...), while, calls of words and @inline functions, pass"


def build(
    function: Callable,
    workgroup: tuple[int, int, int],
    *,
    subgroup_size: int | None = None,
    name: str | None = None,
    limits: Limits | None = None,
    **constants: Any,
) -> KernelIR:
    """The verified KernelIR of a Python function whose arguments are annotated In, Out, InOut or Scalar.

    An argument whose annotation is None (as of `bias: In[f32] if biased else None`) is left out, and None inside.

    workgroup: threads along x, y, z. subgroup_size: what the kernel relies on; 32 with fragments; None: any.
    limits: those of a device; a workgroup beyond them is refused. constants: compile-time values by name, beside those
    of the function's closure and module.

    Raises KernelError, which begins with file:line and says what is allowed.
    """
    front = Frontend(function, constants)
    front.subgroup_size = subgroup_size
    try:
        ir = front.kernel(name or function.__name__, tuple(workgroup))
        verify(ir, limits)
    except RecursionError:
        place = f"{function.__code__.co_filename}:{front.line}"
        raise KernelError(f"{place}: expressions nested too deeply; assign their parts to names") from None
    return ir


@lru_cache(maxsize=256)
def _parsed(code: CodeType) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except OSError as problem:
        raise KernelError(f"{code.co_name}: the Python text is needed and cannot be read: {problem}") from None
    tree = ast.parse(source)
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef):
        raise KernelError(f"{code.co_filename}:{code.co_firstlineno}: a kernel is a plain `def`")
    return definition


@lru_cache(maxsize=256)
def _own_names(code: CodeType) -> frozenset[str]:
    """The names that a function assigns to; those of comprehensions are theirs alone."""
    nodes = list(ast.walk(_parsed(code)))
    inner = {id(n) for c in nodes if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
    stored = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in inner)
    return frozenset(n.id for n in stored)


class Frontend(Evaluator):
    """Turns one kernel function, and the inline functions it calls, into statements."""

    def __init__(self, function: Callable, constants: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.constants = constants
        self.fixed: set[str] = set()
        self.repeated: set[str] = set()
        self.frames.append(Frame.of(function, constants, _own_names(function.__code__)))

    def kernel(self, name: str, workgroup: tuple[int, int, int]) -> KernelIR:
        """The whole kernel."""
        definition = _parsed(self.function.__code__)
        self.used.add(name)
        buffers, scalars = self.arguments(definition)
        body = self.statements(definition.body)
        return KernelIR(
            name=name,
            workgroup=workgroup,
            buffers=tuple(buffers),
            scalars=tuple(scalars),
            arrays=tuple(self.arrays),
            fragments=tuple(self.fragments),
            variables=tuple(self.variables),
            body=body,
            subgroup_size=self.subgroup_size,
            source=os.path.basename(self.frames[0].path),
        )

    def arguments(self, definition: ast.FunctionDef) -> tuple[list[Buffer], list[Scalar]]:
        """Declare the arguments."""
        a = definition.args
        if a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults:
            raise self.error(definition, "allowed: plain positional arguments without defaults")
        buffers, scalars, frame = [], [], self.frames[0]
        for arg in a.args:
            declared = self.function.__annotations__.get(arg.arg)
            if isinstance(declared, str):
                declared = self.value(arg.annotation)
            if declared is None and arg.annotation is not None:
                frame.locals[arg.arg] = None
                continue
            if not isinstance(declared, language.Annotation):
                raise self.error(arg, "allowed annotations: In[type], Out[type], InOut[type], Scalar[type]")
            self.used.add(arg.arg)
            if declared.kind == "scalar":
                if declared.type not in (typed.f32, u32, i32):
                    raise self.error(arg, f"a Scalar of {declared.type}; allowed: f32, u32, i32")
                scalars.append(Scalar(arg.arg, declared.type))
                frame.locals[arg.arg] = Param(declared.type, arg.arg)
            else:
                if declared.type is bool_:
                    raise self.error(arg, "a buffer of bool; use u32")
                buffers.append(Buffer(arg.arg, declared.type, declared.kind))
                frame.locals[arg.arg] = buffers[-1]
        return buffers, scalars

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
            raise self.error(node, f"{type(node).__name__} is no statement of a kernel; allowed: {_ALLOWED}")
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
            self.emit(SetElement(self.line, base.name, self.element(base, index), e))
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

    def inline(self, node: ast.Call, function: Callable, args: list, keywords: dict) -> Any:
        """Write out the body of an @inline function; its value is that of its return."""
        if any(frame.function is function for frame in self.frames):
            raise Misuse(f"{function.__name__} calls itself; kernels have no recursion")
        definition = _parsed(function.__code__)
        bound = self.python(node, inspect.signature(function).bind, *args, **keywords)
        bound.apply_defaults()
        frame = Frame.of(function, self.constants, _own_names(function.__code__))
        for name, value in bound.arguments.items():
            if isinstance(value, Expr) and (name in frame.own or not isinstance(value, (Var, Param, Const, Builtin))):
                kept = self.temporary(name, value)
                value = Slot(kept.name, kept.type) if name in frame.own else kept
            frame.locals[name] = self.held(value, MEMORY)
        *body, last = definition.body
        self.frames.append(frame)
        target, line, fixed, repeated, result = self.target, self.line, self.fixed, self.repeated, None
        self.fixed, self.repeated = set(), set()
        try:
            for statement in body:
                self.statement(statement)
            if isinstance(last, ast.Return):
                result = None if last.value is None else self.value(last.value)
            else:
                self.statement(last)
        finally:
            self.frames.pop()
            self.target, self.line, self.fixed, self.repeated = target, line, fixed, repeated
        return result


def _reads(e: Expr) -> bool:
    return any(isinstance(x, (Var, Load, Binary)) for x in (e, *expressions(e)))
