"""The losses in plain PyTorch, block by block in place, on any device; linear_cross_entropy in one pass."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.arguments import (
    cross_entropy_arguments,
    cross_entropy_vjp_arguments,
    linear_cross_entropy_arguments,
    linear_cross_entropy_vjp_arguments,
)
from tilesmith.ops.loss.chunk_sizes import swept_elements
from tilesmith.ops.loss.reduction import (
    check_labels,
    divisors_of,
    loss_factor,
    reduce_losses,
    row_factors,
    token_grads,
    undivided_token_grads,
)
from tilesmith.ops.loss.reference import Terms


@register_kernel("cross_entropy", backend="chunked", rank=10)
@cross_entropy_arguments
def cross_entropy(call) -> tuple[Tensor, Tensor, Tensor]:
    """Each block of rows is copied once and swept while it is in the cache."""
    logits, target, ignore_index = call.logits, call.target, call.ignore_index
    check_labels(target, logits.shape[-1], ignore_index)
    terms = Terms(ignore_index, call.label_smoothing, call.z_loss, call.scale, call.softcap)
    losses = logits.new_empty(target.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    lse = torch.empty_like(losses)
    divisors = divisors_of(target, call.weight, ignore_index, logits.shape[-1], losses.dtype, call.reduction)
    rows = logits.reshape(-1, logits.shape[-1])
    _forward(rows, target.reshape(-1), call.weight, losses.view(-1), lse.view(-1), divisors, terms, "", copied=True)
    return reduce_losses(losses, lse, divisors, call.z_loss, call.reduction), lse, divisors


@register_kernel("cross_entropy_vjp", backend="chunked", rank=10)
@cross_entropy_vjp_arguments
def cross_entropy_vjp(call) -> Tensor:
    """A copy of the logits becomes their gradient, block by block."""
    dloss, logits = call.dloss, call.logits
    if not call.output_mask[0]:
        return logits.new_empty(0)
    terms = Terms(call.ignore_index, call.label_smoothing, call.z_loss, call.scale, call.softcap)
    dlogits = logits.clone(memory_format=torch.contiguous_format)
    labels = call.target.reshape(-1)
    dloss = dloss.reshape(-1) if call.reduction == "none" else dloss.expand(labels.shape)
    rows = dlogits.view(-1, logits.shape[-1])
    _backward(rows, labels, call.weight, call.lse.reshape(-1), dloss, call.divisors, terms, 0, rows.shape[1])
    return dlogits


@register_kernel("linear_cross_entropy", backend="chunked", rank=10)
@linear_cross_entropy_arguments
def linear_cross_entropy(call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chunks of tokens, swept in place by PyTorch's own element-wise ops."""
    check_labels(call.target, call.weight.shape[0], call.ignore_index)
    return chunks.linear_cross_entropy(STEPS, call)


@register_kernel(
    "linear_cross_entropy_vjp",
    backend="chunked",
    rank=10,
    tells=linear_cross_entropy_vjp_arguments(chunks.source_tells),
)
@linear_cross_entropy_vjp_arguments
def linear_cross_entropy_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, products of the logits', or a walk with the logits computed again."""
    return chunks.linear_cross_entropy_vjp(STEPS, call)


def _forward(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    losses: Tensor,
    lse: Tensor,
    divisors: Tensor,
    terms: Terms,
    grad: str,
    copied: bool = False,
) -> None:
    """`LogitSteps.forward`, which overwrites logits also without `grad`, unless `copied`."""
    if grad == "mean":
        token_grad, z_grad = token_grads(losses.new_ones(()), divisors, losses.shape, grad)
    else:
        token_grad, z_grad = undivided_token_grads(losses, divisors)
    for rows in blocks(logits):
        z, slope = scores(logits[rows].to(losses.dtype, copy=copied), terms, grad != "")
        block = _Block(z, target[rows], class_weight, terms, 0, logits.shape[1])
        peak = finite_peak(z.amax(-1, keepdim=True))
        chosen = z.gather(-1, block.label)[:, 0]
        total = block.weighted_sum(z) if terms.label_smoothing else None
        sums = z.sub_(peak).exp_().sum(-1)
        block_lse = peak[:, 0] + sums.log()
        losses[rows] = block.losses(block_lse, chosen, total)
        lse[rows] = torch.where(block.counted, block_lse, 0.0)
        if grad:
            block.finish_gradient(block_lse, sums, token_grad[rows], z_grad[rows], slope)
            _store(z, logits[rows])


def _backward(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    divisors: Tensor,
    terms: Terms,
    first_class: int,
    classes: int,
) -> None:
    token_grad, z_grad = token_grads(dloss, divisors, dloss.shape, "mean" if divisors.numel() else "none")
    for rows in blocks(logits):
        z, slope = scores(logits[rows].to(lse.dtype), terms, True)
        block = _Block(z, target[rows], class_weight, terms, first_class, classes)
        z.sub_(lse[rows][:, None]).exp_()
        block.finish_gradient(lse[rows], None, token_grad[rows], z_grad[rows], slope)
        _store(z, logits[rows])


def _scale(grad: Tensor, dloss: Tensor, divisors: Tensor, dtype: torch.dtype, over: bool = False) -> Tensor:
    factor = loss_factor(dloss, divisors, "mean" if divisors.numel() else "sum")
    over = over and grad.dtype == dtype
    if grad.dtype == factor.dtype == dtype:
        return grad.mul_(factor) if over else grad * factor
    out = grad if over else torch.empty_like(grad, dtype=dtype)
    flat_out, flat = out.view(-1), grad.view(-1)
    # A scalar tensor would be rounded to half precision before the product, so the product is taken in fp32.
    step = swept_elements(grad.device)
    for start in range(0, flat.numel(), step):
        part = slice(start, start + step)
        flat_out[part] = flat[part].to(factor.dtype) * factor
    return out


