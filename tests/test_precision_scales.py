"""FP8 scales of earlier steps: what raises a bound, what is forgotten, what is counted."""

import copy
import math

import pytest
import torch
from torch import nn

from devices import DEVICE
from tilesmith.precision import FP8Config, FP8TrainingEngine, convert_model_to_fp8, revert_model_from_fp8
from tilesmith.precision.scaling import Scaling, roll


def _randn(*shape):
    """The same numbers on any device."""
    return torch.randn(shape).to(DEVICE)


def _deep(recipe, depth=4, **more):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.GELU()))).to(DEVICE)
    return FP8TrainingEngine(model, FP8Config(recipe=recipe, min_features=16, min_tokens=1, **more)), torch.optim.SGD(
        model.parameters(), 1e-3
    )


def _bounds(model):
    return [module.bound.item() for module in model.modules() if isinstance(module, Scaling)]


def _zeros(trainer, optimizer, x):
    """The share of zeros in the first layer's gradient of a step."""
    trainer.training_step(x, x)
    share = (trainer.model[0].weight.grad == 0).float().mean().item()
    assert trainer.optimizer_step(optimizer)
    return share


@pytest.mark.parametrize("fault", [math.inf, math.nan])
def test_many_spoilt_batches_in_a_row(fault):
    """They say nothing of the next ones' size, and the loss's factor stays a number that can be divided by."""
    x = _randn(32, 64)
    trainer, optimizer = _deep("delayed", loss_scale_growth_interval=1)
    with trainer:
        for _ in range(3):
            _zeros(trainer, optimizer, x)
        before = _bounds(trainer.model)
        spoilt = x.clone()
        spoilt[3, 5] = fault
        for _ in range(200):
            trainer.training_step(spoilt, x)
            assert not trainer.optimizer_step(optimizer)
        assert _bounds(trainer.model) == before
        assert trainer.loss_scale == 2.0**-16
        assert all(_zeros(trainer, optimizer, x) < 0.1 for _ in range(3))


@pytest.mark.parametrize("spike", [1e4, 1e6, 1e8])
def test_a_spike_is_forgotten_once_it_has_passed(spike):
    x = _randn(32, 64)
    trainer, optimizer = _deep("delayed")
    optimizer.param_groups[0]["lr"] = 0.0
    with trainer:
        for _ in range(4):
            _zeros(trainer, optimizer, x)
        spoilt = x.clone()
        spoilt[3, 5] = spike
        _zeros(trainer, optimizer, spoilt)
        shares = [_zeros(trainer, optimizer, x) for _ in range(4)]
        assert all(share < 0.1 for share in shares[1:]), shares
        assert trainer.get_training_statistics()["spikes"] > 0


def _rolled(values, format="e4m3", history=4):
    """A scaling after steps whose largest values these were, beside another that saw something in each, and its bound
    after each."""
    scaling, other = (Scaling(format, history, DEVICE, True) for _ in range(2))
    bounds = []
    for value in values:
        scaling.amax.fill_(value)
        other.amax.fill_(1.0)
        roll(scaling, other)
        bounds.append(scaling.bound.item())
    return scaling, bounds


@pytest.mark.parametrize(
    ("values", "bounds", "spikes"),
    [
        ((1, 2, 3, 1, 1, 1, 1), (1, 2, 3, 3, 3, 3, 1), 0),  # the largest of the last four
        ((1, 1, 999, 1, 1), (1, 1, 999, 1, 1), 1),
        ((1, 1, 999, 0, 0), (1, 1, 999, 1, 1), 1),  # nothing came from layers behind, which forget it as well
        ((1, 1, 999, 900, 999, 1), (1, 1, 999, 999, 999, 999), 0),  # a new level is none
        ((999, 1, 1), (999, 1, 1), 1),
        ((2, 0, 0, 0, 0, 0, 1), (2, 2, 2, 2, 2, 2, 1), 0),  # a layer that was not asked
        ((2, math.nan, math.inf, 1), (2, 2, 2, 2), 0),
        ((1, 1, 999, math.nan, 1), (1, 1, 999, 999, 1), 1),
        ((1, 255, 1, 1), (1, 255, 255, 255), 0),
    ],
)
def test_what_a_bound_is(values, bounds, spikes):
    scaling, found = _rolled(values)
    assert tuple(found) == bounds and scaling.spikes.item() == spikes


def test_the_second_optimizer_of_a_step_leaves_the_histories():
    """They hold as many steps as the config says, however many optimizers there are."""
    trainer, _ = _deep("delayed", depth=2, amax_history_length=4)
    optimizers = [torch.optim.SGD(layer.parameters(), 1e-3) for layer in (trainer.model[0], trainer.model[2])]
    with trainer:
        for scale in (8.0, 1.0, 1.0, 1.0):
            x = _randn(32, 64) * scale
            trainer.training_step(x, x)
            for optimizer in optimizers:
                trainer.optimizer_step(optimizer)
        told = trainer.get_training_statistics()
    assert all(min(history) > 0 for history in told["amax_histories"].values())
    assert told["scales"]["0.input_scaling"] * 448 > 16  # the first step is one of the last four


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_scales_that_are_told_are_those_of_the_casts(recipe):
    """A tensor is divided by its scale: the largest value that is expected lies in the upper half of the format."""
    trainer, optimizer = _deep(recipe, depth=2)
    with trainer:
        assert trainer.get_training_statistics()["scales"] == {}
        for size in (3.0, 1000.0, 1.0):
            trainer.training_step(_randn(32, 64) * size, _randn(32, 64))
            trainer.optimizer_step(optimizer)
        told = trainer.get_training_statistics()
        assert told["scales"].keys() == told["amax_histories"].keys() != set()
        for name, scale in told["scales"].items():
            limit = 448.0 if "input" in name else 57344.0
            assert limit / 2 < max(told["amax_histories"][name]) / scale <= limit
        x = _randn(32, 64)
        known = trainer.model[0].input_scaling.known(recipe == "delayed")
        cast = trainer.model[0].input_cast(x, recipe == "delayed", True)
        assert known is None or cast.factor.item() == told["scales"]["0.input_scaling"]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_finer_recipes_tell_of_no_scales(recipe):
    trainer, optimizer = _deep(recipe, depth=2)
    with trainer:
        trainer.training_step(_randn(32, 64), _randn(32, 64))
        trainer.optimizer_step(optimizer)
        told = trainer.get_training_statistics()
    assert told["scales"] == told["amax_histories"] == {}


