"""The nodes of a kernel's tree: expressions, which have a type and no side effects, and statements."""

from __future__ import annotations

from tilesmith.codegen.node import Node
from tilesmith.codegen.types import Type


class Expr(Node):
    """A value without side effects. `type` is the type of the result."""

    type: Type
    _operand_names = ()


class Const(Expr):
    """A literal: int, float or bool, finite and within the type's range; in a vector type every lane is `value`."""

    value: int | float | bool


class Var(Expr):
    """The value of a variable."""

    name: str


class Param(Expr):
    """The value of a scalar argument."""

    name: str


class Builtin(Expr):
    """A coordinate, u32: `tid`, `gid` or `groups` along `axis`; `lane`, `subgroup` or `subgroup_size` (axis 0)."""

    name: str
    axis: int = 0


class Load(Expr):
    """Element `index` (u32) of a buffer, a shared or a local array."""

    array: str
    index: Expr


class Unary(Expr):
    """`-` of a float or i32, `not` of a bool, `~` of an integer."""

    op: str
    x: Expr


class Binary(Expr):
    """`+ - * /` and so on over two operands of one type (a shift's right operand is u32). Comparisons give bool.

    `//` and `%` are u32 only. `and` and `or` evaluate both sides.
    """

    op: str
    left: Expr
    right: Expr


class Call(Expr):
    """A function of `FUNCTIONS`."""

    function: str
    args: tuple[Expr, ...]


class Select(Expr):
    """`yes` where `condition` holds, else `no`. Both are evaluated."""

    condition: Expr
    yes: Expr
    no: Expr


class Cast(Expr):
    """The nearest value of `type`; floats to integers round towards zero; i32 and u32 exchange bits."""

    x: Expr


class Bitcast(Expr):
    """The bits of a 32-bit value, read as another 32-bit type; of two halves the first is the lower."""

    x: Expr


class Vector(Expr):
    """A vector of one scalar a lane, or of one scalar repeated."""

    parts: tuple[Expr, ...]


class Component(Expr):
    """Lane `index` of a vector."""

    x: Expr
    index: int


class Subgroup(Expr):
    """An operation of all threads of a subgroup: `add`, `max`, `min`, `shuffle` or `shuffle_xor` (by u32 `operand`).

    Stands alone on the right of an Assign, so that every printer evaluates it exactly once, where it is written.
    """

    op: str
    x: Expr
    operand: Expr | None = None


class Element(Expr):
    """Element `index` of those that this thread holds of an accumulator fragment."""

    fragment: str
    index: int


class Stmt(Node):
    """One step. `line` is the line of the author's file, 0 where there is none."""

    __slots__ = ("_inside", "_reads")  # kept by `expressions` and `reads`, which the verifier and each printer ask

    line: int
    _operand_names = ()


class Assign(Stmt):
    """Set a variable."""

    name: str
    value: Expr


class Store(Stmt):
    """Set element `index` of a buffer, a shared or a local array."""

    array: str
    index: Expr
    value: Expr


class Barrier(Stmt):
    """Every thread of the workgroup arrives before any goes on, and sees what the others wrote to shared arrays."""


class SubgroupBarrier(Stmt):
    """The same among the threads of a subgroup."""


class If(Stmt):
    """Run `then` where `condition` holds, else `orelse`."""

    condition: Expr
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...]


class For(Stmt):
    """`name` runs from `start` by `step` (positive) while it is less than `stop`. No statement of `body` assigns to
    what `stop` and `step` read, nor to `name`."""

    name: str
    start: Expr
    stop: Expr
    step: Expr
    body: tuple[Stmt, ...]


class While(Stmt):
    """Run `before`; leave unless `condition` holds; run `body`; again."""

    before: tuple[Stmt, ...]
    condition: Expr
    body: tuple[Stmt, ...]


class Fill(Stmt):
    """Set every element of a fragment."""

    fragment: str
    value: Expr


class LoadFragment(Stmt):
    """Element (r, c) comes from `array[offset + r * stride + c]`, or `[offset + c * stride + r]` when `transposed`.

    Offset and stride count the fragment's scalars, whatever the array's elements are.
    """

    fragment: str
    array: str
    offset: Expr
    stride: int
    transposed: bool


class StoreFragment(Stmt):
    """Element (r, c) goes to `array[offset + r * stride + c]`."""

    fragment: str
    array: str
    offset: Expr
    stride: int


class Mma(Stmt):
    """`c += a @ b`, the products exact, the sum in the accumulator's type."""

    c: str
    a: str
    b: str


class SetElement(Stmt):
    """Set element `index` of those that this thread holds of an accumulator fragment."""

    fragment: str
    index: int
    value: Expr


class Convert(Stmt):
    """An operand fragment takes an accumulator's values, rounded to its type, without leaving the registers."""

    a: str
    c: str


class RowReduce(Stmt):
    """Every element of an accumulator takes the `add` or `max` of its row of another."""

    target: str
    source: str
    op: str


FUNCTIONS: dict[str, str] = {
    **dict.fromkeys(("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos", "floor", "ceil"), "f32"),
    **dict.fromkeys(("abs", "min", "max"), "number"),
    "fma": "float",
    "dot": "vectors",
    "mulhi": "u32",
    "pack_f16": "pack",
    "unpack_f16": "unpack",
}
"""What each function of Call takes; `typed.call` says it in full."""

SUBGROUP_BUILTINS = ("lane", "subgroup", "subgroup_size")


def blocks(statement: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """The statement lists inside a statement."""
    if isinstance(statement, If):
        return statement.then, statement.orelse
    if isinstance(statement, For):
        return (statement.body,)
    if isinstance(statement, While):
        return statement.before, statement.body
    return ()


def walk(body: tuple[Stmt, ...]) -> list[Stmt]:
    """Every statement of `body`, outer before inner, in order."""
    found: list[Stmt] = []
    for s in body:
        found.append(s)
        for block in blocks(s):
            found += walk(block)
    return found


def operands(node: Expr | Stmt) -> list[Expr]:
    """The expressions directly inside an expression or a statement."""
    found: list[Expr] = []
    for name in node._operand_names:
        value = node.__dict__[name]
        if type(value) is tuple:
            found += value
        elif value is not None:
            found.append(value)
    return found


def expressions(node: Expr | Stmt) -> tuple[Expr, ...]:
    """Every expression inside `node`, outer before inner, not those of nested statements nor `node` itself."""
    if isinstance(node, Stmt):
        try:
            return node._inside
        except AttributeError:
            object.__setattr__(node, "_inside", tuple(_gather(node, [])))
            return node._inside
    return tuple(_gather(node, []))


def reads(statement: Stmt) -> tuple[str, ...]:
    """The variables that a statement's own expressions read, each as often as it is read."""
    try:
        return statement._reads
    except AttributeError:
        found = tuple(e.name for e in expressions(statement) if type(e) is Var)
        object.__setattr__(statement, "_reads", found)
        return found


def _gather(node: Expr | Stmt, found: list[Expr]) -> list[Expr]:
    for e in operands(node):
        found.append(e)
        if e._operand_names:
            _gather(e, found)
    return found


_OPERAND_KINDS = ("Expr", "tuple[Expr, ...]", "Expr | None")
for _cls in (Expr, *Expr.__subclasses__(), Stmt, *Stmt.__subclasses__()):
    _cls._operand_names = tuple(n for n, f in _cls.__dataclass_fields__.items() if f.type in _OPERAND_KINDS)
