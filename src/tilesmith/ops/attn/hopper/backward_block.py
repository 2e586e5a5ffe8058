"""How a consumer of attention's backward on Hopper (`hopper_backward`) processes a block of queries where dq is made
late, beside the scores of the next block; and what all blocks have in common: a mask, the rows' numbers, a place
for dq, the barriers.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_wait,
    named_barrier,
    reinterpret,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.softmax import in_mask, mask_before

# named barriers: a tile's keys and its values are read; both halves of ds are there; a tile of queries is read, by its
# place; dq is parked, by its box
KEYS_READ, VALUES_READ, HALVES, READ, PARKED = (gl.constexpr(i) for i in (7, 8, 9, 10, 14))
# late, where values are given back with keys and two tiles of queries are in flight: a consumer's half of ds is there
# (and dq of the block before read), by its place and consumer: 8, 9, 12, 13
HALF = VALUES_READ
# where products have 80 or 96 columns keys are given back by a barrier in shared memory: a tile of queries is read, of
# which three may be in flight; a consumer's half of ds is there
REST_READ, REST_HALF = gl.constexpr(7), gl.constexpr(10)


@gluon.jit
def apply_mask(x, edge, window, limit, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr):
    """Zeros where a key (row of x) and a query of a block (column) do not see each other: they do where query + edge -
    window <= key <= query + edge and key < limit."""
    crossed = edge < -(1 << 30)
    if TAIL:
        crossed = crossed | (limit < 64)
    if RIGHT:
        crossed = crossed | (edge < 63)
    if LEFT:
        crossed = crossed | (edge - window > 1 - x.shape[1])
    if crossed:
        key = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))[:, None]
        query = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
        word = gl.where(key < limit if TAIL else key >= 0, -1, 0)
        if RIGHT:
            word = word & ~mask_before(key - edge, query)
        if LEFT:
            word = word & mask_before(key - edge + window + 1, query)
        x = gl.where(in_mask(word, query), x, 0.0)
    return x


@gluon.jit
def read_barrier(s, REST: gl.constexpr):
    """The named barrier of the tile of queries at place s, which tells that it is read."""
    if REST > 0:
        named = REST_READ + s
    else:
        named = READ + s
    return named


@gluon.jit
def row_of(numbers, BQ: gl.constexpr):
    """A number a query, as the scores have their columns. They lie so that the four lanes read 16 bytes each side by
    side (`attention_rows_kernel`)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    SIXTEENS: gl.constexpr = [[1, 0, 0, 0], [2, 0, 0, 0]] if BQ == 64 else [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 1, 0]] + SIXTEENS,
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]], [], [BQ // 16, 4, 2, 2],
    )  # fmt: skip
    x = reinterpret(numbers, gl.float32, [BQ // 16, 4, 2, 2], PLAIN).load(LANES)
    x = gl.reshape(gl.permute(x, (0, 2, 1, 3)), [BQ])
    return gl.convert_layout(x, gl.SliceLayout(0, SCORES))


@gluon.jit
def park(C: gl.constexpr, dq, dq_desc, parking, dq_empty, job):
    """Leave a block's dq to the warp that adds it, in the order of the registers: a thread stores 16 bytes at once. It
    is told behind the fence of the next block's ds, or the tile's last one."""
    box = job & 1
    mbarrier_wait(dq_empty.index(box), ((job >> 1) & 1) ^ 1)
    ROWS: gl.constexpr = dq.shape[1] // 4
    parked = reinterpret(parking.index(box * 2 + C), gl.float32, [ROWS, 256], dq_desc.layout)
    parked.store(fragments(dq))


@gluon.jit
def fragments(dq):
    """dq in the order of its registers: a thread has 4 numbers side by side."""
    x = gl.reshape(dq, [4, 2, 8, dq.shape[1] // 8, 4, 2])
    x = gl.permute(x, (3, 0, 2, 4, 1, 5))
    return gl.reshape(x, [dq.shape[1] // 4, 256])


@gluon.jit
def _start_dq(C: gl.constexpr, count, ds, k, BQ: gl.constexpr, D: gl.constexpr):
    """Ask for a consumer's half of the columns of a block's dq."""
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    k_cols = k.index(count >> 30).reshape([128, D]).slice(C * (D // 2), D // 2, dim=1)  # 0, as in `late_block`
    return wgmma(ds.index(count & 1), k_cols, gl.zeros([BQ, D // 2], gl.float32, DQ), use_acc=False, is_async=True)


@gluon.jit
def last_dq(C: gl.constexpr, count, ds, k, dq_desc, parking, dq_empty, BQ: gl.constexpr, D: gl.constexpr):
    """dq of a tile's last block."""
    named_barrier("sync", HALF + (count & 1) * 4 + 1 - C)
    dq = wgmma_wait(0, deps=[_start_dq(C, count, ds, k, BQ, D)])
    park(C, dq, dq_desc, parking, dq_empty, count)


@gluon.jit
def late_block(
    C: gl.constexpr, parts, count, dk, dv, first, edge, window, limit, outer, ds, dq_desc, parking,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What a block of 64 queries adds to dk and dv, and dq of the block before. Key c and query i of it see each other
    where i + edge - window <= c <= i + edge and c < limit. first: of the tile; dq is asked for all the same, of
    whatever lies there, and left out when it is parked.

    A consumer needs the other one's half of ds half a block later than if it made dq at once, and seldom waits for it.
    dp is asked for when dq has left the registers; powers are taken beside it, and ds is made beside dv."""
    gl.static_assert(STAGES == 2)  # a third would need a barrier more
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zero = gl.zeros([64, BQ], gl.float32, SCORES)
    s = count % STAGES
    phase = (count // STAGES) & 1
    # 0, but not for the compiler: it would keep the addresses of all parts of these tiles in registers
    none = count >> 30
    k_rows = k.index(none).reshape([128, D]).slice(C * 64, 64, dim=0)
    v_rows = v.index(none).reshape([128, D]).slice(C * 64, 64, dim=0)
    q_tile = q.index(s).reshape([BQ, D])
    dout_tile = dout.index(s).reshape([BQ, D])
    previous = count - 1
    mbarrier_wait(q_full.index(s), phase)
    s_made = wgmma(k_rows, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not first:
        named_barrier("sync", HALF + (previous & 1) * 4 + 1 - C)
    dq_made = _start_dq(C, previous, ds, k, BQ, D)
    row_lse = row_of(lse.index(s), BQ)
    score, dq = wgmma_wait(0, deps=[s_made, dq_made])
    if not first:
        park(C, dq, dq_desc, parking, dq_empty, previous)
    mbarrier_wait(dout_full.index(s), phase)
    dp_made = wgmma(v_rows, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    p = gl.exp2(score * outer - row_lse[None, :])
    if LEFT or RIGHT or TAIL:
        p = apply_mask(p, edge, window, limit, LEFT, RIGHT, TAIL)
    p_operand = gl.convert_layout(p.to(dtype), P)
    dv_made = wgmma(p_operand, dout_tile, dv, use_acc=True, is_async=True)
    row_delta = row_of(delta.index(s), BQ)
    dp = wgmma_wait(1, deps=[dp_made])
    d_score = (p * (dp - row_delta[None, :])).to(dtype)
    ds_operand = gl.convert_layout(d_score, P)
    ds.index(count & 1).slice(C * 64, 64, dim=1).permute((1, 0)).store(d_score)
    dv, p_operand = wgmma_wait(0, deps=[dv_made, p_operand])
    dk_made = wgmma(ds_operand, q_tile, dk, use_acc=True, is_async=True)
    fence_async()
    named_barrier("arrive", HALF + (count & 1) * 4 + C)
    if first:  # dk and dv of the tile before, which are written from where dq will be left
        tma_store_wait(0)
    else:
        named_barrier("arrive", PARKED + (previous & 1), 288)
    dk, ds_operand = wgmma_wait(0, deps=[dk_made, ds_operand])
    named_barrier("arrive", READ + s, 288)
    return dk, dv
