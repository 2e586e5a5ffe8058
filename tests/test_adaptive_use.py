"""What else adaptive precision meets: hooks, modes, buffers, random numbers, inference mode, files that are none."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilesmith.attention.fusion import OptimizationLevel, create_unified_attention_fusion
from tilesmith.nn import Decoder, DecoderConfig
from tilesmith.precision import (
    AllocationStrategy,
    PackedLinear,
    PrecisionConfig,
    QuantizationMode,
    analyze_precision_opportunities,
    create_ultra_precision_module,
    load_ultra_precision_module,
)
from tilesmith.precision.adaptive.layers import bytes_of

HALF = PrecisionConfig(target_memory_reduction=0.5)
MOST = PrecisionConfig(target_memory_reduction=0.75)


def _uneven(activation=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 192), activation or nn.GELU(), nn.Linear(192, 64)).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(-1.5, 0.5, 128)
    return model


def _inputs(rows=64):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))


def test_activations_in_place_leave_the_outputs_their_gradients():
    """What a ReLU cuts off does not count, whether it writes into the layer's output or not."""
    models = [_uneven(nn.ReLU()), _uneven(nn.ReLU(inplace=True))]
    assert len({str(analyze_precision_opportunities(model, _inputs())) for model in models}) == 1
    plain, written = (create_ultra_precision_module(model, MOST, calibration=_inputs()) for model in models)
    assert plain.get_precision_stats() == written.get_precision_stats()
    assert torch.equal(plain(_inputs()), written(_inputs()))


class _ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(128, 64)

    def forward(self, x):
        return self.layer(input=x)


def test_layers_that_are_called_by_keyword():
    model = _ByKeyword()
    analyze_precision_opportunities(model, _inputs())
    packed = create_ultra_precision_module(model, HALF, calibration=_inputs())
    assert torch.equal(packed(_inputs()), packed.model.layer(_inputs()))


class _WithoutGradients(_ByKeyword):
    forward = torch.no_grad()(_ByKeyword.forward)


def _made_in_inference_mode():
    with torch.inference_mode():
        return _uneven()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (_WithoutGradients, "the loss has no gradients.*torch.no_grad"),
        (_made_in_inference_mode, "0.weight was made in inference mode"),
    ],
)
@pytest.mark.parametrize("call", ["create", "analyze"])
def test_models_without_gradients_are_refused(make, match, call):
    argument = {"create": "^calibration: ", "analyze": "sample_input: "}[call]
    with pytest.raises(ValueError, match=argument + match):
        if call == "create":
            create_ultra_precision_module(make(), HALF, calibration=_inputs())
        else:
            analyze_precision_opportunities(make(), _inputs())


def test_what_is_made_within_inference_mode_is_no_inference_tensor(tmp_path):
    model = _uneven()
    with torch.inference_mode():
        found = analyze_precision_opportunities(model, _inputs())
        packed = create_ultra_precision_module(model, MOST, calibration=_inputs())
        packed.save_packed(tmp_path / "packed.safetensors")
        loaded = load_ultra_precision_module(model, tmp_path / "packed.safetensors")
    assert found == analyze_precision_opportunities(model, _inputs())
    for made in (packed, loaded):
        x = _inputs().requires_grad_()
        made(x).sum().backward()
        assert x.grad.isfinite().all()


def test_layers_with_hooks_stay(tmp_path):
    """A hook may change what the layer returns, and nobody would call it on a packed one."""
    model = _uneven().bfloat16()
    plain = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=0.1))
    plain.save_packed(tmp_path / "packed.safetensors")
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    packed = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=0.1))
    assert "it has hooks" in packed.get_precision_stats().skipped["0"]
    assert type(packed.model[0]) is nn.Linear and isinstance(packed.model[2], PackedLinear)
    x = _inputs().bfloat16()
    assert torch.equal(packed(x), packed.model[2](model[1](model[0](x))))
    with pytest.raises(ValueError, match="at most .* can be had.* Of linear layers these stay: 0: it has hooks"):
        create_ultra_precision_module(model, MOST)
    with pytest.raises(ValueError, match="no linear layer '0' that could be packed .it has hooks"):
        load_ultra_precision_module(model, tmp_path / "packed.safetensors")


def test_each_module_keeps_its_mode(tmp_path):
    """A batch norm that is frozen, say, in a model in training mode."""
    model = nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.Dropout(0.5)).train()
    model[1].eval()
    packed = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=0.4), calibration=_inputs())
    packed.save_packed(tmp_path / "packed.safetensors")
    loaded = load_ultra_precision_module(model, tmp_path / "packed.safetensors")
    for made in (packed, loaded):
        assert made.training and [m.training for m in made.model.modules()] == [True, True, False, True]
    assert [m.training for m in model.modules()] == [True, True, False, True]


def test_tensors_that_lie_in_one_storage_count_each():
    """Fusion puts weights of the same size one below the other."""
    model = Decoder(DecoderConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4))
    expected = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert bytes_of(model) == expected
    create_unified_attention_fusion(model, optimization_level=OptimizationLevel.AGGRESSIVE)
    assert bytes_of(model) == expected


