"""Variants of attention over the one attention op: configuration and factory, block-sparse layers, layers over ranks.

Legend: B batch rows, T query tokens, S key tokens, H query heads, G kv heads, D head dim, R blocks of queries, C blocks
of keys.
"""

import sys

from tilesmith._lazy import lazy_names, refuse_calls

_HOMES = {
    "AttentionConfig": "tilesmith.attention.config",
    "AttentionPatterns": "tilesmith.attention.config",
    "BlockIndexer": "tilesmith.attention.indexer",
    "ContextParallelAttention": "tilesmith.attention.context_parallel",
    "DynamicSparseAttention": "tilesmith.attention.sparse",
    "FP8AttentionConfig": "tilesmith.precision.attention",
    "FusionConfig": "tilesmith.models.fusion.strategies",
    "FusionPerformanceStats": "tilesmith.models.fusion.benchmark",
    "FusionStrategy": "tilesmith.models.fusion.strategies",
    "FlashAttention3": "tilesmith.attention.layers",
    "OptimizationLevel": "tilesmith.models.fusion.strategies",
    "RingAttentionLayer": "tilesmith.attention.ring",
    "SparsePattern": "tilesmith.attention.patterns",
    "SparsityReport": "tilesmith.attention.report",
    "UnifiedAttentionFusion": "tilesmith.models.fusion.strategies",
    "benchmark_fusion_performance": "tilesmith.models.fusion.benchmark",
    "create_attention": "tilesmith.attention.factory",
    "create_context_parallel_attention": "tilesmith.attention.context_parallel",
    "create_ring_attention": "tilesmith.attention.ring",
    "create_sparse_attention": "tilesmith.attention.sparse",
    "create_unified_attention_fusion": "tilesmith.models.fusion.strategies",
    "estimated_shares": "tilesmith.attention.estimate",
    "from_block_mask": "tilesmith.attention.flex",
    "pattern_blocks": "tilesmith.attention.patterns",
    "selected_block_attention": "tilesmith.attention.selected",
    "to_block_mask": "tilesmith.attention.flex",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
refuse_calls(sys.modules[__name__], "tilesmith.ops.attention(q, k, v)")
