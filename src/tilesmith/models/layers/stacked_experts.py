"""What a module of stacked experts computes, found out by running its class with small weights."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith.engine.sharding import distributed
from tilesmith.models.layers.parameter_adapters import factors, twin, without_parametrizations
from tilesmith.rewrite import Unlike, original_class, probe

_HIDDEN, _INNER, _TOKENS = 24, 8, 6
_MANY = 16  # times as many tokens, of few experts
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


def recognise(module: nn.Module) -> StackedExperts:
    """What `module` computes, found by running its class with small weights. Raises `Unlike`."""
    if (reason := quantised(module)) is not None:
        raise Unlike(reason)
    module = without_parametrizations(module)
    up = first_weight(module)
    if up is None:
        raise Unlike("it has no stacked weights of three dims")
    held, others = (getattr(module, name).shape[0] for name in (up, "down_proj"))
    if held != others:  # LongCat-Flash: what chooses one of the rest passes unchanged
        raise Unlike(f"its {up} has {held} experts and its down_proj {others}")
    if getattr(module, "has_post_expert_norm", False):
        raise Unlike("it normalises what each expert gives before its weight")
    forward = inspect.unwrap(original_class(type(module)).forward)
    names = list(inspect.signature(forward).parameters)[1:]
    if len(names) < 3:
        raise Unlike(f"its forward takes ({', '.join(names)}), not tokens, experts and their weights")
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
    _check_further(module, forward, known[0])
    return known[0]


def _check_further(module: nn.Module, forward: Callable[..., Tensor], found: StackedExperts) -> None:
    """Raise `Unlike` where the module does something else in the other mode, or where an expert has most tokens (and
    may drop some), or where an index beyond the last expert, which the op leaves out, adds something."""
    twin, (x, indices, weights) = _twin(module, found.up, found.transposed, torch.float32, 0.3)
    many = x.repeat(_MANY, 1), indices.repeat(_MANY, 1).clamp(max=1), weights.repeat(_MANY, 1)
    if not _agrees(twin, found, many, probe.call(forward, twin, *many)):
        raise Unlike("it computes something else where most tokens choose one expert")
    twin.train(not module.training)
    if not _agrees(twin, found, (x, indices, weights), probe.call(forward, twin, x, indices, weights)):
        raise Unlike(f"it computes something else in {'evaluation' if module.training else 'training'}")
    indices[::2, 0] = twin.down_proj.shape[0]
    try:
        wanted = probe.call(forward, twin, x, indices, weights)
    except Unlike:
        return  # it takes no such index
    if not _agrees(twin, found, (x, indices, weights), wanted):
        raise Unlike("an index beyond the last expert adds something, which ops.experts leaves out")


def quantised(module: nn.Module) -> str | None:
    """Why the experts of a module are not served: their weights are kept in fewer bits. None for other modules.

    bitsandbytes keeps such a parameter packed, as a class of its own with a `quant_state`, or with a parametrization
    that unpacks all of it when it is read; torchao in a tensor that wraps packed ones.
    """
    kept = {**module._parameters}
    parametrized = getattr(module, "parametrizations", None) or {}
    kept |= {name: chain.original for name, chain in parametrized.items() if hasattr(chain, "original")}
    first = next((name for name in _FIRST if kept.get(name) is not None), None)
    if first is None or kept.get("down_proj") is None:
        return None
    for name in (first, "down_proj"):
        few = not kept[name].is_floating_point() or kept[name].element_size() < 2
        if few or hasattr(kept[name], "quant_state") or wraps(kept[name]):
            how = type(parametrized[name][0] if name in parametrized else kept[name]).__name__
            how = str(kept[name].dtype) if how == "Parameter" else how
            return f"its {name} is quantised ({how}); quantised experts are not supported"
    return None


def wraps(weight: Tensor) -> bool:
    """Whether a weight is made of other tensors when it is read, as quantised ones are; a DTensor is not."""
    return hasattr(weight, "__tensor_flatten__") and not distributed((weight,))


def first_weight(module: nn.Module) -> str | None:
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
    chosen = (steps * 3) % experts
    chosen[-1, -1] = experts - 1  # which some keep for tokens that nobody computes
    return twin, (x, chosen, scales)


def _agrees(twin: nn.Module, candidate: StackedExperts, call: tuple, wanted: Any) -> bool:
    from tilesmith.ops.moe import reference

    with probe.isolated():
        found, _ = reference.experts(*experts_of(twin, *call, candidate))
    return _close(found, wanted)


def check_adapters(module: nn.Module, inner: nn.Module, found: StackedExperts) -> None:
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
