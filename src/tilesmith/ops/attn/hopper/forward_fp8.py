"""Device kernel of attention's forward on e4m3 values on Hopper, in Gluon.

The parts are those of `forward`: a producer, and consumers with 64 queries each that meet the keys from the last
visible block to the first. What 8 bits change:

- The products' operands must have the summed dim in order in memory, so v is read across: [B, G, Dv, S].
- A thread that holds scores of keys 2t and 2t + 1 of every 8 would need, as an operand, those of 4t to 4t + 3 of every
  16. The keys of a tile therefore come in another order, by two loads with a step of 4 tokens, each 2 of every 4: row
  64a + 8g + 2t + j of a tile of 128 holds key 16g + 4t + 2a + j, and p never leaves its thread.
- Sums inside the tensor cores keep about 14 bits.
- p is 256 exp(s - max), which keeps p down to max / 16,384 out of e4m3's subnormal numbers, and it is never a float. An
  e4m3 code is exponent and mantissa side by side, so along a power of two it is linear, and 8 (log2 p + 7) is p's code
  but for that bend: at most 1/16 of a power, on average nothing. Numbers of 16 bits below 2**-14 are integers over
  2**24, so the conversion to these of a score in such units rounds it to its code; it makes 0 of what is below 0.
  The same codes, in a product with ones, are the row's sum. So neither powers nor sums are left, but `lse` is that of
  rounded numbers.
"""

