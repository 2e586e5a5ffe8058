"""FP8AttentionConfig: attention's products in e4m3 as a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilesmith import ops
from tilesmith.engine.argument_checks import suggesting
from tilesmith.ops import Mask, Score

GRANULARITIES = ("block", "head", "tensor")


@suggesting
@dataclass(frozen=True)
class FP8AttentionConfig:
    """How attention quantises q, k and v to E4M3; the backward is that of `ops.attention` at the quantised values.

    granularity: whose largest element a factor comes from: a "block" of 128 tokens of a head, a "head" or the "tensor".
    smooth: subtract the mean of each head's keys from them; None: unless there is a softcap.
    rotate: rows of q and k are multiplied by a Hadamard matrix, which spreads outliers; None: where the head dim is a
      power of two.
    """

    granularity: str = "block"
    smooth: bool | None = None
    rotate: bool | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"FP8AttentionConfig: granularity is {self.granularity!r}; it must be one of {', '.join(GRANULARITIES)}"
            )
        for name in ("smooth", "rotate"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise TypeError(f"FP8AttentionConfig: {name} must be a bool or None, got {getattr(self, name)!r}")

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, score: Score | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out [B, H, T, Dv], lse [B, H, T]) of q [B, H, T, D], k [B, G, S, D] and v [B, G, S, Dv]; see
        `ops.attention_fp8`, which says what raises."""
        options = {"granularity": self.granularity, "smooth": self.smooth, "rotate": self.rotate}
        return ops.attention_fp8(q, k, v, mask or Mask(), score or Score(), **options)
