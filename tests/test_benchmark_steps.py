"""The benchmarks of training steps run on a CPU at tiny sizes, and their check of losses finds what is wrong."""

import json
import math
import subprocess
import sys
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


def test_whisper(tmp_path):
    rows = run(
        "model_steps.py", tmp_path / "steps.json", "whisper-medium", "--variant", "eager", "--variant", "optimize"
    )
    assert rows["whisper-medium"].keys() == {"eager", "optimize"}


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
    def strays(**losses):
        return model_steps.strays({
            name.replace("_", "-"): {"loss": first, "warm_loss": warm} for name, (first, warm) in losses.items()
        })  # fmt: skip

    assert strays(fp8=(10.1, 10.1), eager=(10.0, 10.0), optimize=(10.04, 10.04)) == []
    assert strays(eager=(10.0, 10.0), optimize=(10.06, 10.0)) == ["optimize"]
    assert strays(eager=(10.0, 10.0), optimize=(10.0, 10.06)) == ["optimize"]
    assert strays(eager=(10.0, 10.0), fp8=(10.19, 10.19), fp8_rowwise=(10.21, 10.0)) == ["fp8-rowwise"]
    assert strays(eager=(10.0, 10.0), fp8=(10.0, math.nan)) == ["fp8"]
    assert strays(fp8=(10.1, 10.1), eager=(10.0, 10.0), compile=(10.1, 10.1)) == ["compile"]
