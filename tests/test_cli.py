"""The command line: exit codes, errors in words, and the demo from end to end on a very small model."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tilesmith
from tilesmith.bench import document
from tilesmith.bench.run import Ceilings
from tilesmith.engine import cases, ops
from tilesmith.hardware import arch_named
from tilesmith.validate import Budget, Result

typer_testing = pytest.importorskip("typer.testing")

from tilesmith import _install, cli  # noqa: E402
from tilesmith.cli import charts, demo, equality, output, recorder, subject, text, training  # noqa: E402

OP = "swiglu"


def run(*arguments: str):
    """Exit code and all output of `tilesmith ...`, in this process."""
    result = typer_testing.CliRunner().invoke(cli.build(), [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_help_names_every_command():
    code, output = run("--help")
    assert code == 0
    for command in ("demo", "doctor", "explain", "verify", "bench", "optimize"):
        assert command in output


def test_help_loads_no_torch():
    code = "import sys; from tilesmith.cli import build; build(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from tilesmith.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"tilesmith: the command line needs typer. Install with: {_install.command('cli')}\n"


def test_doctor_tells_devices_versions_and_choices():
    code, output = run("doctor", "--json", "--device", "cpu")
    found = json.loads(output)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][-1]["device"] == "cpu"
    listed = [row["op"] for row in found["ops"]]
    assert {n for n in ops() if not n.endswith("_vjp") and cases(n)} <= set(listed)
    assert f"{OP}_vjp" in listed
    assert len(listed) == len(set(listed))
    assert "triton" in next(row for row in found["ops"] if row["op"] == OP)["rejected"]
    assert found["problems"] == []


def test_doctor_prints_tables():
    code, output = run("doctor", "--device", "cpu", "--verbose")
    assert code == 0
    assert "Kernels on cpu" in output


def test_doctor_says_what_is_fast_first_and_each_reason_once():
    code, output = run("doctor", "--device", "cpu")
    assert code == 0 and len(output.splitlines()) < 25
    output = " ".join(output.split())
    assert "Plain PyTorch, the reference, serves" in output
    assert output.count("Hopper kernels need an NVIDIA GPU") == 1
    assert "tilesmith explain rms_norm --arch sm90" in output


def test_doctor_says_what_telling_of_a_gpu_needs(monkeypatch):
    monkeypatch.setattr("tilesmith.engine.backends.triton_missing", lambda: "Triton is not installed")
    code, output = run("doctor", "--device", "cpu")
    output = " ".join(output.split())
    assert code == 0 and f"{_install.triton()}, then tilesmith explain rms_norm --arch sm90" in output
    assert "TRITON_INTERPRET" not in output  # verify runs what serves calls, as the interpreter does not


def test_explain_knows_gpus_that_are_not_here(missing):
    if not importlib.util.find_spec("triton"):
        missing("triton is not installed")
    sizes = ("--shape", "x=4096x8192", "--shape", "weight=8192")
    code, output = run("explain", "rms_norm", "--arch", "sm90", *sizes)
    assert code == 0 and "For H100 (sm90, 132 SMs), from the known facts about that GPU; nothing was run." in output
    assert "rms_norm_vjp -> hopper" in output
    code, output = run("explain", "rms_norm", "--arch", "gfx942", *sizes)
    assert "rms_norm -> triton" in output and "not hopper: gfx942" in output
    code, output = run("explain", "rms_norm", "--arch", "cpu", *sizes)
    assert code == 0 and "For a CPU, from the known facts about CPUs; nothing was run." in output
    assert str(arch_named("cpu")) == "cpu"
    code, output = run("explain", "linear_cross_entropy", "--arch", "sm80", "--json")
    assert json.loads(output)["choices"][0]["kernel"] == "triton"
    for device, kernel in (("cuda", "triton"), ("xpu", "triton"), ("mps", "portable")):
        if not getattr(torch, device).is_available():
            code, output = run("explain", OP, "--device", device)
            assert code == 0 and f"{OP} -> {kernel}" in output, device


def test_explain_and_the_choice_it_explains_have_one_rule():
    (choice, *_) = recorder.choices_of(ops()[OP], {n: torch.randn(3, 8) for n in ("gate", "up")}, arch_named("cpu"))
    assert choice.kernel.backend == "reference"


def test_version_and_module():
    assert run("--version") == (0, f"tilesmith {tilesmith.__version__}\n")
    done = subprocess.run([sys.executable, "-m", "tilesmith", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tilesmith {tilesmith.__version__}\n"


@pytest.mark.parametrize("started", ["module", "script"])
def test_a_wrong_environment_is_said_in_a_line(started, tmp_path):
    wrong = {**os.environ, "TILESMITH_DEBG": "1"}
    script = tmp_path / "tilesmith"  # as an installed package has it
    script.write_text("from tilesmith.cli import main\nmain()\n")
    command = ["-m", "tilesmith"] if started == "module" else [str(script)]
    done = subprocess.run([sys.executable, *command, "doctor"], capture_output=True, text=True, check=False, env=wrong)
    assert done.returncode == 2
    assert done.stderr.startswith("tilesmith: the environment has TILESMITH_DEBG='1'") and done.stderr.count("\n") == 1


def test_a_missing_path_is_said_before_anything_is_imported():
    code = "import sys; from tilesmith.cli import main; sys.argv = ['tilesmith', 'optimize', 'no/such']\n"
    code += "try: main()\nexcept SystemExit as stop: sys.exit(stop.code if 'torch' not in sys.modules else 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 2


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("", 160), ("wide", 160), ("0", 160)])
def test_a_pipe_is_as_wide_as_columns_say(monkeypatch, columns, width):
    import io

    from rich.console import Console

    from tilesmith.cli import output

    monkeypatch.setenv("COLUMNS", columns)
    assert Console(file=io.StringIO(), width=output._width(io.StringIO())).width == width


def test_tune_knows_what_ops_there_are():
    code, output = run("tune", "nope", "--device", "cpu")
    assert code == 2 and "there is no op 'nope'" in output


def test_explain_says_which_kernel_and_why_not_another():
    code, output = run("explain", OP, "--device", "cpu")
    assert code == 0
    assert f"{OP} -> reference" in output
    assert f"{OP}_vjp -> reference" in output
    assert "not triton: " in output


def test_explain_takes_shapes_and_values():
    sizes = ("--shape", "gate=3x5", "--shape", "up=3x5", "--dtype", "bf16")
    code, output = run("explain", OP, "--device", "cpu", *sizes)
    assert code == 0
    assert "gate bfloat16[3, 5], up bfloat16[3, 5]" in output
    code, output = run("explain", "rms_norm", "--device", "cpu", "--set", "eps=0.5", "--set", "casting=llama")
    assert code == 0
    assert "eps 0.5" in output
    assert "casting 'llama'" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "swigul"), "there is no op 'swigul'. Did you mean 'swiglu'?"),
        (("explain", OP, "--shape", "gate:3"), "--shape must be NAME=SIZExSIZE"),
        (("explain", OP, "--shape", "nothing=3"), "takes gate, up"),
        (("explain", OP, "--set", "oops"), "--set must be NAME=VALUE"),
        (("explain", OP, "--case", "smal"), "swiglu has no case 'smal'. Did you mean 'small'?"),
        (("explain", "attention", "--case", "zzz"), "d128_dropout_small and "),
        (("explain", OP, "--shape", "gate=3x5"), "up"),
        (("explain", OP, "--dtype", "float33"), "'float33' is not a dtype"),
        (
            ("explain", "attention", "--dtype", "int8"),
            "--dtype int8 is not supported; use float32, float16, bfloat16 or",
        ),
        (("explain", OP, "--device", "gpu7"), "'gpu7' is not a device here"),
        (("verify", OP, "--device", "xpu:9"), "is not on this machine"),
        (("verify", "nothing"), "there is no op 'nothing'"),
        (("bench",), "name what to measure"),
        (("bench", OP, "--case", "smal", "--device", "cpu"), "swiglu has no case 'smal'. Did you mean 'small'?"),
        (("bench", OP, "--case", "small", "--case", "smal", "--device", "cpu"), "swiglu has no case 'smal'"),
        (("bench", OP, "silu", "--case", "smal", "--device", "cpu"), "swiglu, silu have no case 'smal'. Did you mean"),
        (("bench", OP, "--against", "ligr", "--device", "cpu"), "swiglu has no provider 'ligr'. Did you mean 'liger'?"),
        (("bench", OP, "--against", "liger,nope", "--device", "cpu"), "no provider 'nope'. Known: compile, liger,"),
        (("bench", "host", "--against", "ligr", "--device", "cpu"), "host has no provider 'ligr'"),
        (
            ("bench", "host", "--case", "rms_nrm", "--device", "cpu"),
            "host has no case 'rms_nrm'. Did you mean 'rms_norm'?",
        ),
        (
            ("bench", "model", "--against", "ligr", "--device", "cpu"),
            "model has no provider 'ligr'. Did you mean 'liger'?",
        ),
        (("bench", "model", "--case", "small", "--device", "cpu"), "--case is for ops, ops with"),
        (("bench", "attention", "--sweep", "tokens", "--case", "windo", "--device", "cpu"), "has no panel 'windo'"),
        (("bench", OP, "--sweep", "tokens=4,x"), "--sweep tokens=4,x: values must be whole numbers, as in tokens=512"),
        (("bench", "model", "--zoo", "3", "--device", "cpu"), "--zoo: model cannot be drawn from models; ops that can"),
        (("bench", "host", "--zoo", "3"), "--zoo: host cannot be drawn from models"),
        (("bench", "context-parallel", "--zoo", "3"), "--zoo: context-parallel cannot be drawn from models"),
        (("bench", OP, "rope", "--zoo", "3"), "--zoo: rope cannot be drawn from models"),
        (("bench", OP, "--zoo", "3", "--decode"), "--zoo: decode is a call of attention, not of swiglu"),
        (("bench", "all", "--zoo", "3", "--sweep", "tokens"), "--zoo draws the calls"),
        (("bench", OP, "--count", "3"), "--count is for ops with --zoo; swiglu cannot take it: leave it out"),
        (("bench", "attention", "--decode"), "--decode is for ops with --zoo; attention cannot take it"),
        (("bench", OP, "--shape", "tiny", "--device", "cpu"), "--shape is for model; swiglu cannot take it"),
        (("bench", "host", OP, "--limit", "5", "--device", "cpu"), "--limit is for model and context-parallel; host"),
        (
            ("bench", "model", "--forward"),
            "is for ops, ops with --sweep and ops with --zoo; model cannot take it",
        ),
        (("bench", "host", "model", "--tag", "test"), "--tag is for ops; host and model cannot take it: leave it out"),
        (("bench", "context-parallel", "--device", "cuda"), "context-parallel cannot take it: leave it out"),
        (("bench", "context-parallel", "--dtype", "float32"), "--dtype is for ops"),
        (("bench", "context-parallel", "--sweep", "tokens"), "--sweep is for ops"),
        (("bench", "context-parallel", "--json"), "--json is for ops"),
        (("bench", "model", "--sweep", "tokens"), "--sweep is for ops"),
        (("bench", "no.json", "--forward"), "no.json cannot take it"),
        (("bench", OP, "--sweep", "tokens", "--tag", "test"), "--tag is for ops; swiglu cannot take it"),
        (("bench", "--readme", "README.md", "--forward"), "--readme cannot take it"),
        (("bench", OP, "--readme", "README.md"), "--readme measures nothing; leave swiglu out"),
        (("bench", OP, "--tag", "nope", "--device", "cpu"), "case of swiglu is tagged nope; their tags are: bench, "),
        (("tune", "rms_norm", "--case", "nope", "--device", "cpu"), "rms_norm has no case 'nope'"),
        (("tune", "rms_norm", "--case", "small", "--case", "smal", "--device", "cpu"), "Did you mean 'small'?"),
        (("bench", "model", "--shape", "huge", "--device", "cpu"), "--shape must be one of"),
        (("bench", "--readme", "no/such/file"), "no/such/file does not exist; give a file with tables to fill"),
        (("optimize", "no/such/model"), "no/such/model does not exist"),
        (("verify", "attention", "silu", "--random", "3"), "can be drawn for silu; they can for attention"),
        (("demo", "--text", "no/such/text"), "no/such/text does not exist; give a text file"),
        (("demo", "--model", "no/such/model"), "no/such/model does not exist"),
        (("demo", "--model", ".", "--export", "model"), "--export writes the model that the demo makes"),
        (("explain", OP, "--arch", "sm90", "--device", "cpu"), "--device cpu one that is here; give one of them"),
        (("demo", "--out", "/proc/curves"), "--out /proc/curves cannot be written to: "),
        (("demo", "--export", "/proc/model"), "--export /proc/model cannot be written to: "),
        (("bench", OP, "--save", "--out", "/proc/results"), "--out /proc/results cannot be written to: "),
        (("bench", OP, "--sweep", "columns", "--plot", "/proc/plots"), "--plot /proc/plots cannot be written to: "),
        (("generate", ".", "-p", "x", "--seed", str(2**63)), "Invalid value for '--seed'"),
    ],
)
def test_wrong_use_exits_with_2_and_says_why(arguments, message):
    code, output = run(*arguments)
    assert code == 2
    assert message in " ".join(output.split())


@pytest.mark.parametrize("command", [(OP,), ("attention", "--set", "causal=true")])
def test_explain_indents_what_it_continues(command, monkeypatch):
    monkeypatch.setattr(output.console, "width", 80)
    code, told = run("explain", *command, "--device", "cpu")
    assert code == 0
    heads = re.compile(r"The sizes |\w+ (bfloat16|float32)\[|\w+ -> |  not \w+: |    ")
    lines = told.splitlines()
    assert all(len(line) <= 80 and heads.match(line) for line in lines), told
    assert any(line.startswith("    ") for line in lines)


@pytest.mark.parametrize("command", ["explain", "tune", "train", "codegen"])
def test_help_flows_its_paragraphs(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    code, told = run(command, "--help")
    body = told.partition("╭")[0].splitlines()
    longest = max(map(len, map(str.rstrip, body)))
    assert code == 0
    for line, after in itertools.pairwise(line.strip() for line in body):
        first = after.partition(" ")[0]
        assert not line or not first or len(line) + len(first) >= longest - 2, f"{line!r} could hold {first!r}"


def test_a_wrong_argument_is_answered_with_those_that_users_write():
    code, told = run("explain", "attention", "--device", "cpu", "--set", "foo=1")
    told = " ".join(told.split())
    assert code == 2 and "attention has no argument 'foo'" in told
    assert told.index("causal, ") < told.index("softcap") < told.index("q_documents") < told.index("window_left")
    code, told = run("explain", "attention", "--device", "cpu", "--set", "causl=true")
    assert code == 2 and "Did you mean 'causal'?" in told


def test_errors_keep_their_brackets():
    code, output = run("explain", "rms_norm", "--device", "cpu", "--set", "casting=[bold]")
    assert code == 2 and "'[bold]'" in output


def test_each_option_of_bench_says_what_takes_it():
    from tilesmith.cli import bench

    parameters = set(inspect.signature(bench.command).parameters) - {"context", "what"}
    assert parameters == set(bench.TAKERS)
    assert {kind for takers in bench.TAKERS.values() for kind in takers} == set(bench.KINDS)


def test_bench_takes_names_that_one_of_several_ops_has(monkeypatch):
    measured = []
    monkeypatch.setattr("tilesmith.bench.run.ceilings", lambda device: Ceilings(1e9, 1e10))
    monkeypatch.setattr(
        "tilesmith.bench.run.case_rows", lambda op, case, *a: measured.append((op.name, case.name, a[2])) or []
    )
    options = ("--device", "cpu", "--against", "liger,compile", "--case", "small", "--case", "erf")
    code, _ = run("bench", OP, "geglu", "add_relu", "linear_cross_entropy", *options)
    assert code == 0
    assert set(measured) == {
        (OP, "small", ("liger", "compile")),
        ("geglu", "small", ("liger", "compile")),
        ("geglu", "erf", ("liger", "compile")),
        ("add_relu", "small", ("compile",)),
    }


def test_a_zoo_of_several_ops_takes_peers_that_one_of_them_has(monkeypatch):
    measured = set()
    monkeypatch.setattr("tilesmith.bench.zoo.ceilings", lambda device: Ceilings(1e9, 1e10))
    monkeypatch.setattr("tilesmith.bench.zoo.case_rows", lambda op, case, *a: measured.add((op.name, a[2])) or [])
    options = ("--zoo", "3", "--count", "2", "--device", "cpu", "--against", "quack")
    code, told = run("bench", OP, "rms_norm", *options)
    assert code == 0 and f"{OP} has no provider quack" in told and "rms_norm has no provider" not in told
    assert measured == {(OP, ("tilesmith",)), ("rms_norm", ("quack",))}
    code, told = run("bench", OP, "geglu", *options)
    assert code == 2 and f"{OP}, geglu have no provider 'quack'" in told


def test_tune_finds_out_first_whether_its_rows_can_be_kept(monkeypatch):
    from tilesmith.cli import tune

    monkeypatch.setattr(tune, "settings", lambda: SimpleNamespace(cache_dir=Path("/proc/rows")))
    code, output = run("tune", "rms_norm", "--case", "small", "--device", "cpu", "--save")
    assert code == 2 and "TILESMITH_CACHE_DIR /proc/rows cannot be written to: " in " ".join(output.split())


def test_tune_says_where_there_is_nothing_to_search():
    code, output = run("tune", "rms_norm", "--case", "small", "--device", "cpu")
    assert code == 0 and "rms_norm: no kernel that serves these cases on cpu has a configuration to search" in output


def test_a_pin_that_cannot_serve_is_said():
    why = "rms_norm is pinned to hopper, which cannot serve this call: the tensors are on cpu"
    with tilesmith.use(rms_norm="hopper"):
        code, output = run("explain", "rms_norm", "--device", "cpu")
        assert code == 2 and f"error: {why}" in " ".join(output.split())
        code, output = run("doctor", "--device", "cpu", "--json")
    found = json.loads(output)
    assert code == 1 and any(problem.startswith(why) for problem in found["problems"])
    assert "rms_norm" not in [row["op"] for row in found["ops"]]


@pytest.mark.parametrize(
    ("pins", "message"), [("swiglu=nope", "swiglu has no kernel 'nope'; it has"), ("swigul=triton", "there is no op")]
)
def test_pins_of_nothing_are_said_in_a_line(pins, message):
    ran = subprocess.run(
        [sys.executable, "-m", "tilesmith", "explain", OP],
        env=os.environ | {"TILESMITH_USE": pins},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("tilesmith: TILESMITH_USE: ") and message in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_explain_takes_calls_that_fit_no_memory():
    sizes = [part for name in ("gate", "up") for part in ("--shape", f"{name}={2**24}x{2**20}")]
    code, output = run("explain", OP, "--device", "cpu", *sizes)
    assert code == 0 and f"{OP}_vjp -> reference" in output
    code, output = run("explain", OP, "--device", "cpu", "--shape", f"gate={2**62}x8", "--shape", f"up={2**62}x8")
    assert code == 2 and "no tensor has so many elements" in output


def test_explain_starts_from_a_call_of_the_benchmark(missing):
    if not importlib.util.find_spec("triton"):
        missing("triton is not installed")
    code, output = run("explain", "attention", "--arch", "sm80")
    assert code == 0
    sizes = "--shape q=2x64x4096x128 --shape k=2x8x4096x128 --shape v=2x8x4096x128"
    assert f"case gqa_64_8_4k; for your own call, give {sizes}." in " ".join(output.split())
    assert run("explain", "attention", "--arch", "sm80", *sizes.split())[0] == 0
    assert "q bfloat16[2, 64, 4096, 128], k bfloat16[2, 8, 4096, 128]" in output
    code, output = run("explain", "rms_norm", "--arch", "sm80", "--json")
    told = json.loads(output)
    assert (told["case"], told["arguments"]["weight"]) == ("16384x5120", "bfloat16[5120]")
    code, output = run("explain", "router_losses", "--arch", "sm80")
    assert code == 0 and "The sizes are those of the small test case small" in output
    code, output = run("explain", "attention", "--arch", "sm80", "--case", "causal")
    assert code == 0 and "for your own call" not in output


def test_explain_says_what_it_took_from_an_example_and_where_there_is_none():
    code, output = run("explain", "rms_norm", "--device", "cpu", "--shape", "x=4x64")
    assert code == 2 and "From the op's example, since no --shape gives it: weight 33" in " ".join(output.split())
    code, output = run("explain", "rms_norm", "--device", "cpu", "--shape", "x=4x64", "--shape", "weight=63")
    assert code == 2 and "From the op's example" not in output
    code, output = run("explain", "rms_norm_vjp", "--device", "cpu")
    assert code == 2 and "`tilesmith explain rms_norm` explains it with the forward" in " ".join(output.split())


def _explained(*sizes: str, arch: str = "sm80") -> str:
    code, output = run("explain", "attention", "--arch", arch, *(part for size in sizes for part in ("--shape", size)))
    assert code == 0, output
    return output


def test_explain_plans_the_call_that_was_given(missing):
    """Keys and values of one shape that are two tensors, on GPUs that are not here: see ops/attn/latent.py."""
    if not importlib.util.find_spec("triton"):
        missing("triton is not installed")
    output = _explained("q=8x32x1x128", "k=8x8x4096x128", "v=8x8x4096x128")
    assert "attention -> triton_split" in output
    assert "SHARED" not in output and "not loaded" not in output
    q, k, v = (
        torch.empty(8, h, t, 128, dtype=torch.bfloat16, device="meta") for h, t in ((32, 1), (8, 4096), (8, 4096))
    )
    planned = str(tilesmith.explain("attention", q, k, v, arch="sm80"))
    wanted = next(line for line in planned.splitlines() if "_attention_split_kernel" in line)
    assert wanted.strip() in " ".join(output.split())


def _results(passed: bool):
    def run_cases(names, device):
        yield Result(OP, "reference", "one", torch.float32, True, 1e-7, 2e-7)
        yield Result(OP, "triton", "one", torch.float32, passed, 3e-7, 2e-7, "" if passed else "out is off by 3e-07")

    return run_cases


def test_verify_exits_with_1_when_a_case_is_over_budget(monkeypatch):
    monkeypatch.setattr("tilesmith.validate.run_cases", _results(passed=False))
    code, output = run("verify", OP, "--device", "cpu")
    assert code == 1
    assert "out is off by 3e-07" in output
    assert f"ok  {OP} / reference: 1 of 1 within budget, worst at 50%" in output
    assert f"fails  {OP} / triton: 0 of 1 within budget, worst at 150%" in output
    code, output = run("verify", OP, "--device", "cpu", "--json")
    assert code == 1
    assert [row["passed"] for row in json.loads(output)] == [True, False]


def test_verify_runs_the_cases():
    code, output = run("verify", "silu", "--device", "cpu")
    assert code == 0
    assert "ok  silu / reference" in output


def test_verify_draws_cases_of_random_sizes():
    code, output = run("verify", "attention", "--device", "cpu", "--random", "3")
    assert code == 0
    assert "3 of 3 within budget" in output


def test_bench_prints_and_saves(tmp_path, monkeypatch):
    monkeypatch.setattr("tilesmith.bench.run.ceilings", lambda device: Ceilings(1e9, 1e10))
    first, second = [c.name for c in cases(OP) if "test" in c.tags][:2]
    options = ("--against", "pytorch", "--device", "cpu", "--save", "--out", tmp_path, "--case")
    code, output = run("bench", OP, *options, first)
    assert code == 0
    assert "backward" in output
    (path,) = tmp_path.rglob("*.json")
    assert {row["case"] for row in json.loads(path.read_text())["rows"]} == {first}
    assert run("bench", OP, *options, second)[0] == 0
    assert {row["case"] for row in json.loads(path.read_text())["rows"]} == {first, second}
    code, output = run("bench", OP, *("tilesmith:reference" if x == "pytorch" else x for x in options), second)
    assert code == 0 and "did not measure on the same cases: pytorch 2;" in " ".join(output.split())
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- bench:cpu/{OP} -->\n<!-- /bench -->\n")
    assert run("bench", "--readme", readme, "--out", tmp_path)[0] == 0
    assert "| forward |" in readme.read_text()


def test_a_result_that_cannot_be_read_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("tilesmith.bench.run.run", lambda *args, **how: pytest.fail("measured"))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / f"{OP}.json").write_text("{")
    code, told = run("bench", OP, "--device", "cpu", "--save", "--out", tmp_path)
    assert code == 2
    assert f"{OP}.json is not a saved result" in told.replace("\n", "")


def test_json_has_no_nan(capsys):
    """Which other readers refuse."""
    output.print_json({"error": float("inf"), "losses": [1.0, float("nan")], "at": (2, "x", None, True)})
    assert json.loads(capsys.readouterr().out) == {"error": None, "losses": [1.0, None], "at": [2, "x", None, True]}


def test_a_run_that_is_stopped_keeps_what_it_measured(tmp_path, monkeypatch):
    from tilesmith.bench import run as bench

    monkeypatch.setattr(bench, "ceilings", lambda device: Ceilings(1e9, 1e10))
    measured = bench.case_rows

    def stopped_at_the_third(*args):
        names.append(args[1].name)
        if len(names) == 3:
            raise KeyboardInterrupt
        return measured(*args)

    names: list[str] = []
    monkeypatch.setattr(bench, "case_rows", stopped_at_the_third)
    options = ("--against", "pytorch", "--device", "cpu", "--save", "--out", tmp_path)
    assert run("bench", OP, *options)[0] != 0
    (path,) = tmp_path.rglob("*.json")
    assert {row["case"] for row in json.loads(path.read_text())["rows"]} == set(names[:2])


@pytest.fixture
def config(tmp_path, missing):
    """A folder with the config.json of a tiny Llama."""
    if not importlib.util.find_spec("transformers"):
        missing("transformers is not installed")
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64).save_pretrained(tmp_path)
    return tmp_path


def test_optimize_reports_without_weights(config):
    code, output = run("optimize", config, "--dry-run", "--full")
    assert code == 0
    assert "model.layers.*.mlp ×2" in output
    code, output = run("optimize", config, "--dry-run")
    assert code == 0 and "mlp:        swiglu in LlamaMLP ×2" in output
    code, output = run("optimize", config / "config.json", "--dry-run", "--json")
    assert code == 0
    assert {row["action"] for row in json.loads(output)} == {"replaced", "skipped"}


@pytest.mark.parametrize("full", [(), ("--full",)])
def test_reports_keep_to_a_narrow_terminal(config, full, monkeypatch):
    code, wide = run("optimize", config, "--dry-run", *full)
    monkeypatch.setattr(output.console, "width", 60)
    code, told = run("optimize", config, "--dry-run", *full)
    assert code == 0 and told.split() == wide.split()
    assert max(map(len, wide.splitlines())) > 60 >= max(map(len, told.splitlines()))


def test_the_doctor_says_problems_as_they_are(monkeypatch):
    """In lines of the terminal's width, and with what rich would take for markup."""
    from tilesmith.cli import doctor

    found = doctor.examine("cpu") | {
        "problems": ["rms_norm is pinned to 'triton', which takes x of [batch, tokens] " * 2]
    }
    monkeypatch.setattr(doctor, "examine", lambda device: found)
    monkeypatch.setattr(output.console, "width", 60)
    code, told = run("doctor")
    assert code == 1 and max(map(len, told.splitlines())) <= 60
    assert " ".join(told.split()).endswith("! " + " ".join(found["problems"][0].split()))


