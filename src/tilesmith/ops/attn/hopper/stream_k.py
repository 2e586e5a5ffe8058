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
    tma_store_wait,
)
from tilesmith.ops.attn.hopper.columns import (
    load_tile,
    rest_tile,
    scale_rows,
    start_write,
    wait_products,
    zero_sums,
)
from tilesmith.ops.attn.hopper.forward import TURN, first_block, next_block
from tilesmith.ops.attn.hopper.joined import add_values, check_place, load_values, parts_of, value_tiles
from tilesmith.ops.attn.hopper.softmax import NOTHING, finish_softmax, unpack
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
def _produce(runs, parts, descs, BEHIND: gl.constexpr):
    walk = runs.walk
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc = descs
    q, q_rest, k, k_rest, v, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
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
            load_tile(k_desc, k_rest_desc, place, k_full.index(s), k.index(s), k_rest.index(s), walk.REST, False)
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    mbarrier_wait(q_empty.index(c), (turn & 1) ^ 1)
                    there = batch, head, start + c * 64, 0
                    load_tile(
                        q_desc, q_rest_desc, there, q_full.index(c), q.index(c), q_rest.index(c), walk.REST, False
                    )
            t = count % walk.V_STAGES
            mbarrier_wait(v_empty.index(t), ((count // walk.V_STAGES) & 1) ^ 1)
            load_values(v_desc, v_rest_desc, place, v_full.index(t), v, v_rest, t, walk)
            count += 1
        begin += blocks
        turn += 1
    if BEHIND:  # else the stream would go on before the whole rounds are over
        grid_dependency_wait()


@gluon.jit
def _cells(sums):
    """Where the elements of sums lie, one row behind the other."""
    LAYOUT: gl.constexpr = sums.type.layout
    COLS: gl.constexpr = sums.shape[1]
    col = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] * COLS + col


@gluon.jit
def _joined(sums, others, decay, factor):
    """Sums of two parts, each times a factor of each row."""
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    decay = gl.convert_layout(decay, ROW)[:, None]
    factor = gl.convert_layout(factor, ROW)[:, None]
    return sums * decay + others * factor


@gluon.jit
def _join(C: gl.constexpr, runs, acc, acc_rest, top, total, tile, blocks, first, steps, parts_ptr, met_ptr):
    """Leave in memory what some of a tile's blocks of keys came to. Who comes last puts all of the tile's together, in
    their order. Returns sums of values and their rest, row maxima, row sums, and whether they are the whole tile's."""
    CONSUMERS: gl.constexpr = runs.walk.CONSUMERS
    V_REST: gl.constexpr = runs.walk.V_REST
    DV: gl.constexpr = acc.shape[1]
    ROW: gl.constexpr = top.type.layout
    SUMS: gl.constexpr = 64 * (DV + V_REST)
    ROOM: gl.constexpr = SUMS + 2 * 64
    row = gl.arange(0, 64, ROW)
    cell = _cells(acc)
    rest_cell = cell
    if V_REST > 0:
        rest_cell = 64 * DV + _cells(acc_rest)
    # no two parts have one slot, since from one to the next the CTA or the tile, or both, are the next one
    slot = parts_ptr + ((gl.program_id(0) + tile) * CONSUMERS + C) * ROOM
    gl.store(slot + cell, acc)
    if V_REST > 0:
        gl.store(slot + rest_cell, acc_rest)
    gl.store(slot + SUMS + row, top)
    gl.store(slot + SUMS + 64 + row, total)
    named_barrier("sync", _JOIN + C, 128)
    met_ptr += tile * CONSUMERS + C
    complete = gl.atomic_add(met_ptr, blocks, sem="acq_rel", scope="gpu") + blocks == steps
    if complete:
        gl.store(met_ptr, 0)
        own_acc, own_rest, own_top, own_total = acc, acc_rest, top, total
        acc, acc_rest = zero_sums(DV, V_REST)
        top = gl.full([64], NOTHING, gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        for cta in range(runs.cta_of(first), runs.cta_of(first + steps - 1) + 1):
            # its own part is still in registers (2 heads of 4k: 434 for 427 TFLOP/s)
            other = cta != gl.program_id(0)
            slot = parts_ptr + ((cta + tile) * CONSUMERS + C) * ROOM
            its_acc = gl.load(slot + cell, mask=other, other=0.0, cache_modifier=".cg")
            its_top = gl.load(slot + SUMS + row, mask=other, other=0.0, cache_modifier=".cg")
            its_total = gl.load(slot + SUMS + 64 + row, mask=other, other=0.0, cache_modifier=".cg")
            its_acc = gl.where(other, its_acc, own_acc)
            its_rest = own_rest
            if V_REST > 0:
                its_rest = gl.load(slot + rest_cell, mask=other, other=0.0, cache_modifier=".cg")
                its_rest = gl.where(other, its_rest, own_rest)
            its_top = gl.where(other, its_top, own_top)
            its_total = gl.where(other, its_total, own_total)
            new_top = gl.maximum(top, its_top)
            base = gl.where(new_top == NOTHING, 0.0, new_top)
            decay, factor = gl.exp2(top - base), gl.exp2(its_top - base)
            total = total * decay + its_total * factor
            top = new_top
            acc = _joined(acc, its_acc, decay, factor)
            if V_REST > 0:
                acc_rest = _joined(acc_rest, its_rest, decay, factor)
    return acc, acc_rest, top, total, complete


@gluon.jit
def _consume(C: gl.constexpr, runs, parts, out_descs, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, outs,
             SOFTCAP: gl.constexpr, to, DIM_V: gl.constexpr):  # fmt: skip
    walk = runs.walk
    q, q_rest, k, k_rest, v, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
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
        acc, acc_rest = zero_sums(DV, walk.V_REST)
        q_tile = q.index(C).reshape([64, D])
        q_tile_rest = rest_tile(q_rest, C, q_tile, walk.REST)
        mbarrier_wait(q_full.index(C), turn & 1)
        s = count % walk.STAGES
        mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
        k_tile = k.index(s).reshape([BN, D])
        top, total, p = first_block(
            C, walk, q_tile, k_tile, k_empty.index(s), False, queries, key, inner, scale, SOFTCAP, None,
            q_tile_rest, rest_tile(k_rest, s, k_tile, walk.REST),
        )  # fmt: skip
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
                    k_tile = k.index(s).reshape([BN, D])
                    k_tile_rest = rest_tile(k_rest, s, k_tile, walk.REST)
                    v_tile, v_tile_rest = value_tiles(v, v_rest, t, walk, BN)
                    acc, acc_rest, total, top, p = next_block(
                        C, walk, q_tile, k_tile, v_tile,
                        (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(t), v_phase),
                        (k_empty.index(s), v_empty.index(t)), p_half, acc, total, top, queries, key, inner, scale,
                        phase == 0, SOFTCAP, None, (acc_rest, q_tile_rest, k_tile_rest, v_tile_rest),
                    )  # fmt: skip
        mbarrier_arrive(q_empty.index(C))
        t = count % walk.V_STAGES
        mbarrier_wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        v_tile, v_tile_rest = value_tiles(v, v_rest, t, walk, BN)
        acc_made, rest_made = add_values(unpack(p, dtype, P), v_tile, v_tile_rest, acc, acc_rest, walk)
        count += 1
        acc, acc_rest = wait_products(acc_made, rest_made, walk.V_REST)
        mbarrier_arrive(v_empty.index(t))
        complete = blocks == steps
        if not complete:
            acc, acc_rest, top, total, complete = _join(
                C, runs, acc, acc_rest, top, total, tile, blocks, first, steps, parts_ptr, met_ptr
            )
        if complete:
            factor, lse = finish_softmax(top, total, head, sinks_ptr)
            row = (batch * walk.heads + head).to(gl.int64) * walk.tokens
            gl.store(lse_ptr + row + queries, lse, mask=queries < walk.tokens)
            acc, acc_rest = scale_rows(acc, acc_rest, factor, walk.V_REST)
            tma_store_wait(0)
            start_write(acc, acc_rest, out_descs[0], out_descs[1], outs[0].index(C), outs[1].index(C),
                        (to[0], to[1], walk.tokens), batch, head, start, walk.V_REST, DIM_V, dtype, False)  # fmt: skip
        begin += blocks
        turn += 1
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "group", "whole_tiles", "right"])
def attention_fwd_stream_k_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr,
    tokens, keys, heads, blocks, rows, section, group, whole_tiles, right, inner, scale,
    RIGHT: gl.constexpr, WHOLE: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, SOFTCAP: gl.constexpr, BEHIND: gl.constexpr,
    REST: gl.constexpr = 0, q_rest_desc=None, k_rest_desc=None, V_REST: gl.constexpr = 0, v_rest_desc=None,
    out_rest_desc=None,
    out_ptr=None, out_strides=None, DIM_V: gl.constexpr = 0, V_PART: gl.constexpr = 0,
    V_COLS: gl.constexpr = 0,
):  # fmt: skip
    """As many equal runs as CTAs of the tiles (CONSUMERS * 64 queries of one head) from number `whole_tiles` on, all
    of them with RIGHT. parts_ptr: sums of values, row maxima and row sums of each CTA's part of each tile; met_ptr:
    zeros, the blocks that a tile's consumers have met. BEHIND: launched while `attention_fwd_kernel` makes the other
    tiles. The rest is as there."""
    none = gl.to_tensor(0)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, none, right, group, none, none,
        False, RIGHT, WHOLE, False, False, CONSUMERS * 64, BN, D, DV, CONSUMERS, STAGES, 1, 0, False, V_STAGES,
        False, REST, V_REST, 1, V_PART, V_COLS,
    )  # fmt: skip
    runs = _runs_of(walk, whole_tiles)
    q = smem_tiles(CONSUMERS, q_desc)
    k = smem_tiles(STAGES, k_desc)
    V_TILES: gl.constexpr = V_STAGES * parts_of(DV + V_REST, V_PART) if V_PART > 0 else V_STAGES
    v = smem_tiles(V_TILES, v_desc)
    if V_PART > 0:
        check_place(v)
    out = q
    if out_ptr is None:
        out = smem_tiles(CONSUMERS, out_desc)
    q_rest, k_rest, v_rest, out_rest = q, k, v, out
    if REST > 0:
        q_rest = smem_tiles(CONSUMERS, q_rest_desc)
        k_rest = smem_tiles(STAGES, k_rest_desc)
    if V_REST > 0:
        if V_PART == 0:
            v_rest = smem_tiles(V_STAGES, v_rest_desc)
        if out_ptr is None:
            out_rest = smem_tiles(CONSUMERS, out_rest_desc)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (CONSUMERS, 1), (CONSUMERS, 1), (STAGES, 1), (STAGES, CONSUMERS), (V_STAGES, 1), (V_STAGES, CONSUMERS)
    )
    fence_async()
    parts = (q, q_rest, k, k_rest, v, v_rest, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    descs = (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc)
    out_descs, outs = (out_desc, out_rest_desc), (out, out_rest)
    to = (out_ptr, out_strides)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (runs, parts, descs, BEHIND)),
                (_consume, (0, runs, parts, out_descs, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, outs,
                            SOFTCAP, to, DIM_V)),
                (_consume, (1, runs, parts, out_descs, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, outs,
                            SOFTCAP, to, DIM_V)),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_produce, (runs, parts, descs, BEHIND)),
                (_consume, (0, runs, parts, out_descs, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, outs,
                            SOFTCAP, to, DIM_V)),
                (_consume, (1, runs, parts, out_descs, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, outs,
                            SOFTCAP, to, DIM_V)),
                (_consume, (2, runs, parts, out_descs, lse_ptr, sinks_ptr, parts_ptr, met_ptr, inner, scale, outs,
                            SOFTCAP, to, DIM_V)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip
