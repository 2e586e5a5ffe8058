"""attention for few query tokens over a long cache: the keys split over CTAs, their results combined (Triton)."""

import triton
import triton.language as tl

from tilesmith.ops.attn.split_combine import join_sink
from tilesmith.ops.attn.triton.tiles import LN2, add_product, power, tanh, unit


@triton.jit
def _load(rows, columns, held, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A tile of keys or values. rows: pointers [BLOCK_N, 1]. columns: [1, BLOCK]. held: which rows may be read."""
    if MASKED:
        mask = held[:, None]
        if BLOCK != COLUMNS:
            mask = mask & (columns < COLUMNS)
        return tl.load(rows + columns, mask=mask, other=0.0)
    if BLOCK != COLUMNS:
        return tl.load(rows + columns, mask=columns < COLUMNS, other=0.0)
    return tl.load(rows + columns)


@triton.jit
def _page(pages_ptr, first, slots, begin, end, PAGE_SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pages of a step's slots; 0 for slots outside [begin, end), whose entries may name no page. ALIGNED: the step
    begins where a page does."""
    columns = first + slots
    held = (columns >= begin) & (columns < end)
    if ALIGNED:  # slots // PAGE_SIZE is the same in every step
        return tl.load(pages_ptr + slots // PAGE_SIZE + first // PAGE_SIZE, mask=held, other=0)
    return tl.load(pages_ptr + columns // PAGE_SIZE, mask=held, other=0)


@triton.jit
def _skip(step, gap, gap_size, MASKED: tl.constexpr):
    """Where a step of a walk begins: a masked walk jumps over the gap."""
    if MASKED:
        return step + tl.where(step >= gap, gap_size, 0)
    return step


@triton.jit
def _walk(
    acc, total, top, q, q_rest, lo, hi, gap, gap_size, begin, end, row_begin, row_end, mask_rows, row_document,
    k_ptr, k_page, k_slot, v_ptr, v_page, v_slot, k_scale_ptr, k_scale_strides, v_scale_ptr, v_scale_strides,
    mask_ptr, mask_slot, documents_ptr, pages_ptr, score_scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_REST: tl.constexpr, SHARED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LEFT: tl.constexpr, SOFTCAP: tl.constexpr, UNIT: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PRODUCT: tl.constexpr, WIDENED: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over slots. MASKED: some row does not see some of them, and [lo, hi) has a gap cut out of it.
    K_SCALES, V_SCALES: each slot has a factor of its own. PRODUCT: the dtype in which values are multiplied.
    WIDENED: 8 bits become its 16 where they were loaded. KEY_REST: of the tile of key columns behind the first BLOCK_D,
    or 0. SHARED: values are the first columns of the keys, of whose tile the product takes them."""
    EXACT: tl.constexpr = q.dtype == tl.float32
    HEAD: tl.constexpr = BLOCK_D if KEY_REST > 0 else DIM
    PLAIN: tl.constexpr = k_scale_ptr is None and not SOFTCAP
    SPARSE: tl.constexpr = mask_ptr is not None or documents_ptr is not None
    # Steps begin at multiples of BLOCK_N. Where a page holds all slots of a step, its number is one for the CTA.
    ONE_PAGE: tl.constexpr = pages_ptr is not None and PAGE_SIZE % BLOCK_N == 0
    ALIGNED: tl.constexpr = pages_ptr is not None and BLOCK_N % PAGE_SIZE == 0
    slots = tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_D)[None, :]
    features_v = tl.arange(0, BLOCK_DV)[None, :]
    if ONE_PAGE:
        next_page = _page(pages_ptr, _skip(lo, gap, gap_size, MASKED), 0, begin - BLOCK_N + 1, end, PAGE_SIZE, False)
    elif pages_ptr is not None:
        next_page = _page(pages_ptr, _skip(lo, gap, gap_size, MASKED), slots, begin, end, PAGE_SIZE, ALIGNED)
    for step in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        first = _skip(step, gap, gap_size, MASKED)
        columns = first + slots
        # What lies outside [begin, end) may be unwritten memory or a page that was given back: it is never loaded.
        held = (columns >= begin) & (columns < end)
        if ONE_PAGE:
            page = next_page.to(tl.int64)
            next_first = _skip(step + BLOCK_N, gap, gap_size, MASKED)
            next_page = _page(pages_ptr, next_first, 0, begin - BLOCK_N + 1, end, PAGE_SIZE, False)
            start = tl.cast(first % PAGE_SIZE, tl.int64)
            slot = start + slots
            k_rows = k_ptr + (page * k_page + start * k_slot) * UNIT + (slots.to(tl.int64) * k_slot * UNIT)[:, None]
            v_rows = v_ptr + (page * v_page + start * v_slot) * UNIT + (slots.to(tl.int64) * v_slot * UNIT)[:, None]
        elif pages_ptr is not None:
            # Looked up one step ahead: loads that depend on a load of the same step are not pipelined as deeply.
            page = next_page.to(tl.int64)
            next_first = _skip(step + BLOCK_N, gap, gap_size, MASKED)
            next_page = _page(pages_ptr, next_first, slots, begin, end, PAGE_SIZE, ALIGNED)
            slot = ((slots if ALIGNED else columns) % PAGE_SIZE).to(tl.int64)
            k_rows = k_ptr + (slot * k_slot * UNIT)[:, None] + (page * k_page * UNIT)[:, None]
            v_rows = v_ptr + (slot * v_slot * UNIT)[:, None] + (page * v_page * UNIT)[:, None]
        else:
            page = tl.zeros([BLOCK_N], tl.int64)
            slot = columns.to(tl.int64)
            k_rows = k_ptr + tl.cast(first, tl.int64) * k_slot * UNIT + (slots.to(tl.int64) * k_slot * UNIT)[:, None]
            v_rows = v_ptr + tl.cast(first, tl.int64) * v_slot * UNIT + (slots.to(tl.int64) * v_slot * UNIT)[:, None]
        k = _load(k_rows, features, held, HEAD, BLOCK_D, MASKED)
        if KEY_REST > 0:
            k_rest = _load(k_rows + BLOCK_D, tl.arange(0, KEY_REST)[None, :], held, DIM - BLOCK_D, KEY_REST, MASKED)
        if STAGES == 1 and not SHARED:  # both loads at once, where nothing is loaded ahead
            v = _load(v_rows, features_v, held, DIM_V, BLOCK_DV, MASKED)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if KEY_REST > 0:
            scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision="ieee")
        if not PLAIN:
            scores *= score_scale
        if K_SCALES:
            at = page * k_scale_strides[0] + slot * k_scale_strides[2]
            scores *= tl.load(k_scale_ptr + at, mask=held, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:
            scores = tanh(scores, EXACT) * softcap
        if MASKED:
            seen = columns[None, :] < row_end[:, None]
            if LEFT:
                seen = seen & (columns[None, :] >= row_begin[:, None])
            if documents_ptr is not None:
                document = tl.load(documents_ptr + columns, mask=held, other=0)
                seen = seen & (document[None, :] == row_document[:, None])
            if mask_ptr is not None:
                mask_at = mask_ptr + mask_rows[:, None] + columns.to(tl.int64)[None, :] * mask_slot
                seen = seen & (tl.load(mask_at, mask=held[None, :] & (row_end > 0)[:, None], other=0) != 0)
            scores = tl.where(seen, scores, float("-inf"))
        if PLAIN:  # scaled, shifted and raised in one multiply-add and a power: with 128 rows that is what takes time
            new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = power(scores * score_scale - shift[:, None], EXACT)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = power(scores - shift[:, None], EXACT)
        decay = power(top - shift, EXACT)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if V_SCALES:
            at = page * v_scale_strides[0] + slot * v_scale_strides[2]
            weights *= tl.load(v_scale_ptr + at, mask=held, other=0.0).to(tl.float32)[None, :]
        if SHARED:
            v = k
        elif STAGES > 1:
            v = _load(v_rows, features_v, held, DIM_V, BLOCK_DV, MASKED)
        if SPARSE and MASKED:  # a slot that no row sees may hold NaN
            v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, tl.zeros_like(v))
        v = v.to(PRODUCT)
        if WIDENED:
            # Triton would move the conversion behind the change of layout that the product asks for, and so read 8-bit
            # values one by one. It moves nothing past an instruction that may have an effect; this one is none in SASS.
            v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], v.dtype, is_pure=False, pack=2)
        acc = add_product(acc, weights.to(PRODUCT), v, row_end > 0)
        top = new_top
    return acc, total, top


@triton.jit(
    do_not_specialize=(
        "slots",
        "tokens",
        "kv_heads",
        "tiles",
        "splits",
        "window_left",
        "window_right",
        "pages_row",
        "lse_split",
    )
)
def _attention_split_kernel(
    q_ptr, q_row, q_head, q_token, k_ptr, k_page, k_head, k_slot, v_ptr, v_page, v_head, v_slot,
    out_ptr, out_split, out_row, out_head, out_token, lse_ptr, lse_split,
    k_scale_ptr, k_scale_strides, v_scale_ptr, v_scale_strides,
    mask_ptr, mask_strides, q_documents_ptr, k_documents_ptr, sinks_ptr, lengths_ptr, pages_ptr, pages_row,
    scale, softcap, slots, tokens, kv_heads, tiles, splits, window_left, window_right,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEY_REST: tl.constexpr, SHARED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, UNIT: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, WIDENED: tl.constexpr, PEEL: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """CTA (batch row, kv head, split, tile): a tile of rows, which are pairs (token, query head of that kv head),
    over a share of the keys. Writes a normalised result and its lse. Strides of q, k and v count UNIT elements. PEEL:
    slots that every row sees are walked apart, without masks. CHAINED: the next kernel may start and wait. WIDENED,
    KEY_REST, SHARED: as in `_walk`."""
    # Tiles of the same keys are neighbours, so that one of them finds the keys in the L2 cache.
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % splits
    head = tl.program_id(0) // tiles // splits % kv_heads
    batch = (tl.program_id(0) // tiles // splits // kv_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    query_head = (head * GROUP + row % GROUP).to(tl.int64)
    real = token < tokens
    first_token = tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, tokens - 1)

    length = slots
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), slots)
    # The last token stands at the last key. A row sees begin <= row_begin <= slot < row_end <= end; every row of the
    # tile sees every_begin <= slot < every_end.
    shift = length - tokens
    begin = 0
    every_begin = 0
    row_begin = tl.zeros([BLOCK_M], tl.int32)
    if LEFT:
        begin = tl.maximum(shift + first_token - window_left, 0)
        every_begin = tl.maximum(shift + last_token - window_left, 0)
        row_begin = tl.maximum(shift + token - window_left, 0)
    end = length
    every_end = length
    row_end = tl.zeros([BLOCK_M], tl.int32) + length
    if RIGHT:
        end = tl.minimum(tl.maximum(shift + last_token + window_right + 1, 0), length)
        every_end = tl.minimum(tl.maximum(shift + first_token + window_right + 1, 0), length)
        row_end = tl.minimum(shift + token + window_right + 1, length)
    row_end = tl.where(real, row_end, 0)

    base = begin // BLOCK_N
    blocks = tl.maximum(tl.cdiv(end, BLOCK_N) - base, 0)
    lo = (base + blocks * split // splits) * BLOCK_N
    hi = tl.minimum((base + blocks * (split + 1) // splits) * BLOCK_N, end)
    every_begin = tl.cdiv(every_begin, BLOCK_N) * BLOCK_N
    every_end = every_end // BLOCK_N * BLOCK_N

    features = tl.arange(0, BLOCK_D)[None, :]
    q_at = batch * q_row + query_head * q_head + token.to(tl.int64) * q_token
    q = tl.load(q_ptr + q_at[:, None] * UNIT + features, mask=real[:, None] & (features < DIM), other=0.0)
    q_rest = None
    if KEY_REST > 0:
        more = BLOCK_D + tl.arange(0, KEY_REST)[None, :]
        q_rest = tl.load(q_ptr + q_at[:, None] * UNIT + more, mask=real[:, None] & (more < DIM), other=0.0)
    k_ptr += head.to(tl.int64) * k_head * UNIT
    v_ptr += head.to(tl.int64) * v_head * UNIT
    page_row = batch
    if pages_ptr is not None:
        pages_ptr += batch * pages_row
        page_row = batch * 0
    else:
        k_ptr += batch * k_page * UNIT
        v_ptr += batch * v_page * UNIT
    # Scores are kept in base 2, but for fp32; a softcap takes them in its own unit first.
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    score_scale = scale / softcap if SOFTCAP else scale * unit(EXACT)
    softcap *= unit(EXACT)
    # 8-bit floats become fp16 in one instruction, bf16 in many; q does too, behind a power of two of its own.
    BRAIN: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    PRODUCT: tl.constexpr = (
        tl.float16 if BRAIN and v_ptr.dtype.element_ty.is_fp8() and not V_SCALES else q_ptr.dtype.element_ty
    )
    out_scale = 1.0
    if k_scale_ptr is not None:
        k_scale_ptr += page_row * k_scale_strides[0] + head.to(tl.int64) * k_scale_strides[1]
        if not K_SCALES:
            score_scale *= tl.load(k_scale_ptr).to(tl.float32)
    if BRAIN and k_ptr.dtype.element_ty.is_fp8():
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        if KEY_REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
        size = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-30))))
        if KEY_REST > 0:
            q_rest = (q_rest.to(tl.float32) / size[:, None]).to(tl.float16)
        q = (q.to(tl.float32) / size[:, None]).to(tl.float16)
        score_scale *= size[:, None]
    if v_scale_ptr is not None:
        v_scale_ptr += page_row * v_scale_strides[0] + head.to(tl.int64) * v_scale_strides[1]
        if not V_SCALES:
            out_scale = tl.load(v_scale_ptr).to(tl.float32)
    mask_rows = row.to(tl.int64)
    mask_slot = 0
    if mask_ptr is not None:
        mask_rows = batch * mask_strides[0] + query_head * mask_strides[1] + token.to(tl.int64) * mask_strides[2]
        mask_slot = mask_strides[3]
    row_document = row
    if q_documents_ptr is not None:
        row_document = tl.load(q_documents_ptr + batch * tokens + token, mask=real, other=0)
        k_documents_ptr += batch * slots

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    full_lo = lo
    full = 0
    if PEEL:
        # First the stretch that every row sees in full, pipelined and unmasked; then what is left on both sides of it.
        full_lo = tl.minimum(tl.maximum(lo, every_begin), hi)
        full_hi = tl.minimum(tl.maximum(full_lo, every_end), hi)
        acc, total, top = _walk(
            acc, total, top, q, q_rest, full_lo, full_hi, 0, 0, begin, end, row_begin, row_end, mask_rows,
            row_document, k_ptr, k_page, k_slot, v_ptr, v_page, v_slot, k_scale_ptr, k_scale_strides,
            v_scale_ptr, v_scale_strides, mask_ptr, mask_slot, k_documents_ptr, pages_ptr, score_scale, softcap,
            DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, KEY_REST, SHARED, PAGE_SIZE, LEFT, SOFTCAP, UNIT,
            K_SCALES, V_SCALES, PRODUCT, WIDENED, False, STAGES,
        )  # fmt: skip
        full = full_hi - full_lo
    acc, total, top = _walk(
        acc, total, top, q, q_rest, lo, hi - full, full_lo, full, begin, end, row_begin, row_end, mask_rows,
        row_document, k_ptr, k_page, k_slot, v_ptr, v_page, v_slot, k_scale_ptr, k_scale_strides,
        v_scale_ptr, v_scale_strides, mask_ptr, mask_slot, k_documents_ptr, pages_ptr, score_scale, softcap,
        DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, KEY_REST, SHARED, PAGE_SIZE, LEFT, SOFTCAP, UNIT,
        K_SCALES, V_SCALES, PRODUCT, WIDENED, True, 1 if PEEL else STAGES,
    )  # fmt: skip

    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    out = acc * (out_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    lse = top + tl.log(total) if EXACT else (top + tl.log2(total)) * LN2
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head, mask=real, other=float("-inf")).to(tl.float32)
        share, lse = join_sink(lse, sink)
        out *= share[:, None]
    lse_at = split.to(tl.int64) * lse_split + (batch * kv_heads * GROUP + query_head) * tokens + token
    tl.store(lse_ptr + lse_at, lse, mask=real)
    out_at = split.to(tl.int64) * out_split + batch * out_row + query_head * out_head + token.to(tl.int64) * out_token
    features_v = tl.arange(0, BLOCK_DV)[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + features_v, out, mask=real[:, None] & (features_v < DIM_V))
