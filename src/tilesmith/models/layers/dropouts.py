"""Dropouts of what a sum adds, as source spells them: `self.dropout(y)` of an nn.Dropout, or
`nn.functional.dropout(y, p=self.dropout, training=self.training)`."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.models.reach import observed


class Sum(NamedTuple):
    """The operands of a sum. dropout: what drops elements of operand `which` first, as source, which evaluates to an
    nn.Dropout or to (p, training); None: nothing does."""

    left: ast.expr
    right: ast.expr
    dropout: ast.expr | None = None
    which: int = 0


class Dropouts:
    """Recognises them in the forward of one class. names: the children, and the attributes that hold probabilities,
    which may drop something."""

    def __init__(self, forward: Callable[..., Any], names: tuple[str, ...]):
        self.names, self.globals = names, getattr(forward, "__globals__", {})

    def within(self, operands: tuple[ast.expr, ast.expr]) -> Sum:
        """A sum with the dropout that one of its operands is. The other one is a name: nothing is evaluated between."""
        for which, operand in enumerate(operands):
            found = self._taken(operand)
            if found is not None and isinstance(operands[1 - which], ast.Name):
                of, dropout = found
                return Sum(*_with(operands, which, of), dropout, which)
        return Sum(*operands)

    def before(self, statement: ast.stmt | None, operands: tuple[ast.expr, ast.expr], bound: str) -> Sum | None:
        """A sum of two names with the dropout that `statement`, right before it, bound one of them to; None if it bound
        something else, or if that name is still there when the sum is bound to `bound`."""
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target, found = statement.targets[0], self._taken(statement.value)
        names = [operand.id if isinstance(operand, ast.Name) else "" for operand in operands]
        if found is None or not isinstance(target, ast.Name) or target.id != bound or "" in names:
            return None
        if names.count(bound) != 1:
            return None
        of, dropout = found
        which = names.index(bound)
        return Sum(*_with(operands, which, of), dropout, which)

    def _taken(self, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
        """(what is dropped from, by what) of a call of a dropout."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
            return None
        if not node.keywords:
            return (node.args[0], node.func) if _of_self(node.func) in self.names else None
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if set(given) != {"p", "training"} or _of_self(given["training"]) != "training":
            return None
        if _of_self(given["p"]) not in self.names or self._meant(node.func) is not F.dropout:
            return None
        return node.args[0], ast.Tuple([given["p"], given["training"]], ast.Load())

    def _meant(self, node: ast.AST) -> Any:
        """What a name, or an attribute of a module by name, is."""
        if isinstance(node, ast.Name):
            return self.globals.get(node.id)
        holder = self._meant(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(holder, node.attr, None) if isinstance(holder, types.ModuleType) else None


def active(module: nn.Module) -> tuple[str, ...]:
    """The children of `module` that are dropouts and drop something, and its attributes that may be probabilities."""
    children = [name for name, child in module.named_children() if type(child) is nn.Dropout and 0 < child.p < 1]
    return (*children, *(name for name, value in vars(module).items() if type(value) is float and 0 < value < 1))


def probability(dropout: Any) -> float | None:
    """The probability with which a dropout, as `Sum.dropout` evaluates to, drops an element now; None where it has to
    be called, as somebody watches or has changed it, or where it keeps none."""
    if type(dropout) is tuple:
        p, training = dropout
    elif type(dropout) is nn.Dropout and not dropout.inplace and not observed(dropout):
        p, training = dropout.p, dropout.training
    else:
        return None
    return float(p) if isinstance(p, (int, float)) and 0 <= p < 1 and training else 0.0


def applied(dropout: Any, x: Tensor) -> Tensor:
    """What source made of x."""
    return F.dropout(x, p=dropout[0], training=dropout[1]) if type(dropout) is tuple else dropout(x)


def _with(operands: tuple[ast.expr, ast.expr], which: int, of: ast.expr) -> tuple[ast.expr, ast.expr]:
    return (of, operands[1]) if which == 0 else (operands[0], of)


def _of_self(node: ast.AST) -> str | None:
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own else None
