"""Device kernel of attention's forward on Hopper for head dims above 256, in Gluon.

A CTA owns 64 queries, and each of two consumers (warpgroups) holds 256 of the 512 columns of their result in 128
registers of a thread. The consumers make the scores of every other block of 64 keys, in turn, and give the
probabilities to each other through shared memory, so that one exponentiates while the other's products run. By count a
block has 2,048 cycles of products and takes shared memory for about 2,700 (1,024 for the scores' operands, 640 for the
values and probabilities, 1,024 for what TMA writes), which bounds it at 76 % of the products' peak. Keys are loaded in
parts of 128 columns, each given back when its product is made, since there is no room for two tiles of keys, nor of
values.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    smem_tile,
    smem_tiles,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.softmax import NOTHING, apply_mask, exponentiate, finish_softmax, tanh
from tilesmith.ops.attn.hopper.walk import Walk, ring_place, tile_queue

PROBABILITIES = gl.constexpr(8)  # the named barrier of the first consumer's probabilities; the second's follows
SUMS = gl.constexpr(10)
PARTS = gl.constexpr(4)  # of a tile of keys, 128 columns each


@gluon.jit
def _load_keys(parts, q_desc, k_desc, counter):
    """The warp that loads queries and keys, and draws the tiles."""
    walk, queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.tiles()
    while number < tiles:
        start, head, _, _, batch, _ = walk.tile(number, None)
        begin, blocks = walk.span(start)
        kv_head = head // walk.group
        mbarrier_wait(q_empty.index(0), (turn & 1) ^ 1)
        for j in range(blocks):
            first = begin + (blocks - 1 - j) * 64
            for i in gl.static_range(PARTS):
                if i % 2 == 0:
                    if j == 0:
                        tma_load(q_desc, (batch, head, start, 128 * i), q_full.index(i // 2), q.index(i // 2))
                s, phase = ring_place(count, walk.STAGES)
                mbarrier_wait(k_empty.index(s), phase ^ 1)
                tma_load(k_desc, (batch, kv_head, first, 128 * i), k_full.index(s), k.index(s))
                count += 1
        number = queue.fetch(turn, counter, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit
def _load_values(parts, v_desc):
    """The warp that loads each consumer's half of the values."""
    walk, queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.tiles()
    while number < tiles:
        start, head, _, _, batch, _ = walk.tile(number, None)
        begin, blocks = walk.span(start)
        for j in range(blocks):
            first = begin + (blocks - 1 - j) * 64
            for c in gl.static_range(2):
                mbarrier_wait(v_empty.index(c), (count & 1) ^ 1)
                tma_load(v_desc, (batch, head // walk.group, first, 256 * c), v_full.index(c), v.index(c))
            count += 1
        number = queue.next_tile(turn, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit
def _ask_others(C: gl.constexpr, parts, boxes, number, acc, total):
    """Ask for the product of the other consumer's probabilities of block `number`. Returns it, the row sums in its
    units, and its row maxima."""
    walk, queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    probabilities, tops, decays, sums = boxes
    ROW: gl.constexpr = total.type.layout
    named_barrier("sync", PROBABILITIES + 1 - C)
    decay = decays.index(1 - C).load(ROW)
    top = tops.index(1 - C).load(ROW)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    mbarrier_wait(v_full.index(C), number & 1)
    made = wgmma(probabilities.index(1 - C), v.index(C).reshape([64, 256]), acc, use_acc=True, is_async=True)
    return made, total * decay, top


@gluon.jit
def _own_block(C: gl.constexpr, parts, boxes, k_desc, number, first, queries, acc, total, top, inner, scale,
               FIRST: gl.constexpr, EDGE: gl.constexpr, SOFTCAP: gl.constexpr):  # fmt: skip
    """A block of keys of this consumer's: its scores beside the product of the other one's probabilities of the block
    before, then its probabilities and their product. number: of the block, of all that the CTA meets. FIRST: there is
    no block before. EDGE: some queries do not see all of the keys."""
    walk, queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    probabilities, tops, decays, sums = boxes
    dtype: gl.constexpr = q.dtype
    ACC: gl.constexpr = acc.type.layout
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    qk = gl.zeros([64, 64], gl.float32, SCORES)
    for i in gl.static_range(PARTS):
        s, phase = ring_place(number * PARTS + i, walk.STAGES)
        # The part before in this place may be the other consumer's: until that has come, its barrier shows the phase
        # before, which has this one's parity.
        mbarrier_wait(k_empty.index(s), phase ^ 1)
        mbarrier_wait(k_full.index(s), phase)
        q_part = smem_tile(q, k_desc, i).reshape([64, 128])
        qk = wgmma(q_part, k.index(s).reshape([64, 128]).permute((1, 0)), qk, use_acc=i > 0, is_async=True)
    for i in gl.static_range(PARTS - 1):
        qk = wgmma_wait(PARTS - 1 - i, deps=[qk])
        s, _ = ring_place(number * PARTS + i, walk.STAGES)
        mbarrier_arrive(k_empty.index(s))
    s, _ = ring_place(number * PARTS + PARTS - 1, walk.STAGES)
    if FIRST:
        qk = wgmma_wait(0, deps=[qk])
    else:
        acc, total, top = _ask_others(C, parts, boxes, number - 1, acc, total)
        qk = wgmma_wait(1, deps=[qk])
    mbarrier_arrive(k_empty.index(s))
    if SOFTCAP:
        qk = tanh(qk * inner)
    if EDGE:
        qk = apply_mask(qk, walk, queries, first, walk.LEFT)
    p, decay, new_top = exponentiate(qk, top, scale, EDGE)
    total = total * decay + gl.sum(p, 1)
    if not FIRST:
        # also tells the other consumer, with this one's probabilities, that its own are read
        acc = wgmma_wait(0, deps=[acc])
        mbarrier_arrive(v_empty.index(C))
    p = p.to(dtype)
    probabilities.index(C).store(p)
    tops.index(C).store(new_top)
    decays.index(C).store(decay)
    fence_async()
    named_barrier("arrive", PROBABILITIES + C)
    operand = gl.convert_layout(p, gl.DotOperandLayout(0, ACC, 2))
    if not FIRST:
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None]
    mbarrier_wait(v_full.index(C), number & 1)
    made = wgmma(operand, v.index(C).reshape([64, 256]), acc, use_acc=not FIRST, is_async=True)
    acc, operand = wgmma_wait(0, deps=[made, operand])
    mbarrier_arrive(v_empty.index(C))
    return acc, total, new_top


@gluon.jit
def _consume(C: gl.constexpr, parts, boxes, k_desc, out_desc, lse_ptr, sinks_ptr, inner, scale, SOFTCAP: gl.constexpr):
    walk, queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    probabilities, tops, decays, sums = boxes
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PHASES: gl.constexpr = 3 if walk.LEFT else 2
    met = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.tiles()
    while number < tiles:
        start, head, tokens, _, batch, _ = walk.tile(number, None)
        begin, blocks = walk.span(start)
        queries = start + gl.arange(0, 64, ROW)
        acc = gl.zeros([64, 256], gl.float32, ACC)
        total = gl.zeros([64], gl.float32, ROW)
        top = gl.full([64], NOTHING, gl.float32, ROW)
        mbarrier_wait(q_full.index(0), turn & 1)
        mbarrier_wait(q_full.index(1), turn & 1)
        if C == 0:
            acc, total, top = _own_block(
                C, parts, boxes, k_desc, met, begin + (blocks - 1) * 64, queries, acc, total, top, inner, scale, True,
                not walk.WHOLE, SOFTCAP,
            )  # fmt: skip
        # blocks from the end: those that the right edge crosses, whole ones, those that the left edge crosses
        right = gl.minimum(gl.maximum(blocks - gl.maximum(walk.end(start) - begin, 0) // 64, 1), blocks)
        left = blocks
        if walk.LEFT:
            left = blocks - (walk.begin(start + 63) - begin + 63) // 64
            left = gl.minimum(gl.maximum(left, right), blocks)
        for phase in gl.static_range(PHASES):
            if phase == 0:
                lower, upper = 1, right
            elif phase == 1:
                lower, upper = right, left
            else:
                lower, upper = left, blocks
            if phase != 0 or walk.RIGHT:
                for j in range(lower + ((lower ^ C) & 1), upper, 2):
                    acc, total, top = _own_block(
                        C, parts, boxes, k_desc, met + j, begin + (blocks - 1 - j) * 64, queries, acc, total, top,
                        inner, scale, False, phase != 1, SOFTCAP,
                    )  # fmt: skip
        met += blocks
        if (blocks & 1) == C:  # the last block is the other consumer's
            acc, total, top = _ask_others(C, parts, boxes, met - 1, acc, total)
            acc = wgmma_wait(0, deps=[acc])
            mbarrier_arrive(v_empty.index(C))
        sums.index(C).store(total)
        named_barrier("sync", SUMS)
        factor, lse = finish_softmax(top, total + sums.index(1 - C).load(ROW), head, sinks_ptr)
        if C == 0:
            row = (batch * walk.heads + head).to(gl.int64) * tokens
            gl.store(lse_ptr + row + queries, lse, mask=queries < tokens)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, ACC))[:, None]
        tile = q.index(C)  # nobody reads the queries any more
        tile.reshape([64, 256]).store(acc.to(dtype))
        fence_async()
        tma_store(out_desc, (batch, head, start, 256 * C), tile)
        tma_store_wait(0)
        mbarrier_arrive(q_empty.index(0))
        number = queue.next_tile(turn, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group"])
def attention_fwd_wide_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, counter,
    tokens, keys, heads, blocks, rows, section, left, right, group, inner, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 queries of one head. q_desc, v_desc and out_desc have tiles of 256 columns, k_desc of 128, of which
    STAGES are in flight; columns behind a tensor's own are zeros. The other arguments are those of
    `attention_fwd_kernel`."""
    dtype: gl.constexpr = q_desc.dtype
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group, gl.to_tensor(1), gl.to_tensor(0),
        LEFT, RIGHT, WHOLE, DYNAMIC, False, 64, 64, 512, 512, 2, STAGES, 1, 0,
    )  # fmt: skip
    q = smem_tiles(2, q_desc)
    k = smem_tiles(STAGES, k_desc)
    v = smem_tiles(2, v_desc)
    probabilities = gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    tops = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    queue = tile_queue(3, 1)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (2, 1), (1, 2), (STAGES, 1), (STAGES, 1), (2, 1), (2, 1)
    )
    fence_async()
    parts = (walk, queue, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    boxes = (probabilities, tops, decays, sums)
    gl.warp_specialize(
        [
            (_consume, (0, parts, boxes, k_desc, out_desc, lse_ptr, sinks_ptr, inner, scale, SOFTCAP)),
            (_consume, (1, parts, boxes, k_desc, out_desc, lse_ptr, sinks_ptr, inner, scale, SOFTCAP)),
            (_load_keys, (parts, q_desc, k_desc, counter)),
            (_load_values, (parts, v_desc)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
