"""Tensors that are moved 16 bytes at a time: whether base and strides suit that, or a copy of them that does.

Neighbours along the last dim are neighbours in memory, and all else begins at multiples of 16 bytes. The stride of a
dim of size 1 is never used, and may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_units(x: Tensor) -> bool:
    """Whether vectors of 16 bytes can be read and written from wherever a line of x, along its last dim, begins."""
    if x.data_ptr() % 16:
        return False
    unit = 16 // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()):
        if stride % unit and size > 1:
            return False
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def bulk_strides(x: Tensor) -> list[int] | None:
    """Strides by which the tensor memory accelerator takes x, or None where it does not: as `in_units`, and no dim is
    expanded, with a stride of 0. Those of dims of size 1 must be legal too, and are one unit here."""
    if not in_units(x):
        return None
    unit = 16 // x.element_size()
    strides = [s if n > 1 else unit for n, s in zip(x.shape, x.stride())]
    if 0 in strides:
        return None
    strides[-1] = 1
    return strides


def for_bulk(x: Tensor) -> tuple[Tensor, list[int]]:
    """x, or a contiguous copy of it, whose lines must fill whole 16 bytes, and its `bulk_strides`."""
    strides = bulk_strides(x)
    if strides is None:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = bulk_strides(x)
    return x, strides


def aligned(x: Tensor) -> tuple[Tensor, int]:
    """x [M, N], or a copy of it where its rows are not `in_units`, and how many units a row is from the next."""
    if not in_units(x):
        x = x.clone(memory_format=torch.contiguous_format)
    return x, x.stride(0) * x.element_size() // 16


def aligned_vector(x: Tensor | None) -> Tensor | None:
    """x [N], or a copy of it where it is not `in_units`."""
    return x if x is None or in_units(x) else x.clone(memory_format=torch.contiguous_format)
