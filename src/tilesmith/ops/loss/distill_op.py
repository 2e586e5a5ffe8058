"""The distances between distributions: what they are, what they accept and which kernels they have.

Legend: V classes (the vocabulary), K features of a student's token, K' of a teacher's; [...] the shape of the tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import INTEGERS, floating
from tilesmith.ops.loss import distill_reference as reference
from tilesmith.ops.loss import distill_sharding as sharding
from tilesmith.ops.loss import fakes
from tilesmith.ops.loss.checks import check_ignored
from tilesmith.ops.loss.distill_arguments import (
    jsd_vjp_arguments,
    kl_div_vjp_arguments,
    linear_distillation_arguments,
    linear_distillation_vjp_arguments,
    tvd_arguments,
    tvd_vjp_arguments,
)
from tilesmith.ops.loss.op import LossWithGradients
from tilesmith.ops.loss.reference import saved_dtype

REDUCTIONS = ("mean", "batchmean", "sum", "none")
DIVERGENCES = ("jsd", "kl", "reverse_kl", "tvd")


def _acc(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _fake_loss(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    return x.new_empty(x.shape if reduction == "none" else (), dtype=_acc(x, target))


def _fake_kl(x: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float) -> Tensor:
    return _fake_loss(x, target, reduction)


@kl_div_vjp_arguments
def _fake_kl_vjp(call) -> tuple[Tensor, Tensor]:
    return _fake_gradients(call.x, call.target, call.output_mask)


def _fake_gradients(x: Tensor, target: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    dx, dtarget = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, target), output_mask))
    return dx, dtarget


def _fake_jsd(
    x: Tensor, target: Tensor, labels: Tensor | None, beta: float, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor]:
    return _fake_loss(x, target, reduction), x.new_empty(0 if labels is None else (), dtype=_acc(x, target))


@jsd_vjp_arguments
def _fake_jsd_vjp(call) -> tuple[Tensor, Tensor]:
    return _fake_gradients(call.x, call.target, call.output_mask)


@tvd_arguments
def _fake_tvd(call) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    loss, count = _fake_jsd(x, call.target, call.labels, 0.5, call.ignore_index, call.reduction)
    signs = (*x.shape[:-1], -(-x.shape[-1] // reference.SIGNS)) if any(call.grad_mask or ()) else 0
    return loss, count, x.new_empty(signs, dtype=torch.int16)


@tvd_vjp_arguments
def _fake_tvd_vjp(call) -> tuple[Tensor, Tensor]:
    return _fake_gradients(call.x, call.target, call.output_mask)


@linear_distillation_arguments
def _fake_linear(call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, weight = call.x, call.weight
    mask = reference.gradients_now(call.grad_mask)
    return (
        x.new_empty((), dtype=_acc(x)),
        x.new_empty(2, dtype=_acc(x)),
        *fakes.gradients_now(x, weight, mask, saved_dtype(weight)),
    )


def _check_kl(x: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float) -> None:
    _check_distributions("kl_div", x, target, reduction)
    if not eps >= 0:
        raise ValueError(f"kl_div: eps is {eps}; it must be 0 or more")


def _check_jsd(
    x: Tensor, target: Tensor, labels: Tensor | None, beta: float, ignore_index: int, reduction: str
) -> None:
    _check_distributions("jsd", x, target, reduction)
    _check_labels("jsd", "labels", labels, x, ignore_index)
    if not 0 <= beta <= 1:
        raise ValueError(f"jsd: beta is {beta}; it must be between 0 and 1")


@tvd_arguments
def _check_tvd(call) -> None:
    grad_mask = call.grad_mask
    _check_distributions("tvd", call.x, call.target, call.reduction)
    _check_labels("tvd", "labels", call.labels, call.x, call.ignore_index)
    if grad_mask is not None and len(grad_mask) != 2:
        raise ValueError(f"tvd: grad_mask is {list(grad_mask)}; it must have 2 entries: x, target")


def _check_distributions(op: str, x: Tensor, target: Tensor, reduction: str) -> None:
    for name, value in (("x", x), ("target", target)):
        floating(op, name, value)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; it must be [..., V] with V of at least 1")
    if target.shape != x.shape:
        raise ValueError(f"{op}: target has shape {tuple(target.shape)}; it must be that of x, {tuple(x.shape)}")
    if target.device != x.device:
        raise ValueError(f"{op}: target is on {target.device}, x on {x.device}; move them to one device")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; it must be one of {', '.join(map(repr, REDUCTIONS))}")


def _check_labels(op: str, name: str, labels: Tensor | None, x: Tensor, ignore_index: int) -> None:
    if labels is None:
        return
    if labels.dtype not in INTEGERS:
        raise TypeError(f"{op}: {name} has dtype {labels.dtype}; it must hold labels, int64 or int32")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"{op}: {name} has shape {tuple(labels.shape)}; for this x it must be {tuple(x.shape[:-1])}")
    if labels.device != x.device:
        raise ValueError(f"{op}: {name} is on {labels.device}, x on {x.device}; move them to one device")
    check_ignored(op, name, labels, ignore_index)


@linear_distillation_arguments
def _check_linear(call) -> None:
    x, weight, grad_mask = call.x, call.weight, call.grad_mask
    teacher_weight, teacher_bias = call.teacher_weight, call.teacher_bias
    op = "linear_distillation"
    for name in ("x", "weight", "teacher", "teacher_weight", "bias", "teacher_bias"):
        value = getattr(call, name)
        if value is not None:
            floating(op, name, value)
        if value is not None and value.device != x.device:
            raise ValueError(f"{op}: {name} is on {value.device}, x on {x.device}; move them to one device")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; it must be [..., K] with K of at least 1")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}; for this x it must be [V, {x.shape[-1]}], V at least 1"
        )
    classes = weight.shape[0]
    _check_teacher(op, x, call.teacher, teacher_weight, classes)
    for name, value in (("bias", call.bias), ("teacher_bias", teacher_bias)):
        if value is not None and value.shape != (classes,):
            raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}; it must be [{classes}]")
    _check_labels(op, "target", call.target, x, call.ignore_index)
    if call.teacher_probs and teacher_weight is not None:
        raise ValueError(f"{op}: teacher_probs says that teacher holds probabilities; pass them without teacher_weight")
    if call.target is None and call.hard_weight:
        raise ValueError(f"{op}: hard_weight is {call.hard_weight}, but there is no target; pass labels, or 0")
    if teacher_weight is None and teacher_bias is not None:
        raise ValueError(f"{op}: teacher_bias is given without teacher_weight; add it to the teacher's logits")
    if call.divergence not in DIVERGENCES:
        known = ", ".join(map(repr, DIVERGENCES))
        raise ValueError(f"{op}: divergence is {call.divergence!r}; it must be one of {known}")
    if not 0 <= call.beta <= 1:
        raise ValueError(f"{op}: beta is {call.beta}; it must be between 0 and 1")
    if not call.temperature > 0:
        raise ValueError(f"{op}: temperature is {call.temperature}; it must be above 0")
    if call.chunk_tokens < 0:
        raise ValueError(f"{op}: chunk_tokens is {call.chunk_tokens}; it must be 0 (the library chooses) or more")
    if grad_mask is not None and len(grad_mask) != 3:
        raise ValueError(f"{op}: grad_mask is {list(grad_mask)}; it must have 3 entries: x, weight, bias")


def _check_teacher(op: str, x: Tensor, teacher: Tensor, teacher_weight: Tensor | None, classes: int) -> None:
    if teacher.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op}: teacher has shape {tuple(teacher.shape)}; before its last dim it must be x's {tuple(x.shape[:-1])}"
        )
    if teacher_weight is None and teacher.shape[-1] != classes:
        raise ValueError(
            f"{op}: teacher has shape {tuple(teacher.shape)}; without teacher_weight it must be [..., {classes}]"
        )
    if teacher_weight is not None and teacher_weight.shape != (classes, teacher.shape[-1]):
        raise ValueError(
            f"{op}: teacher_weight has shape {tuple(teacher_weight.shape)}; it must be "
            f"[{classes}, {teacher.shape[-1]}]: both models have the same classes"
        )


_TRITON = {"triton": "tilesmith.ops.loss.triton.distill"}
_CHUNKED = {**_TRITON, "chunked": "tilesmith.ops.loss.chunked.distill"}
_GRADIENTS = ("dx", "dtarget")

kl_div_vjp = Op(reference.kl_div_vjp, fake=_fake_kl_vjp, outputs=_GRADIENTS, kernels=_TRITON)
kl_div = Op(
    reference.kl_div,
    fake=_fake_kl,
    vjp=kl_div_vjp,
    outputs=("loss",),
    check=_check_kl,
    kernels=_TRITON,
    sharding=sharding.divergence,
)

jsd_vjp = Op(reference.jsd_vjp, fake=_fake_jsd_vjp, outputs=_GRADIENTS, kernels=_TRITON)
jsd = Op(
    reference.jsd,
    fake=_fake_jsd,
    vjp=jsd_vjp,
    outputs=("loss", "count"),
    public=1,
    check=_check_jsd,
    kernels=_TRITON,
    sharding=sharding.divergence,
)

tvd_vjp = Op(reference.tvd_vjp, fake=_fake_tvd_vjp, outputs=_GRADIENTS, kernels=_TRITON)
tvd = LossWithGradients(
    reference.tvd,
    fake=_fake_tvd,
    vjp=tvd_vjp,
    outputs=("loss", "count", "signs"),
    public=1,
    check=_check_tvd,
    kernels=_TRITON,
    sharding=sharding.divergence,
    differentiable=("x", "target"),
)

linear_distillation_vjp = Op(
    reference.linear_distillation_vjp,
    fake=linear_distillation_vjp_arguments(fakes.linear_vjp),
    outputs=("dx", "dweight", "dbias"),
    kernels=_CHUNKED,
)
linear_distillation = LossWithGradients(
    reference.linear_distillation,
    fake=_fake_linear,
    vjp=linear_distillation_vjp,
    outputs=("loss", "parts", "x_grad", "weight_grad", "bias_grad"),
    public=2,
    check=_check_linear,
    autocast=("x", "teacher"),
    kernels=_CHUNKED,
    sharding=sharding.linear_distillation,
)
