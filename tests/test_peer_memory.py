"""Exchanges through memory that ranks share, with threads for ranks and for streams; ranks that die or stall."""

import ctypes
import random
import threading
import time
import types
import weakref

import pytest
import torch

import peer_ranks
import tilesmith.distributed.lost as lost
import tilesmith.distributed.peer_memory as peer_memory
import tilesmith.distributed.prepared as prepared
import tilesmith.distributed.ring as ring_module
import tilesmith.distributed.transport as transport_module
import tilesmith.distributed.watch as watch
from peer_ranks import TIMEOUT, Stream, World, copied, current, packed, run, synchronize, until, waiting, within
from tilesmith import ops
from tilesmith.distributed import Layout, LocalRing, ProcessGroupRing, RingError, context_parallel_attention
from tilesmith.distributed.kernels import KERNELS
from tilesmith.distributed.schedule import Moves, Transfer
from tilesmith.distributed.signals import SLOTS
from tilesmith.distributed.tokens import by_head, by_token
from tilesmith.distributed.transport import SYMMETRIC, Peers


@pytest.fixture
def ranks(monkeypatch):
    """run(size, work): work(rank, memory of the rank, gather) in a thread for each rank; what each gave or raised."""
    return lambda size, work, **named: run(monkeypatch, size, work, **named)


def _moved(memory, moves, sent, into, gather, step="keys, step 1 of 1", timeout=TIMEOUT):
    """Post an exchange of tensors [T, B, heads, D], let the current stream wait for it."""
    _allocated.append(into)
    arrival = _begun(memory, moves, sent, into, step, timeout, gather)()
    memory.wait(arrival)
    return arrival


def _begun(memory, moves, sent, into, *given):
    """`memory.begin` of tensors [T, B, heads, D]."""
    return memory.begin(moves, *([by_head(x) for x in tensors] for tensors in (sent, into)), *given)


_allocated = []  # what a stream may still write; PyTorch's allocator for GPUs keeps memory, too


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


def test_a_batch_without_rows_and_heads_without_columns(ranks, monkeypatch):
    """Nothing is copied, and nobody waits in vain."""
    copies = []
    monkeypatch.setattr(World, "copy", lambda self, *given: copies.append(given))

    def work(rank, memory, gather):
        for shape in ((8, 0, 2, 3), (8, 1, 2, 0)):
            _moved(memory, BOTH, [torch.ones(shape)], [torch.ones(shape)], gather)
        synchronize()
        return "right"

    assert ranks(2, work) == ["right"] * 2 and not copies


def test_an_exchange_that_is_too_large_is_left_to_others(ranks, monkeypatch):
    monkeypatch.setattr(peer_memory, "MOST", 1 << 12)
    moves = Moves([Transfer(0, 1, 0, 0, 2000), Transfer(1, 0, 0, 0, 1)])
    x = [torch.ones(2000, 1, 1, 1)]
    assert ranks(2, lambda rank, memory, gather: _begun(memory, moves, x, x, "keys", TIMEOUT, gather)) == [None, None]


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


def test_a_driver_without_waits_is_told_before_anything_waits(ranks, monkeypatch):
    """As on devices that lack them; all ranks then know."""

    def lacking(self, stream, address, value):
        raise RuntimeError("cuStreamWaitValue32 gave CUDA error 801")

    monkeypatch.setattr(World, "wait_equal", lacking)
    for problem in ranks(2, lambda *_: None):
        assert isinstance(problem, peer_memory.CannotShare)
        assert "rank 0 cannot let streams wait for memory: RuntimeError: cuStreamWaitValue32 gave" in str(problem)


def _kinds(tensors):
    """Of tensors [T, B, heads, D]."""
    return peer_memory.kinds_of([by_head(x) for x in tensors])


ONE_WAY = Moves([Transfer(0, 1, 0, 0, 8)])


