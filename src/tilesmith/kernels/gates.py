"""Gated linear units: SwiGLU and GeGLU of a gate and an up projection, element by element."""

from dataclasses import dataclass

from tilesmith.codegen import In, KernelIR, Out, Scalar, build, f16, f32, inline, local, tid, u32, unroll, vector
from tilesmith.kernels import checks
from tilesmith.kernels.functions import gelu_exact, gelu_tanh, silu
from tilesmith.kernels.rows import collected, folded, group_index, vector_lanes

_VECTORS_A_THREAD = 4


@dataclass(frozen=True)
class SwiGLUConfig:
    """SwiGLU over rows of `hidden_dim` elements.

    use_half: gate, up and out are f16, else f32; the arithmetic is f32. workgroup_size: threads of a workgroup.
    """

    hidden_dim: int
    use_half: bool = False
    workgroup_size: int = 256

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half")
        checks.workgroup(self)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        return _grid(self, rows)


@dataclass(frozen=True)
class GeGLUConfig:
    """GeGLU over rows of `hidden_dim` elements.

    use_half, workgroup_size: see `SwiGLUConfig`. approximate: "tanh", or "none" for the exact GELU.
    """

    hidden_dim: int
    use_half: bool = False
    approximate: str = "tanh"
    workgroup_size: int = 256

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half")
        checks.one_of(self, "approximate", "none", "tanh")
        checks.workgroup(self)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        return _grid(self, rows)


def create_swiglu_kernel(config: SwiGLUConfig) -> KernelIR:
    """out = silu(gate) · up, with silu(x) = x · sigmoid(x).

    Tensors gate, up, out: [rows, hidden_dim], contiguous. Scalars: rows. Grid: `config.grid(rows)`. Rounded once.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    checks.a(config, SwiGLUConfig)
    return _gated(config, silu, whole=True)


def create_geglu_kernel(config: GeGLUConfig) -> KernelIR:
    """out = gelu(gate) · up, with the GELU that `config.approximate` names.

    Tensors gate, up, out: [rows, hidden_dim], contiguous. Scalars: rows. Grid: `config.grid(rows)`. Rounded once.

    Source: as `create_swiglu_kernel`; Hendrycks and Gimpel, arXiv:1606.08415.
    """
    checks.a(config, GeGLUConfig)
    exact = config.approximate == "none"
    return _gated(config, gelu_exact if exact else gelu_tanh, whole=not exact)


def _grid(config: SwiGLUConfig | GeGLUConfig, rows: int) -> tuple[int, int, int]:
    vectors = rows * (config.hidden_dim // vector_lanes(config.hidden_dim))
    return folded(-(-vectors // (config.workgroup_size * _VECTORS_A_THREAD)))


def _gated(config: SwiGLUConfig | GeGLUConfig, activation, whole: bool) -> KernelIR:
    """`activation` takes a vector where `whole`, else one lane."""
    lanes = vector_lanes(config.hidden_dim)
    wide, stored = vector(f32, lanes), vector(f16 if config.use_half else f32, lanes)
    threads, a_row = config.workgroup_size, config.hidden_dim // lanes

    @inline
    def activated(x):
        return activation(x) if whole else collected(wide, [activation(x[k]) for k in range(lanes)])

    def swiglu(gate: In[stored], up: In[stored], out: Out[stored], rows: Scalar[u32]):
        first = group_index() * (threads * _VECTORS_A_THREAD)
        gates, ups = local(stored, _VECTORS_A_THREAD), local(stored, _VECTORS_A_THREAD)
        if first + threads * _VECTORS_A_THREAD <= rows * a_row:
            for k in unroll(_VECTORS_A_THREAD):  # all loads before the first store, so that all are in flight
                gates[k] = gate[first + tid(0) + k * threads]
                ups[k] = up[first + tid(0) + k * threads]
            for k in unroll(_VECTORS_A_THREAD):
                out[first + tid(0) + k * threads] = stored(activated(wide(gates[k])) * wide(ups[k]))
        else:
            for i in range(first + tid(0), rows * a_row, threads):
                out[i] = stored(activated(wide(gate[i])) * wide(up[i]))

    name = "swiglu" if isinstance(config, SwiGLUConfig) else "geglu"
    return build(swiglu, (threads, 1, 1), name=name)
