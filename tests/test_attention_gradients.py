"""Results and gradients of attention in fp32, parts of sums: by each kernel, against those that are rounded."""

import pytest
import torch

from devices import DEVICE, HOPPER
from tilesmith import ops, use
from tilesmith.engine.backends import triton_missing
from tilesmith.ops.attn.op import attention_op, attention_vjp

SERVED_BY_HOPPER = HOPPER and triton_missing() is None
CAUSAL = {"causal": True}
# batch, heads, kv heads, queries, keys, head dims of q and of v, and what else a call says: forms of the kernels
CALLS = {
    "causal": (1, 4, 2, 512, 512, 128, 128, CAUSAL),
    "causal, groups in parts": (1, 16, 1, 1024, 1024, 128, 128, CAUSAL),
    "causal, head dim 64": (2, 4, 4, 500, 500, 64, 64, CAUSAL),
    "all keys": (1, 5, 5, 1024, 1024, 128, 128, {}),
    "more keys, head dim 96": (1, 2, 2, 300, 700, 96, 96, {}),
    "in one order": (1, 4, 4, 700, 700, 128, 128, {"deterministic": True, **CAUSAL}),
    "window": (1, 2, 2, 700, 700, 128, 128, {"window_left": 63, **CAUSAL}),
    "packed": (1, 4, 2, 600, 600, 128, 128, {"cu_seqlens": (0, 130, 131, 600), **CAUSAL}),
    "head dims 192 and 128": (1, 4, 4, 300, 300, 192, 128, CAUSAL),
    "head dims 192 and 128, packed": (1, 2, 2, 300, 300, 192, 128, {"cu_seqlens": (0, 130, 300), **CAUSAL}),
    "head dim 256": (1, 4, 2, 300, 300, 256, 256, CAUSAL),
}
BACKENDS = ("hopper", "triton") if SERVED_BY_HOPPER else ("reference",)
SERVED = CALLS if SERVED_BY_HOPPER else ("window", "packed")  # a reference has no forms
FORMS = [(name, backend) for name in SERVED for backend in BACKENDS]


def _inputs(name):
    """q, k, v and dout of a call in bf16, and what else it says."""
    batch, heads, kv_heads, tokens, keys, dim, value_dim, said = CALLS[name]
    generator = torch.Generator().manual_seed(len(name))
    shapes = (heads, tokens, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim), (heads, tokens, value_dim)
    q, k, v, dout = (torch.randn(batch, *s, generator=generator).to(DEVICE, torch.bfloat16) for s in shapes)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # tokens first in memory, as models have it
    given = dict(said)
    if "cu_seqlens" in given:
        starts = torch.tensor(given.pop("cu_seqlens"), dtype=torch.int32, device=DEVICE)
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return (q, k, v, dout), given


def _gradients(name, backend):
    """Gradients of a call in bf16, in fp32, and in fp64 of the same inputs."""
    (q, k, v, dout), given = _inputs(name)
    found = []
    for dtype, fp32 in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float64, False)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        with use(attention="reference" if dtype == torch.float64 else backend):
            args = dict(zip(attention_op.parameters, attention_op.bind(tuple(inputs), given)))
            out, lse = attention_op(**args)
        args |= {"dout": dout.to(dtype), "dlse": None, "out": out, "lse": lse, "gradients_fp32": fp32}
        with use(attention_vjp="reference" if dtype == torch.float64 else backend):
            found.append((inputs, attention_vjp(**args, output_mask=(True, True, True, False, False))[:3]))
    return found


@pytest.mark.parametrize(("name", "backend"), FORMS)
def test_gradients_in_fp32_are_those_that_are_rounded(name, backend):
    (inputs, rounded), (_, whole), (_, exact) = _gradients(name, backend)
    for x, small, wide, true in zip(inputs, rounded, whole, exact):
        assert small.dtype == torch.bfloat16 and wide.dtype == torch.float32 and wide.stride() == x.stride()
        errors = [float((y.double() - true).norm() / true.norm()) for y in (small, wide)]
        assert errors[1] <= errors[0] < 2.0**-6, errors
        # rounding is the difference, but for sums in another order
        assert (wide - small.float()).norm() <= 2.0**-8 * wide.norm()
    if backend == "reference":
        assert all(torch.equal(wide.bfloat16(), small) for wide, small in zip(whole, rounded))


@pytest.mark.parametrize(("name", "backend"), FORMS)
def test_results_in_fp32_are_those_that_are_rounded(name, backend):
    (q, k, v, _), given = _inputs(name)
    with use(attention=backend, attention_partial=backend):
        rounded, lse = attention_op(q, k, v, **given)
        whole, its_lse = ops.attention_partial(q, k, v, **given)
    exact, _ = ops.attention_partial(*(x.double() for x in (q, k, v)), **given)
    assert whole.dtype == torch.float32 and exact.dtype == torch.float64 and whole.stride() == rounded.stride()
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (rounded, whole)]
    assert errors[1] < errors[0] < 2.0**-6, errors
    torch.testing.assert_close(its_lse, lse)
    if backend == "reference":
        assert torch.equal(whole.bfloat16(), rounded)
    assert (whole - rounded.float()).norm() <= 2.0**-8 * whole.norm()
    # in place of a sum over other keys, and of nothing
    sums = torch.full_like(whole, float("nan"))
    total = ops.accumulate_attention(sums, torch.full_like(lse, float("-inf")), whole, its_lse)
    assert torch.equal(total, its_lse) and torch.equal(sums, whole)
    ops.accumulate_attention(sums, total, rounded, its_lse)  # as many of the same keys again
    assert (sums - whole).norm() <= 2.0**-8 * whole.norm()


def test_gradients_in_fp32_of_wider_inputs_keep_their_dtype():
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    out, lse = ops.attention(q, q, q)
    args = dict(zip(attention_op.parameters, attention_op.bind((q, q, q), {})))
    args |= {"dout": out, "dlse": None, "out": out, "lse": lse, "gradients_fp32": True}
    found = attention_vjp(**args, output_mask=(True, True, True, False, False))
    assert {x.dtype for x in found[:3]} == {torch.float64}


def test_what_is_added_in_place_is_not_rounded_first():
    """A sum in fp16 takes its share of a result that fp16 could not hold."""
    sums, more = torch.ones(3, 8, dtype=torch.float16, device=DEVICE), torch.full((3, 8), 1e6, device=DEVICE)
    lse = torch.zeros(3, device=DEVICE)
    ops.accumulate_attention(sums, lse, more, lse - 6.0)
    share = torch.sigmoid(torch.tensor(-6.0, dtype=torch.float64))
    wanted = torch.full_like(sums, float(1.0 - share + 1e6 * share))
    torch.testing.assert_close(sums, wanted)
