"""Tests on a CPU with releases of torch and transformers, each torch in a fresh virtual environment; a page of docs."""

from __future__ import annotations

import contextlib
import datetime
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tilesmith.validate.environments import NotInstalledError, create, pip, variables, version

TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRANSFORMERS = ("5.17.0", "newest")
ROOT = Path(__file__).parents[3]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NAMED = 10  # failed tests that the page names, of each run
LINE = 160  # characters of an error that the page repeats
LONGEST = 1800  # seconds of one run


class Selection(NamedTuple):
    """Test files, and the expression that chooses among their tests."""

    files: tuple[str, ...]
    expression: str

    @property
    def arguments(self) -> list[str]:
        return [*(f"tests/{name}.py" for name in self.files), "-k", self.expression]


# Values of every op by its reference (and linear_preference whole, for its name), of a few by Triton's interpreter;
# opcheck, compile, export, autograd of every op; the private names of torch and Triton.
OPS = Selection(
    ("test_ops", "test_compiled", "test_torch_private", "test_triton_private"),
    "not values_and_gradients or reference or "
    "[swiglu-triton or [layer_norm-triton or [rope-triton or [cross_entropy-triton",
)
# `optimize` of three families: values, masks, compile, export, generate, PEFT, FSDP2.
MODELS = Selection(
    ("test_optimize", "test_optimize_families", "test_registration"),
    "not test_other_families and not gpt2 and not qwen3",
)
HEAD = """# torch and transformers releases that pass the tests on a CPU

Written by `make matrix ARGS=torch`, last on {date} with Python {python}. Each torch is installed in a fresh virtual
environment, from PyTorch's index of CPU builds where that answers, with the extra `dev`. Where torch brings no Triton,
the extra `interpreter` adds the one that it pins. `make matrix ARGS="torch 2.13.0"` measures one torch again and keeps
the other rows. A selection of the tests runs, a few minutes a row; `make test` runs all of them on one release. Rows of
ops:

```
{ops}
```

and rows of transformers:

```
{models}
```

| torch | Triton | tests | passed | failed | skipped | date |
|---|---|---|--:|--:|--:|---|
"""


class Row(NamedTuple):
    """One run of a selection. `error` says what stopped it, or what was not installed; `failures` are tests' names,
    `commonest` the error that most of them met."""

    torch: str
    triton: str
    tests: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    error: str = ""
    failures: tuple[str, ...] = ()
    commonest: str = ""

    @property
    def sound(self) -> bool:
        return self.passed > 0 and not self.failed and not self.error

    def lines(self, date: str) -> list[str]:
        """The row of the table, and the notes below it."""
        counts = ("—",) * 3 if self.error else (f"{self.passed:,}", f"{self.failed:,}", f"{self.skipped:,}")
        cells = (self.torch, self.triton or "—", self.tests or "not installed", *counts, date)
        label = f"- torch {self.torch}, {self.tests or 'not installed'}: "
        notes = [f"{label}`{self.error}`"] if self.error else []
        notes += [f"{label}`{name}`" for name in self.failures[:NAMED]]
        left = len(self.failures) - NAMED
        notes += [f"{label}{left} more failed"] if left > 0 else []
        notes += [f"{label}most often with `{self.commonest}`"] if self.commonest else []
        return [f"| {' | '.join(cells)} |", *notes]


def judged(code: int, out: str) -> dict:
    """The counts and failures of a pytest run, as fields of a Row, from its exit status and what it printed."""
    summary = re.findall(r"^(?:=+ )?((?:\d+ \w+,? ?)+) in [\d.]+s", out, re.MULTILINE)
    if code < 0:
        return {"error": f"ended by signal {-code}"}
    if not summary:
        return {"error": (out.strip().splitlines() or [f"pytest ended with status {code}"])[-1]}
    count = {name.rstrip("s"): int(number) for number, name in re.findall(r"(\d+) (\w+)", summary[-1])}
    names = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?([^\s\[]+(?:\[.*?\])?)(?: - |$)", out, re.MULTILINE)
    errors = Counter(
        error[:LINE].strip().replace("`", "'") for error in re.findall(r"^\S+\.py:\d+: (.*)", out, re.MULTILINE)
    )  # --tb=line
    return {
        "passed": count.get("passed", 0),
        "failed": count.get("failed", 0) + count.get("error", 0),
        "skipped": count.get("skipped", 0),
        "failures": tuple(dict.fromkeys(names)),
        "commonest": errors.most_common(1)[0][0] if errors else "",
    }


def command(python: Path | str, selection: Selection) -> list[str]:
    """The pytest command of a selection."""
    return [str(python), "-m", "pytest", "-q", "-p", "no:warnings", "-n", "1", "--tb=line", *selection.arguments]


def run_tests(folder: Path, selection: Selection) -> dict:
    """A selection of this checkout's tests in the environment in `folder`, which keeps what pytest prints."""
    asked = command(folder / "bin" / "python", selection)
    log = folder / f"{selection.files[0]}.txt"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                asked, cwd=ROOT, env=variables(folder), stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LONGEST} s"}
    return judged(done.returncode, log.read_text())


