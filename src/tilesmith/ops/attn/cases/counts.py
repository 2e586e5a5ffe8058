"""What calls of attention must compute and move: the FLOPs and bytes that rates of a benchmark are of."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilesmith.ops.attn.quantize_reference import DTYPES


def _pairs(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, page_table: Tensor | None,
    kv_lengths: Tensor | None, causal: bool, window_left: int, window_right: int,
) -> int:  # fmt: skip
    """How many (query, key) pairs of one head causal, window, lengths and documents leave; other masks do not count."""
    slots = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        spans = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
    else:
        keys = [slots] * q.shape[0] if kv_lengths is None else kv_lengths.tolist()
        spans = ((q.shape[2], n) for n in keys)
    right = 0 if causal else window_right
    total = 0
    for tokens, keys in spans:
        position = torch.arange(tokens) + keys - tokens
        last = (position + right if right >= 0 else position * 0 + keys - 1).clamp(-1, keys - 1)
        first = (position - window_left if window_left >= 0 else position * 0).clamp(0)
        total += int((last - first + 1).clamp(0).sum())
    return total


def _listed_pairs(
    q: Tensor, k: Tensor, offsets: Tensor, indices: Tensor, block_q: int, block_k: int, causal: bool,
    window_left: int, window_right: int,
) -> int:  # fmt: skip
    """The same of block lists, causal and window; a mean over heads and batch rows, times the batch."""
    tokens, keys, many = q.shape[2], k.shape[2], offsets.shape[0] * offsets.shape[1]
    counts = offsets.diff(dim=-1).flatten().long().cpu()
    block = torch.arange(offsets.shape[2] - 1).repeat(many).repeat_interleave(counts)
    query = (block[:, None] * block_q + torch.arange(block_q)).clamp(max=tokens)
    position = query + keys - tokens
    begin = indices[: len(block)].cpu()[:, None] * block_k
    end = (begin + block_k).clamp(max=keys)
    right = 0 if causal else window_right
    last = (position + right + 1).clamp(max=keys) if right >= 0 else position * 0 + keys
    first = (position - window_left).clamp(0) if window_left >= 0 else position * 0
    seen = (torch.minimum(last, end) - torch.maximum(first, begin)).clamp(0)
    return int(torch.where(query < tokens, seen, 0).sum()) * q.shape[0] // many


def _products(dims_of_q: int, dims_of_v: int) -> Callable[..., int]:
    """FLOPs of as many products over D and over Dv for each visible pair."""

    def count(
        q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, kv_lengths, block_offsets, block_indices, block_q, block_k,
        causal, window_left, window_right,
    ) -> int:  # fmt: skip
        window = causal, window_left, window_right
        pairs = _pairs(q, k, cu_seqlens_q, cu_seqlens_k, page_table, kv_lengths, *window)
        if block_offsets is not None and cu_seqlens_q is None and kv_lengths is None:
            pairs = _listed_pairs(q, k, block_offsets, block_indices, block_q, block_k, *window)
        return 2 * q.shape[1] * pairs * (dims_of_q * q.shape[3] + dims_of_v * v.shape[3])

    return count


flops = {"attention": _products(1, 1), "attention_partial": _products(1, 1), "attention_vjp": _products(3, 2)}


def _held(*tensors: Tensor | None) -> int:
    return sum(0 if x is None else x.numel() * x.element_size() for x in tensors)


def _attention_bytes(q, k, v, bias, mask, page_table, kv_lengths) -> int:
    """q, the valid keys and values, bias and mask read once; out and lse written."""
    tokens = k.shape[2] * (1 if page_table is None else page_table.shape[1])
    share = 1.0 if kv_lengths is None else float(kv_lengths.sum()) / max(1, kv_lengths.numel() * tokens)
    rows = 1.0 if page_table is None else page_table.numel() / max(1, k.shape[0])
    out = q.numel() // max(1, q.shape[3]) * v.shape[3] * q.element_size()
    return int(_held(q, bias, mask) + share * rows * _held(k, v) + out + 4 * q.numel() // max(1, q.shape[3]))


bytes_moved = {
    "attention": _attention_bytes,
    "attention_vjp": lambda q, k, v, out, lse, bias, mask: 2 * _held(q, k, v, out, bias) + _held(lse, mask),
    "attention_quantize": lambda q, k, v, smooth: (
        _held(q, k, v, k if smooth else None) + sum(map(Tensor.numel, (q, k, v)))
    ),
    "attention_dequantize": lambda q8, k8, v8, dtype: (
        _held(q8, k8, v8) + DTYPES[dtype].itemsize * sum(map(Tensor.numel, (q8, k8, v8)))
    ),
    "attention_fp8_gradients": lambda dq8, dk8: 2 * _held(dq8, dk8),
    "attention_partial": lambda q, k, v: 2 * _held(q, k, v),
    "accumulate_attention": lambda out_a, lse_a: 3 * _held(out_a, lse_a),
    "merge_attention": lambda out_a, lse_a: 3 * _held(out_a, lse_a),
    "merge_attention_vjp": lambda out_a, lse_a: 5 * _held(out_a) + 5 * _held(lse_a),
}
