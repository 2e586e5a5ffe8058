"""Experts with 160 pairs each and experts of few tokens, on one GPU of compute capability 9.0.

    python benchmarks/experts_shapes.py results.json [--part values] [--part tiles] [--part decode] [--cpu]

Without --part all of them: values first, each group in a process with a limit of 60 seconds; then times, unless a value
was wrong. `tiles` compares tiles of 128 and 192 pairs with grouped_mm; `decode` 1, 4 and 16 tokens with the launches
that build an index, and with grouped_mm. Exits with 1 where a value was wrong. --cpu: whether the script itself works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from common import profiled, provenance, save, say, spent

from tilesmith import ops
from tilesmith.bench.peers_experts import EAGER
from tilesmith.engine import Case, cases, use
from tilesmith.engine import ops as ops_of
from tilesmith.engine.case import BF16, GPU
from tilesmith.engine.timing import measure
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import cases as made
from tilesmith.ops.moe import plan
from tilesmith.ops.moe.triton import launch
from tilesmith.validate.cases import check_each

CEILING = "maximum of as many bytes"
LIMIT = 60  # seconds of a group of values
GROUPS = ("three", "options", "two", "few")
HOPPER = {n: {"experts": f"hopper:consumers={n}", "experts_vjp": f"hopper:rows_consumers={n}"} for n in (2, 3)}
TILES = ("8192x2048_e512_i512_k10", "8192x2048_e128_i768_k8", "8192x2048_e64_i1408_k6")
UP = (2, 512, 1), (2, 512, 2), (4, 256, 1), (4, 256, 2), (4, 512, 1), (4, 512, 2), (4, 512, 3), (8, 256, 2), (8, 512, 1)
DECODE = {"E128 K8": (2048, 768, 128, 8), "E32 K4": (2880, 2880, 32, 4)}


def value_cases(group: str, device: str) -> list[Case]:
    if group == "few":
        names = ("few_sentinels", "few_of_one_expert", "few_interleaved", "few_tokens", "decode", "decode_one")
        return [case for case in cases("experts") if case.name in names[: 3 if device == "cpu" else None]]
    plain = {
        "one_tile": made.experts_args(1024, 256, 136, 64, 10),
        "ragged": made.experts_args(66, 72, 40, 5, 2),
        "one_has_all": made.experts_args(700, 264, 136, 4, 1, indices=made.always(2)),
    }
    options = {
        "sentinels": made.experts_args(300, 136, 72, 3, 4, indices=made.with_sentinels(3), bias=True),
        "gpt_oss": made._clamped(
            made.experts_args(150, 136, 200, 4, 2, bias=True, weight_layout="transposed", **made.GPT_OSS), 0.6
        ),
    }
    return [Case(name, a, GPU, BF16) for name, a in (options if group == "options" else plain).items()]


def values(group: str, device: str) -> list[list[Any]]:
    pins = None if group == "few" else HOPPER[2 if group == "two" else 3]
    backend = "triton" if group == "few" else "hopper"
    if device == "cpu":
        pins, backend = None, "reference"
    found = []
    for case in value_cases(group, device):
        for dtype in [d for d in case.dtypes if d in BF16]:
            for r in check_each(ops_of()["experts"], (backend,), case, device, dtype, pinned=pins):
                found.append([group, case.name, r.passed, r.error, r.budget, r.message])
    return found


def all_values(device: str) -> list[list[Any]]:
    """Of each group in a process of its own, side by side: a kernel that hangs ends there."""
    command = [sys.executable, __file__, "-", *(["--cpu"] if device == "cpu" else [])]
    running = {g: subprocess.Popen([*command, "--group", g], stdout=subprocess.PIPE, text=True) for g in GROUPS}
    found: list[list[Any]] = []
    for group, process in running.items():
        try:
            out, _ = process.communicate(timeout=LIMIT if device == "cuda" else None)
            found += json.loads(out.splitlines()[-1]) if process.returncode == 0 else [[group, "", False, 0, 0, out]]
        except subprocess.TimeoutExpired:
            process.kill()
            found.append([group, "", False, 0, 0, f"longer than {LIMIT} s"])
    return found


def inputs(case: Case, device: str) -> tuple[Any, ...]:
    given = case.build(torch.device(device), torch.bfloat16, case.generator(torch.device(device)))
    return ops_of()["experts"].bind((), given)


def timed(calls: dict[str, Callable[[], object]], device: str) -> dict[str, Any]:
    return {name: {"us": t.median_us, "spread": t.spread} for name, t in measure(calls, device, rounds=5).items()}


def steps(args: tuple[Any, ...], backward: bool) -> dict[str, Callable[[], object]]:
    """A call of each form, by its name: tiles of Hopper's products, and grouped_mm."""
    grads = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    dy = torch.randn_like(args[0])

    def call(pins: dict[str, str] | None) -> Callable[[], object]:
        def run() -> object:
            with use(**pins) if pins else contextlib.nullcontext(), torch.set_grad_enabled(backward):
                y = (ops.experts if pins else EAGER["experts"])(*args)
                return torch.autograd.grad(y, grads, dy) if backward else y

        return run

    if args[0].device.type == "cpu":
        return {"reference": call({"experts": "reference"})}
    return {f"{64 * n} pairs": call(pins) for n, pins in HOPPER.items()} | {"grouped_mm": call(None)}


