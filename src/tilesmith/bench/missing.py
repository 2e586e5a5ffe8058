"""How a peer's adapter says that it cannot compute a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Missing(Exception):
    """The peer cannot compute this call; the message says why."""


def only(args: Mapping[str, Any], peer: str, **offered: Any) -> None:
    """Raise Missing unless each named argument is absent, None, or the value that the peer has."""
    for name, value in offered.items():
        if args.get(name) is not None and args[name] != value:
            raise Missing(f"{peer} has no {name}={args[name]!r}")


def absent(args: Mapping[str, Any], peer: str, *names: str) -> None:
    """Raise Missing unless the named arguments are absent, None, or off."""
    for name in names:
        value = args.get(name)
        if value is not None and (not isinstance(value, int | float) or value):
            raise Missing(f"{peer} has no {name}")
