"""Self-attention layers over the one attention op: the exact one, which the variants extend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine import Choice, explain
from tilesmith.engine.argument_checks import divides, flag, size, tensor
from tilesmith.nn import Attention, RotaryEmbedding


class FlashAttention3(Attention):
    """Exact multi-head self-attention, o_proj(attention(q_proj(x), k_proj(x), v_proj(x))), by the attention op.

    On Hopper the op has warp-specialised kernels with TMA and WGMMA (the design of Shah et al., "FlashAttention-3",
    arXiv:2407.08608), elsewhere others; `explain` says which one serves a call and why. num_heads must divide d_model.
    causal: no key after the query is seen. window: how many keys before its own a query sees; without causality as many
    after it. max_sequence_length: longer sequences are refused. The other arguments and the parameters are those of
    `nn.Attention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        window: int | None = None,
        max_sequence_length: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        qk_norm: bool = False,
        softcap: float = 0.0,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        name = type(self).__name__
        size(name, "d_model", d_model)
        size(name, "num_heads", num_heads)
        divides(name, "num_heads", num_heads, "d_model", d_model)
        for argument, value in {"causal": causal, "bias": bias, "qk_norm": qk_norm}.items():
            flag(name, argument, value)
        if max_sequence_length is not None:
            size(name, "max_sequence_length", max_sequence_length)
        super().__init__(
            d_model, num_heads, num_kv_heads, qk_norm=qk_norm, window=window, softcap=softcap, scale=scale, bias=bias,
            dropout=dropout, device=device, dtype=dtype,
        )  # fmt: skip
        self.d_model, self.causal, self.window, self.max_sequence_length = d_model, causal, window, max_sequence_length
        self.mask = ops.Mask(causal=causal, window=window)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, rotary: RotaryEmbedding | None = None
    ) -> Tensor:
        """x [B, T, d_model] to [B, T, d_model].

        attention_mask: [B, T] for keys, bool or integers: True, or other than 0, may be attended to. rotary: rotates
        queries and keys; without it no positions are added.
        """
        q, k, v, dense = self._inputs(x, attention_mask, rotary)
        out, _ = ops.attention(q, k, v, self._mask(dense), self.score, dropout_p=self._dropout())
        return self._joined(out)

    def explain(
        self, x: Tensor, attention_mask: Tensor | None = None, *, rotary: RotaryEmbedding | None = None
    ) -> Choice | str:
        """Which kernel of the attention op serves the exact attention of x, and why."""
        q, k, v, dense = self._inputs(x, attention_mask, rotary)
        return explain("attention", q, k, v, self._mask(dense), self.score, dropout_p=self._dropout())

    def _inputs(
        self, x: Tensor, attention_mask: Tensor | None, rotary: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values [B, heads, T, D], and the mask of keys bool [B, 1, 1, T]."""
        name = type(self).__name__
        tensor(name, "x", x)
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"{name}: x must be [batch, tokens, {self.d_model}], got {list(x.shape)}")
        longest = self.max_sequence_length
        if longest is not None and x.shape[1] > longest:
            raise ValueError(
                f"{name}: x has {x.shape[1]} tokens; max_sequence_length is {longest}: pass fewer or raise it"
            )
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise TypeError(f"{name}: rotary must be a RotaryEmbedding or None, got {type(rotary).__name__}")
        dense = None if attention_mask is None else _keys(name, attention_mask, x)
        q, k, v = self._heads(x)
        if rotary is not None:
            q, k = rotary(q, k)
        return q, k, v, dense

    def _mask(self, dense: Tensor | None, **more: Any) -> ops.Mask:
        if dense is None and not more:
            return self.mask
        return ops.Mask(causal=self.causal, window=self.window, dense=dense, **more)

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _joined(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _keys(name: str, mask: Tensor, x: Tensor) -> Tensor:
    tensor(name, "attention_mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name}: attention_mask has dtype {mask.dtype}; it must be bool or integer, True for keys")
    if tuple(mask.shape) != tuple(x.shape[:2]):
        raise ValueError(f"{name}: attention_mask must be {list(x.shape[:2])}, got {list(mask.shape)}")
    if mask.device != x.device:
        raise ValueError(f"{name}: attention_mask is on {mask.device}, x on {x.device}; move them to one device")
    return (mask if mask.dtype == torch.bool else mask != 0)[:, None, None, :]
