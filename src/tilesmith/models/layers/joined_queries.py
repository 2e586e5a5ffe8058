"""Queries of which a forward splits off a part, rotates it, and joins both again: rotated whole, in one op.

The forward keeps its source. Of latent attention's `a, b = torch.split(q, sizes, dim=-1)`, `b, k = rotate(b, k, ...)`
and `q = torch.cat((a, b), dim=-1)` the second gives what the third would, so that nothing is copied but by the
rotation. That is exact as long as nobody sees `a` and `b` in between.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import flow

_METADATA = ("shape", "dtype", "device")


def joined(tree: ast.FunctionDef, functions: Collection[str], prefix: str) -> set[str]:
    """Edit a forward in place. A call of one of the `functions` that rotates such a part becomes one of `prefix` + its
    name, which gets the module, the part that is not rotated and the whole before its own arguments. Returns the
    functions that are called so."""
    taken: set[str] = set()
    for first, split in enumerate(tree.body):
        parts = _parts(split)
        if parts is None:
            continue
        last = next((i for i, s in enumerate(tree.body) if i > first and _joins(s, parts[:2])), None)
        calls = None if last is None else _rotations(tree.body, first, last, parts, functions)
        for call in calls or ():
            name = call.func.id
            call.func = ast.copy_location(ast.Name(prefix + name, ast.Load()), call)
            more = ("self", parts[0], parts[2])
            call.args[:0] = [ast.copy_location(ast.Name(one, ast.Load()), call) for one in more]
            taken.add(name)
        if calls:
            tree.body[last].value = ast.copy_location(ast.Name(parts[1], ast.Load()), split)
    return taken


def whole_rotation(
    rotate: Callable[..., tuple[Tensor, Tensor]], angles: Callable[..., tuple[Tensor, Tensor, int] | None], **how: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function (module, part, whole, q, k, ...) -> (whole with its last features rotated, k rotated). rotate: takes
    the module and what the forward gave; angles: see `rotary.angles_of_call`; how: options of the op."""

    def rotate_whole(
        module: nn.Module, part: Tensor, whole: Tensor, q: Tensor, k: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        found = angles(q, k, *more, **named) if reaches("rope", q) else None
        if found is None or found[2] != 1 or 2 * found[0].shape[-1] != q.shape[-1]:
            q, k = rotate(module, q, k, *more, **named)
            return torch.cat((part, q), dim=-1), k
        ran(module, "rope")
        return ops.rope(whole, k, *found[:2], last=True, **how)

    return rotate_whole


def _parts(statement: ast.stmt) -> tuple[str, str, str] | None:
    """(a, b, q) of `a, b = torch.split(q, [n, m], dim=-1)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    names, call = _names(statement.targets[0]), statement.value
    if len(names) != 2 or not _of_torch(call, "split") or len(call.args) != 2:
        return None
    of, sizes = call.args
    if not isinstance(of, ast.Name) or not isinstance(sizes, (ast.List, ast.Tuple)) or len(sizes.elts) != 2:
        return None
    return (*names, of.id) if len({*names, of.id}) == 3 else None


def _joins(statement: ast.stmt, parts: tuple[str, str]) -> bool:
    """Whether this is `q = torch.cat((a, b), dim=-1)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _of_torch(statement.value, "cat"):
        return False
    made, args = statement.targets[0], statement.value.args
    return isinstance(made, ast.Name) and made.id not in parts and len(args) == 1 and _names(args[0]) == list(parts)


def _rotations(
    body: list[ast.stmt], first: int, last: int, parts: tuple[str, str, str], functions: Collection[str]
) -> list[ast.Call] | None:
    """The calls, one of which rotates the part between the statements `first` and `last`; None where somebody else may
    see a part, or change the whole."""
    passed, part, whole = parts
    if any(flow.mentions(s, {passed, part}) for s in body[last + 1 :]):
        return None
    found: list[ast.Call] = []
    for statement in body[first + 1 : last]:
        if not flow.mentions(statement, {*parts}):
            continue
        branches = [statement]
        if isinstance(statement, ast.If):
            if flow.mentions(statement.test, {*parts}):
                return None
            branches = [branch[0] if len(branch) == 1 else None for branch in (statement.body, statement.orelse)]
        calls = [_rotation(branch, part, functions) for branch in branches]
        if found or None in calls or any(flow.mentions(branch, {passed, whole}) for branch in branches):
            return None
        found = calls
    return found or None


def _rotation(statement: ast.stmt | None, part: str, functions: Collection[str]) -> ast.Call | None:
    """The call of `part, k = rotate(part, k, ...)`."""
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
        or not isinstance(statement.value, ast.Call)
    ):
        return None
    names, call = _names(statement.targets[0]), statement.value
    if len(names) != 2 or names[0] != part or names[1] == part or len(call.args) < 2:
        return None
    if not isinstance(call.func, ast.Name) or call.func.id not in functions:
        return None
    asked = {id(n.value) for n in ast.walk(call) if isinstance(n, ast.Attribute) and n.attr in _METADATA}
    seen = [n for n in ast.walk(call) if isinstance(n, ast.Name) and n.id == part and id(n) not in asked]
    return call if seen == call.args[:1] else None


def _names(node: ast.expr) -> list[str]:
    """The variables of a tuple or list of nothing else."""
    elements = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
    names = [e.id for e in elements if isinstance(e, ast.Name)]
    return names if len(names) == len(elements) else []


def _of_torch(node: ast.expr, name: str) -> bool:
    """Whether this is `torch.name(..., dim=-1)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name):
        return False
    last = [(k.arg, ast.unparse(k.value)) for k in node.keywords] == [("dim", "-1")]
    return last and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
