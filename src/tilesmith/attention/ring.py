"""RingAttentionLayer: self-attention over sequences whose tokens several devices hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.distributed import Layout, context_parallel_attention, ring_of
from tilesmith.distributed.attention import Group, degree_of
from tilesmith.distributed.comparison import refusals_told
from tilesmith.distributed.prepared import MODES
from tilesmith.engine.argument_checks import choice, divides, flag, present, size, tensor
from tilesmith.engine.arguments import shown


class RingAttentionLayer(nn.Module):
    """out_proj(attention(qkv_proj(hidden_states))), exact, without a T x T matrix.

    d_model features in num_heads heads. max_sequence_length: of the whole sequence; a longer one is refused. device: of
    the parameters, the first GPU if None and there is one. group: a process group, DeviceMesh or Ring of
    torch.distributed whose ranks hold the sequence by tokens (`tilesmith.distributed.Layout.zigzag` if `causal`, else
    contiguous); None: this process holds all of it. mode: as of `context_parallel_attention`; "hybrid" needs a
    DeviceMesh of two dims. causal: no key after a query is seen. Nothing is dropped and no positions are added. Raises
    ValueError where num_heads does not divide d_model, for another mode and for a device that is not here.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_sequence_length: int = 1_000_000,
        device: torch.device | str | None = None,
        *,
        group: Group = None,
        mode: str = "ring",
        causal: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"d_model": d_model, "num_heads": num_heads, "max_sequence_length": max_sequence_length}
        for name, value in sizes.items():
            size("RingAttentionLayer", name, value)
        divides("RingAttentionLayer", "num_heads", num_heads, "d_model", d_model)
        choice("RingAttentionLayer", "mode", mode, MODES)
        flag("RingAttentionLayer", "causal", causal)
        flag("RingAttentionLayer", "bias", bias)
        self.d_model, self.num_heads, self.max_sequence_length = d_model, num_heads, max_sequence_length
        self.group, self.mode, self.causal = group, mode, causal
        if group is not None:
            ring = ring_of(group)  # refuses what is no group
            # a mesh can be copied and pickled, a process group neither
            self.group = group if isinstance(group, DeviceMesh) else ring
        self.degree = None if group is None else degree_of("RingAttentionLayer", mode, group)
        if device is not None:
            device = present("RingAttentionLayer", "device", device, meta=True)
        elif torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias, device, dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias, device, dtype)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, layout: Layout | None = None
    ) -> Tensor:
        """hidden_states [B, N, d_model] to [B, N, d_model]; with a group, of this rank's N tokens.

        attention_mask: [B, N] or [B, 1, 1, N], of the keys; or [B|1, H|1, N, S], this rank's queries and the keys of
        the whole sequence in their order. Bool or integers: True, or other than 0, may be attended. Floating: added to
        the scores, but those of the keys must not hold only 0 and 1, which look like what may be attended; over several
        ranks they hold only 0 and what hides a key (at most half of the dtype's lowest number). A query that may attend
        to nothing gets 0 from the attention. layout: which tokens this rank holds, if not an equal share. Raises
        ValueError for a sequence over max_sequence_length, and for other masks; on all ranks, where one is refused.
        """
        if self.group is None:
            q, k, v, mask, score = self._taken(hidden_states, attention_mask, layout, 1)
            out, _ = ops.attention(q, k, v, mask, score)
        else:
            out = self._shared(hidden_states, attention_mask, layout)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    @torch.compiler.disable(reason="ranks compare their calls and exchange tokens")
    def _shared(self, hidden_states: Tensor, attention_mask: Tensor | None, layout: Layout | None) -> Tensor:
        """Attention of this rank's tokens. torch.compile ends a graph here, before checks of which other ranks hear."""
        ring = ring_of(self.group)
        with refusals_told(ring, "RingAttentionLayer"):
            q, k, v, mask, score = self._taken(hidden_states, attention_mask, layout, ring.size)
        named = "zigzag" if self.causal else "contiguous"
        how = {"mode": self.mode, "degree": self.degree, "layout": layout or named}
        return context_parallel_attention(q, k, v, ring, mask, score, **how)[0]

    def _taken(
        self, hidden_states: Tensor, attention_mask: Tensor | None, layout: Layout | None, ranks: int
    ) -> tuple[Tensor, Tensor, Tensor, ops.Mask, ops.Score]:
        """q, k, v, and the Mask and Score that `attention_mask` says."""
        tensor("RingAttentionLayer", "hidden_states", hidden_states)
        if hidden_states.ndim != 3 or hidden_states.shape[2] != self.d_model:
            raise ValueError(
                f"RingAttentionLayer: hidden_states must be [batch, tokens, {self.d_model}], got "
                f"{list(hidden_states.shape)}"
            )
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"RingAttentionLayer: layout must be a Layout or None, got {shown(layout)}")
        if layout is not None and self.group is None:
            raise ValueError(
                "RingAttentionLayer: layout says which tokens a rank holds, but the layer has no group; leave it out "
                "or make the layer with group=..."
            )
        local = hidden_states.shape[1]
        tokens = layout.tokens if layout is not None else local * ranks
        if tokens > self.max_sequence_length:
            raise ValueError(
                f"RingAttentionLayer: the sequence has {tokens} tokens; max_sequence_length is "
                f"{self.max_sequence_length}; give the layer a larger one"
            )
        q, k, v = (
            x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in self.qkv_proj(hidden_states).chunk(3, -1)
        )
        return q, k, v, *attention_terms("RingAttentionLayer", attention_mask, q, tokens, self.causal)

    def extra_repr(self) -> str:
        return f"{self.d_model}, num_heads={self.num_heads}, max_sequence_length={self.max_sequence_length}"


