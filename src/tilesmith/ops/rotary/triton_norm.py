"""rms_norm_rope in Triton: one launch norms and rotates queries and keys; one takes both gradients and partial sums."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.column_sums_triton import partial_rows, sum_partials
from tilesmith.ops.rotary.triton import _double_reasons, _positions, _row_stride
from tilesmith.ops.rows import dense

# A tile is [tokens, heads, features], its features in two parts that rotate against each other (and a third that does
# not). `ROW`: all heads of a token are normalised together, so a tile has all of them.


@triton.jit
def _split_line(x_ptr, x_dim, inside, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two features of each pair, fp32; x_ptr: [tokens, heads, 1] pointers to the lines."""
    if INTERLEAVED:
        # Whole lines are loaded and split in registers: accesses with a stride of two elements would not coalesce.
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        x = tl.load(x_ptr + both * x_dim, mask=inside & (both < 2 * PAIRS), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_PAIRS, 2)))
    else:
        cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        mask = inside & (cols < PAIRS)
        first = tl.load(x_ptr + cols * x_dim, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + (PAIRS + cols) * x_dim, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _join_line(
    y_ptr, y_dim, first, second, inside,
    PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store what `_split_line` loads."""
    first, second = first.to(y_ptr.dtype.element_ty), second.to(y_ptr.dtype.element_ty)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        y = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_PAIRS))
        tl.store(y_ptr + both * y_dim, y, mask=inside & (both < 2 * PAIRS))
    else:
        cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        mask = inside & (cols < PAIRS)
        tl.store(y_ptr + cols * y_dim, first, mask=mask)
        tl.store(y_ptr + (PAIRS + cols) * y_dim, second, mask=mask)


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, cos_row, sin_row, row, tokens, position, num_positions, num_tokens,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """cos and sin, NaN at positions that the table does not hold, 0 beyond the last token.

    As [tokens, heads, pairs], so that each thread loads those of its own elements (L1 serves the repeats): with one
    head for all, they would change threads through shared memory.
    """
    cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    at = tl.broadcast_to(position[:, None, None], (tokens.shape[0], BLOCK_HEADS, 1))
    exists = tokens[:, None, None] < num_tokens
    held = exists & (at >= 0) & (at < num_positions)
    mask = held & (cols < PAIRS)
    cos = tl.load(cos_ptr + row * cos_row + at * COS_POSITION + cols * COS_PAIR, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + row * sin_row + at * SIN_POSITION + cols * SIN_PAIR, mask=mask, other=0.0)
    missing = exists & (held == 0)
    cos = tl.where(missing, float("nan"), cos.to(tl.float32))
    sin = tl.where(missing, float("nan"), sin.to(tl.float32))
    return cos, sin


@triton.jit
def _load_factor(
    ptr,
    col,
    col_inside,
    heads,
    num_heads,
    weight_offset,
    y_ptr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """weight + weight_offset of the features `col`, as [1, 1, cols], or [1, heads, cols] where ROW; LLAMA rounds it."""
    if ROW:
        at = heads[:, None] * DIM + col[None, :]
        weight = tl.load(ptr + at, mask=(heads < num_heads)[:, None] & col_inside[None, :], other=0.0)
    else:
        weight = tl.load(ptr + col, mask=col_inside, other=0.0)
    weight = weight.to(tl.float32) + weight_offset
    if LLAMA and ptr.dtype == y_ptr.dtype:
        weight = weight.to(ptr.dtype.element_ty).to(tl.float32)
    return weight[None, :, :] if ROW else weight[None, None, :]


@triton.jit
def _scale(xhat, weight, y_ptr, LLAMA: tl.constexpr):
    """xhat · weight; LLAMA rounds both as a norm in the tensor's dtype does."""
    if LLAMA:
        xhat = xhat.to(y_ptr.dtype.element_ty).to(tl.float32)
        return (xhat * weight).to(y_ptr.dtype.element_ty).to(tl.float32)
    return xhat * weight


@triton.jit
def _sum_group(squares, ROW: tl.constexpr):
    """Sums over what is normalised together: [tokens, heads, 1], or [tokens, 1, 1] where ROW."""
    total = tl.sum(squares, 2, keep_dims=True)
    if ROW:
        total = tl.sum(total, 1, keep_dims=True)
    return total


@triton.jit(do_not_specialize=("offset", "num_positions", "documents", "search_steps"))
def _rms_norm_rope_fwd_kernel(
    q_ptr, q_row, q_head, q_token, q_dim, q_out_ptr, q_out_row, q_out_head, q_out_token, q_out_dim,
    k_ptr, k_row, k_head, k_token, k_dim, k_out_ptr, k_out_row, k_out_head, k_out_token, k_out_dim,
    q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr, cos_ptr, sin_ptr, cos_row, sin_row,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr, cu_seqlens_step,
    offset, num_positions, num_tokens, token_blocks, q_heads, k_heads, head_blocks, documents, search_steps,
    eps, weight_offset,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PER_TOKEN: tl.constexpr, POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
    ROW: tl.constexpr, LLAMA: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Program: a block of tokens of one row, a block of heads of q or, after those, of k. Neighbours share tokens."""
    program = tl.program_id(0)
    head_block = program % head_blocks
    token_block = (program // head_blocks) % token_blocks
    row = (program // head_blocks // token_blocks).to(tl.int64)
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS)
    is_q = head_block < q_blocks
    num_heads = tl.where(is_q, q_heads, k_heads)
    x_dim = tl.where(is_q, q_dim, k_dim).to(tl.int64)
    y_dim = tl.where(is_q, q_out_dim, k_out_dim).to(tl.int64)
    tokens = token_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    heads = tl.where(is_q, head_block, head_block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inside = (tokens[:, None, None] < num_tokens) & (heads[None, :, None] < num_heads)
    line = tokens.to(tl.int64)[:, None, None]
    head = heads.to(tl.int64)[None, :, None]
    x_ptr = tl.where(is_q, q_ptr, k_ptr) + row * tl.where(is_q, q_row, k_row)
    x_ptr += head * tl.where(is_q, q_head, k_head) + line * tl.where(is_q, q_token, k_token)
    y_ptr = tl.where(is_q, q_out_ptr, k_out_ptr) + row * tl.where(is_q, q_out_row, k_out_row)
    y_ptr += head * tl.where(is_q, q_out_head, k_out_head) + line * tl.where(is_q, q_out_token, k_out_token)

    first, second = _split_line(x_ptr, x_dim, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
    if PER_TOKEN:
        position = tokens.to(tl.int64)
    else:
        position = _positions(
            row, tokens, positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step,
            cu_seqlens_ptr, cu_seqlens_step, offset, num_tokens, documents, search_steps, POSITIONS, OFFSETS, PACKED,
        )  # fmt: skip
    cos, sin = _load_angles(
        cos_ptr, sin_ptr, cos_row, sin_row, row, tokens, position, num_positions, num_tokens,
        COS_POSITION, COS_PAIR, SIN_POSITION, SIN_PAIR, PAIRS, BLOCK_PAIRS, BLOCK_HEADS,
    )  # fmt: skip
    squares = _sum_group(first * first + second * second, ROW)
    if DIM > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        rest_mask = inside & (rest < DIM)[None, None, :]
        unturned = tl.load(x_ptr + rest[None, None, :] * x_dim, mask=rest_mask, other=0.0).to(tl.float32)
        squares += _sum_group(unturned * unturned, ROW)
    rstd = tl.rsqrt(squares * (1.0 / (DIM * num_heads) if ROW else 1.0 / DIM) + eps)
    first *= rstd
    second *= rstd
    pair = tl.arange(0, BLOCK_PAIRS)
    if q_weight_ptr is not None:
        weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        at = 2 * pair if INTERLEAVED else pair
        step: tl.constexpr = 1 if INTERLEAVED else PAIRS
        exists = pair < PAIRS
        factor = _load_factor(weight_ptr, at, exists, heads, num_heads, weight_offset, q_out_ptr, DIM, ROW, LLAMA)
        first = _scale(first, factor, q_out_ptr, LLAMA)
        factor = _load_factor(
            weight_ptr, at + step, exists, heads, num_heads, weight_offset, q_out_ptr, DIM, ROW, LLAMA
        )
        second = _scale(second, factor, q_out_ptr, LLAMA)
    elif LLAMA:
        first, second = _scale(first, 1.0, q_out_ptr, LLAMA), _scale(second, 1.0, q_out_ptr, LLAMA)
    y_first, y_second = first * cos - second * sin, second * cos + first * sin
    _join_line(y_ptr, y_dim, y_first, y_second, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
    if DIM > 2 * PAIRS:
        unturned *= rstd
        if q_weight_ptr is not None:
            factor = _load_factor(
                weight_ptr, rest, rest < DIM, heads, num_heads, weight_offset, q_out_ptr, DIM, ROW, LLAMA
            )
            unturned = _scale(unturned, factor, q_out_ptr, LLAMA)
        tl.store(y_ptr + rest[None, None, :] * y_dim, unturned.to(q_out_ptr.dtype.element_ty), mask=rest_mask)
    # last: rstd changes threads on its way, which the rest need not wait for
    rstd_ptr = tl.where(is_q, q_rstd_ptr, k_rstd_ptr)
    if ROW:
        tl.store(rstd_ptr + row * num_tokens + line, rstd, mask=line < num_tokens)
    else:
        tl.store(rstd_ptr + (row * num_tokens + line) * num_heads + head, rstd, mask=inside)


@triton.jit(do_not_specialize=("offset", "num_positions", "documents", "search_steps"))
def _rms_norm_rope_bwd_kernel(
    dq_out_ptr, dq_out_row, dq_out_head, dq_out_token, dq_out_dim,
    q_ptr, q_row, q_head, q_token, q_dim, dq_ptr, dq_row, dq_head, dq_token, dq_dim,
    dk_out_ptr, dk_out_row, dk_out_head, dk_out_token, dk_out_dim,
    k_ptr, k_row, k_head, k_token, k_dim, dk_ptr, dk_row, dk_head, dk_token, dk_dim,
    q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr, partial_ptr, cos_ptr, sin_ptr, cos_row, sin_row,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr, cu_seqlens_step,
    offset, num_positions, num_tokens, token_blocks, tiles, strips, q_heads, k_heads, head_blocks,
    documents, search_steps, weight_offset,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PER_TOKEN: tl.constexpr, POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
    ROW: tl.constexpr, INTERLEAVED: tl.constexpr, WANTS_DX: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program: a block of heads of q or of k, and every strips-th block of tokens. It sums dweight in registers and
    writes it as one row of partial sums; the loop is pipelined, so that tiles to come are copied meanwhile."""
    head_block = tl.program_id(0) % head_blocks
    strip = tl.program_id(0) // head_blocks
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS)
    is_q = head_block < q_blocks
    num_heads = tl.where(is_q, q_heads, k_heads)
    heads = tl.where(is_q, head_block, head_block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head = heads.to(tl.int64)[None, :, None]
    x_base, x_row = tl.where(is_q, q_ptr, k_ptr), tl.where(is_q, q_row, k_row)
    x_head, x_token = tl.where(is_q, q_head, k_head), tl.where(is_q, q_token, k_token)
    x_dim = tl.where(is_q, q_dim, k_dim).to(tl.int64)
    dy_base, dy_row = tl.where(is_q, dq_out_ptr, dk_out_ptr), tl.where(is_q, dq_out_row, dk_out_row)
    dy_head, dy_token = tl.where(is_q, dq_out_head, dk_out_head), tl.where(is_q, dq_out_token, dk_out_token)
    dy_dim = tl.where(is_q, dq_out_dim, dk_out_dim).to(tl.int64)
    dx_base, dx_row = tl.where(is_q, dq_ptr, dk_ptr), tl.where(is_q, dq_row, dk_row)
    dx_head, dx_token = tl.where(is_q, dq_head, dk_head), tl.where(is_q, dq_token, dk_token)
    dx_dim = tl.where(is_q, dq_dim, dk_dim).to(tl.int64)
    rstd_ptr = tl.where(is_q, q_rstd_ptr, k_rstd_ptr)

    pair = tl.arange(0, BLOCK_PAIRS)
    exists = pair < PAIRS
    at = 2 * pair if INTERLEAVED else pair
    step: tl.constexpr = 1 if INTERLEAVED else PAIRS
    rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
    factor_first, factor_second, factor_rest = 1.0, 1.0, 1.0
    if q_weight_ptr is not None and WANTS_DX:
        weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        factor_first = _load_factor(weight_ptr, at, exists, heads, num_heads, weight_offset, q_ptr, DIM, ROW, False)
        factor_second = _load_factor(
            weight_ptr, at + step, exists, heads, num_heads, weight_offset, q_ptr, DIM, ROW, False
        )
        if DIM > 2 * PAIRS:
            factor_rest = _load_factor(
                weight_ptr, rest, rest < DIM, heads, num_heads, weight_offset, q_ptr, DIM, ROW, False
            )
    count = 1.0 / (DIM * num_heads) if ROW else 1.0 / DIM
    sum_first = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
    sum_second = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
    if DIM > 2 * PAIRS:
        sum_rest = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_REST], tl.float32)
    for tile in tl.range(strip, tiles, strips, num_stages=STAGES):
        row = (tile // token_blocks).to(tl.int64)
        tokens = (tile % token_blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        line = tokens.to(tl.int64)[:, None, None]
        inside = (line < num_tokens) & (head < num_heads)
        x_ptr = x_base + row * x_row + (head * x_head + line * x_token)
        dy_ptr = dy_base + row * dy_row + (head * dy_head + line * dy_token)
        first, second = _split_line(x_ptr, x_dim, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
        dy_first, dy_second = _split_line(dy_ptr, dy_dim, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
        if ROW:
            rstd = tl.load(rstd_ptr + row * num_tokens + line, mask=line < num_tokens, other=0.0)
        else:
            rstd = tl.load(rstd_ptr + (row * num_tokens + line) * num_heads + head, mask=inside, other=0.0)
        if PER_TOKEN:
            position = tokens.to(tl.int64)
        else:
            position = _positions(
                row, tokens, positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr,
                cu_seqlens_step, offset, num_tokens, documents, search_steps, POSITIONS, OFFSETS, PACKED,
            )  # fmt: skip
        cos, sin = _load_angles(
            cos_ptr, sin_ptr, cos_row, sin_row, row, tokens, position, num_positions, num_tokens,
            COS_POSITION, COS_PAIR, SIN_POSITION, SIN_PAIR, PAIRS, BLOCK_PAIRS, BLOCK_HEADS,
        )  # fmt: skip
        first *= rstd
        second *= rstd
        dn_first, dn_second = dy_first * cos + dy_second * sin, dy_second * cos - dy_first * sin
        sum_first += dn_first * first
        sum_second += dn_second * second
        if DIM > 2 * PAIRS:
            rest_mask = inside & (rest < DIM)[None, None, :]
            unturned = tl.load(x_ptr + rest[None, None, :] * x_dim, mask=rest_mask, other=0.0).to(tl.float32) * rstd
            dn_rest = tl.load(dy_ptr + rest[None, None, :] * dy_dim, mask=rest_mask, other=0.0).to(tl.float32)
            sum_rest += dn_rest * unturned
        if WANTS_DX:
            dn_first *= factor_first
            dn_second *= factor_second
            dot = _sum_group(dn_first * first + dn_second * second, ROW)
            if DIM > 2 * PAIRS:
                dn_rest *= factor_rest
                dot += _sum_group(dn_rest * unturned, ROW)
            dot *= count
            dx_ptr = dx_base + row * dx_row + (head * dx_head + line * dx_token)
            dx_first, dx_second = (dn_first - first * dot) * rstd, (dn_second - second * dot) * rstd
            _join_line(dx_ptr, dx_dim, dx_first, dx_second, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
            if DIM > 2 * PAIRS:
                dx_rest = ((dn_rest - unturned * dot) * rstd).to(dq_ptr.dtype.element_ty)
                tl.store(dx_ptr + rest[None, None, :] * dx_dim, dx_rest, mask=rest_mask)
    if partial_ptr is not None:
        if ROW:  # one row of partial sums a strip: a block has all heads
            to = partial_ptr + strip.to(tl.int64) * num_heads * DIM + (heads * DIM)[:, None]
            known = (heads < num_heads)[:, None]
            tl.store(to + at[None, :], tl.sum(sum_first, 0), mask=known & exists[None, :])
            tl.store(to + (at + step)[None, :], tl.sum(sum_second, 0), mask=known & exists[None, :])
            if DIM > 2 * PAIRS:
                tl.store(to + rest[None, :], tl.sum(sum_rest, 0), mask=known & (rest < DIM)[None, :])
        else:
            to = partial_ptr + (head_block * strips + strip).to(tl.int64) * DIM
            tl.store(to + at, tl.sum(tl.sum(sum_first, 0), 0), mask=exists)
            tl.store(to + at + step, tl.sum(tl.sum(sum_second, 0), 0), mask=exists)
            if DIM > 2 * PAIRS:
                tl.store(to + rest, tl.sum(tl.sum(sum_rest, 0), 0), mask=rest < DIM)


class NormRopeConfig(NamedTuple):
    """block_tokens, block_heads: the tile of one program, where a head is normalised; where a row is, a tile has all
    heads and as many tokens as make up the same size. num_stages, programs: of the backward's loop."""

    block_tokens: int
    block_heads: int
    num_warps: int
    num_stages: int
    programs: int


class _Tile(NamedTuple):
    tokens: int
    heads: int
    num_warps: int


class _Where(NamedTuple):
    """The arguments that say where tokens are and how pairs lie, as both kernels take them."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    offsets: Tensor | None
    cu_seqlens: Tensor | None
    offset: int
    interleaved: bool

    def pointers(self) -> tuple:
        cos = self.cos
        # Absent tensors are stood in for by one that is never read through them.
        by_position, by_row, by_document = (
            cos if x is None else x for x in (self.positions, self.offsets, self.cu_seqlens)
        )
        return (
            cos, self.sin, _row_stride(cos, 3), _row_stride(self.sin, 3),
            by_position, _row_stride(by_position, 2), by_position.stride(-1), by_row, by_row.stride(0),
            by_document, by_document.stride(0), self.offset, cos.shape[-2],
        )  # fmt: skip

    def documents(self) -> tuple[int, int]:
        documents = 1 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return documents, (documents - 1).bit_length()

    def flags(self, dim: int) -> dict:
        cos, sin, pairs = self.cos, self.sin, self.cos.shape[-1]
        return {
            "COS_POSITION": cos.stride(-2), "COS_PAIR": cos.stride(-1), "SIN_POSITION": sin.stride(-2),
            "SIN_PAIR": sin.stride(-1), "PER_TOKEN": cos.ndim == 3, "POSITIONS": self.positions is not None,
            "OFFSETS": self.offsets is not None, "PACKED": self.cu_seqlens is not None,
            "INTERLEAVED": self.interleaved, "PAIRS": pairs, "DIM": dim,
            "BLOCK_PAIRS": next_power_of_2(max(1, pairs)), "BLOCK_REST": next_power_of_2(max(1, dim - 2 * pairs)),
        }  # fmt: skip


def _tile(x: Tensor, row: bool, config: NormRopeConfig) -> _Tile:
    _, heads, tokens, dim = x.shape
    if not row:
        return _Tile(config.block_tokens, config.block_heads, config.num_warps)
    block = next_power_of_2(heads)
    size = config.block_tokens * config.block_heads
    elements = block * next_power_of_2(dim)
    # a row that is wider than a tile gets threads of its own, or its elements would not fit the registers
    warps = max(config.num_warps, min(16, config.num_warps * block // size))
    return _Tile(max(1, min(size // block, next_power_of_2(max(1, tokens)))), block, warps if elements > 2048 else 4)


def _together(q_weight: Tensor | None, k: Tensor | None, k_weight: Tensor | None, row: bool) -> bool:
    """Whether one launch serves q and k: heads of the same kind, weights of one dtype or none."""
    kinds = [None if w is None else w.dtype for w in (q_weight, k_weight)]
    return k is not None and not row and kinds[0] == kinds[1]


def _norm_rotate(
    q: Tensor,
    k: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None],
    outs: tuple[Tensor, Tensor | None],
    rstds: tuple[Tensor, Tensor | None],
    where: _Where,
    row: bool,
    numbers: tuple[float, float],
    llama: bool,
    config: NormRopeConfig,
) -> None:
    batch, q_heads, num_tokens, dim = q.shape
    k_heads = 0 if k is None else k.shape[1]
    tile = _tile(q, row, config)
    head_blocks = cdiv(q_heads, tile.heads) + cdiv(k_heads, tile.heads)
    token_blocks = cdiv(num_tokens, tile.tokens)
    if batch * token_blocks * head_blocks == 0:
        return
    q_out, q_weight, q_rstd = outs[0], weights[0], rstds[0]
    # Absent tensors are stood in for by one that is never read through them.
    k, k_out, k_weight, k_rstd = (q, q_out, q_weight, q_rstd) if k is None else (k, outs[1], weights[1], rstds[1])
    launch(
        _rms_norm_rope_fwd_kernel, (batch * token_blocks * head_blocks,),
        q, *q.stride(), q_out, *q_out.stride(), k, *k.stride(), k_out, *k_out.stride(),
        q_weight, k_weight, q_rstd, k_rstd, *where.pointers(),
        num_tokens, token_blocks, q_heads, k_heads, head_blocks, *where.documents(), *numbers,
        ROW=row, LLAMA=llama, BLOCK_TOKENS=tile.tokens, BLOCK_HEADS=tile.heads, num_warps=tile.num_warps,
        **where.flags(dim),
    )  # fmt: skip


class _Side(NamedTuple):
    """q or k, and what its gradient needs; dx is None where it is not wanted."""

    dout: Tensor
    x: Tensor
    weight: Tensor | None
    rstd: Tensor
    dx: Tensor | None
    sums: bool


def _stages(x: Tensor, tile: _Tile, cos: Tensor, config: NormRopeConfig) -> int:
    """Stages whose tiles of x, dy, cos and sin fit into shared memory, which those of whole rows fill."""
    elements = tile.tokens * tile.heads * next_power_of_2(x.shape[3])
    stage = elements * (2 * x.element_size() + cos.element_size())
    room = arch_of(x.device).shared_memory - 1024
    return max(1, min(config.num_stages, room // stage + 1)) if room > 0 else config.num_stages


def _differentiate(
    q: _Side, k: _Side | None, where: _Where, row: bool, weight_offset: float, config: NormRopeConfig
) -> list[Tensor]:
    """Fill dx of q, and of k in the same launch; the partial sums [partials, D or H D] of each one's dweight."""
    batch, q_heads, num_tokens, dim = q.x.shape
    k_heads = 0 if k is None else k.x.shape[1]
    tile = _tile(q.x, row, config)
    q_blocks, k_blocks = cdiv(q_heads, tile.heads), cdiv(k_heads, tile.heads)
    token_blocks = cdiv(num_tokens, tile.tokens)
    tiles, head_blocks = batch * token_blocks, q_blocks + k_blocks
    programs = max(1, config.programs * config.num_warps // tile.num_warps)
    strips = partial_rows(tiles, head_blocks, programs, cdiv(16, tile.tokens)) if tiles and head_blocks else 0
    width = q_heads * dim if row else dim
    partial = q.x.new_empty((1 if row else head_blocks) * strips, width, dtype=torch.float32)
    if strips:
        other = q if k is None else k
        sides = []
        for side in (q, other):
            dx = side.x if side.dx is None else side.dx
            sides += [side.dout, *side.dout.stride(), side.x, *side.x.stride(), dx, *dx.stride()]
        launch(
            _rms_norm_rope_bwd_kernel, (strips * head_blocks,),
            *sides, q.weight, other.weight, q.rstd, other.rstd, partial if q.sums else None, *where.pointers(),
            num_tokens, token_blocks, tiles, strips, q_heads, k_heads, head_blocks, *where.documents(), weight_offset,
            ROW=row, WANTS_DX=q.dx is not None, BLOCK_TOKENS=tile.tokens, BLOCK_HEADS=tile.heads,
            STAGES=_stages(q.x, tile, where.cos, config), num_warps=tile.num_warps, **where.flags(dim),
        )  # fmt: skip
    return [partial] if row or k is None else [partial[: q_blocks * strips], partial[q_blocks * strips :]]


def _reasons(call) -> list[str]:
    named = {"q": call.q, "cos": call.cos, "q_weight": call.q_weight, "k_weight": call.k_weight}
    wide = [
        f"{name} has {weight.cols} elements; this kernel holds rows of up to {WIDEST} in registers"
        for name, weight in (("q_weight", call.q_weight), ("k_weight", call.k_weight))
        if call.norm_dim == "row" and weight is not None and weight.cols > WIDEST
    ]
    return _double_reasons(named) + wide


WIDEST = 16_384  # features of a row that is normalised as a whole


def _size(q: Tensor, k: Tensor | None) -> dict[str, int]:
    batch, heads, tokens, dim = q.shape
    return {"tokens": batch * tokens, "heads": heads + (0 if k is None else k.shape[1]), "dim": dim}


def _forward_default(dims, arch, dtype) -> NormRopeConfig:
    # A warp a program, 32 elements a thread: nobody waits at a barrier. H200, bf16, of the copy rate at head dims of
    # 128 / 64: 0.94 / 0.94; two warps 0.83 / 0.85, four warps 0.83 / 0.84.
    lines = max(1, 1024 // next_power_of_2(dims["dim"]))
    heads = min(8, lines, next_power_of_2(max(1, dims["heads"])))
    if dims["tokens"] * dims["heads"] <= 4 * heads * arch.sms:  # few tokens: spread them over the device
        return NormRopeConfig(1, heads, num_warps=1, num_stages=1, programs=0)
    return NormRopeConfig(lines // heads, heads, num_warps=1, num_stages=1, programs=0)


def _backward_default(dims, arch, dtype) -> NormRopeConfig:
    # 16 elements a thread of x, of dy and of the sums; two warps, since all of a program's wait for each other at each
    # tile. H200, bf16, of the copy rate at head dims of 128 / 64: 0.91 / 0.84; with four warps 0.88 / 0.79.
    lines = max(1, 1024 // next_power_of_2(dims["dim"]))
    heads = min(4, lines, next_power_of_2(max(1, dims["heads"])))
    stages = 2 if arch.kind == "hip" else 3
    return NormRopeConfig(lines // heads, heads, num_warps=2, num_stages=stages, programs=6 * max(1, arch.sms))


CHOICES = {"block_tokens": (1, 2, 4, 8), "block_heads": (2, 4, 8, 16), "num_warps": (1, 2, 4, 8)}
LOOP_CHOICES = {**CHOICES, "num_stages": (1, 2, 3, 4), "programs": (396, 528, 792, 1056)}


@register_kernel("rms_norm_rope", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=Space(default=_forward_default, dims=lambda q, k, *_: _size(q, k), choices=CHOICES))
def rms_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    norm_dim: str = "head",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    *,
    config: NormRopeConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch over (row, block of tokens, block of heads of q and k); apart where q and k are not of one kind."""
    row, numbers = norm_dim == "row", (eps, weight_offset)
    outs = torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)
    rstds = _empty_rstd(q, row), q.new_empty(0, dtype=torch.float32) if k is None else _empty_rstd(k, row)
    weights = dense(q_weight), dense(k_weight)
    where = _Where(cos, sin, positions, offsets, cu_seqlens, offset, interleaved)
    rest = where, row, numbers, casting == "llama", config
    if _together(q_weight, k, k_weight, row):
        _norm_rotate(q, k, weights, outs, rstds, *rest)
    else:
        for x, weight, out, rstd in zip((q, k), weights, outs, rstds):
            if x is not None:
                _norm_rotate(x, None, (weight, None), (out, None), (rstd, None), *rest)
    return *outs, *rstds


def _empty_rstd(x: Tensor, row: bool) -> Tensor:
    batch, heads, tokens, _ = x.shape
    return x.new_empty(batch, tokens, 1 if row else heads, dtype=torch.float32)


@register_kernel("rms_norm_rope_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(default=_backward_default, dims=lambda dq_out, dk_out, q, k, *_: _size(q, k), choices=LOOP_CHOICES)
)
def rms_norm_rope_vjp(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: int,
    interleaved: bool,
    norm_dim: str,
    weight_offset: float,
    output_mask: Sequence[bool],
    *,
    config: NormRopeConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch for q and k where they are of one kind and want the same, then one sum for each weight."""
    row = norm_dim == "row"
    where = _Where(cos, sin, positions, offsets, cu_seqlens, offset, interleaved)
    sides: list[_Side | None] = []
    given = zip((dq_out, dk_out), (q, k), (q_weight, k_weight), (q_rstd, k_rstd), output_mask[:2], output_mask[2:])
    for dout, x, weight, rstd, wants_x, wants_weight in given:
        if dout is None or x is None or not (wants_x or wants_weight):
            sides.append(None)
        else:
            dx = torch.empty_like(x) if wants_x else None
            sides.append(_Side(dout, x, dense(weight), rstd, dx, wants_weight))
    partials: list[Tensor | None] = [None, None]
    first, second = sides
    alike = first and second and (first.dx is None, first.sums) == (second.dx is None, second.sums)
    if alike and _together(q_weight, k, k_weight, row):
        partials = _differentiate(first, second, where, row, weight_offset, config)
    else:
        for i, side in enumerate(sides):
            if side is not None:
                partials[i] = _differentiate(side, None, where, row, weight_offset, config)[0]
    dx = [q.new_empty(0) if side is None or side.dx is None else side.dx for side in sides]
    dweight = [
        q.new_empty(0) if side is None or not side.sums else sum_partials(partial, side.weight.dtype)
        for side, partial in zip(sides, partials)
    ]
    return *dx, *dweight
