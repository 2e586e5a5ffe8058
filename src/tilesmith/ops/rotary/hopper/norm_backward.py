"""The backward of rms_norm_rope on Hopper, in Gluon: persistent CTAs keep weights in registers and load tiles ahead by
TMA."""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    launch_dependents,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    reinterpret,
    smem_tiles,
    syncthreads,
    tma_copy,
)
from tilesmith.ops.rotary.hopper.norm_heads import (
    added,
    load_angles,
    load_factors,
    post,
    step_layout,
    sum_line,
    sum_row,
    wide,
    widened,
)  # fmt: skip


@gluon.jit
def _tile(slots, slot, TOKENS: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr):
    """A slot as lines [tokens, heads, D / 2] of words of two values."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return reinterpret(slots.index(slot), gl.int32, [TOKENS, HEADS, D // 2], PLAIN)


@gluon.jit
def _bring(x_desc, dy_desc, xs, dys, full, slot, row, token, head):
    """Start to copy the tiles at a token and a head to a slot."""
    at = [row, token, head, 0]
    mbarrier_expect(full.index(slot), x_desc.block_type.nbytes + dy_desc.block_type.nbytes)
    tma_copy(x_desc, at, full.index(slot), xs.index(slot))
    tma_copy(dy_desc, at, full.index(slot), dys.index(slot))


@gluon.jit
def _next(row, block, blocks, rows_on, blocks_on):
    """Row of the batch and block of tokens of the tile that comes rows_on · blocks + blocks_on after this one."""
    block += blocks_on
    past = block >= blocks
    return row + rows_on + past.to(gl.int32), gl.where(past, block - blocks, block)


@gluon.jit
def _weighted(
    n1, n2, weights, WHICH: gl.constexpr, weight_ptr, weight_offset, P: gl.constexpr, LINES: gl.constexpr
):  # fmt: skip
    """The two halves times their weights."""
    if weight_ptr is not None:
        half1, half2 = weights[WHICH]
        f1 = widened(half1, weight_ptr.dtype.element_ty, P, LINES)
        f2 = widened(half2, weight_ptr.dtype.element_ty, P, LINES)
        if weight_offset is not None:
            f1, f2 = f1 + weight_offset, f2 + weight_offset
        n1, n2 = n1 * f1, n2 * f2
    return n1, n2


@gluon.jit
def _backward_side(
    x_desc, dy_desc, dx_ptr, dx_row, dx_head, dx_token, weight_ptr, partial_ptr, num_heads, cta, head_blocks,
    ctas, blocks, rows_on, blocks_on, tiles, num_tokens, angles, where, eps,
    weight_offset,
    ROW: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    TOKENS: gl.constexpr, HEADS: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dx of a block of heads, for every ctas-th tile of tokens, and a partial row of dweight (with ROW one for each of
    TOKENS)."""
    LINES: gl.constexpr = step_layout(P, TOKENS, HEADS, gl.num_warps(), ROW, 8)
    WORDS: gl.constexpr = step_layout(P, TOKENS, HEADS, gl.num_warps(), ROW, 4)
    DX: gl.constexpr = dx_ptr.dtype.element_ty
    xs, dys = smem_tiles(SLOTS, x_desc), smem_tiles(SLOTS, dy_desc)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = gl.allocate_shared_memory(gl.float32, [TOKENS, gl.num_warps() // TOKENS if ROW else 1], PLAIN)
    also_room = gl.allocate_shared_memory(gl.float32, [TOKENS, gl.num_warps() // TOKENS if ROW else 1], PLAIN)
    full = mbarriers((SLOTS, 1))
    fence_async()
    head_block, cta = cta % head_blocks, cta // head_blocks
    head0 = head_block * (HEADS * STEPS)
    mine = (tiles - cta + ctas - 1) // ctas
    row, block = cta // blocks, cta % blocks
    far_row, far_block = row, block
    for i in range(SLOTS):
        if i < mine:
            _bring(x_desc, dy_desc, xs, dys, full, i, far_row, far_block * TOKENS, head0)
        far_row, far_block = _next(far_row, far_block, blocks, rows_on, blocks_on)
    cols = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, gl.SliceLayout(1, LINES))), 0)
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(1, LINES)))
    pair = gl.expand_dims(cols, 1)
    token = gl.expand_dims(gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(2, LINES))), 1), 2)
    head = gl.expand_dims(gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, LINES))), 0), 2)
    word = gl.arange(0, P // 2, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    head_w = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    weights, sums = (), ()
    for step in gl.static_range(STEPS if ROW else 1):
        if weight_ptr is not None:
            here, here_w = head + step * HEADS, head_w + step * HEADS
            weights += (load_factors(weight_ptr, here, pair, here_w, word, num_heads, P, EVEN, ROW),)
        zero = gl.full([TOKENS, HEADS, P], 0.0, gl.float32, LINES)
        sums += ((zero, zero),)
    each = 1.0 / (2 * P)
    if ROW:
        each = 1.0 / (2 * P * num_heads)
    first = block * TOKENS
    cos, sin = load_angles(angles, where, row, first + tokens, cols, num_tokens, PER_TOKEN, EVEN)
    at = wide(token, FAR) * dx_token + wide(head, FAR) * dx_head + pair
    for i in range(mine):
        slot = i % SLOTS
        mbarrier_wait(full.index(slot), i // SLOTS % 2)
        x_tile = _tile(xs, slot, TOKENS, HEADS * STEPS, 2 * P)
        dy_tile = _tile(dys, slot, TOKENS, HEADS * STEPS, 2 * P)
        own_cos, own_sin = cos.to(gl.float32), sin.to(gl.float32)
        loaded, squares, dots = (), None, None
        for step in gl.static_range(STEPS):
            lines, dy_lines = x_tile.slice(step * HEADS, HEADS, 1), dy_tile.slice(step * HEADS, HEADS, 1)
            half1, half2 = lines.slice(0, P // 2, 2).load(WORDS), lines.slice(P // 2, P // 2, 2).load(WORDS)
            x1, x2 = widened(half1, DX, P, LINES), widened(half2, DX, P, LINES)
            dy1 = widened(dy_lines.slice(0, P // 2, 2).load(WORDS), DX, P, LINES)
            dy2 = widened(dy_lines.slice(P // 2, P // 2, 2).load(WORDS), DX, P, LINES)
            n1, n2 = dy1 * own_cos + dy2 * own_sin, dy2 * own_cos - dy1 * own_sin
            g1, g2 = _weighted(n1, n2, weights, step if ROW else 0, weight_ptr, weight_offset, P, LINES)
            if not ROW:
                squares, dots = None, None
            squares = added(added(squares, x1, x1), x2, x2)
            dots = added(added(dots, g1, x1), g2, x2)
            loaded += ((half1, half2, n1, n2, squares, dots),)
        if ROW:
            post(squares, room, TOKENS)
            post(dots, also_room, TOKENS)
            spread, dot = sum_row(room, TOKENS, LINES), sum_row(also_room, TOKENS, LINES)
        elif gl.num_warps() > 1:
            syncthreads()
        # all warps have read the slot
        if i + SLOTS < mine:
            far = far_block * TOKENS
            _bring(x_desc, dy_desc, xs, dys, full, slot, far_row, far, head0)
        far_row, far_block = _next(far_row, far_block, blocks, rows_on, blocks_on)
        dx_to = dx_ptr + row.to(gl.int64) * dx_row + first.to(gl.int64) * dx_token + head0.to(gl.int64) * dx_head
        own_first = first
        row, block = _next(row, block, blocks, rows_on, blocks_on)
        first = block * TOKENS
        if i + 1 < mine:
            cos, sin = load_angles(angles, where, row, first + tokens, cols, num_tokens, PER_TOKEN, EVEN)
        grown = ()
        for step in gl.static_range(STEPS):
            half1, half2, n1, n2, squares, dots = loaded[step]
            if not ROW:
                spread, dot = sum_line(squares, LINES), sum_line(dots, LINES)
            rstd = gl.rsqrt(spread * each + eps)
            if not EVEN:
                inside = (own_first + token < num_tokens) & (head0 + step * HEADS + head < num_heads)
                # 0 for lines that do not exist, whose x of 0 would add NaN to dweight where eps is 0
                rstd = gl.where(inside, rstd, 0.0)
            x1, x2 = widened(half1, DX, P, LINES) * rstd, widened(half2, DX, P, LINES) * rstd
            mean = dot * (rstd * each)
            if partial_ptr is not None:
                sum1, sum2 = sums[step if ROW else 0]
                if ROW:
                    grown += ((sum1 + n1 * x1, sum2 + n2 * x2),)
                else:
                    sums = ((sum1 + n1 * x1, sum2 + n2 * x2),)
            g1, g2 = _weighted(n1, n2, weights, step if ROW else 0, weight_ptr, weight_offset, P, LINES)
            d1, d2 = (g1 - x1 * mean) * rstd, (g2 - x2 * mean) * rstd
            to = dx_to + (at + wide(gl.to_tensor(step * HEADS), FAR) * dx_head)
            if EVEN:
                gl.store(to, d1.to(DX))
                gl.store(to + P, d2.to(DX))
            else:
                inside = inside & (pair >= 0)
                gl.store(to, d1.to(DX), mask=inside)
                gl.store(to + P, d2.to(DX), mask=inside)
        if ROW and partial_ptr is not None:
            sums = grown
    launch_dependents()  # the sums of partial rows
    if partial_ptr is not None:
        if ROW:
            for step in gl.static_range(STEPS):
                here = head + step * HEADS
                known = (here < num_heads) & (pair >= 0) & (token >= 0)
                line = (cta * TOKENS + token).to(gl.int64) * (num_heads * (2 * P))
                to = partial_ptr + line + (here * (2 * P) + pair)
                gl.store(to, sums[step][0], mask=known)
                gl.store(to + P, sums[step][1], mask=known)
        else:
            OF_PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LINES))
            line = (cta * head_blocks + head_block).to(gl.int64) * (2 * P)
            to = partial_ptr + line + gl.arange(0, P, OF_PAIR)
            gl.store(to, gl.convert_layout(gl.sum(gl.sum(sums[0][0], 1), 0), OF_PAIR))
            gl.store(to + P, gl.convert_layout(gl.sum(gl.sum(sums[0][1], 1), 0), OF_PAIR))


# integers that change from call to call, which no address is a multiple of
VARYING = [
    f"{side}_{name}"
    for side in "qk"
    for name in ("blocks", "ctas", "token_blocks", "rows_on", "blocks_on", "tiles")
] + ["num_positions", "offset", "num_tokens"]  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def norm_rope_bwd_tiles_kernel(
    q_desc, dq_out_desc, dq_ptr, dq_row, dq_head, dq_token, q_weight_ptr, q_partial_ptr,
    q_heads, q_blocks, q_ctas, q_token_blocks, q_rows_on, q_blocks_on, q_tiles,
    k_desc, dk_out_desc, dk_ptr, dk_row, dk_head, dk_token, k_weight_ptr, k_partial_ptr,
    k_heads, k_blocks, k_ctas, k_token_blocks, k_rows_on, k_blocks_on, k_tiles,
    cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset,
    num_tokens, eps, weight_offset,
    ROW: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    Q_TOKENS: gl.constexpr, Q_HEADS: gl.constexpr, Q_STEPS: gl.constexpr,
    K_TOKENS: gl.constexpr, K_HEADS: gl.constexpr, K_STEPS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The first CTAs share q's tiles, the others k's."""
    angles = cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions
    where = positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset
    number = gl.program_id(0)
    if k_desc is None or number < q_ctas * q_blocks:
        _backward_side(
            q_desc, dq_out_desc, dq_ptr, dq_row, dq_head, dq_token, q_weight_ptr, q_partial_ptr, q_heads,
            number, q_blocks, q_ctas, q_token_blocks, q_rows_on, q_blocks_on, q_tiles,
            num_tokens, angles, where, eps, weight_offset,
            ROW, PER_TOKEN, EVEN, FAR, P, Q_TOKENS, Q_HEADS, Q_STEPS, SLOTS,
        )  # fmt: skip
    else:
        _backward_side(
            k_desc, dk_out_desc, dk_ptr, dk_row, dk_head, dk_token, k_weight_ptr, k_partial_ptr, k_heads,
            number - q_ctas * q_blocks, k_blocks, k_ctas, k_token_blocks, k_rows_on, k_blocks_on,
            k_tiles, num_tokens, angles, where, eps, weight_offset,
            ROW, PER_TOKEN, EVEN, FAR, P, K_TOKENS, K_HEADS, K_STEPS, SLOTS,
        )  # fmt: skip
