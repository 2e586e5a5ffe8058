"""What Python takes of a LoRA step whose graphs are recorded: on a CPU, with replays that do nothing.

    python benchmarks/host_calls.py results.json [--layers 16] [--steps 200] [--variant NAME ...]

Blocks are narrow, so that a step is Python, autograd and the optimizer for the most part. Process time in ms of
forward, backward and AdamW, each the least of all steps, since other programs on the machine only add to it. "blocks":
recorded without what is around them, for which the last norm has a hook. check: the part of the forward that looks for
changes of what was recorded. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import provenance, save, say
from torch import Tensor, nn

import tilesmith
from tilesmith.models import graphs
from tilesmith.models.recorded import Recorded

TOKENS = 16
WARM = graphs.PLAIN_CALLS + 2


class Idle:
    """A recorder whose replays do nothing."""

    def missing(self, device: torch.device) -> str:
        return ""

    def busy(self) -> bool:
        return False

    def warm(self, fn: Callable[[], Any]) -> Any:
        return fn()

    def record(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return lambda: None, fn()

    def random_state(self, device: torch.device) -> Tensor:
        return torch.get_rng_state()

    def restore(self, device: torch.device, state: Tensor) -> None:
        torch.set_rng_state(state)

    def memory(self) -> int:
        return 0


def model(layers: int) -> nn.Module:
    """A narrow Llama with LoRA on all linear layers of its blocks."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), adapters).train()


def measure(made: nn.Module, steps: int) -> dict[str, float]:
    """The least process time in ms of each part of a step."""
    ids = torch.randint(128, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-5, fused=True)  # as transformers' Trainer does by default
    least: dict[str, float] = {}
    for step in range(WARM + steps):
        marks = [time.process_time_ns()]
        loss = made(**given).loss
        marks.append(time.process_time_ns())
        loss.backward()
        marks.append(time.process_time_ns())
        optimizer.step()
        marks.append(time.process_time_ns())
        for parameter in trained:
            parameter.grad = None
        if step >= WARM:
            for name, start, end in zip(("forward", "backward", "adamw"), marks, marks[1:]):
                least[name] = min(least.get(name, float("inf")), (end - start) / 1e6)
    return least


def record(made: nn.Module) -> graphs.Graphs:
    """What is recorded of a model."""
    notes = [note for m in made.modules() for note in getattr(m.__dict__.get("tilesmith_report"), "notes", ())]
    (found,) = (note for note in notes if isinstance(note, graphs.Graphs))
    return found


def checks(recorded: graphs.Graphs, steps: int) -> float:
    """The least process time in ms of all checks of a step, behind work that has used the caches."""
    entries: list[Recorded] = list(recorded._memory.recordings)
    other, least = torch.zeros(2**20), float("inf")
    for _ in range(steps):
        other.add_(1)
        start = time.process_time_ns()
        if any(entry.stale() for entry in entries):
            raise RuntimeError("what was recorded has changed")
        least = min(least, (time.process_time_ns() - start) / 1e6)
    return least


VARIANTS = ("eager", "optimize", "blocks", "graphs")


def variant(name: str, layers: int, steps: int) -> dict[str, Any]:
    """A row of results."""
    made = model(layers)
    if name != "eager":
        tilesmith.optimize(made, graphs=name in ("blocks", "graphs"))
    if name == "blocks":
        made.get_base_model().model.norm.register_forward_hook(lambda *_: None)
    row: dict[str, Any] = measure(made, steps)
    row["step"] = sum(row.values())
    if name in ("blocks", "graphs"):
        recorded = record(made)
        row["check"] = checks(recorded, steps)
        row |= {"replayed_blocks": recorded.replays, "replayed_wholes": recorded.wholes}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variant", action="append", default=[], choices=VARIANTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    graphs.RECORDER = Idle  # type: ignore[misc,assignment]
    rows = {name: variant(name, given.layers, given.steps) for name in given.variant or VARIANTS}
    for name, row in rows.items():
        say(f"{name:<9}", ", ".join(f"{part} {ms:.2f}" for part, ms in row.items() if "replayed" not in part), "ms")
    processor = platform.processor() or platform.machine()
    save(given.results, {**provenance(), "processor": processor, "layers": given.layers, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
