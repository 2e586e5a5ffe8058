"""Launches through Vulkan, with the `vulkan` package: CPU tensors are copied to the device and back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec

from torch import Tensor

from tilesmith.codegen import KernelError, KernelIR, spirv
from tilesmith.runtime import cache
from tilesmith.runtime.arguments import as_bytes, check_grid, check_sizes
from tilesmith.runtime.vulkan_device import STORAGE, UNIFORM, Device

DEVICES = ("cpu",)
_FEATURES = {
    "f16": "16-bit floats",
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
        return "the package vulkan is not installed: pip install 'tilesmith[vulkan]'"
    try:
        import vulkan
    except OSError as problem:
        return f"there is no Vulkan loader (Debian: apt install libvulkan1): {problem}"
    try:
        device()
    except (vulkan.VkError, vulkan.VkException, StopIteration) as problem:
        return f"no driver offers a compute device (Debian: apt install mesa-vulkan-drivers): {problem!r}"
    return None


def device() -> Device:
    """The device that launches use: torch's current CUDA device, else a discrete GPU before an integrated one before a
    CPU."""
    with _lock:
        return _device()


@lru_cache(maxsize=1)
def _device() -> Device:
    import vulkan

    return Device(vulkan)


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
    """Copy the tensors, run `ir`, copy back what it wrote, and wait."""
    d = device()
    check_grid(ir, grid, d.max_groups, d.name)
    check_sizes(ir, tensors, d.largest_buffer, d.name)
    with _lock, contextlib.ExitStack() as frees:
        _launch(ir, grid, tensors, scalars, d, frees)


def _launch(ir: KernelIR, grid, tensors, scalars, d: Device, frees: contextlib.ExitStack) -> None:
    pipeline = _compiled.get(ir, "vulkan", lambda: _compile(ir, d))
    buffers = []
    for b in ir.buffers:
        data = as_bytes(tensors[b.name]).numpy()
        buffers.append(d.buffer(max(16, -(-data.nbytes // 4) * 4), STORAGE, frees))
        d.write(buffers[-1], memoryview(data))
    if ir.scalars:
        block = ir.pack_scalars(scalars)
        buffers.append(d.buffer(len(block), UNIFORM, frees))
        buffers[-1].memory[:] = block
    d.dispatch(pipeline, buffers, grid, frees)
    if _timing is not None:
        _timing[1].append(d.measure(pipeline, buffers, grid, _timing[0], frees))
    for b, buffer in zip(ir.buffers, buffers):
        if b.access != "read":
            d.read(buffer, memoryview(as_bytes(tensors[b.name]).numpy()))


def _compile(ir: KernelIR, d: Device):
    absent = [words for feature, words in _FEATURES.items() if feature in ir.features and feature not in d.features]
    if absent:
        raise KernelError(f"{ir.name} needs {' and '.join(absent)}, which {d.name} does not have")
    if ir.subgroup_size is not None and not d.fixes_subgroup(ir.subgroup_size):
        low, high = d.subgroup_sizes
        raise KernelError(f"{ir.name} needs subgroups of {ir.subgroup_size}; {d.name} has {low} to {high}")
    kinds = [STORAGE] * len(ir.buffers) + [UNIFORM] * bool(ir.scalars)
    return d.pipeline(spirv.generate(ir, d.limits), ir.name, kinds, ir.subgroup_size)
