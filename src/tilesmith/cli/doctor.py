"""`tilesmith doctor`: the machine, the versions, and which kernel serves each op here."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Annotated

import typer

from tilesmith import __version__, _install
from tilesmith.cli.output import CHECK_FAILED, console, print_json, print_lines, table


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    device: Annotated[str | None, typer.Option(help="Choose kernels for this device only.")] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="List each op, its kernel, and why the other kernels do not serve it."),
    ] = False,
) -> None:
    """Show which ops run fast kernels on this machine, which do not and why, and what would change that.

    Exits with 1 if an op would run its reference on an accelerator, or is pinned to a kernel that cannot serve it.
    """
    found = examine(device)
    if as_json:
        print_json(found)
    else:
        _summarise(found)
        if verbose:
            _show(found)
        for problem in found["problems"]:
            print_lines(f"! {problem}", style="yellow")
    if found["problems"]:
        raise typer.Exit(CHECK_FAILED)


def examine(device_name: str | None = None) -> dict:
    """What doctor prints, as plain data."""
    import torch

    from tilesmith.bench.document import versions
    from tilesmith.cli.output import device_named
    from tilesmith.engine import releases, trial
    from tilesmith.hardware import arch_of, detect_available_devices
    from tilesmith.hardware.detect import driver

    devices = [d for kind in detect_available_devices().values() for d in kind]
    chosen = device_named(device_name)
    choices, problems = [], []
    for name in _forward_ops():
        try:
            choices += _choices(name, chosen)
        except NotImplementedError as problem:  # what is pinned cannot serve it
            problems.append(str(problem))
    slow = [c["op"] for c in choices if c["kernel"] == "reference"] if chosen.type != "cpu" else []
    return {
        "tilesmith": __version__,
        "platform": platform.platform(),
        "versions": versions(),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": driver(),
        "triton": releases.release_status(releases.installed()),
        "refused": trial.failures(chosen),
        "devices": [_device(d, arch_of(d)) for d in devices],
        "device": str(chosen),
        "arch": str(arch_of(chosen)),
        "ops": choices,
        "advice": _advice(chosen, driver()),
        "problems": [*problems, *(f"{op} runs its reference on {chosen}" for op in slow)],
    }


def _forward_ops() -> list[str]:
    from tilesmith.engine import cases, ops

    return [name for name in sorted(ops()) if not name.endswith("_vjp") and cases(name)]


def _choices(name: str, device) -> list[dict]:
    from tilesmith.cli.explain import arguments, as_dict, empty
    from tilesmith.cli.output import dtype_named
    from tilesmith.cli.recorder import choices_of
    from tilesmith.engine import ops

    built = empty(arguments(name, None, {}, {}), dtype_named(None, device))
    return [
        {**as_dict(choice), "because": "; ".join(filter(None, (choice.because, choice.note)))}
        for choice in choices_of(ops()[name], built, device=device)
    ]


def _advice(device, driver: str | None) -> list[str]:
    """What would make more of the library's kernels serve calls here: commands, or what is missing."""
    import torch

    from tilesmith.engine.backends import triton_missing

    if device.type == "cpu" and driver and torch.version.cuda is None:
        return [
            f"torch is a CPU build, but this machine has NVIDIA driver {driver}: pip install --force-reinstall torch"
        ]
    if device.type == "cpu":
        first = f"{_install.triton()}, then " if triton_missing() else ""
        return [
            "kernels need a GPU: NVIDIA, AMD or Intel through Triton, Apple through Metal",
            f"to see what a GPU would choose: {first}tilesmith explain rms_norm --arch sm90",
        ]
    if device.type in ("cuda", "xpu") and triton_missing():
        return [_install.triton()]
    return []


def _device(device, arch) -> dict:
    import torch

    row = {"device": str(device), "name": arch.device_name, "arch": arch.name, "units": arch.sms, "l2": arch.l2}
    row |= {"shared_memory": arch.shared_memory, "bandwidth": arch.bandwidth}
    if device.type in ("cuda", "xpu"):
        row["memory"] = torch.get_device_module(device).get_device_properties(device).total_memory
    return row


def _summarise(found: dict) -> None:
    """The device, how many ops a kernel serves, the reasons where none does, each once, and what would change it."""
    forward = [c for c in found["ops"] if not c["op"].endswith("_vjp")]
    by_kernel = Counter(c["kernel"] for c in forward)
    slow = [c["op"] for c in forward if c["kernel"] == "reference"]
    console.print(
        f"Tilesmith {found['tilesmith']} on {found['arch']}, torch {found['versions']['torch']}", highlight=False
    )
    if found["device"] != "cpu":
        console.print(found["triton"], highlight=False)
    for line in found["refused"]:
        console.print(f"refused with it: the {line}", highlight=False, markup=False)
    served = ", ".join(f"{count} by {kernel}" for kernel, count in by_kernel.most_common() if kernel != "reference")
    console.print(
        f"Kernels serve {len(forward) - len(slow)} of {len(forward)} ops{f': {served}' if served else ''}.",
        highlight=False,
    )
    if slow:
        names = ", ".join(slow) if len(slow) < len(forward) / 2 else f"{len(slow)} ops"
        console.print(f"Plain PyTorch, the reference, serves {names}. Why:", highlight=False)
        for reason, count in _reasons_of([c for c in forward if c["kernel"] == "reference"]).most_common(4):
            print_lines(f"  {reason}{f' ({count} ops)' if count > 1 else ''}")
    for line in found["advice"]:
        print_lines(f"→ {line}")
    print_lines("For every op: tilesmith doctor --verbose; for one call: tilesmith explain OP", style="dim")


def _reasons_of(choices: list[dict]) -> Counter[str]:
    """In how many ops each reason against a kernel comes up, the most telling first."""
    return Counter(
        reason for c in choices for reason in dict.fromkeys(r for why in c["rejected"].values() for r in why)
    )


def _show(found: dict) -> None:
    console.print()
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


def _reasons(rejected: dict[str, list[str]]) -> str:
    return "\n".join(f"{backend}: {'; '.join(reasons)}" for backend, reasons in rejected.items())


def _size(count: int | None) -> str:
    if not count:
        return ""
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB")) if count >= u), (2**10, "KiB"))
    return f"{count / unit:.0f} {name}"
