"""Run rules over a model, module by module, and undo what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from tilesmith.rewrite.report import CALLS, OURS, Report, Row
from tilesmith.rewrite.rule import Replace, Rule, Site, Skip
from tilesmith.rewrite.variants import forms, has_unreachable_forms, obstacle, original_class, swap, unswap

Model = TypeVar("Model", bound=nn.Module)


class RewriteError(RuntimeError):
    """`strict=True` and some module that a rule is for had to stay as it is."""


def rewrite(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    strict: bool = False,
    excluded: Callable[[str, str], bool] = lambda rule, fqn: False,
    earlier: Report | None = None,
) -> Report:
    """Apply `rules` in order to every module of `model`, in place, and report each decision.

    `excluded(rule name, module name)` tells what the caller wants left alone. When anything raises, also because of
    `strict`, the swaps of this call are taken back first. A module that an earlier call swapped is reported again, by
    its row in the `earlier` report where none of these rules looks for what was replaced.
    """
    sites = [Site(model, fqn, module) for fqn, module in model.named_modules()]
    open_sites = [site for site in sites if not isinstance(site.module, torch.jit.ScriptModule)]
    rows: dict[str, list[Row]] = {site.fqn: [] for site in sites}
    swapped: list[nn.Module] = []
    try:
        for rule in rules:
            for site in open_sites:
                row = _apply(rule, site, excluded, swapped)
                if row is not None:
                    rows[site.fqn].append(row)
        for row in _replaced_before(sites, rules, earlier):
            rows[row.fqn].append(row)
        for site in sites:
            if not rows[site.fqn]:
                rows[site.fqn] += _left_alone(site)
        report = Report(tuple(row for site in sites for row in rows[site.fqn]))
        lost = [row for row in report.skipped if row.wanted]
        if strict and lost:
            reasons = "\n".join(f"  {row.fqn or 'the model'} ({row.cls}), {row.rule}: {row.reason}" for row in lost)
            raise RewriteError(f"strict=True, and {len(lost)} modules cannot be replaced:\n{reasons}")
    except BaseException:
        for module in reversed(swapped):
            unswap(module)
        raise
    return replace(report, counted=_counted(sites, rows))  # not before: an earlier report goes on counting until here


def undo(model: Model) -> Model:
    """Give every module of `model` the class back that it had before any rewrite. Returns `model`."""
    for fqn, module in model.named_modules():
        if has_unreachable_forms(module):
            raise RuntimeError(
                f"{fqn or 'the model'} was given another class after it was rewritten ({type(module).__name__}, for "
                "instance by fully_shard or a parametrization): undo before that; nothing was undone"
            )
    for module in model.modules():
        while unswap(module):
            pass
        module.__dict__.pop(CALLS, None)
    return model


def _counted(sites: Sequence[Site], rows: dict[str, list[Row]]) -> dict[str, dict[str, int]]:
    """Start the counts of calls of each replaced module: name -> what the module counts in."""
    counted: dict[str, dict[str, int]] = {}
    for site in sites:
        if any(row.action == "replaced" for row in rows[site.fqn]):
            counted[site.fqn] = site.module.__dict__[CALLS] = {}
    return counted


def _apply(rule: Rule, site: Site, excluded: Callable[[str, str], bool], swapped: list[nn.Module]) -> Row | None:
    cls = original_class(type(site.module))
    if cls.__module__.split(".")[0] == "tilesmith" and not rule.own:
        return None
    found = rule.match(site)
    if found is None:
        return None
    if isinstance(found, Replace) and found.form is not None:
        done = any(type(form) is type(found.form) for form in forms(site.module))
        why = None if done else obstacle(site.module)
        if excluded(rule.name, site.fqn) and not done:
            return Row(site.fqn, cls.__name__, rule.name, "skipped", (), "excluded by the caller")
        if why is not None:
            found = Skip(why)
        elif not done:
            swap(site.module, found.form)
            swapped.append(site.module)
    if isinstance(found, Skip):
        return Row(site.fqn, cls.__name__, rule.name, "skipped", (), found.reason, found.wanted, found.quiet)
    action = "replaced" if found.computes else "skipped"
    return Row(site.fqn, cls.__name__, rule.name, action, found.ops, found.reason, quiet=not found.computes)


def _replaced_before(sites: Sequence[Site], rules: Sequence[Rule], earlier: Report | None) -> Iterable[Row]:
    """What an earlier call replaced by rules that are not among these, where the module is still the one it was."""
    names, known = {rule.name for rule in rules}, {site.fqn: site.module for site in sites}
    rows = earlier.replaced if earlier is not None else ()
    return [row for row in rows if row.rule not in names and row.fqn in known and CALLS in known[row.fqn].__dict__]


def _left_alone(site: Site) -> Iterable[Row]:
    """Rows for a module that no rule had an opinion on; containers without one say nothing."""
    if isinstance(site.module, torch.jit.ScriptModule):
        name = f"{site.module.original_name} (TorchScript)"
        return [Row(site.fqn, name, "", "skipped", (), f"no rule for {name}")]
    cls = original_class(type(site.module))
    if cls.__module__.split(".")[0] == "tilesmith":
        return [Row(site.fqn, cls.__name__, "", "skipped", (), OURS)]
    # A module with parameters of its own computes something besides calling its children: a stack of experts does.
    if next(site.module.children(), None) is None or any(p is not None for p in site.module._parameters.values()):
        return [Row(site.fqn, cls.__name__, "", "skipped", (), f"no rule for {cls.__name__}")]
    return []
