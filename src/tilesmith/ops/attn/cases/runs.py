"""Example inputs of copy_runs and add_runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BF16, SMALL, UNCHECKED, Init
from tilesmith.engine.inits import tokens_first
from tilesmith.engine.memory import held


def _copy(
    *shape: int, places: int, runs: Sequence[int], dim_b: int | None = None, init: str | Init = "normal",
    layout: str = "contiguous", dtype_b: torch.dtype | None = None,
) -> dict:  # fmt: skip
    """shape: of a. places: tokens of what is written; dim_b: of b, if another than a's."""
    batch, heads, _, dim = shape
    dim_b = dim if dim_b is None else dim_b
    kind = {"grad": False, "init": init, "layout": layout}
    return {
        "a": T(*shape, **kind),
        "b": T(*shape[:3], dim_b, dtype=dtype_b, **kind),
        "into_a": T(batch, heads, places, dim, grad=False, init=tokens_first),
        "into_b": T(batch, heads, places, dim_b, dtype=dtype_b, grad=False, init=tokens_first),
        "runs": list(runs),
    }


def _add(
    *shape: int, came: int, runs: Sequence[int], dim_b: int | None = None, init: str | Init = "normal",
    layout: str = "contiguous", rounded: torch.dtype | None = torch.bfloat16, in_place: bool = False,
) -> dict:  # fmt: skip
    """shape: of a. came: tokens of what is added; rounded: the dtype of what is written, unless that is a and b."""
    batch, heads, _, dim = shape
    dim_b = dim if dim_b is None else dim_b
    kind = {"grad": False, "layout": layout}
    return {
        "a": T(*shape, init=init, **kind),
        "b": T(*shape[:3], dim_b, init=init, **kind),
        "more_a": T(batch, heads, came, dim, grad=False, init=tokens_first),
        "more_b": T(batch, heads, came, dim_b, grad=False, init=tokens_first),
        "into_a": T(*shape, dtype=rounded, columns_of="a" if in_place else None, **kind),
        "into_b": T(*shape[:3], dim_b, dtype=rounded, columns_of="b" if in_place else None, **kind),
        "runs": list(runs),
    }


COPY = [
    Case("three", _copy(2, 3, 50, 16, places=41, runs=(4, 0, 2, 45, 3, 5, 7, 9, 31)), SMALL),
    Case("tokens_first", _copy(1, 4, 37, 24, places=37, runs=(0, 0, 37), init=tokens_first), SMALL),
    Case("other_dims", _copy(1, 2, 20, 40, places=20, runs=(3, 0, 11), dim_b=20), SMALL),
    Case("one_column", _copy(1, 2, 20, 32, places=20, runs=(0, 3, 9), dim_b=1, dtype_b=torch.float32), SMALL),
    Case("one_tensor", _copy(2, 1, 20, 64, places=9, runs=(0, 8, 1, 19, 0, 1), dim_b=0), SMALL),
    Case("second_alone", _copy(2, 1, 20, 0, places=9, runs=(0, 8, 1, 19, 0, 1), dim_b=64), SMALL),
    Case("strided", _copy(1, 2, 20, 16, places=20, runs=(0, 0, 4, 6, 6, 3), layout="strided"), SMALL),
    Case("transposed", _copy(1, 2, 20, 16, places=20, runs=(0, 0, 4, 6, 6, 3), layout="transposed"), SMALL),
    Case("empty_runs", _copy(1, 2, 8, 16, places=8, runs=(0, 0, 0, 2, 3, 4, 8, 8, 0)), SMALL),
    Case("no_runs", _copy(1, 2, 8, 16, places=8, runs=()), SMALL),
    Case("no_tokens", _copy(1, 2, 0, 16, places=0, runs=(0, 0, 0)), SMALL),
    Case("span", _copy(1, 16, 8192, 128, places=8192, runs=(0, 0, 8192)), UNCHECKED, BF16),
    Case(
        "documents", _copy(1, 16, 32768, 128, places=32768, runs=(0, 0, 2048, 9000, 9000, 3000, 24000, 24000, 7000)),
        UNCHECKED, BF16,
    ),
]  # fmt: skip

ADD = [
    Case("one", _add(2, 3, 50, 16, came=31, runs=(0, 5, 31)), SMALL),
    Case("overlapping", _add(1, 2, 50, 24, came=60, runs=(0, 10, 30, 30, 20, 20, 50, 0, 10), dim_b=40), SMALL),
    Case("tokens_first", _add(1, 4, 37, 16, came=37, runs=(0, 0, 37), init=tokens_first), SMALL),
    Case("not_rounded", _add(1, 4, 20, 16, came=6, runs=(0, 3, 6), rounded=None), SMALL),
    Case("one_tensor", _add(2, 1, 20, 64, came=9, runs=(0, 11, 9), dim_b=0), SMALL),
    Case("strided", _add(1, 2, 20, 16, came=5, runs=(0, 1, 5), layout="strided"), SMALL),
    Case("in_place", _add(2, 3, 50, 16, came=31, runs=(0, 5, 14, 20, 33, 11), in_place=True), SMALL),
    Case(
        "in_place_overlapping",
        _add(1, 2, 150, 24, came=99, runs=(0, 30, 80, 79, 40, 20, 3, 20, 10, 5, 149, 1), dim_b=40, in_place=True),
        SMALL,
    ),
    Case(
        "in_place_tokens_first", _add(1, 4, 37, 16, came=37, runs=(0, 30, 7), init=tokens_first, in_place=True), SMALL
    ),
    Case("in_place_one_tensor", _add(2, 1, 20, 64, came=9, runs=(0, 11, 9), dim_b=0, in_place=True), SMALL),
    Case("in_place_nothing_came", _add(1, 2, 20, 16, came=0, runs=(), in_place=True), SMALL),
    Case("nothing_came", _add(1, 2, 20, 16, came=0, runs=()), SMALL),
    Case("no_tokens", _add(1, 2, 0, 16, came=0, runs=(0, 0, 0)), SMALL),
    Case("stage", _add(1, 16, 32768, 128, came=4096, runs=(0, 9000, 4096), in_place=True), UNCHECKED, (torch.float32,)),
    Case("last_stage", _add(1, 16, 8192, 128, came=4096, runs=(0, 0, 4096)), UNCHECKED, (torch.float32,)),
]

CASES = {"add_runs": ADD, "copy_runs": COPY}


def _copied(a: Tensor, b: Tensor, runs: Sequence[int]) -> int:
    """Each token of a run read and written once."""
    line = a.shape[3] * a.element_size() + b.shape[3] * b.element_size()
    return 2 * a.shape[0] * a.shape[1] * sum(runs[2::3]) * line


def _added(a: Tensor, b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]) -> int:
    """The sums and what is added read once, the results written once; of sums that are written in place the tokens of
    the runs."""
    line = a.shape[3] * a.element_size() + b.shape[3] * b.element_size()
    added = a.shape[0] * a.shape[1] * sum(runs[2::3]) * line
    if a.data_ptr() == into_a.data_ptr():
        return 3 * added
    return held(a, b, into_a, into_b) + added


bytes_moved = {"add_runs": _added, "copy_runs": _copied}
