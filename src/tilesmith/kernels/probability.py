"""Softmax with dropout over rows of scores, causal or not."""

from dataclasses import dataclass

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    build,
    const,
    exp2,
    f32,
    inline,
    local,
    select,
    shared,
    u32,
    unroll,
)
from tilesmith.kernels import checks
from tilesmith.kernels.functions import LOG2E, random_bits
from tilesmith.kernels.rows import Rows, closed, opened, row_highest, row_of_thread, row_sum, stored_scalar

LOWEST = -3.4028234663852886e38
"""Of all f32, so that a row that masks have filled with it is a row of equals. No infinity: see `functions.LOWEST`."""

_BATCH = 8
"""Vectors that a thread reads at once of a row that is not kept. With 4, f16 rows of 32,768, 65,536 and 131,072 columns
took 119, 108 and 107 % of the time on CUDA, 119, 106 and 105 through Vulkan (H200). Half as many of eight lanes. Half
as many of a causal row of up to 16,384, which ends anywhere: with 8, rows of 8,192 and 16,384 took 105 and 104 %. Half
as many of eight lanes, too, where a workgroup has 1,024 threads: at 32 registers an SM holds two, of which one draws
while the other reads. Else 65,536 and 131,072 columns took 106 and 104 %, 106 and 108 through Vulkan."""


@dataclass(frozen=True)
class SoftmaxDropoutConfig:
    """Softmax and dropout over rows of `hidden_dim` scores.

    dropout: probability p of dropping an element, in [0, 1). causal: row t of a matrix [T, hidden_dim] sees the columns
    j <= t + hidden_dim - T. use_half: x and y have 16 bits an element, else f32; the arithmetic is f32. half: which 16
    bits, "f16", or "bf16" where the target has it. strided: rows of x lie at a distance that the launch names.
    statistics: also return each row's maximum and sum, for a backward. positive: the scale of every launch is above 0
    and at most 1e30, which spares a product an element in rows that no workgroup keeps. subgroup: see `NormConfig`.
    """

    hidden_dim: int
    use_half: bool = False
    dropout: float = 0.0
    causal: bool = False
    workgroup_size: int = 256
    half: str = "f16"
    strided: bool = False
    statistics: bool = False
    positive: bool = False
    subgroup: int | None = None

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half", "causal", "strided", "statistics", "positive")
        checks.workgroup(self)
        checks.subgroup(self)
        checks.half(self)
        if not isinstance(self.dropout, (int, float)) or not 0.0 <= self.dropout < 1.0:
            checks.fail(self, f"dropout must be a probability in [0, 1), got {self.dropout!r}")

    @property
    def plan(self) -> Rows:
        """How the rows are shared out."""
        # f16 rows of 32,768 columns kept by 512 threads, one workgroup an SM, took 115 % of the time of reading them
        # twice, f32 rows 83 % (H200)
        most = 65_536 if self.use_half else 131_072
        if self.causal and self.hidden_dim > 8192:  # at 16,384 columns 77 % of the time of keeping them
            most = 0
        scalar = stored_scalar(self)
        lanes = 8 if self.dropout > 0.0 and self.use_half and self.hidden_dim % 8 == 0 else None
        return Rows.of(self.hidden_dim, self.workgroup_size, scalar, lanes, kept=f32, most=most, subgroup=self.subgroup)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        checks.counts(self, rows=rows)
        return self.plan.grid(rows)


