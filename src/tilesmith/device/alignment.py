"""Tensors for 16-byte vector accesses and for TMA: whether base address and strides suit them, and copies that do.

Neighbours along the last dim must be neighbours in memory, and every other stride a multiple of 16 bytes. The stride of
a dim of size 1 is never used and may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_16_byte_aligned(x: Tensor) -> bool:
    """Whether every line of x along its last dim begins at a multiple of 16 bytes, so that 16-byte vectors can be
    loaded and stored from there."""
    if x.data_ptr() % 16:
        return False
    unit = 16 // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()):
        if stride % unit and size > 1:
            return False
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def tma_strides(x: Tensor) -> list[int] | None:
    """The strides of x for a TMA descriptor, or None where TMA cannot take x: it must be `is_16_byte_aligned`, and no
    dim may be expanded (stride 0). The stride of a dim of size 1 must be legal too; it is one 16-byte unit here."""
    if not is_16_byte_aligned(x):
        return None
    unit = 16 // x.element_size()
    strides = [s if n > 1 else unit for n, s in zip(x.shape, x.stride())]
    if 0 in strides:
        return None
    strides[-1] = 1
    return strides


def tma_view(x: Tensor) -> tuple[Tensor, list[int]]:
    """x and its `tma_strides`; a contiguous copy of x where it has none. The lines of a copy must fill whole 16-byte
    units."""
    strides = tma_strides(x)
    if strides is None:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = tma_strides(x)
    return x, strides


def aligned(x: Tensor) -> tuple[Tensor, int]:
    """x [M, N], copied where it is not `is_16_byte_aligned`, and the distance between its rows in units of 16 bytes."""
    if not is_16_byte_aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    return x, x.stride(0) * x.element_size() // 16


def aligned_vector(x: Tensor | None) -> Tensor | None:
    """x [N], copied where it is not `is_16_byte_aligned`."""
    return x if x is None or is_16_byte_aligned(x) else x.clone(memory_format=torch.contiguous_format)
