"""What a consumer of attention's backward on Hopper (`backward`) does with a block of queries at head dims from 65 to
96, whose products have 80 or 96 columns.

A tile is one of 64 columns and one of the next REST, 16 or 32 (`columns`). The first consumer makes the first 64
columns of dq, the second one those of the rest. The order of products, waits and barriers is that of
`backward_block.late_block`.

By count shared memory is what limits a block: at 80 columns it reads and writes 264 KB, 2,110 cycles at 128 bytes
each, and its products are 1,600. So a consumer keeps its rows of keys in registers, which spares 20 KB of reading.
Those of values have no registers left at 96 columns, and gained nothing at 80 on average.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_wait,
    named_barrier,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import (
    PARKED,
    REST_HALF,
    apply_mask,
    fragments,
    read_barrier,
    row_of,
)
from tilesmith.ops.attn.hopper.columns import add_products, rows_product


@gluon.jit
def _rows(C: gl.constexpr, tile, rest, REST: gl.constexpr):
    """A consumer's rows of a tile of keys or values, and of its rest."""
    first = tile.reshape([128, 64]).slice(C * 64, 64, dim=0)
    return first, rest.reshape([128, REST]).slice(C * 64, 64, dim=0)


@gluon.jit
def hold_keys(C: gl.constexpr, k, k_rest, REST: gl.constexpr):
    """A consumer's rows of a tile of keys, and of its rest, as operands in registers."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    first, rest = _rows(C, k.index(0), k_rest.index(0), REST)
    return first.load(OPERAND), rest.load(OPERAND)


@gluon.jit
def _start_dq(C: gl.constexpr, count, ds, k, k_rest, REST: gl.constexpr):
    """Ask for a consumer's columns of a block's dq."""
    none = count >> 30  # 0, as in `rest_block`
    if C == 0:
        COLS: gl.constexpr = 64
        k_cols = k.index(none).reshape([128, 64])
    else:
        COLS: gl.constexpr = REST
        k_cols = k_rest.index(none).reshape([128, REST])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    return wgmma(ds.index(count & 1), k_cols, gl.zeros([64, COLS], gl.float32, DQ), use_acc=False, is_async=True)


@gluon.jit
def _park(C: gl.constexpr, dq, parking, dq_empty, job):
    """`backward_block.park` in the boxes of a consumer's columns."""
    box = job & 1
    mbarrier_wait(dq_empty.index(box), ((job >> 1) & 1) ^ 1)
    parking[C].index(box).store(fragments(dq))


@gluon.jit
def last_rest_dq(C: gl.constexpr, count, ds, k, k_rest, parking, dq_empty, REST: gl.constexpr):
    """dq of a tile's last block."""
    named_barrier("sync", REST_HALF + (count & 1) * 2 + 1 - C)
    dq = wgmma_wait(0, deps=[_start_dq(C, count, ds, k, k_rest, REST)])
    _park(C, dq, parking, dq_empty, count)


@gluon.jit
def rest_block(
    C: gl.constexpr, parts, rests, keys, count, dk, dk_rest, dv, dv_rest, first, edge, window, limit, outer, ds,
    parking, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a block of 64 queries adds to dk and dv, and dq of the block before; see `late_block`. keys: of
    `hold_keys`."""
    gl.static_assert(STAGES <= 3)  # a fourth would need a barrier more
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    s = count % STAGES
    phase = (count // STAGES) & 1
    # 0, but not for the compiler: it would keep the addresses of all parts of these tiles in registers
    none = count >> 30
    v_rows, v_rows_rest = _rows(C, v.index(none), rests[3].index(none), REST)
    q_tile, q_rest = q.index(s).reshape([64, 64]), rests[0].index(s).reshape([64, REST])
    dout_tile, dout_rest = dout.index(s).reshape([64, 64]), rests[1].index(s).reshape([64, REST])
    previous = count - 1
    mbarrier_wait(q_full.index(s), phase)
    s_made = rows_product(keys[0], keys[1], q_tile, q_rest, zero, REST)
    if not first:
        named_barrier("sync", REST_HALF + (previous & 1) * 2 + 1 - C)
    dq_made = _start_dq(C, previous, ds, k, rests[2], REST)
    row_lse = row_of(lse.index(s), 64)
    score, dq = wgmma_wait(0, deps=[s_made, dq_made])
    if not first:
        _park(C, dq, parking, dq_empty, previous)
    mbarrier_wait(dout_full.index(s), phase)
    dp_made = rows_product(v_rows, v_rows_rest, dout_tile, dout_rest, zero, REST)
    p = gl.exp2(score * outer - row_lse[None, :])
    if LEFT or RIGHT or TAIL:
        p = apply_mask(p, edge, window, limit, LEFT, RIGHT, TAIL)
    p_operand = gl.convert_layout(p.to(dtype), P)
    dv_made, dv_rest_made = add_products(p_operand, dout_tile, dout_rest, dv, dv_rest, REST)
    row_delta = row_of(delta.index(s), 64)
    dp = wgmma_wait(2, deps=[dp_made])
    d_score = (p * (dp - row_delta[None, :])).to(dtype)
    ds_operand = gl.convert_layout(d_score, P)
    ds.index(count & 1).slice(C * 64, 64, dim=1).permute((1, 0)).store(d_score)
    dv, dv_rest, p_operand = wgmma_wait(0, deps=[dv_made, dv_rest_made, p_operand])
    dk_made, dk_rest_made = add_products(ds_operand, q_tile, q_rest, dk, dk_rest, REST)
    fence_async()
    named_barrier("arrive", REST_HALF + (count & 1) * 2 + C)
    if not first:
        named_barrier("arrive", PARKED + (previous & 1), 288)
    dk, dk_rest, ds_operand = wgmma_wait(0, deps=[dk_made, dk_rest_made, ds_operand])
    named_barrier("arrive", read_barrier(s, REST), 288)
    return dk, dk_rest, dv, dv_rest