def test_state_dicts_that_make_no_packed_weight_are_not_loaded():
    """Kernels address memory by the tables: those of another packing, without its codes, must not get in."""
    first = create_ultra_precision_module(_uneven(), MOST, calibration=_inputs())
    other = create_ultra_precision_module(
        _uneven(), PrecisionConfig(target_memory_reduction=0.72), calibration=_inputs()
    )
    state = first.state_dict()
    before = {name: t.clone() for name, t in state.items()}
    assert not torch.equal(state["model.0.strips"], other.state_dict()["model.0.strips"])
    for name in ("model.0.strips", "model.0.order"):
        mixed = {name: other.state_dict()[name] if name.endswith("strips") else torch.zeros_like(state[name])}
        with pytest.raises(RuntimeError, match="model.0: packed weight: "):
            first.load_state_dict(mixed, strict=False)
        assert all(torch.equal(t, before[n]) for n, t in first.state_dict().items())
    first.load_state_dict(before)


@pytest.mark.parametrize(
    ("device", "match"),
    [("meta", "device is meta, where tensors have no values"), (3.5, "device must be a torch.device")],
)
def test_devices_that_do_not_compute(device, match, tmp_path):
    model, path = _uneven(), tmp_path / "packed.safetensors"
    create_ultra_precision_module(model, MOST).save_packed(path)
    for call in (
        lambda: create_ultra_precision_module(model, MOST, device),
        lambda: analyze_precision_opportunities(model, _inputs(), device),
        lambda: load_ultra_precision_module(model, path, device),
    ):
        with pytest.raises(ValueError, match=match):
            call()


class _Counts(nn.Module):
    """Writes into a buffer and draws random numbers whatever its mode is; one buffer is replaced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(128, 64)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("unseen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced + 1
        self.unseen.data += 1  # its version stays
        return self.layer(F.dropout(x, 0.1, training=True))


@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_buffers_and_random_numbers_are_left_as_they_were(strategy):
    model, state = _Counts(), torch.get_rng_state()
    analyze_precision_opportunities(model, _inputs())
    config = PrecisionConfig(
        target_memory_reduction=0.5, allocation_strategy=strategy, quantization_mode=QuantizationMode.STATIC
    )
    packed = create_ultra_precision_module(model, config, calibration=_inputs())
    for made in (model, packed.model):
        assert made.calls == 0 and made.replaced == 0 and made.unseen == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert packed.model.calls is model.calls  # what is not packed is shared


class _Caches(nn.Module):
    """Keeps a buffer that its first forward makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(128, 64)

    def forward(self, x):
        if not hasattr(self, "gain"):
            self.register_buffer("gain", torch.ones(64), persistent=False)
        return self.layer(x) * self.gain


@pytest.mark.parametrize("call", ["analyze", "create"])
def test_buffers_that_inference_mode_made(call):
    """They have no version, cannot be written outside of it, and cannot be saved for a backward."""
    model = _Caches()
    with torch.inference_mode():
        model(_inputs())
    assert model.gain.is_inference()
    if call == "analyze":
        analyze_precision_opportunities(model, _inputs())
    else:
        packed = create_ultra_precision_module(model, HALF, calibration=_inputs())
        assert packed(_inputs()).shape == (64, 64) and not packed.model.gain.is_inference()
    assert model.gain.is_inference() and torch.equal(model.gain, torch.ones(64))


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (None, "its format is None, known is 'tilesmith packed 1'"),
        ("[1", "its metadata cannot be read"),
        ("[]", "its metadata cannot be read"),
        ({"format": "tilesmith packed 1"}, "incomplete: it lacks 'config'"),
        ({"config": {"target_memory_reduction": 7}}, "incomplete: PrecisionConfig: target_memory_reduction is 7"),
        ({"config": {"base_precision": "fp3"}}, "incomplete: 'fp3' is not a valid PrecisionFormat"),
        ({"made": {}}, "incomplete: .*missing"),
        ({"layers": {"0": "many"}}, "incomplete: layers must have numbers of rows"),
        ({"layers": []}, "incomplete: 'list' object has no attribute 'values'"),
        ({"aliases": {"a": "b"}}, "incomplete: it lacks 'b'"),
    ],
    ids=str,
)
def test_files_that_are_no_packed_models(said, match, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "packed.safetensors"
    create_ultra_precision_module(_uneven(), MOST).save_packed(path)
    with safe_open(path, framework="pt") as file:
        tensors, genuine = {n: file.get_tensor(n) for n in file.keys()}, json.loads(file.metadata()["tilesmith"])  # noqa: SIM118
    if isinstance(said, dict) and "format" not in said:
        said = genuine | said
    metadata = None if said is None else {"tilesmith": said if isinstance(said, str) else json.dumps(said)}
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=match):
        load_ultra_precision_module(_uneven(), path)


def test_files_that_are_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file"):
        load_ultra_precision_module(_uneven(), tmp_path / "nowhere")
    (tmp_path / "notes").write_text("notes")
    with pytest.raises(ValueError, match="notes is not a safetensors file"):
        load_ultra_precision_module(_uneven(), tmp_path / "notes")


def test_an_analysis_advises_16_bits_where_wide_embeddings_use_up_what_packing_saves():
    model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    tokens = torch.arange(16)
    wide = analyze_precision_opportunities(model, tokens)
    assert "Cast the model to 16 bits first: 0.13 MiB of float32 parameters" in wide["recommendations"][0]
    half = analyze_precision_opportunities(model.bfloat16(), tokens)
    assert half["potential_savings"] > wide["potential_savings"]
    assert not any("16 bits first" in said for said in half["recommendations"])
