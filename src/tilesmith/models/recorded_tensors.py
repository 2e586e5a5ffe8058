"""Tensors that recordings know without keeping them, and buffers for what several blocks are given."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Identity:
    """A tensor as it is now, without keeping it."""

    def __init__(self, tensor: Tensor):
        self.tensor, self._version = weakref.ref(tensor), tensor._version

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is this one, and nobody has written to it since."""
        return self.tensor() is tensor and self._version == tensor._version


class Slot:
    """A buffer for a tensor that several blocks are given, such as the angles of a rotation: filled once for all."""

    def __init__(self, source: Tensor):
        self.buffer = torch.empty_like(source)
        self.fill(source)

    def fill(self, source: Tensor) -> None:
        self.buffer.copy_(source)
        self._source = Identity(source)

    def holds(self, tensor: Tensor) -> bool:
        return self._source.holds(tensor)
