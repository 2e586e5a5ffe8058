"""The output layer of a language model and its loss: cross-entropy without computing the logits."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.torch_private import autocasts, constant_in_graphs
from tilesmith.models.layers.logits import LazyLogits
from tilesmith.rewrite import CALLS, Form, Replace, Rule, Site, Skip, forms, given, original_class
from tilesmith.rewrite.variants import obstacle

_LAZY = "_tilesmith_lazy"  # of an output layer: whether the model that holds it is called with labels


@dataclass(frozen=True)
class LabelledForm(Form):
    """A model whose output layer, named by its path, may be lazy while the model is called with labels."""

    head: str

    def namespace(self, base: type) -> dict[str, Any]:
        path, whole = self.head, base.forward
        parts = path.split(".")
        holders = tuple(".".join(parts[:end]) for end in range(1, len(parts)))
        place = list(inspect.signature(whole).parameters).index("labels") - 1
        # torch.compile puts a CrossEntropyLoss object into the graph without asking its input (PyTorch 2.13).
        traceable = "CrossEntropyLoss" not in inspect.unwrap(whole).__code__.co_names

        @constant_in_graphs
        def known() -> tuple[str, tuple[str, ...], int, bool]:
            """What a forward has to know, as one thing that a compiled model is guarded by."""
            return path, holders, place, traceable

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path, holders, place, traceable = known()
            if given("labels", place, args, kwargs) is None or (torch.compiler.is_compiling() and not traceable):
                return whole(self, *args, **kwargs)
            head = _at(self, path)
            head._tilesmith_lazy = not any(_is_seen(_at(self, holder)) for holder in holders)
            try:
                return whole(self, *args, **kwargs)
            finally:
                head._tilesmith_lazy = False

        return {"forward": forward}

    def leave(self, module: nn.Module) -> None:
        for part in module.modules():  # the head may have been replaced since
            part.__dict__.pop(_LAZY, None)


@dataclass(frozen=True)
class HeadForm(Form):
    """A linear layer that returns `LazyLogits` while the model that holds it trains with labels."""

    def namespace(self, base: type) -> dict[str, Any]:
        def forward(self: nn.Linear, input: Tensor) -> Tensor | LazyLogits:
            # Without the attribute after undo, where other code kept this very method to call it.
            weight = _deferrable_weight(self) if getattr(self, _LAZY, False) else None
            if weight is None:
                return base.forward(self, input)
            kind = input.device.type
            lowered = autocasts(kind) and input.dtype is not torch.float64  # as PyTorch's autocast
            dtype = torch.get_autocast_dtype(kind) if lowered else input.dtype
            # A compiled graph must not return what the module counts in.
            calls = None if torch.compiler.is_compiling() else self.__dict__.get(CALLS)
            return LazyLogits(_cast(input, dtype), _cast(weight, dtype), _cast(self.bias, dtype), dtype, calls=calls)

        return {"forward": forward, _LAZY: False}


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x in `dtype`; x itself where it has it, so that a compiled model has no parameter among its outputs."""
    return x if x is None or x.dtype is dtype else x.to(dtype)


def _deferrable_weight(head: nn.Linear) -> Tensor | None:
    """The weight of an output layer, if it will still be there when the loss is computed, and nobody looks at the
    output; None otherwise. It is read once: a parametrization computes it at each access, and may change by that."""
    seen = (
        not (head.training and torch.is_grad_enabled())
        # under FSDP2 a layer that is wrapped by itself frees its weight when its forward returns
        or _wrapped(type(head))
        or _is_seen(head)
        or torch_private.batched()  # vmap returns tensors alone
        or "_is_replica" in head.__dict__  # hasattr of a module raises and catches, in a guard at each call
    )
    weight = None if seen else head.weight
    # Sharded (DTensor) and quantised weights have types of their own; DeepSpeed takes the storage away (ds_id).
    plain = type(weight) in (nn.Parameter, Tensor) or isinstance(weight, torch._subclasses.FakeTensor)
    return weight if plain and not hasattr(weight, "ds_id") else None


def _is_seen(module: nn.Module) -> bool:
    """Whether somebody looks at what a module returns, and may ask whether it is a tensor."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


@constant_in_graphs
def _wrapped(cls: type) -> bool:
    """Whether FSDP2 wraps modules of this class one by one."""
    return hasattr(cls, "_get_fsdp_state")


class LossRule(Rule):
    """Models that name their output layer, take labels, and so compute a loss of its output."""

    name = "loss"
    part = "loss"

    def match(self, site: Site) -> Replace | Skip | None:
        held = _output_layer(site.module)
        if held is not None:
            path, head = held
            why = _unfit(head) or obstacle(head)
            if why is not None:
                return Skip(f"its output layer {path}: {why}")
            reason = f"the loss of {path} is computed from its input; the logits only if they are used"
            return Replace(LabelledForm(path), ("linear_cross_entropy",), reason)
        for holder in site.holders():
            heads = [_at(holder, form.head) for form in forms(holder) if isinstance(form, LabelledForm)]
            if any(head is site.module for head in heads):
                if _unfit(site.module) is not None:  # it has taken the place of one that was fit
                    return None
                return Replace(HeadForm(), ("linear_cross_entropy",), "its output is lazy while training with labels")
        return None


def _at(model: nn.Module, path: str) -> nn.Module:
    return functools.reduce(getattr, path.split("."), model)


def _output_layer(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The path and the module of the output layer of a model that takes labels."""
    # Asked of the class: wrappers such as PEFT's hand every unknown attribute on to the model they hold.
    find = getattr(original_class(type(model)), "get_output_embeddings", None)
    if find is None or "labels" not in inspect.signature(original_class(type(model)).forward).parameters:
        return None
    try:
        head = find(model)
    except NotImplementedError:
        return None
    return next(((name, child) for name, child in model.named_modules() if child is head and name), None)


def _unfit(head: nn.Module) -> str | None:
    cls = original_class(type(head))
    if cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} is not a plain linear layer"
    return None
