"""HardwareAbstractionLayer: memory as measured, batches at the knee, devices by recorded facts, nothing changed."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import build, checkpoint_layers
from tilesmith import nn as tnn
from tilesmith.hardware import HardwareAbstractionLayer, capacity, capacity_of, detect_available_devices
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.models.sizing import batch_size, hardware_layer, probes
from tilesmith.models.sizing.batch_size import Costs, best_batch, rounded
from tilesmith.models.sizing.memory_estimate import CannotTrace, optimizer_bytes, traced_peak, update_seconds
from tilesmith.models.sizing.probes import Probe, fingerprint, probe
from tilesmith.models.sizing.sample_inputs import sample_of

CPU = torch.device("cpu")
KNOWN = {
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
    "sequential": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
    "decoder": lambda: tnn.Decoder(tnn.DecoderConfig(128, 32, 64, 2, 4, max_positions=64)),
    "llama, optimised": lambda: tilesmith.optimize(build("llama", attention="sdpa")),
    "whisper": lambda: build("whisper", attention="sdpa"),
    "vit": lambda: build("vit", attention="sdpa"),
}


def _layer(**options):
    return HardwareAbstractionLayer([CPU], **options)


def _draws_its_layers(model):
    """Whether training compares a number that it drew even where no layer is dropped, as Whisper of transformers 5.17
    does: fake tensors have no such number, and some batch sizes are run instead."""
    encoder = getattr(getattr(model, "model", None), "encoder", None)
    source = "" if encoder is None else inspect.getsource(inspect.unwrap(type(encoder).forward))
    return "torch.rand([])" in source and "self.layerdrop > 0" not in source


@pytest.mark.parametrize("kind", KNOWN)
def test_estimates_meet_what_is_measured(kind):
    """The bar on a GPU is 7 %, with more rows in the estimate than in the run that calibrates it."""
    torch.manual_seed(0)
    model = KNOWN[kind]()
    hal = _layer()
    estimate = hal.memory_estimate(model, 6, sequence_length=32)
    assert estimate.calibrated and estimate.probes == (3 if _draws_its_layers(model) else 1)
    given = sample_of(model, tokens=32)
    measured = probe(model, given, 6, backward=True, device=CPU).peak
    assert estimate.step == pytest.approx(measured, rel=0.07)
    assert estimate.parameters == sum(
        {p.data_ptr(): p.nbytes for p in (*model.parameters(), *model.buffers())}.values()
    )
    assert hal.estimate_memory_usage(model, 6, sequence_length=32) == estimate.total / 1e9
    assert hal.memory_estimate(model, 12, sequence_length=32).probes == estimate.probes  # the runs are remembered
    inference = hal.memory_estimate(model, 6, sequence_length=32, training=False)
    assert inference.total < estimate.total and inference.optimizer_state == inference.gradients == 0


def test_optimizers_tell_what_they_keep():
    model = nn.Linear(64, 64, bias=False)
    size = 64 * 64 * 4
    assert optimizer_bytes(model, torch.optim.AdamW, CPU) == (2 * size, 2 * size)
    assert optimizer_bytes(model, torch.optim.SGD, CPU) == (0, 0)
    made = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert optimizer_bytes(model, made, CPU) == (size, 0)
    assert not made.state  # it was not stepped
    assert optimizer_bytes(model, lambda p: torch.optim.AdamW(p, amsgrad=True), CPU) == (3 * size, 2 * size)
    assert optimizer_bytes(model, torch.optim.AdamW, torch.device("cuda")) == (2 * size, size)
    assert optimizer_bytes(model.requires_grad_(False), torch.optim.AdamW, CPU) == (0, 0)
    assert optimizer_bytes(model, None, CPU) == (0, 0)


class _ByValue(nn.Module):
    """Its shapes depend on values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 64)

    def forward(self, x):
        return self.inner(x[x[:, 0].abs() > -1.0])


