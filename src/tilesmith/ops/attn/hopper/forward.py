"""Device kernel of attention's forward on Hopper, in Gluon.

A CTA is one producer, which loads tiles by the TMA, and one to four consumers (warpgroups of
128 threads) with 64 queries each, which meet the keys from the last visible block to the first. The product with the
values of one block runs while the scores of the next are made. Programs stay: each works on many tiles of queries.
Scores live in units of log 2.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    smem_tiles,
    tma_store_wait,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.columns import (
    load_tile,
    rest_tile,
    rows_product,
    scale_rows,
    start_write,
    wait_products,
    zero_sums,
)
from tilesmith.ops.attn.hopper.dropout import dropped, kept_keys, load_dropout
from tilesmith.ops.attn.hopper.joined import add_values, check_place, load_values, parts_of, value_tiles
from tilesmith.ops.attn.hopper.softmax import (
    NOTHING,
    apply_mask,
    doubled,
    exponentiate,
    finish_softmax,
    pack,
    tanh,
    unpack,
)
from tilesmith.ops.attn.hopper.tile_offset import corner, inside
from tilesmith.ops.attn.hopper.walk import Walk, tile_queue

TURN = gl.constexpr(8)  # the named barrier of the first consumer's turn; the others' follow


@gluon.jit
def _produce(parts, descs, counter, table, lists, indices):
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc = descs
    whole, queue, q, q_rest, k, k_rest, v, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.tiles()
    while number < tiles:
        start, head, tokens, keys, q_place, k_place = whole.tile(number, table)
        start, apart, other = whole.placed(start, head, tokens)
        walk = whole.within(tokens, keys)
        kv_head = head // walk.group
        begin, blocks, entry = walk.listed(start, head, q_place, lists)
        for j in range(blocks):
            first = walk.key(begin, blocks, j, entry, lists, indices)
            s = count % walk.STAGES
            phase = (count // walk.STAGES) & 1
            kv_corner = corner(k_place, kv_head, first, keys, walk.PACKED)
            mbarrier_wait(k_empty.index(s), phase ^ 1)
            load_tile(
                k_desc, k_rest_desc, kv_corner, k_full.index(s), k.index(s), k_rest.index(s), walk.REST, walk.PACKED
            )
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    box = turn % walk.Q_STAGES * walk.CONSUMERS + c
                    mbarrier_wait(q_empty.index(box), ((turn // walk.Q_STAGES) & 1) ^ 1)
                    first_head = (head + c * other) * walk.HEADS
                    q_corner = corner(q_place, first_head, start + c * apart, tokens, walk.PACKED)
                    load_tile(
                        q_desc, q_rest_desc, q_corner, q_full.index(box), q.index(box), q_rest.index(box), walk.REST,
                        walk.PACKED, 64 // walk.HEADS * walk.HEADS,
                    )  # fmt: skip
            t = count % walk.V_STAGES
            mbarrier_wait(v_empty.index(t), ((count // walk.V_STAGES) & 1) ^ 1)
            load_values(v_desc, v_rest_desc, kv_corner, v_full.index(t), v, v_rest, t, walk)
            count += 1
        number = queue.fetch(turn, counter, tiles, whole.DYNAMIC)
        turn += 1


@gluon.jit
def skip_blocks(C: gl.constexpr, blocks, count, walk, k_full, k_empty, v_full, v_empty, TURNS: gl.constexpr = False):
    """Give back the next blocks unread. TURNS: they are a tile's first, of which all but the first have a turn."""
    for i in range(blocks):
        if TURNS:
            if i > 0:
                named_barrier("sync", TURN + C)
                named_barrier("arrive", TURN + (C + 1) % walk.CONSUMERS)
        s = count % walk.STAGES
        phase = (count // walk.STAGES) & 1
        mbarrier_wait(k_full.index(s), phase)
        mbarrier_arrive(k_empty.index(s))
        t = count % walk.V_STAGES
        mbarrier_wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        mbarrier_arrive(v_empty.index(t))
        count += 1
    return count


@gluon.jit
def first_block(C: gl.constexpr, walk, q_tile, k_tile, k_empty, taken, queries, first, inner, scale,
                SOFTCAP: gl.constexpr, drop=None, q_rest=None, k_rest=None):  # fmt: skip
    """The first block of keys that a consumer meets, or its first half: each row's row maximum, the sum of its
    powers, and these (`pack`), 0 where drop drops them. taken: others have met a block before, so that the product has
    a turn."""
    KEYS: gl.constexpr = k_tile.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zero = gl.zeros([64, KEYS], gl.float32, SCORES)
    if walk.TURNS and walk.SKIP:
        if taken:
            named_barrier("sync", TURN + C)
    qk = rows_product(q_tile, q_rest, k_tile, k_rest, zero, walk.REST)
    if walk.TURNS and walk.SKIP:
        if taken:
            named_barrier("arrive", TURN + (C + 1) % walk.CONSUMERS)
    if drop is not None:
        kept = kept_keys(drop, first, KEYS)
    qk = wgmma_wait(0, deps=[qk])
    mbarrier_arrive(k_empty)
    if SOFTCAP:
        qk = tanh(qk * inner)
    if not walk.WHOLE:
        qk = apply_mask(qk, walk, queries, first, walk.LEFT)
    top = gl.max(qk, 1) * scale
    base = top
    if not walk.WHOLE:
        base = gl.where(top == NOTHING, 0.0, top)
    p = gl.exp2(qk * scale - base[:, None])
    total = gl.sum(p, 1)
    p = pack(p, q_tile.dtype)
    if drop is not None:
        p = dropped(p, kept)
    return top, total, p


@gluon.jit
def next_block(C: gl.constexpr, walk, q_tile, k_tile, v_tile, full, empty, p, acc, total, top, queries, first, inner,
               scale, EDGE: gl.constexpr, SOFTCAP: gl.constexpr, drop=None, rests=None):  # fmt: skip
    """A block of keys, whose scores are made while the powers p of the block before, or of its first keys, meet their
    values. full, empty: the barriers of these keys and of those values, full with their phases. EDGE: some queries do
    not see all of the keys. rests: of acc, and of the tiles of queries, keys and values. Returns acc, its rest, total
    and top with the block in them, and its powers (`pack`)."""
    acc_rest, q_rest, k_rest, v_rest = rests
    k_full, k_phase, v_full, v_phase = full
    k_empty, v_empty = empty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, walk.BN, 16])
    zero = gl.zeros([64, walk.BN], gl.float32, SCORES)
    if walk.TURNS:
        named_barrier("sync", TURN + C)
    mbarrier_wait(k_full, k_phase)
    qk_made = rows_product(q_tile, q_rest, k_tile, k_rest, zero, walk.REST)
    mbarrier_wait(v_full, v_phase)
    acc_made, rest_made = add_values(p, v_tile, v_rest, acc, acc_rest, walk)
    if walk.TURNS:
        named_barrier("arrive", TURN + (C + 1) % walk.CONSUMERS)
    if drop is not None:
        kept = kept_keys(drop, first, walk.BN)
    qk = wgmma_wait(2 if walk.V_REST > 0 and walk.V_PART == 0 else 1, deps=[qk_made])
    mbarrier_arrive(k_empty)
    if SOFTCAP:
        qk = tanh(qk * inner)
    if EDGE:
        qk = apply_mask(qk, walk, queries, first, walk.LEFT)
    new, decay, new_top = exponentiate(qk, top, scale, EDGE)
    total = total * decay + gl.sum(new, 1)
    if drop is None:
        acc, acc_rest = wait_products(acc_made, rest_made, walk.V_REST)
    elif walk.V_REST > 0:  # the products read p from registers, which no draw must take before
        acc, acc_rest, p = wgmma_wait(0, deps=[acc_made, rest_made, p])
    else:
        acc, p = wgmma_wait(0, deps=[acc_made, p])
    mbarrier_arrive(v_empty)
    acc, acc_rest = scale_rows(acc, acc_rest, decay, walk.V_REST)
    new = pack(new, q_tile.dtype)
    if drop is not None:
        new = dropped(new, kept)
    return acc, acc_rest, total, new_top, new


