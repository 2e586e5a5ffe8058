"""Each script of examples/ is run by a test; here those that no other file runs."""

import re
import runpy

import pytest
import torch

from ranks import ROOT, gloo, torchrun

EXAMPLES = ROOT / "examples"
ALONE = {"adaptive_precision": "saved, uniform", "sparse_attention": "the op with these lists: (1, 4, 1024, 16)"}


@pytest.mark.parametrize(("name", "said"), ALONE.items(), ids=ALONE)
def test_it_runs_from_an_empty_folder(name, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@gloo
@pytest.mark.parametrize("arguments", [(), ("--packed",)], ids=["one_document", "packed"])
def test_a_long_context_on_two_ranks(arguments):
    """It compares its losses with those of one process."""
    assert torchrun("examples/long_context.py", *arguments, "--length", "301").count("on 2 ranks") == 4


def test_no_example_is_left_out():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf'"(examples/)?{path.stem}(\.py)?"', tests), f"no test runs {path.name}"
