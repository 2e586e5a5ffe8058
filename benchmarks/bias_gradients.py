"""Sums over rows, the gradients of biases, on one GPU: values, then times beside PyTorch's sum and a copy.

    python benchmarks/bias_gradients.py results.json [--part values] [--part times] [--part small] [--part configs]
        [--part layer] [--cpu]

Without --part all but `configs`. `times` divides the bytes read by the time, and that by the rate of a copy of 1 GB.
`small` finds the size from which the op gains on the device. `configs` tries other tiles. `layer` is a step of a
biased linear layer, plain and optimised. Exits with 1 where a value was wrong. --cpu: whether the script itself works.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import provenance, save, say
from torch import nn

import tilesmith
from tilesmith import ops
from tilesmith.engine import cases, use
from tilesmith.engine import ops as declared
from tilesmith.engine.timing import host_time, measure
from tilesmith.hardware.detect import arch_of
from tilesmith.validate.cases import check_each

SHAPES = ((16_384, 1024), (16_384, 4096), (12_608, 1024), (16_384, 3072), (8192, 50_304))
SMALL = ((512, 1024), (1024, 1024), (2048, 1024), (4096, 1024), (8192, 1024), (1024, 4096), (4096, 4096))
CONFIGS = tuple(itertools.product((16, 32, 64), (64, 128, 256), (4, 8), (264, 528, 1056)))
BAR = 0.9  # of the copy rate


def rows_of(m: int, n: int, device: str) -> torch.Tensor:
    return torch.randn(m, n, device=device, dtype=torch.bfloat16)


def values(device: str) -> list[list[Any]]:
    """[case, wrong or not] of every small case, and of each shape with the error against fp64 beside PyTorch's."""
    found = []
    backend = "reference" if device == "cpu" else "triton"
    for case in [c for c in cases("column_sums") if "test" in c.tags and torch.bfloat16 in c.dtypes]:
        results = check_each(declared()["column_sums"], (backend,), case, device, torch.bfloat16)
        found += [[f"{case.name} {result.kernel}", result.passed, result.message] for result in results]
    for m, n in SHAPES if device != "cpu" else SHAPES[:1]:
        x = rows_of(m, n, device)
        exact = x.double().sum(0)
        ours, theirs = (y.double().sub(exact).abs().max().item() for y in (ops.column_sums(x), x.sum(0)))
        again = torch.equal(ops.column_sums(x), ops.column_sums(x))
        right = ours <= 2 * (theirs + torch.finfo(torch.bfloat16).eps * exact.abs().max().item()) and again
        found.append([f"{m}x{n}", right, f"error {ours:.3g}, PyTorch's {theirs:.3g}, same bits twice: {again}"])
    return found


def copy_rate(device: str, size: int) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure({"copy": lambda: target.copy_(source)}, device)["copy"].median_us * 1e6


def times(shapes: tuple[tuple[int, int], ...], device: str, rate: float) -> list[dict[str, Any]]:
    found = []
    for m, n in shapes:
        x, like = rows_of(m, n, device), rows_of(m, n, device)
        size = x.numel() * x.element_size()
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda x=x: ops.column_sums(x),
            "ours to fp32": lambda x=x: ops.column_sums(x, "float32"),
            "sum": lambda x=x: x.sum(0),
            "copy": lambda x=x, like=like: like.copy_(x),
        }
        cold = {name: t.median_us for name, t in measure(calls, device).items()}
        warm = {name: t.median_us for name, t in measure(calls, device, cold=False).items()}
        row = {"shape": [m, n], "cold_us": cold, "warm_us": warm}
        row |= {"of_copy_rate": size / cold["ours"] * 1e6 / rate, "of_own_copy": 0.5 * cold["copy"] / cold["ours"]}
        row["speedup"] = cold["sum"] / cold["ours"]
        found.append(row)
        say(f"{m}x{n}", *(f"{k} {v:.1f}" for k, v in cold.items()), f"of the copy rate {row['of_copy_rate']:.2f}")
    return found


def configs(device: str) -> list[dict[str, Any]]:
    found = []
    for m, n in SHAPES[:2]:
        x = rows_of(m, n, device)

        def pinned(x: torch.Tensor, rows: int, cols: int, warps: int, programs: int) -> Callable[[], object]:
            pin = f"triton:block_rows={rows}:block_cols={cols}:num_warps={warps}:programs={programs}"

            def call() -> object:
                with use(column_sums=pin):
                    return ops.column_sums(x)

            return call

        calls = {str(c): pinned(x, *c) for c in CONFIGS}
        taken = {name: t.median_us for name, t in measure(calls, device, rounds=3, budget_ms=2).items()}
        best = sorted(taken, key=taken.__getitem__)[:6]
        found.append({"shape": [m, n], "best": {name: taken[name] for name in best}, "all": taken})
        say(f"{m}x{n}", *(f"{name} {taken[name]:.1f}" for name in best))
    return found


def layer(device: str) -> list[dict[str, Any]]:
    """Forward and backward of nn.Linear, device and host time."""
    found = []
    for rows, features, outputs in ((16_384, 1024, 1024), (16_384, 1024, 4096), (16_384, 4096, 1024)):
        if device == "cpu":
            rows, features, outputs = 8, 16, 16
        x = rows_of(rows, features, device).requires_grad_()
        dy = rows_of(rows, outputs, device)
        models = {name: nn.Sequential(nn.Linear(features, outputs)).to(x) for name in ("plain", "optimised", "no bias")}
        models["no bias"] = nn.Sequential(nn.Linear(features, outputs, bias=False)).to(x)
        tilesmith.optimize(models["optimised"])

        def step(model: nn.Module, x: torch.Tensor = x, dy: torch.Tensor = dy) -> None:
            model(x).backward(dy)
            model.zero_grad(set_to_none=True)
            x.grad = None

        calls = {name: (lambda model=model: step(model)) for name, model in models.items()}
        taken = {name: t.median_us for name, t in measure(calls, device).items()}
        host = {name: t.median_us for name, t in host_time(calls, device, calls=5).items()}
        found.append({"layer": [rows, features, outputs], "device_us": taken, "host_us": host})
        say(f"{rows}x{features} to {outputs}", *(f"{k} {v:.1f}" for k, v in taken.items()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--part", action="append", choices=("values", "times", "small", "configs", "layer"))
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.cpu else "cuda"
    parts = args.part or ["values", "times", "small", "layer"]
    report: dict[str, Any] = {**provenance(), "arch": str(arch_of(torch.device(device)))}
    wrong: list[Any] = []
    if "values" in parts:
        report["values"] = values(device)
        wrong = [row for row in report["values"] if not row[1]]
        say("values:", len(report["values"]), "checked,", len(wrong), "wrong", *wrong)
    rate = report["copy_bytes_per_second"] = copy_rate(device, 2**30 if device == "cuda" else 2**20)
    say(f"copy: {rate / 1e12:.2f} TB/s")
    if "times" in parts:
        report["times"] = times(SHAPES if device == "cuda" else ((64, 128),), device, rate)
        report["met"] = {str(row["shape"]): row["of_copy_rate"] >= BAR for row in report["times"]}
    if "small" in parts:
        report["small"] = times(SMALL if device == "cuda" else ((8, 16),), device, rate)
    if "configs" in parts and device == "cuda":
        report["configs"] = configs(device)
    if "layer" in parts:
        report["layer"] = layer(device)
    save(args.results, report)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
