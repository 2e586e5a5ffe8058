"""tilesmith.flash_attention, the ops under other libraries' names, and the tiles that they pin."""

import itertools

import pytest
import torch

from devices import DEVICE, ON_GPU
from tilesmith import flash_attention as fa
from tilesmith import ops
from tilesmith.engine.backends import missing
from tilesmith.validate.budget import compare

SIZES = [(2, 3, 3, 40, 40, 16), (1, 4, 2, 33, 70, 64), (1, 2, 1, 1, 9, 16), (1, 2, 2, 130, 70, 32)]
DTYPES = [torch.float32, torch.float16]


def _tensors(batch, heads, kv_heads, tokens, keys, dim, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, tokens), (kv_heads, keys), (kv_heads, keys))
    drawn = [torch.randn(batch, *shape, dim, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in drawn]


def _scores(q, k, causal=False):
    """Scaled scores, -inf where hidden."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[3] ** 0.5
    if not causal:
        return scores
    tokens, keys = scores.shape[-2:]
    hidden = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens).logical_not()
    return scores.masked_fill(hidden, float("-inf"))


def _within_budget(got, same, exact):
    """Judge results by the same computation in fp64, allowing twice the error of plain PyTorch in their dtype."""
    for ours, plain, oracle in zip(got, same, exact, strict=True):
        budget = compare(ours.detach(), plain.detach().to(ours.dtype), oracle.detach())
        assert budget.passed, budget


def _plain(q, k, v):
    """(O, l, m) with nothing but PyTorch, in at least fp32."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    scores = _scores(q, k)
    m = scores.amax(-1)
    p = torch.exp(scores - m[..., None])
    l = p.sum(-1)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) / l[..., None], l, m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_output_row_sums_and_maxima(sizes, dtype):
    q, k, v = _tensors(*sizes, dtype=dtype, grad=False)
    out, l, m = fa.flash_attention_forward_with_stats(q, k, v)
    assert out.dtype == dtype and l.dtype == m.dtype == torch.float32
    assert torch.equal(out, fa.flash_attention_forward(q, k, v))
    _within_budget((out, l, m), _plain(q, k, v), _plain(q.double(), k.double(), v.double()))
    _, lse = ops.flash_attention_forward(q, k, v)
    exact = torch.logsumexp(_scores(q.double(), k.double()), -1)
    _within_budget((m + torch.log(l),), (lse,), (exact,))


@pytest.mark.parametrize("sizes", SIZES)
def test_backward_equals_autograd(sizes):
    tensors = _tensors(*sizes)
    q, k, v = (x.detach() for x in tensors)
    out, l, m = fa.flash_attention_forward_with_stats(q, k, v)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    got = fa.flash_attention_backward(q, k, v, out, dout, l, m)
    same = torch.autograd.grad(fa.flash_attention_forward(*tensors), tensors, dout)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(_plain(*wide)[0], wide, dout.double())
    _within_budget(got, same, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_half_rounds_inputs_and_keeps_dtypes(dtype):
    q, k, v = _tensors(*SIZES[1], dtype=dtype)
    out = fa.flash_attention_forward(q, k, v, use_half=True)
    assert out.dtype == dtype
    assert torch.equal(out, fa.flash_attention_forward(q.half(), k.half(), v.half()).to(dtype))
    dout = torch.randn(out.shape).to(out)
    for gradient, x in zip(torch.autograd.grad(out, (q, k, v), dout), (q, k, v)):
        assert gradient.dtype == dtype and gradient.shape == x.shape
    out, l, m = fa.flash_attention_forward_with_stats(q, k, v, use_half=True)
    for gradient in fa.flash_attention_backward(q, k, v, out, dout, l, m, use_half=True):
        assert gradient.dtype == dtype


def test_the_module_takes_packed_heads():
    module = fa.FlashAttention(num_heads=3)
    x = torch.randn(2, 9, 48, device=DEVICE, requires_grad=True)
    heads = x.unflatten(2, (3, 16)).transpose(1, 2)
    out = module(x, x, x)
    torch.testing.assert_close(out, fa.flash_attention_forward(heads, heads, heads).transpose(1, 2).flatten(2))
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, dout)
    _, l, m = fa.flash_attention_forward_with_stats(heads, heads, heads)
    gradients = module.backward(x, x, x, out, dout, l, m)
    torch.testing.assert_close(sum(gradients), expected)
    assert module(heads, heads, heads).shape == heads.shape
    with pytest.raises(ValueError, match="num_heads is 3, which does not divide 50"):
        module(*[torch.randn(2, 9, 50, device=DEVICE)] * 3)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        fa.FlashAttention(num_heads=0)


