"""CUDA graphs of blocks: steps are those without, whatever surrounds the blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import batch, build, checkpoint_layers
from tilesmith.engine.backends import triton_missing
from tilesmith.models import graphs, pace

if not torch.cuda.is_available() or torch.version.hip or triton_missing() is not None:
    pytest.skip("needs an NVIDIA GPU and Triton", allow_module_level=True)


def _inputs(number, length=24):
    given = {name: value.cuda() for name, value in batch("llama", padded=None, length=length).items()}
    given["input_ids"] = given["labels"] = (given["input_ids"] + number) % 120 + 3
    return given


def _model(**more):
    model = build("llama", layers=3, attention="sdpa").cuda().bfloat16()
    return tilesmith.optimize(model, **more)


def _step(model, given, **more):
    loss = model(**given, **more).loss
    loss.backward()
    return loss.detach().clone()


def _close(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            error = (p.grad.float() - q.grad.float()).norm() / q.grad.float().norm()
            assert error < 2**-7, f"{name}: {error:.1e}"  # some gradients are summed in any order


def _compared(model, plain, steps=6, accumulate=2, lengths=(24,), **more):
    for number in range(steps):
        for length in lengths:
            given = _inputs(number, length)
            torch.testing.assert_close(_step(model, given, **more), _step(plain, given, **more))
        if (number + 1) % accumulate == 0:
            _close(model, plain)
            model.zero_grad()
            plain.zero_grad()
    return model.tilesmith_report.notes[-1]


@pytest.mark.parametrize("cached", [False, True])
def test_steps_and_accumulated_gradients(cached):
    plain = _model()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    record = _compared(model, plain, use_cache=cached)
    assert record.replays == 3 * (6 - graphs.PLAIN_CALLS) and not record.refused, record.told()
    assert record._memory.recorder.memory() > 0 and "MiB held" in str(model.tilesmith_report)


def test_two_shapes_in_turns():
    plain = _model()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    record = _compared(model, plain, lengths=(24, 40))
    assert record.recorded == 2 and not record.refused, record.told()


def test_checkpointing():
    plain = _model()
    checkpoint_layers(plain, use_reentrant=False)
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    record = _compared(model, plain, use_cache=False)
    assert record.replays == 3 * (6 - graphs.PLAIN_CALLS) and not record.refused, record.told()


def test_adapters():
    peft = pytest.importorskip("peft")
    plain = peft.get_peft_model(
        _model(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).bfloat16()
    tilesmith.optimize(plain)  # the adapters' layers too
    model = copy.deepcopy(plain)
    tilesmith.optimize(model, graphs=True)
    record = _compared(model, plain)
    assert record.replays == 3 * (6 - graphs.PLAIN_CALLS) and not record.refused, record.told()


def _frozen_around(**more):
    model = _model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name)
    return tilesmith.optimize(model, **more)


def _around(record):
    """The forwards that were replayed as a whole, and why others were not."""
    return record.wholes, dict(record.beside)


@pytest.mark.parametrize("masked", [False, True])
def test_from_tokens_to_the_loss(masked):
    plain = _frozen_around()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    for number in range(6):
        given = _inputs(number)
        if not masked:
            del given["attention_mask"]
        torch.testing.assert_close(_step(model, given, use_cache=False), _step(plain, given, use_cache=False))
        _close(model, plain)
    record = model.tilesmith_report.notes[-1]
    assert _around(record) == (6 - graphs.PLAIN_CALLS, {}) and record.recorded == 1, record.told()


def test_padding_from_tokens_to_the_loss():
    plain = _frozen_around()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    for number in range(4):
        for padded in (None, "right", "left"):
            given = {name: value.cuda() for name, value in batch("llama", padded=padded, length=24).items()}
            given["input_ids"] = (given["input_ids"] + number) % 120 + 3
            torch.testing.assert_close(_step(model, given, use_cache=False), _step(plain, given, use_cache=False))
            _close(model, plain)
    record = model.tilesmith_report.notes[-1]
    assert _around(record) == (3 * (4 - graphs.PLAIN_CALLS), {}) and record.recorded == 3, record.told()


def test_packed_positions_from_tokens_to_the_loss():
    plain = _frozen_around()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    packed = torch.tensor([*range(10), *range(14)], device="cuda").repeat(2, 1)
    for number in range(4):
        for positions in (torch.arange(24, device="cuda")[None], packed):
            given = {**_inputs(number), "position_ids": positions}
            del given["attention_mask"]
            torch.testing.assert_close(_step(model, given, use_cache=False), _step(plain, given, use_cache=False))
            _close(model, plain)
    record = model.tilesmith_report.notes[-1]
    assert _around(record) == (2 * (4 - graphs.PLAIN_CALLS), {}) and record.recorded == 2, record.told()


def test_adapters_with_dropout_from_tokens_to_the_loss():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = tilesmith.optimize(peft.get_peft_model(_model(), config).bfloat16().train(), graphs=True)
    given = _inputs(0)
    losses = {_step(model, given, use_cache=False).item() for _ in range(8)}
    record = model.tilesmith_report.notes[-1]
    assert len(losses) > 4, "each replay draws its own numbers"
    assert _around(record) == (8 - graphs.PLAIN_CALLS, {}), record.told()


def test_layers_that_are_skipped_at_random():
    """The number that decides is drawn on the host."""
    model = build("bart").cuda().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name)
    tilesmith.optimize(model, graphs=True)
    before = torch.get_rng_state()
    for number in range(4):
        given = _inputs(number)
        del given["attention_mask"]
        _step(model, given, use_cache=False)
    record = model.tilesmith_report.notes[-1]
    assert record.wholes == 0 and any("on the host" in why for why in record.beside), record.told()
    assert not torch.equal(before, torch.get_rng_state())


def test_no_step_waits_for_the_device():
    model = tilesmith.optimize(_frozen_around(), graphs=True)
    given = _inputs(0)
    del given["attention_mask"]
    for _ in range(4):
        _step(model, given, use_cache=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(model, given, use_cache=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_that_an_optimizer_changes():
    plain = _model()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (model, plain)]
    for number in range(6):
        losses = [_step(m, _inputs(number)) for m in (model, plain)]
        torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    record = model.tilesmith_report.notes[-1]
    assert record.replays == 3 * (6 - graphs.PLAIN_CALLS) and record.renewed == 0, record.told()


def test_compiled_blocks():
    plain = _model()
    model = tilesmith.optimize(copy.deepcopy(plain), compile="between", graphs=True)
    tilesmith.optimize(plain, compile="between")  # what Inductor computes is not rounded as eager's is
    record = _compared(model, plain, steps=4)
    assert record.replays == 3 * (4 - graphs.PLAIN_CALLS) and not record.refused, record.told()


class _Small(nn.Module):
    """Kernels of a few microseconds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        y = self.norm(x)
        for linear in self.linears:
            y = linear(y) + 1
        return x + y


