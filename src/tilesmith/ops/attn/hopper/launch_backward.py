"""Launcher of attention's backward on Hopper, what it refuses, and its configurations."""

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.dropout import kernel_numbers
from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_vjp_arguments
from tilesmith.ops.attn.block_lists import by_keys
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.backward import attention_dkv_kernel
from tilesmith.ops.attn.hopper.backward_bands import attention_band_products_kernel, attention_band_scores_kernel
from tilesmith.ops.attn.hopper.backward_dq import attention_dq_wide_kernel
from tilesmith.ops.attn.hopper.backward_rows import attention_dq_kernel, attention_dsinks_kernel, attention_rows_kernel
from tilesmith.ops.attn.hopper.backward_stream_k import attention_dkv_stream_k_kernel
from tilesmith.ops.attn.hopper.backward_wide import attention_dkv_wide_kernel
from tilesmith.ops.attn.hopper.block_tables import list_key_tiles_kernel
from tilesmith.ops.attn.hopper.group_sum import attention_group_sum_kernel
from tilesmith.ops.attn.hopper.launch import (
    all_keys,
    block_lists,
    call_tensors,
    describe,
    dropout_reasons,
    list_reasons,
    reasons_for_all,
    wide_reasons,
    wrong_dims,
)
from tilesmith.ops.attn.hopper.packed import key_tiles_kernel, query_tiles_kernel
from tilesmith.ops.attn.hopper.window_backward import attention_window_vjp_kernel
from tilesmith.ops.attn.plan import Plan, shape_of, tables
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_backward import hopper_backward
from tilesmith.ops.attn.plan.hopper_backward_tiles import is_narrow_vjp
from tilesmith.ops.attn.plan.shape import window_of
from tilesmith.ops.attn.reference import gradient_like, scale_of

KERNELS = {
    "query_tiles_kernel": query_tiles_kernel,
    "key_tiles_kernel": key_tiles_kernel,
    "list_key_tiles_kernel": list_key_tiles_kernel,
    "attention_rows_kernel": attention_rows_kernel,
    "attention_dkv_kernel": attention_dkv_kernel,
    "attention_dq_kernel": attention_dq_kernel,
    "attention_dkv_stream_k_kernel": attention_dkv_stream_k_kernel,
    "attention_dkv_wide_kernel": attention_dkv_wide_kernel,
    "attention_dq_wide_kernel": attention_dq_wide_kernel,
    "attention_band_scores_kernel": attention_band_scores_kernel,
    "attention_band_products_kernel": attention_band_products_kernel,
    "attention_window_vjp_kernel": attention_window_vjp_kernel,
    "attention_group_sum_kernel": attention_group_sum_kernel,
    "attention_dsinks_kernel": attention_dsinks_kernel,
}


def rejects_vjp(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention_vjp."""
    wide = max(call.q.cols, call.v.cols) > 256
    dims = wide_reasons(call) if wide else wrong_dims(call)
    reasons = reasons_for_all(call) + all_keys(call) + dims + dropout_reasons(call)
    if wide and call.gradients_fp32:
        reasons.append("gradients_fp32: above head dim 256 gradients are written in 16 bits")
    if call.seed is not None and call.q.cols != call.v.cols:
        reasons.append("seed: where head dims differ nothing is dropped")
    return reasons + (_list_reasons(call) if call.block_offsets is not None else [])


def _list_reasons(call) -> list[str]:
    reasons = list_reasons(call, 128, 128)
    if call.q.cols > 128 or call.q.cols != call.v.cols:
        reasons.append("block lists: head dims above 128, or that differ, are not served with them")
    if call.deterministic:
        reasons.append("block lists: tiles of keys add to dq in any order")
    return reasons


@attention_vjp_arguments
def dims_vjp(call) -> dict[str, int]:
    q, k, shape = call.q, call.k, shape_of(call)
    whole = call.window_left < 0 and (call.causal or call.window_right < 0)
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3],
        "value_dim": call.v.shape[3],
        "plain": 8 if whole and call.softcap == call.dropout_p == 0.0 else 1,
        "narrow": 8 if is_narrow_vjp(shape, window_of(shape)) else 1,
    }  # fmt: skip


SPACE_VJP = Space(default=tables.hopper_backward, dims=dims_vjp)


@attention_vjp_arguments
def _plans_vjp(call, *, config: HopperVjpConfig, arch) -> Plan:
    return hopper_backward(shape_of(call), arch, config)


@register_kernel("attention_vjp", backend="hopper", rank=25, rejects=rejects_vjp, plans=_plans_vjp)
@optimize_kernel(space=SPACE_VJP)
@attention_vjp_arguments
def attention_vjp(call, *, config: HopperVjpConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows, dk and dv, dq, dsinks, as `plan.hopper_backward` has it."""
    q = call.q
    plan = hopper_backward(shape_of(call), arch_of(q.device), config)
    wide = call.gradients_fp32
    gradients = {name: gradient_like(x, wide) for name, x in (("dq", q), ("dk", call.k), ("dv", call.v))}
    wants_sinks = call.output_mask[4] and call.sinks is not None
    dsinks = torch.empty_like(call.sinks, memory_format=torch.contiguous_format) if wants_sinks else q.new_empty(0)
    found = [x if wanted else q.new_empty(0) for x, wanted in zip(gradients.values(), call.output_mask)]
    found += [q.new_empty(0), dsinks]
    if not plan.steps:
        return _without_keys(call, found)
    for name, end in plan.zeroed:
        gradients[name][:, :, :end].zero_()
    execute(plan, KERNELS, _tensors(call, plan, gradients, dsinks), describe, q.device, q.dtype)
    unseen = plan.numbers["q_begin"]
    if wants_sinks and unseen and call.dlse is not None:  # of queries that see no key, lse is the sink
        dsinks += call.dlse[:, :, :unseen].sum((0, 2))
    return tuple(found)


def _without_keys(call, found: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a call without queries or keys."""
    found = [x.zero_() for x in found]
    if found[4].numel() > 0 and call.dlse is not None:
        found[4] += call.dlse.sum((0, 2))
    return tuple(found)


def _tensors(call, plan: Plan, gradients: dict[str, Tensor], dsinks: Tensor) -> dict[str, Any]:
    """What the kernels are given of a call, by the plan's names."""
    out, dout = call.out, call.dout
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(3) != 1:
        dout = dout.contiguous()
    given = call_tensors(call, out, call.lse) | gradients
    factor = scale_of(call.q, call.scale)
    kept = None
    if call.dropout_p > 0.0:
        kept = 1.0 / kernel_numbers(call.dropout_p)[1]
        factor /= kept
    if call.block_offsets is not None:
        given |= block_lists(*by_keys(call))
    strides = {"out": out.stride(), "dout": dout.stride(), "dq": gradients["dq"].stride()}
    unit = 8 if all(n % 8 == 0 for found in strides.values() for n in found[:3]) else 1
    return given | {
        "unit": unit, **{f"{name}_units": tuple(n // unit for n in found) for name, found in strides.items()},
        "dout": dout, "dlse": call.dlse, "dsinks": dsinks, "factor": factor, "kept": kept,
        "out_strides": out.stride(), "dout_strides": dout.stride(),
        "dlse_strides": None if call.dlse is None else call.dlse.stride(),
        **{f"{name}_strides": x.stride() for name, x in gradients.items()},
    }  # fmt: skip
