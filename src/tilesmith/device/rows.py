"""Tensors as rows: [..., N] as [M, N] in the order in which rows lie in memory, copied only where strides force it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

AT_ONCE = 32  # warps that a multiprocessor holds with 64 registers a thread
PACE = 3.0  # cycles from an instruction of a warp to its next one, where few other warps fill the gap


def more_warps(rows: int, sms: int, warps: int, saved: int, fixed: int) -> bool:
    """Whether rows are so few that twice the `warps` make each of them faster.

    saved: how many elements fewer a thread then has, PACE cycles each. fixed: how many elements cost a warp what it
    does once for a row, for its sums: twice the warps repeat that, a cycle each of one of the four schedulers that all
    rows of a multiprocessor share."""
    return rows / max(1, sms) * warps / 4 * fixed < PACE * saved


def dense(x: Tensor | None) -> Tensor | None:
    """x, or a copy of it without gaps: a vector may be a column of something larger. None of None."""
    return None if x is None else x.contiguous()


def row_order(x: Tensor) -> tuple[int, ...] | None:
    """The dims of `x`, outermost in memory first and the last dim last; None where that is their logical order.

    Heads moved in front of tokens, [B, H, T, D] over memory laid out [B, T, H, D], give (0, 2, 1, 3).
    """
    if x.ndim <= 2 or x.is_contiguous():
        return None
    lead = tuple(sorted(range(x.ndim - 1), key=lambda d: -x.stride(d)))
    return None if lead == tuple(range(x.ndim - 1)) else (*lead, x.ndim - 1)


def rows(x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """`x` as [M, N] with a last stride of 1: a view where its rows lie at one stride, else a contiguous copy.

    order: dims to walk, from `row_order` of this tensor or of the one whose rows these belong to.
    """
    if order is not None:
        x = x.permute(order)
    if x.ndim != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def flat_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape as [M, N] rows: one row of all elements where every one is contiguous."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, -1) for x in tensors)
    return tuple(rows(x) for x in tensors)


def unit_stride(x: Tensor) -> Tensor:
    """`x`, or a copy of it where its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_rows(x: Tensor, order: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor of x's shape whose rows are packed in `order`: `rows(result, order)` is contiguous."""
    if order is None:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_permuted(x.shape, order, dtype=dtype or x.dtype, device=x.device)


def empty_row_values(x: Tensor, order: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of shape x.shape[:-1], one value a row, packed in `order`."""
    if order is None:
        return torch.empty(x.shape[:-1], dtype=dtype, device=x.device)
    return torch.empty_permuted(x.shape[:-1], order[:-1], dtype=dtype, device=x.device)


def row_values(values: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """One value a row, shape [...], as a contiguous [M] in the same order as `rows`."""
    if order is not None:
        values = values.permute(order[:-1])
    return values.reshape(-1).contiguous()


def row_steps(x: Tensor, order: tuple[int, ...] | None) -> tuple[int, int]:
    """The size of x's last dim but one, and how many rows in `order` lie between two neighbours along it."""
    dim, inner = x.ndim - 2, 1
    for after in () if order is None else order[order.index(dim) + 1 : -1]:
        inner *= x.shape[after]
    return x.shape[dim], inner
