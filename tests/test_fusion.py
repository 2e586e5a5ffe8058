"""Fusion of whole models: the same numbers, the same parameters, a refusal in words where nothing is gained."""

from __future__ import annotations

import ast
import copy
import io
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import build, ops_everywhere  # noqa: F401
from tilesmith import nn as tnn
from tilesmith.attention.fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
    benchmark_fusion_performance,
    create_unified_attention_fusion,
)
from tilesmith.engine import use
from tilesmith.models.layers.norm_rotary import deferred
from tilesmith.models.layers.packing import PackedForm, PackRule
from tilesmith.models.layers.transformer_layers import LayerRule
from tilesmith.models.sizing.memory_estimate import LiveBytes
from tilesmith.rewrite import forms, parse, rewrite
from tilesmith.validate.budget import compare

AGGRESSIVE, BALANCED, CONSERVATIVE = (
    OptimizationLevel.AGGRESSIVE, OptimizationLevel.BALANCED, OptimizationLevel.CONSERVATIVE
)  # fmt: skip
FULL, ATTENTION, FFN, NORM = FusionStrategy
GENERATOR = torch.Generator().manual_seed(0)
DRAWS = 3


@pytest.fixture(autouse=True)
def more_ops():
    with use(linear_act="reference", dropout_add_norm="reference"):
        yield


