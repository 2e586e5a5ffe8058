"""Results of splits of the keys become one, on Hopper: a CTA a row, whose warps share the columns.

It starts when the CTAs that make the results end, so that little but its own code is between these and its end:
H200, 8 / 16 tokens on 8k keys of 64/8 heads in all, 15.7 / 18.3 us; by `decode`'s kernel, of one warp a row and three
times as many instructions, 16.1 / 19.0; by a CTA of a warp for each of four rows 16.2 / 18.7. Of many rows half as
many run at a time, so `decode`'s kernel combines them: 16 tokens on 8 x 8k keys in pages of 16 / 64, 8,192 rows, 92.0 /
89.2 us by this one and 87.5 / 81.9 by that (in two runs, in both of which FlashAttention 4 took 120 / 112).
"""

from tilesmith.device.gluon.shim import gl, gluon, grid_dependency_wait

ROWS = 32  # for each SM, that are few


@gluon.jit(do_not_specialize=["rows", "tokens", "heads", "splits"])
def attention_combine_few_kernel(
    part_out_ptr, part_lse_ptr, sinks_ptr, out_ptr, out_row, out_head, out_token, lse_ptr, rows, tokens, heads, splits,
    DIM_V: gl.constexpr, DV: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """CTA (batch row, query head, token): the mean of the splits' results, weighted by exp(lse)."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, gl.num_warps()], [1, 0])
    row = gl.program_id(0)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, TILE))
    column = gl.arange(0, DV, gl.SliceLayout(0, TILE))
    at = gl.minimum(split, splits - 1).to(gl.int64) * rows + row
    head = row // tokens
    token = row - head * tokens
    batch = head // heads
    head -= batch * heads
    out_at = batch.to(gl.int64) * out_row + head.to(gl.int64) * out_head + token.to(gl.int64) * out_token
    grid_dependency_wait()
    lse = gl.where(split < splits, gl.load(part_lse_ptr + at), float("-inf"))
    part_at = part_out_ptr + (at[:, None] * DIM_V + column[None, :])
    if DIM_V == DV:
        part = gl.load(part_at)
    else:
        part = gl.load(part_at, mask=(column < DIM_V)[None, :] & (split < SPLITS)[:, None], other=0.0)
    top = gl.max(lse, 0)
    weights = gl.exp(lse - gl.where(top == float("-inf"), 0.0, top))
    total = gl.sum(weights, 0)
    out = gl.sum(part.to(gl.float32) * weights[:, None], 0) / gl.where(total == 0.0, 1.0, total)
    lse = top + gl.log(total)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head).to(gl.float32)
        top = gl.maximum(lse, sink)
        shift = gl.where(top == float("-inf"), 0.0, top)
        keys = gl.exp(lse - shift)
        both = keys + gl.exp(sink - shift)
        out *= keys / gl.where(both == 0.0, 1.0, both)
        lse = shift + gl.log(both)
    gl.store(lse_ptr + row, lse)
    gl.store(out_ptr + (out_at + column), out.to(out_ptr.dtype.element_ty), mask=column < DIM_V)
