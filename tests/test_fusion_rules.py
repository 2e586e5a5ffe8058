"""Which rules of `optimize` a strategy and a level of fusion select, what reports say of the rest, and what fusion
does to a model that `optimize` or `fit_sequence` had before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import build, ops_everywhere  # noqa: F401
from tilesmith import nn as tnn
from tilesmith.attention.fusion import FusionStrategy, OptimizationLevel, create_unified_attention_fusion
from tilesmith.engine import use
from tilesmith.models.graphs_rule import GraphedForm
from tilesmith.models.layers.packing import could_be_packed
from tilesmith.models.optimization import RECORDED, RULES
from tilesmith.rewrite import forms

CONSERVATIVE, BALANCED, AGGRESSIVE = OptimizationLevel
FULL, ATTENTION, FFN, NORM = FusionStrategy
OF_PART = {
    ATTENTION: {"rope", "latent", "attention", "selection"},
    FFN: {"mlp", "experts", "router", "activation"},
    NORM: {"norm", "add_norm"},
}


def bloom():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=100))


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=100))


def bart():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(**sizes, **heads, vocab_size=100, dropout=0.1)
    return transformers.BartForConditionalGeneration(config)


def qwen3_moe():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    more = {"vocab_size": 100, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts, **more))


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))


def mamba():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, vocab_size=64))


MODELS = {"moe": qwen3_moe, "adapters": adapted, "bloom": bloom, "gated norms": mamba, "bert": bert}


def replaced(report, rules=None):
    """(module, rule) of what was replaced, by these rules; without the rows of a model's own form."""
    return {(row.fqn, row.rule) for row in report.replaced if rules is None or row.rule in rules}


@pytest.mark.parametrize("name", MODELS)
def test_a_full_block_has_every_rule_of_optimize(name):
    wanted = replaced(tilesmith.optimize(MODELS[name]()).tilesmith_report)
    found = replaced(create_unified_attention_fusion(MODELS[name]()).fusion_report)
    assert found == wanted


@pytest.mark.parametrize("strategy", OF_PART)
@pytest.mark.parametrize("name", MODELS)
def test_a_strategy_has_the_rules_of_its_part_and_names_the_others(name, strategy):
    wanted = replaced(tilesmith.optimize(MODELS[name]()).tilesmith_report)
    alone = strategy is NORM or (strategy is FFN and name in ("bert", "bloom", "gated norms"))
    level = CONSERVATIVE if alone else BALANCED  # which would have nothing to add
    ours = {(fqn, rule) for fqn, rule in wanted if rule in OF_PART[strategy]}
    if not ours:
        with pytest.raises(ValueError, match="changes nothing"):
            create_unified_attention_fusion(MODELS[name](), strategy, level)
        return
    report = create_unified_attention_fusion(MODELS[name](), strategy, level).fusion_report
    assert replaced(report, OF_PART[strategy]) == ours
    why = f"not part of FusionStrategy.{strategy.name}"
    named = {(row.fqn, row.rule) for row in report.skipped if row.reason.endswith(why) and not row.wanted}
    # "attention" and "loss" are of the whole model; the rows of the modules inside come with it
    own = {"norm", "rope", "mlp", "experts", "lora"} - OF_PART[strategy]
    taken = replaced(report)  # norms of queries and keys that go into a rotation
    assert {key for key in wanted if key[1] in own} - taken <= named
    whole = {rule for _, rule in wanted if rule in {"attention", "loss"} - OF_PART[strategy]}
    assert whole <= {rule for _, rule in named}
    assert why in str(report)


def test_every_rule_is_of_a_strategy():
    """A rule without a part is of the full block; none of a part is forgotten."""
    parts = {rule.name: rule.part for rule in RULES}
    for strategy, names in OF_PART.items():
        assert {name for name, part in parts.items() if part == strategy.value.removesuffix("_only")} == names
    assert {name for name, part in parts.items() if part == ""} == {"lora", "functional", *RECORDED}


