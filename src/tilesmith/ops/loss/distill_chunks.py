"""linear_distillation by chunks of tokens: products, accumulation, memory. What is done to logits is a backend's."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import row_values
from tilesmith.ops.loss.chunk_sizes import ACCELERATOR_BUDGET, CPU_BUDGET, FEWEST_TOKENS
from tilesmith.ops.loss.chunks import Chunks, GradientSource, gradient_dtypes, gradient_source, scaled
from tilesmith.ops.loss.distill_reference import gradients_now, part_grads
from tilesmith.ops.loss.pitch import padded, row_pitch, rows_in
from tilesmith.ops.loss.reference import saved_dtype


def tokens_per_chunk(tokens: int, classes: int, hidden: int, itemsize: int, on_cpu: bool) -> int:
    """How many tokens' logits of both models are in memory at a time, where the caller does not say.

    Equal chunks whose logits take no more than a budget (512 MiB; 16 MiB on a CPU) and no more than twelve times x, but
    256 tokens at least: few tokens should not cost more memory than there is to gain from them.
    """
    budget = CPU_BUDGET if on_cpu else min(ACCELERATOR_BUDGET, 12 * tokens * hidden * itemsize)
    most = max(FEWEST_TOKENS, budget // (2 * classes * itemsize))
    return max(1, -(-tokens // max(1, -(-tokens // most))))


class Distance(NamedTuple):
    """kind: "kl", "reverse_kl", "jsd" or "tvd"; beta: of "jsd", inside (0, 1). soft, hard: the losses' weights.
    probs: whether the teacher's are probabilities instead of logits."""

    kind: str
    beta: float
    temperature: float
    soft: float
    hard: float
    ignore_index: int
    probs: bool

    @staticmethod
    def of(call) -> "Distance":
        """That of a call, with the ends of "jsd" as the divergences that they are."""
        kind = call.divergence
        if kind == "jsd" and call.beta in (0, 1):
            kind = "reverse_kl" if call.beta else "kl"
        weights = call.soft_weight, call.hard_weight
        return Distance(kind, call.beta, call.temperature, *weights, call.ignore_index, call.teacher_probs)


class DistanceSteps(NamedTuple):
    """What a backend does to one chunk of logits [C, V].

    step(student, teacher, target, losses, distance, upstream, grad): writes each token's soft and hard loss to `losses`
    [2, C] and with `grad` the gradient over `student`, given that with respect to the sums of both: `upstream` [2], or
    the distance's weights if None. target may be None.
    scale(grad, dloss, dtype, over): the product as a tensor of `dtype`, as `LogitSteps` says.
    """

    step: Callable[[Tensor, Tensor, Tensor | None, Tensor, Distance, Tensor | None, bool], None]
    scale: Callable[[Tensor, Tensor, torch.dtype, bool], Tensor]


def linear_distillation(steps: DistanceSteps, call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs."""
    mask, distance = gradients_now(call.grad_mask), Distance.of(call)
    chunks = _chunks(call, mask, saved_dtype(call.weight))
    losses = _walk(steps, chunks, call, distance, None, any(mask))
    parts = losses.sum(1)
    return distance.soft * parts[0] + distance.hard * parts[1], parts, *chunks.gradients()


def linear_distillation_vjp(steps: DistanceSteps, call) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or new ones from the logits computed again."""
    x, weight, bias, distance = call.x, call.weight, call.bias, Distance.of(call)
    if gradient_source(call) is GradientSource.SAVED:
        return scaled(steps.scale, call)
    chunks = _chunks(call, tuple(call.output_mask), weight.dtype)
    upstream = part_grads(call.dloss, call.dparts, distance.soft, distance.hard).contiguous()
    _walk(steps, chunks, call, distance, upstream, True)
    dx, dweight, dbias = chunks.gradients()
    return dx, dweight, dbias.to(gradient_dtypes(x, weight, bias)[2])


def _chunks(call, mask: tuple[bool, ...], weight_dtype: torch.dtype) -> Chunks:
    x, weight, size = call.x, call.weight, call.chunk_tokens
    if not size:
        tokens, on_cpu = x.numel() // x.shape[-1], x.device.type == "cpu"
        size = tokens_per_chunk(tokens, weight.shape[0], x.shape[-1], x.element_size(), on_cpu)
    acc = torch.promote_types(x.dtype, torch.float32)
    return Chunks(x, weight, call.bias, mask, weight_dtype, acc, size, call.accumulate_fp32)


def _walk(
    steps: DistanceSteps, chunks: Chunks, call, distance: Distance, upstream: Tensor | None, grad: bool
) -> Tensor:
    """Soft and hard losses [2, M] of all tokens; with `grad` the gradients grow in `chunks`."""
    tokens = chunks.x.shape[0]
    losses = chunks.x.new_empty((2, tokens), dtype=torch.promote_types(chunks.x.dtype, torch.float32))
    labels = None if call.target is None else row_values(call.target)
    for part, teacher_logits in zip(chunks, _teacher_logits(chunks, call)):
        logits = chunks.logits(part)
        part_labels = None if labels is None else labels[part]
        steps.step(logits, teacher_logits, part_labels, losses[:, part], distance, upstream, grad)
        if grad:
            chunks.add_gradients(part, logits)
    return losses


def _teacher_logits(chunks: Chunks, call) -> Iterator[Tensor]:
    """The teacher's logits of each chunk: rows of those given, or products in one buffer."""
    weight, bias, rows = call.teacher_weight, call.teacher_bias, call.teacher.reshape(-1, call.teacher.shape[-1])
    if weight is None:
        yield from (rows[part] if call.teacher.stride(-1) == 1 else rows[part].contiguous() for part in chunks)
        return
    weight = weight.to(rows.dtype)
    classes = weight.shape[0]
    wide, wide_bias = padded(weight, None if bias is None else bias.to(rows.dtype))
    buffer = rows.new_empty(chunks.size * row_pitch(classes, rows.dtype, rows.device))
    for part in chunks:
        out = rows_in(buffer, part.stop - part.start, classes)
        if wide_bias is None:
            torch.mm(rows[part], wide.t(), out=out)
        else:
            torch.addmm(wide_bias, rows[part], wide.t(), out=out)
        yield out[:, :classes]
