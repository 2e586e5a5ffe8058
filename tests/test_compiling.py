"""`optimize(model, compile="between")`: blocks compiled once for all layers, equal values, told and undone."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import batch, build, checkpoint_layers, ops_everywhere, train  # noqa: F401
from tilesmith.models import compiling
from tilesmith.rewrite import forms


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Dynamo without a compiler behind it, which takes seconds a graph."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")


def _regions(model):
    (regions,) = model.tilesmith_report.notes
    return regions


def _same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0])
    assert list(found[2]) == list(wanted[2])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-6)


def test_one_code_serves_all_layers_and_lengths():
    model = tilesmith.optimize(build("llama", layers=3))
    inputs = [batch("llama", length=length) for length in (12, 20, 28)]
    wanted = [train(model, given) for given in inputs]  # with the cache that transformers makes by itself
    tilesmith.optimize(model, compile="between")
    for given, want in zip(inputs, wanted):
        _same(train(model, given), want)
    regions = _regions(model)
    assert regions.calls == 9 and not regions.breaks and not regions.plain
    assert regions.graphs == 2, "once for the first length, once for all others"


def test_a_cache_is_filled_as_without():
    model, inputs = tilesmith.optimize(build("llama")), batch("llama")
    wanted = model(**inputs, use_cache=True).past_key_values
    tilesmith.optimize(model, compile="between")
    found = model(**inputs, use_cache=True).past_key_values
    assert _regions(model).calls == 2
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
    token = inputs["input_ids"][:, :1]
    with torch.no_grad():
        again = model(input_ids=token, past_key_values=found).logits
        torch.testing.assert_close(again, tilesmith.undo(model)(input_ids=token, past_key_values=wanted).logits)


class _Newer(nn.Module):
    """A block as transformers 5.24 writes them."""

    def __init__(self, number):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.layer_idx = number

    def forward(self, x, cache=None, **kwargs):
        keys = self.inner(x)
        return x + (keys if cache is None else cache.update(keys, keys, self.layer_idx)[0])


class _Older(_Newer):
    def forward(self, x, past_key_values=None, **kwargs):
        return super().forward(x, past_key_values)


class _OfStates(_Newer):
    """Mamba's blocks before transformers 5.24."""

    def forward(self, x, cache_params=None, **kwargs):
        return super().forward(x, cache_params)


class _Unnamed(_Newer):
    def forward(self, x, **kwargs):
        return super().forward(x, kwargs.get("cache", kwargs.get("past_key_values")))


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (_Newer, "cache"), (_Older, "past_key_values"), (_OfStates, "cache_params"), (_Newer, ""), (_OfStates, ""),
        (_Unnamed, "cache"), (_Unnamed, "past_key_values"),
    ],
)  # fmt: skip
def test_a_cache_is_known_by_each_name(block, name):
    """name: as the block is given its cache; by position if it is empty."""
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(block(number) for number in range(2))

        def forward(self, x, kept):
            for each in self.blocks:
                x = each(x, **{name: kept}) if name else each(x, kept)
            return x

    model, x = Model(), torch.randn(2, 1, 3, 4)
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    wanted = model(x, caches[0])
    tilesmith.optimize(model, compile="between")
    found = model(x, caches[1])
    assert _regions(model).calls == 2 and not _regions(model).plain
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)


def test_generation_fills_by_compiled_code_and_goes_on_without():
    model = tilesmith.optimize(build("llama").eval())
    prompt = batch("llama")["input_ids"]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt, **options)
    tilesmith.optimize(model, compile="between")
    assert torch.equal(model.generate(prompt, **options), wanted)
    assert _regions(model).calls == 2
    assert dict(_regions(model).plain) == {"given a cache other than an empty DynamicCache": 6}
    assert "Blocks ran uncompiled 6 times: given a cache other than an empty" in str(model.tilesmith_report)


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}


def _with_states(kind):
    """A model of which a cache keeps states: of all layers (Mamba's), or of those of its layers that are convolutions
    (c), beside full attention (f)."""
    transformers = pytest.importorskip("transformers")
    if kind == "mamba":
        return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**_SMALL, state_size=4))
    layers = [{"c": "conv", "f": "full_attention"}[letter] for letter in kind]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**_SMALL, **heads, layer_types=layers))


