"""Example inputs of the loss family, and what they must move and compute."""

from tilesmith.ops.loss.cases import cross_entropy, distill, preference, token_stats

CASES = {**cross_entropy.CASES, **preference.CASES, **distill.CASES, **token_stats.CASES}
bytes_moved = {**cross_entropy.bytes_moved, **preference.bytes_moved, **distill.bytes_moved, **token_stats.bytes_moved}
flops = {**cross_entropy.flops, **preference.flops, **distill.flops, **token_stats.flops}
