"""Activations: modules that compute SiLU, either GELU or squared ReLU, whatever they are called and however they spell
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.reach import Settings, has_settings, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

_FUNCTIONS = {
    "silu": lambda x: ops.silu(x),
    "gelu": lambda x: ops.gelu(x),
    "gelu (tanh)": lambda x: ops.gelu(x, "tanh"),
    "relu_squared": lambda x: ops.relu_squared(x),
}


@dataclass(frozen=True)
class ActivationForm(Form):
    """One of the known functions, by name. settings: those that the module must still have."""

    function: str
    settings: Settings = ()

    @property
    def op(self) -> str:
        """The op that computes it."""
        return self.function.split()[0]

    def namespace(self, base: type) -> dict[str, Any]:
        function, op, settings = _FUNCTIONS[self.function], self.op, self.settings

        def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
            (x,) = inputs or tuple(named.values())
            if not (reaches(op, x) and has_settings(self, settings)):
                return base.forward(self, x)
            ran(self, op)
            return function(x)

        return {"forward": forward}


class ActivationRule(Rule):
    """Modules without children and tensors that compute one of the known functions."""

    name = "activation"
    part = "ffn"
    spans = False

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        if next(module.children(), None) is not None or module._parameters or module._buffers:
            return None
        cls = original_class(type(module))
        named = any(word in cls.__name__.lower() for word in ("gelu", "silu", "swish", "relusquared"))
        try:
            function = self._verdicts.of(module, lambda: recognise(module), probe.number_of(module))
        except Unlike as verdict:
            return Skip(str(verdict)) if named else None
        holder = next(site.holders(), None)
        if hasattr(type(holder), "_tilesmith_gated_mlp"):
            return Skip("the MLP that holds it computes it with the product", wanted=False, quiet=True)
        if hasattr(type(holder), "_tilesmith_experts"):
            return Skip("the experts that hold it compute it with the product", wanted=False, quiet=True)
        form = ActivationForm(function, probe.settings_of(module))
        return Replace(form, (form.op,), f"computes {function}")


# (dtype, largest relative deviation, size of the inputs, training): large ones show a clamp.
_SETTINGS = (
    (torch.float32, 1e-6, 1.5, True),
    (torch.float32, 1e-6, 1.5, False),
    (torch.float32, 1e-6, 50.0, True),
    (torch.bfloat16, 0.02, 1.5, True),
)


def recognise(module: nn.Module) -> str:
    """The name of the function that `module` computes. Raises `Unlike`."""
    probe.only_input(original_class(type(module)))
    for name, function in _FUNCTIONS.items():
        if all(_agrees(module, function, *setting) for setting in _SETTINGS):
            return name
    raise Unlike("on small inputs it differs from silu, gelu, tanh-gelu and squared relu")


def _agrees(
    module: nn.Module,
    function: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    allowed: float,
    size: float,
    training: bool,
) -> bool:
    x = probe.wave(128, scale=size).to(dtype)
    given = x.clone()
    found = probe.call(probe.shell(module).train(training).forward, given)
    if not torch.equal(given, x):
        raise Unlike("it works in place")
    wanted = probe.call(function, x)
    if not isinstance(found, Tensor) or found.dtype is not dtype or found.shape != x.shape:
        return False
    return bool((found - wanted).abs().max() <= allowed * wanted.abs().max())
