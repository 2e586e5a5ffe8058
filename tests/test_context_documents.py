"""How packed documents are divided: what every layout holds, and what it costs beside blocks of one width."""

import random
from itertools import accumulate

import pytest
import torch

from tilesmith import ops
from tilesmith.bench.context_parallel_problems import documents_of
from tilesmith.distributed import Layout, LocalRing, context_parallel_attention, documents
from tilesmith.distributed.pieces import Sight
from tilesmith.distributed.ranges import causal_pairs, length
from tilesmith.distributed.schedule import schedule

CAUSAL = Sight(right=0)


def _drawn(seed: int) -> tuple[tuple[int, ...], int, int]:
    """Boundaries, ranks, tokens: documents of all kinds, some empty, sometimes with padding behind them."""
    draw = random.Random(seed)
    kind, size, count = seed % 6, draw.choice([1, 2, 3, 4, 5, 8, 16]), draw.randint(1, 60)
    lengths = {
        0: [draw.randint(0, 9) for _ in range(count)],
        1: [draw.randint(1, 2000)] * draw.randint(1, 20),
        2: [draw.randint(1, 20000)],
        3: [draw.randint(5000, 20000), *(draw.randint(1, 300) for _ in range(count))],
    }.get(kind) or [int(draw.lognormvariate(5, 1.5)) for _ in range(count)]
    draw.shuffle(lengths)
    starts = (0, *accumulate(lengths))
    return starts, size, starts[-1] + (draw.choice([0, 0, 1, 7, 999]))


@pytest.mark.parametrize("some", range(6))
def test_layouts_of_documents(some):
    """Each token once, in as many tokens a rank as there must be; the same each time; what a layout says of its work is
    what the schedule has; none is more work than blocks of one width."""
    for seed in range(some, 300, 6):
        starts, size, tokens = _drawn(seed)
        layout = Layout.balanced(starts, size, tokens)  # which checks that each token is held once
        assert layout == Layout.balanced(list(starts), size, tokens)
        if layout != Layout._blocks(starts, size, tokens):  # whose widths are rounded up
            assert layout.local == -(-tokens // size)
        work = documents.work(starts, layout.ranges)
        plan = schedule(layout, starts, CAUSAL, 1, False, 1, 1)
        moves = [move for stage in plan.stages for move in stage.transfers]
        most = [
            sum(m.tokens for m in moves if getattr(m, side) == r) for side in ("source", "target") for r in range(size)
        ]
        assert work.moved == max(most), seed
        assert work.pairs == max(plan.pairs(r) for r in range(size)), seed
        assert work.pieces == max(map(len, layout.ranges)), seed
        blocks = documents.work(starts, Layout._blocks(starts, size, tokens).ranges)
        assert work.total <= blocks.total, seed
        assert work.pairs <= max(blocks.pairs, 1.1 * causal_pairs(starts, (0, tokens)) / size), seed


@pytest.mark.parametrize("size", [2, 4, 8])
def test_long_documents_among_short_ones_are_even(size):
    """Log-normal lengths as web text has, where the longest may have more pairs than a rank."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [min(16384, max(16, int(draw.lognormvariate(6.4, 1.5)))) for _ in range(100)]
        starts = (0, *accumulate(lengths))
        pairs = causal_pairs(starts, (0, starts[-1]))
        work = documents.work(starts, Layout.balanced(starts, size).ranges)
        blocks = documents.work(starts, Layout._blocks(starts, size, starts[-1]).ranges)
        assert work.pairs * size <= 1.10 * pairs, seed
        assert work.moved <= 0.8 * blocks.moved, seed


def test_one_document_is_zigzag():
    for size, tokens in ((2, 64), (4, 4096), (8, 65536), (3, 600)):
        layout = Layout.balanced((0, tokens), size)
        assert layout == Layout.zigzag(tokens, size)
        assert layout == Layout.balanced((0, 0, tokens, tokens), size)


def test_documents_that_fit_stay_whole():
    starts = tuple(range(0, 8001, 1000))
    for size in (1, 2, 4, 8):
        assert Layout.balanced(starts, size) == Layout.contiguous(8000, size)


def test_padding_fills_what_documents_leave():
    """So that none of these is cut."""
    layout = Layout.balanced((0, 30, 60), 2, 100)
    assert documents.work((0, 30, 60), layout.ranges).moved == 0
    assert [length(ranges) for ranges in layout.ranges] == [50, 50]


@pytest.mark.parametrize(
    "size, blocks, moved, most", [(2, 25172, 7397, 3705), (4, 55078, 18807, 8174), (8, 127106, 49322, 11568)]
)
def test_the_documents_of_the_benchmark(size, blocks, moved, most):
    """Keys that travel, and the most that one rank receives or others read of it."""
    starts = (0, *accumulate(documents_of(65536)))
    held = Layout._blocks(starts, size, 65536), Layout.balanced(starts, size)
    plans = [schedule(layout, starts, CAUSAL, 1, False, 1, 1) for layout in held]
    assert [sum(m.tokens for s in plan.stages for m in s.transfers) for plan in plans] == [blocks, moved]
    assert documents.work(starts, held[1].ranges).moved == most


@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses"])
@pytest.mark.parametrize("lengths, size, padding", [
    ((5, 90, 3, 17, 2, 30, 1, 1, 11), 2, 0),
    ((70, 5, 4, 9, 1, 1, 2, 33, 60, 8), 4, 3),
    ((8, 8, 8, 8, 8, 8), 4, 0),
    ((7, 13, 9, 11), 2, 0),  # nothing travels
    ((0, 100, 0), 4, 9),
])  # fmt: skip
def test_values_are_those_of_one_process(lengths, size, padding, mode):
    """Out, lse and gradients, of documents that are peeled and that are whole."""
    starts = (0, *accumulate(lengths))
    tokens, mask = starts[-1] + padding, ops.Mask(causal=True)
    layout = Layout.balanced(starts, size, tokens)
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(1, h, tokens, 8, dtype=torch.float64, generator=generator).requires_grad_() for h in (8, 4, 4)
    )
    cu = torch.tensor(starts, dtype=torch.int32)
    real = [x[:, :, : starts[-1]] for x in (q, k, v)]
    out, lse = ops.attention(*real, mask, cu_seqlens_q=cu, cu_seqlens_k=cu)
    slopes = torch.randn(out.shape, dtype=out.dtype), torch.randn(lse.shape, dtype=lse.dtype)
    exact = torch.autograd.grad((out, lse), (q, k, v), slopes)
    shards = [[layout.shard(x, rank, 2) for rank in range(size)] for x in (q, k, v)]
    named = {"mode": mode, "layout": layout, "cu_seqlens": starts}
    outs, lses = context_parallel_attention(*shards, LocalRing(size), mask, **named)
    found = tuple(layout.unshard(x, 2)[:, :, : starts[-1]] for x in (outs, lses))
    torch.testing.assert_close(found, (out, lse))
    for g, e in zip(torch.autograd.grad(found, (q, k, v), slopes), exact):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_of_lengths_fill_ranks(size):
    """Many documents of no round length go whole to ranks of equal numbers of tokens: nothing travels."""
    for seed in range(5):
        draw = random.Random(seed)
        starts = (0, *accumulate(draw.randint(20, 800) for _ in range(200)))
        work = documents.work(starts, Layout.balanced(starts, size).ranges)
        assert work.moved == 0 and work.calls == 1, seed
        assert work.pairs * size <= 1.03 * causal_pairs(starts, (0, starts[-1])), seed
