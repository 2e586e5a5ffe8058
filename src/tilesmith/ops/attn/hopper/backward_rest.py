"""What a consumer of attention's backward on Hopper (`backward`) does with a block of queries at head dims from 65 to
96, whose products have 80 or 96 columns.

A tile has the 128 columns of its TMA box, of which products take the first 64 and the next REST, 16 or 32: what is
behind them is zeros. The first consumer makes the first 64 columns of dq, the second one those of the rest. The order
of products, waits and barriers is that of `backward_block.late_block`.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_wait,
    named_barrier,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.backward_block import HALF, PARKED, READ, apply_mask, park, row_of
from tilesmith.ops.attn.hopper.columns import add_products, rows_product


@gluon.jit
def _parts_of(tile, REST: gl.constexpr):
    """The first 64 columns of a tile, and the rest."""
    return tile.slice(0, 64, dim=1), tile.slice(64, REST, dim=1)


@gluon.jit
def _start_sum(x, tile, total, rest_total, REST: gl.constexpr):
    """Ask for x . tile, added to what there is: two groups of WGMMA."""
    first, rest = _parts_of(tile, REST)
    return add_products(x, first, rest, total, rest_total, REST)


@gluon.jit
def _start_dq(C: gl.constexpr, count, ds, k, REST: gl.constexpr):
    """Ask for a consumer's columns of a block's dq."""
    COLS: gl.constexpr = 64 if C == 0 else REST
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    k_cols = k.index(count >> 30).reshape([128, 128]).slice(C * 64, COLS, dim=1)  # 0, as in `rest_block`
    return wgmma(ds.index(count & 1), k_cols, gl.zeros([64, COLS], gl.float32, DQ), use_acc=False, is_async=True)


@gluon.jit
def last_rest_dq(C: gl.constexpr, count, ds, k, dq_desc, parking, dq_empty, REST: gl.constexpr):
    """dq of a tile's last block."""
    named_barrier("sync", HALF + (count & 1) * 4 + 1 - C)
    dq = wgmma_wait(0, deps=[_start_dq(C, count, ds, k, REST)])
    park(C, dq, dq_desc, parking, dq_empty, count)


@gluon.jit
def rest_block(
    C: gl.constexpr, parts, count, dk, dk_rest, dv, dv_rest, first, edge, window, limit, outer, ds, dq_desc, parking,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a block of 64 queries adds to dk and dv, and dq of the block before; see `late_block`."""
    gl.static_assert(STAGES == 2)  # a third would need a barrier more
    queue, q, dout, k, v, lse, delta, kv_full, q_full, dout_full, dq_empty = parts
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    s = count % STAGES
    phase = (count // STAGES) & 1
    # 0, but not for the compiler: it would keep the addresses of all parts of these tiles in registers
    none = count >> 30
    k_rows, k_rows_rest = _parts_of(k.index(none).reshape([128, 128]).slice(C * 64, 64, dim=0), REST)
    v_rows, v_rows_rest = _parts_of(v.index(none).reshape([128, 128]).slice(C * 64, 64, dim=0), REST)
    q_tile = q.index(s).reshape([64, 128])
    dout_tile = dout.index(s).reshape([64, 128])
    q_first, q_rest = _parts_of(q_tile, REST)
    dout_first, dout_rest = _parts_of(dout_tile, REST)
    previous = count - 1
    mbarrier_wait(q_full.index(s), phase)
    s_made = rows_product(k_rows, k_rows_rest, q_first, q_rest, zero, REST)
    if not first:
        named_barrier("sync", HALF + (previous & 1) * 4 + 1 - C)
    dq_made = _start_dq(C, previous, ds, k, REST)
    row_lse = row_of(lse.index(s), 64)
    score, dq = wgmma_wait(0, deps=[s_made, dq_made])
    if not first:
        park(C, dq, dq_desc, parking, dq_empty, previous)
    mbarrier_wait(dout_full.index(s), phase)
    dp_made = rows_product(v_rows, v_rows_rest, dout_first, dout_rest, zero, REST)
    p = gl.exp2(score * outer - row_lse[None, :])
    if LEFT or RIGHT or TAIL:
        p = apply_mask(p, edge, window, limit, LEFT, RIGHT, TAIL)
    p_operand = gl.convert_layout(p.to(dtype), P)
    dv_made, dv_rest_made = _start_sum(p_operand, dout_tile, dv, dv_rest, REST)
    row_delta = row_of(delta.index(s), 64)
    dp = wgmma_wait(2, deps=[dp_made])
    d_score = (p * (dp - row_delta[None, :])).to(dtype)
    ds_operand = gl.convert_layout(d_score, P)
    ds.index(count & 1).slice(C * 64, 64, dim=1).permute((1, 0)).store(d_score)
    dv, dv_rest, p_operand = wgmma_wait(0, deps=[dv_made, dv_rest_made, p_operand])
    dk_made, dk_rest_made = _start_sum(ds_operand, q_tile, dk, dk_rest, REST)
    fence_async()
    named_barrier("arrive", HALF + (count & 1) * 4 + C)
    if first:  # dk and dv of the tile before, which are written from where dq will be left
        tma_store_wait(0)
    else:
        named_barrier("arrive", PARKED + (previous & 1), 288)
    dk, dk_rest, ds_operand = wgmma_wait(0, deps=[dk_made, dk_rest_made, ds_operand])
    named_barrier("arrive", READ + s, 288)
    return dk, dk_rest, dv, dv_rest
