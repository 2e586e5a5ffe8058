"""The attention package's other names: configuration and factory, FlexAttention's masks, blocks selected by query."""

import re
from pathlib import Path

import pytest
import torch

from tilesmith import ops
from tilesmith.attention import (
    AttentionConfig,
    AttentionPatterns,
    DynamicSparseAttention,
    FlashAttention3,
    SparsePattern,
    create_attention,
    create_sparse_attention,
    from_block_mask,
    layers,
    pattern_blocks,
    selected_block_attention,
    sparse,
    to_block_mask,
)
from tilesmith.nn import Attention, RotaryEmbedding
from tilesmith.ops.attn.mask import Blocks, Mask

P = AttentionPatterns


def test_the_factory_builds_what_the_configuration_says():
    shared = {"num_kv_heads": 2, "dropout": 0.1, "bias": True, "qk_norm": True, "scale": 0.3, "max_sequence_length": 64}
    full = create_attention(AttentionConfig(32, 4, P.FULL, softcap=5.0, **shared))
    assert type(full) is FlashAttention3 and not full.causal and full.score.softcap == 5.0
    window = create_attention(AttentionConfig(32, 4, P.SLIDING_WINDOW, window=7, **shared), dtype=torch.float64)
    assert window.causal and window.mask.window == 7 and window.q_proj.weight.dtype == torch.float64
    sparse = create_attention(
        AttentionConfig(
            32, 4, P.SPARSE, sparse_pattern=SparsePattern.STRIDED, sparsity_ratio=0.8, causal=False, **shared
        )
    )
    assert type(sparse) is DynamicSparseAttention and sparse.pattern is SparsePattern.STRIDED
    assert sparse.sparsity_ratio == 0.8 and not sparse.causal
    for layer in (full, window, sparse):
        assert layer.num_kv_heads == 2 and layer.q_proj.bias is not None and layer.q_norm is not None
        assert layer.dropout == 0.1 and layer.score.scale == 0.3
        with pytest.raises(ValueError, match="x has 65 tokens; max_sequence_length is 64"):
            layer(torch.randn(1, 65, 32, dtype=layer.q_proj.weight.dtype))
    default = create_attention(AttentionConfig(32, 4, P.SPARSE))
    assert default.pattern is SparsePattern.DYNAMIC_THRESHOLD and default.sparsity_ratio == 0.9 and default.causal


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"d_model": 0}, ValueError, "d_model must be at least 1"),
        ({"d_model": 30}, ValueError, "num_heads is 4, which does not divide d_model, 30"),
        ({"pattern": P.SPARSE, "block_size": 48}, ValueError, "block_size must be None or one of"),
        ({"pattern": P.SPARSE, "softcap": 2.0}, ValueError, "softcap is not supported with DYNAMIC_THRESHOLD"),
        ({"scale": "x"}, TypeError, "scale must be a number"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"scale": -1.0}, ValueError, "scale must be above 0"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads is 3, which does not divide num_heads, 4"),
        ({"pattern": "causal"}, TypeError, "pattern must be an AttentionPatterns"),
        ({"pattern": P.SLIDING_WINDOW}, ValueError, "window must be given with SLIDING_WINDOW"),
        ({"window": 8}, ValueError, "window is 8, but pattern is CAUSAL"),
        ({"pattern": P.SPARSE, "window": 8}, ValueError, "window is 8, but pattern is SPARSE"),
        ({"sparsity_ratio": 0.5}, ValueError, "sparsity_ratio is for SPARSE, but pattern is CAUSAL"),
        ({"block_size": 64, "pattern": P.FULL}, ValueError, "block_size is for SPARSE, but pattern is FULL"),
        ({"sparse_pattern": SparsePattern.RANDOM}, ValueError, "sparse_pattern is for SPARSE"),
        ({"causal": True}, ValueError, "causal must be left out; the pattern CAUSAL determines it"),
        ({"pattern": P.SPARSE, "sparsity_ratio": 0.96}, ValueError, "sparsity_ratio must be from 0 to 0.95, got 0.96"),
        ({"pattern": P.SPARSE, "sparse_pattern": "random"}, TypeError, "sparse_pattern must be a SparsePattern"),
        ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\)"),
        ({"bias": 1}, TypeError, "bias must be True or False"),
    ],
)
def test_contradictions_are_refused(fields, error, message):
    with pytest.raises(error, match=f"^AttentionConfig: {message}"):
        AttentionConfig(**{"d_model": 32, "num_heads": 4, **fields})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sparsity_ratio": 0.951}, ValueError, "sparsity_ratio must be from 0 to 0.95"),
        ({"sparsity_ratio": -0.1}, ValueError, "sparsity_ratio must be from 0 to 0.95"),
        ({"sparsity_ratio": "0.9"}, TypeError, "sparsity_ratio must be a number"),
        ({"pattern": "random"}, TypeError, "pattern must be a SparsePattern"),
        ({"block_size": 48}, ValueError, "block_size must be None or one of"),
        ({"mass": 0.5, "pattern": SparsePattern.RANDOM}, ValueError, "mass is for DYNAMIC_THRESHOLD"),
        ({"mass": 0.0}, ValueError, r"mass must be in \(0, 1\]"),
        ({"last": 0}, ValueError, "last must be at least 1"),
        ({"top_blocks": 0}, ValueError, "top_blocks must be at least 1"),
        ({"top_blocks": 4, "pattern": SparsePattern.STRIDED}, ValueError, "top_blocks is for patterns that rank"),
        ({"window": 8}, ValueError, "window is not supported"),
        ({"index_dim": 8}, ValueError, "index_dim is for LEARNED"),
        ({"softcap": 5.0}, ValueError, "softcap is not supported with DYNAMIC_THRESHOLD"),
        ({"index_samples": 12}, ValueError, "index_samples must be a power of two"),
        ({"index_samples": 32}, ValueError, "index_samples is for LEARNED"),
        ({"index_target": "all"}, ValueError, "index_target must be one of"),
        ({"index_target": "dense"}, ValueError, "index_target is for LEARNED; pattern is DYNAMIC_THRESHOLD"),
        ({"index_loss_weight": 0.5}, ValueError, "index_loss_weight is for LEARNED"),
        ({"seed": 1}, ValueError, "seed is for RANDOM"),
        ({"first": 2, "pattern": SparsePattern.RANDOM}, ValueError, "first is for DYNAMIC_THRESHOLD and LEARNED"),
        ({"last": 2, "pattern": SparsePattern.STRIDED}, ValueError, "last is for DYNAMIC_THRESHOLD and LEARNED"),
    ],
)
def test_the_sparse_layer_refuses(options, error, message):
    with pytest.raises(error, match=f"^DynamicSparseAttention: {message}"):
        DynamicSparseAttention(32, 4, **options)


