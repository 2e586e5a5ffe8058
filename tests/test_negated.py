"""Views that negate what lies in memory: kernels that read memory are given what the views stand for."""

import random

import pytest
import torch
from torch import Tensor

from tilesmith.engine import Op, register_kernel
from tilesmith.engine.negated import may_negate


def _memory(x: Tensor) -> Tensor:
    """What a Triton kernel sees of x: the view without its negative bit."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def _add_memory(x: Tensor, y: Tensor) -> Tensor:
    return _memory(x) + _memory(y)


def negated_add_vjp(dout: Tensor, output_mask: list[bool]) -> tuple[Tensor, Tensor]:
    return dout.clone(), dout.clone()


def _vjp_of_memory(dout: Tensor, output_mask: list[bool]) -> tuple[Tensor, Tensor]:
    return _memory(dout).clone(), _memory(dout).clone()


def _double_memory(out: Tensor) -> None:
    _memory(out).mul_(2)


@pytest.fixture(scope="module")
def add():
    def negated_add(x: Tensor, y: Tensor) -> Tensor:
        return _add(x, y)

    op = Op(negated_add, vjp=Op(negated_add_vjp, outputs=("dx", "dy")))
    register_kernel("negated_add", backend="memory", rank=30)(_add_memory)
    register_kernel("negated_add_vjp", backend="memory", rank=30)(_vjp_of_memory)
    return op


def test_a_key_that_is_known_serves_both_kinds_of_views(add):
    z = torch.randn(3, 5, dtype=torch.complex64)
    for x in (z.imag, z.conj().imag, z.imag, z.conj().imag):
        assert x.is_neg() == (x[0, 0] != z[0, 0].imag)
        assert torch.equal(add(x, x), 2 * x) and torch.equal(add(x, z.real), x + z.real)


def test_gradients_of_and_through_such_views(add):
    x = torch.randn(3, dtype=torch.complex128)
    leaf = x.conj().imag.requires_grad_()
    assert leaf.is_neg()
    out = add(leaf, x.real)
    coming = torch.randn(3, dtype=torch.complex128).conj().imag
    out.backward(coming)
    assert torch.equal(out.detach(), leaf.detach() + x.real) and torch.equal(leaf.grad, coming)


def test_what_an_op_writes_to_is_refused():
    def negated_double(out: Tensor) -> None:
        out.mul_(2)

    op = Op(negated_double, mutates=("out",))
    register_kernel("negated_double", backend="memory", rank=30)(_double_memory)
    z = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"negated_double: out is a view that negates .*pass out.resolve_neg\(\)"):
        op(z.conj().imag)
    assert torch.equal(z, torch.ones(4, dtype=torch.complex64))


def _viewed(x: Tensor, draw: random.Random) -> Tensor:
    for _ in range(draw.randrange(4)):
        dim = draw.randrange(x.ndim) if x.ndim else 0
        kind = draw.choice(["narrow", "transpose", "expand", "unsqueeze", "step", "flatten", "select"])
        if kind == "unsqueeze" or not x.ndim:
            x = x.unsqueeze(draw.randrange(x.ndim + 1))
        elif kind == "narrow" and x.shape[dim] > 1:
            x = x.narrow(dim, 1, x.shape[dim] - 1)
        elif kind == "transpose":
            x = x.transpose(0, dim)
        elif kind == "expand":
            x = x.unsqueeze(0).expand(3, *x.shape)
        elif kind == "step":
            x = x[::2]
        elif kind == "flatten" and x.is_contiguous():
            x = x.flatten()
        elif kind == "select" and x.shape[0]:
            x = x.select(0, draw.randrange(x.shape[0]))
    return x


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_every_view_of_an_imaginary_part_is_asked(dtype):
    draw, found = random.Random(0), 0
    for _ in range(500):
        sizes = [draw.choice([1, 1, 2, 3, 4]) for _ in range(draw.randrange(4))]
        z = _viewed(torch.zeros(sizes, dtype=torch.complex128).to(dtype), draw)
        x = _viewed(z.conj().imag, draw)
        found += x.is_neg()
        assert may_negate(x) or not x.is_neg() or not x.numel()
    assert found > 400


def test_usual_tensors_are_not_asked():
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32):
        x = torch.zeros(4, 6, dtype=dtype)
        usual = [
            x,
            x[1:, 1:],
            x.t(),
            x[:, :1],
            torch.zeros((), dtype=dtype),
            torch.zeros(1, dtype=dtype),
            x.expand(2, 4, 6),
        ]
        assert not any(map(may_negate, usual))
