"""Attention's gradients by their tiles, on one GPU of compute capability 9.0: what a model of their times is fitted to.

    python benchmarks/gradient_tiles.py results.json [--only dim=64] [--seconds 100] [--dry]

Values come first, in several processes, of which one ends where a kernel takes 60 seconds; they also fill Triton's
cache. What is wrong or missing there is not timed. Then each shape's candidates take turns, beside cuDNN; last, the
time of each kernel of a chain. Exits with 1 where a value was wrong. --only: shapes of a head dim. --dry: plans alone,
without a GPU.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from triton.errors import TritonError

from tilesmith.engine import cases, ops
from tilesmith.engine.timing import measure
from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_vjp_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_backward import hopper_backward
from tilesmith.ops.attn.plan.shape import shape_of
from tilesmith.validate.cases import check_each

LIMIT = 60  # seconds of a group of values
SIDE_BY_SIDE = 16
VALUES = (
    "d80_tiles", "d72_causal_tiles", "d80_key_shares", "d96_turns", "d96_tiles", "d80_packed",
    "d96_deterministic_window", "d192_128_tiles",
)  # fmt: skip


class Call(NamedTuple):
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.heads}/{self.kv_heads}, D{self.dim}{', causal' * self.causal}"


SHAPES = tuple(
    Call(*sizes, bool(causal))
    for *sizes, causal in (
        (7, 312, 12, 12, 64, 0), (16, 512, 12, 12, 64, 0), (32, 128, 12, 12, 64, 0), (4, 384, 16, 16, 64, 0),
        (64, 197, 16, 16, 64, 0), (128, 197, 3, 3, 64, 0), (8, 577, 12, 12, 64, 0), (8, 256, 16, 16, 64, 0),
        (2, 1024, 16, 16, 64, 0), (44, 416, 16, 16, 64, 0), (4, 1500, 20, 20, 64, 0), (2, 1500, 6, 6, 64, 0),
        (2, 4096, 16, 16, 64, 0), (28, 584, 9, 3, 64, 1), (4, 2048, 9, 3, 64, 1), (8, 1024, 12, 12, 64, 1),
        (2, 1024, 12, 12, 64, 1), (68, 344, 25, 25, 64, 1), (4, 712, 14, 2, 64, 1), (6, 944, 15, 5, 64, 1),
        (1, 2048, 32, 8, 64, 1), (8, 512, 16, 16, 64, 1), (4, 4096, 16, 16, 64, 1),
        (1, 1696, 16, 16, 72, 0), (4, 1024, 16, 16, 72, 0), (32, 256, 16, 16, 72, 0),
        (21, 312, 32, 32, 80, 1), (8, 1024, 16, 16, 80, 0), (2, 2048, 32, 32, 80, 1), (2, 4096, 16, 16, 80, 1),
        (2, 4096, 32, 32, 96, 1), (4, 1024, 32, 32, 96, 1), (2, 2048, 16, 16, 96, 0),
        (2, 336, 4, 1, 256, 1), (1, 640, 4, 1, 256, 1), (4, 1024, 4, 1, 256, 1), (2, 4096, 8, 8, 256, 1),
    )
)  # fmt: skip


def candidates(call: Call) -> dict[str, HopperVjpConfig]:
    """The configurations that are compared, by name."""
    if call.dim <= 64:
        found = {"chosen": HopperVjpConfig(0, 0), "128": HopperVjpConfig(2, 128), "64": HopperVjpConfig(3, 64)}
        if call.kv_heads < call.heads:
            found |= {f"128, parts {n}": HopperVjpConfig(2, 128, group_parts=n) for n in _parts(call)}
        return found
    if call.dim <= 128:
        return {"64": HopperVjpConfig(2, 64)}
    kinds = {"": 0, "overlap, ": 1}
    return {
        f"{kind}parts {parts}": HopperVjpConfig(2, 64, overlap, parts)
        for (kind, overlap), parts in itertools.product(kinds.items(), _parts(call))
    }


def _parts(call: Call) -> Iterable[int]:
    return sorted({1, call.heads // call.kv_heads})


class Tensors(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def say(*what: object) -> None:
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def _masked(scores: torch.Tensor, causal: bool) -> torch.Tensor:
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return scores


def inputs(call: Call, device: str) -> Tensors:
    """Of tokens first in memory, as models have them."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(1)

    def made(heads: int) -> torch.Tensor:
        shape = call.batch, call.tokens, heads, call.dim
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, dout = made(call.heads), made(call.kv_heads), made(call.kv_heads), made(call.heads)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if device != "meta":
        group = call.heads // call.kv_heads
        for i in range(call.batch):
            wide_k, wide_v = (x[i : i + 1].float().repeat_interleave(group, 1) for x in (k, v))
            scores = _masked(q[i : i + 1].float() @ wide_k.mT * call.dim**-0.5, call.causal)
            lse[i] = scores.logsumexp(-1)[0]
            out[i] = (scores.softmax(-1) @ wide_v).to(out.dtype)[0]
    return Tensors(q, k, v, dout, out, lse)


