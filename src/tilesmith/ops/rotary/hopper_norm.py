"""rms_norm_rope on Hopper, in Gluon: programs that stay, weights in registers, tiles brought ahead of their use."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.bulk import for_bulk
from tilesmith.ops.column_sums_triton import add_partials
from tilesmith.ops.gluon_shim import (
    TensorDescriptor,
    barriers,
    expect,
    fence,
    fetch,
    gl,
    gluon,
    launch_dependents,
    reinterpret,
    thread_barrier,
    tiles_of,
    wait,
)
from tilesmith.ops.rotary.rows import row_stride, rows_grid
from tilesmith.ops.rows_gluon import apart, opaque
from tilesmith.ops.rows_held_gluon import aligned_vector

# A tile is [tokens, heads, features] of q or of k, worked on in steps of fewer heads and by halves of a line, the D
# features of one head: a thread has 8 neighbours of each half, and a word two of them. ROW: all heads of a token are
# normalised together, so a tile has all of them, and a warp has heads of one token.


@gluon.constexpr_function
def _lines(P, TOKENS, HEADS, WARPS, ROW, EACH):
    """The layout [tokens, heads, pairs] of a step, or of its words; EACH: neighbours that a thread has."""
    lanes = P // 8
    each = 1 if ROW else max(1, 32 // lanes // HEADS)
    warps = TOKENS // each
    return gl.BlockedLayout([1, 1, EACH], [each, 32 // lanes // each, lanes], [warps, WARPS // warps, 1], [2, 1, 0])


@gluon.jit
def _halves(x):
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))


@gluon.jit
def _added(total, a, b, DEEP: gl.constexpr = 3):
    """total, None for 0, and the products a · b of the 8 neighbours that a thread has, one after the other."""
    if DEEP > 0:
        a, more_a = _halves(a)
        b, more_b = _halves(b)
        return _added(_added(total, a, b, DEEP - 1), more_a, more_b, DEEP - 1)
    elif total is None:
        return a * b
    else:
        return total + a * b


@gluon.jit
def _sum_line(a, LINES: gl.constexpr):
    """Sums [tokens, heads, 1] of what threads have added up of each line."""
    return gl.expand_dims(gl.convert_layout(gl.sum(a, 2), gl.SliceLayout(2, LINES)), 2)


@gluon.jit
def _post(a, room, TOKENS: gl.constexpr):
    """Store what each warp has added up of its one token, for `_sum_row`."""
    room.store(gl.sum(gl.sum(gl.reshape(a, [TOKENS, room.shape[1], a.shape[1] // room.shape[1], a.shape[2]]), 3), 2))


@gluon.jit
def _sum_row(room, TOKENS: gl.constexpr, LINES: gl.constexpr):
    """Sums [tokens, 1, 1] over the warps of a token."""
    WARPS: gl.constexpr = room.shape[1]
    found = gl.sum(room.load(gl.BlockedLayout([1, WARPS], [1, 32], [TOKENS, WARPS], [1, 0])), 1)
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(1, gl.SliceLayout(2, LINES))), 1), 2)


@gluon.jit
def _widened(words, dtype: gl.constexpr, P: gl.constexpr, LINES: gl.constexpr):
    """Halves of lines in fp32."""
    if words.dtype == gl.int32:
        low, high = apart(words, dtype)
        whole = gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1], P])
        return gl.convert_layout(whole, LINES, assert_trivial=True)
    else:
        return words.to(gl.float32)


@gluon.jit
def _tile(slots, slot, TOKENS: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr):
    """A slot as lines [tokens, heads, D / 2] of words of two values."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return reinterpret(slots.index(slot), gl.int32, [TOKENS, HEADS, D // 2], PLAIN)


@gluon.jit
def _bring(x_desc, dy_desc, xs, dys, full, slot, row, token, head):
    """Start to copy the tiles at a token and a head to a slot."""
    at = [row, token, head, 0]
    expect(full.index(slot), x_desc.block_type.nbytes + dy_desc.block_type.nbytes)
    fetch(x_desc, at, full.index(slot), xs.index(slot))
    fetch(dy_desc, at, full.index(slot), dys.index(slot))


@gluon.jit
def _next(row, block, blocks, rows_on, blocks_on):
    """Row of the batch and block of tokens of the tile that comes rows_on · blocks + blocks_on after this one."""
    block += blocks_on
    past = block >= blocks
    return row + rows_on + past.to(gl.int32), gl.where(past, block - blocks, block)