def test_what_is_written_into_a_reservation_is_sent_without_a_copy(ranks, monkeypatch):
    packs = []
    monkeypatch.setattr(peer_ranks, "packed", lambda *given: packs.append(given))

    def work(rank, memory, gather):
        found = []
        for i in range(4):
            into = [torch.zeros(8, 2, 3, d) for d in (4, 1)]
            mine = memory.reserve(BOTH, _kinds(into))
            for x in mine:
                copied(x, torch.full_like(x, 10.0 * i + rank))
            _moved(memory, BOTH, [by_token(x) for x in mine], into, gather)
            synchronize()
            found.append([x.unique().tolist() for x in into])
        return found

    for rank, found in enumerate(ranks(2, work)):
        assert found == [[[10.0 * i + 1 - rank]] * 2 for i in range(4)]
    assert not packs


def test_a_reservation_waits_until_its_memory_was_read(ranks):
    """The exchange before last had it, and its reader is late."""

    def work(rank, memory, gather):
        found = []
        for i in range(6):
            sent, into = _tensors(i), _tensors(-1)
            if rank == 1:
                time.sleep(SHORT / 4)
                _moved(memory, ONE_WAY, sent, into, gather)
                found.append(into)
                continue
            mine = memory.reserve(ONE_WAY, _kinds(sent)) if i > 1 else None
            for x in mine or ():
                copied(x, torch.full_like(x, i + 1.0))
            sent = sent if mine is None else [by_token(x) for x in mine]
            _begun(memory, ONE_WAY, sent, [], "keys", TIMEOUT, gather)()
        synchronize()
        return [x.unique().tolist() for (x,) in found]

    assert ranks(2, work)[1] == [[i + 1.0] for i in range(6)]


def test_a_reservation_that_is_not_used_holds_nobody_up_and_spoils_nothing(ranks):
    """As where a call fails; the next exchange may be another stream's."""

    def work(rank, memory, gather):
        into = torch.zeros(8, 1, 2, 3)
        if rank == 1:
            time.sleep(SHORT)
            _moved(memory, BOTH, _tensors(1), [into], gather)
        else:
            (mine,) = memory.reserve(BOTH, _kinds(_tensors(0)))
            current().do(lambda: time.sleep(SHORT / 2))
            copied(mine, torch.full_like(mine, 9.0))
            with within(Stream()):
                _moved(memory, BOTH, _tensors(0), [into], gather)
        synchronize()
        return bool((into == 2.0 - rank).all())

    assert ranks(2, work) == [True, True]


def test_nothing_is_reserved_where_memory_will_change_or_not_all_is_sent(ranks, monkeypatch):
    monkeypatch.setattr(peer_memory, "LEAST", 256)
    large = [torch.ones(2000, 1, 1, 1)]
    some = Moves([Transfer(0, 1, 1, 0, 1000), Transfer(1, 0, 0, 0, 1)])

    def work(rank, memory, gather):
        whole = Moves([Transfer(0, 1, 0, 0, 2000), Transfer(1, 0, 0, 0, 2000)])
        before = memory.reserve(whole, _kinds(large))
        _moved(memory, whole, large, [torch.zeros(2000, 1, 1, 1)], gather)
        after = memory.reserve(whole, _kinds(large))
        return before is None, after is None, memory.reserve(some, _kinds(large)) is None

    assert ranks(2, work) == [(True, False, True)] * 2


# ranks that are lost ------------------------------------------------------------------------------------------------

SHORT = 0.4  # seconds: the time limit where a rank is lost
BOTH = Moves([Transfer(0, 1, 0, 0, 8), Transfer(1, 0, 0, 0, 8)])


def _tensors(rank, tokens=8, dtype=torch.float32):
    return [torch.full((tokens, 1, 2, 3), float(rank + 1), dtype=dtype)]


def _read(into):
    """What the current stream finds in a tensor, when it comes to it."""
    found = torch.zeros_like(into)
    copied(found, into)
    return found


