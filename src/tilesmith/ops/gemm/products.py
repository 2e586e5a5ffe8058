"""Products of a linear layer and its gradients by the device's own library (cuBLAS, hipBLASLt, MKL), on [M, K] rows."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import torch_private
from tilesmith.engine.arguments import dtype_name
from tilesmith.ops.gemm.reference import FROM_OUTPUT, flat
from tilesmith.ops.gemm.sums_op import column_sums


def near(x: Tensor) -> Tensor:
    """x [M, K]; a packed copy where its rows lie so far apart that a 32-bit offset, as cuBLAS has, is too short."""
    far = x.ndim == 2 and x.shape[0] * x.stride(0) > 2**31 - 1 and not x.is_contiguous()
    return x.contiguous() if far else x


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, [M, N] in x's dtype; with cuBLAS a contiguous bias is added before rounding."""
    x, transposed = near(x), weight.to(x.dtype).t()
    if bias is None:
        return torch.mm(x, transposed, out=out)
    return torch.addmm(bias.to(x.dtype), x, transposed, out=out)


def activated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None
) -> Tensor | None:
    """activation(x · weightᵀ + bias) in one cuBLASLt call, or None where it has no such epilogue.

    There is one for relu, which relu_squared squares in place, and one for gelu_tanh (PyTorch's on a CPU computes the
    other gelu), which is exact to about 11 bits, so it serves the 16-bit dtypes only.
    """
    if not has_epilogue(x, activation):
        return None
    x = near(x)
    start = x.new_zeros(weight.shape[0]) if bias is None else bias.to(x.dtype)
    use_gelu = activation == "gelu_tanh"
    where = {} if out is None else {"out": out}
    y = torch_private.addmm_activation(start, x, weight.to(x.dtype).t(), use_gelu=use_gelu, **where)
    return y.square_() if activation == "relu_squared" else y


def has_epilogue(x: Tensor, activation: str) -> bool:
    """Whether `activated_product` serves x: cuBLASLt has an epilogue for the activation. It is not called without
    features."""
    served = activation in ("relu", "relu_squared") or (activation == "gelu_tanh" and _takes_gelu(x))
    return served and torch_private.addmm_activation is not None and x.device.type == "cuda" and x.numel() > 0


def epilogue_tells(x: Tensor, activation: str, kept: bool = False) -> list[str]:
    """What `explain` says of where an activation is applied."""
    if activation == "none":
        return []
    if not kept and has_epilogue(x, activation):
        return [f"{activation} is applied in the epilogue of cuBLASLt's matmul"]
    why = "its input is kept" if kept else "the library has no epilogue for it here"
    return [f"{activation} is an elementwise pass of its own: {why}"]


class PreActivation(Enum):
    """What the backward of `linear_act` differentiates the activation at."""

    OUTPUT = "the output, which is enough for this activation"
    KEPT = "the pre-activation, which the forward kept"
    RECOMPUTED = "the pre-activation, computed again by a matmul"
    NONE = "nothing: there is no activation"


def pre_activation(call: Any) -> PreActivation:
    """Which one serves a call of `linear_act_vjp`."""
    if call.activation == "none":
        return PreActivation.NONE
    if call.activation in FROM_OUTPUT:
        return PreActivation.OUTPUT
    return PreActivation.KEPT if call.pre.shape == call.dy.shape else PreActivation.RECOMPUTED


def pre_activation_tells(call: Any) -> list[str]:
    """What `explain` says of it."""
    return [f"the activation is differentiated at {pre_activation(call).value}"]


def gradients(
    dz: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of x · weightᵀ + bias from dz [M, N]; x has any leading dims, and so has dx."""
    dx, dweight, dbias = x.new_empty(0), weight.new_empty(0), x.new_empty(0)
    if output_mask[0]:
        dx = torch.mm(dz, weight.to(x.dtype)).view(x.shape)
    if output_mask[1]:
        dweight = weight_gradient(dz, flat(x), weight.dtype)
    if output_mask[2]:
        dbias = bias_gradient(dz, bias.dtype)
    return dx, dweight, dbias


def bias_gradient(dz: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows, in fp32 at least, rounded once to `dtype`."""
    return column_sums(dz, dtype_name(dtype))


def weight_gradient(dz: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dzᵀ · x, [N, K], rounded once, to `dtype`, where the library can write it."""
    if dtype.itemsize <= x.dtype.itemsize:
        return torch.mm(dz.t(), near(x)).to(dtype)
    out = dz.new_empty((dz.shape[1], x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
    return add_weight_gradient(out, dz, x, first=True).to(dtype)


def add_weight_gradient(total: Tensor, dz: Tensor, x: Tensor, first: bool) -> Tensor:
    """total += dzᵀ · x, or = where `first`; total is fp32 or of x's dtype. Returns it."""
    if dz.shape[0] == 0:
        return total.zero_() if first else total
    x = near(x)
    if total.dtype == x.dtype:
        return torch.addmm(total, dz.t(), x, beta=0 if first else 1, out=total)
    if x.device.type == "cuda" and torch.version.hip is None:
        if first:
            return torch.mm(dz.t(), x, out_dtype=total.dtype, out=total)
        return torch.addmm(total, dz.t(), x, out_dtype=total.dtype, out=total)
    if x.device.type == "cpu":
        return torch.addmm(total, dz.t().to(total.dtype), x.to(total.dtype), beta=0 if first else 1, out=total)
    added = torch.mm(dz.t(), x)  # rounded to x's dtype: these libraries write nothing else
    return total.copy_(added) if first else total.add_(added)


def _takes_gelu(x: Tensor) -> bool:
    return torch.version.hip is None and x.dtype in (torch.float16, torch.bfloat16)
