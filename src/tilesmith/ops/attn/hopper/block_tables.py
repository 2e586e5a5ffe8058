"""What the Hopper kernels need to know of block lists: a table with a row for each tile, made on the device."""

import triton
import triton.language as tl

FAR = tl.constexpr(1 << 28)  # a block behind every token


@triton.jit
def _parts(block, limit, BLOCK: tl.constexpr, LIST: tl.constexpr):
    """How many of the LIST // BLOCK parts of blocks begin before `limit`."""
    return tl.sum(tl.minimum(tl.maximum(limit - block * LIST + BLOCK - 1, 0) // BLOCK, LIST // BLOCK))


@triton.jit(do_not_specialize=["tiles", "tokens", "keys"])
def list_tiles_kernel(
    offsets_ptr, indices_ptr, table_ptr, order_ptr, offsets_strides, heads, tiles, tokens, keys,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M queries a CTA. A row: where the tile's list starts; of the parts of BLOCK_N keys of the
    list's blocks the last one that any query sees, how many are seen, and how many of these the diagonal may cross. An
    empty list counts as one part at -1. order_ptr: without CAUSAL, the tiles of a head, the longest list's first."""
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) - number * tiles
    batch = number // heads
    start = tile * BLOCK_M
    place = batch.to(tl.int64) * offsets_strides[0] + (number - batch * heads).to(tl.int64) * offsets_strides[1]
    place = offsets_ptr + place + start // LIST_Q * offsets_strides[2]
    begin, end = tl.load(place), tl.load(place + offsets_strides[2])
    limit, full_limit = keys, keys
    if CAUSAL:
        limit = tl.minimum(start + BLOCK_M, tokens) + keys - tokens
        full_limit = start + keys - tokens + 1
    seen, full = 0, 0
    for first in range(begin, end, 128):
        entry = first + tl.arange(0, 128)
        block = tl.load(indices_ptr + entry, mask=entry < end, other=FAR // LIST_K)
        seen += _parts(block, limit, BLOCK_N, LIST_K)
        full += _parts(block, full_limit - BLOCK_N + 1, BLOCK_N, LIST_K)
    row = table_ptr + tl.program_id(0) * 4
    tl.store(row, begin)
    tl.store(row + 1, seen - 1)
    tl.store(row + 2, tl.maximum(seen, 1))
    tl.store(row + 3, tl.maximum(seen - full, 1))
    if not CAUSAL:
        place -= start // LIST_Q * offsets_strides[2]
        before = 0
        for first in range(0, tiles, 128):
            other = first + tl.arange(0, 128)
            real = other < tiles
            its = place + other * BLOCK_M // LIST_Q * offsets_strides[2]
            longer = tl.load(its + offsets_strides[2], mask=real) - tl.load(its, mask=real) - (end - begin)
            before += tl.sum((real & ((longer > 0) | ((longer == 0) & (other < tile)))).to(tl.int32))
        tl.store(order_ptr + number * tiles + before, tile)


@triton.jit(do_not_specialize=["tiles", "tokens", "keys"])
def list_key_tiles_kernel(
    offsets_ptr, indices_ptr, table_ptr, offsets_strides, heads, tiles, tokens, keys,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_N keys a CTA, whose transposed list has blocks of queries. A row: where the tile's list
    starts; of the parts of BLOCK_M queries of the list's blocks the first one that sees any key, how many do, and how
    many of these, the first ones, the diagonal may cross."""
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) - number * tiles
    batch = number // heads
    start = tile * BLOCK_N
    place = batch.to(tl.int64) * offsets_strides[0] + (number - batch * heads).to(tl.int64) * offsets_strides[1]
    place = offsets_ptr + place + start // LIST_K * offsets_strides[2]
    begin, end = tl.load(place), tl.load(place + offsets_strides[2])
    hidden_limit, crossed_limit = 0, 0
    if CAUSAL:
        hidden_limit = tl.minimum(start - (keys - tokens) - BLOCK_M + 1, tokens)
        crossed_limit = tl.minimum(start - (keys - tokens) + BLOCK_N - 1, tokens)
    hidden, crossed, every = 0, 0, 0
    for first in range(begin, end, 128):
        entry = first + tl.arange(0, 128)
        block = tl.load(indices_ptr + entry, mask=entry < end, other=FAR // LIST_Q)
        hidden += _parts(block, hidden_limit, BLOCK_M, LIST_Q)
        crossed += _parts(block, crossed_limit, BLOCK_M, LIST_Q)
        every += _parts(block, tokens, BLOCK_M, LIST_Q)
    row = table_ptr + tl.program_id(0) * 4
    tl.store(row, begin)
    tl.store(row + 1, hidden)
    tl.store(row + 2, every - hidden)
    tl.store(row + 3, tl.maximum(crossed - hidden, 0))