@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 3])
def test_a_rank_that_dies_leaves_nan_and_an_error(ranks, before, behind):
    """Its peer goes on in time, with exchanges posted behind the one that was lost; NaN comes before the arrival."""

    def work(rank, memory, gather):
        for _ in range(before):
            into = torch.zeros(8, 1, 2, 3)
            _moved(memory, BOTH, _tensors(rank), [into], gather)
            synchronize()
            assert (into == 2.0 - rank).all()
        if rank == 1:
            return "dead"
        began, found = time.monotonic(), []
        for i in range(1 + behind):
            into = torch.zeros(8, 1, 2, 3)
            _moved(memory, BOTH, _tensors(0), [into], gather, f"keys, step {i + 1} of 9", SHORT)
            found.append(_read(into))
        synchronize()
        assert time.monotonic() - began >= SHORT
        assert all(x.isnan().all() for x in found)
        for _ in range(2):
            with pytest.raises(RingError, match=r"rank 0: keys, step 1 of 9: rank 1 did not answer .*limit 0.4 s"):
                _begun(memory, BOTH, _tensors(0), _tensors(0), "keys", SHORT, gather)
        assert memory.idle and memory.held
        memory.close()
        assert memory.held == 0 and "rank 1" in memory.broken
        return "right"

    assert ranks(2, work) == ["right", "dead"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_in_each_dtype(ranks, dtype):
    def work(rank, memory, gather):
        into = _tensors(7, dtype=dtype)
        if rank == 0:
            _moved(memory, BOTH, _tensors(0, dtype=dtype), into, gather, timeout=SHORT)
            synchronize()
        return bool(into[0].isnan().all())

    assert ranks(2, work) == [True, False]


def test_a_rank_that_never_reads(ranks):
    """Its peer's next exchange would wait for it. What the peer itself received stays."""
    moves = Moves([Transfer(0, 1, 0, 0, 8), Transfer(1, 0, 0, 0, 8)])
    only = Moves([Transfer(0, 1, 0, 0, 8)])

    def work(rank, memory, gather):
        into = torch.zeros(8, 1, 2, 3)
        _moved(memory, moves, _tensors(rank), [into], gather)
        if rank == 1:
            return None
        _moved(memory, only, _tensors(0), [], gather, "gradients of keys", SHORT)
        synchronize()
        assert (into == 2.0).all()
        return memory.broken

    said = ranks(2, work)[0]
    assert "gradients of keys: rank 1 did not answer" in said and "did not read" in said


def test_a_rank_that_comes_late_is_not_held_up_and_is_not_wrong(ranks):
    """It finds what its peer had sent, and never values that nobody sent."""
    given_up = threading.Event()

    def work(rank, memory, gather):
        if rank == 1:
            assert given_up.wait(TIMEOUT)
        into, found = torch.zeros(8, 1, 2, 3), []
        for _ in range(2):
            _moved(memory, BOTH, _tensors(rank), [into], gather, timeout=SHORT)
            found.append(_read(into))
        synchronize()
        given_up.set()
        return found

    lost, late = ranks(2, work)
    assert all(x.isnan().all() for x in lost)
    assert all((x == 1.0).all() for x in late)


def test_only_ranks_that_need_the_lost_one_lose_anything(ranks):
    """Rank 2 reads rank 0, which waits in vain for rank 1; rank 2's memory is never written by others."""
    moves = Moves([Transfer(1, 0, 0, 0, 8), Transfer(0, 2, 0, 0, 8)])

    def work(rank, memory, gather):
        if rank == 1:
            return None
        into = torch.zeros(8, 1, 2, 3)
        _moved(memory, moves, _tensors(rank), [into], gather, timeout=TIMEOUT if rank else SHORT)
        synchronize()
        return into, memory.broken

    (first, broken), _, (third, fine) = ranks(3, work)
    assert first.isnan().all() and "rank 1 did not answer" in broken
    assert (third == 1.0).all() and not fine


def test_ranks_that_wait_for_one_that_gave_up_name_the_one_that_is_lost(ranks, monkeypatch):
    """In a ring of three, two ranks are held up by the third; one of them only by way of the other."""
    monkeypatch.setattr(lost, "PATIENCE", 2.0)  # for a look into the store, by a thread of a busy machine
    chain, asked = Moves([Transfer(2, 0, 0, 0, 8), Transfer(0, 1, 0, 0, 8)]), threading.Event()

    def told(group, rank, *given):
        """Rank 1 asks when rank 0 has told its loss, and before rank 0 lets its stream go on."""
        if rank == 1:
            group.get_group_store().wait([f"{lost._KEY}/0"])
        said = lost.told(group, rank, *given)
        asked.set() if rank == 1 else asked.wait(TIMEOUT)
        return said

    def work(rank, memory, gather):
        if rank == 2:
            return None
        for i in range(2):  # the second exchange of rank 0 stands behind its first
            limit, into = SHORT if rank == 0 or i == 1 else TIMEOUT, [torch.zeros(8, 1, 2, 3)]
            _moved(memory, chain, _tensors(rank), into, gather, f"keys, step {i + 1}", limit)
        synchronize()
        return memory.broken

    monkeypatch.setattr(peer_memory, "told", told)
    first, second, _ = ranks(3, work)
    assert first.startswith("rank 0: keys, step 1: rank 2 did not answer")
    assert second.startswith("rank 1: keys, step 2: rank 0 gave up: in 'keys, step 1' of rank 0 rank 2 did not answer")


class _Clock:
    """Stands in for `time` in the watch: its clock goes on as a test says."""

    now, sleep = 0.0, staticmethod(time.sleep)

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(watch, "time", _Clock())
    return watch.time


def test_a_gpu_that_is_busy_itself_is_not_late(ranks, monkeypatch, clock):
    """Time counts from when a stream comes to wait for others, not from when the host posts."""
    gate, looks = threading.Event(), [0, 0]

    def looked(self, look=watch.Watch._looked):
        looks[self.signals._rank] += 1
        return look(self)

    def work(rank, memory, gather):
        into = torch.zeros(8, 1, 2, 3)
        current().do(lambda: gate.wait(TIMEOUT))
        _moved(memory, BOTH, _tensors(rank), [into], gather, timeout=SHORT)
        gather("posted")
        if rank == 1:
            for _ in range(3):
                clock.now += SHORT
                looks[:] = 0, 0
                until(lambda: min(looks) > 1)  # both have seen the new time
            gate.set()
        synchronize()
        return memory.broken, bool((into == 2.0 - rank).all())

    monkeypatch.setattr(watch.Watch, "_looked", looked)
    assert ranks(2, work) == [("", True)] * 2


def test_a_rank_is_lost_when_it_has_kept_others_waiting_for_the_time_limit(clock):
    """And not a moment before; the last look is no later."""
    begun, never = types.SimpleNamespace(query=lambda: True), types.SimpleNamespace(query=lambda: False)
    signals = types.SimpleNamespace(late=lambda *given: ([1], [], False))
    found = watch.Watch(signals, lambda *given: f"lost: {given}")
    found._let_through = lambda: None
    found._under_way.append(watch.UnderWay(1, 0, "keys", 8.0, begun, never, never, (1,), (), ()))
    clock.now = 5.0
    for now, pause in ((5.0, 0.5), (12.25, 0.5), (12.75, 0.25), (12.99, 0.01)):
        clock.now = now
        assert found._looked() == pytest.approx(pause) and not found.broken
    clock.now = 13.0
    assert found._looked() == 0.0 and found.broken == "lost: (1, 'keys', 'it sent nothing', 8.0, 8.0)"


def test_the_watch_sleeps_where_nothing_is_under_way_and_ends(ranks, monkeypatch):
    monkeypatch.setattr(watch, "PERIOD", 0.02)

    def work(rank, memory, gather):
        watching = memory._watch
        assert watching._thread is None  # nothing was exchanged yet
        for _ in range(3):
            _moved(memory, BOTH, _tensors(rank), _tensors(rank), gather)
            synchronize()
            until(lambda: watching._asleep)
            assert watching._asleep and watching._thread.is_alive() and watching.idle
        arrival = memory.begin(
            BOTH, *([by_head(x) for x in _tensors(rank)] for _ in range(2)), "keys", TIMEOUT, gather
        )()
        synchronize()
        memory.close()
        watching._thread.join(TIMEOUT)
        assert memory.held == 0 and not watching._thread.is_alive()
        memory.wait(arrival)  # all of it has arrived
        _moved(memory, BOTH, _tensors(rank), into := _tensors(rank), gather)  # memory is made anew
        synchronize()
        assert memory.held and (into[0] == 2.0 - rank).all()
        return "right"

    assert ranks(2, work) == ["right"] * 2


@pytest.mark.parametrize("begun", [True, False])
def test_the_end_of_a_process_waits_no_longer_than_the_time_limit(ranks, clock, begun):
    """Also for a GPU that is held up by something else."""
    held_up = threading.Event()

    def sleep(seconds):
        time.sleep(seconds)
        clock.now += seconds * (threading.current_thread() is waits)

    def work(rank, memory, gather):
        nonlocal waits
        if rank == 1:
            return None
        waits = threading.current_thread()
        if not begun:
            current().do(lambda: held_up.wait(TIMEOUT))
        _moved(memory, BOTH, _tensors(0), [torch.zeros(8, 1, 2, 3)], gather, timeout=SHORT)
        thread = memory._watch._thread
        with waiting():
            memory._watch.end()  # what finalize calls
        thread.join(TIMEOUT)
        held_up.set()
        return clock.now, thread.is_alive(), bool(memory.broken)

    waits, clock.sleep = None, sleep
    took, alive, lost_one = ranks(2, work)[0]
    assert SHORT <= took < SHORT + 2 and not alive and lost_one == begun


def test_memory_that_nobody_uses_ends_its_watch(ranks):
    def work(rank, memory, gather):
        _moved(memory, BOTH, _tensors(rank), _tensors(rank), gather)
        synchronize()
        return memory._watch._thread

    for thread in ranks(2, work):
        thread.join(TIMEOUT)
        assert not thread.is_alive()


class _Ring(ProcessGroupRing):
    """A rank of a group that compares through the test. Rank 1 vanishes at its exchange number `dies`, whose time limit
    is short."""

    def __init__(self, rank, memory, gather, size=2, dies=-1):
        self._group, self.size, self.rank, self.ranks = memory._group, size, rank, (rank,)
        self._limit, self.asked, self._on_gpus = TIMEOUT, "auto", False
        self._peers, self._told, self._dies = Peers(), gather, dies
        self._peers.memory = memory

    group = property(lambda self: self)

    def _through(self, device):
        return SYMMETRIC

    def _exchanged(self, mine, step):
        told = self._told(len(mine).to_bytes(4, "little") + mine)
        return told[self.rank], lambda: {r: raw for r, raw in enumerate(told) if r != self.rank}

    def begin(self, *given):
        self._dies -= 1
        if self._dies == -1:
            if self.rank == 1:
                raise InterruptedError
            self._limit = SHORT
        return super().begin(*given)

    def reserve(self, *given):
        found = super().reserve(*given)
        synchronize()  # kernels of the CPU do not wait for streams
        return found

    def wait(self, posted):
        super().wait(posted)
        synchronize()


def _shards(heads=(2, 2)):
    """The layout, and q, k and v of each of two ranks; heads: of q, and of k and v."""
    layout, generator = Layout.zigzag(32, 2), torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, 32, 4, generator=generator) for h in (*heads, heads[1])]
    return layout, [[layout.shard(x, r, 2).requires_grad_() for r in range(2)] for x in whole]


