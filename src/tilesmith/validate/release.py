"""Another release of Triton on a GPU: `python -m tilesmith.validate.release values` and `... times SITE SITE OP...`.

values: every op on its small cases and on drawn ones, in 16 bits, on the kernels in Gluon and in Triton, by `--workers`
processes; nothing is tried or refused beforehand. times: our own kernels on their benchmark rows under the Tritons of
two folders ("" for the installed one), in processes that take turns, and what the second takes of the first's time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, cases, ops, releases
from tilesmith.engine.backends import in_gluon
from tilesmith.engine.timing import measure
from tilesmith.engine.trial import TRUST
from tilesmith.validate.cases import backends_of, check_each, each_output
from tilesmith.validate.sampled import kinds, shared_out

LONGEST = 600  # tokens of drawn cases


def subjects(names: Sequence[str], count: int) -> Iterator[tuple[str, Case, torch.dtype]]:
    """Ops with kernels in Triton or Gluon, on their small cases and on `count` drawn ones, in 16 bits."""
    for name, op in sorted(ops().items()):
        if name.endswith("_vjp") or not _written(name) or (names and name not in names):
            continue
        every = [case for case in cases(name) if "test" in case.tags]
        for kind, numbers in shared_out(name, count):
            every += [kinds(name)[kind].sample(kind, number, LONGEST) for number in numbers]
        yield from ((op.name, case, dtype) for case in every for dtype in case.dtypes if dtype.itemsize == 2)


def _written(name: str) -> list[str]:
    return [b for b in backends_of(ops()[name]) if in_gluon(b) or b.startswith("triton")]


def check_part(names: Sequence[str], part: int, parts: int, count: int, seconds: float) -> dict:
    """How many checks every `parts`-th subject took, what was wrong, and how many subjects `seconds` left out."""
    ran, wrong, left, until = 0, [], 0, time.monotonic() + seconds
    for place, (name, case, dtype) in enumerate(subjects(names, count)):
        if place % parts == part:
            if time.monotonic() > until:
                left += 1
                continue
            for result in check_each(ops()[name], _written(name), case, "cuda", dtype):
                ran += not result.message.startswith("rejects")
                if not result.passed:
                    wrong.append(f"{result.op} {result.kernel} {result.case} {result.dtype}: {result.message}")
    return {"ran": ran, "wrong": wrong, "left": left}


def values(names: Sequence[str], workers: int, count: int, seconds: float) -> int:
    """Check all subjects by so many processes; prints one JSON object. 0 when all ran and none was over its budget."""
    command = [sys.executable, "-m", "tilesmith.validate.release", "part", "--workers", str(workers)]
    command += ["--count", str(count), "--seconds", str(seconds), *names]
    environment = {**os.environ, TRUST: "1"}
    started = [
        subprocess.Popen([*command, "--part", str(part)], env=environment, stdout=subprocess.PIPE, text=True)
        for part in range(workers)
    ]
    told = [process.communicate()[0] for process in started]
    ended = [process.returncode for process in started]
    found = [json.loads(text.splitlines()[-1]) for text, code in zip(told, ended) if code == 0]
    wrong = [line for part in found for line in part["wrong"]]
    ran, left = (sum(part[key] for part in found) for key in ("ran", "left"))
    summary = {"triton": releases.installed(), "torch": torch.__version__, "ran": ran, "left": left}
    sys.stdout.write(json.dumps(summary | {"exit_codes": ended, "wrong": wrong}, indent=1) + "\n")
    return int(bool(wrong) or any(ended) or bool(left) or not ran)


def time_rows(names: Sequence[str], chosen: Sequence[str]) -> dict[str, float]:
    """Medians in µs of the benchmark rows of ops, forward and backward, on the kernels that serve them; of the cases
    `chosen` if there are any. Each is told on stderr when it is known, for a run that may not reach its end."""
    found: dict[str, float] = {}

    def keep(row: str, us: float) -> None:
        found[row] = us
        sys.stderr.write(f"Triton {releases.installed()}: {row} {us:.1f} us\n")

    for name in names:
        op = ops()[name]
        rows = [case for case in cases(name) if "bench" in case.tags and torch.bfloat16 in case.dtypes]
        for case in (case for case in rows if not chosen or case.name in chosen):
            args = op.bind((), case.build(torch.device("cuda"), torch.bfloat16, case.generator("cuda")))
            leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
            with torch.no_grad():
                timed = measure({"forward": lambda op=op, args=args: op(*args)}, "cuda")
            keep(f"{name} {case.name} forward", timed["forward"].median_us)
            outs = [o for o in each_output(op(*args)) if o.requires_grad]
            if leaves and outs:
                cotangents = [torch.ones_like(o) for o in outs]

                def backward(outs=outs, leaves=leaves, cotangents=cotangents):
                    return torch.autograd.grad(outs, leaves, cotangents, retain_graph=True, allow_unused=True)

                keep(f"{name} {case.name} backward", measure({"b": backward}, "cuda")["b"].median_us)
    return found


def times(sites: Sequence[str], names: Sequence[str], rounds: int, chosen: Sequence[str]) -> int:
    """Time the rows under both Tritons, in turns; prints one JSON object, its ratios sorted."""
    found: list[dict[str, list[float]]] = [{}, {}]
    for turn in range(2 * rounds):
        which = (turn + turn // 2) % 2  # 0 1 1 0 0 1 ...
        path = os.pathsep.join(filter(None, [sites[which], os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "tilesmith.validate.release", "rows", *names]
        command += [word for case in chosen for word in ("--case", case)]
        environment = {**os.environ, TRUST: "1", "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        for row, us in json.loads(done.stdout.splitlines()[-1]).items():
            found[which].setdefault(row, []).append(us)
    medians = [{row: statistics.median(us) for row, us in side.items()} for side in found]
    rows = {row: [medians[1][row] / us, us, medians[1][row]] for row, us in medians[0].items() if row in medians[1]}
    ratios = dict(sorted(rows.items(), key=lambda row: -row[1][0]))
    mean = statistics.geometric_mean([ratio for ratio, _, _ in ratios.values()])
    sys.stdout.write(json.dumps({"geometric_mean": mean, "second_of_first": ratios}, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.release", description=__doc__)
    parser.add_argument("what", choices=("values", "times", "part", "rows"), help="part and rows: one process of these")
    parser.add_argument("names", nargs="*", help="of times: two folders, then ops; else ops (all)")
    parser.add_argument("--workers", type=int, default=8, help="processes at once on one GPU")
    parser.add_argument("--count", type=int, default=40, help="drawn cases of each op that has some")
    parser.add_argument("--rounds", type=int, default=2, help="of times: processes for each folder")
    parser.add_argument("--case", action="append", default=[], help="of times: only this case's rows. Repeatable")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of values: check nothing more after them")
    chosen = parser.parse_intermixed_args(arguments)  # options may stand between what and names
    if chosen.what == "values":
        return values(chosen.names, chosen.workers, chosen.count, chosen.seconds)
    if chosen.what == "times":
        if len(chosen.names) < 3:
            parser.error("times takes two folders and at least one op")
        return times(chosen.names[:2], chosen.names[2:], chosen.rounds, chosen.case)
    done = (
        check_part(chosen.names, chosen.part, chosen.workers, chosen.count, chosen.seconds)
        if chosen.what == "part"
        else time_rows(chosen.names, chosen.case)
    )
    sys.stdout.write(json.dumps(done) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
