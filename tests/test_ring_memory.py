"""What a rank of a ring holds: counted without memory, with what Hopper's kernels keep by their plans, and by the model
that chooses the parts of the heads."""

from itertools import pairwise

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plan_calls
import tilesmith.distributed.cost as cost
import tilesmith.distributed.parts as parts
import tilesmith.distributed.prepared as prepared
from tilesmith import ops
from tilesmith.bench.one_rank import OneRank
from tilesmith.distributed import Layout, context_parallel_attention, explain_context_parallel
from tilesmith.distributed.kernels import KERNELS, Ours
from tilesmith.distributed.parts import HeadPart, Split, head_parts, splits
from tilesmith.distributed.pieces import Sight
from tilesmith.distributed.tokens import by_head
from tilesmith.ops.attn.plan import Shape

SM90 = cost.MACHINES["sm90"]
CAUSAL = ops.Mask(causal=True)
HEADS = [(16, 16), (32, 8), (64, 8), (40, 8)]


class _Peak(TorchDispatchMode):
    """The most bytes that tensors made meanwhile have at a time; `known` are not counted."""

    def __init__(self, *known):
        super().__init__()
        self.held, self.bytes = dict.fromkeys(map(self._memory, known), 0), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.held.setdefault(self._memory(x), x.untyped_storage().nbytes())
        if sum(self.held.values()) > self.bytes:
            self.held = {memory: n for memory, n in self.held.items() if not memory.expired()}
            self.bytes = max(self.bytes, sum(self.held.values()))
        return out

    @staticmethod
    def _memory(x):
        return StorageWeakRef(x.untyped_storage())


class _OnHopper(Ours):
    """Calls that make the scratch memory of Hopper's plans beside their results."""

    def forward(self, q, k, v, call, terms, summand):
        found = super().forward(q, k, v, call, terms, summand)
        _scratch(q, plan_calls.forward(_shape(q, k, call, out_fp32=summand)))
        return found

    def backward(self, dout, dlse, q, k, v, out, lse, call, terms, summand):
        found = super().backward(dout, dlse, q, k, v, out, lse, call, terms, summand)
        _scratch(q, plan_calls.backward(_shape(q, k, call, gradients_fp32=summand)))
        return found


def _shape(q, k, call, **more):
    (batch, heads, tokens, dim), sides = q.shape, (call.left, call.right)
    return Shape(
        batch, heads, k.shape[1], tokens, k.shape[2], dim, dim, q.itemsize, k.itemsize, call.right == 0, *sides, **more
    )


def _scratch(q, plan):
    return [q.new_empty(buffer.bytes(q.itemsize), dtype=torch.uint8) for buffer in plan.scratch]


class _Sharing(OneRank):
    """Has memory, of which PyTorch does not know, for what is computed for other ranks."""

    def __init__(self, size, rank, tokens, heads):
        super().__init__(size, rank)
        self.memory = torch.empty(2, 2 * tokens, 1, heads, 128, device="meta")

    def post(self, parcels, step):
        """Copied into that memory, if not written there."""
        return []

    def reserve(self, moves, kinds):
        """Of keys and values."""
        return [by_head(x[:tokens, :, :heads]) for x, ((_, heads, tokens, _), _) in zip(self.memory, kinds)]


@pytest.fixture(autouse=True)
def nothing_kept():
    """Tests change what a call's preparation reads, as nothing else does."""
    prepared.forget()


@pytest.fixture
def hopper(monkeypatch):
    """Tensors without memory have the facts and the kernels of an H200."""
    monkeypatch.setattr(cost, "machine_of", lambda device: SM90)
    monkeypatch.setitem(KERNELS, "on hopper", _OnHopper())


