"""Experts for few pairs, as in decoding: kernels that find their rows in the indices themselves.

Such calls take as long as the weights take to be read, and each launch that waits for another costs microseconds in
which nothing is read. So no index is built: a program compares all pairs with its own. Legend as in `ops.moe.kernels`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import dense, rows
from tilesmith.device.triton.activations import activate
from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import steps
from tilesmith.ops.moe.index import expert_of
from tilesmith.ops.moe.kernels import gated, pre_columns, product, store_activation
from tilesmith.ops.moe.plan import FewConfig


@triton.jit
def _tile_of(indices_ptr, pair, pairs, experts, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr):
    """(expert, first row in the order of experts, pairs of the rows, number of rows) of the tile that a pair heads:
    every BLOCK_M-th pair of an expert does; of the others the number is 0."""
    at = tl.arange(0, PAIRS)
    found = tl.where(at < pairs, expert_of(indices_ptr, at, pairs, experts), experts + 1)
    expert = tl.sum(tl.where(at == pair, found, 0), 0)
    same = (found == expert).to(tl.int32)
    rank = tl.cumsum(same, 0) - same
    mine = tl.sum(tl.where(at == pair, rank, 0), 0)
    first_row = tl.sum((found < expert).to(tl.int32), 0) + mine
    wanted = (same[None, :] == 1) & (rank[None, :] == mine + tl.arange(0, BLOCK_M)[:, None])
    members = tl.sum(tl.where(wanted, at[None, :], 0), 1)
    length = tl.where(mine % BLOCK_M == 0, tl.minimum(tl.sum(same, 0) - mine, BLOCK_M), 0)
    return expert, first_row, members, length


@triton.jit(do_not_specialize=["pairs"])
def few_gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, pre_ptr, out_ptr, indices_ptr,
    pairs, experts, top_k, hidden, inner, x_row, weight_expert, weight_row, weight_col, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, KEEPS_PRE: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """As `gate_up_kernel`, with out [S, I] in the order of pairs, undefined for pairs without an expert."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    WIDE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    blocks = tl.cdiv(inner, WIDE)
    pair, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * WIDE
    expert, first_row, members, length = _tile_of(indices_ptr, pair, pairs, experts, BLOCK_M, PAIRS)
    if length == 0:
        return
    n = inner * 2 if GATED else inner
    m = tl.arange(0, BLOCK_M)
    row, inside = first_row + m, m < length
    col, there = pre_columns(first, inner, GATED, INTERLEAVED, BLOCK_N)
    if expert == experts:
        if KEEPS_PRE:
            place = row.to(tl.int64)[:, None] * n + col[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), pre_ptr.dtype.element_ty)
            tl.store(pre_ptr + place, zeros, mask=inside[:, None] & there[None, :])
        return
    k = tl.arange(0, BLOCK_K)
    a_tile = x_ptr + (members // top_k).to(tl.int64)[:, None] * x_row + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = product(
        a_tile, weight_ptr, expert, col, there, acc, hidden, weight_expert, weight_col, weight_row, EVEN, BLOCK_K
    )
    store_activation(
        acc, bias_ptr, pre_ptr, out_ptr, expert, row, members, inside, col, there, first, inner,
        limit, alpha, up_offset, ACTIVATION, GATED, INTERLEAVED, HAS_BIAS, HAS_LIMIT, KEEPS_PRE, BLOCK_M, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def few_up_kernel(
    x_ptr, weight_ptr, bias_ptr, pre_ptr, out_ptr, indices_ptr,
    pairs, experts, top_k, hidden, inner, x_row, weight_expert, weight_row, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, KEEPS_PRE: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """As `few_gate_up_kernel`, for weights with neighbouring features: one program has BLOCK_N columns of one pair and
    multiplies without tensor cores. Pairs come first: those that share an expert read it together."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    pair, first = tl.program_id(0) % pairs, tl.program_id(0) // pairs * BLOCK_N
    expert = expert_of(indices_ptr, pair, pairs, experts)
    n, n_step, up_step = inner, 1, inner
    if GATED:
        n = 2 * inner
    if GATED and INTERLEAVED:
        n_step, up_step = 2, 1
    col, k = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    there = col < inner
    if KEEPS_PRE:
        at = tl.arange(0, PAIRS)
        others = tl.where(at < pairs, expert_of(indices_ptr, at, pairs, experts), experts + 1)
        before = (others < expert) | ((others == expert) & (at < pair))
        pre_tile = pre_ptr + tl.sum(before.to(tl.int32), 0).to(tl.int64) * n + col * n_step
    if expert == experts:
        if KEEPS_PRE:
            zeros = tl.zeros((BLOCK_N,), pre_ptr.dtype.element_ty)
            tl.store(pre_tile, zeros, mask=there)
            if GATED:
                tl.store(pre_tile + up_step, zeros, mask=there)
        return
    b_tile = (
        weight_ptr + expert.to(tl.int64) * weight_expert
        + (col * n_step).to(tl.int64)[:, None] * weight_row + k[None, :]
    )  # fmt: skip
    a_tile, up_step_rows = x_ptr + (pair // top_k).to(tl.int64) * x_row + k, tl.cast(up_step, tl.int64) * weight_row
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
        inside = k < BLOCK_K if EVEN else k < hidden - start
        a = tl.load(a_tile + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        both = there[:, None] & inside[None, :]
        gate += tl.load(b_tile + start, mask=both, other=0.0).to(tl.float32) * a
        if GATED:
            up += tl.load(b_tile + up_step_rows + start, mask=both, other=0.0).to(tl.float32) * a
    z = tl.sum(gate, 1)
    if HAS_BIAS:
        bias_tile = bias_ptr + expert.to(tl.int64) * n + col * n_step
        z += tl.load(bias_tile, mask=there, other=0.0).to(tl.float32)
    z = z.to(out_ptr.dtype.element_ty)
    if KEEPS_PRE:
        tl.store(pre_tile, z, mask=there)
    if GATED:
        u = tl.sum(up, 1)
        if HAS_BIAS:
            u += tl.load(bias_tile + up_step, mask=there, other=0.0).to(tl.float32)
        u = u.to(out_ptr.dtype.element_ty)
        if KEEPS_PRE:
            tl.store(pre_tile + up_step, u, mask=there)
        out, _, _ = gated(z.to(tl.float32), u.to(tl.float32), limit, alpha, up_offset, ACTIVATION, HAS_LIMIT)
    else:
        out, _ = activate(z.to(tl.float32), ACTIVATION)
    place = out_ptr + pair.to(tl.int64) * inner + col
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["pairs"])
def few_rows_kernel(
    a_ptr, weight_ptr, bias_ptr, out_ptr, indices_ptr, pairs, experts, features, outputs,
    weight_expert, weight_out, weight_in,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """out[p] = a[p] · weight[e]ᵀ + bias[e], both in the order of pairs. Rows of pairs without an expert are not
    written."""
    blocks = tl.cdiv(outputs, BLOCK_N)
    pair, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert, _, members, length = _tile_of(indices_ptr, pair, pairs, experts, BLOCK_M, PAIRS)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    if (length == 0) | (expert == experts):
        return
    inside = tl.arange(0, BLOCK_M) < length
    col, k = column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    there = col < outputs
    first = tl.sum(tl.where(tl.arange(0, BLOCK_M) == 0, members, 0), 0)
    at = tl.where(inside, members, first)  # rows of pairs without an expert were never written
    a_tile = a_ptr + at.to(tl.int64)[:, None] * features + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = product(
        a_tile, weight_ptr, expert, col, there, acc, features, weight_expert, weight_in, weight_out, EVEN, BLOCK_K
    )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * outputs + col, mask=there, other=0.0).to(tl.float32)[None, :]
    place = members.to(tl.int64)[:, None] * outputs + col[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def _prefetch(address):
    """Bring the line of 128 bytes of each address into L2. The instruction takes no odd multiple of 2 bytes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address & -128], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def few_down_kernel(
    a_ptr, weight_ptr, bias_ptr, indices_ptr, scales_ptr, out_ptr, tokens, experts, top_k, features, outputs,
    weight_expert, weight_out, weight_in,
    HAS_BIAS: tl.constexpr, CHAINED: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k scales[t, k] (a[t, k] · weight[e]ᵀ + bias[e]) over the pairs that have an expert: one program has
    BLOCK_N columns of all experts of a token. Tokens come first: those that share an expert read it together."""
    token, column = tl.program_id(0) % tokens, tl.program_id(0) // tokens
    j = tl.arange(0, TOP_K)
    pair = token.to(tl.int64) * top_k + j
    expert = tl.load(indices_ptr + pair, mask=j < top_k, other=-1)
    has = (expert >= 0) & (expert < experts)
    expert = tl.where(has, expert, 0).to(tl.int64)
    col, k = column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    both = (col < outputs)[:, None, None] & has[None, :, None]
    b_tile = (
        weight_ptr + col.to(tl.int64)[:, None, None] * weight_out + expert[None, :, None] * weight_expert
        + k.to(tl.int64)[None, None, :] * weight_in
    )  # fmt: skip
    a_tile = a_ptr + pair[:, None] * features + k[None, :]
    # The first weights are on their way, and the next in L2, while the kernel before ends.
    b = tl.load(b_tile, mask=both & (k < features)[None, None, :], other=0.0)
    if CHAINED:
        line = tl.minimum(col, outputs - 1).to(tl.int64)[:, None] * weight_out + expert[None, :] * weight_expert
        for ahead in tl.static_range(1, AHEAD + 1):
            step = tl.minimum(ahead * BLOCK_K, features - 1).to(tl.int64) * weight_in
            _prefetch((weight_ptr + line + step).to(tl.int64))
        tl.extra.cuda.gdc_wait()
    a = tl.load(a_tile, mask=has[:, None] & (k < features)[None, :], other=0.0)
    acc = b.to(tl.float32) * a.to(tl.float32)[None, :, :]
    for start in tl.range(BLOCK_K, features, BLOCK_K, num_stages=STAGES):
        inside = k < features - start
        b = tl.load(b_tile + tl.cast(weight_in, tl.int64) * start, mask=both & inside[None, None, :], other=0.0)
        a = tl.load(a_tile + start, mask=has[:, None] & inside[None, :], other=0.0)
        acc += b.to(tl.float32) * a.to(tl.float32)[None, :, :]
    each = tl.sum(acc, 2)
    if HAS_BIAS:
        place = expert[None, :] * outputs + col[:, None]
        each += tl.load(bias_ptr + place, mask=(col < outputs)[:, None] & has[None, :], other=0.0).to(tl.float32)
    each = each.to(out_ptr.dtype.element_ty).to(tl.float32)
    each *= tl.load(scales_ptr + pair, mask=has, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(tl.where(has[None, :], each, 0.0), 1)
    place = token.to(tl.int64) * outputs + col
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=col < outputs)


def few_experts(call: Any, config: FewConfig, hidden: bool) -> tuple[Tensor, Tensor]:
    """Gate and up with the activation; then down with the sum over k, or in two launches."""
    x, gate_up, down, indices = rows(call.x), call.gate_up, call.down, call.indices.contiguous()
    (count, outputs, inner), pairs, top_k = down.shape, indices.numel(), indices.shape[-1]
    pre = x.new_empty((pairs, gate_up.shape[1] if hidden else 0))
    activated, flags = x.new_empty((pairs, inner)), steps.activation(call)
    arch = arch_of(x.device)
    chained = arch.kind == "cuda" and arch.capability >= (9, 0)
    pdl = {"launch_pdl": True} if chained else {}
    options = {"num_warps": 4, "num_stages": config.num_stages}
    sized = {"BLOCK_M": 16, "BLOCK_K": config.block_k, "PAIRS": max(16, next_power_of_2(pairs))}
    given = x, gate_up, dense(call.gate_up_bias), pre, activated, indices, pairs, count, top_k, outputs, inner
    flags |= {"HAS_BIAS": call.gate_up_bias is not None, "KEEPS_PRE": hidden, "CHAINED": chained}
    if config.up is not None:
        tile = config.up
        launch(
            few_up_kernel, (pairs * cdiv(inner, tile.block_n),),
            *given, x.stride(0), *gate_up.stride()[:2], *steps.numbers(call), EVEN=outputs % tile.block_k == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages, PAIRS=sized["PAIRS"], **flags,
            num_warps=4,
        )  # fmt: skip
    else:
        wide = config.block_n // 2 if flags["GATED"] else config.block_n
        launch(
            few_gate_up_kernel, (pairs * cdiv(inner, wide),),
            *given, x.stride(0), *gate_up.stride(), *steps.numbers(call), EVEN=outputs % config.block_k == 0,
            BLOCK_N=config.block_n, **flags, **sized, **options,
        )  # fmt: skip
    bias, scales = dense(call.down_bias), call.weights.contiguous()
    if config.down is not None:
        out, tokens, tile = x.new_empty(call.x.shape), pairs // top_k, config.down
        launch(
            few_down_kernel, (tokens * cdiv(outputs, tile.block_n),),
            activated, down, bias, indices, scales, out, tokens, count, top_k, inner, outputs, *down.stride(),
            HAS_BIAS=bias is not None, CHAINED=chained, TOP_K=next_power_of_2(top_k), BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, STAGES=tile.num_stages, AHEAD=4, num_warps=4, **pdl,
        )  # fmt: skip
        return out, pre
    each = x.new_empty((pairs, outputs))
    launch(
        few_rows_kernel, (pairs * cdiv(outputs, config.down_n),),
        activated, down, bias, each, indices, pairs, count, inner, outputs, *down.stride(), HAS_BIAS=bias is not None,
        EVEN=inner % config.block_k == 0, CHAINED=chained, BLOCK_N=config.down_n, **sized, **options, **pdl,
    )  # fmt: skip
    return steps.combined(each, indices, scales, call.x, count), pre
