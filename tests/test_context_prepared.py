"""What is kept of a context-parallel call: its facts and nothing that tensors hold; where runs lie in shared memory."""

import ctypes
import gc
import itertools
import json
import random
import weakref

import pytest
import torch

import tilesmith.distributed.prepared as prepared
from tilesmith import ops, use
from tilesmith.bench.one_rank import OneRank
from tilesmith.distributed import Layout, LocalRing, context_parallel_attention
from tilesmith.distributed.kernels import KERNELS, Ours
from tilesmith.distributed.peer_memory import _Exchange, kinds_of
from tilesmith.distributed.pieces import Sight
from tilesmith.distributed.schedule import schedule
from tilesmith.distributed.signature import Facts, Signed
from tilesmith.distributed.sums import Sum
from tilesmith.distributed.tokens import add_runs, by_head, copy_runs, landing
from tilesmith.distributed.travel import parcels
from tilesmith.engine.backends import interpreting

CAUSAL = ops.Mask(causal=True)
SIZE, LOCAL = 2, 8
LAYOUT = Layout.zigzag(SIZE * LOCAL, SIZE)


class Signing(LocalRing):
    """Writes down what ranks compare."""

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.told = []

    def agree(self, signatures, step):
        self.told.append({r: dict(signature) for r, signature in signatures.items()})
        super().agree(signatures, step)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """One entry for each preparation."""
    found, prepare = [], prepared._prepared

    def counted(*args):
        found.append(args)
        return prepare(*args)

    prepared.forget()
    monkeypatch.setattr(prepared, "_prepared", counted)
    yield found
    prepared.forget()


def inputs(dtype=torch.float64, requires_grad=False, heads=(4, 2, 2), batch=1):
    """q, k and v of the whole sequence."""
    return [torch.randn(batch, h, SIZE * LOCAL, 8, dtype=dtype, requires_grad=requires_grad) for h in heads]


def sharded(tensors, layout=LAYOUT):
    return [[layout.shard(x, r, 2) for r in range(layout.size)] for x in tensors]


def call(tensors, mask=CAUSAL, score=prepared.checks.SCALED, *, ring=None, layout=LAYOUT, **named):
    outs, lses = context_parallel_attention(
        *sharded(tensors), ring or LocalRing(SIZE), mask, score, layout=layout, **named
    )
    return layout.unshard(outs, 2) if isinstance(layout, Layout) else outs, lses


def test_a_call_of_the_same_facts_is_prepared_once(made):
    """Whatever its tensors hold, and whether mask, layout and documents are the same objects."""
    for _ in range(3):
        tensors = inputs()
        out, _ = call(tensors, ops.Mask(causal=True), layout=Layout.zigzag(SIZE * LOCAL, SIZE), cu_seqlens=[0, 5, 16])
        starts = torch.tensor([0, 5, 16], dtype=torch.int32)
        expected, _ = ops.attention(*tensors, CAUSAL, cu_seqlens_q=starts, cu_seqlens_k=starts)
        torch.testing.assert_close(out, expected)
    call(inputs(), cu_seqlens=(0, 5, 16))
    call(inputs(), cu_seqlens=torch.tensor([0, 5, 16]))
    assert len(made) == len(prepared._KEPT) == 1


def test_strides_are_read_at_each_call(made):
    """Of a call that is known too, rows become contiguous, as kernels take them."""
    q, k, v = inputs()
    expected, _ = call((q, k, v))
    across = [[x.transpose(2, 3).contiguous().transpose(2, 3) for x in shards] for shards in sharded((q, k, v))]
    assert across[0][0].stride(-1) != 1
    outs, _ = context_parallel_attention(*across, LocalRing(SIZE), CAUSAL, layout=LAYOUT)
    torch.testing.assert_close(LAYOUT.unshard(outs, 2), expected)
    assert len(made) == 1


