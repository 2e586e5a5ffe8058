"""Dropouts of what a sum adds, as source spells them: `self.dropout(y)` of an nn.Dropout, or
`nn.functional.dropout(y, p=self.dropout, training=self.training)`."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.models.layers.norms import Norm, epsilon, is_norm, servable, weight_of
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.nn.norm import casting_child
from tilesmith.rewrite import flow
from tilesmith.rewrite.source import of_self

OP = "dropout_add_norm"


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

    def stay(self, tree: ast.AST, fused: str) -> bool:
        """Whether F.dropout still makes an operand of a sum in `tree`, in place or by a name. fused: how the names of
        the functions begin that compute sums and norms."""
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        sums = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id.startswith(fused)]
        operands = [operand for call in sums for operand in call.args[2:4]]
        names = {operand.id for operand in operands if isinstance(operand, ast.Name)}
        values = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and flow.bound(n) & names]
        made = [value for value in (*operands, *values) if isinstance(value, ast.Call)]
        return any(self._meant(value.func) is F.dropout for value in made)

    def _taken(self, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
        """(what is dropped from, by what) of a call of a dropout."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
            return None
        if not node.keywords:
            return (node.args[0], node.func) if of_self(node.func) in self.names else None
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if set(given) != {"p", "training"} or of_self(given["training"]) != "training":
            return None
        if of_self(given["p"]) not in self.names or self._meant(node.func) is not F.dropout:
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


def alike(x: Any, y: Any) -> bool:
    """Whether these are tensors of one shape and dtype."""
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype is y.dtype


def with_norm(
    norm: Norm, holder: nn.Module, module: nn.Module, operands: tuple[Tensor, Tensor], dropout: Any, which: int
) -> tuple[Tensor, Tensor] | None:
    """(module(total), total) of the sum of two operands, of which one is dropped from, in one op; None where there is
    nothing to drop, or no op for it. Compiled code draws as before, in a pass that it fuses."""
    p = None if torch.compiler.is_compiling() else probability(dropout)
    plain = norm.centred or (not norm.offset and norm.casting == "fp32")
    if not p or not plain or not alike(*operands) or not reaches(OP, operands[0]) or not is_norm(module, norm):
        return None
    x, residual = operands[which], operands[1 - which]
    if observed(module) or not servable(module, x, norm, added=True) or casting_child(module, x) is not None:
        return None
    weight, bias = weight_of(module, norm), getattr(module, "bias", None) if norm.centred else None
    kind, eps = "layer" if norm.centred else "rms", epsilon(module, x, norm)
    ran(holder, OP)
    return ops.dropout_add_norm(x, residual, weight, bias, p=p, kind=kind, eps=eps)


def _with(operands: tuple[ast.expr, ast.expr], which: int, of: ast.expr) -> tuple[ast.expr, ast.expr]:
    return (of, operands[1]) if which == 0 else (operands[0], of)
