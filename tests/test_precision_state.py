"""FP8TrainingEngine's state dict: a run that is interrupted goes on bit for bit; what is refused changes nothing."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from devices import DEVICE
from tilesmith import nn as tnn
from tilesmith.precision import FP8Config, FP8TrainingEngine, convert_model_to_fp8
from tilesmith.precision.config import RECIPES
from tilesmith.precision.scaling import Scaling

SMALL = {"min_features": 16, "min_tokens": 1}
DECODER = tnn.DecoderConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2
)
ROUTED = tnn.DecoderConfig(
    vocab_size=64, hidden_size=64, intermediate_size=32, num_layers=1, num_heads=4, num_experts=4
)


def _run(decoder=DECODER, recipe="delayed", seed=0, **more):
    torch.manual_seed(seed)
    model = tnn.Decoder(decoder, dtype=torch.bfloat16).to(DEVICE)
    given = {"loss_scale": 64.0, "loss_scale_growth_interval": 2, "amax_history_length": 4, **more}
    engine = FP8TrainingEngine(model, FP8Config(recipe=recipe, **SMALL, **given))
    engine.setup_fp8_training()
    return engine, torch.optim.AdamW(model.parameters(), 3e-3)


def _train(engine, optimizer, steps, spoilt=None):
    """Losses of steps on batches that differ; the gradients of one of them are made infinite."""
    losses = []
    for step in steps:
        tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        losses.append(engine.training_step((tokens[:, :-1], tokens[:, 1:])).item())
        if step == spoilt:
            next(iter(engine.model.parameters())).grad.fill_(math.inf)
        assert engine.optimizer_step(optimizer) == (step != spoilt)
    return losses


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _saved(engine, optimizer):
    return [_through_a_file(each.state_dict()) for each in (engine.model, optimizer, engine)]


def _same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    ("decoder", "recipe", "fuse"),
    [*((DECODER, recipe, True) for recipe in RECIPES), (DECODER, "delayed", False), (ROUTED, "delayed", True)],
    ids=[*RECIPES, "not fused", "experts"],
)
def test_an_interrupted_run_goes_on_bit_for_bit(decoder, recipe, fuse):
    engine, optimizer = _run(decoder, recipe, fuse=fuse)
    _train(engine, optimizer, range(4), spoilt=2)
    saved = _saved(engine, optimizer)
    expected = _train(engine, optimizer, range(4, 8), spoilt=6)
    resumed, other = _run(decoder, recipe, seed=1, fuse=fuse)
    for each, state in zip((resumed.model, other, resumed), saved):
        each.load_state_dict(state)
    assert _train(resumed, other, range(4, 8), spoilt=6) == expected
    assert _same(dict(resumed.model.state_dict()), dict(engine.model.state_dict()))
    assert resumed.get_training_statistics() == engine.get_training_statistics()
    assert _same(resumed.state_dict(), engine.state_dict())


def test_a_run_needs_the_engines_state():
    """Without it scales are found anew, and the loss scale and the counts begin again."""
    engine, optimizer = _run()
    _train(engine, optimizer, range(5), spoilt=3)
    saved = _saved(engine, optimizer)
    _train(engine, optimizer, range(5, 8))
    resumed, other = _run(seed=1)
    resumed.model.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    _train(resumed, other, range(5, 8))
    assert (resumed.state_dict()["steps"], engine.state_dict()["steps"]) == (3, 7)
    # a history has four places, of which three steps fill three
    assert (_places(resumed), _places(engine)) == ((3,), (4,))


def _places(engine):
    """How many steps the histories that are in use remember, each number once."""
    scalings = engine.state_dict()["scalings"].values()
    return tuple({int(scaling["history"].count_nonzero()) for scaling in scalings if scaling["warm"]})


def test_a_state_is_a_snapshot():
    engine, optimizer = _run()
    _train(engine, optimizer, range(3))
    state = engine.state_dict()
    before = copy.deepcopy(state)
    _train(engine, optimizer, range(3, 5))
    assert _same(state, before)
    engine.load_state_dict(state)
    assert _same(engine.state_dict(), before)
    _train(engine, optimizer, range(3, 5))
    assert _same(state, before)


def test_the_models_own_state_dict_stays_that_of_the_plain_model():
    engine, optimizer = _run()
    _train(engine, optimizer, range(2))
    plain = tnn.Decoder(DECODER, dtype=torch.bfloat16).to(DEVICE)
    plain.load_state_dict(engine.model.state_dict())
    assert not any("_fp8" in name or "scaling" in name for name in engine.model.state_dict())
    engine.model.load_state_dict(plain.state_dict())


def test_a_compiled_models_state_is_that_of_the_model():
    engine, optimizer = _run()
    _train(engine, optimizer, range(2))
    other, _ = _run(seed=1)
    compiled = FP8TrainingEngine(torch.compile(other.model, backend="eager"), other.config)
    compiled.setup_fp8_training()
    compiled.load_state_dict(engine.state_dict())
    assert _same(other.state_dict()["scalings"], engine.state_dict()["scalings"])
    assert _same(compiled.state_dict(), engine.state_dict())


def test_a_state_of_tensors_without_data():
    """Tools that measure memory load checkpoints of FakeTensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        engine = FP8TrainingEngine(nn.Sequential(nn.Linear(64, 64)), FP8Config(**SMALL))
        engine.setup_fp8_training()
        engine.load_state_dict(engine.state_dict())


