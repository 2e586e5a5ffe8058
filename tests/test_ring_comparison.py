"""What a rank does while ranks compare their calls: its own keys if they are few, and nothing that others see."""

import pytest
import torch

import tilesmith.distributed.attention as attention
import tilesmith.distributed.prepared as prepared
from tilesmith import ops
from tilesmith.distributed import LocalRing, context_parallel_attention
from tilesmith.distributed.kernels import KERNELS, Ours
from tilesmith.distributed.lost import Loss, _end


class Told(LocalRing):
    """Writes down what is done in which order; refuses if asked to."""

    def __init__(self, refuses=False):
        super().__init__(2)
        self.order, self.refuses = [], refuses

    def ask(self, signatures, step):
        self.order.append("ask")

        def answer():
            self.order.append("answer")
            if self.refuses:
                raise ValueError("mode must be the same on all ranks")

        return answer

    def post(self, parcels, step):
        self.order.append("post")
        super().post(parcels, step)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Tests change what a call's preparation reads, as nothing else does."""
    prepared.forget()


@pytest.fixture
def ring(monkeypatch):
    told = Told()

    class Counted(Ours):
        def forward(self, *args):
            told.order.append("attend")
            return super().forward(*args)

        def backward(self, *args):
            told.order.append("gradients")
            return super().backward(*args)

    monkeypatch.setitem(KERNELS, "told", Counted())
    return told


def shards(requires_grad=False):
    return [[torch.randn(1, 4, 8, 8, requires_grad=requires_grad) for _ in range(2)] for _ in range(3)]


def test_few_own_keys_are_attended_before_the_answer(ring):
    q, k, v = shards(True)
    out, _ = context_parallel_attention(q, k, v, ring, ops.Mask(causal=True), mode="ring", kernel="told")
    assert ring.order[:5] == ["ask", "attend", "attend", "answer", "post"]
    ring.order.clear()
    (out[0].sum() + out[1].sum()).backward()
    assert ring.order[:5] == ["ask", "gradients", "gradients", "answer", "post"]
    assert ring.order.count("answer") == 1


def test_many_own_keys_travel_first(ring, monkeypatch):
    monkeypatch.setattr(prepared, "_few", lambda *_: False)
    context_parallel_attention(*shards(), ring, mode="allgather", kernel="told")
    assert ring.order[:4] == ["ask", "answer", "post", "attend"]


def test_nothing_travels_and_no_seed_is_drawn_before_the_answer(ring):
    ids = torch.zeros(1, 16, dtype=torch.int32)
    for named in ({"dropout_p": 0.5}, {"mode": "ulysses"}, {"mask": ops.Mask(documents=ids)}):
        ring.order.clear()
        context_parallel_attention(*shards(), ring, kernel="told", **named)
        assert ring.order[:2] == ["ask", "answer"], named
    ring.refuses, before = True, torch.get_rng_state()
    q, k, v = shards()
    torch.set_rng_state(before)
    for named in ({"dropout_p": 0.5}, {"mode": "ring"}, {"mode": "ulysses"}):
        ring.order.clear()
        with pytest.raises(ValueError, match="mode must be the same on all ranks"):
            context_parallel_attention(q, k, v, ring, kernel="told", **named)
        assert "post" not in ring.order and ring.order.count("answer") == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_that_fails_meanwhile_still_takes_part(ring, monkeypatch):
    """Others neither wait for its first transfer, nor count another number of calls."""

    class Failing(Ours):
        def forward(self, *args):
            raise MemoryError("no room")

    monkeypatch.setitem(KERNELS, "failing", Failing())
    before = attention._CALLS.get(ring, 0)
    with pytest.raises(MemoryError, match="no room"):
        context_parallel_attention(*shards(), ring, mode="ring", kernel="failing")
    assert ring.order == ["ask", "answer", "post"]
    assert attention._CALLS[ring] == before + 1


def test_a_call_without_transfers_awaits_the_answer(ring):
    ring.refuses = True
    with pytest.raises(ValueError, match="mode must be the same on all ranks"):
        context_parallel_attention(
            *shards(), ring, ops.Mask(window=0), mode="allgather", layout="contiguous", kernel="told"
        )
    assert "attend" in ring.order and "post" not in ring.order


@pytest.mark.parametrize(
    "losses, end",
    [
        ({0: Loss(1, 3, "a")}, (3, 0, "a")),
        ({0: Loss(2, 1, "b"), 1: Loss(1, 3, "a")}, (3, 1, "a")),
        ({0: Loss(2, 1, "b"), 1: Loss(1, 3, "a"), 3: Loss(3, 1, "c")}, (3, 1, "a")),  # 3 came late
        ({0: Loss(2, 3, "b"), 3: Loss(3, 0, "c")}, (3, 0, "b")),
        ({3: Loss(3, 0, "c"), 0: Loss(2, 3, "b")}, (3, 0, "b")),
    ],
)
def test_whom_ranks_lost_first(losses, end):
    assert _end(losses, next(iter(losses))) == end
