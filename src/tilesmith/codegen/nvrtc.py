"""CUDA C++ to PTX with NVRTC, through ctypes. The library is that of the pip package, torch's, or the system's."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tilesmith import _install
from tilesmith.codegen.types import KernelError

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """NVRTC. Raises KernelError, which names the extra, where there is none."""
    for path in (*_packaged(), *_NAMES):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise KernelError(f"PTX needs NVRTC: {_install.command('cuda')}, or a CUDA build of torch")


def _packaged() -> list[str]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except ImportError:
        return []
    roots = list(spec.submodule_search_locations or []) if spec else []
    patterns = [f"{root}/{folder}/lib/libnvrtc.so.*" for root in roots for folder in ("cu*", "cuda_nvrtc")]
    found = [path for pattern in patterns for path in glob.glob(pattern) if "builtins" not in Path(path).name]
    return sorted(found, reverse=True)


def compile(source: str, name: str, arch: str, binary: bool = False) -> str | bytes:
    """`source` as PTX for `arch` ("sm_90"), or as its cubin. Raises KernelError with NVRTC's log."""
    kind, _, number = arch.partition("_") if isinstance(arch, str) else ("", "", "")
    if kind != "sm" or not number[:2].isdigit():
        raise KernelError(f"arch must be like 'sm_80' or 'sm_90', got {arch!r}")
    nvrtc, program = library(), ctypes.c_void_p()
    target = f"--gpu-architecture={'sm' if binary else 'compute'}_{number}"
    options = [target.encode(), b"--std=c++17"]
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code != 0:
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise KernelError(f"{name} for {arch}: NVRTC error {code}\n{log.decode().rstrip(chr(0))}")
        if binary:
            return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode().rstrip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Callable, read: Callable, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw
