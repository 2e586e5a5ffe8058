"""linear_cross_entropy by chunks: products, accumulation, memory. What is done to logits is a backend's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import dense, row_values
from tilesmith.ops.loss.chunk_sizes import (
    added_elements,
    budget,
    classes_per_block,
    recomputed_tokens,
    tokens_per_chunk,
    tokens_per_step,
)
from tilesmith.ops.loss.pitch import padded, row_pitch, rows_in, whole_rows
from tilesmith.ops.loss.reference import Terms, already_computed, gradients_now, keeps_logit_grad, summed_dtype


class LogitSteps(NamedTuple):
    """What a backend does to one chunk of logits [C, V].

    forward(logits, target, class_weight, losses, lse, divisors, terms, grad): writes each token's cross-entropy
    (without its z term) and lse into `losses` and `lse` [C], and with `grad` over `logits` the gradient of their sum:
    "sum", undivided, or "mean", divided by the divisors.
    backward(logits, target, class_weight, lse, dloss, divisors, terms, first_class, classes): overwrites `logits`,
    those of the classes from first_class on, with the gradient, given the loss's gradient `dloss` [C] (a stride of 0 is
    usual) and the divisors (empty: 1). classes: how many there are in all. None: a backend without a vjp.
    divide(target, class_weight, terms, classes, dtype, reduction): the divisors, where they are needed before the loss.
    reduce(losses, lse, target, class_weight, classes, terms, reduction): the loss and the divisors.
    scale(grad, dloss, divisors, dtype, over): grad · `loss_factor`, as a tensor of `dtype`: a new one, or, where `over`
        allows it and grad has that dtype, grad itself.
    scale_rows(rows, factors, dloss, divisors, over): rows [N, K], contiguous, times `loss_factor` and a factor for each
        row [N], and 0 where the product of these is 0: a new tensor or, with `over`, rows itself.
    exponentials: another way from x to the gradients, where it applies.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Terms, str], None]
    backward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Terms, int, int], None] | None
    divide: Callable[[Tensor, Tensor | None, Terms, int, torch.dtype, str], Tensor]
    reduce: Callable[[Tensor, Tensor, Tensor, Tensor | None, int, Terms, str], tuple[Tensor, Tensor]]
    scale: Callable[[Tensor, Tensor, Tensor, torch.dtype, bool], Tensor]
    scale_rows: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]
    exponentials: ExponentialSteps | None = None


class ExponentialSteps(NamedTuple):
    """How a backend computes gradients from exponentials in place of logits. A row of them, times a factor of the row,
    is the gradient of its logits.

    applies(chunks, terms, kept): whether it does so for these chunks, or where `kept` for the gradient of their logits.
    gradients(chunks, tokens, target, class_weight, losses, lse, terms): what `LogitSteps.forward` does for undivided
        gradients, with the products before and after it.
    kept(chunks, tokens, target, class_weight, losses, lse, factors, terms): the same without the products after it: the
        buffer times `factors` [C] is the undivided gradient of the logits.
    """

    applies: Callable[[Chunks, Terms, bool], bool]
    gradients: Callable[..., None]
    kept: Callable[..., None]


