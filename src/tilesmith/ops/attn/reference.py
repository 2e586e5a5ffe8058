"""Attention in plain PyTorch, any device: the meaning of `attention` and `merge_attention` and of their gradients.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim of q and k, Dv head
dim of v, N packed documents.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device import philox
from tilesmith.engine.argument_checks import packed, readable
from tilesmith.ops.attn.block_lists import check_lists
from tilesmith.ops.attn.visibility import visibility

FACTOR_BLOCK = 128  # tokens that share a factor of quantised values, where there is one for each block


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
    """Softmax attention over the visible keys, and the logarithm of its denominator.

    Values
      q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv]: fp64, fp32, fp16 or bf16, one dtype, last stride 1, else any
        strides; query head h reads kv head h // (H // G). q, k and v may be float8 or int8 where they have a scale.
      page_table [B, pages] int32: k and v are then [num_pages, G, page_size, D | Dv] and S = pages * page_size; pages
        that hold no valid key are not read, whatever their entries are. On a CPU an entry that is no page, for keys
        that a query sees, raises ValueError.
      q_scale, k_scale, v_scale fp32, positive: factors of q, k and v, shaped like the tensor without its last dim,
        where any dim may be 1; or, without pages, with one factor for each block of 128 tokens. They and alibi receive
        no gradient; one that requires it is refused.
    Score of query i and key j
      s = (q_i . k_j) * scale * q_scale * k_scale; scale is 1/sqrt(D) if None
      s = softcap * tanh(s / softcap) if softcap > 0
      s = s - alibi * |position of i - position of j|, alibi [H], [B, H] or [N, H] of N packed documents, fp32
      s = s + bias, bias [B|1, H|1, T|1, S|1], of q's dtype or fp32
    Visible: key j for query i, where everything given agrees. Positions are aligned bottom right: the last query and
    the last valid key have the same one, p_i = i + (valid keys) - T and p_j = j.
      causal: p_j <= p_i. window_left, window_right: p_i - left <= p_j <= p_i + right; -1 is unlimited.
      prefix_lengths [B] int32: keys with p_j < prefix are visible whatever causal and the window say.
      mask bool, broadcastable to [B, H, T, S] dim by dim: True may attend.
      q_documents [B, T], k_documents [B, S] int32: equal ids see each other.
      kv_lengths [B] int32: the number of valid keys of each row; below 0 it counts as 0, beyond the keys as all.
      cu_seqlens_q, cu_seqlens_k [N + 1] int32, from 0: B = 1, documents lie one after another on the token axes; each
        attends to itself with its own positions; prefix_lengths and kv_lengths are then [N]. Tokens behind the last
        document see nothing. With `page_table` [N, pages] only cu_seqlens_q is given, and kv_lengths.
        max_seqlen_q, max_seqlen_k: the longest document, 0 if unknown; they never change a value. On a CPU numbers that
        do not ascend from 0, end behind the tokens or are longer than their maximum raise ValueError.
      block_offsets [B|1, H|G|1, ceil(T / block_q) + 1] int32, block_indices int32: row r of blocks sees the key blocks
        block_indices[block_offsets[r] : block_offsets[r + 1]], ascending; rows lie one after another in
        (batch, head, block) order. The same transposed (query blocks of a key block), for gradients, which make them
        where they are left out: `*_t`. On a CPU lists that do not ascend or name blocks that are not there raise
        ValueError.
    Softmax
      lse = log(sum over visible j of exp(s) + exp(sinks)), natural logarithm; sinks [H]: one more logit in the
        denominator. p = exp(s - lse).
      dropout_p: p is zeroed or divided by 1 - dropout_p, by the 16 bits that `tilesmith.device.philox` draws for `seed`
        (int64 [2]) at the linear index of [B, H, T, S], which round dropout_p to a multiple of 2^-16; lse knows nothing
        of it.
      out = sum of p * v * v_scale.
    A row that sees no key: out 0, lse -inf (or sinks), gradients 0. Keys that no query sees and queries that see no key
    may hold NaN or inf; neither reaches any output. A score of -inf counts as not visible; one of NaN makes out and lse
    of its row NaN.
    A row whose keys a finite bias all hides has, here, out and gradients of its own softmax. Kernels are apart from
    that in two ways, as PyTorch's memory-efficient backend is. Their scores of 16-bit values are in units of log 2, in
    which a bias below -2.36e38 (finfo.min of bf16 and fp32) is -inf. And gradients take p from lse, in which below
    about -1e7 the logarithm of the number of keys is rounded away: p is too large by up to that number.

    Returns out [B, H, T, Dv] in q's dtype (bf16 for an 8-bit q), in memory [B, T, H, Dv] if q's head stride is smaller
    than its token stride, else contiguous; lse [B, H, T] fp32 (fp64 for fp64), contiguous.
    Everything is computed in fp32 (fp64 for fp64) and rounded once. `deterministic` never changes a value here.
    Kernels may round 8-bit values times their factors to the dtype of out, and p to the dtype of the values that it
    meets: e4m3 where those have 8 bits, relative to the largest p of the row so far.
    """
    check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    shape = _shape(q, k, page_table)
    check_lists(shape[2:], block_offsets, block_indices, block_offsets_t, block_indices_t, block_q, block_k)
    values = _Values(q, k, v, page_table, q_scale, k_scale, v_scale)
    position_q, position_k, visible = visibility(
        *shape, q.device, mask, cu_seqlens_q, cu_seqlens_k, kv_lengths, prefix_lengths, q_documents, k_documents,
        block_offsets, block_indices, page_table, causal, window_left, window_right, block_q, block_k,
    )  # fmt: skip
    if page_table is not None:
        _check_pages(page_table, k, visible)
    values.hide(visible)
    slopes = _slopes(alibi, cu_seqlens_q, shape[2])
    scores, _ = _scores(values, bias, slopes, position_q, position_k, visible, scale, softcap)
    logits = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat((scores, column), -1)
    lse = torch.logsumexp(logits, -1)
    p = _probabilities(scores, lse)
    if dropout_p > 0.0:
        p = p * _dropout(seed, p, dropout_p)
    return _in_order(p @ values.v, q), lse


def attention_vjp(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    kv_lengths: Tensor | None,
    prefix_lengths: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    block_offsets: Tensor | None,
    block_indices: Tensor | None,
    block_offsets_t: Tensor | None,
    block_indices_t: Tensor | None,
    page_table: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_q: int,
    block_k: int,
    deterministic: bool,
    output_mask: Sequence[bool],
    gradients_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias, dsinks) of `attention`; those that `output_mask` leaves out are empty.

    dout [B, H, T, Dv] and dlse [B, H, T]: None counts as zero. dq, dk and dv have the memory order of q, k and v
    (`torch.empty_like`), dbias and dsinks are contiguous; each has the dtype of its input. gradients_fp32: dq, dk and
    dv of 16-bit inputs are fp32, not rounded: parts of sums that are rounded when they are complete.
    """
    shape = _shape(q, k, page_table)
    values = _Values(q, k, v, page_table, q_scale, k_scale, v_scale)
    position_q, position_k, visible = visibility(
        *shape, q.device, mask, cu_seqlens_q, cu_seqlens_k, kv_lengths, prefix_lengths, q_documents, k_documents,
        block_offsets, block_indices, page_table, causal, window_left, window_right, block_q, block_k,
    )  # fmt: skip
    values.hide(visible)
    slopes = _slopes(alibi, cu_seqlens_q, shape[2])
    scores, slope = _scores(values, bias, slopes, position_q, position_k, visible, scale, softcap)
    lse = lse.to(values.q.dtype)
    p = _probabilities(scores, lse)
    seen = visible.any(-1, keepdim=True)
    dout = torch.where(seen, p.new_zeros(()) if dout is None else dout.to(p.dtype), 0.0).expand(out.shape)
    # the softmax's own gradient and that of lse meet in one number a row
    delta = (dout * out.to(p.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(lse != float("-inf"), dlse.to(p.dtype), 0.0)
    dropped = _dropout(seed, p, dropout_p) if dropout_p > 0.0 else 1.0
    ds = p * ((dout @ values.v.transpose(-1, -2)) * dropped - delta.unsqueeze(-1))
    dscaled = ds * slope

    wants_q, wants_k, wants_v, wants_bias, wants_sinks = output_mask
    dq, dk, dv, dbias, dsinks = (q.new_empty(0) for _ in output_mask)
    if wants_q:
        dq = gradient_like(q, gradients_fp32).copy_((dscaled @ values.k) * values.q_factor)
    if wants_k:
        dk = values.fold(dscaled.transpose(-1, -2) @ values.q, gradient_like(k, gradients_fp32), values.k_factor)
    if wants_v:
        dv = values.fold((p * dropped).transpose(-1, -2) @ dout, gradient_like(v, gradients_fp32), values.v_factor)
    if wants_bias and bias is not None:
        dbias = ds.sum_to_size(bias.shape).to(bias.dtype).contiguous()
    if wants_sinks and sinks is not None:
        share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
        share = torch.where(lse != float("-inf"), share, 0.0)  # a sink of -inf over a row without keys: 0, not NaN
        dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, merged from the results for each.

    out_a, out_b [..., Dv] of one dtype, lse_a, lse_b [...] fp32 (fp64 for fp64): the results of `attention` over each
    set. lse = log(exp(lse_a) + exp(lse_b)), out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse). A side with lse
    -inf is ignored, whatever its `out` holds; if both are -inf, out is 0 and lse -inf. An lse of NaN makes both results
    NaN.

    Returns out [..., Dv] (of 4-dim results, in memory [B, T, H, Dv] if out_a's head stride is smaller than its token
    stride, else contiguous) and lse [...], contiguous; computed in fp32. Raises TypeError for dtypes, ValueError for
    shapes and devices that do not fit.
    """
    lse, share_a, share_b = _shares(lse_a, lse_b)
    acc = lse.dtype
    a, b = torch.where(share_a != 0, out_a.to(acc), 0.0), torch.where(share_b != 0, out_b.to(acc), 0.0)
    out = share_a * a + share_b * b
    return _in_order(out, out_a), lse.contiguous()


def merge_attention_vjp(
    dout: Tensor | None,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dout_a, dlse_a, dout_b, dlse_b) of `merge_attention`; what `output_mask` leaves out is empty."""
    _, share_a, share_b = _shares(lse_a, lse_b)
    acc = share_a.dtype
    a = torch.where(share_a != 0, out_a.to(acc), 0.0)
    b = torch.where(share_b != 0, out_b.to(acc), 0.0)
    dout = torch.zeros_like(a) if dout is None else dout.to(acc)
    dlse = torch.zeros_like(share_a) if dlse is None else dlse.to(acc).unsqueeze(-1)
    # out is a convex combination, so moving one lse moves out along a - b
    pull = share_a * share_b * (dout * (a - b)).sum(-1, keepdim=True)
    gradients = (
        (out_a, dout * share_a),
        (lse_a, (share_a * dlse + pull).squeeze(-1)),
        (out_b, dout * share_b),
        (lse_b, (share_b * dlse - pull).squeeze(-1)),
    )
    return tuple(
        torch.empty_like(x).copy_(dx) if wanted else x.new_empty(0)
        for (x, dx), wanted in zip(gradients, output_mask, strict=True)
    )


def check_lengths(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """Raise ValueError for lengths of packed documents that contradict the tokens or each other. On a CPU only."""
    for side, x, starts, most in (("q", q, cu_seqlens_q, max_seqlen_q), ("k", k, cu_seqlens_k, max_seqlen_k)):
        if starts is None or not readable(starts):
            continue
        packed(f"attention: cu_seqlens_{side}", starts, x.shape[2])
        longest = int(starts.diff().max())
        if 0 < most < longest:
            raise ValueError(
                f"attention: max_seqlen_{side} is {most}, but cu_seqlens_{side} has a document of {longest} tokens; "
                f"give {longest}, or 0 where it is not known"
            )


def out_like(like: Tensor, head_dim: int, fp32: bool = False) -> Tensor:
    """An empty result for `like` [..., D]: [..., head_dim], contiguous, or [B, H, T, head_dim] over [B, T, H, head_dim]
    memory where the head stride of `like` is smaller than its token stride. fp32: of at least 32 bits."""
    dtype = torch.bfloat16 if like.dtype.itemsize == 1 else like.dtype
    dtype = torch.promote_types(dtype, torch.float32) if fp32 else dtype
    if is_tokens_first(like):
        return empty_tokens_first(like, like.shape[1], head_dim, dtype)
    return like.new_empty(*like.shape[:-1], head_dim, dtype=dtype)


def gradient_like(x: Tensor, fp32: bool) -> Tensor:
    """An empty gradient of x: of its dtype, or, fp32, of at least 32 bits."""
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32) if fp32 else x.dtype)


