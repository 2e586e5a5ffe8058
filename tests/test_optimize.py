"""`optimize` on whole models: the same numbers, nothing else changed, everything taken back."""

import contextvars
import copy
import functools
import importlib
import inspect
import math
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilesmith.engine import use
from tilesmith.models import optimize, undo
from tilesmith.models.logits import LazyLogits
from tilesmith.rewrite import RewriteError

OPS = (
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rope", "swiglu", "geglu", "silu", "gelu", "attention",
)  # fmt: skip


@pytest.fixture(autouse=True)
def ops_everywhere():
    """Run the ops by their reference also where a module's own forward would run, for want of a kernel."""
    with use(**dict.fromkeys(OPS, "reference")):
        yield


# Plain modules --------------------------------------------------------------------------------------------------------


class Llama(nn.Module):
    """RMSNorm that rounds before the weight."""

    def __init__(self, width=24, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), eps

    def forward(self, x):
        """Normalise the last dimension."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Gemma(Llama):
    """RMSNorm times 1 + weight, rounded once."""

    def forward(self, x):
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class HalfRMSNorm(Llama):
    """Looks like one and is not."""

    def forward(self, x):
        """Half of a norm."""
        return super().forward(x) * 0.5


class GatedRMSNorm(Llama):
    """Takes a gate."""

    def forward(self, x, gate):
        """A norm times a gate."""
        return super().forward(x) * F.silu(gate)


class ClippedGELU(nn.Module):
    """Differs for large inputs."""

    def forward(self, x):
        """At most 10."""
        return F.gelu(x).clamp(-10, 10)


def rows_of(model):
    return {(row.fqn, row.rule): row for row in model.tilesmith_report.rows}


@pytest.mark.parametrize(
    ("norm", "says"),
    [
        (Llama(), "rounded before"),
        (Gemma(), "(1 + weight), rounded after"),
        (nn.RMSNorm(24), "rounded after"),
        (nn.RMSNorm(24, elementwise_affine=False), "RMSNorm"),
        (nn.LayerNorm(24), "LayerNorm"),
        (nn.LayerNorm(24, bias=False), "LayerNorm"),
    ],
)
def test_norms_are_told_apart(norm, says):
    model = nn.Sequential(norm).bfloat16()
    x = torch.randn(7, 24).bfloat16()
    y = model(x)
    optimize(model, strict=True)
    assert says in rows_of(model)["0", "norm"].reason
    assert (model(x) != y).float().mean() < 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    assert (model(x) != undo(copy.deepcopy(model))(x)).float().mean() < 0.02


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (HalfRMSNorm(), "differs from RMSNorm"),
        (GatedRMSNorm(), r"takes \(x, gate\)"),
        (nn.LayerNorm((3, 24)), "more than the last dimension"),
        (nn.GroupNorm(2, 24), "differs|raised"),
        (nn.SiLU(inplace=True), "in place"),
        (ClippedGELU(), "differs from silu, gelu"),
    ],
)
def test_what_only_looks_alike_stays(module, reason):
    cls = type(module)
    model = nn.Sequential(module)
    optimize(model)
    assert type(model[0]) is cls
    with pytest.raises(RewriteError, match=reason):
        optimize(model, strict=True)


def test_mixed_dtypes_keep_the_dtype_of_the_original():
    model = nn.Sequential(Llama())
    x = torch.randn(3, 24).bfloat16()
    y = model(x)
    optimize(model)
    assert y.dtype is torch.float32 and torch.equal(model(x), y)


class Gated(nn.Module):
    """A gated MLP in one of several guises."""

    def __init__(self, act, limit=math.inf, hidden=12, inner=20):
        super().__init__()
        self.a, self.b = nn.Linear(hidden, inner), nn.Linear(hidden, inner)
        self.c, self.act, self.limit = nn.Linear(inner, hidden), act, limit
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        """b is the gate."""
        return self.c(self.drop(self.a(x) * self.act(self.b(x)).clamp(max=self.limit)))


class PackedMLP(nn.Module):
    """Gate and up in one layer."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(12, 40), nn.Linear(20, 12)

    def forward(self, x):
        """Gate first."""
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize(
    ("mlp", "says"),
    [
        (Gated(nn.SiLU()), r"c\(silu\(b\) \* a\)"),
        (Gated(nn.GELU()), r"c\(gelu\(b\) \* a\)"),
        (PackedMLP(), r"down\(gelu_tanh\(one half of both\) \* the other\)"),
    ],
)
def test_gated_mlps_are_found_by_what_they_compute(mlp, says):
    model, x = nn.Sequential(mlp), torch.randn(5, 12)
    torch.manual_seed(0)
    y = model(x)
    rng = torch.get_rng_state()
    optimize(model)
    assert torch.equal(torch.get_rng_state(), rng)
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), y)
    row = rows_of(model)["0", "mlp"]
    assert row.action == "replaced" and re.search(says, row.reason)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.Tanh()])
