"""Routers of mixture-of-experts layers: modules that choose the experts of each token, and weigh them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.engine.torch_private import autocasts
from tilesmith.models.reach import Settings, has_settings, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

_OP = "route"
_TOKENS = 512  # few of which tell apart, say, six of eight groups from all
_DEVIATION = 1e-5  # of the largest weight: one softmax or sigmoid in fp32 beside another


class Routing(NamedTuple):
    """The arguments of `ops.route` behind the logits; bias: the name of the buffer, "" without one."""

    top_k: int
    bias: str
    scores: str
    groups: int
    kept_groups: int
    group_score: str
    normalise: bool
    scale: float

    def __str__(self) -> str:
        told = f"chooses {self.top_k} experts by {self.scores}"
        told += f" and {self.bias}" if self.bias else ""
        return f"{told}, of {self.kept_groups} of {self.groups} groups" if self.groups > 1 else told


@dataclass(frozen=True)
class RouterForm(Form):
    """The same logits, and the choice by the op. settings: those that the module must still have."""

    routing: Routing
    settings: Settings = ()

    def namespace(self, base: type) -> dict[str, Any]:
        (top_k, bias, *rest), settings = self.routing, self.settings

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
            if kwargs or len(args) != 1 or not _served(self, args[0]) or not has_settings(self, settings):
                return base.forward(self, *args, **kwargs)
            ran(self, _OP)
            return routed(self, args[0], top_k, bias, *rest)

        return {"forward": forward}


def routed(module: nn.Module, x: Tensor, top_k: int, bias: str, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, indices) of tokens [..., C], a row for each token."""
    logits = _logits(module, x)
    return logits, *_chosen(module, logits, top_k, bias, *rest)


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    """In fp32, as DeepSeek-V3 has them: in bf16 they tie now and then, and which expert then wins differs by kernel."""
    return F.linear(x.reshape(-1, x.shape[-1]).to(torch.float32), module.weight.to(torch.float32))


def _chosen(module: nn.Module, logits: Tensor, top_k: int, bias: str, *rest: Any) -> tuple[Tensor, Tensor]:
    return ops.route(logits, top_k, getattr(module, bias) if bias else None, *rest)


def _served(module: nn.Module, x: Tensor) -> bool:
    """Whether the module computes logits in fp32 here, and the op has a kernel."""
    return reaches(_OP, x) and not autocasts(x.device.type)


class RouterRule(Rule):
    """Modules with one weight [E, C] that return logits in fp32, weights and indices."""

    name = "router"
    part = "ffn"

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        weight = module._parameters.get("weight")
        own = {n for n, p in module._parameters.items() if p is not None} == {"weight"} and not module._modules
        if not own or weight.ndim != 2 or "top_k" not in probe.names_read(original_class(type(module))):
            return None
        try:
            found = self._verdicts.of(module, lambda: recognise(module), probe.number_of(module))
        except Unlike as verdict:
            return Skip(f"its choice of experts is not known: {verdict}", wanted=False, quiet=True)
        size = weight.shape[0] // found.groups
        if found.groups > 1 and (found.groups & (found.groups - 1) or size & (size - 1)):
            return Skip(f"{found}, and no kernel serves {found.groups} groups of {size} experts", wanted=False)
        return Replace(RouterForm(found, probe.settings_of(module)), (_OP,), str(found))


def recognise(module: nn.Module) -> Routing:
    """How the module chooses. Raises `Unlike` where it is in no way that the op knows, with logits in fp32."""
    calls = [_call(module, *dtypes) for dtypes in itertools.product(probe.DTYPES, probe.DTYPES)]
    numbers = [v for v in module.__dict__.values() if type(v) in (int, float) and v > 0]
    scales = list(dict.fromkeys((1.0, *map(float, numbers))))
    for choice in _choices(module, calls[0].indices.shape[-1]):
        if not all(_chooses(call, choice) for call in calls):
            continue
        for normalise, scale in itertools.product((True, False), scales):
            candidate = choice._replace(normalise=normalise, scale=scale)
            if all(_weighs(call, candidate) for call in calls):
                return candidate
    raise Unlike("on small inputs no scores, groups and scale that it has give its weights")


