"""What every launcher checks of its arguments, and what it does with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilesmith.codegen import KernelIR
from tilesmith.codegen.ir import a_kernel

DTYPES = {
    "f32": (torch.float32,),
    "f16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "i32": (torch.int32,),
}


def check(
    ir: KernelIR, grid: tuple, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]
) -> tuple[torch.device, dict[str, int | float]]:
    """The device of the tensors, and the scalars as Python's numbers. Raises ValueError or TypeError that names the
    argument."""
    a_kernel(ir, "launch").plain_grid(grid)
    ir.want("tensors", [b.name for b in ir.buffers], tensors)
    plain = ir.plain_scalars(scalars)
    for b in ir.buffers:
        _check_tensor(ir, b, tensors[b.name])
    devices = {t.device for t in tensors.values()}
    if len(devices) != 1:
        raise ValueError(f"{ir.name}: tensors are on {', '.join(sorted(map(str, devices)))}; move them to one device")
    device = devices.pop()
    if device.type == "meta":
        raise ValueError(f"{ir.name}: tensors on the meta device have no memory; pass some on cpu, cuda or mps")
    _check_overlap(ir, tensors)
    return device, plain


def check_grid(ir: KernelIR, grid: tuple, allowed: tuple, device: str) -> None:
    """Raise ValueError for a grid beyond what a device allows along x, y, z."""
    if any(n > most for n, most in zip(grid, allowed)):
        raise ValueError(
            f"{ir.name}: a grid of {tuple(grid)}; {device} allows {tuple(allowed)} workgroups along x, y, z"
        )


def check_sizes(ir: KernelIR, tensors: Mapping[str, Tensor], most: int, device: str) -> None:
    """Raise ValueError for a tensor of more bytes than a kernel may bind."""
    for name, tensor in tensors.items():
        if tensor.nbytes > most:
            raise ValueError(
                f"{ir.name}: {name} has {tensor.nbytes:,} bytes; {device} binds {most:,}; launch the kernel in parts"
            )


def _check_tensor(ir: KernelIR, b, tensor: Tensor) -> None:
    where = f"{ir.name}: {b.name}"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(tensor).__name__}")
    allowed = DTYPES.get(b.type.dtype)
    if allowed is not None and tensor.dtype not in allowed:
        raise TypeError(f"{where} is a buffer of {b.type}: wanted {allowed[0]}, got {tensor.dtype}")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{where} is a view that negates what lies in memory; pass {b.name}.resolve_neg()")
    if not tensor.is_contiguous():
        raise ValueError(f"{where} must be contiguous, got strides {tuple(tensor.stride())}")
    if tensor.nbytes % b.type.bytes:
        raise ValueError(f"{where} has {tensor.nbytes} bytes, not a multiple of the {b.type.bytes} of {b.type}")
    if tensor.nbytes and tensor.data_ptr() % b.type.bytes:
        raise ValueError(f"{where} must start at a multiple of {b.type.bytes} bytes; clone() it")
    if tensor.nbytes // b.type.bytes > 2**32:
        raise ValueError(f"{where} has more than 2**32 elements; launch the kernel in parts")


def _check_overlap(ir: KernelIR, tensors: Mapping[str, Tensor]) -> None:
    spans = [
        (t.data_ptr(), t.data_ptr() + t.nbytes, b.name, b.access)
        for b in ir.buffers
        for t in (tensors[b.name],)
        if t.nbytes
    ]
    for i, (start, end, name, access) in enumerate(spans):
        for other_start, other_end, other, other_access in spans[:i]:
            if start < other_end and other_start < end and (access, other_access) != ("read", "read"):
                raise ValueError(f"{ir.name}: {other} and {name} overlap in memory, and one of them is written")


def mark_written(ir: KernelIR, tensors: Mapping[str, Tensor]) -> None:
    """Tell autograd that the outputs changed, as an operation in place does."""
    for b in ir.buffers:
        if b.access != "read":
            torch.autograd.graph.increment_version(tensors[b.name])


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat; a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)
