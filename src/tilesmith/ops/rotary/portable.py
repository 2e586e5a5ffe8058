"""Portable kernels of the rotary family."""

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.engine import register_kernel
from tilesmith.kernels.fused_ops import HeadsNormRoPEConfig, create_heads_norm_rope_kernel
from tilesmith.ops.rotary import reference
from tilesmith.ops.rotary.arguments import rms_norm_rope_arguments
from tilesmith.runtime import subgroup_of


def _norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    norm_dim: str,
    eps: float,
    weight_offset: float,
    casting: str,
) -> Tensor:
    """cos, sin: fp32 [angles, D/2], one row for each token of a row of the batch or of the batch."""
    batch, heads, tokens, dim = x.shape
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    types = [portable.TYPES[x.dtype], None if weight is None else portable.TYPES[weight.dtype]]
    width = portable.threads(heads * dim if norm_dim == "row" else dim)
    config = HeadsNormRoPEConfig(heads, dim, *types, norm_dim, interleaved, casting, width, subgroup_of(x.device))
    out = y if y.stride(3) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
    given, x_steps = portable.flat(x if x.stride(3) == 1 else x.contiguous(), config.lanes)
    taken, y_steps = portable.flat(out, config.lanes)
    tensors = {"x": given, "cos": cos, "sin": sin, "y": taken}
    scalars = {"rows": batch * tokens, "tokens": tokens, "angles": cos.shape[0], "eps": eps}
    for name, (of_batch, of_head, of_token) in (("x", x_steps), ("y", y_steps)):
        scalars |= {f"{name}_batch": of_batch, f"{name}_token": of_token, f"{name}_head": of_head}
    if weight is not None:
        tensors["weight"] = portable.flat(weight.contiguous(), config.lanes)[0]
        scalars["offset"] = weight_offset
    portable.launch(create_heads_norm_rope_kernel(config), config.grid(batch * tokens), tensors, scalars)
    return y if out is y else y.copy_(out)


def _reasons(call) -> list[str]:
    found = portable.reasons(call, "q", "q_weight", "k_weight")
    if call.q.cols % 2:
        found.append(f"heads of {call.q.cols} features; portable kernels turn an even number")
    elif 2 * call.cos.cols != call.q.cols:
        found.append(f"{2 * call.cos.cols} of {call.q.cols} features turn; portable kernels turn whole heads")
    return found


@register_kernel("rms_norm_rope", backend="portable", rank=portable.RANK, rejects=_reasons)
@rms_norm_rope_arguments
def rms_norm_rope(call) -> tuple[Tensor, Tensor]:
    """A launch for q and one for k; the angles of tokens that are not simply counted are gathered beforehand."""
    q, cos, sin, offset = call.q, call.cos, call.sin, call.offset
    tokens = q.shape[2]
    if cos.ndim == 2 and call.positions is None and call.offsets is None and call.cu_seqlens is None:
        cos, sin = cos[offset : offset + tokens], sin[offset : offset + tokens]
    else:
        cos, sin = reference.angles_of(q, cos, sin, call.positions, call.offsets, call.cu_seqlens, offset)
    angles = [portable.aligned(x.float().reshape(-1, x.shape[-1])) for x in (cos, sin)]
    rest = (*angles, call.interleaved, call.norm_dim, call.eps, call.weight_offset, call.casting)
    k_out = q.new_empty(0) if call.k is None else _norm_rope(call.k, call.k_weight, *rest)
    return _norm_rope(q, call.q_weight, *rest), k_out
