"""Packed products: linear layers that read one tensor (q, k and v; gate and up) computed as one GEMM.

The weights of such layers are moved in memory, one below the other. They stay the same Parameter objects, each
contiguous and with a storage of its own, so a state dict, an optimizer and checkpoints see what they saw. The layers
are still called one by one, by whoever called them: the first to be called computes the product of all, the others
hand out their part of it if they are given the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.models.layers.gated_mlps import GatedMlpRule
from tilesmith.models.layers.packed_products import Group
from tilesmith.nn import GatedMLP
from tilesmith.rewrite import (
    Form,
    Replace,
    Rule,
    Site,
    Skip,
    forms,
    observed,
    original_class,
)
from tilesmith.rewrite.siblings import packable
from tilesmith.rewrite.variants import obstacle, swap, unswap

_GROUP = "_tilesmith_group"


@dataclass(frozen=True)
class MemberForm(Form):
    """A linear layer that is one of a group: its part of the product of all."""

    which: int

    def namespace(self, base: type) -> dict[str, Any]:
        which = self.which

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            # Without a group after undo, where other code kept this very method to call it.
            group = None if torch.compiler.is_compiling() else self.__dict__.get(_GROUP)
            found = None if group is None else group.output(self, which, input)
            return base.forward(self, input) if found is None else found

        return {"forward": forward}

    def leave(self, module: nn.Module) -> None:
        module.__dict__.pop(_GROUP, None)


@dataclass(frozen=True)
class PackedForm(Form):
    """A module some of whose linear layers, by name, have their weights in one memory and one product."""

    names: tuple[str, ...]

    def namespace(self, base: type) -> dict[str, Any]:
        def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            group = self.__dict__[_GROUP]
            together = group.together()
            base._apply(self, fn, recurse)
            layers = {str(i): layer for i, layer in enumerate(group.layers)}
            if together and not group.together() and _immovable(layers) is None:
                group.gather()  # .to() moved them one by one
            return self

        return {"_apply": _apply}

    def enter(self, module: nn.Module) -> None:
        layers = [module._modules[name] for name in self.names]
        group = Group(layers)
        group.gather()
        for which, layer in enumerate(layers):
            swap(layer, MemberForm(which))
            layer.__dict__[_GROUP] = group
        module.__dict__[_GROUP] = group

    def leave(self, module: nn.Module) -> None:
        group = module.__dict__.pop(_GROUP)  # its layers may stand within others by now, such as PEFT's, or nowhere
        for layer in group.layers:
            if any(isinstance(form, MemberForm) for form in forms(layer)[:1]):
                unswap(layer)
        group.scatter()


class PackRule(Rule):
    """Modules whose forward gives one tensor to several linear layers of theirs. kind: "ffn": of these only gated
    MLPs; "attention": only the others; None: all; another one: none."""

    name = "pack"
    own = True

    def __init__(self, kind: str | None = None):
        self.kind = kind
        self._gated = GatedMlpRule()

    def match(self, site: Site) -> Replace | Skip | None:
        names = self.names(site)
        if not names:
            return None
        done = _packed(site.module)
        why = None if done else _unfit(site.root, {name: site.module._modules[name] for name in names})
        if why is not None:
            return Skip(why)
        told = f"{', '.join(names)} read one tensor: one product of weights that lie one below the other"
        return Replace(done or PackedForm(names), ("linear",), told)

    def names(self, site: Site) -> tuple[str, ...]:
        """The layers of a module that read one tensor, if it is of this rule's kind."""
        module = site.module
        names = packable(original_class(type(module)), _linears(module))
        if self.kind is None or not names:
            return names
        gated = isinstance(module, GatedMLP) or isinstance(self._gated.match(site), Replace)
        return names if self.kind == ("ffn" if gated else "attention") else ()


def could_be_packed(model: nn.Module, kind: str | None = None) -> tuple[str, ...]:
    """A sentence on the classes of modules of which `PackRule(kind)` would pack at least one, with the layers that it
    would; none without any."""
    rule = PackRule(kind)
    found: dict[type, str] = {}
    for fqn, module in model.named_modules() if obstacle(model) is None else ():
        cls, site = original_class(type(module)), Site(model, fqn, module)
        if cls not in found and not _packed(module) and isinstance(rule.match(site), Replace):
            found[cls] = f"{cls.__name__} ({', '.join(rule.names(site))})"
    return () if not found else (
        f"{', '.join(sorted(found.values()))}: layers with the same input are not merged into one product, which would "
        "move their weights in memory; create_unified_attention_fusion does so at OptimizationLevel.AGGRESSIVE.",
    )  # fmt: skip


