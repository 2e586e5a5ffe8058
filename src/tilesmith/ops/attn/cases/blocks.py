"""Cases of scores, shares, choices and lists of blocks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import FP32, GPU, SMALL, TEST, TIMED
from tilesmith.engine.inits import int32s
from tilesmith.engine.memory import held
from tilesmith.ops.attn.block_pattern_reference import PATTERNS, row_budget
from tilesmith.ops.attn.cases.draws import row_lse

HALF = (torch.bfloat16, torch.float16)


def _ascending(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """As many visible columns as a causal row has."""
    return torch.arange(1, shape[0] + 1, dtype=torch.int32, device=device)


def _some(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return 1 + torch.arange(shape[0], device=device, dtype=torch.int32) // 4


def _shares(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=generator, device=device).mul(2.0).softmax(-1)


def _no_shares(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Those of values with a NaN among them, and of none at all."""
    return torch.full(shape, float("nan"), device=device).index_fill_(2, torch.arange(4, device=device), 0.0)


def _tied(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Few different scores, zeros of both signs, NaN and infinities among them."""
    values = torch.tensor([0.0, -0.0, 1.0, 1.0, -2.0, float("nan"), float("inf"), float("-inf")], device=device)
    return values[torch.randint(0, 8, shape, generator=generator, device=device)]


def _kept(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.rand(shape, generator=generator, device=device) < 0.3


def _first_of_each(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """In every table row r keeps r % 5 columns, or all where there are fewer, from anywhere."""
    order = torch.rand(shape, generator=generator, device=device).argsort(-1)
    return order < (torch.arange(shape[2], device=device) % 5)[:, None]


def _fives(columns: int):
    return lambda generator, shape, device: (
        (torch.arange(shape[0], device=device) % 5).clamp(max=columns).to(torch.int32)
    )


def _counted(batch: int, lists: int, rows: int, columns: int, room: int) -> dict:
    keep = T(batch, lists, rows, columns, dtype=torch.bool, init=_first_of_each)
    return {"keep": keep, "room": room, "counts": T(rows, dtype=torch.int32, init=_fives(columns))}


def _pair(batch: int, heads: int, kv_heads: int, tokens: int, keys: int, dim: int, **options) -> dict:
    kind = {"layout": options.pop("layout", "contiguous"), "grad": options.pop("grad", True)}
    return {"q": T(batch, heads, tokens, dim, **kind), "k": T(batch, kv_heads, keys, dim, **kind), **options}


def _pair_alone(*sizes: int, **options) -> dict:
    return _pair(*sizes, grad=False, **options)


def _weigh(*sizes: int, lists: dict | None = None, **options) -> dict:
    pair = _pair_alone(*sizes, **options)
    lse = T(*sizes[:2], sizes[3], dtype=torch.float32, init=row_lse, grad=False)
    return {"q": pair.pop("q"), "k": pair.pop("k"), "lse": lse, **(lists or {}), **pair}


def _lists(heads: int, *rows: tuple[int, ...]) -> dict:
    """The same lists for a batch row's every head."""
    return _lists_of(*[rows] * heads)


def _lists_of(*heads: Sequence[tuple[int, ...]]) -> dict:
    """One list after another for each head."""
    rows = len(heads[0])
    ends = [0]
    for row in (row for head in heads for row in head):
        ends.append(ends[-1] + len(row))
    starts = [end for head in range(len(heads)) for end in ends[head * rows : (head + 1) * rows + 1]]
    indices = [column for head in heads for row in head for column in row]
    return {
        "offsets": T(1, len(heads), rows + 1, dtype=torch.int32, init=int32s(*starts)),
        "indices": T(len(indices), dtype=torch.int32, init=int32s(*indices)),
    }


def _scored(build, **more: int) -> list[Case]:
    small, large = {**more, "block_k": 16}, {**more, "block_k": 128}
    if "block_q" in more:
        large["block_q"] = 128
    return [
        Case("plain", build(1, 2, 2, 20, 40, 16, **small), SMALL),
        Case("causal_grouped", build(2, 4, 2, 41, 41, 24, causal=True, **small), SMALL),
        Case("causal_more_queries", build(1, 2, 2, 45, 20, 16, causal=True, **small), SMALL),
        Case("causal_more_keys", build(1, 2, 1, 20, 61, 16, causal=True, scale=0.3, **small), SMALL),
        Case("other_blocks", build(1, 1, 1, 30, 25, 8, **{**more, "block_k": 12}), TEST),
        Case("strided", build(2, 2, 1, 20, 37, 24, layout="strided", **small), SMALL),
        Case("one_key", build(1, 2, 2, 7, 1, 16, **small), SMALL),
        Case("no_keys", build(1, 2, 2, 7, 0, 16, **small), TEST),
        Case("no_queries", build(1, 2, 2, 0, 7, 16, **small), TEST),
        Case("wide_heads", build(1, 1, 1, 5, 9, 320, **small), TEST),
        Case("tiles", build(2, 4, 2, 300, 433, 128, causal=True, **large), GPU, HALF),
        Case("wide_tiles", build(1, 2, 1, 200, 260, 256, **large), GPU, HALF),
        Case("fp32_tiles", build(1, 4, 2, 260, 300, 128, causal=True, **large), GPU, FP32),
        Case("causal_ends", build(1, 2, 1, 70, 75, 16, causal=True, **small), SMALL),
        Case("means", build(1, 4, 1, 1100, 1100, 64, causal=True, **small), GPU, HALF),
        Case("means_64k", build(1, 4, 1, 8192, 8192, 64, causal=True, **small), TIMED, HALF),
        Case("index_64k", build(1, 4, 1, 65536, 65536, 64, causal=True, **large), TIMED, HALF),
    ]


def _largest_cases() -> list[Case]:
    by_blocks = [case for case in _scored(_pair, block_q=16) if not case.name.startswith("means")]
    by_queries = [replace(c, name=f"{c.name}_by_queries") for c in _scored(_pair) if c.tags <= SMALL | GPU]
    return [
        *by_blocks,
        *by_queries,
        Case("blocks_of_32", _pair(1, 4, 2, 75, 75, 16, causal=True, block_q=32, block_k=16), SMALL),
        Case("long_lists", _pair(1, 2, 1, 1030, 33, 16, block_q=16, block_k=16), SMALL),
        Case("transposed", _pair(1, 4, 2, 40, 61, 16, block_q=16, block_k=16, layout="transposed"), SMALL),
        Case("long_lists_tiles", _pair(1, 4, 1, 9000, 9000, 64, causal=True, block_q=128), GPU, HALF),
    ]


def _near_lists(heads: int, rows: int) -> dict:
    """Each row the first block, the one before it and its own, and in the last head only that one."""
    near = [tuple(sorted({0, max(row - 1, 0), row})) for row in range(rows)]
    return _lists_of(*([near] * (heads - 1)), [(row,) for row in range(rows)])


def _mass_cases() -> list[Case]:
    rows = ((0,), (0, 1), (), (1, 3))
    listed = {"lists": _lists(2, *rows), "block_q": 16, "block_k": 16, "causal": True}
    sampled = {"block_q": 16, "block_k": 16, "causal": True, "query_stride": 4}
    pooled = {"block_q": 8, "block_k": 8, "causal": True}
    return [
        *_scored(_weigh, block_q=16),
        Case("pooled", _weigh(1, 2, 1, 41, 41, 16, **pooled), SMALL),
        Case("listed", _weigh(1, 4, 2, 60, 60, 16, **listed), SMALL),
        Case("listed_for_all", _weigh(2, 2, 2, 60, 60, 16, **{**listed, "lists": _lists(1, *rows)}), SMALL),
        Case("every_fourth", _weigh(2, 4, 2, 61, 61, 16, **sampled), SMALL),
        Case("listed_sampled", _weigh(1, 8, 2, 60, 60, 16, **{**listed, "query_stride": 2}), SMALL),
        Case(
            "listed_few", _weigh(1, 3, 1, 60, 71, 16, **{**listed, "lists": _lists(1, *rows), "query_stride": 8}), SMALL
        ),
        Case(
            "listed_sampled_tiles",
            _weigh(1, 16, 2, 600, 600, 128, lists=_near_lists(2, 5), causal=True, query_stride=8),
            GPU,
            HALF,
        ),
        Case("sampled_tiles", _weigh(1, 8, 4, 700, 700, 64, causal=True, query_stride=8), GPU, HALF),
        Case("listed_tiles", _weigh(1, 8, 2, 600, 600, 128, lists=_near_lists(2, 5), causal=True), GPU, HALF),
        Case("listed_wide", _weigh(1, 4, 2, 600, 600, 256, lists=_near_lists(2, 5), causal=True), GPU, HALF),
        Case("listed_fp32", _weigh(1, 4, 2, 600, 700, 128, lists=_near_lists(2, 5)), GPU, FP32),
        Case("pooled_64k", _weigh(1, 16, 16, 4096, 4096, 128, **pooled), TIMED, HALF),
    ]


def _select(*shape: int, init=None, counts=_some, visible=_ascending, **options) -> dict:
    scores = T(*shape, grad=False, init=init) if init else T(*shape, grad=False)
    rows = shape[2]
    numbers = {name: T(rows, dtype=torch.int32, init=f) for name, f in (("counts", counts), ("visible", visible))}
    return {"scores": scores, **numbers, **options}


def _all_visible(rows: int, columns: int) -> dict:
    """Without causality: a row sees all columns, and its own one is the row's number."""
    ends = T(rows, dtype=torch.int32, init=_ascending)
    return {"visible": int32s(*[columns] * rows), "ends": ends}


def _shared_out() -> list[Case]:
    blocks = {"block": 16, "stretches": 8}
    sampled = {"query_stretches": 4, "query_stride": 2}
    return [
        Case("plain", _pair_alone(1, 2, 2, 40, 70, 16, **blocks), SMALL),
        Case("causal_grouped", _pair_alone(1, 4, 2, 75, 75, 24, causal=True, scale=0.4, **blocks), SMALL),
        Case("strided", _pair_alone(2, 2, 1, 33, 33, 16, causal=True, layout="strided", **blocks), SMALL),
        Case("one_mean_a_block", _pair_alone(1, 2, 2, 50, 50, 16, causal=True, block=8, stretches=1), SMALL),
        Case("other_blocks", _pair_alone(1, 1, 1, 50, 40, 8, block=12, stretches=3), TEST),
        Case("sampled", _pair_alone(1, 4, 2, 75, 75, 24, causal=True, **blocks, **sampled), SMALL),
        Case("sampled_keys", _pair_alone(1, 6, 2, 75, 75, 24, causal=True, **blocks, **sampled, key_stride=2), SMALL),
        Case("far_apart", _pair_alone(1, 2, 1, 300, 300, 16, causal=True, scale=9.0, **blocks), SMALL),
        Case(
            "few_queries",
            _pair_alone(2, 2, 2, 37, 60, 16, **{**blocks, "query_stretches": 2, "query_stride": 8}),
            SMALL,
        ),
        Case(
            "sampled_tiles",
            _pair_alone(1, 4, 2, 3000, 3000, 128, causal=True, query_stretches=2, query_stride=8, key_stride=4),
            GPU,
            HALF,
        ),
        Case(
            "sampled_32k",
            _pair_alone(1, 16, 16, 32768, 32768, 128, causal=True, query_stretches=2, query_stride=8, key_stride=4),
            TIMED,
            HALF,
        ),
        Case("no_keys", _pair_alone(1, 2, 2, 7, 0, 16, **blocks), TEST),
        Case("no_queries", _pair_alone(1, 2, 2, 0, 7, 16, **blocks), TEST),
        Case("wide_heads", _pair_alone(1, 1, 1, 5, 9, 320, **blocks), TEST),
        Case("tiles", _pair_alone(1, 4, 2, 3000, 3000, 128, causal=True), GPU, HALF),
        Case("wide_tiles", _pair_alone(1, 2, 1, 2000, 2600, 256), GPU, HALF),
        Case("fp32_tiles", _pair_alone(1, 4, 2, 1500, 1500, 128, causal=True), GPU, FP32),
        Case("heads_32k", _pair_alone(1, 16, 16, 32768, 32768, 128, causal=True), TIMED, HALF),
    ]


def _pattern(pattern: str, tokens: int, keys: int, sparsity: float, lists: int = 1, **options) -> dict:
    seed = T(1, dtype=torch.int64, init=lambda *_: torch.tensor([7 << 33 | 5]), grad=False)
    sizes = {"tokens": tokens, "keys": keys, "sparsity_ratio": sparsity, "lists": lists, "block": 16}
    return {"seed": seed, "pattern": pattern, **sizes, **options}


def _pattern_cases() -> list[Case]:
    found = []
    for pattern in PATTERNS:
        found += [
            Case(f"{pattern}_tenth", _pattern(pattern, 490, 490, 0.9), SMALL),
            Case(f"{pattern}_most", _pattern(pattern, 100, 100, 0.2, 2), TEST),
            Case(f"{pattern}_more_keys", _pattern(pattern, 100, 333, 0.7), TEST),
            Case(f"{pattern}_more_queries", _pattern(pattern, 333, 100, 0.7), SMALL),
            Case(f"{pattern}_not_causal", _pattern(pattern, 70, 150, 0.6, 2, causal=False), SMALL),
            Case(f"{pattern}_64k", _pattern(pattern, 65536, 65536, 0.9, 2, block=128), GPU),
        ]
    return [*found, Case("one_block", _pattern("random", 5, 7, 0.9), SMALL)]


CASES: dict[str, list[Case]] = {
    "block_scores": _scored(_pair, block_q=16),
    "block_max_scores": _largest_cases(),
    "block_mass": _mass_cases(),
    "block_select": [
        Case("best", _select(2, 2, 9, 9), SMALL),
        Case("forced", _select(1, 2, 12, 12, first=1, last=2), SMALL),
        Case("by_mass", _select(1, 2, 12, 12, init=_shares, visible=int32s(*[12] * 12), mass=0.6, last=1), SMALL, FP32),
        Case("forced_by_mass", _select(1, 2, 12, 12, init=_shares, mass=0.4, first=2, last=3), SMALL, FP32),
        Case("no_shares", _select(1, 1, 9, 9, init=_no_shares, mass=0.9, first=1, last=1), SMALL),
        Case("around_the_diagonal", _select(2, 1, 12, 14, **_all_visible(12, 14), first=1, last=2), SMALL),
        Case(
            "around_the_diagonal_by_mass",
            _select(1, 2, 12, 12, init=_shares, **_all_visible(12, 12), mass=0.5, last=1),
            SMALL,
            FP32,
        ),
        Case("tied", _select(1, 1, 20, 20, init=_tied), SMALL),
        Case("none_and_all", _select(1, 1, 3, 5, counts=int32s(0, 9, 2), visible=int32s(3, 9, 0)), SMALL),
        Case("more_columns", _select(1, 1, 4, 33, visible=int32s(30, 31, 32, 33), first=2), SMALL),
        Case("transposed", {**_select(1, 2, 7, 7), "scores": T(1, 2, 7, 7, layout="transposed", grad=False)}, SMALL),
        Case("no_columns", _select(1, 1, 3, 0), TEST),
        Case("rows_of_512", _select(2, 2, 512, 512, first=1, last=2), GPU, FP32),
        Case("shares_of_512", _select(1, 4, 512, 512, init=_shares, mass=0.9), TIMED, FP32),
    ],
    "block_lists": [
        Case("square", {"keep": T(2, 2, 7, 7, dtype=torch.bool, init=_kept), "room": 196}, SMALL),
        Case("wide", {"keep": T(1, 3, 5, 70, dtype=torch.bool, init=_kept), "room": 1050}, SMALL),
        Case("tall", {"keep": T(1, 1, 37, 3, dtype=torch.bool, init=_kept), "room": 111}, SMALL),
        Case("counted", _counted(2, 3, 9, 7, 84), SMALL),
        Case("counted_tall", _counted(1, 2, 70, 5, 300), SMALL),
        Case("counted_too_little_room", _counted(1, 2, 8, 40, 20), SMALL),
        Case("counted_long", _counted(1, 2, 530, 268, 2 * 530 * 268 + 5), SMALL),
        Case("counted_odd", _counted(1, 1, 300, 270, 300 * 270), SMALL),
        Case("counted_512", _counted(1, 4, 512, 512, 4 * 512 * 512), GPU),
        Case("too_little_room", {"keep": T(1, 2, 8, 8, dtype=torch.bool, init=_kept), "room": 9}, SMALL),
        Case("much_room", {"keep": T(2, 1, 5, 3, dtype=torch.bool, init=_kept), "room": 700}, SMALL),
        Case(
            "transposed", {"keep": T(1, 2, 9, 7, dtype=torch.bool, init=_kept, layout="transposed"), "room": 126}, SMALL
        ),
        Case("no_rows", {"keep": T(1, 1, 0, 4, dtype=torch.bool, init=_kept), "room": 3}, TEST),
        Case("rows_of_512", {"keep": T(1, 4, 512, 512, dtype=torch.bool, init=_kept), "room": 4 * 512 * 512}, GPU),
    ],
    "block_pattern": _pattern_cases(),
    "block_shares": _shared_out(),
}  # fmt: skip


def _plane(q: Tensor, k: Tensor, causal: bool = False) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] // (2 if causal and q.shape[2] == k.shape[2] else 1)


