"""Portable kernels of the attention family."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.engine import register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.hardware.limits import limits_of
from tilesmith.kernels.flash_attention import (
    FlashAttentionConfig,
    create_flash_attention_kernel,
    preset_for,
    required_shared_memory,
)
from tilesmith.kernels.rows import MAX_GROUPS
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.runtime import backend_of, vulkan

_UNSERVED = {
    "bias": "scores get nothing added",
    "mask": "only causal masks are known",
    "alibi": "scores know no distance",
    "sinks": "nothing is added to the denominator",
    "seed": "nothing is dropped",
    "cu_seqlens_q": "documents are not told apart",
    "kv_lengths": "all keys count",
    "prefix_lengths": "only causal masks are known",
    "q_documents": "documents are not told apart",
    "block_offsets": "block lists are not walked",
    "page_table": "paged keys and values are not read",
    "q_scale": "quantised values are not read",
    "k_scale": "quantised values are not read",
    "v_scale": "quantised values are not read",
}


def _reasons(call) -> list[str]:
    found = portable.reasons(call, "q")
    found += [f"{name}: {what}" for name, what in _UNSERVED.items() if getattr(call, name) is not None]
    if call.capped:
        found.append("softcap: scores are not bent")
    if call.window_left >= 0 or (call.window_right >= 0 and not call.causal):
        found.append("window: only causal masks are known")
    if call.q.cols != call.v.cols:
        found.append(f"the head dims are {call.q.cols} and {call.v.cols}; one for all is supported")
    elif call.q.cols % 4 or not 4 <= call.q.cols <= 256:
        found.append(f"the head dim is {call.q.cols}; multiples of 4 up to 256 are supported")
    if not found:
        try:
            _config(call.q.cols, call.q.dtype, call.q.device, backend_of(call.q.device), call.causal)
        except ValueError as problem:  # no blocks fit
            found.append(str(problem))
    return found


@lru_cache(maxsize=64)
def _config(
    dim: int, dtype: torch.dtype, device: torch.device, backend: str | None, causal: bool
) -> FlashAttentionConfig:
    """Blocks that fit a device, with matrix units where they are sure to be there. Raises ValueError if none do."""
    half = dtype is not torch.float32
    if backend == "cuda":
        granted = limits_of("cuda")
        limits = replace(granted, shared_memory=max(granted.shared_memory, arch_of(device).shared_memory))
        units = half and dim % 16 == 0
        # H200, 16,384 tokens, hidden 2048, 4k keys, TFLOP/s, f16. D 64: 128 x 128 full 246, causal 223, 128 x 64 ahead
        # 221, 179. D 128: 128 x 64 ahead 251, 224, not ahead 221, 181, 64 x 64 173, 210. D 256: 128 x 64 205, ahead
        # 183, 64 x 64 152. f32 of 64 x 32 and 64 x 64: D 64 30, 29, D 128 28, 30.
        if units:
            blocks = (128, 128) if dim <= 64 else (128, 64)
        else:
            blocks = (64, 32) if dim <= 64 else (64, 64)
        config = FlashAttentionConfig(*blocks, dim, half, matrix="cuda" if units else "none", ahead=64 < dim <= 128)
        if limits.refuses(required_shared_memory(config), (config.threads, 1, 1)):
            config = preset_for(limits, dim, use_half=half, matrix=config.matrix)
    elif backend == "vulkan" and half and dim % 16 == 0 and "fragments" in vulkan.device().features:
        matrix = "vulkan-nv" if "conversions" in vulkan.device().features else "vulkan"
        config = preset_for(vulkan.device().limits, dim, matrix=matrix)
        # H200, as above, ahead and not: KHR's extension D 64 168 and 141, D 128 163 and 156; NVIDIA's D 64 221 and 217,
        # causal 197 and 188, D 128 232 and 237
        config = replace(config, ahead=matrix == "vulkan" or dim <= 64)
    else:
        matrix = None if dtype is torch.float16 else "none"
        limits = limits_of("vulkan" if backend == "interpreter" else backend)
        config = preset_for(limits, dim, use_half=half, matrix=matrix)
    return replace(config, half=portable.half_of(dtype), causal=causal, return_lse=True, strided=True)


@register_kernel("attention", backend="portable", rank=portable.RANK, rejects=_reasons)
@attention_arguments
def attention(call) -> tuple[Tensor, Tensor]:
    """A workgroup for each block of queries of a head."""
    q, k, v = call.q, call.k, call.v
    batch, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    out = reference.out_like(q, dim)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if keys == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    config = _config(dim, q.dtype, q.device, backend_of(q.device), call.causal)
    scalars = {"n_q": tokens, "n_kv": keys, "heads": heads, "kv_heads": kv_heads}
    scalars["scale"] = reference.scale_of(q, call.scale)
    ir = create_flash_attention_kernel(config)
    whole = (q, k, v, out, lse)
    # a grid's axis is no longer than MAX_GROUPS
    for part in (whole,) if batch <= MAX_GROUPS else zip(*(x.split(MAX_GROUPS) for x in whole)):
        tensors = {"lse": part[4]}
        for name, x in zip(("q", "k", "v", "out"), part):
            tensors[name], steps = portable.flat(x, config.out_lanes if name == "out" else config.lanes)
            scalars |= {f"{name}_{axis}": step for axis, step in zip(("batch", "head", "row"), steps)}
        portable.launch(ir, config.grid(tokens, heads, len(part[4])), tensors, scalars)
    # queries that see no key, or whose scores are all -inf or NaN; NaN stays, where masked_fill_ would need two kernels
    torch.nn.functional.threshold_(lse, -1e38, float("-inf"))
    return out, lse
