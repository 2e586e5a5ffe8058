"""FP8 training of transformers models, before and after `optimize`."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from optimize_models import batch, build
from tilesmith import optimize, undo
from tilesmith.engine import use
from tilesmith.precision import (
    FP8Config,
    FP8LinearLayer,
    FP8TrainingEngine,
    convert_model_to_fp8,
    revert_model_from_fp8,
)
from tilesmith.precision.scaling import Scaling, roll

CONFIG = FP8Config(min_features=16, min_tokens=1)


@pytest.mark.parametrize("first", ["optimize", "convert"])
def test_with_optimize(first):
    model = build("llama")
    inputs = batch("llama")
    plain = copy.deepcopy(model)(**inputs).loss
    if first == "optimize":
        convert_model_to_fp8(optimize(model), CONFIG)
    else:
        optimize(convert_model_to_fp8(model, CONFIG))
    for _ in range(2):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        roll(model)
    assert abs(loss - plain) < 0.05 * plain
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, FP8LinearLayer)]
    assert layers and any(m.warm for m in model.modules() if isinstance(m, Scaling))
    fused = any(name.endswith("mlp._fp8") for name, _ in model.named_modules())
    assert fused == (first == "optimize")
    keys = set(model.state_dict())
    revert_model_from_fp8(model)
    assert set(model.state_dict()) == keys == set(build("llama").state_dict())
    undo(model)
    torch.testing.assert_close(model(**inputs).loss, plain)


def test_what_is_left_alone_is_logged(caplog):
    """Layers with their reason, and, once, calls of too few rows."""
    model = optimize(build("llama"))
    inputs = batch("llama")
    rows = inputs["input_ids"].numel()
    with caplog.at_level("INFO", logger="tilesmith.precision"):
        convert_model_to_fp8(model, FP8Config(min_features=16, min_tokens=rows + 1))
        kinds = [row.action for row in model.fp8_report.rows if row.rule == "fp8" and row.cls.endswith("Linear")]
        for _ in range(2):
            model.train()(**inputs)
        model.eval()(**inputs)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"fp8 (delayed): {kinds.count('replaced')} layers converted, 1 left alone",
        "fp8: lm_head left alone: it is an output projection, whose errors reach the loss undamped",
        f"fp8: calls of {rows} rows are computed as without it; min_tokens is {rows + 1}",
    ]


def _trained(model, inputs, prepare, backward, steps=3):
    """Losses of steps, the parameters after them, and how many steps the scales have seen."""
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seen = [int(m.history.count_nonzero()) for m in model.modules() if isinstance(m, Scaling) and m.warm]
    return losses, list(model.parameters()), seen


@pytest.fixture
def accelerate():
    """With no state of a trainer before, nor for those behind."""
    found = pytest.importorskip("accelerate")
    states = found.state.AcceleratorState, found.state.GradientState, found.state.PartialState
    for state in states:
        state._reset_state()
    yield found
    for state in states:
        state._reset_state()


@pytest.mark.parametrize("steps", ["loop", "engine"])
def test_accelerate_trains_a_converted_model(steps, accelerate):
    """What `prepare` returns trains as the model does without it: its optimizer's steps renew casts and scales."""
    inputs = batch("llama")
    model = convert_model_to_fp8(optimize(build("llama")), CONFIG)
    alone = _trained(copy.deepcopy(model), inputs, lambda *both: both, torch.Tensor.backward)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    if steps == "loop":
        found = _trained(model, inputs, accelerator.prepare, accelerator.backward)
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        losses = []
        with FP8TrainingEngine(model) as engine:
            for _ in range(3):
                losses.append(engine.training_step(inputs).item())
                assert engine.optimizer_step(optimizer)
        found = losses, list(model.parameters()), alone[2]
        assert engine.get_training_statistics()["scales"]
    assert found[0] == alone[0] and found[0][-1] < found[0][0]
    assert all(map(torch.equal, found[1], alone[1]))
    assert found[2] == alone[2] and set(alone[2]) == {3}
    assert accelerator.get_state_dict(model).keys() == build("llama").state_dict().keys()


def _swapped(model):
    return {(row.fqn, row.rule) for row in model.tilesmith_report.replaced}


def test_optimize_knows_the_norms_and_mlps_that_cast():
    model, inputs = optimize(build("llama")), batch("llama")
    known = _swapped(model)
    convert_model_to_fp8(model, CONFIG)
    assert any(name.endswith("layernorm._fp8") for name, _ in model.named_modules())
    assert _swapped(optimize(model)) == known
    assert _swapped(optimize(undo(model))) == known
    revert_model_from_fp8(model)
    with use(rms_norm="reference", add_rms_norm="reference", swiglu="reference"):
        model(**inputs)
    assert model.tilesmith_report.calls() == {
        **model.tilesmith_report.calls(), "rms_norm": 3, "add_rms_norm": 2, "swiglu": 2,
    }  # fmt: skip
