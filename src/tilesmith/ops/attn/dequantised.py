"""Attention on 8-bit queries, keys and values for whatever kernel reads them in 16 bits."""

import torch
from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.op import attention_op


def _reasons(call) -> list[str]:
    reasons = []
    if call.q.dtype.itemsize != 1:
        reasons.append(f"q is {call.q.dtype}; beside it k and v with their factors do not fit in 16 bits")
    if call.page_table is not None:
        reasons.append("page_table: pages that no query reads would be dequantised as well")
    return reasons


@register_kernel("attention", backend="dequantised", rank=5, rejects=_reasons)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    block_offsets: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_offsets_t: Tensor | None = None,
    block_indices_t: Tensor | None = None,
    page_table: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    block_q: int = 0,
    block_k: int = 0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Values times their factors in the dtype of `out`, exactly where those are powers of two; then whichever kernel
    serves that dtype."""
    like = reference.out_like(q, v.shape[3])
    wide = [_widened(x, factor, like.dtype) for x, factor in ((q, q_scale), (k, k_scale), (v, v_scale))]
    out, lse = attention_op.run((
        *wide, bias, mask, alibi, sinks, seed, cu_seqlens_q, cu_seqlens_k, kv_lengths, prefix_lengths,
        q_documents, k_documents, block_offsets, block_indices, block_offsets_t, block_indices_t,
        None, None, None, None, scale, causal, window_left, window_right, softcap, dropout_p,
        max_seqlen_q, max_seqlen_k, block_q, block_k, deterministic,
    ))  # fmt: skip
    # the stride of a dim of size 1 may say another memory order of the widened q
    return (out if out.stride() == like.stride() else like.copy_(out)), lse


def _widened(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x times its factors in `dtype`, rounded once (every 8-bit number is one of bf16 and fp16), last stride 1."""
    if factor is None:
        return x
    x = x.to(dtype, memory_format=torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format)
    return torch.mul(x, reference.by_token(factor, x), out=torch.empty_like(x))
