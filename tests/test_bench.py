"""Timing measures what it says, and each op is measured beside its peers, or a row says why not."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from clock import Clock
from devices import ON_GPU
from tilesmith import runtime
from tilesmith.bench import host, peers, ranks, run, tables
from tilesmith.bench.missing import Missing, absent, only
from tilesmith.engine import Case, T, cases, timing
from tilesmith.engine.timing import Timing, host_time, interleave, launches, measure, peak_memory

CPU = torch.device("cpu")


def test_a_timing_is_the_median_with_the_interquartile_range():
    found = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.median_us, found.spread, found.rounds) == (3.0, 2 / 3, (5.0, 1.0, 3.0, 2.0, 4.0))
    assert Timing.of([2.0]).spread == 0.0


@pytest.fixture
def clock(monkeypatch):
    """The clock that timings read, which only its own sleep advances."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_measure_tells_slow_from_fast(clock):
    slow, fast = (lambda: clock.sleep(0.03)), (lambda: clock.sleep(0.003))
    times = measure({"slow": slow, "fast": fast}, CPU, rounds=5, budget_ms=8)
    assert list(times) == ["slow", "fast"]
    assert times["slow"].rounds == pytest.approx((30_000,) * 5)
    assert times["fast"].rounds == pytest.approx((3_000,) * 5)
    assert [t.spread for t in times.values()] == pytest.approx([0.0, 0.0])


def test_measure_reads_a_clock_that_runs():
    times = measure({"sleep": lambda: time.sleep(0.003)}, CPU, rounds=1, budget_ms=3)
    assert times["sleep"].median_us >= 3_000


def test_rounds_interleave_each_begun_by_another_and_in_another_order():
    order = []
    interleave(5, {name: (lambda name=name: order.append(name) or 1.0) for name in "abcde"})
    rounds = [order[i : i + 5] for i in range(0, 25, 5)]
    assert [each[0] for each in rounds] == list("abcde")
    assert all(sorted(each) == list("abcde") for each in rounds)
    assert len({pair for each in rounds[:4] for pair in itertools.pairwise(each)}) == 16  # nobody twice after the same
    found = interleave(4, {"only": lambda: 1.0})["only"]
    assert found.rounds == (1.0,) * 4
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        interleave(0, {})


def test_host_time_is_time_per_call(clock):
    found = host_time({"sleep": lambda: clock.sleep(0.001)}, CPU, rounds=2, calls=5)["sleep"]
    assert found.rounds == pytest.approx((1_000,))


def test_host_time_is_that_of_the_calmer_rounds(clock):
    paces = itertools.chain([1] * 20, [9] * 2, [1] * 2, [9] * 2, [2] * 2)  # ten calls of each to warm up, four rounds
    variants = {name: (lambda ms=ms: clock.sleep(1e-3 * ms * next(paces))) for name, ms in (("a", 1), ("b", 3))}
    found = host_time(variants, CPU, rounds=4, calls=1)
    assert found["a"].rounds == pytest.approx((1_000, 2_000))
    assert found["b"].rounds == pytest.approx((3_000, 6_000))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are placed on Linux")
def test_threads_share_a_core_and_get_their_own_back():
    before = os.sched_getaffinity(0)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with timing._one_core():
            assert len(os.sched_getaffinity(0) | os.sched_getaffinity(other.native_id)) == 1
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == before
    finally:
        done.set()
        other.join()


def test_peak_memory_counts_what_lives_at_once():
    x = torch.randn(256, 256)
    assert peak_memory(lambda: (x + x).relu_(), CPU) == x.nbytes
    assert peak_memory(lambda: (x + x).relu() * x, CPU) == 2 * x.nbytes
    assert peak_memory(lambda: None, CPU) == 0


def test_launches_count_operators_on_a_cpu():
    x = torch.randn(4, 4)
    assert launches(lambda: x + x, CPU) == 1
    assert launches(lambda: (x + x).relu(), CPU) == 2


