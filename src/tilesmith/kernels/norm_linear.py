"""Layer norm or RMS norm, fused with the linear layer after it."""

from dataclasses import dataclass

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    barrier,
    build,
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
from tilesmith.kernels.rows import MAX_GROUPS, across, stored_scalar, vector_lanes

_DEPTH = 32  # elements of a row staged at a time
_OWN = 4  # a thread computes _OWN x _OWN outputs


@dataclass(frozen=True)
class LayerNormLinearConfig:
    """Layer norm over rows of `hidden_dim` elements, then a linear layer to `output_dim` (None: hidden_dim).

    bias: whether the linear layer has one. use_half: tensors have 16 bits an element, else f32; the arithmetic is f32.
    half: which 16 bits, "f16", or "bf16" where the target has it. block_m, block_n: rows and outputs of a workgroup,
    which has block_m · block_n / 16 threads.
    """

    hidden_dim: int
    output_dim: int | None = None
    use_half: bool = False
    bias: bool = True
    block_m: int = 32
    block_n: int = 64
    half: str = "f16"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def outputs(self) -> int:
        """Elements of a row of the result."""
        return self.hidden_dim if self.output_dim is None else self.output_dim

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows. Raises ValueError for more than the 65,535 blocks of rows that fit a grid."""
        return _grid(self, rows)


@dataclass(frozen=True)
class NormLinearConfig:
    """A norm and a linear layer that also return what their backward needs.

    kind: "rms" or "layer". norm_weight, norm_bias: whether the norm has them. The others: `LayerNormLinearConfig`.
    """

    hidden_dim: int
    output_dim: int | None = None
    kind: str = "rms"
    use_half: bool = False
    bias: bool = True
    norm_weight: bool = True
    norm_bias: bool = False
    block_m: int = 32
    block_n: int = 64
    half: str = "f16"

    def __post_init__(self) -> None:
        _check(self)
        checks.flags(self, "norm_weight", "norm_bias")
        checks.one_of(self, "kind", "rms", "layer")
        if self.kind == "rms" and self.norm_bias:
            checks.fail(self, "an RMS norm has no bias")

    @property
    def outputs(self) -> int:
        """Elements of a row of the result."""
        return self.hidden_dim if self.output_dim is None else self.output_dim

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows, as `LayerNormLinearConfig.grid` has it."""
        return _grid(self, rows)


def _check(config: LayerNormLinearConfig | NormLinearConfig) -> None:
    checks.positive(config, "hidden_dim")
    if config.output_dim is not None:
        checks.positive(config, "output_dim")
    checks.flags(config, "use_half", "bias")
    checks.one_of(config, "block_m", 16, 32, 64, 128)
    checks.one_of(config, "block_n", 16, 32, 64, 128)
    checks.half(config)


