"""A linear layer with a low-rank adapter and its gradient in plain PyTorch: the oracle of its kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.ops.gemm import reference
from tilesmith.ops.gemm.reference import flat


def lora_linear(
    x: Tensor, weight: Tensor | None, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """y = x · weightᵀ + bias + scale · (x · lora_aᵀ) · lora_bᵀ: a linear layer with a low-rank adapter (LoRA).

    x: [..., K]. weight: [N, K] and bias: [N], as in `linear`; without a weight, y is the adapter's contribution alone.
    lora_a: [R, K], lora_b: [N, R], in any strides and any floating dtypes, independent of x's: fp32 factors with 16-bit
    x are not rounded to 16 bits. The base product is rounded to x's dtype before the adapter is added, as PEFT does.
    Sums are fp32 (fp64 for fp64).

    Returns y [..., N], contiguous, in x's dtype. Saved for the backward: x, weight, lora_a, lora_b and
    z = x · lora_aᵀ, [..., R] in fp32. Under autocast x is cast, weight and bias follow it, and factors stay as they
    are.

    Raises as `linear` does, and ValueError for factors whose shapes or devices do not fit, and for a bias without a
    weight.

    Source: Hu et al., arXiv:2106.09685.
    """
    acc = _acc(x, lora_a, lora_b)
    z = x.to(acc) @ lora_a.to(acc).t()
    y = scale * (z @ lora_b.to(acc).t())
    if weight is not None:
        y = reference.linear(x, weight, bias).to(acc) + y
    return y.to(x.dtype).contiguous(), z.contiguous()


def lora_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None,
    z: Tensor,
    scale: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dlora_a, dlora_b, dbias) of `lora_linear`; an empty tensor where not asked for.

    dy: [..., N]; x: [..., K]; z: [..., R], which the forward saved. With dz = scale · dy · lora_b:
    dx = dy · weight, rounded to x's dtype, + dz · lora_a; dlora_a = dzᵀ · x and dlora_b = scale · dyᵀ · z, each in its
    parameter's dtype; dweight and dbias as in `linear_vjp`. Sums are fp32 (fp64 for fp64).
    """
    acc = _acc(x, lora_a, lora_b)
    wants_dx, wants_weight, wants_a, wants_b, wants_bias = output_mask
    dx, dweight, dbias = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if weight is not None:
        dx, dweight, dbias = reference.linear_vjp(dy, x, weight, bias, (wants_dx, wants_weight, wants_bias))
    dlora_a, dlora_b, rows = lora_a.new_empty(0), lora_b.new_empty(0), flat(dy).to(acc)
    dz = scale * (rows @ lora_b.to(acc))
    if wants_dx:
        added = (dz @ lora_a.to(acc)).reshape(x.shape)
        dx = (added if weight is None else dx.to(acc) + added).to(x.dtype)
    if wants_a:
        dlora_a = (dz.t() @ flat(x).to(acc)).to(lora_a.dtype).contiguous()
    if wants_b:
        dlora_b = (scale * (rows.t() @ flat(z).to(acc))).to(lora_b.dtype).contiguous()
    return dx, dweight, dlora_a, dlora_b, dbias


def _acc(*tensors: Tensor) -> torch.dtype:
    wide = torch.float64 in {t.dtype for t in tensors}
    return torch.float64 if wide else torch.float32
