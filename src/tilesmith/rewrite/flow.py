"""Where a value goes in straight-line code: in what order Python evaluates it, who else may have changed it by then.

For rewrites that move a call to where its argument is made. That is exact as long as nobody could have changed the
argument in between, since a call of a module computes the same a little earlier.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

# What may be asked of a tensor without handing it to anybody who could write to it.
_METADATA = frozenset({"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "size", "dim"})
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BLOCKS = ("body", "orelse", "finalbody")  # fields of statements that hold statements
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


class Use(NamedTuple):
    """The first call of interest that takes a value. others: what was handed the value before, "" if nobody was.
    certain: whether it is reached in any case, and once."""

    call: ast.Call
    others: str
    certain: bool


class BlockTransformer(ast.NodeTransformer):
    """Rewrites statements together with their neighbours: `block` is given each block of a tree, outer ones first."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in BLOCKS:
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, self.block(block))
        return super().generic_visit(node)

    def block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """The statements in the place of those of `block`, which are visited next."""
        raise NotImplementedError


def in_order(node: ast.AST, certain: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes under `node` and itself as Python evaluates them, each with whether that happens in any case, once."""
    for child, sure in _children(node):
        yield from in_order(child, certain and sure)
    yield node, certain


def first_use(statement: ast.stmt, names: set[str], wanted: dict[int, str]) -> Use | None:
    """The first of the `wanted` calls (by id) in a simple statement that takes one of `names` as its one argument."""
    parents = parents_under(statement)
    others = ""
    for node, certain in in_order(statement):
        if id(node) in wanted and isinstance(node.args[0], ast.Name) and node.args[0].id in names:
            return Use(node, others, certain)
        others = others or taker(node, names, parents)
    return None


def escapes_through(statement: ast.stmt, names: set[str]) -> str:
    """Who a simple statement hands one of `names` to, as source text; "" if nobody could write to its value."""
    parents = parents_under(statement)
    return next(filter(None, (taker(node, names, parents) for node in ast.walk(statement))), "")


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether any of `names` occurs under `node`."""
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds anew."""
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    if isinstance(node, ast.AugAssign):
        yield from ((node.value, True), (node.target, True))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((child, True) for child in (node.value, *targets) if child is not None)
    elif isinstance(node, ast.IfExp):
        yield from ((node.test, True), (node.body, False), (node.orelse, False))
    elif isinstance(node, ast.BoolOp):
        yield from ((child, i == 0) for i, child in enumerate(node.values))
    else:
        once = not isinstance(node, _SCOPES)
        yield from ((child, once) for child in ast.iter_child_nodes(node))


def parents_under(node: ast.AST) -> dict[int, ast.AST]:
    """What holds each node under `node`, by ids."""
    return {id(child): parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}


def taker(node: ast.AST, names: set[str], parents: dict[int, ast.AST]) -> str:
    """The source text of `node` if it may write to the value of one of `names`, or keep it for somebody who may."""
    if isinstance(node, ast.Call):  # it happens after its arguments
        taken = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute) and node.func.attr not in _METADATA:
            taken.append(node.func.value)
        return ast.unparse(node) if any(isinstance(t, ast.Name) and t.id in names for t in taken) else ""
    if not (isinstance(node, ast.Name) and node.id in names):
        return ""
    parent = parents[id(node)]
    if isinstance(parent, ast.AugAssign) and node is parent.target:
        return ast.unparse(parent)
    if isinstance(parent, ast.Attribute):
        called = isinstance(parents[id(parent)], ast.Call) and parents[id(parent)].func is parent
        return "" if called or parent.attr in _METADATA else ast.unparse(parent)
    harmless = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.stmt, ast.Call, ast.keyword)
    return "" if isinstance(parent, harmless) else ast.unparse(parent)
