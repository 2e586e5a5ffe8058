"""Experts beyond the generic harness: models of transformers, routers, the index of pairs, plans, layers, mistakes."""

import dataclasses
import types

import pytest
import torch
from torch import nn as torch_nn

import tilesmith
from devices import DEVICE
from optimize_models import assert_within_budget, batch, build, train
from tilesmith import nn, ops
from tilesmith.engine import ops as ops_of
from tilesmith.engine import use
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.models import optimize, undo
from tilesmith.models.layers import experts as rules
from tilesmith.ops.moe import plan, schedule
from tilesmith.precision import FP8Config, convert_model_to_fp8

MODELS = {
    "mixtral": "computes experts (swiglu)",
    "qwen3_moe": "computes experts (swiglu)",
    "deepseek_v3": "computes experts (swiglu)",
    "gpt_oss": "computes experts (swiglu, limit 7, alpha 1.702, up_offset 1, interleaved, transposed)",
}


@pytest.fixture
def served():
    """The op runs on a CPU too, by its reference."""
    with use(experts="reference"):
        yield


def rows(model):
    return [row for row in model.tilesmith_report.rows if row.rule == "experts"]


# models -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("family", MODELS)
def test_a_model_trains_as_before_and_undo_is_exact(family):
    inputs, model = batch(family), build(family)
    oracle, before = train(build(family).double(), inputs), train(model, inputs)
    optimize(model, only="experts")
    assert {(row.action, row.reason) for row in rows(model)} == {("replaced", MODELS[family])}
    assert_within_budget(train(model, inputs), before, oracle)
    assert model.tilesmith_report.calls()["experts"] == len(rows(model))
    undo(model)
    loss, logits, gradients = train(model, inputs)
    assert torch.equal(loss, before[0]) and torch.equal(logits, before[1])
    assert all(torch.equal(gradients[n], g) for n, g in before[2].items())


@pytest.mark.usefixtures("served")
def test_transformers_calls_the_op_under_its_name():
    tilesmith.register_for_transformers()
    inputs, model = batch("qwen3_moe"), build("qwen3_moe")
    oracle, before = train(build("qwen3_moe").double(), inputs), train(model, inputs)
    model.set_experts_implementation("tilesmith")
    assert_within_budget(train(model, inputs), before, oracle)
    layer = build("qwen3_moe").model.layers[0].mlp
    layer.experts.config._experts_implementation = "tilesmith"
    x = torch.randn(2, 5, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)  # what it computes is learnt while tracing
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.usefixtures("served")
def test_a_model_that_was_never_called_is_exported_under_the_name():
    tilesmith.register_for_transformers()
    model, tokens = build("qwen3_moe").eval(), batch("qwen3_moe")["input_ids"]
    model.set_experts_implementation("tilesmith")
    inputs, length = {"input_ids": tokens, "use_cache": False}, torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        model, (), inputs, dynamic_shapes={"input_ids": {1: length}, "use_cache": None}, strict=False
    )
    longer = tokens.repeat(1, 2)
    with torch.no_grad():
        found, wanted = (m(input_ids=longer, use_cache=False).logits for m in (program.module(), model))
    torch.testing.assert_close(found, wanted)


def test_without_a_kernel_the_model_s_own_products_run(monkeypatch):
    monkeypatch.setattr(rules, "reaches", lambda op, x: False)
    tilesmith.register_for_transformers()
    model, x = build("qwen3_moe"), batch("qwen3_moe")["input_ids"]
    model.set_experts_implementation("grouped_mm")
    wanted = model(x).logits
    model.set_experts_implementation("tilesmith")
    assert torch.equal(model(x).logits, wanted)
    assert torch.equal(optimize(model, only="experts")(x).logits, wanted)


def changed(**methods):
    """The experts of a small Qwen3 model whose class differs."""
    found = build("qwen3_moe", layers=1).model.layers[0].mlp.experts
    found.__class__ = type("OtherExperts", (type(found),), methods)
    return found


def halved(self, hidden_states, top_k_index, top_k_weights):
    return 0.5 * super(type(self), self).forward(hidden_states, top_k_index, top_k_weights)


def test_experts_that_look_alike_stay():
    normed = changed()
    normed.has_post_expert_norm = True
    for module, reason in (
        (changed(forward=halved), "on small inputs it differs from"),
        (normed, "it normalises what each expert gives"),
    ):
        (row,) = rows(optimize(torch_nn.Sequential(module), only="experts"))
        assert row.action == "skipped" and reason in row.reason
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = types.SimpleNamespace(num_local_experts=4, intermediate_size=8, hidden_size=16, hidden_act="silu")
    (row,) = rows(optimize(torch_nn.Sequential(llama4.Llama4TextExperts(config)), only="experts"))
    assert row.reason == "its forward takes (hidden_states), not tokens, experts and their weights"
    spread = changed()
    spread._is_expert_parallel = True  # as transformers marks them
    (row,) = rows(optimize(torch_nn.Sequential(spread), only="experts"))
    assert row.action == "skipped" and "experts_implementation='tilesmith'" in row.reason
    chosen = build("qwen3_moe")
    chosen.config._experts_implementation = "deepgemm"
    assert all(row.reason == "its experts were set to deepgemm" for row in rows(optimize(chosen, only="experts")))
    tilesmith.register_for_transformers()
    with pytest.raises(ValueError, match="'tilesmith' does not serve OtherExperts.*choose 'grouped_mm'"):
        rules.experts_forward(changed(forward=halved), torch.randn(3, 64), torch.zeros(3, 1).long(), torch.ones(3, 1))


