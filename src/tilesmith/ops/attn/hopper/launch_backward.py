"""Launcher of attention's backward on Hopper, what it refuses, and its configurations."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.counters import work_counter
from tilesmith.device.gluon.shim import TensorDescriptor, gl
from tilesmith.device.rows import dense
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launch import cdiv
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_vjp_arguments
from tilesmith.ops.attn.block_lists import by_keys
from tilesmith.ops.attn.hopper.backward import attention_dkv_kernel, attention_dkv_shares_kernel
from tilesmith.ops.attn.hopper.backward_dq import attention_dq_wide_kernel
from tilesmith.ops.attn.hopper.backward_rows import attention_dq_kernel, attention_dsinks_kernel, attention_rows_kernel
from tilesmith.ops.attn.hopper.backward_wide import attention_dkv_wide_kernel
from tilesmith.ops.attn.hopper.block_tables import list_key_tiles
from tilesmith.ops.attn.hopper.launch import (
    all_keys,
    columns_of,
    descriptor,
    dropout_arguments,
    dropout_reasons,
    is_narrow,
    list_reasons,
    reasons_for_all,
    score_factors,
    section,
    shares_of,
    window_of,
)
from tilesmith.ops.attn.hopper.packed import key_tiles, query_tiles
from tilesmith.ops.attn.hopper.window_backward import window_gradients

_PARTS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def rejects_vjp(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention_vjp."""
    reasons = reasons_for_all(call) + all_keys(call) + dropout_reasons(call)
    if call.q.cols % 8 or not 64 <= call.q.cols <= 256 or call.v.cols != call.q.cols:
        reasons.append(
            f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 8 from 64 to 256, one for all, are served"
        )
    return reasons + (_list_reasons(call) if call.block_offsets is not None else [])


def _list_reasons(call) -> list[str]:
    reasons = list_reasons(call, 128, 128)
    if call.q.cols > 128:
        reasons.append("block lists: head dims above 128 are not served with them")
    if call.deterministic:
        reasons.append("block lists: tiles of keys add to dq in any order")
    return reasons


class HopperVjpConfig(NamedTuple):
    """stages: tiles of queries in flight. block_q: queries of a block. Above head dim 128 nothing is asked for; windows
    of up to 129 keys have blocks of 64 queries (`hopper_window_vjp`)."""

    stages: int
    block_q: int


def _is_narrow(call, window: tuple[int, int, bool, bool]) -> bool:
    """Whether `hopper_window_vjp` serves a call. Grouped heads would need a group's queries at once; its first queries
    must not lie before 0; nothing is dropped there."""
    q, k = call.q, call.k
    alike = q.shape[1] == k.shape[1] and k.shape[2] + max(window[1], 0) <= q.shape[2] and call.dropout_p == 0.0
    return alike and is_narrow(window, call.cu_seqlens_q is not None, columns_of(q))


@attention_vjp_arguments
def _dims_vjp(call) -> dict[str, int]:
    q, k = call.q, call.k
    window = window_of(call, k.shape[2])
    narrow = _is_narrow(call, window)
    whole = call.window_left < 0 and (call.causal or call.window_right < 0)
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3],
        "value_dim": call.v.shape[3],
        "plain": 8 if whole and call.softcap == call.dropout_p == 0.0 else 1, "narrow": 8 if narrow else 1,
    }  # fmt: skip


def _default_vjp(dims, arch, dtype) -> HopperVjpConfig:
    if dims["narrow"] > 1:
        return HopperVjpConfig(4 if dims["dim"] <= 64 else 2, 64)
    # blocks of 128 queries (H200, 4k, TFLOP/s: 466 for 416 causal, 541 for 431 full) read 15 % less of shared memory,
    # but with a window or softcap they spill 600 bytes and more
    if dims["dim"] <= 64 and dims["plain"] > 1:
        return HopperVjpConfig(2, 128)
    return HopperVjpConfig(3 if dims["dim"] <= 64 else 2, 64)


SPACE_VJP = Space(
    default=_default_vjp,
    dims=_dims_vjp,
)


