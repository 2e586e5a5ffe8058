"""Stacked experts in 8 bits: layers against those in bf16, conversion and back, the engine, what is refused."""

import copy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilesmith
from devices import DEVICE
from tilesmith import nn, ops
from tilesmith.precision import FP8Config, FP8TrainingEngine, convert_model_to_fp8, revert_model_from_fp8
from tilesmith.precision.experts import FP8Experts
from tilesmith.precision.linear import FP8LinearLayer

SMALL = {"min_features": 16, "min_tokens": 1}
HALF = 2.0**-4  # half a step of e4m3, relative to a number
E, C, I, K = 4, 64, 48, 2


def _model(dtype=torch.float32, activation="swiglu"):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"experts": nn.Experts(C, I, E, activation, device=DEVICE, dtype=dtype)})
    for p in model.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


def _converted(model, **more):
    return convert_model_to_fp8(copy.deepcopy(model), FP8Config(**SMALL, **more))


def _call(tokens=33, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(tokens, C, generator=generator).to(DEVICE, dtype) for _ in range(2))
    indices = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K].to(DEVICE)
    weights = torch.randn(tokens, K, generator=generator).softmax(-1).to(DEVICE)
    return x, indices, weights, dy


def _gradients(model, x, indices, weights, dy):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = model["experts"](x, indices, weights)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def _distance(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("activation", "recipe"), [("swiglu", "delayed"), ("swiglu", "rowwise"), ("geglu", "current")])
def test_experts_are_those_of_their_rounded_operands(dtype, activation, recipe):
    """Three products follow one another, each of two numbers off by half a step at most."""
    plain, call = _model(dtype, activation), _call(dtype=dtype)
    expected, found = _gradients(plain, *call), _gradients(_converted(plain, recipe=recipe), *call)
    for name, value in found.items():
        assert value.dtype is expected[name].dtype
        assert _distance(value, expected[name]) < 3 * HALF, name
    assert not torch.equal(found["y"], expected["y"])


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_tokens_without_a_gradient_take_none_from_others(recipe):
    """The label of a sequence's last token does not count: its gradient is 0 among small ones."""
    plain, (x, indices, weights, dy) = _model(), _call()
    dy *= 1e-5
    dy[::4] = 0.0
    expected = _gradients(plain, x, indices, weights, dy)
    found = _gradients(_converted(plain, recipe=recipe), x, indices, weights, dy)
    for name, value in found.items():
        assert _distance(value, expected[name]) < 3 * HALF, name


def test_numbers_of_8_bits_come_through():
    """One expert, whose activation of relu-like numbers is exact: nothing is rounded but by the last product."""
    w = (torch.randint(-7, 8, (2, 32, 16)) * 2.0**-3).to(DEVICE)
    w8, w8_t, factor = ops.fp8_cast_experts(w)
    assert torch.equal(w8.float() * factor[:, None, None], w) and torch.equal(w8_t, w8.transpose(1, 2).contiguous())
    x = torch.randint(-7, 8, (5, 16)).float().to(DEVICE)
    x8, x_factor = ops.fp8_cast_rows(x)
    indices, weights = torch.ones(5, 1, dtype=torch.int64, device=DEVICE), torch.ones(5, 1, device=DEVICE)
    down = torch.zeros(2, 16, 16, device=DEVICE)
    cast = ops.fp8_cast_experts(down)
    y, pre = ops.experts_fp8(x8, x_factor, w8, factor, cast[0], cast[2], indices, weights, dtype="float32")
    assert torch.equal(pre, x @ w[1].t()) and not y.any()


def test_rows_of_very_different_size():
    """An expert's gradient is that of its large rows, beside which small ones vanish."""
    plain, (x, indices, weights, dy) = _model(), _call()
    x, dy = (t * torch.logspace(-6, 2, len(t)).to(DEVICE)[:, None] for t in (x, dy))
    expected = _gradients(plain, x, indices, weights, dy)
    for recipe in ("delayed", "rowwise"):
        for name, value in _gradients(_converted(plain, recipe=recipe), x, indices, weights, dy).items():
            assert _distance(value, expected[name]) < 3 * HALF, name


class _Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_parametrized_weights_are_cast_as_they_are(how):
    """PEFT's target_parameters are parametrizations that come after the conversion."""
    model, (x, indices, weights, _) = _converted(_model()), _call()
    before = model["experts"](x, indices, weights)
    torch.nn.utils.parametrize.register_parametrization(model["experts"], "down_proj", _Doubled())
    experts = model["experts"]
    run = torch.compile(experts, backend="aot_eager") if how == "compiled" else experts
    torch.testing.assert_close(run(x, indices, weights), 2 * before)


