"""attention of few rows on a cache on Hopper, in one launch: the launcher of clusters that share a kv head's keys."""

import torch
from torch import Tensor

from tilesmith.device.alignment import is_16_byte_aligned
from tilesmith.device.gluon.cluster import resident_clusters
from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.combine import attention_combine_few_kernel
from tilesmith.ops.attn.hopper.decode_cluster import attention_cluster_kernel
from tilesmith.ops.attn.hopper.launch import (
    call_tensors,
    describe,
    no_dropout,
    no_lists,
    outputs,
    reasons_for_all,
    wrong_dims,
)
from tilesmith.ops.attn.hopper.launch_decode import decode_tensors, keys_of
from tilesmith.ops.attn.plan import Plan, shape_of, tables
from tilesmith.ops.attn.plan.configs import ClusterConfig
from tilesmith.ops.attn.plan.decode import Clusters, hopper_cluster
from tilesmith.ops.attn.split_combine import _attention_combine_kernel

KERNELS = {
    "attention_cluster_kernel": attention_cluster_kernel,
    "attention_combine_few_kernel": attention_combine_few_kernel,
    "_attention_combine_kernel": _attention_combine_kernel,
}


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": k.shape[2],
        "dim": max(q.shape[3], call.v.shape[3]),
    }  # fmt: skip


SPACE = Space(default=tables.cluster, dims=_dims, choices={"stages": (2, 3)})


def rejects(call) -> list[str]:
    """Why clusters cannot serve a call of attention."""
    reasons = reasons_for_all(call) + no_dropout(call) + no_lists(call) + wrong_dims(call)
    if call.cu_seqlens_q is not None:
        reasons.append("cu_seqlens_q: packed documents are not known")
    if call.rows > 16:
        reasons.append("T * H / G is more than 16: a warp holds 16 rows")
    if not call.cached:
        reasons.append("S is less than 4 T: this kernel is for a cache")
    if call.shared_lines:
        reasons.append(
            "keys of adjacent kv heads share lines of 128 bytes, which their CTAs would read at different times"
        )
    if call.pairs > 32_768:
        reasons.append("more than 32,768 kv heads over all batch rows: a dim of the grid could exceed 65,535")
    return reasons


@attention_arguments
def _plans(call, *, config: ClusterConfig, arch) -> Plan:
    here = arch_of(call.q.device)
    return hopper_cluster(shape_of(call), arch, config, clusters(call.q.device) if arch is here else None)


@register_kernel("attention", backend="hopper_cluster", rank=36, rejects=rejects, plans=_plans)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: ClusterConfig) -> tuple[Tensor, Tensor]:
    """A cluster for each kv head of each batch row, whose CTAs share its keys."""
    device = call.q.device
    plan = hopper_cluster(shape_of(call), arch_of(device), config, clusters(device))
    out, lse = outputs(call, plan)
    if not plan.steps:
        return out, lse
    given = call_tensors(call, out, lse) | decode_tensors(call, out)
    if not is_16_byte_aligned(call.q):
        given["q"] = call.q.clone(memory_format=torch.contiguous_format)
    bounded, (_, heads, tokens, dim_v) = call.kv_lengths is not None, out.shape
    given["k_desc"], given["between_k"] = keys_of(call.k, plan.tile[1], bounded)
    given["v_desc"], given["between_v"] = keys_of(call.v, plan.tile[1], bounded)
    given |= {
        "q_strides": tuple(s // 8 for s in given["q"].stride()[:3]), "out_split": out.stride(0),
        "out_strides": out.stride()[:3], "part_split": lse.numel() * dim_v,
        "part_strides": (heads * tokens * dim_v, tokens * dim_v, dim_v),
    }  # fmt: skip
    execute(plan, KERNELS, given, describe, device, call.q.dtype)
    return out, lse


def clusters(device: torch.device) -> Clusters:
    """How many clusters of each size the device runs at a time."""
    return Clusters(*(resident_clusters(device, parts, 1) for parts in (16, 8, 4, 2)))