def linear_cross_entropy(
    steps: LogitSteps, call
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs."""
    x, weight, bias, target, reduction, mode = call.x, call.weight, call.bias, call.target, call.reduction, call.mode
    class_weight, grad_mask, terms = dense(call.class_weight), call.grad_mask, _terms(call)
    acc, labels, classes = torch.promote_types(x.dtype, torch.float32), row_values(target), weight.shape[0]
    mask = gradients_now(grad_mask, reduction, mode)
    keeps = keeps_logit_grad(grad_mask, reduction, mode)
    size = call.chunk_tokens
    if keeps:
        size = labels.numel()
    elif not size and mode == "recompute":
        room = budget(x.device, recompute=True)
        if grad_mask is not None and all(grad_mask[:2]) and x.device.type != "cpu":
            # the sum of one gradient and the result of the other, which the backward holds beside its logits
            summed, other = (x, weight) if x.numel() <= weight.numel() else (weight, x)
            room += summed.numel() * acc.itemsize + other.numel() * other.element_size()
        size = tokens_per_chunk(labels.numel(), classes, x.element_size(), room)
    sums = summed_dtype(weight, call.accumulate_fp32)
    chunks = Chunks(x, weight, bias, mask, sums, acc, size, call.accumulate_fp32)
    losses = x.new_empty(labels.shape, dtype=acc)
    lse = torch.empty_like(losses)
    exponentials = steps.exponentials if keeps or any(mask) else None
    if exponentials is not None and not exponentials.applies(chunks, terms, keeps):
        exponentials = None
    divided = keeps and exponentials is None and reduction == "mean"
    grad = "mean" if divided else "sum" if keeps or any(mask) else ""
    divisors, factors = losses.new_empty(0), losses.new_empty(labels.shape if keeps else 0)
    if divided or (terms.z_loss != 0 and grad):
        divisors = steps.divide(labels, class_weight, terms, classes, acc, reduction)
    if divided:
        factors.copy_(divisors[0].expand_as(factors))
    elif keeps and exponentials is None:
        factors.fill_(1.0)
    for tokens in chunks:
        given = labels[tokens], class_weight, losses[tokens], lse[tokens]
        if exponentials is not None and keeps:
            exponentials.kept(chunks, tokens, *given, factors[tokens], terms)
            continue
        if exponentials is not None:
            exponentials.gradients(chunks, tokens, *given, terms)
            continue
        logits = chunks.logits(tokens)
        steps.forward(logits, *given, divisors, terms, grad)
        chunks.add_gradients(tokens, logits)
        del logits
    logit_grad = x.new_empty(0)
    if keeps:
        logit_grad = rows_in(chunks.buffer, labels.numel(), classes)[:, :classes].view(*target.shape, classes)
    loss, divisors = steps.reduce(losses, lse, labels, class_weight, classes, terms, reduction)
    loss = loss.view(target.shape) if reduction == "none" else loss
    factors = factors.view(target.shape) if keeps else factors
    return loss, lse.view(target.shape), divisors, *chunks.gradients(), logit_grad, factors


class GradientSource(Enum):
    """What the backward of a loss of a linear layer makes the gradients of."""

    LOGIT_GRADIENT = "matmuls of the logits' gradient, which the forward kept"
    SAVED = "the gradients that the forward computed, times that of the loss"
    RECOMPUTED = "logits computed again, chunk by chunk"


def gradient_source(call) -> GradientSource:
    """Which source serves a call of the vjp of linear_cross_entropy, linear_preference or linear_distillation."""
    logit_grad, beside = getattr(call, "logit_grad", None), getattr(call, "dlog_probs", getattr(call, "dparts", None))
    if logit_grad is not None and logit_grad.shape == (*call.target.shape, call.weight.shape[0]):
        return GradientSource.LOGIT_GRADIENT
    saved = call.x_grad, call.weight_grad, call.bias_grad
    if beside is None and already_computed(call.x, call.weight, call.bias, saved, call.output_mask):
        return GradientSource.SAVED
    return GradientSource.RECOMPUTED


def source_tells(call) -> list[str]:
    """What `explain` says of the source of a call's gradients."""
    return [f"the gradients come from {gradient_source(call).value}"]


def linear_cross_entropy_vjp(steps: LogitSteps, call) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op's outputs: from the logits' gradient, or the saved gradients times the loss's, or from the logits
    computed again."""
    x, weight, bias, wanted = call.x, call.weight, call.bias, call.output_mask
    source = gradient_source(call)
    if source is GradientSource.LOGIT_GRADIENT:
        given = call.dloss, call.divisors, x, weight, call.logit_grad, call.logit_factors.reshape(-1)
        return _from_logit_grad(steps, *given, gradient_dtypes(x, weight, bias), wanted)
    if source is GradientSource.SAVED:
        return scaled(partial(steps.scale, divisors=call.divisors), call)
    return recomputed(
        steps, call.dloss, x, weight, call.target, bias, dense(call.class_weight), call.lse, call.divisors,
        _terms(call), call.reduction, Chunking(call.chunk_tokens, call.accumulate_fp32, call.mode), wanted,
    )  # fmt: skip


class Chunking(NamedTuple):
    """What a caller says of the chunks: their tokens (0: the library chooses), how sums are kept, `mode` of the op."""

    chunk_tokens: int
    accumulate_fp32: bool
    mode: str


def recomputed(
    steps: LogitSteps,
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    terms: Terms,
    reduction: str,
    chunking: Chunking,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from the logits computed again."""
    chunk_tokens, accumulate_fp32, mode = chunking
    dtypes = gradient_dtypes(x, weight, bias)
    labels, lse = row_values(target), lse.reshape(-1)
    dloss = dloss.reshape(-1) if reduction == "none" else dloss.expand(labels.shape)
    room = budget(x.device, mode == "recompute")
    size = chunk_tokens or tokens_per_chunk(labels.numel(), weight.shape[0], x.element_size(), room)
    # In chunks of tokens weight's gradient is a sum over chunks, in blocks of classes x's: the smaller one should be.
    if size < labels.numel() <= weight.shape[0] and output_mask[1]:
        size = chunk_tokens or recomputed_tokens(x, weight.shape[0], mode, output_mask[0])
        given = (labels, class_weight, lse, dloss, divisors, terms)
        return _by_classes(steps, x, weight, bias, given, size, dtypes, output_mask)
    size = size if mode == "recompute" else chunk_tokens
    chunks = Chunks(x, weight, bias, tuple(output_mask), weight.dtype, lse.dtype, size, accumulate_fp32)
    for tokens in chunks:
        logits = chunks.logits(tokens)
        steps.backward(
            logits, labels[tokens], class_weight, lse[tokens], dloss[tokens], divisors, terms, 0, weight.shape[0]
        )
        chunks.add_gradients(tokens, logits)
        del logits
    dx, dweight, dbias = chunks.gradients()
    return dx, dweight, dbias.to(dtypes[2])


def gradient_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, ...]:
    """Those of dx, dweight and dbias."""
    return x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype


def scaled(scale: Callable[..., Tensor], call) -> tuple[Tensor, ...]:
    """The gradients saved along with a loss times the loss's own, of those that a call wants."""
    saved = call.x_grad, call.weight_grad, call.bias_grad
    dtypes = gradient_dtypes(call.x, call.weight, call.bias)
    return tuple(
        scale(grad, call.dloss, dtype=dtype, over=call.overwrite) if wanted else grad.new_empty(0, dtype=dtype)
        for grad, dtype, wanted in zip(saved, dtypes, call.output_mask)
    )


def _terms(call) -> Terms:
    return Terms(call.ignore_index, call.label_smoothing, call.z_loss, call.scale, call.softcap)


def _from_logit_grad(
    steps: LogitSteps,
    dloss: Tensor,
    divisors: Tensor,
    x: Tensor,
    weight: Tensor,
    logit_grad: Tensor,
    factors: Tensor,
    dtypes: Sequence[torch.dtype],
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of the logits' gradient. dloss, a power of two as a rule, and the factors of its rows, which are the
    divisor where bias's gradient is wanted, go into x and dx, which are small; the scaled x is gone before dx is there.
    """
    none = dloss.new_empty(0)
    rows = logit_grad.view(-1, weight.shape[0])
    dx, dweight, dbias = (rows.new_empty(0, dtype=dtype) for dtype in dtypes)
    if mask[1]:
        scaled = steps.scale_rows(x.reshape(-1, x.shape[-1]).contiguous(), factors, dloss, divisors, False)
        dweight = weight.new_empty(weight.shape)
        if scaled.shape[0]:
            add_product(dweight, rows.t(), scaled, first=True)
        else:
            dweight.zero_()
        del scaled
    if mask[0]:
        wide, (taken, _) = whole_rows(rows), padded(weight.to(x.dtype), None)
        dx = steps.scale_rows(torch.mm(wide, taken[: wide.shape[1]]), factors, dloss, divisors, True).view(x.shape)
    if mask[2]:
        dbias = steps.scale(rows.sum(0, dtype=dloss.dtype), dloss, none, dtypes[2], False)
    return dx, dweight, dbias


def _by_classes(
    steps: LogitSteps,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    given: tuple,
    chunk_tokens: int,
    dtypes: Sequence[torch.dtype],
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by blocks of classes: weight's are final block by block, x's are summed in fp32."""
    labels, class_weight, lse, dloss, divisors, terms = given
    rows, (classes, hidden) = x.reshape(-1, x.shape[-1]), weight.shape
    cast, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    size = classes_per_block(rows.shape[0], classes, chunk_tokens)
    buffer = x.new_empty(rows.shape[0] * row_pitch(size, x.dtype, x.device))
    total = x.new_empty((rows.shape[0], hidden) if mask[0] else 0, dtype=lse.dtype)
    dweight = weight.new_empty(weight.shape)
    dbias = lse.new_empty(classes if mask[2] else 0)
    for first in range(0, classes, size):
        block = slice(first, min(first + size, classes))
        taken, taken_bias = padded(cast[block], None if bias is None else bias[block])
        wide = rows_in(buffer, rows.shape[0], block.stop - first)
        logits = _logits(rows, taken, taken_bias, wide, block.stop - first)
        steps.backward(logits, labels, class_weight, lse, dloss, divisors, terms, first, classes)
        if mask[0]:
            add_product(total, wide, taken, first=first == 0)
        add_product(dweight[block], logits.t(), rows, first=True)
        if mask[2]:
            dbias[block] = logits.sum(0, dtype=lse.dtype)
    del buffer, wide, logits
    return total.to(x.dtype).view(x.shape if mask[0] else 0), dweight, dbias.to(dtypes[2])


class Chunks:
    """Walks over slices of tokens; holds the logits of one at a time and the gradients that grow from them."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mask: tuple[bool, ...],
        weight_dtype: torch.dtype,
        acc: torch.dtype,
        chunk_tokens: int,
        accumulate_fp32: bool,
    ):
        self.x = x.reshape(-1, x.shape[-1])
        self.weight = weight.to(x.dtype)
        self.bias = None if bias is None else bias.to(x.dtype)
        self.padded = padded(self.weight, self.bias)
        self.mask, self.weight_dtype = mask, weight_dtype
        tokens, classes, hidden = self.x.shape[0], *weight.shape
        summed = mask[1] and accumulate_fp32 and weight.dtype.itemsize < acc.itemsize
        size = chunk_tokens or tokens_per_step(tokens, classes, hidden, x.element_size(), x.device, summed)
        self.size = max(1, min(size, tokens))
        self.dx = x.new_empty(x.shape if mask[0] else 0)
        # Where chunks are summed in fp32 beside a half-precision result, that one is not needed before the logits are
        # gone, so it takes their place.
        sums = acc if summed and self.size < tokens else weight_dtype
        self.sum = x.new_empty(weight.shape if mask[1] else 0, dtype=sums)
        self.dbias = x.new_zeros(classes if mask[2] else 0, dtype=acc)
        if tokens == 0:
            self.sum.zero_()
        self.buffer = x.new_empty(self.size * row_pitch(classes, x.dtype, x.device))

    def __iter__(self) -> Iterator[slice]:
        tokens = self.x.shape[0]
        return (slice(start, min(start + self.size, tokens)) for start in range(0, tokens, self.size))

    def logits(self, tokens: slice | Sequence[slice]) -> Tensor:
        """x · weightᵀ + bias of these tokens, in the buffer."""
        x, classes = self._features(tokens), self.weight.shape[0]
        return _logits(x, *self.padded, rows_in(self.buffer, x.shape[0], classes), classes)

    def add_gradients(self, tokens: slice | Sequence[slice], dlogits: Tensor) -> None:
        """Write dx of these tokens, add their share to the weight's and the bias's gradient."""
        first = tokens if isinstance(tokens, slice) else tokens[0]
        if self.mask[0]:
            parts = [tokens] if isinstance(tokens, slice) else tokens
            wide = whole_rows(dlogits)
            weight = self.padded[0][: wide.shape[1]]
            for part, rows in zip(parts, wide.split([t.stop - t.start for t in parts])):
                torch.mm(rows, weight, out=self.dx.view_as(self.x)[part])
        if self.mask[1]:
            add_product(self.sum, dlogits.t(), self._features(tokens), first=first.start == 0)
        if self.mask[2]:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def _features(self, tokens: slice | Sequence[slice]) -> Tensor:
        return self.x[tokens] if isinstance(tokens, slice) else torch.cat([self.x[part] for part in tokens])

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, dweight, dbias), each empty where it is not wanted; dbias still in the accumulation's dtype. The logits
        are gone."""
        del self.buffer
        return self.dx, self.sum.to(self.weight_dtype), self.dbias


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor, classes: int) -> Tensor:
    """x · weightᵀ + bias in `wide`; returns the first `classes` columns. Those behind them become 0: NaN in features of
    a token that does not count would go on from there into the product that makes dx."""
    if bias is None:
        torch.mm(x, weight.t(), out=wide)
    else:
        torch.addmm(bias, x, weight.t(), out=wide)
    if wide.shape[1] > classes:
        wide[:, classes:].zero_()
    return wide[:, :classes]


def add_product(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = a @ b, or out += a @ b, rounded once to out's dtype where the device's library can (16 bits to fp32)."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0 if first else 1, out=out)
    elif a.device.type == "cuda" and torch.version.hip is None and (a.dtype.itemsize, out.dtype) == (2, torch.float32):
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:  # the product of each slice is rounded to a's dtype before it is added
        step = max(1, added_elements(a.device) // max(1, b.shape[1]))
        for start in range(0, a.shape[0], step):
            rows = slice(start, start + step)
            product = torch.mm(a[rows], b)
            out[rows].copy_(product) if first else out[rows].add_(product)
