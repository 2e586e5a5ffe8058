"""Activations by name in Triton: the value and the derivative, and the gradient, from the input or from the output."""

import math

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL_PEAK = tl.constexpr(1 / math.sqrt(2 * math.pi))
TANH_SLOPE = tl.constexpr(math.sqrt(8 / math.pi))
TANH_CUBIC = tl.constexpr(0.044715)
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _lower_tail(a):
    """The standard normal's probability below -a, a >= 0: exp2 of a polynomial, a minimax fit (Lawson's algorithm) to
    log2 of the probability. Its relative error is 4e-6 for a < 4.5 and 2e-5 for a < 7, and it decreases all the way
    beyond.

    With 16-bit tensors erf, of 30 instructions, would take longer than memory; this takes 8.
    """
    power = -1.7770024e-06 * a + 6.046321e-05
    power = power * a - 0.0009217353
    power = power * a + 0.008473727
    power = power * a - 0.05389008
    power = power * a - 0.45853657
    power = power * a - 1.1512191
    return tl.exp2(power * a - 0.99999917)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation at fp32 x and its derivative; the compiler drops the one that a caller does not use. "none" is x
    itself. Names that begin with "of_": x is the activation's output, and the derivative is that where it gave x. A NaN
    stays NaN, which tl.maximum would not ensure."""
    if ACTIVATION == "gelu":
        cdf = 0.5 + 0.5 * tl.math.erf(x * SQRT_HALF)
        return x * cdf, cdf + x * (NORMAL_PEAK * tl.exp(-0.5 * x * x))
    elif ACTIVATION == "gelu_16_bit":
        tail = _lower_tail(tl.abs(x))
        cdf = tl.where(x < 0, tail, 1 - tail)
        return x * cdf, cdf + x * (NORMAL_PEAK * tl.exp2(x * (-0.5 * LOG2E) * x))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel where tanh(z) is near -1.
        cdf = 1 / (1 + tl.exp((x + TANH_CUBIC * x * x * x) * -TANH_SLOPE))
        value = x * cdf
        return value, cdf + value * (1 - cdf) * (TANH_SLOPE + 3 * TANH_CUBIC * TANH_SLOPE * x * x)
    elif ACTIVATION == "sigmoid":
        sigmoid = 1 / (1 + tl.exp(-x))
        return sigmoid, sigmoid * (1 - sigmoid)
    elif ACTIVATION == "of_sigmoid":
        return x, x * (1 - x)
    elif ACTIVATION == "relu" or ACTIVATION == "of_relu":
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive, 2 * positive
    elif ACTIVATION == "of_relu_squared":
        return x, 2 * tl.sqrt(x)
    elif ACTIVATION == "silu":
        sigmoid = 1 / (1 + tl.exp(-x))
        value = x * sigmoid
        return value, sigmoid + value * (1 - sigmoid)
    else:
        tl.static_assert(ACTIVATION == "none")
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def gradient(dout, x, ACTIVATION: tl.constexpr):
    """dout · activation'(x). Where a relu cuts, it is 0 whatever dout is, even infinite."""
    _, slope = activate(x, ACTIVATION)
    dx = dout * slope
    if ACTIVATION == "relu" or ACTIVATION == "of_relu":
        dx = tl.where(x <= 0, 0.0, dout)
    elif ACTIVATION == "relu_squared" or ACTIVATION == "of_relu_squared":
        dx = tl.where(x <= 0, 0.0, dx)
    return dx
