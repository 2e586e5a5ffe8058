"""Whether the device waits for the host, what is advised then, and `graphs="auto"`, with a device of simulated time.

tests/test_graphs_gpu.py looks at a real one.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import pickle
import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilesmith
from graph_runs import Repeater, gradients_of
from optimize_models import batch, build, ops_everywhere, train  # noqa: F401
from tilesmith.engine.model_state import state_preserved
from tilesmith.models import compiling, graphs, pace
from tilesmith.rewrite import CALLS

ALL = pace.SKIPPED + pace.LOOKED_AT
RECORDS = "`optimize(model, graphs=True)` records blocks as CUDA graphs"


class Device:
    """A device that runs what the host issues in order, while the host goes on; times in seconds.

    host: the time now. free: when the device has done everything. idle: how long it had nothing to do so far.
    """

    def __init__(self):
        self.host = self.free = self.idle = 0.0
        self.marks = 0
        self.recorded = False  # by somebody

    def issue(self, host, kernel):
        """The host takes so long to issue a kernel that takes so long."""
        self.host += host
        self.idle += max(0.0, self.host - self.free)
        self.free = max(self.free, self.host) + kernel

    def synchronize(self):
        self.host = max(self.host, self.free)

    def missing(self, device):
        return ""

    def busy(self):
        return self.recorded

    def mark(self, device):
        assert device == torch.device("cpu") and not self.recorded
        self.marks += 1
        then = self.free
        return lambda: self.host >= then


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device, times):
        ctx.device, ctx.times = device, times
        device.issue(*times[0])
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        ctx.device.issue(*ctx.times[1])
        return dx, None, None


class Block(nn.Module):
    def __init__(self, device, times):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.work = lambda x: Work.apply(x, device, times)

    def __deepcopy__(self, memo):
        return copy._reconstruct(self, memo, *self.__reduce_ex__(4))

    def forward(self, x):
        return x + self.work(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, device, times, layers=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(device, times) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


SLOW_HOST = ((2.0, 1.0), (2.0, 1.5))  # of a block's forward and backward, host and device
SLOW_DEVICE = ((1.0, 2.0), (1.5, 4.0))


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(pace, "EVENTS", made)
    monkeypatch.setattr(graphs, "RECORDER", Repeater)
    return made


def _stack(device, times, layers=6, **more):
    torch.manual_seed(0)
    return tilesmith.optimize(Stack(device, times, layers), **more)


def _steps(model, count, waiting=None):
    for _ in range(count):
        model(torch.ones(2, 8)).sum().backward()
        if waiting is not None:
            waiting.synchronize()
    return model


def _pace(model):
    report = model.tilesmith_report
    return report.advice.pace if report.advice is not None else report.notes[-1].pace


def _told(model):
    return " ".join(str(model.tilesmith_report).split())


def _told_by_log(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_model_whose_device_waits_is_told_once(synchronous, device, caplog):
    model = _steps(_stack(device, SLOW_HOST), ALL - 1, device if synchronous else None)
    assert not _told_by_log(caplog) and "waited" not in _told(model)
    _steps(model, 5)
    assert _told_by_log(caplog) == [
        f"optimize: the device waited for the host in 8 of 8 training steps: {RECORDS}, which takes more memory"
    ]
    assert f"The device waited for the host in 8 of 8 training steps: {RECORDS}" in _told(model)


@pytest.mark.parametrize("layers", [3, 6, 24])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_model_whose_device_is_behind_is_told_nothing(layers, synchronous, device, caplog):
    model = _steps(_stack(device, SLOW_DEVICE, layers), ALL + 1, device if synchronous else None)
    assert _pace(model).decided and _pace(model).waited == 0 and not _pace(model).waits
    assert not _told_by_log(caplog) and "waited" not in _told(model)


def test_the_verdict_is_that_of_the_simulated_device(device):
    """In loops that never wait for the device: it waits if the host takes longer for a step."""
    draw = random.Random(0)
    for _ in range(60):
        kernels = draw.uniform(0.5, 2), draw.uniform(0.5, 2)
        ratio = draw.choice([draw.uniform(0.2, 0.8), draw.uniform(1.2, 3)])
        times = tuple((ratio * kernel * draw.uniform(0.95, 1.05), kernel) for kernel in kernels)
        model = _steps(_stack(device, times, layers=draw.randint(3, 9)), pace.SKIPPED)
        before = device.idle
        _steps(model, pace.LOOKED_AT)
        assert _pace(model).waits == (ratio > 1) == (device.idle - before > 1), times
        device.synchronize()


def test_one_step_may_be_an_exception(device):
    model = _steps(_stack(device, SLOW_HOST), pace.SKIPPED + 2)
    device.free += 50  # other work, such as a longer batch
    _steps(model, 1)
    device.synchronize()
    _steps(model, 5)
    assert (_pace(model).waited, _pace(model).waits) == (7, True)
    model = _steps(_stack(device, SLOW_HOST), pace.SKIPPED + 2)
    for _ in range(2):
        device.free = device.host + 50
        _steps(model, 1)
        device.synchronize()
    _steps(model, 4)
    assert (_pace(model).waited, _pace(model).decided, _pace(model).waits) == (6, True, False)


def test_nothing_is_left_once_it_is_decided(device):
    model = _stack(device, SLOW_DEVICE)
    counts = [m.__dict__[CALLS] for m in model.modules() if CALLS in m.__dict__]
    assert [type(c).__name__ for c in counts].count("_Passed") == 2 and len(counts) == 6
    _steps(model, ALL)
    assert device.marks == 2 * ALL
    _steps(model, 2)
    assert device.marks == 2 * ALL
    assert not any(type(m.__dict__.get(CALLS)).__name__ == "_Passed" for m in model.modules())
    assert model.tilesmith_report.calls() == {"layer_norm": 6 * (ALL + 2)}


def _without_gradients(model):
    with torch.no_grad():
        model(torch.ones(2, 8))


def _in_evaluation(model):
    model.eval()
    _steps(model, 1)
    model.train()


def _in_a_trial(model):
    with state_preserved(model):
        _steps(model, 1)


@pytest.mark.parametrize("call", [_without_gradients, _in_evaluation, _in_a_trial])
@pytest.mark.parametrize("wanted", [False, "auto"])
def test_only_training_steps_are_looked_at(call, wanted, device):
    model = _stack(device, SLOW_HOST, graphs=wanted)
    for _ in range(ALL):
        call(model)
    assert device.marks == 0 and _pace(model).seen == 0
    for _ in range(ALL):
        call(model)
        _steps(model, 1)
    assert _pace(model).waits and _pace(model).steps == pace.LOOKED_AT


def test_what_is_observed_or_recorded_by_somebody_is_not_looked_at(device):
    model = _stack(device, SLOW_HOST)
    with FlopCounterMode(display=False):
        _steps(model, 1)
    device.recorded = True
    _steps(model, 1)
    assert device.marks == 0
    device.recorded = False
    _steps(model, 1)
    assert device.marks == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_checkpointing_repeats_tell_nothing(reentrant, device):
    model = _stack(device, SLOW_HOST)
    for _ in range(3):
        x = torch.ones(2, 8, requires_grad=True)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        before = device.marks
        x.sum().backward()
        assert device.marks == before
    assert _pace(model).seen == (0 if reentrant else 3)


def test_the_last_two_blocks_in_the_other_order(device):
    """The event of the step before has always passed then, and says nothing."""
    for times, waits in ((SLOW_HOST, True), (SLOW_DEVICE, False)):
        model = _stack(device, times)
        for _ in range(ALL + 1):
            x = torch.ones(2, 8)
            for number in (0, 1, 2, 3, 5, 4):
                x = model.blocks[number](x)
            x.sum().backward()
            device.synchronize()
        assert _pace(model).decided and _pace(model).waits == waits


def test_the_blocks_that_hold_most_parameters_are_looked_at():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.text = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))
            self.vision = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(5))
            self.lazy = nn.ModuleList(nn.Sequential(nn.LazyLinear(64)) for _ in range(2))

    assert [name for name, _ in pace.late_blocks(Two())] == ["text.1", "text.2"]
    assert [name for name, _ in pace.late_blocks(build("bart"))] == [f"model.decoder.layers.{n}" for n in (0, 1)]
    assert pace.late_blocks(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_only_count(twin, device):
    model = build("llama", layers=2)
    tilesmith.optimize(model)
    train(model, batch("llama"))
    marks = device.marks
    assert marks == 2
    other = twin(model)
    assert all(type(m.__dict__.get(CALLS, {})) is dict for m in other.modules())
    before = dict(other.tilesmith_report.calls())
    train(other, batch("llama"))
    assert device.marks == marks and all(n == 2 * before[op] for op, n in other.tilesmith_report.calls().items())
    assert model.tilesmith_report.calls() == before
    assert pickle.loads(pickle.dumps(model.tilesmith_report)).calls() == before
    tilesmith.optimize(other)
    train(other, batch("llama"))
    assert device.marks == marks + 2


def test_undo_and_a_later_optimize(device, caplog):
    model = _steps(_stack(device, SLOW_HOST), 5)
    tilesmith.undo(model)
    _steps(model, ALL)
    assert device.marks == 10 and not any(CALLS in m.__dict__ for m in model.modules())
    _steps(tilesmith.optimize(model), ALL)
    _steps(tilesmith.optimize(model, only="norm"), ALL)
    assert len(_told_by_log(caplog)) == 2, "each looks anew"


def test_a_model_that_several_threads_run_is_told_nothing(device, caplog):
    model = _steps(_stack(device, SLOW_HOST), 3)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(_steps, model, 1))
    thread.start()
    thread.join()
    _steps(model, 2 * ALL)
    assert _pace(model).decided and not _pace(model).waits and not _told_by_log(caplog)


@pytest.mark.parametrize("how", ["block", "inside", "fsdp", "draws"])
def test_a_model_that_cannot_be_recorded_is_told_why(how, device, caplog):
    model = _stack(device, SLOW_HOST)
    for block in model.blocks:
        if how == "fsdp":
            block.linear.weight._fsdp_flattened = True
        elif how == "draws":
            block.gradient_checkpointing, block.dropout = True, nn.Dropout(0.1)
        else:
            (block if how == "block" else block.linear).register_forward_hook(lambda *_: None)
    _steps(model, ALL)
    why = {"block": "it has hooks", "inside": "linear in it has hooks", "fsdp": "FullyShardedDataParallel moves",
           "draws": "it is checkpointed and draws"}[how]  # fmt: skip
    assert not _told_by_log(caplog)
    assert f"in 8 of 8 training steps; its blocks cannot be recorded as CUDA graphs ({why}" in _told(model)
    assert 'compile="between" leaves the host fewer kernels' in _told(model)


def test_other_devices_and_compiled_models_cost_nothing(monkeypatch):
    monkeypatch.setattr(pace.EVENTS, "mark", lambda device: pytest.fail("nothing is asked of the device"))
    model = _steps(tilesmith.optimize(Stack(Device(), SLOW_HOST)), ALL)
    assert _pace(model).seen == 0 and _pace(model).why == "on cpu there are no CUDA graphs"
    compiled = tilesmith.optimize(nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))))
    _steps(torch.compile(compiled, backend="eager", fullgraph=True), 2)
    assert _pace(compiled).seen == 0 and compiled.tilesmith_report.calls() == {"layer_norm": 0}


def test_auto_records_from_the_step_at_which_the_device_was_seen_to_wait(device, caplog):
    model, plain = _stack(device, SLOW_HOST, graphs="auto"), Stack(Device(), SLOW_HOST)
    plain.load_state_dict(model.state_dict())
    record = model.tilesmith_report.notes[-1]
    assert "graphs='auto' has looked at 0 of 11 training steps" in _told(model)
    for step in range(ALL + 5):
        for each in (model, plain):
            each.zero_grad()
            _steps(each, 1)
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
        assert bool(record.replays) == (step >= ALL + graphs.PLAIN_CALLS)
        assert record.plain["new shape"] == 6 * min(max(0, step + 1 - ALL), graphs.PLAIN_CALLS)
    assert record.recorded == 1 and record.replays == 18
    assert "graphs='auto' records blocks: the device waited for the host in 8 of 8 training steps" in _told(model)
    assert "Recorded blocks: 18 calls replayed" in _told(model) and not _told_by_log(caplog)


def test_auto_records_nothing_where_the_device_is_behind(device):
    model = _steps(_stack(device, SLOW_DEVICE, graphs="auto"), ALL + 5)
    record, marks = model.tilesmith_report.notes[-1], device.marks
    assert record.replays == record.recorded == 0 and not record.plain
    assert "graphs='auto' records no blocks: the device waited for the host in 0 of 8 training steps" in _told(model)
    _steps(model, 2)
    assert device.marks == marks


def test_auto_from_tokens_to_the_loss(device):
    model = build("llama", layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name)
    plain = copy.deepcopy(model)
    tilesmith.optimize(model, graphs="auto")
    tilesmith.optimize(plain)
    record = model.tilesmith_report.notes[-1]
    for step in range(ALL + 4):
        given = batch("llama", padded=None)
        given["input_ids"] = (given["input_ids"] + step) % 120 + 3
        found, wanted = (train(each, given, use_cache=False) for each in (model, plain))
        torch.testing.assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[2], wanted[2])
    assert record.wholes == 4 - graphs.PLAIN_CALLS and record.recorded == 1, record.told()


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_auto_go_on_looking(twin, device):
    model = build("llama", layers=2)
    tilesmith.optimize(model, graphs="auto")
    for _ in range(4):
        train(model, batch("llama"))
    other = twin(model)
    marks, seen = device.marks, _pace(model).seen
    assert seen == 4 and _pace(other).seen == 4
    for _ in range(ALL - 4):
        train(other, batch("llama"))
    assert _pace(other).waits and _pace(model).seen == seen and device.marks > marks
    last = twin(other)
    for _ in range(graphs.PLAIN_CALLS + 1):
        train(last, batch("llama"))
    assert last.tilesmith_report.notes[-1].replays == 2, "what was decided holds for a copy"
    tilesmith.undo(last)
    assert not any(name.startswith("_tilesmith") for m in last.modules() for name in m.__dict__)


def test_auto_of_compiled_blocks(device, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    model = tilesmith.optimize(build("llama"), compile="between", graphs="auto")
    for _ in range(ALL + graphs.PLAIN_CALLS + 1):
        train(model, batch("llama"))
    assert _pace(model).waits and model.tilesmith_report.notes[-1].replays == 2


def test_auto_is_kept_by_a_later_optimize(device):
    model = _stack(device, SLOW_HOST, graphs="auto")
    tilesmith.optimize(model)
    assert _pace(model) is not None and model.tilesmith_report.advice is None
    _steps(model, ALL + graphs.PLAIN_CALLS + 1)
    assert model.tilesmith_report.notes[-1].replays == 6
    tilesmith.optimize(model, graphs=True)
    assert model.tilesmith_report.notes[-1].pace is None
    _steps(model, graphs.PLAIN_CALLS + 1)
    assert model.tilesmith_report.notes[-1].replays == 6
    tilesmith.optimize(model)
    assert model.tilesmith_report.notes[-1].pace is None, "True is kept as well"


def test_auto_of_blocks_that_cannot_be_recorded_says_why(device):
    model = _stack(device, SLOW_HOST, graphs="auto")
    for block in model.blocks:
        block.register_forward_hook(lambda *_: None)
    _steps(model, ALL + 1)
    assert "graphs='auto' records blocks" in _told(model)
    assert "Blocks ran unrecorded 6 times: it has hooks" in _told(model)


def test_auto_without_a_gpu_says_so(monkeypatch):
    model = _steps(tilesmith.optimize(Stack(Device(), SLOW_HOST), graphs="auto"), 3)
    assert "has looked at 0 of 11 training steps; now none can be looked at: on cpu there are no CUDA" in _told(model)


def test_bad_input():
    model = Stack(Device(), SLOW_HOST)
    with pytest.raises(TypeError, match="optimize: graphs must be True, False or 'auto', got None"):
        tilesmith.optimize(model, graphs=None)
    with pytest.raises(ValueError, match="optimize: graphs is 'always'; it is True, False or 'auto'"):
        tilesmith.optimize(model, graphs="always")
    with pytest.raises(ValueError, match="optimize: graphs='auto' records repeated blocks, and no two modules"):
        tilesmith.optimize(nn.Linear(2, 2), graphs="auto")
