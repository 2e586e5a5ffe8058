"""Residual and norm in one op: where a forward adds two tensors and normalises the sum next.

A layer's own source is kept; only the addition and the call of the norm become one call. What counts is where the sum
goes, not how that is spelled, and nothing is moved past a call that could write to the sum; so the rewritten forward is
right for every argument that the layer takes, caches and masks included. A dropout of what is added, right before the
sum, becomes part of the same call.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.layers import dropouts
from tilesmith.models.layers.norms import Norm, epsilon, is_norm, norm_of, op_of, servable, weight_of
from tilesmith.models.layers.residuals_run import sums_into_norms
from tilesmith.models.layers.residuals_spelling import (
    Put,
    Spelling,
    Unfollowed,
    after_aliases,
    assignment,
    identifier,
    increased,
    shortened,
)
from tilesmith.models.reach import observed, ran
from tilesmith.nn.norm import casting_child
from tilesmith.rewrite import (
    CALLS,
    CannotRespell,
    Form,
    Replace,
    Rule,
    Site,
    Skip,
    Unlike,
    flow,
    original_class,
    parse,
    probe,
    respelled_forward,
)

_Norms = tuple[tuple[str, Norm], ...]
_OF_ALL = frozenset({*vars(nn.Module()), CALLS})  # attributes that say nothing of a module
_CALL = "_tilesmith_add_"
_NORMED = "_tilesmith_normed_"
_LEAVES = (
    "its sum leaves the module: a norm that takes it is in another module, so they are not joined; in one forward they "
    "would be"
)


def add_norm(norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function (holder, module, x, y) -> (module(x + y), x + y), in one op where `module`, or the first of an
    `nn.Sequential`, is still this norm of ours and nothing observes it. With (…, dropout, which) x, or y where `which`
    is 1, goes through `dropout` first."""

    def added(
        holder: nn.Module, module: nn.Module, x: Tensor, y: Tensor, dropout: Any = None, which: int = 0
    ) -> tuple[Tensor, Tensor]:
        if dropout is not None:
            found = dropouts.with_norm(norm, holder, module, (x, y), dropout, which)
            if found is not None:
                return found
            x, y = (dropouts.applied(dropout, x), y) if which == 0 else (x, dropouts.applied(dropout, y))
        leads = type(module) is nn.Sequential
        first = module[0] if leads else module
        fits = is_norm(first, norm) and not observed(first) and not (leads and observed(module))
        if not (dropouts.alike(x, y) and fits and servable(first, x, norm, added=True)):
            total = x + y
            return module(total), total
        weight, eps = weight_of(first, norm), epsilon(first, x, norm)
        if norm.centred:
            ran(holder, "add_layer_norm")
            y, total = ops.add_layer_norm(x, y, weight, getattr(first, "bias", None), eps)
        else:
            ran(holder, "add_rms_norm")
            y, total = (casting_child(first, x) or ops).add_rms_norm(x, y, weight, eps, norm.offset, norm.casting)
        if leads:
            for layer in list(module)[1:]:
                y = layer(y)
        return y, total

    return added


@dataclass(frozen=True)
class AddNormForm(Form):
    """The same forward, with each addition that feeds one of the children `norms` fused into it, and the dropouts of
    what is added: those of the names `drops`."""

    norms: _Norms
    drops: tuple[str, ...] = ()

    def namespace(self, base: type) -> dict[str, Any]:
        calls = {_CALL + identifier(name): add_norm(norm) for name, norm in self.norms}
        return {"forward": respelled_forward(base, calls, _fuser(base, dict(self.norms), self.drops).edit)}


