"""Rotary position embedding: attention modules whose forward calls a function that rotates queries and keys.

The function is recognised by what it computes; the forward keeps its own source, in which that one name then means the
op. Which of the angles repeat is read off the model's own rotary module, on small inputs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.layers.norm_rotary import Deferred, deferred, names_of, norm_rotation
from tilesmith.models.layers.norms import Norm, NormRule, norm_of
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import (
    CannotRespell,
    Form,
    Replace,
    Rule,
    Site,
    Skip,
    Unlike,
    given,
    original_class,
    parse,
    probe,
    respelled_forward,
)

# How a table of R features stores its R / 2 angles, and the view that has each of them once.
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda table: table[..., : table.shape[-1] // 2],
    "pairs": lambda table: table[..., ::2],
    "single": lambda table: table,
}
_SPREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda angles: torch.cat((angles, angles), dim=-1),
    "pairs": lambda angles: angles.repeat_interleave(2, dim=-1),
    "single": lambda angles: angles,
}

_ROTATE = "_tilesmith_rotate_"


class Rotation(NamedTuple):
    """How a function rotates: the layout of its tables, whether pairs are neighbours, whether the angles are opposite
    ones, whether it first moves neighbours into halves, and what it takes: "q, k, cos, sin" with heads before tokens or
    by `unsqueeze_dim`; "x, sin, cos" and "q, k, cis", a complex table, with tokens before heads."""

    layout: str
    interleaved: bool
    opposite: bool = False
    moved: bool = False
    takes: str = "q, k, cos, sin"

    def __str__(self) -> str:
        told = "neighbouring features" if self.interleaved else "the halves of a head"
        if self.moved:
            told += ", into which it moves neighbours first"
        return f"{told} by the opposite angles" if self.opposite else told


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
            made.append(norm_rotation(spec, norm, rotate, _LAYOUTS[how.layout], how.interleaved))
        names |= names_of(made)

        def edit(tree: ast.FunctionDef) -> None:
            if specs:
                deferred(tree, tuple(dict(self.norms)), tuple(_plain(self.functions)))
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


def rotation(function: Callable[..., Any], how: Rotation) -> Callable[..., Any]:
    """A function with the parameters of `function` that rotates through the op, and calls it for other ranks."""
    single = _LAYOUTS[how.layout]
    others = list(inspect.signature(function).parameters)[4:]
    place = others.index("unsqueeze_dim") if "unsqueeze_dim" in others else None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        axis = given("unsqueeze_dim", place, more, named, 1)
        if q.ndim != 4 or k.ndim != 4 or cos.ndim != 3 or axis not in (1, 2) or q.dtype is not k.dtype:
            return function(q, k, cos, sin, *more, **named)
        if axis == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        cos, sin = single(cos), single(sin)
        if how.moved:
            q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        q, k = ops.rope(q, k, cos, -sin if how.opposite else sin, interleaved=how.interleaved)
        return (q.transpose(1, 2), k.transpose(1, 2)) if axis == 2 else (q, k)

    def rotate_one(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        wider = torch.promote_types(x.dtype, cos.dtype) is not x.dtype  # then the function's result is wider, too
        if x.ndim != 4 or cos.ndim != 3 or wider:
            return function(x, sin, cos)
        return ops.rope(x.transpose(1, 2), None, cos, sin, interleaved=how.interleaved)[0].transpose(1, 2)

    def rotate_complex(q: Tensor, k: Tensor, cis: Tensor) -> tuple[Tensor, Tensor]:
        if q.ndim != 4 or k.ndim != 4 or cis.ndim != 3 or q.dtype is not k.dtype:
            return function(q, k, cis)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = ops.rope(q, k, cis.real, cis.imag, interleaved=how.interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    return {"q, k, cos, sin": rotate, "x, sin, cos": rotate_one, "q, k, cis": rotate_complex}[how.takes]


def _where_reached(function: Callable[..., Any], how: Rotation) -> Callable[..., Any]:
    ours = rotation(function, how)

    def rotate(module: nn.Module | None, q: Tensor, *more: Any, **named: Any) -> Any:
        if not reaches("rope", q):
            return function(q, *more, **named)
        if module is not None:
            ran(module, "rope")
        return ours(q, *more, **named)

    return rotate


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


def takes(function: Callable[..., Any]) -> str:
    """What a rotation takes, by the number and the names of its parameters; see `Rotation`."""
    names = list(inspect.signature(function).parameters)
    if names[1:] == ["sin", "cos"]:
        return "x, sin, cos"
    return "q, k, cis" if len(names) == 3 else "q, k, cos, sin"


def recognise(function: Callable[..., Any]) -> list[Rotation]:
    """The rotations for which the op gives what `function` gives on small inputs."""
    fits, kind = [], takes(function)
    if kind == "q, k, cos, sin":
        either = (False, True)
        every = [Rotation(*how) for how in itertools.product(_LAYOUTS, either, either, either)]
    else:
        every = [Rotation("single", interleaved, takes=kind) for interleaved in (False, True)]
    for how in every:
        if how.moved and how.interleaved:
            continue
        try:
            if not all(_agrees(function, how, dtype, 8) for dtype in (torch.float32, torch.bfloat16)):
                continue
        except Unlike:
            continue
        if kind == "q, k, cos, sin":
            with contextlib.suppress(Unlike):  # it may not take angles for less than the whole head
                if not _agrees(function, how, torch.float32, 4):
                    continue
        fits.append(how)
    return fits


def angles_of(module: nn.Module) -> str:
    """The layout of the tables that a rotary module returns. Raises `Unlike`."""
    buffers = {name: probe.wave(*b.shape).abs() + 0.1 for name, b in module._buffers.items() if b is not None}
    twin = probe.shell(module, buffers=buffers)
    x, positions = probe.wave(1, 3, 8), torch.arange(1, 4, device="cpu")[None]
    layouts = set()
    for kind in _kinds(module):
        tables = probe.call(twin.forward, x, positions, *kind)
        if not isinstance(tables, tuple) or [getattr(table, "ndim", None) for table in tables] != [3, 3]:
            raise Unlike("the model's rotary module does not return (cos, sin) of [batch, tokens, features]")
        # "single" comes last and fits anything, so it means that nothing repeats.
        layouts.add(next(name for name in _LAYOUTS if all(_stored_as(name, table) for table in tables)))
    if len(layouts) != 1:
        raise Unlike("the model's rotary module makes tables of several layouts")
    return layouts.pop()


def _stored_as(layout: str, table: Tensor) -> bool:
    return torch.equal(_SPREAD[layout](_LAYOUTS[layout](table)), table)


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


def _agrees(function: Callable[..., Any], how: Rotation, dtype: torch.dtype, pairs: int) -> bool:
    """Whether the op does what `function` does when the angles are for `pairs` of the 8 pairs of a head."""
    q, k = probe.wave(2, 4, 5, 16).to(dtype), probe.wave(2, 2, 5, 16, phase=1.0).to(dtype)
    angles = probe.wave(2, 5, pairs, phase=2.0)
    cos, sin = (_SPREAD[how.layout](table).to(dtype) for table in (angles.cos(), angles.sin()))
    if how.takes != "q, k, cos, sin":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    inputs = {
        "q, k, cos, sin": (q, k, cos, sin),
        "x, sin, cos": (q, sin, cos),
        "q, k, cis": (q, k, torch.complex(angles.cos(), angles.sin())),
    }[how.takes]
    found = probe.call(function, *(x.clone() for x in inputs))
    wanted = probe.call(rotation(function, how), *inputs)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    if len(found) != len(wanted) or not all(isinstance(x, Tensor) for x in found):
        return False
    allowed = 4 * torch.finfo(dtype).eps  # the function may round each product, the op rounds once
    return all(
        f.shape == w.shape and f.dtype is w.dtype and bool((f - w).abs().max() <= allowed * w.abs().max())
        for f, w in zip(found, wanted)
    )
