"""A LoRA step of an 8B-shaped Llama on one long sequence and one GPU, by `tilesmith.fit_sequence`.

    python benchmarks/long_step.py results.json --tokens 393216 [--layers 32] [--keep auto ...] [--tiny]

The model has Llama-3-8B's sizes and random weights in bf16, made on the GPU, with PEFT's LoRA of rank 16 on all linear
layers, its adapters in bf16, too. After `optimize` and `fit_sequence` a step of 4,096 tokens compiles kernels, then one
forward and backward over random tokens is timed. A row has seconds, tokens a second, the peak that the allocator saw
beside the predicted one, host memory, and the share of the GPU's time that attention's kernels take (their sum over
that of all kernels; --no-profile leaves it out). With several --keep the rows also have the largest difference of the
adapters' gradients from those of the first, over their largest magnitude.

With --layers N < 32 the step is cheap, and the row has the plan of 32 layers besides: the peak is that of one layer's
backward plus what all layers keep, so a prediction that holds for few layers holds for 32. --tiny: sizes for a CPU.
PYTORCH_ALLOC_CONF=expandable_segments:True keeps what is reserved close to what is allocated. Needs transformers and
peft.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, load, profiled, provenance, save, say, spent
from torch import Tensor, nn

import tilesmith
from tilesmith.engine.timing import wall_time

LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
WHOLE = 32  # layers of the model whose sizes these are
RANK = 16
WARM = 4096


def lora_model(sizes: dict[str, int], layers: int, tokens: int) -> nn.Module:
    """The model with its adapters, which are not zero, so that all gradients are there."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, max_position_embeddings=tokens, rope_theta=5e5, use_cache=False
    )
    torch.manual_seed(0)
    with DEVICE:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
    return model


def step(model: nn.Module, tokens: int, vocabulary: int) -> float:
    """A forward and backward; returns the loss."""
    chance = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randint(vocabulary, (1, tokens), device=DEVICE, generator=chance)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def attention_share(run: Callable[[], object]) -> float:
    """Runs it once, under the profiler; returns attention's share of the time of all kernels."""
    us = spent(kernel for kernel in profiled(run, warm=0) if not kernel.name.startswith(("Memcpy", "Memset")))
    for name, most in us.most_common(12):
        say(f"    {most / 1e6:9.3f} s  {name}")
    return sum(some for name, some in us.items() if "attention_" in name) / max(1.0, us.total())


def whole_plan(plan: Any, model: nn.Module, keep: str) -> dict[str, Any]:
    """What the same step takes with all layers."""
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.0"))
    each = sum(p.nbytes * (1 + p.requires_grad) for p in layer.parameters())
    costs = plan.costs
    resident = costs.fixed + (WHOLE - costs.layers) * each
    costs = dataclasses.replace(costs, layers=WHOLE, fixed=resident)
    keeps = costs.choose(plan.tokens, keep)
    if keeps is None:
        return {"fits": False, "longest": costs.longest(keep)}
    return {
        "fits": True, "predicted_peak": costs.peak(plan.tokens, keeps), "host": costs.on_host(plan.tokens, keeps),
        "keeps": [str(k) for k in keeps], "longest": costs.longest(keep),
    }  # fmt: skip


def measure(model: nn.Module, given: argparse.Namespace, keep: str, first: dict[str, Tensor]) -> dict[str, Any]:
    """The row of one way to keep inputs. first: the gradients of the first one, which fills it."""
    sizes = TINY if given.tiny else LARGE
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    began = time.perf_counter()
    plan = tilesmith.fit_sequence(
        model, given.tokens, keep=keep, host_memory_gb=given.host_gb, tile_tokens=given.tile_tokens
    )
    planned = time.perf_counter() - began
    say(f"{keep}: planned in {planned:.1f} s\n{plan}")
    step(model, min(given.tokens, WARM), sizes["vocab_size"])
    model.zero_grad(set_to_none=True)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {
        "tokens": given.tokens, "layers": given.layers, "keeps": list(plan.keeps), "tile_tokens": plan.tile_tokens,
        "predicted_peak": plan.peak, "host_bytes": plan.host, "pin_seconds": round(plan.pin_seconds, 2),
        "plan_seconds": round(planned, 2), "longest_predicted": plan.longest, "parts": plan.parts,
    }  # fmt: skip

    def once() -> None:
        row["loss"] = step(model, given.tokens, sizes["vocab_size"])

    def timed() -> None:
        row["seconds"] = round(wall_time(once, DEVICE) / 1e6, 3)

    if given.no_profile or DEVICE.type == "cpu":
        timed()
    else:
        row["attention_share"] = round(attention_share(timed), 4)
    row["tokens_per_second"] = round(given.tokens / row["seconds"], 1)
    if DEVICE.type == "cuda":
        row["peak"] = torch.cuda.max_memory_allocated()
        row["reserved"] = torch.cuda.max_memory_reserved()
        row["predicted_over_peak"] = round(plan.peak / row["peak"], 4)
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    row["gradients"] = len(found)
    if first:
        off = [(g - first[name], first[name]) for name, g in found.items()]
        row["off_by"] = max((d.abs().max() / g.abs().max().clamp(1e-30)).item() for d, g in off)
        row["off_by_rms"] = max((d.norm() / g.norm().clamp(1e-30)).item() for d, g in off)
    else:
        first.update(found)
    if given.layers != WHOLE:
        row["whole"] = whole_plan(plan, model, keep)
    model.zero_grad(set_to_none=True)
    plan.undo()
    say(json.dumps({k: v for k, v in row.items() if k not in ("keeps", "parts")}))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--layers", type=int, default=WHOLE)
    parser.add_argument("--keep", nargs="+", default=["auto"], choices=("auto", "device", "e4m3", "host"))
    parser.add_argument("--tile-tokens", type=int)
    parser.add_argument("--host-gb", type=float)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    began = time.perf_counter()
    model = lora_model(TINY if given.tiny else LARGE, given.layers, given.tokens)
    tilesmith.optimize(model)
    say(f"model of {given.layers} layers in {time.perf_counter() - began:.1f} s")
    document = {**provenance(), "rows": load(given.results).get("rows", {})}
    first: dict[str, Tensor] = {}
    for keep in given.keep:
        document["rows"][f"{given.layers}x{given.tokens}-{keep}"] = measure(model, given, keep, first)
        save(given.results, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
