"""What the distances between distributions and their gradients are, in plain PyTorch: the oracle of every kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.ops.loss.reduction import check_labels
from tilesmith.ops.loss.reference import already_computed, linear_grads, linear_logits, saved_dtype


def kl_div(x: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False, eps: float = 1e-10) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities x from a target distribution: Σ t · (log t − x).

    As torch.nn.functional.kl_div, with the same reductions: "none" gives the elements, "sum" their sum, "mean" divides
    it by the number of elements, "batchmean" by the size of the first dim. Where the target's probability is 0, so are
    the element and its gradients, whatever x is; log t is taken of max(t, eps).

    x: [..., V], log-probabilities. target: of the same shape, probabilities, or their logarithms if log_target (then
    eps is not used). Either may have a gradient, in its own dtype. Computed in fp32 (fp64 for fp64), which is also the
    result's dtype.

    Raises TypeError and ValueError for arguments other than described here.

    Source: Kullback and Leibler, On Information and Sufficiency (1951).
    """
    x, target = _wide(x, target)
    elements = _forward_kl(target, x) if log_target else _times(target, target.clamp(min=eps).log() - x)
    if reduction == "none":
        return elements.contiguous()
    return elements.sum() / divisor_of(x, reduction)


def kl_div_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: str,
    log_target: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dtarget) of `kl_div`.

    dloss: a scalar, or [..., V] for reduction "none". x, target: [..., V], those of the forward. dx = −t · dloss over
    the divisor of the reduction; dtarget = (log t + 1 − x) · dloss over it, or t · (log t − x + 1) for log_target.
    Computed in fp32 (fp64 for fp64), each in the dtype of its input. An empty tensor stands for a gradient that
    `output_mask` does not ask for.
    """
    a, b = _wide(x, target)
    if log_target:
        by_x, by_target = -b.exp(), _times(b.exp(), b - a + 1)
    else:
        by_x, by_target = -b, torch.where(b == 0, 0.0, b.clamp(min=eps).log() + (b >= eps).to(b.dtype) - a)
    factor = dloss if reduction == "none" else dloss / divisor_of(x, reduction)
    return _gradients(x, target, factor, by_x, by_target, output_mask)


def jsd(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> tuple[Tensor, Tensor]:
    """Generalised Jensen-Shannon divergence of log-probabilities: β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M).

    Q = exp(x), P = exp(target), M = β · P + (1 − β) · Q. At its ends it is defined as KL(P ‖ Q) for β = 0 and
    KL(Q ‖ P) for β = 1, as in Agarwal et al., arXiv:2306.13649 (where the limits of the formula are 0).

    x, target: [..., V], log-probabilities of student and teacher. labels: [...], int64 or int32; rows whose label is
    ignore_index do not count. reduction: "none" gives the elements, "sum" their sum, "batchmean" divides it by the
    number of rows that count (1 at least), "mean" by V times that. Either tensor may have a gradient, in its own dtype.
    Computed in fp32 (fp64 for fp64), which is also the result's dtype.

    Raises TypeError and ValueError for arguments other than described here. Saved beside the loss: the number of
    rows that count, empty without labels.
    """
    a, b = _wide(x, target)
    if beta == 0:
        elements = _forward_kl(b, a)
    elif beta == 1:
        elements = _forward_kl(a, b)
    else:
        above_a, above_b = _above_mean(a, b, beta)
        elements = beta * _times(b.exp(), above_b) + (1 - beta) * _times(a.exp(), above_a)
    return _reduced(elements, labels, ignore_index, reduction)


def jsd_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    count: Tensor,
    beta: float,
    ignore_index: int,
    reduction: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dtarget) of `jsd`.

    dloss: a scalar, or [..., V] for reduction "none". x, target: [..., V] and labels: [...], those of the forward;
    count: the rows that count, which it saved. With P, Q and M as in `jsd`, for 0 < β < 1, dx = (1 − β) · Q ·
    (x − log M) and dtarget = β · P · (target − log M), times dloss over the divisor; for β = 0 and β = 1 the gradients
    of KL(P ‖ Q) and KL(Q ‖ P). Computed in fp32 (fp64 for fp64), each in the dtype of its input. An empty tensor stands
    for a gradient that `output_mask` does not ask for.
    """
    a, b = _wide(x, target)
    if beta == 0:
        by_x, by_target = -b.exp(), _times(b.exp(), b - a + 1)
    elif beta == 1:
        by_x, by_target = _times(a.exp(), a - b + 1), -a.exp()
    else:
        above_a, above_b = _above_mean(a, b, beta)
        by_x, by_target = (1 - beta) * _times(a.exp(), above_a), beta * _times(b.exp(), above_b)
    factor = _factor(dloss, x, labels, count, ignore_index, reduction)
    return _gradients(x, target, factor, by_x, by_target, output_mask)


