"""OptimizedLinear: a linear layer whose product is chosen by a level, under the signature of `kernel_pytorch.core`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.engine.argument_checks import flag, size

LEVELS = ("conservative", "balanced", "aggressive")


class OptimizedLinear(nn.Linear):
    """x · weightᵀ + bias with the parameters, initial values and state dict of torch.nn.Linear.

    optimization_level: how the product is computed.
      "conservative": torch.nn.functional.linear, as torch.nn.Linear does.
      "balanced": `ops.linear`: the same values, a weight or bias of another dtype than x is allowed, the gradient of a
        weight wider than x is not rounded to x's dtype, and the bias gradient is summed in fp32.
      "aggressive": as balanced, but fp32 operands are rounded to bf16 (8 bits of mantissa) for the products of forward
        and backward, whose sums stay fp32; y comes back in x's dtype, gradients in their parameters'. 16-bit and fp64
        inputs are as balanced.
    Raises ValueError for another level.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        optimization_level: str = "balanced",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        size("OptimizedLinear", "in_features", in_features, 0)
        size("OptimizedLinear", "out_features", out_features, 0)
        flag("OptimizedLinear", "bias", bias)
        if optimization_level not in LEVELS:
            raise ValueError(f"optimization_level is {optimization_level!r}; it must be one of {', '.join(LEVELS)}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.optimization_level = optimization_level

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features]."""
        if self.optimization_level == "conservative":
            return F.linear(x, self.weight, self.bias)
        if self.optimization_level == "aggressive" and x.dtype == torch.float32:
            return ops.linear(x.to(torch.bfloat16), self.weight, self.bias).to(x.dtype)
        return ops.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, optimization_level={self.optimization_level!r}"
