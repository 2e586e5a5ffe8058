"""What is written of a kernel so far: the statements of the block at hand, its variables, arrays and fragments."""

from __future__ import annotations

from tilesmith.codegen.ir import Array, Fragment, Variable
from tilesmith.codegen.node import Node
from tilesmith.codegen.nodes import Assign, Expr, Stmt, Var
from tilesmith.codegen.typed import Misuse
from tilesmith.codegen.types import Type


class Slot(Node):
    """A name bound to a variable; `loop` is true for a loop's own."""

    name: str
    type: Type
    loop: bool = False


class Writer:
    """Writes statements to the current block and declares what they name.

    line: of the kernel's text, for what is written next. target: the name that the value at hand will be assigned to.
    subgroup_size: the one that the kernel is built for; None: any.
    """

    def __init__(self) -> None:
        self.block: list[Stmt] = []
        self.assigned: set[str] = set()
        self.used: set[str] = set()
        self.suffixes: dict[str, int] = {}  # the last one taken of a name
        self.arrays: list[Array] = []
        self.fragments: list[Fragment] = []
        self.variables: list[Variable] = []
        self.subgroup_size: int | None = None
        self.line = 0
        self.target = "x"

    def emit(self, statement: Stmt) -> None:
        """Add a statement to the current block."""
        self.block.append(statement)

    def unique(self, wanted: str) -> str:
        """A name that nothing in the kernel has yet."""
        if not wanted.isascii():
            raise Misuse(f"{wanted} is not a name; allowed: ASCII letters, digits and underscores")
        base = wanted.strip("_") or "unused"
        name, count = base, self.suffixes.get(base, 0)  # a kernel without loops holds thousands of one name
        while name in self.used:
            count += 1
            name = f"{base}_{count}"
        self.suffixes[base] = count
        self.used.add(name)
        return name

    def variable(self, wanted: str, type_: Type, loop: bool = False) -> Slot:
        """Declare a new variable."""
        slot = Slot(self.unique(wanted), type_, loop)
        self.variables.append(Variable(slot.name, type_))
        return slot

    def temporary(self, wanted: str, value: Expr) -> Var:
        """A new variable that holds `value`."""
        slot = self.variable(wanted, value.type)
        self.emit(Assign(self.line, slot.name, value))
        self.assigned.add(slot.name)
        return Var(value.type, slot.name)
