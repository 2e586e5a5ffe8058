"""Device kernel of attention's backward on Hopper: dk and dv of the tiles that stream-K divides, from their parts."""

from tilesmith.device.gluon.shim import gl, gluon
from tilesmith.ops.attn.hopper.backward_walk import numbered


@gluon.jit(
    do_not_specialize=["keys", "kv_heads", "k_blocks", "rows", "section", "whole_tiles", "stream_k_ctas", "steps"]
)
def attention_dkv_stream_k_kernel(
    stream_k_ptr, dk_ptr, dv_ptr, dk_strides, dv_strides, keys, kv_heads, k_blocks, rows, section, whole_tiles,
    stream_k_ctas, steps, DIM: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """dk (program ids 1: 0) and dv (1) of ROWS keys (2) of a tile whose steps stream-K divides."""
    tiles = k_blocks * rows
    total = (tiles - whole_tiles) * steps
    begin = gl.program_id(0) * steps
    block, row = numbered(whole_tiles + gl.program_id(0), k_blocks, section, rows)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 * 4 // D, D // 4], [4, 1], [1, 0])
    key = gl.program_id(2) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    stream_k_ptr += gl.program_id(1) * (128 * D) + (key * D)[:, None] + col[None, :]
    x = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    for run in range(((begin + 1) * stream_k_ctas - 1) // total, ((begin + steps) * stream_k_ctas - 1) // total + 1):
        second = gl.where(run * total // stream_k_ctas < begin, 1, 0)
        x += gl.load(stream_k_ptr + (2 * run + second).to(gl.int64) * (256 * D))
    key += block * 128
    batch = (row // kv_heads).to(gl.int64)
    head = (row % kv_heads).to(gl.int64)
    there = (key < keys)[:, None] & (col < DIM)[None, :]
    key = key.to(gl.int64)
    if gl.program_id(1) == 0:
        rows_ptr = dk_ptr + batch * dk_strides[0] + head * dk_strides[1] + (key * dk_strides[2])[:, None]
        gl.store(rows_ptr + col[None, :], x.to(dk_ptr.dtype.element_ty), mask=there)
    else:
        rows_ptr = dv_ptr + batch * dv_strides[0] + head * dv_strides[1] + (key * dv_strides[2])[:, None]
        gl.store(rows_ptr + col[None, :], x.to(dv_ptr.dtype.element_ty), mask=there)