class AddNormRule(Rule):
    """Modules whose forward adds two tensors and hands the sum to a child that the norm rule has replaced. drops: also
    dropouts of what is added, which then draw other random numbers."""

    name = "add_norm"
    part = "norm"
    spans = False

    def __init__(self, drops: bool = True) -> None:
        self.drops = drops
        self._known: dict[tuple[type, _Norms, tuple[str, ...]], Replace | Skip | Unfollowed] = {}
        self._runs = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        cls, norms = original_class(type(module)), _norms_in(module)
        if not norms or cls.forward in (nn.Module.forward, nn.Sequential.forward):
            return None
        key = (cls, tuple(norms.items()), dropouts.active(module) if self.drops else ())
        if key not in self._known:
            self._known[key] = _decide(*key)
        found = self._known[key]
        if not isinstance(found, Unfollowed):
            return found
        # Those that a Sequential calls after others are its business, unless source calls one by its index.
        own = [name for name in norms if "." not in name or not _in_sequential(module, name)]
        return self._explained(site, own, found) if own else None

    def _explained(self, site: Site, own: list[str], found: Unfollowed) -> Skip:
        """What is true of a forward in whose source no sum was followed into one of the norms `own`."""
        module = site.module
        inside = tuple((name, type(child)) for name, child in module.named_modules())
        private = tuple((name, id(value)) for name, value in vars(module).items() if name not in _OF_ALL)
        try:
            run = self._runs.of(module, lambda: sums_into_norms(module), inside, private)
        except Unlike as error:
            told = found.unread or f"{found.calls(own)}; {error}"
            return Skip(f"not followed: {told}", wanted=bool(found.unread), quiet=not found.may_add(own))
        if not run.taken and run.leaves and site.fqn:
            return Skip(_LEAVES, wanted=False)
        if not run.taken:
            told = f"run on {', '.join(run.given)} alone, no sum of its forward goes into a norm"
            return Skip(told, wanted=False, quiet=True)
        told = run.told("a sum" if found.unread else "a sum that is not followed")
        lost = {name for taken in run.taken if taken.added for name in (taken.norm, taken.norm.removesuffix(".0"))}
        return Skip("; ".join([*told, *filter(None, [found.unread])]), wanted=not lost.isdisjoint(own))


def _norms_in(module: nn.Module, prefix: str = "") -> dict[str, Norm]:
    """The norms among the children of `module`, and of those that are containers."""
    found: dict[str, Norm] = {}
    for name, child in module.named_children():
        norm = _leading_norm(child)
        if norm is not None:
            found[prefix + name] = norm
        if type(child) in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
            found.update(_norms_in(child, f"{prefix}{name}."))
    return found


def _in_sequential(module: nn.Module, name: str) -> bool:
    return type(module.get_submodule(name.rpartition(".")[0])) is nn.Sequential


def _leading_norm(child: nn.Module) -> Norm | None:
    """The norm that `child` was swapped to, or the one that an `nn.Sequential` begins with."""
    return norm_of(child[0]) if type(child) is nn.Sequential and len(child) else norm_of(child)


def _fuser(cls: type, norms: Iterable[str], drops: tuple[str, ...]) -> Fuser:
    forward = inspect.unwrap(cls.forward)
    return Fuser(Spelling(forward, tuple(norms)), dropouts.Dropouts(forward, drops))


def _decide(cls: type, norms: _Norms, drops: tuple[str, ...]) -> Replace | Skip | Unfollowed:
    """What to do with a module of this class that holds these norms, given as (child, norm), and these dropouts."""
    known = dict(norms)
    fuser = _fuser(cls, known, drops)
    try:
        tree = parse(inspect.unwrap(cls.forward))
        fuser.spelling.simplify(tree)
        unfollowed = fuser.spelling.unfollowed(tree)
        fuser.visit(tree)
        if fuser.fused:
            respelled_forward(cls, {})
    except CannotRespell as error:
        return Unfollowed(unread=str(error))
    if not fuser.fused:
        return Skip("; ".join(dict.fromkeys(fuser.lost))) if fuser.lost else unfollowed
    fused = tuple(dict.fromkeys(fuser.fused))
    used = ["add_" + op_of(known[name]) for name, dropping in zip(fuser.fused, fuser.dropping) if not dropping]
    used += [dropouts.OP] * any(fuser.dropping)
    told = f"a sum goes straight into {', '.join(fused)}"
    if any(fuser.dropping):
        told += "; the dropout before it is drawn in the same op, from other random numbers than PyTorch's"
    if fuser.known.stay(tree, _CALL):
        told += "; F.dropout of what it adds stays a call of its own"
    form = AddNormForm(tuple((name, known[name]) for name in fused), drops if any(fuser.dropping) else ())
    return Replace(form, tuple(dict.fromkeys(used)), told)


