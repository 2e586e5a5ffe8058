"""Gradients made along with a loss: scaled in place by the backward, and only where nothing reads them again."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from devices import DEVICE
from tilesmith import ops

TOKENS, HIDDEN, CLASSES = 8, 16, 24
FACTOR = 0.75  # of the loss in each backward, so that a gradient scaled twice shows


def _cross_entropy(x, weight, target, teacher, sequences):
    return ops.linear_cross_entropy(x, weight, target, mode="chunks")


def _preference(x, weight, target, teacher, sequences):
    return ops.linear_preference(x.view(4, 2, HIDDEN), weight, target.view(4, 2), sequences, "kto", [0.1])[0]


def _distillation(x, weight, target, teacher, sequences):
    return ops.linear_distillation(x, weight, teacher)[0]


@pytest.fixture(params=[_cross_entropy, _preference, _distillation], ids=lambda f: f.__name__[1:])
def case(request):
    """(the loss of x and weight, x, weight)"""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, HIDDEN, device=DEVICE, requires_grad=True) for n in (TOKENS, CLASSES))
    beside = (
        torch.arange(TOKENS, device=DEVICE),
        torch.randn(TOKENS, CLASSES, device=DEVICE),
        torch.rand(4, 4, device=DEVICE),
    )
    return lambda x, weight: FACTOR * request.param(x, weight, *beside), x, weight


def _expected(case):
    """Gradients whose backward keeps its graph, which leaves alone what is saved."""
    loss, x, weight = case
    return torch.autograd.grad(loss(x, weight), (x, weight), retain_graph=True)


def _same(got, want):
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


def _saved(value):
    """Addresses of what the loss's own node keeps; value: FACTOR times the loss."""
    return {t.data_ptr() for t in value.grad_fn.next_functions[0][0].saved_tensors if t is not None and t.numel()}


def test_a_last_backward_returns_what_was_saved(case):
    want, (loss, x, weight) = _expected(case), case
    value = loss(x, weight)
    saved = _saved(value)
    got = torch.autograd.grad(value, (x, weight))
    _same(got, want)
    assert {g.data_ptr() for g in got} <= saved


def test_a_graph_that_is_kept_is_left_alone(case):
    want, (loss, x, weight) = _expected(case), case
    value = loss(x, weight)
    saved = _saved(value)
    for again in (True, True, False):
        got = torch.autograd.grad(value, (x, weight), retain_graph=again)
        _same(got, want)
        assert {g.data_ptr() for g in got}.isdisjoint(saved) == again


@pytest.mark.parametrize("case", [_cross_entropy, _distillation], indirect=True, ids=lambda f: f.__name__[1:])
def test_gradients_of_gradients(case):
    want, (loss, x, weight) = _expected(case), case
    got = torch.autograd.grad(loss(x, weight), (x, weight), create_graph=True)
    torch.testing.assert_close(got, want)
    assert torch.autograd.grad(got[0].square().sum(), weight)[0].abs().sum() > 0


def test_tensors_that_hooks_hand_out_are_left_alone(case):
    want, (loss, x, weight) = _expected(case), case
    seen = []
    with saved_tensors_hooks(lambda t: (seen.append((t, t.clone())), t)[1], lambda t: t):
        value = loss(x, weight)
    _same(torch.autograd.grad(value, (x, weight)), want)
    assert all(torch.equal(t, then) for t, then in seen)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(case, reentrant):
    want, (loss, x, weight) = _expected(case), case
    checkpoint(loss, x, weight, use_reentrant=reentrant).backward()
    _same((x.grad, weight.grad), want)


def test_gradients_add_up(case):
    """In a leaf that took the first one for its own, and where one tensor goes into two losses."""
    want, (loss, x, weight) = _expected(case), case
    for steps in (1, 2):
        loss(x, weight).backward()
        _same((x.grad, weight.grad), [steps * w for w in want])
    x.grad = weight.grad = None
    shared = x * 1
    (loss(shared, weight) + loss(shared, weight)).backward()
    _same((x.grad, weight.grad), [2 * w for w in want])


def test_hooks_on_gradients_may_keep_them(case):
    want, (loss, x, weight) = _expected(case), case
    kept = []
    handle = x.register_hook(kept.append)
    loss(x, weight).backward()
    loss(x, weight).backward()
    handle.remove()
    _same(kept, [want[0], want[0]])


def test_compiled(case):
    want, (loss, x, weight) = _expected(case), case
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        _same(torch.autograd.grad(compiled(x, weight), (x, weight)), want)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs")
def test_a_captured_backward_may_run_twice(case):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss, x, weight = case[0], *(t.detach().requires_grad_() for t in case[1:])
        want = _expected((loss, x, weight))
        value = loss(x, weight)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = torch.autograd.grad(value, (x, weight))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        _same(got, want)
