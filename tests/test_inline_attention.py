"""Attention spelled out in a forward: followed to one op, with masks, caches, dropout, or computed as written."""

import contextvars
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import family_models
from optimize_models import Calls, assert_within_budget, ops_everywhere, train  # noqa: F401
from tilesmith.engine import use
from tilesmith.models import optimize, undo
from tilesmith.models.attention import added_masks
from tilesmith.models.attention.inline import InlineAttentionForm
from tilesmith.models.attention.scores import Scores, scores
from tilesmith.rewrite import forms

FAMILIES = ("bloom", "mpt", "falcon", "falcon_alibi", "falcon_grouped")


class Spelled(nn.Module):
    """Attention with everything that is followed, each by a switch."""

    def __init__(self, how="plain", heads=2):
        super().__init__()
        self.how, self.heads = how, heads
        self.qkv, self.out = nn.Linear(8 * heads, 24 * heads), nn.Linear(8 * heads, 8 * heads)
        self.dropout = nn.Dropout(0.5 if how == "dropout" else 0.0)

    def forward(self, x, mask=None, bias=None, output_attentions=False):
        batch, tokens, _ = x.shape
        q, k, v = (y.view(batch, tokens, self.heads, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.how == "bmm":
            q, k, v = (y.reshape(batch * self.heads, tokens, 8) for y in (q, k, v))
            scores = torch.bmm(q, k.transpose(1, 2)) * 8**-0.5
            scores = scores.view(batch, self.heads, tokens, tokens) + mask
            scores = scores.view(batch * self.heads, tokens, tokens)
            weights = F.softmax(scores, dim=-1)
            y = torch.bmm(weights, v).view(batch, self.heads, tokens, 8)
        elif self.how == "where":
            scores = q @ k.transpose(-1, -2) / 8**0.5
            scores = torch.where(mask == 0, scores, torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1)
            y = weights @ v
        elif self.how == "filled":
            scores = torch.matmul(q / 8**0.5, k.mT)
            scores.masked_fill_((mask < 0).expand_as(scores), torch.finfo(scores.dtype).min)
            weights = F.softmax(scores.to(v.dtype), dim=-1).type_as(scores)
            y = torch.matmul(weights, v)
        elif self.how == "written":
            scores = torch.matmul(q, k.mT)
            scores /= 8**0.5
            seen = scores
            scores += mask
            weights = F.softmax(seen, dim=-1, dtype=torch.float32).to(v.dtype)  # seen is the same tensor
            y = torch.matmul(weights, v)
        elif self.how == "peeked":
            scores = torch.matmul(q, k.mT) * 8**-0.5
            scores = scores - scores.amax(-1, keepdim=True)
            weights = F.softmax(scores + mask, -1)
            y = torch.matmul(weights, v)
        elif self.how == "read":
            weights = F.softmax(torch.matmul(q, k.mT) * 8**-0.5 + mask, -1)
            y = torch.matmul(weights, v) + weights.mean()
        elif self.how == "scaled":
            weights = F.softmax((torch.matmul(q, k.mT) + bias).masked_fill(mask < 0, -1e9) * 8**-0.5, -1)
            y = torch.matmul(weights, v)
        elif self.how == "shaped":  # SAM's bias of rows and columns
            scores = torch.matmul(q, k.mT) * 8**-0.5
            scores = scores + (mask + bias).unsqueeze(-1).reshape_as(scores)
            y = torch.matmul(F.softmax(scores, -1), v)
        elif self.how == "shallow":
            weights = F.softmax((torch.matmul(q, k.mT)).masked_fill(mask < 0, -2.0), -1)
            y = torch.matmul(weights, v)
        else:
            weights = self.dropout(F.softmax(torch.matmul(q, k.mT) * 8**-0.5 + mask, -1))
            y = torch.matmul(weights, v)
        y = self.out(y.transpose(1, 2).reshape(batch, tokens, -1))
        return (y, weights) if output_attentions else (y,)


def _step(module, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    module = module.to(dtype)
    x = torch.randn(2, 5, 16, generator=generator).to(dtype).requires_grad_()
    mask = torch.zeros(2, 1, 5, 5, dtype=dtype)
    mask = mask.masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(dtype).min)
    bias = torch.randn(2, 2, 1, 5, generator=generator).to(dtype).requires_grad_()
    module.zero_grad()
    y = module(x, mask, bias)[0]
    y.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters()} | {"x": x.grad}
    if bias.grad is not None:
        gradients["bias"] = bias.grad
    return y.detach().square().sum(), y.detach(), gradients


@pytest.mark.parametrize(
    "how, calls",
    [
        ("plain", 1),
        ("bmm", 1),
        ("where", 1),
        ("filled", 1),
        ("written", 1),
        ("scaled", 1),
        ("shaped", 1),
        ("peeked", 0),
        ("read", 1),
        ("shallow", 0),
    ],
)
def test_what_a_forward_does_with_scores_is_followed_or_computed(how, calls):
    torch.manual_seed(0)
    module = Spelled(how)
    oracle, plain = _step(copy.deepcopy(module), torch.float64), _step(module)
    optimize(module, only="attention", strict=True)
    with Calls() as seen:
        found = _step(module)
    assert seen.get("attention", 0) == calls
    assert_within_budget(found, plain, oracle)
    assert module.tilesmith_report.calls()["attention"] == calls
    again = _step(undo(module))
    assert torch.equal(again[1], plain[1]) and type(module) is Spelled


def test_dropout_keeps_the_mean_and_is_off_in_evaluation():
    module = optimize(Spelled("dropout"), only="attention")
    x, mask = torch.randn(2, 5, 16), torch.zeros(1, 1, 5, 5)
    with Calls() as seen, torch.no_grad():
        draws = torch.stack([module(x, mask)[0] for _ in range(100)])
        whole = module.eval()(x, mask)[0]
    assert seen["attention"] == 101 and not torch.equal(draws[0], draws[1])
    assert (draws.mean(0) - whole).abs().max() < 5 * draws.std(0).max() / 100**0.5
    torch.testing.assert_close(undo(module)(x, mask)[0], whole)


def test_weights_that_are_asked_for_are_tensors():
    module = optimize(Spelled(), only="attention")
    x, mask = torch.randn(2, 5, 16), torch.zeros(1, 1, 5, 5)
    with Calls() as seen:
        y, weights = module(x, mask, output_attentions=True)
    assert type(weights) is torch.Tensor and not seen
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    torch.testing.assert_close(module(x, mask)[0], y)


def test_hooks_and_compilers_get_the_own_forward():
    module = optimize(Spelled(), only="attention")
    x, mask = torch.randn(2, 5, 16), torch.zeros(1, 1, 5, 5)
    wanted = module(x, mask)[0]
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x, mask)[0], wanted)
    handle = module.register_forward_hook(lambda *_: None)
    with Calls() as seen:
        module(x, mask)
    assert not seen
    handle.remove()
    twin = pickle.loads(pickle.dumps(module))
    with Calls() as seen:
        torch.testing.assert_close(copy.deepcopy(twin)(x, mask)[0], wanted)
    assert seen["attention"] == 1


