"""Ranks that share memory, as threads of one process: streams are threads too, in order, which flags and events block.

What peer memory asks of CUDA goes to streams of this file; copies are made when their stream comes to them.
"""

import contextlib
import ctypes
import itertools
import queue
import threading
import time
import types
from typing import ClassVar

import torch
import torch.distributed as dist

import tilesmith.distributed.peer_memory as peer_memory
import tilesmith.distributed.signals as signals

TIMEOUT = 60.0  # seconds: what only a fault takes, on a busy machine too
HELD_UP = -2  # the priority of streams that wait for nothing
_mine = threading.local()


def _word(address):
    return ctypes.c_uint32.from_address(address)


class Stream:
    """Does what it is told, in order, in a thread of its own."""

    known: ClassVar = {}
    numbers = itertools.count(1)

    def __init__(self, device=None, priority=0):
        self.cuda_stream, self.direct = next(self.numbers), priority == HELD_UP
        self.known[self.cuda_stream] = self
        self.todo = queue.SimpleQueue()
        _streams().append(self)
        if not self.direct:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with torch.no_grad():
            while (one := self.todo.get()) is not None:
                one()

    def do(self, work):
        work() if self.direct else self.todo.put(work)

    def record_event(self):
        """What is set when the stream comes here."""
        happened = threading.Event()
        self.do(happened.set)
        return happened


def _streams():
    if not hasattr(_mine, "streams"):
        _mine.streams = []
    return _mine.streams


def current(index=None):
    """The current stream of this thread."""
    if not hasattr(_mine, "current"):
        _mine.current = Stream()
    return _mine.current


@contextlib.contextmanager
def within(stream):
    before, _mine.current = current(), stream
    try:
        yield
    finally:
        _mine.current = before


@contextlib.contextmanager
def waiting():
    """Meanwhile this thread's rank waits, and may be told that another one is lost.

    Before, it is not told: a thread that lags while it posts would find the rank lost that it was about to wait for.
    """
    _mine.waits.set()
    try:
        yield
    finally:
        _mine.waits.clear()


def synchronize(device=None, limit=TIMEOUT):
    """Wait for all streams of this thread's rank."""
    with waiting():
        for stream in list(_streams()):
            assert stream.record_event().wait(limit), "a stream waits for ever"


def until(condition):
    """Wait for what another thread does."""
    end = time.monotonic() + TIMEOUT
    with waiting():
        while not condition():
            assert time.monotonic() < end, "what was waited for does not come"
            time.sleep(0.01)


class _Torch:
    """torch, without a GPU."""

    cuda = types.SimpleNamespace(
        Stream=Stream, stream=within, synchronize=synchronize, device=lambda d: contextlib.nullcontext(),
        empty_cache=lambda: None, set_device=lambda index: None,
    )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)


class Group:
    """A process group, seen from one of its ranks."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank

    def get_group_store(self):
        return self.world.store


class World:
    """What ranks of one host have in common, and the driver's functions on its memory."""

    def __init__(self, size):
        self.size, self.changed, self.store = size, threading.Condition(), dist.HashStore()
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.values, self.mapped = [None] * size, []
        self.waits = [threading.Event() for _ in range(size)]  # of each rank, set while it waits for others
        self.unused, self.events = {}, []
        self.happening = threading.Condition()

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def _write(self, address, value):
        with self.changed:
            _word(address).value = value
            self.changed.notify_all()

    def _wait(self, there):
        with self.changed:
            self.changed.wait_for(there, 3 * TIMEOUT)

    def write(self, stream, address, value):
        Stream.known[stream].do(lambda: self._write(address, value))

    def wait(self, stream, address, value):
        there = lambda: (_word(address).value - value) & 0xFFFFFFFF < 1 << 31  # noqa: E731
        Stream.known[stream].do(lambda: self._wait(there))

    def wait_equal(self, stream, address, value):
        Stream.known[stream].do(lambda: self._wait(lambda: _word(address).value == value))

    def fill(self, stream, address, size):
        Stream.known[stream].do(lambda: ctypes.memset(address, 0xFF, size))

    def copy(self, stream, to, address, size):
        Stream.known[stream].do(lambda: ctypes.memmove(to, address, size))

    def new_event(self):
        """Its handle; of each how often it was recorded, and how often of these it has happened."""
        with self.happening:
            self.events.append([0, 0])
            return len(self.events) - 1

    def record(self, event, stream):
        one = self.events[event]
        one[0] += 1

        def happen(turn=one[0]):
            with self.happening:
                one[1] = turn
                self.happening.notify_all()

        Stream.known[stream].do(happen)

    def wait_event(self, stream, event):
        one, turn = self.events[event], self.events[event][0]

        def wait():
            with self.happening:
                self.happening.wait_for(lambda: one[1] >= turn, TIMEOUT)

        Stream.known[stream].do(wait)

    def happened(self, event):
        recorded, happened = self.events[event]
        return recorded == happened

    def apart_from_captures(self):
        pass

    def rendezvous(self, made, group):
        memory = self.gather(group.rank, made)
        self.mapped.append(memory)  # as mappings do, whoever gives it back

        def get_buffer(rank, shape, dtype, first):
            return memory[rank].view(dtype)[first : first + torch.Size(shape).numel()].view(shape)

        return types.SimpleNamespace(buffer_ptrs=[x.data_ptr() for x in memory], get_buffer=get_buffer)


