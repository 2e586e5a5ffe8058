"""Activations, gated activations, and activations of a sum or with a bias."""

from tilesmith.ops.elementwise.op import (
    add_relu,
    add_relu_vjp,
    bias_gelu,
    bias_gelu_vjp,
    geglu,
    geglu_vjp,
    gelu,
    gelu_vjp,
    relu_squared,
    relu_squared_vjp,
    sigmoid,
    sigmoid_vjp,
    silu,
    silu_vjp,
    swiglu,
    swiglu_vjp,
)

__all__ = [
    "add_relu",
    "add_relu_vjp",
    "bias_gelu",
    "bias_gelu_vjp",
    "geglu",
    "geglu_vjp",
    "gelu",
    "gelu_vjp",
    "relu_squared",
    "relu_squared_vjp",
    "sigmoid",
    "sigmoid_vjp",
    "silu",
    "silu_vjp",
    "swiglu",
    "swiglu_vjp",
]
