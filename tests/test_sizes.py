"""Limits on the size of files and functions; those on complexity and parameters are ruff's (pyproject.toml)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilesmith"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_OF_DEVICE_CODE, MOST_OF_A_BODY = 550, 700, 60
LIMITS = ["--config", "lint.mccabe.max-complexity=25", "--config", "lint.pylint.max-args=14"]


def test_no_file_is_long():
    over = {}
    for path in SOURCES:
        lines, most = path.read_text(encoding="utf-8").splitlines(), MOST_LINES
        if _device_lines(path):
            most = MOST_OF_DEVICE_CODE
        if len(lines) > most:
            over[path.relative_to(PACKAGE).as_posix()] = len(lines)
    assert not over


def test_no_function_is_long():
    """Signature and docstring do not count. Device functions, portable kernels and tables of cases may be long."""
    bodies = {}
    for path in SOURCES:
        if {"kernels", "cases"} & set(path.relative_to(PACKAGE).parts):
            continue
        device = _device_lines(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.lineno not in device:
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                bodies[f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"] = node.end_lineno - first.lineno + 1
    assert bodies
    assert not {name: n for name, n in bodies.items() if n > MOST_OF_A_BODY}


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
    folders = [p for p in PACKAGE.rglob("*") if p.is_dir() and p.name in ("triton", "hopper", "gluon")]
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
