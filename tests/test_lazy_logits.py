"""Lazy logits: used like a tensor, computed when looked at, never computed from newer weights."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilesmith.models.layers.logits import LazyLogits


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


def test_lazy_logits_take_the_labels_that_torch_takes(lazy):
    """Those of 8 bits, too; their gradient torch has on a GPU alone."""
    labels = torch.arange(10, dtype=torch.uint8) % 9
    found, expected = (F.cross_entropy(z.view(-1, 9), labels) for z in lazy)
    torch.testing.assert_close(found, expected)


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
