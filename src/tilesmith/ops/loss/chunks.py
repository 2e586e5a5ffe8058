"""linear_cross_entropy by chunks of tokens: products, accumulation, memory. What is done to logits is a backend's."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.ops.loss.reduction import divisors_of, reduce_losses
from tilesmith.ops.loss.reference import Terms, already_computed, gradients_now, saved_dtype

ACCELERATOR_BUDGET = 512 * 2**20
CPU_BUDGET = 16 * 2**20  # the logits of a chunk are swept several times, so they should stay in the cache
FEWEST_TOKENS = 256  # thinner products are bound by reading weight


class LogitSteps(NamedTuple):
    """What a backend does to one chunk of logits [C, V].

    forward(logits, target, class_weight, losses, lse, divisors, terms, grad): writes each token's cross-entropy
    (without its z term) and lse into `losses` and `lse` [C], and with `grad` the gradient of their undivided sum over
    `logits`.
    backward(logits, target, class_weight, lse, dloss, divisors, terms): overwrites `logits` with the gradient, given
    the loss's gradient `dloss` [C] (a stride of 0 is usual) and the divisors (empty: 1).
    scale(grad, dloss, divisors, dtype): grad · `loss_factor`, as a new tensor of `dtype`.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Terms, bool], None]
    backward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Terms], None]
    scale: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


