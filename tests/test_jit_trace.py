"""torch.jit.trace: it records PyTorch's operations alone, so an op must be one of them: any sizes, with gradients."""

import warnings

import pytest
import torch
from torch import Tensor

from op_runs import NAMES, arguments_of, cotangents_of
from tilesmith import ops
from tilesmith.engine import ops as declared

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def _detached(args):
    return [a.detach() if isinstance(a, Tensor) else a for a in args]


@pytest.mark.parametrize("name", [n for n in NAMES if not declared()[n].mutates])
def test_a_trace_computes_what_the_op_does(name):
    """Traced with gradients asked for, which once left the outputs in the trace as constants."""
    op, args = arguments_of(name)
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

    def call(*tensors):
        full = list(args)
        for i, t in zip(at, tensors):
            full[i] = t
        return op(*full)

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        try:
            traced = torch.jit.trace(call, tuple(args[i] for i in at), check_trace=False)
        except NotImplementedError as refusal:
            assert str(refusal).startswith(f"{name}: torch.jit.trace records no list of bools"), refusal
            return
    assert f"tilesmith::{op.dispatched_as}" in str(traced.graph)
    fresh = [
        a.flip(0) if a.ndim and a.dtype.is_floating_point and a.dtype.itemsize > 1 else a
        for a in _detached(args[i] for i in at)
    ]
    given = [f.clone().requires_grad_(args[i].requires_grad) for f, i in zip(fresh, at)]
    results = []
    for run in (call, traced):
        outs = run(*given)
        outs = outs if isinstance(outs, tuple) else (outs,)
        wanted = [o for o in outs if o.requires_grad]
        leaves = [g for g in given if g.requires_grad]
        grads = torch.autograd.grad(wanted, leaves, cotangents_of(outs), allow_unused=True) if wanted else ()
        results.append([*outs, *grads])
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_a_traced_layer_takes_other_sizes_and_its_own_weight(tmp_path):
    from tilesmith import nn

    layer, x = nn.RMSNorm(8), torch.randn(3, 8)
    traced = torch.jit.trace(layer, (x,))
    torch.jit.save(traced, tmp_path / "layer.pt")
    loaded, more = torch.jit.load(tmp_path / "layer.pt"), torch.randn(5, 2, 8)
    for module in (traced, loaded):
        torch.testing.assert_close(module(more), layer(more))
    traced(more).sum().backward()
    assert layer.weight.grad is not None


def test_bad_arguments_are_refused_while_tracing_as_ever():
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(7,\); for this x it must be \[8\]"):
        torch.jit.trace(ops.rms_norm, (torch.randn(3, 8), torch.ones(7)))
    with pytest.raises(TypeError, match="softmax: scale must be a number, got a tensor"):
        torch.jit.trace(lambda x: ops.softmax(x, scale=x.shape[-1]), (torch.randn(3, 8),))
