"""Which rules a strategy and a level of fusion select: those of `optimize`, by what each declares of itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilesmith import rewrite
from tilesmith.models.layers import dropouts
from tilesmith.models.layers.gated_mlps import GatedMlpRule
from tilesmith.models.layers.norms import NormRule
from tilesmith.models.layers.packing import PackRule
from tilesmith.models.layers.residuals import AddNormRule
from tilesmith.models.layers.rotary import HeadNormRule, RotaryRule
from tilesmith.models.layers.transformer_layers import LayerRule
from tilesmith.models.optimization import RECORDED, RULES, Withheld

LEVELS = ("conservative", "balanced", "aggressive")  # each has what the levels before it have
FULL = "full_block"
_DROPPED_SUM = "add_norm:dropout"


class Piece(NamedTuple):
    """One thing that fusion does. name: as `names_of` reads it from a row; part: of a block, as a `Rule` declares it;
    level: the first that does it."""

    name: str
    part: str
    level: str


def _declared(rule: type[rewrite.Rule]) -> Piece:
    return Piece(rule.name, rule.part, "balanced" if rule.spans else "conservative")


# What fusion does besides the rules: "layer:x" is the part x of torch's own layers; "rope:norm" are norms of queries
# and keys in one op with the rotation; `_DROPPED_SUM` are dropouts in one op with the sum and the norm.
_BESIDES = (
    Piece("rope:norm", "attention", "balanced"),
    Piece("layer:attention", "attention", "balanced"),
    Piece("layer:feed_forward", "ffn", "balanced"),
    Piece("layer:dropout", "norm", "aggressive"),
    Piece(_DROPPED_SUM, "norm", "aggressive"),
    Piece("pack", "attention", "aggressive"),
    Piece("pack", "ffn", "aggressive"),
)
PIECES = (*map(_declared, RULES), *_BESIDES)


@dataclass(frozen=True)
class Selection:
    """What one configuration selects. strategy, level: the values of their enums. memory: whether the model may do
    without logits and inner products of gated MLPs."""

    strategy: str
    level: str
    memory: bool

    def left_out(self, piece: Piece) -> str:
        """Why a piece is not selected; "" if it is."""
        if self.strategy != FULL and self.strategy != f"{piece.part}_only":
            return self.elsewhere
        if piece.name == "loss" and not self.memory:
            return "enable_memory_optimization=False"
        if LEVELS.index(piece.level) > LEVELS.index(self.level):
            return f"left to OptimizationLevel.{piece.level.upper()}"
        return ""

    @property
    def elsewhere(self) -> str:
        """Why what is for another part of a block is left out."""
        return f"not part of FusionStrategy.{self.strategy.upper()}"

    def names(self) -> set[str]:
        """The names of the pieces that are selected."""
        return {piece.name for piece in PIECES if not self.left_out(piece)}

    def added(self) -> set[str]:
        """Those that the level before does not have."""
        before = self.before()
        return self.names() - before.names() if before else self.names()

    def before(self) -> Selection | None:
        """The same at the level before, if there is one."""
        at = LEVELS.index(self.level)
        return Selection(self.strategy, LEVELS[at - 1], self.memory) if at else None

    def reasons(self, report: rewrite.Report, names: Collection[str]) -> list[str]:
        """Why a model has nothing for these pieces, which the level adds."""
        names, told = set(names), {}
        if _DROPPED_SUM in names and "add_norm" not in names:
            names.remove(_DROPPED_SUM)
            told["add_norm: no sum that goes into a norm adds what an active dropout returns"] = None
        rules = {name.partition(":")[0] for name in names}
        rows = [row for row in report.rows if row.rule in rules and not row.reason.endswith(self.elsewhere)]
        told |= dict.fromkeys(f"{row.rule}: {row.reason}" for row in rows)
        ours = dict.fromkeys(row.cls for row in report.rows if row.reason == rewrite.OURS)
        if ours:
            told[f"{', '.join(ours)} run the library's ops already"] = None
        none = sorted(rules - {row.rule for row in rows})
        if none and not ours:
            told[f"no module is one for the rule {' or the rule '.join(none)}"] = None
        return list(told)

    @property
    def _without_dropouts(self) -> str:
        """Why sums that go into norms are fused without the dropouts of what they add; "" if they are not."""
        why = next(self.left_out(piece) for piece in _BESIDES if piece.name == _DROPPED_SUM)
        return f"the dropout is {why}" if why and AddNormRule.name in self.names() else ""

    def dropouts_left(self, report: rewrite.Report) -> tuple[str, ...]:
        """A sentence on the dropouts that `optimize` fuses with sum and norm and this level does not, if there are
        any."""
        why = self._without_dropouts
        left = dict.fromkeys(row.cls for row in report.skipped if why and row.reason.endswith(why))
        if not left:
            return ()
        return (
            f"{', '.join(left)}: the dropout before a sum and a norm stays a call of its own, since one op of all "
            "three draws other random numbers than PyTorch; optimize fuses it, and so does "
            "create_unified_attention_fusion at OptimizationLevel.AGGRESSIVE.",
        )

    @property
    def pack_kind(self) -> str | None:
        """Of which modules `PackRule` is to pack products; None: of all."""
        return None if self.strategy == FULL else self.strategy.removesuffix("_only")

    def rules(self, recorded: bool) -> list[rewrite.Rule]:
        """The rules to apply, in the order of `optimize`; those that are not selected report what they would replace.
        recorded: whether the model's blocks are recorded, for the rules that only these gain by."""
        found: list[rewrite.Rule] = []
        for rule in RULES:
            why = self.left_out(_declared(rule))
            if rule is NormRule and why and "rope:norm" in self.names():
                found.append(HeadNormRule())  # norms that a rotation takes have to be recognised first
            made = self._made(rule)
            held = rule.name in RECORDED and not recorded
            found.append(LeftOut(made, why) if why else Withheld(made) if held else made)
            if rule is AddNormRule:
                found += self._sums_and_layers()
        return [*found, PackRule(self.pack_kind)] if "pack" in self.names() else found

    def _made(self, rule: type[rewrite.Rule]) -> rewrite.Rule:
        if rule is AddNormRule:
            return AddNormRule(drops=_DROPPED_SUM in self.names())
        if rule is RotaryRule:
            return RotaryRule(norms="rope:norm" in self.names())
        return GatedMlpRule(recompute=self.memory) if rule is GatedMlpRule else rule()

    def _sums_and_layers(self) -> Iterator[rewrite.Rule]:
        """torch's layers, after the norms that they hold, and what is left out of them and of dropped sums."""
        reasons = {piece.name: self.left_out(piece) for piece in _BESIDES}
        if self._without_dropouts:
            yield LeftOut(AddNormRule(), self._without_dropouts, more=True)
        parts = {name.partition(":")[2]: why for name, why in reasons.items() if name.startswith("layer:")}
        selected = [part for part, why in parts.items() if not why]
        if selected:
            yield LayerRule(selected)
        for part, why in parts.items():
            if why:
                yield LeftOut(LayerRule([part]), why, more=True)


