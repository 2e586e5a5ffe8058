"""Adaptive precision: what a small language model loses at equal bytes, adaptive beside uniform widths, and the time
of a product with one packed weight.

    python benchmarks/adaptive_precision.py results.json [--cpu] [--seeds 3] [--processes 3] [--only PART]

Trains a byte-level model on the sources of Python's standard library for each seed, then packs it at 2.5, 3, 3.5 and 4
bits a weight. Uniform widths pass through the same quantiser and the same groups and are stored alike, tables of tiles
included; at 2.5 and 3.5 bits their loss is interpolated, in its logarithm, between whole bits. On a GPU also the time
of y = x W^T, 4096 x 14336, at 1, 16 and 64 rows, beside bf16 and torchao's int4 where that can be imported.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from common import provenance, save, say
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine import cases
from tilesmith.engine import ops as declared
from tilesmith.engine.timing import measure
from tilesmith.precision import (
    AllocationStrategy,
    PackedLinear,
    PrecisionConfig,
    QuantizationMode,
    create_ultra_precision_module,
)
from tilesmith.precision.adaptive.config import WIDTHS
from tilesmith.precision.adaptive.layer import pack_layer
from tilesmith.validate import check

OPS = ("quantize_packed", "dequantize_packed", "dequant_linear")
BITS = (2.5, 3, 3.5, 4)
SMALL = {
    "width": 128, "layers": 4, "heads": 4, "length": 128, "batch": 8, "steps": 500, "lr": 3e-3,
    "calibration": 8, "tokens": 2**15,
}  # fmt: skip
LARGE = {
    "width": 512, "layers": 12, "heads": 8, "length": 512, "batch": 32, "steps": 3000, "lr": 1e-3,
    "calibration": 24, "tokens": 2**20,
}  # fmt: skip
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided, by the number of seeds


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, inner = heads, width * 8 // 3 // 64 * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ByteModel(nn.Module):
    """A decoder over bytes with learned positions."""

    def __init__(self, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    p, std=0.02 if "blocks" not in name else width**-0.5 / (math.sqrt(2 * layers) if last else 1)
                )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def corpus() -> Tensor:
    """The bytes of the standard library's modules, file by file in a fixed random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"\n".join(paths[i].read_bytes() for i in order)), dtype=torch.uint8)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of a batch of bytes [B, T + 1]."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def windows(data: Tensor, length: int, count: int, seed: int, device: torch.device) -> Tensor:
    """`count` stretches of length + 1 bytes from anywhere in data."""
    start = torch.randint(len(data) - length - 1, (count, 1), generator=torch.Generator().manual_seed(seed))
    return data[start + torch.arange(length + 1)].long().to(device)


