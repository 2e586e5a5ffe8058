"""linear_cross_entropy by its launches: what a call makes the GPU do, how long that should take, and how long it does.

    PYTHONPATH=src:benchmarks python benchmarks/loss_steps.py [results.json] [--only NAME] [--zoo SEED --count N]
        [--seconds 60] [--kernels] [--dry]

Each call is made in up to four ways: as the library chooses; with all logits kept and a pass over them; with
exponentials kept in their place, however many tokens and features there are; and in chunks. They are timed in turns
with the three products alone, on one GPU of compute capability 9.0, after dx of some tokens was compared with fp64.
--dry needs no GPU: it prints the launches of each way, from the library's own launchers on tensors without memory, with
a time for each from the constants below. --kernels adds the time of each kernel of the first way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from common import provenance, save, say
from torch.utils._python_dispatch import TorchDispatchMode

from tilesmith import ops
from tilesmith.bench import zoo
from tilesmith.bench.peers_gemm import loss_products
from tilesmith.engine.launcher import in_place_of_launches
from tilesmith.engine.timing import measure, peak_memory
from tilesmith.hardware.detect import arch_named, assuming

ROOT = Path(__file__).parents[1]
# H200. Copies and products: ceilings of `results/sm90/linear_cross_entropy-zoo.json`. Epilogue of a tile: what the
# product of exp2 took longer than the same without, over its turns (docs/log/linear-cross-entropy.md).
COPY, PRODUCT = 4.24e12, 748e12
PASS = 0.95 * COPY  # of kernels that read and write, docs/log/losses.md
LAUNCH = 2e-6  # of a small kernel, its start and its end (docs/adr/0007-exp2-epilogue.md)
EPILOGUE = 1.0e-6
HIDDEN = 0.5  # of what a product moves beyond bf16 results: assumed
SMS, ROWS, COLS = 132, 128, 256


class Shape(NamedTuple):
    name: str
    tokens: int
    hidden: int
    classes: int

    def __str__(self) -> str:
        return f"{self.name} {self.tokens} x {self.hidden} x {self.classes}"

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.hidden * self.classes


SHAPES = (
    Shape("ModernBERT-base", 2973, 768, 50_368),
    Shape("Gemma-3-1B", 1731, 1152, 262_144),
    Shape("DeepSeek-V2-Lite", 4116, 2048, 102_400),
    Shape("GLM-4.7-Flash", 8192, 2048, 154_880),
    Shape("DeepSeek-V2-Lite", 8192, 2048, 102_400),
    Shape("Gemma-2-27B", 4647, 4608, 256_000),
    Shape("Llama-3.2-1B", 16_384, 2048, 128_256),
    Shape("Kimi-Linear-48B-A3B", 4464, 2304, 163_840),
    Shape("Mistral-7B-v0.1", 1281, 4096, 32_000),
    Shape("Qwen3.5-27B", 8192, 5120, 248_320),
)
# "keep" takes all tokens whatever chunk_tokens is, which keeps replays of these ways apart
WAYS = {
    "chosen": {},
    "pass": {"mode": "keep", "chunk_tokens": 1},
    "powers": {"mode": "keep", "chunk_tokens": 2},
    "chunks": {"mode": "chunks"},
}


class Step(NamedTuple):
    """One launch: bytes to and from memory, beyond bf16 operands and results for products, whose FLOPs it has; tiles of
    an epilogue."""

    name: str
    bytes: float
    flops: float = 0.0
    tiles: int = 0

    def seconds(self, rate: float) -> float:
        if not self.flops:
            return LAUNCH + self.bytes / PASS
        return self.flops / rate + HIDDEN * self.bytes / COPY + -(-self.tiles // SMS) * EPILOGUE


class Record(TorchDispatchMode):
    """Collects the steps of what runs inside, on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.steps.append(Step(name, 0.0, 2.0 * a.shape[0] * a.shape[1] * b.shape[1]))
        elif name in ("copy_", "_to_copy", "fill_", "zero_"):
            source = args[1].nbytes if name == "copy_" else args[0].nbytes if name == "_to_copy" else 0
            self.steps.append(Step(name, out.nbytes + source))
        return out

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple, named: dict[str, Any], cluster: int) -> None:
        """In place of `engine.launch`."""
        self.steps.append(_launched(kernel.__name__, args, named))

    def add_product(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
        more = (out.element_size() * (1 if first else 2) - 2) * out.numel()
        self.steps.append(Step("product of dweight", more, 2.0 * a.shape[0] * a.shape[1] * b.shape[1]))


def _launched(name: str, args: tuple, named: dict[str, Any]) -> Step:
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if name in ("max_matmul_kernel", "exp2_matmul_kernel"):
        x, w = args[0].base, args[1].base
        if args[8] is not None:  # a flag says that there is nothing to do
            return Step(f"{name}, flag", 0.0)
        return Step(name, 0.0, 2.0 * x.numel() * w.shape[0], args[3] * args[4])
    if name == "label_scores_kernel":
        return Step(name, 2.0 * tensors[0].nbytes)
    if name == "settle_rows_kernel":
        if named["AGAIN"]:
            return Step(f"{name}, flag", 0.0)
        scaled = args[11]
        return Step(name, tensors[0].nbytes + (0 if scaled is None else 2 * scaled.nbytes))
    if name == "loss_grad_parts_kernel":
        return Step(name, 2.0 * tensors[0].nbytes)
    if name == "_scale_rows_kernel":
        return Step(name, 2.0 * tensors[0].nbytes)
    if name == "_scale_kernel":
        return Step(name, tensors[0].nbytes + tensors[1].nbytes)
    return Step(name, 0.0)


@contextlib.contextmanager
def passes(way: str) -> Iterator[None]:
    """For the way "pass" no exponentials are kept, for the way "powers" always."""
    from tilesmith.ops.loss.hopper import exp2_epilogue

    with contextlib.ExitStack() as stack:
        if way == "pass":
            stack.enter_context(patch.object(exp2_epilogue, "pass_outlasts_launches", lambda *_: False))
        if way == "powers":
            stack.enter_context(patch.object(exp2_epilogue, "MOST_FEATURES", 2**20))
        yield


def steps_of(shape: Shape, way: str) -> tuple[str, list[Step]]:
    """The mode of a call, and its launches, forward and backward."""
    from tilesmith.ops.loss import chunks
    from tilesmith.ops.loss.hopper import exp2_epilogue

    record, forward = Record(), ops.linear_cross_entropy
    x, weight = (
        torch.empty(n, shape.hidden, dtype=torch.bfloat16, device="meta") for n in (shape.tokens, shape.classes)
    )
    target, mask = torch.empty(shape.tokens, dtype=torch.int64, device="meta"), [True, True, False]
    args = forward.bind((x, weight, target), {**WAYS[way], "grad_mask": mask})
    with contextlib.ExitStack() as stack:
        stack.enter_context(assuming(arch_named("sm90")))
        stack.enter_context(passes(way))
        stack.enter_context(in_place_of_launches(record.launch))
        for module in (chunks, exp2_epilogue):
            stack.enter_context(patch.object(module, "add_product", record.add_product))
        stack.enter_context(record)
        _, *saved = forward.kernel("hopper").fn(*args)
        named = dict(zip(forward.parameters, args)) | dict(zip(forward.outputs[1:], saved))
        named |= {"dloss": target.new_empty((), dtype=torch.float32), "output_mask": mask, "overwrite": True}
        forward.vjp.kernel("triton").fn(*(named[name] for name in forward.vjp.parameters))
    return named["mode"], record.steps


def ways_of(shape: Shape) -> list[str]:
    """The ways whose launches differ."""
    found: dict[tuple, str] = {}
    for way in WAYS:
        found.setdefault(tuple(steps_of(shape, way)[1]), way)
    return list(found.values())


def known_products() -> dict[str, float]:
    """µs of the three products alone, as measured last."""
    text = (ROOT / "benchmarks/results/sm90/linear_cross_entropy-zoo.json").read_text(encoding="utf-8")
    return {row["case"]: row["us"] for row in json.loads(text)["rows"] if row["provider"] == "products"}


def modelled(shape: Shape, way: str, lines: bool = False) -> float:
    """How many times the products' time the call should take."""
    products = known_products().get(str(shape), shape.flops / PRODUCT * 1e6) * 1e-6
    rate, (mode, steps) = shape.flops / products, steps_of(shape, way)
    total = sum(step.seconds(rate) for step in steps)
    say(f"{shape}, {way}: mode {mode}, {len(steps)} launches, {total * 1e6:,.0f} µs, {total / products:.3f} (modelled)")
    for step in steps if lines else ():
        work = f"{step.bytes / 1e6:9.1f} MB {step.flops / 1e12:8.3f} TFLOP"
        say(f"    {step.name:28} {work} {step.seconds(rate) * 1e6:9.1f} µs")
    return total / products


def inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(n, shape.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (shape.tokens, shape.classes)
    )
    weight *= shape.hidden**-0.5
    target = torch.randint(shape.classes, (shape.tokens,), generator=generator, device="cuda")
    return x.requires_grad_(), weight.requires_grad_(), target


def call(way: str, args: tuple[torch.Tensor, ...]) -> Callable[[], tuple[torch.Tensor, ...]]:
    def run() -> tuple[torch.Tensor, ...]:
        with passes(way):
            loss = ops.linear_cross_entropy(*args, **WAYS[way])
            return torch.autograd.grad(loss, args[:2])

    return run


def off_by(dx: torch.Tensor, args: tuple[torch.Tensor, ...], tokens: int = 64) -> tuple[float, float]:
    """How far dx of the first tokens is from fp64, and how far one product of the exact gradient in bf16 is."""
    x, weight, target = (t.detach() for t in args)
    grad = (x[:tokens].double() @ weight.double().t()).softmax(-1)
    grad[torch.arange(tokens, device="cuda"), target[:tokens]] -= 1
    grad /= target.shape[0]
    exact, product = grad @ weight.double(), grad.bfloat16() @ weight
    return tuple(float((t.double() - exact).norm() / exact.norm()) for t in (dx[:tokens], product))


def timed(shape: Shape, kernels: bool) -> dict[str, Any]:
    args, ways = inputs(shape), ways_of(shape)
    row: dict[str, Any] = {"case": str(shape), "off_by": {}, "peak_bytes": {}, "modelled": {}}
    runs: dict[str, Callable[[], Any]] = {way: call(way, args) for way in ways}
    first = None
    for way, run in runs.items():
        dx, dweight = run()
        first = dweight if first is None else first
        error, allowed = off_by(dx, args)
        apart = float((dweight.float() - first.float()).norm() / first.float().norm())
        row["off_by"][way] = {"dx": error, "one product": allowed, "dweight, from the first way's": apart}
        row["passed"] = row.get("passed", True) and error <= 2.1 * allowed
        row["modelled"][way] = modelled(shape, way)
        del dx, dweight
    del first
    for way, run in runs.items():
        row["peak_bytes"][way] = peak_memory(run, torch.device("cuda"))
    if kernels:
        from gradient_tiles import steps

        row["kernels"] = steps(runs[ways[0]])
    known = loss_products(dict(zip(("x", "weight", "target"), args)))
    runs["products"] = lambda: torch.autograd.grad(known(), args[:2])
    times = measure(runs, "cuda", rounds=5, budget_ms=10.0)
    row["us"] = {name: round(found.median_us, 2) for name, found in times.items()}
    row["spread"] = {name: round(found.spread, 4) for name, found in times.items()}
    row["of_products"] = {way: round(row["us"][way] / row["us"]["products"], 4) for way in ways}
    return row


def main() -> int:
    """Exits with 1 where dx was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--only", default="", help="shapes whose names hold this")
    parser.add_argument("--zoo", type=int, help="a seed, from which calls of published models are drawn")
    parser.add_argument("--count", type=int, default=12, help="of those that are drawn")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    shapes = SHAPES if given.zoo is None else _drawn(given.zoo, given.count)
    shapes = [shape for shape in shapes if given.only in str(shape)]
    if given.dry:
        for shape in shapes:
            for way in ways_of(shape):
                modelled(shape, way, lines=True)
        return 0
    begun, found = time.monotonic(), {**provenance(), "rows": []}
    for shape in shapes:
        if time.monotonic() - begun > given.seconds:
            say(f"no time left for {shape}")
            continue
        row = timed(shape, given.kernels)
        found["rows"].append(row)
        say(json.dumps(row))
        if given.out:
            save(given.out, found)
        torch.cuda.empty_cache()
    say(f"{time.monotonic() - begun:.1f} s")
    return 0 if all(row["passed"] for row in found["rows"]) else 1


def _drawn(seed: int, count: int) -> tuple[Shape, ...]:
    found = []
    for case in zoo.sample("linear_cross_entropy", seed, count, False):
        *tokens, hidden = case.args["x"].shape
        found.append(Shape(case.name.split()[0], math.prod(tokens), hidden, case.args["weight"].shape[0]))
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
