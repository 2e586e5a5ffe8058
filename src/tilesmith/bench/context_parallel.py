"""Context parallelism on the GPUs of one host: values first, then time beside torch's own, and the links between them.

Each rank runs this: `torchrun --nproc-per-node 2 -m tilesmith.bench.context_parallel --out benchmarks/results`, or
`torchrun --nproc-per-node 2 --no-python tilesmith bench context-parallel --save`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilesmith import ops
from tilesmith.bench.document import document, save
from tilesmith.bench.run import reason
from tilesmith.bench.selection import check_parts
from tilesmith.distributed import Layout, ProcessGroupRing, context_parallel_attention
from tilesmith.distributed.layout import boundaries, causal_pairs
from tilesmith.engine import use

SUBJECT = "context-parallel"
BACKWARD = 3.5  # FLOPs of forward and backward over those of the forward
HEAD_START = 10.0  # microseconds
LONG = 1 << 18  # tokens from which a run takes a second
KEEP = 1.15  # a provider this much slower than the best is timed twice, not five times
Step = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """One attention over all ranks, batch 1, head dim 128. lengths: of packed documents, one if empty."""

    name: str
    tokens: int
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    window: int | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def mask(self) -> ops.Mask:
        """Causal, with a window if there is one."""
        return ops.Mask(causal=True, window=self.window)

    @property
    def starts(self) -> tuple[int, ...] | None:
        """Boundaries of the documents; None without."""
        total = [0]
        for length in self.lengths:
            total.append(total[-1] + length)
        return tuple(total) if self.lengths else None

    def layout(self, size: int) -> Layout:
        """How callers would hold the sequence: windows in one piece, documents by their work, else zigzag."""
        if self.starts:
            return Layout.balanced(self.starts, size)
        return (Layout.contiguous if self.window else Layout.zigzag)(self.tokens, size)

    def flops(self) -> float:
        """FLOPs of forward and backward, of the pairs that see each other."""
        if self.window:
            width = self.window + 1
            pairs = self.tokens * width - width * (width - 1) // 2
        else:
            pairs = causal_pairs(self.starts or (0, self.tokens), (0, self.tokens))
        return BACKWARD * 4 * self.heads * self.dim * pairs


def documents_of(total: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents, log-normal with median 600 as web text has, that fill `total` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        draw = int((torch.randn((), generator=generator) * 1.5 + 6.4).exp().clamp(16, total // 2))
        lengths.append(min(draw, total - sum(lengths)))
    return tuple(lengths)


def problems(device: torch.device) -> list[Problem]:
    """Those of the results; tiny ones on a CPU, where only the path is tried."""
    if device.type == "cpu":
        return [Problem("causal", 64, 2, 2, 16), Problem("window", 64, 2, 1, 16, window=8, sinks=True)]
    causal = {n: [Problem("causal", n * 1024, h, g) for h, g in ((16, 16), (32, 8))] for n in (16, 64, 256)}
    return [
        *causal[16],
        *causal[64],
        Problem("packed", 65536, lengths=documents_of(65536)),
        Problem("window 4096", 65536, window=4095),
        Problem("window 128, sinks", 65536, 32, 8, window=127, sinks=True),
        *causal[256],
    ]


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
    device, size = _device(), dist.get_world_size()
    planned = problems(device)
    check_parts(f"no case of {SUBJECT} is named", cases, [_named(problem, size) for problem in planned])
    check_parts(f"{SUBJECT} has no provider", only, [name for problem in planned for name in _providers(problem)])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    named = {"dtype": str(dtype).removeprefix("torch."), "rounds": rounds, "gpus": size}
    found = document(SUBJECT, device, command, [], **named)
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
        if _late(began, limit, device):
            found["rows"].append({"case": name, "error": f"not begun within {limit:g} s"})
            continue
        progress(name)
        behind = _behind(problem, found["rows"])
        found["rows"] += _timed(problem, name, device, dtype, rounds, only, progress, behind)
        so_far(found)
    return found


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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


def _ours(problem: Problem, mode: str, kernel: str = "tilesmith", head_start: float = 0.0) -> Callable[..., Tensor]:
    layout = problem.layout(dist.get_world_size())
    ring = _ring(dist.group.WORLD, head_start)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return context_parallel_attention(
            q, k, v, ring, problem.mask, mode=mode, layout=layout, cu_seqlens=problem.starts, sinks=sinks, kernel=kernel
        )[0]

    return call


@lru_cache(maxsize=8)
def _ring(group: dist.ProcessGroup, head_start: float) -> ProcessGroupRing:
    return ProcessGroupRing(group, head_start=head_start)


def _torchs(problem: Problem, method: str, backend: SDPBackend, expand: bool = False) -> Callable[..., Tensor]:
    """torch.distributed's context_parallel around scaled_dot_product_attention."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    if problem.window or problem.lengths:
        raise ValueError("torch's context parallel knows no windows and no documents")
    mesh = dist.device_mesh.init_device_mesh(_device().type, (dist.get_world_size(),))
    group = problem.heads // problem.kv_heads

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        set_rotate_method(method)
        # torch 2.11 looks at the first buffer, so there must be one
        unused = torch.zeros(2 * dist.get_world_size(), device=_device())
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]), sdpa_kernel(backend):
            yield

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if group > 1 and expand:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1 and not expand)

    call.within = within
    return call