class WritesQueries(nn.Module):
    def forward(self, q, k, v):
        scores = torch.matmul(q, k.mT)
        q.mul_(2)
        return torch.matmul(scores.softmax(-1), v)


class WritesValues(nn.Module):
    def forward(self, q, k, v):
        weights = torch.matmul(q, k.mT).softmax(-1)
        y = torch.matmul(weights, v).transpose(1, 2)
        z = y
        y += q.transpose(1, 2)
        return z


class AddsToProduct(nn.Module):
    """As Nyströmformer adds a convolution; nobody else has the product then."""

    def forward(self, q, k, v):
        weights = nn.Softmax(dim=-1)(torch.matmul(q, k.mT))
        if q.shape[-2] > 1:
            y = torch.matmul(weights, v)
        else:
            y = torch.matmul(weights, v).contiguous()
        if q is not None:
            y += q
        return y.transpose(1, 2)


def test_a_sum_in_place_of_a_product_that_nobody_has_is_taken_out_of_place():
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    model = nn.ModuleList([AddsToProduct()])

    def step():
        y = model[0](q, k, v)
        return y, *torch.autograd.grad(y.square().sum(), (q, k, v))

    plain = step()
    optimize(model, only="attention", strict=True)
    with Calls() as seen:
        found = step()
    assert seen == {"attention": 1, "attention_vjp": 1}
    torch.testing.assert_close(found, plain)


class Router(nn.Module):
    def forward(self, x, y, v):
        weights, places = torch.matmul(x, y.mT).softmax(-1).topk(2)
        return torch.matmul(x, v), weights, places


def test_weights_that_go_into_no_product_are_none_of_its_business():
    assert not [row for row in optimize(nn.Sequential(Router())).tilesmith_report.rows if row.rule == "attention"]


@pytest.mark.parametrize("cls, told", [(WritesQueries, "writes to q, of which"), (WritesValues, "writes to y, which")])
def test_a_forward_that_writes_in_place_stays(cls, told):
    module = optimize(nn.Sequential(cls()))
    (row,) = (row for row in module.tilesmith_report.rows if row.rule == "attention")
    assert row.action == "skipped" and told in row.reason and row.wanted


