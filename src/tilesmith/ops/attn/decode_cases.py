"""Decode-shaped example inputs of attention: few query tokens, a long cache, lengths on the device, pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T

SMALL = frozenset({"test", "interpret"})
GPU = frozenset({"gpu"})
BENCH = frozenset({"gpu", "bench", "tune"})


def _lengths(*values: int):
    """Numbers of valid keys of the rows, repeated from `values`."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(values * -(-shape[0] // len(values)), dtype=torch.int32, device=device)[: shape[0]]

    return init


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
    **options,
) -> dict:
    """Arguments of one call. keys: of a row; with a page size, a multiple of it. num_pages: by default one to spare."""
    pages = keys // page_size if page_size else 0
    rows, slots = (num_pages or batch * pages + 1, page_size) if page_size else (batch, keys)
    args = {
        "q": T(batch, heads, tokens, dim, grad=False, layout=layout),
        "k": T(rows, kv_heads, slots, dim, grad=False, layout=layout),
        "v": T(rows, kv_heads, slots, dim_v or dim, grad=False, layout=layout),
    }
    if sinks:
        args["sinks"] = T(heads, dtype=torch.float32, grad=False)
    if lengths is not None:
        args["kv_lengths"] = T(batch, dtype=torch.int32, grad=False, init=_lengths(*lengths))
    if page_size:
        args["page_table"] = T(batch, pages, dtype=torch.int32, grad=False, init=_pages(rows))
    return {**args, "causal": True, **options}


UNWRITTEN_SLOTS = dict.fromkeys(
    ("k", "v"), T(2, 2, 40, 16, grad=False, init=_nan(slice(None), slice(None), slice(19, None)))
)
UNWRITTEN_PAGES = {
    **dict.fromkeys(("k", "v"), T(21, 2, 4, 16, grad=False, init=_nan(0))),
    "page_table": T(2, 10, dtype=torch.int32, grad=False, init=_pages(21, used=5)),
}

CASES: list[Case] = [
    Case("decode_one_token", _decode(2, 1, 8, 2, 64, 70), SMALL),
    Case("decode_lengths", _decode(5, 1, 4, 2, 32, 70, lengths=(0, 1, 33, 64, 70)), SMALL),
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
    Case("decode_all_pages", _decode(2, 2, 4, 2, 16, 40, page_size=8), SMALL),
    Case("prompt_in_pages", _decode(1, 20, 4, 2, 16, 40, lengths=(37,), page_size=8), SMALL),
    Case("decode_unwritten_slots", {**_decode(2, 2, 4, 2, 16, 40, lengths=(19, 7)), **UNWRITTEN_SLOTS}, SMALL),
    Case(
        "decode_unwritten_pages",
        {**_decode(2, 2, 4, 2, 16, 40, lengths=(20, 9), page_size=4), **UNWRITTEN_PAGES},
        SMALL,
    ),
    Case("decode_no_keys", _decode(2, 2, 4, 2, 16, 0), SMALL),
    Case("decode_no_rows", _decode(0, 1, 4, 2, 16, 20), SMALL),
    Case("decode_wide_head", _decode(2, 3, 8, 2, 256, 500, lengths=(500, 321)), frozenset({"test"})),
    Case("decode_far", _decode(1, 1, 1, 1, 8, 16_800_000, dim_v=128), GPU, (torch.bfloat16,)),
    Case("decode_far_pages", _decode(2, 2, 8, 8, 128, 640, page_size=16, num_pages=140_000), GPU, (torch.bfloat16,)),
    Case("decode_1_b1_8k", _decode(1, 1, 64, 8, 128, 8192), BENCH),
    Case("decode_1_b1_128k", _decode(1, 1, 64, 8, 128, 131_072), BENCH),
    Case("decode_1_b32_8k", _decode(32, 1, 64, 8, 128, 8192), BENCH),
    Case("decode_8_b1_8k", _decode(1, 8, 64, 8, 128, 8192), BENCH),
    Case("decode_8_b1_128k", _decode(1, 8, 64, 8, 128, 131_072), BENCH),
    Case("decode_8_b32_8k", _decode(32, 8, 64, 8, 128, 8192), BENCH),
    Case("decode_16_b8_8k", _decode(8, 16, 64, 8, 128, 8192, lengths=(8192, 6000)), BENCH),
    Case("decode_1_pages_b32_8k", _decode(32, 1, 64, 8, 128, 8192, lengths=(8192,), page_size=16), BENCH),
    Case("decode_8_pages_b32_8k", _decode(32, 8, 64, 8, 128, 8192, lengths=(8192,), page_size=16), BENCH),
    Case("decode_1_d256_b8_8k", _decode(8, 1, 32, 4, 256, 8192), BENCH),
    Case("decode_1_d64_b8_8k", _decode(8, 1, 64, 8, 64, 8192), BENCH),
]
