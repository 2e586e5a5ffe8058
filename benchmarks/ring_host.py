"""What a call of `context_parallel_attention` costs the host beside its kernels and its transfers, on any machine.

    python benchmarks/ring_host.py [--calls 1000] [--memory] [--profile causal|packed|window|neighbour]
        [--ranks 2]

Rank 0 of two on a CPU, and rank 1 in `neighbour`, a window that reaches into the other rank's keys: tensors of a few
elements, kernels that make results of the right shapes and compute nothing, a ring that compares and moves nothing.
Calls of the ops that merge, copy and add are left out, 5 to 7 µs each. With --memory exchanges are posted as between
GPUs that share memory, by streams and a driver that do nothing, and these ops do nothing once they are chosen. A row of
JSON for each case: the least and the median microseconds of this thread's time, forward and backward; about 7 and 16 of
the least are autograd's own. Other work on the machine adds to the medians.

--ranks: instead, so many processes compare calls, as a causal one, over and over, by gloo and through memory of their
host: rank 0's wall time to ask, to wait for the answer, and of both.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import say
from torch import Tensor

from tilesmith.bench.context_parallel_problems import Problem, documents_of
from tilesmith.bench.one_rank import OneRank
from tilesmith.distributed import ProcessGroupRing, context_parallel_attention, kernels, peer_memory, signals, sums
from tilesmith.distributed.comparison import Answer
from tilesmith.distributed.peer_memory import PeerMemory
from tilesmith.distributed.signature import Facts, Signed
from tilesmith.distributed.transport import SYMMETRIC, peers_of
from tilesmith.engine import Op
from tilesmith.engine.replay import Ready

CASES = {
    "causal": Problem("causal", 256, 2, 2, 2),
    "packed": Problem("packed documents", 2048, 2, 2, 2, lengths=documents_of(2048)),
    "window": Problem("window 128 with sinks", 1024, 2, 1, 2, window=127, sinks=True),
    "neighbour": Problem("window 128 with sinks", 4096, 2, 1, 2, window=127, sinks=True),
}
RANK = {"neighbour": 1}


class Nothing(kernels.Ours):
    """Arguments as of `Ours`, results of no value."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any, terms: Any, summand: bool) -> tuple[Tensor, Tensor]:
        """Memory of the right shapes."""
        kernels._mask_and_score(call, terms)
        kernels._packed(call, q.device)
        return torch.empty(q.shape, dtype=self.summand(q) if summand else q.dtype), torch.empty(q.shape[:3])

    def backward(self, dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Memory of the right shapes."""
        *_, call, terms, summand = rest
        kernels._mask_and_score(call, terms)
        kernels._packed(call, q.device)
        dtype = self.summand(q) if summand else q.dtype
        found = [torch.empty(x.shape, dtype=dtype) for x in (q, k, v)]
        return tuple(found) if terms.sinks is None else (*found, torch.empty_like(terms.sinks))


class Still(OneRank):
    """Moves nothing, and copies nothing either."""

    def move(self, *_: Any) -> bool:
        """Done."""
        return True


class Idle:
    """A stream or an event that has nothing to do."""

    cuda_stream = cuda_event = 0

    def __init__(self, *_: Any, **named: Any): ...

    def record_event(self) -> Idle:
        """It has happened."""
        return self

    def wait_event(self, event: Any) -> None:
        """Not needed."""

    def query(self) -> bool:
        """It has happened."""
        return True


class Library:
    """CUDA's driver, whose functions are all one that returns 0."""

    def __getattr__(self, name: str) -> Any:
        found = ctypes.CDLL(None)["pthread_mutexattr_destroy"]  # a new object each time
        setattr(self, name, found)
        return found


class Sharing(ProcessGroupRing):
    """One of two ranks whose GPUs share memory; the other one agrees with all that it says."""

    def __init__(self, rank: int):
        self.size, self.rank, self.ranks, self._limit = 2, rank, (rank,), 600.0
        self._peers, self._group = SimpleNamespace(memory=None, broken="", refused=""), lambda: self
        self._peers.memory = PeerMemory(self, torch.device("cpu"), lambda value: [value] * 2)

    def ask(self, *_: Any) -> Callable[[], None]:
        """They agree."""
        return lambda: None

    def _through(self, device: torch.device) -> str:
        return SYMMETRIC


def rendezvous(made: Tensor, group: Sharing) -> Any:
    """Memory of both ranks, which is one."""

    def get_buffer(rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int) -> Tensor:
        return made.view(dtype)[first : first + torch.Size(shape).numel()].view(shape)

    return SimpleNamespace(buffer_ptrs=[made.data_ptr()] * 2, get_buffer=get_buffer)


@contextlib.contextmanager
def idle_memory() -> Any:
    """Inside, exchanges are posted to streams and by a driver that do nothing; so do ops once they are chosen."""
    with contextlib.ExitStack() as stack:
        for where, what, instead in (
            (peer_memory, "symmetric_memory", lambda: SimpleNamespace(empty=torch.empty, rendezvous=rendezvous)),
            (peer_memory, "_identity", lambda device: "host"),
            (peer_memory, "raw_stream", lambda index: 0),
            (peer_memory, "current_device", lambda: None),
            (peer_memory.dist, "get_rank", lambda group: group.rank),
            (peer_memory.dist, "get_world_size", lambda group: group.size),
            (peer_memory.Watch, "follow", lambda self, exchange: None),
            (signals.ctypes, "CDLL", lambda name, load=ctypes.CDLL: load(name) if name is None else Library()),
            (torch.cuda, "Stream", Idle),
            (torch.cuda, "synchronize", lambda device: None),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (Op, "_ready", lambda self, args, pin: Ready(lambda *given: None)),
        ):
            stack.enter_context(mock.patch.object(where, what, instead))
        yield


def passes(problem: Problem, rank: int, memory: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """Forward, and backward of its result."""
    layout, heads = problem.layout(2), (problem.heads, problem.kv_heads, problem.kv_heads)
    ring, mask, starts = Sharing(rank) if memory else Still(2, rank), problem.mask, problem.starts
    shape = layout.local, problem.dim
    q, k, v = (torch.randn(1, h, *shape, dtype=torch.bfloat16, requires_grad=True) for h in heads)
    sinks = torch.zeros(problem.heads, requires_grad=True) if problem.sinks else None
    wanted, dout = [x for x in (q, k, v, sinks) if x is not None], torch.randn_like(q)

    def forward() -> Tensor:
        return context_parallel_attention(
            q, k, v, ring, mask, mode="allgather", layout=layout, cu_seqlens=starts, sinks=sinks, kernel="nothing"
        )[0]

    return forward, lambda out: torch.autograd.grad(out, wanted, dout)


def measured(problem: Problem, rank: int, calls: int, memory: bool) -> dict[str, list[float]]:
    """The least and the median of each pass, in microseconds."""
    forward, backward = passes(problem, rank, memory)
    taken: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(calls + 5):
        began = time.thread_time()
        out = forward()
        between = time.thread_time()
        backward(out)
        ended = time.thread_time()
        taken["forward"].append((between - began) * 1e6)
        taken["backward"].append((ended - between) * 1e6)
    return least_and_median(taken)


def least_and_median(taken: dict[str, list[float]]) -> dict[str, list[int]]:
    """Of all but the first times."""
    return {name: [round(min(all_[5:])), round(statistics.median(all_[5:]))] for name, all_ in taken.items()}


def compared(rank: int, ranks: int, store: str, apart: str, calls: int) -> None:
    """A process whose comparisons are timed. apart: why ranks shall not share memory, empty if they shall."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    ring, facts = ProcessGroupRing(), Facts({f"argument {i}": "its value" for i in range(20)})  # as long as causal's
    peers_of(ring.group).apart = apart
    taken: dict[str, list[float]] = {"ask": [], "answer": [], "both": []}
    for number in range(calls + 5):
        began = time.perf_counter()
        answer = Answer(ring, {rank: Signed("forward", number, facts)}, "forward")
        between = time.perf_counter()
        answer()
        ended = time.perf_counter()
        for name, seconds in zip(taken, (between - began, ended - between, ended - began)):
            taken[name].append(seconds * 1e6)
    if rank == 0:
        say(json.dumps({"compared by": apart or "memory", "ranks": ranks, **least_and_median(taken)}))
    dist.barrier()
    os._exit(0)  # threads of gloo may want the interpreter as it ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--profile", choices=CASES)
    parser.add_argument("--ranks", type=int)
    given = parser.parse_args()
    for apart in ("gloo", "") if given.ranks else ():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(compared, (given.ranks, f"{folder}/store", apart, given.calls), nprocs=given.ranks)
    if given.ranks:
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # memory that nobody has written may hold some, which CPUs add slowly
    kernels.KERNELS["nothing"] = Nothing()
    merge = mock.patch.object(sums.ops, "accumulate_attention", lambda out, lse, more, more_lse: more_lse)
    runs = mock.patch.multiple(sums.ops, add_runs=lambda *given: None, copy_runs=lambda *given: None)
    moves = idle_memory() if given.memory else runs
    with merge, moves, torch.autograd.set_multithreading_enabled(False):
        for name, problem in CASES.items():
            say(json.dumps({"case": name, **measured(problem, RANK.get(name, 0), given.calls, given.memory)}))
        if given.profile:
            forward, backward = passes(CASES[given.profile], RANK.get(given.profile, 0), given.memory)
            with cProfile.Profile() as profile:
                for _ in range(given.calls):
                    backward(forward())
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
