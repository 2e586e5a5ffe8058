"""Training steps of model families at real widths and few layers, on one GPU: time, memory, first call, kernels.

    python benchmarks/model_steps.py results.json [FAMILY ...] [--variant NAME ...] [--rounds 5] [--kernels] [--tiny]

A step is the forward with its loss and the backward; bf16, each library's own attention setting. Variants of a family
take turns in one process. Liger replaces functions of transformers' modules, so `--variant liger` runs in a process of
its own, with nothing beside it. Rows are kept beside those that the file holds; each says by which command and when it
was made.

Linear layers in 8 bits run where `--variant` names them: `fp8` and `fp8-rowwise` are `optimize` and
`convert_model_to_fp8` by the delayed and the rowwise recipe, `torchao-fp8` is torchao's tensorwise recipe, compiled, on
the same layers. A step of ours then casts the weights and rolls the scales too, as the step of an optimizer has it do;
torchao's forward does so anyway.

--kernels: where the device's time of a step goes, by kernel. --tiny: sizes for a CPU, which show that it runs and
nothing else. Exits with 1 where a variant's loss, at its first step or once it has warmed up, is not that of the first
variant in bf16. Needs transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, load, profiled, provenance, save, say, spent
from torch import nn

import tilesmith
from tilesmith.attention.fusion import FusionStrategy, OptimizationLevel, create_unified_attention_fusion
from tilesmith.bench import tables
from tilesmith.engine.timing import Timing, interleave, measure, peak_memory, wall_time
from tilesmith.precision import FP8Config, convert_model_to_fp8, refresh_fp8, revert_model_from_fp8
from tilesmith.precision.scaling import roll

RUN = ("command", "date")  # of a run, what its rows keep
OPTIONS = argparse.Namespace(tiny=False)  # what the command line asked for
BF16_LOSS = 5e-3  # of a loss, the most that variants may be apart
BF16_STEP = 2**-7  # of a number, the most that it is from the next one in bf16, in which some models' losses are
# loss_curves.py finds models trained in 8 bits, torchao's among them, up to 1.2 % from those in bf16.
FP8_LOSS = 2e-2
LLAMA_1_5B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
}  # fmt: skip
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers: its config and class, sequences and tokens of a batch (of images: pixels of a side; of
    speech: the decoder's tokens)."""

    config: str
    model: str
    batch: int
    tokens: int
    sizes: dict[str, Any]


FAMILIES = {
    "llama-1.5b": Family("LlamaConfig", "LlamaForCausalLM", 4, 4096, LLAMA_1_5B),
    "llama-1.5b-16k": Family("LlamaConfig", "LlamaForCausalLM", 1, 16384, LLAMA_1_5B),
    "llama-8b": Family(
        "LlamaConfig", "LlamaForCausalLM", 2, 4096,
        {**LLAMA_1_5B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
    ),
    "qwen3-4b": Family(
        "Qwen3Config", "Qwen3ForCausalLM", 2, 4096,
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 6, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "gemma3-4b": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", 2, 4096,
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144, "sliding_window": 1024},
    ),
    "qwen3-30b-a3b": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 2, 4096,
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
         "num_experts_per_tok": 8, "vocab_size": 151936},
    ),
    "gpt-oss-20b": Family(
        "GptOssConfig", "GptOssForCausalLM", 2, 4096,
        {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
         "vocab_size": 201088, "sliding_window": 128},
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", 2, 4096,
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024, "num_hidden_layers": 4,
         "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 32,
         "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "vocab_size": 129280,
         "q_lora_rank": 1536, "kv_lora_rank": 512},
    ),
    "gpt2-medium": Family(
        "GPT2Config", "GPT2LMHeadModel", 8, 1024, {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}
    ),
    "bert-large": Family("BertConfig", "BertForMaskedLM", 32, 512, LARGE),
    "vit-large": Family("ViTConfig", "ViTForImageClassification", 64, 224, {**LARGE, "num_labels": 1000}),
    "whisper-medium": Family(
        "WhisperConfig", "WhisperForConditionalGeneration", 8, 448,
        {"d_model": 1024, "encoder_layers": 24, "decoder_layers": 24, "encoder_attention_heads": 16,
         "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "vocab_size": 51865,
         "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448, "pad_token_id": 50257,
         "bos_token_id": 50257, "eos_token_id": 50257, "decoder_start_token_id": 50258},
    ),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "sliding_window": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_labels": 16,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "num_mel_bins": 16, "max_source_positions": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "q_lora_rank": 48, "kv_lora_rank": 32,
}  # fmt: skip


