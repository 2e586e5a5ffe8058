"""Attention's forward at head dims from 65 to 96, on one GPU of compute capability 9.0: products of 80 or 96 columns
(`ops.attn.hopper.columns`) in several tiles, beside those of the padded 128 columns and cuDNN.

    PYTHONPATH=src:benchmarks python benchmarks/forward_columns.py results.json [--only dim=80] [--seconds 80] [--dry]

Values come first, in several processes, of which one ends where a kernel takes 60 seconds; they also fill Triton's
cache. What is wrong or missing there is not timed. Then each shape's candidates take turns, beside cuDNN. Exits with 1
where a value was wrong. --only: shapes of a head dim. --dry: plans alone, without a GPU.

"padded" is what served before: the plan of the same kernel with no rest of columns, in tiles of 128 queries and 128
keys. Its machine code is the one from before.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gradient_tiles import LIMIT, SIDE_BY_SIDE, Call, say
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.errors import TritonError

from tilesmith.engine import cases, ops
from tilesmith.engine.timing import measure
from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.plan import hopper_forward as planning
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.shape import shape_of

VALUES = (
    "d96_tiles", "d80_tiles", "d72_causal_tiles", "d80_key_shares", "d80_packed", "d96_128_key_shares",
    "d72_key_shares_behind", "d96_causal_key_shares", "d88_group_of_3", "d96_whole_more_keys",
    "d80_whole_more_queries", "d72_two_programs", "d80_window", "d72_packed_window", "d80_lists", "d96_lists_narrow",
    "d72_64_tiles", "d64_96_tiles", "d192_80_tiles", "dropout_d80", "dropout_d72_packed", "dropout_d96_softcap",
    "d128_tiles", "d192_128_tiles", "d64_causal_tiles", "d128_causal_key_shares",
)  # fmt: skip

SHAPES = tuple(
    Call(*sizes, bool(causal))
    for *sizes, causal in (
        (1, 1696, 16, 16, 72, 0), (16, 729, 16, 16, 72, 0), (2, 4096, 16, 16, 72, 0), (21, 312, 32, 32, 80, 1),
        (8, 1024, 16, 16, 80, 0), (32, 257, 16, 16, 80, 0), (2, 2048, 32, 32, 80, 1), (16, 257, 16, 16, 88, 0),
        (2, 4096, 32, 32, 96, 1), (1, 12280, 32, 32, 96, 1), (4, 1024, 32, 32, 96, 1), (2, 2048, 16, 16, 96, 0),
        (3, 1500, 32, 8, 96, 1), (1, 8192, 16, 16, 80, 1),
    )
)  # fmt: skip

PADDED = HopperConfig(2, 128, 2, v_stages=3)
CANDIDATES = {
    "padded": PADDED,
    "2 x 128": HopperConfig(2, 128, 3, v_stages=4),
    "2 x 128, q 2": HopperConfig(2, 128, 3, 2, 3),
    "2 x 64, q 2": HopperConfig(2, 64, 5, 2),
    "3 x 64": HopperConfig(3, 64, 6),
    "2 x 128 few": HopperConfig(2, 128, 2, v_stages=3),
}


def planned(shape: Any, name: str) -> Any:
    """The plan of a candidate."""
    columns = (lambda dim: 0) if name == "padded" else planning.rest_columns
    with mock.patch.object(planning, "rest_columns", columns):
        return planning.hopper_forward.__wrapped__(shape, arch_named("sm90"), CANDIDATES[name])


_PLANS: dict[Any, Any] = {}


@attention_arguments
def launched(call: Any, *, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by that candidate."""
    from tilesmith.ops.attn.hopper.launch import call_tensors, describe, outputs
    from tilesmith.ops.attn.hopper.launch_forward import KERNELS

    key = shape_of(call), name
    if key not in _PLANS:
        _PLANS[key] = planned(*key)
    plan = _PLANS[key]
    out, lse = outputs(call, plan)
    execute(plan, KERNELS, call_tensors(call, plan, out, lse), describe, call.q.device, call.q.dtype)
    return out, lse