def test_spelled_out_attention_computes_the_same():
    model, ids = bloom(), torch.arange(12).view(2, 6)
    before = model(input_ids=ids).logits
    fused = create_unified_attention_fusion(model, ATTENTION)
    torch.testing.assert_close(fused(input_ids=ids).logits, before)
    assert fused.fusion_report.calls()["attention"] == 2


def test_what_a_level_leaves_is_named():
    report = create_unified_attention_fusion(qwen3_moe(), FULL, CONSERVATIVE).fusion_report
    left = {row.rule for row in report.skipped if row.reason.endswith("left to OptimizationLevel.BALANCED")}
    assert {"experts", "attention", "loss"} <= left and not left & {"norm", "rope"}
    assert "create_unified_attention_fusion does so at OptimizationLevel.AGGRESSIVE" in str(report)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1)
    rows = create_unified_attention_fusion(layer, FFN).fusion_report.skipped
    assert any(row.reason == "its blocks by the ops: attention: not part of FusionStrategy.FFN_ONLY" for row in rows)


def test_dropped_sums_are_of_the_level_that_draws_other_numbers():
    for level in (BALANCED, AGGRESSIVE):
        fused = create_unified_attention_fusion(bert().train(), FULL, level)
        with use(dropout_add_norm="reference"):
            fused(input_ids=torch.arange(12).view(2, 6))
        assert (fused.fusion_report.calls().get("dropout_add_norm", 0) > 0) == (level is AGGRESSIVE)
        left = "the dropout is left to OptimizationLevel.AGGRESSIVE" in fused.fusion_report.to_json()
        assert left == (level is BALANCED)


@pytest.mark.parametrize("make", [bert, bart, bloom, qwen3_moe])
def test_a_report_names_what_optimize_does_and_a_level_leaves(make):
    """Row by row, with the ops: a dropout that `optimize` draws with the sum and the norm."""
    wanted = tilesmith.optimize(make().train()).tilesmith_report.replaced
    report = create_unified_attention_fusion(make().train()).fusion_report
    done = {(row.fqn, row.rule): row.ops for row in report.replaced}
    less = [row for row in wanted if done.get((row.fqn, row.rule)) != row.ops]
    assert bool(less) == (make in (bert, bart))
    named = {row.fqn for row in report.skipped if row.reason.endswith("left to OptimizationLevel.AGGRESSIVE")}
    assert {row.fqn for row in less} <= named
    told = [effect for effect in report.effects if "optimize fuses it" in effect]
    assert len(told) == bool(less)
    if less:
        assert told[0].startswith(f"{', '.join(dict.fromkeys(row.cls for row in less))}: ")
        full = create_unified_attention_fusion(make().train(), FULL, AGGRESSIVE).fusion_report
        assert {(row.fqn, row.ops) for row in less} <= {(row.fqn, row.ops) for row in full.replaced}
        assert not any("optimize fuses it" in effect for effect in full.effects)


def test_refusals_advise_what_works():
    cases = {
        (bert, FFN, AGGRESSIVE): "use OptimizationLevel.CONSERVATIVE",
        (bert, FFN, BALANCED): "use OptimizationLevel.CONSERVATIVE",
        (bert, NORM, BALANCED): "NORM_ONLY has no rule that the levels before BALANCED lack; use .*CONSERVATIVE",
        (qwen3_moe, NORM, AGGRESSIVE): "use OptimizationLevel.CONSERVATIVE",
    }
    for (make, strategy, level), words in cases.items():
        model = make()
        with pytest.raises(ValueError, match=words) as refused:
            create_unified_attention_fusion(model, strategy, level)
        told = str(refused.value)
        assert "[]" not in told and "not part of" not in told and "a sum goes straight into" not in told
        create_unified_attention_fusion(model, strategy, CONSERVATIVE)
    ours = tnn.Decoder(tnn.DecoderConfig(64, 16, 24, 2, 2))
    with pytest.raises(ValueError, match="run the library's ops already; .*OptimizationLevel.AGGRESSIVE") as refused:
        create_unified_attention_fusion(ours)
    assert "no module is one for" not in str(refused.value)
    with pytest.raises(ValueError, match="TransformerEncoderLayer: no module is one for the rule pack; use .*BALANCED"):
        create_unified_attention_fusion(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), ATTENTION, AGGRESSIVE)
    create_unified_attention_fusion(ours, FULL, AGGRESSIVE)


