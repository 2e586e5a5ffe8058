"""What type checkers, `help` and `inspect` tell users: the stubs are fresh, and name each planted mistake."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import pydoc
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from torch import Tensor

import tilesmith
from tilesmith import ops
from tilesmith.engine import Op
from tilesmith.models.optimization import RULES, RuleName
from tilesmith.validate import stubs

FOLDER = Path(__file__).parent / "typing"
SOURCE = Path(tilesmith.__file__).parents[1]
SCRIPTS = {name: FOLDER / f"{name}.py" for name in ("good", "bad")}
MISTAKES = {n for n, line in enumerate(SCRIPTS["bad"].read_text().splitlines(), 1) if line.endswith("# error")}
# Of torch, only what the scripts see: reading all of it takes half a minute.
UNREAD = """
    _decomp _dynamo _export _functorch _higher_order_ops _inductor _logging _prims _prims_common _refs _subclasses ao
    cuda distributed distributions export func fx jit masked mps onnx package profiler quantization sparse testing utils
    xpu
"""


def test_stubs_are_fresh():
    wanted = stubs.stubs()
    stale = [str(path) for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    assert not stale, f"write them anew with: {stubs.COMMAND}"
    assert {path.with_suffix(".pyi") for _, path in stubs.lazy_packages()} == set(SOURCE.rglob("*.pyi"))


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "tilesmith" / "py.typed").exists()


def test_every_lazy_name_is_in_its_stub():
    for name, path in stubs.lazy_packages():
        text = path.with_suffix(".pyi").read_text("utf-8")
        for public in sys.modules[name].__all__:
            assert re.search(rf"( as {public},?$|^def {public}\(|^{public}: )", text, re.MULTILINE), f"{name}.{public}"


def test_no_public_name_is_that_of_a_module_beside_it():
    """Once the module is imported, the name would lead to it, and a call would fail."""
    found = {}
    for name, path in stubs.lazy_packages():
        modules = {module.name for module in pkgutil.iter_modules([str(path.parent)])}
        homes = vars(sys.modules[name]).get("_HOMES", {})
        found.update({f"{name}.{public}": homes[public] for public in homes.keys() & modules})
    assert not found, found


def _checked(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, *map(str, SCRIPTS.values())],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def _judge(errors: list[tuple[str, int, str]]) -> None:
    """errors: (file, line from 1, message)."""
    assert not [e for e in errors if Path(e[0]).stem == "good"]
    assert {line for _, line, _ in errors} == MISTAKES, errors


def test_mypy(missing, tmp_path):
    if find_spec("mypy") is None:
        missing("mypy is not installed (pip install mypy)")
    unread = ",".join(f"torch.{name}.*" for name in UNREAD.split())
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nfollow_imports = silent\n[mypy-{unread},sympy.*,numpy.*,transformers.*]\nfollow_imports = skip\n"
    )
    told = _checked(
        ["mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"],
        MYPYPATH=str(SOURCE),
    )
    found = [re.match(r"(.+?):(\d+): error: (.*)", line) for line in told.splitlines()]
    _judge([(m[1], int(m[2]), m[3]) for m in found if m])


def test_pyright(missing, tmp_path):
    if find_spec("pyright") is None:
        missing("pyright is not installed (pip install 'pyright[nodejs]')")
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps({"extraPaths": [str(SOURCE)], "include": [str(FOLDER)]}))
    told = json.loads(_checked(["pyright", "--project", str(project), "--pythonpath", sys.executable, "--outputjson"]))
    errors = [d for d in told["generalDiagnostics"] if d["severity"] == "error"]
    _judge([(d["file"], d["range"]["start"]["line"] + 1, d["message"]) for d in errors])


def test_the_good_script_runs():
    subprocess.run(
        [sys.executable, str(SCRIPTS["good"])], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True, timeout=120
    )


@pytest.mark.parametrize("name", [n for n in ops.__all__ if isinstance(getattr(ops, n), Op)])
def test_signatures_are_what_users_call(name):
    op = getattr(ops, name)
    signature = inspect.signature(op)
    assert "grad_mask" not in signature.parameters
    assert "grad_mask" not in inspect.getdoc(op)
    returned = signature.return_annotation
    many = getattr(returned, "__args__", None)
    assert (returned is Tensor) == (op.public == 1)
    assert many is None or len(many) == op.public


def test_signatures_that_users_meet_first():
    assert str(inspect.signature(ops.rms_norm)).endswith("-> torch.Tensor")
    assert inspect.signature(ops.linear_cross_entropy).return_annotation is Tensor
    assert "tuple" not in str(inspect.signature(ops.rms_norm))


def test_help_shows_the_call_and_its_meaning():
    text = pydoc.render_doc(ops.rms_norm, renderer=pydoc.plaintext)
    assert "rms_norm(x: torch.Tensor" in text
    assert "Root-mean-square normalisation" in text
    assert "For kernels" not in pydoc.render_doc(ops.linear_cross_entropy)


@pytest.mark.parametrize("name", [n for n in ops.__all__ if callable(getattr(ops, n))])
def test_signatures_show_no_catch_all(name):
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    assert not [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and "NoReturn" in str(p)]


def test_docstrings_of_ops_name_no_module_of_the_implementation():
    named = {n: re.findall(r"`chunks\.\w+`", inspect.getdoc(getattr(ops, n)) or "") for n in ops.__all__}
    assert not {n: found for n, found in named.items() if found}


def test_literals_are_what_a_check_lists():
    assert stubs.choices(ops.rms_norm) == {"casting": ("fp32", "llama", "none")}
    assert stubs.choices(ops.silu) == {}
    assert {rule.name for rule in RULES} == set(get_args(RuleName))
