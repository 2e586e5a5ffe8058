"""Stream-K of attention's forward on Hopper: device kernel, in Gluon.

Where nothing is masked, tiles of queries have the same work, and seldom come out even among the CTAs. So these make
whole rounds (`attention_fwd_kernel`), and what is left over is divided among all of them: equal runs of blocks of keys,
each tile's behind those of the one before. So are all tiles where there are fewer than SMs, with a causal mask too. Who
comes last for a tile puts its parts together, always in the same order.
"""

from tilesmith.device.gluon.shim import (
    aggregate,
    fence_async,
    gl,
    gluon,
    grid_dependency_wait,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    smem_tiles,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.forward import TURN, first_block, next_block
from tilesmith.ops.attn.hopper.softmax import NOTHING, finish_softmax, unpack
from tilesmith.ops.attn.hopper.tile_offset import store_rows
from tilesmith.ops.attn.hopper.walk import Walk

_JOIN = gl.constexpr(12)  # the named barrier of the first consumer's threads; the second's follows


@aggregate
class Runs:
    """Which blocks of keys of which tiles a CTA meets: those of tiles from number `whole_tiles` on, one tile's behind
    the other's, in equal runs. blocks: of a head with RIGHT, whose tiles differ, else of a tile. total: of all tiles.
    """

    walk: Walk
    whole_tiles: gl.tensor
    blocks: gl.tensor
    total: gl.tensor

    @gluon.constexpr_function
    def __init__(self, walk, whole_tiles, blocks, total):
        self.walk, self.whole_tiles, self.blocks, self.total = walk, whole_tiles, blocks, total

    @gluon.jit
    def begin(self, cta):
        """The first block of a CTA's run."""
        return cta * self.total // gl.num_programs(0)

    @gluon.jit
    def cta_of(self, block):
        """The CTA whose run a block is in."""
        return ((block + 1) * gl.num_programs(0) - 1) // self.total

    @gluon.jit
    def tile(self, block):
        """The tile that a block is in: its number among these, first query, head and batch row, its first block and how
        many it has."""
        walk = self.walk
        if walk.RIGHT:
            row = block // self.blocks
            first = row * self.blocks
            start = block * 0
            _, steps = walk.span(start)
            while block >= first + steps:
                first += steps
                start += walk.BM
                _, steps = walk.span(start)
            number = row * walk.blocks + start // walk.BM
            batch = row // walk.heads
            head = row - batch * walk.heads
        else:
            number = block // self.blocks
            first, steps = number * self.blocks, self.blocks
            start, head, _, _, batch, _ = walk.tile(self.whole_tiles + number, None)
        return number, start, head, batch, first, steps


@gluon.jit
def _runs_of(walk, whole_tiles):
    blocks = (walk.keys + walk.BN - 1) // walk.BN
    total = (walk.blocks * walk.rows - whole_tiles) * blocks
    if walk.RIGHT:
        blocks = gl.to_tensor(0)
        for i in range(walk.blocks):
            _, steps = walk.span(i * walk.BM)
            blocks += steps
        total = walk.rows * blocks
    return Runs(walk, whole_tiles, blocks, total)


@gluon.jit
def _produce(runs, parts, q_desc, k_desc, v_desc, BEHIND: gl.constexpr):
    walk = runs.walk
    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    begin, end = runs.begin(gl.program_id(0)), runs.begin(gl.program_id(0) + 1)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    while begin < end:
        _, start, head, batch, first, steps = runs.tile(begin)
        blocks = gl.minimum(end, first + steps) - begin
        for j in range(blocks):
            place = (batch, head // walk.group, (begin - first + blocks - 1 - j) * walk.BN, 0)
            s = count % walk.STAGES
            mbarrier_wait(k_empty.index(s), ((count // walk.STAGES) & 1) ^ 1)
            tma_load(k_desc, place, k_full.index(s), k.index(s))
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    mbarrier_wait(q_empty.index(c), (turn & 1) ^ 1)
                    tma_load(q_desc, (batch, head, start + c * 64, 0), q_full.index(c), q.index(c))
            t = count % walk.V_STAGES
            mbarrier_wait(v_empty.index(t), ((count // walk.V_STAGES) & 1) ^ 1)
            tma_load(v_desc, place, v_full.index(t), v.index(t))
            count += 1
        begin += blocks
        turn += 1
    if BEHIND:  # else the stream would go on before the whole rounds are over
        grid_dependency_wait()


@gluon.jit
def _join(C: gl.constexpr, runs, acc, top, total, tile, blocks, first, steps, parts_ptr, met_ptr):
    """Leave in memory what some of a tile's blocks of keys came to. Who comes last puts all of the tile's together, in
    their order. Returns sums of values, row maxima, row sums, and whether they are the whole tile's."""
    CONSUMERS: gl.constexpr = runs.walk.CONSUMERS
    DV: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = top.type.layout
    ROOM: gl.constexpr = 64 * (DV + 2)
    row = gl.arange(0, 64, ROW)
    cell = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None] * DV + gl.arange(0, DV, gl.SliceLayout(0, OUT))[None, :]
    # no two parts have one slot, since from one to the next the CTA or the tile, or both, are the next one
    slot = parts_ptr + ((gl.program_id(0) + tile) * CONSUMERS + C) * ROOM
    gl.store(slot + cell, acc)
    gl.store(slot + 64 * DV + row, top)
    gl.store(slot + 64 * DV + 64 + row, total)
    named_barrier("sync", _JOIN + C, 128)
    met_ptr += tile * CONSUMERS + C
    complete = gl.atomic_add(met_ptr, blocks, sem="acq_rel", scope="gpu") + blocks == steps
    if complete:
        gl.store(met_ptr, 0)
        own_acc, own_top, own_total = acc, top, total
        acc = gl.zeros([64, DV], gl.float32, OUT)
        top = gl.full([64], NOTHING, gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        for cta in range(runs.cta_of(first), runs.cta_of(first + steps - 1) + 1):
            # its own part is still in registers (2 heads of 4k: 434 for 427 TFLOP/s)
            other = cta != gl.program_id(0)
            slot = parts_ptr + ((cta + tile) * CONSUMERS + C) * ROOM
            its_acc = gl.load(slot + cell, mask=other, other=0.0, cache_modifier=".cg")
            its_top = gl.load(slot + 64 * DV + row, mask=other, other=0.0, cache_modifier=".cg")
            its_total = gl.load(slot + 64 * DV + 64 + row, mask=other, other=0.0, cache_modifier=".cg")
            its_acc = gl.where(other, its_acc, own_acc)
            its_top = gl.where(other, its_top, own_top)
            its_total = gl.where(other, its_total, own_total)
            new_top = gl.maximum(top, its_top)
            base = gl.where(new_top == NOTHING, 0.0, new_top)
            decay, factor = gl.exp2(top - base), gl.exp2(its_top - base)
            total = total * decay + its_total * factor
            top = new_top
            decay = gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
            factor = gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
            acc = acc * decay + its_acc * factor
    return acc, top, total, complete


@gluon.jit
def _consume(C: gl.constexpr, runs, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, out,
             SOFTCAP: gl.constexpr, to, DIM_V: gl.constexpr):  # fmt: skip
    walk = runs.walk
    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = walk.BN
    D: gl.constexpr = walk.D
    DV: gl.constexpr = walk.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    begin, end = runs.begin(gl.program_id(0)), runs.begin(gl.program_id(0) + 1)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    if walk.TURNS and C == walk.CONSUMERS - 1:
        named_barrier("arrive", TURN)
    while begin < end:
        tile, start, head, batch, first, steps = runs.tile(begin)
        blocks = gl.minimum(end, first + steps) - begin
        behind = begin - first + blocks  # the tile's blocks up to the last one here, which is met first
        start += C * 64
        queries = start + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        key = (behind - 1) * BN
        acc = gl.zeros([64, DV], gl.float32, OUT)
        q_tile = q.index(C).reshape([64, D])
        mbarrier_wait(q_full.index(C), turn & 1)
        s = count % walk.STAGES
        mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
        top, total, p = first_block(
            C, walk, q_tile, k.index(s).reshape([BN, D]), k_empty.index(s), False, queries, key, inner, scale, SOFTCAP
        )
        # those that the right edge crosses, and whole ones
        right = 1
        if walk.RIGHT:
            right = gl.minimum(gl.maximum(behind - gl.maximum(walk.end(start), 0) // BN, 1), blocks)
        for phase in gl.static_range(2):
            lower, upper = right, blocks
            if phase == 0:
                lower, upper = 1, right
            if phase == 1 or walk.RIGHT:
                for j in range(lower, upper):
                    p_half = unpack(p, dtype, P)
                    t = count % walk.V_STAGES
                    v_phase = (count // walk.V_STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    if phase == 0:
                        key = (behind - 1 - j) * BN
                    acc, total, top, p = next_block(
                        C, walk, q_tile, k.index(s).reshape([BN, D]), v.index(t).reshape([BN, DV]),
                        (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(t), v_phase),
                        (k_empty.index(s), v_empty.index(t)), p_half, acc, total, top, queries, key, inner, scale,
                        phase == 0, SOFTCAP,
                    )  # fmt: skip
        mbarrier_arrive(q_empty.index(C))
        t = count % walk.V_STAGES
        mbarrier_wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        acc_made = wgmma(unpack(p, dtype, P), v.index(t).reshape([BN, DV]), acc, use_acc=True, is_async=True)
        count += 1
        acc = wgmma_wait(0, deps=[acc_made])
        mbarrier_arrive(v_empty.index(t))
        complete = blocks == steps
        if not complete:
            acc, top, total, complete = _join(C, runs, acc, top, total, tile, blocks, first, steps, parts_ptr, met_ptr)
        if complete:
            factor, lse = finish_softmax(top, total, head, sinks_ptr)
            row = (batch * walk.heads + head).to(gl.int64) * walk.tokens
            gl.store(lse_ptr + row + queries, lse, mask=queries < walk.tokens)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
            if to[0] is not None:
                store_rows(acc, to[0], to[1], batch, head, start, walk.tokens, 0, DIM_V, False)
            else:
                tma_store_wait(0)
                tile_out = out.index(C)
                tile_out.reshape([64, DV]).store(acc.to(dtype))
                fence_async()
                tma_store(out_desc, (batch, head, start, 0), tile_out)
        begin += blocks
        turn += 1
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "group", "whole_tiles", "right"])
def attention_fwd_stream_k_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr,
    tokens, keys, heads, blocks, rows, section, group, whole_tiles, right, inner, scale,
    RIGHT: gl.constexpr, WHOLE: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, SOFTCAP: gl.constexpr, BEHIND: gl.constexpr,
    out_ptr=None, out_strides=None, DIM_V: gl.constexpr = 0,
):  # fmt: skip
    """As many equal runs as CTAs of the tiles (CONSUMERS * 64 queries of one head) from number `whole_tiles` on, all
    of them with RIGHT. parts_ptr: sums of values, row maxima and row sums of each CTA's part of each tile; met_ptr:
    zeros, the blocks that a tile's consumers have met. BEHIND: launched while `attention_fwd_kernel` makes the other
    tiles. The rest is as there."""
    none = gl.to_tensor(0)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, none, right, group, none, none,
        False, RIGHT, WHOLE, False, False, CONSUMERS * 64, BN, D, DV, CONSUMERS, STAGES, 1, 0, False, V_STAGES,
    )  # fmt: skip
    runs = _runs_of(walk, whole_tiles)
    q = smem_tiles(CONSUMERS, q_desc)
    k = smem_tiles(STAGES, k_desc)
    v = smem_tiles(V_STAGES, v_desc)
    out = q
    if out_ptr is None:
        out = smem_tiles(CONSUMERS, out_desc)
    q_full = mbarriers(CONSUMERS, 1)
    q_empty = mbarriers(CONSUMERS, 1)
    k_full = mbarriers(STAGES, 1)
    k_empty = mbarriers(STAGES, CONSUMERS)
    v_full = mbarriers(V_STAGES, 1)
    v_empty = mbarriers(V_STAGES, CONSUMERS)
    fence_async()
    parts = (q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    to = (out_ptr, out_strides)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (runs, parts, q_desc, k_desc, v_desc, BEHIND)),
                (_consume, (0, runs, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, out,
                            SOFTCAP, to, DIM_V)),
                (_consume, (1, runs, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, out,
                            SOFTCAP, to, DIM_V)),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_produce, (runs, parts, q_desc, k_desc, v_desc, BEHIND)),
                (_consume, (0, runs, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, out,
                            SOFTCAP, to, DIM_V)),
                (_consume, (1, runs, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, out,
                            SOFTCAP, to, DIM_V)),
                (_consume, (2, runs, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, out,
                            SOFTCAP, to, DIM_V)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip
