"""Attention that a module's forward spells out: softmax of a product of queries and keys, times the values.

The forward keeps its source. The products that go into a softmax, found in its syntax tree, then give `Scores`, which
follow what the forward does with them; so caches, masks and shapes are the module's own business as before. A method of
its own that computes a softmax (LayoutLMv3) is one.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tilesmith.models.attention.modules import uses_interface
from tilesmith.models.attention.scores import as_tensors, scores, scores_added
from tilesmith.models.reach import observed
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
from tilesmith.rewrite.source import of_self

_SOFTMAX = "_tilesmith_softmax"
_NAMES = {
    "_tilesmith_scores": scores,
    "_tilesmith_scores_added": scores_added,
    _SOFTMAX: functools.partial(F.softmax, dim=-1),
}
_PRODUCTS = ("matmul", "bmm", "baddbmm")
_VIEWS = ("view", "reshape", "transpose", "permute", "contiguous", "unflatten", "flatten")


@dataclass(frozen=True)
class InlineAttentionForm(Form):
    """The same forward with scores that are followed; the old one where somebody asks for weights or watches. methods:
    names of the module's own that compute a softmax."""

    methods: tuple[str, ...] = ()

    def namespace(self, base: type) -> dict[str, Any]:
        whole = base.forward
        names = list(inspect.signature(whole).parameters)[1:]
        place = names.index("output_attentions") if "output_attentions" in names else None
        methods = self.methods
        following = respelled_forward(base, _NAMES, functools.partial(_follow, methods=methods))

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            asked = given("output_attentions", place, args, kwargs)
            changed = any(name in self.__dict__ for name in methods)
            if asked or changed or torch.compiler.is_compiling() or observed(self):
                return whole(self, *args, **kwargs)
            return following(self, *args, **kwargs)

        return {"forward": forward}


@dataclass(frozen=True)
class WeightsForm(Form):
    """A module that hands on weights which a module in it returns unasked: tensors where it is asked for them."""

    def namespace(self, base: type) -> dict[str, Any]:
        whole = base.forward
        place = list(inspect.signature(whole).parameters).index("output_attentions") - 1

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = whole(self, *args, **kwargs)
            return as_tensors(out) if given("output_attentions", place, args, kwargs) else out

        return {"forward": forward}


class InlineAttentionRule(Rule):
    """Modules whose forward gives a product of two tensors to a softmax."""

    name = "attention"
    part = "attention"

    def match(self, site: Site) -> Replace | Skip | None:
        found = _verdict_of(site.module)
        if found is None and _asked(original_class(type(site.module))) and any(map(_unasked, site.module.children())):
            told = "hands on the weights of an attention that is not told whether they are asked for"
            return Replace(WeightsForm(), (), told, computes=False)
        if found is None:
            return None
        if found:
            return Skip(found)
        told = (
            "its scores are followed from queries and keys to the values; where it does more with them than scale, "
            "bias, mask, softmax and dropout, they are computed; weights that it returns unasked, when they are read"
        )
        return Replace(InlineAttentionForm(softmax_methods(original_class(type(site.module)))), ("attention",), told)


def _verdict_of(module: nn.Module) -> str | None:
    """`_verdict` of a module, None where it gives its attention to transformers' interface."""
    return None if uses_interface(module) else _verdict(original_class(type(module)))


@functools.cache
def _asked(cls: type) -> bool:
    """Whether callers tell the modules of a class that they want weights."""
    try:
        return "output_attentions" in inspect.signature(cls.forward).parameters
    except (AttributeError, TypeError, ValueError):  # of a scripted module
        return False


def _unasked(module: nn.Module) -> bool:
    """Whether a module's scores can be followed, and it may return weights that nobody asked it for."""
    return not _asked(original_class(type(module))) and _verdict_of(module) == ""


@functools.cache
def _verdict(cls: type) -> str | None:
    """ "" for a class whose scores can be followed, why they cannot, or None where its forward has none."""
    forward = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return None
    methods = softmax_methods(cls)
    if not methods and not _names_softmax(code):
        behind = next((name for name in code.co_names if _names_softmax(_method(cls, name))), None)
        spelled = behind is not None and set(_PRODUCTS) & set(code.co_names)
        return f"its softmax stands in its method {behind}: scores are followed within one forward" if spelled else None
    try:
        tree = parse(forward)
    except CannotRespell as reason:
        return str(reason) if set(_PRODUCTS) & set(code.co_names) else None
    try:
        _SoftmaxMethods(methods).visit(tree)
        seeds = products(tree)
        if not seeds or not _reach_values(tree):
            return None
        _out_of_place(tree)
        written = _written(tree)
        sources = written & {n.id for seed in seeds for n in ast.walk(seed) if isinstance(n, ast.Name)}
        if sources:
            return f"its forward writes to {', '.join(sorted(sources))}, of which it makes scores, in place"
        results = written & _results(tree)
        if results:
            return (
                f"its forward writes to {', '.join(sorted(results))}, which attention keeps for its backward, in place"
            )
        respelled_forward(cls, _NAMES, functools.partial(_follow, methods=methods))
    except CannotRespell as reason:
        return str(reason)
    return ""


def _names_softmax(code: Any) -> bool:
    return any(name.lower().endswith("softmax") for name in getattr(code, "co_names", ()))


@functools.cache
def softmax_methods(cls: type) -> tuple[str, ...]:
    """The methods that the forward of a class names, that name a softmax, and that compute nothing but the softmax of
    their one argument over its last dim, whatever the instance."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    named = (name for name in getattr(code, "co_names", ()) if _names_softmax(_method(cls, name)))
    return tuple(name for name in named if _is_softmax(cls, name))


def _is_softmax(cls: type, name: str) -> bool:
    method, nobody = getattr(cls, name), object.__new__(cls)  # without attributes: what reads one raises
    for scale in (1.0, 5.0):
        x = probe.wave(2, 3, 7, scale=scale)
        x[..., 4], x[..., 5] = float("-inf"), torch.finfo(x.dtype).min / 2
        before = x.clone()
        try:
            found = probe.call(method, nobody, x)
        except Unlike:
            return False
        if not torch.equal(x, before) or probe.disagreement(found, F.softmax(x, -1)) > 1e-5:
            return False
    return True


class _SoftmaxMethods(ast.NodeTransformer):
    """Calls of softmax in the place of `self.name(x)` of these names."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if of_self(node.func) in self.names and len(node.args) == 1 and not node.keywords:
            node.func = ast.copy_location(ast.Name(_SOFTMAX, ast.Load()), node.func)
        return node


def _method(cls: type, name: str) -> Any:
    """The code of a method of a class itself, or of what it is made from below nn.Module; None for other names."""
    return None if hasattr(nn.Module, name) else getattr(getattr(cls, name, None), "__code__", None)


def products(tree: ast.FunctionDef) -> list[ast.expr]:
    """The products of two tensors in a forward whose result goes into a softmax, whatever happens in between."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    todo = [part for node in ast.walk(tree) if _softmax(node) for part in (node.func, *node.args, *_keywords(node))]
    seen: set[str] = set()
    found: list[ast.expr] = []
    while todo:
        for node in _outermost(todo.pop()):
            if isinstance(node, ast.Name):
                todo += values.get(node.id, []) if node.id not in seen else []
                seen.add(node.id)
            elif node not in found:
                found.append(node)
    return found


def _outermost(node: ast.AST) -> Iterator[ast.expr]:
    """The products under `node`, and the names that are in none of them."""
    if isinstance(node, ast.Name) or _operands(node) is not None:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _outermost(child)


def _keywords(node: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in node.keywords if keyword.arg in ("input", None)]


def _softmax(node: ast.AST) -> bool:
    """Whether this is softmax(x), x.softmax() or nn.Softmax(dim=-1)(x)."""
    if not isinstance(node, ast.Call):
        return False
    of = node.func.func if isinstance(node.func, ast.Call) else node.func
    name = getattr(of, "attr", getattr(of, "id", ""))
    return name.lower().endswith("softmax")


def _operands(node: ast.AST) -> tuple[str, list[ast.expr], list[ast.keyword]] | None:
    """(what serves it, arguments, keywords) of a product of tensors; None for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return "_tilesmith_scores", [node.left, node.right], []
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PRODUCTS):
        return None
    of = node.func.value
    args = list(node.args) if isinstance(of, ast.Name) and of.id == "torch" else [of, *node.args]
    if any(isinstance(argument, ast.Starred) for argument in args):
        return None
    if node.func.attr == "baddbmm":
        known = {keyword.arg for keyword in node.keywords} <= {"batch1", "batch2", "beta", "alpha"}
        return ("_tilesmith_scores_added", args, node.keywords) if known else None
    return ("_tilesmith_scores", args, []) if len(args) == 2 and not node.keywords else None


