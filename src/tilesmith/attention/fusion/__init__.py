"""Fusion of whole transformer blocks, under the module path of `kernel_pytorch.attention.fusion`."""

from tilesmith._lazy import resolved

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


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolved(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
