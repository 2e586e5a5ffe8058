"""flash-attn's functions against scaled_dot_product_attention: values, gradients, and what they refuse in words."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from devices import DEVICE
from tilesmith.flash_attention import flash_attn_func, flash_attn_varlen_func
from tilesmith.ops import attention

SHARED = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


def _inputs(tokens, keys, heads=4, kv_heads=2, dim=16, value_dim=16, batch=2):
    generator = torch.Generator().manual_seed(tokens * 31 + keys)
    shapes = (batch, tokens, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim)
    return [torch.randn(s, generator=generator).to(DEVICE).requires_grad_() for s in shapes]


def _slopes(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)


def _sdpa(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """By SDPA in fp64 with a bias that says everything; a softcap, which SDPA lacks, by the formula of its paper."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    tokens, keys, heads = q.shape[2], k.shape[2], q.shape[1]
    distance = torch.arange(tokens, device=q.device)[:, None] + keys - tokens - torch.arange(keys, device=q.device)
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= left) if left >= 0 else True
    seen &= (-distance <= right) if right >= 0 else True
    bias = torch.zeros_like(distance, dtype=torch.float64).expand(1, heads, -1, -1)
    if alibi_slopes is not None:
        bias = bias - alibi_slopes.double()[..., None, None] * distance.abs()
    bias = bias.masked_fill(~seen, float("-inf"))
    empty = ~seen.any(-1)[:, None]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not softcap:
        out = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(empty, 0.0), scale=scale, enable_gqa=True)
    else:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        score = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
        out = torch.softmax(score + bias.masked_fill(empty, 0.0), -1) @ v
    return out.masked_fill(empty, 0.0).transpose(1, 2)


def _agree(outs, wanted, inputs, seed=3):
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    torch.testing.assert_close(outs, wanted.float())
    grads = torch.autograd.grad(outs, inputs, dout)
    exact = torch.autograd.grad(wanted, inputs, dout.double())
    torch.testing.assert_close(grads, exact)


OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3},
    {"window_size": (3, 2)},
    {"window_size": [2, -1]},
    {"window_size": (4, 4), "causal": True},
    {"softcap": 2.0, "causal": True},
    {"alibi_slopes": _slopes(4)},
    {"alibi_slopes": _slopes(2, 4), "causal": True, "window_size": (6, 0)},
    {"deterministic": True, "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(("tokens", "keys"), [(11, 11), (5, 12), (12, 7)])
def test_values_and_gradients_are_those_of_sdpa(tokens, keys, options):
    inputs = _inputs(tokens, keys)
    out = flash_attn_func(*inputs, **options)
    assert out.is_contiguous()
    _agree(out, _sdpa(*inputs, **{n: v for n, v in options.items() if n != "deterministic"}), inputs)


def test_the_last_query_and_the_last_key_have_one_position():
    q, k, v = _inputs(2, 5, heads=1, kv_heads=1, batch=1)
    last = flash_attn_func(q, k, v, causal=True)[:, 1:]
    torch.testing.assert_close(last, flash_attn_func(q[:, 1:], k, v))
    assert not flash_attn_func(k, q, q, causal=True)[:, :3].any()


def test_arguments_stand_in_the_places_of_flash_attn():
    names = list(SHARED)
    for function, before, after in (
        (flash_attn_func, ["q", "k", "v"], []),
        (
            flash_attn_varlen_func,
            ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
            ["block_table"],
        ),
    ):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == [*before, *names, *after]
        assert {name: parameters[name].default for name in names} == SHARED
    inputs = _inputs(6, 6)
    torch.testing.assert_close(
        flash_attn_func(*inputs, 0.0, 0.2, True, (3, 0), 1.5),
        flash_attn_func(*inputs, softmax_scale=0.2, causal=True, window_size=(3, 0), softcap=1.5),
    )


def test_heads_of_values_may_have_another_size_and_dtypes_stay():
    inputs = [x.detach().bfloat16() for x in _inputs(9, 9, kv_heads=1, value_dim=8)]
    out = flash_attn_func(*inputs)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 9, 4, 8))
    torch.testing.assert_close(out.float(), _sdpa(*inputs).float(), rtol=0.016, atol=0.016)


