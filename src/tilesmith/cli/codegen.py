"""`tilesmith codegen`: a portable kernel's text or binary for one target."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from tilesmith.cli.output import errors, print_json, refuse, setting

TARGETS = ("cuda", "ptx", "metal", "wgsl", "spirv", "spvasm", "json")


def command(
    kernel: Annotated[str, typer.Argument(help="A kernel, such as swiglu; any other name lists them all.")],
    target: Annotated[str, typer.Option("--target", "-t", help=f"One of {', '.join(TARGETS)}.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Value of a configuration field, as in hidden_dim=4096. Repeatable."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Preset of flash_attention: ampere, hopper, rdna3, apple, ...")
    ] = None,
    arch: Annotated[str, typer.Option(help="GPU to compile PTX for.")] = "sm_80",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of standard output.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the code, and what a launcher needs to know.")
    ] = False,
) -> None:
    """Compile a pre-built kernel from its Python source to CUDA C++, PTX, Metal, WGSL, SPIR-V, its assembly or JSON.

    The tensors and scalars that the kernel takes are printed to standard error, or with --json to standard output.
    --target json prints the kernel's own IR.
    """
    from tilesmith.codegen import KernelError

    if target not in TARGETS:
        refuse(f"--target must be one of {', '.join(TARGETS)}, got {target!r}")
    if target == "spirv" and output is None:
        refuse("SPIR-V is binary; name a file with -o, or ask for spvasm")
    try:
        ir = _build(kernel, preset, dict(map(_field, set_ or [])))
        code = _print(ir, target, arch)
    except (KernelError, ValueError, TypeError) as problem:
        refuse(str(problem))
    if output is None:
        if not as_json:
            sys.stdout.write(code)
    else:
        try:
            output.write_bytes(code if isinstance(code, bytes) else code.encode())
        except OSError as problem:
            refuse(f"-o {output}: {problem.strerror}")
    if as_json:
        print_json(
            {"target": target, "text": code if output is None else None, "file": output and str(output), **_facts(ir)}
        )
    else:
        errors.print(_summary(ir), highlight=False, markup=False)


def _build(kernel: str, preset: str | None, fields: dict):
    from tilesmith.kernels import KERNELS
    from tilesmith.kernels.flash_attention import TunedConfigs

    if kernel not in KERNELS:
        refuse(f"there is no kernel {kernel!r}; known: {', '.join(KERNELS)}")
    entry = KERNELS[kernel]
    known = [f.name for f in dataclasses.fields(entry.config)]
    for name in fields:
        if name not in known:
            refuse(f"--set {name}: {kernel} has the fields {', '.join(known)}")
    if preset is None:
        needed = [f.name for f in dataclasses.fields(entry.config) if f.default is dataclasses.MISSING]
        absent = [name for name in needed if name not in fields]
        if absent:
            refuse(f"{kernel} needs {', '.join(f'--set {name}=...' for name in absent)}")
        return entry.create(entry.config(**fields))
    presets = [name for name in vars(TunedConfigs) if not name.startswith("_")]
    if kernel != "flash_attention" or preset not in presets:
        refuse(f"--preset is for flash_attention and one of {', '.join(presets)}; got {preset!r} for {kernel}")
    return entry.create(dataclasses.replace(getattr(TunedConfigs, preset), **fields))


def _field(text: str) -> tuple[str, object]:
    return setting(text, "hidden_dim=4096", texts=("approximate", "matrix"))


def _print(ir, target: str, arch: str) -> str | bytes:
    from tilesmith.codegen import cuda, metal, spirv, to_json, wgsl

    if target == "ptx":
        return cuda.ptx(ir, arch)
    if target == "spvasm":
        from tilesmith.codegen.disassembly import disassemble

        return disassemble(spirv.generate(ir))
    return {"cuda": cuda.generate, "metal": metal.generate, "wgsl": wgsl.generate, "spirv": spirv.generate}.get(
        target, to_json
    )(ir)


def _facts(ir) -> dict:
    return {
        "kernel": ir.name,
        "tensors": [{"name": b.name, "access": b.access, "type": str(b.type)} for b in ir.buffers],
        "scalars": [{"name": s.name, "type": str(s.type)} for s in ir.scalars],
        "threads": ir.threads,
        "shared_bytes": ir.shared_bytes,
        "needs": sorted(ir.features),
    }


def _summary(ir) -> str:
    tensors = ", ".join(f"{b.name}: {b.access} {b.type}" for b in ir.buffers)
    scalars = ", ".join(f"{s.name}: {s.type}" for s in ir.scalars)
    needs = f", needs {', '.join(sorted(ir.features))}" if ir.features else ""
    return f"{ir.name}({tensors}; {scalars}): {ir.threads} threads, {ir.shared_bytes:,} bytes of shared memory{needs}"
