"""Kernels of experts in 8 bits, in Triton: a grouped product of what was cast, and the casts between two products.
Other backends launch the casts. Legend as in `kernels`."""

import triton
import triton.language as tl

from tilesmith.device.triton.rounding import factors_of_rows, magnitude, round8, store_turned, word_of
from tilesmith.ops.moe.kernels import gated, pair_tile

IMPRECISE = tl.constexpr(32)  # terms that Hopper's tensor cores add up in 14 bits before they go into a sum in fp32


@triton.jit
def experts_scaled_rows_kernel(
    a_ptr, a_factor_ptr, weight_ptr, weight_factor_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    pairs, experts, tiles, top_k, features, outputs, a_row,
    GATHERS: tl.constexpr, WIDENS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """a · weight[e]ᵀ of the pairs of each expert, times a's factor of the row and the expert's; weight [E, outputs,
    features]. GATHERS: a has a row for each token, and out [S, outputs] is in the order of experts, 0 for pairs without
    one; else a is in the order of experts and out in that of pairs, of which those without an expert are not written.
    WIDENS: the product is of fp32, where there is none of 8 bits."""
    tile, column = pair_tile(tl.program_id(0), tiles, tl.cdiv(outputs, BLOCK_N), GROUP_M)
    expert, first_row = tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile)
    if first_row >= pairs:
        return
    row, col, k = first_row + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    there = col < outputs
    if expert == experts:
        if GATHERS:
            place = row.to(tl.int64)[:, None] * outputs + col[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
            tl.store(out_ptr + place, zeros, mask=(row < pairs)[:, None] & there[None, :])
        return
    inside = row < tl.load(starts_ptr + expert + 1)
    pair = tl.load(order_ptr + row, mask=inside, other=0)
    source = pair // top_k if GATHERS else tl.where(inside, row, first_row)
    scale = tl.load(a_factor_ptr + source) * tl.load(weight_factor_ptr + expert)
    a_tile = a_ptr + source.to(tl.int64)[:, None] * a_row + k[None, :]
    b_tile = weight_ptr + (expert.to(tl.int64) * outputs + col.to(tl.int64)[None, :]) * features + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, features, BLOCK_K):
        if EVEN:
            a, b = tl.load(a_tile), tl.load(b_tile, mask=there[None, :], other=0.0)
        else:
            left = k < features - start
            a = tl.load(a_tile, mask=left[None, :], other=0.0)
            b = tl.load(b_tile, mask=left[:, None] & there[None, :], other=0.0)
        if WIDENS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(
            a, b, acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE if BLOCK_K >= IMPRECISE else BLOCK_K
        )
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    at = row if GATHERS else pair
    place = at.to(tl.int64)[:, None] * outputs + col[None, :]
    out = (acc * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask=inside[:, None] & there[None, :])