@pytest.mark.parametrize("kind", ["cfc", "fcc", "mamba"])
def test_layers_that_keep_states_run_uncompiled_with_a_cache(kind):
    """Their layers of a cache count no tokens."""
    model = _with_states(kind)
    model.generation_config.eos_token_id = None
    prompt = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    step, more = {"input_ids": prompt, "labels": prompt}, {"use_cache": kind != "mamba"}
    wanted, trained = model.eval().generate(prompt, **options), train(model.train(), step, **more)
    tilesmith.optimize(model, compile="between")
    assert torch.equal(model.eval().generate(prompt, **options), wanted)
    assert sum(_regions(model).plain.values()) >= 2 * 4
    _same(train(model.train(), step, **more), trained)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.noisy = nn.LayerNorm(8), nn.Linear(8, 8), False

    def forward(self, x):
        if self.noisy:
            torch._dynamo.graph_break()
        return x + self.linear(self.norm(x))


def _stack(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def test_what_is_told():
    model = tilesmith.optimize(_stack(), compile="between")
    report = str(model.tilesmith_report)
    assert "compile:    Block ×3" in report
    assert "Compiled blocks: none has run yet" in report
    model(torch.randn(2, 8, requires_grad=True))
    text = str(model.tilesmith_report)
    assert f"Compiled blocks: 3 calls, 1 graph compiled in {_regions(model).seconds:.1f} s" in text
    assert "none of ours outside of compiled or recorded blocks, in which they are not counted" in " ".join(
        text.split()
    )
    assert _regions(model).seconds > 0


def test_graph_breaks_are_told():
    model = _stack()
    for block in model:
        block.noisy = True
    tilesmith.optimize(model, compile="between")
    x = torch.randn(2, 8)
    wanted = tilesmith.undo(copy.deepcopy(model))(x)
    torch.testing.assert_close(model(x), wanted)
    told = _regions(model).breaks.total()
    assert told and _regions(model).calls == 3
    assert f"Graph breaks in compiled blocks: {told} (Call to `torch._dynamo.graph_break()`" in str(
        model.tilesmith_report
    )
    model(x)
    assert _regions(model).breaks.total() == told, "no call after the first compiles"


def test_a_compiler_that_fails_is_told_and_the_block_runs(monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler here")

    monkeypatch.setattr(compiling, "BACKEND", broken)
    model = tilesmith.optimize(_stack(), compile="between")
    x = torch.randn(2, 8)
    with pytest.warns(UserWarning, match="Block runs uncompiled: .*no compiler here"):
        found = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(x), found)
    assert "Block cannot be compiled and runs as before" in str(model.tilesmith_report)
    torch.testing.assert_close(found, tilesmith.undo(model)(x))


def test_copies_and_pickles_are_compiled_and_undone():
    model = tilesmith.optimize(_stack(), compile="between")
    keys, parameters = list(model.state_dict()), list(model.parameters())
    x = torch.randn(2, 8)
    wanted = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), wanted)
        assert (_regions(model).calls, _regions(twin).calls) == (3, 6), "each counts for itself"
        assert list(twin.state_dict()) == keys
        tilesmith.undo(twin)
        assert not any(forms(m) or "_tilesmith_regions" in m.__dict__ for m in twin.modules())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_undo_is_exact():
    model, x = _stack(), torch.randn(2, 8)
    wanted = _gradients(model, x)
    before = {name: type(m) for name, m in model.named_modules()}
    tilesmith.optimize(model, compile="between")
    _gradients(model, x)
    tilesmith.undo(model)
    assert {name: type(m) for name, m in model.named_modules()} == before
    found = _gradients(model, x)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_a_later_optimize_keeps_compiled_blocks():
    model, inputs = build("llama"), batch("llama")
    wanted = train(model, inputs, use_cache=False)
    tilesmith.optimize(model, only="norm", compile="between")
    tilesmith.optimize(model)
    names = [[type(form).__name__ for form in forms(layer)] for layer in model.model.layers]
    assert names == [["CompiledForm", "AddNormForm"]] * 2
    _same(train(model, inputs, use_cache=False), wanted)
    assert _regions(model).calls == 2
    with pytest.raises(ValueError, match="only names nonsense"):
        tilesmith.optimize(model, only="nonsense")
    assert [[type(form).__name__ for form in forms(layer)] for layer in model.model.layers] == names


def test_a_failed_optimize_leaves_compiled_blocks():
    model = tilesmith.optimize(_stack(), compile="between")
    counted = _regions(model)
    odd = Block()
    odd.forward = lambda x: x
    model.append(odd)
    with pytest.raises(tilesmith.rewrite.RewriteError):
        tilesmith.optimize(model, strict=True)
    model(torch.randn(2, 8))
    assert counted.calls == 3