def liger(model: nn.Module) -> None:
    """Liger's kernels in place of the model's functions and modules."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RuntimeError(f"Liger does not know {model.config.model_type}")
    _apply_liger_kernel_to_instance(model=model)


def optimized_and_compiled(model: nn.Module) -> None:
    tilesmith.optimize(model)
    model.compile(dynamic=False)


def fused(model: nn.Module) -> None:
    """Whole blocks, with products of one input packed."""
    create_unified_attention_fusion(model, FusionStrategy.FULL_BLOCK, OptimizationLevel.AGGRESSIVE)


def fp8_config(recipe: str) -> FP8Config:
    """The recipe as it is by default; a tiny model's layers and batches are below its limits."""
    return FP8Config(recipe=recipe, min_features=16, min_tokens=1) if OPTIONS.tiny else FP8Config(recipe=recipe)


def in_fp8(recipe: str) -> Callable[[nn.Module], None]:
    """What optimises a model and has its linear layers multiply in 8 bits."""

    def change(model: nn.Module) -> None:
        convert_model_to_fp8(tilesmith.optimize(model), fp8_config(recipe))

    return change


def torchao_fp8(model: nn.Module) -> None:
    """torchao's 8-bit layers, compiled, in place of those that ours takes by default."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    ours = {row.fqn for row in convert_model_to_fp8(model, fp8_config("delayed")).fp8_report.replaced}
    revert_model_from_fp8(model)
    chosen = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=chosen, module_filter_fn=lambda _, name: name in ours)
    model.compile(dynamic=False)


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "eager": lambda model: None,
    "compile": lambda model: model.compile(dynamic=False),
    "liger": liger,
    "optimize": tilesmith.optimize,
    "between": lambda model: tilesmith.optimize(model, compile="between"),
    "graphs": lambda model: tilesmith.optimize(model, graphs=True),
    "between+graphs": lambda model: tilesmith.optimize(model, compile="between", graphs=True),
    "optimize+compile": optimized_and_compiled,
    "fusion": fused,
    "fp8": in_fp8("delayed"),
    "fp8-rowwise": in_fp8("rowwise"),
    "torchao-fp8": torchao_fp8,
}
FP8 = ("fp8", "fp8-rowwise", "torchao-fp8")
COMPILED = ("compile", "liger", "optimize+compile", "torchao-fp8")  # which fail in ways that are not the library's


def built(family: Family) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The family's model, the same each time, and what makes its loss."""
    import transformers

    torch.manual_seed(0)
    images = family.model.endswith("ImageClassification")
    more = {"image_size": family.tokens} if images else {"use_cache": False}
    config = getattr(transformers, family.config)(**family.sizes, **more)
    with DEVICE:
        model = getattr(transformers, family.model)(config).to(torch.bfloat16).train()
    given = batch(family, config)
    return model, lambda model: model(**given).loss


