"""Triton kernel of attention's forward."""

import triton
import triton.language as tl

from tilesmith.ops.attn.triton.tiles import (
    LN2,
    add_product,
    attention_scores,
    kept_probabilities,
    key_walk,
    list_of,
    listed,
    load_plane,
    load_slope,
    load_tile,
    masked_block,
    place_of,
    power,
    schedule,
    tiles_in,
    unit,
)  # fmt: skip


@triton.jit(do_not_specialize=["documents"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr,
    bias_ptr, mask_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr,
    q_documents_ptr, k_documents_ptr, bounds_ptr, offsets_ptr, indices_ptr,
    q_strides, k_strides, v_strides, out_strides, bias_strides, mask_strides, alibi_strides, list_strides,
    batches, heads, tokens, keys, documents, section, list_share,
    inner, outer, window_left, window_right, drop_below, keep_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BULK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
    PADDED: tl.constexpr, SPARSE: tl.constexpr,
    CLEAN: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. PADDED: keys outside the tile's range may hold NaN. SPARSE: any key may be
    hidden. CLEAN: keys that no query of the tile sees may hold NaN, wherever they are."""
    PLAIN: tl.constexpr = bias_ptr is None and alibi_ptr is None and not SOFTCAP
    PREFIX_ON_TOP: tl.constexpr = prefix_ptr is not None and LEFT
    GAPS: tl.constexpr = LEFT or cu_q_ptr is not None or LIST_K > 0  # else the fully visible blocks come first
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    block, head_row = schedule(tiles_in(tokens, BLOCK_M, LIST_Q), batches * heads, section, True)
    batch = head_row // heads
    head = head_row - batch * heads
    kv_head = head // GROUP
    start, end = place_of(block, tokens, BLOCK_M, LIST_Q)
    list_ptr, count = None, None
    if LIST_K > 0:
        list_ptr, count = list_of(offsets_ptr, indices_ptr, list_strides, list_share, batch, head, start // LIST_Q)
    (rows, row_lo, row_hi, shift, prefix_begin, prefix_end,
     lo, hi, begin, stop, skip, skipped, full_begin, full_end) = key_walk(
        start, end, batch, tokens, keys, documents, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr, bounds_ptr,
        list_ptr, count, window_left, window_right, LEFT, RIGHT, SPARSE, BLOCK_M, BLOCK_N, LIST_K)  # fmt: skip

    long_batch = batch.to(tl.int64)
    q_ptr += long_batch * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k_ptr += long_batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    v_ptr += long_batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]
    q = load_tile(q_ptr, None, batch, head, start, q_strides[2], 0, tokens, DIM, BLOCK_M, BLOCK_D, False, True)
    if bias_ptr is not None:
        bias_ptr += long_batch * bias_strides[0] + head.to(tl.int64) * bias_strides[1]
    if mask_ptr is not None:
        mask_ptr += long_batch * mask_strides[0] + head.to(tl.int64) * mask_strides[1]
    slope = 0.0
    if alibi_ptr is not None:
        slope = load_slope(alibi_ptr, alibi_strides, batch, head, rows[:, None], tokens, EXACT)
    if q_documents_ptr is not None:
        q_document = tl.load(q_documents_ptr + long_batch * tokens + rows, mask=rows < tokens, other=0)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * unit(EXACT)
        total += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for masked in tl.static_range(0, 2):
        walk_begin, walk_end = full_begin, full_end
        if masked:
            walk_begin, walk_end = (begin, stop - skipped - (full_end - full_begin)) if GAPS else (full_end, hi)
        for first in tl.range(walk_begin, walk_end, BLOCK_N):
            first = tl.multiple_of(first, 16)
            if masked and GAPS:
                first = masked_block(first, skip, skipped, full_begin, full_end, PREFIX_ON_TOP)
            if LIST_K > 0:
                first, block_end = listed(list_ptr, first, BLOCK_N, LIST_K)
            cols = (first + tl.arange(0, BLOCK_N))[None, :]
            k = load_tile(
                k_ptr, k_desc, batch, kv_head, first, k_strides[2], lo, hi,
                DIM, BLOCK_N, BLOCK_D, BULK and (not masked or not PADDED), masked,
            )  # fmt: skip
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            if not PLAIN:
                score, _ = attention_scores(
                    score, rows[:, None], cols, shift[:, None], bias_ptr, bias_strides, slope, tokens, keys,
                    inner, outer, alibi_ptr is not None, SOFTCAP, EXACT,
                )  # fmt: skip
            if masked:
                visible = cols < row_hi[:, None]
                if LEFT or cu_q_ptr is not None:
                    visible = visible & (cols >= row_lo[:, None])
                if PREFIX_ON_TOP:
                    visible = visible | ((cols >= prefix_begin[:, None]) & (cols < prefix_end[:, None]))
                if mask_ptr is not None:
                    visible = visible & (load_plane(mask_ptr, mask_strides, rows[:, None], cols, tokens, keys, 0) != 0)
                if q_documents_ptr is not None:
                    k_document = tl.load(k_documents_ptr + long_batch * keys + cols, mask=cols < keys, other=0)
                    # rows that do not exist see no key: one that only they saw would not be cleaned
                    visible = visible & (q_document[:, None] == k_document) & (rows < tokens)[:, None]
                if LIST_K > 0 and LIST_K % BLOCK_N != 0:
                    visible = visible & (cols < block_end)
                if LIST_Q > 0 and LIST_Q % BLOCK_M != 0:
                    visible = visible & (rows < end)[:, None]
                score = tl.where(visible, score, float("-inf"))
            if PLAIN:
                new_top = tl.maximum(top, tl.max(score, 1) * outer)
            else:
                new_top = tl.maximum(top, tl.max(score, 1))
            base = new_top
            if masked or bias_ptr is not None:
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            if PLAIN:
                p = power(score * outer - base[:, None], EXACT)
            else:
                p = power(score - base[:, None], EXACT)
            decay = power(top - base, EXACT)
            top = new_top
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None]
            if DROPOUT:
                keep = kept_probabilities(
                    seed_ptr, head_row, start, first, tokens, keys, drop_below, BLOCK_M, BLOCK_N, LANES, SHORT
                )
                p = tl.where(keep, p, 0.0)
            v = load_tile(
                v_ptr, v_desc, batch, kv_head, first, v_strides[2], lo, hi,
                DIM_V, BLOCK_N, BLOCK_DV, BULK and (not masked or not PADDED), masked,
            )  # fmt: skip
            if CLEAN and masked:
                v = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], v, 0.0)
            acc = add_product(acc, p.to(v.dtype), v, rows < tokens)

    dead = total == 0.0
    acc = acc * (keep_scale / tl.where(dead, 1.0, total))[:, None]
    lse = tl.where(dead, 1.0, total)
    lse = top + tl.log(lse) if EXACT else (top + tl.log2(lse)) * LN2
    lse = tl.where(dead, float("-inf"), lse)
    held = rows < end
    tl.store(lse_ptr + head_row.to(tl.int64) * tokens + rows, lse, mask=held)
    cols = tl.arange(0, BLOCK_DV)
    out_ptr += long_batch * out_strides[0] + head.to(tl.int64) * out_strides[1]
    out_ptr += rows.to(tl.int64)[:, None] * out_strides[2] + cols[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=held[:, None] & (cols < DIM_V)[None, :])