def _drawn(function, *arguments):
    torch.manual_seed(11)
    return function(*arguments)


def test_dropout_is_that_of_the_op_and_keeps_the_mean():
    inputs = _inputs(64, 64)
    out = _drawn(lambda *x: flash_attn_func(*x, dropout_p=0.25), *inputs)
    wanted, _ = _drawn(lambda *x: attention(*(y.transpose(1, 2) for y in x), dropout_p=0.25), *inputs)
    assert torch.equal(out, wanted.transpose(1, 2))
    again = flash_attn_func(*inputs, dropout_p=0.25)
    assert not torch.equal(out, again)
    draws = torch.stack([flash_attn_func(*inputs, dropout_p=0.25).detach() for _ in range(200)])
    plain = flash_attn_func(*inputs)
    error = (draws.mean(0) - plain).abs() / (draws.std(0) / 200**0.5)
    assert error.mean() < 1.0  # of a normal distribution 0.8


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"softcap": 1.0, "causal": True}, {"alibi_slopes": _slopes(3, 4)}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_packed_sequences_are_each_attended_alone(options):
    lengths = ((5, 5), (1, 4), (7, 3))
    parts = [[x[0] for x in _inputs(t, s, batch=1)] for t, s in lengths]
    packed = [torch.cat(each) for each in zip(*parts, strict=True)]
    starts = [torch.tensor([0, *side]).cumsum(0).int().to(DEVICE) for side in zip(*lengths, strict=True)]
    out = flash_attn_varlen_func(*packed, *starts, 7, 5, **options)
    assert out.is_contiguous()
    wanted = []
    for n, part in enumerate(parts):
        own = dict(options)
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"][n]
        wanted.append(_sdpa(*(x[None] for x in part), **own)[0])
    _agree(out, torch.cat(wanted), [x for part in parts for x in part])


def test_both_are_traced_whole():
    inputs = _inputs(6, 6, batch=1)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    dense = torch.compile(lambda *x: flash_attn_func(*x, causal=True), fullgraph=True, backend="aot_eager")
    packed = torch.compile(
        lambda *x: flash_attn_varlen_func(*(y[0] for y in x), starts, starts, 4, 4, causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(dense(*inputs), flash_attn_func(*inputs, causal=True))
    wanted = flash_attn_varlen_func(*(x[0] for x in inputs), starts, starts, 4, 4, causal=True)
    torch.testing.assert_close(packed(*inputs), wanted)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"return_attn_probs": True},
            ValueError,
            "return_attn_probs must be False.*attention_weights the probabilities",
        ),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs must be True or False, got 1"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"softmax_scale": "a"}, TypeError, "softmax_scale must be a number"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be above 0"),
        ({"alibi_slopes": torch.ones(4, device=DEVICE).int()}, TypeError, "alibi_slopes has dtype torch.int32"),
        ({"alibi_slopes": torch.ones(4, device=DEVICE, requires_grad=True)}, ValueError, "alibi_slopes requires a gra"),
        ({"softcap": -1.0}, ValueError, "softcap must be at least 0.0, got -1.0"),
        ({"causal": None}, TypeError, "causal must be True or False, got None"),
        ({"deterministic": "yes"}, TypeError, "deterministic must be True or False"),
        ({"window_size": 5}, TypeError, r"window_size must be a pair of ints \(left, right\), -1 unlimited, got 5"),
        ({"window_size": (-2, 0)}, ValueError, "window_size must have sides of at least -1"),
        (
            {"alibi_slopes": torch.ones(3, device=DEVICE)},
            ValueError,
            r"alibi_slopes must be \[4\] or \[\d, 4\], got \[3\]",
        ),
        ({"q": 3}, TypeError, "q must be a tensor"),
        ({"k": torch.ones(2, 2, 2, 2, 2)}, ValueError, r"k must be \[.*heads, D\], got \[2, 2, 2, 2, 2\]"),
    ],
)
@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_bad_arguments_are_named(function, changes, error, message):
    given = dict(zip("qkv", _inputs(5, 5)))
    if function is flash_attn_varlen_func:
        starts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
        given = {name: x[0] for name, x in given.items()}
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    with pytest.raises(error, match=f"^{function.__name__}: {message}"):
        function(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_table": torch.zeros(1, 1).int()}, ValueError, r"k must be \[pages, page_size, heads, D\], got"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a tensor, got None"),
        ({"cu_seqlens_k": torch.zeros(2, 2).int()}, ValueError, r"cu_seqlens_k must be \[N \+ 1\], got \[2, 2\]"),
        ({"cu_seqlens_k": torch.tensor([0, 5], device=DEVICE)}, TypeError, "cu_seqlens_k"),
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q must be an int, got 2.5"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0, got -1"),
        ({"v": torch.ones(5, 3, 16, device=DEVICE)}, ValueError, "v"),
    ],
)
def test_bad_arguments_of_packed_sequences_are_named(changes, error, message):
    q, k, v = (x[0] for x in _inputs(5, 5))
    starts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    with pytest.raises(error, match=f"^flash_attn_varlen_func: {message}"):
        flash_attn_varlen_func(**{"q": q, "k": k, "v": v, **given, **changes})