def _without(state, *path):
    *way, last = path
    for key in way:
        state = state[key]
    del state[last]


def _set(*path, value):
    def change(state):
        *way, last = path
        for key in way:
            state = state[key]
        state[last] = value

    return change


NAME = "layers.0.self_attn.q_proj.input_scaling"
HISTORY = torch.zeros(4, device=DEVICE)
BAD = {
    "no counts": (lambda state: _without(state, "steps"), "keys"),
    "more": (_set("scale", value=2.0), "'scale'"),
    "loss_scale": (_set("loss_scale", value=math.nan), "loss_scale must be a positive"),
    "int scale": (_set("loss_scale", value=True), "loss_scale must be a positive"),
    "steps": (_set("steps", value=-1), "steps must be an int"),
    "good": (_set("good_steps", value=1.5), "good_steps must be an int"),
    "list": (_set("scalings", value=[]), "scalings must be a dictionary"),
    "missing": (lambda state: _without(state, "scalings", NAME), f"lacks '{NAME}'"),
    "foreign": (_set("scalings", "head.input_scaling", value={}), "has besides 'head.input_scaling'"),
    "empty": (_set("scalings", NAME, value={}), "must have format, warm, amax"),
    "format": (_set("scalings", NAME, "format", value="e5m2"), "format 'e5m2'.*FP8Config"),
    "warm": (_set("scalings", NAME, "warm", value=1), "warm.*must be a bool"),
    "history": (_set("scalings", NAME, "history", value=torch.zeros(16)), "amax_history_length"),
    "dtype": (_set("scalings", NAME, "history", value=HISTORY.double()), "float64"),
    "meta": (_set("scalings", NAME, "history", value=HISTORY.to("meta")), "meta"),
    "no tensor": (_set("scalings", NAME, "bound", value=1.0), "must be a tensor, got float"),
    "nan": (_set("scalings", NAME, "bound", value=torch.full((1,), math.nan)), "finite and at least 0"),
    "negative": (_set("scalings", NAME, "overflows", value=torch.full((1,), -1.0)), "finite and at least 0"),
}


@pytest.fixture(scope="module")
def trained():
    engine, optimizer = _run()
    _train(engine, optimizer, range(3), spoilt=2)
    return engine, optimizer


@pytest.mark.parametrize("bad", BAD)
def test_what_a_state_must_be(bad, trained):
    engine, _ = trained
    before, state = engine.state_dict(), engine.state_dict()
    # what a check that came too late would let through
    state |= {"loss_scale": 2.0, "steps": 99}
    for each in state["scalings"].values():
        each["bound"].fill_(7.0)
    change, said = BAD[bad]
    change(state)
    with pytest.raises(ValueError, match=f"load_state_dict: .*{said}"):
        engine.load_state_dict(state)
    assert _same(engine.state_dict(), before)


def test_dictionaries_of_others(trained):
    engine, optimizer = trained
    before = engine.state_dict()
    scaler = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 0}
    deeper, _ = _run(tnn.DecoderConfig(**{**vars(DECODER), "num_layers": 3}))
    for foreign in (scaler, {}, engine.model.state_dict(), optimizer.state_dict(), deeper.state_dict()):
        with pytest.raises(ValueError, match="load_state_dict"):
            engine.load_state_dict(foreign)
        assert _same(engine.state_dict(), before)
    with pytest.raises(TypeError, match="dictionary, got list"):
        engine.load_state_dict([])


def test_when_there_is_no_state():
    engine = FP8TrainingEngine(nn.Sequential(nn.Linear(64, 64)), FP8Config(**SMALL))
    for call in (engine.state_dict, lambda: engine.load_state_dict({})):
        with pytest.raises(RuntimeError, match="setup_fp8_training"):
            call()
    engine, optimizer = _run()
    state = engine.state_dict()
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    engine.training_step((tokens, tokens))
    engine.unscale(optimizer)
    for call in (engine.state_dict, lambda: engine.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="call optimizer_step first"):
            call()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_is_taken_into_the_histories_once(wrapped):
    """A converted model that an engine holds within another module is followed as both."""
    torch.manual_seed(0)
    model = convert_model_to_fp8(nn.Sequential(nn.Linear(64, 64)).to(DEVICE), FP8Config(**SMALL))
    engine = FP8TrainingEngine(nn.Sequential(model) if wrapped else model)
    engine.setup_fp8_training()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    x = torch.randn(32, 64).to(DEVICE)
    for _ in range(3):
        engine.training_step(x, x)
        assert engine.optimizer_step(optimizer)
    for scaling in (m for m in model.modules() if isinstance(m, Scaling)):
        assert (scaling.history > 0).sum() == 3 and scaling.history[:3].all()
