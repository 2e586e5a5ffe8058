"""Matrix products, linear layers and what is fused with them."""

from tilesmith.ops.gemm.op import (
    linear,
    linear_act,
    linear_act_vjp,
    linear_vjp,
    matmul,
    matmul_vjp,
    memory_efficient_linear,
    memory_efficient_linear_vjp,
    norm_linear,
    norm_linear_vjp,
)

__all__ = [
    "linear",
    "linear_act",
    "linear_act_vjp",
    "linear_vjp",
    "matmul",
    "matmul_vjp",
    "memory_efficient_linear",
    "memory_efficient_linear_vjp",
    "norm_linear",
    "norm_linear_vjp",
]
