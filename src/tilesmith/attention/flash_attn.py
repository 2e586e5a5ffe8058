"""flash-attn's functions, in its signatures and layouts, over the attention op.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim, Dv head dim of
values, N packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine.argument_checks import (
    attributed_to,
    flag,
    floating,
    number,
    packed,
    positive,
    probability,
    readable,
    shaped,
    size,
    tensor,
)
from tilesmith.ops.attn.mask import Mask, Score

UNLIMITED = (-1, -1)  # a window without sides


@attributed_to("attention")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Softmax attention, [B, T, H, Dv] in q's dtype: flash-attn's function of this name. Differentiable.

    q: [B, T, H, D]. k, v: [B, S, G, D] and [B, S, G, Dv]; query head h reads kv head h // (H // G). float16, bfloat16,
        float32 and float64.
    dropout_p: the probability of dropping an attention weight, in [0, 1), drawn from the device's generator; pass 0 in
        evaluation.
    softmax_scale: 1 / sqrt(D) if None. softcap: c > 0 caps a scaled score s as c * tanh(s / c).
    causal, window_size: (left, right) keys around a query, -1 unlimited. The last query and the last key have the same
        position, whatever T and S are.
    alibi_slopes: fp32 [H] or [B, H]; slope * |distance| is subtracted from a score.
    deterministic: the same bits in every run, also of gradients; False follows
        `torch.are_deterministic_algorithms_enabled()`.
    return_attn_probs: must be False, since probabilities are never in memory.

    A query that sees no key gives 0. Raises ValueError and TypeError, naming the argument. Errors raised by the op give
    shapes in its layout, [B, heads, tokens, D].
    """
    name = "flash_attn_func"
    for which, x in (("q", q), ("k", k), ("v", v)):
        tensor(name, which, x, ("B", "tokens", "heads", "D"))
    how = _checked(name, dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs)
    check_slopes(name, alibi_slopes, q, q.shape[0], q.shape[2])
    mask, score = Mask(causal, sides(name, window_size)), Score(softmax_scale, softcap, alibi_slopes)
    out, _ = ops.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, score, **how)
    return out.transpose(1, 2)


