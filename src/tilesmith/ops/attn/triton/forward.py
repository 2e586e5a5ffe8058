"""Triton kernel of attention's forward."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import dense
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.triton import tiles
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
        slope = load_slope(alibi_ptr, alibi_strides, batch, head, EXACT)
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


class AttentionConfig(NamedTuple):
    """Queries and keys of a tile; warps and pipeline stages of a program; whether k and v come by bulk copies."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    bulk: bool = False


def _default(dims, arch, dtype) -> AttentionConfig:
    wide = triton.next_power_of_2(max(dims["dim"], dims["value_dim"], 16))
    if arch.kind not in ("cuda", "hip", "xpu"):
        return AttentionConfig(32, 32, 4, 1)
    stages = 1 if arch.kind == "hip" else 3
    if dtype == torch.float32:
        config = AttentionConfig(64, 32, 8 if wide > 64 else 4, 2)
    elif arch.kind == "cuda" and arch.capability[0] == 9:
        # H200, 16,384 tokens, hidden 2048, 4k full: 515 TFLOP/s at D 128 (128x128 on 8 warps: 484), 444 at D 64 (347)
        config = {64: (64, 128, 4, 2), 128: (64, 64, 4, 3)}.get(max(wide, 64), (128, 64, 8, stages))
        config = AttentionConfig(*config)
        if dims["drawn"] > 1:
            # with dropout at D 128, 4k: 1,131 us causal and 1,086 full; in three stages 1,259 and 1,220
            config = config._replace(num_stages=2)
    elif wide <= 128:
        config = AttentionConfig(128, 64, 4 if wide <= 64 else 8, stages)
    else:
        config = AttentionConfig(64, 32, 4, stages)
    config = config._replace(bulk=tiles.has_bulk_copies(arch, dtype))
    if dims["tokens"] < config.block_m:
        config = config._replace(block_m=max(16, triton.next_power_of_2(dims["tokens"])), num_warps=4)
    return _fit(config, wide * dtype.itemsize, dtype.itemsize, arch.shared_memory)


def _shared_memory(config: AttentionConfig, row_bytes: int, itemsize: int) -> int:
    """Bytes for queries, staged keys and values, and, in fp32, probabilities, which then pass through it as well."""
    staged = 2 * config.num_stages * config.block_n
    if itemsize < 4:
        return (config.block_m + staged) * row_bytes
    held = config.block_m + max(1, 2 * (config.num_stages - 1)) * config.block_n
    return max((config.block_m + staged) * row_bytes, held * row_bytes + config.block_m * config.block_n * itemsize)


def _fit(config: AttentionConfig, row_bytes: int, itemsize: int, shared_memory: int) -> AttentionConfig:
    """Fewer stages, then smaller tiles, until what a program needs fits in shared memory."""
    room = (shared_memory or 1 << 30) - 1024
    while _shared_memory(config, row_bytes, itemsize) > room:
        if config.num_stages > 1:
            config = config._replace(num_stages=config.num_stages - 1)
        elif config.block_n > 16:
            config = config._replace(block_n=config.block_n // 2)
        elif config.block_m > 16:
            config = config._replace(block_m=config.block_m // 2)
        else:
            break
    return config


def _fit_tile(config: AttentionConfig, dims, arch, dtype) -> AttentionConfig:
    """Warps and stages for the configuration's tile; a smaller tile where it does not fit in shared memory."""
    wide = triton.next_power_of_2(max(dims["dim"], dims["value_dim"], 16))
    config = config._replace(num_warps=8 if config.block_m * max(config.block_n, wide) > 64 * 128 else 4)
    return _fit(config, wide * dtype.itemsize, dtype.itemsize, arch.shared_memory)


ATTENTION_SPACE = Space(
    default=_default,
    dims=attention_arguments(tiles.sizes),
    fit=_fit_tile,
    choices={"block_m": (64, 128, 256), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
)


@register_kernel("attention", backend="triton", rank=20, rejects=tiles.rejects)
@optimize_kernel(space=ATTENTION_SPACE)
@attention_arguments
def attention(call, *, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """One program for each tile of queries."""
    q, k, v = call.q, call.k, call.v
    batch, heads, tokens, _ = q.shape
    out = reference.out_like(q, v.shape[3])
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    arch = arch_of(q.device)
    block_q, block_k = (call.block_q, call.block_k) if call.block_offsets is not None else (0, 0)
    config = config._replace(
        block_m=tiles.within(config.block_m, block_q),
        block_n=tiles.summed(tiles.within(config.block_n, block_k), call.mask, call.dropout_p),
    )
    k_desc, v_desc = tiles.descriptors(config.bulk, (k, v), config.block_n)
    arguments = tiles.launch_arguments(call)
    bounds = None
    if call.block_offsets is None:
        bounds = tiles.document_bounds(call.q_documents, call.k_documents, config.block_m, config.block_n)
    launch(
        _attention_fwd_kernel,
        (tiles.tile_count(tokens, config.block_m, block_q) * batch * heads,),
        **arguments,
        k_desc=k_desc, v_desc=v_desc, out_ptr=out, lse_ptr=lse, out_strides=out.stride(),
        sinks_ptr=dense(call.sinks), bounds_ptr=bounds,
        section=tiles.section(k, v, heads // k.shape[1], arch), BULK=k_desc is not None,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, lse
