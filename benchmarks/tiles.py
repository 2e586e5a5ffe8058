"""What the scripts that compare tiles of attention's kernels have in common (`forward_tiles.py`, `gradient_tiles.py`).

Values come first, in several processes, of which one ends where a kernel takes 60 seconds; they also fill Triton's
cache. What is wrong or missing there is not timed. Then each shape's candidates take turns, beside cuDNN.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from common import provenance, save, say
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.errors import TritonError

from tilesmith.engine import cases, ops
from tilesmith.engine.timing import measure
from tilesmith.validate.cases import check_each

LIMIT = 60  # seconds of a group of values
SIDE_BY_SIDE = 16
OPTIONS = {
    "window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0, "max_seqlen_q": 0, "max_seqlen_k": 0,
    "block_q": 128, "block_k": 128, "deterministic": False, "output_mask": (True, True, True, False, False),
}  # fmt: skip


class Call(NamedTuple):
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.heads}/{self.kv_heads}, D{self.dim}{', causal' * self.causal}"


def calls(*sizes: Sequence[int]) -> tuple[Call, ...]:
    return tuple(Call(*one, bool(causal)) for *one, causal in sizes)


def drawn(seed: int, dims: Sequence[int], count: int) -> tuple[Call, ...]:
    """Calls of at most 64 batch rows and about a billion scores, each dim as often as the others."""
    r, found = random.Random(seed), []
    while len(found) < count:
        tokens, heads, group = int(2 ** r.uniform(7, 13)), r.choice((4, 8, 12, 16, 24, 32)), r.choice((1, 1, 1, 4))
        batch = min(max(1, int(2 ** r.uniform(25, 30) / (heads * tokens**2))), 64)
        found.append(Call(batch, tokens, heads, heads // group, dims[len(found) % len(dims)], r.random() < 0.5))
    return tuple(found)


def tokens_first(call: Call, device: str, *heads: int) -> list[torch.Tensor]:
    """Random tensors of so many heads, of tokens first in memory, as models have them."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(1)
    shapes = [(call.batch, call.tokens, n, call.dim) for n in heads]
    return [
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes
    ]


def masked(scores: torch.Tensor, causal: bool) -> torch.Tensor:
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def cudnn_forward(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=call.causal, enable_gqa=call.heads != call.kv_heads)


