"""PyTorch's default dtype has no say in what an op computes: a number without a dtype of its own would have it, and so
would a quotient of integers."""

import contextlib

import pytest
import torch

from devices import DEVICE
from op_runs import NAMES, deterministic, runnable
from tilesmith.engine import cases, ops, use
from tilesmith.validate.cases import backends_of, outputs_and_gradients, pins_of

IN_PYTORCH = ("reference", "chunked")  # in device code a number's dtype is the compiler's affair


def _runs(name):
    for backend in runnable(backends_of(ops()[name])):
        for case in cases(name):
            if backend in IN_PYTORCH and "test" in case.tags and torch.float32 in case.dtypes:
                yield pytest.param(name, case, backend, id=f"{name}-{backend}-{case.name}")


@pytest.fixture(autouse=True)
def same_order_of_sums():
    """Atomic additions on a GPU come in any order."""
    with deterministic():
        yield


@contextlib.contextmanager
def default_dtype(dtype):
    """PyTorch's default dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("name", "case", "backend"), [run for name in NAMES for run in _runs(name)])
def test_pytorchs_default_dtype_changes_nothing(name, case, backend):
    op, found = ops()[name], []
    for dtype in (torch.float32, torch.bfloat16):
        args = op.bind((), case.build(DEVICE, torch.float32, case.generator()))
        with default_dtype(dtype), use(**pins_of(op, backend)):
            found.append(outputs_and_gradients(op, args))
    want, got = found
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
