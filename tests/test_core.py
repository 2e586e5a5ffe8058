"""tilesmith.core and KernelConfig: layers under other libraries' names against torch's own."""

import pytest
import torch

import tilesmith
from tilesmith import core, nn

HEADS, DIM = 4, 32


def _pair(bias=True, dropout=0.0):
    """Our layer and torch's with the same weights."""
    torch.manual_seed(0)
    ours = core.AttentionLayer(DIM, HEADS, dropout=dropout, bias=bias)
    theirs = torch.nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv_proj.weight)
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        if bias:
            theirs.in_proj_bias.copy_(ours.qkv_proj.bias)
            theirs.out_proj.bias.copy_(ours.out_proj.bias)
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "integers", "dense", "added"])
def test_attention_layer_equals_torch(mask, bias):
    ours, theirs = _pair(bias)
    x = torch.randn(2, 9, DIM)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    padding = torch.arange(9) < torch.tensor([[9], [5]])
    added = torch.randn(2 * HEADS, 9, 9)
    got, expected = {
        "none": ({}, {}),
        "causal": ({"causal": True}, {"attn_mask": hidden}),
        "padding": ({"attention_mask": padding}, {"key_padding_mask": ~padding}),
        "integers": ({"attention_mask": padding.long()}, {"key_padding_mask": ~padding}),
        "dense": ({"attention_mask": ~hidden[None, None]}, {"attn_mask": hidden}),
        "added": ({"attention_mask": added.unflatten(0, (2, HEADS))}, {"attn_mask": added}),
    }[mask]
    torch.testing.assert_close(ours(x, **got), theirs(x, x, x, need_weights=False, **expected)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_attention_layer_adds_a_mask_of_another_dtype(dtype):
    layer = core.AttentionLayer(8, 2, 0.0)
    x, mask = torch.randn(2, 5, 8), torch.randn(2, 1, 5, 5).to(dtype).requires_grad_()
    out = layer(x, mask)
    torch.testing.assert_close(out, layer(x, mask.float()))
    out.sum().backward()
    assert mask.grad.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, mask).dtype == torch.bfloat16


def test_attention_layer_drops_in_training_only():
    layer, _ = _pair(dropout=0.5)
    x = torch.randn(2, 9, DIM)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_attention_layer_refuses_in_words():
    with pytest.raises(ValueError, match="num_heads is 5, which does not divide d_model, 32"):
        core.AttentionLayer(DIM, 5)
    with pytest.raises(ValueError, match="dropout must be in"):
        core.AttentionLayer(DIM, HEADS, dropout=1.0)
    with pytest.raises(ValueError, match="x must be"):
        core.AttentionLayer(DIM, HEADS)(torch.randn(9, DIM))


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("bias", [True, False])
def test_optimized_linear_has_the_state_of_torch_s(level, bias):
    torch.manual_seed(0)
    ours = core.OptimizedLinear(16, 24, bias, level)
    theirs = torch.nn.Linear(16, 24, bias)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 5, 16)
    y, expected = ours(x), theirs(x)
    assert y.dtype == x.dtype
    if level == "aggressive":
        rounded = torch.nn.functional.linear(
            x.bfloat16(), theirs.weight.bfloat16(), None if theirs.bias is None else theirs.bias.bfloat16()
        )
        torch.testing.assert_close(y, rounded.float())
        assert not torch.equal(y, expected)
    else:
        torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    bound = {"rtol": 0.02, "atol": 0.5} if level == "aggressive" else {}
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, **bound)
    assert ours.weight.grad.dtype == torch.float32
    assert repr(level) in repr(ours)


def test_optimized_linear_levels_differ_in_more_than_a_name():
    mixed = core.OptimizedLinear(16, 24, optimization_level="balanced")
    assert mixed(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16  # fp32 weights, bf16 activations
    with pytest.raises(RuntimeError):
        core.OptimizedLinear(16, 24, optimization_level="conservative")(torch.randn(3, 16).bfloat16())
    with pytest.raises(ValueError, match="must be one of conservative, balanced, aggressive"):
        core.OptimizedLinear(16, 24, optimization_level="ultra")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_fused_gelu_equals_torch(approximate):
    x = torch.randn(3, 7)
    expected = torch.nn.functional.gelu(x, approximate=approximate)
    torch.testing.assert_close(core.FusedGELU(approximate=approximate)(x), expected)
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        core.FusedGELU(approximate="erf")


SMALL = {"max_sequence_length": 12, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 40}


def test_every_field_of_a_kernel_config_is_used():
    config = tilesmith.KernelConfig(**SMALL, attention_dropout_prob=0.2, hidden_dropout_prob=0.3)
    decoder = nn.Decoder(config.decoder_config(vocab_size=19, num_layers=2, num_kv_heads=2))
    block = decoder.layers[0]
    assert decoder.embed_tokens.weight.shape == (19, 32) and decoder.rotary.max_positions == 12
    assert block.self_attn.num_heads == 4 and block.self_attn.dropout == 0.2 and block.dropout == 0.3
    assert block.mlp.up_proj.out_features == 40
    tokens = torch.randint(19, (1, 12))
    assert decoder.eval()(tokens).isfinite().all()
    with pytest.raises(ValueError, match="tokens has 13 tokens a row; max_positions is 12"):
        decoder(torch.randint(19, (1, 13)))


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.4, 0.0), (0.0, 0.4)])
def test_dropout_acts_in_training_only(rates):
    torch.manual_seed(0)
    config = tilesmith.KernelConfig(**SMALL, attention_dropout_prob=rates[0], hidden_dropout_prob=rates[1])
    decoder = nn.Decoder(config.decoder_config(vocab_size=19, num_layers=1, init_std=0.3))
    tokens = torch.randint(19, (2, 9))
    assert torch.equal(decoder(tokens), decoder(tokens)) == (rates == (0.0, 0.0))
    decoder(tokens, tokens).backward()
    decoder.eval()
    assert torch.equal(decoder(tokens), decoder(tokens))


@pytest.mark.parametrize(
    "bad",
    [{"hidden_size": 30}, {"max_sequence_length": 0}, {"attention_dropout_prob": 1.0}, {"hidden_dropout_prob": -0.1}],
)
def test_kernel_configs_that_cannot_be(bad):
    with pytest.raises(ValueError, match="KernelConfig: "):
        tilesmith.KernelConfig(**{**SMALL, **bad})
