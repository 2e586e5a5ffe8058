"""Norms of queries and keys that go straight into a rotation: both in one op.

The forward keeps its source. A statement `q = self.q_norm(x).transpose(1, 2)` becomes `q = x.transpose(1, 2)`, and the
rotation of q and k is told which norms they lack. That is exact as long as nobody but the rotation sees q in between.
A norm of whole rows, which `q = q.view(...).transpose(1, 2)` splits into heads afterwards (Olmo 2), is taken likewise.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.layers.norms import Norm, by_head, epsilon, is_norm, servable
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.rewrite import flow

OP = "rms_norm_rope"
_CALL = "_tilesmith_norm_rotate_"


class Deferred(NamedTuple):
    """One rotation by the global function of this name; for queries and for keys the norm, by the name of the child,
    and whether what it gives is transposed before the rotation; rows: whether it is split into heads before that."""

    function: str
    norms: tuple[str, str]
    transposed: tuple[bool, bool]
    rows: bool = False


def deferred(tree: ast.FunctionDef, norms: tuple[str, ...], functions: tuple[str, ...]) -> list[Deferred]:
    """Edit a forward in place: the rotations that take the norms into them."""
    found = []
    for at, statement in enumerate(tree.body):
        calls = [n for n in ast.walk(statement) if _rotates(n, functions)] if isinstance(statement, flow.SIMPLE) else []
        if len(calls) != 1:
            continue
        names = [argument.id for argument in calls[0].args[:2]]
        made = [_made(tree.body[:at], name, norms) for name in names]
        if names[0] == names[1] or None in made:
            continue
        (q_at, q_call, q_turned, q_rows), (k_at, k_call, k_turned, k_rows) = made
        if q_rows != k_rows:
            continue
        for where, call in ((q_at, q_call), (k_at, k_call)):
            _Unwrap(call).visit(tree.body[where])
        spec = Deferred(calls[0].func.id, (q_call.func.attr, k_call.func.attr), (q_turned, k_turned), q_rows)
        calls[0].func = ast.copy_location(ast.Name(_CALL + str(len(found)), ast.Load()), calls[0])
        calls[0].args.insert(0, ast.copy_location(ast.Name("self", ast.Load()), calls[0]))
        found.append(spec)
    return found


def names_of(made: list[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The functions that the edited forward calls, by name, in the order of `deferred`."""
    return {_CALL + str(i): function for i, function in enumerate(made)}


