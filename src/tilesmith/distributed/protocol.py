"""What a ring does: the `Ring` protocol, and the parcels that it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tilesmith.distributed.signature import Signature


@dataclass(frozen=True)
class Parcel:
    """A tensor on its way. give: on the rank `source`, any strides; take: on the rank `target`, contiguous, the same
    shape. None where the other side is elsewhere."""

    source: int
    target: int
    give: Tensor | None
    take: Tensor | None


class Ring(Protocol):
    """Transport between `size` ranks, of which `ranks` live in this process.

    Parcels between two ranks arrive in the order in which both post them.
    """

    size: int
    ranks: tuple[int, ...]

    def post(self, parcels: Sequence[Parcel], step: str) -> Any:
        """Begin to move parcels that this process sends or receives; what `wait` takes."""

    def wait(self, posted: Any) -> None:
        """Let what this process computes next come after the parcels' arrival. Raises RingError."""

    def agree(self, signatures: Mapping[int, Signature], step: str) -> None:
        """Compare signatures of all ranks. Raises ValueError naming ranks and the first name that differs, on all; for
        a signature that is a `refusal`, what it says.

        A ring may also have `ask`, of the same arguments, which begins this and gives back a function that ends it.
        This process then works on its own tokens meanwhile, and posts nothing. And it may have `begin`, of transfers
        between all ranks and their tensors, in place of `post` where it returns something, a function that posts them;
        and `reserve`, memory from which the next of these sends.
        """
