"""The loss family: what the losses are, what they accept and which kernels they have.

Legend: V classes (the vocabulary), K features of a token, C tokens of a chunk; [...] the shape of the tokens.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype
from tilesmith.engine import Choice, Op
from tilesmith.engine.backends import declare_backend
from tilesmith.engine.memory import ChunkedOp
from tilesmith.engine.metadata import describer
from tilesmith.engine.sharding import distributed
from tilesmith.hardware.detect import Arch
from tilesmith.ops.loss import checks, fakes, reference, sharded
from tilesmith.ops.loss.arguments import (
    cross_entropy_arguments,
    cross_entropy_vjp_arguments,
    linear_cross_entropy_arguments,
    linear_cross_entropy_vjp_arguments,
)
from tilesmith.ops.loss.memory import chosen_mode, described_mode, linear_cross_entropy_need
from tilesmith.ops.loss.pitch import empty_rows


@cross_entropy_arguments
def _fake(call) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_loss(call.logits, call.target, call.reduction)


def _fake_loss(x: Tensor, target: Tensor, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    shapes = target.shape if reduction == "none" else (), target.shape, 2 if reduction == "mean" else 0
    loss, lse, divisors = (x.new_empty(shape, dtype=sum_dtype(x)) for shape in shapes)
    return loss, lse, divisors


@cross_entropy_vjp_arguments
def _fake_vjp(call) -> Tensor:
    return call.logits.new_empty(call.logits.shape if call.output_mask[0] else 0)


@linear_cross_entropy_arguments
def _fake_linear(call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, weight, reduction = call.x, call.weight, call.reduction
    mask = reference.gradients_now(call.grad_mask, reduction, call.mode)
    keeps = reference.keeps_logit_grad(call.grad_mask, reduction, call.mode)
    return (
        *_fake_loss(x, call.target, reduction),
        *fakes.gradients_now(x, weight, mask, reference.summed_dtype(weight, call.accumulate_fp32)),
        empty_rows(x, call.target.shape, weight.shape[0]) if keeps else x.new_empty(0),
        x.new_empty(call.target.shape if keeps else 0, dtype=sum_dtype(x)),
    )


def _describer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Metadata of a call: a field per parameter, how many classes there are, whether scores are smoothed, turned (by a
    scale that is not above 0) or capped."""
    parameters = tuple(inspect.signature(function).parameters)
    plain = describer(name, parameters)
    at_weight = parameters.index("weight")
    at_smoothing, at_scale, at_cap = (parameters.index(n) for n in ("label_smoothing", "scale", "softcap"))
    kind = namedtuple(f"{name}_call", [*parameters, "arch", "classes", "smoothed", "turned", "capped"])

    def describe(*args: Any) -> Any:
        smoothed, turned, capped = args[at_smoothing] != 0, not args[at_scale] > 0, args[at_cap] != 0
        return kind(*plain(*args), args[at_weight].shape[0], smoothed, turned, capped)

    return describe


class LossWithGradients(ChunkedOp):
    """An op that computes gradients along with the loss, so that its call must say which ones autograd will ask for.

    differentiable: the inputs that its last argument, the mask, is of.
    """

    def __init__(self, *args: Any, differentiable: tuple[str, ...] = ("x", "weight", "bias"), **kwargs: Any) -> None:
        super().__init__(*args, internal=("grad_mask",), **kwargs)
        self._differentiable = differentiable

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        full = super().bind(args, kwargs)
        if full[-1] is not None or not torch.is_grad_enabled():
            return full
        inputs = (full[self.parameters.index(name)] for name in self._differentiable)
        wanted = [isinstance(t, Tensor) and t.requires_grad for t in inputs]
        return (*full[:-1], wanted) if any(wanted) else full


class LinearCrossEntropy(LossWithGradients):
    """linear_cross_entropy, whose call also says where the gradients will come from."""

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        full, at = Op.bind(self, args, kwargs), self.parameters.index("mode")
        if distributed(full) and not sharded.classes_sharded(full):
            return full  # each rank's own call chooses, by what the rank holds
        if full[at] == "" and all(isinstance(full[i], Tensor) for i in range(3)):  # else the check says what is wrong
            mode = "chunks" if distributed(full) else chosen_mode(*full)
            full = (*full[:at], mode, *full[at + 1 :])
        return super().bind(full, {})

    def explain(
        self, *args: Any, compiled: bool = False, arch: str | Arch | None = None, gradient: bool = False, **kwargs: Any
    ) -> Choice:
        """As `Op.explain`, and which mode serves and why."""
        choice = super().explain(*args, compiled=compiled, arch=arch, gradient=gradient, **kwargs)
        given = Op.bind(self, args, kwargs)
        if distributed(given):
            mode = sharded.described_mode(given)
        else:
            asked = given[self.parameters.index("mode")]
            mode = described_mode(asked, *self.bind(args, kwargs), compiled=compiled)
        return replace(choice, note="; ".join(filter(None, (choice.note, mode))))


declare_backend("chunked")
_KERNELS = {"triton": "tilesmith.ops.loss.triton.cross_entropy", "chunked": "tilesmith.ops.loss.chunked.cross_entropy"}
_LINEAR_KERNELS = {**_KERNELS, "triton": "tilesmith.ops.loss.triton.linear"}
_FORWARD_KERNELS = {**_LINEAR_KERNELS, "hopper": "tilesmith.ops.loss.hopper.linear"}

cross_entropy_vjp = Op(
    reference.cross_entropy_vjp,
    fake=_fake_vjp,
    outputs=("dlogits",),
    kernels=_KERNELS,
)

cross_entropy = Op(
    reference.cross_entropy,
    fake=_fake,
    vjp=cross_entropy_vjp,
    outputs=("loss", "lse", "divisors"),
    public=1,
    check=checks.check_cross_entropy,
    sharding=sharded.cross_entropy,
    kernels=_KERNELS,
)

linear_cross_entropy_vjp = Op(
    reference.linear_cross_entropy_vjp,
    fake=linear_cross_entropy_vjp_arguments(fakes.linear_vjp),
    outputs=("dx", "dweight", "dbias"),
    kernels=_LINEAR_KERNELS,
)

linear_cross_entropy = LinearCrossEntropy(
    reference.linear_cross_entropy,
    fake=_fake_linear,
    vjp=linear_cross_entropy_vjp,
    outputs=("loss", "lse", "divisors", "x_grad", "weight_grad", "bias_grad", "logit_grad", "logit_factors"),
    public=1,
    check=checks.check_linear_cross_entropy,
    describe=_describer("linear_cross_entropy", reference.linear_cross_entropy),
    sharding=sharded.linear_cross_entropy,
    autocast=("x",),
    chunk="chunk_tokens",
    need=linear_cross_entropy_need,
    kernels=_FORWARD_KERNELS,
)
