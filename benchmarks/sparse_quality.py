"""Quality of block-sparse attention: what a small byte model on real text loses where 90 % of the blocks are left out.

    python benchmarks/sparse_quality.py results.json [--tiny] [--limit SECONDS]

Trains a dense model on the sources of Python's standard library and of torch, at 128, 2,048 and 16,384 bytes of
context, with random strings that come again far away. Copying is learned first, of sequences that repeat one random
string: among text, too few bytes depend on it. Then dense, DYNAMIC_THRESHOLD, LEARNED and a sliding window of as many
pairs of queries and keys go on from there for the same steps on the same bytes; before that LEARNED's indexers, which
start from the model's projections, learn alone, of the dense attention, with the model's weights fixed. Rows: the
validation loss on whole text, with what it differs from dense's by and the standard error of that over sequences, and
how often the bytes of a string that came before are predicted (copy). The bars say nothing where dense itself does not
copy, or where the window loses no more than the differences scatter: `answers` says which of them are answered. The
curve is that of the dense model's weights, without training for sparsity; it ends, with fewer rows, once --limit
seconds (125) are over. Kernels are compiled in other processes while the dense model learns. --tiny: sizes for a CPU,
which show that it runs and nothing else.
"""

import argparse
import copy
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from common import provenance, save, say
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.attention import DynamicSparseAttention, SparsePattern, estimated_shares, pattern_blocks
from tilesmith.attention.budget import budget, fitting_block
from tilesmith.attention.estimate import chosen_blocks
from tilesmith.attention.layers import FlashAttention3
from tilesmith.attention.report import sparsity_report
from tilesmith.nn import RotaryEmbedding
from tilesmith.ops.attn.blocks_reference import stretch_means

SPARSITY = 0.9
CURVE = (0.9, 0.8, 0.7, 0.95, 0.5)
STRING, GIVEN = 32, 8  # bytes of a string that is copied, and of those the ones that say which
LETTERS = torch.arange(128, 256).to(torch.uint8)  # of strings: bytes that the text hardly has, so that few tell which


class Phase(NamedTuple):
    """A phase of training: bytes of a sequence, strings in it that come again, learning rate, and steps and seconds, of
    which the first to be over ends it. share: of a step's bytes, where steps count for more than what they see.
    periodic: the share of sequences that repeat one random string."""

    length: int
    strings: int
    rate: float
    steps: int
    seconds: float = math.inf
    share: float = 1.0
    periodic: float = 0.0


