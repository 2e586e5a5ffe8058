"""Distillation losses against torch.nn.functional and against their formulas on whole logits in fp64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from devices import DEVICE
from tilesmith import nn, ops, use
from tilesmith.engine.backends import missing
from tilesmith.ops.loss import distill_reference as reference

M, K, V = 9, 12, 37
KERNELS = [b for b in ("reference", "triton") if missing(b, DEVICE, pinned=True) is None]


def log_probs(seed, *shape, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    return drawn.to(dtype).requires_grad_(grad)


@pytest.mark.parametrize(
    ("reduction", "log_target"), list(itertools.product(("mean", "batchmean", "sum", "none"), (True, False)))
)
@pytest.mark.filterwarnings("ignore:reduction")
def test_kl_div_is_that_of_torch(reduction, log_target):
    x, target = log_probs(0, 4, 5, V, grad=True), log_probs(1, 4, 5, V)
    target = (target if log_target else target.exp()).requires_grad_()
    got = nn.KLDivLoss(reduction=reduction, log_target=log_target)(x, target)
    want = F.kl_div(x, target, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got.sum(), (x, target)), torch.autograd.grad(want.sum(), (x, target))):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("eps", [1e-10, 0.0])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_target_of_0_adds_nothing_whatever_x_is(backend, eps):
    x, target = log_probs(0, M, V, dtype=torch.float32), log_probs(1, M, V, dtype=torch.float32).exp()
    target[:, ::3] = 0
    x = x.masked_fill(target == 0, float("-inf")).to(DEVICE).requires_grad_()
    target = target.to(DEVICE).requires_grad_()
    with use(kl_div=backend, kl_div_vjp=backend):
        got = ops.kl_div(x, target, "sum", eps=eps)
        grads = torch.autograd.grad(got, (x, target))
    seen = target > 0
    want = (target[seen] * (target[seen].log() - x[seen])).sum()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads, torch.autograd.grad(want, (x, target)))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kl_div", {}),
        ("kl_div", {"log_target": True}),
        *(("jsd", {"beta": beta}) for beta in (0.0, 0.1, 0.5, 1.0)),
        ("tvd", {}),
    ],
)
def test_nan_is_not_lost(name, options, backend):
    given = [log_probs(i, M, V, dtype=torch.float32).to(DEVICE) for i in range(2)]
    for i in range(2):
        broken = [g.clone() for g in given]
        broken[i][1, 2] = float("nan")
        with use(**{name: backend}):
            assert getattr(ops, name)(*broken, **options).isnan()


def divergence(a, b, kind, beta):
    """Of each row, from log-probabilities of student and teacher."""
    q, p = a.exp(), b.exp()
    if kind == "tvd":
        return (q - p).abs().sum(-1) / 2
    if kind == "kl" or (kind == "jsd" and beta == 0):
        return (p * (b - a)).sum(-1)
    if kind == "reverse_kl" or beta == 1:
        return (q * (a - b)).sum(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (b - m.log()) + (1 - beta) * q * (a - m.log())).sum(-1)


@pytest.mark.parametrize(("beta", "labelled"), list(itertools.product((0.0, 0.1, 0.5, 1.0), (True, False))))
def test_jsd(beta, labelled):
    x, target = log_probs(0, M, V, grad=True), log_probs(1, M, V)
    labels = torch.arange(M).masked_fill(torch.arange(M) % 3 == 1, -7) if labelled else None
    kept = torch.arange(M) % 3 != 1 if labelled else torch.ones(M, dtype=torch.bool)
    got = nn.JSD(beta, ignore_index=-7)(x, target, labels)
    want = divergence(x, target, "jsd", beta)[kept].mean()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


@pytest.mark.parametrize(("reduction", "scale"), [("batchmean", 1 / M), ("mean", 1 / M / V), ("sum", 1.0)])
def test_tvd(reduction, scale):
    p, q = log_probs(0, M, V).exp().requires_grad_(), log_probs(1, M, V).exp()
    got = nn.TVDLoss(reduction)(p, q)
    want = (p - q).abs().sum() / 2 * scale
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, p), torch.autograd.grad(want, p))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("cols", [V, 40])
def test_tvd_has_the_same_gradients_with_its_signs_as_without(backend, cols):
    p, q = (log_probs(seed, M, cols, dtype=torch.float32).exp().to(DEVICE) for seed in (0, 1))
    q[:, ::3] = p[:, ::3]
    labels = (torch.arange(M) % 4 - 1).to(DEVICE)
    signs = reference.packed_signs(p, q, labels != -1)
    one, count = torch.ones((), device=DEVICE), (labels != -1).sum().float()
    with use(tvd_vjp=backend):
        found = [
            ops.tvd_vjp(one, p, q, labels, count, saved, "batchmean", -1, [True, True])
            for saved in (signs, signs.new_empty(0))
        ]
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_jsd_of_near_equal_distributions_does_not_cancel():
    x = log_probs(0, M, V, dtype=torch.float32)
    target = x + 1e-3 * log_probs(1, M, V, dtype=torch.float32)
    want = divergence(x.double(), target.double(), "jsd", 0.5).mean()
    torch.testing.assert_close(ops.jsd(x, target).double(), want, rtol=0.01, atol=0)


class Models:
    """A student and a teacher of different widths; some tokens ignored."""

    def __init__(self, bias=True):
        g = torch.Generator().manual_seed(3)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.x, self.weight = draw(M, K).requires_grad_(), (draw(V, K) / 3).requires_grad_()
        self.bias = draw(V).requires_grad_() if bias else None
        self.teacher, self.teacher_weight = draw(M, K + 5), draw(V, K + 5) / 3
        self.teacher_bias = draw(V) if bias else None
        self.labels = torch.randint(V, (M,), generator=g)
        self.labels[::4] = -100
        self.leaves = [t for t in (self.x, self.weight, self.bias) if t is not None]

    def logits(self):
        z, y = self.x @ self.weight.t(), self.teacher @ self.teacher_weight.t()
        return (z, y) if self.bias is None else (z + self.bias, y + self.teacher_bias)


def agree(models, got, want):
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(1.7 * got, models.leaves), torch.autograd.grad(1.7 * want, models.leaves)):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize(
    ("kind", "temperature", "bias", "given"),
    list(itertools.product(("jsd", "kl", "reverse_kl", "tvd"), (1.0, 2.5), (True, False), (True, False))),
)
def test_fused_distillation(kind, temperature, bias, given):
    models = Models(bias)
    z, y = models.logits()
    kept = models.labels != -100
    soft = divergence((z / temperature).log_softmax(-1), (y / temperature).log_softmax(-1), kind, 0.3)[kept].mean()
    hard = F.cross_entropy(z, models.labels)
    loss = nn.FusedLinearDistillationLoss(
        0.4, 0.8, 0.3, temperature=temperature, chunk_size=4, return_soft_hard_loss=True, divergence=kind
    )
    teacher = (y.detach(), None) if given else (models.teacher, models.teacher_weight)
    got, got_soft, got_hard = loss(
        models.x, models.weight, *teacher, models.labels, models.bias, None if given else models.teacher_bias
    )
    agree(models, got, 0.4 * hard + 0.8 * soft)
    torch.testing.assert_close(torch.stack((got_soft, got_hard)), torch.stack((soft, hard)).detach())


@pytest.mark.parametrize("labelled", [True, False])
def test_fused_jsd(labelled):
    models = Models(False)
    z, y = ((t / 2).log_softmax(-1) for t in models.logits())
    rows = divergence(z, y, "jsd", 0.1)
    got = nn.FusedLinearJSD(0.1, temperature=2.0, accum_dtype=torch.float32)(
        models.x, models.weight, models.teacher, models.teacher_weight, models.labels if labelled else None
    )
    agree(models, got, rows[models.labels != -100].mean() if labelled else rows.mean())


@pytest.mark.parametrize(("reduction", "scale"), [("batchmean", 1.0), ("mean", 1 / V), ("sum", 6.0)])
def test_fused_kl_of_given_probabilities(reduction, scale):
    models = Models(False)
    target = models.logits()[1].detach().softmax(-1)
    target[:, ::3] = 0
    kept = models.labels != -100
    student = (models.logits()[0] / 2).log_softmax(-1)
    want = F.kl_div(student, target, reduction="none").sum(-1)[kept].mean() * scale
    agree(
        models,
        nn.FusedLinearKLDivLoss(reduction, temperature=2.0)(models.x, models.weight, target, models.labels),
        want,
    )


def test_parts_carry_gradients_of_their_own():
    models = Models()
    loss, parts = ops.linear_distillation(
        models.x, models.weight, models.teacher, models.teacher_weight, models.labels, models.bias,
        models.teacher_bias, "kl", hard_weight=0.2, chunk_tokens=4,
    )  # fmt: skip
    z, y = models.logits()
    kept = models.labels != -100
    soft = divergence(z.log_softmax(-1), y.log_softmax(-1), "kl", 0.0)[kept].sum()
    hard = F.cross_entropy(z, models.labels, reduction="sum")
    agree(models, loss + 3 * parts[0] - parts[1], 4 * soft - 0.8 * hard)


def test_nothing_counts_nothing():
    models = Models()
    models.labels[:] = -100
    got = nn.FusedLinearJSDLoss()(models.x, models.weight, models.teacher, models.teacher_weight, models.labels)
    assert got == 0
    assert all(not g.any() for g in torch.autograd.grad(got, models.leaves[:2]))


BAD = {
    "divergence": lambda m: nn.FusedLinearDistillationLoss(divergence="js"),
    "temperature": lambda m: nn.FusedLinearJSDLoss(temperature=0.0),
    "accum_dtype": lambda m: nn.FusedLinearJSD(accum_dtype=torch.float16),
    "beta": lambda m: ops.jsd(m.x, m.x.detach(), beta=1.5),
    "reduction": lambda m: ops.kl_div(m.x, m.x.detach(), reduction="average"),
    "shape": lambda m: ops.tvd(m.x, m.x[:3].detach()),
    "classes": lambda m: ops.linear_distillation(m.x, m.weight, m.teacher, m.teacher_weight[:-1]),
    "hard_without_labels": lambda m: ops.linear_distillation(
        m.x, m.weight, m.teacher, m.teacher_weight, hard_weight=1.0
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    with pytest.raises(ValueError, match="must|no target"):
        BAD[name](Models())
