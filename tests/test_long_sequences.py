"""`fit_sequence`: gradients of what it does to a model, its plan against what runs, and what it refuses."""

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilesmith
from devices import ON_GPU
from optimize_models import assert_within_budget, build, checkpoint_layers, ops_everywhere, train  # noqa: F401
from tilesmith import MemoryConfig, fit_sequence, ops
from tilesmith.models import optimize, undo
from tilesmith.models.checkpoints import Keep, Keeper, KeptForm, Shelf, checkpointed_layers, switch_of
from tilesmith.models.layers.tiles import TiledForm, gated_mlps, tiled
from tilesmith.models.sizing.memory_estimate import LiveBytes
from tilesmith.models.sizing.sample_inputs import most_tokens
from tilesmith.models.sizing.sequence_plan import PROBED
from tilesmith.models.sizing.step_costs import Line, StepCosts
from tilesmith.rewrite import forms

FAMILIES = ("llama", "qwen3", "gemma3")
TOKENS, ROWS = 24, 2
WHOLE = 10**6  # a tile that holds everything


def batch():
    ids = torch.randint(3, 120, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def made(family, lora=False, optimized=True, layers=2, **changes):
    model = build(family, layers=layers)
    for name, value in changes.items():
        setattr(model.config, name, value)
    if lora:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).train()
    return optimize(model) if optimized else model


def checkpointed(model):
    """Gradients of checkpointing as transformers has it."""
    for layer in checkpointed_layers(model).values():
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, _plain
    found = train(model, batch())
    for layer in checkpointed_layers(model).values():
        del layer.gradient_checkpointing, layer._gradient_checkpointing_func
    return found