def _in_order(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory order and with the dtype of `out_like`."""
    x = x.to(torch.bfloat16 if like.dtype.itemsize == 1 else like.dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if is_tokens_first(like) else x.contiguous()


def empty_tokens_first(like: Tensor, heads: int, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, heads, T, dim] over [B, T, heads, dim] memory, of the rows and tokens of `like` [B, *, T, *] and, if
    dtype is None, its dtype."""
    return like.new_empty(like.shape[0], like.shape[2], heads, dim, dtype=dtype).transpose(1, 2)


def is_tokens_first(x: Tensor) -> bool:
    """Whether x [B, H, T, D] lies in memory as [B, T, H, D]: its head stride is smaller than its token stride."""
    return x.ndim == 4 and x.stride(1) < x.stride(2)


def _shape(q: Tensor, k: Tensor, page_table: Tensor | None) -> tuple[int, int, int, int]:
    batch, heads, tokens, _ = q.shape
    return batch, heads, tokens, key_count(batch, k, page_table)


def slots(k: Tensor, page_table: Tensor | None) -> int:
    """How many keys a batch row of k, or of its pages, has room for."""
    return k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]


def key_count(batch: int, k: Tensor, page_table: Tensor | None) -> int:
    """S: the keys of a batch row, or of all packed documents."""
    if page_table is None:
        return k.shape[2]
    documents, pages = page_table.shape
    return (pages if documents == batch else documents * pages) * k.shape[2]


