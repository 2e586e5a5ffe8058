"""Block lists and FlexAttention's BlockMask, each made from the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilesmith.engine import cdiv
from tilesmith.engine.argument_checks import attributed_to, flag, size
from tilesmith.ops.attn.block_lists import check_lists
from tilesmith.ops.attn.mask import Blocks, Mask


@attributed_to("attention")
def to_block_mask(
    blocks: Blocks, tokens: int, keys: int, *, heads: int | None = None, causal: bool = False
) -> BlockMask:
    """A BlockMask for `flex_attention`, equal to `Mask(causal=causal, blocks=blocks)`.

    tokens, keys: lengths that the lists are for. heads: query heads, where the lists are those of kv heads, which
    FlexAttention does not know; None: as many as there are lists. Blocks that the diagonal crosses become partial ones,
    the others full ones; the mask_mod repeats the whole mask, for FlexAttention without torch.compile, which uses
    nothing else. FlexAttention keeps ceil(keys / block_k) numbers for each block of queries, however
    few are kept: 268 MB a head for a million tokens. Does not wait for the device. Raises ValueError or TypeError for
    lists that are not of these lengths, for sizes below 1 and for a number of heads that the lists do not divide.
    """
    for name, value in (("tokens", tokens), ("keys", keys)):
        size("to_block_mask", name, value)
    flag("to_block_mask", "causal", causal)
    if not isinstance(blocks, Blocks):
        raise TypeError(f"to_block_mask: blocks must be Blocks, got {type(blocks).__name__}")
    rows, columns = cdiv(tokens, blocks.block_q), cdiv(keys, blocks.block_k)
    if blocks.offsets.shape[2] != rows + 1:
        raise ValueError(
            f"to_block_mask: blocks has {blocks.offsets.shape[2] - 1} blocks of queries; {tokens} tokens are {rows}"
        )
    if blocks.offsets_t is not None and blocks.offsets_t.shape[2] != columns + 1:
        raise ValueError(
            f"to_block_mask: blocks has {blocks.offsets_t.shape[2] - 1} blocks of keys; {keys} keys are {columns}"
        )
    lists = blocks.offsets, blocks.indices, blocks.offsets_t, blocks.indices_t
    check_lists((tokens, keys), *lists, blocks.block_q, blocks.block_k)
    seen = _table(blocks, rows, columns)
    if heads is not None:
        if size("to_block_mask", "heads", heads) % seen.shape[1]:
            raise ValueError(f"to_block_mask: heads is {heads}, which is not a multiple of the {seen.shape[1]} lists")
        seen = seen.repeat_interleave(heads // seen.shape[1], 1) if seen.shape[1] > 1 else seen
    full = seen
    shift = keys - tokens
    if causal:
        row, column = (torch.arange(n, device=seen.device) for n in (rows, columns))
        first = row[:, None] * blocks.block_q + shift
        seen = seen & (column * blocks.block_k < first + blocks.block_q)
        full = seen & ((column + 1) * blocks.block_k <= first + 1)

    batches, lists = int(seen.shape[0] > 1), int(seen.shape[1] > 1)

    def sees(b, h, q, kv):
        listed = seen[b * batches, h * lists, q // blocks.block_q, kv // blocks.block_k]
        return listed & (kv <= q + shift) if causal else listed

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~full), *_ordered(full), BLOCK_SIZE=(blocks.block_q, blocks.block_k),
        mask_mod=sees, seq_lengths=(tokens, keys),
    )  # fmt: skip


def from_block_mask(block_mask: BlockMask, *, causal: bool = False) -> Mask:
    """A `Mask` for `ops.attention`, equal to a BlockMask of FlexAttention.

    A mask_mod is a Python function, which our kernels cannot read: if the BlockMask has partial blocks, pass
    causal=True to state that it hides the keys after a query and nothing else. Raises ValueError for partial blocks
    without that. Waits for the device, to count the blocks.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"from_block_mask: block_mask must be a BlockMask, got {type(block_mask).__name__}")
    flag("from_block_mask", "causal", causal)
    partial = _of_counts(block_mask.kv_num_blocks, block_mask.kv_indices)
    if not causal and bool(partial.any()):
        raise ValueError(
            "from_block_mask: block_mask has partial blocks, whose mask_mod cannot be read; causal=True says that it "
            "is the causal one"
        )
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        partial = partial | _of_counts(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    block_q, block_k = block_mask.BLOCK_SIZE
    return Mask(causal=causal, blocks=Blocks.of(partial, block_q, block_k))


def _table(blocks: Blocks, rows: int, columns: int) -> Tensor:
    """Lists as a bool table [B, L, rows, columns]."""
    batch, lists, _ = blocks.offsets.shape
    ends = blocks.offsets[..., 1:].flatten().long().contiguous()
    entry = torch.arange(len(blocks.indices), device=ends.device)
    row = torch.searchsorted(ends, entry, right=True)  # entries behind the last list fall into a spare row
    table = torch.zeros(batch * lists * rows + 1, columns, dtype=torch.bool, device=ends.device)
    table[row, blocks.indices.long()] = True
    return table[:-1].view(batch, lists, rows, columns)


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which, the seen ones first, as BlockMask keeps them."""
    return table.sum(-1).int(), table.int().argsort(dim=-1, descending=True, stable=True).int()


def _of_counts(counts: Tensor, indices: Tensor) -> Tensor:
    """Lists of one length with counts as a bool table."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    return torch.zeros_like(indices, dtype=torch.bool).scatter_(-1, indices.long(), place < counts[..., None])
