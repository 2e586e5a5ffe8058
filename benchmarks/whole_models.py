"""Fusion of blocks and the hardware layer on one GPU: values first, then launches, times, predicted and measured peaks.

    python benchmarks/whole_models.py results.json [--short] [--part NAME ...] [--only "mlp 4096" ...]

Exits with 1, and measures nothing, where a fused block's values are wrong. --short: one block, three models. --only:
these blocks and models. The file is written after each row; rows that are not measured again stay in it.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, load, provenance, save, say
from torch import nn

import tilesmith
from tilesmith.attention.fusion import FusionConfig, OptimizationLevel, create_unified_attention_fusion
from tilesmith.engine.timing import interleave, launches, measure, peak_memory, wall_time
from tilesmith.hardware import HardwareAbstractionLayer
from tilesmith.models.sizing.sample_inputs import loss_of, sample_of
from tilesmith.nn import Decoder, DecoderConfig
from tilesmith.validate.budget import compare

STEPS = 20  # of training at the chosen batch, in which memory must not run out


def encoder(tokens: int, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """torch's encoder layer as in BERT-large, and its input."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, "gelu", batch_first=True)
    return layer, (torch.randn(batch, tokens, 1024),)


def llama(tokens: int, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """One layer of a Llama of 8 B, with its rotary module, and hidden states."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    config._attn_implementation = "sdpa"

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rotary_emb = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            out = self.layer(x, position_embeddings=self.rotary_emb(x, positions))
            return out[0] if isinstance(out, tuple) else out

    return Block(), (torch.randn(batch, tokens, 4096),)


BLOCKS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "encoder 32x512": (encoder, 512, 32),
    "encoder 1x128": (encoder, 128, 1),
    "llama 1x8192": (llama, 8192, 1),
    "llama 1x512": (llama, 512, 1),
    "llama 1x16": (llama, 16, 1),
}


def fused(model: nn.Module, level: OptimizationLevel) -> nn.Module:
    """A fused copy; the level below where the model has nothing for this one."""
    model = copy.deepcopy(model)
    try:
        return create_unified_attention_fusion(model, config=FusionConfig(optimization_level=level))
    except ValueError:
        return create_unified_attention_fusion(model)


def values() -> list[str]:
    """What is wrong with fused blocks beside the same blocks in fp64, outputs and gradients."""
    wrong = []
    for name, make, tokens in (("encoder", encoder, 96), ("llama", llama, 64)):
        torch.manual_seed(0)
        block, inputs = make(tokens, 2)
        block = block.to(DEVICE).eval()  # without dropout, whose random numbers differ
        inputs = tuple(x.to(DEVICE) for x in inputs)
        results = {}
        for kind, dtype in (("exact", torch.float64), ("plain", torch.bfloat16), ("fused", torch.bfloat16)):
            model = copy.deepcopy(block).to(dtype)
            model = fused(model, OptimizationLevel.AGGRESSIVE) if kind == "fused" else model
            x = inputs[0].to(torch.bfloat16).to(dtype).requires_grad_()
            out = model(x)
            out.backward(torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(dtype))
            results[kind] = {"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}
        for part, got in results["fused"].items():
            budget = compare(got, results["plain"][part], results["exact"][part])
            if not budget.passed:
                wrong.append(f"{name} {part}: {budget}")
    return wrong


def step(model: nn.Module, inputs: tuple[Any, ...], backward: bool) -> Callable[[], None]:
    """One run of a block."""

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = model(*inputs)
            if backward:
                out.sum().backward()
        for parameter in model.parameters() if backward else ():
            parameter.grad = None

    return run


def wall(variants: dict[str, Callable[[], None]], rounds: int = 7, calls: int = 10) -> dict[str, Any]:
    """Milliseconds of a call from the host's first launch to the device's last."""
    found = interleave(rounds, {name: (lambda fn=fn: wall_time(fn, DEVICE, calls)) for name, fn in variants.items()})
    return {name: {"ms": t.median_us / 1e3, "spread": t.spread} for name, t in found.items()}


def blocks(names: list[str]) -> Iterator[dict[str, Any]]:
    """Launches, device time, wall time and peak of each block: eager, compiled, fused."""
    for name in names:
        make, tokens, batch = BLOCKS[name]
        torch.manual_seed(0)
        torch._dynamo.reset()
        block, inputs = make(tokens, batch)
        block, inputs = block.to(DEVICE, torch.bfloat16), tuple(x.to(DEVICE, torch.bfloat16) for x in inputs)
        models = {
            "eager": block,
            "compile": torch.compile(copy.deepcopy(block)),
            "balanced": fused(block, OptimizationLevel.BALANCED),
            "aggressive": fused(block, OptimizationLevel.AGGRESSIVE),
        }
        for backward in (False, True):
            variants = {kind: step(model, inputs, backward) for kind, model in models.items()}
            for fn in variants.values():
                for _ in range(3):
                    fn()
            row: dict[str, Any] = {"block": name, "backward": backward}
            row["launches"] = {kind: launches(fn, DEVICE) for kind, fn in variants.items()}
            row["peak_bytes"] = {kind: peak_memory(fn, DEVICE) for kind, fn in variants.items()}
            timings = measure(variants, DEVICE, rounds=7)
            row["device"] = {k: {"ms": t.median_us / 1e3, "spread": t.spread} for k, t in timings.items()}
            row["wall"] = wall(variants)
            yield row


def transformers_model(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers in bf16 on the device."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        head = {"Bert": "BertForMaskedLM", "ViT": "ViTForImageClassification", "GPT2": "GPT2LMHeadModel"}
        model = getattr(transformers, head.get(kind, f"{kind}ForCausalLM"))._from_config(config, dtype=torch.bfloat16)
        return model.to(DEVICE)

    return make


def _decoder() -> nn.Module:
    config = DecoderConfig(32000, 1024, 2816, 12, 16, num_kv_heads=8, max_positions=4096)
    return Decoder(config, device=DEVICE, dtype=torch.bfloat16)


SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
GROUPED = {**SMALL, "num_key_value_heads": 8, "vocab_size": 32000}
BERT = {**SMALL, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 30522}
LLAMA = transformers_model("Llama", **GROUPED)
# name -> (model, tokens, batch)
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "llama 0.2B 8x1024": (LLAMA, 1024, 8),
    "llama 0.2B optimised 8x1024": (lambda: tilesmith.optimize(LLAMA()), 1024, 8),
    "bert-large 32x512": (transformers_model("Bert", **BERT), 512, 32),
    "llama 0.2B 32x512": (LLAMA, 512, 32),
    "llama 0.2B optimised 32x512": (lambda: tilesmith.optimize(LLAMA()), 512, 32),
    "llama 0.2B fused 2x2048": (
        lambda: create_unified_attention_fusion(LLAMA(), optimization_level=OptimizationLevel.AGGRESSIVE), 2048, 2),
    "qwen3 16x512": (transformers_model("Qwen3", **GROUPED, head_dim=64), 512, 16),
    "bert-large optimised 32x512": (lambda: tilesmith.optimize(transformers_model("Bert", **BERT)()), 512, 32),
    "gpt2-medium 8x1024": (transformers_model("GPT2", n_embd=1024, n_layer=24, n_head=16), 1024, 8),
    "vit-large 32": (transformers_model("ViT", **{k: v for k, v in BERT.items() if k != "vocab_size"}), 196, 32),
    "decoder 8x1024": (_decoder, 1024, 8),
    "encoder stack 32x512": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 8).to(
            DEVICE, torch.bfloat16), 512, 32),
    "mlp 4096": (
        lambda: nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).to(DEVICE, torch.bfloat16),
        1, 4096),
}  # fmt: skip


def predictions(names: list[str]) -> Iterator[dict[str, Any]]:
    """The predicted peak of a training step with AdamW beside what the allocator saw, beyond what was there before the
    model was: blocks whose values were compared lie in circles of references until these are collected."""
    for name in names:
        make, tokens, batch = MODELS[name]
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # the estimate has them
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = make().train()
        hal = HardwareAbstractionLayer([DEVICE])
        start = time.perf_counter()
        estimate = hal.memory_estimate(model, batch, sequence_length=tokens)
        seconds = time.perf_counter() - start
        optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
        given = sample_of(model, tokens=tokens)
        args, kwargs = given.batched(batch)
        for i in range(4):
            if i == 3:
                torch.cuda.reset_peak_memory_stats()
            loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - before
        yield {
            "model": name, "predicted": estimate.total, "measured": measured, "seconds": round(seconds, 2),
            "error": estimate.total / measured - 1.0, "probes": estimate.probes, "estimate": str(estimate),
        }  # fmt: skip
        del model, optimizer, args, kwargs


def batches(names: list[str]) -> Iterator[dict[str, Any]]:
    """The chosen batch beside all powers of two up to what fits."""
    for name in names:
        make, tokens, _ = MODELS[name]
        torch.cuda.empty_cache()
        model = make().train()
        hal = HardwareAbstractionLayer([DEVICE])
        start = time.perf_counter()
        chosen = hal.get_optimal_batch_size(model, sequence_length=tokens, max_batch_size=256)
        seconds = time.perf_counter() - start
        probes = next(iter(hal._probes[model].values()))
        optimizer, given = torch.optim.AdamW(model.parameters(), 1e-6), sample_of(model, tokens=tokens)

        def rate(batch: int, steps: int, model=model, optimizer=optimizer, given=given) -> float:
            args, kwargs = given.batched(batch)

            def once() -> None:
                loss_of(model(*args, **kwargs)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            times = [wall_time(once, DEVICE) / 1e6 for _ in range(steps)]
            return batch / statistics.median(times[1:])

        row: dict[str, Any] = {"model": name, "chosen": chosen, "probes": len(probes), "seconds": round(seconds, 2)}
        try:
            row["chosen_rate"] = rate(chosen, STEPS)
        except torch.OutOfMemoryError:
            row["chosen_rate"] = 0.0
        sweep = {}
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            try:
                sweep[batch] = rate(batch, 4)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
        yield row | {"sweep": sweep, "share_of_best": row["chosen_rate"] / max(sweep.values())}
        del model, optimizer


SIZED = ("llama 0.2B optimised 8x1024", "bert-large 32x512", "mlp 4096")  # models of `batches`
# name -> (function, what it can measure, how many of those with --short)
PARTS: dict[str, tuple[Callable[[list[str]], Iterator[dict[str, Any]]], Iterable[str], int]] = {
    "predictions": (predictions, MODELS, 3), "blocks": (blocks, BLOCKS, 1), "batches": (batches, SIZED, 1),
}  # fmt: skip


def what(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is of."""
    return row.get("model"), row.get("block"), row.get("backward")


def main() -> int:
    """Write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--part", action="append", choices=PARTS, help="all where none is named")
    parser.add_argument("--only", action="append", choices=[*MODELS, *BLOCKS], help="a model or block")
    given = parser.parse_args()
    wrong = values()
    if wrong:
        say("\n".join(wrong))
        return 1
    document = load(given.out) | provenance()
    for part in given.part or PARTS:
        measured, names, few = PARTS[part]
        names = [name for name in names if not given.only or name in given.only][: few if given.short else None]
        for row in measured(names):
            say(json.dumps(row))
            document[part] = [old for old in document.get(part, []) if what(old) != what(row)] + [row]
            save(given.out, document)
    if "predictions" in document:
        errors = sorted(abs(row["error"]) for row in document["predictions"])
        say(f"peak: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
