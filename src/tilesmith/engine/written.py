"""Functions generated as Python source for what is known before their calls, without loops or lookups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def written(head: str, lines: Sequence[str], what: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function with these lines. head: its name and parameters. what: tracebacks call its text so. names: its
    globals, to which it is added."""
    source = f"def {head}:\n    " + "\n    ".join(lines)
    exec(compile(source, f"<tilesmith {what}>", "exec"), names)
    return names[head.partition("(")[0]]
