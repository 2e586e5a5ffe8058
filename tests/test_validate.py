"""What `verify` and the tests of ops check: which kernels of a case run, and which reject it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, Op, T, register_kernel
from tilesmith.validate.cases import check


def _doubled(x: Tensor) -> Tensor:
    """2 x."""
    return 2 * x


def _doubled_vjp(dout: Tensor | None, x: Tensor, output_mask: Sequence[bool]) -> Tensor:
    """Its gradient."""
    return torch.zeros_like(x) if dout is None else 2 * dout


def _tripled(x: Tensor) -> Tensor:
    return 3 * x


def test_a_kernel_whose_backend_rejects_the_backward_is_checked_with_another_one():
    vjp = Op(_doubled_vjp, name="doubled_vjp", fake=lambda dout, x, output_mask: torch.empty_like(x), outputs=("dx",))
    op = Op(_doubled, name="doubled", fake=torch.empty_like, vjp=vjp, outputs=("out",))
    case = Case("row", {"x": T(5)})
    register_kernel("doubled_vjp", backend="here", rank=20, rejects=lambda call: ["not here"])(_doubled_vjp)

    register_kernel("doubled", backend="here", rank=20, rejects=lambda call: [])(_tripled)
    wrong = check(op, "here", case, "cpu", torch.float32)
    assert not wrong.passed and wrong.message.startswith("out is off")
