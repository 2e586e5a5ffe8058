"""Mixture-of-experts layers of transformers models: experts whose weights are stacked in tensors of three dims."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine import tracing
from tilesmith.engine.sharding import distributed
from tilesmith.models.layers.parameter_adapters import (
    adapted,
    factors,
    is_wrapper,
    kinds,
    rejection_reason,
    twin,
    without_parametrizations,
)
from tilesmith.models.reach import observed, ran, reaches, untouched
from tilesmith.nn.norm import CASTER, casting_child
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, given, original_class, probe

NAME = "tilesmith"
_REPLACED = (None, "eager", "grouped_mm", "batched_mm", NAME)
_HIDDEN, _INNER, _TOKENS = 24, 8, 6
_DEVIATION = {torch.float32: 1e-5, torch.bfloat16: 0.03}
# Large values show a clamp, small ones tell the two kinds of gelu apart.
_SETTINGS = ((torch.float32, 0.3), (torch.float32, 10.0), (torch.float32, 1000.0), (torch.bfloat16, 0.3))
_SIZES = {  # attributes by which forwards of models reshape
    "hidden_size": _HIDDEN,
    "hidden_dim": _HIDDEN,
    "intermediate_size": _INNER,
    "intermediate_dim": _INNER,
    "expert_dim": _INNER,
}
_FIRST = ("gate_up_proj", "up_proj")  # what models call the first of the two stacked weights
_KNOWN = "_tilesmith_experts"
_WITH = "_tilesmith_experts_with"  # the children of a module whose first call found that out


class StackedExperts(NamedTuple):
    """What a module of experts computes, in the words of `ops.experts`. up: the name of its first weight; transposed:
    weights are [E, C, N] and [E, I, C]."""

    up: str
    transposed: bool
    activation: str
    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    up_offset: float = 0.0

    def __str__(self) -> str:
        numbers = {"limit": self.limit, "alpha": self.alpha - 1 and self.alpha, "up_offset": self.up_offset}
        told = [self.activation, *(f"{name} {value:g}" for name, value in numbers.items() if value)]
        layout = [word for word, there in (("interleaved", self.interleaved), ("transposed", self.transposed)) if there]
        return f"computes experts ({', '.join(told + layout)})"


def experts_of(module: nn.Module, x: Tensor, indices: Tensor, weights: Tensor, found: StackedExperts) -> tuple:
    """The arguments of `ops.experts` for a call of `module`."""
    up, down = getattr(module, found.up), module.down_proj
    if found.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases = getattr(module, f"{found.up}_bias", None), getattr(module, "down_proj_bias", None)
    return x, up, down, indices, weights, *biases, *found[2:]


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any
) -> Tensor:
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
        return child(hidden_states, top_k_index, top_k_weights)
    if not _served(module, hidden_states, found) or any(map(observed, module.children())):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    ran(module, "experts")
    return ops.experts(*experts_of(module, hidden_states, top_k_index, top_k_weights, found))


def _learn(module: nn.Module) -> None:
    """Find out what `module` computes, once for the children that it has."""
    children = _children(module)
    if module.__dict__.get(_WITH) != children:
        try:
            module.__dict__[_KNOWN], module.__dict__[_WITH] = recognise(module), children
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


def _served(module: nn.Module, x: Tensor, found: StackedExperts, more: Iterable[Any] = ()) -> bool:
    """Whether the op takes a call: a kernel is there, tensors are whole and, but under autocast, of one dtype."""
    up = getattr(module, found.up)
    one = x.dtype == up.dtype or torch.is_autocast_enabled(x.device.type)
    return reaches("experts", x) and one and not distributed((x, up, module.down_proj, *more))


@dataclass(frozen=True)
class ExpertsForm(Form):
    """Stacked experts by the op. passed_over: (name, class) of the children that are not called any more."""

    experts: StackedExperts
    passed_over: tuple[tuple[str, type], ...] = ()

    def namespace(self, base: type) -> dict[str, Any]:
        found, as_it_was = self.experts, untouched(self.passed_over)
        first, second, third = _arguments(base)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            x, indices = given(first, 0, args, kwargs), given(second, 1, args, kwargs)
            weights = given(third, 2, args, kwargs)
            if not as_it_was(self):
                return base.forward(self, *args, **kwargs)
            child = casting_child(self, x)
            if child is not None:
                ran(self, "experts_fp8")
                return child(x, indices, weights)
            if not _served(self, x, found):
                return base.forward(self, *args, **kwargs)
            ran(self, "experts")
            return ops.experts(*experts_of(self, x, indices, weights, found))

        return {"forward": forward, _KNOWN: found}


@dataclass(frozen=True)
class LoraExpertsForm(Form):
    """PEFT's wrappers around stacked experts, of which the outermost is swapped: the op adds the adapters.

    names: what the forward of the experts calls tokens, experts and their weights. passed_over: their children, by
    (name, class), which are not called any more.
    """

    experts: StackedExperts
    names: tuple[str, ...]
    passed_over: tuple[tuple[str, type], ...] = ()

    def namespace(self, base: type) -> dict[str, Any]:
        found, (_, second, third) = self.experts, self.names
        as_it_was = untouched(self.passed_over)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            inner, lora = self.get_base_layer(), factors(self, found.up, found.transposed)
            if not args or any(name not in (second, third) for name in kwargs) or not as_it_was(inner):
                lora = None
            if lora is None or not _served(inner, args[0], found, lora.values()):
                return base.forward(self, *args, **kwargs)
            indices, weights = given(second, 1, args, kwargs), given(third, 2, args, kwargs)
            ran(self, "experts")
            return ops.experts(*experts_of(inner, args[0], indices, weights, found), **lora)

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
        reason = _quantised(module)
        if reason is not None:
            return Skip(reason)
        if _up(module) is None:
            return None
        if _asked(module) not in _REPLACED:
            return Skip(f"its experts were set to {_asked(module)}", wanted=False)
        try:
            found = self._verdicts.of(module, lambda: recognise(module))
        except Unlike as verdict:
            return Skip(str(verdict))
        return Replace(ExpertsForm(found, _children(module)), ("experts",), str(found))

    def _wrapped(self, module: nn.Module) -> Replace | Skip | None:
        """The same for the outermost of wrappers that add adapters to stacked weights."""
        inner = module.get_base_layer()
        up = _up(inner)
        if up is None or _asked(inner) not in _REPLACED:
            return None
        reason = rejection_reason(module, up)
        if reason is not None:
            return Skip(f"{reason}: adapters are added to whole weights, by PEFT")
        try:
            found = self._verdicts.of(inner, lambda: recognise(inner))
            self._verdicts.of(inner, lambda: _check_adapters(module, inner, found), *kinds(module))
        except Unlike as verdict:
            return Skip(str(verdict))
        form = LoraExpertsForm(found, _arguments(original_class(type(inner))), _children(inner))
        return Replace(form, ("experts",), f"{found}, with adapters of {' and '.join(adapted(module))}")


def _asked(module: nn.Module) -> str | None:
    """The kernels that the model's configuration names for its experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _arguments(cls: type) -> tuple[str, ...]:
    """What the forward of experts calls tokens, experts and their weights."""
    return tuple(list(inspect.signature(cls.forward).parameters)[1:4])


