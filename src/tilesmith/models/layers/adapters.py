"""Linear layers with an adapter of PEFT (LoRA): the base product and the adapter by one op.

PEFT casts the input to the adapter's dtype and computes the adapter by two linear layers, a product with its scale and
a sum. Nothing of PEFT is imported here: a wrapper is known by what it has, and what it does is found out by running it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.layers.biases import BiasForm
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, forms, original_class, probe

_OP = "lora_linear"
_HAS = ("base_layer", "lora_A", "lora_B", "lora_dropout", "scaling", "merged", "disable_adapters", "active_adapters")
_PLAIN = (nn.Parameter, Tensor)
_FEATURES, _OUTPUTS, _RANK, _SCALE = 8, 6, 2, 0.5  # of a layer that is run to see what it does


def is_lora_linear(module: nn.Module) -> bool:
    """Whether `module` wraps a layer and adds two linear layers to it."""
    if not all(hasattr(module, name) for name in _HAS) or hasattr(module, "parameter_name"):
        return False
    return len(module.lora_A) > 0 and all(isinstance(layer, nn.Linear) for layer in module.lora_A.values())


def served_adapter(module: nn.Module, x: Tensor) -> str | None:
    """The name of the adapter that the op adds in a call of `module`; None where PEFT's own forward has to run."""
    base, first = module.base_layer, module.lora_A
    if type(x) not in _PLAIN or not x.ndim or module.disable_adapters or module.merged or not is_plain(type(base)):
        return None
    active = [name for name in module.active_adapters if name in first]
    if len(active) != 1 or obstacle(module, active[0]) is not None:
        return None
    name = active[0]
    layers = base, first[name], module.lora_B[name], module.lora_dropout[name]
    weight = base._parameters.get("weight")
    if type(weight) not in _PLAIN or any(map(observed, layers)) or not reaches(_OP, x):
        return None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return name if dtype == weight.dtype else None


def obstacle(module: nn.Module, name: str) -> str | None:
    """Why the op does not add an adapter of `module`, in words; None where it does."""
    if name in getattr(module, "lora_variant", ()) or getattr(module, "use_dora", {}).get(name):
        return "it is a variant of LoRA"
    first, second, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(first) is not nn.Linear or type(second) is not nn.Linear:
        return "its factors are no plain linear layers"
    if first.bias is not None or second.bias is not None:
        return "it has a bias"
    if not getattr(module, "cast_input_dtype_enabled", True):
        return "its input is not cast"
    if dropout.training and type(dropout) is not nn.Identity and getattr(dropout, "p", 1.0):
        return "its dropout drops while it trains"
    return None


@functools.cache
def is_plain(cls: type) -> bool:
    """Whether a layer of this class computes what nn.Linear does."""
    module = object.__new__(cls)
    return original_class(cls) is nn.Linear and all(isinstance(form, BiasForm) for form in forms(module))


@dataclass(frozen=True)
class LoraForm(Form):
    """The same layer by the op."""

    def namespace(self, base: type) -> dict[str, Any]:
        def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name = None if args or kwargs else served_adapter(self, x)
            if name is None:
                return base.forward(self, x, *args, **kwargs)
            ran(self, _OP)
            layer = self.base_layer
            factors = self.lora_A[name].weight, self.lora_B[name].weight
            return ops.lora_linear(x, layer.weight, *factors, layer.bias, self.scaling[name])

        return {"forward": forward}


class LoraRule(Rule):
    """Linear layers with adapters; which of these is active, and whether any is, each call asks."""

    name = "lora"

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        if not is_lora_linear(module):
            return None
        if not is_plain(type(module.base_layer)):
            cls = original_class(type(module.base_layer)).__name__
            return Skip(f"its base layer is a {cls}; linear layers with plain weights are served", wanted=False)
        found = {name: obstacle(module, name) for name in module.lora_A}
        if all(found.values()):
            name, why = next(iter(found.items()))
            return Skip(f"adapter {name}: {why}", wanted=False)
        name = next(name for name, why in found.items() if why is None)
        try:
            self._verdicts.of(module, lambda: _recognise(module, name), name)
        except Unlike as verdict:
            return Skip(str(verdict))
        return Replace(LoraForm(), (_OP,), "the base product and one active adapter")


def _recognise(module: nn.Module, name: str) -> None:
    """Raise `Unlike` where `module` computes anything but its base layer and, scaled, both factors."""
    base = probe.linear(_OUTPUTS, _FEATURES, torch.float32, scale=0.5, phase=0.2)
    first = _factor(_RANK, _FEATURES, 0.3)
    second = _factor(_OUTPUTS, _RANK, 0.9)
    children = {
        "base_layer": base,
        "lora_A": nn.ModuleDict({name: first}),
        "lora_B": nn.ModuleDict({name: second}),
        "lora_dropout": nn.ModuleDict({name: nn.Identity()}),
    }
    twin = probe.shell(module, None, children)
    twin.__dict__.update(_disable_adapters=False, merged_adapters=[], _active_adapter=[name], scaling={name: _SCALE})
    x = probe.wave(2, 3, _FEATURES, phase=1.0)
    wanted = base(x) + _SCALE * (x @ first.weight.t() @ second.weight.t())
    if probe.disagreement(probe.call(twin.forward, x), wanted.detach()) > 1e-5:
        raise Unlike("on small inputs it differs from its base layer and a scaled product of two factors")


def _factor(outputs: int, features: int, phase: float) -> nn.Linear:
    made = nn.Linear(features, outputs, bias=False, device="meta")
    made.weight = nn.Parameter(probe.wave(outputs, features, phase=phase, scale=0.5), requires_grad=False)
    return made