def test_autocast_gives_the_dtype_of_the_own_product():
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.matmul(F.softmax(torch.matmul(q, k.mT), -1), v)
        lazy = scores(nn.Identity(), q, k.mT)
        assert isinstance(lazy, Scores) and lazy.dtype is torch.bfloat16
        found = torch.matmul(F.softmax(lazy, -1), v)
    assert found.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    "use_of_it",
    [
        lambda s: s.transpose(-1, -2), lambda s: s[:, :, -1], lambda s: s - 1, lambda s: 1 - s, lambda s: s.amax(-1),
        lambda s: torch.cat((s, s), -1), lambda s: torch.exp(s), lambda s: s * s, lambda s: s.softmax(-2),
        lambda s: s.view(2, 3, 1, 5, 7), lambda s: s + torch.ones(2, 3, 5, 7).long(),
        lambda s: s.masked_fill(s > 0, 1.0), lambda s: torch.where(s > 0, s, s / 2),
        lambda s: F.softmax(s, -1) * 2, lambda s: s.softmax(-1).mT @ torch.eye(5),
        lambda s: torch.ones(2, 3, 4, 5) @ s, lambda s: s.to(torch.float64).sum(), lambda s: s * torch.arange(7.0),
    ],
)  # fmt: skip
def test_any_other_use_computes_the_scores(use_of_it):
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 7, 8)
    found = use_of_it(scores(nn.Identity(), q, k.mT))
    found = found.tensor() if isinstance(found, Scores) else found
    torch.testing.assert_close(found, use_of_it(torch.matmul(q, k.mT)))


@pytest.mark.parametrize("read", [lambda s: s.amax(-1), lambda s: s.softmax(-1) - 1, lambda s: s + s.bool()])
def test_scores_that_were_written_in_place_are_computed(read):
    """They were made of themselves: to read them never ended."""
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 7, 8)

    def used(s):
        twice = s * 2
        s /= 8**0.5
        s += torch.arange(7.0).double()
        hidden = s.masked_fill_(torch.arange(7) > 4, -1e9)
        return read(hidden), twice - 1, s.dtype

    wanted, found = (used(s) for s in (torch.matmul(q, k.mT), scores(nn.Identity(), q, k.mT)))
    torch.testing.assert_close(found[:2], wanted[:2])
    assert found[2] is wanted[2]


def test_shared_queries_and_values_of_other_width():
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(2, 1, 6, 8), torch.randn(2, 1, 6, 8)
    with Calls() as seen:
        found = scores(nn.Identity(), q, k.mT).softmax(-1) @ v
    torch.testing.assert_close(found, (q @ k.mT).softmax(-1) @ v)
    assert seen["attention"] == 1


def test_an_added_mask_beside_a_bias_is_no_bias():
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    bias, mask = torch.randn(2, 3, 1, 5), torch.zeros(2, 1, 5, 5)
    for value, masks in ((torch.finfo(torch.float32).min, 1), (-3.0, 0)):
        mask = mask.masked_fill(torch.ones(5, 5).triu(1).bool(), value)
        lazy = scores(nn.Identity(), q, k.mT) + bias + mask
        added, visible = lazy.recorded._added(torch.float32)
        assert added.shape == ((2, 3, 1, 5) if masks else (2, 3, 5, 5)) and (visible is not None) == bool(masks)
        torch.testing.assert_close(lazy.softmax(-1) @ v, (q @ k.mT + bias + mask).softmax(-1) @ v)


def test_a_mask_is_looked_at_once_however_layers_slice_it(monkeypatch):
    looks = []
    monkeypatch.setattr(added_masks, "_is_mask", lambda x: looks.append(x) or bool(((x == 0) | (x <= -1e4)).all()))
    mask = torch.zeros(2, 1, 5, 8).masked_fill(torch.ones(5, 8).triu(1).bool(), torch.finfo(torch.float32).min)
    for _ in range(3):
        for view in (mask, mask[..., :5], mask[:, 0].reshape(2, 1, 5, 8), mask[:1].expand(2, -1, -1, -1)):
            assert torch.equal(added_masks.visible(view), view == 0)
    assert len(looks) == 1
    mask[0, 0, 0, 0] = -3.0  # a bias from now on
    assert added_masks.visible(mask) is None and added_masks.visible(mask[..., :5]) is None
    assert len(looks) == 2
    with torch.inference_mode():
        inside = torch.zeros(1, 1, 2, 2)
        assert added_masks.visible(inside).all()
        assert added_masks.visible(inside.fill_(1.0)) is None


