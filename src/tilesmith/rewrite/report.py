"""What a rewrite did to a model: one row per module that a rule looked at, with the reason."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict, dataclass
from typing import Literal

_COLUMNS = ("module", "class", "rule", "action", "ops", "reason")


@dataclass(frozen=True)
class Row:
    """One module: what was done to it, by which rule, and why.

    `wanted` says that a rule would have replaced the module and could not; `strict=True` raises on such rows.
    """

    fqn: str
    cls: str
    rule: str
    action: Literal["replaced", "skipped"]
    ops: tuple[str, ...]
    reason: str
    wanted: bool = False


@dataclass(frozen=True)
class Report:
    """The rows of one `optimize` call, in the order of `model.named_modules()`.

    `print(report)` shows a table in which the layers of a model share one line, and a notebook shows the same as HTML.
    """

    rows: tuple[Row, ...]

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows of modules that now call the library."""
        return tuple(row for row in self.rows if row.action == "replaced")

    @property
    def skipped(self) -> tuple[Row, ...]:
        """The rows of modules that were left alone."""
        return tuple(row for row in self.rows if row.action == "skipped")

    def to_json(self, indent: int | None = 2) -> str:
        """The rows as a JSON array of objects."""
        return json.dumps([asdict(row) for row in self.rows], indent=indent)

    def __str__(self) -> str:
        lines = [_COLUMNS, *self._lines()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS) - 1)]
        table = "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[-1]]).rstrip() for line in lines
        )
        return f"{table}\n{len(self.replaced)} replaced, {len(self.skipped)} left alone"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in self._lines()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _lines(self) -> list[tuple[str, ...]]:
        """One line per distinct treatment: rows that differ only in numbers inside the module's name are counted."""
        counts: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            name = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", row.fqn) or "(model)"
            line = (name, row.cls, row.rule, row.action, ", ".join(row.ops), row.reason)
            counts[line] = counts.get(line, 0) + 1
        return [(f"{line[0]} ×{n}" if n > 1 else line[0], *line[1:]) for line, n in counts.items()]
