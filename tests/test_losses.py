"""Cross-entropy where the generic harness cannot say: its oracle is differentiated, and 0 · NaN is NaN there."""

import pytest
import torch

from tilesmith import ops, use
from tilesmith.engine.backends import missing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = [b for b in ("reference", "chunked", "triton") if missing(b, DEVICE, pinned=True) is None]


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
