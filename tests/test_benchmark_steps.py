"""The benchmarks of training steps run on a CPU at tiny sizes, and what they find is right."""

import json
import math
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def run(script, path, *arguments):
    """The rows that a script saves."""
    command = [sys.executable, str(SCRIPTS / script), str(path), *arguments, "--tiny", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


@pytest.fixture
def model_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import model_steps

    return model_steps


def test_variants_in_8_bits(tmp_path):
    variants = ("optimize", "fp8", "fp8-rowwise")
    options = [option for name in variants for option in ("--variant", name)]
    rows = run("model_steps.py", tmp_path / "steps.json", "llama-1.5b", "gpt2-medium", *options)
    llama = rows["llama-1.5b"]
    assert all(llama[name]["ms"] > 0 for name in variants)
    assert llama["fp8"]["loss"] != llama["optimize"]["loss"] != llama["fp8-rowwise"]["loss"]
    assert "no linear layer is eligible" in rows["gpt2-medium"]["fp8"]["error"]  # its layers are Conv1D


def test_rows_keep_the_command_that_made_them(model_steps):
    """Also those of a run before, whose command the file has in its head alone."""
    first = {"command": "python a", "date": "2026-11-29", "gpu": "one"}
    rows = model_steps.signed({"eager": {"ms": 1.0}, "liger": {"ms": 2.0, "command": "python b"}}, first)
    assert rows["eager"] == {"ms": 1.0, "command": "python a", "date": "2026-11-29"}
    assert rows["liger"] == {"ms": 2.0, "command": "python b", "date": "2026-11-29"}
    assert model_steps.signed(rows, {"command": "python c", "date": "2026-11-30"}) == rows
    assert model_steps.signed({"eager": {"ms": 1.0}}, {}) == {"eager": {"ms": 1.0}}


def test_commands_of_saved_rows_make_them():
    found = json.loads((SCRIPTS / "results" / "sm90" / "model-steps.json").read_text(encoding="utf-8"))
    for family, rows in found["rows"].items():
        for variant, row in rows.items():
            words = shlex.split(row["command"])
            assert family in words and row["date"], (family, variant)
            at = [words[i + 1] for i, word in enumerate(words) if word == "--variant"]
            assert variant.partition(" (beside")[0] in at, (family, variant)
            assert ("--kernels" in words) == ("most" in row), (family, variant)


def test_every_family(tmp_path, model_steps):
    rows = run("model_steps.py", tmp_path / "steps.json", "--variant", "eager", "--variant", "optimize")
    assert rows.keys() == model_steps.FAMILIES.keys()
    assert all(row.keys() == {"eager", "optimize"} for row in rows.values())


def test_whisper_has_the_sizes_of_the_medium_model(model_steps):
    import torch
    import transformers

    family = model_steps.FAMILIES["whisper-medium"]
    config = transformers.WhisperConfig(**family.sizes)
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(config)
    assert sum(p.numel() for p in model.parameters()) == 763_857_920
    shapes = {name: tuple(value.shape) for name, value in model_steps.batch(family, config).items()}
    assert shapes == {"input_features": (8, 80, 3000), "labels": (8, 448)}


def test_losses_that_are_not_the_first(model_steps):
    def strays(in_bf16=False, **losses):
        return model_steps.strays({
            name.replace("_", "-"): {"loss": first, "warm_loss": warm, "loss_in_bf16": in_bf16}
            for name, (first, warm) in losses.items()
        })  # fmt: skip

    assert strays(fp8=(10.1, 10.1), eager=(10.0, 10.0), optimize=(10.04, 10.04)) == []
    assert strays(eager=(10.0, 10.0), optimize=(10.06, 10.0)) == ["optimize"]
    assert strays(eager=(10.0, 10.0), optimize=(10.0, 10.06)) == ["optimize"]
    assert strays(eager=(10.0, 10.0), fp8=(10.19, 10.19), fp8_rowwise=(10.21, 10.0)) == ["fp8-rowwise"]
    assert strays(eager=(10.0, 10.0), fp8=(10.0, math.nan)) == ["fp8"]
    assert strays(fp8=(10.1, 10.1), eager=(10.0, 10.0), compile=(10.1, 10.1)) == ["compile"]
    assert strays(in_bf16=True, eager=(10.5, 10.5), compile=(10.5, 10.5625)) == []
    assert strays(in_bf16=True, eager=(10.5, 10.5), compile=(10.5, 10.625)) == ["compile"]


@pytest.mark.parametrize("family", ["llama-1.5b", "gemma3-4b"])
def test_parts_of_a_step(tmp_path, model_steps, family):
    row = run("step_parts.py", tmp_path / "parts.json", family)[family]
    parts = row["parts"]
    assert all(
        part["us"] > 0 and part["ms"] == pytest.approx(part["us"] * part["count"] / 1e3, abs=1e-4) for part in parts
    )
    assert row["sum_ms"] == pytest.approx(sum(part["ms"] for part in parts), abs=1e-2)
    assert row["step_over_sum"] == pytest.approx(row["step_ms"] / row["sum_ms"], rel=1e-2)
    assert row["left_out"] == 0

    sizes = model_steps.tiny(model_steps.FAMILIES[family])
    config, tokens = sizes.sizes, sizes.batch * sizes.tokens
    layers, hidden, inner = (config[n] for n in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    linears = [(hidden, heads * head_dim), (heads * head_dim, hidden), (inner, hidden)]
    linears += [(hidden, kv_heads * head_dim), (hidden, inner)] * 2
    wanted = Counter()
    for features, outputs in linears:  # y, the gradients of x and of the weight
        for product in ((tokens, features, outputs), (tokens, outputs, features), (outputs, tokens, features)):
            wanted[product] += layers
    found = Counter()
    for part in parts:
        if part["op"] == "aten.mm.default":
            (m, k), (_, n) = re.findall(r"\w\[(\d+), (\d+)\]", part["arguments"])
            found[int(m), int(k), int(n)] += part["count"]
    assert found == wanted

    counts = Counter()
    for part in parts:
        counts[part["op"], part["phase"]] += part["count"]
    both = {op: count for (op, phase), count in counts.items() if phase == "forward and backward"}
    expected = {"attention": layers, "add_rms_norm": layers, "linear_cross_entropy": 1}
    if family == "llama-1.5b":
        expected |= {"rms_norm": layers + 1, "rope": layers, "swiglu": layers}
    else:
        expected |= {"rms_norm": 3 * layers + 1, "rms_norm_rope": layers, "geglu": layers}
    assert both == expected
    assert counts["aten.embedding.default", "forward"] == 1
    assert counts["aten.embedding_dense_backward.default", "backward"] == 1


def test_a_gradient_that_is_missing_is_told(model_steps):
    import step_parts
    import torch

    from tilesmith import ops, use

    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    forward, backward = step_parts.Recorder(1), step_parts.Recorder(1)
    with use(rms_norm="reference"):
        with forward:
            y = ops.rms_norm(ops.rms_norm(x, weight), weight)
            ops.rms_norm(x, weight)
        with backward:
            y.sum().backward()
    with pytest.raises(RuntimeError, match="rms_norm ran 3 times, its gradient 2 times"):
        step_parts.parts_of(forward, backward)


def test_what_python_takes_of_a_recorded_step(tmp_path):
    pytest.importorskip("peft")
    path = tmp_path / "calls.json"
    command = [sys.executable, str(SCRIPTS / "host_calls.py"), str(path), "--layers", "3", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert list(rows) == ["eager", "optimize", "blocks", "graphs"]
    assert all(min(row[part] for part in ("forward", "backward", "adamw", "step")) > 0 for row in rows.values())
    assert [rows[name]["replayed_blocks"] for name in ("blocks", "graphs")] == [15, 15]
    assert [rows[name]["replayed_wholes"] for name in ("blocks", "graphs")] == [0, 5]
