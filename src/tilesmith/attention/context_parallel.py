"""ContextParallelAttention: self-attention of whole sequences, computed by several devices or ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.attention.ring import attention_terms
from tilesmith.distributed import Layout, LocalRing, Ring, context_parallel_attention, ring_of
from tilesmith.distributed.attention import degree_of
from tilesmith.distributed.comparison import refusals_told
from tilesmith.distributed.prepared import MODES
from tilesmith.engine.argument_checks import choice, divides, flag, size, tensor


class ContextParallelAttention(nn.Module):
    """out_proj(attention(qkv_proj(hidden_states))), attention shared out over context_parallel_size devices by tokens.

    d_model features in num_heads heads. device_mesh: a list of devices of this process, or a DeviceMesh of
    torch.distributed. None: the ranks of the default process group, if it has that many; one device of this process, if
    context_parallel_size is 1; else, without other ranks, that many GPUs of this process if there are enough, or else
    that many shards on one device, which computes them one after another. mode: as of `context_parallel_attention`;
    "hybrid" needs a DeviceMesh of two dims. causal: no key after a query is seen. Without a process group `forward`
    takes and returns whole sequences; with one, this rank's tokens (`shard`). Raises ValueError if num_heads does not
    divide d_model, or if there are not context_parallel_size devices or ranks.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        context_parallel_size: int,
        device_mesh: Sequence[torch.device | str] | DeviceMesh | None = None,
        *,
        mode: str = "auto",
        causal: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        name = "ContextParallelAttention"
        sizes = {"d_model": d_model, "num_heads": num_heads, "context_parallel_size": context_parallel_size}
        for argument, value in sizes.items():
            size(name, argument, value)
        divides(name, "num_heads", num_heads, "d_model", d_model)
        choice(name, "mode", mode, MODES)
        flag(name, "causal", causal)
        flag(name, "bias", bias)
        self.d_model, self.num_heads, self.context_parallel_size = d_model, num_heads, context_parallel_size
        self.mode, self.causal = mode, causal
        self.ring = _ring(name, context_parallel_size, device_mesh)
        self.degree = degree_of(name, mode, device_mesh if isinstance(device_mesh, DeviceMesh) else self.ring)
        self._sharded: Layout | None = None  # of the last `shard`
        device = self.ring.devices[0] if isinstance(self.ring, LocalRing) else _device_of(device_mesh)
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias, device, dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias, device, dtype)

    def layout(self, tokens: int) -> Layout:
        """Which tokens of a sequence each device holds."""
        return (Layout.zigzag if self.causal else Layout.contiguous)(tokens, self.context_parallel_size)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of x, whose `dim` are those of the whole sequence. Raises where one process has all."""
        if isinstance(self.ring, LocalRing):
            raise ValueError("ContextParallelAttention: one process holds all devices; forward takes whole sequences")
        self._sharded = self.layout(x.shape[dim])
        return self._sharded.shard(x, self.ring.ranks[0], dim)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, tokens: int | None = None
    ) -> Tensor:
        """hidden_states [B, N, d_model] to [B, N, d_model]: the whole sequence, or with a process group this rank's.

        attention_mask: as of `RingAttentionLayer.forward`. tokens: of the whole sequence, with a process group where
        the ranks' shares are padded; N times the ranks if None, which is refused for as many tokens as `shard` has
        padded.
        """
        out = self._shared(hidden_states, attention_mask, tokens)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    @torch.compiler.disable(reason="ranks compare their calls and exchange tokens")
    def _shared(self, hidden_states: Tensor, attention_mask: Tensor | None, tokens: int | None) -> Tensor:
        """Attention of what `forward` is given. torch.compile ends a graph here, before checks of which other ranks
        hear."""
        with refusals_told(self.ring, "ContextParallelAttention"):
            q, k, v, layout, mask, score = self._taken(hidden_states, attention_mask, tokens)
        named = {"mode": self.mode, "layout": layout, "degree": self.degree}
        if isinstance(self.ring, LocalRing):
            shards = [
                [layout.shard(x, r, 2).to(device) for r, device in enumerate(self.ring.devices)] for x in (q, k, v)
            ]
            outs, _ = context_parallel_attention(*shards, self.ring, mask, score, **named)
            return layout.unshard([x.to(q.device) for x in outs], 2)
        return context_parallel_attention(q, k, v, self.ring, mask, score, **named)[0]

    def _taken(
        self, hidden_states: Tensor, attention_mask: Tensor | None, tokens: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Layout, ops.Mask, ops.Score]:
        """q, k, v, how they lie, and the Mask and Score that `attention_mask` says."""
        tensor("ContextParallelAttention", "hidden_states", hidden_states)
        if hidden_states.ndim != 3 or hidden_states.shape[2] != self.d_model:
            raise ValueError(
                f"ContextParallelAttention: hidden_states must be [batch, tokens, {self.d_model}], got "
                f"{list(hidden_states.shape)}"
            )
        q, k, v = (
            x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in self.qkv_proj(hidden_states).chunk(3, -1)
        )
        whole = self._tokens(q.shape[2], tokens)
        terms = attention_terms("ContextParallelAttention", attention_mask, q, whole, self.causal)
        return q, k, v, self.layout(whole), *terms

    def _tokens(self, held: int, tokens: int | None) -> int:
        """Tokens of the whole sequence, of which this process was given `held`."""
        name, known = "ContextParallelAttention", self._sharded
        if isinstance(self.ring, LocalRing):
            if tokens not in (None, held):
                raise ValueError(f"{name}: tokens is {tokens}, but hidden_states have all {held}; leave tokens out")
            return held
        if tokens is not None:
            if self.layout(size(name, "tokens", tokens)).local != held:
                raise ValueError(f"{name}: tokens is {tokens}; a rank's hidden_states have another number, {held}")
            return tokens
        every = held * self.context_parallel_size
        if known is not None and known.local == held and known.tokens != every:
            raise ValueError(
                f"{name}: shard() padded {known.tokens} tokens to {held} on each rank; pass tokens={known.tokens}, or "
                f"tokens={every} if there is no padding"
            )
        return every

    def extra_repr(self) -> str:
        return f"{self.d_model}, num_heads={self.num_heads}, context_parallel_size={self.context_parallel_size}"


def create_context_parallel_attention(
    d_model: int,
    num_heads: int,
    context_parallel_size: int,
    device_mesh: Sequence[torch.device] | DeviceMesh | None = None,
) -> ContextParallelAttention:
    """A `ContextParallelAttention`.

    d_model: features. num_heads: heads, which divide d_model. context_parallel_size: devices that share the sequence.
    device_mesh: which devices; if None they are found as `ContextParallelAttention` describes.
    """
    return ContextParallelAttention(d_model, num_heads, context_parallel_size, device_mesh)


def _ring(name: str, count: int, mesh: Sequence[torch.device | str] | DeviceMesh | None) -> Ring:
    if isinstance(mesh, DeviceMesh):
        ring = ring_of(mesh)
    elif mesh is not None:
        if isinstance(mesh, str) or not isinstance(mesh, Sequence):
            raise TypeError(f"{name}: device_mesh must be a list of devices or a DeviceMesh, got {type(mesh).__name__}")
        ring = LocalRing(mesh)
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() == count:
        ring = ring_of(None)
    elif count > 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{name}: context_parallel_size is {count}, but torch.distributed has {dist.get_world_size()} ranks; give "
            "device_mesh: a DeviceMesh of the ranks that share a sequence, or devices of this process"
        )
    elif count > 1 and torch.cuda.device_count() >= count:
        ring = LocalRing([torch.device("cuda", i) for i in range(count)])
    else:
        ring = LocalRing([_device_of(None)] * count)
    if ring.size != count:
        raise ValueError(f"{name}: context_parallel_size is {count}; device_mesh has {ring.size} devices: give as many")
    return ring


def _device_of(mesh: Sequence[torch.device | str] | DeviceMesh | None) -> torch.device:
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