def zeros_pass(self, hidden_states, top_k_index, top_k_weights):
    """As the class, and what chooses no expert of it passes on (the zero-computation experts of LongCat-Flash)."""
    passes = top_k_index >= self.num_experts
    found = super(type(self), self).forward(
        hidden_states, top_k_index.clamp(max=self.num_experts - 1), top_k_weights.masked_fill(passes, 0)
    )
    return found + hidden_states * (top_k_weights * passes).sum(-1, keepdim=True)


def test_experts_that_pass_tokens_on_stay():
    (row,) = rows(optimize(torch_nn.Sequential(changed(forward=zeros_pass)), only="experts"))
    assert row.action == "skipped" and "an index beyond the last expert" in row.reason
    longcat = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    config = types.SimpleNamespace(
        expert_ffn_hidden_size=8, hidden_size=16, n_routed_experts=4, zero_expert_num=3, hidden_act="silu"
    )
    model = torch_nn.Sequential(longcat.LongcatFlashExperts(config))
    (row,) = rows(optimize(model, only="experts"))
    assert row.action == "skipped" and row.reason == "its gate_up_proj has 7 experts and its down_proj 4"


@pytest.mark.parametrize("training", [False, True])
def test_experts_that_drop_elements_in_training_stay(training):
    plain = type(changed()).forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return torch_nn.functional.dropout(plain(self, hidden_states, top_k_index, top_k_weights), 0.5, self.training)

    (row,) = rows(optimize(torch_nn.Sequential(changed(forward=forward)).train(training), only="experts"))
    assert row.action == "skipped"
    assert ("on small inputs it differs" if training else "it computes something else in training") in row.reason


@pytest.mark.usefixtures("served")
def test_a_call_that_says_more_is_the_model_s_own():
    plain = type(changed()).forward

    def forward(self, hidden_states, top_k_index, top_k_weights, factor=1):
        return factor * plain(self, hidden_states, top_k_index, top_k_weights)

    module = changed(forward=forward)
    call = torch.randn(3, 64), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    optimize(torch_nn.Sequential(module), only="experts")
    torch.testing.assert_close(module(*call, 2.0), 2 * module(*call))
    torch.testing.assert_close(module(*call, factor=2.0), 2 * module(*call))


def test_experts_of_two_dtypes_are_left_to_the_model():
    def served(module):
        x = torch.randn(2, 64)
        return rules._served(rules.experts_of(module, x, x, x, rules.recognise(module)))

    module = build("qwen3_moe", layers=1).model.layers[0].mlp.experts.bfloat16()
    biased = build("gpt_oss", layers=1).model.layers[0].mlp.experts
    biased.down_proj_bias.data = biased.down_proj_bias.data.double()
    with use(experts="reference"):
        assert not served(module) and not served(biased)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert served(module)


class Squared(torch_nn.Module):
    """An activation that the op does not have."""

    def forward(self, x):
        return x * x


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("asked", ["optimize", "register"])
def test_an_activation_that_is_watched_or_replaced_later_is_called(asked):
    model, inputs = build("qwen3_moe", layers=1), batch("qwen3_moe")
    plain = build("qwen3_moe", layers=1)
    if asked == "optimize":
        optimize(model, only="experts")
    else:
        tilesmith.register_for_transformers()
        model.set_experts_implementation("tilesmith")
    torch.testing.assert_close(train(model, inputs)[0], train(plain, inputs)[0])
    hooks = [
        m.model.layers[0].mlp.experts.act_fn.register_forward_hook(lambda module, given, y: y * 2)
        for m in (model, plain)
    ]
    torch.testing.assert_close(train(model, inputs)[0], train(plain, inputs)[0])
    for hook in hooks:
        hook.remove()
    for m in (model, plain):
        m.model.layers[0].mlp.experts.act_fn = Squared()
    if asked == "optimize":
        torch.testing.assert_close(train(model, inputs)[0], train(plain, inputs)[0])
    else:
        with pytest.raises(ValueError, match="does not serve Qwen3MoeExperts.*choose 'grouped_mm'"):
            model(**inputs)


def layer(model):
    """The experts of the first layer."""
    return model.model.layers[0].mlp.experts


def tokens(count=7, scale=3.0):
    """Arguments of experts of 64 features, of which there are four."""
    generator = torch.Generator().manual_seed(3)
    x = scale * torch.randn(count, 64, generator=generator)
    return x, torch.randint(4, (count, 2), generator=generator), torch.rand(count, 2, generator=generator)


@pytest.mark.usefixtures("served")
def test_what_experts_return_may_be_added_to():
    (x, indices, weights), found = tokens(), []
    for module in (build("mixtral", layers=1), optimize(build("mixtral", layers=1), only="experts")):
        y = layer(module)(x.requires_grad_(), indices, weights)
        y += x
        found.append(torch.autograd.grad(y.square().sum(), [x, *layer(module).parameters()]))
    torch.testing.assert_close(*found)


