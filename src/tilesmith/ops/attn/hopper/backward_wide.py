"""Device kernel of attention's dk and dv on Hopper for head dims above 128, and for those of q and v that differ, in
Gluon.

A CTA owns 64 keys at a time and walks the queries that see them, 64 at a time, of every head of its group.
Registers hold either dk or dv, so one consumer makes the scores, p and dv, the other one dp, ds and dk; p goes to the
other one through shared memory. dq has a kernel of its own (`backward_dq`). Scores live in units of log 2.
"""

from tilesmith.device.gluon.shim import (
    cp_async_row,
    fence_async,
    gl,
    gluon,
    grid_dependency_wait,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    smem_tiles,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import apply_mask
from tilesmith.ops.attn.hopper.backward_overlap import overlapped_keys, overlapped_values
from tilesmith.ops.attn.hopper.backward_walk import (
    BLOCKS,
    EDGE,
    KEYS_AT,
    KV_HEAD,
    LIMIT,
    START,
    KeyWalk,
    announce,
    first_head,
    kv_head_of,
    members_of,
)
from tilesmith.ops.attn.hopper.columns import load_tile, rest_room, room_for, rows_product, write_tile
from tilesmith.ops.attn.hopper.softmax import tanh
from tilesmith.ops.attn.hopper.tile_offset import corner
from tilesmith.ops.attn.hopper.walk import next_tile, tile_queue


@gluon.jit
def _load_pair(descs, there, tiles, full, empty, turn, REST: gl.constexpr, V_REST: gl.constexpr, PACKED: gl.constexpr):
    """A tile's keys and values."""
    k_desc, k_rest_desc, v_desc, v_rest_desc = descs
    k, k_rest, v, v_rest = tiles
    mbarrier_wait(empty.index(0), (turn & 1) ^ 1)
    load_tile(k_desc, k_rest_desc, there, full.index(0), k, k_rest, REST, PACKED)
    mbarrier_wait(empty.index(1), (turn & 1) ^ 1)
    load_tile(v_desc, v_rest_desc, there, full.index(1), v, v_rest, V_REST, PACKED)


@gluon.jit
def _produce(parts, whole, streamed, pair, lse_ptr, delta_ptr, counter, table, REST: gl.constexpr,
             V_REST: gl.constexpr, CHAINED: gl.constexpr):  # fmt: skip
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    q_desc, q_rest_desc, dout_desc, dout_rest_desc = streamed
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 64, LANES)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.k_blocks * whole.rows
    if CHAINED:
        grid_dependency_wait()
        launch_dependents()  # not before: the kernel behind reads what the one before has written
    while number < tiles:
        start, kv_head, k_place, q_place, place, walk = whole.tile(number, table)
        first, blocks = walk.span(start)
        head = first_head(kv_head, walk.GROUP, walk.GROUP_PARTS, walk.GROUP_SHORT)
        place += first
        announce(queue, turn, walk, start, k_place, kv_head, first, blocks, walk.rises(number))
        queue.producer_commit(turn)
        k_corner = corner(k_place, kv_head_of(kv_head, walk.GROUP_PARTS), start, walk.keys, walk.PACKED)
        if walk.PACKED and blocks == 0:
            _load_pair(pair, k_corner, kept, kv_full, kv_empty, turn, REST, V_REST, walk.PACKED)
        for member in range(members_of(kv_head, walk.GROUP, walk.GROUP_PARTS, walk.GROUP_SHORT)):
            for i in range(blocks):
                block = blocks - 1 - i
                there = corner(q_place, head + member, walk.q_begin + (first + block) * 64, walk.tokens, walk.PACKED)
                s = count % walk.STAGES
                mbarrier_wait(q_empty.index(s), ((count // walk.STAGES) & 1) ^ 1)
                load_tile(q_desc, q_rest_desc, there, q_full.index(s), q.index(s), q_rest.index(s), REST, walk.PACKED)
                cp_async_row(lse_ptr + (place + block) * 64 + lane, q_full.index(s), lse.index(s))
                if member + i == 0:
                    _load_pair(pair, k_corner, kept, kv_full, kv_empty, turn, REST, V_REST, walk.PACKED)
                load_tile(
                    dout_desc, dout_rest_desc, there, dout_full.index(s), dout.index(s), dout_rest.index(s), V_REST,
                    walk.PACKED,
                )  # fmt: skip
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
    parts, swap, window, dv_desc, dv_rest_desc, room, rest_room, inner, outer,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, DV: gl.constexpr,
    V_REST: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
    to, DIM: gl.constexpr, GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr,
):  # fmt: skip
    """Scores, p and dv. to, DIM: as of `write_tile`."""
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    k, k_rest, v, v_rest = kept
    p_box, p_full, p_empty = swap
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DVS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DVS, 2)
    k_tile = k.reshape([64, D])
    k_tile_rest = k_tile
    if REST > 0:
        k_tile_rest = k_rest.reshape([64, REST])
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        # key c and query i of a block see each other where i + edge - window <= c <= i + edge and c < limit
        last_edge = queue.read(turn, EDGE)
        limit = queue.read(turn, LIMIT)
        dv = gl.zeros([64, DV], gl.float32, DVS)
        dv_rest = gl.to_tensor(0)
        if V_REST > 0:
            DV_RESTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_REST, 16])
            dv_rest = gl.zeros([64, V_REST], gl.float32, DV_RESTS)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier_wait(kv_full.index(0), turn & 1)
        for _ in range(members_of(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT)):
            for i in range(blocks):
                s = count % STAGES
                phase = (count // STAGES) & 1
                q_tile = q.index(s).reshape([64, D])
                q_tile_rest = q_tile
                if REST > 0:
                    q_tile_rest = q_rest.index(s).reshape([64, REST])
                dout_tile = dout.index(s).reshape([64, DV])
                mbarrier_wait(q_full.index(s), phase)
                s_made = rows_product(k_tile, k_tile_rest, q_tile, q_tile_rest, zero, REST)
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
                if V_REST > 0:
                    rest_operand = gl.convert_layout(p_operand, gl.DotOperandLayout(0, DV_RESTS, 2))
                    rest_tile = dout_rest.index(s).reshape([64, V_REST])
                    rest_made = wgmma(rest_operand, rest_tile, dv_rest, use_acc=True, is_async=True)
                    dv, dv_rest, p_operand, rest_operand = wgmma_wait(
                        0, deps=[dv_made, rest_made, p_operand, rest_operand]
                    )
                else:
                    dv, p_operand = wgmma_wait(0, deps=[dv_made, p_operand])
                mbarrier_arrive(q_empty.index(s))
                count += 1
        place = queue.read(turn, KEYS_AT)
        kv_head = queue.read(turn, KV_HEAD)
        start = queue.read(turn, START)
        queue.consumer_release(turn)
        # the keys are read
        write_tile(dv, dv_rest, dv_desc, dv_rest_desc, room, rest_room, to, place, kv_head, start, V_REST, DIM, dtype,
                   PACKED)  # fmt: skip
        mbarrier_arrive(kv_empty.index(0))
        turn += 1
        queue.consumer_wait(turn)


@gluon.jit
def _keys(
    parts, swap, dk_desc, dk_rest_desc, room, rest_room, scale, D: gl.constexpr, REST: gl.constexpr, DV: gl.constexpr,
    V_REST: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr, to, DIM: gl.constexpr,
    GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr,
):  # fmt: skip
    """dp, ds and dk. to, DIM: as of `write_tile`."""
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    k, k_rest, v, v_rest = kept
    p_box, p_full, p_empty = swap
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DKS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKS, 2)
    v_tile = v.reshape([64, DV])
    v_tile_rest = v_tile
    if V_REST > 0:
        v_tile_rest = v_rest.reshape([64, V_REST])
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        dk = gl.zeros([64, D], gl.float32, DKS)
        dk_rest = gl.to_tensor(0)
        if REST > 0:
            DK_RESTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
            dk_rest = gl.zeros([64, REST], gl.float32, DK_RESTS)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier_wait(kv_full.index(1), turn & 1)
        for _ in range(members_of(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT)):
            for i in range(blocks):
                s = count % STAGES
                phase = (count // STAGES) & 1
                q_tile = q.index(s).reshape([64, D])
                dout_tile = dout.index(s).reshape([64, DV])
                dout_tile_rest = dout_tile
                if V_REST > 0:
                    dout_tile_rest = dout_rest.index(s).reshape([64, V_REST])
                mbarrier_wait(dout_full.index(s), phase)
                dp_made = rows_product(v_tile, v_tile_rest, dout_tile, dout_tile_rest, zero, V_REST)
                row_delta = delta.index(s).load(gl.SliceLayout(0, SCORES))
                dp = wgmma_wait(0, deps=[dp_made])
                box = count & 1
                mbarrier_wait(p_full.index(box), (count >> 1) & 1)
                p = p_box.index(box).load(SCORES)
                mbarrier_arrive(p_empty.index(box))
                ds_operand = gl.convert_layout((p.to(gl.float32) * (dp - row_delta[None, :])).to(dtype), P)
                mbarrier_wait(q_full.index(s), phase)
                dk_made = wgmma(ds_operand, q_tile, dk, use_acc=True, is_async=True)
                if REST > 0:
                    rest_operand = gl.convert_layout(ds_operand, gl.DotOperandLayout(0, DK_RESTS, 2))
                    rest_tile = q_rest.index(s).reshape([64, REST])
                    rest_made = wgmma(rest_operand, rest_tile, dk_rest, use_acc=True, is_async=True)
                    dk, dk_rest, ds_operand, rest_operand = wgmma_wait(
                        0, deps=[dk_made, rest_made, ds_operand, rest_operand]
                    )
                else:
                    dk, ds_operand = wgmma_wait(0, deps=[dk_made, ds_operand])
                mbarrier_arrive(q_empty.index(s))
                count += 1
        place = queue.read(turn, KEYS_AT)
        kv_head = queue.read(turn, KV_HEAD)
        start = queue.read(turn, START)
        queue.consumer_release(turn)
        dk *= scale
        if REST > 0:
            dk_rest *= scale
        # the values are read
        write_tile(dk, dk_rest, dk_desc, dk_rest_desc, room, rest_room, to, place, kv_head, start, REST, DIM, dtype,
                   PACKED)  # fmt: skip
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
    D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, REST: gl.constexpr = 0,
    V_REST: gl.constexpr = 0, GROUP_PARTS: gl.constexpr = 1, OVERLAP: gl.constexpr = False, q_rest_desc=None,
    k_rest_desc=None, v_rest_desc=None, dout_rest_desc=None, dk_rest_desc=None, dv_rest_desc=None, dk_ptr=None,
    dv_ptr=None, dk_strides=None, dv_strides=None, DIM: gl.constexpr = None, VALUE_DIM: gl.constexpr = None,
    CHAINED: gl.constexpr = False, GROUP_SHORT: gl.constexpr = 0,
):  # fmt: skip
    """Tiles of 64 keys of one kv head; the arguments are those of `attention_dkv_kernel`. D, REST: columns of a tile
    of queries and keys, and of its rest (`columns`); DV, V_REST: of values and dout. OVERLAP: the
    consumers are those of `backward_overlap`. DIM, VALUE_DIM: of dk and dv in fp32. CHAINED: the kernel is launched to
    wait for the one before on the device, and the one behind may start when it has."""
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = table is not None
    if PACKED:
        k_blocks = gl.load(table)
    walk = KeyWalk(
        tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, gl.to_tensor(1),
        gl.to_tensor(0), GROUP, LEFT, RIGHT, DYNAMIC, PACKED, False, False, 64, 64, D, STAGES, 0, GROUP_PARTS,
        GROUP_SHORT,
    )  # fmt: skip
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = smem_tiles(STAGES, q_desc)
    dout = smem_tiles(STAGES, dout_desc)
    k = smem_tiles(1, k_desc).index(0)
    v = smem_tiles(1, v_desc).index(0)
    q_rest, dout_rest, k_rest, v_rest = q, dout, k, v
    if REST > 0:
        q_rest = smem_tiles(STAGES, q_rest_desc)
        k_rest = smem_tiles(1, k_rest_desc).index(0)
    if V_REST > 0:
        dout_rest = smem_tiles(STAGES, dout_rest_desc)
        v_rest = smem_tiles(1, v_rest_desc).index(0)
    p_box = gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    # dk and dv are stored from where a consumer's own operand was, if they fit there
    dv_room = room_for(dv_desc, k)
    dv_rest_room = dv_room
    if V_REST > 0:
        dv_rest_room = rest_room(dv_rest_desc, k_rest, REST)
    dk_room = room_for(dk_desc, v)
    dk_rest_room = dk_room
    if REST > 0:
        dk_rest_room = rest_room(dk_rest_desc, v_rest, V_REST)
    queue = tile_queue(2, 6)
    # of q and dout: the tile, and 128 threads for the row of numbers
    kv_full, kv_empty, q_full, q_empty, dout_full, p_full, p_empty = mbarriers(
        (2, 1), (2, 1), (STAGES, 129), (STAGES, 2), (STAGES, 129), (2, 1), (2, 1)
    )
    swap = (p_box, p_full, p_empty)
    fence_async()
    kept = (k, k_rest, v, v_rest)
    parts = (queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full)
    streamed = (q_desc, q_rest_desc, dout_desc, dout_rest_desc)
    pair = (k_desc, k_rest_desc, v_desc, v_rest_desc)
    window = left + right if RIGHT else left
    dk_to, dv_to = (None, None, None), (None, None, None)
    if dk_ptr is not None:
        dk_to, dv_to = (dk_ptr, dk_strides, keys), (dv_ptr, dv_strides, keys)
    if OVERLAP:
        gl.static_assert(STAGES > 1)  # a block's queries are given back when the next ones are there
    gl.warp_specialize(
        [
            (_produce, (parts, walk, streamed, pair, lse_ptr, delta_ptr, counter, table, REST, V_REST, CHAINED)),
            (overlapped_values if OVERLAP else _values,
             (parts, swap, window, dv_desc, dv_rest_desc, dv_room, dv_rest_room, inner, outer, LEFT, RIGHT, TAIL, D,
              REST, DV, V_REST, GROUP, STAGES, SOFTCAP, PACKED, dv_to, VALUE_DIM, GROUP_PARTS, GROUP_SHORT)),
            (overlapped_keys if OVERLAP else _keys,
             (parts, swap, dk_desc, dk_rest_desc, dk_room, dk_rest_room, scale, D, REST, DV, V_REST, GROUP, STAGES,
              PACKED, dk_to, DIM, GROUP_PARTS, GROUP_SHORT)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
