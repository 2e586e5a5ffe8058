"""The dtype in which what is computed from a tensor is summed: float32, or its own where that is wider."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """x in that dtype."""
    return x.to(sum_dtype(x))
