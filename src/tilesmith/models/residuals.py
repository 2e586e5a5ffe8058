"""Residual and norm in one op: where a forward adds two tensors and normalises the sum next.

A layer's own source is kept; only the addition and the call of the norm become one call. The pattern is exact, so the
rewritten forward is right for every argument that the layer takes, caches and masks included.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.norms import Norm, epsilon, is_norm, norm_of, op_of, servable
from tilesmith.models.reach import observed
from tilesmith.rewrite import (
    CannotRespell,
    Form,
    Replace,
    Rule,
    Site,
    Skip,
    original_class,
    parse,
    respelled_forward,
)

_CALL = "_tilesmith_add_"


def add_norm(norm: Norm) -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The function (module, x, y) -> (module(x + y), x + y), in one op where `module` is still this norm of ours and
    nothing observes it."""

    def added(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        alike = isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype is y.dtype
        if not is_norm(module, norm) or not alike or observed(module) or not servable(module, x, norm, added=True):
            total = x + y
            return module(total), total
        weight, eps = getattr(module, "weight", None), epsilon(module, x, norm)
        if norm.centred:
            return ops.add_layer_norm(x, y, weight, getattr(module, "bias", None), eps)
        return ops.add_rms_norm(x, y, weight, eps, norm.offset, norm.casting)

    return added


@dataclass(frozen=True)
class AddNormForm(Form):
    """The same forward, with each addition that feeds one of the children `norms` fused into it."""

    norms: tuple[tuple[str, Norm], ...]

    def namespace(self, base: type) -> dict[str, Any]:
        calls = {_CALL + name: add_norm(norm) for name, norm in self.norms}
        return {"forward": respelled_forward(base, calls, _Fuser(tuple(dict(self.norms))).visit)}


class AddNormRule(Rule):
    """Modules whose forward adds two tensors and hands the sum to a child that the norm rule has replaced."""

    name = "add_norm"

    def __init__(self) -> None:
        self._known: dict[tuple[type, tuple[tuple[str, Norm], ...]], Replace | Skip | None] = {}

    def match(self, site: Site) -> Replace | Skip | None:
        norms = {name: norm_of(child) for name, child in site.module.named_children() if norm_of(child) is not None}
        if not norms:
            return None
        key = original_class(type(site.module)), tuple(norms.items())
        if key not in self._known:
            self._known[key] = _decide(*key)
        return self._known[key]


def _decide(cls: type, norms: tuple[tuple[str, Norm], ...]) -> Replace | Skip | None:
    """What to do with a module of this class that holds these norms, given as (child, norm)."""
    known = dict(norms)
    fuser = _Fuser(tuple(known))
    try:
        tree = parse(inspect.unwrap(cls.forward))
        adds = any(_is_addition(node) for node in ast.walk(tree))
        fuser.visit(tree)
        if not fuser.fused:
            return Skip("no sum in its forward goes straight into a norm", wanted=False) if adds else None
        respelled_forward(cls, {})
    except CannotRespell as error:
        return Skip(str(error))
    fused = tuple(dict.fromkeys(fuser.fused))
    used = tuple(dict.fromkeys("add_" + op_of(known[name]) for name in fused))
    return Replace(
        AddNormForm(tuple((name, known[name]) for name in fused)), used, f"a sum goes straight into {', '.join(fused)}"
    )


class _Fuser(ast.NodeTransformer):
    """Rewrites a syntax tree in place; `fused` then has the name of the norm of each fused place.

    Three shapes are known: `self.norm(x + y)`; `s = x + y` with `n = self.norm(s)` as the next statement but for
    aliases `r = s`; and the same with an `if` on plain names between the two (GPT-2's optional cross-attention), which
    takes the statements around it into both of its branches first.
    """

    def __init__(self, norms: tuple[str, ...]):
        self.norms, self.fused = norms, []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, self._block(block))
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = self._norm_of(node)
        if name is None or not _is_addition(node.args[0]):
            return self.generic_visit(node)
        self.fused.append(name)
        first = ast.Subscript(_call(name, node.args[0]), ast.Constant(0), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(first, node))

    def _block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        while block:
            total, addition = _assignment(block[0])
            count, statements = 1, block[:1]
            if _is_addition(addition):
                block = self._branched(block, total)
                count, statements = self._fused(block, total, addition) or (1, block[:1])
            made += statements
            block = block[count:]
        return made

    def _fused(self, block: list[ast.stmt], total: str, addition: ast.BinOp) -> tuple[int, list[ast.stmt]] | None:
        """`s = x + y; r = s; n = self.norm(s)` at the head of `block` as one call: (statements used up, new ones)."""
        end, aliases = _aliases(block, 1, total)
        name, result = self._normalised(block[end : end + 1], total)
        if name is None or isinstance(block[0], ast.If):
            return None
        self.fused.append(name)
        call = _call(name, addition)
        keeps = [kept for kept in (total, *aliases) if kept != result]
        if keeps:
            both = ast.Tuple([ast.Name(result, ast.Store()), ast.Name(keeps[0], ast.Store())], ast.Store())
            new = [ast.Assign([both], call)]
        else:  # nothing reads the sum again, so it is not kept alive
            new = [ast.Assign([ast.Name(result, ast.Store())], ast.Subscript(call, ast.Constant(0), ast.Load()))]
        new += [ast.Assign([ast.Name(kept, ast.Store())], ast.Name(keeps[0], ast.Load())) for kept in keeps[1:]]
        return end + 1, [ast.fix_missing_locations(ast.copy_location(statement, block[end])) for statement in new]

    def _branched(self, block: list[ast.stmt], total: str) -> list[ast.stmt]:
        """`s = x + y; if t: A; r = s; n = self.norm(s)` as one `if` whose branches both have all but the other's A."""
        if len(block) < 3 or not isinstance(block[1], ast.If) or block[1].orelse:
            return block
        test = list(ast.walk(block[1].test))
        plain = all(isinstance(n, (ast.Compare, ast.Name, ast.Constant, ast.cmpop, ast.Load)) for n in test)
        end, _ = _aliases(block, 2, total)
        if not plain or any(isinstance(n, ast.Name) and n.id == total for n in test):
            return block
        if self._normalised(block[end : end + 1], total)[0] is None:
            return block
        head, branch, tail = block[0], block[1], block[2 : end + 1]
        branch.body = [head, *branch.body, *copy.deepcopy(tail)]
        branch.orelse = [copy.deepcopy(head), *tail]
        return [branch, *block[end + 1 :]]

    def _normalised(self, statements: list[ast.stmt], total: str) -> tuple[str | None, str | None]:
        """The norm in `n = self.norm(total)`, and the name n."""
        result, call = _assignment(statements[0]) if statements else (None, None)
        name = self._norm_of(call)
        if name is None or not (isinstance(call.args[0], ast.Name) and call.args[0].id == total):
            return None, None
        return name, result

    def _norm_of(self, node: ast.AST | None) -> str | None:
        """The norm that `self.norm(one argument)` calls."""
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
            return None
        function = node.func
        of_self = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        return function.attr if of_self and function.value.id == "self" and function.attr in self.norms else None


def _is_addition(node: ast.AST | None) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """The one plain name that a statement binds, and its value."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None, None


def _aliases(block: list[ast.stmt], at: int, total: str) -> tuple[int, list[str]]:
    """Statements `r = total` from `block[at]` on: where they end, and the names they bind."""
    names = []
    while at < len(block):
        name, value = _assignment(block[at])
        if name in (None, total) or not (isinstance(value, ast.Name) and value.id == total):
            break
        names.append(name)
        at += 1
    return at, names


def _call(name: str, addition: ast.BinOp) -> ast.Call:
    norm = ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())
    return ast.Call(ast.Name(_CALL + name, ast.Load()), [norm, addition.left, addition.right], [])
