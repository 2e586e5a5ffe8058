"""linear_preference in plain PyTorch, block by block in place, on any device."""

from collections.abc import Sequence

from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.loss import preference_chunks
from tilesmith.ops.loss.chunked import KEEPING_STEPS
from tilesmith.ops.loss.preference_reference import gradients_now
from tilesmith.ops.loss.reduction import check_labels
from tilesmith.ops.loss.reference import Terms


@register_kernel("linear_preference", backend="chunked", rank=10)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two sweeps over each chunk's logits, the formula between them."""
    check_labels(target, weight.shape[0], ignore_index)
    terms = Terms(ignore_index, 0.0, 0.0, scale, softcap)
    mask = gradients_now(grad_mask, recompute)
    return preference_chunks.linear_preference(
        KEEPING_STEPS, x, weight, target, sequences, formula, options, bias, tokens,
        terms, chunk_tokens, accumulate_fp32, mask,
    )  # fmt: skip


@register_kernel("linear_preference_vjp", backend="chunked", rank=10)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again with their lse known."""
    terms = Terms(ignore_index, 0.0, 0.0, scale, softcap)
    return preference_chunks.linear_preference_vjp(
        KEEPING_STEPS, dloss, dlog_probs, x, weight, target, bias, lse, token_grad, (x_grad, weight_grad, bias_grad),
        terms, chunk_tokens, accumulate_fp32, output_mask, overwrite,
    )  # fmt: skip
