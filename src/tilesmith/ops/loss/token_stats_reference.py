"""What the statistics of predicted tokens and their gradients are, in plain PyTorch on whole logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.ops.loss import reference
from tilesmith.ops.loss.reduction import check_labels
from tilesmith.ops.loss.reference import Terms


def token_stats(
    logits: Tensor, target: Tensor, ignore_index: int = -100, scale: float = 1.0, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the label, entropy, log-sum-exp and most likely token of softmax(z), in one pass.

    z are the logits, scaled and capped as in `cross_entropy`; p = softmax(z), lse = log Σ exp(z):

        log_probs = z[target] − lse      entropy = −Σ p · log p      predicted = argmax z, the first of equal ones

    So −log_probs.mean() is the cross-entropy, (lse ** 2).mean() the z loss beside it, and predicted == target the
    accuracy of tokens: `tilesmith.nn.cross_entropy_output`.

    logits: [..., V], floating. target: [...], int64 or int32. scale, softcap, and what raises: see `cross_entropy`.

    Returns four tensors [...]: log_probs, entropy and lse, fp32 (fp64 for fp64 logits) and differentiable, and
    predicted, int64. Where the label is ignore_index they are 0, 0, 0 and -1. A class whose score is -inf adds nothing
    to the entropy.

    Source: the definitions; Chowdhery et al., PaLM, arXiv:2204.02311 (z loss).
    """
    check_labels(target, logits.shape[-1], ignore_index)
    return _stats(logits, target, Terms(ignore_index, 0.0, 0.0, scale, softcap))


def token_stats_vjp(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    output_mask: Sequence[bool],
) -> Tensor:
    """The gradient dlogits of `token_stats`, rounded once, to logits' dtype; contiguous.

    dlog_probs, dentropy, dlse: [...], each may be None (zeros). entropy, lse: [...], which the forward saved. The
    formula is that of `linear_token_stats_vjp`. An empty tensor where `output_mask` does not ask for it.
    """
    if not output_mask[0]:
        return logits.new_empty(0)
    terms = Terms(ignore_index, 0.0, 0.0, scale, softcap)
    grad = _logit_grads((dlog_probs, dentropy, dlse), logits, target, entropy, lse, terms)
    return grad.to(logits.dtype).contiguous()


def linear_token_stats(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the label, entropy, log-sum-exp and most likely token, without storing all logits.

    z are the scores of x · weightᵀ + bias, scaled and capped as in `cross_entropy`; p = softmax(z), lse = log Σ exp(z):

        log_probs = z[target] − lse      entropy = −Σ p · log p      predicted = argmax z, the first of equal ones

    So −log_probs.mean() is the cross-entropy, (lse ** 2).mean() the z loss beside it, and predicted == target the
    accuracy of tokens, all of one product of the logits. A gradient costs that product again and two more; where only
    log_probs has one, it is that of `linear_log_probs`. For the gradient of a cross-entropy alone
    `linear_cross_entropy` needs three products in place of four.

    x: [..., K]. weight: [V, K]. target: [...], int64 or int32. bias: [V]. Products, rounding and what raises: see
    `linear_cross_entropy`. chunk_tokens: tokens whose logits are in memory at a time; 0 lets the library choose.
    accumulate_fp32: whether weight's gradient is summed over chunks in fp32.

    Returns four tensors [...]: log_probs, entropy and lse, fp32 (fp64 for fp64 x) and differentiable, and predicted,
    int64. Where the label is ignore_index they are 0, 0, 0 and -1. A class whose score is -inf adds nothing to the
    entropy.

    Source: the definitions; Chowdhery et al., PaLM, arXiv:2204.02311 (z loss).
    """
    check_labels(target, weight.shape[0], ignore_index)
    return _stats(reference.linear_logits(x, weight, bias), target, Terms(ignore_index, 0.0, 0.0, scale, softcap))


def linear_token_stats_vjp(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_token_stats`, from logits that are computed again.

    dlog_probs, dentropy, dlse: [...], each may be None (zeros). entropy, lse: [...], which the forward saved. With p
    the probabilities, the gradient of the scores is

        p · (dlse − dlog_probs − dentropy · (log p + entropy)) + dlog_probs · [class is the label]

    Returns [..., K], [V, K] and [V], in the dtypes of x, weight and bias. An empty tensor stands for a gradient that
    `output_mask` does not ask for.
    """
    terms = Terms(ignore_index, 0.0, 0.0, scale, softcap)
    logits = reference.linear_logits(x, weight, bias)
    dlogits = _logit_grads((dlog_probs, dentropy, dlse), logits, target, entropy, lse, terms)
    dx, dweight, dbias = reference.linear_grads(dlogits, x, weight, output_mask)
    return dx.to(x.dtype), dweight.to(x.dtype).to(weight.dtype), dbias.to(weight.dtype if bias is None else bias.dtype)


def _stats(logits: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = reference.scores(logits, terms)
    losses, lse = reference.token_losses(logits, target, None, terms)
    counted = target != terms.ignore_index
    below = z - z.amax(-1, keepdim=True)  # entropies are small beside lse, whose rounding they should not have
    sums, tilt = below.exp().sum(-1), torch.where(z == float("-inf"), 0.0, below.exp() * below).sum(-1)
    entropy = torch.where(counted, sums.log() - tilt / sums, 0.0)
    return -losses, entropy.contiguous(), lse, torch.where(counted, z.argmax(-1), -1).contiguous()


def _logit_grads(
    given: Sequence[Tensor | None], logits: Tensor, target: Tensor, entropy: Tensor, lse: Tensor, terms: Terms
) -> Tensor:
    """The gradient of the logits, in fp32 or wider, given those of log_probs, entropy and lse."""
    z = reference.scores(logits, terms)
    counted, valid, label = reference.counted_labels(target, logits.shape[-1], terms.ignore_index)
    wide = (torch.zeros_like(lse) if g is None else g.to(lse.dtype) for g in given)
    dchosen, dentropy, dlse = (torch.where(counted, g, 0.0)[..., None] for g in wide)
    log_p = z - lse[..., None]
    p = log_p.exp()
    tilt = torch.where(p == 0, 0.0, log_p + entropy[..., None])  # as far away as masks go, its product would overflow
    grad = p * (dlse - dchosen - dentropy * tilt)
    grad = grad.scatter_add(-1, label[..., None], dchosen)
    if terms.softcap:
        grad = grad * (1 - (z / terms.softcap).square())
    grad = torch.where(valid[..., None], grad * terms.scale, float("nan"))
    return torch.where(counted[..., None], grad, 0.0)