class Study(ABC):
    """Candidates of a plan. script: its file. shapes: what is timed. cases: names of attention's, whose values are
    checked with what serves them. reference: the function whose arguments an op takes."""

    script: str
    shapes: tuple[Call, ...]
    cases: tuple[str, ...]
    reference: Callable[..., Any]
    dims: tuple[int, ...] = (72, 80, 88, 96)  # of calls that are drawn

    @abstractmethod
    def candidates(self, call: Call) -> dict[str, Any]:
        """The configurations that are compared, by name."""

    @abstractmethod
    def inputs(self, call: Call, device: str) -> Any:
        """A named tuple of tensors, with their names in the reference."""

    @abstractmethod
    def planned(self, *args: Any, config: Any) -> Any:
        """The plan of the op's arguments."""

    @abstractmethod
    def launched(self, *args: Any, config: Any) -> Any:
        """What that plan gives."""

    @abstractmethod
    def check(self, call: Call, name: str) -> dict[str, Any]:
        """Whether a candidate's values passed, with their errors."""

    @abstractmethod
    def cudnn(self, call: Call, tensors: Any) -> Callable[[], object]:
        """The same by cuDNN."""

    def arguments(self, call: Call, tensors: Any) -> list[Any]:
        code, named = self.reference.__code__, OPTIONS | tensors._asdict() | {"causal": call.causal}
        return [named.get(name) for name in code.co_varnames[: code.co_argcount]]

    def plan_of(self, call: Call, config: Any) -> Any:
        return self.planned(*self.arguments(call, self.inputs(call, "meta")), config=config)

    def groups(self, shapes: Iterable[Call]) -> list[list[tuple[Call, str]]]:
        """(shape, candidate) of each group that has its kernels in common."""
        alike: dict[str, list[tuple[Call, str]]] = collections.defaultdict(list)
        for call in shapes:
            for name, config in self.candidates(call).items():
                kernels = [(step.kernel, sorted(step.constants.items())) for step in self.plan_of(call, config).steps]
                alike[repr(kernels)].append((call, name))
        return list(alike.values())

    def all_values(self, shapes: Iterable[Call], cases: Iterable[str]) -> dict[str, Any]:
        """Of each group and case in one of several processes, which compile side by side."""
        waiting: list[Any] = [*self.groups(shapes), *cases]
        jobs = [json.dumps(waiting[i::SIDE_BY_SIDE]) for i in range(min(SIDE_BY_SIDE, len(waiting)))]
        command = [sys.executable, self.script, "-", "--groups"]
        running = [
            subprocess.Popen([*command, job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for job in jobs
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

    def some_values(self, jobs: list[Any]) -> None:
        """One JSON object a line. A kernel that hangs ends the process."""
        for job in jobs:
            signal.alarm(LIMIT)
            if isinstance(job, str):
                (case,) = (c for c in cases("attention") if c.name == job)
                dtype = (torch.bfloat16, torch.float16)[self.cases.index(job) % 2]
                for r in check_each(ops()["attention"], ("hopper",), case, "cuda", dtype):
                    found = {"passed": r.passed, "error": r.error, "allowed": r.budget, "message": r.message}
                    say(json.dumps({f"{job} {dtype}": found}))
                continue
            for sizes, name in job:
                call = Call(*sizes)
                try:
                    found = self.check(call, name)
                except (RuntimeError, ValueError, TritonError) as error:  # the others are compiled all the same
                    found = {"passed": False, "message": f"{type(error).__name__}: {error}"[:600]}
                say(json.dumps({f"{call}: {name}": found}))

    def runs(self, call: Call, right: dict[str, Any]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
        """Candidates whose values are right, and cuDNN, by name; why who is missing."""
        tensors = self.inputs(call, "cuda")
        given, found, failed = self.arguments(call, tensors), {}, {}
        for name, config in self.candidates(call).items():
            if right.get(f"{call}: {name}", {}).get("passed"):
                found[name] = lambda config=config: self.launched(*given, config=config)
        try:
            found["cudnn"] = self.cudnn(call, tensors)
            found["cudnn"]()
        except RuntimeError as error:
            found.pop("cudnn", None)
            failed["cudnn"] = str(error)[:200]
        return found, failed

    def timed(self, call: Call, right: dict[str, Any]) -> dict[str, Any]:
        found, failed = self.runs(call, right)
        times = measure(found, "cuda", rounds=5, budget_ms=2.0)
        plans = {name: self.plan_of(call, config) for name, config in self.candidates(call).items()}
        return {
            "call": str(call), "sizes": tuple(call),
            "us": {name: round(x.median_us, 2) for name, x in times.items()},
            "spread": {name: round(x.spread, 3) for name, x in times.items()},
            "plans": {name: [str(step) for step in plan.steps] for name, plan in plans.items()}, "failed": failed,
        }  # fmt: skip

    def finish(self, rows: list[dict[str, Any]], values: dict[str, Any], until: float) -> None:
        """What is added to the rows when all are timed; until: the time.monotonic() at which there is none left."""
        return

    def main(self, about: str | None) -> int:
        """Exits with 1 where a value was wrong."""
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("out")
        parser.add_argument("--only", default="", help="dim=64: shapes of that head dim, or heads=71, and no cases")
        parser.add_argument("--drawn", type=int, help="a seed, from which shapes are drawn in place of the script's")
        parser.add_argument("--count", type=int, default=10, help="of those that are drawn")
        parser.add_argument("--seconds", type=float, default=100.0)
        parser.add_argument("--dry", action="store_true", help="plans alone, without a GPU")
        parser.add_argument("--groups", default="", help=argparse.SUPPRESS)
        options = parser.parse_args()
        torch.backends.cuda.matmul.allow_tf32 = False
        if options.groups:
            self.some_values(json.loads(options.groups))
            return 0
        begun = time.monotonic()
        shapes = self.shapes if options.drawn is None else drawn(options.drawn, self.dims, options.count)
        field, _, value = options.only.partition("=")
        wanted = [c for c in shapes if not field or getattr(c, field) == int(value)]
        if options.dry:
            for call in wanted:
                for name, config in self.candidates(call).items():
                    say(call, name, *self.plan_of(call, config).lines())
            say(len(self.groups(wanted)), "groups of kernels")
            return 0
        values = self.all_values(wanted, () if options.only else self.cases)
        found = {**provenance(), "values": values, "values_seconds": time.monotonic() - begun, "rows": []}
        wrong = {name: x for name, x in values.items() if not x["passed"]}
        say(len(values), "values,", len(wrong), "wrong,", round(time.monotonic() - begun, 1), "s", json.dumps(wrong))
        for call in wanted:
            if time.monotonic() - begun > options.seconds:
                say("no time left for", call)
                continue
            row = self.timed(call, values)
            found["rows"].append(row)
            say(call, json.dumps(row["us"]), row["failed"] or "")
            save(options.out, found)
            torch.cuda.empty_cache()
        self.finish(found["rows"], values, begun + options.seconds)
        save(options.out, found)
        say(round(time.monotonic() - begun, 1), "s")
        return 1 if wrong else 0
