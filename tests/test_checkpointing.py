"""Selective activation checkpointing: what policies keep of attention is not computed again in the backward."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from optimize_models import batch, build, checkpoint_layers, train
from tilesmith import ops
from tilesmith.engine import ops as declared
from tilesmith.engine import use
from tilesmith.models import optimize
from tilesmith.models.sizing.memory_estimate import LiveBytes

ATEN = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)


def keep_attention(ctx, op, *args, **kwargs):
    """The rule that trainers apply: PyTorch's own attention, and ops with this in their name."""
    if op in ATEN or "flash_attn" in str(op):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


KEEPING = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}


class Computed(TorchDispatchMode):
    """Counts the ops that compute; for a result that is kept none does."""

    def __enter__(self):
        super().__enter__()
        self.counts = Counter()
        return self.counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def attentions(monkeypatch):
    """How often attention's reference computed."""
    op, calls = declared()["attention"], []
    kernel = op.kernel("reference")

    def counted(*args):
        calls.append(1)
        return kernel.fn(*args)

    op.replace_kernel("reference", counted)
    yield calls
    op.replace_kernel("reference", kernel.fn)


def block(x, weight):
    q, k, v = (h.unflatten(-1, (2, 8)).transpose(1, 2) for h in (x @ weight).chunk(3, -1))
    out, _ = ops.attention(q, k, v, ops.Mask(causal=True))
    return x + ops.rms_norm(out.transpose(1, 2).flatten(2), x.new_ones(16))


def gradients(run):
    torch.manual_seed(0)
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 16), (16, 48)))
    run(x, weight).square().sum().backward()
    return x.grad, weight.grad


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kept_attention_is_computed_once_and_gradients_are_equal(attentions, compiled):
    plain = gradients(block)
    assert len(attentions) == 1

    def kept(x, weight):
        return checkpoint(block, x, weight, **KEEPING)

    for again in (partial(checkpoint, block, use_reentrant=False), kept):
        attentions.clear()
        found = gradients(torch.compile(again, backend="aot_eager", fullgraph=True) if compiled else again)
        assert len(attentions) == (1 if again is kept else 2)
        for a, b in zip(found, plain):  # compiled, sums of gradients are taken in another order
            torch.testing.assert_close(a, b) if compiled else torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("own", [True, False], ids=["own", "sdpa"])
def test_an_optimised_model_computes_attention_once_under_gradient_checkpointing(attentions, own):
    """On a CPU an optimised model's attention is PyTorch's unless ours is pinned; each is kept."""
    model, inputs = optimize(build("llama")), batch("llama", padded=None)
    with use(attention="reference") if own else nullcontext():
        with Computed() as once:
            plain = train(model, inputs)
        checkpoint_layers(model, **KEEPING)
        attentions.clear()
        with Computed() as counts:
            found = train(model, inputs)
    assert len(attentions) == (2 if own else 0)
    assert once[declared()["attention"].handle if own else ATEN[0]] == 2
    assert all(counts[op] == once[op] for op in (*ATEN, declared()["attention"].handle))
    assert torch.equal(found[0], plain[0])
    assert all(torch.equal(found[2][name], gradient) for name, gradient in plain[2].items())


def test_the_op_is_found_under_its_own_name_and_under_the_one_that_policies_look_for():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    assert torch.ops.tilesmith.flash_attn.default is declared()["attention"].handle
    out, lse = torch.ops.tilesmith.attention(q, q, q, causal=True)
    expected = ops.attention(q, q, q, ops.Mask(causal=True))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    found, wanted = (torch.autograd.grad(o.sum(), q)[0] for o in (out, expected[0]))
    assert torch.equal(found, wanted)


def test_a_checkpointed_layer_keeps_nothing_of_its_mlp():
    """Gate and up, kept in place of their product, would be kept behind the back of checkpointing."""
    model, inputs, kept = build("llama", layers=4), batch("llama"), []
    checkpoint_layers(model, use_reentrant=False)
    for optimized in (False, True):
        model = optimize(model) if optimized else model
        with LiveBytes() as live, use(swiglu="reference"):
            live.ignore(iter([*model.parameters(), *model.buffers()]))
            loss = model(**inputs, use_cache=False).loss
            kept.append(live.now)
            loss.backward()
    mlps = 4 * 2 * inputs["input_ids"].numel() * model.config.intermediate_size * 4
    assert kept[1] <= kept[0] + mlps / 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_optimised_model_is_compiled_as_a_whole_under_gradient_checkpointing(reentrant):
    """The graph breaks at checkpoints, within the call whose positions the model's forward has told."""
    model, inputs = build("llama").train(), batch("llama")
    plain = copy.deepcopy(model)
    checkpoint_layers(optimize(model), use_reentrant=reentrant)
    expected = torch.autograd.grad(plain(**inputs).loss, list(plain.parameters()))

    def run():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            compiled(**inputs).loss.backward()
        return [p.grad for p in model.parameters()]

    with ThreadPoolExecutor(1) as fresh:  # a thread that no call has told anything yet
        found = fresh.submit(run).result()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