def test_models_that_fake_tensors_do_not_get_through_are_run_at_some_sizes():
    model, x = _ByValue(), torch.randn(4, 16)
    with pytest.raises(CannotTrace, match="Dynamic"):
        traced_peak(model, sample_of(model, x), 2, backward=True, device=CPU)
    estimate = _layer().memory_estimate(model, 8, sample=x)
    assert estimate.probes == 3
    measured = probe(model, sample_of(model, x), 8, backward=True, device=CPU).peak
    assert estimate.step == pytest.approx(measured, rel=0.07)
    with pytest.raises(ValueError, match="the model does not run on fake tensors"):
        _layer().memory_estimate(model, 8, sample=x, calibrate=False)
    for training in (True, False):
        assert 1 <= _layer().get_optimal_batch_size(model, sample=x, training=training, max_batch_size=64) <= 64
    assert all(p.grad is None for p in model.parameters())


def _state(model):
    values = {name: x.clone() for name, x in model.state_dict(keep_vars=False).items()}
    return values, [p.grad for p in model.parameters()], [m.training for m in model.modules()]


class _Counting(nn.Module):
    """Draws numbers, writes to a buffer, and counts the batches that it was given."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape[0])
        return nn.functional.dropout(self.norm(self.inner(x)), 0.5)


def test_probes_leave_the_model_as_it_was():
    torch.manual_seed(0)
    model = _Counting().eval()
    model.norm.train()
    x = torch.randn(4, 16)
    model.inner.weight.grad = torch.ones(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    before, random = _state(model), torch.random.get_rng_state()
    found = _layer().get_optimal_batch_size(model, sample=x, optimizer=optimizer, max_batch_size=16)
    after = _state(model)
    assert 1 <= found <= 16
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), after[0].values()))
    assert all(a is b for a, b in zip(before[1], after[1])) and before[2] == after[2]
    assert torch.equal(random, torch.random.get_rng_state()) and not optimizer.state
    assert torch.equal(model.inner.weight.grad, torch.ones(16, 16))


def test_a_backward_that_steps_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=r"0\.weight has a hook that runs after its gradient is accumulated"):
        _layer().get_optimal_batch_size(model)


def _costs(time, peak, traced=None, rows=None, forward=None):
    """A model whose steps take `time(b)` seconds and `peak(b)` bytes, beyond gradients `rows(b)`, of which in the
    forward `forward(b)`; memory runs out above 10,000."""

    def run(batch, apart=False, growth=False):
        more = ((rows or peak)(batch), (forward or rows or peak)(batch)) if apart else (0, 0)
        return Probe(batch, time(batch), peak(batch), 0, peak(batch) <= 10_000, *more)

    return Costs(traced or (lambda b: int(peak(b) * 0.8)), run, 100, 50, 0, 0, 0, True)  # fmt: skip


CURVES = {
    "launch-bound first": (lambda b: 1e-3 + 1e-4 * b, lambda b: 200 + 10 * b),
    "long start": (lambda b: 1e-2 + 1e-5 * b, lambda b: 200 + 40 * b),
    "proportional": (lambda b: 1e-3 * b, lambda b: 200 + 10 * b),
    "worse when large": (lambda b: 1e-3 * b + 1e-5 * b * b, lambda b: 10 * b),
    "steps of 64": (lambda b: 1e-3 * (1 + (b - 1) // 64), lambda b: 100 + 13 * b),
    "gradients first": (lambda b: 1e-3 + 1e-4 * b, lambda b: max(3000, 40 * b)),
}


@pytest.mark.parametrize("curve", CURVES)
def test_the_batch_is_near_the_best_that_fits(curve):
    time, peak = CURVES[curve]
    costs = _costs(time, peak)
    found = best_batch(costs, 9000, 512)
    assert len(found.probes) <= 3
    assert peak(found.batch) <= 9000
    fitting = [b for b in range(1, 513) if peak(b) <= 9000]
    best = max(b / time(b) for b in fitting)
    assert found.batch / time(found.batch) >= 0.9 * best
    assert all(p.fits for p in found.probes)


# three runs of which the largest is the slowest do not tell where between the others the best is
@pytest.mark.parametrize("curve", [curve for curve in CURVES if curve != "worse when large"])
def test_the_batch_is_near_the_best_with_the_optimizer_in_the_step(curve):
    """An update takes as long for any batch, so that few rows are slower than their probes say."""
    time, peak = CURVES[curve]
    costs = _costs(time, peak)
    costs.update = 4e-3
    found = best_batch(costs, 9000, 512)
    best = max(b / (time(b) + costs.update) for b in range(1, 513) if peak(b) <= 9000)
    assert found.batch / (time(found.batch) + costs.update) >= 0.9 * best
    assert [p.seconds for p in found.probes] == [time(p.batch) for p in found.probes]


def test_the_time_of_an_update_is_that_of_its_bytes():
    """AdamW in bf16: 20 tensors of a parameter's size; plain SGD 3."""
    assert update_seconds(2 * 10**9, 4 * 10**9, 4e12) == pytest.approx(20 * 2e9 / 4e12)
    assert update_seconds(2 * 10**9, 0, 4e12) == pytest.approx(3 * 2e9 / 4e12)
    assert update_seconds(2 * 10**9, 4 * 10**9, None) == 0.0


