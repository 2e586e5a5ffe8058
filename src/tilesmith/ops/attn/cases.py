"""Example inputs of attention and merge_attention, and what a call must compute and move."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.ops.attn import decode_cases

SMALL = frozenset({"test", "interpret"})
TEST = frozenset({"test"})
GPU = frozenset({"gpu"})
BENCH = frozenset({"gpu", "bench", "tune"})


def _token_major(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """[B, H, T, D] seen in [B, T, H, D] memory, as projections leave it."""
    batch, heads, tokens, dim = shape
    drawn = torch.randn(batch, tokens, heads, dim, generator=generator, device=generator.device)
    return drawn.to(device).transpose(1, 2)


def _values(*numbers: int, dtype: torch.dtype = torch.int32):
    """These integers, in this order, in the tensor's shape."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device).view(*shape)

    return init


def _coin(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """True for about two of three."""
    return (torch.rand(*shape, generator=generator, device=generator.device) < 0.66).to(device)


def _hides_a_row(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A mask under which the second query sees nothing."""
    mask = _coin(generator, shape, device)
    mask[..., 1, :] = False
    return mask


def _slopes(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.pow(2.0, -torch.arange(1, shape[-1] + 1, device=device).float()).expand(*shape).contiguous()


def _nan_behind(row: int):
    """Normal numbers, NaN in the tokens from `row` on: padding that no query may read."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device=generator.device)
        drawn[:, :, row:] = float("nan")
        return drawn.to(device)

    return init


def _shape(batch, heads, kv_heads, tokens, keys, dim, dim_v=None, init=_token_major):
    return {
        "q": T(batch, heads, tokens, dim, init=init),
        "k": T(batch, kv_heads, keys, dim, init=init),
        "v": T(batch, kv_heads, keys, dim_v or dim, init=init),
    }


def _case(name: str, *sizes: int, tags: frozenset[str] = SMALL, dim_v: int | None = None, init=_token_major, **more) -> Case:
    return Case(name, {**_shape(*sizes, dim_v=dim_v, init=init), **more}, tags)


def _bools(*shape: int, init=_coin) -> T:
    return T(*shape, dtype=torch.bool, grad=False, init=init)


def _ints(*numbers: int, shape: tuple[int, ...] | None = None) -> T:
    return T(*(shape or (len(numbers),)), dtype=torch.int32, grad=False, init=_values(*numbers))


_SEED = T(2, dtype=torch.int64, grad=False, init=_values(1234, 5, dtype=torch.int64))

ATTENTION = [
    _case("full", 2, 4, 2, 17, 19, 16),
    _case("causal", 2, 4, 2, 33, 33, 16, causal=True),
    _case("causal_longer_keys", 1, 2, 1, 7, 40, 24, causal=True),
    _case("causal_shorter_keys", 1, 2, 2, 21, 9, 16, causal=True),
    _case("head_major", 1, 2, 1, 18, 18, 32, init="normal", causal=True),
    _case("one_query", 2, 4, 1, 1, 37, 16),
    _case("one_key", 1, 2, 2, 5, 1, 16),
    _case("values_narrower", 1, 2, 1, 20, 20, 40, dim_v=16, causal=True),
    _case("values_wider", 1, 2, 1, 20, 20, 16, dim_v=48),
    _case("dim_80", 1, 2, 2, 19, 19, 80, causal=True),
    _case("scale", 1, 2, 2, 16, 16, 16, scale=0.05),
    _case("window", 1, 2, 1, 40, 40, 16, causal=True, window_left=7),
    _case("window_both", 1, 2, 1, 40, 33, 16, window_left=5, window_right=3),
    _case("softcap", 1, 2, 1, 21, 21, 16, causal=True, softcap=2.0),
    _case("bias", 2, 2, 1, 13, 18, 16, bias=T(2, 2, 13, 18)),
    _case("bias_broadcast", 2, 4, 2, 13, 18, 16, bias=T(1, 4, 1, 18), causal=True),
    _case("bias_one_head", 2, 2, 2, 13, 13, 16, bias=T(2, 1, 13, 13)),
    _case("mask", 2, 4, 2, 17, 20, 16, mask=_bools(2, 1, 17, 20)),
    _case("mask_heads_causal", 1, 4, 2, 17, 17, 16, mask=_bools(1, 4, 17, 17), causal=True),
    _case("masked_row", 2, 2, 1, 9, 12, 16, mask=_bools(2, 1, 9, 12, init=_hides_a_row)),
    _case("alibi", 1, 4, 2, 22, 22, 16, alibi=T(4, grad=False, dtype=torch.float32, init=_slopes), causal=True),
    _case("alibi_per_row", 2, 2, 2, 15, 15, 16, alibi=T(2, 2, grad=False, dtype=torch.float32, init=_slopes)),
    _case("sinks", 1, 4, 2, 19, 19, 16, sinks=T(4, dtype=torch.float32), causal=True),
    _case("sinks_masked_row", 2, 2, 1, 9, 12, 16, sinks=T(2, dtype=torch.float32), mask=_bools(2, 1, 9, 12, init=_hides_a_row)),
    _case("prefix", 2, 2, 1, 24, 24, 16, prefix_lengths=_ints(5, 17), causal=True),
    _case("prefix_window", 2, 2, 1, 40, 40, 16, prefix_lengths=_ints(3, 30), causal=True, window_left=6),
    _case(
        "documents", 2, 2, 1, 12, 12, 16, causal=True,
        q_documents=_ints(*[0] * 5 + [1] * 7, *[0] * 2 + [1] * 3 + [2] * 7, shape=(2, 12)),
        k_documents=_ints(*[0] * 5 + [1] * 7, *[0] * 2 + [1] * 3 + [2] * 7, shape=(2, 12)),
    ),
    _case("lengths", 2, 4, 2, 6, 30, 16, kv_lengths=_ints(11, 30), causal=True),
    _case("lengths_empty", 3, 2, 1, 4, 16, 16, kv_lengths=_ints(0, 16, 3)),
    Case(
        "padding_holds_nan",
        {
            "q": T(2, 2, 5, 16), "k": T(2, 2, 24, 16, init=_nan_behind(13)), "v": T(2, 2, 24, 16, init=_nan_behind(13)),
            "kv_lengths": _ints(9, 13), "causal": True,
        },
        SMALL,
    ),
    _case(
        "packed", 1, 4, 2, 30, 30, 16, causal=True, cu_seqlens_q=_ints(0, 7, 7, 18, 30), cu_seqlens_k=_ints(0, 7, 7, 18, 30),
        max_seqlen_q=12, max_seqlen_k=12,
    ),
    _case(
        "packed_longer_keys", 1, 2, 1, 13, 40, 16, causal=True, cu_seqlens_q=_ints(0, 5, 13), cu_seqlens_k=_ints(0, 17, 40),
        max_seqlen_q=8, max_seqlen_k=23,
    ),
    _case("dropout", 1, 2, 1, 18, 20, 16, dropout_p=0.3, seed=_SEED),
    _case("dropout_causal", 2, 2, 2, 17, 17, 16, dropout_p=0.1, seed=_SEED, causal=True),
    _case("deterministic", 1, 4, 2, 20, 20, 16, causal=True, deterministic=True),
    _case("no_keys", 1, 2, 1, 4, 0, 16),
    _case("no_queries", 1, 2, 1, 0, 4, 16),
    _case("no_batch", 0, 2, 1, 4, 4, 16),
    _case("several_blocks", 2, 4, 2, 300, 333, 64, tags=TEST, causal=True),
    _case("several_blocks_128", 1, 4, 1, 257, 257, 128, tags=TEST, causal=True),
    _case("dim_256", 1, 2, 1, 150, 150, 256, tags=TEST, causal=True),
    _case("dim_200", 1, 2, 1, 70, 90, 200, tags=TEST),
    _case("window_blocks", 1, 2, 1, 700, 700, 64, tags=TEST, causal=True, window_left=100),
    _case("bench_1k_full", 16, 16, 16, 1024, 1024, 128, tags=BENCH),
    _case("bench_1k_causal", 16, 16, 16, 1024, 1024, 128, tags=BENCH, causal=True),
    _case("bench_4k_full", 4, 16, 16, 4096, 4096, 128, tags=BENCH),
    _case("bench_4k_causal", 4, 16, 16, 4096, 4096, 128, tags=BENCH, causal=True),
    _case("bench_16k_full", 1, 16, 16, 16384, 16384, 128, tags=BENCH - GPU),
    _case("bench_16k_causal", 1, 16, 16, 16384, 16384, 128, tags=BENCH - GPU, causal=True),
    _case("bench_4k_d64_full", 4, 32, 32, 4096, 4096, 64, tags=BENCH - GPU),
    _case("bench_4k_d64_causal", 4, 32, 32, 4096, 4096, 64, tags=BENCH - GPU, causal=True),
    _case("bench_4k_d256_causal", 4, 8, 8, 4096, 4096, 256, tags=BENCH - GPU, causal=True),
]  # fmt: skip


def _statistics(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Log-sum-exps, one of them of a row that saw nothing."""
    lse = torch.randn(*shape, generator=generator, device=generator.device)
    lse.view(-1)[:1] = float("-inf")
    return lse.to(device)


def _both_empty(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    lse = torch.randn(*shape, generator=generator, device=generator.device)
    lse.view(-1)[::3] = float("-inf")
    return lse.to(device)


def _merge(name: str, *shape: int, tags: frozenset[str] = SMALL, lse=_statistics, out=_token_major) -> Case:
    parts = {f"out_{s}": T(*shape, init=out) for s in "ab"} | {
        f"lse_{s}": T(*shape[:3], dtype=torch.float32, init=lse) for s in "ab"
    }
    return Case(name, {n: parts[n] for n in ("out_a", "lse_a", "out_b", "lse_b")}, tags)


CASES = {
    "attention": [*ATTENTION, *decode_cases.CASES],
    "merge_attention": [
        _merge("plain", 2, 3, 7, 16),
        _merge("both_saw_nothing", 1, 2, 9, 24, lse=_both_empty),
        _merge("head_major", 1, 2, 5, 8, out="normal"),
        _merge("empty", 1, 2, 0, 16),
        _merge("16k", 1, 16, 16384, 128, tags=BENCH),
    ],
}


def _attention_flops(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_left: int = -1, page_table: Tensor | None = None
) -> int:
    """Two products over the visible pairs; dense masks, documents and lengths are not looked at."""
    batch, heads, tokens, dim = q.shape
    keys = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
    pairs = tokens * keys
    if causal:
        pairs -= min(tokens, keys) * (min(tokens, keys) - 1) // 2
    if window_left >= 0:
        pairs = min(pairs, tokens * (window_left + 1))
    return 2 * batch * heads * pairs * (dim + v.shape[3])


def _attention_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    return 2 * q.nbytes + k.nbytes + v.nbytes + 4 * q[..., 0].numel()


flops = {
    "attention": _attention_flops,
    "attention_vjp": lambda **args: int(2.5 * _attention_flops(**{n: args[n] for n in _PAIRS if n in args})),
}
_PAIRS = ("q", "k", "v", "causal", "window_left", "page_table")
bytes_moved = {
    "attention": _attention_bytes,
    "attention_vjp": lambda q, k, v: 2 * _attention_bytes(q, k, v) + q.nbytes,
    "merge_attention": lambda out_a, lse_a: 3 * (out_a.nbytes + lse_a.nbytes),
    "merge_attention_vjp": lambda out_a, lse_a: 5 * out_a.nbytes + 6 * lse_a.nbytes,
}
