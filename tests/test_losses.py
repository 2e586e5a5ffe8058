"""Cross-entropy where the generic harness cannot say: its oracle is differentiated, and 0 · NaN is NaN there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devices import DEVICE
from tilesmith import nn, ops, use
from tilesmith.engine.backends import missing
from tilesmith.ops.loss import pitch

KERNELS = [b for b in ("reference", "chunked", "triton") if missing(b, DEVICE, pinned=True) is None]
LINEAR = [b for b in ("chunked", "triton", "hopper") if missing(b, DEVICE, pinned=True) is None]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("backend", KERNELS)
def test_logits_that_do_not_count_may_hold_anything(backend, value, reduction):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator).to(DEVICE)
    target = torch.randint(40, (6,), generator=generator).to(DEVICE)
    target[1::3] = -100
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": reduction}

    def run(logits):
        logits = logits.clone().requires_grad_()
        with use(cross_entropy=backend, cross_entropy_vjp=backend):
            loss = ops.cross_entropy(logits, target, **options)
            return loss, torch.autograd.grad(loss.sum(), logits)[0]

    torch.testing.assert_close(run(logits.masked_fill((target == -100)[:, None], value)), run(logits))


@pytest.mark.parametrize("hidden", [512, 2048, 4096])
@pytest.mark.parametrize("backend", LINEAR)
def test_gradients_are_as_exact_as_one_product(backend, hidden):
    """Within twice what a bf16 product of the exact gradient of the logits, rounded to bf16, is off by in fp64. By
    powers on Hopper dx has errors of four roundings where that has one, which makes just 2."""
    tokens, classes = (4096, 32_000) if DEVICE.type == "cuda" else (64, 512)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, weight = (torch.randn(n, hidden, device=DEVICE, generator=generator) for n in (tokens, classes))
    x, weight = x.bfloat16().requires_grad_(), (weight / hidden**0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (tokens,), device=DEVICE, generator=generator)
    target[::17] = -100
    counted = (target != -100).double() / (target != -100).sum()
    with torch.no_grad():
        grad = (x.double() @ weight.double().t()).softmax(-1)
        grad[torch.arange(tokens, device=DEVICE), target.clamp(min=0)] -= 1
        grad *= counted[:, None]
        exact = grad @ weight.double(), grad.t() @ x.double()
        grad = grad.bfloat16()
        product = grad @ weight, grad.t() @ x
    with use(linear_cross_entropy=backend):
        found = torch.autograd.grad(ops.linear_cross_entropy(x, weight, target, mode="chunks"), (x, weight))
    for name, times, one, of, wide in zip(("dx", "dweight"), (2.1, 2.0), found, product, exact):
        error, allowed = ((value.double() - wide).norm() / wide.norm() for value in (one, of))
        assert error <= times * allowed, f"{name}: off by {error:.2e}, one product by {allowed:.2e}"


NARROW = torch.tensor([[0, 1, 2]] * 2, dtype=torch.int32, device=DEVICE)
LABELLED = {
    "cross_entropy": lambda x, w, i: ops.cross_entropy(x, NARROW, ignore_index=i),
    "linear_cross_entropy": lambda x, w, i: ops.linear_cross_entropy(x, w, NARROW, ignore_index=i),
    "token_stats": lambda x, w, i: ops.token_stats(x, NARROW, i),
    "linear_token_stats": lambda x, w, i: ops.linear_token_stats(x, w, NARROW, None, i),
    "linear_log_probs": lambda x, w, i: ops.linear_log_probs(x, w, NARROW, None, i),
    "linear_preference": lambda x, w, i: nn.preference_loss(x, w, NARROW, ignore_index=i),
    "linear_distillation": lambda x, w, i: ops.linear_distillation(x, w, x, w, NARROW, ignore_index=i),
    "jsd": lambda x, w, i: ops.jsd(x, x, NARROW, ignore_index=i),
    "tvd": lambda x, w, i: ops.tvd(x, x, NARROW, ignore_index=i),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_of_32_bits_are_not_compared_with_a_number_beyond_them(name):
    """PyTorch would compare them with its lowest bits: here those of the label 0."""
    x, weight = torch.randn(2, 3, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE)
    LABELLED[name](x, weight, -(2**31))
    with pytest.raises(ValueError, match=f"{name}: ignore_index is {2**40}.*long"):
        LABELLED[name](x, weight, 2**40)


def test_labels_that_are_no_class_are_refused_by_the_reference_too():
    x, weight, target = torch.randn(3, 8), torch.randn(8, 8), torch.tensor([0, 8, 1])
    with use(linear_distillation="reference"), pytest.raises(ValueError, match="the label 8"):
        ops.linear_distillation(x, weight, x, weight, target)


def test_token_stats_are_those_of_whole_logits():
    x, weight = torch.randn(3, 7, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    target = torch.randint(50, (3, 7))
    target[0, :2] = -100
    leaves = x.requires_grad_(), weight.requires_grad_()
    kept = target != -100
    z = x @ weight.T
    distribution = torch.distributions.Categorical(logits=z)
    wanted = distribution.log_prob(target.clamp(min=0)), distribution.entropy(), z.logsumexp(-1)
    *found, predicted = ops.linear_token_stats(*leaves, target, chunk_tokens=4)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a[kept], b[kept])
        assert not a[~kept].any()
    assert torch.equal(predicted[kept], z.argmax(-1)[kept]) and (predicted[~kept] == -1).all()
    losses = [(-a[kept].mean() + 1e-2 * (c[kept] ** 2).mean() - 0.1 * b[kept].mean()) for a, b, c in (found, wanted)]
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses)):
        torch.testing.assert_close(a, b)
    loss = ops.linear_cross_entropy(*leaves, target, z_loss=1e-2)
    torch.testing.assert_close(-found[0][kept].mean() + 1e-2 * (found[2][kept] ** 2).mean(), loss)


def test_token_stats_of_classes_that_cannot_be():
    """A bias of -inf, as masks of a vocabulary have it, adds nothing to entropies and gets no gradient."""
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    bias = torch.zeros(11)
    bias[[2, 7]] = float("-inf")
    kept = bias == 0
    labels = torch.tensor([0, 1, 3, 10, -100])
    log_probs, entropy, _, predicted = ops.linear_token_stats(x, weight, labels, bias)
    wanted = torch.distributions.Categorical(logits=(x @ weight.T)[:, kept]).entropy()
    torch.testing.assert_close(entropy[:4], wanted[:4])
    assert kept[predicted[:4]].all()
    a, b = (torch.autograd.grad((e[:4]).sum(), x)[0] for e in (entropy, wanted))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("masked", [float("-inf"), torch.finfo(torch.float32).min, -1e38])
@pytest.mark.parametrize("backend", KERNELS)
def test_entropies_of_masked_classes_have_gradients_of_any_size(backend, masked):
    """Masks are -inf or the lowest number; a GradScaler multiplies the loss, and so its gradient, by 65536."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 5:] = masked
    logits = logits.to(DEVICE).requires_grad_()
    target = torch.tensor([0, 1, 4, -100], device=DEVICE)
    with use(token_stats=backend, token_stats_vjp=backend):
        _, entropy, _, _ = ops.token_stats(logits, target)
        (got,) = torch.autograd.grad(entropy.sum(), logits, torch.tensor(65536.0, device=DEVICE))
    wanted = torch.distributions.Categorical(logits=logits[:3, :5]).entropy()
    torch.testing.assert_close(entropy[:3], wanted)
    (want,) = torch.autograd.grad(wanted.sum() * 65536, logits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def test_token_stats_hold_one_chunk_of_logits():
    x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    seen = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            if func.namespace == "aten":  # our op's own inputs and outputs are no logits
                seen.extend(t.numel() for t in tensors if isinstance(t, torch.Tensor))
            return out

    with Largest():
        log_probs, entropy, lse, _ = ops.linear_token_stats(x, weight, torch.randint(5000, (64,)), chunk_tokens=8)
        (log_probs + entropy + lse).sum().backward()
    assert seen and max(seen) <= 8 * 5000


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "linear"])
def test_the_loss_has_its_z_term_accuracy_and_predictions_beside_it(linear, scaled, reduction):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(11, (2, 6), generator=generator)
    target[0, :2] = -100
    options = {"z_loss": 0.03, "softcap": 9.0, "reduction": reduction}
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    if linear:
        found = nn.linear_cross_entropy_output(*leaves, target, token_scaling=scaled, **options)
    else:
        found = nn.cross_entropy_output(leaves[0] @ leaves[1].T, target, token_scaling=scaled, **options)
    wanted_leaves = [t.clone().requires_grad_() for t in (x, weight)]
    z = 9.0 * torch.tanh(wanted_leaves[0] @ wanted_leaves[1].T / 9.0)
    counted = target != -100
    ce = torch.nn.functional.cross_entropy(z.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    square = torch.where(counted, 0.03 * z.logsumexp(-1).square(), 0.0)
    share = torch.exp(-ce.detach()) if scaled else torch.ones_like(ce)
    hits = (counted & (z.argmax(-1) == target)).double()
    terms, square = (ce + square) * share, square * share
    if reduction != "none":
        by = counted.sum() if reduction == "mean" else 1
        terms, square, hits = terms.sum() / by, square.sum() / by, hits.sum() / counted.sum()
    torch.testing.assert_close(found.loss, terms)
    torch.testing.assert_close(found.z_loss, square.detach())
    torch.testing.assert_close(found.token_accuracy, hits)
    assert torch.equal(found.predicted_tokens, torch.where(counted, z.argmax(-1), -1))
    wanted = torch.autograd.grad(terms.sum(), wanted_leaves)
    for got, right in zip(torch.autograd.grad(found.loss.sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(got, right)


def test_the_loss_and_its_output_agree():
    logits, target = torch.randn(5, 9), torch.tensor([3, -100, 0, 8, 2])
    found = nn.cross_entropy_output(logits, target, z_loss=0.1, scale=0.5)
    torch.testing.assert_close(found.loss, ops.cross_entropy(logits, target, z_loss=0.1, scale=0.5))
    with pytest.raises(ValueError, match="cross_entropy_output: target has shape"):
        nn.cross_entropy_output(logits, target[:4])
    with pytest.raises(ValueError, match="reduction"):
        nn.cross_entropy_output(logits, target, reduction="max")


LINEAR_LOSSES = "cross_entropy", "token_stats", "distillation"
LOSSES = {
    "keep": lambda x, w, t, b: ops.linear_cross_entropy(x, w, t, bias=b, mode="keep", softcap=20.0),
    "chunks": lambda x, w, t, b: ops.linear_cross_entropy(x, w, t, bias=b, mode="chunks", chunk_tokens=3),
    "recompute": lambda x, w, t, b: ops.linear_cross_entropy(x, w, t, bias=b, mode="recompute", chunk_tokens=4),
    "none": lambda x, w, t, b: ops.linear_cross_entropy(x, w, t, bias=b, reduction="none", chunk_tokens=2).square(),
    "stats": lambda x, w, t, b: sum(ops.linear_token_stats(x, w, t, bias=b)[:3]),
    "distillation": lambda x, w, t, b: ops.linear_distillation(
        x, w, x.detach() / 2, w.detach(), t, bias=b, hard_weight=0.5, chunk_tokens=4
    )[0],
}


@pytest.mark.parametrize("backend", [b for b in KERNELS if b != "reference"])
@pytest.mark.parametrize("classes", [37, 4133])
@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_logits_may_start_at_multiples_of_16_bytes(monkeypatch, name, classes, backend):
    monkeypatch.setattr(pitch, "_unit", lambda dtype, device: 16 // dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator) / 4 for s in ((7, 16), (classes, 16), (classes,)))
    target = torch.randint(classes, (7,), generator=generator)
    target[2] = -100

    def run(backend):
        tensors = [t.to(DEVICE).requires_grad_() for t in (x, weight, bias)]
        with use(**{f"linear_{op}{end}": backend for op in LINEAR_LOSSES for end in ("", "_vjp")}):
            loss = LOSSES[name](*tensors[:2], target.to(DEVICE), tensors[2])
            return loss, torch.autograd.grad(loss.sum(), tensors)

    torch.testing.assert_close(run(backend), run("reference"), rtol=1e-4, atol=1e-5)
    assert pitch.rows_in(torch.empty(400), 3, 37).shape == (3, 40)


@pytest.mark.parametrize("backend", [b for b in KERNELS if b != "reference"])
@pytest.mark.parametrize("name", ["keep", "chunks", "recompute", "none", "stats"])
def test_features_that_do_not_count_reach_no_gradient_of_theirs(monkeypatch, name, backend):
    monkeypatch.setattr(pitch, "_unit", lambda dtype, device: 16 // dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).to(DEVICE) for s in ((5, 16), (37, 16), (37,)))
    target = torch.randint(37, (5,), generator=generator).to(DEVICE)
    target[2] = -100
    x[2] = float("nan")
    x.requires_grad_()
    with use(**{f"linear_{op}{end}": backend for op in LINEAR_LOSSES for end in ("", "_vjp")}):
        (dx,) = torch.autograd.grad(LOSSES[name](x, weight, target, bias).sum(), x)
    assert dx.isfinite().all() and not dx[2].any()


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_features_in_double_with_a_shorter_weight(weight_dtype):
    """The weight's gradient adds up in fp32: on a GPU a product of doubles is not written so by one call."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(40, 32, generator=chance, dtype=torch.float64).to(DEVICE).requires_grad_()
    weight = (torch.randn(48, 32, generator=chance) / 8).to(DEVICE, weight_dtype).requires_grad_()
    target = torch.randint(48, (40,), generator=chance).to(DEVICE)
    with use(linear_cross_entropy="chunked"):
        grads = torch.autograd.grad(ops.linear_cross_entropy(x, weight, target, chunk_tokens=16), (x, weight))
    wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ weight.double().t(), target), (x, weight))
    torch.testing.assert_close(grads[0], wanted[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grads[1], wanted[1], rtol=1e-2, atol=1e-5)