def _check_pages(page_table: Tensor, k: Tensor, visible: Tensor) -> None:
    """Raise ValueError for entries that are no page of k, of keys that a query sees; where `readable`."""
    if not (readable(page_table) and readable(visible)):
        return
    pages, _, size, _ = k.shape
    seen = visible.any(1).any(1).reshape(*page_table.shape, size).any(-1)
    wrong = (seen & ((page_table < 0) | (page_table >= pages))).nonzero()
    if wrong.numel():
        row, place = wrong[0].tolist()
        raise ValueError(
            f"attention: page_table holds {int(page_table[row, place])} for slots {place * size} to "
            f"{(place + 1) * size - 1} of row {row}; the cache has pages 0 to {pages - 1}: give each slot that is used "
            "one of them"
        )


class _Values:
    """q, k and v in the accumulation dtype, scaled, out of their pages, one kv head for each query head."""

    def __init__(self, q, k, v, page_table, q_scale, k_scale, v_scale):
        acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.page_table, self.packed = page_table, page_table is not None and len(page_table) != len(q)
        self.q_factor = self.k_factor = self.v_factor = 1.0
        self.group = q.shape[1] // k.shape[1]
        if q_scale is not None:
            self.q_factor = by_token(q_scale.to(acc), q)
        if k_scale is not None:
            self.k_factor = by_token(k_scale.to(acc), k)
        if v_scale is not None:
            self.v_factor = by_token(v_scale.to(acc), v)
        self.q = q.to(acc) * self.q_factor
        self.k = self._unfold(k.to(acc) * self.k_factor)
        self.v = self._unfold(v.to(acc) * self.v_factor)

    def hide(self, visible: Tensor) -> None:
        """Zero what nobody sees, so that NaN in padding stays there."""
        seen = visible.any(-2).unsqueeze(-1)
        self.q = torch.where(visible.any(-1).unsqueeze(-1), self.q, 0.0)
        self.k = torch.where(seen, self.k, 0.0)
        self.v = torch.where(seen, self.v, 0.0)

    def fold(self, gradient: Tensor, into: Tensor, factor) -> Tensor:
        """Write the gradient of k or v from that of its unfolded form: groups of heads summed, keys back in their
        pages."""
        gradient = gradient.unflatten(1, (-1, self.group)).sum(2)
        if self.page_table is not None:
            batch, pages = self.page_table.shape
            if self.packed:
                gradient = gradient.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)
            gradient = gradient.unflatten(2, (pages, -1)).transpose(1, 2).flatten(0, 1)
            table = self.page_table.flatten().long().clamp(0, len(into) - 1)
            gradient = gradient.new_zeros(into.shape).index_add(0, table, gradient)
        return into.copy_(gradient * factor)

    def _unfold(self, x: Tensor) -> Tensor:
        if self.page_table is not None:
            x = x[self.page_table.long().clamp(0, max(len(x) - 1, 0))].transpose(1, 2).flatten(2, 3)
            if self.packed:
                x = x.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        return x.repeat_interleave(self.group, 1)


