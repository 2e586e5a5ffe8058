"""Memory that Vulkan and CUDA share on one GPU: Vulkan allocates and exports it, CUDA's driver maps it.

torch's own memory cannot be exported: its allocator asks for it without a handle. So a tensor is copied to such memory
and back on the device itself. For three tensors of 134 MB that and the mapping take 11 ms, by the host 90 (H200).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

from tilesmith.codegen import KernelIR
from tilesmith.runtime import cuda

_OPAQUE_FD = 1  # both of Vulkan's handle types and of CUDA's
_EXPORTABLE, _DEDICATED_ONLY = 2, 1  # of a kind of external memory
EXTENSION = "VK_KHR_external_memory_fd"


class _Handle(ctypes.Structure):
    """CUDA_EXTERNAL_MEMORY_HANDLE_DESC: its union holds a file descriptor, or two pointers."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("fd", ctypes.c_int64),
        ("name", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    )


class _Mapping(ctypes.Structure):
    """CUDA_EXTERNAL_MEMORY_BUFFER_DESC."""

    _fields_ = (
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    )


def exports(vk: Any, physical: Any, usage: int) -> bool:
    """Whether buffers of this device can be exported without memory of their own each."""
    info = vk.VkPhysicalDeviceExternalBufferInfo(usage=usage, handleType=_OPAQUE_FD)
    found = vk.vkGetPhysicalDeviceExternalBufferProperties(physical, info).externalMemoryProperties
    return bool(found.externalMemoryFeatures & _EXPORTABLE) and not found.externalMemoryFeatures & _DEDICATED_ONLY


def mapped(fd: int, allocated: int, size: int, ir: KernelIR, frees: contextlib.ExitStack) -> int:
    """The CUDA address of `size` bytes of exported memory, whose file descriptor is used up."""
    driver, memory, address = cuda.load_driver(), ctypes.c_void_p(), ctypes.c_uint64()
    handle = _Handle(type=_OPAQUE_FD, fd=fd, size=allocated)
    code = driver.cuImportExternalMemory(ctypes.byref(memory), ctypes.byref(handle))
    if code != 0:  # else the driver owns it
        os.close(fd)
    cuda.must(code, ir, "import memory for")
    frees.callback(driver.cuDestroyExternalMemory, memory)
    mapping = _Mapping(offset=0, size=size)
    done = driver.cuExternalMemoryGetMappedBuffer(ctypes.byref(address), memory, ctypes.byref(mapping))
    cuda.must(done, ir, "map memory for")
    frees.callback(driver.cuMemFree_v2, ctypes.c_uint64(address.value))
    return address.value


def copy(target: int, source: int, size: int, ir: KernelIR) -> None:
    """Copy bytes of the GPU to others of it, in torch's current stream."""
    if size:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        done = cuda.load_driver().cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream
        )
        cuda.must(done, ir, "copy tensors of")
