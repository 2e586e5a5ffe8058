"""Which tiles packed documents have: tables that the Hopper kernels walk, made on the device from cu_seqlens.

The first number of a table is how many tiles it has; each has a row of integers behind. Tiles come in the order of
work, the longest first. Behind the last document lie tokens that see nothing and keys that nobody sees: these count as
two more documents, one without keys and one without tokens.
"""

import triton
import triton.language as tl


@triton.jit
def _lengths(cu_ptr, place, documents, total, TAIL: tl.constexpr):
    """First token and number of tokens of documents. TAIL: the document, counted from the last real one, that owns the
    tokens behind; the other one behind has none."""
    begin = tl.load(cu_ptr + tl.minimum(place, documents))
    end = tl.load(cu_ptr + tl.minimum(place + 1, documents))
    end = tl.where(place == documents + TAIL, total, end)
    return begin, tl.where(place < documents + 2, end - begin, 0)


@triton.jit
def _keys(cu_ptr, lengths_ptr, place, documents, total):
    """First key and number of valid keys of documents."""
    begin, keys = _lengths(cu_ptr, place, documents, total, 1)
    if lengths_ptr is not None:
        valid = tl.maximum(tl.load(lengths_ptr + tl.minimum(place, documents - 1)), 0)
        keys = tl.where(place < documents, tl.minimum(valid, keys), keys)
    return begin, keys


@triton.jit
def _order(level, mine, top, count, place, STEPS: tl.constexpr):
    """How many tiles of other documents come before a tile: those of a higher level, and those of the same level of
    documents before. level [M, 1], mine: the document. Documents [1, N] have `count` tiles, the highest of level `top`,
    and with STEPS each of another level, else all of the same."""
    above = top - level
    if STEPS:
        before = tl.minimum(tl.maximum(above, 0), count)
        level_with = (above >= 0) & (above < count)
        before += tl.where((place < mine) & level_with, 1, 0)
    else:
        before = tl.where((above > 0) | ((above == 0) & (place < mine)), count, 0)
    return tl.sum(tl.where(place == mine, 0, before), 1)


