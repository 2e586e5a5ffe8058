"""Latent attention: modules that make keys and values of the latents of all heads, by a method of their own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.reach import Settings, has_settings, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

_OP = "expand_kv"
_METHOD = "expand_kv"  # of transformers' modules
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentForm(Form):
    """The method, which puts together what a child makes of the latents, by the op. own, shared, values: features of a
    head of the keys that are its own, those that all heads share, and values of a head."""

    child: str
    own: int
    shared: int
    values: int
    settings: Settings = ()

    def namespace(self, base: type) -> dict[str, Any]:
        method, settings = getattr(base, _METHOD), self.settings
        child, own, shared, width = self.child, self.own, self.shared, self.own + self.values

        def expand_kv(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if kwargs or not _fits(args, shared) or not reaches(_OP, args[0]) or not has_settings(self, settings):
                return method(self, *args, **kwargs)
            ran(self, _OP)
            return expanded(getattr(self, child), *args, own, width)

        return {_METHOD: expand_kv}


def expanded(child: nn.Module, latents: Tensor, k_rot: Tensor, own: int, width: int) -> tuple[Tensor, Tensor]:
    """(k, v) of latents [B, 1, T, C] and the rotated key of all heads [B, 1, T, R]; width: features of a head that the
    child makes."""
    kv = child(latents).squeeze(1).unflatten(-1, (-1, width)).transpose(1, 2)
    return ops.expand_kv(kv, k_rot.to(kv.dtype), own)


def _fits(args: tuple[Any, ...], shared: int) -> bool:
    """Whether a call gives latents and a key that all heads share, of the same tokens."""
    if len(args) != 2 or not all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
        return False
    latents, k_rot = args
    return latents.shape[1] == 1 and latents.shape[:3] == k_rot.shape[:3] and k_rot.shape[3] == shared


class LatentRule(Rule):
    """Modules with such a method, whose result is that of the op on what one child makes of the latents."""

    name = "latent"
    part = "attention"
    spans = False

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        sizes = [module.__dict__.get(name) for name in _SIZES]
        method = getattr(original_class(type(module)), _METHOD, None)
        if not inspect.isfunction(method) or not all(isinstance(n, int) and n > 0 for n in sizes):
            return None
        if _METHOD in module.__dict__:
            return Skip(f"its {_METHOD} was replaced on the instance by something else")
        try:
            child = self._verdicts.of(module, lambda: recognise(module, *sizes), probe.number_of(module))
        except Unlike as verdict:
            return Skip(f"its {_METHOD} is not known: {verdict}")
        told = f"{_METHOD} gives each head {sizes[0]} features of its own of {child}, and {sizes[1]} that all share"
        return Replace(LatentForm(child, *sizes, probe.settings_of(module)), (_OP,), told)


def recognise(module: nn.Module, own: int, shared: int, values: int) -> str:
    """The child of whose outputs the method makes what the op makes, to the bit. Raises `Unlike`."""
    reasons = ["it has no child that is a linear layer"]
    for name, child in module.named_children():
        if not isinstance(getattr(child, "out_features", None), int):
            continue
        try:
            if all(_agrees(module, name, own, shared, values, dtype) for dtype in probe.DTYPES):
                return name
            raise Unlike("on small inputs it differs from keys of which a part is shared, and values behind the other")
        except Unlike as verdict:
            if "also calls" not in str(verdict):  # else it is another child of whose outputs it makes them
                reasons.append(str(verdict))
    raise Unlike(reasons[-1])


def _agrees(module: nn.Module, name: str, own: int, shared: int, values: int, dtype: torch.dtype) -> bool:
    width = own + values
    small = probe.linear(2 * width, 8, dtype, scale=0.3, phase=0.5)
    twin = probe.shell(module, children={name: small})
    latents, k_rot = probe.wave(2, 1, 3, 8).to(dtype), probe.wave(2, 1, 3, shared, phase=1.0).to(dtype)
    found = probe.call(getattr(twin, _METHOD), latents, k_rot)
    wanted = probe.call(expanded, small, latents, k_rot, own, width)
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
        return False
    return all(torch.equal(f, w) and f.dtype is w.dtype for f, w in zip(found, wanted))
