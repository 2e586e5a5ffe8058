"""The rows of tokens in the order of experts, written once: TMA on Hopper reads rows that lie side by side."""

import triton
import triton.language as tl


@triton.jit
def experts_gather_kernel(
    source_ptr, out_ptr, pre_ptr, order_ptr, starts_ptr, pairs, experts, top_k, cols, wide, source_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[r] = source[order[r] // top_k] for the pairs that have an expert. pre_ptr: the rows [wide] of the other
    pairs in it become 0."""
    blocks = tl.cdiv(cols, BLOCK_N)
    row = (tl.program_id(0) // blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(0) % blocks
    col = block * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.load(starts_ptr + experts)
    inside = row < total
    pair = tl.load(order_ptr + row, mask=inside, other=0)
    both = inside[:, None] & (col < cols)[None, :]
    source = source_ptr + (pair // top_k).to(tl.int64)[:, None] * source_row + col[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], tl.load(source, mask=both), mask=both)
    if pre_ptr is not None:
        if (block == 0) & (tl.max(row, 0) >= total):
            others = (row >= total) & (row < pairs)
            zeros = tl.zeros((BLOCK_M, BLOCK_N), pre_ptr.dtype.element_ty)
            for first in range(0, wide, BLOCK_N):
                at = first + tl.arange(0, BLOCK_N)
                place = row.to(tl.int64)[:, None] * wide + at[None, :]
                tl.store(pre_ptr + place, zeros, mask=others[:, None] & (at < wide)[None, :])


@triton.jit
def experts_place_kernel(order_ptr, place_ptr, pairs, BLOCK: tl.constexpr):
    """place[order[r]] = r."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
    tl.store(place_ptr + pair, row, mask=row < pairs)
