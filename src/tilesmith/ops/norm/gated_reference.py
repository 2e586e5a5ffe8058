"""What rms_norm_gated and its gradient are, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.ops.norm import reference


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, casting: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """y = rms_norm(x) · silu(gate): the norm behind the linear attention of Qwen3-Next and Qwen3.5.

    x, gate: [..., N] of one shape and dtype, floating, any strides. weight: [N], floating, or None for 1. eps: see
    `rms_norm`. casting: "fp32" computes in fp32 and rounds once; "llama" multiplies silu(gate), fp32, into the norm as
    `rms_norm` rounds it with that casting, and rounds again. Neither has a bearing on the gradient, which is taken of
    the formula in fp32.

    Returns a contiguous tensor of x's shape and dtype. Everything is fp64 for fp64 x.

    Raises TypeError for a dtype that is not floating or a gate of another one than x's, ValueError for shapes, devices,
    eps and casting that do not fit.

    Source: Zhang and Sennrich, arXiv:1910.07467; Gated DeltaNet, Yang et al., arXiv:2412.06464.
    """
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if casting == "llama":
        n, rstd = reference.rms_norm(x.contiguous(), weight, eps, 0.0, casting)
    else:
        n, rstd = reference.rms_norm(x.contiguous().to(wide.dtype), weight, eps)
    return (n.to(wide.dtype) * F.silu(wide)).to(x.dtype).contiguous(), rstd


def rms_norm_gated_vjp(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, rstd: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate, dweight) of `rms_norm_gated`, contiguous, in their inputs' dtypes.

    dy, x, gate: [..., N]; rstd: [...], which the forward saved. With n = x · rstd · weight: dgate = dy · n ·
    silu'(gate), and dx and dweight are those of `rms_norm_vjp` for dy · silu(gate). Computed in fp32 (fp64 for fp64).
    An empty tensor stands for a gradient that `output_mask` does not ask for.
    """
    wide = gate.to(rstd.dtype)
    dy, sigmoid = dy.to(rstd.dtype), torch.sigmoid(wide)
    wants_x, wants_gate, wants_weight = output_mask
    dn, norm_mask = dy * (wide * sigmoid), (wants_x, wants_weight)
    dx, dweight = reference.rms_norm_vjp(dn, x.to(rstd.dtype).contiguous(), weight, rstd, 0.0, norm_mask)
    dgate = x.new_empty(0)
    if wants_gate:
        n = x.to(rstd.dtype) * rstd.unsqueeze(-1)
        n = n if weight is None else n * weight.to(rstd.dtype)
        dgate = (dy * n * (sigmoid + wide * sigmoid * (1 - sigmoid))).to(gate.dtype).contiguous()
    return dx.to(x.dtype).contiguous(), dgate, dweight
