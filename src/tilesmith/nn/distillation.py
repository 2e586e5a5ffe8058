"""Distillation losses: distances of given distributions, and of a student's from a teacher's from hidden states.

Names, defaults and argument orders of the classes are those of Liger's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import choice, flag, integer, number, positive, size, tensor
from tilesmith.ops.loss.distill_op import REDUCTIONS


def _check_beta(op: str, name: str, beta: float) -> None:
    if not 0 <= number(op, name, beta) <= 1:
        raise ValueError(f"{op}: {name} must be between 0 and 1, got {beta}")


def _check_sums(op: str, ignore_index: int, temperature: float, accum_dtype: torch.dtype | None) -> None:
    integer(op, "ignore_index", ignore_index)
    positive(op, "temperature", temperature)
    if accum_dtype not in (None, torch.float32):
        raise ValueError(f"{op}: accum_dtype is {accum_dtype}; it must be None or torch.float32")


class Options(nn.Module):
    """A loss without parameters, shown with its options."""

    def extra_repr(self) -> str:
        shown = (f"{n}={v!r}" for n, v in vars(self).items() if n[0] != "_" and n not in ("training", "compiled"))
        return ", ".join(shown)


class KLDivLoss(Options):
    """`ops.kl_div` as torch.nn.KLDivLoss has it."""

    def __init__(self, eps: float = 1e-10, reduction: str = "mean", log_target: bool = False):
        super().__init__()
        number("KLDivLoss", "eps", eps, 0.0)
        choice("KLDivLoss", "reduction", reduction, REDUCTIONS)
        flag("KLDivLoss", "log_target", log_target)
        self.eps, self.reduction, self.log_target = eps, reduction, log_target

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """y_pred: log-probabilities; y_true: probabilities, or their logarithms with log_target."""
        return ops.kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


class JSD(Options):
    """`ops.jsd`, averaged over the rows that count."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100):
        super().__init__()
        _check_beta("JSD", "beta", beta)
        integer("JSD", "ignore_index", ignore_index)
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """log_q, log_p: the student's and the teacher's log-probabilities; rows of ignore_index do not count."""
        return ops.jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class TVDLoss(Options):
    """`ops.tvd` of probabilities."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100):
        super().__init__()
        choice("TVDLoss", "reduction", reduction, REDUCTIONS)
        integer("TVDLoss", "ignore_index", ignore_index)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Rows whose label is ignore_index do not count."""
        return ops.tvd(p, q, shift_labels, self.reduction, self.ignore_index)


