"""Messages between GPUs of one host through memory that all of them map, moved by copy engines.

A rank copies what others read of its tensors into its own part of that memory, and raises a flag on each reader. A
reader's side stream waits for the flag and copies what it needs across the link. No kernel sends or receives, so
attention keeps all multiprocessors, and posting costs the host a few calls in place of NCCL's for each message. Flags
are written and awaited by the streams themselves (`signals.py`); who waits in vain is let go on by a thread
(`watch.py`).

What a rank computes for others it may write there at once (`PeerMemory.reserve`), with nothing left to copy.

Memory is symmetric memory of torch.distributed. It grows to what the largest exchange needs; exchanges above `MOST`
bytes are left to NCCL.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilesmith.distributed.agreement import CannotShare, Gather, agreed
from tilesmith.distributed.lost import RingError, told
from tilesmith.distributed.schedule import Moves, Share, Transfer
from tilesmith.distributed.signals import SLOTS, Event, Signals, driver
from tilesmith.distributed.tokens import by_head, copy_runs
from tilesmith.distributed.watch import UnderWay, Watch
from tilesmith.engine.torch_private import current_device, raw_stream, symmetric_memory

LEAST, MOST = 1 << 24, 1 << 30  # bytes of a slot
_ALIGNED = 256  # bytes: where tensors of an exchange begin
_KEPT = 64  # exchanges whose places are kept
Kind = tuple[tuple[int, ...], torch.dtype]  # of a tensor that is sent: its shape [B, heads, T, D]


@dataclass(frozen=True, eq=False)
class Arrival:
    """An exchange under way: what the reading stream waits for, and the tensors that are written until then."""

    event: Event
    kept: Sequence[Tensor]


class _Places(NamedTuple):
    """Memory of an exchange in one slot. mine: what others read of this rank's tensors, share by share, each [B, heads,
    T, D]. reads: of each rank that this one reads, its runs: (which tensor, its first byte of that, the address where
    it is read, bytes). sources: these ranks."""

    mine: Sequence[tuple[Share, Sequence[Tensor]]]
    reads: Sequence[tuple[int, Sequence[tuple[int, int, int, int]]]]
    sources: tuple[int, ...]


class _Exchange:
    """What an exchange is by its moves, and by the kinds of what is sent.

    need: bytes of a slot. readers: the ranks that read this one's tensors, from the first to the last place of `span`.
    whole: whether they read whole tensors. moves: kept, since `PeerMemory` knows it by its id. places: by slot.
    """

    def __init__(self, moves: Moves, rank: int, kinds: Sequence[Kind]):
        self.moves, self.rank = moves, rank
        self._kinds = [((batch, heads, dim), dtype) for (batch, heads, _, dim), dtype in kinds]
        rows = [(batch * dim * dtype.itemsize, heads) for (batch, heads, dim), dtype in self._kinds]
        self._starts = {source: laid_out(moves, source, rows) for source in moves.spans}
        self.need = max((end for _, end in self._starts.values()), default=0)
        self.readers, self.span = moves.readers(rank), moves.spans.get(rank, (0, 0))
        shares = moves.shares.get(rank, ())
        self.whole = len(shares) == 1 and shares[0].heads is None and self.span == (0, kinds[0][0][2])
        self.places: dict[int, _Places] = {}

    def _shapes(self, source: int, share: Share) -> list[tuple[tuple[int, ...], torch.dtype]]:
        low, high = self.moves.spans[source]
        first, last = share.heads or (0, 0)
        return [((high - low, batch, last - first or heads, dim), dtype) for (batch, heads, dim), dtype in self._kinds]

    def placed(self, slot: int, view: Callable[..., Tensor]) -> _Places:
        """The places in a slot. view: makes a tensor of a rank's memory."""
        if slot not in self.places:
            mine = []
            for i, share in enumerate(self.moves.shares.get(self.rank, ())):
                mine.append((share, [by_head(x) for x in self._memory(self.rank, i, slot, view)]))
            reads = [(source, self._runs(source, moves, slot, view)) for source, moves in self.moves.reads(self.rank)]
            self.places[slot] = _Places(mine, reads, tuple(source for source, _ in reads))
        return self.places[slot]

    def _runs(
        self, source: int, moves: Sequence[Transfer], slot: int, view: Callable[..., Tensor]
    ) -> list[tuple[int, int, int, int]]:  # fmt: skip
        (low, high), found = self.moves.spans[source], []
        for n, share in enumerate(self.moves.shares[source]):
            mine = [m for m in moves if share.reader is None or (share.reader, share.heads) == (self.rank, m.heads)]
            for i, memory in enumerate(self._memory(source, n, slot, view) if mine else ()):
                first, token = memory.data_ptr(), memory.nbytes // (high - low)
                found += [(i, m.to * token, first + (m.at - low) * token, m.tokens * token) for m in mine if token]
        return found

    def _memory(self, source: int, i: int, slot: int, view: Callable[..., Tensor]) -> list[Tensor]:
        """A rank's i-th share, [T, B, heads, D]."""
        each = zip(self._starts[source][0][i], self._shapes(source, self.moves.shares[source][i]))
        return [view(source, slot, start, shape, dtype) for start, (shape, dtype) in each]


