"""Device kernel of attention's backward on Hopper: dk and dv, from those of the parts of each group of query heads."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["begin", "keys", "kv_heads"])
def attention_group_sum_kernel(
    dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, dk_strides, dv_strides, begin, keys, kv_heads,
    GROUP_PARTS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dk (program ids 2: 0) and dv (1) of ROWS keys, from `begin` on (0), of a kv head of a batch row (1). The parts
    [batch, kv heads, GROUP_PARTS, keys, DIM] are added in their order, in fp32. D: columns of a tile, at least DIM and
    VALUE_DIM."""
    row = tl.program_id(1)
    key = begin + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, D)
    batch, head = (row // kv_heads).to(tl.int64), (row % kv_heads).to(tl.int64)
    first = row.to(tl.int64) * GROUP_PARTS * keys
    if tl.program_id(2) == 0:
        dk_ptr += batch * dk_strides[0] + head * dk_strides[1]
        _add_parts(dk_parts_ptr, dk_ptr, first, key, col, keys, dk_strides[2], GROUP_PARTS, DIM)
    else:
        dv_ptr += batch * dv_strides[0] + head * dv_strides[1]
        _add_parts(dv_parts_ptr, dv_ptr, first, key, col, keys, dv_strides[2], GROUP_PARTS, VALUE_DIM)


@triton.jit
def _add_parts(parts_ptr, out_ptr, first, key, col, keys, stride, GROUP_PARTS: tl.constexpr, DIM: tl.constexpr):
    """out[key] = the sum of the rows `key` of parts that have `keys` rows each, of which the first begins at row
    `first`."""
    there = (key < keys)[:, None] & (col < DIM)[None, :]
    rows_ptr = parts_ptr + (first + key.to(tl.int64))[:, None] * DIM + col[None, :]
    total = tl.load(rows_ptr, mask=there, other=0.0).to(tl.float32)
    for part in range(1, GROUP_PARTS):
        total += tl.load(rows_ptr + (part * keys).to(tl.int64) * DIM, mask=there, other=0.0).to(tl.float32)
    out_ptr += key.to(tl.int64)[:, None] * stride + col[None, :]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=there)
