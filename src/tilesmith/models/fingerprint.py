"""What a recording takes from modules, and whether that has changed since.

It is asked before each replay, of hundreds of modules, so it compares in loops of C: `map`, `all` and `itemgetter`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_IGNORED = frozenset(nn.Module().__dict__) - {"training"} | {"_is_hf_initialized"}
_FORWARD = repeat("forward")  # what `observed` looks for among the attributes of an instance
_END = object()  # behind all that is compared, so that what was added or is gone does not pass
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_NEEDS = attrgetter("requires_grad")
_CONTAINERS = {nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList}
_IDLE = {"training", "_keys"}
"""What containers hold beside their modules and parameters, which are compared: nobody computes with it."""


class Fingerprint:
    """What a recording took from blocks: where their tensors lie, their modules and the plain attributes of these, and
    of their configurations. Modules inside had no hooks, since a replay calls none."""

    def __init__(self, blocks: Iterable[nn.Module]):
        blocks = list(blocks)
        modules = list(dict.fromkeys(m for block in blocks for m in block.modules()))
        inside = [m for m in modules if not any(m is block for block in blocks)]
        self._held = [d.values() for m in modules for d in (m._parameters, m._buffers) if d]
        self._values = [*chain.from_iterable(self._held), _END]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places, self._needs = self._where()
        self._parents = [m._modules for m in modules if m._modules]
        self._children = [dict(children) for children in self._parents]
        self._childless = [m._modules for m in modules if not m._modules]
        self._hooks = [hooks for m in inside for hooks in _hooks(m)]
        self._handles = RemovableHandle.next_id
        self._called = [m.__dict__ for m in inside if type(m).forward is not nn.Module.forward]
        self._sizes = [(vars(block), len(vars(block))) for block in blocks]
        self._plain = _by_names([*map(_read, modules), *_configurations(modules)])

    def _where(self) -> tuple[list[int], list[bool]]:
        return list(map(Tensor.data_ptr, self._tensors)), list(map(_NEEDS, self._tensors))

    def changed(self) -> bool:
        if not all(map(is_, chain(chain.from_iterable(self._held), (_END,)), self._values)):
            return True
        if self._parents != self._children:  # modules are equal only to themselves
            return True
        if self._where() != (self._places, self._needs):
            return True
        # Hundreds of dicts: they are looked through only if a hook was registered somewhere since.
        if RemovableHandle.next_id != self._handles:
            if any(self._hooks):
                return True
            self._handles = RemovableHandle.next_id
        if any(self._childless) or any(map(contains, self._called, _FORWARD)):
            return True
        if any(len(attributes) != size for attributes, size in self._sizes):  # a loss that is put on a model
            return True
        try:
            return any(list(map(read, holders)) != values for read, holders, values in self._plain)
        except KeyError:  # an attribute is gone
            return True


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _read(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of a module, and those that are compared."""
    found = _plain_attributes(module.__dict__)
    if type(module) in _CONTAINERS:
        found = {name: value for name, value in found.items() if name not in _IDLE}
    return module.__dict__, found


def _configurations(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The same of what modules have as `config`, where a forward looks for its attention and more."""
    found = [m.__dict__["config"] for m in modules if hasattr(m.__dict__.get("config"), "__dict__")]
    return [(vars(one), _plain_attributes(vars(one))) for one in {id(config): config for config in found}.values()]


def _plain_attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an object that are functions, or numbers, strings and flags, also in lists and dicts."""
    found = {}
    for name, value in holder.items():
        kind = type(value)
        inner = value.values() if kind is dict else value if kind in (list, tuple) else [value]
        own = name not in _IGNORED and not name.startswith("_tilesmith")
        if own and (isinstance(value, _FUNCTIONS) or all(isinstance(v, bool | int | float | str) for v in inner)):
            found[name] = kind(value) if kind in (list, dict) else value
    return found


def _by_names(
    read: list[tuple[dict[str, Any], dict[str, Any]]],
) -> list[tuple[itemgetter, list[dict[str, Any]], list[Any]]]:
    """What reads attributes of the same names at once, from which holders, and what it found."""
    groups: dict[tuple[str, ...], tuple[list[dict[str, Any]], list[Any]]] = {}
    for holder, values in read:
        if values:
            holders, found = groups.setdefault(tuple(values), ([], []))
            holders.append(holder)
            found.append(itemgetter(*values)(values))
    return [(itemgetter(*names), holders, found) for names, (holders, found) in groups.items()]