def test_gated_mlps_with_other_activations_stay(act):
    model = optimize(nn.Sequential(Gated(act)))
    assert type(model[0]) is Gated


def test_gated_mlps_that_clamp_stay():
    model = optimize(nn.Sequential(Gated(nn.SiLU(), limit=7.0)))
    assert type(model[0]) is Gated


class DroppingMLP(PackedMLP):
    """A dropout that only training shows."""

    def forward(self, x):
        """Gate first."""
        return F.dropout(super().forward(x), 0.1, self.training)


def test_what_only_training_shows_is_seen():
    model = nn.Sequential(DroppingMLP()).eval()
    assert type(optimize(model)[0]) is DroppingMLP


class Layer(nn.Module):
    """The ways in which layers add and normalise."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.body = nn.Linear(width, width)

    def forward(self, x, extra=None):
        """A sum that lives on, one behind an `if`, one inside a call, one that nobody reads again."""
        residual = x
        x = self.body(x)
        x = residual + x
        residual = x
        x = self.norm(x)
        x = x + residual
        if extra is not None:
            residual = x + extra
            x = self.post(residual)
        residual = x
        x = self.norm(x)
        total = x + residual
        y = self.post(total)
        y = self.post(y + total)
        z = y + 1
        z = self.norm(z)
        return z - y


@pytest.mark.parametrize("extra", [False, True])
def test_sums_that_go_into_norms_are_fused(extra):
    layer, x = Layer(), torch.randn(2, 5, 16, requires_grad=True)
    args = (x, torch.randn(2, 5, 16)) if extra else (x,)
    y = layer(*args)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    model = optimize(nn.ModuleList([layer]))
    assert rows_of(model)["0", "add_norm"].ops == ("add_layer_norm",)
    with Calls() as calls:
        torch.testing.assert_close(layer(*args), y)
    assert calls["add_layer_norm"] == 4  # the sum with 1 is none of two tensors
    torch.testing.assert_close(torch.autograd.grad(layer(*args).square().sum(), x)[0], dx)
    layer.norm.register_forward_hook(lambda module, inputs, output: output * 0)
    hooked = layer(*args)
    undo(model)
    torch.testing.assert_close(hooked, layer(*args))


def test_plain_models_and_their_reports():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.MultiheadAttention(8, 2), nn.Dropout())
    ids = [id(p) for p in model.parameters()]
    assert optimize(model) is model
    rows = rows_of(model)
    assert rows["1", "activation"].ops == ("gelu",) and rows["2", "norm"].ops == ("layer_norm",)
    assert rows["3", "attention"].action == "skipped"
    assert rows["0", ""].reason == "no rule for Linear" and rows["4", ""].reason == "no rule for Dropout"
    assert [id(p) for p in model.parameters()] == ids
    assert undo(model) is model and [type(m) for m in model] == [
        nn.Linear, nn.GELU, nn.LayerNorm, nn.MultiheadAttention, nn.Dropout,
    ]  # fmt: skip
    assert "tilesmith_report" not in model.__dict__


@pytest.mark.parametrize("first", [True, False])
def test_transformer_encoder_of_torch(first):
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=first)
    x = torch.randn(2, 5, 16)
    padding = torch.arange(5).expand(2, 5) > 3
    for mode in (True, False):
        model.train(mode)
        wanted = model(x, src_key_padding_mask=padding)
        optimize(model)
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), wanted)
        undo(model)


def test_only_and_exclude():
    model = optimize(nn.Sequential(nn.GELU(), nn.LayerNorm(8), nn.LayerNorm(8)), only="norm", exclude=["2"])
    assert [row.fqn for row in model.tilesmith_report.replaced] == ["1"]
    model = optimize(nn.Sequential(nn.GELU(), nn.LayerNorm(8)), exclude="norm")
    assert [row.fqn for row in model.tilesmith_report.replaced] == ["0"]
    with pytest.raises(ValueError, match="rules are norm"):
        optimize(model, only=["norms"])
    with pytest.raises(TypeError, match="takes a torch.nn.Module"):
        optimize("model")


# Lazy logits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lazy():
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 6, requires_grad=True)
    weight, bias = nn.Parameter(torch.randn(9, 6)), nn.Parameter(torch.randn(9))
    return LazyLogits(hidden, weight, bias, torch.float32), F.linear(hidden, weight, bias)


USES = {
    "argmax": lambda z: z.argmax(-1),
    "slice": lambda z: z[..., :-1, :] * 1,
    "slice of the vocabulary": lambda z: z[..., 3:],
    "index": lambda z: z[0, 1],
    "all": lambda z: z[...] + 0,
    "view": lambda z: z.view(-1, 9) - 1,
    "another view": lambda z: z.view(2, 45).sum(-1),
    "add": lambda z: 1 - z + z,
    "compare": lambda z: (z > 0) & (z > 0),
    "softmax": lambda z: torch.softmax(z.float() / 2, -1),
    "nll": lambda z: F.nll_loss(F.log_softmax(z[:, :-1].reshape(-1, 9), -1), torch.arange(8)),
    "class weights": lambda z: F.cross_entropy(z.view(-1, 9), torch.arange(10) % 9, weight=torch.arange(9.0)),
    "smoothing": lambda z: F.cross_entropy(z.view(-1, 9), torch.arange(10) % 9, label_smoothing=0.2),
    "none": lambda z: F.cross_entropy(z.view(-1, 9), torch.arange(10) % 9, ignore_index=3, reduction="none"),
    "classes second": lambda z: F.cross_entropy(z.transpose(1, 2), torch.ones(2, 5, dtype=torch.long)),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, 9), torch.full((10, 9), 1 / 9)),
    "soft cap": lambda z: F.cross_entropy((torch.tanh(z * 3 / 5) * 5).view(-1, 9), torch.arange(10) % 9),
    "odd steps": lambda z: F.cross_entropy(torch.tanh(torch.tanh(z)).view(-1, 9), torch.arange(10) % 9),
    "in place": lambda z: F.cross_entropy(masked(z).view(-1, 9), torch.arange(10) % 8),
    "join": lambda z: torch.cat([z, torch.stack((z, z))[0]]),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())),
    "iterate": lambda z: torch.stack([len(z) * row for row in z]),
}


def masked(z):
    z[..., 8:] = -1e4
    return z


@pytest.mark.parametrize("use", USES)
def test_lazy_logits_are_used_like_a_tensor(lazy, use):
    logits, real = lazy
    expected, found = USES[use](real.clone()), USES[use](logits)
    found = found.tensor() if isinstance(found, LazyLogits) else found
    torch.testing.assert_close(found, expected)
    if expected.requires_grad:
        leaves = logits.hidden, logits.weight, logits.bias
        wanted = torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), leaves), wanted)


def test_lazy_logits_describe_themselves_without_being_computed(lazy):
    logits, real = lazy
    assert (logits.shape, logits.ndim, logits.dim(), logits.size(-1), logits.numel()) == (real.shape, 3, 3, 9, 90)
    assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float32, real.device, True)
    assert logits.bfloat16().dtype is torch.bfloat16 and logits.to("cpu") is not None
    assert "LazyLogits" in repr(LazyLogits(logits.hidden, logits.weight, None, torch.float32))


def test_lazy_logits_have_gradients_after_a_look_without(lazy):
    logits, real = lazy
    with torch.no_grad():
        assert not logits.tensor().requires_grad
    assert logits.tensor().requires_grad and torch.equal(logits.tensor(), real)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, functools.partial(torch.optim.Adam, fused=True)])
def test_lazy_logits_refuse_to_be_computed_from_newer_weights(lazy, kind):
    logits, real = lazy
    optimizer = kind([logits.weight], lr=0.1)
    real.sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"before optimizer.step\(\)"):
        logits.argmax(-1)


# Models of transformers -----------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADED = {**GROUPED, "head_dim": 16}
SEQ2SEQ = {
    "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 128, "decoder_start_token_id": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
}  # fmt: skip
OTHERS = {
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADED, "num_local_experts": 4, "sliding_window": 4}),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", HEADED),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**GROUPED, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, "max_position_embeddings": 80}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**SIZES, "pad_token_id": 0, "local_attention": 8}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
         "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**{k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")},
         "image_size": 32, "patch_size": 8},
    ),
}  # fmt: skip
CAUSAL = ("llama", "qwen3", "gemma2", "gpt2")
NO_DROPOUT = (
    "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "dropout_rate", "activation_dropout",
)  # fmt: skip


def build(family, layers=2, attention="eager"):
    """A small model of a family in training mode, with weights that are not those of its initialisation."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model_name, config_name, sizes = {**FAMILIES, **OTHERS}[family]
    sizes = {k: layers if k in ("num_hidden_layers", "n_layer") else v for k, v in sizes.items()}
    config = getattr(transformers, config_name)(**sizes)
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others take no float64
    model = getattr(transformers, model_name)._from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # otherwise transformers warns in the middle of a traced forward (GPT-2)
    return model


