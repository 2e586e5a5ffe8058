"""When FP8 layers and experts cast their weights: what is kept between calls, and what is noticed."""

import copy
import io
from collections import Counter

import pytest
import torch
from torch import nn

from devices import DEVICE
from tilesmith import nn as tnn
from tilesmith.precision import FP8Config, FP8LinearLayer, convert_model_to_fp8, refresh_fp8
from tilesmith.precision.experts import FP8Experts
from tilesmith.precision.fused import FP8GatedMLP, FP8Norm
from tilesmith.precision.scaling import Scaling

SMALL = {"min_features": 16, "min_tokens": 1}
KEPT = FP8Config(**SMALL, cache_weights_in_eval=True)
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 4}


@pytest.fixture
def casts(monkeypatch):
    """Casts of weights so far, by the kind of module."""
    counted = Counter()

    def counting(kind):
        genuine = kind.cast

        def cast(self, *weights):
            counted[kind.__name__] += 1
            return genuine(self, *weights)

        monkeypatch.setattr(kind, "cast", cast)

    for kind in (FP8LinearLayer, FP8GatedMLP, FP8Experts):
        counting(kind)
    return counted


class _Layers(nn.Module):
    """A norm, a gated MLP, a plain layer and experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp, self.last = tnn.RMSNorm(64), tnn.GatedMLP(64, 96), nn.Linear(64, 64)
        self.experts = tnn.Experts(64, 48, 2)
        for p in self.experts.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    def forward(self, x):
        indices = torch.arange(len(x), device=x.device)[:, None] % 2
        return self.last(self.mlp(self.norm(x))) + self.experts(x, indices, torch.ones_like(x[:, :1]))


def _model(config=KEPT, mode="eval"):
    model = convert_model_to_fp8(_Layers().to(DEVICE), config)
    return model.eval() if mode == "eval" else model


def _x():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)


EACH = {"FP8LinearLayer": 4, "FP8Experts": 1}  # casts of a forward in eval mode: gate, up, down, last; both weights


def _run(model):
    with torch.no_grad():
        return model(_x())


def test_without_the_option_each_call_in_eval_mode_casts(casts):
    model = _model(FP8Config(**SMALL))
    casts.clear()
    expected = _run(model)
    assert casts == EACH
    casts.clear()
    kept = _model()
    assert torch.equal(_run(kept), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_casts_are_kept_in_eval_mode(casts, mode):
    model = _model()
    casts.clear()
    with mode():
        first = model(_x())
        assert torch.equal(model(_x()), first)
    assert not casts  # `eval` made them
    _run(model).sum()
    model.train()
    model(_x()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_casts_that_inference_mode_made_serve_a_backward(casts):
    model = _written(_model())
    with torch.inference_mode():
        model(_x())
    casts.clear()
    model(_x()).sum().backward()
    assert not casts and all(p.grad is not None for p in model.parameters())


def _written(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.5)
    return model


def _written_in_inference_mode(model):
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(-1.5)
    return model


def _written_through_data(model):
    for p in model.parameters():
        p.data.mul_(-1.5)
    refresh_fp8(model)
    return model


def _switched(model):
    """Averages of weights are swapped in before the mode is switched."""
    model.train()
    for p in model.parameters():
        p.data.mul_(-1.5)
    return model.eval()


def _stepped(model):
    """In eval mode, as with dropout off."""
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for p in model.parameters():
        p.grad = 2.5 * p.detach()
    optimizer.step()
    optimizer.zero_grad()
    return model


def _loaded(model, **how):
    state = {name: -1.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, **how)
    return model


def _replaced(model):
    """The parameters are other tensors."""
    for module in list(model.modules()):
        for name, p in list(module._parameters.items()):
            if p is not None:
                setattr(module, name, nn.Parameter(-1.5 * p.detach()))
    return model


def _copied(model):
    model = copy.deepcopy(model)
    return _written(model)


def _pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return _written(torch.load(file, weights_only=False))


CHANGES = {
    "write": _written,
    "write in inference mode": _written_in_inference_mode,
    "write through data": _written_through_data,
    "switch": _switched,
    "step": _stepped,
    "load_state_dict": _loaded,
    "load_state_dict, assign": lambda model: _loaded(model, assign=True),
    "other parameters": _replaced,
    "deepcopy": _copied,
    "pickle": _pickled,
    "to bf16 and back": lambda model: _written(model.bfloat16().float()),
    "data set": lambda model: _set_data(model),
}
STAY_UNKEPT = {"other parameters": 5, "deepcopy": 1, "pickle": 1}  # casts of each call until the next refresh


def _set_data(model):
    for p in model.parameters():
        p.data = -1.5 * p.data
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed_and_cast_once(casts, change):
    model = _model()
    before = _run(model)
    model = CHANGES[change](model)
    found = _run(model)
    plain = _Layers().to(DEVICE)
    plain.load_state_dict(model.state_dict())
    expected = _run(convert_model_to_fp8(plain, FP8Config(**SMALL)).eval())
    assert torch.equal(found, expected) and not torch.equal(found, before)
    casts.clear()
    assert torch.equal(_run(model), expected)
    assert casts.total() == STAY_UNKEPT.get(change, 0), casts
    refresh_fp8(model)
    casts.clear()
    assert torch.equal(_run(model), expected) and not casts


def test_weights_swapped_for_eval_mode_are_not_trained_with(casts):
    """Averages of weights are swapped in through `.data` in eval mode, and back after `train()`."""
    model = _model(mode="train")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model(_x()).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    model.eval()
    for p in model.parameters():
        p.data.neg_()
    refresh_fp8(model)
    _run(model)
    model.train()
    for p in model.parameters():
        p.data.neg_()
    refresh_fp8(twin)
    assert torch.equal(model(_x()), twin(_x()))


def test_training_casts_once_a_step_with_the_option_too(casts):
    model = _model(mode="train")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    casts.clear()
    for _ in range(2):
        model(_x()).sum().backward()
        assert not casts
    optimizer.step()
    assert casts == {"FP8LinearLayer": 2, "FP8GatedMLP": 1, "FP8Experts": 1}  # down and last; gate with up


def test_a_model_may_be_converted_between_two_steps(casts):
    """As after a warm-up in bf16: the optimizer keeps its parameters and their state, and its steps cast them anew."""
    model = _Layers().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        model(_x()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    had = {name: (p, optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    convert_model_to_fp8(model, KEPT)
    casts.clear()
    step()
    assert casts == {"FP8LinearLayer": 2, "FP8GatedMLP": 1, "FP8Experts": 1}
    for name, p in model.named_parameters():
        assert p is had[name][0] and optimizer.state[p]["exp_avg"] is had[name][1] and optimizer.state[p]["step"] == 2


def test_compiled_calls_take_the_casts_that_are_kept(casts):
    model = _model()
    expected = _run(model)
    casts.clear()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(_x()), expected)
        model.load_state_dict({name: -value for name, value in model.state_dict().items()})
        expected = _run(model)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(_x()), expected)
    assert casts == EACH  # of load_state_dict


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_loading_is_noticed_by_compiled_models(mode):
    """A graph compares no versions: gate and up, and experts, are cast anew by `load_state_dict` itself."""
    model = _model(mode=mode)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(_x())
        state = {name: -1.5 * value for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        torch.testing.assert_close(compiled(_x()), model(_x()))


@pytest.mark.parametrize("config", [KEPT, FP8Config(**SMALL)], ids=["kept", "not kept"])
def test_a_model_that_is_converted_in_eval_mode_is_in_eval_mode(config):
    model = convert_model_to_fp8(_Layers().to(DEVICE).eval(), config)
    assert any(isinstance(m, FP8Norm) for m in model.modules())
    assert not any(m.training for m in model.modules() if not isinstance(m, Scaling))  # which has no mode
    assert torch.equal(_run(model), _run(_model(config)))
    assert not any(m.amax.any() for m in model.mlp._modules["_fp8"].modules() if isinstance(m, Scaling))
    if not config.cache_weights_in_eval:
        before = _run(model)
        for p in model.parameters():
            p.data.mul_(2)
        assert not torch.equal(_run(model), before)


def test_weights_made_in_inference_mode_have_no_version_and_are_cast_at_each_use(casts):
    expected = _run(_model())
    with torch.inference_mode():
        model = convert_model_to_fp8(_Layers().to(DEVICE).eval(), KEPT)
        casts.clear()
        assert torch.equal(model(_x()), expected)
    assert casts == EACH


@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo gathers on a CPU")
@pytest.mark.parametrize("reshard", [True, False])
def test_weights_that_fsdp_gathers_are_cast_at_each_use(one_rank, casts, reshard):
    """It gathers other values into the same tensor, and counts no write."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, model = _model(FP8Config(**SMALL)), _model()
    mesh = init_device_mesh("cpu", (1,))
    for part in (model.mlp, model.experts, model.last, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    for _ in range(3):
        casts.clear()
        assert torch.equal(_run(model), _run(plain))
        assert casts == {name: 2 * count for name, count in EACH.items()}  # of either model
        model.reshard()
        for part in (model.mlp, model.experts, model.last):
            part.reshard()
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters()):
                p.to_local().data.mul_(-1.5)
                q.data.mul_(-1.5)


def test_what_the_option_takes():
    with pytest.raises(TypeError, match="cache_weights_in_eval"):
        FP8Config(cache_weights_in_eval=1)
    never = _model(FP8Config(**SMALL, cache_weights=False, cache_weights_in_eval=True))
    assert not any(getattr(m, "cached", None) for m in never.modules())
