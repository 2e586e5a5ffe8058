"""Messages between GPUs of one host through memory that all of them map, moved by copy engines.

A rank copies what others read of its tensors into its own part of that memory, and raises a flag on each reader. A
reader's side stream waits for the flag and copies what it needs across the link. No kernel sends or receives, so
attention keeps all multiprocessors, and posting costs the host a few calls in place of NCCL's for each message. Flags
are written and awaited by the streams themselves (cuStreamWriteValue32, cuStreamWaitValue32).

Memory is symmetric memory of torch.distributed. It grows to what the largest exchange needs; exchanges above `MOST`
bytes are left to NCCL.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilesmith.distributed.schedule import Moves, Transfer

SLOTS = 2  # exchanges that may be under way
LEAST, MOST = 1 << 24, 1 << 30  # bytes of a slot
_ALIGNED = 256  # bytes: where tensors of an exchange begin
_KEPT = 64  # exchanges whose places are kept


@dataclass(frozen=True, eq=False)
class Arrival:
    """An exchange under way: what the reading stream waits for, and the tensors that are written until then."""

    event: torch.cuda.Event
    kept: Sequence[Tensor]


class CannotShare(RuntimeError):
    """Why ranks have no memory in common; raised on all of them."""


class _Places(NamedTuple):
    """Memory of an exchange in one slot. mine: what others read of this rank's tensors. reads: of each rank that this
    one reads, its runs: (which tensor, first place in it, tokens, memory)."""

    mine: Sequence[Tensor]
    reads: Sequence[tuple[int, Sequence[tuple[int, int, int, Tensor]]]]


class _Exchange:
    """What an exchange is by its moves, and by shapes and dtypes of what is sent, [T, B, heads, D].

    need: bytes of a slot. readers: the ranks that read this one's tensors, from the first to the last place of `span`.
    moves: kept, since `PeerMemory` knows it by its id. places: by slot.
    """

    def __init__(self, moves: Moves, rank: int, sent: Sequence[Tensor]):
        self.moves, self.rank = moves, rank
        self._kinds = [(x.shape[1:], x.dtype) for x in sent]
        rows = [prod(shape) * dtype.itemsize for shape, dtype in self._kinds]
        self._starts = {source: _starts(rows, high - low) for source, (low, high) in moves.spans.items()}
        self.need = max((each[-1] for each in self._starts.values()), default=0)
        self.readers, self.span = moves.readers(rank), moves.spans.get(rank, (0, 0))
        self.places: dict[int, _Places] = {}

    def placed(self, slot: int, view: Callable[..., Tensor]) -> _Places:
        """The places in a slot. view: makes a tensor of a rank's memory."""
        if slot not in self.places:
            mine = self._whole(self.rank, slot, view) if self.readers else []
            reads = [(source, self._runs(source, moves, slot, view)) for source, moves in self.moves.reads(self.rank)]
            self.places[slot] = _Places(mine, reads)
        return self.places[slot]

    def _runs(
        self, source: int, moves: Sequence[Transfer], slot: int, view: Callable[..., Tensor]
    ) -> list[tuple[int, int, int, Tensor]]:  # fmt: skip
        low, found = self.moves.spans[source][0], []
        for i, whole in enumerate(self._whole(source, slot, view)):
            for move in moves:
                there = whole[move.at - low : move.at - low + move.tokens]
                there = there if move.heads is None else there[:, :, slice(*move.heads)]
                found.append((i, move.to, move.tokens, there))
        return found

    def _whole(self, source: int, slot: int, view: Callable[..., Tensor]) -> list[Tensor]:
        """All that others read of a rank's tensors."""
        low, high = self.moves.spans[source]
        each = zip(self._starts[source], self._kinds)
        return [view(source, slot, start, (high - low, *shape), dtype) for start, (shape, dtype) in each]


