"""What is done to chunks of logits, in Triton: the cross-entropy kernels on them, and the scaling of gradients."""

from functools import partial

from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.token_sums import reduced_loss, scaled, scaled_rows, token_divisors
from tilesmith.ops.loss.triton.cross_entropy import LossConfig, backward, forward, rows_of


def _chunk_forward(config, logits, target, class_weight, losses, lse, divisors, terms, grad) -> None:
    given = divisors if divisors.numel() else None
    forward(config, rows_of(logits), target, class_weight, losses, lse, given, terms, False, grad)


def _chunk_backward(config, logits, target, class_weight, lse, dloss, divisors, terms, first_class, classes) -> None:
    given = divisors if divisors.numel() else None
    backward(config, rows_of(logits), logits, target, class_weight, lse, dloss, given, terms, first_class, classes)


def steps(config: LossConfig) -> chunks.LogitSteps:
    """What is done to a chunk of logits, with this configuration."""
    return chunks.LogitSteps(
        partial(_chunk_forward, config), partial(_chunk_backward, config), token_divisors, reduced_loss, scaled,
        scaled_rows,
    )  # fmt: skip