flops = {
    "block_scores": lambda q, k, causal: 2 * _plane(q, k, causal) * q.shape[3],
    "block_max_scores": lambda q, k, causal: 2 * _plane(q, k, causal) * q.shape[3],
    "block_max_scores_vjp": lambda q, k, causal: 2 * _plane(q, k, causal) * q.shape[3],  # the scores once more
    "block_mass": lambda q, k, causal: 2 * _plane(q, k, causal) * q.shape[3],
    "block_shares": lambda q, k, causal, block, stretches, query_stretches: (
        4 * _plane(q, k, causal) * q.shape[3] * stretches * (query_stretches or stretches) // block**2
    ),
    "block_scores_vjp": lambda q, k, causal: 6 * _plane(q, k, causal) * q.shape[3],  # the scores once more, dq and dk
}

bytes_moved = {
    "block_scores": lambda q, k, block_q, block_k: held(q, k) + 4 * _plane(q, k) // (block_q * block_k),
    "block_scores_vjp": lambda q, k, block_q, block_k: 2 * held(q, k) + 8 * _plane(q, k) // (block_q * block_k),
    "block_max_scores": lambda q, k, block_q, block_k: held(q, k) + 4 * _plane(q, k) // (block_q * block_k),
    "block_max_scores_vjp": lambda q, k, block_q, block_k: 2 * held(q, k) + 8 * _plane(q, k) // (block_q * block_k),
    "block_mass": lambda q, k, lse, block_q, block_k: held(q, k, lse) + 4 * _plane(q, k) // (block_q * block_k),
    "block_shares": lambda q, k, block, query_stride, key_stride: (
        held(q) // query_stride + held(k) // key_stride + 4 * _plane(q, k) // block**2
    ),
    "block_select": lambda scores: scores.numel() * (scores.element_size() + 1),
    "block_lists": lambda keep, room: 2 * keep.numel() + 8 * room,
    "block_pattern": lambda tokens, keys, sparsity_ratio, lists, block, causal: (
        8 * lists * row_budget(tokens, keys, block, causal, sparsity_ratio).total
    ),
}
