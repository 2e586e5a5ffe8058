"""MemoryMonitor: bytes by module and phase as they are, and what would reduce them."""

from __future__ import annotations

import threading
from concurrent import futures

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _global_forward_hooks as _GLOBAL_HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _GLOBAL_PRE_HOOKS
from torch.utils.checkpoint import checkpoint

import tilesmith
from optimize_models import build
from tilesmith import MemoryConfig
from tilesmith.hardware import MemoryMonitor

IDS = torch.randint(3, 120, (16, 32), generator=torch.Generator().manual_seed(0))


class _Stack(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def _step(model, optimizer=None, config=None, x=None):
    monitor = MemoryMonitor(model, optimizer, config=config)
    with monitor.step() as same:
        assert same is monitor
        model(torch.randn(32, 16) if x is None else x).sum().backward()
        if optimizer is not None:
            optimizer.step()
    return monitor.report


def test_bytes_of_each_kind():
    model = _Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    report = _step(model, optimizer)
    parameters = sum(p.nbytes for p in model.parameters())
    assert report.total("parameters") == report.total("gradients") == parameters
    assert 2 * parameters <= report.total("optimizer_state") <= 2 * parameters + 16 * 2 * 4
    rows = {row.name: row for row in report.modules}
    assert rows["layers.1.0"].activations == 32 * 16 * 4  # its input
    assert rows["layers.1.1"].activations == rows["layers.1.2"].activations == 32 * 64 * 4
    assert set(report.peaks) == {"forward", "backward", "optimizer"} and report.peak == max(report.peaks.values())
    assert report.peaks["forward"] >= parameters + report.total("activations")
    assert "layers.1.0 (Linear)" in str(report) and "Peak" in str(report)
    assert not _GLOBAL_HOOKS and not _GLOBAL_PRE_HOOKS


def test_what_checkpointing_and_offloading_drop_is_not_counted():
    plain, recomputed = _step(_Stack()), _step(_Stack(recompute=True))
    assert recomputed.total("activations") < 0.5 * plain.total("activations")
    (advice,) = [r for r in plain.reductions if r.what.startswith("checkpointing")]
    saved = plain.total("activations") - recomputed.total("activations")
    assert advice.saves == pytest.approx(saved, rel=0.5) and "checkpointing of 4 layers" in str(advice)
    assert not [r for r in recomputed.reductions if r.what.startswith("checkpointing")]


def test_logits_are_advised_away_until_they_are_gone():
    torch.manual_seed(0)
    model = build("llama", attention="sdpa")
    wide = nn.Linear(64, 4096, bias=False)
    model.lm_head, model.config.vocab_size = wide, 4096

    def report(model):
        monitor = MemoryMonitor(model, config=MemoryConfig(max_memory_gb=1, target_memory_gb=0.5))
        with monitor.step():
            model(input_ids=IDS, labels=IDS).loss.backward()
        return monitor.report

    before = report(model)
    assert "loss without logits" in [r.what for r in before.reductions if r.saves > 4096 * 512 * 4 * 0.9]
    assert any("checkpointing_enable()" in r.how for r in before.reductions)
    model.zero_grad()
    (kept,) = [r for r in report(tilesmith.optimize(model)).reductions if r.what == "loss without logits"]
    assert "MemoryConfig" in kept.how  # so few tokens are one chunk, which the backward may as well keep
    model.zero_grad()
    with MemoryConfig(target_memory_gb=6e-3):
        after = report(model)
    assert not [r for r in after.reductions if r.what == "loss without logits"]
    assert after.peak < before.peak and not before.bounds and not after.bounds
    again = report(model)
    assert [r for r in again.reductions if r.what.startswith("gradients that are kept")]


def test_a_model_on_the_cpu_is_not_advised_to_move_there():
    model = _Stack()
    report = _step(model, torch.optim.AdamW(model.parameters()))
    assert report.reductions and not [r for r in report.reductions if "on the CPU" in r.what]
    assert "a smaller optimizer state" in [r.what for r in report.reductions]


def test_bounds_are_honoured():
    with pytest.raises(MemoryError, match=r"(?s)above its bounds.*Above max_memory_gb = 1e-05.*What would reduce it"):
        _step(_Stack(), config=MemoryConfig(max_memory_gb=1e-5))
    between = _step(_Stack(), config=MemoryConfig(max_memory_gb=1, target_memory_gb=1e-5))
    assert between.bounds == ("Above target_memory_gb = 1e-05",)
    small = _step(_Stack(), config=MemoryConfig(max_memory_gb=40, min_memory_gb=8))
    assert "Below min_memory_gb = 8" in small.bounds[0]
    model = _Stack()
    with pytest.raises(KeyError), MemoryMonitor(model, config=MemoryConfig(max_memory_gb=1e-5)).step():
        raise KeyError
    assert not _GLOBAL_HOOKS and not _GLOBAL_PRE_HOOKS


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        (("model",), {}, TypeError, "model must be a Module, got str"),
        ((nn.Linear(2, 2), "adam"), {}, TypeError, "optimizer must be a Optimizer, got str"),
        ((nn.Linear(2, 2),), {"config": 3}, TypeError, "config must be a MemoryConfig, got int"),
        ((nn.Linear(2, 2, device="meta"),), {}, ValueError, "weight is on meta"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, words):
    with pytest.raises(error, match=words):
        MemoryMonitor(*args, **kwargs)


@pytest.fixture
def two_ranks():
    """A process group of two ranks, of which this is the first and the other does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_sharded_model_is_counted_as_far_as_it_is_here(two_ranks):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    whole = sum(p.nbytes for p in model.parameters())
    fully_shard(model, mesh=two_ranks)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    monitor = MemoryMonitor(model, optimizer)
    with monitor.step():
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    report = monitor.report
    assert report.total("parameters") == report.total("gradients") == report.total("optimizer_state") == whole // 2


def test_a_buffer_of_two_modules_counts_once():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    model[1].running_mean = model[0].running_mean
    monitor = MemoryMonitor(model)
    with monitor.step():
        model(torch.randn(4, 8)).sum().backward()
    assert monitor.report.total("parameters") == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


class _Waiting(nn.Linear):
    """Of which one call waits until it is told to end."""

    started, end = threading.Event(), threading.Event()

    def forward(self, x, wait=False):
        if wait:
            self.started.set()
            assert self.end.wait(60)
        return super().forward(x)


def test_calls_of_other_threads_are_left_alone():
    model = _Waiting(8, 8)
    monitor = MemoryMonitor(model)
    with futures.ThreadPoolExecutor(1) as pool:
        with monitor.step():
            other = pool.submit(model, torch.randn(1, 8), wait=True)  # begins in one step and ends in the next
            assert model.started.wait(60)
        with monitor.step():
            model.end.set()
            other.result()
            model(torch.randn(4, 8, requires_grad=True)).relu().sum().backward()
    (row,) = monitor.report.modules
    assert row.activations == 2 * 4 * 8 * 4  # the input and, of the relu, the output; nothing of the other call
