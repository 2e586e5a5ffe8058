"""The device kernels of rms_norm_rope in Triton: a forward over heads of q and k, and a backward with partial sums."""

import triton
import triton.language as tl

from tilesmith.ops.rotary.triton.rope import (
    VARYING,
    join_line,
    line_pointers,
    positions_of,
    split_line,
)

# A tile is [tokens, heads, features], its features in two parts that rotate against each other (and a third that does
# not). `ROW`: all heads of a token are normalised together, so a tile has all of them.


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, cos_row, sin_row, row, tokens, position, num_positions, num_tokens,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """cos and sin, NaN at positions that the table does not hold, 0 beyond the last token and the last pair.

    As [tokens, heads, pairs], so that each thread loads those of its own elements (L1 serves the repeats): with one
    head for all, they would change threads through shared memory.
    """
    cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    at = tl.broadcast_to(position[:, None, None], (tokens.shape[0], BLOCK_HEADS, 1))
    exists = (tokens[:, None, None] < num_tokens) & (cols < PAIRS)
    mask = exists & (at >= 0) & (at < num_positions)
    missing = tl.broadcast_to(tl.where(exists, float("nan"), 0.0), mask.shape).to(cos_ptr.dtype.element_ty)
    cos_ptr += row * cos_row + at * COS_POSITION + cols * COS_PAIR
    sin_ptr += row * sin_row + at * SIN_POSITION + cols * SIN_PAIR
    # What streams through the L2 cache would drive them out between a token of one row of the batch and the next.
    cos = tl.load(cos_ptr, mask=mask, other=missing, eviction_policy="evict_last")
    sin = tl.load(sin_ptr, mask=mask, other=missing, eviction_policy="evict_last")
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _load_factor(
    ptr, col, col_inside, heads, num_heads, weight_offset, y_ptr,
    DIM: tl.constexpr, ROW: tl.constexpr, LLAMA: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """weight + weight_offset of the features `col`, of `heads` where ROW; LLAMA rounds it. As [tokens, heads, cols],
    for the reason that angles are."""
    shape: tl.constexpr = (BLOCK_TOKENS, heads.shape[0], col.shape[0])
    at, mask = col[None, None, :], col_inside[None, None, :]
    if ROW:
        at += heads[None, :, None] * DIM
        mask = mask & (heads < num_heads)[None, :, None]
    weight = tl.load(ptr + tl.broadcast_to(at, shape), mask=tl.broadcast_to(mask, shape), other=0.0)
    weight = weight.to(tl.float32) + weight_offset
    if LLAMA and ptr.dtype == y_ptr.dtype:
        weight = weight.to(ptr.dtype.element_ty).to(tl.float32)
    return weight


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


# q and k have code of their own: with k's heads in as many steps as q's, most of them empty, llama's casting took
# 89.1 / 82.6 µs for heads of 128 / 64 on an H200, so 85.4 / 75.5.
@triton.jit
def _norm_rope_heads(
    x_ptr, x_row, x_head, x_token, x_dim, y_ptr, y_row, y_head, y_token, y_dim, weight_ptr, num_heads, head_block,
    row, token_block, angles, where, num_positions, num_tokens, eps, weight_offset,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PER_TOKEN: tl.constexpr, POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
    ROW: tl.constexpr, LLAMA: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """y of STEPS blocks of heads. angles: cos, sin, their steps over rows; where: what `positions_of` reads."""
    tokens = token_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    heads = head_block * (BLOCK_HEADS * STEPS) + tl.arange(0, BLOCK_HEADS)
    x_ptr = line_pointers(x_ptr, x_row, x_head, x_token, row, heads, tokens)
    y_ptr = line_pointers(y_ptr, y_row, y_head, y_token, row, heads, tokens)
    x_step, y_step = tl.cast(x_head, tl.int64) * BLOCK_HEADS, tl.cast(y_head, tl.int64) * BLOCK_HEADS
    x_dim, y_dim = tl.cast(x_dim, tl.int64), tl.cast(y_dim, tl.int64)

    # All of the heads are asked for before the first is worked on, which the barrier is for: without it ptxas asks for
    # the last ones when the first has left its registers. H200, heads of 128 / 64: 84.4 / 74.2 µs, without 85.3 / 81.1.
    loaded, unturned = (), ()
    rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
    for step in tl.static_range(STEPS):
        inside = (tokens[:, None, None] < num_tokens) & (heads[None, :, None] + step * BLOCK_HEADS < num_heads)
        x_line = x_ptr + step * x_step
        loaded += (split_line(x_line, x_dim, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED),)
        if DIM > 2 * PAIRS:
            mask = inside & (rest < DIM)[None, None, :]
            unturned += (tl.load(x_line + rest[None, None, :] * x_dim, mask=mask, other=0.0).to(tl.float32),)
    tl.debug_barrier()
    position = tokens.to(tl.int64)
    if not PER_TOKEN:
        position = positions_of(row, tokens, *where, num_tokens, POSITIONS, OFFSETS, PACKED)
    cos, sin = _load_angles(
        *angles, row, tokens, position, num_positions, num_tokens,
        COS_POSITION, COS_PAIR, SIN_POSITION, SIN_PAIR, PAIRS, BLOCK_PAIRS, BLOCK_HEADS,
    )  # fmt: skip

    pair = tl.arange(0, BLOCK_PAIRS)
    at = 2 * pair if INTERLEAVED else pair
    other: tl.constexpr = 1 if INTERLEAVED else PAIRS
    # Angles times weights save two products a pair of every head that both are the same for.
    SCALED: tl.constexpr = not (ROW or LLAMA)
    cos_first, cos_second, sin_first, sin_second = cos, cos, sin, sin
    factor_first, factor_second, factor_rest = 1.0, 1.0, 1.0
    if weight_ptr is not None and not ROW:
        factor_first = _load_factor(
            weight_ptr, at, pair < PAIRS, heads, num_heads, weight_offset, y_ptr, DIM, ROW, LLAMA, BLOCK_TOKENS
        )
        factor_second = _load_factor(
            weight_ptr, at + other, pair < PAIRS, heads, num_heads, weight_offset, y_ptr, DIM, ROW, LLAMA,
            BLOCK_TOKENS,
        )  # fmt: skip
        if DIM > 2 * PAIRS:
            factor_rest = _load_factor(
                weight_ptr, rest, rest < DIM, heads, num_heads, weight_offset, y_ptr, DIM, ROW, LLAMA, BLOCK_TOKENS
            )
        if SCALED:
            cos_first, sin_first = cos * factor_first, sin * factor_first
            cos_second, sin_second = cos * factor_second, sin * factor_second
    if ROW:
        squares = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
        for step in tl.static_range(STEPS):
            squares += loaded[step][0] * loaded[step][0] + loaded[step][1] * loaded[step][1]
        total = _sum_group(squares, ROW)
        if DIM > 2 * PAIRS:
            squares = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_REST], tl.float32)
            for step in tl.static_range(STEPS):
                squares += unturned[step] * unturned[step]
            total += _sum_group(squares, ROW)
        rstd = tl.rsqrt(total * (1.0 / (DIM * num_heads)) + eps)
    for step in tl.static_range(STEPS):
        here = heads + step * BLOCK_HEADS
        inside = (tokens[:, None, None] < num_tokens) & (here[None, :, None] < num_heads)
        y_line = y_ptr + step * y_step
        first, second = loaded[step]
        if not ROW:
            total = _sum_group(first * first + second * second, ROW)
            if DIM > 2 * PAIRS:
                total += _sum_group(unturned[step] * unturned[step], ROW)
            rstd = tl.rsqrt(total * (1.0 / DIM) + eps)
        if SCALED:
            y_first = (first * cos_first - second * sin_second) * rstd
            y_second = (second * cos_second + first * sin_first) * rstd
        else:
            if ROW and weight_ptr is not None:
                factor_first = _load_factor(
                    weight_ptr, at, pair < PAIRS, here, num_heads, weight_offset, y_ptr, DIM, ROW, LLAMA,
                    BLOCK_TOKENS,
                )  # fmt: skip
                factor_second = _load_factor(
                    weight_ptr, at + other, pair < PAIRS, here, num_heads, weight_offset, y_ptr, DIM, ROW, LLAMA,
                    BLOCK_TOKENS,
                )  # fmt: skip
            first = _scale(first * rstd, factor_first, y_ptr, LLAMA)
            second = _scale(second * rstd, factor_second, y_ptr, LLAMA)
            y_first, y_second = first * cos - second * sin, second * cos + first * sin
        join_line(y_line, y_dim, y_first, y_second, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
        if DIM > 2 * PAIRS:
            if ROW and weight_ptr is not None:
                factor_rest = _load_factor(
                    weight_ptr, rest, rest < DIM, here, num_heads, weight_offset, y_ptr, DIM, ROW, LLAMA,
                    BLOCK_TOKENS,
                )  # fmt: skip
            y_rest = _scale(unturned[step] * rstd, factor_rest, y_ptr, LLAMA).to(y_ptr.dtype.element_ty)
            tl.store(y_line + rest[None, None, :] * y_dim, y_rest, mask=inside & (rest < DIM)[None, None, :])


@triton.jit(do_not_specialize=VARYING)
def rms_norm_rope_fwd_kernel(
    q_ptr, q_row, q_head, q_token, q_dim, q_out_ptr, q_out_row, q_out_head, q_out_token, q_out_dim,
    k_ptr, k_row, k_head, k_token, k_dim, k_out_ptr, k_out_row, k_out_head, k_out_token, k_out_dim,
    q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, cos_row, sin_row,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr, cu_seqlens_step,
    offset, num_positions, num_rows, num_tokens, q_heads, k_heads, documents, search_steps,
    eps, weight_offset,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PER_TOKEN: tl.constexpr, POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
    ROW: tl.constexpr, LLAMA: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, STEPS: tl.constexpr, K_STEPS: tl.constexpr,
):  # fmt: skip
    """Program: a block of tokens of one row, and STEPS blocks of heads of q or, after those, K_STEPS of k, by the same
    angles. Neighbours share tokens."""
    head_block = tl.program_id(0) % HEAD_BLOCKS
    token_block = tl.program_id(0) // HEAD_BLOCKS
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    if row >= num_rows:
        return
    angles = cos_ptr, sin_ptr, cos_row, sin_row
    where = (
        positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr, cu_seqlens_step,
        offset, documents, search_steps,
    )  # fmt: skip
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS * STEPS)
    if k_ptr is None or head_block < q_blocks:
        _norm_rope_heads(
            q_ptr, q_row, q_head, q_token, q_dim, q_out_ptr, q_out_row, q_out_head, q_out_token, q_out_dim,
            q_weight_ptr, q_heads, head_block, row, token_block, angles, where, num_positions, num_tokens,
            eps, weight_offset, COS_POSITION, COS_PAIR, SIN_POSITION, SIN_PAIR, PER_TOKEN, POSITIONS, OFFSETS, PACKED,
            ROW, LLAMA, INTERLEAVED, PAIRS, DIM, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST, STEPS,
        )  # fmt: skip
    else:
        _norm_rope_heads(
            k_ptr, k_row, k_head, k_token, k_dim, k_out_ptr, k_out_row, k_out_head, k_out_token, k_out_dim,
            k_weight_ptr, k_heads, head_block - q_blocks, row, token_block, angles, where, num_positions, num_tokens,
            eps, weight_offset, COS_POSITION, COS_PAIR, SIN_POSITION, SIN_PAIR, PER_TOKEN, POSITIONS, OFFSETS, PACKED,
            ROW, LLAMA, INTERLEAVED, PAIRS, DIM, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST, K_STEPS,
        )  # fmt: skip


