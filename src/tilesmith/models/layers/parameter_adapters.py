"""Adapters that PEFT puts on stacked weights (`LoraConfig(target_parameters=...)`): where they are, and their factors.

PEFT wraps the module that holds such a parameter, once for each parameter, and at each call adds the adapter to the
whole weight. Nothing of PEFT is imported here: a wrapper is known by what it has, and what it does is found out by
running it (`LoraExpertsForm` in `experts`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.models.reach import observed
from tilesmith.rewrite import original_class, probe

_HAS = ("base_layer", "parameter_name", "lora_A", "lora_B", "scaling", "merged", "disable_adapters", "active_adapters")
_RANK = 2  # of an adapter that is run to see what it does


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` wraps one that has a parameter with an adapter."""
    return isinstance(getattr(module, "parameter_name", None), str) and all(hasattr(module, name) for name in _HAS)


def wrappers(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The wrappers around a module, outermost first, and that module."""
    found = []
    while is_wrapper(module):
        found.append(module)
        module = module.base_layer
    return found, module


def adapted(module: nn.Module) -> list[str]:
    """The names of the parameters that the wrappers `module` and those within adapt, outermost first."""
    return [wrapper.parameter_name for wrapper in wrappers(module)[0]]


def kinds(module: nn.Module) -> list[Hashable]:
    """Equal for wrappers that do the same with other values."""
    chain, _ = wrappers(module)
    return [(original_class(type(w)), w.parameter_name, _swapped(w), w.num_experts) for w in chain]


def _swapped(wrapper: nn.Module) -> bool:
    """Whether the weight is [E, outputs, features] for PEFT."""
    return getattr(wrapper, "_did_swap_in_out_features", False)


def rejection_reason(module: nn.Module, up: str) -> str | None:
    """Why adapters of the wrappers `module` and those within cannot be added to products; None where they can."""
    chain, inner = wrappers(module)
    names = adapted(module)
    others = [name for name in names if name not in (up, "down_proj")]
    if others:
        return f"it also adapts {others[0]}; adapters of {up} and down_proj are supported"
    if len(set(names)) < len(names):
        return f"{names[0]} is wrapped twice"
    several = max(len(_active(wrapper)) for wrapper in chain)
    if several > 1:
        return f"{several} adapters are active at once; one is supported"
    if any(observed(within) for within in (*chain[1:], inner)):
        return "what it wraps has hooks"
    return None


def _active(wrapper: nn.Module) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def factors(module: nn.Module, up: str, transposed: bool) -> dict[str, Any] | None:
    """The adapters of the wrappers `module` and those within, as arguments of `ops.experts`; None where PEFT's own
    forward has to run: adapters are off or merged, several are active, or somebody observes what is wrapped."""
    found: dict[str, Any] = {}
    wrapper = module
    while hasattr(wrapper, "parameter_name"):
        active = _active(wrapper)
        if wrapper.disable_adapters or wrapper.merged or len(active) > 1 or observed(wrapper.base_layer):
            return None
        for name in active:
            which = "gate_up" if wrapper.parameter_name == up else "down"
            a, b = _factors(wrapper, name, transposed)
            found |= {f"{which}_lora_a": a, f"{which}_lora_b": b, f"{which}_lora_scale": wrapper.scaling[name]}
        wrapper = wrapper.base_layer
    return found


def _factors(wrapper: nn.Module, name: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """a [E, R, features] and b [E, outputs, R], views of the adapter's parameters [E R, .] and [., R E].

    Which of the two has the features depends on the version of PEFT and on the layout of the weight.
    """
    a, b, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
    if _swapped(wrapper) != transposed:
        return a, b.permute(2, 0, 1)
    return b.permute(2, 1, 0), a.transpose(1, 2)


def twin(module: nn.Module, experts: nn.Module) -> nn.Module:
    """The wrappers `module` and those within, with small adapters and switched on, around small `experts`."""
    chain, made = wrappers(module)[0], experts
    for i, wrapper in enumerate(reversed(chain)):
        name = next(iter(wrapper.lora_A))
        count, first, second = getattr(experts, wrapper.parameter_name).shape
        if _swapped(wrapper):
            first, second = second, first
        a = nn.Linear(first, _RANK * count, bias=False, device="meta")
        b = nn.Linear(_RANK * count, second, bias=False, device="meta")
        for layer, phase in ((a, 0.3), (b, 0.9)):
            values = probe.wave(*layer.weight.shape, phase=phase + i, scale=0.5)
            layer.weight = nn.Parameter(values, requires_grad=False)
        children = {"base_layer": made, "lora_A": nn.ModuleDict({name: a}), "lora_B": nn.ModuleDict({name: b})}
        made = probe.shell(wrapper, None, children)
        made.__dict__.update(_disable_adapters=False, merged_adapters=[], _active_adapter=[name])
    return made


def without_parametrizations(module: nn.Module) -> nn.Module:
    """`module`, or, while a wrapper around it runs, one that has its parameters as they were and its own class."""
    kept = getattr(module, "parametrizations", None)
    if kept is None:
        return module
    bare = object.__new__(torch.nn.utils.parametrize.type_before_parametrizations(module))
    bare.__dict__.update(module.__dict__)
    bare.__dict__["_modules"] = {name: m for name, m in module._modules.items() if name != "parametrizations"}
    bare.__dict__["_parameters"] = {**module._parameters, **{name: chain.original for name, chain in kept.items()}}
    return bare
