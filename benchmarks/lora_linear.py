"""One linear layer with an adapter of PEFT (LoRA), forward and backward: PEFT's own layer and ours, on one GPU.

    PYTHONPATH=src:benchmarks python benchmarks/lora_linear.py results.json [--rank 16] [--no-values]

First the op's cases, in processes with a time limit. Then a row per shape: µs and number of the device's kernels in one
step, by torch's profiler, and host µs of a step that no kernel holds up. Needs peft. Exits with 1 where a value is over
its budget.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import profiled, provenance, save, say, spent
from torch import nn

import tilesmith

SHAPES = ((2048, 8192), (4096, 14_336))
TOKENS = (512, 2048, 8192)
STEPS = 5
LIMIT = 60  # seconds of a process that checks values

PROCESSES = 8  # compiling takes longer than the checks
VALUES = """
import sys, torch
from tilesmith.engine import cases, ops
from tilesmith.validate.cases import check
own, processes = map(int, sys.argv[1:])
op, worst, failed = ops()["lora_linear"], (0.0, ""), 0
runs = [(case, dtype) for case in cases(op.name) for dtype in case.dtypes if case.name != "int64_offsets"]
runs = [(case, dtype) for case, dtype in runs if not case.name.startswith("8192x")]
for case, dtype in runs[own::processes]:
    found = check(op, "triton", case, "cuda", dtype)
    failed += not found.passed
    worst = max(worst, (found.error / found.budget if found.budget else 0.0, f"{case.name} {dtype}"))
    if not found.passed:
        print("FAILED", case.name, dtype, found.message, flush=True)
print(f"values: {len(runs[own::processes])} checked, {failed} failed; largest error / budget {worst}", flush=True)
sys.exit(failed > 0)
"""


def values() -> int:
    """1 where a case is over its budget, or not checked in time."""
    command = [sys.executable, "-c", VALUES]
    running = [subprocess.Popen([*command, str(i), str(PROCESSES)]) for i in range(PROCESSES)]
    end, code = time.monotonic() + LIMIT, 0
    for process in running:
        try:
            code |= process.wait(max(0.1, end - time.monotonic())) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            say(f"values: not ready after {LIMIT} s")
            code = 1
    return int(code)


class One(nn.Module):
    """A layer to adapt."""

    def __init__(self, features: int, outputs: int):
        super().__init__()
        self.layer = nn.Linear(features, outputs, bias=False, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def adapted(features: int, outputs: int, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["layer"], init_lora_weights=False)
    return get_peft_model(One(features, outputs), config)


def stepper(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        model(x).backward(dy)

    return step


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Device µs and number of kernels of one step, and µs of each kind, the longest first."""
    found = profiled(step, calls=STEPS, warm=4)
    us = spent(found, STEPS)
    return {
        "device_us": round(us.total(), 1),
        "kernels": len(found) / STEPS,
        "of": {name: round(one, 1) for name, one in us.most_common()},
    }


def host_us(step: Callable[[], None], steps: int = 30) -> float:
    """µs that the host needs for a step; the device is fast enough on few tokens."""
    torch.cuda.synchronize()
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        rounds.append((time.perf_counter() - start) / steps * 1e6)
        torch.cuda.synchronize()
    return round(sorted(rounds)[2], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--no-values", action="store_true")
    chosen = parser.parse_args()
    code = 0 if chosen.no_values else values()
    rows = []
    for features, outputs in SHAPES:
        theirs = adapted(features, outputs, chosen.rank)
        ours = tilesmith.optimize(copy.deepcopy(theirs), only="lora")
        for tokens in TOKENS:
            x = torch.randn(1, tokens, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dy = torch.randn(1, tokens, outputs, device="cuda", dtype=torch.bfloat16)
            for name, model in (("peft", theirs), ("tilesmith", ours)):
                step = stepper(model, x, dy)
                row = {"features": features, "outputs": outputs, "tokens": tokens, "variant": name, **kernels(step)}
                if tokens == TOKENS[0]:
                    row["host_us"] = host_us(step)
                rows.append(row)
                say(json.dumps(row))
    save(chosen.out, {**provenance(), "rank": chosen.rank, "rows": rows})
    return code


if __name__ == "__main__":
    sys.exit(main())
