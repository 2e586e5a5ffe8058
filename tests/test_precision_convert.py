"""Conversions that are refused or fail: what they say, and that they leave the model as it was."""

import pytest
import torch
from torch import nn

from devices import DEVICE
from tilesmith import nn as tnn
from tilesmith.precision import (
    FP8Config,
    FP8Format,
    FP8LinearLayer,
    FP8TrainingEngine,
    convert,
    convert_model_to_fp8,
    create_fp8_trainer,
    revert_model_from_fp8,
)
from tilesmith.precision.scaling import _roots

CONFIG = FP8Config(min_features=16, min_tokens=1)


def _stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)).to(DEVICE)


def _decoder(**more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    return tnn.Decoder(tnn.DecoderConfig(**sizes, **more), dtype=torch.bfloat16).to(DEVICE)


def _state(model):
    """What a conversion changes: classes, attributes, children, hooks, and whether optimizers' steps are followed."""
    modules = {
        name: (type(m), set(m.__dict__), dict(m._modules), list(m._forward_hooks)) for name, m in model.named_modules()
    }
    return modules, {name: id(p) for name, p in model.named_parameters()}, model in _roots


@pytest.mark.parametrize(
    "start",
    [
        convert_model_to_fp8,
        lambda model: convert_model_to_fp8(model, inplace=False),
        lambda model: FP8TrainingEngine(model).setup_fp8_training(),
        lambda model: create_fp8_trainer(model).__enter__(),
    ],
    ids=["convert", "copy", "engine", "trainer"],
)
def test_without_an_eligible_layer(start):
    """The first layers are named with their reason, and what to change."""
    model = _stack()
    before = _state(model)
    with pytest.raises(ValueError, match="0: 64 x 96 has a side below min_features, 1024; 2: .*module_filter_fn"):
        start(model)
    assert _state(model) == before


def _whole():
    return convert_model_to_fp8(_stack(), CONFIG)


def _half():
    return nn.Sequential(_whole(), _stack())


def _by_hand():
    return nn.Sequential(FP8LinearLayer(64, 64, config=CONFIG, device=DEVICE), nn.Linear(64, 64).to(DEVICE))


@pytest.mark.parametrize("made", [_whole, _half, _by_hand])
@pytest.mark.parametrize("inplace", [True, False])
def test_a_model_that_is_converted_already_even_in_part(made, inplace):
    model = made()
    before = _state(model)
    with pytest.raises(ValueError, match="converted already; revert_model_from_fp8 takes it back"):
        convert_model_to_fp8(model, CONFIG, inplace)
    assert _state(model) == before
    revert_model_from_fp8(model)  # as the error says
    convert_model_to_fp8(model, CONFIG)
    assert not any(type(m) is nn.Linear for m in model.modules())


def test_an_engine_takes_a_model_that_is_converted_in_part_as_it_is():
    model = _half()
    engine = FP8TrainingEngine(model, CONFIG)
    engine.setup_fp8_training()
    assert [type(layer) for layer in (model[0][0], model[1][0])] == [FP8LinearLayer, nn.Linear]
    x, optimizer = torch.randn(32, 64).to(DEVICE), torch.optim.SGD(model.parameters(), 1e-2)
    engine.training_step(x, x)
    assert engine.optimizer_step(optimizer)
    assert all(name.startswith("0.") for name in engine.get_training_statistics()["scales"])


@pytest.mark.parametrize(
    ("name", "more"), [("FP8Experts", {"num_experts": 4, "expert_size": 48}), ("FP8Norm", {}), ("FP8GatedMLP", {})]
)
def test_a_conversion_that_fails_late_leaves_the_model_as_it_was(name, more, monkeypatch):
    model = _decoder(**more)
    before, made = _state(model), []
    genuine = getattr(convert, name)

    class Fails(genuine):
        def __init__(self, *given):
            made.append(self)
            if len(made) == 2:
                raise MemoryError("no room")
            super().__init__(*given)

    monkeypatch.setattr(convert, name, Fails)
    with pytest.raises(MemoryError):
        convert_model_to_fp8(model, CONFIG)
    assert len(made) == 2 and _state(model) == before
    monkeypatch.undo()
    convert_model_to_fp8(model, CONFIG)


def test_a_filter_that_fails():
    model = _stack()
    before = _state(model)
    with pytest.raises(ZeroDivisionError):
        convert_model_to_fp8(model, FP8Config(module_filter_fn=lambda module, name: 1 / 0))
    assert _state(model) == before


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (lambda model: FP8TrainingEngine(model, FP8Config(recipe="rowwise")), "recipe is 'rowwise', .* 'delayed'"),
        (
            lambda model: create_fp8_trainer(model, FP8Format.E4M3, FP8Format.E4M3),
            "config's backward_format is E4M3, the model is converted with E5M2",
        ),
        (
            lambda model: FP8TrainingEngine(model, FP8Config(amax_history_length=3)),
            "config's amax_history_length is 3, the model is converted with 16",
        ),
        (
            lambda model: FP8TrainingEngine(model, FP8Config(min_tokens=1, loss_scale=8.0)),
            "config's min_tokens is 1, the model is converted with 256",
        ),
        (
            lambda model: FP8TrainingEngine(model, FP8Config(cache_weights=False)),
            "config's cache_weights is False, the model is converted with True",
        ),
        (
            lambda model: FP8TrainingEngine(model, FP8Config(module_filter_fn=lambda module, name: False)),
            "module_filter_fn, and the model is converted already",
        ),
    ],
    ids=["recipe", "format", "history", "tokens", "casts", "filter"],
)
def test_an_engine_of_another_recipe_than_the_model_s_is_refused(engine, words):
    model = convert_model_to_fp8(nn.Sequential(nn.Linear(32, 32)), FP8Config(min_features=16))
    with pytest.raises(ValueError, match=words):
        engine(model).setup_fp8_training()
    FP8TrainingEngine(model).setup_fp8_training()
    create_fp8_trainer(model).setup_fp8_training()
