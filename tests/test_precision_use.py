"""What else is done with converted models: copies, threads, inference mode, torch.func, parametrizations, odd steps."""

import collections
import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from devices import DEVICE
from tilesmith import nn as tnn
from tilesmith.precision import (
    FP8Config,
    FP8LinearLayer,
    FP8TrainingEngine,
    convert_model_to_fp8,
    create_fp8_trainer,
    linear,
    revert_model_from_fp8,
)
from tilesmith.precision.config import RECIPES
from tilesmith.validate.budget import compare

SMALL = {"min_features": 16, "min_tokens": 1}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def _stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(DEVICE)


def _converted(recipe="delayed", **more):
    return convert_model_to_fp8(_stack(), FP8Config(recipe=recipe, **SMALL, **more))


def _x(seed=1):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_filter_that_cannot_be_pickled_does_not_keep_a_model_from_it():
    """Layers keep their config, but nobody asks its filter again."""
    model = _converted(module_filter_fn=lambda module, name: name == "0")
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again[0], FP8LinearLayer) and not isinstance(again[2], FP8LinearLayer)
    assert torch.equal(again(_x()), model(_x()))


class _Writes(nn.Module):
    """Writes into a tensor between two layers that it gives it to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.first(x)
        x.mul_(3.0)
        return y + self.second(x)


@each_recipe
def test_writes_between_two_layers_are_noticed_in_inference_mode(recipe):
    """Its tensors have no version, so nothing tells of a write: they are cast each time."""
    model = convert_model_to_fp8(_Writes().to(DEVICE), FP8Config(recipe=recipe, **SMALL)).eval()
    with torch.no_grad():
        expected = model(_x())
    with torch.inference_mode():
        assert torch.equal(model(_x().clone()), expected)


def test_a_buffer_of_inference_mode_that_is_written_again():
    layer = FP8LinearLayer(64, 64, config=FP8Config(**SMALL), device=DEVICE).eval()
    with torch.inference_mode():
        buffer = _x(1)
        layer(buffer)
        buffer.copy_(_x(2))
        assert torch.equal(layer(buffer), layer(_x(2)))


def test_a_cast_is_never_that_of_another_threads_tensor(monkeypatch):
    """Another thread may leave its cast while this one looks whether the one that is there is its own."""
    relay, by, version = linear.Relay(), ("delayed", True), linear._version
    x, other = _x(1), _x(2)
    own, others = linear.Cast(x, x), linear.Cast(other, other)
    relay.put(x, own, by)

    def interrupted(tensor):
        monkeypatch.setattr(linear, "_version", version)
        relay.put(other, others, by)
        return version(tensor)

    monkeypatch.setattr(linear, "_version", interrupted)
    assert relay.get(x, by) is not others


@each_recipe
def test_transforms_of_torch_func_are_computed_as_without_8_bits(recipe):
    model = _converted(recipe)
    plain = revert_model_from_fp8(copy.deepcopy(model))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    x = _x()
    found = torch.func.grad(loss)(weights, x)
    plain(x).square().mean().backward()
    for name, p in plain.named_parameters():
        assert torch.equal(found[name], p.grad), name
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x[:, None])
    exact = copy.deepcopy(plain).double()
    exact.zero_grad()
    exact(x.double()).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), exact.parameters()):
        assert compare(each[name].mean(0), p.grad, q.grad).passed, name
    out, tangent = torch.func.jvp(model, (x,), (x,))
    expected = torch.func.jvp(plain, (x,), (x,))
    assert torch.equal(out, expected[0]) and torch.equal(tangent, expected[1])
    assert not torch.equal(model(x), plain(x))  # outside, products are of 8-bit numbers


def test_torch_func_with_norms_gated_mlps_and_experts():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    config = tnn.DecoderConfig(**sizes, num_experts=4, expert_size=48, dense_layers=1)
    plain = tnn.Decoder(config).to(DEVICE)
    model = convert_model_to_fp8(plain, FP8Config(**SMALL), inplace=False)
    assert {row.cls for row in model.fp8_report.replaced} >= {"RMSNorm", "GatedMLP", "Experts"}
    ids = torch.arange(32, device=DEVICE).view(2, 16)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (ids, ids)))(weights)
    expected = torch.func.grad(lambda w: torch.func.functional_call(plain, w, (ids, ids)))(weights)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_layers_that_are_parametrized_after_conversion(norm):
    """They are copied, and taken back once the parametrization is removed, which the error says."""
    model = _converted()
    norm(model[0])
    assert torch.equal(copy.deepcopy(model).eval()(_x()), model.eval()(_x()))
    with pytest.raises(ValueError, match="0 was parametrized after it was converted; call .*remove_parametrizations"):
        revert_model_from_fp8(model)
    assert model.fp8_report and type(model[2]) is FP8LinearLayer
    remove_parametrizations(model[0], "weight")
    revert_model_from_fp8(model)
    assert type(model[0]) is type(model[2]) is nn.Linear


def test_models_that_are_converted_within_inference_mode_are_trained():
    """What is made in it lets nobody write into it outside."""
    model = _stack()
    engine = FP8TrainingEngine(model, FP8Config(**SMALL))
    with torch.inference_mode():
        engine.setup_fp8_training()
        model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        engine.training_step(_x().bfloat16(), _x().bfloat16())
        assert engine.optimizer_step(optimizer)
    assert model[0].input_scaling.warm


def test_layers_are_called_by_the_name_that_linear_layers_have_for_their_input():
    model = _converted()
    assert torch.equal(model[0](input=_x()), model[0](_x()))


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
def test_hooks_on_the_layers_of_a_gated_mlp_are_called(layer):
    """Weight norm of the old kind, pruning and sharding of one layer compute its weight in such a hook."""
    torch.manual_seed(0)
    model = convert_model_to_fp8(tnn.GatedMLP(64, 96).to(DEVICE), FP8Config(**SMALL))
    seen = []
    handle = getattr(model, layer).register_forward_pre_hook(lambda module, args: seen.append(module))
    model(_x()).sum().backward()
    assert seen == [getattr(model, layer)]
    handle.remove()
    model(_x())
    assert len(seen) == 1 and model._modules["_fp8"].serves(_x(), *model._modules["_fp8"].layers)


def test_parameters_are_swapped_where_pytorch_is_told_to():
    """It swaps none that somebody refers to weakly."""
    torch.manual_seed(0)
    model = convert_model_to_fp8(nn.Sequential(tnn.GatedMLP(64, 96), nn.Linear(64, 64)).to(DEVICE), FP8Config(**SMALL))
    weights = list(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
        model.load_state_dict({name: 2 * t for name, t in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p is q and p.dtype is torch.bfloat16 for p, q in zip(model.parameters(), weights))
    plain = revert_model_from_fp8(copy.deepcopy(model))
    x = _x().bfloat16()
    assert (model(x) - plain(x)).norm() < 0.1 * plain(x).norm()  # the casts are those of the weights


@pytest.mark.parametrize("device", ["gpu9", 3.5])
def test_a_trainers_device_that_there_is_not(device):
    with pytest.raises(ValueError, match="create_fp8_trainer: device must be a torch.device or its name"):
        create_fp8_trainer(_stack(), device=device)


# steps of the engine --------------------------------------------------------------------------------------------------


def _engine(**more):
    engine = FP8TrainingEngine(_stack(), FP8Config(**SMALL, **more))
    engine.setup_fp8_training()
    return engine


@pytest.mark.parametrize("spoilt", [True, False])
def test_gradients_of_two_optimizers_are_divided_by_what_their_loss_was_multiplied_by(spoilt):
    """The first one's step may change the factor."""
    engine = _engine(loss_scale=1024.0, loss_scale_growth_interval=1)
    first, last = engine.model[0], engine.model[2]
    optimizers = [torch.optim.SGD(layer.parameters(), 1.0) for layer in (first, last)]
    if not spoilt:
        engine.training_step(_x() * float("nan"), _x())  # a skipped step, after which the factor may grow
        engine.optimizer_step(torch.optim.SGD(engine.model.parameters(), 1.0))
    scale = engine.loss_scale
    engine.training_step(_x(), _x())
    expected = last.weight.detach() - last.weight.grad / scale
    if spoilt:
        first.weight.grad[0, 0] = float("inf")
    assert engine.optimizer_step(optimizers[0]) is not spoilt
    assert engine.loss_scale != scale
    assert engine.optimizer_step(optimizers[1])
    assert torch.equal(last.weight.detach(), expected)


