"""BlockIndexer: scores of blocks of keys by small heads of their own, and the loss that trains them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import size, tensor
from tilesmith.nn import Attention, RMSNorm, RotaryEmbedding


class BlockIndexer(nn.Module):
    """Scores of blocks, by one head of queries and one of keys for each kv head.

    index_dim: features of an index head. Queries and keys pass through an RMSNorm each, and through the layer's rotary
    embedding if it has one. A block's score is the largest q . k / sqrt(index_dim) of its visible pairs of tokens, so
    that a single key that matters to a single query is not averaged away. Form: the selection branch of MiniMax-M3
    (arXiv:2606.13392), with a block of queries in place of one query, and a head of keys for each kv head.
    """

    def __init__(
        self,
        d_model: int,
        num_kv_heads: int,
        index_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("d_model", d_model), ("num_kv_heads", num_kv_heads), ("index_dim", index_dim)):
            size("BlockIndexer", name, value)
        self.index_dim = index_dim
        self.q_proj = nn.Linear(d_model, num_kv_heads * index_dim, False, device, dtype)
        self.k_proj = nn.Linear(d_model, num_kv_heads * index_dim, False, device, dtype)
        self.q_norm = RMSNorm(index_dim, device=device, dtype=dtype)
        self.k_norm = RMSNorm(index_dim, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, rotary: RotaryEmbedding | None = None, *, block_size: int = 128, causal: bool = True
    ) -> Tensor:
        """Scores fp32 [B, G, R, C] of x [B, T, d_model]; -inf for blocks that no query of the row sees.

        Raises ValueError or TypeError for another x and for a rotary embedding of more than index_dim features.
        """
        of, features = "BlockIndexer", self.q_proj.in_features
        tensor(of, "x", x, ("batch", "tokens", "features"))
        if x.shape[2] != features:
            raise ValueError(f"{of}: x must be [batch, tokens, {features}], got {list(x.shape)}")
        if rotary is not None and rotary.dim > self.index_dim:
            raise ValueError(
                f"{of}: rotary rotates {rotary.dim} features and an index head has {self.index_dim}: make the layer "
                f"with index_dim={rotary.dim} or more"
            )
        q = self.q_norm(self.q_proj(x).unflatten(2, (-1, self.index_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(2, (-1, self.index_dim))).transpose(1, 2)
        if rotary is not None:
            q, k = rotary(q, k)
        return ops.block_max_scores(q, k, None, causal, block_size, block_size)

    @torch.no_grad()
    def start_from(self, attention: Attention) -> None:
        """Initialise from a trained attention layer: its key projection, its query projection averaged over the heads
        that share a kv head, and the weights of its norms, if it has them.

        From random weights the indexer trains for long before it finds single keys: the gradient of a maximum is that
        of one pair of tokens, and seldom of the right one. Biases are not copied. Raises TypeError if it is not a
        `tilesmith.nn.Attention`, ValueError unless d_model, the number of kv heads and the head dim, which must be
        index_dim, are the indexer's.
        """
        if not isinstance(attention, Attention):
            raise TypeError(
                f"BlockIndexer.start_from: attention must be a tilesmith.nn.Attention, such as the layer that has this "
                f"indexer or a FlashAttention3, got {type(attention).__name__}"
            )
        dim, kv_heads = attention.head_dim, attention.num_kv_heads
        theirs, ours = (kv_heads * dim, attention.hidden_size), tuple(self.k_proj.weight.shape)
        if dim != self.index_dim or theirs != ours:
            raise ValueError(
                f"BlockIndexer.start_from: attention has {kv_heads} kv heads of {dim} on {theirs[1]} features, the "
                f"indexer {ours[0] // self.index_dim} of {self.index_dim} on {ours[1]}; make it with index_dim={dim}"
            )
        queries = attention.q_proj.weight.unflatten(0, (kv_heads, -1, dim)).mean(1).flatten(0, 1)
        for own, given in ((self.q_proj, queries), (self.k_proj, attention.k_proj.weight)):
            own.weight.copy_(given)
        for own, norm in ((self.q_norm, attention.q_norm), (self.k_norm, attention.k_norm)):
            if norm is not None:
                own.weight.copy_(norm.weight)


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