@triton.jit
def _load_halves(pre_ptr, row, col, inner, mask):
    """Gate and up of a tile, in fp32."""
    at = pre_ptr + row * (2 * inner) + col
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + inner, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _activated(pre_ptr, row, col, inner, mask, ACTIVATION: tl.constexpr):
    """The activation of a tile, rounded to pre's dtype, in fp32."""
    gate, up = _load_halves(pre_ptr, row, col, inner, mask)
    hidden, _, _ = gated(gate, up, 0.0, 1.0, 0.0, ACTIVATION, False)
    return tl.where(mask, hidden, 0.0).to(pre_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def experts_activation_cast_kernel(
    pre_ptr, out_ptr, factor_ptr, starts_ptr, pairs, experts, inner,
    ACTIVATION: tl.constexpr, SATURATES: tl.constexpr, HELD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [S, I] = the activation of pre [S, 2 I] in 8 bits by the factor of each row's largest element. HELD: a row is
    one block and stays in registers; else it is computed twice."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    lane, inside = tl.arange(0, BLOCK_N)[None, :], row < tl.load(starts_ptr + experts)
    if HELD:
        mask = inside & (lane < inner)
        hidden = _activated(pre_ptr, row, lane, inner, mask, ACTIVATION)
        factor, inverse = factors_of_rows(magnitude(hidden), False)
        tl.store(out_ptr + row * inner + lane, round8(hidden, inverse, out_ptr, False, SATURATES), mask=mask)
    else:
        top = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for first in range(0, inner, BLOCK_N):
            mask = inside & (first + lane < inner)
            top = tl.maximum(top, magnitude(_activated(pre_ptr, row, first + lane, inner, mask, ACTIVATION)))
        factor, inverse = factors_of_rows(top, False)
        for first in range(0, inner, BLOCK_N):
            mask = inside & (first + lane < inner)
            hidden = _activated(pre_ptr, row, first + lane, inner, mask, ACTIVATION)
            tl.store(
                out_ptr + row * inner + first + lane, round8(hidden, inverse, out_ptr, False, SATURATES), mask=mask
            )
    tl.store(factor_ptr + row, factor, mask=inside)


@triton.jit
def _gradients(dhidden_ptr, pre_ptr, row, col, inner, scale, mask, ACTIVATION: tl.constexpr):
    """(gradients of gate and of up, the weighted activation, rounded to pre's dtype; dhidden · activation in fp32)."""
    dtype = pre_ptr.dtype.element_ty
    gate, up = _load_halves(pre_ptr, row, col, inner, mask)
    dhidden = tl.load(dhidden_ptr + row * inner + col, mask=mask, other=0.0).to(tl.float32)
    hidden, by_gate, by_up = gated(gate, up, 0.0, 1.0, 0.0, ACTIVATION, False)
    dgate, dup = (dhidden * scale * by_gate).to(dtype), (dhidden * scale * by_up).to(dtype)
    part = tl.where(mask, dhidden * hidden, 0.0)
    dgate, dup = tl.where(mask, dgate, 0.0), tl.where(mask, dup, 0.0)
    return dgate, dup, (hidden * scale).to(dtype), part


@triton.jit
def _store_gradients(
    dgate, dup, scaled, inverse, scaled_inverse, dpre_ptr, scaled_ptr, d8_ptr, row, col, inner, mask,
    SATURATES: tl.constexpr,
):  # fmt: skip
    """Write a tile of what `experts_gradient_cast_kernel` makes."""
    at = row * (2 * inner) + col
    tl.store(d8_ptr + at, round8(dgate.to(tl.float32), inverse, d8_ptr, False, SATURATES), mask=mask)
    tl.store(d8_ptr + at + inner, round8(dup.to(tl.float32), inverse, d8_ptr, False, SATURATES), mask=mask)
    if dpre_ptr is not None:
        tl.store(dpre_ptr + at, dgate, mask=mask)
        tl.store(dpre_ptr + at + inner, dup, mask=mask)
        tl.store(scaled_ptr + row * inner + col, scaled, mask=mask)
    else:
        scaled8 = round8(scaled.to(tl.float32), scaled_inverse, scaled_ptr, False, SATURATES)
        tl.store(scaled_ptr + row * inner + col, scaled8, mask=mask)


@triton.jit
def experts_gradient_cast_kernel(
    dhidden_ptr, pre_ptr, scales_ptr, dpre_ptr, scaled_ptr, scaled_factor_ptr, d8_ptr, factor_ptr, dscales_ptr,
    order_ptr, starts_ptr, pairs, experts, inner,
    ACTIVATION: tl.constexpr, SATURATES: tl.constexpr, HELD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From dhidden [S, I], the gradient of the activation before its pair's weight: d8 [S, 2 I], the gradient of pre in
    8 bits by the factor of each row's largest element; dscales, the gradients of the weights in the order of pairs, 0
    for those without an expert; dpre [S, 2 I], the gradient of pre as it is, and scaled [S, I], the weighted
    activation. Without dpre (None) scaled is in 8 bits, by factors of its own."""
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = place.to(tl.int64)[:, None]
    lane, inside = tl.arange(0, BLOCK_N)[None, :], row < tl.load(starts_ptr + experts)
    pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
    scale = tl.load(scales_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    if HELD:
        mask = inside & (lane < inner)
        dgate, dup, scaled, part = _gradients(dhidden_ptr, pre_ptr, row, lane, inner, scale, mask, ACTIVATION)
        total = tl.sum(part, 1, keep_dims=True)
        factor, inverse = factors_of_rows(tl.maximum(magnitude(dgate), magnitude(dup)), False)
        scaled_factor, scaled_inverse = factors_of_rows(magnitude(tl.where(mask, scaled, 0.0)), False)
        _store_gradients(
            dgate, dup, scaled, inverse, scaled_inverse, dpre_ptr, scaled_ptr, d8_ptr, row, lane, inner, mask, SATURATES
        )
    else:
        top, parts = tl.zeros((BLOCK_M, BLOCK_N), tl.int32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scaled_top = top
        for first in range(0, inner, BLOCK_N):
            col = first + lane
            mask = inside & (col < inner)
            dgate, dup, scaled, part = _gradients(dhidden_ptr, pre_ptr, row, col, inner, scale, mask, ACTIVATION)
            top = tl.maximum(top, tl.maximum(magnitude(dgate), magnitude(dup)))
            scaled_top = tl.maximum(scaled_top, magnitude(tl.where(mask, scaled, 0.0)))
            parts += part
        total = tl.sum(parts, 1, keep_dims=True)
        factor, inverse = factors_of_rows(top, False)
        scaled_factor, scaled_inverse = factors_of_rows(scaled_top, False)
        for first in range(0, inner, BLOCK_N):
            col = first + lane
            mask = inside & (col < inner)
            dgate, dup, scaled, _ = _gradients(dhidden_ptr, pre_ptr, row, col, inner, scale, mask, ACTIVATION)
            _store_gradients(
                dgate, dup, scaled, inverse, scaled_inverse, dpre_ptr, scaled_ptr, d8_ptr, row, col, inner, mask,
                SATURATES,
            )  # fmt: skip
    tl.store(factor_ptr + row, factor, mask=inside)
    if dpre_ptr is None:
        tl.store(scaled_factor_ptr + row, scaled_factor, mask=inside)
    tl.store(dscales_ptr + pair, tl.where(inside, total, 0.0).to(dscales_ptr.dtype.element_ty), mask=row < pairs)


@triton.jit
def experts_largest_factors_kernel(
    x_ptr, dy_ptr, d_ptr, scaled_ptr, out_ptr, firsts_ptr, order_ptr, starts_ptr, top_k, experts,
    TILE: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """out [4, E] = the largest factor of an expert's rows of x and dy, which belong to tokens, and of d and scaled,
    which are in the order of experts; 1 without rows. firsts [E + 1]: the number of an expert's first tile of up to
    TILE pairs; program `experts` writes the last."""
    mine, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    begins = tl.load(starts_ptr + expert, mask=expert < experts, other=0)
    ends = tl.load(starts_ptr + expert + 1, mask=expert < experts, other=0)
    tl.store(firsts_ptr + mine, tl.sum(tl.where(expert < mine, (ends - begins + TILE - 1) // TILE, 0), 0))
    if mine == experts:
        return
    begin, end = tl.load(starts_ptr + mine), tl.load(starts_ptr + mine + 1)
    x, dy, d, scaled = (
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
    )
    for first in range(begin, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < end
        token = tl.load(order_ptr + row, mask=inside, other=0) // top_k
        x = tl.maximum(x, tl.load(x_ptr + token, mask=inside, other=0.0))
        dy = tl.maximum(dy, tl.load(dy_ptr + token, mask=inside, other=0.0))
        d = tl.maximum(d, tl.load(d_ptr + row, mask=inside, other=0.0))
        scaled = tl.maximum(scaled, tl.load(scaled_ptr + row, mask=inside, other=0.0))
    none = begin == end
    tl.store(out_ptr + mine, tl.where(none, 1.0, tl.max(x, 0)))
    tl.store(out_ptr + experts + mine, tl.where(none, 1.0, tl.max(dy, 0)))
    tl.store(out_ptr + 2 * experts + mine, tl.where(none, 1.0, tl.max(d, 0)))
    tl.store(out_ptr + 3 * experts + mine, tl.where(none, 1.0, tl.max(scaled, 0)))


@triton.jit
def _row_in_8_bits(source, row, col, cols, end, wide, like_ptr, GATHERS: tl.constexpr, SATURATES: tl.constexpr):
    """Rows of a by the factor `wide` in place of their own; 0 from `end` on."""
    a_ptr, factor_ptr, order_ptr, top_k, a_row = source
    at = row
    if GATHERS:
        at = tl.load(order_ptr + row, mask=row < end, other=0) // top_k
    a = tl.load(a_ptr + at.to(tl.int64) * a_row + col, mask=(row < end) & (col < cols), other=0.0)
    ratio = tl.load(factor_ptr + at, mask=row < end, other=0.0) / wide
    return round8(a.to(tl.float32), ratio, like_ptr, False, SATURATES)


@triton.jit
def experts_turned_kernel(
    a_ptr, factor_ptr, wide_ptr, like_ptr, words_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    experts, tiles, top_k, cols, a_row,
    GATHERS: tl.constexpr, SATURATES: tl.constexpr, TILE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out [cols, tiles · TILE], as words of four numbers of 8 bits: the rows of a of each tile of one expert, cast
    again by that expert's factor, transposed, with zeros behind them. like_ptr: the format."""
    blocks = tl.cdiv(cols, BLOCK_COLS)
    tile = tl.program_id(0) // blocks
    expert, first = tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile)
    if expert == experts:
        return
    end, wide = tl.load(starts_ptr + expert + 1), tl.load(wide_ptr + expert)
    quad = tl.arange(0, TILE // 4)[:, None]
    col = ((tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)[None, :]
    row, source = first + 4 * quad, (a_ptr, factor_ptr, order_ptr, top_k, a_row)
    y0 = _row_in_8_bits(source, row, col, cols, end, wide, like_ptr, GATHERS, SATURATES)
    y1 = _row_in_8_bits(source, row + 1, col, cols, end, wide, like_ptr, GATHERS, SATURATES)
    y2 = _row_in_8_bits(source, row + 2, col, cols, end, wide, like_ptr, GATHERS, SATURATES)
    y3 = _row_in_8_bits(source, row + 3, col, cols, end, wide, like_ptr, GATHERS, SATURATES)
    store_turned(words_ptr, word_of(y0, y1, y2, y3), tile * (TILE // 4) + quad, col, tiles * TILE, cols)


@triton.jit
def experts_scaled_weight_gradient_kernel(
    left_ptr, right_ptr, left_factor_ptr, right_factor_ptr, out_ptr, firsts_ptr, rows, cols, room,
    WIDENS: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[e] [rows, cols] = Σ left[., k] ⊗ right[., k] over the places k of an expert's tiles of TILE, times both
    factors of the expert; left [rows, room] and right [cols, room] as `experts_turned_kernel` makes them."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile, column = pair_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    row, col = tile * BLOCK_M + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, TILE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for number in range(tl.load(firsts_ptr + expert), tl.load(firsts_ptr + expert + 1)):
        at = number * TILE + k
        a = tl.load(left_ptr + row.to(tl.int64)[:, None] * room + at[None, :], mask=(row < rows)[:, None], other=0.0)
        b = tl.load(right_ptr + col.to(tl.int64)[None, :] * room + at[:, None], mask=(col < cols)[None, :], other=0.0)
        if WIDENS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE if TILE >= IMPRECISE else TILE)
    scale = tl.load(left_factor_ptr + expert) * tl.load(right_factor_ptr + expert)
    place = out_ptr + (expert.to(tl.int64) * rows + row[:, None]) * cols + col[None, :]
    both = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(place, (acc * scale).to(out_ptr.dtype.element_ty), mask=both)