@pytest.mark.parametrize("pair", [(33, 32), (8, 32), (64, 0), (32, 16.0), (True, 32), (-16, 32)])
def test_tiles_of_no_form_are_refused(pair):
    q, k, v = _tensors(*SIZES[0])
    with pytest.raises(ValueError, match="power of two of at least 16"):
        fa.flash_attention_forward(q, k, v, *pair)
    with pytest.raises(ValueError, match="power of two of at least 16"):
        fa.FlashAttention(*pair)


def test_tiles_change_nothing_but_rounding():
    q, k, v = _tensors(*SIZES[3])
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    chosen = fa.flash_attention_forward(q, k, v)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = _plain(*wide)[0]
    for Bc, Br in itertools.product((16, 64), (16, 32)):
        out = fa.flash_attention_forward(q, k, v, Bc, Br)
        _within_budget((out,), (chosen,), (exact,))
        got, same = (torch.autograd.grad(o, (q, k, v), dout, retain_graph=True) for o in (out, chosen))
        _within_budget(got, same, torch.autograd.grad(exact, wide, dout.double(), retain_graph=True))


@pytest.mark.skipif(not ON_GPU, reason="tiles are a GPU's")
def test_a_pinned_tile_is_what_runs(monkeypatch):
    from tilesmith.ops.attn import execute

    ran, launch = {}, execute.launch

    def spy(kernel, grid, *args, **named):
        ran[kernel.fn.__name__] = (named.get("BLOCK_N"), named.get("BLOCK_M"))
        return launch(kernel, grid, *args, **named)

    monkeypatch.setattr(execute, "launch", spy)
    q, k, v = _tensors(1, 2, 2, 300, 300, 64, dtype=torch.float16)
    for Bc, Br in ((16, 64), (32, 128)):
        ran.clear()
        fa.flash_attention_forward(q, k, v, Bc, Br).sum().backward()  # the backward runs outside the call's context
        ran.pop("_attention_stats_kernel", None)
        assert len(ran) == 3 and set(ran.values()) == {(Bc, Br)}


@pytest.mark.skipif(not ON_GPU, reason="tiles are a GPU's")
def test_a_tile_that_does_not_fit_is_refused_with_the_numbers():
    q, k, v = _tensors(1, 2, 2, 600, 600, 128, dtype=torch.float32)
    with pytest.raises(ValueError, match="does not fit in the .* bytes of shared memory"):
        fa.flash_attention_forward(q, k, v, 512, 512)


def test_optimal_block_sizes_are_the_library_s_own():
    Bc, Br = fa.get_optimal_block_sizes(1024, 64)
    if missing("triton", DEVICE) is not None:
        assert (Bc, Br) == (32, 32)
    q, k, v = _tensors(1, 2, 2, 100, 100, 64, dtype=torch.float16)
    assert fa.flash_attention_forward(q, k, v, Bc, Br).shape == q.shape
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        fa.get_optimal_block_sizes(128, 0)


def test_memory_estimate_adds_up():
    full, half = (fa.estimate_memory_usage(8, 16, 1024, 64, use_half=half) for half in (False, True))
    for estimate in (full, half):
        parts = estimate["input_memory"] + estimate["internal_memory"] + estimate["output_memory"]
        assert estimate["total_memory"] == parts and estimate["total_memory_mb"] == parts / 2**20
    assert full["input_memory"] == 3 * 8 * 16 * 1024 * 64 * 4 == 2 * half["input_memory"]
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        fa.estimate_memory_usage(1, 1, 0, 64)


