"""FP8 training: layers against bf16 products, conversion and back, the engine and its faults."""

import copy
import gc
import io
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilesmith
from devices import DEVICE
from tilesmith import nn as tnn
from tilesmith import ops
from tilesmith.ops.quant import aten
from tilesmith.precision import (
    FP8AttentionConfig,
    FP8Config,
    FP8Format,
    FP8LinearLayer,
    FP8TrainingEngine,
    convert,
    convert_model_to_fp8,
    create_fp8_trainer,
    refresh_fp8,
    revert_model_from_fp8,
)
from tilesmith.precision.config import RECIPES
from tilesmith.precision.scaling import Scaling, roll

DECODER = tnn.DecoderConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2
)
SMALL = {"min_features": 16, "min_tokens": 1}
HALF = 2.0**-4  # half a step of e4m3, relative to a number
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def _config(recipe="delayed", **more):
    return FP8Config(recipe=recipe, **SMALL, **more)


def _randn(*shape, dtype=None, requires_grad=False):
    """The same numbers on any device."""
    return torch.randn(shape, dtype=dtype).to(DEVICE).requires_grad_(requires_grad)


def _stack(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(64, 96, dtype=dtype), nn.GELU(), nn.Linear(96, 64, bias=False, dtype=dtype)
    return nn.Sequential(*layers).to(DEVICE)


def _decoder(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tnn.Decoder(DECODER, dtype=dtype).to(DEVICE)


def _tokens(batch=4, length=17, seed=0):
    tokens = torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def _gradients(model, x, dy):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    model.zero_grad()
    return found


def _distance(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_that_of_its_rounded_operands(recipe, dtype):
    """Sums of products of two numbers rounded at random: each adds at most half a step, and a sum averages them."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, dtype=dtype).to(DEVICE)
    model = convert_model_to_fp8(nn.Sequential(copy.deepcopy(plain)), _config(recipe))
    x, dy = _randn(3, 32, 64, dtype=dtype), _randn(3, 32, 96, dtype=dtype)
    expected = _gradients(nn.Sequential(plain), x, dy)
    for _ in range(2):  # the second time with the scales of the first
        found = _gradients(model, x, dy)
        for name, value in found.items():
            assert value.dtype is expected[name].dtype
            assert _distance(value, expected[name]) < 2 * HALF, name
        assert not torch.equal(found["y"], expected["y"])
        roll(model)


@each_recipe
def test_rounding_is_all_that_differs(recipe):
    """Numbers of 8 bits with one scale come through exactly; so do zero rows, and rows of different size by rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False)).to(DEVICE)
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-7, 8, (128, 128)).to(DEVICE) * 2.0**-3)
    x, dy = (torch.randint(-7, 8, (128, 128)).float().to(DEVICE) for _ in range(2))
    x[3] = dy[5] = 0
    expected = _gradients(model, x, dy)
    found = _gradients(convert_model_to_fp8(model, _config(recipe, backward_format=FP8Format.E4M3)), x, dy)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2.0**-7, atol=0, msg=name)  # bf16 results in between


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (96, 64)])
def test_the_gradient_of_rows_is_exact_whichever_side_is_multiplied(inputs, outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).to(DEVICE)
    x, dy = (torch.randint(-7, 8, (32, n)).float().to(DEVICE) for n in (inputs, outputs))
    x *= 2.0 ** torch.arange(-16, 16, device=DEVICE)[:, None]
    found = _gradients(convert_model_to_fp8(model, _config("rowwise")), x, dy)["0.weight"]
    torch.testing.assert_close(found, dy.t() @ x, rtol=1e-6, atol=1e-4)


def test_rows_whose_factors_fp16_cannot_hold():
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=False, dtype=torch.float16).to(DEVICE)
    model = convert_model_to_fp8(nn.Sequential(copy.deepcopy(plain)), _config("rowwise"))
    x, dy = _randn(32, 64, dtype=torch.float16) * 2.0**-18, _randn(32, 96, dtype=torch.float16) * 2.0**10
    expected = _gradients(nn.Sequential(plain), x, dy)["0.weight"]
    assert expected.abs().max() > 0
    assert _distance(_gradients(model, x, dy)["0.weight"], expected) < 2 * HALF