@checks.builds_from(SoftmaxDropoutConfig)
def create_softmax_dropout_kernel(config: SoftmaxDropoutConfig) -> KernelIR:
    """y = dropout(softmax(scale · x)): kept elements are divided by 1 - p, the others 0. Rounded once.

    Tensors x, y: [rows, hidden_dim], contiguous; seed: u32 [4], the bytes of int64 (seed, offset), for dropout > 0
    alone. Scalars: rows, queries (T: rows of one matrix, for causal), scale. Grid: `config.grid(rows)`.

    An element is kept iff the 16 bits that Philox4x32-10 draws for its row-major index are at least round(p · 2¹⁶):
    key = seed, counter = (index // 8, offset), and of the words' eight halves, the lower one of each first, number
    index % 8; the same elements as on every other backend. So p is rounded to a multiple of 2⁻¹⁶. A row that sees no
    column is 0; one that holds NaN or +inf, or -inf alone, is NaN.

    With dropout of 16 bits an element, and 8 dividing hidden_dim, the buffers x and y are of u32x4, eight elements that
    share a draw. With `strided` also the scalar x_step, from one row of x to the next in such vectors, else in those of
    the widest of 4, 2 and 1 elements that divides hidden_dim. With `statistics` also top and total: f32 [rows], the
    maximum of scale · x over what a row sees (-3.4e38 where that is nothing) and the sum of exp(scale · x - top).
    """
    plan, causal = config.plan, config.causal
    stored, wide, sweep = plan.stored, plan.wide, plan.sweep
    lanes, pieces, each = plan.lanes, plan.pieces, plan.each
    dropout = config.dropout > 0.0
    batch = _BATCH // pieces
    if (causal and plan.columns <= 16_384) or (pieces > 1 and plan.threads == 1024):
        batch //= 2
    some = plan.count if plan.keep else batch
    exact = plan.exact and plan.count % some == 0
    whole = exact and not causal
    last = -(-plan.count // some) * some - 1
    # Maxima are those of x, not of scale · x. Rows that are kept wait for memory: there it saves nothing. With dropout
    # rows of 8,192 and 16,384 took 102 and 104 % of the time without it, 112 and 106 % through Vulkan (H200, f16).
    raw = config.positive and (dropout or not plan.keep)
    # Maxima are rounded products with `step`, so that a weight is one fused product and sum. f16 alone, for which it
    # overflows never; between maxima that all are rounded nothing is lost.
    fused = raw and plan.scalar.dtype == "f16"
    least = min(round(config.dropout * 2**16), 2**16 - 1)
    kept_scale = 2**16 / (2**16 - least)

    @inline
    def sees(i, j, seen):
        """Whether lane j of vector i is a column that the row sees."""
        return i * lanes + j < seen

    @inline
    def ends(i, seen):
        """Whether the row sees only the begin of vector i: one of a row. The others do not ask for each lane."""
        return causal and (i + 1) * lanes > seen

    @inline
    def begins(i, seen):
        """Whether the row sees a column of vector i."""
        return i * lanes < seen if causal else i < plan.vectors

    @inline
    def scaled(v, scale):
        """A vector in memory, as a list of those in registers."""
        return [part if raw else part * scale for part in opened(plan, v)]

    @inline
    def own_parts(kept, k):
        """The k-th vector that the thread keeps, as such a list."""
        return [kept[k * pieces + h] for h in range(pieces)]

    @inline
    def weight(x, top, step):
        """2 to the power of step · (x - top). The difference comes first: the product of either may overflow."""
        return exp2(x * step - top) if fused else exp2((x - top) * step)

    @inline
    def faded(old, top, step):
        """The weight of a maximum beside a later one."""
        return exp2(old - top) if fused else exp2((old - top) * step)

    @inline
    def vector_of(k, first, t):
        """The vector to write as the k-th after `first`; of rows that are not kept backwards, since caches have their
        end."""
        return t + (k if plan.keep else last - first - k) * plan.threads

    @inline
    def body(x, seed, y, tops, totals, rows, queries, scale, x_step):
        stage = shared(f32, plan.workgroup) if plan.stages else None
        kept = local(wide, plan.count * pieces) if plan.keep else None
        row, at, t = row_of_thread(plan, rows)
        start, place = at * x_step, at * plan.vectors
        seen = max(at % queries + (1 + plan.columns), queries) - queries if causal else u32(plan.columns)
        step = scale * LOG2E if raw else f32(LOG2E)
        own, total = LOWEST, 0.0  # of this thread's elements, so that it waits for no other before it is done with them
        a_step: const = plan.threads * lanes  # columns that a row's threads read at once
        reach = (seen + (a_step - 1)) // a_step if causal and not plan.keep else None
        for first in sweep(0, plan.count if reach is None else reach, some):
            given = local(stored, some)
            high = LOWEST if fused else own
            for k in unroll(some):  # all loads are in flight before the first is used, behind its own condition
                i = t + (first + k) * plan.threads
                if whole or begins(i, seen):
                    given[k] = x[start + i]
            for k in unroll(some):
                i = t + (first + k) * plan.threads
                if whole or begins(i, seen):
                    parts = scaled(given[k], scale)
                    if plan.keep:
                        for h in unroll(pieces):
                            kept[k * pieces + h] = parts[h]
                    if ends(i, seen):
                        for j in unroll(lanes):
                            high = max(high, select(sees(i, j, seen), parts[j // each][j % each], LOWEST))
                    else:
                        for j in unroll(lanes):
                            high = max(high, parts[j // each][j % each])
            if fused:
                high = max(own, high * step)
            total = total * faded(own, high, step)
            own = high
            for k in unroll(some):
                i = t + (first + k) * plan.threads
                if whole or begins(i, seen):
                    scores = own_parts(kept, k) if plan.keep else scaled(given[k], scale)
                    weights = [weight(part, high, step) for part in scores]
                    if plan.keep:
                        for h in unroll(pieces):
                            kept[k * pieces + h] = weights[h]
                    if ends(i, seen):
                        for j in unroll(lanes):
                            total += select(sees(i, j, seen), weights[j // each][j % each], 0.0)
                    else:
                        for j in unroll(lanes):
                            total += weights[j // each][j % each]
        top = row_highest(own, stage, plan.threads, plan.subgroup)
        mine = faded(own, top, step)
        total = row_sum(total * mine, stage, plan.threads, plan.subgroup)
        if tops is not None and t == 0 and row < rows:
            tops[row] = select(seen > 0, top / LOG2E if fused else top * scale, LOWEST) if raw else top
            totals[row] = total
        factor = kept_scale / select(seen > 0, total, 1.0)
        if plan.keep:
            factor = factor * mine
        for first in sweep(0, plan.count, some):
            if not plan.keep:  # all loads before the first store are in flight
                again = local(stored, some)
                for k in unroll(some):
                    i = vector_of(k, first, t)
                    if whole or begins(i, seen):
                        again[k] = x[start + i]
            for k in unroll(some):
                i = vector_of(k, first, t)
                if row < rows and (exact or i < plan.vectors):
                    if not causal or begins(i, seen):
                        if plan.keep:
                            shares = [part * factor for part in own_parts(kept, k)]
                        else:
                            shares = [weight(part, top, step) * factor for part in scaled(again[k], scale)]
                        out = [shares[j // each][j % each] for j in range(lanes)]
                        if dropout:
                            bits = random_bits(place + i, lanes, seed)
                            out = [select(bits[j] >= least << 16, out[j], 0.0) for j in range(lanes)]
                        if ends(i, seen):
                            y[place + i] = closed(plan, [select(sees(i, j, seen), out[j], 0.0) for j in range(lanes)])
                        else:
                            y[place + i] = closed(plan, out)
                    else:
                        y[place + i] = stored(0)

    def softmax(
        x: In[stored],
        seed: In[u32] if dropout else None,
        y: Out[stored],
        top: Out[f32] if config.statistics else None,
        total: Out[f32] if config.statistics else None,
        rows: Scalar[u32],
        queries: Scalar[u32],
        scale: Scalar[f32],
        x_step: Scalar[u32] if config.strided else None,
    ):
        body(x, seed, y, top, total, rows, queries, scale, x_step if config.strided else plan.vectors)

    name = "softmax_dropout" if dropout else "softmax"
    return build(softmax, (plan.workgroup, 1, 1), subgroup_size=config.subgroup, name=name)
