"""Launches through WebGPU, with wgpu-py: CPU tensors are copied to the device and back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor

from tilesmith import _install
from tilesmith.codegen import KernelError, KernelIR, wgsl
from tilesmith.hardware.limits import Limits
from tilesmith.runtime import cache
from tilesmith.runtime.arguments import as_bytes, check_grid, check_sizes

DEVICES = ("cpu",)
_FEATURES = {"f16": "shader-f16", "subgroups": "subgroup"}
_LIMITS = {
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-size-y",
    "max-compute-workgroup-size-z",
    "max-storage-buffer-binding-size",
    "max-buffer-size",
    "max-storage-buffers-per-shader-stage",
}
_compiled = cache.Compiled()


class Pipeline(NamedTuple):
    """A compiled kernel and the layout of its bindings."""

    layout: Any
    handle: Any


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why WebGPU cannot be used."""
    if find_spec("wgpu") is None:
        return f"the package wgpu is not installed: {_install.command('webgpu')}"
    try:
        device()
    except (ImportError, OSError) as problem:
        return f"the package wgpu does not load its library: {problem}"
    except RuntimeError as problem:
        return f"no driver offers a device (Debian: apt install mesa-vulkan-drivers libvulkan1): {problem}"
    return None


def lacks(features: Collection[str]) -> str | None:
    """What kernels with these features need and the adapter does not have.

    Without a Vulkan driver wgpu takes OpenGL, whose adapters have neither 16-bit floats nor subgroups.
    """
    if "bf16" in features:
        return "WebGPU has no bfloat16"
    if not {"fragments", "elements", "conversions"}.isdisjoint(features):
        return "WebGPU has no matrices of a subgroup"
    d = device()
    absent = [name for feature, name in _FEATURES.items() if feature in features and name not in d.features]
    if not absent:
        return None
    info = d.adapter.info
    hint = "; a Vulkan driver may have it (Debian: apt install mesa-vulkan-drivers libvulkan1)"
    return f"{adapter_name(info)} lacks {' and '.join(absent)}" + hint * (info["backend_type"] == "OpenGL")


def adapter_name(info: Mapping[str, Any]) -> str:
    """What an adapter calls itself, and the API behind it."""
    return f"the WebGPU adapter {info['device'] or info['description'] or 'without a name'} ({info['backend_type']})"


@lru_cache(maxsize=1)
def device():
    """The device that launches use, with all of the adapter's limits and of what kernels may use."""
    # The EGL that wgpu looks for complains on machines without a display when this is not set.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    import wgpu

    adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    features = sorted(set(_FEATURES.values()) & set(adapter.features))
    limits = {name: value for name, value in adapter.limits.items() if name in _LIMITS}
    return adapter.request_device_sync(required_features=features, required_limits=limits)


def subgroup() -> int | None:
    """WebGPU fixes no number, and not every device has operations of subgroups."""
    return None


def launch(ir: KernelIR, grid, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]) -> None:
    """Copy the tensors, run `ir`, copy back what it wrote, and wait."""
    import wgpu

    d = device()
    allowed = d.limits["max-compute-workgroups-per-dimension"]
    check_grid(ir, grid, (allowed,) * 3, "WebGPU")
    check_sizes(ir, tensors, d.limits["max-storage-buffer-binding-size"], "this WebGPU device")
    pipeline = _compiled.get(ir, "webgpu", lambda: _compile(ir))
    storage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    buffers = []
    for b in ir.buffers:
        data = as_bytes(tensors[b.name]).numpy().tobytes()
        buffers.append(
            d.create_buffer_with_data(data=data + bytes(max(16, -(-len(data) // 4) * 4) - len(data)), usage=storage)
        )
    if ir.scalars:
        buffers.append(d.create_buffer_with_data(data=ir.pack_scalars(scalars), usage=wgpu.BufferUsage.UNIFORM))
    entries = [{"binding": k, "resource": {"buffer": b, "offset": 0, "size": b.size}} for k, b in enumerate(buffers)]
    group = d.create_bind_group(layout=pipeline.layout, entries=entries)
    encoder = d.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline.handle)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(*grid)
    compute.end()
    d.queue.submit([encoder.finish()])
    for b, buffer in zip(ir.buffers, buffers):
        if b.access != "read":
            data = as_bytes(tensors[b.name]).numpy()
            memoryview(data)[:] = d.queue.read_buffer(buffer)[: data.nbytes]
    for buffer in buffers:
        buffer.destroy()


def _compile(ir: KernelIR) -> Pipeline:
    import wgpu

    d = device()
    found = d.limits
    buffers = found["max-storage-buffers-per-shader-stage"]
    if len(ir.buffers) > buffers:
        raise KernelError(f"{ir.name} has {len(ir.buffers)} buffers; {adapter_name(d.adapter.info)} binds {buffers}")
    size = tuple(found[f"max-compute-workgroup-size-{axis}"] for axis in "xyz")
    limits = Limits(
        "this WebGPU device",
        found["max-compute-workgroup-storage-size"],
        found["max-compute-invocations-per-workgroup"],
        size,
    )
    module = d.create_shader_module(code=wgsl.generate(ir, limits, enable_subgroups=False))
    kinds = ["read-only-storage" if b.access == "read" else "storage" for b in ir.buffers]
    kinds += ["uniform"] * bool(ir.scalars)
    entries = [
        {"binding": k, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}} for k, kind in enumerate(kinds)
    ]
    layout = d.create_bind_group_layout(entries=entries)  # "auto" would leave out what a kernel does not use
    whole = d.create_pipeline_layout(bind_group_layouts=[layout])
    handle = d.create_compute_pipeline(layout=whole, compute={"module": module, "entry_point": ir.name})
    return Pipeline(layout, handle)
