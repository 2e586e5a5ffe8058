"""RMS norm and layer norm over rows, of a sum with a residual or of x itself."""

from dataclasses import dataclass

from tilesmith.codegen import (
    In,
    InOut,
    KernelIR,
    Out,
    Scalar,
    build,
    f32,
    inline,
    local,
    rsqrt,
    shared,
    type_named,
    u32,
    unroll,
    vector,
)
from tilesmith.kernels import checks
from tilesmith.kernels.rows import BATCH, Rows, across, again, row_of_thread, row_sum, stored_scalar

_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class ResidualLayerNormConfig:
    """Residual and layer norm over rows of `hidden_dim` elements.

    placement: "pre" also returns the sum, which a pre-norm transformer carries on; "post" returns the norm alone.
    use_half: tensors have 16 bits an element, else f32; the arithmetic is f32. workgroup_size: threads of a workgroup.
    half: which 16 bits, "f16", or "bf16" where the target has it.
    """

    hidden_dim: int
    use_half: bool = False
    placement: str = "pre"
    workgroup_size: int = 256
    half: str = "f16"

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half")
        checks.one_of(self, "placement", "pre", "post")
        checks.workgroup(self)
        checks.half(self)

    @property
    def plan(self) -> Rows:
        """How the rows are shared out."""
        return Rows.of(self.hidden_dim, self.workgroup_size, stored_scalar(self), most=self._kept)

    @property
    def _kept(self) -> int:
        # 1,024 threads have 64 registers each, of which rows of 131,072 bytes leave too few for two tensors
        return 65_536 if self.workgroup_size == 1024 else 131_072

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        checks.counts(self, rows=rows)
        return self.plan.grid(rows)


@dataclass(frozen=True)
class NormConfig:
    """A norm over rows of `hidden_dim` elements that also returns what its backward needs.

    kind: "rms" or "layer". x, residual, weight, bias: the type of these tensors' elements, "f32", "f16", or "bf16"
    where the target has it; None where there is no such tensor. casting: for "rms", where "llama" rounds before the
    weight, "fp32" once at the end. workgroup_size: threads of a workgroup. kept: bytes of rows that these hold in
    registers; of more, rows are read twice. subgroup: threads of the device's subgroups, which then add up their own
    numbers; None: any number.
    """

    hidden_dim: int
    kind: str = "rms"
    x: str = "f32"
    residual: str | None = None
    weight: str | None = "f32"
    bias: str | None = None
    casting: str = "fp32"
    workgroup_size: int = 256
    kept: int = 131_072
    subgroup: int | None = None

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim", "kept")
        checks.one_of(self, "kind", "rms", "layer")
        checks.one_of(self, "x", *_TYPES)
        for field in ("residual", "weight", "bias"):
            checks.one_of(self, field, None, *_TYPES)
        checks.one_of(self, "casting", "fp32", "llama")
        if self.kind == "rms" and self.bias is not None:
            checks.fail(self, "an RMS norm has no bias")
        checks.workgroup(self)
        checks.subgroup(self)

    @property
    def plan(self) -> Rows:
        """How the rows are shared out."""
        scalar = type_named(self.x)
        return Rows.of(self.hidden_dim, self.workgroup_size, scalar, most=self.kept, subgroup=self.subgroup)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        checks.counts(self, rows=rows)
        return self.plan.grid(rows)