def exact(call: Call, t: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of one batch row, the last one: products of operands in `dtype`, else in fp32."""
    group = call.heads // call.kv_heads
    q, dout, out = (x[-1].float() for x in (t.q, t.dout, t.out))
    k, v = (x[-1].float().repeat_interleave(group, 0) for x in (t.k, t.v))
    p = (_masked((q @ k.mT * call.dim**-0.5)[None], call.causal)[0] - t.lse[-1][..., None]).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * call.dim**-0.5
    p, ds = p.to(dtype).float(), ds.to(dtype).float()
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (ds.mT @ q, p.mT @ dout))
    return tuple(x.to(dtype).double() for x in (ds @ k, dk, dv))


@attention_vjp_arguments
def planned(call: Any, *, config: HopperVjpConfig) -> Any:
    return hopper_backward(shape_of(call), arch_named("sm90"), config)


@attention_vjp_arguments
def launched(call: Any, *, config: HopperVjpConfig) -> dict[str, torch.Tensor]:
    """The gradients by that configuration."""
    from tilesmith.ops.attn.hopper import launch_backward
    from tilesmith.ops.attn.hopper.launch import describe

    plan = hopper_backward(shape_of(call), arch_named("sm90"), config)
    gradients = {name: torch.empty_like(x) for name, x in (("dq", call.q), ("dk", call.k), ("dv", call.v))}
    given = launch_backward._tensors(call, plan, gradients, call.q.new_empty(0))
    execute(plan, launch_backward.KERNELS, given, describe, call.q.device, call.q.dtype)
    return gradients


def arguments(call: Call, t: Tensors) -> list[Any]:
    named = {
        "dout": t.dout, "q": t.q, "k": t.k, "v": t.v, "out": t.out, "lse": t.lse, "causal": call.causal,
        "window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0, "max_seqlen_q": 0, "max_seqlen_k": 0,
        "block_q": 128, "block_k": 128, "deterministic": False, "output_mask": (True, True, True, False, False),
    }  # fmt: skip
    names = reference.attention_vjp.__code__.co_varnames[: reference.attention_vjp.__code__.co_argcount]
    return [named.get(name) for name in names]


def kernels(call: Call, config: HopperVjpConfig) -> str:
    """What of a plan the compiler is told: calls that agree in it share kernels."""
    plan = planned(*arguments(call, inputs(call, "meta")), config=config)
    return repr([(step.kernel, sorted(step.constants.items())) for step in plan.steps])


def check(call: Call, name: str) -> dict[str, Any]:
    """Errors of the gradients beside twice those of products of the same dtype."""
    t = inputs(call, "cuda")
    got = launched(*arguments(call, t), config=candidates(call)[name])
    torch.cuda.synchronize()
    right, plain = exact(call, t, torch.float32), exact(call, t, torch.bfloat16)
    found: dict[str, Any] = {"passed": True}
    for gradient, true, rounded in zip(("dq", "dk", "dv"), right, plain):
        error = (got[gradient][-1].double() - true).abs().max().item()
        allowed = 2 * ((rounded - true).abs().max().item() + 2**-8 * true.abs().max().item())
        found[gradient] = [error, allowed]
        found["passed"] &= error <= allowed
    return found


def groups(shapes: Iterable[Call]) -> list[list[tuple[int, str]]]:
    """(shape, candidate) of each group that has its kernels in common."""
    alike: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
    for call in shapes:
        for name, config in candidates(call).items():
            alike[kernels(call, config)].append((SHAPES.index(call), name))
    return list(alike.values())


def all_values(shapes: list[Call]) -> dict[str, Any]:
    """Of each group in one of several processes, which compile side by side."""
    waiting: list[Any] = [*groups(shapes), *VALUES]
    jobs = [json.dumps(waiting[i::SIDE_BY_SIDE]) for i in range(min(SIDE_BY_SIDE, len(waiting)))]
    command = [sys.executable, __file__, "-", "--groups"]
    running = [
        subprocess.Popen([*command, job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for job in jobs
    ]
    found: dict[str, Any] = {}
    for process, job in zip(running, jobs):
        out, other = process.communicate()[0], []
        for line in out.splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
            else:
                other.append(line)
        if process.returncode:
            found[f"process of {job}"] = {"passed": False, "message": "\n".join(other)[-1500:]}
    return found


def some_values(jobs: list[Any]) -> None:
    """One JSON object a line. A kernel that hangs ends the process."""
    for job in jobs:
        signal.alarm(LIMIT)
        if isinstance(job, str):
            (case,) = (c for c in cases("attention") if c.name == job)
            for r in check_each(ops()["attention"], ("hopper",), case, "cuda", torch.bfloat16):
                found = {"passed": r.passed, "error": r.error, "allowed": r.budget, "message": r.message}
                say(json.dumps({job: found}))
            continue
        for place, name in job:
            try:
                found = check(SHAPES[place], name)
            except (RuntimeError, ValueError, TritonError) as error:  # the others are compiled all the same
                found = {"passed": False, "message": f"{type(error).__name__}: {error}"[:600]}
            say(json.dumps({f"{SHAPES[place]}: {name}": found}))


def cudnn(call: Call, t: Tensors) -> Callable[[], object]:
    q, k, v = (x.detach().requires_grad_() for x in (t.q, t.k, t.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=call.causal, enable_gqa=call.heads != call.kv_heads)
    return lambda: torch.autograd.grad(out, (q, k, v), t.dout, retain_graph=True)


def steps(fn: Callable[[], object], calls: int = 6) -> dict[str, float]:
    """Mean µs of each kernel of a call, in their order, the L2 cache warm."""
    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in found.events():
        if event.device_type is torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.device_time / calls
    return {name: round(us, 2) for name, us in times.items()}


def runs(call: Call, right: dict[str, Any]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Candidates whose values are right, and cuDNN, by name; why who is missing."""
    t = inputs(call, "cuda")
    given, calls, failed = arguments(call, t), {}, {}
    for name, config in candidates(call).items():
        if right.get(f"{call}: {name}", {}).get("passed"):
            calls[name] = lambda config=config: launched(*given, config=config)
    try:
        calls["cudnn"] = cudnn(call, t)
        calls["cudnn"]()
    except RuntimeError as error:
        calls.pop("cudnn", None)
        failed["cudnn"] = str(error)[:200]
    return calls, failed


def timed(call: Call, right: dict[str, Any]) -> dict[str, Any]:
    calls, failed = runs(call, right)
    times = measure(calls, "cuda", rounds=5, budget_ms=2.0)
    given = arguments(call, inputs(call, "meta"))
    plans = {n: planned(*given, config=c) for n, c in candidates(call).items()}
    return {
        "call": str(call), "sizes": tuple(call),
        "us": {name: round(x.median_us, 2) for name, x in times.items()},
        "spread": {name: round(x.spread, 3) for name, x in times.items()},
        "plans": {name: [str(step) for step in plan.steps] for name, plan in plans.items()}, "failed": failed,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--groups", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.groups:
        some_values(json.loads(options.groups))
        return 0
    begun = time.monotonic()
    wanted = [c for c in SHAPES if not options.only or c.dim == int(options.only.removeprefix("dim="))]
    if options.dry:
        for call in wanted:
            for name, config in candidates(call).items():
                say(call, name, *planned(*arguments(call, inputs(call, "meta")), config=config).lines())
        say(len(groups(wanted)), "groups of kernels")
        return 0
    values = all_values(wanted)
    found = {"values": values, "values_seconds": time.monotonic() - begun, "rows": [], "torch": torch.__version__}
    wrong = {name: x for name, x in values.items() if not x["passed"]}
    say(len(values), "values,", len(wrong), "wrong,", round(time.monotonic() - begun, 1), "s", json.dumps(wrong))
    for call in wanted:
        if time.monotonic() - begun > options.seconds:
            say("no time left for", call)
            continue
        row = timed(call, values)
        found["rows"].append(row)
        say(call, json.dumps(row["us"]), row["failed"] or "")
        Path(options.out).write_text(json.dumps(found), encoding="utf-8")
        torch.cuda.empty_cache()
    for row in found["rows"]:
        if time.monotonic() - begun < options.seconds:
            row["kernels"] = {name: steps(fn) for name, fn in runs(Call(*row["sizes"]), values)[0].items()}
            torch.cuda.empty_cache()
    Path(options.out).write_text(json.dumps(found), encoding="utf-8")
    say(round(time.monotonic() - begun, 1), "s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