def _paged(k, lengths, page, pages, seed):
    """Keys [tokens, G, D] of sequences as pages in any order, [n, page, G, D], and their table, -1 behind the last."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths) * pages + 1, generator=generator).int()
    table = order[:-1].view(len(lengths), pages).clone()
    cache = torch.full((len(order), page, *k.shape[1:]), float("nan"), device=DEVICE)
    for row, x in zip(table, k.split(lengths), strict=True):
        used = -(-len(x) // page)
        row[used:] = -1
        for slot, one in enumerate(x):
            cache[row[slot // page], slot % page] = one
    return cache, table.to(DEVICE)


@pytest.mark.parametrize(
    "more",
    [{}, {"causal": True}, {"window_size": (3, 1), "softcap": 2.0}, {"causal": True, "alibi_slopes": _slopes(3, 4)}],
)
def test_packed_queries_read_keys_in_pages(more):
    """As the same sequences without pages: of no length, and longer than their queries."""
    queries, lengths = [3, 1, 4], [9, 0, 4]
    q, k, v = (x.detach()[0] for x in _inputs(sum(queries), sum(lengths), value_dim=24))
    starts = [torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in (queries, lengths)]
    wanted_q, paged_q = (q.clone().requires_grad_() for _ in range(2))
    wanted = flash_attn_varlen_func(wanted_q, k, v, *starts, 4, 9, **more)
    (keys, table), (values, _) = (_paged(x, lengths, 4, 3, seed=2) for x in (k, v))
    found = flash_attn_varlen_func(paged_q, keys, values, *starts, 4, 9, **more, block_table=table)
    torch.testing.assert_close(found, wanted)
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted.backward(dout)
    found.backward(dout)
    torch.testing.assert_close(paged_q.grad, wanted_q.grad)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_table": [[0]]}, TypeError, "block_table must be a tensor, got list"),
        ({"block_table": torch.zeros(2, 1).int()}, ValueError, r"block_table must be \[1, 1\], got \[2, 1\]"),
        ({"block_table": torch.zeros(1, 1).long()}, TypeError, "block_table has dtype torch.int64; it must be int32"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 5]).int()}, ValueError, r"cu_seqlens_k must be \[2\], got \[3\]"),
        (
            {"cu_seqlens_k": torch.tensor([0, 9]).int()},
            ValueError,
            "cu_seqlens_k has a sequence of 9 keys.* pages",
        ),
        (
            {"cu_seqlens_k": torch.tensor([1, 5]).int()},
            ValueError,
            r"cu_seqlens_k holds \[1, 5\]; it must ascend from 0",
        ),
    ],
)
def test_pages_that_do_not_fit_packed_queries_are_refused(changes, error, message):
    q, k, v = torch.randn(3, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    starts = torch.tensor([0, 3]).int()
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": torch.tensor([0, 5]).int(), "max_seqlen_q": 3, "max_seqlen_k": 5}
    with pytest.raises(error, match=f"^flash_attn_varlen_func: {message}"):
        flash_attn_varlen_func(q, k, v, **{**given, "block_table": torch.zeros(1, 1).int(), **changes})
