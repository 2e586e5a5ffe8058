# Written by: python -m tilesmith.validate.stubs

from tilesmith.models.fusion.benchmark import FusionPerformanceStats as FusionPerformanceStats
from tilesmith.models.fusion.benchmark import benchmark_fusion_performance as benchmark_fusion_performance
from tilesmith.models.fusion.strategies import FusionConfig as FusionConfig
from tilesmith.models.fusion.strategies import FusionStrategy as FusionStrategy
from tilesmith.models.fusion.strategies import OptimizationLevel as OptimizationLevel
from tilesmith.models.fusion.strategies import UnifiedAttentionFusion as UnifiedAttentionFusion
from tilesmith.models.fusion.strategies import create_unified_attention_fusion as create_unified_attention_fusion
