"""Layers under the names of `kernel_pytorch.core`. Their home is `tilesmith.nn`."""

from tilesmith.nn.activation import FusedGELU
from tilesmith.nn.linear import OptimizedLinear
from tilesmith.nn.multihead import AttentionLayer

__all__ = ["AttentionLayer", "FusedGELU", "OptimizedLinear"]
