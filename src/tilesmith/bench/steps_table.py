"""The table of whole training steps: what `benchmarks/model_steps.py` measured, family by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SUBJECT = "model-steps"
OURS = ("optimize", "graphs")
PEERS = ("eager", "compile", "liger")
BESIDE = " (beside graphs)"  # of the run in which graphs were measured
COLUMNS = (
    "model",
    "eager",
    "torch.compile",
    "Liger",
    "`optimize`",
    "`graphs=True`",
    "× best other",
    "peak GB: other, ours",
)


def lines(rows: Mapping[str, Mapping[str, Any]], families: Sequence[str]) -> list[tuple[str, ...]]:
    """A line for each family, all of them if none is named: ms a step, how many times as fast the fastest of ours is as
    the fastest of the others in any run, and the peaks of both. Raises ValueError naming a family without rows."""
    if missing := set(families) - set(rows):
        raise ValueError(f"{SUBJECT} has no rows of {', '.join(sorted(missing))}")
    return [_line(name, rows[name]) for name in families or rows]


def provenance(document: Mapping[str, Any]) -> str:
    """Hardware, versions, date and command."""
    versions = f"torch {document['torch']}, transformers {document['transformers']}"
    return f"<sub>{document['gpu']}, bf16, {versions}; {document['date']}; `{document['command']}`</sub>"


def _line(name: str, rows: Mapping[str, Any]) -> tuple[str, ...]:
    ours, others = _fastest(rows, OURS), _fastest(rows, PEERS)
    shown = (_ms(rows.get(variant) or rows.get(variant + BESIDE)) for variant in (*PEERS, *OURS))
    if ours is None or others is None or not any("ms" in rows.get(peer, {}) for peer in ("compile", "liger")):
        return (name, *shown, "", "")
    peaks = f"{others['peak_gb']:.1f}, {ours['peak_gb']:.1f}"
    return (name, *shown, f"{others['ms'] / ours['ms']:.2f}", peaks)


def _fastest(rows: Mapping[str, Any], variants: Sequence[str]) -> Mapping[str, Any] | None:
    measured = [rows[n] for v in variants for n in (v, v + BESIDE) if "ms" in rows.get(n, {})]
    return min(measured, key=lambda row: row["ms"], default=None)


def _ms(row: Mapping[str, Any] | None) -> str:
    return f"{row['ms']:.1f}" if row and "ms" in row else "–"
