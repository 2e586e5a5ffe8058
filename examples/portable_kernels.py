"""Portable kernels from configuration to code for every backend, run here in the interpreter. Needs NumPy; no GPU."""

import numpy as np

from tilesmith.codegen import cuda, interpret, metal, spirv, wgsl
from tilesmith.kernels import flash_attention as flash
from tilesmith.kernels import fused_ops as fused


def attention_kernels():
    """Kernels from the default configuration, and from those tuned for an architecture."""
    ir = flash.create_flash_attention_kernel(flash.default_config)
    ir_ampere = flash.create_flash_attention_kernel(flash.TunedConfigs.ampere)
    return ir, ir_ampere


def fused_kernels():
    """Fused operations of a model with 4096 features."""
    swiglu_ir = fused.create_swiglu_kernel(fused.SwiGLUConfig(hidden_dim=4096, use_half=True))
    rope_ir = fused.create_rms_norm_rope_kernel(
        fused.RMSNormRoPEConfig(hidden_dim=4096, head_dim=128, max_seq_len=8192)
    )
    return swiglu_ir, rope_ir


def compile_everywhere(ir) -> dict[str, str | bytes]:
    """One kernel as text or binary for each backend."""
    return {
        "Vulkan": spirv.generate(ir),
        "CUDA": cuda.generate(ir),
        "Metal": metal.generate(ir),
        "WebGPU": wgsl.generate(ir),
    }


def memory(gpu_max_shared_memory: int = 101_376) -> int:
    """What the Ampere configuration needs, checked against a GPU's limit (here that of an RTX 30xx)."""
    config = flash.TunedConfigs.ampere
    shared_mem = flash.required_shared_memory(config)
    flash.validate_config(config, gpu_max_shared_memory)
    return shared_mem


def run(tokens: int = 40, heads: int = 2) -> float:
    """Attention in the interpreter; the largest difference from NumPy's."""
    config = flash.default_config
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, tokens, config.head_dim)).astype(np.float32) for _ in range(3))
    out, scale = np.empty_like(q), config.head_dim**-0.5
    interpret(
        flash.create_flash_attention_kernel(config),
        config.grid(tokens, heads),
        {"q": q, "k": k, "v": v, "out": out},
        {"n_q": tokens, "n_kv": tokens, "heads": heads, "kv_heads": heads, "scale": scale},
    )
    scores = q @ k.swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return float(np.abs(weights / weights.sum(-1, keepdims=True) @ v - out).max())


def main() -> None:
    """Build, compile, check and run."""
    ir, ir_ampere = attention_kernels()
    print(f"{ir.name}: {ir.threads} threads; Ampere's: {ir_ampere.threads}, {memory():,} bytes of shared memory")
    for kernel in (ir, *fused_kernels()):
        sizes = ", ".join(f"{name} {len(code):,} bytes" for name, code in compile_everywhere(kernel).items())
        print(f"{kernel.name}: {sizes}")
    print(f"attention in the interpreter differs from NumPy by {run():.1e}")


if __name__ == "__main__":
    main()
