"""Which transport serves a group, why, and what is said where the one asked for cannot."""

from dataclasses import replace

import pytest
import torch

import tilesmith.distributed.explanation as explanation
import tilesmith.distributed.transport as transport
from tilesmith import ops
from tilesmith.distributed import LocalRing, context_parallel_attention, explain_context_parallel
from tilesmith.distributed.peer_memory import LEAST, MOST, _Exchange, kinds_of
from tilesmith.distributed.transport import SYMMETRIC, asked_for, choose
from tilesmith.settings import read, settings

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    "asked, backend, device, more, name, because",
    [
        ("auto", "nccl", GPU, {}, SYMMETRIC, "if the first exchange finds that all can map memory, else nccl; up to 2"),
        ("auto", BOTH, GPU, {"held": 3 * LEAST}, SYMMETRIC, "48 MiB a rank beside what PyTorch's allocator counts"),
        (SYMMETRIC, "nccl", GPU, {}, SYMMETRIC, "asked for; copy engines of GPUs of one host, if .* else an error"),
        ("auto", "nccl", GPU, {"refused": "ranks are on several hosts"}, "nccl", "no symmetric memory: ranks are on s"),
        ("auto", "nccl", GPU, {"need": MOST + 1}, "nccl", "1024 MiB of a rank in one exchange are more than its 1024"),
        ("auto", "nccl", GPU, {"need": MOST}, SYMMETRIC, "copy engines"),
        ("nccl", BOTH, GPU, {}, "nccl", "asked for"),
        ("gloo", BOTH, CPU, {}, "gloo", "asked for"),
        ("auto", BOTH, CPU, {}, "gloo", "no symmetric memory: tensors are on cpu"),
        ("auto", "gloo", GPU, {}, "gloo", "no symmetric memory: the group's backend is gloo, not nccl"),
        ("auto", "ucc", GPU, {}, "ucc", "the group's backend is ucc"),
    ],
)
def test_which_and_why(asked, backend, device, more, name, because):
    found = choose(asked, backend, device, **more)
    assert found.name == name
    with pytest.raises(AssertionError, match=because):
        raise AssertionError(found.because)
    assert str(found).startswith(f"{name}: ")


@pytest.mark.parametrize(
    "asked, backend, device, more, words",
    [
        (
            "nccl",
            "gloo",
            GPU,
            {},
            "'nccl' cannot serve: the group's backend for tensors on cuda is gloo; pass 'auto'",
        ),
        ("gloo", BOTH, GPU, {}, "'gloo' cannot serve: the group's backend for tensors on cuda is nccl"),
        (SYMMETRIC, "gloo", GPU, {}, "'symmetric_memory' cannot serve: the group's backend is gloo, not nccl"),
        (SYMMETRIC, BOTH, CPU, {}, "tensors are on cpu, and it is for NVIDIA GPUs; pass 'auto' or 'gloo'"),
        (SYMMETRIC, "nccl", GPU, {"refused": "rank 3 cannot map: no"}, "cannot serve: rank 3 cannot map: no; pass"),
        (SYMMETRIC, "nccl", GPU, {"need": 2 * MOST}, "2048 MiB of a rank in one exchange are more than its 1024 MiB"),
    ],
)
def test_what_cannot_serve_is_refused_in_words(asked, backend, device, more, words):
    with pytest.raises(ValueError, match=words):
        choose(asked, backend, device, **more)


def test_an_amd_gpu_has_no_words_to_wait_for(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose("auto", "nccl", GPU).name == "nccl"


def test_the_environment_asks_where_no_argument_does(monkeypatch):
    monkeypatch.setenv("TILESMITH_TRANSPORT", "nccl")
    monkeypatch.setattr(transport, "settings", read)
    assert asked_for("auto") == "nccl" and asked_for("gloo") == "gloo"
    monkeypatch.setenv("TILESMITH_TRANSPORT", "rdma")
    with pytest.raises(ValueError, match="TILESMITH_TRANSPORT must be one of auto, symmetric_memory, nccl, gloo, got"):
        asked_for("auto")
    monkeypatch.setattr(transport, "settings", lambda: replace(settings(), transport="auto"))
    assert asked_for("auto") == "auto"
    with pytest.raises(ValueError, match="ProcessGroupRing: transport must be one of"):
        asked_for("rdma")


def test_explain_tells_the_transport():
    asked = {"heads": 4, "mask": ops.Mask(causal=True)}
    assert str(explain_context_parallel(64, 2, **asked, group=LocalRing(2))).endswith(
        "transport: copies: all ranks are in this process"
    )
    assert explain_context_parallel(64, 1, **asked, group=LocalRing(1)).transport.name == "none"
    assert "explain_context_parallel(group=...)" in str(explain_context_parallel(64, 2, **asked))
    with pytest.raises(ValueError, match="group has 3 ranks and size is 2"):
        explain_context_parallel(64, 2, **asked, group=LocalRing(3))


class _Counting(LocalRing):
    """Writes down what the largest exchange of a rank takes, and what it was asked about."""

    largest = asked_about = 0

    def begin(self, moves, sent, into, step):
        needs = [_Exchange(moves, r, kinds_of(sent[r])).need for r in moves.spans]
        self.largest = max([self.largest, *needs])

    def transport(self, device=None, need=0):
        self.asked_about = need
        return super().transport(device, need)


@pytest.mark.parametrize("mask", [ops.Mask(causal=True), ops.Mask(causal=True, window=20)])
@pytest.mark.parametrize("mode, size, heads", [("allgather", 4, (4, 2)), ("ring", 4, (4, 2)), ("ulysses", 4, (4, 4)),
                                               ("ulysses", 4, (8, 2)), ("hybrid", 4, (4, 2))])  # fmt: skip
def test_explain_knows_the_largest_exchange(monkeypatch, mode, size, heads, mask):
    """It is what the exchanges of a call and its gradients need."""
    tokens, dim, ring = 256, 64, _Counting(size)
    no = {m: "not now" for m in ("allgather", "ring", "ulysses", "hybrid") if m != mode}
    monkeypatch.setattr(explanation, "barred", lambda *_: no)
    found = explain_context_parallel(
        tokens, size, heads=heads[0], kv_heads=heads[1], head_dim=dim, mask=mask, group=ring
    )  # fmt: skip
    assert found.mode == mode
    shards = [
        [torch.randn(1, h, tokens // size, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(size)]
        for h in (heads[0], heads[1], heads[1])
    ]
    degree = {"degree": found.degree} if mode == "hybrid" else {}
    outs, lses = context_parallel_attention(*shards, ring, mask, mode=mode, **degree)
    sum(x.float().sum() for x in (*outs, *lses)).backward()
    assert ring.largest == ring.asked_about
