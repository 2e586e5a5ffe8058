"""Exchanges by the copy engines and the driver of one GPU, whose ranks are threads; one of which is lost."""

import os
import subprocess
import sys
import time

import pytest
import torch

from peer_ranks import run
from tilesmith.distributed import RingError
from tilesmith.distributed.peer_memory import kinds_of
from tilesmith.distributed.schedule import Moves, Transfer
from tilesmith.distributed.tokens import by_head, by_token, copy_runs, landing

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
SHORT, LONG = 1.0, 30.0  # seconds
TOKENS = 4096
BOTH = Moves([Transfer(0, 1, 0, 0, TOKENS), Transfer(1, 0, 0, 0, TOKENS)])


def _tensors(value, dtype=torch.bfloat16):
    return [torch.full((TOKENS, 1, 8, 128), float(value), device=GPU, dtype=dtype) for _ in range(2)]


def _moved(memory, sent, into, gather, timeout, step="keys, step 1 of 1"):
    memory.wait(memory.begin(BOTH, *map(_heads_first, (sent, into)), step, timeout, gather)())


def _heads_first(tensors):
    """[T, B, heads, D] as `begin` takes them."""
    return [by_head(x) for x in tensors]


@pytest.fixture(autouse=True, scope="module")
def _kernels_are_there():
    """Ranks are threads of one process here. One that loads a kernel waits for the GPU, whose streams may wait for that
    rank."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = [torch.zeros(1, 8, TOKENS, 72, device=GPU, dtype=dtype) for _ in range(2)]
        for sent in (_heads_first(_tensors(0, dtype)), narrow):
            for runs in ((0, 0, TOKENS), (100, 0, 900, 3000, 900, 900)):
                copy_runs(sent, None, [landing(x, sum(runs[2::3])) for x in sent], runs)
    torch.cuda.synchronize()


def test_what_arrives_is_what_was_sent(monkeypatch):
    def work(rank, memory, gather):
        found = []
        for i in range(40):
            into = _tensors(0)
            _moved(memory, _tensors(10 * rank + i % 7), into, gather, LONG)
            found += [x.clone() for x in into]
        torch.cuda.synchronize()
        assert memory.idle and not memory.broken
        return all((x == 10 * (1 - rank) + i // 2 % 7).all() for i, x in enumerate(found))

    assert run(monkeypatch, 2, work, gpu=GPU) == [True, True]


def test_runs_of_any_strides_and_what_is_written_into_a_reservation(monkeypatch):
    """Keys by head in memory, of which others read two runs; sums of gradients that are made where they travel from."""
    runs = Moves([Transfer(s, 1 - s, at, to, 900) for s in (0, 1) for at, to in ((100, 0), (3000, 900))])
    whole = Moves([Transfer(0, 1, 0, 0, TOKENS), Transfer(1, 0, 0, 0, TOKENS)])

    def work(rank, memory, gather):
        found = []
        for i in range(20):
            heads = [torch.randn(1, 8, TOKENS, 72, device=GPU).bfloat16() + 10 * rank + i for _ in range(2)]
            into = [landing(x, 1800) for x in heads]
            memory.wait(memory.begin(runs, heads, into, "keys", LONG, gather)())
            wide = [torch.empty(1, 8, TOKENS, 72, device=GPU) for _ in range(2)]
            mine = memory.reserve(whole, kinds_of(wide))
            assert mine is not None or i == 0  # memory may have to grow first
            sums = wide if mine is None else mine
            for x, y in zip(sums, heads):
                x.copy_(y)
            back = [landing(x, TOKENS) for x in wide]
            memory.wait(memory.begin(whole, sums, back, "gradients of keys", LONG, gather)())
            found.append([by_token(x).clone() for x in (*heads, *into, *back)])
        torch.cuda.synchronize()
        return found

    for one, other in zip(*run(monkeypatch, 2, work, gpu=GPU)):
        for i in (0, 1):
            there = torch.cat([other[i][100:1000], other[i][3000:3900]])
            assert torch.equal(one[2 + i], there) and torch.equal(one[4 + i], other[i].float())


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rank_that_dies(monkeypatch, dtype, behind):
    """The GPU goes on in time; what a kernel reads behind the exchange is NaN; the next call raises."""

    def work(rank, memory, gather):
        _moved(memory, _tensors(rank, dtype), _tensors(7, dtype), gather, LONG)
        torch.cuda.synchronize()
        if rank == 1:
            return "dead"
        began, found = time.monotonic(), []
        for _ in range(1 + behind):
            into = _tensors(7, dtype)
            _moved(memory, _tensors(0, dtype), into, gather, SHORT)
            found += [x * 2 for x in into]
        torch.cuda.current_stream().synchronize()
        assert SHORT <= time.monotonic() - began < SHORT + 2
        assert all(x.isnan().all() for x in found)
        with pytest.raises(RingError, match="rank 0: keys, step 1 of 1: rank 1 did not answer"):
            memory.begin(BOTH, *map(_heads_first, (_tensors(0, dtype), _tensors(7, dtype))), "keys", SHORT, gather)()
        memory.close()
        return memory.held

    assert run(monkeypatch, 2, work, gpu=GPU) == [0, "dead"]


def test_a_rank_that_never_comes(monkeypatch):
    """As above, from the first exchange on."""

    def work(rank, memory, gather):
        if rank == 1:
            return None
        into = _tensors(7)
        _moved(memory, _tensors(0), into, gather, SHORT)
        found = into[0] * 2
        torch.cuda.current_stream().synchronize()
        return bool(found.isnan().all()), "rank 1 did not answer" in memory.broken

    assert run(monkeypatch, 2, work, gpu=GPU)[0] == (True, True)


def test_one_queue_of_the_hardware_is_enough():
    """CUDA_DEVICE_MAX_CONNECTIONS=1, which trainers set, may put streams behind one another. With one rank alone: two
    of one process would stand behind each other, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "never_comes"]
    done = subprocess.run(
        command, env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_looking_at_exchanges_invalidates_no_capture(monkeypatch):
    """The thread asks for events while this one captures a graph, which CUDA forbids to all threads by default."""

    def work(rank, memory, gather):
        x, into = torch.ones(8, device=GPU), _tensors(7)
        torch.cuda.synchronize()
        gather(None)
        if rank == 1:
            time.sleep(3.0)
        _moved(memory, _tensors(rank), into, gather, LONG)
        if rank == 1:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(GPU)):  # without torch.cuda.graph, which waits for the device first
            graph.capture_begin()
            y = x + 1
            time.sleep(1.5)  # some looks
            graph.capture_end()
        assert not memory.idle
        graph.replay()
        torch.cuda.synchronize()
        return y.sum().item(), memory.broken, bool((into[0] == 1).all())

    assert run(monkeypatch, 2, work, gpu=GPU)[0] == (16.0, "", True)
