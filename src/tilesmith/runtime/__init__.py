"""Launchers of portable kernels: one call for the interpreter, CUDA, Vulkan, WebGPU and Metal.

    from tilesmith.kernels import fused_ops
    from tilesmith.runtime import launch, missing

    config = fused_ops.SwiGLUConfig(hidden_dim=4096, use_half=True)
    ir = fused_ops.create_swiglu_kernel(config)
    launch(ir, config.grid(rows), {"gate": gate, "up": up, "out": out}, {"rows": rows})

`missing(backend)` says why a backend cannot be used here, or None, `missing(backend, ir.features)` why it cannot run a
kernel; no backend is imported before it is used.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from tilesmith.codegen import KernelError, KernelIR
from tilesmith.codegen.ir import FEATURES
from tilesmith.runtime.arguments import check, mark_written
from tilesmith.settings import settings

BACKENDS = ("interpreter", "cuda", "vulkan", "webgpu", "metal")
_through: ContextVar[str | None] = ContextVar("through", default=None)
_OF_DEVICE = {"cuda": "cuda", "mps": "metal"}

__all__ = ["BACKENDS", "backend_of", "launch", "missing", "subgroup_of", "through"]


def missing(backend: str, features: Collection[str] = ()) -> str | None:
    """Why `backend` cannot launch here, with what to install, or None if it can.

    features: of `KernelIR.features`, those that a kernel needs. A device that lacks one of them is a reason too, which
    names the device. Raises ValueError for another backend or feature.
    """
    module = _module(backend)
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise ValueError(f"features must be of {', '.join(FEATURES)}, got {', '.join(map(repr, unknown))}")
    return module.missing() or module.lacks(features)


@contextlib.contextmanager
def through(backend: str) -> Iterator[None]:
    """Inside, portable kernels on tensors that `backend` takes run through it, whatever TILESMITH_PORTABLE names."""
    _module(backend)
    token = _through.set(backend)
    try:
        yield
    finally:
        _through.reset(token)


def backend_of(device: torch.device | str) -> str | None:
    """The backend that takes tensors on `device` where none is named, or None.

    It is that of `through`; else for the CPU the one that TILESMITH_PORTABLE names, "interpreter" if that is not set.
    """
    device, named = torch.device(device), _through.get()
    if named is not None and device.type in _module(named).DEVICES:
        return named
    return settings().portable if device.type == "cpu" else _OF_DEVICE.get(device.type)


def subgroup_of(device: torch.device | str) -> int | None:
    """Threads of the subgroups that kernels on tensors of `device` may be built for; None: for any number alone."""
    backend = backend_of(device)
    return None if backend is None else _module(backend).subgroup()


def launch(
    ir: KernelIR,
    grid: tuple[int, int, int],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, int | float] | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Run `ir` over a grid of workgroups; it writes to `tensors` in place.

    tensors: one a buffer, by name: contiguous, all on one device, of the buffer's dtype. A buffer of u32 takes any
    dtype, whose bytes it reads. One that is written overlaps no other.
    backend: one of `BACKENDS`; None: what `backend_of` says. CUDA and Metal take tensors where they are and run in the
    current stream; Vulkan and WebGPU copy CPU tensors there and back, Vulkan CUDA tensors too, on their GPU.

    Raises ValueError or TypeError for arguments that do not fit, RuntimeError with the reason where the backend is
    missing, KernelError for a kernel that the device cannot run.
    """
    device, values = check(ir, grid, tensors, {} if scalars is None else scalars)
    backend = backend or backend_of(device)
    if backend is None:
        raise ValueError(f"no backend takes tensors on {device}; name one of {', '.join(BACKENDS)}")
    module = _module(backend)
    if device.type not in module.DEVICES:
        raise ValueError(f"{backend} takes tensors on {' or '.join(module.DEVICES)}, got {device}")
    reason = module.missing()
    if reason is not None:
        raise RuntimeError(f"{backend}: {reason}")
    lacks = module.lacks(ir.features)
    if lacks is not None:
        raise KernelError(f"{ir.name}: {lacks}")
    if min(grid) > 0:
        with torch.no_grad():
            module.launch(ir, ir.plain_grid(grid), {b.name: tensors[b.name] for b in ir.buffers}, values)
        mark_written(ir, tensors)


def _module(backend: str) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return importlib.import_module(f"tilesmith.runtime.{backend}")
