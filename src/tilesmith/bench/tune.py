"""Tune the kernels of an op on its cases: forward and backward, each on the arguments that really reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.bench.selection import check_named
from tilesmith.engine import Case, Op, cases, ops
from tilesmith.engine.tuning import GAIN, Found, search, tunable


class Tuned(NamedTuple):
    """What a search found for one kernel on one case. args: of the call that it was tuned on."""

    case: Case
    configure: Any
    args: tuple
    found: Found


def tune(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    named: Sequence[str] = (),
    rounds: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[Tuned]:
    """Search on each case tagged "tune" (or `named`), the forward's kernel and then the backward's.

    ValueError where `named` has what is no case of the op, or none for `dtype`.
    """
    op = ops()[name]
    check_named(name, cases(name), named, dtype)
    for case in cases(name):
        if dtype not in case.dtypes or (case.name not in named if named else "tune" not in case.tags):
            continue
        args = op.bind((), case.build(device, dtype, case.generator(device)))
        for target, call in _calls(op, args):
            configure = tunable(target, call)
            if configure is None:
                continue
            told = lambda step, what=f"{case.name}, {configure.name}": progress(f"{what}: {step}")  # noqa: E731
            found = search(configure, call, rounds=rounds, progress=told)
            yield Tuned(case, configure, call, found)


def kept(tuned: Sequence[Tuned]) -> list[Tuned]:
    """What is worth rows: kernels that are faster than by default at one size at least, at all sizes that were tuned.
    A size that is best served by the default would take the row of a neighbour otherwise."""
    faster = {t.configure.name for t in tuned if t.found.gain > GAIN}
    return [t for t in tuned if t.configure.name in faster]


def _calls(op: Op, args: tuple) -> Iterator[tuple[Op, tuple]]:
    """The op with its arguments, without gradients, and its vjp with those that autograd hands it."""
    yield op, tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    if op.vjp is None or not any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return
    seen: list[tuple] = []
    run = op.vjp.run
    op.vjp.run = lambda call, pin: (seen.append(call), run(call, pin))[1]
    try:
        outs = op(*args)
        outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.requires_grad]
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        torch.autograd.grad(outs, leaves, [torch.randn_like(o) for o in outs], allow_unused=True)
    finally:
        del op.vjp.run
    for call in seen[:1]:
        yield op.vjp, tuple(a.detach() if isinstance(a, Tensor) else a for a in call)
