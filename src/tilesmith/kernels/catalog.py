"""The pre-built kernels by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tilesmith.codegen import KernelIR
from tilesmith.kernels import flash_attention, fused_ops


class Entry(NamedTuple):
    """A configuration's class, and what builds the kernel from one."""

    config: type
    create: Callable[..., KernelIR]


KERNELS: dict[str, Entry] = {
    "flash_attention": Entry(flash_attention.FlashAttentionConfig, flash_attention.create_flash_attention_kernel),
    "layer_norm_linear": Entry(fused_ops.LayerNormLinearConfig, fused_ops.create_layer_norm_linear_kernel),
    "rms_norm_rope": Entry(fused_ops.RMSNormRoPEConfig, fused_ops.create_rms_norm_rope_kernel),
    "swiglu": Entry(fused_ops.SwiGLUConfig, fused_ops.create_swiglu_kernel),
    "residual_layer_norm": Entry(fused_ops.ResidualLayerNormConfig, fused_ops.create_residual_layer_norm_kernel),
    "geglu": Entry(fused_ops.GeGLUConfig, fused_ops.create_geglu_kernel),
    "softmax_dropout": Entry(fused_ops.SoftmaxDropoutConfig, fused_ops.create_softmax_dropout_kernel),
}
