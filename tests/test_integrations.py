"""Entry points for others' trainers, and their examples. What is not installed is stood in for by its documented
interface: these tests then say what our side does, not that theirs still calls it."""

import contextlib
import importlib
import re
import runpy
import sys
import types
from dataclasses import dataclass, fields

import pytest
import torch
import yaml
from torch import nn

from optimize_models import Calls, batch, build, train
from ranks import ROOT, gloo, torchrun
from tilesmith.engine import use
from tilesmith.models import optimize
from tilesmith.rewrite import forms

pytest.importorskip("transformers")
EXAMPLES = {"trainer": ("accelerate",), "lora": ("peft",), "accelerate_loop": ("accelerate",), "trl_trainers": ("trl",)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, monkeypatch, capsys):
    """Each compares itself with the plain model."""
    for package in EXAMPLES[name]:
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert "replaced" in capsys.readouterr().out


@gloo
def test_example_on_two_ranks():
    """FSDP2 before and after `optimize`, tensor parallelism before and after it; each equals one process."""
    assert torchrun("examples/sharded.py").count("modules replaced") == 4


def stand_in(monkeypatch, name, **members):
    """A module of this name, and empty packages above it; the real one where it can be imported."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules or end == len(parts):
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    vars(sys.modules[name]).update(members)
    return sys.modules[name]


def fresh(monkeypatch, name):
    """One of our modules, imported beside what stands in for its library and forgotten afterwards."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def callback(**options):
    from tilesmith.integrations.trainer import TilesmithCallback

    return TilesmithCallback(**options)


def test_the_callback_optimises_once_and_gives_the_model_back():
    pytest.importorskip("accelerate")
    example = runpy.run_path(str(ROOT / "examples" / "trainer.py"))
    model = example["tiny_model"]()
    classes = [type(m) for m in model.modules()]
    seen = []

    class Watch(type(callback())):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append([row.rule for row in model.tilesmith_report.replaced])

    example["losses"](model, [Watch(undo=True, exclude="loss")], steps=2)
    assert len(seen) == 2 and "norm" in seen[0] and "loss" not in seen[0]
    assert [type(m) for m in model.modules()] == classes
    with pytest.raises(TypeError, match="unknown option onyl; pass only, exclude, strict, compile, graphs or undo"):
        callback(onyl="norm")


def test_the_callback_and_checkpointing_that_keeps_attention():
    """The Trainer's own gradient checkpointing, with a model that the callback optimised."""
    pytest.importorskip("accelerate")
    example = runpy.run_path(str(ROOT / "examples" / "trainer.py"))
    plain = example["losses"](example["tiny_model"](), steps=2)
    with use(attention="reference"):
        again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        found = example["losses"](example["tiny_model"](), [callback()], steps=2, **again)
    assert found == pytest.approx(plain, rel=1e-4)


def kinds(model):
    """The forms of a model's blocks, outermost first."""
    return [[type(form).__name__ for form in forms(block)] for block in model.model.layers]


def test_the_callback_records_and_compiles_blocks(monkeypatch):
    pytest.importorskip("accelerate")
    example = runpy.run_path(str(ROOT / "examples" / "trainer.py"))
    plain, model = example["losses"](example["tiny_model"](), steps=2), example["tiny_model"]()
    monkeypatch.setattr("tilesmith.models.compiling.BACKEND", "eager")
    found = example["losses"](model, [callback(graphs=True, compile="between")], steps=2)
    assert found == pytest.approx(plain, rel=1e-4)
    assert all(names[:2] == ["GraphedForm", "CompiledForm"] for names in kinds(model))
    told = str(model.tilesmith_report)
    assert re.search(r"Compiled blocks: [1-9]\d* calls", told) and "Blocks ran unrecorded" in told


def recipe(**settings):
    return types.SimpleNamespace(**settings)


