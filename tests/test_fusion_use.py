"""Fused models in threads, after exceptions and within inference mode, and comparisons that would mislead."""

import copy
import threading

import pytest
import torch
from torch import nn

from tilesmith import nn as tnn
from tilesmith.attention.fusion import (
    OptimizationLevel,
    benchmark_fusion_performance,
    create_unified_attention_fusion,
)
from tilesmith.hardware import HardwareAbstractionLayer

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2}
IDS = torch.arange(8).view(1, 8)


def _plain():
    torch.manual_seed(0)
    return tnn.Decoder(tnn.DecoderConfig(**SIZES))


def _packed():
    return create_unified_attention_fusion(_plain(), optimization_level=OptimizationLevel.AGGRESSIVE)


def _products(monkeypatch):
    """The packed products so far."""
    from tilesmith.models.layers.packed_products import Group

    made, genuine = [], Group.product
    monkeypatch.setattr(Group, "product", lambda self, x: made.append(self) or genuine(self, x))
    return made


def test_threads_have_packed_products_of_their_own(monkeypatch):
    """One thread runs while another is between two layers of a packed product: both go on with theirs."""
    made, model = _products(monkeypatch), _packed().eval()
    attention = model.layers[0].self_attn
    x, other = torch.randn(4, 16), torch.randn(4, 16)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    expected = [nn.functional.linear(t, layer.weight) for t in (x, other) for layer in layers]
    found = []
    with torch.no_grad():
        first = attention.q_proj(x)

        def between():
            with torch.no_grad():
                found.extend(layer(other) for layer in layers)

        thread = threading.Thread(target=between)
        thread.start()
        thread.join()
        rest = attention.k_proj(x), attention.v_proj(x)
        for _ in range(2):
            attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    for got, wanted in zip((first, *rest, *found), expected):
        torch.testing.assert_close(got, wanted)
    assert len(made) == 4  # one for each time that all three were asked for


def test_a_model_that_an_exception_left_between_two_layers_is_copied():
    model = _packed()

    def fails(module, args):
        raise KeyboardInterrupt

    handle = model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: fails(module, args))
    with pytest.raises(KeyboardInterrupt):
        model(IDS, IDS)
    handle.remove()
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(IDS, IDS), _plain()(IDS, IDS))
    torch.testing.assert_close(model(IDS, IDS), _plain()(IDS, IDS))


def test_models_that_are_fused_and_unfused_within_inference_mode_are_trained():
    model, expected = _plain(), _plain()(IDS, IDS)
    with torch.inference_mode():
        create_unified_attention_fusion(model, optimization_level=OptimizationLevel.AGGRESSIVE)
    model(IDS, IDS).backward()
    with torch.inference_mode():
        model.unfuse()
    loss = model(IDS, IDS)
    loss.backward()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model: model.eval(), "baseline_model is in evaluation mode, fused_model in training mode"),
        (lambda model: model.bfloat16(), "other parameters .*of bfloat16.* than fused_model .*of float32"),
        (lambda model: nn.Linear(16, 16), "other parameters .272 of float32. than fused_model"),
    ],
)
def test_models_that_differ_by_more_than_fusion_are_not_compared(change, match):
    with pytest.raises(ValueError, match=match):
        benchmark_fusion_performance(change(_plain()), _packed(), IDS, 1)


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x: benchmark_fusion_performance(model, model, x, 1, backward=True),
        lambda model, x: model.warm_up(sample=(x,)),
        lambda model, x: HardwareAbstractionLayer(["cpu"]).get_optimal_batch_size(model, sample=x, max_batch_size=4),
        lambda model, x: HardwareAbstractionLayer(["cpu"]).memory_estimate(model, 2, sample={"src": x}),
    ],
    ids=["benchmark", "warm_up", "batch size", "memory"],
)
@pytest.mark.parametrize("leaf", [True, False])
def test_inputs_that_ask_for_gradients_get_none(measure, leaf):
    model = create_unified_attention_fusion(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    given = torch.randn(2, 4, 16, requires_grad=True)
    x = given if leaf else given * 2
    measure(model, x)
    assert given.grad is None and x.requires_grad
    x.sum().backward()  # the caller's graph is whole
