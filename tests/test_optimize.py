"""`optimize` among what surrounds a model: losses, accelerate, adapters, sharding, saving; nothing else changed."""

import contextvars
import copy
import functools
import importlib
import inspect
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimize_models import (  # noqa: F401
    FAMILIES,
    GROUPED,
    Calls,
    assert_within_budget,
    batch,
    build,
    checkpoint_layers,
    ops_everywhere,
    rows_of,
    train,
)
from tilesmith import rewrite
from tilesmith.attention.fusion import create_unified_attention_fusion
from tilesmith.models import optimization, optimize, undo
from tilesmith.models.attention.chosen import lock_of
from tilesmith.models.attention.interface import attention_forward
from tilesmith.models.attention.lock import ReaderWriterLock
from tilesmith.models.layers.logits import LazyLogits


def test_lazy_logits_of_a_model():
    model, inputs = build("llama"), batch("llama")
    wanted = model(**inputs).logits.detach()
    optimize(model)
    out = model(**inputs)
    assert isinstance(out.logits, LazyLogits) and out.logits.known is None
    assert torch.equal(out.logits.argmax(-1), wanted.argmax(-1))
    without = {k: v for k, v in inputs.items() if k != "labels"}
    assert isinstance(model(**without).logits, torch.Tensor)
    assert isinstance(model.lm_head(torch.randn(1, 64)), torch.Tensor)
    with torch.no_grad():
        assert isinstance(model(**inputs).logits, torch.Tensor)
    assert isinstance(model.eval()(**inputs).logits, torch.Tensor)