def by_token(factors: Tensor, x: Tensor) -> Tensor:
    """The factors of x [..., tokens, dim] with a dim behind them, those of blocks for each of their tokens."""
    if 1 < factors.shape[2] != x.shape[2]:
        factors = factors.repeat_interleave(FACTOR_BLOCK, 2)[:, :, : x.shape[2]]
    return factors.unsqueeze(-1)


def widened(x: Tensor, factors: Tensor, into: Tensor) -> Tensor:
    """into, filled with x times its factors, rounded once: every 8-bit number is one of bf16 and fp16."""
    return into.copy_(x).mul_(by_token(factors, x))


def slopes_of_documents(alibi: Tensor, cu_seqlens_q: Tensor | None) -> bool:
    """Whether alibi [N, H] has a row for each packed document."""
    return alibi.ndim == 2 and cu_seqlens_q is not None and alibi.shape[0] > 1


def slopes_of_tokens(alibi: Tensor, cu_seqlens_q: Tensor, tokens: int) -> Tensor:
    """[T, H]: the slopes of each token's document; of a token behind the last document those of that one."""
    token = torch.arange(tokens, device=alibi.device, dtype=cu_seqlens_q.dtype)
    document = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
    return alibi[document.clamp(max=len(alibi) - 1)]


def _slopes(alibi: Tensor | None, cu_seqlens_q: Tensor | None, tokens: int) -> Tensor | None:
    """Slopes that broadcast to [B, H, T, S]."""
    if alibi is None or not slopes_of_documents(alibi, cu_seqlens_q):
        return None if alibi is None else alibi[..., None, None]
    return slopes_of_tokens(alibi, cu_seqlens_q, tokens).t()[None, :, :, None]


