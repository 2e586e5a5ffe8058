"""attention for few query tokens over a long cache: the keys split over programs, their results combined (Triton)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import dense
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launch import cdiv, next_power_of_2
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.schedule import splits_of
from tilesmith.ops.attn.split_combine import combine_splits, join_sink
from tilesmith.ops.attn.triton.tiles import LN2, LOG2E, add_product, tanh


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
    acc, total, top, q, lo, hi, gap, gap_size, begin, end, row_begin, row_end, mask_rows, row_document,
    k_ptr, k_page, k_slot, v_ptr, v_page, v_slot, k_scale_ptr, k_scale_strides, v_scale_ptr, v_scale_strides,
    mask_ptr, mask_slot, documents_ptr, pages_ptr, score_scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LEFT: tl.constexpr, SOFTCAP: tl.constexpr, UNIT: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PRODUCT: tl.constexpr, WIDENED: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over slots. MASKED: some row does not see some of them, and [lo, hi) has a gap cut out of it.
    K_SCALES, V_SCALES: each slot has a factor of its own. PRODUCT: the dtype in which values are multiplied.
    WIDENED: 8 bits become its 16 where they were loaded."""
    PLAIN: tl.constexpr = k_scale_ptr is None and not SOFTCAP
    SPARSE: tl.constexpr = mask_ptr is not None or documents_ptr is not None
    # Steps begin at multiples of BLOCK_N. Where a page holds all slots of a step, its number is one for the program.
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
        k = _load(k_rows, features, held, DIM, BLOCK_D, MASKED)
        if STAGES == 1:  # both loads at once, where nothing is loaded ahead
            v = _load(v_rows, features_v, held, DIM_V, BLOCK_DV, MASKED)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if not PLAIN:
            scores *= score_scale
        if K_SCALES:
            at = page * k_scale_strides[0] + slot * k_scale_strides[2]
            scores *= tl.load(k_scale_ptr + at, mask=held, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:
            scores = tanh(scores, q.dtype == tl.float32) * softcap
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
            weights = tl.exp2(scores * score_scale - shift[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if V_SCALES:
            at = page * v_scale_strides[0] + slot * v_scale_strides[2]
            weights *= tl.load(v_scale_ptr + at, mask=held, other=0.0).to(tl.float32)[None, :]
        if STAGES > 1:
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
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, UNIT: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, WIDENED: tl.constexpr, PEEL: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (batch row, kv head, split, tile): a tile of rows, which are pairs (token, query head of that kv head),
    over a share of the keys. Writes a normalised result and its lse. Strides of q, k and v count UNIT elements. PEEL:
    slots that every row sees are walked apart, without masks. CHAINED: the next kernel may start and wait. WIDENED:
    as in `_walk`."""
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
    k_ptr += head.to(tl.int64) * k_head * UNIT
    v_ptr += head.to(tl.int64) * v_head * UNIT
    page_row = batch
    if pages_ptr is not None:
        pages_ptr += batch * pages_row
        page_row = batch * 0
    else:
        k_ptr += batch * k_page * UNIT
        v_ptr += batch * v_page * UNIT
    # Scores are kept in base 2; a softcap takes them in its own unit first.
    score_scale = scale / softcap if SOFTCAP else scale * LOG2E
    softcap *= LOG2E
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
        size = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 1e-30))))
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
            acc, total, top, q, full_lo, full_hi, 0, 0, begin, end, row_begin, row_end, mask_rows, row_document,
            k_ptr, k_page, k_slot, v_ptr, v_page, v_slot, k_scale_ptr, k_scale_strides, v_scale_ptr, v_scale_strides,
            mask_ptr, mask_slot, k_documents_ptr, pages_ptr, score_scale, softcap,
            DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, LEFT, SOFTCAP, UNIT, K_SCALES, V_SCALES, PRODUCT,
            WIDENED, False, STAGES,
        )  # fmt: skip
        full = full_hi - full_lo
    acc, total, top = _walk(
        acc, total, top, q, lo, hi - full, full_lo, full, begin, end, row_begin, row_end, mask_rows, row_document,
        k_ptr, k_page, k_slot, v_ptr, v_page, v_slot, k_scale_ptr, k_scale_strides, v_scale_ptr, v_scale_strides,
        mask_ptr, mask_slot, k_documents_ptr, pages_ptr, score_scale, softcap,
        DIM, DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, LEFT, SOFTCAP, UNIT, K_SCALES, V_SCALES, PRODUCT,
        WIDENED, True, 1 if PEEL else STAGES,
    )  # fmt: skip

    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    out = acc * (out_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    lse = (top + tl.log2(total)) * LN2
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


class SplitConfig(NamedTuple):
    """block_m: rows of a tile (pairs of token and query head). block_n: keys of a step. per_sm: programs that share an
    SM, by which the number of splits is chosen. peel: keys that every row sees are walked apart, without masks.
    chained: the combining kernel is launched to wait for its parts on the device (CUDA, compute capability 9 and up).
    widened: values of 8 bits become 16 where they were loaded, not where the product reads them (CUDA).
    """

    block_m: int
    block_n: int
    per_sm: int
    num_warps: int
    num_stages: int
    peel: bool = True
    chained: bool = False
    widened: bool = False


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    keys = reference.slots(k, call.page_table)
    if call.window_left >= 0:
        keys = min(keys, q.shape[2] + call.window_left)
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": keys,
        "dim": max(q.shape[3], call.v.shape[3]), "sparse": 1 if call.mask is call.q_documents is None else 8,
        "bytes": k.element_size(),
    }  # fmt: skip


def _default(dims, arch, dtype) -> SplitConfig:
    block_m, block_d = max(16, next_power_of_2(dims["rows"])), next_power_of_2(max(16, dims["dim"]))
    if arch.kind not in ("cuda", "hip", "xpu"):
        return SplitConfig(16, 16, 8, 4, 1)  # the interpreter: small tensors, which are to be split all the same
    # H200, bf16, 64/8 heads of 128, TB/s of keys and values at 1 x 8k / 1 x 128k / 32 x 8k: 1 token 2.1 / 4.2 / 4.5,
    # 8 tokens 1.7 / 4.2 / 4.4, 16 tokens 1.3 / 3.5 / 3.8. A combining kernel that is there already saves 1 us.
    chained = arch.kind == "cuda" and arch.capability[0] >= 9
    large = dims["heads"] * dims["keys"] > 2048 * max(1, arch.sms)
    if dtype == torch.float32:
        # Products in full float32 run without tensor cores and hold whole rows in registers.
        config = SplitConfig(16, 16, 1, 8, 2)
    elif arch.kind == "hip" and arch.warp == 32:
        # 256 registers a thread and none to spare: tiles twice as high or wide spill 56 to 290 of them.
        config = SplitConfig(min(block_m, 32), 32, 1, 8, 2) if block_d <= 128 else SplitConfig(16, 16, 1, 8, 2)
    elif block_m >= 64 and block_d > 128:
        config = SplitConfig(64, 32, 1, 4 if chained else 8, 3)
    elif block_m > 64:
        config = SplitConfig(128, 64, 1, 8, 3)
        if large and chained and dims["sparse"] == 1:
            config = SplitConfig(128, 128, 1, 8, 3)
    elif block_m == 64 or (block_m == 32 and block_d <= 128 and chained):
        config = SplitConfig(64, 64, 2, 4, 3) if dims["heads"] >= arch.sms else SplitConfig(64, 64, 1, 4, 4)
    elif chained:
        # H200, 1 token, 32 x 8k, 8 bits: in steps of 128 keys 156 us, in pages of 16 167; in steps of 64 200 and 223
        config = SplitConfig(block_m, 64 if block_d * dims["bytes"] > 128 else 128, 2, 4, 3, peel=False)
    else:
        config = SplitConfig(block_m, 128, 2, 4, 2) if large else SplitConfig(block_m, 128, 1, 8, 3)
    small = chained and dims["bytes"] == 1
    return _fit(config._replace(chained=chained, widened=arch.kind == "cuda"), block_d, arch, dtype, small)


def _fit(config: SplitConfig, block_d: int, arch, dtype, small: bool) -> SplitConfig:
    """The configuration made small enough for the device's shared memory. small: keys and values wait in 8 bits."""
    room = arch.shared_memory or 49_152
    grouped = arch.kind == "cuda" and arch.capability[0] >= 9 and config.block_m >= 64 and dtype.itemsize == 2

    def needed(c: SplitConfig) -> int:
        # Warp-group products read tiles where they lie until they are done: one more in flight, but no copy of p.
        keys = 2 * c.block_n * (c.num_stages if grouped else c.num_stages - 1)
        if small and not grouped:
            keys = keys // dtype.itemsize + c.block_n  # and a tile of values that were widened
        return c.per_sm * ((keys + c.block_m) * block_d + (0 if grouped else c.block_m * c.block_n)) * dtype.itemsize

    while needed(config) > room and config.block_n > 16:
        if config.per_sm > 1:
            config = config._replace(per_sm=1)
        elif config.num_stages > 2:
            config = config._replace(num_stages=2)
        else:
            config = config._replace(block_n=config.block_n // 2)
    return config


_SMALL = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

SPLIT_SPACE = Space(
    default=_default,
    dims=_dims,
    choices={
        "block_m": (16, 32, 64, 128),
        "block_n": (32, 64, 128),
        "per_sm": (1, 2, 3),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "peel": (False, True),
    },
)


def _reasons(call) -> list[str]:
    unread = ("bias", "alibi", "seed", "cu_seqlens_q", "prefix_lengths", "block_offsets", "q_scale")
    reasons = [
        f"{name} is given, which this kernel does not read" for name in unread if getattr(call, name) is not None
    ]
    if call.rows > 512 and call.page_table is None:
        reasons.append("T * H / G is more than 512: this kernel is for few query tokens")
    elif call.rows > 128 and not call.cached:
        reasons.append("T * H / G is more than 128 and S less than 4 T: this kernel is for few query tokens on a cache")
    if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"q is {call.q.dtype}; float16, bfloat16 and float32 are served")
    for name in ("k", "v"):
        dtype = getattr(call, name).dtype
        if dtype != call.q.dtype and dtype not in _SMALL:
            reasons.append(f"{name} is {dtype}; q's dtype, int8, float8_e4m3fn and float8_e5m2 are served")
        if dtype in _SMALL[1:] and call.arch.kind == "hip":
            reasons.append(f"{name} is {dtype}, which {call.arch.name} does not convert")
        if dtype in _SMALL[1:] and call.arch.kind == "cuda" and call.arch.capability < (8, 9):
            reasons.append(f"{name} is {dtype}; compute capability 8.9 and up converts it")
    for name in ("q", "v"):
        if getattr(call, name).cols > 256:
            reasons.append(f"{name} has head dim {getattr(call, name).cols}; up to 256 is served")
    reasons += [f"{name}: factors of blocks are not read" for name, n in zip("qkv", call.factors) if n > 1]
    reasons += [f"{name}'s last stride is not 1" for name in ("q", "k", "v") if not getattr(call, name).unit]
    return reasons


@register_kernel("attention", backend="triton_split", rank=30, rejects=_reasons)
@optimize_kernel(space=SPLIT_SPACE)
@attention_arguments
def attention(call, *, config: SplitConfig) -> tuple[Tensor, Tensor]:
    """One pass over the keys in as many splits as fill the device, and a second one that combines them."""
    q, k, v = call.q, call.k, call.v
    batch, heads, tokens, dim = q.shape
    kv_heads, page_size, dim_v = k.shape[1], k.shape[2], v.shape[3]
    out = reference.out_like(q, dim_v)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    sinks, kv_lengths, page_table, q_documents, k_documents = (
        dense(x) for x in (call.sinks, call.kv_lengths, call.page_table, call.q_documents, call.k_documents)
    )
    group, slots, right = heads // kv_heads, reference.slots(k, page_table), 0 if call.causal else call.window_right
    tiles = cdiv(group * tokens, config.block_m)
    seen = slots if call.window_left < 0 else min(slots, min(tokens, config.block_m // group + 1) + call.window_left)
    splits = splits_of(
        batch * kv_heads * tiles, cdiv(seen, config.block_n), max(1, arch_of(q.device).sms) * config.per_sm,
        8 * config.block_m * dim_v / (config.block_n * (dim + dim_v) * k.element_size()),
    )  # fmt: skip
    part_out, part_lse, part_strides = out, lse, (0, *out.stride()[:3])
    if splits > 1:
        part_out = torch.empty((splits, batch, heads, tokens, dim_v), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, batch, heads, tokens), dtype=torch.float32, device=q.device)
        part_strides = part_out.stride()[:4]
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    # In units of 8 or 16 elements the compiler sees that rows start on 16 bytes, also where D is 72 or 200.
    small = k.element_size() == 1 or v.element_size() == 1
    unit = next((n for n in ((16, 8) if small else (8,)) if all(stride % n == 0 for stride in strides)), 1)
    strides = tuple(stride // unit for stride in strides)
    k_scale_strides, k_scales = _scale_strides(call.k_scale, page_table)
    v_scale_strides, v_scales = _scale_strides(call.v_scale, page_table)
    chained = {"launch_pdl": True} if config.chained and splits > 1 else {}
    widened = config.widened and v.element_size() == 1 and q.element_size() == 2
    block_dv = next_power_of_2(max(16, dim_v))
    launch(
        _attention_split_kernel, (batch * kv_heads * tiles * splits,),
        q, *strides[:3], k, *strides[3:6], v, *strides[6:], part_out, *part_strides, part_lse, lse.numel(),
        call.k_scale, k_scale_strides, call.v_scale, v_scale_strides, call.mask, _broadcast_strides(call.mask),
        q_documents, k_documents, sinks if splits == 1 else None, kv_lengths,
        page_table, 0 if page_table is None else page_table.shape[1],
        dim**-0.5 if call.scale is None else call.scale, call.softcap, slots, tokens, kv_heads, tiles, splits,
        call.window_left, right,
        GROUP=group, DIM=dim, DIM_V=dim_v, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=next_power_of_2(max(16, dim)), BLOCK_DV=block_dv, PAGE_SIZE=page_size,
        LEFT=0 <= call.window_left < slots, RIGHT=0 <= right < tokens - 1, SOFTCAP=call.softcap > 0.0, UNIT=unit,
        K_SCALES=k_scales, V_SCALES=v_scales, WIDENED=widened,
        PEEL=config.peel and call.mask is None and q_documents is None, STAGES=config.num_stages, CHAINED=bool(chained),
        num_warps=config.num_warps,
    )  # fmt: skip
    if splits > 1:
        combine_splits(part_out, part_lse, sinks, out, lse, bool(chained))
    return out, lse


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...] | None:
    """The strides of x, 0 along dims of size 1."""
    return None if x is None else tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride()))


def _scale_strides(scale: Tensor | None, page_table: Tensor | None) -> tuple[tuple[int, ...] | None, bool]:
    """Strides of factors by page (by batch row, without pages), head and slot; whether they differ within a program."""
    strides = _broadcast_strides(scale)
    return strides, strides is not None and (strides[2] != 0 or (page_table is not None and strides[0] != 0))
