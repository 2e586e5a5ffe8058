"""Device kernel of attention's dq on Hopper for head dims above 128, and for those of q and v that differ, in
Gluon: one pass over keys, nothing is added
up in memory, so that dq is the same in every run.

A CTA is one producer and two consumers with 64 queries each, which meet the keys 64 at a time. Scores live in units
of log 2.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    grid_dependency_wait,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    smem_tiles,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.columns import load_tile, rows_product, write_tile
from tilesmith.ops.attn.hopper.softmax import LN2, in_mask, mask_before, tanh
from tilesmith.ops.attn.hopper.tile_offset import corner, inside
from tilesmith.ops.attn.hopper.walk import Walk, ring_place, tile_queue


@gluon.jit
def _produce(parts, kept, streamed, counter, table, REST: gl.constexpr, V_REST: gl.constexpr, CHAINED: gl.constexpr):
    whole, queue, tiles_in, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    q, q_rest, dout, dout_rest, k, k_rest, v, v_rest = tiles_in
    q_desc, q_rest_desc, dout_desc, dout_rest_desc = kept
    k_desc, k_rest_desc, v_desc, v_rest_desc = streamed
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.blocks * whole.rows
    while number < tiles:
        start, head, tokens, keys, q_place, k_place = whole.tile(number, table)
        walk = whole.within(tokens, keys)
        kv_head = head // walk.group
        begin, blocks = walk.span(start)
        for j in range(blocks):
            first = begin + (blocks - 1 - j) * 64
            kv_corner = corner(k_place, kv_head, first, keys, walk.PACKED)
            s, phase = ring_place(count, walk.STAGES)
            mbarrier_wait(k_empty.index(s), phase ^ 1)
            load_tile(k_desc, k_rest_desc, kv_corner, k_full.index(s), k.index(s), k_rest.index(s), REST, walk.PACKED)
            if j == 0:
                for c in gl.static_range(2):
                    q_corner = corner(q_place, head, start + c * 64, tokens, walk.PACKED)
                    mbarrier_wait(q_empty.index(c), (turn & 1) ^ 1)
                    load_tile(
                        q_desc, q_rest_desc, q_corner, q_full.index(c), q.index(c), q_rest.index(c), REST, walk.PACKED
                    )
                    load_tile(
                        dout_desc, dout_rest_desc, q_corner, q_full.index(2 + c), dout.index(c), dout_rest.index(c),
                        V_REST, walk.PACKED,
                    )  # fmt: skip
            t, v_phase = ring_place(count, walk.V_STAGES)
            mbarrier_wait(v_empty.index(t), v_phase ^ 1)
            load_tile(v_desc, v_rest_desc, kv_corner, v_full.index(t), v.index(t), v_rest.index(t), V_REST, walk.PACKED)
            count += 1
        if CHAINED:
            # a CUDA graph zeroes the counter behind dk and dv, and what comes behind this kernel comes behind them too
            grid_dependency_wait()
        number = queue.fetch(turn, counter, tiles, whole.DYNAMIC)
        turn += 1


@gluon.jit
def _consume(C: gl.constexpr, parts, dq_desc, dq_rest_desc, lse_ptr, delta_ptr, table, inner, outer, factor,
             SOFTCAP: gl.constexpr, REST: gl.constexpr, V_REST: gl.constexpr, to, DIM: gl.constexpr):  # fmt: skip
    whole, queue, tiles_in, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    q, q_rest, dout, dout_rest, k, k_rest, v, v_rest = tiles_in
    D: gl.constexpr = whole.D
    DV: gl.constexpr = whole.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.blocks * whole.rows
    while number < tiles:
        start, head, tokens, keys, q_place, _ = whole.tile(number, table)
        walk = whole.within(tokens, keys)
        begin, blocks = walk.span(start)
        start += C * 64
        queries = start + gl.arange(0, 64, ROW)
        dq = gl.zeros([64, D], gl.float32, DQ)
        dq_rest = gl.to_tensor(0)
        if REST > 0:
            DQ_RESTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
            dq_rest = gl.zeros([64, REST], gl.float32, DQ_RESTS)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        if walk.PACKED:
            row = head.to(gl.int64) * whole.tokens + (q_place - tokens)
        else:
            row = (q_place * walk.heads + head).to(gl.int64) * tokens
        held = queries < tokens
        row_lse = gl.load(lse_ptr + row + queries, mask=held, other=float("inf")) * (1.0 / LN2)
        row_delta = gl.load(delta_ptr + row + queries, mask=held, other=0.0)
        # the block whose keys all of these queries see: from `whole_begin` on, up to `whole_end`
        whole_end = walk.end(start)
        whole_begin = walk.begin(gl.minimum(start + 63, tokens - 1))
        mbarrier_wait(q_full.index(C), turn & 1)
        mbarrier_wait(q_full.index(2 + C), turn & 1)
        for j in range(blocks):
            first = begin + (blocks - 1 - j) * 64
            s, phase = ring_place(count, walk.STAGES)
            t, v_phase = ring_place(count, walk.V_STAGES)
            # 0, but not for the compiler: it would keep the addresses of all parts of these tiles in registers
            none = count >> 30
            q_tile = q.index(C + none).reshape([64, D])
            dout_tile = dout.index(C + none).reshape([64, DV])
            v_tile = v.index(t if walk.V_STAGES > 1 else none).reshape([64, DV])
            k_tile = k.index(s).reshape([64, D])
            q_tile_rest, k_tile_rest, dout_tile_rest, v_tile_rest = q_tile, k_tile, dout_tile, v_tile
            if REST > 0:
                q_tile_rest = q_rest.index(C + none).reshape([64, REST])
                k_tile_rest = k_rest.index(s).reshape([64, REST])
            if V_REST > 0:
                dout_tile_rest = dout_rest.index(C + none).reshape([64, V_REST])
                v_tile_rest = v_rest.index(t if walk.V_STAGES > 1 else none).reshape([64, V_REST])
            mbarrier_wait(k_full.index(s), phase)
            s_made = rows_product(q_tile, q_tile_rest, k_tile, k_tile_rest, zero, REST)
            mbarrier_wait(v_full.index(t), v_phase)
            dp_made = rows_product(dout_tile, dout_tile_rest, v_tile, v_tile_rest, zero, V_REST)
            score = wgmma_wait(2 if V_REST > 0 else 1, deps=[s_made])
            if SOFTCAP:
                score = tanh(score * inner)
            p = gl.exp2(score * outer - row_lse[:, None])
            if SOFTCAP:
                p = p * (1.0 - score * score)
            dp = wgmma_wait(0, deps=[dp_made])
            mbarrier_arrive(v_empty.index(t))
            d_score = p * (dp - row_delta[:, None])
            crossed = first + 64 > whole_end
            if walk.LEFT:
                crossed = crossed | (first < whole_begin)
            if crossed:
                # queries that see nothing may be NaN: what is hidden is taken out, not multiplied by 0
                cols = gl.arange(0, 64, gl.SliceLayout(0, SCORES))[None, :]
                if walk.RIGHT:
                    word = mask_before((walk.end(queries) - first)[:, None], cols)
                else:
                    word = mask_before(walk.keys - first, cols)
                if walk.LEFT:
                    word = word & ~mask_before((walk.begin(queries) - first)[:, None], cols)
                d_score = gl.where(in_mask(word, cols), d_score, 0.0)
            ds_operand = gl.convert_layout(d_score.to(dtype), P)
            dq_made = wgmma(ds_operand, k_tile, dq, use_acc=True, is_async=True)
            if REST > 0:
                rest_operand = gl.convert_layout(ds_operand, gl.DotOperandLayout(0, DQ_RESTS, 2))
                rest_made = wgmma(rest_operand, k_tile_rest, dq_rest, use_acc=True, is_async=True)
                dq, dq_rest, ds_operand, rest_operand = wgmma_wait(
                    0, deps=[dq_made, rest_made, ds_operand, rest_operand]
                )
            else:
                dq, ds_operand = wgmma_wait(0, deps=[dq_made, ds_operand])
            mbarrier_arrive(k_empty.index(s))
            count += 1
        dq *= factor
        if REST > 0:
            dq_rest *= factor
        # the queries are read
        write_tile(dq, dq_rest, dq_desc, dq_rest_desc, q.index(C), q_rest.index(C), to, q_place, head,
                   inside(start, tokens, walk.PACKED), REST, DIM, dtype, walk.PACKED)  # fmt: skip
        mbarrier_arrive(q_empty.index(C))
        number = queue.next_tile(turn, tiles, whole.DYNAMIC)
        turn += 1


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group"])
def attention_dq_wide_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, lse_ptr, delta_ptr, counter, table,
    tokens, keys, heads, blocks, rows, section, left, right, group, inner, outer, factor,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, DYNAMIC: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, SOFTCAP: gl.constexpr, REST: gl.constexpr = 0,
    V_REST: gl.constexpr = 0, q_rest_desc=None, k_rest_desc=None, v_rest_desc=None, dout_rest_desc=None,
    dq_rest_desc=None, dq_ptr=None, dq_strides=None, DIM: gl.constexpr = None, CHAINED: gl.constexpr = False,
):  # fmt: skip
    """Tiles of 128 queries of one head. delta_ptr: a number for each query, as of lse_ptr. factor: d score / d (q . k)
    but for tanh, and outer: the scores' to units of log 2; D, REST, DV, V_REST: as in `attention_dkv_wide_kernel`;
    STAGES, V_STAGES: tiles of keys and of values in flight; dq_ptr, its strides, DIM: dq in fp32 and its columns;
    CHAINED: each CTA's first tile may run beside the last ones of the kernel before, which makes dk and dv and has
    waited for what both read; the other arguments are those of `attention_fwd_kernel`."""
    PACKED: gl.constexpr = table is not None
    if PACKED:
        blocks = gl.load(table)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group, gl.to_tensor(1), gl.to_tensor(0),
        LEFT, RIGHT, False, DYNAMIC, PACKED, 128, 64, D, DV, 2, STAGES, 1, 0, V_STAGES=V_STAGES,
    )  # fmt: skip
    q = smem_tiles(2, q_desc)
    dout = smem_tiles(2, dout_desc)
    k = smem_tiles(STAGES, k_desc)
    v = smem_tiles(V_STAGES, v_desc)
    q_rest, dout_rest, k_rest, v_rest = q, dout, k, v
    if REST > 0:
        q_rest = smem_tiles(2, q_rest_desc)
        k_rest = smem_tiles(STAGES, k_rest_desc)
    if V_REST > 0:
        dout_rest = smem_tiles(2, dout_rest_desc)
        v_rest = smem_tiles(V_STAGES, v_rest_desc)
    queue = tile_queue(2, 1)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (4, 1), (2, 1), (STAGES, 1), (STAGES, 2), (V_STAGES, 1), (V_STAGES, 2)
    )
    fence_async()
    tiles_in = (q, q_rest, dout, dout_rest, k, k_rest, v, v_rest)
    parts = (walk, queue, tiles_in, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    kept = (q_desc, q_rest_desc, dout_desc, dout_rest_desc)
    streamed = (k_desc, k_rest_desc, v_desc, v_rest_desc)
    to = (None, None, None)
    if dq_ptr is not None:
        to = (dq_ptr, dq_strides, tokens)
    gl.warp_specialize(
        [
            (_produce, (parts, kept, streamed, counter, table, REST, V_REST, CHAINED)),
            (_consume, (0, parts, dq_desc, dq_rest_desc, lse_ptr, delta_ptr, table, inner, outer, factor, SOFTCAP,
                        REST, V_REST, to, DIM)),
            (_consume, (1, parts, dq_desc, dq_rest_desc, lse_ptr, delta_ptr, table, inner, outer, factor, SOFTCAP,
                        REST, V_REST, to, DIM)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
