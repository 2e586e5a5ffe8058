"""Which calls pieces become: as few as there can be, and together what one process computes. Random layouts, documents
and masks, each by its seed."""

import random
from itertools import pairwise

import pytest
import torch

import tilesmith.distributed.pieces as pieces_module
import tilesmith.distributed.schedule as schedule_module
from test_context_parallel import sees_each_pair_once
from tilesmith import ops
from tilesmith.bench.context_parallel_problems import Problem, documents_of
from tilesmith.distributed import Layout, LocalRing, context_parallel_attention, cost, prepared
from tilesmith.distributed.layout import joined
from tilesmith.distributed.parts import Split, Splits
from tilesmith.distributed.pieces import FAR, Call, Piece, Sight, _merged, calls, pieces, spans
from tilesmith.distributed.schedule import schedule

CAUSAL = Sight(right=0)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Tests change what schedules are made by, as nothing else does."""
    yield
    prepared.forget()
    schedule.cache_clear()


def _layout(draw: random.Random, tokens: int, size: int) -> Layout:
    """Blocks of random widths, each of a random rank; ranks may hold nothing, and padding."""
    cuts = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(draw.randint(0, 12)))})
    held = [[] for _ in range(size)]
    for block in pairwise(cuts):
        held[draw.randrange(size)].append(block)
    ranges = tuple(joined(blocks) for blocks in held)
    longest = max(sum(stop - start for start, stop in each) for each in ranges)
    return Layout(tokens, ranges, longest + draw.randint(0, 2))


def _random(seed: int) -> tuple[Layout, tuple[int, ...], Sight, bool]:
    """A layout, boundaries of documents, a mask, and whether keys come in steps."""
    draw = random.Random(seed)
    tokens, size = draw.randint(1, 60), draw.randint(2, 5)
    count = draw.choice([0, 1, 4, 8, 12])
    ends = sorted(draw.randint(0, tokens) for _ in range(count))
    starts = (0, *ends, tokens if draw.random() < 0.8 or not ends else max(ends[-1], tokens - 3))
    window = draw.randint(0, tokens)
    sight = draw.choice([CAUSAL, CAUSAL, Sight(), Sight(window, 0), Sight(window, draw.randint(0, 9))])
    kinds = [Layout.zigzag(tokens, size), Layout.contiguous(tokens, size), Layout.balanced(starts, size, tokens)]
    layout = draw.choice([*kinds, *(_layout(draw, tokens, size) for _ in range(3))])
    return layout, starts, sight, draw.random() < 0.5


def _fewest(found: list[Piece]) -> int:
    """The fewest chains of pieces, in each of which queries and keys ascend: as many as there are pieces, less the
    largest number of pairs of a piece and its successor (Dilworth, by matching)."""
    followers = [
        [j for j, b in enumerate(found) if b.q >= a.q + a.tokens and b.k >= a.k + a.keys] for a in found
    ]  # fmt: skip
    before: dict[int, int] = {}

    def matched(i: int, tried: set[int]) -> bool:
        for j in followers[i]:
            if j not in tried:
                tried.add(j)
                if j not in before or matched(before[j], tried):
                    before[j] = i
                    return True
        return False

    return len(found) - sum(matched(i, set()) for i in range(len(found)))


@pytest.mark.parametrize("seed", range(200))
def test_random_layouts_see_each_pair_once(seed, monkeypatch):
    """With gaps of any length, of three tokens, and of none; and where queries that see others' keys are few."""
    layout, starts, sight, steps = _random(seed)
    for gap in (FAR, 3, 0):
        few = random.Random(seed + gap)
        monkeypatch.setattr(pieces_module, "TILE", few.choice([1, 2, 4]))
        monkeypatch.setattr(pieces_module, "FEW", few.choice([1, 2]))
        monkeypatch.setattr(schedule_module, "COPIED", few.choice([0, 2, 100]))
        plan = schedule.__wrapped__(layout, starts, sight, 1, steps, 2, 2, True, gap)
        for stages in (plan.stages, plan.answers):
            sees_each_pair_once(plan, stages, layout, starts, sight)
            for stage in stages:
                for call in (call for each in stage.calls for call in each):
                    _has_its_runs(call, gap)


def _has_its_runs(call: Call, gap: int) -> None:
    assert call.runs[0][0] == call.q and call.runs[-1][1] == call.q + call.tokens
    assert all(low - high <= gap for (_, high), (low, _) in zip(call.runs, call.runs[1:]))
    if call.cu_q:
        ends = (call.cu_q[0], call.cu_k[0], call.cu_q[-1], call.cu_k[-1])
        assert ends == (0, 0, call.tokens, call.keys) and len(call.cu_q) == len(call.cu_k)
        keys = [0] * call.tokens
        for start, stop, first, end in zip(call.cu_q, call.cu_q[1:], call.cu_k, call.cu_k[1:]):
            assert start <= stop and first <= end
            keys[start:stop] = [end - first] * (stop - start)
        rows = {call.q + i for i, n in enumerate(keys) if n}
        assert rows == {i for run in call.runs for i in range(*run)} and call.rows == len(rows)