class QuantisedLinear(nn.Linear):
    """As others' layers of 4 bits: a forward of its own."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def quantised():
    model = build("llama")
    for module in list(model.modules()):
        for child in module.children():
            if type(child) is nn.Linear:
                child.__class__ = QuantisedLinear
    return model


def patched():
    model = build("llama")
    model.forward = model.forward
    return model


@pytest.mark.parametrize("make", [adapted, quantised, patched])
def test_packing_is_not_advised_where_it_is_refused(make):
    model = make()
    assert not any("AGGRESSIVE" in told for told in tilesmith.optimize(model).tilesmith_report.effects)
    with pytest.raises(ValueError):
        create_unified_attention_fusion(tilesmith.undo(model), FULL, AGGRESSIVE)


def test_packing_is_advised_for_what_a_part_has():
    (told,) = could_be_packed(build("llama"))
    attention, gated = "LlamaAttention (q_proj, k_proj, v_proj)", "LlamaMLP (gate_proj, up_proj)"
    assert told.startswith(f"{attention}, {gated}: layers with the same input are not merged")
    (told,) = could_be_packed(build("mixtral"))  # its experts hold gate and up as one weight
    assert told.startswith(f"{attention.replace('Llama', 'Mixtral')}: ") and "gate" not in told
    for model in (build("llama"), create_unified_attention_fusion(build("llama"))):
        for kind, named in {"attention": attention, "ffn": gated}.items():
            (told,) = could_be_packed(model, kind)
            assert told.startswith(f"{named}: ")
        assert not could_be_packed(model, "norm")
    packed = create_unified_attention_fusion(build("llama"), ATTENTION, AGGRESSIVE).fusion_report
    assert {row.cls for row in packed.replaced if row.rule == "pack"} == {"LlamaAttention"}
    fused = create_unified_attention_fusion(build("llama"), FULL, AGGRESSIVE)
    assert not could_be_packed(fused)


@pytest.mark.parametrize("only", [None, "norm"])
def test_blocks_that_are_recorded_stay_so_above_what_is_fused(only):
    model, ids = tilesmith.optimize(build("llama"), only=only, graphs=True), torch.arange(12).view(2, 6)
    before = [[type(form) for form in forms(block)] for block in model.model.layers]
    with pytest.raises(ValueError, match="changes nothing beyond"):
        create_unified_attention_fusion(model, NORM, BALANCED)
    assert [[type(form) for form in forms(block)] for block in model.model.layers] == before
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.tilesmith_report.calls()["rms_norm"]  # of the earlier report, whose model was left as it was
    fused = create_unified_attention_fusion(model)
    for block in fused.model.layers:
        kinds = [type(form) for form in forms(block)]
        assert kinds[0] is GraphedForm and kinds.count(GraphedForm) == 1
    fused(input_ids=ids, labels=ids).loss.backward()
    assert "Recorded blocks" in str(fused.fusion_report) and "Blocks ran unrecorded" in str(fused.fusion_report)
    assert fused.fusion_report.calls()["attention"]
    tilesmith.optimize(fused)
    assert type(forms(fused.model.layers[0])[0]) is GraphedForm
    assert not any(forms(module) for module in fused.unfuse().modules())


def test_a_model_with_a_sequence_plan_is_refused():
    model = build("llama").train()
    plan = tilesmith.fit_sequence(model, 64, tile_tokens=16)
    held = [forms(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"fit_sequence has planned this model.*undo\(\) of the plan, fuse"):
        create_unified_attention_fusion(model)
    assert [forms(module) for module in model.modules()] == held
    plan.undo()
    create_unified_attention_fusion(model)
