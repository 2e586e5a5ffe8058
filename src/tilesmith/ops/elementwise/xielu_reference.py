"""What xielu and its gradient are, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6) -> Tensor:
    """The activation xIELU, element by element, with two learned slopes.

    With p = softplus(alpha_p) and n = beta + softplus(alpha_n): p x² + beta x for x above 0, else
    n (expm1(min(x, eps)) − x) + beta x.

    Args:
        x: any shape and strides, floating.
        alpha_p, alpha_n: [1], floating, before softplus.
        beta: the slope at 0. eps: at most 0; what x is cut to in the exponential.

    Returns a contiguous tensor of x's shape and dtype; all is computed in float32 (float64 for float64) and rounded
    once. The gradients of alpha_p and alpha_n are summed in a fixed order. Raises TypeError for other dtypes,
    ValueError for other shapes, an alpha on another device, or an eps above 0.

    Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
    """
    wide, p, n = _wide(x, alpha_p, alpha_n)
    rest = (beta + n) * (torch.expm1(wide.clamp(max=eps)) - wide)
    return (torch.where(wide > 0, p * wide * wide, rest) + beta * wide).to(x.dtype).contiguous()


def xielu_vjp(
    dout: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dalpha_p, dalpha_n) of `xielu`, contiguous, in their inputs' dtypes.

    dout, x: one shape, floating. dx is dout (2 p x + beta) for x above 0, else dout (n (exp(x) − 1) + beta), without
    exp(x) for x above eps. dalpha_p = σ(alpha_p) Σ dout x² over x above 0, dalpha_n = σ(alpha_n) Σ dout
    (expm1(min(x, eps)) − x) over the others. Computed in fp32 (fp64 for fp64). An empty tensor stands for a gradient
    that `output_mask` does not ask for.
    """
    wide, p, n = _wide(x, alpha_p, alpha_n)
    dout, positive = dout.to(wide.dtype), wide > 0
    wants_x, wants_p, wants_n = output_mask
    dx = dalpha_p = dalpha_n = x.new_empty(0)
    if wants_x:
        falling = (beta + n) * (torch.where(wide <= eps, torch.exp(wide.clamp(max=eps)), 0) - 1)
        dx = (dout * (torch.where(positive, 2 * p * wide, falling) + beta)).to(x.dtype).contiguous()
    if wants_p:
        total = torch.where(positive, dout * wide * wide, 0).sum()
        dalpha_p = (total * torch.sigmoid(alpha_p.to(wide.dtype))).to(alpha_p.dtype)
    if wants_n:
        total = torch.where(positive, 0, dout * (torch.expm1(wide.clamp(max=eps)) - wide)).sum()
        dalpha_n = (total * torch.sigmoid(alpha_n.to(wide.dtype))).to(alpha_n.dtype)
    return dx, dalpha_p, dalpha_n


def _wide(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, softplus(alpha_p), softplus(alpha_n) in fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    p, n = (F.softplus(alpha.to(dtype)).reshape(()) for alpha in (alpha_p, alpha_n))
    return x.to(dtype), p, n
