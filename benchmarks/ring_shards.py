"""Context parallelism on one GPU: errors of shards in one process, and what one rank of a ring holds and takes.

    python benchmarks/ring_shards.py [--only errors|memory|time] [--tokens 32768] [--ranks 8] [--device cuda]
        [--seconds 120]

A row of JSON each. errors: of out, dq, dk and dv, relative to fp64, of 1, 2, 4 and 8 shards (`LocalRing`), beside
kernels whose results are rounded before they are merged, as they all were. memory: of one rank of --ranks without the
others (`bench.one_rank`), in each pass, beside q, k, v, out and lse (and dout and the gradients) in shards of keys and
values, at so many tokens and at twice as many, beside what the model has. time: such a rank's forward, and forward and
backward, in milliseconds, with all heads at once and rounded results ("before"), with all heads at once ("whole") and
in parts ("now"), in turns. Ends before a measurement that would begin after --seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from common import say
from torch import Tensor

from tilesmith import ops, use
from tilesmith.bench.one_rank import OneRank
from tilesmith.distributed import Layout, LocalRing, context_parallel_attention, cost, parts
from tilesmith.distributed.kernels import KERNELS, Ours
from tilesmith.distributed.pieces import Sight

CAUSAL = ops.Mask(causal=True)
HEADS = ((16, 16), (32, 8), (64, 8))
ROUNDS = 5


class Rounding(Ours):
    """Our kernels, with results rounded before they are merged; gradients are fp32 as they are."""

    def forward(self, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """As of `Ours`, never in fp32."""
        return super().forward(q, *rest[:-1], False)


# a call's parts are kept with its kernel: other parts, another kernel
KERNELS |= {"rounding": Rounding(), "whole": Ours()}
NAMES = {"before": "rounding", "whole": "whole", "now": "tilesmith"}


@contextmanager
def all_heads_at_once() -> Iterator[None]:
    """No parts of heads, whatever they hold."""
    room, parts.ROOM = parts.ROOM, float("inf")
    try:
        yield
    finally:
        parts.ROOM = room


def divided(heads: int, kv_heads: int, size: int, tokens: int, device: str, dim: int = 128) -> cost.RingParts:
    """How a ring of so many ranks, of so many tokens each, divides its heads."""
    layout = Layout.zigzag(size * tokens, size)
    problem = cost.Problem(layout, (0, layout.tokens), Sight(right=0), 1, heads, kv_heads, dim)
    return cost.ring_parts(problem, cost.machine_of(torch.device(device)))


def tensors(tokens: int, heads: int, kv_heads: int, device: str, dim: int = 128) -> list[Tensor]:
    """q, k, v and dout, tokens first in memory, as models have them."""
    generator = torch.Generator(device).manual_seed(1)
    made = [(heads, True), (kv_heads, True), (kv_heads, True), (heads, False)]
    found = []
    for many, grad in made:
        x = torch.randn(1, tokens, many, dim, generator=generator, device=device).bfloat16().transpose(1, 2)
        found.append(x.requires_grad_(grad))
    return found


def errors(device: str, tokens: int = 4096) -> Iterator[dict]:
    """Rows of errors of shards in one process."""
    heads, kv_heads = 8, 2
    *inputs, dout = tensors(tokens, heads, kv_heads, device)
    exact = [[], [], [], []]
    for group in range(kv_heads):  # fp64 scores of all heads would not fit
        own = slice(4 * group, 4 * group + 4)
        whole = [
            x.detach()[:, s].double().requires_grad_() for x, s in zip(inputs, (own, *[slice(group, group + 1)] * 2))
        ]
        with use(attention="reference", attention_vjp="reference"):
            out, _ = ops.attention(*whole, CAUSAL)
            found = [out.detach(), *torch.autograd.grad(out, whole, dout[:, own].double())]
        for each, x in zip(exact, found):
            each.append(x)
    exact = [torch.cat(x, 1) for x in exact]
    one: dict[str, list[float]] = {}
    for kernel in ("tilesmith", "rounding"):
        for mode, sizes in (("ring", (1, 2, 4, 8)), ("allgather", (2, 8)), ("ulysses", (2,))):
            for size in sizes:
                layout = Layout.zigzag(tokens, size)
                shards = [[layout.shard(x.detach(), r, 2).requires_grad_() for r in range(size)] for x in inputs]
                slopes = [layout.shard(dout, r, 2) for r in range(size)]
                ring = LocalRing([device] * size)
                outs, _ = context_parallel_attention(*shards, ring, CAUSAL, mode=mode, layout=layout, kernel=kernel)
                grads = torch.autograd.grad(outs, [x for each in shards for x in each], slopes)
                made = [x.detach() for x in (*outs, *grads)]
                made = [layout.unshard(made[i * size : (i + 1) * size], 2).double() for i in range(4)]
                found = [float((x - e).norm() / e.norm()) for x, e in zip(made, exact)]
                one.setdefault(kernel, found)
                times = [round(x / y, 3) for x, y in zip(found, one[kernel])]
                named = dict(zip(("out", "dq", "dk", "dv"), times))
                yield {"errors": kernel, "mode": mode, "shards": size, "out": found[0], "times_one": named}


def _passes(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, ring: OneRank, kernel: str) -> tuple[Callable, Callable]:
    def forward() -> Tensor:
        return context_parallel_attention(q, k, v, ring, CAUSAL, mode="ring", kernel=kernel)[0]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (q, k, v), dout)

    return forward, both


def memory(device: str, tokens: int, size: int) -> Iterator[dict]:
    """Rows of what one rank of so many holds."""
    rank = max(1, size // 2 - 1)
    for heads, kv_heads in HEADS:
        peaks = []
        for many in (tokens, 2 * tokens):
            q, k, v, dout = tensors(many, heads, kv_heads, device)
            shard, own = k.nbytes + v.nbytes, q.nbytes + 4 * many * heads
            forward, both = _passes(q, k, v, dout, OneRank(size, rank), "tilesmith")
            row = {"memory": f"{heads}/{kv_heads}", "ranks": size, "tokens_of_a_rank": many, "shard_MB": shard >> 20}
            for name, run, kept in (("forward", forward, own), ("both", both, own + q.nbytes + shard)):
                run()  # what the device keeps from a first call on
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                row[name] = round((peak - kept) / shard, 3)
                peaks.append(peak)
            taken = divided(heads, kv_heads, size, many, device)
            row |= {"parts": [split.parts for split in taken.splits], "model": [round(x, 3) for x in taken.held]}
            yield row
            del q, k, v, dout, forward, both
        ratios = [round(peaks[i + 2] / peaks[i], 3) for i in (0, 1)]
        yield {"memory": f"{heads}/{kv_heads}", "ranks": size, "peak(2S)/peak(S)": ratios}


def times(device: str) -> Iterator[dict]:
    """Rows of a rank's times."""
    for size, tokens, (heads, kv_heads) in (
        (2, 8192, (16, 16)), (2, 8192, (32, 8)), (2, 32768, (32, 8)), (8, 32768, (16, 16)), (8, 32768, (32, 8)),
        (8, 32768, (64, 8)),
    ):  # fmt: skip
        q, k, v, dout = tensors(tokens, heads, kv_heads, device)
        ring, found = OneRank(size, size - 1), {}
        for index, what in enumerate(("forward", "both")):
            taken: dict[str, list[float]] = {name: [] for name in NAMES}
            for _ in range(ROUNDS + 1):
                for name, many in taken.items():
                    run = _passes(q, k, v, dout, ring, NAMES[name])[index]
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    with nullcontext() if name == "now" else all_heads_at_once():
                        _timed(run, begin, end)
                    many.append(begin.elapsed_time(end))
            found[what] = {name: round(statistics.median(many[1:]), 3) for name, many in taken.items()}
        chosen = divided(heads, kv_heads, size, tokens, device)
        said = {"parts": [split.parts for split in chosen.splits], "model_loss": [round(x, 3) for x in chosen.loss]}
        yield {"time": f"{heads}/{kv_heads}", "ranks": size, "tokens_of_a_rank": tokens, **said, **found}


def _timed(run: Callable, begin: Any, end: Any) -> None:
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("errors", "memory", "time"))
    parser.add_argument("--tokens", type=int, default=32768, help="of a rank, for memory")
    parser.add_argument("--length", type=int, default=4096, help="of the sequence, for errors")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=8, help="for memory")
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    began = time.monotonic()
    kinds = {
        "errors": lambda: errors(given.device, given.length),
        "memory": lambda: memory(given.device, given.tokens, given.ranks),
        "time": lambda: times(given.device),
    }
    for name, rows in kinds.items():
        if given.only in (None, name):
            for row in rows():
                row["s"] = round(time.monotonic() - began, 1)
                say(json.dumps(row))
                if time.monotonic() - began > given.seconds:
                    return


if __name__ == "__main__":
    main()
