"""Launcher of attention's forward in Triton, and its configurations."""

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.partial_reference import eps_of_values
from tilesmith.ops.attn.plan import Shape, shape_of
from tilesmith.ops.attn.plan.configs import AttentionConfig
from tilesmith.ops.attn.plan.triton import triton_forward
from tilesmith.ops.attn.plan.triton_configs import default_forward, fit_tile_forward
from tilesmith.ops.attn.triton.forward import _attention_fwd_kernel
from tilesmith.ops.attn.triton.launch import bounds_of, call_tensors, describe, rejects, sizes, tma_of

KERNELS = {"_attention_fwd_kernel": _attention_fwd_kernel}

ATTENTION_SPACE = Space(
    default=default_forward,
    dims=attention_arguments(sizes),
    fit=fit_tile_forward,
    choices={"block_m": (64, 128, 256), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
)


def _shape(call) -> Shape:
    return shape_of(call, (True, *tma_of(call.k, call.v), True))


@attention_arguments
def _tells(call, *, config: AttentionConfig, arch) -> list[str]:
    return triton_forward(_shape(call), arch, config).lines()


@register_kernel("attention", backend="triton", rank=20, rejects=rejects, tells=_tells)
@optimize_kernel(space=ATTENTION_SPACE)
@attention_arguments
def attention(call, *, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """One CTA for each tile of queries."""
    return _launched(call, config, fp32=False)


@register_kernel("attention_partial", backend="triton", rank=20, rejects=rejects, tells=_tells, eps=eps_of_values)
@optimize_kernel(space=ATTENTION_SPACE)
@attention_arguments
def attention_partial(call, *, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """The same, which rounds to the dtype of out."""
    return _launched(call, config, fp32=True)


def _launched(call, config: AttentionConfig, fp32: bool) -> tuple[Tensor, Tensor]:
    q = call.q
    plan = triton_forward(_shape(call), arch_of(q.device), config)
    out = reference.out_like(q, call.v.shape[3], fp32)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if plan.steps:
        bounds = bounds_of(plan.steps[0], call.q_documents, call.k_documents)
        given = call_tensors(call) | {"out": out, "lse": lse, "out_strides": out.stride(), "bounds": bounds}
        execute(plan, KERNELS, given, describe, q.device, q.dtype)
    return out, lse