@each_recipe
def test_training_follows_that_in_bf16(recipe):
    tokens, labels = _tokens()
    last = []
    for in_fp8 in (False, True):
        model = _decoder()
        if in_fp8:
            convert_model_to_fp8(model, _config(recipe))
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses = []
        for _ in range(12):
            loss = model(tokens, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5
        last.append(losses[-1])
    assert abs(last[1] - last[0]) < 0.02 * last[0]


def _per_tensor_alone(genuine):
    """PyTorch's scaled matmul as 2.11 has it on a CPU."""

    def scaled_mm(a, b, scale_a, scale_b, *rest, **named):
        if scale_a.numel() > 1 or scale_b.numel() > 1:
            raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")
        return genuine(a, b, scale_a, scale_b, *rest, **named)

    return scaled_mm


@pytest.fixture
def fresh_choices():
    """What was found of this PyTorch, and chosen by it, is forgotten before and after."""

    def forget():
        aten._try_on_cpu.cache_clear()
        convert.emulation.cache_clear()
        ops.scaled_matmul._select.cache_clear()
        ops.scaled_matmul._recent.clear()

    forget()
    yield
    forget()


def _without_bias(genuine):
    """PyTorch's scaled matmul as of a release that adds no bias on a CPU."""

    def scaled_mm(a, b, scale_a, scale_b, bias=None, **named):
        if bias is not None:
            raise RuntimeError("no bias on a CPU")
        return genuine(a, b, scale_a, scale_b, bias, **named)

    return scaled_mm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_with_biases_on_a_cpu(dtype, monkeypatch, fresh_choices):
    """PyTorch's product serves them, unless a trial shows that it does not. In fp32 it is asked for no bias."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    eight, factor, bias = torch.randn(32, 64).to(FP8Format.E4M3.dtype), torch.ones(1), torch.randn(32).to(dtype)
    call = eight, eight, factor, factor, bias, names[dtype]
    expected = eight.double() @ eight.double().t() + bias.double()
    for genuine in (True, False):
        if not genuine:
            aten._try_on_cpu.cache_clear()
            ops.scaled_matmul._select.cache_clear()
            ops.scaled_matmul._recent.clear()
            monkeypatch.setattr(torch, "_scaled_mm", _without_bias(torch._scaled_mm))
        choice = tilesmith.explain("scaled_matmul", *call)
        assert choice.kernel.backend == ("aten" if genuine or dtype == torch.float32 else "reference"), choice
        assert genuine or dtype == torch.float32 or "no bias on a CPU" in str(choice)
        assert _distance(ops.scaled_matmul(*call).double(), expected) < torch.finfo(dtype).eps


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_pytorch_without_factors_of_rows_is_told_and_replaced(recipe, monkeypatch, fresh_choices):
    """On a CPU, where PyTorch 2.11 multiplies by one factor a tensor alone: the reference serves, and says why."""
    monkeypatch.setattr(torch, "_scaled_mm", _per_tensor_alone(torch._scaled_mm))
    torch.manual_seed(0)
    plain = nn.Linear(64, 96)
    model = convert_model_to_fp8(nn.Sequential(copy.deepcopy(plain)), _config(recipe))
    row = model.fp8_report.rows[0]
    assert row.action == "replaced" and row.reason.startswith("products are emulated in fp32")
    x, dy = torch.randn(32, 64), torch.randn(32, 96)
    expected = _gradients(nn.Sequential(plain), x, dy)
    for name, value in _gradients(model, x, dy).items():
        assert _distance(value, expected[name]) < 2 * HALF, name
    eight, factor = torch.randn(32, 64).to(FP8Format.E4M3.dtype), torch.ones(32, 1)
    choice = tilesmith.explain("scaled_matmul", eight, eight, factor, factor)
    assert choice.kernel.backend == "reference"
    assert "only supports per-tensor scaling" in str(choice)
    whole = torch.ones(1)
    assert tilesmith.explain("scaled_matmul", eight, eight, whole, whole).kernel.backend == "aten"


def test_norms_and_gated_mlps_cast_what_they_make():
    model = convert_model_to_fp8(_decoder(), _config())
    replaced = {row.fqn: row for row in model.fp8_report.rows if row.action == "replaced"}
    assert {"layers.0.mlp", "layers.0.self_attn.q_proj"} <= replaced.keys()
    assert any("norm" in name for name in replaced)
    skipped = {row.fqn: row.reason for row in model.fp8_report.rows if row.action == "skipped"}
    assert "output projection" in skipped["lm_head"]
    tokens, labels = _tokens()
    for _ in range(2):
        model(tokens, labels).backward()
        roll(model)
    scalings = [m for m in model.modules() if isinstance(m, Scaling)]
    assert any(s.warm for s in scalings)
    # q, k and v take the norm's cast: they look for no scale of their own
    attention = model.layers[0].self_attn
    assert not any(getattr(attention, name).input_scaling.warm for name in ("q_proj", "k_proj", "v_proj"))
    assert attention.o_proj.input_scaling.warm


@each_recipe
def test_state_dicts_go_both_ways(recipe):
    plain, model = _decoder(), convert_model_to_fp8(_decoder(), _config(recipe))
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    plain.load_state_dict(model.state_dict())
    tokens, labels = _tokens()
    fresh = convert_model_to_fp8(copy.deepcopy(plain), _config(recipe))
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(tokens, labels), fresh(tokens, labels))
    revert_model_from_fp8(model)
    assert not any(isinstance(m, FP8LinearLayer | Scaling) for m in model.modules())
    assert torch.equal(model(tokens, labels), plain(tokens, labels))


def test_copies_share_nothing():
    model = convert_model_to_fp8(_decoder(), _config())
    tokens, labels = _tokens()
    for _ in range(2):
        model(tokens, labels).backward()
        roll(model)
    twin = copy.deepcopy(model)
    assert torch.equal(model(tokens, labels), twin(tokens, labels))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    before = model(tokens, labels)
    refresh_fp8(twin)
    assert torch.equal(model(tokens, labels), before)
    assert not torch.equal(twin(tokens, labels), before)
    other = convert_model_to_fp8(_stack(), _config(), inplace=False)
    assert isinstance(other[0], FP8LinearLayer)


def _loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _loaded], ids=["deepcopy", "load"])
@pytest.mark.parametrize("warm", [False, True])
def test_copies_train_as_their_model_does(copied, warm):
    """A step casts a copy's weights anew, which a compiled one does not look after itself, and rolls its scales."""
    x, dy = _randn(32, 64), _randn(32, 64)
    model = convert_model_to_fp8(_stack(), _config())
    if warm:
        _gradients(model, x, dy)
        roll(model)
    twin, found = copied(model), []
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), 1e-2)
        compiled = torch.compile(each, backend="aot_eager")
        for _ in range(3):
            y = compiled(1000 * x)
            y.backward(dy)
            optimizer.step()
            optimizer.zero_grad()
        found.append(y)
    assert torch.equal(*found)
    for mine, other in zip(model.modules(), twin.modules()):
        if isinstance(mine, Scaling):
            assert mine.warm and other.warm and torch.equal(mine.history, other.history) and not other.amax.any()