def test_gradient_checkpointing():
    model, inputs = build("llama"), batch("llama")
    wanted = train(model, inputs)
    tilesmith.optimize(model, compile="between")
    checkpoint_layers(model, use_reentrant=False)
    _same(train(model, inputs, use_cache=False), wanted)
    assert _regions(model).calls == 4, "each block runs again in the backward"


def _gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_autocast():
    model, x = tilesmith.optimize(_stack()), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = _gradients(model, x)
    tilesmith.optimize(model, compile="between")
    with torch.autocast("cpu", torch.bfloat16):
        found = _gradients(model, x)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert model(x).dtype is torch.float32 and _regions(model).calls == 6


def test_adapters():
    peft = pytest.importorskip("peft")
    x = torch.randn(2, 8)
    config = peft.LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False)

    def adapted(model):
        torch.manual_seed(2)
        return peft.get_peft_model(model, config).train()

    wanted = _gradients(adapted(_stack()), x)
    for model in (adapted(tilesmith.optimize(_stack(), compile="between")), adapted(_stack())):
        if not hasattr(model.base_model.model, "tilesmith_report"):
            tilesmith.optimize(model.base_model.model, compile="between")
        torch.testing.assert_close(_gradients(model, x), wanted)
        regions = _regions(model.base_model.model)
        assert regions.calls == 3 and not regions.breaks and not regions.plain


def test_fully_shard(one_rank):
    from torch.distributed.fsdp import fully_shard

    model, inputs = build("llama"), batch("llama")
    wanted = train(model, inputs)
    tilesmith.optimize(model, compile="between")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    torch.testing.assert_close(loss.detach(), wanted[0])
    torch.testing.assert_close(gradients, wanted[2], rtol=1e-4, atol=1e-6)
    assert _regions(model).calls == 2 and not _regions(model).breaks


def test_within_a_compiled_model_and_under_transforms():
    model, x = tilesmith.optimize(_stack(), compile="between"), torch.randn(2, 8)
    wanted = model(x)
    calls = _regions(model).calls
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), wanted)
    assert _regions(model).calls == calls, "the whole model is one graph"
    weights = dict(model.named_parameters())
    torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
    assert _regions(model).plain == {"a transform of torch.func is at work": 3}


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_one_layer_run_in_it_alone(kind):
    def halved(module, given, *made):
        return made[0] * 0.5 if made else (given[0] * 0.5,)

    model, inputs = build("llama"), batch("llama")
    plain = copy.deepcopy(model)
    at = "model.layers.1.mlp"  # the code is compiled for the layer before it
    there = [getattr(m.get_submodule(at), kind)(halved) for m in (model, plain)]
    tilesmith.optimize(model, compile="between")
    hooked = train(plain, inputs)
    _same(train(model, inputs), hooked)
    for handle in there:
        handle.remove()
    _same(train(model, inputs), train(plain, inputs))
    for m in (model, plain):
        getattr(m.get_submodule(at), kind)(halved)
    _same(train(model, inputs), hooked)
    assert not _regions(model).plain


def test_hooks_of_all_modules_see_each_call():
    model, x = tilesmith.optimize(_stack(), compile="between"), torch.randn(2, 8)
    model(x)
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, made: seen.append(module))
    try:
        model(x)
    finally:
        hook.remove()
    assert set(model.modules()) == set(seen)
    (why,) = _regions(model).plain
    assert why.startswith("hooks of all modules are on") and _regions(model).calls == 3


def test_excluded_blocks_stay():
    model = tilesmith.optimize(_stack(), compile="between", exclude="1")
    assert [len(forms(block)) for block in model] == [len(forms(model[0])), 0, len(forms(model[0]))]
    model(torch.randn(2, 8))
    assert _regions(model).calls == 2


def test_bad_input():
    model = build("llama")
    with pytest.raises(ValueError, match="optimize: compile is 'all'; it is None or 'between'"):
        tilesmith.optimize(model, compile="all")
    with pytest.raises(ValueError, match="no two modules of one class stand in a ModuleList.*torch.compile"):
        tilesmith.optimize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), compile="between")
    assert not any(forms(m) for m in model.modules())
    model.model.layers[0].forward = lambda *args, **kwargs: None
    with pytest.raises(tilesmith.rewrite.RewriteError, match="its forward was replaced on the instance"):
        tilesmith.optimize(model, strict=True, compile="between")