@attributed_to("attention")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention over N concatenated sequences, [tokens, H, Dv] in q's dtype: flash-attn's function of this name.
    Differentiable.

    q: [tokens of all sequences, H, D]. k, v: [keys of all sequences, G, D] and [..., G, Dv], or with `block_table` the
        pages of a cache, [num_pages, page_size, G, D] and [num_pages, page_size, G, Dv].
    cu_seqlens_q, cu_seqlens_k: int32 [N + 1], the start of each sequence, then the total number of tokens, or of keys.
    max_seqlen_q, max_seqlen_k: ints, the length of the longest sequence; 0 if unknown.
    alibi_slopes: fp32 [H] or [N, H].
    block_table: int32 [N, pages], the pages of each sequence in order; entries after its last key are not read. The
        differences of cu_seqlens_k then give the number of keys of each sequence.

    Everything else is as in `flash_attn_func`; the last query of a sequence and its last key have the same position.
    """
    name = "flash_attn_varlen_func"
    keys = ("tokens", "heads", "D") if block_table is None else ("pages", "page_size", "heads", "D")
    for which, x, dims in (("q", q, ("tokens", "heads", "D")), ("k", k, keys), ("v", v, keys)):
        tensor(name, which, x, dims)
    for which, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        tensor(name, which, cu, ("N + 1",))
    for which, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        size(name, which, longest, 0)
    how = _checked(name, dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs)
    sequences = max(cu_seqlens_q.shape[0] - 1, 0)
    check_slopes(name, alibi_slopes, q, sequences, q.shape[1])
    mask, score = Mask(causal, sides(name, window_size)), Score(softmax_scale, softcap, alibi_slopes)
    how |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    query = q.transpose(0, 1)[None]
    if block_table is not None:
        how |= {
            "page_table": block_table,
            "kv_lengths": _paged_lengths(name, cu_seqlens_q, cu_seqlens_k, k, block_table, mask),
        }
        out, _ = ops.attention(query, k.transpose(1, 2), v.transpose(1, 2), mask, score, **how)
    else:
        how |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
        out, _ = ops.attention(query, k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, score, **how)
    return out[0].transpose(0, 1)


def _paged_lengths(name: str, starts_q: Tensor, starts_k: Tensor, k: Tensor, block_table: Tensor, mask: Mask) -> Tensor:
    """int32 [N]: the keys of each sequence, or an error where `block_table` has not their pages."""
    sequences = starts_q.shape[0] - 1
    tensor(name, "block_table", block_table, ("N", "pages"))
    shaped(name, "block_table", block_table, (sequences, block_table.shape[1]), device=k.device)
    shaped(name, "cu_seqlens_k", starts_k, (sequences + 1,), device=k.device)
    for which, x in (("block_table", block_table), ("cu_seqlens_k", starts_k)):
        if x.dtype != torch.int32:
            raise TypeError(f"{name}: {which} has dtype {x.dtype}; it must be int32")
    packed(f"{name}: cu_seqlens_k", starts_k)
    lengths = starts_k.diff()
    room = block_table.shape[1] * k.shape[1]
    longest = max(lengths.tolist(), default=0) if readable(lengths) else 0
    if longest > room:
        raise ValueError(
            f"{name}: cu_seqlens_k has a sequence of {longest} keys; block_table has {block_table.shape[1]} pages "
            f"of {k.shape[1]} for each: give it more pages"
        )
    if readable(lengths) and readable(starts_q):
        check_pages(
            name, block_table, k, first_slots(lengths.tolist(), starts_q.diff().tolist(), mask), lengths.tolist()
        )
    return lengths


def first_slots(lengths: list[int], queries: list[int], mask: Mask) -> list[int]:
    """The first slot of each sequence that a query of it may see."""
    left = -1 if mask.window is None else mask.window[0]
    return [0 if left < 0 else max(0, n - t - left) for n, t in zip(lengths, queries, strict=True)]


def check_pages(name: str, block_table: Tensor, cache: Tensor, first: list[int], behind: list[int]) -> None:
    """ValueError unless the pages of slots `first` to before `behind` of each row are pages of the cache
    [num_pages, page_size, ...]; where `readable`."""
    if not readable(block_table):
        return
    pages, size = cache.shape[:2]
    for row, (entries, start, end) in enumerate(zip(block_table.tolist(), first, behind, strict=True)):
        used = entries[start // size : -(-end // size)] if end > start else []
        wrong = next((entry for entry in used if not 0 <= entry < pages), None)
        if wrong is not None:
            raise ValueError(
                f"{name}: block_table holds {wrong} for slots {start} to {end - 1} of row {row}; the cache has pages 0 "
                f"to {pages - 1}: give each slot that is used one of them"
            )


def check_slopes(name: str, slopes: Tensor | None, q: Tensor, rows: int, heads: int) -> None:
    """Raise in the words of the function unless slopes are None or floating [heads] or [rows, heads], beside q."""
    if slopes is None:
        return
    shaped(name, "alibi_slopes", slopes, (heads,), (rows, heads), device=q.device)
    floating(name, "alibi_slopes", slopes)
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: alibi_slopes requires a gradient but would receive none; pass alibi_slopes.detach()")


def _checked(
    name: str, dropout_p: Any, scale: Any, causal: Any, softcap: Any, deterministic: Any, probs: Any
) -> dict[str, Any]:
    """The keywords of the op, or an error in the words of the function."""
    if scale is not None:
        positive(name, "softmax_scale", scale)
    number(name, "softcap", softcap, 0.0)
    for which, value in (("causal", causal), ("deterministic", deterministic), ("return_attn_probs", probs)):
        flag(name, which, value)
    if probs:
        raise ValueError(
            f"{name}: return_attn_probs must be False, since probabilities are never in memory; "
            "tilesmith.ops.attention returns lse beside out, tilesmith.ops.attention_weights the probabilities"
        )
    return {"dropout_p": probability(name, "dropout_p", dropout_p), "deterministic": deterministic or None}


def sides(name: str, window: Any) -> tuple[int, int] | None:
    """Keys to the left and to the right of a query; None where neither side has a limit."""
    pair = isinstance(window, tuple | list) and len(window) == 2
    if not pair or not all(isinstance(side, int) and not isinstance(side, bool) for side in window):
        raise TypeError(f"{name}: window_size must be a pair of ints (left, right), -1 unlimited, got {window!r}")
    if min(window) < -1:
        raise ValueError(f"{name}: window_size must have sides of at least -1, which is unlimited, got {tuple(window)}")
    return None if tuple(window) == UNLIMITED else (window[0], window[1])
