"""attention of few rows on a cache on Hopper, in one launch: clusters of programs that share a kv head's keys.

Rows are pairs of a token and a query head of one kv head, at most 16, which each warp holds whole: of each block of
keys it meets its own, by products of single warps, and keeps greatest scores and sums of its own. So nothing waits for
other warps before the end, where the warps' parts are put together in shared memory, and the programs' parts in those
of the cluster: each row has an owner, to whom the others send what they have of it. No part goes through memory, and no
second kernel is launched. Where there are few kv heads, programs alone share their keys, and a second kernel
(`hopper_combine`) combines what they write.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.alignment import is_16_byte_aligned
from tilesmith.device.gluon.cluster import (
    HEAD,
    cluster_wait,
    dsmem_wait,
    load_dsmem,
    open_dsmem,
    resident_clusters,
    store_dsmem,
    store_dsmem_pair,
)  # fmt: skip
from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    launch_dependents,
    mbarrier_pair,
    mbarrier_wait,
    mma_sync,
    smem_tiles,
    syncthreads,
    tma_load,
)  # fmt: skip
from tilesmith.device.rows import dense
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launch import cdiv, next_power_of_2
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.hopper.combine import combine
from tilesmith.ops.attn.hopper.forward import NOTHING, bend, finish
from tilesmith.ops.attn.hopper.launch import (
    columns_of,
    no_dropout,
    no_lists,
    reasons_for_all,
    score_factors,
    window_of,
    wrong_dims,
)  # fmt: skip
from tilesmith.ops.attn.hopper.launch_decode import keys_of
from tilesmith.ops.attn.hopper.split_kv import portion
from tilesmith.ops.attn.hopper.tile_offset import corner

_HEAD = gl.constexpr(HEAD)  # of a room


@gluon.jit
def _seen(qk, row_begin, row_end, key, LEFT: gl.constexpr):
    """Scores [warps, rows, keys of a warp] of a block that begins at `key`, of which some rows do not see all."""
    LAYOUT: gl.constexpr = qk.type.layout
    WARPS: gl.constexpr = qk.shape[0]
    N: gl.constexpr = qk.shape[2]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    column = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    column = key + warp * N + column
    seen = column < row_end[None, :, None]
    if LEFT:
        seen = seen & (column >= row_begin[None, :, None])
    return gl.where(seen, qk, NOTHING)


@gluon.jit
def _together(top, total, acc):
    """Put together what parts (the first dim, which a thread has whole) found of the same rows."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, acc.type.layout))
    new_top = gl.max(top, 0)
    weight = gl.exp2(top - gl.expand_dims(gl.where(new_top == NOTHING, 0.0, new_top), 0))
    total = gl.sum(total * weight, 0)
    acc = gl.sum(acc * gl.expand_dims(weight, 2), 0)
    new_top = gl.convert_layout(new_top, ROW, assert_trivial=True)
    return new_top, gl.convert_layout(total, ROW, assert_trivial=True), acc


@gluon.jit
def _first_rows(x, R: gl.constexpr):
    """The first R of 16 rows, the second dim of x. A thread has rows that are 8 apart, so none changes its place."""
    if R == 8:
        if len(x.shape) == 2:
            x, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 8]), (0, 2, 1)))
        else:
            x, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 8, x.shape[2]]), (0, 2, 3, 1)))
    return x


