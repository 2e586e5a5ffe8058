"""Fusion of whole transformer blocks, under the module path of `kernel_pytorch.attention.fusion`."""

from tilesmith._lazy import lazy_names

_HOMES = {
    "FusionConfig": "tilesmith.models.fusion.strategies",
    "FusionPerformanceStats": "tilesmith.models.fusion.benchmark",
    "FusionStrategy": "tilesmith.models.fusion.strategies",
    "OptimizationLevel": "tilesmith.models.fusion.strategies",
    "UnifiedAttentionFusion": "tilesmith.models.fusion.strategies",
    "benchmark_fusion_performance": "tilesmith.models.fusion.benchmark",
    "create_unified_attention_fusion": "tilesmith.models.fusion.strategies",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
