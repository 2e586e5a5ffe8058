"""Short messages between processes of one host, through memory that all of them map.

A message and its answer take some microseconds, where they take hundreds through gloo: ranks compare each call, and
short calls wait for the host.

Exchanges are numbered from 1. In each of them every rank writes one message and takes one of each other rank. A rank
writes in its own area of the memory only: its message into one of `SLOTS` slots in turn, the last exchange of which it
has taken all messages, and, once it takes part no longer, the first exchange that it leaves out.

- Nothing is taken half written, in whatever order a CPU writes and reads: what is written has a number and a checksum,
  a reader looks at a copy, and looks again until both fit. Nor does a copy change later: a rank tells that it has taken
  a message only once its copy has passed.
- Nothing is overwritten that is still wanted: a rank writes message n only when all others have taken exchange
  n - SLOTS, whose slot that is.
- Nobody waits for ever while all ranks go on, also where nobody asks for an answer. Before a rank writes n it takes
  n - SLOTS itself, asked for or not, and it takes exchanges in their order. Order what is waited for by exchange, and
  in each exchange messages before their being taken. A rank that has not written m waits, if at all, for messages
  before m, or for an exchange before m being taken. A rank that has not taken m, whose messages have all been written,
  waits, if at all, for an exchange before m being taken, since it takes m before it waits for anything after it. So
  whoever waits does so for a rank that goes on or that waits for something earlier, and nothing is earliest for ever.
- Two slots are the fewest with which ranks that take each exchange before they begin the next do not wait to write. Who
  begins n has taken n - 1, which the others wrote when they had taken n - 2. With one slot it would wait until the
  slowest of them has taken n - 1.

The memory is a file in /dev/shm that has lost its name once all ranks have opened it: it ends with the last of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import struct
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tilesmith.distributed.agreement import CannotShare, Gather, agreed

ROOM = 2048  # bytes of a message at most
SLOTS = 2
SPIN = 50e-6  # seconds for which a rank looks without sleeping
SHARE, LONGEST = 1 / 8, 1e-3  # a sleep: that part of the time waited so far, and at most so many seconds
PERIOD = 0.02  # seconds between two looks whether a process still exists
_FOLDER = Path("/dev/shm")
_HEAD, _CHECK = struct.Struct("<QI"), struct.Struct("<I")  # a record: number, bytes of the message, checksum, message
_BEGIN = _HEAD.size + _CHECK.size
_LINE = 64  # bytes: what one rank writes shares no line of a cache with what another writes
_TOKEN = 32  # bytes
_TAKEN, _LEFT, _KNOWN, _FIRST = 0, _LINE, 2 * _LINE, 3 * _LINE  # places in an area; the last: of the first slot
_SLOT = -(-(_BEGIN + ROOM) // _LINE) * _LINE
_AREA = _FIRST + SLOTS * _SLOT


class Process(NamedTuple):
    """host: which one, with the namespace of its processes' numbers. began: when, in ticks of that host."""

    host: str
    pid: int
    began: str

    @property
    def alive(self) -> bool:
        """Whether it still runs; a number may have been given to another process since."""
        return _began(self.pid) in (self.began, None)


def this_process() -> Process:
    """Raises OSError or RuntimeError where the system does not tell."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    began = _began(os.getpid())
    if not began:
        raise RuntimeError("/proc does not show this process")
    return Process(f"{host} {Path('/proc/self/ns/pid').readlink()}", os.getpid(), began)


def _began(pid: int) -> str | None:
    """When a process began; empty if it has ended, None if the system does not tell."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return "" if state in "ZXx" else fields[18]


class Exchange:
    """One message of each rank. record: this rank's, as it is written. found: the others' by rank, as they are taken;
    all of them once what `Channel.awaited` gave has been waited for."""

    __slots__ = ("found", "message", "number", "record")

    def __init__(self, number: int, message: bytes):
        self.number, self.message, self.record = number, message, _record(number, message)
        self.found: dict[int, bytes] = {}


