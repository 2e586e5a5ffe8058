"""Launches in the interpreter: any kernel on CPU tensors, slowly, and with every access checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec

from torch import Tensor

from tilesmith.codegen import KernelIR
from tilesmith.runtime.arguments import as_bytes

DEVICES = ("cpu",)
_NUMPY = {"f32": "float32", "f16": "float16", "bf16": "uint16", "u32": "uint32", "i32": "int32"}


def missing() -> str | None:
    """Why the interpreter cannot run."""
    return None if find_spec("numpy") else "NumPy is not installed: pip install numpy"


def lacks(features: Collection[str]) -> None:
    """Nothing: it has all features."""
    return


def subgroup() -> int:
    """Threads that act together, as many as most GPUs have."""
    return 32


def launch(ir: KernelIR, grid, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]) -> None:
    """Interpret `ir` on the tensors' own memory."""
    from tilesmith.codegen import interpret

    arrays = {b.name: as_bytes(tensors[b.name]).numpy().view(_NUMPY[b.type.dtype]) for b in ir.buffers}
    interpret(ir, grid, arrays, scalars)
