"""attention for few query tokens over a long cache in Triton: the launcher that splits the keys (split-KV)."""

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.rows import dense
from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.latent import values_in_keys
from tilesmith.ops.attn.plan import Plan, shape_of
from tilesmith.ops.attn.plan.configs import SplitConfig
from tilesmith.ops.attn.plan.decode import Factors, triton_split
from tilesmith.ops.attn.plan.triton_configs import default_split
from tilesmith.ops.attn.split_combine import _attention_combine_kernel
from tilesmith.ops.attn.triton.decode import _attention_split_kernel
from tilesmith.ops.attn.triton.launch import few_registers

KERNELS = {
    "_attention_split_kernel": _attention_split_kernel,
    "_attention_combine_kernel": _attention_combine_kernel,
}


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    keys = reference.slots(k, call.page_table)
    if call.window_left >= 0:
        keys = min(keys, q.shape[2] + call.window_left)
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": keys,
        "dim": max(q.shape[3], call.v.shape[3]), "sparse": 1 if call.mask is call.q_documents is None else 8,
        "bytes": k.element_size(), "value_dim": call.v.shape[3], "shared": 8 if values_in_keys(k, call.v) else 1,
    }  # fmt: skip


LEAST_OF_WIDE = {"hip": 64 * 1024}
"""Shared memory for 16 rows and 16 keys and values of head dims above 256, in flight once; 96 KB where not AMD's."""
_SMALL = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

SPLIT_SPACE = Space(
    default=default_split,
    dims=_dims,
    choices={
        "block_m": (16, 32, 64, 128),
        "block_n": (32, 64, 128),
        "per_sm": (1, 2, 3),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "peel": (False, True),
    },
)


def _reasons(call) -> list[str]:
    unread = ("bias", "alibi", "seed", "cu_seqlens_q", "prefix_lengths", "block_offsets", "q_scale")
    reasons = [
        f"{name} is given, which this kernel does not read" for name in unread if getattr(call, name) is not None
    ]
    tiled = call.q.cols <= 512  # above, no kernel of tiles of one head serves many query tokens
    if tiled and call.rows > 512 and call.page_table is None:
        reasons.append("T * H / G is more than 512: this kernel is for few query tokens")
    elif tiled and call.rows > 128 and not call.cached:
        reasons.append("T * H / G is more than 128 and S less than 4 T: this kernel is for few query tokens on a cache")
    if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"q is {call.q.dtype}; float16, bfloat16 and float32 are supported")
    for name in ("k", "v"):
        dtype = getattr(call, name).dtype
        if dtype != call.q.dtype and dtype not in _SMALL:
            reasons.append(f"{name} is {dtype}; q's dtype, int8, float8_e4m3fn and float8_e5m2 are supported")
        if dtype in _SMALL[1:] and call.arch.kind == "hip":
            reasons.append(f"{name} is {dtype}, which {call.arch.name} does not convert")
        if dtype in _SMALL[1:] and call.arch.kind == "cuda" and call.arch.capability < (8, 9):
            reasons.append(f"{name} is {dtype}; compute capability 8.9 and up converts it")
    for name, most in (("q", 576), ("v", 512)):
        if getattr(call, name).cols > most:
            reasons.append(f"{name} has head dim {getattr(call, name).cols}; up to {most} is supported")
    if max(call.q.cols, call.v.cols) > 256 and call.arch.kind != "cpu":
        reasons += _wide_reasons(call)
    reasons += [f"{name}: factors of blocks are not read" for name, n in zip("qkv", call.factors) if n > 1]
    reasons += [f"{name}'s last stride is not 1" for name in ("q", "k", "v") if not getattr(call, name).unit]
    return reasons


def _wide_reasons(call) -> list[str]:
    """Why a GPU cannot serve head dims above 256."""
    reasons, room, least = [], call.arch.shared_memory, LEAST_OF_WIDE.get(call.arch.kind, 96 * 1024)
    if room < least:
        has = f"{call.arch.name} has {room // 1024}"
        reasons.append(f"head dims above 256 need {least // 1024} KB of shared memory, {has}")
    if call.q.dtype == torch.float32:
        reasons.append("q is torch.float32; with head dims above 256 float16 and bfloat16 are supported")
    return reasons + few_registers(call.arch)


def _plan(call, arch: Any, config: SplitConfig) -> Plan:
    q, k, v = call.q, call.k, call.v
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    # in units of 8 or 16 elements the compiler sees that rows start on 16 bytes, also where D is 72 or 200
    small = k.element_size() == 1 or v.element_size() == 1
    unit = next((n for n in ((16, 8) if small else (8,)) if all(stride % n == 0 for stride in strides)), 1)
    differ = (_differ(scale, call.page_table) for scale in (call.k_scale, call.v_scale))
    return triton_split(shape_of(call), arch, config, Factors(*differ, v.element_size() == 1, unit))


@attention_arguments
def _tells(call, *, config: SplitConfig, arch) -> list[str]:
    return _plan(call, arch, config).lines()


@register_kernel("attention", backend="triton_split", rank=30, rejects=_reasons, tells=_tells)
@optimize_kernel(space=SPLIT_SPACE)
@attention_arguments
def attention(call, *, config: SplitConfig) -> tuple[Tensor, Tensor]:
    """One pass over the keys in as many splits as fill the device, and a second one that combines them."""
    q = call.q
    plan = _plan(call, arch_of(q.device), config)
    out = reference.out_like(q, call.v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if plan.steps:
        execute(plan, KERNELS, _tensors(call, plan, out, lse), None, q.device, q.dtype)
    return out, lse


def _tensors(call, plan: Plan, out: Tensor, lse: Tensor) -> dict[str, Any]:
    """What the kernels are given of a call, by the plan's names."""
    q, k, v = call.q, call.k, call.v
    unit = plan.steps[0].constants["UNIT"]
    given = {
        f"{x}_{part}": stride // unit
        for x, tensor, parts in (("q", q, "row head token"), ("k", k, "page head slot"), ("v", v, "page head slot"))
        for part, stride in zip(parts.split(), tensor.stride())
    }
    _, heads, tokens, dim_v = out.shape
    row, head, token, _ = out.stride()
    return given | {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "k_scale": call.k_scale, "v_scale": call.v_scale,
        "mask": call.mask, "q_documents": dense(call.q_documents), "k_documents": dense(call.k_documents),
        "sinks": dense(call.sinks), "lengths": dense(call.kv_lengths), "page_table": dense(call.page_table),
        "k_scale_strides": _broadcast_strides(call.k_scale), "v_scale_strides": _broadcast_strides(call.v_scale),
        "mask_strides": _broadcast_strides(call.mask), "softcap": call.softcap, "PAGE_SIZE": k.shape[2],
        "scale": reference.scale_of(q, call.scale),
        "out_split": 0, "out_row": row, "out_head": head, "out_token": token, "part_split": lse.numel() * dim_v,
        "part_row": heads * tokens * dim_v, "part_head": tokens * dim_v, "part_token": dim_v,
    }  # fmt: skip


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...] | None:
    """The strides of x, 0 along dims of size 1."""
    return None if x is None else tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride()))


def _differ(scale: Tensor | None, page_table: Tensor | None) -> bool:
    """Whether factors by page (by batch row, without pages), head and slot differ within a CTA."""
    strides = _broadcast_strides(scale)
    return strides is not None and (strides[2] != 0 or (page_table is not None and strides[0] != 0))
