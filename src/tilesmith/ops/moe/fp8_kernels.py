"""Kernels of experts in 8 bits, in Triton: a grouped product of what was cast, and the casts between two products.
Other backends launch the casts. Legend as in `kernels`."""

import triton
import triton.language as tl

from tilesmith.device.triton.rounding import factor_of, magnitude, round8
from tilesmith.ops.moe.kernels import _gate, _tile


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
    tile, column = _tile(tl.program_id(0), tiles, tl.cdiv(outputs, BLOCK_N), GROUP_M)
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
        acc = tl.dot(a, b, acc, input_precision="ieee")
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
    hidden, _, _ = _gate(gate, up, 0.0, 1.0, 0.0, ACTIVATION, False)
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
        factor, inverse = factor_of(tl.max(magnitude(hidden), 1, keep_dims=True).to(tl.float32, bitcast=True), False)
        tl.store(out_ptr + row * inner + lane, round8(hidden, inverse, out_ptr, False, SATURATES), mask=mask)
    else:
        top = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for first in range(0, inner, BLOCK_N):
            mask = inside & (first + lane < inner)
            top = tl.maximum(top, magnitude(_activated(pre_ptr, row, first + lane, inner, mask, ACTIVATION)))
        factor, inverse = factor_of(tl.max(top, 1, keep_dims=True).to(tl.float32, bitcast=True), False)
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
    hidden, by_gate, by_up = _gate(gate, up, 0.0, 1.0, 0.0, ACTIVATION, False)
    dgate, dup = (dhidden * scale * by_gate).to(dtype), (dhidden * scale * by_up).to(dtype)
    part = tl.where(mask, dhidden * hidden, 0.0)
    dgate, dup = tl.where(mask, dgate, 0.0), tl.where(mask, dup, 0.0)
    return dgate, dup, (hidden * scale).to(dtype), part


@triton.jit
def _store_gradients(
    dgate, dup, scaled, inverse, dpre_ptr, scaled_ptr, out_ptr, row, col, inner, mask, SATURATES: tl.constexpr
):
    at = row * (2 * inner) + col
    tl.store(dpre_ptr + at, dgate, mask=mask)
    tl.store(dpre_ptr + at + inner, dup, mask=mask)
    tl.store(scaled_ptr + row * inner + col, scaled, mask=mask)
    tl.store(out_ptr + at, round8(dgate.to(tl.float32), inverse, out_ptr, False, SATURATES), mask=mask)
    tl.store(out_ptr + at + inner, round8(dup.to(tl.float32), inverse, out_ptr, False, SATURATES), mask=mask)


@triton.jit
def experts_gradient_cast_kernel(
    dhidden_ptr, pre_ptr, scales_ptr, dpre_ptr, scaled_ptr, out_ptr, factor_ptr, dscales_ptr, order_ptr, starts_ptr,
    pairs, experts, inner,
    ACTIVATION: tl.constexpr, SATURATES: tl.constexpr, HELD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From dhidden [S, I], the gradient of the activation before its pair's weight: dpre [S, 2 I], the gradient of pre,
    as it is and to out in 8 bits by the factor of each row's largest element; scaled [S, I], the weighted activation;
    dscales, the gradients of the weights in the order of pairs, 0 for those without an expert."""
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = place.to(tl.int64)[:, None]
    lane, inside = tl.arange(0, BLOCK_N)[None, :], row < tl.load(starts_ptr + experts)
    pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
    scale = tl.load(scales_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    if HELD:
        mask = inside & (lane < inner)
        dgate, dup, scaled, part = _gradients(dhidden_ptr, pre_ptr, row, lane, inner, scale, mask, ACTIVATION)
        total = tl.sum(part, 1, keep_dims=True)
        top = tl.maximum(magnitude(dgate), magnitude(dup))
        factor, inverse = factor_of(tl.max(top, 1, keep_dims=True).to(tl.float32, bitcast=True), False)
        _store_gradients(dgate, dup, scaled, inverse, dpre_ptr, scaled_ptr, out_ptr, row, lane, inner, mask, SATURATES)
    else:
        top, parts = tl.zeros((BLOCK_M, BLOCK_N), tl.int32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, inner, BLOCK_N):
            col = first + lane
            mask = inside & (col < inner)
            dgate, dup, _, part = _gradients(dhidden_ptr, pre_ptr, row, col, inner, scale, mask, ACTIVATION)
            top = tl.maximum(top, tl.maximum(magnitude(dgate), magnitude(dup)))
            parts += part
        total = tl.sum(parts, 1, keep_dims=True)
        factor, inverse = factor_of(tl.max(top, 1, keep_dims=True).to(tl.float32, bitcast=True), False)
        for first in range(0, inner, BLOCK_N):
            col = first + lane
            mask = inside & (col < inner)
            dgate, dup, scaled, _ = _gradients(dhidden_ptr, pre_ptr, row, col, inner, scale, mask, ACTIVATION)
            _store_gradients(
                dgate, dup, scaled, inverse, dpre_ptr, scaled_ptr, out_ptr, row, col, inner, mask, SATURATES
            )
    tl.store(factor_ptr + row, factor, mask=inside)
    tl.store(dscales_ptr + pair, tl.where(inside, total, 0.0).to(dscales_ptr.dtype.element_ty), mask=row < pairs)