def variants():
    """Calls of which each has other facts than all others."""
    plain, tensor = {}, torch.ones(1, 4, 16, 16, dtype=torch.bool)
    ids = torch.zeros(1, 16, dtype=torch.int32)
    yield "plain", {}, plain
    for name, mask in {
        "not causal": ops.Mask(), "window": ops.Mask(causal=True, window=3), "other window": ops.Mask(True, (4, 0)),
        "dense": ops.Mask(True, dense=tensor), "dense of one head": ops.Mask(True, dense=tensor[:, :1]),
        "documents": ops.Mask(True, documents=ids),
    }.items():  # fmt: skip
        yield name, {}, {"mask": mask}
    for name, score in {
        "scale": ops.Score(scale=0.5), "scale 1": ops.Score(scale=1), "scale 1.0": ops.Score(scale=1.0),
        "softcap": ops.Score(softcap=5.0), "bias": ops.Score(bias=torch.zeros(16, 16, dtype=torch.float64)),
    }.items():  # fmt: skip
        yield name, {}, {"score": score}
    yield "dtype", {"dtype": torch.float32}, plain
    yield "gradients", {"requires_grad": True}, plain
    yield "kv heads", {"heads": (4, 4, 4)}, plain
    yield "batch", {"batch": 2}, plain
    for name, named in {
        "ring": {"mode": "ring"}, "ulysses": {"mode": "ulysses"}, "hybrid": {"mode": "hybrid", "degree": 2},
        "dropout": {"dropout_p": 0.5}, "deterministic": {"deterministic": True}, "documents' starts":
        {"cu_seqlens": (0, 5, 16)}, "other starts": {"cu_seqlens": (0, 6, 16)}, "by name": {"layout": "zigzag"},
        "contiguous": {"layout": "contiguous"}, "sinks": {"sinks": torch.zeros(4)},
        "sinks with a gradient": {"sinks": torch.zeros(4, requires_grad=True)},
    }.items():  # fmt: skip
        yield name, {}, named


def test_other_facts_are_other_calls_and_sign_as_if_nothing_were_kept(made):
    """Each call says the same of itself the first time, when it is known, and when nothing is kept."""
    each = list(variants())
    rings = [Signing(), Signing(), Signing()]
    for ring in rings[:2]:
        for _, of_tensors, named in each:
            call(inputs(**of_tensors), ring=ring, **named)
    assert len(made) == len(prepared._KEPT) == len(each)
    for _, of_tensors, named in each:
        prepared.forget()
        call(inputs(**of_tensors), ring=rings[2], **named)
    assert rings[0].told == rings[1].told == rings[2].told


def test_gradients_and_autocast_are_facts(made):
    """Switched between two calls of the same tensors."""
    tensors, ring = inputs(torch.float32), Signing()
    call(tensors, ring=ring)
    tensors[0].requires_grad_()
    call(tensors, ring=ring)
    with torch.no_grad():
        call(tensors, ring=ring)
    assert [each[0]["requires_grad"] for each in ring.told] == [False, True, False]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = call(tensors, ring=ring)
    assert out.dtype == torch.bfloat16 and ring.told[-1][0]["q.dtype"] == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = call(tensors, ring=ring)
    assert out.dtype == torch.bfloat16 and ring.told[-1][0]["q.dtype"] == "bfloat16"
    out, _ = call(tensors, ring=ring)
    assert out.dtype == torch.float32 and len(made) == 4


def test_what_equals_an_accepted_argument_is_still_refused():
    """1 is True and 2.0 is 2 to a dict, but not to a check."""
    tensors = inputs()
    for good, bad, match in [
        ({"deterministic": True}, {"deterministic": 1}, "deterministic must be True or False, got 1"),
        ({"mode": "hybrid", "degree": 2}, {"mode": "hybrid", "degree": 2.0}, "degree must be an int"),
        ({"dropout_p": 0.0}, {"dropout_p": False}, r"dropout_p must be a number in \[0, 1\)"),
        ({"cu_seqlens": (0, 16)}, {"cu_seqlens": (0, 16.0)}, "cu_seqlens must hold ints"),
        ({"cu_seqlens": [0, 16]}, {"cu_seqlens": torch.tensor([0.0, 16.0])}, "cu_seqlens must hold ints"),
    ]:
        call(tensors, **good)
        kept = len(prepared._KEPT)
        for _ in range(2):
            with pytest.raises(TypeError, match=match):
                call(tensors, **bad)
        assert len(prepared._KEPT) == kept