class Call(NamedTuple):
    """A module with fixed weights, and what it returned for some tokens, sorted by expert."""

    twin: nn.Module
    logits: Tensor
    weights: Tensor
    indices: Tensor


def _call(module: nn.Module, dtype: torch.dtype, weight_dtype: torch.dtype) -> Call:
    """A call of the module in these dtypes. Raises `Unlike` where it returns something else than a router does."""
    experts, hidden = module._parameters["weight"].shape
    # Not waves, whose products with each other are alike for many experts: groups and scales would not show.
    chance = torch.Generator().manual_seed(2 * probe.DTYPES.index(dtype) + probe.DTYPES.index(weight_dtype))
    weight = torch.randn(experts, hidden, generator=chance, device="cpu").mul_(1.5 * hidden**-0.5).to(weight_dtype)
    # Corrections as large as the scores: where they are small, few tokens choose an expert of a group that is left out.
    given = {name: b for name, b in module._buffers.items() if b is not None}
    buffers = {name: torch.randn(b.shape, generator=chance, device="cpu") for name, b in given.items()}
    twin = probe.shell(module, {"weight": weight}, buffers=buffers)
    x = torch.randn(1, _TOKENS, hidden, generator=chance, device="cpu").to(dtype)
    found = probe.call(twin.forward, x)
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(t, Tensor) for t in found):
        raise Unlike("it does not return logits, weights and indices")
    logits, weights, indices = found
    if logits.shape != (_TOKENS, experts) or logits.dtype is not torch.float32 or weights.dtype is not torch.float32:
        raise Unlike("its logits and weights are not those of one row for each token, in fp32")
    if not torch.equal(logits, probe.call(_logits, twin, x)):
        raise Unlike("its logits are not one product in fp32")
    if indices.ndim != 2 or weights.shape != indices.shape or indices.dtype is not torch.int64:
        raise Unlike("it does not return a weight for each chosen expert")
    return Call(twin, logits, *_by_expert(weights, indices))


def _choices(module: nn.Module, top_k: int) -> Iterator[Routing]:
    """Ways to choose, with the numbers of groups that its attributes name; weights as they are. Groups come first: some
    that leave out few experts differ from none in so few tokens that small inputs do not show it."""
    experts = module._parameters["weight"].shape[0]
    named = sorted({n for name, n in vars(module).items() if "group" in name and type(n) is int and n > 0})
    groups = [(g, k) for g in named for k in named if k < g and experts % g == 0 and experts // g * k >= top_k]
    biases = [name for name, b in module._buffers.items() if b is not None and b.shape == (experts,)] or [""]
    for (g, k), bias, scores in itertools.product([*groups, (1, 1)], biases, ("sigmoid", "softmax")):
        for group_score in ("top2", "max") if g > 1 else ("top2",):
            yield Routing(top_k, bias, scores, g, k, group_score, normalise=False, scale=1.0)


def _chooses(call: Call, candidate: Routing) -> bool:
    """Whether the choice is the same, but for experts that rank alike to the last bits."""
    _, indices = probe.call(_chosen, call.twin, call.logits, *candidate)
    ranks = call.logits
    if candidate.bias:
        ranks = ranks.sigmoid() if candidate.scores == "sigmoid" else ranks.softmax(-1)
        ranks = ranks + getattr(call.twin, candidate.bias)
    ours, theirs = (ranks.gather(-1, chosen).sort(-1).values for chosen in (indices, call.indices))
    return bool((ours - theirs).abs().max() <= 1e-6)


def _weighs(call: Call, candidate: Routing) -> bool:
    """Whether tokens of the same choice have the same weights."""
    weights, indices = probe.call(_chosen, call.twin, call.logits, *candidate)
    weights, indices = _by_expert(weights, indices)
    same = (indices == call.indices).all(-1)
    wrong = (weights - call.weights)[same].abs().max()
    return bool(wrong <= _DEVIATION * call.weights.abs().max())


def _by_expert(weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and experts of each token by the number of the expert: of no order that routers agree on."""
    experts, order = indices.sort(-1)
    return weights.gather(-1, order), experts
