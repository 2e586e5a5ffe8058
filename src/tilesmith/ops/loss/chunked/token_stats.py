"""token_stats and linear_token_stats in plain PyTorch, block by block, on any device."""

import torch
from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.loss import token_stats_chunks
from tilesmith.ops.loss.arguments import (
    linear_token_stats_arguments,
    linear_token_stats_vjp_arguments,
    token_stats_arguments,
    token_stats_vjp_arguments,
)
from tilesmith.ops.loss.chunked.cross_entropy import KEEPING_STEPS, blocks, finite_peak, scores
from tilesmith.ops.loss.reduction import check_labels
from tilesmith.ops.loss.reference import Terms, counted_labels


@register_kernel("token_stats", backend="chunked", rank=10)
@token_stats_arguments
def token_stats(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each block of rows is copied once and swept while it is in the cache."""
    check_labels(call.target, call.logits.shape[-1], call.ignore_index)
    return token_stats_chunks.token_stats(STEPS, call)


@register_kernel("token_stats_vjp", backend="chunked", rank=10)
@token_stats_vjp_arguments
def token_stats_vjp(call) -> Tensor:
    """A copy of the logits becomes their gradient, block by block."""
    return token_stats_chunks.token_stats_vjp(STEPS, call)


@register_kernel("linear_token_stats", backend="chunked", rank=10)
@linear_token_stats_arguments
def linear_token_stats(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunks of tokens, each block of their logits swept in the cache."""
    check_labels(call.target, call.weight.shape[0], call.ignore_index)
    return token_stats_chunks.linear_token_stats(STEPS, call)


@register_kernel("linear_token_stats_vjp", backend="chunked", rank=10)
@linear_token_stats_vjp_arguments
def linear_token_stats_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """The chunks again, their logits turned into gradients."""
    return token_stats_chunks.linear_token_stats_vjp(STEPS, KEEPING_STEPS, call)


def _read(
    logits: Tensor,
    target: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    lse: Tensor,
    predicted: Tensor,
    terms: Terms,
) -> None:
    for rows in blocks(logits):
        counted, valid, label = counted_labels(target[rows], logits.shape[1], terms.ignore_index)
        z, _ = scores(logits[rows].to(lse.dtype, copy=True), terms, False)
        peak, best = z.max(-1)
        peak = finite_peak(peak)
        z.sub_(peak[:, None])
        e = z.exp()
        sums = e.sum(-1)
        chosen = z.gather(-1, label[:, None])[:, 0] - sums.log()
        tilt = e.mul_(z.masked_fill_(z == float("-inf"), 0.0)).sum(-1)
        predicted[rows] = torch.where(counted, best, -1)
        log_probs[rows] = torch.where(counted, torch.where(valid, chosen, float("nan")), 0.0)
        lse[rows] = torch.where(counted, peak + sums.log(), 0.0)
        entropy[rows] = torch.where(counted, sums.log() - tilt / sums, 0.0)


def _turn(
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor,
    dlse: Tensor,
    terms: Terms,
    out: Tensor | None = None,
) -> None:
    for rows in blocks(logits):
        counted, valid, label = counted_labels(target[rows], logits.shape[1], terms.ignore_index)
        z, slope = scores(logits[rows].to(lse.dtype, copy=True), terms, True)
        dchosen, tilted, dtop = (g[rows].to(lse.dtype)[:, None] for g in (dlog_probs, dentropy, dlse))
        z.sub_(lse[rows][:, None])
        p = z.exp()
        z.add_(entropy[rows][:, None]).masked_fill_(p == 0, 0.0).mul_(-tilted).add_(dtop - dchosen).mul_(p)
        z.scatter_add_(-1, label[:, None], dchosen)
        if slope is not None:
            z.mul_(slope)
        z.mul_(torch.where(valid, lse.new_full((), terms.scale), float("nan"))[:, None])
        (logits if out is None else out)[rows] = z.masked_fill_(~counted[:, None], 0.0)


STEPS = token_stats_chunks.TokenSteps(_read, _turn)
