"""The JSON document of one benchmark: rows with what they were measured on, by which command, and when."""

from __future__ import annotations

import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilesmith.hardware import arch_of
from tilesmith.hardware.detect import driver

OURS = "tilesmith"  # among the providers of a row
PACKAGES = ("tilesmith", "triton", "transformers", "liger-kernel", "quack-kernels", "flash-attn-4", "torchao")


def document(subject: str, device: torch.device, command: str, rows: list[dict], **more: Any) -> dict[str, Any]:
    """A document about `subject` (an op, or the name of another benchmark)."""
    return {
        "subject": subject,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "hardware": hardware(device),
        "versions": versions(),
        **more,
        "rows": rows,
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """What the device is, in plain data."""
    arch = arch_of(device)
    return {"name": arch.device_name, "arch": arch.name, "units": arch.sms, "l2": arch.l2, "driver": driver()}


def versions() -> dict[str, str]:
    """The versions of what took part, as far as it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def save(document: dict[str, Any], folder: Path) -> Path:
    """Write a document to `folder`/<arch>/<subject>.json, one row a line, and return that path."""
    path = folder / document["hardware"]["arch"] / f"{document['subject']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**document, "rows": []}, indent=1, ensure_ascii=False).removesuffix("[]\n}")
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in document["rows"])
    path.write_text(f"{head}[\n{rows}\n ]\n}}\n", encoding="utf-8")
    return path


def load(path: Path) -> dict[str, Any]:
    """A document that `save` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
