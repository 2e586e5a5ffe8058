"""Activations and gated activations."""

from tilesmith.ops.gate.op import geglu, geglu_vjp, gelu, gelu_vjp, silu, silu_vjp, swiglu, swiglu_vjp

__all__ = ["geglu", "geglu_vjp", "gelu", "gelu_vjp", "silu", "silu_vjp", "swiglu", "swiglu_vjp"]