@pytest.mark.parametrize(
    "more", [{"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 9}, {"ignore_index": 5}]
)
def test_loss_arguments_arrive(more):
    model, inputs = build("gemma2"), batch("gemma2", padded=None)
    original = train(model, inputs, **more)
    optimize(model)
    with Calls() as calls:
        found = train(model, inputs, **more)
    assert calls["linear_cross_entropy"] == 1
    torch.testing.assert_close(found[0], original[0])
    torch.testing.assert_close(found[2], original[2], rtol=1e-4, atol=1e-5)


def test_signatures_stay():
    model = build("llama")
    before = inspect.signature(model.forward)
    assert inspect.signature(optimize(model).forward) == before


def test_accelerate_converts_outputs():
    operations = pytest.importorskip("accelerate.utils.operations")
    model, inputs = optimize(build("llama").bfloat16()), batch("llama")
    out = model(**inputs)
    wanted = out.logits.tensor().float()
    found = operations.convert_to_fp32(model(**inputs))
    assert torch.equal(found.logits.tensor(), wanted)
    assert found.loss.item() == out.loss.item()


def test_two_models_of_one_configuration_stay_apart():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**GROUPED)
    first, second = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    optimize(first)
    held = first.model.layers[0].self_attn.config
    assert first.config._attn_implementation == "tilesmith" == held._attn_implementation
    assert second.config._attn_implementation == "sdpa" == config._attn_implementation
    assert first.config is first.model.config
    assert undo(first).config._attn_implementation == "sdpa"


def test_attention_chosen_by_the_user_stays():
    model = optimize(build("llama", attention="flex_attention"))
    assert model.config._attn_implementation == "flex_attention"
    row = rows_of(model)["model.layers.0.self_attn", "attention"]
    assert (row.action, row.reason) == ("skipped", "the model's attention is flex_attention")


def _prefixed(attention):
    """The text model within PaliGemma: its attention modules say that they are not causal, its masks that they are."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GemmaConfig(**GROUPED, head_dim=16, use_bidirectional_attention=True)
    torch.manual_seed(0)
    return transformers.GemmaForCausalLM._from_config(config, attn_implementation=attention).train()


@pytest.mark.parametrize("padded", ["right", None])
def test_masks_are_causal_where_modules_are_not(padded):
    model, inputs = _prefixed("sdpa"), batch("gemma", padded)
    oracle, original = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    optimize(model, only="attention")
    with Calls() as calls:
        found = train(model, inputs)
    assert calls["attention"] == 2
    assert_within_budget(found, original, oracle)


def test_eager_attention_stays_where_only_its_masks_are_causal():
    """Without padding transformers makes a mask for eager attention alone."""
    model, inputs = _prefixed("eager"), batch("gemma", None)
    wanted = train(model, inputs)
    optimize(model, only="attention")
    assert model.config._attn_implementation == "eager"
    assert "attn_implementation='sdpa'" in rows_of(model)["", "attention"].reason
    assert torch.equal(train(model, inputs)[1], wanted[1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart"])
def test_attention_weights_are_there_where_asked_for(family):
    model, inputs = build(family).eval(), batch(family)
    names = ["decoder_attentions", "cross_attentions", "encoder_attentions"] if family == "bart" else ["attentions"]
    with torch.no_grad():
        wanted = model(**inputs, output_attentions=True)
        optimize(model, only="attention")
        found = model(**inputs, output_attentions=True)
    assert len(wanted[names[0]]) == 2
    assert all(torch.equal(f, w) for name in names for f, w in zip(found[name], wanted[name], strict=True))
    assert model.config._attn_implementation == "tilesmith"
    with Calls() as calls:
        train(model, inputs)
    assert calls["attention"] > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart", "t5"])
def test_attention_weights_of_a_model_within_a_model(family):
    """Other libraries call the model below the head, `generate` calls encoders."""
    model, inputs = build(family).eval(), batch(family)
    inputs.pop("labels")

    def asked():
        inner = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        with torch.no_grad():
            found = inner(**inputs, output_attentions=True).attentions
            if model.config.is_encoder_decoder:
                options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 2}
                found += model.generate(**inputs, **options, do_sample=False).encoder_attentions
        return found

    wanted = asked()
    optimize(model, only="attention")
    found = asked()
    assert len(found) == len(wanted) and all(torch.equal(f, w) for f, w in zip(found, wanted))
    assert model.config._attn_implementation == "tilesmith"
    assert all(torch.equal(f, w) for f, w in zip(contextvars.Context().run(asked), wanted))
    undo(model)
    assert all(torch.equal(f, w) for f, w in zip(asked(), wanted))


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_weights_have_their_gradient_under_checkpointing(reentrant):
    def gradients(model):
        checkpoint_layers(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
        out = model(**batch("llama"), output_attentions=True)
        (out.loss + sum(weights.square().sum() for weights in out.attentions)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    wanted, model = gradients(build("llama")), optimize(build("llama"), only="attention")
    torch.testing.assert_close(gradients(model), wanted)
    assert model.config._attn_implementation == "tilesmith"
    layer = model.model.layers[0]
    assert layer._gradient_checkpointing_func is model.model.layers[1]._gradient_checkpointing_func


@pytest.mark.parametrize("given", ["indices", "sinks"])
def test_attention_refuses_what_it_does_not_serve(given):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"Identity gives its attention {given}.*'eager'"):
        attention_forward(nn.Identity(), q, q, q, None, **{given: torch.zeros(1, 2, 3, 1)})


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_the_output_layer_see_a_tensor(kind):
    model, seen = optimize(build("llama", layers=1)), []
    getattr(model.lm_head, kind)(lambda module, *gradients: seen.append(gradients))
    model(**batch("llama")).loss.backward()
    assert seen[0][-1][0].shape[-1] == 128


def test_a_forward_put_in_the_place_of_the_output_layer_s_gets_a_tensor():
    model, plain, inputs = optimize(build("llama", layers=1)), build("llama", layers=1), batch("llama")
    for m in (model, plain):
        before = m.lm_head.forward

        def halved(x, before=before):
            out = before(x)
            assert isinstance(out, torch.Tensor)
            return out * 0.5

        m.lm_head.forward = halved
    found, wanted = train(model, inputs), train(plain, inputs)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["optimize", "fuse"])
def test_forwards_that_others_kept_run_after_undo(how):
    model, inputs = build("llama", layers=1), batch("llama")
    wanted = train(model, inputs)
    optimize(model) if how == "optimize" else create_unified_attention_fusion(model, "full_block", "aggressive")
    for module in list(model.modules())[1:]:  # as accelerate's hooks do
        module.forward = functools.partial(module.forward)
    torch.testing.assert_close(train(model, inputs)[0], wanted[0])
    undo(model)
    found = train(model, inputs)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-5)


def test_autocast_leaves_float64():
    model, inputs = build("llama", layers=1).double(), batch("llama")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = train(model, inputs)
        found = train(optimize(model, only="loss"), inputs)
    assert found[0].dtype is wanted[0].dtype
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[2], wanted[2])


@pytest.mark.parametrize("at", ["cls", "cls.predictions", "cls.predictions.decoder"])
def test_who_looks_at_what_holds_the_output_layer_gets_a_tensor(at):
    def halved(module, given, made):
        assert isinstance(made, torch.Tensor)
        return made * 0.5

    model, plain, inputs = optimize(build("bert", layers=1)), build("bert", layers=1), batch("bert")
    for m in (model, plain):
        m.get_submodule(at).register_forward_hook(halved)
    found, wanted = train(model, inputs), train(plain, inputs)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-5)


class Scaled(nn.Linear):
    """An output layer that is more than linear."""

    def forward(self, x):
        return super().forward(x) * 1.5


def test_another_output_layer_put_in_later_computes_by_itself():
    model, plain, inputs = optimize(build("llama", layers=1)), build("llama", layers=1), batch("llama")
    for m in (model, plain):
        torch.manual_seed(3)
        m.lm_head = Scaled(64, 128, bias=False)
    torch.testing.assert_close(train(optimize(model), inputs)[0], train(plain, inputs)[0])
    assert not rewrite.forms(model.lm_head)


def test_a_parametrized_output_layer_computes_its_weight_once_a_call():
    model, plain, inputs = build("llama", layers=1), build("llama", layers=1), batch("llama")
    optimize(model)
    for m in (model, plain):
        torch.manual_seed(3)
        nn.utils.parametrizations.spectral_norm(m.lm_head)  # each access in training is one step of its iteration
        train(m, inputs)
    for name, buffer in plain.lm_head.named_buffers():
        torch.testing.assert_close(model.lm_head.get_buffer(name), buffer)


def test_transforms_of_torch_func():
    model, inputs = build("llama", layers=1), batch("llama")
    values = {name: p.detach() * 1.1 for name, p in model.named_parameters()}

    def loss(values):
        return torch.func.functional_call(model, values, (), inputs).loss

    wanted = torch.func.grad(loss)(values)
    optimize(model)
    torch.testing.assert_close(torch.func.grad(loss)(values), wanted)


def test_members_of_an_ensemble_return_logits_under_vmap():
    models, inputs = [optimize(build("llama", layers=1)) for _ in range(2)], batch("llama", padded=None)
    inputs = {name: inputs[name] for name in ("input_ids", "labels")}
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    values, buffers = torch.func.stack_module_state(models)

    def logits(values, buffers):
        return torch.func.functional_call(models[0], (values, buffers), (), inputs).logits

    wanted = torch.stack([model(**inputs).logits.tensor() for model in models])
    torch.testing.assert_close(torch.func.vmap(logits)(values, buffers), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])  # RMSNorm, LayerNorm, scores that are followed
def test_a_model_on_meta_is_called_with_labels(family):
    model = optimize(build(family, layers=1)).to("meta")
    inputs = {name: x.to("meta") for name, x in batch(family, padded=None).items() if name != "attention_mask"}
    out = model(**inputs)
    assert out.loss.device.type == "meta" and out.logits.tensor().shape == (2, 12, 128)


def test_a_part_that_was_optimised_before_keeps_its_lock_when_the_whole_fails(monkeypatch):
    model = build("bart")
    part = optimize(model.model)  # which holds two models of its own
    assert lock_of(part) is lock_of(part.encoder) is lock_of(part.decoder)
    monkeypatch.setattr(optimization.FunctionalRule, "match", lambda self, site: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        optimize(model)
    assert lock_of(part) is lock_of(part.encoder) is lock_of(part.decoder)
    undo(model)
    assert not any("_tilesmith_lock" in name for module in model.modules() for name in module.__dict__)


def test_undo_of_what_has_lost_a_part():
    model = optimize(build("llama", layers=1))
    del model.lm_head, model.model
    assert type(undo(model)).__name__ == "LlamaForCausalLM" and not rewrite.forms(model)


def test_save_pretrained_knows_nothing(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = optimize(build("llama"))
    model.save_pretrained(tmp_path)
    assert "tilesmith" not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"] and type(again) is transformers.LlamaForCausalLM
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_peft(family, order):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(2)
        targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(
                model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            ).train()

    inputs = batch(family)
    plain = adapted(build(family, layers=1))
    oracle, original = train(copy.deepcopy(plain).double(), inputs), train(plain, inputs)
    model = build(family, layers=1)
    model = adapted(optimize(model)) if order == "before" else optimize(adapted(model))
    assert_within_budget(train(model, inputs), original, oracle)
    back = train(undo(model), inputs)
    assert all(torch.equal(back[2][name], gradient) for name, gradient in original[2].items())


@pytest.mark.parametrize("alone", [False, True])
def test_fully_shard(alone, one_rank):
    from torch.distributed.fsdp import fully_shard

    model, inputs = build("llama"), batch("llama")
    original = train(model, inputs)
    optimize(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.model.layers, *([model.lm_head] if alone else []), model):
        fully_shard(part, mesh=mesh)
    model.zero_grad()
    out = model(**inputs)
    assert isinstance(out.logits, torch.Tensor if alone else LazyLogits)
    out.loss.backward()
    if not alone:
        with pytest.raises(RuntimeError, match=r"with FSDP before backward\(\)"):
            out.logits.argmax(-1)
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    torch.testing.assert_close(out.loss.detach(), original[0])
    torch.testing.assert_close(gradients, original[2], rtol=1e-4, atol=1e-6)


def test_nothing_global_changes():
    transformers = pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")

    def everything():
        places = modeling, modeling.LlamaAttention, transformers.LlamaModel, F, nn.Linear
        return [dict(vars(place)) for place in places]

    before = everything()
    train(optimize(build("llama", layers=1)), batch("llama"))
    after = everything()
    assert [set(a) ^ set(b) for a, b in zip(before, after)] == [set()] * 5
    assert all(a[name] is b[name] for a, b in zip(before, after) for name in a)


def test_big_models_are_probed_without_their_weights():
    transformers = pytest.importorskip("transformers")
    sizes = {**GROUPED, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 4}))
    optimize(model, strict=True)
    assert len(model.tilesmith_report.replaced) == 3 + 4 * 6 + 1
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(("family", "first_asks"), [("llama", False), ("llama", True), ("gpt_neo", True)])
def test_weights_asked_in_one_thread_change_nothing_in_another(family, first_asks):
    """Attention was taken back for all threads, and made ours for all again: who was inside went without masks, or
    without weights."""
    model, ids = (build if family in FAMILIES else _gpt_neo)(family).eval(), batch("llama", padded=None)["input_ids"]
    wanted = model(ids, output_attentions=True)
    optimize(model)
    inside, done, thread = (
        {name: threading.Event() for name in ("first", "second")},
        threading.Event(),
        threading.local(),
    )

    def meet(*_):
        """The first goes on when the second is inside, the second when the first is done; each after a while."""
        inside[thread.name].set()
        (done if thread.name == "second" else inside["second"]).wait(0.5)

    projection = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    projection.register_forward_pre_hook(meet)

    def run(name, asks):
        thread.name = name
        if name == "second":
            inside["first"].wait(60)
        out = model(ids, output_attentions=asks)
        done.set()
        return out

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        asks = {"first": first_asks, "second": True}
        runs = {name: pool.submit(contextvars.copy_context().run, run, name, asks[name]) for name in asks}
        found = {name: one.result(timeout=300) for name, one in runs.items()}
    for name, out in found.items():
        torch.testing.assert_close(out.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        if asks[name]:
            torch.testing.assert_close(out.attentions, wanted.attentions)
    assert not [name for module in undo(model).modules() for name in vars(module) if "tilesmith" in name]


def _gpt_neo(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "max_position_embeddings": 64}
    sizes |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
    torch.manual_seed(0)
    return transformers.GPTNeoForCausalLM._from_config(transformers.GPTNeoConfig(**sizes), attn_implementation="eager")


def test_exclusive_forwards_wait_for_others_and_nest():
    lock, order, longest = ReaderWriterLock(), [], 60  # seconds: what only a fault takes
    entered, leave = threading.Event(), threading.Event()

    def within():
        with lock.shared(), lock.shared():
            entered.set()
            assert leave.wait(longest)
            order.append("shared")

    def exclusive():
        assert entered.wait(longest)
        with lock.exclusive(), lock.exclusive(), lock.shared():
            order.append("exclusive")

    def upgraded(gate):
        with lock.shared():
            gate.wait(longest)
            with lock.exclusive():
                return True

    with ThreadPoolExecutor(2) as pool:
        runs, until = [pool.submit(within), pool.submit(exclusive)], time.monotonic() + longest
        while not (lock._waiting or runs[1].done()) and time.monotonic() < until:
            time.sleep(0.001)
        assert lock._waiting and order == []
        leave.set()
        for one in runs:
            one.result(timeout=longest)
        assert order == ["shared", "exclusive"]
        gate = threading.Barrier(2)  # both are inside before either asks for exclusive
        assert all(one.result(timeout=longest) for one in [pool.submit(upgraded, gate) for _ in range(2)])
        with lock.shared():
            pass


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continuous_batching(attention):
    """transformers lets no attention serve it that it does not know by name."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this version of transformers has no such configuration")
    small = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=32)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    model = build("llama", attention=attention).eval()
    prompts = [batch("llama", None, length)["input_ids"][0].tolist() for length in (3, 9, 1)]

    def generated(persistent=False):
        found = model.generate_batch(
            prompts, transformers.GenerationConfig(**options), small, persistent_manager=persistent
        )
        return [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.split("_")[1]))]

    wanted = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    optimize(model)
    for persistent in (True, True, False):
        assert generated(persistent) == wanted
        assert model.config._attn_implementation == "tilesmith"
    manager = model.init_continuous_batching(transformers.GenerationConfig(**options), small)
    manager.start()
    assert undo(model).config._attn_implementation != "tilesmith"
    manager.stop(block=True)
    assert model.config._attn_implementation == attention
    assert generated() == wanted


