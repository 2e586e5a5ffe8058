"""Which key each query of `attention` sees, as a dense bool mask: the meaning of every mask argument in one place."""

import torch
from torch import Tensor


def visibility(
    batch: int,
    heads: int,
    tokens: int,
    keys: int,
    device: torch.device,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    block_offsets: Tensor | None = None,
    block_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    block_q: int = 0,
    block_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries [B|1, T] and of keys [B|1, S], and which key each query sees: bool [B, H|1, T, S].

    The arguments are those of `attention`; `keys` is S, counted over all documents if a page table holds several.
    """
    t, s = torch.arange(tokens, device=device), torch.arange(keys, device=device)
    if cu_seqlens_q is None:
        lengths = torch.full((batch,), keys, device=device) if kv_lengths is None else kv_lengths.long().clamp(0, keys)
        row_q = row_k = torch.arange(batch, device=device)[:, None]
        position_q, position_k = t + (lengths - tokens)[:, None], s[None, :]
        together = torch.ones(1, tokens, 1, dtype=torch.bool, device=device)
    else:
        row_q, local_q, length_q = _packed(t, cu_seqlens_q)
        if page_table is None:
            row_k, position_k, length_k = _packed(s, cu_seqlens_k)
            lengths = cu_seqlens_k.diff().long()
            if kv_lengths is not None:
                lengths = torch.minimum(kv_lengths.long().clamp(min=0), lengths)
        else:
            room = keys // len(page_table)
            row_k, position_k, lengths = s // room, s % room, kv_lengths.long().clamp(0, room)
        position_q, position_k = (local_q + lengths[row_q] - length_q)[None], position_k[None]
        together = ((row_q[:, None] == row_k) & (t < cu_seqlens_q[-1])[:, None])[None]
        row_q, row_k = row_q[None], row_k[None]
        if page_table is None:
            together = together & (s < cu_seqlens_k[-1])

    distance = position_q[:, :, None] - position_k[:, None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible = visible & (distance >= 0)
    if window_left >= 0:
        visible = visible & (distance <= window_left)
    if window_right >= 0:
        visible = visible & (distance >= -window_right)
    if prefix_lengths is not None:
        visible = visible | (position_k < prefix_lengths[row_k]).unsqueeze(1)
    visible = visible & together & (position_k < lengths[row_k]).unsqueeze(1)
    if q_documents is not None:
        visible = visible & (q_documents.unsqueeze(2) == k_documents.unsqueeze(1))
    visible = visible.unsqueeze(1)
    if mask is not None:
        visible = visible & mask
    if block_offsets is not None:
        visible = visible & _dense_blocks(block_offsets, block_indices, heads, tokens, keys, block_q, block_k)
    return position_q, position_k, visible.expand(batch, -1, tokens, keys)


def _packed(index: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Document of each packed token (the last one for tokens behind it), its place in it, and the document's length."""
    starts = cu_seqlens[:-1].long()
    row = torch.searchsorted(cu_seqlens[1:].long(), index, right=True).clamp(max=len(starts) - 1)
    return row, index - starts[row], cu_seqlens.diff().long()[row]


def _dense_blocks(offsets, indices, heads: int, tokens: int, keys: int, block_q: int, block_k: int) -> Tensor:
    """Block lists as a bool mask [B|1, H, T, S]."""
    rows, columns = -(-tokens // block_q), -(-keys // block_k)
    batch, lists, _ = offsets.shape
    dense = torch.zeros(batch * lists * rows + 1, columns, dtype=torch.bool, device=offsets.device)
    entry = torch.arange(len(indices), device=offsets.device)
    ends = offsets[..., 1:].flatten().long().contiguous()
    row = torch.searchsorted(ends, entry, right=True)  # entries behind the last list fall into the spare row
    dense[row, torch.where(row < len(ends), indices.long(), 0)] = True
    dense = dense[:-1].view(batch, lists, rows, columns).repeat_interleave(heads // lists, 1)
    return dense.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)[:, :, :tokens, :keys]
