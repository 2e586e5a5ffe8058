"""`create_unified_attention_fusion`: the rules of `optimize`, chosen by the part of a block and by how far they go."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tilesmith import rewrite
from tilesmith.engine.argument_checks import flag, size
from tilesmith.models.attention.interface import AttentionRule
from tilesmith.models.attention.selected_blocks import SelectionRule
from tilesmith.models.layers.activations import ActivationRule
from tilesmith.models.layers.gated_mlps import GatedMlpRule
from tilesmith.models.layers.losses import LossRule
from tilesmith.models.layers.norms import NormRule
from tilesmith.models.layers.packing import PackRule
from tilesmith.models.layers.residuals import AddNormRule
from tilesmith.models.layers.rotary import HeadNormRule, RotaryRule
from tilesmith.models.layers.transformer_layers import LayerRule
from tilesmith.models.optimization import undo
from tilesmith.models.reach import effects
from tilesmith.models.sizing.sample_inputs import most_tokens, sample_of
from tilesmith.models.sizing.state import state_preserved
from tilesmith.rewrite.variants import obstacle


class FusionStrategy(enum.Enum):
    """Which part of a transformer block is fused; `LEVEL_RULES` has the rules of each.

    FULL_BLOCK: all parts, and the model's loss. ATTENTION_ONLY: projections, rotary positions and attention. FFN_ONLY:
    the feed-forward layers. NORM_ONLY: norms and the sums that go into them.
    """

    FULL_BLOCK = "full_block"
    ATTENTION_ONLY = "attention_only"
    FFN_ONLY = "ffn_only"
    NORM_ONLY = "norm_only"


class OptimizationLevel(enum.Enum):
    """How far the fusion goes; each level has the rules of the levels before it.

    CONSERVATIVE: one module, or a sum and a norm, becomes one op; every product stays a call of its own layer.
    BALANCED: besides, what spans several modules: attention, gated MLPs, the blocks of torch's encoder and decoder
        layers (activation in the first product), the loss without logits. Attention that drops weights draws other
        random numbers than PyTorch's.
    AGGRESSIVE: besides, what moves memory or draws other random numbers: weights that multiply one tensor are moved
        into one storage for one product (q, k, v; gate, up); the dropouts of torch's layers go into one op with sum and
        norm.
    """

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


_LEVELS = tuple(OptimizationLevel)
_PARTS_OF_STRATEGY = {
    FusionStrategy.FULL_BLOCK: ("norm", "attention", "ffn", "loss"),
    FusionStrategy.ATTENTION_ONLY: ("attention",),
    FusionStrategy.FFN_ONLY: ("ffn",),
    FusionStrategy.NORM_ONLY: ("norm",),
}
# level -> part -> what it adds, by the names of rules; "layer:x" is the part x of torch's own layers
LEVEL_RULES: dict[OptimizationLevel, dict[str, tuple[str, ...]]] = {
    OptimizationLevel.CONSERVATIVE: {
        "norm": ("norm", "add_norm"), "attention": ("rope",), "ffn": ("activation",), "loss": (),
    },
    OptimizationLevel.BALANCED: {
        "norm": (), "attention": ("attention", "selection", "layer:attention", "rope:norm"),
        "ffn": ("mlp", "layer:feed_forward"), "loss": ("loss",),
    },
    OptimizationLevel.AGGRESSIVE: {
        "norm": ("layer:dropout",), "attention": ("pack",), "ffn": ("pack",), "loss": (),
    },
}  # fmt: skip


@dataclass(frozen=True)
class FusionConfig:
    """How `create_unified_attention_fusion` fuses a model.

    strategy, optimization_level: see their classes; a string is taken as the value of one.
    enable_mixed_precision: whether a caller's `torch.autocast` reaches the model. False: the model computes in the
        dtypes of its parameters and inputs also inside one. The library turns none on.
    enable_memory_optimization: gated MLPs compute their inner product again in the backward rather than keep it, and a
        model that is given labels does not keep its logits. False: neither.
    target_sequence_length: tokens for which `UnifiedAttentionFusion.warm_up` compiles and chooses kernels, or as many
        as the model has positions, which the report then says.
    """

    strategy: FusionStrategy = FusionStrategy.FULL_BLOCK
    optimization_level: OptimizationLevel = OptimizationLevel.BALANCED
    enable_mixed_precision: bool = True
    enable_memory_optimization: bool = True
    target_sequence_length: int = 512

    def __post_init__(self):
        object.__setattr__(self, "strategy", _member(FusionStrategy, "strategy", self.strategy))
        level = _member(OptimizationLevel, "optimization_level", self.optimization_level)
        object.__setattr__(self, "optimization_level", level)
        flag("FusionConfig", "enable_mixed_precision", self.enable_mixed_precision)
        flag("FusionConfig", "enable_memory_optimization", self.enable_memory_optimization)
        size("FusionConfig", "target_sequence_length", self.target_sequence_length)


class UnifiedAttentionFusion(nn.Module):
    """What a model is besides its own class after `create_unified_attention_fusion`; there is no other way to get one.

    The model stays the object that it was, with its parameters, its state dict, its hooks and its methods.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is UnifiedAttentionFusion:
            raise TypeError(
                "UnifiedAttentionFusion is not made directly; call create_unified_attention_fusion(model), which makes "
                "one of a model"
            )
        return super().__new__(cls)

    @property
    def fusion_config(self) -> FusionConfig:
        """The configuration that the model was fused by."""
        return next(form.config for form in rewrite.forms(self) if isinstance(form, FusionForm))

    @property
    def fusion_report(self) -> rewrite.Report:
        """What was fused, what could not be, and why; a row for each module."""
        return self.tilesmith_report

    def warm_up(self, *, sample: Any = None, training: bool = True) -> None:
        """Run the model once on one row of `target_sequence_length` tokens, so that kernels are chosen and compiled.

        sample: the model's inputs instead; without it they follow from the model's configuration, or ValueError is
        raised. training: with a backward. Parameters, gradients, buffers and random numbers are left as they were.
        """
        given = sample_of(self, sample, tokens=self.fusion_config.target_sequence_length)
        with state_preserved(self):
            self.train(training)
            given.step(self, 1, backward=training)

    def unfuse(self) -> nn.Module:
        """Take the fusion back, and what `optimize` did; returns the model, which is of its own class again."""
        return undo(self)


