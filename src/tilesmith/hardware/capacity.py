"""How much memory a device has and how much of it this process may still take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUPS = (  # limit, usage and statistics of version 2 and of version 1
    tuple(f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat")),
    tuple(f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
)
_RECLAIMED = ("total_inactive_file", "inactive_file")  # usage that the kernel gives up first: files that were read
_UNLIMITED = 2**60  # version 1 writes a number that no machine reaches


@dataclass(frozen=True)
class Capacity:
    """Bytes. total: what the device, or the container on a CPU, has. available: what torch's allocator can still give
    to this process, including what it has cached. source: where the numbers come from."""

    total: int
    available: int
    source: str


def capacity_of(device: torch.device | str) -> Capacity:
    """The memory of a device now. Raises ValueError for a type of device that does not report it."""
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Capacity(total, free + cached, "the driver")
    if device.type == "xpu":
        total = torch.xpu.get_device_properties(device).total_memory
        reserved, allocated = torch.xpu.memory_reserved(device), torch.xpu.memory_allocated(device)
        free = torch.xpu.mem_get_info(device)[0] if hasattr(torch.xpu, "mem_get_info") else total - reserved
        return Capacity(total, free + reserved - allocated, "the driver")
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return Capacity(total, max(0, total - torch.mps.current_allocated_memory()), "Metal's recommended working set")
    if device.type == "cpu":
        return _of_host()
    raise ValueError(f"capacity_of: a {device.type} device does not report its memory; cuda, xpu, mps and cpu do")


def _of_host() -> Capacity:
    total, available, source = _of_machine()
    for limit, usage, statistics in _CGROUPS:
        allowed = _number(limit)
        if allowed is not None and allowed < min(total, _UNLIMITED):
            used = max(0, (_number(usage) or 0) - _reclaimed(statistics))
            left = max(0, allowed - used)
            return Capacity(allowed, min(left, available), "the container's limit")
    return Capacity(total, available, source)


def _of_machine() -> tuple[int, int, str]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return total, total, "the system's physical memory"
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return found.get("MemTotal", total), found.get("MemAvailable", total), "/proc/meminfo"


def _reclaimed(path: str) -> int:
    """Bytes of a container's usage that hold files nobody used lately: a checkpoint that was read fills them."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return next((int(found[name]) for name in _RECLAIMED if name in found), 0)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max" where there is no limit
        return None
