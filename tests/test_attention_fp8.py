"""Attention in e4m3: errors on values with outliers, the corrected lse, gradients, and what the door refuses."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from devices import DEVICE, HOPPER
from tilesmith import use
from tilesmith.hardware.detect import arch_of
from tilesmith.ops import (
    Mask,
    Score,
    attention,
    attention_dequantize,
    attention_fp8,
    attention_fp8_gradients,
    attention_quantize,
    rope,
)
from tilesmith.ops.attn.op import attention_op, attention_vjp
from tilesmith.ops.attn.quantize_reference import hadamard
from tilesmith.ops.attn.reference import by_token


def _rare(*shape: int) -> Tensor:
    """One value of a thousand is ten times as large: the distribution of FlashAttention-3's error test."""
    rare = torch.rand(*shape) < 0.001
    return torch.randn(*shape) + 10.0 * torch.randn(*shape) * rare


def _inputs(kind: str, tokens: int = 1024) -> list[Tensor]:
    torch.manual_seed(0)
    make = _rare if kind == "rare" else torch.randn
    q, k, v = (make(1, 2, tokens, 128) for _ in range(3))
    if kind == "offset":  # as keys of language models: a number for each column, much the same for all tokens
        k = k + 5.0 * torch.randn(1, 2, 1, 128)
    return [x.to(DEVICE, torch.bfloat16) for x in (q, k, v)]


def _error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("kind", ["rare", "offset"])
def test_error_is_at_most_six_tenths_of_one_factor_a_tensor(kind):
    q, k, v = _inputs(kind)
    exact = attention(*(x.double() for x in (q, k, v)))[0]
    ours = attention_fp8(q, k, v)[0]
    plain = attention_fp8(q, k, v, granularity="tensor", smooth=False, rotate=False)[0]
    assert _error(ours, exact) <= 0.6 * _error(plain, exact)


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_lse_is_that_of_the_keys_as_they_came(granularity):
    q, k, v = _inputs("offset", 300)
    mask, score = Mask(causal=True), Score(scale=0.05)
    exact = attention(*(x.double() for x in (q, k, v)), mask, score)[1]
    smooth, raw = (
        attention_fp8(q, k, v, mask, score, granularity=granularity, smooth=smooth)[1] for smooth in (True, False)
    )
    assert _error(smooth, exact) <= _error(raw, exact)


