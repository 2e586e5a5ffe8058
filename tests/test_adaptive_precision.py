"""Adaptive precision on a CPU: allocation, rounding, packed layers, whole models, files and what goes wrong."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.ops.quant.packed_reference import OUTPUTS, weight_of
from tilesmith.precision import (
    AllocationStrategy,
    PackedLinear,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    analyze_precision_opportunities,
    create_ultra_precision_module,
    load_ultra_precision_module,
)
from tilesmith.precision.adaptive.allocation import allocate
from tilesmith.precision.adaptive.choice import dealt, uniform
from tilesmith.precision.adaptive.config import WIDTHS
from tilesmith.precision.adaptive.layer import code_bytes, overhead_bytes, pack_layer, packed_of
from tilesmith.precision.adaptive.layers import bytes_of
from tilesmith.precision.adaptive.quantizer import gptq, group_parameters, nearest

ENTROPY, FISHER, MEASURED, UNIFORM = (
    AllocationStrategy.ENTROPY_BASED,
    AllocationStrategy.FISHER,
    AllocationStrategy.MEASURED,
    AllocationStrategy.UNIFORM,
)


def _uneven(seed=0, dtype=torch.float32):
    """A model whose tiles matter very differently: columns and rows of its weights differ in size."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64), nn.Linear(64, 50))
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight *= torch.logspace(-1.5, 0.5, layer.in_features)
        model[2].weight *= torch.logspace(-1, 0.5, 64)[:, None]
    return model.to(dtype).eval()


def _inputs(rows=64, seed=1):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed))


# allocation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_allocation_is_the_best_but_for_one_step(seed):
    generator = torch.Generator().manual_seed(seed)
    sensitivity = torch.rand(5, 1, generator=generator, dtype=torch.float64) ** 4
    jitter = 0.5 + torch.rand(5, 4, generator=generator, dtype=torch.float64)
    losses = sensitivity * 4.0 ** -torch.arange(4.0, dtype=torch.float64) * (jitter if seed % 2 else 1)
    sizes = torch.tensor([2, 3, 4, 6]).expand(5, -1) * torch.randint(1, 4, (5, 1), generator=generator)
    every = torch.arange(5)
    for budget in range(int(sizes[:, 0].sum()), int(sizes[:, -1].sum()) + 1, 3):
        chosen = allocate(losses, sizes, budget)
        assert sizes[every, chosen].sum() <= budget
        best = min(
            losses[every, torch.tensor(c)].sum().item()
            for c in itertools.product(range(4), repeat=5)
            if sizes[every, torch.tensor(c)].sum() <= budget
        )
        step = (losses[:, :1] - losses).max().item()
        assert losses[every, chosen].sum() <= best + step
        if budget == sizes[:, -1].sum():
            assert losses[every, chosen].sum() == pytest.approx(losses.min(1).values.sum().item())


def test_allocation_of_alike_items_is_exact():
    """Sizes of one step: what the Lagrangian leaves is less than a step."""
    losses = torch.tensor([[16.0, 4.0, 1.0], [8.0, 2.0, 0.5], [4.0, 1.0, 0.25]])
    sizes = torch.tensor([[1, 2, 3]]).expand(3, -1)
    for budget in range(3, 10):
        every = [c for c in itertools.product(range(3), repeat=3) if sum(c) + 3 <= budget]
        best = min(sum(losses[i, o].item() for i, o in enumerate(c)) for c in every)
        chosen = allocate(losses, sizes, budget)
        assert losses[torch.arange(3), chosen].sum().item() == pytest.approx(best)


def test_allocation_refuses():
    with pytest.raises(ValueError, match="the smallest options take 4 bytes; the budget is 3"):
        allocate(torch.ones(2, 2), torch.tensor([[2, 3], [2, 3]]), 3)
    with pytest.raises(ValueError, match="finite"):
        allocate(torch.tensor([[float("nan")]]), torch.ones(1, 1, dtype=torch.int64), 3)


# rounding -----------------------------------------------------------------------------------------------------------