class Awaited:
    """What a rank waits for, with the interface of transfers of torch.distributed."""

    def __init__(self, there: Callable[[], bool], gone: Callable[[], str], alive: Callable[[], bool]):
        self._there, self._gone, self._alive = there, gone, alive

    def wait(self, timeout: Any) -> bool:
        """Whether it came within a timedelta. Raises RuntimeError where it cannot come any more."""
        limit, began = timeout.total_seconds(), time.monotonic()
        looked = waited = 0.0
        while not self._there():
            waited = time.monotonic() - began
            if waited >= limit:
                return False
            if waited < SPIN:
                os.sched_yield()
                continue
            if why := self._gone():
                raise RuntimeError(why)
            if waited - looked >= PERIOD:
                looked = waited
                if not self._alive() and not self._there():
                    raise RuntimeError("its process has ended")
            time.sleep(min(waited * SHARE, LONGEST, limit - waited))
        return True


class Channel:
    """The end of one rank of a group. processes: of all ranks. lost: what this rank has said as it gave up, empty
    before. Used by one thread at a time."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[Process]):
        self._memory: mmap.mmap | None = memory
        self._processes, self._own = processes, rank * _AREA
        self._others = [r for r in range(len(processes)) if r != rank]
        self._count, self._open = 0, deque[Exchange]()
        self._closed = self.lost = ""
        self._left = False
        _CHANNELS.add(self)

    def before(self) -> list[tuple[int, Awaited]]:
        """What is to be waited for before the next exchange begins, with its rank; usually nothing. Raises RuntimeError
        where this process has no channel any longer."""
        following = self._count + 1
        overwritten = following - SLOTS
        late = self._missing(overwritten) if self._open else []
        for peer in self._others:
            if not self._has_taken(peer, overwritten):
                there = partial(self._has_taken, peer, overwritten)
                late.append((peer, self._waiting(peer, there, following)))
        return late

    def begin(self, message: bytes) -> Exchange:
        """Write this rank's message of the next exchange, at most `ROOM` bytes."""
        self._count += 1
        exchange = Exchange(self._count, message)
        self._open.append(exchange)
        self._write(_FIRST + self._count % SLOTS * _SLOT, exchange.record)
        return exchange

    def awaited(self, exchange: Exchange) -> list[tuple[int, Awaited]]:
        """What is still to be waited for, with its rank, until an exchange has all messages. Raises RuntimeError where
        this process has no channel any longer."""
        return self._missing(exchange.number)

    def give_up(self) -> None:
        """Take part in nothing more, as a rank that has waited in vain; others hear of it that still wait for it."""
        self._leave(self._open[0].number if self._open else self._count + 1)

    def close(self, why: str = "its process group has ended") -> None:
        """Give the memory back. Others that wait for this rank's next message hear of it."""
        self._leave(self._count + 1)
        if self._memory is not None:
            self._memory.close()
            self.forget(why)

    def forget(self, why: str) -> None:
        """Have no memory any longer, and say why."""
        self._memory, self._closed = None, why

    def _missing(self, last: int) -> list[tuple[int, Awaited]]:
        """What is still to be waited for of all exchanges up to one."""
        late = []
        for exchange in tuple(self._open):
            if exchange.number > last:
                break
            for peer in self._others:
                if not self._take(exchange, peer):
                    there = partial(self._take, exchange, peer)
                    late.append((peer, self._waiting(peer, there, exchange.number)))
        return late

    def _waiting(self, peer: int, there: Callable[[], bool], number: int) -> Awaited:
        return Awaited(there, partial(self._gone, peer, number), lambda: self._processes[peer].alive)

    def _take(self, exchange: Exchange, peer: int) -> bool:
        """Take a rank's message if it is there; tell that an exchange has been taken when it was the last one."""
        if peer in exchange.found:
            return True
        at = peer * _AREA + _FIRST + exchange.number % SLOTS * _SLOT
        if self._read(at, len(exchange.record)) == exchange.record:
            message = exchange.message
        else:
            found = self._content(at)
            if found is None or found[0] != exchange.number:
                return False
            message = found[1]
        if self._has_left(peer, exchange.number):  # it has raised what this rank would not hear of
            return False
        exchange.found[peer] = message
        while self._open and len(self._open[0].found) == len(self._others):
            self._write(_TAKEN, _record(self._open.popleft().number))
        return True

    def _has_taken(self, peer: int, number: int) -> bool:
        found = self._content(peer * _AREA + _TAKEN)
        return found is not None and found[0] >= number

    def _has_left(self, peer: int, number: int) -> bool:
        """Whether a rank takes no part in an exchange."""
        at = peer * _AREA + _LEFT
        if self._read(at, _BEGIN) == _NEVER:
            return False
        found = self._content(at)
        return found is not None and 0 < found[0] <= number

    def _gone(self, peer: int, number: int) -> str:
        return "it has given up, or its process group has ended" if self._has_left(peer, number) else ""

    def _leave(self, number: int) -> None:
        if self._memory is not None and not self._left:
            self._left = True
            self._write(_LEFT, _record(number))

    def _write(self, at: int, record: bytes) -> None:
        self._memory[self._own + at : self._own + at + len(record)] = record

    def _read(self, at: int, size: int) -> bytes:
        if self._memory is None:
            raise RuntimeError(self._closed)
        return self._memory[at : at + size]

    def _content(self, at: int) -> tuple[int, bytes] | None:
        """The number and the message of a record; None where it is half written."""
        head = self._read(at, _BEGIN)
        number, size = _HEAD.unpack_from(head)
        if size > ROOM:
            return None
        message = self._read(at + _BEGIN, size)
        return (number, message) if _checked(head[: _HEAD.size], message) == head[_HEAD.size :] else None


