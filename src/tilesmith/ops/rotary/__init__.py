"""Rotary position embedding of queries and keys, alone or after their norm."""

from tilesmith.ops.rotary.norm_op import rms_norm_rope, rms_norm_rope_vjp
from tilesmith.ops.rotary.op import rope, rope_vjp

__all__ = ["rms_norm_rope", "rms_norm_rope_vjp", "rope", "rope_vjp"]
