"""Launchers of attention's Hopper kernels with tiles whose columns are a sum of powers of two, and for head dims of q
and v that differ in a backward.

These were compiled for Hopper and not yet run there, so they stand below the reference and serve only calls that are
pinned: `tilesmith.use(attention="hopper_columns", attention_vjp="hopper_columns")`.
"""

from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.ops.attn.arguments import attention_arguments, attention_vjp_arguments
from tilesmith.ops.attn.hopper.launch import all_keys, no_dropout, no_lists, reasons_for_all, wrong_dims
from tilesmith.ops.attn.hopper.launch_backward import dims_vjp, gradients_of, tells_vjp
from tilesmith.ops.attn.hopper.launch_forward import dims, output_of, tells
from tilesmith.ops.attn.plan import tables
from tilesmith.ops.attn.plan.configs import HopperConfig, HopperVjpConfig

RANK = -1  # below the reference's 0


def _reasons_for_both(call) -> list[str]:
    return reasons_for_all(call) + all_keys(call) + no_dropout(call) + no_lists(call) + wrong_dims(call)


def rejects(call) -> list[str]:
    """Why these kernels cannot serve a call of attention."""
    reasons = _reasons_for_both(call)
    if not 128 < call.q.cols <= 192:
        reasons.append(f"the head dim of q is {call.q.cols}: from 136 to 192 columns are spared")
    return reasons


def rejects_vjp(call) -> list[str]:
    """Why these kernels cannot serve a call of attention_vjp."""
    reasons = _reasons_for_both(call)
    if call.q.cols == call.v.cols and not 128 < call.q.cols <= 192:
        reasons.append(f"both head dims are {call.q.cols}: no columns are spared")
    return reasons


SPACE = Space(default=tables.hopper_columns, dims=dims)
SPACE_VJP = Space(default=tables.hopper_columns_vjp, dims=dims_vjp)


@register_kernel("attention", backend="hopper_columns", rank=RANK, rejects=rejects, tells=tells)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: HopperConfig) -> tuple[Tensor, Tensor]:
    """Persistent CTAs, each with many tiles of queries."""
    return output_of(call, config)


@register_kernel("attention_vjp", backend="hopper_columns", rank=RANK, rejects=rejects_vjp, tells=tells_vjp)
@optimize_kernel(space=SPACE_VJP)
@attention_vjp_arguments
def attention_vjp(call, *, config: HopperVjpConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows, dk and dv, dq, dsinks, as `plan.hopper_backward` has it."""
    return gradients_of(call, config)