def test_an_input_of_another_width_is_refused_as_by_linear_layers_and_leaves_the_scales():
    layer = FP8LinearLayer(64, 32, device=DEVICE, config=FP8Config(min_tokens=1))
    x = torch.randn(64, 32, device=DEVICE)
    with pytest.raises(RuntimeError) as told:
        layer(x)
    with pytest.raises(RuntimeError) as plain:
        nn.functional.linear(x, layer.weight, layer.bias)
    assert str(told.value) == str(plain.value)
    assert layer.input_scaling.amax.item() == 0


def test_gradients_that_overflow_when_they_are_divided_are_not_stepped_with():
    """A factor below 1 makes gradients larger when it is taken out again, beyond float16's range."""
    model = nn.Linear(64, 64, bias=False, device=DEVICE, dtype=torch.float16)
    engine = FP8TrainingEngine(model, FP8Config(min_features=1, min_tokens=1, loss_scale=0.125))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    engine.setup_fp8_training()
    before = model.weight.detach().clone()
    x = torch.ones(32, 64, device=DEVICE, dtype=torch.float16)
    engine.training_step(x, x, lambda out, _: (out.float() * 4096).sum())
    assert model.weight.grad.isfinite().all()
    assert not engine.optimizer_step(optimizer)
    assert torch.equal(model.weight, before)