def _packed(module: nn.Module) -> PackedForm | None:
    return next((form for form in forms(module) if isinstance(form, PackedForm)), None)


def _linears(module: nn.Module) -> tuple[str, ...]:
    """Children that are linear layers of any make."""
    sizes = ("in_features", "out_features")
    return tuple(n for n, c in module.named_children() if all(isinstance(getattr(c, s, None), int) for s in sizes))


def _unfit(root: nn.Module, layers: dict[str, nn.Module]) -> str | None:
    """Why the weights of layers cannot be moved, in words; None when they can."""
    for name, layer in layers.items():
        cls = original_class(type(layer))
        why = obstacle(layer)
        if why is not None:
            return f"{name}: {why}"
        if cls.forward is not nn.Linear.forward:
            return f"{name} is {cls.__module__.partition('.')[0]}'s {cls.__name__}, not a plain linear layer"
        if observed(layer):
            return f"{name} has hooks, which would see a product that is made earlier"
    why = _immovable(layers)
    if why is not None:
        return why
    first, *rest = layers.values()
    for layer in rest:
        for mine, other in zip(layer.parameters(), first.parameters()):
            if mine.requires_grad != other.requires_grad:
                return "some of their parameters are frozen and some are not"
    return _shared(root, layers) or _alias(layers)


def _immovable(layers: dict[str, nn.Module]) -> str | None:
    """Why the parameters of layers cannot be moved into one memory, in words; None when they can."""
    for name, layer in layers.items():
        for of, part in layer.named_parameters(recurse=False):
            why = _fixed(part)
            if why is not None:
                return f"{name}.{of} is {why}"
    first, *rest = layers.values()
    for layer in rest:
        if (layer.bias is None) != (first.bias is None):
            return "some of them have a bias and some have none"
        for mine, other in zip(layer.parameters(), first.parameters()):
            if (mine.dtype, mine.device) != (other.dtype, other.device):
                return "they differ in dtype or device"
    return None


def _fixed(part: Tensor) -> str | None:
    """What a parameter is that forbids to move it, in words."""
    if type(part) is not nn.Parameter:
        return f"a {type(part).__name__}, whose memory is not the library's to move"
    if part.device.type == "meta":
        return "on meta: load the model first"
    if not part.is_floating_point():
        return f"{str(part.dtype).removeprefix('torch.')}: quantised"
    if not part.is_contiguous():
        return "not contiguous"
    if part.device.type == "cpu" and part.is_shared():
        return "in memory that processes share"
    if part.device.type == "cpu" and part.is_pinned():
        return "in pinned memory"
    return None


def _shared(root: nn.Module, layers: dict[str, nn.Module]) -> str | None:
    """Which parameter elsewhere in the model shares memory with one of the layers', in words."""
    mine = {id(p) for layer in layers.values() for p in layer.parameters(recurse=False)}
    owners = {id(layer) for layer in layers.values()}
    where = {p.untyped_storage().data_ptr(): f"{n}.{of}" for n, m in layers.items() for of, p in m.named_parameters()}
    for fqn, module in root.named_modules():
        if id(module) in owners:
            continue
        for of, p in [*module._parameters.items(), *module._buffers.items()]:
            if p is None or type(p) not in (nn.Parameter, Tensor) or p.device.type == "meta":
                continue
            if id(p) in mine or (p.numel() and p.untyped_storage().data_ptr() in where):
                other = where.get(p.untyped_storage().data_ptr(), "")
                return f"{other} shares its memory with {fqn}.{of}"
    if len(mine) != sum(len(list(layer.parameters(recurse=False))) for layer in layers.values()):
        return "two of them share a parameter"
    return None


def _alias(layers: dict[str, nn.Module]) -> str | None:
    """Which parameter is a part of memory that these layers do not fill, so that others may hold it, in words."""
    held: dict[int, list[tuple[str, Tensor]]] = {}
    for name, layer in layers.items():
        for of, part in layer.named_parameters(recurse=False):
            held.setdefault(part.untyped_storage().data_ptr(), []).append((f"{name}.{of}", part))
    for at, parts in held.items():
        for name, part in sorted(parts, key=lambda one: one[1].data_ptr()):
            if part.data_ptr() != at:
                return f"{name} is a part of memory that others may hold"
            at += part.nbytes
        storage = part.untyped_storage()
        if at != storage.data_ptr() + storage.nbytes():
            return f"{name} is a part of memory that others may hold"
    return None