REENTRANT = {"use_reentrant": True}
IDLE = {
    "graphs, compiled": ({"graphs": True}, {"torch_compile": True}, "graphs=True does nothing with torch_compile=True"),
    "compile, compiled": ({"compile": "between"}, {"torch_compile": True}, 'compile="between" does nothing with'),
    "fsdp": ({"graphs": True}, {"fsdp": "full_shard"}, "does nothing with fsdp='full_shard'"),
    "auto": ({"graphs": "auto"}, {"fsdp": "full_shard"}, "graphs='auto' does nothing with fsdp='full_shard'"),
    "reentrant": (
        {"graphs": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT},
        "does nothing with use_reentrant=True",
    ),
}
SERVED = {
    "no checkpointing": (
        {"graphs": True},
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": REENTRANT},
    ),
    "other checkpointing": (
        {"graphs": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    "auto": ({"graphs": "auto"}, {}),
    "compile, fsdp": ({"compile": "between"}, {"fsdp": "full_shard"}),
    "compiled, neither": ({}, {"torch_compile": True}),
}


def called(monkeypatch, via, options, settings, model):
    """Give a model to the callback or to the plugin of Axolotl, under these settings."""
    if via == "callback":
        return callback(**options).on_init_end(recipe(**settings), None, None, model=model)
    stand_in(monkeypatch, "pydantic", BaseModel=type("BaseModel", (), {}))
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    plugin = fresh(monkeypatch, "tilesmith.integrations.axolotl").TilesmithPlugin()
    return plugin.post_model_load({**{f"tilesmith_{k}": v for k, v in options.items()}, **settings}, model)


@pytest.mark.parametrize("via", ["callback", "axolotl"])
@pytest.mark.parametrize("case", IDLE)
def test_blocks_that_could_not_be_recorded_or_compiled_are_refused(case, via, monkeypatch):
    options, settings, words = IDLE[case]
    model = build("llama")
    with pytest.raises(ValueError, match=words):
        called(monkeypatch, via, options, settings, model)
    assert not any(forms(module) for module in model.modules())


@pytest.mark.parametrize("via", ["callback", "axolotl"])
@pytest.mark.parametrize("case", SERVED)
def test_blocks_that_can_be_recorded_or_compiled_are(case, via, monkeypatch):
    options, settings = SERVED[case]
    model = build("llama")
    called(monkeypatch, via, options, settings, model)
    outermost = {"graphs": "GraphedForm", "compile": "CompiledForm"}
    wanted = next((outermost[name] for name in options), "AddNormForm")
    assert [names[0] for names in kinds(model)] == [wanted] * 2


def test_graphs_of_replicas_and_zero3_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="torch.nn.DataParallel over 2 GPUs"):
        called(monkeypatch, "callback", {"graphs": True}, {"n_gpu": 2}, build("llama", layers=2))
    monkeypatch.setattr("transformers.integrations.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="DeepSpeed's ZeRO-3"):
        called(monkeypatch, "callback", {"graphs": True}, {}, build("llama", layers=2))


def test_adapters_that_a_trainer_adds_are_served_by_the_callback():
    """As TRL does with a peft_config: the callback comes after them, `optimize` before the trainer does not."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    model = peft.get_peft_model(build("llama"), config)
    callback().on_init_end(None, None, None, model=model)
    assert "lora" in {row.rule for row in model.tilesmith_report.replaced}


def test_layers_of_a_local_repository():
    """The folder in the Hub's layout, through the `kernels` package where it is, else its layers by hand."""
    folder = ROOT / "examples" / "hub_layers" / "build"
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    names = {modeling.LlamaRMSNorm: "RMSNorm", modeling.LlamaMLP: "SwiGLUMLP"}
    model, inputs = build("llama"), batch("llama")
    plain = train(model, inputs)
    try:
        from kernels import LocalLayerRepository

        layers = {cls: LocalLayerRepository(folder, layer_name=name).load() for cls, name in names.items()}
    except ImportError:
        offered = runpy.run_path(str(folder / "torch-cpu" / "__init__.py"))["layers"]
        layers = {cls: getattr(offered, name) for cls, name in names.items()}
    for layer in layers.values():  # what the package asks of a layer
        assert layer.__init__ is nn.Module.__init__ and layer.has_backward and layer.can_torch_compile
        assert {n for n in dir(layer) if n not in dir(nn.Module)} == {"can_torch_compile", "has_backward"}
    for module in model.modules():
        if type(module) in layers:
            module.forward = types.MethodType(layers[type(module)].forward, module)
    with Calls() as calls:
        found = train(model, inputs)
    assert calls["rms_norm"] == 5 and calls["swiglu"] == 2
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[2], plain[2], rtol=1e-4, atol=1e-6)
    texts = [(folder / f"torch-{kind}" / "__init__.py").read_text() for kind in ("cpu", "cuda")]
    assert texts[0] == texts[1]


def test_axolotl_plugin(monkeypatch):
    stand_in(monkeypatch, "pydantic", BaseModel=type("BaseModel", (), {}))
    base = stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    ours = fresh(monkeypatch, "tilesmith.integrations.axolotl")
    plugin, model = ours.TilesmithPlugin(), build("llama", layers=1)
    assert isinstance(plugin, base.BasePlugin)
    home, _, name = plugin.get_input_args().rpartition(".")
    assert home == ours.__name__ and set(getattr(ours, name).__annotations__) == {
        f"tilesmith_{option}" for option in ("only", "exclude", "compile", "graphs")
    }
    plugin.post_model_load({"tilesmith_exclude": ["rope"]}, model)
    rules = {row.rule for row in model.tilesmith_report.replaced}
    assert "norm" in rules and "rope" not in rules

    recipe = yaml.safe_load((ROOT / "examples" / "axolotl.yaml").read_text(encoding="utf-8"))
    (named,) = recipe["plugins"]
    assert named == f"{ours.__name__}.{type(plugin).__name__}"
    said = {key for key in recipe if key.startswith("tilesmith_")}
    assert said and said <= set(ours.TilesmithArgs.__annotations__)
    written = {**recipe, "lora_o_kernel": True}
    plugin.register(written)  # before Axolotl turns on its kernels, which replace the forwards that are ours
    assert [written[f"lora_{part}_kernel"] for part in ("mlp", "qkv", "o")] == [False, False, True]
    model = build("llama", layers=2)
    plugin.post_model_load(recipe, model)
    assert model.tilesmith_report.replaced and [names[0] for names in kinds(model)] == ["GraphedForm"] * 2


def test_llamafactory_runs_with_the_callback(monkeypatch):
    given = []
    tuner = stand_in(monkeypatch, "llamafactory.train.tuner", run_exp=None)
    monkeypatch.setattr(tuner, "run_exp", lambda args=None, callbacks=None: given.append((args, callbacks)))
    from tilesmith.integrations.llamafactory import run_exp

    recipe = yaml.safe_load((ROOT / "examples" / "llamafactory.yaml").read_text(encoding="utf-8"))
    run_exp(recipe, exclude="loss", graphs=True)
    ((args, (ours,)),) = given
    assert args == recipe and recipe["stage"] == "sft" and ours.options == {"exclude": "loss", "graphs": True}
    model = build("llama")
    ours.on_train_begin(None, None, None, model=model)
    assert model.tilesmith_report.replaced and [names[0] for names in kinds(model)] == ["GraphedForm"] * 2


def titan(monkeypatch):
    """torchtitan's configurations and the two functions that overrides use."""

    @dataclass(kw_only=True)
    class NormConfig:
        normalized_shape: int
        eps: float = 1e-5
        elementwise_affine: bool = True

    @dataclass(kw_only=True)
    class FeedForwardConfig:
        w1: nn.Module
        w2: nn.Module
        w3: nn.Module

    class RMSNorm(nn.RMSNorm):
        Config = NormConfig

        def __init__(self, config):
            super().__init__(config.normalized_shape, eps=config.eps, elementwise_affine=config.elementwise_affine)

    class FeedForward(nn.Module):
        Config = FeedForwardConfig

        def __init__(self, config):
            super().__init__()
            self.w1, self.w2, self.w3 = config.w1, config.w2, config.w3

        def forward(self, x):
            return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

    def derive(source, target):
        return target(**{f.name: getattr(source, f.name) for f in fields(source)})

    def override(*, target, exact, description):
        return lambda factory: factory

    stand_in(monkeypatch, "torchtitan.config", derive=derive, override=override)
    stand_in(monkeypatch, "torchtitan.models.common.feed_forward", FeedForward=FeedForward)
    stand_in(monkeypatch, "torchtitan.models.common.nn_modules", RMSNorm=RMSNorm)


def test_torchtitan_overrides(monkeypatch):
    with contextlib.suppress(ImportError):
        import torchtitan.config  # noqa: F401

        pytest.skip("torchtitan is here: the test below runs the real one")
    titan(monkeypatch)
    ours = fresh(monkeypatch, "tilesmith.integrations.torchtitan")
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.nn_modules import RMSNorm

    x = torch.randn(3, 8)
    config = RMSNorm.Config(normalized_shape=8, eps=1e-3)
    norm = ours.TilesmithRMSNorm(ours.rms_norm(config))
    products = {name: nn.Linear(8, 8) for name in ("w1", "w2", "w3")}
    feed_forward = ours.TilesmithFeedForward(ours.feed_forward(FeedForward.Config(**products)))
    with Calls() as calls:
        found = norm(x), feed_forward(x)
    assert calls == {"rms_norm": 1, "swiglu": 1}
    torch.testing.assert_close(found, (RMSNorm(config)(x), FeedForward(FeedForward.Config(**products))(x)))
    bare = ours.TilesmithRMSNorm(ours.rms_norm(RMSNorm.Config(normalized_shape=8, elementwise_affine=False)))
    torch.testing.assert_close(bare(x), nn.functional.rms_norm(x, (8,), eps=1e-5))


def test_torchtitan_overrides_by_its_own_mechanism():
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    from torchtitan.config import Configurable, OverrideConfig, apply_overrides
    from torchtitan.models.common.nn_modules import RMSNorm

    @dataclass(kw_only=True, slots=True)
    class Root(Configurable.Config):
        norm: RMSNorm.Config

    root = Root(norm=RMSNorm.Config(normalized_shape=8))
    told = apply_overrides(OverrideConfig(imports=["tilesmith.integrations.torchtitan.rms_norm"]), root)
    assert config and len(told) == 1
    x, norm = torch.randn(3, 8), root.norm.build()
    with Calls() as calls:
        found = norm(x)
    assert calls == {"rms_norm": 1}
    torch.testing.assert_close(found, nn.functional.rms_norm(x, (8,), norm.weight, norm.eps))


@pytest.mark.parametrize("name", ["axolotl", "torchtitan"])
def test_a_missing_library_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    for module in [m for m in sys.modules if m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=rf"tilesmith\.integrations\.{name} needs .*pip install"):
        fresh(monkeypatch, f"tilesmith.integrations.{name}")


def test_quantised_weights_are_named_in_the_report():
    class Packed(nn.Module):
        """As bitsandbytes and others keep a layer: integers that its own forward unpacks."""

        def __init__(self, linear):
            super().__init__()
            self.scale = linear.weight.detach().abs().max() / 127
            values = (linear.weight.detach() / self.scale).round().to(torch.int8)
            self.weight = nn.Parameter(values, requires_grad=False)

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)

    model = build("llama", layers=1)
    layer = model.model.layers[0]
    for owner in (layer.self_attn, layer.mlp):
        for name, linear in list(owner.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(owner, name, Packed(linear))
    plain = train(model, batch("llama"))
    report = optimize(model).tilesmith_report
    rows = [row for row in report.skipped if row.cls == "Packed"]
    assert len(rows) == 7 and all(row.reason.startswith("its weights are kept in int8") for row in rows)
    assert {"norm", "rope", "activation", "attention", "loss"} <= {row.rule for row in report.replaced}
    found = train(model, batch("llama"))
    torch.testing.assert_close(found[2], plain[2], rtol=1e-4, atol=1e-6)