@gluon.jit
def _angles(angles, where, row, tokens, cols, num_tokens, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr):
    """cos and sin [tokens, 1, pairs] as they lie in memory, NaN at positions that the table does not hold, 0 beyond the
    last token."""
    cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions = angles
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset = where
    row = row.to(gl.int64)
    exists = tokens < num_tokens
    if PER_TOKEN:
        position = tokens.to(gl.int64)
    elif positions_ptr is not None:
        entry = positions_ptr + row * positions_row + tokens.to(gl.int64) * positions_token
        position = gl.load(entry, mask=exists, other=0).to(gl.int64)
    else:
        position = tokens.to(gl.int64) + offset
        if offsets_ptr is not None:
            position += gl.load(offsets_ptr + row * offsets_step).to(gl.int64)
    held, missing = (position >= 0) & (position < num_positions), float("nan")
    if not EVEN:
        held = held & exists
        missing = gl.expand_dims(gl.where(exists, missing, 0.0), 1) + gl.zeros_like(cols).to(gl.float32)
        missing = missing.to(cos_ptr.dtype.element_ty)
    held, at = gl.expand_dims(held, 1), gl.expand_dims(position, 1)
    cos_ptr += row * cos_row + at * cos_position + cols
    sin_ptr += row * sin_row + at * sin_position + cols
    # What streams through the L2 cache would drive them out between a token of one row of the batch and the next.
    cos = gl.load(cos_ptr, mask=held, other=missing, eviction_policy="evict_last")
    sin = gl.load(sin_ptr, mask=held, other=missing, eviction_policy="evict_last")
    return gl.expand_dims(cos, 1), gl.expand_dims(sin, 1)


@gluon.jit
def _words(ptr, at, inside, EVEN: gl.constexpr):
    """What lies at `at`: words of two values of 16 bits, or values of fp32; 0 where not inside."""
    if EVEN:
        return gl.load(ptr + at)
    else:
        return gl.load(ptr + at, mask=inside, other=0)


