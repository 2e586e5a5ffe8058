"""Runs printed CUDA on an NVIDIA GPU: NVRTC compiles it for the device, the driver API launches it beside torch."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from tilesmith.codegen import KernelIR, cuda

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _ok(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"CUDA driver error {code}")


def run(ir: KernelIR, grid, tensors: dict[str, np.ndarray], scalars: dict) -> dict[str, np.ndarray]:
    """Copies of `tensors` after the launch."""
    driver = ctypes.CDLL("libcuda.so.1")
    device = {name: torch.from_numpy(t.view(np.uint8).copy()).cuda() for name, t in tensors.items()}
    major, minor = torch.cuda.get_device_capability()
    image = cuda.cubin(ir, f"sm_{major}{minor}")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _ok(driver.cuModuleLoadData(ctypes.byref(module), image))
    _ok(driver.cuModuleGetFunction(ctypes.byref(function), module, ir.name.encode()))
    dynamic = cuda.dynamic_shared(ir)
    if dynamic:
        _ok(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, dynamic))
    kinds = {"f32": ctypes.c_float, "u32": ctypes.c_uint32, "i32": ctypes.c_int32}
    values = [ctypes.c_void_p(device[b.name].data_ptr()) for b in ir.buffers]
    values += [kinds[s.type.dtype](scalars[s.name]) for s in ir.scalars]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _ok(driver.cuLaunchKernel(function, *grid, *ir.workgroup, dynamic, stream, pointers, None))
    torch.cuda.synchronize()
    _ok(driver.cuModuleUnload(module))
    return {name: d.cpu().numpy().view(tensors[name].dtype).reshape(tensors[name].shape) for name, d in device.items()}