def test_without_an_optimizer_no_update_is_counted(monkeypatch):
    monkeypatch.setattr(hardware_layer, "update_seconds", lambda *given: 1.0)
    model, hal = nn.Sequential(nn.Linear(8, 8)), _layer()
    given = sample_of(model)
    assert [hal._costs(model, given, True, one).update for one in (torch.optim.AdamW, None)] == [1.0, 0.0]


def test_gradients_that_hide_activations_of_few_rows_do_not_hide_those_of_many():
    """Where fake tensors tell nothing, one row and two take what the gradients take."""
    blind = lambda: _costs(lambda b: 1e-3, lambda b: max(300, 100 * b), traced=lambda b: None)  # noqa: E731
    for batch, free, ran in ((40, 10_000, (1, 2, 20)), (40, 1000, (1, 2)), (5, 10_000, (1, 2))):
        costs = blind()
        costs.calibrate(batch, free)
        assert tuple(p.batch for p in costs.probes) == ran
    costs = blind()
    costs.calibrate(40, 10_000)
    assert costs.step(40) == pytest.approx(4000, rel=0.07)


# name -> bytes of a step, of one whose gradients are there already, of its forward
BLIND = {
    "linear": (lambda b: 40 * b, lambda b: 40 * b, lambda b: 30 * b),
    "gradients hide activations": (lambda b: max(3000, 40 * b), lambda b: 40 * b, lambda b: 30 * b),
    "gradients of half the room": (lambda b: max(4500, 30 * b), lambda b: 30 * b, lambda b: 20 * b),
    "nearly all is gradients": (lambda b: max(7000, 20 * b), lambda b: 20 * b, lambda b: 12 * b),
    "gradients beside activations": (lambda b: 3000 + 20 * b, lambda b: 20 * b, lambda b: 18 * b),
    "gradients on the way": (lambda b: max(3000, 1500 + 15 * b, 25 * b), lambda b: 25 * b, lambda b: 20 * b),
    "a gradient hides rows": (lambda b: max(3000, 20 * b), lambda b: max(400, 20 * b), lambda b: 15 * b),
    "weights in another dtype": (
        lambda b: 1500 + max(2000, 20 * b), lambda b: 1500 + 20 * b, lambda b: 1500 + 16 * b,
    ),
    "a little superlinear": (
        lambda b: max(2000, 30 * b + b * b // 50), lambda b: 30 * b + b * b // 50, lambda b: 20 * b + b * b // 50,
    ),
    "one row alone": (lambda b: 8000 * b, lambda b: 8000 * b, lambda b: 6000 * b),
}  # fmt: skip


@pytest.mark.parametrize("time", ["launch-bound first", "long start", "proportional", "worse when large"])
@pytest.mark.parametrize("curve", BLIND)
def test_the_batch_is_near_the_best_where_fake_tensors_tell_nothing(curve, time):
    seconds, (peak, rows, forward) = CURVES[time][0], BLIND[curve]
    costs = _costs(seconds, peak, lambda b: None, rows, forward)
    found = best_batch(costs, 9000, 512)
    assert len(found.probes) <= 3 and peak(found.batch) <= 9000
    assert all(p.fits for p in found.probes) or curve == "one row alone"
    best = max(b / seconds(b) for b in range(1, 513) if peak(b) <= 9000)
    assert found.batch / seconds(found.batch) >= 0.9 * best


def test_the_batch_lies_between_runs_where_the_largest_took_too_much():
    """Memory that grows faster than the rows ends above the room, or runs out."""
    peak = lambda b: 10 * b + b * b // 30  # noqa: E731
    for room in (8900, 9000, 9900):
        costs = _costs(lambda b: 1e-2 + 1e-5 * b, peak, lambda b: None)
        found = best_batch(costs, room, 512)
        assert peak(found.batch) <= room


def test_too_little_memory_is_said_with_the_numbers():
    with pytest.raises(MemoryError, match="not even one row fits: a step needs 4 kB .* and 2 kB may be taken"):
        best_batch(_costs(lambda b: b, lambda b: 5000 * b), 2000, 8)
    # one that fake tensors think to fit, and that does not
    costs = _costs(lambda b: 1e-3 + 1e-4 * b, lambda b: 3000 * b, traced=lambda b: 100 * b)
    found = best_batch(costs, 9000, 64) if costs.run(8).fits else None
    assert found is None
    blind = _costs(lambda b: 1e-3 + 1e-4 * b, lambda b: 100 * b, traced=lambda b: None)
    assert best_batch(blind, 9000, 64).batch <= 90
    narrow = _costs(lambda b: 1.0, lambda b: 8000 * b, traced=lambda b: None)
    assert best_batch(narrow, 9000, 64).batch == 1


def test_batches_are_rounded_to_what_devices_like():
    assert [rounded(b, 100) for b in (1, 2, 3, 7, 9, 20, 99)] == [1, 2, 4, 8, 16, 24, 100]


RANKS = """
import json, sys
import torch, torch.distributed as dist
from tilesmith.models.sizing.batch_size import best_batch
from tilesmith.models.sizing.probes import agreed, probe
from tilesmith.models.sizing.sample_inputs import sample_of
from tilesmith.models.sizing.batch_size import Costs
from tilesmith.models.sizing.probes import Probe
from ranks import leave
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
given = sample_of(model)
found = probe(model, given, 4, backward=True, device=torch.device("cpu"))
run = lambda b: max(agreed(Probe(b, 1e-3 + (1 + rank) * 1e-4 * b, 100 * b, 0)), key=lambda p: p.seconds)
costs = Costs(lambda b: 80 * b, run, 100, 50, 0, 0, 0, True)
batch = best_batch(costs, 9000 - 4000 * rank, 512).batch
peak = lambda b: max(3000, 20 * b)
seconds = lambda b: 1e-3 + (1 + rank) * 1e-4 * b
one = lambda b, apart=False: Probe(b, seconds(b), peak(b), 0, True, *((20 * b, 15 * b) if apart else ()))
run = lambda b, **apart: max(agreed(one(b, **apart)), key=lambda p: p.seconds)
blind = best_batch(Costs(lambda b: None, run, 100, 50, 0, 0, 0, True), 9000 - 4000 * rank, 512).batch

class Fails(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        if rank:
            raise KeyError("only here")
        return x * self.w
try:
    probe(Fails(), sample_of(model, torch.ones(1, 2)), 2, backward=True, device=torch.device("cpu"))
    said = ""
except RuntimeError as error:
    said = str(error)
print(json.dumps([found.seconds, found.peak, batch, said, blind]))
leave()
"""


def test_all_ranks_get_one_answer(tmp_path):
    command = [sys.executable, "-c", RANKS]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, **piped) for rank in range(2)
    ]
    outs = [process.communicate(timeout=120) for process in ran]
    assert all(process.returncode == 0 for process in ran), outs
    first, second = (json.loads(out.decode().splitlines()[-1]) for out, _ in outs)
    assert first == second and 1 <= first[2] <= 50 and 100 <= first[4] <= 250
    assert "failed on rank 1: KeyError('only here')" in first[3]


