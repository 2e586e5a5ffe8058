"""flash_attn_with_kvcache against attention over each row's own keys, and what it refuses before it writes."""

import pytest
import torch

from devices import DEVICE
from tilesmith.flash_attention import flash_attn_with_kvcache
from tilesmith.ops import Mask, Score, attention


def _randn(*shape):
    generator = torch.Generator().manual_seed(sum(n * 7**i for i, n in enumerate(shape)))
    return torch.randn(shape, generator=generator).to(DEVICE)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _turned(x, first, angle, interleaved, together=False):
    """x [tokens, heads, D] rotated by the angles of first, first + 1, …, or all of first."""
    at = torch.full((len(x),), first) if together else first + torch.arange(len(x))
    wave = torch.polar(torch.ones_like(angle[at]), angle[at])[:, None]
    rotated, rest = x.split([2 * angle.shape[1], x.shape[-1] - 2 * angle.shape[1]], -1)
    pairs = rotated.unflatten(-1, (-1, 2)) if interleaved else rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * wave)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("new", "tokens"), [(3, 3), (4, 2), (2, 4)])
@pytest.mark.parametrize(("dim", "dim_v"), [(16, 16), (192, 128), (13, 7), (12, 33)])
def test_new_keys_are_written_and_attended_to(dim, dim_v, new, tokens, causal, paged):
    batch, heads, kv_heads, room = 2, 4, 2, 12
    lengths, pads = (5, 8), (2, 0)
    q, k = _randn(batch, tokens, heads, dim), _randn(batch, new, kv_heads, dim)
    v = _randn(batch, new, kv_heads, dim_v) + 1
    angle = _randn(room + 4, 6)
    if paged:
        caches, how = (
            [_randn(7, 4, kv_heads, n) + i for i, n in enumerate((dim, dim_v))],
            {"block_table": _ints(5, 0, 3, 1, 4, 2).view(2, 3)},
        )
        rows = [c[how["block_table"].long()].flatten(1, 2) for c in caches]
    else:
        caches = [_randn(5, room, kv_heads, n) + i for i, n in enumerate((dim, dim_v))]
        how = {"cache_batch_idx": _ints(3, 1)}
        rows = [c[[3, 1]].clone() for c in caches]
    before = [c.clone() for c in caches]
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, angle.cos(), angle.sin(), _ints(*lengths), cache_leftpad=_ints(*pads), causal=causal,
        softcap=20.0, return_softmax_lse=True, rotary_interleaved=causal, **how,
    )  # fmt: skip
    for b, (n, pad) in enumerate(zip(lengths, pads, strict=True)):
        rows[0][b, n : n + new] = _turned(k[b], n, angle, causal)
        rows[1][b, n : n + new] = v[b]
        queries = _turned(q[b], n, angle, causal, together=not causal)
        seen = [x[b, pad : n + new].transpose(0, 1)[None] for x in rows]
        wanted, its_lse = attention(queries.transpose(0, 1)[None], *seen, Mask(causal), Score(softcap=20.0))
        torch.testing.assert_close(out[b], wanted[0].transpose(0, 1))
        torch.testing.assert_close(lse[b], its_lse[0])
    for cache, old, row in zip(caches, before, rows, strict=True):
        if paged:
            pages = row.unflatten(1, (3, 4)).flatten(0, 1)
            old[how["block_table"].long().flatten()] = pages
        else:
            old[[3, 1]] = row
        torch.testing.assert_close(cache, old)


@pytest.mark.parametrize("write", [False, True])
def test_the_first_rows_of_a_larger_cache(write):
    q, new = _randn(2, 3, 4, 16), [_randn(2, 3, 2, 16) + i for i in range(2)]
    caches = [_randn(5, 9, 2, 16) + i for i in range(2)]
    whole, some = ([c.clone() for c in caches], [c[:2].clone() for c in caches])
    given = (*new, None, None, 4) if write else ()
    out = flash_attn_with_kvcache(q, *whole, *given, causal=True)
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, *some, *given, causal=True))
    for cache, old, row in zip(whole, caches, some, strict=True):
        assert torch.equal(cache[2:], old[2:]) and torch.equal(cache[:2], row)


