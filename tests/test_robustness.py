"""What a process meets: threads, forks, caches that are broken or read-only, memory that runs out, odd calls."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilesmith
from tilesmith import ops
from tilesmith.engine import backends, tuning
from tilesmith.engine.table import Row, Table, append, user_file
from tilesmith.runtime import cache
from tilesmith.settings import settings
from tilesmith.validate import fuzz

THREADS = """
import threading, traceback, torch, tilesmith
torch.set_num_threads(1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
count, faults, found = 8, [], {}
barrier = threading.Barrier(count)

def first_calls(number):
    try:
        barrier.wait()
        from tilesmith import ops
        x, weight = torch.arange(64.0).reshape(4, 16).requires_grad_(), torch.ones(16, requires_grad=True)
        q = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8)
        y = ops.rms_norm(x, weight)
        y.sum().backward()
        out, lse = ops.attention(q, q, q, ops.Mask(causal=True))
        loss = ops.linear_cross_entropy(x.detach(), torch.ones(5, 16), torch.tensor([0, 1, 2, 3]))
        model = tilesmith.optimize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8)))
        assert len(model.tilesmith_report.replaced) == 1
        found[number] = y, x.grad, weight.grad, out, lse, loss
    except BaseException:
        faults.append(traceback.format_exc())

