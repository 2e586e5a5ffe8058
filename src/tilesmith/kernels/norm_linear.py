"""Layer norm fused with the linear layer after it."""

from dataclasses import dataclass

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    barrier,
    build,
    f16,
    f32,
    fma,
    gid,
    inline,
    local,
    rsqrt,
    shared,
    tid,
    u32,
    unroll,
    vector,
)
from tilesmith.kernels import checks
from tilesmith.kernels.rows import MAX_GROUPS, across, vector_lanes

_DEPTH = 32  # elements of a row staged at a time
_OWN = 4  # a thread computes _OWN x _OWN outputs


@dataclass(frozen=True)
class LayerNormLinearConfig:
    """Layer norm over rows of `hidden_dim` elements, then a linear layer to `output_dim` (None: hidden_dim).

    bias: whether the linear layer has one. use_half: tensors are f16, else f32; the arithmetic is f32. block_m,
    block_n: rows and outputs of a workgroup, which has block_m · block_n / 16 threads.
    """

    hidden_dim: int
    output_dim: int | None = None
    use_half: bool = False
    bias: bool = True
    block_m: int = 32
    block_n: int = 64

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        if self.output_dim is not None:
            checks.positive(self, "output_dim")
        checks.flags(self, "use_half", "bias")
        checks.one_of(self, "block_m", 16, 32, 64, 128)
        checks.one_of(self, "block_n", 16, 32, 64, 128)

    @property
    def outputs(self) -> int:
        """Elements of a row of the result."""
        return self.hidden_dim if self.output_dim is None else self.output_dim

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows. Raises ValueError for more than the 65,535 blocks of rows that fit a grid."""
        blocks = -(-rows // self.block_m)
        if blocks > MAX_GROUPS:
            checks.fail(self, f"{rows:,} rows are more than {MAX_GROUPS * self.block_m:,}; launch them in parts")
        return (-(-self.outputs // self.block_n), blocks, 1)


def create_layer_norm_linear_kernel(config: LayerNormLinearConfig) -> KernelIR:
    """y = n · weightᵀ + bias, with n = layer_norm(x) · norm_weight + norm_bias, rounded to x's type.

    Tensors x: [rows, hidden_dim]; norm_weight, norm_bias: [hidden_dim]; weight: [output_dim, hidden_dim]; bias:
    [output_dim], if configured; y: [rows, output_dim]; all contiguous. Scalars: rows, eps. Grid: `config.grid(rows)`.
    """
    checks.a(config, LayerNormLinearConfig)
    columns, outputs, bm, bn = config.hidden_dim, config.outputs, config.block_m, config.block_n
    lanes = vector_lanes(columns)
    wide, stored = vector(f32, lanes), vector(f16 if config.use_half else f32, lanes)
    scalar = f16 if config.use_half else f32
    vectors, depth = columns // lanes, _DEPTH // lanes  # of a row, of a stage
    tx, ty = bn // _OWN, bm // _OWN
    threads = tx * ty
    helpers = threads // bm  # threads that share a row's statistics
    stride = depth + (1 if lanes == 4 else 2 if lanes == 2 else 4)  # rows start in different banks

    @inline
    def statistics(x, mean, rstd, stage, m0, rows, eps):
        """The mean and 1 / deviation of the workgroup's rows, the variance around the mean."""
        t = tid(0)
        start = min(m0 + t // helpers, rows - 1) * vectors
        total = 0.0
        for i in range(t % helpers, vectors, helpers):
            total += across(wide(x[start + i]), lanes)
        stage[t] = total
        barrier()
        total = 0.0
        for k in unroll(helpers):
            total += stage[t - t % helpers + k]
        middle = total / f32(columns)
        squares = 0.0
        for i in range(t % helpers, vectors, helpers):
            off = wide(x[start + i]) - middle
            squares += across(off * off, lanes)
        barrier()
        stage[t] = squares
        barrier()
        if t % helpers == 0:
            squares = 0.0
            for k in unroll(helpers):
                squares += stage[t + k]
            mean[t // helpers] = middle
            rstd[t // helpers] = rsqrt(squares / f32(columns) + eps)

    @inline
    def body(x, norm_weight, norm_bias, weight, bias, y, rows, eps):
        xs, ws = shared(wide, bm * stride), shared(wide, bn * stride)
        mean, rstd, stage = shared(f32, bm), shared(f32, bm), shared(f32, threads)
        t, m0, n0 = tid(0), gid(1) * bm, gid(0) * bn
        statistics(x, mean, rstd, stage, m0, rows, eps)
        left, right, totals = local(wide, _OWN), local(wide, _OWN), local(f32, _OWN * _OWN)
        for k in unroll(_OWN * _OWN):
            totals[k] = 0.0
        for start in range(0, vectors, depth):
            barrier()
            for k in range(t, bm * depth, threads):
                r, i = k // depth, start + k % depth
                v = wide(0)
                if i < vectors:
                    v = wide(x[min(m0 + r, rows - 1) * vectors + i])
                    v = (v - mean[r]) * rstd[r] * wide(norm_weight[i]) + wide(norm_bias[i])
                xs[r * stride + k % depth] = wide(stored(v))
            for k in range(t, bn * depth, threads):
                n, i = k // depth, start + k % depth
                v = wide(0)
                if i < vectors and n0 + n < outputs:
                    v = wide(weight[(n0 + n) * vectors + i])
                ws[n * stride + k % depth] = v
            barrier()
            for i in range(depth):
                for k in unroll(_OWN):
                    left[k] = xs[(t // tx + k * ty) * stride + i]
                    right[k] = ws[(t % tx + k * tx) * stride + i]
                multiply(totals, left, right)
        for r in unroll(_OWN):
            for n in unroll(_OWN):
                row, column = m0 + t // tx + r * ty, n0 + t % tx + n * tx
                if row < rows and column < outputs:
                    total = totals[r * _OWN + n]
                    if bias is not None:
                        total += f32(bias[column])
                    y[row * outputs + column] = scalar(total)

    @inline
    def multiply(totals, left, right):
        for r in unroll(_OWN):
            for n in unroll(_OWN):
                for j in unroll(lanes):
                    totals[r * _OWN + n] = fma(left[r][j], right[n][j], totals[r * _OWN + n])

    def layer_norm_linear(
        x: In[stored],
        norm_weight: In[stored],
        norm_bias: In[stored],
        weight: In[stored],
        bias: In[scalar],
        y: Out[scalar],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        body(x, norm_weight, norm_bias, weight, bias, y, rows, eps)

    def without_bias(
        x: In[stored],
        norm_weight: In[stored],
        norm_bias: In[stored],
        weight: In[stored],
        y: Out[scalar],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        body(x, norm_weight, norm_bias, weight, None, y, rows, eps)

    return build(layer_norm_linear if config.bias else without_bias, (threads, 1, 1), name="layer_norm_linear")