@pytest.mark.parametrize("seed", range(200))
def test_no_fewer_calls_can_have_the_pieces(seed):
    """Those of random documents on random ranks, without windows; random rectangles, which share queries or keys."""
    draw = random.Random(seed)
    layout, starts, _, _ = _random(seed)
    found = []
    for rank in range(layout.size):
        queries = spans(layout.ranges[rank], starts)
        others = [span for r in range(layout.size) if r != rank for span in spans(layout.ranges[r], starts, 100 * r)]
        found.append(pieces(queries, others, CAUSAL))
    found.append([
        Piece(draw.randint(0, 40), draw.randint(1, 12), draw.randint(0, 40), draw.randint(1, 12), FAR, FAR)
        for _ in range(draw.randint(1, 14))
    ])  # fmt: skip
    for some in found:
        merged = _merged(sorted(some, key=lambda piece: (piece.q, piece.k)))
        assert len(calls(some)) == _fewest(merged)


def _attended(seed: int, mode: str, deterministic: bool, **terms) -> None:
    """out, lse and all gradients of a local ring in fp64 against one process. terms: more of the mask and the score."""
    layout, starts, sight, _ = _random(seed)
    torch.manual_seed(seed)
    causal, left = sight.right == 0, -1 if sight.left >= FAR else sight.left
    window = None if (causal and left < 0) or sight == Sight() else (left, -1 if causal else sight.right)
    tokens, size = layout.tokens, layout.size
    dense = torch.rand(1, 4, tokens, tokens) < 0.8 if "dense" in terms else None
    score = ops.Score(bias=torch.randn(1, 4, tokens, tokens, dtype=torch.float64)) if "bias" in terms else ops.Score()
    ids = torch.randint(0, 2, (1, tokens), dtype=torch.int32) if "documents" in terms else None
    mask = ops.Mask(causal=causal, window=window, dense=dense, documents=ids)
    q, k, v = (torch.randn(1, h, tokens, 4, dtype=torch.float64).requires_grad_() for h in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if seed % 3 == 0 else None
    cu = torch.tensor(starts, dtype=torch.int32)
    expected = ops.attention(q, k, v, mask, score, sinks=sinks, cu_seqlens_q=cu, cu_seqlens_k=cu)
    slopes = torch.randn_like(expected[0]), torch.where(expected[1].isfinite(), torch.randn_like(expected[1]), 0.0)
    asked = [q, k, v] + ([] if sinks is None else [sinks])
    exact = torch.autograd.grad(expected, asked, slopes)
    shards = [[layout.shard(x, rank, 2) for rank in range(size)] for x in (q, k, v)]
    named = {"layout": layout, "cu_seqlens": starts, "sinks": sinks, "deterministic": deterministic}
    outs, lses = context_parallel_attention(*shards, LocalRing(size), mask, score, mode=mode, **named)
    found = layout.unshard(outs, 2), layout.unshard(lses, 2)
    torch.testing.assert_close(found, expected)
    for g, e in zip(torch.autograd.grad(found, asked, slopes), exact):
        torch.testing.assert_close(g, e)


def _few(monkeypatch, seed: int) -> None:
    """Queries that see others' keys are few, whatever they are."""
    monkeypatch.setattr(pieces_module, "TILE", 2)
    monkeypatch.setattr(pieces_module, "FEW", 1)
    monkeypatch.setattr(schedule_module, "COPIED", seed % 3)


@pytest.mark.parametrize("seed", range(200))
def test_random_layouts_equal_one_process(seed, monkeypatch):
    """Half of them as if queries that see others' keys were few; some in parts of heads."""
    if seed % 8 < 4:
        _few(monkeypatch, seed)
    if seed % 5 == 0:
        monkeypatch.setattr(cost, "ring_parts", lambda *_: cost.RingParts(Splits(Split(2), Split(2, 2))))
    _attended(seed, ("allgather", "ring")[seed % 2], seed % 4 < 2)


@pytest.mark.parametrize("seed", range(48))
def test_masks_and_biases_of_random_layouts_equal_one_process(seed, monkeypatch):
    """What tensors say of a rank's queries and all keys, where a call has some of both."""
    if seed % 4 < 2:
        _few(monkeypatch, seed)
    terms = [("dense",), ("bias",), ("documents",), ("dense", "bias", "documents")][seed // 4 % 4]
    _attended(1000 + seed, ("allgather", "ring")[seed % 2], False, **dict.fromkeys(terms))


@pytest.mark.parametrize("mode", ["allgather", "ring"])
def test_dropout_under_a_window_is_that_of_the_gradients(mode, monkeypatch):
    """A mask belongs to a call, so that results have the calls of the gradients."""
    _few(monkeypatch, 0)
    layout, mask = Layout.contiguous(32, 4), ops.Mask(causal=True, window=3)
    v = torch.eye(32, dtype=torch.float64).expand(1, 2, 32, 32).contiguous()
    q, k = (torch.zeros(1, 2, 32, 8, dtype=torch.float64) for _ in range(2))
    shards = [[layout.shard(x, rank, 2).requires_grad_() for rank in range(4)] for x in (q, k, v)]
    outs, _ = context_parallel_attention(*shards, LocalRing(4), mask, mode=mode, layout=layout, dropout_p=0.5)
    dv = torch.autograd.grad(sum(x.sum() for x in outs), shards[2])
    p = layout.unshard(outs, 2)  # values are the unit matrix, so that out is what was not dropped
    torch.testing.assert_close(layout.unshard(dv, 2)[..., 0], p.sum(2))


@pytest.mark.parametrize("tokens, heads, most", [(1 << 16, 16, [2, 3]), (1 << 16, 64, [5, 4]), (1 << 20, 16, [6, 6])])
def test_packed_documents_are_few_calls(tokens, heads, most):
    """By the model of two H200s, where blocks of one width cut them. Without gaps 65,536 tokens take 6 and 5 calls, and
    2^20 tokens 6 and 7; where runs of queries without keys would take the device longer than calls of their own, they
    are not passed over. Divided by documents a rank has two calls, or one where none is cut."""
    problem = Problem("packed", tokens, heads, heads, lengths=documents_of(tokens))
    blocks = Layout._blocks(problem.starts, 2, tokens)
    for layout, count in ((blocks, most), (problem.layout(2), [1, 1] if tokens == 1 << 20 else [2, 2])):
        asked = cost.Problem(layout, problem.starts, CAUSAL, 1, heads, heads, 128)
        plan = cost.planned(asked, cost.MACHINES["sm90"], 1, False)
        assert [sum(len(stage.calls[r]) for stage in plan.stages) for r in range(2)] == count


@pytest.mark.parametrize("window, first", [(127, (0, 32768)), (4095, (4096, 28672))])
def test_windows_are_two_calls_of_results(window, first):
    """One on a rank's own keys, one of its first tile on all keys that it sees. What the tile sees of its own keys is
    not computed twice where that takes longer than to put results together."""
    problem = Problem("window", 1 << 16, window=window)
    plan = schedule(problem.layout(2), (0, 1 << 16), Sight(window, 0), 1, False, 16, 16)
    (own,), (tile,) = (stage.calls[1] for stage in plan.answers)
    assert (own.q, own.tokens) == first
    assert tile == Call(0, window + 1, 0, 2 * window + 1, window, 0) and plan.answers[1].whole == (False, True)
    assert [len(stage.calls[1]) for stage in plan.stages] == [1, 1]


@pytest.mark.parametrize(
    "name, layout, sight, steps, nearly",
    [
        ("window", Layout.contiguous(1 << 12, 2), Sight(127, 0), False, [True, True]),
        ("window, four ranks", Layout.contiguous(1 << 12, 4), Sight(127, 0), True, [True] * 4),
        ("a quarter", Layout.contiguous(1 << 12, 2), Sight(512, 0), False, [True, True]),
        ("more than a quarter", Layout.contiguous(1 << 12, 2), Sight(513, 0), False, [False, False]),
        ("a window beyond the next rank", Layout.contiguous(1 << 12, 32), Sight(140, 0), False, [False] * 32),
        ("causal", Layout.zigzag(1 << 12, 2), CAUSAL, False, [False, False]),
        ("one rank", Layout.contiguous(1 << 12, 1), CAUSAL, False, [True]),
    ],
)
def test_which_gradients_are_whole_but_for_few_tokens(name, layout, sight, steps, nearly):
    """Both what a rank asks of others and what others ask of it count: the first rank of a window asks for nothing."""
    plan = schedule(layout, (0, layout.tokens), sight, 1, steps, 4, 4)
    assert [plan.sums(r).nearly_whole for r in range(layout.size)] == nearly


def test_gradients_of_whole_documents_are_whole():
    """The benchmark's documents, one of which is cut between two ranks: 5,782 and 3,705 of 32,768 queries see others'
    keys."""
    problem = Problem("packed", 1 << 16, lengths=documents_of(1 << 16))
    asked = cost.Problem(problem.layout(2), problem.starts, CAUSAL, 1, 16, 16, 128)
    plan = cost.planned(asked, cost.MACHINES["sm90"], 1, False)
    assert [plan.sums(r).nearly_whole for r in range(2)] == [True, True]