def _model(family):
    transformers = pytest.importorskip("transformers", minversion="5")
    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family == "bloom":
        config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **sizes)
    elif family == "mpt":
        config = transformers.MptConfig(d_model=64, n_layers=2, n_heads=4, max_seq_len=64, **sizes)
    else:
        kind = {
            "falcon_alibi": {"alibi": True},
            "falcon_grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
        }
        options = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **kind.get(family, {})}
        config = transformers.FalconConfig(**sizes, **options)
    for name in ("attention_dropout", "hidden_dropout"):
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.loss_type = "ForCausalLM"
    return model


@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_spell_attention_out(family, padding):
    model = _model(family)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding is not None:
        mask[1, slice(None, 4) if padding == "left" else slice(-3, None)] = 0
    labels = ids.masked_fill((mask == 0) | (mask.roll(1) == 0), -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    oracle, plain = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    optimize(model)
    with Calls() as calls:
        found = train(model, inputs)
    assert calls["attention"] == 2
    assert any(isinstance(form, InlineAttentionForm) for module in model.modules() for form in forms(module))
    if oracle[1].isfinite().all():
        assert_within_budget(found, plain, oracle)
    else:  # in float64 its own attention is NaN in rows that see nothing
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    back = train(undo(model), inputs)
    assert torch.equal(back[1], plain[1]) and all(torch.equal(back[2][n], g) for n, g in plain[2].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_spell_attention_out_generate_the_same(family):
    model = _model(family).eval()
    ids = torch.randint(3, 120, (2, 6), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :2] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    wanted = model.generate(**inputs, **options)
    weights = model(**inputs, output_attentions=True).attentions
    optimize(model)
    with Calls() as calls:
        found = model.generate(**inputs, **options)
    assert torch.equal(found, wanted) and calls["attention"] == 10
    found = model(**inputs, output_attentions=True).attentions
    assert {type(x) for x in found} == {torch.Tensor}
    torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-5)


def test_without_a_kernel_the_products_are_those_of_torch():
    def check():
        q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
        assert type(scores(nn.Identity(), q, k.mT)) is torch.Tensor

    contextvars.Context().run(check)
    with use(attention="reference"):
        assert isinstance(scores(nn.Identity(), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 8, 7)), Scores)


class SoftmaxElsewhere(nn.Module):
    """As LayoutLMv3's attention: the softmax is a method's."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def weights(self, scores):
        return nn.Softmax(dim=-1)(scores - scores.amax(-1, keepdim=True))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.matmul(self.weights(torch.matmul(q, k.mT)), v)


class Sharpened(SoftmaxElsewhere):
    """Something else than a softmax."""

    def weights(self, scores):
        return nn.Softmax(dim=-1)(scores * 2)


def test_a_softmax_in_a_method_is_followed():
    torch.manual_seed(0)
    plain = SoftmaxElsewhere().double()
    model, x = optimize(nn.Sequential(copy.deepcopy(plain)), strict=True), torch.randn(2, 5, 8, dtype=torch.float64)
    with Calls() as calls:
        y = model(x)
        y.square().sum().backward()
    assert calls["attention"] == 1
    plain(x).square().sum().backward()
    torch.testing.assert_close([y, model[0].qkv.weight.grad], [plain(x), plain.qkv.weight.grad])
    model[0].weights = lambda scores: torch.ones_like(scores)
    with Calls() as calls:
        assert not torch.allclose(model(x), y)
    assert not calls
    del model[0].weights
    assert type(undo(model)[0]) is SoftmaxElsewhere and torch.equal(model(x), plain(x))


def test_a_method_that_does_more_than_a_softmax_is_said():
    model = optimize(nn.Sequential(Sharpened()))
    (row,) = [row for row in model.tilesmith_report.rows if row.rule == "attention"]
    assert "its softmax stands in its method weights" in row.reason
    assert not any(isinstance(form, InlineAttentionForm) for form in forms(model[0]))


def test_hooks_that_transformers_leaves_behind_count_while_they_capture():
    """`output_hidden_states` and `output_attentions` install hooks once, on modules of the whole model, for good."""
    model = family_models.build("masked_lm/convbert").eval()
    inputs = {name: x for name, x in family_models.inputs_of("masked_lm/convbert", model).items() if name != "labels"}
    with torch.no_grad():
        wanted = model(**inputs, output_attentions=True)
    optimize(model)

    def attended(**asked):
        with Calls() as calls:
            out = model(**inputs, **asked)
        torch.testing.assert_close(out.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        return calls.get("attention", 0), out.attentions

    with torch.no_grad():
        assert attended(output_attentions=False) == (2, None)
        count, weights = attended(output_attentions=True)
        assert count == 0
        torch.testing.assert_close(weights, wanted.attentions, rtol=1e-4, atol=1e-5)
        assert attended() == (2, None)
    assert attended()[0] == 0  # a checkpointed block would run again outside of the call
