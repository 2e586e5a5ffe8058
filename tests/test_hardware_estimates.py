"""Estimates of memory: models whose modules stand in two places, optimizers, arguments that contradict each other."""

import copy

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import build
from tilesmith import nn as tnn
from tilesmith.engine.timing import peak_memory
from tilesmith.hardware import HardwareAbstractionLayer
from tilesmith.models.sizing import moments, probes
from tilesmith.models.sizing.memory_estimate import LiveBytes, traced_peak
from tilesmith.models.sizing.probes import probe
from tilesmith.models.sizing.sample_inputs import sample_of
from tilesmith.precision import FP8Config, convert_model_to_fp8

CPU = torch.device("cpu")


def _layer():
    return HardwareAbstractionLayer([CPU])


def _shared():
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, nn.BatchNorm1d(16), nn.ReLU(), layer)


def _scales():
    """Gate and up of a gated MLP share the scales of their input and of their gradient."""
    model = tilesmith.optimize(build("llama", attention="sdpa"))
    return convert_model_to_fp8(model, FP8Config(min_features=16, min_tokens=1))


@pytest.mark.parametrize("make", [_shared, _scales])
@pytest.mark.parametrize("call", ["estimate", "batch"])
def test_modules_that_stand_in_two_places_keep_their_tensors(make, call):
    torch.manual_seed(0)
    model = make().train()
    tensors = [id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    if call == "estimate":
        _layer().memory_estimate(model, 4)
    else:
        _layer().get_optimal_batch_size(model, max_batch_size=4)
    assert [id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())] == tensors
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        sample_of(model).step(model, 2)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_fake_tensors_alone_meet_what_is_measured(name):
    """Both hold the same of a step: no outputs but the loss, during the backward."""
    torch.manual_seed(0)
    model = build(name, attention="sdpa").train()
    given = sample_of(model, tokens=32)
    measured = probe(model, given, 4, backward=True, device=CPU).peak
    assert traced_peak(model, given, 4, backward=True, device=CPU) == pytest.approx(measured, rel=0.07)


def _wide(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)]
)
def test_an_optimizers_step_needs_memory_on_a_cpu_too(make, dtype):
    """Here few rows leave more to the optimizer's step than to the backward."""
    model = _wide(dtype)
    estimate = _layer().memory_estimate(model, 2, optimizer=make)
    trained = copy.deepcopy(model)
    optimizer = make(trained.parameters())
    sample_of(trained).step(trained, 2)
    optimizer.step()
    state = sum(x.nbytes for one in optimizer.state.values() for x in one.values() if isinstance(x, torch.Tensor))
    assert estimate.optimizer_state == pytest.approx(state, rel=0.01)
    measured = peak_memory(optimizer.step, CPU)
    assert estimate.optimizer_step == pytest.approx(measured, rel=0.05, abs=64 * len(optimizer.state))


@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_of_some_parameters_keeps_nothing_of_others(stepped):
    model = _wide()
    optimizer = torch.optim.AdamW(model[2].parameters())
    if stepped:
        sample_of(model).step(model, 2)
        optimizer.step()
    expected = 2 * sum(p.nbytes for p in model[2].parameters())
    found = _layer().memory_estimate(model, 2, optimizer=optimizer).optimizer_state
    assert found == pytest.approx(expected, abs=8 * len(list(model[2].parameters())))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_do_not_step_alone_are_named(make):
    with pytest.raises(ValueError, match=f"a step of {make.__name__} on a small parameter raises.*optimizer=None"):
        _layer().memory_estimate(_wide(), 2, optimizer=make)


