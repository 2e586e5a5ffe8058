"""Rotary position embedding of queries and keys."""

from tilesmith.ops.rotary.op import rope, rope_vjp

__all__ = ["rope", "rope_vjp"]
