"""Scores, shares and choices of blocks of keys in plain PyTorch: what a sparse attention decides by.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim, L lists of a batch
row, R = ceil(T / block_q) blocks of queries (rows), C = ceil(S / block_k) blocks of keys (columns).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype
from tilesmith.ops.attn.block_lists import check_contents
from tilesmith.ops.attn.reference import scale_of
from tilesmith.ops.attn.visibility import visibility


def block_scores(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
) -> Tensor:
    """The score of each block of keys for each block of queries: log(sum of exp(scale q . k)) over its pairs.

    Args:
        q: [B, H, T, D], fp64, fp32, fp16 or bf16, any strides.
        k: [B, G, S, D] of q's dtype; query head h reads head h // (H // G).
        scale: factor of q . k; 1 / sqrt(D) if None.
        causal: query i sees the keys up to i + S - T only, and only such pairs count.
        block_q, block_k: tokens of a block; the last ones may be shorter.

    Returns [B, H, R, C] fp32 (fp64 for fp64), contiguous; -inf where no pair counts. Differentiable.
    Raises ValueError or TypeError, naming the argument, for shapes, dtypes, devices and numbers that do not fit.
    """
    return torch.logsumexp(_tiled(_scores(q, k, scale, causal), block_q, block_k), (3, 5))


def block_scores_vjp(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    scale: float | None,
    causal: bool,
    block_q: int,
    block_k: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dq, dk) of `block_scores`, contiguous; an empty tensor where ``output_mask`` is False.

    Blocks whose dscores is 0 cost nothing: a loss that looks at few blocks has a cheap gradient.
    """
    acc, group = sum_dtype(q), q.shape[1] // k.shape[1]
    pairs = _scores(q, k, scale, causal)
    sizes = pairs.shape[-2:]
    # in a block without pairs exp(-inf - 0) = 0
    base = torch.where(scores > float("-inf"), scores, 0.0).to(acc)
    ds = torch.exp(pairs - _spread(base, block_q, block_k, sizes)) * _spread(dscores.to(acc), block_q, block_k, sizes)
    factor = scale_of(q, scale)
    dq, dk = q.new_empty(0), k.new_empty(0)
    if output_mask[0]:
        dq = (ds @ k.to(acc).repeat_interleave(group, 1) * factor).to(q.dtype).contiguous()
    if output_mask[1]:
        every = ds.transpose(-1, -2) @ q.to(acc) * factor
        dk = every.unflatten(1, (-1, group)).sum(2).to(k.dtype).contiguous()
    return dq, dk


def block_max_scores(
    q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False, block_k: int = 128, block_q: int = 1
) -> Tensor:
    """The largest score that a query of each block of queries has in each block of keys: max of scale q . k.

    q, k, scale, causal, block_k, block_q: see `block_scores`; with a block_q of 1 each query by itself. Returns
    [B, H, R, C] fp32 (fp64 for fp64), contiguous; -inf where no pair counts. Differentiable: the gradient of a pair of
    blocks is that of one pair of tokens, the largest; of equal ones that of the first query, and of its first key. Rows
    are computed few at a time, so that scores of T x S are not in memory at once.
    """
    return torch.cat([x.max(-1).values for _, x in _pairs_of_blocks(q, k, scale, causal, block_q, block_k)], 2)


