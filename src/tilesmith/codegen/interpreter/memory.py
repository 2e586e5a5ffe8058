"""Memory of the interpreter: buffers and arrays, with a record of who touched what since the last barrier."""

from __future__ import annotations

import numpy as np

from tilesmith.codegen.interpreter.arithmetic import MEMORY, from_memory, to_memory
from tilesmith.codegen.interpreter.faults import OutOfBounds, Race, Undefined
from tilesmith.codegen.ir import Array, Buffer, KernelIR
from tilesmith.codegen.types import KernelError, Type

NOBODY, MANY = -1, -2


def together(subgroup: np.ndarray) -> np.ndarray:
    """The name of several threads of a subgroup."""
    return -3 - 2 * subgroup


def waited(subgroup: np.ndarray) -> np.ndarray:
    """The name of threads of a subgroup before its last barrier: all its threads come after them."""
    return -4 - 2 * subgroup


class Record:
    """The last writer and the readers of each element.

    A thread is a number; several threads are `together`, or `waited`, if they are of one subgroup, else MANY.
    """

    def __init__(self, name: str, shape: tuple[int, ...], since: str, width: int):
        self.name = name
        self.since = since
        self.width = width
        self.writer = np.full(shape, NOBODY, np.int64)
        self.reader = np.full(shape, NOBODY, np.int64)

    def subgroup(self, who: np.ndarray) -> np.ndarray:
        """Which subgroup; of NOBODY and MANY none, -1."""
        return np.where(who >= 0, who // self.width, np.where(who <= -3, (-who - 3) // 2, -1))

    def apart(self, other: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Whether nothing orders what `other` did before what `who` does."""
        return (other != NOBODY) & ((other != who) | (who < 0)) & (other != waited(self.subgroup(who)))

    def read(self, at: tuple, who: np.ndarray) -> None:
        """Note a read. Raises Race if another thread wrote."""
        writer = self.writer[at]
        bad = self.apart(writer, who)
        if bad.any():
            self.race("reads", at, bad, who, writer)
        self.reader[at] = named = self.joint(self.reader[at], who)
        last = self.reader[at]
        if (last != named).any():  # several read one element: first those of one subgroup, then those of more
            for value in (together(self.subgroup(named)), np.full_like(named, MANY)):
                mixed = self.joint(last, named) == value
                self.reader[tuple(np.broadcast_to(i, mixed.shape)[mixed] for i in at)] = value[mixed]

    def joint(self, before: np.ndarray, who: np.ndarray) -> np.ndarray:
        """The name of both."""
        one = self.subgroup(before) == self.subgroup(who)
        both = np.where((before == NOBODY) | (before == who), who, np.where(one, together(self.subgroup(who)), MANY))
        return np.where(before == MANY, MANY, both)

    def write(self, at: tuple, who: np.ndarray) -> None:
        """Note a write. Raises Race if another thread read or wrote."""
        for other in (self.writer[at], self.reader[at]):
            bad = self.apart(other, who)
            if bad.any():
                self.race("writes", at, bad, who, other)
        self.writer[at] = who
        other = self.writer[at]
        if (other != who).any():
            self.race("writes", at, other != who, who, other)

    def race(self, does: str, at: tuple, bad: np.ndarray, who: np.ndarray, other: np.ndarray) -> None:
        """Raise Race about the first bad access."""
        element = np.broadcast_to(at[-1], bad.shape)[bad][0]
        first, two = np.broadcast_to(who, bad.shape)[bad][0], other[bad][0]
        one = "a subgroup" if first < 0 else f"thread {first}"
        by = "several threads" if two < 0 else f"thread {two}"
        raise Race(f"race: {one} {does} {self.name}[{element}], touched by {by} {self.since}")

    def order(self, arrived: np.ndarray) -> None:
        """The subgroups of each workgroup that `arrived` passed a barrier of their own."""
        for touched in (self.writer, self.reader):
            subgroup = self.subgroup(touched)
            inside = (subgroup >= 0) & np.take_along_axis(arrived, np.maximum(subgroup, 0), 1)
            touched[inside] = waited(subgroup[inside])

    def clear(self, groups: np.ndarray | slice) -> None:
        """Forget what the workgroups at `groups` did: they passed a barrier."""
        self.writer[groups] = NOBODY
        self.reader[groups] = NOBODY


class Memory:
    """One buffer or array. `lead` gives the leading index of each thread: its group, itself, or nothing."""

    def __init__(self, declared: Buffer | Array, data: np.ndarray, lead: np.ndarray | None, record: Record | None):
        self.declared = declared
        self.type: Type = declared.type
        self.data = data
        self.lead = lead
        self.record = record
        self.length = data.shape[-2 if self.type.lanes > 1 else -1]
        self.written = None if isinstance(declared, Buffer) else np.zeros(data.shape[:2], bool)

    def at(self, threads: np.ndarray, index: np.ndarray) -> tuple:
        """The place of element `index` for `threads`. Raises OutOfBounds."""
        index = index.astype(np.int64)
        if (index >= self.length).any():
            name = self.declared.name
            raise OutOfBounds(f"out of bounds: {name}[{index.max()}]; {name} has {self.length} elements")
        return (index,) if self.lead is None else (self.lead[threads], index)

    def load(self, at: tuple, who: np.ndarray) -> np.ndarray:
        """What lies at a place. Raises Race, or Undefined where nothing was written."""
        if self.record is not None:
            self.record.read(at, who)
        if self.written is not None and not self.written[at].all():
            element = np.broadcast_to(at[-1], self.written[at].shape)[~self.written[at]][0]
            raise Undefined(f"{self.declared.name}[{element}] is read before it is written")
        return from_memory(self.type, self.data[at])

    def store(self, at: tuple, value: np.ndarray, who: np.ndarray) -> None:
        """Write to a place. Raises Race."""
        if self.record is not None:
            self.record.write(at, who)
        if self.written is not None:
            self.written[at] = True
        self.data[at] = to_memory(self.type, value)


def flat(buffer: Buffer, tensor: np.ndarray) -> np.ndarray:
    """A tensor as a buffer sees it: elements in a row, vectors on a second axis; a view. Raises KernelError."""
    wanted = np.dtype(MEMORY[buffer.type.dtype])
    if not isinstance(tensor, np.ndarray) or tensor.dtype != wanted:
        got = getattr(tensor, "dtype", type(tensor).__name__)
        bits = " (its bits)" if buffer.type.dtype == "bf16" else ""
        raise KernelError(
            f"{buffer.name} is a buffer of {buffer.type}: wanted a NumPy array of {wanted}{bits}, got {got}"
        )
    if not tensor.flags.c_contiguous or (buffer.access != "read" and not tensor.flags.writeable):
        raise KernelError(f"{buffer.name} must be contiguous, and writable unless it is In")
    lanes = buffer.type.lanes
    if tensor.size % lanes:
        raise KernelError(f"{buffer.name} has {tensor.size} numbers, not a multiple of {lanes}")
    return tensor.reshape(-1) if lanes == 1 else tensor.reshape(-1, lanes)


def apart(ir: KernelIR, buffers: dict[str, np.ndarray]) -> None:
    """Raise KernelError where a buffer that is written shares memory with another."""
    for k, one in enumerate(ir.buffers):
        for other in ir.buffers[:k]:
            written = (one.access, other.access) != ("read", "read")
            if written and np.may_share_memory(buffers[one.name], buffers[other.name]):
                raise KernelError(
                    f"{ir.name}: {other.name} and {one.name} overlap in memory, and one of them is written"
                )


def fresh(array: Array, rows: int) -> np.ndarray:
    """An array of which nothing is written, `rows` times."""
    shape = (rows, array.length) if array.type.lanes == 1 else (rows, array.length, array.type.lanes)
    return np.zeros(shape, MEMORY[array.type.dtype])
