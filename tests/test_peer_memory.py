"""Exchanges through memory that ranks share, with threads for ranks and for streams; ranks that die or stall."""

import random
import threading
import time
import weakref

import pytest
import torch

import tilesmith.distributed.peer_memory as peer_memory
import tilesmith.distributed.watch as watch
from peer_ranks import TIMEOUT, copied, current, run, synchronize
from tilesmith import ops
from tilesmith.distributed import Layout, LocalRing, ProcessGroupRing, RingError, context_parallel_attention
from tilesmith.distributed.schedule import Moves, Transfer
from tilesmith.distributed.transport import SYMMETRIC, Peers


@pytest.fixture
def ranks(monkeypatch):
    """run(size, work): work(rank, memory of the rank, gather) in a thread for each rank; what each gave or raised."""
    return lambda size, work, **named: run(monkeypatch, size, work, **named)


def _moved(memory, moves, sent, into, gather, step="keys, step 1 of 1", timeout=TIMEOUT):
    """Post an exchange, let the current stream wait for it."""
    arrival = memory.move(moves, sent, into, step, timeout, gather)
    memory.wait(arrival)
    return arrival


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

    def work(rank, memory, gather):
        for (moves, landed), mine, kind in zip(exchanges, sent, kinds, strict=True):
            many = next((m.heads[1] - m.heads[0] for m in moves if m.target == rank and m.heads), 3)
            into = [torch.zeros(landed[rank], 2, many, d, dtype=k) for d, k in zip((4, 1), kind)]
            _moved(memory, moves, mine[rank], into, gather)
            synchronize()
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

    def work(rank, memory, gather):
        sent, into = torch.arange(5.0 * (1 - rank)).view(-1, 1, 1, 1), torch.zeros(5 * rank, 1, 1, 1)
        _moved(memory, moves, [sent], [into], gather)
        synchronize()
        return into.flatten().tolist()

    assert ranks(2, work) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_an_exchange_that_is_too_large_is_left_to_others(ranks, monkeypatch):
    monkeypatch.setattr(peer_memory, "MOST", 1 << 12)
    moves = Moves([Transfer(0, 1, 0, 0, 2000), Transfer(1, 0, 0, 0, 1)])
    x = [torch.ones(2000, 1, 1, 1)]
    assert ranks(2, lambda rank, memory, gather: memory.move(moves, x, x, "keys", TIMEOUT, gather)) == [None, None]


def test_ranks_that_cannot_share_all_say_which_of_them(ranks):
    def unlike(device):
        return threading.get_ident()

    for problem in ranks(2, lambda *_: None, identity=unlike):
        assert isinstance(problem, peer_memory.CannotShare) and "several hosts" in str(problem)
    calls = iter(range(100))

    def once(*size, **named):
        if next(calls) % 3 < 2:  # of two ranks one fails twice
            raise RuntimeError("out of memory")
        return torch.empty(*size, **named)

    for problem in ranks(2, lambda *_: None, allocate=once):
        assert isinstance(problem, peer_memory.CannotShare) and "cannot allocate: RuntimeError" in str(problem)
