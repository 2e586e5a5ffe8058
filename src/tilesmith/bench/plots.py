"""Plots of a sweep: time, rate with its share of the measured ceiling, and peak memory, one line a provider."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilesmith.bench.document import OURS
from tilesmith.bench.tables import provenance

# colour and marker: a provider looks the same in every plot, and without colours too
LOOKS = {
    OURS: ("#d1495b", "o"),
    "pytorch": ("#6c757d", "s"),
    "compile": ("#2e86ab", "^"),
    "liger": ("#3c887e", "D"),
    "quack": ("#e09f3e", "v"),
    "cudnn": ("#7b5ea7", "P"),
    "flash2": ("#8d6e63", "X"),
    "flash4": ("#1b3a4b", "<"),
    "flex": ("#c2779b", ">"),
}
OTHERS = (("#9aa5b1", "h"), ("#a3b18a", "p"), ("#b5838d", "*"), ("#6d6875", "d"))
_SMALL_NOTE = {"textcoords": "offset points", "fontsize": 7}
RATES = {"copy": ("TB/s", "copy rate"), "matmul": ("TFLOP/s", "matmul")}


def plot(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a document that `sweep.run` made into `folder`, as SVG and PNG, and return the files.

    Raises ValueError for a document that is no sweep or has no figures.
    """
    if not document.get("sweep"):
        raise ValueError(f"{document.get('subject', 'this')} is not a sweep: nothing runs along an axis")
    rows = [row for row in document["rows"] if "us" in row]
    if not rows:
        raise ValueError(f"{document['subject']} has no figures to plot")
    folder.mkdir(parents=True, exist_ok=True)
    paths = _draw(document, rows, "time", folder)
    if any(_bound(rows, p) for p in _passes(rows)):
        paths += _draw(document, rows, "rate", folder)
    if any("peak_bytes" in row for row in rows):
        paths += _draw(document, [row for row in rows if "peak_bytes" in row], "memory", folder)
    return paths


def _draw(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], what: str, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels, passes = list(dict.fromkeys(row["panel"] for row in rows)), _passes(rows)
    shown = [(p, n) for p in panels for n in passes if any(r["panel"] == p and r["pass"] == n for r in rows)]
    width = len(passes) * (2 if len(panels) > 1 and len(panels) % 2 == 0 else 1)
    height = -(-len(shown) // width)
    width = min(width, len(shown))
    size = (0.6 + 4.2 * width, 1.3 + 3.0 * height)
    figure, grid = pyplot.subplots(height, width, figsize=size, squeeze=False, layout="constrained")
    for axes, (panel, name) in zip(grid.flat, shown):
        chosen = [row for row in rows if row["panel"] == panel and row["pass"] == name]
        _panel(axes, document, chosen, what)
        axes.set_title(", ".join(filter(None, (panel, name if what != "memory" else ""))), fontsize=10)
    for axes in grid.flat[len(shown) :]:
        axes.remove()
    known = {text: line for axes in figure.axes for line, text in zip(*axes.get_legend_handles_labels())}
    names = [name for name in _providers(rows) if name in known]
    title = f"{document['sweep']['op']} on {document['hardware']['name']}, {document['dtype']}"
    where = {"loc": "outside upper center", "ncols": min(len(names), 3 * width), "frameon": False, "fontsize": 9}
    figure.legend([known[name] for name in names], names, title=title, **where)
    figure.supxlabel(_source(document, int(20 * size[0])), fontsize=5.5, color="#6c757d")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is laid out, and need not be again for each file
    paths = [folder / f"{document['subject']}-{what}.{kind}" for kind in ("svg", "png")]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters, to be searched
        for path in paths:
            figure.savefig(path, dpi=160)
    pyplot.close(figure)
    return paths


def _panel(axes: Any, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], what: str) -> None:
    from matplotlib import ticker

    for name in _providers(rows):
        mine = sorted((row for row in rows if row["provider"] == name), key=lambda row: row["at"])
        colour, marker = _look(name)
        ours = name == OURS
        style = {"linewidth": 2.4 if ours else 1.3, "markersize": 5, "zorder": 3 if ours else 2}
        points = [(row["at"], y) for row in mine if (y := _value(row, rows, document, what)) is not None]
        if points:
            axes.plot(*zip(*points), color=colour, marker=marker, label=name, **style)
    at = sorted({row["at"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [_short(value) for value in at], rotation=45, fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(document["sweep"]["label"], fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.spines[["top"]].set_visible(False)
    if what == "rate":
        _ceiling(axes, document, rows)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,.6g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_ylabel("µs" if what == "time" else "peak of forward and backward, MB", fontsize=8)
        axes.spines[["right"]].set_visible(False)


def _value(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], document, what: str) -> float | None:
    if what == "time":
        return row["us"]
    if what == "memory":
        return row["peak_bytes"] / 1e6
    bound = _bound(rows, row["pass"])
    value = row.get(RATES[bound][0]) if bound else None
    return None if value is None else value * _unit(document, bound)[0]


def _ceiling(axes: Any, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """The measured ceiling as a line, and the share of it on the right."""
    bound = _bound(rows, rows[0]["pass"]) if rows else None
    if bound is None:
        axes.set_visible(False)
        return
    factor, unit = _unit(document, bound)
    most = document["ceilings"][bound] / 1e12 * factor
    axes.axhline(most, color="#343a40", linestyle="--", linewidth=1)
    label = f"{RATES[bound][1]} measured here: {most:,.3g} {unit}"
    axes.annotate(label, (0.02, most), xycoords=axes.get_yaxis_transform(), xytext=(0, 3), **_SMALL_NOTE)
    axes.set_ylim(0, max(most, axes.get_ylim()[1]) * 1.12)
    axes.set_ylabel(unit, fontsize=8)
    share = axes.secondary_yaxis("right", functions=(lambda y: y / most * 100, lambda s: s * most / 100))
    share.set_ylabel("% of it", fontsize=8)
    share.tick_params(labelsize=7)


def _bound(rows: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """What bounds our largest calls of a pass: copy or matmul; None if nobody knows how much work they are."""
    ours = [row for row in rows if row["provider"] == OURS and row["pass"] == name and "bound" in row]
    return max(ours, key=lambda row: row["at"])["bound"] if ours else None


def _unit(document: Mapping[str, Any], bound: str) -> tuple[float, str]:
    unit = RATES[bound][0]
    return (1.0, unit) if document["ceilings"][bound] >= 1e12 else (1e3, unit.replace("T", "G", 1))


def _passes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["pass"] for row in rows))


def _providers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """In the order of LOOKS, so that legends agree between plots."""
    names = dict.fromkeys(row["provider"] for row in rows)
    return [n for n in LOOKS if n in names] + [n for n in names if n not in LOOKS]


def _look(name: str) -> tuple[str, str]:
    return LOOKS.get(name) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def _short(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else f"{value}"


def _source(document: Mapping[str, Any], width: int) -> str:
    """Where the figures are from, in lines of up to `width` characters."""
    text = provenance(document).removeprefix("<sub>").removesuffix("</sub>").replace("`", "")
    return "\n".join(textwrap.wrap(text, width))
