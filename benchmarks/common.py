"""What the scripts of this folder share: how they print, save results and profile kernels."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tilesmith.bench.document import versions
from tilesmith.hardware.detect import driver

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def say(*what: object) -> None:
    """Print a line at once."""
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def provenance() -> dict[str, Any]:
    """Where, when and by which command results were made: the head of their document."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": driver(),
        **versions(),
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }


def load(path: str | Path) -> dict[str, Any]:
    """A document that was saved before; empty where there is none."""
    path = Path(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(path: str | Path, document: dict[str, Any]) -> None:
    """Write a document as JSON."""
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def profiled(run: Callable[[], object], *, calls: int = 1, warm: int = 1) -> list[Any]:
    """The kernels and copies of `calls` runs, in the order in which they began, as events of torch's profiler.
    warm: runs before them."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return sorted(kernels, key=lambda kernel: kernel.time_range.start)


def named(kernel: Any) -> str:
    """The name of a `profiled` kernel, cut where those of templates get long."""
    return kernel.name[:100]


def spent(kernels: Iterable[Any], calls: int = 1) -> Counter[str]:
    """µs that each of the kernels of so many `profiled` calls takes in one of them, by name, in their order."""
    found: Counter[str] = Counter()
    for kernel in kernels:
        found[named(kernel)] += kernel.device_time / calls
    return found