class Size(NamedTuple):
    """A model, its training and its test. tokens: of a step. dense: phases of the dense model, from short sequences,
    which teach it to copy, to whole contexts of text. alone, arm: LEARNED's indexers alone; an arm. tested:
    sequences."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    tokens: int
    dense: tuple[Phase, ...]
    alone: Phase
    arm: Phase
    tested: int

    @property
    def length(self) -> int:
        """Bytes of a context."""
        return self.arm.length


LARGE = Size(
    512, 6, 8, 4, 65536,
    (
        Phase(128, 1, 2e-3, 600, 14.0, 0.25, 1.0), Phase(2048, 8, 1.5e-3, 700, 30.0, periodic=0.5),
        Phase(16384, 64, 1e-3, 200, 20.0, periodic=0.25),
    ),
    Phase(16384, 64, 0.0, 40), Phase(16384, 64, 3e-4, 120), 32,
)  # fmt: skip
TINY = Size(
    32, 2, 4, 2, 1024,
    (Phase(128, 1, 2e-3, 3, periodic=1.0), Phase(512, 4, 1e-3, 2, periodic=0.5)),
    Phase(512, 4, 0.0, 2), Phase(512, 4, 3e-4, 2), 2,
)  # fmt: skip


class Delays(nn.Module):
    """Learned sums of x and what came up to three bytes before it; at first a quarter of the features each. A key then
    knows which bytes came before its own, without a layer for it."""

    def __init__(self, width: int):
        super().__init__()
        self.shares = nn.Parameter(torch.eye(4).repeat(1, width // 4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares.to(x.dtype)
        out = shares[0] * x
        for distance in range(1, len(shares)):
            out = out + shares[distance] * F.pad(x[:, :-distance], (0, 0, distance, 0))
        return out


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, size: Size):
        super().__init__()
        width, inner = size.width, size.width * 8 // 3 // 64 * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention: nn.Module = FlashAttention3(width, size.heads, num_kv_heads=size.kv_heads)
        self.delays = Delays(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        x = x + self.attention(self.delays(self.norm1(x)), rotary=rotary)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ByteModel(nn.Module):
    """A decoder over bytes; positions are rotary."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        # half of a head's features are not rotated: over 8,192 bytes even the slowest of 32 pairs turns by a radian
        self.rotary = RotaryEmbedding(size.width // size.heads // 2, size.length)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2 and not name.endswith("shares"):
                ends = name.endswith(("o_proj.weight", "down.weight"))
                scale = size.width**-0.5 / (math.sqrt(2 * size.layers) if ends else 1)
                nn.init.normal_(p, std=scale if "blocks" in name else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head(self.norm(x))


def corpus(tiny: bool) -> Tensor:
    """The bytes of modules of the standard library and of torch, file by file in a fixed random order."""
    roots = [Path(sysconfig.get_paths()["stdlib"])] + ([] if tiny else [Path(torch.__file__).parent])
    paths = [
        p for root in roots for p in sorted(root.rglob("*.py")) if "site-packages" not in p.relative_to(root).parts
    ]
    paths = paths[:80] if tiny else paths
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"\n".join(paths[i].read_bytes() for i in order)), dtype=torch.uint8)


def windows(data: Tensor, length: int, count: int, seed: int) -> Tensor:
    """`count` stretches of length + 1 bytes from anywhere in data."""
    start = torch.randint(len(data) - length - 1, (count, 1), generator=torch.Generator().manual_seed(seed))
    return data[start + torch.arange(length + 1)]


def with_strings(batch: Tensor, strings: int, seed: int) -> tuple[Tensor, Tensor]:
    """The batch with random strings in its first half that come again in its second half, and the places [B, n] at
    which a byte is the successor of one that the string's beginning tells."""
    generator = torch.Generator().manual_seed(seed)
    batch, half = batch.clone(), (batch.shape[1] - 1) // 2
    slot = half // strings
    text = LETTERS[torch.randint(len(LETTERS), (len(batch), strings, STRING), generator=generator)].flatten(1)

    def places(first: int, order: Tensor) -> Tensor:
        shift = torch.randint(0, slot - STRING + 1, (len(batch), strings, 1), generator=generator)
        return (first + order[..., None] * slot + shift + torch.arange(STRING)).flatten(1)

    order = torch.arange(strings).expand(len(batch), -1)
    shuffled = torch.rand(len(batch), strings, generator=generator).argsort(-1)
    again = places(half, shuffled)
    batch.scatter_(1, places(0, order), text).scatter_(1, again, text)
    return batch, again.unflatten(1, (strings, STRING))[:, :, GIVEN:].flatten(1) - 1