def _scores_of(deviation: float, dtype: torch.dtype, dim: int = 128, tokens: int = 256) -> list[Tensor]:
    """q [1, 4, T, D], k and v [1, 2, T, D] whose scores have this standard deviation."""
    torch.manual_seed(0)
    sizes = ((4, deviation**0.5), (2, deviation**0.5), (2, 1.0))
    made = [size * torch.randn(1, heads, tokens, dim) for heads, size in sizes]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def _straight_through(q, k, v, mask, smooth, rotate, cos, sin):
    """out and lse in fp64, of q, k and v to which the rounding error of their quantisation was added as a constant."""
    q8, k8, v8, *scales, _, _ = attention_quantize(*(x.detach() for x in (q, k, v)), cos, sin, "block", smooth, rotate)
    q, k, v = (x.double() for x in (q, k, v))
    if cos is not None:
        cos, sin = cos.double(), sin.double()
        first = k.shape[2] - q.shape[2]
        q, k = rope(q, None, cos, sin, offset=first)[0], rope(k, None, cos, sin)[0]
    if rotate:
        q, k = (x @ hadamard(x.shape[3], torch.float64, x.device) for x in (q, k))
    mean = k.mean(2, keepdim=True) if smooth else torch.zeros_like(k[:, :, :1])
    shift = (q * mean.repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1) * q.shape[3] ** -0.5
    rounded = (x8.double() * by_token(scale.double(), x8) for x8, scale in zip((q8, k8, v8), scales))
    q, k, v = (x + (y - x).detach() for x, y in zip((q, k - mean, v), rounded))
    out, lse = attention(q, k, v, mask)
    return out, lse + shift


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("smooth", "rotate", "turned", "causal"),
    [(True, True, True, True), (True, True, False, False), (False, True, False, True), (True, False, True, False),
     (False, False, True, True), (False, False, False, False)],
)  # fmt: skip
def test_gradients_are_those_at_the_dequantised_values(smooth, rotate, turned, causal, dtype):
    q, k, v = _scores_of(2.0, dtype, 64)
    q, k = q[:, :, :150], k + 2.0 * torch.randn(1, 2, 1, 64, device=DEVICE, dtype=dtype)
    if turned:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    table = torch.rand(256, 24, device=DEVICE) * 6.0
    cos, sin = (table.cos(), table.sin()) if turned else (None, None)
    with use(attention="dequantised"):  # rounds no p to 8 bits
        ours = attention_fp8(q, k, v, Mask(causal=causal), cos=cos, sin=sin, smooth=smooth, rotate=rotate)
    exact = _straight_through(q, k, v, Mask(causal=causal), smooth, rotate, cos, sin)
    cotangents = [torch.randn_like(x) for x in ours]
    got = torch.autograd.grad(ours, (q, k, v), cotangents)
    wanted = torch.autograd.grad(exact, (q, k, v), [x.double() for x in cotangents])
    for x, dx, exact_dx in zip((q, k, v), got, wanted):
        assert dx.dtype == dtype and (dx.stride(1) < dx.stride(2)) == (x.stride(1) < x.stride(2))
        assert _error(dx, exact_dx.double()) < 2**-6  # as much as rounding to bf16 here and there may do


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_error_of_out_bounds_that_of_gradients_of_large_scores(dim, causal, dtype):
    q, k, v = _scores_of(8.0, dtype, dim)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, exact = attention_fp8(q, k, v, Mask(causal=causal))[0], attention(*wide, Mask(causal=causal))[0]
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(exact, wide, dout.double())
    bound = 2.5 * _error(out, exact)  # 1.6 to 2.1 of eight seeds
    assert max(_error(dx, exact_dx) for dx, exact_dx in zip(got, wanted)) <= bound


def test_shares_that_a_query_gives_to_values_add_up_to_one():
    """However large scores are: with dout of ones, the gradients of all values add up to the number of queries."""
    q, k, v = _scores_of(100.0, torch.float16)
    out, _ = attention_fp8(q, k, v)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    total = dv.double().sum((1, 2))
    torch.testing.assert_close(total, torch.full_like(total, 4 * 256), rtol=2**-6, atol=0.0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("wanted", ["qkv", "k", "v"])
def test_a_backward_calls_three_ops_and_nothing_of_pytorch(wanted, turned):
    """Each pass over a tensor of PyTorch's own would take longer than both ops beside attention's gradient."""
    q, k, v = (x.requires_grad_(name in wanted) for name, x in zip("qkv", _inputs("normal", 40)))
    table = torch.rand(40, 24, device=DEVICE)
    cos, sin = (table.cos(), table.sin()) if turned else (None, None)
    outs = attention_fp8(q, k, v, Mask(causal=True), cos=cos, sin=sin)
    cotangents = [torch.randn_like(x) for x in outs]
    called = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten.detach.default:
                called.append(func.name())
            return func(*args, **kwargs or {})

    with Recorder():
        torch.autograd.grad(outs, [x for x in (q, k, v) if x.requires_grad], cotangents)
    ops = ["attention_dequantize", attention_vjp.dispatched_as]
    assert called == [f"tilesmith::{name}" for name in (*ops, *["attention_fp8_gradients"] * (wanted != "v"))]


def test_a_query_without_keys_gets_no_gradient():
    q, k, v = (x.detach()[:, :, :n].requires_grad_() for x, n in zip(_scores_of(1.0, torch.float32), (40, 30, 30)))
    out, lse = attention_fp8(q, k, v, Mask(causal=True))
    dlse = torch.randn_like(lse)
    dlse[:, :, :10] = float("inf")
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), dlse))
    assert torch.equal(dq[:, :, :10], torch.zeros_like(dq[:, :, :10]))
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saves_less_than_the_inputs(dtype):
    q, k, v = _scores_of(1.0, dtype)
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = attention_fp8(q, k, v)
    assert sum(saved.values()) < out.nbytes + lse.nbytes + 0.6 * sum(x.nbytes for x in (q, k, v))