@pytest.mark.parametrize("shape", [(0, 64, 32), (2, 0, 32)], ids=["no rows", "no tokens"])
@pytest.mark.parametrize("pattern", SparsePattern)
def test_the_sparse_layer_serves_what_is_empty(pattern, shape):
    layer, x = DynamicSparseAttention(32, 4, 0.9, pattern, block_size=16), torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape and (layer.index_loss is None or layer.index_loss == 0)


def test_layers_name_their_own_arguments():
    for make in (create_sparse_attention, FlashAttention3):
        with pytest.raises(ValueError, match="num_heads is 5, which does not divide d_model, 64"):
            make(64, 5)


def test_inputs_are_refused_by_name():
    layer = create_sparse_attention(32, 4, pattern=SparsePattern.LEARNED)
    x = torch.randn(2, 9, 32)
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 32\], got \[2, 9, 16\]"):
        layer(x[..., :16])
    with pytest.raises(TypeError, match="attention_mask has dtype torch.float32"):
        layer(x, torch.ones(2, 9))
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 9\], got \[2, 8\]"):
        layer(x, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask is not supported while LEARNED trains"):
        layer(x, torch.ones(2, 9, dtype=torch.bool))
    layer.eval()
    assert layer(x, torch.ones(2, 9, dtype=torch.int64)).shape == x.shape
    with pytest.raises(TypeError, match="rotary must be a RotaryEmbedding or None"):
        layer(x, rotary=1)


def test_the_exact_layer_is_that_of_nn():
    torch.manual_seed(0)
    ours, theirs = FlashAttention3(32, 4, num_kv_heads=2), Attention(32, 4, 2)
    theirs.load_state_dict(ours.state_dict())
    rotary, x = RotaryEmbedding(8, 32), torch.randn(2, 20, 32)
    torch.testing.assert_close(ours(x, rotary=rotary), theirs(x, rotary))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 12:] = False
    torch.testing.assert_close(ours(x, mask)[0, :12], ours(x[:1, :12])[0])
    assert "attention" in str(ours.explain(x))
    FlashAttention3(32, 4, causal=False)(x).sum().backward()


