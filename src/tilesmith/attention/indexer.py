"""BlockIndexer: scores of blocks of keys by small heads of their own, and the loss that trains them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import size
from tilesmith.nn import RMSNorm, RotaryEmbedding
from tilesmith.ops.attn.blocks_reference import stretch_means


class BlockIndexer(nn.Module):
    """Scores of blocks, by one query head for each kv head and one key head for all.

    index_dim: features of an index head. Queries and keys pass through an RMSNorm each, and through the layer's rotary
    embedding if it has one. means: into how many stretches of neighbouring tokens a block is divided, of which queries
    and keys are then the means; a block of no more tokens is not averaged. A block's score is log(sum of
    exp(q . k / sqrt(index_dim))) over its visible pairs of means. Form: the selection branch of MiniMax-M3
    (arXiv:2606.13392), with a block of queries in place of one query and a log-sum-exp in place of the maximum, over
    means of stretches as in that of NSA (arXiv:2502.11089).
    """

    def __init__(
        self,
        d_model: int,
        num_kv_heads: int,
        index_dim: int,
        *,
        means: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (
            ("d_model", d_model), ("num_kv_heads", num_kv_heads), ("index_dim", index_dim), ("means", means),
        ):  # fmt: skip
            size("BlockIndexer", name, value)
        self.index_dim, self.means = index_dim, means
        self.q_proj = nn.Linear(d_model, num_kv_heads * index_dim, False, device, dtype)
        self.k_proj = nn.Linear(d_model, index_dim, False, device, dtype)
        self.q_norm = RMSNorm(index_dim, device=device, dtype=dtype)
        self.k_norm = RMSNorm(index_dim, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, rotary: RotaryEmbedding | None = None, *, block_size: int = 128, causal: bool = True
    ) -> Tensor:
        """Scores fp32 [B, G, R, C] of x [B, T, d_model]; -inf for blocks that nobody sees."""
        q = self.q_norm(self.q_proj(x).unflatten(2, (-1, self.index_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(2, (1, self.index_dim))).transpose(1, 2)
        if rotary is not None:
            q, k = rotary(q, k)
        stretch = math.gcd(block_size, max(1, block_size // self.means))
        if stretch > 1:
            q, k = stretch_means(q, stretch), stretch_means(k, stretch)
        return ops.block_scores(q, k, None, causal, block_size // stretch, block_size // stretch)


def indexer_loss(scores: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """KL(target || softmax(scores)) over the blocks of `keep`, a mean over rows: a scalar, in scores' dtype.

    scores, target [B, G, R, C]: target is made to add up to 1 over the blocks of a row. keep bool, broadcastable to
    them. Rows without a block, or whose target is 0, count as 0.
    """
    target = torch.where(keep, target, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target / torch.where(total > 0, total, 1.0)
    shown = keep & (scores > float("-inf"))
    # rows without any block: a softmax of -inf would be NaN, and stay NaN in the gradient
    alive = shown.any(-1, keepdim=True)
    logits = torch.where(shown, scores, torch.where(alive, float("-inf"), 0.0))
    log_p = torch.where(shown, torch.log_softmax(logits, -1), 0.0)
    losses = (torch.xlogy(target, target) - target * log_p).sum(-1)
    return losses.mean() if losses.numel() else losses.sum()


class WithLoss(torch.autograd.Function):
    """x as it is; in the backward the loss gets the gradient `weight`, whatever is done with x."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor, weight: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, loss, ctx.weight = inputs
        ctx.shape, ctx.dtype, ctx.device = loss.shape, loss.dtype, loss.device

    @staticmethod
    def backward(ctx, dx: Tensor):
        return dx, torch.full(ctx.shape, ctx.weight, dtype=ctx.dtype, device=ctx.device), None