def batch(family, padded="right", length=12):
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 120, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padded == "right":
        mask[1, -3:] = 0
    if padded == "left":  # rows that see nothing
        mask[1, :4] = 0
    # No loss of a token that was not seen, nor by one: the last hidden row would predict the first visible label.
    labels[(mask == 0) | (mask.roll(1) == 0)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(model, inputs, **more):
    """Loss, logits of tokens that count, and every gradient."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    out = model(**inputs, **more)
    out.loss.backward()
    logits = out.logits.detach()
    if "attention_mask" in inputs and logits.shape[:2] == inputs["attention_mask"].shape:
        logits = logits[inputs["attention_mask"].bool()]
    return out.loss.detach(), logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_within_budget(found, same_dtype, oracle):
    """Error at most 2 * (error of the original in this dtype + eps * the largest value of its kind)."""
    eps = torch.finfo(next(iter(same_dtype[2].values())).dtype).eps

    def check(name, f, s, o, largest):
        assert f.dtype is s.dtype and f.shape == s.shape
        error, own = ((t.double() - o.double()).abs().max().item() for t in (f, s))
        assert error <= 2 * (own + eps * largest), f"{name}: error {error:.2e}, the original's {own:.2e}"

    for name, f, s, o in zip(("loss", "logits"), found, same_dtype, oracle):
        check(name, f, s, o, o.abs().max().item())
    assert list(found[2]) == list(same_dtype[2])
    largest = max(g.abs().max().item() for g in oracle[2].values())
    for name, gradient in found[2].items():
        check(name, gradient, same_dtype[2][name], oracle[2][name], largest)


class Calls(TorchDispatchMode):
    """Counts the library's ops that run inside the `with`."""

    def __enter__(self):
        super().__enter__()
        self.counts = {}
        return self.counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tilesmith":
            name = function.__name__.split(".")[0]
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


# calls of one training step; a gated product is computed again in the backward instead of being kept
EXPECTED = {
    "llama": {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "swiglu": 4},
    "qwen3": {"rms_norm": 7, "add_rms_norm": 2, "rope": 2, "swiglu": 4},
    "gemma2": {"rms_norm": 7, "add_rms_norm": 2, "rope": 2, "geglu": 4},
    "gpt2": {"layer_norm": 3, "add_layer_norm": 2, "gelu": 2},
    "bert": {"layer_norm": 2, "add_layer_norm": 4, "gelu": 3},
}


@pytest.mark.parametrize("padded", ["right", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_computes_the_same_and_comes_back(family, padded):
    model, inputs = build(family), batch(family, padded)
    oracle = train(copy.deepcopy(model).double(), inputs)
    original = train(model, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    state, attributes = model.state_dict(), {n: set(m.__dict__) for n, m in model.named_modules()}
    classes = [type(m) for m in model.modules()]

    assert optimize(model, strict=True) is model
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    assert list(model.state_dict()) == list(state)
    with Calls() as calls:
        found = train(model, inputs)
    forward = {name: n for name, n in calls.items() if not name.endswith("_vjp")}
    assert forward == {**EXPECTED[family], "attention": 2, "linear_cross_entropy": 1}
    assert_within_budget(found, original, oracle)

    undo(model)
    assert [type(m) for m in model.modules()] == classes
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == attributes
    back = train(model, inputs)
    assert torch.equal(back[0], original[0]) and torch.equal(back[1], original[1])
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())

    optimize(model)
    train(model, inputs)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_family_in_bfloat16(family):
    model, inputs = build(family), batch(family)
    half = copy.deepcopy(model).bfloat16()
    oracle = train(copy.deepcopy(half).float(), inputs)
    original = train(half, inputs)
    assert_within_budget(train(optimize(half, strict=True), inputs), original, oracle)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_compute_the_same(family):
    try:
        model = build(family)
    except AttributeError:
        pytest.skip(f"this transformers has no {family}")
    inputs = batch(family)
    oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    assert_within_budget(train(optimize(model), inputs), original, oracle)
    assert len(model.tilesmith_report.replaced) >= 5
    back = train(undo(model), inputs)
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_under_every_mask(family):
    for padded in ("left", "right", None):
        if padded == "left" and family == "gemma2":
            continue  # its own attention is NaN in such rows, in float64
        attention_before = "sdpa" if family != "gemma2" else "eager"
        model, inputs = build(family, layers=1, attention=attention_before), batch(family, padded)
        oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
        optimize(model, only="attention")
        with Calls() as calls:
            found = train(model, inputs)
        assert calls["attention"] == 1
        assert_within_budget(found, original, oracle)


@pytest.mark.parametrize("family", CAUSAL)
def test_generate(family):
    model = build(family).eval()
    inputs = {k: v for k, v in batch(family, "left").items() if k != "labels"}

    def tokens():
        options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
        return [model.generate(**inputs, **options, cache_implementation=kind) for kind in ("dynamic", "static")]

    wanted = tokens()
    optimize(model)
    for found in (tokens(), contextvars.Context().run(tokens)):
        assert all(torch.equal(f, w) for f, w in zip(found, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_kernel_the_own_forward_runs(family):
    def check():
        for padding in ("left", "right", None):
            model = build(family, attention="sdpa" if family != "gemma2" else "eager")
            inputs = batch(family, padding)
            original = train(model, inputs)
            optimize(model)
            with Calls() as calls:
                found = train(model, inputs)
            assert set(calls) <= {"linear_cross_entropy", "linear_cross_entropy_vjp"}
            assert torch.equal(found[1], original[1])

    contextvars.Context().run(check)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_copies_and_pickles(family):
    model, inputs = optimize(build(family)), batch(family)
    loss, _, gradients = train(model, inputs)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.gradient_checkpointing_enable()
    with Calls() as calls:
        again = train(model, inputs)
    assert calls.get("swiglu", calls.get("geglu", calls.get("gelu"))) > 2
    model.gradient_checkpointing_disable()
    for other in (again, *(train(twin, inputs) for twin in twins)):
        torch.testing.assert_close(other[0], loss)
        torch.testing.assert_close(other[2], gradients)
    plain = build(family)
    wanted = train(plain, inputs)
    for twin in twins:
        assert twin.tilesmith_report == model.tilesmith_report
        torch.testing.assert_close(train(undo(twin), inputs)[2], wanted[2])
        assert [type(m) for m in twin.modules()] == [type(m) for m in plain.modules()]
        assert twin.config._attn_implementation == "eager" and model.config._attn_implementation == "tilesmith"


def test_unpickling_registers_attention():
    transformers = pytest.importorskip("transformers")
    from tilesmith.rewrite.variant import variant

    data = pickle.dumps(optimize(build("llama", layers=1)))
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop("tilesmith")
    variant.cache_clear()
    loss, _, _ = train(pickle.loads(data), batch("llama"))
    assert loss.isfinite()


@pytest.mark.parametrize("family", FAMILIES)
def test_compile_without_graph_breaks(family):
    torch._dynamo.reset()
    model, inputs = build(family, layers=1), batch(family)
    oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    out = compiled(**inputs)
    assert isinstance(out.logits, torch.Tensor if family == "bert" else LazyLogits)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    logits = out.logits.detach()[inputs["attention_mask"].bool()]
    assert_within_budget((out.loss.detach(), logits, gradients), original, oracle)


@pytest.mark.parametrize("family", FAMILIES)
def test_export(family):
    model = optimize(build(family, layers=1)).eval()
    inputs = {k: v for k, v in batch(family).items() if k != "labels"}
    if family in CAUSAL:
        inputs["use_cache"] = False
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False)
        torch.testing.assert_close(program.module()(**inputs).logits, model(**inputs).logits)
    assert any("tilesmith" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family):
    model, inputs = build(family), batch(family)
    oracle = train(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        original = train(model, inputs)
        found = train(optimize(model), inputs)
    assert found[0].dtype is original[0].dtype and found[1].dtype is original[1].dtype
    eps = torch.finfo(torch.bfloat16).eps
    for f, o, exact in zip(found[:2], original[:2], oracle[:2]):
        error, own = ((t.float() - exact).abs().max() for t in (f, o))
        assert error <= 2 * (own + eps * exact.abs().max())


def test_lazy_logits_of_a_model(lazy):
    model, inputs = build("llama"), batch("llama")
    wanted = model(**inputs).logits.detach()
    optimize(model)
    out = model(**inputs)
    assert isinstance(out.logits, LazyLogits) and out.logits.known is None
    assert torch.equal(out.logits.argmax(-1), wanted.argmax(-1))
    without = {k: v for k, v in inputs.items() if k != "labels"}
    assert isinstance(model(**without).logits, torch.Tensor)
    assert isinstance(model.lm_head(torch.randn(1, 64)), torch.Tensor)
    with torch.no_grad():
        assert isinstance(model(**inputs).logits, torch.Tensor)
    assert isinstance(model.eval()(**inputs).logits, torch.Tensor)


@pytest.mark.parametrize(
    "more", [{"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 9}, {"ignore_index": 5}]
)
def test_loss_arguments_arrive(more):
    model, inputs = build("gemma2"), batch("gemma2", padded=None)
    original = train(model, inputs, **more)
    optimize(model)
    with Calls() as calls:
        found = train(model, inputs, **more)
    assert calls["linear_cross_entropy"] == 1
    torch.testing.assert_close(found[0], original[0])
    torch.testing.assert_close(found[2], original[2], rtol=1e-4, atol=1e-5)


def test_signatures_stay():
    model = build("llama")
    before = inspect.signature(model.forward)
    assert inspect.signature(optimize(model).forward) == before


def test_accelerate_converts_outputs():
    operations = pytest.importorskip("accelerate.utils.operations")
    model, inputs = optimize(build("llama").bfloat16()), batch("llama")
    out = model(**inputs)
    wanted = out.logits.tensor().float()
    found = operations.convert_to_fp32(model(**inputs))
    assert torch.equal(found.logits.tensor(), wanted)
    assert found.loss.item() == out.loss.item()


def test_two_models_of_one_configuration_stay_apart():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**GROUPED)
    first, second = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    optimize(first)
    held = first.model.layers[0].self_attn.config
    assert first.config._attn_implementation == "tilesmith" == held._attn_implementation
    assert second.config._attn_implementation == "sdpa" == config._attn_implementation
    assert first.config is first.model.config
    assert undo(first).config._attn_implementation == "sdpa"


def test_attention_chosen_by_the_user_stays():
    model = optimize(build("llama", attention="flex_attention"))
    assert model.config._attn_implementation == "flex_attention"
    row = rows_of(model)["model.layers.0.self_attn", "attention"]
    assert (row.action, row.reason) == ("skipped", "the model's attention is flex_attention")


def test_save_pretrained_knows_nothing(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = optimize(build("llama"))
    model.save_pretrained(tmp_path)
    assert "tilesmith" not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"] and type(again) is transformers.LlamaForCausalLM
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_peft(family, order):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(2)
        targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(
                model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            ).train()

    inputs = batch(family)
    plain = adapted(build(family, layers=1))
    oracle, original = train(copy.deepcopy(plain).double(), inputs), train(plain, inputs)
    model = build(family, layers=1)
    model = adapted(optimize(model)) if order == "before" else optimize(adapted(model))
    assert_within_budget(train(model, inputs), original, oracle)
    back = train(undo(model), inputs)
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())


@pytest.mark.parametrize("alone", [False, True])
def test_fully_shard(alone, tmp_path):
    from torch.distributed.fsdp import fully_shard

    model, inputs = build("llama"), batch("llama")
    original = train(model, inputs)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        optimize(model)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, *([model.lm_head] if alone else []), model):
            fully_shard(part, mesh=mesh)
        model.zero_grad()
        out = model(**inputs)
        assert isinstance(out.logits, torch.Tensor if alone else LazyLogits)
        out.loss.backward()
        if not alone:
            with pytest.raises(RuntimeError, match=r"with FSDP before backward\(\)"):
                out.logits.argmax(-1)
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(out.loss.detach(), original[0])
    torch.testing.assert_close(gradients, original[2], rtol=1e-4, atol=1e-6)


def test_nothing_global_changes():
    transformers = pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")

    def everything():
        places = modeling, modeling.LlamaAttention, transformers.LlamaModel, F, nn.Linear
        return [dict(vars(place)) for place in places]

    before = everything()
    train(optimize(build("llama", layers=1)), batch("llama"))
    after = everything()
    assert [set(a) ^ set(b) for a, b in zip(before, after)] == [set()] * 5
    assert all(a[name] is b[name] for a, b in zip(before, after) for name in a)


def test_big_models_are_probed_without_their_weights():
    transformers = pytest.importorskip("transformers")
    sizes = {**GROUPED, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 4}))
    optimize(model, strict=True)
    assert len(model.tilesmith_report.replaced) == 2 + 4 * 6 + 2
    assert all(p.is_meta for p in model.parameters())
