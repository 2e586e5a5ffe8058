"""What a rewrite did to a model: a summary first, and one row per module that a rule looked at, with the reason."""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

CALLS = "_tilesmith_calls"  # attribute of a swapped module: op -> how often it called the op, shared with the report
OURS = "already tilesmith"  # the reason of a row of one of the library's own modules
WIDTH = 120
_COLUMNS = ("module", "class", "rule", "action", "ops", "reason")


@dataclass(frozen=True)
class Row:
    """One module: what was done to it, by which rule, and why.

    `wanted` says that a rule would have replaced the module and could not; `strict=True` raises on such rows. `quiet`
    says that nobody would want the module replaced; only `full()` shows such rows.
    """

    fqn: str
    cls: str
    rule: str
    action: Literal["replaced", "skipped"]
    ops: tuple[str, ...]
    reason: str
    wanted: bool = False
    quiet: bool = False


class Note(Protocol):
    """What goes on telling of a model after it was rewritten."""

    def told(self) -> list[str]:
        """Sentences on what has happened since."""
        ...


@dataclass(frozen=True)
class Report:
    """The rows of one `optimize` call, in the order of `model.named_modules()`.

    `print(report)` shows what was gained, what it means on the model's device, what could not be replaced or was left
    as it is and why, and how often each op has run since. `print(report.full())` shows every module, the layers of a
    model in one line. A notebook shows both.

    effects: sentences on what the replacements do on the device that the model was on. counted: module name -> op ->
    calls so far, kept up to date by the model. notes: what compiled and recorded blocks have done so far, likewise.
    advice: what the model's steps have shown that would make them faster.
    device: the type of the device that the model was on, "" if unknown; served: whether a kernel of ours for any of the
    ops runs on it.
    """

    rows: tuple[Row, ...]
    effects: tuple[str, ...] = ()
    counted: Mapping[str, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)
    advice: Note | None = field(default=None, compare=False, repr=False)
    device: str = ""
    served: bool = True

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows of modules that now call the library."""
        return tuple(row for row in self.rows if row.action == "replaced")

    @property
    def skipped(self) -> tuple[Row, ...]:
        """The rows of modules that were left alone."""
        return tuple(row for row in self.rows if row.action == "skipped")

    @property
    def wanted(self) -> tuple[Row, ...]:
        """The rows of modules that a rule would have replaced and could not."""
        return tuple(row for row in self.skipped if row.wanted)

    def calls(self) -> dict[str, int]:
        """How often the model's modules have called each op since `optimize`; 0 for one that replaced something and has
        not run. Calls of compiled code are not counted, those of a forward that checkpointing repeats are."""
        total = Counter(dict.fromkeys(sorted({op for row in self.replaced for op in row.ops}), 0))
        for of_module in self.counted.values():
            total.update(of_module)
        return dict(total)

    def to_json(self, indent: int | None = 2) -> str:
        """The rows as a JSON array of objects."""
        return json.dumps([asdict(row) for row in self.rows], indent=indent)

    def __str__(self) -> str:
        return "\n".join(self._summary())

    def full(self) -> str:
        """Every module: what was done to it and why, rows that differ only in a layer's number in one."""
        lines = [*self._summary(), "", "All modules"]
        for name, cls, rule, action, ops, reason in self._lines():
            done = f"{rule}: {action} by {ops}" if ops else f"{rule}: {action}" if rule else action
            lines += wrapped(f"{name} ({cls})  {done}", "  ", "    ")
            lines += wrapped(reason, "      ", "      ")
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        rest = Counter(row.cls for row in self.skipped if not row.wanted and not row.rule)
        left = [row for row in self.skipped if row.rule and not row.wanted]
        told = [row for row in left if not row.quiet]
        counts = [f"{len(self.replaced)} replaced", f"{len(self.wanted)} could not be replaced"]
        counts += [f"{len(told)} left as is"] if told else []
        lines = [", ".join([*counts, f"{sum(rest.values())} have no rule"])]
        lines += self._gained()
        for effect in self.effects:
            lines += wrapped(effect, "  ", "    ")
        if self.replaced and (self.device != "meta" or any(self.calls().values())):
            lines += wrapped(f"Calls since optimize(): {self._ran()}", "", "  ")
        for sentence in (sentence for note in self.notes for sentence in note.told()):
            lines += wrapped(sentence, "  ", "    ")
        for sentence in self.advice.told() if self.advice is not None else ():
            lines += wrapped(sentence[0].upper() + sentence[1:], "  ", "    ")
        lines += self._section("Could not be replaced", self.wanted)
        lines += self._section("Left as they are", told)
        if len(left) > len(told):
            lines.append(f"{len(left) - len(told)} more need no replacement; report.full() lists them")
        if rest:
            kinds = ", ".join(f"{cls} ×{n}" if n > 1 else cls for cls, n in rest.most_common())
            lines += wrapped(f"No rule for: {kinds}", "", "  ")
        return lines

    def _gained(self) -> list[str]:
        """A line for each rule: how many modules of which classes, and the ops that serve them."""
        by_rule: dict[str, list[Row]] = {}
        for row in self.replaced:
            by_rule.setdefault(row.rule, []).append(row)
        lines = []
        for rule, rows in by_rule.items():
            ops = ", ".join(dict.fromkeys(op for row in rows for op in row.ops))
            classes = ", ".join(f"{cls} ×{n}" if n > 1 else cls for cls, n in Counter(r.cls for r in rows).items())
            lines += wrapped(f"{rule + ':':<12}{f'{ops} in ' if ops else ''}{classes}", "  ", " " * 14)
        return lines

    def _section(self, title: str, rows: Iterable[Row]) -> list[str]:
        """Modules that a rule looked at and left, one line for each reason."""
        lines = []
        for (rule, cls, reason), names in self._folded(rows).items():
            lines += wrapped(f"{rule}: {_listed(names)} ({cls}): {reason}", "  ", "    ")
        return [title, *lines] if lines else []

    def _ran(self) -> str:
        calls = self.calls()
        if not any(calls.values()) and not self.served:
            return f"none of ours, as no kernel of ours for these ops runs on {self.device}"
        if not any(calls.values()) and self.notes:
            return "none of ours outside of compiled or recorded blocks, in which they are not counted"
        if not any(calls.values()):
            apart = "compiled code and a loss that a trainer computes itself are not counted"
            return f"none of ours yet; run a step and print this again ({apart})"
        never = [op for op, count in calls.items() if not count]
        told = ", ".join(f"{op} {count}" for op, count in calls.items())
        if never and self.notes:
            return f"{told} (not counted in compiled or recorded blocks)"
        return f"{told} (so far nothing was computed by {', '.join(never)})" if never else told

    def _folded(self, rows: Iterable[Row]) -> dict[tuple[str, str, str], list[str]]:
        """(rule, class, reason) -> the modules' names, numbers of layers replaced by a star."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for row in rows:
            found.setdefault((row.rule, row.cls, row.reason), []).append(_starred(row.fqn))
        return found

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in self._lines()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<pre>{html.escape(str(self))}</pre><details><summary>All modules</summary>{table}</details>"

    def _lines(self) -> list[tuple[str, ...]]:
        """One line per distinct treatment: rows that differ only in numbers inside the module's name are counted."""
        counts: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            line = (_starred(row.fqn), row.cls, row.rule, row.action, ", ".join(row.ops), row.reason)
            counts[line] = counts.get(line, 0) + 1
        return [(f"{line[0]} ×{n}" if n > 1 else line[0], *line[1:]) for line, n in counts.items()]


def _starred(fqn: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", fqn) or "the model"


def _listed(names: list[str]) -> str:
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(names).items())


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 time", "2 times"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def wrapped(text: str, first: str, more: str) -> list[str]:
    """Lines of a report, no longer than `WIDTH`; commands wrap them again where a terminal is narrower."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=more)
