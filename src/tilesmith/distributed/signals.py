"""Flags, 32-bit words of memory by which streams of several GPUs wait for each other, and the functions of CUDA's
driver that write and await them.

Exchanges are numbered; `turn` is the number of one. In the memory that all ranks map each rank has, in this order: for
each other rank, the last exchange whose tokens that rank has made ready; for each, the last one that it has read; a
gate for each slot, open but where ranks lose each other; the last exchange whose tokens this rank has copied. The host
reads and writes them only where ranks lose each other (`watch.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

SLOTS = 2  # exchanges that may be under way
OPEN, CLOSED = 0, 1  # a gate


class Driver:
    """Functions of CUDA's driver, for threads that have a context. stream, event: handles; address: of a word on a
    device. unused: by index of a device, handles of its events that nobody holds."""

    def __init__(self) -> None:
        self.unused: dict[int, list[int]] = {}
        library, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        self._copy, self._new_event = library.cuMemcpyAsync, library.cuEventCreate
        self._record, self._wait_event = library.cuEventRecord, library.cuStreamWaitEvent
        self._query = library.cuEventQuery
        # what has 64 bits; ctypes takes no type for an int of 32, which is twice as fast
        for function in (self._write, self._wait, self._record, self._wait_event):
            function.argtypes = [pointer, pointer]
        self._copy.argtypes, self._query.argtypes = [pointer] * 4, [pointer]
        self._fill, self._exchange_mode = library.cuMemsetD8Async, library.cuThreadExchangeStreamCaptureMode
        self._fill.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer]
        self._exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]

    def copy(self, stream: int, to: int, address: int, size: int) -> None:
        """So many bytes, from an address of a device to another one."""
        _check(self._copy(to, address, size, stream), "cuMemcpyAsync")

    def new_event(self) -> int:
        """One of the current device, without a clock."""
        event = ctypes.c_void_p()
        _check(self._new_event(ctypes.byref(event), _NO_CLOCK), "cuEventCreate")
        return event.value

    def record(self, event: int, stream: int) -> None:
        """It happens when the stream comes here."""
        _check(self._record(event, stream), "cuEventRecord")

    def wait_event(self, stream: int, event: int) -> None:
        """Until it happens as it was recorded last."""
        _check(self._wait_event(stream, event, 0), "cuStreamWaitEvent")

    def happened(self, event: int) -> bool:
        """As it was recorded last."""
        code = self._query(event)
        return code != _NOT_READY and not _check(code, "cuEventQuery")

    def write(self, stream: int, address: int, value: int) -> None:
        """Behind what the stream does, with its writes visible."""
        _check(self._write(stream, address, value, 0), "cuStreamWriteValue32")

    def wait(self, stream: int, address: int, value: int) -> None:
        """Until what is there has reached `value`, around 2^32."""
        _check(self._wait(stream, address, value, 0), "cuStreamWaitValue32")

    def wait_equal(self, stream: int, address: int, value: int) -> None:
        """Until `value` is there."""
        _check(self._wait(stream, address, value, 1), "cuStreamWaitValue32")

    def fill(self, stream: int, address: int, size: int) -> None:
        """Set all bits: NaN in each floating dtype."""
        _check(self._fill(address, 0xFF, size, stream), "cuMemsetD8Async")

    def apart_from_captures(self) -> None:
        """What this thread calls from now on invalidates no capture of a CUDA graph in another one."""
        relaxed = ctypes.c_int(2)
        _check(self._exchange_mode(ctypes.byref(relaxed)), "cuThreadExchangeStreamCaptureMode")


_NOT_READY = 600  # CUDA's error
_NO_CLOCK = 2  # a flag of an event


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} gave CUDA error {code}")


@cache
def driver() -> Driver:
    """The one of this process."""
    return Driver()


class Event:
    """A moment of what a stream does. Its handle serves another one when nobody holds it any longer."""

    __slots__ = ("_driver", "_handle", "_unused")

    def __init__(self, driver: Driver, handle: int, unused: list[int]):
        self._driver, self._handle, self._unused = driver, handle, unused

    def wait(self, stream: int) -> None:
        """Let a stream wait for it."""
        self._driver.wait_event(stream, self._handle)

    def query(self) -> bool:
        """Whether it has happened."""
        return self._driver.happened(self._handle)

    def __del__(self) -> None:
        self._unused.append(self._handle)


class Signals:
    """The words of all ranks, seen from one of them.

    pointers: of each rank's words. own: this rank's, int32. index: of its device. `side` is the stream that moves
    tokens. `_aside` is the host's own: it must not queue behind a stream that waits, and streams of one priority may
    share a queue of the hardware. `stream` is the handle of `side`.
    """

    def __init__(self, driver: Driver, rank: int, pointers: Sequence[int], own: Tensor, index: int):
        self.driver, self._rank, self._pointers, self._size = driver, rank, tuple(pointers), len(pointers)
        self._own, self._index, self._mine = own, index, self._pointers[rank]
        self.side = torch.cuda.Stream(index, priority=-1)
        self._aside = torch.cuda.Stream(index, priority=-2)
        self.stream, self._other = self.side.cuda_stream, self._aside.cuda_stream
        self._unused, self._threads = driver.unused.setdefault(index, []), threading.local()
        self._gates = 2 * self._size
        self._copied = self._gates + SLOTS

    @staticmethod
    def words(size: int) -> int:
        """Of each of so many ranks."""
        return 2 * size + SLOTS + 1

    def have_context(self) -> None:
        """Let this thread call the driver, which, unlike CUDA's runtime, makes no context at the first call."""
        if not hasattr(self._threads, "have"):
            self._aside.record_event()
            self._threads.have = True

    def record(self, stream: int) -> Event:
        """This moment of a stream."""
        try:
            handle = self._unused.pop()
        except IndexError:
            handle = self.driver.new_event()
        self.driver.record(handle, stream)
        return Event(self.driver, handle, self._unused)

    # what the stream of transfers does -------------------------------------------------------------------------------

    def raise_for(self, reader: int, turn: int) -> None:
        """Tell a rank that this one's tokens are there."""
        self.driver.write(self.stream, self._pointers[reader] + 4 * self._rank, turn)

    def wait_for(self, source: int, turn: int) -> None:
        """Until a rank's tokens are there."""
        self.driver.wait(self.stream, self._mine + 4 * source, turn)

    def tell_read(self, source: int, turn: int) -> None:
        """Tell a rank that its tokens have been read."""
        self.driver.write(self.stream, self._pointers[source] + 4 * (self._size + self._rank), turn)

    def wait_until_read(self, reader: int, turn: int) -> None:
        """Until a rank has read this one's tokens."""
        self.driver.wait(self.stream, self._mine + 4 * (self._size + reader), turn)

    def pass_gate(self, slot: int, turn: int) -> None:
        """All tokens have been copied. The gate is open unless ranks have lost each other."""
        self.driver.write(self.stream, self._mine + 4 * self._copied, turn)
        self.driver.wait_equal(self.stream, self._mine + 4 * (self._gates + slot), OPEN)

    # what the host does where ranks lose each other -----------------------------------------------------------------

    def begin_thread(self) -> None:
        """Let a thread call what is below."""
        torch.cuda.set_device(self._index)
        self.driver.apart_from_captures()
        self.have_context()

    def late(self, turn: int, sources: Sequence[int], readers: Sequence[int]) -> tuple[list[int], list[int], bool]:
        """Which ranks' tokens are not there, which ranks have not read this one's, and whether all were copied."""
        with torch.cuda.stream(self._aside):
            words = self._own.tolist()
        there = [(word - turn) & 0xFFFFFFFF < 1 << 31 for word in words]
        late = [source for source in sources if not there[source]]
        unread = [reader for reader in readers if not there[self._size + reader]]
        return late, unread, there[self._copied]

    def let_through(self, turn: int, sources: Sequence[int], readers: Sequence[int]) -> None:
        """Write what this rank's stream awaits of others."""
        for word in (*sources, *(self._size + reader for reader in readers)):
            self.driver.write(self._other, self._mine + 4 * word, turn)

    def set_gate(self, slot: int, state: int) -> None:
        """Open or close a gate."""
        self.driver.write(self._other, self._mine + 4 * (self._gates + slot), state)

    def fill(self, memory: Sequence[tuple[int, int]]) -> None:
        """Fill memory, (address, bytes) each, with NaN."""
        for address, size in memory:
            if size:
                self.driver.fill(self._other, address, size)
