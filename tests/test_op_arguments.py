"""Arguments of every op: any strides, left as they came, and a gradient for each that asks for one."""

import pytest
import torch
from torch import Tensor

from devices import DEVICE
from op_runs import DIFFERENTIABLE, NAMES, arguments_of, cotangents_of, kernels_of
from tilesmith.engine import Op, T, cases, ops, use
from tilesmith.validate.cases import each_output, outputs_and_gradients, pins_of


def _thinned(a):
    """Every other element of something contiguous: its dims can be joined, but even the last stride is 2."""
    room = a.new_full((2 * a.numel() + 1,), float("nan") if a.is_floating_point() else 0)
    return room[1::2].view(a.shape).copy_(a)


def _shifted(a):
    """Contiguous, but one element behind where a vector load could start."""
    room = a.new_empty(a.numel() + 1)
    return room[1:].view(a.shape).copy_(a)


def _turned(a):
    """The dims the other way round in memory."""
    back = tuple(reversed(range(a.ndim)))
    return a.permute(back).contiguous().permute(back)


def _expanded(a):
    """The first entry along the first dim for all of them, by a stride of 0."""
    return a[:1].expand_as(a) if a.ndim and len(a) and a.is_floating_point() else a


def _forms(name):
    """The first case of each set of tensors that an op's cases give it."""
    found = {}
    for case in cases(name):
        if "interpret" in case.tags and torch.float32 in case.dtypes:
            found.setdefault(frozenset(n for n, v in case.args.items() if isinstance(v, T)), case)
    return list(found.values())


LAID_OUT = [
    pytest.param(name, case, lay_out, id=f"{name}-{case.name}-{lay_out.__name__[1:]}")
    for name in NAMES
    for lay_out in (_thinned, _shifted, _turned, _expanded)
    for case in _forms(name)[: None if lay_out is _thinned else 1]
]


@pytest.mark.parametrize(("name", "case", "lay_out"), LAID_OUT)
def test_strides_have_no_bearing(name, case, lay_out):
    op = ops()[name]
    args = op.bind((), case.build(DEVICE, torch.float32, case.generator()))
    written = [i for i, n in enumerate(op.parameters) if n in op.mutates]

    def run(backend, finish):
        laid = [lay_out(a.detach().clone()) if isinstance(a, Tensor) else a for a in args]
        if lay_out is _expanded:
            laid = [args[i].clone() if i in written else a for i, a in enumerate(laid)]
        given = [finish(a) if isinstance(a, Tensor) else a for a in laid]
        leaves = [g.requires_grad_() for g, a in zip(given, args) if isinstance(a, Tensor) and a.requires_grad]
        with use(**pins_of(op, backend)):
            outs = each_output(op(*given))
            cotangents = [finish(lay_out(c)) for c in cotangents_of(outs)]
            public = [o for o in outs if o.requires_grad]
            grads = torch.autograd.grad(public, leaves, cotangents, allow_unused=True) if public else ()
        return [*outs, *grads, *(given[i] for i in written)]

    for backend in kernels_of(op):
        try:
            got = run(backend, Tensor.detach)
        except NotImplementedError:
            continue
        want = run(backend, lambda a: a.clone(memory_format=torch.contiguous_format))
        for n, (g, w) in enumerate(zip(got, want)):
            torch.testing.assert_close(g, w, equal_nan=True, msg=lambda m, b=backend, n=n: f"{b}, result {n}: {m}")


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, c, id=f"{n}-{c.name}") for n in DIFFERENTIABLE for c in _forms(n)]
)
def test_a_tensor_that_receives_no_gradient_may_not_ask_for_one(name, case):
    op = ops()[name]
    args = op.bind((), case.build(DEVICE, torch.float32, case.generator()))
    served = {n[1:] for n in op.vjp.outputs} | set(op.alias)
    for i, (n, a) in enumerate(zip(op.parameters, args)):
        if isinstance(a, Tensor) and a.is_floating_point() and n not in served:
            with pytest.raises(ValueError, match=f"{name}: {n} requires a gradient"):
                op(*args[:i], a.detach().requires_grad_(), *args[i + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name):
    op, args = arguments_of(name)
    for backend in kernels_of(op):
        if op.kernel(backend).rejects(op._describe(*args)):
            continue
        before = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
        with use(**{name: backend}):
            outputs_and_gradients(op, args)
        for n, was, now in zip(op.parameters, before, args):
            if isinstance(now, Tensor):
                torch.testing.assert_close(now.detach(), was, rtol=0, atol=0, equal_nan=True, msg=n)


def _scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def test_the_first_call_of_an_op_may_be_compiled():
    op = Op(_scaled, name="arguments_scaled", fake=lambda x, scale: torch.empty_like(x))
    compiled = torch.compile(lambda x: op(x, scale=3.0), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