FACTS = {
    "sm90": ("cuda", "bfloat16", "triton"),
    "sm75": ("cuda", "float16, with a GradScaler", "triton"),
    "gfx942": ("cuda", "bfloat16", "triton"),
    "pvc": ("xpu", "bfloat16", "triton"),
    "apple": ("mps", "bfloat16", "portable"),
    "cpu": ("cpu", "bfloat16", "PyTorch's own"),
}


@pytest.mark.parametrize("arch", FACTS)
def test_rules_precision_and_attention_follow_the_facts(arch):
    pytest.importorskip("triton" if FACTS[arch][2] == "triton" else "torch")
    kind, precision, attention = FACTS[arch]
    with assuming(arch_named(arch)):
        hal = HardwareAbstractionLayer()
        assert hal.device.type == kind
        model, device = hal.optimize_for_hardware(build("llama")), hal.arch.device_name
    told = " ".join(str(model.tilesmith_report).split())
    assert f"Fitted to {device}" in told
    assert f"computes in {precision.partition(',')[0]} too" in told and precision.partition(", ")[2] in told
    assert f"Attention: {attention};" in told or f": {attention}, because" in told
    rules = {row.rule for row in model.tilesmith_report.replaced}
    assert ("attention" in rules) == (arch != "cpu") and "loss" in rules
    if arch == "cpu":
        assert "Rules left out, as no kernel of the library serves their ops there: norm" in told
    tilesmith.undo(model)


