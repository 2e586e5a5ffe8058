"""Check kernels in Gluon on a CPU: `python -m tilesmith.validate.gluon attention [--case d64_small] [--seeds 5]`.

One line for each case that a backend serves: its worst error beside what is allowed, the device kernels that ran,
seconds. Without --case the small cases. Exits with 1 where a value was wrong or a kernel failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels in Triton's dialect are not to be compiled

from tilesmith.engine import Case, Op, cases, ops
from tilesmith.engine.backends import in_gluon
from tilesmith.validate.cases import backends_of
from tilesmith.validate.gluon.compare import check

SMALL = {"interpret", "compile"}


def told(op: Op, backend: str, case: Case, seed: int) -> Iterator[tuple[bool, str]]:
    """Of each 16-bit dtype whether it passed, and the line."""
    for dtype in (d for d in case.dtypes if d.itemsize == 2):
        begun, name = time.monotonic(), f"{backend} {case.name} {dtype} seed {seed}"
        try:
            result, ran = check(op, backend, case, dtype, seed)
        except Exception as problem:  # whatever a kernel raises is what is asked for
            where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(_frames(problem)))
            yield False, f"{name}: {type(problem).__name__}: {problem} ({where})"
            continue
        if ran:
            seconds = time.monotonic() - begun
            said = result.message or f"{result.error:.2e} of {result.budget:.2e}"
            yield result.passed, f"{name}: {said}, {', '.join(ran)}, {seconds:.1f} s"


def _frames(problem: BaseException) -> list[traceback.FrameSummary]:
    return traceback.extract_tb(problem.__traceback__)[-3:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.gluon", description=__doc__)
    parser.add_argument("op", choices=sorted(name for name, op in ops().items() if any(map(in_gluon, backends_of(op)))))
    parser.add_argument("--case", action="append", help="by name, of any size. Repeatable")
    parser.add_argument("--backend", help="all in Gluon by default")
    parser.add_argument("--seeds", type=int, default=1, help="how many orders of each")
    given = parser.parse_args()
    op, right, ran = ops()[given.op], True, 0
    for backend in [given.backend] if given.backend else [b for b in backends_of(op) if in_gluon(b)]:
        for case in cases(given.op):
            if case.name in given.case if given.case else SMALL & case.tags:
                for seed in range(given.seeds):
                    for passed, line in told(op, backend, case, seed):
                        sys.stdout.write(("" if passed else "WRONG ") + line + "\n")
                        right, ran = right and passed, ran + 1
    sys.stdout.write(f"{ran} ran\n")
    return int(not right or not ran)


if __name__ == "__main__":
    sys.exit(main())
