"""Gated RMSNorm: a norm times an activation of a gate, or the norm of that product, recognised by what it computes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.layers.norms import epsilons, may_be_norm, two_inputs
from tilesmith.models.reach import Settings, has_settings, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

_OP = "rms_norm_gated"
_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # see `probe.disagreement`


class GatedNorm(NamedTuple):
    """The arguments of `ops.rms_norm_gated`; eps is the name of an attribute, or a constant of the forward."""

    eps: str | float
    casting: str
    activation: str
    gate_first: bool
    groups: int

    def __str__(self) -> str:
        parts = f" of {self.groups} groups" if self.groups > 1 else ""
        rounded = "after" if self.casting == "fp32" else "before"
        if self.gate_first:
            return f"RMSNorm{parts} of x * {self.activation}(gate), rounded {rounded} the weight"
        return f"RMSNorm{parts} times {self.activation}(gate), rounded {rounded} the weight"


@dataclass(frozen=True)
class GatedNormForm(Form):
    """The norm with its gate by the op; without a gate the module's own forward. settings: those that the module must
    still have."""

    norm: GatedNorm
    inputs: tuple[str, str]
    settings: Settings = ()

    def namespace(self, base: type) -> dict[str, Any]:
        norm, (first, second), settings = self.norm, self.inputs, self.settings

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            given = {**dict(zip((first, second), args)), **kwargs}
            x, gate = given.get(first), given.get(second)
            both = len(args) + len(kwargs) == 2 and x is not None and gate is not None
            if not both or not has_settings(self, settings) or not servable(self, x, gate, norm):
                return base.forward(self, *args, **kwargs)
            ran(self, _OP)
            return normalised(self, x, gate, norm)

        return {"forward": forward}


def servable(module: nn.Module, x: Tensor, gate: Tensor, norm: GatedNorm) -> bool:
    """Whether the op has a kernel where `x` is, takes these tensors and returns the dtype that the module would."""
    weight = module._parameters.get("weight")
    if not reaches(_OP, x) or gate.shape != x.shape or x.shape[-1] % norm.groups:
        return False
    if torch.promote_types(gate.dtype, x.dtype) is not x.dtype:
        return False
    # The product of a rounded norm and a weight of more bits is wider; the op returns x's dtype.
    return norm.casting == "fp32" or weight is None or torch.promote_types(weight.dtype, x.dtype) is x.dtype


def normalised(module: nn.Module, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
    """What `module` computes, by the op."""
    eps = getattr(module, norm.eps) if isinstance(norm.eps, str) else norm.eps
    return ops.rms_norm_gated(x, gate, module._parameters.get("weight"), eps, *norm[1:])


class GatedNormRule(Rule):
    """Modules without children that take two tensors and normalise the last dimension."""

    name = "norm"
    part = "norm"
    spans = False

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        candidate = may_be_norm(module)
        if candidate is None:
            return None
        named, parameters = candidate
        inputs = two_inputs(original_class(type(module)))
        if inputs is None:
            return None
        if set(parameters) != {"weight"} or parameters["weight"].ndim != 1:
            return Skip(f"its forward takes ({', '.join(inputs)})") if named else None
        try:
            found = self._verdicts.of(module, lambda: recognise(module), probe.number_of(module))
        except Unlike as verdict:
            return Skip(f"its forward takes ({', '.join(inputs)}); {verdict}") if named else None
        settings = tuple(one for one in probe.settings_of(module) if one[0] != found.eps)  # which each call reads
        return Replace(GatedNormForm(found, inputs, settings), (_OP,), str(found))


def recognise(module: nn.Module) -> GatedNorm:
    """The gated norm whose result is the module's own, in float32 and to the bit in bfloat16. Raises `Unlike`."""
    width = module._parameters["weight"].shape[0]
    scores: dict[GatedNorm, float] = dict.fromkeys(_candidates(module, width), 0.0)
    for dtype, training in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        weight = (1 + 0.3 * probe.wave(width)).to(dtype)
        twin = probe.shell(module, {"weight": weight}).train(training)
        # Rows of very different size, so that epsilon shows in one of them; groups differ within a row.
        sizes = torch.tensor([1e-3, 0.1, 1.0, 1.0, 8.0, 100.0], device="cpu")
        x = (probe.wave(6, width, phase=2.0) * sizes.view(6, 1)).view(2, 3, width).to(dtype)
        gate = probe.wave(2, 3, width, phase=0.7, scale=2.0).to(dtype)
        found = probe.call(twin.forward, x, gate)
        for norm in list(scores):
            wrong = probe.disagreement(found, probe.call(normalised, twin, x, gate, norm))
            if wrong > _ALLOWED[dtype]:
                del scores[norm]
            else:
                scores[norm] = wrong
    if not scores:
        raise Unlike("on small inputs it differs from RMSNorm(x) * act(gate) and RMSNorm(x * act(gate))")
    return min(scores, key=lambda norm: scores[norm])


def _candidates(module: nn.Module, width: int) -> list[GatedNorm]:
    """With every number of groups that an attribute names, or whose size it does."""
    sizes = [n for n in module.__dict__.values() if type(n) is int and 1 < n <= width and width % n == 0]
    groups = list(dict.fromkeys((1, *sizes, *(width // size for size in sizes))))
    options = itertools.product(epsilons(module), ("llama", "fp32"), ("silu", "sigmoid"), (False, True), groups)
    return [GatedNorm(*option) for option in options]