@triton.jit
def _plus(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_groups(a, b, ROW: tl.constexpr):
    """`_sum_group` of both, whose threads exchange them together."""
    a, b = tl.reduce((a, b), 2, _plus, keep_dims=True)
    if ROW:
        a, b = tl.reduce((a, b), 1, _plus, keep_dims=True)
    return a, b


@triton.jit(do_not_specialize=VARYING)
def rms_norm_rope_bwd_kernel(
    dq_out_ptr, dq_out_row, dq_out_head, dq_out_token, dq_out_dim,
    q_ptr, q_row, q_head, q_token, q_dim, dq_ptr, dq_row, dq_head, dq_token, dq_dim,
    dk_out_ptr, dk_out_row, dk_out_head, dk_out_token, dk_out_dim,
    k_ptr, k_row, k_head, k_token, k_dim, dk_ptr, dk_row, dk_head, dk_token, dk_dim,
    q_weight_ptr, k_weight_ptr, partial_ptr, cos_ptr, sin_ptr, cos_row, sin_row,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr, cu_seqlens_step,
    offset, num_positions, num_tokens, token_blocks, tiles, strips, q_heads, k_heads,
    documents, search_steps, eps, weight_offset,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PER_TOKEN: tl.constexpr, POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
    ROW: tl.constexpr, INTERLEAVED: tl.constexpr, WANTS_DX: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program: STEPS blocks of heads of q or of k, and every strips-th block of tokens, whose angles they share. It
    sums dweight in registers and writes it as one row of partial sums; the loop is pipelined, so that tiles to come are
    copied meanwhile."""
    head_block = tl.program_id(0) % HEAD_BLOCKS
    strip = tl.program_id(0) // HEAD_BLOCKS
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS * STEPS)
    is_q = head_block < q_blocks
    num_heads = tl.where(is_q, q_heads, k_heads)
    heads = tl.where(is_q, head_block, head_block - q_blocks) * (BLOCK_HEADS * STEPS) + tl.arange(0, BLOCK_HEADS)
    head = heads.to(tl.int64)[None, :, None]
    x_base, x_row = tl.where(is_q, q_ptr, k_ptr), tl.where(is_q, q_row, k_row)
    x_head, x_token = tl.where(is_q, q_head, k_head).to(tl.int64), tl.where(is_q, q_token, k_token)
    x_dim = tl.where(is_q, q_dim, k_dim).to(tl.int64)
    dy_base, dy_row = tl.where(is_q, dq_out_ptr, dk_out_ptr), tl.where(is_q, dq_out_row, dk_out_row)
    dy_head, dy_token = (
        tl.where(is_q, dq_out_head, dk_out_head).to(tl.int64),
        tl.where(is_q, dq_out_token, dk_out_token),
    )
    dy_dim = tl.where(is_q, dq_out_dim, dk_out_dim).to(tl.int64)
    dx_base, dx_row = tl.where(is_q, dq_ptr, dk_ptr), tl.where(is_q, dq_row, dk_row)
    dx_head, dx_token = tl.where(is_q, dq_head, dk_head).to(tl.int64), tl.where(is_q, dq_token, dk_token)
    dx_dim = tl.where(is_q, dq_dim, dk_dim).to(tl.int64)

    pair = tl.arange(0, BLOCK_PAIRS)
    exists = pair < PAIRS
    at = 2 * pair if INTERLEAVED else pair
    other: tl.constexpr = 1 if INTERLEAVED else PAIRS
    rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
    factor_first, factor_second, factor_rest = 1.0, 1.0, 1.0
    if q_weight_ptr is not None and WANTS_DX:
        weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        factor_first = _load_factor(
            weight_ptr, at, exists, heads, num_heads, weight_offset, q_ptr, DIM, ROW, False, BLOCK_TOKENS
        )
        factor_second = _load_factor(
            weight_ptr, at + other, exists, heads, num_heads, weight_offset, q_ptr, DIM, ROW, False, BLOCK_TOKENS
        )
        if DIM > 2 * PAIRS:
            factor_rest = _load_factor(
                weight_ptr, rest, rest < DIM, heads, num_heads, weight_offset, q_ptr, DIM, ROW, False, BLOCK_TOKENS
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
        x_ptr = x_base + row * x_row + (head * x_head + line * x_token)
        dy_ptr = dy_base + row * dy_row + (head * dy_head + line * dy_token)
        dx_ptr = dx_base + row * dx_row + (head * dx_head + line * dx_token)
        loaded = ()
        for step in tl.static_range(STEPS):
            inside = (line < num_tokens) & (head + step * BLOCK_HEADS < num_heads)
            x_line, dy_line = x_ptr + step * BLOCK_HEADS * x_head, dy_ptr + step * BLOCK_HEADS * dy_head
            first, second = split_line(x_line, x_dim, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
            dy_first, dy_second = split_line(dy_line, dy_dim, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
            loaded += ((first, second, dy_first, dy_second),)
        if PER_TOKEN:
            position = tokens.to(tl.int64)
        else:
            position = positions_of(
                row, tokens, positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr,
                cu_seqlens_step, offset, documents, search_steps, num_tokens, POSITIONS, OFFSETS, PACKED,
            )  # fmt: skip
        # Always so. What is loaded under a condition is not pipelined: angles copied to shared memory ahead of their
        # use would come from L2 for each head, as many bytes as x and dy, since such copies pass L1 by.
        if num_tokens > 0:
            cos, sin = _load_angles(
                cos_ptr, sin_ptr, cos_row, sin_row, row, tokens, position, num_positions, num_tokens,
                COS_POSITION, COS_PAIR, SIN_POSITION, SIN_PAIR, PAIRS, BLOCK_PAIRS, BLOCK_HEADS,
            )  # fmt: skip
        else:
            cos = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
            sin = cos
        for step in tl.static_range(STEPS):
            inside = (line < num_tokens) & (head + step * BLOCK_HEADS < num_heads)
            first, second, dy_first, dy_second = loaded[step]
            dn_first, dn_second = dy_first * cos + dy_second * sin, dy_second * cos - dy_first * sin
            dxhat_first, dxhat_second = dn_first * factor_first, dn_second * factor_second
            squares, dot = _sum_groups(
                first * first + second * second, dxhat_first * first + dxhat_second * second, ROW
            )
            if DIM > 2 * PAIRS:
                rest_mask = inside & (rest < DIM)[None, None, :]
                x_rest = x_ptr + step * BLOCK_HEADS * x_head + rest[None, None, :] * x_dim
                dy_rest = dy_ptr + step * BLOCK_HEADS * dy_head + rest[None, None, :] * dy_dim
                unturned = tl.load(x_rest, mask=rest_mask, other=0.0).to(tl.float32)
                dn_rest = tl.load(dy_rest, mask=rest_mask, other=0.0).to(tl.float32)
                dxhat_rest = dn_rest * factor_rest
                more_squares, more_dot = _sum_groups(unturned * unturned, dxhat_rest * unturned, ROW)
                squares += more_squares
                dot += more_dot
            # 0 for lines that do not exist, whose x of 0 would add NaN to dweight where eps is 0
            rstd = tl.where(line < num_tokens if ROW else inside, tl.rsqrt(squares * count + eps), 0.0)
            first *= rstd
            second *= rstd
            if partial_ptr is not None:
                sum_first += dn_first * first
                sum_second += dn_second * second
            if DIM > 2 * PAIRS:
                unturned *= rstd
                sum_rest += dn_rest * unturned
            if WANTS_DX:
                dot *= rstd * count
                dx_line = dx_ptr + step * BLOCK_HEADS * dx_head
                dx_first, dx_second = (dxhat_first - first * dot) * rstd, (dxhat_second - second * dot) * rstd
                join_line(dx_line, dx_dim, dx_first, dx_second, inside, PAIRS, BLOCK_PAIRS, INTERLEAVED)
                if DIM > 2 * PAIRS:
                    dx_rest = ((dxhat_rest - unturned * dot) * rstd).to(dq_ptr.dtype.element_ty)
                    tl.store(dx_line + rest[None, None, :] * dx_dim, dx_rest, mask=rest_mask)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # the sums of partial sums
    if partial_ptr is not None:
        if ROW:  # one row of partial sums a strip: a block has all heads
            to = partial_ptr + strip.to(tl.int64) * num_heads * DIM + (heads * DIM)[:, None]
            known = (heads < num_heads)[:, None]
            tl.store(to + at[None, :], tl.sum(sum_first, 0), mask=known & exists[None, :])
            tl.store(to + (at + other)[None, :], tl.sum(sum_second, 0), mask=known & exists[None, :])
            if DIM > 2 * PAIRS:
                tl.store(to + rest[None, :], tl.sum(sum_rest, 0), mask=known & (rest < DIM)[None, :])
        else:
            to = partial_ptr + (head_block * strips + strip).to(tl.int64) * DIM
            tl.store(to + at, tl.sum(tl.sum(sum_first, 0), 0), mask=exists)
            tl.store(to + at + other, tl.sum(tl.sum(sum_second, 0), 0), mask=exists)
            if DIM > 2 * PAIRS:
                tl.store(to + rest, tl.sum(tl.sum(sum_rest, 0), 0), mask=rest < DIM)
