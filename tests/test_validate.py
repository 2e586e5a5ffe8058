"""What `verify` and the tests of ops check: which kernels of a case run, which reject it, and what they may be off."""

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tilesmith.engine import Case, Op, T, cases, ops, register_kernel
from tilesmith.validate import sanitized
from tilesmith.validate.cases import OracleMemoryError, check, check_each, oracle


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


def test_several_pins_of_a_kernel_share_one_oracle():
    computed = []

    def wide(x: Tensor) -> Tensor:
        computed.append(x.dtype)
        return 2 * x

    op = Op(wide, name="shared_oracle", fake=torch.empty_like, outputs=("out",))
    register_kernel("shared_oracle", backend="right", rank=20)(_doubled)
    register_kernel("shared_oracle", backend="wrong", rank=21)(_tripled)
    pins = [{"shared_oracle": pin} for pin in ("right", "wrong", "right")]
    found = list(check_each(op, ("right",), Case("row", {"x": T(5, grad=False)}), "cpu", torch.bfloat16, pinned=pins))
    assert [result.passed for result in found] == [True, False, True]
    assert computed.count(torch.float64) == 1


def test_the_sanitizers_are_told_of_every_hopper_kernel():
    names = sanitized.hopper_kernels()
    assert {"attention_fwd_kernel", "query_tiles_kernel", "norm_bwd_parts_kernel", "label_scores_kernel"} <= set(names)
    for name, op in ops().items():
        if any(b.startswith("hopper") for b in op.backends()) and not name.endswith("_vjp"):
            assert any(subject == name for subject, _, _ in sanitized.subjects(0))


def test_a_reference_without_memory_holds_none(monkeypatch):
    """Nor does the error: it would be held while other cases run."""
    op, case, held = ops()["rms_norm"], cases("rms_norm")[0], []

    def greedy(x, *rest):
        wide = x * 2
        held.append(weakref.ref(wide))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 is full.")

    monkeypatch.setattr(op, "reference", greedy)
    args = op.bind((), case.build("cpu", torch.float32, case.generator()))
    with pytest.raises(OracleMemoryError, match="rms_norm: the reference .* CUDA out of memory") as caught:
        oracle(op, args)
    assert caught.value.__context__ is None and held[0]() is None