def test_optimize_measures_before_and_after(config):
    code, output = run("optimize", config, "--device", "cpu", "--tokens", "16", "--rounds", "5")
    assert code == 0
    assert "training step" in output
    (memory,) = [line.split() for line in output.splitlines() if line.startswith("peak memory")]
    before, after = float(memory[2]), float(memory[4])
    assert memory[3] == memory[5] == "kB" and 1 <= after < 1000
    assert abs(float(memory[6].rstrip("×")) - before / after) < 0.011
    assert "what a step holds beside the weights, as far as torch's allocator handed it out" in output
    code, output = run("optimize", config, "--device", "cpu", "--tokens", "16", "--rounds", "5", "--json")
    step = json.loads(output)["step"]
    assert code == 0 and len(step["before"]["rounds_us"]) == len(step["after"]["rounds_us"]) == 5


def test_a_gain_is_told_only_beyond_the_spread():
    from tilesmith.cli.optimize import Step, _differ
    from tilesmith.engine.timing import Timing

    def steps(before, after):
        return {"before": Step(Timing.of(before), 1), "after": Step(Timing.of(after), 1)}

    assert not _differ(steps([10.0, 30.0, 11.0], [20.0, 9.0, 12.0]))
    assert _differ(steps([10.0, 11.0, 12.0], [9.0, 8.0, 7.0]))


