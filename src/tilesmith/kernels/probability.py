"""Softmax with dropout over rows of scores, causal or not."""

from dataclasses import dataclass

from tilesmith.codegen import In, KernelIR, Out, Scalar, build, exp, f32, inline, local, select, shared, u32, unroll
from tilesmith.kernels import checks
from tilesmith.kernels.functions import LOWEST, philox
from tilesmith.kernels.rows import Rows, collected, row_highest, row_of_thread, row_sum


@dataclass(frozen=True)
class SoftmaxDropoutConfig:
    """Softmax and dropout over rows of `hidden_dim` scores.

    dropout: probability p of dropping an element, in [0, 1). causal: row t of a matrix [T, hidden_dim] sees the columns
    j <= t + hidden_dim - T. use_half: x and y are f16, else f32; the arithmetic is f32.
    """

    hidden_dim: int
    use_half: bool = False
    dropout: float = 0.0
    causal: bool = False
    workgroup_size: int = 256

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half", "causal")
        checks.workgroup(self)
        if not isinstance(self.dropout, (int, float)) or not 0.0 <= self.dropout < 1.0:
            checks.fail(self, f"dropout must be a probability in [0, 1), got {self.dropout!r}")

    @property
    def plan(self) -> Rows:
        """How the rows are shared out."""
        return Rows.of(self.hidden_dim, self.workgroup_size, self.use_half)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        return self.plan.grid(rows)


def create_softmax_dropout_kernel(config: SoftmaxDropoutConfig) -> KernelIR:
    """y = dropout(softmax(scale · x)): kept elements are divided by 1 - p, the others 0. Rounded once.

    Tensors x, y: [rows, hidden_dim], contiguous; seed: u32 [4], the bytes of int64 (seed, offset), for dropout > 0
    alone. Scalars: rows, queries (T: rows of one matrix, for causal), scale. Grid: `config.grid(rows)`.

    An element is kept iff the 32 bits that Philox4x32-10 draws for its row-major index are at least round(p · 2³²):
    key = seed, counter = (index // 4, offset), word index % 4; the same elements as on every other backend. A row that
    sees no column is 0.
    """
    checks.a(config, SoftmaxDropoutConfig)
    plan, causal = config.plan, config.causal
    stored, wide, lanes, sweep = plan.stored, plan.wide, plan.lanes, plan.sweep
    dropout = config.dropout > 0.0
    least = min(round(config.dropout * 2**32), 2**32 - 1)
    kept_scale = 1.0 / (1.0 - config.dropout)

    @inline
    def sees(i, j, seen):
        """Whether lane j of vector i is a column below `seen`."""
        return not causal or i * lanes + j < seen

    @inline
    def word(words, element):
        return select(
            element % 4 < 2,
            select(element % 2 == 0, words[0], words[1]),
            select(element % 2 == 0, words[2], words[3]),
        )

    @inline
    def body(x, seed, y, rows, queries, scale):
        stage = shared(f32, plan.workgroup)
        kept = local(wide, plan.count) if plan.keep else None
        row, at, t = row_of_thread(plan, rows)
        start = at * plan.vectors
        seen = max(at % queries + (1 + plan.columns), queries) - queries if causal else u32(plan.columns)
        top = LOWEST
        for k in sweep(plan.count):
            i = t + k * plan.threads
            if plan.exact or i < plan.vectors:
                v = wide(x[start + i]) * scale
                if plan.keep:
                    kept[k] = v
                for j in unroll(lanes):
                    top = max(top, select(sees(i, j, seen), v[j], LOWEST))
        top = row_highest(top, stage, plan.threads)
        total = 0.0
        for k in sweep(plan.count):
            i = t + k * plan.threads
            if plan.exact or i < plan.vectors:
                v = exp((kept[k] if plan.keep else wide(x[start + i]) * scale) - top)
                if plan.keep:
                    kept[k] = v
                for j in unroll(lanes):
                    total += select(sees(i, j, seen), v[j], 0.0)
        total = row_sum(total, stage, plan.threads)
        factor = kept_scale / select(seen > 0, total, 1.0)
        for k in sweep(plan.count):
            i = t + k * plan.threads
            if row < rows and (plan.exact or i < plan.vectors):
                v = kept[k] if plan.keep else exp(wide(x[start + i]) * scale - top)
                if dropout:
                    element = (start + i) * lanes
                    words = philox(element // 4, seed)
                    bits = [words[j] if lanes == 4 else word(words, element + j) for j in range(lanes)]
                    y[start + i] = stored(
                        collected(
                            wide,
                            [select(sees(i, j, seen) and bits[j] >= least, v[j] * factor, 0.0) for j in range(lanes)],
                        )
                    )
                else:
                    y[start + i] = stored(
                        collected(wide, [select(sees(i, j, seen), v[j] * factor, 0.0) for j in range(lanes)])
                    )

    def softmax(x: In[stored], y: Out[stored], rows: Scalar[u32], queries: Scalar[u32], scale: Scalar[f32]):
        body(x, None, y, rows, queries, scale)

    def softmax_dropout(
        x: In[stored],
        seed: In[u32],
        y: Out[stored],
        rows: Scalar[u32],
        queries: Scalar[u32],
        scale: Scalar[f32],
    ):
        body(x, seed, y, rows, queries, scale)

    return build(softmax_dropout if dropout else softmax, (plan.workgroup, 1, 1))
