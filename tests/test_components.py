"""ComponentValidator and the latency of attention: right layers pass, wrong ones are found, nothing is changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilesmith import attention
from tilesmith import nn as tnn
from tilesmith.core import AttentionLayer, FusedGELU, OptimizedLinear
from tilesmith.utils.compiler_optimization_assistant import benchmark_attention_performance
from tilesmith.utils.validation_framework import ComponentValidator

CPU = torch.device("cpu")
VALIDATOR = ComponentValidator(device=CPU)
RIGHT = {
    "attention": lambda v: v.validate_attention_component(AttentionLayer(32, 4), 32, 4),
    "torch's attention": lambda v: v.validate_attention_component(
        nn.MultiheadAttention(32, 4, batch_first=True), 32, 4
    ),
    "sparse attention": lambda v: v.validate_attention_component(attention.create_sparse_attention(32, 4), 32, 4),
    "linear": lambda v: v.validate_linear_component(OptimizedLinear(16, 24), 16, 24),
    "norm": lambda v: v.validate_norm_component(tnn.RMSNorm(16), 16),
    "mlp": lambda v: v.validate_mlp_component(tnn.GatedMLP(16, 24), 16),
    "activation": lambda v: v.validate_activation_component(FusedGELU()),
    "decoder": lambda v: v.validate_decoder_component(tnn.Decoder(tnn.DecoderConfig(32, 16, 24, 1, 2)), 32),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_right_components_pass(kind):
    torch.manual_seed(0)
    results = RIGHT[kind](VALIDATOR)
    assert results.passed, results
    assert results["forward"].error <= results["forward"].allowed and "ok forward" in str(results)
    assert results.to_dict()["passed"] is True
    with pytest.raises(KeyError, match="there is no check 'speed'; there are runs"):
        results["speed"]


class _Wrong(nn.Linear):
    def __init__(self, fault):
        super().__init__(16, 16)
        self.fault, self.calls = fault, 0

    def forward(self, x):
        self.calls += 1
        out = super().forward(x)
        if self.fault == "forward":
            return out * 1.01
        if self.fault == "gradient of the input":
            return out.detach() + 0 * out
        if self.fault == "finite":
            return out / 0
        if self.fault == "repeats":
            return out + self.calls % 7
        if self.fault == "rows alone":
            return out + x.mean(0)
        if self.fault == "shape":
            return out[..., :8]
        if self.fault == "runs":
            raise KeyError("broken")
        return out


@pytest.mark.parametrize(
    "fault", ["forward", "gradient of the input", "finite", "repeats", "rows alone", "shape", "runs"]
)
def test_faults_are_found(fault):
    results = VALIDATOR.validate_linear_component(_Wrong(fault), 16, 16)
    assert not results.passed and not results[fault].passed, results
    assert f"WRONG {fault}" in str(results)


class _Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.num_heads = function, 4

    def forward(self, x):
        return self.function(x)


OTHERS = {
    "zeros as attention": ("attention", _Returns(lambda x: 0 * x), "attends"),
    "a linear layer as attention": ("attention", nn.Linear(32, 32), "attends"),
    "nothing as norm": ("norm", nn.Identity(), "normalises"),
    "zeros as norm": ("norm", _Returns(lambda x: 0 * x), "normalises"),
    "a scale as norm": ("norm", _Returns(lambda x: 2 * x), "normalises"),
    "nothing as mlp": ("mlp", nn.Identity(), "not linear"),
    "zeros as mlp": ("mlp", _Returns(lambda x: 0 * x), "not linear"),
    "two linear layers as mlp": ("mlp", nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), "not linear"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", OTHERS)
def test_layers_of_another_kind_are_found(case, dtype):
    torch.manual_seed(0)
    kind, layer, check = OTHERS[case]
    more = {"num_heads": 4} if kind == "attention" else {}
    results = getattr(ComponentValidator(CPU, dtype=dtype), f"validate_{kind}_component")(layer, 32, **more)
    assert not results[check].passed and f"WRONG {check}: " in str(results), results


LIKE = {
    "layer norm": ("norm", nn.LayerNorm(32)),
    "layer norm without weights": ("norm", nn.LayerNorm(32, eps=1e-3, elementwise_affine=False)),
    "norm in fp32": ("norm", _Returns(lambda x: (F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)).to(x.dtype))),
    "relu": ("mlp", nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))),
    "odd": ("mlp", nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))),
    "causal": ("attention", attention.create_sparse_attention(32, 4)),
}


@pytest.mark.parametrize("case", LIKE)
def test_layers_of_the_kind_pass(case):
    torch.manual_seed(0)
    kind, layer = LIKE[case]
    more = {"num_heads": 4} if kind == "attention" else {}
    results = getattr(VALIDATOR, f"validate_{kind}_component")(layer, 32, **more)
    assert results.passed, results


def test_results_say_what_a_layer_was_compared_with():
    formula = VALIDATOR.validate_attention_component(AttentionLayer(32, 4), 32, 4)
    itself = VALIDATOR.validate_norm_component(nn.LayerNorm(16), 16)
    assert str(formula).startswith("AttentionLayer: passed, compared with its formula\n")
    assert str(itself).startswith("LayerNorm: passed, compared with itself, computed by the references of all ops\n")
    assert formula.to_dict()["compared_with"] == "its formula" and "itself" in itself.to_dict()["compared_with"]


def test_another_formula_is_found():
    layer = AttentionLayer(32, 4)
    assert VALIDATOR.validate_attention_component(layer, 32, 4)["forward"].passed
    layer.forward = lambda x: AttentionLayer.forward(layer, x, causal=True)
    assert not VALIDATOR.validate_attention_component(layer, 32, 4)["forward"].passed


def test_layers_are_left_as_they_were():
    layer = AttentionLayer(32, 4).train()
    layer.qkv_proj.weight.grad = torch.ones_like(layer.qkv_proj.weight)
    random = torch.random.get_rng_state()
    ComponentValidator(dtype=torch.bfloat16).validate_attention_component(layer, 32, 4)
    benchmark_attention_performance(layer, (2, 8, 32), 2, backward=True)
    assert layer.training and layer.qkv_proj.weight.dtype is torch.float32
    assert torch.equal(layer.qkv_proj.weight.grad, torch.ones_like(layer.qkv_proj.weight))
    assert torch.equal(random, torch.random.get_rng_state())


class _Counts(nn.Module):
    """Writes a buffer and draws a random number at each call."""

    def __init__(self):
        super().__init__()
        self.inner, self.bend = AttentionLayer(32, 4), nn.BatchNorm1d(32)

    def forward(self, x):
        return self.bend(self.inner(x).transpose(1, 2)).transpose(1, 2) + 0 * torch.rand(())


def test_buffers_and_random_numbers_are_left_as_they_were():
    layer = _Counts().train()
    held, random = {name: b.clone() for name, b in layer.named_buffers()}, torch.random.get_rng_state()
    benchmark_attention_performance(layer, (2, 8, 32), 2, backward=True)
    VALIDATOR.validate_attention_component(layer, 32, 4)
    assert all(torch.equal(b, held[name]) for name, b in layer.named_buffers())
    assert torch.equal(random, torch.random.get_rng_state())


def test_an_optimizer_inside_the_backward_is_not_set_off():
    layer = AttentionLayer(32, 4)
    layer.out_proj.weight.register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    with pytest.raises(RuntimeError, match="out_proj.weight has a hook that runs after its gradient is accumulated"):
        benchmark_attention_performance(layer, (2, 8, 32), 2, backward=True)
    assert layer.out_proj.weight.any()
    assert benchmark_attention_performance(layer, (2, 8, 32), 2)["launches"] > 0


def test_attention_whose_first_dim_is_tokens_attends_to_tokens():
    seen, layer = [], nn.MultiheadAttention(32, 4, dropout=0.5)
    assert not layer.batch_first
    results = VALIDATOR.validate_attention_component(layer, 32, 4)
    assert results.passed and results.compared_with == "its formula", results
    layer.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    benchmark_attention_performance(layer, (2, 8, 32), 2, backward=True)
    assert set(seen) == {(8, 2, 32)}


def test_an_output_without_a_sum_is_named():
    layer = _Returns(lambda x: {"hidden": 2 * x})
    assert benchmark_attention_performance(layer, (2, 8, 32), 2)["launches"] > 0
    with pytest.raises(TypeError, match="the model returned a dict; with backward=True it must return a tensor"):
        benchmark_attention_performance(layer, (2, 8, 32), 2, backward=True)


def test_latency_has_its_percentiles():
    found = benchmark_attention_performance(model=AttentionLayer(32, 4), input_shape=(2, 8, 32), num_trials=7)
    order = [found[name] for name in ("min_latency", "p50_latency", "p90_latency", "p99_latency", "max_latency")]
    assert order == sorted(order) and order[0] > 0 and order[0] <= found["avg_latency"] <= order[-1]
    assert found["peak_memory"] >= 2 * 8 * 32 * 4 and found["launches"] > 0 and found["num_trials"] == 7
    assert found["tokens_per_second"] == pytest.approx(16e3 / found["p50_latency"])
    both = benchmark_attention_performance(nn.MultiheadAttention(32, 4, batch_first=True), (2, 8, 32), 2, backward=True)
    assert both["launches"] > found["launches"] * 0.1 and both["backward"]


class _Clamps(nn.Module):
    """Writes to its input where no gradient keeps it from that, with a result that a second call does not change."""

    def forward(self, x):
        return x.clamp_(min=0) if not torch.is_grad_enabled() else x.clamp(min=0)


class _OneDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x.float()).to(x.dtype)


class _NoBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16))

    def forward(self, x):
        return x @ self.weight.t()


def test_a_write_to_the_input_is_found():
    results = VALIDATOR.validate_activation_component(_Clamps())
    assert [check.name for check in results.checks if not check.passed] == ["inputs"]


def test_layers_that_compute_in_one_dtype_have_nothing_to_be_compared_with():
    results = VALIDATOR.validate_mlp_component(_OneDtype(), 16)
    assert not results.passed and "nothing to compare with" in results["float64"].message


def test_linear_layers_need_no_bias_of_that_name():
    assert VALIDATOR.validate_linear_component(_NoBias(), 16, 24).passed


BAD = [
    (
        lambda: VALIDATOR.validate_attention_component(AttentionLayer(32, 4), 32, 5),
        ValueError,
        "does not divide d_model",
    ),
    (lambda: VALIDATOR.validate_attention_component(AttentionLayer(32, 4), 32, 8), ValueError, "the layer has 4"),
    (lambda: VALIDATOR.validate_linear_component("layer", 4, 4), TypeError, "must be a torch.nn.Module, got str"),
    (lambda: VALIDATOR.validate_linear_component(nn.Linear(4, 4, device="meta"), 4, 4), ValueError, "on meta"),
    (lambda: VALIDATOR.validate_norm_component(nn.LayerNorm(4), 0), ValueError, "hidden_size must be at least 1"),
    (lambda: ComponentValidator(dtype=torch.int8), TypeError, "dtype must be a floating torch.dtype"),
    (lambda: ComponentValidator("nowhere"), ValueError, "device must be a torch.device or its name, got 'nowhere'"),
    (
        lambda: ComponentValidator("cuda:77"),
        ValueError,
        "ComponentValidator: device is cuda:77, which is not available",
    ),
    (lambda: ComponentValidator("meta"), ValueError, "device is meta, where tensors have no values"),
    (lambda: benchmark_attention_performance("m", (1, 2, 3)), TypeError, "model must be a torch.nn.Module, got str"),
    (
        lambda: benchmark_attention_performance(nn.Linear(3, 3), (1, 3)),
        ValueError,
        "input_shape must be .batch, tokens",
    ),
    (lambda: benchmark_attention_performance(nn.Linear(3, 3), (1, 0, 3)), ValueError, "tokens must be at least 1"),
    (lambda: benchmark_attention_performance(nn.Linear(3, 3), (1, 2, 3), 0), ValueError, "num_trials must be at least"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_the_guide():
    guide = Path(__file__).parents[1] / "docs" / "guides" / "hardware.md"
    code = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 5
    exec(compile("\n".join(code), guide.name, "exec"), {"__name__": "guide"})


def test_layers_in_fp64_are_allowed_the_rounding_of_fp64():
    """The oracle is no more exact than they are: sums in another order differ."""
    for seed in range(4):
        torch.manual_seed(seed)
        results = VALIDATOR.validate_attention_component(AttentionLayer(16, 4).double(), 16, 4)
        assert results.passed, results


def test_an_activation_that_mixes_features_is_told():
    results = VALIDATOR.validate_activation_component(nn.Softmax(-1))
    assert not results["each element"].passed and results["forward"].passed
    assert VALIDATOR.validate_activation_component(nn.PReLU(64)).passed
