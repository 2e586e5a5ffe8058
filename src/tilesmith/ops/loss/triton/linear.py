"""linear_cross_entropy in Triton: the cross-entropy kernels on chunks of logits."""

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.arguments import linear_cross_entropy_arguments, linear_cross_entropy_vjp_arguments
from tilesmith.ops.loss.triton.cross_entropy import (
    SWEEPS,
    LossConfig,
    default_vjp,
    forward_tells,
    held,
    stages_of,
    warps_of,
)
from tilesmith.ops.loss.triton.logit_steps import steps


def _reasons(call) -> list[str]:
    return ["x is float64; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _default(dims, arch, dtype) -> LossConfig:
    """The second sweep should find its row in the L2 cache, so the longer the row, the fewer of them at a time."""
    cols, odd = dims["cols"], dims["cols"] * dtype.itemsize % 16 != 0
    if cols <= 4096:
        return held(dims, arch)
    if cols * dtype.itemsize <= 2**17:
        block, warps, programs = 2048 if odd else 4096, 8, 8
    else:
        block, warps, programs = 16384, 16, 2
    stages = stages_of(block, arch, dtype, most=4 if odd or programs == 2 else 3)
    return LossConfig(block, 1, warps_of(warps, arch), stages, programs * max(1, arch.sms))


def _dims(x, weight, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_vjp(dloss, x, weight, *_) -> dict[str, int]:
    return _dims(x, weight)


SPACE = Space(dims=_dims, default=_default, choices={**SWEEPS, "num_stages": (1, 2, 3, 4)})
VJP_SPACE = Space(dims=_dims_vjp, default=default_vjp, choices=SWEEPS)


@register_kernel(
    "linear_cross_entropy",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda x, weight, *_, config: forward_tells(weight.shape[0], config),
    plans=rehearsed,
)
@optimize_kernel(space=SPACE)
@linear_cross_entropy_arguments
def linear_cross_entropy(
    call, *, config: LossConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each chunk a product, one launch over its logits, and the products of the gradients."""
    return chunks.linear_cross_entropy(steps(config), call)


@register_kernel(
    "linear_cross_entropy_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=linear_cross_entropy_vjp_arguments(chunks.source_tells),
    plans=rehearsed,
)
@optimize_kernel(space=VJP_SPACE)
@linear_cross_entropy_vjp_arguments
def linear_cross_entropy_vjp(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, products of the logits', or the logits again with their lse known."""
    return chunks.linear_cross_entropy_vjp(steps(config), call)