def _plain(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def fitted(model, keep="device", tile=WHOLE, **more):
    return fit_sequence(model, TOKENS, batch=ROWS, keep=keep, tile_tokens=tile, **more)


def assert_same(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert list(found[2]) == list(wanted[2])
    for name, gradient in wanted[2].items():
        assert torch.equal(found[2][name], gradient), name


@pytest.mark.parametrize(("family", "lora"), list(product(FAMILIES, (False, True))))
def test_inputs_kept_as_they_are_give_the_gradients_of_plain_checkpointing(family, lora):
    model = made(family, lora)
    before, wanted = train(model, batch()), checkpointed(model)
    for keep in ("device", "host"):
        plan = fitted(model, keep)
        assert plan.keeps == (keep,) * 2
        assert_same(train(model, batch()), wanted)
        assert plan.undo() is model
    assert_same(train(model, batch()), before)


@pytest.mark.parametrize(("family", "lora"), list(product(FAMILIES, (False, True))))
def test_tiles_change_no_more_than_the_order_of_sums(family, lora):
    model = made(family, lora)
    same, oracle = train(model, batch()), train(copy.deepcopy(model).double(), batch())
    plan = fitted(model, "host", tile=7)
    assert (plan.tile_tokens, plan.tiled) == (7, 2)
    assert_within_budget(train(model, batch()), same, oracle)


def test_models_that_were_not_optimized_are_tiled_too():
    model = made("llama", optimized=False)
    before = [type(m) for m in model.modules()]
    same, oracle = train(model, batch()), train(copy.deepcopy(model).double(), batch())
    plan = fitted(model, "host", tile=16)
    assert plan.tiled == 2
    assert_within_budget(train(model, batch()), same, oracle)
    undo(model)
    assert [type(m) for m in model.modules()] == before
    assert not any(name.startswith("_tilesmith") for m in model.modules() for name in m.__dict__)


def test_micro_batches_accumulate_and_evaluation_goes_between():
    model = made("llama", lora=True)

    def two():
        model.zero_grad()
        for each in (0, 1):
            part = {name: x[each : each + 1] for name, x in batch().items()}
            model(**part).loss.backward()
            with torch.no_grad():
                model.eval()(**part)
            model.train()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    for layer in checkpointed_layers(model).values():
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, _plain
    wanted = two()
    fitted(model, "host")
    found = two()
    assert list(found) == list(wanted) and all(torch.equal(found[n], g) for n, g in wanted.items())
    undo(model)
    assert all(layer._gradient_checkpointing_func is _plain for layer in checkpointed_layers(model).values())


def test_host_memory_is_allocated_once_and_two_forwards_may_be_open():
    model = made("llama")
    wanted = checkpointed(model)
    fitted(model, "host")
    shelf = next(iter(checkpointed_layers(model).values()))._gradient_checkpointing_func.shelf
    train(model, batch())
    once = shelf.blocks.bytes
    assert once > 0
    assert_same(train(model, batch()), wanted)
    assert shelf.blocks.bytes == once
    model.zero_grad()
    first, second = (model(**batch()).loss for _ in range(2))
    assert shelf.blocks.bytes == 2 * once
    first.backward()
    model.zero_grad()
    second.backward()
    assert all(torch.equal(p.grad, wanted[2][n]) for n, p in model.named_parameters())


def test_a_backward_may_be_repeated():
    model = made("llama")
    wanted = checkpointed(model)
    fitted(model, "host", tile=7)
    loss = model(**batch()).loss
    grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=again) for again in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert torch.allclose(grads[0][0], wanted[2]["model.embed_tokens.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("host", [False, True])
def test_e4m3_gives_the_gradients_at_the_rounded_inputs(host):
    """Exactly those: what is stated is the error of the input, a sixteenth of each element at most."""
    model = made("llama")
    fitted(model)
    for layer in checkpointed_layers(model).values():
        layer._gradient_checkpointing_func.keep = Keep(e4m3=True, host=host)
    found = train(model, batch())

    def at_rounded(function, x, *args):
        codes, factor = ops.fp8_cast_rows(x.detach().reshape(-1, x.shape[-1]))
        rounded = (codes.to(x.dtype) * factor).view(x.shape)
        assert ((rounded - x).abs() <= x.abs() / 16 + factor.view(*x.shape[:-1], 1) * 2.0**-10).all()
        root = ((rounded - x).norm() / x.norm()).item()
        assert 0.015 < root < 0.035
        return _Rounded.apply(x, rounded, function)

    class _Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rounded, function):
            ctx.rounded, ctx.function = rounded, function
            return function(x)

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                leaf = ctx.rounded.requires_grad_()
                ctx.function(leaf).backward(dy)  # parameters take theirs here
            return leaf.grad, None, None

    for layer in checkpointed_layers(model).values():
        layer._gradient_checkpointing_func = at_rounded
    wanted = train(model, batch())
    assert torch.equal(found[0], wanted[0])
    for name, gradient in wanted[2].items():
        assert torch.allclose(found[2][name], gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item()), name


def test_dropout_in_a_tile_is_drawn_again_and_autocast_holds():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    x = torch.randn(2, 9, 8, requires_grad=True)

    def by_tiles(x):
        parts = [mlp(part) for part in x.reshape(1, -1, 8).split(4, 1)]
        return torch.cat(parts, 1).view(x.shape)

    grads = []
    for run in (by_tiles, lambda x: tiled(mlp, mlp, x, 4)):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        assert y.dtype is torch.bfloat16
        torch.rand(5)  # the backward does not depend on numbers drawn since
        state = torch.get_rng_state()
        grads.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *mlp.parameters()])])
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    for found, wanted in zip(grads[1][2:], grads[0][2:]):
        assert found.dtype is torch.float32
        assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_what_an_mlp_computes_inside_exists_for_a_tile():
    mlp = nn.Sequential(nn.Linear(8, 400), nn.SiLU(), nn.Linear(400, 8))
    peaks = []
    for rows in (64, 1024):
        x = torch.randn(1, 1024, 8, requires_grad=True)
        with LiveBytes() as live:
            (tiled(mlp, mlp, x, rows) if rows < 1024 else mlp(x)).sum().backward()
        peaks.append(live.peak)
    assert peaks[0] < peaks[1] / 6


