"""attention of few rows on a cache on Hopper: clusters of CTAs that share a kv head's keys, or CTAs alone.

Rows are pairs of a token and a query head of one kv head, at most 16, which each warp holds whole: of each block of
keys it meets its own, by products of single warps, and keeps row maxima and sums of its own. So nothing waits for
other warps before the end, where the warps' parts are put together in shared memory, and the CTAs' parts in those
of the cluster: each row has an owner, to whom the others send what they have of it. No part goes through memory, and no
second kernel is launched. CTAs alone have a kv head each where heads are many; where they are very few, or lengths may
differ much, several share a head's keys and a second kernel combines what they write (`plan.decode.divided_keys`).
"""

from tilesmith.device.gluon.cluster import (
    HEAD,
    cluster_wait,
    dsmem_wait,
    load_dsmem,
    open_dsmem,
    store_dsmem,
    store_dsmem_pair,
)  # fmt: skip
from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    launch_dependents,
    mbarrier_wait,
    mbarriers,
    mma_sync,
    smem_tiles,
    syncthreads,
    tma_load,
)  # fmt: skip
from tilesmith.ops.attn.hopper.softmax import NOTHING, finish_softmax, tanh
from tilesmith.ops.attn.hopper.split_kv import even_range
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
    """The first R rows of all warps, put together: row maxima, row sums, sums of values [R, DV]."""
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
    """Send each row's part to its owner, and put together what this CTA is sent of its own rows."""
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
    """Cluster (split, kv head, batch row), of PARTS CTAs with equal ranges of the split's blocks of keys. Writes a
    result and its lse for each split. R: 8 or 16 rows that hold all pairs of a token and a head. Strides of q count 8
    elements. inverse: 1 over the number of ranges. left, right: the window, where LEFT, RIGHT. CHAINED: the next kernel
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
    k_full, v_full = mbarriers((STAGES, 1), (STAGES, 1))
    fence_async()
    member = gl.program_id(0)
    part = member % PARTS
    split = member // PARTS
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
    low, blocks = even_range(all_blocks, member, gl.num_programs(0), inverse)
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
            qk = tanh(qk * inner)
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
    factor, lse = finish_softmax(top, total, gl.where(real, head, 0), sinks_ptr)
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