def test_weights_written_through_data_count_in_eval_mode():
    model, (x, indices, weights, _) = _converted(_model()), _call()
    before = model["experts"](x, indices, weights)
    model.eval()
    model["experts"].down_proj.data.neg_()
    assert torch.equal(model["experts"](x, indices, weights), -before)


def test_what_is_kept_for_the_backward():
    kept = {}
    for recipe in ("delayed", "rowwise"):
        model, (x, indices, weights, _) = _converted(_model(torch.bfloat16), recipe=recipe), _call(dtype=torch.bfloat16)
        others = (*model["experts"]._modules["_fp8"].cached, indices, weights)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            model["experts"](x.requires_grad_(), indices, weights)
        own = {t.data_ptr() for t in others}
        kept[recipe] = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in own)
    pre = len(x) * K * 2 * I * 2
    assert kept == {"delayed": pre + len(x) * (C + 4), "rowwise": pre + 2 * len(x) * C}


def test_a_whole_model_trains_and_goes_back():
    torch.manual_seed(0)
    config = nn.DecoderConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_layers=2, num_heads=4, num_experts=4
    )
    model = nn.Decoder(config, dtype=torch.bfloat16).to(DEVICE)
    before = set(model.state_dict())
    tokens = torch.randint(64, (4, 17), device=DEVICE)
    losses = {}
    for in_fp8 in (False, True):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), 3e-3)
        engine = FP8TrainingEngine(trained, FP8Config(**SMALL)) if in_fp8 else None
        if engine is not None:
            engine.setup_fp8_training()
            assert sum(isinstance(m, FP8Experts) for m in trained.modules()) == 2
            assert any(isinstance(m, FP8LinearLayer) for m in trained.modules())
        for _ in range(8):
            if engine is None:
                loss = trained(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss = engine.training_step((tokens[:, :-1], tokens[:, 1:]))
                assert engine.optimizer_step(optimizer)
        losses[in_fp8] = loss.item()
    assert losses[True] < 3.5 and abs(losses[True] - losses[False]) < 0.1 * losses[False]
    assert set(trained.state_dict()) == before
    assert set(revert_model_from_fp8(trained).state_dict()) == before
    assert not any(isinstance(m, FP8Experts | FP8LinearLayer) for m in trained.modules())


def test_weights_are_cast_again_when_they_change():
    model, (x, indices, weights, _) = _converted(_model()), _call()
    child = model["experts"]._modules["_fp8"]
    cached = child.cached
    first = model["experts"](x, indices, weights)
    assert child.cached is cached
    with torch.no_grad():
        model["experts"].down_proj.mul_(2)  # noticed by its version
    torch.testing.assert_close(model["experts"](x, indices, weights), 2 * first)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model["experts"](x, indices, weights).sum().backward()
    optimizer.step()
    assert child.cached is not cached
    kept = _converted(_model(), cache_weights=False)
    assert kept["experts"]._modules["_fp8"].cached is None
    torch.testing.assert_close(kept["experts"](x, indices, weights), first)


def test_copies_share_nothing_and_state_dicts_go_both_ways():
    model, call = _converted(_model()), _call()
    other = copy.deepcopy(model)
    child = other["experts"]._modules["_fp8"]
    assert child.owner is other["experts"] and child.owner is not model["experts"]
    with torch.no_grad():
        other["experts"].down_proj.zero_()
    assert not other["experts"](*call[:3]).any() and model["experts"](*call[:3]).any()
    plain = _model()
    plain.load_state_dict(model.state_dict())
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other["experts"](*call[:3]), model["experts"](*call[:3]))


def test_autocast_and_calls_that_are_not_served():
    x, indices, weights, _ = _call()
    model = convert_model_to_fp8(_model(), FP8Config(min_features=16, min_tokens=20))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert model["experts"](x, indices, weights).dtype is torch.bfloat16
    few = model["experts"](x[:19], indices[:19], weights[:19])
    assert torch.equal(few, _model()["experts"](x[:19], indices[:19], weights[:19]))


def test_compiled_and_checkpointed():
    model, call = _converted(_model()), _call()
    expected = _gradients(model, *call)

    x, weights = call[0].clone().requires_grad_(), call[2].clone().requires_grad_()
    compiled = torch.compile(model["experts"], fullgraph=True, backend="aot_eager")
    for run in (compiled, partial(checkpoint, model["experts"], use_reentrant=False)):
        model.zero_grad()
        y = run(x, call[1], weights)
        y.backward(call[3])
        torch.testing.assert_close(y.detach(), expected["y"])
        torch.testing.assert_close(model["experts"].down_proj.grad, expected["experts.down_proj"])