def _scores(values: _Values, bias, slopes, position_q, position_k, visible, scale, softcap):
    """Scores, -inf where not visible, and their derivative by q . k."""
    slope = values.q.shape[-1] ** -0.5 if scale is None else scale
    scores = (values.q @ values.k.transpose(-1, -2)) * slope
    if softcap > 0.0:
        bent = torch.tanh(scores / softcap)
        scores, slope = bent * softcap, slope * (1.0 - bent * bent)
    if slopes is not None:
        distance = (position_q[:, :, None] - position_k[:, None, :]).abs().unsqueeze(1)
        scores = scores - slopes.to(scores.dtype) * distance
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return torch.where(visible & (scores != float("-inf")), scores, float("-inf")), slope  # and no gradient there


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse). Where a bias of -1e9, say, hides all keys of a row, the logarithm of their number is rounded
    away in lse, and the differences would make a sum of what is a mean. So rows with an lse that has less than half of
    its digits behind the point are made by way of their own softmax."""
    lse = lse.unsqueeze(-1)
    shown = scores != float("-inf")
    far = lse.isfinite() & (lse.abs() > torch.finfo(lse.dtype).eps ** -0.5)
    near, own = torch.where(far, 0.0, lse), torch.where(far, scores, 0.0)  # 0 where the other way is taken
    p = torch.exp(torch.where(shown & ~far, scores - near, float("-inf")))
    share = torch.exp(torch.logsumexp(own, -1, keepdim=True) - torch.where(far, lse, 0.0))
    return torch.where(far, torch.softmax(own, -1) * torch.where(far, share, 0.0), p)


def _dropout(seed: Tensor, p: Tensor, dropout_p: float) -> Tensor:
    """The factor of each probability: 0 or 1 / (1 - dropout_p)."""
    return philox.dropout(torch.ones_like(p), seed, dropout_p)


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The merged lse [...] and each side's share of it [..., 1]."""
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top != float("-inf"), top, 0.0)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    alive = a + b != 0
    total = torch.where(alive, a + b, 1.0)
    lse = torch.where(alive, top + torch.log(total), float("-inf"))
    return lse, (a / total).unsqueeze(-1), (b / total).unsqueeze(-1)