def capacity(self, hidden_states, top_k_index, top_k_weights):
    """As the class, without the tokens that come when an expert has its share of all twice over."""
    one = torch_nn.functional.one_hot(top_k_index.flatten(), self.num_experts)
    place = (one.cumsum(0) * one).sum(-1).view_as(top_k_index)
    late = place > 2 * top_k_index.numel() // self.num_experts
    return super(type(self), self).forward(hidden_states, top_k_index, top_k_weights.masked_fill(late, 0))


def null(self, hidden_states, top_k_index, top_k_weights):
    """As the class, but that the last expert gives nothing."""
    weights = top_k_weights.masked_fill(top_k_index == self.num_experts - 1, 0)
    return super(type(self), self).forward(hidden_states, top_k_index, weights)


def test_experts_that_treat_some_tokens_or_experts_otherwise_stay():
    (row,) = rows(optimize(torch_nn.Sequential(changed(forward=capacity)), only="experts"))
    assert row.action == "skipped" and row.reason == "it computes something else where most tokens choose one expert"
    module = changed(forward=null)
    module.num_experts = 32
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, torch_nn.Parameter(torch.randn(32, *getattr(module, name).shape[1:])))
    (row,) = rows(optimize(torch_nn.Sequential(module), only="experts"))
    assert row.action == "skipped" and "on small inputs it differs" in row.reason


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("eight", [False, True])
def test_tokens_in_rows_with_experts_in_a_list_are_the_module_s_own(eight):
    plain = type(changed()).forward

    def flat(self, hidden_states, top_k_index, top_k_weights):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return plain(self, rows, top_k_index, top_k_weights).reshape(hidden_states.shape)

    module, (x, indices, weights) = changed(forward=flat), tokens(6)
    wanted = module(x.view(2, 3, 64), indices, weights)
    model = optimize(torch_nn.Sequential(module), only="experts")
    torch.testing.assert_close(module(x, indices, weights), wanted.view(6, 64))
    if eight:
        convert_model_to_fp8(model, FP8Config(min_features=16, min_tokens=1))
        assert not torch.equal(module(x, indices, weights), wanted.view(6, 64))
    assert torch.equal(module(x.view(2, 3, 64), indices, weights), wanted)


