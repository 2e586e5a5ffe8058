"""The tables of releases: what compiled and passed, what did not, and what could not be installed are all told."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilesmith.validate import environments, matrix, torch_releases
from tilesmith.validate.torch_releases import Row

# what pip writes to stdout and to stderr
CONFLICT = (
    """
The conflict is caused by:
    The user requested torch==2.99.0
    The user requested (constraint) torch<=2.14.1

To fix this you could try to:
1. loosen the range of package versions you've specified
""",
    """WARNING: a wheel is ignored
ERROR: Cannot install torch==2.99.0 because these package versions have conflicting dependencies.
ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/
""",
)
ABSENT = (
    "Looking in indexes: https://pypi.org/simple\n",
    """ERROR: Could not find a version that satisfies the requirement torch==2.99.0 (from versions: 2.0.0, 2.1.0)
ERROR: No matching distribution found for torch==2.99.0
""",
)
CONFLICT_IN_A_LINE = "The user requested torch==2.99.0; The user requested (constraint) torch<=2.14.1"
ABSENT_IN_A_LINE = "No matching distribution found for torch==2.99.0"
DAY = "2026-11-23"


@pytest.fixture(autouse=True)
def one_day(monkeypatch):
    """It is the same day from a test's begin to its end."""
    today = SimpleNamespace(today=lambda: SimpleNamespace(isoformat=lambda: DAY))
    for module in (matrix, torch_releases):
        monkeypatch.setattr(module, "datetime", SimpleNamespace(date=today))


@pytest.mark.parametrize(
    ("code", "out", "err", "found"),
    [
        (0, "compiled a\ncompiled b 32\n", "", (["a", "b"], "")),
        (0, "", "", ([], "no kernel")),
        (1, "compiled a\n", "a lane spills into its neighbour", (["a"], "a lane spills into its neighbour")),
        (1, "", "Traceback\nTypeError: no such type\nmore", ([], "TypeError: no such type")),
        (-11, "compiled a\n", "", (["a"], "ended by signal 11")),
    ],
)
def test_a_fault_beside_kernels_that_compile_is_told(monkeypatch, tmp_path, code, out, err, found):
    ended = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: ended)
    assert matrix.compile_with(Path("site"), "norm") == found
    monkeypatch.setattr(matrix, "install", lambda version, folder: folder)
    page = tmp_path / "page.md"
    assert matrix.main(["triton", "9.9.9", "--out", str(page)]) == int(bool(found[1]))
    text = page.read_text()
    assert (f"- norm, 9.9.9: `{found[1]}`" in text) == bool(found[1])
    assert ("not all" in text) == bool(found[0] and found[1])
    assert "not run" not in text


def test_a_run_of_some_families_keeps_the_rows_of_others(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    results = {"norm": (["a", "b"], ""), "gemm": (["c"], "ended by signal 11"), "loss": (["d"], "")}
    monkeypatch.setattr(matrix, "install", lambda version, folder: folder)
    monkeypatch.setattr(matrix, "compile_with", lambda site, family: results[family])
    arguments = ["triton", "3.8.0", "3.9.0", "--out", str(page), "--families"]
    assert matrix.main([*arguments, "gemm", "norm"]) == 1
    page.write_text(page.read_text().replace(DAY, "2020-01-01"))
    results["norm"] = (["a"], "ended by signal 9")
    assert matrix.main([*arguments, "norm", "loss"]) == 1
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| ", "- "))]
    assert {"| gemm | 1, not all | 1, not all | 2020-01-01 |", f"| loss | 1 | 1 | {DAY} |"} <= set(rows)
    assert {f"| norm | 1, not all | 1, not all | {DAY} |", "| attn | not run | not run | — |"} <= set(rows)
    of = ((family, version) for family in ("gemm", "norm") for version in ("3.8.0", "3.9.0"))
    signals = {"gemm": 11, "norm": 9}
    assert rows[-4:] == [f"- {family}, {version}: `ended by signal {signals[family]}`" for family, version in of]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (CONFLICT, CONFLICT_IN_A_LINE),
        (ABSENT, ABSENT_IN_A_LINE),
        (("Collecting torch\n", "Killed\n"), "Killed"),
        (("", ""), "pip said nothing"),
    ],
)
def test_a_triton_that_cannot_be_installed_is_told_with_the_reason(monkeypatch, tmp_path, written, told):
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess([], 1, *written))
    page = tmp_path / "page.md"
    assert matrix.main(["triton", "9.9.9", "--folder", str(tmp_path), "--out", str(page)]) == 1
    assert f"- 9.9.9, not installed: `{told}`" in page.read_text()


