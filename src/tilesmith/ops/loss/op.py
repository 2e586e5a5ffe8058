"""The loss family: what the losses are, what they accept and which kernels they have.

Legend: V classes (the vocabulary), K features of a token, C tokens of a chunk; [...] the shape of the tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Choice, Op
from tilesmith.ops.loss import reference, sharded
from tilesmith.ops.loss.memory import chosen_mode, described_mode, linear_cross_entropy_need
from tilesmith.ops.memory import ChunkedOp

INTEGERS = (torch.int32, torch.int64)
REDUCTIONS = ("mean", "sum", "none")
MODES = ("", "keep", "chunks", "recompute")


def _acc(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_loss(logits, target, reduction)


def _fake_loss(x: Tensor, target: Tensor, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=_acc(x))
    return loss, x.new_empty(target.shape, dtype=_acc(x)), x.new_empty(2 if reduction == "mean" else 0, dtype=_acc(x))


def _fake_vjp(
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
    return logits.new_empty(logits.shape if output_mask[0] else 0)


def _fake_linear(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    mode: str,
    grad_mask: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    mask = reference.gradients_now(grad_mask, reduction, mode)
    keeps = reference.keeps_logit_grad(grad_mask, reduction, mode)
    return (
        *_fake_loss(x, target, reduction),
        x.new_empty(x.shape if mask[0] else 0),
        weight.new_empty(weight.shape if mask[1] else 0, dtype=reference.summed_dtype(weight, accumulate_fp32)),
        x.new_empty(weight.shape[0] if mask[2] else 0, dtype=_acc(x)),
        x.new_empty((*target.shape, weight.shape[0]) if keeps else 0),
    )


def _fake_linear_vjp(
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
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (x, weight, weight[:, 0] if bias is None else bias)
    dx, dweight, dbias = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip(inputs, output_mask))
    return dx, dweight, dbias


def _check(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"cross_entropy: logits has dtype {logits.dtype}; it must be a floating dtype")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits has shape {tuple(logits.shape)}; it must be [..., V] with V of at least 1"
        )
    _check_tokens("cross_entropy", "logits", logits, target)
    _check_class_weight("cross_entropy", "weight", weight, logits, logits.shape[-1])
    _check_terms("cross_entropy", label_smoothing, z_loss, softcap, reduction)


def _check_linear(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    mode: str,
    grad_mask: Sequence[bool] | None,
) -> None:
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if not value.is_floating_point():
            raise TypeError(f"linear_cross_entropy: {name} has dtype {value.dtype}; it must be a floating dtype")
        if value.device != x.device:
            raise ValueError(
                f"linear_cross_entropy: {name} is on {value.device}, x on {x.device}; move them to one device"
            )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"linear_cross_entropy: x has shape {tuple(x.shape)}; it must be [..., K] with K of at least 1"
        )
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"linear_cross_entropy: weight has shape {tuple(weight.shape)}; for this x it must be [V, {x.shape[-1]}] "
            "with V of at least 1"
        )
    classes = weight.shape[0]
    if bias is not None and bias.shape != (classes,):
        raise ValueError(f"linear_cross_entropy: bias has shape {tuple(bias.shape)}; it must be [{classes}]")
    if chunk_tokens < 0:
        raise ValueError(
            f"linear_cross_entropy: chunk_tokens is {chunk_tokens}; it must be 0 (the library chooses) or more"
        )
    if mode not in MODES:
        raise ValueError(
            f"linear_cross_entropy: mode is {mode!r}; it must be {', '.join(map(repr, MODES[1:]))} or '' (the library "
            "chooses)"
        )
    if mode == "keep" and x.dtype == torch.float16:
        raise ValueError("linear_cross_entropy: mode is 'keep' with a float16 x; it must be 'chunks' or 'recompute'")
    if grad_mask is not None and len(grad_mask) != 3:
        raise ValueError(
            f"linear_cross_entropy: grad_mask is {list(grad_mask)}; it must have 3 entries: x, weight, bias"
        )
    _check_tokens("linear_cross_entropy", "x", x, target)
    _check_class_weight("linear_cross_entropy", "class_weight", class_weight, x, classes)
    _check_terms("linear_cross_entropy", label_smoothing, z_loss, softcap, reduction)


def _check_tokens(op: str, name: str, x: Tensor, target: Tensor) -> None:
    if target.dtype not in INTEGERS:
        raise TypeError(
            f"{op}: target has dtype {target.dtype}; it must hold labels, int64 or int32 (no probabilities)"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: target has shape {tuple(target.shape)}; for {name} of shape {tuple(x.shape)} "
            f"it must be {tuple(x.shape[:-1])}"
        )
    if target.device != x.device:
        raise ValueError(f"{op}: target is on {target.device}, {name} on {x.device}; move them to one device")


def _check_class_weight(op: str, name: str, weight: Tensor | None, x: Tensor, classes: int) -> None:
    if weight is None:
        return
    if not weight.is_floating_point():
        raise TypeError(f"{op}: {name} has dtype {weight.dtype}; it must be a floating dtype")
    if weight.shape != (classes,):
        raise ValueError(f"{op}: {name} has shape {tuple(weight.shape)}; it must be [{classes}], one for each class")
    if weight.device != x.device:
        raise ValueError(
            f"{op}: {name} is on {weight.device}, the other tensors on {x.device}; move them to one device"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} requires a gradient, and class weights receive none; pass {name}.detach()")


def _check_terms(op: str, label_smoothing: float, z_loss: float, softcap: float, reduction: str) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}; it must be between 0 and 1")
    if not z_loss >= 0:
        raise ValueError(f"{op}: z_loss is {z_loss}; it must be 0 or more")
    if not softcap >= 0:
        raise ValueError(f"{op}: softcap is {softcap}; it must be 0 (none) or more")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; it must be one of {', '.join(map(repr, REDUCTIONS))}")


class LossWithGradients(ChunkedOp):
    """An op that computes gradients along with the loss, so that its call must say which ones autograd will ask for."""

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        full = super().bind(args, kwargs)
        if full[-1] is not None or not torch.is_grad_enabled():
            return full
        inputs = (full[self.parameters.index(name)] for name in ("x", "weight", "bias"))
        wanted = [t is not None and t.requires_grad for t in inputs]
        return (*full[:-1], wanted) if any(wanted) else full


class LinearCrossEntropy(LossWithGradients):
    """linear_cross_entropy, whose call also says where the gradients will come from."""

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        full, at = Op.bind(self, args, kwargs), self.parameters.index("mode")
        if full[at] == "":
            full = (*full[:at], chosen_mode(*full), *full[at + 1 :])
        return super().bind(full, {})

    def explain(self, *args: Any, compiled: bool = False, **kwargs: Any) -> Choice:
        """As `Op.explain`, and which mode serves and why."""
        choice = super().explain(*args, compiled=compiled, **kwargs)
        asked = Op.bind(self, args, kwargs)[self.parameters.index("mode")]
        mode = described_mode(asked, *self.bind(args, kwargs))
        return replace(choice, note="; ".join(filter(None, (choice.note, mode))))


cross_entropy_vjp = Op(
    reference.cross_entropy_vjp,
    fake=_fake_vjp,
    outputs=("dlogits",),
    kernels={"triton": "tilesmith.ops.loss.triton", "chunked": "tilesmith.ops.loss.chunked"},
)

cross_entropy = Op(
    reference.cross_entropy,
    fake=_fake,
    vjp=cross_entropy_vjp,
    outputs=("loss", "lse", "divisors"),
    public=1,
    check=_check,
    sharding=sharded.cross_entropy,
    kernels={"triton": "tilesmith.ops.loss.triton", "chunked": "tilesmith.ops.loss.chunked"},
)

linear_cross_entropy_vjp = Op(
    reference.linear_cross_entropy_vjp,
    fake=_fake_linear_vjp,
    outputs=("dx", "dweight", "dbias"),
    kernels={"triton": "tilesmith.ops.loss.triton", "chunked": "tilesmith.ops.loss.chunked"},
)

linear_cross_entropy = LinearCrossEntropy(
    reference.linear_cross_entropy,
    fake=_fake_linear,
    vjp=linear_cross_entropy_vjp,
    outputs=("loss", "lse", "divisors", "x_grad", "weight_grad", "bias_grad", "logit_grad"),
    public=1,
    check=_check_linear,
    sharding=sharded.linear_cross_entropy,
    autocast=("x",),
    chunk="chunk_tokens",
    need=linear_cross_entropy_need,
    kernels={"triton": "tilesmith.ops.loss.triton", "chunked": "tilesmith.ops.loss.chunked"},
)
