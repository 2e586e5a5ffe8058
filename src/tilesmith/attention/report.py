"""What a block-sparse attention left out, as numbers that were counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.ops.attn.mask import Blocks, Mask, Score
from tilesmith.ops.attn.op import SCALED


@dataclass(frozen=True)
class SparsityReport:
    """Counts over all batch rows and query heads of one call.

    kept_blocks, seen_blocks: pairs of blocks that are computed, and that dense attention under the same causality
        would compute. retained_mass: share of the dense attention's probability that the kept blocks hold, a mean over
        queries, 1 where there are none. flops, dense_flops: of the forward's two products, whole blocks counted.
    """

    kept_blocks: int
    seen_blocks: int
    retained_mass: float
    flops: int
    dense_flops: int

    @property
    def sparsity(self) -> float:
        """Share of the seen blocks that are left out."""
        return 1.0 - self.kept_blocks / self.seen_blocks if self.seen_blocks else 0.0

    @property
    def skipped_flops(self) -> int:
        return self.dense_flops - self.flops


def sparsity_report(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, seen: int, *, causal: bool, score: Score = SCALED
) -> SparsityReport:
    """Count the blocks of a call and measure what they hold; the host waits. seen: blocks of one head that are visible.

    Of a query's probability its blocks hold exp(lse over them - lse over all). Costs a forward of dense attention.
    """
    batch, heads, _, dim = q.shape
    with torch.no_grad():
        held, every = (ops.attention(q, k, v, Mask(causal=causal, blocks=lists), score)[1] for lists in (blocks, None))
        mass = float((held - every).exp().mean()) if every.numel() else 1.0
        listed = int((blocks.offsets[..., -1] - blocks.offsets[..., 0]).sum())
    lists = blocks.offsets.shape[0] * blocks.offsets.shape[1]
    products = 2 * blocks.block_q * blocks.block_k * (dim + v.shape[3])
    kept_blocks, seen_blocks = listed * (batch * heads) // max(lists, 1), seen * batch * heads
    return SparsityReport(kept_blocks, seen_blocks, mass, kept_blocks * products, seen_blocks * products)