def _hqq(weight, bits):
    """Half-quadratic quantisation (Badri and Shaji, 2023): the zero point by alternating shrinkage, p = 0.7."""
    top = 2**bits - 1
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale, beta = (high - low) / top, 10.0
    zero = -low / scale
    for _ in range(20):
        codes = (weight / scale + zero).round().clamp(0, top)
        error = weight - (codes - zero) * scale
        shrunk = error.sign() * F.relu(error.abs() - error.abs().clamp(min=1e-8) ** -0.3 / beta)
        zero = (codes - (weight - shrunk) / scale).mean(-1, keepdim=True)
        beta *= 1.01
    codes = (weight / scale + zero).round().clamp(0, top)
    return (codes - zero) * scale


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-3, 1e-4, 3e-5, 1e-5])
def test_small_weights_lose_no_more_than_large_ones(size):
    """Their scales are among the numbers of float16 that are not normal."""
    torch.manual_seed(0)
    weight = size * torch.randn(256, 64)
    for bits, share in ((2, 0.34), (3, 0.18), (4, 0.09), (6, 0.024), (8, 0.007)):  # of normal values, a tenth more
        width = torch.full((256,), bits)
        error = nearest(weight, *group_parameters(weight, width), width) - weight
        assert error.norm() < share * weight.norm()


@pytest.mark.parametrize("middle", [0.0, 1e-6, 1e-3, 1.0, 1000.0])
@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-5])
def test_groups_of_nearly_one_value(middle, spread):
    torch.manual_seed(0)
    weight = -middle + spread * torch.rand(64, 64)
    for bits in (2, 4, 8):
        width = torch.full((64,), bits)
        error = (nearest(weight, *group_parameters(weight, width), width) - weight).abs().max()
        assert error <= max(2.0**-11 * middle, 2.0**-24, spread / (2**bits - 1)) * 1.2


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rounding_is_closer_than_hqq(bits):
    weight = torch.randn(64, 4, 64, generator=torch.Generator().manual_seed(0))
    width = torch.tensor([[bits]])
    ours = nearest(weight, *group_parameters(weight, width), width)
    assert (weight - ours).square().mean() < (weight - _hqq(weight, bits)).square().mean()


def test_gptq_makes_errors_good():
    torch.manual_seed(0)
    mixed = torch.randn(512, 32) @ torch.randn(32, 128) + 0.1 * torch.randn(512, 128)
    weight, bits = torch.randn(48, 128), torch.full((48, 2), 3)
    hessian = mixed.t() @ mixed / 512
    groups = weight.unflatten(1, (-1, 64))
    plain = nearest(groups, *group_parameters(groups, bits), bits).flatten(1)
    values, scale, zero = gptq(weight, hessian, bits)
    assert torch.allclose(nearest(values.unflatten(1, (-1, 64)), scale, zero, bits).flatten(1), values, atol=1e-5)
    ours, theirs = ((mixed @ (weight - w).t()).square().mean() for w in (values, plain))
    assert ours < 0.6 * theirs


@pytest.mark.parametrize("value", [0.0, 0.7, -0.7, 3e-6])
def test_groups_of_one_value(value):
    weight, width = torch.full((2, 1, 64), value), torch.tensor([[2]])
    got = nearest(weight, *group_parameters(weight, width), width)
    assert (got - weight).abs().max() <= abs(value) * 2**-10 + 2**-24


class _Chosen(nn.Module):
    """Experts that are linear layers, the first for most tokens, the second for few, the third for none. calls_all:
    whether the third is called with no rows."""

    def __init__(self, calls_all):
        super().__init__()
        self.experts, self.shared = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 64)
        self.calls_all = calls_all

    def forward(self, x):
        chosen, out = (x[:, 0] > 1.5).long(), self.shared(x)
        for i, expert in enumerate(self.experts):
            at = (chosen == i).nonzero()[:, 0]
            if self.calls_all or at.numel():
                out = out.index_add(0, at, expert(x[at]))
        return out