def test_a_scale_that_is_never_used_does_not_end_every_step_by_a_wait(monkeypatch):
    used, unused = (Scaling("e4m3", 4, DEVICE, True) for _ in range(2))
    asked = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t, real=torch.Tensor.tolist: (asked.append(step), real(t))[1])
    for step in range(1, 20):
        used.amax.fill_(float(step))
        roll(nn.ModuleList([used, unused]))
    assert asked == [1, 2, 4, 8, 16] and used.warm and not unused.warm
    unused.amax.fill_(3.0)
    for step in range(20, 33):
        roll(nn.ModuleList([used, unused]))
        assert unused.warm == (step == 32)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "blockwise"])
def test_a_step_does_not_wait_for_the_device(recipe):
    trainer, optimizer = _deep(recipe)
    x = _randn(32, 64)

    def step():
        trainer.model(x).square().sum().backward()
        optimizer.step()  # what follows it rolls the scales
        optimizer.zero_grad()

    with trainer:
        for _ in range(4):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_e5m2_has_room_for_more():
    assert _rolled((1, 1, 999, 1), "e5m2")[1][-1] == 999
    assert _rolled((1, 1, 99999, 1), "e5m2")[1][-1] == 1


@pytest.mark.parametrize(("recipe", "overflows"), [("delayed", 2), ("current", 0)])
def test_overflows_are_those_of_scales_that_were_used(recipe, overflows):
    x = _randn(32, 64)
    trainer, optimizer = _deep(recipe, depth=1)
    with trainer:
        for factor in (1, 1, 100, 1):
            trainer.training_step(factor * x, torch.zeros_like(x))
            trainer.optimizer_step(optimizer)
    told = trainer.get_training_statistics()
    assert told["overflows"] == overflows and told["spikes"] == 0


@pytest.mark.parametrize("value", [100.0, math.nan])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_an_evaluation_between_two_steps_leaves_training_as_it_was(recipe, value):
    """Forward and backward in eval mode are no part of the next bounds, and nothing that overflowed."""

    def trained(evaluates):
        trainer, optimizer = _deep(recipe, depth=2)
        with trainer:
            for step in range(4):
                x = _randn(32, 64)
                trainer.training_step(x, x)
                if evaluates and step == 1:
                    probe = torch.full((32, 64), value, device=DEVICE, requires_grad=True)
                    trainer.model.eval()(probe).sum().backward(inputs=[probe])
                    trainer.model.train()
                trainer.optimizer_step(optimizer)
        return trainer.get_training_statistics(), trainer.model.state_dict()

    (plain, weights), (told, after) = trained(False), trained(True)
    assert told == plain
    assert all(torch.equal(weights[name], after[name]) for name in weights)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo broadcasts on a CPU")
@pytest.mark.parametrize("made", ["converted", "compiled", "copied", "engine"])
def test_ranks_keep_their_own_scales(one_rank, made):
    """DDP broadcasts rank 0's buffers in each forward; a bound of 0 would come to ranks that know a better one."""
    config = FP8Config(min_features=16, min_tokens=1)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    if made == "engine":
        model = nn.Sequential(convert_model_to_fp8(model, config))
        FP8TrainingEngine(model).setup_fp8_training()
    else:
        convert_model_to_fp8(model, config)
        model = {"compiled": torch.compile, "copied": copy.deepcopy}.get(made, lambda same: same)(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    scales = {id(buffer) for m in model.modules() if isinstance(m, Scaling) for buffer in m.buffers()}
    synced = {id(buffer) for buffer in wrapped.modules_buffers}
    assert len(scales) == 10 and not scales & synced
    assert len(synced) == 3  # those of BatchNorm


def test_a_reverted_model_has_no_more_to_say_to_ddp():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to(DEVICE)
    model._ddp_params_and_buffers_to_ignore = ["1.running_mean"]
    convert_model_to_fp8(model, FP8Config(min_features=16, min_tokens=1))
    assert "0.input_scaling.bound" in model._ddp_params_and_buffers_to_ignore
    revert_model_from_fp8(model)
    assert model._ddp_params_and_buffers_to_ignore == ["1.running_mean"]
    plain = convert_model_to_fp8(nn.Sequential(nn.Linear(64, 64)).to(DEVICE), FP8Config(min_features=16))
    assert not hasattr(revert_model_from_fp8(plain), "_ddp_params_and_buffers_to_ignore")
