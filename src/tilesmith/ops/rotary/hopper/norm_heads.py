"""Device functions of rms_norm_rope on Hopper, in Gluon: lines of heads in registers, sums, angles and weights."""

from tilesmith.device.gluon.rows import split_fp32
from tilesmith.device.gluon.shim import gl, gluon

# A tile is [tokens, heads, features] of q or of k, worked on in steps of fewer heads and by halves of a line, the D
# features of one head: a thread has 8 neighbours of each half, and a word two of them. ROW: all heads of a token are
# normalised together, so a tile has all of them, and a warp has heads of one token.


@gluon.constexpr_function
def step_layout(P, TOKENS, HEADS, WARPS, ROW, EACH):
    """The layout [tokens, heads, pairs] of a step, or of its words; EACH: neighbours that a thread has."""
    lanes = P // 8
    each = 1 if ROW else max(1, 32 // lanes // HEADS)
    warps = TOKENS // each
    return gl.BlockedLayout([1, 1, EACH], [each, 32 // lanes // each, lanes], [warps, WARPS // warps, 1], [2, 1, 0])


@gluon.jit
def _halves(x):
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))


@gluon.jit
def added(total, a, b, DEEP: gl.constexpr = 3):
    """total, None for 0, and the products a · b of the 8 neighbours that a thread has, one after the other."""
    if DEEP > 0:
        a, more_a = _halves(a)
        b, more_b = _halves(b)
        return added(added(total, a, b, DEEP - 1), more_a, more_b, DEEP - 1)
    elif total is None:
        return a * b
    else:
        return total + a * b


@gluon.jit
def sum_line(a, LINES: gl.constexpr):
    """Sums [tokens, heads, 1] of what threads have added up of each line."""
    return gl.expand_dims(gl.convert_layout(gl.sum(a, 2), gl.SliceLayout(2, LINES)), 2)


@gluon.jit
def post(a, room, TOKENS: gl.constexpr):
    """Store what each warp has added up of its one token, for `sum_row`."""
    room.store(gl.sum(gl.sum(gl.reshape(a, [TOKENS, room.shape[1], a.shape[1] // room.shape[1], a.shape[2]]), 3), 2))


@gluon.jit
def sum_row(room, TOKENS: gl.constexpr, LINES: gl.constexpr):
    """Sums [tokens, 1, 1] over the warps of a token."""
    WARPS: gl.constexpr = room.shape[1]
    found = gl.sum(room.load(gl.BlockedLayout([1, WARPS], [1, 32], [TOKENS, WARPS], [1, 0])), 1)
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(1, gl.SliceLayout(2, LINES))), 1), 2)


@gluon.jit
def widened(words, dtype: gl.constexpr, P: gl.constexpr, LINES: gl.constexpr):
    """Halves of lines in fp32."""
    if words.dtype == gl.int32:
        low, high = split_fp32(words, dtype)
        whole = gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1], P])
        return gl.convert_layout(whole, LINES, assert_trivial=True)
    else:
        return words.to(gl.float32)


@gluon.jit
def load_angles(angles, where, row, tokens, cols, num_tokens, PER_TOKEN: gl.constexpr, EVEN: gl.constexpr):
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
def load_words(ptr, at, inside, EVEN: gl.constexpr):
    """What lies at `at`: words of two values of 16 bits, or values of fp32; 0 where not inside."""
    if EVEN:
        return gl.load(ptr + at)
    else:
        return gl.load(ptr + at, mask=inside, other=0)


@gluon.jit
def load_factors(
    weight_ptr, head, pair, head_w, word, num_heads, P: gl.constexpr, EVEN: gl.constexpr, ROW: gl.constexpr
):  # fmt: skip
    """Weights of both halves of lines, those of the heads where ROW, as `widened` takes them."""
    WORDS: gl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth == 16
    PER: gl.constexpr = 2 if WORDS else 1
    ptr = weight_ptr.to(gl.pointer_type(gl.int32)) if WORDS else weight_ptr
    heads, at = head_w if WORDS else head, word if WORDS else pair
    if ROW:
        inside = (heads < num_heads) & (at >= 0)
        at += heads * (2 * P // PER)
        return load_words(ptr, at, inside, EVEN), load_words(ptr + P // PER, at, inside, EVEN)
    else:
        return gl.load(ptr + at), gl.load(ptr + P // PER + at)


@gluon.jit
def wide(index, FAR: gl.constexpr):
    """An index that strides multiply; FAR: what they make of it may not fit into 32 bits."""
    return index.to(gl.int64) if FAR else index


@gluon.jit
def rounded(value, dtype: gl.constexpr):
    return value.to(dtype).to(gl.float32)
