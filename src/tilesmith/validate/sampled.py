"""Cases of random sizes, every kernel on each against one oracle: `tilesmith verify --random`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilesmith.engine import ops
from tilesmith.engine.backends import REFERENCE
from tilesmith.engine.registry import family_of
from tilesmith.validate.cases import Result, backends_on, check_each


def kinds(op_name: str) -> Mapping[str, Any]:
    """The kinds of random cases of an op, by name, from the `cases/random_sizes.py` of its family; {} without one."""
    family = family_of(ops()[op_name].reference.__module__)
    if not family.startswith("tilesmith.ops.") or not hasattr(importlib.import_module(f"{family}.cases"), "__path__"):
        return {}
    home = f"{family}.cases.random_sizes"
    return {} if importlib.util.find_spec(home) is None else importlib.import_module(home).SAMPLES.get(op_name, {})


def run_sampled(names: Sequence[str] | None, device: torch.device | str, count: int) -> Iterator[Result]:
    """`count` cases of each named op (default: all that have random cases), as many of one kind as of another."""
    for name in names or [n for n in sorted(ops()) if kinds(n)]:
        for kind, numbers in shared_out(name, count):
            yield from check_kind(name, kind, device, numbers)


def shared_out(op_name: str, count: int) -> Iterator[tuple[str, range]]:
    """The op's kinds and the numbers of their cases, `count` in all."""
    every = list(kinds(op_name))
    for place, kind in enumerate(every):
        yield kind, range((count + len(every) - 1 - place) // len(every))


def check_kind(op_name: str, kind: str, device: torch.device | str, numbers: Sequence[int]) -> Iterator[Result]:
    """The op's kernels on this device on some cases of one kind; the reference where there are none."""
    op, kind_of = ops()[op_name], kinds(op_name)[kind]
    device = torch.device(device)
    backends = [b for b in backends_on(op, device) if b not in kind_of.without]
    backends = [b for b in backends if b != REFERENCE] or [REFERENCE]
    for number in numbers:
        case = kind_of.sample(kind, number)
        for dtype in case.dtypes:
            yield from check_each(op, backends, case, device, dtype, runs=1)
