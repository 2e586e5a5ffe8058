"""Block-sparse attention: exact budgets, patterns, choices that look at the data, the layer and what it learns."""

import copy
import math
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from devices import DEVICE, ON_GPU
from tilesmith import ops, use
from tilesmith.attention import (
    AttentionConfig,
    AttentionPatterns,
    BlockIndexer,
    DynamicSparseAttention,
    SparsePattern,
    create_attention,
    create_sparse_attention,
    estimated_shares,
    pattern_blocks,
)
from tilesmith.attention.budget import budget
from tilesmith.attention.estimate import chosen_blocks
from tilesmith.attention.indexer import indexer_loss
from tilesmith.attention.patterns import CLOSED, _blocks
from tilesmith.attention.report import sparsity_report
from tilesmith.engine.backends import interpreting
from tilesmith.nn import RotaryEmbedding
from tilesmith.ops.attn.mask import Mask

CPU = torch.device("cpu")
LOOKING = [SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED]


def _table(blocks, tokens, keys, heads=1):
    """The lists as a bool table of blocks."""
    seen = Mask(blocks=blocks).materialize(tokens, keys, batch=blocks.offsets.shape[0], heads=heads)
    return seen[:, :, :: blocks.block_q, :: blocks.block_k]


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize(("tokens", "keys"), [(4096, 4096), (8192, 8192), (4000, 4000), (2048, 8192), (100, 100)])
@pytest.mark.parametrize("causal", [True, False])
def test_budgets_are_exact(tokens, keys, causal, sparsity):
    plan = budget(tokens, keys, 128, causal, sparsity, CPU)
    counts, visible = plan.counts.long(), plan.visible.long()
    least = int((visible > 0).sum())
    assert (counts <= visible).all() and (counts[visible > 0] >= 1).all()
    assert int(counts.sum()) == plan.total and int(visible.sum()) == plan.seen
    assert plan.total == max(least, math.floor((1 - sparsity) * plan.seen + 1e-6))


@pytest.mark.parametrize("tokens", [32768, 65536])
def test_a_tenth_of_the_causal_blocks_is_not_exceeded(tokens):
    rows = tokens // 128
    every = rows * (rows + 1) // 2
    for pattern in CLOSED:
        blocks = pattern_blocks(pattern, tokens, tokens, 0.9, heads=2)
        lists = blocks.offsets.shape[1]
        assert len(blocks.indices) == lists * (every // 10) and 10 * len(blocks.indices) <= lists * every


def test_visible_blocks_are_those_of_the_mask():
    for tokens, keys in ((70, 70), (33, 90), (90, 33)):
        plan = budget(tokens, keys, 16, True, 0.5, CPU)
        seen = F.pad(Mask(causal=True).materialize(tokens, keys)[0, 0], (0, -keys % 16, 0, -tokens % 16))
        table = seen.unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).any(3).any(1)
        assert torch.equal(table.sum(-1).int(), plan.visible)


