"""Pairs of tokens and experts in the order of experts: a counting sort on the device, without a synchronisation.

Four passes, or one for few pairs: pairs of each expert in each block of pairs; their prefix sums; where each expert
begins, with the table of tiles; the place of each pair. The sort is stable, so that sums over an expert's pairs have a
fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.ops.moe.plan import FEW, most_tiles

BLOCK = 128  # pairs of a block; ranks within it come from comparing all with all


class Groups(NamedTuple):
    """order: [S], the pairs in the order of experts, those without one last; starts: [E + 1], where each expert's
    begin, then where those without one do; tile_expert, tile_row: of each tile of up to block_m pairs of one expert,
    that expert and the tile's first place in `order`. Unused tiles begin at S or behind."""

    order: Tensor
    starts: Tensor
    tile_expert: Tensor
    tile_row: Tensor

    @property
    def tiles(self) -> int:
        """How many tiles there may be."""
        return self.tile_row.shape[0]


@triton.jit
def expert_of(indices_ptr, at, pairs, experts):
    """The expert of each pair; `experts` for one without, and beyond the last pair."""
    found = tl.load(indices_ptr + at, mask=at < pairs, other=-1)
    return tl.where((found >= 0) & (found < experts), found, experts).to(tl.int32)


@triton.jit
def _count_kernel(indices_ptr, counts_ptr, pairs, experts, blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """counts [experts + 1, blocks] = pairs of each expert in each block."""
    block = tl.program_id(0)
    found = expert_of(indices_ptr, block * BLOCK + tl.arange(0, BLOCK), pairs, experts)
    expert = tl.arange(0, EXPERTS)
    place = expert.to(tl.int64) * blocks + block
    tl.store(counts_ptr + place, tl.histogram(found, EXPERTS), mask=expert <= experts)


@triton.jit
def _scan_kernel(counts_ptr, totals_ptr, blocks, BLOCK: tl.constexpr):
    """counts[e] becomes its exclusive prefix sum over the blocks, and totals[e] its sum."""
    row = counts_ptr + tl.program_id(0).to(tl.int64) * blocks
    before = 0
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        counts = tl.load(row + block, mask=block < blocks, other=0)
        tl.store(row + block, before + tl.cumsum(counts, 0) - counts, mask=block < blocks)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + tl.program_id(0), before)


