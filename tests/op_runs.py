"""What the harness of ops runs: ops, the kernels that run here, small arguments, gradients that come in."""

import contextlib

import torch

from devices import DEVICE
from tilesmith.engine import cases, ops
from tilesmith.engine.backends import missing
from tilesmith.validate.cases import outputs_and_gradients

NAMES = [n for n in sorted(ops()) if cases(n)]
DIFFERENTIABLE = [n for n in NAMES if ops()[n].vjp is not None]


def runnable(backends):
    """Those that run on this device, Triton's and portable ones on a CPU through interpreters."""
    return [b for b in backends if missing(b, DEVICE, pinned=True) is None]


def kernels_of(op):
    """Backends of an op to check here."""
    return runnable(op.backends())


def first_case(name):
    """The first test case of an op, in fp32: what the structural tests use."""
    found = [c for c in cases(name) if "test" in c.tags and torch.float32 in c.dtypes]
    return found[0] if found else None


def arguments_of(name, dtype=torch.float32, case=None):
    """An op and the arguments of a case, its first one by default."""
    op, case = ops()[name], case or first_case(name)
    return op, op.bind((), case.build(DEVICE, dtype, case.generator()))


@contextlib.contextmanager
def deterministic():
    """Inside, PyTorch's own operators, of which references consist, give the same bits each time where they can."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def backward_call_of(op, args):
    """The arguments that autograd hands to the op's vjp, in the backward of a call with `args`; None where it does not
    run, as where nothing asks for a gradient."""
    seen, run = [], op.vjp.run
    op.vjp.run = lambda call, pin: (seen.append(call), run(call, pin))[1]
    try:
        outputs_and_gradients(op, args)
    finally:
        del op.vjp.run
    return seen[0] if seen else None


def cotangents_of(outs):
    generator = torch.Generator().manual_seed(17)
    drawn = [
        torch.randn(o.shape, generator=generator).to(torch.bfloat16).to(o.device, o.dtype)
        for o in outs
        if o.requires_grad
    ]
    kept = [o for o in outs if o.requires_grad]
    return [torch.where(o.detach().isfinite(), c, 0) for o, c in zip(kept, drawn)]
