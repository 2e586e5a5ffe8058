"""Compile kernels for a GPU that is not here: `python -m tilesmith.validate.offline norm,loss cuda 90 32`.

Names of cases behind that compile what these launch, in place of the first form of each kernel. `--brief` leaves out
registers, spills and code sizes, and searches only kernels with warpgroup products for faults of ptxas: disassembling a
kernel takes longer than compiling most.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tilesmith.engine import Op, cases, ops, triton_private
from tilesmith.engine.launcher import compiling_for
from tilesmith.engine.replay import Ready
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.validate import ptx, sass
from tilesmith.validate.cases import families, outputs_and_gradients

_ARCHS = {("cuda", 80): "sm80", ("cuda", 90): "sm90", ("cuda", 100): "sm100"}


def compile_family(family: str, target: Any, names: Sequence[str] = ()) -> list[tuple[str, str, Any]]:
    """Every device kernel that the family's launchers launch for its first test cases in bf16, compiled for `target`;
    with `names`, those that the cases of these names launch. Cases that are run in other dtypes alone stand in where an
    op has no others, in bf16 too.

    Returns (op, kernel name, triton's compiled object); of each op, or named case, one configuration, that of the
    target's architecture.
    """
    arch = arch_named(_ARCHS.get((target.backend, target.arch), str(target.arch)))
    found: list[tuple[str, str, Any]] = []
    for op in list(ops().values()):
        if not op.reference.__module__.startswith(f"tilesmith.ops.{family}.") or op.name.endswith("_vjp"):
            continue
        compiled: list[tuple[str, Any]] = []
        chosen = [c for c in cases(op.name) if _chosen(c, names)]
        for case in [c for c in chosen if torch.bfloat16 in c.dtypes] or chosen:
            one: list[tuple[str, Any]] = [] if names else compiled
            _launch_all(op, case, target, arch, one)
            compiled += one if names else []
        found += [(op.name, name, kernel) for name, kernel in compiled]
    return found


def _chosen(case: Any, names: Sequence[str]) -> bool:
    return case.name in names if names else bool({"interpret", "compile"} & case.tags)


def _launch_all(op: Op, case: Any, target: Any, arch: Any, compiled: list) -> None:
    """Call the launchers, forward and backward, with CPU tensors while `launch` compiles."""
    args = op.bind((), case.build(torch.device("cpu"), torch.bfloat16, case.generator()))
    on_hopper = (target.backend, target.arch) == ("cuda", 90)
    served = ("triton", "hopper") if on_hopper else ("triton",)
    both = [op] if op.vjp is None else [op, op.vjp]
    for backend in dict.fromkeys(b for x in both for b in x.backends() if b.startswith(served)):
        taps = [Tap(x, backend, arch) for x in both if backend in x.backends()]
        if taps[0].op is op and taps[0].refused(args):
            continue
        for tap in taps:
            tap.open()
        try:
            with assuming(arch), compiling_for(target, compiled):
                outputs_and_gradients(op, args)
        finally:
            for tap in taps:
                tap.close()


class Tap:
    """Makes an op call one kernel, or its reference where that refuses, with another architecture's configuration."""

    def __init__(self, op: Op, backend: str, arch: Any):
        self.op, self.kernel, self.arch = op, op.kernel(backend), arch
        self.fn = self.kernel.fn

    def refused(self, args: tuple) -> bool:
        return bool(self.kernel.rejects(self.op._describe(*args)._replace(arch=self.arch)))

    def open(self) -> None:
        self.op._recent.clear()
        self.op._ready = lambda args, pin: Ready(self.op.reference if self.refused(args) else self.fn)
        self.configure = getattr(self.fn, "configure", None)
        if self.configure is not None:
            self.configure.forget()
            self.configure.arch = self.arch

    def close(self) -> None:
        del self.op._ready
        self.op._recent.clear()
        if self.configure is not None:
            self.configure.forget()
            self.configure.arch = None


def _misplaced(compiled: Any, arch: int) -> bool:
    """Whether a kernel takes the start of shared memory for its `v`, and that lies elsewhere (`hopper.joined`)."""
    takes_start = "global_smem; //" in compiled.asm["ptx"]
    return takes_start and triton_private.shared_memory_offsets(compiled, arch).get("v", 0) != 0


def main(families: str, backend: str, arch: str, warp: str, *more: str) -> int:
    """Compile and print one line a kernel: warps and shared memory; for NVIDIA also registers, spills and code size.

    Exits with 1 where nothing was compiled, where the code for Hopper reads a register that nothing has written, where
    a lane of a packed pair spills into the other (`validate.ptx`), or where values lie elsewhere in shared memory than
    a kernel assumes.
    """
    from triton.backends.compiler import GPUTarget

    names, brief = [name for name in more if name != "--brief"], "--brief" in more
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    found = [row for family in families.split(",") for row in compile_family(family, target, names=names)]
    forms: dict[str, list[str]] = {}
    faults = []
    for op, name, compiled in found:
        form = f"{name} shared={compiled.metadata.shared} warps={compiled.metadata.num_warps}"
        searched = (target.backend, target.arch) == ("cuda", 90) and (not brief or "wgmma" in compiled.asm["ptx"])
        if target.backend == "cuda" and (searched or not brief):
            cubin = compiled.asm["cubin"]
            text = sass.disassembled(cubin)
            if not brief:
                form += "".join(f" {field}={value}" for field, value in sass.usage(cubin, text)._asdict().items())
            faults += [f"{name}: {x}\n" for x in sass.unwritten(text)] if searched else []
        if target.backend == "cuda":
            faults += [
                f"{name}: a lane spills into its neighbour: {x}\n" for x in ptx.spilling_lanes(compiled.asm["ptx"])
            ]
        if target.backend == "cuda" and _misplaced(compiled, target.arch):
            faults.append(f"{name}: values do not lie at the start of shared memory\n")
        forms.setdefault(form, []).append(op)
    sys.stdout.write("".join(f"compiled {form} for {' '.join(names)}\n" for form, names in sorted(forms.items())))
    sys.stderr.write("".join(faults))
    return 0 if found and not faults else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.offline", description=main.__doc__)
    parser.add_argument("families", help="folders of tilesmith/ops with commas between them: norm,loss")
    parser.add_argument("backend", choices=("cuda", "hip"))
    parser.add_argument("arch", help="90 or gfx942")
    parser.add_argument("warp", help="threads of a warp: 32, or 64 for gfx9")
    parser.add_argument("names", nargs="*", help="cases; those tagged interpret or compile by default")
    parser.add_argument("--brief", action="store_true", help="without registers, spills and code sizes")
    given = parser.parse_args()
    if unknown := set(given.families.split(",")).difference(families()):
        parser.error(f"there is no family {', '.join(sorted(unknown))}; there are {', '.join(families())}")
    return given


if __name__ == "__main__":
    asked = _arguments()
    sys.exit(main(asked.families, asked.backend, asked.arch, asked.warp, *asked.names, *["--brief"] * asked.brief))
