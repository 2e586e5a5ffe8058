"""Norms fused with their neighbours: layer norm after a residual, RMS norm before rotary embedding."""

from dataclasses import dataclass

from tilesmith.codegen import In, KernelIR, Out, Scalar, build, f16, f32, inline, local, rsqrt, shared, u32, vector
from tilesmith.kernels import checks
from tilesmith.kernels.rows import Rows, across, row_of_thread, row_sum


@dataclass(frozen=True)
class ResidualLayerNormConfig:
    """Residual and layer norm over rows of `hidden_dim` elements.

    placement: "pre" also returns the sum, which a pre-norm transformer carries on; "post" returns the norm alone.
    use_half: tensors are f16, else f32; the arithmetic is f32. workgroup_size: threads of a workgroup.
    """

    hidden_dim: int
    use_half: bool = False
    placement: str = "pre"
    workgroup_size: int = 256

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half")
        checks.one_of(self, "placement", "pre", "post")
        checks.workgroup(self)

    @property
    def plan(self) -> Rows:
        """How the rows are shared out."""
        return Rows.of(self.hidden_dim, self.workgroup_size, self.use_half)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        return self.plan.grid(rows)


@dataclass(frozen=True)
class RMSNormRoPEConfig:
    """RMS norm and rotary embedding of tokens of `hidden_dim` elements, which are heads of `head_dim`.

    max_seq_len: positions that the tables hold. norm_dim: "row" normalises the whole token, as the seed of this
    library does; "head" each head by itself (QK-norm). interleaved: neighbours form a pair (GPT-J), else the two halves
    of a head (GPT-NeoX, Llama). use_half: x, weight and y are f16, else f32; tables and arithmetic are f32.
    """

    hidden_dim: int
    head_dim: int
    max_seq_len: int
    use_half: bool = False
    norm_dim: str = "row"
    interleaved: bool = False
    workgroup_size: int = 256

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim", "head_dim", "max_seq_len")
        checks.flags(self, "use_half", "interleaved")
        checks.one_of(self, "norm_dim", "row", "head")
        checks.workgroup(self)
        if self.head_dim % 2:
            checks.fail(self, f"head_dim must be even, since features turn in pairs; got {self.head_dim}")
        if self.hidden_dim % self.head_dim:
            checks.fail(self, f"hidden_dim {self.hidden_dim} is not a multiple of head_dim {self.head_dim}")

    @property
    def normed(self) -> int:
        """Elements that are normalised together."""
        return self.hidden_dim if self.norm_dim == "row" else self.head_dim

    @property
    def plan(self) -> Rows:
        """How the pairs of features are shared out: a vector of first ones goes with one of second ones."""
        pairs, half = self.normed // 2, self.head_dim // 2
        lanes = 1 if self.interleaved else 4 if half % 4 == 0 else 2 if half % 2 == 0 else 1
        return Rows.of(pairs, self.workgroup_size, self.use_half, lanes)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` tokens."""
        return self.plan.grid(rows * (self.hidden_dim // self.normed))


def create_residual_layer_norm_kernel(config: ResidualLayerNormConfig) -> KernelIR:
    """y = layer_norm(s) · weight + bias, with s = x + residual, rounded to their type before it is normalised.

    Tensors x, residual, y: [rows, hidden_dim], contiguous; weight, bias: [hidden_dim]; for "pre" also sum, as y, which
    takes s. Scalars: rows, eps. Grid: `config.grid(rows)`. The variance is taken around the mean.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450; Xiong et al., arXiv:2002.04745, for the placement.
    """
    checks.a(config, ResidualLayerNormConfig)
    plan = config.plan
    stored, wide, lanes, sweep = plan.stored, plan.wide, plan.lanes, plan.sweep

    @inline
    def norm(x, residual, weight, bias, y, sum, rows, eps):
        stage = shared(f32, plan.workgroup)
        kept = local(wide, plan.count) if plan.keep else None
        row, at, t = row_of_thread(plan, rows)
        start = at * plan.vectors
        total = 0.0
        for k in sweep(plan.count):
            i = t + k * plan.threads
            if plan.exact or i < plan.vectors:
                s = stored(wide(x[start + i]) + wide(residual[start + i]))
                if plan.keep:
                    kept[k] = wide(s)
                if sum is not None and row < rows:
                    sum[start + i] = s
                total += across(wide(s), lanes)
        mean = row_sum(total, stage, plan.threads) / f32(plan.columns)
        squares = 0.0
        for k in sweep(plan.count):
            i = t + k * plan.threads
            if plan.exact or i < plan.vectors:
                v = kept[k] if plan.keep else wide(stored(wide(x[start + i]) + wide(residual[start + i])))
                off = v - mean
                squares += across(off * off, lanes)
        rstd = rsqrt(row_sum(squares, stage, plan.threads) / f32(plan.columns) + eps)
        for k in sweep(plan.count):
            i = t + k * plan.threads
            if row < rows and (plan.exact or i < plan.vectors):
                v = kept[k] if plan.keep else wide(stored(wide(x[start + i]) + wide(residual[start + i])))
                y[start + i] = stored((v - mean) * rstd * wide(weight[i]) + wide(bias[i]))

    def pre(
        x: In[stored],
        residual: In[stored],
        weight: In[stored],
        bias: In[stored],
        y: Out[stored],
        sum: Out[stored],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        norm(x, residual, weight, bias, y, sum, rows, eps)

    def post(
        x: In[stored],
        residual: In[stored],
        weight: In[stored],
        bias: In[stored],
        y: Out[stored],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        norm(x, residual, weight, bias, y, None, rows, eps)

    return build(
        pre if config.placement == "pre" else post,
        (plan.workgroup, 1, 1),
        name=f"residual_layer_norm_{config.placement}",
    )


def create_rms_norm_rope_kernel(config: RMSNormRoPEConfig) -> KernelIR:
    """y = rope(rms_norm(x) · weight): a pair (a, b) becomes (a cos - b sin, b cos + a sin). Rounded once.

    Tensors x, y: [rows, hidden_dim], contiguous, a row being a token; weight: [hidden_dim], for norm_dim "head"
    [head_dim]; cos, sin: f32 [max_seq_len, head_dim / 2]; positions: u32 [rows]. A position past the tables reads their
    last row. Scalars: rows, eps. Grid: `config.grid(rows)`.

    Source: Zhang and Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864.
    """
    checks.a(config, RMSNormRoPEConfig)
    plan, interleaved = config.plan, config.interleaved
    wide, two, sweep = plan.wide, vector(f32, 2), plan.sweep
    stored = vector(f16 if config.use_half else f32, 2 if interleaved else plan.lanes)
    half = config.head_dim // 2 // plan.lanes  # pairs a head, in vectors
    length = plan.vectors if interleaved else 2 * plan.vectors
    parts = config.hidden_dim // config.normed

    @inline
    def pair_at(buffer, start, p):
        if interleaved:
            both = two(buffer[start + p])
            first, second = both.x, both.y
        else:
            place = start + p // half * (2 * half) + p % half
            first, second = wide(buffer[place]), wide(buffer[place + half])
        return first, second

    def rms_norm_rope(
        x: In[stored],
        weight: In[stored],
        cos: In[wide],
        sin: In[wide],
        positions: In[u32],
        y: Out[stored],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        stage = shared(f32, plan.workgroup)
        kept = local(wide, 2 * plan.count) if plan.keep else None
        part, at, t = row_of_thread(plan, rows * parts)
        start = at * length
        total = 0.0
        for k in sweep(plan.count):
            p = t + k * plan.threads
            if plan.exact or p < plan.vectors:
                a, b = pair_at(x, start, p)
                if plan.keep:
                    kept[2 * k] = a
                    kept[2 * k + 1] = b
                total += across(a * a + b * b, plan.lanes)
        rstd = rsqrt(row_sum(total, stage, plan.threads) / f32(config.normed) + eps)
        angles = min(positions[at // parts], config.max_seq_len - 1) * half
        for k in sweep(plan.count):
            p = t + k * plan.threads
            if part < rows * parts and (plan.exact or p < plan.vectors):
                if plan.keep:
                    a, b = kept[2 * k], kept[2 * k + 1]
                else:
                    a, b = pair_at(x, start, p)
                wa, wb = pair_at(weight, u32(0), p)
                c, s = cos[angles + p % half], sin[angles + p % half]
                a, b = a * rstd * wa, b * rstd * wb
                first, second = a * c - b * s, b * c + a * s
                if interleaved:
                    y[start + p] = stored(two(first, second))
                else:
                    place = start + p // half * (2 * half) + p % half
                    y[place] = stored(first)
                    y[place + half] = stored(second)

    return build(rms_norm_rope, (plan.workgroup, 1, 1))
