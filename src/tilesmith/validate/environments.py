"""Python environments with chosen releases in them, made by pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_OURS = ("PYTHON", "TILESMITH_", "TORCH", "TRITON_")


class NotInstalledError(RuntimeError):
    """pip could not install what was asked for; the text is its reason."""


def pip(python: Path | str, *arguments: str) -> None:
    """`python -m pip install *arguments`. Raises NotInstalledError with pip's own reason."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalledError(reason(done.stdout, done.stderr))


def reason(out: str, err: str) -> str:
    """Why pip gave up, in one line. Conflicts are told on stdout, unless with --quiet; errors on stderr."""
    _, _, conflict = out.partition("The conflict is caused by:\n")
    indented = re.match(r"(?:[ \t]+\S.*\n?)+", conflict)
    if indented:
        return "; ".join(line.strip() for line in indented[0].splitlines())
    errors = re.findall(r"^ERROR: (.*)", err, re.MULTILINE)
    return (errors or err.strip().splitlines() or ["pip said nothing"])[-1].strip()


def create(folder: Path) -> Path:
    """A virtual environment in `folder`, unless it is there already; its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return python


def version(python: Path, package: str) -> str:
    """The release of `package` that an environment has, "" if none."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def variables(folder: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """What processes of the environment in `folder` see: one thread, no GPU, caches and settings of its own."""
    kept = {k: v for k, v in (os.environ if given is None else given).items() if not k.startswith(_OURS)}
    caches = {f"{name}_CACHE_DIR": str(folder / name.lower()) for name in ("TORCHINDUCTOR", "TRITON", "TILESMITH")}
    return {**kept, **caches, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
