"""linear_preference in Triton: the cross-entropy kernels on chunks of whole sequences."""

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.loss import preference_chunks
from tilesmith.ops.loss.arguments import linear_preference_arguments, linear_preference_vjp_arguments
from tilesmith.ops.loss.chunks import source_tells
from tilesmith.ops.loss.preference_reference import gradients_now
from tilesmith.ops.loss.triton.cross_entropy import CROSS_ENTROPY_SPACE, LossConfig, backward_tells, forward_tells
from tilesmith.ops.loss.triton.logit_steps import steps


def _reasons(call) -> list[str]:
    return ["x is float64; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _dims(x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_vjp(dloss: Tensor | None, dlog_probs: Tensor | None, x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return _dims(x, weight)


SPACE = Space(dims=_dims, default=CROSS_ENTROPY_SPACE.default, choices=CROSS_ENTROPY_SPACE.choices)
VJP_SPACE = Space(dims=_dims_vjp, default=CROSS_ENTROPY_SPACE.default, choices=CROSS_ENTROPY_SPACE.choices)


@linear_preference_arguments
def _tells(call, *, config: LossConfig) -> list[str]:
    """Which kernels read a chunk's logits; gradients are taken while the chunk is in memory, if at all."""
    classes = call.weight.shape[0]
    now = any(gradients_now(call.grad_mask, call.recompute))
    return forward_tells(classes, config) + (backward_tells(classes, config) if now else [])


@register_kernel("linear_preference", backend="triton", rank=20, rejects=_reasons, tells=_tells, plans=rehearsed)
@optimize_kernel(space=SPACE)
@linear_preference_arguments
def linear_preference(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two sweeps over each chunk's logits, the formula between them."""
    return preference_chunks.linear_preference(steps(config), call)


@register_kernel(
    "linear_preference_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=linear_preference_vjp_arguments(source_tells),
    plans=rehearsed,
)
@optimize_kernel(space=VJP_SPACE)
@linear_preference_vjp_arguments
def linear_preference_vjp(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again with their lse known."""
    return preference_chunks.linear_preference_vjp(steps(config), call)
