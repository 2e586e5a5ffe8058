"""Packed products: linear layers that read one tensor (q, k and v; gate and up) computed as one GEMM.

The weights of such layers are moved into one storage, one below the other. They stay the same Parameter objects, each
a contiguous view of its part, so a state dict, an optimizer and checkpoints see what they saw. The layers are still
called one by one, by whoever called them: the first to be called computes the product of all, the others hand out
their part of it if they are given the same tensor.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine import torch_private
from tilesmith.models.layers.gated_mlps import GatedMlpRule
from tilesmith.models.reach import observed
from tilesmith.nn import GatedMLP
from tilesmith.rewrite import CannotRespell, Form, Replace, Rule, Site, Skip, flow, forms, original_class, parse
from tilesmith.rewrite.variants import obstacle, swap, unswap

_GROUP = "_tilesmith_group"
# A backward joins the gradients of the parts first, one pass over them. Above so many rows that costs more than the
# launches that it saves: at 8,192 rows of a Llama of 8 B it reads and writes 0.9 GB for gate and up.
MOST_ROWS = 4096
MOST_IN_VAIN = 2  # an exception between two layers leaves one behind; code that asks for one layer only, more


class _Joined(torch.autograd.Function):
    """Tensors that follow one another in memory as one; its gradient is handed out as views."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)  # whoever writes to one of them before the backward is told
        return _spanning(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split([part.shape[0] for part in ctx.saved_tensors])


class _Parts(torch.autograd.Function):
    """The columns of a product as separate tensors, which are disjoint and may be written to; one pass back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        starts = itertools.accumulate(sizes, initial=y.storage_offset())
        shapes = [(*y.shape[:-1], size) for size in sizes]
        storage = y.untyped_storage()
        return tuple(y.new_empty(0).set_(storage, start, shape, y.stride()) for start, shape in zip(starts, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads, -1), None


class Group:
    """The layers of one packed product, and what of the last one has not been asked for yet."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        self.given: tuple[Any, ...] = ()
        self.waiting: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}  # with the `_stamp` of its layer
        self.in_vain = 0  # products of which only one part was asked for, one after the other
        self.off = False  # a layer was given another tensor than the first

    def output(self, layer: nn.Module, which: int, x: Tensor) -> Tensor | None:
        """What `layer` computes of x; None if it has to do so itself, as a replica of it has."""
        if self.off or layer is not self.layers[which] or torch_private.functorch() is not None:
            return None
        state = _state(x)
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
        if self.in_vain > MOST_IN_VAIN or not self.served(x):
            self.given, self.waiting = (), {}
            return None
        self.given, self.waiting = (x, *state), dict(enumerate(zip(self.product(x), map(_stamp, self.layers))))
        return self.waiting.pop(which)[0]

    def served(self, x: Tensor) -> bool:
        """Whether the weights lie one below the other, x is of their kind, and one product is worth it."""
        if torch.is_grad_enabled() and x.numel() > MOST_ROWS * x.shape[-1]:
            return False
        weights, biases = _tensors(self.layers)
        if len({weight.requires_grad for weight in weights}) > 1 or len(biases) not in (0, len(weights)):
            return False
        return type(x) in (Tensor, nn.Parameter) and adjacent(weights) and adjacent(biases)

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all layers."""
        weights, biases = _tensors(self.layers)
        bias = _joined(biases) if biases else None
        sizes = tuple(weight.shape[0] for weight in weights)
        return _Parts.apply(F.linear(x, _joined(weights), bias), sizes)


def _state(x: Tensor) -> tuple[Any, ...]:
    """What has to be the same for two layers to compute of x together."""
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (0 if x.is_inference() else x._version), torch.is_grad_enabled(), cast


def _stamp(layer: nn.Linear) -> tuple[Any, ...]:
    """What tells that parameters of a layer were written to, frozen or replaced; a write to `.data` does not show."""
    parts = layer._parameters.values()
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version, p.requires_grad) for p in parts if p is not None)


def adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether these are plain parameters of one storage, each contiguous and where the one before ends."""
    end = None
    for part in parts:
        if type(part) is not nn.Parameter or not part.is_contiguous() or part.device.type == "meta":
            return False
        here = part.data_ptr(), part.storage_offset()
        if end is not None and here != end:
            return False
        end = here[0] + part.numel() * part.element_size(), here[1] + part.numel()
    return True


