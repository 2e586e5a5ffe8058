"""Tensors that recordings recognise without keeping them alive, and buffers for inputs that several blocks share."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Identity:
    """A tensor as it is now, without keeping it."""

    def __init__(self, tensor: Tensor):
        self.tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is this one, and nobody has written to it since; False where torch does not count writes."""
        return self.tensor() is tensor and self._version is not None and self._version == tensor._version


class Slot:
    """A buffer for a tensor that several blocks are given, such as the angles of a rotation: filled once for all.

    fills: how often it was filled. Each forward fills it again, since the tensor may have been written without a word
    to autograd, as collectives and kernels do: a recording that meets the fill that it read before is in a later one.
    """

    def __init__(self, source: Tensor):
        self.buffer, self.fills = torch.empty_like(source), 0
        self.fill(source)

    def fill(self, source: Tensor) -> None:
        self.buffer.copy_(source)
        self._source = Identity(source)
        self.fills += 1

    def holds(self, tensor: Tensor) -> bool:
        return self._source.holds(tensor)