@pytest.mark.parametrize(("written", "told"), [(CONFLICT, CONFLICT_IN_A_LINE), (ABSENT, ABSENT_IN_A_LINE)])
def test_a_torch_that_cannot_be_installed_is_told_with_the_reason(monkeypatch, tmp_path, written, told):
    def run(command, **options):
        return subprocess.CompletedProcess(command, int("pip" in command), *written)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch_releases, "index_of_cpu_builds", list)
    page = tmp_path / "page.md"
    assert matrix.main(["torch", "2.99.0", "--folder", str(tmp_path), "--out", str(page)]) == 1
    text = page.read_text()
    assert f"| 2.99.0 | — | not installed | — | — | — | {DAY} |\n" in text
    assert text.endswith(f"\n- torch 2.99.0, not installed: `{told}`\n")


def _record(monkeypatch, tmp_path, failing=""):
    """The commands that a torch's environment is made and tested by; a pip command that names `failing` fails."""
    commands = []

    def run(command, **options):
        commands.append(command)
        if "pytest" in command:
            options["stdout"].write(
                "FAILED tests/test_a.py::test_b[c] - boom\n1 failed, 20 passed, 3 skipped in 1.00s\n"
            )
        versions = {"torch": "2.13.0+cpu\n", "triton": "", "transformers": "5.24.0\n"}
        out = next((versions[name] for name in versions if f"version({name!r})" in command[-1]), "")
        failed = (out == "" and "-c" in command) or bool(failing and failing in command)
        return subprocess.CompletedProcess(command, int(failed), out, f"ERROR: no {failing}")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch_releases, "index_of_cpu_builds", lambda: ["--extra-index-url", "https://cpu"])
    rows = list(torch_releases.rows_of("2.13.0", ["5.17.0", "newest"], tmp_path))
    return rows, [[str(part) for part in command] for command in commands if "-c" not in command]


def test_an_environment_is_made_and_tested_by_these_commands(monkeypatch, tmp_path):
    rows, commands = _record(monkeypatch, tmp_path)
    python = str(tmp_path / "bin" / "python")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    root = Path(__file__).parents[1]
    assert commands == [
        [sys.executable, "-m", "venv", str(tmp_path)],
        [*install, "--extra-index-url", "https://cpu", "torch==2.13.0"],
        [*install, "--editable", f"{root}[dev]"],
        [*install, "--editable", f"{root}[interpreter]"],  # as this torch brings no Triton
        torch_releases.command(python, torch_releases.OPS),
        [*install, "transformers==5.17.0"],
        torch_releases.command(python, torch_releases.MODELS),
        [*install, "--upgrade", "transformers"],
        torch_releases.command(python, torch_releases.MODELS),
    ]
    assert [row.tests for row in rows] == ["ops", "transformers 5.24.0", "transformers 5.24.0"]
    assert {row[3:] for row in rows} == {(20, 1, 3, "", ("test_a.py::test_b[c]",), "")}


def test_a_transformers_that_cannot_be_installed_stops_no_other(monkeypatch, tmp_path):
    rows, _ = _record(monkeypatch, tmp_path, failing="transformers==5.17.0")
    assert [(row.tests, row.error) for row in rows] == [
        ("ops", ""),
        ("transformers 5.17.0", "not installed: no transformers==5.17.0"),
        ("transformers 5.24.0", ""),
    ]


