"""Rows whose keys a bias hides by a large negative number, as eager masks do with padding: softmax takes their mean."""

import pytest
import torch

from devices import DEVICE
from tilesmith import ops, use

HIDES = [-1e4, -1e9, torch.finfo(torch.float32).min]


def _inputs(dtype, hidden):
    """q, k, v [1, 2, 5, 8] and a bias that is causal and hides all keys of the first two queries."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, 2, 5, 8, generator=generator).to(dtype).requires_grad_() for _ in "qkv"]
    bias = torch.zeros(1, 1, 5, 5, dtype=dtype).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), hidden)
    bias[:, :, :2] = hidden
    return tensors, bias


def _softmax(q, k, v, bias):
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


@pytest.mark.parametrize("hidden", HIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(dtype, hidden):
    (q, k, v), bias = _inputs(dtype, hidden)
    with use(attention="reference", attention_vjp="reference"):
        out = ops.attention(q, k, v, score=ops.Score(bias=bias))[0]
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = _softmax(q, k, v, bias)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), (q, k, v)))


def test_second_gradients_beside_rows_without_keys():
    """A row that sees nothing adds nothing, and no NaN, to them."""
    (q, k, v), bias = _inputs(torch.float64, float("-inf"))
    seen = slice(2, None)

    def second(attend):
        dq, dv = torch.autograd.grad(attend().square().sum(), (q, v), create_graph=True)
        return torch.autograd.grad(dq.square().sum() + dv.square().sum(), (q, k, v))

    with use(attention="reference", attention_vjp="reference"):
        found = second(lambda: ops.attention(q, k, v, score=ops.Score(bias=bias))[0])
    wanted = second(lambda: _softmax(q[:, :, seen], k, v, bias[:, :, seen]))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("hidden", [*HIDES, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("needs_triton")
def test_kernels_leave_other_rows_alone(dtype, hidden):
    """What a kernel makes of hidden rows is finite, and a loss that leaves them out has the gradients it had."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(1, 2, 20, 16, generator=generator).to(DEVICE, dtype) for _ in range(4))
    seen = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).tril()
    bias = torch.zeros(1, 1, 20, 20, device=DEVICE).masked_fill(~seen, hidden)
    bias[:, :, :3] = hidden
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with use(attention="triton", attention_vjp="triton"):
        out, lse = ops.attention(q, k, v, score=ops.Score(bias=bias))
        whole = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        dout[:, :, :3] = 0.0
        found = torch.autograd.grad(out, leaves, dout)
    assert all(dx.isfinite().all() for dx in (out, *whole))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = _softmax(*exact, torch.where(seen, 0.0, -1e4).double()[None, None])[:, :, 3:]
    wanted_grads = torch.autograd.grad(wanted, exact, dout[:, :, 3:].double())
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    for x, y in zip((out[:, :, 3:], *found), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(x.double(), y, **close)
    if dtype == torch.float16 and hidden < -2.36e38:  # -inf in units of log 2: such a row sees nothing
        assert lse[:, :, :3].isneginf().all()
        assert not out[:, :, :3].any()
        assert not whole[0][:, :, :3].any()
