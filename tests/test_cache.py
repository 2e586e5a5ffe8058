"""kv_cache_append against plain indexing, what it drops, what it leaves alone, and what it refuses."""

import itertools
import random

import pytest
import torch

from devices import DEVICE
from tilesmith.engine import torch_private, use
from tilesmith.engine.backends import missing
from tilesmith.ops import Mask, attention, kv_cache_append, rope
from tilesmith.ops.attn.overlap import distance, overlap
from tilesmith.validate.budget import compare

BACKENDS = [b for b in kv_cache_append.backends() if missing(b, DEVICE, pinned=True) is None]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with use(kv_cache_append=request.param):
        yield request.param


def _randn(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(n * 7**i for i, n in enumerate(shape)))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def _lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _write(cache, new, places):
    """A copy of the cache with new[row, :, token] at each (row, token) -> (first index, slot) of `places`."""
    cache = cache.clone()
    for (row, token), (first, slot) in places.items():
        cache[first, :, slot] = new[row, :, token].to(cache.dtype)
    return cache


def _turn(x, angle, interleaved, acc):
    """x [T, D] with its first 2 * R features rotated by angle [T, R], pair by pair, in the dtype `acc`."""
    x, cos, sin = x.to(acc), angle.cos().to(acc), angle.sin().to(acc)
    out = x.clone()
    for i in range(angle.shape[-1]):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + angle.shape[-1])
        out[:, a] = x[:, a] * cos[:, i] - x[:, b] * sin[:, i]
        out[:, b] = x[:, b] * cos[:, i] + x[:, a] * sin[:, i]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_contiguous_cache_matches_indexing(backend, dtype):
    k_cache, v_cache = _randn(3, 2, 9, 8, dtype=dtype), _randn(3, 2, 9, 8, dtype=dtype) + 1
    k, v = _randn(3, 2, 3, 8, dtype=dtype), _randn(3, 2, 3, 8, dtype=dtype) - 1
    places = {(b, t): (b, n + t) for b, n in enumerate((0, 4, 6)) for t in range(3)}
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    lengths = _lengths(0, 4, 6)
    out = kv_cache_append(k_cache, v_cache, k, v, lengths)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert out.numel() == 0
    assert out.dtype == dtype
    assert lengths.tolist() == [0, 4, 6]