def _call(rank, ring, mode, heads=(2, 2)):
    layout, shards = _shards(heads)
    mine = [x[rank] for x in shards]
    out, _ = context_parallel_attention(*mine, ring, ops.Mask(causal=True), mode=mode, layout=layout)
    return mine, out


MODES = ("allgather", "ring", "ulysses")


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_calls_through_memory_have_the_values_of_one_process(ranks, monkeypatch, mode, heads):
    """And copy what others read in one go: k and v in each pass, while gradients are where they travel from."""
    packs = []

    def work(rank, memory, gather):
        mine, out = _call(rank, _Ring(rank, memory, gather), mode, heads)
        return out.detach(), torch.autograd.grad(out.square().sum(), mine)

    monkeypatch.setattr(peer_ranks, "packed", lambda *given, pack=packed: packs.append(given) or pack(*given))
    found = ranks(2, work)
    assert mode == "ulysses" or len(packs) == 4
    layout, shards = _shards(heads)
    outs, _ = context_parallel_attention(*shards, LocalRing(2), ops.Mask(causal=True), mode=mode, layout=layout)
    gradients = torch.autograd.grad(sum(x.square().sum() for x in outs), [x for each in shards for x in each])
    for r, (out, some) in enumerate(found):
        assert torch.equal(out, outs[r])
        assert all(torch.equal(x, y) for x, y in zip(some, gradients[r::2]))


