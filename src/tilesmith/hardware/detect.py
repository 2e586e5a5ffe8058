"""Which devices this machine has, and what each one is: properties from the driver first, arch.toml second."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

from tilesmith.hardware.facts import Facts, facts_of, lists, nearest, table


@dataclass(frozen=True, eq=False)
class Arch:
    """Facts about one device, in bytes and bytes per second; 0 if unknown.

    There is one object a device, compared by identity, so that it is a cheap part of a key.

    name: "sm90", "gfx942", "pvc", "apple", "cpu"; the key of tuning tables. kind: cuda, hip, xpu, mps or cpu, or the
    type of a device that the library does not know. sms: multiprocessors, compute units or cores. shared_memory: what
    one block may use, opted in. dtypes: what the device computes in natively, by torch's names.
    """

    name: str
    device_name: str
    capability: tuple[int, ...]
    sms: int
    shared_memory: int
    l2: int
    bandwidth: float
    dtypes: tuple[str, ...]
    kind: str
    registers: int = 0
    warp: int = 1

    def __str__(self) -> str:
        named = self.name if self.name != self.device_name else ""
        count = f"{self.sms} {_UNITS.get(self.kind, 'units')}" if self.sms else ""
        told = ", ".join(filter(None, (named, count)))
        return f"{self.device_name} ({told})" if told else self.device_name


_UNITS = {"cuda": "SMs", "hip": "compute units", "xpu": "Xe cores", "mps": "GPU cores", "cpu": "cores"}


_ASSUMED: ContextVar[Arch | None] = ContextVar("tilesmith_arch", default=None)


@contextlib.contextmanager
def assuming(arch: Arch) -> Iterator[None]:
    """Inside, every device is taken for one of `arch`: to ask what rules would say of a GPU that is not here."""
    token = _ASSUMED.set(arch)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def assumed() -> Arch | None:
    """The Arch that `assuming` names in this context."""
    return _ASSUMED.get()


def arch_of(device: torch.device | str) -> Arch:
    """What `device` is. Cached for each device, so it costs a dictionary look-up after the first call.

    A device type other than cuda, xpu, mps and cpu gets an Arch of that kind whose numbers are 0.
    """
    there = _ASSUMED.get()
    if there is not None:
        return there
    device = torch.device(device)
    if device.index is None and device.type in ("cuda", "xpu"):
        device = torch.device(device.type, getattr(torch, device.type).current_device())
    return _probe(device.type, device.index or 0)


def device_of(arch: Arch) -> torch.device | None:
    """The GPU of this machine that `arch` was read off, so that its driver can be asked; None for an Arch from the
    table."""
    if arch.kind == "cuda" and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if _probe("cuda", index) is arch:
                return torch.device("cuda", index)
    return None


def arch_named(name: str) -> Arch:
    """The Arch of `name` from the table alone, for a device that this machine does not have. Raises ValueError for an
    unknown name."""
    row = facts_of(name)
    if row is None:
        known = ", ".join(dict.fromkeys(row.arch for row in table()))
        raise ValueError(f"arch is {name!r}, which is unknown; it must be one of {known}")
    return _of_table(row)


@lru_cache(maxsize=64)
def _of_table(row: Facts) -> Arch:
    return _from_row(row, row.models[0] if row.models else row.arch)


def detect_available_devices() -> dict[str, list[torch.device]]:
    """Every device torch can use now. The keys cuda (AMD GPUs too), xpu, mps and cpu are always there."""
    return {
        "cuda": [torch.device("cuda", i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)],
        "xpu": [torch.device("xpu", i) for i in range(torch.xpu.device_count() if torch.xpu.is_available() else 0)],
        "mps": [torch.device("mps")] if torch.backends.mps.is_available() else [],
        "cpu": [torch.device("cpu")],
    }


@lru_cache(maxsize=64)
def _probe(kind: str, index: int) -> Arch:
    probe = {"cuda": _probe_cuda, "xpu": _probe_xpu, "mps": _probe_mps, "cpu": _probe_cpu}.get(kind)
    if probe is not None:
        return probe(index)
    return Arch(kind, kind, (), 0, 0, 0, 0.0, (), kind)


def _from_row(row: Facts, device_name: str, **read) -> Arch:
    """The row's facts, with what was read off the device (where it is known at all) in their place."""
    known = {
        "name": row.arch,
        "capability": row.capability,
        "sms": row.sms,
        "shared_memory": row.shared_memory,
        "l2": row.l2,
        "bandwidth": row.bandwidth,
        "dtypes": row.dtypes,
        "kind": row.kind,
        "registers": row.registers,
        "warp": row.warp,
    }
    return Arch(device_name=device_name, **{**known, **{k: v for k, v in read.items() if v}})


def _probe_cuda(index: int) -> Arch:
    read = torch.cuda.get_device_properties(index)
    capability = (read.major, read.minor)
    hip = torch.version.hip is not None
    name = read.gcnArchName.partition(":")[0] if hip else f"sm{read.major}{read.minor}"
    row = facts_of(name, read.name) or nearest("hip" if hip else "cuda", capability, read.name)
    row = row or Facts(name, (), "hip" if hip else "cuda", capability, 0, 32, 49_152, 65_536, 0, 0.0, ("float32",))
    return _from_row(
        row,
        read.name,
        name=name,
        capability=capability,
        sms=read.multi_processor_count,
        shared_memory=getattr(read, "shared_memory_per_block_optin", 0),
        l2=read.L2_cache_size,
        bandwidth=_bandwidth(row, read),
        registers=getattr(read, "regs_per_multiprocessor", 0),
        warp=read.warp_size,
    )


def _bandwidth(row: Facts, read) -> float:
    """The table's figure for a model it lists; else clock (kHz) x 2 x bus width, where the driver tells them."""
    if lists(row, read.name):
        return row.bandwidth
    return 2e3 * getattr(read, "memory_clock_rate", 0) * getattr(read, "memory_bus_width", 0) / 8


def _probe_xpu(index: int) -> Arch:
    read = torch.xpu.get_device_properties(index)
    row = facts_of("pvc", read.name)
    return _from_row(
        row,
        read.name,
        name="pvc" if lists(row, read.name) else "xpu",
        # Arc has none
        dtypes=tuple(name for name in row.dtypes if name != "float64" or getattr(read, "has_fp64", True)),
        sms=getattr(read, "gpu_subslice_count", 0),
        shared_memory=getattr(read, "local_mem_size", 0),
        l2=getattr(read, "last_level_cache_size", 0),
        bandwidth=_bandwidth(row, read),
    )


def _probe_mps(index: int) -> Arch:
    name = getattr(torch.backends.mps, "get_name", lambda: "Apple GPU")()
    cores = getattr(torch.backends.mps, "get_core_count", lambda: 0)()
    return _from_row(facts_of("apple"), name, sms=cores)


def _probe_cpu(index: int) -> Arch:
    return _from_row(facts_of("cpu"), _cpu_name(), sms=os.cpu_count() or 1)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found.partition(":")[2].strip() or platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def driver() -> str | None:
    """The NVIDIA driver's version, or None."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