def tiles(device: str, shapes: tuple[str, ...] = TILES) -> dict[str, Any]:
    """TFLOP/s by the height of tiles, forward and with the backward, and what the plan predicts."""
    found: dict[str, Any] = {}
    for shape in shapes:
        args = inputs(next(c for c in cases("experts") if c.name == shape), device)
        x, gate_up, down, indices = args[:4]
        flops = 2 * indices.numel() * (gate_up[0].numel() + down[0].numel())
        rows = {}
        for backward in (False, True):
            for name, row in timed(steps(args, backward), device).items():
                row["tflops"] = flops * (3 if backward else 1) / row["us"] / 1e6
                rows[f"{name}, {'both' if backward else 'forward'}"] = row
        sizes, arch = plan.dims(indices.numel(), len(gate_up), x.shape[-1], down.shape[2]), arch_of(x.device)
        found[shape] = {
            "rows": rows,
            "predicted_us": {
                str(b): {h: 1e6 * t for h, t in plan.hopper_times(sizes, arch, b).items()} for b in (0, 1)
            },
            "kernels_us": {n: kernels(call) for n, call in steps(args, True).items()} if device != "cpu" else {},
        }
        say(shape, {n: round(r["tflops"]) for n, r in rows.items()})
    return found


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """µs of the kernels of a call that take more than five, by name."""
    return {name: us for name, us in spent(profiled(call)).items() if us > 5}


def decode(device: str, tokens: tuple[int, ...] = (1, 4, 16)) -> dict[str, Any]:
    """us and TB/s of the weights that must be read."""
    found: dict[str, Any] = {}
    for name, (hidden, inner, experts, top_k) in DECODE.items():
        for count in tokens:
            args = inputs(Case("x", made.experts_args(count, hidden, inner, experts, top_k), GPU, BF16), device)
            with torch.no_grad():
                rows = timed(decoding(args, device), device)
            _, gate_up, down, indices = args[:4]
            read = 2 * indices.unique().numel() * (gate_up[0].numel() + down[0].numel())
            for which, row in rows.items():
                row["tb_s"] = (gate_up[: readable(args)].nbytes if which == CEILING else read) / row["us"] / 1e6
            found[f"{name}, {count}"] = {"rows": rows, "bytes": read}
            say(name, count, {n: (round(r["us"], 1), round(r["tb_s"], 2)) for n, r in rows.items()})
    return found


def readable(args: tuple[Any, ...]) -> int:
    """Experts whose gate and up are about as many bytes as a call must read."""
    return min(len(args[1]), 3 * args[3].unique().numel() // 2)


def decoding(args: tuple[Any, ...], device: str) -> dict[str, Callable[[], object]]:
    """The op, its launcher with an index and in other configurations, grouped_mm, a reduction of as many bytes."""
    if device == "cpu":
        return {"reference": lambda: ops_of()["experts"].reference(*args)}
    x, gate_up, down, indices = args[:4]
    sizes = plan.dims(indices.numel(), len(gate_up), x.shape[-1], down.shape[2])
    top_k, arch = indices.shape[-1], arch_of(x.device)
    given = plan.few(sizes, top_k, arch, x.dtype, False, (True, True))
    launcher = launch.experts.__wrapped__

    def served(config: plan.FewConfig | None) -> Callable[[], object]:
        def run() -> object:
            with mock.patch.object(launch, "_few", lambda *_, **__: config):
                return launcher(*args, config=plan.forward(sizes, arch, x.dtype), hidden=False)

        return run

    def op() -> object:
        with use(experts="triton"):
            return ops.experts(*args)

    source = gate_up[: readable(args)]
    variants = {f"block_n {n}": served(given._replace(block_n=n, up=None)) for n in (64, 128)}
    variants |= {f"down {n}": served(given._replace(down=n and plan.Direct(n, 64, 4))) for n in (None, 8, 16)}
    if given.up is not None:
        for n, k, stages in UP:
            variants[f"up {n} x {k}, {stages}"] = served(given._replace(up=plan.Direct(n, k, stages)))
    return {
        "op": op,
        "index": served(None),
        **variants,
        "grouped_mm": lambda: EAGER["experts"](*args),
        CEILING: lambda: source.view(torch.int64).amax(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--part", action="append", choices=("values", "tiles", "decode"))
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    device = "cpu" if given.cpu else "cuda"
    if given.group:
        say(json.dumps(values(given.group, device)))
        return 0
    parts, found = given.part or ["values", "tiles", "decode"], provenance()
    if "values" in parts:
        found["values"] = all_values(device)
        wrong = [row for row in found["values"] if not row[2] or "rejects" in row[5]]
        say(len(found["values"]), "values,", len(wrong), "wrong", wrong)
        save(given.path, found)
        if wrong:
            return 1
    for part, run in (("decode", decode), ("tiles", tiles)):
        if part in parts:
            found[part] = run(device)
            save(given.path, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
