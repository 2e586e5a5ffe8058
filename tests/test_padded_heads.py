"""Head dims between those of kernels: columns of zeros behind them on GPUs, the same values and gradients."""

import types

import pytest
import torch

from devices import DEVICE, ON_GPU
from tilesmith import explain, ops, use
from tilesmith.engine.backends import interpreting, missing
from tilesmith.ops.attn import op as attn
from tilesmith.validate import budget

DIMS = [(8, 8), (12, 20), (26, 26), (33, 40), (40, 33), (100, 100)]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Triton's kernels, in their interpreter where there is no GPU."""
    if missing("triton", DEVICE, pinned=True) or not (ON_GPU or interpreting()):
        pytest.skip("Triton is not here")
    if not ON_GPU:
        monkeypatch.setattr(attn, "arch_of", lambda device: types.SimpleNamespace(kind="cuda"))
    with use(attention="triton"):
        yield


def _call(dim, value_dim, dtype, **given):
    """Leaves and what `ops.attention` makes of them."""
    generator = torch.Generator().manual_seed(dim)
    shapes = (2, 6, 19, dim), (2, 2, 23, dim), (2, 2, 23, value_dim)
    leaves = [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]
    score = ops.Score(softcap=20.0, **given)
    out, lse = ops.attention(*leaves, ops.Mask(causal=True), score)
    slopes = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (out, lse)]
    return [out, lse, *torch.autograd.grad((out, lse), leaves, slopes)]


@pytest.mark.parametrize("given", [{}, {"scale": 0.3}], ids=["its own scale", "a given scale"])
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_values_and_gradients(as_on_a_gpu, dim, value_dim, given):
    found = _call(dim, value_dim, torch.float32, **given)
    with use(attention="reference"):
        wanted = _call(dim, value_dim, torch.float64, **given)
        rough = _call(dim, value_dim, torch.float32, **given)
    assert found[0].shape[-1] == value_dim
    for mine, exact, same in zip(found, wanted, rough, strict=True):
        judged = budget.compare(mine, same, exact)
        assert judged.passed, judged


@pytest.mark.parametrize(("dim", "backend"), [(8, "triton"), (36, "triton"), (100, "hopper"), (500, "hopper")])
def test_gpus_have_kernels_for_them(dim, backend):
    q, k = (torch.randn(2, 4, tokens, dim, dtype=torch.bfloat16) for tokens in (1024, 1024))
    assert f"attention -> {backend} " in str(explain("attention", q, k, k, ops.Mask(causal=True), arch="sm90"))


def test_others_are_left_as_they_are(as_on_a_gpu):
    q = torch.randn(1, 2, 8, 12, device=DEVICE)
    with pytest.raises(ValueError, match=r"k must be .*12|k .* 13"):
        ops.attention(q, torch.randn(1, 2, 8, 13, device=DEVICE), torch.randn(1, 2, 8, 13, device=DEVICE))
    with pytest.raises(NotImplementedError, match="head dim 12"):  # an 8-bit cache is not copied
        scale = torch.ones(1, 2, 8, device=DEVICE)
        ops.attention(q, q.to(torch.float8_e4m3fn), q.to(torch.float8_e4m3fn), k_scale=scale, v_scale=scale)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (2, 0)])
def test_empty_slices_with_steps_need_no_other_kernel(as_on_a_gpu, batch, tokens):
    """An empty tensor is contiguous whatever its strides are, also a last one of 2."""
    q = torch.randn(batch, 2, tokens, 64, device=DEVICE)[..., ::2].requires_grad_()
    k = torch.randn(batch, 2, 5, 32, device=DEVICE)
    out, lse = ops.attention(q, k, k)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    out.sum().backward()
    assert q.grad.shape == q.shape