def _providers(problem: Problem) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    modes = (
        ("allgather", "ulysses") if dist.get_world_size() == 2 else ("allgather", "ring", "ulysses")
    )  # the same on 2
    found = {f"tilesmith {mode}": (lambda m=mode: _ours(problem, m)) for mode in modes}
    if _device().type == "cuda":
        found["tilesmith allgather, head start"] = lambda: _ours(problem, "allgather", head_start=HEAD_START)
    if not (problem.window or problem.lengths):
        for mode in ("allgather", "ulysses"):
            found[f"tilesmith {mode}, cudnn inside"] = lambda m=mode: _ours(problem, m, "cudnn")
        for method in ("allgather", "alltoall"):
            for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                found[f"torch {method}, {name}"] = lambda m=method, b=backend: _torchs(problem, m, b)
                if problem.heads != problem.kv_heads:
                    found[f"torch {method}, {name}, expanded"] = lambda m=method, b=backend: _torchs(
                        problem, m, b, True
                    )
    return found


def _step(call: Callable[..., Tensor], inputs: Sequence[Tensor], sinks: Tensor | None, dout: Tensor) -> Step:
    within = getattr(call, "within", contextlib.nullcontext)
    wanted = [*inputs, *([] if sinks is None else [sinks])]

    def step() -> Any:
        with within():
            out = call(*inputs, sinks)
            return out, *torch.autograd.grad(out, wanted, dout)

    return step


