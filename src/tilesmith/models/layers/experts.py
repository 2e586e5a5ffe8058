"""Mixture-of-experts layers of transformers models: experts whose weights are stacked in tensors of three dims."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine import tracing
from tilesmith.engine.sharding import distributed
from tilesmith.engine.torch_private import autocasts, without_modes
from tilesmith.models.layers.parameter_adapters import (
    adapted,
    factors,
    is_wrapper,
    kinds,
    rejection_reason,
)
from tilesmith.models.layers.stacked_experts import (
    StackedExperts,
    check_adapters,
    experts_of,
    first_weight,
    quantised,
    recognise,
    wraps,
)
from tilesmith.models.reach import PassedOver, Settings, observed, passed_over, ran, reaches, untouched
from tilesmith.nn.norm import CASTER, casting_child
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, given, original_class, probe

NAME = "tilesmith"
_REPLACED = (None, "eager", "grouped_mm", "batched_mm", NAME)
_KNOWN = "_tilesmith_experts"
_WITH = "_tilesmith_experts_with"  # the children and settings of a module whose first call found that out


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts as transformers calls them: hidden_states [T, C], top_k_index and top_k_weights [T, K].

    What the module computes is found out at its first call. Where no kernel of the library is, transformers' grouped
    products serve the call. Raises ValueError for a module that computes something else.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.comptime.comptime(_learn_while_tracing, lambda: _learn(module))
    else:
        _learn(module)
    found = getattr(module, _KNOWN)
    child = casting_child(module, hidden_states)
    if child is not None:
        ran(module, "experts_fp8")
        return child(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)
    args = experts_of(module, hidden_states, top_k_index, top_k_weights, found)
    if not _served(args) or any(map(observed, module.children())):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    ran(module, "experts")
    return ops.experts(*args).to(hidden_states.dtype)  # autocast's is another one


def _learn(module: nn.Module) -> None:
    """Find out what `module` computes, once for the children and settings that it has."""
    parts = _children(module), probe.settings_of(module)
    if module.__dict__.get(_WITH) != parts:
        try:
            with without_modes():  # torch.export runs this, too, and its tensors have no values
                module.__dict__[_KNOWN], module.__dict__[_WITH] = recognise(module), parts
        except Unlike as verdict:
            raise ValueError(
                f"experts_implementation {NAME!r} does not serve {type(module).__name__}: {verdict}; "
                "choose 'grouped_mm' for this model"
            ) from None


def _learn_while_tracing(context: Any) -> None:
    """For `torch._dynamo.comptime`: the same for the local `module`, which Python runs and no graph holds."""
    try:
        _learn(tracing.module_of(context, "module"))
    except ValueError as problem:
        context.graph_break(str(problem))  # Python then makes the call, which raises


def register_experts() -> None:
    """Make `experts_implementation="tilesmith"` known to transformers; nothing where it has no such choice."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _served(args: tuple, more: Iterable[Any] = ()) -> bool:
    """Whether the op takes a call with the arguments of `experts_of` and `more` tensors: a kernel is there, tensors are
    whole, not packed and, but under autocast, of one dtype, and each token has experts and weights of its own."""
    x, up, down, indices, weights, *biases = args[:7]
    one = all(t is None or t.dtype == x.dtype for t in (up, down, *biases)) or autocasts(x.device.type)
    packed = any(map(wraps, (up, down)))
    whole = _fits(x, indices, weights) and not packed and not distributed((*args, *more))
    return reaches("experts", x) and one and whole


def _fits(x: Tensor, indices: Tensor, weights: Tensor) -> bool:
    """Whether each token has experts and weights of its own."""
    return indices.shape[:-1] == x.shape[:-1] and weights.shape == indices.shape


@dataclass(frozen=True)
class ExpertsForm(Form):
    """Stacked experts by the op. passed_over: the children that are not called any more. settings: those that the
    module must still have."""

    experts: StackedExperts
    passed_over: tuple[PassedOver, ...] = ()
    settings: Settings = ()

    def namespace(self, base: type) -> dict[str, Any]:
        found, as_it_was = self.experts, untouched(self.passed_over, self.settings)
        first, second, third = names = _arguments(base)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if not _only(names, args, kwargs):
                return base.forward(self, *args, **kwargs)
            x, indices = given(first, 0, args, kwargs), given(second, 1, args, kwargs)
            weights = given(third, 2, args, kwargs)
            if not as_it_was(self) or _asked(self) not in _REPLACED or not _fits(x, indices, weights):
                return base.forward(self, *args, **kwargs)
            child = casting_child(self, x)
            if child is not None:
                ran(self, "experts_fp8")
                return child(x, indices, weights).to(x.dtype)
            call = experts_of(self, x, indices, weights, found)
            if not _served(call):
                return base.forward(self, *args, **kwargs)
            ran(self, "experts")
            return ops.experts(*call).to(x.dtype)

        return {"forward": forward, _KNOWN: found}


