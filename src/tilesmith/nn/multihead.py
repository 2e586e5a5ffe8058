"""AttentionLayer: multi-head self-attention without positions, under the signature of `kernel_pytorch.core`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import divides, flag, probability, size, tensor


class AttentionLayer(nn.Module):
    """out_proj(attention(qkv_proj(x))) with num_heads heads of d_model / num_heads features.

    dropout: probability of dropping an attention weight, in training only. bias: of both projections. The parameters
    are those of torch.nn.MultiheadAttention under other names: `qkv_proj.weight` is its `in_proj_weight`. No positions
    are added; `nn.Attention` has rotary ones, grouped heads and a cache. Raises ValueError where num_heads does not
    divide d_model, or dropout is outside [0, 1).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        size("AttentionLayer", "d_model", d_model)
        size("AttentionLayer", "num_heads", num_heads)
        probability("AttentionLayer", "dropout", dropout)
        flag("AttentionLayer", "bias", bias)
        divides("AttentionLayer", "num_heads", num_heads, "d_model", d_model)
        self.d_model, self.num_heads, self.dropout = d_model, num_heads, dropout
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias, device, dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias, device, dtype)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """x [B, T, d_model] to [B, T, d_model].

        attention_mask: [B, T] for keys, or anything that broadcasts to [B, H, T, T]. Bool or integers: True, or other
        than 0, may be attended to. Floating: added to the scores. A query that may attend to nothing gets 0 from the
        attention. causal: no key after the query is seen. Raises ValueError or TypeError for other shapes.
        """
        tensor("AttentionLayer", "x", x)
        flag("AttentionLayer", "causal", causal)
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"AttentionLayer: x must be [batch, tokens, {self.d_model}], got {list(x.shape)}")
        if attention_mask is not None:
            _check_mask(attention_mask, x, self.num_heads)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1))
        dense, bias = _planes(attention_mask, q)
        out, _ = ops.attention(
            q,
            k,
            v,
            ops.Mask(causal=causal, dense=dense),
            ops.Score(bias=bias),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"{self.d_model}, num_heads={self.num_heads}, dropout={self.dropout}"


def self_attention(layer: nn.Module, x: Tensor) -> Any:
    """What an attention module returns for x [B, T, C], [B, T, C] too; `torch.nn.MultiheadAttention` is given x three
    times, in its own layout."""
    if not isinstance(layer, nn.MultiheadAttention):
        return layer(x)
    if layer.batch_first:
        return layer(x, x, x, need_weights=False)[0]
    turned = x.transpose(0, 1)
    return layer(turned, turned, turned, need_weights=False)[0].transpose(0, 1)


def _check_mask(mask: Tensor, x: Tensor, heads: int) -> None:
    tensor("AttentionLayer", "attention_mask", mask)
    batch, tokens, _ = x.shape
    plane = (batch, tokens) if mask.ndim == 2 else (batch, heads, tokens, tokens)[-mask.ndim :]
    fits = mask.ndim in (2, 3, 4) and all(n == 1 or n == m for n, m in zip(mask.shape, plane))
    if not fits:
        raise ValueError(
            f"AttentionLayer: attention_mask must be [{batch}, {tokens}] or broadcast to [{batch}, {heads}, {tokens}, "
            f"{tokens}], got {list(mask.shape)}"
        )
    if mask.is_complex():
        raise TypeError(f"AttentionLayer: attention_mask has dtype {mask.dtype}; it must be bool, integer or floating")
    if mask.device != x.device:
        raise ValueError(
            f"AttentionLayer: attention_mask is on {mask.device}, x on {x.device}; move them to one device"
        )


def _planes(mask: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(which pairs may attend, what is added to their scores), each broadcastable to [B, H, T, T] or None. q: the
    queries, whose dtype or fp32 what is added has."""
    if mask is None:
        return None, None
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    if mask.is_floating_point():
        return None, mask if mask.dtype == q.dtype else mask.float()
    return mask if mask.dtype == torch.bool else mask != 0, None
