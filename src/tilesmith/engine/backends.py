"""What each backend needs from the machine, said as reasons."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tilesmith.hardware.detect import Arch

REFERENCE = "reference"


@lru_cache(maxsize=1)
def triton_missing() -> str | None:
    """Why Triton cannot be used in this process, or None. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton, or a torch build that brings it)"
    return None


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def _needs_triton(device: torch.device, pinned: bool) -> str | None:
    if device.type == "cpu" and interpreting():
        return triton_missing() if pinned else "Triton's CPU interpreter is for debugging; it serves only pinned calls"
    if device.type not in ("cuda", "xpu"):
        return f"the tensors are on {device.type}; Triton kernels need a GPU that Triton reaches"
    return triton_missing()


def _needs_hopper(device: torch.device, pinned: bool) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return f"the tensors are on {device.type}; Hopper kernels need an NVIDIA GPU of compute capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}; Hopper kernels need 9.0"
    return triton_missing() or _gluon_missing()


@lru_cache(maxsize=1)
def _gluon_missing() -> str | None:
    version = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    if not version.startswith("3.6."):
        return f"Triton {version}; the Hopper kernels are written in the Gluon of Triton 3.6"
    return None


def _needs_other_kernels(device: torch.device, pinned: bool) -> str | None:
    if device.type == "cpu" and not pinned:
        return "the tensors are on cpu, where the reference serves what this would hand on; it serves only pinned calls"
    return None


def _missing_on(need: Any, arch: Arch) -> str | None:
    """What an architecture lacks, whatever this machine has."""
    if need is _needs_triton and arch.kind not in ("cuda", "hip", "xpu"):
        return f"{arch.name} is no GPU that Triton reaches"
    if need is _needs_hopper and arch.capability != (9, 0):
        return f"{arch.name} has no warpgroup products; Hopper kernels need compute capability 9.0"
    if need in (_needs_triton, _needs_hopper):
        return triton_missing()  # its registrations say what it would do
    return None if need in (None, _needs_other_kernels) else "it tells only of devices that are here"


_NEEDS: dict[str, Callable[[torch.device, bool], str | None]] = {
    "triton": _needs_triton,
    "triton_split": _needs_triton,
    "hopper": _needs_hopper,
    "hopper_split": _needs_hopper,
    "hopper_cluster": _needs_hopper,
    "hopper_causal": _needs_hopper,
    "hopper_fp8": _needs_hopper,
    "hopper_persistent": _needs_hopper,
    "dequantised": _needs_other_kernels,
}


def declare_backend(name: str, need: Callable[[torch.device, bool], str | None]) -> None:
    """Say when a backend can be asked: `need(device, pinned)` is why it cannot, in words, or None when it can."""
    _NEEDS[name] = need


def missing(backend: str, device: Any, pinned: bool = False) -> str | None:
    """Why `backend` cannot serve tensors on `device`, or None when it can be asked. In place of a device an `Arch`
    stands for one that is not here, with whatever else a backend needs."""
    need = _NEEDS.get(backend)
    if isinstance(device, Arch):
        return _missing_on(need, device)
    return need(device, pinned) if need is not None else None