def test_what_conversion_leaves_alone():
    def reasons(model, **more):
        with pytest.raises(ValueError, match="no linear layer is eligible") as problem:
            convert_model_to_fp8(model, FP8Config(**{**SMALL, **more}))
        assert all("_fp8" not in m._modules for m in model.modules())
        return str(problem.value)

    assert "relu_squared" in reasons(_model(activation="relu_squared"))
    assert "convert_experts is False" in reasons(_model(), convert_experts=False)
    assert "min_features, 128" in reasons(_model(), min_features=128)
    assert "float64" in reasons(_model().double())
    odd = torch.nn.ModuleDict({"experts": nn.Experts(C, 24, E)})
    assert "inner size is 24" in reasons(odd)
    with pytest.raises(TypeError, match="convert_experts"):
        FP8Config(convert_experts=1)
    with pytest.raises(ValueError, match="converted already"):
        convert_model_to_fp8(_converted(_model()), FP8Config(**SMALL))


def test_where_products_are_emulated_the_report_says_so():
    (row,) = _converted(_model()).fp8_report.rows
    assert row.ops == ("experts_fp8",) and row.action == "replaced"
    if DEVICE.type == "cpu":
        assert row.reason.startswith("products are emulated in fp32: ")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_models_of_transformers(family):
    pytest.importorskip("transformers")
    from optimize_models import batch, build

    model, inputs = build(family), batch(family)
    plain = copy.deepcopy(model)(**inputs).loss
    unknown = convert_model_to_fp8(copy.deepcopy(model), FP8Config(**SMALL))
    told = {row.reason for row in unknown.fp8_report.rows if "Experts" in row.cls}
    assert told == {"the library does not compute these experts; call optimize first"}
    convert_model_to_fp8(tilesmith.optimize(model), FP8Config(**SMALL))
    assert any(isinstance(m, FP8Experts) for m in model.modules())
    loss = model(**inputs).loss
    loss.backward()
    assert abs(loss - plain) < 0.05 * plain
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.tilesmith_report.calls()["experts_fp8"] > 0
    revert_model_from_fp8(model)
    tilesmith.undo(model)
    torch.testing.assert_close(model(**inputs).loss, plain)


def _adapted(model):
    """PEFT's adapters on the stacked weights, which add something to them."""
    peft = pytest.importorskip("peft")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=4, target_modules=[], target_parameters=names))
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(0.05 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("order", ["convert, adapt", "adapt, convert"])
def test_adapters_on_stacked_weights_train_in_8_bits(order, monkeypatch):
    pytest.importorskip("transformers")
    from optimize_models import batch, build

    experts_alone = FP8Config(module_filter_fn=lambda module, name: False, **SMALL)
    plain, inputs = _adapted(build("qwen3_moe")), batch("qwen3_moe")
    model = tilesmith.optimize(build("qwen3_moe"), only="experts")
    for step in order.split(", "):
        model = _adapted(model) if step == "adapt" else convert_model_to_fp8(model, experts_alone)
    calls, genuine = [], FP8Experts.forward
    monkeypatch.setattr(FP8Experts, "forward", lambda self, *given: calls.append(self) or genuine(self, *given))
    found = {}
    for each in (plain, model):
        out = each(**inputs)
        out.loss.backward()
        grads = {name: p.grad for name, p in each.named_parameters() if p.requires_grad}
        found[each] = {"logits": out.logits.detach(), **grads}
    assert len(calls) == sum(isinstance(m, FP8Experts) for m in model.modules()) > 0
    assert found[model].keys() == found[plain].keys()
    for name, value in found[model].items():
        assert _distance(value, found[plain][name]) < 3 * HALF, name
    model.eval()
    with torch.no_grad():
        before = model(**inputs).logits
        model.merge_adapter()
        torch.testing.assert_close(model(**inputs).logits, before)
        with model.disable_adapter():
            assert _distance(model(**inputs).logits, before) > 0


def test_adapters_that_optimize_serves_are_not_in_8_bits_and_the_report_says_so(monkeypatch):
    pytest.importorskip("transformers")
    from optimize_models import batch, build

    plain, inputs = _adapted(build("qwen3_moe")), batch("qwen3_moe")
    model = convert_model_to_fp8(
        tilesmith.optimize(copy.deepcopy(plain), only="experts"),
        FP8Config(module_filter_fn=lambda module, name: False, **SMALL),
    )
    told = [row.reason for row in model.fp8_report.rows if row.ops == ("experts_fp8",)]
    assert told and all("with adapters optimize computes them in the weights' dtype" in reason for reason in told)
    monkeypatch.setattr(FP8Experts, "forward", lambda *given: 1 / 0)
    with tilesmith.use(experts="reference"):  # a kernel that serves this device
        torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss)
        with model.disable_adapter(), pytest.raises(ZeroDivisionError):
            model(**inputs)