def test_long_calls_run_untimed_before_they_are_timed(monkeypatch, clock):
    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = clock.now

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    module = SimpleNamespace(Event=Event, synchronize=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device, state = SimpleNamespace(type="xpu"), {"after": ""}

    def variant(name, seconds):
        def call():  # the first two calls after another's are faster
            state["calls"] = state["calls"] + 1 if state["after"] == name else 1
            state["after"] = name
            clock.sleep(seconds * (0.8 if state["calls"] <= 2 else 1.0))

        return timing._plan(call, device, lambda: None, 3, 20.0)

    for seconds, calls, untimed in ((2**-13, 20, 0), (2**-9, 10, 10), (2**-5, 1, 2)):
        ours, theirs = variant("ours", seconds), variant("theirs", seconds)
        assert (ours.calls, ours.untimed) == (theirs.calls, theirs.untimed) == (calls, untimed)
        for plan in (ours, theirs, ours):
            assert timing._device_round(plan, device, lambda: None) == pytest.approx(seconds * 1e6)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_device_time_leaves_the_host_s_pauses_out():
    x = torch.randn(2**24, device="cuda")

    def with_pause():
        time.sleep(0.002)
        return x + x

    times = measure({"plain": lambda: x + x, "pause": with_pause}, "cuda")
    assert times["pause"].median_us < 1.3 * times["plain"].median_us
    assert launches(lambda: x + x, "cuda") == 1
    assert peak_memory(lambda: x + x, "cuda") == x.nbytes


@pytest.fixture
def op(monkeypatch):
    """An op with one small case, and a peer that is not installed."""
    op = peers.ops()["swiglu"]
    cases = [Case("tiny", {"gate": T(8, 16), "up": T(8, 16)})]
    monkeypatch.setattr(run, "cases", lambda name: cases)
    monkeypatch.setattr(run, "ceilings", lambda device: run.Ceilings(copy=1e9, matmul=1e10))

    def elsewhere(args):
        import a_package_that_nobody_has  # noqa: F401

    def unwilling(args):
        raise Missing("the peer has no tiny")

    monkeypatch.setitem(peers.PEERS, "swiglu", {"elsewhere": elsewhere, "unwilling": unwilling})
    return op


def test_an_op_is_measured_beside_its_peers(op):
    found = run.run("swiglu", CPU, torch.float32, command="the command", tag="test", only=("pytorch",), rounds=5)
    rows = {(row["pass"], row["provider"]): row for row in found["rows"]}
    assert set(rows) == {(p, by) for p in ("forward", "backward") for by in ("tilesmith", "pytorch")}
    ours = rows["forward", "tilesmith"]
    assert ours["best_peer"] == "pytorch"
    assert ours["times_best_peer"] == pytest.approx(rows["forward", "pytorch"]["us"] / ours["us"], rel=1e-3)
    assert ours["difference"] == 0.0
    assert rows["forward", "pytorch"]["difference"] < 1e-6
    assert ours["TB/s"] == pytest.approx(3 * 8 * 16 * 4 / ours["us"] / 1e6, rel=1e-3)
    assert rows["backward", "tilesmith"]["peak_bytes"] > 0
    assert (found["command"], found["subject"], found["rounds"]) == ("the command", "swiglu", 5)


def test_portable_kernels_are_measured_through_vulkan(op, missing):
    reason = runtime.missing("vulkan")
    if reason is not None:
        missing(reason)
    found = run.run("swiglu", CPU, torch.float32, command="", tag="test", only=("tilesmith:vulkan",), rounds=5)
    rows = {(row["pass"], row["provider"]): row for row in found["rows"]}
    assert set(rows) == {("forward", "tilesmith"), ("backward", "tilesmith"), ("forward", "tilesmith:vulkan")}
    assert rows["forward", "tilesmith:vulkan"]["us"] > 0
    assert rows["forward", "tilesmith:vulkan"]["difference"] < 1e-6
    assert "best_peer" not in rows["forward", "tilesmith"]


def test_attention_is_measured_in_e4m3_where_that_is_named(monkeypatch):
    monkeypatch.setattr(run, "ceilings", lambda device: run.Ceilings(copy=1e9, matmul=1e10))
    only = ("tilesmith:e4m3", "cudnn_e4m3")
    found = run.run("attention", CPU, torch.bfloat16, command="", named=("causal",), only=only, rounds=5)
    rows = {(row["pass"], row["provider"]): row for row in found["rows"]}
    assert 1e-3 < rows["forward", "tilesmith:e4m3"]["difference"] < 0.1
    assert rows["backward", "tilesmith:e4m3"]["us"] > 0
    assert "error" in rows["forward", "cudnn_e4m3"]
    assert "best_peer" not in rows["forward", "tilesmith"]


def test_a_peer_without_a_figure_is_a_row_with_the_reason(op):
    found = run.run("swiglu", CPU, torch.float32, command="", tag="test", only=("elsewhere", "unwilling"), rounds=5)
    reasons = {row["provider"]: row["error"] for row in found["rows"] if "error" in row}
    assert reasons == {
        "elsewhere": "a_package_that_nobody_has is not installed",
        "unwilling": "the peer has no tiny",
    }


def test_a_peer_that_leaves_out_a_gradient_has_no_time_for_its_backward(op, monkeypatch):
    def detached(args):
        return lambda: torch.nn.functional.silu(args["gate"].detach()) * args["up"]

    monkeypatch.setitem(peers.PEERS, "swiglu", {"detached": detached})
    found = run.run("swiglu", CPU, torch.float32, command="", tag="test", only=("detached",), rounds=5)
    rows = {row["pass"]: row for row in found["rows"] if row["provider"] == "detached"}
    assert rows["forward"]["us"] > 0
    assert rows["backward"]["error"] == "its backward leaves out gradients that ours computes"


def test_the_products_of_a_loss_are_a_floor_and_no_peer():
    found = run.run(
        "linear_cross_entropy", CPU, torch.float32, command="", named=("plain",), only=("pytorch", "products"), rounds=5
    )
    rows = {row["provider"]: row for row in found["rows"]}
    assert rows["products"]["us"] > 0 and rows["products"]["difference"] < 1e-6
    assert rows["tilesmith"]["best_peer"] == "pytorch"
    case = next(c for c in run.cases("linear_cross_entropy") if c.name == "plain")
    args = case.build(CPU, torch.float64, case.generator())
    inputs = (args["x"], args["weight"])
    gradients = [
        torch.autograd.grad(peers.providers("linear_cross_entropy")[name](args)(), inputs)
        for name in ("tilesmith", "products")
    ]
    torch.testing.assert_close(*gradients)


def test_ours_must_not_fail(op, monkeypatch):
    def broken(name, only=()):
        def adapter(args):
            raise RuntimeError("a kernel failed")

        return {"tilesmith": adapter}

    monkeypatch.setattr(run, "providers", broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        run.run("swiglu", CPU, torch.float32, command="", tag="test")


def test_no_case_left_names_those_there_are(op):
    with pytest.raises(ValueError, match="swiglu has no case 'huge'. Known: tiny"):
        run.run("swiglu", CPU, torch.float32, command="", named=("huge",))


@pytest.mark.parametrize("pages", [0, 5])
def test_an_indexed_write_appends_what_ours_does(pages):
    from tilesmith.ops.attn.cases.cache import _append

    case = Case("x", _append(2, 3, 2, 16, 8, lengths=(4, 1), q_heads=4, rotated=12, positions=40, pages=pages))
    ours, theirs = (case.build(CPU, torch.float32, case.generator()) for _ in range(2))
    made = [
        run.Call(peers.providers("kv_cache_append")[by](args), args, ()).once()
        for by, args in (("tilesmith", ours), ("pytorch", theirs))
    ]
    torch.testing.assert_close(*made)
    for name in ("k_cache", "v_cache"):
        assert ours[name].isfinite().any()
        torch.testing.assert_close(ours[name], theirs[name], equal_nan=True)


@pytest.mark.parametrize("name", peers.EAGER)
def test_eager_pytorch_computes_what_the_reference_does(name):
    op, compared = peers.ops()[name], 0
    for case in run.cases(name):
        if "test" in case.tags and torch.float32 in case.dtypes and not case.args.get("p"):  # each drops its own
            args = case.build(CPU, torch.float64, case.generator())
            try:
                found = peers.EAGER[name](**args)
            except Missing:
                continue
            gap = run.difference(found, peers.reference(op)(**args))
            # None: empty results; NaN: both say that nothing is there to average
            assert gap is None or gap != gap or gap < 1e-5, case.name
            compared += 1
    assert compared


@pytest.mark.parametrize("name", [n for n, found in peers.PEERS.items() if set(found) - {"liger", "quack"}])
def test_a_peer_of_pytorch_s_own_computes_a_case_or_says_why_not(name):
    for case in run.cases(name):
        served = "test" in case.tags and torch.float32 in case.dtypes
        for by in set(peers.PEERS[name]) - {"liger", "quack"} if served else ():
            build = lambda case=case: case.build(CPU, torch.float32, case.generator())  # noqa: E731
            try:
                call = peers.PEERS[name][by](build())
            except Missing:
                continue
            if by != "compile":
                gap = run.difference(call(), peers.ops()[name](**build()))
                assert gap is None or gap != gap or gap < 1e-4, (case.name, by)


def test_compiled_attention_is_not_asked_for_no_keys():
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 0, 16)
    with pytest.raises(Missing, match="divides by the number of keys"):
        peers.providers("attention")["flex"]({"q": q, "k": k, "v": k})


def test_what_a_peer_overwrites_is_said(op, monkeypatch):
    def in_place(args):
        return lambda: args["gate"].data.fill_(1.0) * args["up"] * args["gate"]

    monkeypatch.setitem(peers.PEERS, "swiglu", {"in_place": in_place})
    found = run.run("swiglu", CPU, torch.float32, command="", tag="test", only=("pytorch", "in_place"), rounds=5)
    assert {r["provider"]: r.get("overwrites") for r in found["rows"] if r["pass"] == "forward"} == {
        "tilesmith": None,
        "pytorch": None,
        "in_place": ["gate"],
    }
    text = tables.markdown(found)
    assert " †" in next(line for line in text.splitlines() if "forward" in line)
    assert "† overwrites its arguments" in text
    others = [row for row in found["rows"] if row["provider"] != "in_place"]
    assert "†" not in tables.markdown({**found, "rows": others})


def test_offers_are_checked_in_words():
    only({"a": 1, "b": None}, "peer", a=1, b=2)
    absent({"a": 0.0, "b": None, "c": False}, "peer", "a", "b", "c", "d")
    with pytest.raises(Missing, match="peer has no a=3"):
        only({"a": 3}, "peer", a=1)
    with pytest.raises(Missing, match="peer has no a"):
        absent({"a": 0.5}, "peer", "a")


def test_a_kernel_of_ours_can_be_measured_by_its_backend():
    assert not any(":" in name for name in peers.providers("silu"))
    named = {"named": ("small",), "rounds": 1}
    found = run.run("silu", CPU, torch.float32, command="x", only=("pytorch", "tilesmith:reference"), **named)
    assert {r["provider"] for r in found["rows"]} == {"tilesmith", "tilesmith:reference", "pytorch"}
    assert all(r["best_peer"] == "pytorch" for r in found["rows"] if r["provider"] == "tilesmith")
    named["named"] = (cases("rms_norm")[0].name,)
    found = run.run("rms_norm", CPU, torch.float32, command="x", only=("tilesmith:hopper",), **named)
    assert "Hopper" in next(r["error"] for r in found["rows"] if r["provider"] == "tilesmith:hopper")


def test_a_backend_without_a_backward_kernel_has_no_time_for_it():
    found = run.run(
        "softmax", CPU, torch.float32, command="x", only=("tilesmith:portable",), named=("scale",), rounds=1
    )
    ours = {r["pass"]: r for r in found["rows"] if r["provider"] == "tilesmith:portable"}
    assert ours["forward"]["us"] > 0
    assert ours["backward"]["error"] == "softmax_vjp has no portable kernel"


def test_the_forward_alone():
    found = run.run(
        "silu", CPU, torch.float32, command="x", only=("pytorch",), named=("small",), rounds=1, forward=True
    )
    assert {r["pass"] for r in found["rows"]} == {"forward"}
    with pytest.raises(ValueError, match="cross_entropy is measured forward and backward together"):
        run.run("cross_entropy", CPU, torch.float32, command="x", tag="test", forward=True)


def test_host_time_of_ours_and_pytorch():
    found = host.run(CPU, torch.float32, command="x", only=("pytorch",), named=("rms_norm", "attention"), rounds=2)
    assert {(r["case"], r["pass"], r["provider"]) for r in found["rows"] if "us" in r} == {
        (op, p, by)
        for op in ("rms_norm", "attention")
        for p in ("forward", "forward+backward")
        for by in ("tilesmith", "pytorch", "nothing")
    }
    assert all(r["launches"] > 0 for r in found["rows"] if r["provider"] != "nothing")
    assert all(r["best_peer"] == "pytorch" for r in found["rows"] if r["provider"] == "tilesmith")
    assert "| attention | forward |" in tables.markdown(found)
    with pytest.raises(ValueError, match="got swish"):
        host.run(CPU, torch.float32, command="x", named=("swish",))


@pytest.mark.parametrize("op", host.OPS)
def test_host_time_has_small_inputs_of_each_op(op):
    found = host.run(CPU, torch.float32, command="x", only=("none",), named=(op,), rounds=1)
    assert [(r["case"], r["provider"]) for r in found["rows"]] == [(op, by) for by in ("tilesmith", "nothing")] * 2


def test_differences_are_relative_and_shapes_must_agree():
    x = torch.ones(4)
    assert run.difference((x, None), (2 * x, None)) == 0.5
    assert run.difference(x, torch.ones(5)) is None


def test_gradients_of_every_output_are_measured():
    x = torch.ones(3, requires_grad=True)
    call = run.Call(lambda: (x * 2, x * 3, torch.ones(1)), {}, (x,))
    assert torch.equal(call.both()()[0], torch.full((3,), 5.0))
    assert call.backward()()[0].shape == x.shape
    assert not call.once()[0].requires_grad


def test_work_without_a_formula_has_no_rate():
    found = SimpleNamespace(median_us=2.0, spread=0.0)
    assert run.figures(found, {}, CPU) == {"us": 2.0, "spread": 0.0}


@pytest.mark.parametrize("name", [n for n in peers.ops() if not n.endswith("_vjp") and run.cases(n)])
def test_every_op_says_what_work_it_needs(name):
    op = peers.ops()[name]
    case = next(c for c in run.cases(name) if "test" in c.tags and torch.float32 in c.dtypes)
    args = case.build(CPU, torch.float32, case.generator())
    inputs = tuple(v for v in args.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    call = run.Call(lambda: op(**args), args, inputs)
    forward = run.work(op, call, backward=False)
    assert max(forward.values()) > 0
    if inputs and op.vjp is not None:
        backward = run.work(op, call, backward=True)
        assert max(backward.values()) > 0
        assert backward.keys() == forward.keys()


def test_a_difference_that_is_no_number_is_none():
    nan, zero, one = torch.tensor([1.0, math.nan]), torch.zeros(2), torch.ones(2)
    assert run.difference(one, one) == run.difference(zero, zero) == 0.0
    assert run.difference(2 * one, one) == 1.0
    assert run.difference(one, nan) is run.difference(nan, one) is run.difference(one, zero) is None
    assert run.difference(one / 0, one) is None


def test_a_round_before_the_first_counts_only_for_long_steps(monkeypatch):
    took = {"short": 0.1, "far behind": 0.2, "longest": 2.5}
    steps = {name: ranks.Step(lambda: None) for name in took}
    asked = []
    monkeypatch.setattr(ranks, "seconds", lambda step, device: asked.append(step) or took[names[id(step)]])
    names = {id(step): name for name, step in steps.items()}
    found = ranks.rounds({f"{ranks.ALONE}: {name}": step for name, step in steps.items()}, torch.device("cpu"), 5)
    assert [len(times) for times in found.values()] == [5, 5, 3]
    assert [asked.count(step) for step in steps.values()] == [6, 6, 3]
    assert [len(times) for times in ranks.rounds(steps, torch.device("cpu"), 5).values()] == [5, 2, 2]
