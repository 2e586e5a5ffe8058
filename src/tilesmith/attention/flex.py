"""Block lists and FlexAttention's BlockMask, each made from the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilesmith.engine import cdiv
from tilesmith.engine.argument_checks import attributed_to, flag, one_device, size, tensor
from tilesmith.ops.attn.block_lists import check_lists
from tilesmith.ops.attn.mask import Blocks, Mask

PAIRS = 1 << 20  # of tokens that a mask_mod is asked about at a time


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
    _check_blocks(blocks)
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

    A mask_mod is a Python function, which our kernels cannot read. It is called with the pairs of tokens of the partial
    blocks: it must hide nothing there, or with causal=True the keys after a query and nothing else, positions aligned
    at the last token. Raises ValueError where it does anything else, and with causal=True for full blocks that hold
    keys after a query. Waits for the device.
    """
    of = "from_block_mask"
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"{of}: block_mask must be a BlockMask, got {type(block_mask).__name__}")
    flag(of, "causal", causal)
    if block_mask.kv_num_blocks.ndim != 3:
        counts = list(block_mask.kv_num_blocks.shape)
        raise ValueError(f"{of}: block_mask must have kv_num_blocks [batch, heads, query blocks], got {counts}")
    (block_q, block_k), (tokens, keys) = block_mask.BLOCK_SIZE, block_mask.shape[-2:]
    columns = cdiv(keys, block_k)
    partial = _of_counts(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    _check_partial(block_mask, partial, causal)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return Mask(causal=causal, blocks=Blocks.of(partial, block_q, block_k))
    full = _of_counts(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    row, column = (torch.arange(n, device=full.device) for n in full.shape[2:])
    ahead = ((column + 1) * block_k).clamp(max=keys) - 1 > row[:, None] * block_q + (keys - tokens)
    if causal and bool((full & ahead).any()):
        raise ValueError(f"{of}: causal is True, but block_mask has full blocks with keys after a query: leave it out")
    return Mask(causal=causal, blocks=Blocks.of(partial | full, block_q, block_k))


def _check_partial(block_mask: BlockMask, partial: Tensor, causal: bool) -> None:
    """Raise ValueError where the mask_mod in partial blocks is not what `causal` says, for some blocks at a time."""
    (block_q, block_k), (tokens, keys) = block_mask.BLOCK_SIZE, block_mask.shape[-2:]
    query, key = (torch.arange(n, device=partial.device) for n in (block_q, block_k))
    for some in partial.nonzero().split(max(1, PAIRS // (block_q * block_k))):
        batch, head, row, column = (x[:, None, None] for x in some.unbind(1))
        q, k = row * block_q + query[:, None], column * block_k + key
        inside = (q < tokens) & (k < keys)
        q, k = q.clamp(max=tokens - 1), k.clamp(max=keys - 1)
        wanted = (k <= q + (keys - tokens)) if causal else torch.ones_like(inside)
        wrong = inside & (block_mask.mask_mod(batch, head, q, k) != wanted)
        if not bool(wrong.any()):
            continue
        at, of_query, of_key = wrong.nonzero()[0]
        does = "hides key {} from" if wanted[at, of_query, of_key] else "shows key {} to"
        told = f"its mask_mod {does.format(int(k[at, 0, of_key]))} query {int(q[at, of_query, 0])}"
        raise ValueError(
            f"from_block_mask: block_mask has partial blocks whose mask kernels cannot read: {told}, of {keys} keys "
            f"and {tokens} queries; "
            + ("with causal=True, aligned at the last token, it must not" if causal else "causal=True if it is causal")
        )


def _check_blocks(blocks: Blocks) -> None:
    """Raise ValueError or TypeError, naming the field, for what are no lists whatever they are for."""
    of = "to_block_mask"
    if not isinstance(blocks, Blocks):
        raise TypeError(f"{of}: blocks must be Blocks, got {type(blocks).__name__}")
    Mask(blocks=blocks).lower()  # its sizes
    if (blocks.offsets_t is None) != (blocks.indices_t is None):
        raise ValueError(f"{of}: offsets_t and indices_t of blocks go together; one of them is None")
    of_keys = () if blocks.offsets_t is None else ("offsets_t", "indices_t")
    for name in ("offsets", "indices", *of_keys):
        x = getattr(blocks, name)
        tensor(of, f"{name} of blocks", x, ("B", "heads", "blocks + 1") if "offsets" in name else ("entries",))
        if x.dtype != torch.int32:
            raise TypeError(f"{of}: {name} of blocks must be int32, got {x.dtype}")
        one_device(of, f"{name} of blocks", x, "offsets", blocks.offsets)


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


def _of_counts(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of one length with counts as a bool table; what stands behind a count means nothing."""
    held = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    wrong = indices[held & ((indices < 0) | (indices >= columns))]
    if wrong.numel():
        raise ValueError(
            f"from_block_mask: block_mask lists block {int(wrong[0])} of keys; there are {columns}, so it must be 0 to "
            f"{columns - 1}"
        )
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, torch.where(held, indices, columns).long(), True)[..., :columns]
