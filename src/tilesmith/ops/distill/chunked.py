"""linear_distillation in plain PyTorch, block by block, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.distill import chunks
from tilesmith.ops.distill.chunks import Distance, DistanceSteps
from tilesmith.ops.distill.reference import gradients_now, logit_grads, token_parts
from tilesmith.ops.loss.chunked import ACCELERATOR_BLOCK, CPU_BLOCK, STEPS
from tilesmith.ops.loss.reduction import check_labels


@register_kernel("linear_distillation", backend="chunked", rank=10)
def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    teacher_probs: bool = False,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = False,
    grad_mask: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chunks of tokens, of which a block at a time is widened."""
    if target is not None:
        check_labels(target, weight.shape[0], ignore_index)
    rest = (temperature, soft_weight, hard_weight, ignore_index, teacher_probs)
    distance = Distance.of(divergence, beta, *rest)
    return chunks.linear_distillation(
        DISTANCE_STEPS, x, weight, teacher, teacher_weight, target, bias, teacher_bias, distance,
        chunk_tokens, accumulate_fp32, gradients_now(grad_mask),
    )  # fmt: skip


@register_kernel("linear_distillation_vjp", backend="chunked", rank=10)
def linear_distillation_vjp(
    dloss: Tensor | None,
    dparts: Tensor | None,
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    target: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    divergence: str,
    beta: float,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    ignore_index: int,
    teacher_probs: bool,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the same walk with the logits computed again."""
    rest = (temperature, soft_weight, hard_weight, ignore_index, teacher_probs)
    distance = Distance.of(divergence, beta, *rest)
    return chunks.linear_distillation_vjp(
        DISTANCE_STEPS, dloss, dparts, x, weight, teacher, teacher_weight, target, bias, teacher_bias,
        (x_grad, weight_grad, bias_grad), distance, chunk_tokens, accumulate_fp32, output_mask, overwrite,
    )  # fmt: skip


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
    elements = CPU_BLOCK if student.device.type == "cpu" else ACCELERATOR_BLOCK
    size = max(1, elements // student.shape[1])
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
