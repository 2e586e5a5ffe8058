"""Context parallelism: gloo ranks run the checks of sharded_context.py in one spawn; schedules, layouts and local rings
run here."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import tilesmith.distributed.cost as cost
import tilesmith.distributed.pieces as pieces_module
import tilesmith.distributed.prepared as prepared
from ranks import gloo, run_checks
from tilesmith import ops
from tilesmith.bench import context_parallel_model
from tilesmith.distributed import Layout, LocalRing, Machine, context_parallel_attention, explain_context_parallel
from tilesmith.distributed.kernels import KERNELS, Ours
from tilesmith.distributed.layout import causal_pairs, length
from tilesmith.distributed.parts import Split, Splits
from tilesmith.distributed.pieces import FAR, Call, Piece, Sight, calls, pieces, spans
from tilesmith.distributed.schedule import schedule, shared_heads

ROOT = Path(__file__).parents[1]


FOUR = (
    "modes",
    "hybrid",
    "disagreement",
    "layers",
    "many_ranks",
    "stalled",
    "order",
)  # of the checks, by parts of their names


@pytest.fixture(autouse=True)
def nothing_kept():
    """Tests change what a call's preparation reads, as nothing else does."""
    prepared.forget()


@gloo
@pytest.mark.parametrize("size, only", [(2, ()), (4, FOUR)])
def test_ranks(tmp_path, size, only):
    told = run_checks(tmp_path, ("sharded_sequences", "sharded_context"), size, only)
    assert not any("FAILED" in one for one in told), "\n".join(told)


@gloo
def test_the_checks_of_gpus_run_without_them():
    """tests/nccl_context.py, shorter and over gloo, so that it still runs when there are GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), env.get("PYTHONPATH", "")])
    run = subprocess.run([*command, ROOT / "tests" / "nccl_context.py"], env=env, capture_output=True, text=True)
    told = [line for line in run.stdout.splitlines() if line.startswith("rank ")]
    checks = (ROOT / "tests" / "nccl_context.py").read_text().count("\ndef check_")
    assert run.returncode == 0 and len(told) == 2 * checks and all(line.endswith(" ok") for line in told), (
        run.stdout + run.stderr
    )


LAYOUTS = [
    (Layout.zigzag(29, 4), (0, 29)),
    (Layout.contiguous(29, 3), (0, 29)),
    (Layout.zigzag(3, 4), (0, 3)),  # some ranks hold nothing
    (Layout.balanced((0, 3, 3, 20, 29), 4), (0, 3, 3, 20, 29)),
    (Layout.zigzag(24, 2), (0, 7, 20)),  # tokens behind the last document
]


@pytest.mark.parametrize("layout, starts", LAYOUTS)
@pytest.mark.parametrize("sight", [Sight(right=0), Sight(), Sight(4, 0), Sight(3, 5), Sight(0, 0)])
@pytest.mark.parametrize("steps", [False, True])
def test_a_schedule_sees_each_pair_once(layout, starts, sight, steps, monkeypatch):
    """And nothing else; only keys that somebody sees travel. So do calls for results, where those of few queries that
    see others' keys stand in place of those of their own keys."""
    degree = 2 if layout.size == 4 and not steps else 1
    plan = schedule(layout, starts, sight, degree, steps, 2, 2)
    sees_each_pair_once(plan, plan.stages, layout, starts, sight)
    monkeypatch.setattr(pieces_module, "TILE", 1)
    monkeypatch.setattr(pieces_module, "FEW", 1)
    cut = schedule.__wrapped__(layout, starts, sight, degree, steps, 2, 2)
    assert cut.stages == plan.stages
    sees_each_pair_once(cut, cut.answers, layout, starts, sight)


