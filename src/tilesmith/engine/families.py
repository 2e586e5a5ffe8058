"""The ops of the library's own families, which are declared when they are first asked for."""

from __future__ import annotations

import importlib
from typing import Any

from tilesmith.engine.registry import DECLARED


def ops() -> dict[str, Any]:
    """Every declared `Op` by name, the library's own families included."""
    importlib.import_module("tilesmith.ops").load()  # by name, since ops are a layer above
    return DECLARED
