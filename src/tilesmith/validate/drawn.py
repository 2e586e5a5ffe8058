"""Cases of random sizes, every kernel on each against one oracle: `python -m tilesmith.validate.drawn attention 50`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilesmith.engine import ops
from tilesmith.engine.backends import REFERENCE
from tilesmith.validate.cases import Result, backends_on, check_each


def kinds(op_name: str) -> Mapping[str, Any]:
    """The kinds of cases that can be drawn for an op, by name, from the `draws.py` of its family; {} without one."""
    family = ops()[op_name].reference.__module__.rpartition(".")[0]
    if not family.startswith("tilesmith.ops.") or importlib.util.find_spec(f"{family}.draws") is None:
        return {}
    return importlib.import_module(f"{family}.draws").DRAWS.get(op_name, {})


def run_drawn(names: Sequence[str] | None, device: torch.device | str, count: int) -> Iterator[Result]:
    """`count` cases of each named op (default: all that cases can be drawn for), as many of one kind as of another."""
    for name in names or [n for n in sorted(ops()) if kinds(n)]:
        every = list(kinds(name))
        for place, kind in enumerate(every):
            yield from check_kind(name, kind, device, range((count + len(every) - 1 - place) // len(every)))


def check_kind(
    op_name: str, kind: str, device: torch.device | str, numbers: Sequence[int], longest: int | None = None
) -> Iterator[Result]:
    """The op's kernels on this device on some cases of one kind; the reference where there are none."""
    op, kind_of = ops()[op_name], kinds(op_name)[kind]
    device = torch.device(device)
    backends = [b for b in backends_on(op, device) if b not in kind_of.without]
    backends = [b for b in backends if b != REFERENCE] or [REFERENCE]
    for number in numbers:
        case = kind_of.draw(kind, number, longest)
        for dtype in case.dtypes:
            yield from check_each(op, backends, case, device, dtype, runs=1)


def main(op_name: str, count: str) -> int:
    """What failed, and how many checks there were; for tools that want one process without the command line's."""
    results = list(run_drawn([op_name], "cuda" if torch.cuda.is_available() else "cpu", int(count)))
    failed = [r for r in results if not r.passed]
    for r in failed:
        sys.stdout.write(f"{r.kernel} {r.case}: {r.message}\n")
    sys.stdout.write(f"{len(results)} checks, {len(failed)} over their budget\n")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
