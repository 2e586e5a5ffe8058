"""Gradients of RMS norm and layer norm over rows: of the rows, and sums over rows for weight and bias."""

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
    shared,
    tid,
    type_named,
    u32,
    unroll,
    vector,
)
from tilesmith.kernels import checks
from tilesmith.kernels.rows import Rows, across, group_index, row_sum

_TYPES = ("f32", "f16", "bf16")
_KEPT = 16  # elements a thread keeps of a row of f32; twice as many of 16 bits


@dataclass(frozen=True)
class NormVjpConfig:
    """The gradient of a norm over rows of `hidden_dim` elements.

    kind: "rms" or "layer". x, dy, ds, weight: the type of these tensors' elements, as in `NormConfig`; ds, a gradient
    of x that is added, and weight may be None. dx, dweight, dbias: whether that gradient is wanted. subgroup: see
    `NormConfig`.
    """

    hidden_dim: int
    kind: str = "rms"
    x: str = "f32"
    dy: str = "f32"
    ds: str | None = None
    weight: str | None = "f32"
    dx: bool = True
    dweight: bool = True
    dbias: bool = False
    workgroup_size: int = 256
    subgroup: int | None = None

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.one_of(self, "kind", "rms", "layer")
        for field in ("x", "dy"):
            checks.one_of(self, field, *_TYPES)
        for field in ("ds", "weight"):
            checks.one_of(self, field, None, *_TYPES)
        checks.flags(self, "dx", "dweight", "dbias")
        checks.workgroup(self)
        checks.subgroup(self)

    @property
    def plan(self) -> Rows:
        """How the rows are shared out."""
        return Rows.of(self.hidden_dim, self.workgroup_size, type_named(self.x), subgroup=self.subgroup)

    @property
    def keep(self) -> bool:
        """Whether a thread's part of a row, of its gradient and of both sums fit registers."""
        most = _KEPT if "f32" in (self.x, self.dy) else 2 * _KEPT
        return self.plan.count * self.plan.lanes <= most


@checks.builds_from(NormVjpConfig)
def create_norm_vjp_kernel(config: NormVjpConfig) -> KernelIR:
    """dx = (d - mean(d) - xhat · mean(d · xhat)) · rstd + ds, with d = dy · (weight + offset); "rms" has no mean(d).

    Tensors x, dy, ds: [rows, hidden_dim], rows x_step, dy_step and ds_step apart, as in `create_norm_kernel`; weight:
    [hidden_dim]; mean (for "layer") and rstd: f32 [rows]; dx: as x, contiguous; dweights and dbiases: f32 [parts,
    hidden_dim], sums of dy · xhat and dy over some of the rows each, which add up to the gradients, and begin as 0
    unless `config.keep`. Scalars: rows, parts (workgroups times `config.plan.rows`), offset (with a weight, for "rms"),
    the steps. Grid: any (n, 1, 1).
    """
    plan, layer = config.plan, config.kind == "layer"
    stored, wide, lanes = plan.stored, plan.wide, plan.lanes
    incoming, added, scaled = (
        None if name is None else vector(type_named(name), lanes) for name in (config.dy, config.ds, config.weight)
    )
    wants_dx, wants_weight, wants_bias = config.dx, config.dweight, config.dbias
    keep, sweep = config.keep, unroll if config.keep else range
    sums = Out[wide] if keep else InOut[wide]

    @inline
    def inside(i):
        return plan.exact or i < plan.vectors

    @inline
    def scaled_by(d, weight, offset, i):
        if weight is not None:
            w = wide(weight[i])
            if offset is not None:
                w = w + offset
            d = d * w
        return d

    def norm_vjp(
        x: In[stored],
        dy: In[incoming],
        ds: In[added] if added and wants_dx else None,
        weight: In[scaled] if scaled and wants_dx else None,
        mean: In[f32] if layer else None,
        rstd: In[f32],
        dx: Out[stored] if wants_dx else None,
        dweights: sums if wants_weight else None,
        dbiases: sums if wants_bias else None,
        rows: Scalar[u32],
        parts: Scalar[u32],
        offset: Scalar[f32] if scaled and wants_dx and not layer else None,
        x_step: Scalar[u32],
        dy_step: Scalar[u32],
        ds_step: Scalar[u32] if added and wants_dx else None,
    ):
        stage = shared(f32, plan.workgroup) if plan.stages else None
        t, slot = tid(0) % plan.threads, (group_index() * plan.rows + tid(0) // plan.threads) * plan.vectors
        kept, given = (local(stored, plan.count), local(incoming, plan.count)) if keep else (None, None)
        weights, biases = (local(wide, plan.count), local(wide, plan.count)) if keep else (None, None)
        if keep:
            for k in unroll(plan.count):
                weights[k] = wide(0)
                biases[k] = wide(0)
        for base in range(group_index() * plan.rows, rows, parts):
            row = base + tid(0) // plan.threads
            at = min(row, rows - 1)
            scale, middle = rstd[at], 0.0
            if mean is not None:
                middle = mean[at]
            alone, together = 0.0, 0.0
            if keep:  # all loads before the first use, which is behind a condition
                for k in unroll(plan.count):
                    i = t + k * plan.threads
                    if inside(i):
                        kept[k] = x[at * x_step + i]
                        given[k] = dy[at * dy_step + i]
            for k in sweep(plan.count):
                i = t + k * plan.threads
                if inside(i) and row < rows:
                    n = (wide(kept[k] if keep else x[at * x_step + i]) - middle) * scale
                    d = wide(given[k] if keep else dy[at * dy_step + i])
                    if wants_weight and keep:
                        weights[k] += d * n
                    if wants_weight and not keep:
                        dweights[slot + i] += d * n
                    if wants_bias and keep:
                        biases[k] += d
                    if wants_bias and not keep:
                        dbiases[slot + i] += d
                    if wants_dx:
                        d = scaled_by(d, weight, offset, i)
                        alone += across(d, lanes)
                        together += across(d * n, lanes)
            if wants_dx:
                together = row_sum(together, stage, plan.threads, plan.subgroup) / f32(plan.columns)
                if layer:
                    alone = row_sum(alone, stage, plan.threads, plan.subgroup) / f32(plan.columns)
                for k in sweep(plan.count):
                    i = t + k * plan.threads
                    if inside(i) and row < rows:
                        n = (wide(kept[k] if keep else x[at * x_step + i]) - middle) * scale
                        d = scaled_by(wide(given[k] if keep else dy[at * dy_step + i]), weight, offset, i)
                        d = d - n * together
                        if layer:
                            d = d - alone
                        d = d * scale
                        if ds is not None:
                            d = d + wide(ds[at * ds_step + i])
                        dx[at * plan.vectors + i] = stored(d)
        if keep:
            for k in unroll(plan.count):
                i = t + k * plan.threads
                if inside(i):
                    if dweights is not None:
                        dweights[slot + i] = weights[k]
                    if dbiases is not None:
                        dbiases[slot + i] = biases[k]

    return build(norm_vjp, (plan.workgroup, 1, 1), subgroup_size=config.subgroup)
