"""Attention of transformers modules whose trained indexer selects blocks of keys for each query: MiniMax-M3's.

The attention takes the selection as it is, and the indexer makes it for some queries at a time: neither holds anything
of T x S for more than a few queries.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.attention.selected import selected_block_attention
from tilesmith.models.attention.masks import KeyMask
from tilesmith.models.cache_argument import CACHE_NAMES
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, original_class

LARGEST = 1 << 25  # index scores in memory at a time


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
    ran(module, "attention")
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


_SELECTS = ["self", "hidden_states", "position_embeddings", "cache", "position_ids"]
_SIZES = ("num_heads", "block_size", "topk_blocks", "layer_idx")


@dataclass(frozen=True)
class SelectionForm(Form):
    """An indexer that selects for some queries at a time, as if they came one chunk after another with a cache."""

    def namespace(self, base: type) -> dict[str, Any]:
        @torch.no_grad()  # a selection has no gradient
        def forward(
            self: nn.Module,
            hidden_states: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            cache: Any,
            position_ids: Tensor,
        ) -> Tensor:
            batch, tokens, _ = hidden_states.shape
            step = max(self.block_size, LARGEST // max(1, batch * self.num_heads * tokens))
            if step >= tokens:
                return base.forward(self, hidden_states, position_embeddings, cache, position_ids)
            cache = _IndexKeys(self.layer_idx) if cache is None else cache
            found = []
            for first in range(0, tokens, step):
                part = slice(first, first + step)
                angles = tuple(x[..., part, :] for x in position_embeddings)
                found.append(base.forward(self, hidden_states[:, part], angles, cache, position_ids[:, part]))
            most = found[-1].shape[3]
            return torch.cat([nn.functional.pad(x, (0, most - x.shape[3]), value=-1) for x in found], 2)

        return {"forward": forward}


class _IndexKeys:
    """What an indexer asks of a cache, for a call without one: the keys so far."""

    def __init__(self, layer: int):
        self.layers = {layer: SimpleNamespace(update_index=self._update)}
        self.keys: Tensor | None = None

    def _update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), 2)
        return self.keys


class SelectionRule(Rule):
    """Indexers that select blocks of keys for the attention that holds them."""

    name = "selection"
    part = "attention"

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        if not hasattr(module, "build_block_mask") or not all(
            isinstance(getattr(module, n, None), int) for n in _SIZES
        ):
            return None
        names = inspect.signature(original_class(type(module)).forward).parameters
        if ["cache" if name in CACHE_NAMES else name for name in names] != _SELECTS:
            return Skip("its forward takes other arguments than a selection of blocks that is known")
        return Replace(SelectionForm(), (), "selects for some queries at a time, without a matrix of scores")
