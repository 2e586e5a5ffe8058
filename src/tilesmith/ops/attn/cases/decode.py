"""Decode-shaped example inputs of attention: few query tokens, a long cache, lengths on the device, pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, HALF, SMALL, UNCHECKED
from tilesmith.ops.attn.cases.draws import normal, row_lengths


def _pages(num_pages: int, used: int | None = None):
    """A page table in which no two entries share a page and none is page 0; -1 behind the first `used` of a row."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        order = torch.randperm(num_pages - 1, generator=generator, device=generator.device) + 1
        table = order[: shape[0] * shape[1]].int().view(*shape)
        if used is not None:
            table[:, used:] = -1
        return table.to(device)

    return init


def _nan(*index):
    """Normal numbers, but NaN at an index: memory that nobody wrote."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        x = torch.randn(tuple(shape), generator=generator, device=generator.device)
        x[index] = float("nan")
        return x.to(device)

    return init


def _rounded(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return (20 * normal(generator, shape, device)).clamp(-127, 127).to(torch.int8)


def _factors(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Factors of quantised values: positive, not all alike."""
    return (0.5 + torch.rand(tuple(shape), generator=generator, device=generator.device)).to(device)


def _padded(*starts: int):
    """Document ids of keys: -1 before each row's start, 0 from there on."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        first = torch.tensor(starts * -(-shape[0] // len(starts)), device=device)[: shape[0], None]
        return torch.where(torch.arange(shape[1], device=device) < first, -1, 0).int()

    return init


def _nothing(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.int32, device=device)


def _tree(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A bool mask [.., T, S] of drafted tokens: all old keys, and of the T new ones each token's own ancestors."""
    tokens, keys = shape[-2:]
    seen = torch.ones(tuple(shape), dtype=torch.bool, device=device)
    token = torch.arange(tokens, device=device)
    seen[..., keys - tokens :] = (token[:, None] - token) % 2 == 0
    return seen


def _decode(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    keys: int,
    *,
    lengths: tuple[int, ...] | None = None,
    page_size: int = 0,
    num_pages: int = 0,
    dim_v: int | None = None,
    sinks: bool = False,
    layout: str = "contiguous",
    small: torch.dtype | None = None,
    scales: tuple[int, ...] = (),
    starts: tuple[int, ...] = (),
    mask: tuple[int, ...] = (),
    latent: bool = False,
    **options,
) -> dict:
    """Arguments of one call. keys: of a row; with a page size, a multiple of it. num_pages: by default one to spare.
    small: an 8-bit dtype of the cache, scales: the shape of its factors. starts: of the rows, left of which is padding.
    mask: the shape of a bool mask. latent: values are the first columns of the keys, in memory."""
    pages = keys // page_size if page_size else 0
    rows, slots = (num_pages or batch * pages + 1, page_size) if page_size else (batch, keys)
    kind = {"grad": False, "layout": layout}
    cache = {**kind, "dtype": small}
    if small is not None:
        cache["init"] = _rounded if small is torch.int8 else normal
    args = {
        "q": T(batch, heads, tokens, dim, **kind),
        "k": T(rows, kv_heads, slots, dim, **cache),
        "v": T(rows, kv_heads, slots, dim_v or dim, **cache, columns_of="k" if latent else None),
    }
    for name in ("k_scale", "v_scale") if scales else ():
        args[name] = T(*scales, dtype=torch.float32, grad=False, init=_factors)
    if starts:
        args["q_documents"] = T(batch, tokens, dtype=torch.int32, init=_nothing)
        args["k_documents"] = T(batch, keys, dtype=torch.int32, init=_padded(*starts))
    if mask:
        args["mask"] = T(*mask, dtype=torch.bool, init=_tree)
    if sinks:
        args["sinks"] = T(heads, dtype=torch.float32, grad=False)
    if lengths is not None:
        args["kv_lengths"] = T(batch, dtype=torch.int32, grad=False, init=row_lengths(*lengths))
    if page_size:
        args["page_table"] = T(batch, pages, dtype=torch.int32, grad=False, init=_pages(rows))
    return {**args, "causal": True, **options}


UNWRITTEN_SLOTS = dict.fromkeys(
    ("k", "v"), T(2, 2, 40, 16, grad=False, init=_nan(slice(None), slice(None), slice(19, None)))
)
LEFT_PADDING = dict.fromkeys(
    ("k", "v"), T(2, 2, 40, 16, grad=False, init=_nan(slice(None), slice(None), slice(None, 7)))
)
LATENT = {"dim_v": 512, "latent": True}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNWRITTEN_PAGES = {
    **dict.fromkeys(("k", "v"), T(21, 2, 4, 16, grad=False, init=_nan(0))),
    "page_table": T(2, 10, dtype=torch.int32, grad=False, init=_pages(21, used=5)),
}

