"""Example inputs of kv_cache_append."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, SMALL
from tilesmith.ops.attn.cases.draws import normal, row_lengths

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _pages(num_pages: int):
    """A page table that owns different pages in every entry; its very last entry is -1, no page."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        count = shape[0] * shape[1]
        table = torch.randperm(num_pages, generator=generator, device=generator.device)[:count].int()
        table[-1:] = -1
        return table.view(*shape).to(device)

    return init


def _factors(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Factors of which the smallest makes numbers too large for 8 bits."""
    return torch.logspace(-3, -1, shape[1], device=device).view(*shape)


def _angles(function):
    """cos or sin of the Llama angles, theta 10000, for the first shape[-2] positions."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        inverse = 10000.0 ** (-torch.arange(shape[-1], dtype=torch.float64, device=device) / max(1, shape[-1]))
        angle = torch.arange(shape[-2], dtype=torch.float64, device=device)[:, None] * inverse
        return function(angle).float().expand(shape).clone()

    return init


def _append(
    batch: int,
    tokens: int,
    kv_heads: int,
    dim: int,
    slots: int,
    *,
    dim_v: int | None = None,
    lengths: tuple[int, ...] = (3,),
    q_heads: int = 0,
    q_tokens: int | None = None,
    rotated: int = 0,
    positions: int | None = None,
    pages: int = 0,
    interleaved: bool = False,
    layout: str = "contiguous",
    angle_dtype: torch.dtype | None = None,
    small: torch.dtype | None = None,
    scales: int = 0,
) -> dict:
    """Arguments of one call. dim_v: head dim of values, where it is not `dim`. slots: a page's where `pages` (of a row)
    is given. positions None: angles by token. small: an 8-bit dtype of the cache. scales: how many factors of keys and
    of values there are."""
    num_pages = batch * pages + 1
    kind = {"grad": False, "layout": layout, "dtype": small, "init": "normal" if small is None else normal}
    dims = {"k": dim, "v": dim if dim_v is None else dim_v}
    caches = {f"{name}_cache": T(num_pages if pages else batch, kv_heads, slots, n, **kind) for name, n in dims.items()}
    new = {name: T(batch, kv_heads, tokens, n, grad=False, layout=layout) for name, n in dims.items()}
    q_tokens = tokens if q_tokens is None else q_tokens
    angles = (batch, max(tokens, q_tokens), rotated // 2) if positions is None else (positions, rotated // 2)
    args: dict = {**caches, **new}
    args["lengths"] = T(batch, dtype=torch.int32, grad=False, init=row_lengths(*lengths))
    args["q"] = T(batch, q_heads, q_tokens, dim, grad=False, layout=layout) if q_heads else None
    args["cos"] = T(*angles, dtype=angle_dtype, grad=False, init=_angles(torch.cos)) if rotated else None
    args["sin"] = T(*angles, dtype=angle_dtype, grad=False, init=_angles(torch.sin)) if rotated else None
    args["page_table"] = T(batch, pages, dtype=torch.int32, grad=False, init=_pages(num_pages)) if pages else None
    args["interleaved"] = interleaved
    for name in ("k_scale", "v_scale") if scales else ():
        args[name] = T(1, scales, 1, dtype=torch.float32, grad=False, init=_factors)
    return args


CASES: dict[str, list[Case]] = {
    "kv_cache_append": [
        Case("plain", _append(2, 3, 2, 16, 11), SMALL),
        Case("rotated", _append(2, 3, 2, 16, 11, q_heads=6, rotated=16, positions=11), SMALL),
        Case("rotated_per_token", _append(3, 2, 1, 24, 9, q_heads=2, rotated=24), SMALL),
        Case(
            "partial", _append(2, 3, 2, 40, 11, q_heads=4, rotated=12, positions=16, angle_dtype=torch.float32), SMALL
        ),
        Case("interleaved", _append(2, 3, 2, 16, 11, q_heads=6, rotated=16, positions=11, interleaved=True), SMALL),
        Case("interleaved_partial", _append(1, 4, 3, 22, 7, q_heads=3, rotated=14, interleaved=True), SMALL),
        Case("keys_only_rotated", _append(2, 1, 2, 8, 5, rotated=8, positions=5), SMALL),
        Case("more_queries", _append(2, 2, 2, 16, 11, q_heads=4, q_tokens=5, rotated=16, positions=11), SMALL),
        Case("fewer_queries", _append(2, 4, 2, 16, 11, q_heads=4, q_tokens=1, rotated=12), SMALL),
        Case("queries_alone", _append(2, 0, 2, 16, 11, q_heads=4, q_tokens=3, rotated=16, positions=11), SMALL),
        Case("paged", _append(2, 5, 2, 16, 4, lengths=(2, 5), q_heads=4, rotated=16, positions=12, pages=3), SMALL),
        Case("page_of_one", _append(2, 3, 1, 8, 1, lengths=(0, 2), pages=6), SMALL),
        Case("dropped", _append(4, 4, 2, 8, 6, lengths=(-2, 0, 5, 9)), SMALL),
        Case("dropped_paged", _append(3, 4, 2, 8, 3, lengths=(-1, 4, 8), pages=2), SMALL),
        Case("e4m3", _append(2, 3, 2, 16, 11, q_heads=6, rotated=12, positions=11, small=E4M3, scales=2), SMALL),
        Case("e4m3_pages", _append(2, 5, 2, 16, 4, lengths=(2, 5), pages=3, small=E4M3, scales=1), SMALL),
        Case("e5m2", _append(2, 3, 2, 8, 9, rotated=8, interleaved=True, small=E5M2, scales=2), SMALL),
        Case("scaled", _append(2, 3, 2, 16, 11, rotated=16, positions=11, scales=2), SMALL),
        Case("no_angle", _append(2, 3, 1, 8, 9, lengths=(2, 7), q_heads=2, rotated=8, positions=4), SMALL),
        Case("strided", _append(2, 3, 2, 24, 11, q_heads=4, rotated=24, positions=11, layout="strided"), SMALL),
        Case("transposed", _append(2, 3, 2, 24, 11, q_heads=4, rotated=24, positions=11, layout="transposed"), SMALL),
        Case(
            "values_128",
            _append(2, 3, 2, 192, 11, dim_v=128, q_heads=4, q_tokens=5, rotated=64, positions=11, interleaved=True),
            SMALL,
        ),
        Case(
            "values_128_paged",
            _append(2, 5, 2, 192, 4, dim_v=128, lengths=(2, 5), q_heads=4, rotated=64, positions=12, pages=3),
            SMALL,
        ),
        Case(
            "values_wider",
            _append(2, 3, 3, 7, 11, dim_v=37, q_heads=3, q_tokens=1, rotated=6, layout="transposed"),
            SMALL,
        ),
        Case("values_narrower", _append(3, 4, 2, 37, 6, dim_v=5, lengths=(-2, 0, 5), layout="strided"), SMALL),
        Case("values_128_e4m3", _append(2, 3, 2, 192, 11, dim_v=128, small=E4M3, scales=2), SMALL),
        Case("keys_alone", _append(2, 3, 1, 24, 11, dim_v=0, q_heads=2, rotated=24, positions=11), SMALL),
        Case("values_alone", _append(2, 3, 2, 0, 11, dim_v=16), SMALL),
        Case("one_feature", _append(2, 2, 1, 1, 5), SMALL),
        Case("no_tokens", _append(2, 0, 2, 8, 5, q_heads=2, rotated=8), SMALL),
        Case("no_rows", _append(0, 2, 2, 8, 5, q_heads=2, rotated=8), SMALL),
        Case("no_slots", _append(2, 2, 2, 8, 0, lengths=(0,)), SMALL),
        Case("far", _append(2, 3, 8, 128, 1_100_000, lengths=(1_099_998,)), frozenset({"gpu"}), (torch.bfloat16,)),
        Case("decode", _append(32, 1, 8, 128, 8192, lengths=(4000,), q_heads=64, rotated=128, positions=8192), BENCH),
        Case("speculate", _append(8, 8, 8, 128, 8192, lengths=(4000,), q_heads=64, rotated=128, positions=8192), BENCH),
        Case("prefill", _append(2, 8192, 8, 128, 8192, lengths=(0,), q_heads=32, rotated=128, positions=8192), BENCH),
        Case("prefill_paged", _append(2, 8192, 8, 128, 16, lengths=(0,), q_heads=32, rotated=128, pages=513), BENCH),
    ]
}


def _bytes(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, q: Tensor | None = None, cos: Tensor | None = None,
    **_: object,
) -> int:  # fmt: skip
    """Keys and values read and written, queries read and written, one angle row a token read twice (cos and sin)."""
    moved = sum(x.numel() * (x.element_size() + cache.element_size()) for x, cache in ((k, k_cache), (v, v_cache)))
    if q is not None:
        moved += 2 * q.numel() * q.element_size()
    if cos is not None:
        moved += 2 * k.shape[0] * k.shape[2] * cos.shape[-1] * cos.element_size()
    return moved


bytes_moved = {"kv_cache_append": _bytes}