def test_the_second_forward_of_a_layer_ends_before_its_tiles():
    """Where nothing behind the MLP is saved: each tile runs once forward and once in the backward."""
    model = made("llama", layers=1)
    fitted(model, tile=12)
    (mlp,) = gated_mlps(model).values()
    calls = []
    mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    train(model, batch())
    assert len(calls) == 2 * ROWS * TOKENS // 12


def _peak_of_a_step(model, ids):
    """The bytes that live at once in the second step, beside parameters, buffers and ids."""
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    with LiveBytes() as live:
        live.ignore(iter([*model.parameters(), *model.buffers(), ids]))
        model(input_ids=ids, labels=ids).loss.backward()
    return live.peak


@pytest.mark.parametrize("keep", ["device", "host", "e4m3"])
def test_the_predicted_peak_is_what_a_step_takes(keep):
    model = made("llama", lora=True, layers=6)
    tokens = 256
    plan = fit_sequence(model, tokens, keep=keep, tile_tokens=64)
    ids = torch.randint(3, 120, (1, tokens))
    peak = _peak_of_a_step(model, ids)
    predicted = plan.peak - plan.parts["parameters"]
    assert 0.9 * peak <= predicted + plan.host <= 1.1 * peak  # host memory is the CPU's own here


@pytest.mark.parametrize(("tokens", "rows"), [(512, 1), (320, 3)])
def test_scores_that_are_kept_whole_are_predicted_as_squares(tokens, rows):
    model = made("qwen3", optimized=False, layers=4).bfloat16()
    assert model.config._attn_implementation == "eager"
    memory = MemoryConfig(max_memory_gb=24.0)
    plan = fit_sequence(model, tokens, batch=rows, tile_tokens=64, memory=memory)
    ids = torch.randint(3, 120, (rows, tokens))
    peak = _peak_of_a_step(model, ids)
    predicted = plan.peak - plan.parts["parameters"]
    assert 0.9 * peak <= predicted <= 1.2 * peak  # short runs, whose peaks lie elsewhere, bend it upwards
    assert plan.longest < 100_000


@pytest.mark.parametrize("optimized", [False, True])
def test_the_loss_of_a_large_vocabulary_is_part_of_the_plan(optimized):
    model = build("llama", attention="sdpa")
    model.resize_token_embeddings(9000)
    model = optimize(model) if optimized else model
    tokens = 512
    plan = fit_sequence(model, tokens, tile_tokens=64)
    ids = torch.randint(3, 120, (1, tokens))
    peak = _peak_of_a_step(model, ids)
    predicted = plan.peak - plan.parts["parameters"]
    assert peak <= predicted
    if not optimized:  # what an op of ours takes while it runs is not seen here
        assert predicted <= 1.2 * peak
        with pytest.raises(ValueError, match="MB on the device at the least"):
            fit_sequence(model, tokens, memory=MemoryConfig(max_memory_gb=peak / 2 / 1e9))


def test_no_curve_where_a_line_does():
    assert Line.fitted([(64, 1000), (128, 1000), (256, 1500)]) == Line.through(128, 1000, 256, 1500)
    assert Line.fitted([(7, 70)]) == Line.through(7, 70, 7, 70)
    points = [(n, 30 + 4 * n + n * n) for n in (64, 128, 256)]
    assert Line.fitted(points)(1000) == 30 + 4000 + 1_000_000
    grows = Line.fitted([(64, 640), (128, 1281), (256, 2570)])
    assert all(grows(n + 1) >= grows(n) for n in range(0, 5000, 7))


COSTS = StepCosts(8, 16, 2, 1000, Line(100.0, 96.0), device=10_000, limit=10_000, host=4_000)


