"""Device functions of the casts: factors, saturating rounding, largest elements."""

import triton
import triton.language as tl

SMALLEST = tl.constexpr(2.0**-100)  # as in the reference
GREATEST_BITS = tl.constexpr(0x7F7FFFFF)  # of the largest finite fp32


@triton.jit
def factor_of(bound, E5M2: tl.constexpr):
    """The least power of two that is at least bound / the format's largest number, and one over it.

    448 and 57344 are 1.75 times a power of two: what exceeds 1.75 times one carries into the exponent.
    """
    bits = tl.minimum(bound.to(tl.int32, bitcast=True), GREATEST_BITS)
    power = ((bits + 0x1FFFFF) >> 23) - (15 if E5M2 else 8)
    factor = (power << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    zero = bits <= 0x0D800000  # 2**-100
    return tl.where(zero, 1.0, factor), tl.where(zero, 1.0, inverse)


@triton.jit
def load_factor(bound_ptr, E5M2: tl.constexpr):
    """`factor_of` the one number at bound_ptr."""
    return factor_of(tl.load(bound_ptr), E5M2)


@triton.jit
def round8(x, inverse, like_ptr, E5M2: tl.constexpr, SATURATES: tl.constexpr):
    """fp32 x times inverse in the format of like_ptr: finite numbers saturate, others become NaN.

    SATURATES: the conversion does (NVIDIA's instruction), so that only infinity must become NaN before it. Clamping and
    comparing took half of a cast's instructions, and with them the cast was bound by arithmetic.
    """
    if SATURATES:
        y = tl.fma(x, inverse, x * 0.0)
    else:
        limit: tl.constexpr = 57344.0 if E5M2 else 448.0
        y = tl.minimum(tl.maximum(x * inverse, -limit), limit)
        y = tl.where(tl.abs(x) < float("inf"), y, float("nan"))
    return y.to(like_ptr.dtype.element_ty)


@triton.jit
def word_of(first, second, third, fourth):
    """Four tiles of numbers in 8 bits as one of int32, the first in the lowest byte.

    Tiles that hold every fourth row are turned as words: in 8 bits Triton moves them byte by byte.
    """
    low = first.to(tl.uint8, bitcast=True).to(tl.uint32) | (second.to(tl.uint8, bitcast=True).to(tl.uint32) << 8)
    high = third.to(tl.uint8, bitcast=True).to(tl.uint32) | (fourth.to(tl.uint8, bitcast=True).to(tl.uint32) << 8)
    return (low | (high << 16)).to(tl.int32, bitcast=True)


@triton.jit
def store_turned(words_ptr, word, quad, col, room, num_cols):
    """Write words of four rows each, quad [Q, 1] from 0 on, to a transposed tensor with `room` rows side by side, a
    multiple of 16, so that a thread writes 16 rows at once."""
    quads = room // 16 * 4
    mask = tl.trans((quad < quads) & (col < num_cols))
    tl.store(words_ptr + tl.trans(col) * quads + tl.trans(quad), tl.trans(word), mask=mask)


@triton.jit
def magnitude(x):
    """|x| as the bits of its fp32 number, which order as the numbers do, NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of(a, b, c, d):
    """The largest |x| of four, element by element; NaN where one is."""
    low = tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(tl.abs(c), tl.abs(d), propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def raise_to(ptr, bits):
    """The fp32 number at ptr becomes the larger of itself and the one with these bits."""
    tl.atomic_max(ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")
