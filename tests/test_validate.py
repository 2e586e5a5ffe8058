"""What `verify` and the tests of ops check: which kernels of a case run, which reject it, and what they may be off."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, Op, T, ops, register_kernel
from tilesmith.validate import sanitized
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
    vjp = Op(_doubled_vjp, name="twice_vjp", fake=lambda dout, x, output_mask: torch.empty_like(x), outputs=("dx",))
    op = Op(_doubled, name="twice", fake=torch.empty_like, vjp=vjp, outputs=("out",))
    case = Case("row", {"x": T(5)})
    register_kernel("twice_vjp", backend="here", rank=20, rejects=lambda call: ["not here"])(_doubled_vjp)

    register_kernel("twice", backend="here", rank=20, rejects=lambda call: [])(_tripled)
    wrong = check(op, "here", case, "cpu", torch.float32)
    assert not wrong.passed and wrong.message.startswith("out is off")


def _nearly(x: Tensor) -> Tensor:
    return 2 * x + 0.01


def test_a_kernel_may_be_as_far_off_as_it_declares_and_only_where():
    op = Op(_doubled, name="declared", fake=torch.empty_like, outputs=("out",))
    case = Case("row", {"x": T(5, grad=False)})
    for rank, (backend, errors) in enumerate(
        {"none": None, "enough": {"out": 0.02}, "less": {"out": 0.005}, "elsewhere": {"lse": 0.02}}.items(), 21
    ):
        register_kernel("declared", backend=backend, rank=rank, errors=errors)(_nearly)
        assert check(op, backend, case, "cpu", torch.float32).passed == (backend == "enough")


def test_the_sanitizers_are_told_of_every_hopper_kernel():
    names = sanitized.hopper_kernels()
    assert {"attention_fwd_kernel", "query_tiles_kernel", "norm_bwd_parts_kernel", "label_scores_kernel"} <= set(names)
    for name, op in ops().items():
        if any(b.startswith("hopper") for b in op.backends()) and not name.endswith("_vjp"):
            assert any(subject == name for subject, _, _ in sanitized.subjects(0))