class Packed(torch.Tensor):
    """A weight of one byte a number, as torchao wraps them."""

    @staticmethod
    def __new__(cls, codes, factor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=factor.dtype)

    def __init__(self, codes, factor):
        self.codes, self.factor = codes, factor

    def __tensor_flatten__(self):
        return ["codes", "factor"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Packed(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes, args[0].factor)
        assert function.namespace == "aten", f"{function} does not know a packed weight"
        unpacked = (a.codes * a.factor if isinstance(a, cls) else a for a in args)
        return function(*unpacked, **(kwargs or {}))


def packed(experts):
    for name in ("gate_up_proj", "down_proj"):
        weight = experts._parameters[name].detach()
        factor = weight.abs().max() / 127
        experts._parameters[name] = torch_nn.Parameter(Packed((weight / factor).round().char(), factor), False)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("later", [False, True])
def test_experts_whose_weights_wrap_packed_ones_stay(later):
    model, plain, call = build("qwen3_moe", layers=1), build("qwen3_moe", layers=1), tokens()
    if later:
        optimize(model, only="experts")
    for one in (model, plain):
        packed(layer(one))
    if not later:
        (row,) = rows(optimize(model, only="experts"))
        assert row.action == "skipped"
        assert row.reason == "its gate_up_proj is quantised (Packed); quantised experts are not supported"
    assert torch.equal(layer(model)(*call), layer(plain)(*call))


def test_weights_of_8_bits_are_told_from_others():
    module = build("qwen3_moe", layers=1).model.layers[0].mlp.experts.to(torch.float8_e4m3fn)
    (row,) = rows(optimize(torch_nn.Sequential(module), only="experts"))
    assert row.action == "skipped"
    assert row.reason == "its gate_up_proj is quantised (torch.float8_e4m3fn); quantised experts are not supported"


def functional(model):
    for one in model.model.layers:
        del one.mlp.experts.act_fn
        one.mlp.experts.act_fn = torch_nn.functional.silu
    return model


CHANGES = {
    "limit": ("gpt_oss", lambda experts: setattr(experts, "limit", 0.5)),
    "alpha": ("gpt_oss", lambda experts: setattr(experts, "alpha", 1.1)),
    "function": ("mixtral", lambda experts: setattr(experts, "act_fn", torch_nn.functional.gelu)),
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("asked", ["optimize", "register"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_of_experts_that_is_changed_later_counts(change, asked):
    family, apply = CHANGES[change]
    model, plain = (build(family, layers=1) for _ in range(2))
    if change == "function":
        model, plain = functional(model), functional(plain)
    if asked == "optimize":
        optimize(model, only="experts")
    else:
        tilesmith.register_for_transformers()
        model.set_experts_implementation("tilesmith")
    call = tokens()
    before = layer(model)(*call)
    torch.testing.assert_close(before, layer(plain)(*call))
    for one in (model, plain):
        apply(layer(one))
    assert not torch.allclose(layer(plain)(*call), before)
    torch.testing.assert_close(layer(model)(*call), layer(plain)(*call))


@pytest.mark.usefixtures("served")
def test_other_experts_that_are_asked_for_later_are_called(monkeypatch):
    integration = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setitem(integration.ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", lambda module, x, *_: 2 * x)
    model, call = optimize(build("qwen3_moe", layers=1), only="experts"), tokens()
    model.config._experts_implementation = "mine"
    assert torch.equal(layer(model)(*call), 2 * call[0])


@pytest.mark.usefixtures("served")
def test_layers_of_one_class_with_other_settings_are_told_apart():
    model, plain = (build("mixtral") for _ in range(2))
    for one in (model, plain):
        for layers, approximate in zip(one.model.layers, ("tanh", "none")):
            layers.mlp.experts.act_fn = torch_nn.GELU(approximate)
    optimize(model, only="experts")
    assert [row.reason for row in rows(model)] == ["computes experts (geglu)", "computes experts (geglu_erf)"]
    call = tokens(scale=10.0)
    for ours, theirs in zip(model.model.layers, plain.model.layers):
        torch.testing.assert_close(ours.mlp.experts(*call), theirs.mlp.experts(*call), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("asked", ["optimize", "register", "fp8"])
def test_under_autocast_experts_return_the_dtype_of_their_tokens(asked):
    model, call = build("qwen3_moe", layers=1), tokens()
    if asked == "register":
        tilesmith.register_for_transformers()
        model.set_experts_implementation("tilesmith")
    else:
        optimize(model, only="experts")
    if asked == "fp8":
        convert_model_to_fp8(model, FP8Config(min_features=16, min_tokens=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = layer(model)(*call), layer(build("qwen3_moe", layers=1))(*call)
    assert found.dtype is wanted.dtype is torch.float32
    assert (found - wanted).abs().max() <= (0.2 if asked == "fp8" else 0.02) * wanted.abs().max()


# routing ----------------------------------------------------------------------------------------------------------


def test_a_router_chooses_as_deepseek_s():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    theirs = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    ours = nn.Router(16, 16, 4, scores="sigmoid", scale=2.5, groups=4, kept_groups=2, corrected=True)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.e_score_correction_bias.normal_(std=0.1)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(64, 16)
    weights, indices, logits = ours(x)
    wanted_logits, wanted_weights, wanted = theirs(x)
    torch.testing.assert_close(logits, wanted_logits)
    order, wanted_order = indices.argsort(-1), wanted.argsort(-1)
    assert torch.equal(indices.gather(-1, order), wanted.gather(-1, wanted_order))
    torch.testing.assert_close(weights.gather(-1, order), wanted_weights.gather(-1, wanted_order))


def test_a_router_chooses_as_deepseek_v2_s():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV2Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.5,
        topk_method="group_limited_greedy", num_attention_heads=4,
    )  # fmt: skip
    theirs = transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    ours = nn.Router(16, 16, 4, normalise=False, scale=1.5, groups=4, kept_groups=2, group_score="max")
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(64, 16)
    weights, indices, _ = ours(x)
    _, wanted_weights, wanted = theirs(x)
    order, wanted_order = indices.argsort(-1), wanted.argsort(-1)
    assert torch.equal(indices.gather(-1, order), wanted.gather(-1, wanted_order))
    torch.testing.assert_close(weights.gather(-1, order), wanted_weights.gather(-1, wanted_order))
    with pytest.raises(ValueError, match="Router: group_score must be one of 'top2', 'max', got 'sum'"):
        nn.Router(16, 16, 4, group_score="sum")


def test_the_balance_is_that_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = torch.randn(40, 8)
    _, indices = ops.route(logits, 3)
    balance, z = ops.router_losses(logits, indices)
    torch.testing.assert_close(balance, mixtral.load_balancing_loss_func((logits,), 8, 3))
    torch.testing.assert_close(z, logits.logsumexp(-1).square().mean())
    even = torch.zeros(8, 8), torch.arange(24).view(8, 3) % 8
    assert ops.router_losses(*even)[0] == 3


def test_scores_that_are_all_tiny_still_have_shares():
    logits = torch.full((5, 4), -200.0) + torch.randn(5, 4)
    logits.requires_grad_()
    indices = torch.randint(4, (5, 2))
    wide = logits.detach().double().requires_grad_()
    balance, wanted = (ops.router_losses(x, indices, "sigmoid")[0] for x in (logits, wide))
    torch.testing.assert_close(balance.double(), wanted)
    balance.backward()
    wanted.backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad)


@pytest.fixture(params=["reference", "triton"])
def router(request):
    """Routing is by this kernel."""
    if request.param == "triton":
        request.getfixturevalue("needs_triton")
    with use(route=request.param):
        yield


@pytest.mark.usefixtures("router")
def test_what_is_not_a_number_is_chosen_and_stays_one():
    logits = torch.randn(3, 8, device=DEVICE)
    logits[1, 4] = torch.nan
    weights, indices = ops.route(logits, 2)
    assert weights[1].isnan().all() and weights[[0, 2]].isfinite().all()
    assert indices[1, 0] == 4 and ((indices >= 0) & (indices < 8)).all()
    logits[2, 1] = logits[2, 7] = torch.inf  # which is less than no number, and of two the first comes before
    logits[2, 5] = -torch.tensor(torch.nan)
    weights, indices = ops.route(logits, 3, scores="sigmoid", normalise=False)
    assert indices[2].tolist() == [5, 1, 7] and weights[2, 0].isnan() and weights[2, 1:].tolist() == [1, 1]


@pytest.mark.usefixtures("router")
def test_of_equal_scores_the_first_are_chosen():
    logits = torch.tensor([0.0, -0.0, 1.0, -0.0], device=DEVICE)
    assert ops.route(logits, 3)[1].tolist() == [2, 0, 1]
    for scores in ("softmax", "sigmoid"):
        assert ops.route(torch.zeros(2, 9, device=DEVICE), 4, scores=scores)[1].tolist() == [[0, 1, 2, 3]] * 2
    assert ops.route(torch.zeros(8, device=DEVICE), 2, groups=4, kept_groups=1)[1].tolist() == [0, 1]
    saturated = torch.tensor([30.0, 20.0, 40.0, 50.0], device=DEVICE)  # sigmoids of 1 in fp32, in an order nonetheless
    for groups in (1, 2):
        assert ops.route(saturated, 2, scores="sigmoid", groups=groups, kept_groups=groups)[1].tolist() == [3, 2]


# kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_a_clamp_passes_no_gradient_to_what_is_no_number(kernel, request):
    """As torch.clamp does, so that a kernel and its reference agree on which tokens are hit."""
    if kernel == "triton":
        request.getfixturevalue("needs_triton")
    x, gate_up, down = (torch.randn(*shape, device=DEVICE) for shape in ((5, 8), (2, 12, 8), (2, 8, 6)))
    x[3, 0] = torch.nan
    indices, gradients = torch.zeros(5, 1, dtype=torch.int64, device=DEVICE), []
    for call in (
        lambda t: ops.experts(t, gate_up, down, indices, torch.ones(5, 1, device=DEVICE), limit=0.5),
        lambda t: torch.stack([down[0] @ clamped(*(gate_up[0] @ row).chunk(2)) for row in t]),
    ):
        leaf = x.clone().requires_grad_()
        with use(experts=kernel):
            call(leaf).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def clamped(gate, up):
    return torch_nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)


@pytest.mark.usefixtures("needs_triton")
def test_pairs_are_grouped_as_a_stable_sort_does():
    from tilesmith.ops.moe.index import group

    for shape, experts, block_m in (
        ((1, 1), 1, 16),
        ((21, 3), 5, 16),
        ((12, 10), 200, 16),
        ((70, 3), 5, 16),
        ((33, 10), 130, 32),
    ):
        indices = torch.randint(-1, experts + 1, shape, device=DEVICE)
        found = group(indices, experts, block_m)
        flat = torch.where((indices < 0) | (indices >= experts), experts, indices).view(-1)
        assert torch.equal(found.order.long(), flat.argsort(stable=True))
        sizes = torch.bincount(flat, minlength=experts + 1)
        assert torch.equal(found.starts.long(), sizes.cumsum(0) - sizes)
        starts, tiles = found.starts.tolist(), []
        for e, size in enumerate(sizes.tolist()):
            tiles += [(e, starts[e] + first) for first in range(0, size, block_m)]
        listed = list(zip(found.tile_expert.tolist(), found.tile_row.tolist()))
        assert listed[: len(tiles)] == tiles
        assert all(e == experts and row >= indices.numel() for e, row in listed[len(tiles) :])


def test_there_are_always_enough_tiles():
    for sizes in ([1] * 7, [0, 130, 0], [128, 128], [127, 129, 1], [5, 0, 0, 64]):
        for height in (16, 32, 64, 128):
            needed = sum(-(-size // height) for size in sizes)
            assert plan.most_tiles(sum(sizes), len(sizes), height) >= needed
    assert plan.most_tiles(8192 * 8, 128, 128) <= 8192 * 8 // 128 + 129


@pytest.mark.parametrize("name", ["sm80", "sm90", "gfx942"])
def test_plans_fit_shared_memory_and_follow_the_pairs_of_an_expert(name):
    arch, heights = arch_named(name), []
    for tokens in (1, 16, 512, 8192, 32768):
        sizes = plan.dims(tokens * 8, 128, 2048, 768)
        config, back = plan.forward(sizes, arch, torch.bfloat16), plan.backward(sizes, arch, torch.bfloat16)
        for which, wide in ((config, max(config.block_n, config.down_n)), (back, max(back.block_n, back.rows_n))):
            stages = which.num_stages if arch.kind == "cuda" else 1
            assert 2 * stages * which.block_k * (which.block_m + wide) <= arch.shared_memory
        heights.append(config.block_m)
    assert heights == sorted(heights) and heights[0] == 16 and heights[-1] == 128


def test_hopper_s_tiles_come_once_and_cover_all():
    for tiles, tiles_n, group in ((1, 1, 8), (7, 3, 8), (16, 6, 8), (19, 5, 4), (640, 16, 8), (33, 2, 16)):
        found = [plan.grouped_tile(n, tiles, tiles_n, group) for n in range(tiles * tiles_n)]
        assert sorted(found) == [(m, n) for m in range(tiles) for n in range(tiles_n)]
    for experts, height, width, cols in ((3, 1536, 2048, 256), (2, 200, 72, 128), (1, 8, 8, 256), (5, 768, 2048, 128)):
        tiles_m, tiles_n = -(-height // plan.HOPPER_ROWS), -(-width // cols)
        found = [plan.weight_tile(n, tiles_m, tiles_n, cols) for n in range(experts * tiles_m * tiles_n)]
        every = [(e, m, n) for e in range(experts) for m in range(0, height, 128) for n in range(0, width, cols)]
        assert sorted(found) == every


def test_a_ragged_tile_lies_where_its_expert_does():
    """TMA multiplies coordinates by strides modulo 2**64 and compares them with the sizes of dims."""
    pytest.importorskip("triton")
    from tilesmith.ops.moe.hopper import tiles

    far, x = tiles.FAR.value, torch.empty(300, 80, dtype=torch.bfloat16)
    for parts in (1, 2):
        desc = tiles.rows_of(x, 64, 64, parts)
        for first, end, row in ((0, 300, 0), (17, 150, 64), (17, 150, 128), (299, 300, 0), (40, 41, 64)):
            corner = (
                [far, end, far - (end - first) + row, 8] if parts == 1 else [far, end, 1, far - (end - first) + row, 8]
            )
            address = sum(2 * s * c for s, c in zip(desc.strides, corner)) % 2**64
            wanted = 2 * ((first + row) * 80 + 8 + (40 if parts == 2 else 0))
            assert address == wanted
            assert (
                all(c < n for c, n in zip(corner[:2], desc.shape)) and desc.shape[-2] - corner[-2] == end - first - row
            )
        assert all(2 * s % 16 == 0 and 2 * s < 2**40 for s in desc.strides[:-1]) and max(desc.shape) < 2**32
        assert desc.shape[-1] * parts == 80


def test_a_product_s_predicted_time_grows_with_what_it_must_do():
    product, rates = schedule.Product(1024, 2048), schedule.Rates()
    for rows in (*plan.HOPPER_HEIGHTS, 64):
        found = [schedule.product_time(product, rows, pairs, 128, rates) for pairs in (0, 100, 2000, 20000, 200000)]
        assert found == sorted(found) and found[0] == 0
        slow = rates._replace(flops=rates.flops / 4, l2=rates.l2 / 4, memory=rates.memory / 4)
        assert schedule.product_time(product, rows, 20000, 128, slow) > 2 * found[3]
    assert sum(schedule.spread(81920, 512)) / schedule.QUANTILES == pytest.approx(160, abs=0.5)
    assert schedule.spread(7, 1) == [7] * schedule.QUANTILES
    assert schedule.distinct(1, 8, 128) == pytest.approx(8) and schedule.distinct(10_000, 8, 128) == pytest.approx(128)


def test_a_tile_holds_the_pairs_of_an_expert_where_that_saves_reading_its_weights():
    arch = arch_named("sm90")

    def consumers(tokens, experts, top_k, inner):
        sizes = plan.dims(tokens * top_k, experts, 2048, inner)
        forward = plan.hopper_forward(sizes, arch, torch.bfloat16).consumers
        return forward, plan.hopper_backward(sizes, arch, torch.bfloat16).rows_consumers

    assert consumers(8192, 512, 10, 512) == (3, 3)  # 160 pairs an expert: one tile of 192, two of 128
    assert consumers(2560, 128, 8, 768) == (3, 3)
    assert consumers(4096, 512, 10, 512) == (2, 2)  # 80: one tile of either
    assert consumers(32768, 128, 8, 768) == (2, 2)  # 2048: bound by WGMMA


def test_a_taller_tile_is_chosen_only_by_more_than_the_model_may_be_off():
    assert plan.schedule.height({128: 1.0, 192: 0.95}, 0.1) == 128
    assert plan.schedule.height({128: 1.0, 192: 0.85}, 0.1) == 192
    assert plan.schedule.height({128: 1.0, 192: 1.2}, 0.1) == 128


def few(
    tokens, top_k, experts=128, hidden=2048, inner=768, by_features=(True, True), adapted=False, dtype=torch.bfloat16
):
    sizes = plan.dims(tokens * top_k, experts, hidden, inner)
    return plan.few(sizes, top_k, arch_named("sm90"), dtype, adapted, by_features)


def test_few_pairs_are_served_without_an_index():
    assert few(0, 8) is None and few(17, 8) is None and few(2, 17) is None
    assert few(1, 8, adapted=True) is None and few(1, 8, dtype=torch.float32) is None
    assert few(33, 1, experts=2) is None  # three tiles of 16 would read all weights three times
    for tokens in (1, 4, 16):
        for top_k, experts, hidden, inner in ((8, 128, 2048, 768), (4, 32, 2880, 2880)):
            config = few(tokens, top_k, experts, hidden, inner)
            assert 2 * config.num_stages * config.block_k * (16 + config.block_n) <= 232_448
            for tile, rows in ((config.up, 2), (config.down, 1 << (top_k - 1).bit_length())):
                direct = 0 if tile is None else rows * tile.block_n * tile.block_k
                assert direct <= 64 * 128, "sums that a thread keeps"
                assert not direct or 2 * tile.num_stages * direct <= 232_448 // 2
    assert few(1, 8).down and few(16, 8).down
    assert not few(16, 4, 32, 2880, 2880).down  # tokens share experts: their weights are read together
    assert few(4, 4, 32, 2880, 2880).down and not few(1, 4, 32, 2880, 2880).down  # 45 steps take longer than one expert
    assert few(1, 8).up and few(1, 4, 32, 2880, 2880).up and not few(2, 8).up
    assert not few(1, 8, by_features=(True, False)).down and not few(1, 8, by_features=(False, True)).up


@pytest.mark.usefixtures("needs_triton")
def test_explain_says_how_few_pairs_are_served():
    from tilesmith.ops.moe.triton import launch

    x, gate_up, down = torch.ones(3, 16), torch.ones(4, 16, 16), torch.ones(4, 16, 8)
    for k, columns, words in ((2, down, "one launch"), (2, down.mT.contiguous().mT, "two launches")):
        indices = torch.zeros(3, k, dtype=torch.int64)
        call = ops_of()["experts"].bind((x, gate_up, columns, indices, indices.float()), {})
        told = launch._tells_forward(*call, config=None)
        assert "6 pairs need no index" in told[0] and words in told[1]
        call = [t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in call]
        with assuming(arch_named("sm90")):
            assert "need no index" in launch._tells_forward(*call, config=None)[0]


@pytest.mark.usefixtures("needs_triton")
def test_every_pair_is_in_one_tile_of_any_height():
    from tilesmith.ops.moe.index import group, tiled

    for shape, experts, block_m in (((21, 3), 5, 16), ((200, 3), 2, 192), ((33, 10), 130, 32)):
        indices = torch.randint(-1, experts + 1, shape, device=DEVICE)
        found = tiled(group(indices, experts, 128), experts, block_m)
        starts, covered = found.starts.tolist(), []
        for e, row in zip(found.tile_expert.tolist(), found.tile_row.tolist()):
            if e == experts:
                assert row >= starts[experts]
            else:
                assert starts[e] <= row < starts[e + 1]
                covered += range(row, min(row + block_m, starts[e + 1]))
        assert covered == list(range(starts[experts]))
        wanted = group(indices, experts, block_m)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], wanted[:3]))


def test_hopper_s_stages_fit_shared_memory():
    arch = arch_named("sm90")
    assert arch.shared_memory == plan.LARGEST_SHARED_MEMORY
    sizes = plan.dims(8192 * 10, 512, 2048, 512)
    config, back = (f(sizes, arch, torch.bfloat16) for f in (plan.hopper_forward, plan.hopper_backward))
    for stages, consumers in ((config.num_stages, config.consumers), (back.rows_stages, back.rows_consumers)):
        assert consumers == 3 and plan.hopper_shared_memory(plan.HOPPER_COLS, stages, 3) <= arch.shared_memory
    fit = plan.hopper_fit(config._replace(consumers=4, num_stages=4), sizes, arch, torch.bfloat16)
    assert (fit.consumers, fit.num_stages) == (3, 3)
    sizes = plan.dims(8192 * 8, 128, 2048, 768)
    config, back = (f(sizes, arch, torch.bfloat16) for f in (plan.hopper_forward, plan.hopper_backward))
    assert plan.hopper_shared_memory(plan.HOPPER_COLS, config.num_stages) <= arch.shared_memory
    assert plan.hopper_shared_memory(back.weight_n, back.weight_stages) <= arch.shared_memory
    for wide, most in ((256, 4), (128, 6)):
        fit = plan.hopper_fit(back._replace(weight_n=wide, weight_stages=9, rows_stages=1), sizes, arch, torch.bfloat16)
        assert (fit.weight_stages, fit.rows_stages) == (most, 2)


def test_hopper_s_kernels_serve_what_they_are_faster_at():
    pytest.importorskip("triton")
    arch = arch_named("sm90")
    for name in ("experts", "experts_vjp"):
        op = ops_of()[name]
        hopper, triton = op.kernel("hopper"), op.kernel("triton")
        assert hopper.rank > triton.rank
    x, gate_up, down = torch.ones(40, 16).bfloat16(), torch.ones(3, 16, 16).bfloat16(), torch.ones(3, 16, 8).bfloat16()
    indices, op = torch.zeros(40, 2, dtype=torch.int64), ops_of()["experts"]

    def reasons(*args, **options):
        call = op._describe(*op.bind(args, options))
        return "; ".join(op.kernel("hopper").rejects(call._replace(arch=arch)))

    assert reasons(x, gate_up, down, indices, indices.float()) == ""
    assert "activation is 'geglu'" in reasons(x, gate_up, down, indices, indices.float(), activation="geglu")
    single = [t.float() for t in (x, gate_up, down)]
    assert "float16 and bfloat16 are supported" in reasons(*single, indices, indices.float())
    few = "experts get 16 pairs or fewer on average: narrow tiles wait less for the weights"
    assert reasons(x[:24], gate_up, down, indices[:24], indices[:24].float()) == few
    assert reasons(x[:25], gate_up, down, indices[:25], indices[:25].float()) == ""
    odd = torch.ones(40, 21).bfloat16(), torch.ones(3, 6, 21).bfloat16(), torch.ones(3, 21, 3).bfloat16()
    assert "x has 21 columns; down has 3 columns" in reasons(*odd, indices, indices.float()).replace(
        "; multiples of 8 are supported", ""
    )


@pytest.mark.usefixtures("needs_triton")
def test_rows_are_gathered_and_summed_where_they_lie():
    """What surrounds Hopper's products: Triton kernels, which Triton's interpreter runs."""
    from tilesmith.ops.moe import steps
    from tilesmith.ops.moe.hopper import launch
    from tilesmith.ops.moe.index import group

    for tokens, top_k, experts, hidden in ((21, 3, 5, 40), (1, 2, 3, 16), (50, 3, 4, 24)):
        indices = torch.randint(-1, experts + 1, (tokens, top_k), device=DEVICE)
        x, scales = torch.randn(tokens, hidden, device=DEVICE), torch.rand(tokens, top_k, device=DEVICE)
        groups = group(indices, experts, 128)
        pre = torch.full((tokens * top_k, 72), torch.nan, device=DEVICE)
        found, place = launch._gathered(x, groups, experts, top_k), launch.places_of(groups, experts, pre)
        count = int(((indices >= 0) & (indices < experts)).sum())
        order = groups.order.long()
        assert torch.equal(found[:count], x[order[:count] // top_k])
        assert pre[:count].isnan().all() and not pre[count:].any()
        assert torch.equal(place[order], torch.arange(tokens * top_k, dtype=torch.int32, device=DEVICE))
        summed = steps.combined(found, indices, scales, x, experts, place)
        there = ((indices >= 0) & (indices < experts)) * scales
        torch.testing.assert_close(summed, there.sum(1, keepdim=True) * x)


def test_no_pre_activation_is_written_where_nobody_asks_for_a_gradient():
    args = [torch.randn(s) for s in ((5, 8), (3, 12, 8), (3, 8, 6))]
    indices, weights = torch.randint(3, (5, 2)), torch.rand(5, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        ops.experts(*(a.requires_grad_() for a in args), indices, weights)
    assert kept.count((10, 12)) == 1  # the pre-activation, once; nothing else has a row for each pair
    assert all(shape in {(5, 8), (3, 12, 8), (3, 8, 6), (5, 2), (10, 12)} for shape in kept)


# layers -----------------------------------------------------------------------------------------------------------

ROUTED = nn.DecoderConfig(
    19, 16, 24, 3, 2, max_positions=32, num_experts=4, expert_size=8, shared_size=12, dense_layers=1
)  # fmt: skip


def test_a_decoder_of_experts_trains_with_its_routers_losses():
    torch.manual_seed(0)
    decoder, tokens = nn.Decoder(ROUTED), torch.randint(19, (2, 12))
    labels = tokens.roll(-1, 1)
    kinds = [type(layer.mlp) for layer in decoder.layers]
    assert kinds == [nn.GatedMLP, nn.MixtureOfExperts, nn.MixtureOfExperts]
    losses = []
    decoder.hidden_states(tokens, losses=losses)
    balance, z = (torch.stack(x).mean() for x in zip(*losses))
    in_training, alone = decoder(tokens, labels), decoder.eval()(tokens, labels)
    torch.testing.assert_close(in_training, alone + 0.01 * balance + 0.001 * z)
    in_training.backward()
    assert all(p.grad is not None and p.grad.any() for p in decoder.parameters())


def test_checkpointed_experts_have_the_same_gradients():
    torch.manual_seed(0)
    layer, x = nn.MixtureOfExperts(16, 8, 4, 2, shared_size=8), torch.randn(3, 5, 16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x).square().sum(), leaves)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.square().sum(), leaves)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_takes_any_number_of_tokens(strict):
    layer = nn.MixtureOfExperts(16, 8, 4, 2, shared_size=8)
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(layer, (torch.randn(5, 16),), dynamic_shapes=({0: tokens},), strict=strict)
    for count in (1, 5, 9):
        x = torch.randn(count, 16)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_layers_refuse_what_does_not_fit():
    for call, words in (
        (lambda: nn.Router(8, 4, 5), "top_k is 5; there are 4 experts"),
        (lambda: nn.Router(8, 4, 2, scores="tanh"), "scores must be one of"),
        (lambda: nn.Experts(8, 4, 0), "num_experts must be at least 1"),
        (lambda: nn.Experts(8, 4, 2, "silu"), "activation must be one of"),
        (lambda: dataclasses.replace(ROUTED, experts_per_token=5), "experts_per_token is 5; there are 4"),
        (lambda: nn.MixtureOfExperts(8, 4, 4, 2, "relu_squared", shared_size=4), "MixtureOfExperts: shared_size is 4"),
        (lambda: dataclasses.replace(ROUTED, dense_layers=3), "dense_layers is 3; of 3 layers none would have experts"),
        (lambda: nn.DecoderConfig(19, 16, 24, 3, 2, shared_size=12), "shared_size is 12 without experts; give num_exp"),
        (lambda: nn.DecoderConfig(19, 16, 24, 3, 2, expert_size=8), "expert_size is 8 without experts; give num_exp"),
        (lambda: nn.DecoderConfig(19, 16, 24, 3, 2, dense_layers=1), "dense_layers is 1 without experts; give num_exp"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.filterwarnings("error")
def test_a_decoder_of_experts_runs_without_memory():
    config = nn.DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, max_positions=32,
        num_experts=4, experts_per_token=2, expert_size=16, shared_size=16,
    )  # fmt: skip
    with torch.device("meta"):
        decoder, text = nn.Decoder(config), torch.zeros(2, 16, dtype=torch.long)
    loss = decoder(text, text)
    assert loss.is_meta and loss.shape == ()
    loss.backward()
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in decoder.parameters())