@pytest.mark.parametrize("call", ["memory_estimate", "estimate_memory_usage", "get_optimal_batch_size"])
def test_a_length_beside_a_sample_is_refused(call):
    model = tnn.Decoder(
        tnn.DecoderConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    given = (model,) if call == "get_optimal_batch_size" else (model, 2)
    with pytest.raises(ValueError, match="sequence_length cannot be combined with sample="):
        getattr(_layer(), call)(*given, sample=(ids, ids), sequence_length=4)


def test_a_name_of_no_device():
    with pytest.raises(ValueError, match="'gpu9' names no device"):
        HardwareAbstractionLayer(["gpu9"])


class _Caches(nn.Module):
    """Keeps a buffer that its first forward makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.ones(16), persistent=False)
        return (self.layer(x) + self.shift).square().mean()


def test_batches_of_a_model_with_buffers_that_inference_mode_made():
    """They have no version and cannot be written outside of it."""
    model, x = _Caches(), torch.randn(2, 16)
    with torch.inference_mode():
        model(x)
    assert model.shift.is_inference()
    assert 1 <= _layer().get_optimal_batch_size(model, sample=x, max_batch_size=4) <= 4
    assert model.shift.is_inference() and torch.equal(model.shift, torch.ones(16))


class _Allocator(LiveBytes):
    """A device's allocator, of which operators take scratch memory as on CUDA: a sum over rows, the gradient of a bias,
    for the partial sums of its blocks, as much for few rows as for many; a product copies an expanded operand."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        scratch = 0
        if func is torch.ops.aten.sum.dim_IntList:
            scratch = 17 * 16 * out.nbytes
        elif func is torch.ops.aten.mm.default:
            scratch = max((x.nbytes for x in args if 0 in x.stride()), default=0)
        self.peak = max(self.peak, self.now + scratch)
        return out

    def memory_allocated(self, device):
        return self.now

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.peak = self.now

    def of(self, fn):
        """The most bytes that were held during one call above what was held before it."""
        self.reset_peak_memory_stats(CPU)
        before = self.now
        fn()
        return self.peak - before


def test_scratch_memory_that_does_not_grow_with_the_rows_is_not_scaled_with_them(monkeypatch):
    """An MLP's step has its peak at another operator with few rows than with many."""
    model = _wide()
    rows = sample_of(model)
    with _Allocator() as allocator:
        allocator.ignore(model.parameters())
        monkeypatch.setattr(probes, "peak_memory", lambda fn, device: allocator.of(fn))
        monkeypatch.setattr(moments, "EVENTS", ("cpu",))
        monkeypatch.setattr(moments.torch, "get_device_module", lambda device: allocator)
        estimates = {batch: _layer().memory_estimate(model, batch) for batch in (64, 65, 256)}
        for batch, estimate in estimates.items():
            assert estimate.probes == 1
            for parameter in model.parameters():
                parameter.grad = None
            measured = allocator.of(lambda b=batch: rows.step(model, b))
            assert estimate.step == pytest.approx(measured, rel=0.02), batch


def test_moments_of_other_operators_tell_nothing(monkeypatch):
    """A model that takes another way with few rows, or that raises where it is watched, is estimated by its scale."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return self.inner(x) if len(x) >= 8 else self.inner(x) + 1.0

    model = Two()
    given = sample_of(model, torch.randn(1, 16))
    find = lambda b, peak: moments.moments(model, given, b, backward=True, device=CPU, peak=peak)  # noqa: E731
    assert find(16, 10_000) == ()  # a CPU's allocator tells no peak
    with _Allocator() as allocator:
        allocator.ignore(model.parameters())
        monkeypatch.setattr(moments, "EVENTS", ("cpu",))
        monkeypatch.setattr(moments.torch, "get_device_module", lambda device: allocator)
        peak = {b: allocator.of(lambda b=b: given.step(model, b)) for b in (8, 16)}
        for parameter in model.parameters():
            parameter.grad = None
        assert find(8, peak[8]) == () and find(1, 1000) == () and find(16, 2 * peak[16]) == ()
        few, many = find(16, peak[16])
        assert (few.batch, many.batch) == (8, 16) and max(many.levels) == peak[16]
        monkeypatch.setattr(Two, "forward", lambda self, x: 1 / 0)
        assert find(16, peak[16]) == ()
    assert all(p.grad is None for p in model.parameters())
