"""`generate` with a static cache: one compiled graph for each token, with an optimised model as without."""

from __future__ import annotations

import contextvars
import functools

import pytest
import torch

import tilesmith
from optimize_models import batch, build, ops_everywhere  # noqa: F401


def _generated(model, length=6, **more):
    prompt = batch("llama", padded=None)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0  # generation pads on the left
    return model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )


def _static():
    config = pytest.importorskip("transformers").CompileConfig(backend="eager", mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on a CPU for its own tests only
    return {"cache_implementation": "static", "compile_config": config}


def test_one_graph_serves_all_tokens():
    model = build("llama").eval()
    wanted = _generated(model)
    tilesmith.optimize(model, compile="between", graphs=True)
    torch._dynamo.utils.counters.clear()
    found = _generated(model, **_static())
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    again = _generated(model, length=5, **_static())
    assert counters["stats"]["unique_graphs"] == 1, "a shorter one fits into the cache that is there"
    assert torch.equal(again.sequences, wanted.sequences[:, :-1])
    assert torch.equal(_generated(tilesmith.undo(model)).logits[0], wanted.logits[0])


def test_a_static_cache_without_compiling():
    model = build("gemma2").eval()
    wanted = _generated(model)
    tilesmith.optimize(model)
    found = _generated(model, cache_implementation="static", disable_compile=True)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
@pytest.mark.parametrize("pinned", [True, False])
def test_attention_weights_with_a_static_cache(family, pinned):
    """transformers makes the masks of a static cache before the forward that is asked for weights."""
    model = build(family).eval()
    options = {"cache_implementation": "static", "disable_compile": True, "output_attentions": True}
    wanted = _generated(model, **options)
    tilesmith.optimize(model)
    run = functools.partial(_generated, model, **options)
    found = run() if pinned else contextvars.Context().run(run)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    for step, (ours, theirs) in enumerate(zip(found.attentions, wanted.attentions, strict=True)):
        for f, w in zip(ours, theirs, strict=True):
            torch.testing.assert_close(f, w, rtol=1e-4, atol=1e-5, msg=lambda told, step=step: f"step {step}: {told}")
    assert model.config._attn_implementation == "tilesmith"
