"""`create_unified_attention_fusion`: the rules of `optimize`, chosen by the part of a block and by how far they go."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tilesmith import rewrite
from tilesmith.engine.argument_checks import flag, size, suggesting
from tilesmith.engine.model_state import state_preserved
from tilesmith.models.advice import advised
from tilesmith.models.blocks import BlockRule, detach_block_forms, restore_block_forms
from tilesmith.models.checkpoints import is_attached
from tilesmith.models.compiling import CompiledForm, CompileRule
from tilesmith.models.fusion.selection import Selection, names_of
from tilesmith.models.generation.rule import DecodingRule
from tilesmith.models.graphs_rule import GraphsRule, wanted_before
from tilesmith.models.layers.packing import could_be_packed
from tilesmith.models.optimization import undo
from tilesmith.models.reach import described
from tilesmith.models.sizing.sample_inputs import most_tokens, sample_of
from tilesmith.rewrite.variants import obstacle


class FusionStrategy(enum.Enum):
    """Which part of a transformer block is fused; each rule of `optimize` declares the part that it is for.

    FULL_BLOCK: all parts, linear layers with adapters and the model's loss. ATTENTION_ONLY: rotary positions and
    attention, also attention that a module spells out. FFN_ONLY: gated MLPs, experts and activations. NORM_ONLY: norms,
    gated ones too, and the sums that go into them.
    """

    FULL_BLOCK = "full_block"
    ATTENTION_ONLY = "attention_only"
    FFN_ONLY = "ffn_only"
    NORM_ONLY = "norm_only"


class OptimizationLevel(enum.Enum):
    """How far the fusion goes; each level includes the rules of the previous ones.

    CONSERVATIVE: one module, or a sum and a norm, becomes one op; every product stays a call of its own layer.
    BALANCED: besides, products and what spans several modules: attention, gated MLPs, experts, adapters, the blocks of
        torch's encoder and decoder layers (activation in the first product), the loss without logits. Attention that
        drops weights draws other random numbers than PyTorch's.
    AGGRESSIVE: besides, what moves memory or draws other random numbers: weights that multiply the same tensor are
        stacked for one product (q, k, v; gate, up); dropouts go into one op with sum and norm, which `optimize` does,
        too.
    """

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


@suggesting
@dataclass(frozen=True)
class FusionConfig:
    """How `create_unified_attention_fusion` fuses a model.

    strategy, optimization_level: see their classes; a string is taken as the value of one.
    enable_mixed_precision: whether a caller's `torch.autocast` applies to the model. False: the model computes in the
        dtypes of its parameters and inputs even inside one. The library never turns autocast on.
    enable_memory_optimization: gated MLPs compute their inner product again in the backward rather than keep it, and a
        model that is given labels does not keep its logits. False: neither.
    target_sequence_length: tokens for which `UnifiedAttentionFusion.warm_up` compiles and chooses kernels; at most the
        model's number of positions, and the report says if that is less.
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
    """The class that `create_unified_attention_fusion` adds to a model's own; it is not made directly.

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
        """The configuration with which the model was fused."""
        return next(form.config for form in rewrite.forms(self) if isinstance(form, FusionForm))

    @property
    def fusion_report(self) -> rewrite.Report:
        """What was fused, what could not be, and why; a row for each module."""
        return self.tilesmith_report

    def warm_up(self, *, sample: Any = None, training: bool = True) -> None:
        """Run the model once on one row of `target_sequence_length` tokens, so that kernels are chosen and compiled.

        sample: the model's inputs instead; without it they are made from the model's configuration, or ValueError is
        raised. training: with a backward. Parameters, gradients, buffers and random numbers are left as they were.
        """
        given = sample_of(self, sample, tokens=self.fusion_config.target_sequence_length)
        with state_preserved(self):
            self.train(training)
            given.step(self, 1, backward=training)

    def unfuse(self) -> nn.Module:
        """Revert the fusion and what `optimize` did; returns the model, which has its own class again."""
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

    Modules of torch, of transformers and of this library are recognised and swapped as by `tilesmith.optimize`.
    Parameters stay the same objects in the same order, so state dicts keep their keys and an existing optimizer keeps
    working. `fused.unfuse()`, or `tilesmith.undo`, takes everything back.

    config: a whole configuration, in place of the two arguments before it.

    What a strategy or a level leaves out is in the report, with the reason. Blocks that `optimize` compiles or records
    are still compiled or recorded.

    Raises TypeError or ValueError for other arguments, for parameters on meta, for a model whose forward another
    library has patched, for one that `fit_sequence` has planned, and for one that is fused by another configuration.
    Raises ValueError, with the reasons, where a strategy finds nothing to fuse or a level adds nothing to the one
    before it; the model is then left as it was.
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
    _fuse(model, config)
    return model  # type: ignore[return-value]


def _fuse(model: nn.Module, config: FusionConfig) -> None:
    """Apply the rules; blocks that were compiled or recorded before are so again, above what is fused below them."""
    selection = _selection(config)
    taken = detach_block_forms(model)
    marks = [(m, len(rewrite.forms(m)), m.__dict__.get(rewrite.CALLS)) for m in model.modules()]
    had = {type(form) for _, form, _ in taken}
    recorded = wanted_before(taken)
    try:
        whole: list[BlockRule | DecodingRule] = [CompileRule(model)] if CompiledForm in had else []
        whole += [DecodingRule(), GraphsRule(model, recorded)] if recorded else []
        before = getattr(model, "tilesmith_report", None)
        report = rewrite.rewrite(model, [*selection.rules(bool(recorded)), *whole], earlier=before)
        _refuse_nothing(model, report, selection)
        rewrite.swap(model, FusionForm(config))
    except BaseException:
        _back_to(marks)
        restore_block_forms(taken)
        raise
    for rule in whole:
        for row in report.replaced:
            if row.rule == rule.name:
                rule.attach(model.get_submodule(row.fqn))
    kind = next((p.device.type for p in model.parameters()), "cpu")
    report = described(report, kind, *_said(model, config, report))
    rows = tuple(dict.fromkeys(report.rows))  # norms of queries and keys are looked at twice
    report = replace(report, rows=rows, notes=tuple(rule.record for rule in whole))
    model.tilesmith_report = report if recorded else advised(model, report)


def _selection(config: FusionConfig) -> Selection:
    return Selection(config.strategy.value, config.optimization_level.value, config.enable_memory_optimization)


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
    if is_attached(model):
        raise ValueError(
            "create_unified_attention_fusion: fit_sequence has planned this model, and its plan counts what fusion "
            "does; call undo() of the plan, fuse, then fit_sequence"
        )
    why = obstacle(model)
    if why is not None:
        raise ValueError(f"create_unified_attention_fusion: {type(model).__name__} cannot be fused: {why}")


def _refuse_nothing(model: nn.Module, report: rewrite.Report, selection: Selection) -> None:
    """Raise unless the strategy replaced something, and the level something that the level before it does not."""
    done = {name for row in report.replaced for name in names_of(row)}
    strategy, level = selection.strategy.upper(), selection.level.upper()
    if not done & selection.names():
        more = () if "pack" in selection.names() else could_be_packed(model, selection.pack_kind)
        why = "; ".join((*selection.reasons(report, selection.names()), *more))
        raise ValueError(
            f"create_unified_attention_fusion: strategy {strategy} changes nothing in {_class_of(report)}: {why}"
        )
    if done & selection.added():
        return
    lower = selection.before()
    while lower is not None and not done & lower.added():
        lower = lower.before()
    if lower is not None:
        added = selection.added()
        why = (
            "; ".join(selection.reasons(report, added)) or f"{strategy} has no rule that the levels before {level} lack"
        )
        use = lower.level.upper()
        raise ValueError(
            f"create_unified_attention_fusion: {level} changes nothing beyond {use} in {_class_of(report)}: {why}; use "
            f"OptimizationLevel.{use}"
        )


def _class_of(report: rewrite.Report) -> str:
    return report.rows[0].cls if report.rows and not report.rows[0].fqn else "this model"


def _back_to(marks: list[tuple[nn.Module, int, dict[str, int] | None]]) -> None:
    """Leave each module as many forms as it had, and the counts of calls that an earlier report reads."""
    for module, count, calls in reversed(marks):
        while len(rewrite.forms(module)) > count and rewrite.unswap(module):
            pass
        module.__dict__.pop(rewrite.CALLS, None)
        if calls is not None:
            module.__dict__[rewrite.CALLS] = calls


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
    selection = _selection(config)
    told += selection.dropouts_left(report)
    if "pack" not in selection.names():
        told += could_be_packed(model, selection.pack_kind)
    return tuple(told)


def _member(kind: type[enum.Enum], name: str, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    values = [member.value for member in kind]
    if isinstance(value, str) and value.lower() in values:
        return kind(value.lower())
    allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    raise ValueError(f"{name} is {value!r}; it must be one of {allowed}")
