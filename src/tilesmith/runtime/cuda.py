"""Launches on NVIDIA GPUs: NVRTC compiles, the driver launches torch's own memory in torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from tilesmith.codegen import KernelError, KernelIR, cuda, nvrtc
from tilesmith.hardware.limits import Limits
from tilesmith.runtime import cache
from tilesmith.runtime.arguments import check_grid

DEVICES = ("cuda",)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_GROUPS = (2**31 - 1, 65_535, 65_535)
_KINDS = {"f32": ctypes.c_float, "u32": ctypes.c_uint32, "i32": ctypes.c_int32}
_compiled = cache.Compiled()


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why CUDA cannot be used."""
    if torch.version.hip:
        return "this torch is built for AMD GPUs; use vulkan"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        nvrtc.library()
        load_driver()
    except (KernelError, OSError) as problem:
        return str(problem)
    return None


def lacks(features: Collection[str]) -> None:
    """Nothing that is known before a kernel is compiled."""
    return


def subgroup() -> int:
    """Threads of a warp."""
    return 32


def device_uuid() -> bytes | None:
    """What identifies torch's current CUDA device to every driver of the machine; None where torch has no such device.

    The driver says it without a context, which would take memory of a GPU that the process may not use.
    """
    if torch.version.hip or not torch.cuda.is_available():
        return None
    try:
        driver = load_driver()
    except OSError:
        return None
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    known = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDeviceGetUuid(uuid, device) == 0
    )
    return uuid.raw if known else None


def launch(ir: KernelIR, grid, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]) -> None:
    """Queue `ir` on the current stream of the tensors' device."""
    check_grid(ir, grid, _MAX_GROUPS, "CUDA")
    index = next(iter(tensors.values())).device.index
    with torch.cuda.device(index):
        make_current(index, ir)
        function = _compiled.get(ir, index, lambda: _load(ir, index))
        values = [ctypes.c_void_p(tensors[b.name].data_ptr()) for b in ir.buffers]
        values += [_KINDS[s.type.dtype](scalars[s.name]) for s in ir.scalars]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shared = cuda.dynamic_shared(ir)
        must(load_driver().cuLaunchKernel(function, *grid, *ir.workgroup, shared, stream, pointers, None), ir, "launch")


def image(ir: KernelIR, arch: str, limits: Limits | None = None) -> bytes:
    """The kernel's cubin for `arch` ("sm_90"), from the disk if it was compiled before."""
    source = cuda.generate(ir, limits)
    name = cache.key(source, arch, _nvrtc_version()) + ".cubin"
    found = cache.read(name)
    if found is None:
        found = nvrtc.compile(source, ir.name, arch, binary=True)
        cache.write(name, found)
    return found


def _load(ir: KernelIR, index: int) -> ctypes.c_void_p:
    """The kernel in this device's context. The module stays for as long as the process."""
    found = torch.cuda.get_device_properties(index)
    shared = getattr(found, "shared_memory_per_block_optin", cuda.STATIC_SHARED)
    limits = Limits(found.name, shared, 1024, (1024, 1024, 64))
    code = image(ir, f"sm_{found.major}{found.minor}", limits)
    driver, module, function = load_driver(), ctypes.c_void_p(), ctypes.c_void_p()
    must(driver.cuModuleLoadData(ctypes.byref(module), code), ir, "load")
    must(driver.cuModuleGetFunction(ctypes.byref(function), module, ir.name.encode()), ir, "find")
    dynamic = cuda.dynamic_shared(ir)
    if dynamic:
        must(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, dynamic), ir, f"give {dynamic} bytes to")
    return function


def make_current(index: int, ir: KernelIR) -> None:
    """Give a thread that has not called CUDA yet the context that torch uses."""
    driver, context, device = load_driver(), ctypes.c_void_p(), ctypes.c_int()
    must(driver.cuCtxGetCurrent(ctypes.byref(context)), ir, "find a context for")
    if not context:
        must(driver.cuDeviceGet(ctypes.byref(device), index), ir, "find a device for")
        must(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), ir, "make a context for")
        must(driver.cuCtxSetCurrent(context), ir, "set a context for")


@lru_cache(maxsize=1)
def load_driver() -> ctypes.CDLL:
    """CUDA's driver. Raises OSError where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("no CUDA driver: libcuda.so.1 is not on this machine")


@lru_cache(maxsize=1)
def _nvrtc_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def must(code: int, ir: KernelIR, what: str) -> None:
    """Raise RuntimeError for a driver call that did not succeed."""
    if code != 0:
        text = ctypes.c_char_p()
        load_driver().cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"the CUDA driver cannot {what} {ir.name}: {said} ({code})")
