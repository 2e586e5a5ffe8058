"""Device kernels of attention's gradients on Hopper, in Gluon: dk and dv, and what dq is the sum of.

A CTA of the main kernel owns 128 keys at a time and walks the queries that see them, 64 or 128 at a time, of every
head of its group: a warp loads tiles, two consumers have 64 keys each. Scores are transposed, so that p and ds feed dv
and dk from registers; ds also goes through shared memory for dq, which the consumers split by columns or queries, at
head dim 128 when the next block's scores are made (`late_block`), and two more warps add to a workspace by bulk
reductions: in any order, the first to come by a plain store, so that dq may differ in its last bits from run to run, or
ordered, tile after tile of keys. Scores live in units of log 2.

Ordered, the last keys come first and each tile starts where they do, at its diagonal under a causal mask. There a tile
is the first to add; the next tile gets there one tile's worth of blocks later, and so finds its turn come.
Without a mask each tile may start where its diagonal would be, and come round to the first queries (`around`).

The kernels of one backward are launched so that each may start while the one before ends.
"""

from tilesmith.device.gluon.shim import (
    acquire_or_wait,
    acquired,
    cp_async_row,
    exp2,
    fence_async,
    gl,
    gluon,
    grid_dependency_wait,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    reinterpret,
    smem_tiles,
    store_release,
    tma_add,
    tma_store,
    tma_store_complete,
    tma_store_wait,
    wait_acquire,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import (
    HALVES,
    KEYS_READ,
    PARKED,
    READ,
    VALUES_READ,
    apply_mask,
    last_dq,
    late_block,
    park,
    read_barrier,
    row_of,
)
from tilesmith.ops.attn.hopper.backward_rest import hold_keys, last_rest_dq, rest_block
from tilesmith.ops.attn.hopper.backward_walk import (
    BLOCKS,
    EDGE,
    ENTRY,
    KEYS_AT,
    KV_HEAD,
    LIMIT,
    MET,
    MET_END,
    PLACE,
    QUERIES_END,
    RISES,
    SLOT,
    START,
    STEP,
    STORED,
    KeyWalk,
    announce,
    around,
    first_head,
    kv_head_of,
    listed,
    load_pair,
    members_of,
    ring_turn,
    stream_k_run,
    woven,
    woven_step,
)
from tilesmith.ops.attn.hopper.backward_writes import leave_to_stream_k, through_ds, write_gradients, write_rests
from tilesmith.ops.attn.hopper.columns import load_tile
from tilesmith.ops.attn.hopper.dropout import dropped_queries, kept_queries, load_dropout
from tilesmith.ops.attn.hopper.softmax import tanh
from tilesmith.ops.attn.hopper.tile_offset import corner, inside
from tilesmith.ops.attn.hopper.walk import next_tile, tile_queue


@gluon.jit
def _add(BOX: gl.constexpr, parts, dq_desc, parking, turns_ptr, lists, indices, q_blocks, GROUP: gl.constexpr,
         ORDERED: gl.constexpr, k_blocks, STREAM_K: gl.constexpr, WOVEN: gl.constexpr,
         ROWS: gl.constexpr, LIST_Q: gl.constexpr, BQ: gl.constexpr, RING: gl.constexpr, rows,
         REST: gl.constexpr, dq_rest_desc, GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr):  # fmt: skip
    """Add what the consumers park in a box, every other block's dq, to the block's part of dq: once there is what the
    first to come has stored (STORED stands at turns_ptr then), or ORDERED what the tile of keys behind this one adds
    (its first key + 1 stands there; where tiles come from the first keys on, how many keys from its first to the last
    one's that meets the block, + 1; RING: how many keys the tiles have that are to come, + 1). A box has a warp of its
    own: a block's turn, its addition and the word to the next tile take about as long as the products of a block, and
    nobody waits for them as long as two."""
    grid_dependency_wait()
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        start = queue.read(turn, START)
        blocks = queue.read(turn, BLOCKS)
        place = queue.read(turn, PLACE)
        met = queue.read(turn, MET)
        met_end = queue.read(turn, MET_END)
        members = members_of(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT)
        queue.consumer_release(turn)
        for member in range(1 if STREAM_K or WOVEN else members):
            entry = met + member * met_end
            if LIST_Q > 0:
                blocks = gl.load(lists + entry + 2)
            for i in range(blocks * members if WOVEN else blocks):
                if (count & 1) == BOX:
                    if WOVEN:
                        block, head = woven(i, blocks, met > 0, members, GROUP, GROUP_SHORT)
                        block += head * q_blocks
                    else:
                        block = i if STREAM_K else listed(i, blocks, entry, lists, indices, ORDERED, LIST_Q, BQ)
                    left, follows = start, (block >= met) & (block < met_end)
                    if RING:
                        block, again = around(i, start // 128, k_blocks, blocks)
                        left, follows = ring_turn(block, again, start // 128, k_blocks, blocks)
                        left *= 128
                        block += gl.where(again, rows * GROUP * q_blocks, 0)
                    here = turns_ptr + place + block
                    if ORDERED:
                        if follows:
                            wait_acquire(here, left + 129)
                    else:
                        follows = acquired(here, STORED)
                    named_barrier("sync", PARKED + BOX, 288)
                    if not ORDERED:
                        if not follows:  # asked only now: who is the first must not keep others waiting
                            follows = acquire_or_wait(here, STORED)
                    for c in gl.static_range(2):
                        made_desc = dq_rest_desc if REST > 0 and c == 1 else dq_desc
                        if REST > 0:
                            parked = parking[c].index(BOX)
                        else:
                            parked = reinterpret(
                                parking.index(BOX * 2 + c), gl.float32, made_desc.block_type.shape, made_desc.layout
                            )
                        there = [(place + block) * (ROWS + REST // 4 if REST > 0 else 2 * ROWS) + c * ROWS, 0]
                        if follows:
                            tma_add(made_desc, there, parked)
                        else:
                            tma_store(made_desc, there, parked)
                    tma_store_wait(0)
                    mbarrier_arrive(dq_empty.index(BOX))
                    if ORDERED:
                        tma_store_complete()
                        store_release(here, left + 1)
                    elif not follows:
                        tma_store_complete()
                        store_release(here, STORED)
                count += 1
            place += q_blocks
        turn += 1
        queue.consumer_wait(turn)


@gluon.jit
def _next_tile(counter, tiles, ORDERED: gl.constexpr):
    """The next tile of a CTA; ORDERED its first one, too, not that of its number: a tile waits for those before it,
    so none may be kept for a CTA that waits for a SM, where others that hold them may wait as well."""
    if ORDERED:
        ctas = gl.num_programs(0)
        number = next_tile(counter, tiles + ctas) - ctas
    else:
        number = next_tile(counter, tiles)
    return number


@gluon.jit
def _load_kept(k_desc, v_desc, there, k, v, kv_full, turn, LATE_DQ: gl.constexpr, rests, REST: gl.constexpr,
               PACKED: gl.constexpr):  # fmt: skip
    """Load a tile's keys and values, when those before are read."""
    if REST > 0:
        k_rest, v_rest, kv_empty, k_rest_desc, v_rest_desc = rests[2], rests[3], rests[4], rests[7], rests[8]
        mbarrier_wait(kv_empty.index(0), (turn & 1) ^ 1)
        load_tile(k_desc, k_rest_desc, there, kv_full.index(0), k.index(0), k_rest.index(0), REST, PACKED)
        load_tile(v_desc, v_rest_desc, there, kv_full.index(1), v.index(0), v_rest.index(0), REST, PACKED)
    else:
        load_pair(k_desc, v_desc, there, k.index(0), v.index(0), kv_full, turn, LATE_DQ)


@gluon.jit
def _produce(parts, whole, q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, counter, table, lists, indices,
             whole_tiles, stream_k_ctas, STREAM_K: gl.constexpr, LATE_DQ: gl.constexpr, DROPS: gl.constexpr,
             RING: gl.constexpr, rests, REST: gl.constexpr):  # fmt: skip
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    q_rest, dout_rest, k_rest, v_rest, kv_empty, q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc = rests
    BQ: gl.constexpr = whole.BQ
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, BQ, LANES)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.k_blocks * whole.rows
    numbers = tiles
    second = gl.to_tensor(0)
    if STREAM_K:
        numbers = whole_tiles + stream_k_ctas
    grid_dependency_wait()
    launch_dependents()  # not before: the kernel behind reads what the one before has set to 0
    if whole.ORDERED and whole.DYNAMIC:
        number = _next_tile(counter, numbers, True)
    while number < numbers:
        tile = number
        if STREAM_K:
            first_step, steps = number * 0, whole.q_blocks * whole.GROUP
            slot, more = number * 0 - 1, number < 0
            if number >= whole_tiles:
                run = number - whole_tiles
                tile, first_step, steps, more = stream_k_run(run, second, whole_tiles, stream_k_ctas, tiles, steps)
                slot = 2 * run + second
        start, kv_head, k_place, q_place, place, walk = whole.tile(tile, table)
        first, blocks = walk.span(start)
        met, met_end = first, first
        if walk.ORDERED:
            met, met_end = walk.ahead(start)
        if STREAM_K:
            first, blocks = first_step, steps
        head = first_head(kv_head, walk.GROUP, walk.GROUP_PARTS, walk.GROUP_SHORT)
        members = members_of(kv_head, walk.GROUP, walk.GROUP_PARTS, walk.GROUP_SHORT)
        if walk.LIST_Q > 0:
            first, blocks = walk.q_begin, walk.q_begin + 1  # its edge is that of the first query
            met, met_end = walk.entry(q_place, head, start)
        place += first
        rises = walk.rises(number)
        announce(queue, turn, walk, start, k_place, kv_head, first, blocks, rises)
        queue.write(turn, PLACE, place)
        queue.write(turn, MET, gl.where(rises, 1, 0) if walk.WOVEN else met - first)
        queue.write(turn, MET_END, met_end - first)
        if STREAM_K:
            queue.write(turn, SLOT, slot)
        if DROPS and walk.PACKED:
            queue.write(turn, QUERIES_END, q_place)
        queue.producer_commit(turn)
        k_corner = corner(k_place, kv_head_of(kv_head, walk.GROUP_PARTS), start, walk.keys, walk.PACKED)
        next_number = numbers
        before_tile = count
        if walk.PACKED and blocks == 0:
            _load_kept(k_desc, v_desc, k_corner, k, v, kv_full, turn, LATE_DQ, rests, REST, walk.PACKED)
            if walk.DYNAMIC:
                next_number = _next_tile(counter, numbers, walk.ORDERED)
        if walk.LIST_Q > 0:  # any list may be empty
            _load_kept(k_desc, v_desc, k_corner, k, v, kv_full, turn, LATE_DQ, rests, REST, walk.PACKED)
            if walk.DYNAMIC:
                next_number = gl.to_tensor(-1)
        for member in range(1 if STREAM_K or walk.WOVEN else members):
            entry = met + member * met_end
            if walk.LIST_Q > 0:
                blocks = gl.load(lists + entry + 2)
            all_blocks = blocks * members if walk.WOVEN else blocks
            for i in range(all_blocks):
                if walk.WOVEN:
                    block, member = woven(i, blocks, rises, members, walk.GROUP, walk.GROUP_SHORT)
                else:
                    block = i if STREAM_K else listed(i, blocks, entry, lists, indices, walk.ORDERED, walk.LIST_Q, BQ)
                    if RING:
                        block, _ = around(i, start // walk.BK, walk.k_blocks, blocks)
                here = head + member, first + block
                if STREAM_K:
                    here = head + (first + i) // walk.q_blocks, (first + i) % walk.q_blocks
                there = corner(q_place, here[0], walk.q_begin + here[1] * BQ, walk.tokens, walk.PACKED)
                s = count % walk.STAGES
                row = place + block + member * whole.q_blocks
                if count >= walk.STAGES:
                    named_barrier("sync", read_barrier(s, REST), 288)
                load_tile(q_desc, q_rest_desc, there, q_full.index(s), q.index(s), q_rest.index(s), REST, walk.PACKED)
                cp_async_row(lse_ptr + row * BQ + lane, q_full.index(s), lse.index(s))
                load_tile(
                    dout_desc, dout_rest_desc, there, dout_full.index(s), dout.index(s), dout_rest.index(s), REST,
                    walk.PACKED,
                )  # fmt: skip
                cp_async_row(delta_ptr + row * BQ + lane, dout_full.index(s), delta.index(s))
                if walk.LIST_Q == 0 and count == before_tile:
                    _load_kept(k_desc, v_desc, k_corner, k, v, kv_full, turn, LATE_DQ, rests, REST, walk.PACKED)
                if walk.DYNAMIC:
                    # neither so late that it is waited for, nor so early that another CTA would be free before
                    if (STREAM_K or walk.WOVEN or member == members - 1) & (i == gl.maximum(all_blocks - 2, 0)):
                        if STREAM_K:
                            if more == 0:
                                next_number = _next_tile(counter, numbers, walk.ORDERED)
                        else:
                            next_number = _next_tile(counter, numbers, walk.ORDERED)
                count += 1
        if walk.LIST_Q > 0 and walk.DYNAMIC:
            if next_number < 0:
                next_number = _next_tile(counter, numbers, walk.ORDERED)
        if STREAM_K:
            next_number = gl.where(more, number, next_number)
            second = gl.where(more, 1, 0)
        number = next_number
        turn += 1
    queue.producer_acquire(turn)
    queue.write(turn, START, -1)
    queue.producer_commit(turn)


@gluon.jit
def _block(
    C: gl.constexpr, parts, count, dk, dv, first, last, edge, window, limit, inner, outer, ds, dq_desc, parking,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, BQ: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, drop=None,
):  # fmt: skip
    """What a block of queries adds to dk and dv, and its dq. Key c and query i of it see each other where i + edge -
    window <= c <= i + edge and c < limit; MASKED is False where all do. first, last: of the tile, whose values and keys
    are given back as soon as they are read."""
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    COLS: gl.constexpr = D // 2 if BQ == 64 else D
    THROUGH_DS: gl.constexpr = through_ds(BQ, D, LEFT, RIGHT)
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zero = gl.zeros([64, BQ], gl.float32, SCORES)
    zero_dq = gl.zeros([64, COLS], gl.float32, DQ)
    s = count % STAGES
    phase = (count // STAGES) & 1
    # 0, but not for the compiler: it would keep the addresses of all parts of these tiles in registers
    none = count >> 30
    k_rows = k.index(none).reshape([128, D]).slice(C * 64, 64, dim=0)
    v_rows = v.index(none).reshape([128, D]).slice(C * 64, 64, dim=0)
    # of 64 queries' dq a consumer makes half of the columns, of 128 queries' half of the rows
    k_cols = k.index(none).reshape([128, D])
    if BQ == 64:
        k_cols = k_cols.slice(C * COLS, COLS, dim=1)
    q_tile = q.index(s).reshape([BQ, D])
    dout_tile = dout.index(s).reshape([BQ, D])
    mbarrier_wait(q_full.index(s), phase)
    s_made = wgmma(k_rows, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier_wait(dout_full.index(s), phase)
    dp_made = wgmma(v_rows, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    row_lse = row_of(lse.index(s), BQ)
    if drop is not None:
        bits = kept_queries(drop, BQ)
    score = wgmma_wait(1, deps=[s_made])
    if SOFTCAP:
        score = tanh(score * inner)
    p = score * outer - row_lse[None, :]
    p = exp2(p) if BQ == 128 else gl.exp2(p)
    if MASKED:
        p = apply_mask(p, edge, window, limit, LEFT, RIGHT, TAIL)
    dropped = p
    if drop is not None:
        dropped = dropped_queries(p, bits)
    p_operand = gl.convert_layout(dropped.to(dtype), P)
    # of 128 queries the registers have no room for these numbers before (spills; 4k causal 474 and 506 TFLOP/s)
    if BQ == 64:
        row_delta = row_of(delta.index(s), BQ)
    dp = wgmma_wait(0, deps=[dp_made])
    if BQ == 128:
        row_delta = row_of(delta.index(s), BQ)
    if last:
        named_barrier("arrive", VALUES_READ, 288)
    if drop is not None:
        d_score = dropped * dp - p * row_delta[None, :]
    else:
        d_score = p * (dp - row_delta[None, :])
    if SOFTCAP:
        d_score = d_score * (1.0 - score * score)
    d_score = d_score.to(dtype)
    if THROUGH_DS:
        if first:  # dk and dv of the tile before, which are written from there
            tma_store_wait(0)
    ds_tile = ds.index(count & 1)
    ds_operand = gl.convert_layout(d_score, P)
    # keys side by side: stored the other way round, it spills 60 bytes at head dim 64
    ds_tile.slice(C * 64, 64, dim=1).permute((1, 0)).store(d_score)
    if BQ == 128:
        ds_tile = ds_tile.slice(C * 64, 64, dim=0)
    dv_made = wgmma(p_operand, dout_tile, dv, use_acc=True, is_async=True)
    fence_async()
    if first:
        if not THROUGH_DS:  # these are written from where dq will be left
            tma_store_wait(0)
    else:
        named_barrier("arrive", PARKED + (1 - (count & 1)), 288)
    named_barrier("sync", HALVES)
    dq_made = wgmma(ds_tile, k_cols, zero_dq, use_acc=False, is_async=True)
    dv, p_operand = wgmma_wait(1, deps=[dv_made, p_operand])
    dk_made = wgmma(ds_operand, q_tile, dk, use_acc=True, is_async=True)
    dq = wgmma_wait(1, deps=[dq_made])
    if last:
        named_barrier("arrive", KEYS_READ, 288)
    park(C, dq, dq_desc, parking, dq_empty, count)
    dk, ds_operand = wgmma_wait(0, deps=[dk_made, ds_operand])
    named_barrier("arrive", READ + s, 288)
    return dk, dv


@gluon.jit
def _consume(
    C: gl.constexpr, parts, lists, indices, window, dq_desc, dk_desc, dv_desc, inner, outer, scale, ds, parking,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, ORDERED: gl.constexpr,
    WOVEN: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, PACKED: gl.constexpr, LIST_Q: gl.constexpr, STREAM_K: gl.constexpr, stream_k_ptr,
    LATE_DQ: gl.constexpr, dropout, sizes, DROPOUT_FORM: gl.constexpr, to, DIM: gl.constexpr, REST: gl.constexpr,
    GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr, rests, rooms,
):  # fmt: skip
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    dtype: gl.constexpr = q.dtype
    FIRST: gl.constexpr = 64 if REST > 0 else D  # columns of dk and dv beside their rest
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    # blocks of 128 queries fill the registers: a loop of its own keeps the mask out of where nothing is hidden
    PEEL: gl.constexpr = BQ == 128 and RIGHT and not LEFT
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    drop = load_dropout(dropout, sizes[1], DROPOUT_FORM)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        members = members_of(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT)
        if dropout is not None:
            tokens, keys, kv_heads, right = sizes
            key = queue.read(turn, START) + C * 64
            # of the group's first head the query that an edge stands for, as a row of the probabilities
            first_row = first_head(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT) * tokens
            if PACKED:
                key -= inside(0, 0, PACKED)  # behind the document's end
                first_row += queue.read(turn, QUERIES_END) + key
                key += queue.read(turn, KEYS_AT)
            else:
                heads = first_head(kv_heads, GROUP, GROUP_PARTS, GROUP_SHORT)
                first_row += queue.read(turn, KEYS_AT) * heads * tokens + key - (keys - tokens)
            if RIGHT:
                first_row -= right
        first_edge = queue.read(turn, EDGE) - C * 64
        limit = queue.read(turn, LIMIT) - C * 64
        dk = gl.zeros([64, FIRST], gl.float32, DKV)
        dv = gl.zeros([64, FIRST], gl.float32, DKV)
        if REST > 0:
            RESTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
            dk_rest = gl.zeros([64, REST], gl.float32, RESTS)
            dv_rest = gl.zeros([64, REST], gl.float32, RESTS)
        border, begin = blocks, count
        if PEEL and LIST_Q == 0:
            # of the blocks that see all keys, and of those before them
            border = gl.maximum(62 - first_edge + BQ if ORDERED else first_edge - 63 + BQ, 0) // BQ
            if TAIL:
                border = gl.where(limit < 64, blocks if ORDERED else 0, border)
            border = gl.minimum(border, blocks)
        mbarrier_wait(kv_full.index(0), turn & 1)
        mbarrier_wait(kv_full.index(1), turn & 1)
        if REST > 0:
            held = hold_keys(C, k, rests[2], REST)
        step = BQ if ORDERED else -BQ
        if WOVEN:
            step = gl.where(queue.read(turn, RISES) > 0, BQ, -BQ)
            blocks *= members
        walks = 1 if STREAM_K or WOVEN else members
        for member in range(walks):
            if LIST_Q > 0:
                entry = queue.read(turn, ENTRY) + member * queue.read(turn, STEP)
                blocks = gl.load(lists + entry + 2)
                crossed = gl.load(lists + entry + 3)
                border = crossed if ORDERED else blocks - crossed
                if TAIL:
                    border = gl.where(limit < 64, blocks if ORDERED else 0, border)
            for part in gl.static_range(2 if PEEL else 1):
                for i in range(border if part == 1 else 0, border if PEEL and part == 0 else blocks):
                    block, head = i, member
                    if WOVEN:
                        block, head = woven_step(i, members, GROUP, GROUP_SHORT)
                    edge = first_edge + block * step
                    if LIST_Q > 0 and RIGHT and (not PEEL or (part == 0) == ORDERED):
                        edge = gl.to_tensor(1 << 20)
                        if (i < crossed) if ORDERED else (i >= blocks - crossed):
                            edge = listed(i, blocks, entry, lists, indices, ORDERED, LIST_Q, BQ) * BQ + first_edge
                    dropping = drop
                    if dropout is not None:
                        dropping = drop.at(first_row + head * tokens + edge, key)
                    if REST > 0:
                        dk, dk_rest, dv, dv_rest = rest_block(
                            C, parts, rests, held, count, dk, dk_rest, dv, dv_rest, count == begin, edge, window, limit,
                            outer, ds, parking, LEFT, RIGHT, TAIL, REST, STAGES,
                        )  # fmt: skip
                    elif LATE_DQ:
                        dk, dv = late_block(
                            C, parts, count, dk, dv, count == begin, edge, window, limit, outer, ds, dq_desc, parking,
                            LEFT, RIGHT, TAIL, BQ, D, STAGES,
                        )  # fmt: skip
                    else:
                        dk, dv = _block(
                            C, parts, count, dk, dv, count == begin, i + member == blocks + walks - 2, edge, window,
                            limit, inner, outer, ds, dq_desc, parking,
                            (part == 0) == ORDERED if PEEL else LEFT or RIGHT or TAIL,
                            LEFT, RIGHT, TAIL, BQ, D, STAGES, SOFTCAP, dropping,
                        )  # fmt: skip
                    count += 1
        if LATE_DQ:
            if count != begin:
                if REST > 0:
                    last_rest_dq(C, count - 1, ds, k, rests[2], parking, dq_empty, REST)
                else:
                    last_dq(C, count - 1, ds, k, dq_desc, parking, dq_empty, BQ, D)
            if REST > 0:
                mbarrier_arrive(rests[4].index(0))
            else:
                named_barrier("arrive", KEYS_READ, 288)
        elif blocks == 0:
            named_barrier("arrive", KEYS_READ, 288)
            named_barrier("arrive", VALUES_READ, 288)
        if count != begin:
            fence_async()
            named_barrier("arrive", PARKED + (1 - (count & 1)), 288)
        if dropout is not None:
            dv *= drop.scale
        slot = gl.to_tensor(-1)
        if STREAM_K:
            slot = queue.read(turn, SLOT)
            if slot >= 0:
                if REST > 0:
                    leave_to_stream_k(C, queue, turn, slot, dk_rest * scale, dv_rest, stream_k_ptr, D, 64, False)
                leave_to_stream_k(C, queue, turn, slot, dk * scale, dv, stream_k_ptr, D, 0, True)
        if slot < 0:
            if REST > 0:
                write_rests(C, queue, turn, dk * scale, dk_rest * scale, dv, dv_rest, dk_desc, dv_desc, rooms, dtype,
                            PACKED, REST)  # fmt: skip
            else:
                write_gradients(C, queue, turn, count, dk * scale, dv, dk_desc, dv_desc, parking, dq_empty, dtype, D,
                                PACKED, ds, through_ds(BQ, D, LEFT, RIGHT), to, sizes[1], DIM)  # fmt: skip
        turn += 1
        queue.consumer_wait(turn)
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "kv_heads", "q_begin", "k_begin", "q_blocks", "k_blocks", "rows", "section", "left", "right",
        "list_share", "list_rows", "whole_tiles", "stream_k_ctas",
    ]
)  # fmt: skip
def attention_dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, turns_ptr, counter, table, lists,
    indices, tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, list_share,
    list_rows, whole_tiles, stream_k_ctas, stream_k_ptr, inner, outer, scale,
    GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, DYNAMIC: gl.constexpr,
    ORDERED: gl.constexpr, WOVEN: gl.constexpr, RING: gl.constexpr, BQ: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, LIST_Q: gl.constexpr, SOFTCAP: gl.constexpr, dropout=None,
    DROPOUT_FORM: gl.constexpr = None, GROUP_PARTS: gl.constexpr = 1, dk_ptr=None, dv_ptr=None, dk_strides=None,
    dv_strides=None, DIM: gl.constexpr = None, REST: gl.constexpr = 0, dq_rest_desc=None, GROUP_SHORT: gl.constexpr = 0,
    q_rest_desc=None, k_rest_desc=None, v_rest_desc=None, dout_rest_desc=None, dk_rest_desc=None, dv_rest_desc=None,
):  # fmt: skip
    """Tiles of 128 keys of one kv head. turns_ptr: who has added to a block's part of dq. table: tiles of documents
    (`key_tiles_kernel`), or None. lists: tiles of transposed block lists of LIST_Q queries (`list_key_tiles_kernel`),
    or None with LIST_Q 0; indices: theirs. inner, outer: q . k to scores, before and behind the softcap's tanh; scale:
    d score / d (q . k) but for tanh. stream_k_ptr: dk and dv of each run's parts of tiles from
    number `whole_tiles` on (`stream_k_run`), or None where no tile is divided. TAIL: the last tile has
    fewer keys. ORDERED: tiles add one after another, from the last keys on, and their blocks of queries come from the
    first on; else both come the other way round. WOVEN: a block of
    queries of all heads of a group before the next block (blocks of 64 queries, a causal mask, neither ORDERED nor
    documents or lists). RING: tiles of a head each start at a block of queries of their own (`around`), ORDERED, where
    nothing is masked, dropped or packed; then a block's dq has two parts (`ring_turn`). dropout: the seed tensor and
    the two of `dropout.kernel_numbers`, or None; then scale has the factor of what is kept in it, and delta its
    inverse. DROPOUT_FORM: RARE, SHORT and EVEN of `Dropout`. GROUP_PARTS: a kv head is one of so many parts of a
    group of query heads (`kv_head_of`); kv_heads and rows are those of parts, and dk and dv have a head for each.
    GROUP: query heads of a kv head; GROUP_SHORT: so many parts of each group, the last ones, have one fewer
    (`first_head`). dk_ptr, dv_ptr, their strides, DIM: dk and dv in fp32 and their columns; then dk_desc and dv_desc
    are of k and v, and only say how tiles lie in shared memory. REST: tiles and products have 64 and so many
    columns (`backward_rest`), 0: D columns; those behind the first 64 have the descriptors with rest in their name."""
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = table is not None
    STREAM_K: gl.constexpr = stream_k_ptr is not None
    # forms that know where every tile of a head is; documents and lists say that in tables, a window cuts tiles short
    PLACED: gl.constexpr = not (LEFT or PACKED or LIST_Q > 0)
    gl.static_assert(not STREAM_K or (PLACED and not (RIGHT or ORDERED or dropout is not None)))
    gl.static_assert(not RING or (PLACED and ORDERED and not (RIGHT or dropout is not None)))
    gl.static_assert(not WOVEN or (PLACED and RIGHT and not ORDERED and GROUP > 1 and BQ == 64))
    gl.static_assert(not (LIST_Q > 0 and (LEFT or PACKED or ORDERED or dropout is not None)))
    gl.static_assert(BQ == 64 or (BQ == 128 and D == 64))
    gl.static_assert(GROUP_SHORT == 0 or not (STREAM_K or RING))
    # a softcap's scores and a dropout's bits have no registers beside dv's product
    LATE_DQ: gl.constexpr = D == 128 and not SOFTCAP and dropout is None
    gl.static_assert(REST == 0 or (LATE_DQ and dk_ptr is None))
    if PACKED:
        k_blocks = gl.load(table)
    walk = KeyWalk(
        tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, list_share, list_rows,
        GROUP, LEFT, RIGHT, DYNAMIC, PACKED, ORDERED, WOVEN, BQ, 128, D, STAGES, LIST_Q, GROUP_PARTS, GROUP_SHORT,
    )  # fmt: skip
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = smem_tiles(STAGES, q_desc)
    dout = smem_tiles(STAGES, q_desc)
    k = smem_tiles(1, k_desc)
    v = smem_tiles(1, k_desc)
    ds = gl.allocate_shared_memory(dtype, [2, BQ, 128], gl.NVMMASharedLayout(128, 16, 2))
    q_rest, dout_rest, k_rest, v_rest = q, dout, k, v
    if REST > 0:
        q_rest = smem_tiles(STAGES, q_rest_desc)
        dout_rest = smem_tiles(STAGES, q_rest_desc)
        k_rest = smem_tiles(1, k_rest_desc)
        v_rest = smem_tiles(1, k_rest_desc)
        parking = smem_tiles(2, dq_desc), smem_tiles(2, dq_rest_desc)
        rooms = smem_tiles(4, dk_desc), smem_tiles(4, dk_rest_desc), dk_rest_desc, dv_rest_desc
    else:
        parking = smem_tiles(4, dk_desc, BQ // 64)
        rooms = ()
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BQ], PLAIN)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BQ], PLAIN)
    queue = tile_queue(4, 10)
    # of q and dout: the tile, and 32 threads for the row of numbers
    kv_full, q_full, dout_full, dq_empty = mbarriers((2, 1), (STAGES, 33), (STAGES, 33), (2, 1))
    kv_empty = dq_empty
    if REST > 0:
        kv_empty = mbarriers((1, 2))
    fence_async()
    rests = (
        q_rest, dout_rest, k_rest, v_rest, kv_empty, q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc
    )  # fmt: skip
    parts = (queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty)
    window = left + right if RIGHT else left
    sizes = tokens, keys, kv_heads, right
    to = (dk_ptr, dk_strides, dv_ptr, dv_strides)
    ROWS: gl.constexpr = BQ * D // 512
    gl.warp_specialize(
        [
            (_consume, (0, parts, lists, indices, window, dq_desc, dk_desc, dv_desc, inner, outer, scale, ds, parking,
                        LEFT, RIGHT, TAIL, ORDERED, WOVEN, BQ, D, GROUP, STAGES, SOFTCAP, PACKED, LIST_Q,
                        STREAM_K, stream_k_ptr, LATE_DQ, dropout, sizes, DROPOUT_FORM, to, DIM, REST, GROUP_PARTS,
                        GROUP_SHORT, rests, rooms)),
            (_consume, (1, parts, lists, indices, window, dq_desc, dk_desc, dv_desc, inner, outer, scale, ds, parking,
                        LEFT, RIGHT, TAIL, ORDERED, WOVEN, BQ, D, GROUP, STAGES, SOFTCAP, PACKED, LIST_Q,
                        STREAM_K, stream_k_ptr, LATE_DQ, dropout, sizes, DROPOUT_FORM, to, DIM, REST, GROUP_PARTS,
                        GROUP_SHORT, rests, rooms)),
            (_produce, (parts, walk, q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, counter, table, lists,
                        indices, whole_tiles, stream_k_ctas, STREAM_K, LATE_DQ, dropout is not None, RING, rests,
                        REST)),
            (_add, (0, parts, dq_desc, parking, turns_ptr, lists, indices, q_blocks, GROUP, ORDERED,
                    k_blocks, STREAM_K, WOVEN, ROWS, LIST_Q, BQ, RING, rows, REST, dq_rest_desc, GROUP_PARTS,
                    GROUP_SHORT)),
            (_add, (1, parts, dq_desc, parking, turns_ptr, lists, indices, q_blocks, GROUP, ORDERED,
                    k_blocks, STREAM_K, WOVEN, ROWS, LIST_Q, BQ, RING, rows, REST, dq_rest_desc, GROUP_PARTS,
                    GROUP_SHORT)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
