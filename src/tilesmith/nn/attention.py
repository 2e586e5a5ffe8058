"""Self-attention with grouped keys and values, rotary positions and a cache."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import divides, flag, number, positive, probability, size, tensor
from tilesmith.engine.torch_private import autocasts
from tilesmith.nn.cache import KVCache
from tilesmith.nn.norm import RMSNorm
from tilesmith.nn.rotary import RotaryEmbedding


@runtime_checkable
class SharedSequence(Protocol):
    """A sequence whose tokens several ranks hold, as `tilesmith.distributed.SharedSequence` is one."""

    positions: Tensor  # of this rank's tokens in their documents, [1, T]
    last_position: int  # the largest of them, which a decoder asks for in each forward: known on the host

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: ops.Mask, score: ops.Score, dropout_p: float) -> Tensor:
        """`ops.attention`'s first result for this rank's queries and the keys of all ranks."""


def check_sequence(of: str, sequence: object) -> None:
    """Raise TypeError, in the name of `of`, for what is neither None nor a sequence that ranks share."""
    if sequence is not None and not isinstance(sequence, SharedSequence):
        raise TypeError(
            f"{of}: sequence must be a tilesmith.distributed.SharedSequence or None, got {type(sequence).__name__}"
        )


class Attention(nn.Module):
    """Causal multi-head self-attention: projections, optional norms of queries and keys, RoPE, `ops.attention`.

    num_kv_heads: heads of keys and values, each shared by a group of query heads; num_heads if None. head_dim:
    hidden_size / num_heads if None. qk_norm: an RMSNorm over each head of q and k, before RoPE. window: how many keys
    before its own a query sees, all if None. softcap: c > 0 caps scores as c tanh(score / c). scale: factor of the
    scores, 1 / sqrt(head_dim) if None. dropout: probability of dropping an attention weight in training, without a
    cache.
    Raises ValueError if num_kv_heads does not divide num_heads or, without head_dim, num_heads does not divide
    hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        window: int | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, value in {**sizes, **({} if head_dim is None else {"head_dim": head_dim})}.items():
            size("Attention", name, value)
        if window is not None:
            size("Attention", "window", window, 0)
        probability("Attention", "dropout", dropout)
        number("Attention", "softcap", softcap, 0.0)
        flag("Attention", "bias", bias)
        flag("Attention", "qk_norm", qk_norm)
        if scale is not None:
            positive("Attention", "scale", scale)
        divides("Attention", "num_kv_heads", num_kv_heads, "num_heads", num_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"Attention: num_heads is {num_heads}, which does not divide hidden_size, {hidden_size}; "
                    "choose a divisor, or give head_dim"
                )
            head_dim = hidden_size // num_heads
        self.hidden_size = hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim, self.dropout = num_heads, num_kv_heads, head_dim, dropout
        self.mask, self.score = ops.Mask(causal=True, window=window), ops.Score(scale=scale, softcap=softcap)
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias, device, dtype)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias, device, dtype)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias, device, dtype)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias, device, dtype)
        self.q_norm = RMSNorm(head_dim, norm_eps, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps, device=device, dtype=dtype) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        sequence: SharedSequence | None = None,
    ) -> Tensor:
        """x [B, T, C] to [B, T, C].

        cu_seqlens: [N + 1] int32: B is 1 and the row holds N documents, which do not see each other. cache: x holds the
        next tokens of its rows; their keys and values are written to its layer `layer`, without gradients, and
        cache.lengths is not advanced. sequence: x holds this rank's tokens of a sharded sequence, which attend to the
        whole sequence; it cannot be combined with the other two.
        """
        tensor("Attention", "x", x)
        if x.ndim != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"Attention: x must be [batch, tokens, {self.hidden_size}], got {list(x.shape)}")
        if not isinstance(rotary, RotaryEmbedding):
            raise TypeError(f"Attention: rotary must be a RotaryEmbedding, got {rotary!r}")
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"Attention: cache must be a KVCache or None, got {type(cache).__name__}")
        if cache is not None and cu_seqlens is not None:
            raise ValueError(
                "Attention: cu_seqlens and cache exclude each other: rows of a cache are one document each"
            )
        check_sequence("Attention", sequence)
        if sequence is not None and not (cu_seqlens is None and cache is None):
            raise ValueError("Attention: sequence cannot be combined with cu_seqlens (it has its own) or with cache")
        q, k, v = self._heads(x)
        if sequence is not None:
            q, k = rotary(q, k, positions=sequence.positions)
            out = sequence.attend(q, k, v, self.mask, self.score, self.dropout if self.training else 0.0)
        elif cache is not None:
            out = self._attend_cached(q, k, v, rotary, cache, layer)
        else:
            q, k = rotary(q, k, cu_seqlens=cu_seqlens)
            dropout_p = self.dropout if self.training else 0.0
            packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            out, _ = ops.attention(q, k, v, self.mask, self.score, dropout_p=dropout_p, **packed)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        sizes = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        given = {
            "window": (self.mask.window, None), "softcap": (self.score.softcap, 0.0),
            "scale": (self.score.scale, None), "dropout": (self.dropout, 0.0),
        }  # fmt: skip
        return sizes + "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [B, heads, T, D] views of [B, T, heads, D] memory."""
        flat = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(2, (y.shape[2] // self.head_dim, self.head_dim)).transpose(1, 2) for y in flat)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: RotaryEmbedding, cache: KVCache, layer: int
    ) -> Tensor:
        if size("Attention", "layer", layer, 0) >= len(cache.keys):
            raise ValueError(f"Attention: layer is {layer}; the cache has layers 0 to {len(cache.keys) - 1}")
        keys, values = cache.keys[layer], cache.values[layer]
        if keys.dtype != q.dtype and not autocasts(q.device.type):  # before anything is written
            raise TypeError(
                f"Attention: cache has dtype {keys.dtype}, q {q.dtype}; make the cache in the layer's dtype"
            )
        q = ops.kv_cache_append(
            keys, values, k, v, cache.lengths, q, rotary.cos, rotary.sin, interleaved=rotary.interleaved
        )
        lengths = cache.lengths + q.shape[2]
        out, _ = ops.attention(q, keys, values, self.mask, self.score, kv_lengths=lengths)
        return out