def create_ring_attention(
    d_model: int, num_heads: int, max_sequence_length: int = 1_000_000, device: torch.device | None = None
) -> RingAttentionLayer:
    """A `RingAttentionLayer`.

    d_model: features. num_heads: heads, which divide d_model. max_sequence_length: tokens of the longest sequence that
    `forward` takes. device: of the parameters; the first GPU if None and there is one.
    """
    return RingAttentionLayer(d_model, num_heads, max_sequence_length, device)


def attention_terms(
    name: str, attention_mask: Tensor | None, q: Tensor, keys: int, causal: bool
) -> tuple[ops.Mask, ops.Score]:
    """The Mask and Score of an `attention_mask` as layers take it, for queries q [B, H, N, D] and so many keys."""
    if attention_mask is None:
        return ops.Mask(causal=causal), ops.Score()
    tensor(name, "attention_mask", attention_mask)
    if attention_mask.is_complex():
        raise TypeError(f"{name}: attention_mask has dtype {attention_mask.dtype}; it must be bool, integer or real")
    batch, heads, tokens, _ = q.shape
    if attention_mask.device != q.device:
        raise ValueError(
            f"{name}: attention_mask is on {attention_mask.device}, hidden_states on {q.device}; move them to one "
            "device"
        )
    shape = tuple(attention_mask.shape)
    if shape in ((batch, tokens), (batch, 1, 1, tokens)):
        seen = _seen(name, attention_mask.reshape(batch, tokens), tokens < keys)
        if seen is not None:
            ids = torch.where(seen, 0, -1).int()
            return ops.Mask(causal=causal, documents=(torch.zeros_like(ids), ids)), ops.Score()
        attention_mask = attention_mask.reshape(batch, 1, 1, tokens)
        shape = tuple(attention_mask.shape)
    plane = (batch, heads, tokens, keys)
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, plane)) or shape[3] != keys:
        raise ValueError(
            f"{name}: attention_mask must be [{batch}, {tokens}], [{batch}, 1, 1, {tokens}] or broadcast to "
            f"{list(plane)}, got {list(shape)}"
        )
    if attention_mask.is_floating_point():
        bias = attention_mask if attention_mask.dtype == q.dtype else attention_mask.float()
        return ops.Mask(causal=causal), ops.Score(bias=bias)
    return ops.Mask(causal=causal, dense=attention_mask != 0), ops.Score()


def _seen(name: str, mask: Tensor, sharded: bool) -> Tensor | None:
    """Which keys may be attended, bool [B, N]; None for numbers that are to be added."""
    if not mask.is_floating_point():
        return mask != 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    additive, kept = torch.stack(((hidden | (mask == 0)).all(), ((mask == 0) | (mask == 1)).all())).tolist()
    if additive:
        return ~hidden
    if kept:
        raise ValueError(
            f"{name}: attention_mask is floating and holds 0 and 1, which would be added to scores; give a bool or an "
            "integer mask of the keys that may be attended"
        )
    if not sharded:
        return None
    raise ValueError(
        f"{name}: over ranks a floating attention_mask of the keys must hold 0 and the lowest number of its dtype, or "
        "-inf; give other numbers as [batch, heads, tokens, keys]"
    )
