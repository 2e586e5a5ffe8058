"""Dropout, sum and norm in one op: in the ways that models write them, with the same numbers; where not, as before."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilesmith
from optimize_models import Calls
from tilesmith import ops, use

WIDTH = 16


class Block(nn.Module):
    """What the ways to write it share."""

    def __init__(self, norm=nn.LayerNorm, p=0.3):
        super().__init__()
        self.dense, self.norm, self.drop, self.p = nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Dropout(p), p


class PostNorm(Block):
    """As BERT."""

    def forward(self, x, y):
        y = self.dense(y)
        y = self.drop(y)
        y = self.norm(y + x)
        return y  # noqa: RET504


class Inline(Block):
    def forward(self, x, y):
        return self.norm(x + self.drop(self.dense(y)))


class Functional(Block):
    """As BART."""

    def forward(self, x, y):
        y = self.dense(y)
        y = nn.functional.dropout(y, p=self.p, training=self.training)
        y = x + y
        return self.norm(y)


class PreNorm(Block):
    """As ViT: the sum goes on."""

    def forward(self, x, y):
        y = self.dense(y)
        y = self.drop(y)
        y = y + x
        residual = y
        y = self.norm(y)
        return y + residual


class Kept(Block):
    """What was dropped from is used again."""

    def forward(self, x, y):
        z = self.drop(self.dense(y))
        s = z + x
        return self.norm(s) + z


class OtherFunction(Block):
    def forward(self, x, y):
        y = F.alpha_dropout(self.dense(y), p=self.p, training=self.training)
        y = y + x
        return self.norm(y)


class TwoDropouts(Block):
    """One would be drawn after the other, where before it came first."""

    def forward(self, x, y):
        return self.norm(self.drop(self.dense(x)) + self.drop(y))


class ByPosition(Block):
    """A dropout by a function in another spelling."""

    def forward(self, x, y):
        y = F.dropout(self.dense(y), 0.3, self.training)
        y = x + y
        return self.norm(y)


class ByPositionInside(Block):
    def forward(self, x, y):
        return self.norm(x + nn.functional.dropout(self.dense(y), 0.3, self.training))


class OfSomethingElse(Block):
    """What it adds is not dropped from."""

    def forward(self, x, y):
        weights = F.dropout(x, 0.3, self.training)
        y = self.dense(y) * weights
        return self.norm(x + y)


FUSED, LEFT = [PostNorm, Inline, Functional, PreNorm], [Kept, OtherFunction, TwoDropouts]


@pytest.fixture
def ops_everywhere():
    names = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "dropout_add_norm")
    with use(**dict.fromkeys(names, "reference")):
        yield


def _pair(cls, **options):
    torch.manual_seed(0)
    plain = cls(**options).double()  # so that other orders of summation hardly show
    model = tilesmith.optimize(copy.deepcopy(plain), only=["norm", "add_norm"])
    x, y = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64)
    return plain, model, x, y


def _step(model, x, y, run=lambda model, x, y: model(x, y)):
    model.zero_grad()
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    torch.manual_seed(3)
    out = run(model, x, y)
    out.square().sum().backward()
    return [out.detach(), x.grad, y.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.usefixtures("ops_everywhere")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("cls", FUSED)
def test_the_dropout_is_drawn_in_the_op(cls, norm):
    plain, model, x, y = _pair(cls, norm=norm)

    def by_op(model, x, y):
        kind, n = "layer" if norm is nn.LayerNorm else "rms", model.norm
        eps = n.eps if n.eps is not None else torch.finfo(x.dtype).eps
        bias = getattr(n, "bias", None)
        out, total = ops.dropout_add_norm(model.dense(y), x, n.weight, bias, p=0.3, kind=kind, eps=eps)
        return out + total if cls is PreNorm else out

    with Calls() as calls:
        found = _step(model, x, y)
    assert calls == {"dropout_add_norm": 1, "dropout_add_norm_vjp": 1}
    for a, b in zip(found, _step(plain, x, y, by_op)):
        assert torch.equal(a, b)
    (row,) = [row for row in model.tilesmith_report.replaced if row.rule == "add_norm"]
    assert row.ops == ("dropout_add_norm",) and "other random numbers than PyTorch's" in row.reason
    model.eval(), plain.eval()
    with Calls() as calls:
        found = _step(model, x, y)
    assert "dropout_add_norm" not in calls and sum(calls.values()) == 2
    torch.testing.assert_close(found, _step(plain, x, y))


@pytest.mark.parametrize("cls", [ByPosition, ByPositionInside, OfSomethingElse, *FUSED])
def test_a_dropout_by_a_function_that_is_not_taken_is_told(cls):
    _, model, _, _ = _pair(cls)
    (row,) = [row for row in model.tilesmith_report.replaced if row.rule == "add_norm"]
    stays = cls in (ByPosition, ByPositionInside)
    assert row.ops == (("dropout_add_norm",) if cls in FUSED else ("add_layer_norm",))
    assert row.reason.endswith("; F.dropout of what it adds stays a call of its own") is stays


@pytest.mark.parametrize("cls", [*FUSED, *LEFT, ByPosition, ByPositionInside])
def test_without_a_kernel_the_same_is_drawn(cls):
    plain, model, x, y = _pair(cls)
    assert all(torch.equal(a, b) for a, b in zip(_step(model, x, y), _step(plain, x, y)))
    tilesmith.undo(model)
    assert all(torch.equal(a, b) for a, b in zip(_step(model, x, y), _step(plain, x, y)))


@pytest.mark.usefixtures("ops_everywhere")
@pytest.mark.parametrize("cls", LEFT)
def test_what_stays_draws_as_before(cls):
    plain, model, x, y = _pair(cls)
    with Calls() as calls:
        found = _step(model, x, y)
    assert "dropout_add_norm" not in calls and calls["add_layer_norm"] == 1
    torch.testing.assert_close(found, _step(plain, x, y))


@pytest.mark.usefixtures("ops_everywhere")
def test_dropouts_that_are_watched_or_in_place_are_called():
    for cls in (PostNorm, PreNorm):
        plain, model, x, y = _pair(cls)
        seen = []
        model.drop.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.shape))
        torch.testing.assert_close(_step(model, x, y), _step(plain, x, y))
        assert seen == [x.shape]
        plain, model, x, y = _pair(cls)
        plain.drop.inplace = model.drop.inplace = True
        torch.testing.assert_close(_step(model, x, y), _step(plain, x, y))


@pytest.mark.usefixtures("ops_everywhere")
def test_a_dropout_of_0_costs_nothing_and_compiled_code_draws_its_own():
    plain, model, x, y = _pair(PostNorm, p=0.0)
    with Calls() as calls:
        _step(model, x, y)
    assert calls == {"add_layer_norm": 1, "add_layer_norm_vjp": 1}
    plain, model, x, y = _pair(PostNorm)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert _step(compiled, x, y)[0].shape == x.shape
    assert not any(model.tilesmith_report.calls().values())


@pytest.mark.usefixtures("ops_everywhere")
@pytest.mark.parametrize("family", ["bert", "vit", "bart", "whisper"])
def test_blocks_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    from optimize_models import SEQ2SEQ, SIZES, batch

    small = {**SIZES, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
    made = {
        "bert": (transformers.BertModel, transformers.BertConfig(**small), 4),
        "vit": (
            transformers.ViTModel,
            transformers.ViTConfig(
                hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32,
                patch_size=8, hidden_dropout_prob=0.1,
            ),
            2,
        ),
        "bart": (
            transformers.BartModel,
            transformers.BartConfig(**{**SEQ2SEQ, "max_position_embeddings": 64}, dropout=0.1),
            10,
        ),
        "whisper": (
            transformers.WhisperModel,
            transformers.WhisperConfig(
                **{**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 64}, dropout=0.1
            ),
            6,
        ),
    }  # fmt: skip
    cls, config, wanted = made[family]
    model = cls(config).train()
    tilesmith.optimize(model, only=["norm", "add_norm"], strict=True)
    inputs = {k: v for k, v in batch(family if family in ("vit", "whisper") else "bert").items() if k != "labels"}
    if family == "whisper":
        inputs["decoder_input_ids"] = torch.randint(3, 120, (2, 12))
    model(**inputs).last_hidden_state.square().sum().backward()
    assert model.tilesmith_report.calls()["dropout_add_norm"] == wanted
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "norm" in n)
