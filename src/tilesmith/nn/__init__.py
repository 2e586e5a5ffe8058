"""Layers and a decoder: parameters and forward passes over `tilesmith.ops`. No kernels and no dispatch live here.

Legend: B batch rows, T tokens of a row, C hidden size, H query heads, G key/value heads, D head dim, R <= D rotated
features of a head, S slots of a cache.
"""

from tilesmith.nn.activation import FusedGELU
from tilesmith.nn.attention import Attention
from tilesmith.nn.cache import KVCache
from tilesmith.nn.config import KernelConfig
from tilesmith.nn.cross_entropy import CrossEntropyOutput, cross_entropy_output, linear_cross_entropy_output
from tilesmith.nn.decoder import Decoder, DecoderBlock, DecoderConfig
from tilesmith.nn.distillation import (
    JSD,
    FusedLinearDistillationLoss,
    FusedLinearJSD,
    FusedLinearJSDLoss,
    FusedLinearKLDivLoss,
    KLDivLoss,
    TVDLoss,
    distillation_loss,
)
from tilesmith.nn.experts import Experts, MixtureOfExperts, Router
from tilesmith.nn.fused_preference import (
    FusedLinearCPOLoss,
    FusedLinearDPOLoss,
    FusedLinearGRPOLoss,
    FusedLinearKTOLoss,
    FusedLinearORPOLoss,
    FusedLinearSimPOLoss,
)
from tilesmith.nn.generation import generate
from tilesmith.nn.linear import OptimizedLinear
from tilesmith.nn.mlp import GatedMLP
from tilesmith.nn.multihead import AttentionLayer
from tilesmith.nn.norm import LayerNorm, RMSNorm
from tilesmith.nn.policy import grpo_loss
from tilesmith.nn.preference import kto_loss, preference_loss, sequence_log_probs
from tilesmith.nn.rotary import Llama3Scaling, RotaryEmbedding

__all__ = [
    "JSD",
    "Attention",
    "AttentionLayer",
    "CrossEntropyOutput",
    "Decoder",
    "DecoderBlock",
    "DecoderConfig",
    "Experts",
    "FusedGELU",
    "FusedLinearCPOLoss",
    "FusedLinearDPOLoss",
    "FusedLinearDistillationLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearJSD",
    "FusedLinearJSDLoss",
    "FusedLinearKLDivLoss",
    "FusedLinearKTOLoss",
    "FusedLinearORPOLoss",
    "FusedLinearSimPOLoss",
    "GatedMLP",
    "KLDivLoss",
    "KVCache",
    "KernelConfig",
    "LayerNorm",
    "Llama3Scaling",
    "MixtureOfExperts",
    "OptimizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "Router",
    "TVDLoss",
    "cross_entropy_output",
    "distillation_loss",
    "generate",
    "grpo_loss",
    "kto_loss",
    "linear_cross_entropy_output",
    "preference_loss",
    "sequence_log_probs",
]
