"""How kernels over rows share their work: threads and vectors a row, grids of any length, sums over a row."""

from __future__ import annotations

from dataclasses import dataclass

from tilesmith.codegen import Type, barrier, f16, f32, gid, groups, inline, tid, unroll, vector

MAX_GROUPS = 65_535
"""Workgroups along an axis that every backend allows."""

_VECTORS_A_THREAD = 4
_KEPT = 16


@dataclass(frozen=True)
class Rows:
    """The plan for rows of `columns` elements; lengths below count vectors of `lanes` elements.

    threads: threads a row. rows: rows a workgroup. count: vectors a thread, the last of which may lie past the row
    unless `exact`. keep: whether a thread keeps its vectors in registers between passes over the row.
    """

    columns: int
    lanes: int
    threads: int
    rows: int
    half: bool

    @classmethod
    def of(cls, columns: int, workgroup: int, half: bool, lanes: int | None = None) -> Rows:
        """Vectors of four (two, one) where they divide `columns`, and about four of them a thread."""
        lanes = lanes or vector_lanes(columns)
        threads = 1
        while threads < workgroup and threads * _VECTORS_A_THREAD * lanes < columns:
            threads *= 2
        return cls(columns, lanes, threads, workgroup // threads, half)

    @property
    def vectors(self) -> int:
        """Vectors a row."""
        return self.columns // self.lanes

    @property
    def count(self) -> int:
        """Vectors a thread."""
        return -(-self.vectors // self.threads)

    @property
    def exact(self) -> bool:
        """Whether each thread has `count` vectors."""
        return self.vectors % self.threads == 0

    @property
    def keep(self) -> bool:
        """Whether a thread's vectors fit registers."""
        return self.count <= _KEPT

    @property
    def sweep(self) -> type[range] | object:
        """The loop over a thread's vectors: written out where they are kept."""
        return unroll if self.keep else range

    @property
    def workgroup(self) -> int:
        """Threads a workgroup."""
        return self.threads * self.rows

    @property
    def stored(self) -> Type:
        """A vector in memory."""
        return vector(f16 if self.half else f32, self.lanes)

    @property
    def wide(self) -> Type:
        """A vector in registers."""
        return vector(f32, self.lanes)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        return folded(-(-rows // self.rows))


def vector_lanes(columns: int) -> int:
    """The widest vector that divides a row."""
    return 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1


def folded(count: int) -> tuple[int, int, int]:
    """A grid of at least `count` workgroups, along two axes where one is too short for them."""
    return (min(count, MAX_GROUPS), -(-count // MAX_GROUPS), 1)


@inline
def group_index():
    """This workgroup's number in a grid made by `folded`, which may be past the last."""
    return gid(1) * groups(0) + gid(0)


@inline
def row_of_thread(plan, rows):
    """(row, row to read, this thread's number within the row); threads past the last row read it and write nothing."""
    row = group_index() * plan.rows + tid(0) // plan.threads
    return row, min(row, rows - 1), tid(0) % plan.threads


@inline
def across(v, lanes):
    """The sum of a vector's lanes."""
    total = v[0]
    for k in unroll(1, lanes):
        total += v[k]
    return total


@inline
def collected(wide, lanes):
    """The vector of these lanes."""
    if len(lanes) == 4:
        v = wide(lanes[0], lanes[1], lanes[2], lanes[3])
    elif len(lanes) == 2:
        v = wide(lanes[0], lanes[1])
    else:
        v = wide(lanes[0])
    return v


@inline
def row_sum(x, stage, threads):
    """The sum of `x` over the `threads` (a power of two) that share a row; `stage` holds one f32 a thread."""
    t = tid(0)
    barrier()
    stage[t] = x
    for step in unroll(threads.bit_length() - 1):
        barrier()
        if t % threads < threads >> step + 1:
            stage[t] += stage[t + (threads >> step + 1)]
    barrier()
    return stage[t - t % threads]


@inline
def row_highest(x, stage, threads):
    """The maximum of `x` over the threads that share a row; see `row_sum`."""
    t = tid(0)
    barrier()
    stage[t] = x
    for step in unroll(threads.bit_length() - 1):
        barrier()
        if t % threads < threads >> step + 1:
            stage[t] = max(stage[t], stage[t + (threads >> step + 1)])
    barrier()
    return stage[t - t % threads]