@gluon.jit
def _factors(
    weight_ptr, head, pair, head_w, word, num_heads, P: gl.constexpr, EVEN: gl.constexpr, ROW: gl.constexpr
):  # fmt: skip
    """Weights of both halves of lines, those of the heads where ROW, as `_widened` takes them."""
    WORDS: gl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth == 16
    PER: gl.constexpr = 2 if WORDS else 1
    ptr = weight_ptr.to(gl.pointer_type(gl.int32)) if WORDS else weight_ptr
    heads, at = head_w if WORDS else head, word if WORDS else pair
    if ROW:
        inside = (heads < num_heads) & (at >= 0)
        at += heads * (2 * P // PER)
        return _words(ptr, at, inside, EVEN), _words(ptr + P // PER, at, inside, EVEN)
    else:
        return gl.load(ptr + at), gl.load(ptr + P // PER + at)


@gluon.jit
def _wide(index, FAR: gl.constexpr):
    """An index that strides multiply; FAR: what they make of it may not fit into 32 bits."""
    return index.to(gl.int64) if FAR else index


@gluon.jit
def _rounded(value, dtype: gl.constexpr):
    return value.to(dtype).to(gl.float32)


@gluon.jit
def _norm_rope_row(
    x_ptr, x_row, x_head, x_token, y_ptr, y_row, y_head, y_token, weight_ptr, num_heads, row, block, num_tokens,
    angles, where, eps, weight_offset,
    LLAMA: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    TOKENS: gl.constexpr, HEADS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """y of a block of tokens, whose heads are normalised together. Strides of x: in words."""
    LINES: gl.constexpr = _lines(P, TOKENS, HEADS, gl.num_warps(), True, 8)
    WORDS: gl.constexpr = _lines(P, TOKENS, HEADS, gl.num_warps(), True, 4)
    Y: gl.constexpr = y_ptr.dtype.element_ty
    W: gl.constexpr = weight_ptr.dtype.element_ty
    first = block * TOKENS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = gl.allocate_shared_memory(gl.float32, [TOKENS, gl.num_warps() // TOKENS], PLAIN)
    word = gl.arange(0, P // 2, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    token_w = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    head_w = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32)) + row * x_row + first.to(gl.int64) * x_token
    at = _wide(token_w, FAR) * x_token + _wide(head_w, FAR) * x_head + word
    parts, factors = (), ()
    for step in gl.static_range(STEPS):
        inside = (first + token_w < num_tokens) & (head_w + step * HEADS < num_heads) & (word >= 0)
        to = x_ptr + _wide(gl.to_tensor(step * HEADS), FAR) * x_head
        parts += ((_words(to, at, inside, EVEN), _words(to + P // 2, at, inside, EVEN)),)
    cols = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, gl.SliceLayout(1, LINES))), 0)
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(1, LINES)))
    pair = gl.expand_dims(cols, 1)
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(2, LINES)))[:, None, None]
    head = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))[None, :, None]
    cos, sin = _angles(angles, where, row, first + tokens, cols, num_tokens, PER_TOKEN, EVEN)
    for step in gl.static_range(STEPS):
        here, here_w = head + step * HEADS, head_w + step * HEADS
        factors += (_factors(weight_ptr, here, pair, here_w, word, num_heads, P, EVEN, True),)
    # All is asked for before x is worked on, which the barrier and the 0 behind it are for: else ptxas asks for angles
    # and weights when x has come. H200, bf16, 16,384 tokens of 32 and 8 heads of 128: 83.2 for 84.3 µs.
    nothing = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    nothing.store(gl.full([32], 0, gl.int32, ONE))
    thread_barrier()
    zero = gl.max(nothing.load(ONE), 0)
    squares = None
    for step in gl.static_range(STEPS):
        x1, x2 = _widened(parts[step][0] | zero, Y, P, LINES), _widened(parts[step][1] | zero, Y, P, LINES)
        squares = _added(_added(squares, x1, x1), x2, x2)
    _post(squares, room, TOKENS)
    rstd = gl.rsqrt(_sum_row(room, TOKENS, LINES) * (1.0 / (2 * P * num_heads)) + eps)
    cos, sin = cos.to(gl.float32), sin.to(gl.float32)
    y_ptr += row * y_row + first.to(gl.int64) * y_token
    for step in gl.static_range(STEPS):
        x1, x2 = _widened(opaque(parts[step][0]), Y, P, LINES), _widened(opaque(parts[step][1]), Y, P, LINES)
        x1, x2 = x1 * rstd, x2 * rstd
        if LLAMA:
            x1, x2 = _rounded(x1, Y), _rounded(x2, Y)
        f1, f2 = _widened(factors[step][0], W, P, LINES), _widened(factors[step][1], W, P, LINES)
        if weight_offset is not None:
            f1, f2 = f1 + weight_offset, f2 + weight_offset
        if LLAMA and W == Y:
            f1, f2 = _rounded(f1, Y), _rounded(f2, Y)
        x1, x2 = x1 * f1, x2 * f2
        if LLAMA:
            x1, x2 = _rounded(x1, Y), _rounded(x2, Y)
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        to = y_ptr + (_wide(token, FAR) * y_token + _wide(head + step * HEADS, FAR) * y_head + pair)
        if EVEN:
            gl.store(to, y1.to(Y))
            gl.store(to + P, y2.to(Y))
        else:
            inside = (first + token < num_tokens) & (head + step * HEADS < num_heads) & (pair >= 0)
            gl.store(to, y1.to(Y), mask=inside)
            gl.store(to + P, y2.to(Y), mask=inside)


@gluon.jit
def _weighted(
    n1, n2, weights, WHICH: gl.constexpr, weight_ptr, weight_offset, P: gl.constexpr, LINES: gl.constexpr
):  # fmt: skip
    """The two halves times their weights."""
    if weight_ptr is not None:
        half1, half2 = weights[WHICH]
        f1 = _widened(half1, weight_ptr.dtype.element_ty, P, LINES)
        f2 = _widened(half2, weight_ptr.dtype.element_ty, P, LINES)
        if weight_offset is not None:
            f1, f2 = f1 + weight_offset, f2 + weight_offset
        n1, n2 = n1 * f1, n2 * f2
    return n1, n2


@gluon.jit
def _backward_side(
    x_desc, dy_desc, dx_ptr, dx_row, dx_head, dx_token, weight_ptr, partial_ptr, num_heads, program, head_blocks,
    programs, blocks, rows_on, blocks_on, tiles, num_tokens, angles, where, eps,
    weight_offset,
    ROW: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    TOKENS: gl.constexpr, HEADS: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dx of a block of heads and of every programs-th tile, and a partial row of dweight, of ROW one for each of
    TOKENS."""
    LINES: gl.constexpr = _lines(P, TOKENS, HEADS, gl.num_warps(), ROW, 8)
    WORDS: gl.constexpr = _lines(P, TOKENS, HEADS, gl.num_warps(), ROW, 4)
    DX: gl.constexpr = dx_ptr.dtype.element_ty
    xs, dys = tiles_of(SLOTS, x_desc), tiles_of(SLOTS, dy_desc)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = gl.allocate_shared_memory(gl.float32, [TOKENS, gl.num_warps() // TOKENS if ROW else 1], PLAIN)
    also_room = gl.allocate_shared_memory(gl.float32, [TOKENS, gl.num_warps() // TOKENS if ROW else 1], PLAIN)
    full = barriers(SLOTS, 1)
    fence()
    head_block, program = program % head_blocks, program // head_blocks
    head0 = head_block * (HEADS * STEPS)
    mine = (tiles - program + programs - 1) // programs
    row, block = program // blocks, program % blocks
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
            weights += (_factors(weight_ptr, here, pair, here_w, word, num_heads, P, EVEN, ROW),)
        zero = gl.full([TOKENS, HEADS, P], 0.0, gl.float32, LINES)
        sums += ((zero, zero),)
    each = 1.0 / (2 * P)
    if ROW:
        each = 1.0 / (2 * P * num_heads)
    first = block * TOKENS
    cos, sin = _angles(angles, where, row, first + tokens, cols, num_tokens, PER_TOKEN, EVEN)
    at = _wide(token, FAR) * dx_token + _wide(head, FAR) * dx_head + pair
    for i in range(mine):
        slot = i % SLOTS
        wait(full.index(slot), i // SLOTS % 2)
        x_tile = _tile(xs, slot, TOKENS, HEADS * STEPS, 2 * P)
        dy_tile = _tile(dys, slot, TOKENS, HEADS * STEPS, 2 * P)
        own_cos, own_sin = cos.to(gl.float32), sin.to(gl.float32)
        loaded, squares, dots = (), None, None
        for step in gl.static_range(STEPS):
            lines, dy_lines = x_tile.slice(step * HEADS, HEADS, 1), dy_tile.slice(step * HEADS, HEADS, 1)
            half1, half2 = lines.slice(0, P // 2, 2).load(WORDS), lines.slice(P // 2, P // 2, 2).load(WORDS)
            x1, x2 = _widened(half1, DX, P, LINES), _widened(half2, DX, P, LINES)
            dy1 = _widened(dy_lines.slice(0, P // 2, 2).load(WORDS), DX, P, LINES)
            dy2 = _widened(dy_lines.slice(P // 2, P // 2, 2).load(WORDS), DX, P, LINES)
            n1, n2 = dy1 * own_cos + dy2 * own_sin, dy2 * own_cos - dy1 * own_sin
            g1, g2 = _weighted(n1, n2, weights, step if ROW else 0, weight_ptr, weight_offset, P, LINES)
            if not ROW:
                squares, dots = None, None
            squares = _added(_added(squares, x1, x1), x2, x2)
            dots = _added(_added(dots, g1, x1), g2, x2)
            loaded += ((half1, half2, n1, n2, squares, dots),)
        if ROW:
            _post(squares, room, TOKENS)
            _post(dots, also_room, TOKENS)
            spread, dot = _sum_row(room, TOKENS, LINES), _sum_row(also_room, TOKENS, LINES)
        elif gl.num_warps() > 1:
            thread_barrier()
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
            cos, sin = _angles(angles, where, row, first + tokens, cols, num_tokens, PER_TOKEN, EVEN)
        grown = ()
        for step in gl.static_range(STEPS):
            half1, half2, n1, n2, squares, dots = loaded[step]
            if not ROW:
                spread, dot = _sum_line(squares, LINES), _sum_line(dots, LINES)
            rstd = gl.rsqrt(spread * each + eps)
            if not EVEN:
                inside = (own_first + token < num_tokens) & (head0 + step * HEADS + head < num_heads)
                # 0 for lines that do not exist, whose x of 0 would add NaN to dweight where eps is 0
                rstd = gl.where(inside, rstd, 0.0)
            x1, x2 = _widened(half1, DX, P, LINES) * rstd, _widened(half2, DX, P, LINES) * rstd
            mean = dot * (rstd * each)
            if partial_ptr is not None:
                sum1, sum2 = sums[step if ROW else 0]
                if ROW:
                    grown += ((sum1 + n1 * x1, sum2 + n2 * x2),)
                else:
                    sums = ((sum1 + n1 * x1, sum2 + n2 * x2),)
            g1, g2 = _weighted(n1, n2, weights, step if ROW else 0, weight_ptr, weight_offset, P, LINES)
            d1, d2 = (g1 - x1 * mean) * rstd, (g2 - x2 * mean) * rstd
            to = dx_to + (at + _wide(gl.to_tensor(step * HEADS), FAR) * dx_head)
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
                line = (program * TOKENS + token).to(gl.int64) * (num_heads * (2 * P))
                to = partial_ptr + line + (here * (2 * P) + pair)
                gl.store(to, sums[step][0], mask=known)
                gl.store(to + P, sums[step][1], mask=known)
        else:
            OF_PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LINES))
            line = (program * head_blocks + head_block).to(gl.int64) * (2 * P)
            to = partial_ptr + line + gl.arange(0, P, OF_PAIR)
            gl.store(to, gl.convert_layout(gl.sum(gl.sum(sums[0][0], 1), 0), OF_PAIR))
            gl.store(to + P, gl.convert_layout(gl.sum(gl.sum(sums[0][1], 1), 0), OF_PAIR))


# integers that change from call to call, which no address is a multiple of
VARYING = [
    f"{side}_{name}"
    for side in "qk"
    for name in ("blocks", "programs", "token_blocks", "rows_on", "blocks_on", "tiles")
] + ["num_positions", "offset", "num_tokens"]  # fmt: skip


@gluon.jit(do_not_specialize=["num_positions", "offset", "num_rows", "num_tokens"])
def norm_rope_fwd_rows_kernel(
    q_ptr, q_row, q_head, q_token, q_out_ptr, q_out_row, q_out_head, q_out_token, q_weight_ptr, q_heads,
    k_ptr, k_row, k_head, k_token, k_out_ptr, k_out_row, k_out_head, k_out_token, k_weight_ptr, k_heads,
    cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset,
    num_rows, num_tokens, eps, weight_offset,
    LLAMA: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    Q_TOKENS: gl.constexpr, Q_HEADS: gl.constexpr, Q_STEPS: gl.constexpr,
    K_TOKENS: gl.constexpr, K_HEADS: gl.constexpr, K_STEPS: gl.constexpr,
):  # fmt: skip
    """Program: a block of tokens of q or, after those of as many tokens, of k. It reads all of it at once and ends when
    that is written."""
    angles = cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions
    where = positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset
    GROUP: gl.constexpr = max(Q_TOKENS, K_TOKENS)
    Q_EACH: gl.constexpr = GROUP // Q_TOKENS
    K_EACH: gl.constexpr = 0 if k_ptr is None else GROUP // K_TOKENS
    group, place = gl.program_id(0) // (Q_EACH + K_EACH), gl.program_id(0) % (Q_EACH + K_EACH)
    row = (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)).to(gl.int64)
    if row >= num_rows:
        return
    if k_ptr is None or place < Q_EACH:
        _norm_rope_row(
            q_ptr, q_row, q_head, q_token, q_out_ptr, q_out_row, q_out_head, q_out_token, q_weight_ptr, q_heads,
            row, group * Q_EACH + place, num_tokens, angles, where, eps, weight_offset,
            LLAMA, PER_TOKEN, EVEN, FAR, P, Q_TOKENS, Q_HEADS, Q_STEPS,
        )  # fmt: skip
    else:
        _norm_rope_row(
            k_ptr, k_row, k_head, k_token, k_out_ptr, k_out_row, k_out_head, k_out_token, k_weight_ptr, k_heads,
            row, group * K_EACH + place - Q_EACH, num_tokens, angles, where, eps, weight_offset,
            LLAMA, PER_TOKEN, EVEN, FAR, P, K_TOKENS, K_HEADS, K_STEPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def norm_rope_bwd_tiles_kernel(
    q_desc, dq_out_desc, dq_ptr, dq_row, dq_head, dq_token, q_weight_ptr, q_partial_ptr,
    q_heads, q_blocks, q_programs, q_token_blocks, q_rows_on, q_blocks_on, q_tiles,
    k_desc, dk_out_desc, dk_ptr, dk_row, dk_head, dk_token, k_weight_ptr, k_partial_ptr,
    k_heads, k_blocks, k_programs, k_token_blocks, k_rows_on, k_blocks_on, k_tiles,
    cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset,
    num_tokens, eps, weight_offset,
    ROW: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    Q_TOKENS: gl.constexpr, Q_HEADS: gl.constexpr, Q_STEPS: gl.constexpr,
    K_TOKENS: gl.constexpr, K_HEADS: gl.constexpr, K_STEPS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The first programs share q's tiles, the others k's."""
    angles = cos_ptr, sin_ptr, cos_row, sin_row, cos_position, sin_position, num_positions
    where = positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, offset
    number = gl.program_id(0)
    if k_desc is None or number < q_programs * q_blocks:
        _backward_side(
            q_desc, dq_out_desc, dq_ptr, dq_row, dq_head, dq_token, q_weight_ptr, q_partial_ptr, q_heads,
            number, q_blocks, q_programs, q_token_blocks, q_rows_on, q_blocks_on, q_tiles,
            num_tokens, angles, where, eps, weight_offset,
            ROW, PER_TOKEN, EVEN, FAR, P, Q_TOKENS, Q_HEADS, Q_STEPS, SLOTS,
        )  # fmt: skip
    else:
        _backward_side(
            k_desc, dk_out_desc, dk_ptr, dk_row, dk_head, dk_token, k_weight_ptr, k_partial_ptr, k_heads,
            number - q_programs * q_blocks, k_blocks, k_programs, k_token_blocks, k_rows_on, k_blocks_on,
            k_tiles, num_tokens, angles, where, eps, weight_offset,
            ROW, PER_TOKEN, EVEN, FAR, P, K_TOKENS, K_HEADS, K_STEPS, SLOTS,
        )  # fmt: skip


class TilesConfig(NamedTuple):
    """steps: of a tile, in each of which a warp reads lines at once. slots: tiles a program has room for. per_sm:
    programs of a multiprocessor. max_registers: of a thread; 0 leaves it to the compiler."""

    steps: int
    num_warps: int
    slots: int
    per_sm: int
    max_registers: int


class _Side(NamedTuple):
    """How q or k is cut into tiles [tokens, heads · steps] and those are shared out."""

    tokens: int
    heads: int
    steps: int
    head_blocks: int
    tiles: int  # of a block of heads
    token_blocks: int  # tiles of a row of the batch
    even: bool

    @property
    def lines(self) -> int:
        """Of a tile."""
        return self.tokens * self.heads * self.steps

    def flags(self, side: str) -> dict[str, int]:
        return {f"{side}_TOKENS": self.tokens, f"{side}_HEADS": self.heads, f"{side}_STEPS": self.steps}

    def shares(self, programs: int) -> tuple[int, ...]:
        """What the kernel takes from `blocks` to `tiles`."""
        return self.head_blocks, programs, self.token_blocks, *divmod(programs, self.token_blocks), self.tiles


def _side(x: Tensor, row: bool, config: TilesConfig) -> _Side:
    batch, num_heads, num_tokens, dim = x.shape
    at_once, heads, warps, steps = 512 // dim, next_power_of_2(num_heads), config.num_warps, config.steps
    if row:  # a warp has heads of one token
        share = max(1, min(warps, heads // (at_once * steps)))
        tokens, steps = warps // share, max(1, heads // (at_once * share))
        block = share * at_once
    else:
        steps = min(steps, heads)
        block = min(heads // steps, warps * at_once)
        tokens = warps * at_once // block
    blocks = cdiv(num_tokens, tokens)
    head_blocks = cdiv(num_heads, block * steps)
    even = num_heads % (block * steps) == 0 and num_tokens % tokens == 0
    return _Side(tokens, block, steps, head_blocks, batch * blocks, blocks, even)


def _programs(x: Tensor, sides: Sequence[_Side | None], config: TilesConfig) -> list[int]:
    """How many programs share the tiles of a block of heads of each side: in proportion to its tiles, and none with a
    tile less than its neighbours if that frees a whole program."""
    works = [0 if side is None else side.tiles * side.head_blocks * side.lines for side in sides]
    left, found = max(1, arch_of(x.device).sms) * config.per_sm, []
    for i, (side, work) in enumerate(zip(sides, works)):
        if side is None:
            found.append(0)
        else:
            share = round(left * work / sum(works[i:])) // side.head_blocks
            found.append(cdiv(side.tiles, cdiv(side.tiles, max(1, min(share, side.tiles)))))
            left -= found[-1] * side.head_blocks
    return found


def _grid(sides: Sequence[_Side | None], programs: Sequence[int]) -> int:
    return sum(side.head_blocks * number for side, number in zip(sides, programs) if side is not None)


def _described(x: Tensor, side: _Side) -> TensorDescriptor:
    """x [B, H, T, D] as [B, T, H, D] for the tensor memory accelerator, in tiles."""
    x, (row, head, token, last) = for_bulk(x)
    x = x.transpose(1, 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=4)
    tile = [1, side.tokens, side.heads * side.steps, x.shape[3]]
    return TensorDescriptor(x, list(x.shape), [row, token, head, last], tile, layout)


class _Where(NamedTuple):
    """The arguments that say where tokens are."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    offsets: Tensor | None
    offset: int

    def arguments(self) -> tuple:
        cos, sin, positions, offsets = self.cos, self.sin, self.positions, self.offsets
        by_position = (None, 0, 0) if positions is None else (positions, row_stride(positions, 2), positions.stride(-1))
        return (
            cos, sin, row_stride(cos, 3), row_stride(sin, 3), cos.stride(-2), sin.stride(-2), cos.shape[-2],
            *by_position, offsets, 0 if offsets is None else offsets.stride(0), self.offset,
        )  # fmt: skip


def _flags(
    where: _Where, dim: int, sides: Sequence[_Side | None], strided: Sequence[Tensor], config: TilesConfig
) -> dict[str, Any]:
    """strided: what is read and written by strides."""
    sides = [side for side in sides if side is not None]
    reaches = [
        x.stride(1) * side.heads * side.steps + x.stride(2) * side.tokens
        for x in strided
        if x.ndim == 4
        for side in sides
    ]
    flags = {"PER_TOKEN": where.cos.ndim == 3, "EVEN": all(side.even for side in sides), "FAR": max(reaches) >= 2**31}
    flags |= sides[0].flags("Q") | sides[-1].flags("K") | {"P": dim // 2, "num_warps": config.num_warps}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


def _dims(q: Tensor, k: Tensor | None, norm_dim: str) -> dict[str, int]:
    """group: features that are normalised together."""
    batch, heads, tokens, dim = q.shape
    heads = max(heads, 0 if k is None else k.shape[1])
    return {"tokens": batch * tokens, "dim": dim, "group": dim if norm_dim == "head" else dim * heads}


def _warps(dims: Mapping[str, int]) -> int:
    """Of a program that has a whole row: so many that a thread has two steps of it."""
    return 8 if dims["group"] > 4096 else 4


def _forward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> TilesConfig:
    """H200, bf16, 16,384 tokens of 32 and 8 heads of 128, of the copy rate: 0.944 to 0.951, by two warps 0.947, by
    eight 0.91, one step 0.88; Triton's, q and k by a launch each, 0.87, by one launch 0.93; programs that stay, tiles
    brought ahead, 0.87."""
    return TilesConfig(2, _warps(dims), 0, 0, 0)


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> TilesConfig:
    """H200, bf16, of the copy rate (Triton's) at head dims of 128 and 64: one slot 0.957 and 0.946 (0.936 and 0.904),
    two 0.934 and 0.935; one step by two warps, two slots 0.936 and 0.937, by one warp 0.935 and 0.931; eight programs
    of fewer registers, which spill, 0.91 and 0.90. Rows of 32 and 8 heads of 128: 0.925 (0.683), with three slots
    0.913, with one 0.81, three programs of fewer registers 0.88; one step by eight warps 0.926, but of one sequence of
    16,384 tokens 0.885 for 0.914. By chunks of tokens of which all rows of the batch have their turn 0.02 less. With
    two slots, without the sums for the weights, 0.96, 0.96 and 0.954."""
    if dims["group"] == dims["dim"]:
        return TilesConfig(2, 2, 1, 6, 0)
    warps = _warps(dims)
    return TilesConfig(2, warps, 2, 8 // warps, 0)


WIDEST = 8192  # features of a row that is normalised as a whole


def _reasons(call: Any) -> list[str]:
    dim, pairs, found = call.q.cols, call.cos.cols, []
    for name, facts in call._asdict().items():
        if getattr(facts, "dtype", None) == torch.float64:
            found.append(f"{name} is float64; these kernels compute in float32")
        elif name in ("q", "k", "dq_out", "dk_out") and facts is not None:
            if facts.dtype not in (torch.bfloat16, torch.float16) or facts.dtype != call.q.dtype:
                found.append(f"{name} has dtype {facts.dtype}; these kernels serve bfloat16 or float16, of all of them")
            if name in ("q", "k") and not facts.unit:
                found.append(f"{name} has a last stride other than 1")
    if dim not in (64, 128, 256) or 2 * pairs != dim:
        found.append(f"{2 * pairs} of {dim} features turn; these kernels turn all of 64, 128 or 256")
    if call.interleaved or not (call.cos.unit and call.sin.unit):
        found.append("pairs are neighbours, or the angles of a position are not; these kernels turn halves of a line")
    if call.cu_seqlens is not None:
        found.append("documents are packed; these kernels do not search for their starts")
    if call.norm_dim == "row":
        found += _row_reasons(call)
    return found


def _row_reasons(call: Any) -> list[str]:
    weights = [call.q_weight] if call.k is None else [call.q_weight, call.k_weight]
    if None in weights:
        return ["there is no weight to tell how wide a row is"]
    widest = max(weight.cols for weight in weights)
    return [f"a row has {widest} features; these kernels hold up to {WIDEST}"] if widest > WIDEST else []


def _forward_reasons(call: Any) -> list[str]:
    return _reasons(call) + ([] if call.norm_dim == "row" else ["heads are normalised one by one"])


def _vjp_reasons(call: Any) -> list[str]:
    wanted = [call.dq_out is not None and call.output_mask[0]]
    if call.k is not None:
        wanted.append(call.dk_out is not None and call.output_mask[1])
    return _reasons(call) + ([] if all(wanted) else ["there is no gradient to begin with, or dq or dk is not wanted"])


def _fit(config: TilesConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> TilesConfig:
    """`config` with no more slots than shared memory has room for."""
    tile = 2 * dtype.itemsize * max(next_power_of_2(dims["group"]), 512 * config.num_warps * config.steps)
    room = arch.shared_memory // max(1, config.per_sm) - 2048
    return config._replace(slots=max(1, min(config.slots, room // tile)))


CHOICES = {"steps": (1, 2, 4), "num_warps": (2, 4, 8)}
LOOP_CHOICES = {**CHOICES, "num_warps": (1, 2, 4, 8), "slots": (1, 2, 3), "per_sm": (1, 2, 4, 6, 8)}


@register_kernel("rms_norm_rope", backend="hopper", rank=25, rejects=_forward_reasons)
@optimize_kernel(space=Space(default=_forward_default, dims=lambda q, k, *rest: _dims(q, k, rest[9]), choices=CHOICES))
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
    config: TilesConfig,
) -> tuple[Tensor, Tensor]:
    """One launch for q and k, each with programs of its own."""
    where = _Where(cos, sin, positions, offsets, offset)
    given = [(x, weight) for x, weight in ((q, q_weight), (k, k_weight)) if x is not None]
    sides = [_side(x, True, config) for x, _ in given]
    outs = [torch.empty_like(x) for x, _ in given]
    group = max(side.tokens for side in sides)
    each = sum(group // side.tokens for side in sides)
    arguments = [
        (
            words,
            *(stride // 2 for stride in words.stride()[:3]),
            out,
            *out.stride()[:3],
            aligned_vector(weight),
            words.shape[1],
        )
        for words, weight, out in ((for_bulk(x)[0], weight, out) for (x, weight), out in zip(given, outs))
    ]
    first, second = [*arguments, (None, 0, 0, 0, None, 0, 0, 0, None, 0)][:2]
    batch, _, num_tokens, dim = q.shape
    if batch * num_tokens:
        flags = _flags(where, dim, sides, [*outs, *(x for x, _ in given)], config)
        flags["EVEN"] = flags["EVEN"] and num_tokens % group == 0
        launch(
            norm_rope_fwd_rows_kernel, (cdiv(num_tokens, group) * each, *rows_grid(batch)),
            *first, *second, *where.arguments(), batch, num_tokens, eps, weight_offset or None,
            LLAMA=casting == "llama", **flags,
        )  # fmt: skip
    return outs[0], outs[1] if len(outs) > 1 else q.new_empty(0)


@register_kernel("rms_norm_rope_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(
    space=Space(
        default=_backward_default,
        dims=lambda dq_out, dk_out, q, k, *rest: _dims(q, k, rest[9]),
        choices=LOOP_CHOICES,
        fit=_fit,
    )
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
    offset: int,
    interleaved: bool,
    norm_dim: str,
    eps: float,
    weight_offset: float,
    output_mask: Sequence[bool],
    *,
    config: TilesConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch for q and k, each with programs of its own, then one for the sums of partial rows."""
    row, where = norm_dim == "row", _Where(cos, sin, positions, offsets, offset)
    given = [
        (dq_out, q, aligned_vector(q_weight), output_mask[2]),
        (dk_out, k, aligned_vector(k_weight), output_mask[3]),
    ]
    sides = [None if x is None or not x.numel() else _side(x, row, config) for _, x, _, _ in given]
    programs = _programs(q, sides, config)
    dx = [q.new_empty(0) if x is None else torch.empty_like(x) for _, x, _, _ in given]
    partials, dweights, arguments = [], [], []
    for (dout, x, weight, sums), side, number, to in zip(given, sides, programs, dx):
        wanted = x is not None and weight is not None and sums
        lines = 0 if side is None else number * (side.tokens if row else side.head_blocks)
        partials.append(x.new_empty(lines, weight.shape[0], dtype=torch.float32) if wanted else None)
        dweights.append(weight.new_empty(weight.shape) if wanted else None)
        if side is not None:
            arguments.append(
                (_described(x, side), _described(dout, side), to, *to.stride()[:3], weight, partials[-1])
                + (x.shape[1], *side.shares(number))
            )
    if arguments:
        absent = (None, None, None, 0, 0, 0, None, None, 0, 0, 0, 0, 0, 0, 0)
        first, second = [*arguments, absent][:2]
        launch(
            norm_rope_bwd_tiles_kernel, (_grid(sides, programs),), *first, *second, *where.arguments(),
            q.shape[2], eps, weight_offset or None,
            ROW=row, SLOTS=config.slots, **_flags(where, q.shape[3], sides, dx, config),
        )  # fmt: skip
    add_partials(tuple(partials), tuple(dweights))
    return *dx, *(q.new_empty(0) if dweight is None else dweight for dweight in dweights)
