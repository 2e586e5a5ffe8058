"""Functions that kernels share, in the kernel language: activations, random bits of dropout, the end of a softmax."""

from __future__ import annotations

from tilesmith.codegen import const, exp, exp2, fma, inline, log2, mulhi, rsqrt, select, tanh, u32, unroll

LOWEST = -3.0e38
"""Below every score; WGSL and Metal's fast mathematics promise no infinities."""

LARGEST = 3.4e38
"""Above every score but an infinite one, of whose row the sum is NaN by right."""

LOG2E = 1.4426950408889634

# t · P(t) with t = 1 / (1 + _SCALE · z) is exp(z²) · erfc(z) for z >= 0 within 1.3e-8: a fit of ours, by iteratively
# reweighted least squares to relative error on [0, 10].
_SCALE = 0.375
_ERFCX = (
    0.21161349,
    0.21064944,
    0.20531517,
    0.12149761,
    0.27374403,
    -0.22944477,
    0.43242936,
    -0.28734669,
    0.06154238,
)
_HALF_ROOT = 0.7071067811865476
_SLOPE, _CUBIC = 0.7978845608028654, 0.044715  # sqrt(2 / pi) and the cubic term of the tanh form
_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@inline
def silu(x):
    """x · sigmoid(x), for f32 and its vectors."""
    return x * _fading(x) / (exp(min(-x, 87.0)) + 1.0)  # exp(88.8) would be infinite


@inline
def sigmoid(x):
    """1 / (1 + exp(-x)), for f32 and its vectors; of NaN a number, so it goes into a product with x."""
    return _fading(x) / (exp(min(-x, 87.0)) + 1.0)


@inline
def _fading(x):
    """1 from -88 on, 0 up to -104, as sigmoid(x) is in f32: exp(87) alone would leave 1.6e-38, and a gate is as large
    as its type allows."""
    return min(max(x * 0.0625 + 6.5, 0.0), 1.0)


@inline
def gelu_tanh(x):
    """0.5 · x · (1 + tanh(sqrt(2/π) · (x + 0.044715 x³))), for f32 and its vectors."""
    inner = x * (x * x * _CUBIC + 1.0) * _SLOPE
    return x * 0.5 * (tanh(max(min(inner, 15.0), -15.0)) + 1.0)


@inline
def normal_cdf(x):
    """Φ(x), for f32, right to a relative 1e-5 in its left tail too: the exponential of -72 alone costs 3e-6."""
    root = rsqrt(fma(abs(x), _SCALE * _HALF_ROOT, 1.0))
    t = root * root  # fewer instructions than an exact division has
    fit = fma(t, _ERFCX[8] / 2, _ERFCX[7] / 2)
    for k in unroll(7):
        fit = fma(fit, t, _ERFCX[6 - k] / 2)
    tail = fit * t * exp2(x * x * (-0.5 * LOG2E))
    return select(x < 0.0, tail, 1.0 - tail)


@inline
def gelu_exact(x):
    """x · Φ(x), for f32."""
    return x * normal_cdf(x)


@inline
def silu_and_slope(x):
    """silu(x) and its derivative, for f32 and its vectors."""
    s = sigmoid(x)
    return x * s, s + x * s * (1.0 - s)


@inline
def gelu_tanh_and_slope(x):
    """The tanh form of GELU, as x times a sigmoid, and its derivative, for f32 and its vectors."""
    s = sigmoid(x * (x * x * _CUBIC + 1.0) * (2.0 * _SLOPE))
    return x * s, s + x * s * (1.0 - s) * (x * x * (3.0 * _CUBIC) + 1.0) * (2.0 * _SLOPE)


@inline
def gelu_exact_and_slope(x):
    """x · Φ(x) and its derivative, for f32."""
    cdf = normal_cdf(x)
    density = select(abs(x) < 14.0, exp(max(x * x * -0.5, -87.0)) * _DENSITY, 0.0)
    return x * cdf, cdf + x * density


@inline
def philox(counter, seed):
    """The four words of Philox4x32-10 for a counter below 2³²; `seed` holds (seed, offset) as four u32."""
    c0, c1, c2, c3 = counter, u32(0), seed[2], seed[3]
    k0, k1 = seed[0], seed[1]
    for step in unroll(10):
        low0, high0 = c0 * _MULTIPLIERS[0], mulhi(c0, _MULTIPLIERS[0])
        low1, high1 = c2 * _MULTIPLIERS[1], mulhi(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        if step < 9:
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1, c2, c3


@inline
def random_bits(vector, count, seed):
    """The 16 bits of each element of a tensor's vector number `vector`, of `count` elements, 1, 2, 4 or 8: in the upper
    halves of u32, whose lower halves are anything.

    The words of counter element // 8 are eight halves, the lower one of each first; element % 8 picks. Vectors are
    counted, since there may be 2³² of them, and of elements more.
    """
    a_draw: const = 8 // count
    words, element = philox(vector // a_draw, seed), vector % a_draw * count
    if count < 8:
        words = [select(element < 4, words[k], words[2 + k]) for k in range(2)]
    if count < 4:
        words = [select(element % 4 < 2, words[0], words[1])]
    bits = [words[j // 2] if j % 2 else words[j // 2] << 16 for j in range(max(count, 2))]
    if count == 1:
        bits = [select(element % 2 == 0, bits[0], bits[1])]
    return bits


@inline
def log_sum(top, total):
    """The natural logarithm of a row's sum of exponentials, from its maximum and sum to base 2: LOWEST of no terms, the
    maximum where that is infinite and the sum therefore NaN, and NaN where a term is."""
    more = select(top < LARGEST, log2(select(total == 0.0, 1.0, total)), 0.0)
    return select(total == 0.0, LOWEST, (top + more) / LOG2E)


@inline
def share(total):
    """1 / total, or 0 for a row that sees no key."""
    return select(total > 0.0, 1.0 / max(total, 1.0e-30), 0.0)