from tilesmith.device.gluon.shim import (
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
from tilesmith.ops.attn.hopper.softmax import LN2, NOTHING
from tilesmith.ops.attn.hopper.walk import Walk, tile_queue

BITS = gl.constexpr(8.0)  # log2 of what p is multiplied by
UNITS = gl.constexpr(2.0**21)  # powers of two in 1: a code is 2**-24, a power has 8 of them
# 120, the code of 256, less 0.457, with which the codes' values are right on average
START = gl.constexpr((120.0 - 0.457) / 2.0**24)
EMPTY = gl.constexpr(float("inf"))  # the mark of a row that has seen no key


@gluon.jit
def _produce(parts, q_desc, k_desc, v_desc, counter):
    walk, queue, q, k_halves, k, v, ones, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, _, _, batch, _ = walk.tile(number, None)
        kv_head = head // walk.group
        _, blocks = walk.span(start)
        for j in range(blocks):
            first = (blocks - 1 - j) * walk.BN
            s = count % walk.STAGES
            phase = (count // walk.STAGES) & 1
            mbarrier_wait(k_empty.index(s), phase ^ 1)
            tma_load(k_desc, (batch, kv_head, first // 4, 0, 0), k_full.index(s), k_halves.index(2 * s))
            tma_load(k_desc, (batch, kv_head, first // 4, 2, 0), k_full.index(s), k_halves.index(2 * s + 1))
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    mbarrier_wait(q_empty.index(c), (turn & 1) ^ 1)
                    tma_load(q_desc, (batch, head, start + c * 64, 0), q_full.index(c), q.index(c))
            mbarrier_wait(v_empty.index(s), phase ^ 1)
            tma_load(v_desc, (batch, kv_head, 0, first), v_full.index(s), v.index(s))
            count += 1
        number = queue.fetch(turn, counter, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit
def pack(p):
    """The codes of p in the order of their keys, four an integer."""
    BN: gl.constexpr = p.shape[1]
    p = gl.permute(gl.reshape(p, [p.shape[0], 2, BN // 16, 4, 2]), (0, 2, 3, 1, 4))
    even, odd = gl.split(gl.reshape(p, [p.shape[0], BN // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 ab, cd; cvt.rn.relu.f16x2.f32 ab, $2, $1; cvt.rn.relu.f16x2.f32 cd, $4, $3; "
        "prmt.b32 $0, ab, cd, 0x6420; }",
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(x, LAYOUT: gl.constexpr):
    """The operand of a product that `pack` packed."""
    a, b = x.to(gl.int8), (x >> 8).to(gl.int8)
    c, d = (x >> 16).to(gl.int8), (x >> 24).to(gl.int8)
    x = gl.join(gl.join(a, c), gl.join(b, d))
    x = gl.reshape(x, [x.shape[0], x.shape[1] * 4])
    return gl.convert_layout(x.to(gl.float8e4nv, bitcast=True), LAYOUT)


@gluon.jit
def _highest(qk):
    """The largest score of each row, in four chains: one would wait for itself 31 times."""
    BN: gl.constexpr = qk.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(qk, [qk.shape[0], 2, BN // 2]), (0, 2, 1)))
    x = gl.maximum(a, b)
    a, b = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, BN // 4]), (0, 2, 1)))
    return gl.convert_layout(gl.max(gl.maximum(a, b), 1), gl.SliceLayout(1, qk.type.layout))


@gluon.jit
def mark_of(top, factor):
    """START - top * factor, rounded down: no score of the row then has a code above 120, however large they are."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 minus; neg.f32 minus, $1; fma.rm.f32 $0, minus, $2, $3; }",
        "=r,r,r,r", [top, factor, gl.full_like(top, START)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _apply_mask(qk, walk, queries, first):
    """Scores of a block that some queries do not see whole. The keys of a row that a thread holds, 4 of every 16, find
    themselves in the bits of one word (see `hopper_forward.before`)."""
    cols = gl.arange(0, walk.BN, gl.SliceLayout(0, qk.type.layout))[None, :]
    GROUPS: gl.constexpr = walk.BN // 16
    if walk.RIGHT:
        limit = (walk.end(queries) - first)[:, None]
    else:
        limit = walk.keys - first
    rest = limit - (cols & 6) * 2
    count = gl.minimum(gl.maximum((rest >> 4) * 4 + gl.minimum(rest & 15, 4), 0), 32)
    word = (1 << count.to(gl.int64)).to(gl.int32) - 1
    bit = (((cols >> 3) & (GROUPS - 1)) << 2) | ((cols // (GROUPS * 8)) << 1) | (cols & 1)
    return gl.where((word & (1 << bit)) != 0, qk, NOTHING)


@gluon.jit
def _consume(
    C: gl.constexpr, parts, out_desc, lse_ptr, q_scale, k_scale, v_scale, q_steps, k_steps, v_steps, scale, out,
    Q_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    walk, queue, q, k_halves, k, v, ones, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = walk.BN
    D: gl.constexpr = walk.D
    DV: gl.constexpr = walk.DV
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    SUMS_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, tokens, keys, batch, _ = walk.tile(number, None)
        _, blocks = walk.span(start)
        start += C * 64
        queries = start + gl.arange(0, 64, ROW)
        acc = gl.zeros([64, DV], gl.float32, OUT)
        zero = gl.zeros([64, BN], gl.float32, SCORES)
        kv_head = head // walk.group
        at = q_scale + batch.to(gl.int64) * q_steps[0] + head.to(gl.int64) * q_steps[1]
        if Q_BLOCKS:
            q_factor = gl.load(at + (queries // 128) * q_steps[2], mask=queries < tokens, other=0.0) * scale
        else:
            q_factor = gl.load(at + queries * q_steps[2], mask=queries < tokens, other=0.0) * scale
        k_at = k_scale + batch.to(gl.int64) * k_steps[0] + kv_head.to(gl.int64) * k_steps[1]
        v_at = v_scale + batch.to(gl.int64) * v_steps[0] + kv_head.to(gl.int64) * v_steps[1]
        k_factor = gl.load(k_at + (blocks - 1) * k_steps[2])
        v_factor = gl.load(v_at + (blocks - 1) * v_steps[2])
        k_next, v_next = k_factor, v_factor
        if BLOCKS:  # a round loads the factors of the next one: it has work until they come
            k_next = gl.load(k_at + gl.maximum(blocks - 2, 0) * k_steps[2])
            v_next = gl.load(v_at + gl.maximum(blocks - 2, 0) * v_steps[2])

        mbarrier_wait(q_full.index(C), turn & 1)
        q_tile = q.index(C).reshape([64, D]).load(gl.DotOperandLayout(0, SCORES, 4))
        s = count % walk.STAGES
        mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
        qk = wgmma(q_tile, k.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = wgmma_wait(0, deps=[qk])
        mbarrier_arrive(k_empty.index(s))
        if not walk.WHOLE:
            qk = _apply_mask(qk, walk, queries, (blocks - 1) * BN)
        factor = q_factor * k_factor
        mark = mark_of(_highest(qk), factor)
        base = mark
        if not walk.WHOLE:
            base = gl.where(mark == EMPTY, 0.0, mark)
        p = pack(gl.fma(qk, factor[:, None], base[:, None]))
        none = gl.zeros([64, 8], gl.float32, SUMS)
        total = none

        # blocks from the end: those that the right edge crosses, then whole ones
        right = gl.minimum(gl.maximum(blocks - gl.maximum(walk.end(start), 0) // BN, 1), blocks)
        for phase in gl.static_range(2):
            if phase == 0:
                lower, upper = 1, right
            else:
                lower, upper = right, blocks
            if phase != 0 or walk.RIGHT:
                for j in range(lower, upper):
                    behind = count % walk.STAGES
                    v_phase = (count // walk.STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    v_before = v_factor
                    k_factor, v_factor = k_next, v_next
                    if BLOCKS:
                        k_next = gl.load(k_at + gl.maximum(blocks - 2 - j, 0) * k_steps[2])
                        v_next = gl.load(v_at + gl.maximum(blocks - 2 - j, 0) * v_steps[2])
                    p_operand = unpack(p, P)
                    mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
                    qk_made = wgmma(q_tile, k.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
                    mbarrier_wait(v_full.index(behind), v_phase)
                    v_tile = v.index(behind).reshape([DV, BN]).permute((1, 0))
                    made = wgmma(p_operand, v_tile, acc, use_acc=True, is_async=True)
                    sums = wgmma(p_operand, ones.permute((1, 0)), none, use_acc=False, is_async=True)
                    qk = wgmma_wait(2, deps=[qk_made])
                    mbarrier_arrive(k_empty.index(s))
                    if phase != 1:
                        qk = _apply_mask(qk, walk, queries, (blocks - 1 - j) * BN)
                    factor = q_factor * k_factor
                    new_mark = gl.minimum(mark, mark_of(_highest(qk), factor))
                    base = new_mark
                    if phase != 1:
                        base = gl.where(new_mark == EMPTY, 0.0, new_mark)
                    new = gl.fma(qk, factor[:, None], base[:, None])
                    decay = gl.exp2((base - mark) * UNITS)
                    mark = new_mark
                    sum_decay = gl.convert_layout(decay, SUMS_ROW)[:, None]
                    if BLOCKS:
                        decay = decay * (v_before / v_factor)
                    made, sums = wgmma_wait(0, deps=[made, sums])
                    total = (total + sums) * sum_decay
                    mbarrier_arrive(v_empty.index(behind))
                    acc = made * gl.convert_layout(decay, OUT_ROW)[:, None]
                    p = pack(new)

        mbarrier_arrive(q_empty.index(C))
        s = count % walk.STAGES
        mbarrier_wait(v_full.index(s), (count // walk.STAGES) & 1)
        v_tile = v.index(s).reshape([DV, BN]).permute((1, 0))
        p_operand = unpack(p, P)
        made = wgmma(p_operand, v_tile, acc, use_acc=True, is_async=True)
        sums = wgmma(p_operand, ones.permute((1, 0)), none, use_acc=False, is_async=True)
        acc, sums = wgmma_wait(0, deps=[made, sums])
        total = gl.convert_layout(gl.max(total + sums, 1), ROW)
        count += 1
        dead = total == 0.0
        total = gl.where(dead, 1.0, total)
        lse = gl.where(dead, NOTHING, ((START - mark) * UNITS + (gl.log2(total) - BITS)) * LN2)
        gl.store(lse_ptr + (batch * walk.heads + head).to(gl.int64) * tokens + queries, lse, mask=queries < tokens)
        mbarrier_arrive(v_empty.index(s))
        acc = acc * gl.convert_layout(v_factor / total, OUT_ROW)[:, None]
        tma_store_wait(0)
        tile = out.index(C)
        tile.reshape([64, DV]).store(acc.to(out.dtype))
        fence_async()
        tma_store(out_desc, (batch, head, start, 0), tile)
        number = queue.next_tile(turn, tiles, walk.DYNAMIC)
        turn += 1
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "right", "group"])
def attention_fp8_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, q_scale, k_scale, v_scale, q_steps, k_steps, v_steps, counter,
    tokens, keys, heads, blocks, rows, section, right, group, scale,
    RIGHT: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr, Q_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries of one head. scale: of q . k, times log2(e) / UNITS. q_scale, k_scale, v_scale: factors of
    batch, head and token or block of 128 tokens, `*_steps` apart; Q_BLOCKS: q's have blocks; BLOCKS: k's and v's do.
    WHOLE: every query sees every key, in whole blocks. D, DV: head dims, up to 64 or 128; columns behind a tensor's own
    are zeros."""
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, gl.to_tensor(0), right, group, gl.to_tensor(1), gl.to_tensor(0),
        False, RIGHT, WHOLE, DYNAMIC, False, 128, BN, D, DV, 2, STAGES, 1, 0,
    )  # fmt: skip
    KEYS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=D, element_bitwidth=8, rank=2)
    q = smem_tiles(2, q_desc)
    k_halves = smem_tiles(2 * STAGES, k_desc)
    k = reinterpret(k_halves, gl.float8e4nv, [STAGES, BN, D], KEYS)
    v = smem_tiles(STAGES, v_desc)
    out = smem_tiles(2, out_desc)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, BN], gl.NVMMASharedLayout(128, 8, rank=2))
    # the code of 1: of two numbers that ptxas converts to codes and doubles to four, it leaves two out
    code = gl.full([8, BN], 0x38, gl.int8, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
    ones.store(code.to(gl.float8e4nv, bitcast=True))
    queue = tile_queue(2, 1)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (2, 1), (2, 1), (STAGES, 2), (STAGES, 2), (STAGES, 1), (STAGES, 2)
    )
    fence_async()
    parts = (walk, queue, q, k_halves, k, v, ones, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_produce, (parts, q_desc, k_desc, v_desc, counter)),
            (_consume, (0, parts, out_desc, lse_ptr, q_scale, k_scale, v_scale, q_steps, k_steps, v_steps, scale, out,
                        Q_BLOCKS, BLOCKS)),
            (_consume, (1, parts, out_desc, lse_ptr, q_scale, k_scale, v_scale, q_steps, k_steps, v_steps, scale, out,
                        Q_BLOCKS, BLOCKS)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
