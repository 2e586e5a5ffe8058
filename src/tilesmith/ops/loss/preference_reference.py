"""What the fused preference loss and its gradients are, in plain PyTorch on whole logits."""

from collections.abc import Sequence

from torch import Tensor

from tilesmith.ops.loss import reference
from tilesmith.ops.loss.formulas import FORMULAS


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
    """A preference loss of sequences from x · weightᵀ + bias, without materialising all logits.

    The loss is the undivided sum that `ops.loss.formulas.FORMULAS[formula]` makes of the labels' log-probabilities; the
    caller divides it by pairs, sequences or tokens (`tilesmith.nn.preference` does). Logits are scaled and capped as in
    `cross_entropy`, products and sums rounded as in `linear_cross_entropy`.

    x: [B, T, K]; for paired formulas the first half of the B sequences are the chosen ones, the second half the
    rejected ones in the same order. weight: [V, K]. target: [B, T], int64 or int32; a label of ignore_index does not
    count. sequences: [rows, B], tokens: [rows, B, T], floating, without gradient: what the formula reads besides, see
    there. options: the formula's, in its order. bias: [V].

    Returns (loss, log_probs): a scalar, and the labels' log-probabilities [B, T], 0 where ignored; both fp32 (fp64 for
    fp64 x) and differentiable.

    Kernels walk over chunks of whole sequences, of whole pairs where paired: logits, log-probabilities, formula, then
    the gradient in place of the logits and its two products, so that loss and gradients cost three products of
    2·B·T·K·V operations. With `recompute` the backward takes the product of the logits again: a fourth product, but
    chunks need not hold a whole pair. chunk_tokens: tokens of a chunk, rounded down to whole sequences or pairs, one at
    least (with recompute as in `linear_cross_entropy`); 0 lets the library choose, by `sequences_per_chunk`.
    accumulate_fp32: whether the weight's gradient is summed over chunks in fp32; else in weight's dtype with one
    rounding a chunk.

    Memory beside inputs and results, for C tokens of a chunk and e bytes an element of x: C·V·e for the logits, and
    where a chunk is not the whole batch C·K·e, since pairs lie in two places; accumulate_fp32 then takes 4·V·K, and
    dweight's memory only when the logits are gone. Results are dx and dweight, and 12 bytes a token. The backward
    scales dx and dweight in place. It makes copies of them instead, which doubles their memory, if its graph is kept or
    captured, under torch.compile, and under saved-tensor hooks, as in checkpointing.

    A gradient through log_probs costs the product of the logits again in any case. Labels are checked on a CPU only, as
    in `cross_entropy`. Raises TypeError and ValueError for arguments other than described here.

    For kernels: grad_mask as in `linear_cross_entropy`.
    """
    losses, lse, *_ = reference.linear_cross_entropy(
        x, weight, target, bias, None, ignore_index, 0.0, 0.0, scale, softcap, "none"
    )
    acc = losses.dtype
    mask = gradients_now(grad_mask, recompute)
    rows = None if tokens is None else tokens.to(acc)
    loss, slopes = FORMULAS[formula].evaluate(-losses, sequences.to(acc), rows, options)
    x_grad = weight_grad = bias_grad = losses.new_empty(0)
    if any(mask):
        none = lse.new_empty(0)
        x_grad, weight_grad, bias_grad = reference.linear_cross_entropy_vjp(
            -slopes, x, weight, target, bias, None, lse, lse, none, none, none, none, none,
            ignore_index, 0.0, 0.0, scale, softcap, "none", 0, True, "", mask,
        )  # fmt: skip
    return (
        loss,
        -losses,
        lse,
        slopes.contiguous(),
        x_grad.to(x.dtype),
        weight_grad.to(reference.saved_dtype(weight)),
        bias_grad.to(acc),
    )


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
    """Gradients (dx, dweight, dbias) of `linear_preference`; the forward's own, times dloss, where it computed them: in
    place with `overwrite`.

    dloss: a scalar; dlog_probs: [B, T]; either may be None (zeros). lse, token_grad: [B, T]; x_grad, weight_grad,
    bias_grad: what the forward saved, or empty. Where dlog_probs is given, the gradients come from logits that are
    computed again. Returns [B, T, K], [V, K] and [V], in the dtypes of x, weight and bias. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """
    saved = (x_grad, weight_grad, bias_grad)
    if dlog_probs is None and reference.already_computed(x, weight, bias, saved, output_mask):
        dx, dweight, dbias = (g.to(lse.dtype) * dloss if m else g.new_empty(0) for g, m in zip(saved, output_mask))
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype if bias is None else bias.dtype)
    none = lse.new_empty(0)
    return reference.linear_cross_entropy_vjp(
        token_grads(dloss, dlog_probs, token_grad), x, weight, target, bias, None, lse, lse, none, none, none, none,
        none, ignore_index, 0.0, 0.0, scale, softcap, "none", 0, True, "", output_mask,
    )  # fmt: skip


def gradients_now(grad_mask: Sequence[bool] | None, recompute: bool) -> tuple[bool, ...]:
    """Which gradients the forward computes."""
    return (False, False, False) if grad_mask is None or recompute else tuple(grad_mask)


def token_grads(dloss: Tensor | None, dlog_probs: Tensor | None, slopes: Tensor) -> Tensor:
    """The gradient with respect to the tokens' cross-entropies, which are the log-probabilities' negatives."""
    if dlog_probs is None:
        return -dloss * slopes
    return -dlog_probs if dloss is None else -(dloss * slopes + dlog_probs)
