"""The commands that install what is missing, as errors and `tilesmith doctor` name them."""

from __future__ import annotations

import importlib.metadata
import re


def command(extra: str) -> str:
    """How to install the packages of `extra`: by their names, since the library may not have come from an index."""
    required = _required("tilesmith")
    asked = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
    found = [requirement.partition(";")[0].strip() for requirement in required if asked.search(requirement)]
    if not found:
        return f"pip install '.[{extra}]' in a clone of Tilesmith"
    return f"pip install {' '.join(repr(name) for name in found)}"


def triton() -> str:
    """How to install Triton: the release that the installed torch requires, else that of the extra `interpreter`.

    A GPU build of torch pins its Triton, which has another name for AMD and Intel; a CPU build requires none. Any other
    release may be one that torch.compile or the Hopper kernels have not been tested with.
    """
    named = re.compile(r"(pytorch-)?triton(-rocm|-xpu)?\b(?!-)")
    pinned = [requirement for requirement in _required("torch") if named.match(requirement)]
    if not pinned:
        return command("interpreter")
    release = pinned[0].partition(";")[0].strip()
    index = "" if re.match(r"triton\b(?!-)", release) else ", from the index that torch came from"
    return f"pip install {release!r}{index}"


def _required(package: str) -> list[str]:
    """The requirements of an installed package; none for one that runs from its source tree."""
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