def test_a_model_that_was_copied_is_freed():
    """Following a model keeps neither it nor its copy."""
    model = convert_model_to_fp8(_stack(), _config())
    twin = copy.deepcopy(model)
    gone = [weakref.ref(each) for each in (model, twin)]
    gc.disable()
    try:
        del model, twin
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("started", [False, True])
def test_scales_start_anew_on_leaving_meta(started, monkeypatch):
    """What `to_empty` allocates holds anything; gate and up share scales, which are moved twice."""
    model = convert_model_to_fp8(_decoder(), _config())
    tokens, labels = _tokens()
    if started:
        model(tokens, labels).backward()
        roll(model)
    weights = copy.deepcopy(model.state_dict())
    genuine = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *given, **named: genuine(*given, **named).fill_(7e12))
    model.to("meta").to_empty(device=DEVICE)
    monkeypatch.undo()
    for scaling in (m for m in model.modules() if isinstance(m, Scaling)):
        assert not scaling.warm
        assert all(buffer.device.type == DEVICE.type and not buffer.any() for buffer in scaling.buffers())
    fresh = convert_model_to_fp8(_decoder(), _config())
    for module in (model, fresh):
        module.load_state_dict(weights)
    model.rotary = fresh.rotary  # plain buffers, which are the caller's to fill
    assert torch.equal(model(tokens, labels), fresh(tokens, labels))


def test_inplace_false_leaves_the_model():
    model = _stack()
    other = convert_model_to_fp8(model, _config(), inplace=False)
    assert type(model[0]) is nn.Linear and type(other[0]) is FP8LinearLayer
    assert model[0].weight is not other[0].weight