def test_a_cache_alone_is_read_in_place_with_window_and_slopes():
    q, k_cache, v_cache, slopes = _randn(2, 2, 4, 16), _randn(3, 9, 2, 16), _randn(3, 9, 2, 8), _randn(4).abs()
    got = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=7, cache_batch_idx=_ints(2, 2), window_size=(3, 1), alibi_slopes=slopes,
        softmax_scale=0.5,
    )  # fmt: skip
    rows = [x[[2, 2], :7].transpose(1, 2) for x in (k_cache, v_cache)]
    wanted, _ = attention(q.transpose(1, 2), *rows, Mask(window=(3, 1)), Score(0.5, alibi=slopes))
    torch.testing.assert_close(got, wanted.transpose(1, 2))
    whole = flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2], cache_leftpad=_ints(0, 9))
    assert not whole[1].any()
    torch.testing.assert_close(whole[0], flash_attn_with_kvcache(q[:1], k_cache[:1], v_cache[:1])[0])


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float32])
def test_autocast_casts_before_it_is_checked(query, cache):
    """As projections leave them under autocast: queries and keys of one dtype, a cache of another."""
    q, k, v = (_randn(2, 1, heads, 8).to(query) for heads in (4, 2, 2))
    caches = [_randn(2, 6, 2, 8).to(cache) + i for i in range(2)]
    rows = [x.clone() for x in caches]
    for row, new in zip(rows, (k, v), strict=True):
        row[:, 3] = new[:, 0]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3)
        wanted = flash_attn_with_kvcache(q, *rows, cache_seqlens=4)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted)
    assert all(torch.equal(x, y) for x, y in zip(caches, rows, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v": None}, ValueError, "v is missing; give k and v, or neither"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is missing"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens must be an int or an int32 tensor"),
        ({"cache_seqlens": torch.zeros(2).long()}, TypeError, "cache_seqlens has dtype torch.int64; it must be int32"),
        ({"cache_batch_idx": _ints(0)}, ValueError, r"cache_batch_idx has shape \(1,\); it must be \[2\]"),
        ({"cache_leftpad": _ints(0, 1, 2)}, ValueError, r"cache_leftpad has shape \(3,\); it must be \[2\]"),
        ({"block_table": _ints(0, 1).view(2, 1), "cache_batch_idx": _ints(0, 1)}, ValueError, "both given"),
        ({"block_table": [[0], [1]]}, TypeError, "block_table must be a tensor, got list"),
        ({"rotary_cos": _randn(9, 4)}, ValueError, "rotary_sin is missing"),
        ({"num_splits": 4}, ValueError, "num_splits is 4; it must be 0"),
        ({"alibi_slopes": _randn(3)}, ValueError, r"alibi_slopes must be \[4\] or \[2, 4\]"),
        ({"alibi_slopes": _ints(1, 1, 1, 1)}, TypeError, "alibi_slopes has dtype torch.int32"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale must be above 0"),
        ({"k_cache": _randn(1, 6, 2, 8), "v_cache": _randn(1, 6, 2, 8)}, ValueError, "k_cache has 1 rows and q 2"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens holds -1; .* it must be 0 to 5"),
        ({"cache_seqlens": 6}, ValueError, "cache_seqlens holds 6; a row of the cache has 6 slots"),
        ({"k": None, "v": None, "cache_seqlens": 7}, ValueError, "cache_seqlens holds 7; .* it must be 0 to 6"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"causal": 1}, TypeError, "causal"),
        ({"q": _randn(2, 4, 8)}, ValueError, "q"),
        ({"k": _randn(2, 1, 2, 4)}, ValueError, "k"),
        ({"v": _randn(2, 1, 2, 4)}, ValueError, r"v_cache has shape \(2, 2, 6, 8\); .* it must be \[2, 2, 6, 4\]"),
        ({"v": _randn(2, 2, 2, 8)}, ValueError, r"v has shape \(2, 2, 2, 8\); .* it must be \[2, 2, 1, Dv\]"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(changes, error, message):
    given = {"q": _randn(2, 1, 4, 8), "k_cache": _randn(2, 6, 2, 8), "v_cache": _randn(2, 6, 2, 8)}
    given |= {"k": _randn(2, 1, 2, 8), "v": _randn(2, 1, 2, 8), "cache_seqlens": _ints(0, 3)} | changes
    before = given["k_cache"].clone(), given["v_cache"].clone()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before[0])
    assert torch.equal(given["v_cache"], before[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_seqlens": [0, 6]}, "cache_seqlens holds 6; a row of the cache has 6 slots"),
        ({"cache_seqlens": [-2, 0]}, "cache_seqlens holds -2"),
        ({"cache_batch_idx": [0, 2]}, "cache_batch_idx holds 2; the cache has rows 0 to 1"),
        ({"cache_batch_idx": [-1, 0]}, "cache_batch_idx holds -1"),
        ({"block_table": [[0], [1]], "cache_seqlens": [0, 6]}, "cache_seqlens holds 6; a row of the cache has 6 slots"),
        ({"block_table": [[0], [2]]}, "block_table holds 2 for slots 0 to 3 of row 1; the cache has pages 0 to 1"),
        ({"block_table": [[-1], [0]]}, "block_table holds -1 for slots 0 to 3 of row 0"),
        ({"block_table": [[0, 1], [1, -1]], "cache_seqlens": [6, 6]}, "block_table holds -1 for slots 0 to 6 of row 1"),
        (
            {"rotary_cos": torch.ones(3, 2), "rotary_sin": torch.ones(3, 2)},
            "rotary_cos has 3 positions; slots up to 3 are rotated: give at least 4",
        ),
    ],
)
def test_places_that_the_cache_does_not_have_are_refused_where_the_host_can_read_them(changes, message):
    given = {"q": torch.randn(2, 1, 4, 8), "k_cache": torch.zeros(2, 6, 2, 8), "v_cache": torch.zeros(2, 6, 2, 8)}
    given |= {"k": torch.ones(2, 1, 2, 8), "v": torch.ones(2, 1, 2, 8), "cache_seqlens": 3}
    given |= {n: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for n, x in changes.items()}
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**given)
    assert not given["k_cache"].any()
    assert not given["v_cache"].any()


@pytest.mark.parametrize(("left", "pads"), [(2, None), (-1, (5, 8))])
def test_pages_that_no_query_sees_may_be_gone(left, pads):
    """A scheduler that frees pages behind a window, or of padding, writes -1 in their place."""
    q, k_cache, v_cache = torch.randn(2, 2, 4, 8), torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    more = {"cache_seqlens": _ints(8, 11).cpu(), "window_size": (left, 0), "causal": True}
    more |= {} if pads is None else {"cache_leftpad": torch.tensor(pads, dtype=torch.int32)}
    tables = [torch.tensor([[a, 0, -1], [b, 3, 2]], dtype=torch.int32) for a, b in ((1, 1), (-1, -1))]
    wanted, found = (flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, **more) for table in tables)
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="block_table holds -1 for slots 0 to 7 of row 0"):
        flash_attn_with_kvcache(q, k_cache, v_cache, block_table=tables[1], cache_seqlens=more["cache_seqlens"])