@pytest.mark.parametrize("mode", MODES[:2])
def test_own_keys_are_worked_on_before_the_first_transfer_is_posted(ranks, monkeypatch, mode):
    """What others read is copied before, while the device has room for it. So few keys are worked on earlier still,
    unless the comparison of calls has ended."""
    monkeypatch.setattr(prepared, "_few", lambda *given: False)
    prepared.forget()
    order = [[], []]

    def work(rank, memory, gather):
        def told(what, call):
            return lambda *given: order[rank].append(what) or call(*given)

        memory._moved = told("posted", memory._moved)
        ring = _Ring(rank, memory, gather)
        ring.begin = told("copied", ring.begin)
        here.kernel = rank
        mine, out = _call(rank, ring, mode)
        order[rank].append("|")
        torch.autograd.grad(out.sum(), mine)
        return "right"

    here, ours = threading.local(), KERNELS["tilesmith"]
    for name in ("forward", "backward"):
        call = getattr(ours, name)
        noted = lambda *given, call=call: order[here.kernel].append("computed") or call(*given)  # noqa: E731
        monkeypatch.setattr(ours, name, noted, raising=False)
    with torch.autograd.set_multithreading_enabled(False):
        assert ranks(2, work) == ["right"] * 2
    for told in order:
        forward, backward = " ".join(told).split(" | ")
        assert forward.startswith("copied computed posted computed")
        assert backward.startswith("copied computed posted computed") and backward.endswith("copied posted")
    prepared.forget()


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_call_whose_peer_dies_in_its_forward(ranks, mode):
    """What depends on the lost rank is NaN, and nothing else is; the next call raises at once."""

    def work(rank, memory, gather):
        ring = _Ring(rank, memory, gather, dies=0)
        if rank == 1:
            with pytest.raises(InterruptedError):
                _call(rank, ring, mode)
            return None
        _, out = _call(rank, ring, mode)
        ring._told = None  # nobody would answer
        for again in (lambda: _call(rank, ring, mode), lambda: out.sum().backward()):
            with pytest.raises(RingError, match=r"rank 0: keys, step 1 of 1: rank 1 did not answer .* no other call"):
                again()
        assert ring.memory_held == 0
        return out.detach()

    found = ranks(2, work)[0]
    layout, shards = _shards()
    expected, _ = context_parallel_attention(*shards, LocalRing(2), ops.Mask(causal=True), mode=mode, layout=layout)
    first, last = found.split(8, 2)  # rank 0 has the first quarter, which sees no other rank's keys, and the last
    assert torch.equal(first, expected[0][:, :, :8]) and last.isnan().all()


