"""Steps that wait for the host, on one GPU: LoRA on few tokens, blocks with many small kernels.

    python benchmarks/host_bound.py results.json [--part train] [--part blocks] [--variant NAME ...] [--case TEXT]
        [--rounds N] [--short] [--kernels] [--masked]

Without --part all of them, without --variant all of a part's. Wall time is a median of rounds in which variants take
turns; host time is what a step takes to return where nothing is queued before it. Device time is the sum of the kernels
that a profiler saw in one step. What lies between them is told apart: up to `GAP`, as between the kernels of one graph,
or longer, as where the device waits. Exits with 1 where a variant's loss is not that of the first. --short: one case of
each part, few rounds. --kernels: the kernels that take the most, with how often they ran. --masked: training with a
padding mask that pads nothing, as collators make it. Needs transformers, and peft for training.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, named, profiled, provenance, save, say, spent
from torch import nn

import tilesmith
from tilesmith.engine.timing import interleave, wall_time

STEPS = 5  # in each round
SIZES = {
    "llama 1.5 B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "llama 8 B, 8 layers": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8},
}
BATCHES = ((1, 512), (4, 512), (8, 256))
OPTIONS = argparse.Namespace()  # what the command line asked for
GAP = 4.0  # µs


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
    # As transformers' Trainer makes it by default (adamw_torch_fused).
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


def on_device(step: Callable[[], object], names: int = 0) -> dict[str, Any]:
    """What the kernels of a step take together, how many there are, and what lies between them; the `names` of them
    that take the most, with their µs and how often they ran."""
    kernels = profiled(step)
    gaps = [max(0, b.time_range.start - a.time_range.end) for a, b in pairwise(kernels)]
    found = {
        "device_ms": sum(e.device_time for e in kernels) / 1e3,
        "kernels": len(kernels),
        "short_gaps_ms": sum(gap for gap in gaps if gap <= GAP) / 1e3,
        "long_gaps_ms": sum(gap for gap in gaps if gap > GAP) / 1e3,
    }
    if names:
        often = Counter(map(named, kernels))
        found["most"] = {name: [round(us, 1), often[name]] for name, us in spent(kernels).most_common(names)}
    return found


def host(step: Callable[[], object], steps: int) -> float:
    """The least ms that a step took until it returned, with nothing queued before it."""
    least = float("inf")
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        least = min(least, time.perf_counter() - start)
    torch.cuda.synchronize()
    return least * 1e3


def compare(
    variants: dict[str, Callable[[nn.Module], object]], make: Callable[[], tuple], rounds: int, adamw: bool
) -> tuple[dict[str, Any], bool]:
    """A row for each variant of one case, and whether all losses are the eager one's."""
    steps, rows, right, wanted = {}, {}, True, None
    for name, change in variants.items():
        if OPTIONS.variant and name not in OPTIONS.variant:
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
        notes = [s for note in getattr(_inner(model), "tilesmith_report", _None).notes for s in note.told()]
        rows[name] = {
            "loss": first,
            "first_call_s": seconds,
            "five_steps_s": ready,
            **on_device(step, 40 if OPTIONS.kernels else 0),
            "host_ms": host(step, 2 * STEPS),
            "peak_above_weights_mib": (torch.cuda.max_memory_allocated() - held) / 2**20,
            "told": notes,
        }
        steps[name] = step
    timed = {name: (lambda step=step: wall_time(step, DEVICE, STEPS)) for name, step in steps.items()}
    timings = interleave(rounds, timed)
    for name, timing in timings.items():
        rows[name]["wall"] = dataclasses.asdict(timing)
        median = timing.median_us / 1e3
        rows[name]["wall_over_device"] = median / rows[name]["device_ms"]
        row = rows[name]
        say(f"  {name:<17} {median:8.2f} ms wall, {row['host_ms']:8.2f} host, {row['device_ms']:8.2f} device, "
            f"{row['kernels']} kernels, between them {row['short_gaps_ms']:.2f} and {row['long_gaps_ms']:.2f}, "
            f"first call {row['first_call_s']:.1f} s")  # fmt: skip
    return rows, right


class _None:
    notes = ()


def _inner(model: nn.Module) -> nn.Module:
    return next((m for m in model.modules() if hasattr(m, "tilesmith_report")), model)


def train() -> tuple[dict[str, Any], bool]:
    """LoRA steps on few tokens."""
    found, right = {}, True
    cases = [(name, shape) for name in SIZES for shape in BATCHES if OPTIONS.case in f"{name}, {shape[0]}x{shape[1]}"]
    for name, (batch, tokens) in cases[: 1 if OPTIONS.short else None]:
        ids = torch.randint(1000, (batch, tokens), generator=torch.Generator().manual_seed(2)).to(DEVICE)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        if OPTIONS.masked:
            inputs["attention_mask"] = torch.ones_like(ids)
        say(f"{name}, LoRA r16, {batch}x{tokens}")
        made = lambda name=name, inputs=inputs: (with_adapters(llama(SIZES[name])).train(), inputs)  # noqa: E731
        rows, fine = compare(VARIANTS, made, OPTIONS.rounds or (3 if OPTIONS.short else 7), adamw=True)
        found[f"{name}, {batch}x{tokens}"], right = rows, right and fine
        torch._dynamo.reset()
    return found, right


def blocks() -> tuple[dict[str, Any], bool]:
    """Full training of models with many small kernels."""
    found, right = {}, True
    names = ("bert-large 32x512", "qwen3-moe 4 layers 1x4096", "gpt-oss 4 layers 1x4096")
    for name in [name for name in names if OPTIONS.case in name][: 1 if OPTIONS.short else None]:
        say(name)
        rounds = OPTIONS.rounds or (3 if OPTIONS.short else 5)
        rows, fine = compare(BLOCKS, lambda name=name: wide(name), rounds, adamw=False)
        found[name], right = rows, right and fine
        torch._dynamo.reset()
    return found, right


PARTS = {"train": train, "blocks": blocks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--variant", action="append", default=[], choices=sorted({*VARIANTS, *BLOCKS}))
    parser.add_argument("--case", default="", help="measure the cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--masked", action="store_true")
    given = parser.parse_args(namespace=OPTIONS)
    document, right = provenance(), True
    for name in given.part or PARTS:
        document[name], fine = PARTS[name]()
        right &= fine
        save(given.results, document)
        gc.collect()
        torch.cuda.empty_cache()
    if not right:
        say("a variant's loss is not the eager one: see the results")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
