"""What ranks over gloo check of the memory through which those of one host compare their calls."""

import contextlib
import os
import time
import types

import pytest
import torch
import torch.distributed as dist

import tilesmith.distributed.host_channel as host_channel
from ranks import SOON, soon
from tilesmith import ops
from tilesmith.distributed import ProcessGroupRing, RingError, context_parallel_attention
from tilesmith.distributed.transport import peers_of

CAUSAL = ops.Mask(causal=True)


@contextlib.contextmanager
def _group(mesh):
    group = dist.new_group(list(range(mesh.size())), backend="gloo")
    yield group
    dist.barrier(mesh.get_group())  # its connections stay open until others have given up


def _call(group, causal=True):
    x = torch.ones(1, 2, 8, 8)
    return context_parallel_attention(x, x, x, group, ops.Mask(causal=causal))[0]


def _disagree(mesh, group):
    """Ranks that differ are named, and go on."""
    last = mesh.size() - 1
    with pytest.raises(ValueError, match=rf"causal must be the same on all ranks, got .* on rank {last}"):
        _call(group, causal=mesh.get_rank() != last)
    assert torch.allclose(_call(group), torch.ones(()))


def check_that_ranks_of_one_host_use_it(mesh):
    with _group(mesh) as group:
        _disagree(mesh, group)
        peers = peers_of(group)
        assert peers.channel is not None and not peers.apart
        assert peers.channel._count == 2 and not peers.channel._open
        rings = ProcessGroupRing(group), ProcessGroupRing(group, timeout=SOON)
        assert all(ring.gathered(ring.rank, "numbers") == list(range(mesh.size())) for ring in rings)


def check_that_ranks_which_cannot_share_compare_by_gloo(mesh):
    """All of them, where one cannot."""
    last = mesh.size() - 1

    def refused(*given):
        raise PermissionError("not allowed")

    with _group(mesh) as group, pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == last:
            patch.setattr(host_channel, "_joined", refused)
        _disagree(mesh, group)
        peers = peers_of(group)
        said = f"rank {last} cannot map the file: PermissionError: not allowed"
        assert peers.channel is None and peers.apart == said


def check_that_answers_nobody_asks_for_leave_ranks_in_step(mesh):
    """As where an exception comes between a question and its answer."""
    with _group(mesh) as group:
        ring = ProcessGroupRing(group)
        asked = [ring.ask({ring.rank: {"number": i}}, f"question {i}") for i in range(5)]
        ring.agree({ring.rank: {"number": 5}}, "question 5")
        asked[2]()
        odd = {"number": "odd" if ring.rank == 0 else 6}
        with pytest.raises(ValueError, match="question 6: number must be the same on all ranks, got 'odd' on rank 0"):
            ring.agree({ring.rank: odd}, "question 6")


def check_a_rank_whose_group_ends(mesh):
    """The others hear of it at once, and again in each later call."""
    group, last = dist.new_group(list(range(mesh.size())), backend="gloo"), mesh.size() - 1
    _call(group)
    if mesh.get_rank() == last:
        dist.destroy_process_group(group)
        del group
    else:
        for _ in range(2):
            told = rf"forward: rank {last} did not answer .*limit 600 s.* its process group has ended"
            with soon(), pytest.raises(RingError, match=told):
                _call(group)
    dist.barrier(mesh.get_group())  # connections stay open until others have given up


def check_a_rank_that_gave_up(mesh):
    """One that has lost another in a transfer tells those that still wait for it in a comparison."""
    rank = mesh.get_rank()
    with _group(mesh) as group:
        ring = ProcessGroupRing(group)
        ring.agree({rank: {}}, "first")
        if rank == 0:
            assert "keys: rank 1 did not answer" in str(ring._lost("keys", 1, "as if"))
        dist.barrier(mesh.get_group())
        if rank == 0:
            with soon(), pytest.raises(RingError, match="keys: rank 1 did not answer"):
                ring.agree({rank: {}}, "second")
        else:
            names = "rank 0 did not answer" if mesh.size() == 2 else "rank (0 gave up: in 'keys' of rank 0 rank )?1"
            with soon(), pytest.raises(RingError, match=f"second: {names}"):
                ring.agree({rank: {}}, "second")


def check_a_rank_whose_gpu_waited_in_vain(mesh):
    """It raises what its GPU heard; the others need not wait for it."""
    rank = mesh.get_rank()
    with _group(mesh) as group:
        ring = ProcessGroupRing(group)
        ring.agree({rank: {}}, "first")
        if rank == 0:
            peers_of(group).memory = types.SimpleNamespace(broken="rank 1 was lost", idle=False)
        told = "^rank 1 was lost" if rank == 0 else f"^rank {rank}: second: rank [01] "
        with soon(), pytest.raises(RingError, match=told):
            ring.agree({rank: {}}, "second")
        peers_of(group).memory = None


def check_a_forked_process(mesh):
    """It has no part in the group, and disturbs none of its ranks."""
    with _group(mesh) as group:
        ring = ProcessGroupRing(group)
        ring.agree({ring.rank: {}}, "first")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ring.agree({ring.rank: {}}, "second")
            except RingError as problem:
                code = 0 if f"rank {ring.rank}: second: this process was forked" in str(problem) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        ring.agree({ring.rank: {}}, "second")


def check_a_slow_rank(mesh):
    """Others wait for it without an error."""
    with _group(mesh) as group:
        ring = ProcessGroupRing(group, timeout=SOON)
        for number in range(3):
            if ring.rank == number % mesh.size():
                time.sleep(0.2)
            ring.agree({ring.rank: {"number": number}}, "slow")
