"""Prints KernelIR as text. A language is a subclass: tables of names, and methods where its syntax differs from C's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn

from tilesmith.codegen.ir import Array, Buffer, KernelIR, a_kernel
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
    RowReduce,
    Select,
    SetElement,
    Stmt,
    Store,
    StoreFragment,
    Subgroup,
    SubgroupBarrier,
    Unary,
    Var,
    Vector,
    While,
    reads,
)
from tilesmith.codegen.reserved import RESERVED
from tilesmith.codegen.typed import LARGEST
from tilesmith.codegen.types import KernelError, Type
from tilesmith.codegen.verifier import fits

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

_SPELLED = {"//": "/", "and": "&&", "or": "||", "not": "!"}
_CODES = {"f": "f32", "e": "f16"}
_COMPOUND = frozenset((Binary, Unary, Select))
_ADD, _MULTIPLY, _COMPARE, _LOGIC = ("+", "-"), ("*", "/", "//", "%"), ("<", "<=", ">", ">=", "==", "!="), ("and", "or")


def shortest(value: float, code: str = "f") -> str:
    """The shortest decimal that reads back as the same float32 (code f) or float16 (code e), and is not above all."""
    exact = struct.unpack(code, struct.pack(code, value))[0]
    for digits in range(1, 18):
        text = f"{exact:.{digits}g}"
        read = float(text)
        if abs(read) <= LARGEST[_CODES[code]] and struct.unpack(code, struct.pack(code, read))[0] == exact:
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
    subgroup_barrier = ""
    constant_word = "const "
    printers: ClassVar[dict[type, Callable]] = {}

    def __init_subclass__(cls) -> None:
        cls.printers = {kind: getattr(cls, name) for kind, name in _PRINTERS.items()}

    def __init__(self, ir: KernelIR, limits: Limits | None = None):
        self.ir = a_kernel(ir, f"{self.target}.generate")
        self.limits = limits
        self.lines: list[str] = []
        self.depth = 1
        self.line = 0
        self.literals: dict[tuple[Type, str], str] = {}
        self.assignments: dict[str, int] = {}
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

    def put(self, text: str) -> None:
        """Add a line."""
        self.lines.append("  " * self.depth + text)

    def block(self, body: tuple[Stmt, ...]) -> None:
        """Print statements and, before the first that needs them, the variables that belong to this block."""
        declared = self.ir.declarations[id(body)]
        for k, s in enumerate(body):
            fresh = declared.get(k, ())
            inline = isinstance(s, Assign) and s.name in fresh and s.name not in reads(s)
            for name in fresh:
                if not (inline and name == s.name):
                    self.put(self.declaration(name, None, False))
            self.line = s.line
            if inline:
                self.put(self.declaration(s.name, self.rooted(s.value), self.assignments[s.name] == 1))
            else:
                self.printers[type(s)](self, s)

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

    def wait(self, s: Barrier) -> None:
        self.put(self.barrier)

    def wait_subgroup(self, s: SubgroupBarrier) -> None:
        if not self.subgroup_barrier:
            self.refuse(f"{self.target} has no barrier of a subgroup; use barrier()")
        self.put(self.subgroup_barrier)

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
        return self.printers[type(e)](self, e)

    def operand(self, e: Expr) -> str:
        """An expression as an operand of anything: in parentheses unless it is one word or a call."""
        text = self.e(e)
        bare = type(e) not in _COMPOUND and not (type(e) is Const and text[0] == "-")
        return text if bare else f"({text})"

    def const(self, e: Const) -> str:
        key = e.type, str(e.value)  # 0.0 and -0.0 are equal, and two literals
        text = self.literals.get(key)
        if text is None:
            text = self.literal(e.type.dtype, e.value)
            if e.type.lanes > 1:
                text = f"{self.type(e.type)}({text})"
            self.literals[key] = text
        return text

    def literal(self, dtype: str, value) -> str:
        """A scalar literal, as C spells it."""
        if dtype == "f32":
            return shortest(value) + "f"
        if dtype in ("f16", "bf16"):
            return f"{self.types[dtype]}({shortest(value, 'e' if dtype == 'f16' else 'f')}f)"
        if dtype == "i32" and value == -(2**31):
            return "(-2147483647 - 1)"
        return str(value).lower() + "u" * (dtype == "u32")

    def binary(self, e: Binary) -> str:
        return f"{self.side(e, e.left, True)} {_SPELLED.get(e.op, e.op)} {self.side(e, e.right, False)}"

    def side(self, e: Binary, x: Expr, left: bool) -> str:
        """One operand of a binary operation, in parentheses where all four languages would not bind it the same way."""
        inner = x.op if type(x) is Binary else None
        if e.op in _ADD:
            bare = inner in _MULTIPLY or (left and inner in _ADD)
        elif e.op in _MULTIPLY:
            bare = left and inner in _MULTIPLY
        elif e.op in _COMPARE:
            bare = inner in _ADD + _MULTIPLY
        else:
            bare = e.op in _LOGIC and (inner in _COMPARE or (left and inner == e.op))
        return self.e(x) if bare else self.operand(x)

    def var(self, e: Var) -> str:
        return self.name(e.name)

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

    def pointer(self, s: LoadFragment | StoreFragment) -> str:
        """Where a fragment lies: offsets count its scalars, also in arrays of vectors or words."""
        memory, fragment = self.ir.memory[s.array], self.ir.fragment_named[s.fragment]
        base, scalar = self.name(s.array), memory.type.scalar if fragment.role == "c" else fragment.type
        if memory.type is not scalar:
            constant = "const " if getattr(memory, "access", "") == "read" else ""
            base = f"reinterpret_cast<{self.space(memory)}{constant}{self.types[scalar.dtype]}*>({base})"
        return f"{base} + {self.operand(s.offset)}"

    def space(self, memory: Buffer | Array) -> str:
        """What a pointer to this memory says of where it is."""
        return ""

    def element(self, e: Element) -> str:
        raise NotImplementedError

    def fill(self, s: Fill) -> None:
        raise NotImplementedError

    load_fragment = store_fragment = mma = set_element = convert = row_reduce = fill


_PRINTERS = {
    Assign: "assign",
    Store: "store",
    Barrier: "wait",
    SubgroupBarrier: "wait_subgroup",
    If: "if_",
    For: "for_",
    While: "while_",
    Fill: "fill",
    LoadFragment: "load_fragment",
    StoreFragment: "store_fragment",
    Mma: "mma",
    SetElement: "set_element",
    Convert: "convert",
    RowReduce: "row_reduce",
    Const: "const",
    Var: "var",
    Param: "param",
    Builtin: "builtin",
    Load: "load",
    Unary: "unary",
    Binary: "binary",
    Call: "call",
    Select: "select",
    Cast: "cast",
    Bitcast: "bitcast",
    Vector: "vector",
    Component: "component",
    Element: "element",
}
