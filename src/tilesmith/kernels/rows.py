"""How kernels over rows share their work: threads and vectors a row, grids of any length, sums over a row."""

from __future__ import annotations

from dataclasses import dataclass

from tilesmith.codegen import (
    Type,
    barrier,
    bitcast,
    const,
    f32,
    f32x2,
    f32x4,
    gid,
    groups,
    inline,
    shuffle_xor,
    tid,
    type_named,
    u32,
    u32x4,
    unroll,
    vector,
)

MAX_GROUPS = 65_535
"""Workgroups along an axis that every backend allows."""

BATCH = 4
"""Vectors that a thread reads at once of a row that it does not keep: with 8, layer norm of 131,072 was 8 % slower."""

_VECTORS_A_THREAD = 4
_KEPT = 64  # elements that a thread keeps in registers


@dataclass(frozen=True)
class Rows:
    """The plan for rows of `columns` elements; lengths below count vectors of `lanes` elements.

    lanes: 1, 2, 4, or 8 of 16 bits. threads: threads a row. rows: rows a workgroup. count: vectors a thread, the
    last of which may lie past the row unless `exact`. keep: whether a thread keeps its vectors in registers between
    passes over the row, in `kept` bytes an element, `most` bytes of a workgroup's. subgroup: threads of a subgroup,
    where the kernel is built for so many.
    """

    columns: int
    lanes: int
    threads: int
    rows: int
    scalar: Type
    kept: int
    most: int
    subgroup: int | None

    @classmethod
    def of(
        cls,
        columns: int,
        workgroup: int,
        scalar: Type,
        lanes: int | None = None,
        beside: int = 1,
        kept: Type | None = None,
        most: int = 131_072,
        subgroup: int | None = None,
    ) -> Rows:
        """Vectors of four (two, one) where they divide `columns`, and about four of them a thread.

        beside: so many threads read a row side by side before any of them reads more than one vector. kept: the type of
        the elements that a thread keeps, `scalar` by default. most: bytes that a workgroup keeps; with more they spill.
        """
        lanes = lanes or vector_lanes(columns)
        threads = 1
        while threads < workgroup and threads * lanes * (_VECTORS_A_THREAD if threads >= beside else 1) < columns:
            threads *= 2
        return cls(columns, lanes, threads, workgroup // threads, scalar, (kept or scalar).bytes, most, subgroup)

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
        elements = self.count * self.lanes
        return elements <= _KEPT and elements * self.kept * self.workgroup <= self.most

    @property
    def whole(self) -> bool:
        """Whether each thread has as many vectors as make up whole batches of `BATCH`."""
        return self.exact and self.count % BATCH == 0

    @property
    def sweep(self) -> type[range] | object:
        """The loop over a thread's vectors: written out where they are kept."""
        return unroll if self.keep else range

    @property
    def stages(self) -> bool:
        """Whether `row_sum` needs shared memory: a row's threads are of several subgroups, or of nobody knows how
        many."""
        return self.subgroup is None or self.threads > self.subgroup

    @property
    def workgroup(self) -> int:
        """Threads a workgroup."""
        return self.threads * self.rows

    @property
    def stored(self) -> Type:
        """A vector in memory; words where it has eight lanes, which no type has."""
        return u32x4 if self.lanes == 8 else vector(self.scalar, self.lanes)

    @property
    def pieces(self) -> int:
        """Vectors in registers that a vector in memory is."""
        return 2 if self.lanes == 8 else 1

    @property
    def each(self) -> int:
        """Lanes of a vector in registers."""
        return self.lanes // self.pieces

    @property
    def wide(self) -> Type:
        """A vector in registers."""
        return vector(f32, self.each)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        return folded(-(-rows // self.rows))


def stored_scalar(config: object) -> Type:
    """The type of the elements in memory that `use_half` and `half` of a configuration say."""
    return type_named(config.half) if config.use_half else f32


def vector_lanes(columns: int) -> int:
    """The widest vector that divides a row."""
    return 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1


def folded(count: int) -> tuple[int, int, int]:
    """A grid of at least `count` workgroups, along two axes where one is too short for them; few are past the last."""
    along_y = max(-(-count // MAX_GROUPS), 1)
    return (-(-count // along_y), along_y, 1)


def flat_grid(config: object, rows: int, each: int) -> tuple[int, int, int]:
    """The workgroups for rows of a configuration as one long row, of which a thread has `each` vectors."""
    vectors = rows * (config.hidden_dim // vector_lanes(config.hidden_dim))
    return folded(-(-vectors // (config.workgroup_size * each)))


@inline
def group_index():
    """This workgroup's number in a grid made by `folded`, which may be past the last."""
    return gid(1) * groups(0) + gid(0)


@inline
def placed(i, a_row, step):
    """Where vector i of rows of `a_row` vectors lies: `step` apart, or, where that is None, contiguous."""
    return i if step is None else i // a_row * step + i % a_row


@inline
def row_of_thread(plan, rows):
    """(row, row to read, this thread's number within the row); threads past the last row read it and write nothing."""
    row = group_index() * plan.rows + tid(0) // plan.threads
    return row, min(row, rows - 1), tid(0) % plan.threads


@inline
def again(plan, k):
    """The vector to read as the k-th of a second pass: the last first where they are not kept, since caches have it."""
    return k if plan.keep else plan.count - 1 - k


@inline
def block(causal):
    """The workgroup's block of queries; under a causal mask the last, which see most, come first."""
    return groups(0) - 1 - gid(0) if causal else gid(0)


@inline
def head_rows(steps, batch, head, heads, rows, a_row):
    """(where a head's rows begin, from a row to the next) in a tensor [batch, heads, rows, a_row]: as `steps` of batch,
    head and row say, or, where these are None, contiguous."""
    if steps[0] is None:
        first, step = (batch * heads + head) * rows * a_row, u32(a_row)
    else:
        first, step = batch * steps[0] + head * steps[1], steps[2]
    return first, step


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
def opened(plan, v):
    """What a vector in memory holds, in registers: a list of `plan.pieces` vectors."""
    if plan.pieces == 1:
        held = [plan.wide(v)]
    else:
        two: const = vector(plan.scalar, 2)
        pairs = [f32x2(bitcast(two, v[k])) for k in range(4)]
        held = [f32x4(pairs[h][0], pairs[h][1], pairs[h + 1][0], pairs[h + 1][1]) for h in (0, 2)]
    return held


@inline
def closed(plan, lanes):
    """The vector in memory of these f32."""
    if plan.pieces == 1:
        v = plan.stored(collected(plan.wide, lanes))
    else:
        two: const = vector(plan.scalar, 2)
        words = [bitcast(u32, two(f32x2(lanes[2 * k], lanes[2 * k + 1]))) for k in range(4)]
        v = u32x4(words[0], words[1], words[2], words[3])
    return v


@inline
def row_sum(x, stage, threads, subgroup=None):
    """The sum of `x` over the `threads` (a power of two) that share a row.

    stage: one f32 a thread, shared. subgroup: threads of a subgroup, where the kernel is built for so many; if they
    hold a row, nothing is staged. Else in few steps, after which every thread adds up the rest by itself: a barrier
    costs more than that.
    """
    return _joined(x, stage, threads, subgroup, False)


@inline
def row_highest(x, stage, threads, subgroup=None):
    """The maximum of `x` over the threads that share a row; see `row_sum`."""
    return _joined(x, stage, threads, subgroup, True)


@inline
def _joined(x, stage, threads, subgroup, highest):
    return _staged(x, stage, threads, highest) if subgroup is None else _shuffled(x, stage, threads, subgroup, highest)


@inline
def _shuffled(x, stage, threads, subgroup, highest):
    """Within subgroups first; then their values, of which stage holds one each, if a row has several."""
    t = tid(0)
    one = _across_lanes(x, min(threads, subgroup), highest)
    if threads > subgroup:
        many: const = threads // subgroup
        barrier()
        if t % subgroup == 0:
            stage[t // subgroup] = one
        barrier()
        first = t // threads * many
        if many <= subgroup:
            one = _across_lanes(stage[first + t % many], many, highest)
        else:
            one = stage[first]
            for k in range(1, many):
                one = max(one, stage[first + k]) if highest else one + stage[first + k]
    return one


@inline
def _across_lanes(x, lanes, highest):
    """Of `lanes` neighbours, a power of two."""
    one = x
    for k in unroll(lanes.bit_length() - 1):
        other = shuffle_xor(one, 1 << k)
        one = max(one, other) if highest else one + other
    return one


@inline
def _staged(x, stage, threads, highest):
    t = tid(0)
    left: const = _left(threads)
    own, first = t % threads, t - t % threads
    barrier()
    stage[t] = x
    barrier()
    for k in unroll(1, len(left)):
        if own < left[k]:
            partial = stage[t]
            for j in unroll(1, left[k - 1] // left[k]):
                away: const = j * left[k]
                partial = max(partial, stage[t + away]) if highest else partial + stage[t + away]
            stage[t] = partial
        barrier()
    one = stage[first]
    for k in unroll(1, left[-1]):
        one = max(one, stage[first + k]) if highest else one + stage[first + k]
    return one


def _left(threads: int) -> tuple[int, ...]:
    """How many values of a row there are at each step: `threads` to begin with, at last what is left for everyone."""
    if threads <= 16:
        return (threads,)
    if threads <= 256:
        return (threads, 1 << threads.bit_length() // 2)
    return (threads, threads // 8, threads // 64)
