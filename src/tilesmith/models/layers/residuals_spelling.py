"""How source spells sums and calls of norms: each spelling is known as a plainer one, or rewritten to it in place.

What a rewrite here changes is the text alone: every value is computed in the order in which it was before.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilesmith.rewrite import flow

_READ = (ast.Name, ast.Constant, ast.Attribute, ast.expr_context, ast.operator)  # what computes nothing


class Spelling:
    """What source means in `forward`. norms: names of the children that are norms, those in a container by its name, a
    dot and their key."""

    def __init__(self, forward: Callable[..., Any], norms: Collection[str]):
        self.norms, self._globals = norms, getattr(forward, "__globals__", {})
        code = getattr(forward, "__code__", None)
        self._local = () if code is None else (*code.co_varnames, *code.co_cellvars, *code.co_freevars)

    def norm_of(self, node: ast.AST | None) -> str | None:
        """The norm that `self.norm(one argument)` calls."""
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
            return None
        return None if isinstance(node.args[0], ast.Starred) else self.called(node.func)

    def addition(self, node: ast.AST | None) -> tuple[ast.expr, ast.expr] | None:
        """The operands of `x + y`, `torch.add(x, y)`, `operator.add(x, y)`, `sum([x, y])` and `x.add(y)`."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return node.left, node.right
        if not isinstance(node, ast.Call):
            return None
        meant, operands, names = self._meant(node.func), list(node.args), ()
        if meant is sum:  # 0 + x + y, and 0 + x is x
            listed = len(operands) == 1 and isinstance(operands[0], (ast.List, ast.Tuple))
            operands = operands[0].elts if listed else []
        elif meant is torch.add:
            names = ("input", "other")
        elif meant is None and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
            operands, names = [node.func.value, *operands], ("other",)
        elif meant is not operator.add:
            return None
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        alpha = given.pop("alpha", None) if names else None
        operands += [given.pop(name) for name in names if name in given]
        plain = len(operands) == 2 and not given and not any(isinstance(o, ast.Starred) for o in operands)
        scaled = alpha is not None and not (isinstance(alpha, ast.Constant) and alpha.value == 1)
        return (operands[0], operands[1]) if plain and not scaled else None

    def simplify(self, tree: ast.FunctionDef) -> None:
        """Rewrite `tree` in place: the receiver is called self, a statement binds one name to one value, norms take
        their argument by position, and x + y is what sum([x, y]) was."""
        _call_self(tree)
        _Calls(self).visit(tree)
        for node in list(ast.walk(tree)):
            for field in flow.BLOCKS:
                block = getattr(node, field, None)
                if isinstance(block, list):
                    setattr(node, field, [made for statement in block for made in _split(statement)])
        ast.fix_missing_locations(tree)

    def unfollowed(self, tree: ast.FunctionDef) -> Unfollowed:
        """What a simplified `tree` shows of norms into which no sum was followed."""
        nodes = list(ast.walk(tree))
        takes = {name: ast.unparse(n.args[0]) for n in nodes if (name := self.norm_of(n)) is not None}
        adds = any(self.addition(n) is not None or increased(n) is not None for n in nodes)
        taken: set[str] = set()
        self._spread(tree.body, set(), taken, ())
        return Unfollowed(tuple(takes.items()), frozenset(taken), adds)

    def _spread(self, block: list[ast.stmt], sums: set[str], taken: set[str], within: tuple[type, ...]) -> None:
        """Add to `taken` the norms that `block` calls with what may be a sum. sums: the names that may be one, kept up
        to date; within: the kinds of statements around `block`."""
        for statement in block:
            inner = [getattr(statement, field) for field in flow.BLOCKS if getattr(statement, field, None)]
            for part in inner * 2:  # a loop hands names on to its next turn
                self._spread(part, sums, taken, (*within, type(statement)))
            if inner:
                continue
            calls = ((self.norm_of(node), node) for node in ast.walk(statement))
            taken |= {name for name, node in calls if name is not None and self._may_be_sum(node.args[0], sums)}
            names, value = flow.bound(statement), getattr(statement, "value", None)
            if increased(statement) is not None or (value is not None and self._may_be_sum(value, sums)):
                sums |= names | {increased(statement)} - {None}
            elif ast.If not in within or ast.For in within:  # layers in a loop run, though some may be skipped
                sums -= names

    def _may_be_sum(self, node: ast.AST, sums: set[str]) -> bool:
        """Whether a value is an addition, one of the names `sums`, or a function's of one: not what a child returns."""
        if self.addition(node) is not None or (isinstance(node, ast.Name) and node.id in sums):
            return True
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Subscript):
            parts = [node.value]
        elif isinstance(node, ast.Call) and self._meant(node.func) is None:
            parts = [node.func]  # a method of the value
        return any(self._may_be_sum(part, sums) for part in parts)

    def is_sum(self, call: ast.Call) -> bool:
        """Whether it calls Python's sum."""
        return self._meant(call.func) is sum

    def called(self, function: ast.expr) -> str | None:
        """The norm that `self.norm`, `self.norms[0]`, `self.norms["a"]` and `self.norms.a` are."""
        parts: list[str] = []
        while isinstance(function, (ast.Attribute, ast.Subscript)):
            key = function.attr if isinstance(function, ast.Attribute) else getattr(function.slice, "value", None)
            if type(key) not in (int, str):
                return None
            parts.insert(0, str(key))
            function = function.value
        path = ".".join(parts)
        return path if isinstance(function, ast.Name) and function.id == "self" and path in self.norms else None

    def _meant(self, node: ast.expr) -> Any:
        """The function that a global name is, or an attribute of a module by such a name; else None."""
        if isinstance(node, ast.Name):
            known = self._globals.get(node.id, getattr(builtins, node.id, None))
            return None if node.id in self._local else known
        holder = self._meant(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(holder, node.attr, None) if isinstance(holder, types.ModuleType) else None


@dataclass(frozen=True)
class Unfollowed:
    """A forward in whose source no sum was followed into a norm. takes: the source of the argument of each norm that it
    calls by name; sums: those of them whose argument may be a sum; adds: whether it adds anything; unread: why its
    source cannot be used, "" if it can."""

    takes: tuple[tuple[str, str], ...] = ()
    sums: frozenset[str] = frozenset()
    adds: bool = False
    unread: str = ""

    def calls(self, norms: Iterable[str]) -> str:
        """What its source does with `norms`."""
        takes = dict(self.takes)
        seen = [f"what {name} takes ({shortened(takes[name])})" for name in norms if name in takes]
        unseen = [name for name in norms if name not in takes]
        return ", ".join([*seen, *([f"where it calls {shortened(', '.join(unseen))}"] if unseen else [])])

    def may_add(self, norms: Iterable[str]) -> bool:
        """Whether one of `norms` may take a sum of it, as far as its source shows."""
        takes = dict(self.takes)
        return bool(self.unread) or any(name in self.sums if name in takes else self.adds for name in norms)


class _Calls(ast.NodeTransformer):
    """Calls of norms and of sum, more plainly."""

    def __init__(self, spelling: Spelling):
        self.spelling = spelling

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        keywords = node.keywords if not node.args else []
        if len(keywords) == 1 and keywords[0].arg is not None and self.spelling.called(node.func) is not None:
            node.args, node.keywords = [keywords[0].value], []
        operands = self.spelling.addition(node) if self.spelling.is_sum(node) else None
        if operands is None:
            return node
        return ast.copy_location(ast.BinOp(operands[0], ast.Add(), operands[1]), node)


def identifier(norm: str) -> str:
    """The name of a norm as part of a name in source."""
    return re.sub(r"\W", "_", norm)


def increased(statement: ast.AST) -> str | None:
    """The name x in `x += y`, and in `x.add_(y)`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.target.id if isinstance(statement.target, ast.Name) else None
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    adds = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_"
    return call.func.value.id if adds and isinstance(call.func.value, ast.Name) else None


def assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """The one plain name that a statement binds, and its value."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        return targets[0].id, statement.value
    return None, None


def after_aliases(block: list[ast.stmt], at: int, total: str) -> int:
    """Where statements `r = total` from `block[at]` on end."""
    while at < len(block):
        name, value = assignment(block[at])
        if name in (None, total) or not (isinstance(value, ast.Name) and value.id == total):
            break
        at += 1
    return at


def shortened(text: str, longest: int = 40) -> str:
    """Source text on one line."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _call_self(tree: ast.FunctionDef) -> None:
    """Call the receiver self, unless that names something else."""
    first = next(iter([*tree.args.posonlyargs, *tree.args.args]), None)
    names = [n for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.arg))]
    if first is None or any((n.id if isinstance(n, ast.Name) else n.arg) == "self" for n in names):
        return
    old = first.arg
    for node in names:
        if isinstance(node, ast.Name):
            node.id = "self" if node.id == old else node.id
        else:
            node.arg = "self" if node.arg == old else node.arg


def _split(statement: ast.stmt) -> Iterator[ast.stmt]:
    """`statement` as statements of one value each: `a = b = v`, `a, b = v, w` and what a `:=` in it binds."""
    for one in _hoisted(statement):
        yield from _unpacked(one)


def _unpacked(statement: ast.stmt) -> list[ast.stmt]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) > 1 and all(isinstance(target, ast.Name) for target in targets):  # bound from left to right
        again = ((target, ast.Name(targets[0].id, ast.Load())) for target in targets[1:])
        pairs = [(targets[0], statement.value), *again]
    elif len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(statement.value, ast.Tuple):
        pairs = list(zip(targets[0].elts, statement.value.elts))
        names = [target.id for target, _ in pairs if isinstance(target, ast.Name)]
        binding = any(isinstance(n, (ast.Starred, ast.NamedExpr)) for n in ast.walk(statement.value))
        if binding or not len(set(names)) == len(targets[0].elts) == len(statement.value.elts):
            return [statement]
        pairs.sort(key=lambda pair: not isinstance(pair[1], ast.Name))  # to read a name may come first
        if any(flow.mentions(value, {t.id for t, _ in pairs[:at]}) for at, (_, value) in enumerate(pairs)):
            return [statement]
    else:
        return [statement]
    return [ast.copy_location(ast.Assign([target], value), statement) for target, value in pairs]


def _hoisted(statement: ast.stmt) -> list[ast.stmt]:
    """`x = v; f(x)` of `f(x := v)`, as long as nothing is computed before v that it could change, or that could change
    it."""
    made: list[ast.stmt] = []
    while isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
        before: list[ast.AST] = []
        found = None
        for node, certain in flow.in_order(statement):
            if isinstance(node, ast.NamedExpr):
                found = node if certain else None
                break
            before.append(node)
        if found is None:
            break
        inside = {id(node) for node in ast.walk(found)}
        read = [node for node in before if id(node) not in inside]
        others = any(isinstance(node, ast.NamedExpr) for node in ast.walk(found.value))
        if others or not all(isinstance(node, _READ) and not flow.mentions(node, {found.target.id}) for node in read):
            break
        made.append(ast.copy_location(ast.Assign([found.target], found.value), statement))
        statement = Put(found, ast.copy_location(ast.Name(found.target.id, ast.Load()), found)).visit(statement)
    return [*made, statement]


class Put(ast.NodeTransformer):
    """Puts one node in another's place."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)
