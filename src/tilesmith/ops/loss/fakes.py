"""Empty gradients of x, weight and bias as the linear losses return them: from the forward, and from the backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_now(x: Tensor, weight: Tensor, mask: Sequence[bool], summed: torch.dtype) -> tuple[Tensor, ...]:
    """What a forward returns of the gradients that it computes along with the loss, those in `mask`. summed: the dtype
    in which weight's is added up; bias's is in fp32, fp64 for fp64."""
    return (
        x.new_empty(x.shape if mask[0] else 0),
        weight.new_empty(weight.shape if mask[1] else 0, dtype=summed),
        x.new_empty(weight.shape[0] if mask[2] else 0, dtype=torch.promote_types(x.dtype, torch.float32)),
    )


def linear_vjp(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a backward with the arguments `call`, in the dtypes of what they are of."""
    inputs = (call.x, call.weight, call.weight[:, 0] if call.bias is None else call.bias)
    dx, dweight, dbias = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip(inputs, call.output_mask))
    return dx, dweight, dbias