def test_gradients_of_the_callers_own_backward_are_not_divided():
    engine = _engine()
    optimizer = torch.optim.SGD(engine.model.parameters(), 1.0)
    nn.functional.mse_loss(engine.model(_x() * float("inf")), _x()).backward()
    assert not engine.optimizer_step(optimizer) and engine.loss_scale == 0.5
    nn.functional.mse_loss(engine.model(_x()), _x()).backward()
    weight = engine.model[2].weight
    expected = weight.detach() - weight.grad
    assert engine.optimizer_step(optimizer)
    assert torch.equal(weight.detach(), expected)


def test_an_optimizer_that_is_given_up_between_unscale_and_step_does_not_block_the_engine():
    """As after an exception in what clips."""
    engine = _engine(loss_scale=64.0)
    engine.training_step(_x(), _x())
    optimizer = torch.optim.SGD(engine.model.parameters(), 1e-2)
    engine.unscale(optimizer)
    with pytest.raises(RuntimeError, match="the gradients were divided by unscale"):
        engine.training_step(_x(), _x())
    del optimizer
    gc.collect()
    engine.model.zero_grad()
    engine.training_step(_x(), _x())
    assert engine.optimizer_step(torch.optim.SGD(engine.model.parameters(), 1e-2))


@pytest.mark.parametrize("spoilt", [True, False])
def test_sparse_gradients(spoilt):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64, sparse=True), nn.Linear(64, 64)).to(DEVICE)
    engine = FP8TrainingEngine(model, FP8Config(**SMALL, loss_scale=4.0))
    engine.setup_fp8_training()
    ids = torch.arange(32, device=DEVICE)
    engine.training_step(ids, _x())
    expected = model[0].weight.detach() - model[0].weight.grad.to_dense() / 4.0
    if spoilt:
        model[0].weight.grad._values()[0, 0] = float("nan")
    assert engine.optimizer_step(torch.optim.SGD(model.parameters(), 1.0)) is not spoilt
    assert spoilt or torch.equal(model[0].weight.detach(), expected)


def test_inputs_of_any_mapping_are_passed_by_keyword():
    """Tokenizers return a UserDict."""
    engine = _engine()
    found = engine.training_step(collections.UserDict(input=_x()), _x())
    assert torch.equal(found, engine.training_step({"input": _x()}, _x()))


@pytest.mark.parametrize(
    ("given", "problem", "message"),
    [
        ({"targets": [0]}, TypeError, "targets must be a tensor, got list; pass a loss_fn"),
        ({"targets": torch.ones(32, 64, dtype=torch.bool)}, TypeError, "targets are torch.bool; integers and floats"),
        ({"targets": torch.zeros(31, dtype=torch.long)}, ValueError, r"targets are \[31\], the output \[32, 64\]"),
        ({"targets": torch.zeros(32, 64, 2)}, ValueError, r"targets are \[32, 64, 2\], the output \[32, 64\]"),
        ({"targets": torch.zeros(32, 64), "loss_fn": 3}, TypeError, "loss_fn must be callable.* got int"),
        ({"targets": torch.zeros(32, 64), "loss_fn": torch.sub}, ValueError, r"loss_fn returned .*shape \[32, 64\]"),
        ({"targets": torch.zeros(32, 64), "loss_fn": lambda y, t: 3.0}, ValueError, "loss_fn returned float"),
        ({"loss_fn": nn.functional.mse_loss}, ValueError, "loss_fn needs targets"),
    ],
)
def test_targets_that_no_loss_can_be_made_of(given, problem, message):
    engine = _engine()
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    with pytest.raises(problem, match=message):
        engine.training_step(_x(), **given)
    assert all(p.grad is None for p in engine.model.parameters())
    engine.training_step(_x(), _x())
