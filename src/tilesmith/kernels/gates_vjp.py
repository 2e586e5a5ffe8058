"""Gradients of the gated linear units, element by element."""

from dataclasses import dataclass

from tilesmith.codegen import In, KernelIR, Out, Scalar, build, f32, inline, tid, u32, unroll, vector
from tilesmith.kernels import checks
from tilesmith.kernels.functions import gelu_exact_and_slope, gelu_tanh_and_slope, silu_and_slope
from tilesmith.kernels.rows import collected, flat_grid, group_index, placed, stored_scalar, vector_lanes

_VECTORS_A_THREAD = 2
_ACTIVATIONS = {"silu": silu_and_slope, "gelu_tanh": gelu_tanh_and_slope, "gelu": gelu_exact_and_slope}


@dataclass(frozen=True)
class GatedVjpConfig:
    """The gradient of activation(gate) · up over rows of `hidden_dim` elements.

    activation: "silu", "gelu_tanh" or "gelu". gate, up: whether that gradient is wanted. use_half, half, strided,
    workgroup_size: see `SwiGLUConfig`.
    """

    hidden_dim: int
    activation: str = "silu"
    gate: bool = True
    up: bool = True
    use_half: bool = False
    half: str = "f16"
    strided: bool = False
    workgroup_size: int = 256

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim")
        checks.one_of(self, "activation", *_ACTIVATIONS)
        checks.flags(self, "gate", "up", "use_half", "strided")
        checks.half(self)
        checks.workgroup(self)
        if not (self.gate or self.up):
            checks.fail(self, "neither gradient is wanted")

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` rows."""
        checks.counts(self, rows=rows)
        return flat_grid(self, rows, _VECTORS_A_THREAD)


@checks.builds_from(GatedVjpConfig)
def create_gated_vjp_kernel(config: GatedVjpConfig) -> KernelIR:
    """dgate = dout · up · activation'(gate) and dup = dout · activation(gate), each where it is wanted; rounded once.

    Tensors dout, gate, up, dgate, dup: [rows, hidden_dim], contiguous. Scalars: rows; with `strided` also dout_step,
    gate_step and up_step, as in `create_swiglu_kernel`. Grid: `config.grid(rows)`.
    """
    lanes = vector_lanes(config.hidden_dim)
    wide, stored = vector(f32, lanes), vector(stored_scalar(config), lanes)
    threads, a_row, strided = config.workgroup_size, config.hidden_dim // lanes, config.strided
    activation, whole = _ACTIVATIONS[config.activation], config.activation != "gelu"
    step = Scalar[u32] if strided else None

    @inline
    def activated(x):
        if whole:
            value, slope = activation(x)
        else:
            pairs = [activation(x[k]) for k in range(lanes)]
            value, slope = collected(wide, [p[0] for p in pairs]), collected(wide, [p[1] for p in pairs])
        return value, slope

    def gated_vjp(
        dout: In[stored],
        gate: In[stored],
        up: In[stored] if config.gate else None,
        dgate: Out[stored] if config.gate else None,
        dup: Out[stored] if config.up else None,
        rows: Scalar[u32],
        dout_step: step,
        gate_step: step,
        up_step: step if config.gate else None,
    ):
        first = group_index() * (threads * _VECTORS_A_THREAD) + tid(0)
        for k in unroll(_VECTORS_A_THREAD):
            i = first + k * threads
            if i < rows * a_row:
                value, slope = activated(wide(gate[placed(i, a_row, gate_step)]))
                d = wide(dout[placed(i, a_row, dout_step)])
                if dgate is not None:
                    dgate[i] = stored(d * wide(up[placed(i, a_row, up_step)]) * slope)
                if dup is not None:
                    dup[i] = stored(d * value)

    return build(gated_vjp, (threads, 1, 1))
