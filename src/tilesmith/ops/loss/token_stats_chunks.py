"""linear_token_stats by chunks of tokens: the products. What is done to logits is a backend's."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import row_values
from tilesmith.ops.loss.chunks import Chunking, Chunks, LogitSteps, gradient_dtypes, recomputed
from tilesmith.ops.loss.reference import Terms


class TokenSteps(NamedTuple):
    """What a backend does to one chunk of logits [C, V].

    read(logits, target, log_probs, entropy, lse, predicted, terms): fills the last four [C] and leaves the logits.
    turn(logits, target, entropy, lse, dlog_probs, dentropy, dlse, terms): overwrites the logits with their gradient,
    given those of the statistics [C].
    """

    read: Callable[..., None]
    turn: Callable[..., None]


def linear_token_stats(steps: TokenSteps, call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs."""
    x, weight, labels = call.x, call.weight, row_values(call.target)
    acc = torch.promote_types(x.dtype, torch.float32)
    found = [x.new_empty(labels.shape, dtype=dtype) for dtype in (acc, acc, acc, torch.int64)]
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
    labels, zero = row_values(call.target), call.lse.new_zeros(())
    given = [row_values(t) for t in (call.entropy, call.lse)]
    given += [
        zero.expand(labels.shape) if t is None else row_values(t) for t in (call.dlog_probs, call.dentropy, call.dlse)
    ]
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
