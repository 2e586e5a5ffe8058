"""What launchers keep: compiled kernels in memory while the process lives, and what drivers compile on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilesmith.codegen import KernelIR
from tilesmith.settings import settings

_ENTRIES = 256
_DIGEST = hashlib.sha256().digest_size


class Compiled:
    """Compiled kernels by kernel and device, the least recently used of more than 256 dropped."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple, tuple[KernelIR, Any]] = OrderedDict()

    def get(self, ir: KernelIR, device: object, make: Callable[[], Any]) -> Any:
        """The entry of this very `ir` object; hashing its tree would cost more than a launch."""
        key = (id(ir), device)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = (ir, make())  # holding ir keeps its id from being given to another
            while len(self._entries) > _ENTRIES:
                self._entries.popitem(last=False)
        with contextlib.suppress(KeyError):  # another thread may have dropped it
            self._entries.move_to_end(key)
        return entry[1]


def directory() -> Path:
    """Where compiled kernels lie: beside the tuning rows of this machine."""
    return settings().cache_dir / "kernels"


def key(*parts: str | bytes) -> str:
    """A file name for what these texts make."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:40]


def read(name: str) -> bytes | None:
    """A kept file, or None; also where it is not what was written, since a driver may crash on half a kernel."""
    try:
        kept = (directory() / name).read_bytes()
    except OSError:
        return None
    digest, data = kept[:_DIGEST], kept[_DIGEST:]
    return data if digest == hashlib.sha256(data).digest() else None


def write(name: str, data: bytes) -> None:
    """Keep a file whole or not at all; a directory that cannot be written is as good as none."""
    with contextlib.suppress(OSError):
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory(), delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, directory() / name)