def test_weights_are_cast_again_when_they_change():
    model = convert_model_to_fp8(_stack(), _config("current"))
    x = _randn(32, 64)
    before = model(x)
    with torch.no_grad():
        model[0].weight.neg_()
    assert not torch.equal(model(x), before)
    model[0].weight.data.neg_()  # what an optimizer may do: no version is counted
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model(x).sum().backward()
    optimizer.step()
    assert torch.equal(model(x), before)


def test_weights_written_through_data_count_in_eval_mode():
    """As PEFT merges adapters, and others swap in averaged weights."""
    model = convert_model_to_fp8(_stack(), _config("current"))
    x = _randn(32, 64)
    with torch.no_grad():
        before = model(x)
        model.eval()
        for compiled in (model, torch.compile(model, backend="aot_eager")):
            model[2].weight.data.neg_()
            assert torch.equal(compiled(x), -before)
            model[2].weight.data.neg_()
            assert torch.equal(compiled(x), before)


class _Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_parametrized_weight_is_cast_as_it_is(how):
    """PEFT's target_parameters are parametrizations that come after the conversion."""
    model = convert_model_to_fp8(_stack(), _config("current"))
    x = _randn(32, 64)
    before = model(x)
    nn.utils.parametrize.register_parametrization(model[2], "weight", _Doubled())
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    assert torch.equal(run(x), 2 * before)


def test_a_write_between_two_layers_is_noticed():
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64).to(DEVICE), nn.Linear(64, 64).to(DEVICE)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            x = x * 1
            a = self.first(x)
            x.mul_(-1)
            return a, self.second(x)

    model = convert_model_to_fp8(Two(), _config("current"))
    x = _randn(32, 64)
    with torch.no_grad():
        assert _distance(model(x)[1], F.linear(-x, second.weight, second.bias)) < 2 * HALF


