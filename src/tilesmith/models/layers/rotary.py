"""Rotary position embedding: attention modules whose forward calls a function that rotates queries and keys.

The function is recognised by what it computes; the forward keeps its own source, in which that one name then means the
op. Which of the angles repeat is read off the model's own rotary module, on small inputs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.models.layers.joined_queries import joined, whole_rotation
from tilesmith.models.layers.norm_rotary import Deferred, deferred, names_of, norm_rotation
from tilesmith.models.layers.norms import Norm, NormRule, norm_of
from tilesmith.models.layers.rotations import LAYOUTS, SPREAD, Rotation, angles_of_call, recognise, rotation, takes
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import (
    CannotRespell,
    Form,
    Replace,
    Rule,
    Site,
    Skip,
    Unlike,
    original_class,
    parse,
    probe,
    respelled_forward,
)

_ROTATE = "_tilesmith_rotate_"
_WHOLE = "_tilesmith_rotate_whole_"


@dataclass(frozen=True)
class RotaryForm(Form):
    """The same forward, in which some global functions rotate through the op: (name, how) of each. norms: (child, norm)
    of the norms that may go into a rotation."""

    functions: tuple[tuple[str, Rotation], ...]
    norms: tuple[tuple[str, Norm], ...] = ()

    def namespace(self, base: type) -> dict[str, Any]:
        known = inspect.unwrap(base.forward).__globals__
        names: dict[str, Any] = {}
        for name, how in self.functions:
            names[_ROTATE + name] = _where_reached(_function(known[name]) or known[name], how)
            names[name] = functools.partial(names[_ROTATE + name], None)
        by_name = dict(self.functions)
        specs = _taken(inspect.unwrap(base.forward), self.functions, self.norms)
        made = []
        for spec in specs:
            how, norm = by_name[spec.function], dict(self.norms)[spec.norms[0]]
            rotate = names[_ROTATE + spec.function]
            made.append(norm_rotation(spec, norm, rotate, LAYOUTS[how.layout], how.interleaved))
        names |= names_of(made)
        together = _rotations(inspect.unwrap(original_class(base).forward))
        together = {name: f for name, f in together.items() if takes(f) != "x, sin, cos"}
        for name, function in together.items():
            names[_WHOLE + name] = _of_whole(function, by_name.get(name))

        def edit(tree: ast.FunctionDef) -> None:
            if specs:
                deferred(tree, tuple(dict(self.norms)), tuple(_plain(self.functions)))
            joined(tree, together, _WHOLE)
            _WithSelf(frozenset(by_name)).visit(tree)

        return {"forward": respelled_forward(base, names, edit)}


def _plain(functions: tuple[tuple[str, Rotation], ...]) -> list[str]:
    """The functions that rotate as `ops.rms_norm_rope` does."""
    return [name for name, how in functions if how == Rotation(how.layout, how.interleaved)]


def _taken(
    forward: Any, functions: tuple[tuple[str, Rotation], ...], norms: tuple[tuple[str, Norm], ...]
) -> list[Deferred]:
    """The rotations of a forward that take norms into them; none if queries and keys have different ones."""
    if not norms:
        return []
    known = dict(norms)
    found = deferred(parse(forward), tuple(known), tuple(_plain(functions)))
    return found if all(known[spec.norms[0]] == known[spec.norms[1]] for spec in found) else []


class _WithSelf(ast.NodeTransformer):
    """Hands the module to the calls of some functions, which count them for its report."""

    def __init__(self, names: frozenset[str]):
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            node.func = ast.copy_location(ast.Name(_ROTATE + node.func.id, ast.Load()), node.func)
            node.args.insert(0, ast.copy_location(ast.Name("self", ast.Load()), node))
        return node


def _where_reached(function: Callable[..., Any], how: Rotation) -> Callable[..., Any]:
    ours = rotation(function, how)

    def rotate(module: nn.Module | None, q: Tensor, *more: Any, **named: Any) -> Any:
        if not reaches("rope", q):
            return function(q, *more, **named)
        if module is not None:
            ran(module, "rope")
        return ours(q, *more, **named)

    return rotate


def _of_whole(function: Callable[..., Any], how: Rotation | None) -> Callable[..., Any]:
    """`whole_rotation` by a function; None: one that the op does not stand for, in a branch beside one that it does."""
    if how is None:
        return whole_rotation(lambda module, *given, **named: function(*given, **named), lambda *_, **__: None)
    return whole_rotation(_where_reached(function, how), angles_of_call(function, how), **how.options())


class HeadNormRule(NormRule):
    """The norms of modules that rotate queries and keys, and no others."""

    def match(self, site: Site) -> Replace | Skip | None:
        holder = next(site.holders(), None)
        rotates = holder is not None and _rotations(inspect.unwrap(original_class(type(holder)).forward))
        return super().match(site) if rotates else None


class RotaryRule(Rule):
    """Modules whose forward calls a global function that rotates its first two arguments by the next two. norms: norms
    of queries and keys that go straight into it, and were replaced before, become part of the op."""

    name = "rope"
    part = "attention"
    spans = False

    def __init__(self, norms: bool = True) -> None:
        self._norms = norms
        self._known: dict[tuple[Any, ...], Replace | Skip | None] = {}

    def match(self, site: Site) -> Replace | Skip | None:
        cls = original_class(type(site.module))
        found = _rotations(inspect.unwrap(cls.forward))
        if len(found) > 1:
            dead = _passed_by(site.module, inspect.unwrap(cls.forward))
            found = {name: function for name, function in found.items() if name not in dead}
        named = ((name, norm_of(child)) for name, child in site.module.named_children()) if self._norms else ()
        norms = tuple(
            (name, norm)
            for name, norm in named
            if norm is not None and not norm.centred and getattr(site.module._modules[name], "weight", None) is not None
        )
        key = cls, tuple(found), norms
        if key not in self._known:
            self._known[key] = _decide(cls, found, site.root, norms)
        return self._known[key]


def _decide(
    cls: type, found: dict[str, Callable[..., Any]], root: nn.Module, norms: tuple[tuple[str, Norm], ...]
) -> Replace | Skip | None:
    """What to do with the modules of one class in a model, whose forward calls these functions."""
    if not found:
        return None
    fits, reasons = [], []
    try:
        respelled_forward(cls, {})
        expanded = [function for function in found.values() if takes(function) == "q, k, cos, sin"]
        layouts = _layouts(root) if expanded else {"single"}  # the others repeat the angles themselves
    except (Unlike, CannotRespell) as reason:
        return Skip(str(reason))
    for name, function in found.items():
        own = {"single"} if takes(function) != "q, k, cos, sin" else layouts
        known = [how for how in recognise(function) if own == {how.layout}]
        if known:
            fits.append((name, known[0]))
            reasons.append(f"{name} rotates {known[0]}")
        else:
            reasons.append(
                f"{name} {'stays: it ' if len(found) > 1 else ''}differs, on small inputs, from a rotation of pairs by "
                "the angles of the model's rotary module"
            )
    if not fits:
        return Skip("; ".join(reasons))
    taken = _taken(inspect.unwrap(cls.forward), tuple(fits), norms)
    reasons += [f"{' and '.join(spec.norms)} go into {spec.function}" for spec in taken]
    rest = len(taken) < _calls(inspect.unwrap(cls.forward), tuple(name for name, _ in fits))
    used = (*(("rms_norm_rope",) if taken else ()), *(("rope",) if rest else ()))
    return Replace(RotaryForm(tuple(fits), norms if taken else ()), used, "; ".join(reasons))


def _calls(forward: Any, names: tuple[str, ...]) -> int:
    """How often a forward calls functions of these names."""
    calls = (node.func for node in ast.walk(parse(forward)) if isinstance(node, ast.Call))
    return sum(isinstance(of, ast.Name) and of.id in names for of in calls)


def _layouts(root: nn.Module) -> set[str]:
    """How the rotary modules of the model store their angles. Raises `Unlike` when that cannot be seen."""
    makers = [module for module in root.modules() if any("inv_freq" in name for name in module._buffers)]
    verdicts = probe.Verdicts()
    found = {verdicts.of(module, functools.partial(angles_of, module)) for module in makers}
    if not found:
        raise Unlike("no module of this model makes the angles, so their layout is not known")
    return found


def angles_of(module: nn.Module) -> str:
    """The layout of the tables that a rotary module returns. Raises `Unlike`."""
    buffers = {name: probe.wave(*b.shape).abs() + 0.1 for name, b in module._buffers.items() if b is not None}
    twin = probe.shell(module, buffers=buffers)
    # one that was put on the instance is asked itself, as it stays and makes what the attention gets
    forward = module.__dict__.get("forward", twin.forward)
    x, positions = probe.wave(1, 3, 8), torch.arange(1, 4, device="cpu")[None]
    layouts = set()
    for kind in _kinds(module):
        tables = probe.call(forward, x, positions, *kind)
        if not isinstance(tables, tuple) or [getattr(table, "ndim", None) for table in tables] != [3, 3]:
            raise Unlike("the model's rotary module does not return (cos, sin) of [batch, tokens, features]")
        # "single" comes last and fits anything, so it means that nothing repeats.
        layouts.add(next(name for name in LAYOUTS if all(_stored_as(name, table) for table in tables)))
    if len(layouts) != 1:
        raise Unlike("the model's rotary module makes tables of several layouts")
    return layouts.pop()


def _stored_as(layout: str, table: Tensor) -> bool:
    return torch.equal(SPREAD[layout](LAYOUTS[layout](table)), table)


def _kinds(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """The further arguments of a rotary module that serves several types of layers."""
    if "layer_type" not in inspect.signature(original_class(type(module)).forward).parameters:
        yield ()
        return
    for name in module._buffers:
        if name.endswith("_inv_freq") and not name.endswith("original_inv_freq"):
            yield (name.removesuffix("_inv_freq"),)


def _rotations(forward: Any) -> dict[str, Callable[..., Any]]:
    """Global functions that `forward` names and whose parameters start like those of a rotation."""
    if not isinstance(forward, types.FunctionType):
        return {}
    known = {name: _function(forward.__globals__.get(name)) for name in forward.__code__.co_names if "rotary" in name}
    return {name: f for name, f in known.items() if f is not None}


def _function(value: Any) -> Callable[..., Any] | None:
    """A function, or one of which the `kernels` package made a module, as long as nothing of the Hub computes it."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        return value.forward if getattr(value.forward, "__func__", None) is type(value).forward else None
    return value if isinstance(value, types.FunctionType) else None


def _passed_by(module: nn.Module, forward: types.FunctionType) -> set[str]:
    """Names that the forward has only in branches that this module's configuration never takes."""
    try:
        tree = parse(forward)
    except CannotRespell:
        return set()
    dead: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp)):
            known = _setting(module, node.test)
            branch = [] if known is None else node.orelse if known else node.body
            dead += branch if isinstance(branch, list) else [branch]
    gone = {id(n) for branch in dead for n in ast.walk(branch)}
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return {n.id for n in names} - {n.id for n in names if id(n) not in gone}


def _setting(module: nn.Module, test: ast.expr) -> bool | None:
    """The value of `self.a.b` where that is True or False; None for any other test."""
    path: list[str] = []
    while isinstance(test, ast.Attribute):
        path.insert(0, test.attr)
        test = test.value
    if not path or not (isinstance(test, ast.Name) and test.id == "self"):
        return None
    value = functools.reduce(lambda of, name: getattr(of, name, None), path, module)
    return value if isinstance(value, bool) and path != ["training"] else None