def sees_each_pair_once(plan, stages, layout, starts, sight):
    """Over all ranks."""
    seen = torch.zeros(layout.tokens, layout.tokens, dtype=torch.int64)
    for rank in range(0, layout.size, plan.degree):
        rows = torch.cat([torch.arange(*span) for span in (*plan.groups.ranges[rank // plan.degree], (0, 0))])
        for stage in stages:
            columns = torch.cat([torch.arange(*span) for span in (*stage.held[rank], (0, 0))])
            for low, high in (run for call in stage.calls[rank] for run in call.runs if stage.whole[rank]):
                seen[rows[low:high]] = 0
            for call in stage.calls[rank]:
                places = rows[call.q : call.q + call.tokens, None], columns[None, call.k : call.k + call.keys]
                seen[places] += _visible(call)
            used = torch.zeros(len(columns), dtype=torch.bool)
            for call in stage.calls[rank]:
                used[call.k : call.k + call.keys] |= _visible(call).any(0)
            assert used.all() or not stage.transfers
    packed = {
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(starts, dtype=torch.int32),
    }
    mask = ops.Mask(window=tuple(-1 if side == FAR else side for side in (sight.left, sight.right)))
    expected = mask.materialize(layout.tokens, layout.tokens, **packed)[0, 0]
    assert torch.equal(seen, expected.long())


def _visible(call: Call):
    mask = ops.Mask(window=(call.left, call.right))
    packed = {}
    if call.cu_q:
        packed = {
            "cu_seqlens_q": torch.tensor(call.cu_q, dtype=torch.int32),
            "cu_seqlens_k": torch.tensor(call.cu_k, dtype=torch.int32),
        }
    found = mask.materialize(call.tokens, call.keys, **packed)[0, 0]
    assert int(found.sum()) == call.pairs
    return found.long()


def test_causal_zigzag_is_two_calls():
    """A square causal call of its own keys, and a full one of each other rank's."""
    layout = Layout.zigzag(64, 4)
    plan = schedule(layout, (0, 64), Sight(right=0), 1, True, 1, 1)
    assert len(plan.stages) == 4
    for rank in range(4):
        assert plan.stages[0].calls[rank] == (Call(0, 16, 0, 16, -1, 0),)
        for step, stage in enumerate(plan.stages[1:], 1):
            source = (rank - step) % 4
            assert stage.calls[rank] == ((Call(0, 16, 0, 8) if source < rank else Call(8, 8, 0, 16)),)
    loads = {plan.pairs(rank) for rank in range(4)}
    assert max(loads) - min(loads) == 0


def test_windows_fetch_only_neighbours():
    plan = schedule(Layout.contiguous(400, 4), (0, 400), Sight(16, 0), 1, False, 1, 1)
    moves = plan.stages[1].transfers
    assert [(m.source, m.target, m.tokens) for m in moves] == [(0, 1, 16), (1, 2, 16), (2, 3, 16)]


def test_pieces_become_few_calls():
    """Documents of one rank are one packed call."""
    starts = (0, 3, 8, 20)
    own = spans(((0, 20),), starts)
    assert calls(pieces(own, own, Sight(right=0))) == (Call(0, 20, 0, 20, -1, 0, starts, starts),)
    assert calls([Piece(0, 4, 0, 8, FAR, FAR), Piece(4, 4, 0, 8, FAR, FAR)]) == (Call(0, 8, 0, 8),)


def test_layouts():
    x = torch.arange(29 * 2).view(1, 29, 2)
    for layout, _ in LAYOUTS[:4]:
        x = torch.arange(layout.tokens * 2).view(1, layout.tokens, 2)
        shards = [layout.shard(x, rank, fill=-1) for rank in range(layout.size)]
        assert {s.shape[1] for s in shards} == {layout.local}
        assert torch.equal(layout.unshard(shards), x)
        for rank, shard in enumerate(shards):
            held = length(layout.ranges[rank])
            assert torch.equal(shard[0, :held, 0] // 2, layout.positions(rank)[:held])
            assert (shard[0, held:] == -1).all()
    with pytest.raises(ValueError, match="x has 7 tokens in dim 1, the layout 29"):
        LAYOUTS[0][0].shard(torch.zeros(1, 7), 0)
    with pytest.raises(ValueError, match="ascending numbers from 0"):
        Layout.balanced((0, 5, 3), 2)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_documents_are_balanced(size):
    """A few long documents among short ones: the busiest rank within 10 % of the mean."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(60, generator=generator) * 1.2 + 6).exp().long().clamp(16, 16384)
    starts = (0, *lengths.cumsum(0).tolist())
    layout = Layout.balanced(starts, size)
    loads = [sum(causal_pairs(starts, span) for span in ranges) for ranges in layout.ranges]
    assert sum(loads) == sum(n * (n + 1) // 2 for n in lengths.tolist())
    assert max(loads) * size <= 1.10 * sum(loads)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses"])
def test_a_local_ring(size, mode):
    """Shards of one process: GQA, padding, sinks, a batch."""
    layout, mask = Layout.zigzag(37, size), ops.Mask(causal=True)
    q, k, v = (torch.randn(2, h, 37, 8, dtype=torch.float64).requires_grad_() for h in (8, 2, 2))
    sinks = torch.randn(8, dtype=torch.float64).requires_grad_()
    out, lse = ops.attention(q, k, v, mask, sinks=sinks)
    slopes = torch.randn_like(out), torch.randn_like(lse)
    exact = torch.autograd.grad((out, lse), (q, k, v, sinks), slopes)
    shards = [[layout.shard(x, rank, 2) for rank in range(size)] for x in (q, k, v)]
    outs, lses = context_parallel_attention(*shards, LocalRing(size), mask, mode=mode, layout=layout, sinks=sinks)
    found = layout.unshard(outs, 2), layout.unshard(lses, 2)
    torch.testing.assert_close(found, (out, lse))
    for g, e in zip(torch.autograd.grad(found, (q, k, v, sinks), slopes), exact):
        torch.testing.assert_close(g, e)


SPLITS = [
    Splits(Split(2), Split(2)),
    Splits(Split(), Split(2, 4)),
    Splits(Split(2, 2), Split(2)),
    Splits(Split(2, 4), Split(2, 2)),
]


@pytest.mark.parametrize("splits", SPLITS)
def test_a_ring_in_parts_of_heads(splits, monkeypatch):
    """Everything that a part has its own of: heads, sinks, biases; gradients of keys are sums over the parts of a kv
    head's query heads."""
    monkeypatch.setattr(cost, "ring_parts", lambda *_: cost.RingParts(splits))
    layout, mask = Layout.zigzag(37, 4), ops.Mask(causal=True, dense=torch.rand(1, 8, 37, 37) < 0.8)
    q, k, v = (torch.randn(1, h, 37, 8, dtype=torch.float64).requires_grad_() for h in (8, 2, 2))
    sinks, bias = torch.randn(8, dtype=torch.float64).requires_grad_(), torch.randn(1, 8, 37, 37, dtype=torch.float64)
    score, told = ops.Score(bias=bias), []

    class Told(Ours):
        def forward(self, q, k, *rest):
            told.append((q.shape[1], k.shape[1]))
            return super().forward(q, k, *rest)

        def backward(self, dout, dlse, q, k, *rest):
            told.append((-q.shape[1], k.shape[1]))
            return super().backward(dout, dlse, q, k, *rest)

    monkeypatch.setitem(KERNELS, "told", Told())
    out, lse = ops.attention(q, k, v, mask, score, sinks=sinks)
    slopes = torch.randn_like(out), torch.randn_like(lse)
    exact = torch.autograd.grad((out, lse), (q, k, v, sinks), slopes)
    shards = [[layout.shard(x, rank, 2) for rank in range(4)] for x in (q, k, v)]
    named = {"mode": "ring", "layout": layout, "sinks": sinks, "kernel": "told"}
    outs, lses = context_parallel_attention(*shards, LocalRing(4), mask, score, **named)
    found = layout.unshard(outs, 2), layout.unshard(lses, 2)
    torch.testing.assert_close(found, (out, lse))
    for g, e in zip(torch.autograd.grad(found, (q, k, v, sinks), slopes), exact):
        torch.testing.assert_close(g, e)
    forward, backward = splits
    assert set(told) == {
        (8 // forward.parts, 2 // forward.kv), (-8 // backward.parts, 2 // backward.kv)
    }  # fmt: skip


@pytest.mark.parametrize("splits", SPLITS)
def test_dropout_is_that_of_the_gradients(splits, monkeypatch):
    """A mask belongs to a call, so that both passes have the same parts."""
    monkeypatch.setattr(cost, "ring_parts", lambda *_: cost.RingParts(splits))
    layout = Layout.zigzag(32, 4)
    v = torch.eye(32, dtype=torch.float64).expand(1, 2, 32, 32).contiguous()
    q, k = torch.zeros(1, 8, 32, 8, dtype=torch.float64), torch.zeros(1, 2, 32, 8, dtype=torch.float64)
    shards = [[layout.shard(x, rank, 2).requires_grad_() for rank in range(4)] for x in (q, k, v)]
    outs, _ = context_parallel_attention(*shards, LocalRing(4), mode="ring", dropout_p=0.5)
    dv = torch.autograd.grad(sum(x.sum() for x in outs), shards[2])
    p = layout.unshard(outs, 2)  # values are the unit matrix, so that out is what was not dropped
    assert 0.4 < (p > 0).double().mean() < 0.6
    torch.testing.assert_close(layout.unshard(dv, 2)[..., 0], p.sum(2).unflatten(1, (2, 4)).sum(2))
    rows = (p > 0).flatten(0, 2)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)  # no two rows or heads drop alike


@pytest.mark.parametrize("mode", ["allgather", "ring"])
def test_few_queries_that_see_others_keys_have_calls_on_all_their_keys(mode, monkeypatch):
    """Under a window only the first of a rank's queries see a neighbour's keys, and no result is part of a sum, so that
    calls have the sinks and give out in q's dtype."""
    monkeypatch.setattr(pieces_module, "TILE", 2)
    layout, mask = Layout.contiguous(164, 4), ops.Mask(causal=True, window=3)
    q, k, v = (torch.randn(1, h, 164, 8, dtype=torch.float64).requires_grad_() for h in (4, 2, 2))
    sinks, told = torch.randn(4, dtype=torch.float64), []

    class Told(Ours):
        def forward(self, q, k, v, call, terms, summand):
            told.append((call.q, call.tokens, summand, terms.sinks is not None))
            return super().forward(q, k, v, call, terms, summand)

    monkeypatch.setitem(KERNELS, "told", Told())
    shards = [[layout.shard(x, rank, 2) for rank in range(4)] for x in (q, k, v)]
    named = {"mode": mode, "layout": layout, "sinks": sinks, "kernel": "told"}
    outs, lses = context_parallel_attention(*shards, LocalRing(4), mask, **named)
    found, expected = (layout.unshard(outs, 2), layout.unshard(lses, 2)), ops.attention(q, k, v, mask, sinks=sinks)
    torch.testing.assert_close(found, expected)
    assert sorted(told) == 3 * [(0, 4, False, True)] + 4 * [(0, 41, False, True)]
    slopes = torch.randn_like(expected[0]), torch.randn_like(expected[1])
    exact = torch.autograd.grad(expected, (q, k, v), slopes)
    for g, e in zip(torch.autograd.grad(found, (q, k, v), slopes), exact):
        torch.testing.assert_close(g, e)


class _Rounding(Ours):
    """Kernels of others, which round every result and gradient."""

    def summand(self, x):
        return x.dtype

    def forward(self, *args):
        return super().forward(*args[:-1], False)

    def backward(self, *args):
        return super().backward(*args[:-1], False)


def _errors(size, mode, kernel, window=None):
    """Relative errors of out, dq, dk and dv in bf16."""
    generator, mask = torch.Generator().manual_seed(1), ops.Mask(causal=True, window=window)
    *inputs, dout = (torch.randn(1, h, 256, 32, generator=generator).bfloat16() for h in (4, 2, 2, 4))
    whole = [x.double().requires_grad_() for x in inputs]
    out, _ = ops.attention(*whole, mask)
    exact = [out.detach(), *torch.autograd.grad(out, whole, dout.double())]
    layout = Layout.zigzag(256, size) if window is None else Layout.contiguous(256, size)
    shards = [[layout.shard(x, rank, 2).requires_grad_() for rank in range(size)] for x in inputs]
    named = {"mode": mode, "layout": layout, "kernel": kernel, "degree": 2 if mode == "hybrid" else None}
    outs, _ = context_parallel_attention(*shards, LocalRing(size), mask, **named)
    slopes = [layout.shard(dout, rank, 2) for rank in range(size)]
    found = [*(x.detach() for x in outs), *torch.autograd.grad(outs, [x for each in shards for x in each], slopes)]
    made = [layout.unshard(list(found[i * size : (i + 1) * size]), 2).double() for i in range(4)]
    return [float((g - e).norm() / e.norm()) for g, e in zip(made, exact)]


@pytest.mark.parametrize("mode", ["allgather", "ring", "ring, in parts", "ulysses", "hybrid"])
def test_errors_do_not_grow_with_ranks(mode, monkeypatch):
    """Results and gradients in fp32 lose nothing to several ranks, nor to parts of the heads. Of kernels that round
    them, each rank's rounding and the sum's have half of the variance each, about: what travels and what is added loses
    nothing more."""
    mode, _, divided = mode.partition(", ")
    if divided:
        monkeypatch.setattr(cost, "ring_parts", lambda *_: cost.RingParts(Splits(Split(2), Split(2, 2))))
    monkeypatch.setitem(KERNELS, "rounding", _Rounding())
    for kernel, most in (("tilesmith", 1.02), ("rounding", 1.15 * 2**0.5)):
        one = _errors(1, mode, kernel)
        for size in {"ulysses": (2, 4), "hybrid": (4, 8)}.get(mode, (2, 4, 8)):
            assert all(e <= most * o for e, o in zip(_errors(size, mode, kernel), one)), (kernel, size)


@pytest.mark.parametrize("mode", ["allgather", "ring", "ring, in parts"])
def test_few_gradients_are_rounded_twice(mode, monkeypatch):
    """Under a window each rank's kernel rounds what it gives of the rank's own keys, and few tokens get another part,
    which is fp32: errors are those of one process whatever the number of ranks."""
    mode, _, divided = mode.partition(", ")
    if divided:
        monkeypatch.setattr(cost, "ring_parts", lambda *_: cost.RingParts(Splits(Split(2), Split(2))))
    asked = []

    class Watched(Ours):
        def backward(self, *args):
            asked.append((args[7].tokens, args[-1]))
            return super().backward(*args)

    monkeypatch.setitem(KERNELS, "watched", Watched())
    one = _errors(1, mode, "watched", window=3)
    for size in (2, 4, 8):
        asked.clear()
        assert all(e <= 1.04 * o for e, o in zip(_errors(size, mode, "watched", window=3), one)), size
        parts = 2 if divided else 1
        assert sorted(asked) == sorted([(256 // size, False)] * size * parts + [(3, True)] * (size - 1) * parts)


@pytest.mark.parametrize("divided", [False, True])
def test_rows_that_see_nothing(divided, monkeypatch):
    """Empty documents, ranks without a visible key and NaN in what nobody sees; also where heads come in parts."""
    if divided:
        monkeypatch.setattr(cost, "ring_parts", lambda *_: cost.RingParts(Splits(Split(2), Split(2))))
    starts = (0, 0, 4, 4)
    layout = Layout.contiguous(16, 4)  # three ranks hold tokens behind the last document
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    k[:, :, 4:], v[:, :, 4:] = float("nan"), float("nan")
    shards = [[layout.shard(x, rank, 2).requires_grad_() for rank in range(4)] for x in (q, k, v)]
    for mode in ("ring",) if divided else ("allgather", "ring", "hybrid"):
        outs, lses = context_parallel_attention(
            *shards, LocalRing(4), ops.Mask(causal=True), mode=mode, degree=2 if mode == "hybrid" else None,
            layout=layout, cu_seqlens=starts,
        )  # fmt: skip
        out, lse = layout.unshard(outs, 2), layout.unshard(lses, 2)
        expected = ops.attention(*(x[:, :, :4] for x in (q, k, v)), ops.Mask(causal=True))
        torch.testing.assert_close((out[:, :, :4], lse[:, :, :4]), expected)
        assert not out[:, :, 4:].any() and (lse[:, :, 4:] == float("-inf")).all()
        grads = torch.autograd.grad(out.sum(), [x for each in shards for x in each])
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses"])
def test_the_gradient_of_lse_where_a_rank_holds_no_token(mode):
    layout = Layout.contiguous(2, 4)
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    shards = [[layout.shard(x, rank, 2) for rank in range(4)] for x in (q, k, v)]
    _, lses = context_parallel_attention(*shards, LocalRing(4), ops.Mask(causal=True), layout=layout, mode=mode)
    _, lse = ops.attention(q, k, v, ops.Mask(causal=True))
    found, exact = (torch.autograd.grad(x.sum(), (q, k)) for x in (layout.unshard(lses, 2), lse))
    torch.testing.assert_close(found, exact)


def _agrees(layout, mode, heads=(4, 2), degree=None):
    """Values and gradients of a causal call with sinks against one process. What padding holds, and what comes back for
    its results, is NaN."""
    tensors = [torch.randn(1, h, layout.tokens, 8, dtype=torch.float64).requires_grad_() for h in (*heads, heads[1])]
    sinks = torch.randn(heads[0], dtype=torch.float64, requires_grad=True)
    out, lse = ops.attention(*tensors, ops.Mask(causal=True), sinks=sinks)
    slopes = torch.randn_like(out), torch.randn_like(lse)
    exact = torch.autograd.grad((out, lse), (*tensors, sinks), slopes)
    shard = partial(layout.shard, dim=2, fill=float("nan"))
    shards = [[shard(x.detach(), r).requires_grad_() for r in range(layout.size)] for x in tensors]
    outs, lses = context_parallel_attention(
        *shards, LocalRing(layout.size), ops.Mask(causal=True), mode=mode, degree=degree, layout=layout, sinks=sinks
    )
    given = [shard(x, r) for x in slopes for r in range(layout.size)]
    flat = [x for each in shards for x in each]
    *grads, dsinks = torch.autograd.grad([*outs, *lses], [*flat, sinks], given)
    whole = [layout.unshard(x, 2) for x in (outs, lses)]
    whole += [layout.unshard(grads[i : i + layout.size], 2) for i in range(0, len(grads), layout.size)]
    torch.testing.assert_close([*whole, dsinks], [out, lse, *exact])
    for r in range(layout.size):
        padding = slice(length(layout.ranges[r]), None)
        assert (lses[r][:, :, padding] == -float("inf")).all()
        assert not any(x[:, :, padding].any() for x in (outs[r], *grads[r :: layout.size]))


MODES = ["allgather", "ring", "ulysses", "hybrid"]


@pytest.mark.parametrize("mode", MODES)
def test_sinks_get_nothing_from_padding(mode):
    """Its lse is -inf, not that of the sinks."""
    _agrees(Layout.zigzag(13, 2), mode, degree=2 if mode == "hybrid" else None)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (2, 1)])
def test_groups_without_tokens(heads):
    """They have heads all the same."""
    _agrees(Layout.contiguous(2, 4), "hybrid", heads, degree=2)


@pytest.mark.parametrize("mode", MODES)
def test_ranges_of_a_rank_that_touch(mode):
    """They are one range, as keys of several travel as one run."""
    layout = Layout(16, (((0, 4), (4, 4), (4, 6)), ((6, 9), (9, 16))), 10)
    assert layout == Layout(16, (((0, 6),), ((6, 16),)), 10)
    _agrees(layout, mode, degree=2 if mode == "hybrid" else None)


def test_gradients_of_gradients_are_refused():
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, _ = context_parallel_attention([x, x], [x, x], [x, x], LocalRing(2))
    for loss in (out[0].sum(), out[0].square().sum()):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="gradients of its gradients are not supported"):
            torch.autograd.grad(dx.sum(), x)


def test_refusals():
    x = [torch.randn(1, 4, 8, 8)] * 2
    for kind, match, named in [
        (ValueError, "degree must be at least 1, got 0", {"mode": "hybrid", "degree": 0}),
        (ValueError, "degree must divide the 2 ranks, got 3", {"mode": "hybrid", "degree": 3}),
        (TypeError, "degree must be an int, got '2'", {"mode": "hybrid", "degree": "2"}),
        (ValueError, "degree is for mode 'hybrid', got 2 with mode 'auto'", {"degree": 2}),
        (TypeError, "mask must be a Mask, got bool True", {"mask": True}),
        (TypeError, "score must be a Score, got float 0.3", {"score": 0.3}),
        (TypeError, "deterministic must be True or False, got 'yes'", {"deterministic": "yes"}),
        (ValueError, "timeout is -1, but group is a Ring", {"timeout": -1}),
        (ValueError, "cu_seqlens ends at 99", {"cu_seqlens": (0, 99)}),
    ]:
        with pytest.raises(kind, match=match):
            context_parallel_attention(x, x, x, LocalRing(2), **named)
    for kind, match, devices in [
        (ValueError, "devices must be at least 1, got 0", 0),
        (TypeError, "devices must be an int, got True", True),
        (ValueError, "devices must name at least one device, got none", []),
        (TypeError, "must be a list of devices or a number of shards on the CPU, got str 'cpu'", "cpu"),
        (TypeError, "must be a list of devices or a number of shards on the CPU, got float 2.5", 2.5),
    ]:
        with pytest.raises(kind, match=match):
            LocalRing(devices)


@pytest.mark.parametrize("mode", ["auto", "allgather", "ring", "ulysses"])
def test_a_batch_without_rows(mode):
    x = [torch.randn(0, 4, 8, 8, requires_grad=True) for _ in range(2)]
    outs, lses = context_parallel_attention(x, x, x, LocalRing(2), ops.Mask(causal=True), mode=mode)
    outs[0].sum().backward()
    assert outs[1].shape == x[0].grad.shape == (0, 4, 8, 8) and lses[1].shape == (0, 4, 8)


@pytest.mark.parametrize("size", [1, 2])
def test_a_bias_that_wants_a_gradient(size):
    """Is refused, also by one rank, where it got none without a word."""
    x, bias = [torch.randn(1, 2, 8 // size, 4)] * size, torch.randn(8, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"Score\(bias=...\) receives no gradient over ranks; detach it"):
        context_parallel_attention(x, x, x, LocalRing(size), score=ops.Score(bias=bias), layout="contiguous")


@pytest.mark.parametrize("ranges", [(((0, 8),), ((0, 8),)), (((0, 8),), ((8, 12),)), (((8, 16),), ((4, 8), (0, 4)))])
def test_a_layout_holds_each_token_once(ranges):
    with pytest.raises(ValueError, match="Layout: (ranges must hold each of the 16 tokens once|the ranges of a rank)"):
        Layout(16, ranges, 8)


def test_shared_heads():
    assert shared_heads(8, 2, 4, 1) == ((2, 4), (0, 1))
    assert shared_heads(8, 8, 4, 3) == ((6, 8), (6, 8))
    for heads, kv_heads, degree in ((6, 6, 4), (12, 4, 6), (24, 6, 4)):
        with pytest.raises(ValueError, match=f"{heads} query heads over {kv_heads} kv heads cannot be shared out"):
            for slot in range(degree):
                shared_heads(heads, kv_heads, degree, slot)


def test_the_choice_says_why():
    machine = Machine("model", 6e14, 1e-5, 4.8e12)
    said = explain_context_parallel(65536, 8, heads=32, kv_heads=8, mask=ops.Mask(causal=True), machine=machine)
    named = {(e.mode, e.degree) for e in said.estimates}
    assert named == {("allgather", 1), ("ring", 1), ("ulysses", 8), ("hybrid", 2), ("hybrid", 4)}
    assert said.mode in str(said) and "the least" in said.reason
    best = min(e.seconds for e in said.estimates if not e.refused)
    assert next(e for e in said.estimates if (e.mode, e.degree) == (said.mode, said.degree)).seconds == best
    # keys of 8M tokens do not fit an eighth of a GPU
    tight = Machine("small", 6e14, 1e-5, 4.8e12, memory=10**9)
    said = explain_context_parallel(1 << 20, 8, heads=32, kv_heads=8, mask=ops.Mask(causal=True), machine=tight)
    assert said.mode in ("ring", "ulysses") and "GB" in said.reason
    refused = explain_context_parallel(4096, 8, heads=6, machine=machine)
    assert "cannot be shared out" in str(refused)


@pytest.mark.parametrize(
    "mask, score, dtype",
    [
        (ops.Mask(causal=True), ops.Score(), torch.bfloat16),
        (ops.Mask(causal=True), ops.Score(), torch.float32),
        (ops.Mask(causal=True, documents=torch.zeros(1, 1024, dtype=torch.int32)), ops.Score(), torch.float32),
        (ops.Mask(causal=True), ops.Score(alibi=torch.rand(8)), torch.float32),
    ],
)
def test_the_explanation_is_of_the_call(mask, score, dtype, caplog, monkeypatch):
    """What is asked beforehand is what the call takes, and tells at INFO when it first does."""
    layout = Layout.zigzag(1024, 8)
    prepared._chosen.cache_clear()
    monkeypatch.setattr(prepared.log, "disabled", False)  # import-linter's logging config disables others' loggers
    said = explain_context_parallel(1024, 8, heads=8, head_dim=8, mask=mask, score=score, dtype=dtype)
    x = [layout.shard(torch.randn(1, 8, 1024, 8, dtype=dtype), rank, 2) for rank in range(8)]
    with caplog.at_level("INFO", "tilesmith"):
        for _ in range(2):
            context_parallel_attention(x, x, x, LocalRing(8), mask, score, layout=layout)
    told = [record.getMessage() for record in caplog.records if "mode 'auto' takes" in record.getMessage()]
    assert len(told) == 1 and told[0].endswith(f"takes {replace(said, transport=None)}")
    assert mask.documents is None or said.mode == "allgather"


def test_the_guide_runs(capsys):
    """The Python blocks of docs/guides/long-context.md, but those marked as not run."""
    text = (ROOT / "docs/guides/long-context.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(<!-- not run -->\n)?```python\n(.*?)```", text, re.DOTALL)
    assert sum(not skipped for skipped, _ in blocks) == 4
    exec("\n".join(code for skipped, code in blocks if not skipped), {})
    assert "allgather: " in capsys.readouterr().out


def test_a_short_pass_waits_for_the_host():
    """By the model: it takes at least what its calls and exchanges take the host, so a ring then has fewer parts."""
    problem = cost.Problem(Layout.zigzag(4096, 2), (0, 4096), Sight(right=0), 1, 16, 16, 128)
    machine = replace(cost.MACHINES["sm90"], issue=1e-3, exchange=2e-3)
    found = {
        mode: cost.estimate(problem, machine, mode, degree, steps) for mode, degree, steps in cost.degrees(problem)
    }
    assert (found["allgather"].forward, found["allgather"].backward) == (2e-3 + 2e-3, 2e-3 + 4e-3)
    assert (found["ulysses"].forward, found["ulysses"].backward) == (1e-3 + 4e-3, 1e-3 + 4e-3)
    long = replace(problem, layout=Layout.zigzag(1 << 16, 2), starts=(0, 1 << 16))
    parts = [cost.ring_parts(long, replace(machine, exchange=x)).splits.backward.parts for x in (0.0, 2e-3, 2e-2)]
    assert parts == sorted(parts, reverse=True) and parts[0] > parts[-1] == 1


def test_the_table_of_the_model():
    """docs/context-parallel-model.md is what the model says; some rows, since all of them take seconds."""
    text = (ROOT / "docs/context-parallel-model.md").read_text(encoding="utf-8")
    for heads in context_parallel_model.HEADS:
        assert context_parallel_model.row(8, 1 << 16, *heads) in text
    rows = [line.split("|")[4:-1] for line in text.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == len(context_parallel_model.SIZES) * len(context_parallel_model.TOKENS) * 2
    for cells in rows:  # what is taken, beside what is best whether it fits or not
        taken = [cell for cell in cells if "**" in cell]
        times = [float(re.search(r"[\d,.]+", cell)[0].replace(",", "")) for cell in [*taken, *cells] if "–" not in cell]
        assert len(taken) == 1 and times[0] <= 1.05 * min(times), cells
