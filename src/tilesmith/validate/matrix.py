"""Which Triton releases compile our kernels, and with which releases of torch and transformers the tests pass on a CPU:
`python -m tilesmith.validate.matrix`, two pages for docs/."""

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

from tilesmith.validate import torch_releases
from tilesmith.validate.cases import families
from tilesmith.validate.environments import NotInstalledError, pip

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
HEAD = """# Triton releases that compile the kernels

Written by `make matrix ARGS=triton`, last on {date} with Python {python}, torch {torch}, for sm_90, without a GPU. A
cell gives the number of device kernels that the smallest cases of a family launch; the release compiled all of them.
This says nothing about results: tests run the kernels with the Triton that torch brings
([tested releases](torch-releases.md)), and the Hopper kernels have [rules of their own](gluon-releases.md).
`make matrix ARGS="triton --families norm"` measures a family again.

"""


def install(version: str, folder: Path) -> Path:
    """Triton `version` by itself in a folder of its own, unless it is there already. Raises NotInstalledError."""
    site = folder / version
    if not (site / "triton").is_dir():
        pip(sys.executable, "--no-deps", "--no-compile", "--target", str(site), f"triton=={version}")
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


def report(found: dict[str, dict[str, tuple[list[str], str]]], refused: dict[str, str], earlier: str = "") -> str:
    """The page for {family: {version: (names, error)}} and {version: why it could not be installed}.

    Of an earlier page with the same releases it keeps the rows of other families.
    """
    date = datetime.date.today().isoformat()
    versions = list(next(iter(found.values()), {}))
    header = f"| family | {' | '.join([*versions, 'date'])} |\n"
    lines = {family: [f"| {family} | {'not run | ' * len(versions)}— |\n"] for family in families()}
    if header in earlier:
        lines.update(_lines(earlier))
    for family, column in found.items():
        cells = [_cell(*column[version]) for version in versions]
        lines[family] = [f"| {family} | {' | '.join([*cells, date])} |\n"]
        lines[family] += [f"- {family}, {version}: `{error}`\n" for version, (_, error) in column.items() if error]
    told = [line for family in families() for line in lines[family]]
    notes = [f"- {version}, not installed: `{why}`\n" for version, why in refused.items()]
    notes += [line for line in told if line.startswith("-")]
    head = HEAD.format(date=date, python=platform.python_version(), torch=torch.__version__)
    rows = [header, f"|{'---|' * (len(versions) + 2)}\n", *(line for line in told if line.startswith("|"))]
    return "".join([head, *rows, *(["\n", *notes] if notes else [])])


def _lines(page: str) -> dict[str, list[str]]:
    """The row and the notes of each family on a page."""
    lines: dict[str, list[str]] = {}
    for line in re.finditer(r"^(?:\| |- )(\w+)(?: \||,).*\n", page, re.MULTILINE):
        lines.setdefault(line[1], []).append(line[0])
    return lines


def _cell(names: list[str], error: str) -> str:
    return "no" if not names else f"{len(names)}, not all" if error else str(len(names))


def measure(versions: Sequence[str], chosen: Sequence[str], folder: Path | None, page: Path) -> int:
    """Compile the chosen families with each Triton, write the page after each family. 0 when nothing was wrong."""
    wrong = False
    with tempfile.TemporaryDirectory() as temporary:
        sites: dict[str, Path] = {}
        refused: dict[str, str] = {}
        for version in versions:
            try:
                sites[version] = install(version, folder or Path(temporary))
            except NotInstalledError as error:
                refused[version] = str(error)
                sys.stdout.write(f"{version}: not installed: {error}\n")
        if not sites:
            page.write_text(report({}, refused))
        for family in chosen if sites else ():
            column = {version: compile_with(site, family) for version, site in sites.items()}
            for version, (names, error) in column.items():
                sys.stdout.write(f"{version} {family}: {len(names)} {error}".rstrip() + "\n")
                sys.stdout.flush()
                wrong |= bool(error)
            page.write_text(report({family: column}, refused, page.read_text() if page.exists() else ""))
    return int(wrong or bool(refused))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one side or both, write their pages. 0 when everything was installed, compiled and passed."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.matrix", description=__doc__)
    parser.add_argument("side", nargs="?", choices=("triton", "torch", "both"), default="both", help="what to measure")
    releases = f"Triton: {' '.join(VERSIONS)}; torch: {' '.join(torch_releases.TORCH)}"
    parser.add_argument("versions", nargs="*", help=f"releases of that side ({releases})")
    parser.add_argument("--families", nargs="+", choices=families(), default=families(), help="for triton (all)")
    transformers = torch_releases.TRANSFORMERS
    parser.add_argument("--transformers", nargs="+", default=transformers, help=f"for torch ({' '.join(transformers)})")
    parser.add_argument("--folder", type=Path, help="keep what is installed here, or take it from here")
    parser.add_argument("--out", type=Path, help="the page to write (docs/triton-releases.md, docs/torch-releases.md)")
    chosen = parser.parse_args(arguments)
    if chosen.side == "both" and (chosen.versions or chosen.out):
        parser.error("releases and --out belong to one side: name triton or torch before them")
    wrong = 0
    if chosen.side != "torch":
        versions, page = chosen.versions or VERSIONS, chosen.out or Path("docs/triton-releases.md")
        wrong |= measure(versions, chosen.families, chosen.folder, page)
    if chosen.side != "triton":
        torches, page = chosen.versions or torch_releases.TORCH, chosen.out or Path("docs/torch-releases.md")
        wrong |= torch_releases.measure(torches, chosen.transformers, chosen.folder, page)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
