"""Releases of Triton that the Gluon kernels are known to work with, as data: releases.toml. Imports no Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OLDEST = (3, 6)
"""The first release with the Gluon that the kernels are written in."""


@dataclass(frozen=True)
class Release:
    """What was done with one release. verdict: "values" if the kernels ran and gave right values, "some" if some did,
    else "compiled".

    torch, device: with which it was done. ran: what was run, in words. joined: whether attention's joined products were
    among what gave right values; they rest on where Triton places shared memory (`ops.attn.hopper.joined`).
    """

    triton: str
    torch: str
    date: str
    verdict: str
    ran: str
    device: str = ""
    joined: bool = False

    def __str__(self) -> str:
        of = {"values": "values", "some": "values of some kernels"}.get(self.verdict)
        done = f"{of} tested on {self.device}" if of else "compiled, not run"
        return f"Triton {self.triton}: {done} with torch {self.torch}, {self.date} ({self.ran})"


@lru_cache(maxsize=1)
def releases() -> tuple[Release, ...]:
    """Every row, in the file's order. Raises ValueError for another verdict."""
    text = (resources.files("tilesmith.engine") / "releases.toml").read_text(encoding="utf-8")
    rows = tuple(Release(**row) for row in tomllib.loads(text)["release"])
    for row in rows:
        if row.verdict not in ("values", "some", "compiled"):
            raise ValueError(f"releases.toml: verdict of Triton {row.triton} must be values, some or compiled")
    return rows


@lru_cache(maxsize=1)
def installed() -> str | None:
    """The version of the Triton that this process would import, without its local part; None if there is none."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # AMD's wheel has another name, and a copied folder has none
        import triton

        found = triton.__version__
    return found.partition("+")[0]


def numbers() -> tuple[int, ...]:
    """Major and minor of the installed Triton, () if there is none."""
    return tuple(int(part) for part in (installed() or "").split(".")[:2] if part.isdecimal())


def too_old() -> str | None:
    """Why no Gluon kernel can be asked with the installed Triton, or None."""
    if numbers() < OLDEST:
        return (
            f"Triton {installed()}; the Hopper kernels are written in the Gluon of Triton {'.'.join(map(str, OLDEST))}"
        )
    return None


def tested(version: str | None) -> bool:
    """Whether the kernels are known to give right values with a release."""
    return any(row.triton == version and row.verdict == "values" for row in releases())


def joins(version: str | None) -> bool:
    """Whether joined products are known to give right values with a release."""
    return any(row.triton == version and row.joined for row in releases())


def release_status(version: str | None) -> str:
    """What is known of a release, in a sentence, for `tilesmith doctor`."""
    row = next((row for row in releases() if row.triton == version), None)
    if version is None:
        return "Triton is not installed"
    known = str(row) if row is not None else f"Triton {version}: not tested"
    return known if tested(version) else f"{known}; each Gluon kernel is tried once before it is used"