@pytest.mark.parametrize("kind", [FlashAttention3, DynamicSparseAttention])
def test_what_is_explained_is_the_call_that_is_made(kind, monkeypatch):
    layer, seen = kind(32, 4, dropout=0.25), []
    for module in (layers, sparse):
        monkeypatch.setattr(module, "explain", lambda *args, **given: seen.append(given["dropout_p"]))
    for training in (True, False):
        layer.train(training).explain(torch.randn(1, 64, 32))
    assert seen == [0.25, 0.0]


def _equal(mask, block_mask, tokens, keys, heads):
    """Whether a Mask sees the pairs that a BlockMask sees."""
    from torch.nn.attention.flex_attention import create_mask

    theirs = block_mask.to_dense().bool()
    block_q, block_k = block_mask.BLOCK_SIZE
    theirs = theirs.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)[:, :, :tokens, :keys]
    every = create_mask(block_mask.mask_mod, 1, heads, tokens, keys, device="cpu")
    ours = mask.materialize(tokens, keys, heads=heads).expand(-1, heads, -1, -1)
    return torch.equal(ours, every) and torch.equal(ours, theirs & every)


@pytest.mark.parametrize(("tokens", "keys"), [(256, 256), (250, 250), (128, 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_block_masks_there_and_back(tokens, keys, causal):
    for pattern, heads in ((SparsePattern.RANDOM, 2), (SparsePattern.LOCAL_GLOBAL, 1)):
        blocks = pattern_blocks(pattern, tokens, keys, 0.5, heads=heads, block_size=32, causal=causal)
        mask = Mask(causal=causal, blocks=blocks)
        block_mask = to_block_mask(blocks, tokens, keys, causal=causal)
        assert _equal(mask, block_mask, tokens, keys, heads)
        back = from_block_mask(block_mask, causal=causal)
        assert torch.equal(back.materialize(tokens, keys, heads=heads), mask.materialize(tokens, keys, heads=heads))


def test_flex_attention_agrees():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, h, 256, 16) for h in (4, 2, 2))
    blocks = pattern_blocks(SparsePattern.RANDOM, 256, 256, 0.6, heads=2, block_size=32)
    wanted, _ = ops.attention(q, k, v, Mask(causal=True, blocks=blocks))
    block_mask = to_block_mask(blocks, 256, 256, heads=4, causal=True)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True), wanted)


def test_partial_blocks_are_not_taken_for_whole_ones():
    blocks = pattern_blocks(SparsePattern.STRIDED, 128, 128, 0.5, block_size=32)
    with pytest.raises(ValueError, match="block_mask has partial blocks"):
        from_block_mask(to_block_mask(blocks, 128, 128, causal=True))
    with pytest.raises(TypeError, match="block_mask must be a BlockMask"):
        from_block_mask(blocks)
    with pytest.raises(ValueError, match="blocks has 4 blocks of queries; 200 tokens are 7"):
        to_block_mask(blocks, 200, 200)


# blocks selected by each query ----------------------------------------------------------------------------------------