def inputs(call: Call, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens first in memory, as models have them."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(1)

    def made(heads: int) -> torch.Tensor:
        shape = call.batch, call.tokens, heads, call.dim
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

    return made(call.heads), made(call.kv_heads), made(call.kv_heads)


def arguments(call: Call, device: str) -> list[Any]:
    q, k, v = inputs(call, device)
    named = {
        "q": q, "k": k, "v": v, "causal": call.causal, "window_left": -1, "window_right": -1, "softcap": 0.0,
        "dropout_p": 0.0, "max_seqlen_q": 0, "max_seqlen_k": 0, "block_q": 128, "block_k": 128,
    }  # fmt: skip
    names = reference.attention.__code__.co_varnames[: reference.attention.__code__.co_argcount]
    return [named.get(name) for name in names]


def exact(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """out and lse of one head in fp64, whose probabilities are rounded to `dtype`."""
    scores = q.double() @ k.double().mT * call.dim**-0.5
    if call.causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(-1)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return (p.to(dtype).double() @ v.double() / p.sum(-1, keepdim=True)).to(dtype).double(), lse


def check(call: Call, name: str) -> dict[str, Any]:
    """Errors of the first and the last head beside twice those of products of the same dtype; of all heads, the
    distance from what padded columns give."""
    given = arguments(call, "cuda")
    q, k, v = given[:3]
    out, lse = launched(*given, name=name)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"passed": True}
    for where, kv in ((0, 0), 0), ((-1, -1), -1):
        one = q[where], k[where[0], kv], v[where[0], kv]
        true, right_lse = exact(call, *one, torch.float64)
        rounded, _ = exact(call, *one, torch.bfloat16)
        error = (out[where].double() - true).abs().max().item()
        allowed = 2 * ((rounded - true).abs().max().item() + 2**-9 * true.abs().max().item())
        error_lse = (lse[where].double() - right_lse).abs().max().item()
        found[f"head {where}"] = [error, allowed, error_lse]
        found["passed"] &= error <= allowed and error_lse <= 1e-3
    padded, padded_lse = launched(*given, name="padded")
    error = (out.float() - padded.float()).abs().max().item()
    found["apart"] = [error, (lse - padded_lse).abs().max().item()]
    found["passed"] &= error <= 2**-7 * padded.abs().max().item() and found["apart"][1] <= 1e-3
    return found


def groups(shapes: Iterable[Call]) -> list[list[tuple[int, str]]]:
    """(shape, candidate) of each group that has its kernels in common."""
    alike: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
    for call in shapes:
        for name in CANDIDATES:
            plan = plan_of(call, name)
            alike[repr([(step.kernel, sorted(step.constants.items())) for step in plan.steps])].append(
                (SHAPES.index(call), name)
            )
    return list(alike.values())


@attention_arguments
def _shape(call: Any) -> Any:
    return shape_of(call)


def plan_of(call: Call, name: str) -> Any:
    return planned(_shape(*arguments(call, "meta")), name)


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
    from tilesmith.validate.cases import check_each

    for job in jobs:
        signal.alarm(LIMIT)
        if isinstance(job, str):
            (case,) = (c for c in cases("attention") if c.name == job)
            dtype = (torch.bfloat16, torch.float16)[VALUES.index(job) % 2]
            for r in check_each(ops()["attention"], ("hopper",), case, "cuda", dtype):
                found = {"passed": r.passed, "error": r.error, "allowed": r.budget, "message": r.message}
                say(json.dumps({f"{job} {dtype}": found}))
            continue
        for place, name in job:
            try:
                found = check(SHAPES[place], name)
            except (RuntimeError, ValueError, TritonError) as error:  # the others are compiled all the same
                found = {"passed": False, "message": f"{type(error).__name__}: {error}"[:600]}
            say(json.dumps({f"{SHAPES[place]}: {name}": found}))


def runs(call: Call, right: dict[str, Any]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Candidates whose values are right, and cuDNN, by name; why who is missing."""
    given, calls, failed = arguments(call, "cuda"), {}, {}
    for name in CANDIDATES:
        if right.get(f"{call}: {name}", {}).get("passed"):
            calls[name] = lambda name=name: launched(*given, name=name)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                *given[:3], is_causal=call.causal, enable_gqa=call.heads != call.kv_heads
            )

    try:
        cudnn()
        calls["cudnn"] = cudnn
    except RuntimeError as error:
        failed["cudnn"] = str(error)[:200]
    return calls, failed


def timed(call: Call, right: dict[str, Any]) -> dict[str, Any]:
    calls, failed = runs(call, right)
    times = measure(calls, "cuda", rounds=5, budget_ms=2.0)
    return {
        "call": str(call), "sizes": tuple(call),
        "us": {name: round(x.median_us, 2) for name, x in times.items()},
        "spread": {name: round(x.spread, 3) for name, x in times.items()},
        "plans": {name: [str(step) for step in plan_of(call, name).steps] for name in CANDIDATES}, "failed": failed,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=80.0)
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
            for name in CANDIDATES:
                say(call, name, *plan_of(call, name).lines())
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
    Path(options.out).write_text(json.dumps(found), encoding="utf-8")
    say(round(time.monotonic() - begun, 1), "s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
