"""Pre-built fused kernels: each `create_*_kernel(config)` gives a KernelIR that every target compiles.

A configuration is what is known when the kernel is built; the number of rows is a scalar of the launch, whose grid is
`config.grid(rows)`. Tensors are contiguous and have at most 2³² elements.
"""

from tilesmith.kernels.gates import GeGLUConfig, SwiGLUConfig, create_geglu_kernel, create_swiglu_kernel
from tilesmith.kernels.gates_vjp import GatedVjpConfig, create_gated_vjp_kernel
from tilesmith.kernels.norm_linear import (
    LayerNormLinearConfig,
    NormLinearConfig,
    create_layer_norm_linear_kernel,
    create_norm_linear_kernel,
)
from tilesmith.kernels.norm_rope import (
    HeadsNormRoPEConfig,
    RMSNormRoPEConfig,
    create_heads_norm_rope_kernel,
    create_rms_norm_rope_kernel,
)
from tilesmith.kernels.norms import (
    NormConfig,
    ResidualLayerNormConfig,
    create_norm_kernel,
    create_residual_layer_norm_kernel,
)
from tilesmith.kernels.norms_vjp import NormVjpConfig, create_norm_vjp_kernel
from tilesmith.kernels.probability import SoftmaxDropoutConfig, create_softmax_dropout_kernel

# LayerNorm and RMSNorm as one word, as in the class names
create_layernorm_linear_kernel = create_layer_norm_linear_kernel
create_residual_layernorm_kernel = create_residual_layer_norm_kernel
create_rmsnorm_rope_kernel = create_rms_norm_rope_kernel
createLayerNormLinearKernel = create_layer_norm_linear_kernel
createRMSNormRoPEKernel = create_rms_norm_rope_kernel
createSwiGLUKernel = create_swiglu_kernel
createResidualLayerNormKernel = create_residual_layer_norm_kernel
createGeGLUKernel = create_geglu_kernel
createSoftmaxDropoutKernel = create_softmax_dropout_kernel

__all__ = [
    "NormVjpConfig",
    "GatedVjpConfig",
    "HeadsNormRoPEConfig",
    "LayerNormLinearConfig",
    "NormConfig",
    "NormLinearConfig",
    "RMSNormRoPEConfig",
    "SwiGLUConfig",
    "ResidualLayerNormConfig",
    "GeGLUConfig",
    "SoftmaxDropoutConfig",
    "create_gated_vjp_kernel",
    "create_heads_norm_rope_kernel",
    "create_layer_norm_linear_kernel",
    "create_norm_kernel",
    "create_norm_linear_kernel",
    "create_norm_vjp_kernel",
    "create_rms_norm_rope_kernel",
    "create_swiglu_kernel",
    "create_residual_layer_norm_kernel",
    "create_geglu_kernel",
    "create_softmax_dropout_kernel",
    "create_layernorm_linear_kernel",
    "create_residual_layernorm_kernel",
    "create_rmsnorm_rope_kernel",
    "createLayerNormLinearKernel",
    "createRMSNormRoPEKernel",
    "createSwiGLUKernel",
    "createResidualLayerNormKernel",
    "createGeGLUKernel",
    "createSoftmaxDropoutKernel",
]
