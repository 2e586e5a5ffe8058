"""Attention's forward by how many heads' queries share a tile of a window, and by the rows of a tile where tiles are
few, on one GPU of compute capability 9.0.

    PYTHONPATH=src python benchmarks/window_heads.py [results.json] [--only gemma] [--rounds 7] [--dry]

Each shape's candidates, 1, 2, 4 or 8 heads in the tiles of the configuration and in tiles of 64 rows, take turns in one
process, beside FlashAttention 4 where it is installed. A candidate whose values differ from those of the first by more
than the rounding of the dtype is named and not timed. A row says what the plan chose and predicted. `--dry` prints the
plans alone, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import provenance, save, say
from torch import Tensor

import tilesmith
from tilesmith import ops, use
from tilesmith.bench.peers import providers
from tilesmith.engine.timing import measure


class Call(NamedTuple):
    name: str
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    window: int  # 0 for none
    sinks: bool = False
    few_tiles: bool = False  # tiles of 64 rows are candidates, too


CALLS = (
    Call("gemma-4-e2b", 2, 2592, 8, 1, 256, 512),
    Call("gemma-3-1b", 4, 2048, 4, 1, 256, 512),
    Call("gemma-3-4b", 2, 4096, 8, 4, 256, 1024),
    Call("gemma-3-27b", 1, 8192, 32, 16, 128, 1024),
    Call("gpt-oss", 1, 4096, 64, 8, 64, 128, True),
    Call("gpt-oss, 4 rows", 4, 4096, 64, 8, 64, 128, True),
    Call("mistral", 1, 8192, 32, 8, 128, 4096),
    Call("head dim 256, short", 2, 4096, 8, 1, 256, 128),
    Call("head dim 128", 2, 4096, 32, 4, 128, 512),
    Call("head dim 128, short", 2, 4096, 32, 4, 128, 200),
    Call("head dim 64", 2, 4096, 64, 8, 64, 512),
    Call("head dim 64, four consumers", 2, 4096, 64, 8, 64, 1024),
    Call("head dim 64, three consumers", 1, 16384, 64, 8, 64, 1024),
    Call("few tiles, gemma-4-e4b", 1, 840, 8, 2, 256, 512, few_tiles=True),
    Call("few tiles, gemma-4-e4b, long", 1, 2048, 8, 2, 256, 512, few_tiles=True),
    Call("few tiles, gemma-3-1b", 1, 700, 4, 1, 256, 512, few_tiles=True),
    Call("few tiles, gemma-3-4b", 1, 1500, 8, 4, 256, 1024, few_tiles=True),
    Call("few tiles, gemma-3-12b", 1, 1000, 16, 8, 256, 1024, few_tiles=True),
    Call("few tiles, gemma-2-2b", 1, 512, 8, 4, 256, 0, few_tiles=True),
    Call("few tiles, gemma-4-26b", 1, 777, 16, 8, 256, 0, few_tiles=True),
    Call("few tiles, qwen3.5", 1, 1100, 8, 2, 256, 0, few_tiles=True),
    Call("few tiles, qwen3.5, two rows", 2, 1024, 16, 2, 256, 0, few_tiles=True),
    Call("few tiles, llama-3.2-3b", 1, 300, 24, 8, 128, 0, few_tiles=True),
    Call("few tiles, qwen2.5-1.5b", 1, 600, 12, 2, 128, 0, few_tiles=True),
    Call("few tiles, qwen3-0.6b", 1, 1024, 16, 8, 128, 0, few_tiles=True),
    Call("few tiles, mistral, window", 1, 900, 12, 4, 128, 512, few_tiles=True),
)


def inputs(call: Call, device: str) -> dict[str, Tensor]:
    """Random tensors, of tokens first in memory, as models have them."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    many = {"q": call.heads, "k": call.kv_heads, "v": call.kv_heads}
    found = {name: drawn(call.batch, call.tokens, n, call.dim).transpose(1, 2) for name, n in many.items()}
    return found | ({"sinks": drawn(call.heads)} if call.sinks else {})


def mask_of(call: Call) -> ops.Mask:
    return ops.Mask(causal=True, window=(call.window - 1, 0) if call.window else None)


def candidates(call: Call) -> dict[str, str]:
    """Pins by name: the heads of a tile, and 64 rows where it has so few."""
    shared = [n for n in (1, 2, 4, 8) if call.heads // call.kv_heads % n == 0] if call.window else [1]
    found = {str(heads): f"hopper:heads={heads}" for heads in shared}
    if call.few_tiles:
        found = {name: f"{pin}:consumers=2" for name, pin in found.items()}
        found |= {f"{name} in 64 rows": pin.replace("consumers=2", "consumers=1") for name, pin in found.items()}
    return found


def attend(call: Call, tensors: dict[str, Tensor], pin: str) -> Callable[[], Any]:
    """A call by the tiles that a pin names."""
    mask = mask_of(call)

    def run() -> Any:
        with use(attention=pin):
            return ops.attention(**tensors, mask=mask)

    return run


def reason(call: Call) -> str:
    """What the plan says of its tiles."""
    told = str(tilesmith.explain("attention", **inputs(call, "meta"), mask=mask_of(call), arch="sm90"))
    starts = ("window: ", "a window of ", "predicted times", "tiles of ")
    return "; ".join(line.strip() for line in told.splitlines() if line.strip().startswith(starts))


def flash_attention_4(call: Call, tensors: dict[str, Tensor]) -> Callable[[], Any] | None:
    """None where it is not installed."""
    window = {"causal": True, "window_left": call.window - 1, "window_right": 0 if call.window else -1}
    try:
        return providers("attention")["flash4"](tensors | window)
    except ImportError:
        return None


def row(call: Call, rounds: int) -> dict[str, Any]:
    tensors, found, wrong = inputs(call, "cuda"), {}, {}
    pins = candidates(call)
    out, lse = attend(call, tensors, next(iter(pins.values())))()
    for name, pin in pins.items():
        run = attend(call, tensors, pin)
        other, other_lse = run()
        apart = (other.float() - out.float()).abs().max().item() / out.float().abs().max().item()
        apart_lse = (other_lse - lse).abs().max().item()
        if apart <= 2**-7 and apart_lse <= 1e-3:  # else, or where one is NaN
            found[name] = run
        else:
            wrong[name] = [apart, apart_lse]
    peer = flash_attention_4(call, tensors)
    times = measure(found | ({"FlashAttention 4": peer} if peer else {}), "cuda", rounds=rounds, budget_ms=4.0)
    return {
        "call": call._asdict(), "us": {name: round(x.median_us, 2) for name, x in times.items()},
        "spread": {name: round(x.spread, 3) for name, x in times.items()}, "wrong": wrong, "plan": reason(call),
    }  # fmt: skip


def main() -> int:
    """Exits with 1 where a value was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="plans alone, without a GPU")
    options = parser.parse_args()
    rows = []
    for call in (c for c in CALLS if options.only in c.name):
        if options.dry:
            say(call.name, reason(call))
            continue
        rows.append(row(call, options.rounds))
        say(call.name, json.dumps(rows[-1]["us"]), rows[-1]["wrong"] or "", rows[-1]["plan"])
        if options.out:
            save(options.out, provenance() | {"rows": rows})
        torch.cuda.empty_cache()
    return 1 if any(one["wrong"] for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