def block_max_scores_vjp(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    scale: float | None,
    causal: bool,
    block_k: int,
    block_q: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dq, dk) of `block_max_scores`, with the strides that `torch.empty_like` gives q and k; an empty tensor
    where ``output_mask`` is False.

    Blocks whose dscores is 0 cost nothing: a loss that looks at few blocks has a cheap gradient.
    """
    acc, group = sum_dtype(q), q.shape[1] // k.shape[1]
    factor = scale_of(q, scale)
    wide_q, wide_k = q.to(acc), k.to(acc).repeat_interleave(group, 1)
    ds = torch.where(scores > float("-inf"), dscores, 0.0).to(acc) * factor
    dq, dk = torch.zeros_like(wide_q), torch.zeros_like(wide_k)
    for first, pairs in _pairs_of_blocks(q, k, scale, causal, block_q, block_k) if ds.numel() else ():
        place = pairs.argmax(-1)  # [B, H, rows, C], the lowest of equal ones
        row = first + torch.arange(place.shape[2], device=q.device)[:, None]
        column = torch.arange(place.shape[3], device=q.device)
        # in a block without pairs the place may be behind the last token; its gradient is 0
        query = (row * block_q + place // block_k).clamp(max=q.shape[2] - 1)
        key = (column * block_k + place % block_k).clamp(max=k.shape[2] - 1)
        change = ds[:, :, first : first + place.shape[2]].flatten(2)[..., None]
        query, key = (x.flatten(2)[..., None].expand(*x.shape[:2], -1, q.shape[3]) for x in (query, key))
        dq = dq.scatter_add(2, query, change * wide_k.gather(2, key))
        dk = dk.scatter_add(2, key, change * wide_q.gather(2, query))
    dk = dk.unflatten(1, (-1, group)).sum(2)
    given = zip((q, k), (dq, dk), output_mask)
    out = [torch.empty_like(x).copy_(y) if wanted else x.new_empty(0) for x, y, wanted in given]
    return out[0], out[1]


def block_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    offsets: Tensor | None = None,
    indices: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
    query_stride: int = 1,
) -> Tensor:
    """The share of each block of keys in the attention of each block of queries: mean of sum of exp(scale q . k - lse).

    The sum is over the keys of a block, the mean over its queries and the query heads of a kv head. With the `lse` that
    `attention` returns for the same mask, the shares of a row add up to 1 (to less where a query sees nothing).

    Args:
        q, k, scale, causal, block_q, block_k: see `block_scores`.
        lse: [B, H, T], fp32 (fp64 for fp64). A query with -inf counts as one whose shares are 0.
        offsets, indices: block lists as `attention` takes them, int32 [B|1, G|1, R + 1] and [entries]: only blocks in
            a list are computed, others are 0. None: all.
        query_stride: a sample of the queries stands for all: each query_stride-th of a block, from its first one on.
            It must divide block_q.

    Returns [B, G, R, C] fp32 (fp64 for fp64), contiguous. Gradients are those of this reference, recomputed. On a CPU
    lists that do not ascend or name blocks that are not there raise ValueError.
    """
    batch, heads, tokens, _ = q.shape
    keys, kv_heads = k.shape[2], k.shape[1]
    acc, group = sum_dtype(q), heads // kv_heads
    lse = lse.to(acc).unsqueeze(-1)
    pairs = _scores(q, k, scale, causal)
    p = torch.where(lse > float("-inf"), torch.exp(pairs - torch.where(lse > float("-inf"), lse, 0.0)), 0.0)
    if offsets is not None and indices is not None:
        check_contents(offsets, indices, -(-keys // block_k), of="block_mass", name="")
        lists = {"block_offsets": offsets, "block_indices": indices, "block_q": block_q, "block_k": block_k}
        p = torch.where(visibility(batch, heads, tokens, keys, q.device, **lists)[2], p, 0.0)
    p, block_q, tokens = p[:, :, ::query_stride], block_q // query_stride, -(-tokens // query_stride)
    total = _tiled(p, block_q, block_k, 0.0).sum((3, 5)).unflatten(1, (kv_heads, group)).sum(2)
    rows = torch.full((total.shape[2],), block_q, dtype=acc, device=q.device)
    if len(rows):
        rows[-1] = tokens - (len(rows) - 1) * block_q
    return (total / (group * rows[:, None])).contiguous()


def block_shares(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block: int = 128,
    stretches: int = 8,
    query_stretches: int | None = None,
    query_stride: int = 1,
    key_stride: int = 1,
) -> Tensor:
    """Estimated share of each block of keys in the attention of each block of queries.

    Keys are averaged over stretches of block / stretches tokens, queries over stretches of block / query_stretches
    tokens, and rounded to their dtype; the softmax of the means' scores is summed over the stretches of a block of
    keys, and averaged over those of a block of queries and over the query heads of a kv head. A row's shares add up to
    1.

    Args:
        q, k, scale: see `block_scores`.
        causal: a mean of queries sees the means of keys up to the last one that begins in its stretch; it needs T == S.
        block: tokens of a block; the last one, and the last stretch, may be shorter.
        stretches: of a block, which they divide.
        query_stretches: those of a block of queries, a divisor of stretches; None: as many.
        query_stride, key_stride: a mean of queries is that of each query_stride-th token of its stretch, from the first
            one on, and one of keys that of each key_stride-th. They must divide the stretches.

    Returns [B, G, R, C] fp32 (fp64 for fp64), contiguous. Gradients are those of this reference, recomputed.
    """
    of_queries = stretches if query_stretches is None else query_stretches
    q, k = (
        stretch_means(q[:, :, ::query_stride], block // of_queries // query_stride),
        stretch_means(k[:, :, ::key_stride], block // stretches // key_stride),
    )
    scores, ratio = _scores(q, k, scale, False), stretches // of_queries
    if causal:
        row, column = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = torch.where(column < (row[:, None] + 1) * ratio, scores, float("-inf"))
    total = _tiled(scores.softmax(-1), of_queries, stretches, 0.0).sum((3, 5)).unflatten(1, (k.shape[1], -1)).mean(2)
    rows = torch.full((total.shape[2],), of_queries, dtype=total.dtype, device=q.device)
    if len(rows):
        rows[-1] = scores.shape[2] - (len(rows) - 1) * of_queries
    return (total / rows[:, None]).contiguous()


def block_select(
    scores: Tensor,
    counts: Tensor,
    visible: Tensor,
    mass: float = 1.0,
    first: int = 0,
    last: int = 0,
    ends: Tensor | None = None,
) -> Tensor:
    """The blocks of keys that each block of queries keeps: bool [B, L, R, C], contiguous.

    Of the first visible[r] columns a row keeps the counts[r] best: its `last` last ones (from the diagonal backward),
    then its `first` first ones, then by score, the leftmost of equal ones. With mass < 1 scores must be shares, none
    below 0: behind its `last` and `first` ones the row then stops as soon as what it keeps adds up to `mass` of what it
    sees.

    Args:
        scores: [B, L, R, C], fp64, fp32, fp16 or bf16; NaN counts as -inf.
        counts, visible: int32 [R]; numbers beyond the columns count as all of them.
        mass: in (0, 1].
        first, last: how many blocks are kept whatever their scores are.
        ends: int32 [R], the column behind the diagonal, from which `last` counts backward; visible if None.

    Not differentiable. Raises ValueError or TypeError, naming the argument, for what does not fit.
    """
    columns = scores.shape[3]
    column = torch.arange(columns, device=scores.device)
    seen = visible.long().clamp(0, columns)[:, None]
    candidate = column < seen
    acc = sum_dtype(scores)
    value = torch.where(scores.isnan() | ~candidate, float("-inf"), scores.to(acc))
    end = seen if ends is None else torch.minimum(ends.long().clamp(min=0)[:, None], seen)
    behind = end - 1 - column  # blocks between the diagonal and this one
    near = (behind >= 0) & (behind < last)
    forced = torch.where(near, 2 * columns - behind, torch.where(column < first, columns - column, 0))
    forced = torch.where(candidate, forced, -1).expand_as(value)
    by_score = value.argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, forced.gather(-1, by_score).argsort(dim=-1, descending=True, stable=True))
    kept = column < torch.minimum(counts.long(), seen[:, 0])[:, None]
    kept = kept.expand_as(value)
    if mass < 1.0:
        share = torch.where(value > 0, value, 0.0)
        before = share.gather(-1, order).cumsum(-1).roll(1, -1)
        before[..., :1] = 0.0
        kept = kept & ((before < mass * share.sum(-1, keepdim=True)) | (forced.gather(-1, order) > 0))
    return torch.zeros(value.shape, dtype=torch.bool, device=value.device).scatter_(-1, order, kept)


def block_lists(keep: Tensor, room: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists from a boolean table, without waiting for the device to count its entries.

    Args:
        keep: bool [B, L, R, C].
        room: how many entries `indices` has room for; it must be at least the number of True. Entries beyond it are
            left out, of the lists by rows and of those by columns, which then differ.
        counts: int32 [R], how many True each row of every table has, where that is known before (`block_select` with
            mass 1 keeps min(counts, visible)). Kernels rely on it: with other numbers their lists are wrong.

    Returns offsets int32 [B, L, R + 1], indices int32 [room], and the same by columns: offsets_t [B, L, C + 1],
    indices_t [room]: the form that `attention` takes. Entries behind the last list are 0. Not differentiable.
    """
    return *_compressed(keep, room), *_compressed(keep.transpose(2, 3), room)


