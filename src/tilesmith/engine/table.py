"""Table: tuning rows as data, each with the measurement that made it."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.registry import family_of
from tilesmith.engine.shared_files import exclusive, write_atomically
from tilesmith.settings import settings


@dataclass(frozen=True)
class Row:
    """One measured configuration of a kernel ("triton.rms_norm"): sizes, the choice, its time, what it ran on."""

    kernel: str
    dtype: str
    dims: Mapping[str, int]
    config: Mapping[str, Any]
    median_us: float
    spread: float
    torch: str
    triton: str
    driver: str
    date: str


NEAR = 2.0  # rows further than this factor away (geometric mean over the dims) say nothing about a size


@dataclass(frozen=True)
class Table:
    """The rows of one op family on one architecture: shipped ones first, then those tuned on this machine."""

    rows: tuple[Row, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(module: str, arch: str) -> Table:
        """Rows for the family of `module` (a kernel module such as tilesmith.ops.norm.triton.norm) on `arch`."""
        package = family_of(module)
        rows: list[Row] = []
        if package.startswith("tilesmith."):
            shipped = shipped_file(module, arch)
            if shipped.is_file():
                rows += [Row(**row) for row in json.loads(shipped.read_text())]
        return Table((*rows, *_kept(user_file(package, arch))))

    def nearest(self, kernel: str, dtype: torch.dtype, dims: Mapping[str, int]) -> Row | None:
        """The row of `kernel` and `dtype` nearest to `dims` in log space, or None when none is near."""
        best, best_distance = None, math.log(NEAR)
        for row in self.rows:
            if row.kernel == kernel and row.dtype == dtype_name(dtype) and row.dims.keys() == dims.keys():
                logs = [math.log(max(row.dims[k], 1) / max(dims[k], 1)) for k in dims]
                distance = math.sqrt(sum(d * d for d in logs) / max(len(logs), 1))
                if distance <= best_distance:  # a later row, tuned on this machine, wins a tie
                    best, best_distance = row, distance
        return best


def _kept(path: Path) -> list[Row]:
    """The rows of a file of this machine. One that cannot be read is as good as none: a call must not fail for it."""
    try:
        return [_checked(Row(**row)) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError, RecursionError) as problem:  # no rights, no JSON, no rows
        warnings.warn(
            f"the tuning rows in {path} cannot be read ({problem}) and are not used; delete the file, and tune again",
            stacklevel=2,
        )
        return []


def _checked(row: Row) -> Row:
    """The row. Raises TypeError where a call could not look at it."""
    sizes = isinstance(row.dims, dict) and all(type(size) is int for size in row.dims.values())
    fields = isinstance(row.config, dict) and all(isinstance(value, int) for value in row.config.values())
    if not sizes or not fields or not isinstance(row.kernel, str):
        raise TypeError("a row needs a kernel's name, and dims and a config of whole numbers")
    return row


def user_file(package: str, arch: str) -> Path:
    """Where rows tuned on this machine are kept."""
    return settings().cache_dir / "tuning" / f"{package}.{arch}.json"


def append(module: str, arch: str, rows: list[Row], path: Path | None = None) -> Path:
    """Add rows of a kernel module to a file (by default this machine's), in place of those of the same call."""
    new = {(r.kernel, r.dtype, *r.dims.items()) for r in rows}
    shared = path is None  # a file of the package has one writer, and no lock beside it
    path = path or user_file(family_of(module), arch)
    with exclusive(path) if shared else contextlib.nullcontext():
        save(path, [*(r for r in _kept(path) if (r.kernel, r.dtype, *r.dims.items()) not in new), *rows])
    return path


def shipped_file(module: str, arch: str) -> Path:
    """Where the package keeps the rows of a kernel module's family."""
    return Path(str(resources.files(family_of(module)))) / "tuning" / f"{arch}.json"


def save(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON, whole or not at all."""
    write_atomically(path, json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    Table.of.cache_clear()
