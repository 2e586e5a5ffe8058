"""Arguments of the wrong kind: for every op and every parameter, refused by name before anything else is asked."""

import pytest
import torch
from torch import Tensor

from tilesmith import explain, ops, register_kernel, use
from tilesmith.engine import cases
from tilesmith.engine import ops as declared

X, W = torch.randn(3, 8), torch.randn(8)


def _calls():
    """(op, its arguments, parameter, whether that is a tensor's): from cases that give the parameter a value."""
    for name, op in sorted(declared().items()):
        seen = set()
        for case in cases(name):
            if "test" not in case.tags or torch.float32 not in case.dtypes or name.endswith("_vjp"):
                continue
            fresh = [p for p, value in case.args.items() if value is not None and p not in seen]
            seen.update(fresh)
            if fresh:
                args = op.bind((), case.build(torch.device("cpu"), torch.float32, case.generator()))
                for parameter in fresh:
                    value = args[op.parameters.index(parameter)]
                    yield pytest.param(op, args, parameter, value, id=f"{name}-{parameter}")


@pytest.mark.parametrize(("op", "args", "parameter", "value"), sorted(_calls(), key=lambda call: call.id))
def test_every_parameter_refuses_other_kinds(op, args, parameter, value):
    at = op.parameters.index(parameter)
    wrong = [{}, object()]
    if isinstance(value, Tensor):
        wrong += ["x", 1.0, [1.0], (value,), value.detach().numpy() if value.dtype.itemsize > 1 else b""]
        wrong += [value.detach().to_sparse()] if value.ndim else []
    elif isinstance(value, bool):
        wrong += ["yes", 1.5, None if op.signature.parameters[parameter].annotation is bool else "no", torch.ones(3)]
    elif isinstance(value, int | float):
        wrong += ["1", [1], True, torch.ones(()), 2**70, float("nan"), float("inf")]
    elif isinstance(value, str):
        wrong += [1, True, ["none"], torch.ones(3)]
    before = torch.get_rng_state()
    for bad in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"^{op.name}: {parameter}\b"):
            op(*args[:at], bad, *args[at + 1 :])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", [n for n in sorted(declared()) if not n.endswith("_vjp")])
def test_required_tensors_are_not_none(name):
    op = declared()[name]
    required = [p for p in op.parameters if op.signature.parameters[p].annotation is Tensor]
    with pytest.raises(TypeError, match=rf"^{name}: {required[0]} must be a tensor, got None"):
        op(**dict.fromkeys(op.parameters))


def test_products_of_tensors_without_data():
    assert ops.linear(X.to("meta"), torch.empty(5, 8, device="meta")).shape == (3, 5)
    with pytest.raises(ValueError, match="linear: weight is on cpu, x on meta"):
        ops.linear(X.to("meta"), torch.randn(5, 8))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: use(rms_norm=None).__enter__(),
            TypeError,
            r"use\(\): rms_norm must be the name of a backend, got None",
        ),
        (lambda: explain(["rms_norm"]), TypeError, "explain: op must be an op or its name, got list"),
        (lambda: register_kernel("swish", backend=3), TypeError, "register_kernel: backend must be a string or None"),
        (
            lambda: register_kernel("swish", rank="high"),
            TypeError,
            "register_kernel: rank must be an int, got str 'high'",
        ),
        (
            lambda: register_kernel("swish", rejects=[]),
            TypeError,
            "register_kernel: rejects must be callable, got list",
        ),
        (lambda: register_kernel("swish", errors=0.1), TypeError, "register_kernel: errors must be a mapping or None"),
    ],
)
def test_names_of_the_engine(call, error, words):
    with pytest.raises(error, match=words):
        call()
