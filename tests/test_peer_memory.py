"""Exchanges through memory that ranks share, with threads for ranks: streams are in order there, and flags block."""

import contextlib
import random
import threading
import types

import pytest
import torch

import tilesmith.distributed.peer_memory as peer_memory
from tilesmith.distributed.schedule import Moves, Transfer

TIMEOUT = 20.0


class _World:
    """Everything that ranks of one host have in common."""

    def __init__(self, size):
        self.size, self.changed = size, threading.Condition()
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.values, self.flags = [None] * size, {}

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def write(self, stream, address, value):
        with self.changed:
            self.flags[address] = value
            self.changed.notify_all()

    def wait(self, stream, address, value):
        with self.changed:
            assert self.changed.wait_for(lambda: self.flags.get(address, 0) >= value, TIMEOUT), "a flag never came"

    def rendezvous(self, made, group):
        memory = self.gather(group.rank, made)

        def get_buffer(rank, shape, dtype, first):
            return memory[rank].view(dtype)[first : first + torch.Size(shape).numel()].view(shape)

        return types.SimpleNamespace(buffer_ptrs=[x.data_ptr() for x in memory], get_buffer=get_buffer)


class _Stream:
    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def record_event(self):
        return None

    def wait_event(self, event):
        pass


class _Torch:
    """torch, without a GPU."""

    cuda = types.SimpleNamespace(
        Stream=_Stream, Event=object, current_stream=lambda index: _Stream(), stream=lambda s: contextlib.nullcontext(),
        device=lambda d: contextlib.nullcontext(), synchronize=lambda d: None, empty_cache=lambda: None,
    )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def ranks(monkeypatch):
    """run(size, work): work(rank, memory of the rank), in a thread for each rank; what each returned or raised."""

    def run(size, work, allocate=torch.empty, identity=lambda device: "host"):
        world = _World(size)
        symmetric = types.SimpleNamespace(empty=allocate, rendezvous=world.rendezvous)
        monkeypatch.setattr(peer_memory, "torch", _Torch())
        monkeypatch.setattr(peer_memory, "_symmetric_memory", lambda: symmetric)
        monkeypatch.setattr(peer_memory, "_driver", lambda: world)
        monkeypatch.setattr(peer_memory, "_identity", identity)
        ask = {"get_rank": lambda group: group.rank, "get_world_size": lambda group: size}
        monkeypatch.setattr(peer_memory, "dist", types.SimpleNamespace(**ask))
        found = [None] * size

        def begin(rank):
            try:
                group = types.SimpleNamespace(rank=rank)
                gather = lambda value: world.gather(rank, value)  # noqa: E731
                found[rank] = work(rank, peer_memory.PeerMemory(group, torch.device("cpu"), gather))
            except Exception as problem:
                found[rank] = problem

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT)
        return found

    return run


def _drawn(r, size, tokens):
    """Moves of runs that do not overlap where they land, some of them of some heads."""
    landed, moves = [0] * size, []
    for _ in range(r.randint(1, 8)):
        source, target = r.sample(range(size), 2)
        count = r.randint(1, tokens)
        heads = r.choice((None, (0, 2), (1, 3)))
        if heads is None and landed[target] and any(m.heads for m in moves if m.target == target):
            continue
        if heads is not None and any(m.heads is None for m in moves if m.target == target):
            continue
        moves.append(Transfer(source, target, r.randint(0, tokens - count), landed[target], count, heads))
        landed[target] += count
    return Moves(moves), landed


@pytest.mark.parametrize("size", [2, 3])
def test_what_arrives_is_what_was_sent(ranks, monkeypatch, size):
    """Many exchanges of other sizes behind each other, also as memory grows."""
    monkeypatch.setattr(peer_memory, "LEAST", 256)
    r = random.Random(size)
    exchanges = [_drawn(r, size, r.choice((1, 5, 40))) for _ in range(40)]
    exchanges += exchanges[:10]  # kept, and of a slot that has another content now
    kinds = [r.sample((torch.float32, torch.bfloat16, torch.int64), 2) for _ in exchanges]
    torch.manual_seed(size)
    sent = [
        [[(torch.randn(40, 2, 3, d) * 9).to(k) for d, k in zip((4, 1), kind)] for _ in range(size)] for kind in kinds
    ]

    def work(rank, memory):
        for (moves, landed), mine, kind in zip(exchanges, sent, kinds, strict=True):
            many = next((m.heads[1] - m.heads[0] for m in moves if m.target == rank and m.heads), 3)
            into = [torch.zeros(landed[rank], 2, many, d, dtype=k) for d, k in zip((4, 1), kind)]
            memory.wait(memory.move(moves, mine[rank], into))
            for move in moves:
                if move.target == rank:
                    heads = slice(None) if move.heads is None else slice(*move.heads)
                    for x, theirs in zip(into, mine[move.source]):
                        there = theirs[move.at : move.at + move.tokens, :, heads]
                        assert torch.equal(x[move.to : move.to + move.tokens], there)
        return "right"

    assert ranks(size, work) == ["right"] * size


def test_a_rank_may_hold_no_tokens(ranks):
    moves = Moves([Transfer(0, 1, 0, 0, 5)])

    def work(rank, memory):
        sent, into = torch.arange(5.0 * (1 - rank)).view(-1, 1, 1, 1), torch.zeros(5 * rank, 1, 1, 1)
        memory.wait(memory.move(moves, [sent], [into]))
        return into.flatten().tolist()

    assert ranks(2, work) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_an_exchange_that_is_too_large_is_left_to_others(ranks, monkeypatch):
    monkeypatch.setattr(peer_memory, "MOST", 1 << 12)
    moves = Moves([Transfer(0, 1, 0, 0, 2000), Transfer(1, 0, 0, 0, 1)])
    work = lambda rank, memory: memory.move(moves, [torch.ones(2000, 1, 1, 1)], [torch.ones(2000, 1, 1, 1)])  # noqa: E731
    assert ranks(2, work) == [None, None]


def test_ranks_that_cannot_share_all_say_which_of_them(ranks):
    def unlike(device):
        return threading.get_ident()

    for problem in ranks(2, lambda rank, memory: None, identity=unlike):
        assert isinstance(problem, peer_memory.CannotShare) and "several hosts" in str(problem)
    calls = iter(range(100))

    def once(*size, **named):
        if next(calls) % 3 < 2:  # of two ranks one fails twice
            raise RuntimeError("out of memory")
        return torch.empty(*size, **named)

    for problem in ranks(2, lambda rank, memory: None, allocate=once):
        assert isinstance(problem, peer_memory.CannotShare) and "cannot allocate: RuntimeError" in str(problem)