def test_no_gpu_of_amd_is_taken_for_hopper():
    assert arch_named("gfx90a").capability == arch_named("sm90").capability
    q = torch.empty(1, 16, 2048, 128, dtype=torch.bfloat16, device="meta")
    assert tilesmith.explain("attention", q, q, q, arch="gfx90a").kernel.backend == "triton"


def test_a_dtype_that_fits_is_used_and_another_refused():
    hal, x = _layer(), torch.randn(2, 5, 16)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    assert hal.optimize_for_hardware(model, dtype=torch.bfloat16) is model
    assert "under autocast to bfloat16" in str(model.tilesmith_report)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            wanted = tilesmith.undo(model)(x)
        torch.testing.assert_close(hal.optimize_for_hardware(model, dtype=torch.bfloat16)(x), wanted)
    assert "under autocast to bfloat16" in str(hal.optimize_for_hardware(model).tilesmith_report)
    with pytest.raises(ValueError, match=r"runs under autocast to torch.bfloat16 already, not torch.float16; call"):
        hal.optimize_for_hardware(model, dtype=torch.float16)
    with (
        assuming(arch_named("sm75")),
        pytest.raises(ValueError, match="does not compute in bfloat16; it does in float32"),
    ):
        HardwareAbstractionLayer().optimize_for_hardware(nn.Linear(2, 2), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="dtype must be torch.bfloat16, torch.float16 or None"):
        hal.optimize_for_hardware(nn.Linear(2, 2), dtype=torch.int8)


def test_rules_are_those_that_optimize_uses_by_default():
    """The rule of biases costs the host more than the device gains, but where blocks are recorded."""
    replaced = lambda model: {(row.rule, row.fqn) for row in model.tilesmith_report.replaced}  # noqa: E731
    with assuming(arch_named("sm90")):
        fitted = HardwareAbstractionLayer().optimize_for_hardware(build("gpt2"))
    assert replaced(fitted) == replaced(tilesmith.optimize(build("gpt2")))
    recorded = tilesmith.optimize(build("gpt2"), graphs=True)
    assert "bias" in {rule for rule, _ in replaced(recorded)}
    with assuming(arch_named("sm90")):
        HardwareAbstractionLayer().optimize_for_hardware(recorded)
    assert {"bias", "graphs"} <= {rule for rule, _ in replaced(recorded)}


