"""Example inputs of the attention family, and what they must move and compute."""

from tilesmith.ops.attn.cases import attention, blocks, cache, counts, expand, merge, runs, scores

CASES = {
    **attention.CASES,
    **merge.CASES,
    **runs.CASES,
    **blocks.CASES,
    **scores.CASES,
    **cache.CASES,
    **expand.CASES,
}
bytes_moved = {
    **counts.bytes_moved,
    **blocks.bytes_moved,
    **runs.bytes_moved,
    **scores.bytes_moved,
    **cache.bytes_moved,
    **expand.bytes_moved,
}
flops = {**counts.flops, **blocks.flops, **scores.flops}
