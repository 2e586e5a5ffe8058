"""Is a KernelIR well formed? Types, names, constant bounds, uniform barriers, shared memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from tilesmith.codegen import typed
from tilesmith.codegen.ir import Array, Buffer, KernelIR, a_kernel, packed
from tilesmith.codegen.layout import ELEMENTS
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
    blocks,
    expressions,
    operands,
    walk,
)
from tilesmith.codegen.typed import Misuse
from tilesmith.codegen.types import LONGEST, SUBGROUPS, KernelError, Type, bool_, f32, i32, u32
from tilesmith.codegen.uniformity import Uniformity
from tilesmith.codegen.variables import unassigned

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")
MAX_THREADS = 1024


def verify(ir: KernelIR, limits: Limits | None = None) -> None:
    """Raise KernelError at the first thing that is wrong, with its line; with `limits`, also if it exceeds a device.
    TypeError for what is no KernelIR."""
    _Verifier(a_kernel(ir, "verify")).run()
    fits(ir, limits)


def fits(ir: KernelIR, limits: Limits | None) -> None:
    """Raise KernelError if the workgroup or its shared memory is beyond `limits`, naming the arrays. TypeError for what
    is no Limits."""
    if limits is None:
        return
    if not hasattr(limits, "refuses"):
        raise TypeError(f"limits must be Limits, got {limits!r}; get them from tilesmith.hardware.limits_of")
    reasons = limits.refuses(ir.shared_bytes, ir.workgroup)
    if reasons:
        arrays = ", ".join(f"{a.name} {a.length * a.type.bytes:,}" for a in ir.arrays if a.space == "shared")
        raise KernelError(f"{ir.source}: {ir.name}: {'; '.join(reasons)} (bytes by array: {arrays or 'none'})")


class _Verifier:
    def __init__(self, ir: KernelIR):
        self.ir = ir
        self.line = 0
        self.params = {s.name: s.type for s in ir.scalars}
        self.least: dict[str, int] = {}

    def wrong(self, message: str) -> NoReturn:
        raise KernelError(f"{self.ir.source}:{self.line}: {self.ir.name}: {message}")

    def run(self) -> None:
        self.declarations()
        for s in self.ir.statements:
            self.line = s.line
            try:
                self.statement(s)
            except Misuse as misuse:
                self.wrong(str(misuse))
        early = unassigned(self.ir.body)
        if early is not None:
            self.line, name = early
            self.wrong(f"{name} may be read before it is assigned")
        for line, problem in Uniformity(self.ir).problems:
            self.line = line
            self.wrong(problem)

    def declarations(self) -> None:
        ir = self.ir
        declared = (*ir.buffers, *ir.scalars, *ir.arrays, *ir.fragments, *ir.variables)
        names = Counter([ir.name, *(d.name for d in declared)])
        for name in names:
            if not _NAME.fullmatch(name):
                self.wrong(f"{name!r} is not a name; allowed: ASCII letters, digits and inner underscores")
        for d in declared:
            if names[d.name] > 1:
                self.wrong(f"{d.name} is declared twice")
        if len(ir.workgroup) != 3 or not all(isinstance(n, int) and n > 0 for n in ir.workgroup):
            self.wrong(f"a workgroup is three positive ints, got {ir.workgroup}")
        if ir.threads > MAX_THREADS:
            self.wrong(f"a workgroup of {ir.threads} threads; no device runs more than {MAX_THREADS}")
        if ir.subgroup_size not in (None, *SUBGROUPS):
            self.wrong(f"subgroups of {ir.subgroup_size!r}; allowed: None, {', '.join(map(str, SUBGROUPS))} threads")
        for s in ir.scalars:
            if s.type not in (f32, u32, i32):
                self.wrong(f"scalar {s.name} is {s.type}; allowed: f32, u32, i32")
        for b in ir.buffers:
            if b.access not in ("read", "write", "readwrite") or b.type is bool_:
                self.wrong(f"buffer {b.name}: {b.access} {b.type}; allowed: read, write, readwrite of numbers")
        for a in ir.arrays:
            if a.space not in ("shared", "local") or not 1 <= a.length <= LONGEST:
                self.wrong(f"array {a.name}: {a.space} of {a.length}; allowed: shared or local, 1 to {LONGEST:,}")
        for f in ir.fragments:
            if f.role not in ("a", "b", "c") or f.tile not in ELEMENTS or (f.role == "c") != (f.type is f32):
                self.wrong(f"fragment {f.name}: {f.role} {f.type} {f.tile}; allowed: a, b of f16 or bf16, c of f32")
        if ir.fragments and (ir.subgroup_size != 32 or ir.threads % 32):
            self.wrong(f"fragments need subgroups of 32; got {ir.subgroup_size} and {ir.threads} threads")

    def statement(self, s: Stmt) -> None:
        handle = _STATEMENTS.get(type(s))
        if handle is None:
            self.wrong(f"{type(s).__name__} is not a statement")
        for e in operands(s):
            nested = isinstance(s, Assign) and isinstance(e, Subgroup)
            self.expression(e, alone=nested)
        handle(self, s)
        for block in blocks(s):
            if not isinstance(block, tuple):
                self.wrong("a block is a tuple of statements")

    def want(self, e: Expr, type_: Type, what: str) -> None:
        if e.type is not type_:
            self.wrong(f"{what} is {e.type}, wanted {type_}")

    def assign(self, s: Assign) -> None:
        if s.name not in self.ir.type_of:
            self.wrong(f"{s.name} is not declared")
        self.want(s.value, self.ir.type_of[s.name], f"the value for {s.name}")

    def store(self, s: Store) -> None:
        memory = self.element_of(s.array, s.index)
        if isinstance(memory, Buffer) and memory.access == "read":
            self.wrong(f"{s.array} is In, so it is not written")
        self.want(s.value, memory.type, f"the value for {s.array}")

    def if_(self, s: If) -> None:
        self.want(s.condition, bool_, "the condition")

    def for_(self, s: For) -> None:
        counter = self.ir.type_of.get(s.name)
        if counter not in (u32, i32):
            self.wrong(f"the loop's variable {s.name} is {counter}; allowed: u32, i32")
        for e, what in ((s.start, "start"), (s.stop, "stop"), (s.step, "step")):
            self.want(e, counter, what)
        if isinstance(s.step, Const) and s.step.value <= 0:
            self.wrong(f"a step of {s.step.value}; allowed: positive steps")
        changed = {x.name for x in walk(s.body) if isinstance(x, (Assign, For))}
        for bound in (s.stop, s.step):
            for e in (bound, *expressions(bound)):
                if isinstance(e, Load) or (isinstance(e, Var) and e.name in changed | {s.name}):
                    self.wrong("the loop's bound changes inside the loop; keep it in a variable")
        if s.name in changed:
            self.wrong(f"the loop's variable {s.name} is assigned inside the loop")
        self.least[s.name] = self.lower_bound(s.start)

    def load_fragment(self, s: LoadFragment | StoreFragment) -> None:
        fragment = self.fragment(s.fragment, "c" if isinstance(s, StoreFragment) else "abc")
        memory = self.ir.memory.get(s.array)
        if memory is None or getattr(memory, "space", "") == "local" or not packed(memory, fragment):
            self.wrong(f"{s.array} cannot hold {s.fragment}: wanted a shared array or a buffer of {fragment.type}")
        refused = "read" if isinstance(s, StoreFragment) else "write"
        if isinstance(memory, Buffer) and memory.access == refused:
            self.wrong(f"{s.array} is {'In' if refused == 'read' else 'Out'}")
        self.want(s.offset, u32, "the offset")
        unit = 4 if fragment.type is f32 else 8
        loads_c = isinstance(s, LoadFragment) and fragment.role == "c"
        if loads_c and memory.type.scalar is not f32:
            self.wrong(f"{s.array} is {memory.type}; {s.fragment} is loaded from f32")
        if (s.stride < fragment.tile and not (loads_c and s.stride == 0)) or s.stride % unit:
            self.wrong(f"stride {s.stride}; allowed: multiples of {unit} from {fragment.tile}")

    def fill(self, s: Fill) -> None:
        self.want(s.value, self.fragment(s.fragment, "abc").type, f"the value for {s.fragment}")

    def mma(self, s: Mma) -> None:
        c, a, b = self.fragment(s.c, "c"), self.fragment(s.a, "a"), self.fragment(s.b, "b")
        if a.type is not b.type or len({a.tile, b.tile, c.tile}) > 1:
            self.wrong(f"mma of {a}, {b}, {c}: types and tiles must agree")

    def convert(self, s: Convert) -> None:
        if self.fragment(s.a, "a").tile != self.fragment(s.c, "c").tile:
            self.wrong(f"{s.a} and {s.c} have different tiles")

    def row_reduce(self, s: RowReduce) -> None:
        if self.fragment(s.target, "c").tile != self.fragment(s.source, "c").tile:
            self.wrong(f"{s.target} and {s.source} have different tiles")
        if s.op not in ("add", "max"):
            self.wrong(f"{s.op} of a fragment's rows")

    def set_element(self, s: SetElement) -> None:
        self.element(s)
        self.want(s.value, f32, f"the value for {s.fragment}")

    def fragment(self, name: str, roles: str):
        fragment = self.ir.fragment_named.get(name)
        if fragment is None or fragment.role not in roles:
            self.wrong(f"{name} is not a fragment of role {' or '.join(roles)}")
        return fragment

    def element(self, e: Element | SetElement) -> None:
        fragment = self.fragment(e.fragment, "c")
        if not 0 <= e.index < ELEMENTS[fragment.tile]:
            self.wrong(f"element {e.index} of {e.fragment}; it has {ELEMENTS[fragment.tile]} a thread")

    def element_of(self, name: str, index: Expr) -> Buffer | Array:
        memory = self.ir.memory.get(name)
        if memory is None:
            self.wrong(f"{name} is not an array or buffer")
        self.want(index, u32, f"the index of {name}")
        if isinstance(memory, Array) and self.lower_bound(index) >= memory.length:
            at = "at least " * (not isinstance(index, Const)) + str(self.lower_bound(index))
            self.wrong(f"{name} has {memory.length} elements; the index is {at}")
        return memory

    def lower_bound(self, e: Expr) -> int:
        """A value that `e` is surely not below."""
        if isinstance(e, Const) and isinstance(e.value, int) and 0 <= e.value < 2**31:
            return e.value
        if isinstance(e, Var):
            return self.least.get(e.name, 0)
        if isinstance(e, Binary) and e.op in ("+", "*"):
            if any(isinstance(x, Const) and x.value >= 2**31 for x in (e.left, e.right)):
                return 0
            a, b = self.lower_bound(e.left), self.lower_bound(e.right)
            return a + b if e.op == "+" else a * b
        return 0

    def expression(self, e: Expr, alone: bool = False) -> None:
        for x in operands(e):
            self.expression(x)
        if isinstance(e, Subgroup):
            if not alone:
                self.wrong("a subgroup operation stands alone on the right of an assignment")
            shuffles = e.op in ("shuffle", "shuffle_xor")
            if e.op not in ("add", "max", "min", "shuffle", "shuffle_xor") or shuffles != (e.operand is not None):
                self.wrong(f"{e.op} is not a subgroup operation, or has the wrong operands")
            if e.type not in (f32, u32, i32) or e.x.type is not e.type or (shuffles and e.operand.type is not u32):
                self.wrong(f"{e.op} of {e.x.type} gives {e.type}")
            return
        handle = _EXPRESSIONS.get(type(e))
        if handle is None:
            self.wrong(f"{type(e).__name__} is not an expression")
        rebuilt = handle(self, e)
        if rebuilt is not e.type:
            self.wrong(f"{type(e).__name__} has type {e.type}, its operands give {rebuilt}")

    def var(self, e: Var) -> Type | None:
        return self.ir.type_of.get(e.name)

    def builtin(self, e: Builtin) -> Type | None:
        names = ("tid", "gid", "groups", "lane", "subgroup", "subgroup_size")
        return u32 if e.name in names and e.axis in (0, 1, 2) else None

    def load(self, e: Load) -> Type:
        return typed.load(self.element_of(e.array, e.index), e.index).type

    def binary(self, e: Binary) -> Type:
        shift = e.op in ("<<", ">>")
        counted = shift and e.right.type.dtype == "u32" and e.left.type.lanes == e.right.type.lanes
        if e.left.type is not e.right.type and not counted:
            self.wrong(f"{e.left.type} {e.op} {e.right.type}")
        if e.left.type is bool_ and e.op in ("&", "|"):
            self.wrong(f"{e.op} of bool; allowed: and, or")
        if e.op in ("//", "%") and e.left.type.dtype != "u32":
            self.wrong(f"{e.op} of {e.left.type}; allowed: u32")
        return typed.binary(e.op, e.left, e.right).type

    def select(self, e: Select) -> Type:
        if e.yes.type is not e.no.type:
            self.wrong(f"a select of {e.yes.type} and {e.no.type}")
        return typed.select(e.condition, e.yes, e.no).type

    def call(self, e: Call) -> Type:
        if len({a.type for a in e.args}) != 1 or e.function not in typed.ARITY:
            self.wrong(f"{e.function} of {', '.join(str(a.type) for a in e.args)}")
        if len(e.args) != typed.ARITY[e.function]:
            self.wrong(f"{e.function} takes {typed.ARITY[e.function]} values, got {len(e.args)}")
        if e.function == "abs" and e.type.dtype == "u32":
            self.wrong(f"abs of {e.type}")
        return typed.call(e.function, *e.args).type

    def cast(self, e: Cast) -> Type:
        if e.x.type is e.type:
            self.wrong(f"a cast of {e.type} to itself")
        if e.x.type.lanes != e.type.lanes:
            self.wrong(f"a cast of {e.x.type} to {e.type}")
        return typed.cast(e.type, e.x).type

    def bitcast(self, e: Bitcast) -> Type:
        if e.x.type is e.type:
            self.wrong(f"a bitcast of {e.type} to itself")
        return typed.bitcast(e.type, e.x).type

    def component(self, e: Component) -> Type:
        if e.x.type.lanes == 1:
            self.wrong(f"lane {e.index} of {e.x.type}, which is no vector")
        return typed.component(e.x, e.index).type

    def vector(self, e: Vector) -> Type | None:
        if len(e.parts) == 1:
            return e.type if e.parts[0].type is e.type.scalar and e.type.lanes > 1 else None
        return typed.collect(e.type, list(e.parts)).type

    def element_type(self, e: Element) -> Type:
        self.element(e)
        return f32


_STATEMENTS = {
    Assign: _Verifier.assign,
    Store: _Verifier.store,
    Barrier: lambda self, s: None,
    SubgroupBarrier: lambda self, s: None,
    If: _Verifier.if_,
    For: _Verifier.for_,
    While: _Verifier.if_,
    Fill: _Verifier.fill,
    LoadFragment: _Verifier.load_fragment,
    StoreFragment: _Verifier.load_fragment,
    Mma: _Verifier.mma,
    SetElement: _Verifier.set_element,
    Convert: _Verifier.convert,
    RowReduce: _Verifier.row_reduce,
}
_EXPRESSIONS = {
    Const: lambda self, e: typed.constant(e.value, e.type).type,
    Var: _Verifier.var,
    Param: lambda self, e: self.params.get(e.name),
    Builtin: _Verifier.builtin,
    Load: _Verifier.load,
    Unary: lambda self, e: typed.unary(e.op, e.x).type,
    Binary: _Verifier.binary,
    Call: _Verifier.call,
    Select: _Verifier.select,
    Cast: _Verifier.cast,
    Bitcast: _Verifier.bitcast,
    Vector: _Verifier.vector,
    Component: _Verifier.component,
    Element: _Verifier.element_type,
}