def _out_of_place(tree: ast.FunctionDef) -> None:
    """Make `x = x + y` of `x += y`, in place, where x was given nothing but products and nothing has read it before:
    nobody else has the tensor then, and attention keeps it for its backward."""
    nodes = list(ast.walk(tree))
    loops = [node for node in nodes if isinstance(node, (ast.For, ast.While))]
    looped = {id(node) for loop in loops for node in ast.walk(loop)}
    products_of = {id(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and _new_product(node.value)}
    parameters = {argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)}

    def own(node: ast.AugAssign) -> bool:
        name = node.target.id
        above = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and n.lineno <= node.end_lineno]
        above = [n for n in above if n is not node.target]
        return name not in parameters and bool(above) and all(id(n) in products_of for n in above)

    augmented = (n for n in nodes if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name))
    results = _results(tree)
    fresh = {id(n) for n in augmented if n.target.id in results and id(n) not in looped and own(n)}
    _OutOfPlace(fresh).visit(tree)


def _new_product(value: ast.expr) -> bool:
    """Whether this is a product, or a view of one."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS:
        value = value.func.value
    return _operands(value) is not None


class _OutOfPlace(ast.NodeTransformer):
    """Assignments in the place of some augmented ones."""

    def __init__(self, nodes: set[int]):
        self.nodes = nodes

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if id(node) not in self.nodes:
            return node
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(read, node.op, node.value)), node)


def _written(tree: ast.FunctionDef) -> set[str]:
    """Names whose value the forward writes to: x += y, x[i] = y, x.add_(y)."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            found |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") and not name.endswith("__"):
                found |= {n.id for n in ast.walk(node.func.value) if isinstance(n, ast.Name)}
    return found - {"self"}


def _weights(tree: ast.FunctionDef) -> set[str]:
    """Names whose value is what a softmax gave, or may be a view of it or made by dropout."""
    found: set[str] = set()
    assigned = _assigned(tree)
    for _ in assigned:  # a name may be made of one that is assigned further down, in a loop
        found |= {name for name, parts in assigned if _holds(parts, found) and not any(map(_operands, parts))}
    return found


def _results(tree: ast.FunctionDef) -> set[str]:
    """Names whose value is a product with the weights, or may be a view of one: modules give new tensors."""
    weights, assigned = _weights(tree), _assigned(tree)
    found = {name for name, parts in assigned if _holds(parts, weights) and any(map(_operands, parts))}
    for _ in assigned:
        found |= {name for name, parts in assigned if any(isinstance(p, ast.Name) and p.id in found for p in parts)}
    return found


def _reach_values(tree: ast.FunctionDef) -> bool:
    """Whether a product takes what a softmax gave, as a router's or a pooling's weights do not."""
    weights = _weights(tree)
    taken = (node for node in ast.walk(tree) if _operands(node) is not None)
    return any(_holds(list(_same_storage(node)), weights) for node in taken)


def _assigned(tree: ast.FunctionDef) -> list[tuple[str, list[ast.AST]]]:
    """Each assignment to one name, and the nodes of its value."""
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name))
    return [(node.targets[0].id, list(_same_storage(node.value))) for node in found]


def _holds(parts: list[ast.AST], weights: set[str]) -> bool:
    """Whether a softmax, or a name of what one gave, is among these nodes."""
    return any(_softmax(part) or (isinstance(part, ast.Name) and part.id in weights) for part in parts)


def _same_storage(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under `node` but for what goes into a softmax or into modules that are no dropout."""
    yield node
    of = getattr(getattr(node, "func", None), "value", None)
    if _softmax(node) or (isinstance(of, ast.Name) and of.id == "self" and "drop" not in node.func.attr):
        return
    for child in ast.iter_child_nodes(node):
        yield from _same_storage(child)


def _follow(tree: ast.FunctionDef, methods: tuple[str, ...]) -> None:
    _SoftmaxMethods(methods).visit(tree)
    _out_of_place(tree)
    _Follow(products(tree)).visit(tree)


class _Follow(ast.NodeTransformer):
    """Calls of ours in the place of some products."""

    def __init__(self, seeds: list[ast.expr]):
        self.seeds = {id(seed) for seed in seeds}

    def visit(self, node: ast.AST) -> ast.AST:
        if id(node) not in self.seeds:
            return self.generic_visit(node)
        name, args, keywords = _operands(node)
        call = ast.Call(ast.Name(name, ast.Load()), [ast.Name("self", ast.Load()), *args], keywords)
        return ast.copy_location(call, node)