def trained(seed: int, data: Tensor, size: dict, device: torch.device) -> ByteModel:
    """A model after `size["steps"]` steps of AdamW."""
    torch.manual_seed(seed)
    model = ByteModel(size["width"], size["layers"], size["heads"], size["length"]).to(device)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=size["lr"], betas=(0.9, 0.95), fused=device.type == "cuda")
    steps = size["steps"]
    for step in range(steps):
        share = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = size["lr"] * share
        batch = windows(data, size["length"], size["batch"], seed * 10_000_000 + step, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def held_out_loss(model: nn.Module, batches: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(float(loss_of(model, batch)) for batch in batches) / len(batches)


def tables_of(model: nn.Module) -> int:
    """Bytes of the tables that say which tile has which width."""
    return sum(m.order.nbytes + m.strips.nbytes for m in model.modules() if isinstance(m, PackedLinear))


def quality(
    seed: int, data: Tensor, size: dict, device: torch.device, mode: QuantizationMode, strategies: list[str]
) -> dict:
    """The losses of one seed's model: trained, uniform, adaptive."""
    split = len(data) * 9 // 10
    training, unseen = data[:split], data[split:]
    start = time.perf_counter()
    model = trained(seed, training, size, device)
    spent = time.perf_counter() - start
    per_batch = 16 if device.type == "cpu" else 64
    count = size["tokens"] // size["length"] // per_batch
    tested = [windows(unseen, size["length"], per_batch, 900_000 + i, device) for i in range(count)]
    calibration = [windows(training, size["length"], 16, 5_000_000 + i, device) for i in range(size["calibration"])]
    base = held_out_loss(model, tested)
    row = {
        "seed": seed, "mode": mode.value, "parameters": sum(p.numel() for p in model.parameters()),
        "training s": round(spent, 1), "tested tokens": count * per_batch * size["length"], "loss": base,
        "uniform": {}, "adaptive": [],
    }  # fmt: skip

    def packed(strategy: AllocationStrategy, wanted: int) -> nn.Module:
        """A packed model of at most `wanted` bytes in all."""
        base_bytes = 2 * row["parameters"]
        config = PrecisionConfig(
            allocation_strategy=strategy,
            quantization_mode=mode,
            target_memory_reduction=1 - (wanted + 0.5) / base_bytes,
        )
        return create_ultra_precision_module(model, config, calibration=calibration, loss_fn=loss_of)

    sizes, losses = {}, {}
    for width in (2, 3, 4):
        made = packed(AllocationStrategy.UNIFORM, uniform_bytes(model, width))
        stats = made.get_precision_stats()
        found = {w for each in stats.layers.values() for w, n in each.tiles.items() if n}
        if found != {width}:
            raise RuntimeError(f"the uniform arm has the widths {found}, not {width}")
        sizes[width], losses[width] = stats.total_bytes, held_out_loss(made, tested) - base
        row["uniform"][width] = {"bytes": sizes[width], "tables": tables_of(made), "delta": losses[width]}
    for bits in BITS:
        low, high = math.floor(bits), math.ceil(bits)
        share = bits - low
        budget = int(sizes[low] * (1 - share) + sizes[high] * share)
        beside = math.exp(math.log(losses[low]) * (1 - share) + math.log(losses[high]) * share)
        for strategy in map(AllocationStrategy, strategies):
            made = packed(strategy, budget)
            stats = made.get_precision_stats()
            delta = held_out_loss(made, tested) - base
            tiles = {w: sum(each.tiles[w] for each in stats.layers.values()) for w in WIDTHS}
            row["adaptive"].append({
                "bits": bits, "strategy": strategy.value, "bytes": stats.total_bytes, "budget": budget,
                "delta": delta, "uniform delta": beside, "cut": 1 - delta / beside, "fallback": stats.fallback,
                "tiles": tiles, "share of fp16": stats.packed_bytes / (2 * packed_weights(made)),
            })  # fmt: skip
    return row


def packed_weights(model: nn.Module) -> int:
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, PackedLinear))


def uniform_bytes(model: nn.Module, width: int) -> int:
    """Bytes of a model whose linear layers are packed in one width, tables included."""
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights = module.weight.numel()
            strips, groups = module.out_features // 16, module.in_features // 64
            total += weights * width // 8 + weights // 64 * 4 + strips * (groups * 2 + 20)
        elif isinstance(module, nn.Embedding | nn.RMSNorm):
            total += module.weight.nbytes
    return total


def summary(rows: list[dict]) -> list[dict]:
    """For each budget and strategy the mean cut over the seeds with its 95 % interval."""
    found = []
    for bits in BITS:
        for strategy in dict.fromkeys(a["strategy"] for a in rows[0]["adaptive"]):
            cuts = [a["cut"] for row in rows for a in row["adaptive"] if (a["bits"], a["strategy"]) == (bits, strategy)]
            mean = statistics.mean(cuts)
            wide = T_95[len(cuts)] * statistics.stdev(cuts) / len(cuts) ** 0.5 if len(cuts) in T_95 else None
            interval = None if wide is None else [mean - wide, mean + wide]
            found.append({"bits": bits, "strategy": strategy, "cuts": cuts, "mean": mean, "interval": interval})
    return found


def wrong_values(device: torch.device) -> list[str]:
    """What is wrong with the kernels on their cases."""
    wrong = []
    for name in OPS:
        for case in cases(name):
            if case.tags & {"test", "gpu"}:
                for dtype in case.dtypes[-1:] if "gpu" in case.tags else case.dtypes:
                    result = check(declared()[name], "triton", case, device, dtype)
                    wrong += [] if result.passed else [f"{name} {case.name} {dtype}: {result.message}"]
    return wrong


