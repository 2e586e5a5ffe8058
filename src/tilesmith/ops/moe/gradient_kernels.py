"""The gradients of experts in Triton: of the pre-activations, of the weights of experts, of biases and of the routing
weights. Other backends launch them where they have none of their own. Legend as in `kernels`."""

import triton
import triton.language as tl

from tilesmith.device.triton.activations import activate
from tilesmith.ops.moe.kernels import gate_and_up, gated, low_rank, pair_tile, product


@triton.jit
def _store_pre_gradient(
    acc, scale, pre_ptr, dpre_ptr, scaled_ptr, row, inside, first, inner, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store what `pre_gradient_kernel` does, for a tile acc of g at column `first`; returns Σ g h [BLOCK_M]."""
    col = first + tl.arange(0, BLOCK_N)
    both = inside[:, None] & (col < inner)[None, :]
    place = row.to(tl.int64)[:, None] * inner + col[None, :]
    dtype = dpre_ptr.dtype.element_ty
    if not GATED:
        z = tl.load(pre_ptr + place, mask=both, other=0.0).to(tl.float32)
        h, slope = activate(z, ACTIVATION)
        tl.store(dpre_ptr + place, (acc * scale * slope).to(dtype), mask=both)
    else:
        gate_place = row.to(tl.int64)[:, None] * (2 * inner) + col[None, :]
        wide = 2 * first + tl.arange(0, 2 * BLOCK_N)
        wide_place = row.to(tl.int64)[:, None] * (2 * inner) + wide[None, :]
        wide_both = inside[:, None] & (wide < 2 * inner)[None, :]
        if INTERLEAVED:
            gate, up = gate_and_up(tl.load(pre_ptr + wide_place, mask=wide_both, other=0.0), True, BLOCK_M, BLOCK_N)
            gate, up = gate.to(tl.float32), up.to(tl.float32)
        else:
            gate = tl.load(pre_ptr + gate_place, mask=both, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + gate_place + inner, mask=both, other=0.0).to(tl.float32)
        h, by_gate, by_up = gated(gate, up, limit, alpha, up_offset, ACTIVATION, HAS_LIMIT)
        dgate, dup = (acc * scale * by_gate).to(dtype), (acc * scale * by_up).to(dtype)
        if INTERLEAVED:
            joined = tl.reshape(tl.join(dgate, dup), (BLOCK_M, 2 * BLOCK_N))
            tl.store(dpre_ptr + wide_place, joined, mask=wide_both)
        else:
            tl.store(dpre_ptr + gate_place, dgate, mask=both)
            tl.store(dpre_ptr + gate_place + inner, dup, mask=both)
    tl.store(scaled_ptr + place, (h * scale).to(scaled_ptr.dtype.element_ty), mask=both)
    return tl.sum(tl.where(both, acc * h, 0.0), 1)


@triton.jit
def pre_gradient_kernel(
    dy_ptr, weight_ptr, pre_ptr, scales_ptr, dpre_ptr, scaled_ptr, parts_ptr,
    order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    pairs, experts, tiles, top_k, hidden, inner, dy_row, weight_expert, weight_row, weight_col, limit, alpha, up_offset,
    low_ptr, lora_ptr, rank, lora_expert, lora_row, lora_col,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr,
    EVEN: tl.constexpr, EVEN_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """With g = dy[token] · down[e] + low[r] · lora[e]ᵀ and h the activation of pre: dpre [S, N] = scale g act',
    scaled [S, I] = scale h, and parts [columns of tiles, S] = Σ g h over a tile's columns, in the order of pairs."""
    tile, column = pair_tile(tl.program_id(0), tiles, tl.cdiv(inner, BLOCK_N), GROUP_M)
    expert, first_row, first = tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile), column * BLOCK_N
    if expert == experts:
        return
    row, col, k = first_row + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = row < tl.load(starts_ptr + expert + 1)
    pair = tl.load(order_ptr + row, mask=inside, other=0)
    a_tile = dy_ptr + (pair // top_k).to(tl.int64)[:, None] * dy_row + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = product(
        a_tile, weight_ptr, expert, col, col < inner, acc, hidden, weight_expert, weight_row, weight_col, EVEN, BLOCK_K
    )
    if low_ptr is not None:
        acc = low_rank(
            low_ptr, lora_ptr, tl.where(inside, row, first_row), col, col < inner, acc, rank,
            lora_expert, lora_row, lora_col, expert, EVEN_RANK, BLOCK_R,
        )  # fmt: skip
    scale = tl.load(scales_ptr + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
    # In halves: gate, up and their gradients beside a whole tile of sums spill.
    left, right = gate_and_up(acc, False, BLOCK_M, BLOCK_N // 2)
    part = _store_pre_gradient(
        left, scale, pre_ptr, dpre_ptr, scaled_ptr, row, inside, first, inner, limit, alpha, up_offset,
        ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, BLOCK_M, BLOCK_N // 2,
    )  # fmt: skip
    part += _store_pre_gradient(
        right, scale, pre_ptr, dpre_ptr, scaled_ptr, row, inside, first + BLOCK_N // 2, inner, limit, alpha, up_offset,
        ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, BLOCK_M, BLOCK_N // 2,
    )  # fmt: skip
    tl.store(parts_ptr + column.to(tl.int64) * pairs + pair, part, mask=inside)


@triton.jit
def scale_gradient_kernel(
    parts_ptr, indices_ptr, dy_ptr, bias_ptr, out_ptr, pairs, experts, top_k, parts, hidden, dy_row,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[pair] = Σ parts[., pair] + dy[token] · bias[e]; 0 for pairs without an expert."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(indices_ptr + pair, mask=pair < pairs, other=-1)
    there = (expert >= 0) & (expert < experts)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for i in range(parts):
        total += tl.load(parts_ptr + tl.cast(i, tl.int64) * pairs + pair, mask=there, other=0.0)
    if HAS_BIAS:
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, hidden, BLOCK_N):
            col = first + tl.arange(0, BLOCK_N)
            inside = there[:, None] & (col < hidden)[None, :]
            dy = tl.load(dy_ptr + (pair // top_k)[:, None] * dy_row + col[None, :], mask=inside, other=0.0)
            place = expert.to(tl.int64)[:, None] * hidden + col[None, :]
            bias = tl.load(bias_ptr + place, mask=inside, other=0.0)
            products += dy.to(tl.float32) * bias.to(tl.float32)
        total += tl.sum(products, 1)
    tl.store(out_ptr + pair, total.to(out_ptr.dtype.element_ty), mask=pair < pairs)


@triton.jit
def weight_gradient_kernel(
    left_ptr, right_ptr, out_ptr, order_ptr, starts_ptr, top_k, rows, cols, left_row, right_row,
    out_expert, out_row, out_col,
    GATHERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[e] [rows, cols] = Σ left[r] ⊗ right[r] over the pairs r of expert e. Both are in the order of experts, but
    for the one that GATHERS names, "left" or "right": it belongs to tokens."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile, column = pair_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    row, col = tile * BLOCK_M + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < end
        first, second = at, at
        if GATHERS == "left":
            first = tl.load(order_ptr + at, mask=inside, other=0) // top_k
        elif GATHERS == "right":
            second = tl.load(order_ptr + at, mask=inside, other=0) // top_k
        a = tl.load(
            left_ptr + first.to(tl.int64)[:, None] * left_row + row[None, :],
            mask=inside[:, None] & (row < rows)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            right_ptr + second.to(tl.int64)[:, None] * right_row + col[None, :],
            mask=inside[:, None] & (col < cols)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    place = (
        out_ptr + expert.to(tl.int64) * out_expert
        + row.to(tl.int64)[:, None] * out_row + col.to(tl.int64)[None, :] * out_col
    )  # fmt: skip
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (col < cols)[None, :])


@triton.jit
def bias_gradient_kernel(
    source_ptr, scales_ptr, out_ptr, order_ptr, starts_ptr, top_k, cols, source_row,
    GATHERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] [cols] = Σ source[r] over the pairs of expert e or, with GATHERS, Σ scale source[token]."""
    blocks = tl.cdiv(cols, BLOCK_N)
    expert = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        inside = at < end
        pair = tl.load(order_ptr + at, mask=inside, other=0)
        source = pair // top_k if GATHERS else at
        place = source.to(tl.int64)[:, None] * source_row + col[None, :]
        values = tl.load(source_ptr + place, mask=inside[:, None] & (col < cols)[None, :], other=0.0).to(tl.float32)
        if GATHERS:
            values *= tl.load(scales_ptr + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += values
    tl.store(out_ptr + expert.to(tl.int64) * cols + col, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=col < cols)