def _spanning(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    with torch.no_grad():
        return first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Joined.apply(*parts)
    return _spanning(parts)


@torch.inference_mode(False)  # what is made in it could not be trained
def pack(parts: Sequence[Tensor]) -> None:
    """Move the values of parameters into one new storage, in this order; the parameters stay the same objects."""
    if parts and not adjacent(parts):
        whole = torch.cat([part.data for part in parts])
        for part, piece in zip(parts, whole.split([part.shape[0] for part in parts])):
            part.data = piece


@torch.inference_mode(False)
def unpack(parts: Sequence[Tensor]) -> None:
    """Give each parameter a storage of its own again, with its values."""
    if len(parts) > 1 and adjacent(parts):
        for part in parts:
            part.data = part.data.clone()


def _tensors(layers: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]


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
    """A module some of whose linear layers, by name, share one storage and one product."""

    names: tuple[str, ...]

    def namespace(self, base: type) -> dict[str, Any]:
        names = self.names

        def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            base._apply(self, fn, recurse)
            for parts in _tensors([self._modules[name] for name in names]):
                if all(type(p) is nn.Parameter and p.device.type != "meta" for p in parts):
                    pack(parts)  # .to() moved them one by one
            return self

        return {"_apply": _apply}

    def enter(self, module: nn.Module) -> None:
        layers = [module._modules[name] for name in self.names]
        group = Group(layers)
        for parts in _tensors(layers):
            pack(parts)
        for which, layer in enumerate(layers):
            swap(layer, MemberForm(which))
            layer.__dict__[_GROUP] = group
        module.__dict__[_GROUP] = group

    def leave(self, module: nn.Module) -> None:
        group = module.__dict__.pop(_GROUP)  # its layers may stand within others by now, such as PEFT's, or nowhere
        for layer in group.layers:
            if any(isinstance(form, MemberForm) for form in forms(layer)[:1]):
                unswap(layer)
        for parts in _tensors(group.layers):
            unpack(parts)


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
        told = f"{', '.join(names)} read one tensor: one product of weights that lie in one storage"
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
    """A sentence on the classes of modules of which `PackRule(kind)` would pack at least one; none without any."""
    rule, found = PackRule(kind), set()
    for fqn, module in model.named_modules() if obstacle(model) is None else ():
        cls = original_class(type(module))
        if cls not in found and not _packed(module) and isinstance(rule.match(Site(model, fqn, module)), Replace):
            found.add(cls)
    kinds = ", ".join(sorted(cls.__name__ for cls in found))
    return () if not found else (
        f"{kinds}: layers that read one tensor (q, k and v; gate and up) are not merged into one product, which needs "
        "their weights in one storage; create_unified_attention_fusion packs them at OptimizationLevel.AGGRESSIVE.",
    )  # fmt: skip


def _packed(module: nn.Module) -> PackedForm | None:
    return next((form for form in forms(module) if isinstance(form, PackedForm)), None)


def _linears(module: nn.Module) -> tuple[str, ...]:
    """Children that are linear layers of any make."""
    sizes = ("in_features", "out_features")
    return tuple(n for n, c in module.named_children() if all(isinstance(getattr(c, s, None), int) for s in sizes))


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
    """The children that statements of one block, which are sure to run, give the same unchanged variable."""
    found: dict[str, list[str]] = {}
    best: tuple[str, ...] = ()
    for statement in block:
        if not isinstance(statement, flow.SIMPLE):
            found = {}
            continue
        for node, certain in flow.in_order(statement):
            name, given = _called(node, names)
            if name is not None and certain and name not in found.setdefault(given, []):
                found[given].append(name)
                best = max(best, tuple(found[given]), key=len)
        for given in flow.bound(statement):
            found.pop(given, None)
    return best if len(best) > 1 else ()


def _called(node: ast.AST, names: tuple[str, ...]) -> tuple[str | None, str]:
    """(child, variable) of `self.child(variable)`."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or not isinstance(node.args[0], ast.Name):
        return None, ""
    child = _child(node.func)
    return (child, node.args[0].id) if child in names else (None, "")


def _child(node: ast.AST) -> str | None:
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if of_self else None


def _looped(block: list[ast.stmt], names: tuple[str, ...]) -> tuple[str, ...]:
    """The children in `(f(x) for f in (self.a, self.b, self.c))`."""
    for node in (n for statement in block for n in ast.walk(statement)):
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)) and len(node.generators) == 1:
            loop, call = node.generators[0], node.elt
            over = loop.iter.elts if isinstance(loop.iter, (ast.Tuple, ast.List)) else []
            children = tuple(child for child in map(_child, over) if child in names)
            calls = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and isinstance(loop.target, ast.Name)
            if calls and call.func.id == loop.target.id and len(children) == len(over) > 1 and len(call.args) == 1:
                return children
    return ()


def _unfit(root: nn.Module, layers: dict[str, nn.Module]) -> str | None:
    """Why the layers cannot share a storage, in words; None when they can."""
    for name, layer in layers.items():
        cls = original_class(type(layer))
        why = obstacle(layer)
        if why is not None:
            return f"{name}: {why}"
        if cls.forward is not nn.Linear.forward:
            return f"{name} is {cls.__module__.partition('.')[0]}'s {cls.__name__}, not a plain linear layer"
        if observed(layer):
            return f"{name} has hooks, which would see a product that is made earlier"
        for of, part in layer.named_parameters(recurse=False):
            if type(part) is not nn.Parameter:
                return f"{name}.{of} is a {type(part).__name__}, whose memory is not the library's to move"
            if part.device.type == "meta":
                return f"{name}.{of} is on meta: load the model first"
            if not part.is_floating_point():
                return f"{name}.{of} is {str(part.dtype).removeprefix('torch.')}: quantised"
    first, *rest = layers.values()
    for layer in rest:
        if (layer.bias is None) != (first.bias is None):
            return "some of them have a bias and some have none"
        for mine, other in zip(layer.parameters(), first.parameters()):
            if (mine.dtype, mine.device) != (other.dtype, other.device):
                return "they differ in dtype or device"
            if mine.requires_grad != other.requires_grad:
                return "some of their parameters are frozen and some are not"
    return _shared(root, layers)


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
