"""xIELU, the activation with two learned slopes, recognised by what it computes."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

_OP = "xielu"
_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.03}


class Xielu(NamedTuple):
    """Names of the parameters and buffers that hold the op's arguments."""

    alpha_p: str
    alpha_n: str
    beta: str
    eps: str


@dataclass(frozen=True)
class XieluForm(Form):
    """The activation by the op; its own forward under torch.compile, which fuses it."""

    xielu: Xielu

    def namespace(self, base: type) -> dict[str, Any]:
        names = self.xielu

        def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
            (x,) = inputs or tuple(named.values())
            if torch.compiler.is_compiling() or not servable(self, x, names):
                return base.forward(self, x)
            ran(self, _OP)
            return activated(self, x, names)

        return {"forward": forward}


def servable(module: nn.Module, x: Tensor, names: Xielu) -> bool:
    """Whether the op has a kernel where `x` is and gives it the dtype that the module would."""
    alphas = (module._parameters[name] for name in names[:2])
    return reaches(_OP, x) and all(torch.promote_types(alpha.dtype, x.dtype) is x.dtype for alpha in alphas)


def activated(module: nn.Module, x: Tensor, names: Xielu) -> Tensor:
    """What `module` computes, by the op."""
    alpha_p, alpha_n = (module._parameters[name] for name in names[:2])
    return ops.xielu(x, alpha_p, alpha_n, *_numbers(module, names))


class _Read(NamedTuple):
    """The two buffers as they were read, and their values."""

    buffers: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    values: tuple[float, float]


_READ: weakref.WeakKeyDictionary[nn.Module, _Read] = weakref.WeakKeyDictionary()


def _numbers(module: nn.Module, names: Xielu) -> tuple[float, float]:
    """beta and eps. Reading a buffer waits for the device, so it is done again only when one was written to."""
    beta, eps = buffers = tuple(module._buffers[name] for name in names[2:])
    versions = (beta._version, eps._version)
    known = _READ.get(module)
    if known is None or known.versions != versions or any(a is not b for a, b in zip(known.buffers, buffers)):
        known = _READ[module] = _Read(buffers, versions, (beta.item(), eps.item()))
    return known.values


class XieluRule(Rule):
    """Modules without children that have two learned and two fixed numbers."""

    name = "activation"
    part = "ffn"
    spans = False

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        kinds = (module._parameters, module._buffers)
        if next(module.children(), None) is not None or any(len(kind) != 2 for kind in kinds):
            return None
        if any(t is None or t.numel() != 1 or not t.is_floating_point() for kind in kinds for t in kind.values()):
            return None
        named = "xielu" in original_class(type(module)).__name__.lower()
        if any(parameter.shape != (1,) for parameter in module._parameters.values()):
            return Skip("its slopes are not [1]") if named else None
        try:
            found = self._verdicts.of(module, lambda: recognise(module))
        except Unlike as verdict:
            return Skip(str(verdict)) if named else None
        return Replace(XieluForm(found), (_OP,), "computes xIELU")


def recognise(module: nn.Module) -> Xielu:
    """Which tensor is which where `module` computes the activation. Raises `Unlike`."""
    probe.only_input(original_class(type(module)))
    known = [
        Xielu(*alphas, *numbers)
        for alphas in itertools.permutations(module._parameters)
        for numbers in itertools.permutations(module._buffers)
    ]
    for dtype, size, training in (
        (torch.float32, 1.5, True),
        (torch.float32, 50.0, False),
        (torch.bfloat16, 1.5, True),
    ):
        known = [names for names in known if _agrees(module, names, dtype, size, training)]
    if not known:
        raise Unlike("on small inputs it differs from xIELU")
    return known[0]


def _agrees(module: nn.Module, names: Xielu, dtype: torch.dtype, size: float, training: bool) -> bool:
    parameters = {names.alpha_p: torch.tensor([0.4]).to(dtype), names.alpha_n: torch.tensor([-0.8]).to(dtype)}
    # An epsilon far from 0, so that it shows.
    buffers = {names.beta: torch.tensor(0.3).to(dtype), names.eps: torch.tensor(-0.25).to(dtype)}
    twin = probe.shell(module, parameters, buffers=buffers).train(training)
    x = probe.wave(128, scale=size).to(dtype)
    given = x.clone()
    found, wanted = probe.call(twin.forward, given), probe.call(activated, twin, x, names)
    if not torch.equal(given, x) or not isinstance(found, Tensor):
        return False
    if found.dtype is not dtype or found.shape != x.shape:
        return False
    return bool((found - wanted).abs().max() <= _ALLOWED[dtype] * wanted.abs().max())
