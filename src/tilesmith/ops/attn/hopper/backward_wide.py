"""Device kernel of attention's dk and dv on Hopper for head dims above 128, in Gluon.

A CTA owns 64 keys at a time and walks the queries that see them, 64 at a time, of every head of its group.
Registers hold either dk or dv, so one consumer makes the scores, p and dv, the other one dp, ds and dk; p goes to the
other one through shared memory. dq has a kernel of its own (`backward_dq`). Scores live in units of log 2.
"""

from tilesmith.device.gluon.shim import (
    cp_async_row,
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    smem_tiles,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import apply_mask
from tilesmith.ops.attn.hopper.backward_walk import BLOCKS, EDGE, KEYS_AT, KV_HEAD, LIMIT, START, KeyWalk, announce
from tilesmith.ops.attn.hopper.softmax import tanh
from tilesmith.ops.attn.hopper.tile_offset import at, corner
from tilesmith.ops.attn.hopper.walk import next_tile, tile_queue


@gluon.jit
def _load_pair(k_desc, v_desc, there, k, v, full, empty, turn):
    """A tile's keys and values."""
    mbarrier_wait(empty.index(0), (turn & 1) ^ 1)
    tma_load(k_desc, there, full.index(0), k)
    mbarrier_wait(empty.index(1), (turn & 1) ^ 1)
    tma_load(v_desc, there, full.index(1), v)


@gluon.jit
def _produce(parts, whole, q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, counter, table):
    queue, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 64, LANES)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.k_blocks * whole.rows
    while number < tiles:
        start, kv_head, k_place, q_place, place, walk = whole.tile(number, table)
        first, blocks = walk.span(start)
        head = kv_head * walk.GROUP
        place += first
        announce(queue, turn, walk, start, k_place, kv_head, first, blocks, walk.rises(number))
        queue.producer_commit(turn)
        k_corner = corner(k_place, kv_head, start, walk.keys, walk.PACKED)
        if walk.PACKED and blocks == 0:
            _load_pair(k_desc, v_desc, k_corner, k, v, kv_full, kv_empty, turn)
        for member in range(walk.GROUP):
            for i in range(blocks):
                block = blocks - 1 - i
                there = corner(q_place, head + member, walk.q_begin + (first + block) * 64, walk.tokens, walk.PACKED)
                s = count % walk.STAGES
                mbarrier_wait(q_empty.index(s), ((count // walk.STAGES) & 1) ^ 1)
                tma_load(q_desc, there, q_full.index(s), q.index(s))
                cp_async_row(lse_ptr + (place + block) * 64 + lane, q_full.index(s), lse.index(s))
                if member + i == 0:
                    _load_pair(k_desc, v_desc, k_corner, k, v, kv_full, kv_empty, turn)
                tma_load(dout_desc, there, dout_full.index(s), dout.index(s))
                cp_async_row(delta_ptr + (place + block) * 64 + lane, dout_full.index(s), delta.index(s))
                count += 1
            place += whole.q_blocks
        if whole.DYNAMIC:
            number = next_tile(counter, tiles)
        else:
            number = tiles
        turn += 1
    queue.producer_acquire(turn)
    queue.write(turn, START, -1)
    queue.producer_commit(turn)


@gluon.jit
def _values(
    parts, swap, window, dv_desc, inner, outer,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Scores, p and dv."""
    queue, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    p_box, p_full, p_empty = swap
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    k_tile = k.reshape([64, D])
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        # key c and query i of a block see each other where i + edge - window <= c <= i + edge and c < limit
        last_edge = queue.read(turn, EDGE)
        limit = queue.read(turn, LIMIT)
        dv = gl.zeros([64, D], gl.float32, DKV)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier_wait(kv_full.index(0), turn & 1)
        for _ in range(GROUP):
            for i in range(blocks):
                s = count % STAGES
                phase = (count // STAGES) & 1
                q_tile = q.index(s).reshape([64, D])
                dout_tile = dout.index(s).reshape([64, D])
                mbarrier_wait(q_full.index(s), phase)
                s_made = wgmma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                row_lse = lse.index(s).load(gl.SliceLayout(0, SCORES))
                score = wgmma_wait(0, deps=[s_made])
                if SOFTCAP:
                    score = tanh(score * inner)
                p = gl.exp2(score * outer - row_lse[None, :])
                if LEFT or RIGHT or TAIL:
                    p = apply_mask(p, last_edge - i * 64, window, limit, LEFT, RIGHT, TAIL)
                p_operand = gl.convert_layout(p.to(dtype), P)
                if SOFTCAP:
                    p = p * (1.0 - score * score)
                box = count & 1
                mbarrier_wait(p_empty.index(box), ((count >> 1) & 1) ^ 1)
                p_box.index(box).store(p.to(dtype))
                mbarrier_arrive(p_full.index(box))
                mbarrier_wait(dout_full.index(s), phase)
                dv_made = wgmma(p_operand, dout_tile, dv, use_acc=True, is_async=True)
                dv, p_operand = wgmma_wait(0, deps=[dv_made, p_operand])
                mbarrier_arrive(q_empty.index(s))
                count += 1
        place = queue.read(turn, KEYS_AT)
        kv_head = queue.read(turn, KV_HEAD)
        start = queue.read(turn, START)
        queue.consumer_release(turn)
        k_tile.store(dv.to(dtype))  # the keys are read
        fence_async()
        tma_store(dv_desc, at(place, kv_head, start, PACKED), k)
        tma_store_wait(0)
        mbarrier_arrive(kv_empty.index(0))
        turn += 1
        queue.consumer_wait(turn)


@gluon.jit
def _keys(
    parts, swap, dk_desc, scale, D: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr
):
    """dp, ds and dk."""
    queue, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    p_box, p_full, p_empty = swap
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    v_tile = v.reshape([64, D])
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        dk = gl.zeros([64, D], gl.float32, DKV)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier_wait(kv_full.index(1), turn & 1)
        for _ in range(GROUP):
            for i in range(blocks):
                s = count % STAGES
                phase = (count // STAGES) & 1
                q_tile = q.index(s).reshape([64, D])
                dout_tile = dout.index(s).reshape([64, D])
                mbarrier_wait(dout_full.index(s), phase)
                dp_made = wgmma(v_tile, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                row_delta = delta.index(s).load(gl.SliceLayout(0, SCORES))
                dp = wgmma_wait(0, deps=[dp_made])
                box = count & 1
                mbarrier_wait(p_full.index(box), (count >> 1) & 1)
                p = p_box.index(box).load(SCORES)
                mbarrier_arrive(p_empty.index(box))
                ds_operand = gl.convert_layout((p.to(gl.float32) * (dp - row_delta[None, :])).to(dtype), P)
                mbarrier_wait(q_full.index(s), phase)
                dk_made = wgmma(ds_operand, q_tile, dk, use_acc=True, is_async=True)
                dk, ds_operand = wgmma_wait(0, deps=[dk_made, ds_operand])
                mbarrier_arrive(q_empty.index(s))
                count += 1
        place = queue.read(turn, KEYS_AT)
        kv_head = queue.read(turn, KV_HEAD)
        start = queue.read(turn, START)
        queue.consumer_release(turn)
        v_tile.store((dk * scale).to(dtype))  # the values are read
        fence_async()
        tma_store(dk_desc, at(place, kv_head, start, PACKED), v)
        tma_store_wait(0)
        mbarrier_arrive(kv_empty.index(1))
        turn += 1
        queue.consumer_wait(turn)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "kv_heads", "q_begin", "k_begin", "q_blocks", "k_blocks", "rows", "section", "left", "right",
    ]
)  # fmt: skip
def attention_dkv_wide_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, counter, table,
    tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, inner, outer, scale,
    GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, DYNAMIC: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 keys of one kv head; the arguments are those of `attention_dkv_kernel`."""
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = table is not None
    if PACKED:
        k_blocks = gl.load(table)
    walk = KeyWalk(
        tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, gl.to_tensor(1),
        gl.to_tensor(0), GROUP, LEFT, RIGHT, DYNAMIC, PACKED, False, False, 64, 64, D, STAGES, 0,
    )  # fmt: skip
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = smem_tiles(STAGES, q_desc)
    dout = smem_tiles(STAGES, q_desc)
    k = smem_tiles(1, k_desc).index(0)
    v = smem_tiles(1, k_desc).index(0)
    p_box = gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    queue = tile_queue(2, 6)
    kv_full = mbarriers(2, 1)
    kv_empty = mbarriers(2, 1)
    q_full = mbarriers(STAGES, 129)  # the tile, and 128 threads for the row of numbers
    q_empty = mbarriers(STAGES, 2)
    dout_full = mbarriers(STAGES, 129)
    swap = (p_box, mbarriers(2, 1), mbarriers(2, 1))
    fence_async()
    parts = (queue, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full)
    window = left + right if RIGHT else left
    gl.warp_specialize(
        [
            (_produce, (parts, walk, q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, counter, table)),
            (_values, (parts, swap, window, dv_desc, inner, outer,
                       LEFT, RIGHT, TAIL, D, GROUP, STAGES, SOFTCAP, PACKED)),
            (_keys, (parts, swap, dk_desc, scale, D, GROUP, STAGES, PACKED)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
