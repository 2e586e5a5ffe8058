"""What the activations and gated activations mean, in plain PyTorch.

All compute in at least float32 and round once, to the dtype of their input. Backward passes recompute the activation
from the saved inputs, or need only the result (sigmoid, add_relu).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype, widened

TANH_SLOPE = math.sqrt(8 / math.pi)
TANH_CUBIC = 0.044715


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), element by element (SiLU or Swish, arXiv:1702.03118).

    Args:
        x: any shape and strides, floating.

    Returns a contiguous tensor of x's shape and dtype. Raises TypeError for other dtypes.
    """
    return _silu(widened(x)).to(x.dtype).contiguous()


def silu_vjp(dout: Tensor, x: Tensor) -> Tensor:
    """Gradient of `silu`: dx, contiguous, in x's dtype.

    dout, x: one shape, any strides, floating. dx = dout · σ(x) · (1 + x · (1 − σ(x))), computed in fp32 (fp64 for
    fp64).
    """
    return (widened(dout) * _silu_slope(widened(x))).to(x.dtype).contiguous()


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Phi(x), Phi the distribution function of the standard normal, element by element (GELU, arXiv:1606.08415).

    Args:
        x: any shape and strides, floating.
        approximate: "none": Phi through erf. "tanh": Phi(x) = (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    Returns a contiguous tensor of x's shape and dtype. Raises TypeError for other dtypes, ValueError for another
    ``approximate``.
    """
    return _gelu(widened(x), approximate).to(x.dtype).contiguous()


def gelu_vjp(dout: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Gradient of `gelu`: dx, contiguous, in x's dtype.

    dout, x: one shape, any strides, floating. dx = dout · (Φ(x) + x · φ(x)), or the derivative of the tanh form,
    computed in fp32 (fp64 for fp64).
    """
    return (widened(dout) * _gelu_slope(widened(x), approximate)).to(x.dtype).contiguous()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), element by element.

    Args:
        x: any shape and strides, floating.

    Returns a contiguous tensor of x's shape and dtype. Raises TypeError for other dtypes. The gradient is taken of the
    rounded result, which is what is saved, as PyTorch does.
    """
    return torch.sigmoid(widened(x)).to(x.dtype).contiguous()


def sigmoid_vjp(dout: Tensor, out: Tensor) -> Tensor:
    """Gradient of `sigmoid` from its result: dx = dout out (1 - out), contiguous, in out's dtype.

    dout, out: one shape, any strides, floating.
    """
    wide = widened(out)
    return (widened(dout) * wide * (1 - wide)).to(out.dtype).contiguous()


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2, element by element (squared ReLU, arXiv:2109.08668).

    Args:
        x: any shape and strides, floating.

    Returns a contiguous tensor of x's shape and dtype. The square is taken before rounding. Raises TypeError for other
    dtypes.
    """
    return torch.relu(widened(x)).square().to(x.dtype).contiguous()


def relu_squared_vjp(dout: Tensor, x: Tensor) -> Tensor:
    """Gradient of `relu_squared`: dx = 2 max(x, 0) dout, contiguous, in x's dtype.

    dout, x: one shape, any strides, floating.
    """
    return (2 * torch.relu(widened(x)) * widened(dout)).to(x.dtype).contiguous()


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """max(x + y, 0), element by element.

    Args:
        x, y: one shape and dtype, floating, any strides.

    Returns a contiguous tensor of x's shape and dtype; the sum is rounded once. Only the result is saved: x and y have
    the same gradient, dout where the result is above 0. Raises ValueError or TypeError where x and y differ in shape,
    dtype or device, or are not floating.
    """
    return torch.relu(widened(x) + widened(y)).to(x.dtype).contiguous()


