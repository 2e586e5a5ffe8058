"""Thread block clusters of a kernel that runs on a CPU, and shared memory at addresses, which their CTAs see of each
other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from tilesmith.validate.gluon.fibers import Fibers
from tilesmith.validate.gluon.memory import Barrier, Named, Unfenced

BASE = 1024  # the address of what a CTA reserves: the same in all of them


class Reserved:
    """Shared memory at addresses, filled with what nobody wrote, and the mbarriers in it."""

    def __init__(self, size: int):
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.barriers: dict[int, Barrier] = {}

    def at(self, address: int, size: int) -> Tensor:
        """Bytes from an address on."""
        begin = address - BASE
        if begin < 0 or begin + size > self.bytes.numel():
            raise IndexError(f"{size} bytes from {begin} on, of {self.bytes.numel()} in shared memory")
        return self.bytes[begin : begin + size]

    def words(self, address: int, number: int) -> Tensor:
        """Words of 32 bits from an address on."""
        return self.at(address, 4 * number).view(torch.int32)

    def places(self, addresses: Tensor) -> tuple[Tensor, Tensor]:
        """All words, and which of them lie at addresses."""
        if addresses.numel():
            self.at(int(addresses.min()), 4), self.at(int(addresses.max()), 4)
        return self.bytes[: self.bytes.numel() // 4 * 4].view(torch.int32), (addresses - BASE) // 4


class Cta:
    """One program: a CTA, and its rank in its cluster."""

    def __init__(
        self, place: tuple[int, int, int], grid: tuple[int, int, int], warps: int, fibers: Fibers,
        cluster: Cluster, rank: int,
    ):  # fmt: skip
        self.place, self.grid, self.warps, self.fibers = place, grid, warps, fibers
        self.cluster, self.rank = cluster, rank
        self.named: dict[int, Named] = {}
        self.unfenced: list[Unfenced] = []
        self.ended = False
        self.reserved: Reserved | None = None
        self.phase: int | None = None  # of the cluster's barrier, at which it has arrived
        self.coming: dict[int, deque[Callable[[], None]]] = {}  # stores of others, by their first address

    def reserve(self, size: int) -> int:
        """Reserve shared memory; its address."""
        if self.reserved is not None:
            raise RuntimeError("shared memory is reserved twice in a kernel")
        self.reserved = Reserved(size)
        return BASE

    def memory(self) -> Reserved:
        """What it has reserved. Raises RuntimeError where it does not exist yet, or no longer."""
        if self.reserved is None or self.ended:
            raise RuntimeError(f"shared memory of a CTA that has {'ended' if self.ended else 'not begun'}")
        return self.reserved

    def store(self, addresses: Tensor, words: Tensor, barrier: int = 0) -> None:
        """Let words arrive here at any time from now on, after those that were stored to the same place before.
        barrier: the address of the mbarrier here that is told of their bytes; 0: none is."""

        def come() -> None:
            memory = self.memory()
            all_words, places = memory.places(addresses)
            all_words[places] = words
            if barrier:
                memory.barriers[barrier].came(4 * words.numel())

        queue = self.coming.setdefault(int(addresses.flatten()[0]), deque())
        queue.append(come)
        self.fibers.later(lambda: queue.popleft()())


class Cluster:
    """CTAs that start together, by rank, and their barrier."""

    def __init__(self, size: int):
        self.ctas: list[Cta] = []
        self.barrier = Barrier(size, "the barrier of the cluster")

    def arrive(self, cta: Cta) -> None:
        if cta.phase is not None:
            raise RuntimeError("a CTA arrives twice at its cluster's barrier")
        cta.phase = self.barrier.phase
        self.barrier.arrive()

    def wait(self, cta: Cta) -> None:
        if cta.phase is None:
            raise RuntimeError("a CTA waits at its cluster's barrier and has not arrived")
        phase = cta.phase
        cta.fibers.wait(lambda: self.barrier.phase > phase, self.barrier.name)
        cta.phase = None
