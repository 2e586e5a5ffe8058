"""Attention of transformers modules whose trained indexer selects blocks of keys for each query: MiniMax-M3's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilesmith.attention.selected import selected_block_attention
from tilesmith.models.attention_masks import KeyMask
from tilesmith.models.reach import reaches


def attend_selected(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | KeyMask | None,
    selection: Tensor,
    dropout: float,
    scaling: float | None,
) -> Tensor | None:
    """The attention [B, H, T, Dv] of queries to the blocks they selected, or None where that needs a dense mask.

    selection [B, G, T, n]: see `selected_block_attention`. A dense mask is needed where more than causality hides keys
    (padding, packed documents, a static cache), with dropout, and where the queries do not begin with a block.
    """
    size = _block_size(module)
    tokens, keys = query.shape[2], key.shape[2]
    if isinstance(mask, KeyMask):
        causal = mask.causal and mask.window is None and mask.lengths is None and mask.documents is None
        if not causal or tuple(mask.shape[2:]) != (tokens, keys):
            return None
    elif mask is not None:
        return None
    elif keys > tokens > 1:  # an empty static cache: its first slots are this call's
        key, value, keys = key[:, :, :tokens], value[:, :, :tokens], tokens
    if dropout > 0.0 or keys < tokens or (tokens > 1 and (keys - tokens) % size) or not reaches("attention", query):
        return None
    return selected_block_attention(query, key, value, selection, size, scale=scaling)[0]


def dense_selection(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | KeyMask | None,
    selection: Tensor,
    position_ids: Tensor | None,
) -> Tensor:
    """The selection and the mask as one additive mask [B, H, T, S], as the module's own file makes it."""
    tokens, keys = query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = torch.arange(keys - tokens, keys, device=query.device)
    position_ids = (position_ids if position_ids.ndim > 1 else position_ids[None]).expand(query.shape[0], -1)
    mask = mask.tensor() if isinstance(mask, KeyMask) else mask
    build = module.indexer.build_block_mask
    return build(selection, mask, keys, query.dtype, query.device, position_ids)


def _block_size(module: nn.Module) -> int:
    """How many keys a block of the module's indexer has."""
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ValueError(
            f"{type(module).__name__} gives its attention block_indices, but has no indexer that says how many keys a "
            "block has: choose attn_implementation='eager' for this model"
        )
    return size