def test_auto_keeps_on_the_device_what_fits_then_sends_then_rounds():
    assert COSTS.choose(10, "auto") == (Keep(),) * 8
    assert COSTS.peak(10, COSTS.choose(10, "device")) == 1000 + 100 + 960 + 8 * 320
    sent = [str(k) for k in COSTS.choose(26, "auto")]
    assert sent == ["host"] * sent.count("host") + ["device"] * sent.count("device") and 0 < sent.count("host") < 8
    seen = set()
    for tokens in range(10, COSTS.longest("auto") + 1):
        keeps = COSTS.choose(tokens, "auto")
        assert COSTS.peak(tokens, keeps) <= 10_000 and COSTS.on_host(tokens, keeps) <= COSTS.host
        fits = (k for k in COSTS.candidates("auto") if COSTS.on_host(tokens, k) <= COSTS.host)
        assert keeps == next(k for k in fits if COSTS.peak(tokens, k) <= 10_000), "fewest in e4m3, then on the host"
        seen |= {str(k) for k in keeps}
    assert seen == {"device", "host", "e4m3", "e4m3 on the host"}
    assert COSTS.longest("auto") >= max(COSTS.longest(k) for k in ("device", "host", "e4m3"))
    assert COSTS.choose(COSTS.longest("auto") * 2, "auto") is None


def test_a_memory_config_bounds_the_step_and_what_does_not_fit_is_said():
    model = made("llama", layers=4)
    whole = fitted(model)
    plan = fitted(model, "auto", memory=MemoryConfig(max_memory_gb=(whole.peak - 1) / 1e9))
    assert plan.peak < whole.peak and "host" in plan.keeps
    assert "in host memory" in str(plan) and f"{TOKENS * ROWS} tokens" in str(plan)
    aimed = MemoryConfig(target_memory_gb=(whole.peak - 1) / 1e9, max_memory_gb=1.0)
    assert fitted(model, "auto", memory=aimed).keeps == plan.keeps
    with pytest.raises(
        ValueError, match=r"48 tokens take .* MB on the device .*keep='device'.*keep='auto' may fit.*about"
    ):
        fitted(model, "device", memory=MemoryConfig(max_memory_gb=(whole.peak - 1) / 1e9))
    assert not any("_tilesmith_checkpoint_before" in m.__dict__ for m in model.modules())
    with pytest.raises(ValueError, match=r"host memory for 48 tokens, and 0 bytes may be taken; raise host_memory_gb"):
        fitted(model, "host", host_memory_gb=0)


def test_copies_and_pickles_keep_their_plan():
    model = made("llama")
    wanted = checkpointed(model)
    fitted(model, "host", tile=WHOLE)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(train(other, batch()), wanted)
        keepers = [layer._gradient_checkpointing_func for layer in checkpointed_layers(other).values()]
        assert len({id(k.shelf) for k in keepers}) == 1 and keepers[0].keep == Keep(host=True)
        undo(other)
        assert not any(isinstance(m.__dict__.get("_gradient_checkpointing_func"), Keeper) for m in other.modules())


@pytest.mark.parametrize("lora", [False, True])
def test_a_plan_stays_where_a_trainer_switches_checkpointing_on(lora):
    model = made("llama", lora)
    plan = fitted(model, "e4m3")
    wanted, told = train(model, batch()), str(plan)
    checkpoint_layers(model)
    assert_same(train(model, batch()), wanted)
    assert str(plan) == told and "switched off" not in told
    checkpoint_layers(model, on=False)
    assert "checkpointing of 2 layers was switched off" in str(plan) and f"model.{switch_of(model)}() switches" in str(
        plan
    )
    found = train(model, batch())[2]
    assert any(not torch.equal(gradient, wanted[2][name]) for name, gradient in found.items())
    checkpoint_layers(model)
    assert_same(train(model, batch()), wanted)
    other = copy.deepcopy(model)
    plan.undo()
    layers = checkpointed_layers(model).values()
    assert all(layer.gradient_checkpointing for layer in layers), "what was asked for since"
    assert not any(isinstance(layer._gradient_checkpointing_func, Keeper) for layer in layers)
    assert not any(isinstance(form, KeptForm) for layer in layers for form in forms(layer))
    checkpoint_layers(other)
    assert_same(train(other, batch()), wanted)


