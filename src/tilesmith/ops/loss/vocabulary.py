"""Cross-entropies whose classes are spread over the ranks of a group: each rank reads only its own part.

Two all-reduces of one to three numbers a token make the losses; the gradient of the logits needs none, that of the
hidden states is a sum over ranks. Everything that is as long as the vocabulary is done by `ops.cross_entropy` and its
gradient on a rank's own classes. Source of the scheme: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine.choice import pinned
from tilesmith.engine.torch_private import all_reduce
from tilesmith.ops.loss.reduction import divisors_of, reduce_losses, token_grads
from tilesmith.ops.loss.reference import Terms

ELEMENTS = 2**24  # swept at a time where no kernel fuses what is left to do


class Part(NamedTuple):
    """The classes of this rank begin at `start`; there are `classes` in all, of which a rank holds `most` at most;
    group: the ranks that hold them."""

    group: Any
    start: int
    classes: int
    most: int


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, terms: Terms, reduction: str, part: Part
) -> Tensor:
    """The loss, with its gradient, of a rank's slice of the logits. A label that is no class makes NaN: callers check
    labels on all ranks before."""
    return _CrossEntropy.apply(logits, target, weight, terms, reduction, part)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight, terms, reduction, part):
        losses, lse = token_losses(logits, target, weight, terms, part)
        divisors = divisors_of(target, weight, terms.ignore_index, part.classes, lse.dtype, reduction)
        ctx.save_for_backward(logits, target, weight, lse, divisors)
        ctx.call = terms, reduction, part
        return reduce_losses(losses, lse, divisors, terms.z_loss, reduction)

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward("vocab_parallel_cross_entropy")
        logits, target, weight, lse, divisors = ctx.saved_tensors
        terms, reduction, part = ctx.call
        token_grad, z_grad = token_grads(dloss, divisors, target.shape, reduction)
        dlogits = logit_grads(logits, target, weight, lse, token_grad, z_grad, terms, part)
        return dlogits, None, None, None, None, None


def token_losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, terms: Terms, part: Part
) -> tuple[Tensor, Tensor]:
    """As `reference.token_losses`: each token's cross-entropy without its z term, and lse; 0 where ignored."""
    smoothed, own = terms.label_smoothing > 0, _own(weight, logits, part)
    counted, valid, inside, at = _labels(target, terms, part, logits.shape[-1])
    if logits.shape[-1] == 0:  # more ranks than classes, or nearly: this one adds nothing, but exchanges as all do
        acc = torch.promote_types(logits.dtype, torch.float32)
        top = exchange(torch.full(target.shape, float("-inf"), dtype=acc, device=logits.device), "max", part)
        sums = top.new_zeros(3 if smoothed else 2, *target.shape)
    else:
        # over this rank's classes: lse and, if smoothed, the mean of w · (lse − z); the label is of no account
        misses, part_lse, _ = ops.cross_entropy.handle(
            logits, counted.long() - 1, own if smoothed else None, -1, 1.0 if smoothed else 0.0, 0.0, terms.scale,
            terms.softcap, "none", pin=pinned("cross_entropy"),
        )  # fmt: skip
        chosen = _scores(logits.gather(-1, at[..., None])[..., 0], terms, part_lse.dtype)
        top = exchange(part_lse, "max", part)
        sums = [(part_lse - top).exp(), torch.where(inside, chosen, 0.0)]
        if smoothed:
            own_weights = logits.shape[-1] if own is None else own.to(top.dtype).sum()
            sums.append(logits.shape[-1] * misses + own_weights * (top - part_lse))
        sums = torch.stack(sums)
    total, chosen, *every = exchange(sums, "sum", part)
    lse = top + total.log()
    losses = lse - chosen
    if weight is not None:
        losses = losses * weight.to(lse.dtype)[target.clamp(0, part.classes - 1).long()]
    if smoothed:
        all_weights = part.classes if weight is None else weight.to(lse.dtype).sum()
        spread = (every[0] + all_weights * total.log()) / part.classes
        losses = (1 - terms.label_smoothing) * losses + terms.label_smoothing * spread
    losses = torch.where(valid, losses, float("nan"))
    return torch.where(counted, losses, 0.0), torch.where(counted, lse, 0.0)


