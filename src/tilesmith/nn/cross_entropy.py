"""Cross-entropy with what users watch beside it: its z term, predicted tokens, their accuracy, all of one pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilesmith import ops
from tilesmith.engine.argument_checks import attributed_to, choice, flag, number


class CrossEntropyOutput(NamedTuple):
    """loss: differentiable, fp32, with its z term. z_loss: that term alone, detached. token_accuracy: the share of
    counted tokens whose most likely class is the label, or for reduction "none" 1 and 0 by token, fp32.
    predicted_tokens: int64 [...], -1 where the label is ignored."""

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor


@attributed_to("token_stats")
def cross_entropy_output(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    token_scaling: bool = False,
) -> CrossEntropyOutput:
    """`ops.cross_entropy` of logits [..., V] and labels [...], its z term, accuracy and predictions, in one pass.

    reduction: "mean" over the counted tokens, "sum", or "none" for one of each by token. token_scaling: each token's
    cross-entropy and z term are multiplied by the probability of its label, which receives no gradient. The other
    arguments, and what raises: see `ops.cross_entropy`; it alone has label smoothing and class weights.
    """
    _check("cross_entropy_output", z_loss, reduction, token_scaling)
    stats = ops.token_stats(logits, target, ignore_index, scale, softcap)
    return _output(stats, target, ignore_index, z_loss, reduction, token_scaling)


@attributed_to("linear_token_stats")
def linear_cross_entropy_output(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    token_scaling: bool = False,
) -> CrossEntropyOutput:
    """`cross_entropy_output` of x · weightᵀ + bias, without storing all logits.

    x: [..., K]. weight: [V, K]. target: [...]. bias: [V]. A training step takes four products of the logits' size, one
    of them to recompute the logits; `ops.linear_cross_entropy` takes three.
    """
    _check("linear_cross_entropy_output", z_loss, reduction, token_scaling)
    stats = ops.linear_token_stats(x, weight, target, bias, ignore_index, scale, softcap)
    return _output(stats, target, ignore_index, z_loss, reduction, token_scaling)


def _check(of: str, z_loss: float, reduction: str, token_scaling: bool) -> None:
    number(of, "z_loss", z_loss, 0.0)
    choice(of, "reduction", reduction, ("mean", "sum", "none"))
    flag(of, "token_scaling", token_scaling)


def _output(
    stats: tuple[Tensor, ...], target: Tensor, ignore_index: int, z_loss: float, reduction: str, token_scaling: bool
) -> CrossEntropyOutput:
    log_probs, _, lse, predicted = stats
    losses = -log_probs
    lse = lse if z_loss else lse.detach()  # without a z term its gradient is not asked for
    squares = z_loss * lse * lse
    if token_scaling:
        shares = log_probs.detach().exp()  # 1 where the label is ignored, whose terms are 0
        losses, squares = losses * shares, squares * shares
    counted = target != ignore_index
    hits = (counted & (predicted == target)).to(losses.dtype)
    if reduction == "none":
        return CrossEntropyOutput(losses + squares, squares.detach(), hits, predicted)
    number_counted = counted.sum()
    loss, square = losses.sum(), squares.sum()
    if reduction == "mean":
        loss, square = loss / number_counted, square / number_counted
    return CrossEntropyOutput(loss + square, square.detach(), hits.sum() / number_counted, predicted)