class PeerMemory:
    """The memory of one rank of `group`, whose ranks are GPUs of one host; made and used by all ranks alike.

    gather: all ranks' values of one object, by rank, over a channel of the hosts. Raises CannotShare.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, gather: Callable[[Any], list[Any]]):
        self._group, self._device, self._gather = group, device, gather
        self._index = device.index  # what takes no lookup
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._count = self._bytes = 0
        self._handle: Any = None
        self._free: list[torch.cuda.Event | None] = [None] * SLOTS
        self._under_way: dict[int, Arrival] = {}
        self._exchanges: dict[Any, _Exchange] = {}
        self._agree(lambda: _identity(device), "share", same=True)
        self._agree(_driver, "call the driver")
        self._symmetric = self._agree(_symmetric_memory, "share memory with this PyTorch")
        self._side = torch.cuda.Stream(device, priority=-1)
        self._grow(LEAST)

    def move(self, moves: Moves, sent: Sequence[Tensor], into: Sequence[Tensor]) -> Arrival | None:
        """Begin to move runs of tokens between ranks: from this rank's `sent` [T, B, heads, D], into its `into`. None,
        on all ranks, where an exchange is too large. Raises CannotShare where memory is too small and cannot grow."""
        exchange = self._exchange(moves, sent)
        if exchange.need > MOST:
            return None
        if exchange.need > self._bytes:
            self._grow(1 << (exchange.need - 1).bit_length())
        self._count += 1
        slot, turn = self._count % SLOTS, self._count & 0xFFFFFFFF
        here, side = torch.cuda.current_stream(self._index), self._side
        if self._free[slot] is not None:
            here.wait_event(self._free[slot])
        self._under_way.pop(slot, None)
        me, readers, places = self._rank, exchange.readers, exchange.placed(slot, self._view)
        for x, mine in zip(sent, places.mine):
            mine.copy_(_run(x, *exchange.span))
        side.wait_event(here.record_event())
        with torch.cuda.stream(side):
            for reader in readers:
                self._write(reader, me, turn)
            for source, runs in places.reads:
                self._wait(source, turn)
                for i, to, tokens, there in runs:
                    _run(into[i], to, to + tokens).copy_(there)
                self._write(source, self._size + me, turn)
            arrival = Arrival(side.record_event(), tuple(into))
            for reader in readers:
                self._wait(self._size + reader, turn)
            self._free[slot] = side.record_event()
        self._under_way[slot] = arrival
        return arrival

    def wait(self, arrival: Arrival) -> None:
        """Let the current stream wait for an exchange."""
        torch.cuda.current_stream(self._index).wait_event(arrival.event)
        for slot, one in list(self._under_way.items()):
            if one is arrival:
                del self._under_way[slot]

    def _grow(self, size: int) -> None:
        """Memory with slots of `size` bytes, of all ranks."""
        torch.cuda.synchronize(self._device)
        self._gather(None)  # nobody reads the old one
        self._memory = self._handle = None
        for exchange in self._exchanges.values():
            exchange.places.clear()
        self._flags = -(-2 * self._size * 4 // _ALIGNED) * _ALIGNED
        with torch.cuda.device(self._device):
            made = self._agree(lambda: self._allocated(self._flags + SLOTS * size), "allocate")
            made.zero_()
            torch.cuda.synchronize(self._device)
            self._handle = self._agree(lambda: self._symmetric.rendezvous(made, self._group), "map")
        self._memory, self._bytes, self._pointers = made, size, tuple(self._handle.buffer_ptrs)
        self._gather(None)  # all flags are 0 before one is raised

    def _allocated(self, size: int) -> Tensor:
        allocate = partial(self._symmetric.empty, size, dtype=torch.uint8, device=self._device)
        try:
            return allocate()
        except RuntimeError:  # PyTorch keeps what it does not use
            torch.cuda.empty_cache()
            return allocate()

    def _agree(self, make: Callable[[], Any], what: str, same: bool = False) -> Any:
        """What `make` makes, if it does on all ranks; same: and is the same on all."""
        made, why = None, ""
        try:
            made = make()
        except Exception as problem:  # whatever the driver or PyTorch says
            why = f"{type(problem).__name__}: {problem}"
        told = self._gather((why, made if same else None))
        failed = [f"rank {rank} cannot {what}: {said}" for rank, (said, _) in enumerate(told) if said]
        if not failed and same and len({value for _, value in told}) > 1:
            failed = ["ranks are on several hosts"]
        if failed:
            raise CannotShare("; ".join(failed))
        return made

    def _exchange(self, moves: Moves, sent: Sequence[Tensor]) -> _Exchange:
        key = id(moves), *((x.shape, x.dtype) for x in sent)
        found = self._exchanges.get(key)
        if found is None:
            if len(self._exchanges) >= _KEPT:
                self._exchanges.pop(next(iter(self._exchanges)))
            found = self._exchanges[key] = _Exchange(moves, self._rank, sent)
        return found

    def _view(self, rank: int, slot: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        first = (self._flags + slot * self._bytes + start) // dtype.itemsize
        return self._handle.get_buffer(rank, shape, dtype, first)

    def _write(self, rank: int, flag: int, value: int) -> None:
        _driver().write(self._side.cuda_stream, self._pointers[rank] + 4 * flag, value)

    def _wait(self, flag: int, value: int) -> None:
        _driver().wait(self._side.cuda_stream, self._pointers[self._rank] + 4 * flag, value)


def _run(x: Tensor, low: int, high: int) -> Tensor:
    """Rows from `low` to `high`."""
    return x if high - low == x.shape[0] else x.narrow(0, low, high - low)


def _starts(rows: Sequence[int], tokens: int) -> list[int]:
    """Where tensors with rows of so many bytes begin in a slot, and the end."""
    found = [0]
    for row in rows:
        found.append(found[-1] + -(-row * tokens // _ALIGNED) * _ALIGNED)
    return found


def _identity(device: torch.device) -> tuple[str, str]:
    if device.type != "cuda" or torch.version.hip:
        raise RuntimeError(f"tensors are on {device}")
    return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _symmetric_memory() -> Any:
    """A private module of PyTorch, without which NCCL serves."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


class _Driver:
    """Two functions of CUDA's driver."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def write(self, stream: int, address: int, value: int) -> None:
        """Behind what the stream does, with its writes visible."""
        _check(self._write(stream, address, value, 0), "cuStreamWriteValue32")

    def wait(self, stream: int, address: int, value: int) -> None:
        """Until what is there has reached `value`, around 2^32."""
        _check(self._wait(stream, address, value, 0), "cuStreamWaitValue32")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} gave CUDA error {code}")


@cache
def _driver() -> _Driver:
    return _Driver()
