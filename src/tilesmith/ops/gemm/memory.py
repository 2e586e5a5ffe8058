"""What memory_efficient_linear and its backward hold in memory, in bytes, by the number of rows in a chunk."""

import torch
from torch import Tensor

from tilesmith.engine.memory import TILED, Need, computed_in, held, workspaces

# activations whose formula plain PyTorch computes step by step: tensors of the accumulation's dtype that this takes
# beside the pre-activation, and how many more where the latter is narrower
_STEPS, _STEPS_VJP = (2, 1), (4, 2)


def memory_efficient_linear_need(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, chunk_rows: int
) -> Need:
    """The need of a call with its backward, if autograd will ask for one: the op's own account with the factors of
    plain PyTorch (t = 1, b = 3), y and dy on top of the backward's part. A cast or a copy of an operand is counted, and
    on devices without kernels what the references of the activations take (`_reference_rows`)."""
    dtype, outputs = computed_in(x), weight.shape[0]
    rows = x.numel() // max(1, x.shape[-1])
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    acc, y = torch.promote_types(dtype, torch.float32), rows * outputs * dtype.itemsize
    fixed = workspaces(x.device) + 2 * outputs * acc.itemsize
    fixed += 0 if weight.dtype == dtype else weight.numel() * dtype.itemsize
    fixed += 0 if x.is_contiguous() and x.dtype == dtype else x.numel() * dtype.itemsize
    row = 0 if activation == "none" else outputs * dtype.itemsize
    forward, backward = row, 3 * row
    summed = wanted[1] and weight.dtype != acc  # in fp32 beside the result, if over chunks or of another dtype than x
    if x.device.type not in TILED:
        features = x.shape[-1] if wanted[1] and dtype != acc else 0
        forward, backward = _reference_rows(outputs, features, dtype, acc, activation, wanted[2])
    if not any(wanted):
        return Need(rows, fixed + y + rows * forward, fixed + y, forward)
    base = fixed + 2 * y
    base += x.numel() * dtype.itemsize if wanted[0] else 0
    base += held(weight) if wanted[1] else 0
    beside = weight.numel() * acc.itemsize if summed else 0
    whole = base + (beside if weight.dtype != dtype else 0) + rows * backward
    forward_peak = fixed + y + rows * forward  # may be the larger one where nothing but a bias is trained
    return Need(rows, max(whole, forward_peak), base + beside, max(backward, forward))


def _reference_rows(
    outputs: int, features: int, dtype: torch.dtype, acc: torch.dtype, activation: str, sums: bool
) -> tuple[int, int]:
    """Bytes that a row takes beside y in the forward, and beside y and dy in the backward, in plain PyTorch.

    features: of x, where weight's gradient is a product of fp32 copies of dz and x, else 0. sums: whether the bias's is
    one, of which 16-bit values are summed as a copy in fp32.
    """
    narrow, row = dtype != acc, outputs * dtype.itemsize
    formula = activation in ("gelu", "gelu_tanh", "silu")
    forward = (_STEPS[0] + narrow * _STEPS[1]) * outputs * acc.itemsize if formula else 0
    steps = (_STEPS_VJP[0] + narrow * _STEPS_VJP[1]) * outputs * acc.itemsize if formula else row
    dz = 0 if activation == "none" else row
    copies = (outputs + features) * acc.itemsize if features else 0
    if sums and narrow:
        copies = max(copies, outputs * acc.itemsize)
    return forward, max(0 if activation == "none" else row + steps, dz + copies)
