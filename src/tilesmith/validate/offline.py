"""Compile a family's kernels for a GPU that is not here: `python -m tilesmith.validate.offline norm cuda 90 32`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tilesmith.engine import Op, cases, ops
from tilesmith.engine.launch import compiling_for
from tilesmith.engine.replay import Ready
from tilesmith.hardware.detect import arch_named
from tilesmith.validate.cases import outputs_and_gradients

_ARCHS = {("cuda", 80): "sm80", ("cuda", 90): "sm90", ("cuda", 100): "sm100"}


def compile_family(family: str, target: Any, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, Any]]:
    """Every device kernel that the family's Triton launchers launch for its first test cases, compiled for `target`.

    Returns (kernel name, triton's compiled object) pairs; one configuration each, that of the target's architecture.
    """
    arch = arch_named(_ARCHS.get((target.backend, target.arch), str(target.arch)))
    compiled: list[tuple[str, Any]] = []
    for op in list(ops().values()):
        if not op.reference.__module__.startswith(f"tilesmith.ops.{family}.") or op.name.endswith("_vjp"):
            continue
        for case in [c for c in cases(op.name) if "interpret" in c.tags and dtype in c.dtypes]:
            _launch_all(op, case, dtype, target, arch, compiled)
    return compiled


def _launch_all(op: Op, case: Any, dtype: torch.dtype, target: Any, arch: Any, compiled: list) -> None:
    """Call the launchers, forward and backward, with CPU tensors while `launch` compiles."""
    args = op.bind((), case.build(torch.device("cpu"), dtype, case.generator()))
    hopper = ("hopper", "hopper_split", "hopper_fp8") if (target.backend, target.arch) == ("cuda", 90) else ()
    for backend in [b for b in op.backends() if b.startswith("triton") or b in hopper]:
        kernel = op.kernel(backend)
        if kernel.rejects(op._describe(*args)._replace(arch=arch)):
            continue
        taps = [_Tap(op, backend, arch)]
        if op.vjp is not None and backend in op.vjp.backends():
            taps.append(_Tap(op.vjp, backend, arch))
        for tap in taps:
            tap.open()
        try:
            with compiling_for(target, compiled):
                outputs_and_gradients(op, args)
        finally:
            for tap in taps:
                tap.close()


class _Tap:
    """Makes an op call one kernel whatever the rule says, with the configuration of another architecture."""

    def __init__(self, op: Op, backend: str, arch: Any):
        self.op, self.fn, self.arch = op, op.kernel(backend).fn, arch

    def open(self) -> None:
        self.op._recent.clear()
        self.op._ready = lambda args, pin: Ready(self.fn)
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


def main(family: str, backend: str, arch: str, warp: str) -> int:
    """Compile and print one line a kernel: registers, spills and shared memory where the target tells them."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    found = compile_family(family, target)
    lines = {f"{name} shared={c.metadata.shared} warps={c.metadata.num_warps}" for name, c in found}
    sys.stdout.write("".join(f"compiled {line}\n" for line in sorted(lines)))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