@pytest.mark.parametrize(
    ("kind", "tells"), [("T5", "training step"), ("ViT", "ViTModel takes no input_ids and no labels")]
)
def test_optimize_takes_the_architecture_that_the_configuration_names(kind, tells, tmp_path, missing):
    if not importlib.util.find_spec("transformers"):
        missing("transformers is not installed")
    import transformers

    sizes = {
        "T5": {
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_layers": 1,
            "num_heads": 2,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
        "ViT": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    named = {"T5": ["T5ForConditionalGeneration"], "ViT": ["ViTModel"]}[kind]
    getattr(transformers, f"{kind}Config")(**sizes[kind], architectures=named).save_pretrained(tmp_path)
    code, output = run("optimize", tmp_path, "--device", "cpu", "--tokens", "4", "--rounds", "5", "--full")
    assert code == (0 if kind == "T5" else 2)
    assert tells in " ".join(output.split())
    assert ("lm_head" in output) == (kind == "T5")


# other tests run beside this one
@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(), st.integers(256, 300))
def test_byte_pairs_give_every_text_back(written, size):
    pairs = text.BytePairs.train("the cat and the hat sat on the mat, and that was that" * 3, size)
    assert len(pairs) <= size
    assert pairs.decode(pairs.encode(written)) == written


def test_byte_pairs_merge_the_most_frequent_neighbours_first():
    pairs = text.BytePairs.train("ab ab ab abc", 258)
    assert pairs.tokens[256:] == [b"ab", b" ab"]
    assert pairs.encode(" abab") == [257, 256]
    assert len(text.BytePairs.train("abcdef", 300)) == 256


def test_byte_pairs_agree_with_a_plain_count():
    sample = text.python_reference()[:4000]
    words = Counter(text.WORDS.findall(sample))
    pairs = text.BytePairs.train(sample, 266)
    slow = {word: list(word.encode()) for word in words}
    for token in range(256, 266):
        counts = Counter()
        for word, parts in slow.items():
            for pair in itertools.pairwise(parts):
                counts[pair] += words[word]
        made = pairs.tokens[token]
        best = max(counts.values())
        candidates = {pairs.tokens[a] + pairs.tokens[b]: (a, b) for (a, b), n in counts.items() if n == best}
        assert made in candidates
        slow = {word: text._merge(parts, candidates[made], token) for word, parts in slow.items()}


def test_short_texts_are_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match="has 9 characters"):
        text.read(path)