@each_recipe
def test_activation_checkpointing(recipe):
    x, dy = _randn(32, 64), _randn(32, 64)
    model = convert_model_to_fp8(_stack(), _config(recipe))
    expected = _gradients(model, x, dy)
    x = x.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).backward(dy)
    assert torch.equal(x.grad, expected["x"])
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_compiled(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(tnn.RMSNorm(64), tnn.GatedMLP(64, 96)) if recipe == "delayed" else _stack()
    convert_model_to_fp8(model.to(DEVICE), _config(recipe))
    x, dy = _randn(32, 64), _randn(32, 64)
    for _ in range(2):
        _gradients(model, x, dy)
        roll(model)
    expected = _gradients(model, x, dy)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = x.clone().requires_grad_()
    compiled(x).backward(dy)
    found = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


class _Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, as PEFT puts it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


@each_recipe
def test_a_frozen_base_trains_adapters_and_keeps_no_activation(recipe):
    torch.manual_seed(0)
    model = convert_model_to_fp8(nn.Sequential(_Adapted(nn.Linear(64, 96))).to(DEVICE), _config(recipe))
    assert isinstance(model[0].base_layer, FP8LinearLayer) and type(model[0].down) is nn.Linear
    x = _randn(32, 64, requires_grad=True)
    kept = _saved(lambda: model[0].base_layer(x).sum())
    assert not any(t.numel() == x.numel() for t in kept)
    model(x).sum().backward()
    assert model[0].base_layer.weight.grad is None and model[0].down.weight.grad is not None


def _saved(run):
    """What a call keeps for its gradient, each storage once."""
    found = {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return list(found.values())


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_bytes_kept_of_activations(recipe):
    """The input of each layer in 8 bits; torchao's layers keep it in bf16."""
    model = convert_model_to_fp8(_stack(torch.bfloat16), _config(recipe))
    torch.manual_seed(0)
    rows = 1024
    for layer, width in ((model[0], 64), (model[2], 96)):
        x = _randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
        weights = {t.untyped_storage().data_ptr() for t in (layer.weight, *layer.weight_cast()) if t is not None}
        kept = [t for t in _saved(lambda layer=layer, x=x: layer(x)) if t.untyped_storage().data_ptr() not in weights]
        assert sum(t.untyped_storage().nbytes() for t in kept) <= 0.55 * rows * width * 2


def test_eval_and_small_calls():
    model = convert_model_to_fp8(_stack(), FP8Config(min_features=16, min_tokens=8))
    x = _randn(4, 64)
    assert torch.equal(model(x), _stack()(x))
    x = _randn(2, 4, 64)
    assert not torch.equal(model(x), _stack()(x))
    model.eval()
    assert torch.equal(model(1024 * x)[:1], model(1024 * x)[:1])
    assert _distance(model(1024 * x), _stack()(1024 * x)) < 2 * HALF


# What is refused


def _state(model):
    return {name: (type(m), set(m._modules), set(m._forward_hooks)) for name, m in model.named_modules()}


def test_what_conversion_refuses(monkeypatch):
    for bad, kind in ((3, TypeError), (nn.Sequential(nn.GELU()), ValueError), (nn.Linear(40, 40), ValueError)):
        with pytest.raises(kind, match="convert_model_to_fp8"):
            convert_model_to_fp8(bad, _config())
    with pytest.raises(TypeError, match="fp8_config"):
        convert_model_to_fp8(_stack(), {"recipe": "delayed"})
    with pytest.raises(ValueError, match="min_features"):
        convert_model_to_fp8(_stack())
    model = convert_model_to_fp8(_stack(), _config())
    with pytest.raises(ValueError, match="converted already"):
        convert_model_to_fp8(model, _config())


def test_a_failed_conversion_leaves_the_model_as_it_was(monkeypatch):
    model = _decoder()
    before, dictionaries = _state(model), {name: set(m.__dict__) for name, m in model.named_modules()}
    calls = []
    genuine = FP8LinearLayer.enter

    def fails(self, *given):
        calls.append(self)
        if len(calls) == 4:
            raise MemoryError("no room")
        genuine(self, *given)

    monkeypatch.setattr(FP8LinearLayer, "enter", fails)
    with pytest.raises(MemoryError):
        convert_model_to_fp8(model, _config())
    assert _state(model) == before
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == dictionaries


def test_layers_that_sum_their_biases_gradients(monkeypatch):
    """`optimize(graphs=True)` gives linear layers with biases a class of their own."""
    plain = _stack()
    model = tilesmith.optimize(copy.deepcopy(plain), only="bias")
    before = _state(model)
    assert type(model[0]) is not nn.Linear
    monkeypatch.setattr(convert, "_fuse", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_model_to_fp8(model, _config())
    assert _state(model) == before
    monkeypatch.undo()
    convert_model_to_fp8(model, _config())
    assert [row.action for row in model.fp8_report.rows] == ["replaced", "replaced"]
    x, dy = _randn(32, 64), _randn(32, 64)
    found, expected = (_gradients(each, x, dy) for each in (model, convert_model_to_fp8(plain, _config())))
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert type(revert_model_from_fp8(model)[0]) is nn.Linear


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recipe": "tensorwise"}, "recipe"),
        ({"forward_format": FP8Format.E5M2, "backward_format": FP8Format.E4M3}, "swapped"),
        ({"recipe": "rowwise", "backward_format": FP8Format.E5M2}, "E4M3"),
        ({"amax_history_length": 0}, "amax_history_length"),
        ({"min_tokens": True}, "min_tokens"),
        ({"loss_scale": math.inf}, "loss_scale"),
        ({"loss_scale": True}, "loss_scale"),
    ],
)
def test_what_a_config_refuses(given, said):
    with pytest.raises(ValueError, match=said):
        FP8Config(**given)


def test_formats_are_what_they_say():
    assert FP8Format.E4M3.dtype is torch.float8_e4m3fn and FP8Format("e5m2").dtype is torch.float8_e5m2
    with pytest.raises(TypeError, match="forward_format"):
        FP8Config(forward_format="e4m3")


def test_attention_as_a_recipe():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 32, 16, requires_grad=True).unbind(0)
    out, lse = FP8AttentionConfig("head").attention(q, k, v)
    exact = F.scaled_dot_product_attention(q, k, v)
    assert lse.shape == (1, 2, 32)
    assert 0 < _distance(out, exact) < 2 * HALF
    with pytest.raises(ValueError, match="granularity"):
        FP8AttentionConfig("row")
    for name in ("smooth", "rotate"):
        with pytest.raises(TypeError, match=f"{name} must be a bool or None, got 1"):
            FP8AttentionConfig(**{name: 1})


# The engine


def _trainer(recipe="delayed", **more):
    model = _stack()
    return FP8TrainingEngine(model, _config(recipe, **more)), torch.optim.SGD(model.parameters(), 1e-2)


