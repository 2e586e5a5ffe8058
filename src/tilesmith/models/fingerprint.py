"""What a recording takes from modules, and whether that has changed since.

It is asked before each replay, of hundreds of modules, so it compares in loops of C: `map`, `all` and `itemgetter`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, getitem, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tilesmith.models.reach import watches

_IGNORED = frozenset(nn.Module().__dict__) - {"training"} | {"_is_hf_initialized"}
_FORWARD = repeat("forward")  # what `observed` looks for among the attributes of an instance
_END = object()  # behind all that is compared, so that what was added or is gone does not pass
_EQUAL = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
)  # fmt: skip
"""Values that are compared by what they are equal to; all others by which object they are."""
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
_DEEPEST = 4  # containers within containers that are looked into
_NEEDS = attrgetter("requires_grad")
_CONTAINERS = {nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList}
_IDLE = {"training", "_keys"}
"""What containers hold beside their modules and parameters, which are compared: nobody computes with it."""


class Fingerprint:
    """What a recording took from blocks: where their tensors lie, their modules and the classes and attributes of
    these, and the attributes of configurations and other records among them. Modules inside had no hooks that do
    something, since a replay calls none."""

    def __init__(self, blocks: Iterable[nn.Module]):
        blocks = list(blocks)
        modules = list(dict.fromkeys(m for block in blocks for m in block.modules()))
        inside = [m for m in modules if not any(m is block for block in blocks)]
        own = [held for m in modules for held in (m._parameters, m._buffers, m._modules)]
        self._held = [d.values() for m in modules for d in (m._parameters, m._buffers) if d]
        self._values = [*chain.from_iterable(self._held), _END]
        self._parents = [m._modules for m in modules if m._modules]
        self._children = [dict(children) for children in self._parents]
        self._empty = [held for held in own if not held]
        self._hooks = [hooks for m in inside for hooks in _hooks(m)]
        self._handles = RemovableHandle.next_id
        self._called = [m.__dict__ for m in inside if type(m).forward is not nn.Module.forward]
        self._modules, self._classes = modules, list(map(type, modules))
        records = list(_records(modules))
        # An attribute that is new may hide one of the class, or be a loss that is put on a model.
        self._holders = [*map(vars, modules), *records]
        self._lengths = list(map(len, self._holders))
        read = [*map(_read, modules), *((record, _attributes(record)) for record in records)]
        self._plain = _by_names([(holder, {n: v for n, v in f.items() if type(v) is not _Same}) for holder, f in read])
        alone = [(holder, name, v.value) for holder, f in read for name, v in f.items() if type(v) is _Same]
        self._alone = [list(column) for column in zip(*alone)] or [[], [], []]
        beside = (t for _, found in read for value in found.values() for t in _tensors(value))
        self._tensors = [*(value for value in self._values if isinstance(value, Tensor)), *beside]
        self._places, self._needs = self._where()

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
            if any(map(watches, chain.from_iterable(hooks.values() for hooks in self._hooks))):
                return True
            self._handles = RemovableHandle.next_id
        if any(self._empty) or any(map(contains, self._called, _FORWARD)):
            return True
        if list(map(type, self._modules)) != self._classes or list(map(len, self._holders)) != self._lengths:
            return True
        try:
            holders, names, objects = self._alone
            if not all(map(is_, map(getitem, holders, names), objects)):
                return True
            return any(values != list(map(read, holders)) for read, holders, values in self._plain)
        except KeyError:  # an attribute is gone
            return True


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _read(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of a module, and those that are compared."""
    found = _attributes(module.__dict__)
    if type(module) in _CONTAINERS:
        found = {name: value for name, value in found.items() if name not in _IDLE}
    return module.__dict__, found


def _records(modules: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """The attributes of the configurations of modules, where a forward looks for its attention and more, and of those
    within: each once."""
    seen: set[int] = set()
    named = [(n, value) for m in modules for n, value in m.__dict__.items() if not _is_ours(n)]
    waiting = [value for name, value in named if name == "config" or _is_record(value)]
    while waiting:
        record = waiting.pop()
        held = getattr(record, "__dict__", None)
        if type(held) is dict and id(held) not in seen and not isinstance(record, nn.Module | type):
            seen.add(id(held))
            yield held
            waiting += [value for value in held.values() if _is_record(value)]


def _is_record(value: Any) -> bool:
    """Whether an object is one of attributes that code reads: a configuration, a dataclass, a namespace."""
    known = isinstance(value, _RECORDS) or dataclasses.is_dataclass(value) or type(value).__name__.endswith("Config")
    return known and not isinstance(value, type)


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an object as they are now, for a comparison with what they are later."""
    return {name: _snapshot(value) for name, value in holder.items() if name not in _IGNORED and not _is_ours(name)}


def _is_ours(name: str) -> bool:
    """Whether an attribute is one of `optimize`, whose report counts calls."""
    return name.startswith(("_tilesmith", "tilesmith_report"))


class _Same:
    """Equal to one object only."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value is other


def _snapshot(value: Any, depth: int = 0) -> Any:
    """What equals `value` until it, or what is in it, is another one."""
    if isinstance(value, _EQUAL):
        return value
    kind = type(value)
    if depth < _DEEPEST and kind in (list, tuple):
        return kind(_snapshot(item, depth + 1) for item in value)
    if depth < _DEEPEST and isinstance(value, dict):
        return {name: _snapshot(item, depth + 1) for name, item in value.items()}
    if isinstance(value, set | frozenset):
        return set(value)
    return _Same(value)


def _tensors(found: Any) -> Iterator[Tensor]:
    """The tensors of a snapshot that lie somewhere."""
    if isinstance(found, _Same):
        if isinstance(found.value, Tensor) and found.value.layout is torch.strided:
            yield found.value
    elif type(found) in (list, tuple, dict):
        for item in found.values() if type(found) is dict else found:
            yield from _tensors(item)


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
