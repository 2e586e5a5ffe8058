"""Quality of block-sparse attention: what a small byte model on real text loses where 90 % of the blocks are left out.

    python benchmarks/sparse_quality.py results.json [--tiny] [--limit SECONDS]

Trains a dense model on the sources of Python's standard library and of torch, at 2,048 and then at 16,384 bytes of
context, with random strings that come again far away. Then dense, DYNAMIC_THRESHOLD, LEARNED and a sliding window of as
many pairs of queries and keys go on alike for few steps from there. Rows: the validation loss on whole text, and how
often the bytes of a string that came before are predicted (copy). The curve is that of the dense model's weights,
without training for sparsity; it ends, with fewer rows, once --limit seconds (90) are over. --tiny: sizes for a CPU,
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
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.attention import DynamicSparseAttention, SparsePattern
from tilesmith.attention.budget import budget, fitting_block
from tilesmith.attention.layers import FlashAttention3
from tilesmith.nn import RotaryEmbedding

SPARSITY = 0.9
CURVE = (0.9, 0.8, 0.7, 0.95, 0.5)
STRING, GIVEN = 32, 8  # bytes of a string that is copied, and of those the ones that say which
LETTERS = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyz0123456789"), dtype=torch.uint8)


class Size(NamedTuple):
    """A model, its training and its test. steps, seconds: of the three phases, each of which ends with the first of
    both. tokens: of a step. strings: of a sequence that come again. tested: sequences."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    short: int
    length: int
    tokens: int
    steps: tuple[int, int, int]
    seconds: tuple[float, float, float]
    strings: int
    tested: int


LARGE = Size(512, 6, 8, 4, 2048, 16384, 65536, (450, 120, 40), (24.0, 14.0, 9.0), 16, 16)
TINY = Size(32, 2, 4, 2, 128, 512, 1024, (3, 2, 2), (60.0, 60.0, 60.0), 2, 2)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, size: Size):
        super().__init__()
        width, inner = size.width, size.width * 8 // 3 // 64 * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention: nn.Module = FlashAttention3(width, size.heads, num_kv_heads=size.kv_heads)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary=rotary)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ByteModel(nn.Module):
    """A decoder over bytes with rotary positions."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.rotary = RotaryEmbedding(size.width // size.heads, size.length)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
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


def run(model: nn.Module, batch: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of all bytes but the last one [B, T, 256], and the bytes that come next."""
    batch = batch.to(device).long()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(batch[:, :-1]), batch[:, 1:]


def train(
    model: ByteModel, data: Tensor, size: Size, phase: int, device: torch.device, rate: float,
    before: Callable[[float], None] = lambda share: None,
) -> dict:  # fmt: skip
    """A phase of training with AdamW. before: called with the share of the phase that is over."""
    length = size.short if phase == 0 else size.length
    indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
    known = set(map(id, indexers))
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": rest, "rate": rate}, {"params": indexers, "rate": 2e-3}]
    optimizer = torch.optim.AdamW(
        [g | {"lr": 0.0} for g in groups if g["params"]], betas=(0.9, 0.95), weight_decay=0.05,
        fused=device.type == "cuda",
    )  # fmt: skip
    began, steps, lost = time.perf_counter(), 0, []
    model.train()
    while (share := max(steps / size.steps[phase], (time.perf_counter() - began) / size.seconds[phase])) < 1.0:
        before(share)
        ramp = min(1.0, (steps + 1) / (50 if phase == 0 else 5))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * ramp * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
        seed = phase * 1_000_000 + steps
        batch, _ = with_strings(
            windows(data, length, size.tokens // length, seed), max(1, size.strings * length // size.length), seed
        )
        logits, wanted = run(model, batch, device)
        loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 8 == 0:
            lost.append(float(loss))  # the host waits, so that the clock means something
    return {
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 1),
        "losses": [round(x, 4) for x in lost[::4]],
    }