def _record(number: int, message: bytes = b"") -> bytes:
    head = _HEAD.pack(number, len(message))
    return head + _checked(head, message) + message


def _checked(head: bytes, message: bytes) -> bytes:
    return _CHECK.pack(zlib.crc32(message, zlib.crc32(head)))


_NEVER = _record(0)  # of a rank that has left nothing out


def opened(gather: Gather, rank: int, size: int) -> Channel:
    """The channel of a rank; all ranks call it. Raises CannotShare on all of them, and leaves nothing behind."""
    path = _FOLDER / f"tilesmith-{secrets.token_hex(16)}" if rank == 0 else None
    try:
        make = partial(_made, path, size)
        made, each = agreed(gather, make, "make a file in /dev/shm", lambda _: (*this_process(), str(path or "")))
        processes = [Process(*fields[:3]) for fields in each]
        if len({process.host for process in processes}) > 1:
            raise CannotShare("ranks are on several hosts, or in several containers")
        joined = partial(_joined, made, Path(each[0][3]), rank, size)
        memory, tokens = agreed(gather, joined, "map the file", lambda memory: _token(memory, 0).hex())
        if len(set(tokens)) > 1:
            raise CannotShare("ranks of one host map different memory")
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
    agreed(gather, partial(_confirmed, memory, processes), "see what others write, and their processes")
    return Channel(memory, rank, processes)


def _made(path: Path | None, size: int) -> mmap.mmap | None:
    """The memory of rank 0, which gives it a name."""
    if not hasattr(os, "sched_yield") or not _FOLDER.is_dir():
        raise RuntimeError("this system has none")
    if path is None:
        return None
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.closing(os.fdopen(file, "r+b", buffering=0)):
        os.posix_fallocate(file, 0, size * _AREA)  # where there is no room, this says so; a later write would be killed
        memory = mmap.mmap(file, size * _AREA)
    memory[_KNOWN : _KNOWN + _TOKEN] = secrets.token_bytes(_TOKEN)
    return memory


def _joined(made: mmap.mmap | None, path: Path, rank: int, size: int) -> mmap.mmap:
    """The memory of a rank, with an area that tells that it knows rank 0's token."""
    memory = made
    if memory is None:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.closing(os.fdopen(file, "r+b", buffering=0)):
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size != size * _AREA:
                raise RuntimeError("what has its name is another file")
            memory = mmap.mmap(file, size * _AREA)
    own = rank * _AREA
    for at, content in ((_TAKEN, _NEVER), (_LEFT, _NEVER), (_KNOWN, _token(memory, 0))):
        memory[own + at : own + at + len(content)] = content
    return memory


def _confirmed(memory: mmap.mmap, processes: Sequence[Process]) -> None:
    for rank, process in enumerate(processes):
        if _token(memory, rank) != _token(memory, 0):
            raise RuntimeError(f"what rank {rank} wrote is not there")
        if _began(process.pid) != process.began:
            raise RuntimeError(f"rank {rank}'s process {process.pid} is not to be seen")


def _token(memory: mmap.mmap, rank: int) -> bytes:
    at = rank * _AREA + _KNOWN
    return memory[at : at + _TOKEN]


_CHANNELS: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget() -> None:
    """A forked process writes into no area of the one that it was forked from."""
    for channel in list(_CHANNELS):
        channel.forget("this process was forked from one of the group's")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
