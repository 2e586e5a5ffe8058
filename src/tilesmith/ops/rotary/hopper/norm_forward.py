"""The forward of rms_norm_rope on Hopper where all heads of a token are normalised together, in Gluon."""

from tilesmith.device.gluon.rows import optimization_barrier
from tilesmith.device.gluon.shim import gl, gluon, syncthreads
from tilesmith.ops.rotary.hopper.norm_heads import (
    added,
    load_angles,
    load_factors,
    load_words,
    post,
    rounded,
    step_layout,
    sum_row,
    wide,
    widened,
)  # fmt: skip


@gluon.jit
def _norm_rope_row(
    x_ptr, x_row, x_head, x_token, y_ptr, y_row, y_head, y_token, weight_ptr, num_heads, row, block, num_tokens,
    angles, where, eps, weight_offset,
    LLAMA: gl.constexpr, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr, FAR: gl.constexpr, P: gl.constexpr,
    TOKENS: gl.constexpr, HEADS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """y of a block of tokens, whose heads are normalised together. Strides of x: in words."""
    LINES: gl.constexpr = step_layout(P, TOKENS, HEADS, gl.num_warps(), True, 8)
    WORDS: gl.constexpr = step_layout(P, TOKENS, HEADS, gl.num_warps(), True, 4)
    Y: gl.constexpr = y_ptr.dtype.element_ty
    W: gl.constexpr = weight_ptr.dtype.element_ty
    first = block * TOKENS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = gl.allocate_shared_memory(gl.float32, [TOKENS, gl.num_warps() // TOKENS], PLAIN)
    word = gl.arange(0, P // 2, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    token_w = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    head_w = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32)) + row * x_row + first.to(gl.int64) * x_token
    at = wide(token_w, FAR) * x_token + wide(head_w, FAR) * x_head + word
    parts, factors = (), ()
    for step in gl.static_range(STEPS):
        inside = (first + token_w < num_tokens) & (head_w + step * HEADS < num_heads) & (word >= 0)
        to = x_ptr + wide(gl.to_tensor(step * HEADS), FAR) * x_head
        parts += ((load_words(to, at, inside, EVEN), load_words(to + P // 2, at, inside, EVEN)),)
    cols = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, gl.SliceLayout(1, LINES))), 0)
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(1, LINES)))
    pair = gl.expand_dims(cols, 1)
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(2, LINES)))[:, None, None]
    head = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))[None, :, None]
    cos, sin = load_angles(angles, where, row, first + tokens, cols, num_tokens, PER_TOKEN, EVEN)
    for step in gl.static_range(STEPS):
        here, here_w = head + step * HEADS, head_w + step * HEADS
        factors += (load_factors(weight_ptr, here, pair, here_w, word, num_heads, P, EVEN, True),)
    # All is asked for before x is worked on, which the barrier and the 0 behind it are for: else ptxas asks for angles
    # and weights when x has come. H200, bf16, 16,384 tokens of 32 and 8 heads of 128: 83.2 for 84.3 µs.
    nothing = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    nothing.store(gl.full([32], 0, gl.int32, ONE))
    syncthreads()
    zero = gl.max(nothing.load(ONE), 0)
    squares = None
    for step in gl.static_range(STEPS):
        x1, x2 = widened(parts[step][0] | zero, Y, P, LINES), widened(parts[step][1] | zero, Y, P, LINES)
        squares = added(added(squares, x1, x1), x2, x2)
    post(squares, room, TOKENS)
    rstd = gl.rsqrt(sum_row(room, TOKENS, LINES) * (1.0 / (2 * P * num_heads)) + eps)
    cos, sin = cos.to(gl.float32), sin.to(gl.float32)
    y_ptr += row * y_row + first.to(gl.int64) * y_token
    for step in gl.static_range(STEPS):
        x1, x2 = (
            widened(optimization_barrier(parts[step][0]), Y, P, LINES),
            widened(optimization_barrier(parts[step][1]), Y, P, LINES),
        )
        x1, x2 = x1 * rstd, x2 * rstd
        if LLAMA:
            x1, x2 = rounded(x1, Y), rounded(x2, Y)
        f1, f2 = widened(factors[step][0], W, P, LINES), widened(factors[step][1], W, P, LINES)
        if weight_offset is not None:
            f1, f2 = f1 + weight_offset, f2 + weight_offset
        if LLAMA and W == Y:
            f1, f2 = rounded(f1, Y), rounded(f2, Y)
        x1, x2 = x1 * f1, x2 * f2
        if LLAMA:
            x1, x2 = rounded(x1, Y), rounded(x2, Y)
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        to = y_ptr + (wide(token, FAR) * y_token + wide(head + step * HEADS, FAR) * y_head + pair)
        if EVEN:
            gl.store(to, y1.to(Y))
            gl.store(to + P, y2.to(Y))
        else:
            inside = (first + token < num_tokens) & (head + step * HEADS < num_heads) & (pair >= 0)
            gl.store(to, y1.to(Y), mask=inside)
            gl.store(to + P, y2.to(Y), mask=inside)


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
    """CTA: a block of tokens of q or, after those of as many tokens, of k. It reads all of it at once and ends when
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