@dataclass(frozen=True)
class FusionForm(rewrite.Form):
    """The whole model: it is a `UnifiedAttentionFusion` too."""

    bases = (UnifiedAttentionFusion,)
    config: FusionConfig

    def namespace(self, base: type) -> dict[str, Any]:
        if self.config.enable_mixed_precision:
            return {}
        whole = base.forward

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            kind = next((p.device.type for p in self.parameters()), "cpu")
            with torch.autocast(kind, enabled=False):
                return whole(self, *args, **kwargs)

        return {"forward": forward}


def create_unified_attention_fusion(
    model: nn.Module,
    fusion_strategy: FusionStrategy = FusionStrategy.FULL_BLOCK,
    optimization_level: OptimizationLevel = OptimizationLevel.BALANCED,
    *,
    config: FusionConfig | None = None,
) -> UnifiedAttentionFusion:
    """Fuse the blocks of `model` in place, where the ops provably compute the same; returns `model`.

        layer = torch.nn.TransformerEncoderLayer(d_model=512, nhead=8)
        fused = create_unified_attention_fusion(layer, optimization_level=OptimizationLevel.AGGRESSIVE)
        print(fused.fusion_report)

    Modules are recognised and swapped as by `tilesmith.optimize`, of torch, of transformers and of this library.
    Parameters stay the same objects in the same order, so state dicts keep their keys and an optimizer made before goes
    on working. `fused.unfuse()`, or `tilesmith.undo`, takes everything back.

    config: everything at once; the two arguments before it then stay as they are by default.

    Raises TypeError or ValueError for other arguments, for parameters on meta, for a model whose forward another
    library has patched, and for one that is fused by another configuration. Raises ValueError too, with the
    reasons, where a strategy finds nothing to fuse or a level adds nothing to the one before it; the model is then left
    as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"create_unified_attention_fusion: model must be a torch.nn.Module, got {type(model).__name__}")
    config = _configured(fusion_strategy, optimization_level, config)
    known = [form.config for form in rewrite.forms(model) if isinstance(form, FusionForm)]
    if known and known[0] != config:
        raise ValueError(f"create_unified_attention_fusion: the model is fused by {known[0]}; call unfuse() first")
    if known:
        return model
    _check(model)
    levels = _LEVELS[: _LEVELS.index(config.optimization_level) + 1]
    marks = [(module, len(rewrite.forms(module))) for module in model.modules()]
    try:
        report = rewrite.rewrite(model, _rules(config, levels))
        _refuse_nothing(report, config, levels)
        rewrite.swap(model, FusionForm(config))
    except BaseException:
        _back_to(marks)
        raise
    kind = next((p.device.type for p in model.parameters()), "cpu")
    told = effects((op for row in report.replaced for op in row.ops), kind)
    model.tilesmith_report = replace(report, effects=(*told, *_said(model, config, report)))
    return model


def _configured(strategy: Any, level: Any, config: FusionConfig | None) -> FusionConfig:
    if config is None:
        return FusionConfig(strategy, level)
    if not isinstance(config, FusionConfig):
        raise TypeError(f"create_unified_attention_fusion: config must be a FusionConfig, got {type(config).__name__}")
    plain = FusionConfig()
    if (strategy, level) != (plain.strategy, plain.optimization_level):
        raise ValueError(
            "create_unified_attention_fusion: give fusion_strategy and optimization_level, or config, which has both"
        )
    return config


def _check(model: nn.Module) -> None:
    lost = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if lost is not None:
        raise ValueError(
            f"create_unified_attention_fusion: {lost} is on meta and has no values; load the model, then fuse it"
        )
    why = obstacle(model)
    if why is not None:
        raise ValueError(f"create_unified_attention_fusion: {type(model).__name__} cannot be fused: {why}")


def rules_of(config: FusionConfig, levels: Collection[OptimizationLevel]) -> set[str]:
    """The names, as `LEVEL_RULES` has them, of what these levels do for a strategy."""
    parts = _PARTS_OF_STRATEGY[config.strategy]
    names = {name for level in levels for part in parts for name in LEVEL_RULES[level][part]}
    return names if config.enable_memory_optimization else names - {"loss"}


def _rules(config: FusionConfig, levels: Collection[OptimizationLevel]) -> list[rewrite.Rule]:
    """In the order of `optimize`."""
    names, strategy = rules_of(config, levels), config.strategy
    kinds = {FusionStrategy.ATTENTION_ONLY: "attention", FusionStrategy.FFN_ONLY: "ffn"}
    found: list[rewrite.Rule] = []
    # norms that a rotation takes have to be recognised first; by themselves they are not of every strategy
    found += [NormRule()] if "norm" in names else [HeadNormRule()] if "rope:norm" in names else []
    found += [AddNormRule(drops=False)] if "add_norm" in names else []
    found += [RotaryRule(norms="rope:norm" in names)] if "rope" in names else []
    found += [GatedMlpRule(recompute=config.enable_memory_optimization)] if "mlp" in names else []
    parts = [name.partition(":")[2] for name in names if name.startswith("layer:")]
    found += [LayerRule(parts)] if parts else []
    found += [rule() for rule in (ActivationRule, AttentionRule, SelectionRule, LossRule) if rule.name in names]
    found += [PackRule(kinds.get(strategy))] if "pack" in names else []
    return found


def _refuse_nothing(report: rewrite.Report, config: FusionConfig, levels: tuple[OptimizationLevel, ...]) -> None:
    """Raise unless the strategy, and every rule that only the highest level has, replaced something."""
    done = {name for row in report.replaced for name in _names_of(row)}
    before, added = rules_of(config, levels[:-1]), rules_of(config, levels)
    strategy, level = config.strategy.name, config.optimization_level.name
    if not done & added:
        reasons = _reasons(report, added)
        raise ValueError(
            f"create_unified_attention_fusion: strategy {strategy} changes nothing in {_class_of(report)}: {reasons}"
        )
    if levels[:-1] and not done & (added - before):
        lower = levels[-2].name
        reasons = _reasons(report, added - before)
        raise ValueError(
            f"create_unified_attention_fusion: {level} changes nothing beyond {lower} in {_class_of(report)}: "
            f"{reasons}; use OptimizationLevel.{lower}"
        )


def _names_of(row: rewrite.Row) -> set[str]:
    """A row's rule as `LEVEL_RULES` names it; "rope:norm" are norms of queries and keys in one op with the rotation."""
    if "rms_norm_rope" in row.ops:
        return {"rope", "rope:norm"}
    if row.rule != LayerRule.name:
        return {row.rule}
    by_op = {"attention": "attention", "linear_act": "feed_forward", "dropout_add_norm": "dropout"}
    return {f"layer:{by_op[op]}" for op in row.ops}