def test_checkpoints_and_has_no_second_gradient():
    q, k, v = _scores_of(1.0, torch.bfloat16)
    out, lse = checkpoint(attention_fp8, q, k, v, use_reentrant=False, deterministic=True)
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), cotangents)
    plain = attention_fp8(q, k, v, deterministic=True)
    wanted = torch.autograd.grad(plain, (q, k, v), cotangents, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted))
    (dq,) = torch.autograd.grad(plain[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_are_those_of_rope(interleaved):
    q, k, v = (x[:, :, :n].requires_grad_() for x, n in zip(_inputs("normal", 200), (50, 200, 200)))
    cos, sin = (f(torch.rand(210, 32, device=DEVICE) * 6.0) for f in (torch.cos, torch.sin))
    options = {"interleaved": interleaved}

    def rotated(q, k, v):
        q = rope(q, None, cos, sin, offset=150, **options)[0]
        return attention(q, rope(k, None, cos, sin, **options)[0], v, Mask(causal=True))[0]

    ours = attention_fp8(q, k, v, Mask(causal=True), cos=cos, sin=sin, **options)[0]
    exact = rotated(*(x.double() for x in (q, k, v)))
    dout = torch.randn_like(ours)
    got = (ours, *torch.autograd.grad(ours, (q, k, v), dout))
    wanted = (exact, *torch.autograd.grad(exact, (q, k, v), dout.double()))
    assert max(_error(x, y.double()) for x, y in zip(got, wanted)) < 0.1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_angles_of_rows_reach_further_than_queries_and_keys(rows, interleaved):
    """[1 or B, P, R/2] with P above S and S above T: the gradients are those of a row whose table is its own."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, h, n, 64, device=DEVICE, requires_grad=True) for h, n in ((4, 50), (2, 200), (2, 200)))
    cos, sin = (f(torch.rand(rows, 210, 16, device=DEVICE) * 6.0) for f in (torch.cos, torch.sin))
    dout = torch.randn(2, 4, 50, 64, device=DEVICE)

    def found(row, cos, sin):
        out = attention_fp8(q[row], k[row], v[row], Mask(causal=True), cos=cos, sin=sin, interleaved=interleaved)[0]
        return out, *(dx[row] for dx in torch.autograd.grad(out, (q, k, v), dout[row]))

    every = found(slice(None), cos, sin)
    for b in range(2):
        alone = found(slice(b, b + 1), cos[b % rows], sin[b % rows])
        for x, y in zip(every, alone, strict=True):
            torch.testing.assert_close(x[b : b + 1], y)


def test_a_layer_learns_as_with_attention():
    def losses(attend):
        torch.manual_seed(1)
        layer = torch.nn.Linear(64, 192).to(DEVICE)
        x, target = torch.randn(2, 48, 64, device=DEVICE), torch.randn(2, 2, 48, 32, device=DEVICE)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        found = []
        for _ in range(20):
            q, k, v = layer(x).view(2, 48, 3, 2, 32).permute(2, 0, 3, 1, 4)
            loss = (attend(q, k, v, Mask(causal=True))[0] - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain, small = losses(attention), losses(attention_fp8)
    assert small[-1] < small[0]
    assert abs(small[-1] - plain[-1]) <= 0.05 * (plain[0] - plain[-1])


def test_keys_with_a_factor_each_are_what_blocks_say():
    q, k, v = _inputs("normal", 200)
    q8, k8, v8, q_scale, k_scale, v_scale, *_ = attention_quantize(q, k, v)
    blocks = attention(q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    each = (s.repeat_interleave(128, 2)[:, :, :200] for s in (q_scale, k_scale, v_scale))
    with use(attention="reference"):
        tokens = attention(q8, k8, v8, **dict(zip(("q_scale", "k_scale", "v_scale"), each)))
    assert _error(blocks[0], tokens[0].double()) < 2**-4  # what rounding p to e4m3 may do


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
@pytest.mark.usefixtures("needs_triton")
def test_kernels_for_sixteen_bits_serve_what_they_are_handed(monkeypatch, layout, capability):
    q, k, v = _inputs("normal", 200)
    if layout == "tokens_first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    handed = []
    run = attention_op.run
    monkeypatch.setattr(attention_op, "run", lambda args: (handed.append(args), run(args))[1])
    with use(attention="dequantised"):
        q8, k8, v8, q_scale, k_scale, v_scale, *_ = attention_quantize(q, k, v)
        out, _ = attention(q8, k8, v8, Mask(causal=True), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    for x, x8, factors in zip(handed[0], (q8, k8, v8), (q_scale, k_scale, v_scale)):
        assert torch.equal(x.float(), x8.float() * factors.repeat_interleave(128, 2)[:, :, :200].unsqueeze(-1))
    arch = dataclasses.replace(arch_of(torch.device("cpu")), kind="cuda", capability=capability)
    call = attention_op._describe(*handed[0])._replace(arch=arch)
    for backend in ("triton", "hopper") if capability == (9, 0) else ("triton",):
        assert attention_op.kernel(backend).rejects(call) == []
    assert out.dtype == torch.bfloat16 and (out.stride(1) < out.stride(2)) == (layout == "tokens_first")


def test_autocast_casts_what_comes():
    q, k, v = _inputs("normal", 40)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out, lse = attention_fp8(q.float(), k.float(), v)
    assert torch.equal(out, attention_fp8(q, k, v)[0]) and lse.dtype == torch.float32


def test_compiles_whole():
    q, k, v = (x.requires_grad_() for x in _inputs("normal", 40))
    compiled = torch.compile(attention_fp8, fullgraph=True, backend="aot_eager")
    got, wanted = (attend(q, k, v, deterministic=True) for attend in (compiled, attention_fp8))
    cotangents = [torch.randn_like(x) for x in wanted]
    for x, y in zip(got, wanted):
        assert torch.equal(x, y)
    for x, y in zip(*(torch.autograd.grad(outs, (q, k, v), cotangents) for outs in (got, wanted))):
        assert torch.equal(x, y)


def test_what_is_refused():
    q, k, v = (torch.randn(1, 2, 8, 24, device=DEVICE) for _ in range(3))
    with pytest.raises(ValueError, match="rotate needs a head dim that is a power of two, got 24"):
        attention_quantize(q, k, v)
    with pytest.raises(ValueError, match="granularity is 'row'"):
        attention_quantize(q, k, v, granularity="row", rotate=False)
    with pytest.raises(ValueError, match="q requires a gradient"):
        attention_quantize(q.clone().requires_grad_(), k, v, rotate=False)
    with pytest.raises(TypeError, match="k has dtype torch.float16"):
        attention_quantize(q, k.half(), v, rotate=False)
    with pytest.raises(ValueError, match="k has 3 heads"):
        attention_fp8(q, *(torch.randn(1, 3, 8, 24, device=DEVICE) for _ in range(2)))
    with pytest.raises(ValueError, match="softcap does not allow"):
        attention_fp8(q, k, v, score=Score(softcap=5.0), smooth=True)
    with pytest.raises(ValueError, match="score has a bias"):
        attention_fp8(q, k, v, score=Score(bias=torch.zeros(8, 8, device=DEVICE)))
    with pytest.raises(ValueError, match="q_scale must be"):
        q8 = q.to(torch.float8_e4m3fn)
        one = torch.ones(1, 1, 1, device=DEVICE)
        attention(q8, q8, q8, q_scale=torch.ones(1, 2, 3, device=DEVICE), k_scale=one, v_scale=one)


def test_what_the_ops_of_the_backward_refuse():
    q = torch.randn(1, 2, 8, 24, device=DEVICE)
    x8, one = q.to(torch.float8_e4m3fn), torch.ones(1, 1, 1, device=DEVICE)
    first = [False] * 3
    for problem, called in (
        (
            r"k_scale must be \[1, 2, 8\]",
            lambda: attention_dequantize(x8, x8, x8, one, one.expand(1, 2, 3), one, first),
        ),
        ("tokens_first has 2 values", lambda: attention_dequantize(x8, x8, x8, one, one, one, first[:2])),
        ("dtype is 'half'", lambda: attention_dequantize(x8, x8, x8, one, one, one, first, "half")),
        (
            "v8 requires a gradient",
            lambda: attention_dequantize(x8, x8, q.clone().requires_grad_(), one, one, one, first),
        ),
        ("dk8 requires a gradient", lambda: attention_fp8_gradients(q, q.clone().requires_grad_(), rotate=False)),
        ("both None", lambda: attention_fp8_gradients(None, None)),
        ("rotate needs a head dim that is a power of two, got 24", lambda: attention_fp8_gradients(q, q)),
        ("dk8 must have dq8's batch 1", lambda: attention_fp8_gradients(q, q[..., :16], rotate=False)),
        ("lse and mean is None", lambda: attention_fp8_gradients(q, q, q[..., 0], rotate=False)),
        ("are given for dq8", lambda: attention_fp8_gradients(None, q, *[q[..., 0]] * 3, rotate=False)),
        (r"mean must be \[1, kv heads, 24\]", lambda: attention_fp8_gradients(q, q, *[q[..., 0]] * 3, rotate=False)),
        ("with P >= 9", lambda: attention_fp8_gradients(q, q, cos=q[0, 0], sin=q[0, 0], offset=1, rotate=False)),
        ("offset is -1", lambda: attention_fp8_gradients(q, q, cos=q[0, 0], sin=q[0, 0], offset=-1, rotate=False)),
        ("dtype is 'half'", lambda: attention_fp8_gradients(q, q, dtype="half", rotate=False)),
    ):
        with pytest.raises(ValueError, match=problem):
            called()
    for problem, called in (
        ("k8 has dtype torch.int64", lambda: attention_dequantize(x8, q.long(), x8, one, one, one, first)),
        ("q_scale has dtype torch.int64", lambda: attention_dequantize(x8, x8, x8, one.long(), one, one, first)),
        ("dk8 has dtype torch.float16", lambda: attention_fp8_gradients(q, q.half(), rotate=False)),
    ):
        with pytest.raises(TypeError, match=problem):
            called()


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_rounds_p_and_nothing_else(dim, causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 1500, dim, device=DEVICE, dtype=torch.bfloat16) for h in (4, 2, 2))
    q8, k8, v8, q_scale, k_scale, v_scale, *_ = attention_quantize(q, k, v)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    with use(attention="hopper_fp8"):
        out, lse = attention(q8, k8, v8, Mask(causal=causal), **scales)
    with use(attention="reference"):
        exact, exact_lse = attention(*(x.double() for x in (q8, k8, v8)), Mask(causal=causal), **scales)
    assert _error(out, exact) < 2**-5  # as much as e4m3's rounding of one number may do
    # products of 8-bit numbers are summed in 14 bits
    bound = 2**-13 * (q.norm(dim=-1).max() * k.norm(dim=-1).max() * dim**-0.5).item()
    assert (lse - exact_lse).abs().max().item() <= bound + attention_op.kernel("hopper_fp8").errors["lse"]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_hopper_takes_one_key_of_any_stride():
    q8, one = torch.randn(1, 2, 70, 64, device=DEVICE).to(torch.float8_e4m3fn), torch.ones(1, 1, 1, device=DEVICE)
    k8, v8 = (torch.randn(200, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    k8, v8 = torch.as_strided(k8, (1, 2, 1, 64), (0, 64, 3, 1)), torch.as_strided(v8, (1, 2, 1, 64), (0, 64, 1, 1))
    with use(attention="hopper_fp8"):
        out, _ = attention(q8, k8, v8, q_scale=one, k_scale=one, v_scale=one)
    assert _error(out, v8.double().expand_as(out)) < 2**-5
