"""Attention's gradients on Hopper for narrow windows, in Gluon: a walk along a head that adds nothing up in memory.

A block of 64 keys meets three boxes of 64 queries, and a box of queries three blocks of keys. A CTA walks along a
run of a head's keys: consumers take the blocks of keys in turn, each meets its three boxes of queries, one after
another, and keeps dk and dv in registers; ds goes through shared memory, and when a box of queries has met its three
blocks, one consumer makes its dq of these. A run begins two blocks of keys before its own, for the dq of its first
boxes of queries, and ends two boxes of queries behind, for dk and dv of its last keys. Gradients are written from the
places of what nobody needs any more: dq from its ds, dv from the block's values, dk from the keys of the block before,
whose last dq has just been made. Nothing is added up in memory, so that every result is the same in every run. Scores
live in units of log 2.
"""

from tilesmith.device.gluon.shim import (
    cp_async_row,
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    reinterpret,
    smem_tiles,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import row_of
from tilesmith.ops.attn.hopper.softmax import NOTHING, in_mask, mask_before, tanh
from tilesmith.ops.attn.hopper.tile_offset import corner
from tilesmith.ops.attn.hopper.walk import Walk, tile_queue
from tilesmith.ops.attn.hopper.window import box_of


@gluon.jit
def _first(walk, number, run, size):
    """The first key of a run, its head and batch, and how many blocks of a head's `size` it has."""
    start, head, _, _, batch, _ = walk.tile(number, None)
    start *= run
    return start, head, batch, gl.minimum(run, size - start // 64)


@gluon.jit
def _produce(
    parts, sizes, q_begin, q_desc, dout_desc, k_desc, v_desc, rows_ptr, row_size, plane, counter,
    V_STAGES: gl.constexpr,
):  # fmt: skip
    queue, q, dout, numbers, k, v, _, q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _ = parts
    walk, run, size = sizes
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 128, LANES)
    place = (lane & 49) + ((lane & 2) << 2) + ((lane & 12) >> 1)  # the query whose number lies there, for `row_of`
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, batch, many = _first(walk, number, run, size)
        first = start - (walk.keys - walk.tokens) - walk.right
        row = (batch * walk.heads + head).to(gl.int64) * row_size
        for step in range(many + 4):
            # in the order of need: a box of queries is first met by the block two before the one that it ends with
            b = step - 2
            if b >= 0:
                s = (count + b) % walk.Q_STAGES
                mbarrier_wait(q_empty.index(s), (((count + b) // walk.Q_STAGES) & 1) ^ 1)
                there = corner(batch, head, first + b * 64, 0, False)
                tma_load(q_desc, there, q_full.index(s), q.index(s))
                tma_load(dout_desc, there, q_full.index(s), dout.index(s))
                query = gl.minimum(first + b * 64 + place, walk.tokens - 1) - q_begin
                cp_async_row(rows_ptr + row + (query + (lane >> 6) * plane), q_full.index(s), numbers.index(s))
            if step < many + 2:
                # before the first key there are none, which TMA fills with zeros
                there = corner(batch, head, start + b * 64, 0, False)
                s = (count + step) % walk.STAGES
                mbarrier_wait(k_empty.index(s), (((count + step) // walk.STAGES) & 1) ^ 1)
                tma_load(k_desc, there, k_full.index(s), k.index(s))
                s = (count + step) % V_STAGES
                mbarrier_wait(v_empty.index(s), (((count + step) // V_STAGES) & 1) ^ 1)
                tma_load(v_desc, there, v_full.index(s), v.index(s))
        count += many + 2
        number = queue.fetch(turn, counter, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit
def _leave(x, desc, tile, batch, head, start):
    """Write 64 rows of a gradient, from a tile whose own rows nobody needs any more."""
    tile.reshape([x.shape[0], x.shape[1]]).store(x.to(tile.dtype))
    fence_async()
    tma_store(desc, corner(batch, head, start, 0, False), tile)


@gluon.jit
def _give_back(block, many, count, ds_count, ds_empty, k_empty, v_empty, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
               DS_STAGES: gl.constexpr):  # fmt: skip
    """What a block's gradients were written from, once they are read."""
    tma_store_wait(0)
    mbarrier_arrive(v_empty.index((count + block) % V_STAGES))
    if (block > 0) & (block <= many):
        mbarrier_arrive(ds_empty.index((ds_count + block - 1) % DS_STAGES))
        mbarrier_arrive(k_empty.index((count + block - 1) % STAGES))


@gluon.jit
def _apply_mask(x, walk, key, first):
    """Exponents of 64 keys from `key` on and 64 queries from `first` on; of those that do not see each other, -inf.
    Without a branch: nearly all blocks are crossed by an edge of the window."""
    behind = walk.keys - walk.tokens + walk.right
    ahead = walk.left - (walk.keys - walk.tokens)
    cols = gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))[None, :]
    keys = key + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    lower = gl.maximum(keys - behind, 0) - first
    upper = gl.where((keys >= 0) & (keys < walk.keys), gl.minimum(keys + ahead + 1, walk.tokens) - first, 0)
    word = mask_before(upper[:, None], cols) & ~mask_before(lower[:, None], cols)
    return gl.where(in_mask(word, cols), x, NOTHING)


@gluon.jit
def _consume(
    C: gl.constexpr, parts, sizes, dq_desc, dk_desc, dv_desc, inner, outer, factor,
    V_STAGES: gl.constexpr, DS_STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    queue, q, dout, numbers, k, v, ds, q_full, q_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = parts
    walk, run, size = sizes
    D: gl.constexpr = walk.D
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    # What a block's gradients are written from is given back when it is read; at head dim 64, of which there is more
    # room, in the next block's first step, where nothing waits for that (window of 128 at 32k, H200: 394 us for 406; at
    # head dim 128 432 for 387)
    LATE: gl.constexpr = D == 64
    numbers = reinterpret(numbers, gl.float32, [2 * walk.Q_STAGES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # dq is written from where its ds was: three of its tiles in two boxes, or six
    dq_tiles = reinterpret(ds, dtype, [3 * DS_STAGES * 64 // D, 1, 1, 64, D], dq_desc.layout)
    count = gl.to_tensor(0)
    ds_count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, batch, many = _first(walk, number, run, size)
        first = start - (walk.keys - walk.tokens) - walk.right
        for block in range(C, many + 2, walk.CONSUMERS):
            key = start + (block - 2) * 64
            k_tile = box_of(k, k_full, count + block, walk.STAGES, D)
            v_tile = box_of(v, v_full, count + block, V_STAGES, D)
            dk = gl.zeros([64, D], gl.float32, DKV)
            dv = gl.zeros([64, D], gl.float32, DKV)
            gl.assume(block >= 0)  # the loop has a round, in which ptxas makes addresses that dq's products need, too
            for i in range(gl.maximum(2 - block, 0), 3):
                b = block - 2 + i
                s = (count + b) % walk.Q_STAGES
                q_tile = box_of(q, q_full, count + b, walk.Q_STAGES, D)
                dout_tile = dout.index(s).reshape([64, D])
                zero = gl.zeros([64, 64], gl.float32, SCORES)
                s_made = wgmma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                dp_made = wgmma(v_tile, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                if LATE and (i == 0) & (block > 1):
                    _give_back(block - 2, many, count, ds_count, ds_empty, k_empty, v_empty, walk.STAGES, V_STAGES,
                               DS_STAGES)  # fmt: skip
                score = wgmma_wait(1, deps=[s_made])
                row_lse = row_of(numbers.index(2 * s), 64)
                if SOFTCAP:
                    score = tanh(score * inner)
                p = gl.exp2(_apply_mask(score * outer - row_lse[None, :], walk, key, first + b * 64))
                dp = wgmma_wait(0, deps=[dp_made])
                row_delta = row_of(numbers.index(2 * s + 1), 64)
                d_score = p * (dp - row_delta[None, :])
                if SOFTCAP:
                    d_score = d_score * (1.0 - score * score)
                p_half = gl.convert_layout(p.to(dtype), P)
                d_half = d_score.to(dtype)
                if b < many:
                    box = (ds_count + b) % DS_STAGES
                    mbarrier_wait(ds_empty.index(box), (((ds_count + b) // DS_STAGES) & 1) ^ 1)
                    ds.index(box * 3 + i).store(d_half)
                    fence_async()
                    mbarrier_arrive(ds_full.index(box))
                ds_half = gl.convert_layout(d_half, P)
                dv = wgmma(p_half, dout_tile, dv, use_acc=True, is_async=True)
                dk = wgmma(ds_half, q_tile, dk, use_acc=True, is_async=True)
                dk, dv, p_half, ds_half = wgmma_wait(0, deps=[dk, dv, p_half, ds_half])
                mbarrier_arrive(q_empty.index(s))
                if block == many + 1:  # for the blocks behind the run's last one
                    if i > 0:
                        mbarrier_arrive(q_empty.index(s))
                    if i > 1:
                        mbarrier_arrive(q_empty.index(s))
            mbarrier_arrive(k_empty.index((count + block) % walk.STAGES))
            v_room = v.index((count + block) % V_STAGES)
            if (block > 0) & (block <= many):
                # dq of the box of queries before the last one, of whose three blocks of keys this is the middle one
                job = ds_count + block - 1
                box = job % DS_STAGES
                mbarrier_wait(ds_full.index(box), (job // DS_STAGES) & 1)
                dq = gl.zeros([64, D], gl.float32, DKV)
                for e in gl.static_range(3):
                    k_met = box_of(k, k_full, count + block + 1 - e, walk.STAGES, D)
                    dq = wgmma(ds.index(box * 3 + e).permute((1, 0)), k_met, dq, use_acc=e > 0, is_async=True)
                if block > 1:
                    _leave(dv, dv_desc, v_room, batch, head, key)
                dq = wgmma_wait(0, deps=[dq])
                if block == many:
                    mbarrier_arrive(k_empty.index((count + block) % walk.STAGES))
                    mbarrier_arrive(k_empty.index((count + block + 1) % walk.STAGES))
                _leave(dq * factor, dq_desc, dq_tiles.index((box * 3 * 64 + D - 64) // D), batch, head,
                       first + (block - 1) * 64)  # fmt: skip
                if block > 1:
                    _leave(dk * factor, dk_desc, k.index((count + block - 1) % walk.STAGES), batch, head, key)
            elif block > 1:
                _leave(dv, dv_desc, v_room, batch, head, key)
                tma_store_wait(0)
                _leave(dk * factor, dk_desc, v_room, batch, head, key)
            if not LATE or block + walk.CONSUMERS > many + 1:
                _give_back(block, many, count, ds_count, ds_empty, k_empty, v_empty, walk.STAGES, V_STAGES,
                           DS_STAGES)  # fmt: skip
        count += many + 2
        ds_count += many
        number = queue.next_tile(turn, tiles, walk.DYNAMIC)
        turn += 1
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "run", "q_begin", "size", "row_size",
        "plane",
    ]
)  # fmt: skip
def attention_window_vjp_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dk_desc, dv_desc, rows_ptr, counter,
    tokens, keys, heads, blocks, rows, section, left, right, run, q_begin, size, row_size, plane,
    inner, outer, factor,
    DYNAMIC: gl.constexpr, D: gl.constexpr, Q_STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Runs of `run` blocks of 64 keys of one head, whose keys and queries make `size` blocks and `blocks` runs. keys +
    right is at most tokens, left + right at most 128. rows_ptr: lse in units of log 2 and, `plane` numbers behind it,
    delta of the queries from q_begin on; row_size numbers a head. factor: d score / d (q . k) but for tanh, and outer:
    the scores' to units of log 2. Q_STAGES: boxes of queries with dout in flight. The rest is as of
    `attention_fwd_kernel`."""
    CONSUMERS: gl.constexpr = 2
    # a block of keys is held until the last of its three boxes of queries has its dq
    K_STAGES: gl.constexpr = 6 if D == 64 else 4
    V_STAGES: gl.constexpr = 5 if D == 64 else 3
    DS_STAGES: gl.constexpr = 2
    dtype: gl.constexpr = q_desc.dtype
    one = gl.to_tensor(1)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, one, one, gl.to_tensor(0),
        True, True, False, DYNAMIC, False, 64, 64, D, D, CONSUMERS, K_STAGES, Q_STAGES, 0,
    )  # fmt: skip
    q = smem_tiles(Q_STAGES, q_desc)
    dout = smem_tiles(Q_STAGES, q_desc)
    k = smem_tiles(K_STAGES, k_desc)
    v = smem_tiles(V_STAGES, k_desc)
    ds = gl.allocate_shared_memory(dtype, [3 * DS_STAGES, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    numbers = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue = tile_queue(CONSUMERS, 1)
    # of q: two boxes, and 128 threads for the row of numbers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = mbarriers(
        (Q_STAGES, 130), (Q_STAGES, 3), (K_STAGES, 1), (K_STAGES, 2), (V_STAGES, 1), (V_STAGES, 1), (DS_STAGES, 3),
        (DS_STAGES, 1),
    )  # fmt: skip
    fence_async()
    parts = (queue, q, dout, numbers, k, v, ds, q_full, q_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty)
    sizes = (walk, run, size)
    gl.warp_specialize(
        [
            (_produce, (parts, sizes, q_begin, q_desc, dout_desc, k_desc, v_desc, rows_ptr, row_size, plane,
                        counter, V_STAGES)),
            (_consume, (0, parts, sizes, dq_desc, dk_desc, dv_desc, inner, outer, factor, V_STAGES, DS_STAGES,
                        SOFTCAP)),
            (_consume, (1, parts, sizes, dq_desc, dk_desc, dv_desc, inner, outer, factor, V_STAGES, DS_STAGES,
                        SOFTCAP)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