def _children(module: nn.Module) -> tuple[tuple[str, type], ...]:
    """The children of experts, such as their activation, by (name, class); not the one that casts to 8 bits."""
    return tuple((name, original_class(type(c))) for name, c in module.named_children() if name != CASTER)


def recognise(module: nn.Module) -> StackedExperts:
    """What `module` computes, found by running its class with small weights. Raises `Unlike`."""
    reason = _quantised(module)
    if reason is not None:
        raise Unlike(reason)
    module = without_parametrizations(module)
    up = _up(module)
    if up is None:
        raise Unlike("it has no stacked weights of three dims")
    if getattr(module, "has_post_expert_norm", False):
        raise Unlike("it normalises what each expert gives before its weight")
    forward = inspect.unwrap(original_class(type(module)).forward)
    known = list(_candidates(module, up))
    for dtype, scale in _SETTINGS:
        agreeing = []
        for transposed in {c.transposed for c in known}:
            twin, call = _twin(module, up, transposed, dtype, scale)
            wanted = probe.call(forward, twin, *call)
            agreeing += [c for c in known if c.transposed == transposed and _agrees(twin, c, call, wanted)]
        known = agreeing
    if not known:
        raise Unlike("on small inputs it differs from down(act(gate) * up) for the activations that ops.experts has")
    return known[0]


def _quantised(module: nn.Module) -> str | None:
    """Why the experts of a module are not served: their weights are kept in fewer bits. None for other modules.

    bitsandbytes keeps such a parameter packed, as a class of its own with a `quant_state`, or with a parametrization
    that unpacks all of it when it is read.
    """
    kept = {**module._parameters}
    parametrized = getattr(module, "parametrizations", None) or {}
    kept |= {name: chain.original for name, chain in parametrized.items() if hasattr(chain, "original")}
    first = next((name for name in _FIRST if kept.get(name) is not None), None)
    if first is None or kept.get("down_proj") is None:
        return None
    for name in (first, "down_proj"):
        if hasattr(kept[name], "quant_state") or not kept[name].is_floating_point():
            how = type(parametrized[name][0] if name in parametrized else kept[name]).__name__
            return f"its {name} is quantised ({how}); quantised experts are not served"
    return None


