"""Consumers of attention's dk and dv on Hopper for tiles that leave registers over, such as of 192 and 128 columns, in
Gluon.

They do what those of `backward_wide` do, with the same producer, barriers and places in shared memory. But each asks
for its first product of a block, scores or dp, together with its second one of the block before, dv or dk, and makes p
or ds of the one while the other runs. So it carries p or ds from block to block, and gives a block's queries and dout
back one block later: at least two are in flight.
"""

from tilesmith.device.gluon.shim import (
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_wait,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import apply_mask
from tilesmith.ops.attn.hopper.backward_walk import BLOCKS, EDGE, KEYS_AT, KV_HEAD, LIMIT, START, members_of
from tilesmith.ops.attn.hopper.columns import add_products, rows_product, wait_products, write_tile
from tilesmith.ops.attn.hopper.softmax import pack, tanh, unpack


@gluon.jit
def _queries(parts, s, D: gl.constexpr, REST: gl.constexpr):
    """The tile of queries at a place in the ring, and its rest."""
    tile = parts[1].index(s).reshape([64, D])
    rest = tile
    if REST > 0:
        rest = parts[2].index(s).reshape([64, REST])
    return tile, rest


@gluon.jit
def _douts(parts, s, DV: gl.constexpr, V_REST: gl.constexpr):
    """The tile of dout at a place in the ring, and its rest."""
    tile = parts[3].index(s).reshape([64, DV])
    rest = tile
    if V_REST > 0:
        rest = parts[4].index(s).reshape([64, V_REST])
    return tile, rest


@gluon.jit
def _make_p(score, row_lse, edge, window, limit, inner, outer, LEFT: gl.constexpr, RIGHT: gl.constexpr,
            TAIL: gl.constexpr, SOFTCAP: gl.constexpr):  # fmt: skip
    """p of a block, and p times the derivative of the softcap's tanh."""
    if SOFTCAP:
        score = tanh(score * inner)
    p = gl.exp2(score * outer - row_lse[None, :])
    if LEFT or RIGHT or TAIL:
        p = apply_mask(p, edge, window, limit, LEFT, RIGHT, TAIL)
    given = p
    if SOFTCAP:
        given = p * (1.0 - score * score)
    return p, given


@gluon.jit
def _give_p(p, swap, count, dtype: gl.constexpr):
    """Leave p of a block to the other consumer. Not beside dv's product, as pack: where p becomes 16-bit numbers before
    that is over, these take registers that the product reads, and ptxas lets each product wait for the one before."""
    p_box, p_full, p_empty = swap
    box = count & 1
    mbarrier_wait(p_empty.index(box), ((count >> 1) & 1) ^ 1)
    p_box.index(box).store(p.to(dtype))
    mbarrier_arrive(p_full.index(box))


@gluon.jit
def _tile_dv(
    parts, swap, count, dv, dv_rest, blocks, last_edge, window, limit, inner, outer,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, DV: gl.constexpr,
    V_REST: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, members,
):  # fmt: skip
    """dv of a tile of keys that meets at least one block."""
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    WAITS: gl.constexpr = 2 if V_REST > 0 else 1  # products of dv behind those of scores
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    k_tile = kept[0].reshape([64, D])
    k_rest = k_tile
    if REST > 0:
        k_rest = kept[1].reshape([64, REST])
    s = count % STAGES
    mbarrier_wait(q_full.index(s), (count // STAGES) & 1)
    q_tile, q_tile_rest = _queries(parts, s, D, REST)
    s_made = rows_product(k_tile, k_rest, q_tile, q_tile_rest, zero, REST)
    row_lse = lse.index(s).load(gl.SliceLayout(0, SCORES))
    score = wgmma_wait(0, deps=[s_made])
    new, given = _make_p(score, row_lse, last_edge, window, limit, inner, outer, LEFT, RIGHT, TAIL, SOFTCAP)
    _give_p(given, swap, count, dtype)
    p = pack(new, dtype)
    for j in range(1, blocks * members):
        p_operand = unpack(p, dtype, P)
        before = count % STAGES
        before_phase = (count // STAGES) & 1
        count += 1
        s = count % STAGES
        mbarrier_wait(q_full.index(s), (count // STAGES) & 1)
        q_tile, q_tile_rest = _queries(parts, s, D, REST)
        s_made = rows_product(k_tile, k_rest, q_tile, q_tile_rest, zero, REST)
        mbarrier_wait(dout_full.index(before), before_phase)
        dout_tile, dout_tile_rest = _douts(parts, before, DV, V_REST)
        dv_made, rest_made = add_products(p_operand, dout_tile, dout_tile_rest, dv, dv_rest, V_REST)
        row_lse = lse.index(s).load(gl.SliceLayout(0, SCORES))
        score = wgmma_wait(WAITS, deps=[s_made])
        i = j if GROUP == 1 else j % blocks
        new, given = _make_p(
            score, row_lse, last_edge - i * 64, window, limit, inner, outer, LEFT, RIGHT, TAIL, SOFTCAP
        )
        dv, dv_rest = wait_products(dv_made, rest_made, V_REST)
        mbarrier_arrive(q_empty.index(before))
        _give_p(given, swap, count, dtype)
        p = pack(new, dtype)
    s = count % STAGES
    mbarrier_wait(dout_full.index(s), (count // STAGES) & 1)
    dout_tile, dout_tile_rest = _douts(parts, s, DV, V_REST)
    p_operand = unpack(p, dtype, P)
    dv_made, rest_made = add_products(p_operand, dout_tile, dout_tile_rest, dv, dv_rest, V_REST)
    dv, dv_rest = wait_products(dv_made, rest_made, V_REST)
    mbarrier_arrive(q_empty.index(s))
    return dv, dv_rest, count + 1


@gluon.jit
def overlapped_values(
    parts, swap, window, dv_desc, dv_rest_desc, room, rest_room, inner, outer,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, DV: gl.constexpr,
    V_REST: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
    to, DIM: gl.constexpr, GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr,
):  # fmt: skip
    """Scores, p and dv. to, DIM: as of `write_tile`."""
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    dtype: gl.constexpr = q.dtype
    DVS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        members = members_of(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT)
        # key c and query i of a block see each other where i + edge - window <= c <= i + edge and c < limit
        last_edge = queue.read(turn, EDGE)
        limit = queue.read(turn, LIMIT)
        dv = gl.zeros([64, DV], gl.float32, DVS)
        dv_rest = gl.to_tensor(0)
        if V_REST > 0:
            dv_rest = gl.zeros([64, V_REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_REST, 16]))
        mbarrier_wait(kv_full.index(0), turn & 1)
        if PACKED:
            if blocks > 0:
                dv, dv_rest, count = _tile_dv(
                    parts, swap, count, dv, dv_rest, blocks, last_edge, window, limit, inner, outer,
                    LEFT, RIGHT, TAIL, D, REST, DV, V_REST, GROUP, STAGES, SOFTCAP, members,
                )  # fmt: skip
        else:
            dv, dv_rest, count = _tile_dv(
                parts, swap, count, dv, dv_rest, blocks, last_edge, window, limit, inner, outer,
                LEFT, RIGHT, TAIL, D, REST, DV, V_REST, GROUP, STAGES, SOFTCAP, members,
            )  # fmt: skip
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
def _make_ds(dp, row_delta, swap, count, SCORES: gl.constexpr):
    """ds of a block."""
    p_box, p_full, p_empty = swap
    box = count & 1
    mbarrier_wait(p_full.index(box), (count >> 1) & 1)
    p = p_box.index(box).load(SCORES)
    mbarrier_arrive(p_empty.index(box))
    return p.to(gl.float32) * (dp - row_delta[None, :])


@gluon.jit
def _tile_dk(
    parts, swap, count, dk, dk_rest, blocks, D: gl.constexpr, REST: gl.constexpr, DV: gl.constexpr,
    V_REST: gl.constexpr, STAGES: gl.constexpr, members,
):  # fmt: skip
    """dk of a tile of keys that meets at least one block."""
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    WAITS: gl.constexpr = 2 if REST > 0 else 1  # products of dk behind those of dp
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    v_tile = kept[2].reshape([64, DV])
    v_rest = v_tile
    if V_REST > 0:
        v_rest = kept[3].reshape([64, V_REST])
    s = count % STAGES
    mbarrier_wait(dout_full.index(s), (count // STAGES) & 1)
    dout_tile, dout_tile_rest = _douts(parts, s, DV, V_REST)
    dp_made = rows_product(v_tile, v_rest, dout_tile, dout_tile_rest, zero, V_REST)
    row_delta = delta.index(s).load(gl.SliceLayout(0, SCORES))
    dp = wgmma_wait(0, deps=[dp_made])
    ds = pack(_make_ds(dp, row_delta, swap, count, SCORES), dtype)
    for _ in range(1, blocks * members):
        ds_operand = unpack(ds, dtype, P)
        before = count % STAGES
        before_phase = (count // STAGES) & 1
        count += 1
        s = count % STAGES
        mbarrier_wait(dout_full.index(s), (count // STAGES) & 1)
        dout_tile, dout_tile_rest = _douts(parts, s, DV, V_REST)
        dp_made = rows_product(v_tile, v_rest, dout_tile, dout_tile_rest, zero, V_REST)
        mbarrier_wait(q_full.index(before), before_phase)
        q_tile, q_tile_rest = _queries(parts, before, D, REST)
        dk_made, rest_made = add_products(ds_operand, q_tile, q_tile_rest, dk, dk_rest, REST)
        row_delta = delta.index(s).load(gl.SliceLayout(0, SCORES))
        dp = wgmma_wait(WAITS, deps=[dp_made])
        new = _make_ds(dp, row_delta, swap, count, SCORES)
        dk, dk_rest = wait_products(dk_made, rest_made, REST)
        mbarrier_arrive(q_empty.index(before))
        ds = pack(new, dtype)
    s = count % STAGES
    mbarrier_wait(q_full.index(s), (count // STAGES) & 1)
    q_tile, q_tile_rest = _queries(parts, s, D, REST)
    ds_operand = unpack(ds, dtype, P)
    dk_made, rest_made = add_products(ds_operand, q_tile, q_tile_rest, dk, dk_rest, REST)
    dk, dk_rest = wait_products(dk_made, rest_made, REST)
    mbarrier_arrive(q_empty.index(s))
    return dk, dk_rest, count + 1


@gluon.jit
def overlapped_keys(
    parts, swap, dk_desc, dk_rest_desc, room, rest_room, scale, D: gl.constexpr, REST: gl.constexpr, DV: gl.constexpr,
    V_REST: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr, to, DIM: gl.constexpr,
    GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr,
):  # fmt: skip
    """dp, ds and dk. to, DIM: as of `write_tile`."""
    queue, q, q_rest, dout, dout_rest, kept, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full = parts
    dtype: gl.constexpr = q.dtype
    DKS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    queue.consumer_wait(turn)
    while queue.read(turn, START) >= 0:
        blocks = queue.read(turn, BLOCKS)
        members = members_of(queue.read(turn, KV_HEAD), GROUP, GROUP_PARTS, GROUP_SHORT)
        dk = gl.zeros([64, D], gl.float32, DKS)
        dk_rest = gl.to_tensor(0)
        if REST > 0:
            dk_rest = gl.zeros([64, REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16]))
        mbarrier_wait(kv_full.index(1), turn & 1)
        if PACKED:
            if blocks > 0:
                dk, dk_rest, count = _tile_dk(
                    parts, swap, count, dk, dk_rest, blocks, D, REST, DV, V_REST, STAGES, members
                )
        else:
            dk, dk_rest, count = _tile_dk(parts, swap, count, dk, dk_rest, blocks, D, REST, DV, V_REST, STAGES, members)
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