def test_a_call_whose_peer_dies_between_two_exchanges(ranks):
    """Heads of q and of fewer k travel one after the other; an error says in which of them."""

    def work(rank, memory, gather):
        with pytest.raises((RingError, InterruptedError)) as raised:
            _call(rank, _Ring(rank, memory, gather, dies=1), "ulysses", (4, 2))
        return str(raised.value)

    said = ranks(2, work)[0]
    assert "rank 0: heads of k and v: rank 1 did not answer" in said


@pytest.mark.parametrize("dies, step", [(1, "keys for gradients, step 1 of 1"), (2, "gradients of keys")])
def test_a_call_whose_peer_dies_in_its_backward(ranks, dies, step):
    def work(rank, memory, gather):
        ring = _Ring(rank, memory, gather, dies=dies)
        mine, out = _call(rank, ring, "ring")
        if rank == 1:
            with pytest.raises(InterruptedError):
                torch.autograd.grad(out.sum(), mine)
            return None
        said, found = "", None
        try:
            found = torch.autograd.grad(out.sum(), mine)
        except RingError as problem:  # its next exchange found the rank lost
            said = str(problem)
        with pytest.raises(RingError, match=f"rank 0: {step}: rank 1 did not answer"):
            _call(rank, ring, "ring")
        assert ring.memory_held == 0
        return out.detach(), said, found

    out, said, found = ranks(2, work)[0]
    assert out.isfinite().all()
    if dies == 1:
        assert step in said and found is None
    else:  # the last exchange of the call: keys' gradients are NaN where others would have added to them
        assert all(x.isnan().any() for x in found[1:])


