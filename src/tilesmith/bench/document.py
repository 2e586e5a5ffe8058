"""The JSON document of one benchmark: rows with what they were measured on, by which command, and when.

A file can hold rows of several runs on one device: the head is that of the last, `earlier` lists those of the others,
and a row that is not of the last says which of these it is of, by its own `earlier`.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilesmith.hardware import arch_of
from tilesmith.hardware.detect import driver

OURS = "tilesmith"  # among the providers of a row
RUN = ("command", "date", "versions", "ceilings", "rounds")  # in the head, what runs of one file may differ in
PACKAGES = ("tilesmith", "triton", "transformers", "liger-kernel", "quack-kernels", "flash-attn-4", "torchao")


def document(subject: str, device: torch.device, command: str, rows: list[dict], **more: Any) -> dict[str, Any]:
    """A document about `subject` (an op, or the name of another benchmark)."""
    return {
        "subject": subject,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "hardware": hardware(device),
        "versions": versions(),
        **more,
        "rows": rows,
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """What the device is, in plain data."""
    arch = arch_of(device)
    return {"name": arch.device_name, "arch": arch.name, "units": arch.sms, "l2": arch.l2, "driver": driver()}


def versions() -> dict[str, str]:
    """The versions of what took part, as far as it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def path_of(document: Mapping[str, Any], folder: Path) -> Path:
    """The file of a document among results."""
    return folder / document["hardware"]["arch"] / f"{document['subject']}.json"


def save(document: dict[str, Any], folder: Path, *, keep: bool = False) -> Path:
    """Write a document to `folder`/<arch>/<subject>.json, one row a line, and return that path.

    keep: rows that the file has of other cases stay in it, as `merged` says; else the file is this document alone.
    """
    path = path_of(document, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    if keep and path.is_file():
        document = merged(load(path), document)
    facts = {name: value for name, value in document.items() if name != "rows"}
    head = json.dumps({**facts, "rows": []}, indent=1, ensure_ascii=False).removesuffix("[]\n}")
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in document["rows"])
    whole = path.with_suffix(".json.new")
    whole.write_text(f"{head}[\n{rows}\n ]\n}}\n", encoding="utf-8")
    return whole.replace(path)  # at once: a run that is stopped here leaves the file as it was


def merged(old: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` and those rows of `old` whose case and pass `new` has not, cases and passes in the order of `old`.

    Providers of a case are compared within one process, so all of its rows are replaced together. `new` alone where
    the device or the dtype is another: the rows of one file are to be compared.
    """
    alike = [(d["hardware"]["name"], d.get("dtype")) for d in (old, new)]
    if alike[0] != alike[1]:
        return new
    measured = {_what(row) for row in new["rows"]}
    same = {"rounds": old["rounds"]} if "rounds" in old else {}  # of runs that say nothing else
    runs, kept = [_run(old), *({**same, **run} for run in old.get("earlier", ()))], []
    earlier: list[dict[str, Any]] = []
    for row in (row for row in old["rows"] if _what(row) not in measured):
        run = runs[row["earlier"] + 1 if "earlier" in row else 0]
        if run not in earlier:
            earlier.append(run)
        kept.append({**row, "earlier": earlier.index(run)})
    if not kept:
        return new
    rows: dict[Any, dict[Any, list[dict[str, Any]]]] = {}
    for case, which in map(_what, (*old["rows"], *new["rows"])):
        rows.setdefault(case, {})[which] = []
    for row in (*kept, *new["rows"]):
        case, which = _what(row)
        rows[case][which].append(row)
    found = [row for passes in rows.values() for those in passes.values() for row in those]
    told = {"summary": summary(found)} if "summary" in new else {}
    return {**new, **told, "earlier": earlier, "rows": found}


def dropped(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, int]:
    """How many figures of each provider `old` has of cases and passes that `new` has without this provider: a file that
    `new` is saved to keeps none of them, since providers are compared within one process."""
    measured: dict[Any, set[str]] = {}
    for row in new["rows"]:
        measured.setdefault(_what(row), set()).add(row["provider"])
    figures = [row for row in old["rows"] if "error" not in row]
    return dict(Counter(r["provider"] for r in figures if r["provider"] not in measured.get(_what(r), r["provider"])))


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each pass how many times faster ours is than the best peer, or, where the only other provider is its bare
    `products`, how many times as long it takes: the geometric mean, the worst value, the five worst calls."""
    faster: dict[str, list[tuple[float, str]]] = {}
    us: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "times_best_peer" in row:
            faster.setdefault(row["pass"], []).append((row["times_best_peer"], row["case"]))
        elif "provider" in row and row.get("us"):
            us.setdefault((row["pass"], row["case"]), {})[row["provider"]] = row["us"]
    longer: dict[str, list[tuple[float, str]]] = {}
    for (which, case), times in us.items():
        if which not in faster and times.keys() == {OURS, "products"}:
            longer.setdefault(which, []).append((round(times[OURS] / times["products"], 4), case))
    found = {which: _ratios("times_best_peer", sorted(those), "minimum") for which, those in faster.items()}
    return found | {which: _ratios("times_products", sorted(those)[::-1], "maximum") for which, those in longer.items()}


def _ratios(name: str, calls: list[tuple[float, str]], worst: str) -> dict[str, Any]:
    """calls: the worst first."""
    return {
        "calls": len(calls),
        "geometric_mean": round(math.exp(sum(math.log(ratio) for ratio, _ in calls) / len(calls)), 4),
        worst: calls[0][0],
        "worst": [{"case": case, name: ratio} for ratio, case in calls[:5]],
    }


def runs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was run for the rows of a document, the last first."""
    made = {-1: _run(document), **dict(enumerate(document.get("earlier", ())))}
    return [made[which] for which in sorted({row.get("earlier", -1) for row in document["rows"]})]


def _run(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in RUN if name in document}


def _what(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """The case, or the model and its batch, and the pass of a row."""
    case = row["case"] if "case" in row else (row["model"], row["batch"], row["tokens"])
    return case, row.get("pass")


def saved_model_rows() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """The saved measurement of a whole model on a GPU: its document, our row and PyTorch's. None where it is missing.

    It is the repository's file, of which an installed package has a copy.
    """
    here = Path(__file__).parent
    paths = (here.parents[2] / "benchmarks" / "results" / "sm90" / "model.json", here / "measured" / "model.json")
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    found = load(path)
    rows = {row["provider"]: row for row in found["rows"]}
    return (found, rows[OURS], rows["pytorch"]) if {OURS, "pytorch"} <= set(rows) else None


def load(path: Path) -> dict[str, Any]:
    """A document that `save` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