def test_paged_cache_matches_indexing(backend):
    table = [[5, 0, 3], [1, 4, 2]]
    k_cache, v_cache = _randn(7, 2, 4, 8), _randn(7, 2, 4, 8) + 1
    k, v = _randn(2, 2, 5, 8), _randn(2, 2, 5, 8) - 1
    places = {(b, t): (table[b][(n + t) // 4], (n + t) % 4) for b, n in enumerate((2, 7)) for t in range(5)}
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    pages = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(2, 7), page_table=pages)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("layout", ["tokens_first", "features_first", "sliced"])
def test_caches_of_any_strides_are_written_in_place(backend, layout):
    k_cache = {
        "tokens_first": _randn(2, 6, 3, 8).transpose(1, 2),
        "features_first": _randn(2, 3, 8, 6).transpose(2, 3),
        "sliced": _randn(4, 5, 9, 11)[::2, 1:4, 2:8, 1:9],
    }[layout]
    v_cache = _randn(2, 3, 6, 8)
    k, v = _randn(2, 2, 3, 8).transpose(1, 2), _randn(2, 3, 2, 8)
    places = {(b, t): (b, n + t) for b, n in enumerate((1, 3)) for t in range(2)}
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(1, 3))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (5, 11), (8, 0), (0, 3)])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_values_may_have_another_head_dim_than_keys(backend, dim, dim_v, paged):
    table = [[5, 0], [1, 4]]
    first = (lambda b, slot: (table[b][slot // 4], slot % 4)) if paged else lambda b, slot: (b, slot)
    slots = (7, 2, 4) if paged else (2, 2, 8)
    k_cache, v_cache, k, v = _randn(*slots, dim), _randn(*slots, dim_v), _randn(2, 2, 3, dim), _randn(2, 2, 3, dim_v)
    places = {(b, t): first(b, n + t) for b, n in enumerate((1, 6)) for t in range(3) if n + t < 8}
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    given = {"page_table": torch.tensor(table, dtype=torch.int32, device=DEVICE)} if paged else {}
    kv_cache_append(k_cache, v_cache, k, v, _lengths(1, 6), **given)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_tokens_outside_a_contiguous_cache_are_dropped(backend):
    room = _randn(4, 2, 12, 8)
    k_cache, before = room[:, :, 3:9], room.clone()
    v_cache, k, v = _randn(4, 2, 6, 8), _randn(4, 2, 3, 8), _randn(4, 2, 3, 8)
    places = {(b, t): (b, n + t) for b, n in enumerate((-2, 5, 6, 2)) for t in range(3) if 0 <= n + t < 6}
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(-2, 5, 6, 2))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert torch.equal(room[:, :, :3], before[:, :, :3])
    assert torch.equal(room[:, :, 9:], before[:, :, 9:])


def test_tokens_without_a_page_are_dropped(backend):
    table = [[0, -1], [9, 2], [1, 5]]  # -1 and 9 name no page of the six
    k_cache, v_cache, k, v = _randn(6, 1, 2, 8), _randn(6, 1, 2, 8), _randn(3, 1, 4, 8), _randn(3, 1, 4, 8)
    places = {}
    for b, n in enumerate((0, 0, 3)):
        for t in range(4):
            if n + t < 4 and 0 <= table[b][(n + t) // 2] < 6:
                places[b, t] = table[b][(n + t) // 2], (n + t) % 2
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    pages = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(0, 0, 3), page_table=pages)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 6])
def test_keys_and_queries_are_rotated_by_their_positions(backend, interleaved, rotated):
    angle = torch.arange(10, device=DEVICE)[:, None] * torch.linspace(1, 0.1, rotated // 2, device=DEVICE)
    k_cache, v_cache = _randn(2, 1, 10, 8), _randn(2, 1, 10, 8)
    k, v, q = _randn(2, 1, 3, 8), _randn(2, 1, 3, 8), _randn(2, 3, 4, 8).transpose(1, 2)
    before = q.clone()
    out = kv_cache_append(k_cache, v_cache, k, v, _lengths(0, 5), q, angle.cos(), angle.sin(), interleaved=interleaved)
    for b, n in enumerate((0, 5)):
        for got, x in ((k_cache[b, 0, n : n + 3], k[b, 0]), *((out[b, h], q[b, h]) for h in range(4))):
            same, exact = (_turn(x, angle[n : n + 3], interleaved, acc) for acc in (torch.float32, torch.float64))
            budget = compare(got, same, exact)
            assert budget.passed, budget
        assert torch.equal(v_cache[b, 0, n : n + 3], v[b, 0])
    assert torch.equal(q, before)
    assert out.stride() == torch.empty_like(q).stride()


def test_angles_for_each_token_equal_a_table(backend):
    angle = torch.arange(9, device=DEVICE)[:, None] * torch.linspace(1, 0.1, 4, device=DEVICE)
    rows = torch.stack((angle[2:5], angle[6:9]))
    k, v, q = _randn(2, 1, 3, 8), _randn(2, 1, 3, 8), _randn(2, 2, 3, 8)
    caches = [_randn(2, 1, 9, 8) for _ in range(4)]
    by_table = kv_cache_append(caches[0], caches[1], k, v, _lengths(2, 6), q, angle.cos(), angle.sin())
    by_token = kv_cache_append(caches[2], caches[3], k, v, _lengths(2, 6), q, rows.cos(), rows.sin())
    assert torch.equal(by_table, by_token)
    assert torch.equal(caches[0], caches[2])


def test_a_position_without_an_angle_gives_nan(backend):
    angle = torch.linspace(0, 1, 12, device=DEVICE).view(3, 4)
    k_cache, v_cache = _randn(1, 1, 8, 10), _randn(1, 1, 8, 10)
    k, v, q = _randn(1, 1, 2, 10), _randn(1, 1, 2, 10), _randn(1, 2, 2, 10)
    out = kv_cache_append(k_cache, v_cache, k, v, _lengths(2), q, angle.cos(), angle.sin())
    assert out[:, :, 0].isfinite().all()
    assert out[:, :, 1, :8].isnan().all()
    assert torch.equal(out[:, :, 1, 8:], q[:, :, 1, 8:])
    assert k_cache[:, :, 3, :8].isnan().all()
    assert k_cache[:, :, 2].isfinite().all()
    assert v_cache.isfinite().all()


def test_values_are_rounded_once_to_the_cache_dtype(backend):
    k_cache, v_cache = torch.zeros(1, 1, 4, 8, device=DEVICE).half(), torch.zeros(1, 1, 4, 8, device=DEVICE).half()
    k, v = _randn(1, 1, 2, 8), _randn(1, 1, 2, 8)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(1))
    assert torch.equal(k_cache[:, :, 1:3], k.half())
    assert torch.equal(v_cache[:, :, 1:3], v.half())


def test_64_bit_lengths_and_pages(backend):
    k_cache, v_cache, k, v = _randn(3, 1, 2, 8), _randn(3, 1, 2, 8), _randn(1, 1, 2, 8), _randn(1, 1, 2, 8)
    expected = _write(k_cache, k, {(0, 0): (2, 1), (0, 1): (0, 0)})
    pages = torch.tensor([[2, 0]], device=DEVICE)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(1).long(), page_table=pages)
    assert torch.equal(k_cache, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_caches_hold_what_attention_multiplies_back(backend, dtype):
    kinds = {"device": DEVICE, "dtype": dtype}
    k_cache, v_cache = torch.zeros(2, 2, 6, 16, **kinds), torch.zeros(2, 2, 6, 16, **kinds)
    # numbers that 8 bits hold exactly: Triton's interpreter rounds up to the next power of two wrongly
    k, v = (_randn(2, 2, 3, 16, dtype=torch.float64).round().clamp(-4, 4).float() for _ in range(2))
    q, v = _randn(2, 4, 3, 16), 64 * v
    k_scale, v_scale = (torch.tensor(x, device=DEVICE).view(1, -1, 1) for x in ([0.5, 0.25], [16.0]))
    kv_cache_append(k_cache, v_cache, k, v, _lengths(0, 2), k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(k_cache[1, :, 2:5].float() * k_scale[0, :, :, None], k[1])
    assert torch.equal(v_cache[0, :, :3].float() * 16, v[0])
    assert not k_cache[1, :, 5].float().any()
    lengths = _lengths(3, 5)
    with use(attention="reference"):
        out, _ = attention(q, k_cache, v_cache, Mask(causal=True), kv_lengths=lengths, k_scale=k_scale, v_scale=v_scale)
        wanted, _ = attention(q[:1], k[:1], v[:1], Mask(causal=True))
    torch.testing.assert_close(out[:1], wanted)


def test_8_bit_caches_saturate(backend):
    k_cache, v_cache = (torch.zeros(1, 1, 4, 8, device=DEVICE, dtype=torch.float8_e4m3fn) for _ in range(2))
    k = torch.tensor([1e6, -1e6, 449.0, -0.5, 1.0, 0.0, -448.0, 320.0], device=DEVICE).view(1, 1, 1, 8)
    one = torch.ones(1, 1, 1, device=DEVICE)
    kv_cache_append(k_cache, v_cache, k, k, _lengths(0), k_scale=one, v_scale=one)
    assert v_cache[0, 0, 0].float().tolist() == [448.0, -448.0, 448.0, -0.5, 1.0, 0.0, -448.0, 320.0]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("small", [None, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize(("dim", "dim_v"), [(128, 128), (192, 128)])
def test_a_captured_step_follows_lengths_and_pages(dim, dim_v, tokens, page_size, small):
    slots, heads, kv_heads = 512, 16, 2
    pages = 2 * slots // page_size if page_size else 0
    shape = (pages, kv_heads, page_size) if pages else (2, kv_heads, slots)
    caches = [_randn(*shape, n).to(small or torch.bfloat16) for n in (dim, dim_v)]
    given = {"page_table": torch.randperm(pages, device=DEVICE).int().view(2, -1)} if pages else {}
    if small is not None:
        given |= dict.fromkeys(("k_scale", "v_scale"), torch.full((1, 1, 1), 0.25, device=DEVICE))
    q, k = (_randn(2, h, tokens, dim, dtype=torch.bfloat16) for h in (heads, kv_heads))
    v = _randn(2, kv_heads, tokens, dim_v, dtype=torch.bfloat16)
    angles = _randn(slots, dim // 2)
    lengths = _lengths(3, 400)

    def step(caches):
        turned = kv_cache_append(*caches, k, v, lengths, q, angles.cos(), angles.sin(), **given)
        return attention(turned, *caches, Mask(causal=True), kv_lengths=lengths + tokens, **given)[0]

    step([c.clone() for c in caches])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(caches)
    for numbers in ((3, 400), (496, 0), (17, 64)):
        lengths.copy_(_lengths(*numbers))
        for x in (q, k, v):
            x.normal_()
        if pages:
            given["page_table"].copy_(torch.randperm(pages, device=DEVICE).view(2, -1))
        expected = step([c.clone() for c in caches])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


def _arguments(**changes):
    given = {
        "k_cache": _randn(2, 2, 6, 8),
        "v_cache": _randn(2, 2, 6, 8),
        "k": _randn(2, 2, 3, 8),
        "v": _randn(2, 2, 3, 8),
        "lengths": _lengths(0, 1),
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": _randn(2, 3, 8)}, ValueError, r"k has shape \(2, 3, 8\); it must be \[B, G, T, D\]"),
        (
            {"v": _randn(2, 2, 4, 8)},
            ValueError,
            r"v has shape \(2, 2, 4, 8\); for k of shape \(2, 2, 3, 8\) it must be \[2,",
        ),
        ({"v": _randn(2, 2, 3)}, ValueError, r"v has shape \(2, 2, 3\); .* it must be \[2, 2, 3, Dv\]"),
        ({"v": _randn(2, 2, 3, 5)}, ValueError, r"v_cache has shape \(2, 2, 6, 8\); .* it must be \[2, 2, 6, 5\]"),
        ({"v_cache": _randn(2, 2, 6, 5)}, ValueError, r"v_cache has shape \(2, 2, 6, 5\); .* \[2, 2, 6, 8\]"),
        ({"v_cache": _randn(2, 2, 6)}, ValueError, r"v_cache has shape \(2, 2, 6\)"),
        ({"k_cache": _randn(2, 3, 6, 8)}, ValueError, r"k_cache has shape \(2, 3, 6, 8\)"),
        ({"k_cache": _randn(3, 2, 6, 8), "v_cache": _randn(3, 2, 6, 8)}, ValueError, "k_cache has 3 rows, k has 2"),
        ({"v_cache": _randn(2, 2, 5, 8)}, ValueError, "v_cache has shape"),
        ({"k_cache": _randn(2, 2, 1, 8).expand(2, 2, 6, 8)}, ValueError, "k_cache is expanded"),
        ({"lengths": _lengths(0, 1).float()}, TypeError, "lengths has dtype torch.float32"),
        ({"lengths": _lengths(0, 1, 2)}, ValueError, r"lengths has shape \(3,\)"),
        ({"page_table": _lengths(0, 1)}, ValueError, "page_table has shape"),
        ({"k": _randn(2, 2, 3, 8).int(), "v": _randn(2, 2, 3, 8).int()}, TypeError, "k has dtype torch.int32"),
        ({"q": _randn(2, 4, 3, 8)}, ValueError, "q is given without cos and sin"),
        ({"cos": _randn(6, 4)}, ValueError, "sin is missing"),
        ({"sin": _randn(6, 4)}, ValueError, "cos is missing"),
        ({"cos": _randn(6, 4), "sin": _randn(6, 3)}, ValueError, "they must match"),
        ({"cos": _randn(6, 5), "sin": _randn(6, 5)}, ValueError, "cos has 5 angles for 10 features, but D is 8"),
        ({"cos": _randn(2, 4, 4), "sin": _randn(2, 4, 4)}, ValueError, r"cos has shape \(2, 4, 4\)"),
        ({"k_cache": _randn(2, 2, 6, 8).to(torch.float8_e4m3fn)}, ValueError, "give k_scale with it"),
        ({"v_scale": _randn(2, 2, 1)}, ValueError, r"v_scale has shape \(2, 2, 1\); it must be \[1, 2, 1\] or"),
        ({"v_scale": _lengths(1).view(1, 1, 1)}, TypeError, "v_scale has dtype torch.int32"),
        ({"q": _randn(2, 4, 3, 6), "cos": _randn(6, 3), "sin": _randn(6, 3)}, ValueError, "q has shape"),
        ({"q": _randn(2, 4, 5, 8), "cos": _randn(2, 3, 4), "sin": _randn(2, 3, 4)}, ValueError, r"\[2, 5, R / 2\]"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=f"kv_cache_append: .*{message}"):
        kv_cache_append(**_arguments(**changes))


@pytest.mark.parametrize("name", ["k_cache", "k", "v", "k_scale", "v_scale"])
def test_a_wanted_gradient_is_refused(name):
    given = _arguments(**{scale: torch.ones(1, 1, 1, device=DEVICE) for scale in ("k_scale", "v_scale")})
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires a gradient"):
        kv_cache_append(**given)
    with torch.no_grad():
        kv_cache_append(**given)


def test_keys_alone_are_written_where_values_are_their_columns(backend):
    cache, new = _randn(2, 1, 6, 40), _randn(2, 1, 3, 40)
    expected = _write(cache, new, {(b, t): (b, n + t) for b, n in enumerate((1, 3)) for t in range(3)})
    kv_cache_append(cache, cache[..., :0], new, new[..., :0], _lengths(1, 3))
    assert torch.equal(cache, expected)
    kv_cache_append(cache, cache.new_empty(()).expand(2, 1, 6, 0), new, new[..., :0], _lengths(1, 3))
    assert torch.equal(cache, expected)
    with pytest.raises(ValueError, match="v_cache begins where k_cache does and shares memory"):
        kv_cache_append(cache, cache[..., :32], new, new[..., :32], _lengths(1, 3))
    assert torch.equal(cache, expected)


def test_one_cache_for_keys_and_values_is_refused():
    given = _arguments()
    kv_cache_append(**given)
    with pytest.raises(
        ValueError, match=r"v_cache begins where k_cache does.*give each its own memory.* k, v\[..., :0\]"
    ):
        kv_cache_append(**given | {"v_cache": given["k_cache"]})
    kv_cache_append(**given | {"k_cache": given["k_cache"][..., :0], "v_cache": given["k_cache"][..., :0],
                               "k": given["k"][..., :0], "v": given["v"][..., :0]})  # fmt: skip


def test_caches_that_share_elements_are_refused_wherever_they_begin():
    """Values behind the start of the keys, and those of a call whose facts but their distance are known already."""
    memory = _randn(2, 1, 6, 80)
    before, new = memory.clone(), _randn(2, 1, 3, 40)
    given = (new, new, _lengths(1, 3))
    kv_cache_append(memory[..., :40], memory[..., 40:], *given)
    assert not torch.equal(memory, before)
    before = memory.clone()
    for first in (1, 16, 39):
        with pytest.raises(ValueError, match=f"v_cache begins {4 * first} bytes from where k_cache does and shares"):
            kv_cache_append(memory[..., :40], memory[..., first : first + 40], *given)
        with pytest.raises(ValueError, match=f"v_cache begins -{4 * first} bytes from where"):
            kv_cache_append(memory[..., first : first + 40], memory[..., :40], *given)
    with pytest.raises(ValueError, match="v_cache begins 64 bytes from where"):
        kv_cache_append(memory[..., :40], memory[..., 16:40], new, new[..., :24], _lengths(1, 3))
    assert torch.equal(memory, before)


def test_the_last_features_are_rotated_before_they_are_written(backend):
    """As the documentation says, of heads whose rotated part comes last."""
    k_cache, v_cache = _randn(2, 1, 9, 24), _randn(2, 1, 9, 16)
    q, k, v, angle = _randn(2, 4, 3, 24), _randn(2, 1, 3, 24), _randn(2, 1, 3, 16), _randn(9, 4)
    lengths, rows = _lengths(2, 5), torch.stack((angle[2:5], angle[5:8]))
    turned = [torch.stack([torch.stack([_turn(h.roll(8, -1), a, False, torch.float64).roll(-8, -1) for h in row])
                           for row, a in zip(x, rows)]) for x in (q, k)]  # fmt: skip
    places = {(b, t): (b, n + t) for b, n in enumerate((2, 5)) for t in range(3)}
    expected = _write(k_cache, turned[1], places)
    q, k = rope(q, k, angle.cos(), angle.sin(), offsets=lengths, last=True)
    kv_cache_append(k_cache, v_cache, k, v, lengths)
    torch.testing.assert_close(q, turned[0].float())
    torch.testing.assert_close(k_cache, expected)


SHARED = {
    "tokens": lambda x: (x.view(2, 6, 2, 2, 8)[:, :, i].transpose(1, 2) for i in (0, 1)),
    "rows": lambda x: (x.view(2, 2, 2, 6, 8)[:, i] for i in (0, 1)),
    "heads": lambda x: (y.transpose(1, 2) for y in x.view(2, 6, 2, 16).split(8, -1)),
    "features": lambda x: (x.view(2, 2, 6, 8, 2)[..., i] for i in (0, 1)),
    "orders": lambda x: (x.view(2, 2, 2, 6, 8)[:, 0], x.view(2, 2, 6, 2, 8)[:, 1].transpose(1, 2)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_caches_that_lie_between_one_another_are_two(kind, backend):
    memory = _randn(2 * 2 * 6 * 2 * 8)
    k_cache, v_cache = SHARED[kind](memory)
    k, v = _randn(2, 2, 2, 8), _randn(2, 2, 2, 8) + 1
    places = {(b, t): (b, n + t) for b, n in enumerate((1, 3)) for t in range(2)}
    expected = _write(k_cache, k, places), _write(v_cache, v, places)
    kv_cache_append(k_cache, v_cache, k, v, _lengths(1, 3))
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


def test_overlap_is_what_a_list_of_bytes_says():
    chance = random.Random(7)
    memory = torch.zeros(4096, dtype=torch.uint8)
    with torch_private.fake_tensor_mode() as mode:
        fake = mode.from_tensor(memory)

    seen = set()
    for _ in range(3000):
        dims = [chance.choice((1, 2, 3, 5)) for _ in range(chance.randint(1, 4))]
        strides = [chance.choice((1, 2, 3, 4, 8, 12, 16, 24, 32, 64)) for _ in dims]
        pair, places = [], []
        for i in (0, 1):
            dtype = chance.choice((torch.uint8, torch.float16, torch.float32))
            if i and chance.random() < 0.5:
                dims = [chance.choice((n, 2)) for n in dims]
            elif i and chance.random() < 0.5:
                strides = [chance.choice((1, 2, 3, 5, 8, 40)) for _ in dims]
            offset = chance.randint(0, 80)
            pair.append((dtype, dims, strides, offset))
            firsts = itertools.product(*(range(0, n * s, s) for n, s in zip(dims, strides)))
            at = ((offset + sum(first)) * dtype.itemsize for first in firsts)
            places.append({place + j for place in at for j in range(dtype.itemsize)})
        shared = bool(places[0] & places[1])
        seen.add(shared)
        x = [torch.as_strided(memory.view(dtype), *where) for dtype, *where in pair]
        assert overlap(*x) is shared, pair
        assert distance(*x) == pair[1][3] * pair[1][0].itemsize - pair[0][3] * pair[0][0].itemsize
    assert seen == {True, False}
    assert distance(memory, memory.clone()) is None and not overlap(memory, memory.clone())
    assert not overlap(memory, memory[:0])
    for other in (memory.to("meta"), fake):
        assert overlap(other[:8], other[4:]) and not overlap(other[:8], other[8:])
