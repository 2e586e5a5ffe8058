"""Executes a KernelIR over whole workgroups in lockstep: every statement for all threads at once, under a mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from tilesmith.codegen.interpreter import arithmetic
from tilesmith.codegen.interpreter.arithmetic import VALUES
from tilesmith.codegen.interpreter.faults import DivergentFlow, Fault, Undefined
from tilesmith.codegen.interpreter.fragments import Matrices
from tilesmith.codegen.interpreter.memory import Memory, Record, apart, flat, fresh, together
from tilesmith.codegen.ir import KernelIR, a_kernel
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
)
from tilesmith.codegen.types import SUBGROUPS, KernelError

_LANES_AT_ONCE = 8192
_ELEMENTS_AT_ONCE = 1 << 21
_MAX_STEPS = 1 << 24


def interpret(
    ir: KernelIR,
    grid: tuple[int, int, int],
    tensors: Mapping[str, np.ndarray],
    scalars: Mapping[str, int | float] | None = None,
    *,
    subgroup_size: int = 32,
    races: bool = True,
) -> None:
    """Run `ir` over a grid of workgroups; writes to `tensors` in place.

    tensors: a contiguous array by buffer name, of any shape: float32, float16, uint32, int32; uint16 for bf16's bits.
    subgroup_size: that of the device to imitate, where the kernel does not fix it.
    races: also report races, at about half the speed without.

    Raises Fault at the first access or operation that GPUs leave undefined, KernelError or TypeError for arguments that
    do not fit; as launches do, also for a tensor that is written and shares memory with another.
    """
    grid = a_kernel(ir, "interpret").plain_grid(grid)
    ir.want("tensors", [b.name for b in ir.buffers], tensors)
    scalars = ir.plain_scalars({} if scalars is None else scalars)
    if subgroup_size not in SUBGROUPS:
        raise KernelError(f"subgroup_size must be one of {', '.join(map(str, SUBGROUPS))}, got {subgroup_size!r}")
    width = ir.subgroup_size or subgroup_size
    if ir.threads > width and ir.threads % width:
        raise KernelError(f"{ir.threads} threads are not whole subgroups of {width}")
    buffers = {b.name: flat(b, tensors[b.name]) for b in ir.buffers}
    apart(ir, buffers)
    records = {
        b.name: Record(b.name, (len(buffers[b.name]),), "in the same launch", width)
        for b in ir.buffers
        if races and b.access != "read"
    }
    everywhere = list(itertools.product(*(range(n) for n in reversed(grid))))
    shared = sum(a.length * a.type.lanes for a in ir.arrays if a.space == "shared")
    at_once = max(1, min(_LANES_AT_ONCE // ir.threads, _ELEMENTS_AT_ONCE // max(1, shared)))
    for first in range(0, len(everywhere), at_once):
        groups = np.array(everywhere[first : first + at_once], np.uint32)[:, ::-1]
        batch = _Batch(ir, groups, first, grid, buffers, scalars, records, width, races)
        with np.errstate(all="ignore"):
            batch.block(ir.body, _Mask(None, batch.threads))


class _Mask:
    """The active threads: `where` is a bool array, or None for all; `threads` their numbers."""

    def __init__(self, where: np.ndarray | None, threads: np.ndarray):
        self.where = where
        self.threads = threads

    def active(self, condition: np.ndarray) -> np.ndarray:
        """`condition` among active threads. Vectors count by lane."""
        if self.where is None:
            return condition
        return condition & (self.where if condition.ndim == 1 else self.where[:, None])


class _Batch(Matrices):
    """Several workgroups at once: their threads, variables, arrays and fragments."""

    def __init__(self, ir, groups, first, grid, buffers, scalars, records, width, races):
        self.ir = ir
        self.groups = len(groups)
        self.count = self.groups * ir.threads
        self.threads = np.arange(self.count)
        self.group_of = self.threads // ir.threads
        self.local = self.threads % ir.threads
        self.width = min(width, ir.threads)
        self.first_thread = first * ir.threads
        self.line = 0
        self.params = {s.name: np.array([scalars[s.name]], VALUES[s.type.dtype]) for s in ir.scalars}
        x, y, _ = ir.workgroup
        places = (self.local % x, self.local // x % y, self.local // (x * y))
        self.builtins = {("tid", i): p.astype(np.uint32) for i, p in enumerate(places)}
        for i in range(3):
            self.builtins["gid", i] = groups[self.group_of, i] if self.groups > 1 else groups[:, i]
            self.builtins["groups", i] = np.array([grid[i]], np.uint32)
        self.builtins["lane", 0] = (self.local % width).astype(np.uint32)
        self.builtins["subgroup", 0] = (self.local // width).astype(np.uint32)
        self.builtins["subgroup_size", 0] = np.array([width], np.uint32)
        self.variables: dict[str, np.ndarray] = {}
        self.memory: dict[str, Memory] = {}
        for b in ir.buffers:
            self.memory[b.name] = Memory(b, buffers[b.name], None, records.get(b.name))
        for a in ir.arrays:
            shared = a.space == "shared"
            data = fresh(a, self.groups if shared else self.count)
            checked = shared and races
            record = Record(a.name, data.shape[:2], "since the last barrier", width) if checked else None
            self.memory[a.name] = Memory(a, data, self.group_of if shared else self.threads, record)
        self.shared = [m for a, m in ((a, self.memory[a.name]) for a in ir.arrays) if a.space == "shared"]
        self.fragments = {f.name: np.zeros((self.count // 32, f.tile, f.tile), np.float32) for f in ir.fragments}

    def block(self, body: tuple[Stmt, ...], mask: _Mask) -> None:
        for s in body:
            self.line = s.line
            try:
                _STATEMENTS[type(s)](self, s, mask)
            except Fault as fault:
                if not fault.args[0].startswith(self.ir.source + ":"):
                    place = f"{self.ir.source}:{self.line}: {self.ir.name}: "
                    raise type(fault)(place + fault.args[0]) from None
                raise

    def whole(self, x: np.ndarray) -> np.ndarray:
        """`x` with one entry a thread."""
        return np.broadcast_to(x, (self.count, *x.shape[1:])) if len(x) != self.count else x

    def where(self, condition: np.ndarray, mask: _Mask) -> _Mask:
        """The active threads for which `condition` holds."""
        if len(condition) == 1:
            return mask if condition[0] else _Mask(np.zeros(self.count, bool), self.threads[:0])
        return self.mask(condition if mask.where is None else condition & mask.where)

    def mask(self, where: np.ndarray) -> _Mask:
        if where.all():
            return _Mask(None, self.threads)
        return _Mask(where, np.flatnonzero(where))

    def who(self, memory: Memory, mask: _Mask) -> np.ndarray:
        """How a record names the active threads: within the workgroup for an array, within the grid for a buffer."""
        return self.local[mask.threads] if memory.lead is not None else self.first_thread + mask.threads

    def subgroup_ids(self, memory: Memory, groups: np.ndarray) -> np.ndarray:
        """How a record names subgroups of 32, each of which touches a matrix as one."""
        each = self.local.size // self.groups // 32
        number = groups % each if memory.lead is not None else self.first_thread // 32 + groups
        return together(number)[:, None, None]

    def set(self, name: str, value: np.ndarray, mask: _Mask) -> None:
        if mask.where is None:
            self.variables[name] = value
            return
        old = self.variables.get(name)
        if old is None:
            old = np.zeros((1, *value.shape[1:]), value.dtype)
        chosen = mask.where if value.ndim == 1 else mask.where[:, None]
        self.variables[name] = np.where(chosen, value, old)

    def assign(self, s: Assign, mask: _Mask) -> None:
        self.set(s.name, self.value(s.value, mask), mask)

    def store(self, s: Store, mask: _Mask) -> None:
        memory = self.memory[s.array]
        value = self.whole(self.value(s.value, mask))[mask.threads]
        at = memory.at(mask.threads, self.whole(self.value(s.index, mask))[mask.threads])
        memory.store(at, value, self.who(memory, mask))

    def barrier(self, s: Barrier, mask: _Mask) -> None:
        arrived = slice(None)
        if mask.where is not None:
            inside = mask.where.reshape(self.groups, -1)
            if (inside.any(1) != inside.all(1)).any():
                raise DivergentFlow("barrier() that only some threads of the workgroup reach")
            arrived = inside.all(1)
        for memory in self.shared:
            if memory.record is not None:
                memory.record.clear(arrived)

    def subgroup_barrier(self, s: SubgroupBarrier, mask: _Mask) -> None:
        arrived = np.zeros(self.count // self.width, bool)
        arrived[self.subgroups(mask, self.width)] = True
        for memory in self.shared:
            if memory.record is not None:
                memory.record.order(arrived.reshape(self.groups, -1))

    def if_(self, s: If, mask: _Mask) -> None:
        condition = self.value(s.condition, mask)
        for body, taken in ((s.then, condition), (s.orelse, ~condition)):
            inner = self.where(taken, mask)
            if body and len(inner.threads):
                self.block(body, inner)

    def for_(self, s: For, mask: _Mask) -> None:
        self.set(s.name, self.value(s.start, mask), mask)
        for _ in range(_MAX_STEPS):
            i = self.variables[s.name]
            mask = self.where(i < self.value(s.stop, mask), mask)
            if not len(mask.threads):
                return
            self.block(s.body, mask)
            self.line = s.line
            step = self.value(s.step, mask)
            following = i + step
            if mask.active(following <= i).any():
                raise Undefined("the loop's step is not positive, or its variable wraps around")
            self.set(s.name, following, mask)
        raise Undefined(f"the loop does not end within {_MAX_STEPS} steps")

    def while_(self, s: While, mask: _Mask) -> None:
        for _ in range(_MAX_STEPS):
            self.block(s.before, mask)
            self.line = s.line
            mask = self.where(self.value(s.condition, mask), mask)
            if not len(mask.threads):
                return
            self.block(s.body, mask)
        raise Undefined(f"the loop does not end within {_MAX_STEPS} steps")

    def subgroups(self, mask: _Mask, width: int) -> np.ndarray:
        """Which subgroups are active. Raises DivergentFlow where only a part of one is."""
        if mask.where is None:
            return np.arange(self.count // width)
        inside = mask.where.reshape(-1, width)
        if (inside.any(1) != inside.all(1)).any():
            raise DivergentFlow("a subgroup operation that only some threads of the subgroup reach")
        return np.flatnonzero(inside.all(1))

    def value(self, e: Expr, mask: _Mask) -> np.ndarray:
        """What `e` is worth to every thread; meaningless where inactive."""
        return _EXPRESSIONS[type(e)](self, e, mask)

    def const(self, e: Const, mask: _Mask) -> np.ndarray:
        shape = (1,) if e.type.lanes == 1 else (1, e.type.lanes)
        value = np.full(shape, e.value, VALUES[e.type.dtype])
        return arithmetic.from_memory(e.type, arithmetic.to_memory(e.type, value))

    def variable(self, e: Var, mask: _Mask) -> np.ndarray:
        if e.name not in self.variables:
            raise Undefined(f"{e.name} is read before it is assigned")
        return self.variables[e.name]

    def load(self, e: Load, mask: _Mask) -> np.ndarray:
        memory = self.memory[e.array]
        index = self.value(e.index, mask)
        if len(index) == 1 and memory.lead is None and memory.record is None:
            return memory.load(memory.at(mask.threads, index), 0)
        at = memory.at(mask.threads, self.whole(index)[mask.threads])
        values = memory.load(at, self.who(memory, mask))
        if mask.where is None:
            return values
        out = np.zeros((self.count, *values.shape[1:]), values.dtype)
        out[mask.threads] = values
        return out

    def binary(self, e: Binary, mask: _Mask) -> np.ndarray:
        a, b = self.value(e.left, mask), self.value(e.right, mask)
        return arithmetic.binary(e.op, e.left.type, a, b, mask.active)

    def select(self, e: Select, mask: _Mask) -> np.ndarray:
        condition = self.value(e.condition, mask)
        if e.type.lanes > 1:
            condition = condition[:, None]
        return np.where(condition, self.value(e.yes, mask), self.value(e.no, mask))

    def vector(self, e: Vector, mask: _Mask) -> np.ndarray:
        parts = [self.value(p, mask) for p in e.parts] * (e.type.lanes // len(e.parts))
        return np.stack(np.broadcast_arrays(*parts), -1)

    def subgroup(self, e: Subgroup, mask: _Mask) -> np.ndarray:
        groups = self.subgroups(mask, self.width)
        x = self.whole(self.value(e.x, mask)).reshape(-1, self.width)
        out = np.zeros_like(x)
        if e.operand is None:
            out[groups] = arithmetic.REDUCTIONS[e.op](x[groups], axis=1, dtype=x.dtype)[:, None]
            return out.reshape(-1)
        source = self.whole(self.value(e.operand, mask)).reshape(-1, self.width)[groups].astype(np.int64)
        if e.op == "shuffle_xor":
            source = source ^ np.arange(self.width)
        if (source >= self.width).any():
            raise Undefined(f"{e.op} from thread {source.max()} of a subgroup of {self.width}")
        out[groups] = np.take_along_axis(x[groups], source, 1)
        return out.reshape(-1)

    def call(self, e: Call, mask: _Mask) -> np.ndarray:
        return arithmetic.call(e.function, e.type, [self.value(a, mask) for a in e.args], mask.active)


_STATEMENTS: dict[type, Callable] = {
    Assign: _Batch.assign,
    Store: _Batch.store,
    Barrier: _Batch.barrier,
    SubgroupBarrier: _Batch.subgroup_barrier,
    If: _Batch.if_,
    For: _Batch.for_,
    While: _Batch.while_,
    Fill: _Batch.fill,
    LoadFragment: _Batch.load_fragment,
    StoreFragment: _Batch.store_fragment,
    Mma: _Batch.mma,
    SetElement: _Batch.set_element,
    Convert: _Batch.convert,
    RowReduce: _Batch.row_reduce,
}
_EXPRESSIONS: dict[type, Callable] = {
    Const: _Batch.const,
    Var: _Batch.variable,
    Param: lambda self, e, mask: self.params[e.name],
    Builtin: lambda self, e, mask: self.builtins[e.name, e.axis],
    Load: _Batch.load,
    Unary: lambda self, e, mask: arithmetic.unary(e.op, e.type, self.value(e.x, mask), mask.active),
    Binary: _Batch.binary,
    Call: _Batch.call,
    Select: _Batch.select,
    Cast: lambda self, e, mask: arithmetic.cast(e.x.type, e.type, self.value(e.x, mask), mask.active),
    Bitcast: lambda self, e, mask: arithmetic.bitcast(e.x.type, e.type, self.value(e.x, mask)),
    Vector: _Batch.vector,
    Component: lambda self, e, mask: self.value(e.x, mask)[:, e.index],
    Element: lambda self, e, mask: self.fragments[e.fragment][self.element_places(e.fragment, e.index)],
    Subgroup: _Batch.subgroup,
}
