"""The rows of tokens in the order of experts, written once: TMA on Hopper reads rows that lie side by side."""

import triton
import triton.language as tl


@triton.jit
def experts_gather_kernel(
    source_ptr, out_ptr, order_ptr, starts_ptr, pairs, experts, top_k, cols, source_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[r] = source[order[r] // top_k] for the pairs that have an expert."""
    blocks = tl.cdiv(cols, BLOCK_N)
    row = (tl.program_id(0) // blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < tl.load(starts_ptr + experts)
    pair = tl.load(order_ptr + row, mask=inside, other=0)
    both = inside[:, None] & (col < cols)[None, :]
    source = source_ptr + (pair // top_k).to(tl.int64)[:, None] * source_row + col[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], tl.load(source, mask=both), mask=both)


@triton.jit
def experts_place_kernel(
    order_ptr, starts_ptr, place_ptr, pre_ptr, pairs, experts, wide, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """place[order[r]] = r, and 0 in the rows [wide] of pre of pairs without an expert, if it is given."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
    tl.store(place_ptr + pair, row, mask=row < pairs)
    if pre_ptr is not None:
        total = tl.load(starts_ptr + experts)
        if (tl.program_id(0) + 1) * BLOCK_M > total:
            zeros = tl.zeros((BLOCK_M, BLOCK_N), pre_ptr.dtype.element_ty)
            without = (row >= total) & (row < pairs)
            for first in range(0, wide, BLOCK_N):
                col = first + tl.arange(0, BLOCK_N)
                at = row.to(tl.int64)[:, None] * wide + col[None, :]
                tl.store(pre_ptr + at, zeros, mask=without[:, None] & (col < wide)[None, :])
