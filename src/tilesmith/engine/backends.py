"""What each backend needs from the machine, said as reasons."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tilesmith import _install
from tilesmith.engine import releases
from tilesmith.hardware.detect import Arch

REFERENCE = "reference"


@dataclass(frozen=True)
class Backend:
    """A way to do ops, as far as all its kernels have it in common.

    need: (device, pinned) -> why it cannot be asked, in words, or None when it can. gluon: its kernels are written in
    Triton's Gluon, whose releases differ: with one that is not known to serve them, each is tried (`engine.trial`).
    lacks: why an architecture that is not here cannot have it, whatever else that machine has.
    """

    name: str
    need: Callable[[torch.device, bool], str | None]
    gluon: bool = False
    lacks: Callable[[Arch], str | None] | None = None


_BACKENDS: dict[str, Backend] = {}


def _needs_nothing(device: torch.device, pinned: bool) -> str | None:
    return None


def declare_backend(
    name: str,
    need: Callable[[torch.device, bool], str | None] | None = None,
    *,
    like: str | None = None,
    gluon: bool = False,
    lacks: Callable[[Arch], str | None] | None = None,
) -> None:
    """Say when a backend can be asked, before its kernels are imported: `need(device, pinned)` is why it cannot, in
    words, or None when it can; or `like` names a declared backend that needs the same; with neither it needs nothing.
    lacks: the same of an architecture that is not here.

    Families declare their own variants beside the ops that list them. Raises TypeError if both are given, ValueError
    where `like` is not declared.
    """
    if need is not None and like is not None:
        raise TypeError(f"declare_backend({name!r}): give need or like, not both")
    if like is not None and like not in _BACKENDS:
        raise ValueError(f"declare_backend({name!r}): no backend {like!r} is declared; known: {', '.join(_BACKENDS)}")
    base = _BACKENDS[like] if like is not None else Backend(name, need or _needs_nothing, gluon, lacks)
    _BACKENDS[name] = replace(base, name=name)


def declared() -> tuple[str, ...]:
    """Names of the backends that were declared."""
    return tuple(_BACKENDS)


def in_gluon(backend: str) -> bool:
    """Whether a backend's kernels are written in Gluon."""
    return backend in _BACKENDS and _BACKENDS[backend].gluon


def missing(backend: str, device: torch.device | Arch, pinned: bool = False) -> str | None:
    """Why `backend` cannot serve tensors on `device`, or None when it can be asked, as one that nobody declared can.

    An `Arch` in place of a device stands for a GPU that is not here, with whatever else the backend needs.
    """
    found = _BACKENDS.get(backend)
    if found is None:
        return None
    if isinstance(device, Arch):
        return found.lacks(device) if found.lacks is not None else None
    return found.need(device, pinned)


@lru_cache(maxsize=1)
def triton_missing() -> str | None:
    """Why Triton cannot be used in this process, or None. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {_install.triton()}"
    return None


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def _needs_triton(device: torch.device, pinned: bool) -> str | None:
    if device.type == "cpu" and interpreting():
        return triton_missing() if pinned else "Triton's CPU interpreter is for debugging; it serves only pinned calls"
    if device.type not in ("cuda", "xpu"):
        return f"the tensors are on {device.type}; Triton kernels need a GPU that Triton supports"
    return triton_missing()


def _needs_hopper(device: torch.device, pinned: bool) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return f"the tensors are on {device.type}; Hopper kernels need an NVIDIA GPU of compute capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}; Hopper kernels need 9.0"
    return triton_missing() or releases.too_old()


def _triton_lacks(arch: Arch) -> str | None:
    if arch.kind not in ("cuda", "hip", "xpu"):
        return f"{arch.name}; Triton kernels need a GPU that Triton supports"
    return triton_missing()  # its registrations say what it would do


def _hopper_lacks(arch: Arch) -> str | None:
    if (arch.kind, arch.capability) != ("cuda", (9, 0)):  # AMD counts 9.0 too
        return f"{arch.name}; Hopper kernels need an NVIDIA GPU of compute capability 9.0"
    return triton_missing()


declare_backend("triton", _needs_triton, lacks=_triton_lacks)
declare_backend("hopper", _needs_hopper, gluon=True, lacks=_hopper_lacks)
