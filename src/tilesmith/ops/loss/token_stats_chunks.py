"""token_stats, and linear_token_stats by chunks of tokens with its products. What is done to logits is a backend's."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import row_values, rows
from tilesmith.ops.loss.chunks import Chunking, Chunks, LogitSteps, gradient_dtypes, recomputed
from tilesmith.ops.loss.reference import Terms


class TokenSteps(NamedTuple):
    """What a backend does to one chunk of logits [C, V].

    read(logits, target, log_probs, entropy, lse, predicted, terms): fills the last four [C] and leaves the logits.
    turn(logits, target, entropy, lse, dlog_probs, dentropy, dlse, terms, out=None): writes the gradient of the logits,
    given those of the statistics [C], over them, or into `out`.
    """

    read: Callable[..., None]
    turn: Callable[..., None]


def token_stats(steps: TokenSteps, call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs, of logits that are there."""
    labels, found = _room(call.logits, call.target)
    steps.read(rows(call.logits), labels, *found, _terms(call))
    log_probs, entropy, lse, predicted = (t.view(call.target.shape) for t in found)
    return log_probs, entropy, lse, predicted


def token_stats_vjp(steps: TokenSteps, call) -> Tensor:
    """The gradient of the logits."""
    logits = call.logits
    if not call.output_mask[0]:
        return logits.new_empty(0)
    out = logits.new_empty(logits.shape)
    labels, given = _given(call)
    steps.turn(rows(logits), labels, *given, _terms(call), rows(out))
    return out


def _room(x: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The labels [N], and empty tensors for their statistics."""
    labels, acc = row_values(target), torch.promote_types(x.dtype, torch.float32)
    return labels, [x.new_empty(labels.shape, dtype=dtype) for dtype in (acc, acc, acc, torch.int64)]


def _given(call) -> tuple[Tensor, list[Tensor]]:
    """The labels [N], what the forward saved of them, and the gradients of their statistics."""
    labels, zero = row_values(call.target), call.lse.new_zeros(())
    given = [row_values(t) for t in (call.entropy, call.lse)]
    given += [
        zero.expand(labels.shape) if t is None else row_values(t) for t in (call.dlog_probs, call.dentropy, call.dlse)
    ]
    return labels, given


def linear_token_stats(steps: TokenSteps, call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs."""
    x, weight = call.x, call.weight
    labels, found = _room(x, call.target)
    acc = found[0].dtype
    none = (False, False, False)
    chunks = Chunks(x, weight, call.bias, none, weight.dtype, acc, call.chunk_tokens, call.accumulate_fp32)
    for part in chunks:
        steps.read(chunks.logits(part), labels[part], *(t[part] for t in found), _terms(call))
    log_probs, entropy, lse, predicted = (t.view(call.target.shape) for t in found)
    return log_probs, entropy, lse, predicted


def linear_token_stats_vjp(steps: TokenSteps, loss: LogitSteps, call) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op's outputs. loss: what is done for the gradient of log-probabilities alone, which are the tokens'
    cross-entropies, negative."""
    x, weight, bias, mask = call.x, call.weight, call.bias, tuple(call.output_mask)
    if call.dentropy is None and call.dlse is None:
        chunking = Chunking(call.chunk_tokens, call.accumulate_fp32, "")
        return recomputed(
            loss, -call.dlog_probs, x, weight, call.target, bias, None, call.lse, call.lse.new_empty(0), _terms(call),
            "none", chunking, mask,
        )  # fmt: skip
    labels, given = _given(call)
    chunks = Chunks(x, weight, bias, mask, weight.dtype, call.lse.dtype, call.chunk_tokens, call.accumulate_fp32)
    for part in chunks:
        logits = chunks.logits(part)
        steps.turn(logits, labels[part], *(t[part] for t in given), _terms(call))
        chunks.add_gradients(part, logits)
        del logits
    dx, dweight, dbias = chunks.gradients()
    return dx, dweight, dbias.to(gradient_dtypes(x, weight, bias)[2])


def _terms(call) -> Terms:
    return Terms(call.ignore_index, 0.0, 0.0, call.scale, call.softcap)
