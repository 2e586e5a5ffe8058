"""The command that installs what an extra asks for, which errors name, also after an install from source."""

from __future__ import annotations

import importlib.metadata
import re


def command(extra: str) -> str:
    """How to install the packages of `extra`: by their names, since the library may not have come from an index."""
    try:
        required = importlib.metadata.requires("tilesmith") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        required = []
    asked = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
    found = [requirement.partition(";")[0].strip() for requirement in required if asked.search(requirement)]
    if not found:
        return f"pip install '.[{extra}]' in a clone of Tilesmith"
    return f"pip install {' '.join(repr(name) for name in found)}"
