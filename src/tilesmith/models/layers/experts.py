"""Mixture-of-experts layers of transformers models: experts whose weights are stacked in tensors of three dims."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine import tracing
from tilesmith.engine.sharding import distributed
from tilesmith.engine.torch_private import without_modes
from tilesmith.models.layers.parameter_adapters import (
    adapted,
    factors,
    is_wrapper,
    kinds,
    rejection_reason,
    twin,
    without_parametrizations,
)
from tilesmith.models.reach import ran, reaches
from tilesmith.nn.norm import casting_child
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
        return child(hidden_states, top_k_index, top_k_weights)
    args = experts_of(module, hidden_states, top_k_index, top_k_weights, found)
    if not _served(args):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    ran(module, "experts")
    return ops.experts(*args)


def _learn(module: nn.Module) -> None:
    """Find out once what `module` computes."""
    if not hasattr(module, _KNOWN):
        try:
            with without_modes():  # torch.export runs this, too, and its tensors have no values
                module.__dict__[_KNOWN] = recognise(module)
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
    whole and, but under autocast, of one dtype."""
    x, up, down, _, _, *biases = args[:7]
    one = all(t is None or t.dtype == x.dtype for t in (up, down, *biases)) or torch.is_autocast_enabled(x.device.type)
    return reaches("experts", x) and one and not distributed((*args, *more))


@dataclass(frozen=True)
class ExpertsForm(Form):
    """Stacked experts by the op."""

    experts: StackedExperts

    def namespace(self, base: type) -> dict[str, Any]:
        found, (first, second, third) = self.experts, (names := _arguments(base))

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if not _only(names, args, kwargs):
                return base.forward(self, *args, **kwargs)
            x, indices = given(first, 0, args, kwargs), given(second, 1, args, kwargs)
            weights = given(third, 2, args, kwargs)
            child = casting_child(self, x)
            if child is not None:
                ran(self, "experts_fp8")
                return child(x, indices, weights)
            call = experts_of(self, x, indices, weights, found)
            if not _served(call):
                return base.forward(self, *args, **kwargs)
            ran(self, "experts")
            return ops.experts(*call)

        return {"forward": forward, _KNOWN: found}


@dataclass(frozen=True)
class LoraExpertsForm(Form):
    """PEFT's wrappers around stacked experts, of which the outermost is swapped: the op adds the adapters.

    names: what the forward of the experts calls tokens, experts and their weights."""

    experts: StackedExperts
    names: tuple[str, ...]

    def namespace(self, base: type) -> dict[str, Any]:
        found, (first, second, third) = self.experts, (names := self.names)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            inner, lora = self.get_base_layer(), factors(self, found.up, found.transposed)
            if first in kwargs or not _only(names, args, kwargs):
                lora = None
            if lora is None:
                return base.forward(self, *args, **kwargs)
            indices, weights = given(second, 1, args, kwargs), given(third, 2, args, kwargs)
            call = experts_of(inner, args[0], indices, weights, found)
            if not _served(call, lora.values()):
                return base.forward(self, *args, **kwargs)
            ran(self, "experts")
            return ops.experts(*call, **lora)

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
        if (reason := _quantised(module)) is not None:
            return Skip(reason)
        if _up(module) is None:
            return None
        if _asked(module) not in _REPLACED:
            return Skip(f"its experts were set to {_asked(module)}", wanted=False)
        if getattr(module, "_is_expert_parallel", False):
            return Skip(f"transformers spreads its experts over ranks; load it with experts_implementation={NAME!r}")
        try:
            found = self._verdicts.of(module, lambda: recognise(module))
        except Unlike as verdict:
            return Skip(str(verdict))
        return Replace(ExpertsForm(found), ("experts",), str(found))

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
        form = LoraExpertsForm(found, _arguments(original_class(type(inner))))
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


def recognise(module: nn.Module) -> StackedExperts:
    """What `module` computes, found by running its class with small weights. Raises `Unlike`."""
    if (reason := _quantised(module)) is not None:
        raise Unlike(reason)
    module = without_parametrizations(module)
    up = _up(module)
    if up is None:
        raise Unlike("it has no stacked weights of three dims")
    held, others = (getattr(module, name).shape[0] for name in (up, "down_proj"))
    if held != others:  # LongCat-Flash: what chooses one of the rest passes unchanged
        raise Unlike(f"its {up} has {held} experts and its down_proj {others}")
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
    _check_beyond(module, forward, known[0])
    return known[0]


def _check_beyond(module: nn.Module, forward: Callable[..., Tensor], found: StackedExperts) -> None:
    """Raise `Unlike` where an index beyond the last expert, which the op leaves out, adds something."""
    twin, (x, indices, weights) = _twin(module, found.up, found.transposed, torch.float32, 0.3)
    indices[::2, 0] = twin.down_proj.shape[0]
    try:
        wanted = probe.call(forward, twin, x, indices, weights)
    except Unlike:
        return  # it takes no such index
    if not _agrees(twin, found, (x, indices, weights), wanted):
        raise Unlike("an index beyond the last expert adds something, which ops.experts leaves out")


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