def _wrapped(module, ran):
    """Replace the forward of a module on the instance, as accelerate's hooks do."""
    forward = module.forward

    def outer(*args, **kwargs):
        ran.append(module)
        return forward(*args, **kwargs)

    module.forward = outer


def test_a_forward_replaced_on_the_instance_is_named_and_not_run():
    """It may move weights, and would run the module itself on the inputs of a probe."""
    model, ran = build("llama"), []
    layer = model.model.layers[0]
    parts = layer.mlp, layer.mlp.act_fn, layer.input_layernorm, layer.self_attn
    for part in parts:
        _wrapped(part, ran)
    ids = torch.arange(6)[None]
    wanted, ran[:] = model(input_ids=ids).logits, []
    optimize(model)
    assert not ran
    reasons = {(r.rule, r.fqn): r.reason for r in model.tilesmith_report.wanted}
    for rule, name in (
        ("mlp", "mlp"),
        ("activation", "mlp.act_fn"),
        ("norm", "input_layernorm"),
        ("rope", "self_attn"),
    ):
        assert "its forward was replaced on the instance" in reasons[rule, f"model.layers.0.{name}"]
    torch.testing.assert_close(model(input_ids=ids).logits, wanted)
    assert {id(part) for part in ran} == {id(part) for part in parts}


