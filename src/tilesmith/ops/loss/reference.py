"""What the losses and their gradients are, in plain PyTorch: the oracle of every kernel, and cross_entropy on a CPU."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.ops.loss.pitch import pitched
from tilesmith.ops.loss.reduction import (
    check_labels,
    divisors_of,
    loss_factor,
    reduce_losses,
    row_factors,
    token_grads,
    undivided_token_grads,
)


class Terms(NamedTuple):
    """What the loss of one token is made of; see `cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    scale: float
    softcap: float


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of logits and class labels as in torch.nn.functional.cross_entropy, with z-loss and soft cap.

    With z = scale · logits, or softcap · tanh(scale · logits / softcap) where softcap > 0, lse = log Σ exp(z), s =
    label_smoothing and w the class weights (all 1 without `weight`), a token with label t costs

        (1 − s) · w[t] · (lse − z[t]) + (s / V) · Σ_c w[c] · (lse − z[c]) + z_loss · lse²

    and nothing where t is ignore_index. "none" returns the tokens' costs, "sum" their sum. "mean" divides the first two
    terms by the sum of w[t] over counted tokens and the third by their number; without counted tokens it is NaN, and
    the gradient is 0. Everything is computed in fp32 (fp64 for fp64 logits).

    logits: [..., V], floating; the classes are the last dim, also where torch would have them second. target: [...],
    int64 or int32. weight: [V], floating; it receives no gradient. label_smoothing: 0 to 1. z_loss, softcap: 0 or more.

    Returns the loss, a scalar, or [...] for "none": fp32 (fp64 for fp64 logits), where torch's function returns logits'
    dtype. The loss of a model that `optimize` changed keeps the dtype of torch's loss. The gradient has logits' shape
    and dtype and is contiguous.

    Raises ValueError on a CPU for a label outside 0 … V − 1 that is not ignore_index; on other devices, where checking
    would wait for the device, such a token's loss and gradient are NaN. Raises TypeError and ValueError for arguments
    of other types, shapes or values than these.

    Source: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z loss); Gemma Team,
    arXiv:2408.00118 (soft cap); Milakov and Gimelshein, arXiv:1805.02867 (one pass over the logits).

    For kernels: saved beside the loss are lse [...] (0 where the target is ignored) and, for "mean", the two divisors.
    """
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    check_labels(target, logits.shape[-1], ignore_index)
    loss, lse = token_losses(logits, target, weight, terms)
    divisors = divisors_of(target, weight, ignore_index, logits.shape[-1], loss.dtype, reduction)
    return reduce_losses(loss, lse, divisors, z_loss, reduction), lse, divisors


def cross_entropy_vjp(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    output_mask: Sequence[bool],
) -> Tensor:
    """The gradient dlogits of `cross_entropy`, rounded once, to logits' dtype.

    dloss: a scalar, or [...] for reduction "none". logits: [..., V], target: [...], weight: [V]; lse: [...] and
    divisors: [2] for "mean", else empty, which the forward saved. Computed in fp32 (fp64 for fp64 logits) as the
    derivative of the forward's formula: softmax − the smoothed label, times the class weight, plus 2 · z_loss · lse ·
    softmax. An empty tensor where `output_mask` does not ask for it.
    """
    if not output_mask[0]:
        return logits.new_empty(0)
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    token_grad, z_grad = token_grads(dloss, divisors, target.shape, reduction)
    return logit_grads(logits, target, weight, lse, token_grad, z_grad, terms).to(logits.dtype).contiguous()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
    mode: str = "",
    grad_mask: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cross_entropy` of x · weightᵀ + bias without materialising all logits (except in the reference itself).

    Kernels take the products in x's dtype: they cast a weight or bias of another dtype to it first, as autocast would,
    and round the logits and their gradient to it, as a linear layer and its gradient do. Sums of products are fp32.
    Gradients have their input's own dtype.

    x: [..., K]. weight: [V, K]. target: [...], int64 or int32. bias: [V]. class_weight: [V], without gradient. The
    other loss arguments, and what raises: see `cross_entropy`.

    mode says how gradients are computed; "" lets the library choose, and `explain` names its choice. For N tokens,
    chunks of C of them, e bytes an element of x:
    "keep": the gradient of all logits is kept (N·V·e bytes, the logits' own), and the backward takes its two products.
        The loss's own gradient is multiplied into x, rounded to x's dtype, and into dx. Not for float16, where the
        gradient of a mean can underflow.
    "chunks": the gradients are computed along with the loss, chunk after chunk of tokens (C·V·e), and the backward
        multiplies them by the loss's own gradient.
    "recompute": nothing is kept; the backward computes the logits again, a fourth product, in blocks of classes (C·V·e
        too), so that weight's gradient is final block by block and only x's is summed, in fp32 (4·N·K). With more
        tokens than classes, or for dx alone, in chunks of tokens. The same holds for reduction "none" in any mode,
        since only the backward knows the tokens' weights, and for gradients that were not requested here.
    Chosen is "keep" where weight's gradient is wanted and all logits take no more than 512 MiB (16 MiB on a CPU), or
    than an fp32 gradient of weight, to which those of 4096 tokens are added on an accelerator where "chunks" would hold
    both (a half-precision weight, accumulate_fp32), else "chunks"; inside a `MemoryConfig` the first of "keep",
    "chunks" and "recompute" that meets it.

    chunk_tokens: C; above 0 the mode is "chunks" where none is given. 0 lets the library choose, for "chunks" so that
    the logits of a chunk take at most 512 MiB (16 MiB on a CPU), or of 256 tokens if that is more; where weight's
    gradient is summed over chunks, of up to K + 4096 tokens (K on a CPU) if that is more. accumulate_fp32: whether
    weight's gradient is summed over chunks in fp32, which is then also how "chunks" keeps it, 4·V·K bytes; else in
    weight's dtype, with one rounding a chunk.

    Returns the loss, fp32 (fp64 for fp64 x): a scalar, or [...] for "none".

    Raises TypeError for dtypes and ValueError for shapes, devices and numbers that do not fit, naming the argument; on
    a CPU ValueError for labels out of range.

    Source: the fused loss of Hsu et al., Liger Kernel, arXiv:2410.10989; z loss: Chowdhery et al., PaLM,
    arXiv:2204.02311.

    For kernels: grad_mask says which gradients (x, weight, bias) to prepare along with the loss; a call fills in those
    that autograd will ask for. Saved beside the loss: lse [...], the divisors of "mean", and what the mode keeps, else
    empty tensors. x_grad, weight_grad, bias_grad: gradients of the undivided sum of losses; x's in its dtype, weight's
    in fp32 for accumulate_fp32 and for fp16, whose range such sums leave, else in its dtype, bias's in fp32.
    logit_grad [..., V], in x's dtype, and logit_factors [...], in lse's: a token's row of the one times its number of
    the other is the gradient of that sum by the token's logits. Each kernel chooses its factors: 1, the divisor where
    it computed the gradient of the mean, or what exponentials in place of logits lack. Where bias asks for a gradient,
    logit_grad alone is that of the loss.
    """
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    check_labels(target, weight.shape[0], ignore_index)
    logits = linear_logits(x, weight, bias)
    loss, lse = token_losses(logits, target, class_weight, terms)
    divisors = divisors_of(target, class_weight, ignore_index, weight.shape[0], loss.dtype, reduction)
    keeps = keeps_logit_grad(grad_mask, reduction, mode)
    grad_mask = gradients_now(grad_mask, reduction, mode)
    x_grad = weight_grad = bias_grad = logit_grad = logit_factors = loss.new_empty(0)
    if keeps:
        logit_factors = divisors[0].expand(loss.shape).clone() if reduction == "mean" else torch.ones_like(loss)
        token_grad, z_grad = token_grads(loss.new_ones(()), divisors, loss.shape, reduction)
        logit_grad = logit_grads(logits, target, class_weight, lse, token_grad, z_grad, terms)
    if any(grad_mask):
        token_grad, z_grad = undivided_token_grads(loss, divisors)
        dlogits = logit_grads(logits, target, class_weight, lse, token_grad, z_grad, terms)
        x_grad, weight_grad, bias_grad = linear_grads(dlogits, x, weight, grad_mask)
    return (
        reduce_losses(loss, lse, divisors, z_loss, reduction),
        lse,
        divisors,
        x_grad.to(x.dtype),
        weight_grad.to(summed_dtype(weight, accumulate_fp32)),
        bias_grad.to(loss.dtype),
        pitched(logit_grad.to(x.dtype).contiguous()) if keeps else logit_grad.to(x.dtype),
        logit_factors,
    )


def linear_cross_entropy_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    logit_grad: Tensor,
    logit_factors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    mode: str,
    output_mask: Sequence[bool],
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_cross_entropy`.

    Where the forward kept the logits' they are its products, times its factors and dloss over the divisor; where it
    computed them they are multiplied by the latter, with `overwrite` in place where dtypes allow; the others come from
    the logits anew.

    dloss: a scalar, or [...] for reduction "none". x: [..., K], weight: [V, K], bias: [V]; lse, divisors, x_grad,
    weight_grad, bias_grad, logit_grad, logit_factors: what the forward saved. Returns [..., K], [V, K] and [V], in the
    dtypes of x, weight and bias. An empty tensor stands for a gradient that `output_mask` does not ask for.
    """
    if logit_grad.shape == (*target.shape, weight.shape[0]):
        grads = linear_grads(
            logit_grad.to(dloss.dtype), x, weight, output_mask, row_factors(logit_factors, dloss, divisors)
        )
    elif already_computed(x, weight, bias, (x_grad, weight_grad, bias_grad), output_mask):
        factor = loss_factor(dloss, divisors, reduction)
        saved = (x_grad, weight_grad, bias_grad)
        grads = tuple(g.to(factor.dtype) * factor if m else g.new_empty(0) for g, m in zip(saved, output_mask))
    else:
        terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
        logits = linear_logits(x, weight, bias)
        token_grad, z_grad = token_grads(dloss, divisors, target.shape, reduction)
        dlogits = logit_grads(logits, target, class_weight, lse, token_grad, z_grad, terms)
        grads = linear_grads(dlogits, x, weight, output_mask)
    dx, dweight, dbias = grads
    # products are rounded to x's dtype, also where the weight that receives them is wider, as under autocast
    return dx.to(x.dtype), dweight.to(x.dtype).to(weight.dtype), dbias.to(weight.dtype if bias is None else bias.dtype)


def token_losses(logits: Tensor, target: Tensor, weight: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Each token's cross-entropy without its z term, and lse; both 0 where the target is ignored, and contiguous."""
    z = scores(logits, terms)
    counted, valid, label = counted_labels(target, logits.shape[-1], terms.ignore_index)
    lse = z.logsumexp(-1)
    chosen = z.gather(-1, label[..., None])[..., 0]
    losses = lse - chosen
    if weight is not None:
        losses = losses * weight.to(z.dtype)[label]
    if terms.label_smoothing:
        misses = lse[..., None] - z
        every = misses.sum(-1) if weight is None else (misses * weight.to(z.dtype)).sum(-1)
        losses = (1 - terms.label_smoothing) * losses + terms.label_smoothing / logits.shape[-1] * every
    losses = torch.where(valid, losses, float("nan"))
    return torch.where(counted, losses, 0.0).contiguous(), torch.where(counted, lse, 0.0).contiguous()


def logit_grads(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    token_grad: Tensor,
    z_grad: Tensor,
    terms: Terms,
) -> Tensor:
    """The loss's gradient with respect to logits, in fp32 (fp64), from its gradients with respect to tokens' terms."""
    z = scores(logits, terms)
    classes = logits.shape[-1]
    counted, valid, label = counted_labels(target, classes, terms.ignore_index)
    weights = z.new_ones(classes) if weight is None else weight.to(z.dtype)
    token_grad, z_grad = token_grad.to(z.dtype), z_grad.to(z.dtype)
    hit = token_grad * (1 - terms.label_smoothing) * weights[label]
    every = token_grad * (terms.label_smoothing / classes)
    grad = (z - lse[..., None]).exp() * (hit + every * weights.sum() + 2 * terms.z_loss * lse * z_grad)[..., None]
    if terms.label_smoothing:
        grad = grad - every[..., None] * weights
    at = label[..., None]
    grad = grad.scatter(-1, at, grad.gather(-1, at) - hit[..., None])
    if terms.softcap:
        grad = grad * (1 - (z / terms.softcap).square())
    grad = torch.where(valid[..., None], grad * terms.scale, float("nan"))
    return torch.where(counted[..., None], grad, 0.0)


def scores(logits: Tensor, terms: Terms) -> Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * terms.scale
    return terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z


def counted_labels(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each token counts, whether its label is a class, and a label that can be looked up in any case."""
    valid = (target >= 0) & (target < classes)
    return target != ignore_index, valid, target.clamp(0, classes - 1).long()


def linear_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a linear layer of x's dtype, in the dtype in which losses are taken.

    Its product, too, is one of x's dtype. Sums in tensor cores are rounded otherwise than in fp32, and a loss summed
    over many tokens shows it: 825 of 4096 tokens' distillation is off by 3.9e-3 with bf16 products on an H200, as that
    of any bf16 model would be, and by 1.3e-3 with products in fp32.
    """
    logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return logits.to(torch.promote_types(x.dtype, torch.float32))


def linear_grads(
    dlogits: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool], factors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of the logits, rounded to x's dtype as that of a linear layer's output is, times a factor for
    each token [...] then; 0 where that is 0."""
    acc, empty = dlogits.dtype, dlogits.new_empty(0)
    dlogits = dlogits.to(x.dtype).to(acc)
    if factors is not None:
        dlogits = torch.where(factors[..., None] == 0, 0.0, dlogits * factors[..., None])
    rows = dlogits.reshape(-1, weight.shape[0])
    dx = dlogits @ weight.to(x.dtype).to(acc) if mask[0] else empty
    dweight = rows.t() @ x.to(acc).reshape(-1, x.shape[-1]) if mask[1] else empty
    return dx, dweight, rows.sum(0) if mask[2] else empty


def gradients_now(grad_mask: Sequence[bool] | None, reduction: str, mode: str = "") -> tuple[bool, ...]:
    """Which gradients the forward computes: none for "none", whose tokens' weights only the backward knows."""
    if grad_mask is None or reduction == "none" or mode in ("keep", "recompute"):
        return (False, False, False)
    return tuple(grad_mask)


def keeps_logit_grad(grad_mask: Sequence[bool] | None, reduction: str, mode: str) -> bool:
    """Whether the forward leaves the gradient of the logits."""
    return mode == "keep" and reduction != "none" and grad_mask is not None and any(grad_mask)


def summed_dtype(weight: Tensor, accumulate_fp32: bool) -> torch.dtype:
    """In what dtype weight's gradient is summed over chunks, and kept for the backward."""
    return torch.promote_types(weight.dtype, torch.float32) if accumulate_fp32 else saved_dtype(weight)


def saved_dtype(weight: Tensor) -> torch.dtype:
    """In what dtype the gradient of the undivided sum is kept: fp16 cannot hold it."""
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


def already_computed(
    x: Tensor, weight: Tensor, bias: Tensor | None, saved: Sequence[Tensor], output_mask: Sequence[bool]
) -> bool:
    """Whether the forward left every gradient that `output_mask` asks for."""
    inputs = (x, weight, bias)
    return all(
        not m or (t is not None and g.ndim == t.ndim and g.shape == t.shape)
        for t, g, m in zip(inputs, saved, output_mask)
    )
