"""What a recording takes from a module, and whether that has changed since."""

from __future__ import annotations

from itertools import repeat
from operator import contains, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_INHERITED = frozenset(nn.Module().__dict__) - {"training"}
_FORWARD = repeat("forward")  # what `observed` looks for among the attributes of an instance


class Fingerprint:
    """What a recording took from a block: where its tensors lie, its modules and their plain attributes. Modules inside
    had no hooks, since a replay calls none."""

    def __init__(self, block: nn.Module):
        modules = list(block.modules())
        places = [m._parameters for m in modules] + [m._buffers for m in modules]
        self._tensors = [(d, n, t, *_place(t)) for d in places for n, t in d.items() if t is not None]
        self._children = [(m._modules, dict(m._modules)) for m in modules if m._modules]
        self._childless = [m._modules for m in modules if not m._modules]
        self._hooks = [hooks for m in modules[1:] for hooks in _hooks(m)]
        self._handles = RemovableHandle.next_id
        self._inside = [m.__dict__ for m in modules[1:]]
        plain = [(m.__dict__, _plain_attributes(m)) for m in modules]
        self._readers = [(d, itemgetter(*v)) for d, v in plain if v]
        self._values = [itemgetter(*v)(v) for _, v in plain if v]

    def changed(self) -> bool:
        for holder, name, tensor, address, needs in self._tensors:
            if holder.get(name) is not tensor or tensor.data_ptr() != address or tensor.requires_grad is not needs:
                return True
        for now, before in self._children:
            if now != before:
                return True
        # Hundreds of dicts: they are looked through only if a hook was registered somewhere since.
        if RemovableHandle.next_id != self._handles:
            if any(self._hooks):
                return True
            self._handles = RemovableHandle.next_id
        if any(self._childless) or any(map(contains, self._inside, _FORWARD)):
            return True
        try:
            return [read(holder) for holder, read in self._readers] != self._values
        except KeyError:  # an attribute is gone
            return True


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _place(tensor: Tensor) -> tuple[int, bool]:
    return tensor.data_ptr(), tensor.requires_grad


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, strings or flags, or lists and dicts of them."""
    found = {}
    for name, value in module.__dict__.items():
        kind = type(value)
        inner = value.values() if kind is dict else value if kind in (list, tuple) else [value]
        own = name not in _INHERITED and not name.startswith("_tilesmith")
        if own and all(isinstance(v, bool | int | float | str) for v in inner):
            found[name] = kind(value) if kind in (list, dict) else value
    return found
