"""`register_for_transformers` and `register_for_sdpa`: attention of models, and PyTorch's own, on the library's."""

import importlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tilesmith
from devices import DEVICE
from optimize_models import assert_within_budget, batch, build, checkpoint_layers, ops_everywhere, train  # noqa: F401
from tilesmith.engine import use
from tilesmith.models import sequence
from tilesmith.models.attention import interface, masks, sdpa
from tilesmith.models.attention.interface import attention_forward
from tilesmith.models.attention.masks import KeyMask, key_mask
from tilesmith.validate.budget import compare

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
FAMILIES = ("llama", "gpt2", "gemma2", "bert")

FRESH = """
import json
import tilesmith.models
from torch.nn import attention
from transformers import AttentionInterface, AttentionMaskInterface
names = [AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping]
names.append(getattr(attention, "list_flash_attention_impls", list)())
print(json.dumps(["tilesmith" in n for n in names]))
"""


@pytest.fixture(autouse=True)
def registered():
    tilesmith.register_for_transformers()


def test_nothing_is_registered_on_import():
    ran = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == [False, False, False]


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    """By the floor that the package itself asks for."""
    (floor,) = re.findall(r'^hf = \["transformers>=([\d.]+)"\]$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tilesmith.integrations.trainer", raising=False)
    calls = {
        "register_for_transformers": tilesmith.register_for_transformers,
        "shard_sequence": sequence._transformers,
        "tilesmith.integrations.trainer": lambda: importlib.import_module("tilesmith.integrations.trainer"),
    }
    for name, call in calls.items():
        with pytest.raises(ImportError) as raised:
            call()
        assert str(raised.value) == f"{name} needs transformers {floor} or later: pip install 'transformers>={floor}'"


@pytest.mark.parametrize("padded", [None, "right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_the_other_implementations(family, padded):
    # eager attention gives NaN in rows that see nothing, SDPA has no soft caps
    other = "sdpa" if padded == "left" and family != "gemma2" else "eager"
    inputs = batch(family, padded)
    oracle, same = train(build(family, attention=other).double(), inputs), train(build(family, attention=other), inputs)
    if not oracle[0].isfinite():
        pytest.skip("the model's own attention gives NaN here")
    assert_within_budget(train(build(family, attention="tilesmith"), inputs), same, oracle)


@pytest.mark.parametrize("padded", ["right", "left"])
def test_left_and_right_padding_give_what_no_padding_gives(padded):
    model = build("gemma2", attention="tilesmith").eval()
    ids = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, slice(5, None) if padded == "right" else slice(None, 4)] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    with torch.no_grad():
        together = model(ids, attention_mask=mask, position_ids=positions).logits[0][mask[0].bool()]
        alone = model(ids[:1][mask[:1].bool()][None]).logits[0]
    torch.testing.assert_close(together, alone)


PADDING = {"none": slice(0, 0), "left": slice(0, 3), "right": slice(4, 7), "middle": slice(2, 4)}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", PADDING)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_generation_equals_the_other_implementations(family, padded, cache):
    ids = torch.randint(3, 120, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, PADDING[padded]] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "cache_implementation": cache}
    found, wanted = (
        build(family, attention=name).eval().generate(ids, attention_mask=mask, **options)
        for name in ("tilesmith", "eager" if family == "gemma2" else "sdpa")
    )
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits, wanted.logits)