def test_a_plan_says_that_it_does_nothing_in_evaluation_mode():
    model = made("llama").eval()
    plan = fitted(model)
    assert "the model is in evaluation mode, in which no layer is checkpointed: call model.train()" in str(plan)
    model.train()
    assert "evaluation mode" not in str(plan)


def test_rows_are_measured_as_rows_where_positions_are_few():
    model = build("gpt2")
    positions = model.config.n_positions
    batch = 2 + PROBED["cpu"] // positions  # more tokens in all than there are positions
    plan = fit_sequence(model, positions, batch=batch, keep="device")
    assert plan.tokens == positions * batch
    ids = torch.randint(3, 90, (batch, positions))
    model(input_ids=ids, labels=ids).loss.backward()  # and makes no cache
    plan.undo()
    assert not any(forms(m) or m.__dict__.get("gradient_checkpointing") for m in model.modules())


SMALL = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
GPT = {"vocab_size": 100, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 96}
OF_POSITIONS = {
    "GPT2LMHeadModel": ("GPT2Config", GPT, "transformer.wpe.weight"),
    "OPTForCausalLM": (
        "OPTConfig",
        {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 96},
        "model.decoder.embed_positions.weight",
    ),
    "GPTJForCausalLM": ("GPTJConfig", {**GPT, "rotary_dim": 4}, "embed_positions|made in its forward"),
}


@pytest.mark.parametrize("family", OF_POSITIONS)
def test_tokens_beyond_a_table_of_positions_are_refused(family):
    transformers = pytest.importorskip("transformers")
    config, sizes, table = OF_POSITIONS[family]
    model, most = getattr(transformers, family)(getattr(transformers, config)(**sizes)), 96
    assert fit_sequence(model, most, keep="device").tokens == most
    with pytest.raises(
        ValueError, match=rf"tokens must be at most {most}, got {most + 1}.*({table}).*batch is how many"
    ):
        fit_sequence(model, most + 1)
    assert not any(isinstance(m.__dict__.get("_gradient_checkpointing_func"), Keeper) for m in model.modules())


def test_rotations_have_no_last_position():
    model = made("llama")
    tokens = 4 * most_tokens(model)
    assert fit_sequence(model, tokens, keep="device").tokens == tokens


def test_gradients_are_counted_once():
    """In a layer whose weights are larger than its activations, against a second micro-batch."""
    model = made("llama", layers=3)
    tokens = 8
    plan = fit_sequence(model, tokens, keep="device")
    ids = torch.randint(3, 120, (1, tokens))
    model(input_ids=ids, labels=ids).loss.backward()
    there = [x for p in model.parameters() for x in (p, p.grad)]
    with LiveBytes() as live:
        live.ignore(iter([*there, *model.buffers(), ids]))
        model(input_ids=ids, labels=ids).loss.backward()
    counted = live.peak + sum(x.nbytes for x in there)
    assert 0.99 * counted <= plan.peak <= 1.01 * counted


def test_measuring_leaves_the_model_as_it_was():
    model = made("llama").eval()
    train(model.train(), batch())
    model.eval()
    before = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    fitted(model, tile=None)
    assert not model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before))


def test_a_model_is_measured_from_within_inference_mode():
    model = made("llama")
    wanted = fitted(model).costs.layer
    with torch.inference_mode():
        assert fitted(model).costs.layer == wanted
    assert_same(train(model, batch()), checkpointed(made("llama")))


