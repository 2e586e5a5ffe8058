"""Launches on Apple GPUs: torch compiles the printed Metal and dispatches it on MPS tensors in its own stream."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tilesmith.codegen import KernelIR, metal
from tilesmith.runtime import cache

DEVICES = ("mps",)
_compiled = cache.Compiled()


def missing() -> str | None:
    """Why Metal cannot be used."""
    if not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    if not hasattr(torch.mps, "compile_shader"):
        return f"torch {torch.__version__} has no torch.mps.compile_shader"
    return None


def lacks(features: Collection[str]) -> None:
    """Nothing that is known before a kernel is compiled."""
    return


def subgroup() -> int:
    """Threads of a simdgroup."""
    return 32


def launch(ir: KernelIR, grid, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]) -> None:
    """Queue `ir` on the MPS stream. macOS itself keeps compiled pipelines on disk."""
    library = _compiled.get(ir, "mps", lambda: torch.mps.compile_shader(metal.generate(ir)))
    arguments = [tensors[b.name] for b in ir.buffers]
    arguments += [float(scalars[s.name]) if s.type.is_float else int(scalars[s.name]) for s in ir.scalars]
    threads = [n * size for n, size in zip(grid, ir.workgroup)]
    getattr(library, ir.name)(*arguments, threads=threads, group_size=list(ir.workgroup))