def _up(module: nn.Module) -> str | None:
    """The name of the first of two stacked weights; None for other modules."""
    for name in _FIRST:
        first, second = module._parameters.get(name), module._parameters.get("down_proj")
        if first is not None and second is not None and first.ndim == second.ndim == 3:
            return name
    return None


def _candidates(module: nn.Module, up: str) -> Iterator[StackedExperts]:
    """Everything that the shapes of the weights and the numbers among the module's attributes allow."""
    from tilesmith.ops.moe import reference  # here, since most models have no experts

    (_, a, b), (_, p, q) = getattr(module, up).shape, module.down_proj.shape
    if up == "up_proj":
        layouts = [bool(getattr(module, "is_transposed", False))]
        for transposed, name in itertools.product(layouts, reference.UNGATED):
            if (a, b) == (q, p):
                yield StackedExperts(up, transposed, name)
        return
    layouts = [t for t, fits in ((False, (a, b) == (2 * q, p)), (True, (a, b) == (q, 2 * p))) if fits]
    numbers = {float(v) for v in module.__dict__.values() if type(v) in (int, float) and 0 < v < 1e4}
    sizes = {float(n) for n in (*getattr(module, up).shape, *module.down_proj.shape)}
    limits = [0.0, *sorted(numbers - sizes)]
    for transposed, interleaved, limit in itertools.product(layouts, (False, True), limits):
        for alpha, offset in itertools.product((1.0, *sorted(numbers - sizes - {1.0})), (0.0, 1.0)):
            yield StackedExperts(up, transposed, "swiglu", interleaved, limit, alpha, offset)
        for name in ("geglu", "geglu_erf"):
            yield StackedExperts(up, transposed, name, interleaved, limit)


def _twin(
    module: nn.Module, up: str, transposed: bool, dtype: torch.dtype, scale: float
) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    """The module with small weights, and the tokens, indices and weights of a call."""
    experts = module.down_proj.shape[0]
    wide = _INNER if up == "up_proj" else 2 * _INNER
    shapes = {up: (experts, wide, _HIDDEN), "down_proj": (experts, _HIDDEN, _INNER)}
    if transposed:
        shapes = {name: (e, b, a) for name, (e, a, b) in shapes.items()}
    shapes |= {f"{up}_bias": (experts, wide), "down_proj_bias": (experts, _HIDDEN)}
    made = {
        name: probe.wave(*shape, phase=0.7 * i, scale=0.2).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
        if module._parameters.get(name) is not None
    }
    others = [name for name, p in module._parameters.items() if p is not None and name not in made]
    if others:
        raise Unlike(f"it also has a parameter {others[0]}")
    children = {name: probe.shell(child) for name, child in module.named_children()}
    twin = probe.shell(module, made, children)
    twin.__dict__.update({name: size for name, size in _SIZES.items() if name in twin.__dict__})
    x = probe.wave(_TOKENS, _HIDDEN, phase=1.0, scale=scale).to(dtype)
    steps = torch.arange(_TOKENS * min(2, experts), device="cpu").view(_TOKENS, -1)
    scales = (1.5 + probe.wave(*steps.shape, phase=2.0, scale=0.5)).to(dtype)
    return twin, (x, (steps * 3) % experts, scales)


def _agrees(twin: nn.Module, candidate: StackedExperts, call: tuple, wanted: Any) -> bool:
    from tilesmith.ops.moe import reference

    with probe.isolated():
        found, _ = reference.experts(*experts_of(twin, *call, candidate))
    return _close(found, wanted)


def _check_adapters(module: nn.Module, inner: nn.Module, found: StackedExperts) -> None:
    """Run the wrappers `module` and those within with small adapters. Raises `Unlike` where they are not LoRA."""
    from tilesmith.ops.moe import reference

    small, call = _twin(inner, found.up, found.transposed, torch.float32, 0.3)
    wrapped = twin(module, small)
    with probe.isolated():
        ours, _ = reference.experts(
            *experts_of(small, *call, found), **(factors(wrapped, found.up, found.transposed) or {})
        )
    small.forward = functools.partial(inspect.unwrap(type(small).forward), small)
    if not _close(ours, probe.call(type(wrapped).forward, wrapped, *call)):
        raise Unlike("on small inputs its adapters do something else than LoRA")


def _close(found: Tensor, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return bool((found - wanted).abs().max() <= _DEVIATION[found.dtype] * wanted.abs().max())
