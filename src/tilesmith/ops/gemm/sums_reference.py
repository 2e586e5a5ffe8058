"""What a sum over rows is, in plain PyTorch."""

import torch
from torch import Tensor

from tilesmith.engine.arguments import dtype_name

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def column_sums(x: Tensor, dtype: str = "") -> Tensor:
    """The sum of x over all dims but the last: the gradient of a bias, from the gradient of the sum it was added to.

    Args:
        x: [..., F], floating, any strides.
        dtype: of the result, "float16", "bfloat16", "float32" or "float64"; "" is x's.

    Summed in float32 (float64 where x or the result is float64), in a fixed order, and rounded once. Without rows the
    sums are 0. Returns a contiguous [F]. Raises TypeError for an x that is not floating, ValueError for one without
    dims and for another `dtype`.
    """
    out = DTYPES[dtype] if dtype else x.dtype
    acc = torch.promote_types(torch.promote_types(x.dtype, torch.float32), out)
    return x.unsqueeze(0).sum(list(range(x.ndim)), dtype=acc).to(out)