CASES: list[Case] = [
    Case("decode_one_token", _decode(2, 1, 8, 2, 64, 70), SMALL),
    Case("decode_lengths", _decode(5, 1, 4, 2, 32, 70, lengths=(0, 1, 33, 64, 70)), SMALL),
    Case("decode_lengths_beyond", _decode(3, 4, 4, 2, 16, 40, lengths=(47, -3, 40), window_left=9), SMALL),
    Case("decode_tokens", _decode(4, 5, 6, 2, 24, 70, lengths=(70, 3, 5, 41)), SMALL),
    Case("decode_nine_tokens", _decode(2, 9, 4, 4, 16, 45, lengths=(45, 17)), SMALL),
    Case("decode_one_kv_head", _decode(1, 2, 48, 1, 16, 50, lengths=(49,)), SMALL),
    Case("decode_window", _decode(3, 4, 4, 2, 16, 90, lengths=(90, 47, 2), window_left=20), SMALL),
    Case("decode_window_of_one", _decode(2, 3, 2, 1, 16, 40, window_left=0), SMALL),
    Case(
        "decode_two_sided_window",
        _decode(2, 5, 2, 1, 16, 70, lengths=(61, 8), causal=False, window_left=30, window_right=2),
        SMALL,
    ),
    Case("decode_full", _decode(2, 6, 4, 2, 16, 40, lengths=(33, 40), causal=False), SMALL),
    Case("decode_softcap", _decode(2, 3, 4, 2, 32, 50, lengths=(50, 12), softcap=5.0), SMALL),
    Case("decode_sinks", _decode(3, 2, 4, 2, 32, 50, lengths=(50, 12, 0), sinks=True), SMALL),
    Case(
        "decode_everything",
        _decode(2, 3, 4, 2, 32, 80, lengths=(75, 9), sinks=True, softcap=9.0, window_left=33),
        SMALL,
    ),
    Case("decode_scale", _decode(1, 2, 2, 1, 16, 30, scale=0.4), SMALL),
    Case("decode_narrow_head", _decode(2, 2, 4, 2, 8, 30), SMALL),
    Case("decode_odd_head", _decode(2, 2, 4, 2, 72, 30), SMALL),
    Case("decode_two_head_dims", _decode(2, 2, 4, 2, 24, 40, dim_v=40), SMALL),
    Case("decode_strided", _decode(2, 3, 4, 2, 24, 40, lengths=(40, 11), layout="strided"), SMALL),
    Case("decode_pages", _decode(3, 1, 4, 2, 32, 64, lengths=(64, 17, 0), page_size=16), SMALL),
    Case("decode_odd_pages", _decode(2, 4, 4, 2, 16, 51, lengths=(50, 20), page_size=3, window_left=25), SMALL),
    Case("decode_pages_of_one", _decode(2, 2, 2, 1, 16, 20, lengths=(20, 7), page_size=1), SMALL),
    Case("decode_window_in_pages", _decode(2, 3, 4, 2, 16, 96, lengths=(95, 41), page_size=32, window_left=20), SMALL),
    Case("decode_all_pages", _decode(2, 2, 4, 2, 16, 40, page_size=8), SMALL),
    Case("prompt_in_pages", _decode(1, 20, 4, 2, 16, 40, lengths=(37,), page_size=8), SMALL),
    Case("decode_unwritten_slots", {**_decode(2, 2, 4, 2, 16, 40, lengths=(19, 7)), **UNWRITTEN_SLOTS}, SMALL),
    Case(
        "decode_unwritten_pages",
        {**_decode(2, 2, 4, 2, 16, 40, lengths=(20, 9), page_size=4), **UNWRITTEN_PAGES},
        SMALL,
    ),
    Case("decode_e4m3", _decode(2, 1, 8, 2, 32, 50, lengths=(50, 12), small=E4M3, scales=(1, 2, 1)), SMALL),
    Case("decode_e5m2", _decode(2, 3, 4, 2, 48, 50, small=E5M2, scales=(1, 1, 1), softcap=5.0), SMALL),
    Case("decode_e4m3_rows", _decode(2, 3, 4, 2, 32, 50, lengths=(50, 12), small=E4M3, scales=(2, 2, 1)), SMALL),
    Case("decode_int8_slots", _decode(2, 2, 4, 2, 32, 50, small=torch.int8, scales=(2, 1, 50), scale=0.01), SMALL),
    Case(
        "decode_e4m3_pages",
        _decode(2, 2, 4, 2, 16, 40, lengths=(40, 9), page_size=4, small=E4M3, scales=(21, 2, 1)),
        SMALL,
    ),
    Case(
        "decode_e4m3_page_slots",
        _decode(2, 9, 4, 2, 16, 40, lengths=(40, 9), page_size=8, small=E4M3, scales=(11, 1, 8), sinks=True),
        SMALL,
    ),
    Case("decode_left_padding", _decode(3, 1, 4, 2, 32, 70, starts=(0, 9, 69)), SMALL),
    Case(
        "decode_left_padding_in_room", _decode(2, 3, 4, 2, 16, 40, lengths=(30, 21), starts=(3, 20), sinks=True), SMALL
    ),
    Case("decode_left_padding_window", _decode(2, 3, 4, 2, 16, 60, starts=(3, 45), window_left=20), SMALL),
    Case("decode_over_nan", {**_decode(2, 2, 4, 2, 16, 40, starts=(7, 11)), **LEFT_PADDING}, SMALL),
    Case("decode_tree", _decode(2, 5, 4, 2, 16, 50, mask=(2, 1, 5, 50)), SMALL),
    Case("decode_mask_of_keys", _decode(2, 3, 4, 2, 16, 50, lengths=(50, 21), mask=(1, 4, 3, 50)), SMALL),
    Case("decode_64_tokens", _decode(1, 64, 4, 2, 16, 150, lengths=(130,)), SMALL),
    Case("decode_80_rows", _decode(2, 40, 2, 1, 64, 170, lengths=(170, 33)), SMALL),
    Case("decode_80_rows_of_1_head", _decode(1, 40, 2, 1, 64, 1500, lengths=(1400,)), frozenset({"test", "compile"})),
    Case("decode_80_rows_in_pages", _decode(2, 40, 2, 1, 64, 176, lengths=(171, 33), page_size=16), SMALL),
    Case("decode_160_rows", _decode(1, 40, 4, 1, 64, 170, window_left=60, sinks=True), SMALL),
    Case("decode_latent", _decode(2, 2, 20, 1, 24, 70, dim_v=16, latent=True, lengths=(70, 33)), SMALL),
    Case("decode_latent_beside", _decode(1, 1, 6, 1, 40, 70, dim_v=32), SMALL),
    Case(
        "decode_latent_pages",
        _decode(2, 1, 6, 1, 40, 64, dim_v=24, latent=True, lengths=(61, 9), page_size=16, layout="strided"),
        SMALL,
    ),
    Case("decode_latent_groups", _decode(2, 3, 8, 2, 48, 70, dim_v=32, latent=True, sinks=True, window_left=40), SMALL),
    Case("decode_latent_tree", _decode(1, 5, 4, 1, 24, 50, dim_v=16, latent=True, mask=(1, 1, 5, 50)), SMALL),
    Case(
        "decode_latent_e4m3",
        _decode(2, 1, 4, 1, 40, 50, dim_v=32, latent=True, small=E4M3, scales=(1, 1, 1), lengths=(50, 12)),
        SMALL,
    ),
    Case(
        "decode_576",
        _decode(2, 1, 32, 1, 576, 130, **LATENT, lengths=(130, 71)),
        frozenset({"test", "compile"}),
    ),
    Case("decode_576_beside", _decode(1, 1, 3, 1, 576, 40, dim_v=512), SMALL),
    Case("latent_prefill_small", _decode(1, 180, 3, 1, 576, 190, **LATENT), SMALL),
    Case(
        "latent_prefill_beside_small",
        _decode(2, 88, 6, 1, 544, 88, dim_v=512, lengths=(88, 41), window_left=30, sinks=True),
        SMALL,
    ),
    Case("decode_no_keys", _decode(2, 2, 4, 2, 16, 0), SMALL),
    Case("decode_no_rows", _decode(0, 1, 4, 2, 16, 20), SMALL),
    Case("decode_no_rows_of_pages", _decode(0, 1, 4, 2, 16, 20, page_size=4), SMALL),
    Case("decode_wide_head", _decode(2, 3, 8, 2, 256, 500, lengths=(500, 321)), frozenset({"test"})),
    Case(
        "decode_1_kv_head_small",
        _decode(1, 2, 6, 1, 64, 1100, sinks=True, window_left=1000),
        frozenset({"test", "compile"}),
    ),
    Case(
        "decode_lengths_of_64_columns",
        _decode(3, 2, 4, 2, 64, 300, lengths=(300, 5, 130), sinks=True),
        frozenset({"test", "compile"}),
    ),
    Case("decode_1_token_of_8", _decode(3, 1, 16, 2, 128, 3000, sinks=True), GPU, HALF),
    Case("decode_1_token_of_no_keys", _decode(1, 1, 16, 2, 64, 300, lengths=(0,)), GPU, HALF),
    Case("decode_1_token_of_2_heads", _decode(1, 1, 16, 2, 128, 9000, lengths=(8900,), sinks=True), GPU, HALF),
    Case("decode_1_token_of_all", _decode(1, 1, 8, 8, 128, 5000), GPU, HALF),
    Case("decode_1_token_of_20_heads", _decode(4, 1, 40, 5, 64, 700, layout="strided"), GPU, HALF),
    Case("decode_1_token_of_40_heads", _decode(10, 1, 16, 4, 128, 900), GPU, HALF),
    Case("decode_2_tokens_d256", _decode(1, 2, 12, 2, 256, 1100, softcap=20.0), GPU, HALF),
    Case("decode_5_tokens_of_3", _decode(2, 5, 9, 3, 96, 2000, dim_v=128, window_left=700, sinks=True), GPU, HALF),
    Case(
        "decode_4_tokens_both_sides",
        _decode(1, 4, 8, 4, 72, 3001, lengths=(2990,), causal=False, window_left=300, window_right=1),
        GPU,
        HALF,
    ),
    Case(
        "decode_2_tokens_over_nan",
        {
            **_decode(1, 2, 16, 2, 128, 600, lengths=(500,)),
            **dict.fromkeys(
                ("k", "v"), T(1, 2, 600, 128, grad=False, init=_nan(slice(None), slice(None), slice(500, None)))
            ),
        },
        GPU,
        HALF,
    ),
    Case(
        "decode_1_token_of_lengths",
        _decode(4, 1, 16, 2, 128, 1000, lengths=(1000, 0, 130, 1), sinks=True),
        GPU,
        HALF,
    ),
    Case("decode_2_tokens_of_lengths", _decode(3, 2, 16, 2, 64, 700, lengths=(700, 77, 1), window_left=100), GPU, HALF),
    Case(
        "decode_1_token_of_lengths_over_nan",
        {
            **_decode(2, 1, 16, 2, 128, 600, lengths=(500, 77)),
            **dict.fromkeys(
                ("k", "v"), T(2, 2, 600, 128, grad=False, init=_nan(slice(None), slice(None), slice(500, None)))
            ),
        },
        GPU,
        HALF,
    ),
    Case("decode_68_kv_heads", _decode(17, 1, 16, 4, 128, 1100), GPU, HALF),
    Case("decode_140_kv_heads", _decode(35, 2, 16, 4, 128, 700, sinks=True), GPU, HALF),
    Case("decode_140_kv_heads_of_64", _decode(28, 3, 25, 5, 64, 600, window_left=400, layout="strided"), GPU, HALF),
    Case("decode_96_kv_heads_of_256", _decode(24, 4, 16, 4, 256, 700, softcap=20.0), GPU, HALF),
    Case("decode_lengths_in_room", _decode(3, 1, 8, 2, 128, 9000, lengths=(9000, 1, 2999), sinks=True), GPU, HALF),
    Case(
        "decode_lengths_of_120_kv_heads",
        _decode(30, 2, 8, 4, 80, 5000, lengths=(4999, 0, 17, 2049, 3000), dim_v=96),
        GPU,
        HALF,
    ),
    Case("decode_16_tokens", _decode(2, 16, 16, 2, 128, 5000, lengths=(5000, 700)), GPU, HALF),
    Case(
        "decode_16_tokens_over_nan",
        {
            **_decode(2, 16, 16, 2, 128, 600, lengths=(500, 77)),
            **dict.fromkeys(
                ("k", "v"), T(2, 2, 600, 128, grad=False, init=_nan(slice(None), slice(None), slice(500, None)))
            ),
        },
        GPU,
        HALF,
    ),
    Case("decode_8_tokens", _decode(3, 8, 16, 2, 128, 3000, lengths=(3000, 5, 0), sinks=True), GPU, HALF),
    Case("decode_5_tokens_in_pages", _decode(2, 5, 16, 2, 128, 2048, lengths=(2000, 70), page_size=32), GPU, HALF),
    Case("decode_8_e4m3", _decode(3, 8, 16, 2, 128, 3000, small=E4M3, scales=(3, 2, 1), sinks=True), GPU, HALF),
    Case(
        "decode_16_e4m3", _decode(2, 16, 16, 2, 128, 1500, lengths=(1500, 3), small=E4M3, scales=(1, 2, 1)), GPU, HALF
    ),
    Case(
        "decode_11_e5m2",
        _decode(2, 11, 20, 2, 128, 999, small=E5M2, scales=(1, 1, 1), softcap=9.0, window_left=600),
        GPU,
        HALF,
    ),
    Case("decode_70_tokens_alone", _decode(3, 70, 4, 4, 64, 2000, softcap=20.0), GPU, HALF),
    Case("decode_27_tokens_of_three", _decode(2, 27, 6, 2, 96, 3000, lengths=(2999, 0), dim_v=128), GPU, HALF),
    Case("decode_9_tokens_d256", _decode(2, 9, 16, 2, 256, 3000, sinks=True), GPU, HALF),
    Case("decode_16_tokens_in_pages", _decode(2, 16, 16, 2, 128, 4096, lengths=(4000, 700), page_size=64), GPU, HALF),
    Case("decode_13_tokens_in_odd_pages", _decode(2, 13, 6, 1, 64, 4800, lengths=(0, 3000), page_size=48), GPU, HALF),
    Case("decode_9_tokens_in_large_pages", _decode(2, 9, 16, 2, 128, 2048, page_size=512, sinks=True), GPU, HALF),
    Case("decode_9_tokens_in_pages_d256", _decode(2, 9, 16, 2, 256, 3200, lengths=(3177, 5), page_size=32), GPU, HALF),
    Case("chunk_600_in_pages", _decode(1, 600, 4, 2, 128, 4096, lengths=(3900,), page_size=16), GPU, HALF),
    Case("chunk_256", _decode(1, 256, 8, 1, 128, 9000), GPU, HALF),
    Case("chunk_300_window", _decode(1, 300, 4, 2, 128, 4000, window_left=1000, sinks=True), GPU, HALF),
    Case("chunk_300_lengths", _decode(2, 300, 2, 2, 64, 4000, lengths=(4000, 140), layout="strided"), GPU, HALF),
    Case(
        "chunk_200_both_sides",
        _decode(1, 200, 8, 2, 64, 3000, causal=False, window_left=900, window_right=33),
        GPU,
        HALF,
    ),
    Case("decode_576_16_heads", _decode(3, 1, 16, 1, 576, 3000, **LATENT, lengths=(3000, 0, 130)), GPU, HALF),
    Case("decode_576_20_heads", _decode(1, 3, 20, 1, 576, 999, **LATENT, causal=False), GPU, HALF),
    Case("decode_576_32_heads", _decode(2, 1, 32, 1, 576, 5000, **LATENT, layout="strided"), GPU, HALF),
    Case("decode_576_64_heads", _decode(1, 4, 64, 1, 576, 2000, **LATENT, sinks=True), GPU, HALF),
    Case("decode_576_128_heads", _decode(2, 2, 128, 1, 576, 1700, **LATENT, lengths=(1700, 77)), GPU, HALF),
    Case("decode_576_two_kv_heads", _decode(2, 1, 64, 2, 576, 900, **LATENT, lengths=(900, 5)), GPU, HALF),
    Case("decode_576_beside_128_heads", _decode(1, 1, 128, 1, 576, 900, dim_v=512), GPU, HALF),
    Case("decode_544", _decode(1, 2, 48, 1, 544, 700, **LATENT, scale=0.06), GPU, HALF),
    Case("latent_prefill", _decode(1, 500, 16, 1, 576, 900, **LATENT), GPU, HALF),
    Case("latent_prefill_16_heads_beside", _decode(2, 300, 16, 1, 576, 300, dim_v=512, sinks=True), GPU, HALF),
    Case("decode_576_pages", _decode(2, 1, 128, 1, 576, 4096, **LATENT, lengths=(4000, 65), page_size=64), GPU, HALF),
    Case(
        "decode_576_16_heads_in_pages",
        _decode(3, 2, 16, 1, 576, 2048, **LATENT, lengths=(2000, 0, 1), page_size=128),
        GPU,
        HALF,
    ),
    Case(
        "decode_576_over_nan",
        {
            **_decode(2, 1, 64, 1, 576, 600, **LATENT, lengths=(500, 77)),
            "k": T(2, 1, 600, 576, grad=False, init=_nan(slice(None), slice(None), slice(500, None))),
        },
        GPU,
        HALF,
    ),
    Case("decode_d512", _decode(2, 1, 16, 2, 512, 3000, lengths=(3000, 70)), GPU, HALF),
    Case("decode_20_tokens_d512", _decode(1, 20, 8, 2, 512, 3000, window_left=900), GPU, HALF),
    Case("decode_far", _decode(1, 1, 1, 1, 8, 16_800_000, dim_v=128), GPU, (torch.bfloat16,)),
    Case("decode_far_pages", _decode(2, 2, 8, 8, 128, 640, page_size=16, num_pages=140_000), GPU, (torch.bfloat16,)),
    Case("decode_1_b1_8k", _decode(1, 1, 64, 8, 128, 8192), BENCH),
    Case("decode_1_b1_128k", _decode(1, 1, 64, 8, 128, 131_072), BENCH),
    Case("decode_1_b32_8k", _decode(32, 1, 64, 8, 128, 8192), BENCH),
    Case("decode_8_b1_8k", _decode(1, 8, 64, 8, 128, 8192), BENCH),
    Case("decode_8_b1_128k", _decode(1, 8, 64, 8, 128, 131_072), BENCH),
    Case("decode_8_b32_8k", _decode(32, 8, 64, 8, 128, 8192), BENCH),
    Case("decode_16_b1_8k", _decode(1, 16, 64, 8, 128, 8192), BENCH),
    Case("decode_16_b1_128k", _decode(1, 16, 64, 8, 128, 131_072), BENCH),
    Case("decode_16_b32_8k", _decode(32, 16, 64, 8, 128, 8192), BENCH),
    Case("decode_16_b8_lengths", _decode(8, 16, 64, 8, 128, 8192, lengths=(8192, 6000)), BENCH),
    Case("decode_1_pages_b32_8k", _decode(32, 1, 64, 8, 128, 8192, lengths=(8192,), page_size=16), BENCH),
    Case("decode_8_pages_b32_8k", _decode(32, 8, 64, 8, 128, 8192, lengths=(8192,), page_size=16), BENCH),
    Case("decode_16_pages_b8_8k", _decode(8, 16, 64, 8, 128, 8192, lengths=(8192,), page_size=16), BENCH),
    Case("decode_16_pages_of_64_b8_8k", _decode(8, 16, 64, 8, 128, 8192, lengths=(8192,), page_size=64), BENCH),
    Case("decode_1_e4m3_b32_8k", _decode(32, 1, 64, 8, 128, 8192, small=E4M3, scales=(1, 8, 1)), BENCH),
    Case("decode_8_e4m3_b32_8k", _decode(32, 8, 64, 8, 128, 8192, small=E4M3, scales=(1, 8, 1)), BENCH),
    Case("decode_1_left_padding_b32_8k", _decode(32, 1, 64, 8, 128, 8192, starts=(0, 1000, 37)), BENCH),
    Case("chunk_256_b1_128k", _decode(1, 256, 8, 1, 128, 131_072), BENCH, (torch.bfloat16,)),
    Case("chunk_256_64_heads_b1_128k", _decode(1, 256, 64, 8, 128, 131_072), UNCHECKED),
    Case("chunk_512_b1_32k", _decode(1, 512, 8, 1, 128, 32_768), BENCH, (torch.bfloat16,)),
    Case("chunk_2048_b1_8k", _decode(1, 2048, 8, 1, 128, 8192), BENCH, (torch.bfloat16,)),
    Case("decode_1_latent_16_heads_b64_4k", _decode(64, 1, 16, 1, 576, 4096, **LATENT), BENCH),
    Case("decode_1_latent_128_heads_b64_4k", _decode(64, 1, 128, 1, 576, 4096, **LATENT), BENCH),
    Case("decode_2_latent_128_heads_b8_32k", _decode(8, 2, 128, 1, 576, 32_768, **LATENT), BENCH),
    Case("decode_1_d256_b8_8k", _decode(8, 1, 32, 4, 256, 8192), BENCH),
    Case("decode_1_d64_b8_8k", _decode(8, 1, 64, 8, 64, 8192), BENCH),
]
