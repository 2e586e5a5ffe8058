"""Training steps of model families at real widths and few layers, on one GPU: time, memory, first call, kernels.

    python benchmarks/model_steps.py results.json [FAMILY ...] [--variant NAME ...] [--rounds 5] [--kernels]

A step is the forward with its loss and the backward; bf16, each library's own attention setting. Variants of a family
take turns in one process. Liger replaces functions of transformers' modules, so `--variant liger` runs in a process of
its own, with nothing beside it. Rows are kept beside those that the file holds. --kernels: where the device's time of a
step goes, by kernel. Exits with 1 where a variant's loss is not that of the first. Needs transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host_bound import DEVICE, provenance, say, wall
from torch import nn

import tilesmith
from tilesmith.engine.timing import interleave

LLAMA_1_5B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
}  # fmt: skip
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers: its config and class, sequences and tokens of a batch (of images: pixels of a side)."""

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
         "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "vocab_size": 129280},
    ),
    "gpt2-medium": Family(
        "GPT2Config", "GPT2LMHeadModel", 8, 1024, {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}
    ),
    "bert-large": Family("BertConfig", "BertForMaskedLM", 32, 512, LARGE),
    "vit-large": Family("ViTConfig", "ViTForImageClassification", 64, 224, {**LARGE, "num_labels": 1000}),
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


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "eager": lambda model: None,
    "compile": lambda model: model.compile(dynamic=False),
    "liger": liger,
    "optimize": tilesmith.optimize,
    "between": lambda model: tilesmith.optimize(model, compile="between"),
    "graphs": lambda model: tilesmith.optimize(model, graphs=True),
    "between+graphs": lambda model: tilesmith.optimize(model, compile="between", graphs=True),
    "optimize+compile": optimized_and_compiled,
}


def built(family: Family) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The family's model, the same each time, and what makes its loss."""
    import transformers

    torch.manual_seed(0)
    images = family.model.endswith("ImageClassification")
    more = {} if images else {"use_cache": False}
    config = getattr(transformers, family.config)(**family.sizes, **more)
    with DEVICE:
        model = getattr(transformers, family.model)(config).to(torch.bfloat16).train()
    chance = torch.Generator(device=DEVICE).manual_seed(7)
    if images:
        side = family.tokens
        given = {
            "pixel_values": torch.randn(
                family.batch, 3, side, side, device=DEVICE, dtype=torch.bfloat16, generator=chance
            ),
            "labels": torch.randint(config.num_labels, (family.batch,), device=DEVICE, generator=chance),
        }
    else:
        shape = family.batch, family.tokens
        ids = torch.randint(config.vocab_size, shape, device=DEVICE, generator=chance)
        given = {"input_ids": ids, "labels": ids}
    return model, lambda model: model(**given).loss


def stepper(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A step that returns its loss and leaves no gradients."""

    def step() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        for p in model.parameters():
            p.grad = None
        return loss.detach()

    return step


def kernels_of(step: Callable[[], object]) -> tuple[float, int, dict[str, float]]:
    """The device's time of a step in ms, its kernels, and the 25 that take the most, in µs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    events = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for event in events:
        spent[event.name[:90]] += event.device_time
    return sum(spent.values()) / 1e3, len(events), {name: round(us, 1) for name, us in spent.most_common(25)}


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
            loss = step().item()
            first = time.perf_counter() - start
            for _ in range(3):
                step()
        except Exception as problem:  # a peer may fail in any way: that is its row
            if name not in ("compile", "liger", "optimize+compile"):
                raise
            rows[name] = {"error": f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"}
            continue
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        device, launches, most = kernels_of(step)
        rows[name] = {
            "loss": loss, "first_call_s": round(first, 2), "peak_gb": round(peak / 1e9, 2),
            "device_ms": round(device, 2), "kernels": launches, **({"most": most} if by_kernel else {}),
        }  # fmt: skip
        steps[name] = step
    for name, timing in interleave(rounds, {name: wall(step, 2) for name, step in steps.items()}).items():
        rows[name] |= {"ms": round(timing.median_us / 1e3, 2), "spread": round(timing.spread, 4)}
        said = rows[name]
        say(f"  {name:<17} {said['ms']:8.2f} ms, device {said['device_ms']:8.2f} ms, {said['peak_gb']:6.2f} GB, "
            f"first call {said['first_call_s']:.1f} s, loss {said['loss']:.4f}")  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"all where none is named: {', '.join(FAMILIES)}")
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    unknown = sorted(set(given.families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    chosen = given.variant or [name for name in VARIANTS if name != "liger"]
    if "liger" in chosen and len(chosen) > 1:
        parser.error("--variant liger needs a process of its own: it replaces functions of transformers' modules")
    held = json.loads(given.results.read_text(encoding="utf-8")) if given.results.exists() else {}
    document, right = {**provenance(), "rows": held.get("rows", {})}, True
    for name in given.families or FAMILIES:
        say(name)
        rows = compare(FAMILIES[name], chosen, given.rounds, given.kernels)
        losses = [row["loss"] for row in rows.values() if "loss" in row]
        right &= all(abs(loss - losses[0]) <= 5e-3 * abs(losses[0]) for loss in losses)
        document["rows"].setdefault(name, {}).update(rows)
        given.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        torch._dynamo.reset()
    if not right:
        say("a variant's loss is not that of the first: see the results")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
