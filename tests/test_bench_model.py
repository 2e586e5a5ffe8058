"""The benchmark of a whole model: a row for every provider, or why it has none."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import time

import pytest
import torch

from tilesmith.bench import model, tables

CPU = torch.device("cpu")


def test_a_model_is_measured_as_built_and_as_optimised(missing):
    if not importlib.util.find_spec("transformers"):
        missing("transformers is not installed")
    marked = []
    found = model.run(
        model.SHAPES["tiny"],
        CPU,
        torch.float32,
        optimize=marked.append,
        command="x",
        only=("pytorch", "tilesmith"),
        rounds=2,
    )
    assert len(marked) == 1
    rows = {row["provider"]: row for row in found["rows"]}
    assert rows["pytorch"]["times_pytorch"] == 1.0
    assert rows["pytorch"]["peak_bytes"] > 4 * sum(p.numel() for p in marked[0].parameters())
    assert "| Llama, tiny, 2×64 | tilesmith |" in tables.markdown(found)


def test_a_model_stopped_while_timed_has_given_the_rounds_done(missing, monkeypatch):
    if not importlib.util.find_spec("transformers"):
        missing("transformers is not installed")
    given, left = [], [4 * 2]  # rounds of two providers

    def timed(step, device):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return 1000.0 * (1 + left[0] % 2)

    monkeypatch.setattr(model, "_timed", timed)
    named = {"optimize": id, "command": "x", "only": ("pytorch", "tilesmith"), "rounds": 5, "so_far": given.append}
    with pytest.raises(KeyboardInterrupt):
        model.run(model.SHAPES["tiny"], CPU, torch.float32, **named)
    assert [found["rounds"] for found in given] == [3, 4]
    assert [[row["provider"] for row in found["rows"]] for found in given] == [["pytorch", "tilesmith"]] * 2
    assert all(row["us"] > 0 and row["peak_bytes"] > 0 for found in given for row in found["rows"])
    assert "median of 3 interleaved rounds" in tables.markdown(given[0])


def test_a_model_that_takes_too_long_to_build_is_a_row_that_says_so(missing):
    if not importlib.util.find_spec("transformers"):
        missing("transformers is not installed")
    named = {"optimize": id, "command": "x", "rounds": 2, "limit": 0.001}
    found = model.run(model.SHAPES["tiny"], CPU, torch.float32, only=("pytorch",), **named)
    assert [row["error"] for row in found["rows"]] == ["TimeoutError: not built and run once within 0.001 s"]
    with pytest.raises(TimeoutError):
        model.run(model.SHAPES["tiny"], CPU, torch.float32, only=("tilesmith",), **named)


def test_a_timeout_that_nobody_passes_on_is_raised_at_the_end():
    with pytest.raises(TimeoutError), model._within(0.05), contextlib.suppress(TimeoutError):
        time.sleep(60)


def test_a_compiler_that_catches_the_timeout_is_stopped_all_the_same():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError) as caught, model._within(60):
        try:
            signal.raise_signal(signal.SIGALRM)  # as the timer does, and surely in here
        except TimeoutError as problem:
            raise RuntimeError("the backend failed") from problem
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(TimeoutError), model._within(0.05):
        with contextlib.suppress(TimeoutError):
            time.sleep(60)
        time.sleep(60)
    with pytest.raises(KeyError), model._within(60):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timeout_that_comes_at_once_leaves_no_timer(monkeypatch):
    before, start = signal.getsignal(signal.SIGALRM), signal.setitimer

    def started(which, seconds, *again):
        start(which, seconds, *again)
        if seconds:
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(signal, "setitimer", started)
    with pytest.raises(TimeoutError), model._within(60):
        pytest.fail("the time was over before")
    left = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    start(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert left == ((0.0, 0.0), before)


def test_private_copies_of_a_module_share_nothing(missing):
    if not importlib.util.find_spec("transformers"):
        missing("transformers is not installed")
    import transformers.models.llama.modeling_llama as original

    with model._private_copy(model.LLAMA) as copy:
        from transformers.models.llama import modeling_llama as seen

        assert seen is copy
        copy.apply_rotary_pos_emb = None
    assert original.apply_rotary_pos_emb is not None
    assert importlib.import_module(model.LLAMA) is original