class _Large(nn.Module):
    """Beside a norm one product of a millisecond."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8192), nn.Linear(8192, 8192, bias=False)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def _blocks(kind, **more):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(kind() for _ in range(6))).bfloat16()
    torch.cuda.synchronize()  # a test may train on another stream
    return tilesmith.optimize(model, **more), torch.randn(256 if kind is _Small else 8192, len(model[0].norm.weight))


def _train(model, x, steps, synchronous=False):
    x = x.to(next(model.parameters()))
    for _ in range(steps):
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        if synchronous:
            loss.item()
    return loss.detach()


LOOKS = pace.SKIPPED + pace.LOOKED_AT


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(("kind", "waits"), [(_Small, True), (_Large, False)])
@pytest.mark.parametrize("side", [False, True])
def test_whether_the_device_waits_for_the_host(side, kind, waits, synchronous, caplog):
    model, x = _blocks(kind)
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        _train(model, x, LOOKS, synchronous)
    found = model.tilesmith_report.advice.pace
    assert (found.steps, found.waits) == (pace.LOOKED_AT, waits), str(found)
    told = [record.getMessage() for record in caplog.records if "waited for the host" in record.getMessage()]
    assert len(told) == waits and ("`optimize(model, graphs=True)`" in str(model.tilesmith_report)) is waits


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_device_that_is_not_the_current_one():
    model, x = _blocks(_Large)
    model.to("cuda:1")
    _train(model, x, LOOKS)
    assert str(model.tilesmith_report.advice.pace) == "the device waited for the host in 0 of 8 training steps"


def test_looking_waits_for_nothing():
    model, x = _blocks(_Small)
    x = x.to(next(model.parameters()))
    _train(model, x, 3)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        _train(model, x, LOOKS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.tilesmith_report.advice.pace.decided


@pytest.mark.parametrize(("kind", "waits"), [(_Small, True), (_Large, False)])
def test_auto_records_where_the_device_waits(kind, waits):
    (model, x), (plain, _) = _blocks(kind, graphs="auto"), _blocks(kind)
    for steps in (LOOKS, graphs.PLAIN_CALLS, 3):
        torch.testing.assert_close(_train(model, x, steps), _train(plain, x, steps))
        _close(model, plain)
    record = model.tilesmith_report.notes[-1]
    assert (record.pace.decided, record.pace.waits) == (True, waits), record.told()
    assert record.replays == (6 * 3 if waits else 0) and not record.refused, record.told()


def test_auto_of_a_model_of_transformers():
    plain = _model()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs="auto")
    record = _compared(model, plain, steps=LOOKS + graphs.PLAIN_CALLS + 3, use_cache=False)
    assert record.pace.waits and record.replays == 3 * 3 and not record.refused, record.told()


def test_evaluation_between_steps():
    plain = _model()
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    _compared(model, plain)
    with torch.no_grad():
        found, wanted = (m.eval()(**_inputs(9)).logits for m in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