@register_kernel("attention_vjp", backend="hopper", rank=25, rejects=rejects_vjp)
@optimize_kernel(space=SPACE_VJP)
@attention_vjp_arguments
def attention_vjp(call, *, config: HopperVjpConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows; up to head dim 128 a kernel for dk, dv and what dq is the sum of, and one that puts dq in
    order; above, one for dk and dv and one for dq; one for all where the window is narrow."""
    dout, q, k, v, out, lse = call.dout, call.q, call.k, call.v, call.out, call.lse
    batch, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    wants_sinks = call.output_mask[4] and call.sinks is not None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = torch.empty_like(call.sinks, memory_format=torch.contiguous_format) if wants_sinks else q.new_empty(0)
    found = [x if wanted else q.new_empty(0) for x, wanted in zip((dq, dk, dv), call.output_mask)]
    found += [q.new_empty(0), dsinks]
    if q.numel() == 0 or k.numel() == 0:
        found = [x.zero_() for x in found]
        if wants_sinks and call.dlse is not None:
            dsinks += call.dlse.sum((0, 2))
        return tuple(found)
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(3) != 1:
        dout = dout.contiguous()
    arch = arch_of(q.device)
    window = left, right, has_left, has_right = window_of(call, keys)
    packed, blocks, table = call.cu_seqlens_q is not None, None, None
    # queries that see nothing and keys that nobody sees may hold NaN: no tile touches them
    has_lists, lists, indices, list_share, list_rows = call.block_offsets is not None, None, None, 1, 0
    q_begin = max(0, tokens - keys - right) if has_right and not packed and not has_lists else 0
    k_begin = max(0, keys - tokens - left) if has_left and not packed else 0
    if q_begin:
        dq[:, :, :q_begin].zero_()
    if k_begin:
        dk[:, :, :k_begin].zero_()
        dv[:, :, :k_begin].zero_()
    wide, narrow = columns_of(q), _is_narrow(call, window)
    block_m, block_n = config.block_q, 128 if wide <= 128 else 64
    q_blocks, k_blocks = cdiv(tokens - q_begin, block_m), cdiv(keys - k_begin, block_n)
    if packed:
        documents = [dense(x) for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.kv_lengths)]
        blocks, table, q_blocks, k_blocks = key_tiles(*documents, tokens, keys, window, block_m, block_n)
    if has_lists:
        offsets, indices = by_keys(call)
        indices, (batches, many, _) = indices.contiguous(), offsets.shape
        sides = call.block_q, call.block_k
        lists = list_key_tiles(offsets, indices, tokens, keys, has_right, *sides, block_m, block_n)
        list_share, list_rows = heads // many, k_blocks * many if batches > 1 else 0
    rows = lse.new_empty(2, batch * heads, q_blocks * block_m)
    dropout = dropout_arguments(call)
    ordered = call.deterministic and wide <= 128
    heads_at_once = section_vjp(q, kv_heads, k_blocks, arch, packed, ordered, has_right)
    ring = ordered and not (has_left or has_right or packed or has_lists or dropout)
    ring = ring and rings(q, q_blocks, k_blocks, heads_at_once, arch)
    sums = 2 if ring else 1
    parts = turns = token_delta = None
    if wide > 128:
        token_delta = torch.empty_like(lse)
    elif not narrow:
        parts = lse.new_empty(sums * batch * heads * q_blocks * block_m * wide // 256, 256)
        turns = torch.empty(sums * batch * heads * q_blocks, dtype=torch.int32, device=q.device)
    woven = heads > kv_heads and has_right and block_m == 64
    woven = woven and not (has_left or packed or has_lists or call.deterministic)
    scale = dim**-0.5 if call.scale is None else call.scale
    kept = 1.0 / dropout["dropout"][2] if dropout else None
    if dropout:
        scale /= kept
    factors = *score_factors(call), scale
    tiles = k_blocks * batch * kv_heads
    turns_round = ordered and has_right and heads == kv_heads and not (has_left or packed or has_lists)
    turns_round = turns_round and alternates(k_blocks, block_m, heads_at_once, arch)
    undivided, shares, left_over = tiles, 0, None
    if wide <= 128 and not (has_left or has_right or packed or has_lists or call.deterministic or dropout):
        undivided, shares = divided(q, kv_heads, tiles, q_blocks * (heads // kv_heads), heads_at_once, arch)
        left_over = lse.new_empty(2 * shares, 2, block_n, wide) if shares else None
    programs = min(arch.sms, undivided + shares)
    dynamic = programs < undivided + shares
    inputs = (
        descriptor(q, block_m, packed), descriptor(k, block_n, packed), descriptor(v, block_n, packed),
        descriptor(dout, block_m, packed),
    )  # fmt: skip
    order = work_counter(q.device) if dynamic else None, table
    sizes = (
        tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, batch * kv_heads, heads_at_once, left, right,
    )  # fmt: skip
    kinds = {
        "GROUP": heads // kv_heads, "LEFT": has_left, "RIGHT": has_right,
        "TAIL": packed or (keys - k_begin) % block_n != 0, "DYNAMIC": dynamic, "D": wide, "SOFTCAP": call.softcap > 0.0,
        "num_warps": 4,
    }  # fmt: skip
    launch(
        attention_rows_kernel, (batch * heads * q_blocks,),
        out, dout, lse, call.dlse, rows[0], rows[1], token_delta, turns, blocks,
        out.stride(), dout.stride(), None if call.dlse is None else call.dlse.stride(),
        heads, tokens, q_begin, q_blocks,
        ROWS=block_m, DIM=dim, D=wide, kept=kept, SUMS=sums, num_warps=4 if wide <= 128 else 8,
    )  # fmt: skip
    if narrow:
        window_gradients(q, k, v, dout, rows, (left, right), q_begin, factors, (dq, dk, dv), config.stages)
    elif wide > 128:
        launch(
            attention_dkv_wide_kernel, (programs,), *inputs, descriptor(dk, 64, packed), descriptor(dv, 64, packed),
            rows[0], rows[1], *order, *sizes, *factors, STAGES=2, **kinds,
        )  # fmt: skip
    else:
        launch(
            attention_dkv_kernel, (programs,), *inputs,
            TensorDescriptor(parts, list(parts.shape), [256, 1], [block_m * wide // 512, 256], _PARTS),
            descriptor(dk, 64, packed), descriptor(dv, 64, packed), rows[0], rows[1], turns, *order,
            lists, indices, *sizes, list_share, list_rows, undivided, shares, left_over, *factors,
            LIST_Q=call.block_q if has_lists else 0, ORDERED=call.deterministic, ALTERNATES=turns_round, WOVEN=woven,
            RING=ring, BQ=block_m, STAGES=config.stages, launch_pdl=True, **kinds, **dropout,
        )  # fmt: skip
    if call.output_mask[0] and wide > 128:
        blocks = cdiv(tokens, 128)
        if packed:
            table, blocks = query_tiles(*documents, tokens, keys, window, 128)
        tiles = blocks * batch * heads
        programs = min(arch.sms, tiles)
        dynamic = programs < tiles
        launch(
            attention_dq_wide_kernel, (programs,), *inputs, descriptor(dq, 64, packed), lse, token_delta,
            work_counter(q.device) if dynamic else None, table, tokens, keys, heads, blocks, batch * heads,
            section(k, heads, arch, alike=False), left, right, heads // kv_heads, *factors,
            LEFT=has_left, RIGHT=has_right, DYNAMIC=dynamic, D=wide, SOFTCAP=call.softcap > 0.0, num_warps=4,
        )  # fmt: skip
    elif call.output_mask[0] and not narrow:
        launch(
            attention_dq_kernel, (batch * heads * q_blocks,),
            parts, dq, turns, blocks, dq.stride(), heads, tokens, q_begin, q_blocks, scale,
            (k_blocks - 1) * q_blocks // k_blocks if ring else None, ROWS=block_m, DIM=dim, D=wide,
            EARLY=call.deterministic and not (packed or has_left), num_warps=4, launch_pdl=True,
        )  # fmt: skip
    if shares:
        launch(
            attention_dkv_shares_kernel, (tiles - undivided, 2, 8), left_over, dk, dv, dk.stride(), dv.stride(), keys,
            kv_heads, k_blocks, batch * kv_heads, heads_at_once, undivided, shares, q_blocks * (heads // kv_heads),
            DIM=dim, D=wide, ROWS=block_n // 8, num_warps=4,
        )  # fmt: skip
    if wants_sinks:
        launch(
            attention_dsinks_kernel,
            (heads,),
            rows[0],
            rows[1],
            dense(call.sinks),
            dsinks,
            batch,
            heads,
            q_blocks * block_m,
            BLOCK=1024,
            kept=kept,
        )
        if q_begin and call.dlse is not None:  # of queries that see no key, lse is the sink
            dsinks += call.dlse[:, :, :q_begin].sum((0, 2))
    return tuple(found)


def divided(q: Tensor, kv_heads: int, tiles: int, steps: int, section: int, arch) -> tuple[int, int]:
    """How many of so many tiles, of `steps` blocks of queries each, are made by one program each, and into how many
    shares the others are divided. section: kv heads that are worked on together (`section_vjp`).

    None where that does not spare the last programs 16 blocks (`shares_of`): what shares leave is written and read once
    more (H200, head dim 128, 1k: 511 TFLOP/s with the 8 that it spares, 523). As programs are at different queries
    then, those of a section's heads must stay in the L2 cache (64/8 heads x 4k, 134 MB: 560 for 607).
    """
    _, heads, tokens, dim = q.shape
    rest = tiles % arch.sms
    shares = shares_of(rest, rest * steps, steps, 16, arch)
    if not shares or 0 < arch.l2 < section * _streamed(tokens, dim, heads // kv_heads):
        return tiles, 0
    return tiles - rest, shares


def alternates(k_blocks: int, block_m: int, section: int, arch) -> bool:
    """Whether, ordered and under a causal mask, every other section of heads walks the other way (`KeyWalk.rises`), so
    that none of its tiles is longer than the time that is left.

    Where a section fills the device; where a tile is met a whole block behind the one before, which takes blocks of
    fewer queries than a tile has keys; and from 8k keys on, where the last tiles, which are the longest, take longer
    than putting dq in order beside them (H200, head dim 128, TFLOP/s: 674 for 634 at 32k, 685 for 658
    at 16k, 643 for 630 at 8k, 596 for 598 at 4k, 508 for 531 at 2k; head dim 64, blocks of 128 queries: 421 for 518 at
    16k, of kernels that added dq from registers).
    """
    return block_m < 128 and k_blocks >= 64 and 10 * section * k_blocks >= 9 * arch.sms


def rings(q: Tensor, q_blocks: int, k_blocks: int, section: int, arch) -> bool:
    """Whether, ordered and without a mask, a head's tiles of keys each start at a block of queries of their own
    (`around`), and not all at its first one, where each waits until those before it have gone on.

    That spares each program about as many blocks as tiles of a head run at the same time, once. But each block of
    queries has a second part of dq, which takes all programs together about as long as a block takes one. (H200, head
    dim 128, TFLOP/s: 16 heads of 2k / 4k / 8k 529 / 633 / 642 for 435 / 577 / 598, 8 heads of 4k 609 for 464, 2 x 32/8
    heads of 4k 639 for 606. Where it is not done: 4 x 16 heads of 4k 636 for 631, 8 x 16 of 2k 585 for 601, 64 x 16 of
    1k 502 for 547.) Not where queries, dout and parts of dq of the heads that run would not stay in the L2 cache
    (`section_vjp`), as where queries are many more than keys.
    """
    batch, heads, tokens, dim = q.shape
    kept = arch.sms * _streamed(tokens, dim, 1) <= 2 * arch.l2 // 5 * k_blocks
    return kept and min(k_blocks, arch.sms // section) * arch.sms >= batch * heads * q_blocks


def _streamed(tokens: int, dim: int, group: int) -> int:
    """Bytes of the queries, dout and parts of dq of a kv head, which `group` heads of q share."""
    return tokens * dim * 8 * group


def section_vjp(q: Tensor, kv_heads: int, k_blocks: int, arch, packed: bool, ordered: bool, diagonal: bool) -> int:
    """How many kv heads to work on together, of each of which `k_blocks` tiles of keys are made. packed: documents
    are; ordered: parts of dq are added tile after tile; diagonal: each tile starts where its keys are first seen.

    As many as give each program a tile: so who had a short one, under a causal mask, draws a long one of the next heads
    (H200, head dim 128, 32/8 heads x 4k causal: 1,222 us in sections of 4, 1,442 one after another); of documents, as
    many as give it two of the shorter half of the tiles (`KeyWalk.tile`). Ordered, the parts of dq must stay in the L2
    cache, where queries, dout and parts of dq may fill 2/5 (4k causal, TFLOP/s: 543 with the 6 heads that fit, 515 with
    12, 462 with 16; 32/8 heads 1,480 us with the one that fits, 1,590 with 4). Where tiles start with the first queries
    and not at a diagonal, as many as that, so that fewer tiles of a head wait for each other (4k, head dim 64: 574 with
    8, 506 with the 4 that give each program a tile).
    """
    batch, heads, tokens, dim = q.shape
    section = arch.sms // k_blocks
    if packed and not ordered:
        section = (4 * arch.sms + k_blocks // 2) // k_blocks
    if ordered:
        kept = 2 * arch.l2 // 5 // _streamed(tokens, dim, heads // kv_heads)
        section = min(section, kept) if diagonal else kept
    return min(max(1, section), batch * kv_heads)
