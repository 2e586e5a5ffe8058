"""Runs printed WGSL or SPIR-V through wgpu-py: naga reads it, and a Vulkan driver runs it (lavapipe without a GPU)."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache

import numpy as np

from tilesmith.codegen import KernelIR

FEATURES = {"f16": "shader-f16", "subgroups": "subgroup"}


@lru_cache(maxsize=1)
def device():
    """The device, with f16 and subgroups where it has them; or the reason why there is none."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    try:
        import wgpu
    except ImportError:
        return "wgpu is not installed: pip install wgpu"
    try:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    except RuntimeError as problem:
        return f"no Vulkan driver (apt install mesa-vulkan-drivers libvulkan1): {problem}"
    wanted = set(FEATURES.values()) & set(adapter.features)
    return adapter.request_device_sync(required_features=sorted(wanted))


def missing(features=()) -> str | None:
    """Why no kernel with these features, as in `KernelIR.features`, can run: no device, or one without them."""
    d = device()
    if isinstance(d, str):
        return d
    absent = [name for feature, name in FEATURES.items() if feature in features and name not in d.features]
    return f"the adapter {d.adapter.summary} lacks {', '.join(absent)}" if absent else None


def validate(source: str) -> str:
    """What naga says against WGSL; empty if nothing."""
    import wgpu

    try:
        device().create_shader_module(code=source)
    except wgpu.GPUError as problem:
        return str(problem)
    return ""


def run(ir: KernelIR, code: str | bytes, grid, tensors: dict[str, np.ndarray], scalars: dict) -> dict[str, np.ndarray]:
    """Copies of `tensors` after the launch."""
    import wgpu

    d = device()
    module = d.create_shader_module(code=code)
    kinds = ["read-only-storage" if b.access == "read" else "storage" for b in ir.buffers] + ["uniform"] * bool(
        ir.scalars
    )
    layout = d.create_bind_group_layout(
        entries=[
            {"binding": k, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
            for k, kind in enumerate(kinds)
        ]
    )  # "auto" would leave out what a kernel does not use
    whole = d.create_pipeline_layout(bind_group_layouts=[layout])
    pipeline = d.create_compute_pipeline(layout=whole, compute={"module": module, "entry_point": ir.name})
    storage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    padded = {b.name: tensors[b.name].tobytes() + bytes(-tensors[b.name].nbytes % 4) for b in ir.buffers}
    buffers = [d.create_buffer_with_data(data=padded[b.name], usage=storage) for b in ir.buffers]
    if ir.scalars:
        buffers.append(d.create_buffer_with_data(data=ir.pack_scalars(scalars), usage=wgpu.BufferUsage.UNIFORM))
    entries = [{"binding": k, "resource": {"buffer": b, "offset": 0, "size": b.size}} for k, b in enumerate(buffers)]
    group = d.create_bind_group(layout=layout, entries=entries)
    encoder = d.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(*grid)
    compute.end()
    d.queue.submit([encoder.finish()])
    out = {}
    for b, buffer in zip(ir.buffers, buffers):
        data = bytes(d.queue.read_buffer(buffer))[: tensors[b.name].nbytes]
        out[b.name] = np.frombuffer(data, tensors[b.name].dtype).reshape(tensors[b.name].shape)
    return out