def _class_of(report: rewrite.Report) -> str:
    return report.rows[0].cls if report.rows and not report.rows[0].fqn else "this model"


def _reasons(report: rewrite.Report, names: Collection[str]) -> str:
    rules = {name.partition(":")[0] for name in names}
    told = dict.fromkeys(f"{row.rule}: {row.reason}" for row in report.rows if row.rule in rules)
    none = sorted(rules - {row.rule for row in report.rows})
    if none:
        told[f"no module is one that {', '.join(none)} looks for"] = None
    return "; ".join(told) if told else f"the level has no rule for strategy {sorted(rules)}"


def _back_to(marks: list[tuple[nn.Module, int]]) -> None:
    for module, count in reversed(marks):
        while len(rewrite.forms(module)) > count and rewrite.unswap(module):
            pass
        if not count:
            module.__dict__.pop(rewrite.CALLS, None)


def _said(model: nn.Module, config: FusionConfig, report: rewrite.Report) -> tuple[str, ...]:
    """What the fields of a configuration amount to here, in sentences."""
    told, limit = [], most_tokens(model)
    if limit is not None and limit < config.target_sequence_length:
        told.append(
            f"The model has {limit} positions, so warm_up uses these, not target_sequence_length = "
            f"{config.target_sequence_length}."
        )
    if not config.enable_mixed_precision:
        told.append("A caller's autocast does not reach the model (enable_mixed_precision=False).")
    if not config.enable_memory_optimization:
        told.append("Logits and the inner products of gated MLPs are kept (enable_memory_optimization=False).")
    elif not any(row.rule in ("loss", "mlp") for row in report.replaced):
        told.append("enable_memory_optimization has nothing to do: there is no loss and no gated MLP here.")
    return tuple(told)


def _member(kind: type[enum.Enum], name: str, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    values = [member.value for member in kind]
    if isinstance(value, str) and value.lower() in values:
        return kind(value.lower())
    allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    raise ValueError(f"{name} is {value!r}; it must be one of {allowed}")