def copied(into, x):
    """`into.copy_(x)` on the current stream."""
    current().do(lambda: into.copy_(x))


def kept_until(stream, x):
    """`x.record_stream(stream)`: the stream holds the tensor until it comes to this."""
    stream.do(lambda: x)


def packed(sent, heads, into, runs, copy=peer_memory.copy_runs):
    """`peer_memory.copy_runs` on the current stream."""
    current().do(lambda: copy(sent, heads, into, runs))


def _told_who_waits(told):
    """Finds out who is lost once the rank waits that lost it."""

    def later(group, rank, *given):
        group.world.waits[rank].wait(TIMEOUT)
        return told(group, rank, *given)

    return later


class _KeptStreams:
    """torch for `signals` on a GPU of all ranks, of which each has the same streams in all tests. New ones may share a
    queue of the hardware with those of the other rank, where one that waits for a flag keeps it from being raised."""

    made: ClassVar = {}

    def __init__(self, module=torch):
        self._module = module

    def __getattr__(self, name):
        if name == "Stream":
            return self._stream
        found = getattr(self._module, name)
        return _KeptStreams(found) if name == "cuda" else found

    def _stream(self, device, priority=0):
        key = _mine.rank, priority
        if key not in self.made:
            self.made[key] = torch.cuda.Stream(device, priority=priority)
        return self.made[key]


def run(monkeypatch, size, work, allocate=torch.empty, identity=lambda device: "host", gpu=None):
    """work(rank, memory of the rank, gather), in a thread for each rank; what each returned or raised. gpu: the device
    whose own streams, and whose driver, all ranks use."""
    world = World(size)
    symmetric = types.SimpleNamespace(empty=allocate, rendezvous=world.rendezvous)
    monkeypatch.setattr(peer_memory, "symmetric_memory", lambda: symmetric)
    if gpu is not None:
        monkeypatch.setattr(signals, "torch", _KeptStreams())
    else:
        for module in (peer_memory, signals):
            monkeypatch.setattr(module, "torch", _Torch())
        monkeypatch.setattr(peer_memory, "driver", lambda: world)
        monkeypatch.setattr(peer_memory, "_identity", identity)
        monkeypatch.setattr(peer_memory, "current_device", lambda: None)
        monkeypatch.setattr(peer_memory, "raw_stream", lambda index: current().cuda_stream)
        monkeypatch.setattr(peer_memory, "copy_runs", packed)
        monkeypatch.setattr(peer_memory, "_kept_until", kept_until)
        monkeypatch.setattr(peer_memory, "told", _told_who_waits(peer_memory.told))
    ask = {"get_rank": lambda group: group.rank, "get_world_size": lambda group: size}
    monkeypatch.setattr(peer_memory, "dist", types.SimpleNamespace(**ask))
    found = [None] * size
    groups = [Group(world, rank) for rank in range(size)]

    def begin(rank):
        _mine.waits, _mine.rank = world.waits[rank], rank
        own = contextlib.nullcontext() if gpu is None else torch.cuda.stream(_KeptStreams().Stream(gpu))
        try:
            with own:
                gather = lambda value: world.gather(rank, value)  # noqa: E731
                memory = peer_memory.PeerMemory(groups[rank], gpu or torch.device("cpu"), gather)
                found[rank] = work(rank, memory, gather)
        except Exception as problem:
            found[rank] = problem
        finally:
            for stream in _streams():
                stream.todo.put(None)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    return found