@dataclass(frozen=True)
class LoraExpertsForm(Form):
    """PEFT's wrappers around stacked experts, of which the outermost is swapped: the op adds the adapters.

    names: what the forward of the experts calls tokens, experts and their weights. passed_over: their children, which
    are not called any more. settings: those that the experts must still have.
    """

    experts: StackedExperts
    names: tuple[str, ...]
    passed_over: tuple[PassedOver, ...] = ()
    settings: Settings = ()

    def namespace(self, base: type) -> dict[str, Any]:
        found, as_it_was = self.experts, untouched(self.passed_over, self.settings)
        first, second, third = names = self.names

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            inner, lora = self.get_base_layer(), factors(self, found.up, found.transposed)
            own = first in kwargs or not _only(names, args, kwargs) or _asked(inner) not in _REPLACED
            if lora is None or own or not as_it_was(inner):
                return base.forward(self, *args, **kwargs)
            indices, weights = given(second, 1, args, kwargs), given(third, 2, args, kwargs)
            call = experts_of(inner, args[0], indices, weights, found)
            if not _served(call, lora.values()):
                return base.forward(self, *args, **kwargs)
            ran(self, "experts")
            return ops.experts(*call, **lora).to(args[0].dtype)

        return {"forward": forward}


class ExpertsRule(Rule):
    """Modules with stacked weights of three dims whose forward takes tokens, experts and their weights."""

    name = "experts"
    part = "ffn"

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        if is_wrapper(module):
            within = any(is_wrapper(holder) for holder in itertools.islice(site.holders(), 1))
            return None if within else self._wrapped(module)
        if (reason := quantised(module)) is not None:
            return Skip(reason)
        if first_weight(module) is None:
            return None
        if _asked(module) not in _REPLACED:
            return Skip(f"its experts were set to {_asked(module)}", wanted=False)
        if getattr(module, "_is_expert_parallel", False):
            return Skip(f"transformers spreads its experts over ranks; load it with experts_implementation={NAME!r}")
        try:
            found = self._verdicts.of(module, lambda: recognise(module), probe.number_of(module))
        except Unlike as verdict:
            return Skip(str(verdict))
        return Replace(ExpertsForm(found, _children(module), probe.settings_of(module)), ("experts",), str(found))

    def _wrapped(self, module: nn.Module) -> Replace | Skip | None:
        """The same for the outermost of wrappers that add adapters to stacked weights."""
        inner = module.get_base_layer()
        up = first_weight(inner)
        if up is None or _asked(inner) not in _REPLACED:
            return None
        reason = rejection_reason(module, up)
        if reason is not None:
            return Skip(f"{reason}: adapters are added to whole weights, by PEFT")
        try:
            found = self._verdicts.of(inner, lambda: recognise(inner), probe.number_of(inner))
            self._verdicts.of(inner, lambda: check_adapters(module, inner, found), *kinds(module))
        except Unlike as verdict:
            return Skip(str(verdict))
        names = _arguments(original_class(type(inner)))
        form = LoraExpertsForm(found, names, _children(inner), probe.settings_of(inner))
        return Replace(form, ("experts",), f"{found}, with adapters of {' and '.join(adapted(module))}")


def _asked(module: nn.Module) -> str | None:
    """The kernels that the model's configuration names for its experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _arguments(cls: type) -> tuple[str, ...]:
    """What the forward of experts calls tokens, experts and their weights."""
    return tuple(list(inspect.signature(cls.forward).parameters)[1:4])


def _only(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call gives the arguments `names` and nothing else: what else a forward takes would be lost."""
    return len(args) + len(kwargs) == len(names) and all(name in names for name in kwargs)


def _children(module: nn.Module) -> tuple[PassedOver, ...]:
    """The children of experts, such as their activation; not the one that casts to 8 bits."""
    return passed_over((name, child) for name, child in module.named_children() if name != CASTER)
