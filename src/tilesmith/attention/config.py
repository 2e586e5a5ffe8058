"""AttentionConfig: which attention, as data that a factory builds a layer from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from tilesmith.attention.budget import checked_block, checked_sparsity
from tilesmith.attention.patterns import SparsePattern, refuse_softcap
from tilesmith.engine.argument_checks import flag, number, probability, size, suggesting


class AttentionPatterns(Enum):
    """What a query sees: every key, the keys up to its own, a window of these, or blocks of these."""

    FULL = "full"
    CAUSAL = "causal"
    SLIDING_WINDOW = "sliding_window"
    SPARSE = "sparse"


_SPARSE_ONLY = ("sparsity_ratio", "sparse_pattern", "block_size")


@suggesting
@dataclass(frozen=True)
class AttentionConfig:
    """One self-attention layer; `create_attention` builds it.

    d_model, num_heads, num_kv_heads: sizes; num_kv_heads is num_heads if None.
    pattern: what a query sees. window: keys before its own, for SLIDING_WINDOW, which is causal.
    sparsity_ratio (0.9 if None), sparse_pattern (DYNAMIC_THRESHOLD if None), block_size, causal (True if None): for
        SPARSE; see `DynamicSparseAttention`. causal is refused where the pattern determines it.
    dropout: probability of dropping an attention weight, in training. bias: of the projections. qk_norm: an RMSNorm
        over each head of queries and keys. softcap, scale: of the scores. max_sequence_length: longer ones are refused.

    Raises ValueError or TypeError, naming the field, for values that are out of range and for fields that contradict
    each other or the pattern.
    """

    d_model: int
    num_heads: int
    pattern: AttentionPatterns = AttentionPatterns.CAUSAL
    num_kv_heads: int | None = None
    window: int | None = None
    sparsity_ratio: float | None = None
    sparse_pattern: SparsePattern | None = None
    block_size: int | None = None
    causal: bool | None = None
    dropout: float = 0.0
    bias: bool = False
    qk_norm: bool = False
    softcap: float = 0.0
    scale: float | None = None
    max_sequence_length: int | None = None

    def __post_init__(self):
        name = "AttentionConfig"
        for field in ("d_model", "num_heads"):
            size(name, field, getattr(self, field))
        for field in ("num_kv_heads", "max_sequence_length"):
            if getattr(self, field) is not None:
                size(name, field, getattr(self, field))
        for field in ("bias", "qk_norm"):
            flag(name, field, getattr(self, field))
        probability(name, "dropout", self.dropout)
        number(name, "softcap", self.softcap, 0.0)
        if self.scale is not None and number(name, "scale", self.scale) <= 0:
            raise ValueError(f"{name}: scale must be above 0, got {self.scale}")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"{name}: num_heads is {self.num_heads}, which does not divide d_model, "
                f"{self.d_model}; choose a divisor"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{name}: num_kv_heads is {self.num_kv_heads}, which does not divide num_heads, {self.num_heads}; "
                "choose a divisor"
            )
        if not isinstance(self.pattern, AttentionPatterns):
            known = ", ".join(member.name for member in AttentionPatterns)
            raise TypeError(
                f"{name}: pattern must be an AttentionPatterns ({known}), got {self.pattern!r}; "
                "write AttentionPatterns.CAUSAL, for example"
            )
        self._check_pattern(name)

    def _check_pattern(self, name: str) -> None:
        sparse = self.pattern is AttentionPatterns.SPARSE
        windowed = self.pattern is AttentionPatterns.SLIDING_WINDOW
        if windowed and self.window is None:
            raise ValueError(f"{name}: window must be given with SLIDING_WINDOW, got None")
        if self.window is not None:
            size(name, "window", self.window, 0)
            if not windowed:
                raise ValueError(f"{name}: window is {self.window}, but pattern is {self.pattern.name}")
        for field in _SPARSE_ONLY:
            if getattr(self, field) is not None and not sparse:
                raise ValueError(f"{name}: {field} is for SPARSE, but pattern is {self.pattern.name}")
        if self.causal is not None:
            flag(name, "causal", self.causal)
            if not sparse:
                raise ValueError(f"{name}: causal must be left out; the pattern {self.pattern.name} determines it")
        if self.sparsity_ratio is not None:
            checked_sparsity(name, self.sparsity_ratio)
        if self.sparse_pattern is not None and not isinstance(self.sparse_pattern, SparsePattern):
            raise TypeError(f"{name}: sparse_pattern must be a SparsePattern, got {self.sparse_pattern!r}")
        checked_block(name, self.block_size)
        if sparse:
            refuse_softcap(name, self.softcap, self.sparse_pattern or SparsePattern.DYNAMIC_THRESHOLD)

    def shared(self) -> dict[str, object]:
        """The fields that every layer takes under the same name, but its sizes."""
        own = {"d_model", "num_heads", "pattern", "window", "sparse_pattern", "causal", *_SPARSE_ONLY}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