def product_times(rows: int, columns: int, tokens: Sequence[int], device: torch.device) -> Iterator[dict]:
    """Median µs of y = x W^T, W [rows, columns], in bf16, for each number of rows of x. Each variant has 8 weights that
    take turns, so that none is in the L2 cache."""
    variants, said = product_variants(rows, columns, device)

    def turn(layers: list, x: Tensor):
        def call():
            for each in layers:
                each(x)

        return call

    for count in tokens:
        x = torch.randn(count, columns, device=device, dtype=torch.bfloat16)
        calls = {name: turn(layers, x) for name, layers in variants.items()}
        with torch.no_grad():
            found = measure(calls, device, rounds=7, budget_ms=60.0, warmup=2)
        us = {name: round(timing.median_us / COPIES, 2) for name, timing in found.items()}
        beside = {name: round(us["bf16"] / each, 2) for name, each in us.items()}
        yield {"work": f"{count} x {columns} x {rows}", **said, "us": us, "of bf16": beside}


def product_variants(rows: int, columns: int, device: torch.device) -> tuple[dict[str, list], dict[str, str]]:
    """Layers of one product by name, `COPIES` of each, and why there are none of torchao's if there are none."""
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias=False, device=device, dtype=torch.bfloat16)
    shape = rows // 16, columns // 64
    mixed = torch.tensor([3, 3, 3, 4, 4, 4, 4, 6])[torch.randint(8, shape)]  # 3.9 bits, as at 4 bits a weight
    variants: dict[str, list] = {"bf16": [copy.deepcopy(layer) for _ in range(COPIES)]}
    for name, widths in (("4 bits", torch.full(shape, 4)), ("mixed", mixed)):
        parts = dict(pack_layer(layer, widths).named_buffers())
        variants[name] = [PackedLinear({n: t.clone() for n, t in parts.items()}, rows, None) for _ in range(COPIES)]
    said = {}
    try:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        theirs = [nn.Sequential(copy.deepcopy(layer)) for _ in range(COPIES)]
        # the format of PyTorch's own kernel; the default one's are in a package of their own
        config = Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d")
        for each in theirs:
            quantize_(each, config)
        theirs[0](torch.randn(1, columns, device=device, dtype=torch.bfloat16))
        variants["torchao int4"] = theirs
    except (ImportError, RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as problem:
        said["torchao int4"] = f"{type(problem).__name__}: {problem}"
    return variants, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--cpu", action="store_true", help="a smaller model, on the CPU, and no times")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of training; 0: as the size has it")
    parser.add_argument("--mode", choices=[m.value for m in QuantizationMode], default="dynamic")
    parser.add_argument("--strategies", nargs="+", default=["entropy_based", "fisher"])
    parser.add_argument("--only", choices=("values", "times", "quality"))
    parser.add_argument("--processes", type=int, default=1, help="seeds at once")
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu else "cuda")
    size = dict(SMALL if args.cpu else LARGE)
    size["steps"] = args.steps or size["steps"]
    report = {**provenance(), "size": size}
    if not args.cpu and args.only in (None, "values"):
        report["wrong"] = wrong_values(device)
    if not args.cpu and not report.get("wrong") and args.only in (None, "times"):
        report["times"] = []
        for rows, columns in SHAPES:
            for each in product_times(rows, columns, (1, 16, 32, 64), device):
                report["times"].append(each)
                save(args.out, report)
    rows = []
    if not report.get("wrong") and args.only in (None, "quality"):
        common = (corpus(), size, device, QuantizationMode(args.mode), args.strategies)
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            for run in [pool.submit(quality, seed, *common) for seed in range(args.seeds)]:
                rows.append(run.result())
                report |= {"quality": rows, "summary": summary(rows) if len(rows) > 1 else []}
                save(args.out, report)
    save(args.out, report)
    say(json.dumps({k: report.get(k) for k in ("wrong", "times", "summary")}, indent=1))
    return 1 if report.get("wrong") else 0


SHAPES = ((4096, 14_336), (14_336, 4096))
COPIES = 8

if __name__ == "__main__":
    sys.exit(main())
