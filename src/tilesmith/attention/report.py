"""What a block-sparse attention left out, as numbers that were counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.ops.attn.mask import Blocks


@dataclass(frozen=True)
class SparsityReport:
    """Counts over all batch rows and query heads of one call.

    kept_blocks, seen_blocks: pairs of blocks that are computed, and that dense attention under the same causality
        would compute. retained_mass: share of the dense attention's probability that the kept blocks hold, a mean over
        queries. flops, dense_flops: of the forward's two products, whole blocks counted.
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
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, seen: int, *, causal: bool, scale: float | None = None
) -> SparsityReport:
    """Count the blocks of a call and measure what they hold; the host waits. seen: blocks of one head that are visible.

    Costs two passes over the dense scores, without storing them.
    """
    batch, heads, _, dim = q.shape
    with torch.no_grad():
        top, total = ops.attention_stats(q, k, scale, causal)
        held = ops.block_mass(
            q, k, top + total.log(), blocks.offsets, blocks.indices, scale, causal, blocks.block_q, blocks.block_k
        )
        rows = torch.full((held.shape[2],), float(blocks.block_q), dtype=torch.float32, device=q.device)
        rows[-1] = q.shape[2] - (held.shape[2] - 1) * blocks.block_q
        mass = float((held.sum(-1) * (rows / q.shape[2])).sum(-1).mean())
        listed = int((blocks.offsets[..., -1] - blocks.offsets[..., 0]).sum())
    each = batch * heads // (blocks.offsets.shape[0] * blocks.offsets.shape[1])
    products = 2 * blocks.block_q * blocks.block_k * (dim + v.shape[3])
    kept, every = listed * each, seen * batch * heads
    return SparsityReport(kept, every, mass, kept * products, every * products)
