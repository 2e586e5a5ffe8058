"""Which functions the rotary rule takes for rotations, and which that look alike it leaves alone."""

import importlib
import inspect

import pytest
import torch
from torch import nn

from optimize_models import Calls, batch, build, ops_everywhere, train  # noqa: F401
from tilesmith.models import optimize, undo
from tilesmith.models.layers.rotations import Rotation, recognise


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def opposite(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos - half(q) * sin, k * cos - half(k) * sin


def moved(q, k, cos, sin, unsqueeze_dim=1):
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return halves(q, k, cos, sin, unsqueeze_dim)


def one_tensor(tensor, sin, cos):
    sin, cos = (table[:, :, None].repeat_interleave(2, -1) for table in (sin, cos))
    return tensor * cos + neighbours(tensor) * sin


def complex_table(xq, xk, freqs_cis):
    def rotated(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, :, None]).flatten(3).type_as(x)

    return rotated(xq), rotated(xk)


def swapped(tensor, sin, cos):
    return one_tensor(tensor, cos, sin)


def heads_first(tensor, sin, cos):
    sin, cos = (table[:, None].repeat_interleave(2, -1) for table in (sin, cos))
    return tensor * cos + neighbours(tensor) * sin


def reflection(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q).abs() * sin, k * cos + half(k).abs() * sin


def queries_alone(q, k, cos, sin, unsqueeze_dim=1):
    return halves(q, k, cos, sin, unsqueeze_dim)[0], k


def scaled(xq, xk, freqs_cis):
    q, k = complex_table(xq, xk, freqs_cis)
    return q * 1.01, k * 1.01


ONES = {
    halves: Rotation("halves", False),
    opposite: Rotation("halves", False, opposite=True),
    moved: Rotation("halves", False, moved=True),
    one_tensor: Rotation("single", True, takes="x, sin, cos"),
    complex_table: Rotation("single", True, takes="q, k, cis"),
}


@pytest.mark.parametrize("function", ONES)
def test_a_rotation_is_recognised_as_the_one_that_it_is(function):
    assert recognise(function) == [ONES[function]]


@pytest.mark.parametrize("function", [swapped, heads_first, reflection, queries_alone, scaled])
def test_what_only_looks_like_a_rotation_is_not_one(function):
    assert recognise(function) == []


def as_a_module(function):
    """What the `kernels` package makes of a function that transformers hands it, so that `kernelize` can replace it."""

    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    Func.forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return Func()


@pytest.mark.parametrize("kernelized", [False, True])
def test_a_function_that_kernels_made_a_module_of(kernelized, monkeypatch):
    """It is replaced as the function is, but not where a kernel of the Hub computes it."""
    pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    module = as_a_module(halves)
    if kernelized:
        module.forward = halves
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", module)
    model, inputs = build("llama"), batch("llama")
    plain = train(model, inputs)
    optimize(model)
    with Calls() as calls:
        found = train(model, inputs)
    assert calls.get("rope", 0) == (0 if kernelized else 2)
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[2], plain[2], rtol=1e-4, atol=1e-6)
    assert modeling.apply_rotary_pos_emb is module and torch.equal(train(undo(model), inputs)[0], plain[0])
