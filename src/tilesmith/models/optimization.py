"""`optimize` and `undo`: the rule sets applied to a model, and taken back."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

from torch import nn

from tilesmith import rewrite
from tilesmith.engine.argument_checks import flag
from tilesmith.engine.arguments import alike, no_argument
from tilesmith.models.advice import advised
from tilesmith.models.attention.inline import InlineAttentionRule
from tilesmith.models.attention.interface import AttentionRule
from tilesmith.models.attention.latent import LatentRule
from tilesmith.models.attention.methods import AttentionMethodRule
from tilesmith.models.attention.selected_blocks import SelectionRule
from tilesmith.models.blocks import BlockRule, detach_block_forms, restore_block_forms
from tilesmith.models.checkpoints import detach, is_attached
from tilesmith.models.compiling import CompiledForm, CompileRule
from tilesmith.models.functional import FunctionalRule
from tilesmith.models.generation.rule import DecodingRule
from tilesmith.models.graphs_rule import GraphsRule, Wanted, wanted_before
from tilesmith.models.layers.activations import ActivationRule
from tilesmith.models.layers.adapters import LoraRule
from tilesmith.models.layers.biased_activations import BiasedActivationRule
from tilesmith.models.layers.biases import BiasRule
from tilesmith.models.layers.experts import ExpertsRule
from tilesmith.models.layers.gated_mlps import GatedMlpRule
from tilesmith.models.layers.gated_norms import GatedNormRule
from tilesmith.models.layers.losses import LossRule
from tilesmith.models.layers.norms import NormRule
from tilesmith.models.layers.packing import could_be_packed
from tilesmith.models.layers.residuals import AddNormRule
from tilesmith.models.layers.rotary import RotaryRule
from tilesmith.models.layers.routers import RouterRule
from tilesmith.models.layers.xielu import XieluRule
from tilesmith.models.reach import described

# In this order: a fused residual looks for replaced norms, an activation for the MLP that computes it, the rule of
# biases for output layers that the loss has taken.
RULES: tuple[type[rewrite.Rule], ...] = (
    NormRule,
    GatedNormRule,
    AddNormRule,
    RotaryRule,
    LatentRule,
    GatedMlpRule,
    ExpertsRule,
    RouterRule,
    ActivationRule,
    XieluRule,
    AttentionRule,
    AttentionMethodRule,
    InlineAttentionRule,
    SelectionRule,
    LoraRule,
    LossRule,
    BiasRule,
    BiasedActivationRule,
    FunctionalRule,
)

RuleName = Literal[
    "norm", "add_norm", "rope", "latent", "mlp", "experts", "router", "activation", "attention", "selection", "lora",
    "loss", "bias", "functional",
]  # fmt: skip
RECORDED = ("bias",)
"""Rules that are used by default only with recorded blocks: they cost the host more than the device gains."""


class Withheld(rewrite.Rule):
    """A rule of `RECORDED` without recorded blocks: reports what it would replace, and leaves it."""

    def __init__(self, rule: rewrite.Rule):
        self.name, self._rule = rule.name, rule  # type: ignore[misc]

    def match(self, site: rewrite.Site) -> rewrite.Replace | rewrite.Skip | None:
        found = self._rule.match(site)
        if not isinstance(found, rewrite.Replace) or any(form == found.form for form in rewrite.forms(site.module)):
            return found  # an earlier call may have asked for it
        why = "used only with graphs=True; otherwise launch overhead outweighs the gain"
        return rewrite.Skip(why, wanted=False)


Model = TypeVar("Model", bound=nn.Module)


def optimize(
    model: Model,
    *,
    strict: bool = False,
    only: RuleName | Collection[RuleName] | None = None,
    exclude: str | Collection[str] = (),
    compile: Literal["between"] | None = None,
    graphs: bool | Literal["auto"] = False,
    **misplaced: NoReturn,
) -> Model:
    """Make the modules of `model` compute through `tilesmith.ops` where they provably compute the same.

    Each module is recognised by what its class computes on small inputs, not by its name. It is replaced in place, as
    an instance: parameters stay the same objects in the same order and `state_dict` keys stay, so an existing optimizer
    keeps working. Nothing outside the model changes.

    Args:
        model: any module; a transformers model gets attention and loss too. It may be wrapped (PEFT) already.
        strict: raise `RewriteError` if a rule applies to a module but cannot replace it, and leave the model as it was.
        only: the rules to use, of norm, add_norm, rope, latent, mlp, experts, router, activation, attention, selection,
            lora, loss, bias and functional (which replaces nothing: it reports calls of PyTorch's functions). All if
            None, but bias only with `graphs`: otherwise launch overhead outweighs the gain.
        exclude: rules not to use, and patterns (`fnmatch`) of names of modules to leave alone, as in
            `model.named_modules()`: ``exclude=["rope", "model.layers.0.*"]``.
        compile: "between" compiles the repeated blocks of the model, such as decoder layers, with torch.compile when
            they first run: one compilation for all blocks of a class, which leaves the library's ops alone. A later
            `optimize` of the model keeps it.
        graphs: record forward and backward of the repeated blocks as CUDA graphs when a shape is trained for the third
            time, so that the host launches a block at once. Calls that no recording serves run as before; the report
            counts them by reason, and says how much memory the recordings hold. `generate` of transformers with
            ``cache_implementation="static"`` replays one graph a token. "auto" watches eleven training steps. If the
            device waited for the host in them, blocks are recorded from then on, else never; the report says which and
            why. Without `graphs` the same steps are watched, and the report and a warning in the log say whether
            recording would help. A later `optimize` keeps it, too.

    Returns:
        `model` itself. ``print(model.tilesmith_report)`` says what was gained, what that means on the model's device,
        what could not be replaced and why, and how often each op has run since; ``.full()`` lists every module. `undo`
        reverts everything, also in a copy or an unpickled model.

    Raises:
        TypeError: `model` is not a module, `strict` not a bool, or `graphs` neither a bool nor "auto"; for an argument
        that there is not, with what to write for it. ValueError: `only` names an unknown rule, or none but those of
        `exclude`; `exclude` names neither a rule nor a module, or has a pattern that matches none; `compile` is neither
        None nor "between"; `graphs` is another string than "auto"; no block repeats for `compile` or `graphs`;
        `fit_sequence` was called first. RewriteError: see `strict`.
    """
    if misplaced:
        raise TypeError(_spelled(misplaced))
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"optimize: model is {type(model).__name__}; it must be a torch.nn.Module: give the model itself, not its "
            "name or its state_dict"
        )
    wanted, patterns = _asked(model, only, exclude)
    if compile not in (None, "between"):
        raise ValueError(f"optimize: compile is {compile!r}; it is None or 'between'")
    if isinstance(graphs, str) and graphs != "auto":
        raise ValueError(f"optimize: graphs is {graphs!r}; it is True, False or 'auto'")
    if not isinstance(graphs, bool | str):
        raise TypeError(f"optimize: graphs must be True, False or 'auto', got {graphs!r}")
    flag("optimize", "strict", strict)
    if is_attached(model):
        raise ValueError(
            "optimize: fit_sequence has planned this model, and its plan counts what optimize does; call undo() of the "
            "plan, optimize, then fit_sequence"
        )
    taken = detach_block_forms(model)
    try:
        had = {type(form) for _, form, _ in taken}
        recorded: Wanted = graphs or wanted_before(taken)
        withheld = [name for name in RECORDED if only is None and not recorded and name not in patterns]
        wanted = [name for name in wanted if name in withheld or only is not None or recorded or name not in RECORDED]
        rules = [Withheld(rule()) if rule.name in withheld else rule() for rule in RULES if rule.name in wanted]
        whole: list[BlockRule | DecodingRule] = [CompileRule(model)] if compile or CompiledForm in had else []
        whole += [DecodingRule(), GraphsRule(model, recorded)] if recorded else []
        before = getattr(model, "tilesmith_report", None)
        found = rewrite.rewrite(model, [*rules, *whole], strict=strict, excluded=_excluder(patterns), earlier=before)
    except BaseException:
        restore_block_forms(taken)
        raise
    for rule in whole:
        for row in found.replaced:
            if row.rule == rule.name:
                rule.attach(model.get_submodule(row.fqn))
    kind = next((p.device.type for p in model.parameters()), "cpu")
    found = described(found, kind, *could_be_packed(model))
    found = replace(found, notes=tuple(rule.record for rule in whole))
    model.tilesmith_report = found if recorded else advised(model, found)
    return model


_RULE_OF = {
    **dict.fromkeys(("rms_norm", "layer_norm"), "norm"),
    **dict.fromkeys(("swiglu", "geglu"), "mlp"),
    **dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), "loss"),
}
"""Switches of Liger -> our rule."""


def _spelled(misplaced: dict[str, Any]) -> str:
    """What to write in place of keywords that `optimize` does not have."""
    switches = _RULE_OF | {rule.name: rule.name for rule in RULES}
    instead = {
        name: f"rules are chosen by {'exclude' if value is False else 'only'}=[{switches[name]!r}]"
        for name, value in misplaced.items()
        if name in switches
    }
    return no_argument("optimize", misplaced, inspect.signature(optimize).parameters, instead)


def _asked(
    model: nn.Module, only: str | Collection[str] | None, exclude: str | Collection[str]
) -> tuple[list[str], list[str]]:
    """The names of the rules to use, and what to leave out, or the error of what `optimize` was given for them."""
    for name, value in (("only", only), ("exclude", exclude)):
        if value is None and name == "only":
            continue
        if not isinstance(value, Collection) or not all(isinstance(part, str) for part in value):
            raise TypeError(f"optimize: {name} must be a string or a collection of strings, got {value!r}")
    names = list(dict.fromkeys(rule.name for rule in RULES))  # several may have one name
    wanted = names if only is None else [only] if isinstance(only, str) else list(only)
    if not wanted:
        raise ValueError(
            f"optimize: only is {only!r}, which names no rule, so that nothing would be replaced; give some of "
            f"{', '.join(names)}, or None for all"
        )
    unknown = [name for name in wanted if name not in names]
    if unknown:
        close = alike(unknown[0], names)
        raise ValueError(
            f"optimize: only names {', '.join(unknown)}; the rules are {', '.join(names)}{close and f'. {close}'}"
        )
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    if only is not None and set(wanted) <= set(patterns):
        raise ValueError(f"optimize: exclude names all that only does, {', '.join(wanted)}: nothing would be replaced")
    modules = [fqn for fqn, _ in model.named_modules()]
    known = {*names, *modules}
    unknown = [pattern for pattern in patterns if pattern not in known and not set(pattern) & set("*?[")]
    if unknown:
        raise ValueError(
            f"optimize: exclude names {', '.join(unknown)}, neither a module of the model nor a rule; give a module's "
            f"name, a pattern, or one of the rules {', '.join(names)}"
        )
    idle = next((p for p in patterns if p not in known and not any(fnmatch.fnmatchcase(m, p) for m in modules)), None)
    if idle is not None:
        raise ValueError(
            f"optimize: exclude has the pattern {idle!r}, which matches the name of no module of the model; names are "
            f"as in model.named_modules(), such as {max(modules, key=lambda fqn: (fqn.count('.'), fqn != ''))!r}"
        )
    return wanted, patterns


def report(model: nn.Module) -> rewrite.Report:
    """The report of the last `optimize(model)`, which is also its attribute `tilesmith_report`.

    Raises ValueError for a model that was not optimised.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"report: model must be a torch.nn.Module, got {type(model).__name__}")
    found = getattr(model, "tilesmith_report", None)
    if not isinstance(found, rewrite.Report):
        raise ValueError("report: model was not optimised; call tilesmith.optimize(model) first")
    return found


def undo(model: Model) -> Model:
    """Restore the original forward of every module that `optimize` replaced, and revert what `fit_sequence` changed.

    Returns `model`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"undo: model is {type(model).__name__}; it must be a torch.nn.Module, as optimize returns it")
    rewrite.undo(model)
    detach(model)
    for module in model.modules():
        module.__dict__.pop("tilesmith_report", None)
    return model


def _excluder(patterns: list[str]) -> Callable[[str, str], bool]:
    def excluded(rule: str, fqn: str) -> bool:
        return rule in patterns or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)

    return excluded
