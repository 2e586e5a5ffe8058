"""KernelIR: a kernel as a typed, frozen tree. Each variable, array and fragment has its own name and declared type."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from functools import cached_property
from numbers import Integral, Real

from tilesmith.codegen.node import Node
from tilesmith.codegen.nodes import (
    SUBGROUP_BUILTINS,
    Builtin,
    Call,
    Convert,
    Element,
    Expr,
    RowReduce,
    SetElement,
    Stmt,
    Subgroup,
    SubgroupBarrier,
    expressions,
    walk,
)
from tilesmith.codegen.types import RANGES, KernelError, Type
from tilesmith.codegen.variables import declarations

FEATURES = ("f16", "bf16", "subgroups", "fragments", "elements", "conversions")
"""What a kernel may need of a device: `elements` of fragments whose layout is known, `conversions` of fragments to
another role and reductions of their rows."""


class Buffer(Node):
    """A tensor argument, flat, that the kernel may `read`, `write` or `readwrite`."""

    name: str
    type: Type
    access: str


class Scalar(Node):
    """A number argument: f32, u32 or i32."""

    name: str
    type: Type


class Array(Node):
    """`length` elements, `shared` by the workgroup or `local` to a thread; undefined until written."""

    name: str
    type: Type
    length: int
    space: str


class Fragment(Node):
    """A `tile` x `tile` matrix held by a subgroup: left (`a`) or right (`b`) operand, or accumulator (`c`).

    `placed`: whether the kernel counts on which elements each thread holds.
    """

    name: str
    role: str
    type: Type
    tile: int
    placed: bool = True


class Variable(Node):
    """A mutable value of one thread."""

    name: str
    type: Type


class KernelIR(Node):
    """A kernel: its arguments, declarations and statements.

    `subgroup_size`: the size that the kernel relies on, or None. `source`: the file that `line` of a statement means.
    """

    name: str
    workgroup: tuple[int, int, int]
    buffers: tuple[Buffer, ...]
    scalars: tuple[Scalar, ...]
    arrays: tuple[Array, ...]
    fragments: tuple[Fragment, ...]
    variables: tuple[Variable, ...]
    body: tuple[Stmt, ...]
    subgroup_size: int | None = None
    source: str = ""

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        x, y, z = self.workgroup
        return x * y * z

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, each array aligned to 16 bytes."""
        return sum(offset_bytes(a) for a in self.arrays if a.space == "shared")

    @cached_property
    def memory(self) -> dict[str, Buffer | Array]:
        """Buffers and arrays by name."""
        return {m.name: m for m in (*self.buffers, *self.arrays)}

    @cached_property
    def fragment_named(self) -> dict[str, Fragment]:
        """Fragments by name."""
        return {f.name: f for f in self.fragments}

    @cached_property
    def type_of(self) -> dict[str, Type]:
        """Variables' types by name."""
        return {v.name: v.type for v in self.variables}

    @cached_property
    def statements(self) -> tuple[Stmt, ...]:
        """Every statement, outer before inner, in order."""
        return tuple(walk(self.body))

    @cached_property
    def expressions(self) -> tuple[Expr, ...]:
        """Every expression of every statement."""
        return tuple(e for s in self.statements for e in expressions(s))

    @cached_property
    def declarations(self) -> dict[int, dict[int, list[str]]]:
        """Where a text declares each variable; see `variables.declarations`."""
        return declarations(self.body)

    @cached_property
    def features(self) -> frozenset[str]:
        """What a device must have, of `FEATURES`."""
        found = set()
        for declared in (*self.buffers, *self.arrays, *self.fragments, *self.variables):
            found |= {declared.type.dtype} & {"f16", "bf16"}
        if self.fragments:
            found |= {"fragments", "subgroups"}
        for s in self.statements:
            if isinstance(s, (Convert, RowReduce)):
                found.add("conversions")
            elif isinstance(s, SubgroupBarrier):
                found.add("subgroups")
            elif isinstance(s, SetElement) and self.fragment_named[s.fragment].placed:
                found.add("elements")
        found |= {e.type.dtype for e in self.expressions} & {"f16", "bf16"}
        for e in self.expressions:
            if isinstance(e, Element):
                found |= {"elements"} if self.fragment_named[e.fragment].placed else set()
            elif isinstance(e, Subgroup) or (isinstance(e, Builtin) and e.name in SUBGROUP_BUILTINS):
                found.add("subgroups")
        return frozenset(found)

    @cached_property
    def builtins(self) -> frozenset[str]:
        """The coordinates that the kernel reads."""
        return frozenset(e.name for e in self.expressions if isinstance(e, Builtin))

    @cached_property
    def functions(self) -> frozenset[str]:
        """The functions that the kernel calls."""
        return frozenset(e.function for e in self.expressions if isinstance(e, Call))

    def plain_scalars(self, values: Mapping[str, int | float]) -> dict[str, int | float]:
        """`values` as Python's numbers, in declared order. Infinities and NaN are allowed for f32.

        Raises KernelError if `values` does not have exactly the declared names, or a number does not fit its type;
        TypeError for something that is not a whole number, or, for f32, not a number.
        """
        self.want("scalars", self.scalar_types.keys(), values)
        plain: dict[str, int | float] = {}
        for name, (is_int, low, high) in self.scalar_types.items():
            value = number = values[name]
            if type(value) is not int and (is_int or type(value) is not float):  # both at once in most launches
                if isinstance(value, bool) or not isinstance(value, Integral if is_int else Real):
                    allowed = "a whole number" if is_int else "a number"
                    raise TypeError(f"{self.name}: {name} is a {self.scalar(name).type}, got {value!r}; pass {allowed}")
                number = int(value) if isinstance(value, Integral) else float(value)
            if (number < low or number > high) and abs(number) != math.inf:  # NaN is neither
                raise KernelError(f"{self.name}: {name} is a {self.scalar(name).type}, which does not hold {value}")
            plain[name] = number
        return plain

    @cached_property
    def scalar_types(self) -> dict[str, tuple[bool, int | float, int | float]]:
        """Of each scalar whether it is an integer, the least and the largest number that it holds."""
        return {s.name: (s.type.is_int, *RANGES[s.type.dtype]) for s in self.scalars}

    def scalar(self, name: str) -> Scalar:
        """The scalar of that name."""
        return next(s for s in self.scalars if s.name == name)

    def want(self, kind: str, wanted: Collection[str], given: Mapping) -> None:
        """Raise KernelError where `given`, the tensors or the scalars of a launch, have other names than `wanted`."""
        if type(given) is not dict and not isinstance(given, Mapping):
            raise TypeError(f"{self.name}: {kind} must be a mapping from names to {kind}, got {type(given).__name__}")
        if set(wanted) != set(given):
            got = ", ".join(map(str, given)) or "none"
            raise KernelError(f"{self.name} takes the {kind} {', '.join(wanted) or 'none'}; got {got}")

    def plain_grid(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """`grid` as Python's numbers. Raises KernelError unless it is three whole numbers of workgroups."""
        if (
            not isinstance(grid, (tuple, list))
            or len(grid) != 3
            or not all((type(n) is int or isinstance(n, Integral)) and 0 <= n < 2**31 for n in grid)
        ):
            raise KernelError(f"{self.name}: grid must be three whole numbers of at least 0, got {grid!r}")
        x, y, z = map(int, grid)
        return x, y, z

    def pack_scalars(self, values: Mapping[str, int | float]) -> bytes:
        """The uniform block of SPIR-V and WGSL: four bytes a scalar in declared order, padded to 16. b"" for none.

        Raises as `plain_scalars` does.
        """
        code = {"f32": "f", "u32": "I", "i32": "i"}
        plain = self.plain_scalars(values)
        block = struct.pack("<" + "".join(code[s.type.dtype] for s in self.scalars), *plain.values())
        return block + bytes(-len(block) % 16)


def a_kernel(ir: object, where: str) -> KernelIR:
    """`ir`. Raises TypeError, which names the function `where`, for what is no KernelIR."""
    if not isinstance(ir, KernelIR):
        raise TypeError(f"{where}: ir must be a KernelIR, got {type(ir).__name__}; make one of a kernel by `build`")
    return ir


def packed(memory: Buffer | Array, fragment: Fragment) -> int:
    """How many of a fragment's scalars one element of `memory` holds; 0 if it cannot hold them.

    Elements are scalars or vectors of the fragment's type; for 16-bit operands also u32 words and vectors of them, for
    accumulators, when they are stored, f16 and its vectors.
    """
    if fragment.role == "c" and memory.type.dtype == "f16":
        return memory.type.lanes
    words = memory.type.dtype == "u32" and fragment.role != "c"
    return memory.type.bytes // fragment.type.bytes if words or memory.type.scalar is fragment.type else 0


def offset_bytes(array: Array) -> int:
    """Bytes from the start of a shared array to the next one."""
    return -(-array.length * array.type.bytes // 16) * 16
