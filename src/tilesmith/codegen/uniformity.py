"""Which control flow the threads of a workgroup, or of a subgroup, share: what barriers and subgroup operations need.

The analysis forgets the order of assignments: a variable is as varying as the most varying of its assignments. That
accepts less than WebGPU's own analysis, which follows the order, and so nothing that WebGPU refuses.
"""

from __future__ import annotations

from tilesmith.codegen.ir import Array, KernelIR
from tilesmith.codegen.node import Node
from tilesmith.codegen.nodes import (
    Assign,
    Barrier,
    Builtin,
    Convert,
    Element,
    Expr,
    Fill,
    For,
    If,
    Load,
    LoadFragment,
    Mma,
    RowReduce,
    Stmt,
    StoreFragment,
    Subgroup,
    SubgroupBarrier,
    Var,
    While,
    operands,
)

WORKGROUP, SUBGROUP, THREAD = 0, 1, 2
_SCOPES = ("workgroup", "subgroup", "thread")
_BUILTINS = {"gid": WORKGROUP, "groups": WORKGROUP, "subgroup_size": WORKGROUP, "subgroup": SUBGROUP, "lane": THREAD}


class Flow(Node):
    """How far control flow is shared, and the line of the if or loop that decides it."""

    level: int = WORKGROUP
    line: int = 0

    def under(self, level: int, line: int) -> Flow:
        """The flow inside a condition of `level` at `line`."""
        return Flow(level, line) if level > self.level else self


class Uniformity:
    """The levels of a kernel's variables, and what its barriers and subgroup operations violate."""

    def __init__(self, ir: KernelIR):
        self.ir = ir
        self.levels = {v.name: WORKGROUP for v in ir.variables}
        self.problems: list[tuple[int, str]] = []
        self.changed = True
        while self.changed:
            self.changed = False
            self.problems.clear()
            self.block(ir.body, Flow())

    def level(self, e: Expr) -> int:
        """How far the value of `e` is shared: the same in the workgroup, in the subgroup, or each thread's own."""
        if isinstance(e, Var):
            return self.levels[e.name]
        if isinstance(e, Builtin):
            if e.name == "tid":
                return WORKGROUP if self.ir.workgroup[e.axis] == 1 else THREAD
            return _BUILTINS[e.name]
        if isinstance(e, Element):
            return THREAD
        inside = max(map(self.level, operands(e)), default=WORKGROUP)
        if isinstance(e, Load):
            memory = self.ir.memory[e.array]
            shared = not isinstance(memory, Array) and memory.access == "read"
            return inside if shared else THREAD
        if isinstance(e, Subgroup):
            if e.op == "shuffle_xor":
                return THREAD
            return SUBGROUP if e.operand is None else max(SUBGROUP, self.level(e.operand))
        return inside

    def raise_to(self, name: str, level: int) -> None:
        """A variable is at least as varying as `level`."""
        if level > self.levels[name]:
            self.levels[name] = level
            self.changed = True

    def block(self, body: tuple[Stmt, ...], flow: Flow) -> None:
        """Follow the statements of one block."""
        for s in body:
            self.statement(s, flow)

    def statement(self, s: Stmt, flow: Flow) -> None:
        """Follow one statement."""
        if isinstance(s, Assign):
            self.raise_to(s.name, max(self.level(s.value), flow.level))
            if isinstance(s.value, Subgroup):
                self.want(SUBGROUP, flow, s, "a subgroup operation")
        elif isinstance(s, Barrier):
            self.want(WORKGROUP, flow, s, "barrier()")
        elif isinstance(s, SubgroupBarrier):
            self.want(SUBGROUP, flow, s, "subgroup_barrier()")
        elif isinstance(s, (Fill, LoadFragment, StoreFragment, Mma, Convert, RowReduce)):
            self.want(SUBGROUP, flow, s, "a fragment operation")
            for e in operands(s):
                if self.level(e) > SUBGROUP:
                    what = "value" if isinstance(s, Fill) else "offset"
                    self.problems.append((s.line, f"the {what} of a fragment operation differs between threads"))
        elif isinstance(s, If):
            inner = flow.under(self.level(s.condition), s.line)
            self.block(s.then, inner)
            self.block(s.orelse, inner)
        elif isinstance(s, For):
            inner = flow.under(max(self.level(e) for e in (s.start, s.stop, s.step)), s.line)
            self.raise_to(s.name, inner.level)
            self.block(s.body, inner)
        elif isinstance(s, While):
            inner = flow.under(self.level(s.condition), s.line)
            self.block(s.before, inner)
            self.block(s.body, inner)

    def want(self, level: int, flow: Flow, s: Stmt, what: str) -> None:
        """Note a statement that needs flow shared up to `level`."""
        if flow.level > level:
            self.problems.append(
                (
                    s.line,
                    f"{what} under the condition of line {flow.line}, which differs between the "
                    f"{_SCOPES[flow.level]}s of a {_SCOPES[level]}; conditions of literals, scalars, gid"
                    f"{' and subgroup()' if level else ''} and what is computed from these are allowed",
                )
            )
