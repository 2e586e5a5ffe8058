"""Gated linear units: SwiGLU and GeGLU of a gate and an up projection, element by element."""

from dataclasses import dataclass

from tilesmith.codegen import In, KernelIR, Out, Scalar, build, f32, inline, local, tid, u32, unroll, vector
from tilesmith.kernels import checks
from tilesmith.kernels.functions import gelu_exact, gelu_tanh, silu
from tilesmith.kernels.rows import collected, flat_grid, group_index, placed, stored_scalar, vector_lanes

_VECTORS_A_THREAD = 4


@dataclass(frozen=True)
class SwiGLUConfig:
    """SwiGLU over rows of `hidden_dim` elements.

    use_half: gate, up and out have 16 bits an element, else f32; the arithmetic is f32. workgroup_size: threads of a
    workgroup. half: which 16 bits, "f16", or "bf16" where the target has it. strided: rows of gate and up lie at
    distances that the launch names, as halves of a packed projection do.
    """

    hidden_dim: int
    use_half: bool = False
    workgroup_size: int = 256
    half: str = "f16"
    strided: bool = False

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half", "strided")
        checks.workgroup(self)
        checks.half(self)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        checks.counts(self, rows=rows)
        return flat_grid(self, rows, _VECTORS_A_THREAD)


@dataclass(frozen=True)
class GeGLUConfig:
    """GeGLU over rows of `hidden_dim` elements.

    approximate: "tanh", or "none" for the exact GELU. The others: see `SwiGLUConfig`.
    """

    hidden_dim: int
    use_half: bool = False
    approximate: str = "tanh"
    workgroup_size: int = 256
    half: str = "f16"
    strided: bool = False

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.flags(self, "use_half", "strided")
        checks.one_of(self, "approximate", "none", "tanh")
        checks.workgroup(self)
        checks.half(self)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        checks.counts(self, rows=rows)
        return flat_grid(self, rows, _VECTORS_A_THREAD)


@checks.builds_from(SwiGLUConfig)
def create_swiglu_kernel(config: SwiGLUConfig) -> KernelIR:
    """out = silu(gate) · up, with silu(x) = x · sigmoid(x).

    Tensors gate, up, out: [rows, hidden_dim], contiguous. Scalars: rows. Grid: `config.grid(rows)`. Rounded once.
    With `strided` also the scalars gate_step and up_step: from one row to the next, in vectors of the widest of 4, 2
    and 1 elements that divides hidden_dim.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    return _gated(config, silu, whole=True)


@checks.builds_from(GeGLUConfig)
def create_geglu_kernel(config: GeGLUConfig) -> KernelIR:
    """out = gelu(gate) · up, with the GELU that `config.approximate` names.

    Tensors, scalars, grid and rounding: as `create_swiglu_kernel`.

    Source: as `create_swiglu_kernel`; Hendrycks and Gimpel, arXiv:1606.08415.
    """
    exact = config.approximate == "none"
    return _gated(config, gelu_exact if exact else gelu_tanh, whole=not exact)


def _gated(config: SwiGLUConfig | GeGLUConfig, activation, whole: bool) -> KernelIR:
    """`activation` takes a vector where `whole`, else one lane."""
    lanes = vector_lanes(config.hidden_dim)
    wide, stored = vector(f32, lanes), vector(stored_scalar(config), lanes)
    threads, a_row, strided = config.workgroup_size, config.hidden_dim // lanes, config.strided

    @inline
    def activated(x):
        return activation(x) if whole else collected(wide, [activation(x[k]) for k in range(lanes)])

    def swiglu(
        gate: In[stored],
        up: In[stored],
        out: Out[stored],
        rows: Scalar[u32],
        gate_step: Scalar[u32] if strided else None,
        up_step: Scalar[u32] if strided else None,
    ):
        first = group_index() * (threads * _VECTORS_A_THREAD)
        gates, ups = local(stored, _VECTORS_A_THREAD), local(stored, _VECTORS_A_THREAD)
        if first + (threads * _VECTORS_A_THREAD - 1) < rows * a_row:  # one more may be 2**32
            for k in unroll(_VECTORS_A_THREAD):  # all loads before the first store, so that all are in flight
                gates[k] = gate[placed(first + tid(0) + k * threads, a_row, gate_step)]
                ups[k] = up[placed(first + tid(0) + k * threads, a_row, up_step)]
            for k in unroll(_VECTORS_A_THREAD):
                out[first + tid(0) + k * threads] = stored(activated(wide(gates[k])) * wide(ups[k]))
        else:
            for k in unroll(_VECTORS_A_THREAD):
                i = first + tid(0) + k * threads
                if i < rows * a_row:
                    opened = activated(wide(gate[placed(i, a_row, gate_step)]))
                    out[i] = stored(opened * wide(up[placed(i, a_row, up_step)]))

    name = "swiglu" if isinstance(config, SwiGLUConfig) else "geglu"
    return build(swiglu, (threads, 1, 1), name=name)