@checks.builds_from(ResidualLayerNormConfig)
def create_residual_layer_norm_kernel(config: ResidualLayerNormConfig) -> KernelIR:
    """y = layer_norm(s) · weight + bias, with s = x + residual, rounded to their type before it is normalised.

    Tensors x, residual, y: [rows, hidden_dim], contiguous; weight, bias: [hidden_dim]; for "pre" also sum, as y, which
    takes s. Scalars: rows, eps. Grid: `config.grid(rows)`. The variance is taken around the mean.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450; Xiong et al., arXiv:2002.04745, for the placement.
    """
    stored, a_row, pre = config.plan.stored, config.plan.vectors, config.placement == "pre"
    name = stored.dtype
    norm = _norm(
        NormConfig(config.hidden_dim, "layer", name, name, name, name, "fp32", config.workgroup_size, config._kept)
    )
    written = Out if config.plan.keep else InOut  # rows that are not kept are read again from the sum

    def residual_layer_norm(
        x: In[stored],
        residual: In[stored],
        weight: In[stored],
        bias: In[stored],
        y: Out[stored],
        sum: written[stored] if pre else None,
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        norm(x, residual, weight, bias, y, sum, None, None, rows, eps, None, a_row, a_row)

    return build(residual_layer_norm, (config.plan.workgroup, 1, 1), name=f"residual_layer_norm_{config.placement}")


@checks.builds_from(NormConfig)
def create_norm_kernel(config: NormConfig) -> KernelIR:
    """y = s · rstd · (weight + offset), or (s - mean) · rstd · weight + bias, with s = x or x + residual.

    Tensors x, residual: [rows, hidden_dim], rows x_step and residual_step apart, counted in vectors of the widest of 4,
    2 and 1 elements that divides hidden_dim; weight, bias: [hidden_dim]; y: [rows, hidden_dim] of x's type, contiguous;
    sum: as y, of residual's type, takes s, which is rounded before it is normalised; mean (for "layer") and rstd: f32
    [rows]. Scalars: rows, eps, offset (for "rms" with a weight), x_step, residual_step. Grid: `config.grid(rows)`.

    Source: Zhang and Sennrich, arXiv:1910.07467; Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    layer = config.kind == "layer"
    stored, added, scaled, shifted = (
        None if name is None else vector(type_named(name), config.plan.lanes)
        for name in (config.x, config.residual, config.weight, config.bias)
    )
    norm = _norm(config)
    written = Out if config.plan.keep else InOut  # rows that are not kept are read again from the sum

    def norm_rows(
        x: In[stored],
        residual: In[added] if added else None,
        weight: In[scaled] if scaled else None,
        bias: In[shifted] if shifted else None,
        y: Out[stored],
        sum: written[added] if added else None,
        mean: Out[f32] if layer else None,
        rstd: Out[f32],
        rows: Scalar[u32],
        eps: Scalar[f32],
        offset: Scalar[f32] if scaled and not layer else None,
        x_step: Scalar[u32],
        residual_step: Scalar[u32] if added else None,
    ):
        norm(x, residual, weight, bias, y, sum, mean, rstd, rows, eps, offset, x_step, residual_step)

    return build(norm_rows, (config.plan.workgroup, 1, 1), subgroup_size=config.subgroup, name=f"{config.kind}_norm")


def _norm(config: NormConfig):
    """The body of a norm; arguments that it has no use for are None."""
    plan, layer, llama = config.plan, config.kind == "layer", config.casting == "llama"
    stored, wide, lanes, sweep = plan.stored, plan.wide, plan.lanes, plan.sweep
    added = stored if config.residual is None else vector(type_named(config.residual), lanes)
    factor = stored if config.weight == config.x else wide  # what weight + offset is rounded to, for "llama"

    @inline
    def read(x, residual, start, beside, i):
        """Vector i of s, as it is stored."""
        if residual is not None:
            s = added(wide(x[start + i]) + wide(residual[beside + i]))
        else:
            s = x[start + i]
        return s

    @inline
    def norm(x, residual, weight, bias, y, sum, mean, rstd, rows, eps, offset, x_step, residual_step):
        stage = shared(f32, plan.workgroup) if plan.stages else None
        kept = local(added, plan.count) if plan.keep else None
        row, at, t = row_of_thread(plan, rows)
        start, beside, place = at * x_step, at * residual_step if residual is not None else None, at * plan.vectors
        total, middle = 0.0, 0.0
        if plan.keep:
            for k in unroll(plan.count):
                i = t + k * plan.threads
                if plan.exact or i < plan.vectors:
                    kept[k] = read(x, residual, start, beside, i)
            for k in unroll(plan.count):
                if plan.exact or t + k * plan.threads < plan.vectors:
                    v = wide(kept[k])
                    total += across(v if layer else v * v, lanes)
            if sum is not None and row < rows:
                for k in unroll(plan.count):
                    i = t + k * plan.threads
                    if plan.exact or i < plan.vectors:
                        sum[place + i] = kept[k]
            if layer:
                middle = row_sum(total, stage, plan.threads, plan.subgroup) / f32(plan.columns)
                total = 0.0
                for k in unroll(plan.count):
                    i = t + k * plan.threads
                    if plan.exact or i < plan.vectors:
                        off = wide(kept[k]) - middle
                        total += across(off * off, lanes)
        else:
            mean_of_mine, many = 0.0, 0.0
            for first in range(0, plan.count, BATCH):
                batch = local(added, BATCH)
                part, size = 0.0, 0.0
                for k in unroll(BATCH):
                    i = t + (first + k) * plan.threads
                    if plan.whole or i < plan.vectors:
                        batch[k] = read(x, residual, start, beside, i)
                for k in unroll(BATCH):
                    if plan.whole or t + (first + k) * plan.threads < plan.vectors:
                        v = wide(batch[k])
                        part += across(v if layer else v * v, lanes)
                        size += f32(lanes)
                if sum is not None and row < rows:
                    for k in unroll(BATCH):
                        i = t + (first + k) * plan.threads
                        if plan.whole or i < plan.vectors:
                            sum[place + i] = batch[k]
                if layer:
                    own, squares = part / max(size, 1.0), 0.0
                    for k in unroll(BATCH):
                        if plan.whole or t + (first + k) * plan.threads < plan.vectors:
                            off = wide(batch[k]) - own
                            squares += across(off * off, lanes)
                    # two samples' squares around their common mean (Chan, Golub and LeVeque, 1979)
                    gap, share = own - mean_of_mine, size / max(many + size, 1.0)
                    total += squares + gap * gap * many * share
                    mean_of_mine += gap * share
                    many += size
                else:
                    total += part
            if layer:
                middle = row_sum(mean_of_mine * many, stage, plan.threads, plan.subgroup) / f32(plan.columns)
                gap = mean_of_mine - middle
                total += gap * gap * many
        total = row_sum(total, stage, plan.threads, plan.subgroup) / f32(plan.columns)
        scale = rsqrt(total + eps)
        if rstd is not None and t == 0 and row < rows:
            rstd[row] = scale
            if layer:
                mean[row] = middle
        if row < rows:  # around all, so that no load stays behind another vector's store
            for k in sweep(plan.count):
                i = t + again(plan, k) * plan.threads
                if plan.exact or i < plan.vectors:
                    if plan.keep:
                        s = kept[k]
                    else:
                        s = read(x, residual, start, beside, i) if sum is None else sum[place + i]
                    v = wide(s)
                    n = (v - middle) * scale if layer else v * scale
                    if llama:
                        n = wide(stored(n))
                    if weight is not None:
                        w = wide(weight[i])
                        if offset is not None:
                            w = w + offset
                        n = n * (wide(factor(w)) if llama else w)
                    if bias is not None:
                        n = n + wide(bias[i])
                    y[place + i] = stored(n)

    return norm
