"""Windows of tokens to train on: every epoch all of them once, in an order and from a start of its own."""

from __future__ import annotations

import torch
from torch import Tensor


class Windows:
    """Windows [length] of tokens [N], N >= length.

    epoch, position: how many windows of which epoch have been taken. Together with the seed they say what comes next.
    Raises ValueError for an epoch below 0 and for a position outside of it.
    """

    def __init__(self, tokens: Tensor, length: int, seed: int, epoch: int = 0, position: int = 0):
        self.tokens, self.length, self.seed = tokens, length, seed
        self.epoch, self.position = epoch, position
        self._starts = self._order()
        if epoch < 0 or not 0 <= position <= len(self._starts):
            raise ValueError(f"epoch {epoch} has no window {position}; an epoch has {len(self._starts)} windows")

    def take(self, count: int) -> Tensor:
        """The next windows, [count, length]; where an epoch ends the next one follows."""
        parts = []
        while count:
            if self.position == len(self._starts):
                self.epoch, self.position = self.epoch + 1, 0
                self._starts = self._order()
            part = self._starts[self.position : self.position + count]
            self.position += len(part)
            count -= len(part)
            parts.append(part)
        return self.tokens[torch.cat(parts)[:, None] + torch.arange(self.length)]

    def _order(self) -> Tensor:
        """Starts of this epoch's windows. The first lies anywhere, so that texts are not always cut alike."""
        draw = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        last = len(self.tokens) - self.length
        first = int(torch.randint(min(self.length, last + 1), (), generator=draw))
        starts = torch.arange(first, last + 1, self.length)
        return starts[torch.randperm(len(starts), generator=draw)]


def held_out(tokens: Tensor, length: int, limit: int) -> Tensor:
    """Up to `limit` windows [n, length] that do not overlap, from the beginning."""
    count = min(limit, len(tokens) // length)
    return tokens[: count * length].view(count, length)