def _timed(
    problem: Problem, name: str, device: torch.device, dtype: torch.dtype, rounds: int, only: Sequence[str], progress,
    behind: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = problem.layout(size)
    mine = [layout.shard(x, rank, 2) for x in _whole(problem, device, dtype)]
    inputs, dout = [x.requires_grad_() for x in mine[:3]], mine[3]
    sinks = _sinks(problem, device, dtype)
    rows, steps, peaks = [], {}, {}
    head = {"case": name, "pass": "forward+backward", "tokens": problem.tokens, "heads": problem.heads}
    head |= {"kv_heads": problem.kv_heads, "gpus": size}
    for provider, make in _providers(problem).items():
        if only and not any(part in provider for part in only):
            continue
        if provider in behind:
            rows.append({**head, "provider": provider, "error": behind[provider]})
            continue
        progress(f"{name}: {provider}, first run")
        before = _memory(device)
        step, why = _first(make, inputs, sinks, dout, device)
        if step is None:
            rows.append({**head, "provider": provider, "error": why})
        else:
            peaks[provider] = _peak(device) - before
            steps[provider] = step
    single = _one_gpu(problem, device, dtype, size)
    if single is not None and not only:
        steps["one GPU, equal work"] = single
    times = _rounds(steps, device, rounds)
    for provider, each in times.items():
        median = statistics.median(each)
        row = {**head, "provider": provider, "us": round(median * 1e6, 1), "rounds": len(each)}
        row |= {"spread": round((max(each) - min(each)) / median, 4), "peak_bytes": peaks.get(provider, 0)}
        row["TFLOP/s"] = float(f"{problem.flops() / size / median / 1e12:.4g}")  # of a GPU
        rows.append(row)
    _compare(rows)
    return rows


def _first(make, inputs, sinks, dout, device) -> tuple[Step | None, str]:
    """A step that has run once on all ranks, or why it has not on one of them."""
    step, why = None, ""
    try:
        step = _step(make(), inputs, sinks, dout)
        step()
        _synchronize(device)
    except Exception as problem:  # whatever a peer throws is its row
        why = reason(problem)
    whys: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(whys, why)
    failed = [f"rank {r}: {text}" for r, text in enumerate(whys) if text]
    return (None, "; ".join(failed)) if failed else (step, "")


def _one_gpu(problem: Problem, device: torch.device, dtype: torch.dtype, size: int) -> Step | None:
    """Each rank alone with as many FLOPs as its share: a shorter sequence, or a part of a windowed one."""
    if problem.lengths:
        return None
    tokens = problem.tokens // size if problem.window else int(problem.tokens / size**0.5) // 128 * 128
    alone = replace(problem, tokens=max(tokens, 16))
    *inputs, dout = _whole(alone, device, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    return _step(
        lambda q, k, v, s: ops.attention(q, k, v, alone.mask, sinks=s)[0], inputs, _sinks(alone, device, dtype), dout
    )


def _rounds(steps: dict[str, Step], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, round by round in turns. What is far behind after two rounds stops there."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for which in range(rounds):
        names = list(steps)
        best = min((statistics.median(t) for n, t in times.items() if t and "one GPU" not in n), default=0.0)
        for name in names[which % len(names) :] + names[: which % len(names)] if names else []:
            if which >= 2 and "one GPU" not in name and statistics.median(times[name]) > KEEP * best:
                continue
            times[name].append(_seconds(steps[name], device))
    return times


def _seconds(step: Step, device: torch.device) -> float:
    _synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    step()  # untimed if it is short: it finds the clocks that it causes, and fills the allocator
    _synchronize(device)
    once = _slowest(time.perf_counter() - began, device)
    if once > 0.4:
        return once
    times = max(1, min(10, int(0.05 / once)))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        step()
    _synchronize(device)
    return _slowest((time.perf_counter() - began) / times, device)


def _slowest(seconds: float, device: torch.device) -> float:
    """The same number on all ranks, so that all decide alike."""
    x = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


def _late(began: float, limit: float, device: torch.device) -> bool:
    return _slowest(time.monotonic() - began, device) > limit


def _memory(device: torch.device) -> int:
    """Bytes in use; from here on the most are counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _behind(problem: Problem, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Providers that were far behind with a quarter of the tokens, where each run takes a second and more."""
    if problem.tokens < LONG:
        return {}
    alike = [
        row for row in rows
        if "us" in row and row["case"].startswith(problem.name + ",") and row.get("tokens") == problem.tokens // 4
        and (row["heads"], row["kv_heads"]) == (problem.heads, problem.kv_heads)
    ]  # fmt: skip
    best = min((row["us"] for row in alike), default=0.0)
    return {
        row["provider"]: f"not measured: {row['us'] / best:.2f} times the best at {row['tokens']} tokens"
        for row in alike
        if row["us"] > 1.3 * best
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(rows: list[dict[str, Any]]) -> None:
    """How many times faster ours is than the fastest of torch's, and the share of one GPU's rate."""
    timed = {row["provider"]: row for row in rows if "us" in row}
    peers = {n: row for n, row in timed.items() if n.startswith("torch")}
    alone = timed.get("one GPU, equal work")
    best = min(peers.values(), key=lambda row: row["us"], default=None)
    for name, row in timed.items():
        if not name.startswith("tilesmith"):
            continue
        if best is not None:
            row |= {"best_peer": best["provider"], "times_best_peer": round(best["us"] / row["us"], 4)}
        if alone is not None:
            row["of_one_gpu"] = round(alone["us"] / row["us"], 4)


def _links(device: torch.device) -> list[dict[str, Any]]:
    """Seconds of an exchange between neighbours by size: the latency and the bandwidth of the cost model."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size < 2 or device.type != "cuda":
        return []
    rows = []
    for count in (1024, 1 << 20, 1 << 24, 1 << 27):
        give, take = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))

        def step(give: Tensor = give, take: Tensor = take) -> None:
            posts = [dist.P2POp(dist.isend, give, (rank + 1) % size), dist.P2POp(dist.irecv, take, (rank - 1) % size)]
            for work in dist.batch_isend_irecv(posts):
                work.wait()

        seconds = _seconds(step, device)
        row = {"case": f"exchange with a neighbour, {count} bytes", "pass": "link", "provider": "nccl"}
        rows.append({**row, "us": round(seconds * 1e6, 2), "spread": 0.0, "TB/s": count / seconds / 1e12})
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
        return _step(call, inputs, _sinks(problem, device, kind), whole[3].to(kind))()[:4]

    with use(attention="reference", attention_vjp="reference"):
        exact = one(torch.float32 if device.type == "cuda" else torch.float64)
    alone = [_distance(x, e) for x, e in zip(one(dtype), exact)]
    rows = []
    for mode in ("allgather", "ring", "ulysses"):
        mine = [layout.shard(x, rank, 2) for x in whole]
        inputs = [x.requires_grad_() for x in mine[:3]]
        step, why = _first(lambda m=mode: _ours(problem, m), inputs, _sinks(problem, device, dtype), mine[3], device)
        row = {"case": f"{problem.name}, {problem.tokens} on {size}", "pass": "values", "provider": f"tilesmith {mode}"}
        if step is None:
            rows.append({**row, "error": why})
            continue
        ratios = {}
        for name, x, e, base in zip(("out", "dq", "dk", "dv"), step(), exact, alone):
            shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(shards, x.detach().contiguous())
            ratios[name] = round(_distance(layout.unshard(shards, 2), e) / base, 3) if base else 0.0
        rows.append({**row, "error_over_one_gpu": ratios})
    return rows


def _distance(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().double() - exact.detach().double()).square().mean().sqrt())


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """The default group that torchrun describes, for as long as the block runs; the rank."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # or attention's programs come before NCCL's; for everyone
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def main() -> None:
    """The command line of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], help="providers whose name holds this")
    parser.add_argument("--case", action="append", default=[], help="cases whose name holds this")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no case is begun")
    given = parser.parse_args()
    command = "torchrun -m tilesmith.bench.context_parallel " + " ".join(sys.argv[1:])
    with process_group() as rank:
        tell = (lambda what: sys.stderr.write(f"{what}\n")) if rank == 0 else (lambda what: None)
        write = (lambda found: save(found, given.out)) if rank == 0 else (lambda found: None)
        found = run(
            command=command, rounds=given.rounds, only=given.only, cases=given.case, limit=given.limit, progress=tell,
            so_far=write,
        )  # fmt: skip
        if rank == 0:
            save(found, given.out)
            for row in found["rows"]:
                sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
