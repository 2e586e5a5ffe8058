"""Grouped products of experts in Triton, and the sum over a token's experts, which other backends launch, too.

Legend: S pairs of a token and an expert in the order of experts (`order`), C hidden size, I width inside an expert,
N = 2 I for gated experts. A tile has up to BLOCK_M pairs of one expert (`index.Groups`).
"""

import triton
import triton.language as tl

from tilesmith.device.triton.activations import activate


@triton.jit
def pair_tile(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile of pairs and of columns: GROUP_M tiles down, then the next columns, so that both operands stay in L2."""
    group = index // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return group * GROUP_M + within % height, within // height


@triton.jit
def gate_and_up(z, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """Gate and up of a tile: its columns in turn, or its two halves."""
    if INTERLEAVED:
        return tl.split(tl.reshape(z, (BLOCK_M, HALF, 2)))
    else:
        return tl.split(tl.permute(tl.reshape(z, (BLOCK_M, 2, HALF)), (0, 2, 1)))


@triton.jit
def pre_columns(first, inner, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(columns of the pre-activation in a tile whose activation begins at column `first`, which of them are there)."""
    lane = tl.arange(0, BLOCK_N)
    if not GATED:
        return first + lane, first + lane < inner
    elif INTERLEAVED:
        return 2 * first + lane, first + lane // 2 < inner
    else:
        within = first + lane % (BLOCK_N // 2)
        return tl.where(lane < BLOCK_N // 2, within, inner + within), within < inner


@triton.jit
def product(
    a_tile, weight_ptr, expert, col, there, acc, features, weight_expert, weight_in, weight_out,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + a · weight[e]ᵀ over all features, of the outputs `col`; a_tile: pointers to a's first tile [M, BLOCK_K].

    weight_expert, weight_in, weight_out: strides. there [N]: the outputs that are there. Rows beyond a are those of
    others, which the caller does not store: with EVEN steps no mask changes from one to the next. A clamp instead of
    `there` would hide from the compiler that columns are neighbours.
    """
    k = tl.arange(0, BLOCK_K)
    b_tile = (
        weight_ptr + expert.to(tl.int64) * weight_expert
        + k.to(tl.int64)[:, None] * weight_in + col.to(tl.int64)[None, :] * weight_out
    )  # fmt: skip
    b_step = tl.cast(weight_in, tl.int64) * BLOCK_K
    for start in range(0, features, BLOCK_K):
        if EVEN:
            a, b = tl.load(a_tile), tl.load(b_tile, mask=there[None, :], other=0.0)
        else:
            inside = k < features - start
            a = tl.load(a_tile, mask=inside[None, :], other=0.0)
            b = tl.load(b_tile, mask=inside[:, None] & there[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_tile += BLOCK_K
        b_tile += b_step
    return acc


@triton.jit
def low_rank(
    low_ptr, weight_ptr, row, col, there, acc, rank, weight_expert, weight_row, weight_col, expert,
    EVEN_RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc + low[row] · weight[e]ᵀ, the second product of an adapter; low [S, rank] in the order of experts."""
    k = tl.arange(0, BLOCK_R)
    a_tile = low_ptr + row.to(tl.int64)[:, None] * rank + k[None, :]
    return product(
        a_tile, weight_ptr, expert, col, there, acc, rank, weight_expert, weight_col, weight_row, EVEN_RANK, BLOCK_R
    )


@triton.jit
def low_rank_kernel(
    a_ptr, weight_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    experts, top_k, features, rank, a_row, weight_expert, weight_row, weight_col, scale,
    GATHERS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [S, rank] = scale a[r] · weight[e]ᵀ in the order of experts, the first product of an adapter; a has a row for
    each pair in that order or, with GATHERS, for each token. Rows of pairs without an expert are not written."""
    tiles_n = tl.cdiv(rank, BLOCK_N)
    tile, column = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    expert, first_row = tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile)
    if expert == experts:
        return
    row, col, k = first_row + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside, there = row < tl.load(starts_ptr + expert + 1), col < rank
    source = tl.where(inside, row, first_row)
    if GATHERS:
        source = tl.load(order_ptr + row, mask=inside, other=0) // top_k
    a_tile = a_ptr + source.to(tl.int64)[:, None] * a_row + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = product(
        a_tile, weight_ptr, expert, col, there, acc, features, weight_expert, weight_col, weight_row, EVEN, BLOCK_K
    )
    place = row.to(tl.int64)[:, None] * rank + col[None, :]
    tl.store(out_ptr + place, (acc * scale).to(out_ptr.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def gated(gate, up, limit, alpha, up_offset, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """(act(gate) (up + up_offset), its derivatives by gate and by up)."""
    passes_gate, passes_up = True, True
    if HAS_LIMIT:
        passes_gate, passes_up = gate <= limit, tl.abs(up) <= limit
        # comparisons that a NaN fails, so that it stays
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "silu":
        sigmoid = 1 / (1 + tl.exp(-alpha * gate))
        value = gate * sigmoid
        slope = sigmoid + alpha * value * (1 - sigmoid)
    else:
        value, slope = activate(gate, ACTIVATION)
    by_gate, by_up = slope * (up + up_offset), value
    if HAS_LIMIT:
        by_gate, by_up = tl.where(passes_gate, by_gate, 0.0), tl.where(passes_up, by_up, 0.0)
    return value * (up + up_offset), by_gate, by_up


@triton.jit
def store_activation(
    acc, bias_ptr, pre_ptr, out_ptr, expert, row, out_row, inside, col, there, first, inner, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, KEEPS_PRE: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store acc + bias[e] in the rows `row` of pre, and in the rows `out_row` of out its activation, WIDE columns from
    `first` on."""
    n = inner * 2 if GATED else inner
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * n + col, mask=there, other=0.0).to(tl.float32)[None, :]
    z = acc.to(out_ptr.dtype.element_ty)
    if KEEPS_PRE:
        place = row.to(tl.int64)[:, None] * n + col[None, :]
        tl.store(pre_ptr + place, z, mask=inside[:, None] & there[None, :])
    z = z.to(tl.float32)
    if GATED:
        gate, up = gate_and_up(z, INTERLEAVED, BLOCK_M, WIDE)
        out, _, _ = gated(gate, up, limit, alpha, up_offset, ACTIVATION, HAS_LIMIT)
    else:
        out, _ = activate(z, ACTIVATION)
    out_col = first + tl.arange(0, WIDE)
    place = out_row.to(tl.int64)[:, None] * inner + out_col[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (out_col < inner)[None, :])


@triton.jit
def gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, pre_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    pairs, experts, tiles, top_k, hidden, inner, x_row, weight_expert, weight_row, weight_col, limit, alpha, up_offset,
    low_ptr, lora_ptr, rank, lora_expert, lora_row, lora_col,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, KEEPS_PRE: tl.constexpr, EVEN: tl.constexpr, EVEN_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """out [S, I] = activation(x[token] · weight[e]ᵀ + low[r] · lora[e]ᵀ + bias[e]) and pre [S, N] what was activated,
    0 for pairs without an expert."""
    WIDE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile, column = pair_tile(tl.program_id(0), tiles, tl.cdiv(inner, WIDE), GROUP_M)
    expert, first_row, first = tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile), column * WIDE
    if first_row >= pairs:
        return
    n = inner * 2 if GATED else inner
    row = first_row + tl.arange(0, BLOCK_M)
    col, there = pre_columns(first, inner, GATED, INTERLEAVED, BLOCK_N)
    if expert == experts:
        if KEEPS_PRE:
            place = row.to(tl.int64)[:, None] * n + col[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), pre_ptr.dtype.element_ty)
            tl.store(pre_ptr + place, zeros, mask=(row < pairs)[:, None] & there[None, :])
        return
    inside = row < tl.load(starts_ptr + expert + 1)
    token = tl.load(order_ptr + row, mask=inside, other=0) // top_k
    k = tl.arange(0, BLOCK_K)
    a_tile = x_ptr + token.to(tl.int64)[:, None] * x_row + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = product(
        a_tile, weight_ptr, expert, col, there, acc, hidden, weight_expert, weight_col, weight_row, EVEN, BLOCK_K
    )
    if low_ptr is not None:
        at = tl.where(inside, row, first_row)
        acc = low_rank(
            low_ptr, lora_ptr, at, col, there, acc, rank, lora_expert, lora_row, lora_col, expert, EVEN_RANK, BLOCK_R
        )
    store_activation(
        acc, bias_ptr, pre_ptr, out_ptr, expert, row, row, inside, col, there, first, inner,
        limit, alpha, up_offset, ACTIVATION, GATED, INTERLEAVED, HAS_BIAS, HAS_LIMIT, KEEPS_PRE, BLOCK_M, WIDE,
    )  # fmt: skip


@triton.jit
def rows_kernel(
    a_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    pairs, experts, tiles, features, outputs, weight_expert, weight_out, weight_in,
    low_ptr, lora_ptr, rank, lora_expert, lora_row, lora_col,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, EVEN_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[order[r]] = a[r] · weight[e]ᵀ + low[r] · lora[e]ᵀ + bias[e]; a [S, features] in the order of experts,
    out [S, outputs] in that of pairs. Rows of pairs without an expert are not written."""
    tile, column = pair_tile(tl.program_id(0), tiles, tl.cdiv(outputs, BLOCK_N), GROUP_M)
    expert, first_row = tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile)
    if expert == experts:
        return
    row, col, k = first_row + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside, there = row < tl.load(starts_ptr + expert + 1), col < outputs
    at = tl.where(inside, row, first_row)
    a_tile = a_ptr + at.to(tl.int64)[:, None] * features + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = product(
        a_tile, weight_ptr, expert, col, there, acc, features, weight_expert, weight_in, weight_out, EVEN, BLOCK_K
    )
    if low_ptr is not None:
        acc = low_rank(
            low_ptr, lora_ptr, at, col, there, acc, rank, lora_expert, lora_row, lora_col, expert, EVEN_RANK, BLOCK_R
        )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * outputs + col, mask=there, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order_ptr + row, mask=inside, other=0)
    place = pair.to(tl.int64)[:, None] * outputs + col[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def combine_kernel(
    rows_ptr, place_ptr, indices_ptr, scales_ptr, out_ptr, tokens, experts, top_k, cols,
    HAS_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k scales[t, k] rows[t, k] over the pairs that have an expert; place_ptr: where the row of each pair
    lies, if not in the order of pairs."""
    blocks = tl.cdiv(cols, BLOCK_N)
    token = (tl.program_id(0) // blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(top_k):
        pair = token.to(tl.int64) * top_k + k
        expert = tl.load(indices_ptr + pair, mask=token < tokens, other=-1)
        there = (expert >= 0) & (expert < experts)
        at = pair
        if place_ptr is not None:
            at = tl.load(place_ptr + pair, mask=there, other=0).to(tl.int64)
        place = at[:, None] * cols + col[None, :]
        rows = tl.load(rows_ptr + place, mask=there[:, None] & (col < cols)[None, :], other=0.0).to(tl.float32)
        if HAS_SCALES:
            rows *= tl.load(scales_ptr + pair, mask=there, other=0.0).to(tl.float32)[:, None]
        total += rows
    place = token.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(
        out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (col < cols)[None, :]
    )