def _held(tokens, heads, kv_heads, size, rank, kernel="on hopper", mask=CAUSAL, shares=False, **more):
    """What a rank of a ring holds, in shards of keys and values: forward, beside q, k, v, out and lse, and backward,
    beside these, dout and the gradients; and at most in each pass, beside what it is given, in bytes."""
    made = (torch.empty(1, tokens, h, 128, dtype=torch.bfloat16, device="meta") for h in (heads, kv_heads, kv_heads))
    q, k, v = inputs = [x.transpose(1, 2).requires_grad_() for x in made]
    ring = _Sharing(size, rank, tokens, kv_heads) if shares else OneRank(size, rank)
    known = [ring.memory] if shares else []
    with _Peak(*inputs, *known) as forward:
        out, lse = context_parallel_attention(*inputs, ring, mask, mode="ring", kernel=kernel, **more)
    dout = torch.empty_like(out)
    with _Peak(*inputs, out, lse, dout, *known) as backward:
        torch.autograd.grad(out, inputs, dout)
    own, shard = out.nbytes + lse.nbytes, k.nbytes + v.nbytes
    beside = (forward.bytes - own) / shard, (backward.bytes - q.nbytes - shard) / shard
    return *beside, forward.bytes, own + backward.bytes


def _problem(tokens, heads, kv_heads, size):
    whole = size * tokens
    return cost.Problem(Layout.zigzag(whole, size), (0, whole), Sight(right=0), 1, heads, kv_heads, 128)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("size, ranks, lengths", [(2, (0, 1), 3), (8, (0, 3, 7), 3), (64, (31,), 1)])