def test_bad_input_is_refused_in_words():
    model = made("llama")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        fit_sequence("model", 8)
    with pytest.raises(ValueError, match="tokens"):
        fit_sequence(model, 0)
    with pytest.raises(ValueError, match="keep must be one of auto, device, e4m3, host, got 'disk'"):
        fit_sequence(model, 8, keep="disk")
    with pytest.raises(TypeError, match="memory must be a MemoryConfig or None, got float"):
        fit_sequence(model, 8, memory=1.0)
    with pytest.raises(ValueError, match="host_memory_gb must be a number of GB"):
        fit_sequence(model, 8, host_memory_gb=-1)
    with pytest.raises(ValueError, match="Sequential has no layers that transformers can checkpoint"):
        fit_sequence(nn.Sequential(nn.Linear(4, 4)), 8)
    with pytest.raises(ValueError, match="has an encoder and a decoder"):
        fit_sequence(build("bart"), 8)
    with pytest.raises(ValueError, match="on meta; load the model"):
        fit_sequence(made("llama").to("meta"), 8)
    compiled = optimize(made("llama"), compile="between")
    with pytest.raises(ValueError, match="takes pixel_values; models of input_ids are supported"):
        fit_sequence(build("vit"), 8)
    with pytest.raises(ValueError, match=r"model.layers.0 is recorded or compiled by optimize"):
        fit_sequence(compiled, 8)
    fitted(model)
    with pytest.raises(ValueError, match=r"optimize: fit_sequence has planned this model"):
        optimize(model)
    assert tilesmith.undo(model) is model and optimize(model) is model


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_tile_is_refused_where_no_mlp_is_gated(family):
    """`tile_tokens` would have no effect."""
    model = made(family)
    with pytest.raises(ValueError, match=r"tile_tokens is 8, but (GPT2|Mixtral)\w+ has no gated MLP.*leave it out"):
        fit_sequence(model, TOKENS, tile_tokens=8)
    assert fit_sequence(model, TOKENS).tiled == 0


@pytest.mark.parametrize("optimized", [False, True])
def test_an_mlp_whose_forward_was_replaced_is_not_tiled(optimized):
    """The form would lie below that forward, and the plan count a tile that never is."""
    model = made("llama", optimized=optimized)
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward
    assert fitted(model, tile=7).tiled == 1
    assert not forms(mlp) or not isinstance(forms(mlp)[0], TiledForm)


def test_a_shelf_gives_back_what_it_was_given():
    shelf = Shelf(torch.device("cpu"))
    keeper = Keeper(Keep(host=True), shelf)
    x = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    y = keeper(lambda x, scale: F.silu(x * scale), x, 2.0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(F.silu(x * 2.0).sum(), x)
    assert torch.equal(dx, wanted)
    assert shelf.blocks.bytes == 32  # 30 bytes in a block of a power of two


@pytest.mark.skipif(not ON_GPU, reason="streams are a GPU's")
@pytest.mark.parametrize("keep", [Keep(host=True), Keep(e4m3=True), Keep(e4m3=True, host=True)], ids=str)
def test_copies_on_a_stream_of_their_own_are_in_time(keep):
    """Against the same without streams, while memory is handed out anew by the caching allocator all the time."""
    device = torch.device("cuda")
    weights = [torch.randn(512, 512, device=device, requires_grad=True) for _ in range(12)]
    x = torch.randn(4096, 512, device=device, requires_grad=True)
    shelf = Shelf(device)

    def layer(x, weight):
        return x + torch.tanh(x @ weight / 512**0.5)

    def rounded(x):
        codes, factor = ops.fp8_cast_rows(x.detach())
        return (codes.float() * factor) if keep.e4m3 else x.detach()

    def step(checkpointed):
        hidden, inputs = x, []
        for weight in weights:
            inputs.append(rounded(hidden))
            hidden = Keeper(keep, shelf)(layer, hidden, weight) if checkpointed else layer(hidden.detach(), weight)
        if checkpointed:
            return [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), [x, *weights])]
        dx, found = 2 * hidden.detach(), []
        for kept, weight in zip(reversed(inputs), reversed(weights)):
            leaf = kept.requires_grad_()
            dx, dweight = torch.autograd.grad(layer(leaf, weight), [leaf, weight], dx)
            found.append(dweight)
        return [hidden.detach(), dx, *reversed(found)]

    wanted = step(False)
    for _ in range(10):
        for found, each in zip(step(True), wanted, strict=True):
            assert torch.equal(found, each)
