"""`generate` of one token at a time, on one GPU: the same tokens as transformers' loop, and how many a second.

    python benchmarks/decode_loop.py results.json [--part values] [--part times] [--batch N ...] [--variant NAME ...]
        [--rounds N]

First small models in fp32 make tokens by recorded steps and by transformers' loop; exits with 1 where they differ.
Then a Llama of 1.5 B in bf16 with 2,048 tokens of context is timed, batch 1 and 8: the time between two numbers of new
tokens, a median of rounds in which variants take turns. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, named, profiled, provenance, save, say, spent
from host_bound import SIZES, llama
from torch import nn

import tilesmith
from tilesmith.engine.timing import interleave, wall_time

CONTEXT, NEW = 2048, 256
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 50, "temperature": 0.9, "top_p": 0.95},
    "processors": {"repetition_penalty": 1.3, "min_new_tokens": 10, "suppress_tokens": [5, 6]},
}


def small_models() -> dict[str, nn.Module]:
    """Models of a few families in fp32, with weights that make the likeliest token a clear one."""
    import transformers

    made = {}
    for name, config, more in (
        ("Llama", "LlamaConfig", {}),
        ("Qwen3", "Qwen3Config", {}),
        ("Gemma3", "Gemma3TextConfig", {"sliding_window": 32, "query_pre_attn_scalar": 64}),
    ):
        torch.manual_seed(0)
        sizes = getattr(transformers, config)(**SMALL, **more)
        model = getattr(transformers, f"{name}ForCausalLM")(sizes).to(DEVICE).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        made[name] = model
    return made


def tokens_of(model: nn.Module, rows: int, padded: bool, options: dict[str, Any], eos: Any = None) -> torch.Tensor:
    """48 tokens behind a prompt of 40, fewer where all rows end."""
    prompt = torch.randint(3, 1000, (rows, 40), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    mask = torch.ones_like(prompt)
    if padded:
        mask[1, :9] = 0
    torch.manual_seed(0)
    return model.generate(
        prompt, attention_mask=mask, max_new_tokens=48, pad_token_id=0, eos_token_id=eos, disable_compile=True,
        cache_implementation="static", **{"do_sample": False, **options},
    )  # fmt: skip


def values() -> tuple[dict[str, Any], bool]:
    """Whether tokens are those of transformers' loop over the same kernels, and of the model as it was."""
    found, told, right = {}, {}, True
    for family, plain in small_models().items():
        by_loop = tilesmith.optimize(copy.deepcopy(plain))
        ours = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
        for rows in (1, 3):
            padded = rows > 1 and family != "Gemma3"  # whose windows fill
            for name, options in CALLS.items():
                wanted = tokens_of(by_loop, rows, padded, options)
                case = f"{family}, {rows} rows{', padded' * padded}, {name}"
                found[case] = same = torch.equal(tokens_of(ours, rows, padded, options), wanted)
                right &= same
                if name == "processors":
                    continue
                ends = wanted[:, 55].tolist()
                wanted = tokens_of(by_loop, rows, padded, options, ends)
                found[f"{case}, ends"] = same = torch.equal(tokens_of(ours, rows, padded, options, ends), wanted)
                right &= same
        found[f"{family}, as before optimize"] = torch.equal(
            tokens_of(plain, 1, False, {}), tokens_of(ours, 1, False, {})
        )
        note = ours.tilesmith_report.notes[0]
        told[family] = note.told()
        right &= note.replays > 0
        say(f"  {family}: {told[family]}")
    say(f"  {len(found)} cases, other tokens in: {[name for name, same in found.items() if not same] or 'none'}")
    return {"same": found, "told": told}, right


def recorded(model: nn.Module) -> None:
    tilesmith.optimize(model, graphs=True)


VARIANTS: dict[str, tuple[Callable[[nn.Module], object], dict[str, Any], tuple[int, int]]] = {
    "graphs": (recorded, {}, (32, NEW)),
    "graphs, 16k slots": (recorded, {"max_cache_len": 16384}, (32, NEW)),
    "eager": (lambda model: None, {"disable_compile": True}, (4, 20)),
    "compile + graphs": (lambda model: None, {}, (32, NEW)),
}
"""What is done to the model, what `generate` is told, and the numbers of new tokens whose times are subtracted."""


def timed_calls(generated: Callable[[int], object], few: int, many: int) -> Callable[[], float]:
    """What takes the µs of a token."""

    def timed() -> float:
        return (wall_time(lambda: generated(many), DEVICE) - wall_time(lambda: generated(few), DEVICE)) / (many - few)

    return timed