def test_a_ring_holds_little_beside_its_shard(heads, kv_heads, size, ranks, lengths, hopper):
    """At most 2.2 shards in both passes, as the model has it, from 32,768 tokens a rank on; at most twice as much for
    twice the tokens."""
    assert parts.ROOM == 2.2
    before = None
    for tokens in (32768, 65536, 131072)[:lengths]:
        each = [_held(tokens, heads, kv_heads, size, rank) for rank in ranks]
        modelled = cost.ring_parts(_problem(tokens, heads, kv_heads, size), SM90).held
        for i in (0, 1):
            most = max(found[i] for found in each)
            assert most <= 2.2 and most <= modelled[i] <= 1.15 * most, (i, tokens, each, modelled)
            peak = max(found[2 + i] for found in each)
            assert before is None or peak <= 2.05 * before[i], (i, tokens)
        before = [max(found[2 + i] for found in each) for i in (0, 1)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("size, ranks", [(2, (0, 1)), (8, (0, 3, 7))])
def test_a_ring_through_shared_memory_holds_no_more(heads, kv_heads, size, ranks, hopper):
    """Beside that memory: though dq is rounded while gradients of keys travel."""
    for tokens in (32768, 65536):
        modelled = cost.ring_parts(_problem(tokens, heads, kv_heads, size), SM90).held
        for rank in ranks:
            found = _held(tokens, heads, kv_heads, size, rank, shares=True)
            assert all(most <= bound for most, bound in zip(found, modelled)), (tokens, rank, found, modelled)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_short_shards_too_take_no_more_than_in_proportion(heads, kv_heads, hopper):
    """From lengths where smaller calls would lose too much on to those where they do not. Without what kernels keep:
    33 MB where their last tiles are divided."""
    found = [_held(tokens, heads, kv_heads, 8, 3, "tilesmith")[2:] for tokens in (2048, 4096, 8192, 16384, 32768)]
    for less, more in pairwise(found):
        assert all(b <= 2.05 * a for a, b in zip(less, more)), found


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_more_ranks_hold_no_more(heads, kv_heads, hopper):
    assert _held(65536, heads, kv_heads, 16, 3) == _held(65536, heads, kv_heads, 8, 3)


STARTS = (0, 500, 501, 9000, 30000, 30100, 65536)


@pytest.mark.parametrize(
    "layout, sight, named",
    [
        (Layout.balanced(STARTS, 4), Sight(right=0), {"mask": CAUSAL, "cu_seqlens": STARTS}),
        (Layout.zigzag(65536, 4), Sight(4095, 0), {"mask": ops.Mask(causal=True, window=4095)}),
        (Layout.contiguous(65536, 4), Sight(100, 0), {"mask": ops.Mask(causal=True, window=100)}),
        (Layout.contiguous(65536, 4), Sight(right=0), {"mask": CAUSAL}),
        (Layout.contiguous(65536, 4), Sight(), {"mask": ops.Mask()}),
    ],
)
def test_the_model_bounds_other_masks_and_layouts_too(layout, sight, named, hopper):
    starts = named.get("cu_seqlens", (0, layout.tokens))
    modelled = cost.ring_parts(cost.Problem(layout, starts, sight, 1, 32, 8, 128), SM90).held
    for rank in range(layout.size):
        found = _held(layout.local, 32, 8, layout.size, rank, "tilesmith", layout=layout, **named)
        assert all(counted <= most for counted, most in zip(found[:2], modelled)), (rank, found, modelled)


def test_parts():
    assert splits(16, 4) == [Split(1), Split(2), Split(4), Split(4, 2), Split(4, 4)]
    assert splits(10, 2) == [Split(1), Split(2), Split(2, 2), Split(2, 3), Split(2, 5)]
    thirds = [HeadPart((0, 1), (0, 1)), HeadPart((1, 3), (0, 1)), HeadPart((3, 5), (0, 1))]
    assert list(head_parts(10, 2, Split(2, 3)))[:3] == thirds
    assert head_parts(8, 2, Split()) == (HeadPart((0, 8), (0, 2)),)
    halves = [HeadPart((0, 2), (0, 1)), HeadPart((2, 4), (0, 1)), HeadPart((4, 6), (1, 2)), HeadPart((6, 8), (1, 2))]
    assert list(head_parts(8, 2, Split(2, 2))) == halves
    for split in splits(30, 6):  # each query head once, beside the kv head that it reads
        found = head_parts(30, 6, split)
        assert len(found) == split.parts and [h for part in found for h in range(*part.q)] == list(range(30))
        assert all(part.kv[0] <= h // 5 < part.kv[1] for part in found for h in range(*part.q))


def test_the_choice_is_the_fewest_parts_that_fit(monkeypatch):
    """And fewer where they would cost too much time, which is said in words."""
    problem = _problem(32768, 32, 8, 8)
    chosen = cost.ring_parts(problem, SM90)
    assert not any(chosen.wanted) and chosen.splits.forward.parts < chosen.splits.backward.parts
    holding = parts.Holding(
        cost.schedule(problem.layout, problem.starts, problem.sight, 1, True, 32, 8, True), problem.parts_of, 132
    )
    for i, taken in enumerate(chosen.splits):
        able = splits(32, 8)
        fewer = able[able.index(taken) - 1]
        assert holding.shards(taken)[i] <= parts.ROOM < holding.shards(fewer)[i] and 0.0 < chosen.loss[i] < parts.LOSS
    for tokens in (1024, 8192):
        short = cost.ring_parts(_problem(tokens, 32, 8, 8), SM90)
        assert all(short.wanted) and max(short.loss) <= parts.LITTLE and min(short.held) > parts.ROOM
        assert "shards and be" in str(short) and "% slower" in short.wanted[1]
    monkeypatch.setattr(parts, "LOSS", 1e9)
    forced = cost.ring_parts(_problem(1024, 32, 8, 8), SM90)
    assert not any(forced.wanted) and forced.splits == chosen.splits
    monkeypatch.setattr(parts, "ROOM", 0.01)
    assert "no parts hold as little as 0.01" in str(cost.ring_parts(problem, SM90))


def test_more_tokens_never_mean_fewer_parts():
    for heads, kv_heads in (*HEADS, (32, 32), (8, 1), (32, 4)):
        for size in (2, 8):
            found = [cost.ring_parts(_problem(1 << n, heads, kv_heads, size), SM90) for n in range(10, 21)]
            many = [[split.parts for split in one.splits] for one in found]
            assert many == sorted(many, key=lambda x: x[0]) == sorted(many, key=lambda x: x[1]), (heads, kv_heads)


def test_an_explanation_says_what_a_ring_holds():
    said = explain_context_parallel(1 << 18, 8, heads=32, kv_heads=8, mask=CAUSAL, machine=SM90)
    ring = next(one for one in said.estimates if one.mode == "ring")
    assert ring.parts == cost.ring_parts(_problem(1 << 15, 32, 8, 8), SM90)
    told = next(line for line in str(said).splitlines() if line.startswith("  ring: "))
    assert (
        f"forward in {ring.parts.splits.forward.parts} parts of the heads" in told
        and "shards of keys and sums held" in told
    )
    assert all(one.parts is None for one in said.estimates if one.mode != "ring")
