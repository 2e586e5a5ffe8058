"""One rank of a ring without the others: what it holds and how long it works, on one device or on none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tilesmith.distributed.ring import Parcel
from tilesmith.distributed.signature import Signature


class OneRank:
    """Rank `rank` of `size`. What it sends is copied, as a process group copies it, and kept until whoever posted it
    drops it; what should arrive is whatever the memory holds."""

    def __init__(self, size: int, rank: int):
        self.size, self.ranks = size, (rank,)

    def post(self, parcels: Sequence[Parcel], step: str) -> list[Tensor]:
        """The copies."""
        return [p.give.contiguous() for p in parcels if p.source == self.ranks[0] != p.target]

    def wait(self, posted: list[Tensor]) -> None:
        """Nothing is under way."""

    def agree(self, signatures: Mapping[int, Signature], step: str) -> None:
        """There is nobody to disagree."""
