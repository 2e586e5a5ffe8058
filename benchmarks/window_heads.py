"""Attention's forward with a window by how many heads' queries share a tile, on one GPU of compute capability 9.0.

    PYTHONPATH=src python benchmarks/window_heads.py [results.json] [--only gemma] [--rounds 7] [--dry]

Each shape's candidates, 1, 2, 4 or 8 heads, take turns in one process, beside FlashAttention 4 where it is installed. A
candidate whose values differ from those of one head by more than the rounding of the dtype is named and not timed. A
row says what the plan chose and predicted. `--dry` prints the plans alone, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from host_bound import provenance
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
    window: int
    sinks: bool = False


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
)


def say(*what: object) -> None:
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def inputs(call: Call, device: str) -> dict[str, Tensor]:
    """Random tensors, of tokens first in memory, as models have them."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    many = {"q": call.heads, "k": call.kv_heads, "v": call.kv_heads}
    found = {name: drawn(call.batch, call.tokens, n, call.dim).transpose(1, 2) for name, n in many.items()}
    return found | ({"sinks": drawn(call.heads)} if call.sinks else {})


def candidates(call: Call) -> list[int]:
    return [heads for heads in (1, 2, 4, 8) if call.heads // call.kv_heads % heads == 0]


def attend(call: Call, tensors: dict[str, Tensor], heads: int) -> Callable[[], Any]:
    """A call whose tiles hold queries of so many heads; 0: of as many as the plan chooses."""
    mask, pin = ops.Mask(causal=True, window=(call.window - 1, 0)), f"hopper:heads={heads}" if heads else "hopper"

    def run() -> Any:
        with use(attention=pin):
            return ops.attention(**tensors, mask=mask)

    return run


def reason(call: Call) -> str:
    """What the plan says of the window."""
    mask = ops.Mask(causal=True, window=(call.window - 1, 0))
    told = str(tilesmith.explain("attention", **inputs(call, "meta"), mask=mask, arch="sm90"))
    return next(
        (line.strip() for line in told.splitlines() if line.strip().startswith(("window: ", "a window of "))), ""
    )


def flash_attention_4(call: Call, tensors: dict[str, Tensor]) -> Callable[[], Any] | None:
    """None where it is not installed."""
    window = {"causal": True, "window_left": call.window - 1, "window_right": 0}
    try:
        return providers("attention")["flash4"](tensors | window)
    except ImportError:
        return None


def row(call: Call, rounds: int) -> dict[str, Any]:
    tensors, found, wrong = inputs(call, "cuda"), {}, {}
    out, lse = attend(call, tensors, 1)()
    for heads in candidates(call):
        run = attend(call, tensors, heads)
        other, other_lse = run()
        apart = (other.float() - out.float()).abs().max().item() / out.float().abs().max().item()
        apart_lse = (other_lse - lse).abs().max().item()
        if apart <= 2**-7 and apart_lse <= 1e-3:  # else, or where one is NaN
            found[str(heads)] = run
        else:
            wrong[heads] = [apart, apart_lse]
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
            Path(options.out).write_text(json.dumps(provenance() | {"rows": rows}, indent=1), encoding="utf-8")
        torch.cuda.empty_cache()
    return 1 if any(one["wrong"] for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
