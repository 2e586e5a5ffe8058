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
from tilesmith.engine import torch_private
from tilesmith.models.layers.biases import BiasForm
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, forms, original_class, probe

_OP = "lora_linear"
_HAS = (
    "base_layer", "lora_A", "lora_B", "lora_dropout", "lora_variant", "scaling", "merged", "disable_adapters",
    "active_adapters",
)  # fmt: skip
_PLAIN = (nn.Parameter, Tensor)
_FEATURES, _OUTPUTS, _RANK, _SCALE = 8, 6, 2, 0.5  # of a layer that is run to see what it does


def is_lora_linear(module: nn.Module) -> bool:
    """Whether `module` wraps a layer and adds two linear layers to it."""
    if not all(hasattr(module, name) for name in _HAS) or hasattr(module, "parameter_name"):
        return False
    return len(module.lora_A) > 0 and all(isinstance(layer, nn.Linear) for layer in module.lora_A.values())


def active_adapter(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, nn.Module, float] | None:
    """Both factors, the dropout and the scale of the adapter that the op adds in a call of `module`; None where PEFT's
    own forward has to run."""
    children = module._modules
    first, second = children["lora_A"]._modules, children["lora_B"]._modules
    if module.disable_adapters or module.merged or type(x) not in _PLAIN or not x.ndim:
        return None
    active = [name for name in module.active_adapters if name in first]
    if len(active) != 1:
        return None
    name = active[0]
    a, b, dropout = first[name], second[name], children["lora_dropout"]._modules[name]
    if obstacle(module, name, a, b) or observed(a) or observed(b) or not reaches(_OP, x):
        return None
    factors = a._parameters.get("weight"), b._parameters.get("weight")  # a replica of DataParallel has none
    if type(factors[0]) not in _PLAIN or type(factors[1]) not in _PLAIN:
        return None
    return *factors, dropout, module.scaling[name]


def whole(base: nn.Module, x: Tensor, dropout: nn.Module) -> bool:
    """Whether the op also computes the base layer: nobody observes it, and both parts read x, in the weight's dtype."""
    if not is_plain(type(base)) or observed(base) or observed(dropout) or drops(dropout):
        return False
    weight, kind = base._parameters.get("weight"), x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch_private.autocasts(kind) else x.dtype
    return type(weight) in _PLAIN and dtype == weight.dtype


def drops(dropout: nn.Module) -> bool:
    """Whether what the adapter reads is not x."""
    return type(dropout) is not nn.Identity and (dropout.training or type(dropout) is not nn.Dropout)


def beside(base: nn.Module, x: Tensor, a: Tensor, b: Tensor, dropout: nn.Module, scale: float) -> Tensor:
    """What the base layer computes by itself, and the adapter's part by the op."""
    y = base(x)
    if drops(dropout):  # in the adapter's dtype, as PEFT: the same numbers are dropped, and none is rounded
        added = ops.lora_linear(dropout(x.to(a.dtype)), None, a, b, None, scale)
        return (y + added).to(y.dtype)
    x = dropout(x)
    x = x.to(torch.promote_types(x.dtype, y.dtype))  # the op rounds to x's dtype; a base layer may return a wider one
    return y + ops.lora_linear(x, None, a, b, None, scale).to(y.dtype)


def obstacle(module: nn.Module, name: str, a: nn.Module, b: nn.Module) -> str | None:
    """Why the op does not add an adapter of `module`, with these layers, in words; None where it does."""
    if type(a) is not nn.Linear or type(b) is not nn.Linear:
        return "its factors are not plain linear layers"
    if a._parameters.get("bias") is not None or b._parameters.get("bias") is not None:
        return "it has a bias"
    if name in module.lora_variant:
        return "it is a variant of LoRA"
    if not getattr(module, "cast_input_dtype_enabled", True):
        return "its input is not cast"
    return None


@torch_private.constant_in_graphs
def is_plain(cls: type) -> bool:
    """Whether a layer of this class computes what nn.Linear does."""
    return cls is nn.Linear or _is_plain(cls)


@functools.cache
def _is_plain(cls: type) -> bool:
    module = object.__new__(cls)
    return original_class(cls) is nn.Linear and all(isinstance(form, BiasForm) for form in forms(module))


@dataclass(frozen=True)
class LoraForm(Form):
    """The same layer by the op."""

    def namespace(self, base: type) -> dict[str, Any]:
        def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = None if args or kwargs else active_adapter(self, x)
            if found is None:
                return base.forward(self, x, *args, **kwargs)
            ran(self, _OP)
            a, b, dropout, scale = found
            layer = self._modules["base_layer"]
            if not whole(layer, x, dropout):
                return beside(layer, x, a, b, dropout, scale)
            held = layer._parameters
            return ops.lora_linear(x, held["weight"], a, b, held.get("bias"), scale)

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
        found = {name: obstacle(module, name, a, module.lora_B[name]) for name, a in module.lora_A.items()}
        if all(found.values()):
            name, why = next(iter(found.items()))
            return Skip(f"adapter {name}: {why}", wanted=False)
        name = next(name for name, why in found.items() if why is None)
        try:
            self._verdicts.of(module, lambda: _recognise(module, name), name)
        except Unlike as verdict:
            return Skip(str(verdict))
        if is_plain(type(module.base_layer)):
            return Replace(LoraForm(), (_OP,), "the base product and one active adapter")
        cls = original_class(type(module.base_layer)).__name__
        return Replace(LoraForm(), (_OP,), f"one active adapter, beside what its base layer ({cls}) computes")


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
