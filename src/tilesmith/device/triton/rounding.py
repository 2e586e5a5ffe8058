"""Device functions of the casts: factors, saturating rounding, largest elements."""

import triton
import triton.language as tl

SMALLEST_BITS = tl.constexpr(0x0D800000)  # of 2**-100, as in the reference
GREATEST_BITS = tl.constexpr(0x7F7FFFFF)  # of the largest finite fp32


@triton.jit
def factor_of(bound, E5M2: tl.constexpr):
    """The least power of two that is at least bound / the format's largest number, and one over it.

    448 and 57344 are 1.75 times a power of two: what exceeds 1.75 times one carries into the exponent.
    """
    bits = tl.minimum(bound.to(tl.int32, bitcast=True), GREATEST_BITS)
    power = (bits + 0x1FFFFF) & 0x7F800000
    power = tl.where(bits <= SMALLEST_BITS, 127 << 23, power - ((15 if E5M2 else 8) << 23))
    return power.to(tl.float32, bitcast=True), ((254 << 23) - power).to(tl.float32, bitcast=True)


@triton.jit
def factors_of_rows(sizes, E5M2: tl.constexpr):
    """`factor_of` the largest of each row of magnitudes, the least factor for a row that counts as zero."""
    top = tl.maximum(tl.max(sizes, 1, keep_dims=True), SMALLEST_BITS + 1)
    return factor_of(top.to(tl.float32, bitcast=True), E5M2)


@triton.jit
def load_factor(bound_ptr, E5M2: tl.constexpr):
    """`factor_of` the one number at bound_ptr."""
    return factor_of(tl.load(bound_ptr), E5M2)


@triton.jit
def scaled(x, inverse, E5M2: tl.constexpr, SATURATES: tl.constexpr, BOUNDED: tl.constexpr = False):
    """x times inverse as fp32 to be converted: finite numbers that are too large give the largest, others NaN.

    SATURATES: the conversion does (NVIDIA's instruction), so that only infinity must become NaN before it. Clamping and
    comparing took half of a cast's instructions, and with them the cast was bound by arithmetic. BOUNDED: x was
    through `without_infinity`.
    """
    x = widened(x, SATURATES)
    if SATURATES:
        return x * inverse if BOUNDED else tl.fma(x, inverse, x * 0.0)
    limit: tl.constexpr = 57344.0 if E5M2 else 448.0
    y = tl.minimum(tl.maximum(x * inverse, -limit), limit)
    return tl.where(tl.abs(x) < float("inf"), y, float("nan"))


@triton.jit
def without_infinity(x, SATURATES: tl.constexpr):
    """x with NaN for infinity, which is x * 0 + x, where `scaled` leaves that to its caller. SATURATES stands for
    NVIDIA's instruction for two bf16 numbers."""
    if not SATURATES:
        return x
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0; fma.rn.bf16x2 $0, $1, z, $1; }",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return x * 0.0 + x