@torch.no_grad()
def judge(model: ByteModel, unseen: Tensor, size: Size, device: torch.device, few: bool = False) -> dict[str, float]:
    """The mean loss of sequences without strings, that of their second halves, and the share of copied bytes that are
    predicted."""
    model.eval()
    losses, late, right, asked = [], [], 0, 0
    per = max(1, size.tokens // size.length)
    for i in range(0, max(per, size.tested // (3 if few else 1)), per):
        logits, wanted = run(model, windows(unseen, size.length, per, 7_000_000 + i), device)
        each = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
        losses.append(float(each.mean()))
        late.append(float(each[:, size.length // 2 :].mean()))
        batch, places = with_strings(windows(unseen, size.length, per, 8_000_000 + i), size.strings, 8_000_000 + i)
        logits, wanted = run(model, batch, device)
        hit = (logits.argmax(-1) == wanted).gather(1, places.to(device))
        right, asked = right + int(hit.sum()), asked + hit.numel()
    return {"loss": sum(losses) / len(losses), "late loss": sum(late) / len(late), "copy": right / asked}


def with_attention(model: ByteModel, make: Callable[[], nn.Module]) -> ByteModel:
    """A copy of the model with other attention layers that have its weights."""
    made = copy.deepcopy(model)
    for block in made.blocks:
        old, new = block.attention, make().to(next(block.parameters()).device)
        missing = new.load_state_dict(old.state_dict(), strict=False)
        if missing.unexpected_keys or any("indexer" not in key for key in missing.missing_keys):
            raise RuntimeError(f"the attention layers differ in their parameters: {missing}")
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


def towards_selected(model: ByteModel) -> Callable[[float], None]:
    """LEARNED's indexers look at all blocks in the first half of the phase, at those that are kept in the second."""

    def set_target(share: float) -> None:
        for block in model.blocks:
            if isinstance(block.attention, DynamicSparseAttention):
                block.attention.index_target = "dense" if share < 0.5 else "selected"

    return set_target


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


def compared(rows: dict[str, dict]) -> dict[str, dict[str, float]]:
    """What each arm loses against dense, which went on for as many steps."""
    base = rows["dense"]
    return {
        name: {
            "rise of loss": row["loss"] / base["loss"] - 1,
            "rise of late loss": row["late loss"] / base["late loss"] - 1,
            "copy beside dense": row["copy"] / max(base["copy"], 1e-9),
        }
        for name, row in rows.items()
        if name != "dense"
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=90.0)
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    size = TINY if args.tiny else LARGE
    began, data = time.perf_counter(), corpus(args.tiny)
    split = len(data) * 19 // 20
    training, unseen = data[:split], data[split:]
    torch.manual_seed(0)
    model = ByteModel(size).to(device)
    found: dict = {
        "machine": {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else "", "torch": torch.__version__},
        "size": size._asdict(), "bytes": len(data), "parameters": sum(p.numel() for p in model.parameters()),
        "sparsity": SPARSITY, "window": window_of(size), "training": {}, "rows": {},
    }  # fmt: skip

    def save(name: str) -> None:
        found["seconds"] = round(time.perf_counter() - began, 1)
        Path(args.out).write_text(json.dumps(found, indent=1), encoding="utf-8")
        sys.stdout.write(f"{found['seconds']} s: {name} {json.dumps(found['rows'].get(name, ''))}\n")
        sys.stdout.flush()

    for phase, rate in ((0, 2e-3), (1, 1e-3)):
        found["training"][f"dense, phase {phase}"] = train(model, training, size, phase, device, rate)
        save(f"phase {phase}")
    found["rows"]["before"] = judge(model, unseen, size, device)
    save("before")
    for name, make in arms(size).items():
        made = with_attention(model, make)
        found["training"][name] = train(made, training, size, 2, device, 3e-4, towards_selected(made))
        found["rows"][name] = judge(made, unseen, size, device)
        save(name)
    found["compared"] = compared({name: found["rows"][name] for name in arms(size)})
    sys.stdout.write(json.dumps(found["compared"]) + "\n")
    found["curve"] = curve(model, unseen, size, device, lambda: time.perf_counter() - began > args.limit)
    save("curve")
    return 0


if __name__ == "__main__":
    sys.exit(main())
