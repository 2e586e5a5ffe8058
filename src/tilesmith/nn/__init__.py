"""Layers and a decoder: parameters and forward passes over `tilesmith.ops`. No kernels and no dispatch live here.

Legend: B batch rows, T tokens of a row, C hidden size, H query heads, G key/value heads, D head dim, R <= D rotated
features of a head, S slots of a cache.
"""

from tilesmith.nn.attention import Attention
from tilesmith.nn.cache import KVCache
from tilesmith.nn.decoder import Decoder, DecoderBlock, DecoderConfig
from tilesmith.nn.generation import generate
from tilesmith.nn.mlp import GatedMLP
from tilesmith.nn.norm import LayerNorm, RMSNorm
from tilesmith.nn.rotary import Llama3Scaling, RotaryEmbedding

__all__ = [
    "Attention",
    "Decoder",
    "DecoderBlock",
    "DecoderConfig",
    "GatedMLP",
    "KVCache",
    "LayerNorm",
    "Llama3Scaling",
    "RMSNorm",
    "RotaryEmbedding",
    "generate",
]