@gluon.jit
def _consume(C: gl.constexpr, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
             SOFTCAP: gl.constexpr, OUT_IN_Q: gl.constexpr, dropout, DROPOUT_FORM: gl.constexpr, to,
             DIM_V: gl.constexpr):  # fmt: skip
    whole, queue, q, q_rest, k, k_rest, v, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = whole.BN
    D: gl.constexpr = whole.D
    DV: gl.constexpr = whole.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PHASES: gl.constexpr = 3 if whole.LEFT else 2
    LAST: gl.constexpr = 64 // whole.HEADS - 1  # from the position of the first row to that of the last
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    drop = load_dropout(dropout, whole.keys, DROPOUT_FORM)
    number = gl.program_id(0)
    tiles = whole.tiles()
    if whole.TURNS and C == whole.CONSUMERS - 1:
        named_barrier("arrive", TURN)
    while number < tiles:
        start, head, tokens, keys, q_place, k_place = whole.tile(number, table)
        start, apart, other = whole.placed(start, head, tokens)
        walk = whole.within(tokens, keys)
        begin, blocks, entry = walk.listed(start, head, q_place, lists)
        start += C * apart
        head += C * other
        before_right = gl.to_tensor(0)
        behind_left = gl.to_tensor(0)
        if walk.SKIP:
            seen = gl.maximum(walk.end(gl.minimum(start + LAST, tokens - 1)) - begin, 1)
            before_right = gl.maximum(blocks - (seen + BN - 1) // BN, 0)
            count = skip_blocks(C, before_right, count, walk, k_full, k_empty, v_full, v_empty, walk.TURNS)
            behind_left = gl.minimum((walk.begin(start) - begin) // BN, blocks - before_right - 1)
            begin += behind_left * BN
            blocks -= before_right + behind_left
        queries, heads = walk.queries(start, ROW)
        dropping = drop
        if dropout is not None:
            if walk.PACKED:
                dropping = drop.at(head * whole.tokens + (q_place - tokens) + start, k_place - keys)
            else:
                dropping = drop.at((q_place * walk.heads + head) * tokens + start, keys * 0)
        acc, acc_rest = zero_sums(DV, walk.V_REST)

        box = turn % walk.Q_STAGES * walk.CONSUMERS + C
        q_tile = q.index(box).reshape([64, D])
        q_tile_rest = rest_tile(q_rest, box, q_tile, walk.REST)
        mbarrier_wait(q_full.index(box), (turn // walk.Q_STAGES) & 1)
        s = count % walk.STAGES
        mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
        k_tile = k.index(s).reshape([BN, D])
        k_tile_rest = rest_tile(k_rest, s, k_tile, walk.REST)
        first = walk.key(begin, blocks, 0, entry, lists, indices)
        met = 1
        if walk.HALF and C == 0:
            PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
            top, total, few = first_block(
                C, walk, q_tile, k_tile.slice(0, BN // 2), k_empty.index(s), False,
                gl.convert_layout(queries, gl.SliceLayout(1, PART)), first, inner, scale, SOFTCAP,
                dropping, q_tile_rest, k_tile_rest.slice(0, BN // 2),
            )  # fmt: skip
            top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
            if blocks > 1:
                behind, v_phase = count % walk.V_STAGES, (count // walk.V_STAGES) & 1
                count += 1
                s = count % walk.STAGES
                if dropout is not None:
                    first = walk.key(begin, blocks, 1, entry, lists, indices)
                k_tile = k.index(s).reshape([BN, D])
                v_tile, v_tile_rest = value_tiles(v, v_rest, behind, walk, BN // 2)
                rests = acc_rest, q_tile_rest, rest_tile(k_rest, s, k_tile, walk.REST), v_tile_rest
                acc, acc_rest, total, top, p = next_block(
                    C, walk, q_tile, k_tile, v_tile,
                    (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(behind), v_phase),
                    (k_empty.index(s), v_empty.index(behind)), unpack(few, dtype, P), acc, total, top, queries, first,
                    inner, scale, False, SOFTCAP, dropping, rests,
                )  # fmt: skip
            else:
                # These powers meet their values below. If both ways of a branch need the same address, ptxas 12.8 may
                # make it in one way alone: a product here has read values of an earlier tile.
                p = doubled(few, SCORES, dtype)
            met = 2
        else:
            top, total, p = first_block(
                C, walk, q_tile, k_tile, k_empty.index(s), before_right > 0, queries, first, inner, scale, SOFTCAP,
                dropping, q_tile_rest, k_tile_rest,
            )  # fmt: skip

        # blocks from the end: those that the right edge crosses, whole ones, those that the left edge crosses
        left = blocks
        if walk.LIST_K > 0:
            right = gl.load(lists + entry + 3)
        else:
            right = gl.minimum(gl.maximum(blocks - gl.maximum(walk.end(start) - begin, 0) // BN, 1), blocks)
            if walk.LEFT:
                left = blocks - (walk.begin(start + LAST) - begin + BN - 1) // BN
                left = gl.minimum(gl.maximum(left, right), blocks)
        for phase in gl.static_range(PHASES):
            if phase == 0:
                lower, upper = 1, right
            elif phase == 1:
                lower, upper = right, left
                if walk.ONE_MASK:
                    lower = gl.minimum(met, blocks)
            else:
                lower, upper = left, blocks
            if phase != 0 or (walk.RIGHT and not walk.ONE_MASK):
                for j in range(lower, upper):
                    p_half = unpack(p, dtype, P)
                    behind = count % walk.V_STAGES
                    v_phase = (count // walk.V_STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    if phase != 1 or dropout is not None:
                        first = walk.key(begin, blocks, j, entry, lists, indices)
                    k_tile = k.index(s).reshape([BN, D])
                    v_tile, v_tile_rest = value_tiles(v, v_rest, behind, walk, BN)
                    acc, acc_rest, total, top, p = next_block(
                        C, walk, q_tile, k_tile, v_tile,
                        (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(behind), v_phase),
                        (k_empty.index(s), v_empty.index(behind)), p_half, acc, total, top, queries, first, inner,
                        scale, phase != 1, SOFTCAP, dropping,
                        (acc_rest, q_tile_rest, rest_tile(k_rest, s, k_tile, walk.REST), v_tile_rest),
                    )  # fmt: skip

        if not OUT_IN_Q:
            mbarrier_arrive(q_empty.index(box))
        t = count % walk.V_STAGES
        mbarrier_wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        v_tile, v_tile_rest = value_tiles(v, v_rest, t, walk, BN)
        acc_made, rest_made = add_values(unpack(p, dtype, P), v_tile, v_tile_rest, acc, acc_rest, walk)
        count += 1
        first_head = head * walk.HEADS
        factor, lse = finish_softmax(top, total, first_head + heads, sinks_ptr)
        if dropout is not None:
            factor *= drop.scale
        if walk.PACKED:
            row = head.to(gl.int64) * whole.tokens + (q_place - tokens)
        else:
            row = ((q_place * walk.heads + head) * walk.HEADS).to(gl.int64) * tokens
        gl.store(lse_ptr + row + heads * tokens + queries, lse, mask=queries < tokens)
        acc, acc_rest = wait_products(acc_made, rest_made, walk.V_REST)
        mbarrier_arrive(v_empty.index(t))
        if walk.SKIP and walk.LEFT:
            count = skip_blocks(C, behind_left, count, walk, k_full, k_empty, v_full, v_empty)
        acc, acc_rest = scale_rows(acc, acc_rest, factor, walk.V_REST)
        if not OUT_IN_Q:
            tma_store_wait(0)
        row = inside(start, tokens, walk.PACKED)
        start_write(acc, acc_rest, out_descs[0], out_descs[1], outs[0].index(C), outs[1].index(C),
                    (to[0], to[1], tokens), q_place, first_head, row, walk.V_REST, DIM_V, dtype,
                    walk.PACKED)  # fmt: skip
        if OUT_IN_Q:
            tma_store_wait(0)
            mbarrier_arrive(q_empty.index(box))
        number = queue.next_tile(turn, tiles, walk.DYNAMIC)
        turn += 1
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group", "list_share", "list_rows",
    ]
)  # fmt: skip
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, counter, table, lists, indices,
    tokens, keys, heads, blocks, rows, section, left, right, group, list_share, list_rows, inner, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, LIST_K: gl.constexpr, SOFTCAP: gl.constexpr, ONE_MASK: gl.constexpr,
    STREAM_K: gl.constexpr, dropout=None, DROPOUT_FORM: gl.constexpr = None, REST: gl.constexpr = 0, q_rest_desc=None,
    k_rest_desc=None, V_REST: gl.constexpr = 0, v_rest_desc=None, out_rest_desc=None,
    out_ptr=None, out_strides=None, DIM_V: gl.constexpr = 0, HEADS: gl.constexpr = 1, V_PART: gl.constexpr = 0,
    V_COLS: gl.constexpr = 0,
):  # fmt: skip
    """Tiles of CONSUMERS * 64 queries of HEADS heads that share keys (`Walk`). table: tiles of documents
    (`query_tiles_kernel`), the order of the lists' tiles, or None. lists: tiles of block lists of LIST_K keys
    (`list_tiles_kernel`), or None with LIST_K 0; indices: theirs. scale: of q . k, times log2(e); with SOFTCAP inner is
    the factor before tanh and scale that behind it. WHOLE: every query sees every key, in whole blocks. D, DV: head
    dims, up to 64, 128 or 256; columns behind a tensor's own are zeros. REST, V_REST: columns of q and k behind D, and
    of v and out behind DV, which have tiles of their own (`columns`). STREAM_K: tiles behind the last whole round are
    left to `attention_fwd_stream_k_kernel`. dropout: the seed tensor, and the two of `dropout.kernel_numbers`, or None;
    DROPOUT_FORM: RARE, SHORT and EVEN of `Dropout`. out_ptr, out_strides, DIM_V: out in fp32 and its columns, stored
    from registers; out_desc is None. V_PART, V_COLS: values lie in parts of so many columns, of which products have so
    many (`joined`); then v_rest_desc is None."""
    if STREAM_K:
        launch_dependents()
    PACKED: gl.constexpr = table is not None and LIST_K == 0
    WINDOWLESS: gl.constexpr = not (LEFT or PACKED or LIST_K > 0)
    gl.static_assert(not ONE_MASK or (WINDOWLESS and RIGHT and BN % 64 == 0))
    gl.static_assert(not STREAM_K or (WINDOWLESS and dropout is None))
    gl.static_assert(not WHOLE or (WINDOWLESS and not RIGHT))
    gl.static_assert(not (LIST_K > 0 and (LEFT or dropout is not None)))
    gl.static_assert(HEADS == 1 or not (PACKED or LIST_K > 0 or ONE_MASK or STREAM_K or dropout is not None))
    gl.static_assert(HEADS == 1 or out_ptr is None)
    OUT_IN_Q: gl.constexpr = D == DV and D + REST > 128 and out_ptr is None  # out takes the place of q
    if PACKED:
        blocks = gl.load(table)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group, list_share, list_rows,
        LEFT, RIGHT, WHOLE, DYNAMIC, PACKED, 64 // HEADS * CONSUMERS, BN, D, DV, CONSUMERS, STAGES, Q_STAGES, LIST_K,
        ONE_MASK, V_STAGES, STREAM_K, REST, V_REST, HEADS, V_PART, V_COLS,
    )  # fmt: skip
    q = smem_tiles(Q_STAGES * CONSUMERS, q_desc)
    k = smem_tiles(STAGES, k_desc)
    q_rest, k_rest = q, k
    if REST > 0:
        q_rest = smem_tiles(Q_STAGES * CONSUMERS, q_rest_desc)
        k_rest = smem_tiles(STAGES, k_rest_desc)
    V_TILES: gl.constexpr = V_STAGES * parts_of(DV + V_REST, V_PART) if V_PART > 0 else V_STAGES
    v = smem_tiles(V_TILES, v_desc)
    if V_PART > 0:
        check_place(v)
    out = q
    if not OUT_IN_Q and out_ptr is None:
        out = smem_tiles(CONSUMERS, out_desc)
    v_rest, out_rest = v, out
    if V_REST > 0:
        if V_PART == 0:
            v_rest = smem_tiles(V_STAGES, v_rest_desc)
        if out_ptr is None:
            out_rest = smem_tiles(CONSUMERS, out_rest_desc)
    queue = tile_queue(CONSUMERS, 1)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (Q_STAGES * CONSUMERS, 1), (Q_STAGES * CONSUMERS, 1), (STAGES, 1), (STAGES, CONSUMERS), (V_STAGES, 1),
        (V_STAGES, CONSUMERS),
    )  # fmt: skip
    fence_async()
    parts = (walk, queue, q, q_rest, k, k_rest, v, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    descs = (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc)
    out_descs, outs = (out_desc, out_rest_desc), (out, out_rest)
    to = (out_ptr, out_strides)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_produce, (parts, descs, counter, table, lists, indices)),
                (_consume, (0, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
            ],
            [4],
            [240],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (parts, descs, counter, table, lists, indices)),
                (_consume, (0, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
                (_consume, (1, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_produce, (parts, descs, counter, table, lists, indices)),
                (_consume, (0, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
                (_consume, (1, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
                (_consume, (2, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_produce, (parts, descs, counter, table, lists, indices)),
                (_consume, (0, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
                (_consume, (1, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
                (_consume, (2, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
                (_consume, (3, parts, out_descs, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, outs,
                            SOFTCAP, OUT_IN_Q, dropout, DROPOUT_FORM, to, DIM_V)),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 112],
        )  # fmt: skip