def _compressed(keep: Tensor, room: int) -> tuple[Tensor, Tensor]:
    batch, many, rows, columns = keep.shape
    ends = torch.nn.functional.pad(keep.sum(-1).flatten().cumsum(0), (1, 0))
    row = torch.arange(rows + 1, device=keep.device)
    starts = torch.arange(batch * many, device=keep.device)[:, None] * rows
    offsets = ends[starts + row].view(batch, many, rows + 1).clamp(max=room).int()
    place = keep.flatten().cumsum(0) - 1
    place = torch.where(keep.flatten() & (place < room), place, room)
    column = torch.arange(columns, device=keep.device, dtype=torch.int32).expand(keep.shape)
    indices = torch.zeros(room + 1, dtype=torch.int32, device=keep.device)
    return offsets, indices.scatter_(0, place, column.reshape(-1))[:room].clone()


def stretch_means(x: Tensor, stretch: int) -> Tensor:
    """Means over stretches of tokens, [B, heads, ceil(T / stretch), D]; the last one may be shorter."""
    tokens = x.shape[2]
    whole = tokens // stretch * stretch
    means = x[:, :, :whole].unflatten(2, (-1, stretch)).mean(3) if whole else x[:, :, :0]
    if whole == tokens:
        return means
    return torch.cat((means, x[:, :, whole:].mean(2, keepdim=True)), 2)


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool, behind: int = 0) -> Tensor:
    """Scaled scores [B, H, T, S], -inf where not visible. behind: how many queries come after those of q."""
    acc, group = sum_dtype(q), q.shape[1] // k.shape[1]
    factor = scale_of(q, scale)
    scores = q.to(acc) @ k.to(acc).repeat_interleave(group, 1).transpose(-1, -2) * factor
    if not causal:
        return scores
    tokens, keys = scores.shape[-2:]
    query, key = torch.arange(tokens, device=q.device), torch.arange(keys, device=q.device)
    return torch.where(key <= query[:, None] + (keys - tokens - behind), scores, float("-inf"))


def _pairs_of_blocks(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, block_q: int, block_k: int
) -> Iterator[tuple[int, Tensor]]:
    """A number of rows of blocks and their scores [B, H, rows, C, block_q * block_k], some rows after another."""
    tokens = q.shape[2]
    step = max(1, 512 // block_q) * block_q
    for first in range(0, max(tokens, 1), step):
        some = q[:, :, first : first + step]
        scores = _scores(some, k, scale, causal, tokens - first - some.shape[2])
        yield first // block_q, _tiled(scores, block_q, block_k).transpose(3, 4).flatten(4)


def _tiled(x: Tensor, block_q: int, block_k: int, fill: float = float("-inf")) -> Tensor:
    """[B, H, T, S] as [B, H, R, block_q, C, block_k], `fill` behind the last token."""
    x = torch.nn.functional.pad(x, (0, -x.shape[3] % block_k, 0, -x.shape[2] % block_q), value=fill)
    return x.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q))


def _spread(x: Tensor, block_q: int, block_k: int, sizes: Sequence[int]) -> Tensor:
    """Numbers of blocks at each of their pairs."""
    return x.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)[:, :, : sizes[0], : sizes[1]]
