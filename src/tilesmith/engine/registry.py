"""The registry: every declared op and plain callable by name, and the torch library that ops are defined in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch.library import Library

LIBRARY = Library("tilesmith", "FRAGMENT")
DECLARED: dict[str, Any] = {}
PLAIN: dict[str, tuple[Callable[..., Any], str]] = {}
"""Functions that torch cannot type, each with the reason: found by name, never dispatched."""


def ops() -> dict[str, Any]:
    """Every declared `Op` by name, the library's own families included."""
    importlib.import_module("tilesmith.ops").load()
    return DECLARED