def logit_grads(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    token_grad: Tensor,
    z_grad: Tensor,
    terms: Terms,
    part: Part,
) -> Tensor:
    """As `reference.logit_grads`, for this rank's classes, in logits' dtype.

    The gradient is A · p − e · w − (at the label) h, with A, e, h of a token. The kernel for a whole vocabulary makes
    A · p − e from a token's gradient and smoothing, but would take its own label's h off; so one column, the label's or
    where another rank has that the first, is computed here.
    """
    smoothing, width, dtype = terms.label_smoothing, logits.shape[-1], lse.dtype
    if width == 0:
        return torch.empty_like(logits)
    own = _own(weight, logits, part)
    counted, valid, inside, at = _labels(target, terms, part, width)
    token_grad = torch.where(counted, torch.where(valid, token_grad, float("nan")), 0.0).to(dtype)
    hit, all_weights = token_grad * (1 - smoothing), part.classes
    if weight is not None:
        hit = hit * weight.to(dtype)[target.clamp(0, part.classes - 1).long()]
        all_weights = weight.to(dtype).sum()
    every = token_grad * (smoothing / part.classes)
    pull = hit + every * all_weights + torch.where(counted, 2 * terms.z_loss * lse * z_grad, 0.0)
    at_once = smoothing > 0 and weight is None  # then A is token_grad · (1 + 2 · z_loss · lse), as the kernel makes it
    call = (token_grad, smoothing * width / part.classes, terms.z_loss) if at_once else (pull, 0.0, 0.0)
    dlogits = ops.cross_entropy_vjp.handle(
        call[0].contiguous(), logits, torch.where(counted, at, -1), None, lse, lse.new_empty(0), -1, call[1], call[2],
        terms.scale, terms.softcap, "none", [True], pin=pinned("cross_entropy_vjp"),
    )  # fmt: skip
    if smoothing > 0 and own is not None:
        _subtract_spread(dlogits, logits, every, own.to(dtype), terms)
    column = logits.gather(-1, at[..., None])[..., 0]
    z = _scores(column, terms, dtype)
    value = (z - lse).exp() * pull - torch.where(inside, hit, 0.0)
    value = value - (every if own is None else every * own.to(dtype)[at])
    value = torch.where(counted, value * _slopes(z, terms), 0.0)
    return dlogits.scatter_(-1, at[..., None], value.to(dlogits.dtype)[..., None])


def _subtract_spread(dlogits: Tensor, logits: Tensor, every: Tensor, own: Tensor, terms: Terms) -> None:
    """dlogits -= e · w, which no kernel does where classes have weights."""
    grads, rows, every = (t.reshape(-1, t.shape[-1]) for t in (dlogits, logits, every[..., None]))
    step = max(1, ELEMENTS // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        some = slice(start, start + step)
        slopes = _slopes(_scores(rows[some], terms, own.dtype), terms)
        grads[some] -= torch.where(every[some] == 0, 0.0, every[some] * own * slopes).to(grads.dtype)


def _own(weight: Tensor | None, logits: Tensor, part: Part) -> Tensor | None:
    return None if weight is None else weight[part.start : part.start + logits.shape[-1]]


def _labels(target: Tensor, terms: Terms, part: Part, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether a token counts, whether its label is a class, whether it is one of this rank, and where it is there."""
    at = target.long() - part.start
    inside = (at >= 0) & (at < width)
    counted = target != terms.ignore_index
    return counted, (target >= 0) & (target < part.classes), inside & counted, torch.where(inside, at, 0)


def _scores(logits: Tensor, terms: Terms, dtype: torch.dtype) -> Tensor:
    z = logits.to(dtype) * terms.scale
    return terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z


def _slopes(z: Tensor, terms: Terms) -> Tensor | float:
    """The derivative of the scores z by the logits."""
    return terms.scale * (1 - (z / terms.softcap).square()) if terms.softcap else terms.scale


def exchange(values: Tensor, how: str, part: Part) -> Tensor:
    """The "max" or "sum" over the ranks of a part's group."""
    return all_reduce(values.contiguous(), how, part.group)


def refuse_double_backward(name: str) -> None:
    """Raise in a backward that will itself be differentiated."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(f"{name}: only its first derivative is known; call backward without create_graph")
