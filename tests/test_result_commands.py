"""Commands in the benchmark results can be pasted: a shell reads them, and the program they name takes its words."""

import argparse
import importlib
import itertools
import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tilesmith.cli import bench, build

typer_testing = pytest.importorskip("typer.testing")
pytest.importorskip("transformers")  # some scripts import it
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


def _commands(found):
    """Every text under the name `command`, at any depth."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from [value] if name == "command" else _commands(value)
    elif isinstance(found, list):
        yield from itertools.chain.from_iterable(map(_commands, found))


def _named():
    """(command, the first file that names it)"""
    first = {}
    for path in sorted(RESULTS.rglob("*.json")):
        for line in _commands(json.loads(path.read_text(encoding="utf-8"))):
            first.setdefault(line, str(path.relative_to(RESULTS)))
    return first.items()


def _programs(line):
    """The words of each program that a shell would run, without the variables that are set for it."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    for parted, some in itertools.groupby(words, lambda word: set(word) <= set(";&|()<>")):
        if not parted:
            yield list(itertools.dropwhile(lambda word: "=" in word, some))


def _bench_takes(words, monkeypatch, tmp_path):
    """`tilesmith bench`: all of its checks, and nothing measured or written."""
    measured, found = [], {"subject": "x", "hardware": {"arch": "sm90"}, "rows": []}
    for name in ("_op", "_zoo", "_model", "_host"):
        monkeypatch.setattr(bench, name, lambda *given: measured.append(given) or found)
    monkeypatch.setattr(bench, "_check_results", lambda *given: None)
    monkeypatch.setattr("tilesmith.bench.document.save", lambda *given, **named: tmp_path)
    done = typer_testing.CliRunner().invoke(build(), [*words, "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert measured


class _Parsed(Exception):
    """A program has read its arguments."""


def _program_takes(words, monkeypatch):
    """A script or module with argparse: it takes the words; nothing behind that is run."""

    def parse(self, *args, **named):
        left = known(self, *args, **named)[1]
        assert not left
        raise _Parsed

    known = argparse.ArgumentParser.parse_known_args
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    module = words[0] == "-m"
    name, *arguments = words[module:]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with pytest.raises(_Parsed):
        (runpy.run_module if module else runpy.run_path)(name if module else str(ROOT / name), run_name="__main__")


@pytest.mark.parametrize(
    ("line", "path"), [pytest.param(*named, id=f"{named[1]}-{i}") for i, named in enumerate(_named())]
)
def test_a_command_of_the_results_can_be_pasted(line, path, monkeypatch, tmp_path):
    for program, *words in _programs(line):
        with monkeypatch.context() as patched:
            if program == "tilesmith" and words[0] == "bench":
                _bench_takes(words, patched, tmp_path)
            elif program == "python":
                _program_takes(words, patched)
            elif program == "torchrun":
                _program_takes(words[words.index("-m") :], patched)
            else:
                pytest.fail(f"{path}: {program!r} is none of tilesmith, python and torchrun")


def test_a_script_names_its_command_so_that_a_shell_reads_it(monkeypatch):
    asked = ["benchmarks/host_bound.py", "results.json", "--case", "1.5 B, 1x512"]
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", asked)
    common = importlib.import_module("common")
    assert list(_programs(common.provenance()["command"])) == [["python", *asked]]
