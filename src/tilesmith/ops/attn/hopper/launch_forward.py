"""Launcher of attention's forward on Hopper, what it refuses, and its configurations."""

from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.block_tables import list_tiles_kernel
from tilesmith.ops.attn.hopper.forward import attention_fwd_kernel
from tilesmith.ops.attn.hopper.forward_joined import attention_fwd_joined_kernel
from tilesmith.ops.attn.hopper.forward_wide import attention_fwd_wide_kernel
from tilesmith.ops.attn.hopper.launch import (
    all_keys,
    call_tensors,
    describe,
    dropout_reasons,
    list_reasons,
    outputs,
    reasons_for_all,
    wide_reasons,
    wrong_dims,
)
from tilesmith.ops.attn.hopper.packed import query_tiles_kernel
from tilesmith.ops.attn.hopper.stream_k import attention_fwd_stream_k_kernel
from tilesmith.ops.attn.hopper.window import attention_window_kernel
from tilesmith.ops.attn.partial_reference import eps_of_values
from tilesmith.ops.attn.plan import Plan, shape_of, tables
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.hopper_forward import hopper_forward

KERNELS = {
    "query_tiles_kernel": query_tiles_kernel,
    "list_tiles_kernel": list_tiles_kernel,
    "attention_fwd_kernel": attention_fwd_kernel,
    "attention_fwd_joined_kernel": attention_fwd_joined_kernel,
    "attention_fwd_wide_kernel": attention_fwd_wide_kernel,
    "attention_fwd_stream_k_kernel": attention_fwd_stream_k_kernel,
    "attention_window_kernel": attention_window_kernel,
}


def rejects(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention."""
    wide = wide_reasons(call) if max(call.q.cols, call.v.cols) > 256 else wrong_dims(call)
    reasons = reasons_for_all(call) + all_keys(call) + wide + dropout_reasons(call)
    return reasons + (list_reasons(call, 128, 64) if call.block_offsets is not None else [])


@attention_arguments
def dims(call) -> dict[str, int]:
    q, keys, left, right = call.q, call.k.shape[2], call.window_left, 0 if call.causal else call.window_right
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": keys, "dim": q.shape[3],
        "value_dim": call.v.shape[3], "causal": 8 if call.causal else 1,
        "seen": min(keys, left + right + 1) if left >= 0 and right >= 0 else keys,
        "packed": 1 if call.cu_seqlens_q is None else 8, "drawn": 8 if call.dropout_p > 0.0 else 1,
    }  # fmt: skip


SPACE = Space(default=tables.hopper_forward, dims=dims, choices={"consumers": (1, 2, 3, 4), "stages": (2, 3)})


@attention_arguments
def _plans(call, *, config: HopperConfig, arch) -> Plan:
    return hopper_forward(shape_of(call), arch, config)


@register_kernel("attention", backend="hopper", rank=25, rejects=rejects, plans=_plans)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: HopperConfig) -> tuple[Tensor, Tensor]:
    """Persistent CTAs, each with many tiles of queries."""
    plan = hopper_forward(shape_of(call), arch_of(call.q.device), config)
    out, lse = outputs(call, plan)
    execute(plan, KERNELS, call_tensors(call, out, lse), describe, call.q.device, call.q.dtype)
    return out, lse


def rejects_partial(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention_partial."""
    wide = max(call.q.cols, call.v.cols) > 256
    return rejects(call) + (["with head dims above 256 out is rounded"] if wide else [])


@attention_arguments
def _plans_partial(call, *, config: HopperConfig, arch) -> Plan:
    return hopper_forward(shape_of(call)._replace(out_fp32=True), arch, config)


@register_kernel(
    "attention_partial", backend="hopper", rank=25, rejects=rejects_partial, plans=_plans_partial, eps=eps_of_values
)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention_partial(call, *, config: HopperConfig) -> tuple[Tensor, Tensor]:
    """The same, whose out is stored from registers."""
    plan = hopper_forward(shape_of(call)._replace(out_fp32=True), arch_of(call.q.device), config)
    out, lse = outputs(call, plan, fp32=True)
    given = call_tensors(call, out, lse) | {"out_strides": out.stride()[:3]}
    execute(plan, KERNELS, given, describe, call.q.device, call.q.dtype)
    return out, lse