@triton.jit
def _table_kernel(
    totals_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program e writes where expert e begins and its tiles; the last one those of pairs without an expert, and fills
    the table."""
    mine = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + expert, mask=expert < experts, other=0)
    heights = (totals + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(expert < mine, totals, 0), 0)
    first = tl.sum(tl.where(expert < mine, heights, 0), 0)
    count = tl.sum(tl.where(expert == mine, heights, 0), 0)
    if mine == experts:
        count = tiles - first
    tl.store(starts_ptr + mine, start)
    for done in range(0, count, BLOCK):
        tile = done + tl.arange(0, BLOCK)
        tl.store(tile_expert_ptr + first + tile, mine, mask=tile < count)
        tl.store(tile_row_ptr + first + tile, start + tile * BLOCK_M, mask=tile < count)


@triton.jit
def _tiles_kernel(
    starts_ptr, tile_expert_ptr, tile_row_ptr, pairs, experts, tiles,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The table of tiles alone, from where each expert begins: program e writes those of expert e, the last one fills
    the table."""
    mine = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    begin = tl.load(starts_ptr + expert, mask=expert < experts, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=expert < experts, other=0)
    heights = (end - begin + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(expert < mine, heights, 0), 0)
    count = tl.sum(tl.where(expert == mine, heights, 0), 0)
    start = tl.load(starts_ptr + mine)
    if mine == experts:
        count, start = tiles - first, pairs
    for done in range(0, count, BLOCK):
        tile = done + tl.arange(0, BLOCK)
        tl.store(tile_expert_ptr + first + tile, mine, mask=tile < count)
        tl.store(tile_row_ptr + first + tile, start + tile * BLOCK_M, mask=tile < count)


@triton.jit
def _place_kernel(indices_ptr, counts_ptr, starts_ptr, order_ptr, pairs, experts, blocks, BLOCK: tl.constexpr):
    """order[place of a pair] = that pair."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = expert_of(indices_ptr, at, pairs, experts)
    lane = tl.arange(0, BLOCK)
    earlier = (found[:, None] == found[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    place = tl.load(starts_ptr + found) + tl.load(counts_ptr + found.to(tl.int64) * blocks + block) + rank
    tl.store(order_ptr + place, at, mask=at < pairs)


@triton.jit
def _small_kernel(
    indices_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, pairs, experts, tiles,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """All passes in one program, for few pairs: places come from comparing all with all."""
    at = tl.arange(0, BLOCK)
    found = tl.where(at < pairs, expert_of(indices_ptr, at, pairs, experts), EXPERTS)
    before = found[None, :] < found[:, None]
    earlier = (found[None, :] == found[:, None]) & (at[None, :] < at[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    place = rank + tl.sum(before.to(tl.int32), 1)
    tl.store(order_ptr + place, at, mask=at < pairs)
    # The first pair of each tile writes it, at the number of such pairs before it.
    heads = (rank % BLOCK_M == 0) & (at < pairs)
    same = found[None, :] == found[:, None]
    column_heads = tl.reshape(heads, (1, BLOCK))
    tile = tl.sum(((before | (same & (at[None, :] < at[:, None]))) & column_heads).to(tl.int32), 1)
    tl.store(tile_expert_ptr + tile, found, mask=heads)
    tl.store(tile_row_ptr + tile, place, mask=heads)
    slot = tl.arange(0, TILES)
    unused = (slot >= tl.sum(heads.to(tl.int32), 0)) & (slot < tiles)
    tl.store(tile_expert_ptr + slot, tl.zeros((TILES,), tl.int32) + experts, mask=unused)
    tl.store(tile_row_ptr + slot, tl.zeros((TILES,), tl.int32) + pairs, mask=unused)
    expert = tl.arange(0, EXPERTS)
    totals = tl.histogram(tl.where(at < pairs, found, EXPERTS - 1), EXPERTS)
    tl.store(starts_ptr + expert, tl.cumsum(totals, 0) - totals, mask=expert <= experts)


def group(indices: Tensor, experts: int, block_m: int) -> Groups:
    """The pairs of indices [T, K] in the order of experts, and tiles of block_m of them. There is at least one pair."""
    indices, pairs = indices.contiguous(), indices.numel()
    blocks, wide = cdiv(pairs, BLOCK), next_power_of_2(experts + 1)
    tiles = most_tiles(pairs, experts, block_m)
    order, starts, tile_expert, tile_row = (
        torch.empty(size, dtype=torch.int32, device=indices.device) for size in (pairs, experts + 1, tiles, tiles)
    )
    if pairs <= FEW:
        launch(
            _small_kernel, (1,), indices, order, starts, tile_expert, tile_row, pairs, experts, tiles,
            BLOCK_M=block_m, BLOCK=max(16, next_power_of_2(pairs)), EXPERTS=wide, TILES=next_power_of_2(tiles),
            num_warps=4,
        )  # fmt: skip
        return Groups(order, starts, tile_expert, tile_row)
    counts, totals = (
        torch.empty(size, dtype=torch.int32, device=indices.device) for size in ((experts + 1) * blocks, experts + 1)
    )
    launch(
        _count_kernel, (blocks,), indices, counts, pairs, experts, blocks, BLOCK=BLOCK, EXPERTS=wide, num_warps=4
    )  # fmt: skip
    launch(
        _scan_kernel, (experts + 1,), counts, totals, blocks,
        BLOCK=min(1024, max(32, next_power_of_2(blocks))), num_warps=4,
    )  # fmt: skip
    launch(
        _table_kernel, (experts + 1,), totals, starts, tile_expert, tile_row, experts, tiles,
        BLOCK_M=block_m, BLOCK=128, EXPERTS=wide, num_warps=4,
    )  # fmt: skip
    launch(
        _place_kernel, (blocks,), indices, counts, starts, order, pairs, experts, blocks, BLOCK=BLOCK, num_warps=4
    )  # fmt: skip
    return Groups(order, starts, tile_expert, tile_row)


def tiled(groups: Groups, experts: int, block_m: int) -> Groups:
    """The same order with tiles of block_m pairs."""
    pairs = groups.order.shape[0]
    tiles = most_tiles(pairs, experts, block_m)
    tile_expert, tile_row = (groups.order.new_empty(tiles) for _ in range(2))
    launch(
        _tiles_kernel, (experts + 1,), groups.starts, tile_expert, tile_row, pairs, experts, tiles,
        BLOCK_M=block_m, BLOCK=128, EXPERTS=next_power_of_2(experts + 1), num_warps=4,
    )  # fmt: skip
    return Groups(groups.order, groups.starts, tile_expert, tile_row)