def repeated(length: int, count: int, seed: int) -> Tensor:
    """`count` sequences of length + 1 bytes, each a random string over and over, an eighth to a half as long as it:
    the next byte follows from what stood behind the same bytes before, not from one distance."""
    generator = torch.Generator().manual_seed(seed)
    text = LETTERS[torch.randint(len(LETTERS), (count, length), generator=generator)]
    period = torch.randint(length // 8, length // 2, (count, 1), generator=generator)
    return text.gather(1, torch.arange(length + 1) % period)


def run(model: nn.Module, batch: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of all bytes but the last one [B, T, 256], and the bytes that come next."""
    batch = batch.to(device).long()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(batch[:, :-1]), batch[:, 1:]


def step(model: ByteModel, data: Tensor, size: Size, phase: Phase, seed: int, device: torch.device) -> Tensor:
    """The loss of one step, whose gradients are added."""
    count = int(phase.share * size.tokens) // phase.length
    batch, _ = with_strings(windows(data, phase.length, count, seed), phase.strings, seed)
    of_strings = round(phase.periodic * count)
    batch[:of_strings] = repeated(phase.length, of_strings, seed)
    logits, wanted = run(model, batch, device)
    loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
    loss.backward()
    return loss.detach()


def train(model: ByteModel, data: Tensor, size: Size, phase: Phase, device: torch.device) -> dict:
    """A phase of training with AdamW; what is compiled before its first step does not count."""
    indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
    known = set(map(id, indexers))
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": indexers, "rate": 2e-3}, {"params": rest if phase.rate else [], "rate": phase.rate}]
    optimizer = torch.optim.AdamW(
        [g | {"lr": 0.0} for g in groups if g["params"]], betas=(0.9, 0.95), weight_decay=0.05,
        fused=device.type == "cuda",
    )  # fmt: skip
    model.train()
    seed = 1_000_000 * phase.length + 1000 * phase.steps  # other bytes than those of a phase as long
    float(step(model, data, size, phase, seed - 1, device))
    model.zero_grad()
    began, steps, lost = time.perf_counter(), 0, []
    while (share := max(steps / phase.steps, (time.perf_counter() - began) / phase.seconds)) < 1.0:
        ramp = min(1.0, (steps + 1) / min(50, 1 + phase.steps // 10))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * ramp * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
        loss = step(model, data, size, phase, seed + steps, device)
        nn.utils.clip_grad_norm_(rest, 1.0)
        optimizer.step()
        model.zero_grad()
        steps += 1
        if steps % 8 == 0:
            lost.append(float(loss))  # the host waits, so that the clock means something
    return {
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 1),
        "losses": [round(x, 4) for x in lost[::4]],
    }


@torch.no_grad()
def judge(model: ByteModel, unseen: Tensor, size: Size, device: torch.device, few: bool = False) -> dict:
    """The mean loss of sequences without strings, that of their second halves, the losses of each sequence, and the
    share of copied bytes that are predicted."""
    model.eval()
    losses: list[float] = []
    late, right, asked = 0.0, 0, 0
    per = max(1, size.tokens // size.length)
    for i in range(0, max(per, size.tested // (4 if few else 1)), per):
        logits, wanted = run(model, windows(unseen, size.length, per, 7_000_000 + i), device)
        each = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
        losses += each.mean(1).tolist()
        late += float(each[:, size.length // 2 :].mean(1).sum())
        batch, places = with_strings(windows(unseen, size.length, per, 8_000_000 + i), size.arm.strings, 8_000_000 + i)
        logits, wanted = run(model, batch, device)
        hit = (logits.argmax(-1) == wanted).gather(1, places.to(device))
        right, asked = right + int(hit.sum()), asked + hit.numel()
    return {"loss": sum(losses) / len(losses), "late loss": late / len(losses), "copy": right / asked, "each": losses}


def with_attention(model: ByteModel, make: Callable[[], nn.Module]) -> ByteModel:
    """A copy of the model with other attention layers that have its weights."""
    made = copy.deepcopy(model)
    for block in made.blocks:
        old, new = block.attention, make().to(next(block.parameters()).device)
        missing = new.load_state_dict(old.state_dict(), strict=False)
        if missing.unexpected_keys or any("indexer" not in key for key in missing.missing_keys):
            raise RuntimeError(f"the attention layers differ in their parameters: {missing}")
        if getattr(new, "indexer", None) is not None:
            new.indexer.start_from(new)
        block.attention = new
    return made


def window_of(size: Size) -> int:
    """The window that has as many pairs of queries and keys as the blocks of the sparse layers."""
    block = fitting_block(size.length, size.length, True, SPARSITY)
    kept = budget(size.length, size.length, block, True, SPARSITY, torch.device("cpu"))
    rows = -(-size.length // block)
    pairs = (kept.total - rows) * block**2 + rows * block * (block + 1) // 2
    sizes = range(size.length)
    return next(w for w in sizes if (w + 1) * size.length - w * (w + 1) // 2 >= pairs)


def arms(size: Size) -> dict[str, Callable[[], nn.Module]]:
    sizes = {"num_kv_heads": size.kv_heads}

    def sparse(pattern: SparsePattern) -> Callable[[], nn.Module]:
        return lambda: DynamicSparseAttention(size.width, size.heads, SPARSITY, pattern, **sizes)

    return {
        "dense": lambda: FlashAttention3(size.width, size.heads, **sizes),
        "window": lambda: FlashAttention3(size.width, size.heads, window=window_of(size), **sizes),
        "dynamic": sparse(SparsePattern.DYNAMIC_THRESHOLD),
        "learned": sparse(SparsePattern.LEARNED),
    }


def set_target(model: ByteModel, target: str) -> None:
    """What LEARNED's indexers learn of: all blocks ("dense"), or those that are kept ("selected")."""
    for block in model.blocks:
        if isinstance(block.attention, DynamicSparseAttention):
            block.attention.index_target = target


def compiled(name: str, size: Size) -> None:
    """Leave the kernels of an arm's steps and tests in Triton's cache. One layer has the shapes of all."""
    device, one, data = torch.device("cuda"), size._replace(layers=1), corpus(tiny=True)
    model = with_attention(ByteModel(one).to(device), arms(one)[name])
    for target in ("dense", "selected") if name == "learned" else ("selected",):
        set_target(model, target)
        step(model, data, one, size.arm, 0, device)
    judge(model, data, one._replace(tested=1), device)


def curve(
    model: ByteModel, unseen: Tensor, size: Size, device: torch.device, over: Callable[[], bool] = lambda: False
) -> list[dict]:
    """Losses of the dense model's weights under patterns that nobody trained it for, until `over`."""
    rows: list[dict] = []
    for sparsity in CURVE:
        for pattern in (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.RANDOM, SparsePattern.LOCAL_GLOBAL):
            if over():
                return rows
            made = with_attention(
                model,
                lambda s=sparsity, p=pattern: DynamicSparseAttention(
                    size.width, size.heads, s, p, num_kv_heads=size.kv_heads
                ),
            )
            rows.append({"pattern": pattern.value, "sparsity": sparsity, **judge(made, unseen, size, device, few=True)})
    return rows


@torch.no_grad()
def retained(model: ByteModel, unseen: Tensor, size: Size, device: torch.device) -> dict[str, list[float]]:
    """The share of the dense model's attention, layer by layer, that blocks hold which are chosen in several ways."""
    found: dict[str, list[float]] = {}
    heads = size.kv_heads

    def look(layer: DynamicSparseAttention, args: tuple, options: dict) -> None:
        q, k, v, _ = layer._inputs(args[0], None, options["rotary"])
        block, tokens = fitting_block(size.length, size.length, True, SPARSITY), q.shape[2]
        plan = budget(tokens, tokens, block, True, SPARSITY, q.device)
        means = [stretch_means(x, block) for x in (q, k)]
        scores = {f"{n} keys": estimated_shares(q, k, block_size=block, key_samples=n) for n in (32, 64, 128)}
        scores["all queries and keys"] = ops.block_shares(q, k, None, True, block)
        scores["one mean a block"] = ops.block_shares(*means, None, True, 1, 1)
        lists = {name: chosen_blocks(x, plan, block, first=1)[1] for name, x in scores.items()}
        for p in (SparsePattern.RANDOM, SparsePattern.LOCAL_GLOBAL):
            lists[p.value] = pattern_blocks(p, tokens, tokens, SPARSITY, heads=heads, block_size=block, device=q.device)
        for name, blocks in lists.items():
            mass = sparsity_report(q, k, v, blocks, plan.seen, causal=True).retained_mass
            found.setdefault(name, []).append(round(mass, 4))

    every = {"sparsity_ratio": 0.0, "pattern": SparsePattern.LOCAL_GLOBAL, "num_kv_heads": heads}
    made = with_attention(model, lambda: DynamicSparseAttention(size.width, size.heads, **every))
    for block in made.blocks:
        block.attention.register_forward_pre_hook(look, with_kwargs=True)
    run(made.eval(), windows(unseen, size.length, 1, 9_000_000), device)
    return found


def compared(rows: dict[str, dict]) -> dict[str, dict]:
    """What each arm loses against dense, which went on for as many steps: sequences are the same, so their differences
    scatter less than their losses."""
    base, found = rows["dense"], {}
    for name, row in rows.items():
        if name == "dense":
            continue
        rise = torch.tensor(row["each"], dtype=torch.float64) - torch.tensor(base["each"], dtype=torch.float64)
        found[name] = {
            "rise of loss": row["loss"] / base["loss"] - 1,
            "its standard error": float(rise.std() / math.sqrt(len(rise))) / base["loss"],
            "rise of late loss": row["late loss"] / base["late loss"] - 1,
            "copy beside dense": row["copy"] / max(base["copy"], 1e-9),
        }
    window = found["window"]
    found["answers"] = {
        "dense copies": base["copy"] > 0.9,
        "window loses measurably": window["rise of loss"] > 4 * window["its standard error"],
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=125.0)
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    size = TINY if args.tiny else LARGE
    began, data = time.perf_counter(), corpus(args.tiny)
    split = len(data) * 19 // 20
    training, unseen = data[:split], data[split:]
    pool = ProcessPoolExecutor(len(arms(size)), mp_context=get_context("spawn"))
    jobs = [] if args.tiny else [pool.submit(compiled, name, size) for name in arms(size)]
    torch.manual_seed(0)
    model = ByteModel(size).to(device)
    found: dict = {
        **provenance(),
        "size": size._asdict(), "bytes": len(data), "parameters": sum(p.numel() for p in model.parameters()),
        "sparsity": SPARSITY, "window": window_of(size), "training": {}, "rows": {},
    }  # fmt: skip

    def keep(name: str) -> None:
        found["seconds"] = round(time.perf_counter() - began, 1)
        save(args.out, found)
        told = {key: value for key, value in found["rows"].get(name, {}).items() if key != "each"}
        say(f"{found['seconds']} s: {name} {json.dumps(told or found['training'].get(name, ''))}")

    for phase in size.dense:
        name = f"{phase.length} bytes"
        found["training"][name] = train(model, training, size, phase, device)
        keep(name)
    # what failed there fails here, too, or takes longer
    found["compiled apart"] = [str(job.exception() or "") for job in jobs]
    pool.shutdown()
    found["rows"]["before"] = judge(model, unseen, size, device)
    found["retained mass"] = retained(model, unseen, size, device)
    keep("before")
    for name, make in arms(size).items():
        made = with_attention(model, make)
        if name == "learned":
            set_target(made, "dense")
            found["training"]["learned, indexers alone"] = train(made, training, size, size.alone, device)
            set_target(made, "selected")
        found["training"][name] = train(made, training, size, size.arm, device)
        found["rows"][name] = judge(made, unseen, size, device)
        keep(name)
    found["compared"] = compared({name: found["rows"][name] for name in arms(size)})
    say(json.dumps(found["compared"]))
    found["curve"] = curve(model, unseen, size, device, lambda: time.perf_counter() - began > args.limit)
    keep("curve")
    return 0


if __name__ == "__main__":
    sys.exit(main())
