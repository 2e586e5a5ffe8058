"""Triton kernels of scores and shares of blocks.

Nothing of T x S is written: a tile of scores is reduced to a number for each of its blocks where it was computed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import unit_stride
from tilesmith.engine import cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.attn.reference import scale_of
from tilesmith.ops.attn.triton.block_choice import listed

LOG2_E = 1.4426950408889634
MOST_PARTS = 256 << 20  # bytes of the parts of dk
FEW_PARTS = 64 << 20  # bytes up to which they are many


@triton.jit
def load_rows(
    ptr, first, count, stride, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows first.. of one head, [BLOCK, BLOCK_D], zero where there are none. WHOLE: all of them are there."""
    rows = first + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)
    place = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if WHOLE and DIM == BLOCK_D:
        return tl.load(place)
    else:
        held = (rows < count)[:, None] & (cols < DIM)[None, :]
        return tl.load(place, mask=held, other=0.0)


@triton.jit
def pair_scores(q, k, rows, cols, tokens, keys, scale, CAUSAL: tl.constexpr):
    """Scaled scores of a tile, -inf where a query does not see a key or one of them does not exist."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (rows < tokens)[:, None] & (cols < keys)[None, :]
    if CAUSAL:
        seen = seen & (cols[None, :] <= rows[:, None] + (keys - tokens))
    return tl.where(seen, score, float("-inf"))


@triton.jit
def largest(x, QB: tl.constexpr, LIST_Q: tl.constexpr, KB: tl.constexpr, LIST_K: tl.constexpr):
    """The largest element of each block of a tile of QB by KB blocks, [QB, KB]."""
    if KB == 1:
        over = tl.max(x, 1)[:, None]
    else:
        over = tl.max(tl.reshape(x, (QB * LIST_Q, KB, LIST_K)), 2)
    if LIST_Q == 1:
        return over
    else:
        return tl.max(tl.reshape(over, (QB, LIST_Q, KB)), 1)


@triton.jit
def _sums(x, QB: tl.constexpr, LIST_Q: tl.constexpr, KB: tl.constexpr, LIST_K: tl.constexpr):
    """The sum of each block of a tile of QB by KB blocks, [QB, KB]."""
    if KB == 1:
        over = tl.sum(x, 1)[:, None]
    else:
        over = tl.sum(tl.reshape(x, (QB * LIST_Q, KB, LIST_K)), 2)
    if LIST_Q == 1:
        return over
    else:
        return tl.sum(tl.reshape(over, (QB, LIST_Q, KB)), 1)


@triton.jit
def _to_pairs(x, QB: tl.constexpr, LIST_Q: tl.constexpr, KB: tl.constexpr, LIST_K: tl.constexpr):
    """Numbers of blocks [QB, KB] at each of their pairs, broadcastable to the tile where there is one column."""
    over = tl.reshape(tl.broadcast_to(x[:, None, :], (QB, LIST_Q, KB)), (QB * LIST_Q, KB))
    if KB == 1:
        return over
    else:
        return tl.reshape(tl.broadcast_to(over[:, :, None], (QB * LIST_Q, KB, LIST_K)), (QB * LIST_Q, KB * LIST_K))


@triton.jit
def tile_of(number, tiles, LAST_FIRST: tl.constexpr):
    """Program -> (head row, tile): the longest tiles of a causal call first."""
    head_row = number // tiles
    tile = number - head_row * tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return head_row.to(tl.int64), tile


@triton.jit
def last_keys(rows, tokens, keys, CAUSAL: tl.constexpr):
    """The last key that each query sees, -1 for none."""
    last = keys - 1
    if CAUSAL:
        last = tl.minimum(last, rows + (keys - tokens))
    return tl.where(rows < tokens, last, -1)


@triton.jit
def key_range(first_row, tokens, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the keys that a tile of queries sees end, and up to where all of its pairs count."""
    end, whole = keys, keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(keys, first_row + BLOCK_M + keys - tokens)
        seen_by_all = tl.maximum(first_row + keys - tokens + 1, 0)
        whole = tl.minimum(whole, seen_by_all // BLOCK_N * BLOCK_N)
    return end, tl.where(first_row + BLOCK_M > tokens, 0, whole)


@triton.jit
def tile_products(
    q, k_ptr, first, last, keys, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """q k^T of a tile, unscaled, -inf behind the last key that a query sees. WHOLE: every pair counts."""
    k = load_rows(k_ptr, first, keys, stride, DIM, BLOCK_N, BLOCK_D, WHOLE)
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    if not WHOLE:
        product = tl.where((first + tl.arange(0, BLOCK_N))[None, :] <= last[:, None], product, float("-inf"))
    return product


@triton.jit
def _tile_block_scores(
    q, k_ptr, first, last, keys, stride, scale, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    QB: tl.constexpr, LIST_Q: tl.constexpr, KB: tl.constexpr, LIST_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The scores of a tile's blocks, [QB, KB]. WHOLE: every pair of the tile counts."""
    product = tile_products(q, k_ptr, first, last, keys, stride, DIM, BLOCK_D, BLOCK_N, WHOLE)
    # a maximum for each row and not for the tile: no warp waits for another one before its exponentials
    top = largest(product, QB * LIST_Q, 1, KB, LIST_K)
    found = largest(top, QB, LIST_Q, KB, 1)
    factor = scale * 1.4426950408889634
    base = tl.where(top == float("-inf"), 0.0, top) * factor
    p = tl.exp2(product * factor - _to_pairs(base, QB * LIST_Q, 1, KB, LIST_K))
    total = _sums(p, QB * LIST_Q, 1, KB, LIST_K)
    base_of_all = tl.where(found == float("-inf"), 0.0, found) * factor
    total *= tl.exp2(base - _to_pairs(base_of_all, QB, LIST_Q, KB, 1))
    total = _sums(total, QB, LIST_Q, KB, 1)
    return found * scale + tl.log(tl.where(total > 0.0, total, 1.0))


@triton.jit
def _block_scores_fwd_kernel(
    q_ptr, k_ptr, scores_ptr, q_strides, k_strides, heads, tokens, keys, rows, columns, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LIST_Q: tl.constexpr, LIST_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The scores of one tile of queries; those of blocks that it does not see are there already."""
    QB: tl.constexpr = BLOCK_M // LIST_Q
    KB: tl.constexpr = BLOCK_N // LIST_K
    head_row, tile = tile_of(tl.program_id(0), tl.cdiv(tokens, BLOCK_M), CAUSAL)
    batch, head = head_row // heads, head_row % heads
    first_row = tile * BLOCK_M
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, BLOCK_M, BLOCK_D)
    end, whole = key_range(first_row, tokens, keys, BLOCK_M, BLOCK_N, CAUSAL)
    last = last_keys(first_row + tl.arange(0, BLOCK_M), tokens, keys, CAUSAL)
    block = tile * QB + tl.arange(0, QB)
    scores_ptr += (head_row * rows + block)[:, None] * columns
    for first in range(0, whole, BLOCK_N):
        found = _tile_block_scores(
            q, k_ptr, first, last, keys, k_strides[2], scale, DIM, BLOCK_D, BLOCK_N, QB, LIST_Q, KB, LIST_K, True
        )  # fmt: skip
        column = first // LIST_K + tl.arange(0, KB)
        tl.store(scores_ptr + column[None, :], found, mask=(block < rows)[:, None] & (column < columns)[None, :])
    for first in range(whole, end, BLOCK_N):
        found = _tile_block_scores(
            q, k_ptr, first, last, keys, k_strides[2], scale, DIM, BLOCK_D, BLOCK_N, QB, LIST_Q, KB, LIST_K, False
        )  # fmt: skip
        column = first // LIST_K + tl.arange(0, KB)
        tl.store(scores_ptr + column[None, :], found, mask=(block < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _block_scores_dq_kernel(
    dscores_ptr, scores_ptr, offsets_ptr, indices_ptr, q_ptr, k_ptr, dq_ptr, q_strides, k_strides, heads, tokens, keys,
    rows, columns, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, from the listed blocks of keys: those whose score has a gradient."""
    head_row, block = tile_of(tl.program_id(0), rows, CAUSAL)
    batch, head = head_row // heads, head_row % heads
    first_row = block * LIST_Q
    at = first_row + tl.arange(0, LIST_Q)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, LIST_Q, BLOCK_D)
    list_ptr = offsets_ptr + head_row * (rows + 1) + block
    begin, end = tl.load(list_ptr), tl.load(list_ptr + 1)
    place = (head_row * rows + block) * columns
    dq = tl.zeros((LIST_Q, BLOCK_D), tl.float32)
    column = tl.load(indices_ptr + begin, mask=begin < end, other=0)
    for entry in range(begin, end):
        change = tl.load(dscores_ptr + place + column).to(tl.float32)
        base = tl.load(scores_ptr + place + column)
        first = column * LIST_K
        column = tl.load(indices_ptr + entry + 1, mask=entry + 1 < end, other=0)
        k = load_rows(k_ptr, first, keys, k_strides[2], DIM, LIST_K, BLOCK_D)
        score = pair_scores(q, k, at, first + tl.arange(0, LIST_K), tokens, keys, scale, CAUSAL)
        ds = tl.exp(score - base) * change
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    cols = tl.arange(0, BLOCK_D)
    out = dq_ptr + (head_row * tokens + at)[:, None] * DIM + cols[None, :]
    tl.store(out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(at < tokens)[:, None] & (cols < DIM)[None, :])


@triton.jit
def _block_scores_dk_kernel(
    dscores_ptr, scores_ptr, offsets_ptr, indices_ptr, q_ptr, k_ptr, dk_ptr, q_strides, k_strides, heads, tokens, keys,
    rows, columns, scale, splits,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LIST_Q: tl.constexpr,
    LIST_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A part of dk of one block of keys: of the gradients through MEMBERS of the query heads that read it, and through
    one of `splits` equal pieces of the list of blocks of queries that each of them has."""
    number, column = tile_of(tl.program_id(0), columns, False)
    kv_heads = heads // GROUP
    kv_rows = tl.num_programs(0) // columns // (splits * (GROUP // MEMBERS))
    part, kv_row = number // kv_rows, number % kv_rows
    batch, kv_head = kv_row // kv_heads, kv_row % kv_heads
    piece, member = part % splits, part // splits * MEMBERS
    first = column * LIST_K
    cols = first + tl.arange(0, LIST_K)
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    k = load_rows(k_ptr, first, keys, k_strides[2], DIM, LIST_K, BLOCK_D)
    dk = tl.zeros((LIST_K, BLOCK_D), tl.float32)
    for step in range(MEMBERS):
        head = kv_head * GROUP + member + step
        head_row = batch * heads + head
        q_head = q_ptr + batch * q_strides[0] + head * q_strides[1]
        place = head_row * rows * columns + column
        list_ptr = offsets_ptr + head_row * (columns + 1) + column
        begin, end = tl.load(list_ptr), tl.load(list_ptr + 1)
        length = tl.cdiv(end - begin, splits)
        begin += (piece * length).to(tl.int32)
        end = tl.minimum(end, begin + length)
        block = tl.load(indices_ptr + begin, mask=begin < end, other=0)
        for entry in range(begin, end):
            change = tl.load(dscores_ptr + place + block * columns).to(tl.float32)
            base = tl.load(scores_ptr + place + block * columns)
            first_row = block * LIST_Q
            block = tl.load(indices_ptr + entry + 1, mask=entry + 1 < end, other=0)
            q = load_rows(q_head, first_row, tokens, q_strides[2], DIM, LIST_Q, BLOCK_D)
            at = first_row + tl.arange(0, LIST_Q)
            # keys by queries, as the second product takes it
            score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
            seen = (cols < keys)[:, None] & (at < tokens)[None, :]
            if CAUSAL:
                seen = seen & (cols[:, None] <= at[None, :] + (keys - tokens))
            ds = tl.where(seen, tl.exp(score - base) * change, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    dims = tl.arange(0, BLOCK_D)
    out = dk_ptr + (number * keys + cols)[:, None] * DIM + dims[None, :]
    tl.store(out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(cols < keys)[:, None] & (dims < DIM)[None, :])


@triton.jit
def _block_mass_kernel(
    q_ptr, k_ptr, lse_ptr, mass_ptr, q_strides, k_strides, heads, tokens, keys, rows, columns, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LIST_Q: tl.constexpr, LIST_K: tl.constexpr, CAUSAL: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The shares of one tile of queries of a kv head; those of blocks that it does not see are 0 already. Each
    STRIDE-th query counts, and LIST_Q are those of a block."""
    QB: tl.constexpr = BLOCK_M // LIST_Q
    KB: tl.constexpr = BLOCK_N // LIST_K
    queries = tl.cdiv(tokens, STRIDE)
    kv_row, tile = tile_of(tl.program_id(0), tl.cdiv(queries, BLOCK_M), CAUSAL)
    kv_heads = heads // GROUP
    batch, kv_head = kv_row // kv_heads, kv_row % kv_heads
    first_row = tile * BLOCK_M
    at = (first_row + tl.arange(0, BLOCK_M)) * STRIDE
    q_ptr += batch * q_strides[0] + kv_head * GROUP * q_strides[1]
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    lse_ptr += (batch * heads + kv_head * GROUP) * tokens
    block = tile * QB + tl.arange(0, QB)
    mass_ptr += (kv_row * rows + block)[:, None] * columns
    count = GROUP * tl.minimum(queries - block * LIST_Q, LIST_Q).to(tl.float32)
    limit = keys
    if CAUSAL:
        limit = tl.minimum(keys, (first_row + BLOCK_M) * STRIDE + keys - tokens)
    for first in range(0, limit, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, first, keys, k_strides[2], DIM, BLOCK_N, BLOCK_D)
        total = tl.zeros((QB, KB), tl.float32)
        for member in range(GROUP):
            q = load_rows(
                q_ptr + member * q_strides[1], first_row, queries, q_strides[2] * STRIDE, DIM, BLOCK_M, BLOCK_D
            )  # fmt: skip
            lse = tl.load(lse_ptr + member * tokens + at, mask=at < tokens, other=0.0).to(tl.float32)
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            p = tl.exp(pair_scores(q, k, at, cols, tokens, keys, scale, CAUSAL) - lse[:, None])
            total += _sums(p, QB, LIST_Q, KB, LIST_K)
        column = first // LIST_K + tl.arange(0, KB)
        held = (block < rows)[:, None] & (column < columns)[None, :]
        tl.store(mass_ptr + column[None, :], total / count[:, None], mask=held)


@triton.jit
def _listed_sums_kernel(
    q_ptr, k_ptr, lse_ptr, sums_ptr, offsets_ptr, indices_ptr, q_strides, k_strides, list_strides, slots,
    heads, tokens, keys, rows, columns, scale,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LIST_Q: tl.constexpr,
    LIST_K: tl.constexpr, CAUSAL: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the probabilities of one block of queries of MEMBERS heads of a kv head, over each block of its list and
    16 queries at a time: these lie in one warp, so that warps do not wait for each other. Each STRIDE-th query counts;
    LIST_Q are those of a block, ROWS those of all the heads, at least 16.

    slots: entries from one kv head's sums to the next one's."""
    PARTS: tl.constexpr = ROWS // 16
    PACKS: tl.constexpr = GROUP // MEMBERS
    # neighbours are the query heads of a kv head, which read the same keys
    pack = tl.program_id(0) % PACKS
    kv_row, block = tile_of(tl.program_id(0) // PACKS, rows, CAUSAL)
    kv_heads = heads // GROUP
    batch, kv_head = kv_row // kv_heads, kv_row % kv_heads
    row = tl.arange(0, ROWS)
    member = row // LIST_Q
    first_row = block * (LIST_Q * STRIDE)
    at = first_row + row % LIST_Q * STRIDE
    held = (member < MEMBERS) & (at < tokens)
    head = kv_head * GROUP + pack * MEMBERS + member
    cols = tl.arange(0, BLOCK_D)
    place = batch * q_strides[0] + head.to(tl.int64) * q_strides[1] + at.to(tl.int64) * q_strides[2]
    q = tl.load(q_ptr + place[:, None] + cols[None, :], mask=held[:, None] & (cols < DIM)[None, :], other=0.0)
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    lse = tl.load(lse_ptr + (batch * heads + head) * tokens + at, mask=held, other=float("-inf")).to(tl.float32)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    list_ptr = offsets_ptr + batch * list_strides[0] + kv_head * list_strides[1] + block
    begin, end = tl.load(list_ptr), tl.load(list_ptr + 1)
    sums_ptr += pack * PARTS + tl.arange(0, PARTS)
    column = tl.load(indices_ptr + begin, mask=begin < end, other=0)
    for entry in range(begin, end):
        first = column * LIST_K
        # one step ahead of the keys, whose address it is
        column = tl.load(indices_ptr + entry + 1, mask=entry + 1 < end, other=0)
        k = load_rows(k_ptr, first, keys, k_strides[2], DIM, LIST_K, BLOCK_D)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2(score * scale - lse[:, None])
        ahead = first + LIST_K > keys
        if CAUSAL:
            ahead = ahead | (first + LIST_K - 1 > first_row + keys - tokens)
        if ahead:
            keys_at = first + tl.arange(0, LIST_K)
            seen = (keys_at < keys)[None, :]
            if CAUSAL:
                seen = seen & (keys_at[None, :] <= at[:, None] + (keys - tokens))
            p = tl.where(seen, p, 0.0)
        total = tl.sum(tl.reshape(tl.sum(p, 1), (PARTS, 16)), 1)
        tl.store(sums_ptr + (kv_row * slots + entry) * (PACKS * PARTS), total)


@triton.jit
def _listed_mass_kernel(
    sums_ptr, mass_ptr, offsets_ptr, indices_ptr, list_strides, slots, kv_heads, tokens, rows, columns,
    LIST_Q: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """One row of shares, of the SUMS sums that each entry has; other shares are 0 already."""
    kv_row = (tl.program_id(0) // rows).to(tl.int64)
    block = tl.program_id(0) % rows
    list_ptr = offsets_ptr + kv_row // kv_heads * list_strides[0] + kv_row % kv_heads * list_strides[1] + block
    begin, end = tl.load(list_ptr), tl.load(list_ptr + 1)
    count = GROUP * tl.minimum(tl.cdiv(tokens, STRIDE) - block * LIST_Q, LIST_Q).to(tl.float32)
    part = tl.arange(0, WIDTH)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        place = sums_ptr + (kv_row * slots + entry)[:, None] * SUMS + part[None, :]
        sums = tl.load(place, mask=(entry < end)[:, None] & (part < SUMS)[None, :], other=0.0)
        column = tl.load(indices_ptr + entry, mask=entry < end, other=0)
        out = mass_ptr + (kv_row * rows + block) * columns + column
        tl.store(out, tl.sum(sums, 1) / count, mask=entry < end)


def launch_arguments(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, block_q: int, block_k: int
) -> dict[str, Any]:
    """What every launch on q and k says, by the kernels' parameter names."""
    dim = q.shape[3]
    return {
        "q_ptr": q, "k_ptr": k, "q_strides": q.stride(), "k_strides": k.stride(), "heads": q.shape[1],
        "tokens": q.shape[2], "keys": k.shape[2], "rows": cdiv(q.shape[2], block_q),
        "columns": cdiv(k.shape[2], block_k), "scale": scale_of(q, scale),
        "GROUP": q.shape[1] // k.shape[1], "DIM": dim, "BLOCK_D": max(16, next_power_of_2(dim)), "LIST_Q": block_q,
        "LIST_K": block_k, "CAUSAL": causal,
    }  # fmt: skip


def tile_size(block: int, least: int) -> int:
    """Rows of a tile made of whole blocks."""
    return max(block, least)


def least_tile(q: Tensor) -> int:
    """Rows that a tile has at least: the device's scores fill registers at 128 x 128, a CPU's interpreter wants few."""
    if q.device.type == "cpu":
        return 16
    return 64 if q.dtype != torch.float32 and q.shape[3] <= 128 else 32


def _value_reasons(call, **blocks: int) -> list[str]:
    reasons = []
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float32, float16 and bfloat16 are supported")
    if call.q.cols > 256:
        reasons.append(f"q has head dim {call.q.cols}; up to 256 is supported")
    for name, (size, least) in blocks.items():
        if size & (size - 1) or not least <= size <= 128:
            reasons.append(f"{name} is {size}; powers of two from {least} to 128 are supported")
    return reasons


def score_reasons(call) -> list[str]:
    return _value_reasons(call, block_q=(call.block_q, 1), block_k=(call.block_k, 1))


def score_vjp_reasons(call) -> list[str]:
    return _value_reasons(call, block_q=(call.block_q, 16), block_k=(call.block_k, 16))


def _mass_reasons(call) -> list[str]:
    least = 1 if call.offsets is None else 16
    return _value_reasons(call, block_q=(call.block_q, least), block_k=(call.block_k, least))


@register_kernel("block_scores", backend="triton", rank=20, rejects=score_reasons)
@optimize_kernel(num_warps=8)
def block_scores(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
    *,
    config: Mapping[str, int],
) -> Tensor:
    """One program for each tile of queries."""
    q, k = unit_stride(q), unit_stride(k)
    shape = (*q.shape[:2], cdiv(q.shape[2], block_q), cdiv(k.shape[2], block_k))
    scores = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    block_m, block_n = tile_size(block_q, least_tile(q)), tile_size(block_k, least_tile(q))
    launch(
        _block_scores_fwd_kernel, (cdiv(q.shape[2], block_m) * q.shape[0] * q.shape[1],),
        scores_ptr=scores, BLOCK_M=block_m, BLOCK_N=block_n, **launch_arguments(q, k, scale, causal, block_q, block_k),
        num_stages=2, num_warps=config["num_warps"] if block_m * block_n > 64 * 64 else 4,
    )  # fmt: skip
    return scores


@register_kernel("block_scores_vjp", backend="triton", rank=20, rejects=score_vjp_reasons)
@optimize_kernel(num_warps=8)
def block_scores_vjp(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    scale: float | None,
    causal: bool,
    block_q: int,
    block_k: int,
    output_mask: Sequence[bool],
    *,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    """One program for each block of queries writes dq, one for each part of a block of keys that part of dk."""
    q, k = unit_stride(q), unit_stride(k)
    wants_q, wants_k = output_mask
    dq = torch.empty(q.shape if wants_q else (0,), dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape if wants_k else (0,), dtype=k.dtype, device=q.device)
    if dscores.numel() == 0:
        return dq.zero_(), dk.zero_()
    offsets, indices, offsets_t, indices_t = listed((dscores != 0.0) & (scores > float("-inf")), dscores.numel())
    shared = {"dscores_ptr": dscores.contiguous(), "scores_ptr": scores.contiguous(), **config}
    shared |= launch_arguments(q, k, scale, causal, block_q, block_k)
    shared["num_stages"] = 2 if q.dtype != torch.float32 and q.shape[3] <= 64 else 1
    if block_q * block_k <= 32 * 32:  # of means of stretches: one warp holds a tile, and programs are many
        shared["num_warps"] = 1
    if wants_q:
        launch(
            _block_scores_dq_kernel, (shared["rows"] * q.shape[0] * q.shape[1],),
            dq_ptr=dq, offsets_ptr=offsets, indices_ptr=indices, **shared,
        )  # fmt: skip
    if wants_k:
        group, kv_rows = shared["GROUP"], k.shape[0] * k.shape[1]
        members, splits = _dk_parts(k, group, shared["rows"])
        parts = group // members * splits
        out = dk if parts == 1 else torch.empty((parts, *k.shape), dtype=torch.float32, device=q.device)
        launch(
            _block_scores_dk_kernel, (shared["columns"] * kv_rows * parts,),
            dk_ptr=out, offsets_ptr=offsets_t, indices_ptr=indices_t, splits=splits, MEMBERS=members, **shared,
        )  # fmt: skip
        dk = dk if parts == 1 else out.sum(0).to(k.dtype)
    return dq, dk


def _dk_parts(k: Tensor, group: int, rows: int) -> tuple[int, int]:
    """Query heads of a part of dk, and pieces of their lists: a block of keys that every block of queries chose, as the
    first one often is, would keep one program at work for long after the others."""
    one = 4 * k.numel()
    # few bytes, as means of stretches have, are added in any case in less time than a long list takes
    most = 16 if group * 16 * one <= FEW_PARTS else 4
    splits = min(most, max(1, next_power_of_2(rows // 16)))
    while splits > 1 and group * splits * one > MOST_PARTS:
        splits //= 2
    return (1, splits) if group * splits * one <= MOST_PARTS else (group, 1)


def _eps_of_exponents(call) -> dict[str, float]:
    """The eps of `mass`. A tensor core adds 16 products of 16-bit numbers at a time to a score in fp32 and cuts off
    what is below its last place: half of one on average, of partial sums half as large as the score. As exponents,
    scores of about 1 have these as relative errors of the probabilities."""
    steps = cdiv(call.q.cols, 16) if call.q.dtype.itemsize == 2 else 1
    return {"mass": max(1.0, steps / 4) * torch.finfo(torch.float32).eps}


@register_kernel("block_mass", backend="triton", rank=20, rejects=_mass_reasons, eps=_eps_of_exponents)
@optimize_kernel(num_warps=8)
def block_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    offsets: Tensor | None = None,
    indices: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
    query_stride: int = 1,
    *,
    config: Mapping[str, int],
) -> Tensor:
    """One program for each tile of queries of a kv head; with lists one for each block of queries of some heads of q,
    which together have up to 128 that count."""
    q, k = unit_stride(q), unit_stride(k)
    shared = launch_arguments(q, k, scale, causal, block_q, block_k)
    shape = (q.shape[0], k.shape[1], shared["rows"], shared["columns"])
    shared |= {"STRIDE": query_stride, "LIST_Q": block_q // query_stride}
    mass = torch.zeros(shape, dtype=torch.float32, device=q.device)
    if mass.numel() == 0:
        return mass
    if offsets is not None and indices is not None:
        _listed_mass(mass, lse.contiguous(), offsets.contiguous(), indices.contiguous(), shared)
        return mass
    block_m, block_n = tile_size(shared["LIST_Q"], least_tile(q)), tile_size(block_k, least_tile(q))
    launch(
        _block_mass_kernel, (cdiv(cdiv(q.shape[2], query_stride), block_m) * k.shape[0] * k.shape[1],),
        lse_ptr=lse.contiguous(), mass_ptr=mass, BLOCK_M=block_m, BLOCK_N=block_n, **shared,
        num_warps=config["num_warps"] if block_m * block_n > 64 * 64 else 4, num_stages=2,
    )  # fmt: skip
    return mass


def _listed_mass(mass: Tensor, lse: Tensor, offsets: Tensor, indices: Tensor, shared: dict[str, Any]) -> None:
    """Write the shares of the blocks in lists."""
    batch, kv_heads, rows, columns = mass.shape
    group, queries, room = shared["GROUP"], shared["LIST_Q"], indices.numel()
    own = offsets.shape[:2] == mass.shape[:2]  # otherwise heads share entries, and each one needs sums of its own
    members = math.gcd(group, 128 // queries)
    held = max(16, members * queries)
    sums = group // members * held // 16
    partial = torch.empty((1 if own else batch * kv_heads) * room, sums, dtype=torch.float32, device=mass.device)
    lists = {
        "sums_ptr": partial, "offsets_ptr": offsets, "indices_ptr": indices,
        "list_strides": offsets.expand(batch, kv_heads, -1).stride(), "slots": 0 if own else room,
    }  # fmt: skip
    small = held * shared["LIST_K"] <= 64 * 64
    wide = shared["BLOCK_D"] > 128 or shared["q_ptr"].dtype == torch.float32
    launch(
        _listed_sums_kernel, (batch * kv_heads * rows * (group // members),),
        lse_ptr=lse, MEMBERS=members, ROWS=held, **lists, **(shared | {"scale": LOG2_E * shared["scale"]}),
        num_warps=4 if small else 8, num_stages=1 if wide else 2,
    )  # fmt: skip
    launch(
        _listed_mass_kernel, (batch * kv_heads * rows,),
        mass_ptr=mass, kv_heads=kv_heads, tokens=shared["tokens"], rows=rows, columns=columns, LIST_Q=queries,
        SUMS=sums, BLOCK=16, WIDTH=next_power_of_2(sums), GROUP=group, STRIDE=shared["STRIDE"], **lists, num_warps=4,
    )  # fmt: skip