@triton.jit
def round8(x, inverse, like_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """x times inverse in the format of like_ptr, see `scaled`."""
    return scaled(x, inverse, E5M2, SATURATES).to(like_ptr.dtype.element_ty)


@triton.jit
def word_of(first, second, third, fourth):
    """Four tiles of numbers in 8 bits as one of int32, the first in the lowest byte.

    Tiles that hold every fourth row are turned as words: in 8 bits Triton moves them byte by byte.
    """
    low = first.to(tl.uint8, bitcast=True).to(tl.uint32) | (second.to(tl.uint8, bitcast=True).to(tl.uint32) << 8)
    high = third.to(tl.uint8, bitcast=True).to(tl.uint32) | (fourth.to(tl.uint8, bitcast=True).to(tl.uint32) << 8)
    return (low | (high << 16)).to(tl.int32, bitcast=True)


@triton.jit
def word8(y0, y1, y2, y3, like_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """`word_of` four tiles that `scaled` made, in the format of like_ptr.

    SATURATES: NVIDIA's instruction converts a pair of numbers and puts it into half a word, so that tiles need not be
    taken apart into bytes and put together again: that was two instructions for each element.
    """
    if SATURATES:
        if E5M2:
            return tl.inline_asm_elementwise(
                "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3;"
                " mov.b32 $0, {l, h}; }",
                "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
            " mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    to = like_ptr.dtype.element_ty
    return word_of(y0.to(to), y1.to(to), y2.to(to), y3.to(to))


@triton.jit
def store_turned(words_ptr, word, quad, col, room, num_cols, stride=None):
    """Write words of four rows each, quad [Q, 1] from 0 on, to a transposed tensor with `room` rows side by side, a
    multiple of 16, so that a thread writes 16 rows at once. stride: how many rows lie side by side there, a multiple of
    16 too; None: `room`."""
    quads = room // 16 * 4
    apart = quads if stride is None else stride // 16 * 4
    mask = tl.trans((quad < quads) & (col < num_cols))
    tl.store(words_ptr + tl.trans(col) * apart + tl.trans(quad), tl.trans(word), mask=mask)


@triton.jit
def magnitude(x):
    """|x| as the bits of its fp32 number, which order as the numbers do, NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def unpack_pair(word, like_ptr):
    """The two 16-bit numbers of words of int32, the first in the low half, as fp32. like_ptr: their type."""
    if like_ptr.dtype.element_ty == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pair_without_infinity(word, like_ptr, SATURATES: tl.constexpr):
    """Words of two 16-bit numbers with NaN for infinity, where `scaled` leaves that to its caller: x * 0 + x."""
    if SATURATES:
        if like_ptr.dtype.element_ty == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0; fma.rn.bf16x2 $0, $1, z, $1; }",
                "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $1; }",
            "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def pair8(low, high, like_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """Numbers that `scaled` made, in the format of like_ptr, two in an int16, `low` in its low byte."""
    if SATURATES:
        if E5M2:
            return tl.inline_asm_elementwise(
                "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;",
                "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    to = like_ptr.dtype.element_ty
    first, second = low.to(to).to(tl.uint8, bitcast=True), high.to(to).to(tl.uint8, bitcast=True)
    return (first.to(tl.uint16) | (second.to(tl.uint16) << 8)).to(tl.int16, bitcast=True)


@triton.jit
def _larger_packed(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger_by_half(a, b):
    return tl.maximum(a & 0x7FFF, b & 0x7FFF) | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)


@triton.jit
def larger_pair(a, b, PACKED: tl.constexpr):
    """The larger of words of two 16-bit magnitudes, half by half. PACKED: by one instruction, which compute capability
    9.0 has."""
    if PACKED:
        return _larger_packed(a, b)
    return _larger_by_half(a, b)


@triton.jit
def largest_pair(word, axis: tl.constexpr, PACKED: tl.constexpr):
    """`larger_pair` along an axis, which is kept."""
    if PACKED:
        return tl.reduce(word, axis, _larger_packed, keep_dims=True)
    return tl.reduce(word, axis, _larger_by_half, keep_dims=True)


@triton.jit
def largest_of(a, b, c, d, SATURATES: tl.constexpr = False):
    """The largest |x| of four, element by element; NaN where one is. SATURATES stands for NVIDIA's instruction for two
    bf16 numbers."""
    if SATURATES and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; abs.bf16x2 a, $1; abs.bf16x2 b, $2; abs.bf16x2 c, $3; abs.bf16x2 d, $4;"
            " max.NaN.bf16x2 a, a, b; max.NaN.bf16x2 c, c, d; max.NaN.bf16x2 $0, a, c; }",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(tl.abs(c), tl.abs(d), propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def seen_at(ptr):
    """The bits of the fp32 number at ptr as the other programs have raised it so far, or before: it only grows."""
    return tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True), cache_modifier=".cg")


@triton.jit
def raise_to(ptr, bits, seen):
    """The fp32 number at ptr becomes the larger of itself and the one with these bits.

    seen: `seen_at` ptr. Atomic operations on one number take turns, so that the tens of thousands of programs of a
    large tensor do without where the number is large enough.
    """
    tl.atomic_max(ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, mask=bits > seen, sem="relaxed")


@triton.jit
def widened(x, SATURATES: tl.constexpr):
    """x as fp32. SATURATES stands for NVIDIA's GPUs, where a bf16 number in the upper half of a register becomes fp32
    by one instruction in place of the two that Triton makes of it."""
    if SATURATES and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(tl.float32)


@triton.jit
def narrowed(x, like_ptr, SATURATES: tl.constexpr):
    """fp32 x rounded to the type of like_ptr. SATURATES stands for NVIDIA's instruction that rounds two numbers to
    bf16: where they are converted back, what Triton makes of it rounds one, at an eighth of the rate."""
    if SATURATES and like_ptr.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(like_ptr.dtype.element_ty)