CHANGES = {
    "checkpointing": checkpoint_layers,
    "fit_sequence": lambda m: tilesmith.fit_sequence(m, 32, tile_tokens=8),
    "rules": tilesmith.optimize,
    "dtype": lambda m: m.bfloat16(),
    "frozen": lambda m: m.model.requires_grad_(False),
    "attention": lambda m: m.set_attn_implementation("sdpa"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_is_of_what_a_step_costs(change):
    model = build("llama")
    before = fingerprint(model)
    model.eval()(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    assert fingerprint(model) == before and hash(before)
    CHANGES[change](model)
    assert fingerprint(model) != before


def test_probes_of_a_model_that_changed_are_run_anew():
    torch.manual_seed(0)
    model, hal = build("llama"), _layer()
    plain = [hal.memory_estimate(model, 2, sequence_length=48) for _ in range(2)]
    CHANGES["checkpointing"](model)
    found, new = (layer.memory_estimate(model, 2, sequence_length=48) for layer in (hal, _layer()))
    assert plain[0] == plain[1] and found.step == pytest.approx(new.step, rel=0.05) and found.step < 0.9 * plain[0].step


def test_probes_under_another_autocast_are_run_anew():
    hal, sample = _layer(), torch.randn(4, 32)
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.BatchNorm1d(512), nn.Linear(512, 8))
    alone = _layer().memory_estimate(model, 16, sample=sample).step
    with torch.autocast("cpu", torch.bfloat16):
        cast = hal.memory_estimate(model, 16, sample=sample).step
    assert hal.memory_estimate(model, 16, sample=sample).step == alone != cast


class _Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()


def test_a_fake_pass_draws_no_numbers_and_inference_mode_is_left():
    hal, model, sample = HardwareAbstractionLayer([]), _Drawing(32, 8), torch.randn(4, 32)
    before = random.getstate(), torch.get_rng_state()
    hal.memory_estimate(model, 16, sample=sample, calibrate=False)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    wanted = hal.memory_estimate(model, 16, sample=sample)
    with torch.inference_mode():
        assert HardwareAbstractionLayer([]).memory_estimate(model, 16, sample=sample) == wanted
        assert HardwareAbstractionLayer([]).memory_estimate(model, 16, sample=sample * 2) == wanted


def test_lengths_beyond_the_positions_are_refused_not_cut():
    model, hal = build("gpt2"), _layer()
    for ask in (hal.memory_estimate, hal.estimate_memory_usage):
        words = r"sequence_length must be at most 64, the positions in the model's configuration, got 65; .* sample="
        with pytest.raises(ValueError, match=words):
            ask(model, 2, sequence_length=65)
    with pytest.raises(ValueError, match=r"get_optimal_batch_size: sequence_length must be at most 64"):
        hal.get_optimal_batch_size(model, sequence_length=65)
    with pytest.raises(ValueError, match="sequence_length must be at least 1, got 0"):
        hal.memory_estimate(model, 2, sequence_length=0)
    assert hal.memory_estimate(model, 2).total == hal.memory_estimate(model, 2, sequence_length=64).total


def test_inputs_of_a_wrapped_model_are_those_of_its_base():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    base, model = sample_of(build("llama")), peft.get_peft_model(build("llama"), config)
    assert {n: x.tolist() for n, x in sample_of(model).kwargs.items()} == {
        n: x.tolist() for n, x in base.kwargs.items()
    }
    estimate = _layer().memory_estimate(model, 2, sequence_length=16)
    assert estimate.calibrated
    assert estimate.gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)


def test_devices():
    assert HardwareAbstractionLayer([]).device == CPU
    assert HardwareAbstractionLayer(detect_available_devices()["cpu"]).devices == [CPU]
    with pytest.raises(TypeError, match="target_devices must be a list of devices or None, got 'cuda'"):
        HardwareAbstractionLayer("cuda")
    with pytest.raises(TypeError, match="target_devices has 3, which is not a torch.device"):
        HardwareAbstractionLayer([3])
    with assuming(arch_named("sm90")):
        HardwareAbstractionLayer(["cuda:0", "cuda:1"])
        with pytest.raises(ValueError, match="of several types"):
            HardwareAbstractionLayer(["cuda:0", "cpu"])
    if not torch.xpu.is_available():
        with pytest.raises(ValueError, match="xpu:7 is not available; there are "):
            HardwareAbstractionLayer(["xpu:7"])


BAD = [
    (lambda h: h.optimize_for_hardware("model"), TypeError, "model must be a torch.nn.Module, got str"),
    (lambda h: h.optimize_for_hardware(nn.Linear(2, 2, device="meta")), ValueError, "weight is on meta"),
    (
        lambda h: h.get_optimal_batch_size(nn.Linear(2, 2)),
        ValueError,
        "inputs of Linear cannot be inferred .* give sample=",
    ),
    (lambda h: h.get_optimal_batch_size(nn.Linear(2, 2), sample=3), TypeError, "sample must be a tensor, a tuple or a"),
    (lambda h: h.get_optimal_batch_size(nn.Linear(2, 2), sample={}), ValueError, "sample has no tensor with a first"),
    (lambda h: h.get_optimal_batch_size(nn.Linear(2, 2), max_batch_size=0), ValueError, "max_batch_size must be at le"),
    (lambda h: h.get_optimal_batch_size(nn.Linear(2, 2), memory_fraction=2), ValueError, "memory_fraction must be in"),
    (lambda h: h.estimate_memory_usage(nn.Linear(2, 2), 0), ValueError, "batch_size must be at least 1"),
    (lambda h: h.estimate_memory_usage(nn.Linear(2, 2), True), TypeError, "batch_size must be an int"),
    (
        lambda h: h.estimate_memory_usage(nn.Linear(2, 2), 2, optimizer="adam"),
        TypeError,
        "optimizer must be a torch.optim.Optimizer, a class of one such as torch.optim.AdamW, .* got 'adam'",
    ),
    (
        lambda h: h.get_optimal_batch_size(nn.Linear(2, 2), optimizer="adam"),
        TypeError,
        "get_optimal_batch_size: optimizer must be a torch.optim.Optimizer",
    ),
    (
        lambda h: h.memory_estimate(nn.Linear(2, 2), 2, sample=torch.ones(2, 2), optimizer=lambda p: 3),
        TypeError,
        "optimizer must make a torch.optim.Optimizer of a list of parameters, it made int",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(_layer())


def test_a_model_elsewhere_is_not_run():
    with assuming(arch_named("sm90")):
        hal = HardwareAbstractionLayer()
        with pytest.raises(ValueError, match="the model is on cpu, the target is cuda; call optimize_for_hardware"):
            hal.get_optimal_batch_size(KNOWN["sequential"]())
        assert not hal.memory_estimate(KNOWN["sequential"](), 4).calibrated


def _module(**answers):
    return types.SimpleNamespace(**{name: (lambda *_, value=value: value) for name, value in answers.items()})


def test_capacity_of_each_kind_of_device(monkeypatch, tmp_path):
    fake = types.SimpleNamespace(
        device=torch.device,
        cuda=_module(mem_get_info=(50, 100), memory_reserved=30, memory_allocated=20),
        xpu=_module(
            get_device_properties=types.SimpleNamespace(total_memory=80), memory_reserved=30, memory_allocated=5
        ),
        mps=_module(recommended_max_memory=64, current_allocated_memory=4),
    )
    monkeypatch.setattr(capacity, "torch", fake)
    assert (capacity_of("cuda").total, capacity_of("cuda").available) == (100, 60)
    assert (capacity_of("xpu").total, capacity_of("xpu").available) == (80, 75)
    assert (capacity_of("mps").total, capacity_of("mps").available) == (64, 60)
    with pytest.raises(ValueError, match="a meta device does not report its memory"):
        capacity_of("meta")
    limit, usage, statistics = (tmp_path / name for name in ("max", "current", "stat"))
    monkeypatch.setattr(capacity, "_CGROUPS", ((str(limit), str(usage), str(statistics)),))
    assert capacity_of("cpu").source != "the container's limit"
    limit.write_text("max\n")
    assert capacity_of("cpu").source != "the container's limit"
    limit.write_text("1000000\n")
    usage.write_text("400000\n")
    assert capacity_of("cpu") == capacity.Capacity(1_000_000, 600_000, "the container's limit")
    for told in ("anon 100000\ninactive_file 250000\n", "inactive_file 7\ntotal_inactive_file 250000\n"):
        statistics.write_text(told)  # files that were read take no memory from the process
        assert capacity_of("cpu").available == 850_000


def test_what_runs_out_of_memory_is_a_finding(monkeypatch):
    def out(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(probes, "_measured", out)
    model = KNOWN["sequential"]()
    assert not probe(model, sample_of(model), 4, backward=True, device=CPU).fits
    with pytest.raises(MemoryError, match="ran out of memory"):
        _layer().get_optimal_batch_size(model, max_batch_size=8)
    assert batch_size.MOST_PROBES == 3
