"""A decoder-only transformer with the parameter names of Hugging Face's Llama."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.engine.argument_checks import (
    choice,
    divides,
    flag,
    number,
    positive,
    probability,
    readable,
    size,
    suggesting,
    tensor,
)
from tilesmith.nn.attention import Attention, SharedSequence, check_sequence
from tilesmith.nn.cache import KVCache
from tilesmith.nn.experts import Experts, MixtureOfExperts, Router
from tilesmith.nn.mlp import GATED, GatedMLP
from tilesmith.nn.norm import RMSNorm
from tilesmith.nn.rotary import Llama3Scaling, RotaryEmbedding
from tilesmith.ops.norm.op import CASTINGS


@suggesting
@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a `Decoder`; the classes that use them explain them: `Attention`, `GatedMLP`, `RMSNorm`,
    `RotaryEmbedding`.

    rotary_dim: rotated features of a head, all if None. logit_softcap: c > 0 caps logits as c tanh(logit / c).
    tie_embeddings: the output projection is the embedding matrix. init_std: deviation of the initial weights.
    hidden_dropout: probability to drop an element of what a layer adds to the residual stream, in training.
    num_experts: above 0, blocks from `dense_layers` on have a `MixtureOfExperts` in place of the MLP. Each expert has
    an inner width of `expert_size` (None: intermediate_size), each token uses `experts_per_token` of them; for
    `shared_size` see there. router_balance, router_z: factors of the means over these layers of the load-balancing loss
    and the z-loss (`ops.router_losses`), which are added to the loss in training.

    Raises TypeError and ValueError, naming the field, for invalid values and for fields that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 8192
    activation: str = "swiglu"
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    rope_interleaved: bool = False
    rotary_dim: int | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_casting: str = "fp32"
    qk_norm: bool = False
    window: int | None = None
    softcap: float = 0.0
    logit_softcap: float = 0.0
    attention_bias: bool = False
    tie_embeddings: bool = False
    init_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 2
    expert_size: int | None = None
    shared_size: int = 0
    dense_layers: int = 0
    router_scores: str = "softmax"
    router_balance: float = 0.01
    router_z: float = 0.001

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions"):
            size("DecoderConfig", name, getattr(self, name), 0 if name == "num_layers" else 1)
        for name in ("num_experts", "shared_size", "dense_layers"):
            size("DecoderConfig", name, getattr(self, name), 0)
        size("DecoderConfig", "experts_per_token", self.experts_per_token)
        for name in ("num_kv_heads", "head_dim", "rotary_dim", "expert_size"):
            if getattr(self, name) is not None:
                size("DecoderConfig", name, getattr(self, name))
        for name in ("attention_dropout", "hidden_dropout"):
            probability("DecoderConfig", name, getattr(self, name))
        for name in ("softcap", "logit_softcap", "norm_eps", "init_std", "router_balance", "router_z"):
            number("DecoderConfig", name, getattr(self, name), 0.0)
        number("DecoderConfig", "norm_offset", self.norm_offset)
        positive("DecoderConfig", "rope_theta", self.rope_theta)
        if self.window is not None:
            size("DecoderConfig", "window", self.window, 0)
        for name in ("rope_interleaved", "qk_norm", "attention_bias", "tie_embeddings"):
            flag("DecoderConfig", name, getattr(self, name))
        choice("DecoderConfig", "activation", self.activation, GATED)
        choice("DecoderConfig", "norm_casting", self.norm_casting, CASTINGS)
        choice("DecoderConfig", "router_scores", self.router_scores, ("softmax", "sigmoid"))
        self._check_experts()
        self._check_heads()

    def _check_experts(self) -> None:
        """Raise where the numbers of experts do not fit, or what only experts have is given without them."""
        if self.num_experts == 0:
            for name in ("expert_size", "shared_size", "dense_layers"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"DecoderConfig: {name} is {value} without experts; give num_experts, or leave it out"
                    )
        elif self.experts_per_token > self.num_experts:
            raise ValueError(
                f"DecoderConfig: experts_per_token is {self.experts_per_token}; there are {self.num_experts} experts: "
                "give that many at most"
            )
        elif self.dense_layers and self.dense_layers >= self.num_layers:
            raise ValueError(
                f"DecoderConfig: dense_layers is {self.dense_layers}; of {self.num_layers} layers none would have "
                "experts: give fewer"
            )

    def _check_heads(self) -> None:
        """Raise where heads do not divide, or more of a head is rotated than it has."""
        kv_heads, head_dim = self.num_kv_heads or self.num_heads, self.head_dim
        divides("DecoderConfig", "num_kv_heads", kv_heads, "num_heads", self.num_heads)
        if head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"DecoderConfig: num_heads is {self.num_heads}, which does not divide hidden_size, "
                    f"{self.hidden_size}; choose a divisor, or give head_dim"
                )
            head_dim = self.hidden_size // self.num_heads
        rotary_dim = self.rotary_dim or head_dim
        if rotary_dim > head_dim or rotary_dim % 2:
            raise ValueError(
                f"DecoderConfig: rotary_dim is {rotary_dim}; rotation works on pairs of the {head_dim} features of a "
                "head: give an even number of them"
            )


class DecoderBlock(nn.Module):
    """Attention and a gated MLP or, with `routed`, a mixture of experts, each after a norm. The norms add to the
    residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        routed: bool = False,
    ):
        super().__init__()
        self.input_layernorm = _norm(config, device, dtype)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            window=config.window,
            softcap=config.softcap,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
            device=device,
            dtype=dtype,
        )
        self.post_attention_layernorm = _norm(config, device, dtype)
        self.mlp = _feed_forward(config, routed, device, dtype)
        self.dropout = config.hidden_dropout

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: RotaryEmbedding,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        sequence: SharedSequence | None = None,
        losses: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) to the next block's: the stream is their sum, which the next norm takes. residual None is 0.
        losses: see `MixtureOfExperts`; a dense block appends none."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, cu_seqlens=cu_seqlens, cache=cache, layer=layer, sequence=sequence)
        x, residual = self.post_attention_layernorm.add(self._dropped(x), residual)
        x = self.mlp(x, losses) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(x)
        return self._dropped(x), residual

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class Decoder(nn.Module):
    """Embedding, blocks, norm and output projection.

    The state dict has the keys of a Hugging Face Llama without the prefix "model."; a tied output projection has no key
    of its own. Most norms are called by `RMSNorm.add`, and `lm_head` is read for its weight, so their forward hooks do
    not run. A module put in place of `lm_head`, such as PEFT's, is called, and the loss is computed from its logits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise TypeError(f"Decoder: config must be a DecoderConfig, got {type(config).__name__}; give it the sizes")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderBlock(config, device, dtype, routed=config.num_experts > 0 and i >= config.dense_layers)
            for i in range(config.num_layers)
        )
        self.norm = _norm(config, device, dtype)
        tied = config.tie_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, False, device, dtype)
        self.rotary = RotaryEmbedding(
            config.rotary_dim or self.head_dim,
            config.max_positions,
            config.rope_theta,
            scaling=config.rope_scaling,
            interleaved=config.rope_interleaved,
            device=device,
        )
        self.reset_parameters()

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.config.head_dim or self.config.hidden_size // self.config.num_heads

    def reset_parameters(self) -> None:
        """Normal weights of deviation `init_std`, biases of 0, norms of 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | Router):
                nn.init.normal_(module.weight, std=self.config.init_std)
            if isinstance(module, Experts):
                nn.init.normal_(module.gate_up_proj, std=self.config.init_std)
                nn.init.normal_(module.down_proj, std=self.config.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, RMSNorm):
                module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        sequence: SharedSequence | None = None,
    ) -> Tensor:
        """Logits [B, T, vocab_size] of tokens [B, T] or, with labels, their mean cross-entropy, a scalar, to which a
        decoder with experts adds its routers' losses in training.

        labels: [B, T]: labels[b, t] is what tokens[b, t] should predict, so usually tokens[b, t + 1]; -100 is left
        out. The loss is computed in chunks of tokens, so that the logits are never whole in memory. cu_seqlens and
        sequence: see `Attention`; with a sequence the mean is over this rank's labels. cache: tokens continue its rows,
        and it is advanced by T tokens.
        """
        losses: list[tuple[Tensor, Tensor]] | None = [] if self.training and labels is not None else None
        x = self.hidden_states(tokens, cu_seqlens=cu_seqlens, cache=cache, sequence=sequence, losses=losses)
        if labels is None:
            return self.logits(x)
        if self._head_replaced():
            loss = ops.cross_entropy(self.logits(x), labels)
        else:
            loss = ops.linear_cross_entropy(x, self.output_weight, labels, softcap=self.config.logit_softcap)
        if not losses:
            return loss
        balance, z = (torch.stack(each).mean() for each in zip(*losses))
        return loss + self.config.router_balance * balance + self.config.router_z * z

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        sequence: SharedSequence | None = None,
        losses: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """What the output projection reads, [B, T, C]. Arguments as of `forward`. losses: see `MixtureOfExperts`.

        Raises ValueError for a row of more than max_positions tokens, unless it packs several documents, for a sequence
        whose positions go beyond them, and for more tokens than the cache has slots or, on a CPU, slots left.
        """
        tensor("Decoder", "tokens", tokens, ("batch", "tokens"))
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"Decoder: tokens has dtype {tokens.dtype}; it must be int64 or int32")
        _check_tokens(tokens, self.config.vocab_size)
        if cache is not None:
            _check_cache(cache, tokens, self.config.max_positions)
        check_sequence("Decoder", sequence)
        limit = self.config.max_positions
        if sequence is not None and (last := sequence.last_position) >= limit:
            raise ValueError(f"Decoder: sequence has position {last}; max_positions is {limit}: use a shorter one")
        if sequence is None and cu_seqlens is None and tokens.shape[1] > limit:
            raise ValueError(
                f"Decoder: tokens has {tokens.shape[1]} tokens a row; max_positions is {limit}: pass fewer tokens"
            )
        if self.rotary.cos.is_meta and not tokens.is_meta:  # load_state_dict(assign=True) brings no tables
            self.rotary.to_empty(device=tokens.device)
        x, residual = self.embed_tokens(tokens), None
        for i, block in enumerate(self.layers):
            x, residual = block(
                x, residual, self.rotary, cu_seqlens=cu_seqlens, cache=cache, layer=i, sequence=sequence, losses=losses
            )
        if cache is not None:
            cache.lengths.add_(tokens.shape[1])
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def logits(self, x: Tensor) -> Tensor:
        """Logits of hidden states [..., C], capped by `logit_softcap`."""
        logits = self.lm_head(x) if self._head_replaced() else ops.linear(x, self.output_weight)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _head_replaced(self) -> bool:
        """Whether the output projection computes something else than the product with its weight."""
        head = self.lm_head
        return head is not None and (type(head).forward is not nn.Linear.forward or "forward" in vars(head))

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, C]: the embedding matrix if tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self, batch: int, slots: int | None = None) -> KVCache:
        """An empty cache for `batch` rows of up to `slots` tokens (max_positions if None), in the weights' dtype.

        Raises ValueError for more slots than positions, which the tables of angles do not reach.
        """
        weight, config = self.embed_tokens.weight, self.config
        slots = config.max_positions if slots is None else size("new_cache", "slots", slots, 0)
        if slots > config.max_positions:
            raise ValueError(
                f"new_cache: slots is {slots}; the decoder has {config.max_positions} positions: give that many at most"
            )
        return KVCache.empty(
            config.num_layers,
            batch,
            config.num_kv_heads or config.num_heads,
            slots,
            self.head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )


def _check_tokens(tokens: Tensor, classes: int) -> None:
    """Raise ValueError for a token that is no row of the embedding, where that can be asked."""
    if not readable(tokens):
        return
    wrong = (tokens < 0) | (tokens >= classes)
    if wrong.any():
        raise ValueError(
            f"Decoder: tokens holds {int(tokens[wrong].flatten()[0])}; it must be 0 … {classes - 1}, vocab_size being "
            f"{classes}: give the decoder the vocabulary of the tokenizer"
        )


def _check_cache(cache: KVCache, tokens: Tensor, positions: int) -> None:
    """Raise TypeError for another kind of cache, ValueError for one without room for tokens [B, T], where known."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"Decoder: cache must be a KVCache or None, got {type(cache).__name__}")
    rows, new = tokens.shape
    if cache.lengths.shape[0] != rows:
        raise ValueError(
            f"Decoder: tokens has {rows} rows, cache {cache.lengths.shape[0]}; make a cache of as many rows"
        )
    held = int(cache.lengths.max()) if rows and readable(cache.lengths) else 0
    if held + new > min(cache.slots, positions):
        raise ValueError(
            f"Decoder: tokens has {new} tokens a row and cache holds {held} already; it has {cache.slots} slots, the "
            f"decoder {positions} positions: pass fewer tokens, or make more of what is short"
        )


def _norm(config: DecoderConfig, device: torch.device | str | None, dtype: torch.dtype | None) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        config.norm_eps,
        offset=config.norm_offset,
        casting=config.norm_casting,
        device=device,
        dtype=dtype,
    )


def _feed_forward(
    config: DecoderConfig, routed: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> GatedMLP | MixtureOfExperts:
    hidden, inner, how = config.hidden_size, config.intermediate_size, {"device": device, "dtype": dtype}
    if not routed:
        return GatedMLP(hidden, inner, config.activation, **how)
    return MixtureOfExperts(
        hidden,
        config.expert_size or inner,
        config.num_experts,
        config.experts_per_token,
        config.activation,
        shared_size=config.shared_size,
        scores=config.router_scores,
        **how,
    )
