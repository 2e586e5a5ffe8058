"""Memory accesses and barriers of Hopper's kernels under compute-sanitizer: `python -m tilesmith.validate.sanitized`.

memcheck and synccheck only: racecheck knows neither what TMA writes nor the transaction
counts that readers wait for, and reports every such read as a race.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tilesmith.engine import Case, Op, cases, ops
from tilesmith.validate.cases import Result, backends_of, check_each
from tilesmith.validate.sampled import kinds, shared_out

TOOLS = ("memcheck", "synccheck")
LONGEST = 300  # tokens of sampled cases


def hopper_kernels() -> list[str]:
    """Names of the device kernels in the Hopper folders of the families, and in what families share for them: what the
    sanitizer is to watch, since torch's own kernels would take minutes."""
    package = Path(__file__).parents[1]
    texts = [path.read_text() for path in (*package.glob("ops/*/hopper/*.py"), *package.glob("device/gluon/*.py"))]
    return sorted(set(re.findall(r"^def (\w+_kernel)\(", "\n".join(texts), re.MULTILINE)))


def _hopper(op: Op) -> list[str]:
    return [b for b in backends_of(op) if b.startswith("hopper")]


def subjects(count: int) -> Iterator[tuple[str, Case, torch.dtype]]:
    """Ops that have a kernel for Hopper, each on its small cases and on `count` sampled ones, in 16 bits, or in fp32
    where a case has no others, as those of 8-bit numbers."""
    for name, op in sorted(ops().items()):
        if name.endswith("_vjp") or not _hopper(op):
            continue
        every = [case for case in cases(name) if "test" in case.tags]
        for kind, numbers in shared_out(name, count):
            every += [kinds(name)[kind].sample(kind, number, LONGEST) for number in numbers]
        for case in every:
            short = [dtype for dtype in case.dtypes if dtype.itemsize == 2]
            yield from ((name, case, dtype) for dtype in short or case.dtypes if dtype.itemsize < 8)


def check_part(part: int, parts: int, count: int) -> Iterator[Result]:
    """Every `parts`-th subject, on Hopper's kernels that take it; one call each, so that nothing is replayed."""
    for place, (name, case, dtype) in enumerate(subjects(count)):
        if place % parts == part:
            op = ops()[name]
            yield from check_each(op, _hopper(op), case, "cuda", dtype, runs=1)


def report(part: int, parts: int, count: int) -> int:
    """Print what each kernel was checked on, and what was wrong. 0 when nothing was."""
    ran: Counter[str] = Counter()
    wrong = 0
    for result in check_part(part, parts, count):
        ran[f"{result.op} {result.kernel}"] += not result.message.startswith("rejects")
        if not result.passed:
            wrong += 1
            sys.stdout.write(f"{result.op} {result.kernel} {result.case}: {result.message}\n")
    taken = ", ".join(f"{kernel} {times}" for kernel, times in (+ran).items())
    sys.stdout.write(f"part {part}: {sum(ran.values())} checks ({taken}), {wrong} over their budget\n")
    return int(wrong > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part under each tool, a process each, and print what they print. 0 when some checked, and all clean."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.sanitized", description=__doc__)
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of compute-sanitizer ({' '.join(TOOLS)})")
    parser.add_argument("--count", type=int, default=50, help="sampled cases of each op that has some")
    parser.add_argument("--workers", type=int, default=4, help="processes at once, each with its part of the cases")
    parser.add_argument("--part", type=int, help="check this part of --workers in this process, without a tool")
    chosen = parser.parse_args(arguments)
    if chosen.part is not None:
        return report(chosen.part, chosen.workers, chosen.count)
    # a tensor's end is only known where each has an allocation of its own
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    module = [sys.executable, "-m", "tilesmith.validate.sanitized", "--workers", str(chosen.workers)]
    module += ["--count", str(chosen.count)]
    failed = False
    for tool in chosen.tools:
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        sanitizer += [word for name in hopper_kernels() for word in ("--kernel-name", f"kns={name}")]
        started = [
            subprocess.Popen([*sanitizer, *module, "--part", str(part)], env=env, stdout=subprocess.PIPE, text=True)
            for part in range(chosen.workers)
        ]
        told = [process.communicate()[0] for process in started]
        checks = sum(int(n) for n in re.findall(r"^part \d+: (\d+) checks", "".join(told), re.MULTILINE))
        sys.stdout.write(f"{tool}:\n{''.join(told)}{checks} checks\n")
        failed |= checks == 0 or any(process.returncode != 0 for process in started)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
