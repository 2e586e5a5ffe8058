"""linear_preference in Triton: the cross-entropy kernels on chunks of whole sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.ops.loss import preference_chunks
from tilesmith.ops.loss.preference_reference import gradients_now
from tilesmith.ops.loss.reference import Terms
from tilesmith.ops.loss.triton import CROSS_ENTROPY_SPACE, LossConfig
from tilesmith.ops.loss.triton_linear import steps


def _reasons(call) -> list[str]:
    return ["x is float64; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _dims(x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_vjp(dloss: Tensor | None, dlog_probs: Tensor | None, x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return _dims(x, weight)


SPACE = Space(dims=_dims, default=CROSS_ENTROPY_SPACE.default, choices=CROSS_ENTROPY_SPACE.choices)
VJP_SPACE = Space(dims=_dims_vjp, default=CROSS_ENTROPY_SPACE.default, choices=CROSS_ENTROPY_SPACE.choices)


@register_kernel("linear_preference", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
def linear_preference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    sequences: Tensor,
    formula: str,
    options: Sequence[float],
    bias: Tensor | None = None,
    tokens: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = False,
    recompute: bool = False,
    grad_mask: Sequence[bool] | None = None,
    *,
    config: LossConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two sweeps over each chunk's logits, the formula between them."""
    terms = Terms(ignore_index, 0.0, 0.0, scale, softcap)
    mask = gradients_now(grad_mask, recompute)
    return preference_chunks.linear_preference(
        steps(config), x, weight, target, sequences, formula, options, bias, tokens,
        terms, chunk_tokens, accumulate_fp32, mask,
    )  # fmt: skip


@register_kernel("linear_preference_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=VJP_SPACE)
def linear_preference_vjp(
    dloss: Tensor | None,
    dlog_probs: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    token_grad: Tensor,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
    overwrite: bool = False,
    *,
    config: LossConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again with their lse known."""
    terms = Terms(ignore_index, 0.0, 0.0, scale, softcap)
    return preference_chunks.linear_preference_vjp(
        steps(config), dloss, dlog_probs, x, weight, target, bias, lse, token_grad, (x_grad, weight_grad, bias_grad),
        terms, chunk_tokens, accumulate_fp32, output_mask, overwrite,
    )  # fmt: skip