def norm_rotation(
    spec: Deferred, norm: Norm, rotate: Callable[..., Any], single: Callable[[Tensor], Tensor], interleaved: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function (module, q, k, cos, sin, ...) that normalises and rotates: by the op where it serves, else by the
    modules and `rotate`."""
    names, transposed, rows = spec.norms, spec.transposed, spec.rows
    norm_dim = "row" if rows else "head"

    def norm_rotate(
        module: nn.Module, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = (module._modules[name] for name in names)
        fits = reaches(OP, q) and q.ndim == k.ndim == 4 and cos.ndim == 3 and q.dtype is k.dtype
        fits = (
            fits
            and norm.casting != "none"
            and not more
            and named.get("unsqueeze_dim", 1) == 1
            and set(named) <= {"unsqueeze_dim"}
        )
        for child, x in ((q_norm, q), (k_norm, k)):
            fits = fits and not by_head(child)
            fits = fits and is_norm(child, norm) and not observed(child) and servable(child, x, norm)
            fits = fits and (not rows or child.weight.numel() == x.shape[1] * x.shape[3])
        if not (fits and epsilon(q_norm, q, norm) == epsilon(k_norm, k, norm)):
            if rows:
                q, k = _apart_by_row(q_norm, q), _apart_by_row(k_norm, k)
            else:
                q, k = _apart(q_norm, q, transposed[0]), _apart(k_norm, k, transposed[1])
            return rotate(module, q, k, cos, sin, *more, **named)
        ran(module, OP)
        weights = getattr(q_norm, "weight", None), getattr(k_norm, "weight", None)
        options = {"eps": epsilon(q_norm, q, norm), "weight_offset": norm.offset, "casting": norm.casting}
        return ops.rms_norm_rope(
            q, k, *weights, single(cos), single(sin), interleaved=interleaved, norm_dim=norm_dim, **options
        )

    return norm_rotate


def _apart(module: nn.Module, x: Tensor, transposed: bool) -> Tensor:
    return module(x.transpose(1, 2)).transpose(1, 2) if transposed else module(x)


def _apart_by_row(module: nn.Module, x: Tensor) -> Tensor:
    """The norm of rows that were split into heads and transposed."""
    split = x.transpose(1, 2)
    width = module.weight.numel()
    rows = split.flatten(2) if split.shape[2] * split.shape[3] == width else split.reshape(-1, width)
    return module(rows).view(split.shape).transpose(1, 2)


def _rotates(node: ast.AST, functions: tuple[str, ...]) -> bool:
    """Whether this is f(q, k, cos, sin, ...) of two variables."""
    calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
    return calls and len(node.args) >= 4 and all(isinstance(x, ast.Name) for x in node.args[:2])


def _made(before: list[ast.stmt], name: str, norms: tuple[str, ...]) -> tuple[int, ast.Call, bool, bool] | None:
    """Where the statements `before` a rotation make a variable, the call of its norm, whether that is transposed, and
    whether it is split into heads first; None where something else may see it, or its last value is no norm's."""
    split = False
    for at in range(len(before) - 1, -1, -1):
        statement = before[at]
        if not flow.mentions(statement, {name}):
            continue
        if not isinstance(statement, flow.SIMPLE):
            return None
        if name not in flow.bound(statement):
            if flow.escapes_through(statement, {name}) or _reads(statement, name):
                return None
            continue
        target = statement.targets if isinstance(statement, ast.Assign) else []
        if len(target) != 1 or not isinstance(target[0], ast.Name):
            return None
        if not split and _splits(statement.value, name):
            split = True
            continue
        call, turned = _norm_call(statement.value, norms)
        return None if call is None or (split and turned) else (at, call, turned, split)
    return None


def _reads(statement: ast.stmt, name: str) -> bool:
    """Whether values of a variable go anywhere, other than its shape, dtype and device."""
    asked = {id(n.value) for n in ast.walk(statement) if isinstance(n, ast.Attribute) and n.attr in ("shape", "dtype")}
    return any(isinstance(n, ast.Name) and n.id == name and id(n) not in asked for n in ast.walk(statement))


def _transposes(value: ast.expr) -> bool:
    """Whether this is `x.transpose(1, 2)`."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "transpose"
        and not value.keywords
        and [getattr(a, "value", None) for a in value.args] == [1, 2]
    )


def _splits(value: ast.expr, name: str) -> bool:
    """Whether this is `name.view(sizes).transpose(1, 2)`, of sizes that are a variable or numbers."""
    viewed = value.func.value if _transposes(value) else None
    if not (isinstance(viewed, ast.Call) and isinstance(viewed.func, ast.Attribute) and viewed.func.attr == "view"):
        return False
    plain = all(isinstance(size, (ast.Name, ast.Constant, ast.Attribute, ast.UnaryOp)) for size in viewed.args)
    of = viewed.func.value
    return plain and not viewed.keywords and isinstance(of, ast.Name) and of.id == name


def _norm_call(value: ast.expr, norms: tuple[str, ...]) -> tuple[ast.Call | None, bool]:
    """(the call, whether it is transposed) of `self.norm(x)` and `self.norm(x).transpose(1, 2)`."""
    turned = _transposes(value)
    call = value.func.value if turned else value
    plain = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and not call.keywords
    if not plain or len(call.args) != 1 or isinstance(call.args[0], ast.Starred) or call.func.attr not in norms:
        return None, False
    of = call.func.value
    return (call, turned) if isinstance(of, ast.Name) and of.id == "self" else (None, False)


class _Unwrap(ast.NodeTransformer):
    """Puts the argument of one call in its place."""

    def __init__(self, call: ast.Call):
        self.call = call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return node.args[0] if node is self.call else self.generic_visit(node)