def distillation_loss(
    student_input: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    weight_hard_loss: float = 0.0,
    weight_soft_loss: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int = 0,
    accumulate_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.linear_distillation` averaged over the tokens that count, or over 1 where none does.

    teacher: hidden states with teacher_weight, or logits without. chunk_size: tokens whose logits are in memory at a
    time; 0: the library chooses. Returns the loss and, detached, its soft and its hard part before weighting.
    """
    for name, value in (("student_input", student_input), ("student_weight", student_weight), ("teacher", teacher)):
        tensor("distillation_loss", name, value)
    for name, value in (("teacher_weight", teacher_weight), ("teacher_bias", teacher_bias)):
        if value is not None:
            tensor("distillation_loss", name, value)
    size("distillation_loss", "chunk_size", chunk_size, 0)
    loss, parts = ops.linear_distillation(
        student_input, student_weight, teacher.detach(), None if teacher_weight is None else teacher_weight.detach(),
        target, student_bias, None if teacher_bias is None else teacher_bias.detach(), divergence, beta, temperature,
        weight_soft_loss, weight_hard_loss, ignore_index, False, chunk_size, accumulate_fp32,
    )  # fmt: skip
    count = _count(student_input, target, ignore_index)
    soft, hard = (parts.detach() / count).unbind()
    return loss / count, soft, hard


class FusedLinearDistillationLoss(Options):
    """`distillation_loss` of two models' hidden states and output layers, mixed with the labels' cross-entropy.

    divergence: "jsd" (with `beta`), "kl", "reverse_kl" or "tvd". compiled: accepted for callers of Liger's classes,
    without effect: nothing is compiled. return_soft_hard_loss: whether the call returns (loss, soft, hard).
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 0,
        return_soft_hard_loss: bool = False,
        *,
        divergence: str = "jsd",
    ):
        super().__init__()
        choice("FusedLinearDistillationLoss", "divergence", divergence, ("jsd", "kl", "reverse_kl", "tvd"))
        for name, value in {"weight_hard_loss": weight_hard_loss, "weight_soft_loss": weight_soft_loss}.items():
            number("FusedLinearDistillationLoss", name, value)
        size("FusedLinearDistillationLoss", "chunk_size", chunk_size, 0)
        positive("FusedLinearDistillationLoss", "temperature", temperature)
        integer("FusedLinearDistillationLoss", "ignore_index", ignore_index)
        for name, value in {"compiled": compiled, "return_soft_hard_loss": return_soft_hard_loss}.items():
            flag("FusedLinearDistillationLoss", name, value)
        _check_beta("FusedLinearDistillationLoss", "beta", beta)
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss, self.divergence = chunk_size, return_soft_hard_loss, divergence

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor | None,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """student_input: [..., K]; teacher_input: [..., K'], or logits where teacher_weight is None."""
        losses = distillation_loss(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            divergence=self.divergence, beta=self.beta, temperature=self.temperature,
            weight_hard_loss=self.weight_hard_loss, weight_soft_loss=self.weight_soft_loss,
            ignore_index=self.ignore_index, chunk_size=self.chunk_size,
        )  # fmt: skip
        return losses if self.return_soft_hard_loss else losses[0]


class FusedLinearJSDLoss(FusedLinearDistillationLoss):
    """`FusedLinearDistillationLoss` by the generalised Jensen-Shannon divergence."""


class FusedLinearJSD(Options):
    """The generalised Jensen-Shannon divergence of two models' next tokens, without a hard loss.

    accum_dtype: torch.float32 sums the weight's gradient over chunks in fp32; None in the weight's dtype.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_sums("FusedLinearJSD", ignore_index, temperature, accum_dtype)
        _check_beta("FusedLinearJSD", "jsd_beta", jsd_beta)
        self.jsd_beta, self.ignore_index = jsd_beta, ignore_index
        self.temperature, self.accum_dtype = temperature, accum_dtype

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor | None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Tokens whose label is ignore_index do not count."""
        loss, _, _ = distillation_loss(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, beta=self.jsd_beta,
            temperature=self.temperature, ignore_index=self.ignore_index,
            accumulate_fp32=self.accum_dtype is not None,
        )  # fmt: skip
        return loss


class FusedLinearKLDivLoss(Options):
    """KL(target ‖ student) of given probabilities, from the student's hidden states; "none" has no fused form.

    reduction: "sum"; "batchmean" divides by the tokens that count (1 at least), "mean" by V times that. eps: accepted
    for compatibility with Liger's class, without effect: where the target's probability is 0, so is the term.
    accum_dtype: as in `FusedLinearJSD`.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        choice("FusedLinearKLDivLoss", "reduction", reduction, ("batchmean", "mean", "sum"))
        _check_sums("FusedLinearKLDivLoss", ignore_index, temperature, accum_dtype)
        number("FusedLinearKLDivLoss", "eps", eps, 0.0)
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        """target: probabilities [..., V]; temperature is the student's alone; tokens of ignore_index do not count."""
        loss, _ = ops.linear_distillation(
            student_input, student_weight, target.detach(), None, shift_labels, divergence="kl",
            temperature=self.temperature, ignore_index=self.ignore_index, teacher_probs=True,
            accumulate_fp32=self.accum_dtype is not None,
        )  # fmt: skip
        if self.reduction == "sum":
            return loss
        count = _count(student_input, shift_labels, self.ignore_index)
        return loss / count if self.reduction == "batchmean" else loss / count / student_weight.shape[0]


def _count(x: Tensor, target: Tensor | None, ignore_index: int) -> Tensor | int:
    """How many tokens count, 1 at least."""
    if target is None:
        return max(1, x.numel() // x.shape[-1])
    return (target != ignore_index).sum().clamp(min=1)
