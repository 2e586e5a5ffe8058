"""linear_cross_entropy with the weight's classes spread over the ranks of a group; see `vocabulary`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.engine.memory import computed_in
from tilesmith.ops.gemm.products import add_weight_gradient, bias_gradient, product
from tilesmith.ops.loss.chunk_sizes import FEWEST_TOKENS, budget
from tilesmith.ops.loss.chunked import cross_entropy as chunked
from tilesmith.ops.loss.reduction import divisors_of, reduce_losses, token_grads, undivided_token_grads
from tilesmith.ops.loss.reference import Terms
from tilesmith.ops.loss.vocabulary import Part, logit_grads, refuse_double_backward, token_losses


class Call(NamedTuple):
    """What is no tensor. mask: wanted gradients of x, weight, bias."""

    terms: Terms
    reduction: str
    chunk_tokens: int
    accumulate_fp32: bool
    mask: tuple[bool, ...]
    part: Part


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    terms: Terms,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    part: Part,
) -> Tensor:
    """The loss, with its gradients, of a rank's rows of the weight; that of x is the rank's share. A label that is no
    class makes NaN: callers check labels on all ranks before."""
    x = x.to(computed_in(x))
    grads = torch.is_grad_enabled()
    mask = tuple(grads and t is not None and t.requires_grad for t in (x, weight, bias))
    call = Call(terms, reduction, chunk_tokens, accumulate_fp32, mask, part)
    return _LinearCrossEntropy.apply(x, weight, target, bias, class_weight, call)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, bias, class_weight, call):
        terms, part, labels = call.terms, call.part, target.reshape(-1)
        acc = torch.promote_types(x.dtype, torch.float32)
        divisors = divisors_of(labels, class_weight, terms.ignore_index, part.classes, acc, call.reduction)
        # for "none" only the backward knows the tokens' weights
        now = Gradients(x, weight, bias, call, (False,) * 3 if call.reduction == "none" else call.mask)
        losses, lses = [x.new_empty(0, dtype=acc)], [x.new_empty(0, dtype=acc)]
        for tokens in now.chunks():
            logits = now.logits(tokens)
            given = (labels[tokens], class_weight)
            some, lse = token_losses(logits, *given, terms, part)
            if any(now.mask):
                grads = undivided_token_grads(some, divisors)
                now.add(tokens, logit_grads(logits, *given, lse, *grads, terms, part))
            losses.append(some)
            lses.append(lse)
        losses, lse = torch.cat(losses).view(target.shape), torch.cat(lses).view(target.shape)
        ctx.save_for_backward(x, weight, target, bias, class_weight, lse, divisors, *now.sums())
        ctx.call = call
        return reduce_losses(losses, lse, divisors, terms.z_loss, call.reduction)

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward("vocab_parallel_linear_cross_entropy")
        x, weight, target, bias, class_weight, lse, divisors, *sums = ctx.saved_tensors
        call = ctx.call
        dtypes = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        if call.reduction == "none":
            again = Gradients(x, weight, bias, call, call.mask)
            labels, lse = target.reshape(-1), lse.reshape(-1)
            for tokens in again.chunks():
                token_grad, z_grad = token_grads(dloss.reshape(-1)[tokens], divisors, lse[tokens].shape, "none")
                given = (labels[tokens], class_weight, lse[tokens], token_grad, z_grad)
                again.add(tokens, logit_grads(again.logits(tokens), *given, call.terms, call.part))
            grads = [grad.to(dtype) for grad, dtype in zip(again.sums(), dtypes)]
        else:
            grads = [chunked.STEPS.scale(grad, dloss, divisors, dtype) for grad, dtype in zip(sums, dtypes)]
        dx, dweight, dbias = (grad if wanted else None for grad, wanted in zip(grads, call.mask))
        return dx, dweight, None, dbias, None, None


class Gradients:
    """Walks over chunks of tokens and holds the gradients that grow from those of their logits."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, mask: Sequence[bool]):
        self.x, self.weight, self.bias, self.mask = x.reshape(-1, x.shape[-1]), weight, bias, mask
        acc = torch.promote_types(x.dtype, torch.float32)
        wide = call.accumulate_fp32 or weight.dtype == torch.float16  # whose range undivided sums leave
        self.dx = torch.empty_like(self.x if mask[0] else self.x[:0])
        self.shape = x.shape if mask[0] else self.dx.shape
        self.dweight = weight.new_zeros(weight.shape if mask[1] else 0, dtype=acc if wide else x.dtype)
        self.dbias = weight.new_zeros(weight.shape[0] if mask[2] else 0, dtype=acc)
        row = call.part.most * x.element_size()  # each chunk is an exchange, so all ranks cut tokens alike
        pieces = -(-self.x.shape[0] // max(budget(x.device) // row, FEWEST_TOKENS)) or 1
        self.size = call.chunk_tokens or max(1, -(-self.x.shape[0] // pieces))

    def chunks(self) -> Iterator[slice]:
        """Slices of tokens."""
        tokens = self.x.shape[0]
        return (slice(start, min(start + self.size, tokens)) for start in range(0, tokens, self.size))

    def logits(self, tokens: slice) -> Tensor:
        """This rank's logits of some tokens."""
        return product(self.x[tokens], self.weight, self.bias)

    def add(self, tokens: slice, dlogits: Tensor) -> None:
        """Add what the gradient of these logits contributes."""
        if self.mask[0]:
            self.dx[tokens] = torch.mm(dlogits, self.weight.to(self.x.dtype))
        if self.mask[1]:
            add_weight_gradient(self.dweight, dlogits, self.x[tokens], first=False)
        if self.mask[2]:
            self.dbias += bias_gradient(dlogits, self.dbias.dtype)

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, dweight, dbias), empty where not wanted; the last two still in the dtype they are summed in."""
        return self.dx.view(self.shape), self.dweight, self.dbias