def _scale_rows(rows: Tensor, factors: Tensor, dloss: Tensor, divisors: Tensor, over: bool) -> Tensor:
    every = row_factors(factors, dloss, divisors)[:, None]
    out = rows if over else torch.empty_like(rows)
    for part in blocks(rows):
        taken = every[part]
        out[part] = torch.where(taken == 0, 0.0, rows[part].to(taken.dtype) * taken).to(rows.dtype)
    return out


def _divide(
    target: Tensor, class_weight: Tensor | None, terms: Terms, classes: int, dtype: torch.dtype, reduction: str
) -> Tensor:
    return divisors_of(target, class_weight, terms.ignore_index, classes, dtype, reduction)


def _reduce(
    losses: Tensor,
    lse: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    terms: Terms,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    divisors = _divide(target, class_weight, terms, classes, losses.dtype, reduction)
    return reduce_losses(losses, lse, divisors, terms.z_loss, reduction), divisors


STEPS = chunks.LogitSteps(_forward, _backward, _divide, _reduce, _scale, _scale_rows)
KEEPING_STEPS = STEPS._replace(forward=partial(_forward, copied=True))


class _Block:
    """A block of logits, those of the classes from `first` on of so many `classes`, overwritten first by exponentials,
    then by gradients. Vectors have one value a token."""

    def __init__(self, z: Tensor, target: Tensor, class_weight: Tensor | None, terms: Terms, first: int, classes: int):
        self.z, self.terms, self.first, self.classes = z, terms, first, classes
        self.counted = target != terms.ignore_index
        self.valid = (target >= 0) & (target < classes)
        self.label = target.clamp(0, classes - 1).long()[:, None]
        self.weights = None if class_weight is None else class_weight.to(z.dtype)

    def weighted_sum(self, z: Tensor) -> Tensor:
        return z.sum(-1) if self.weights is None else z @ self.weights

    def losses(self, lse: Tensor, chosen: Tensor, total: Tensor | None) -> Tensor:
        """Cross-entropies from the label's score and, for label smoothing, the (weighted) sum of all scores."""
        losses = lse - chosen
        if self.weights is not None:
            losses = losses * self.weights[self.label[:, 0]]
        if total is not None:
            smoothing = self.terms.label_smoothing
            losses = (1 - smoothing) * losses + smoothing / self.classes * (lse * self.all_weights() - total)
        return torch.where(self.counted, torch.where(self.valid, losses, float("nan")), 0.0)

    def all_weights(self) -> Tensor | int:
        return self.classes if self.weights is None else self.weights.sum()

    def finish_gradient(
        self, lse: Tensor, sums: Tensor | None, token_grad: Tensor, z_grad: Tensor, slope: Tensor | None
    ) -> None:
        """Turn z, which holds exp(score − lse), or that times `sums`, into the gradient."""
        z, terms = self.z, self.terms
        nothing = torch.where(self.counted, torch.where(self.valid, 1.0, float("nan")), 0.0).to(z.dtype)
        upstream = torch.where(self.counted, token_grad, 0.0) * nothing * terms.scale
        hit = upstream * (1 - terms.label_smoothing)
        if self.weights is not None:
            hit = hit * self.weights[self.label[:, 0]]
        every = upstream * (terms.label_smoothing / self.classes)
        softmax_coef = hit + every * self.all_weights()
        if terms.z_loss:
            square = torch.where(self.counted, 2 * terms.z_loss * lse * z_grad, 0.0)
            softmax_coef = softmax_coef + square * nothing * terms.scale
        z.mul_((softmax_coef if sums is None else softmax_coef / sums)[:, None])
        if terms.label_smoothing and self.weights is None:
            z.sub_(every[:, None])
        elif terms.label_smoothing:
            z.addcmul_(every[:, None], self.weights[self.first : self.first + z.shape[1]], value=-1)
        column = self.label - self.first
        hit = torch.where((column >= 0) & (column < z.shape[1]), hit[:, None], 0.0)
        column = column.clamp(0, z.shape[1] - 1)
        z.scatter_(-1, column, z.gather(-1, column) - hit)
        if slope is not None:
            z.mul_(slope)
        # rows that do not count may hold NaN or infinities, of which no product is 0; a CPU finds them without waiting
        if z.device.type == "cpu":
            z.index_fill_(0, (~self.counted).nonzero()[:, 0], 0.0)
        else:
            z.masked_fill_(~self.counted[:, None], 0.0)


def finite_peak(peak: Tensor) -> Tensor:
    """What is taken off a row's scores: 0 where all are -inf, whose lse is then -inf, as a slice of the vocabulary
    whose classes are all masked needs it."""
    return peak.masked_fill(peak == float("-inf"), 0.0)


def scores(z: Tensor, terms: Terms, grad: bool) -> tuple[Tensor, Tensor | None]:
    """Logits scaled and capped in place, and the soft cap's derivative."""
    if terms.scale != 1:
        z.mul_(terms.scale)
    if not terms.softcap:
        return z, None
    z.div_(terms.softcap).tanh_()
    slope = 1 - z * z if grad else None
    return z.mul_(terms.softcap), slope


def _store(z: Tensor, logits: Tensor) -> None:
    if z.data_ptr() != logits.data_ptr():
        logits.copy_(z)


def blocks(logits: Tensor) -> Iterator[slice]:
    tokens, classes = logits.shape
    step = max(1, swept_elements(logits.device) // classes)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))