@triton.jit(do_not_specialize=["documents", "tokens", "keys", "width"])
def query_tiles_kernel(
    cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr, documents, tokens, keys, width,
    RIGHT: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK queries of a document, which its CTAs share by the CHUNK: first query, tokens and keys of the
    document, and where its tokens and its keys end. width: how many keys a tile sees at most."""
    STEPS: tl.constexpr = RIGHT and not LEFT
    mine, part, parts = tl.program_id(0), tl.program_id(1) * CHUNK, tl.num_programs(1) * CHUNK
    q_begin, q_count = _lengths(cu_q_ptr, mine, documents, tokens, 0)
    k_begin, k_count = _keys(cu_k_ptr, lengths_ptr, mine, documents, keys)
    blocks = tl.cdiv(q_count, BLOCK)
    level_of_last = tl.cdiv(tl.minimum(k_count, width), BLOCK)
    for first in range(part, blocks, parts):
        block = first + tl.arange(0, CHUNK)
        level = block * 0 + level_of_last
        if STEPS:
            level -= blocks - 1 - block
        place = block * 0 + (blocks - 1 - block if STEPS else block)
        for other in range(0, documents + 2, SPAN):
            index = other + tl.arange(0, SPAN)
            _, others = _lengths(cu_q_ptr, index, documents, tokens, 0)
            _, other_keys = _keys(cu_k_ptr, lengths_ptr, index, documents, keys)
            top = tl.cdiv(tl.minimum(other_keys, width), BLOCK)
            count = tl.cdiv(others, BLOCK)
            place += _order(level[:, None], mine, top[None, :], count[None, :], index[None, :], STEPS)
        row = table_ptr + (place + 1) * 8
        held = block < blocks
        tl.store(row, block * BLOCK, mask=held)
        tl.store(row + 1, block * 0 + q_count, mask=held)
        tl.store(row + 2, block * 0 + k_count, mask=held)
        tl.store(row + 3, block * 0 + q_begin + q_count, mask=held)
        tl.store(row + 4, block * 0 + k_begin + k_count, mask=held)
    if (mine == 0) & (part == 0):
        total = 0
        for other in range(0, documents + 2, SPAN):
            _, others = _lengths(cu_q_ptr, other + tl.arange(0, SPAN), documents, tokens, 0)
            total += tl.sum(tl.cdiv(others, BLOCK))
        tl.store(table_ptr, total)


@triton.jit
def _live(
    cu_q_ptr, cu_k_ptr, lengths_ptr, place, documents, tokens, keys, left, right,
    RIGHT: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """First token, tokens, first key, keys and valid keys of documents; the first token that sees any key; the first
    key that is seen. Values before those two may be NaN: no tile with work holds them."""
    q_begin, q_count = _lengths(cu_q_ptr, place, documents, tokens, 0)
    k_begin, room = _lengths(cu_k_ptr, place, documents, keys, 1)
    _, k_count = _keys(cu_k_ptr, lengths_ptr, place, documents, keys)
    shift = k_count - q_count
    q_first = q_count * 0
    k_first = q_count * 0
    if RIGHT:
        q_first = tl.minimum(tl.maximum(-shift - right, 0), q_count)
    if LEFT:
        k_first = tl.minimum(tl.maximum(shift - left, 0), k_count)
    q_first = tl.where(k_count == 0, q_count, q_first)
    k_first = tl.where(q_count == 0, k_count, k_first)
    return q_begin, q_count, k_begin, room, k_count, q_first, k_first


@triton.jit(do_not_specialize=["documents", "tokens", "keys", "width", "left", "right"])
def key_tiles_kernel(
    cu_q_ptr, cu_k_ptr, lengths_ptr, rows_ptr, table_ptr, documents, tokens, keys, width, left, right,
    RIGHT: tl.constexpr, LEFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Blocks of ROWS queries (first and end) and tiles of BLOCK keys of a document, which its CTAs share by the
    CHUNK. A tile: first key; keys of the document, or where keys that nobody sees end; where they end in the tensor;
    tokens and their end in the tensor; the first token that sees a key; the block and the number of blocks from there
    on, 0 for keys that nobody sees."""
    STEPS: tl.constexpr = RIGHT and not LEFT
    mine, part, parts = tl.program_id(0), tl.program_id(1) * CHUNK, tl.num_programs(1) * CHUNK
    q_begin, q_count, k_begin, room, k_count, q_first, k_first = _live(
        cu_q_ptr, cu_k_ptr, lengths_ptr, mine, documents, tokens, keys, left, right, RIGHT, LEFT
    )
    live = tl.cdiv(k_count - k_first, BLOCK)
    before_dead = 0  # tiles without work of documents before; rows_before: blocks of queries of those
    all_live, all_dead, rows_before, all_rows = 0, 0, 0, 0
    for other in range(0, documents + 2, SPAN):
        index = other + tl.arange(0, SPAN)
        _, others, _, rooms, other_keys, firsts, k_firsts = _live(
            cu_q_ptr, cu_k_ptr, lengths_ptr, index, documents, tokens, keys, left, right, RIGHT, LEFT
        )
        dead = tl.cdiv(k_firsts, BLOCK) + tl.cdiv(rooms - other_keys, BLOCK)
        blocks = tl.cdiv(firsts, ROWS) + tl.cdiv(others - firsts, ROWS)
        all_live += tl.sum(tl.cdiv(other_keys - k_firsts, BLOCK))
        all_dead += tl.sum(dead)
        all_rows += tl.sum(blocks)
        before_dead += tl.sum(tl.where(index < mine, dead, 0))
        rows_before += tl.sum(tl.where(index < mine, blocks, 0))
    if (mine == 0) & (part == 0):
        tl.store(table_ptr, all_live + all_dead)
        tl.store(rows_ptr, all_rows)

    dead_rows = tl.cdiv(q_first, ROWS)
    all_mine = dead_rows + tl.cdiv(q_count - q_first, ROWS)
    for first in range(part, all_mine, parts):
        block = first + tl.arange(0, CHUNK)
        row = rows_ptr + (rows_before + block + 1) * 2
        begin = tl.where(block < dead_rows, block * ROWS, q_first + (block - dead_rows) * ROWS)
        end = tl.where(block < dead_rows, q_first, q_count)
        tl.store(row, q_begin + begin, mask=block < all_mine)
        tl.store(row + 1, q_begin + end, mask=block < all_mine)

    level_of_first = tl.cdiv(tl.minimum(q_count - q_first, width), BLOCK)
    for first in range(part, live, parts):
        block = first + tl.arange(0, CHUNK)
        level = level_of_first - block if STEPS else block * 0 + level_of_first
        place = block
        for other in range(0, documents + 2, SPAN):
            index = other + tl.arange(0, SPAN)
            _, others, _, _, other_keys, firsts, k_firsts = _live(
                cu_q_ptr, cu_k_ptr, lengths_ptr, index, documents, tokens, keys, left, right, RIGHT, LEFT
            )
            top = tl.cdiv(tl.minimum(others - firsts, width), BLOCK)
            count = tl.cdiv(other_keys - k_firsts, BLOCK)
            place += _order(level[:, None], mine, top[None, :], count[None, :], index[None, :], STEPS)
        row = table_ptr + (place + 1) * 8
        held = block < live
        tl.store(row, k_first + block * BLOCK, mask=held)
        tl.store(row + 1, block * 0 + k_count, mask=held)
        tl.store(row + 2, block * 0 + k_begin + k_count, mask=held)
        tl.store(row + 3, block * 0 + q_count, mask=held)
        tl.store(row + 4, block * 0 + q_begin + q_count, mask=held)
        tl.store(row + 5, block * 0 + q_first, mask=held)
        tl.store(row + 6, block * 0 + rows_before + dead_rows, mask=held)
        tl.store(row + 7, block * 0 + all_mine - dead_rows, mask=held)

    head = tl.cdiv(k_first, BLOCK)
    dead = head + tl.cdiv(room - k_count, BLOCK)
    for first in range(part, dead, parts):
        block = first + tl.arange(0, CHUNK)
        held = block < dead
        row = table_ptr + (all_live + before_dead + block + 1) * 8
        end = tl.where(block < head, k_first, room)
        tl.store(row, tl.where(block < head, block * BLOCK, k_count + (block - head) * BLOCK), mask=held)
        tl.store(row + 1, end, mask=held)
        tl.store(row + 2, k_begin + end, mask=held)
        tl.store(row + 3, block * 0 + q_count, mask=held)
        tl.store(row + 4, block * 0 + q_begin + q_count, mask=held)
        tl.store(row + 5, block * 0, mask=held)
        tl.store(row + 6, block * 0, mask=held)
        tl.store(row + 7, block * 0, mask=held)
