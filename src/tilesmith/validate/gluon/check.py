"""Values and gradients of an op's kernels in Gluon, on a CPU, against the reference in fp64."""

from __future__ import annotations

import torch

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
    ran; none where the kernels reject the case. Where one rejects it, the reference takes its place.

    seed: of the order in which things happen. arch: the device that is assumed; one of few multiprocessors gives a
    persistent kernel's CTAs more work."""
    assumed = arch_named(arch) if isinstance(arch, str) else arch
    args = op.bind((), case.build(torch.device("cpu"), dtype, case.generator()))
    taps = [Tap(each, backend, assumed) for each in (op, op.vjp) if each is not None and backend in each.backends()]
    if len(taps) == 1 and taps[0].op is op and taps[0].refused(args):
        return Result(op.name, backend, case.name, dtype, True, 0.0, 0.0, "rejects"), []
    exact = oracle(op, args)
    with use(**pins_of(op, REFERENCE)):
        yardstick = outputs_and_gradients(op, args)
    for tap in taps:
        tap.open()
    try:
        with assuming(assumed), poisoned(), interpreted(seed) as ran:
            got = outputs_and_gradients(op, args)
    finally:
        for tap in taps:
            tap.close()
    return judged(op, backend, case, dtype, [got], yardstick, exact, args), ran
