"""Triton kernels of attention's gradients. None uses atomics, so every result is the same in every run."""

import triton
import triton.language as tl

from tilesmith.ops.attn.triton.tiles import (
    FAR,
    add_product,
    attention_scores,
    find_document,
    kept_probabilities,
    key_walk,
    list_of,
    list_walk,
    listed,
    load_plane,
    load_slope,
    load_tile,
    masked_block,
    place_of,
    power,
    query_range,
    schedule,
    span,
    stretches,
    tiles_in,
    unit,
)  # fmt: skip


@triton.jit
def _attention_stats_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_lse_ptr, delta_ptr, out_strides, dout_strides, dlse_strides,
    heads, tokens, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """lse in the kernels' units (+inf for a row that sees nothing, which makes its p 0), and delta = sum(out * dout) -
    dlse, the one number a row that the gradient of the softmax needs; both [B, H, T] fp32."""
    blocks = tl.cdiv(tokens, BLOCK_M)
    head_row = tl.program_id(0) // blocks
    block = tl.program_id(0) - head_row * blocks
    batch = (head_row // heads).to(tl.int64)
    head = (head_row % heads).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    long_rows = rows.to(tl.int64)
    held = (rows < tokens)[:, None] & (cols < DIM_V)[None, :]
    out_ptr += batch * out_strides[0] + head * out_strides[1]
    dout_ptr += batch * dout_strides[0] + head * dout_strides[1]
    out = tl.load(out_ptr + long_rows[:, None] * out_strides[2] + cols[None, :], mask=held, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + long_rows[:, None] * dout_strides[2] + cols[None, :], mask=held, other=0.0).to(tl.float32)
    delta = tl.sum(tl.where(out == 0.0, 0.0, out * dout), 1)  # a row that sees nothing has out 0; its dout may be NaN
    place = head_row.to(tl.int64) * tokens + rows
    lse = tl.load(lse_ptr + place, mask=rows < tokens, other=0.0)
    dead = lse == float("-inf")
    if dlse_ptr is not None:
        dlse_ptr += batch * dlse_strides[0] + head * dlse_strides[1]
        delta -= tl.load(dlse_ptr + long_rows * dlse_strides[2], mask=rows < tokens, other=0.0).to(tl.float32)
    tl.store(row_lse_ptr + place, tl.where(dead, float("inf"), lse * unit(EXACT)), mask=rows < tokens)
    tl.store(delta_ptr + place, tl.where(dead, 0.0, delta), mask=rows < tokens)


@triton.jit(do_not_specialize=["documents"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, k_desc, v_desc, row_lse_ptr, delta_ptr, dq_ptr, dbias_ptr,
    bias_ptr, mask_ptr, alibi_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr,
    q_documents_ptr, k_documents_ptr, bounds_ptr, offsets_ptr, indices_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, bias_strides, mask_strides, alibi_strides,
    list_strides,
    batches, heads, tokens, keys, documents, section, list_share,
    inner, outer, scale, window_left, window_right, drop_below, keep_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BULK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
    PADDED: tl.constexpr, SPARSE: tl.constexpr,
    CLEAN: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head, and its rows of dbias [B, H, T, S] (contiguous, zeroed) if asked for."""
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
    long_head = head.to(tl.int64)
    q_ptr += long_batch * q_strides[0] + long_head * q_strides[1]
    dout_ptr += long_batch * dout_strides[0] + long_head * dout_strides[1]
    k_ptr += long_batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    v_ptr += long_batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]
    q = load_tile(q_ptr, None, batch, head, start, q_strides[2], 0, tokens, DIM, BLOCK_M, BLOCK_D, False, True)
    dout = load_tile(
        dout_ptr, None, batch, head, start, dout_strides[2], 0, tokens, DIM_V, BLOCK_M, BLOCK_DV, False, True
    )
    place = head_row.to(tl.int64) * tokens + rows
    lse = tl.load(row_lse_ptr + place, mask=rows < tokens, other=float("inf"))
    delta = tl.load(delta_ptr + place, mask=rows < tokens, other=0.0)
    if bias_ptr is not None:
        bias_ptr += long_batch * bias_strides[0] + long_head * bias_strides[1]
    if mask_ptr is not None:
        mask_ptr += long_batch * mask_strides[0] + long_head * mask_strides[1]
    slope = 0.0
    if alibi_ptr is not None:
        slope = load_slope(alibi_ptr, alibi_strides, batch, head, rows[:, None], tokens, EXACT)
    if q_documents_ptr is not None:
        q_document = tl.load(q_documents_ptr + long_batch * tokens + rows, mask=rows < tokens, other=0)

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for masked in tl.static_range(0, 2):
        walk_begin, walk_end = full_begin, full_end
        if masked:
            walk_begin, walk_end = (begin, stop - skipped - (full_end - full_begin)) if GAPS else (full_end, hi)
        for first in tl.range(walk_begin, walk_end, BLOCK_N):
            first = tl.multiple_of(first, 16)
            if masked and GAPS:
                first = masked_block(first, skip, skipped, full_begin, full_end, PREFIX_ON_TOP)
            block_end = keys
            if LIST_K > 0:
                first, block_end = listed(list_ptr, first, BLOCK_N, LIST_K)
                block_end = tl.minimum(block_end, keys)
            cols = (first + tl.arange(0, BLOCK_N))[None, :]
            k = load_tile(
                k_ptr, k_desc, batch, kv_head, first, k_strides[2], lo, hi,
                DIM, BLOCK_N, BLOCK_D, BULK and (not masked or not PADDED), masked,
            )  # fmt: skip
            v = load_tile(
                v_ptr, v_desc, batch, kv_head, first, v_strides[2], lo, hi,
                DIM_V, BLOCK_N, BLOCK_DV, BULK and (not masked or not PADDED), masked,
            )  # fmt: skip
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
            score, bent = attention_scores(
                qk, rows[:, None], cols, shift[:, None], bias_ptr, bias_strides, slope, tokens, keys,
                inner, outer, alibi_ptr is not None, SOFTCAP, EXACT,
            )  # fmt: skip
            p = power(score - lse[:, None], EXACT)
            if DROPOUT:
                keep = kept_probabilities(
                    seed_ptr, head_row, start, first, tokens, keys, drop_below, BLOCK_M, BLOCK_N, LANES, SHORT
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
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
                ds = tl.where(visible, ds, 0.0)
                bent = tl.where(visible, bent, 0.0)
                if CLEAN:
                    k = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], k, 0.0)
            if dbias_ptr is not None:
                dbias_row = dbias_ptr + place[:, None] * keys
                held = (rows < end)[:, None] & (cols < block_end)
                tl.store(dbias_row + cols, ds.to(dbias_ptr.dtype.element_ty), mask=held)
            if SOFTCAP:
                ds = ds * (1.0 - bent * bent)
            dq = add_product(dq, ds.to(k.dtype), k, rows < tokens)

    cols = tl.arange(0, BLOCK_D)
    dq_ptr += long_batch * dq_strides[0] + long_head * dq_strides[1]
    dq_ptr += rows.to(tl.int64)[:, None] * dq_strides[2] + cols[None, :]
    tl.store(dq_ptr, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < DIM)[None, :])


@triton.jit(do_not_specialize=["documents"])
def _attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, q_desc, dout_desc, row_lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    bias_ptr, mask_ptr, alibi_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr,
    q_documents_ptr, k_documents_ptr, bounds_ptr, offsets_ptr, indices_ptr,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, bias_strides, mask_strides, alibi_strides,
    list_strides,
    batches, heads, tokens, keys, documents, section, list_share,
    inner, outer, scale, window_left, window_right, drop_below, keep_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BULK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
    PADDED: tl.constexpr, SPARSE: tl.constexpr,
    CLEAN: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one kv head: a walk over the queries of every head of its group. Tiles of scores
    are transposed, [BLOCK_N, BLOCK_M], so that p and ds feed the next product from registers."""
    PREFIX: tl.constexpr = prefix_ptr is not None
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    kv_heads = heads // GROUP
    block, kv_row = schedule(tiles_in(keys, BLOCK_N, LIST_K), batches * kv_heads, section, False)
    batch = kv_row // kv_heads
    kv_head = kv_row - batch * kv_heads
    start, end = place_of(block, keys, BLOCK_N, LIST_K)
    cols = start + tl.arange(0, BLOCK_N)
    if cu_q_ptr is not None:
        document = find_document(cu_k_ptr, documents, cols)
        q_begin, q_end, _, k_end, prefix_end = span(document, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr, tokens, keys)
        real = (cols < k_end) & (cols < tl.load(cu_k_ptr + documents))
    else:
        q_begin, q_end, _, k_end, prefix_end = span(batch, None, None, lengths_ptr, prefix_ptr, tokens, keys)
        real = cols < k_end
    if LIST_K > 0:
        real = real & (cols < end)
    shift = cols * 0 + (k_end - q_end)
    lo, hi = query_range(cols, shift, q_begin, q_end, prefix_end, window_left, window_right, LEFT, RIGHT, PREFIX)
    # keys that do not exist need no mask: their rows of dk and dv are dropped at the end
    full_lo, full_hi = tl.max(tl.where(real, lo, 0), 0), tl.min(tl.where(real, hi, FAR), 0)
    lo = tl.where(real, lo, FAR)
    hi = tl.where(real, hi, 0)
    outer_lo, outer_hi = tl.maximum(tl.min(lo, 0), 0), tl.max(hi, 0)
    if bounds_ptr is not None:
        bounds_ptr += (batch * tl.cdiv(keys, BLOCK_N) + block) * 2
        outer_lo = tl.maximum(outer_lo, tl.load(bounds_ptr))
        outer_hi = tl.minimum(outer_hi, tl.load(bounds_ptr + 1))
    begin = outer_lo // 16 * 16
    full_begin, full_end = stretches(begin, outer_hi, full_lo, full_hi, SPARSE, BLOCK_M)

    long_batch = batch.to(tl.int64)
    q_ptr += long_batch * q_strides[0]
    dout_ptr += long_batch * dout_strides[0]
    k_ptr += long_batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    v_ptr += long_batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]
    k = load_tile(k_ptr, None, batch, kv_head, start, k_strides[2], 0, keys, DIM, BLOCK_N, BLOCK_D, False, True)
    v = load_tile(v_ptr, None, batch, kv_head, start, v_strides[2], 0, keys, DIM_V, BLOCK_N, BLOCK_DV, False, True)
    if k_documents_ptr is not None:
        k_document = tl.load(k_documents_ptr + long_batch * keys + cols, mask=cols < keys, other=0)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # one loop over heads and blocks, so that the pipeline never drains; but each head may have a list of its own
    OUTER: tl.constexpr = GROUP if LIST_Q > 0 else 1
    INNER: tl.constexpr = 1 if LIST_Q > 0 else GROUP
    for part in tl.range(0, OUTER):
        list_ptr, stop = None, outer_hi
        if LIST_Q > 0:
            list_ptr, count = list_of(
                offsets_ptr, indices_ptr, list_strides, list_share, batch, kv_head * GROUP + part, start // LIST_K
            )
            begin, stop, full_begin, full_end = list_walk(
                list_ptr, count, outer_lo, outer_hi, full_lo, full_hi, SPARSE, BLOCK_M, LIST_Q
            )
        full_blocks = (full_end - full_begin) // BLOCK_M
        for masked in tl.static_range(0, 2):
            blocks = full_blocks
            if masked:
                blocks = tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_M) - full_blocks
            for step in tl.range(0, blocks * INNER):
                member = part + (step // blocks if INNER > 1 else 0)
                head = kv_head * GROUP + member
                first = (step - (member - part) * blocks) * BLOCK_M
                if masked:
                    first = masked_block(begin + first, begin, 0, full_begin, full_end, False)
                else:
                    first = tl.multiple_of(full_begin + first, 16)
                block_end = tokens
                if LIST_Q > 0:
                    first, block_end = listed(list_ptr, first, BLOCK_M, LIST_Q)
                head_row = batch * heads + head
                long_head = head.to(tl.int64)
                bias_head = bias_ptr
                if bias_ptr is not None:
                    bias_head = bias_ptr + long_batch * bias_strides[0] + long_head * bias_strides[1]
                place = head_row.to(tl.int64) * tokens + first + tl.arange(0, BLOCK_M)
                rows = first + tl.arange(0, BLOCK_M)
                slope = 0.0
                if alibi_ptr is not None:
                    slope = load_slope(alibi_ptr, alibi_strides, batch, head, rows[None, :], tokens, EXACT)
                q = load_tile(
                    q_ptr + long_head * q_strides[1], q_desc, batch, head, first, q_strides[2], outer_lo, outer_hi,
                    DIM, BLOCK_M, BLOCK_D, BULK and (not masked or not PADDED), masked,
                )  # fmt: skip
                dout = load_tile(
                    dout_ptr + long_head * dout_strides[1], dout_desc, batch, head, first, dout_strides[2],
                    outer_lo, outer_hi, DIM_V, BLOCK_M, BLOCK_DV, BULK and (not masked or not PADDED), masked,
                )  # fmt: skip
                if not masked:
                    lse = tl.load(row_lse_ptr + place)
                else:
                    lse = tl.load(row_lse_ptr + place, mask=rows < tokens, other=float("inf"))
                if masked:
                    rows_2d = rows[None, :]
                    visible = (rows_2d >= lo[:, None]) & (rows_2d < hi[:, None])
                    if mask_ptr is not None:
                        mask_head = mask_ptr + long_batch * mask_strides[0] + long_head * mask_strides[1]
                        allowed = load_plane(mask_head, mask_strides, rows_2d, cols[:, None], tokens, keys, 0)
                        visible = visible & (allowed != 0)
                    if k_documents_ptr is not None:
                        q_document = tl.load(q_documents_ptr + long_batch * tokens + rows, mask=rows < tokens, other=0)
                        visible = visible & (q_document[None, :] == k_document[:, None])
                    if LIST_Q > 0 and LIST_Q % BLOCK_M != 0:
                        visible = visible & (rows_2d < block_end)
                    if CLEAN:
                        seen = (tl.max(visible.to(tl.int32), 0) > 0)[:, None]
                        q = tl.where(seen, q, 0.0)
                        dout = tl.where(seen, dout, 0.0)
                qk = tl.dot(k, tl.trans(q), input_precision="ieee")
                score, bent = attention_scores(
                    qk, rows[None, :], cols[:, None], shift[:, None], bias_head, bias_strides, slope, tokens, keys,
                    inner, outer, alibi_ptr is not None, SOFTCAP, EXACT,
                )  # fmt: skip
                p = power(score - lse[None, :], EXACT)
                if masked:
                    p = tl.where(visible, p, 0.0)
                kept = p
                dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
                if DROPOUT:
                    keep = tl.trans(
                        kept_probabilities(
                            seed_ptr, head_row, first, start, tokens, keys, drop_below, BLOCK_M, BLOCK_N, LANES, SHORT
                        )
                    )
                    kept = tl.where(keep, p, 0.0)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                dv = add_product(dv, kept.to(dout.dtype), dout, real)
                # loaded here, not with lse: 32 registers less at a time, which is what keeps D = 128 from spilling
                if not masked:
                    delta = tl.load(delta_ptr + place)
                else:
                    delta = tl.load(delta_ptr + place, mask=rows < tokens, other=0.0)
                ds = p * (dp - delta[None, :])
                if SOFTCAP:
                    ds = ds * (1.0 - bent * bent)
                if masked and (PADDED or CLEAN):  # 0 * NaN
                    ds = tl.where(visible, ds, 0.0)
                dk = add_product(dk, ds.to(q.dtype), q, real)

    dk = tl.where(real[:, None], dk * scale, 0.0)
    dv = tl.where(real[:, None], dv * keep_scale, 0.0)
    held = (cols < end)[:, None]
    features = tl.arange(0, BLOCK_D)[None, :]
    dk_ptr += long_batch * dk_strides[0] + kv_head.to(tl.int64) * dk_strides[1]
    dk_ptr += cols.to(tl.int64)[:, None] * dk_strides[2] + features
    tl.store(dk_ptr, dk.to(dk_ptr.dtype.element_ty), mask=held & (features < DIM))
    features = tl.arange(0, BLOCK_DV)[None, :]
    dv_ptr += long_batch * dv_strides[0] + kv_head.to(tl.int64) * dv_strides[1]
    dv_ptr += cols.to(tl.int64)[:, None] * dv_strides[2] + features
    tl.store(dv_ptr, dv.to(dv_ptr.dtype.element_ty), mask=held & (features < DIM_V))


@triton.jit(do_not_specialize=["documents"])
def _attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, row_lse_ptr, delta_ptr, dbias_ptr,
    bias_ptr, mask_ptr, alibi_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr,
    q_documents_ptr, k_documents_ptr,
    q_strides, k_strides, v_strides, dout_strides, bias_strides, mask_strides, alibi_strides, dbias_strides,
    batches, heads, tokens, keys, documents, bias_batches, bias_heads,
    inner, outer, window_left, window_right, drop_below, keep_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One tile of a broadcast bias's gradient: a walk over everything it was broadcast to, so that the sum has one
    order and needs neither atomics nor memory. ROWS, COLS: the bias has its own value for each query, each key."""
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    blocks_m = tl.cdiv(tokens, BLOCK_M)
    blocks_n = tl.cdiv(keys, BLOCK_N)
    own_m = blocks_m if ROWS else 1
    own_n = blocks_n if COLS else 1
    pid = tl.program_id(0)
    own_row = pid // (own_m * own_n)
    block_m = (pid // own_n) % own_m
    block_n = pid % own_n
    bias_batch = own_row // bias_heads
    bias_head = own_row % bias_heads
    walk_heads = heads // bias_heads
    walk_m = 1 if ROWS else blocks_m
    walk_n = 1 if COLS else blocks_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((batches // bias_batches) * walk_heads * walk_m * walk_n):
        batch = bias_batch + step // (walk_heads * walk_m * walk_n)
        head = bias_head + (step // (walk_m * walk_n)) % walk_heads
        start = (block_m + (step // walk_n) % walk_m) * BLOCK_M
        first = (block_n + step % walk_n) * BLOCK_N
        # no `_` here: below it is a score's slope, and a name must keep its type
        (rows, row_lo, row_hi, shift, prefix_begin, prefix_end,
         lo, hi, begin, stop, skip, skipped, in_lo, in_hi) = key_walk(
            start, tokens, batch, tokens, keys, documents, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr, None,
            None, None, window_left, window_right, LEFT, RIGHT, True, BLOCK_M, BLOCK_N, 0)  # fmt: skip
        if (first < hi) & (first + BLOCK_N > lo):
            cols = (first + tl.arange(0, BLOCK_N))[None, :]
            kv_head = head // GROUP
            long_batch = batch.to(tl.int64)
            long_head = head.to(tl.int64)
            long_kv_head = kv_head.to(tl.int64)
            q_head = q_ptr + long_batch * q_strides[0] + long_head * q_strides[1]
            k_head = k_ptr + long_batch * k_strides[0] + long_kv_head * k_strides[1]
            v_head = v_ptr + long_batch * v_strides[0] + long_kv_head * v_strides[1]
            dout_head = dout_ptr + long_batch * dout_strides[0] + long_head * dout_strides[1]
            q = load_tile(q_head, None, 0, 0, start, q_strides[2], 0, tokens, DIM, BLOCK_M, BLOCK_D, False, True)
            k = load_tile(k_head, None, 0, 0, first, k_strides[2], 0, keys, DIM, BLOCK_N, BLOCK_D, False, True)
            v = load_tile(v_head, None, 0, 0, first, v_strides[2], 0, keys, DIM_V, BLOCK_N, BLOCK_DV, False, True)
            dout = load_tile(
                dout_head, None, 0, 0, start, dout_strides[2], 0, tokens, DIM_V, BLOCK_M, BLOCK_DV, False, True
            )
            head_row = batch * heads + head
            place = head_row.to(tl.int64) * tokens + rows
            lse = tl.load(row_lse_ptr + place, mask=rows < tokens, other=float("inf"))
            delta = tl.load(delta_ptr + place, mask=rows < tokens, other=0.0)
            slope = 0.0
            if alibi_ptr is not None:
                slope = load_slope(alibi_ptr, alibi_strides, batch, head, rows[:, None], tokens, EXACT)
            score, _ = attention_scores(
                tl.dot(q, tl.trans(k), input_precision="ieee"), rows[:, None], cols, shift[:, None],
                bias_ptr + long_batch * bias_strides[0] + long_head * bias_strides[1], bias_strides, slope,
                tokens, keys, inner, outer, alibi_ptr is not None, SOFTCAP, EXACT,
            )  # fmt: skip
            visible = (cols >= row_lo[:, None]) & (cols < row_hi[:, None])
            if prefix_ptr is not None:
                visible = visible | ((cols >= prefix_begin[:, None]) & (cols < prefix_end[:, None]))
            if mask_ptr is not None:
                mask_head = mask_ptr + long_batch * mask_strides[0] + long_head * mask_strides[1]
                visible = visible & (load_plane(mask_head, mask_strides, rows[:, None], cols, tokens, keys, 0) != 0)
            if q_documents_ptr is not None:
                q_document = tl.load(q_documents_ptr + long_batch * tokens + rows, mask=rows < tokens, other=0)
                k_document = tl.load(k_documents_ptr + long_batch * keys + cols, mask=cols < keys, other=0)
                visible = visible & (q_document[:, None] == k_document)
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
            if DROPOUT:
                keep = kept_probabilities(
                    seed_ptr, head_row, start, first, tokens, keys, drop_below, BLOCK_M, BLOCK_N, LANES, SHORT
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = power(score - lse[:, None], EXACT) * (dp - delta[:, None])
            total += tl.where(visible & (rows < tokens)[:, None], ds, 0.0)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    held_rows = rows < tokens
    held_cols = cols < keys
    if not ROWS:
        total = tl.sum(total, 0, keep_dims=True)
        rows = tl.zeros((1, 1), tl.int32)
        held_rows = rows == 0
    if not COLS:
        total = tl.sum(total, 1, keep_dims=True)
        cols = tl.zeros((1, 1), tl.int32)
        held_cols = cols == 0
    dbias_ptr += bias_batch.to(tl.int64) * dbias_strides[0] + bias_head.to(tl.int64) * dbias_strides[1]
    dbias_ptr += rows.to(tl.int64) * dbias_strides[2] + cols.to(tl.int64) * dbias_strides[3]
    tl.store(dbias_ptr, total.to(dbias_ptr.dtype.element_ty), mask=held_rows & held_cols)


@triton.jit
def _attention_dsinks_kernel(
    row_lse_ptr, delta_ptr, sinks_ptr, dsinks_ptr, batches, heads, tokens, BLOCK: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """dsinks of one head: -sum over batch and tokens of exp(sink - lse) * delta."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * unit(EXACT)
    total = tl.zeros((BLOCK,), tl.float32)
    for batch in range(batches):
        row = (tl.cast(batch, tl.int64) * heads + head) * tokens
        for first in range(0, tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            lse = tl.load(row_lse_ptr + row + token, mask=token < tokens, other=float("inf"))
            delta = tl.load(delta_ptr + row + token, mask=token < tokens, other=0.0)
            total -= power(sink - lse, EXACT) * delta
    tl.store(dsinks_ptr + head, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))
