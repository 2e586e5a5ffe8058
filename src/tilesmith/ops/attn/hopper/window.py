"""Device kernel of attention's forward on Hopper for narrow windows, in Gluon: all keys of a tile are there at once.

128 queries whose windows reach over at most 129 keys see 256 keys between them, four boxes of 64, and each consumer's
64 queries three of these. So there is no walk over keys: a consumer makes its three blocks of scores together, knows
each row's greatest before it takes a power, and nothing is ever rescaled. A CTA works on a run of tiles of one
head: of each tile's boxes the next one needs the two last, which stay. Scores live in units of log 2.
"""

from tilesmith.device.gluon.shim import (
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
from tilesmith.ops.attn.hopper.softmax import NOTHING, apply_mask, finish_softmax, tanh
from tilesmith.ops.attn.hopper.tile_offset import corner
from tilesmith.ops.attn.hopper.walk import Walk, tile_queue


@gluon.jit
def _first(walk, number, run):
    """The first query and the head of a run, its batch, and how many tiles it has."""
    start, head, tokens, _, batch, _ = walk.tile(number, None)
    start *= run
    return start, head, batch, gl.minimum(run, (tokens - start + walk.BM - 1) // walk.BM)


@gluon.jit
def _produce(parts, walk, run, q_desc, k_desc, v_desc, counter):
    queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    boxes = walk.CONSUMERS + 2
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, batch, many = _first(walk, number, run)
        kv_head = head // walk.group
        # may lie before the first key: what is not there, TMA fills with zeros
        first = start + (walk.keys - walk.tokens) - walk.left
        for i in range(many):
            new = gl.where(i == 0, 0, 2)  # the two first boxes of a tile are the two last of the one before
            for b in range(new, boxes):
                s = (count + b) % walk.STAGES
                mbarrier_wait(k_empty.index(s), (((count + b) // walk.STAGES) & 1) ^ 1)
                tma_load(k_desc, corner(batch, kv_head, first + b * 64, 0, False), k_full.index(s), k.index(s))
            for c in gl.static_range(walk.CONSUMERS):
                box = tile % walk.Q_STAGES * walk.CONSUMERS + c
                mbarrier_wait(q_empty.index(box), ((tile // walk.Q_STAGES) & 1) ^ 1)
                tma_load(q_desc, corner(batch, head, start + c * 64, 0, False), q_full.index(box), q.index(box))
            for b in range(new, boxes):
                s = (count + b) % walk.STAGES
                mbarrier_wait(v_empty.index(s), (((count + b) // walk.STAGES) & 1) ^ 1)
                tma_load(v_desc, corner(batch, kv_head, first + b * 64, 0, False), v_full.index(s), v.index(s))
            count += walk.CONSUMERS
            first += walk.BM
            start += walk.BM
            tile += 1
        count += 2
        number = queue.fetch(turn, counter, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit
def _give_back(empty, count, last, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """The boxes of a tile that the next one does not meet; of a run's last tile, all."""
    for b in gl.static_range(CONSUMERS):
        mbarrier_arrive(empty.index((count + b) % STAGES))
    if last:
        mbarrier_arrive(empty.index((count + CONSUMERS) % STAGES))
        mbarrier_arrive(empty.index((count + CONSUMERS + 1) % STAGES))


@gluon.jit
def box_of(tiles, full, count, STAGES: gl.constexpr, COLS: gl.constexpr):
    """A box of 64 rows, once it is there."""
    s = count % STAGES
    mbarrier_wait(full.index(s), (count // STAGES) & 1)
    return tiles.index(s).reshape([64, COLS])


@gluon.jit
def _scores(qk, walk, queries, start, first, inner, SOFTCAP: gl.constexpr):
    """Scores of a block of 64 keys from `first` on, for queries from `start` on; hidden only where an edge crosses."""
    if SOFTCAP:
        qk = tanh(qk * inner)
    if (walk.begin(start + 63) > first) | (walk.end(start) < first + 64):
        qk = apply_mask(qk, walk, queries, first, True)
    return qk


@gluon.jit
def _consume(C: gl.constexpr, parts, walk, run, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP: gl.constexpr):
    queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    D: gl.constexpr = walk.D
    DV: gl.constexpr = walk.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, batch, many = _first(walk, number, run)
        start += C * 64
        row = (batch * walk.heads + head).to(gl.int64) * walk.tokens
        for i in range(many):
            first = start + (walk.keys - walk.tokens) - walk.left
            queries = start + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
            zero = gl.zeros([64, 64], gl.float32, SCORES)
            box = tile % walk.Q_STAGES * walk.CONSUMERS + C
            q_tile = q.index(box).reshape([64, D])
            mbarrier_wait(q_full.index(box), (tile // walk.Q_STAGES) & 1)
            low_k = box_of(k, k_full, count + C, walk.STAGES, D)
            low_made = wgmma(q_tile, low_k.permute((1, 0)), zero, use_acc=False, is_async=True)
            mid_k = box_of(k, k_full, count + C + 1, walk.STAGES, D)
            mid_made = wgmma(q_tile, mid_k.permute((1, 0)), zero, use_acc=False, is_async=True)
            high_k = box_of(k, k_full, count + C + 2, walk.STAGES, D)
            high_made = wgmma(q_tile, high_k.permute((1, 0)), zero, use_acc=False, is_async=True)
            low = _scores(wgmma_wait(2, deps=[low_made]), walk, queries, start, first, inner, SOFTCAP)
            mid = _scores(wgmma_wait(1, deps=[mid_made]), walk, queries, start, first + 64, inner, SOFTCAP)
            high = wgmma_wait(0, deps=[high_made])
            _give_back(k_empty, count, i == many - 1, walk.CONSUMERS, walk.STAGES)
            mbarrier_arrive(q_empty.index(box))
            high = _scores(high, walk, queries, start, first + 128, inner, SOFTCAP)
            top = gl.maximum(gl.maximum(gl.max(low, 1), gl.max(mid, 1)), gl.max(high, 1)) * scale
            base = gl.where(top == NOTHING, 0.0, top)[:, None]
            low = gl.exp2(low * scale - base)
            total = gl.sum(low, 1)
            low_v = box_of(v, v_full, count + C, walk.STAGES, DV)
            acc = gl.zeros([64, DV], gl.float32, OUT)
            made = wgmma(gl.convert_layout(low.to(dtype), P), low_v, acc, use_acc=False, is_async=True)
            mid = gl.exp2(mid * scale - base)
            total += gl.sum(mid, 1)
            mid_v = box_of(v, v_full, count + C + 1, walk.STAGES, DV)
            made = wgmma(gl.convert_layout(mid.to(dtype), P), mid_v, made, use_acc=True, is_async=True)
            high = gl.exp2(high * scale - base)
            total += gl.sum(high, 1)
            high_v = box_of(v, v_full, count + C + 2, walk.STAGES, DV)
            made = wgmma(gl.convert_layout(high.to(dtype), P), high_v, made, use_acc=True, is_async=True)
            factor, lse = finish_softmax(top, total, head, sinks_ptr)
            gl.store(lse_ptr + row + queries, lse, mask=queries < walk.tokens)
            acc = wgmma_wait(0, deps=[made])
            _give_back(v_empty, count, i == many - 1, walk.CONSUMERS, walk.STAGES)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
            tma_store_wait(0)
            out.index(C).reshape([64, DV]).store(acc.to(dtype))
            fence_async()
            tma_store(out_desc, corner(batch, head, start, 0, False), out.index(C))
            count += walk.CONSUMERS
            start += walk.BM
            tile += 1
        count += 2
        number = queue.next_tile(turn, tiles, walk.DYNAMIC)
        turn += 1
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group", "run"])
def attention_window_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, counter,
    tokens, keys, heads, blocks, rows, section, left, right, group, run, inner, scale,
    DYNAMIC: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Runs of `run` tiles of 128 queries of one head, of which a head has `blocks`; left + right is at most 128.
    STAGES: boxes of 64 keys, and of values, in flight; at least the four of a tile. The rest is as of
    `attention_fwd_kernel`."""
    CONSUMERS: gl.constexpr = 2
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group, gl.to_tensor(1), gl.to_tensor(0),
        True, True, False, DYNAMIC, False, CONSUMERS * 64, 64, D, DV, CONSUMERS, STAGES, Q_STAGES, 0,
    )  # fmt: skip
    q = smem_tiles(Q_STAGES * CONSUMERS, q_desc)
    k = smem_tiles(STAGES, k_desc)
    v = smem_tiles(STAGES, v_desc)
    out = smem_tiles(CONSUMERS, out_desc)
    queue = tile_queue(CONSUMERS, 1)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (Q_STAGES * CONSUMERS, 1), (Q_STAGES * CONSUMERS, 1), (STAGES, 1), (STAGES, CONSUMERS), (STAGES, 1),
        (STAGES, CONSUMERS),
    )  # fmt: skip
    fence_async()
    parts = (queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_produce, (parts, walk, run, q_desc, k_desc, v_desc, counter)),
            (_consume, (0, parts, walk, run, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP)),
            (_consume, (1, parts, walk, run, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
