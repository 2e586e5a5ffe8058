"""Launcher of attention's gradients in Triton, and its configurations."""

from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import block_lists as lists
from tilesmith.ops.attn.arguments import attention_vjp_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.plan import Plan, shape_of
from tilesmith.ops.attn.plan.configs import AttentionVjpConfig
from tilesmith.ops.attn.plan.triton import triton_backward
from tilesmith.ops.attn.plan.triton_configs import default_backward, fit_tile_backward
from tilesmith.ops.attn.reference import gradient_like
from tilesmith.ops.attn.triton.backward import (
    _attention_dbias_kernel,
    _attention_dkv_kernel,
    _attention_dq_kernel,
    _attention_dsinks_kernel,
    _attention_stats_kernel,
)
from tilesmith.ops.attn.triton.launch import block_lists, bounds_of, call_tensors, describe, rejects_vjp, sizes, tma_of
from tilesmith.ops.attn.triton.tiles import LOG2E

KERNELS = {
    "_attention_stats_kernel": _attention_stats_kernel,
    "_attention_dkv_kernel": _attention_dkv_kernel,
    "_attention_dbias_kernel": _attention_dbias_kernel,
    "_attention_dq_kernel": _attention_dq_kernel,
    "_attention_dsinks_kernel": _attention_dsinks_kernel,
}


def _sizes(call) -> dict[str, int]:
    """`sizes`, and whether there are documents, 8 or 1."""
    documents = call.cu_seqlens_q is not None or call.q_documents is not None
    return {**sizes(call), "documents": 8 if documents else 1}


ATTENTION_VJP_SPACE = Space(
    default=default_backward,
    dims=attention_vjp_arguments(_sizes),
    fit=fit_tile_backward,
    choices={
        "dkv_block_m": (32, 64, 128), "dkv_block_n": (64, 128), "dkv_warps": (4, 8), "dkv_stages": (1, 2, 3),
        "dq_block_m": (64, 128), "dq_block_n": (32, 64, 128), "dq_warps": (4, 8), "dq_stages": (1, 2, 3),
    },
)  # fmt: skip


def _plan(call, dout: Tensor, arch: Any, config: AttentionVjpConfig) -> Plan:
    shape = shape_of(call, tma_of(call.q, call.k, call.v, dout))
    return triton_backward(shape, arch, config, call.q.dtype == torch.float32)


def _dout(call) -> Tensor:
    if call.dout is None:
        return torch.zeros_like(call.out)
    return call.dout if call.dout.stride(3) == 1 else call.dout.contiguous()


@attention_vjp_arguments
def _tells(call, *, config: AttentionVjpConfig, arch) -> list[str]:
    return _plan(call, call.out if call.dout is None else call.dout, arch, config).lines()


@register_kernel("attention_vjp", backend="triton", rank=20, rejects=rejects_vjp, tells=_tells)
@optimize_kernel(space=ATTENTION_VJP_SPACE)
@attention_vjp_arguments
def attention_vjp(call, *, config: AttentionVjpConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows, dk and dv, dq, dbias, dsinks, as `plan.triton_backward` has it."""
    q, (wants_q, wants_k, wants_v, _, wants_sinks) = call.q, call.output_mask
    dout = _dout(call)
    plan = _plan(call, dout, arch_of(q.device), config)
    dq, dk, dv, _, dsinks = (q.new_empty(0) for _ in call.output_mask)
    if wants_q or plan.numbers["whole_bias"]:
        dq = gradient_like(q, call.gradients_fp32)
    if wants_k or wants_v:
        dk, dv = (gradient_like(x, call.gradients_fp32) for x in (call.k, call.v))
    if wants_sinks and call.sinks is not None:
        dsinks = torch.empty_like(call.sinks, memory_format=torch.contiguous_format)
    made = {"dq": dq, "dk": dk, "dv": dv, "dbias": _dbias(call, plan), "dsinks": dsinks}
    if plan.steps:
        execute(plan, KERNELS, _tensors(call, plan, dout, made), describe, q.device, q.dtype)
    dbias = made["dbias"]
    if plan.numbers["whole_bias"] and dbias.shape != call.bias.shape:
        dbias = dbias.sum_to_size(call.bias.shape).to(call.bias.dtype)
    wanted = zip((dq, dk, dv), (wants_q, wants_k, wants_v))
    return *(x if want else q.new_empty(0) for x, want in wanted), dbias, dsinks


def _dbias(call, plan: Plan) -> Tensor:
    """Room for the gradient of the bias: of each score where it is not broadcast, or has to be summed later."""
    bias, every = call.bias, (*call.q.shape[:3], call.k.shape[2])
    if plan.numbers["whole_bias"]:
        return bias.new_zeros(every, dtype=None if bias.shape == every else torch.float32)
    if plan.numbers["broadcast_bias"]:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
        return dbias if plan.step("_attention_dbias_kernel") else dbias.zero_()
    return call.q.new_empty(0)


def _tensors(call, plan: Plan, dout: Tensor, made: dict[str, Tensor]) -> dict[str, Any]:
    """What the kernels are given of a call, by the plan's names."""
    given = call_tensors(call)
    if call.block_offsets is not None and plan.step("_attention_dkv_kernel"):
        given |= block_lists(*lists.by_keys(call), call.q.shape[0], "_by_keys")
    unit = 1.0 if call.q.dtype == torch.float32 else LOG2E.value
    ids = call.q_documents, call.k_documents
    if call.block_offsets is not None:  # lists say already which blocks meet
        ids = None, None
    return given | made | {
        "dout": dout, "dout_ptr": dout, "dout_strides": dout.stride(), "out": call.out, "lse": call.lse,
        "out_strides": call.out.stride(), "dlse": call.dlse,
        "dlse_strides": None if call.dlse is None else call.dlse.stride(),
        "bounds": bounds_of(plan.step("_attention_dq_kernel"), *ids),
        "bounds_by_keys": bounds_of(plan.step("_attention_dkv_kernel"), *ids[::-1], True),
        # d score / d (q . k), but for the softcap's own derivative: the scale
        "factor": given["outer"] * (given["inner"] if call.softcap > 0.0 else 1.0) / unit,
        **{f"{name}_strides": x.stride() for name, x in made.items()},
    }  # fmt: skip
