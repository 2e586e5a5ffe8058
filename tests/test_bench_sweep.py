"""Sweeps run every op along its axes, and their plots show what the rows say."""

from __future__ import annotations

import importlib.util
import json
import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilesmith import ops as families
from tilesmith.bench import document, peers, plots, run, sweep, sweep_inputs
from tilesmith.engine import T, cases, ops
from tilesmith.engine.timing import measure

CPU = torch.device("cpu")
families.load()
FORWARD = sorted(name for name in ops() if not name.endswith("_vjp") and cases(name))
SWEEPS = [(op, axis) for op in FORWARD for axis in sweep.axes(op)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    limits = run.Ceilings(1e9, 1e10)
    monkeypatch.setattr(run, "ceilings", lambda device: limits)
    monkeypatch.setattr(sweep, "ceilings", lambda device: limits)
    monkeypatch.setattr(run, "measure", lambda calls, device, rounds: measure(calls, device, rounds=2, budget_ms=0.1))


def test_what_can_be_swept_is_an_op_with_an_axis():
    assert [op for op in sweep_inputs.INPUTS if not sweep.axes(op)] == []
    assert set(sweep_inputs.INPUTS) <= set(FORWARD)
    assert "rms_norm" in sweep.swept("columns")
    assert "attention" not in sweep.swept("vocabulary")


@pytest.mark.parametrize(("op", "axis"), SWEEPS)
def test_inputs_suit_the_op_at_both_ends_of_an_axis(op, axis):
    inputs = sweep_inputs.INPUTS[op][axis]
    large = inputs.values or sweep.AXES[axis].large
    ends = [(v, sweep_inputs.LARGE) for v in (large[0], large[-1])] + [(sweep.AXES[axis].small[0], sweep_inputs.SMALL)]
    for value, held in ends:
        for _, case in sweep.cases(op, axis, value, held):
            assert sum(2 * math.prod(t.shape) for t in case.args.values() if isinstance(t, T)) < 20e9
            with FakeTensorMode():
                out = ops()[op](**case.build(CPU, torch.bfloat16, case.generator()))
            first = out[0] if isinstance(out, tuple) else out
            assert first.requires_grad or ops()[op].vjp is None


def test_rows_say_where_on_the_axis_they_are():
    found = sweep.run("softmax", "columns", CPU, torch.float32, command="x", at=(8, 16), only=("pytorch",), rounds=2)
    assert (found["subject"], found["command"], found["rounds"]) == ("softmax-columns", "x", 2)
    assert found["sweep"] == {"op": "softmax", "axis": "columns", "label": "hidden size"}
    rows = {(r["at"], r["pass"], r["provider"]): r for r in found["rows"]}
    assert set(rows) == {
        (n, p, by) for n in (8, 16) for p in ("forward", "backward") for by in ("tilesmith", "pytorch")
    }
    assert rows[16, "forward", "tilesmith"]["shapes"]["x"] == [32, 16]
    assert rows[16, "forward", "pytorch"]["TB/s"] > 0
    assert found["ceilings"] == {"copy": 1e9, "matmul": 1e10}


def test_panels_can_be_chosen():
    named = {"command": "x", "at": (16,), "only": ("pytorch",), "rounds": 2}
    found = sweep.run("attention", "tokens", CPU, torch.float32, named=("causal",), **named)
    assert {row["panel"] for row in found["rows"]} == {"head dim 16, causal"}
    with pytest.raises(
        ValueError, match="attention has no panel 'window'. Known: head dim 16, causal, head dim 16, full"
    ):
        sweep.run("attention", "tokens", CPU, torch.float32, named=("window",), **named)
    with pytest.raises(ValueError, match="rms_norm has no panel 'wide'. There is none"):
        sweep.run("rms_norm", "columns", CPU, torch.float32, named=("wide",), **named)


def test_who_was_measured_nowhere_is_said_in_a_word(capsys):
    bench_command = pytest.importorskip("tilesmith.cli.bench")
    errors = [{"case": f"{n} rows", "provider": "liger", "pass": "forward", "error": "not installed"} for n in (1, 2)]
    found = {"subject": "silu", "hardware": {"name": "cpu"}, "rows": errors}
    bench_command._show(found)
    bench_command._show({**found, "rows": [*errors, {**errors[0], "case": "3 rows", "provider": "quack"}]})
    told = " ".join(capsys.readouterr().out.split())
    assert "not measured: liger: not installed (all 2 cases)" in told
    assert "not measured: liger: not installed (1 rows, 2 rows)" in told and "quack: not installed (3 rows)" in told


def test_what_cannot_be_swept_is_said():
    with pytest.raises(ValueError, match="rms_norm cannot be swept along vocabulary; it has: columns, tokens"):
        sweep.run("rms_norm", "vocabulary", CPU, torch.float32, command="x")
    with pytest.raises(ValueError, match="values of columns must be at least 1, got 4, 0"):
        sweep.run("rms_norm", "columns", CPU, torch.float32, command="x", at=(4, 0))


def test_a_long_sweep_is_compiled_to_its_end(monkeypatch):
    compiled = []

    def count(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **named: original(fn, backend=count, **named))
    for size in range(2, 14):
        x = torch.randn(3, size)
        assert torch.equal(peers.providers("silu")["compile"]({"x": x})(), torch.nn.functional.silu(x))
    assert len(compiled) == 12


@pytest.fixture
def saved(tmp_path):
    """The path of a saved sweep with two providers, and two panels of one pass each; a third provider has no figure."""
    rows = []
    for at in (512, 1024, 50257):
        for panel, name in (("full", "forward"), ("causal", "backward")):
            for provider, us in (("tilesmith", at / 10), ("somebody", at / 5)):
                row = {"at": at, "panel": panel, "pass": name, "provider": provider, "us": us, "TFLOP/s": 1e3 / us}
                rows.append({**row, "TB/s": 1.0, "bound": "matmul"})
            rows.append({"at": at, "panel": panel, "pass": name, "provider": "quack", "error": "is not installed"})
    more = {"dtype": "bfloat16", "rounds": 5, "ceilings": {"copy": 4e12, "matmul": 7e14}}
    about = {"op": "attention", "axis": "tokens", "label": "sequence length"}
    made = document.document("attention-tokens", CPU, "tilesmith bench attention", rows, sweep=about, **more)
    return document.save(made, tmp_path / "results")


def test_a_saved_sweep_is_drawn(saved, tmp_path, missing):
    if not importlib.util.find_spec("matplotlib"):
        missing("matplotlib is not installed")
    paths = plots.plot(document.load(saved), tmp_path / "plots")
    assert [p.name for p in paths] == [
        f"attention-tokens-{what}.{kind}" for what in ("time", "rate") for kind in ("svg", "png")
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths if p.suffix == ".png")
    rate = paths[2].read_text()
    for text in ("full, forward", "causal, backward", "TFLOP/s", "% of it", "tilesmith", "somebody", "sequence length"):
        assert text in rate
    assert "matmul measured here: 700 TFLOP/s" in rate
    assert ">1k<" in rate
    assert ">50257<" in rate
    assert ">quack<" not in rate  # its name is no entry of the legend
    assert "tilesmith bench attention" in " ".join(re.sub(r"<[^>]*>", " ", rate).split())  # its lines are apart


def test_the_command_measures_saves_and_draws(tmp_path, monkeypatch, missing):
    typer_testing = pytest.importorskip("typer.testing")
    if not importlib.util.find_spec("matplotlib"):
        missing("matplotlib is not installed")
    from tilesmith import cli

    drawn = []
    monkeypatch.setattr(plots, "plot", lambda found, folder: drawn.append((found["subject"], folder)) or [folder])

    def tilesmith(*arguments):
        done = typer_testing.CliRunner().invoke(cli.build(), ["bench", *map(str, arguments)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, " ".join(done.output.split())

    here = ("--device", "cpu", "--against", "pytorch", "--out", tmp_path / "results", "--plot", tmp_path / "plots")
    code, output = tilesmith("silu", "--sweep", "columns=4,6", "--save", *here)
    assert code == 0, output
    assert "columns 6" in output
    path = tmp_path / "results" / "cpu" / "silu-columns.json"
    assert {row["at"] for row in json.loads(path.read_text())["rows"]} == {4, 6}
    assert tilesmith(path, "--plot", tmp_path / "plots")[0] == 0
    assert drawn == [("silu-columns", tmp_path / "plots")] * 2
    monkeypatch.undo()
    op = document.save({**document.load(path), "subject": "silu", "sweep": None, "rows": []}, tmp_path)
    for arguments, message in (
        (("silu", *here), "--plot is for ops with --sweep and a saved sweep"),
        (("silu", "--sweep", "rows", *here), "--sweep must be columns, tokens, vocabulary"),
        (("silu", "--sweep", "columns=a", *here), "--sweep columns=a: "),
        (("silu", "--sweep", "vocabulary", *here), "silu cannot be swept along vocabulary; it has: columns, tokens"),
        ((path,), "is a result; --plot FOLDER draws it"),
        ((path, "silu", *here), "plot saved results, or measure; not both at once"),
        (("no/such.json", *here[-2:]), "no/such.json does not exist; give a saved sweep"),
        ((op, *here[-2:]), "is not a sweep"),
    ):
        code, output = tilesmith(*arguments)
        assert code == 2
        assert message in output