def _selection(batch, kv_heads, tokens, keys, size, most, generator):
    """Random blocks of each query, its own among them for some; -1 where it has fewer."""
    own = (torch.arange(tokens) + keys - tokens) // size
    drawn = torch.rand(batch, kv_heads, tokens, -(-keys // size), generator=generator)
    drawn = drawn.masked_fill(torch.arange(drawn.shape[3]) > own[:, None], -1.0)
    found = drawn.topk(most, -1)
    return torch.where(found.values > 0.2, found.indices, -1)


@pytest.mark.parametrize(("tokens", "keys"), [(70, 70), (38, 70), (1, 45), (64, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_blocks_selected_by_query(tokens, keys, heads, kv_heads):
    generator, size = torch.Generator().manual_seed(tokens), 16
    shapes = ((heads, tokens), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(2, h, n, 8, generator=generator, dtype=torch.float64, requires_grad=True) for h, n in shapes)
    chosen = _selection(2, kv_heads, tokens, keys, size, 3, generator)
    seen = torch.zeros(2, kv_heads, tokens, -(-keys // size) + 1, dtype=torch.bool)
    seen = seen.scatter_(-1, torch.where(chosen < 0, seen.shape[3] - 1, chosen), True)[..., :-1]
    seen = seen.repeat_interleave(size, 3)[..., :keys].repeat_interleave(heads // kv_heads, 1)
    wanted, wanted_lse = ops.attention(q, k, v, Mask(causal=True, dense=seen), ops.Score(scale=0.4))
    out, lse = selected_block_attention(q, k, v, chosen, size, scale=0.4)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout)):
        torch.testing.assert_close(ours, theirs)


def test_selections_are_refused_by_name():
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 1, 30, 8)
    with pytest.raises(
        ValueError, match="k has 30 tokens and q 20; the difference must be a multiple of block_size, 16"
    ):
        selected_block_attention(q, k, k, torch.zeros(1, 1, 20, 2, dtype=torch.int64), 16)
    with pytest.raises(ValueError, match=r"block_indices must be \[1, 1, 20\] and a dim"):
        selected_block_attention(q, k, k, torch.zeros(1, 2, 20, 2, dtype=torch.int64), 10)
    for wrong in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match="block_indices must be integers"):
            selected_block_attention(q, k, k, torch.zeros(1, 1, 20, 2, dtype=wrong), 10)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v": None}, TypeError, "v must be a tensor, got None"),
        ({"q": torch.randn(1, 3, 20, 8)}, ValueError, "k has 2 heads, which does not divide the 3 heads of q"),
        ({"k": torch.randn(1, 0, 20, 8), "v": torch.randn(1, 0, 20, 8)}, ValueError, "q and k must have at least one"),
        ({"k": torch.randn(1, 2, 20, 4)}, ValueError, "k must have q's head dim 8, got 4"),
        ({"block_indices": torch.zeros(1, 2, 20, 2, device="meta").long()}, ValueError, "block_indices is on meta"),
        ({"block_indices": torch.full((1, 2, 20, 2), 2)}, ValueError, "block_indices holds 2; there are 2 blocks"),
        ({"block_indices": torch.full((1, 2, 20, 2), -2)}, ValueError, "block_indices holds -2; there are 2 blocks"),
        ({"block_indices": torch.ones(1, 2, 20, 2).long()}, ValueError, "block_indices names block 1 twice"),
        ({"scale": -1.0}, ValueError, "scale must be a positive number"),
    ],
)
def test_wrong_selections_are_named(changes, error, message):
    x, chosen = torch.randn(1, 2, 20, 8), torch.tensor([1, 0]).expand(1, 2, 20, 2)
    given = {"q": x, "k": x, "v": x, "block_indices": chosen, "block_size": 10}
    with pytest.raises(error, match=f"^selected_block_attention: {message}"):
        selected_block_attention(**given | changes)
    none = torch.full_like(chosen, -1)  # as often as one likes
    assert not selected_block_attention(**given | {"block_indices": none})[0].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_selections_of_any_integers(dtype):
    """Also where the number of blocks, 300, or -1 is no number of their dtype."""
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 600, 8)
    chosen = torch.tensor([3, 0, 100]).expand(1, 2, 1, 3)
    found = selected_block_attention(q, k, k, chosen.to(dtype), 2)
    for x, y in zip(found, selected_block_attention(q, k, k, chosen, 2), strict=True):
        assert torch.equal(x, y)


def test_a_selection_for_nobody():
    x = torch.randn(0, 2, 20, 8)
    out, lse = selected_block_attention(x, x, x, torch.zeros(0, 2, 20, 1, dtype=torch.int64), 10)
    assert out.shape == x.shape and lse.shape == x.shape[:3]


def test_lists_for_other_keys_make_no_block_mask():
    blocks = Blocks.of(torch.ones(1, 1, 2, 3, dtype=torch.bool), 4, 4)
    for keys in (8, 20):
        with pytest.raises(
            ValueError, match=f"^to_block_mask: blocks has 3 blocks of keys; {keys} keys are {keys // 4}"
        ):
            to_block_mask(blocks, 8, keys)
    with pytest.raises(ValueError, match="^to_block_mask: block_indices holds 2; there are 2 blocks"):
        to_block_mask(blocks._replace(offsets_t=None, indices_t=None), 8, 8)


@pytest.mark.parametrize("wrong", [
    {"offsets": None}, {"indices": None}, {"indices": torch.zeros(1, 2, dtype=torch.int32)}, {"block_q": 0},
    {"block_k": 4.0}, {"offsets": torch.zeros(1, 1, 3)}, {"offsets_t": None}, {"offsets": torch.zeros(1, 3).int()},
])  # fmt: skip
def test_no_lists_make_no_block_mask(wrong):
    blocks = Blocks.of(torch.ones(1, 1, 2, 2, dtype=torch.bool), 4, 4)
    with pytest.raises((TypeError, ValueError), match=f"^(to_block_mask|Blocks): .*{next(iter(wrong))}"):
        to_block_mask(blocks._replace(**wrong), 8, 8)


MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "causal, aligned at the last token": lambda b, h, q, k: q + 32 >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 20),
    "all": lambda b, h, q, k: q >= 0,
    "prefix": lambda b, h, q, k: k < 32,
}