def test_what_is_refused_is_refused_each_time():
    tensors, x = inputs(), torch.randn(1, 4, 8, 8)
    call(tensors)
    for kind, match, args, named in [
        (ValueError, "cu_seqlens ends at 99", tensors, {"cu_seqlens": (0, 99)}),
        (ValueError, "sinks must be", tensors, {"sinks": torch.zeros(3)}),
        (TypeError, "mask must be a Mask", tensors, {"mask": None}),
        (ValueError, "not supported", tensors, {"mask": ops.Mask(prefix=torch.zeros(1, dtype=torch.int32))}),
        (ValueError, "cannot serve this call", tensors, {"kernel": "cudnn"}),
        (ValueError, "receives no gradient", tensors,
         {"score": ops.Score(bias=torch.zeros(16, 16, dtype=torch.float64, requires_grad=True))}),
    ]:  # fmt: skip
        for _ in range(2):
            with pytest.raises(kind, match=match):
                call(args, **named)
    context_parallel_attention([x, x], [x, x], [x, x], LocalRing(2))
    for _ in range(2):
        with pytest.raises(TypeError, match="q must be a tensor"):
            context_parallel_attention([x.numpy(), x], [x, x], [x, x], LocalRing(2))
        with pytest.raises(TypeError, match="k has layout torch.sparse_coo; it must be dense"):
            context_parallel_attention([x, x], [x.to_sparse(), x], [x, x], LocalRing(2))
    assert len(prepared._KEPT) == 2


def test_masks_that_change_in_place_are_read_again(made):
    tensors, dense = inputs(), torch.ones(16, 16, dtype=torch.bool)
    bias, sinks = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    mask, score = ops.Mask(causal=True, dense=dense), ops.Score(bias=bias)
    for _ in range(3):
        out, _ = call(tensors, mask, score, sinks=sinks)
        expected, _ = ops.attention(*tensors, mask, score, sinks=sinks)
        torch.testing.assert_close(out, expected)
        dense.copy_(torch.rand(16, 16) < 0.7)
        bias.normal_()
        sinks.normal_()
    assert len(made) == 1


def test_what_is_kept_has_a_bound_and_no_tensors(made, monkeypatch):
    monkeypatch.setattr(prepared, "MOST", 3)
    dense, sinks = torch.ones(16, 16, dtype=torch.bool), torch.zeros(4, dtype=torch.float64)
    tensors = inputs()
    held = [weakref.ref(x) for x in (*tensors, dense, sinks)]
    call(tensors, ops.Mask(dense=dense), sinks=sinks)
    del tensors, dense, sinks
    made.clear()
    gc.collect()
    assert all(x() is None for x in held)
    for window in range(8):
        call(inputs(), ops.Mask(window=window))
        assert len(prepared._KEPT) <= 3
    assert len(made) == 8
    call(inputs(), ops.Mask(window=7))
    assert len(made) == 8
    call(inputs(), ops.Mask(window=0))
    assert len(made) == 9


def test_groups_count_their_own_calls(made):
    """Two rings of one size are one preparation; ranks and other sizes are their own."""
    rings = Signing(), Signing()
    for ring in (rings[0], rings[1], rings[0]):
        call(inputs(), ring=ring)
    assert len(made) == 1
    assert [each[0]["number of the call"] for each in rings[0].told] == [0, 1]
    assert [each[0]["number of the call"] for each in rings[1].told] == [0]
    tensors = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    for size, rank in ((2, 0), (2, 1), (4, 1)):
        for _ in range(2):
            context_parallel_attention(*tensors, OneRank(size, rank), CAUSAL)
    assert len(made) == 4


def test_a_kernel_of_the_same_name_is_another(made, monkeypatch):
    told = []

    class Told(Ours):
        def forward(self, *args):
            told.append(self)
            return super().forward(*args)

    for kernel in (Told(), Told()):
        monkeypatch.setitem(KERNELS, "told", kernel)
        call(inputs(), kernel="told")
        assert told[-1] is kernel
    assert len(made) == 2


def test_a_signature_is_the_json_of_its_names():
    facts = Facts({"q.shape": [1, 2], "scale": None, "layout": 'a "name"', "flag": True})
    signed = Signed("forward", 7, facts)
    assert signed == {"pass": "forward", "number of the call": 7, **facts}
    assert signed.text == json.dumps(signed) == json.dumps(dict(signed))


