"""linear_preference in Triton: the cross-entropy kernels on chunks of whole sequences."""

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.ops.loss import preference_chunks
from tilesmith.ops.loss.arguments import linear_preference_arguments, linear_preference_vjp_arguments
from tilesmith.ops.loss.triton.cross_entropy import CROSS_ENTROPY_SPACE, LossConfig
from tilesmith.ops.loss.triton.logit_steps import steps


def _reasons(call) -> list[str]:
    return ["x is float64; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _dims(x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_vjp(dloss: Tensor | None, dlog_probs: Tensor | None, x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return _dims(x, weight)


SPACE = Space(dims=_dims, default=CROSS_ENTROPY_SPACE.default, choices=CROSS_ENTROPY_SPACE.choices)
VJP_SPACE = Space(dims=_dims_vjp, default=CROSS_ENTROPY_SPACE.default, choices=CROSS_ENTROPY_SPACE.choices)


@register_kernel("linear_preference", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
@linear_preference_arguments
def linear_preference(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two sweeps over each chunk's logits, the formula between them."""
    return preference_chunks.linear_preference(steps(config), call)


@register_kernel("linear_preference_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=VJP_SPACE)
@linear_preference_vjp_arguments
def linear_preference_vjp(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again with their lse known."""
    return preference_chunks.linear_preference_vjp(steps(config), call)
