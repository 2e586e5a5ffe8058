"""Markdown tables out of result files, written between markers of a README.

A marker names a result file under the results folder: `<!-- bench:sm90/rms_norm -->`, closed by `<!-- /bench -->`.
Names of cases behind it, `<!-- bench:sm90/rms_norm 16384x4096 512x4096 -->`, ask for these alone, in their order.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilesmith.bench.document import OURS, load, runs

MARKED = re.compile(
    r"(?P<head><!-- bench:(?P<what>[\w./-]+)(?P<cases>(?: [\w.-]+)*) -->\n).*?(?P<end><!-- /bench -->)", re.DOTALL
)
STEPS = "model-steps"  # the subject of `benchmarks/model_steps.py`
EQUAL = 1.02  # times within 2 % count as equal
OVERWRITES = "†"  # a peer whose inputs are no longer what they were
# packages of which the version is told only where such a provider, or such a subject, has a figure
WHOSE = {
    "liger-kernel": {"liger", "liger+compile"},
    "quack-kernels": {"quack"},
    "flash-attn-4": {"flash4"},
    "cudnn": {"cudnn", "cudnn_e4m3"},
    "transformers": {"model", STEPS},
    "python": {"host"},
    "tilesmith": set(),
}
REDUCED = frozenset({f"{OURS}:e4m3"})  # computed in fewer bits than the others: never marked as the fastest


def fill(text: str, results: Path) -> str:
    """`text` with a fresh table between each pair of markers.

    Raises FileNotFoundError naming a missing result, and ValueError naming a case that a result has not.
    """

    def table(match: re.Match[str]) -> str:
        path = results / f"{match['what']}.json"
        if not path.is_file():
            raise FileNotFoundError(f"marker bench:{match['what']} needs {path}, which does not exist")
        document = load(path)
        if document["subject"] == STEPS:
            document = _of_steps(document)
        return f"{match['head']}{markdown(_only(document, match['cases'].split()))}{match['end']}"

    return MARKED.sub(table, text)


def _of_steps(document: Mapping[str, Any]) -> dict[str, Any]:
    """What `benchmarks/model_steps.py` wrote, {family: {variant: row}}, in the form of the other documents."""
    versions = {name: document[name] for name in ("torch", "transformers")}
    last = {"command": document["command"], "date": document["date"], "versions": versions}
    rows, earlier = [], []
    for family, variants in document["rows"].items():
        for variant, row in variants.items():
            run = {**last, **{name: row[name] for name in ("command", "date") if name in row}}
            if run != last and run not in earlier:
                earlier.append(run)
            whose = {} if run == last else {"earlier": earlier.index(run)}
            rows.append({"case": family, "provider": variant, **row, **whose})
    head = {"hardware": {"name": document["gpu"]}, "dtype": "bf16", "versions": versions}
    return {**document, **head, "earlier": earlier, "rows": rows}


def _only(document: dict[str, Any], cases: Sequence[str]) -> dict[str, Any]:
    """The document with the rows of these cases; of all if none is named."""
    rows = document["rows"]
    if missing := set(cases) - {row.get("case") for row in rows}:
        raise ValueError(f"{document['subject']} has no rows of {', '.join(sorted(missing))}")
    return {**document, "rows": [row for case in cases for row in rows if row["case"] == case] or rows}


def markdown(document: Mapping[str, Any]) -> str:
    """The table of one document, with a line under it that says how it was measured."""
    table = _TABLES.get(document["subject"], _op_table)(document)
    note = f"<sub>{OVERWRITES} overwrites its arguments</sub>\n\n" if f" {OVERWRITES} |" in table else ""
    return f"{table}\n\n{note}{provenance(document)}\n"


def provenance(document: Mapping[str, Any]) -> str:
    """Hardware, versions, dates and commands, in one line; a long command is whole in the document only."""
    made = runs(document)
    listed = ", ".join(f"{name} {versions}" for name, versions in _versions(document).items())
    dtype = f"{document['dtype']}, " if "dtype" in document else ""
    rounds = ""
    if "rounds" in document:
        counts = sorted({run.get("rounds", document["rounds"]) for run in made})
        rounds = f"median of {' or '.join(map(str, counts))} interleaved rounds, "
    dates = sorted({run["date"] for run in made})
    dated = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    command = textwrap.shorten(" ; ".join(dict.fromkeys(run["command"] for run in made)), 200, placeholder=" …")
    return f"<sub>{document['hardware']['name']}, {dtype}{rounds}{listed}; {dated}; `{command}`</sub>"


def _versions(document: Mapping[str, Any]) -> dict[str, str]:
    """Of each package that took part the version, or those that the runs had."""
    figures = {document["subject"], *(row["provider"] for row in document["rows"] if "us" in row)}
    made = [run["versions"] for run in runs(document)]
    names = dict.fromkeys(name for versions in made for name in versions if WHOSE.get(name, figures) & figures)
    each = {name: dict.fromkeys(versions.get(name, "none") for versions in made) for name in names}
    return {name: " / ".join(versions) for name, versions in each.items()}


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned left and the others right."""
    rule = [":--" if i < left else "--:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, rule, *rows))


def _op_table(document: Mapping[str, Any]) -> str:
    rows = document["rows"]
    labels = {row["case"]: label(row) for row in rows}
    names = list(dict.fromkeys(row["provider"] for row in rows if "us" in row))
    names = [OURS] * (OURS in names) + [name for name in names if name != OURS]
    lines = []
    for case, what in dict.fromkeys((row["case"], row["pass"]) for row in rows):
        group = {row["provider"]: row for row in rows if (row["case"], row["pass"]) == (case, what)}
        times = {name: group[name]["us"] for name in names if "us" in group.get(name, {})}
        if not times:
            continue
        best = min(us for n, us in times.items() if n not in REDUCED)
        shown = [
            _bold(_us(times[n]), n not in REDUCED and times[n] <= best * EQUAL) + _mark(group[n]) if n in times else "–"
            for n in names
        ]
        ours = group.get(OURS, {})
        lines.append((labels[case], what, *shown, rate(ours), _share(ours), _times(ours)))
    head = (f"`{document['subject']}`", "pass", *(f"{name}, µs" for name in names))
    return grid((*head, "rate", "of ceiling", "× best peer"), lines, left=2)


def label(row: Mapping[str, Any]) -> str:
    """A case in short: the size of its first tensor, its options, and its name, unless that only repeats them."""
    sizes = next((v for v in row["shapes"].values() if isinstance(v, list)), [])
    options = (n if v is True else f"{n} {v}" for n, v in row["shapes"].items() if _is_option(n, v))
    said = " ".join(filter(None, ("×".join(map(str, sizes)), *options)))
    repeated = {word.replace("x", "×") for word in row["case"].split("_")} <= set(said.split())
    return said if repeated else ", ".join(filter(None, (said, row["case"])))


def _is_option(name: str, value: Any) -> bool:
    return value is True or (isinstance(value, int) and value > 0 and name not in ("block_q", "block_k"))


def _model_table(document: Mapping[str, Any]) -> str:
    lines = []
    for row in document["rows"]:
        name = f"{row['model']}, {row['batch']}×{row['tokens']}"
        if "error" in row:
            lines.append((name, row["provider"], row["error"], "", "", ""))
            continue
        memory = f"{row['peak_bytes'] / 1e9:.1f}"
        speed = f"{row['tokens_per_s']:,.0f}"
        lines.append((name, row["provider"], f"{row['us'] / 1e3:.1f}", speed, memory, f"{row['times_pytorch']:.2f}"))
    return grid(("model", "", "ms a step", "tokens/s", "peak GB", "× PyTorch"), lines, left=2)


def _host_table(document: Mapping[str, Any]) -> str:
    """Host time, and kernels launched, of every provider side by side."""
    rows = [row for row in document["rows"] if "us" in row]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    lines = []
    for case, what in dict.fromkeys((row["case"], row["pass"]) for row in rows):
        group = {row["provider"]: row for row in rows if (row["case"], row["pass"]) == (case, what)}
        shown = [f"{group[n]['us']:.1f} ({group[n]['launches']})" if n in group else "–" for n in names]
        lines.append((case, what, *shown))
    return grid(("op", "pass", *(f"{name}, µs (kernels)" for name in names)), lines, left=2)


def _steps_table(document: Mapping[str, Any]) -> str:
    """Of each family's training step ms, how many times as fast the fastest of ours is as the fastest of the others in
    any run, and the peaks of both."""
    families: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in document["rows"]:
        families.setdefault(row["case"], {})[row["provider"]] = row
    columns = ("model", "eager", "torch.compile", "Liger", "`optimize`", "`graphs=True`", "× best other")
    return grid((*columns, "peak GB: other, ours"), [_steps_line(*family) for family in families.items()])


def _steps_line(name: str, rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    ours, peers, beside = ("optimize", "graphs"), ("eager", "compile", "liger"), " (beside graphs)"

    def fastest(variants: Sequence[str]) -> Mapping[str, Any] | None:
        measured = [rows[n] for v in variants for n in (v, v + beside) if "ms" in rows.get(n, {})]
        return min(measured, key=lambda row: row["ms"], default=None)

    found = (rows.get(variant) or rows.get(variant + beside) or {} for variant in (*peers, *ours))
    shown = [f"{row['ms']:.1f}" if "ms" in row else "–" for row in found]
    best, other = fastest(ours), fastest(peers)
    if best is None or other is None or not any("ms" in rows.get(peer, {}) for peer in ("compile", "liger")):
        return (name, *shown, "", "")
    return (name, *shown, f"{other['ms'] / best['ms']:.2f}", f"{other['peak_gb']:.1f}, {best['peak_gb']:.1f}")


_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "model": _model_table, "host": _host_table, STEPS: _steps_table,
}  # fmt: skip


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _mark(row: Mapping[str, Any]) -> str:
    return f" {OVERWRITES}" if row.get("overwrites") else ""


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def rate(row: Mapping[str, Any]) -> str:
    """The rate of the resource that bounds this row's work: of its arithmetic or of its minimal traffic."""
    unit = "TFLOP/s" if row.get("bound") == "matmul" else "TB/s"
    if unit not in row:
        return "–"
    value = row[unit]
    if value >= 1000:
        return f"{value:,.0f} {unit}"
    return f"{value:.3g} {unit}" if value >= 0.1 else f"{value * 1e3:.3g} {unit.replace('T', 'G', 1)}"


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else "–"


def _times(row: Mapping[str, Any]) -> str:
    return f"{row['times_best_peer']:.2f}" if "times_best_peer" in row else "–"
