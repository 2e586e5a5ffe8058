"""The registry: every declared op and plain callable by name, and the torch library that ops are defined in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.library import Library

LIBRARY = Library("tilesmith", "FRAGMENT")
DECLARED: dict[str, Any] = {}
PLAIN: dict[str, tuple[Callable[..., Any], str]] = {}
"""Functions that torch cannot type, each with the reason: found by name, never dispatched."""


def family_of(module: str) -> str:
    """The op family that a module belongs to: tilesmith.ops.norm for tilesmith.ops.norm.triton.softmax; of a module
    outside the library, its package."""
    root, parts = "tilesmith.ops.", module.split(".")
    return ".".join(parts[:3]) if module.startswith(root) else ".".join(parts[:-1])


def backend_of(module: str) -> str:
    """The backend that a kernel's module is for, by its place in the family: triton for tilesmith.ops.norm.triton.norm,
    portable for tilesmith.ops.gemm.portable; of a module outside the library, the module's own name."""
    family = family_of(module)
    inside = module.removeprefix(f"{family}." if family else "").split(".")
    return inside[0]