@pytest.mark.parametrize("starts", [(0, 96), (0, 3, 3, 40, 71, 96)])
@pytest.mark.parametrize("mask, degree", [(Sight(right=0), 1), (Sight(6, 0), 1), (Sight(), 2), (Sight(right=0), 2)])
def test_places_in_shared_memory(starts, mask, degree):
    """What ranks copy into and out of symmetric memory is what parcels bring; also for ranks without a token."""
    size = 4
    # blocks of documents: some of the tokens that others read have others between them
    layout = Layout.contiguous(96, size) if mask.left < 10 else Layout._blocks(starts, size, 96)
    plan, ring = schedule(layout, starts, mask, degree, False, 4, 4), LocalRing(size)
    lists = [stage.transfers for stage in plan.stages[1:]]
    lists += [moves.back for moves in lists]
    if degree > 1:
        lists += [plan.q_moves, plan.q_moves.back]
    assert lists
    gaps = set()
    for moves in lists:
        places = [max((m.at + m.tokens for m in moves if m.source == r), default=0) for r in range(size)]
        rooms = [max((m.to + m.tokens for m in moves if m.target == r), default=0) for r in range(size)]
        heads = {m.heads[1] - m.heads[0] for m in moves if m.heads is not None} or {4}
        sent = {r: [torch.randn(places[r], 1, 4, d) for d in (8, 6)] for r in range(size)}
        into = [{r: [torch.zeros(rooms[r], 1, *heads, d) for d in (8, 6)] for r in range(size)} for _ in range(2)]
        ring.post(parcels(ring, moves, sent, into[0]), "test")
        memory = {}

        def view(rank, slot, start, shape, dtype, memory=memory):
            return memory.setdefault((rank, slot, start), torch.full(shape, float("nan"), dtype=dtype))

        heads_first = {r: [by_head(x) for x in sent[r]] for r in range(size)}
        exchanges = [_Exchange(moves, r, kinds_of(heads_first[r])) for r in range(size)]
        assert len({exchange.need for exchange in exchanges}) == 1
        for slot in (0, 1):
            each = [exchange.placed(slot, view) for exchange in exchanges]
            assert each[0] is exchanges[0].placed(slot, view)
            for r in range(size):
                apart = any(move.heads is not None for move in moves)
                assert len(each[r].mine) == (len(exchanges[r].readers) if apart else bool(exchanges[r].readers))
                for share, memory in each[r].mine:
                    copy_runs(heads_first[r], share.heads, memory, share.runs)
                    low, high = exchanges[r].span
                    unread = high - low - sum(share.runs[2::3])  # what lies between runs is not copied
                    assert all(mine[0, 0, :, 0].isnan().sum() == unread for mine in memory)
                    gaps.add(unread > 0)
            for r in range(size):
                for _, runs in each[r].reads:
                    for i, first, address, size_of_run in runs:
                        ctypes.memmove(into[1][r][i].data_ptr() + first, address, size_of_run)
                for move in moves.own(r):
                    for give, take in zip(sent[r], into[1][r]):
                        some = slice(None) if move.heads is None else slice(*move.heads)
                        take[move.to : move.to + move.tokens].copy_(give[move.at : move.at + move.tokens, :, some])
            for r in range(size):
                assert all(torch.equal(x, y) for x, y in zip(into[0][r], into[1][r]))
    assert True in gaps or len(starts) == 2 or mask.left < 10


