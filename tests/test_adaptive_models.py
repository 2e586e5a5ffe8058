"""Adaptive precision on a CPU: which layers of PEFT's, optimised and expert models are packed, and which stay."""

import pytest
import torch
from torch import nn

from tilesmith import nn as tile_nn
from tilesmith import optimize
from tilesmith.precision import (
    PrecisionConfig,
    PrecisionFormat,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)


def _inputs(rows):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))


def _adapted(**options):
    """A model with PEFT's adapters on one layer, whose factors are large enough to be packed."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64))
    return peft, peft.get_peft_model(model, peft.LoraConfig(r=64, target_modules=["0"], **options))


def test_adapters_train_on_packed_weights(tmp_path):
    peft, model = _adapted(init_lora_weights=False)
    config = PrecisionConfig(PrecisionFormat.FP32, target_memory_reduction=0.4)
    packed = create_ultra_precision_module(model, config, calibration=_inputs(16))
    stats = packed.get_precision_stats()
    assert set(stats.layers) == {"base_model.model.0.base_layer", "base_model.model.1"}
    adapters = {f"base_model.model.0.lora_{part}.default" for part in "AB"}
    assert set(stats.skipped) == adapters and all("stays trainable" in r for r in stats.skipped.values())
    trained = {name: p for name, p in packed.model.named_parameters() if p.requires_grad}
    assert set(trained) == {f"{name}.weight" for name in adapters}
    x = _inputs(8)
    before = packed(x).detach()
    packed(x).square().mean().backward()
    assert all(p.grad.abs().max() > 0 for p in trained.values())
    torch.optim.SGD(trained.values(), 0.1).step()
    assert not torch.equal(packed(x), before)
    packed.model.save_pretrained(tmp_path)
    saved = peft.utils.load_peft_weights(tmp_path, device="cpu")
    assert len(saved) == 2 and all(any(torch.equal(p, t) for p in trained.values()) for t in saved.values())


@pytest.mark.parametrize(
    ("options", "change", "layer", "match"),
    [
        ({"use_dora": True}, None, "0.base_layer", "DoRA"),
        ({}, lambda model: model.merge_adapter(), "0.base_layer", "unmerge_adapter"),
        ({"modules_to_save": ["1"]}, None, "1.modules_to_save.default", "stays trainable"),
    ],
    ids=["dora", "merged", "modules to save"],
)
def test_layers_that_adapters_need_stay(options, change, layer, match):
    _, model = _adapted(**options)
    if change is not None:
        change(model)
    packed = create_ultra_precision_module(model, PrecisionConfig(PrecisionFormat.FP32, target_memory_reduction=0.1))
    assert match in packed.get_precision_stats().skipped[f"base_model.model.{layer}"]
    assert packed(_inputs(4)).isfinite().all()


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("bert", {"graphs": True})])
def test_layers_that_optimize_changed_alone_are_packed(name, options):
    pytest.importorskip("transformers")
    from optimize_models import batch, build

    x = batch(name)
    found = {}
    for way in ("plain", "optimised"):
        torch.manual_seed(0)
        model = build(name).eval().bfloat16()
        if way == "optimised":
            optimize(model, **options)
            changed = {n for n, m in model.named_modules() if type(m) is not nn.Linear and isinstance(m, nn.Linear)}
            assert changed
        packed = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=0.1))
        stats = packed.get_precision_stats()
        found[way] = set(stats.layers), stats.skipped, packed(**x).logits
    assert found["plain"][:2] == found["optimised"][:2] and changed & found["optimised"][0]
    torch.testing.assert_close(found["plain"][2], found["optimised"][2], atol=0.05, rtol=0.05)


def test_layers_that_optimize_computes_together_stay():
    from tilesmith.models.layers.packing import MemberForm
    from tilesmith.rewrite import swap

    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64))
    swap(model[0], MemberForm(0))
    stats = create_ultra_precision_module(
        model, PrecisionConfig(PrecisionFormat.FP32, target_memory_reduction=0.2)
    ).get_precision_stats()
    assert set(stats.layers) == {"1"} and "MemberForm" in stats.skipped["0"]


def test_stacked_experts_are_named():
    torch.manual_seed(0)
    layer = tile_nn.MixtureOfExperts(128, 64, 4, 2, shared_size=64)
    config = PrecisionConfig(PrecisionFormat.FP32, target_memory_reduction=0.01)
    stats = create_ultra_precision_module(layer, config).get_precision_stats()
    assert "stacked experts" in stats.skipped["experts"] and stats.layers
    assert "stacked experts" in analyze_precision_opportunities(layer, _inputs(4))["skipped"]["experts"]
    with pytest.raises(ValueError, match="no linear layer is eligible .experts: its weights are stacked experts"):
        create_ultra_precision_module(nn.ModuleDict({"experts": layer.experts}))


class _Reader(nn.Module):
    """Reads the weight of one of its layers, as T5's feed-forward does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).to(self.second.weight.dtype))


def test_a_layer_whose_weight_is_read_stays():
    model, x = nn.Sequential(_Reader(), _Reader()).half(), torch.randn(3, 64).half()
    packed = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=0.2))
    stats = packed.get_precision_stats()
    assert set(stats.layers) == {"0.first", "1.first"}
    assert "the forward of _Reader reads its weight" in stats.skipped["1.second"]
    torch.testing.assert_close(packed(x), model(x), rtol=0.1, atol=0.1)
    with pytest.raises(AttributeError, match="PackedLinear has no weight.*dequantized"):
        _ = packed.model[0].first.weight
    assert not hasattr(packed.model[0].first, "weight")
