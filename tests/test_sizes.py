"""Limits on the size of files and functions; those on complexity and parameters are ruff's (pyproject.toml)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "tilesmith").rglob("*.py"))
MOST_LINES = 700
LIMITS = ["--config", "lint.mccabe.max-complexity=25", "--config", "lint.pylint.max-args=14"]


def test_no_file_is_long():
    package = ROOT / "src" / "tilesmith"
    lines = {p.relative_to(package).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    assert not {name: n for name, n in lines.items() if n > MOST_LINES}


def _device_lines(path: Path) -> set[int]:
    """The lines on which device functions, and methods of aggregates of device code, are defined."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
        if isinstance(node, ast.FunctionDef) and any(d.split("(")[0].endswith(("jit", "builtin")) for d in decorators):
            found.add(node.lineno)
        elif isinstance(node, ast.ClassDef) and "aggregate" in decorators:
            found |= {x.lineno for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


def test_only_device_functions_exceed_the_limits_in_folders_of_device_code(missing):
    """ruff leaves these folders out as wholes; launchers in them have no such reason."""
    folders = [
        p for p in (ROOT / "src" / "tilesmith").rglob("*") if p.is_dir() and p.name in ("triton", "hopper", "gluon")
    ]
    command = [
        "check",
        "--isolated",
        "--select",
        "C901,PLR0913",
        "--output-format",
        "json",
        *LIMITS,
        *map(str, folders),
    ]
    try:
        run = subprocess.run([sys.executable, "-m", "ruff", *command], capture_output=True, text=True)
    except OSError as error:
        missing(f"ruff does not run: {error}")
    if "No module named ruff" in run.stderr:
        missing("ruff is not installed (pip install ruff)")
    device = {path: _device_lines(path) for folder in folders for path in folder.glob("*.py")}
    assert any(device.values())
    over = [
        f"{x['filename']}:{x['location']['row']}: {x['message']}"
        for x in json.loads(run.stdout)
        if x["location"]["row"] not in device[Path(x["filename"])]
    ]
    assert not over, "\n".join(over)
