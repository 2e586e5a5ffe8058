# Written by: python -m tilesmith.validate.stubs

from tilesmith.models.fusion import FusionConfig as FusionConfig
from tilesmith.models.fusion import FusionStrategy as FusionStrategy
from tilesmith.models.fusion import OptimizationLevel as OptimizationLevel
from tilesmith.models.fusion import UnifiedAttentionFusion as UnifiedAttentionFusion
from tilesmith.models.fusion import create_unified_attention_fusion as create_unified_attention_fusion
from tilesmith.models.fusion_benchmark import FusionPerformanceStats as FusionPerformanceStats
from tilesmith.models.fusion_benchmark import benchmark_fusion_performance as benchmark_fusion_performance
