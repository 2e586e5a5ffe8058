"""Portable kernels, built from a configuration for CUDA, Vulkan, Metal and WebGPU: no torch, no Triton.

    from tilesmith.codegen import spirv
    from tilesmith.kernels import flash_attention, fused_ops

    ir = flash_attention.create_flash_attention_kernel(flash_attention.TunedConfigs.rdna3)
    module = spirv.generate(ir)

`detect_vendor` and `preset_named` choose an attention preset by a device's name, `flash_attention.preset_for` by its
limits.
"""

from tilesmith.kernels import flash_attention, fused_ops
from tilesmith.kernels.catalog import KERNELS
from tilesmith.kernels.vendors import VENDORS, detect_vendor, preset_named

__all__ = ["flash_attention", "fused_ops", "KERNELS", "VENDORS", "detect_vendor", "preset_named"]