def kernels(generated: Callable[[int], object]) -> list[dict[str, Any]]:
    """The kernels of a token by their time: those of 40 tokens less those of 8."""

    def counted(tokens: int) -> tuple[Counter[str], Counter[str]]:
        found = profiled(lambda: generated(tokens))
        return spent(found), Counter(named(kernel) for kernel in found)

    (few, n_few), (many, n_many) = counted(8), counted(40)
    rows = [
        {"kernel": name, "us": (many[name] - few[name]) / 32, "calls": (n_many[name] - n_few[name]) / 32}
        for name in many
        if n_many[name] > n_few[name]
    ]
    return sorted(rows, key=lambda row: -row["us"])


def speed(
    batch: int, chosen: list[str], rounds: int, ceiling: float, rows: dict[str, Any], keep: Callable[[], None]
) -> None:
    """Tokens a second and the share of the bandwidth that reading the weights takes, by variant, into `rows`. Each is
    timed alone as soon as it runs, and saved, since compiling takes long; then in turns."""
    prompt = torch.randint(1000, (batch, CONTEXT), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = torch.ones_like(prompt)
    runs, tokens = {}, {}

    def finish(timings: dict[str, Any], how: str) -> None:
        for name, timing in timings.items():
            row, first = rows[name], next(iter(tokens.values()))
            rate = row["weight_bytes"] / timing.median_us / 1e3
            row |= {
                "timed": how,
                "token_us": dataclasses.asdict(timing),
                "tokens_per_s": batch * 1e6 / timing.median_us,
                "weights_gb_per_s": rate,
                "of_read_bandwidth": rate / ceiling,
                "first_other_token": [
                    next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), min(len(x), len(y)))
                    for x, y in zip(tokens[name], first)
                ],
            }
            say(f"  batch {batch}, {name}, {how}: {row['tokens_per_s']:.1f} tokens/s, weights read at {rate:.0f} GB/s "
                f"({rate / ceiling:.0%}), first call {row['first_call_s']:.1f} s, a later one "
                f"{row['call_s']:.2f} s")  # fmt: skip
        keep()

    for name, (change, options, (few, many)) in VARIANTS.items():
        if chosen and name not in chosen:
            continue
        model = llama(SIZES["llama 1.5 B"]).eval()
        change(model)

        def generated(length: int, model: nn.Module = model, options: dict[str, Any] = options) -> torch.Tensor:
            return model.generate(
                prompt, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False,
                pad_token_id=0, eos_token_id=None, cache_implementation="static", **options,
            )  # fmt: skip

        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        tokens[name] = generated(many)[:, CONTEXT:].tolist()  # the longer one first: its cache serves both
        rows[name] = {"first_call_s": time.perf_counter() - start}
        start = time.perf_counter()
        generated(many)
        torch.cuda.synchronize()
        rows[name]["call_s"] = time.perf_counter() - start
        rows[name]["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        table = model.get_input_embeddings().weight  # of which a token reads one row
        rows[name]["weight_bytes"] = sum(p.nbytes for p in model.parameters() if p is not table)
        if change is recorded:
            rows[name]["told"] = model.tilesmith_report.notes[0].told()
        runs[name] = timed_calls(generated, few, many)
        finish(interleave(2, {name: runs[name]}), "alone")
        if change is recorded and not options:
            rows[name]["kernels"] = kernels(generated)
            rows[name]["kernels_us"] = sum(row["us"] for row in rows[name]["kernels"])
            keep()
    finish(interleave(rounds, runs), "in turns")


def read_bandwidth() -> float:
    """GB/s of reading 4 GiB."""
    x = torch.ones(2**31, dtype=torch.bfloat16, device=DEVICE)
    timing = interleave(5, {"read": lambda: wall_time(lambda: x.amax(), DEVICE, 10)})["read"]
    return x.nbytes / timing.median_us / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--part", choices=("values", "times"), action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--variant", choices=VARIANTS, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="transformers")
    document = provenance()
    start = time.perf_counter()

    def keep() -> None:
        save(given.results, document)

    right, parts = True, given.part or ["values", "times"]
    if "values" in parts:
        document["values"], right = values()
        say(f"values after {time.perf_counter() - start:.0f} s")
        keep()
    if "times" in parts:
        document["read_gb_per_s"] = read_bandwidth()
        document["1.5 B, 2k"] = {}
        for batch in given.batch or (1, 8):
            gc.collect()
            torch.cuda.empty_cache()
            rows = document["1.5 B, 2k"][f"batch {batch}"] = {}
            speed(batch, given.variant, given.rounds, document["read_gb_per_s"], rows, keep)
            torch._dynamo.reset()
            say(f"batch {batch} after {time.perf_counter() - start:.0f} s")
    if not right:
        say("recorded steps made other tokens than transformers' loop, or none: see the results")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
