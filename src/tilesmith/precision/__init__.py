"""Training in 8-bit floating point, and weights packed in 2 to 8 bits: recipes, conversions, an engine for steps."""

from __future__ import annotations

from tilesmith._lazy import lazy_names

_HOMES = {
    "AllocationStrategy": "tilesmith.precision.adaptive.config",
    "FP8AttentionConfig": "tilesmith.precision.attention",
    "FP8Config": "tilesmith.precision.config",
    "FP8Format": "tilesmith.precision.config",
    "FP8LinearLayer": "tilesmith.precision.linear",
    "FP8TrainingEngine": "tilesmith.precision.engine",
    "PackedLinear": "tilesmith.precision.adaptive.layer",
    "PrecisionConfig": "tilesmith.precision.adaptive.config",
    "PrecisionFormat": "tilesmith.precision.adaptive.config",
    "PrecisionStats": "tilesmith.precision.adaptive.stats",
    "QuantizationMode": "tilesmith.precision.adaptive.config",
    "UltraPrecisionModule": "tilesmith.precision.adaptive.module",
    "analyze_precision_opportunities": "tilesmith.precision.adaptive.analysis",
    "convert_model_to_fp8": "tilesmith.precision.convert",
    "create_fp8_trainer": "tilesmith.precision.engine",
    "create_ultra_precision_module": "tilesmith.precision.adaptive.module",
    "load_ultra_precision_module": "tilesmith.precision.adaptive.checkpoint",
    "refresh_fp8": "tilesmith.precision.scaling",
    "revert_model_from_fp8": "tilesmith.precision.convert",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
