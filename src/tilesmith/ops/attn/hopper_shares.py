"""The last round of attention's forward on Hopper, in shares of its blocks of keys: device kernel, in Gluon; launcher.

Where nothing is masked, tiles of queries have the same work, and seldom come out even among the programs. So these make
whole rounds (`attention_fwd_kernel`), and what is left over is dealt out among all of them: equal runs of blocks, each
tile's behind those of the one before. Who comes last for a tile puts its parts together, always in the same order.
"""

from torch import Tensor

from tilesmith.engine import launch
from tilesmith.engine.launch import cdiv
from tilesmith.ops.attn.hopper_forward import NOTHING, Walk, finish, first_block, next_block, pack, unpack
from tilesmith.ops.attn.hopper_shared import shares_of
from tilesmith.ops.counters import counter
from tilesmith.ops.gluon_shim import (
    arrive,
    await_launcher,
    barriers,
    bulk_load,
    bulk_store,
    bulk_wait,
    fence,
    gl,
    gluon,
    meet,
    mma,
    mma_wait,
    tiles_of,
    wait,
)

_JOIN = gl.constexpr(12)  # the named barrier of the first consumer's threads; the second's follows


def divided(q: Tensor, k: Tensor, v: Tensor, tiles: int, block_m: int, block_n: int, arch) -> tuple[int, int]:
    """How many of so many tiles are made by one program each, and into how many shares the others are divided.

    None where that does not spare the last programs 14 blocks of keys (`shares_of`): they start anew behind the whole
    rounds, and write and read what shares leave (H200, head dim 128, TFLOP/s at 2k / 4k / 8k / 16k keys, of which
    shares spare 8 / 16 / 31 / 62 blocks: 678 / 718 / 736 / 743, undivided 686 / 714 / 725 / 726). As programs meet
    different keys then, those of the tiles' heads must stay in the L2 cache.
    """
    heads, tokens, keys = q.shape[1], q.shape[2], k.shape[2]
    rest, shares = tiles % arch.sms, shares_of(tiles, cdiv(keys, block_n), 14, arch)
    met = cdiv(rest, cdiv(tokens, block_m) * (heads // k.shape[1]))  # kv heads
    if not shares or 0 < arch.l2 < met * keys * (q.shape[3] + v.shape[3]) * k.element_size():
        return tiles, 0
    return tiles - rest, shares


@gluon.jit
def _cut(begin, end, steps):
    """The tile in which a run of blocks begins, the first block of it, and how many are in the tile."""
    tile = begin // steps
    first = begin - tile * steps
    return tile, first, gl.minimum(end - begin, steps - first)


@gluon.jit
def _produce(parts, q_desc, k_desc, v_desc, undivided, LATE: gl.constexpr):
    walk, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    steps = (walk.keys + walk.BN - 1) // walk.BN
    total = (walk.blocks * walk.rows - undivided) * steps
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    while begin < end:
        tile, from_block, blocks = _cut(begin, end, steps)
        start, head, tokens, keys, batch, _ = walk.tile(undivided + tile, None)
        for j in range(blocks):
            place = (batch, head // walk.group, (from_block + blocks - 1 - j) * walk.BN, 0)
            s = count % walk.STAGES
            wait(k_empty.index(s), ((count // walk.STAGES) & 1) ^ 1)
            bulk_load(k_desc, place, k_full.index(s), k.index(s))
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    wait(q_empty.index(c), (turn & 1) ^ 1)
                    bulk_load(q_desc, (batch, head, start + c * 64, 0), q_full.index(c), q.index(c))
            t = count % walk.V_STAGES
            wait(v_empty.index(t), ((count // walk.V_STAGES) & 1) ^ 1)
            bulk_load(v_desc, place, v_full.index(t), v.index(t))
            count += 1
        begin += blocks
        turn += 1
    if LATE:  # else the stream would go on before the whole rounds are over
        await_launcher()


@gluon.jit
def _join(C: gl.constexpr, walk, acc, top, total, tile, blocks, steps, left_over, parts_ptr, met_ptr):
    """Leave in memory what some of a tile's blocks of keys came to. Who comes last puts all of the tile's together, in
    their order. Returns sums of values, greatest scores, sums of powers, and whether they are the whole tile's."""
    DV: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = top.type.layout
    ROOM: gl.constexpr = 64 * (DV + 2)
    shares = gl.num_programs(0)
    row = gl.arange(0, 64, ROW)
    cell = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None] * DV + gl.arange(0, DV, gl.SliceLayout(0, OUT))[None, :]
    # no two parts share a slot, since from one to the next the share or the tile, or both, are the next one
    slot = parts_ptr + ((gl.program_id(0) + tile) * walk.CONSUMERS + C) * ROOM
    gl.store(slot + cell, acc)
    gl.store(slot + 64 * DV + row, top)
    gl.store(slot + 64 * DV + 64 + row, total)
    meet("sync", _JOIN + C, 128)
    met_ptr += tile * walk.CONSUMERS + C
    complete = gl.atomic_add(met_ptr, blocks, sem="acq_rel", scope="gpu") + blocks == steps
    if complete:
        gl.store(met_ptr, 0)
        first = ((tile * steps + 1) * shares - 1) // (left_over * steps)
        last = ((tile + 1) * steps * shares - 1) // (left_over * steps)
        acc = gl.zeros([64, DV], gl.float32, OUT)
        top = gl.full([64], NOTHING, gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        for share in range(first, last + 1):
            slot = parts_ptr + ((share + tile) * walk.CONSUMERS + C) * ROOM
            its_top = gl.load(slot + 64 * DV + row, cache_modifier=".cg")
            new_top = gl.maximum(top, its_top)
            base = gl.where(new_top == NOTHING, 0.0, new_top)
            decay, factor = gl.exp2(top - base), gl.exp2(its_top - base)
            total = total * decay + gl.load(slot + 64 * DV + 64 + row, cache_modifier=".cg") * factor
            top = new_top
            decay = gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
            factor = gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
            acc = acc * decay + gl.load(slot + cell, cache_modifier=".cg") * factor
    return acc, top, total, complete


@gluon.jit
def _consume(C: gl.constexpr, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, undivided, inner, scale, out,
             SOFTCAP: gl.constexpr):  # fmt: skip
    walk, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = walk.BN
    D: gl.constexpr = walk.D
    DV: gl.constexpr = walk.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    steps = (walk.keys + BN - 1) // BN
    left_over = walk.blocks * walk.rows - undivided
    begin = gl.program_id(0) * (left_over * steps) // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * (left_over * steps) // gl.num_programs(0)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    while begin < end:
        tile, from_block, blocks = _cut(begin, end, steps)
        start, head, tokens, keys, batch, _ = walk.tile(undivided + tile, None)
        start += C * 64
        queries = start + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        first = (from_block + blocks - 1) * BN
        acc = gl.zeros([64, DV], gl.float32, OUT)
        q_tile = q.index(C).reshape([64, D])
        wait(q_full.index(C), turn & 1)
        s = count % walk.STAGES
        wait(k_full.index(s), (count // walk.STAGES) & 1)
        top, total, p = first_block(
            C, walk, q_tile, k.index(s).reshape([BN, D]), k_empty.index(s), False, queries, first, inner, scale, SOFTCAP
        )
        p = pack(p, dtype)
        for _ in range(1, blocks):
            p_half = unpack(p, dtype, P)
            t = count % walk.V_STAGES
            v_phase = (count // walk.V_STAGES) & 1
            count += 1
            s = count % walk.STAGES
            acc, total, top, new = next_block(
                C, walk, q_tile, k.index(s).reshape([BN, D]), v.index(t).reshape([BN, DV]),
                (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(t), v_phase),
                (k_empty.index(s), v_empty.index(t)), p_half, acc, total, top, queries, first, inner, scale,
                False, SOFTCAP,
            )  # fmt: skip
            p = pack(new, dtype)
        arrive(q_empty.index(C))
        t = count % walk.V_STAGES
        wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        acc_made = mma(unpack(p, dtype, P), v.index(t).reshape([BN, DV]), acc, use_acc=True, is_async=True)
        count += 1
        acc = mma_wait(0, deps=[acc_made])
        arrive(v_empty.index(t))
        complete = blocks == steps
        if not complete:
            acc, top, total, complete = _join(
                C, walk, acc, top, total, tile, blocks, steps, left_over, parts_ptr, met_ptr
            )
        if complete:
            factor, lse = finish(top, total, head, sinks_ptr)
            row = (batch * walk.heads + head).to(gl.int64) * tokens
            gl.store(lse_ptr + row + queries, lse, mask=queries < tokens)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
            bulk_wait(0)
            tile_out = out.index(C)
            tile_out.reshape([64, DV]).store(acc.to(dtype))
            fence()
            bulk_store(out_desc, (batch, head, start, 0), tile_out)
        begin += blocks
        turn += 1
    bulk_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "group", "undivided"])
def attention_fwd_shares_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr,
    tokens, keys, heads, blocks, rows, section, group, undivided, inner, scale,
    WHOLE: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, SOFTCAP: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """As many equal shares as programs of the tiles (128 queries of one head) from number `undivided` on. parts_ptr:
    sums of values, greatest scores and sums of powers of each share's part of each tile; met_ptr: zeros, the blocks
    that a tile's consumers have met. LATE: launched while `attention_fwd_kernel` makes the other tiles. The rest is as
    there."""
    none = gl.to_tensor(0)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, none, none, group, none, none,
        False, False, WHOLE, False, False, 128, BN, D, DV, 2, STAGES, 1, 0, False, V_STAGES,
    )  # fmt: skip
    q = tiles_of(2, q_desc)
    k = tiles_of(STAGES, k_desc)
    v = tiles_of(V_STAGES, v_desc)
    out = tiles_of(2, out_desc)
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_full = barriers(V_STAGES, 1)
    v_empty = barriers(V_STAGES, 2)
    fence()
    parts = (walk, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_produce, (parts, q_desc, k_desc, v_desc, undivided, LATE)),
            (_consume, (0, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, undivided, inner, scale, out,
                        SOFTCAP)),
            (_consume, (1, parts, out_desc, lse_ptr, sinks_ptr, parts_ptr, met_ptr, undivided, inner, scale, out,
                        SOFTCAP)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def launch_shares(
    shares: int, undivided: int, descriptors: tuple, lse: Tensor, sinks: Tensor | None, sizes: tuple, factors: tuple,
    arch, **kinds,
) -> None:  # fmt: skip
    """Make the tiles from number `undivided` on, in so many shares. descriptors: of q, k, v and out; sizes: tokens,
    keys, heads of q, tiles of a head, batch * heads, the section, heads of a group."""
    _, _, _, blocks, rows, _, _ = sizes
    parts = lse.new_empty(2 * (shares + blocks * rows - undivided), 64 * (kinds["DV"] + 2))
    launch(
        attention_fwd_shares_kernel, (shares,), *descriptors, lse, sinks, parts, counter(lse.device, 2 * arch.sms),
        *sizes, undivided, *factors, LATE=undivided > 0, num_warps=4, **({"launch_pdl": True} if undivided else {}),
        **kinds,
    )  # fmt: skip