def batch(family: Family, config: Any) -> dict[str, torch.Tensor]:
    """The arguments of the family's model, the same each time."""
    chance = torch.Generator(device=DEVICE).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=chance)

    if family.model.endswith("ImageClassification"):
        labels = torch.randint(config.num_labels, (family.batch,), device=DEVICE, generator=chance)
        return {"pixel_values": normal(family.batch, 3, family.tokens, family.tokens), "labels": labels}
    ids = torch.randint(config.vocab_size, (family.batch, family.tokens), device=DEVICE, generator=chance)
    if hasattr(config, "num_mel_bins"):  # two frames of a spectrogram become one position of the encoder
        frames = 2 * config.max_source_positions
        return {"input_features": normal(family.batch, config.num_mel_bins, frames), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def tiny(family: Family) -> Family:
    """The family at sizes for a CPU."""
    sizes = {name: TINY.get(name, size) for name, size in family.sizes.items()}
    if family.sizes.get("num_key_value_heads") == family.sizes.get("num_attention_heads", 0):  # latent attention
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return dataclasses.replace(family, batch=2, tokens=32, sizes=sizes)


def stepper(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A step that returns its loss and leaves no gradients."""
    scaled = hasattr(model, "fp8_report")

    def step() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        for p in model.parameters():
            p.grad = None
        if scaled:  # as the step of an optimizer does; without it the delayed recipe would never know its scales
            refresh_fp8(model)
            roll(model)
        return loss.detach()

    return step


def kernels_of(step: Callable[[], object]) -> tuple[float, int, dict[str, float]]:
    """The device's time of a step in ms, its kernels, and the 25 that take the most, in µs."""
    kernels = profiled(step)
    us = spent(kernels)
    return us.total() / 1e3, len(kernels), {name: round(most, 1) for name, most in us.most_common(25)}


def on_device(step: Callable[[], object], held: int, by_kernel: bool) -> dict[str, Any]:
    """Of a step on a GPU: the most bytes above the `held` ones, the device's time and kernels. Of others nothing."""
    if DEVICE.type != "cuda":
        return {}
    torch.cuda.synchronize()
    peak = torch.cuda.memory_allocated() - held + peak_memory(step, DEVICE)
    device, launches, most = kernels_of(step)
    told = {"peak_gb": round(peak / 1e9, 2), "device_ms": round(device, 2), "kernels": launches}
    return told | ({"most": most} if by_kernel else {})


def refused(name: str, problem: Exception) -> bool:
    """Whether a variant's failure is its row: a peer's, or a family's that has no layer to convert or to pack."""
    return name in COMPILED or (name in (*FP8, "fusion") and isinstance(problem, ValueError))


def compare(family: Family, chosen: list[str], rounds: int, by_kernel: bool) -> dict[str, dict[str, Any]]:
    """A row for each variant."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    for name in chosen:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        try:
            model, loss_of = built(family)
            start = time.perf_counter()
            VARIANTS[name](model)
            step = stepper(model, loss_of)
            loss = step()
            dtype, loss = loss.dtype, loss.item()
            first = time.perf_counter() - start
            warm = [step() for _ in range(3)][-1].item()
        except Exception as problem:  # a peer may fail in any way: that is its row
            if not refused(name, problem):
                raise
            rows[name] = {"error": f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"}
            continue
        rows[name] = {"loss": loss, "warm_loss": warm, "loss_in_bf16": dtype == torch.bfloat16}
        rows[name]["first_call_s"] = round(first, 2)
        rows[name] |= on_device(step, before, by_kernel)
        steps[name] = step
    for name, timing in timed(steps, rounds).items():
        said = rows[name]
        said |= {"ms": round(timing.median_us / 1e3, 2), "spread": round(timing.spread, 4)}
        device = f"device {said['device_ms']:8.2f} ms, {said['peak_gb']:6.2f} GB, " if "device_ms" in said else ""
        say(f"  {name:<17} {said['ms']:8.2f} ms, {device}first call {said['first_call_s']:.1f} s, "
            f"loss {said['loss']:.4f}")  # fmt: skip
    return rows


def timed(steps: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, Timing]:
    """Wall time of each step, in rounds in which they take turns."""
    if DEVICE.type != "cuda":
        return measure(steps, DEVICE, rounds=rounds, budget_ms=1.0)
    return interleave(rounds, {name: (lambda step=step: wall_time(step, DEVICE, 2)) for name, step in steps.items()})


def signed(rows: dict[str, dict[str, Any]], run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows with the command and the date of the run that made them, where they do not say their own."""
    return {name: {**row, **{key: row.get(key, run[key]) for key in RUN if key in run}} for name, row in rows.items()}


def strays(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Variants whose loss is not that of the first variant in bf16, or of the first where all are in 8 bits."""
    ran = {name: row for name, row in rows.items() if "loss" in row}
    if not ran:
        return []
    first = next((name for name in ran if name not in FP8), next(iter(ran)))
    wanted, found = ran[first]["loss"], []
    for name, row in ran.items():
        apart = FP8_LOSS if name in FP8 else BF16_STEP if row["loss_in_bf16"] else BF16_LOSS
        most = apart * abs(wanted)
        if not all(abs(row[which] - wanted) <= most for which in ("loss", "warm_loss")):  # nor where one is NaN
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"all where none is named: {', '.join(FAMILIES)}")
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_intermixed_args(namespace=OPTIONS)
    if DEVICE.type == "cpu" and not given.tiny:
        parser.error("this needs a GPU; --tiny runs sizes for a CPU")
    unknown = sorted(set(given.families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    chosen = given.variant or [name for name in VARIANTS if name not in ("liger", *FP8)]
    if "liger" in chosen and len(chosen) > 1:
        parser.error("--variant liger needs a process of its own: it replaces functions of transformers' modules")
    held = load(given.results)
    before = {name: signed(rows, held) for name, rows in held.get("rows", {}).items()}
    run, right = provenance(), True
    document = {"subject": tables.STEPS, **run, "rows": before}
    for name in given.families or FAMILIES:
        say(name)
        family = tiny(FAMILIES[name]) if given.tiny else FAMILIES[name]
        found = compare(family, chosen, given.rounds, given.kernels)
        for stray in strays(found):
            say(f"  {stray}: its loss is not that of the first")
            right = False
        before.setdefault(name, {}).update(signed(found, run))
        save(given.results, document)
        torch._dynamo.reset()
    if not right:
        say("a variant's loss is not that of the first: see the results")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
