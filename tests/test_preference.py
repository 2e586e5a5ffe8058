"""Each preference loss against its formula on whole logits in fp64: value, gradients, metrics, ignored labels."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from tilesmith import nn, ops
from tilesmith.nn.fused_preference import DPO_TYPES
from tilesmith.nn.policy import POLICIES, grpo_loss
from tilesmith.ops.loss.formulas import FORMULAS, PairOptions

B, T, K, V = 6, 7, 12, 37
SMOOTHED = {"exo_pair": 0.1, "robust": 0.2, "sigmoid": 0.15}


class Data:
    """Hidden states, weights and labels of a policy and a reference model, with prompts and padding ignored."""

    def __init__(self, dtype=torch.float64, bias=True, seed=0):
        g = torch.Generator().manual_seed(seed)

        def draw(*shape, grad=False):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)

        self.x, self.ref_x = draw(B, T, K, grad=True), draw(B, T, K + 3)
        self.weight = (draw(V, K) / 3).detach().requires_grad_()
        self.ref_weight = draw(V, K + 3) / 3
        self.bias = draw(V, grad=True) if bias else None
        self.ref_bias = draw(V) if bias else None
        self.target = torch.randint(V, (B, T), generator=g)
        self.target[:, :2] = -100
        self.target[1::2, -2:] = -100
        self.leaves = [t for t in (self.x, self.weight, self.bias) if t is not None]
        self.advantages = draw(B)
        self.mask = (self.target != -100).long()
        self.ids = torch.where(self.target == -100, 3, self.target)
        self.old, self.ref = (0.3 * draw(B, T) - math.log(V) for _ in range(2))
        self.importance = draw(B, T).abs() + 0.5

    def log_probs(self, labels=None, reference=False, scale=1.0):
        x, w, b = (self.ref_x, self.ref_weight, self.ref_bias) if reference else (self.x, self.weight, self.bias)
        logits = x @ w.t() if b is None else x @ w.t() + b
        labels = self.target if labels is None else labels
        picked = (logits * scale).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return torch.where(labels == -100, 0.0, picked)

    def sums(self, average, reference=False):
        total = self.log_probs(reference=reference).sum(-1)
        return total / (self.target != -100).sum(-1) if average else total

    def logits(self):
        return self.x @ self.weight.t() + (0 if self.bias is None else self.bias)


def agree(data, got, want):
    """Values equal, and gradients under the same upstream factor."""
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(1.7 * got, data.leaves)
    for g, w in zip(grads, torch.autograd.grad(1.7 * want, data.leaves)):
        torch.testing.assert_close(g, w)


def dpo(kind, c, r, beta, s, tau):
    """The loss of each pair, as the papers write it."""
    log_sigmoid, sigmoid, m = F.logsigmoid, torch.sigmoid, beta * (c - r)
    if kind == "exo_pair":
        p, q = torch.stack((sigmoid(m), sigmoid(-m))), torch.tensor([1 - s, s], dtype=c.dtype)[:, None]
        return (p * (p / q).log()).sum(0)
    if kind == "discopop":
        blend = sigmoid(m / tau)
        return (1 - blend) * -log_sigmoid(m) + blend * (-m).exp()
    return {
        "sigmoid": lambda: -(1 - s) * log_sigmoid(m) - s * log_sigmoid(-m),
        "hinge": lambda: (1 - m).clamp(min=0),
        "ipo": lambda: (c - r - 1 / (2 * beta)) ** 2,
        "nca_pair": lambda: -log_sigmoid(beta * c) - (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)) / 2,
        "robust": lambda: (-(1 - s) * log_sigmoid(m) + s * log_sigmoid(-m)) / (1 - 2 * s),
        "bco_pair": lambda: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "apo_down": lambda: sigmoid(beta * c) + 1 - sigmoid(m),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "reference", "average"), list(itertools.product(DPO_TYPES, (True, False), (True, False)))
)
def test_dpo(kind, reference, average):
    data, beta, smoothing = Data(bias=reference), 0.3, SMOOTHED.get(kind, 0.0)
    loss = nn.FusedLinearDPOLoss(
        beta=beta, loss_type=kind, label_smoothing=smoothing, use_ref_model=reference, average_log_prob=average,
        compute_nll_loss=average, alpha=0.7, chunk_size=2 if reference else 0,
    )  # fmt: skip
    beside = (data.ref_x, data.ref_weight, data.ref_bias) if reference else ()
    got, metrics = loss(data.weight, data.x, data.target, data.bias, *beside)
    mean = average or kind == "ipo"
    ratio = data.sums(mean) - (data.sums(mean, reference=True) if reference else 0)
    nll = -data.log_probs()[: B // 2].sum() / (data.target[: B // 2] != -100).sum()
    want = dpo(kind, *ratio.chunk(2), beta, smoothing, 0.05).mean() + (0.7 * nll if average else 0)
    agree(data, got, want)
    torch.testing.assert_close(torch.cat((metrics.chosen_rewards, metrics.rejected_rewards)), beta * ratio.detach())
    torch.testing.assert_close(metrics.nll_loss, nll.detach())


@pytest.mark.parametrize("margin", [-200.0, -90.0, 90.0, 200.0])
@pytest.mark.parametrize("kind", DPO_TYPES)
def test_a_pair_far_apart_has_the_loss_of_its_formula(kind, margin):
    """Where exp(−margin), of fp32, is infinite."""
    smoothing = SMOOTHED.get(kind, 0.0)
    sums = torch.tensor([margin, -margin], dtype=torch.float64, requires_grad=True)  # beta is 1/2
    want = dpo(kind, *sums.chunk(2), 0.5, smoothing, 0.05).sum()
    slopes = torch.autograd.grad(want, sums)[0]
    log_probs, sequences = sums.detach().float()[:, None], torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    options = PairOptions(0.5, smoothing, 0.0, 0.05)
    got = FORMULAS[kind].evaluate(log_probs, sequences, None, options)
    torch.testing.assert_close(got, (want.detach().float(), slopes.float()[:, None]))


@pytest.mark.parametrize("nll", [True, False])
def test_cpo_and_simpo(nll):
    data = Data()
    likelihood = -data.log_probs()[: B // 2].sum() / (data.target[: B // 2] != -100).sum() if nll else 0
    chosen, rejected = data.sums(False).chunk(2)
    got, _ = nn.FusedLinearCPOLoss(label_smoothing=0.1, compute_nll_loss=nll, alpha=0.5)(
        data.weight, data.x, data.target, data.bias
    )
    m = 0.1 * (chosen - rejected)
    agree(data, got, (-0.9 * F.logsigmoid(m) - 0.1 * F.logsigmoid(-m)).mean() + 0.5 * likelihood)
    chosen, rejected = data.sums(True).chunk(2)
    likelihood = -data.log_probs()[: B // 2].sum() / (data.target[: B // 2] != -100).sum() if nll else 0
    got, _ = nn.FusedLinearSimPOLoss(beta=2.0, gamma=0.8, compute_nll_loss=nll)(
        data.weight, data.x, data.target, data.bias
    )
    agree(data, got, -F.logsigmoid(2.0 * (chosen - rejected) - 0.8).mean() + likelihood)


@pytest.mark.parametrize("own_labels", [False, True])
def test_orpo(own_labels):
    data = Data()
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5)) if own_labels else data.target
    labels[:, -1] = -100
    got, metrics = nn.FusedLinearORPOLoss(beta=0.4)(
        data.weight, data.x, data.target, data.bias, nll_target=labels if own_labels else None
    )
    chosen, rejected = data.sums(True).chunk(2)
    odds = [p - torch.log(1 - p.exp()) for p in (chosen, rejected)]
    ratio = F.logsigmoid(odds[0] - odds[1])
    nll = -data.log_probs(labels)[: B // 2].sum() / (labels[: B // 2] != -100).sum()
    agree(data, got, nll - 0.4 * ratio.mean())
    torch.testing.assert_close(metrics.log_odds_ratio, ratio.mean().detach())
    torch.testing.assert_close(metrics.nll_loss, nll.detach())
    logits = data.logits().detach()
    torch.testing.assert_close(metrics.chosen_logits_mean.double(), logits[: B // 2].mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics.rejected_logits_mean.double(), logits[B // 2 :].mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sure", ["chosen", "rejected", "both"])
def test_orpo_of_a_sequence_that_is_certain(sure):
    """Its log-probability is 0, or rounds to above it: neither the loss nor a gradient is NaN or infinite."""
    x = torch.zeros(2, 3, V)
    x[..., 0] = torch.tensor([60.0 if sure in (name, "both") else 1.0 for name in ("chosen", "rejected")])[:, None]
    x.requires_grad_()
    weight = torch.eye(V, requires_grad=True)
    loss, metrics = nn.preference_loss(
        x, weight, torch.zeros(2, 3, dtype=torch.int64), loss_type="odds_ratio", beta=0.4
    )
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and weight.grad.isfinite().all()
    assert metrics.log_odds_ratio.isfinite() and (sure == "both") == (loss.item() == pytest.approx(0.4 * math.log(2)))


@pytest.mark.parametrize(("reference", "average", "kl"), list(itertools.product((True, False), repeat=3)))
def test_kto(reference, average, kl):
    data, liked = Data(), torch.tensor([True, False, False, True, True, False])
    against = torch.linspace(0, 1, B, dtype=torch.float64) if kl else None
    loss = nn.FusedLinearKTOLoss(beta=0.3, use_ref_model=reference, average_log_prob=average, chunk_size=4)
    beside = {"ref_input": data.ref_x, "ref_weight": data.ref_weight, "ref_bias": data.ref_bias} if reference else {}
    got, metrics = loss(data.x, data.weight, data.target, data.bias, liked, kl=against, **beside)
    ratio = data.sums(average) - (data.sums(average, reference=True) if reference else 0)
    want = 1 - torch.sigmoid(0.3 * (ratio - (against if kl else 0)) * torch.where(liked, 1, -1))
    agree(data, got, want.mean())
    torch.testing.assert_close(metrics.chosen_rewards_sum, 0.3 * ratio[liked].sum().detach())
    torch.testing.assert_close(metrics.rejected_logps_sum, data.sums(average)[~liked].sum().detach())
    torch.testing.assert_close(
        metrics.chosen_logits_sum.double(), data.logits()[liked].sum().detach(), rtol=1e-5, atol=1e-4
    )


def policy(data, kind, old, ref, importance, beta, sequence, corrected, delta=None):
    """The loss on whole logits; log-probabilities of every token, masked only where the definitions mask."""
    mask, advantage, p = data.mask.double(), data.advantages[:, None], data.log_probs(data.ids, scale=1 / 0.8)
    old = p.detach() if old is None else old
    log_ratio = p - old
    used = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True) if sequence else log_ratio
    ratio = used.exp().expand(B, T)
    if kind == "cispo":
        loss = -ratio.clamp(max=1.1).detach() * advantage * p
    elif kind == "sapo":
        t = torch.where(advantage > 0, 1.0, 1.05)
        loss = -4 / t * torch.sigmoid(t * (ratio - 1)) * advantage
    elif kind == "vespo":
        log_w = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
        if importance is not None:
            log_w = log_w + (importance.log() * mask).sum(-1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20)
        k, rate = torch.where(advantage >= 0, 2.0, 3.0), torch.where(advantage >= 0, 3.0, 2.0)
        loss = -(rate + k * log_w - rate * log_w.exp()).exp() * advantage * p
    else:
        first = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(first * advantage, ratio.clamp(0.9, 1.1) * advantage)
    if importance is not None and kind != "vespo":
        loss = loss * importance
    kl = torch.zeros_like(p) if ref is None else (ref - p).exp() - (ref - p) - 1
    kl = kl * ratio if corrected else kl
    loss = loss + beta * kl
    reduced = {
        "grpo": lambda: ((loss * mask).sum(-1) / mask.sum(-1)).mean(),
        "bnpo": lambda: (loss * mask).sum() / mask.sum(),
        "dr_grpo": lambda: (loss * mask).sum() / (B * 11),
        "luspo": lambda: (loss * mask).sum(-1).mean(),
    }
    reduced["sapo"] = reduced["grpo"]
    return reduced.get(kind, reduced["bnpo"])(), (kl * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("kind", "old", "ref", "importance", "sequence"),
    list(itertools.product(POLICIES, *[(True, False)] * 4)),
)
def test_grpo(kind, old, ref, importance, sequence):
    data, beta = Data(), 0.2 if ref else 0.0
    if sequence and POLICIES[kind] != "clip":
        with pytest.raises(ValueError, match="sequence"):
            nn.FusedLinearGRPOLoss(loss_type=kind, importance_sampling_level="sequence", use_ref_model=False)(
                data.x, data.weight, data.ids, data.mask, data.advantages
            )
        return
    given = [t if on else None for t, on in ((data.old, old), (data.ref, ref), (data.importance, importance))]
    loss = nn.FusedLinearGRPOLoss(
        beta=beta, use_ref_model=ref, epsilon_low=0.1, epsilon_high=1.1 if kind == "cispo" else 0.1, loss_type=kind,
        importance_sampling_level="sequence" if sequence else "token", temperature=0.8, max_completion_length=11,
        use_bias_correction_kl=importance, delta=1.05 if POLICIES[kind] == "clip" and old else None, chunk_size=4,
    )  # fmt: skip
    got, metrics = loss(
        data.x, data.weight, data.ids, data.mask, data.advantages, data.bias,
        old_per_token_logps=given[0], ref_per_token_logps=given[1], vllm_is_ratio=given[2],
    )  # fmt: skip
    want, kl = policy(data, kind, *given, beta, sequence, importance, loss.options["delta"])
    agree(data, got, want)
    torch.testing.assert_close(metrics.kl, kl.detach())
    assert 0 <= metrics.clip_ratio <= 1


def test_grpo_counts_items_and_computes_the_reference():
    data = Data()
    data.ref = data.log_probs(data.ids, reference=True, scale=1 / 0.8)
    got, _ = grpo_loss(
        data.x, data.weight, data.ids, data.mask, data.advantages, data.bias, ref_input=data.ref_x,
        ref_weight=data.ref_weight, ref_bias=data.ref_bias, beta=0.2, epsilon_low=0.1, epsilon_high=0.1,
        temperature=0.8, num_items_in_batch=50,
    )  # fmt: skip
    want, _ = policy(data, "dapo", None, data.ref, None, 0.2, False, False)
    agree(data, got, want * data.mask.sum() / 50)


@pytest.mark.parametrize("kind", POLICIES)
def test_masked_tokens_may_hold_anything(kind):
    data = Data()
    beside = {
        "ref_per_token_logps": data.ref, "old_per_token_logps": data.old, "vllm_is_ratio": data.importance,
    }  # fmt: skip
    given = (data.weight, data.ids, data.mask, data.advantages, data.bias)

    def run(**beside):
        got, metrics = grpo_loss(data.x, *given, **beside, loss_type=kind, epsilon_high=1.1, max_completion_length=11)
        return got, metrics, torch.autograd.grad(got, data.leaves)

    broken = {name: t.masked_fill(data.mask == 0, float("-inf")) for name, t in beside.items()}
    torch.testing.assert_close(run(**broken), run(**beside))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_size", [0, 1, 2])
def test_chunks_and_recomputation_change_nothing(recompute, chunk_size):
    data = Data()
    got, _ = nn.preference_loss(
        data.x, data.weight, data.target, data.bias, alpha=0.3, chunk_size=chunk_size, recompute=recompute
    )
    want, _ = nn.preference_loss(data.x, data.weight, data.target, data.bias, alpha=0.3)
    agree(data, got, want)


def losses_of(data, importance):
    """Losses that divide by counts of tokens or choose a number by sign."""
    pairs = data.x, data.weight, data.target, data.bias
    for kind in ("sigmoid", "ipo", "odds_ratio"):
        yield nn.preference_loss(*pairs, loss_type=kind, alpha=0.3, average_log_prob=True)
    yield nn.kto_loss(*pairs[:3], torch.arange(B) % 2 == 0, pairs[3], average_log_prob=True)
    for kind in POLICIES:
        yield grpo_loss(
            data.x, data.weight, data.ids, data.mask, data.advantages, data.bias, ref_per_token_logps=data.ref,
            old_per_token_logps=data.old, loss_type=kind, max_completion_length=T, vllm_is_ratio=importance,
        )  # fmt: skip


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_pytorchs_default_dtype_changes_nothing(default):
    data = Data()
    importance = data.importance.bfloat16()  # whose logarithm is taken in a wider dtype
    want = [*losses_of(data, importance.double())]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = [*losses_of(data, importance)]
    finally:
        torch.set_default_dtype(before)
    for (a, a_metrics), (b, b_metrics) in zip(got, want, strict=True):
        assert a.equal(b)
        assert all(one.dtype == other.dtype and one.equal(other) for one, other in zip(a_metrics, b_metrics))
        for one, other in zip(*(torch.autograd.grad(loss, data.leaves) for loss in (a, b))):
            assert one.equal(other)


def test_doubles_are_averaged_and_chosen_in_double():
    data = Data()
    for loss in (nn.FusedLinearSimPOLoss(), nn.FusedLinearORPOLoss()):
        got, _ = loss(data.weight, data.x, data.target, data.bias)
        chosen, rejected = data.sums(True).chunk(2)
        half = data.log_probs()[: B // 2]
        likely = -half.sum() / (data.target[: B // 2] != -100).sum()
        if isinstance(loss, nn.FusedLinearSimPOLoss):
            want = likely - F.logsigmoid(0.1 * (chosen - rejected) - 0.5).mean()
        else:
            odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            want = likely - 0.1 * F.logsigmoid(odds).mean()
        torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_log_probs_carry_a_gradient_of_their_own():
    data = Data()
    sequences = torch.zeros(3, B, dtype=torch.float64)
    sequences[0] = 1
    loss, log_probs = ops.linear_preference(
        data.x, data.weight, data.target, sequences, "sigmoid", [0.3, 0.0, 0.0, 0.05], data.bias, chunk_tokens=2 * T
    )
    own = torch.linspace(-1, 1, B * T, dtype=torch.float64).view(B, T)
    chosen, rejected = data.sums(False).chunk(2)
    want = -F.logsigmoid(0.3 * (chosen - rejected)).sum() + (own * data.log_probs()).sum()
    agree(data, loss + (own * log_probs).sum(), want)
    agree(
        data,
        (own * ops.linear_log_probs(*data.leaves[:2], data.target, data.bias)).sum(),
        (own * data.log_probs()).sum(),
    )


def test_a_frozen_output_layer_gets_no_gradient():
    data = Data(bias=False)
    got, _ = nn.preference_loss(data.x, data.weight.detach(), data.target)
    chosen, rejected = data.sums(False).chunk(2)
    want = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    torch.testing.assert_close(torch.autograd.grad(got, data.x), torch.autograd.grad(want, data.x))


def test_an_untokened_sequence_counts_nothing():
    data = Data()
    data.target[0] = -100
    got, _ = nn.FusedLinearORPOLoss()(data.weight, data.x, data.target, data.bias)
    loss, _ = nn.FusedLinearSimPOLoss()(data.weight, data.x, data.target, data.bias)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, data.leaves))
    assert not got.isnan()


@pytest.mark.parametrize("pairs", [0, 2])
def test_a_likelihood_of_no_tokens_costs_nothing(pairs):
    """Whether its labels are the target's or nll_target's."""
    x, weight = torch.randn(2 * pairs, 3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target = torch.full((2 * pairs, 3), -100)
    for own in (None, target):
        loss, metrics = nn.preference_loss(x, weight, target, alpha=0.5, nll_target=own)
        assert loss.item() == pytest.approx(math.log(2) if pairs else 0.0) and metrics.nll_loss == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))


def test_compiles_without_a_break():
    data = Data(torch.float32)
    loss = nn.FusedLinearDPOLoss(use_ref_model=False, loss_type="apo_zero")

    def step(weight, x, target, bias):
        return loss(weight, x, target, bias)[0]

    args = (data.weight, data.x, data.target, data.bias)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
    agree(data, got, step(*args))


BAD = {
    "loss_type": (ValueError, lambda d: nn.FusedLinearDPOLoss(loss_type="none")),
    "smoothing": (ValueError, lambda d: nn.FusedLinearDPOLoss(loss_type="exo_pair")),
    "unread_smoothing": (ValueError, lambda d: nn.FusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.1)),
    "no_reference": (ValueError, lambda d: nn.FusedLinearDPOLoss()(d.weight, d.x, d.target)),
    "reference": (
        ValueError,
        lambda d: nn.FusedLinearDPOLoss(use_ref_model=False)(d.weight, d.x, d.target, None, d.ref_x, d.ref_weight),
    ),
    "odd": (ValueError, lambda d: nn.FusedLinearORPOLoss()(d.weight, d.x[:5], d.target[:5])),
    "labels": (TypeError, lambda d: nn.FusedLinearKTOLoss()(d.x, d.weight, d.target)),
    "policy": (ValueError, lambda d: nn.FusedLinearGRPOLoss(loss_type="ppo")),
    "chunk_size": (ValueError, lambda d: nn.FusedLinearORPOLoss(chunk_size=-1)),
    "gamma": (ValueError, lambda d: nn.preference_loss(d.x, d.weight, d.target, loss_type="hinge", gamma=1.0)),
    "length": (
        ValueError,
        lambda d: nn.FusedLinearGRPOLoss(loss_type="dr_grpo", use_ref_model=False)(
            d.x, d.weight, d.ids, d.mask, d.advantages
        ),
    ),
}


UNREAD = {
    "both_references": ("both ref_per_token_logps and ref_input", {"ref": True, "ref_input": True}),
    "weight_alone": ("ref_weight is given without ref_input", {"ref_weight": True}),
    "input_alone": ("ref_weight is None", {"ref_input": True}),
    "importance": (r"vllm_is_ratio must be \[6\] or \[6, 1\] or \[6, 7\], got \[3\]", {"importance": torch.ones(3)}),
    "one_importance": (r"vllm_is_ratio must be .*, got \[1, 7\]", {"importance": torch.ones(1, T)}),
    "items": ("num_items_in_batch must be at least 0", {"items": -1}),
    "items_of_ranks": (r"num_items_in_batch must be \[\] or \[1\], got \[2\]", {"items": torch.tensor([3, 4])}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_arguments_of_a_policy_that_would_not_be_read_as_meant(name):
    message, given = UNREAD[name]
    data = Data()
    with pytest.raises(ValueError, match=message):
        grpo_loss(
            data.x, data.weight, data.ids, data.mask, data.advantages, data.bias,
            ref_per_token_logps=data.ref if "ref" in given else None,
            ref_input=data.ref_x if "ref_input" in given else None,
            ref_weight=data.ref_weight if "ref_weight" in given else None,
            vllm_is_ratio=given.get("importance"), num_items_in_batch=given.get("items"),
        )  # fmt: skip


def test_a_batch_may_count_its_items_in_a_tensor_of_one():
    data = Data()
    call = data.x, data.weight, data.ids, data.mask, data.advantages
    assert grpo_loss(*call, num_items_in_batch=torch.tensor([9]))[0].equal(grpo_loss(*call, num_items_in_batch=9)[0])


def test_an_output_layer_of_no_reference_model_is_refused():
    data = Data()
    loss = nn.FusedLinearDPOLoss(use_ref_model=False)
    with pytest.raises(ValueError, match="ref_weight is given without ref_input"):
        loss(data.weight, data.x, data.target, data.bias, None, data.ref_weight)
    for one in (nn.preference_loss, nn.kto_loss):
        beside = () if one is nn.preference_loss else (torch.ones(B, dtype=torch.bool),)
        with pytest.raises(TypeError, match="ignore_index must be an int"):
            one(data.x, data.weight, data.target, *beside, ignore_index=None)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    error, call = BAD[name]
    with pytest.raises(error):
        call(Data())
