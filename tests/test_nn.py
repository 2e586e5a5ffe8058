"""tilesmith.nn: a decoder against the same formulas in plain PyTorch, its cache, its generation and its state dict."""

import copy
import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tilesmith import nn

LLAMA = nn.DecoderConfig(
    vocab_size=67, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=48,
    init_std=0.3,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "qwen": dataclasses.replace(LLAMA, qk_norm=True, head_dim=12, num_kv_heads=1, attention_bias=True),
    "gemma": dataclasses.replace(
        LLAMA, activation="geglu", norm_offset=1.0, softcap=5.0, logit_softcap=3.0, tie_embeddings=True, window=4
    ),
    "gptj": dataclasses.replace(LLAMA, rope_interleaved=True, rotary_dim=4, activation="geglu_erf", num_kv_heads=None),
    "one layer": dataclasses.replace(LLAMA, num_layers=1, norm_casting="llama", rope_scaling=nn.Llama3Scaling(4.0)),
}


def _decoder(config, dtype=torch.float32):
    torch.manual_seed(0)
    decoder = nn.Decoder(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return decoder


def _tokens(config, batch=2, length=11, seed=1):
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def _plain_norm(config, x, weight, offset=0.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * (weight + offset)


def _plain_rotation(config, x, cos, sin):
    cos, sin = cos[: x.shape[2]].to(x.dtype), sin[: x.shape[2]].to(x.dtype)
    rotated, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if config.rope_interleaved:
        pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
        turned = torch.view_as_real(pairs).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = rotated * torch.cat((cos, cos), -1) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1)
    return torch.cat((turned, rest), dim=-1)


def _heads(x, head_dim):
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _plain_logits(config, weights, tokens, cos, sin):
    """The decoder with nothing but PyTorch; weights by the names of the state dict."""

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    head_dim = config.head_dim or config.hidden_size // config.num_heads
    distance = torch.arange(tokens.shape[1])[:, None] - torch.arange(tokens.shape[1])
    hidden = (distance < 0) | (distance > (config.window if config.window is not None else tokens.shape[1]))
    x = weights["embed_tokens.weight"][tokens]
    for i in range(config.num_layers):
        at = f"layers.{i}"
        y = _plain_norm(config, x, weights[f"{at}.input_layernorm.weight"], config.norm_offset)
        q, k, v = (_heads(linear(y, f"{at}.self_attn.{n}_proj"), head_dim) for n in "qkv")
        if config.qk_norm:
            q, k = (_plain_norm(config, a, weights[f"{at}.self_attn.{n}_norm.weight"]) for a, n in ((q, "q"), (k, "k")))
        q, k = (_plain_rotation(config, a, cos, sin) for a in (q, k))
        k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], dim=1) for a in (k, v))
        scores = q @ k.mT / head_dim**0.5
        if config.softcap:
            scores = config.softcap * torch.tanh(scores / config.softcap)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + linear(y.transpose(1, 2).flatten(2), f"{at}.self_attn.o_proj")
        y = _plain_norm(config, x, weights[f"{at}.post_attention_layernorm.weight"], config.norm_offset)
        gate = linear(y, f"{at}.mlp.gate_proj")
        approximate = "tanh" if config.activation == "geglu" else "none"
        gate = F.silu(gate) if config.activation == "swiglu" else F.gelu(gate, approximate=approximate)
        x = x + linear(gate * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    x = _plain_norm(config, x, weights["norm.weight"], config.norm_offset)
    logits = F.linear(x, weights["embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"])
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


def _plain_run(config, decoder, tokens, labels, dtype):
    """Logits, loss and gradients by parameter name, in plain PyTorch."""
    weights = {n: p.detach().to(dtype).requires_grad_() for n, p in decoder.named_parameters()}
    logits = _plain_logits(config, weights, tokens, decoder.rotary.cos, decoder.rotary.sin)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    grads = torch.autograd.grad(loss, list(weights.values()))
    return {"logits": logits.detach(), "loss": loss.detach(), **dict(zip(weights, grads))}


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_backward_equal_plain_torch(name):
    """In fp64, where a wrong formula stands out: nearer to plain PyTorch than plain PyTorch in fp32 is."""
    config = CONFIGS[name]
    decoder, tokens = _decoder(config, torch.float64), _tokens(config)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    exact = _plain_run(config, decoder, tokens, labels, torch.float64)
    rounded = _plain_run(config, decoder, tokens, labels, torch.float32)
    loss = decoder(tokens, labels)
    loss.backward()
    got = {"logits": decoder(tokens).detach(), "loss": loss.detach()}
    got |= {n: p.grad for n, p in decoder.named_parameters()}
    assert got.keys() == exact.keys()
    for what in exact:
        assert _distance(got[what], exact[what]) <= _distance(rounded[what], exact[what]), what


def _distance(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_generation_equals_greedy_without_a_cache(name):
    config = CONFIGS[name]
    decoder, tokens = _decoder(config, torch.float64), _tokens(config, length=5)
    new = nn.generate(decoder, tokens, 9)
    for _ in range(9):
        with torch.no_grad():
            tokens = torch.cat((tokens, decoder(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(new, tokens[:, 5:])


def test_prompts_of_different_lengths_do_not_see_their_padding():
    decoder, tokens = _decoder(LLAMA, torch.float64), _tokens(LLAMA, batch=3, length=7)
    lengths = torch.tensor([7, 1, 4], dtype=torch.int32)
    together = nn.generate(decoder, tokens, 6, prompt_lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(together[row : row + 1], nn.generate(decoder, tokens[row : row + 1, :length], 6))


def test_tokens_may_enter_the_cache_in_pieces():
    decoder, tokens = _decoder(LLAMA, torch.float64), _tokens(LLAMA)
    cache = decoder.new_cache(2, 16)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    with torch.no_grad():
        pieces = [decoder(piece, cache=cache) for piece in tokens.split([4, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), decoder(tokens))
        assert cache.lengths.tolist() == [11, 11]
        cache.reset()
        torch.testing.assert_close(decoder(tokens, cache=cache), decoder(tokens))


def test_packed_documents_equal_documents_alone():
    decoder, tokens = _decoder(LLAMA, torch.float64), _tokens(LLAMA, batch=1, length=15)
    packed = decoder(tokens, cu_seqlens=torch.tensor([0, 4, 5, 15], dtype=torch.int32))
    alone = [decoder(document) for document in tokens.split([4, 1, 10], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_packed_documents_have_no_cache():
    decoder, tokens = _decoder(LLAMA), _tokens(LLAMA, batch=1, length=7)
    with torch.no_grad(), pytest.raises(ValueError, match="cu_seqlens and cache"):
        decoder(tokens, cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32), cache=decoder.new_cache(1))


def test_sampling():
    decoder, prompt = _decoder(LLAMA), _tokens(LLAMA, length=3)

    def sample(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return nn.generate(decoder, prompt, 8, generator=generator, **options)

    assert torch.equal(sample(3, temperature=1.0), sample(3, temperature=1.0))
    assert not torch.equal(sample(3, temperature=1.0), sample(4, temperature=1.0))
    assert torch.equal(sample(3, temperature=2.0, top_k=1), nn.generate(decoder, prompt, 8))


def test_a_stop_token_is_repeated():
    decoder, prompt = _decoder(LLAMA), _tokens(LLAMA, length=3)
    free = nn.generate(decoder, prompt, 8)
    stop = free[0, 2].item()
    stopped = nn.generate(decoder, prompt, 8, stop_token=stop)
    for row, tokens in enumerate(free.tolist()):
        end = tokens.index(stop) if stop in tokens else len(tokens)
        assert stopped[row].tolist() == tokens[:end] + [stop] * (len(tokens) - end)


def test_a_temperature_near_zero_takes_the_likeliest():
    decoder, prompt = _decoder(LLAMA), _tokens(LLAMA, length=3)
    for temperature in (1e-42, 1e-300):
        assert torch.equal(nn.generate(decoder, prompt, 8, temperature=temperature), nn.generate(decoder, prompt, 8))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stop_token": "x"}, TypeError, "stop_token must be an int"),
        ({"stop_token": [1, 2]}, TypeError, "stop_token must be an int"),
        ({"stop_token": 67}, ValueError, "stop_token is 67; it must be 0 … 66"),
        ({"stop_token": -1}, ValueError, "stop_token must be at least 0"),
        ({"prompt_lengths": torch.tensor([0, 3])}, ValueError, r"prompt_lengths holds \[0, 3\].*numbers from 1 to 3"),
        ({"prompt_lengths": torch.tensor([1, 4])}, ValueError, ".*give numbers from 1 to 3"),
        (
            {"prompt_lengths": torch.ones(2, device="meta").int()},
            ValueError,
            "prompt_lengths is on meta, prompt on cpu",
        ),
    ],
)
def test_generate_names_what_it_cannot_use(options, error, message):
    with pytest.raises(error, match=f"generate: {message}"):
        nn.generate(_decoder(LLAMA), _tokens(LLAMA, length=3), 2, **options)


def test_a_cache_without_room_is_refused():
    decoder, tokens = _decoder(LLAMA), _tokens(LLAMA, length=5)
    cache = decoder.new_cache(2, 8)
    with torch.no_grad():
        decoder(tokens, cache=cache)
        with pytest.raises(ValueError, match="tokens has 5 tokens a row and cache holds 5 already; it has 8 slots"):
            decoder(tokens, cache=cache)
        assert cache.lengths.tolist() == [5, 5]
        decoder(tokens[:, :3], cache=cache)
        roomy = nn.KVCache.empty(2, 2, 2, 60, 8)
        roomy.lengths.fill_(46)
        with pytest.raises(ValueError, match="the decoder 48 positions"):  # its tables of angles end there
            decoder(tokens, cache=roomy)


def test_a_sequence_of_another_kind_is_refused():
    decoder, tokens = _decoder(LLAMA), _tokens(LLAMA)
    with pytest.raises(TypeError, match="Decoder: sequence must be a tilesmith.distributed.SharedSequence"):
        decoder(tokens, sequence=3)
    with pytest.raises(TypeError, match="Attention: sequence must be a tilesmith.distributed.SharedSequence"):
        decoder.layers[0].self_attn(torch.randn(2, 11, 32), decoder.rotary, sequence=3)


def test_a_router_made_on_meta_has_corrections_of_zero():
    router = nn.Router(8, 4, 2, corrected=True, device="meta").to_empty(device="cpu")
    router.e_score_correction_bias.fill_(7.0)  # whatever the memory held
    router.reset_parameters()
    assert router.e_score_correction_bias.tolist() == [0.0] * 4


def test_layers_show_their_options():
    shown = repr(nn.Attention(8, 2, 1, window=3, softcap=2.0, dropout=0.1))
    assert "num_heads=2, num_kv_heads=1, head_dim=4, window=3, softcap=2.0, dropout=0.1" in shown
    assert "interleaved=True" in repr(nn.RotaryEmbedding(8, 4, interleaved=True))
    assert repr(nn.JSD(0.25)) == "JSD(beta=0.25, ignore_index=-100)"
    assert "divergence='kl'" in repr(nn.FusedLinearDistillationLoss(divergence="kl"))


def test_generate_refuses_what_the_cache_cannot_hold():
    decoder = _decoder(LLAMA)
    with pytest.raises(ValueError, match="48 positions"):
        nn.generate(decoder, _tokens(LLAMA, length=40), 9)
    with pytest.raises(ValueError, match="no tokens"):
        nn.generate(decoder, _tokens(LLAMA, length=0), 1)
    with pytest.raises(ValueError, match="slots is 49"):
        decoder.new_cache(1, 49)


def test_a_decoder_made_on_meta_has_its_tables_after_weights_were_assigned():
    whole = _decoder(LLAMA)
    with torch.device("meta"):
        other = nn.Decoder(LLAMA)
    other.load_state_dict(whole.state_dict(), assign=True)
    tokens = _tokens(LLAMA)
    assert torch.equal(other(tokens), whole(tokens))


def test_tables_made_in_inference_mode_serve_training():
    with torch.device("meta"):
        decoder = nn.Decoder(LLAMA)
    decoder.load_state_dict(_decoder(LLAMA).state_dict(), assign=True)
    tokens = _tokens(LLAMA)
    with torch.inference_mode():
        decoder(tokens)
    decoder(tokens, tokens).backward()


class Adapted(torch.nn.Module):
    """An output projection with a low-rank term, as PEFT puts one in place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, torch.nn.Linear(32, 2), torch.nn.Linear(2, 67)

    weight = property(lambda self: self.base.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_a_module_in_place_of_lm_head_is_called():
    config = dataclasses.replace(LLAMA, logit_softcap=3.0)
    decoder, tokens = _decoder(config), _tokens(config)
    decoder.lm_head = head = Adapted(decoder.lm_head)
    expected = 3.0 * torch.tanh(head(decoder.hidden_states(tokens)) / 3.0)
    torch.testing.assert_close(decoder(tokens), expected)
    loss = decoder(tokens, tokens)
    torch.testing.assert_close(loss, F.cross_entropy(expected.flatten(0, 1), tokens.flatten()))
    loss.backward()
    assert head.up.weight.grad is not None and head.base.weight.grad is not None


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_state_dict_round_trip(name, tmp_path):
    config = CONFIGS[name]
    decoder, tokens = _decoder(config), _tokens(config)
    torch.save(decoder.state_dict(), tmp_path / "decoder.pt")
    other = nn.Decoder(config, device="meta").to_empty(device="cpu")
    other.load_state_dict(torch.load(tmp_path / "decoder.pt"), strict=True)
    assert torch.equal(other(tokens), decoder(tokens))
    assert ("lm_head.weight" in decoder.state_dict()) == (not config.tie_embeddings)
    assert not any("rotary" in key for key in decoder.state_dict())


@pytest.mark.parametrize("way", ["to_empty", "double", "share_memory"])
def test_tables_of_angles_survive_being_moved(way):
    rotary = nn.RotaryEmbedding(8, 32)
    before = rotary.cos.clone(), rotary.sin.clone()
    {
        "to_empty": lambda: rotary.to_empty(device="cpu"),  # new memory, on the same device and of the same dtype
        "double": rotary.double,
        "share_memory": rotary.share_memory,
    }[way]()
    assert torch.equal(rotary.cos, before[0]) and torch.equal(rotary.sin, before[1])


def test_a_tied_decoder_has_one_matrix_for_both_ends():
    decoder = _decoder(CONFIGS["tied"])
    assert decoder.output_weight is decoder.embed_tokens.weight
    assert copy.deepcopy(decoder).lm_head is None


def test_tables_of_angles_stay_float32():
    decoder = _decoder(LLAMA)
    cos = decoder.rotary.cos.clone()
    decoder.to(torch.bfloat16)
    assert decoder.norm.weight.dtype == torch.bfloat16
    assert torch.equal(decoder.rotary.cos, cos) and decoder.rotary.sin.dtype == torch.float32
    assert decoder(_tokens(LLAMA)).isfinite().all()


def test_compiles_whole():
    decoder, tokens = _decoder(LLAMA), _tokens(LLAMA)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), decoder(tokens))
    compiled(tokens, tokens).backward()
    grads = {n: p.grad.clone() for n, p in decoder.named_parameters()}
    decoder.zero_grad()
    decoder(tokens, tokens).backward()
    for n, p in decoder.named_parameters():
        torch.testing.assert_close(grads[n], p.grad)


def test_layer_norm_equals_torch():
    x, residual = torch.randn(2, 3, 16, dtype=torch.float64).unbind(0)[0], torch.randn(3, 16, dtype=torch.float64)
    layer = nn.LayerNorm(16, dtype=torch.float64)
    plain = torch.nn.LayerNorm(16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))
    y, s = layer.add(x, residual)
    torch.testing.assert_close(s, x + residual)
    torch.testing.assert_close(y, plain(x + residual))
    assert nn.LayerNorm(16, bias=False).bias is None


@pytest.mark.parametrize("changed", [{"num_kv_heads": 3}, {"num_heads": 5}, {"activation": "relu"}, {"rotary_dim": 3}])
def test_configurations_that_cannot_be(changed):
    with pytest.raises(ValueError, match=next(iter(changed)).removeprefix("rotary_")):
        nn.Decoder(dataclasses.replace(LLAMA, **changed))


@pytest.mark.parametrize("scaled", [False, True])
def test_weights_of_a_hugging_face_llama_load(scaled, missing):
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        missing("transformers is not installed")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if scaled:
        rope |= {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }  # fmt: skip
    torch.manual_seed(2)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=48, rms_norm_eps=1e-6, rope_parameters=rope,
            initializer_range=0.3, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    scaling = nn.Llama3Scaling(8.0, 1.0, 4.0, 16) if scaled else None
    ours = nn.Decoder(dataclasses.replace(LLAMA, rope_scaling=scaling, norm_casting="llama"))
    ours.load_state_dict({k.removeprefix("model."): v for k, v in theirs.state_dict().items()}, strict=True)
    tokens = _tokens(LLAMA, length=40)
    cos, sin = (table[0, :, :4] for table in theirs.model.rotary_emb(torch.empty(1), torch.arange(48)[None]))
    torch.testing.assert_close((ours.rotary.cos, ours.rotary.sin), (cos, sin))
    with torch.no_grad():
        rounded = ours(tokens)
        ours.double()
        ours.rotary.cos, ours.rotary.sin = cos, sin
        # In a double model their norms still round to fp32, and nothing else: less than a whole fp32 run does.
        assert _distance(ours(tokens), theirs.double()(tokens).logits) <= _distance(ours(tokens), rounded)


def test_rms_norm_with_a_weight_for_each_head():
    norm = nn.RMSNorm(8, num_heads=3, offset=1.0, casting="llama")
    assert norm.weight.shape == (3, 8)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 3, 8)
    wanted = torch.stack([F.rms_norm(x[..., h, :], (8,), 1 + norm.weight[h], norm.eps) for h in range(3)], -2)
    torch.testing.assert_close(norm(x), wanted)
    assert "num_heads=3" in repr(norm)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        nn.RMSNorm(8, num_heads=0)
    with pytest.raises(ValueError, match=r"must be \[8\], or \[4, 8\] for one a head"):
        norm(torch.randn(2, 4, 8))
