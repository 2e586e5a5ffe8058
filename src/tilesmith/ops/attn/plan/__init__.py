"""What a call of attention will launch, as data: call metadata, architecture and configuration to a `Plan`.

Pure functions: no tensors, no questions to a device, no side effects. Lengths that lie in device tensors (cu_seqlens,
kv_lengths, block lists) are unknown to a plan, which uses their shapes alone. Launchers execute plans and decide
nothing; `explain` prints them.
"""

from __future__ import annotations

from typing import Any

from tilesmith.ops.attn.plan import hopper_backward, hopper_forward, hopper_fp8
from tilesmith.ops.attn.plan.decode import hopper_cluster, hopper_latent, hopper_split, triton_split
from tilesmith.ops.attn.plan.model import Buffer, Plan, Step
from tilesmith.ops.attn.plan.shape import Shape, shape_of
from tilesmith.ops.attn.plan.triton import triton_backward, triton_forward

__all__ = ["PLANNERS", "Buffer", "Plan", "Shape", "Step", "plan", "shape_of"]

PLANNERS = {
    ("attention", "hopper"): hopper_forward.hopper_forward,
    ("attention", "hopper_fp8"): hopper_fp8.hopper_fp8,
    ("attention", "hopper_split"): hopper_split,
    ("attention", "hopper_cluster"): hopper_cluster,
    ("attention", "hopper_latent"): hopper_latent,
    ("attention", "triton"): triton_forward,
    ("attention", "triton_split"): triton_split,
    ("attention_vjp", "hopper"): hopper_backward.hopper_backward,
    ("attention_vjp", "triton"): triton_backward,
}


def plan(op: str, backend: str, shape: Shape, arch: Any, config: Any, *more: Any) -> Plan:
    """The plan of a call that a backend serves. more: what else that backend's function asks for."""
    return PLANNERS[op, backend](shape, arch, config, *more)
