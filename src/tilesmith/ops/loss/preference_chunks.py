"""linear_preference by chunks of whole sequences: log-probabilities, formula, gradients while logits are at hand.

Why whole sequences: a token's gradient is its slope times (softmax − label), and the slope depends on its sequence, or
on the pair. With all of a pair's logits in memory the slope is known before they are forgotten, so that loss and
gradients take three products; any smaller chunk must compute the logits twice, a third more. The price is one more
sweep over the logits than cross-entropy's, against 6 · K operations an element, and a chunk no smaller than a pair.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tilesmith.device.rows import row_values
from tilesmith.ops.loss.chunks import Chunking, Chunks, GradientSource, LogitSteps, gradient_source, recomputed, scaled
from tilesmith.ops.loss.formulas import FORMULAS
from tilesmith.ops.loss.preference_reference import gradients_now, token_grads
from tilesmith.ops.loss.reference import Terms, saved_dtype


def sequences_per_chunk(units: int, tokens: int, classes: int, hidden: int) -> int:
    """How many units (sequences, or pairs of them) of `tokens` tokens each a chunk holds, if the caller does not say.

    As many as keep the logits within the size of the gradients, [V, K] and [N, K]; but one at least; chunks of equal
    size. So the forward holds no more than a backward that must not overwrite them, or the gradients and the logits of
    one unit.
    """
    most = max(1, (hidden + hidden * units * tokens // classes) // max(1, tokens))
    return max(1, -(-units // max(1, -(-units // most))))


def linear_preference(steps: LogitSteps, call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward op's outputs; where no gradient is wanted by the usual chunks of tokens, each read once."""
    x, weight, bias, target, formula, options = call.x, call.weight, call.bias, call.target, call.formula, call.options
    chunk_tokens, accumulate_fp32 = call.chunk_tokens, call.accumulate_fp32
    mask = gradients_now(call.grad_mask, call.recompute)
    walk = _Walk(steps, x, weight, target, bias, _terms(call))
    acc = walk.losses.dtype
    sequences, tokens = call.sequences.to(acc), None if call.tokens is None else call.tokens.to(acc)
    batch, length = target.shape
    if not any(mask):
        chunks = Chunks(x, weight, bias, mask, saved_dtype(weight), acc, chunk_tokens, accumulate_fp32)
        for part in chunks:
            walk.read(part, chunks.logits(part))
        loss, slopes = FORMULAS[formula].evaluate(-walk.losses.view(target.shape), sequences, tokens, options)
        return loss, *walk.log_probs(), slopes.contiguous(), *chunks.gradients()

    halves = 2 if FORMULAS[formula].paired else 1
    units, unit = batch // halves, length * halves
    size = max(1, chunk_tokens // max(1, unit))
    if not chunk_tokens:
        size = sequences_per_chunk(units, unit, *weight.shape)
    chunks = Chunks(x, weight, bias, mask, saved_dtype(weight), acc, max(1, size * unit), accumulate_fp32)
    loss, slopes = walk.losses.new_zeros(()), torch.empty_like(walk.losses).view(target.shape)
    for rows in _rows_of_chunks(units, size, halves):
        parts = [slice(r.start * length, r.stop * length) for r in rows]
        whole = parts[0] if len(parts) == 1 else parts
        logits = chunks.logits(whole)
        blocks = logits.split([part.stop - part.start for part in parts])
        for part, block in zip(parts, blocks):
            walk.read(part, block)
        losses, *beside = (_pick(t, rows) for t in (walk.losses.view(1, batch, length), sequences, tokens))
        total, slope = FORMULAS[formula].evaluate(-losses[0], *beside, options)
        loss += total
        for part, block, r, s in zip(parts, blocks, rows, slope.chunk(len(rows))):
            slopes[r] = s
            walk.turn(part, block, -slopes.view(-1)[part])
        chunks.add_gradients(whole, logits)
        del logits, blocks, block
    return loss, *walk.log_probs(), slopes, *chunks.gradients()


def linear_preference_vjp(steps: LogitSteps, call) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's; where they do not serve, those of the tokens' cross-entropies."""
    x, weight, bias, none = call.x, call.weight, call.bias, call.lse.new_empty(0)
    if gradient_source(call) is GradientSource.SAVED:
        return scaled(partial(steps.scale, divisors=none), call)
    return recomputed(
        steps, token_grads(call.dloss, call.dlog_probs, call.token_grad), x, weight, call.target, bias, None, call.lse,
        none, _terms(call), "none", Chunking(call.chunk_tokens, call.accumulate_fp32, ""), call.output_mask,
    )  # fmt: skip


def _terms(call) -> Terms:
    return Terms(call.ignore_index, 0.0, 0.0, call.scale, call.softcap)


class _Walk:
    """Cross-entropies and lse of all tokens, filled from blocks of logits, and those blocks' gradients in place."""

    def __init__(self, steps: LogitSteps, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, terms: Terms):
        self.steps, self.terms, self.shape, self.labels = steps, terms, target.shape, row_values(target)
        self.losses = x.new_empty(self.labels.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        self.lse = torch.empty_like(self.losses)
        self.none = self.losses.new_empty(0)

    def read(self, part: slice, logits: Tensor) -> None:
        """Losses and lse of these tokens, from logits that stay."""
        self.steps.forward(
            logits, self.labels[part], None, self.losses[part], self.lse[part], self.none, self.terms, ""
        )

    def turn(self, part: slice, logits: Tensor, grads: Tensor) -> None:
        """Logits become their gradient, from the gradients of the tokens' cross-entropies."""
        given = (self.labels[part], None, self.lse[part], grads, self.none, self.terms)
        self.steps.backward(logits, *given, 0, logits.shape[1])

    def log_probs(self) -> tuple[Tensor, Tensor]:
        return self.losses.neg_().view(self.shape), self.lse.view(self.shape)


def _pick(values: Tensor | None, rows: Sequence[slice]) -> Tensor | None:
    """The values [rows, B] or [rows, B, T] of these sequences."""
    return None if values is None else torch.cat([values[:, r] for r in rows], 1)


def _rows_of_chunks(units: int, size: int, halves: int) -> Iterator[list[slice]]:
    """For each chunk the rows of its sequences: of the first, and for pairs as many of the second half."""
    if 0 < units <= size:
        yield [slice(0, halves * units)]
        return
    for start in range(0, units, size):
        stop = min(start + size, units)
        yield [slice(start + h * units, stop + h * units) for h in range(halves)]
