"""Values and gradients of an op's kernels in Gluon, on a CPU, against the reference in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilesmith.engine import Case, Op, use
from tilesmith.engine.backends import REFERENCE
from tilesmith.hardware.detect import Arch, arch_named, assuming
from tilesmith.validate.cases import Result, judged, oracle, outputs_and_gradients, pins_of, poisoned
from tilesmith.validate.gluon.run import interpreted
from tilesmith.validate.offline import Tap


def check(
    op: Op, backend: str, case: Case, dtype: torch.dtype, seed: int = 0, arch: str | Arch = "sm90"
) -> tuple[Result, list[str]]:
    """One kernel on one case, as `validate.cases.check` has it on a device, and the names of the device kernels that
    ran; none where the kernels reject the case. seed, arch: as of `computed`."""
    args = op.bind((), case.build(torch.device("cpu"), dtype, case.generator()))
    got, ran = computed(op, backend, args, seed, arch)
    if not ran:
        return Result(op.name, backend, case.name, dtype, True, 0.0, 0.0, "rejects"), []
    exact = oracle(op, args)
    with use(**pins_of(op, REFERENCE)):
        yardstick = outputs_and_gradients(op, args)
    return judged(op, backend, case, dtype, [got], yardstick, exact, args), ran


def computed(
    op: Op, backend: str, args: tuple, seed: int = 0, arch: str | Arch = "sm90"
) -> tuple[dict[str, Tensor], list[str]]:
    """Outputs and gradients of a call by a backend's kernels, and the names of the device kernels that ran. Where the
    kernel of the op or of its gradient rejects the call, the reference takes its place.

    seed: of the order in which things happen. arch: the device that is assumed; one of few multiprocessors gives a
    persistent kernel's CTAs more work."""
    assumed = arch_named(arch) if isinstance(arch, str) else arch
    taps = [Tap(each, backend, assumed) for each in (op, op.vjp) if each is not None and backend in each.backends()]
    for tap in taps:
        tap.open()
    try:
        with assuming(assumed), poisoned(), interpreted(seed) as ran:
            return outputs_and_gradients(op, args), ran
    finally:
        for tap in taps:
            tap.close()
