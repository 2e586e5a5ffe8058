"""DynamicSparseAttention: self-attention that computes a fixed share of the blocks of scores, by six patterns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.attention.budget import BLOCK_SIZES, Budget, budget, checked_block, checked_sparsity, fitting_block
from tilesmith.attention.estimate import chosen_blocks, estimated_shares
from tilesmith.attention.indexer import BlockIndexer, WithLoss, indexer_loss
from tilesmith.attention.layers import FlashAttention3
from tilesmith.attention.patterns import CLOSED, RANKING, SparsePattern, checked_seed, pattern_blocks, refuse_softcap
from tilesmith.attention.report import SparsityReport, sparsity_report
from tilesmith.engine import Choice, explain, torch_private
from tilesmith.engine.argument_checks import choice, flag, number, size
from tilesmith.nn import RotaryEmbedding
from tilesmith.ops.attn.mask import Blocks


class DynamicSparseAttention(FlashAttention3):
    """Self-attention in which each block of queries attends to few blocks of keys, chosen for each kv head.

    sparsity_ratio: share of the blocks of scores that are left out, among those that causality allows; from 0 to 0.95.
        No more than the remaining share is kept, except that each block of queries keeps its own block of keys.
    pattern: see `SparsePattern`.
    block_size: tokens of a block, 128, 64, 32 or 16; None: the largest of them of which a block of queries keeps three
        on average, so that short sequences are sparse, too. Hopper's kernels serve 128.
    top_blocks: blocks that every row of DYNAMIC_THRESHOLD and LEARNED keeps, however long the sequence is, in place of
        the budget that sparsity_ratio gives; blocks have 128 tokens then, unless block_size says otherwise.
    first, last: how many blocks at the beginning of the sequence, and up to and including a row's own,
        DYNAMIC_THRESHOLD and LEARNED keep whatever their scores are, within the budget.
    mass: beyond these, DYNAMIC_THRESHOLD adds no more blocks to a row once they hold this share of its estimated
        attention; 1: as many as the budget allows.
    seed: of RANDOM. index_dim: of LEARNED's indexer, the head dim if None. An argument that the pattern does not use is
        refused unless it has its default.
    index_samples: how many queries of a block, evenly spaced, measure the attention that is the indexer's target: a
        power of two. Blocks of no more tokens are measured whole, with 128 all blocks.
    index_target, index_loss_weight: the loss that trains LEARNED's indexer, and nothing else: KL from the shares of the
        attention to the indexer's softmax over blocks, over the kept blocks ("selected") or over all ("dense", two
        passes over the dense scores: for the beginning of a training). It is computed in training while gradients are
        recorded, `index_loss` holds the last one (None under torch.func), and its gradient, times the weight, is added
        in the backward of any loss that uses the output: the training loop needs no extra line for the indexer. With
        weights that were trained dense, call `indexer.start_from(layer)` after loading them: it then starts from the
        attention's own projections.
    options: the keyword arguments of `FlashAttention3`, without its window.

    A block's choice depends on all of its queries, including later ones of the same block: the values that a query sees
    are causal, but the choice of blocks is causal only up to a block. There is no cache; for decoding, which needs a
    choice for each query, use `selected_block_attention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        sparsity_ratio: float = 0.9,
        pattern: SparsePattern = SparsePattern.DYNAMIC_THRESHOLD,
        *,
        block_size: int | None = None,
        top_blocks: int | None = None,
        first: int = 1,
        last: int = 1,
        mass: float = 1.0,
        seed: int = 0,
        index_dim: int | None = None,
        index_samples: int = 16,
        index_target: str = "selected",
        index_loss_weight: float = 1.0,
        **options: Any,
    ):
        name = "DynamicSparseAttention"
        if not isinstance(pattern, SparsePattern):
            raise TypeError(f"{name}: pattern must be a SparsePattern, got {pattern!r}")
        checked_block(name, block_size)
        if not 0.0 < number(name, "mass", mass) <= 1.0:
            raise ValueError(f"{name}: mass must be in (0, 1], got {mass}")
        if mass < 1.0 and pattern is not SparsePattern.DYNAMIC_THRESHOLD:
            raise ValueError(
                f"{name}: mass is for DYNAMIC_THRESHOLD, which estimates shares; pattern is {pattern.name}"
            )
        learned = pattern is SparsePattern.LEARNED
        if options.get("window") is not None:
            raise ValueError(f"{name}: window is not supported; use the pattern LOCAL_GLOBAL for nearby keys")
        refuse_softcap(name, options.get("softcap", 0.0), pattern)
        if top_blocks is not None:
            size(name, "top_blocks", top_blocks)
            if pattern in CLOSED:
                raise ValueError(f"{name}: top_blocks is for patterns that rank blocks; pattern is {pattern.name}")
        if size(name, "index_samples", index_samples) & (index_samples - 1):
            raise ValueError(f"{name}: index_samples must be a power of two, got {index_samples}")
        choice(name, "index_target", index_target, ("selected", "dense"))
        number(name, "index_loss_weight", index_loss_weight, 0.0)
        size(name, "first", first, 0)
        size(name, "last", last, 1)
        checked_seed(name, seed)
        _refuse_ignored(name, pattern, {
            "index_dim": (index_dim, None, (SparsePattern.LEARNED,)),
            "index_samples": (index_samples, 16, (SparsePattern.LEARNED,)),
            "index_target": (index_target, "selected", (SparsePattern.LEARNED,)),
            "index_loss_weight": (index_loss_weight, 1.0, (SparsePattern.LEARNED,)),
            "first": (first, 1, RANKING), "last": (last, 1, RANKING), "seed": (seed, 0, (SparsePattern.RANDOM,)),
        })  # fmt: skip
        sparsity = checked_sparsity(name, sparsity_ratio)
        super().__init__(d_model, num_heads, **options)
        self.sparsity_ratio, self.pattern, self.block_size, self.seed = sparsity, pattern, block_size, seed
        self.top_blocks, self.first, self.last, self.mass = top_blocks, first, last, float(mass)
        self.index_samples = index_samples
        self.index_target, self.index_loss_weight = index_target, index_loss_weight
        self.index_loss: Tensor | None = None
        self.indexer = None
        if learned:
            index_dim = self.head_dim if index_dim is None else index_dim
            place = {"device": options.get("device"), "dtype": options.get("dtype")}
            self.indexer = BlockIndexer(d_model, self.num_kv_heads, index_dim, **place)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, rotary: RotaryEmbedding | None = None
    ) -> Tensor:
        """x [B, T, d_model] to [B, T, d_model]; see `FlashAttention3.forward`.

        attention_mask hides keys from the attention; the choice of blocks ignores it. LEARNED refuses one in training,
        since the indexer's target does not know it.
        """
        q, k, v, dense = self._inputs(x, attention_mask, rotary)
        trains = self.indexer is not None and self.training and torch.is_grad_enabled()
        if trains and dense is not None:
            raise ValueError(
                "DynamicSparseAttention: attention_mask is not supported while LEARNED trains; pad on the right and "
                "leave padding out of the loss"
            )
        blocks, scores, keep = self._choose(q, k, x, rotary)
        out, lse = ops.attention(q, k, v, self._mask(dense, blocks=blocks), self.score, dropout_p=self._dropout())
        if trains and scores is not None and keep is not None:
            loss = indexer_loss(scores, self._target(q, k, lse, blocks), self._over(keep, scores))
            transformed = not torch.compiler.is_compiling() and torch_private.functorch() is not None
            self.index_loss = None if transformed else loss.detach()  # which has no value outside of torch.func
            out = WithLoss.apply(out, loss, self.index_loss_weight)
        return self._joined(out)

    def blocks(
        self, x: Tensor, attention_mask: Tensor | None = None, *, rotary: RotaryEmbedding | None = None
    ) -> Blocks:
        """The block lists with which `forward` attends to x."""
        with torch.no_grad():
            q, k, _, _ = self._inputs(x, attention_mask, rotary)
            return self._choose(q, k, x, rotary)[0]

    def measure(self, x: Tensor, *, rotary: RotaryEmbedding | None = None) -> SparsityReport:
        """How much of the attention of x is left out: sparsity, retained mass and FLOPs. Waits for the device."""
        with torch.no_grad():
            q, k, v, _ = self._inputs(x, None, rotary)
            blocks = self._choose(q, k, x, rotary)[0]
            seen = self._budget(q, blocks.block_q).seen
            return sparsity_report(q, k, v, blocks, seen, causal=self.causal, score=self.score)

    def explain(
        self, x: Tensor, attention_mask: Tensor | None = None, *, rotary: RotaryEmbedding | None = None
    ) -> Choice | str:
        """Which kernel of the attention op serves x with its blocks, and why."""
        with torch.no_grad():
            q, k, v, dense = self._inputs(x, attention_mask, rotary)
            blocks = self._choose(q, k, x, rotary)[0]
            mask = self._mask(dense, blocks=blocks)
            return explain("attention", q, k, v, mask, self.score, dropout_p=self._dropout())

    def _choose(
        self, q: Tensor, k: Tensor, x: Tensor, rotary: RotaryEmbedding | None
    ) -> tuple[Blocks, Tensor | None, Tensor | None]:
        """The lists; of a choice by the indexer also its scores and the table of what is kept."""
        tokens = q.shape[2]
        block = self.block_size or BLOCK_SIZES[0]
        if self.block_size is None and self.top_blocks is None:
            block = fitting_block(tokens, tokens, self.causal, self.sparsity_ratio)
        options = {"block_size": block, "causal": self.causal}
        if self.indexer is not None:
            scores = self.indexer(x.detach(), rotary, **options)
        elif self.pattern is SparsePattern.DYNAMIC_THRESHOLD:
            scores = estimated_shares(q, k, scale=self.score.scale, **options)
        elif tokens == 0:
            return Blocks.of(torch.zeros(1, 1, 0, 0, dtype=torch.bool, device=q.device), block, block), None, None
        else:
            more = {"heads": self.num_kv_heads, "seed": self.seed, "device": q.device}
            return pattern_blocks(self.pattern, tokens, tokens, self.sparsity_ratio, **options, **more), None, None
        kept = {"mass": self.mass, "first": self.first, "last": self.last}
        keep, blocks = chosen_blocks(scores.detach(), self._budget(q, block), block, **kept)
        return blocks, scores, keep

    def _budget(self, q: Tensor, block: int) -> Budget:
        tokens = q.shape[2]
        return budget(tokens, tokens, block, self.causal, self.sparsity_ratio, q.device, self.top_blocks)

    def _target(self, q: Tensor, k: Tensor, lse: Tensor, blocks: Blocks) -> Tensor:
        """Shares of the attention, over the kept blocks or over all."""
        scale, stride = self.score.scale, max(1, blocks.block_q // self.index_samples)
        sizes = blocks.block_q, blocks.block_k, stride
        with torch.no_grad():
            if self.index_target == "selected":
                return ops.block_mass(q, k, lse, blocks.offsets, blocks.indices, scale, self.causal, *sizes)
            top, total = ops.attention_stats(q, k, scale, self.causal)
            return ops.block_mass(q, k, top + total.log(), None, None, scale, self.causal, *sizes)

    def _over(self, keep: Tensor, scores: Tensor) -> Tensor:
        """The blocks over which the indexer's loss is."""
        return keep if self.index_target == "selected" else scores.detach() > float("-inf")

    def extra_repr(self) -> str:
        block = "fitting" if self.block_size is None else self.block_size
        kind = f"sparsity_ratio={self.sparsity_ratio}, pattern={self.pattern.name}"
        return f"{kind}, block_size={block}, causal={self.causal}"


def _refuse_ignored(
    of: str, pattern: SparsePattern, options: dict[str, tuple[Any, Any, tuple[SparsePattern, ...]]]
) -> None:  # fmt: skip
    """Raise ValueError for options (value, default, patterns that listen to it) that the pattern would ignore."""
    for name, (value, default, patterns) in options.items():
        if value != default and pattern not in patterns:
            known = " and ".join(p.name for p in patterns)
            raise ValueError(f"{of}: {name} is for {known}; pattern is {pattern.name}")


def create_sparse_attention(
    d_model: int,
    num_heads: int,
    sparsity_ratio: float = 0.9,
    pattern: SparsePattern = SparsePattern.DYNAMIC_THRESHOLD,
    *,
    causal: bool = True,
    block_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> DynamicSparseAttention:
    """Make a `DynamicSparseAttention`; see there for the arguments and for further ones.

    sparsity_ratio: share of the blocks of scores to leave out, from 0 to 0.95. Raises ValueError or TypeError, naming
    the argument, for what does not fit.
    """
    flag("create_sparse_attention", "causal", causal)
    return DynamicSparseAttention(
        d_model, num_heads, sparsity_ratio, pattern, causal=causal, block_size=block_size, device=device, dtype=dtype
    )