class Fuser(flow.BlockTransformer):
    """Rewrites the syntax tree of a forward in place. fused: the norm of each fused place; dropping: whether a dropout
    is fused there, too; lost: in words, each sum that goes into a norm and could not be fused.

    A sum is followed through the statements after it, to the first call of a norm that takes it: as a statement of its
    own, or anywhere inside one. An `if` on plain names between the two (GPT-2's optional cross-attention) takes the
    statements around it into both of its branches first.
    """

    def __init__(self, spelling: Spelling, known: dropouts.Dropouts):
        self.spelling, self.known = spelling, known
        self.fused: list[str] = []
        self.dropping: list[bool] = []
        self.lost: list[str] = []

    def edit(self, tree: ast.FunctionDef) -> None:
        """Rewrite the forward `tree`."""
        self.spelling.simplify(tree)
        self.visit(tree)

    def _note(self, name: str, operands: dropouts.Sum) -> None:
        self.fused.append(name)
        self.dropping.append(operands.dropout is not None)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name, operands = self.spelling.norm_of(node), None
        if name is not None:
            operands = self.spelling.addition(node.args[0])
        if operands is None:
            return self.generic_visit(node)
        return self._normed(name, self.known.within(operands), node)

    def _normed(self, name: str, operands: dropouts.Sum, at: ast.Call) -> ast.expr:
        """The norm of a sum, in place of `self.norm(x + y)`."""
        self._note(name, operands)
        first = ast.Subscript(_call(name, at.func, operands), ast.Constant(0), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(first, at))

    def block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        while block:
            total, value = assignment(block[0])
            operands = self.spelling.addition(value)
            norm = self.spelling.norm_of(value)
            before = made[-1] if made else None
            if total is not None and operands is not None:
                block = self._branched(block, total)
                taken, count = self.known.before(before, operands, total), len(self.fused)
                if isinstance(block[0], ast.If):
                    if taken:  # the dropout goes with the sum into both branches
                        block[0].body, block[0].orelse = (
                            [copy.deepcopy(made[-1]), *branch] for branch in (block[0].body, block[0].orelse)
                        )
                        made.pop()
                else:
                    block = self._fused(block, total, taken or self.known.within(operands))
                    if taken and len(self.fused) > count:
                        made.pop()
            elif norm is not None and total is not None and self.spelling.addition(value.args[0]) is not None:
                taken = self.known.before(before, self.spelling.addition(value.args[0]), total)
                if taken:
                    block = [Put(value, self._normed(norm, taken, value)).visit(block[0]), *block[1:]]
                    made.pop()
            elif increased(block[0]) is not None:
                self._follow(block, increased(block[0]), in_place=True)
            made.append(block[0])
            block = block[1:]
        return made

    def _fused(self, block: list[ast.stmt], total: str, operands: dropouts.Sum) -> list[ast.stmt]:
        """`s = x + y; ...; f(self.norm(s))` at the head of `block` with both in one call, if nothing speaks against."""
        found = self._follow(block, total)
        if found is None:
            return block
        at, use, aliases = found
        name = self.spelling.norm_of(use.call)
        call = _call(name, use.call.func, operands)
        self._note(name, operands)
        result, value = assignment(block[at])
        if value is use.call and len(aliases) == at:  # nothing but `r = s` in between
            return [*self._joined(call, result, aliases, block[at]), *block[at + 1 :]]
        normed = f"{_NORMED}{len(self.fused)}"
        block[0] = _placed(_unpacked(call, normed, total), block[0])
        block[at] = Put(use.call, ast.copy_location(ast.Name(normed, ast.Load()), use.call)).visit(block[at])
        return block

    def _joined(self, call: ast.Call, result: str, names: list[str], at: ast.stmt) -> list[ast.stmt]:
        """`n, s = call; r = s`; n alone, where it takes the sum's only name, so that the sum is not kept alive."""
        keeps = [name for name in names if name != result]
        if not keeps:
            first = ast.Subscript(call, ast.Constant(0), ast.Load())
            return [_placed(ast.Assign([ast.Name(result, ast.Store())], first), at)]
        more = (ast.Assign([ast.Name(name, ast.Store())], ast.Name(keeps[0], ast.Load())) for name in keeps[1:])
        return [_placed(statement, at) for statement in (_unpacked(call, result, keeps[0]), *more)]

    def _follow(
        self, block: list[ast.stmt], total: str, in_place: bool = False
    ) -> tuple[int, flow.Use, list[str]] | None:
        """From the sum that `block[0]` binds to `total`: the statement and the call of the norm that takes it first,
        and the names of the sum until then. None if there is none, or if it cannot be moved; `lost` says why."""
        names, others = [total], ""
        for at, statement in enumerate(block[1:], 1):
            named = ((id(n), self.spelling.norm_of(n)) for n in ast.walk(statement))
            calls = {key: name for key, name in named if name is not None}
            if not isinstance(statement, flow.SIMPLE):
                if not flow.mentions(statement, set(names)):
                    continue
                taken = any(flow.mentions(n.args[0], set(names)) for n in ast.walk(statement) if id(n) in calls)
                if taken:
                    kind = type(statement).__name__.lower()
                    self.lost.append(f"the sum {total} goes into a norm only inside a statement of the kind {kind!r}")
                return None
            use = flow.first_use(statement, set(names), calls)
            if use is not None:
                written = in_place or any(increased(s) in names for later in block[at:] for s in ast.walk(later))
                return self._judged(at, use, names, total, others or use.others, written)
            alias, value = assignment(statement)
            if isinstance(value, ast.Name) and value.id in names and alias is not None:
                names = [*names, alias] if alias not in names else names
                continue
            others = others or flow.escapes_through(statement, set(names))
            names = [name for name in names if name not in flow.bound(statement)]
            if not names:
                return None
        return None

    def _judged(
        self, at: int, use: flow.Use, names: list[str], total: str, others: str, written: bool
    ) -> tuple[int, flow.Use, list[str]] | None:
        name = self.spelling.norm_of(use.call)
        if written:  # also later: a gradient needs the sum as it was
            self.lost.append(f"{name} takes a sum that is written in place ({total} += ...), which others may see")
        elif others:
            self.lost.append(f"{name} takes the sum {total} only after {shortened(others)}, which might change it")
        elif not use.certain:
            self.lost.append(f"{name} takes the sum {total} only under a condition")
        else:
            return at, use, names
        return None

    def _branched(self, block: list[ast.stmt], total: str) -> list[ast.stmt]:
        """`s = x + y; if t: A; r = s; n = self.norm(s)` as one `if` whose branches both have all but the other's A."""
        if len(block) < 3 or not isinstance(block[1], ast.If) or block[1].orelse:
            return block
        test = list(ast.walk(block[1].test))
        plain = all(isinstance(n, (ast.Compare, ast.Name, ast.Constant, ast.cmpop, ast.Load)) for n in test)
        end = after_aliases(block, 2, total)
        if not plain or any(isinstance(n, ast.Name) and n.id == total for n in test):
            return block
        _, value = assignment(block[end]) if end < len(block) else (None, None)
        taken = value.args[0] if self.spelling.norm_of(value) is not None else None
        if not isinstance(taken, ast.Name) or taken.id != total:
            return block
        head, branch, tail = block[0], block[1], block[2 : end + 1]
        branch.body = [head, *branch.body, *copy.deepcopy(tail)]
        branch.orelse = [copy.deepcopy(head), *tail]
        return [branch, *block[end + 1 :]]


def _unpacked(call: ast.Call, normed: str, total: str) -> ast.Assign:
    return ast.Assign([ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(total, ast.Store())], ast.Store())], call)


def _placed(statement: ast.stmt, at: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(statement, at))


def _call(name: str, norm: ast.expr, operands: dropouts.Sum) -> ast.Call:
    given = [ast.Name("self", ast.Load()), norm, operands.left, operands.right]
    if operands.dropout is not None:
        given += [operands.dropout, ast.Constant(operands.which)]
    return ast.Call(ast.Name(_CALL + identifier(name), ast.Load()), given, [])
