"""Linear layers of one module that read one tensor: which they are, and how the first to be called computes for all."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.rewrite import flow
from tilesmith.rewrite.source import CannotRespell, of_self, parse

MOST_IN_VAIN = 2  # an exception between two layers leaves one behind; code that asks for one layer only, more


class Siblings:
    """The layers of one product, and what each thread has not asked for yet of the last one.

    layers: in the order of the product's parts. asked: by threads; empty in a copy.
    """

    layers: Sequence[nn.Module]
    asked: dict[int, _Asked]

    def served(self, x: Tensor) -> bool:
        """Whether all layers are to compute of x together."""
        raise NotImplementedError

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all layers."""
        raise NotImplementedError

    def output(self, layer: nn.Module, which: int, x: Tensor) -> Tensor | None:
        """What `layer` computes of x; None if it has to do so itself, as a replica of it has."""
        if layer is not self.layers[which] or torch_private.functorch() is not None or torch.jit.is_tracing():
            return None
        thread = threading.get_ident()
        asked = self.asked.get(thread)
        if asked is None:
            asked = self.asked[thread] = _Asked(self)
        return None if asked.off else asked.output(layer, which, x)


def parts_of(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The columns of a product y [..., N] as tensors of their own in y's memory, which are disjoint and may be written
    to. For the forward of an autograd function, whose results may be no views."""
    starts = itertools.accumulate(sizes, initial=y.storage_offset())
    shapes = [(*y.shape[:-1], size) for size in sizes]
    storage = y.untyped_storage()
    return tuple(y.new_empty(0).set_(storage, start, shape, y.stride()) for start, shape in zip(starts, shapes))


def joined(grads: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The gradient of a product from those of its parts, zeros for one that has none; None where no part has one."""
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    shape = like.shape[:-1]
    return torch.cat([like.new_zeros((*shape, n)) if g is None else g for g, n in zip(grads, sizes)], -1)


class _Asked:
    """What one thread has asked a group for."""

    def __init__(self, group: Siblings):
        self.group = group
        self.given: tuple[Any, ...] = ()
        self.waiting: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}  # with the `_stamp` of its layer
        self.in_vain = 0  # products of which only one part was asked for, one after the other
        self.off = False  # a layer was given another tensor than the first

    def output(self, layer: nn.Module, which: int, x: Tensor) -> Tensor | None:
        """As of `Siblings`."""
        group, state = self.group, _state(x)
        if which in self.waiting:
            if self.given[0] is x and self.given[1:] == state:
                found, stamp = self.waiting.pop(which)
                self.in_vain = 0
                if not self.waiting:
                    self.given = ()
                return found if stamp == _stamp(layer) else None
            self.off, self.given, self.waiting = True, (), {}
            return None
        self.in_vain += bool(self.waiting)
        if self.in_vain > MOST_IN_VAIN or not group.served(x):
            self.given, self.waiting = (), {}
            return None
        self.given, self.waiting = (x, *state), dict(enumerate(zip(group.product(x), map(_stamp, group.layers))))
        return self.waiting.pop(which)[0]


def _state(x: Tensor) -> tuple[Any, ...]:
    """What has to be the same for two layers to compute of x together."""
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch_private.autocasts(kind) else None
    return (0 if x.is_inference() else x._version), torch.is_grad_enabled(), cast


def _stamp(layer: nn.Linear) -> tuple[Any, ...]:
    """What tells that parameters of a layer were written to, frozen or replaced; a write to `.data` does not show."""
    parts = layer._parameters.values()
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version, p.requires_grad) for p in parts if p is not None)


@functools.cache
def packable(cls: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """The most of `names` that the methods of `cls` give one tensor, in the order of the calls."""
    found: tuple[str, ...] = ()
    if len(names) < 2:
        return found
    for method in _methods(cls):
        try:
            tree = parse(method)
        except CannotRespell:
            continue
        for node in ast.walk(tree):
            for field in ("body", "orelse"):
                block = getattr(node, field, None)
                if isinstance(block, list):
                    found = max(found, _together(block, names), _looped(block, names), key=len)
    return found


def _methods(cls: type) -> list[Callable[..., Any]]:
    found = (getattr(cls, name, None) for name in ("forward", "_heads", "_qkv"))
    return [inspect.unwrap(method) for method in found if inspect.isfunction(method)]


def _together(block: list[ast.stmt], names: tuple[str, ...]) -> tuple[str, ...]:
    """The children that statements of one block, which are sure to run, give the same unchanged variable.

    A variable that is handed to others in between ends a group. Outside of inference mode the tensor's version tells of
    a write that does not show here, through a view that was made before.
    """
    found: dict[str, list[str]] = {}
    best: tuple[str, ...] = ()
    for statement in block:
        if not isinstance(statement, flow.SIMPLE):
            found = {}
            continue
        parents = flow.parents_under(statement)
        for node, certain in flow.in_order(statement):
            name, given = _called(node, names)
            if name is None:
                found = {given: layers for given, layers in found.items() if not flow.taker(node, {given}, parents)}
            elif certain and name not in found.setdefault(given, []):
                found[given].append(name)
                best = max(best, tuple(found[given]), key=len)
        for given in flow.bound(statement):
            found.pop(given, None)
    return best if len(best) > 1 else ()


def _called(node: ast.AST, names: tuple[str, ...]) -> tuple[str | None, str]:
    """(child, variable) of `self.child(variable)`."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or not isinstance(node.args[0], ast.Name):
        return None, ""
    child = of_self(node.func)
    return (child, node.args[0].id) if child in names else (None, "")


def _looped(block: list[ast.stmt], names: tuple[str, ...]) -> tuple[str, ...]:
    """The children in `(f(x) for f in (self.a, self.b, self.c))`."""
    for node in (n for statement in block for n in ast.walk(statement)):
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)) and len(node.generators) == 1:
            loop, call = node.generators[0], node.elt
            over = loop.iter.elts if isinstance(loop.iter, (ast.Tuple, ast.List)) else []
            children = tuple(child for child in map(of_self, over) if child in names)
            calls = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and isinstance(loop.target, ast.Name)
            if calls and call.func.id == loop.target.id and len(children) == len(over) > 1 and len(call.args) == 1:
                return children
    return ()
