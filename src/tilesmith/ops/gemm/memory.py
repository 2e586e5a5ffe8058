"""What memory_efficient_linear and its backward hold in memory, in bytes, by the number of rows in a chunk."""

import torch
from torch import Tensor

from tilesmith.engine.memory import Need, computed_in, held, workspaces


def memory_efficient_linear_need(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, chunk_rows: int
) -> Need:
    """The need of a call with its backward, if autograd will ask for one: the op's own account with the factors of
    plain PyTorch (t = 1, b = 3), y and dy on top of the backward's part. A cast or a copy of an operand is counted."""
    dtype, outputs = computed_in(x), weight.shape[0]
    rows = x.numel() // max(1, x.shape[-1])
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    acc, y = torch.promote_types(dtype, torch.float32), rows * outputs * dtype.itemsize
    fixed = workspaces(x.device) + 2 * outputs * acc.itemsize
    fixed += 0 if weight.dtype == dtype else weight.numel() * dtype.itemsize
    fixed += 0 if x.is_contiguous() and x.dtype == dtype else x.numel() * dtype.itemsize
    row = 0 if activation == "none" else outputs * dtype.itemsize
    if not any(wanted):
        return Need(rows, fixed + y + rows * row, fixed + y, row)
    base = fixed + 2 * y
    base += x.numel() * dtype.itemsize if wanted[0] else 0
    base += held(weight) if wanted[1] else 0
    beside = weight.numel() * acc.itemsize if wanted[1] and weight.dtype != acc else 0
    whole = base + (beside if weight.dtype != dtype else 0) + 3 * rows * row
    return Need(rows, whole, base + beside, 3 * row)