@pytest.mark.parametrize("size, steps", [(2, False), (4, False), (4, True)])
def test_a_stage_is_tiled_where_each_key_is_in_one_call(size, steps):
    found = set()
    for starts in ((0, 64), (0, 30, 34, 64), (0, 3, 29, 40, 64), (0, 9, 18, 27, 36, 45, 64)):
        documents = Layout.balanced(starts, size), Layout._blocks(starts, size, 64)
        for layout in (Layout.zigzag(64, size), Layout.contiguous(64, size), *documents):
            for sight in (Sight(right=0), Sight(), Sight(5, 0)):
                for stage in schedule(layout, starts, sight, 1, steps, 1, 1).stages[1:]:
                    for r in range(size):
                        used = torch.zeros(stage.tokens[r], dtype=torch.int64)
                        for one in stage.calls[r]:
                            used[one.k : one.k + one.keys] += 1
                        assert stage.tiled[r] == (len(used) > 0 and bool((used == 1).all()))
                        found.add((stage.tiled[r], len(stage.calls[r]) > 1))
    assert (True, True) in found and {tiled for tiled, _ in found} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_a_sum_has_the_bits_of_additions_one_after_another(dtype, many, given):
    """Also in memory that was given, of parts that lie one after another, and where the last addition rounds."""
    like = [torch.randn(2, 3, 20, 8, dtype=torch.bfloat16) for _ in range(many)]
    whole, part, came = ([torch.randn(2, 3, n, 8, dtype=dtype) for _ in range(many)] for n in (20, 7, 9))
    memory = [torch.full(x.shape, float("nan"), dtype=dtype) for x in like]
    expected = [x.float().clone() for x in whole]
    for total, x, y in zip(expected, part, came):
        total[:, :, 4:11] += x
        total[:, :, 2:6] += y[:, :, :4]
        total[:, :, 5:10] += y[:, :, 4:]
    sums = [Sum(like, 4, dtype, False, (lambda: memory) if given else None) for _ in range(2)]
    into = [torch.zeros_like(x) for x in like]
    for one in sums:
        one.add([x.clone() for x in whole], 0)
        one.add(part, 4)
        one.add_runs(came, (0, 2, 4, 4, 5, 5), last=True)
        assert one.given == (given and dtype == torch.float32)  # else the sum has another dtype than its parts
        if one is sums[0]:
            assert all(torch.equal(x, y.bfloat16()) for x, y in zip(one.total(torch.bfloat16), expected))
    sums[1].write(into)
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(into, expected))
    tiles = Sum(like, 2, dtype, True, (lambda: memory) if given else None)
    for low in (7, 0):
        tiles.add([x[:, :, low : low + (13 if low else 7)] for x in whole], low)
    assert all(torch.equal(x, y) for x, y in zip(tiles.total(dtype), whole))
    assert not given or tiles.values is memory


@pytest.mark.parametrize("heads", [None, 0, 1, 2])
def test_memory_where_tokens_land_lies_by_token(heads):
    """With PyTorch's strides, also where there is nothing."""
    for batch, own, dim, tokens in itertools.product((0, 1, 2), (0, 3), (0, 1, 4), (0, 1, 5)):
        x = torch.zeros(batch, own, 7, dim, dtype=torch.bfloat16)
        made = landing(x, tokens, heads)
        like = by_head(x.new_empty(tokens, batch, own if heads is None else heads, dim))
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
        assert landing(x, tokens, heads, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_runs_are_added_one_after_another_as_pytorch_adds(request, backend, many, total, came):
    """In place, also to views of heads by token, and where runs share tokens, as they do with more than two ranks."""
    if backend == "triton":
        request.getfixturevalue("needs_triton")
        if not interpreting():
            pytest.skip("needs Triton's interpreter")
    r, generator = random.Random(many), torch.Generator().manual_seed(many)
    pinned = {"add_runs": backend} if total != torch.float64 else {}
    for _ in range(6):
        runs = [n for _ in range(r.randint(0, 4)) for n in (r.randint(0, 9), r.randint(0, 180), r.randint(0, 20))]
        wholes = [torch.randn(200, 2, 4, 8, generator=generator).to(total) for _ in range(many)]
        more = [torch.randn(2, 3, 30, 8, generator=generator).to(came) for _ in range(many)]
        expected = [x.clone() for x in wholes]
        for x, y in zip(expected, more):
            for at, to, tokens in zip(runs[::3], runs[1::3], runs[2::3]):
                x.permute(1, 2, 0, 3)[:, 1:, to : to + tokens].add_(y[:, :, at : at + tokens])
        with use(**pinned):
            add_runs([x.permute(1, 2, 0, 3)[:, 1:] for x in wholes], more, runs)
        assert all(torch.equal(x, y) for x, y in zip(wholes, expected))


def test_joined_runs_still_bring_every_token():
    """Runs that follow each other on both sides are one; none of them can be joined to another."""
    starts = (0, 9, 18, 27, 36, 45, 64)
    moves = schedule(Layout.balanced(starts, 2), starts, Sight(right=0), 1, False, 1, 1).stages[1].transfers
    ends = {(m.source, m.target, m.at + m.tokens, m.to + m.tokens) for m in moves}
    assert moves and not any((m.source, m.target, m.at, m.to) in ends for m in moves)
