"""Example inputs of the attention family, and what they must move and compute."""

from tilesmith.ops.attn.cases import attention, blocks, cache, scores

CASES = {**attention.CASES, **blocks.CASES, **scores.CASES, **cache.CASES}
bytes_moved = {**attention.bytes_moved, **blocks.bytes_moved, **scores.bytes_moved, **cache.bytes_moved}
flops = {**attention.flops, **blocks.flops, **scores.flops}