def tokens_per_chunk(tokens: int, classes: int, hidden: int, itemsize: int, on_cpu: bool, accumulator: int = 0) -> int:
    """How many tokens' logits are in memory at a time, where the caller does not say.

    All of them if they take no more than a budget (512 MiB; 16 MiB on a CPU) or than `accumulator`, the bytes of the
    fp32 weight gradient that more than one chunk would need beside the result: then one chunk is no larger and
    faster. Else equal chunks of at most the budget, or 256 tokens if that is more; with an accumulator also `hidden`
    tokens, whose logits fit in the result's own memory, which is not written before the end.
    """
    row = max(1, classes * itemsize)
    budget = CPU_BUDGET if on_cpu else ACCELERATOR_BUDGET
    if tokens * row <= max(budget, accumulator):
        return max(1, tokens)
    most = max(budget // row, FEWEST_TOKENS, hidden if accumulator else 0)
    if most >= tokens:
        return tokens
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    rounded = -(-even // 128) * 128
    return rounded if rounded <= most else even


def linear_cross_entropy(
    steps: LogitSteps,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    terms: Terms,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    grad_mask: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs."""
    acc = torch.promote_types(x.dtype, torch.float32)
    mask = gradients_now(grad_mask, reduction)
    saved = saved_dtype(weight)
    chunks = Chunks(x, weight, bias, mask, saved, acc, chunk_tokens, accumulate_fp32)
    labels = target.reshape(-1)
    losses = x.new_empty(labels.shape, dtype=acc)
    lse = torch.empty_like(losses)
    divisors = divisors_of(target, class_weight, terms.ignore_index, weight.shape[0], acc, reduction)
    for tokens in chunks:
        logits = chunks.logits(tokens)
        steps.forward(
            logits, labels[tokens], class_weight, losses[tokens], lse[tokens], divisors, terms, any(mask)
        )  # fmt: skip
        chunks.add_gradients(tokens, logits)
    losses, lse = losses.view(target.shape), lse.view(target.shape)
    return reduce_losses(losses, lse, divisors, terms.z_loss, reduction), lse, divisors, *chunks.gradients()


def linear_cross_entropy_vjp(
    steps: LogitSteps,
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    saved: Sequence[Tensor],
    terms: Terms,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op's outputs: the saved gradients times the loss's, or new ones from the logits computed again."""
    dtypes = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    if already_computed(x, weight, bias, saved, output_mask):
        dx, dweight, dbias = (
            steps.scale(grad, dloss, divisors, dtype) if wanted else grad.new_empty(0, dtype=dtype)
            for grad, dtype, wanted in zip(saved, dtypes, output_mask)
        )
        return dx, dweight, dbias
    chunks = Chunks(x, weight, bias, tuple(output_mask), weight.dtype, lse.dtype, chunk_tokens, accumulate_fp32)
    labels, lse = target.reshape(-1), lse.reshape(-1)
    dloss = dloss.reshape(-1) if reduction == "none" else dloss.expand(labels.shape)
    for tokens in chunks:
        logits = chunks.logits(tokens)
        steps.backward(logits, labels[tokens], class_weight, lse[tokens], dloss[tokens], divisors, terms)
        chunks.add_gradients(tokens, logits)
    dx, dweight, dbias = chunks.gradients()
    return dx, dweight, dbias.to(dtypes[2])


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
        self.mask = mask
        tokens, classes, hidden = self.x.shape[0], *weight.shape
        beside = accumulate_fp32 and mask[1] and weight_dtype.itemsize < acc.itemsize
        self.size = chunk_tokens or tokens_per_chunk(
            tokens, classes, hidden, x.element_size(), x.device.type == "cpu", classes * hidden * acc.itemsize * beside
        )
        self.size = max(1, min(self.size, tokens))
        self.dx = x.new_empty(x.shape if mask[0] else 0)
        self.dweight = x.new_empty(weight.shape if mask[1] else 0, dtype=weight_dtype)
        self.dbias = x.new_zeros(classes if mask[2] else 0, dtype=acc)
        self.sum = self.dweight
        if beside and self.size < tokens:
            self.sum = torch.empty_like(self.dweight, dtype=acc)
        if tokens == 0:
            self.dweight.zero_()
        self.buffer = self._room(self.size * classes)

    def _room(self, elements: int) -> Tensor:
        """Memory for the logits: the result's own while gradients are summed elsewhere, if it is large enough."""
        free = self.sum is not self.dweight and self.dweight.dtype == self.x.dtype
        if free and self.dweight.numel() >= elements:
            return self.dweight.view(-1)
        return self.x.new_empty(elements)

    def __iter__(self):
        tokens = self.x.shape[0]
        return (slice(start, min(start + self.size, tokens)) for start in range(0, tokens, self.size))

    def logits(self, tokens: slice | Sequence[slice]) -> Tensor:
        """x · weightᵀ + bias of these tokens, in the buffer."""
        x, classes = self._features(tokens), self.weight.shape[0]
        out = self.buffer[: x.shape[0] * classes].view(x.shape[0], classes)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_gradients(self, tokens: slice | Sequence[slice], dlogits: Tensor) -> None:
        """Write dx of these tokens, add their share to the weight's and the bias's gradient."""
        first = tokens if isinstance(tokens, slice) else tokens[0]
        if self.mask[0] and isinstance(tokens, slice):
            torch.mm(dlogits, self.weight, out=self.dx.view_as(self.x)[tokens])
        elif self.mask[0]:
            dx = torch.mm(dlogits, self.weight)
            for part, rows in zip(tokens, dx.split([t.stop - t.start for t in tokens])):
                self.dx.view_as(self.x)[part] = rows
        if self.mask[1]:
            _add_product(self.sum, dlogits.t(), self._features(tokens), first=first.start == 0)
        if self.mask[2]:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def _features(self, tokens: slice | Sequence[slice]) -> Tensor:
        return self.x[tokens] if isinstance(tokens, slice) else torch.cat([self.x[part] for part in tokens])

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, dweight, dbias), each empty where it is not wanted; dbias still in the accumulation's dtype."""
        if self.sum is not self.dweight:
            self.dweight.copy_(self.sum)
        return self.dx, self.dweight, self.dbias


def _add_product(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = a @ b, or out += a @ b, rounded once to out's dtype where the device's library can."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0 if first else 1, out=out)
    elif a.device.type == "cuda" and torch.version.hip is None and out.dtype == torch.float32:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:  # the product of each slice is rounded to a's dtype before it is added
        step = max(1, 2**22 // max(1, b.shape[1]))
        for start in range(0, a.shape[0], step):
            rows = slice(start, start + step)
            product = torch.mm(a[rows], b)
            out[rows].copy_(product) if first else out[rows].add_(product)