def add_relu_vjp(dout: Tensor, out: Tensor) -> Tensor:
    """Gradient of `add_relu` from its result: dx, contiguous, in out's dtype; dy is dx.

    dout, out: one shape, any strides, floating. dx = dout where out is above 0, else 0.
    """
    return torch.where(out <= 0, 0, dout).to(out.dtype).contiguous()


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(x + bias, approximate), element by element, as after the first projection of an MLP.

    Args:
        x: [..., F], floating, any strides.
        bias: [F], floating, or None for `gelu`.
        approximate: "none" or "tanh", as in `gelu`.

    Returns a contiguous tensor of x's shape and dtype. x + bias is not rounded. dbias is summed over rows in float32
    (float64 for float64), in a fixed order, and rounded to bias' dtype. Raises ValueError or TypeError for a bias that
    is not a floating [F] on x's device, an x that is not floating or has no dims, and for another ``approximate``.
    """
    return _gelu(_biased(x, bias), approximate).to(x.dtype).contiguous()


def bias_gelu_vjp(
    dout: Tensor, x: Tensor, bias: Tensor | None, approximate: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_gelu`: (dx, dbias), contiguous; an empty tensor where ``output_mask`` is False.

    dout, x: [..., F], floating; bias: [F] or None. dx: x's shape and dtype. dbias: [F], the sum of dx over rows in fp32
    (fp64 for fp64), in a fixed order, in bias's dtype.
    """
    dx = widened(dout) * _gelu_slope(_biased(x, bias), approximate)
    dbias = dx.unsqueeze(0).sum(list(range(dx.ndim))).to(bias.dtype) if output_mask[1] else x.new_empty(0)
    return dx.to(x.dtype).contiguous() if output_mask[0] else x.new_empty(0), dbias


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element (SwiGLU without its projections, arXiv:2002.05202).

    Args:
        gate, up: [..., F] of one shape and dtype, any strides; halves of a packed [..., 2F] projection are not copied.

    Returns a contiguous tensor of gate's shape and dtype. The product is taken before rounding. Raises ValueError or
    TypeError where gate and up differ in shape, dtype or device, or are not floating.
    """
    return (_silu(widened(gate)) * widened(up)).to(gate.dtype).contiguous()


def swiglu_vjp(dout: Tensor, gate: Tensor, up: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu`: (dgate, dup), contiguous; an empty tensor where ``output_mask`` is False.

    dout, gate, up: one shape, any strides, floating. dgate = dout · up · silu'(gate) and dup = dout · silu(gate),
    computed in fp32 (fp64 for fp64), in the inputs' dtype.
    """
    wide = widened(gate)
    return _gated_vjp(dout, gate, up, _silu(wide), _silu_slope(wide), output_mask)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate, approximate) * up, element by element (GeGLU without its projections, arXiv:2002.05202).

    Args:
        gate, up: [..., F] of one shape and dtype, any strides; halves of a packed [..., 2F] projection are not copied.
        approximate: "tanh" or "none", as in `gelu`.

    Returns a contiguous tensor of gate's shape and dtype. The product is taken before rounding. Raises ValueError or
    TypeError where gate and up differ in shape, dtype or device, or are not floating, and for another ``approximate``.
    """
    return (_gelu(widened(gate), approximate) * widened(up)).to(gate.dtype).contiguous()


def geglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, approximate: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `geglu`: (dgate, dup), contiguous; an empty tensor where ``output_mask`` is False.

    dout, gate, up: one shape, any strides, floating. dgate = dout · up · gelu'(gate) and dup = dout · gelu(gate),
    computed in fp32 (fp64 for fp64), in the inputs' dtype.
    """
    wide = widened(gate)
    return _gated_vjp(dout, gate, up, _gelu(wide, approximate), _gelu_slope(wide, approximate), output_mask)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return widened(x) if bias is None else widened(x) + bias.to(sum_dtype(x))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid + x * sigmoid * (1 - sigmoid)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return x * _normal_cdf(x, approximate)


def _gelu_slope(x: Tensor, approximate: str) -> Tensor:
    cdf = _normal_cdf(x, approximate)
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    else:
        density = cdf * (1 - cdf) * (TANH_SLOPE * (1 + 3 * TANH_CUBIC * x * x))
    return cdf + x * density


def _normal_cdf(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel where tanh(z) is near -1.
    return torch.sigmoid(TANH_SLOPE * (x + TANH_CUBIC * x * x * x))


def _gated_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, value: Tensor, slope: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    dgate = (widened(dout) * widened(up) * slope).to(gate.dtype).contiguous() if output_mask[0] else gate.new_empty(0)
    dup = (widened(dout) * value).to(up.dtype).contiguous() if output_mask[1] else up.new_empty(0)
    return dgate, dup
