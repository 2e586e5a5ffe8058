"""Steps that wait for the host, on one GPU: LoRA on few tokens, blocks with many small kernels.

    python benchmarks/host_bound.py results.json [--part train] [--part blocks] [--variant NAME ...] [--short]

Without --part all of them, without --variant all of a part's. Wall time is a median of rounds in which variants take
turns; device time is the sum of the kernels that a profiler saw in one step. Exits with 1 where a variant's loss is not
that of the first. --short: one case of each part, few rounds. Needs transformers, and peft for training.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilesmith
from tilesmith.engine.timing import interleave

DEVICE = torch.device("cuda")
STEPS = 5  # in each round
SIZES = {
    "llama 1.5 B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "llama 8 B, 8 layers": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8},
}
BATCHES = ((1, 512), (4, 512), (8, 256))
CHOSEN: list[str] = []  # variants to measure; all where it is empty


def between(model: nn.Module) -> None:
    tilesmith.optimize(model, compile="between")


def recorded(model: nn.Module) -> None:
    tilesmith.optimize(model, graphs=True)


def both(model: nn.Module) -> None:
    tilesmith.optimize(model, compile="between", graphs=True)


def compiled(model: nn.Module) -> None:
    model.compile(dynamic=False)


def optimized_and_compiled(model: nn.Module) -> None:
    tilesmith.optimize(model)
    compiled(model)


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "eager": lambda model: None,
    "compile": compiled,
    "optimize": tilesmith.optimize,
    "between": between,
    "graphs": recorded,
    "between+graphs": both,
}
BLOCKS = {name: VARIANTS[name] for name in ("eager", "compile", "optimize", "between")} | {
    "optimize+compile": optimized_and_compiled
}


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def provenance() -> dict[str, Any]:
    """Where, when and by which command results were made."""
    import transformers

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }


def llama(sizes: dict[str, int]) -> nn.Module:
    """A Llama in bf16 on the GPU, the same for the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **sizes, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192
    )
    torch.manual_seed(0)
    with DEVICE:
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with LoRA of rank 16 on all linear layers of its blocks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))


def wide(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with small kernels between large ones, and its batch."""
    import transformers

    torch.manual_seed(0)
    if name == "bert-large 32x512":
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        config, cls, shape = transformers.BertConfig(**sizes), transformers.BertForMaskedLM, (32, 512)
    elif name == "qwen3-moe 4 layers 1x4096":
        config = transformers.Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, vocab_size=151936, use_cache=False,
        )  # fmt: skip
        cls, shape = transformers.Qwen3MoeForCausalLM, (1, 4096)
    else:
        config = transformers.GptOssConfig(num_hidden_layers=4, use_cache=False)
        cls, shape = transformers.GptOssForCausalLM, (1, 4096)
    for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    with DEVICE:
        model = cls._from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(1000, shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    return model.train(), {"input_ids": ids, "labels": ids}


def stepper(model: nn.Module, inputs: dict[str, torch.Tensor], adamw: bool) -> Callable[[], torch.Tensor]:
    """A training step that returns its loss."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-5, fused=True) if adamw else None

    def step() -> torch.Tensor:
        loss = model(**inputs).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        for p in trained:
            p.grad = None
        return loss.detach()

    return step


def device_ms(step: Callable[[], object]) -> tuple[float, int]:
    """What the kernels of a step take together, and how many there are."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in kernels) / 1e3, len(kernels)


def wall(step: Callable[[], object], steps: int) -> Callable[[], float]:
    """What takes the µs of one step, `steps` of them one after another."""

    def timed() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps * 1e6

    return timed


def compare(
    variants: dict[str, Callable[[nn.Module], object]], make: Callable[[], tuple], rounds: int, adamw: bool
) -> tuple[dict[str, Any], bool]:
    """A row for each variant of one case, and whether all losses are the eager one's."""
    steps, rows, right, wanted = {}, {}, True, None
    for name, change in variants.items():
        if CHOSEN and name not in CHOSEN:
            continue
        model, inputs = make()
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        try:
            change(model)
            step = stepper(model, inputs, adamw)
            first = step().item()
            seconds = time.perf_counter() - start
            for _ in range(4):
                step()
            torch.cuda.synchronize()
        except RuntimeError as problem:  # a peer may fail on a case, as torch.compile does on some experts
            say(f"  {name}: {str(problem).splitlines()[0][:200]}")
            rows[name] = {"failed": str(problem).splitlines()[0][:200]}
            continue
        ready = time.perf_counter() - start
        wanted = first if wanted is None else wanted
        right &= abs(first - wanted) <= 2e-2 * abs(wanted)
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        total, kernels = device_ms(step)
        notes = [s for note in getattr(_inner(model), "tilesmith_report", _None).notes for s in note.told()]
        rows[name] = {
            "loss": first,
            "first_call_s": seconds,
            "five_steps_s": ready,
            "device_ms": total,
            "kernels": kernels,
            "peak_above_weights_mib": (torch.cuda.max_memory_allocated() - held) / 2**20,
            "told": notes,
        }
        steps[name] = step
    timings = interleave(rounds, {name: wall(step, STEPS) for name, step in steps.items()})
    for name, timing in timings.items():
        rows[name]["wall"] = dataclasses.asdict(timing)
        median = timing.median_us / 1e3
        rows[name]["wall_over_device"] = median / rows[name]["device_ms"]
        say(f"  {name:<17} {median:8.2f} ms wall, {rows[name]['device_ms']:8.2f} ms device, first call "
            f"{rows[name]['first_call_s']:.1f} s")  # fmt: skip
    return rows, right


class _None:
    notes = ()


def _inner(model: nn.Module) -> nn.Module:
    return next((m for m in model.modules() if hasattr(m, "tilesmith_report")), model)


def train(short: bool) -> tuple[dict[str, Any], bool]:
    """LoRA steps on few tokens."""
    found, right = {}, True
    for name, sizes in list(SIZES.items())[: 1 if short else None]:
        for batch, tokens in BATCHES[: 1 if short else None]:
            ids = torch.randint(1000, (batch, tokens), generator=torch.Generator().manual_seed(2)).to(DEVICE)
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
            say(f"{name}, LoRA r16, {batch}x{tokens}")
            made = lambda sizes=sizes, inputs=inputs: (with_adapters(llama(sizes)).train(), inputs)  # noqa: E731
            rows, fine = compare(VARIANTS, made, 3 if short else 7, adamw=True)
            found[f"{name}, {batch}x{tokens}"], right = rows, right and fine
            torch._dynamo.reset()
    return found, right


def blocks(short: bool) -> tuple[dict[str, Any], bool]:
    """Full training of models with many small kernels."""
    found, right = {}, True
    for name in ("bert-large 32x512", "qwen3-moe 4 layers 1x4096", "gpt-oss 4 layers 1x4096")[: 1 if short else None]:
        say(name)
        rows, fine = compare(BLOCKS, lambda name=name: wide(name), 3 if short else 5, adamw=False)
        found[name], right = rows, right and fine
        torch._dynamo.reset()
    return found, right


PARTS = {"train": train, "blocks": blocks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    CHOSEN[:] = given.variant
    document, right = provenance(), True
    for name in given.part or PARTS:
        document[name], fine = PARTS[name](given.short)
        right &= fine
        given.results.write_text(json.dumps(document, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    if not right:
        say("a variant's loss is not the eager one: see the results")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
