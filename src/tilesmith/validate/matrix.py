"""Which Triton releases compile our kernels: `python -m tilesmith.validate.matrix`, a report for docs/."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tilesmith.engine import ops

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
HEAD = """# Triton releases that compile the kernels

Written by `make matrix` on {date}: Python {python}, torch {torch}, for sm_90, without a GPU. A cell says how many
device kernels the smallest cases of a family launch, all of which the release compiled. That says nothing of results:
tests run the kernels with the Triton that torch brings, and Hopper's by the rules of gluon-releases.md.

"""


def install(version: str, folder: Path) -> Path:
    """Triton `version` by itself in a folder of its own, unless it is there already."""
    site = folder / version
    if not (site / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-compile", "--target", str(site), f"triton=={version}"], check=True)
    return site


def compile_with(site: Path, family: str) -> tuple[list[str], str]:
    """Names of the kernels of `family` that the Triton in `site` compiled, and what was wrong, "" if nothing."""
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "tilesmith.validate.offline", family, "cuda", "90", "32"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    names = sorted(set(re.findall(r"^compiled (\S+)", done.stdout, re.MULTILINE)))
    if done.returncode == 0:
        return names, "" if names else "no kernel"
    if done.returncode < 0:
        return names, f"ended by signal {-done.returncode}"
    errors = re.findall(r"^\w*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
    return names, (errors or done.stderr.splitlines()[-1:] or done.stdout.splitlines()[-1:] or ["it failed"])[0]


def report(found: dict[str, dict[str, tuple[list[str], str]]]) -> str:
    """The page for {version: {family: (names, error)}}."""
    families = sorted({family for column in found.values() for family in column})
    text = HEAD.format(
        date=datetime.date.today().isoformat(), python=platform.python_version(), torch=torch.__version__
    )
    text += f"| family | {' | '.join(found)} |\n|{'---|' * (len(found) + 1)}\n"
    for family in families:
        cells = [_cell(*column[family]) for column in found.values()]
        text += f"| {family} | {' | '.join(cells)} |\n"
    failed = [
        (family, version, column[family][1]) for family in families for version, column in found.items()
        if column[family][1]
    ]  # fmt: skip
    if failed:
        text += "\n" + "".join(f"- {family}, {version}: `{error}`\n" for family, version, error in failed)
    return text


def _cell(names: list[str], error: str) -> str:
    return "no" if not names else f"{len(names)}, not all" if error else str(len(names))


def main(arguments: Sequence[str] | None = None) -> int:
    """Install each release, compile every family with it, write the page. 0 when everything compiled."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"Triton releases ({' '.join(VERSIONS)})")
    parser.add_argument("--folder", type=Path, help="keep the releases here, or take them from here")
    parser.add_argument("--out", type=Path, default=Path("docs/triton-releases.md"), help="the page to write")
    chosen = parser.parse_args(arguments)
    families = sorted({op.reference.__module__.split(".")[2] for op in ops().values()})
    found: dict[str, dict[str, tuple[list[str], str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in chosen.versions:
            site = install(version, chosen.folder or Path(folder))
            found[version] = {}
            for family in families:
                found[version][family] = compile_with(site, family)
                names, error = found[version][family]
                sys.stdout.write(f"{version} {family}: {len(names)} {error}".rstrip() + "\n")
                sys.stdout.flush()
    chosen.out.write_text(report(found))
    return int(any(error for column in found.values() for _, error in column.values()))


if __name__ == "__main__":
    sys.exit(main())