@pytest.mark.parametrize("padded", [None, "right", "left"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiles_whole(family, padded):
    model, inputs = build(family, layers=1, attention="tilesmith"), batch(family, padded)
    wanted = train(model, inputs)
    found = train(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    torch.testing.assert_close(found[:2], wanted[:2])


@pytest.mark.parametrize("alone", [False, True], ids=["model", "model.model"])
@pytest.mark.parametrize(("family", "packed"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_a_compiled_model_has_the_masks_of_an_eager_one(family, packed, alone, monkeypatch):
    seen, real = [], interface.ops.attention

    def spied(q, k, v, mask, *args, **named):
        seen.append((mask.causal, mask.window, mask.dense is None, mask.documents is None, *named))
        return real(q, k, v, mask, *args, **named)

    monkeypatch.setattr(interface.ops, "attention", spied)
    model = tilesmith.optimize(build(family, layers=2))
    inputs = {"input_ids": torch.randint(3, 100, (2, 12)), "use_cache": False}
    if packed:
        inputs["position_ids"] = torch.cat((torch.arange(5), torch.arange(7)))[None]
    called = model.model if alone else model
    wanted = called(**inputs)[0]
    eager = seen.copy()
    seen.clear()
    found = torch.compile(called, fullgraph=True, backend="aot_eager")(**inputs)[0]
    assert seen == eager and len(eager) == 2 and all(mask[2] for mask in seen)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_compiled_step_takes_masks_from_outside(family):
    ids = torch.randint(3, 120, (2, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    model = build(family, attention="tilesmith").eval()
    wanted = model.generate(ids, attention_mask=mask, **options)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    assert torch.equal(model.generate(ids, attention_mask=mask, disable_compile=True, **options), wanted)
    assert len(graphs) == 2  # one for the prompt, one for all steps


def test_gradient_checkpointing():
    model, inputs = build("llama", attention="tilesmith"), batch("llama", "left")
    wanted = train(model, inputs)
    checkpoint_layers(model)
    torch.testing.assert_close(train(model, inputs), wanted)


def test_packed_documents_arrive_as_documents():
    model = build("gemma2", attention="tilesmith").eval()
    ids = torch.randint(3, 120, (1, 11), generator=torch.Generator().manual_seed(4))
    positions = torch.cat((torch.arange(6), torch.arange(5)))[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in (ids[:, :6], ids[:, 6:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def _paddings(batch_size, seen):
    generator = torch.Generator().manual_seed(seen)
    holes = torch.rand(batch_size, seen, generator=generator) < 0.7
    left = torch.arange(seen) >= torch.tensor([0, 2])[:, None]
    return {"none": None, "full": torch.ones_like(holes), "left": left, "right": left.flip(1), "holes": holes}


FUNCTIONS = {
    "causal": lambda: masking.causal_mask_function,
    "window": lambda: masking.sliding_window_causal_mask_function(3),
    "wide window": lambda: masking.sliding_window_causal_mask_function(50),
    "all": lambda: masking.bidirectional_mask_function,
    "both sides": lambda: masking.sliding_window_bidirectional_mask_function(2),
}
# q_length, kv_length, q_offset, kv_offset: whole, one token, a chunk, an empty and a half full static cache, a ring
PLACES = [
    (9, 9, 0, 0), (1, 9, 8, 0), (4, 9, 5, 0), (5, 9, 0, 0), (2, 9, 4, 0), (1, 9, torch.tensor(6), 0), (1, 5, 8, 4)
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_mean_what_those_of_transformers_mean(function, place):
    q_length, kv_length, q_offset, kv_offset = place
    seen = int(q_offset) + q_length
    if function in ("all", "both sides") and seen != kv_length + kv_offset:
        pytest.skip("bidirectional attention has no cache")
    for padding in _paddings(2, seen).values():
        given = {
            "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
            "kv_offset": kv_offset, "mask_function": FUNCTIONS[function](), "attention_mask": padding,
            "allow_is_causal_skip": False, "device": torch.device("cpu"),
        }  # fmt: skip
        found, wanted = key_mask(**given), masking.sdpa_mask(**given)
        assert tuple(found.shape) == tuple(wanted.shape)
        dense = found.tensor() if isinstance(found, KeyMask) else found
        real = torch.ones(2, q_length, dtype=torch.bool)
        if padding is not None:
            real = padding[:, int(q_offset) : seen]
        same = dense == wanted
        assert same[real[:, None].expand(same.shape[:3])].all()


def test_what_needs_a_dense_mask_gets_one(monkeypatch):
    given = {"batch_size": 1, "q_length": 4, "kv_length": 4, "device": torch.device("cpu")}
    odd = masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0)
    either = masking.or_masks(masking.causal_mask_function, masking.bidirectional_mask_function)
    for function in (odd, either):
        found = key_mask(mask_function=function, allow_is_causal_skip=False, **given)
        assert torch.equal(found, masking.sdpa_mask(mask_function=function, allow_is_causal_skip=False, **given))
    assert isinstance(key_mask(allow_is_causal_skip=False, **given), KeyMask)
    monkeypatch.setattr(masks, "reaches_device", lambda *where: False)
    assert isinstance(key_mask(allow_is_causal_skip=False, **given), torch.Tensor)


def test_what_sdpa_broadcasts_is_broadcast():
    query, key, value = (torch.randn(n, 2, tokens, 16) for n, tokens in ((1, 3), (2, 7), (2, 7)))
    rows = KeyMask((2, 1, 1, 1), torch.device("cpu"), False, lengths=torch.tensor([0, 1], dtype=torch.int32))
    for mask in (None, rows, torch.rand(2, 1, 3, 7) < 0.7):
        found, _ = attention_forward(torch.nn.Module(), query, key, value, mask, is_causal=False)
        dense = mask.tensor() if isinstance(mask, KeyMask) else mask
        wanted = F.scaled_dot_product_attention(query.expand(2, -1, -1, -1), key, value, dense)
        torch.testing.assert_close(found.transpose(1, 2), wanted)


@pytest.mark.parametrize("keys", [3, 5, 9])
def test_causality_without_a_mask_starts_at_the_first_key(keys):
    query, key, value = (torch.randn(2, 2, tokens, 16) for tokens in (5, keys, keys))
    found, _ = attention_forward(torch.nn.Module(), query, key, value, None, is_causal=True)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(found.transpose(1, 2), wanted)


def test_a_mask_passes_for_a_tensor():
    documents = torch.tensor([[-1, 0, 0], [0, 0, 0]], dtype=torch.int32)
    mask = KeyMask((2, 1, 3, 3), torch.device("cpu"), True, documents=(documents.clamp(min=0), documents))
    dense = mask.tensor()
    assert dense.tolist()[0][0] == [[False] * 3, [False, True, False], [False, True, True]]
    assert torch.equal(mask[:, :, :2], dense[:, :, :2])
    assert torch.equal(torch.where(mask, 0.0, 1.0), torch.where(dense, 0.0, 1.0))
    assert torch.equal(mask & dense, dense) and torch.equal(~mask, ~dense) and torch.equal(mask.logical_not(), ~dense)
    assert mask.to(torch.float32).dtype == torch.float32 and isinstance(mask.to("cpu"), KeyMask)
    assert (mask.ndim, mask.dtype, mask.device.type) == (4, torch.bool, "cpu")
    with pytest.raises(AttributeError):
        mask.nothing_of_the_kind  # noqa: B018


def _randn(*shape, seed=0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return drawn.to(DEVICE, torch.float16 if DEVICE.type == "cuda" else torch.float32)


@pytest.fixture
def activated():
    key = "CUDA" if DEVICE.type == "cuda" else "CPU"
    activation = sdpa._Activation(key)
    yield
    activation.remove()


def _wide(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def _compare(found, same, exact):
    for f, s, e in zip(found, same, exact, strict=True):
        budget = compare(f, s.to(f.dtype), e)
        assert budget.passed, budget


@pytest.mark.parametrize(("causal", "order"), list(itertools.product([False, True], ["heads", "tokens"])))
def test_sdpa_runs_and_trains_on_ours(activated, causal, order):
    shape = (2, 4, 9, 16) if order == "heads" else (2, 9, 4, 16)
    q, k, v = (_randn(*shape, seed=i) for i in range(3))
    q, k, v = (x if order == "heads" else x.transpose(1, 2) for x in (q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, causal, False, scale=0.3)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert out.stride() == torch.empty_like(q).stride()

    def plain(*leaves):
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3, attn_mask=None)
        return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact, same = plain(*_wide(*leaves)), plain(*(x.detach().requires_grad_() for x in leaves))
    _compare((out, *gradients), same, exact)
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32


def test_packed_documents_and_windows_behind_varlen(activated):
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    leaves = [_randn(12, heads, 16, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    args = (cu, cu, 7, 7, 0.0, True, False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*leaves, *args, window_size_left=3, window_size_right=0)
    assert out.shape == (12, 4, 16) and lse.shape == (4, 12)
    dout = torch.randn_like(out)
    state = torch.empty(2, dtype=torch.uint64, device=DEVICE)
    named = {"window_size_left": 3, "window_size_right": 0}
    found = torch.ops.aten._flash_attention_backward(
        dout, *leaves, out, lse, cu, cu, 7, 7, 0.0, True, state, state, **named
    )

    def plain(q, k, v):
        parts = []
        for first, last in ((0, 5), (5, 12)):
            a, b, c = (x[first:last].transpose(0, 1) for x in (q, k, v))
            i = torch.arange(last - first, device=DEVICE)
            seen = (i[:, None] >= i) & (i[:, None] - i <= 3)
            b, c = b.repeat_interleave(2, 0), c.repeat_interleave(2, 0)
            parts.append((torch.where(seen, a @ b.mT / 4, float("-inf")).softmax(-1) @ c).transpose(0, 1))
        out = torch.cat(parts)
        return out, *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))

    same, exact = plain(*(x.detach().requires_grad_() for x in leaves)), plain(*_wide(*leaves))
    _compare((out, *found), same, exact)


def test_dropout_repeats_in_the_backward(activated):
    q, k, v = (_randn(1, 2, 8, 16, seed=i).requires_grad_() for i in range(3))
    out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False, False)
    # out is linear in v: what v gets for the gradient `out` is what makes <out, out> = <v, dv>
    (dv,) = torch.autograd.grad(out, v, out.detach())
    torch.testing.assert_close((v * dv).sum(), (out * out).sum(), rtol=1e-2, atol=1e-2)


def test_what_is_not_offered_is_refused(activated):
    q = _randn(1, 2, 8, 16)
    with pytest.raises(RuntimeError, match="return_debug_mask is not offered"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True)


def test_the_provider_is_activated_and_restored_by_torch():
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "register_flash_attention_impl"):
        with pytest.raises(RuntimeError, match="has no torch.nn.attention.register_flash_attention_impl"):
            tilesmith.register_for_sdpa()
        return
    tilesmith.register_for_sdpa()
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this torch cannot take a provider back, which would stay for the tests to come")
    assert "tilesmith" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("tilesmith")
    try:
        assert attention.current_flash_attention_impl() == "tilesmith"
        if DEVICE.type == "cuda":
            q, k, v = (_randn(2, 4, 33, 64, seed=i).requires_grad_() for i in range(3))
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                with use(attention="reference"):
                    slow = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                fast = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                fast.sum().backward()
            torch.testing.assert_close(fast, slow, rtol=1e-2, atol=1e-2)
            assert q.grad.isfinite().all()
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_that_has_no_providers_is_named(monkeypatch):
    monkeypatch.delattr("torch.nn.attention.register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match="has no torch.nn.attention.register_flash_attention_impl"):
        tilesmith.register_for_sdpa()
