"""Facts about devices, read from arch.toml. Imports no torch."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Facts:
    """One row of arch.toml, in bytes and bytes per second. 0 means that the vendor does not publish the number."""

    arch: str
    models: tuple[str, ...]
    kind: str
    capability: tuple[int, ...]
    sms: int
    warp: int
    shared_memory: int
    registers: int
    l2: int
    bandwidth: float
    dtypes: tuple[str, ...]


@lru_cache(maxsize=1)
def table() -> tuple[Facts, ...]:
    """Every row, in the file's order."""
    text = (resources.files("tilesmith.hardware") / "arch.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["gpu"]
    return tuple(Facts(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)


def facts_of(arch: str, device_name: str = "") -> Facts | None:
    """The row of `arch` whose model stands in `device_name`, else the first row of `arch`, else None."""
    rows = [row for row in table() if row.arch == arch]
    named = [row for row in rows if lists(row, device_name)]
    return next(iter(named + rows), None)


def lists(row: Facts, device_name: str) -> bool:
    """Whether one of the row's models stands in `device_name` as a word: a GH200 is no H200, an RTX A1000 no A10."""
    return any(re.search(rf"(?<![A-Za-z0-9]){re.escape(model)}(?!\d)", device_name) for model in row.models)


def nearest(kind: str, capability: tuple[int, ...], device_name: str = "") -> Facts | None:
    """The row for a device: its capability, else the highest one below it in the same generation, else None.

    Kinds without a capability have one arch each, which serves every device of the kind.
    """
    at_most = [
        r for r in table() if r.kind == kind and r.capability[:1] == capability[:1] and r.capability <= capability
    ]
    if not at_most:
        return None
    return facts_of(max(at_most, key=lambda row: row.capability).arch, device_name)