def test_a_text_of_few_tokens_is_refused(tmp_path):
    """However many characters it has."""
    (tmp_path / "one.txt").write_text("a" * 30_000)
    code, output = run("demo", "--text", tmp_path / "one.txt", "--out", tmp_path, "--device", "cpu")
    assert code == 2
    assert "tokens; the demo needs at least 129" in " ".join(output.split())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_a_character_shows_another(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "tilesmith", "doctor", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"? kernels need a GPU" in done.stdout


class Tiny(nn.Module):
    """A language model of one layer that rounds to float32 inside, as Hugging Face's norms do."""

    def __init__(self, wrong: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.wrong = nn.Embedding(16, 8), nn.Linear(8, 16), wrong

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids).to(torch.float32)
        logits = self.head((x * (1 + self.wrong)).type_as(self.head.weight))
        return Answer(logits, labels)


class Answer:
    def __init__(self, logits, labels):
        self.logits = logits
        if labels is not None:
            self.loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


IDS = torch.arange(8).view(2, 4)


def test_equal_models_are_within_budget_and_wrong_ones_are_not():
    assert all(c.optimised.passed for c in equality.compare(Tiny(), Tiny(), IDS))
    wrong = {c.name for c in equality.compare(Tiny(), Tiny(wrong=1e-4), IDS) if not c.optimised.passed}
    assert wrong == {"logits", "loss", "d embed.weight", "d head.weight", "d head.bias"}


def test_the_oracle_is_in_double_throughout():
    with equality.InDouble():
        answer = Tiny().double()(IDS)
        assert torch.ones(2, dtype=torch.float32).dtype is torch.float64
    assert answer.logits.dtype is torch.float64
    exact = Tiny().double()
    expected = exact.head(exact.embed(IDS))
    assert torch.equal(answer.logits, expected)


def test_the_summary_keeps_the_gradient_nearest_to_its_budget():
    errors = {"logits": 0.9, "d a": 0.1, "d b": 0.5, "d c": 0.2}
    checks = [equality.Check(name, 0.0, Budget(error, 1.0)) for name, error in errors.items()]
    assert [c.name for c in equality.summary(checks)] == ["logits", "3 gradients, nearest: d b"]


def test_equal_models_train_alike():
    models = {"a": Tiny(), "b": Tiny()}
    seen = []
    sizes = {"batch": 2, "length": 4, "steps": 8, "rate": 0.1, "seed": 3}
    runs = training.train(models, torch.arange(16).repeat(4), **sizes, progress=lambda step, runs: seen.append(step))
    assert runs["a"].losses == runs["b"].losses
    assert runs["a"].losses[-1] < runs["a"].losses[0]
    assert seen == list(range(8))
    assert runs["a"].step_time > 0


def test_the_recorder_sees_forward_and_backward():
    x = torch.randn(2, 4, requires_grad=True)
    with recorder.Recorder() as watched:
        ops()["silu"](x).sum().backward()
        torch.relu(x)
    assert [(c.kernel.op, n) for c, n in watched.choices] == [("silu", 1), ("silu_vjp", 1)]


def test_without_matplotlib_there_is_a_line_in_place_of_a_picture(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not charts.available()
    assert "no loss curves: matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "problem", ["ImportError('numpy.core.multiarray failed\\nto import')", "AttributeError('_ARRAY_API')"]
)
def test_a_matplotlib_that_cannot_be_imported_is_said_in_a_line(problem, monkeypatch, capsys, tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(f"raise {problem}")
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert not charts.available()
    told = capsys.readouterr().out
    assert "no loss curves: matplotlib cannot be imported" in told and told.count("\n") == 1


def test_the_saved_measurement_of_a_gpu_is_whole():
    found, ours, plain = document.saved_model_rows()
    assert found["date"] and found["hardware"]["name"] and ours["us"] > 0 and plain["times_pytorch"] == 1.0


def test_loss_curves_are_pictures(tmp_path, missing):
    if not importlib.util.find_spec("matplotlib"):
        missing("matplotlib is not installed")
    svg, png = charts.loss_curves({"a": [2.0, 1.0], "b": [2.0, 1.1]}, tmp_path / "new", "title")
    assert svg.read_text().lstrip().startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("library", ["transformers", "tilesmith"])
def test_the_demo_runs_from_end_to_end(library, tmp_path, monkeypatch, missing):
    for needed in ("matplotlib", *(["transformers"] if library == "transformers" else [])):
        if not importlib.util.find_spec(needed):
            missing(f"{needed} is not installed")
    sizes = subject.Sizes(vocab=300, hidden=32, inter=64, layers=2, heads=2, kv_heads=1, deviation=0.05)
    monkeypatch.setattr(subject, "SMALL", sizes)
    monkeypatch.setattr(subject, "find_spec", lambda name: library == "transformers")
    monkeypatch.setattr(demo, "SMALL", demo.Plan(batch=2, length=16, steps=6, rate=1e-3))
    monkeypatch.setattr(subject.Subject, "new_tokens", 4)
    model = tmp_path / "model"
    asked = ("demo", "--device", "cpu", "--steps", "5", "--out", tmp_path, "--export", model, "--json")
    result = typer_testing.CliRunner().invoke(cli.build(), [str(a) for a in asked])
    assert result.exit_code == 0, result.output
    found, output = json.loads(result.stdout), " ".join(result.stderr.split())
    assert [cost["model"] for cost in found["costs"]] == ["original", "tilesmith"]
    assert len(found["losses"]["tilesmith"]) == found["plan"]["steps"] == 5
    assert all(check["passed"] for check in found["checks"])
    for part in ("tokens/s", "peak memory", "gradients, nearest", "linear_cross_entropy_vjp"):
        assert part in output
    assert "✗" not in output
    assert {p.name for p in tmp_path.iterdir()} == {"loss.svg", "loss.png", "model"}
    assert {p.name for p in model.iterdir()} == {
        "config.json",
        "model.safetensors",
        "byte_pairs.json",
        "reference.json",
    }
    if library == "transformers":
        from transformers import LlamaForCausalLM

        told = json.loads((model / "reference.json").read_text())
        logits = LlamaForCausalLM.from_pretrained(model)(torch.tensor([told["prompt"]])).logits[0, -1]
        assert (logits.double() - torch.tensor(told["logits"], dtype=torch.float64)).abs().max() <= told["budget"]


def test_a_written_continuation_is_what_the_model_says_without_a_cache():
    torch.manual_seed(0)
    sizes = subject.Sizes(vocab=300, hidden=32, inter=64, layers=2, heads=2, kv_heads=1, deviation=0.05)
    _, model, optimise = subject._own_llama(subject._config(sizes))
    chosen, _ = optimise(copy.deepcopy(model))
    pairs = text.BytePairs.train("some text " * 50, 300)
    subjected = subject.Subject("a", model, optimise, torch.tensor([0]), 300, pairs.encode, pairs.decode, new_tokens=6)
    written = subjected.write(chosen, 0, lambda done: None)
    assert len(written.ids) == written.prompt + 6
    assert written.distance < 1e-5
