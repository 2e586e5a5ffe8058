"""Prints KernelIR as text. A language is a subclass: tables of names, and methods where its syntax differs from C's."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, ClassVar, NoReturn

from tilesmith.codegen.ir import Array, KernelIR
from tilesmith.codegen.nodes import (
    Assign,
    Barrier,
    Binary,
    Bitcast,
    Builtin,
    Call,
    Cast,
    Component,
    Const,
    Convert,
    Element,
    Expr,
    Fill,
    For,
    If,
    Load,
    LoadFragment,
    Mma,
    Param,
    Select,
    SetElement,
    Stmt,
    Store,
    StoreFragment,
    Subgroup,
    Unary,
    Var,
    Vector,
    While,
    blocks,
    expressions,
)
from tilesmith.codegen.reserved import RESERVED
from tilesmith.codegen.types import KernelError, Type
from tilesmith.codegen.verify import fits

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

_SPELLED = {"//": "/", "and": "&&", "or": "||", "not": "!"}
_ADD, _MULTIPLY, _COMPARE, _LOGIC = ("+", "-"), ("*", "/", "//", "%"), ("<", "<=", ">", ">=", "==", "!="), ("and", "or")


def shortest(value: float, code: str = "f") -> str:
    """The shortest decimal that reads back as the same float32 (code f) or float16 (code e)."""
    exact = struct.unpack(code, struct.pack(code, value))[0]
    for digits in range(1, 10):
        text = f"{exact:.{digits}g}"
        if struct.unpack(code, struct.pack(code, float(text)))[0] == exact:
            break
    return text if "." in text or "e" in text else text + ".0"


class TextPrinter:
    """Prints one kernel. Subclasses fill the tables and override what differs."""

    target = ""
    shared_ceiling = 0
    types: ClassVar[dict[str, str]] = {}
    functions: ClassVar[dict[str, str]] = {}
    vector_type = "{scalar}{lanes}"
    barrier = ""
    constant_word = "const "

    def __init__(self, ir: KernelIR, limits: Limits | None = None):
        self.ir = ir
        self.limits = limits
        self.lines: list[str] = []
        self.depth = 1
        self.line = 0
        self.declared: set[str] = set()
        self.mentioned: dict[int, dict[str, None]] = {}
        self.assignments: dict[str, int] = {}
        self.counters = {s.name for s in ir.statements if isinstance(s, For)}
        for s in ir.statements:
            if isinstance(s, Assign):
                self.assignments[s.name] = self.assignments.get(s.name, 0) + 1

    def refuse(self, message: str) -> NoReturn:
        """Raise KernelError: this target cannot express the kernel."""
        place = f"{self.ir.source}:{self.line}" if self.line else self.ir.source
        raise KernelError(f"{place}: {self.ir.name} for {self.target}: {message}")

    def check(self) -> None:
        """Refuse what the target has not got, before anything is printed."""
        fits(self.ir, self.limits)
        if self.ir.shared_bytes > self.shared_ceiling:
            self.refuse(f"{self.ir.shared_bytes:,} bytes of shared memory; at most {self.shared_ceiling:,}")
        for d in (*self.ir.buffers, *self.ir.arrays, *self.ir.fragments, *self.ir.variables):
            if d.type.dtype not in self.types:
                self.refuse(f"{d.name} is {d.type}, which {self.target} has not; use f16 or f32")
        if "bf16" in self.ir.features and "bf16" not in self.types:
            self.refuse(f"it computes with bf16, which {self.target} has not; use f16 or f32")

    def name(self, name: str) -> str:
        """A name of the kernel as the language allows it. Names of kernels never end with an underscore."""
        return name + "_" if name in RESERVED else name

    def type(self, t: Type) -> str:
        """A type's name."""
        scalar = self.types[t.dtype]
        return scalar if t.lanes == 1 else self.vector_type.format(scalar=scalar, lanes=t.lanes)

    def mentions(self, s: Stmt) -> dict[str, None]:
        """The variables that a statement assigns or reads, loops' own excepted, in order."""
        if id(s) not in self.mentioned:
            found = self.header(s)
            for block in blocks(s):
                for inner in block:
                    found.update(self.mentions(inner))
            self.mentioned[id(s)] = found
        return dict(self.mentioned[id(s)])

    def header(self, s: Stmt) -> dict[str, None]:
        """The variables of a statement without its blocks; the condition of a while is inside its block."""
        found = {s.name: None} if isinstance(s, Assign) else {}
        found.update((e.name, None) for e in expressions(s) if isinstance(e, Var) and e.name not in self.counters)
        return found

    def put(self, text: str) -> None:
        """Add a line."""
        self.lines.append("  " * self.depth + text)

    def block(self, body: tuple[Stmt, ...]) -> None:
        """Print statements, declaring each variable in the innermost block that holds all its uses."""
        outer = set(self.declared)
        uses: dict[str, list[int]] = {}
        for k, s in enumerate(body):
            for name in self.mentions(s):
                uses.setdefault(name, []).append(k)
        here: dict[int, list[str]] = {}
        for name, places in uses.items():
            first = body[places[0]]
            inside = len(places) == 1 and blocks(first) and name not in self.header(first)
            if name not in outer and not inside:
                here.setdefault(places[0], []).append(name)
        for k, s in enumerate(body):
            fresh = here.get(k, [])
            inline = isinstance(s, Assign) and s.name in fresh and s.name not in _read(s)
            for name in fresh:
                if not (inline and name == s.name):
                    self.put(self.declaration(name, None, False))
            self.declared.update(fresh)
            self.line = s.line
            if inline:
                self.put(self.declaration(s.name, self.rooted(s.value), self.assignments[s.name] == 1))
            else:
                _STATEMENTS[type(s)](self, s)
        self.declared = outer

    def nested(self, body: tuple[Stmt, ...]) -> None:
        """Print a block, indented."""
        self.depth += 1
        self.block(body)
        self.depth -= 1

    def declaration(self, name: str, value: str | None, final: bool) -> str:
        """Declare a variable; `final`: it is never assigned again."""
        typed = f"{self.type(self.ir.type_of[name])} {self.name(name)}"
        return f"{typed};" if value is None else f"{self.constant_word * final}{typed} = {value};"

    def array(self, a: Array) -> str:
        """Declare a local array."""
        return f"{self.type(a.type)} {self.name(a.name)}[{a.length}];"

    def rooted(self, e: Expr) -> str:
        """An expression that needs no parentheses around it."""
        return self.subgroup(e) if isinstance(e, Subgroup) else self.e(e)

    def assign(self, s: Assign) -> None:
        self.put(f"{self.name(s.name)} = {self.rooted(s.value)};")

    def store(self, s: Store) -> None:
        self.put(f"{self.name(s.array)}[{self.e(s.index)}] = {self.e(s.value)};")

    def if_(self, s: If) -> None:
        self.put(f"if ({self.e(s.condition)}) {{")
        self.nested(s.then)
        if s.orelse:
            self.put("} else {")
            self.nested(s.orelse)
        self.put("}")

    def for_(self, s: For) -> None:
        i = self.name(s.name)
        start = f"{self.counter(self.ir.type_of[s.name])} {i} = {self.e(s.start)}"
        one = isinstance(s.step, Const) and s.step.value == 1
        self.put(f"for ({start}; {i} < {self.operand(s.stop)}; {i + '++' if one else f'{i} += {self.e(s.step)}'}) {{")
        self.nested(s.body)
        self.put("}")

    def counter(self, t: Type) -> str:
        """What a loop's variable is declared with."""
        return self.type(t)

    def while_(self, s: While) -> None:
        if not s.before:
            self.put(f"while ({self.e(s.condition)}) {{")
            self.nested(s.body)
        else:
            self.put(self.forever + " {")
            self.nested(s.before)
            self.put(f"  if (!({self.e(s.condition)})) {{ break; }}")
            self.nested(s.body)
        self.put("}")

    forever = "while (true)"

    def e(self, e: Expr) -> str:
        """An expression."""
        return _EXPRESSIONS[type(e)](self, e)

    def operand(self, e: Expr) -> str:
        """An expression as an operand of anything: in parentheses unless it is one word or a call."""
        text = self.e(e)
        bare = not isinstance(e, (Binary, Unary, Select)) and not (isinstance(e, Const) and text.startswith("-"))
        return text if bare else f"({text})"

    def const(self, e: Const) -> str:
        if e.type.lanes > 1:
            return f"{self.type(e.type)}({self.const(Const(e.type.scalar, e.value))})"
        return self.literal(e.type.dtype, e.value)

    def literal(self, dtype: str, value) -> str:
        """A scalar literal, as C spells it."""
        if dtype == "f32":
            return shortest(value) + "f"
        if dtype in ("f16", "bf16"):
            return f"{self.types[dtype]}({shortest(value)}f)"
        if dtype == "i32" and value == -(2**31):
            return "(-2147483647 - 1)"
        return str(value).lower() + "u" * (dtype == "u32")

    def binary(self, e: Binary) -> str:
        return f"{self.side(e, e.left, True)} {_SPELLED.get(e.op, e.op)} {self.side(e, e.right, False)}"

    def side(self, e: Binary, x: Expr, left: bool) -> str:
        """One operand of a binary operation, in parentheses where all four languages would not bind it the same way."""
        inner = x.op if isinstance(x, Binary) else None
        if e.op in _ADD:
            bare = inner in _MULTIPLY or (left and inner in _ADD)
        elif e.op in _MULTIPLY:
            bare = left and inner in _MULTIPLY
        elif e.op in _COMPARE:
            bare = inner in _ADD + _MULTIPLY
        else:
            bare = e.op in _LOGIC and (inner in _COMPARE or (left and inner == e.op))
        return self.e(x) if bare else self.operand(x)

    def load(self, e: Load) -> str:
        return f"{self.name(e.array)}[{self.e(e.index)}]"

    def unary(self, e: Unary) -> str:
        return _SPELLED.get(e.op, e.op) + self.operand(e.x)

    def select(self, e: Select) -> str:
        return f"{self.operand(e.condition)} ? {self.operand(e.yes)} : {self.operand(e.no)}"

    def call(self, e: Call) -> str:
        args = ", ".join(self.argument(a) for a in e.args)
        return f"{self.function(e)}({args})"

    def argument(self, e: Expr) -> str:
        """An expression among arguments: WGSL would read `a < b, c > d` as a template list."""
        return self.operand(e) if isinstance(e, Binary) and e.op in _COMPARE else self.e(e)

    def function(self, e: Call) -> str:
        """The name of the function that `e` calls."""
        return self.functions.get(e.function, e.function)

    def cast(self, e: Cast) -> str:
        return f"{self.type(e.type)}({self.argument(e.x)})"

    def bitcast(self, e: Bitcast) -> str:
        raise NotImplementedError

    def vector(self, e: Vector) -> str:
        return f"{self.type(e.type)}({', '.join(self.argument(p) for p in e.parts)})"

    def component(self, e: Component) -> str:
        return f"{self.operand(e.x)}.{'xyzw'[e.index]}"

    def builtin(self, e: Builtin) -> str:
        raise NotImplementedError

    def param(self, e: Param) -> str:
        return self.name(e.name)

    def subgroup(self, e: Subgroup) -> str:
        raise NotImplementedError

    def element(self, e: Element) -> str:
        raise NotImplementedError

    def fill(self, s: Fill) -> None:
        raise NotImplementedError

    load_fragment = store_fragment = mma = set_element = convert = fill