def _gradients(model, *args, **kwargs):
    """The output and the gradients of every parameter and of x."""
    model.zero_grad()
    args = tuple(a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args)
    out = model(*args, **kwargs)
    out = getattr(out, "loss", None) if getattr(out, "loss", None) is not None else getattr(out, "logits", out)
    (
        out if out.ndim == 0 else (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    ).backward()
    found = {"out": out.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    return found | {f"arg{i}": a.grad for i, a in enumerate(args) if a.grad is not None}


def _compare(fused, plain, *args, **kwargs):
    """Over several draws: the largest error of one depends on the order in which a CPU's BLAS adds up."""
    wide = copy.deepcopy(plain).double()
    widen = lambda v: v.double() if isinstance(v, torch.Tensor) and v.dtype is torch.float32 else v  # noqa: E731
    if hasattr(plain, "activation"):
        wide.activation = plain.activation
    found = []
    for draw in range(DRAWS):
        drawn = [torch.randn_like(a) if draw and a.is_floating_point() else a for a in args]
        oracle = _gradients(wide, *map(widen, drawn), **{k: widen(v) for k, v in kwargs.items()})
        found.append((_gradients(fused, *drawn, **kwargs), _gradients(plain, *drawn, **kwargs), oracle))
        assert found[-1][0].keys() == found[-1][1].keys()
    for name in found[0][0]:
        budget = compare(*(torch.stack([one[which][name] for one in found]) for which in range(3)))
        assert budget.passed, f"{name}: {budget}"


def _layer(decoder=False, **options):
    torch.manual_seed(0)
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    return kind(16, 2, 24, **{"dropout": 0.0, "activation": "gelu", **options})


MASKS = {
    "none": {},
    "causal": {"src_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
    "bool": {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(2)},
    "heads": {"src_mask": torch.randn(6, 5, 5, generator=GENERATOR)},
    "padding": {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])},
    "both": {
        "src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2]),
    },
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("first", "batch_first"), list(itertools.product((False, True), repeat=2)))
def test_encoder_layers_compute_the_same(first, batch_first, masks):
    plain = _layer(norm_first=first, batch_first=batch_first)
    fused = create_unified_attention_fusion(copy.deepcopy(plain))
    x = torch.randn(*((3, 5) if batch_first else (5, 3)), 16)
    _compare(fused, plain, x, **masks)
    counted = fused.fusion_report.calls()
    assert counted["attention"] and counted["linear_act"] and counted["add_layer_norm"]


@pytest.mark.parametrize(("first", "activation"), [(False, "relu"), (True, nn.GELU("tanh")), (True, nn.SiLU())])
def test_decoder_layers_compute_the_same(first, activation):
    options = {"norm_first": first, "activation": activation, "batch_first": True, "bias": first}
    plain = _layer(True, **options)
    fused = create_unified_attention_fusion(_layer(True, **options))  # torch's copy of one forgets its activation
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    _compare(fused, plain, x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
    assert fused.fusion_report.calls()["attention"] == 2 * DRAWS
    with torch.no_grad():  # a hint of causality between other numbers of queries and keys is PyTorch's to understand
        options = {"memory_mask": torch.zeros(5, 7), "memory_is_causal": True}
        torch.testing.assert_close(fused(x, memory, **options), plain(x, memory, **options))


def test_a_stack_is_fused_layer_by_layer_and_evaluation_too():
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(_layer(batch_first=True), 2, enable_nested_tensor=False)
    fused = create_unified_attention_fusion(copy.deepcopy(plain))
    _compare(fused, plain, torch.randn(2, 5, 16))
    with torch.no_grad():
        x = torch.randn(2, 5, 16)
        torch.testing.assert_close(fused.eval()(x), plain.eval()(x))


def test_dropout_with_the_sum_and_the_norm():
    layer = _layer(dropout=0.5, batch_first=True)
    fused = create_unified_attention_fusion(layer, FULL, AGGRESSIVE)
    x = torch.randn(2, 5, 16)
    torch.manual_seed(1)
    first = fused(x)
    torch.manual_seed(1)
    assert torch.equal(first, fused(x)) and not torch.equal(first, fused(x))
    assert fused.fusion_report.calls()["dropout_add_norm"] == 6
    plain = tilesmith.undo(copy.deepcopy(fused)).eval()
    torch.testing.assert_close(fused.eval()(x), plain(x))


def test_what_takes_a_layer_s_place_is_not_passed_over():
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

        def forward(self, x):
            return self.inner(x) + 1

    plain = _layer(batch_first=True)
    fused = create_unified_attention_fusion(copy.deepcopy(plain))
    x = torch.randn(2, 5, 16)
    for layer in (plain, fused):
        layer.linear1 = Adapter(layer.linear1)
    torch.testing.assert_close(fused(x), plain(x))
    plain, seen = _layer(batch_first=True), []
    fused = create_unified_attention_fusion(copy.deepcopy(plain))
    fused.self_attn.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(fused(x), plain(x))
    assert seen


def _decoder(**options):
    torch.manual_seed(0)
    return tnn.Decoder(tnn.DecoderConfig(64, 16, 24, 2, 2, num_kv_heads=1, max_positions=32, **options))


PACKABLE = {
    "ours": (_decoder, lambda m: (torch.arange(12).view(2, 6), torch.arange(1, 13).view(2, 6))),
    "llama": (lambda: build("llama"), None),
    "qwen2": (lambda: build("qwen2"), None),  # with biases
    "gemma2": (lambda: build("gemma2"), None),
}


@pytest.mark.parametrize("family", PACKABLE)
def test_packed_products_are_the_same_and_undone_to_the_bit(family):
    make, inputs = PACKABLE[family]
    plain = make()
    model = copy.deepcopy(plain)
    parameters, before = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    fused = create_unified_attention_fusion(model, FULL, AGGRESSIVE)
    assert fused is model and all(a is b for a, b in zip(parameters, model.parameters()))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    holders = [m for m in model.modules() if any(isinstance(f, PackedForm) for f in forms(m))]
    assert len(holders) == 4 and all(adjacent([m._modules[n].weight for n in _packed(m)]) for m in holders)
    ids = torch.arange(12).view(2, 6) + 3
    args, kwargs = (inputs(plain), {}) if inputs else ((ids,), {"labels": ids})
    wide = [_gradients(copy.deepcopy(m).double(), *args, **kwargs) for m in (fused, plain)]
    # transformers computes norms and angles in float32 whatever the parameters are
    torch.testing.assert_close(*({name: value.float() for name, value in found.items()} for found in wide))
    # one product for several: fewer of them than there are layers
    assert _products(fused, args, kwargs) == _products(plain, args, kwargs) - (2 + 1) * 2
    for other, steps in ((plain, torch.optim.SGD(plain.parameters(), 1e-2)), (model, optimizer)):
        _gradients(other, *args, **kwargs)
        steps.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    stepped = {k: v.clone() for k, v in model.state_dict().items()}
    tilesmith.undo(model)
    assert all(torch.equal(v, stepped[k]) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert not any(forms(m) for m in model.modules())
    owned = [p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters()]
    assert all(owned)


def adjacent(parts):
    """Whether each is where the one before ends."""
    return all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(parts))


def _packed(module):
    return next(f.names for f in forms(module) if isinstance(f, PackedForm))


def _products(model, args, kwargs):
    """How many linear layers' products a forward computes."""
    calls, linear = [], torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "linear", lambda *a, **k: calls.append(1) or linear(*a, **k))
        model(*args, **kwargs)
    return len(calls)


def test_packed_models_move_copy_pickle_and_load():
    model = create_unified_attention_fusion(_decoder(), FULL, AGGRESSIVE)
    tokens = torch.arange(12).view(2, 6)
    attention = model.layers[0].self_attn
    before = model(tokens)
    model.double()
    assert adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    model.float()
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(tokens), before)
    assert isinstance(other, UnifiedAttentionFusion) and other.fusion_config == model.fusion_config
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    torch.testing.assert_close(torch.load(saved, weights_only=False)(tokens), before)
    fresh = _decoder()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(tokens), before)
    with torch.no_grad():
        fresh.layers[0].self_attn.k_proj.weight.mul_(2)
    model.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(model(tokens), fresh(tokens))


