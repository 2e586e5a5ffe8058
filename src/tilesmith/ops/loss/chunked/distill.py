"""linear_distillation in plain PyTorch, block by block, on any device."""

import torch
from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.loss import distill_chunks as chunks
from tilesmith.ops.loss.chunk_sizes import swept_elements
from tilesmith.ops.loss.chunked.cross_entropy import STEPS
from tilesmith.ops.loss.chunks import source_tells
from tilesmith.ops.loss.distill_arguments import linear_distillation_arguments, linear_distillation_vjp_arguments
from tilesmith.ops.loss.distill_chunks import Distance, DistanceSteps
from tilesmith.ops.loss.distill_reference import logit_grads, token_parts
from tilesmith.ops.loss.reduction import check_labels


@register_kernel("linear_distillation", backend="chunked", rank=10)
@linear_distillation_arguments
def linear_distillation(call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chunks of tokens, of which a block at a time is widened."""
    if call.target is not None:
        check_labels(call.target, call.weight.shape[0], call.ignore_index)
    return chunks.linear_distillation(DISTANCE_STEPS, call)


@register_kernel(
    "linear_distillation_vjp",
    backend="chunked",
    rank=10,
    tells=linear_distillation_vjp_arguments(source_tells),
)
@linear_distillation_vjp_arguments
def linear_distillation_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the same walk with the logits computed again."""
    return chunks.linear_distillation_vjp(DISTANCE_STEPS, call)


def _step(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    losses: Tensor,
    distance: Distance,
    upstream: Tensor | None,
    grad: bool,
) -> None:
    kind, beta, temperature, soft, hard, ignore_index, probs = distance
    if upstream is None:
        upstream = losses.new_tensor([soft, hard])
    size = max(1, swept_elements(student.device) // student.shape[1])
    for start in range(0, student.shape[0], size):
        rows = slice(start, start + size)
        z, y = student[rows].to(losses.dtype), teacher[rows].to(losses.dtype)
        labels = None if target is None else target[rows]
        losses[:, rows] = token_parts(z, y, labels, kind, beta, temperature, ignore_index, probs)
        if grad:
            student[rows] = logit_grads(z, y, labels, kind, beta, temperature, ignore_index, probs, upstream)


def _scale(grad: Tensor, dloss: Tensor, dtype: torch.dtype, over: bool) -> Tensor:
    return STEPS.scale(grad, dloss, dloss.new_empty(0), dtype, over)


DISTANCE_STEPS = DistanceSteps(_step, _scale)