@pytest.mark.parametrize(
    ("code", "out", "fields"),
    [
        (
            0,
            "..\n12 passed, 3 skipped in 4.00s\n",
            {"passed": 12, "failed": 0, "skipped": 3, "failures": (), "commonest": ""},
        ),
        (
            0,
            "==== 12 passed in 64.00s (0:01:04) ====\n",
            {"passed": 12, "failed": 0, "skipped": 0, "failures": (), "commonest": ""},
        ),
        (
            1,
            "/a/b.py:1: KeyError: 1\n/a/b.py:7: OSError: `no`\n/a/c.py:9: OSError: `no`\n"
            "FAILED tests/test_a.py::test_b[x - y] - a[0]\nERROR tests/test_c.py\n1 failed, 2 passed, 1 error in 1s\n",
            {
                "passed": 2,
                "failed": 2,
                "skipped": 0,
                "failures": ("test_a.py::test_b[x - y]", "test_c.py"),
                "commonest": "OSError: 'no'",
            },
        ),
        (4, "ImportError while loading conftest\nE   no torch\n", {"error": "E   no torch"}),
        (3, "", {"error": "pytest ended with status 3"}),
        (-11, "1 passed in 1.00s\n", {"error": "ended by signal 11"}),
    ],
)
def test_what_pytest_printed_becomes_a_row(code, out, fields):
    assert torch_releases.judged(code, out) == fields


def test_tests_that_do_not_end_are_told(monkeypatch, tmp_path):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    found = torch_releases.run_tests(tmp_path, torch_releases.OPS)
    assert found == {"error": f"not done after {torch_releases.LONGEST} s"}
    assert not Row("2.13.0", "", "ops", **found).sound


def _lines(page):
    """Rows and notes of releases that were run."""
    return [line for line in page.splitlines() if line.startswith(("| 2", "- torch ")) and "not run" not in line]


def test_the_page_keeps_rows_of_other_releases():
    names = tuple(f"test_a.py::test_{i}" for i in range(torch_releases.NAMED + 2))
    old = torch_releases.report(
        [
            Row("2.13.0+cpu", "3.6.0", "ops", 5, 1, 0, failures=("test_old.py::test_gone",)),
            Row("2.9.0", "", "", error="none of it"),
        ]
    ).replace(DAY, "2020-01-01")
    page = torch_releases.report(
        [Row("2.13.0+cpu", "3.6.0", "ops", 4321, 12, 7, failures=names, commonest="OSError: no")], old
    )
    assert _lines(page) == [
        "| 2.9.0 | — | not installed | — | — | — | 2020-01-01 |",
        f"| 2.13.0+cpu | 3.6.0 | ops | 4,321 | 12 | 7 | {DAY} |",
        "- torch 2.9.0, not installed: `none of it`",
        *(f"- torch 2.13.0+cpu, ops: `{name}`" for name in names[: torch_releases.NAMED]),
        "- torch 2.13.0+cpu, ops: 2 more failed",
        "- torch 2.13.0+cpu, ops: most often with `OSError: no`",
    ]
    for text in (old, page):
        assert sum("not run" in line for line in text.splitlines()) == len(torch_releases.TORCH) - 1


def test_the_selections_are_of_tests_that_there_are():
    for selection in (torch_releases.OPS, torch_releases.MODELS):
        for name in selection.files:
            assert (Path(__file__).parent / f"{name}.py").is_file()


def test_processes_of_an_environment_have_no_settings_of_the_caller(tmp_path):
    given = {
        "PATH": "/bin",
        "PYTHONPATH": "src",
        "TRITON_INTERPRET": "0",
        "TILESMITH_REQUIRE_ALL": "1",
        "TORCH_LOGS": "+x",
    }
    found = environments.variables(tmp_path, given)
    assert {name: found[name] for name in ("PATH", "CUDA_VISIBLE_DEVICES")} == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert not found.keys() & (given.keys() - {"PATH"})
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


@pytest.mark.parametrize("arguments", [["both", "9.9.9"], ["--out", "page.md"], ["9.9.9"]])
def test_releases_are_those_of_a_side(arguments, capsys):
    with pytest.raises(SystemExit):
        matrix.main(arguments)
    assert "triton" in capsys.readouterr().err
