"""What the first training step of an optimised model costs, on one GPU, by whether kernels are in Triton's cache.

    python benchmarks/first_call.py results.json [--family llama-1.5b] [--variant optimize] [--profile] [--timeline]

Each row is a process of its own that has imported PyTorch and transformers and holds the model on the GPU: the seconds
of the call that changes it, with the import of the rules, and of its first three steps. Cold: Triton's cache is empty.
Warm: the same cache in the next process. Eager: the model as it is. --profile: the functions of the warm process that
took the most. --timeline: when the cold process compiled each kernel, in seconds from the first step on, and by which
thread; a kernel that a thread of ours compiled and the launching one compiled again was compiled ahead in vain. Needs
transformers.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import provenance, save, say
from model_steps import FAMILIES, VARIANTS, built, stepper


def noting_compilations(timeline: list[tuple[float, float, str, str]]) -> None:
    """Have (begin, end, thread, kernel) of each compilation by Triton from now on added to `timeline`."""
    import triton

    plain = triton.compiler.compile

    def compiled(source: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return plain(source, *args, **kwargs)
        finally:
            timeline.append((begun, time.perf_counter(), threading.current_thread().name, source.name))

    triton.compiler.compile = compiled  # a kernel asks for it when it is first launched


def measured(family: str, variant: str, profile: bool, timeline: bool) -> dict[str, Any]:
    """The row of this process."""
    import torch

    compilations: list[tuple[float, float, str, str]] = []
    if timeline:
        noting_compilations(compilations)

    model, loss_of = built(FAMILIES[family])
    torch.cuda.synchronize()
    seconds, marks = {}, cProfile.Profile()
    if profile:
        torch.autograd.set_multithreading_enabled(False)  # or the profile sees no backward
        marks.enable()
    start = time.perf_counter()
    VARIANTS[variant](model)
    seconds["change_s"] = time.perf_counter() - start
    step, zero = stepper(model, loss_of), time.perf_counter()
    for number in ("first", "second", "third"):
        start = time.perf_counter()
        step().item()
        seconds[f"{number}_step_s"] = time.perf_counter() - start
        marks.disable()
    row: dict[str, Any] = {name: round(value, 3) for name, value in seconds.items()}
    if profile:
        told = io.StringIO()
        pstats.Stats(marks, stream=told).sort_stats("cumtime").print_stats(70)
        row["profile"] = [line[:150] for line in told.getvalue().splitlines() if line.strip()]
    if timeline:
        row["timeline"] = [
            f"{begun - zero:6.2f} to {ended - zero:6.2f} s  {thread:<16} {kernel}"
            for begun, ended, thread, kernel in sorted(compilations)
        ]
    return row


def in_process(family: str, variant: str, cache: str, *flags: str) -> dict[str, Any]:
    """The row of a fresh process with this cache."""
    command = [sys.executable, __file__, os.devnull, "--here", "--family", family, "--variant", variant]
    told = subprocess.run(
        [*command, *flags],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode:
        raise RuntimeError(told.stderr[-2000:])
    return json.loads(told.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="llama-1.5b")
    parser.add_argument("--variant", choices=VARIANTS, default="optimize")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        say(json.dumps(measured(given.family, given.variant, given.profile, given.timeline)))
        return 0
    rows = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, variant in (("eager", "eager"), ("cold", given.variant), ("warm", given.variant)):
            asked = ["--profile"] * (given.profile and name == "warm") + ["--timeline"] * (
                given.timeline and name == "cold"
            )
            row = rows[name] = in_process(given.family, variant, cache, *asked)
            for line in row.pop("profile", []) + row.pop("timeline", []):
                say(line)
            say(f"{name:<6} {row}")
    save(given.results, {**provenance(), given.family: rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