def test_an_mlp_with_a_replaced_activation_still_calls_it():
    model, ran = build("llama"), []
    mlp = model.model.layers[0].mlp
    mlp.act_fn.forward = lambda x: (ran.append(mlp), torch.relu(x))[1]
    x = torch.randn(2, 5, 64)
    wanted, ran[:] = mlp(x), []
    optimize(model)
    torch.testing.assert_close(mlp(x), wanted)
    assert len(ran) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_replaced_forward_of_the_angles_is_asked_for_their_layout(turned):
    """It stays in the model, so what it returns counts and not what its class would: here each angle twice in a row."""
    model, ran = build("llama"), []
    rotary = model.model.rotary_emb
    _wrapped(rotary, ran)
    if turned:
        made = rotary.forward
        rotary.forward = lambda x, position_ids: tuple(
            table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in made(x, position_ids)
        )
    ids = torch.arange(6)[None]
    wanted = model(input_ids=ids).logits
    optimize(model)
    replaced = {row.fqn for row in model.tilesmith_report.replaced if row.rule == "rope"}
    assert ran and ("model.layers.0.self_attn" in replaced) is not turned
    torch.testing.assert_close(model(input_ids=ids).logits, wanted)


_LOADED = """
import sys, torch
model, ids = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(model(ids)[0], torch.load(sys.argv[2]))
print(model.config._attn_implementation)
"""


