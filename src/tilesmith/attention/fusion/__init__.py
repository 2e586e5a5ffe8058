"""Fusion of whole transformer blocks, under the module path of `kernel_pytorch.attention.fusion`."""

from tilesmith._lazy import lazy_names

_HOMES = {
    "FusionConfig": "tilesmith.models.fusion",
    "FusionPerformanceStats": "tilesmith.models.fusion_benchmark",
    "FusionStrategy": "tilesmith.models.fusion",
    "OptimizationLevel": "tilesmith.models.fusion",
    "UnifiedAttentionFusion": "tilesmith.models.fusion",
    "benchmark_fusion_performance": "tilesmith.models.fusion_benchmark",
    "create_unified_attention_fusion": "tilesmith.models.fusion",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
