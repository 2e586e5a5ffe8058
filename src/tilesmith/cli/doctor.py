"""`tilesmith doctor`: the machine, the versions, and which kernel serves each op here."""

from __future__ import annotations

import json
import platform
from typing import Annotated

import typer

from tilesmith.cli.output import CHECK_FAILED, console, table


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    device: Annotated[str | None, typer.Option(help="Choose kernels for this device only.")] = None,
) -> None:
    """Devices, versions, and for each op the kernel that serves it here and why not the others.

    Exits with 1 when an op would run its reference on an accelerator.
    """
    found = examine(device)
    if as_json:
        console.print_json(json.dumps(found))
    else:
        _show(found)
    if found["problems"]:
        raise typer.Exit(CHECK_FAILED)


def examine(device_name: str | None = None) -> dict:
    """What doctor prints, as plain data."""
    import torch

    from tilesmith.bench.document import versions
    from tilesmith.cli.output import device_named
    from tilesmith.engine import releases
    from tilesmith.hardware import arch_of, detect_available_devices
    from tilesmith.hardware.detect import driver

    devices = [d for kind in detect_available_devices().values() for d in kind]
    chosen = device_named(device_name)
    choices = [row for name in _forward_ops() for row in _choices(name, chosen)]
    slow = [c["op"] for c in choices if c["kernel"] == "reference"] if chosen.type != "cpu" else []
    return {
        "platform": platform.platform(),
        "versions": versions(),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": driver(),
        "triton": releases.standing(releases.installed()),
        "devices": [_device(d, arch_of(d)) for d in devices],
        "device": str(chosen),
        "ops": choices,
        "problems": [f"{op} runs its reference on {chosen}" for op in slow],
    }


def _forward_ops() -> list[str]:
    from tilesmith.engine import cases, ops

    return [name for name in sorted(ops()) if not name.endswith("_vjp") and cases(name)]


def _choices(name: str, device) -> list[dict]:
    from tilesmith.cli.explain import _arguments, _empty
    from tilesmith.cli.output import dtype_named
    from tilesmith.cli.recorder import choices_of
    from tilesmith.engine import ops

    built = _empty(_arguments(name, None, {}, {}), device, dtype_named(None, device))
    return [
        {
            "op": choice.kernel.op,
            "kernel": choice.kernel.backend,
            "because": "; ".join(filter(None, (choice.because, choice.note))),
            "rejected": {backend: list(reasons) for backend, reasons in choice.rejected},
        }
        for choice in choices_of(ops()[name], built)
    ]


def _device(device, arch) -> dict:
    import torch

    row = {"device": str(device), "name": arch.device_name, "arch": arch.name, "units": arch.sms, "l2": arch.l2}
    row |= {"shared_memory": arch.shared_memory, "bandwidth": arch.bandwidth}
    if device.type in ("cuda", "xpu"):
        row["memory"] = torch.get_device_module(device).get_device_properties(device).total_memory
    return row


def _show(found: dict) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    console.print(versions, highlight=False)
    if found["cuda"]:
        console.print(f"CUDA or ROCm {found['cuda']}, driver {found['driver'] or 'unknown'}", highlight=False)
    console.print(found["triton"], highlight=False)
    console.print()
    rows = [
        (
            d["device"],
            d["name"],
            d["arch"],
            str(d["units"]),
            _size(d.get("memory")),
            _size(d["shared_memory"]),
            _size(d["l2"]),
        )
        for d in found["devices"]
    ]
    columns = ("device", "name", "arch", "units", "memory", "shared", "L2")
    console.print(table(columns, rows, title="Devices", right="units,memory,shared,L2"))
    console.print()
    rows = [(c["op"], c["kernel"], c["because"], _reasons(c["rejected"])) for c in found["ops"]]
    console.print(table(("op", "kernel", "because", "not"), rows, title=f"Kernels on {found['device']}"))
    for problem in found["problems"]:
        console.print(f"[yellow]![/] {problem}", highlight=False)


def _reasons(rejected: dict[str, list[str]]) -> str:
    return "\n".join(f"{backend}: {'; '.join(reasons)}" for backend, reasons in rejected.items())


def _size(count: int | None) -> str:
    if not count:
        return ""
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB")) if count >= u), (2**10, "KiB"))
    return f"{count / unit:.0f} {name}"