def _on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `PeerMemory` that is called with the tensors' device as the current one."""

    @wraps(method)
    def called(self: PeerMemory, *given: Any) -> Any:
        if current_device() == self._index:
            return method(self, *given)
        with torch.cuda.device(self._device):
            return method(self, *given)

    return called


class PeerMemory:
    """The memory of one rank of `group`, whose ranks are GPUs of one host; made and used by all ranks alike.

    Raises CannotShare.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, gather: Gather):
        self._group, self._device, self._gather = weakref.ref(group), device, gather
        self._index = device.index  # what takes no lookup
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._count = self._bytes = 0
        self._handle: Any = None
        self._free: list[Event | None] = [None] * SLOTS
        self._writer: int | None = None  # the stream that a slot is reserved for
        self._under_way: dict[int, Arrival] = {}
        self._exchanges: dict[Any, _Exchange] = {}
        self._agree(lambda: _identity(device), "share", same=True)
        self._driver = self._agree(driver, "call the driver")
        self._symmetric = self._agree(symmetric_memory, "share memory with this PyTorch")
        self._memory: Tensor | None = None
        self._watch: Watch | None = None
        self._grow(LEAST)

    @property
    def held(self) -> int:
        """Bytes of memory that PyTorch's allocator does not count."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def broken(self) -> str:
        """Which rank was lost in which step; empty if none."""
        return "" if self._watch is None else self._watch.broken

    @_on_its_device
    def begin(
        self, moves: Moves, sent: Sequence[Tensor], into: Sequence[Tensor], step: str, timeout: float, gather: Gather
    ) -> Callable[[], Arrival] | None:  # fmt: skip
        """Copy what others read of this rank's `sent` [B, heads, T, D], and give back what begins to move runs of
        tokens between ranks, into its `into`, which is of `tokens.landing`; they may be of its own tensors, too. What
        the current stream is given before that is called runs beside the transfers; no other exchange may begin before.
        None, on all ranks, where an exchange is too large. timeout: seconds that this rank's GPU may wait for another
        one. Raises CannotShare where memory is too small and cannot grow, RingError where a rank was lost."""
        if self._watch.broken:
            raise RingError(self._watch.broken)
        exchange = self._exchange(moves, kinds_of(sent))
        if exchange.need > MOST:
            return None
        if exchange.need > self._bytes:
            self._gather = gather
            self._grow(1 << (exchange.need - 1).bit_length())
        self._count += 1
        slot, here = self._count % SLOTS, self._here()
        self._take(slot, here)
        self._let_go(slot)
        places = exchange.placed(slot, self._view)
        if exchange.readers and sent[0].data_ptr() != places.mine[0][1][0].data_ptr():
            for share, memory in places.mine:
                copy_runs(sent, share.heads, memory, share.runs)
        return partial(self._moved, exchange, self._count, sent, into, self._signals.record(here), step, timeout)

    @_on_its_device
    def _moved(
        self, exchange: _Exchange, count: int, sent: Sequence[Tensor], into: Sequence[Tensor], begun: Event, step: str,
        timeout: float,
    ) -> Arrival:  # fmt: skip
        """Give the side stream what an exchange does once `begun` has happened."""
        slot, turn = count % SLOTS, count & 0xFFFFFFFF
        signals, readers = self._signals, exchange.readers
        places, addresses = exchange.placed(slot, self._view), [x.data_ptr() for x in into]
        copy, side = signals.driver.copy, signals.stream
        begun.wait(side)
        for reader in readers:
            signals.raise_for(reader, turn)
        for source, runs in places.reads:
            signals.wait_for(source, turn)
            for i, first, address, size in runs:
                copy(side, addresses[i] + first, address, size)
            signals.tell_read(source, turn)
        if places.sources:
            signals.pass_gate(slot, turn)
        arrival = Arrival(signals.record(side), tuple(into))
        for reader in readers:
            signals.wait_until_read(reader, turn)
        done = self._free[slot] = signals.record(side)
        self._under_way[slot] = arrival
        memory = [(address, x.nbytes) for address, x in zip(addresses, into)] if places.sources else ()
        self._watch.follow(
            UnderWay(turn, slot, step, timeout, begun, arrival.event, done, places.sources, readers, memory)
        )
        for heads, runs in exchange.moves.own_runs.get(self._rank, ()):
            copy_runs(sent, heads, into, runs)
        return arrival

    @_on_its_device
    def reserve(self, moves: Moves, kinds: Sequence[Kind]) -> Sequence[Tensor] | None:
        """Memory [B, heads, T, D] from which others will read in the next exchange, if it is of these moves and kinds:
        what the current stream writes there until `begin` need not be copied. None where that exchange needs other
        memory, which it gets then, or sends less than the whole tensors."""
        exchange = self._exchange(moves, kinds)
        if self.broken or exchange.need > self._bytes or not exchange.whole:
            return None
        slot, here = (self._count + 1) % SLOTS, self._here()
        self._take(slot, here)
        self._writer = here
        return exchange.placed(slot, self._view).mine[0][1]

    def _here(self) -> int:
        """The current stream."""
        self._signals.have_context()
        return raw_stream(self._index)

    def _take(self, slot: int, here: int) -> None:
        """Let a stream wait until a slot is its own: nobody reads it, and no other stream writes it."""
        if self._free[slot] is not None:
            self._free[slot].wait(here)
        if self._writer is not None and self._writer != here:  # of an exchange that never began
            self._signals.record(self._writer).wait(here)
        self._writer = None

    def _let_go(self, slot: int) -> None:
        """Forget what last used a slot. Where nobody waited for it, as after an exception, the stream that made its
        tensors does not know how long they are written: the allocator has to."""
        arrival = self._under_way.pop(slot, None)
        for x in () if arrival is None else arrival.kept:
            _kept_until(self._signals.side, x)

    def need(self, moves: Moves, sent: Sequence[Tensor]) -> int:
        """Bytes of a slot that an exchange takes."""
        return self._exchange(moves, kinds_of(sent)).need

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._watch is None or self._watch.idle

    @_on_its_device
    def wait(self, arrival: Arrival) -> None:
        """Let the current stream wait for an exchange. Raises RingError where a rank was lost."""
        if self.broken:  # what arrives is kept: it is still written
            raise RingError(self.broken)
        if self._memory is not None:  # else it was given back, when all had arrived
            arrival.event.wait(self._here())
        for slot, one in list(self._under_way.items()):
            if one is arrival:
                del self._under_way[slot]

    def close(self) -> None:
        """Give the memory back, when nothing is under way any longer."""
        if self._memory is None:
            return
        self._watch.end()
        torch.cuda.synchronize(self._device)
        self._drop()

    def _drop(self) -> None:
        self._memory = self._handle = self._signals = self._watch.signals = None
        self._bytes = 0  # the next exchange asks for memory
        self._free = [None] * SLOTS
        self._under_way.clear()
        for exchange in self._exchanges.values():
            exchange.places.clear()

    def _grow(self, size: int) -> None:
        """Memory with slots of `size` bytes, of all ranks."""
        torch.cuda.synchronize(self._device)
        if self.broken:
            raise RingError(self.broken)
        self._gather(None)  # nobody reads the old one
        if self._watch is not None:
            self._watch.end()
            self._drop()
        self._flags = -(-Signals.words(self._size) * 4 // _ALIGNED) * _ALIGNED
        with torch.cuda.device(self._device):
            made = self._agree(lambda: self._allocated(self._flags + SLOTS * size), "allocate")
            made.zero_()
            torch.cuda.synchronize(self._device)
            self._handle = self._agree(lambda: self._symmetric.rendezvous(made, self._group()), "map")
        self._memory, self._bytes, self._count = made, size, 0
        own = made[: 4 * Signals.words(self._size)].view(torch.int32)
        self._signals = Signals(self._driver, self._rank, self._handle.buffer_ptrs, own, self._index)
        self._watch = Watch(self._signals, partial(_lost, self._group, self._rank, self._size))
        weakref.finalize(self, self._watch.end)  # also when the process ends, before CUDA does
        # also tells that all flags are 0 before one is raised
        self._agree(lambda: self._signals.pass_gate(0, 0), "let streams wait for memory")

    def _allocated(self, size: int) -> Tensor:
        allocate = partial(self._symmetric.empty, size, dtype=torch.uint8, device=self._device)
        try:
            return allocate()
        except RuntimeError:  # PyTorch keeps what it does not use
            torch.cuda.empty_cache()
            return allocate()

    def _agree(self, make: Callable[[], Any], what: str, same: bool = False) -> Any:
        """What `make` makes, if it does on all ranks; same: and is the same on all."""
        made, each = agreed(self._gather, make, what, told=lambda made: made if same else None)
        if len(set(each)) > 1:
            raise CannotShare("ranks are on several hosts")
        return made

    def _exchange(self, moves: Moves, kinds: Sequence[Kind]) -> _Exchange:
        key = id(moves), *kinds
        found = self._exchanges.get(key)
        if found is None:
            if len(self._exchanges) >= _KEPT:
                self._exchanges.pop(next(iter(self._exchanges)))
            found = self._exchanges[key] = _Exchange(moves, self._rank, kinds)
        return found

    def _view(self, rank: int, slot: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        first = (self._flags + slot * self._bytes + start) // dtype.itemsize
        return self._handle.get_buffer(rank, shape, dtype, first)


def _lost(
    group: Callable[[], Any], rank: int, size: int, peer: int, step: str, problem: str, waited: float, limit: float
) -> str:  # fmt: skip
    said = told(group(), rank, size, step, peer, problem, waited, limit)
    return f"{said}; what depends on it is NaN, and this group serves no other call"


def laid_out(moves: Moves, source: int, rows: Sequence[tuple[int, int]]) -> tuple[list[list[int]], int]:
    """Where tensors of each share of a rank begin in its slot, and where the last one ends, in bytes. rows: of each
    tensor the bytes of one head of a token, and its heads."""
    low, high = moves.spans[source]
    found: list[list[int]] = []
    at = 0
    for share in moves.shares[source]:
        found.append([])
        for row, heads in rows:
            found[-1].append(at)
            count = heads if share.heads is None else share.heads[1] - share.heads[0]
            at += -(-row * count * (high - low) // _ALIGNED) * _ALIGNED
    return found, at


def kinds_of(sent: Sequence[Tensor]) -> list[Kind]:
    """Of tensors [B, heads, T, D]."""
    return [(x.shape, x.dtype) for x in sent]


def _kept_until(stream: Any, x: Tensor) -> None:
    """Let memory be used for something else only behind what a stream does so far."""
    x.record_stream(stream)


def _identity(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip:
        raise RuntimeError(f"tensors are on {device}")
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