def steps(torch: str, index: Sequence[str]) -> list[list[str]]:
    """What pip installs one after another for a release of torch, before transformers."""
    return [[*index, f"torch=={torch}"], ["--editable", f"{ROOT}[dev]"]]


def index_of_cpu_builds() -> list[str]:
    """pip's arguments for PyTorch's index of CPU builds. None where it does not answer: pip would wait for it at each
    package."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=10):
            return ["--extra-index-url", CPU_INDEX]
    except OSError:
        return []


def rows_of(torch: str, transformers: Iterable[str], folder: Path) -> Iterable[Row]:
    """Build the environment of a release of torch in `folder`, run the tests in it with each transformers."""
    python = create(folder)
    try:
        for arguments in steps(torch, index_of_cpu_builds()):
            pip(python, *arguments)
        if not version(python, "triton"):
            pip(python, "--editable", f"{ROOT}[interpreter]")
    except NotInstalledError as error:
        yield Row(torch, "", "", error=str(error))
        return
    found = Row(version(python, "torch"), version(python, "triton"), "ops")
    yield found._replace(**run_tests(folder, OPS))
    for release in transformers:
        try:
            pip(python, *(["--upgrade", "transformers"] if release == "newest" else [f"transformers=={release}"]))
        except NotInstalledError as error:
            yield found._replace(tests=f"transformers {release}", error=f"not installed: {error}")
        else:
            yield found._replace(tests=f"transformers {version(python, 'transformers')}", **run_tests(folder, MODELS))


def report(found: Sequence[Row], earlier: str = "") -> str:
    """The page for these rows and, of an earlier page, those of other releases of torch. A release of TORCH that has
    neither is "not run"."""
    date = datetime.date.today().isoformat()
    head = HEAD.format(
        date=date,
        python=platform.python_version(),
        ops=shlex.join(command("python", OPS)),
        models=shlex.join(command("python", MODELS)),
    )
    lines: dict[str, list[str]] = {release: [f"| {release} | — | not run | — | — | — | — |"] for release in TORCH}
    lines.update(_by_release(earlier.splitlines()))
    lines.update(_by_release(line for row in found for line in row.lines(date)))
    ordered = [line for release in sorted(lines, key=_numbers) for line in lines[release]]
    notes = [line for line in ordered if line.startswith("-")]
    return (
        head + "\n".join([*(line for line in ordered if line.startswith("|")), *(["", *notes] if notes else [])]) + "\n"
    )


def _by_release(lines: Iterable[str]) -> dict[str, list[str]]:
    """Rows and notes of a page by their release of torch, without its build: 2.13.0 of 2.13.0+cpu."""
    found: dict[str, list[str]] = {}
    for line in lines:
        match = re.match(r"(?:\| |- torch )(\d[\w.]*)", line)
        if match:
            found.setdefault(match[1], []).append(line)
    return found


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def measure(torch: Sequence[str], transformers: Sequence[str], folder: Path | None, page: Path) -> int:
    """Run the tests with each torch, write the page after each. 0 when all were installed and every test passed."""
    wrong = 0
    for release in torch:
        place = tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(folder)
        with place as parent:
            found = []
            for row in rows_of(release, transformers, Path(parent) / f"torch-{release}"):
                found.append(row)
                wrong |= not row.sound
                sys.stdout.write("\n".join(row.lines("")) + "\n")
                sys.stdout.flush()
        page.write_text(report(found, page.read_text() if page.exists() else ""))
    return int(wrong)
