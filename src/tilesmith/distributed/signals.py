"""Flags, 32-bit words of memory by which streams of several GPUs wait for each other, and the functions of CUDA's
driver that write and await them.

Exchanges are numbered; `turn` is the number of one. In the memory that all ranks map each rank has, in this order: for
each other rank, the last exchange whose tokens that rank has made ready; for each, the last one that it has read; a
gate for each slot, open but where ranks lose each other; the last exchange whose tokens this rank has copied. The host
reads and writes them only where ranks lose each other (`watch.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

SLOTS = 2  # exchanges that may be under way
OPEN, CLOSED = 0, 1  # a gate


class Driver:
    """Functions of CUDA's driver. stream: its handle; address: of a word on a device."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._fill, self._exchange_mode = library.cuMemsetD8Async, library.cuThreadExchangeStreamCaptureMode
        self._fill.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
        self._exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]

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


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} gave CUDA error {code}")


@cache
def driver() -> Driver:
    """The one of this process."""
    return Driver()


class Signals:
    """The words of all ranks, seen from one of them.

    pointers: of each rank's words. own: this rank's, int32. index: of its device. `side` is the stream that moves
    tokens. `_aside` is the host's own: it must not queue behind a stream that waits, and streams of one priority may
    share a queue of the hardware.
    """

    def __init__(self, driver: Driver, rank: int, pointers: Sequence[int], own: Tensor, index: int):
        self._driver, self._rank, self._pointers, self._size = driver, rank, tuple(pointers), len(pointers)
        self._own, self._index, self._mine = own, index, self._pointers[rank]
        self.side = torch.cuda.Stream(index, priority=-1)
        self._aside = torch.cuda.Stream(index, priority=-2)
        self._stream, self._other = self.side.cuda_stream, self._aside.cuda_stream
        self._gates = 2 * self._size
        self._copied = self._gates + SLOTS

    @staticmethod
    def words(size: int) -> int:
        """Of each of so many ranks."""
        return 2 * size + SLOTS + 1

    # what the stream of transfers does -------------------------------------------------------------------------------

    def raise_for(self, reader: int, turn: int) -> None:
        """Tell a rank that this one's tokens are there."""
        self._driver.write(self._stream, self._pointers[reader] + 4 * self._rank, turn)

    def wait_for(self, source: int, turn: int) -> None:
        """Until a rank's tokens are there."""
        self._driver.wait(self._stream, self._mine + 4 * source, turn)

    def tell_read(self, source: int, turn: int) -> None:
        """Tell a rank that its tokens have been read."""
        self._driver.write(self._stream, self._pointers[source] + 4 * (self._size + self._rank), turn)

    def wait_until_read(self, reader: int, turn: int) -> None:
        """Until a rank has read this one's tokens."""
        self._driver.wait(self._stream, self._mine + 4 * (self._size + reader), turn)

    def pass_gate(self, slot: int, turn: int) -> None:
        """All tokens have been copied. The gate is open unless ranks have lost each other."""
        self._driver.write(self._stream, self._mine + 4 * self._copied, turn)
        self._driver.wait_equal(self._stream, self._mine + 4 * (self._gates + slot), OPEN)

    # what the host does where ranks lose each other -----------------------------------------------------------------

    def begin_thread(self) -> None:
        """Let a thread call what is below."""
        torch.cuda.set_device(self._index)
        self._driver.apart_from_captures()

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
            self._driver.write(self._other, self._mine + 4 * word, turn)

    def set_gate(self, slot: int, state: int) -> None:
        """Open or close a gate."""
        self._driver.write(self._other, self._mine + 4 * (self._gates + slot), state)

    def fill(self, memory: Sequence[tuple[int, int]]) -> None:
        """Fill memory, (address, bytes) each, with NaN."""
        for address, size in memory:
            if size:
                self._driver.fill(self._other, address, size)