class _Asking(_Ring):
    """A rank whose transport is chosen, as if its tensors were on a GPU."""

    _through = ProcessGroupRing._through

    def __init__(self, asked, *given, **named):
        super().__init__(*given, **named)
        self.asked, self._backend, self._chosen = asked, "nccl", {}

    def transport(self, device=None, need=0):
        return super().transport(torch.device("cuda"), need)


@pytest.mark.parametrize("asked", ["auto", SYMMETRIC])
def test_ranks_that_cannot_share_go_through_nccl(ranks, monkeypatch, caplog, asked):
    """And say why; where symmetric memory was asked for, it is an error."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ring_module.log, "disabled", False)  # import-linter's logging config disables others' loggers
    x = {r: [by_head(x) for x in _tensors(r)] for r in range(2)}

    def refuses(*given):
        raise peer_memory.CannotShare("rank 1 cannot map: no handle")

    def work(rank, memory, gather):
        ring = _Asking(asked, rank, memory, gather)
        ring._peers.memory = None
        assert ring.shares_memory is None
        if asked == SYMMETRIC:
            with pytest.raises(ValueError, match="cannot serve: rank 1 cannot map: no handle; pass 'auto' or 'nccl'"):
                ring.begin(BOTH, x, x, "keys")
            return "refused"
        moved = [ring.begin(BOTH, x, x, "keys") for _ in range(2)]
        return moved, ring.shares_memory, str(ring.transport())

    monkeypatch.setattr(ring_module, "PeerMemory", refuses)
    with caplog.at_level("INFO", "tilesmith"):
        found = ranks(2, work)
    why = "nccl: the group's backend; no symmetric memory: rank 1 cannot map: no handle"
    assert found == (["refused"] * 2 if asked == SYMMETRIC else [([None, None], False, why)] * 2)
    assert asked == SYMMETRIC or f"rank 0: tokens travel by {why}" in caplog.messages


@pytest.mark.parametrize("asked", ["auto", SYMMETRIC])
def test_an_exchange_that_is_too_large(ranks, monkeypatch, asked):
    monkeypatch.setattr(torch.version, "hip", None)
    for module in (peer_memory, transport_module):
        monkeypatch.setattr(module, "MOST", 64)
    x = {r: [by_head(x) for x in _tensors(r)] for r in range(2)}

    def work(rank, memory, gather):
        ring = _Asking(asked, rank, memory, gather)
        if asked == "auto":
            return ring.begin(BOTH, x, x, "keys")
        with pytest.raises(ValueError, match="MiB of a rank in one exchange are more than its .* pass 'auto'"):
            ring.begin(BOTH, x, x, "keys")
        return None

    assert ranks(2, work) == [None, None]


def test_a_capture_is_refused_on_all_ranks(ranks, monkeypatch):
    """Replays would not wait for other ranks; a rank that does not capture hears of it."""
    capturing = threading.local()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(capturing, "now", False))

    def work(rank, memory, gather):
        ring = _Ring(rank, memory, gather)
        ring._on_gpus = True
        mine, out = _call(rank, ring, "allgather")
        capturing.now = rank == 1
        for again in (lambda: _call(rank, ring, "allgather"), lambda: torch.autograd.grad(out.sum(), mine)):
            with pytest.raises(ValueError, match=r"refused on rank 1: the stream is being captured as a CUDA graph"):
                again()
        capturing.now = False
        torch.autograd.grad(out.sum(), mine)
        return "right"

    assert ranks(2, work) == ["right"] * 2


def test_what_is_still_written_is_kept(ranks):
    """A host that hears of the lost rank before it waits keeps the memory of what it had posted."""

    def work(rank, memory, gather):
        if rank == 1:
            return None
        sent, into = [by_head(x) for x in _tensors(0)], [by_head(torch.zeros(8, 1, 2, 3)) for _ in range(2)]
        _allocated.append(into)
        posted = [memory.begin(BOTH, sent, [x], "keys", SHORT, gather)() for x in into]
        until(lambda: memory.broken)
        for arrival in posted:
            with pytest.raises(RingError, match="rank 1 did not answer"):
                memory.wait(arrival)
        kept = [one.kept for one in memory._under_way.values()]
        synchronize()
        return all(any(x is y for (y,) in kept) for x in into), all(bool(x.isnan().all()) for x in into)

    assert ranks(2, work)[0] == (True, True)


def test_memory_of_an_exchange_that_nobody_waited_for_outlives_it(ranks, monkeypatch):
    """As after an exception, where another stream than that which made the memory begins the next exchange."""
    posted, freed, owners = threading.Event(), [], {}

    def where_it_is(self, stream, to, address, size):
        there = owners[to]
        Stream.known[stream].do(lambda: freed.append(to) if there() is None else ctypes.memmove(to, address, size))

    monkeypatch.setattr(World, "copy", where_it_is)

    def work(rank, memory, gather):
        if rank == 1:
            posted.wait(TIMEOUT)
        for _ in range(SLOTS + 1):
            with within(Stream()):
                into = [by_head(x) for x in _tensors(rank)]
                owners.update({x.data_ptr(): weakref.ref(x) for x in into})
                memory.begin(BOTH, [by_head(x) for x in _tensors(rank)], into, "keys", TIMEOUT, gather)()
                del into
        posted.set()
        synchronize()
        return len(memory._under_way)

    assert ranks(2, work) == [SLOTS, SLOTS]
    assert not freed


@pytest.mark.parametrize("late", [0, 1])
def test_an_event_is_not_another_ones_while_somebody_holds_it(ranks, late):
    """A call that waits for its keys after others have come and gone, and a watch that looks rarely: a handle that was
    recorded again would hold them up for exchanges that they do not know."""

    def work(rank, memory, gather):
        into, arrivals = [torch.zeros(8, 1, 2, 3) for _ in range(4 * SLOTS)], []
        _allocated.append(into)
        for i, x in enumerate(into):
            arrivals.append(_begun(memory, BOTH, _tensors(rank + i), [x], "keys", TIMEOUT, gather)())
            if i > late:
                memory.wait(arrivals.pop(late))
        synchronize()
        handles = [one.event._handle for one in arrivals]
        gather("all were posted")
        current().do(lambda: time.sleep(SHORT / 4))
        held_up = memory._signals.record(current().cuda_stream)
        assert not held_up.query() and all(one.event.query() for one in arrivals)
        assert len({*handles, held_up._handle}) == len(handles) + 1
        for one in arrivals:
            memory.wait(one)
        synchronize()
        return [x.unique().tolist() for x in into]

    for rank, found in enumerate(ranks(2, work)):
        assert found == [[2.0 - rank + i] for i in range(4 * SLOTS)]


def test_a_watch_that_cannot_tell_still_lets_the_gpu_go_on(ranks, monkeypatch):
    def mute(*given):
        raise KeyError("no store")

    monkeypatch.setattr(peer_memory, "told", mute)

    def work(rank, memory, gather):
        if rank == 1:
            return None
        into = torch.zeros(8, 1, 2, 3)
        _moved(memory, BOTH, _tensors(0), [into], gather, timeout=SHORT)
        synchronize()
        return bool(into.isnan().all()), memory.broken

    right, said = ranks(2, work)[0]
    assert right and said == "exchanges cannot be watched: KeyError: 'no store'"


def test_two_groups_do_not_share_an_error(ranks):
    """A group whose rank was lost raises; another one of the same process goes on."""

    def work(rank, memory, gather):
        other = peer_memory.PeerMemory(memory._group(), torch.device("cpu"), gather)
        if rank == 0:
            _moved(memory, BOTH, _tensors(0), _tensors(0), gather, timeout=SHORT)
        into = torch.zeros(8, 1, 2, 3)
        _moved(other, BOTH, _tensors(rank), [into], gather)
        synchronize()
        return bool(memory.broken), other.broken, bool((into == 2.0 - rank).all())

    assert ranks(2, work) == [(True, "", True), (False, "", True)]
