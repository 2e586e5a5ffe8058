"""create_attention: from a configuration to a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tilesmith.attention.config import AttentionConfig, AttentionPatterns
from tilesmith.attention.layers import FlashAttention3
from tilesmith.attention.patterns import SparsePattern
from tilesmith.attention.sparse import DynamicSparseAttention

Place = Mapping[str, torch.device | str | torch.dtype | None]


def create_attention(
    config: AttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the layer that a configuration describes: a `FlashAttention3` or a `DynamicSparseAttention`.

    Its forward takes x [B, T, d_model] and an attention_mask [B, T]. Raises TypeError for another config.
    """
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"create_attention: config must be an AttentionConfig, got {type(config).__name__}")
    return _BUILDERS[config.pattern](config, {"device": device, "dtype": dtype})


def _exact(config: AttentionConfig, place: Place) -> nn.Module:
    causal = config.pattern is not AttentionPatterns.FULL
    return FlashAttention3(
        config.d_model, config.num_heads, causal=causal, window=config.window, **config.shared(), **place
    )


def _sparse(config: AttentionConfig, place: Place) -> nn.Module:
    ratio = 0.9 if config.sparsity_ratio is None else config.sparsity_ratio
    pattern = config.sparse_pattern or SparsePattern.DYNAMIC_THRESHOLD
    return DynamicSparseAttention(
        config.d_model, config.num_heads, ratio, pattern, causal=config.causal is not False,
        block_size=config.block_size, **config.shared(), **place,
    )  # fmt: skip


_BUILDERS: dict[AttentionPatterns, Callable[[AttentionConfig, Place], nn.Module]] = {
    AttentionPatterns.FULL: _exact,
    AttentionPatterns.CAUSAL: _exact,
    AttentionPatterns.SLIDING_WINDOW: _exact,
    AttentionPatterns.SPARSE: _sparse,
}
