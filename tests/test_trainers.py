"""The entry points under the trainers and packages themselves: training with them is training without them.

`make test` installs TRL and bitsandbytes. The others ask for releases of their own of what the tests need, or change
what transformers does (`kernels`); `make integrations` gives each an environment of its own and runs its test there.
"""

import importlib
import json
import runpy
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from optimize_models import Calls, batch, build, ops_everywhere, train  # noqa: F401
from ranks import ROOT
from tilesmith.models import optimize

pytest.importorskip("transformers")
EXAMPLES = ROOT / "examples"
TRAINED = {"attention", "attention_vjp", "rope", "add_rms_norm", "add_rms_norm_vjp"}
SHORT = {"max_steps": 3, "learning_rate": 2e-3, "logging_steps": 1, "bf16": False, "gradient_accumulation_steps": 1}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing is asked of the Hub; Axolotl and the rest send no statistics."""
    for name in ("HF_HUB_OFFLINE", "AXOLOTL_DO_NOT_TRACK", "DISABLE_MLFLOW_INTEGRATION"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def installed(missing):
    """installed(name): the package, which `make test` installs, so that it may not be missing there."""

    def get(name: str):
        try:
            return importlib.import_module(name)
        except ImportError as problem:
            return missing(f"{name} could not be imported ({problem}): pip install {name}")

    return get


def callback():
    from tilesmith.integrations.trainer import TilesmithCallback

    return TilesmithCallback()


def forget_trials(monkeypatch, name: str, calls: dict[str, int]):
    """Forget the calls that `optimize` makes to see what modules compute, when one of our entry points calls it."""

    def optimized(model, **options):
        done = optimize(model, **options)
        calls.clear()
        return done

    monkeypatch.setattr(f"tilesmith.integrations.{name}.optimize", optimized)


WAYS = {
    "before": ("sft", "dpo", "grpo"),
    "callback": ("sft", "dpo", "grpo"),
    "adapters": ("sft", "grpo"),  # DPOTrainer takes adapters or a reference model
}


@pytest.mark.parametrize(("way", "kind"), [(way, kind) for way, kinds in WAYS.items() for kind in kinds])
def test_trl(way, kind, installed, monkeypatch):
    """TRL's trainers on a model optimised before, by the callback, and by the callback after TRL's own adapters."""
    installed("trl")
    example = runpy.run_path(str(EXAMPLES / "trl_trainers.py"))
    logged, tiny = example["logged"], example["tiny_model"]
    how = {}
    if way == "adapters":
        how["peft_config"] = installed("peft").LoraConfig(r=2, target_modules="all-linear")
    plain = logged(kind, tiny(), **how)
    model = optimize(tiny()) if way == "before" else tiny()
    with Calls() as calls:
        forget_trials(monkeypatch, "trainer", calls)
        found = logged(kind, model, **how, **({} if way == "before" else {"callbacks": [callback()]}))
    assert set(calls) >= TRAINED
    assert ("lora_linear" if way == "adapters" else "swiglu") in calls and "linear_cross_entropy" not in calls
    learns = max if kind == "grpo" else min  # in some steps: completions that earn alike teach nothing
    assert found == pytest.approx(plain, rel=1e-3, abs=1e-4) and learns(plain[1::2]) > 1e-2


def test_layers_are_mapped_by_the_kernels_package(monkeypatch):
    """`kernelize` with the folder in the Hub's layout, as the guide does it."""
    kernels = pytest.importorskip("kernels")
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    names = {modeling.LlamaRMSNorm: "RMSNorm", modeling.LlamaMLP: "SwiGLUMLP"}
    for cls, name in names.items():  # as transformers marks its classes where it accepts the release of `kernels`
        for attribute in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(cls, attribute, getattr(cls, attribute, None), raising=False)
        kernels.replace_kernel_forward_from_hub(cls, name)
    model, inputs = build("llama"), batch("llama")
    plain = train(model, inputs)
    folder = EXAMPLES / "hub_layers" / "build"
    layers = {name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=name)} for name in names.values()}
    with kernels.use_kernel_mapping(layers):
        model = kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    with Calls() as calls:
        found = train(model, inputs)
    assert calls == {"rms_norm": 5, "swiglu": 2, "rms_norm_vjp": 5, "swiglu_vjp": 2}
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[2], plain[2], rtol=1e-4, atol=1e-6)


