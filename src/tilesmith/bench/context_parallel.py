"""Context parallelism on the GPUs of one host: values first, then time beside torch's own, and the links between them.

Each rank runs this: `torchrun --nproc-per-node 2 -m tilesmith.bench.context_parallel --out benchmarks/results`, or
`torchrun --nproc-per-node 2 --no-python tilesmith bench context-parallel --save`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilesmith import ops
from tilesmith.bench import peers_ranks, ranks
from tilesmith.bench.context_parallel_problems import BOTH, FORWARD, Problem, documents_of, problems
from tilesmith.bench.document import document, save
from tilesmith.bench.peers_ranks import Provider
from tilesmith.bench.ranks import ALONE, Step, current_device, process_group, rounds, seconds
from tilesmith.bench.selection import check_parts
from tilesmith.distributed import ProcessGroupRing, context_parallel_attention
from tilesmith.distributed.layout import boundaries
from tilesmith.engine import use
from tilesmith.engine.arguments import dtype_name

SUBJECT = "context-parallel"
HEAD_START = 10.0  # microseconds, of NCCL's transfers
LONG = 1 << 16  # tokens from which a round of all providers takes seconds
OURS = "tilesmith"
EQUAL, WHOLE = f"{ALONE}, equal work", f"{ALONE}, all the work"
MODES = ("auto", "allgather", "ring", "ulysses", "hybrid")


def run(
    *,
    command: str,
    rounds: int = 5,
    only: Sequence[str] = (),
    cases: Sequence[str] = (),
    limit: float = 240.0,
    progress: Callable[[str], None] = lambda what: None,
    so_far: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document of rank 0, and of every rank what it measured; all ranks call it alike.

    only: providers; cases: those whose name holds one of these; all by default. limit: seconds after which no further
    case is begun. A provider that fails is a row with the reason, on all ranks. ValueError for a part that no name of a
    provider, or of a case, has.
    """
    device, size = current_device(), dist.get_world_size()
    planned = problems(device, size)
    check_parts(f"no case of {SUBJECT} is named", cases, [_named(problem, size) for problem in planned])
    providers = [EQUAL, WHOLE, *(name for problem in planned for name in _providers(problem))]
    check_parts(f"{SUBJECT} has no provider", only, providers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    named = {"dtype": dtype_name(dtype), "rounds": rounds, "gpus": size}
    subject = SUBJECT if size == 2 else f"{SUBJECT}-{size}"
    found = document(subject, device, command, [], **named)
    began = time.monotonic()
    progress("links")
    found["rows"] += _links(device)
    progress("values")
    found["rows"] += _values(device, dtype)
    so_far(found)
    for problem in planned:
        name = _named(problem, size)
        if cases and not any(part in name for part in cases):
            continue
        for which in problem.passes:
            if ranks.slowest(time.monotonic() - began, device) > limit:
                found["rows"].append({"case": name, "pass": which, "error": f"not begun within {limit:g} s"})
                continue
            progress(f"{name}, {which}")
            behind = _behind(problem, found["rows"])
            found["rows"] += _timed(problem, name, which, dtype, rounds, only, progress, behind)
            so_far(found)
    return found


def _named(problem: Problem, size: int) -> str:
    heads = f"{problem.heads}" if problem.heads == problem.kv_heads else f"{problem.heads}/{problem.kv_heads}"
    total = f"{problem.tokens // 1024}k" if problem.tokens >= 1024 else str(problem.tokens)
    return f"{problem.name}, {total} on {size}, {heads} heads"


def _whole(problem: Problem, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the slope of out of the whole sequence, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(problem.tokens + problem.heads)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shape = lambda h: (1, h, problem.tokens, problem.dim)  # noqa: E731
    return [torch.randn(shape(h), device=device, dtype=dtype, generator=generator) for h in heads]


def _sinks(problem: Problem, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if not problem.sinks:
        return None
    return torch.linspace(-1, 1, problem.heads, device=device, dtype=dtype).requires_grad_()


def _ours(problem: Problem, mode: str, kernel: str = "tilesmith", transport: str = "auto") -> Provider:
    size = dist.get_world_size()
    layout, ring = problem.layout(size), _ring(dist.group.WORLD, transport)
    best = problem.predicted(size, mode) if mode == "hybrid" else None

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return context_parallel_attention(
            q, k, v, ring, problem.mask, mode=mode, degree=best and best.degree, layout=layout,
            cu_seqlens=problem.starts, sinks=sinks, kernel=kernel,
        )[0]  # fmt: skip

    return Provider(call, layout)


@lru_cache(maxsize=8)
def _ring(group: dist.ProcessGroup, transport: str) -> ProcessGroupRing:
    return ProcessGroupRing(group, head_start=HEAD_START if transport == "nccl" else 0.0, transport=transport)


def _providers(problem: Problem) -> dict[str, Callable[[], Provider]]:
    """Ways to compute a problem by name; each is made when its turn comes, and may then raise."""
    # on 2 ranks a hybrid is one of the others, and "auto" takes one of them
    modes = ("allgather", "ring", "ulysses") if dist.get_world_size() == 2 else MODES
    found: dict[str, Callable[[], Provider]] = {f"{OURS} {m}": (lambda m=m: _ours(problem, m)) for m in modes}
    if current_device().type != "cuda":
        return found  # the others need one
    found[f"{OURS} allgather, by NCCL"] = lambda: _ours(problem, "allgather", transport="nccl")
    if problem.causal_alone:
        for mode in ("allgather", "ulysses"):
            found[f"{OURS} {mode}, cudnn inside"] = lambda m=mode: _ours(problem, m, "cudnn")
    return found | _peers(problem)


def _peers(problem: Problem) -> dict[str, Callable[[], Provider]]:
    """Nobody's serve windows; of ring-flash-attn's those that its authors recommend for a problem."""
    layout, device = problem.layout(dist.get_world_size()), current_device()
    found: dict[str, Callable[[], Provider]] = {}
    if problem.lengths:
        starts = torch.tensor(problem.starts, dtype=torch.int32, device=device)
        for stride in sorted({1, problem.kv_heads}):
            name = f"ring-flash-attn llama3, {stride} kv heads at a time, flash inside"
            found[name] = lambda s=stride: peers_ranks.ring_flash_llama3(starts, s)
    if not problem.causal_alone:
        return found
    for kernel in peers_ranks.KERNELS:
        found[f"ring-flash-attn zigzag, {kernel} inside"] = lambda k=kernel: peers_ranks.ring_flash_zigzag(layout, k)
        for method in ("allgather", "alltoall"):
            name = f"torch {method}, {kernel} inside"
            found[name] = lambda m=method, k=kernel: peers_ranks.torchs(layout, m, k, expand=False)
            if problem.heads != problem.kv_heads:
                expanded = lambda m=method, k=kernel: peers_ranks.torchs(layout, m, k, expand=True)  # noqa: E731
                found[f"{name}, expanded"] = expanded
    return found


def _step(provider: Provider, inputs: Sequence[Tensor], sinks: Tensor | None, dout: Tensor, which: str) -> Step:
    wanted = [*inputs, *([] if sinks is None else [sinks])]

    @torch.no_grad()
    def forward() -> Tensor:
        return provider.call(*inputs, sinks)

    def both() -> tuple[Tensor, ...]:
        out = provider.call(*inputs, sinks)
        return out, *torch.autograd.grad(out, wanted, dout)

    return Step(both if which == BOTH else forward, provider.within)


def _timed(
    problem: Problem, name: str, which: str, dtype: torch.dtype, count: int, only: Sequence[str], progress,
    behind: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one pass of a problem."""
    size, rank, device = dist.get_world_size(), dist.get_rank(), current_device()
    head = {"case": name, "pass": which, "tokens": problem.tokens, "heads": problem.heads}
    head |= {"kv_heads": problem.kv_heads, "gpus": size}
    sinks = _sinks(problem, device, dtype)
    rows, steps, peaks = [], {}, {}

    def made(make: Callable[[], Provider]) -> Step:
        provider = make()
        mine = [provider.layout.shard(x, rank, 2) for x in _whole(problem, device, dtype)]
        return _step(provider, [x.requires_grad_() for x in mine[:3]], sinks, mine[3], which)

    for provider, make in _providers(problem).items():
        if only and not any(part in provider for part in only):
            continue
        if provider in behind:
            rows.append({**head, "provider": provider, "error": behind[provider]})
            continue
        progress(f"{name}, {which}: {provider}, first run")
        before = ranks.memory_in_use(device)
        step, why = ranks.first(lambda make=make: made(make), device)
        if step is None:
            rows.append({**head, "provider": provider, "error": why})
        else:
            peaks[provider] = ranks.peak(device) - before
            steps[provider] = step
    alone = _one_gpu(problem, device, dtype, size, which)
    steps |= {name: step for name, step in alone.items() if not only or any(part in name for part in only)}
    for provider, each in rounds(steps, device, count).items():
        median = statistics.median(each)
        row = {**head, "provider": provider, "us": round(median * 1e6, 1), "rounds": len(each)}
        row |= {"spread": round((max(each) - min(each)) / median, 4), "peak_bytes": peaks.get(provider, 0)}
        share = 1 if provider == WHOLE else size
        row["TFLOP/s"] = float(f"{problem.flops(which) / share / median / 1e12:.4g}")  # of a GPU
        rows.append(row)
    _compare(rows, problem, size)
    return rows


def _one_gpu(problem: Problem, device: torch.device, dtype: torch.dtype, size: int, which: str) -> dict[str, Step]:
    """Each rank alone with as many FLOPs as its share: a shorter sequence, or a part of a windowed one. Documents are
    not divided: there each rank computes all of them."""
    if problem.lengths:
        alone, name = problem, WHOLE
    else:
        tokens = problem.tokens // size if problem.window else int(problem.tokens / size**0.5) // 128 * 128
        alone, name = replace(problem, tokens=max(tokens, 16)), EQUAL
    *inputs, dout = _whole(alone, device, dtype)
    starts = alone.starts and torch.tensor(alone.starts, dtype=torch.int32, device=device)
    packed = {} if starts is None else {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    call = lambda q, k, v, s: ops.attention(q, k, v, alone.mask, sinks=s, **packed)[0]  # noqa: E731
    sinks = _sinks(alone, device, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    return {name: _step(Provider(call, alone.layout(1)), inputs, sinks, dout, which)}


def _behind(problem: Problem, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Providers of others that were far behind the best of them in the next shorter case with such heads."""
    alike = [
        row for row in rows
        if "us" in row and row["pass"] == BOTH and row["case"].startswith(problem.name + ",")
        and not row["provider"].startswith((OURS, ALONE))
        and row.get("tokens", problem.tokens) < problem.tokens
        and (row["heads"], row["kv_heads"]) == (problem.heads, problem.kv_heads)
    ]  # fmt: skip
    if problem.tokens < LONG or not alike:
        return {}
    alike = [row for row in alike if row["tokens"] == max(other["tokens"] for other in alike)]
    best = min(row["us"] for row in alike)
    return {
        row["provider"]: f"not measured: {row['us'] / best:.2f} times the best peer at {row['tokens']} tokens"
        for row in alike
        if row["us"] > 1.3 * best
    }


def _compare(rows: list[dict[str, Any]], problem: Problem, size: int) -> None:
    """Of ours how many times faster it is than the fastest of the others, also of those with the same kernel inside;
    the share of one GPU's rate; what the model predicts."""
    timed = {row["provider"]: row for row in rows if "us" in row}
    peers = {n: row for n, row in timed.items() if not n.startswith((OURS, ALONE))}
    alone = {name: row["us"] / share for name, share in ((EQUAL, 1), (WHOLE, size)) if (row := timed.get(name))}
    for name, row in timed.items():
        if not name.startswith(OURS):
            continue
        mode, _, inside = name.removeprefix(f"{OURS} ").partition(", ")
        kernel = inside if inside.endswith(" inside") else ""
        alike = {n: peer for n, peer in peers.items() if kernel in n}
        if alike:
            best = min(alike, key=lambda n: alike[n]["us"])
            row |= {"best_peer": best, "times_best_peer": round(alike[best]["us"] / row["us"], 4)}
        for us in alone.values():
            row["of_one_gpu"] = round(us / row["us"], 4)
        predicted = None if kernel else problem.predicted(size, mode)
        if predicted is not None and current_device().type == "cuda":
            row["model_us"] = round((predicted.forward if row["pass"] == FORWARD else predicted.seconds) * 1e6, 1)


def _links(device: torch.device) -> list[dict[str, Any]]:
    """Seconds of an exchange between neighbours by size: the latency and the bandwidth of the cost model."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size < 2 or device.type != "cuda":
        return []
    rows = []
    for count in (1024, 1 << 20, 1 << 24, 1 << 27):
        give, take = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))

        def exchange(give: Tensor = give, take: Tensor = take) -> None:
            posts = [dist.P2POp(dist.isend, give, (rank + 1) % size), dist.P2POp(dist.irecv, take, (rank - 1) % size)]
            for work in dist.batch_isend_irecv(posts):
                work.wait()

        took = seconds(Step(exchange), device)
        row = {"case": f"exchange with a neighbour, {count} bytes", "pass": "link", "provider": "nccl"}
        rows.append({**row, "us": round(took * 1e6, 2), "spread": 0.0, "TB/s": count / took / 1e12})
    return rows


def _values(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Each mode's error against fp32 over that of one GPU in `dtype`; for out and each gradient."""
    big = device.type == "cuda"
    tokens, heads, dim = (4096, (8, 2), 128) if big else (64, (4, 2), 16)
    made = [
        Problem("causal", tokens, *heads, dim),
        Problem("window, sinks", tokens, *heads, dim, window=tokens // 16, sinks=True),
        Problem("packed", tokens, *heads, dim, lengths=documents_of(tokens)),
    ]
    rows = []
    for problem in made:
        rows += _errors(problem, device, dtype)
    return rows


def _errors(problem: Problem, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    size, rank, layout = dist.get_world_size(), dist.get_rank(), problem.layout(dist.get_world_size())
    whole = _whole(problem, device, dtype)
    starts = problem.starts and torch.tensor(boundaries(problem.starts), dtype=torch.int32, device=device)
    packed = {} if starts is None else {"cu_seqlens_q": starts, "cu_seqlens_k": starts}

    def one(kind: torch.dtype) -> list[Tensor]:
        inputs = [x.to(kind).requires_grad_() for x in whole[:3]]
        call = lambda q, k, v, s: ops.attention(q, k, v, problem.mask, sinks=s, **packed)[0]  # noqa: E731
        provider = Provider(call, problem.layout(1))
        return _step(provider, inputs, _sinks(problem, device, kind), whole[3].to(kind), BOTH).run()[:4]

    with use(attention="reference", attention_vjp="reference"):
        exact = one(torch.float32 if device.type == "cuda" else torch.float64)
    alone = [_distance(x, e) for x, e in zip(one(dtype), exact)]
    rows = []
    for mode in ("allgather", "ring", "ulysses"):
        mine = [layout.shard(x, rank, 2) for x in whole]
        inputs = [x.requires_grad_() for x in mine[:3]]
        given = inputs, _sinks(problem, device, dtype), mine[3], BOTH
        step, why = ranks.first(lambda m=mode, g=given: _step(_ours(problem, m), *g), device)
        row = {"case": f"{problem.name}, {problem.tokens} on {size}", "pass": "values", "provider": f"tilesmith {mode}"}
        if step is None:
            rows.append({**row, "error": why})
            continue
        ratios = {}
        for name, x, e, base in zip(("out", "dq", "dk", "dv"), step.run(), exact, alone):
            shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(shards, x.detach().contiguous())
            ratios[name] = round(_distance(layout.unshard(shards, 2), e) / base, 3) if base else 0.0
        rows.append({**row, "error_over_one_gpu": ratios})
    return rows


def _distance(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().double() - exact.detach().double()).square().mean().sqrt())


def main() -> None:
    """The command line of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], help="providers whose name holds this")
    parser.add_argument("--case", action="append", default=[], help="cases whose name holds this")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no case is begun")
    given = parser.parse_args()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    command = f"torchrun --nproc-per-node {ranks} -m tilesmith.bench.context_parallel {shlex.join(sys.argv[1:])}"
    with process_group() as rank:
        tell = (lambda what: sys.stderr.write(f"{what}\n")) if rank == 0 else (lambda what: None)
        keep = bool(given.case)
        write = (lambda found: save(found, given.out, keep=keep)) if rank == 0 else (lambda found: None)
        found = run(
            command=command, rounds=given.rounds, only=given.only, cases=given.case, limit=given.limit, progress=tell,
            so_far=write,
        )  # fmt: skip
        write(found)
        if rank == 0:
            for row in found["rows"]:
                sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
