"""A decoder layer of Llama-3-8B's sizes and its head, trained on one sequence that all GPUs of a host share.

    torchrun --nproc-per-node 4 benchmarks/long_layer.py results.json --tokens 2097152 [--check 65536] [--tiny]

The model is transformers' with random weights in bf16, all of them trained, after `optimize`, `fit_sequence` for a
rank's tokens and `shard_sequence`. First a step of --check tokens: each parameter's gradient, the mean over the ranks,
is compared with that of rank 0 alone, the distance over the norm. Then one forward and backward of --tokens: seconds of
the slowest rank, the most bytes that a rank allocated, the loss. Rank 0 writes the row. --tiny: sizes for a CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import load, provenance, save, say
from long_step import LARGE, TINY
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tilesmith
from tilesmith.bench.ranks import current_device, memory_in_use, peak, process_group, slowest
from tilesmith.engine.timing import synchronize, wall_time


def layer_and_head(sizes: dict[str, int], tokens: int, device: torch.device) -> nn.Module:
    """The same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=tokens, rope_theta=5e5, use_cache=False)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    return tilesmith.optimize(model.train())


def text(tokens: int, vocabulary: int, device: torch.device) -> Tensor:
    """The same on all ranks."""
    chance = torch.Generator(device).manual_seed(1)
    return torch.randint(vocabulary, (1, tokens), device=device, generator=chance)


def step(model: nn.Module, ids: Tensor) -> float:
    """A forward and backward; returns the loss."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def distances(model: nn.Module, alone: nn.Module, ids: Tensor) -> dict[str, float]:
    """How far the gradients of the ranks together are from those of rank 0 alone, of each parameter; there only."""
    step(model, ids)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
    found = {}
    if dist.get_rank() == 0:
        step(alone, ids)
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            exact = theirs.grad.float()
            found[name] = float((ours.grad.float() - exact).norm() / exact.norm().clamp(1e-30))
    dist.barrier()
    for one in (model, alone):
        one.zero_grad(set_to_none=True)
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row."""
    device, size = current_device(), dist.get_world_size()
    sizes = TINY if given.tiny else LARGE
    model = layer_and_head(sizes, max(given.tokens, given.check), device)
    alone = copy.deepcopy(model)
    plan = tilesmith.fit_sequence(model, -(-given.tokens // size))
    tilesmith.shard_sequence(model, init_device_mesh(device.type, (size,)))
    off = distances(model, alone, text(given.check, sizes["vocab_size"], device))
    del alone
    row: dict[str, Any] = {"gpus": size, "tokens": given.tokens, "checked_tokens": given.check}
    row |= {"gradients_off_by": off, "predicted_peak_without_others_keys": plan.peak, "tile_tokens": plan.tile_tokens}
    if dist.get_rank() == 0:
        say(f"{plan}\ngradients at {given.check} tokens are off by {max(off.values()):.2e} at most")
    ids = text(given.tokens, sizes["vocab_size"], device)
    memory_in_use(device)
    synchronize(device)
    dist.barrier()

    def once() -> None:
        row["loss"] = step(model, ids)

    row["seconds"] = round(slowest(wall_time(once, device) / 1e6, device), 3)
    row["peak"] = int(slowest(float(peak(device)), device))
    row["tokens_per_second"] = round(given.tokens / row["seconds"], 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--check", type=int, default=65536)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    with process_group() as rank:
        row = measure(given)
        if rank == 0:
            say(json.dumps(row))
            rows = {**load(given.results).get("rows", {}), f"{given.tokens} on {row['gpus']}": row}
            save(given.results, {**provenance(), "rows": rows})
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