def test_the_example_of_four_bits(installed, monkeypatch, capsys):
    """It compares itself with the plain model."""
    installed("bitsandbytes")
    monkeypatch.setattr("sys.argv", ["lora", "--four-bit"])
    runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")
    assert "its weights are kept in nf4" in " ".join(capsys.readouterr().out.split())


def four_bit(folder, **how):
    """A tiny Llama, loaded in NF4 as its users load it, with seeded adapters."""
    transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **how
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized)
    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, adapters)


@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_bitsandbytes(nested, installed, tmp_path, monkeypatch):
    """A QLoRA step. Optimising runs no packed layer, and leaves what unpacks the weights as it was."""
    bitsandbytes = installed("bitsandbytes")
    installed("peft")
    build("llama").save_pretrained(tmp_path)
    inputs = batch("llama")
    plain = train(four_bit(tmp_path, bnb_4bit_use_double_quant=nested), inputs)
    model = four_bit(tmp_path, bnb_4bit_use_double_quant=nested)
    packed = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    states = [dict(vars(m.weight.quant_state)) for m in packed]
    run, forward = [], bitsandbytes.nn.Linear4bit.forward
    with monkeypatch.context() as patched:
        patched.setattr(bitsandbytes.nn.Linear4bit, "forward", lambda self, x: run.append(self) or forward(self, x))
        optimize(model)
    assert len(packed) == 14 and not run
    for module, before in zip(packed, states):
        after = vars(module.weight.quant_state)
        assert module.weight.dtype is torch.uint8 and all(after[name] is value for name, value in before.items())
    report = model.tilesmith_report
    assert sum(row.reason.startswith("its weights are kept in nf4") for row in report.skipped) == 14
    with Calls() as calls:
        found = train(model, inputs)
    assert calls["lora_linear"] == 14 and {"attention", "add_rms_norm", "rope", "swiglu"} <= set(calls)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], plain[2], rtol=1e-3, atol=1e-5)