@gluon.jit
def _of_warps(top, total, acc, R: gl.constexpr):
    """The first R rows of all warps, put together: greatest scores, sums of powers, sums of values [R, DV]."""
    W: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[2]
    # 8 numbers between rows: those of a warp's store are in different banks
    ROOM: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[DV, 8]], [W, R, DV], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OWN: gl.constexpr = gl.BlockedLayout([W, 1, DV // 32], [1, 1, 32], [1, W, 1], [2, 1, 0])
    tops = gl.allocate_shared_memory(gl.float32, [W, R], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [W, R], FLAT)
    accs = gl.allocate_shared_memory(gl.float32, [W, R, DV], ROOM)
    tops.store(_first_rows(top, R))
    totals.store(_first_rows(total, R))
    accs.store(_first_rows(acc, R))
    syncthreads()
    return _together(tops.load(gl.SliceLayout(2, OWN)), totals.load(gl.SliceLayout(2, OWN)), accs.load(OWN))


@gluon.jit
def _of_cluster(top, total, acc, room, full, part, PARTS: gl.constexpr, OWNERS: gl.constexpr):
    """Send each row's part to its owner, and put together what this program is sent of its own rows."""
    R: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    EACH: gl.constexpr = R // OWNERS
    STATS: gl.constexpr = EACH * PARTS * DV * 4
    row = gl.arange(0, R, top.type.layout)
    column = gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout))[None, :]
    owner = row // EACH
    slot = part * EACH + row % EACH
    cluster_wait()
    to = (room + slot * (DV * 4))[:, None] + column * 4
    store_dsmem(full, to, owner[:, None] + column * 0, acc, min(4, DV // 32))
    store_dsmem_pair(full, room + STATS + slot * 8, owner, top, total)
    if part < OWNERS:  # nobody sends anything to the others
        dsmem_wait(full)
    # a thread has all parts of a column
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = min(WARPS, DV // 32)
    ALL: gl.constexpr = gl.BlockedLayout([PARTS, 1, 1], [1, 1, 32], [1, WARPS // ACROSS, ACROSS], [2, 1, 0])
    ALL_ROW: gl.constexpr = gl.SliceLayout(2, ALL)
    its = gl.arange(0, PARTS, gl.SliceLayout(1, ALL_ROW))[:, None] * EACH
    its = its + gl.arange(0, EACH, gl.SliceLayout(0, ALL_ROW))[None, :]
    columns = gl.arange(0, DV, gl.SliceLayout(0, gl.SliceLayout(1, ALL)))[None, None, :]
    top = load_dsmem(room + STATS + its * 8)
    total = load_dsmem(room + STATS + its * 8 + 4)
    return _together(top, total, load_dsmem(room + gl.expand_dims(its, 2) * (DV * 4) + columns * 4))


@gluon.jit
def _load(desc, full, tiles, s, place, kv_head, key, length, LENGTHS: gl.constexpr):
    """Start to load a tile of keys or values. place: of the batch row (`corner`)."""
    tma_load(desc, corner(place, kv_head, key, length, LENGTHS), full.index(s), tiles.index(s))


@gluon.jit(do_not_specialize=["lse_split", "tokens", "keys", "kv_heads", "between_k", "between_v", "left", "right"])
def attention_cluster_kernel(
    q_ptr, q_strides, k_desc, v_desc, out_ptr, out_split, out_strides, lse_ptr, lse_split, sinks_ptr, lengths_ptr,
    tokens, keys, kv_heads, inverse, between_k, between_v, left, right, inner, scale,
    GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, R: gl.constexpr, BN: gl.constexpr,
    DIM: gl.constexpr, DIM_V: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Cluster (split, kv head, batch row), of PARTS programs with equal shares of the split's blocks of keys. Writes a
    result and its lse for each split. R: 8 or 16 rows that hold all pairs of a token and a head. Strides of q count 8
    elements. inverse: 1 over the number of shares. left, right: the window, where LEFT, RIGHT. CHAINED: the next kernel
    may start and wait."""
    LENGTHS: gl.constexpr = lengths_ptr is not None
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = BN // W
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    STAT: gl.constexpr = gl.SliceLayout(2, SCORES)
    ROW: gl.constexpr = gl.SliceLayout(0, STAT)
    k = smem_tiles(STAGES, k_desc)
    v = smem_tiles(STAGES, v_desc)
    k_full, v_full = mbarrier_pair(STAGES, 1)
    fence_async()
    share = gl.program_id(0)
    part = share % PARTS
    split = share // PARTS
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)
    length = keys
    k_place, v_place = batch, batch
    if LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(lengths_ptr + batch), 0), keys)
        k_place, v_place = batch * between_k + length, batch * between_v + length
    # the last token stands at the last key; from the first key that the first token sees, all are seen by some row
    shift = length - tokens
    begin = gl.to_tensor(0)
    if LEFT:
        begin = gl.maximum(shift - left, 0)
    all_blocks = (gl.maximum(length - begin, 0) + BN - 1) // BN
    low, blocks = portion(all_blocks, share, gl.num_programs(0), inverse)
    begin += low * BN
    for i in gl.static_range(STAGES):
        if i < blocks:
            _load(k_desc, k_full, k, i, k_place, kv_head, begin + i * BN, length, LENGTHS)
            _load(v_desc, v_full, v, i, v_place, kv_head, begin + i * BN, length, LENGTHS)
    OWNERS: gl.constexpr = min(R, PARTS)
    if PARTS > 1:
        room_full = open_dsmem(R // OWNERS * PARTS * (DV * 4 + 8), 1024)
        room = room_full + _HEAD

    # each warp has all queries
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    every = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None] * 0
    q_batch, q_head, q_token = q_strides
    q_at = (batch.to(gl.int64) * q_batch + (kv_head * GROUP + row % GROUP) * q_head + row // GROUP * q_token) * 8
    q = gl.load(q_ptr + (q_at + column + every), mask=(row < tokens * GROUP) & (column < DIM) & (every == 0), other=0.0)
    token = gl.arange(0, 16, ROW) // GROUP
    row_end = token * 0 + length
    all_end = length
    if RIGHT:
        row_end = gl.minimum(shift + token + right + 1, length)
        all_end = gl.minimum(shift + right + 1, length)
    row_begin = token * 0
    all_begin = begin * 0
    if LEFT:
        row_begin = shift + token - left
        all_begin = shift + tokens - 1 - left

    top = gl.full([W, 16], NOTHING, gl.float32, STAT)
    total = gl.zeros([W, 16], gl.float32, STAT)
    acc = gl.zeros([W, 16, DV], gl.float32, SCORES)
    for j in range(blocks):
        s = j % STAGES
        phase = (j // STAGES) & 1
        key = begin + j * BN
        mbarrier_wait(k_full.index(s), phase)
        qk = mma_sync(
            q, k.index(s).reshape([W, N, D]).permute((0, 2, 1)).load(B), gl.zeros([W, 16, N], gl.float32, SCORES)
        )
        if j + STAGES < blocks:
            syncthreads()
            _load(k_desc, k_full, k, s, k_place, kv_head, key + STAGES * BN, length, LENGTHS)
        if SOFTCAP:
            qk = bend(qk * inner)
        if (key + BN > all_end) | (key < all_begin):
            qk = _seen(qk, row_begin, row_end, key, LEFT)
        new_top = gl.maximum(top, gl.max(qk, 2) * scale)
        base = gl.where(new_top == NOTHING, 0.0, new_top)
        p = gl.exp2(qk * scale - gl.expand_dims(base, 2))
        decay = gl.exp2(top - base)
        total = total * decay + gl.sum(p, 2)
        top = new_top
        acc = acc * gl.expand_dims(decay, 2)
        mbarrier_wait(v_full.index(s), phase)
        acc = mma_sync(gl.convert_layout(p.to(v.dtype), A), v.index(s).reshape([W, N, DV]).load(B), acc)
        if j + STAGES < blocks:
            syncthreads()
            _load(v_desc, v_full, v, s, v_place, kv_head, key + STAGES * BN, length, LENGTHS)

    syncthreads()  # what follows takes the place of the tiles
    top, total, acc = _of_warps(top, total, acc, R)
    first = 0
    if PARTS > 1:
        top, total, acc = _of_cluster(top, total, acc, room, room_full, part, PARTS, OWNERS)
        first = part * (R // OWNERS)
    mine = first + gl.arange(0, acc.shape[0], top.type.layout)
    head = kv_head * GROUP + mine % GROUP
    token = mine // GROUP
    real = mine < tokens * GROUP
    if PARTS > OWNERS:
        real = real & (part < OWNERS)
    factor, lse = finish(top, total, gl.where(real, head, 0), sinks_ptr)
    lse_at = split.to(gl.int64) * lse_split + (batch * kv_heads * GROUP + head) * tokens + token
    gl.store(lse_ptr + lse_at, lse, mask=real)
    out_batch, out_head, out_token = out_strides
    out_at = split.to(gl.int64) * out_split + batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head
    out_at += token.to(gl.int64) * out_token
    column = gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout))[None, :]
    acc = (acc * factor[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + (out_at[:, None] + column), acc, mask=real[:, None] & (column < DIM_V))
    if CHAINED:
        launch_dependents()


class ClusterConfig(NamedTuple):
    """block_n: keys of a tile. stages: tiles of keys and of values in flight. num_warps: each has block_n / num_warps
    keys of a tile. parts: programs of a cluster, a power of two; 0: `division` finds it, and splits."""

    block_n: int
    stages: int
    num_warps: int = 4
    parts: int = 0
    splits: int = 1


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": k.shape[2],
        "dim": max(q.shape[3], call.v.shape[3]),
    }  # fmt: skip


def _default(dims, arch, dtype) -> ClusterConfig:
    # H200, 1 token on 8k keys: 64/8 heads of 128 in tiles of 128 keys with 2 / 3 stages 14.7 / 14.7 us (4 batch rows:
    # 36.9 / 39.7), with 8 warps 15.3, in tiles of 64 keys with 4 stages 16.9; 32/8 heads of 64 with 3 / 6 stages
    # 11.7 / 12.8; 32/4 heads of 256 with 2 / 3 stages 17.6 / 18.1
    wide = max(64, next_power_of_2(dims["dim"]))
    return ClusterConfig(64, 2) if wide > 128 else ClusterConfig(128, 3 if wide == 64 else 2)


SPACE = Space(default=_default, dims=_dims, choices={"stages": (2, 3)})


def rejects(call) -> list[str]:
    """Why clusters cannot serve a call of attention."""
    reasons = reasons_for_all(call) + no_dropout(call) + no_lists(call) + wrong_dims(call)
    if call.cu_seqlens_q is not None:
        reasons.append("cu_seqlens_q: packed documents are not known")
    if call.rows > 16:
        reasons.append("T * H / G is more than 16: a warp holds 16 rows")
    if not call.cached:
        reasons.append("S is less than 4 T: this kernel is for a cache")
    # One batch row may be full and the others empty, and its clusters are no larger for that. H200, so, of 128 dims,
    # triton_split's time to this kernel's; 2 rows of 8 kv heads, room for 1k / 2k / 4k keys: 1.21 / 1.15 / 1.03; 4 rows
    # of 8, 512 / 1k / 2k: 1.09 / 1.04 / .94; 8 of 8, 512 / 1k: 1.20 / 1.19; 4 of 2, 2k / 4k: 1.17 / 1.11.
    if call.room * call.pairs * max(call.q.cols, call.v.cols) > 256 * 128 * call.arch.sms:
        reasons.append("kv_lengths of several batch rows in so much room: the longest may keep the others waiting")
    if call.pairs * 2 > call.arch.sms:
        reasons.append(f"{call.pairs} kv heads of all batch rows: as many clusters do not run at once")
    return reasons


@register_kernel("attention", backend="hopper_cluster", rank=36, rejects=rejects)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: ClusterConfig) -> tuple[Tensor, Tensor]:
    """A cluster for each kv head of each batch row, whose programs share its keys (`division`)."""
    q, k, v = call.q, call.k, call.v
    batch, heads, tokens, dim = q.shape
    kv_heads, keys, dim_v = k.shape[1], k.shape[2], v.shape[3]
    out = reference.out_like(q, dim_v)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if keys == 0:
        lse.copy_(lse.new_full((), float("-inf")) if call.sinks is None else call.sinks.to(lse.dtype)[:, None])
        return out.zero_(), lse
    if not is_16_byte_aligned(q):
        q = q.clone(memory_format=torch.contiguous_format)
    sinks, kv_lengths = dense(call.sinks), dense(call.kv_lengths)
    group, bounded = heads // kv_heads, kv_lengths is not None
    left, right, has_left, has_right = window_of(call, keys)
    k_desc, between_k = keys_of(k, config.block_n, bounded, False)
    v_desc, between_v = keys_of(v, config.block_n, bounded, False)
    parts, splits = config.parts, config.splits
    if not parts:
        seen = min(keys, left + tokens) if has_left else keys
        parts, splits = division(batch * kv_heads, cdiv(seen, config.block_n), arch_of(q.device).sms, q.device)
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = torch.empty((splits, batch, heads, tokens, dim_v), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, batch, heads, tokens), dtype=torch.float32, device=q.device)
    launch(
        attention_cluster_kernel, (splits * parts, kv_heads, batch),
        q, tuple(s // 8 for s in q.stride()[:3]), k_desc, v_desc,
        part_out, part_out.stride(0), part_out.stride()[-4:-1], part_lse, lse.numel(),
        sinks if splits == 1 else None, kv_lengths,
        tokens, keys, kv_heads, 1 / (splits * parts), between_k, between_v, left, right, *score_factors(call),
        GROUP=group, LEFT=has_left, RIGHT=has_right and right < tokens - 1, R=8 if group * tokens <= 8 else 16,
        BN=config.block_n, DIM=dim, DIM_V=dim_v, D=columns_of(q), DV=columns_of(v), PARTS=parts, STAGES=config.stages,
        SOFTCAP=call.softcap > 0.0, CHAINED=splits > 1, num_warps=config.num_warps, cluster=parts,
    )  # fmt: skip
    if splits > 1:
        combine(part_out, part_lse, sinks, out, lse)
    return out, lse


def division(heads: int, blocks: int, sms: int, device: torch.device) -> tuple[int, int]:
    """Among how many programs of a cluster, and how many clusters, the blocks of keys of each kv head are divided.
    heads: kv heads of all batch rows; sms: multiprocessors of the device.

    One cluster a head, as large as lets all run at once, where that keeps half of the device busy. Clusters of 16 take
    their keys through few groups of multiprocessors (GPCs): beyond a few blocks they lose to programs alone whose parts
    a second kernel combines. H200, 2 / 4 kv heads of 128: 8k keys in clusters of 16 11.2 / 12.2 us, split 10.5 / 11.9;
    32k keys 20.4 / 27.4, split 16.4 / 23.2. 8 kv heads on 8k / 128k keys in clusters of 8 14.7 / 126.4, split 15.6 /
    126.9; 16 of 8k keys in clusters of 4 22.3, split 23.0; 32 and 64 in clusters of 2 37.5 and 66.9, split 37.5 and
    68.0.
    """
    parts = next((n for n in (16, 8, 4, 2) if resident_clusters(device, n, 1) >= heads), 1)
    if parts == 16 and blocks > 32:
        return 1, 1 << (max(1, min(sms // heads, blocks // 2)).bit_length() - 1)
    return min(parts, next_power_of_2(blocks)), 1