class LeftOut(rewrite.Rule):
    """A rule that is not selected: reports what it would replace and why it does not, and leaves it. more: the module
    may have a form of the same class that does less."""

    def __init__(self, rule: rewrite.Rule, why: str, more: bool = False):
        self.name, self.own = rule.name, rule.own  # type: ignore[misc]
        self._rule, self._why, self._more = rule, why, more

    def match(self, site: rewrite.Site) -> rewrite.Replace | rewrite.Skip | None:
        found = self._rule.match(site)
        if not isinstance(found, rewrite.Replace):
            return None
        if found.form is None or any(self._same(found.form, form) for form in rewrite.forms(site.module)):
            return found  # an earlier call has replaced it
        return rewrite.Skip(f"{found.reason}: {self._why}", wanted=False) if found.computes else None

    def _same(self, wanted: rewrite.Form, form: rewrite.Form) -> bool:
        return wanted == form if self._more else type(wanted) is type(form)


def names_of(row: rewrite.Row) -> set[str]:
    """What a row of a replaced module has done, by the names of pieces."""
    if "rms_norm_rope" in row.ops:
        return {"rope", "rope:norm"}
    if row.rule == AddNormRule.name and dropouts.OP in row.ops:
        return {"add_norm", _DROPPED_SUM}
    if row.rule != LayerRule.name:
        return {row.rule}
    by_op = {"attention": "attention", "linear_act": "feed_forward", "dropout_add_norm": "dropout"}
    return {f"layer:{by_op[op]}" for op in row.ops}