def test_the_engine_takes_steps():
    x, y = _randn(32, 64), _randn(32, 64)
    trainer, optimizer = _trainer()
    with pytest.raises(RuntimeError, match="setup_fp8_training"):
        trainer.training_step(x, y)
    losses = []
    with trainer:
        for _ in range(6):
            losses.append(trainer.training_step(x, y).item())
            assert trainer.optimizer_step(optimizer)
    assert losses[-1] < losses[0]
    told = trainer.get_training_statistics()
    assert (told["steps"], told["skipped"], told["overflows"]) == (6, 0, 0)
    assert told["scales"] and all(scale > 0 for scale in told["scales"].values())
    assert all(len(history) == 16 for history in told["amax_histories"].values())


def test_create_fp8_trainer_raises_early():
    with pytest.raises(TypeError, match="model"):
        create_fp8_trainer(3)
    with pytest.raises(ValueError, match="swapped"):
        create_fp8_trainer(_stack(), FP8Format.E5M2, FP8Format.E4M3)
    trainer = create_fp8_trainer(_stack())
    with pytest.raises(ValueError, match=r"eligible \(the model: in_features is 8; multiples of 16 are supported\)"):
        convert_model_to_fp8(torch.nn.Linear(8, 8))
    with pytest.raises(ValueError, match="no linear layer is eligible.*FP8TrainingEngine.*min_features"):
        trainer.setup_fp8_training()


@each_recipe
@pytest.mark.parametrize("fault", [math.inf, math.nan, 1e6])
def test_faults_are_survived(recipe, fault):
    """A spoilt batch skips its step, or is cut off; the next ones train on, and no weight is harmed."""
    torch.manual_seed(0)
    x, y = _randn(32, 64), _randn(32, 64)
    trainer, optimizer = _trainer(recipe, loss_scale=4.0, loss_scale_growth_interval=2)
    with trainer:
        first = trainer.training_step(x, y).item()
        assert trainer.optimizer_step(optimizer)
        trainer.training_step(x, y)
        assert trainer.optimizer_step(optimizer)
        spoilt = x.clone()
        spoilt[3, 5] = fault
        trainer.training_step(spoilt, y)
        if math.isfinite(fault):
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        stepped = trainer.optimizer_step(optimizer)
        assert stepped == math.isfinite(fault)
        assert trainer.loss_scale == (4.0 if stepped else 2.0)
        for _ in range(4):
            last = trainer.training_step(x, y).item()
            assert trainer.optimizer_step(optimizer)
    assert trainer.loss_scale == 4.0
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert last < first
    told = trainer.get_training_statistics()
    assert told["skipped"] == (0 if stepped else 1)
    if recipe == "delayed":
        assert told["overflows"] > 0
    assert all(math.isfinite(scale) for scale in told["scales"].values())


def test_gradients_are_clipped_by_their_own_norm():
    x, y = _randn(32, 64), _randn(32, 64)
    norms, weights = [], []
    for loss_scale in (1.0, 1024.0):
        trainer, optimizer = _trainer("current", loss_scale=loss_scale)
        with trainer:
            trainer.training_step(x, y)
            trainer.unscale(optimizer)
            norms.append(nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1))
            with pytest.raises(RuntimeError, match="unscale"):
                trainer.unscale(optimizer)
            with pytest.raises(RuntimeError, match="optimizer_step"):
                trainer.training_step(x, y)
            assert trainer.optimizer_step(optimizer)
            weights.append(trainer.model[0].weight.detach().clone())
            trainer.training_step(x * math.inf, y)
            trainer.unscale(optimizer)
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
            assert not trainer.optimizer_step(optimizer)
    assert norms[0] > 0.1  # it did clip
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(weights[1], weights[0])


def test_losses_of_the_engine():
    trainer, _ = _trainer()
    trainer.setup_fp8_training()
    x = _randn(32, 64)
    labels = torch.randint(64, (32,), device=DEVICE)
    assert torch.isfinite(trainer.training_step(x, labels))
    own = trainer.training_step((x,), x, lambda out, target: (out - target).abs().mean())
    assert torch.isfinite(own)
    with pytest.raises(ValueError, match="targets"):
        trainer.training_step(x, _randn(32, 3))
    with pytest.raises(ValueError, match="without targets"):
        trainer.training_step(x)
    with pytest.raises(TypeError, match="optimizer"):
        trainer.optimizer_step(None)


def test_accumulated_gradients_take_one_cast_of_the_weights():
    model = convert_model_to_fp8(_stack(), _config())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = model[0].cached
    for _ in range(3):
        model(_randn(32, 64)).sum().backward()
        assert model[0].cached is first
    optimizer.step()
    assert model[0].cached is not first