threads = [threading.Thread(target=first_calls, args=(number,)) for number in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not faults, faults[0]
assert all(torch.equal(a, b) for each in found.values() for a, b in zip(found[0], each)) and len(found) == count
"""

FORK = """
import os, sys, torch

def asked(*args):
    raise AssertionError("the driver was asked before the fork, after which no child could use the GPU")

asks = ("is_available", "device_count", "current_device", "get_device_properties", "init", "_lazy_init")
real = {name: getattr(torch.cuda, name) for name in asks}
for name in asks:
    setattr(torch.cuda, name, asked)
import tilesmith
from tilesmith import ops
torch.set_num_threads(1)
x, weight = torch.arange(64.0).reshape(4, 16), torch.ones(16)
expected = ops.rms_norm(x, weight)
child = os.fork()
if not child:
    for name, function in real.items():
        setattr(torch.cuda, name, function)
    same = torch.equal(ops.rms_norm(x, weight), expected)
    leaf = x.clone().requires_grad_()
    ops.layer_norm(leaf, weight, weight).sum().backward()
    with tilesmith.use(rms_norm="reference"):
        same &= torch.equal(ops.rms_norm(x, weight), expected)
    if torch.cuda.is_available():
        same &= torch.allclose(ops.rms_norm(x.cuda(), weight.cuda()).cpu(), expected, rtol=1e-5)
    model = tilesmith.optimize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8)))
    os._exit(0 if same and leaf.grad is not None and model.tilesmith_report.replaced else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    "code",
    [THREADS, pytest.param(FORK, marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are of Unix"))],
    ids=["threads", "fork"],
)
def test_first_calls_in_threads_and_after_a_fork(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TILESMITH_CACHE_DIR", str(tmp_path / "kept"))
    settings.cache_clear()
    Table.of.cache_clear()
    yield tmp_path / "kept"
    monkeypatch.undo()
    settings.cache_clear()
    Table.of.cache_clear()


ROW = Row("triton.rms_norm", "float32", {"rows": 8}, {"pause": 1}, 1.0, 0.1, "t", "t", "d", "2026-01-01")
HOME = "tilesmith.ops.norm.triton.norm"
SHIPPED = "tilesmith.ops.rotary.triton.rope"  # a family whose rows the package brings


@pytest.mark.parametrize("text", ["", "[{", "{}x", '[{"kernel": "triton.rms_norm"}]', "[3]", "3", "\0\xff"])
def test_tuning_rows_that_cannot_be_read_are_named_and_passed_over(cache_dir, text):
    path = user_file("tilesmith.ops.rotary", "sm90")
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match=rf"{path.name} cannot be read .* delete the file"):
        table = Table.of(SHIPPED, "sm90")
    shipped = Table.of(SHIPPED, "sm90").rows
    assert table.rows == shipped and shipped  # those of the package serve
    with pytest.warns(UserWarning, match="cannot be read"):
        append(SHIPPED, "sm90", [ROW])
    assert Table.of(SHIPPED, "sm90").rows == (*shipped, ROW)


def test_a_row_of_another_version_is_not_used(cache_dir):
    pytest.importorskip("triton")
    x, weight = torch.ones(64, 4096), torch.ones(4096)
    kernel = tilesmith.engine.ops()["rms_norm"].kernel("triton").fn.configure
    plain = kernel.on(tilesmith.hardware.arch_named("sm90"), (x, weight, 1e-6, 0.0, "fp32"), {})
    dims = kernel.space.dims(x, weight, 1e-6, 0.0, "fp32")
    append(HOME, "sm90", [dataclasses.replace(ROW, kernel=kernel.name, dims=dims, config={"gone": 1})])
    kernel._found.clear()
    assert kernel.on(tilesmith.hardware.arch_named("sm90"), (x, weight, 1e-6, 0.0, "fp32"), {}) == plain


def test_tuned_rows_that_cannot_be_kept_serve_their_call(cache_dir, monkeypatch):
    cache_dir.write_text("a file where a folder is wanted")  # as good as read-only, also for root
    monkeypatch.setattr(tuning, "search", lambda configure, args: type("Found", (), {"config": "best"})())
    monkeypatch.setattr(tuning, "row_of", lambda *given: ROW)
    configure = type("Configure", (), {"fn": type("F", (), {"__module__": HOME})})()
    with pytest.warns(UserWarning, match="cannot be kept: .*TILESMITH_CACHE_DIR"):
        assert tuning.at_first_call(configure, (torch.ones(2),)) == "best"


def test_compiled_kernels_that_are_damaged_are_compiled_anew(cache_dir):
    cache.write("kernel", b"an image")
    assert cache.read("kernel") == b"an image"
    path = cache.directory() / "kernel"
    for damaged in (path.read_bytes()[:-1], path.read_bytes().replace(b"image", b"imago"), b"", b"an image"):
        path.write_bytes(damaged)
        assert cache.read("kernel") is None
    cache.write("kernel", b"an image")
    assert cache.read("kernel") == b"an image"


class Exhausted(TorchDispatchMode):
    """The n-th operation that PyTorch dispatches finds no memory."""

    def __init__(self, after: int):
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("there is no memory left")
        return func(*args, **(kwargs or {}))


def _step(x, weight, head, labels):
    hidden = ops.rms_norm(ops.swiglu(x, x), weight)
    out, _ = ops.attention(*(3 * [hidden.view(1, 4, 2, 8).transpose(1, 2)]), ops.Mask(causal=True))
    loss = ops.linear_cross_entropy(out.transpose(1, 2).reshape(4, 16), head, labels, chunk_tokens=2)
    loss.backward()
    return loss.detach()


def test_memory_that_runs_out_in_the_middle_leaves_everything_as_it_was():
    generator = torch.Generator().manual_seed(0)
    x, weight, head = (torch.randn(*shape, generator=generator) for shape in ((4, 16), (16,), (7, 16)))
    leaves, labels = [t.requires_grad_() for t in (x, weight, head)], torch.tensor([0, 1, 2, 3])
    values = [t.detach().clone() for t in leaves]
    expected = _step(*leaves, labels)
    gradients = [t.grad.clone() for t in leaves]
    failed = 0
    for after in range(40):
        for leaf in leaves:
            leaf.grad = None
        try:
            with Exhausted(after):
                _step(*leaves, labels)
        except torch.OutOfMemoryError:
            failed += 1
        assert all(torch.equal(t, value) for t, value in zip(leaves, values))
    assert 10 < failed < 40
    for leaf in leaves:
        leaf.grad = None
    assert torch.equal(_step(*leaves, labels), expected)
    assert all(torch.equal(t.grad, gradient) for t, gradient in zip(leaves, gradients))


def test_a_model_is_whole_when_memory_runs_out_during_optimize():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)) for _ in range(3)))
    classes, state = [type(m) for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    for after in (0, 1, 5, 20, 60):
        try:
            with Exhausted(after):
                tilesmith.optimize(model)
        except torch.OutOfMemoryError:
            assert [type(m) for m in model.modules()] == classes
        tilesmith.undo(model)
        assert [type(m) for m in model.modules()] == classes
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert len(tilesmith.optimize(model).tilesmith_report.replaced) == 3


def test_calls_changed_at_random():
    """A part of what `python -m tilesmith.validate.fuzz 10000` does on a GPU; hypothesis makes a failure small."""
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies

    names = [name for name in sorted(tilesmith.engine.ops()) if fuzz.small_cases(name)]

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @hypothesis.given(strategies.sampled_from(names), strategies.randoms(use_true_random=False))
    def calls(name, draw):
        outcome = fuzz.attempt(name, draw, "cpu")
        assert outcome.verdict != "failure", outcome

    calls()


def test_a_failure_is_found_and_repeated_by_its_seed(monkeypatch):
    op = tilesmith.engine.ops()["silu"]
    monkeypatch.setattr(op, "check", lambda *args: None)
    monkeypatch.setattr(fuzz, "check_each", lambda *args: (_ for _ in ()).throw(IndexError("out of range")))
    (outcome,) = fuzz.fuzzed(["silu"], [7], "cpu")
    assert outcome.verdict == "failure" and outcome.message == "IndexError: out of range" and outcome.seed == 7
    assert fuzz.attempt("silu", random.Random(7), "cpu", 7) == outcome
    told = fuzz.report([outcome], torch.device("cpu"), 7, 1, 1.0, "command")
    assert told["verdicts"] == {"failure": 1} and told["failures"][0]["op"] == "silu" and told["cases"] == 1
    assert {"ops", "seed", "device", "versions", "date"} <= set(told)


def test_calls_alike_differ_in_sizes_and_values_alone():
    """Those for which the same kernels are compiled: of 8 calls, one draw of dtype, layouts and flags."""
    outcomes = list(fuzz.fuzzed(["softmax"], range(48), "cpu", alike=8))
    calls = [outcomes[place : place + 8] for place in range(0, 48, 8)]
    assert all(len({(one.dtype, one.case.split()[0]) for one in group}) == 1 for group in calls)
    assert len({one.case for one in outcomes}) > 3 and len({one.dtype for one in outcomes}) > 1
    assert max(len({one.changes for one in group}) for group in calls) > 4
    assert 64 not in fuzz._sizes_like(48) and fuzz._sizes_like(64) == [64] and fuzz._sizes_like(80) == [80, 96, 112]
    assert fuzz._sizes_like(33) == [n for n in range(33, 64) if n != 48] and fuzz._sizes_like(1) == [1]


ONE_PROCESS = """
import json, sys
done = int(sys.argv[sys.argv.index("--done") + 1])
for seed in range(done, 6):
    told = {"op": "silu", "seed": seed, "case": "", "dtype": "", "changes": [], "message": ""}
    print(json.dumps(told | {"verdict": "begun"}), flush=True)
    if seed == 3:
        sys.exit(9)
    print(json.dumps(told | {"verdict": "right"}), flush=True)
print()
"""


def test_a_process_that_ends_in_a_call_is_a_failure_of_that_call():
    command = [sys.executable, "-c", ONE_PROCESS]
    found = fuzz.in_processes(command, 1, None)
    assert [outcome.seed for outcome in found] == list(range(6))
    assert [outcome.seed for outcome in found if outcome.verdict == "failure"] == [3]
    assert "ended with code 9" in found[3].message
    assert fuzz.in_processes(command, 1, 0.0) == []  # its time is over


def test_processes_share_out_all_calls(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "fuzzed", lambda names, seeds, device, alike: [_right(seed) for seed in seeds])
    chosen = {"count": 700, "seed": 5, "alike": 3, "only": None, "device": "cpu", "processes": 4, "done": 0}
    made = []
    for part in range(4):
        fuzz._run_part(argparse.Namespace(**chosen, part=part))
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
        made.append([one["seed"] for one in told if one["verdict"] == "right"])
        assert [one["seed"] for one in told if one["verdict"] == "begun"] == made[-1]
    assert sorted(seed for part in made for seed in part) == list(range(5, 705))
    assert max(map(len, made)) - min(map(len, made)) <= 3 * 4  # one draw of three calls in each round of the ops


def _right(seed):
    return fuzz.Outcome("silu", seed, "", "", (), "right")


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, []), (1.5, ["aten"])])
def test_wrong_results_are_faults(factor, wrong):
    op = tilesmith.engine.ops()["linear"]
    fn = op.kernel("aten").fn
    case = next(c for c in fuzz.small_cases("linear") if torch.float32 in c.dtypes)
    op.replace_kernel("aten", lambda *args: fn(*args) * factor)
    try:
        found = fuzz._wrong(op, case, torch.device("cpu"), torch.float32)
    finally:
        op.replace_kernel("aten", fn)
    assert [result.kernel for result in found] == wrong


def test_words_that_packed_weights_have_not():
    """How many they have is known to the device alone: the reference says so, kernels write no further."""
    op = tilesmith.engine.ops()["quantize_packed"]
    case = next(c for c in fuzz.small_cases("quantize_packed") if c.name == "transposed")
    args = case.build(torch.device("cpu"), torch.float32, case.generator())
    codes, needed = op(*args.values()), args["words"]
    few = min(range(64 * args["order"].numel(), needed, 32), default=None)
    assert few is not None, "the case has tiles of more than 2 bits"
    with tilesmith.use(quantize_packed="reference"), pytest.raises(ValueError, match=f"words is {few}; these strips"):
        op(*(args | {"words": few}).values())
    if backends.interpreting() and not backends.missing("triton", torch.device("cpu"), pinned=True):
        with tilesmith.use(quantize_packed="triton"):
            assert torch.equal(op(*(args | {"words": few}).values()), codes[:few])
    tables = [args[name] for name in ("scale", "zero", "order", "strips")]
    with pytest.raises(ValueError, match="dequantize_packed: codes has 32 words; .* tiles of 2 to 8 bits have"):
        ops.dequantize_packed(codes[:32], *tables, args["weight"].shape[0])