def tvd(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    grad_mask: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Total variation distance of probabilities: ½ · Σ |x − target|.

    x, target: [..., V], probabilities (not logarithms). Where both are equal the gradient is 0. The rest: see
    `jsd`.

    Computed in fp32 (fp64 for fp64). Raises TypeError for dtypes that are not floating, ValueError for shapes, devices
    and reductions that do not fit.

    Source: f-divergence distillation, Wen et al., arXiv:2307.15190.

    For kernels: grad_mask says which gradients, of x and target, autograd will ask for; a call with autograd on fills
    it in. If any, the signs of x − target are saved for the backward, which then reads neither.
    """
    a, b = _wide(x, target)
    signs = torch.empty(0, dtype=torch.int16, device=x.device)
    if any(grad_mask or ()):
        signs = packed_signs(a, b, None if labels is None else labels != ignore_index)
    return *_reduced(0.5 * (a - b).abs(), labels, ignore_index, reduction), signs


SIGNS = 8  # in a word


def packed_signs(a: Tensor, b: Tensor, counted: Tensor | None) -> Tensor:
    """int16 [..., V / 8 rounded up]: of 8 neighbours 2 bits each, the first the lowest; 1 where a > b, 3 (-1) where a <
    b, 0 elsewhere, and in rows that are not counted."""
    codes = (a > b).int() + 3 * (a < b).int()
    if counted is not None:
        codes = codes * counted[..., None]
    codes = F.pad(codes, (0, -codes.shape[-1] % SIGNS)).unflatten(-1, (-1, SIGNS))
    words = (codes << (2 * torch.arange(SIGNS, dtype=torch.int32, device=a.device))).sum(-1, dtype=torch.int32)
    return words.to(torch.int16)


def tvd_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    count: Tensor,
    signs: Tensor,
    reduction: str,
    ignore_index: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dtarget) of `tvd`; signs: those that it saved, or empty.

    dloss: a scalar, or [..., V] for reduction "none". x, target: [..., V]; signs: int16 [..., ⌈V / 8⌉], two bits an
    element. dx = ½ · sign(x − target) · dloss over the divisor, in x's dtype; dtarget = −dx, in target's dtype. An
    empty tensor stands for a gradient that `output_mask` does not ask for.
    """
    a, b = _wide(x, target)
    sign = 0.5 * torch.sign(a - b)
    factor = _factor(dloss, x, labels, count, ignore_index, reduction)
    return _gradients(x, target, factor, sign, -sign, output_mask)


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    teacher_probs: bool = False,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = False,
    grad_mask: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Divergence of a student's distribution from a teacher's, from hidden states, without materialising all logits.

    With student logits z = x · weightᵀ + bias and teacher logits y, a token's soft loss is the distance of
    softmax(z / temperature) from softmax(y / temperature) over all classes: "kl" is KL(teacher ‖ student), "reverse_kl"
    KL(student ‖ teacher), "jsd" as `jsd` has it with `beta`, "tvd" as `tvd`. Its hard loss is the cross-entropy of
    softmax(z) with its label. The loss is the undivided sum over tokens of soft_weight · soft + hard_weight · hard.

    x: [..., K]. weight: [V, K]. teacher: hidden states [..., K'] with teacher_weight [V, K'], or without it the logits
    [..., V], or with teacher_probs their softmax(y / temperature); no gradient in any case. target: [...], int64 or
    int32; tokens of ignore_index do not count; None: all count, and there is no hard loss. bias, teacher_bias: [V].
    temperature: above 0. Products and sums are rounded as in `linear_cross_entropy`.

    Kernels walk over chunks of tokens: both logits, the losses, the gradient in place of the student's logits, its two
    products, in one pass. chunk_tokens: tokens of a chunk; 0 lets the library choose: equal chunks for which the logits
    of both models take at most 512 MiB and at most twelve times x's size (on a CPU 16 MiB), or of 256 tokens if that is
    more.
    accumulate_fp32: as in `linear_preference`.

    Returns (loss, parts): a scalar, and [2], the sums of soft and of hard losses; fp32 (fp64 for fp64 x). A gradient
    through parts costs the products of the logits again.

    Source: Hinton et al., arXiv:1503.02531; Agarwal et al., arXiv:2306.13649.

    Raises TypeError and ValueError for arguments other than described here, naming the argument.

    For kernels: grad_mask as in `linear_cross_entropy`.
    """
    if target is not None:
        check_labels(target, weight.shape[0], ignore_index)
    acc = torch.promote_types(x.dtype, torch.float32)
    z, y = linear_logits(x, weight, bias), _teacher_logits(teacher, teacher_weight, teacher_bias).to(acc)
    parts = token_parts(z, y, target, divergence, beta, temperature, ignore_index, teacher_probs).sum(-1)
    loss = soft_weight * parts[0] + hard_weight * parts[1]
    mask = gradients_now(grad_mask)
    grads = [loss.new_empty(0)] * 3
    if any(mask):
        coefficients = loss.new_tensor([soft_weight, hard_weight])
        dlogits = logit_grads(
            z.detach(), y, target, divergence, beta, temperature, ignore_index, teacher_probs, coefficients
        )
        grads = linear_grads(dlogits, x, weight, mask)
    dx, dweight, dbias = grads
    return loss, parts.clone(), dx.to(x.dtype), dweight.to(x.dtype).to(saved_dtype(weight)), dbias.to(acc)


def linear_distillation_vjp(
    dloss: Tensor | None,
    dparts: Tensor | None,
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    target: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    divergence: str,
    beta: float,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    ignore_index: int,
    teacher_probs: bool,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_distillation`; the forward's own times dloss, where it computed them:
    in place with `overwrite`.

    dloss: a scalar; dparts: [2]; either may be None (zeros). x_grad, weight_grad, bias_grad: what the forward saved, or
    empty. All else: its arguments. Where dparts is given, the gradients come from logits that are computed again.
    Returns [..., K], [V, K] and [V], in the dtypes of x, weight and bias. An empty tensor stands for a gradient that
    `output_mask` does not ask for.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    saved = (x_grad, weight_grad, bias_grad)
    if dparts is None and already_computed(x, weight, bias, saved, output_mask):
        dx, dweight, dbias = (g.to(acc) * dloss if m else g.new_empty(0) for g, m in zip(saved, output_mask))
    else:
        z, y = linear_logits(x, weight, bias), _teacher_logits(teacher, teacher_weight, teacher_bias).to(acc)
        coefficients = part_grads(dloss, dparts, soft_weight, hard_weight)
        dlogits = logit_grads(z, y, target, divergence, beta, temperature, ignore_index, teacher_probs, coefficients)
        dx, dweight, dbias = linear_grads(dlogits, x, weight, output_mask)
    dweight = dweight.to(x.dtype).to(weight.dtype)
    return dx.to(x.dtype), dweight, dbias.to(weight.dtype if bias is None else bias.dtype)


def part_grads(dloss: Tensor | None, dparts: Tensor | None, soft_weight: float, hard_weight: float) -> Tensor:
    """The gradient with respect to the sums of soft and of hard losses, [2]."""
    if dloss is None:
        return dparts
    own = torch.stack((dloss * soft_weight, dloss * hard_weight))
    return own if dparts is None else own + dparts


def divisor_of(x: Tensor, reduction: str) -> int:
    """What torch divides the sum by."""
    return {"sum": 1, "batchmean": x.shape[0] if x.ndim else 1, "mean": x.numel()}[reduction]


def _wide(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(torch.promote_types(x.dtype, target.dtype), torch.float32)
    return x.to(acc), target.to(acc)


def _times(probability: Tensor, log_ratio: Tensor) -> Tensor:
    """probability · log_ratio, 0 where the probability is: its logarithm is then −∞."""
    possible = probability != 0  # not > 0, which would make nothing of NaN
    return torch.where(possible, probability * torch.where(possible, log_ratio, 0.0), 0.0)


def _forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Elements of KL(P ‖ Q)."""
    p = log_p.exp()
    return _times(p, torch.where(p != 0, log_p, 0.0) - log_q)


def _above_mean(a: Tensor, b: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """a − log(M) and b − log(M), by the distance from the larger of the two: nothing cancels where they are close."""
    gap = torch.where(torch.maximum(a, b) != float("-inf"), b - a, 0.0)
    first = gap <= 0
    from_a = torch.log1p(beta * torch.expm1(torch.where(first, gap, 0.0)))
    from_b = torch.log1p((1 - beta) * torch.expm1(torch.where(first, 0.0, -gap)))
    return torch.where(first, -from_a, -gap - from_b), torch.where(first, gap - from_a, -from_b)


def _reduced(elements: Tensor, labels: Tensor | None, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor]:
    if labels is None:
        rows, count = max(1, elements.numel() // max(1, elements.shape[-1])), elements.new_empty(0)
    else:
        counted = labels != ignore_index
        elements = torch.where(counted[..., None], elements, 0.0)
        count = counted.sum().clamp(min=1).to(elements.dtype)
        rows = count
    if reduction == "none":
        return elements.contiguous(), count
    total = elements.sum()
    return {"sum": lambda: total, "batchmean": lambda: total / rows, "mean": lambda: total / rows / elements.shape[-1]}[
        reduction
    ](), count


def _factor(
    dloss: Tensor, x: Tensor, labels: Tensor | None, count: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """The gradient with respect to the elements."""
    factor = dloss
    if reduction in ("batchmean", "mean"):
        factor = dloss / (max(1, x.numel() // max(1, x.shape[-1])) if labels is None else count)
    if reduction == "mean":
        factor = factor / x.shape[-1]
    return factor if labels is None else torch.where((labels != ignore_index)[..., None], factor, 0.0)


def _gradients(
    x: Tensor, target: Tensor, factor: Tensor, by_x: Tensor, by_target: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    dx, dtarget = (
        torch.where(factor == 0, 0.0, factor * slope).to(t.dtype).contiguous() if wanted else t.new_empty(0)
        for t, slope, wanted in zip((x, target), (by_x, by_target), output_mask)
    )
    return dx, dtarget


def token_parts(
    z: Tensor,
    y: Tensor,
    target: Tensor | None,
    divergence: str,
    beta: float,
    temperature: float,
    ignore_index: int,
    teacher_probs: bool,
) -> Tensor:
    """Soft and hard losses of the tokens, [2, M]."""
    a, b = (z / temperature).log_softmax(-1), y.log() if teacher_probs else (y / temperature).log_softmax(-1)
    if divergence == "tvd":
        soft = tvd(a.exp(), b.exp(), None, "none")[0].sum(-1)
    else:
        soft = jsd(a, b, None, ends(divergence, beta), -100, "none")[0].sum(-1)
    if target is None:
        return torch.stack((soft.flatten(), torch.zeros_like(soft).flatten()))
    rows = z.reshape(-1, z.shape[-1])
    hard = F.cross_entropy(rows, target.flatten().long(), reduction="none", ignore_index=ignore_index)
    return torch.stack((torch.where(target.flatten() == ignore_index, 0.0, soft.flatten()), hard))


def logit_grads(
    z: Tensor,
    y: Tensor,
    target: Tensor | None,
    divergence: str,
    beta: float,
    temperature: float,
    ignore_index: int,
    teacher_probs: bool,
    coefficients: Tensor,
) -> Tensor:
    """The gradient of the student's logits, from those of the sums of soft and hard losses."""
    a, b = (z / temperature).log_softmax(-1), y.log() if teacher_probs else (y / temperature).log_softmax(-1)
    q, one = a.exp(), a.new_ones(())
    if divergence == "tvd":
        slope = tvd_vjp(one, q, b.exp(), None, one, one, "sum", -100, (True, False))[0] * q
    else:
        slope = jsd_vjp(one, a, b, None, one, ends(divergence, beta), -100, "sum", (True, False))[0]
    grad = coefficients[0] / temperature * (slope - q * slope.sum(-1, keepdim=True))
    if target is None:
        return grad
    counted = (target != ignore_index)[..., None]
    hard, at = z.softmax(-1), torch.where(counted, target[..., None], 0).long()
    hard = hard.scatter(-1, at, hard.gather(-1, at) - 1)
    return torch.where(counted, grad + coefficients[1] * hard, 0.0)


def ends(divergence: str, beta: float) -> float:
    """The β at which `jsd` is this divergence."""
    return {"kl": 0.0, "reverse_kl": 1.0}.get(divergence, beta)


def _teacher_logits(teacher: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return teacher if weight is None else linear_logits(teacher, weight, bias)


def gradients_now(grad_mask: Sequence[bool] | None) -> tuple[bool, ...]:
    """Which gradients the forward computes."""
    return (False, False, False) if grad_mask is None else tuple(grad_mask)