def _read(s: Assign) -> set[str]:
    return {e.name for e in expressions(s) if isinstance(e, Var)}


_STATEMENTS = {
    Assign: lambda p, s: p.assign(s),
    Store: lambda p, s: p.store(s),
    Barrier: lambda p, s: p.put(p.barrier),
    If: lambda p, s: p.if_(s),
    For: lambda p, s: p.for_(s),
    While: lambda p, s: p.while_(s),
    Fill: lambda p, s: p.fill(s),
    LoadFragment: lambda p, s: p.load_fragment(s),
    StoreFragment: lambda p, s: p.store_fragment(s),
    Mma: lambda p, s: p.mma(s),
    SetElement: lambda p, s: p.set_element(s),
    Convert: lambda p, s: p.convert(s),
}
_EXPRESSIONS = {
    Const: lambda p, e: p.const(e),
    Var: lambda p, e: p.name(e.name),
    Param: lambda p, e: p.param(e),
    Builtin: lambda p, e: p.builtin(e),
    Load: lambda p, e: p.load(e),
    Unary: lambda p, e: p.unary(e),
    Binary: lambda p, e: p.binary(e),
    Call: lambda p, e: p.call(e),
    Select: lambda p, e: p.select(e),
    Cast: lambda p, e: p.cast(e),
    Bitcast: lambda p, e: p.bitcast(e),
    Vector: lambda p, e: p.vector(e),
    Component: lambda p, e: p.component(e),
    Element: lambda p, e: p.element(e),
}
