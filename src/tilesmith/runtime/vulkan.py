"""Launches through Vulkan, with the `vulkan` package: CPU tensors are copied to the GPU and back, CUDA's on the GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tilesmith import _install
from tilesmith.codegen import KernelError, KernelIR, spirv
from tilesmith.runtime import cache, cuda, vulkan_cuda
from tilesmith.runtime.arguments import as_bytes, check_grid, check_sizes
from tilesmith.runtime.vulkan_device import STORAGE, UNIFORM, Device

DEVICES = ("cpu", "cuda")
_FEATURES = {
    "f16": "16-bit floats",
    "bf16": "bfloat16",
    "subgroups": "subgroup arithmetic",
    "fragments": "cooperative matrices",
    "conversions": "conversions of cooperative matrices (VK_NV_cooperative_matrix2)",
}
_lock = threading.RLock()  # Vulkan leaves it to its users that no two threads use a queue at once
_compiled = cache.Compiled()
_timing: tuple[int, list[list[float]]] | None = None


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why Vulkan cannot be used."""
    if find_spec("vulkan") is None:
        return f"the package vulkan is not installed: {_install.command('vulkan')}"
    try:
        import vulkan
    except OSError as problem:
        return f"there is no Vulkan loader (Debian: apt install libvulkan1): {problem}"
    try:
        device()
    except (vulkan.VkError, vulkan.VkException, StopIteration) as problem:
        return f"no driver offers a compute device (Debian: apt install mesa-vulkan-drivers): {problem!r}"
    return None


def lacks(features: Collection[str]) -> str | None:
    """What kernels with these features need and the device does not have."""
    d = device()
    absent = [words for feature, words in _FEATURES.items() if feature in features and feature not in d.features]
    return f"{d.name} lacks {' and '.join(absent)}" if absent else None


def device() -> Device:
    """The device that launches use: torch's current CUDA device, else a discrete GPU before an integrated one before a
    CPU."""
    with _lock:
        return _device()


@lru_cache(maxsize=1)
def _device() -> Device:
    import vulkan

    return Device(vulkan)


def subgroup() -> int | None:
    """32 threads, or the number next to it that the device has and kernels can be built for."""
    low, high = device().subgroup_sizes
    size = max(low, min(high, 32))
    return size if "subgroups" in device().features and 4 <= size <= 64 else None


@contextlib.contextmanager
def timed(rounds: int) -> Iterator[list[list[float]]]:
    """For each launch inside, the µs that the device took, `rounds` times with caches cold, after the launch itself.

    A launch is repeated: for kernels that write the same each time.
    """
    global _timing
    before, _timing = _timing, (rounds, [])
    try:
        yield _timing[1]
    finally:
        _timing = before


def launch(ir: KernelIR, grid, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]) -> None:
    """Copy the tensors, run `ir`, copy back what it wrote, and wait; CUDA's in and after torch's current stream."""
    d = device()
    check_grid(ir, grid, d.max_groups, d.name)
    check_sizes(ir, tensors, d.largest_buffer, d.name)
    where = next(iter(tensors.values())).device
    if where.type == "cuda" and not takes(where):
        raise ValueError(f"{ir.name}: {d.name} does not share memory with {where}; pass CPU tensors")
    on_gpu = where.type == "cuda"
    current = torch.cuda.device(where) if on_gpu else contextlib.nullcontext()
    with current, _lock, contextlib.ExitStack() as frees:
        if on_gpu:
            cuda.make_current(where.index, ir)
        try:
            _launch(ir, grid, tensors, scalars, d, frees, on_gpu)
        finally:
            if on_gpu:
                torch.cuda.current_stream().synchronize()  # what is shared is freed next


def takes(where: torch.device) -> bool:
    """Whether launches take tensors of this CUDA device: it is the one that they use, and Vulkan's memory is visible
    to CUDA there."""
    if where.type != "cuda" or not device().exports:
        return False
    with torch.cuda.device(where):
        return cuda.device_uuid() == device().uuid


def _launch(ir: KernelIR, grid, tensors, scalars, d: Device, frees: contextlib.ExitStack, on_gpu: bool) -> None:
    pipeline = _compiled.get(ir, "vulkan", lambda: _compile(ir, d))
    buffers, addresses = [], []
    for b in ir.buffers:
        tensor = tensors[b.name]
        size = max(16, -(-tensor.nbytes // 4) * 4)
        if on_gpu:
            buffer, address = d.shared_buffer(size, ir, frees)
            addresses.append(address)
            vulkan_cuda.copy(address, tensor.data_ptr(), tensor.nbytes, ir)
        else:
            buffer = d.buffer(size, STORAGE, frees)
            d.write(buffer, memoryview(as_bytes(tensor).numpy()))
        buffers.append(buffer)
    if ir.scalars:
        block = ir.pack_scalars(scalars)
        buffers.append(d.buffer(len(block), UNIFORM, frees))
        buffers[-1].memory[:] = block
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    d.dispatch(pipeline, buffers, grid, frees)
    if _timing is not None:
        _timing[1].append(d.measure(pipeline, buffers, grid, _timing[0], frees))
    for k, b in enumerate(ir.buffers):
        tensor = tensors[b.name]
        if b.access != "read" and on_gpu:
            vulkan_cuda.copy(tensor.data_ptr(), addresses[k], tensor.nbytes, ir)
        elif b.access != "read":
            d.read(buffers[k], memoryview(as_bytes(tensor).numpy()))


def _compile(ir: KernelIR, d: Device):
    if ir.subgroup_size is not None and not d.fixes_subgroup(ir.subgroup_size):
        low, high = d.subgroup_sizes
        raise KernelError(f"{ir.name} needs subgroups of {ir.subgroup_size}; {d.name} has {low} to {high}")
    kinds = [STORAGE] * len(ir.buffers) + [UNIFORM] * bool(ir.scalars)
    return d.pipeline(spirv.generate(ir, d.limits), ir.name, kinds, ir.subgroup_size)