class _Attention(nn.Module):
    """Gives its layers what `inputs` makes of x."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, n) for n in (8, 4, 4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        return self.norm(q) + torch.cat((k, v), -1)


class _Other(_Attention):
    def forward(self, x):
        q = self.q(x)
        x = x + 1
        k = self.k(x)
        v = self.v(x)
        return self.norm(q) + torch.cat((k, v), -1)


class _InPlace(_Attention):
    def forward(self, x):
        x = x * 1
        alias = x[:]
        q = self.q(x)
        alias.add_(1)
        k = self.k(x)
        v = self.v(x)
        q *= 2
        return self.norm(q) + torch.cat((k, v), -1)


class _Reentered(_Attention):
    """Calls the first layer alone, time and again."""

    def forward(self, x):
        for _ in range(5):
            self.q(x)
        return self.norm(self.q(x)) + torch.cat((self.k(x), self.v(x)), -1)


@pytest.mark.parametrize("kind", [_Attention, _Other, _InPlace, _Reentered])
def test_layers_that_are_given_other_tensors_compute_their_own(kind):
    plain = kind()
    fused = create_unified_attention_fusion(copy.deepcopy(plain), FULL, CONSERVATIVE)
    rewrite(fused, [PackRule()])
    names = _packed(fused)
    assert names == (("k", "v") if kind is _Other else ("q", "k", "v"))
    for x in (torch.randn(3, 8), torch.randn(5, 8)):
        if kind is not _InPlace:  # autograd refuses that
            _compare(fused, plain, x)
        with torch.no_grad():
            torch.testing.assert_close(fused(x.clone()), plain(x.clone()))
        if kind is not _InPlace:  # no version tells of a write
            with torch.inference_mode():
                torch.testing.assert_close(fused(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(fused(x), plain(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("change", ["written", "frozen", "replaced"])
def test_a_layer_changed_since_the_one_before_it_was_called_computes_by_its_own(change):
    module, x = _Attention(), torch.randn(3, 8)
    rewrite(module, [PackRule()])
    module.q(x)
    if change == "written":
        with torch.no_grad():
            module.k.weight.mul_(2)
    elif change == "frozen":
        module.k.requires_grad_(False)
    else:
        module.k.weight = nn.Parameter(torch.randn(4, 8))
    found = module.k(x)
    torch.testing.assert_close(found, nn.functional.linear(x, module.k.weight, module.k.bias))
    assert found.requires_grad == (change != "frozen")


@pytest.mark.parametrize("since", ["wrapped", "replaced"])
def test_undo_gives_layers_that_moved_a_storage_of_their_own(since):
    module = _Attention()
    rewrite(module, [PackRule()])
    layers = module.q, module.k, module.v
    module.q = nn.Sequential(module.q) if since == "wrapped" else nn.Linear(8, 8)
    tilesmith.undo(module)
    assert all(type(layer) is nn.Linear and vars(layer).keys() == vars(nn.Linear(8, 8)).keys() for layer in layers)
    assert all(layer.weight.untyped_storage().nbytes() == 4 * layer.weight.numel() for layer in layers)


def test_writing_to_a_packed_weight_before_the_backward_is_told():
    fused = _Attention()
    rewrite(fused, [PackRule()])
    out = fused(torch.randn(3, 8, requires_grad=True)).sum()
    with torch.no_grad():
        fused.v.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def _tied(model):
    model.other = nn.Linear(8, 4)
    model.other.weight = model.k.weight


def _viewing(model):
    whole = torch.randn(16, 8)
    model.k.weight = nn.Parameter(whole[:4])
    model.register_buffer("whole", whole)


def _quantised(model):
    model.k.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)


REFUSED = {
    "tied": (_tied, r"k\.weight shares its memory with other\.weight"),
    "viewed": (_viewing, r"k\.weight shares its memory with \.?whole"),
    "hooked": (lambda m: m.v.register_forward_hook(lambda *_: None), "v has hooks"),
    "patched": (lambda m: setattr(m.v, "forward", lambda x: x), "v: its forward was replaced on the instance"),
    "quantised": (_quantised, r"k\.weight is int8: quantised"),
    "meta": (lambda m: m.v.to("meta"), r"v\.weight is on meta"),
    "half": (lambda m: m.k.half(), "they differ in dtype"),
    "frozen": (lambda m: m.k.requires_grad_(False), "frozen"),
    "bias": (lambda m: setattr(m.k, "bias", None), "some have none"),
    "subclass": (lambda m: setattr(m, "v", tnn.AttentionLayer(8, 2)), None),
    "other": (lambda m: setattr(m, "k", type("Q", (nn.Linear,), {"forward": lambda s, x: x})(8, 4)), "not a plain"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_cannot_be_moved_are_refused_by_name(kind):
    spoil, reason = REFUSED[kind]
    model = _Attention()
    spoil(model)
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    report = rewrite(model, [PackRule()])
    rows = [row for row in report.rows if row.rule == "pack" and not row.fqn]
    if reason is None:
        assert rows[0].reason.startswith("q, k read one tensor")
    else:
        assert re.search(reason, rows[0].reason), rows[0].reason
        assert not report.replaced and before == {n: p.data_ptr() for n, p in model.named_parameters()}


def test_strategies_and_levels_that_change_nothing_are_refused():
    layer = _layer()
    cases = {
        (ATTENTION, CONSERVATIVE): "strategy ATTENTION_ONLY changes nothing",
        (ATTENTION, AGGRESSIVE): "AGGRESSIVE changes nothing beyond BALANCED .* use OptimizationLevel.BALANCED",
        (NORM, BALANCED): "BALANCED changes nothing beyond CONSERVATIVE",
        (FULL, AGGRESSIVE): "its dropouts drop nothing",
    }
    for (strategy, level), words in cases.items():
        with pytest.raises(ValueError, match=words):
            create_unified_attention_fusion(layer, strategy, level)
        assert not any(forms(m) for m in layer.modules()) and not hasattr(layer, "tilesmith_report")
    with pytest.raises(ValueError, match="changes nothing"):
        create_unified_attention_fusion(nn.Sequential(nn.Linear(4, 4)))
    served = {ATTENTION: {"attention"}, FFN: {"linear_act"}, FULL: {"attention", "linear_act"}}
    for strategy, wanted in served.items():
        fused = create_unified_attention_fusion(layer, strategy)
        assert wanted <= {op for row in fused.fusion_report.replaced for op in row.ops}
        x = torch.randn(5, 3, 16)
        torch.testing.assert_close(fused(x), tilesmith.undo(copy.deepcopy(fused))(x))
        fused.unfuse()
        assert not isinstance(layer, UnifiedAttentionFusion)


def test_fields_of_the_configuration():
    layer = create_unified_attention_fusion(_layer(), config=FusionConfig(enable_mixed_precision=False))
    x = torch.randn(5, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert torch.equal(found, layer(x)) and "does not reach" in str(layer.fusion_report)
    kept, saved = (
        create_unified_attention_fusion(_gated(), FFN, BALANCED, config=None)
        if memory
        else create_unified_attention_fusion(_gated(), config=FusionConfig(FFN, enable_memory_optimization=False))
        for memory in (False, True)
    )
    assert _saved_bytes(saved) < _saved_bytes(kept)
    small = create_unified_attention_fusion(build("llama"), config=FusionConfig(target_sequence_length=100))
    assert "The model has 64 positions" in str(small.fusion_report)
    gradients, seed = [p.grad for p in small.parameters()], torch.random.get_rng_state()
    small.warm_up()
    assert small.fusion_report.calls()["attention"] and gradients == [p.grad for p in small.parameters()]
    assert torch.equal(seed, torch.random.get_rng_state()) and small.training
    assert not create_unified_attention_fusion(
        build("llama"), config=FusionConfig(enable_memory_optimization=False)
    ).fusion_report.calls().keys() & {"linear_cross_entropy"}


def _gated():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=64, num_attention_heads=2))


def _saved_bytes(model):
    """What is there between forward and backward; hooks on saved tensors would be in the way."""
    x = torch.randn(32, 16, requires_grad=True)
    with LiveBytes() as live:
        live.ignore(iter([x, *model.parameters()]))
        out = model(x)
        saved = live.now
    out.sum().backward()
    return saved


BAD = [
    (lambda: create_unified_attention_fusion("model"), TypeError, "model must be a torch.nn.Module, got str"),
    (
        lambda: create_unified_attention_fusion(_layer(), "everything"),
        ValueError,
        "strategy is 'everything'; it must be",
    ),
    (lambda: create_unified_attention_fusion(_layer(), FULL, 3), ValueError, "optimization_level is 3; it must be one"),
    (lambda: create_unified_attention_fusion(_layer(), config="x"), TypeError, "config must be a FusionConfig"),
    (lambda: create_unified_attention_fusion(_layer(), NORM, config=FusionConfig()), ValueError, "or config"),
    (lambda: create_unified_attention_fusion(_layer().to("meta")), ValueError, "in_proj_weight is on meta"),
    (lambda: FusionConfig(target_sequence_length=0), ValueError, "target_sequence_length must be at least 1"),
    (lambda: FusionConfig(enable_mixed_precision=1), TypeError, "enable_mixed_precision must be True or False"),
    (lambda: UnifiedAttentionFusion(_layer()), TypeError, "call create_unified_attention_fusion"),
    (lambda: benchmark_fusion_performance(_layer(), _layer(), torch.ones(2, 2, 16)), ValueError, "is not fused"),
    (
        lambda: benchmark_fusion_performance(_layer(), _layer(), None),
        TypeError,
        "input_data must be a tensor, .* got None",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_models_that_are_fused_or_patched_already():
    layer = create_unified_attention_fusion(_layer(), FULL, BALANCED)
    assert create_unified_attention_fusion(layer, "full_block", "balanced") is layer
    with pytest.raises(ValueError, match="is fused by FusionConfig.* call unfuse"):
        create_unified_attention_fusion(layer, ATTENTION)
    patched = _layer()
    patched.forward = patched.forward
    with pytest.raises(ValueError, match="its forward was replaced on the instance"):
        create_unified_attention_fusion(patched)
    before = tilesmith.optimize(_layer())  # on top of optimize
    fused = create_unified_attention_fusion(before)
    torch.testing.assert_close(fused(torch.ones(5, 3, 16)), _layer()(torch.ones(5, 3, 16)))
    own = type("Own", (nn.TransformerEncoderLayer,), {"_sa_block": lambda self, x, *_, **__: x})(16, 2, 24)
    assert "has a _sa_block of its own" in str(rewrite(own, [LayerRule()]))


def test_the_benchmark_measures_both_and_changes_nothing():
    layer = create_unified_attention_fusion(_layer(batch_first=True))
    x, before = torch.randn(2, 5, 16), [p.detach().clone() for p in layer.parameters()]
    seed = torch.random.get_rng_state()
    stats = benchmark_fusion_performance(layer, layer, x, 4, backward=True)
    assert stats.baseline_ms > 0 and stats.fused_ms > 0 and stats.runs == 4 and stats.device == "cpu"
    assert stats.baseline_launches > 50 and stats.fused_launches > 10 and stats.baseline_peak_bytes > 1000
    assert stats.speedup == stats.baseline_ms / stats.fused_ms
    assert set(stats.to_dict()) > {"speedup", "launch_reduction", "baseline_spread"} and "operators" in str(stats)
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(layer.parameters(), before))
    assert torch.equal(seed, torch.random.get_rng_state()) and layer.training


def test_the_guide():
    guide = Path(__file__).parents[1] / "docs" / "guides" / "fusion.md"
    code = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 4
    exec(compile("\n".join(code), guide.name, "exec"), {"__name__": "guide"})


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_norms_of_queries_and_keys_go_into_the_rotation(family):
    plain = build(family)
    ids = torch.arange(12).view(2, 6) + 3
    with use(rms_norm_rope="reference"):
        fused = create_unified_attention_fusion(copy.deepcopy(plain), ATTENTION, BALANCED)
        wide = [_gradients(copy.deepcopy(m).double(), ids, labels=ids) for m in (fused, plain)]
        torch.testing.assert_close(*({name: value.float() for name, value in found.items()} for found in wide))
        fused(ids)
        counted = fused.fusion_report.calls()
        assert (counted["rms_norm_rope"], counted.get("rope", 0), counted["rms_norm"]) == (2, 0, 0)
        seen = []
        fused.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(fused(ids).logits, plain(ids).logits)
        assert seen and fused.fusion_report.calls()["rope"] == 1
    assert not any(row.fqn.endswith("layernorm") for row in fused.fusion_report.replaced)


class _Rotates(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)

    seen = staticmethod(lambda x: x)


class _Straight(_Rotates):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k)
        shape = q.shape
        q, k = apply_rotary(q, k, cos, sin)
        return q.view(shape), k


class _Split(_Rotates):
    def forward(self, q, k, cos, sin, shape):
        q, k = self.q_norm(q + 1), self.k_norm(k)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q.view(shape).transpose(1, 2)
        k = k.view(2, -1, 2, 4).transpose(1, 2)
        return apply_rotary(q, k, cos, sin)


class _SplitOnce(_Rotates):
    def forward(self, q, k, cos, sin, shape):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q.view(shape).transpose(1, 2)
        return apply_rotary(q, k, cos, sin)


class _Seen(_Rotates):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q)
        kept = q + 1
        k = self.k_norm(k)
        q, k = apply_rotary(q, k, cos, sin)
        return q + kept, k


class _Branched(_Rotates):
    def forward(self, q, k, cos, sin):
        q = self.q_norm(q)
        if cos is not None:
            q = q * 2
        k = self.k_norm(k)
        return apply_rotary(q, k, cos, sin)


def apply_rotary(q, k, cos, sin):
    return q * cos, k * sin


@pytest.mark.parametrize(
    ("kind", "taken"), [(_Straight, True), (_Split, True), (_SplitOnce, False), (_Seen, False), (_Branched, False)]
)
def test_norms_that_others_see_stay_where_they_are(kind, taken):
    tree = parse(kind.forward)
    before = ast.unparse(tree)
    found = deferred(tree, ("q_norm", "k_norm"), ("apply_rotary",))
    assert [spec.norms for spec in found] == [("q_norm", "k_norm")] * taken
    assert taken or ast.unparse(tree) == before
    assert not taken or (found[0].transposed, found[0].rows) == ((kind is _Straight, False), kind is _Split)
    assert not taken or ast.unparse(tree).count("self.q_norm") == before.count("self.q_norm") - 1


def test_packed_models_in_other_hands(tmp_path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    ids = torch.arange(12).view(2, 6) + 3
    plain = build("llama")
    fused = create_unified_attention_fusion(copy.deepcopy(plain), FULL, AGGRESSIVE)
    fused.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        torch.testing.assert_close(loaded(ids).logits, plain.eval()(ids).logits)
        compiled = torch.compile(fused.eval(), backend="eager")
        torch.testing.assert_close(compiled(ids).logits, plain(ids).logits)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    found = []
    for model in (fused, plain):
        torch.manual_seed(0)
        found.append(_gradients(peft.get_peft_model(model, config).train(), ids, labels=ids))
    torch.testing.assert_close(*found)