def _grid(config: LayerNormLinearConfig | NormLinearConfig, rows: int) -> tuple[int, int, int]:
    checks.counts(config, rows=rows)
    blocks = -(-rows // config.block_m)
    if blocks > MAX_GROUPS:
        checks.fail(config, f"{rows:,} rows are more than {MAX_GROUPS * config.block_m:,}; launch them in parts")
    return (-(-config.outputs // config.block_n), blocks, 1)


@checks.builds_from(LayerNormLinearConfig)
def create_layer_norm_linear_kernel(config: LayerNormLinearConfig) -> KernelIR:
    """y = n · weightᵀ + bias, with n = layer_norm(x) · norm_weight + norm_bias, rounded to x's type.

    Tensors x: [rows, hidden_dim]; norm_weight, norm_bias: [hidden_dim]; weight: [output_dim, hidden_dim]; bias:
    [output_dim], if configured; y: [rows, output_dim]; all contiguous. Scalars: rows, eps. Grid: `config.grid(rows)`.
    """
    scalar = stored_scalar(config)
    stored = vector(scalar, vector_lanes(config.hidden_dim))
    body, threads = _body(config, layer=True)

    def layer_norm_linear(
        x: In[stored],
        norm_weight: In[stored],
        norm_bias: In[stored],
        weight: In[stored],
        bias: In[scalar] if config.bias else None,
        y: Out[scalar],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        body(x, norm_weight, norm_bias, weight, bias, y, None, None, rows, eps, None)

    return build(layer_norm_linear, (threads, 1, 1))


@checks.builds_from(NormLinearConfig)
def create_norm_linear_kernel(config: NormLinearConfig) -> KernelIR:
    """y = n · weightᵀ + bias, with n the norm of x, rounded to x's type.

    Tensors: as `create_layer_norm_linear_kernel`, but norm_weight and norm_bias are f32, and there as configured; after
    y mean (for "layer") and rstd, f32 [rows]. Scalars: rows, eps, and for "rms" with a weight offset, which is added to
    it. Grid: `config.grid(rows)`.
    """
    scalar, lanes, layer = stored_scalar(config), vector_lanes(config.hidden_dim), config.kind == "layer"
    stored, wide = vector(scalar, lanes), vector(f32, lanes)
    body, threads = _body(config, layer)

    def norm_linear(
        x: In[stored],
        norm_weight: In[wide] if config.norm_weight else None,
        norm_bias: In[wide] if config.norm_bias else None,
        weight: In[stored],
        bias: In[scalar] if config.bias else None,
        y: Out[scalar],
        mean: Out[f32] if layer else None,
        rstd: Out[f32],
        rows: Scalar[u32],
        eps: Scalar[f32],
        offset: Scalar[f32] if config.norm_weight and not layer else None,
    ):
        body(x, norm_weight, norm_bias, weight, bias, y, mean, rstd, rows, eps, offset)

    return build(norm_linear, (threads, 1, 1))


def _body(config: LayerNormLinearConfig | NormLinearConfig, layer: bool):
    """The body of both kernels, whose arguments may be None where there is nothing, and its threads."""
    columns, outputs, bm, bn = config.hidden_dim, config.outputs, config.block_m, config.block_n
    lanes, scalar = vector_lanes(columns), stored_scalar(config)
    wide, stored = vector(f32, lanes), vector(scalar, lanes)
    vectors, depth = columns // lanes, _DEPTH // lanes  # of a row, of a stage
    tx, ty = bn // _OWN, bm // _OWN
    threads = tx * ty
    helpers = threads // bm  # threads that share a row's statistics
    stride = depth + (1 if lanes == 4 else 2 if lanes == 2 else 4)  # rows start in different banks

    @inline
    def statistics(x, mean, rstd, stage, m0, rows, eps):
        """The mean (0 for an RMS norm) and 1 / deviation of the workgroup's rows, the variance around the mean."""
        t = tid(0)
        start = min(m0 + t // helpers, rows - 1) * vectors
        middle = 0.0
        if layer:
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
    def body(x, norm_weight, norm_bias, weight, bias, y, means, rstds, rows, eps, offset):
        xs, ws = shared(wide, bm * stride), shared(wide, bn * stride)
        mean, rstd, stage = shared(f32, bm), shared(f32, bm), shared(f32, threads)
        t, m0, n0 = tid(0), gid(1) * bm, gid(0) * bn
        statistics(x, mean, rstd, stage, m0, rows, eps)
        if rstds is not None:
            barrier()
            if gid(0) == 0 and t < bm and m0 + t < rows:
                rstds[m0 + t] = rstd[t]
                if means is not None:
                    means[m0 + t] = mean[t]
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
                    v = (v - mean[r]) * rstd[r]
                    if norm_weight is not None:
                        w = wide(norm_weight[i])
                        if offset is not None:
                            w = w + offset
                        v = v * w
                    if norm_bias is not None:
                        v = v + wide(norm_bias[i])
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

    return body, threads