@pytest.mark.parametrize("undone", [False, True])
def test_an_inner_model_is_saved_and_undone_by_itself(undone, tmp_path):
    """Another process knows our attention only by what it loads, and an undone model does not ask for it."""
    before = build("llama").config._attn_implementation
    inner, ids = optimize(build("llama")).model.eval(), torch.arange(6)[None]
    inner = undo(copy.deepcopy(inner)) if undone else inner
    torch.save((inner, ids), tmp_path / "model.pt")
    torch.save(inner(ids)[0].detach(), tmp_path / "out.pt")
    command = [sys.executable, "-c", _LOADED, tmp_path / "model.pt", tmp_path / "out.pt"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (before if undone else "tilesmith")


def test_undo_of_an_inner_model_gives_the_model_its_attention_back_and_the_report_says_so():
    model, ids = build("llama").eval(), torch.arange(6)[None]
    before, wanted = model.config._attn_implementation, model(ids).logits
    optimize(model)
    undo(model.model)
    assert model.config._attn_implementation == before
    row = next(row for row in optimize(model).tilesmith_report.rows if (row.rule, row.fqn) == ("attention", ""))
    assert row.action == "skipped" and f"its attention was set to {before} after it was optimized" in row.reason
    torch.testing.assert_close(model(ids).logits, wanted)
    assert optimize(undo(model)).config._attn_implementation == "tilesmith"
    torch.testing.assert_close(model(ids).logits, wanted)