@pytest.mark.parametrize("mod, tokens, keys, causal, right", [
    ("causal", 50, 50, True, True), ("causal", 50, 50, False, False), ("causal", 32, 64, True, False),
    ("causal", 64, 32, True, False), ("causal, aligned at the last token", 32, 64, True, True),
    ("window", 64, 64, True, False), ("all", 64, 50, False, True), ("prefix", 64, 64, False, True),
    ("prefix", 64, 64, True, False),
])  # fmt: skip
def test_a_block_mask_is_what_its_caller_says(mod, tokens, keys, causal, right):
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    block_mask = create_block_mask(MODS[mod], 1, 1, tokens, keys, device="cpu", BLOCK_SIZE=16)
    if not right:
        with pytest.raises(ValueError, match="^from_block_mask: .*block_mask has"):
            from_block_mask(block_mask, causal=causal)
        return
    wanted = create_mask(MODS[mod], 1, 1, tokens, keys, device="cpu")
    assert torch.equal(from_block_mask(block_mask, causal=causal).materialize(tokens, keys), wanted)


def test_what_stands_behind_a_count_is_no_block():
    """Lists by hand, filled up with zeros, and shorter than there are blocks of keys."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[0, 0], [0, 2]]]]).int()
    none = torch.zeros_like(counts), torch.zeros_like(indices)
    options = {"BLOCK_SIZE": 16, "seq_lengths": (32, 60), "compute_q_blocks": False}
    blocks = from_block_mask(BlockMask.from_kv_blocks(*none, counts, indices, **options)).blocks
    assert blocks.offsets.tolist() == [[[0, 1, 3]]] and blocks.indices.tolist() == [0, 0, 2]
    assert blocks.offsets_t.tolist() == [[[0, 2, 2, 3, 3]]]
    with pytest.raises(ValueError, match="lists block 7 of keys; there are 4, so it must be 0 to 3"):
        from_block_mask(BlockMask.from_kv_blocks(*none, counts, 7 * indices.clamp(max=1), **options))


def test_lists_keep_their_form():
    blocks = pattern_blocks(SparsePattern.RANDOM, 100, 100, 0.3, heads=2, block_size=16)
    assert isinstance(blocks, Blocks) and blocks.offsets.dtype == blocks.indices_t.dtype == torch.int32
    with pytest.raises(ValueError, match="pattern must be one of RANDOM, BLOCK_SPARSE, STRIDED, LOCAL_GLOBAL"):
        pattern_blocks(SparsePattern.LEARNED, 100, 100)


def test_the_guide():
    guide = Path(__file__).parents[1] / "docs" / "guides" / "sparse-attention.md"
    code = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 6
    exec(compile("\n".join(code), guide.name, "exec"), {"__name__": "guide"})