@pytest.mark.skipif(not ON_GPU, reason="peaks are measured on a GPU")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("sizes", [(8, 16, 1024, 64), (2, 8, 4096, 128), (1, 32, 2048, 64)])
def test_memory_estimate_is_what_is_measured(sizes, half):
    fa.flash_attention_forward(*_tensors(1, 1, 1, 256, 256, 64, grad=False), use_half=half)  # whatever is made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    q, k, v = (torch.randn(sizes, device=DEVICE, dtype=torch.float16 if half else torch.float32) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    out = fa.flash_attention_forward(q, k, v, use_half=half)
    measured = torch.cuda.max_memory_allocated() - before
    estimated = fa.estimate_memory_usage(*sizes, use_half=half)["total_memory"]
    assert out.shape == q.shape and abs(measured - estimated) <= 0.05 * measured


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_weights_from_lse(sizes, causal):
    """The softmax weights and the gradient of the whole softmax, of which half comes through lse."""
    q, k, v = _tensors(*sizes)
    _, lse = ops.flash_attention_forward(q, k, v, causal=causal)
    weights = ops.attention_weights(q, k, lse, causal=causal)
    same = torch.softmax(_scores(q, k, causal), -1).nan_to_num(0.0)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    exact = torch.softmax(_scores(*wide, causal), -1).nan_to_num(0.0)
    _within_budget((weights,), (same,), (exact,))
    if sizes[3] > sizes[4] and causal:
        return  # plain PyTorch's gradient is NaN in rows that see nothing
    dweights = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2)).to(weights)
    got, same = (torch.autograd.grad(w, (q, k), dweights) for w in (weights, same))
    _within_budget(got, same, torch.autograd.grad(exact, wide, dweights.double()))


def test_backward_of_the_ops_names_what_does_not_fit():
    q, k, v = _tensors(*SIZES[0], grad=False)
    out, lse = ops.flash_attention_forward(q, k, v)
    with pytest.raises(ValueError, match="lse must be"):
        ops.flash_attention_backward(q, k, v, out, lse[:, :, 1:], out)
    with pytest.raises(TypeError, match="dout has dtype"):
        ops.flash_attention_backward(q, k, v, out, lse, out.half())
    with pytest.raises(ValueError, match="l must be"):
        fa.flash_attention_backward(q, k, v, out, out, lse[..., 1:], lse)
    with pytest.raises(ValueError, match="k must have q's head dim"):
        ops.flash_attention_forward(q, k[..., 1:], v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [61, 30])
@pytest.mark.parametrize("rows", [7, 1000])
def test_packed_heads_in_chunks_equal_attention(keys, causal, rows, monkeypatch):
    from tilesmith.ops.attn import chunks

    batch, tokens, heads, kv_heads, dim = 2, 50, 4, 2, 16
    monkeypatch.setattr(chunks, "BUDGET", rows * 4 * chunks.COPIES * batch * heads * keys)
    shapes = ((tokens, heads * dim), (keys, kv_heads * dim), (keys, kv_heads * 24))
    tensors = [torch.randn(batch, *s, device=DEVICE, requires_grad=True) for s in shapes]
    out = ops.memory_efficient_attention(*tensors, heads, is_causal=causal, scale=0.3)
    split = [x.unflatten(2, (h, -1)).transpose(1, 2) for x, h in zip(tensors, (heads, kv_heads, kv_heads))]
    plain, _ = ops.attention(*split, ops.Mask(causal=causal), ops.Score(scale=0.3))
    plain = plain.transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, plain)
    dout = torch.randn_like(out)
    for got, expected in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(plain, tensors, dout)):
        torch.testing.assert_close(got, expected)


def test_packed_heads_name_what_does_not_fit():
    x = torch.randn(1, 5, 24, device=DEVICE)
    with pytest.raises(ValueError, match="num_heads is 5, which does not divide query's width, 24"):
        ops.memory_efficient_attention(x, x, x, 5)
    with pytest.raises(ValueError, match="key has width 20"):
        ops.memory_efficient_attention(x, x[..., :20], x, 3)
    with pytest.raises(ValueError, match="query must be"):
        ops.memory_efficient_attention(x[0], x, x, 3)
    with pytest.raises(ValueError, match="dropout_p"):
        ops.memory_efficient_attention(x, x, x, 3, dropout_p=1.0)