class _Pooled(nn.Module):
    """Layers of which the first sees a row for each token, the second one for each sequence."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).mean(1))


@pytest.mark.parametrize("make, shape", [(lambda: _Chosen(False), (2048, 64)), (_Pooled, (128, 16, 64))])
def test_a_predicted_distance_is_that_of_the_layer_whichever_rows_it_sees(make, shape):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    y = model(x).detach()
    sensitivity = analyze_precision_opportunities(model, x)["sensitivity"]
    for name in sorted(set(sensitivity) - {"experts.2"}):
        layer = model.get_submodule(name)
        weight = layer.weight.detach().clone()
        layer.weight.data.copy_(pack_layer(layer, torch.full((4, 1), 4)).dequantized())
        measured = float((model(x).detach() - y).square().mean() / y.square().mean())
        layer.weight.data.copy_(weight)
        assert 0.6 < sensitivity[name] / measured < 1.6, name


@pytest.mark.parametrize("calls_all", [False, True])
@pytest.mark.parametrize("strategy", [ENTROPY, FISHER])
def test_an_expert_that_no_row_reaches_counts_as_an_average_one(calls_all, strategy, caplog):
    torch.manual_seed(0)
    config = PrecisionConfig(target_memory_reduction=0.6, allocation_strategy=strategy)
    rows = torch.randn(64, 64)
    rows[:, 0] = torch.tensor([0.0, 0.0, 0.0, 2.0]).repeat(16)  # by which _Chosen chooses
    packed = create_ultra_precision_module(_Chosen(calls_all), config, calibration=rows)
    assert "no calibration row reached experts.2" in caplog.text
    layers = packed.get_precision_stats().layers
    assert packed.get_precision_stats().strategy == strategy.value
    assert layers["experts.2"].bits > 3.5 and layers["experts.0"].bits >= layers["experts.2"].bits


# packed layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_product_with_its_weight(bias):
    torch.manual_seed(0)
    layer = nn.Linear(192, 40, bias=bias)
    widths = torch.tensor(WIDTHS)[torch.randint(5, (3, 3))]
    packed = pack_layer(layer, widths)
    x = torch.randn(2, 3, 192, requires_grad=True)
    y = packed(x)
    weight = packed.dequantized()
    torch.testing.assert_close(y, F.linear(x, weight, layer.bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
    assert {w: n for w, n in packed.tile_counts().items() if n} == {
        int(w): int((widths == w).sum()) for w in widths.unique()
    }
    codes = sum(code_bytes(int(w)) for w in widths.flatten())
    assert packed.packed_bytes() == codes + overhead_bytes(40, 192)
    error = (weight - layer.weight).abs().unflatten(1, (3, 64)).amax(2)
    by_width = {int(w): error[widths.repeat_interleave(16, 0)[:40] == w].max() for w in widths.unique()}
    assert sorted(by_width.values(), reverse=True) == [by_width[w] for w in sorted(by_width)]


@pytest.mark.parametrize("widths", [*([w] for w in WIDTHS), [2, 8], WIDTHS])
@pytest.mark.parametrize("rows, groups", [(1, 1), (40, 3), (700, 24)])  # 700 x 1536 is more than is unpacked at once
def test_a_cpu_unpacks_by_words_and_finds_the_same_weight(widths, rows, groups):
    torch.manual_seed(0)
    strips = -(-rows // 16)
    mix = torch.tensor(widths)[torch.randint(len(widths), (strips, groups))]
    packed = packed_of(torch.randn(rows, 64 * groups), torch.rand(rows, groups), 9 * torch.rand(rows, groups), mix)
    packed["codes"].random_(-(2**31), 2**31)  # any 32 bits are codes, those of a negative number too
    packed["scale"][0, 0, 0], packed["zero"][-1, -1, -1] = torch.inf, torch.nan
    tables = list(packed.values())
    assert ops.dequantize_packed.explain(*tables, rows).kernel.backend == "aten"
    for name, dtype in OUTPUTS.items():
        wanted = weight_of(*tables, rows).to(dtype)
        torch.testing.assert_close(ops.dequantize_packed(*tables, rows, name), wanted, rtol=0, atol=0, equal_nan=True)


def test_casts_leave_the_scales():
    layer = pack_layer(nn.Linear(64, 16), torch.full((1, 1), 4)).to(torch.bfloat16)
    assert layer.scale.dtype == layer.zero.dtype == torch.float16 and layer.codes.dtype == torch.int32
    assert layer(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_tables_that_are_wrong_are_refused():
    layer = pack_layer(nn.Linear(128, 32), torch.tensor([[2, 4], [8, 3]]))
    parts = {name: value.clone() for name, value in layer.named_buffers()}
    for name, value, match in (
        ("order", torch.zeros_like(parts["order"]), "permutation"),
        ("codes", parts["codes"][:-1], "words"),
        ("strips", parts["strips"] + 1, "strips"),
        ("scale", parts["scale"][:, :1], "scale and zero"),
    ):
        with pytest.raises(ValueError, match=match):
            PackedLinear(parts | {name: value}, 32, None)
    with pytest.raises(ValueError, match="33 rows"):
        PackedLinear(parts, 33, None)


# whole models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", QuantizationMode)
@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_a_model_meets_its_target_and_is_closer_than_uniform(strategy, mode):
    model, before = _uneven(), None
    before = copy.deepcopy(model.state_dict())
    config = PrecisionConfig(allocation_strategy=strategy, quantization_mode=mode, target_memory_reduction=0.75)
    packed = create_ultra_precision_module(model, config, calibration=_inputs(256))
    stats = packed.get_precision_stats()
    assert stats.memory_savings_ratio >= 0.75
    assert stats.total_bytes == bytes_of(packed) == sum(t.nbytes for t in packed.state_dict().values())
    assert stats.base_bytes == 2 * sum(p.numel() for p in model.parameters()) == stats.original_bytes // 2
    assert set(stats.layers) == {"0", "2", "3"} and stats.strategy == strategy.value and not stats.fallback
    plain = create_ultra_precision_module(
        model, PrecisionConfig(PrecisionFormat.FP16, UNIFORM, mode, 1.5, 0.75), calibration=_inputs(256)
    )
    x = _inputs(64, seed=9)
    errors = [float((m(x) - model(x)).square().mean()) for m in (packed, plain)]
    if strategy is UNIFORM:
        assert errors[0] == errors[1] and not stats.held_out
    else:
        assert errors[0] < errors[1] and stats.held_out["adaptive"] < stats.held_out["uniform"]
        assert sum(row.sensitivity for row in stats.layers.values()) == pytest.approx(1.0)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model.training and not packed.training


def test_without_calibration_widths_are_uniform_and_it_says_so(caplog):
    packed = create_ultra_precision_module(_uneven())
    stats = packed.get_precision_stats()
    assert stats.strategy == "uniform" and "none was given" in stats.fallback and "none was given" in str(stats)
    assert stats.fallback in caplog.text
    assert max(map(len, str(stats).splitlines())) <= 120 and stats.fallback in " ".join(str(stats).split())
    assert stats.memory_savings_ratio >= 0.4


@pytest.mark.parametrize("strategy", [s for s in AllocationStrategy if s is not AllocationStrategy.UNIFORM])
def test_where_all_tiles_get_8_bits_no_strategy_is_said_to_have_lost(strategy):
    """The default target leaves every layer at 8 bits, whichever strategy is asked."""
    config = PrecisionConfig(allocation_strategy=strategy)
    stats = create_ultra_precision_module(_uneven(), config, calibration=_inputs(64)).get_precision_stats()
    assert stats.strategy == "uniform" and stats.held_out["uniform"] == stats.held_out["adaptive"]
    assert f"{strategy.value} widths are 8 bits for all tiles, as uniform ones are" in stats.fallback
    assert "target_memory_reduction, 0.4, leaves nothing to choose; a higher one does" in stats.fallback


def test_widths_that_lose_are_replaced(monkeypatch):
    """An allocation turned upside down: what matters most gets the fewest bits."""
    from tilesmith.precision.adaptive import choice

    true = choice.entropy_losses
    monkeypatch.setattr(choice, "entropy_losses", lambda h, s, widths: true(-h, -s, widths))
    config = PrecisionConfig(target_memory_reduction=0.75)
    stats = create_ultra_precision_module(_uneven(), config, calibration=_inputs(64)).get_precision_stats()
    assert stats.strategy == "uniform" and "did not win" in stats.fallback
    assert stats.held_out["adaptive"] >= min(stats.held_out["uniform"], stats.held_out["dealt"])
    used = {width for row in stats.layers.values() for width, n in row.tiles.items() if n}
    assert stats.held_out["dealt"] < stats.held_out["uniform"] and used == {3, 4}


@pytest.mark.parametrize("reduction", [0.6, 0.66])
def test_widths_drawn_at_random_do_not_win(monkeypatch, reduction):
    """Between two widths of the grid, more bytes alone beat one width for all tiles."""
    from tilesmith.precision.adaptive import choice

    true = choice.entropy_losses

    def drawn(h, s, widths):
        scores = 3 * torch.rand(h.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return true(scores, torch.zeros_like(scores), widths)

    monkeypatch.setattr(choice, "entropy_losses", drawn)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    x = torch.randn(256, 256)
    config = PrecisionConfig(target_memory_reduction=reduction)
    stats = create_ultra_precision_module(model, config, calibration=x).get_precision_stats()
    assert stats.strategy == "uniform" and "did not win" in stats.fallback
    assert stats.held_out["adaptive"] < stats.held_out["uniform"]
    assert stats.memory_savings_ratio >= reduction


@pytest.mark.parametrize("options", [WIDTHS, WIDTHS[1:]])
@pytest.mark.parametrize("seed", range(3))
def test_dealt_widths_take_as_many_bytes(options, seed):
    layers = {"a": nn.Linear(192, 40), "b": nn.Linear(64, 80)}
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: like.shape for name, like in uniform(layers, 2).items()}
    likes = {n: torch.tensor(options)[torch.randint(len(options), s, generator=generator)] for n, s in shapes.items()}
    for like in (likes, uniform(layers, options[0]), uniform(layers, 8)):
        found = dealt(layers, options, like)
        bits = [sum(int(w.sum()) for w in widths.values()) for widths in (like, found)]
        used = sorted({int(w) for widths in found.values() for w in widths.unique()})
        assert 0 <= bits[0] - bits[1] < 2 and {name: w.shape for name, w in found.items()} == shapes
        assert len(used) < 3 and options.index(used[-1]) - options.index(used[0]) == len(used) - 1
        assert all(torch.equal(found[name], again) for name, again in dealt(layers, options, like).items())


@pytest.mark.parametrize(
    "field",
    [
        {"entropy_threshold": 2.5}, {"gradient_weight": 0.0}, {"activation_weight": 0.8},
        {"base_precision": PrecisionFormat.FP32}, {"target_memory_reduction": 0.7},
        {"allocation_strategy": FISHER}, {"quantization_mode": QuantizationMode.STATIC},
    ],
    ids=str,
)  # fmt: skip
def test_every_field_changes_something(field):
    x = _inputs()
    first = create_ultra_precision_module(_uneven(), PrecisionConfig(target_memory_reduction=0.72), calibration=x)
    config = PrecisionConfig(**{"target_memory_reduction": 0.72, **field})
    other = create_ultra_precision_module(_uneven(), config, calibration=x)
    assert not torch.equal(first(x), other(x))


def test_weights_of_calibration_data():
    x, uniform = _inputs(), {"target_memory_reduction": 0.72, "allocation_strategy": AllocationStrategy.UNIFORM}
    first = create_ultra_precision_module(_uneven(), PrecisionConfig(**uniform), calibration=x)
    other = PrecisionConfig(**uniform, activation_weight=0.8)
    assert not torch.equal(first(x), create_ultra_precision_module(_uneven(), other, calibration=x)(x))
    for config in (other, PrecisionConfig(gradient_weight=0.6)):
        with pytest.raises(ValueError, match="gradient_weight and activation_weight weigh calibration data; pass"):
            create_ultra_precision_module(_uneven(), config)


def test_loss_fn_and_batches():
    model, (x, y) = _uneven(), (_inputs(64), torch.randint(50, (64,)))
    batches = [{"x": a, "y": b} for a, b in zip(x.chunk(4), y.chunk(4))]

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    config = PrecisionConfig(target_memory_reduction=0.75)
    stats = create_ultra_precision_module(model, config, calibration=batches, loss_fn=loss_fn).get_precision_stats()
    with torch.no_grad():
        assert stats.held_out["original"] == pytest.approx(float(loss_fn(model, batches[-1])))


def test_a_language_model(tmp_path):
    pytest.importorskip("transformers")
    from optimize_models import batch, build

    model = build("llama").eval()
    ids = batch("llama")["input_ids"]
    packed = create_ultra_precision_module(
        model.half(), PrecisionConfig(target_memory_reduction=0.3), calibration=[{"input_ids": ids}] * 3
    )
    assert packed.get_precision_stats().memory_savings_ratio >= 0.3
    assert packed(input_ids=ids).logits.isfinite().all()


def test_saved_and_loaded(tmp_path):
    pytest.importorskip("safetensors")
    config, x = PrecisionConfig(target_memory_reduction=0.75, quantization_mode=QuantizationMode.STATIC), _inputs(64)
    packed = create_ultra_precision_module(_uneven(), config, calibration=x)
    packed.save_packed(tmp_path / "model.safetensors")
    other = _uneven(seed=5)
    kept = copy.deepcopy(other.state_dict())
    loaded = load_ultra_precision_module(other, tmp_path / "model.safetensors")
    assert torch.equal(loaded(x), packed(x))
    assert loaded.get_precision_stats() == packed.get_precision_stats() and loaded.config == config
    assert all(torch.equal(kept[n], t) for n, t in other.state_dict().items())
    with pytest.raises(ValueError, match="no linear layer '0'"):
        load_ultra_precision_module(nn.Sequential(nn.ReLU()), tmp_path / "model.safetensors")
    wider = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 50))
    with pytest.raises(ValueError, match="0 is 192 x 128, the model's 256 x 128"):
        load_ultra_precision_module(wider, tmp_path / "model.safetensors")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.inner(self.embedding(x)))


def test_tied_weights_stay(tmp_path):
    model, x = Tied(), torch.arange(64).view(4, 16)
    packed = create_ultra_precision_module(model.half(), PrecisionConfig(target_memory_reduction=0.3))
    stats = packed.get_precision_stats()
    assert set(stats.layers) == {"inner"} and "embedding.weight" in stats.skipped["head"]
    assert packed.model.head.weight is packed.model.embedding.weight is model.embedding.weight
    assert stats.total_bytes == bytes_of(packed)
    packed.save_packed(tmp_path / "tied.safetensors")
    loaded = load_ultra_precision_module(Tied().half(), tmp_path / "tied.safetensors")
    assert loaded.model.head.weight is loaded.model.embedding.weight
    assert torch.equal(loaded(x), packed(x))


@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_a_model_that_is_one_layer(tmp_path, strategy):
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 48), _inputs(64)
    config = PrecisionConfig(allocation_strategy=strategy, target_memory_reduction=0.7)
    packed = create_ultra_precision_module(layer, config, calibration=x)
    stats = packed.get_precision_stats()
    assert set(stats.layers) == {""} and stats.memory_savings_ratio >= 0.7 and isinstance(packed.model, PackedLinear)
    assert type(layer) is nn.Linear and not torch.equal(packed(x), layer(x))
    assert strategy is UNIFORM or stats.held_out["adaptive"] != stats.held_out["original"]
    packed.save_packed(tmp_path / "layer.safetensors")
    loaded = load_ultra_precision_module(nn.Linear(128, 48), tmp_path / "layer.safetensors")
    assert torch.equal(loaded(x), packed(x)) and loaded.get_precision_stats() == stats
    with pytest.raises(ValueError, match="the model is 48 x 128, the model's 32 x 128"):
        load_ultra_precision_module(nn.Linear(128, 32), tmp_path / "layer.safetensors")


def test_opportunities():
    model = _uneven()
    before = copy.deepcopy(model.state_dict())
    found = analyze_precision_opportunities(model, _inputs())
    assert 0 < found["potential_savings"] < 1 and found["recommendations"]
    assert set(found["sensitivity"]) == set(found["bits"]) == {"0", "2", "3"} and not found["skipped"]
    distance = found["predicted_distance"]
    assert list(distance) == list(WIDTHS) and all(distance[a] > distance[b] for a, b in itertools.pairwise(WIDTHS))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    layers = {n: m for n, m in model.named_children() if isinstance(m, nn.Linear)}
    x, measured = _inputs(256, seed=3), copy.deepcopy(model)
    for name, widths in uniform(layers, 3).items():
        setattr(measured, name, pack_layer(layers[name], widths))
    real = float((measured(x) - model(x)).square().mean() / model(x).square().mean())
    assert real / 4 < distance[3] < real * 4


# what goes wrong ----------------------------------------------------------------------------------------------------


def _fails_later(model, batch):
    """A loss that can be computed at first, and no more once layers are packed."""
    if any(isinstance(m, PackedLinear) for m in model.modules()):
        raise RuntimeError("out of patience")
    return model(batch).square().mean()


X = _inputs(8)
REFUSED = [
    ("no module", lambda m: create_ultra_precision_module("m"), TypeError, "model must be a torch.nn.Module"),
    ("config", lambda m: create_ultra_precision_module(m, {}), TypeError, "config must be a PrecisionConfig"),
    ("meta", lambda m: create_ultra_precision_module(m.to("meta")), ValueError, "0.weight is on meta; load"),
    (
        "no layer",
        lambda m: create_ultra_precision_module(nn.Sequential(nn.Linear(30, 64))),
        ValueError,
        "no linear layer is eligible .0: in_features is 30; multiples of 64",
    ),
    (
        "nan",
        lambda m: create_ultra_precision_module(nn.Sequential(_poisoned(m[0]))),
        ValueError,
        "not finite or exceed 30000",
    ),
    (
        "target",
        lambda m: create_ultra_precision_module(m, PrecisionConfig(target_memory_reduction=0.95)),
        ValueError,
        "at most 0.8.* can be had",
    ),
    (
        "static",
        lambda m: create_ultra_precision_module(m, PrecisionConfig(quantization_mode=QuantizationMode.STATIC)),
        ValueError,
        "STATIC rounds by the layers' inputs; pass calibration=",
    ),
    ("loss_fn", lambda m: create_ultra_precision_module(m, loss_fn=len), ValueError, "loss_fn needs calibration="),
    ("twice", lambda m: create_ultra_precision_module(create_ultra_precision_module(m)), ValueError, "packed already"),
    (
        "columns",
        lambda m: create_ultra_precision_module(m, calibration=X[:, :5]),
        ValueError,
        "calibration does not fit",
    ),
    ("one row", lambda m: create_ultra_precision_module(m, calibration=X[:1]), ValueError, "2 rows or more"),
    ("one batch", lambda m: create_ultra_precision_module(m, calibration=[X]), ValueError, "1 batches; it must have 2"),
    (
        "no batches",
        lambda m: create_ultra_precision_module(m, calibration=3),
        TypeError,
        "calibration must be a tensor",
    ),
    ("kind", lambda m: create_ultra_precision_module(m, calibration=["a", "b"]), TypeError, "batch 0 is str"),
    ("infinite", lambda m: create_ultra_precision_module(m, calibration=X / 0), ValueError, "must be finite"),
    (
        "batch in the middle",
        lambda m: create_ultra_precision_module(m, calibration=[X, X[:, :5], X, X]),
        ValueError,
        "calibration does not fit the model: batch 1 raises RuntimeError",
    ),
    (
        "infinite in the middle",
        lambda m: create_ultra_precision_module(m, calibration=[X, X, X / 0, *[X] * 6]),
        ValueError,
        "on batch 2 the model's loss or output is nan; it must be finite",
    ),
    (
        "loss",
        lambda m: create_ultra_precision_module(m, calibration=X, loss_fn=lambda m, b: 1.0),
        ValueError,
        "loss_fn must return a tensor",
    ),
    (
        "late",
        lambda m: create_ultra_precision_module(m, calibration=X, loss_fn=_fails_later),
        RuntimeError,
        "out of patience",
    ),
    ("sample", lambda m: analyze_precision_opportunities(m, 3), TypeError, "sample_input must be a tensor"),
    (
        "sample fit",
        lambda m: analyze_precision_opportunities(m, X[:, :5]),
        ValueError,
        "sample_input does not fit the model: it raises RuntimeError",
    ),
    (
        "sample infinite",
        lambda m: analyze_precision_opportunities(m, X / 0),
        ValueError,
        "sample_input: on it the model's loss or output is nan",
    ),
    (
        "sample's output",
        lambda m: analyze_precision_opportunities(_Named(m), X),
        ValueError,
        "sample_input does not fit.*the model returned dict; without a loss_fn it must return a floating tensor",
    ),
]


class _Named(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return {"out": self.model(x)}


def _poisoned(layer):
    with torch.no_grad():
        layer.weight[3, 3] = float("nan")
    return layer


@pytest.mark.parametrize(("call", "error", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_bad_input_is_refused_and_changes_nothing(call, error, match):
    model = _uneven().train()
    before, modules = {n: t.clone() for n, t in model.state_dict().items()}, list(model.modules())
    with pytest.raises(error, match=match):
        call(model)
    if match.startswith(("0.weight is on meta", "not finite")):
        return
    assert list(model.modules()) == modules and all(m.training for m in modules)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in modules)


@pytest.mark.parametrize(
    ("field", "error", "match"),
    [
        ({"target_memory_reduction": 0.0}, ValueError, "between 0 and 1"),
        ({"target_memory_reduction": 1}, ValueError, "between 0 and 1"),
        ({"target_memory_reduction": "0.4"}, TypeError, "must be a finite number"),
        ({"entropy_threshold": 9.0}, ValueError, r"in \[0, 8\]"),
        ({"gradient_weight": -0.1}, ValueError, "0 or more"),
        ({"activation_weight": float("nan")}, TypeError, "finite"),
        (
            {"gradient_weight": 0.6, "allocation_strategy": AllocationStrategy.UNIFORM},
            ValueError,
            "gradient_weight is 0.6, which changes nothing with UNIFORM widths and DYNAMIC codes",
        ),
        (
            {
                "activation_weight": 0.0,
                "allocation_strategy": AllocationStrategy.MEASURED,
                "quantization_mode": QuantizationMode.STATIC,
            },
            ValueError,
            "activation_weight is 0.0, which changes nothing with MEASURED widths and STATIC codes",
        ),
        ({"base_precision": PrecisionFormat.INT4}, ValueError, "counted against FP32, FP16 or BF16"),
        ({"allocation_strategy": "entropy"}, TypeError, "must be of AllocationStrategy"),
        ({"quantization_mode": None}, TypeError, "must be of QuantizationMode"),
    ],
    ids=str,
)
def test_configs_that_are_refused(field, error, match):
    with pytest.raises(error, match=match):
        PrecisionConfig(**field)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": torch.ones(2, 64)}, ValueError, r"x has shape \(2, 64\)"),
        ({"x": torch.ones(2, 128, dtype=torch.int32)}, TypeError, "x has dtype torch.int32"),
        ({"codes": torch.zeros(4)}, TypeError, "codes is torch.float32"),
        ({"order": torch.zeros(2, 2)}, TypeError, "order is torch.float32"),
        ({"strips": torch.zeros(2, 4, dtype=torch.int32)}, TypeError, "strips is"),
        ({"scale": torch.ones(2, 2, 16)}, TypeError, "scale is torch.float32"),
        ({"zero": torch.ones(2, 2, 16, dtype=torch.float16, device="meta")}, ValueError, "zero is on meta"),
        ({"rows": 40}, ValueError, "rows is 40; 2 strips of 16 rows hold 17 to 32"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_the_op_refuses(change, error, match):
    layer = pack_layer(nn.Linear(128, 32), torch.tensor([[2, 4], [8, 3]]))
    args = {"x": torch.ones(2, 128), **dict(layer.named_buffers()), "rows": 32}
    with pytest.raises(error, match=match):
        ops.dequant_linear(**(args | change))
