"""`optimize` on plain modules: what is recognised by what it computes, and what only looks alike."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimize_models import Calls, ops_everywhere, rows_of  # noqa: F401
from tilesmith.engine import use
from tilesmith.models import optimize, undo
from tilesmith.rewrite import RewriteError


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


class Uncast(Llama):
    """RMSNorm in the dtype of its input, operation by operation."""

    def forward(self, x):
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class HalfRMSNorm(Llama):
    """Looks like one and is not."""

    def forward(self, x):
        """Half of a norm."""
        return super().forward(x) * 0.5


class GatedNorm(Llama):
    """Norms with a gate: after the norm as in Qwen3-Next, before as in Mamba 2, in fp32 as in Kimi Linear."""

    def __init__(self, kind="qwen", group_size=24):
        super().__init__()
        self.kind, self.group_size = kind, group_size

    def forward(self, x, gate=None):
        """One of the three."""
        wide, gate = x.float(), None if gate is None else gate.float()
        if self.kind == "mamba" and gate is not None:
            wide = wide * F.silu(gate)
        parts = wide.view(*x.shape[:-1], -1, self.group_size)
        wide = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)).view(x.shape)
        if self.kind == "kimi":
            return (wide * self.weight.float() * torch.sigmoid(gate)).to(x.dtype)
        y = self.weight * wide.to(x.dtype)
        return y if self.kind == "mamba" or gate is None else (y * F.silu(gate)).to(x.dtype)


class GatedRMSNorm(Llama):
    """Rounds silu(gate)."""

    def forward(self, x, gate):
        """A norm times a gate."""
        return super().forward(x) * F.silu(gate)


class ClippedGELU(nn.Module):
    """Differs for large inputs."""

    def forward(self, x):
        """At most 10."""
        return F.gelu(x).clamp(-10, 10)


@pytest.mark.parametrize(
    ("norm", "says"),
    [
        (Llama(), "rounded before"),
        (Gemma(), "(1 + weight), rounded after"),
        (Uncast(), "rounded after every operation"),
        (nn.RMSNorm(24), "rounded after that product"),
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
    ("norm", "says"),
    [
        (GatedNorm("qwen"), "RMSNorm times silu(gate), rounded before"),
        (GatedNorm("kimi"), "RMSNorm times sigmoid(gate), rounded after"),
        (GatedNorm("mamba"), "RMSNorm of x * silu(gate), rounded before"),
        (GatedNorm("mamba", 8), "RMSNorm of 3 groups of x * silu(gate)"),
    ],
)
def test_norms_with_a_gate_are_told_apart(norm, says):
    model = nn.ModuleList([norm]).bfloat16()
    x, gate = torch.randn(2, 7, 24).bfloat16(), torch.randn(2, 7, 24).bfloat16()
    y = model[0](x, gate)
    optimize(model, strict=True)
    assert says in rows_of(model)["0", "norm"].reason
    with Calls() as calls:
        assert (model[0](x, gate=gate) != y).float().mean() < 0.02
        wide = model[0](x.float(), gate)  # as the scan of Mamba 2 gives it
    assert calls == {"rms_norm_gated": 2}
    undo(model)
    assert torch.equal(model[0](x, gate), y)
    torch.testing.assert_close(wide, model[0](x.float(), gate))


def test_a_norm_without_its_gate_computes_as_before():
    model = nn.ModuleList([GatedNorm("mamba", 8)])
    x = torch.randn(5, 24)
    y = model[0](x)
    optimize(model, strict=True)
    assert torch.equal(model[0](x), y)
    with pytest.raises(TypeError):
        model[0](x, x, x)
    optimized = torch.compile(model[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(optimized(x, x), undo(model)[0](x, x))


def test_a_norm_with_a_weight_for_each_head_is_served_where_there_are_as_many():
    norm = Llama((3, 24))
    model = nn.Sequential(norm).bfloat16()
    x = torch.randn(7, 3, 24).bfloat16()
    y, one = model(x), model(x[:, :1])
    optimize(model, strict=True)
    assert "rounded before" in rows_of(model)["0", "norm"].reason
    with Calls() as calls:
        assert (model(x) != y).float().mean() < 0.02
    assert calls == {"rms_norm": 1}
    assert torch.equal(model(x[:, :1]), one)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (HalfRMSNorm(), "differs from RMSNorm"),
        (GatedRMSNorm(), r"takes \(x, gate\)"),
        (nn.LayerNorm((3, 24)), "more than the last dimension"),
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


class OwnGroupNorm(nn.GroupNorm):
    """Computed in fp32, as diffusion models do."""

    def forward(self, x):
        """The same, in fp32."""
        return super().forward(x.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "over"),
    [
        (nn.GroupNorm(2, 24), "groups of channels"),
        (nn.GroupNorm(1, 24, affine=False), "groups of channels"),
        (OwnGroupNorm(2, 24), "groups of channels"),
        (nn.LocalResponseNorm(2), "neighbouring channels"),
    ],
)
def test_norms_of_images_are_no_loss(norm, over):
    cls, x = type(norm), torch.randn(2, 24, 5, 5)
    model = nn.Sequential(nn.InstanceNorm2d(24), nn.BatchNorm2d(24, track_running_stats=False), norm)
    y = model(x)
    optimize(model, strict=True)
    row = rows_of(model)["2", "norm"]
    assert (row.action, row.wanted) == ("skipped", False)
    assert row.reason == f"it normalises over {over}, for which there is no op"
    assert type(model[-1]) is cls and torch.equal(model(x), y)


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


def test_an_activation_that_is_changed_later_is_called():
    """Put in anew, or by its own setting; of the same class."""
    torch.manual_seed(0)
    plain = nn.Sequential(Gated(nn.GELU()).eval())
    model, x = optimize(copy.deepcopy(plain)), 3 * torch.randn(5, 12)
    with use(geglu="reference"):
        torch.testing.assert_close(model(x), plain(x))
        for m in (model, plain):
            m[0].act = nn.GELU("tanh")
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-7)
        for m in (model, plain):
            m[0].act.approximate = "none"
        before = model.tilesmith_report.calls()["geglu"]
        torch.testing.assert_close(model(x), plain(x))
        assert model.tilesmith_report.calls()["geglu"] == before + 1  # as it was found


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


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_activation_that_is_watched_or_replaced_is_called(when):
    model, x, seen = nn.Sequential(Gated(nn.SiLU())).eval(), torch.randn(5, 12), []
    wanted = model(x)

    def watch(act, _, y):
        seen.append(y)
        return y * 2

    hook = None if when == "after" else model[0].act.register_forward_hook(watch)
    optimize(model)
    assert rows_of(model)["0", "mlp"].action == "replaced" and not seen
    hook = hook or model[0].act.register_forward_hook(watch)
    torch.testing.assert_close(model(x) - model[0].c.bias, 2 * (wanted - model[0].c.bias))
    assert len(seen) == 1
    hook.remove()
    with Calls() as calls:
        torch.testing.assert_close(model(x), wanted)
    assert calls == {"swiglu": 1}
    model[0].act = nn.Tanh()
    torch.testing.assert_close(model(x), Gated.forward(model[0], x))


class DroppingMLP(PackedMLP):
    """A dropout that only training shows."""

    def forward(self, x):
        """Gate first."""
        return F.dropout(super().forward(x), 0.1, self.training)


class Xielu(nn.Module):
    """xIELU, as transformers writes it."""

    def __init__(self):
        super().__init__()
        self.rising, self.falling = nn.Parameter(torch.tensor([0.2])), nn.Parameter(torch.tensor([-1.1]))
        self.register_buffer("eps", torch.tensor(-1e-6))
        self.register_buffer("beta", torch.tensor(0.5))

    def forward(self, x):
        """Softplus makes slopes of the parameters."""
        p, n = F.softplus(self.rising), self.beta + F.softplus(self.falling)
        rest = (torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x
        return torch.where(x > 0, p * x * x + self.beta * x, rest)


class Swapped(Xielu):
    """The slopes on the wrong sides."""

    def forward(self, x):
        """Not xIELU."""
        return super().forward(-x)


def test_xielu_is_found_with_the_tensors_that_it_reads():
    model = nn.Sequential(Xielu())
    x = torch.randn(5, 7, requires_grad=True)

    def step():
        y = model(x)
        return y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    plain = step()
    optimize(model, strict=True)
    with Calls() as calls:
        ours = step()
    assert calls == {"xielu": 1, "xielu_vjp": 1}
    torch.testing.assert_close(ours, plain)
    model[0].beta.fill_(0.25)  # a checkpoint may have other numbers
    model[0].eps = torch.tensor(-0.5)
    torch.testing.assert_close(model(x), undo(copy.deepcopy(model))(x))
    assert not any("tilesmith" in name for name in vars(undo(model)[0]))


def test_what_looks_like_xielu_stays():
    with pytest.raises(RewriteError, match="differs from xIELU"):
        optimize(nn.Sequential(type("Xielu", (Swapped,), {})()), strict=True)


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
    assert rows["0", "bias"].reason.startswith("used only with graphs=True") and not rows["0", "bias"].wanted
    assert rows["4", ""].reason == "no rule for Dropout"
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
    with pytest.raises(ValueError, match="exclude names attn, neither"):
        optimize(model, exclude=["norm", "attn", "layers.*"])
    with pytest.raises(ValueError, match=r"pattern 'layers\.\*', which matches the name of no module .* such as '0'"):
        optimize(nn.Sequential(nn.GELU(), nn.LayerNorm(8)), exclude=["norm", "0*", "layers.*"])
    named = nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Sequential(nn.LayerNorm(8))})
    assert [row.fqn for row in optimize(named, exclude="nor*").tilesmith_report.replaced] == ["mlp.0"]
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        optimize("model")


class Attends(nn.Module):
    """Attention as GPT-J and others write it, in a method."""

    def __init__(self, causal=True, divides=True, twist=False):
        super().__init__()
        self.qkv, self.out, self.scale_attn = nn.Linear(16, 48), nn.Linear(16, 16), 8**0.5
        self.attn_dropout = nn.Dropout(0.0)
        self.divides, self.twist = divides, twist
        self.register_buffer("bias", torch.ones(1, 1, 32, 32, dtype=torch.bool).tril() if causal else None)

    def _attn(self, query, key, value, attention_mask=None):
        scores = query.float() @ key.float().mT
        scores = scores / self.scale_attn if self.divides else scores
        if self.bias is not None:
            seen = self.bias[:, :, key.shape[2] - query.shape[2] : key.shape[2], : key.shape[2]]
            scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = (scores.tanh() if self.twist else scores).softmax(-1).to(value.dtype)
        return self.attn_dropout(weights) @ value, weights

    def forward(self, x, mask=None, output_attentions=False):
        q, k, v = (h.unflatten(-1, (2, 8)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        out, weights = self._attn(q, k, v, mask)
        out = self.out(out.transpose(1, 2).flatten(2))
        return (out, weights) if output_attentions else out


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"divides": False}], ids=str)
def test_attention_in_a_method(options):
    model, x = Attends(**options), torch.randn(2, 5, 16)
    mask = torch.zeros(2, 1, 1, 5)
    mask[1, ..., -2:] = torch.finfo(torch.float32).min
    plain, weights = model(x, mask, output_attentions=True)
    wanted = torch.autograd.grad(plain.sum(), model.qkv.weight)[0]
    optimize(model)
    with Calls() as calls:
        found = model(x, mask)
        assert calls["attention"] == 1
        again = model(x, mask, output_attentions=True)
        assert calls["attention"] == 1
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), model.qkv.weight)[0], wanted)
    assert torch.equal(again[1], weights) and not model.__dict__["_tilesmith_weights_asked"]  # of no call any more
    assert torch.equal(undo(model)(x, mask), plain)


class ByLayer(nn.Module):
    """Scores divided by the number of the layer, as ImageGPT may."""

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def _attn(self, query, key, value, attention_mask=None):
        weights = query @ key.mT / int(query.shape[-1] ** 0.5) / (self.layer_idx + 1)
        weights = F.softmax(weights if attention_mask is None else weights + attention_mask, -1)
        return weights @ value, weights

    def forward(self, x):
        return self._attn(x, x, x)[0]


def test_a_scale_by_the_layer_s_number_is_that_layer_s():
    model = optimize(nn.Sequential(ByLayer(0), ByLayer(1)))
    rows = rows_of(model)
    assert [rows[name, "attention"].action for name in "01"] == ["replaced", "skipped"]
    x = torch.randn(1, 2, 5, 8)
    torch.testing.assert_close(model(x), undo(copy.deepcopy(model))(x))


def test_a_method_that_is_not_attention_stays():
    model = optimize(Attends(twist=True))
    (row,) = [row for row in model.tilesmith_report.rows if row.rule == "attention"]
    assert row.action == "skipped" and "differs from softmax" in row.reason


def test_a_gated_mlp_with_a_norm_says_what_is_missing():
    transformers = pytest.importorskip("transformers")
    from transformers.models.bitnet.modeling_bitnet import BitNetMLP

    model = optimize(nn.Sequential(BitNetMLP(transformers.BitNetConfig(hidden_size=16, intermediate_size=32))))
    (row,) = [row for row in model.tilesmith_report.rows if row.rule == "mlp"]
    assert "ffn_sub_norm, a norm: no op computes a norm of the gated product" in row.reason


class FunctionalMlp(nn.Module):
    """A gated MLP whose activation is a function."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*s) for s in ((8, 16), (8, 16), (16, 8)))
        self.act = F.silu

    def forward(self, x):
        """down(act(gate(x)) * up(x))."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


LATER = {
    "gelu": (nn.GELU, "approximate", "tanh", "gelu", 1),
    "mlp": (FunctionalMlp, "act", F.gelu, "swiglu", 1),
    "gated norm": (GatedNorm, "group_size", 12, "rms_norm_gated", 2),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", LATER)
def test_a_setting_that_is_changed_later_counts(which, compiled):
    make, setting, value, op, inputs = LATER[which]
    torch.manual_seed(0)
    plain = make()
    model, x = optimize(nn.Sequential(copy.deepcopy(plain))), [torch.randn(3, 24 if inputs == 2 else 8) * 3] * inputs
    call = torch.compile(model[0], backend="eager") if compiled else model[0]
    with use(**{op: "reference"}):
        torch.testing.assert_close(call(*x), plain(*x))
        before = plain(*x)
        for one in (plain, model[0]):
            setattr(one, setting, value)
        assert (plain(*x) - before).abs().max() > 1e-5
        torch.testing.assert_close(call(*x), plain(*x), rtol=1e-6, atol=1e-6)
        if not compiled:
            with Calls() as counts:
                model[0](*x)
            assert op not in counts


class Alternating(FunctionalMlp):
    """Every second layer has another activation."""

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x):
        """Reads its number."""
        act = F.gelu if self.layer_idx % 2 else F.silu
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


def test_layers_whose_number_decides_what_they_compute_are_told_apart():
    torch.manual_seed(0)
    plain, x = nn.Sequential(*map(Alternating, range(4))), 2 * torch.randn(3, 8)
    model = optimize(copy.deepcopy(plain), only="mlp")
    found = [next(word for word in ("silu", "gelu") if word in row.reason) for row in model.tilesmith_report.replaced]
    assert found == ["silu", "gelu"] * 2
    for ours, theirs in zip(model, plain):
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