@pytest.mark.parametrize("pattern", CLOSED)
@pytest.mark.parametrize(("tokens", "keys"), [(1024, 1024), (1000, 1000), (512, 1024)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sparsity", [0.0, 0.6, 0.9])
def test_patterns(pattern, tokens, keys, causal, sparsity):
    blocks = pattern_blocks(pattern, tokens, keys, sparsity, heads=3, block_size=32, causal=causal)
    plan = budget(tokens, keys, 32, causal, sparsity, CPU)
    table = _table(blocks, tokens, keys, 3)
    assert torch.equal(table.sum(-1), plan.counts.expand(1, table.shape[1], -1).long())
    column = torch.arange(table.shape[3])
    assert not (table & (column >= plan.visible[:, None])).any()
    row = torch.arange(table.shape[2])
    own = (((row + 1) * 32).clamp(max=tokens) - 1 + keys - tokens) // 32 if causal else (row * 32 + keys - tokens) // 32
    assert table[:, :, row, own].all(), "every row keeps its own block"
    made = ops.block_lists(table[:, : blocks.offsets.shape[1]], len(blocks.indices))
    for ours, theirs in zip((blocks.offsets, blocks.indices, blocks.offsets_t, blocks.indices_t), made):
        assert torch.equal(ours, theirs)


def test_patterns_differ_as_they_say():
    tables = {p: _table(pattern_blocks(p, 2048, 2048, 0.8, block_size=16), 2048, 2048)[0, 0] for p in CLOSED}
    last = {p: t[-1].nonzero().flatten() for p, t in tables.items()}
    count = len(last[SparsePattern.RANDOM])
    near = last[SparsePattern.LOCAL_GLOBAL]
    assert near[: count // 4].tolist() == list(range(count // 4))
    assert near[count // 4 :].tolist() == list(range(128 - (count - count // 4), 128))
    runs = (last[SparsePattern.BLOCK_SPARSE].diff() == 1).sum()
    assert runs >= count - count // 4 - 1
    assert int((last[SparsePattern.STRIDED].diff() == 1).sum()) >= (count + 1) // 2 - 1
    drawn = pattern_blocks(SparsePattern.RANDOM, 2048, 2048, 0.8, heads=2, block_size=16)
    heads = _table(drawn, 2048, 2048, 2)[0]
    assert (heads[0] != heads[1]).any()
    other = pattern_blocks(SparsePattern.RANDOM, 2048, 2048, 0.8, heads=2, block_size=16, seed=1)
    assert not torch.equal(other.indices, drawn.indices)
    assert pattern_blocks(SparsePattern.RANDOM, 2048, 2048, 0.8, heads=2, block_size=16).indices is drawn.indices
    _blocks.cache_clear()  # as benchmarks do, which time how long the lists take
    assert pattern_blocks(SparsePattern.RANDOM, 2048, 2048, 0.8, heads=2, block_size=16).indices is not drawn.indices


def test_estimated_shares_are_those_of_the_means():
    q, k = torch.randn(2, 4, 96, 16), torch.randn(2, 2, 96, 16)
    shares = estimated_shares(q, k, block_size=32)
    assert shares.shape == (2, 2, 3, 3)
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, 2, 3))
    assert not shares.triu(1).any()
    sampled = q.unflatten(2, (-1, 16))[:, :, :, ::2].mean(3)  # 16 queries of 32, in two stretches
    means = k.repeat_interleave(2, 1).unflatten(2, (-1, 4)).mean(3)
    behind = torch.arange(24) > 4 * torch.arange(6)[:, None] + 3
    p = (sampled @ means.mT / 4).masked_fill(behind, float("-inf")).softmax(-1)
    wanted = p.unflatten(3, (3, 8)).sum(-1).unflatten(2, (3, 2)).mean(3).unflatten(1, (2, 2)).mean(2)
    torch.testing.assert_close(shares, wanted)
    few = estimated_shares(q, k, block_size=32, key_samples=16)
    torch.testing.assert_close(few, ops.block_shares(q, k, None, True, 32, 8, 2, 2, 2))
    assert not torch.equal(few, shares)
    short = estimated_shares(q[:, :, :90], k[:, :, :90], block_size=32)
    torch.testing.assert_close(short.sum(-1), torch.ones(2, 2, 3))


def test_the_estimate_holds_more_of_the_attention_than_patterns():
    generator = torch.Generator().manual_seed(3)
    topics = torch.randn(8, 32, generator=generator)
    which = torch.randint(0, 8, (1, 1, 128), generator=generator).repeat_interleave(8, 2)
    q, k = (0.5 * torch.randn(1, 1, 1024, 32, generator=generator) + 1.5 * topics[which] for _ in range(2))
    plan = budget(1024, 1024, 16, True, 0.9, CPU)
    top, total = ops.attention_stats(q, k, None, True)
    exact = ops.block_mass(q, k, top + total.log(), None, None, None, True, 16, 16)

    def held(keep):
        return float((exact * keep).sum(-1).mean())

    patterns = max(held(_table(pattern_blocks(p, 1024, 1024, 0.9, block_size=16), 1024, 1024)) for p in CLOSED)
    found = held(chosen_blocks(estimated_shares(q, k, block_size=16), plan, 16)[0])
    q_mean, k_mean = (x.unflatten(2, (-1, 16)).mean(3) for x in (q, k))
    one_mean = held(chosen_blocks(ops.block_scores(q_mean, k_mean, None, True, 1, 1), plan, 16)[0])
    best = held(chosen_blocks(exact, plan, 16)[0])
    assert found > 1.5 * patterns and found > one_mean
    assert 0.9 * best < found <= best + 1e-6


@pytest.mark.parametrize("sparsity, top", [(0.9, None), (0.5, None), (0.0, None), (0.9, 3)])
@pytest.mark.parametrize("tokens, keys", [(300, 300), (300, 90), (90, 300)])
def test_a_row_keeps_as_many_blocks_as_its_budget_says(tokens, keys, sparsity, top):
    """What `block_lists` is told of a choice without `mass`."""
    plan = budget(tokens, keys, 16, True, sparsity, CPU, top)
    scores = torch.randn(2, 2, len(plan.counts), -(-keys // 16))
    scores[0, 0, ::2], scores[1, :, :, ::3] = float("nan"), float("-inf")
    for first, last in ((0, 1), (1, 1), (5, 4)):
        keep, blocks = chosen_blocks(scores, plan, 16, first=first, last=last)
        assert keep.sum(-1).eq(plan.counts).all() and int(blocks.offsets.max()) == 4 * plan.total


def test_mass_stops_early_and_within_the_budget():
    shares = torch.rand(1, 2, 16, 16).tril()
    shares = shares / shares.sum(-1, keepdim=True)
    plan = budget(256, 256, 16, True, 0.2, CPU)
    keep, _ = chosen_blocks(shares, plan, 16, mass=0.5)
    full, _ = chosen_blocks(shares, plan, 16)
    assert keep.sum() < full.sum() and not (keep & ~full).any()
    held = (shares * keep).sum(-1)
    assert ((held >= 0.5 - 1e-6) | (keep.sum(-1) == plan.counts)).all()


@pytest.mark.parametrize("pattern", SparsePattern)
def test_the_layer_is_attention_with_its_lists(pattern):
    torch.manual_seed(0)
    layer = DynamicSparseAttention(32, 4, 0.7, pattern, num_kv_heads=2, block_size=16).double()
    rotary = RotaryEmbedding(8, 200)
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    shown = torch.ones(2, 150, dtype=torch.bool)
    shown[1, 100:] = False
    layer.eval()
    for mask in (None, shown):
        blocks = layer.blocks(x, rotary=rotary)
        q, k, v = (p(x).unflatten(2, (-1, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k = rotary(q, k)
        seen = Mask(causal=True, blocks=blocks).materialize(150, 150, batch=2, heads=4)
        seen = seen if mask is None else seen & mask[:, None, None]
        scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~seen, float("-inf"))
        out = torch.nan_to_num(scores.softmax(-1)) @ v.repeat_interleave(2, 1)
        wanted = layer.o_proj(out.transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x, mask, rotary=rotary), wanted)


def test_no_sparsity_is_dense_attention():
    torch.manual_seed(0)
    x = torch.randn(1, 70, 32)
    dense = create_attention(AttentionConfig(32, 4))
    for pattern in SparsePattern:
        layer = create_sparse_attention(32, 4, 0.0, pattern)
        layer.load_state_dict(dense.state_dict(), strict=False)
        torch.testing.assert_close(layer(x), dense(x))


@pytest.mark.parametrize("pattern", SparsePattern)
def test_reports_count(pattern):
    layer = create_sparse_attention(16, 2, 0.9, pattern, block_size=16)
    x = torch.randn(2, 1000, 16)
    report = layer.measure(x)
    every = 63 * 64 // 2
    assert report.seen_blocks == 4 * every and report.kept_blocks == 4 * (every // 10)
    assert report.sparsity >= 0.9
    assert report.skipped_flops / report.dense_flops == pytest.approx(report.sparsity)
    assert report.dense_flops == 4 * every * 16 * 16 * 2 * (8 + 8)
    blocks = layer.blocks(x)
    seen = Mask(causal=True, blocks=blocks).materialize(1000, 1000, batch=2, heads=2)
    q, k = (p(x).unflatten(2, (2, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    dense = (q @ k.mT / 8**0.5).masked_fill(~Mask(causal=True).materialize(1000, 1000), float("-inf")).softmax(-1)
    assert report.retained_mass == pytest.approx(float((dense * seen).sum(-1).mean().detach()), rel=1e-4)


def test_a_report_without_a_score_is_of_plain_scores():
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    blocks = pattern_blocks(SparsePattern.LOCAL_GLOBAL, 64, 64, 0.5, heads=2, block_size=16)
    found = [sparsity_report(q, k, v, blocks, 10, causal=True, **given) for given in ({}, {"score": ops.Score()})]
    assert found[0] == found[1] and 0.0 < found[0].retained_mass < 1.0


def test_short_sequences_get_smaller_blocks():
    sizes = [create_sparse_attention(16, 2).blocks(torch.randn(1, n, 16)).block_q for n in (64, 512, 1024, 8192)]
    assert sizes[0] == 16 and sizes == sorted(sizes) and sizes[-1] == 128


@pytest.mark.parametrize("pattern", LOOKING)
def test_as_many_blocks_for_every_row(pattern):
    layer = DynamicSparseAttention(16, 2, pattern=pattern, block_size=16, top_blocks=5)
    counts = layer.blocks(torch.randn(1, 200, 16)).offsets.diff(dim=-1)
    assert torch.equal(counts, torch.arange(1, 14).clamp(max=5).int().expand(1, 2, -1))


@pytest.mark.parametrize("pattern", SparsePattern)
def test_inference_before_training(pattern):
    layer, x = create_sparse_attention(16, 2, 0.5, pattern, block_size=16), torch.randn(1, 176, 16)
    with torch.inference_mode():
        inferred = layer(x)
    trained = layer(x)
    trained.sum().backward()
    torch.testing.assert_close(trained, inferred)


@pytest.mark.parametrize("pattern", [SparsePattern.RANDOM, *LOOKING])
def test_a_run_on_fake_tensors_leaves_no_trace(pattern):
    """As `optimize` makes one before a model's first step, and torch.export."""
    layer, x = create_sparse_attention(16, 2, 0.5, pattern, block_size=16), torch.randn(1, 93, 16)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        layer(mode.from_tensor(x))
    layer(x).sum().backward()
    with mode:
        assert layer(mode.from_tensor(x)).shape == x.shape
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize("block_size", [16, None])
@pytest.mark.parametrize("pattern", [SparsePattern.STRIDED, *LOOKING])
def test_compiles_whole(pattern, block_size):
    torch.manual_seed(0)
    layer, x = create_sparse_attention(16, 2, 0.5, pattern, block_size=block_size), torch.randn(1, 100, 16)
    parameters = list(layer.parameters())
    wanted = layer(x)
    gradients = torch.autograd.grad(wanted.sum(), parameters)
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert not [str(each.message) for each in told if "lru_cache" in str(each.message)]
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), parameters), gradients):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("pattern", [SparsePattern.STRIDED, *LOOKING])
def test_compiles_for_several_lengths(pattern, dynamic):
    layer = create_sparse_attention(16, 2, 0.5, pattern)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (100, 70, 300):
        x = torch.randn(1, tokens, 16)
        torch.testing.assert_close(compiled(x), layer(x))


def test_without_causality():
    layer = create_sparse_attention(16, 2, 0.8, SparsePattern.DYNAMIC_THRESHOLD, causal=False, block_size=16)
    x = torch.randn(1, 320, 16)
    seen = _table(layer.blocks(x), 320, 320, 2)
    assert (seen & torch.ones(20, 20).triu(1).bool()).any()
    assert layer.measure(x).kept_blocks == 2 * 80


@pytest.mark.parametrize("pattern", SparsePattern)
@pytest.mark.parametrize("causal", [True, False])
def test_every_row_keeps_its_own_block(pattern, causal):
    layer = create_sparse_attention(16, 2, 0.95, pattern, causal=causal, block_size=16)
    seen = _table(layer.blocks(torch.randn(2, 310, 16)), 310, 310, 2)
    assert seen.diagonal(dim1=2, dim2=3).all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_threshold_of_mass_keeps_the_first_block_and_the_last_ones(causal):
    layer = DynamicSparseAttention(16, 2, 0.0, block_size=16, causal=causal, mass=1e-3, first=1, last=2)
    seen = _table(layer.blocks(torch.randn(1, 320, 16)), 320, 320, 2)
    assert seen[..., 0].all() and seen.diagonal(dim1=2, dim2=3).all() and seen.diagonal(-1, 2, 3).all()
    assert seen.sum() == 2 * (3 * 20 - 3)  # the first two rows have fewer of them


def test_nan_is_not_hidden_by_a_threshold_of_mass():
    layer, x = DynamicSparseAttention(16, 2, 0.5, block_size=16, mass=0.9).eval(), torch.randn(1, 100, 16)
    x[0, 20] = float("nan")
    assert layer(x)[0, 20].isnan().all()


def test_a_report_knows_the_softcap():
    layer = DynamicSparseAttention(16, 2, 0.5, SparsePattern.STRIDED, block_size=16, softcap=0.5, scale=8.0).double()
    x = torch.randn(1, 130, 16, dtype=torch.float64)
    q, k = (p(x).unflatten(2, (2, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    scores = (0.5 * torch.tanh(8.0 * q @ k.mT / 0.5)).masked_fill(~Mask(causal=True).materialize(130, 130), -math.inf)
    seen = Mask(blocks=layer.blocks(x)).materialize(130, 130, heads=2)
    wanted = float((scores.softmax(-1) * seen).sum(-1).mean().detach())
    assert layer.measure(x).retained_mass == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("pattern", SparsePattern)
@pytest.mark.parametrize("sizes", [(0, 40), (2, 0), (0, 0)])
def test_of_no_tokens_nothing_is_left_out(pattern, sizes):
    report = create_sparse_attention(16, 2, 0.5, pattern).measure(torch.randn(*sizes, 16))
    assert (report.kept_blocks, report.flops, report.sparsity, report.retained_mass) == (0, 0, 0.0, 1.0)


@pytest.mark.parametrize("pattern", [SparsePattern.RANDOM, *LOOKING])
def test_the_explanation_is_of_the_call_with_its_blocks(pattern, monkeypatch):
    from tilesmith.attention import sparse

    layer, x, asked = create_sparse_attention(16, 2, 0.5, pattern, block_size=16), torch.randn(1, 90, 16), []
    monkeypatch.setattr(sparse, "explain", lambda *args, dropout_p: asked.append(args))
    layer.explain(x)
    assert torch.equal(asked[0][4].blocks.indices, layer.blocks(x).indices) and asked[0][4].causal


@pytest.mark.parametrize("wrong, told", [
    ({"block_size": 16.0}, "block_size must be an int, got 16.0"), ({"softcap": "x"}, "softcap must be a number"),
    ({"seed": 1 << 63, "pattern": SparsePattern.RANDOM}, r"seed must be below 2\*\*63"),
])  # fmt: skip
def test_what_no_layer_is_made_with(wrong, told):
    with pytest.raises((TypeError, ValueError), match=f"^DynamicSparseAttention: {told}"):
        DynamicSparseAttention(16, 2, **wrong)


def test_more_first_blocks_than_there_are_are_all_of_them():
    layer = DynamicSparseAttention(16, 2, block_size=16, top_blocks=2, first=1 << 40, last=1 << 40)
    table = _table(layer.blocks(torch.randn(1, 64, 16)), 64, 64, 2)
    assert torch.equal(table[0, 1], torch.ones(4, 4).tril().triu(-1).bool())


@pytest.mark.parametrize("wrong, told", [
    ({"q": None}, "q must be a tensor"), ({"k": torch.ones(2, 48, 8)}, r"k must be \[batch, heads"),
    ({"key_samples": 3}, "key_samples must be a multiple of 8"), ({"key_samples": 24}, "key_samples must"),
    ({"q": torch.ones(1, 2, 48, 8).long()}, "q has dtype"),
])  # fmt: skip
def test_what_shares_are_not_estimated_of(wrong, told):
    given = {"q": torch.ones(1, 2, 48, 8), "k": torch.ones(1, 2, 48, 8), "block_size": 32, **wrong}
    with pytest.raises((TypeError, ValueError), match=f"^estimated_shares: {told}"):
        estimated_shares(given.pop("q"), given.pop("k"), **given)


@pytest.mark.parametrize("offsets, indices, told", [
    ([0, 2, 1], [0, 1], "offsets must ascend from 0 to at most 2, the length of indices"),
    ([0, 1, 2], [0, -1], "indices holds -1"), ([0, 1, 2], [0, 2], "indices holds 2; there are 2 blocks"),
    ([0, 2, 2], [1, 1], "indices must ascend in each row"),
])  # fmt: skip
def test_lists_that_measure_nothing(offsets, indices, told):
    q = torch.randn(1, 2, 32, 8)
    lists = torch.tensor([[offsets]]).int(), torch.tensor(indices).int()
    with pytest.raises(ValueError, match=f"^block_mass: {told}"):
        ops.block_mass(q, q, torch.zeros(1, 2, 32), *lists, None, True, 16, 16)


# the indexer ----------------------------------------------------------------------------------------------------------


def test_the_indexer_scores_pairs_of_blocks():
    torch.manual_seed(0)
    indexer = BlockIndexer(24, 2, 8)
    x = torch.randn(1, 50, 24)
    scores = indexer(x, block_size=16)
    q = indexer.q_norm(indexer.q_proj(x).unflatten(2, (2, 8))).transpose(1, 2)
    k = indexer.k_norm(indexer.k_proj(x).unflatten(2, (2, 8))).transpose(1, 2)
    pairs = (q @ k.mT / 8**0.5).masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(scores[0, 1, 2, 1], pairs[0, 1, 32:48, 16:32].max())
    assert scores[0, 0, 1, 2] == float("-inf")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_of_equal_scores_the_first_has_the_gradient(backend, needs_triton):
    if backend == "triton" and not (interpreting() or ON_GPU):
        pytest.skip("needs a GPU or Triton's interpreter")
    q, k = torch.ones(1, 2, 40, 16, device=DEVICE), torch.ones(1, 1, 40, 16, device=DEVICE)
    q[:, 1, 16:21] = 0.5  # of its second block of queries the first five are smaller
    q, k = q.requires_grad_(), k.requires_grad_()
    with use(block_max_scores=backend, block_max_scores_vjp=backend):
        scores = ops.block_max_scores(q, k, 1.0, True, 16, 16)
        dq, dk = torch.autograd.grad(scores[:, :, :, :2].tril().sum(), (q, k))
    blocks = torch.tensor([1, 2, 2])  # that each block of queries has a gradient of
    wanted = torch.zeros(2, 40)
    wanted[0, ::16], wanted[1, [0, 21, 32]] = blocks.float(), blocks.float()
    torch.testing.assert_close(dq.cpu(), wanted[None, :, :, None].expand(1, 2, 40, 16))
    of_keys = torch.zeros(40)
    of_keys[0], of_keys[16] = 6.0, 4.0
    torch.testing.assert_close(dk.cpu(), of_keys[None, None, :, None].expand(1, 1, 40, 16))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("tokens", [70, 1030])
def test_gradients_of_largest_scores_lie_as_q_and_k_do(backend, tokens, needs_triton):
    """Token by token, as projections write them and norms read them; with 1,030 queries dk comes from parts."""
    if backend == "triton" and not (interpreting() or ON_GPU):
        pytest.skip("needs a GPU or Triton's interpreter")
    torch.manual_seed(0)
    q, k = (torch.randn(1, n, heads, 16, device=DEVICE) for n, heads in ((tokens, 4), (33, 2)))
    q, k = (x.transpose(1, 2).requires_grad_() for x in (q, k))
    with use(block_max_scores=backend, block_max_scores_vjp=backend):
        scores = ops.block_max_scores(q, k, None, False, 16, 16)
        weights = torch.rand_like(scores)
        found = torch.autograd.grad((scores * weights).sum(), (q, k))
    pairs = (q @ k.repeat_interleave(2, 1).mT).double() / 4
    most = [(pairs[:, :, i : i + 16, j : j + 16].amax((2, 3))) for i in range(0, tokens, 16) for j in range(0, 33, 16)]
    wanted = torch.autograd.grad((torch.stack(most, -1).view(scores.shape) * weights).sum(), (q, k))
    for x, y, of in zip(found, wanted, (q, k)):
        torch.testing.assert_close(x, y)
        assert x.stride() == of.stride()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_indexer_starts_from_an_attention(qk_norm):
    torch.manual_seed(0)
    layer = DynamicSparseAttention(24, 4, 0.5, SparsePattern.LEARNED, num_kv_heads=2, qk_norm=qk_norm, block_size=16)
    for norm in (layer.q_norm, layer.k_norm) if qk_norm else ():
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    with torch.no_grad():  # query heads of a kv head that agree, so that their mean is each of them
        heads = layer.q_proj.weight.unflatten(0, (2, 2, 6))
        heads[:, 1] = heads[:, 0]
    layer.indexer.start_from(layer)
    x = torch.randn(2, 64, 24)
    q, k, _, _ = layer._inputs(x, None, None)
    if not qk_norm:
        q, k = (F.rms_norm(y, (6,), eps=1e-6) for y in (q, k))
    torch.testing.assert_close(layer.indexer(x, block_size=16), ops.block_max_scores(q[:, ::2], k, None, True, 16, 16))


@pytest.mark.parametrize("sizes", [(24, 2, 8), (24, 4, 6), (16, 2, 6)])
def test_an_indexer_of_other_sizes_does_not_start(sizes):
    with pytest.raises(ValueError, match="2 kv heads of 6 on 24 features.*index_dim=6"):
        BlockIndexer(*sizes).start_from(DynamicSparseAttention(24, 4, num_kv_heads=2))
    with pytest.raises(TypeError, match="attention must be a tilesmith.nn.Attention.*got Linear"):
        BlockIndexer(*sizes).start_from(torch.nn.Linear(24, 24))


def test_a_sample_of_queries_measures_the_target():
    torch.manual_seed(0)
    options = {"block_size": 32, "index_samples": 4}
    layer = DynamicSparseAttention(16, 2, 0.5, SparsePattern.LEARNED, **options)
    x = torch.randn(1, 256, 16)
    q, k, v, _ = layer._inputs(x, None, None)
    blocks = layer.blocks(x)
    lse = ops.attention(q, k, v, layer._mask(None, blocks=blocks))[1]
    found = layer._target(q, k, lse, blocks)
    exact = ops.block_mass(q, k, lse, blocks.offsets, blocks.indices, None, True, 32, 32)
    assert (found > 0).equal(exact > 0)
    torch.testing.assert_close(found.sum(-1), exact.sum(-1))
    assert (found != exact).any()


def test_the_loss_is_a_divergence():
    scores, target = torch.randn(1, 2, 4, 6, requires_grad=True), torch.rand(1, 2, 4, 6)
    keep = torch.rand(1, 2, 4, 6) < 0.6
    keep[0, 0, 1] = False
    loss = indexer_loss(scores, target, keep)
    total = 0.0
    for row, t, s in zip(keep.flatten(0, 2), target.flatten(0, 2), scores.detach().flatten(0, 2)):
        if row.any():
            p = t[row] / t[row].sum()
            total += F.kl_div(s[row].log_softmax(0), p, reduction="sum")
    torch.testing.assert_close(loss, total / 8)
    loss.backward()
    assert scores.grad.isfinite().all() and not scores.grad[~keep].any() and scores.grad[keep].any()
    same = torch.where(keep, target, 1.0).log()
    assert abs(float(indexer_loss(same, target, keep))) < 1e-6


@pytest.mark.parametrize("target", ["selected", "dense"])
def test_only_its_loss_trains_the_indexer(target):
    torch.manual_seed(0)
    layer = DynamicSparseAttention(16, 2, 0.6, SparsePattern.LEARNED, block_size=16, index_target=target)
    x = torch.randn(1, 160, 16, requires_grad=True)
    out = layer(x)
    given = torch.autograd.grad(out.sum(), [x, *layer.indexer.parameters()], retain_graph=True)
    twice = torch.autograd.grad(2 * out.sum(), [x, *layer.indexer.parameters()])
    torch.testing.assert_close(2 * given[0], twice[0])
    for once, again in zip(given[1:], twice[1:]):
        assert once.any()
        torch.testing.assert_close(once, again)

    layer.index_loss_weight = 0.5
    half = torch.autograd.grad(layer(x).sum(), list(layer.indexer.parameters()))
    for once, again in zip(given[1:], half):
        torch.testing.assert_close(0.5 * once, again)
    assert layer.index_loss > 0 and not layer.index_loss.requires_grad
    layer.eval()
    layer.index_loss = None
    layer(x)
    assert layer.index_loss is None


def test_a_functional_gradient_leaves_a_layer_that_can_be_copied():
    layer, x = DynamicSparseAttention(16, 2, 0.5, SparsePattern.LEARNED, block_size=16), torch.randn(1, 60, 16)
    parameters = dict(layer.named_parameters())
    found = torch.func.grad(lambda given: torch.func.functional_call(layer, given, (x,)).sum())(parameters)
    assert layer.index_loss is None
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    for name, gradient in zip(parameters, torch.autograd.grad(copied(x).sum(), list(copied.parameters()))):
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("x, rotary, told", [
    (None, None, "x must be a tensor"), (torch.ones(40, 16), None, r"x must be \[batch"),
    (torch.ones(1, 40, 15), None, "x must be .*16"),
    (torch.ones(1, 40, 16), RotaryEmbedding(8, 64), "rotary rotates 8 features .* index_dim=8"),
])  # fmt: skip
def test_what_an_indexer_does_not_score(x, rotary, told):
    with pytest.raises((TypeError, ValueError), match=f"^BlockIndexer: {told}"):
        BlockIndexer(16, 2, 4)(x, rotary)


# a task whose answer lies far away ------------------------------------------------------------------------------------

NOISE, VALUES, RUN = 24, 8, 4
ASK, VOCABULARY = NOISE + VALUES, NOISE + VALUES + 1


class _Lookup(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.token, self.attention, self.head = nn.Embedding(VOCABULARY, 32), attention, nn.Linear(32, VALUES)

    def forward(self, tokens):
        return self.head(self.attention(self.token(tokens)))


def _asked(rows, length, generator):
    """Noise with a run of one value in the first quarter, and runs of RUN tokens that ask for it in the second half."""
    tokens = torch.randint(0, NOISE, (rows, length), generator=generator)
    at = torch.randint(0, length // 4, (rows, 1), generator=generator) + torch.arange(RUN)
    value = torch.randint(0, VALUES, (rows, 1), generator=generator)
    tokens.scatter_(1, at, NOISE + value.expand(-1, RUN))
    shifts = torch.randint(0, 17 - RUN, (rows, length // 32), generator=generator)
    starts = torch.arange(length // 2, length, 16) + shifts
    asked = (starts[..., None] + torch.arange(RUN)).flatten(1)
    return tokens.scatter_(1, asked, ASK), asked, value.expand_as(asked)


def _judged(model, rows, length, generator):
    tokens, asked, value = _asked(rows, length, generator)
    logits = model(tokens).gather(1, asked[..., None].expand(-1, -1, VALUES))
    return F.cross_entropy(logits.flatten(0, 1), value.flatten()), float((logits.argmax(-1) == value).float().mean())


def _train(model, steps, rows, length, parameters):
    model.train()
    optimizer, generator = torch.optim.Adam(parameters, 1e-2), torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss, _ = _judged(model, rows, length, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def _accuracy(model):
    model.eval()
    return _judged(model, 4, 1024, torch.Generator().manual_seed(5))[1]


def test_a_needle_is_found_with_a_tenth_of_the_blocks():
    torch.manual_seed(0)
    dense = _Lookup(create_attention(AttentionConfig(32, 2)))
    _train(dense, 40, 8, 128, dense.parameters())

    def like(attention):
        model = _Lookup(attention)
        assert not model.load_state_dict(dense.state_dict(), strict=False).unexpected_keys
        return model

    whole = _accuracy(dense)
    assert whole > 0.98
    options = {"block_size": 16, "first": 0}
    dynamic = like(DynamicSparseAttention(32, 2, 0.9, **options))
    assert _accuracy(dynamic) >= 0.95 * whole

    learned = like(DynamicSparseAttention(32, 2, 0.9, SparsePattern.LEARNED, index_target="dense", **options))
    learned.attention.indexer.start_from(learned.attention)
    _train(learned, 30, 4, 256, learned.attention.indexer.parameters())
    assert _accuracy(learned) >= 0.95 * whole

    # as many keys as the longest row of the sparse layers has
    plan = budget(1024, 1024, 16, True, 0.9, CPU)
    window = AttentionConfig(32, 2, AttentionPatterns.SLIDING_WINDOW, window=16 * int(plan.counts.max()))
    assert _accuracy(like(create_attention(window))) < 0.5 * whole


def test_a_single_key_is_found_by_a_learned_choice(monkeypatch):
    """One token that single queries ask for."""
    monkeypatch.setattr(sys.modules[__name__], "RUN", 1)
    torch.manual_seed(0)
    dense = _Lookup(create_attention(AttentionConfig(32, 2)))
    _train(dense, 150, 8, 128, dense.parameters())
    options = {"block_size": 16, "first": 0, "index_target": "dense"}
    learned = _Lookup(DynamicSparseAttention(32, 2, 0.9, SparsePattern.LEARNED, **options))
    learned.load_state_dict(dense.state_dict(), strict=False)
    by_chance = _accuracy(learned)
    learned.attention.indexer.start_from(learned.attention)
    _train(learned, 30, 4, 256, learned.attention.indexer.parameters())
    assert _accuracy(learned) >= 0.95 * _accuracy(dense) > 0.9 > 0.3 > by_chance


@pytest.mark.skipif(not (interpreting() or ON_GPU), reason="needs a GPU or Triton's interpreter")
def test_shares_of_long_sequences_come_tile_by_tile(needs_triton, monkeypatch):
    """Where the sums of all tiles would take too much memory."""
    from tilesmith.ops.attn.triton import block_shares

    q, k = torch.randn(2, 4, 96, 32, device=DEVICE), torch.randn(2, 2, 96, 32, device=DEVICE)
    wanted = block_shares_of(q, k, "reference")
    for most in (1, 2 * 4 * 8 * 3 * 16 * 2):  # one tile at a time, and two of three
        monkeypatch.setattr(block_shares, "MOST_SUMS", most)
        torch.testing.assert_close(block_shares_of(q, k, "triton"), wanted)


def block_shares_of(q, k, backend):
    with use(block_shares=backend):
        return ops.block_shares(q, k, None, True, 16, 8)
