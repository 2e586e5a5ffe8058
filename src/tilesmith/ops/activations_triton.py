"""Activations by name in Triton: value, and derivative from the input or from the output."""

import math

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL_PEAK = tl.constexpr(1 / math.sqrt(2 * math.pi))
TANH_SLOPE = tl.constexpr(math.sqrt(8 / math.pi))
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """activation(x) of fp32 values; "none" is x. A NaN stays one, which tl.maximum would not keep."""
    if ACTIVATION == "gelu":
        y = x * (0.5 + 0.5 * tl.math.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel where tanh(z) is near -1.
        y = x / (1 + tl.exp(-TANH_SLOPE * (x + TANH_CUBIC * x * x * x)))
    elif ACTIVATION == "silu":
        y = x / (1 + tl.exp(-x))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x < 0, 0.0, x)
        y = positive * positive
    else:
        tl.static_assert(ACTIVATION == "none")
        y = x
    return y


@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr):
    """The derivative at the input x."""
    if ACTIVATION == "gelu":
        slope = 0.5 + 0.5 * tl.math.erf(x * SQRT_HALF) + x * (NORMAL_PEAK * tl.exp(-0.5 * x * x))
    elif ACTIVATION == "gelu_tanh":
        cdf = 1 / (1 + tl.exp(-TANH_SLOPE * (x + TANH_CUBIC * x * x * x)))
        slope = cdf + x * cdf * (1 - cdf) * (TANH_SLOPE + 3 * TANH_CUBIC * TANH_SLOPE * x * x)
    elif ACTIVATION == "silu":
        sigmoid = 1 / (1 + tl.exp(-x))
        slope = sigmoid + x * sigmoid * (1 - sigmoid)
    elif ACTIVATION == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        slope = tl.where(x <= 0, 0.0, 2 * x)
    return slope


@triton.jit
def activation_slope_at_output(y, ACTIVATION: tl.constexpr):
    """The derivative where the activation gave y; of those whose output tells it."""
    if ACTIVATION == "relu":
        slope = tl.where(y <= 0, 0.0, 1.0)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        slope = 2 * tl.sqrt(y)
    return slope
