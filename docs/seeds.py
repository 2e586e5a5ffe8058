"""Writes docs/seeds.md: what five documents promise, our names for it, their tests, and what was measured.

    python docs/seeds.py

Whether a name exists and which test holds it is looked up; figures come from benchmarks/results alone.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

from tilesmith.hardware.facts import tomllib

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """---
hide: [toc]
---

# Features of the documents this library began with

Five documents named the features; their names resolve here once the root of the import is changed. Each row gives a
feature, our name, the tests that freeze its signature and run the documented examples, what the document claims, and
what was measured. Each figure names its case in `benchmarks/results`, or the log that has it. "1.05 times flash4"
means that flash4, the fastest peer of that row, takes 1.05 times as long. Written by `python docs/seeds.py`.
"""


def page() -> str:
    """The text of docs/seeds.md."""
    given = tomllib.loads((ROOT / "docs" / "seeds.toml").read_text(encoding="utf-8"))
    built = [_resolves(name) for feature in given["feature"] for name in feature["names"]]
    features = [all(map(_resolves, feature["names"])) for feature in given["feature"]]
    lines = [
        HEAD,
        f"{sum(features)} of {len(features)} features are built, {sum(built)} of {len(built)} names resolve.",
    ]
    for document, title in given["documents"].items():
        lines += ["", f"## {title}", "", "| feature | our name | test | claim | measured |", "|---|---|---|---|---|"]
        lines += [_row(feature) for feature in given["feature"] if feature["document"] == document]
    return "\n".join(lines) + "\n"


def _row(feature: dict) -> str:
    names = ", ".join(f"`{name}`" if _resolves(name) else f"not built: `{name}`" for name in feature["names"])
    found = [_measured(*row) for row in feature.get("rows", ())] + [_figure(*f) for f in feature.get("figures", ())]
    measured = "; ".join(found) or feature.get("log", "not measured")
    if "note" in feature:
        measured += f". {feature['note'][0].upper()}{feature['note'][1:]}"
    return f"| {feature['text']} | {names} | {_test(feature)} | {feature.get('claim', '')} | {measured} |"


def _resolves(name: str) -> bool:
    found = importlib.import_module("tilesmith")
    path = "tilesmith"
    for part in name.split("."):
        path += f".{part}"
        try:
            if not hasattr(found, part):
                importlib.import_module(path)
            found = getattr(found, part)
        except (AttributeError, ModuleNotFoundError):
            return False
    return True


def _test(feature: dict) -> str:
    """The file of tests/api that freezes the names or uses them in its examples."""
    (root,) = _document(feature["document"])["root"].values()
    home = root.removeprefix("tilesmith").lstrip(".")
    frozen = {f"{home}.{entry['path']}".lstrip(".") for entry in _document(feature["document"])["name"]}
    mine = {name for name in feature["names"] if any(f"{path}.".startswith(f"{name}.") for path in frozen)}
    if not mine:
        said = "\n".join(e["code"] + e.get("then", "") for e in _document(feature["document"])["example"])
        used = any(name.rpartition(".")[2] in said for name in feature["names"])
        return f"`tests/api/{feature['document']}.toml`, in examples" if used else "–"
    return f"`tests/api/{feature['document']}.toml`"


@functools.cache
def _document(name: str) -> dict:
    return tomllib.loads((ROOT / "tests" / "api" / f"{name}.toml").read_text(encoding="utf-8"))


def _measured(file: str, case: str, which: str, provider: str = "tilesmith") -> str:
    """A figure: the rate, the share of the peer; without a case the first of the file."""
    rows = _results(file)["rows"]
    rows = [r for r in rows if r.get("pass") == which and r.get("us") and (not case or r["case"] == case)]
    rows = [r for r in rows if r["provider"] == provider] or [r for r in rows if r["provider"].startswith("tilesmith ")]
    if not rows:
        raise LookupError(f"{file}.json has no row of {case or 'any case'}, {which}, {provider}")
    row = rows[0]
    if "of_one_gpu" in row:
        best = max(rows, key=lambda r: r["of_one_gpu"])
        return f"{case}: {best['of_one_gpu']:.0%} of one GPU's rate on each, {best['TFLOP/s']:.0f} TFLOP/s"
    rate = f"{row['TFLOP/s']:.0f} TFLOP/s" if row.get("bound") == "matmul" else f"{row['TB/s']:.2f} TB/s"
    times = f", {row['times_best_peer']:.2f} times {row['best_peer']}" if row.get("times_best_peer") else ""
    return f"{file.rpartition('/')[2]} {row['case']} {which}: {rate}{times}"


def _figure(file: str, path: list[str | int], *rest: list[str | int] | str) -> str:
    """A figure of a script's document, or its quotient by another, in the words that have {} for it."""
    *divisor, words = rest
    figure, *others = (at(file, *steps) for steps in (path, *divisor))
    return words.format(figure / others[0] if others else figure)


def at(file: str, *path: str | int | dict) -> Any:
    """What a document of results has at a path. A dict as a step picks the one row that has its items."""
    found = _results(file)
    for step in path:
        if isinstance(step, dict):
            rows = [row for row in found if isinstance(row, dict) and step.items() <= row.items()]
            if len(rows) != 1:
                raise LookupError(f"{file}.json has {len(rows)} rows with {step}")
            found = rows[0]
        else:
            found = found[step]
    return found


@functools.cache
def _results(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    (ROOT / "docs" / "seeds.md").write_text(page(), encoding="utf-8")