def tiny(folder: Path) -> tuple[Path, Path]:
    """A Llama of two layers with a tokenizer of characters, and a data set of instructions, both saved in a folder."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    kinds = ["<pad>", "</s>", "<s>", "<unk>", *map(chr, range(32, 127)), "\n"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({kind: i for i, kind in enumerate(kinds)}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    model = folder / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = transformers.LlamaConfig(**sizes, **ids, num_key_value_heads=2, vocab_size=len(kinds))
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    rows = [{"instruction": f"say {c} twice", "input": "", "output": f"{c} {c}"} for c in "abcdefghijklmnop"]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return model, folder / "rows.json"


def recipe(name: str) -> dict:
    """A configuration of examples/."""
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))


def test_axolotl(tmp_path, monkeypatch):
    """examples/axolotl.yaml on a tiny model, with the plugin and without it."""
    pytest.importorskip("axolotl")
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train as run

    model, rows = tiny(tmp_path)
    told = {**recipe("axolotl"), **SHORT, "base_model": str(model), "micro_batch_size": 1, "sequence_len": 256}
    told |= {"datasets": [{"path": str(rows), "ds_type": "json", "type": "alpaca"}]}
    (ours,) = told["plugins"]

    def logged(name, **more):
        settings = {**told, **more, "output_dir": str(tmp_path / name), "dataset_prepared_path": str(tmp_path / "data")}
        written = tmp_path / f"{name}.yaml"
        written.write_text(yaml.safe_dump(settings), encoding="utf-8")
        cfg = load_cfg(str(written))
        *_, trainer = run(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        return cfg, trainer

    theirs = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    plain = logged("plain", plugins=["axolotl_seed.SeedPlugin"], **theirs)[1]
    with Calls() as calls:
        forget_trials(monkeypatch, "axolotl", calls)
        cfg, found = logged("found", plugins=["axolotl_seed.SeedPlugin", ours])
    assert set(calls) >= TRAINED | {"lora_linear", "linear_cross_entropy"} and not any(cfg[name] for name in theirs)
    agree(found.state.log_history, plain.state.log_history)


def agree(found: list[dict], plain: list[dict]):
    """Losses and norms of gradients of three steps."""
    kept = [[e[name] for e in log if "loss" in e for name in ("loss", "grad_norm")] for log in (found, plain)]
    assert len(kept[1]) == 6 and min(kept[1]) > 1e-2 and kept[0] == pytest.approx(kept[1], rel=1e-3)


def test_llamafactory(tmp_path, monkeypatch):
    """examples/llamafactory.yaml on a tiny model, by our entry point and by LLaMA-Factory's own."""
    pytest.importorskip("llamafactory")
    from llamafactory.train.tuner import run_exp as theirs

    from tilesmith.integrations.llamafactory import run_exp

    model, rows = tiny(tmp_path)
    told = {**recipe("llamafactory"), **SHORT, "model_name_or_path": str(model), "per_device_train_batch_size": 1}
    known = {told["dataset"]: {"file_name": rows.name}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    told |= {"dataset_dir": str(tmp_path), "cutoff_len": 256, "report_to": "none", "use_cpu": True}

    def logged(name, run):
        run({**told, "output_dir": str(tmp_path / name)})
        return json.loads((tmp_path / name / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]

    plain = logged("plain", theirs)
    with Calls() as calls:
        forget_trials(monkeypatch, "trainer", calls)
        found = logged("found", run_exp)
    assert set(calls) >= TRAINED | {"lora_linear", "linear_cross_entropy"}
    agree(found, plain)


class Titan:
    """torchtitan's debug model of a family under overrides of ours, by their names."""

    def __init__(self, family: str, overrides: list[str]):
        from torchtitan.config import Configurable, OverrideConfig, apply_overrides

        @dataclass(kw_only=True, slots=True)
        class Root(Configurable.Config):
            model: object

        root = Root(model=importlib.import_module(f"torchtitan.models.{family}").model_registry("debugmodel").model)
        named = [f"tilesmith.integrations.torchtitan.{name}" for name in overrides]
        self.told = apply_overrides(OverrideConfig(imports=named), root) if named else []
        torch.manual_seed(0)
        self.model = root.model.build()
        self.model.verify_module_protocol()
        with torch.no_grad():
            self.model.init_weights(buffer_device=torch.device("cpu"))

    def step(self):
        """The loss of one step, and every gradient."""
        tokens = torch.randint(2000, (2, 128), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(128).expand(2, -1)
        masks = self.model.get_attention_masks(positions=positions)
        logits = self.model(tokens, attention_masks=masks, positions=positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in self.model.named_parameters()}


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_torchtitan(family, monkeypatch):
    """Models of torchtitan, overridden by its own mechanism. PyTorch's stands in for FlexAttention, whose backward
    does not run on a CPU."""
    pytest.importorskip("torchtitan")
    attention = importlib.import_module("torchtitan.models.common.attention")

    def causal(q, k, v, **named):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=named["scale"], enable_gqa=True
        )
        return out, types.SimpleNamespace(lse=None)

    monkeypatch.setattr(attention.FlexAttention, "_compiled_flex_attn", staticmethod(causal))
    plain = Titan(family, []).step()
    ours = Titan(family, ["rms_norm", "feed_forward"])
    with Calls() as calls:
        found = ours.step()
    names = [type(module).__name__ for module in ours.model.modules()]
    norms, gates = names.count("TilesmithRMSNorm"), names.count("TilesmithFeedForward")
    assert norms > 10 and gates > 5 and ours.told and not {"RMSNorm", "FeedForward"} & set(names)
    assert calls["rms_norm_vjp"] == norms and calls["swiglu_vjp"] == gates
    torch.testing.assert_close(found[0], plain[0])
    assert list(found[1]) == list(plain[1])
    torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-6)
