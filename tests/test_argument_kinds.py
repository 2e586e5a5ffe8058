"""Arguments of the wrong kind: for every op and every parameter, refused by name before anything else is asked."""

import inspect

import pytest
import torch
from torch import Tensor

from tilesmith import explain, ops, register_kernel, use
from tilesmith.engine import Op, cases
from tilesmith.engine import ops as declared

X, W = torch.randn(3, 8), torch.randn(8)
Q, HEADS, LABELS = torch.randn(1, 2, 4, 8), torch.randn(1, 3, 8), torch.tensor([1, 2, 0])
JAGGED = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
NAN, INF = float("nan"), float("inf")


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
        wrong += [
            "x",
            1.0,
            [1.0],
            (value,),
            b"" if value.dtype.itemsize == 1 else value.detach().float().numpy(),
            JAGGED,
        ]
        wrong += [value.detach().to_sparse()] if value.ndim else []
    elif isinstance(value, bool):
        wrong += ["yes", 1.5, None if op.signature.parameters[parameter].annotation is bool else "no", torch.ones(3)]
    elif isinstance(value, int | float):
        wrong += ["1", [1], True, torch.ones(()), 2**70, NAN, INF]
    elif isinstance(value, str):
        wrong += [1, True, ["none"], torch.ones(3)]
    elif isinstance(value, list | tuple):
        wrong += [1, True, "x", ["x"] * len(value), [None] * len(value), torch.ones(len(value))]
        other = (NAN, True) if isinstance(value[0], float) else (1.5, True) if type(value[0]) is int else (1,)
        wrong += [[one] * len(value) for one in other]
    before = torch.get_rng_state()
    for bad in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"^{op.name}: {parameter}\b"):
            op(*args[:at], bad, *args[at + 1 :])
    assert torch.equal(before, torch.get_rng_state())


def _required(op):
    return [p for p in op.parameters if op.signature.parameters[p].annotation is Tensor]


@pytest.mark.parametrize(
    "name", [n for n, op in sorted(declared().items()) if not n.endswith("_vjp") and _required(op)]
)
def test_required_tensors_are_not_none(name):
    op, required = declared()[name], _required(declared()[name])
    with pytest.raises(TypeError, match=rf"^{name}: {required[0]} must be a tensor, got None"):
        op(**dict.fromkeys(op.parameters))


FUNCTIONS = {  # with their required arguments: what they look at before an op's own check, or hand on to another
    "attention": {"q": Q, "k": Q, "v": Q},
    "attention_fp8": {"q": Q, "k": Q, "v": Q},
    "bias_dropout": {"x": X},
    "bias_dropout_residual": {"x": X, "residual": X},
    "cross_entropy": {"logits": X, "target": LABELS},
    "dropout_add_norm": {"x": X, "residual": X, "weight": W, "p": 0.1},
    "flash_attention_backward": {"q": Q, "k": Q, "v": Q, "out": Q, "lse": Q[..., 0], "dout": Q},
    "flash_attention_forward": {"q": Q, "k": Q, "v": Q},
    "fused_add_relu": {"x": X, "y": X},
    "fused_bias_dropout": {"x": X},
    "fused_bias_gelu": {"x": X},
    "fused_linear_forward": {"x": X, "weight": X},
    "jsd": {"x": X, "target": X},
    "kl_div": {"x": X, "target": X},
    "linear_act": {"x": X, "weight": X},
    "linear_cross_entropy": {"x": X, "weight": X, "target": LABELS},
    "linear_distillation": {"x": X, "weight": X, "teacher": X, "teacher_weight": X},
    "linear_log_probs": {"x": X, "weight": X, "target": LABELS},
    "token_stats": {"logits": X, "target": LABELS},
    "linear_token_stats": {"x": X, "weight": X, "target": LABELS},
    "memory_efficient_attention": {"query": HEADS, "key": HEADS, "value": HEADS, "num_heads": 2},
    "memory_efficient_linear": {"x": X, "weight": X},
    "rmsnorm": {"x": X, "weight": W},
    "softmax": {"x": X},
    "softmax_dropout": {"x": X, "p": 0.1},
    "tvd": {"x": X, "target": X},
}
WRONG = ({}, "x", 1.5, [1.5], (X,), [NAN], [None], b"x", X.numpy(), X.to_sparse(), JAGGED, 2**70, NAN)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_refuse_other_kinds_in_their_own_name(name):
    function, given = getattr(ops, name), FUNCTIONS[name]
    signature = function.signature if isinstance(function, Op) else inspect.signature(function)
    function(**given)
    before = torch.get_rng_state()
    for parameter, described in signature.parameters.items():
        for bad in WRONG:
            plain = getattr(described.annotation, "__name__", described.annotation)
            if isinstance(bad, float | int) and "float" in str(plain) and bad == bad:
                continue
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: (.* )?{parameter}\b"):
                function(**{**given, parameter: bad})
    assert torch.equal(before, torch.get_rng_state())


def test_sequences_are_checked_by_element():
    case = next(c for c in cases("linear_preference") if "test" in c.tags)
    op = declared()["linear_preference"]
    args = op.bind((), case.build(torch.device("cpu"), torch.float32, case.generator()))
    call = dict(zip(op.parameters, args))
    for bad, error in ((NAN, ValueError), ("x", TypeError), (None, TypeError), (True, TypeError)):
        for at in range(len(call["options"])):
            options = [bad if n == at else value for n, value in enumerate(call["options"])]
            with pytest.raises(
                error, match=r"^linear_preference: options (must be a sequence of numbers|is .* not contain NaN)"
            ):
                op(**{**call, "options": options})


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
