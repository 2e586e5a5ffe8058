"""`build`: from a Python function to KernelIR."""

from __future__ import annotations

import ast
import inspect
import os.path
import textwrap
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from tilesmith.codegen import language, typed
from tilesmith.codegen.evaluate import MEMORY, Frame
from tilesmith.codegen.ir import Buffer, KernelIR, Scalar
from tilesmith.codegen.nodes import Builtin, Const, Expr, Param, Var
from tilesmith.codegen.statements import Statements
from tilesmith.codegen.typed import Misuse
from tilesmith.codegen.types import KernelError, bool_, i32, u32
from tilesmith.codegen.verifier import verify
from tilesmith.codegen.writer import Slot

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits


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

    An argument whose annotation is None (as in `bias: In[f32] if biased else None`) is left out, and is None inside the
    kernel.

    workgroup: threads along x, y, z. subgroup_size: what the kernel relies on; 32 with fragments; None: any.
    limits: those of a device; a workgroup beyond them is refused. constants: compile-time values by name, in addition
    to those of the function's closure and module.

    Raises KernelError, which begins with file:line and says what is allowed.
    """
    if not isinstance(function, FunctionType):
        raise KernelError(f"build: a kernel is a plain Python function, got {type(function).__name__}")
    if not isinstance(workgroup, (tuple, list)) or len(workgroup) != 3:
        raise KernelError(f"{function.__name__}: a workgroup is three positive ints, got {workgroup!r}")
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
        raise KernelError(
            f"{code.co_name}: the Python text is needed and cannot be read: {problem}; define the kernel in a file or "
            "a notebook"
        ) from None
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a lambda within a longer statement, of which these lines are a part
        tree = ast.Module([], [])
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    definition = tree.body[0] if len(tree.body) == 1 else None
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


class Frontend(Statements):
    """Turns one kernel function, and the inline functions it calls, into statements."""

    def __init__(self, function: Callable, constants: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.constants = constants
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
